/* SPDX-License-Identifier: Apache-2.0 */
/* The pool's policy: exact decisions, and random schedules over simulated time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "base/mem.h"
#include "scheduler/pool.h"

#define SECOND UINT64_C(1000000000)

static struct pool_model parked(uint64_t weights, uint64_t instance)
{
    return (struct pool_model){
        .place = POOL_PARKED, .weights_bytes = weights, .instance_bytes = instance, .target = 1};
}

static struct pool pool_of(struct pool_model *models, size_t n)
{
    return (struct pool){.now_ns = 100 * SECOND,
                         .budget = UINT64_MAX,
                         .max_burst = 100,
                         .standby_max = 100,
                         .n = n,
                         .models = models};
}

/* ---- starts ---- */

static void backoff_doubles_up_to_a_limit(void **state)
{
    static const uint64_t ms[] = {0, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000};

    for (uint32_t n = 0; n < ARRAY_LEN(ms); n++)
        assert_int_equal(pool_backoff_ns(n), ms[n] * 1000000);
    assert_int_equal(pool_backoff_ns(UINT32_MAX), 30 * SECOND);
}

/* Starts until the policy has had enough; returns how many, and how many of them were refills. */
static unsigned start_all(struct pool *pool, unsigned *refills)
{
    enum pool_purpose purpose;
    uint64_t wake;
    unsigned n = 0;
    int next;

    *refills = 0;
    while ((next = pool_next_start(pool, &purpose, &wake)) >= 0) {
        pool->models[next].starting++;
        *refills += purpose == POOL_REFILL;
        n++;
        assert_true(n < 1000);
    }
    return n;
}

/* A load that can be attached to: for those who wait alone, and never given up. */
static void early_starts_are_for_those_who_wait(void **state)
{
    struct pool_model m[1] = {parked(10, 1)};
    struct pool_room rooms[1];
    struct pool_shortage shortage;
    struct pool pool = pool_of(m, 1);
    unsigned refills;

    m[0].place = POOL_LOADING;
    m[0].waiting = 2;
    assert_int_equal(start_all(&pool, &refills), 0);
    m[0].early = true;
    assert_int_equal(start_all(&pool, &refills), 2);
    assert_int_equal(refills, 0);
    m[0].starting = m[0].waiting = 0;
    assert_int_equal(start_all(&pool, &refills), 0);
    assert_false(pool_idle(&m[0]));
    pool.budget = pool.charged = 10;
    assert_int_equal(pool_admit(&pool, -1, 5, POOL_DEMAND, rooms, &shortage), POOL_REFUSE);
}

static void starts_cover_those_who_wait_and_the_target(void **state)
{
    struct pool_model m[1] = {parked(10, 1)};
    struct pool pool = pool_of(m, 1);
    unsigned refills;

    assert_int_equal(start_all(&pool, &refills), 1); /* the target alone */
    assert_int_equal(refills, 1);
    m[0] = parked(10, 1);
    m[0].waiting = 5;
    assert_int_equal(start_all(&pool, &refills), 5);
    assert_int_equal(refills, 0);
    m[0].leased = m[0].starting; /* they have got theirs: now the pool */
    m[0].starting = m[0].waiting = 0;
    assert_int_equal(start_all(&pool, &refills), 1);
    assert_int_equal(refills, 1);
    m[0] = parked(10, 1);
    m[0].waiting = 64;
    pool.max_burst = 8;
    assert_int_equal(start_all(&pool, &refills), 8);
    assert_int_equal(refills, 0);
    m[0].place = POOL_LEAVING;
    m[0].starting = 0;
    assert_int_equal(start_all(&pool, &refills), 0);
}

static void refills_respect_the_common_limit(void **state)
{
    struct pool_model m[3] = {parked(10, 1), parked(10, 1), parked(10, 1)};
    struct pool pool = pool_of(m, 3);
    unsigned refills;

    m[0].target = m[1].target = m[2].target = 4;
    m[1].used_ns = 5;
    pool.standby_max = 6;
    assert_int_equal(start_all(&pool, &refills), 6);
    assert_int_equal(m[1].starting, 4); /* used last: first */
    m[2].waiting = 3;                   /* demand does not count against it */
    m[2].starting = 0;
    m[0].starting = 2;
    assert_int_equal(start_all(&pool, &refills), 3);
    assert_int_equal(refills, 0);
}

