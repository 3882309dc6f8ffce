/* SPDX-License-Identifier: Apache-2.0 */
#include "scheduler/pool.h"

#include <string.h>

#define BACKOFF_FIRST_NS UINT64_C(100000000)
#define BACKOFF_MOST_NS UINT64_C(30000000000)

uint64_t pool_backoff_ns(uint32_t failures)
{
    if (!failures)
        return 0;
    if (failures > 9)
        return BACKOFF_MOST_NS;
    uint64_t pause = BACKOFF_FIRST_NS << (failures - 1);
    return pause < BACKOFF_MOST_NS ? pause : BACKOFF_MOST_NS;
}

uint32_t pool_spare(const struct pool_model *model)
{
    uint64_t have = (uint64_t)model->standby + model->starting;
    return have > model->waiting ? (uint32_t)(have - model->waiting) : 0;
}

uint32_t pool_surplus(const struct pool_model *model)
{
    uint32_t spare = pool_spare(model);
    return spare > model->target ? spare - model->target : 0;
}

bool pool_idle(const struct pool_model *model)
{
    return model->place == POOL_PARKED && !model->leased && !model->waiting;
}

/* ---- starts ---- */

/* After a failure one start at a time probes whether it has passed. */
static bool may_start(const struct pool_model *model)
{
    return (model->place == POOL_PARKED || (model->place == POOL_LOADING && model->early)) &&
           !model->blocked && !(model->failures && model->starting);
}

static int next_demand(const struct pool *pool)
{
    int best = -1;

    for (size_t i = 0; i < pool->n; i++) {
        const struct pool_model *m = &pool->models[i];
        if (!may_start(m) || m->waiting <= (uint64_t)m->standby + m->starting)
            continue;
        if (best < 0 || m->waiting_since < pool->models[best].waiting_since)
            best = (int)i;
    }
    return best;
}

static int next_refill(const struct pool *pool, uint64_t *wake_ns)
{
    int best = -1;

    for (size_t i = 0; i < pool->n; i++) {
        const struct pool_model *m = &pool->models[i];
        if (!may_start(m) || m->place != POOL_PARKED || pool_spare(m) >= m->target)
            continue;
        uint32_t bad = m->failures > m->early_deaths ? m->failures : m->early_deaths;
        uint64_t resume = bad ? m->failed_ns + pool_backoff_ns(bad) : 0;
        if (resume > pool->now_ns) {
            *wake_ns = resume < *wake_ns ? resume : *wake_ns;
            continue;
        }
        if (best < 0 || m->used_ns > pool->models[best].used_ns)
            best = (int)i;
    }
    return best;
}

int pool_next_start(const struct pool *pool, enum pool_purpose *ret_purpose, uint64_t *ret_wake_ns)
{
    uint64_t starting = 0, spare = 0, wake = UINT64_MAX;
    bool awaited = pool->short_of_memory;
    int next;

    for (size_t i = 0; i < pool->n; i++) {
        starting += pool->models[i].starting;
        spare += pool_spare(&pool->models[i]);
        awaited |= (pool->models[i].place == POOL_PARKED || pool->models[i].early) &&
                   pool->models[i].waiting;
    }
    *ret_wake_ns = UINT64_MAX;
    if (starting >= pool->max_burst)
        return -1;
    *ret_purpose = POOL_DEMAND;
    next = next_demand(pool);
    if (next >= 0 || spare >= pool->standby_max || awaited)
        return next;
    *ret_purpose = POOL_REFILL;
    next = next_refill(pool, &wake);
    *ret_wake_ns = wake;
    return next;
}

/* ---- admission ---- */

