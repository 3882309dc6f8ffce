/* SPDX-License-Identifier: Apache-2.0 */
/* Batching, step by step: what exactly is in each step, who is served how often, what comes out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fault.h"
#include "fixture.h"

/* ---- batching ---- */

static void prompts_run_in_chunks(void **state)
{
    struct sched_limits limits = limits_of(64, 8, 4, false);
    struct fixture *f = begin(NULL, &limits);

    ask(f, 'A', 20, 3);
    assert_string_equal(run(f), "A8");
    assert_string_equal(run(f), "A8");
    assert_string_equal(run(f), "A4*");
    assert_string_equal(run(f), "A1*");
    assert_string_equal(run(f), "A1*");
    assert_string_equal(run(f), "");
    assert_string_equal(f->events, "A100 A101 A102 A.length A! ");
    end(f);
}

static void decodes_come_first_and_prompts_fill_the_rest(void **state)
{
    struct sched_limits limits = limits_of(64, 8, 4, false);
    struct fixture *f = begin(NULL, &limits);

    ask(f, 'A', 3, 6);
    assert_string_equal(run(f), "A3*");
    ask(f, 'B', 16, 2);
    ask(f, 'C', 2, 1);
    assert_string_equal(run(f), "A1* B7");
    assert_string_equal(run(f), "A1* C2* B5"); /* C's client has been served less */
    assert_string_equal(run(f), "A1* B4*");
    assert_string_equal(run(f), "A1* B1*");
    assert_string_equal(run(f), "A1*");
    assert_string_equal(run(f), "");
    end(f);
}

static void prompts_beside_decodes_are_limited(void **state)
{
    struct sched_model_config config = {.prefill_tokens = 3, .step_tokens = 6};
    struct sched_limits limits = limits_of(64, 100, 4, false);
    struct fixture *f = begin(&config, &limits);

    ask(f, 'A', 8, 4);
    assert_string_equal(run(f), "A6");
    assert_string_equal(run(f), "A2*");
    ask(f, 'B', 7, 1);
    assert_string_equal(run(f), "A1* B3");
    assert_string_equal(run(f), "A1* B3");
    assert_string_equal(run(f), "A1* B1*");
    end(f);
}

/* `ms` in all pass until it is back. */
static const char *run_for(struct fixture *f, uint64_t ms)
{
    if (!*plan(f))
        return f->text;
    f->now += (ms - 1) * MS;
    done(f);
    return f->text;
}

static void prompts_keep_the_pace(void **state)
{
    struct sched_model_config config = {.step_ns = 10 * MS};
    struct sched_limits limits = limits_of(2000, 1000, 4, false);
    struct fixture *f = begin(&config, &limits);

    limits.max_positions = 4000;
    ask(f, 'A', 100, 3);
    assert_string_equal(run_for(f, 20), "A64");  /* slow, but few enough */
    assert_string_equal(run_for(f, 20), "A36*"); /* shows nothing */
    ask(f, 'B', 1000, 1);
    assert_string_equal(run_for(f, 5), "A1* B64");  /* 130 would fit */
    assert_string_equal(run_for(f, 1), "A1* B127"); /* and more: twice as many next */
    assert_string_equal(run_for(f, 40), "B256");    /* 64 would have fitted: half way */
    assert_string_equal(run_for(f, 10), "B160");
    assert_string_equal(run_for(f, 9), "B160");
    assert_string_equal(run_for(f, 9), "B177");
    assert_string_equal(run_for(f, 9), "B56*");
    end(f);
}

/* A step that was refused was quick, but not because more would fit. */
static void a_refusal_sets_no_pace(void **state)
{
    struct sched_model_config config = {.step_ns = 10 * MS};
    struct sched_limits limits = limits_of(2000, 1000, 4, false);
    struct sched_result refused = {.error = EINVAL, .error_text = "no"};
    struct fixture *f = begin(&config, &limits);
    struct error err = {0};

    ask(f, 'A', 100, 3);
    for (int i = 0; i < 2; i++) {
        plan(f);
        refused.step = f->step.id;
        f->now += MS / 10;
        assert_int_equal(0, sched_step_done(f->instance, &refused, f->now, &err));
    }
    assert_string_equal(f->events, "A.error A! ");
    ask(f, 'B', 1000, 1);
    assert_string_equal(run_for(f, 20), "B64");
    end(f);
}

