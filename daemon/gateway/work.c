/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/work.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/mem.h"

struct queue {
    struct work *head, **tail;
};

struct work_pool {
    pthread_mutex_t lock; /* of the two queues and `stopping` */
    pthread_cond_t wake;
    struct queue todo, done;
    bool stopping;
    int wake_fd; /* eventfd: something is done */
    struct event *event;
    unsigned n_threads;
    pthread_t threads[];
};

static void queue_put(struct queue *q, struct work *work)
{
    work->next = NULL;
    *q->tail = work;
    q->tail = &work->next;
}

static struct work *queue_take_all(struct queue *q)
{
    struct work *first = TAKE(q->head);

    q->tail = &q->head;
    return first;
}

static struct work *take(struct work_pool *pool)
{
    struct work *work;

    pthread_mutex_lock(&pool->lock);
    while (!pool->todo.head && !pool->stopping)
        pthread_cond_wait(&pool->wake, &pool->lock);
    work = pool->todo.head;
    if (work) {
        pool->todo.head = work->next;
        if (!work->next)
            pool->todo.tail = &pool->todo.head;
    }
    pthread_mutex_unlock(&pool->lock);
    return work;
}

static void *worker(void *arg)
{
    struct work_pool *pool = arg;
    struct work *work;

    while ((work = take(pool))) {
        work->run(work);
        pthread_mutex_lock(&pool->lock);
        queue_put(&pool->done, work);
        pthread_mutex_unlock(&pool->lock);
        uint64_t one = 1;
        ssize_t n = write(pool->wake_fd, &one, sizeof one);
        (void)n; /* EAGAIN: the counter is not zero, which is all we want */
    }
    return NULL;
}

static void finish_done(struct work_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    struct work *work = queue_take_all(&pool->done);
    pthread_mutex_unlock(&pool->lock);
    while (work) {
        struct work *next = work->next;
        work->done(work);
        work = next;
    }
}

static void on_done(int fd, short what, void *arg)
{
    uint64_t n;
    ssize_t r = read(fd, &n, sizeof n);

    (void)r;
    finish_done(arg);
}

int work_pool_new(struct event_base *base, unsigned threads, struct work_pool **ret,
                  struct error *err)
{
    struct work_pool *pool = x_alloc(sizeof *pool + threads * sizeof *pool->threads);
    sigset_t all, old;
    int r = 0;

    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->todo.tail = &pool->todo.head;
    pool->done.tail = &pool->done.head;
    pool->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (pool->wake_fd < 0)
        r = error_sys(err, errno, "eventfd");
    else
        pool->event = event_new(base, pool->wake_fd, EV_READ | EV_PERSIST, on_done, pool);
    if (pool->event)
        event_add(pool->event, NULL);
    sigfillset(&all); /* signals are the loop's */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (; r == 0 && pool->n_threads < threads; pool->n_threads++) {
        int e = pthread_create(&pool->threads[pool->n_threads], NULL, worker, pool);
        if (e) {
            r = error_sys(err, e, "worker thread");
            break;
        }
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (r < 0)
        work_pool_free(pool);
    else
        *ret = pool;
    return r;
}

void work_submit(struct work_pool *pool, struct work *work)
{
    pthread_mutex_lock(&pool->lock);
    queue_put(&pool->todo, work);
    pthread_cond_signal(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

void work_pool_free(struct work_pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stopping = true;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (unsigned i = 0; i < pool->n_threads; i++)
        pthread_join(pool->threads[i], NULL);
    finish_done(pool);
    if (pool->event)
        event_free(pool->event);
    fd_close(pool->wake_fd);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}
