/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantising rows: never worse than plain rounding, as good as a search of a fine grid of scales up
 * to a little; values at the limits; the same bits with and without AVX2. And which tensors rules
 * choose.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "model/quant/quantize.h"
#include "model/quant/rules.h"
#include "model/quant/search.h"

#define K_MAX 512

static const struct quantize_form q8 = {EMBER_QUANT_INT8, 32};
static const struct quantize_form q4 = {EMBER_QUANT_INT4, 32};

static uint64_t state = 1;
static double uniform(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) / (double)(UINT64_C(1) << 53);
}
static float gaussian(void)
{
    return (float)(sqrt(-2 * log(uniform() + 1e-300)) * cos(2 * M_PI * uniform()));
}

struct row {
    float w[K_MAX], value[K_MAX];
    uint8_t codes[K_MAX + 1];
    uint16_t scales[K_MAX / 32 + 1];
};

/* Quantises the k values of row->w; the squared error. Bytes behind the outputs stay. */
static double quantised(const struct quantize_form *form, struct row *row, uint32_t k)
{
    uint32_t groups = (k + form->group - 1) / form->group;
    uint32_t bytes = form->quant == EMBER_QUANT_INT8 ? k : (k + 31) / 32 * 16;
    double error = 0;
    memset(row->w + k, 0, (K_MAX - k) * sizeof *row->w);
    memset(row->codes, 0xa5, sizeof row->codes);
    memset(row->scales, 0xa5, sizeof row->scales);
    assert_int_equal(quantize_row(form, row->w, k, row->codes, row->scales), 0);
    assert_int_equal(row->codes[bytes], 0xa5);
    assert_int_equal(row->scales[groups], 0xa5a5);
    quantize_value(form, row->codes, row->scales, k, row->value);
    for (uint32_t i = 0; i < k; i++)
        error += pow((double)row->value[i] - row->w[i], 2);
    return error;
}

/* What an error of value i counts. */
static double weight_of(const float *w, uint32_t n, uint32_t i)
{
    double mean = 0;
    for (uint32_t j = 0; j < n; j++)
        mean += (double)w[j] * w[j] / n;
    return mean + (double)w[i] * w[i];
}

/* The weighted error of a row of one group. */
static double weighted(const struct quantize_form *form, struct row *row, uint32_t k)
{
    double error = 0;
    quantised(form, row, k);
    for (uint32_t i = 0; i < k; i++)
        error += weight_of(row->w, k, i) * pow((double)row->value[i] - row->w[i], 2);
    return error;
}

/* What one scale leaves of a group: codes to nearest within low..high. */
static double error_at(const float *w, uint32_t n, double scale, int low, int high)
{
    double error = 0, mean = weight_of(w, n, 0) - (double)w[0] * w[0];
    for (uint32_t i = 0; i < n; i++) {
        double q = fmin(fmax(nearbyint(w[i] / scale), low), high);
        error += (mean + (double)w[i] * w[i]) * pow(q * scale - w[i], 2);
    }
    return error;
}

/* Over a fine grid of scales of either sign. */
static double best_error(const float *w, uint32_t n, int low, int high)
{
    double most = 0, best = INFINITY;
    for (uint32_t i = 0; i < n; i++)
        most = fmax(most, fabs((double)w[i]));
    for (double codes = 0.4 * -low; codes < -1.5 * low; codes += -low / 4000.0)
        for (int sign = -1; sign < 2; sign += 2)
            best = fmin(best, error_at(w, n, sign * most / codes, low, high));
    return best;
}

static void test_search(void **unused)
{
    struct row row;
    double got[2] = {0}, best[2] = {0}, plain[2] = {0};
    for (int round = 0; round < 60; round++) {
        double spread = pow(10, -3 + 4 * uniform());
        double most = 0;
        for (int i = 0; i < 32; i++) {
            row.w[i] = (float)(gaussian() * spread * (round % 3 == 2 && i == 7 ? 8 : 1));
            most = fmax(most, fabs((double)row.w[i]));
        }
        const double rms = pow(spread, 4);
        got[0] += weighted(&q8, &row, 32) / rms;
        plain[0] += error_at(row.w, 32, most / 127, -128, 127) / rms;
        best[0] += best_error(row.w, 32, -128, 127) / rms;
        double here = weighted(&q4, &row, 32) / rms;
        double nearest = error_at(row.w, 32, most / 7, -8, 7) / rms;
        assert_true(here <= nearest * 1.0001);
        got[1] += here;
        plain[1] += nearest;
        best[1] += best_error(row.w, 32, -8, 7) / rms;
    }
    /* 8 bits: errors of the scale's 11 bits and of codes that are hardly correlated with it. */
    if (!(got[0] <= 1.12 * best[0] && got[0] < 0.92 * plain[0]))
        fail_msg("int8: %g, best %g, plain %g", got[0], best[0], plain[0]);
    if (!(got[1] <= 1.05 * best[1] && got[1] < 0.80 * plain[1]))
        fail_msg("int4: %g, best %g, plain %g", got[1], best[1], plain[1]);
}