/* ---- two in flight ---- */

static void a_second_step_refers_to_the_first(void **state)
{
    struct sched_limits limits = limits_of(64, 8, 4, true);
    struct fixture *f = begin(NULL, &limits);

    ask(f, 'A', 3, 3);
    assert_string_equal(plan(f), "A3*");
    assert_string_equal(plan(f), "A1*<");
    assert_int_equal(f->step.seqs[0].position, 3);
    assert_int_equal(f->step.seqs[0].sample_index, 1);
    assert_string_equal(plan(f), ""); /* two are in flight */
    f->text[0] = '\0';
    done_on(f, f->instance, &f->older);
    assert_string_equal(plan(f), "A1*<");
    done_on(f, f->instance, &f->older);
    done_on(f, f->instance, &f->step);
    assert_string_equal(f->events, "A100 A101 A102 A.length A! ");
    assert_string_equal(plan(f), "");
    end(f);
}

static void without_references_only_prompts_overlap(void **state)
{
    struct sched_limits limits = limits_of(64, 8, 4, false);
    struct fixture *f = begin(NULL, &limits);

    ask(f, 'A', 17, 2);
    assert_string_equal(plan(f), "A8");
    assert_string_equal(plan(f), "A8");
    done_on(f, f->instance, &f->older);
    assert_string_equal(plan(f), "A1*");
    done_on(f, f->instance, &f->older);
    assert_string_equal(plan(f), ""); /* its token is not known */
    done_on(f, f->instance, &f->step);
    assert_string_equal(plan(f), "A1*");
    end(f);
}

/* A stop token ends a sequence that is in the next step already: that result is nobody's. */
static void a_step_too_many_is_dropped(void **state)
{
    struct sched_limits limits = limits_of(64, 8, 4, true);
    struct fixture *f = begin(NULL, &limits);
    struct sched_stats stats;

    ask(f, 'A', 3, 9);
    plan(f);
    plan(f);
    f->next_token = EOS;
    done_on(f, f->instance, &f->older);
    assert_string_equal(f->events, "A2 A.stop A! ");
    done_on(f, f->instance, &f->step);
    assert_string_equal(f->events, "A2 A.stop A! ");
    sched_model_stats(f->model, f->now, &stats);
    assert_int_equal(stats.wasted_tokens, 1);
    assert_int_equal(stats.pages_used, 0);
    end(f);
}

/* ---- joining ---- */

static struct sched_limits joining(uint32_t tokens, uint32_t seqs)
{
    struct sched_limits limits = limits_of(4096, tokens, seqs, true);

    limits.joins = true;
    return limits;
}

/* Who comes while two steps are in flight does not wait for both. */
static void newcomers_join_the_second_step(void **state)
{
    struct sched_limits limits = joining(8, 8);
    struct fixture *f = begin(NULL, &limits);
    struct sched_step steps[4];

    ask(f, 'A', 3, 9);
    assert_string_equal(plan(f), "A3*");
    steps[0] = f->step;
    assert_string_equal(plan(f), "A1*<");
    steps[1] = f->step;
    assert_string_equal(plan(f), "");
    ask(f, 'B', 4, 3);
    assert_string_equal(plan(f), "+B4*");
    steps[2] = f->step;
    ask(f, 'C', 4, 3);
    assert_string_equal(plan(f), "+C3"); /* eight tokens a step */
    steps[3] = f->step;
    ask(f, 'D', 4, 3);
    assert_string_equal(plan(f), "");
    done_on(f, f->instance, &steps[0]);
    assert_string_equal(plan(f), "A1*< B1*< D4* C1*");
    assert_string_equal(plan(f), "");
    done_on(f, f->instance, &steps[1]);
    assert_string_equal(plan(f), ""); /* what joined it comes at once */
    done_on(f, f->instance, &steps[2]);
    done_on(f, f->instance, &steps[3]);
    assert_string_equal(plan(f), "A1*< B1*< C1*< D1*<");
    assert_string_equal(f->events, "A100 A101 B102 ");
    end(f);
}

