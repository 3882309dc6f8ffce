/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised weights, int8 activations and permutation against the reference. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "harness.h"
#include "kernels/cpu/ops/args.h"
#include "kernels/ref/ref.h"

struct form {
    const char *name;
    enum ember_quant quant;
    enum ember_dtype codes, scale;
    uint32_t group; /* 0: one a row */
    bool zero;
    uint32_t terms, x_group; /* of integer x; terms 0: floats */
};
static const struct form forms[] = {
    {"int4 g32 f16 zero", EMBER_QUANT_INT4, EMBER_U8, EMBER_F16, 32, true, 2, 32},
    {"int4 g128 bf16", EMBER_QUANT_INT4, EMBER_U8, EMBER_BF16, 128, false, 2, 128},
    {"int4 row f32 zero", EMBER_QUANT_INT4, EMBER_U8, EMBER_F32, 0, true, 2, 128},
    {"int4 g64 f16, 8 bits of x", EMBER_QUANT_INT4, EMBER_U8, EMBER_F16, 64, true, 1, 32},
    {"int4 g32 f16, 8 bits of x", EMBER_QUANT_INT4, EMBER_U8, EMBER_F16, 32, false, 1, 32},
    {"fp4 g32 e8m0, floats", EMBER_QUANT_FP4, EMBER_U8, EMBER_U8, 32, false, 0, 0},
    {"fp4 g64 f16, floats", EMBER_QUANT_FP4, EMBER_U8, EMBER_F16, 64, false, 0, 0},
    {"int8 row bf16", EMBER_QUANT_INT8, EMBER_I8, EMBER_BF16, 0, false, 2, 128},
    {"int8 g96 f16", EMBER_QUANT_INT8, EMBER_I8, EMBER_F16, 96, false, 2, 96},
    {"int8 g128 f16, 8 bits of x", EMBER_QUANT_INT8, EMBER_I8, EMBER_F16, 128, false, 1, 128},
    {"int8 g256 f16, 8 bits of x", EMBER_QUANT_INT8, EMBER_I8, EMBER_F16, 256, false, 1, 256},
    {"int8 row f32, 8 bits of x", EMBER_QUANT_INT8, EMBER_I8, EMBER_F32, 0, false, 1, 0},
    {"fp8 g128 f32", EMBER_QUANT_FP8, EMBER_F8, EMBER_F32, 128, false, 0, 0},
    {"fp8 g32 e8m0", EMBER_QUANT_FP8, EMBER_F8, EMBER_U8, 32, false, 0, 0},
    {"fp8 g192 f16", EMBER_QUANT_FP8, EMBER_F8, EMBER_F16, 192, false, 0, 0},
    {"fp8 row bf16", EMBER_QUANT_FP8, EMBER_F8, EMBER_BF16, 0, false, 0, 0},
};

static uint32_t group_of(const struct form *f, uint32_t K)
{
    return f->group ? f->group : (K + 31) / 32 * 32;
}

/* What a linear of K columns says of its weight's form and of x. */
static void linear_form(struct ember_op *op, const struct form *f, uint32_t K)
{
    op->i[LINEAR_I_QUANT] = f->quant;
    op->i[LINEAR_I_GROUP] = group_of(f, K);
    op->i[LINEAR_I_LAYOUT] = EMBER_LAYOUT_TILES;
    op->i[LINEAR_I_K] = K;
    op->i[LINEAR_I_X_GROUP] = f->x_group;
    op->i[LINEAR_I_X_TERMS] = f->terms;
}

/* Random bytes `low` .. `low + n - 1` all over the rows of an operand, gaps between them included.
 */
static void fill_bytes(struct kcase *c, uint32_t slot, uint32_t low, uint32_t n)
{
    const struct ember_tensor *t = &c->op.t[slot];
    uint8_t *p = kcase_row(c, slot, 0);
    for (uint64_t i = 0; i < t->row_stride * t->dim[0]; i++)
        p[i] = (uint8_t)(low + rnd(n));
}

/* Bytes of an operand without gaps, all of its matrices and panels. */
static void fill_packed(struct kcase *c, uint32_t slot, uint32_t kept, uint32_t low, uint32_t n)
{
    const struct ember_tensor *t = &c->op.t[slot];
    uint8_t *p = kcase_row(c, slot, 0);
    uint64_t bytes = t->row_stride * (t->rank == 3 ? t->dim[0] : kept);
    for (uint64_t i = 0; i < bytes; i++) {
        p[i] = (uint8_t)(low + rnd(n));
        if (t->dtype == EMBER_F8 && (p[i] & 0x7f) == 0x7f) /* NaN does not occur */
            p[i] ^= 1;
    }
}

