/* SPDX-License-Identifier: Apache-2.0 */
/* bf16 weights in tiles, and tables of embeddings in tiles, against the reference. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "base/mem.h"
#include "harness.h"
#include "kernels/cpu/ops/args.h"

static void x_tmp(struct kcase *c, uint32_t slot, uint32_t rows, uint32_t K)
{
    uint32_t bytes = (uint32_t)EMBER_X_TMP_BYTES(K);
    struct ember_tensor *t;
    kcase_tensor(c, slot, EMBER_ARENA_SCRATCH, EMBER_U8, 1, 1, rows * bytes, 0, 0);
    t = &c->op.t[slot];
    t->rank = 2;
    t->dim[0] = rows;
    t->dim[1] = bytes;
    t->row_stride = bytes;
    c->ignored = slot;
    kcase_rows(c, slot, 1);
}

static void linear_case(uint32_t rows, uint32_t N, uint32_t K, uint32_t options)
{
    struct kcase c;
    char what[96];
    snprintf(what, sizeof what, "linear bf16 tiles rows=%u N=%u K=%u options=%u", rows, N, K,
             options);
    kcase_start(&c, EMBER_OP_LINEAR, options & 8 ? EMBER_ROWS_LOGITS : EMBER_ROWS_TOKENS, rows);
    kcase_tensor(&c, LINEAR_X, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows + 1, K, 0);
    kcase_packed(&c, LINEAR_W, EMBER_BF16, 1, 2, N, (K + 31) / 32 * 32, 0, EMBER_PANEL_ROWS(N));
    if (options & 1)
        kcase_tensor(&c, LINEAR_B, EMBER_ARENA_WEIGHTS, EMBER_F32, 1, 1, N, 0, 0);
    kcase_tensor(&c, LINEAR_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, N, 0);
    x_tmp(&c, LINEAR_X_TMP, rows, K);
    c.op.i[LINEAR_I_LAYOUT] = EMBER_LAYOUT_TILES;
    c.op.f[LINEAR_F_SCALE] = options & 2 ? 0.375 : 1;
    c.op.f[LINEAR_F_SOFTCAP] = options & 4 ? 5 : 0;
    /* x in two bf16 is 2^-17 off at most; a sum may be small, or made so by a cap, but not that. */
    c.tolerance = options & 4 ? 1e-4f : 4e-5f;
    kcase_rows(&c, LINEAR_X, 1);
    kcase_out(&c, LINEAR_OUT, 1);
    kcase_check(&c, what);
    kcase_free(&c);
}

static void test_linear(void **ctx)
{
    static const uint32_t K[] = {1, 2, 7, 31, 32, 33, 64, 100, 129, 600};
    static const uint32_t N[] = {1, 15, 16, 17, 33, 64, 80, 100};
    for (size_t k = 0; k < ARRAY_LEN(K); k++)
        for (uint32_t rows = 1; rows <= 40; rows += 1 + (rows > 8) * 5)
            linear_case(rows, N[(k + rows) % ARRAY_LEN(N)], K[k], (uint32_t)(rows + k) % 16);
    linear_case(9, 300, 2100, 1);
    linear_case(150, 90, 1056, 0); /* rows in two parts */
    linear_case(300, 40, 64, 0);
}

static void moe_case(uint32_t n, uint32_t E, uint32_t topk, uint32_t N, uint32_t K, bool per_slot,
                     uint32_t used)
{
    struct kcase c;
    char what[96];
    snprintf(what, sizeof what, "moe_linear bf16 tiles rows=%u E=%u k=%u N=%u K=%u per_slot=%d", n,
             E, topk, N, K, per_slot);
    kcase_start(&c, EMBER_OP_MOE_LINEAR, EMBER_ROWS_TOKENS, n);
    kcase_tensor(&c, MOE_X, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, per_slot ? n * topk : n, K, 0);
    kcase_packed(&c, MOE_W, EMBER_BF16, 1, 3, E, N, (K + 31) / 32 * 32, EMBER_PANEL_ROWS(N));
    if (per_slot)
        kcase_tensor(&c, MOE_B, EMBER_ARENA_WEIGHTS, EMBER_BF16, 1, 2, E, N, 0);
    kcase_tensor(&c, MOE_IDS, EMBER_ARENA_SCRATCH, EMBER_I32, 0, 2, n, topk, 0);
    for (uint32_t i = 0; i < n * topk; i++) /* experts from `used` on stay empty */
        ((int32_t *)kcase_row(&c, MOE_IDS, i / topk))[i % topk] = (int32_t)((rnd(used) + i) % used);
    kcase_tensor(&c, MOE_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n * topk, N, 0);
    x_tmp(&c, MOE_X_TMP, n * topk, K);
    c.op.i[MOE_I_TOPK] = topk;
    c.op.i[MOE_I_PER_SLOT] = per_slot;
    c.op.i[MOE_I_LAYOUT] = EMBER_LAYOUT_TILES;
    c.tolerance = 4e-5f;
    kcase_rows(&c, MOE_X, per_slot ? topk : 1);
    kcase_rows(&c, MOE_X_TMP, topk);
    kcase_rows(&c, MOE_IDS, 1);
    kcase_out(&c, MOE_OUT, topk);
    kcase_check(&c, what);
    kcase_free(&c);
}