/* The page that A's second step writes might be B's. */
static void nobody_joins_where_pages_changed_hands(void **state)
{
    struct sched_limits limits = joining(8, 8);
    struct fixture *f = begin(NULL, &limits);

    ask(f, 'A', 3, 9);
    plan(f);
    plan(f);
    sched_cancel(f->sched, f->ids['A'], f->now);
    ask(f, 'B', 4, 3);
    assert_string_equal(plan(f), "");
    done_on(f, f->instance, &f->older);
    assert_string_equal(plan(f), "B4*");
    end(f);
}

/* The last seat of many is for who has nothing running, while a crowd waits. */
static void a_seat_is_kept_for_newcomers(void **state)
{
    struct sched_limits limits = joining(512, 32);
    struct fixture *f = begin(NULL, &limits);
    struct sched_stats stats;

    for (int i = 0; i < 100; i++)
        ask(f, 'A', 8, 50);
    plan(f);
    assert_int_equal(f->step.n_seqs, 31);
    plan(f);
    ask(f, 'B', 8, 3);
    assert_string_equal(plan(f), "+B8*");
    ask(f, 'C', 8, 3);
    assert_string_equal(plan(f), "");
    sched_model_stats(f->model, f->now, &stats);
    assert_int_equal(stats.running, 32);
    assert_int_equal(stats.preemptions, 0);
    end(f);
}

/* ---- fairness ---- */

static void a_thousand_do_not_delay_one(void **state)
{
    struct sched_limits limits = limits_of(4096, 64, 4, false);
    struct fixture *f = begin(NULL, &limits);

    for (int i = 0; i < 1000; i++)
        ask(f, 'A', 8, 50);
    assert_string_equal(run(f), "A8* A8* A8* A8*");
    assert_string_equal(run(f), "A1* A1* A1* A1*");
    ask(f, 'B', 8, 3);
    assert_string_equal(run(f), "A1* A1* A1* B8*"); /* the youngest of A had to go */
    assert_string_equal(run(f), "A1* A1* A1* B1*");
    ask(f, 'B', 8, 3);
    assert_string_equal(run(f), "A1* A1* A1* B1*"); /* B has one running: no more displacing */
    struct sched_stats stats;
    sched_model_stats(f->model, f->now, &stats);
    assert_int_equal(stats.preemptions, 1);
    assert_string_equal(run(f), "A1* A1* A1* B4*"); /* B's second; a page of it is cached */
    end(f);
}

static void clients_are_served_alike(void **state)
{
    struct sched_limits limits = limits_of(4096, 16, 2, false);
    struct fixture *f = begin(NULL, &limits);

    for (int i = 0; i < 30; i++)
        ask(f, 'A', 16, 4);
    for (int i = 0; i < 120; i++)
        ask(f, 'B', 8, 2);
    for (int i = 0; i < 120; i++)
        run(f);
    /* prompts from the cache cost nothing: only what is computed counts */
    uint32_t a = f->served['A'], b = f->served['B'];
    assert_true(a > 100 && b > 100);
    assert_in_range(f->generated['A'] * 2 + a, (f->generated['B'] * 2 + b) * 3 / 4,
                    (f->generated['B'] * 2 + b) * 4 / 3);
    end(f);
}

static void priorities_go_first_and_displace(void **state)
{
    struct sched_limits limits = limits_of(64, 8, 2, false);
    struct fixture *f = begin(NULL, &limits);
    struct sched_request r;

    ask(f, 'A', 2, 9);
    ask(f, 'B', 2, 9);
    assert_string_equal(run(f), "A2* B2*");
    ask(f, 'C', 2, 9);
    r = request(f, 'D', 1, 2, 2);
    r.priority = -1;
    submit(f, &r);
    assert_string_equal(run(f), "A1* D2*");
    assert_string_equal(run(f), "A1* D1*");
    assert_string_equal(run(f), "A1* B3*"); /* before C, which came later */
    end(f);
}