/* A weight of n rows (E matrices of n rows each when E is not 0) and K columns, in tiles. Codes are
 * any, so that each kind's extremes come up by themselves. Beyond K and n are zeros in a resident
 * tensor, and noise here: it must not matter what rows are filled up with. */
static void quant_operands(struct kcase *c, const struct form *f, uint32_t w, uint32_t scale,
                           uint32_t zero, uint32_t E, uint32_t n, uint32_t K)
{
    uint32_t group = group_of(f, K), G = (K + group - 1) / group, kept = EMBER_PANEL_ROWS(n);
    bool four = f->quant == EMBER_QUANT_INT4 || f->quant == EMBER_QUANT_FP4;
    uint32_t cols = ((four ? (K + 31) / 32 * 16 : K) + 63) / 64 * 64;
    uint32_t rank = E ? 3 : 2, d0 = E ? E : n;
    kcase_packed(c, w, f->codes, 1, rank, d0, E ? n : cols, cols, kept);
    fill_packed(c, w, kept, 0, 256);
    kcase_packed(c, scale, f->scale, 0.01f, rank, d0, E ? n : G, G, kept);
    if (f->scale == EMBER_U8)
        fill_packed(c, scale, kept, 120, 5);
    if (!f->zero)
        return;
    kcase_packed(c, zero, EMBER_U8, 1, rank, d0, E ? n : G, G, kept);
    fill_packed(c, zero, kept, 0, 17);
}

static void x_operands(struct kcase *c, const struct form *f, uint32_t x, uint32_t x_scale,
                       uint32_t rows, uint32_t K)
{
    uint32_t half = EMBER_X8_COLUMNS(K),
             segments = f->x_group ? (K + f->x_group - 1) / f->x_group : 1;
    if (!f->terms) {
        kcase_tensor(c, x, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, K, 0);
        return;
    }
    kcase_tensor(c, x, EMBER_ARENA_SCRATCH, EMBER_I8, 1, 2, rows, f->terms * half, 0);
    fill_bytes(c, x, 0, 256);
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t k = K; k < half; k++)
            for (uint32_t t = 0; t < f->terms; t++)
                ((int8_t *)kcase_row(c, x, r))[t * half + k] = 0;
    kcase_tensor(c, x_scale, EMBER_ARENA_SCRATCH, EMBER_F32, 0.05f, 2, rows, segments, 0);
}

/* Room for the backend's own form of float x. */
static void x_tmp(struct kcase *c, const struct form *f, uint32_t slot, uint32_t rows, uint32_t K)
{
    uint32_t bytes = (uint32_t)EMBER_X_TMP_BYTES(K);
    struct ember_tensor *t = &c->op.t[slot];
    if (f->terms)
        return;
    kcase_tensor(c, slot, EMBER_ARENA_SCRATCH, EMBER_U8, 1, 1, rows * bytes, 0, 0);
    t->rank = 2;
    t->dim[0] = rows;
    t->dim[1] = bytes;
    t->row_stride = bytes;
    c->ignored[0] = slot;
}

static void embed_case(const struct form *f, uint32_t rows, uint32_t D)
{
    const uint32_t vocab = 40;
    struct kcase c;
    char what[96];
    snprintf(what, sizeof what, "embed %s rows=%u D=%u", f->name, rows, D);
    kcase_start(&c, EMBER_OP_EMBED, EMBER_ROWS_TOKENS, rows);
    kcase_tensor(&c, EMBED_TOKENS, EMBER_ARENA_IO, EMBER_I32, 0, 1, rows, 0, 0);
    for (uint32_t i = 0; i < rows; i++)
        ((int32_t *)kcase_row(&c, EMBED_TOKENS, 0))[i] = (int32_t)rnd(vocab);
    quant_operands(&c, f, EMBED_TABLE, EMBED_SCALE, EMBED_ZERO, 0, vocab, D);
    kcase_tensor(&c, EMBED_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, D, 0);
    c.op.i[EMBED_I_QUANT] = f->quant;
    c.op.i[EMBED_I_GROUP] = group_of(f, D);
    c.op.i[EMBED_I_LAYOUT] = EMBER_LAYOUT_TILES;
    c.op.f[EMBED_F_SCALE] = rows % 2 ? 1 : 1.75;
    c.tolerance = 1e-6f;
    kcase_rows(&c, EMBED_TOKENS, 1);
    kcase_out(&c, EMBED_OUT, 1);
    kcase_check(&c, what);
    kcase_free(&c);
}

