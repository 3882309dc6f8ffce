/* SPDX-License-Identifier: Apache-2.0 */
/* Grammars in an instance: what a driver may say, and what its sequences may sample. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/instance/grammars.h"

#define VOCAB 4096
#define EOS 2

static struct grammars *fresh(void)
{
    return grammars_new(NULL, SOURCE_ROOT "/models/ember-tiny", VOCAB);
}

static int define(struct grammars *g, uint64_t id, const void *bytes, size_t len)
{
    Ember__V1__Grammar message = EMBER__V1__GRAMMAR__INIT;
    struct error err = {0};

    message.id = id;
    message.program = (ProtobufCBinaryData){len, (uint8_t *)bytes};
    return grammars_define(g, &message, &err);
}

static void define_regex(struct grammars *g, uint64_t id, const char *pattern)
{
    struct buffer program = {0};

    assert_int_equal(grammar_from_regex(pattern, strlen(pattern), &program, NULL), 0);
    assert_int_equal(define(g, id, program.data, program.len), 0);
    buffer_free(&program);
}

static Ember__V1__SequenceStep step(uint64_t id, uint64_t grammar, uint32_t *generated, size_t n,
                                    uint32_t sample_index)
{
    static uint32_t ends[] = {EOS, VOCAB + 7};
    Ember__V1__SequenceStep s = EMBER__V1__SEQUENCE_STEP__INIT;

    s.id = id;
    s.grammar = grammar;
    s.sample = true;
    s.sample_index = sample_index;
    s.generated = generated;
    s.n_generated = n;
    s.ends = ends;
    s.n_ends = 2;
    return s;
}

/* Samples the k-th allowed token under a row of equal logits; returns it. */
static uint32_t sample(struct grammars *g, const Ember__V1__SequenceStep *s, uint32_t k,
                       bool *ret_ended, uint32_t *ret_allowed)
{
    static float logits[VOCAB];
    struct matcher *m;
    uint32_t token = 0, n = 0;

    assert_int_equal(grammars_find(g, s, &m, NULL), 0);
    for (uint32_t i = 0; i < VOCAB; i++)
        logits[i] = 1;
    assert_int_equal(grammars_restrict(g, m, s, logits, NULL), 0);
    for (uint32_t i = 0; i < VOCAB; i++)
        n += logits[i] > -INFINITY;
    assert_true(n > 0);
    *ret_allowed = n;
    k %= n;
    for (uint32_t i = 0; i < VOCAB; i++)
        if (logits[i] > -INFINITY && !k--) {
            token = i;
            break;
        }
    grammars_take(g, m, s, token, ret_ended);
    return token;
}

static void test_a_replay_goes_on_at_the_same_place(void **unused)
{
    struct grammars *g = fresh(), *other = fresh();
    uint32_t tokens[64], n = 0, allowed, again;
    bool ended = false, ended_again;

    define_regex(g, 5, "[a-z]{3,20} [0-9]{2}");
    define_regex(other, 9, "[a-z]{3,20} [0-9]{2}");
    for (; n < 40 && !ended; n++) {
        Ember__V1__SequenceStep s = step(1, 5, NULL, 0, n), r = step(100 + n, 9, tokens, n, n);
        uint32_t token = sample(g, &s, n * 7919 + 1, &ended, &allowed);
        assert_int_equal(sample(other, &r, n * 7919 + 1, &ended_again, &again), token);
        assert_int_equal(allowed, again);
        assert_int_equal(ended, ended_again);
        tokens[n] = token;
    }
    assert_true(ended);
    /* A step that was on its way already: something is sampled, and nothing breaks. */
    Ember__V1__SequenceStep late = step(1, 5, NULL, 0, n);
    sample(g, &late, 0, &ended, &allowed);
    assert_true(ended);
    grammars_free(g);
    grammars_free(other);
}

