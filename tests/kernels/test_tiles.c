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

/* An activation without gaps that begins at a line. */
static void whole_lines(struct kcase *c, uint32_t slot, enum ember_dtype dtype, uint32_t rows,
                        uint32_t cols)
{
    const uint32_t size = dtype == EMBER_F32 ? 4 : 1;
    struct ember_tensor *t =
        kcase_tensor(c, slot, EMBER_ARENA_SCRATCH, dtype, 1, 1, rows * cols + 64 / size, 0, 0);
    t->rank = 2;
    t->dim[0] = rows;
    t->dim[1] = cols;
    t->row_stride = (uint64_t)cols * size;
    t->offset = (t->offset + 63) / 64 * 64;
    kcase_rows(c, slot, 1);
}

static void x_tmp(struct kcase *c, uint32_t slot, uint32_t rows, uint32_t K)
{
    whole_lines(c, slot, EMBER_U8, rows, (uint32_t)EMBER_X_TMP_BYTES(K));
    c->ignored[0] = slot;
}

static void linear_start(struct kcase *c, uint32_t rows, uint32_t N, uint32_t K, uint32_t options)
{
    kcase_start(c, EMBER_OP_LINEAR, options & 8 ? EMBER_ROWS_LOGITS : EMBER_ROWS_TOKENS, rows);
    kcase_tensor(c, LINEAR_X, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows + 1, K, 0);
    kcase_packed(c, LINEAR_W, EMBER_BF16, 1, 2, N, (K + 31) / 32 * 32, 0, EMBER_PANEL_ROWS(N));
    if (options & 1)
        kcase_tensor(c, LINEAR_B, EMBER_ARENA_WEIGHTS, EMBER_F32, 1, 1, N, 0, 0);
    x_tmp(c, LINEAR_X_TMP, rows, K);
    c->op.i[LINEAR_I_LAYOUT] = EMBER_LAYOUT_TILES;
    c->op.f[LINEAR_F_SCALE] = options & 2 ? 0.375 : 1;
    c->op.f[LINEAR_F_SOFTCAP] = options & 4 ? 5 : 0;
}

/* options 16: rows of out are whole lines. */
static void linear_case(uint32_t rows, uint32_t N, uint32_t K, uint32_t options)
{
    struct kcase c;
    char what[96];
    snprintf(what, sizeof what, "linear bf16 tiles rows=%u N=%u K=%u options=%u", rows, N, K,
             options);
    linear_start(&c, rows, N, K, options);
    if (options & 16)
        whole_lines(&c, LINEAR_OUT, EMBER_F32, rows, N);
    else
        kcase_tensor(&c, LINEAR_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, N, 0);
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
    linear_case(256, 280, 1060, 1);     /* k in two parts, and sums of more than fit */
    linear_case(130, 4096, 20, 16);     /* more than stays in cache, whole lines, */
    linear_case(130, 4096 + 8, 20, 16); /* lines that are not, */
    linear_case(130, 4096 + 16, 20, 1); /* and rows that are not */
}

/* w of gate and up to [rows, I]. */
static void gated_start(struct kcase *c, uint32_t rows, uint32_t I, uint32_t K, enum ember_glu glu,
                        uint32_t options)
{
    linear_start(c, rows, 2 * I, K, options);
    kcase_tensor(c, LINEAR_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, I, 0);
    kcase_tensor(c, LINEAR_GATE_UP, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, 2 * I, 0);
    kcase_rows(c, LINEAR_GATE_UP, 1);
    kcase_rows(c, LINEAR_X, 1);
    kcase_out(c, LINEAR_OUT, 1);
    c->ignored[1] = LINEAR_GATE_UP;
    c->op.i[LINEAR_I_GLU] = glu;
    c->op.i[LINEAR_I_ACT] = options % 4;
    c->op.f[LINEAR_F_LIMIT] = options & 4 ? 1.5 : 0;
    c->op.f[LINEAR_F_ALPHA] = 1.702;
}