/* A tied head's table. */
static void test_embed(void **ctx)
{
    static const uint32_t widths[] = {1, 7, 32, 33, 100, 256, 416};
    for (size_t i = 0; i < ARRAY_LEN(forms); i++)
        for (size_t d = 0; d < ARRAY_LEN(widths); d++)
            if (forms[i].quant == EMBER_QUANT_INT4 || forms[i].quant == EMBER_QUANT_INT8)
                embed_case(&forms[i], 1 + (uint32_t)d, widths[d]);
}

/* Codes and integers of x whose products are the largest there can be, of one sign for each row:
 * what adds them in fewer bits than 32 must not overflow. */
static void fill_extremes(struct kcase *c, const struct form *f, uint32_t rows, uint32_t N,
                          uint32_t K)
{
    fill_packed(c, LINEAR_W, EMBER_PANEL_ROWS(N), f->quant == EMBER_QUANT_INT4 ? 0xff : 0x80, 1);
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t t = 0; t < f->terms; t++)
            memset((uint8_t *)kcase_row(c, LINEAR_X, r) + t * EMBER_X8_COLUMNS(K),
                   r % 2 ? 0x80 : 0x7f, K);
}

static void linear_case(const struct form *f, uint32_t rows, uint32_t N, uint32_t K,
                        uint32_t options)
{
    struct kcase c;
    char what[96];
    snprintf(what, sizeof what, "linear %s rows=%u N=%u K=%u options=%u", f->name, rows, N, K,
             options);
    kcase_start(&c, EMBER_OP_LINEAR, options & 8 ? EMBER_ROWS_LOGITS : EMBER_ROWS_TOKENS, rows);
    x_operands(&c, f, LINEAR_X, LINEAR_X_SCALE, rows, K);
    quant_operands(&c, f, LINEAR_W, LINEAR_W_SCALE, LINEAR_W_ZERO, 0, N, K);
    if (options & 16)
        fill_extremes(&c, f, rows, N, K);
    if (options & 1)
        kcase_tensor(&c, LINEAR_B, EMBER_ARENA_WEIGHTS, EMBER_BF16, 1, 1, N, 0, 0);
    kcase_tensor(&c, LINEAR_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, N, 0);
    linear_form(&c.op, f, K);
    x_tmp(&c, f, LINEAR_X_TMP, rows, K);
    c.op.f[LINEAR_F_SCALE] = options & 2 ? 0.375 : 1;
    c.op.f[LINEAR_F_SOFTCAP] = options & 4 ? 5 : 0;
    /* A soft cap makes the output small, but not the rounding of the sum before it. */
    /* Float x as the sum of two bf16 is 2^-17 off at most. */
    c.tolerance = options & 4 ? 1e-4f : !f->terms ? 4e-5f : options & 3 ? 4e-6f : 0;
    c.same = f->terms && !(options & 4);
    kcase_rows(&c, LINEAR_X, 1);
    kcase_rows(&c, LINEAR_X_SCALE, 1);
    kcase_rows(&c, LINEAR_X_TMP, 1);
    kcase_out(&c, LINEAR_OUT, 1);
    kcase_check(&c, what);
    kcase_free(&c);
}

static void test_linear(void **ctx)
{
    static const uint32_t K[] = {1, 7, 16, 31, 32, 33, 64, 100, 128, 129, 256, 600};
    static const uint32_t N[] = {1, 2, 15, 16, 17, 8, 31, 33};
    for (size_t f = 0; f < ARRAY_LEN(forms); f++) {
        for (size_t k = 0; k < ARRAY_LEN(K); k++)
            for (uint32_t rows = 1 + (uint32_t)(f + k) % 3; rows <= 13; rows += 3)
                linear_case(&forms[f], rows, N[(k + rows) % ARRAY_LEN(N)], K[k],
                            (uint32_t)(rows + k) % 16);
        linear_case(&forms[f], 9, 500, 2080, 1);
        for (uint32_t rows = 1; forms[f].terms && rows <= 33; rows += 8)
            linear_case(&forms[f], rows, 33, 600, 16);
        linear_case(&forms[f], 37, 83, 320, 0);
        linear_case(&forms[f], 150, 40, 160, 0);
    }
    /* Rows in two parts; more panels than meet x at once; k in more pieces than one. */
    linear_case(&forms[4], 520, 24, 64, 0);
    linear_case(&forms[7], 40, 600, 1100, 0);
    linear_case(&forms[10], 45, 530, 1200, 2);
    linear_case(&forms[7], 3, 3, EMBER_INT8_K_MAX, 0); /* as much of k as there can be */
    linear_case(&forms[11], 1, 3, EMBER_INT8_K_MAX, 0);
}

