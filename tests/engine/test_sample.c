/* SPDX-License-Identifier: Apache-2.0 */
/* Choosing a token: every draw against the definition computed by sorting everything. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/mem.h"
#include "engine/sample.h"

#define VOCAB_MAX 5000

static uint64_t next(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static double unit(uint64_t *state)
{
    return (double)(next(state) >> 11) * 0x1p-53;
}

struct ranked {
    float logit;
    uint32_t token;
};

static int by_rank(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->token < y->token ? -1 : 1;
}

/* The definition of engine/sample.h, word by word; `draw` is the number in [0, 1). */
static uint32_t defined(const struct sampling *s, const float *logits, uint32_t vocab, double draw)
{
    static struct ranked r[VOCAB_MAX];
    static double w[VOCAB_MAX];
    double total = 0, sum = 0;
    uint32_t n = 0, kept = 0, i = 0;

    for (uint32_t t = 0; t < vocab; t++)
        if (logits[t] > -INFINITY)
            r[n++] = (struct ranked){logits[t], t};
    qsort(r, n, sizeof *r, by_rank);
    n = s->top_k ? MIN(n, s->top_k) : n;
    for (uint32_t k = 0; k < n; k++)
        total += w[k] = exp(((double)r[k].logit - r[0].logit) / s->temperature);
    for (double part = 0; kept < n; kept++) {
        if (kept && s->top_p > 0 && s->top_p < 1 && part >= s->top_p * total)
            break;
        if (w[kept] < s->min_p)
            break;
        part += w[kept];
        sum = part;
    }
    for (double part = 0; i + 1 < kept; i++)
        if ((part += w[i]) > draw * sum)
            break;
    return r[i].token;
}

/* The number that the seed and the index stand for, as the definition has it. */
static double draw_of(const struct sampling *s)
{
    uint64_t z = s->seed + (s->index + 1) * UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

enum shape { PEAKED, FLAT, TIED, EQUAL, FAR, GAPS, SHAPES };

static void fill(float *logits, uint32_t vocab, enum shape shape, uint64_t *state)
{
    for (uint32_t i = 0; i < vocab; i++) {
        double u = unit(state);
        logits[i] = (float)(shape == PEAKED  ? -3 * log(1 - u)
                            : shape == FLAT  ? u * 1e-3
                            : shape == TIED  ? floor(u * 6)
                            : shape == EQUAL ? 2.5
                            : shape == FAR   ? u * 1000 - 500
                                             : (u < 0.3    ? -INFINITY
                                                : u < 0.31 ? NAN
                                                           : u * 8));
    }
}

static void draws_are_the_definition_s(void **state)
{
    static float logits[VOCAB_MAX];
    uint64_t random = 11;
    uint32_t kinds[2] = {0};

    for (int round = 0; round < 3000; round++) {
        uint32_t vocab = 2 + (uint32_t)(next(&random) % (round % 10 ? 300 : VOCAB_MAX - 2));
        fill(logits, vocab, (enum shape)(round % SHAPES), &random);
        logits[next(&random) % vocab] = 9; /* one that counts, whatever the shape */
        struct sampling s = {.temperature = (float)(0.1 + 2 * unit(&random)),
                             .seed = next(&random),
                             .index = next(&random) % 1000};
        if (next(&random) % 3 == 0)
            s.top_k = 1 + (uint32_t)(next(&random) % 60);
        if (next(&random) % 2)
            s.top_p = (float)(0.05 + 0.95 * unit(&random));
        if (next(&random) % 3 == 0)
            s.min_p = (float)(unit(&random) * unit(&random));
        uint32_t got = UINT32_MAX, want = defined(&s, logits, vocab, draw_of(&s));
        assert_int_equal(sample_token(&s, logits, vocab, &got, NULL), 0);
        if (got != want)
            fail_msg("round %d: %u of %u, the definition says %u (temperature %g, top_k %u, top_p "
                     "%g, min_p %g)",
                     round, got, vocab, want, s.temperature, s.top_k, s.top_p, s.min_p);
        kinds[got == logits_best(logits, vocab)]++;
    }
    assert_true(kinds[0] > 500 && kinds[1] > 300); /* it is no argmax, and no scatter either */
}

static void what_cannot_be_drawn_from(void **state)
{
    float none[] = {-INFINITY, -INFINITY}, nan[] = {NAN, NAN, 1}, top[] = {1, INFINITY, 2};
    struct sampling s = {.temperature = 1};
    uint32_t token;

    assert_int_equal(sample_token(&s, none, 2, &token, NULL), 0);
    assert_int_equal(token, 0);
    assert_int_equal(sample_token(&s, nan, 3, &token, NULL), 0);
    assert_int_equal(token, 2);
    assert_int_equal(sample_token(&s, top, 3, &token, NULL), 0);
    assert_int_equal(token, 1);
    s.temperature = 1e-30f; /* weights of all others vanish */
    assert_int_equal(sample_token(&s, nan, 3, &token, NULL), 0);
    assert_int_equal(token, 2);
}

static void log_probabilities(void **state)
{
    const float logits[] = {1, 3, NAN - NAN, 3, -INFINITY, 2};
    const float plain[] = {1, 3, 0, 3, -INFINITY, 2};
    struct token_logprob top[8];
    double norm = logits_norm(plain, 6), sum = 0;

    for (int i = 0; i < 6; i++)
        sum += exp(plain[i] - norm);
    assert_true(fabs(sum - 1) < 1e-12);
    assert_int_equal(logits_best(logits, 6), 1);
    logits_top(plain, 6, norm, 3, top);
    assert_int_equal(top[0].token, 1);
    assert_int_equal(top[1].token, 3);
    assert_int_equal(top[2].token, 5);
    assert_true(fabs(top[2].logprob - (2 - norm)) < 1e-6);
    logits_top(plain, 6, norm, 8, top); /* more than there are */
    assert_true(top[7].logprob == -INFINITY);
}

/* What a draw from Qwen3's vocabulary costs: printed, since it is paid for each sequence and step.
 */
static void cost(void **state)
{
    enum { VOCAB = 151936, ROUNDS = 5 };
    const struct {
        const char *name;
        struct sampling s;
    } rows[] = {{"temperature", {.temperature = 1}},
                {"top_p", {.temperature = 1, .top_p = 0.95f}},
                {"top_k", {.temperature = 1, .top_k = 40}},
                {"min_p", {.temperature = 1, .min_p = 0.05f}}};
    _cleanup_free_ float *logits = mem_alloc(VOCAB, sizeof *logits);
    uint64_t random = 3;
    uint32_t token;

    assert_non_null(logits);
    fill(logits, VOCAB, PEAKED, &random);
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        double best = INFINITY;
        for (int k = 0; k < ROUNDS; k++) {
            struct sampling s = rows[i].s;
            s.seed = (uint64_t)k;
            uint64_t start = clock_ns();
            assert_int_equal(sample_token(&s, logits, VOCAB, &token, NULL), 0);
            best = fmin(best, clock_ms_since(start));
        }
        print_message("%-12s %.2f ms of %d tokens\n", rows[i].name, best, VOCAB);
    }
    uint64_t start = clock_ns();
    double norm = logits_norm(logits, VOCAB);
    struct token_logprob top[20];
    logits_top(logits, VOCAB, norm, 20, top);
    print_message("%-12s %.2f ms\n", "logprobs", clock_ms_since(start));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(draws_are_the_definition_s),
        cmocka_unit_test(what_cannot_be_drawn_from),
        cmocka_unit_test(log_probabilities),
        cmocka_unit_test(cost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
