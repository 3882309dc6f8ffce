/* SPDX-License-Identifier: Apache-2.0 */
/* Row-wise and linear kernels against the reference: embed, norm, add, linear, glu, act, gather,
 * copy, argmax. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "harness.h"

static const enum ember_dtype floats[] = {EMBER_F32, EMBER_F16, EMBER_BF16};
static const uint32_t widths[] = {1, 3, 8, 15, 16, 17, 31, 64, 100, 257, 1024};
static const uint32_t row_counts[] = {1, 2, 5, 6, 7, 13};

static void test_embed(void **ctx)
{
    for (size_t d = 0; d < ARRAY_LEN(widths); d++) {
        for (size_t t = 0; t < ARRAY_LEN(floats); t++) {
            struct kcase c;
            uint32_t n = row_counts[d % ARRAY_LEN(row_counts)];
            kcase_start(&c, EMBER_OP_EMBED, EMBER_ROWS_TOKENS, n);
            kcase_tensor(&c, EMBED_TOKENS, EMBER_ARENA_IO, EMBER_I32, 0, 1, n + 3, 0, 0);
            for (uint32_t i = 0; i < n; i++)
                ((int32_t *)kcase_row(&c, EMBED_TOKENS, 0))[i] = (int32_t)rnd(50);
            kcase_tensor(&c, EMBED_TABLE, EMBER_ARENA_WEIGHTS, floats[t], 3, 2, 50, widths[d], 0);
            kcase_tensor(&c, EMBED_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n + 3, widths[d], 0);
            c.op.f[EMBED_F_SCALE] = t ? 1 : 1.75;
            kcase_rows(&c, EMBED_TOKENS, 1);
            kcase_out(&c, EMBED_OUT, 1);
            kcase_check(&c, "embed");
            kcase_free(&c);
        }
    }
}

static void norm_case(uint32_t n, uint32_t D, uint32_t group, enum ember_norm kind,
                      enum ember_dtype dtype, uint32_t options)
{
    struct kcase c;
    char what[96];
    snprintf(what, sizeof(what), "norm D=%u group=%u kind=%d dtype=%d options=%u", D, group, kind,
             dtype, options);
    kcase_start(&c, EMBER_OP_NORM, EMBER_ROWS_TOKENS, n);
    kcase_tensor(&c, NORM_X, EMBER_ARENA_SCRATCH, EMBER_F32, 4, 2, n + 1, D, 0);
    kcase_tensor(&c, NORM_W, EMBER_ARENA_WEIGHTS, dtype, 1, 1, group ? group : D, 0, 0);
    if (kind == EMBER_NORM_LAYER)
        kcase_tensor(&c, NORM_B, EMBER_ARENA_WEIGHTS, dtype, 1, 1, group ? group : D, 0, 0);
    if (options & 1)
        kcase_tensor(&c, NORM_DELTA, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n + 1, D, 0);
    if (options & 2)
        c.op.t[NORM_OUT] = c.op.t[NORM_X];
    else
        kcase_tensor(&c, NORM_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n + 1, D, 0);
    c.op.i[NORM_I_KIND] = kind;
    c.op.i[NORM_I_GROUP] = group;
    c.op.f[NORM_F_EPS] = 1e-6;
    c.op.f[NORM_F_W_BIAS] = options & 4 ? 1 : 0;
    c.op.f[NORM_F_DELTA_SCALE] = 0.5;
    kcase_rows(&c, NORM_DELTA, 1);
    kcase_out(&c, NORM_X, 1);
    kcase_out(&c, NORM_OUT, 1);
    kcase_check(&c, what);
    kcase_free(&c);
}

static void test_norm(void **ctx)
{
    for (size_t d = 0; d < ARRAY_LEN(widths); d++)
        for (uint32_t kind = 0; kind < 2; kind++)
            for (uint32_t options = 0; options < 8; options++)
                if (widths[d] > 1 || kind == EMBER_NORM_RMS)
                    norm_case(row_counts[(d + options) % ARRAY_LEN(row_counts)], widths[d], 0, kind,
                              floats[(options + kind) % 3], options);
    norm_case(4, 256, 64, EMBER_NORM_RMS, EMBER_BF16, 5);
    norm_case(3, 66, 22, EMBER_NORM_LAYER, EMBER_F16, 0);
}

static void test_add(void **ctx)
{
    for (size_t d = 0; d < ARRAY_LEN(widths); d++) {
        struct kcase c;
        uint32_t n = row_counts[d % ARRAY_LEN(row_counts)];
        kcase_start(&c, EMBER_OP_ADD, d & 1 ? EMBER_ROWS_LOGITS : EMBER_ROWS_TOKENS, n);
        kcase_tensor(&c, ADD_X, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, widths[d], 0);
        kcase_tensor(&c, ADD_DELTA, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, widths[d], 0);
        c.op.f[ADD_F_SCALE] = 0.25;
        kcase_rows(&c, ADD_DELTA, 1);
        kcase_out(&c, ADD_X, 1);
        kcase_check(&c, "add");
        kcase_free(&c);
    }
}

static void linear_case(uint32_t n, uint32_t N, uint32_t K, enum ember_dtype dtype,
                        uint32_t options)
{
    struct kcase c;
    char what[96];
    snprintf(what, sizeof(what), "linear rows=%u N=%u K=%u dtype=%d options=%u", n, N, K, dtype,
             options);
    kcase_start(&c, EMBER_OP_LINEAR, options & 8 ? EMBER_ROWS_LOGITS : EMBER_ROWS_TOKENS, n);
    kcase_tensor(&c, LINEAR_X, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n + 2, K, 0);
    kcase_tensor(&c, LINEAR_W, EMBER_ARENA_WEIGHTS, dtype, 1, 2, N, K, 0);
    if (options & 1)
        kcase_tensor(&c, LINEAR_B, EMBER_ARENA_WEIGHTS, floats[(options / 2 + dtype) % 3], 1, 1, N,
                     0, 0);
    kcase_tensor(&c, LINEAR_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n + 2, N, 0);
    c.op.f[LINEAR_F_SCALE] = options & 2 ? 0.375 : 1;
    c.op.f[LINEAR_F_SOFTCAP] = options & 4 ? 5 : 0;
    kcase_rows(&c, LINEAR_X, 1);
    kcase_out(&c, LINEAR_OUT, 1);
    kcase_check(&c, what);
    kcase_free(&c);
}

static void test_linear(void **ctx)
{
    static const uint32_t N[] = {1, 2, 3, 4, 5, 8, 9, 33};
    for (size_t k = 0; k < ARRAY_LEN(widths); k++)
        for (size_t t = 0; t < 2; t++) /* bf16 is in tiles: test_tiles.c */
            for (uint32_t n = 1; n <= 13; n++)
                linear_case(n, N[(k + n) % ARRAY_LEN(N)], widths[k], floats[t],
                            (uint32_t)(n + k) % 16);
    linear_case(17, 700, 1024, EMBER_F32, 0); /* several strips of w */
    linear_case(9, 300, 2100, EMBER_F16, 1);
}

