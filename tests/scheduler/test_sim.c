/* SPDX-License-Identifier: Apache-2.0 */
/* The scheduler over simulated fleets: what sim.h checks, in random schedules; fairness and figures
 * of given ones. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define N_REQUESTS 80

static uint32_t below(uint64_t *random, uint32_t n)
{
    return (uint32_t)(sim_random(random) % n);
}

static struct sim_config random_config(uint64_t *random, uint64_t seed)
{
    struct sim_config c = {.seed = seed,
                           .instances = 1 + below(random, 4),
                           .spawn_ns = 5 * SIM_MS,
                           .step_ns = 1e6,
                           .token_ns = 1e4,
                           .seq_ns = 1e4,
                           .eos = 0.02,
                           .content = true,
                           .verify_every = 1};

    c.model.max_queue = 100 + below(random, 100);
    c.model.prefill_tokens = below(random, 3) * 8;
    if (below(random, 2))
        c.model.step_ns = SIM_MS + below(random, 2 * SIM_MS);
    c.model.no_prefix_cache = !below(random, 4);
    c.model.stall_ns = SIM_S;
    c.limits = (struct sched_limits){.pages = 20 + below(random, 60),
                                     .page_size = 1 + below(random, 8),
                                     .max_tokens = 4 + below(random, 60),
                                     .max_seqs = 1 + below(random, 16),
                                     .max_positions = 130,
                                     .token_refs = below(random, 2)};
    c.limits.joins = below(random, 2);
    if (!below(random, 3))
        c.death_rate = 5;
    if (!below(random, 3))
        c.refuse_rate = 0.01;
    if (!below(random, 4))
        c.stall_rate = 0.002;
    if (!below(random, 4)) {
        c.scale = true;
        c.model.max_instances = 1 + below(random, 5);
        c.model.standby = below(random, 2);
        c.model.idle_ns = 50 * SIM_MS;
        c.model.wait_target_ns = 20 * SIM_MS;
        c.instances = below(random, 2);
    }
    return c;
}

static struct sim_request *random_requests(uint64_t *random, uint64_t seed)
{
    bool long_prompts = !below(random, 3);
    struct sim_shape shape = {.seed = seed,
                              .n = N_REQUESTS,
                              .clients = 1 + below(random, 5),
                              .rate = below(random, 2) * 1000,
                              .prompt_min = 1,
                              .prompt_max = long_prompts ? 90 : 19,
                              .output_min = 0,
                              .output_max = 30,
                              .groups = below(random, 3),
                              .shared = long_prompts ? 70 : 12};
    struct sim_request *requests = sim_trace(&shape);

    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        struct sim_request *r = &requests[i];
        if (!below(random, 4))
            r->priority = (int32_t)below(random, 3) - 1;
        if (!below(random, 5))
            r->n = 1 + below(random, 4);
        if (!below(random, 6))
            r->cancel_at = r->at + below(random, 50 * SIM_MS);
        if (!below(random, 6))
            r->min_tokens = 5;
        if (!below(random, 7))
            r->prompt_logprobs = true;
        if (!below(random, 9))
            r->salt = below(random, 3);
        if (!below(random, 20))
            r->deadline = r->at + 10 * SIM_MS;
    }
    return requests;
}

static void run(const struct sim_config *config, const struct sim_request *requests, size_t n,
                struct sim_report *report)
{
    struct error err = {0};
    if (sim_run(config, requests, n, report, &err) < 0)
        fail_msg("seed %llu: %s", (unsigned long long)config->seed, err.text);
}

static void random_schedules(void **state)
{
    const char *runs = getenv("EMBER_SIM_RUNS");
    uint64_t n = runs ? strtoull(runs, NULL, 10) : 150;
    uint64_t preemptions = 0, replays = 0, cached = 0, wasted = 0, joined = 0;

    for (uint64_t seed = 0; seed < n; seed++) {
        uint64_t random = seed + 1;
        struct sim_config config = random_config(&random, seed);
        _cleanup_free_ struct sim_request *requests = random_requests(&random, seed);
        struct sim_report report;
        run(&config, requests, N_REQUESTS, &report);
        preemptions += report.stats.preemptions;
        replays += report.stats.replays;
        cached += report.stats.cached_tokens;
        wasted += report.stats.wasted_tokens;
        joined += report.joined;
    }
    /* the schedules do go through what they are meant to test */
    assert_true(preemptions > n && replays > n && cached > n && wasted > n && joined > n / 2);
}

