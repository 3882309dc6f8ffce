/* SPDX-License-Identifier: Apache-2.0 */
/* Instances: what a death does, who goes where, how many there should be. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <string.h>

#include "fixture.h"
#include "scheduler/scale.h"

/* ---- instances die ---- */

static void a_death_is_replayed(void **state)
{
    struct sched_limits limits = limits_of(64, 32, 8, true);
    struct fixture *f = begin(NULL, &limits);

    ask(f, 'A', 5, 6);
    run(f);
    run(f);
    plan(f);
    sched_instance_gone(f->instance, true, f->now);
    assert_string_equal(f->events, "A100 A101 ");
    f->instance = add_instance(f, &limits);
    assert_string_equal(plan(f), "A7*"); /* five of the prompt and what was sampled */
    assert_int_equal(f->step.seqs[0].prompt_len, 5);
    assert_int_equal(f->step.seqs[0].sample_index, 2);
    assert_int_equal(f->step.seqs[0].tokens[6], 101);
    assert_true(f->step.seqs[0].first);
    done(f);
    for (int i = 0; i < 3; i++)
        run(f);
    assert_string_equal(f->events, "A100 A101 A102 A103 A104 A105 A.length A! ");
    end(f);
}

static void die(struct fixture *f, const struct sched_limits *limits)
{
    sched_instance_gone(f->instance, true, f->now);
    f->instance = add_instance(f, limits);
}

/* Killed from outside: all are replayed together, and whoever brings a token is free. */
static void a_death_costs_one_replay(void **state)
{
    struct sched_limits limits = limits_of(64, 32, 8, true);
    struct fixture *f = begin(NULL, &limits);

    for (char c = 'A'; c <= 'E'; c++)
        ask(f, c, 4, 2);
    assert_string_equal(plan(f), "A4* B4* C4* D4* E4*");
    die(f, &limits);
    assert_string_equal(plan(f), "A4* B4* C4* D4* E4*");
    done(f);
    assert_string_equal(plan(f), "A1* B1* C1* D1* E1*");
    ask(f, 'F', 4, 2);
    assert_string_equal(plan(f), "F4*");
    end(f);
}

/* B kills each instance it runs on: the group that it is in gets smaller until it is alone. */
static void a_guilty_one_is_found(void **state)
{
    struct sched_limits limits = limits_of(256, 64, 16, true);
    struct fixture *f = begin(NULL, &limits);

    for (char c = 'A'; c <= 'J'; c++)
        ask(f, c, 4, 3);
    plan(f);
    die(f, &limits);
    assert_string_equal(plan(f), "A4* B4* C4* D4* E4* F4* G4* H4* I4* J4*");
    die(f, &limits); /* ten: in twos */
    assert_string_equal(plan(f), "A4* B4*");
    ask(f, 'Z', 4, 3);
    assert_string_equal(plan(f), "A1*< B1*< Z4*"); /* nobody suspects Z */
    die(f, &limits);
    assert_string_equal(plan(f), "A4*"); /* by itself: not even beside Z */
    assert_string_equal(plan(f), "A1*<");
    done_on(f, f->instance, &f->older);
    assert_string_equal(plan(f), ""); /* B waits for all to come back */
    done(f);
    assert_string_equal(plan(f), "B4*");
    assert_string_equal(f->events, "A100 A101 ");
    die(f, &limits);
    assert_string_equal(f->events, "A100 A101 B.error B! ");
    for (int i = 0; i < 30; i++)
        run(f);
    for (char c = 'A'; c <= 'J'; c++)
        assert_int_equal(f->generated[(int)c], c == 'B' ? 0 : 3);
    assert_int_equal(f->generated['Z'], 3);
    end(f);
}

/* A long prompt that is run by itself is cut as others are: a step of all of it might be a stall.
 */