/* Each value is given the code that is nearest under the scale that was chosen. */
static void test_nearest(void **unused)
{
    static const struct quantize_form *const forms[] = {&q8, &q4};
    struct row row;
    for (size_t f = 0; f < ARRAY_LEN(forms); f++) {
        for (int i = 0; i < 96; i++)
            row.w[i] = gaussian();
        quantised(forms[f], &row, 96);
        for (int i = 0; i < 96; i++) {
            float scale = fabsf(quantize_from_f16(row.scales[i / 32]));
            double off = fabs((double)row.value[i] - row.w[i]);
            int code = f ? row.codes[i / 32 * 16 + i % 16] >> (i % 32 >= 16 ? 4 : 0) & 15
                         : (int8_t)row.codes[i];
            bool end = f ? code == 0 || code == 15 : code == -128 || code == 127;
            if (off > scale * 0.50001 && !end)
                fail_msg("form %zu, value %d: %g stands for %g with scale %g", f, i, row.value[i],
                         row.w[i], scale);
        }
    }
}

static void test_tails(void **unused)
{
    static const struct quantize_form *const forms[] = {&q8, &q4};
    struct row row, whole;
    for (size_t f = 0; f < ARRAY_LEN(forms); f++)
        for (uint32_t k = 1; k < 100; k++) {
            double error, power = 0;
            for (uint32_t i = 0; i < k; i++) {
                row.w[i] = gaussian();
                power += row.w[i] * row.w[i];
            }
            error = quantised(forms[f], &row, k);
            assert_true(error <= power * 0.05);
            /* a row that ends inside a group is one that goes on with zeros */
            memcpy(whole.w, row.w, sizeof row.w);
            quantised(forms[f], &whole, (k + 31) / 32 * 32);
            assert_memory_equal(whole.value, row.value, k * sizeof *row.value);
        }
}

static void test_limits(void **unused)
{
    struct row row = {0};
    float none[64] = {0};
    /* nothing but zeros: exact, whatever the form */
    assert_true(quantised(&q8, &row, 64) == 0 && quantised(&q4, &row, 64) == 0);
    assert_memory_equal(row.value, none, sizeof none);
    /* one value and zeros */
    row.w[5] = -3;
    assert_true(quantised(&q8, &row, 64) < 1e-5 && quantised(&q4, &row, 64) < 1e-5);
    row.w[5] = 3;
    assert_true(quantised(&q8, &row, 64) < 1e-5 && quantised(&q4, &row, 64) < 1e-5);
    /* smaller than any scale, and the smallest that there are */
    for (int i = 0; i < 64; i++)
        row.w[i] = i % 2 ? 1e-38f : -1e-44f;
    assert_true(quantised(&q8, &row, 64) < 1e-70);
    for (int i = 0; i < 64; i++)
        row.w[i] = 3e-7f * (float)(i % 9 - 4);
    assert_true(quantised(&q4, &row, 64) < 64 * 1e-12);
    /* as large as scales of 16 bits allow, and beyond */
    for (int i = 0; i < 64; i++)
        row.w[i] = i % 2 ? 65504.0f * 6 : -65504.0f * 6;
    assert_true(quantised(&q4, &row, 64) < 64 * 1e9);
    row.w[40] = 65504.0f * 128;
    assert_int_equal(quantize_row(&q4, row.w, 64, row.codes, row.scales), -ERANGE);
    row.w[40] = 3e38f;
    assert_int_equal(quantize_row(&q8, row.w, 64, row.codes, row.scales), -ERANGE);
    row.w[40] = NAN;
    assert_int_equal(quantize_row(&q8, row.w, 64, row.codes, row.scales), -EDOM);
    row.w[40] = -INFINITY;
    assert_int_equal(quantize_row(&q4, row.w, 64, row.codes, row.scales), -EDOM);
}

static void test_f16(void **unused)
{
    for (uint32_t h = 0; h < 0x10000; h++) {
        float x = quantize_from_f16((uint16_t)h);
        if ((h & 0x7fff) > 0x7c00) {
            assert_true(isnan(x) && isnan(quantize_from_f16(quantize_to_f16(x))));
            continue;
        }
        assert_int_equal(quantize_to_f16(x), h);
        if ((h & 0x7fff) >= 0x7bff)
            continue;
        /* half way to the next one: to the even one; a little beyond: to the next */
        float next = quantize_from_f16((uint16_t)(h + 1)), middle = (x + next) / 2;
        assert_int_equal(quantize_to_f16(middle), h + (h & 1));
        assert_int_equal(quantize_to_f16(nextafterf(middle, next)), h + 1);
    }
    assert_int_equal(quantize_to_f16(65519.9f), 0x7bff);
    assert_int_equal(quantize_to_f16(65520), 0x7c00);
}