/* ---- pages ---- */

static void the_youngest_gives_its_pages(void **state)
{
    struct sched_limits limits = limits_of(4, 16, 4, false);
    struct fixture *f = begin(NULL, &limits);

    ask(f, 'C', 4, 9);
    ask(f, 'D', 4, 9);
    assert_string_equal(run(f), "C4* D4*");
    for (int i = 0; i < 4; i++)
        assert_string_equal(run(f), "C1* D1*"); /* pages 3 and 4 */
    assert_string_equal(run(f), "C1*");         /* D has gone: 5 of its tokens are known */
    for (int i = 0; i < 3; i++)
        assert_string_equal(run(f), "C1*");
    assert_string_equal(run(f), "D5*"); /* 9 known, the first page is found again */
    struct sched_stats stats;
    sched_model_stats(f->model, f->now, &stats);
    assert_int_equal(stats.preemptions, 1);
    for (int i = 0; i < 9; i++)
        run(f);
    assert_int_equal(f->generated['C'], 9);
    assert_int_equal(f->generated['D'], 9);
    end(f);
}

static void all_pages_are_the_end(void **state)
{
    struct sched_limits limits = limits_of(2, 16, 4, true);
    struct fixture *f = begin(NULL, &limits);

    ask(f, 'A', 5, 100);
    for (int i = 0; i < 9; i++)
        run(f);
    assert_string_equal(f->events, "A100 A101 A102 A103 A.length A! ");
    end(f);
}

static void prefixes_are_shared(void **state)
{
    struct sched_limits limits = limits_of(1024, 2048, 4, false);
    struct fixture *f = begin(NULL, &limits);
    struct sched_request r = request(f, 'A', 1, 1001, 1);

    submit(f, &r);
    assert_string_equal(run(f), "A1001*");
    r.user = (void *)'B';
    submit(f, &r);
    assert_string_equal(run(f), "B1*"); /* 250 pages of 4 */
    assert_int_equal(f->cached['B'], 1000);
    r.user = (void *)'C';
    r.cache_salt = "tenant";
    r.cache_salt_len = 6;
    submit(f, &r);
    assert_string_equal(run(f), "C1001*");
    r.user = (void *)'D';
    r.n_prompt = 1000; /* the last token is always run: its logits are wanted */
    submit(f, &r);
    assert_string_equal(run(f), "D4*");
    end(f);
}

/* A burst with one long prefix computes it once. */
static void a_prefix_is_not_computed_twice_at_once(void **state)
{
    struct sched_limits limits = limits_of(1024, 128, 8, false);
    struct fixture *f = begin(NULL, &limits);

    for (int i = 0; i < 3; i++) {
        struct sched_request r = request(f, (char)('A' + i), 1, 202, 9);
        ((uint32_t *)(uintptr_t)r.prompt)[201] = 5000u + (uint32_t)i;
        submit(f, &r);
    }
    ask(f, 'D', 10, 9);
    assert_string_equal(run(f), "A128");
    assert_string_equal(run(f), "D10* A74*");
    assert_string_equal(run(f), "A1* D1* B2* C2*");
    end(f);
}

static void rope_that_depends_on_length_is_not_shared(void **state)
{
    struct sched_model_config config = {.rope_exact_len = 10};
    struct sched_limits limits = limits_of(1024, 64, 4, false);
    struct fixture *f = begin(&config, &limits);
    struct sched_request r = request(f, 'A', 1, 13, 1);

    submit(f, &r);
    assert_string_equal(run(f), "A13*");
    submit(f, &r);
    assert_string_equal(run(f), "A1*"); /* same length */
    r.n_prompt = 14;
    submit(f, &r);
    assert_string_equal(run(f), "A14*");
    r.n_prompt = 9;
    submit(f, &r);
    assert_string_equal(run(f), "A9*");
    r.n_prompt = 10;
    submit(f, &r);
    assert_string_equal(run(f), "A2*"); /* both short */
    end(f);
}

