/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads wait on a condition variable and are woken at once. Processes cannot: a POSIX record lock
 * has no timed wait, so the leading thread tries again with pauses from 0.2 to 10 ms. The pause
 * bounds how late a takeover is; trying costs two system calls.
 */
#include "cache/flight.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "cache/lockfile.h"
#include "cache/record.h"

#define MS UINT64_C(1000000)
#define PAUSE_MIN_NS (MS / 5)
#define PAUSE_MAX_NS (10 * MS)
#define TELL_EVERY_NS (100 * MS)

struct flight {
    struct flight *next;
    struct digest key;
    off_t byte;
    unsigned refs; /* the leader and the waiting threads */
    bool done;
    bool retry; /* the leader gave up before building: the waiting threads try themselves */
    int result;
    struct error error;
    struct cache_value value; /* for the waiting threads, when it could not be stored */
};

struct flights {
    pthread_mutex_t lock;
    pthread_cond_t landed;
    struct flight *list;
    int lock_fd;
    char *dir;
};

struct flights *flights_new(const char *dir, int lock_fd)
{
    struct flights *flights = x_alloc(sizeof *flights);
    pthread_condattr_t attr;

    pthread_mutex_init(&flights->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&flights->landed, &attr);
    pthread_condattr_destroy(&attr);
    flights->lock_fd = lock_fd;
    flights->dir = x_strdup(dir);
    return flights;
}

void flights_free(struct flights *flights)
{
    if (!flights)
        return;
    pthread_mutex_destroy(&flights->lock);
    pthread_cond_destroy(&flights->landed);
    free(flights->dir);
    free(flights);
}

/* Call with the lock held. */
static void unref(struct flight *flight)
{
    if (--flight->refs)
        return;
    cache_value_free(&flight->value);
    free(flight);
}

/* Tells the caller where it waits; 0, or why to stop waiting. */
static int check_wait(struct flights *flights, struct flight_wait *w, pid_t holder,
                      struct error *err)
{
    uint64_t now = clock_ns(), waited_ms = (now - w->started_ns) / MS;
    int64_t timeout_ms = MAX(w->build->timeout_ms, 0);
    char label[RECORD_LABEL_MAX], text[ERROR_TEXT_MAX];

    record_label(w->key->kind, w->key->subject, strlen(w->key->subject), label);
    snprintf(text, sizeof text, "%s: pid %d builds it, waited %llu ms (cache %s)", label,
             (int)holder, (unsigned long long)waited_ms, flights->dir);
    w->waited = true;
    if (waited_ms >= (uint64_t)timeout_ms)
        return error_set(err, ETIMEDOUT, "%s; the limit is %lld ms", text, (long long)timeout_ms);
    if (!w->build->wait || (w->told_ns && now - w->told_ns < TELL_EVERY_NS))
        return 0;
    w->told_ns = now;
    struct cache_wait info = {text, holder, waited_ms};
    if (w->build->wait(w->build->wait_ctx, &info))
        return error_set(err, ECANCELED, "%s; gave up", text);
    return 0;
}

static uint64_t left_ns(const struct flight_wait *w)
{
    uint64_t limit = (uint64_t)MAX(w->build->timeout_ms, 0) * MS,
             passed = clock_ns() - w->started_ns;

    return passed < limit ? limit - passed : 0;
}

/* Waits for another thread's flight; call with the lock held. */
static int join(struct flights *flights, struct flight *flight, struct flight_wait *w,
                struct cache_value *ret_value, struct error *err)
{
    int r = 0;

    flight->refs++;
    while (!flight->done && !r) {
        pthread_mutex_unlock(&flights->lock); /* the callback may take its time */
        r = check_wait(flights, w, getpid(), err);
        pthread_mutex_lock(&flights->lock);
        uint64_t wake = clock_ns() + MIN(left_ns(w), TELL_EVERY_NS);
        struct timespec until = {(time_t)(wake / (1000 * MS)), (long)(wake % (1000 * MS))};
        if (!flight->done && !r)
            pthread_cond_timedwait(&flights->landed, &flights->lock, &until);
    }
    if (flight->done && !flight->retry) {
        r = flight->result < 0 ? flight->result : FLIGHT_AGAIN;
        if (r < 0 && err)
            *err = flight->error;
        if (r > 0 && flight->value.data) {
            ret_value->data = mem_alloc(flight->value.len, 1);
            ret_value->len = flight->value.len;
            if (ret_value->data)
                memcpy(ret_value->data, flight->value.data, flight->value.len);
            r = ret_value->data ? FLIGHT_VALUE : FLIGHT_AGAIN;
        }
    } else if (flight->done)
        r = FLIGHT_AGAIN;
    unref(flight);
    return r;
}

/* Takes the key's byte; 0, or why it stopped waiting for the process that has it. */
static int lock_byte(struct flights *flights, struct flight *flight, struct flight_wait *w,
                     struct error *err)
{
    uint64_t pause = PAUSE_MIN_NS;
    pid_t holder = 0;

    if (flights->lock_fd < 0)
        return 0;
    for (;;) {
        int r = lockfile_try(flights->lock_fd, flight->byte, &holder);
        if (r < 0) /* no locks on this file system: two may build, the second put wins */
            return 0;
        if (!r)
            return 0;
        r = check_wait(flights, w, holder, err);
        if (r < 0)
            return r;
        struct timespec t = {0, (long)MIN(pause, left_ns(w) + 1)};
        nanosleep(&t, NULL);
        pause = MIN(pause * 2, PAUSE_MAX_NS);
    }
}

static void land(struct flights *flights, struct flight *flight)
{
    struct flight **at = &flights->list;

    while (*at != flight)
        at = &(*at)->next;
    *at = flight->next;
    flight->done = true;
    pthread_cond_broadcast(&flights->landed);
    unref(flight);
}

int flight_begin(struct flights *flights, struct flight_wait *w, struct flight **ret_flight,
                 struct cache_value *ret_value, struct error *err)
{
    struct flight *flight;
    int r;

    pthread_mutex_lock(&flights->lock);
    for (flight = flights->list; flight; flight = flight->next)
        if (digest_equal(&flight->key, &w->key->digest)) {
            r = join(flights, flight, w, ret_value, err);
            pthread_mutex_unlock(&flights->lock);
            return r;
        }
    flight = x_alloc(sizeof *flight);
    flight->key = w->key->digest;
    flight->byte = lockfile_byte(&flight->key);
    flight->refs = 1;
    flight->next = flights->list;
    flights->list = flight;
    pthread_mutex_unlock(&flights->lock);

    r = lock_byte(flights, flight, w, err);
    if (r < 0) {
        pthread_mutex_lock(&flights->lock);
        flight->retry = true;
        land(flights, flight);
        pthread_mutex_unlock(&flights->lock);
        return r;
    }
    *ret_flight = flight;
    return 0;
}

void flight_end(struct flights *flights, struct flight *flight, int result,
                const struct cache_value *unstored, const struct error *err)
{
    pthread_mutex_lock(&flights->lock);
    lockfile_unlock(flights->lock_fd, flight->byte);
    flight->result = result;
    if (result < 0 && err)
        flight->error = *err;
    if (unstored && flight->refs > 1) {
        flight->value.data = mem_alloc(unstored->len, 1);
        flight->value.len = unstored->len;
        if (flight->value.data)
            memcpy(flight->value.data, unstored->data, unstored->len);
    }
    land(flights, flight);
    pthread_mutex_unlock(&flights->lock);
}