static void nothing_is_refilled_into_room_that_is_being_made(void **state)
{
    struct pool_model m[2] = {parked(10, 1), parked(10, 1)};
    struct pool pool = pool_of(m, 2);
    unsigned refills;

    pool.short_of_memory = true;
    m[1].waiting = 2;
    assert_int_equal(start_all(&pool, &refills), 2);
    assert_int_equal(refills, 0);
    m[1].waiting = m[1].starting = 0;
    assert_int_equal(start_all(&pool, &refills), 0);
    pool.short_of_memory = false;
    assert_int_equal(start_all(&pool, &refills), 2);
    assert_int_equal(refills, 2);
}

static void the_longest_waiting_goes_first(void **state)
{
    struct pool_model m[3] = {parked(1, 1), parked(1, 1), parked(1, 1)};
    struct pool pool = pool_of(m, 3);
    enum pool_purpose purpose;
    uint64_t wake;

    for (int i = 0; i < 3; i++) {
        m[i].waiting = 1;
        m[i].waiting_since = (uint64_t)(30 - 10 * i);
    }
    assert_int_equal(pool_next_start(&pool, &purpose, &wake), 2);
    assert_int_equal(purpose, POOL_DEMAND);
    m[2].starting = 1;
    assert_int_equal(pool_next_start(&pool, &purpose, &wake), 1);
    m[1].blocked = true;
    assert_int_equal(pool_next_start(&pool, &purpose, &wake), 0);
}

static void failures_slow_refills_down_and_probe_demand(void **state)
{
    struct pool_model m[1] = {parked(1, 1)};
    struct pool pool = pool_of(m, 1);
    enum pool_purpose purpose;
    uint64_t wake;

    m[0].failures = 3;
    m[0].failed_ns = pool.now_ns - SECOND / 10;
    assert_int_equal(pool_next_start(&pool, &purpose, &wake), -1);
    assert_int_equal(wake, m[0].failed_ns + 400000000);
    pool.now_ns = wake;
    assert_int_equal(pool_next_start(&pool, &purpose, &wake), 0);
    assert_int_equal(purpose, POOL_REFILL);

    pool.now_ns = m[0].failed_ns;
    m[0].waiting = 9; /* somebody waits: try now, one at a time */
    assert_int_equal(pool_next_start(&pool, &purpose, &wake), 0);
    assert_int_equal(purpose, POOL_DEMAND);
    m[0].starting = 1;
    assert_int_equal(pool_next_start(&pool, &purpose, &wake), -1);
    m[0].failures = 0;
    assert_int_equal(pool_next_start(&pool, &purpose, &wake), 0);
}

static void early_deaths_slow_refills_down_only(void **state)
{
    struct pool_model m[1] = {parked(1, 1)};
    struct pool pool = pool_of(m, 1);
    enum pool_purpose purpose;
    uint64_t wake;

    m[0].early_deaths = 2;
    m[0].failed_ns = pool.now_ns;
    assert_int_equal(pool_next_start(&pool, &purpose, &wake), -1);
    assert_int_equal(wake, pool.now_ns + 200000000);
    m[0].waiting = 2;
    m[0].starting = 1; /* no probing: they do start */
    assert_int_equal(pool_next_start(&pool, &purpose, &wake), 0);
    assert_int_equal(purpose, POOL_DEMAND);
}

/* A model whose every start fails at once: how often is it tried in ten minutes? */
static void a_crash_loop_does_not_spin(void **state)
{
    struct pool_model m[1] = {parked(1, 1)};
    struct pool pool = pool_of(m, 1);
    enum pool_purpose purpose;
    uint64_t wake, end = pool.now_ns + 600 * SECOND;
    unsigned tries = 0;

    while (pool.now_ns < end) {
        if (pool_next_start(&pool, &purpose, &wake) >= 0) {
            tries++;
            m[0].failures++;
            m[0].failed_ns = pool.now_ns;
        } else {
            assert_true(wake > pool.now_ns && wake != UINT64_MAX);
            pool.now_ns = wake;
        }
    }
    /* 1 + 9 doublings (51.1 s), then one each 30 s: 18 more until 600 s are over. */
    assert_int_equal(tries, 1 + 9 + 18);
}

static void surplus_is_what_exceeds_target_and_waiting(void **state)
{
    struct pool_model m = parked(1, 1);

    m.standby = 4;
    assert_int_equal(pool_surplus(&m), 3);
    m.waiting = 2;
    assert_int_equal(pool_surplus(&m), 1);
    m.waiting = 9;
    assert_int_equal(pool_surplus(&m), 0);
    assert_int_equal(pool_spare(&m), 0);
}

/* ---- admission ---- */

static void account(struct pool *pool)
{
    pool->charged = pool->leaving;
    for (size_t i = 0; i < pool->n; i++) {
        const struct pool_model *m = &pool->models[i];
        if (m->place != POOL_LEAVING)
            pool->charged += m->weights_bytes;
        pool->charged += (uint64_t)(m->standby + m->starting + m->leased) * m->instance_bytes;
    }
}