static void choices_share_their_prompt(void **state)
{
    struct sched_model_config config = {.no_prefix_cache = true};
    struct sched_limits limits = limits_of(64, 32, 8, false);
    struct fixture *f = begin(&config, &limits);
    struct sched_request r = request(f, 'A', 1, 18, 2);
    struct sched_stats stats;

    r.n = 3;
    submit(f, &r);
    assert_string_equal(run(f), "A18*");
    assert_string_equal(run(f), "A1* A2* A2*"); /* four full pages are shared */
    sched_model_stats(f->model, f->now, &stats);
    assert_int_equal(stats.pages_used, 4 + 2); /* the first choice has ended */
    assert_string_equal(run(f), "A1* A1*");
    assert_non_null(strstr(f->events, "A! "));
    submit(f, &r);
    assert_string_equal(run(f), "A18*"); /* another request shares nothing */
    end(f);
}

/* ---- ends ---- */

static void stop_tokens(void **state)
{
    struct sched_limits limits = limits_of(64, 32, 8, false);
    struct fixture *f = begin(NULL, &limits);
    static const uint32_t own = 77;
    struct sched_request r = request(f, 'A', 1, 3, 9);

    r.ignore_eos = true;
    r.stop_ids = &own;
    r.n_stop_ids = 1;
    r.min_tokens = 1;
    submit(f, &r);
    plan(f);
    assert_true(f->step.seqs[0].suppress_stop);
    f->next_token = 77;
    done(f); /* an instance that does not listen: still not the end */
    plan(f);
    assert_false(f->step.seqs[0].suppress_stop);
    f->next_token = EOS;
    done(f);
    f->next_token = 77;
    run(f);
    assert_string_equal(f->events, "A77 A2 A77 A.stop A! ");
    end(f);
}

static void the_listener_may_stop(void **state)
{
    struct sched_limits limits = limits_of(64, 32, 8, true);
    struct fixture *f = begin(NULL, &limits);

    f->stop_at = 'A';
    ask(f, 'A', 3, 9);
    ask(f, 'B', 3, 1);
    assert_string_equal(run(f), "A3* B3*");
    assert_string_equal(f->events, "A100 A.stop A! B101 B.length B! ");
    assert_string_equal(run(f), "");
    end(f);
}

/* The other choices do not wait for a first that has ended. */
static void a_choice_may_end_before_its_prompt(void **state)
{
    struct sched_limits limits = limits_of(64, 8, 8, false);
    struct fixture *f = begin(NULL, &limits);
    struct sched_request r = request(f, 'A', 1, 12, 2);

    r.n = 2;
    submit(f, &r);
    assert_string_equal(plan(f), "A8");
    sched_stop(f->sched, f->ids['A'], 0, f->now);
    assert_string_equal(plan(f), "A8"); /* nothing was known to be computed */
    done_on(f, f->instance, &f->older);
    done_on(f, f->instance, &f->step);
    assert_string_equal(run(f), "A4*");
    assert_string_equal(run(f), "A1*");
    assert_string_equal(f->events, "A.stop A100 A101 A.length A! ");
    end(f);
}

static void nothing_to_sample(void **state)
{
    struct sched_limits limits = limits_of(64, 8, 8, false);
    struct fixture *f = begin(NULL, &limits);

    ask(f, 'A', 10, 0);
    assert_string_equal(run(f), "A8");
    assert_string_equal(run(f), "A2");
    assert_string_equal(f->events, "A.length A! ");
    end(f);
}

static void cancelled_within_a_step(void **state)
{
    struct sched_limits limits = limits_of(64, 8, 8, true);
    struct fixture *f = begin(NULL, &limits);
    struct sched_stats stats;

    ask(f, 'A', 3, 9);
    ask(f, 'B', 3, 9);
    ask(f, 'C', 30, 9);
    plan(f);
    sched_cancel(f->sched, f->ids['A'], f->now);
    sched_cancel(f->sched, f->ids['C'], f->now);
    sched_cancel(f->sched, 12345, f->now);
    assert_string_equal(f->events, "A.cancelled A! C.cancelled C! ");
    assert_string_equal(plan(f), "B1*<");
    done_on(f, f->instance, &f->older);
    done_on(f, f->instance, &f->step);
    sched_cancel(f->sched, f->ids['B'], f->now);
    sched_model_stats(f->model, f->now, &stats);
    assert_int_equal(stats.pages_used, 0);
    assert_int_equal(stats.ended, 3);
    end(f);
}