static void moe_case(const struct form *f, uint32_t n, uint32_t E, uint32_t topk, uint32_t N,
                     uint32_t K, bool per_slot, uint32_t used)
{
    struct kcase c;
    char what[128];
    snprintf(what, sizeof what, "moe_linear %s rows=%u E=%u k=%u N=%u K=%u per_slot=%d", f->name, n,
             E, topk, N, K, per_slot);
    kcase_start(&c, EMBER_OP_MOE_LINEAR, EMBER_ROWS_TOKENS, n);
    x_operands(&c, f, MOE_X, MOE_X_SCALE, per_slot ? n * topk : n, K);
    quant_operands(&c, f, MOE_W, MOE_W_SCALE, MOE_W_ZERO, E, N, K);
    if (per_slot)
        kcase_tensor(&c, MOE_B, EMBER_ARENA_WEIGHTS, EMBER_BF16, 1, 2, E, N, 0);
    kcase_tensor(&c, MOE_IDS, EMBER_ARENA_SCRATCH, EMBER_I32, 0, 2, n, topk, 0);
    for (uint32_t i = 0; i < n * topk; i++) /* experts from `used` on stay empty */
        ((int32_t *)kcase_row(&c, MOE_IDS, i / topk))[i % topk] = (int32_t)((rnd(used) + i) % used);
    kcase_tensor(&c, MOE_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n * topk, N, 0);
    c.op.i[MOE_I_TOPK] = topk;
    c.op.i[MOE_I_PER_SLOT] = per_slot;
    c.op.i[MOE_I_QUANT] = f->quant;
    c.op.i[MOE_I_GROUP] = group_of(f, K);
    x_tmp(&c, f, MOE_X_TMP, n * topk, K);
    c.op.i[MOE_I_LAYOUT] = EMBER_LAYOUT_TILES;
    c.op.i[MOE_I_K] = K;
    c.op.i[MOE_I_X_GROUP] = f->x_group;
    c.op.i[MOE_I_X_TERMS] = f->terms;
    c.tolerance = !f->terms ? 4e-5f : per_slot ? 4e-6f : 0;
    c.same = f->terms;
    kcase_rows(&c, MOE_X, per_slot ? topk : 1);
    kcase_rows(&c, MOE_X_SCALE, per_slot ? topk : 1);
    kcase_rows(&c, MOE_X_TMP, topk);
    kcase_rows(&c, MOE_IDS, 1);
    kcase_out(&c, MOE_OUT, topk);
    kcase_check(&c, what);
    kcase_free(&c);
}

static void test_moe_linear(void **ctx)
{
    static const uint32_t K[] = {1, 32, 45, 128};
    for (size_t f = 0; f < ARRAY_LEN(forms); f++)
        for (size_t k = 0; k < ARRAY_LEN(K); k++)
            for (uint32_t per_slot = 0; per_slot < 2; per_slot++) {
                moe_case(&forms[f], 1, 8, 2, 9, K[k], per_slot, 8);
                moe_case(&forms[f], 19, 5, 3, 13, K[k], per_slot, 4);
            }
    for (size_t f = 0; f < ARRAY_LEN(forms); f++) {
        moe_case(&forms[f], 150, 3, 1, 37, 96, false, 1); /* all rows to one expert */
        moe_case(&forms[f], 5, 3, 3, 17, 64, true, 3);    /* as many as there are */
    }
    moe_case(&forms[0], MOE_CHUNK / 8 + 1, 2, 8, 2, 32, true, 2); /* more than are sorted at once */
}