static void equal_runs_are_equal(void **state)
{
    for (uint64_t seed = 1000; seed < 1005; seed++) {
        struct sim_report first = {0}, second = {0};
        for (int i = 0; i < 2; i++) {
            uint64_t random = seed;
            struct sim_config config = random_config(&random, seed);
            _cleanup_free_ struct sim_request *requests = random_requests(&random, seed);
            run(&config, requests, N_REQUESTS, i ? &second : &first);
        }
        assert_memory_equal(&first, &second, sizeof first);
    }
}

/* Instances that one of n sequences in flight can take with it, as suspect.c says. */
static uint32_t deaths_of_one(uint32_t n)
{
    uint32_t deaths = 2;

    do {
        n = (n + 7) / 8;
        deaths++;
    } while (n > 1);
    return deaths;
}

/* A request that kills every instance it runs on ends alone; all others get all their tokens. */
static void poison_fails_alone(void **state)
{
    struct sim_shape shape = {.n = 100,
                              .clients = 4,
                              .rate = 500,
                              .prompt_min = 4,
                              .prompt_max = 40,
                              .output_min = 8,
                              .output_max = 30};
    struct sim_config config = {.model = {.max_queue = 1000},
                                .limits = {400, 8, 64, 16, 200, true},
                                .instances = 3,
                                .spawn_ns = 5 * SIM_MS,
                                .step_ns = 1e6,
                                .token_ns = 1e4,
                                .content = true,
                                .verify_every = 1};

    for (uint64_t seed = 0; seed < 15; seed++) {
        struct sim_report report;
        shape.seed = config.seed = seed;
        config.limits.token_refs = seed % 2;
        _cleanup_free_ struct sim_request *requests = sim_trace(&shape);
        requests[20 + seed * 5].poison = 1 + (uint32_t)seed % 4;
        run(&config, requests, 100, &report);
        assert_int_equal(report.finished[SCHED_ERROR], 1);
        assert_int_equal(report.innocent_errors, 0);
        assert_int_equal(report.finished[SCHED_LENGTH], 99);
        assert_in_range(report.deaths, 2, deaths_of_one(16));
    }
}

/* Several guilty ones at once, of any kind, on any fleet: each fails in the end, no other does, and
 * none takes more instances with it than suspect.c says. */
static void the_guilty_fail_and_nobody_else(void **state)
{
    const char *runs = getenv("EMBER_SIM_RUNS");
    uint64_t n = runs ? strtoull(runs, NULL, 10) : 150, failed = 0, deaths = 0, worst = 0;

    for (uint64_t seed = 0; seed < n; seed++) {
        uint64_t random = seed + 77;
        struct sim_config config = random_config(&random, seed);
        _cleanup_free_ struct sim_request *requests = random_requests(&random, seed);
        uint32_t guilty = 1 + below(&random, below(&random, 8) ? 6 : N_REQUESTS);
        struct sim_report report;
        config.death_rate = config.refuse_rate = config.stall_rate = 0;
        config.limits.pages = 2000; /* nobody fails for want of them */
        config.limits.max_seqs = 1 + below(&random, 80);
        config.limits.max_tokens = MAX(config.limits.max_tokens, config.limits.max_seqs);
        for (uint32_t i = 0; i < guilty; i++) {
            struct sim_request *r = &requests[below(&random, N_REQUESTS)];
            r->poison = below(&random, 12);
            r->poison_prompt = !r->poison;
        }
        run(&config, requests, N_REQUESTS, &report);
        assert_int_equal(report.innocent_errors, 0);
        assert_true(report.worst_guilt <= deaths_of_one(config.limits.max_seqs));
        failed += report.guilty_errors;
        deaths += report.deaths;
        worst = MAX(worst, report.worst_guilt);
    }
    print_message("%llu failed, %llu deaths, at most %llu of one\n", (unsigned long long)failed,
                  (unsigned long long)deaths, (unsigned long long)worst);
    assert_true(failed > n && deaths >= 2 * n && worst >= 3);
}