static void the_queue_is_bounded(void **state)
{
    struct sched_model_config config = {.max_queue = 3, .tokens_per_s = 10};
    struct fixture *f = begin(&config, NULL);
    uint32_t retry = 0;
    uint64_t id = 0;

    for (int i = 0; i < 3; i++)
        ask(f, 'A', 100, 1);
    struct sched_request r = request(f, 'B', 1, 4, 1);
    assert_int_equal(SCHED_FULL, sched_submit(f->sched, &r, f->now, &id, &retry, NULL));
    assert_int_equal(retry, 31); /* 300 tokens at 10 a second, and an instance to be started */
    assert_int_equal(id, 0);
    r.n_prompt = 0;
    assert_int_equal(-EINVAL, sched_submit(f->sched, &r, f->now, &id, &retry, NULL));
    end(f);
}

static void nobody_waits_for_ever(void **state)
{
    struct fixture *f = begin(NULL, NULL);
    struct sched_request r = request(f, 'A', 1, 4, 1);
    struct sched_limits small = limits_of(2, 8, 8, false);
    uint64_t next;

    r.deadline = f->now + SECOND;
    submit(f, &r);
    ask(f, 'B', 9, 1);
    sched_tick(f->sched, f->now, &next);
    assert_int_equal(next, f->now + SECOND);
    f->now += SECOND;
    sched_tick(f->sched, f->now, &next);
    assert_string_equal(f->events, "A.timeout A! ");
    assert_int_equal(next, UINT64_MAX);
    add_instance(f, &small); /* which B does not fit */
    sched_tick(f->sched, f->now, &next);
    assert_string_equal(f->events, "A.timeout A! B.too_long B! ");
    r.n_prompt = 9;
    uint32_t retry;
    assert_int_equal(-E2BIG, sched_submit(f->sched, &r, f->now, &f->ids['C'], &retry, NULL));
    end(f);
}

/* ---- memory ---- */

/* Each allocation fails once: an error, nothing half-done, nothing lost (with a sanitizer). */
static void every_allocation_may_fail(void **state)
{
    struct sched_limits limits = limits_of(64, 32, 8, true);
    bool failed = true;

    for (int n = 1; failed; n++) {
        struct sched_config sc = {.hash_seed = 1};
        struct sched_model_config mc = {.page_size = 4};
        struct sched *sched = NULL;
        struct sched_model *model = NULL;
        struct sched_instance *instance = NULL;
        uint32_t prompt[9] = {0}, retry;
        uint64_t id;
        char fault[32];

        snprintf(fault, sizeof fault, "alloc:%d", n);
        setenv("EMBER_FAULT", fault, 1);
        fault_init();
        failed = sched_new(&sc, &sched, NULL) < 0 ||
                 sched_model_add(sched, &mc, &model, NULL) < 0 ||
                 sched_instance_add(model, &limits, NULL, 0, &instance, NULL) < 0;
        struct sched_request r = {.model = model,
                                  .prompt = prompt,
                                  .n_prompt = 9,
                                  .n = 2,
                                  .max_tokens = 4,
                                  .stop_ids = prompt,
                                  .n_stop_ids = 1};
        failed = failed || sched_submit(sched, &r, 0, &id, &retry, NULL) < 0;
        assert_true(n < 40);
        assert_true(failed || n > 8);
        unsetenv("EMBER_FAULT");
        fault_init();
        if (sched)
            assert_int_equal(0, sched_verify(sched, NULL));
        if (instance && failed) /* and goes on */
            assert_int_equal(0, sched_submit(sched, &r, 0, &id, &retry, NULL));
        sched_free(sched);
    }
}