static void what_fits_is_admitted_and_what_leaves_is_waited_for(void **state)
{
    struct pool_model m[1] = {parked(50, 10)};
    struct pool pool = pool_of(m, 1);
    struct pool_room rooms[1];
    struct pool_shortage s;

    pool.budget = 100;
    account(&pool);
    assert_int_equal(pool_admit(&pool, 0, 50, POOL_DEMAND, rooms, &s), POOL_ADMIT);
    pool.leaving = 20;
    account(&pool);
    assert_int_equal(pool_admit(&pool, 0, 50, POOL_DEMAND, rooms, &s), POOL_WAIT);
    assert_int_equal(pool_admit(&pool, 0, 50, POOL_REFILL, rooms, &s), POOL_WAIT);
    assert_int_equal(pool_admit(&pool, 0, 51, POOL_DEMAND, rooms, &s), POOL_REFUSE);
    assert_int_equal(s.need, 51);
    assert_int_equal(s.budget, 100);
    assert_int_equal(s.charged, 70);
    assert_int_equal(s.reclaimable, 20);
    assert_int_equal(pool_admit(&pool, 0, UINT64_MAX, POOL_DEMAND, rooms, &s), POOL_REFUSE);
}

static void spares_go_before_models(void **state)
{
    struct pool_model m[3] = {parked(30, 10), parked(10, 10), parked(0, 10)};
    struct pool pool = pool_of(m, 3);
    struct pool_room rooms[3];
    struct pool_shortage s;

    pool.budget = 100;
    m[0].standby = 2, m[0].used_ns = 20 * SECOND;
    m[1].standby = 3, m[1].used_ns = 10 * SECOND;
    m[2].place = POOL_COLD;
    account(&pool); /* 90 */
    assert_int_equal(pool_admit(&pool, 2, 25, POOL_DEMAND, rooms, &s), POOL_ROOM);
    assert_int_equal(rooms[1].stop, 2); /* idle longest */
    assert_int_equal(rooms[0].stop, 0);
    assert_false(rooms[0].evict || rooms[1].evict);
    assert_int_equal(pool_admit(&pool, 2, 45, POOL_DEMAND, rooms, &s), POOL_ROOM);
    assert_int_equal(rooms[1].stop, 3);
    assert_int_equal(rooms[0].stop, 1);
    assert_int_equal(pool_admit(&pool, 2, 45, POOL_REFILL, rooms, &s), POOL_REFUSE);
    assert_int_equal(rooms[1].stop, 0);
}

static void the_cheapest_idle_model_is_evicted(void **state)
{
    struct pool_model m[4] = {parked(40, 1), parked(40, 1), parked(40, 1), parked(0, 1)};
    struct pool pool = pool_of(m, 4);
    struct pool_room rooms[4];
    struct pool_shortage s;

    pool.budget = 120;
    for (int i = 0; i < 3; i++)
        m[i].used_ns = 90 * SECOND;
    m[0].reload_ns = 3 * SECOND, m[1].reload_ns = 1 * SECOND, m[2].reload_ns = 2 * SECOND;
    m[3].place = POOL_LOADING;
    account(&pool);
    assert_int_equal(pool_admit(&pool, 3, 30, POOL_DEMAND, rooms, &s), POOL_ROOM);
    assert_true(!rooms[0].evict && rooms[1].evict && !rooms[2].evict);

    m[0].used_ns = 10 * SECOND; /* dear to bring back, but nobody has used it for long */
    assert_int_equal(pool_admit(&pool, 3, 30, POOL_DEMAND, rooms, &s), POOL_ROOM);
    assert_true(rooms[0].evict && !rooms[1].evict && !rooms[2].evict);

    assert_int_equal(pool_admit(&pool, 3, 70, POOL_DEMAND, rooms, &s), POOL_ROOM);
    assert_true(rooms[0].evict && rooms[1].evict && !rooms[2].evict);

    m[1].waiting = 1; /* its first request has not reached it yet */
    m[2].leased = 1;
    account(&pool);
    assert_int_equal(pool_admit(&pool, 3, 30, POOL_DEMAND, rooms, &s), POOL_ROOM);
    assert_true(rooms[0].evict);
    m[0].place = POOL_LOADING;
    assert_int_equal(pool_admit(&pool, 3, 30, POOL_DEMAND, rooms, &s), POOL_REFUSE);
    assert_int_equal(s.reclaimable, 0);
}