/* 32 streams on one instance that is killed: all go on on the next. */
static void a_killed_instance_costs_a_pause(void **state)
{
    struct sim_shape shape = {.n = 32,
                              .clients = 4,
                              .prompt_min = 10,
                              .prompt_max = 60,
                              .output_min = 50,
                              .output_max = 50};
    struct sim_config config = {.limits = {1000, 8, 64, 32, 200, true},
                                .instances = 1,
                                .spawn_ns = 5 * SIM_MS,
                                .step_ns = 1e6,
                                .token_ns = 1e4,
                                .content = true,
                                .verify_every = 1,
                                .death_rate = 12,
                                .seed = 3};
    struct sim_report report;
    _cleanup_free_ struct sim_request *requests = sim_trace(&shape);

    /* deaths fall at random; those that hit a request twice in a row before it brings a token may
     * fail it */
    run(&config, requests, 32, &report);
    assert_true(report.deaths >= 1);
    assert_int_equal(report.finished[SCHED_LENGTH] + report.innocent_errors, 32);
    assert_true(report.innocent_errors <= report.deaths);
}

/* One client has a thousand queued; another's single request is as fast as if it were nearly alone.
 */
static void a_crowd_does_not_delay_one(void **state)
{
    struct sim_config config = {.model = {.max_queue = 2000},
                                .limits = {4000, 16, 256, 16, 600, true},
                                .instances = 1,
                                .step_ns = 1e6,
                                .token_ns = 1e4,
                                .content = true};
    _cleanup_free_ struct sim_request *requests = x_alloc(1001 * sizeof *requests);
    struct sim_report crowd, alone;

    for (int i = 0; i < 1000; i++)
        requests[i] = (struct sim_request){.client = 1, .n_prompt = 200, .max_tokens = 50};
    requests[1000] = (struct sim_request){.at = 500 * SIM_MS,
                                          .client = 2,
                                          .n_prompt = 20,
                                          .max_tokens = 1,
                                          .cancel_at = 510 * SIM_MS};
    run(&config, requests, 1001, &crowd);
    assert_int_equal(crowd.finished[SCHED_LENGTH], 1001); /* was served before it was cancelled */
    assert_int_equal(crowd.finished[SCHED_CANCELLED], 0);
    run(&config, requests + 1000, 1, &alone);
    assert_int_equal(alone.finished[SCHED_LENGTH], 1);
}

/* How many of 40 newcomers, at any moment of a step, had their token within `limit` while one
 * client's thousand was being served. */
static uint64_t served_within(uint64_t limit, bool joins)
{
    struct sim_config config = {.model = {.max_queue = 2000},
                                .limits = {4000, 16, 256, 32, 600, true, joins},
                                .instances = 1,
                                .step_ns = 1e6,
                                .token_ns = 1e4,
                                .content = true,
                                .verify_every = 10};
    _cleanup_free_ struct sim_request *requests = x_alloc(1001 * sizeof *requests);
    struct sim_report report;
    uint64_t served = 0;

    for (uint32_t i = 0; i < 1000; i++)
        requests[i] =
            (struct sim_request){.client = 1, .n_prompt = 8, .max_tokens = 40 + i * 7 % 31};
    for (uint64_t i = 0; i < 40; i++) {
        uint64_t at = 500 * SIM_MS + i * SIM_MS / 10;
        requests[1000] = (struct sim_request){
            .at = at, .client = 2, .n_prompt = 8, .max_tokens = 1, .cancel_at = at + limit};
        run(&config, requests, 1001, &report);
        served += report.finished[SCHED_LENGTH] - 1000;
    }
    return served;
}

