/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pool's policy: which instance to start next, what to give up when memory is short, when to
 * try again after a failure. Pure: functions from a snapshot of the manager's state to a decision.
 * Times are nanoseconds of one monotonic clock, injected; sizes are bytes.
 *
 * What the decisions keep, whatever the state:
 *   - nothing that is leased, waited for or being loaded is ever given up;
 *   - a start or a load is admitted only when it fits beside everything that is still charged,
 *     including what is on its way out but has not been given back yet;
 *   - a refill of the pool takes free memory only; it never takes anything from anybody.
 *
 * A model's value per byte is the time to bring it back over the bytes that it frees and the time
 * that nobody has used it: the chance of being wanted soon falls with idleness. The least valuable
 * go first, and whatever turns out not to be needed for the request stays.
 */
#ifndef EMBER_SCHEDULER_POOL_H
#define EMBER_SCHEDULER_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum pool_place {
    POOL_COLD,    /* nothing resident */
    POOL_LOADING, /* on the way; untouchable */
    POOL_PARKED,  /* resident: instances can be started */
    POOL_LEAVING, /* given up; its bytes are counted until the last instance has gone */
};

struct pool_model {
    enum pool_place place;
    uint64_t weights_bytes;  /* charged for it: resident, reserved or not yet given back */
    uint64_t instance_bytes; /* what one more instance takes; > 0 */
    uint32_t target;         /* standbys wanted */
    uint32_t standby, starting, leased;
    uint32_t waiting;       /* spawns that wait for an instance or for the load */
    uint64_t waiting_since; /* of the first of them */
    uint64_t used_ns;       /* last lease, release or load */
    uint64_t reload_ns;     /* how long a load takes */
    uint32_t failures;      /* starts that failed since the last success */
    uint32_t early_deaths;  /* instances that died soon after READY, in a row */
    uint64_t failed_ns;     /* the last of either */
    bool early;             /* LOADING: instances can be started for those who wait */
    bool blocked;           /* no start now: the caller has tried, memory is on its way */
};

struct pool {
    uint64_t now_ns;
    uint64_t budget;
    uint64_t charged; /* everything, `leaving` included */
    uint64_t leaving; /* what has been given up but not been given back yet */
    uint32_t max_burst;
    uint32_t standby_max; /* standbys of all models, by refill */
    bool short_of_memory; /* somebody waits for room that is being made: no refills into it */
    size_t n;
    struct pool_model *models;
};

/* Pause after the n-th failure in a row: 100 ms, doubling, at most 30 s; 0 for none. */
uint64_t pool_backoff_ns(uint32_t failures);

/* So many starts in a row have failed that those who wait are told, instead of waiting on. */
#define POOL_GIVE_UP 3

/* Instances that nobody has claimed: standbys and starting ones beyond those who wait. */
uint32_t pool_spare(const struct pool_model *model);

/* Spares beyond the model's target; the caller stops those that have been idle for a while. */
uint32_t pool_surplus(const struct pool_model *model);

enum pool_purpose {
    POOL_DEMAND, /* somebody waits */
    POOL_REFILL, /* the pool would like it */
};

/*
 * The model of which one instance is to be started now, or -1. Those who wait come first, the
 * longest waiting before others; when nobody waits for a start any more (a refill would only take
 * processor time from theirs) refills, the model used last before others. After a failure
 * starts go one at a time until one succeeds, and refills pause; after early deaths refills pause.
 * *ret_wake_ns: when a pause ends that stands in the way of a refill, UINT64_MAX when none does.
 * Call again after each start.
 */
int pool_next_start(const struct pool *pool, enum pool_purpose *ret_purpose, uint64_t *ret_wake_ns);

enum pool_verdict {
    POOL_ADMIT,  /* fits now */
    POOL_WAIT,   /* will fit when what is leaving has left */
    POOL_ROOM,   /* do what `rooms` says, then it will fit; ask again as it becomes free */
    POOL_REFUSE, /* cannot be made to fit; see struct pool_shortage */
};

/* What one model has to give up. */
struct pool_room {
    uint32_t stop; /* so many spares; with `evict`, all its instances go anyway */
    bool evict;
};

struct pool_shortage {
    uint64_t need, budget, charged;
    uint64_t reclaimable; /* of `charged`: leaving, spare or idle */
};

/*
 * Whether `need` bytes more fit. `requester` is the index of the model that they are for (never
 * evicted, its spares stay), or -1. rooms[pool->n] is filled for POOL_ROOM, else zeroed.
 */
enum pool_verdict pool_admit(const struct pool *pool, int requester, uint64_t need,
                             enum pool_purpose purpose, struct pool_room *rooms,
                             struct pool_shortage *ret_shortage);

/* True when nobody uses the model and it may be given up. */
bool pool_idle(const struct pool_model *model);

#endif