static void glu_case(uint32_t n, uint32_t I, uint32_t repeat, uint32_t act, uint32_t layout,
                     double limit)
{
    struct kcase c;
    char what[96];
    uint32_t rows = n * (repeat ? repeat : 1);
    snprintf(what, sizeof(what), "glu I=%u act=%u layout=%u limit=%g", I, act, layout, limit);
    kcase_start(&c, EMBER_OP_GLU, EMBER_ROWS_TOKENS, n);
    kcase_tensor(&c, GLU_X, EMBER_ARENA_SCRATCH, EMBER_F32, 12, 2, rows, 2 * I, 0);
    kcase_tensor(&c, GLU_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, I, 0);
    c.op.i[GLU_I_ACT] = act;
    c.op.i[GLU_I_LAYOUT] = layout;
    c.op.i[GLU_I_REPEAT] = repeat;
    c.op.f[GLU_F_LIMIT] = limit;
    c.op.f[GLU_F_ALPHA] = 1.702;
    kcase_rows(&c, GLU_X, repeat ? repeat : 1);
    kcase_out(&c, GLU_OUT, repeat ? repeat : 1);
    kcase_check(&c, what);
    kcase_free(&c);
}

static void test_glu(void **ctx)
{
    for (size_t d = 0; d < ARRAY_LEN(widths); d++) {
        for (uint32_t act = 0; act < 4; act++)
            glu_case(row_counts[d % ARRAY_LEN(row_counts)], widths[d], d & 1 ? 4 : 0, act, act & 1,
                     0);
        glu_case(3, widths[d], 2, EMBER_ACT_SILU, d & 1, 7);
    }
}