static void a_lone_prompt_keeps_the_pace(void **state)
{
    struct sched_model_config config = {.step_ns = 10 * MS};
    struct sched_limits limits = limits_of(2000, 1000, 4, false);
    struct fixture *f = begin(&config, &limits);

    struct sched_request b = request(f, 'B', 500, 100, 2);

    ask(f, 'A', 40, 1);
    b.client = 'A'; /* in the order of arrival */
    submit(f, &b);
    assert_string_equal(plan(f), "A40* B24");
    die(f, &limits);
    assert_string_equal(plan(f), "A40* B24");
    die(f, &limits);
    assert_string_equal(plan(f), "A40*"); /* each by itself */
    f->now += 20 * MS;
    done(f);
    assert_string_equal(plan(f), "B64");
    f->now += 20 * MS;
    done(f);
    assert_string_equal(run(f), "B36*");
    assert_string_equal(run(f), "B1*");
    end(f);
}

/* Two in flight: what one brings does not clear the other choice of the same request. */
static void each_choice_is_suspected_by_itself(void **state)
{
    struct sched_limits limits = limits_of(64, 32, 8, false);
    struct fixture *f = begin(NULL, &limits);
    struct sched_request r = request(f, 'A', 1, 4, 9);

    r.n = 2;
    submit(f, &r);
    assert_string_equal(run(f), "A4*");
    for (int i = 0; i < 2; i++) { /* the second choice's first step */
        assert_string_equal(plan(f), i ? "A5* A4*" : "A1* A4*");
        die(f, &limits);
    }
    assert_string_equal(run(f), "A5*"); /* each by itself; the first does well */
    assert_string_equal(plan(f), "A4*");
    die(f, &limits);
    assert_string_equal(f->events, "A100 A101 A.error A.error A! ");
    end(f);
}

/* Who is gone may have done it: the one that is left was not alone. */
static void the_cancelled_count(void **state)
{
    struct sched_limits limits = limits_of(64, 32, 8, true);
    struct fixture *f = begin(NULL, &limits);

    ask(f, 'A', 4, 3);
    plan(f);
    die(f, &limits);
    ask(f, 'B', 4, 3);
    assert_string_equal(plan(f), "A4* B4*");
    sched_cancel(f->sched, f->ids['B'], f->now);
    die(f, &limits);
    assert_string_equal(f->events, "B.cancelled B! ");
    assert_string_equal(plan(f), "A4*");
    die(f, &limits);
    assert_string_equal(f->events, "B.cancelled B! A.error A! ");
    end(f);
}

static void an_ordered_end_is_nobodys_fault(void **state)
{
    struct sched_limits limits = limits_of(64, 32, 8, false);
    struct fixture *f = begin(NULL, &limits);

    ask(f, 'A', 4, 3);
    ask(f, 'B', 4, 3);
    for (int i = 0; i < 4; i++) {
        assert_string_equal(plan(f), "A4* B4*");
        sched_instance_gone(f->instance, false, f->now);
        f->instance = add_instance(f, &limits);
    }
    assert_string_equal(f->events, "");
    end(f);
}

static void refused_twice_fails(void **state)
{
    struct sched_limits limits = limits_of(64, 32, 8, true);
    struct fixture *f = begin(NULL, &limits);
    struct sched_result refused = {.error = EINVAL, .error_text = "no"};
    struct error err = {0};

    ask(f, 'A', 4, 3);
    plan(f);
    plan(f);
    refused.step = f->step.id; /* out of order */
    assert_int_equal(-EINVAL, sched_step_done(f->instance, &refused, f->now, &err));
    refused.step = f->older.id;
    assert_int_equal(0, sched_step_done(f->instance, &refused, f->now, &err));
    assert_string_equal(plan(f), ""); /* what is in flight first */
    refused.step = f->step.id;
    assert_int_equal(0, sched_step_done(f->instance, &refused, f->now, &err));
    assert_string_equal(plan(f), "A4*");
    refused.step = f->step.id;
    refused.error = 0;
    assert_int_equal(-EINVAL, sched_step_done(f->instance, &refused, f->now, &err)); /* no token */
    refused.error = EINVAL;
    assert_int_equal(0, sched_step_done(f->instance, &refused, f->now, &err));
    assert_string_equal(f->events, "A.error A! ");
    assert_int_equal(-EINVAL, sched_step_done(f->instance, &refused, f->now, &err));
    end(f);
}

