/* SPDX-License-Identifier: Apache-2.0 */
/* moe_route, moe_linear and moe_combine against the reference. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "harness.h"
#include "kernels/cpu/ops/args.h"

static const enum ember_dtype floats[] = {EMBER_F32, EMBER_F16, EMBER_BF16};

struct route {
    uint32_t E, topk, groups, top_groups;
};

static void route_case(const struct route *s, enum ember_route kind, bool bias, bool normalize,
                       bool ties)
{
    struct kcase c;
    char what[128];
    uint32_t n = 11;
    snprintf(what, sizeof(what),
             "moe_route E=%u k=%u groups=%u/%u kind=%d bias=%d normalize=%d ties=%d", s->E, s->topk,
             s->top_groups, s->groups, kind, bias, normalize, ties);
    kcase_start(&c, EMBER_OP_MOE_ROUTE, EMBER_ROWS_TOKENS, n);
    kcase_tensor(&c, ROUTE_LOGITS, EMBER_ARENA_SCRATCH, EMBER_F32, 4, 2, n, s->E, 0);
    for (uint32_t r = 0; ties && r < n; r++)
        for (uint32_t e = 0; e < s->E; e++)
            ((float *)kcase_row(&c, ROUTE_LOGITS, r))[e] = (float)rnd(3);
    if (bias)
        kcase_tensor(&c, ROUTE_BIAS, EMBER_ARENA_WEIGHTS, EMBER_F32, 0.3f, 1, s->E, 0, 0);
    for (uint32_t e = 0; bias && ties && e < s->E; e++)
        *(float *)kcase_row(&c, ROUTE_BIAS, e) = 0.25f; /* sums stay exact ties */
    kcase_tensor(&c, ROUTE_IDS, EMBER_ARENA_SCRATCH, EMBER_I32, 0, 2, n, s->topk, 0);
    kcase_tensor(&c, ROUTE_WEIGHTS, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, s->topk, 0);
    const int64_t ints[] = {kind, s->topk, normalize, s->groups, s->top_groups};
    memcpy(c.op.i, ints, sizeof(ints));
    c.op.f[ROUTE_F_SCALE] = normalize ? 2.5 : 1;
    kcase_rows(&c, ROUTE_LOGITS, 1);
    kcase_out(&c, ROUTE_IDS, 1);
    kcase_out(&c, ROUTE_WEIGHTS, 1);
    kcase_check(&c, what);
    kcase_free(&c);
}

static void test_route(void **ctx)
{
    static const struct route routes[] = {
        {1, 1, 0, 0},   {4, 2, 1, 1},   {8, 8, 0, 0},  {37, 5, 0, 0},
        {128, 8, 0, 0}, {256, 8, 8, 4}, {12, 3, 4, 2}, {1024, 10, 0, 0},
    };
    for (size_t i = 0; i < ARRAY_LEN(routes); i++)
        for (uint32_t bits = 0; bits < 24; bits++)
            route_case(&routes[i], bits % 3, bits / 3 & 1, bits / 6 & 1, bits / 12 & 1);
}

static void moe_case(uint32_t n, uint32_t E, uint32_t topk, uint32_t N, uint32_t K,
                     enum ember_dtype dtype, bool per_slot, uint32_t used)
{
    struct kcase c;
    char what[128];
    snprintf(what, sizeof(what), "moe_linear rows=%u E=%u k=%u N=%u K=%u dtype=%d per_slot=%d", n,
             E, topk, N, K, dtype, per_slot);
    kcase_start(&c, EMBER_OP_MOE_LINEAR, EMBER_ROWS_TOKENS, n);
    kcase_tensor(&c, MOE_X, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, per_slot ? n * topk : n, K, 0);
    kcase_tensor(&c, MOE_W, EMBER_ARENA_WEIGHTS, dtype, 1, 3, E, N, K);
    if (per_slot)
        kcase_tensor(&c, MOE_B, EMBER_ARENA_WEIGHTS, floats[K % 3], 1, 2, E, N, 0);
    if (used) /* 0: each slot has its own */
        kcase_tensor(&c, MOE_IDS, EMBER_ARENA_SCRATCH, EMBER_I32, 0, 2, n, topk, 0);
    for (uint32_t i = 0; used && i < n * topk; i++) /* experts from `used` on stay empty */
        ((int32_t *)kcase_row(&c, MOE_IDS, i / topk))[i % topk] = (int32_t)((rnd(used) + i) % used);
    kcase_tensor(&c, MOE_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n * topk, N, 0);
    c.op.i[MOE_I_TOPK] = topk;
    c.op.i[MOE_I_PER_SLOT] = per_slot;
    kcase_rows(&c, MOE_X, per_slot ? topk : 1);
    if (used)
        kcase_rows(&c, MOE_IDS, 1);
    kcase_out(&c, MOE_OUT, topk);
    kcase_check(&c, what);
    kcase_free(&c);
}

static void test_linear(void **ctx)
{
    static const uint32_t widths[] = {1, 7, 16, 33, 128};
    for (size_t k = 0; k < ARRAY_LEN(widths); k++)
        for (size_t t = 0; t < 2; t++) /* bf16 is in tiles: test_tiles.c */
            for (uint32_t per_slot = 0; per_slot < 2; per_slot++) {
                moe_case(1, 8, 2, 9, widths[k], floats[t], per_slot, 8);
                moe_case(19, 5, 3, 13, widths[k], floats[t], per_slot, 4);
            }
    moe_case(MOE_CHUNK / 8 + 1, 2, 8, 2, 8, EMBER_F16, true, 2); /* more than are sorted at once */
    moe_case(1, 7, 7, 12, 33, EMBER_F32, true, 0);               /* a matrix a head */
    moe_case(MOE_CHUNK / 6 + 2, 6, 6, 9, 16, EMBER_F16, true, 0);
}

static void combine_case(uint32_t n, uint32_t D, uint32_t topk, uint32_t options)
{
    struct kcase c;
    kcase_start(&c, EMBER_OP_MOE_COMBINE, EMBER_ROWS_TOKENS, n);
    kcase_tensor(&c, COMBINE_Y, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n * topk, D, 0);
    kcase_tensor(&c, COMBINE_WEIGHTS, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, topk, 0);
    if (options)
        kcase_tensor(&c, COMBINE_SHARED, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, D, 0);
    if (options == 2)
        kcase_tensor(&c, COMBINE_GATE, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, 1, 0);
    kcase_tensor(&c, COMBINE_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, D, 0);
    c.op.i[COMBINE_I_TOPK] = topk;
    kcase_rows(&c, COMBINE_Y, topk);
    kcase_rows(&c, COMBINE_WEIGHTS, 1);
    kcase_rows(&c, COMBINE_SHARED, 1);
    kcase_rows(&c, COMBINE_GATE, 1);
    kcase_out(&c, COMBINE_OUT, 1);
    kcase_check(&c, "moe_combine");
    kcase_free(&c);
}

static void test_combine(void **ctx)
{
    for (uint32_t options = 0; options < 3; options++) {
        combine_case(1, 1, 1, options);
        combine_case(7, 33, 8, options);
        combine_case(3, 600, 4, options);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_route),
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_combine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