static uint64_t add(uint64_t a, uint64_t b)
{
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

static uint64_t mul(uint64_t a, uint64_t b)
{
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

/* Bytes that evicting frees beside what the spares that are stopped already free. */
static uint64_t evict_gain(const struct pool_model *m, const struct pool_room *room)
{
    uint64_t instances = (uint64_t)m->standby + m->starting - room->stop;
    return add(m->weights_bytes, mul(instances, m->instance_bytes));
}

/* Seconds of loading that a byte saves, over the time since it was last of use. */
static double value_of(const struct pool *pool, const struct pool_model *m)
{
    uint64_t idle = pool->now_ns > m->used_ns ? pool->now_ns - m->used_ns : 0;
    double bytes = (double)m->weights_bytes + 1;
    return ((double)m->reload_ns + 1) / bytes / ((double)idle / 1e9 + 1);
}

/* Stops spares, of the model that has been idle longest first, until `*short_by` is covered. */
static void take_spares(const struct pool *pool, int requester, struct pool_room *rooms,
                        uint64_t *short_by)
{
    while (*short_by) {
        int best = -1;
        for (size_t i = 0; i < pool->n; i++) {
            const struct pool_model *m = &pool->models[i];
            if ((int)i == requester || m->place != POOL_PARKED || rooms[i].stop || !pool_spare(m))
                continue;
            if (best < 0 || m->used_ns < pool->models[best].used_ns)
                best = (int)i;
        }
        if (best < 0)
            return;
        const struct pool_model *m = &pool->models[best];
        uint64_t wanted = (*short_by - 1) / m->instance_bytes + 1;
        uint32_t spare = pool_spare(m);
        rooms[best].stop = wanted < spare ? (uint32_t)wanted : spare;
        uint64_t gain = mul(rooms[best].stop, m->instance_bytes);
        *short_by = gain < *short_by ? *short_by - gain : 0;
    }
}

/* Evicts idle models, the least valuable first, until `*short_by` is covered; returns the slack. */
static uint64_t take_models(const struct pool *pool, int requester, struct pool_room *rooms,
                            uint64_t *short_by)
{
    uint64_t slack = 0;

    while (*short_by) {
        int best = -1;
        for (size_t i = 0; i < pool->n; i++) {
            const struct pool_model *m = &pool->models[i];
            if ((int)i == requester || !pool_idle(m) || rooms[i].evict)
                continue;
            if (best < 0 || value_of(pool, m) < value_of(pool, &pool->models[best]))
                best = (int)i;
        }
        if (best < 0)
            return 0;
        uint64_t gain = evict_gain(&pool->models[best], &rooms[best]);
        rooms[best].evict = true;
        slack = gain > *short_by ? gain - *short_by : 0;
        *short_by = gain < *short_by ? *short_by - gain : 0;
    }
    return slack;
}

/* Gives back what turned out not to be needed: models first, the most valuable first, then spares.
 */
static void prune(const struct pool *pool, struct pool_room *rooms, uint64_t slack)
{
    for (;;) {
        int best = -1;
        for (size_t i = 0; i < pool->n; i++) {
            const struct pool_model *m = &pool->models[i];
            if (!rooms[i].evict || evict_gain(m, &rooms[i]) > slack)
                continue;
            if (best < 0 || value_of(pool, m) > value_of(pool, &pool->models[best]))
                best = (int)i;
        }
        if (best < 0)
            break;
        slack -= evict_gain(&pool->models[best], &rooms[best]);
        rooms[best].evict = false;
    }
    for (;;) {
        int best = -1;
        for (size_t i = 0; i < pool->n; i++) {
            const struct pool_model *m = &pool->models[i];
            if (!rooms[i].stop || rooms[i].evict || m->instance_bytes > slack)
                continue;
            if (best < 0 || m->used_ns > pool->models[best].used_ns)
                best = (int)i;
        }
        if (best < 0)
            return;
        slack -= pool->models[best].instance_bytes;
        rooms[best].stop--;
    }
}

static uint64_t reclaimable(const struct pool *pool, int requester)
{
    static const struct pool_room none;
    uint64_t sum = pool->leaving;

    for (size_t i = 0; i < pool->n; i++) {
        const struct pool_model *m = &pool->models[i];
        if ((int)i == requester)
            continue;
        if (pool_idle(m))
            sum = add(sum, evict_gain(m, &none));
        else if (m->place == POOL_PARKED)
            sum = add(sum, mul(pool_spare(m), m->instance_bytes));
    }
    return sum < pool->charged ? sum : pool->charged;
}

enum pool_verdict pool_admit(const struct pool *pool, int requester, uint64_t need,
                             enum pool_purpose purpose, struct pool_room *rooms,
                             struct pool_shortage *ret_shortage)
{
    uint64_t total = add(pool->charged, need);

    if (pool->n)
        memset(rooms, 0, pool->n * sizeof *rooms);
    if (total <= pool->budget)
        return POOL_ADMIT;
    *ret_shortage =
        (struct pool_shortage){need, pool->budget, pool->charged, reclaimable(pool, requester)};
    if (total - pool->leaving <= pool->budget)
        return POOL_WAIT;
    if (purpose == POOL_REFILL)
        return POOL_REFUSE;

    uint64_t short_by = total - pool->leaving - pool->budget;
    take_spares(pool, requester, rooms, &short_by);
    uint64_t slack = take_models(pool, requester, rooms, &short_by);
    if (short_by) {
        memset(rooms, 0, pool->n * sizeof *rooms);
        return POOL_REFUSE;
    }
    prune(pool, rooms, slack);
    return POOL_ROOM;
}