static void test_permute(void **ctx)
{
    static const uint32_t K[] = {1, 17, 64, 300};
    for (size_t k = 0; k < ARRAY_LEN(K); k++) {
        struct kcase c;
        kcase_start(&c, EMBER_OP_PERMUTE, EMBER_ROWS_TOKENS, 7);
        kcase_tensor(&c, PERMUTE_X, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, 9, K[k], 0);
        kcase_tensor(&c, PERMUTE_ORDER, EMBER_ARENA_WEIGHTS, EMBER_I32, 0, 1, K[k], 0, 0);
        for (uint32_t i = 0; i < K[k]; i++) /* a damaged one must not lead outside either */
            *(int32_t *)kcase_row(&c, PERMUTE_ORDER, i) = i == 5   ? -3
                                                          : i == 6 ? INT32_MAX
                                                                   : (int32_t)rnd(K[k]);
        kcase_tensor(&c, PERMUTE_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, 9, K[k], 0);
        kcase_rows(&c, PERMUTE_X, 1);
        kcase_out(&c, PERMUTE_OUT, 1);
        kcase_check(&c, "permute");
        kcase_free(&c);
    }
}

/* special: 1 zeros, 2 ties between two integers, 3 an infinity, 4 a NaN, 5 denormals */
static void quantize_case(uint32_t K, uint32_t repeat, int special, uint32_t group, uint32_t terms)
{
    struct kcase c;
    char what[96];
    uint32_t rows = 5 * (repeat ? repeat : 1);
    snprintf(what, sizeof what, "quantize K=%u repeat=%u special=%d group=%u terms=%u", K, repeat,
             special, group, terms);
    kcase_start(&c, EMBER_OP_QUANTIZE, EMBER_ROWS_TOKENS, 5);
    kcase_tensor(&c, QUANTIZE_X, EMBER_ARENA_SCRATCH, EMBER_F32, 3, 2, rows, K, 0);
    for (uint32_t r = 0; special && r < rows; r += 2) {
        float *x = kcase_row(&c, QUANTIZE_X, r);
        for (uint32_t k = 0; k < K; k++)
            x[k] = special == 1   ? 0
                   : special == 2 ? (k ? (float)(int)(k % 250) - 124.5f : 127)
                   : special == 5 ? 1e-41f * (float)k
                                  : x[k];
        if (special == 3 || special == 4)
            x[K - 1] = special == 3 ? -__builtin_inff() : __builtin_nanf("");
    }
    kcase_tensor(&c, QUANTIZE_OUT, EMBER_ARENA_SCRATCH, EMBER_I8, 1, 2, rows,
                 terms * EMBER_X8_COLUMNS(K), 0);
    kcase_tensor(&c, QUANTIZE_SCALE, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows,
                 group ? (K + group - 1) / group : 1, 0);
    c.op.i[QUANTIZE_I_REPEAT] = repeat;
    c.op.i[QUANTIZE_I_GROUP] = group;
    c.op.i[QUANTIZE_I_TERMS] = terms;
    c.tolerance = 0;
    kcase_rows(&c, QUANTIZE_X, repeat ? repeat : 1);
    kcase_out(&c, QUANTIZE_OUT, repeat ? repeat : 1);
    if (special != 3 && special != 4) /* NaN is near nothing */
        kcase_out(&c, QUANTIZE_SCALE, repeat ? repeat : 1);
    kcase_check(&c, what);
    kcase_free(&c);
}

static void test_quantize(void **ctx)
{
    static const uint32_t K[] = {1, 3, 16, 33, 128, 1000};
    for (size_t k = 0; k < ARRAY_LEN(K); k++)
        for (int special = 0; special < 6; special++)
            for (uint32_t terms = 1; terms <= 2; terms++) {
                quantize_case(K[k], special & 1 ? 3 : 0, special, 0, terms);
                quantize_case(K[k], special & 1 ? 3 : 0, special, 32, terms);
            }
}

/* Room for integers and their scales that are handed over: no gaps between rows. */
static void handed_operands(struct kcase *c, const struct form *f, uint32_t x, uint32_t scale,
                            uint32_t rows, uint32_t K)
{
    uint32_t all = EMBER_X8_ROWS(rows), cols = f->terms * EMBER_X8_COLUMNS(K);
    uint32_t segments = f->x_group ? (K + f->x_group - 1) / f->x_group : 1;
    uint32_t scales = segments * (1 + f->terms);
    kcase_tensor(c, x, EMBER_ARENA_SCRATCH, EMBER_I8, 1, 1, all * cols, 0, 0);
    c->op.t[x].rank = 2;
    c->op.t[x].dim[0] = all;
    c->op.t[x].dim[1] = cols;
    c->op.t[x].row_stride = cols;
    kcase_tensor(c, scale, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 1, all * scales, 0, 0);
    c->op.t[scale].rank = 2;
    c->op.t[scale].dim[0] = all;
    c->op.t[scale].dim[1] = scales;
    c->op.t[scale].row_stride = scales * sizeof(float);
}