/* What is left of the step that runs, and its own: a step of this crowd takes 1.3 to 1.5 ms. */
static void a_newcomer_waits_for_one_step(void **state)
{
    assert_int_equal(served_within(3 * SIM_MS, true), 40);
    assert_true(served_within(3 * SIM_MS, false) < 20);
    assert_int_equal(served_within(9 * SIM_MS / 2, false), 40);
}

/* The same where an instance takes no more tokens than sequences, and streams would fill its steps:
 * the prompt of 8 tokens runs in one step all the same. */
static void streams_leave_room_for_a_prompt(void **state)
{
    struct sim_config config = {.model = {.max_queue = 2000},
                                .limits = {4000, 16, 64, 64, 600, true, true},
                                .instances = 1,
                                .step_ns = 1e6,
                                .token_ns = 1e4,
                                .content = true};
    _cleanup_free_ struct sim_request *requests = x_alloc(1001 * sizeof *requests);
    struct sim_report report;

    for (uint32_t i = 0; i < 1000; i++)
        requests[i] = (struct sim_request){.client = 1, .n_prompt = 8, .max_tokens = 200};
    for (uint64_t i = 0; i < 10; i++) {
        uint64_t at = 200 * SIM_MS + i * SIM_MS / 7;
        requests[1000] = (struct sim_request){.at = at,
                                              .client = 2,
                                              .n_prompt = 8,
                                              .max_tokens = 1,
                                              .cancel_at = at + 7 * SIM_MS / 2};
        run(&config, requests, 1001, &report);
        assert_int_equal(report.finished[SCHED_LENGTH], 1001);
    }
}

/* Streams of short texts, and prompts of up to 2,000 tokens among them. */
static void run_paced(double token_ns, uint64_t step_ns, struct sim_report *ret)
{
    struct sim_shape shape = {.n = 200,
                              .clients = 20,
                              .rate = 0.015 / (token_ns / 1e9),
                              .prompt_min = 8,
                              .prompt_max = 40,
                              .output_min = 20,
                              .output_max = 60};
    struct sim_config config = {.model = {.max_queue = 2000, .step_ns = step_ns},
                                .limits = {4000, 16, 4096, 64, 4000, true, true},
                                .instances = 1,
                                .step_ns = 8 * token_ns,
                                .token_ns = token_ns,
                                .content = true,
                                .verify_every = 100};
    _cleanup_free_ struct sim_request *requests = sim_trace(&shape);

    for (int i = 5; i < 200; i += 20)
        requests[i].n_prompt = 2000;
    run(&config, requests, 200, ret);
    assert_int_equal(ret->finished[SCHED_LENGTH], 200);
}

/* On an instance of 200 tokens a second a prompt of 2,000 is ten seconds, in which the others go
 * on; all of it takes as long as before. */
static void slow_prompts_hold_nobody_up(void **state)
{
    struct sim_report whole, cut;

    run_paced(5e6, 0, &whole);
    run_paced(5e6, 200 * SIM_MS, &cut);
    assert_true(whole.itl_p99 > 2000);
    assert_true(cut.itl_p99 < 750); /* 64 tokens, 63 who decode, 40 ms of any step */
    assert_true(cut.ttft_p50 < whole.ttft_p50);
    assert_true(cut.seconds < whole.seconds * 1.15);
}

/* On one of 100,000 a step takes all that it may, nearly from the beginning. */
static void fast_prompts_are_not_cut(void **state)
{
    struct sim_report whole, cut;

    run_paced(1e4, 0, &whole);
    run_paced(1e4, 200 * SIM_MS, &cut);
    assert_true(cut.steps <= whole.steps + 30);
    assert_true(cut.seconds < whole.seconds * 1.01);
    assert_true(cut.ttft_p99 < whole.ttft_p99 * 1.25);
}

/* A crowd's prompts fill the step that is under way and the one behind it: a newcomer joins that
 * all the same, and these are no longer than their pace. */