static void test_ends_are_allowed_where_the_text_may_end(void **unused)
{
    struct grammars *g = fresh();
    uint32_t allowed;
    bool ended;

    define_regex(g, 1, "a*");
    Ember__V1__SequenceStep s = step(7, 1, NULL, 0, 0);
    assert_int_equal(sample(g, &s, 0, &ended, &allowed), EOS); /* the lowest id that is allowed */
    assert_true(ended);
    define_regex(g, 2, "a+");
    s = step(8, 2, NULL, 0, 0);
    assert_int_not_equal(sample(g, &s, 0, &ended, &allowed), EOS);
    assert_false(ended);
    grammars_free(g);
}

static void test_what_is_wrong_is_refused(void **unused)
{
    struct grammars *g = fresh();
    struct matcher *m;
    struct error err = {0};
    uint32_t wrong[] = {EOS + 1};

    assert_int_equal(define(g, 1, "nonsense", 8), -EBADMSG);
    define_regex(g, 1, "ab");
    assert_int_equal(define(g, 1, "x", 1), -EINVAL); /* defined already */
    assert_int_equal(define(g, 0, "x", 1), -EINVAL);
    Ember__V1__SequenceStep s = step(1, 99, NULL, 0, 0);
    assert_int_equal(grammars_find(g, &s, &m, &err), -EINVAL);
    s = step(1, 1, NULL, 0, 3); /* tokens that nobody told of */
    assert_int_equal(grammars_find(g, &s, &m, &err), -EINVAL);
    s = step(1, 1, wrong, 1, 1); /* tokens that do not keep to it */
    assert_int_equal(grammars_find(g, &s, &m, &err), -EINVAL);
    s = step(1, 1, NULL, 0, 0);
    assert_int_equal(grammars_find(g, &s, &m, &err), 0);
    s.sample_index = 1; /* ahead of what was sampled */
    assert_int_equal(grammars_find(g, &s, &m, &err), -EINVAL);
    grammars_free(g);
}

static void test_bounds(void **unused)
{
    struct grammars *g = fresh();
    struct matcher *m;
    uint64_t id = 1;

    define_regex(g, 1, "[a-z]+");
    assert_int_equal(define(g, 1, NULL, 0), 0); /* forgotten, and free to be another */
    define_regex(g, 1, "[0-9]+");
    for (; id <= GRAMMARS_MATCHERS_MAX; id++) {
        Ember__V1__SequenceStep s = step(id, 1, NULL, 0, 0);
        assert_int_equal(grammars_find(g, &s, &m, NULL), 0);
    }
    Ember__V1__SequenceStep s = step(id, 1, NULL, 0, 0);
    assert_int_equal(grammars_find(g, &s, &m, NULL), -E2BIG);
    uint64_t over[] = {4, 5, 1234567};
    grammars_end(g, over, 3);
    assert_int_equal(grammars_find(g, &s, &m, NULL), 0);
    assert_int_equal(define(g, 1, NULL, 0), 0); /* those who follow it go on */
    s = step(17, 1, NULL, 0, 0);
    assert_int_equal(grammars_find(g, &s, &m, NULL), 0);
    struct buffer program = {0};
    uint64_t n = 2;
    int r = grammar_from_regex("x", 1, &program, NULL);
    for (; r == 0 && n < 100000; n++)
        r = define(g, n, program.data, program.len);
    assert_int_equal(r, -E2BIG);
    assert_true(n > 256); /* what a gateway keeps there */
    buffer_free(&program);
    grammars_tidy(g);
    grammars_reset(g);
    s = step(17, 2, NULL, 0, 0);
    assert_int_equal(grammars_find(g, &s, &m, NULL), -EINVAL);
    grammars_free(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_replay_goes_on_at_the_same_place),
        cmocka_unit_test(test_ends_are_allowed_where_the_text_may_end),
        cmocka_unit_test(test_what_is_wrong_is_refused), cmocka_unit_test(test_bounds)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