/* Some groups of floats are special: as in quantize_case, one after the other. */
static void fill_special(struct kcase *c, uint32_t slot, uint32_t group)
{
    const struct ember_tensor *t = &c->op.t[slot];
    for (uint32_t r = 0; r < t->dim[0]; r++) {
        float *x = kcase_row(c, slot, r);
        for (uint32_t k = 0, g = r; k < t->dim[1]; k += group ? group : t->dim[1], g++)
            for (uint32_t i = k; i < t->dim[1] && (!group || i < k + group); i++)
                x[i] = g % 9 == 1   ? 0
                       : g % 9 == 4 ? ((i - k) ? (float)(int)(i % 250) - 124.5f : 127)
                       : g % 9 == 5 ? 1e-41f * (float)i
                       : g % 9 == 7 ? 1e-33f * (float)i
                                    : x[i];
    }
}

/* A linear gives the same bits whether its integers were handed over or not, a gated one, which is
 * a linear and a glu then, too. */
static void handed_case(const struct form *f, uint32_t rows, uint32_t N, uint32_t K, bool gated)
{
    static const uint32_t counts[] = {0, 1, 3, 64};
    struct kcase c;
    struct ember_op quantize, linear, handing, ready;
    kcase_start(&c, EMBER_OP_QUANTIZE, EMBER_ROWS_TOKENS, rows);
    kcase_tensor(&c, QUANTIZE_X, EMBER_ARENA_SCRATCH, EMBER_F32, 3, 2, rows, K, 0);
    fill_special(&c, QUANTIZE_X, f->x_group);
    c.op.i[QUANTIZE_I_GROUP] = f->x_group;
    c.op.i[QUANTIZE_I_TERMS] = f->terms;
    quantize = handing = c.op;
    memset(c.op.t, 0, sizeof c.op.t);
    x_operands(&c, f, LINEAR_X, LINEAR_X_SCALE, rows, K);
    quant_operands(&c, f, LINEAR_W, LINEAR_W_SCALE, LINEAR_W_ZERO, 0, N, K);
    c.op.kind = EMBER_OP_LINEAR;
    memset(c.op.i, 0, sizeof c.op.i);
    if (gated) {
        kcase_tensor(&c, LINEAR_GATE_UP, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, N, 0);
        kcase_tensor(&c, LINEAR_B, EMBER_ARENA_WEIGHTS, EMBER_BF16, 1, 1, N, 0, 0);
        c.op.i[LINEAR_I_GLU] = EMBER_GLU_HALVES;
        c.op.i[LINEAR_I_ACT] = K % 4;
        c.op.f[LINEAR_F_LIMIT] = rows % 3 ? 0 : 1.5;
        c.op.f[LINEAR_F_ALPHA] = 1.702;
        N /= 2;
    }
    kcase_tensor(&c, LINEAR_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, N, 0);
    linear_form(&c.op, f, K);
    c.op.f[LINEAR_F_SCALE] = 1;
    linear = ready = c.op;
    quantize.t[QUANTIZE_OUT] = linear.t[LINEAR_X];
    quantize.t[QUANTIZE_SCALE] = linear.t[LINEAR_X_SCALE];
    handed_operands(&c, f, LINEAR_X, LINEAR_X_SCALE, rows, K);
    handing.t[QUANTIZE_OUT] = ready.t[LINEAR_X] = c.op.t[LINEAR_X];
    handing.t[QUANTIZE_SCALE] = ready.t[LINEAR_X_SCALE] = c.op.t[LINEAR_X_SCALE];
    handing.i[QUANTIZE_I_HAND_OVER] = ready.i[LINEAR_I_X_READY] = 1;
    for (enum cpu_isa isa = 0; isa < CPU_ISA_COUNT; isa++) {
        const struct ember_tensor *t = &linear.t[LINEAR_OUT];
        struct arenas want, got;
        if (!cpu_isa_supported(isa))
            continue;
        kcase_chain(&c, &quantize, &linear, isa, 0, &want);
        for (size_t i = 0; i < ARRAY_LEN(counts); i++) {
            kcase_chain(&c, &handing, &ready, isa, counts[i], &got);
            for (uint32_t r = 0; r < rows; r++) {
                const size_t at = t->offset + r * t->row_stride;
                if (memcmp(want.data[EMBER_ARENA_SCRATCH] + at, got.data[EMBER_ARENA_SCRATCH] + at,
                           N * sizeof(float)))
                    fail_msg("%s (%s): row %u of %u, N=%u K=%u, %u blocks: other bits when x is "
                             "handed over",
                             f->name, cpu_isa_name(isa), r, rows, N, K, counts[i]);
            }
            arenas_free(&got);
        }
        arenas_free(&want);
    }
    kcase_free(&c);
}