static void a_newcomer_joins_steps_full_of_prompts(void **state)
{
    struct sim_config config = {.model = {.max_queue = 2000, .step_ns = 200 * SIM_MS},
                                .limits = {4000, 16, 512, 64, 600, true, true},
                                .instances = 1,
                                .step_ns = 10e6,
                                .token_ns = 3e6,
                                .content = true};
    _cleanup_free_ struct sim_request *requests = x_alloc(1001 * sizeof *requests);
    struct sim_report report;

    for (uint32_t i = 0; i < 1000; i++)
        requests[i] = (struct sim_request){.client = 1, .n_prompt = 100, .max_tokens = 1};
    for (uint64_t i = 0; i < 10; i++) {
        uint64_t at = SIM_S + i * 20 * SIM_MS;
        requests[1000] = (struct sim_request){
            .at = at, .client = 2, .n_prompt = 8, .max_tokens = 1, .cancel_at = at + 450 * SIM_MS};
        run(&config, requests, 1001, &report);
        assert_int_equal(report.finished[SCHED_LENGTH], 1001);
    }
}

static void a_fleet_grows_and_shrinks(void **state)
{
    struct sim_shape shape = {.n = 400,
                              .clients = 20,
                              .rate = 100,
                              .prompt_min = 100,
                              .prompt_max = 300,
                              .output_min = 20,
                              .output_max = 40};
    struct sim_config config = {.model = {.max_queue = 4000,
                                          .max_instances = 16,
                                          .wait_target_ns = 200 * SIM_MS,
                                          .idle_ns = SIM_S},
                                .limits = {2000, 16, 128, 8, 600, true},
                                .scale = true,
                                .spawn_ns = 50 * SIM_MS,
                                .step_ns = 5e6,
                                .token_ns = 1e5,
                                .content = true,
                                .verify_every = 100};
    struct sim_report report;
    _cleanup_free_ struct sim_request *requests = sim_trace(&shape);

    requests[399].at += 30 * SIM_S; /* a straggler: by then the fleet has gone */
    run(&config, requests, 400, &report);
    assert_int_equal(report.finished[SCHED_LENGTH], 400);
    assert_in_range(report.peak_instances, 4, 16);
    assert_true(report.spawns > report.peak_instances); /* and came again for the straggler */
    assert_true(report.instance_seconds < report.seconds * 6);
    assert_true(report.ttft_p99 < 2000);
}

static void shared_prefixes_go_where_they_are(void **state)
{
    struct sim_shape shape = {.n = 400,
                              .clients = 20,
                              .rate = 40,
                              .prompt_min = 210,
                              .prompt_max = 260,
                              .output_min = 10,
                              .output_max = 20,
                              .groups = 8,
                              .shared = 200};
    struct sim_config config = {.model = {.max_queue = 4000},
                                .limits = {400, 16, 128, 8, 600, true},
                                .instances = 4,
                                .step_ns = 5e6,
                                .token_ns = 1e5,
                                .content = true};
    struct sim_report with, without;
    _cleanup_free_ struct sim_request *requests = sim_trace(&shape);

    run(&config, requests, 400, &with);
    config.model.no_prefix_cache = true;
    run(&config, requests, 400, &without);
    /* of 400 x 192 shareable tokens, at most 8 groups on 4 instances are computed */
    assert_true(with.stats.cached_tokens > 192u * (400 - 40));
    assert_int_equal(without.stats.cached_tokens, 0);
    assert_true(with.ttft_p50 * 2 < without.ttft_p50);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_schedules),
        cmocka_unit_test(equal_runs_are_equal),
        cmocka_unit_test(poison_fails_alone),
        cmocka_unit_test(the_guilty_fail_and_nobody_else),
        cmocka_unit_test(a_killed_instance_costs_a_pause),
        cmocka_unit_test(a_crowd_does_not_delay_one),
        cmocka_unit_test(a_newcomer_waits_for_one_step),
        cmocka_unit_test(streams_leave_room_for_a_prompt),
        cmocka_unit_test(slow_prompts_hold_nobody_up),
        cmocka_unit_test(fast_prompts_are_not_cut),
        cmocka_unit_test(a_newcomer_joins_steps_full_of_prompts),
        cmocka_unit_test(a_fleet_grows_and_shrinks),
        cmocka_unit_test(shared_prefixes_go_where_they_are),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