static void test_act(void **ctx)
{
    for (size_t d = 0; d < ARRAY_LEN(widths); d++) {
        for (uint32_t act = 0; act < 4; act++) {
            struct kcase c;
            uint32_t n = row_counts[d % ARRAY_LEN(row_counts)];
            kcase_start(&c, EMBER_OP_ACT, EMBER_ROWS_TOKENS, n);
            kcase_tensor(&c, ACT_X, EMBER_ARENA_SCRATCH, EMBER_F32, d & 1 ? 1 : 20, 2, n, widths[d],
                         0);
            kcase_tensor(&c, ACT_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, widths[d], 0);
            c.op.i[ACT_I_ACT] = act;
            c.tolerance = 5e-7f;
            kcase_rows(&c, ACT_X, 1);
            kcase_out(&c, ACT_OUT, 1);
            kcase_check(&c, "act");
            kcase_free(&c);
        }
    }
}

static void test_move(void **ctx)
{
    for (size_t d = 0; d < ARRAY_LEN(widths); d++) {
        for (uint32_t gather = 0; gather < 2; gather++) {
            struct kcase c;
            uint32_t n = row_counts[d % ARRAY_LEN(row_counts)];
            kcase_start(&c, gather ? EMBER_OP_GATHER : EMBER_OP_COPY,
                        gather ? EMBER_ROWS_LOGITS : EMBER_ROWS_TOKENS, n);
            kcase_tensor(&c, 0, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, 20, widths[d], 0);
            kcase_tensor(&c, gather ? (uint32_t)GATHER_OUT : (uint32_t)COPY_OUT, EMBER_ARENA_IO,
                         EMBER_F32, 1, 2, n, widths[d], 0);
            if (gather) {
                kcase_tensor(&c, GATHER_INDEX, EMBER_ARENA_IO, EMBER_I32, 0, 1, n, 0, 0);
                for (uint32_t i = 0; i < n; i++)
                    ((int32_t *)kcase_row(&c, GATHER_INDEX, 0))[i] = (int32_t)rnd(20);
                kcase_rows(&c, GATHER_INDEX, 1);
            } else {
                kcase_rows(&c, COPY_X, 1);
            }
            c.tolerance = 0;
            kcase_out(&c, gather ? (uint32_t)GATHER_OUT : (uint32_t)COPY_OUT, 1);
            kcase_check(&c, gather ? "gather" : "copy");
            kcase_free(&c);
        }
    }
}

/* Ties, NaN here and there, rows of NaN and of -infinity. */
static void argmax_fill(float *x, uint32_t V, uint32_t pattern)
{
    for (uint32_t v = 0; v < V; v++) {
        if (pattern == 1)
            x[v] = (float)rnd(4);
        if (pattern == 2)
            x[v] = NAN;
        if (pattern == 3)
            x[v] = v % 3 ? -INFINITY : NAN;
        if (pattern == 4 && rnd(3) == 0)
            x[v] = NAN;
        if (pattern == 5)
            x[v] = -1 - (float)v;
        if (pattern == 6)
            x[v] = (float)v;
    }
}

static void test_argmax(void **ctx)
{
    for (size_t d = 0; d < ARRAY_LEN(widths); d++) {
        struct kcase c;
        kcase_start(&c, EMBER_OP_ARGMAX, EMBER_ROWS_LOGITS, 7);
        kcase_tensor(&c, ARGMAX_X, EMBER_ARENA_IO, EMBER_F32, 1, 2, 7, widths[d], 0);
        kcase_tensor(&c, ARGMAX_OUT, EMBER_ARENA_IO, EMBER_I32, 0, 1, 7, 0, 0);
        for (uint32_t r = 0; r < 7; r++)
            argmax_fill(kcase_row(&c, ARGMAX_X, r), widths[d], r);
        kcase_rows(&c, ARGMAX_X, 1);
        kcase_out(&c, ARGMAX_OUT, 1);
        kcase_check(&c, "argmax");
        kcase_tensor(&c, ARGMAX_PARTS, EMBER_ARENA_SCRATCH, EMBER_I32, 0, 2, 7, EMBER_ARGMAX_PARTS,
                     0);
        kcase_rows(&c, ARGMAX_PARTS, 1);
        c.ignored[0] = ARGMAX_PARTS;
        kcase_check(&c, "argmax in parts");
        kcase_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_embed),  cmocka_unit_test(test_norm),   cmocka_unit_test(test_add),
        cmocka_unit_test(test_glu),    cmocka_unit_test(test_act),    cmocka_unit_test(test_move),
        cmocka_unit_test(test_argmax), cmocka_unit_test(test_linear),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