static void what_is_not_needed_stays(void **state)
{
    struct pool_model m[3] = {parked(10, 5), parked(100, 5), parked(0, 5)};
    struct pool pool = pool_of(m, 3);
    struct pool_room rooms[3];
    struct pool_shortage s;

    pool.budget = 120;
    m[0].standby = 2, m[0].used_ns = 50 * SECOND; /* the less valuable of the two */
    m[0].reload_ns = SECOND / 100;
    m[1].used_ns = 50 * SECOND, m[1].reload_ns = SECOND;
    m[2].place = POOL_COLD;
    account(&pool); /* 120 */
    /* Small and cheap does not cover 90; the large one does alone, so the small one stays whole. */
    assert_int_equal(pool_admit(&pool, 2, 90, POOL_DEMAND, rooms, &s), POOL_ROOM);
    assert_true(rooms[1].evict);
    assert_false(rooms[0].evict);
    assert_int_equal(rooms[0].stop, 0);
}

/* ---- random schedules ---- */

static uint64_t seed;
static uint32_t rnd(uint32_t below)
{
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(seed >> 33) % below;
}

#define N_MODELS 6
struct world {
    struct pool pool;
    struct pool_model m[N_MODELS];
    uint64_t leaving[N_MODELS]; /* bytes on their way out */
    uint64_t asked, granted, refused, cancelled;
};

static void take_stock(struct world *w)
{
    w->pool.leaving = 0;
    for (int i = 0; i < N_MODELS; i++)
        w->pool.leaving += w->leaving[i];
    account(&w->pool);
    assert_true(w->pool.charged <= w->pool.budget);
}

/* Does what the decision says, checking that nothing that is used is touched. */
static void obey(struct world *w, const struct pool_room *rooms)
{
    for (int i = 0; i < N_MODELS; i++) {
        struct pool_model *m = &w->m[i];
        assert_true(rooms[i].stop <= pool_spare(m));
        if (rooms[i].evict) {
            assert_true(pool_idle(m));
            w->leaving[i] += m->weights_bytes + (m->standby + m->starting) * m->instance_bytes;
            m->weights_bytes = m->standby = m->starting = 0;
            m->place = POOL_LEAVING;
            continue;
        }
        for (uint32_t n = rooms[i].stop; n; n--) {
            assert_int_equal(m->place, POOL_PARKED);
            if (m->starting)
                m->starting--;
            else
                m->standby--;
            w->leaving[i] += m->instance_bytes;
        }
    }
    take_stock(w);
}

static enum pool_verdict ask(struct world *w, int i, uint64_t need, enum pool_purpose purpose)
{
    struct pool_room rooms[N_MODELS];
    struct pool_shortage s;
    uint32_t before = pool_spare(&w->m[i]);

    enum pool_verdict v = pool_admit(&w->pool, i, need, purpose, rooms, &s);
    if (v == POOL_ROOM) {
        assert_int_equal(purpose, POOL_DEMAND);
        assert_false(rooms[i].evict || rooms[i].stop);
        obey(w, rooms);
        assert_true(w->pool.charged - w->pool.leaving + need <= w->pool.budget);
        assert_int_equal(pool_spare(&w->m[i]), before);
    }
    return v;
}

static void settle(struct world *w)
{
    enum pool_purpose purpose;
    uint64_t wake;
    int next;

    w->pool.short_of_memory = false;
    for (int i = 0; i < N_MODELS; i++) {
        struct pool_model *m = &w->m[i];
        m->blocked = false;
        while (m->place == POOL_PARKED && m->waiting && m->standby) {
            m->waiting--, m->standby--, m->leased++, w->granted++;
            m->used_ns = w->pool.now_ns;
        }
        if (m->place != POOL_COLD || !m->waiting)
            continue;
        uint64_t need = 10 + (uint64_t)i * 10;
        enum pool_verdict v = ask(w, i, need, POOL_DEMAND);
        if (v == POOL_ADMIT) {
            m->place = POOL_LOADING;
            m->weights_bytes = need;
        } else if (v == POOL_REFUSE) {
            w->refused += m->waiting;
            m->waiting = 0;
        }
        w->pool.short_of_memory |= v == POOL_WAIT || v == POOL_ROOM;
        take_stock(w);
    }
    while ((next = pool_next_start(&w->pool, &purpose, &wake)) >= 0) {
        struct pool_model *m = &w->m[next];
        enum pool_verdict v = ask(w, next, m->instance_bytes, purpose);
        if (v == POOL_ADMIT) {
            m->starting++;
        } else if (v == POOL_REFUSE && purpose == POOL_DEMAND) {
            w->refused += m->waiting - m->standby - m->starting;
            m->waiting = m->standby + m->starting;
        } else {
            m->blocked = true;
            w->pool.short_of_memory |= purpose == POOL_DEMAND;
        }
        take_stock(w);
    }
}