static void test_both_builds(void **unused)
{
#if defined(__x86_64__)
    struct quantize_tries tries;
    float w[64], a[4][QUANTIZE_TRIES], ends[4];
    uint8_t codes[2][64];
    if (!__builtin_cpu_supports("avx2"))
        skip();
    for (int i = 0; i < 64; i++)
        w[i] = gaussian();
    for (int i = 0; i < QUANTIZE_TRIES; i++) {
        tries.inverse[i] = 1 + (float)i;
        tries.low[i] = -8;
        tries.high[i] = 7;
    }
    quantize_sums_plain(w, 64, &tries, a[0], a[1]);
    quantize_sums_avx2(w, 64, &tries, a[2], a[3]);
    assert_memory_equal(a[0], a[2], 2 * sizeof a[0]);
    assert_true(quantize_range_plain(w, 64, &ends[0], &ends[1]));
    assert_true(quantize_range_avx2(w, 64, &ends[2], &ends[3]));
    assert_memory_equal(ends, ends + 2, 2 * sizeof *ends);
    quantize_codes8_plain(w, 64, 50, -128, 127, codes[0]);
    quantize_codes8_avx2(w, 64, 50, -128, 127, codes[1]);
    assert_memory_equal(codes[0], codes[1], 64);
    quantize_codes4_plain(w, 64, 3, -8, 7, codes[0]);
    quantize_codes4_avx2(w, 64, 3, -8, 7, codes[1]);
    assert_memory_equal(codes[0], codes[1], 32);
#endif
}

/* ---- rules ---- */

static void refused(const char *text, const char *words)
{
    struct quantize_rules *rules = NULL;
    struct error err = {0};
    assert_int_equal(quantize_rules_parse(text, &rules, &err), -EINVAL);
    assert_null(rules);
    if (!strstr(err.text, words))
        fail_msg("\"%s\" does not say \"%s\"", err.text, words);
}

static void test_rules(void **unused)
{
    struct quantize_rules *rules = NULL;
    struct error err = {0};
    uint32_t line;
    refused("", "neither q8 nor q4");
    refused("q5", "\"q5\"");
    refused("keep", "neither q8 nor q4");
    refused("q8\nlose=x", "keep=PATTERN");
    refused("q8\nkeep", "keep=PATTERN");
    refused("q8\nkeep=(", "pattern \"(\"");
    if (quantize_rules_parse("q4\nkeep=q_proj\nq8=^layers\\.\n\nq4=.", &rules, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(quantize_rules_default(rules), QUANTIZE_Q4);
    assert_int_equal(quantize_rules_count(rules), 3);
    assert_string_equal(quantize_rules_text(rules, 2), "q8=^layers\\.");
    assert_int_equal(
        quantize_rules_choose(rules, "model.layers.3.self_attn.q_proj.weight", QUANTIZE_Q4, &line),
        QUANTIZE_KEEP);
    assert_int_equal(line, 1);
    assert_int_equal(quantize_rules_choose(rules, "layers.3.qkv", QUANTIZE_Q4, &line), QUANTIZE_Q8);
    assert_int_equal(line, 2);
    assert_int_equal(quantize_rules_choose(rules, "head", QUANTIZE_Q8, &line), QUANTIZE_Q4);
    quantize_rules_free(rules);
    /* a pattern that runs wild gives up, and matches nothing */
    assert_int_equal(quantize_rules_parse("q8\nkeep=^(a+)+$", &rules, &err), 0);
    assert_int_equal(quantize_rules_choose(rules, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!",
                                           QUANTIZE_Q8, &line),
                     QUANTIZE_Q8);
    quantize_rules_free(rules);
    /* sizes from outside */
    _cleanup_free_ char *long_text = mem_alloc(QUANTIZE_TEXT_MAX + 100, 1);
    memset(long_text, 'a', QUANTIZE_TEXT_MAX + 99);
    memcpy(long_text, "q8\nkeep=", 8);
    refused(long_text, "at most");
    _cleanup_(buffer_free) struct buffer many = {0};
    buffer_printf(&many, "q8");
    for (int i = 0; i < 100; i++)
        buffer_printf(&many, "\nkeep=%d", i);
    refused(many.data, "more than");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_search), cmocka_unit_test(test_nearest),
        cmocka_unit_test(test_tails),  cmocka_unit_test(test_limits),
        cmocka_unit_test(test_f16),    cmocka_unit_test(test_both_builds),
        cmocka_unit_test(test_rules)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