static void a_stall_is_told_once(void **state)
{
    struct sched_model_config config = {.stall_ns = SECOND};
    struct sched_limits limits = limits_of(64, 32, 8, false);
    struct fixture *f = begin(&config, &limits);
    uint64_t next;

    ask(f, 'A', 4, 3);
    plan(f);
    sched_tick(f->sched, f->now, &next);
    assert_int_equal(next, f->now + SECOND);
    f->now += SECOND;
    sched_tick(f->sched, f->now, &next);
    sched_tick(f->sched, f->now, &next);
    assert_int_equal(f->stalls, 1);
    sched_instance_gone(f->instance, true, f->now);
    f->instance = add_instance(f, &limits);
    assert_string_equal(run(f), "A4*");
    end(f);
}

/* ---- the fleet ---- */

static void the_cached_prefix_wins_until_load_outweighs_it(void **state)
{
    struct sched_limits limits = limits_of(256, 512, 4, false);
    struct fixture *f = begin(NULL, &limits);
    struct sched_instance *other;
    struct sched_request r = request(f, 'A', 1, 101, 1);

    submit(f, &r);
    assert_string_equal(run(f), "A101*");
    other = add_instance(f, &limits);
    ask(f, 'B', 40, 9); /* both are empty: to the first */
    assert_string_equal(run(f), "B40*");
    r.user = (void *)'C';
    submit(f, &r); /* a seat there costs less than 100 tokens here */
    assert_string_equal(plan_on(f, other), "");
    assert_string_equal(run(f), "B1* C1*");
    ask(f, 'D', 40, 9);
    assert_string_equal(plan_on(f, other), "D40*");
    done_on(f, other, &f->step);
    ask(f, 'E', 300, 9); /* not begun: its tokens are ahead of whoever comes */
    ask(f, 'F', 8, 9);
    r.user = (void *)'G';
    submit(f, &r);
    const char *here = plan(f);
    assert_non_null(strstr(here, "E300*"));
    assert_null(strchr(here, 'G'));
    assert_non_null(strstr(plan_on(f, other), "G101*"));
    end(f);
}

static void whoever_has_room_takes_the_next(void **state)
{
    struct sched_limits limits = limits_of(256, 64, 1, false);
    struct fixture *f = begin(NULL, &limits);
    struct sched_instance *other = add_instance(f, &limits);

    ask(f, 'A', 4, 9);
    ask(f, 'B', 4, 1);
    ask(f, 'C', 4, 2);
    assert_string_equal(plan(f), "A4*");
    struct sched_step first = f->step;
    assert_string_equal(plan_on(f, other), "B4*");
    done_on(f, other, &f->step);
    assert_string_equal(plan_on(f, other), "C4*");
    sched_instance_drain(other);
    done_on(f, other, &f->step);
    ask(f, 'D', 4, 2);
    assert_string_equal(plan_on(f, other), "C1*");
    done_on(f, other, &f->step);
    assert_true(sched_instance_idle(other));
    struct sched_scale s = sched_scale(f->model, 0, f->now);
    assert_ptr_equal(s.release, other); /* by order: work that waits does not bring it back */
    assert_string_equal(plan_on(f, other), "");
    sched_instance_resume(other);
    assert_string_equal(plan_on(f, other), "D4*");
    done_on(f, other, &f->step);
    done_on(f, f->instance, &first);
    end(f);
}

static void scale_by_figures(void **state)
{
    static const struct {
        struct scale_state state;
        uint32_t wanted;
        const char *why;
    } cases[] = {
        {{0}, 0, "min"},
        {{.waiting = 1, .tokens_per_s = 1000, .backlog_tokens = 10}, 1, "load"},
        {{.waiting = 9, .tokens_per_s = 1000, .backlog_tokens = 20001}, 5, "load"}, /* 5,000 each */
        {{.waiting = 9, .tokens_per_s = 1000, .backlog_tokens = 900000}, 8, "max"},
        {{.ready = 2, .waiting = 1, .tokens_per_s = 1000, .oldest_wait_ns = SECOND / 2},
         3,
         "standby"},
        {{.ready = 3, .waiting = 1, .tokens_per_s = 1000, .oldest_wait_ns = SECOND * 2},
         4,
         "standby"},
        {{.ready = 3, .idle = 2, .waiting = 1, .tokens_per_s = 1e3, .oldest_wait_ns = SECOND * 2},
         4,
         "wait"},
        {{.ready = 3, .idle = 3}, 1, "standby"},
    };
    struct scale_config config = {
        .max = 8, .standby = 1, .wait_target_ns = SECOND, .backlog_target_ns = 5 * SECOND};
    const char *why;

    config.standby = 0;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        config.standby = i >= 4;
        assert_int_equal(scale_wanted(&config, &cases[i].state, &why), cases[i].wanted);
        assert_string_equal(why, cases[i].why);
    }
}