/* Against the reference, and to the bits of a linear with a glu behind it. */
static void gated_case(uint32_t rows, uint32_t I, uint32_t K, enum ember_glu glu, uint32_t options)
{
    struct kcase c;
    char what[96];
    snprintf(what, sizeof what, "gated %d rows=%u I=%u K=%u options=%u", glu, rows, I, K, options);
    gated_start(&c, rows, I, K, glu, options);
    c.tolerance = 4e-4f;
    kcase_check(&c, what);
    for (enum cpu_isa isa = 0; isa < CPU_ISA_COUNT; isa++) {
        struct arenas once, first, second;
        struct ember_op linear = c.op, gate = {.kind = EMBER_OP_GLU, .rows = c.op.rows};
        if (!cpu_isa_supported(isa))
            continue;
        linear.t[LINEAR_OUT] = gate.t[GLU_X] = c.op.t[LINEAR_GATE_UP];
        linear.t[LINEAR_GATE_UP].rank = 0;
        linear.i[LINEAR_I_GLU] = EMBER_GLU_NONE;
        gate.t[GLU_OUT] = c.op.t[LINEAR_OUT];
        gate.i[GLU_I_ACT] = c.op.i[LINEAR_I_ACT];
        gate.i[GLU_I_LAYOUT] = glu == EMBER_GLU_PAIRS;
        gate.f[GLU_F_LIMIT] = c.op.f[LINEAR_F_LIMIT];
        gate.f[GLU_F_ALPHA] = c.op.f[LINEAR_F_ALPHA];
        kcase_run(&c, &c.op, isa, NULL, 0, &once);
        kcase_run(&c, &linear, isa, NULL, 0, &first);
        struct kcase then = {.op = gate, .in = first};
        kcase_run(&then, &gate, isa, NULL, 0, &second);
        for (uint32_t r = 0; r < rows; r++) {
            const struct ember_tensor *t = &c.op.t[LINEAR_OUT];
            const size_t at = t->offset + r * t->row_stride;
            assert_memory_equal(once.data[EMBER_ARENA_SCRATCH] + at,
                                second.data[EMBER_ARENA_SCRATCH] + at, I * sizeof(float));
        }
        arenas_free(&once);
        arenas_free(&first);
        arenas_free(&second);
    }
    kcase_free(&c);
}

static void test_gated(void **ctx)
{
    static const uint32_t rows[] = {1, 2, 16, 17, 32, 33, 48, 70, 257};
    for (uint32_t i = 0; i < ARRAY_LEN(rows); i++) {
        gated_case(rows[i], 48 + i % 2 * 16, 70 + i, EMBER_GLU_HALVES, i);
        gated_case(rows[i], 10 + i, 33, EMBER_GLU_HALVES, i + 1); /* panels of both */
        gated_case(rows[i], 16, 33, EMBER_GLU_PAIRS, i + 2);
    }
    gated_case(200, 32, 1500, EMBER_GLU_HALVES, 1); /* k in parts */
}

/* The bits of a linear are the same whether its x was handed over or not. c: the op before it. */
static void hand_over(struct kcase *c, uint32_t out, uint32_t out_x, uint32_t rows, uint32_t K)
{
    static const uint32_t counts[] = {0, 1, 3, 64};
    const uint32_t N = 20;
    struct ember_op before = c->op, plain, ready;
    struct ember_tensor x = c->op.t[out];
    c->op = (struct ember_op){.kind = EMBER_OP_LINEAR, .rows = before.rows};
    kcase_packed(c, LINEAR_W, EMBER_BF16, 1, 2, N, (K + 31) / 32 * 32, 0, EMBER_PANEL_ROWS(N));
    kcase_tensor(c, LINEAR_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, N, 0);
    x_tmp(c, LINEAR_X_TMP, rows, K);
    c->op.t[LINEAR_X] = x;
    c->op.i[LINEAR_I_LAYOUT] = EMBER_LAYOUT_TILES;
    c->op.f[LINEAR_F_SCALE] = 1;
    plain = ready = c->op;
    ready.i[LINEAR_I_X_READY] = 1;
    for (enum cpu_isa isa = 0; isa < CPU_ISA_COUNT; isa++) {
        struct arenas want, got;
        const struct ember_tensor *t = &plain.t[LINEAR_OUT];
        if (!cpu_isa_supported(isa))
            continue;
        before.t[out_x].rank = 0;
        kcase_chain(c, &before, &plain, isa, 0, &want);
        before.t[out_x] = plain.t[LINEAR_X_TMP];
        for (size_t i = 0; i < ARRAY_LEN(counts); i++) {
            kcase_chain(c, &before, &ready, isa, counts[i], &got);
            for (uint32_t r = 0; r < rows; r++) {
                const size_t at = t->offset + r * t->row_stride;
                assert_memory_equal(want.data[EMBER_ARENA_SCRATCH] + at,
                                    got.data[EMBER_ARENA_SCRATCH] + at, N * sizeof(float));
            }
            arenas_free(&got);
        }
        arenas_free(&want);
    }
    kcase_free(c);
}