static void count_timeouts(void *context, const struct sched_event *event)
{
    uint32_t *counts = context;

    counts[0] += event->kind == SCHED_FINISHED && event->reason == SCHED_TIMEOUT;
    counts[1] += event->kind == SCHED_DONE;
}

/* Thousands that wait in vain end together; so do figures stay right while they do. */
static void a_crowd_runs_out_of_time(void **state)
{
    enum { CROWD = 20000 };
    uint32_t counts[2] = {0}, prompt[4] = {1, 2, 3, 4}, retry;
    struct sched_config config = {.hash_seed = 1, .event = count_timeouts, .context = counts};
    struct sched_model_config model_config = {.page_size = 4, .max_queue = CROWD};
    struct sched_model *model;
    struct sched_stats stats;
    struct sched *sched;
    uint64_t id, next;

    assert_int_equal(sched_new(&config, &sched, NULL), 0);
    assert_int_equal(sched_model_add(sched, &model_config, &model, NULL), 0);
    for (uint32_t i = 0; i < CROWD; i++) {
        struct sched_request r = {.model = model,
                                  .client = i % 7,
                                  .prompt = prompt,
                                  .n_prompt = 4,
                                  .max_tokens = 1,
                                  .deadline = (i + 1) * MS + SECOND};
        assert_int_equal(sched_submit(sched, &r, i * MS, &id, &retry, NULL), 0);
    }
    sched_model_stats(model, CROWD * MS, &stats);
    assert_int_equal(stats.oldest_wait_ns, CROWD * MS);
    sched_tick(sched, SECOND + CROWD / 2 * MS, &next);
    assert_int_equal(counts[0], CROWD / 2);
    assert_int_equal(next, SECOND + (CROWD / 2 + 1) * MS);
    sched_model_stats(model, CROWD * MS, &stats);
    assert_int_equal(stats.waiting, CROWD / 2);
    assert_int_equal(stats.oldest_wait_ns, CROWD / 2 * MS);
    sched_tick(sched, 2 * CROWD * MS, &next);
    assert_int_equal(counts[1], CROWD);
    assert_int_equal(next, UINT64_MAX);
    assert_int_equal(sched_verify(sched, NULL), 0);
    sched_free(sched);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_crowd_runs_out_of_time),
        cmocka_unit_test(prompts_run_in_chunks),
        cmocka_unit_test(decodes_come_first_and_prompts_fill_the_rest),
        cmocka_unit_test(prompts_beside_decodes_are_limited),
        cmocka_unit_test(prompts_keep_the_pace),
        cmocka_unit_test(a_refusal_sets_no_pace),
        cmocka_unit_test(a_second_step_refers_to_the_first),
        cmocka_unit_test(without_references_only_prompts_overlap),
        cmocka_unit_test(a_step_too_many_is_dropped),
        cmocka_unit_test(newcomers_join_the_second_step),
        cmocka_unit_test(nobody_joins_where_pages_changed_hands),
        cmocka_unit_test(a_seat_is_kept_for_newcomers),
        cmocka_unit_test(a_thousand_do_not_delay_one),
        cmocka_unit_test(clients_are_served_alike),
        cmocka_unit_test(priorities_go_first_and_displace),
        cmocka_unit_test(the_youngest_gives_its_pages),
        cmocka_unit_test(all_pages_are_the_end),
        cmocka_unit_test(prefixes_are_shared),
        cmocka_unit_test(a_prefix_is_not_computed_twice_at_once),
        cmocka_unit_test(rope_that_depends_on_length_is_not_shared),
        cmocka_unit_test(choices_share_their_prompt),
        cmocka_unit_test(stop_tokens),
        cmocka_unit_test(the_listener_may_stop),
        cmocka_unit_test(a_choice_may_end_before_its_prompt),
        cmocka_unit_test(nothing_to_sample),
        cmocka_unit_test(cancelled_within_a_step),
        cmocka_unit_test(the_queue_is_bounded),
        cmocka_unit_test(nobody_waits_for_ever),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