static void test_handed_over(void **ctx)
{
    static const uint32_t K[] = {1, 16, 17, 32, 33, 64, 100, 129, 256, 600};
    static const uint32_t rows[] = {1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 33, 40, 47};
    for (size_t f = 0; f < ARRAY_LEN(forms); f++) {
        if (!forms[f].terms)
            continue;
        for (size_t k = 0; k < ARRAY_LEN(K); k++)
            for (size_t r = 0; r < ARRAY_LEN(rows); r++)
                handed_case(&forms[f], rows[r], 1 + (uint32_t)(f + k + r) % 37, K[k], false);
        handed_case(&forms[f], 129, 40, 2080, false);
    }
    handed_case(&forms[4], 520, 24, 64, false); /* rows in two parts */
    handed_case(&forms[10], 600, 40, 3072, false);
    handed_case(&forms[11], 17, 20, 16448, false); /* more of k than matrix tiles take */
    handed_case(&forms[1], 9, 3, EMBER_INT8_K_MAX, false);
}

/* A norm that hands integers over leaves what a norm and a quantize leave. */
static void norm_case(const struct form *f, uint32_t rows, uint32_t K, uint32_t options)
{
    static const uint32_t counts[] = {0, 1, 3, 64};
    struct kcase c;
    struct ember_op norm, quantize, both;
    kcase_start(&c, EMBER_OP_NORM, EMBER_ROWS_TOKENS, rows);
    kcase_tensor(&c, NORM_X, EMBER_ARENA_SCRATCH, EMBER_F32, 3, 2, rows, K, 0);
    kcase_tensor(&c, NORM_W, EMBER_ARENA_WEIGHTS, EMBER_BF16, 1, 1, K, 0, 0);
    kcase_tensor(&c, NORM_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, K, 0);
    if (options & 1)
        kcase_tensor(&c, NORM_DELTA, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, K, 0);
    memset(kcase_row(&c, NORM_X, rows / 2), 0, options & 2 ? K * sizeof(float) : 0);
    handed_operands(&c, f, NORM_OUT_X, NORM_OUT_X_SCALE, rows, K);
    c.op.i[NORM_I_KIND] = options & 1 ? EMBER_NORM_LAYER : EMBER_NORM_RMS;
    c.op.i[NORM_I_X_GROUP] = f->x_group;
    c.op.i[NORM_I_X_TERMS] = f->terms;
    c.op.f[NORM_F_EPS] = 1e-5;
    c.op.f[NORM_F_DELTA_SCALE] = 0.5;
    norm = both = c.op;
    norm.t[NORM_OUT_X].rank = norm.t[NORM_OUT_X_SCALE].rank = 0;
    quantize = (struct ember_op){.kind = EMBER_OP_QUANTIZE, .rows = norm.rows};
    quantize.t[QUANTIZE_X] = c.op.t[NORM_OUT];
    quantize.t[QUANTIZE_OUT] = c.op.t[NORM_OUT_X];
    quantize.t[QUANTIZE_SCALE] = c.op.t[NORM_OUT_X_SCALE];
    quantize.i[QUANTIZE_I_GROUP] = f->x_group;
    quantize.i[QUANTIZE_I_TERMS] = f->terms;
    quantize.i[QUANTIZE_I_HAND_OVER] = 1;
    for (enum cpu_isa isa = 0; isa < CPU_ISA_COUNT; isa++) {
        const struct ember_tensor *room = &norm.t[NORM_OUT];
        struct arenas want, got;
        if (!cpu_isa_supported(isa))
            continue;
        kcase_chain(&c, &norm, &quantize, isa, 0, &want);
        for (size_t i = 0; i < ARRAY_LEN(counts); i++) {
            kcase_run(&c, &both, isa, NULL, counts[i], &got);
            for (uint32_t r = 0; r < rows; r++) /* what is left of the floats means nothing */
                memcpy(got.data[EMBER_ARENA_SCRATCH] + room->offset + r * room->row_stride,
                       want.data[EMBER_ARENA_SCRATCH] + room->offset + r * room->row_stride,
                       K * sizeof(float));
            if (memcmp(want.data[EMBER_ARENA_SCRATCH], got.data[EMBER_ARENA_SCRATCH],
                       want.len[EMBER_ARENA_SCRATCH]))
                fail_msg("norm %s (%s): rows=%u K=%u options=%u, %u blocks: other bytes than norm "
                         "and quantize leave",
                         f->name, cpu_isa_name(isa), rows, K, options, counts[i]);
            arenas_free(&got);
        }
        arenas_free(&want);
    }
    kcase_free(&c);
}