static void scale_in_after_idle_time(void **state)
{
    struct sched_model_config config = {.max_instances = 4, .idle_ns = 10 * SECOND};
    struct sched_limits limits = limits_of(64, 32, 4, false);
    struct fixture *f = begin(&config, NULL);

    struct sched_scale s = sched_scale(f->model, 0, f->now);
    assert_int_equal(s.wanted, 0);
    ask(f, 'A', 4, 200);
    s = sched_scale(f->model, 0, f->now);
    assert_int_equal(s.wanted, 1);
    f->instance = add_instance(f, &limits);
    struct sched_instance *other = add_instance(f, &limits);
    run(f);
    s = sched_scale(f->model, 0, f->now);
    assert_int_equal(s.wanted, 1);
    assert_null(s.release);
    f->now += 9 * SECOND;
    s = sched_scale(f->model, 0, f->now);
    assert_null(s.release);
    assert_true(s.recheck > f->now && s.recheck <= f->now + SECOND);
    f->now += SECOND;
    s = sched_scale(f->model, 0, f->now);
    assert_ptr_equal(s.release, other);
    sched_instance_gone(other, false, f->now);
    run(f);
    f->now += 100 * SECOND;
    s = sched_scale(f->model, 0, f->now);
    assert_null(s.release); /* it works */
    sched_cancel(f->sched, f->ids['A'], f->now);
    f->now += 10 * SECOND;
    s = sched_scale(f->model, 0, f->now);
    assert_ptr_equal(s.release, f->instance); /* none is a normal number */
    end(f);
}

static void thinly_spread_load_is_drawn_together(void **state)
{
    struct sched_model_config config = {
        .max_instances = 4, .idle_ns = 10 * SECOND, .backlog_target_ns = 1000 * SECOND};
    struct sched_limits limits = limits_of(64, 32, 4, false);
    struct fixture *f = begin(&config, &limits);
    struct sched_instance *other = add_instance(f, &limits);
    struct sched_step steps[2];

    ask(f, 'A', 4, 2);
    ask(f, 'B', 4, 2);
    assert_string_equal(plan(f), "A4*");
    steps[0] = f->step;
    assert_string_equal(plan_on(f, other), "B4*");
    steps[1] = f->step;
    assert_null(sched_scale(f->model, 0, f->now).release);
    f->now += 10 * SECOND;
    assert_null(sched_scale(f->model, 0, f->now).release); /* begins to drain the first */
    done_on(f, f->instance, &steps[0]);
    done_on(f, other, &steps[1]);
    ask(f, 'C', 4, 2);
    assert_string_equal(run(f), "A1*");
    struct sched_scale s = sched_scale(f->model, 0, f->now);
    assert_ptr_equal(s.release, f->instance);
    assert_string_equal(plan_on(f, other), "B1* C4*");
    end(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_death_is_replayed),
        cmocka_unit_test(a_death_costs_one_replay),
        cmocka_unit_test(a_guilty_one_is_found),
        cmocka_unit_test(a_lone_prompt_keeps_the_pace),
        cmocka_unit_test(each_choice_is_suspected_by_itself),
        cmocka_unit_test(the_cancelled_count),
        cmocka_unit_test(an_ordered_end_is_nobodys_fault),
        cmocka_unit_test(refused_twice_fails),
        cmocka_unit_test(a_stall_is_told_once),
        cmocka_unit_test(the_cached_prefix_wins_until_load_outweighs_it),
        cmocka_unit_test(whoever_has_room_takes_the_next),
        cmocka_unit_test(scale_by_figures),
        cmocka_unit_test(scale_in_after_idle_time),
        cmocka_unit_test(thinly_spread_load_is_drawn_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
