/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Filling memory by several threads. They take items in order, so what arrives first is what a
 * forward pass needs first.
 */
#include "engine/load_private.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"

#define THREADS_MAX 8
#define SLOW_BLOCK_MS 2.0 /* to make a huge page; the small ones of 2 MiB take half as long */
#define SLOW_BLOCKS 8 /* so many, or none at all, and more than a quarter: the host lacks them */
#define LOOK_EVERY_NS 50000000

/* ---- huge pages or write(2) ---- */

/* Makes the item's memory present as a huge page, or finds that there are none. */
static void prepare(struct fill *fill, const struct fill_item *item)
{
    double ms;

    if (atomic_load_explicit(&fill->small_pages, memory_order_relaxed))
        return;
    int huge = resident_touch(fill->resident, item->at, &ms);
    unsigned blocks = atomic_fetch_add(&fill->blocks, 1) + 1, slow = 0;
    if (!huge || ms > SLOW_BLOCK_MS)
        slow = atomic_fetch_add(&fill->slow_blocks, 1) + 1;
    if (slow >= SLOW_BLOCKS && slow > blocks / 4 && resident_page(fill->resident) < FILL_BLOCK)
        atomic_store(&fill->small_pages, true);
}

/* A memfd of explicit huge pages takes no write(2) at all. */
uint8_t *fill_place(struct fill *fill, uint64_t at, uint8_t *buffer)
{
    if (resident_page(fill->resident) < FILL_BLOCK &&
        atomic_load_explicit(&fill->small_pages, memory_order_relaxed))
        return buffer;
    return (uint8_t *)resident_data(fill->resident) + at;
}

static int pwrite_all(int fd, const uint8_t *data, size_t n, uint64_t offset, struct error *err)
{
    for (size_t done = 0; done < n;) {
        ssize_t r = fault_hit(FAULT_WRITE)
                        ? (errno = ENOSPC, -1)
                        : pwrite(fd, data + done, n - done, (off_t)(offset + done));
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return error_sys(err, errno, "weights: write of %zu bytes into memory", n - done);
        done += (size_t)r;
    }
    return 0;
}

int fill_put(struct fill *fill, const uint8_t *data, uint64_t at, size_t n, struct error *err)
{
    if (data == (uint8_t *)resident_data(fill->resident) + at)
        return 0;
    return pwrite_all(resident_fd(fill->resident), data, n, at, err);
}

/* ---- workers ---- */

/* Tells how far the memory is whole from its beginning on. */
static void publish(struct fill *fill, size_t index)
{
    uint64_t end = 0;

    pthread_mutex_lock(&fill->lock);
    fill->item_done[index] = true;
    for (; fill->first_open < fill->n_items && fill->item_done[fill->first_open];
         fill->first_open++)
        end = fill->items[fill->first_open].end;
    if (end && fill->filling) /* under the lock: writes of all items before are seen with it */
        filling_advance(fill->filling, end);
    pthread_mutex_unlock(&fill->lock);
}

static void hold_back(struct fill *fill)
{
    uint64_t rate = fill->options->rate;

    while (rate && !atomic_load(&fill->stop)) {
        uint64_t due =
            fill->started_ns + (uint64_t)((double)atomic_load(&fill->done) / (double)rate * 1e9);
        uint64_t now = clock_ns();
        if (now >= due)
            return;
        uint64_t ns = MIN(due - now, (uint64_t)LOOK_EVERY_NS); /* a stop is seen soon */
        nanosleep(&(struct timespec){0, (long)ns}, NULL);
    }
}

static int work_on(struct fill *fill, size_t index, uint8_t *buffer, struct error *err)
{
    const struct fill_item *item = &fill->items[index];

    fault_hit(FAULT_LOAD_MID);
    prepare(fill, item);
    int r = fill->work(fill, item, buffer, err);
    if (r < 0)
        return r;
    atomic_fetch_add(&fill->done, item->bytes);
    publish(fill, index);
    hold_back(fill);
    return 0;
}

static void *worker(void *arg)
{
    struct fill *fill = arg;
    _cleanup_free_ uint8_t *buffer =
        fault_hit(FAULT_ALLOC) ? NULL : aligned_alloc(4096, size_align(fill->buffer_bytes, 4096));
    struct error error = {0};
    int r = buffer ? 0 : error_set(&error, ENOMEM, "no memory for a read buffer");

    while (r == 0 && !atomic_load(&fill->stop)) {
        size_t index = atomic_fetch_add(&fill->next, 1);
        if (index >= fill->n_items)
            break;
        r = work_on(fill, index, buffer, &error);
    }
    pthread_mutex_lock(&fill->lock);
    if (r < 0 && !fill->error.code)
        fill->error = error;
    if (r < 0)
        atomic_store(&fill->stop, true);
    fill->running--;
    pthread_cond_signal(&fill->changed);
    pthread_mutex_unlock(&fill->lock);
    return NULL;
}

static uint32_t thread_count(uint32_t asked)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;

    return asked ? MIN(asked, THREADS_MAX) : (uint32_t)MIN(MAX(n, 1), THREADS_MAX);
}

/* Waits for the workers, telling how far they are every 50 ms. */
static void watch(struct fill *fill)
{
    const struct load_options *options = fill->options;

    pthread_mutex_lock(&fill->lock);
    while (fill->running) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += LOOK_EVERY_NS;
        if (until.tv_nsec >= 1000000000) {
            until.tv_sec++;
            until.tv_nsec -= 1000000000;
        }
        pthread_cond_timedwait(&fill->changed, &fill->lock, &until);
        if (!options->progress || atomic_load(&fill->stop))
            continue;
        pthread_mutex_unlock(&fill->lock);
        int r = options->progress(options->ctx, atomic_load(&fill->done), fill->total);
        pthread_mutex_lock(&fill->lock);
        if (r && !fill->error.code) {
            error_set(&fill->error, ECANCELED, "the load was cancelled");
            atomic_store(&fill->stop, true);
        }
    }
    pthread_mutex_unlock(&fill->lock);
}

static void run_threads(struct fill *fill)
{
    uint32_t n = thread_count(fill->options->threads), started = 0;
    pthread_t threads[THREADS_MAX];

    pthread_mutex_init(&fill->lock, NULL);
    pthread_cond_init(&fill->changed, NULL);
    fill->running = n;
    for (; started < n; started++)
        if (pthread_create(&threads[started], NULL, worker, fill))
            break;
    if (!started)
        worker(fill);
    pthread_mutex_lock(&fill->lock);
    fill->running -= started ? n - started : n - 1;
    pthread_mutex_unlock(&fill->lock);
    watch(fill);
    for (uint32_t i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    pthread_cond_destroy(&fill->changed);
    pthread_mutex_destroy(&fill->lock);
}

int fill_run(struct fill *fill, struct error *err)
{
    fill->item_done = mem_alloc(fill->n_items, sizeof *fill->item_done);
    if (!fill->item_done)
        return error_set(err, ENOMEM, "no memory for a list of %zu pieces", fill->n_items);
    for (size_t i = 0; i < fill->n_items; i++)
        fill->total += fill->items[i].bytes;
    fill->started_ns = clock_ns();
    run_threads(fill);
    free(TAKE(fill->item_done));
    if (fill->error.code) {
        *(err ? err : &(struct error){0}) = fill->error;
        return fill->error.code;
    }
    if (fill->options->progress)
        fill->options->progress(fill->options->ctx, fill->total, fill->total);
    return 0;
}