static void something_happens(struct world *w)
{
    int i = (int)rnd(N_MODELS);
    struct pool_model *m = &w->m[i];

    w->pool.now_ns += rnd(1000000000);
    switch (rnd(7)) {
    case 0:
    case 1:
        m->waiting_since = m->waiting ? m->waiting_since : w->pool.now_ns;
        m->waiting++, w->asked++;
        break;
    case 2:
        if (m->waiting)
            m->waiting--, w->cancelled++;
        break;
    case 3:
        if (m->place == POOL_LOADING)
            m->place = POOL_PARKED, m->reload_ns = rnd(2000000000), m->used_ns = w->pool.now_ns;
        break;
    case 4:
        if (m->starting && rnd(4))
            m->starting--, m->standby++, m->failures = 0;
        else if (m->starting)
            m->starting--, m->failures++, m->failed_ns = w->pool.now_ns;
        break;
    case 5:
        if (m->leased && rnd(2))
            m->leased--, m->standby++;
        else if (m->leased)
            m->leased--, w->leaving[i] += m->instance_bytes;
        break;
    default:
        w->leaving[i] = 0;
        if (m->place == POOL_LEAVING)
            m->place = POOL_COLD;
    }
    take_stock(w);
}

/*
 * Nothing new happens, everything that is on its way arrives: after a few rounds nobody waits any
 * more. (Room that was made for one is not taken by another's refill, back and forth for ever.)
 */
static void run_dry(struct world *w)
{
    for (int round = 0; round < 400; round++) {
        w->pool.now_ns += SECOND;
        for (int i = 0; i < N_MODELS; i++) {
            struct pool_model *m = &w->m[i];
            if (m->place == POOL_LOADING)
                m->place = POOL_PARKED;
            if (m->starting)
                m->starting--, m->standby++, m->failures = 0;
            if (w->leaving[i]) { /* piecemeal */
                w->leaving[i] -= w->leaving[i] > 3 ? 3 : w->leaving[i];
                if (!w->leaving[i] && m->place == POOL_LEAVING)
                    m->place = POOL_COLD;
            } else if (m->place == POOL_LEAVING) {
                m->place = POOL_COLD;
            }
        }
        take_stock(w);
        settle(w);
    }
    for (int i = 0; i < N_MODELS; i++)
        assert_int_equal(w->m[i].waiting, 0);
}

static void random_schedules_keep_the_promises(void **state)
{
    for (unsigned round = 0; round < 200; round++) {
        struct world w = {0};
        seed = round + 1;
        w.pool = pool_of(w.m, N_MODELS);
        w.pool.budget = 60 + rnd(200);
        w.pool.max_burst = 1 + rnd(6);
        w.pool.standby_max = rnd(6);
        for (int i = 0; i < N_MODELS; i++) {
            w.m[i].instance_bytes = 1 + rnd(20);
            w.m[i].target = rnd(3);
        }
        for (int step = 0; step < 1000; step++) {
            something_happens(&w);
            settle(&w);
            uint64_t starting = 0, waiting = 0;
            for (int i = 0; i < N_MODELS; i++)
                starting += w.m[i].starting, waiting += w.m[i].waiting;
            assert_true(starting <= w.pool.max_burst);
            assert_int_equal(w.asked, w.granted + w.refused + w.cancelled + waiting);
        }
        assert_true(w.granted > 0);
        run_dry(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(backoff_doubles_up_to_a_limit),
        cmocka_unit_test(early_starts_are_for_those_who_wait),
        cmocka_unit_test(starts_cover_those_who_wait_and_the_target),
        cmocka_unit_test(refills_respect_the_common_limit),
        cmocka_unit_test(nothing_is_refilled_into_room_that_is_being_made),
        cmocka_unit_test(the_longest_waiting_goes_first),
        cmocka_unit_test(failures_slow_refills_down_and_probe_demand),
        cmocka_unit_test(early_deaths_slow_refills_down_only),
        cmocka_unit_test(a_crash_loop_does_not_spin),
        cmocka_unit_test(surplus_is_what_exceeds_target_and_waiting),
        cmocka_unit_test(what_fits_is_admitted_and_what_leaves_is_waited_for),
        cmocka_unit_test(spares_go_before_models),
        cmocka_unit_test(the_cheapest_idle_model_is_evicted),
        cmocka_unit_test(what_is_not_needed_stays),
        cmocka_unit_test(random_schedules_keep_the_promises),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