static void test_norm(void **ctx)
{
    static const uint32_t K[] = {1, 16, 33, 64, 100, 300};
    static const uint32_t rows[] = {1, 2, 4, 5, 8, 9, 16, 17, 47};
    for (size_t f = 0; f < ARRAY_LEN(forms); f++)
        for (size_t k = 0; forms[f].terms && k < ARRAY_LEN(K); k++)
            for (size_t r = 0; r < ARRAY_LEN(rows); r++)
                norm_case(&forms[f], rows[r], K[k], (uint32_t)(k + r) % 4);
}

static void test_gated(void **ctx)
{
    static const uint32_t K[] = {1, 33, 66, 129, 603};
    static const uint32_t rows[] = {1, 2, 5, 7, 8, 12, 17, 40};
    for (size_t f = 0; f < ARRAY_LEN(forms); f++) {
        if (!forms[f].terms)
            continue;
        for (size_t k = 0; k < ARRAY_LEN(K); k++)
            for (size_t r = 0; r < ARRAY_LEN(rows); r++)
                handed_case(&forms[f], rows[r], 32 * (1 + (uint32_t)(f + k + r) % 4), K[k], true);
        handed_case(&forms[f], 3, 20, 100, true); /* gate and up in one panel */
    }
    handed_case(&forms[10], 520, 1056, 64, true); /* more than caches hold */
}

/* What reads the output of a gated linear over integers may be one over bf16. */
static void test_gated_for_bf16(void **ctx)
{
    const uint32_t N = 64, K = 100;
    for (uint32_t rows = 1; rows < 20; rows++)
        for (int out_x = 0; out_x < 2; out_x++) {
            const struct form *f = &forms[rows % 2 ? 10 : 0];
            char kernel[32], spec[96];
            struct kcase c;
            kcase_start(&c, EMBER_OP_LINEAR, EMBER_ROWS_TOKENS, rows);
            handed_operands(&c, f, LINEAR_X, LINEAR_X_SCALE, rows, K);
            quant_operands(&c, f, LINEAR_W, LINEAR_W_SCALE, LINEAR_W_ZERO, 0, N, K);
            kcase_tensor(&c, LINEAR_GATE_UP, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, N, 0);
            kcase_tensor(&c, LINEAR_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, N / 2, 0);
            if (out_x)
                kcase_tensor(&c, LINEAR_OUT_X, EMBER_ARENA_SCRATCH, EMBER_U8, 1, 2, rows,
                             (uint32_t)EMBER_X_TMP_BYTES(N / 2), 0);
            linear_form(&c.op, f, K);
            c.op.i[LINEAR_I_X_READY] = 1;
            c.op.i[LINEAR_I_GLU] = EMBER_GLU_HALVES;
            kcase_launch(&c.op, CPU_ISA_AMX, kernel, spec);
            if ((strcmp(kernel, "x_tiles") == 0) != out_x)
                fail_msg("%u rows, %s: the last launch is %s", rows,
                         out_x ? "handed over" : "not handed over", kernel);
            kcase_free(&c);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),         cmocka_unit_test(test_moe_linear),
        cmocka_unit_test(test_permute),        cmocka_unit_test(test_quantize),
        cmocka_unit_test(test_embed),          cmocka_unit_test(test_handed_over),
        cmocka_unit_test(test_gated),          cmocka_unit_test(test_norm),
        cmocka_unit_test(test_gated_for_bf16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