static void test_hand_over(void **ctx)
{
    static const uint32_t rows[] = {1, 2, 15, 16, 17, 32, 33, 49, 300};
    static const uint32_t K[] = {1, 16, 17, 24, 32, 48, 64, 100};
    for (size_t i = 0; i < ARRAY_LEN(rows); i++)
        for (size_t k = 0; k < ARRAY_LEN(K); k++) {
            struct kcase c;
            gated_start(&c, rows[i], K[k], 40, EMBER_GLU_HALVES, (uint32_t)(i + k) % 16);
            hand_over(&c, LINEAR_OUT, LINEAR_OUT_X, rows[i], K[k]);
            kcase_start(&c, EMBER_OP_NORM, EMBER_ROWS_TOKENS, rows[i]);
            kcase_tensor(&c, NORM_X, EMBER_ARENA_SCRATCH, EMBER_F32, 3, 2, rows[i], K[k], 0);
            c.op.i[NORM_I_KIND] = k % 2 ? EMBER_NORM_LAYER : EMBER_NORM_RMS;
            c.op.i[NORM_I_GROUP] = i % 2 && K[k] % 4 == 0 ? K[k] / 4 : 0;
            kcase_tensor(&c, NORM_W, EMBER_ARENA_WEIGHTS, EMBER_BF16, 1, 1,
                         c.op.i[NORM_I_GROUP] ? (uint32_t)c.op.i[NORM_I_GROUP] : K[k], 0, 0);
            kcase_tensor(&c, NORM_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows[i], K[k], 0);
            kcase_tensor(&c, NORM_DELTA, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows[i], K[k], 0);
            c.op.f[NORM_F_EPS] = 1e-5;
            c.op.f[NORM_F_W_BIAS] = 1;
            c.op.f[NORM_F_DELTA_SCALE] = 0.5;
            hand_over(&c, NORM_OUT, NORM_OUT_X, rows[i], K[k]);
        }
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
    if (used) /* 0: each slot has its own */
        kcase_tensor(&c, MOE_IDS, EMBER_ARENA_SCRATCH, EMBER_I32, 0, 2, n, topk, 0);
    for (uint32_t i = 0; used && i < n * topk; i++) /* experts from `used` on stay empty */
        ((int32_t *)kcase_row(&c, MOE_IDS, i / topk))[i % topk] = (int32_t)((rnd(used) + i) % used);
    kcase_tensor(&c, MOE_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n * topk, N, 0);
    x_tmp(&c, MOE_X_TMP, n * topk, K);
    c.op.i[MOE_I_TOPK] = topk;
    c.op.i[MOE_I_PER_SLOT] = per_slot;
    c.op.i[MOE_I_LAYOUT] = EMBER_LAYOUT_TILES;
    c.tolerance = 4e-5f;
    kcase_rows(&c, MOE_X, per_slot ? topk : 1);
    kcase_rows(&c, MOE_X_TMP, topk);
    if (used)
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
    moe_case(150, 3, 1, 37, 96, false, 1); /* all rows to one expert */
    moe_case(5, 3, 3, 17, 64, true, 3);    /* as many as there are */
    moe_case(1, 5, 5, 40, 192, true, 0);   /* a matrix a head */
    moe_case(40, 5, 5, 40, 192, true, 0);
    moe_case(MOE_CHUNK / 8 + 1, 2, 8, 2, 8, true, 2); /* more than are sorted at once */
}

/* quant EMBER_QUANT_NONE: bf16. */
static void embed_case(enum ember_quant quant, uint32_t V, uint32_t D, uint32_t group)
{
    struct kcase c;
    uint32_t n = 5, G = (D + group - 1) / group, kept = EMBER_PANEL_ROWS(V);
    bool four = quant == EMBER_QUANT_INT4;
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
    static const enum ember_quant quants[] = {EMBER_QUANT_NONE, EMBER_QUANT_INT4, EMBER_QUANT_INT8};
    static const uint32_t D[] = {1, 31, 64, 129, 300};
    for (size_t q = 0; q < ARRAY_LEN(quants); q++)
        for (size_t d = 0; d < ARRAY_LEN(D); d++) {
            embed_case(quants[q], 37, D[d], 32);
            embed_case(quants[q], 37, D[d], 512);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),    cmocka_unit_test(test_gated),
        cmocka_unit_test(test_hand_over), cmocka_unit_test(test_moe_linear),
        cmocka_unit_test(test_embed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