static void test_moe_linear(void **ctx)
{
    static const uint32_t K[] = {1, 32, 45, 128};
    for (size_t k = 0; k < ARRAY_LEN(K); k++)
        for (uint32_t per_slot = 0; per_slot < 2; per_slot++) {
            moe_case(1, 8, 2, 9, K[k], per_slot, 8);
            moe_case(19, 5, 3, 37, K[k], per_slot, 4);
            moe_case(70, 3, 2, 80, K[k], per_slot, 2);
        }
    moe_case(MOE_CHUNK / 8 + 1, 2, 8, 2, 8, true, 2); /* more than are sorted at once */
}

/* quant EMBER_QUANT_NONE: bf16. */
static void embed_case(enum ember_quant quant, uint32_t V, uint32_t D, uint32_t group)
{
    struct kcase c;
    uint32_t n = 5, G = (D + group - 1) / group, kept = EMBER_PANEL_ROWS(V);
    bool four = quant == EMBER_QUANT_INT4 || quant == EMBER_QUANT_FP4;
    uint32_t cols = quant == EMBER_QUANT_NONE ? (D + 31) / 32 * 32
                                              : ((four ? (D + 31) / 32 * 16 : D) + 63) / 64 * 64;
    kcase_start(&c, EMBER_OP_EMBED, EMBER_ROWS_TOKENS, n);
    kcase_tensor(&c, EMBED_TOKENS, EMBER_ARENA_IO, EMBER_I32, 0, 1, n, 0, 0);
    for (uint32_t i = 0; i < n; i++)
        *(int32_t *)kcase_row(&c, EMBED_TOKENS, i) = (int32_t)(i ? rnd(V) : V - 1);
    kcase_packed(&c, EMBED_TABLE, quant ? four ? EMBER_U8 : EMBER_I8 : EMBER_BF16, 1, 2, V, cols, 0,
                 kept);
    kcase_tensor(&c, EMBED_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, D, 0);
    if (quant) {
        for (uint32_t i = 0; i < kept * cols; i++)
            ((uint8_t *)kcase_row(&c, EMBED_TABLE, 0))[i] = (uint8_t)rnd(256);
        kcase_packed(&c, EMBED_SCALE, EMBER_F16, 0.1f, 2, V, G, 0, kept);
    }
    if (quant == EMBER_QUANT_INT4) {
        kcase_packed(&c, EMBED_ZERO, EMBER_U8, 1, 2, V, G, 0, kept);
        for (uint32_t i = 0; i < kept * G; i++)
            ((uint8_t *)kcase_row(&c, EMBED_ZERO, 0))[i] = (uint8_t)rnd(17);
    }
    c.op.i[EMBED_I_QUANT] = quant;
    c.op.i[EMBED_I_GROUP] = group;
    c.op.i[EMBED_I_LAYOUT] = EMBER_LAYOUT_TILES;
    c.op.f[EMBED_F_SCALE] = 1.5;
    kcase_rows(&c, EMBED_TOKENS, 1);
    kcase_out(&c, EMBED_OUT, 1);
    kcase_check(&c, "embed tiles");
    kcase_free(&c);
}

static void test_embed(void **ctx)
{
    static const enum ember_quant quants[] = {EMBER_QUANT_NONE, EMBER_QUANT_INT4, EMBER_QUANT_FP4,
                                              EMBER_QUANT_INT8};
    static const uint32_t D[] = {1, 31, 64, 129, 300};
    for (size_t q = 0; q < ARRAY_LEN(quants); q++)
        for (size_t d = 0; d < ARRAY_LEN(D); d++)
            embed_case(quants[q], 37, D[d], q % 2 ? 32 : 512);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_moe_linear),
        cmocka_unit_test(test_embed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
