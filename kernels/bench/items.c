/* SPDX-License-Identifier: Apache-2.0 */
/* What is measured: the shapes of some models, and an op for each. */
#include "kernels/bench/internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

const struct model bench_models[] = {
    {"tiny", 256, 704, 4, 2, 64, 4096, 8},
    {"0.6B", 1024, 3072, 16, 8, 128, 151936, 28},
    {"1.7B", 2048, 6144, 16, 8, 128, 151936, 28},
    {"4B", 2560, 9728, 32, 8, 128, 151936, 36},
    {"30B-A3B", 2048, 768, 32, 4, 128, 151936, 48, 128, 8},
    {NULL},
};

static struct ember_tensor *tensor(struct item *item, uint32_t slot, enum ember_arena arena,
                                   enum ember_dtype dtype, uint32_t d0, uint32_t d1)
{
    struct ember_tensor *t = &item->op.t[slot];
    uint64_t size = dtype_size(dtype), row = (d1 ? d1 : 1) * size;
    item->used[arena] = size_align(item->used[arena], 64);
    *t = (struct ember_tensor){.arena = (uint8_t)arena,
                               .dtype = (uint8_t)dtype,
                               .rank = d1 ? 2 : 1,
                               .dim = {d0, d1, 0},
                               .offset = item->used[arena],
                               .row_stride = d1 ? row : 0};
    item->used[arena] += row * d0;
    return t;
}

static void item_start(struct item *item, const struct model *m, enum ember_op_kind kind,
                       const char *what, uint32_t rows)
{
    memset(item, 0, sizeof(*item));
    item->model = m;
    item->rows = rows;
    item->op.kind = (uint16_t)kind;
    item->used[EMBER_ARENA_IO] = sizeof(struct ember_step_header);
    snprintf(item->what, sizeof(item->what), "%s, %u row%s", what, rows, rows == 1 ? "" : "s");
}

static void linear_item(struct item *item, const struct model *m, const char *what, uint32_t rows,
                        uint32_t N, uint32_t K)
{
    item_start(item, m, EMBER_OP_LINEAR, what, rows);
    tensor(item, LINEAR_X, EMBER_ARENA_SCRATCH, EMBER_F32, rows, K);
    tensor(item, LINEAR_W, EMBER_ARENA_WEIGHTS, EMBER_BF16, EMBER_PANEL_ROWS(N), (K + 31) / 32 * 32)
        ->dim[0] = N;
    tensor(item, LINEAR_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, rows, N);
    tensor(item, LINEAR_X_TMP, EMBER_ARENA_SCRATCH, EMBER_U8, rows, (uint32_t)EMBER_X_TMP_BYTES(K));
    item->op.i[LINEAR_I_LAYOUT] = EMBER_LAYOUT_TILES;
    item->op.f[LINEAR_F_SCALE] = 1;
    item->weight_bytes = 2ull * N * K;
    item->bytes = (double)item->weight_bytes;
    item->flops = 2.0 * rows * N * K;
    item->rate = RATE_BF16;
}

/* A linear as gate and up of an MLP. */
static void gated_item(struct item *item, const struct model *m, uint32_t rows)
{
    linear_item(item, m, "gate_up, gated", rows, 2 * m->inter, m->hidden);
    tensor(item, LINEAR_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, rows, m->inter);
    tensor(item, LINEAR_GATE_UP, EMBER_ARENA_SCRATCH, EMBER_F32, rows, 2 * m->inter);
    item->op.i[LINEAR_I_GLU] = EMBER_GLU_HALVES;
    item->op.i[LINEAR_I_ACT] = EMBER_ACT_SILU;
}

/* A weight in one of the quantised forms; terms: of integer x, 0: floats. */
struct quant_form {
    const char *name;
    enum ember_quant quant;
    enum ember_dtype codes, scale;
    uint32_t group, terms, x_group;
};

/* q8 and q4 are what emberd makes (small: of small matrices), the others are what checkpoints
 * hold. */
static const struct quant_form quant_forms[] = {
    {"q8", EMBER_QUANT_INT8, EMBER_I8, EMBER_F16, 256, 1, 256},
    {"q4", EMBER_QUANT_INT4, EMBER_U8, EMBER_F16, 32, 1, 32},
    {"fp4", EMBER_QUANT_FP4, EMBER_U8, EMBER_U8, 32, 0, 0},
    {"fp8", EMBER_QUANT_FP8, EMBER_F8, EMBER_F32, 128, 0, 0},
    {"q8 head", EMBER_QUANT_INT8, EMBER_I8, EMBER_F16, 128, 1, 64},
    {"q8 small", EMBER_QUANT_INT8, EMBER_I8, EMBER_F16, 32, 2, 32},
    {"int8 row, int8 x", EMBER_QUANT_INT8, EMBER_I8, EMBER_BF16, 0, 1, 0},
    {"int8 row", EMBER_QUANT_INT8, EMBER_I8, EMBER_BF16, 0, 2, 128},
    {"int4", EMBER_QUANT_INT4, EMBER_U8, EMBER_F16, 128, 2, 128},
};

#define EXPERT_FORMS 4 /* the first of them, which experts are measured in, beside bf16 */

static const uint32_t bench_rows[] = {1, 16, 512};

/* Elements of a row of codes. */
static uint32_t code_columns(const struct quant_form *f, uint32_t K)
{
    return (uint32_t)size_align(f->codes == EMBER_U8 ? (K + 31) / 32 * 16 : K, EMBER_TILE_LINE);
}

/* The x of a quantised item, made ahead and handed over: it is zeros and noise. */
static void quant_x(struct item *item, const struct quant_form *f, uint32_t rows, uint32_t K)
{
    uint32_t segments = f->x_group ? (K + f->x_group - 1) / f->x_group : 1;
    item->op.i[LINEAR_I_LAYOUT] = EMBER_LAYOUT_TILES;
    if (!f->terms) {
        tensor(item, LINEAR_X, EMBER_ARENA_SCRATCH, EMBER_F32, rows, K);
        tensor(item, LINEAR_X_TMP, EMBER_ARENA_SCRATCH, EMBER_U8, rows,
               (uint32_t)EMBER_X_TMP_BYTES(K));
        item->rate = RATE_BF16;
        return;
    }
    rows = EMBER_X8_ROWS(rows);
    tensor(item, LINEAR_X, EMBER_ARENA_SCRATCH, EMBER_I8, rows, f->terms * EMBER_X8_COLUMNS(K));
    tensor(item, LINEAR_X_SCALE, EMBER_ARENA_SCRATCH, EMBER_F32, rows, (1 + f->terms) * segments);
    item->op.i[LINEAR_I_X_READY] = 1;
    item->op.i[LINEAR_I_K] = K;
    item->op.i[LINEAR_I_X_GROUP] = f->x_group;
    item->op.i[LINEAR_I_X_TERMS] = f->terms;
    item->rate = RATE_INT8;
}

static void quant_item(struct item *item, const struct model *m, const struct quant_form *f,
                       uint32_t rows)
{
    uint32_t N = 2 * m->inter, K = m->hidden, group = f->group ? f->group : K;
    char what[40];
    snprintf(what, sizeof(what), "gate_up %s", f->name);
    item_start(item, m, EMBER_OP_LINEAR, what, rows);
    quant_x(item, f, rows, K);
    tensor(item, LINEAR_W, EMBER_ARENA_WEIGHTS, f->codes, N, code_columns(f, K));
    tensor(item, LINEAR_W_SCALE, EMBER_ARENA_WEIGHTS, f->scale, N, (K + group - 1) / group);
    tensor(item, LINEAR_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, rows, N);
    item->op.i[LINEAR_I_QUANT] = f->quant;
    item->op.i[LINEAR_I_GROUP] = group;
    item->op.f[LINEAR_F_SCALE] = 1;
    item->weight_bytes = size_align(item->used[EMBER_ARENA_WEIGHTS], 64);
    item->bytes = (double)item->weight_bytes;
    item->flops = 2.0 * rows * N * K;
}

/* Quantised item number i: each form for each number of rows; false when there are no more. */
static bool quant_make(struct item *item, const struct model *m, uint32_t i)
{
    if (i >= ARRAY_LEN(quant_forms) * ARRAY_LEN(bench_rows))
        return false;
    quant_item(item, m, &quant_forms[i / ARRAY_LEN(bench_rows)],
               bench_rows[i % ARRAY_LEN(bench_rows)]);
    return true;
}

static void norm_item(struct item *item, const struct model *m, uint32_t rows)
{
    item_start(item, m, EMBER_OP_NORM, "norm", rows);
    tensor(item, NORM_X, EMBER_ARENA_SCRATCH, EMBER_F32, rows, m->hidden);
    tensor(item, NORM_W, EMBER_ARENA_WEIGHTS, EMBER_BF16, m->hidden, 0);
    tensor(item, NORM_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, rows, m->hidden);
    tensor(item, NORM_DELTA, EMBER_ARENA_SCRATCH, EMBER_F32, rows, m->hidden);
    item->op.f[NORM_F_EPS] = 1e-6;
    item->op.f[NORM_F_DELTA_SCALE] = 1;
    item->bytes = 12.0 * rows * m->hidden;
    item->flops = 6.0 * rows * m->hidden;
    snprintf(item->spec, sizeof(item->spec), "D=%u", m->hidden);
}

static void kv_tensors(struct item *item, uint32_t k, uint32_t v, const struct model *m)
{
    uint32_t pages = CONTEXT / KV_PAGE_SIZE;
    uint64_t block = 4ull * m->kv_heads * KV_PAGE_SIZE * m->dk;
    tensor(item, k, EMBER_ARENA_KV, EMBER_F32, pages, (uint32_t)(2 * block / 4));
    item->op.t[k].rank = 3;
    item->op.t[k].dim[0] = m->kv_heads;
    item->op.t[k].dim[1] = KV_PAGE_SIZE;
    item->op.t[k].dim[2] = m->dk;
    item->op.t[v] = item->op.t[k];
    item->op.t[v].offset += block;
}

static void split_item(struct item *item, const struct model *m, uint32_t rows)
{
    uint32_t cols = (m->q_heads + 2 * m->kv_heads) * m->dk;
    item_start(item, m, EMBER_OP_SPLIT_NORM_ROPE, "split_norm_rope", rows);
    tensor(item, SNR_QKV, EMBER_ARENA_SCRATCH, EMBER_F32, rows, cols);
    tensor(item, SNR_Q_NORM, EMBER_ARENA_WEIGHTS, EMBER_BF16, m->dk, 0);
    tensor(item, SNR_K_NORM, EMBER_ARENA_WEIGHTS, EMBER_BF16, m->dk, 0);
    tensor(item, SNR_ROPE, EMBER_ARENA_SCRATCH, EMBER_F32, rows, m->dk);
    tensor(item, SNR_Q, EMBER_ARENA_SCRATCH, EMBER_F32, rows, m->q_heads * m->dk);
    kv_tensors(item, SNR_K, SNR_V, m);
    tensor(item, SNR_KV_SLOT, EMBER_ARENA_IO, EMBER_I32, rows, 0);
    const int64_t ints[] = {m->q_heads, m->kv_heads,        m->dk, m->dk,       m->dk,
                            0,          EMBER_QK_NORM_HEAD, 0,     KV_PAGE_SIZE};
    memcpy(item->op.i, ints, sizeof(ints));
    item->op.f[SNR_F_EPS] = 1e-6;
    item->op.f[SNR_F_V_SCALE] = 1;
    item->bytes = 8.0 * rows * cols;
    item->flops = 8.0 * rows * cols;
    snprintf(item->spec, sizeof(item->spec), "DK=%u,DV=%u", m->dk, m->dk);
}

/* rows 1: one token behind CONTEXT - 1 others; else the first `rows` tokens of a prompt. */
static void attention_item(struct item *item, const struct model *m, uint32_t rows)
{
    item_start(item, m, EMBER_OP_ATTENTION, "attention", rows);
    tensor(item, ATTN_Q, EMBER_ARENA_SCRATCH, EMBER_F32, rows, m->q_heads * m->dk);
    kv_tensors(item, ATTN_K, ATTN_V, m);
    tensor(item, ATTN_PAGES, EMBER_ARENA_IO, EMBER_I32, 1, CONTEXT / KV_PAGE_SIZE);
    tensor(item, ATTN_SEQ_OF, EMBER_ARENA_IO, EMBER_I32, rows, 0);
    tensor(item, ATTN_POSITIONS, EMBER_ARENA_IO, EMBER_I32, rows, 0);
    tensor(item, ATTN_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, rows, m->q_heads * m->dk);
    const int64_t ints[] = {m->q_heads, m->kv_heads, m->dk, m->dk, KV_PAGE_SIZE, 0};
    memcpy(item->op.i, ints, sizeof(ints));
    item->op.f[ATTN_F_SCALE] = 1 / sqrt(m->dk);
    double keys = rows == 1 ? CONTEXT : 0.5 * rows * (rows + 1.0);
    item->bytes = 8.0 * m->kv_heads * m->dk * (rows == 1 ? CONTEXT : rows);
    item->flops = 4.0 * m->q_heads * m->dk * keys;
    snprintf(item->spec, sizeof(item->spec), "DK=%u,DV=%u,PAGE=%u", m->dk, m->dk, KV_PAGE_SIZE);
}

/* A matrix for each expert. */
static struct ember_tensor *stack(struct item *item, uint32_t slot, enum ember_dtype dtype,
                                  uint32_t E, uint32_t N, uint32_t cols)
{
    struct ember_tensor *t = tensor(item, slot, EMBER_ARENA_WEIGHTS, dtype, E, N * cols);
    t->rank = 3;
    t->dim[1] = N;
    t->dim[2] = cols;
    return t;
}

/* The experts' gate and up, or down; f NULL: bf16. */
static void moe_item(struct item *item, const struct model *m, const struct quant_form *f,
                     bool down, uint32_t rows)
{
    uint32_t E = m->experts, topk = m->topk, N = down ? m->hidden : 2 * m->inter;
    uint32_t K = down ? m->inter : m->hidden, x_rows = down ? rows * topk : rows;
    char what[40];
    snprintf(what, sizeof(what), "%s %s", down ? "down" : "gate_up", f ? f->name : "bf16");
    item_start(item, m, EMBER_OP_MOE_LINEAR, what, rows);
    if (!f || !f->terms) {
        tensor(item, MOE_X, EMBER_ARENA_SCRATCH, EMBER_F32, x_rows, K);
        tensor(item, MOE_X_TMP, EMBER_ARENA_SCRATCH, EMBER_U8, rows * topk,
               (uint32_t)EMBER_X_TMP_BYTES(K));
        item->rate = RATE_BF16;
    }
    if (f) {
        stack(item, MOE_W, f->codes, E, N, code_columns(f, K));
        stack(item, MOE_W_SCALE, f->scale, E, N, (K + f->group - 1) / f->group);
        item->op.i[MOE_I_QUANT] = f->quant;
        item->op.i[MOE_I_GROUP] = f->group;
    } else {
        stack(item, MOE_W, EMBER_BF16, E, N, K);
    }
    if (f && f->terms) {
        tensor(item, MOE_X, EMBER_ARENA_SCRATCH, EMBER_I8, x_rows, f->terms * EMBER_X8_COLUMNS(K));
        tensor(item, MOE_X_SCALE, EMBER_ARENA_SCRATCH, EMBER_F32, x_rows, K / f->x_group);
        item->op.i[MOE_I_K] = K;
        item->op.i[MOE_I_X_GROUP] = f->x_group;
        item->op.i[MOE_I_X_TERMS] = f->terms;
        item->rate = RATE_INT8;
    }
    item->op.i[MOE_I_LAYOUT] = EMBER_LAYOUT_TILES;
    item->op.i[MOE_I_TOPK] = topk;
    item->op.i[MOE_I_PER_SLOT] = down;
    tensor(item, MOE_IDS, EMBER_ARENA_IO, EMBER_I32, rows, topk);
    item->io_bytes = 4ull * rows * topk;
    item->used[EMBER_ARENA_IO] += (IO_TURNS - 1) * item->io_bytes;
    tensor(item, MOE_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, rows * topk, N);
    item->bytes = (double)item->used[EMBER_ARENA_WEIGHTS] *
                  (1 - pow(1 - (double)topk / E, rows)); /* as many experts as are chosen */
    item->flops = 2.0 * rows * topk * N * K;
}

static void route_item(struct item *item, const struct model *m, uint32_t rows)
{
    item_start(item, m, EMBER_OP_MOE_ROUTE, "route", rows);
    tensor(item, ROUTE_LOGITS, EMBER_ARENA_SCRATCH, EMBER_F32, rows, m->experts);
    tensor(item, ROUTE_IDS, EMBER_ARENA_SCRATCH, EMBER_I32, rows, m->topk);
    tensor(item, ROUTE_WEIGHTS, EMBER_ARENA_SCRATCH, EMBER_F32, rows, m->topk);
    item->op.i[ROUTE_I_TOPK] = m->topk;
    item->op.i[ROUTE_I_NORMALIZE] = 1;
    item->op.f[ROUTE_F_SCALE] = 1;
    item->bytes = 4.0 * rows * m->experts;
}

static void combine_item(struct item *item, const struct model *m, uint32_t rows)
{
    item_start(item, m, EMBER_OP_MOE_COMBINE, "combine", rows);
    tensor(item, COMBINE_Y, EMBER_ARENA_SCRATCH, EMBER_F32, rows * m->topk, m->hidden);
    tensor(item, COMBINE_WEIGHTS, EMBER_ARENA_SCRATCH, EMBER_F32, rows, m->topk);
    tensor(item, COMBINE_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, rows, m->hidden);
    item->op.i[COMBINE_I_TOPK] = m->topk;
    item->bytes = 4.0 * rows * m->hidden * (m->topk + 1);
    item->flops = 2.0 * rows * m->hidden * m->topk;
}

/* Item number i of a mixture of experts; false when there are no more. */
static bool moe_make(struct item *item, const struct model *m, uint32_t i)
{
    const uint32_t n = bench_rows[i % ARRAY_LEN(bench_rows)], kind = i / ARRAY_LEN(bench_rows);
    if (kind < 2 * (EXPERT_FORMS + 1))
        moe_item(item, m, kind < 2 ? NULL : &quant_forms[kind / 2 - 1], kind % 2, n);
    else if (kind == 2 * (EXPERT_FORMS + 1))
        route_item(item, m, n);
    else if (kind == 2 * (EXPERT_FORMS + 1) + 1)
        combine_item(item, m, n);
    else
        return false;
    return true;
}

static void glu_item(struct item *item, const struct model *m, uint32_t rows)
{
    item_start(item, m, EMBER_OP_GLU, "glu", rows);
    tensor(item, GLU_X, EMBER_ARENA_SCRATCH, EMBER_F32, rows, 2 * m->inter);
    tensor(item, GLU_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, rows, m->inter);
    item->bytes = 8.0 * rows * m->inter;
    item->flops = 20.0 * rows * m->inter;
}

static void argmax_item(struct item *item, const struct model *m)
{
    item_start(item, m, EMBER_OP_ARGMAX, "argmax", 1);
    tensor(item, ARGMAX_X, EMBER_ARENA_IO, EMBER_F32, 1, m->vocab);
    tensor(item, ARGMAX_OUT, EMBER_ARENA_IO, EMBER_I32, 1, 0);
    item->bytes = 4.0 * m->vocab;
}

static void rope_item(struct item *item, const struct model *m, uint32_t rows)
{
    item_start(item, m, EMBER_OP_ROPE_TABLE, "rope_table", rows);
    tensor(item, ROPE_POSITIONS, EMBER_ARENA_IO, EMBER_I32, rows, 0);
    tensor(item, ROPE_LEN, EMBER_ARENA_IO, EMBER_I32, rows, 0);
    tensor(item, ROPE_INV_FREQ, EMBER_ARENA_WEIGHTS, EMBER_F32, m->dk / 2, 0);
    tensor(item, ROPE_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, rows, m->dk);
    item->op.f[ROPE_F_ATTENTION_FACTOR] = 1;
    item->bytes = 4.0 * rows * m->dk;
    item->flops = 40.0 * rows * m->dk;
}

bool bench_item(struct item *item, const struct model *m, uint32_t i)
{
    uint32_t q = m->q_heads * m->dk, qkv = q + 2 * m->kv_heads * m->dk;
    const struct {
        const char *name;
        uint32_t N, K;
    } linears[] = {{"qkv", qkv, m->hidden},
                   {"o", m->hidden, q},
                   {"gate_up", 2 * m->inter, m->hidden},
                   {"down", m->hidden, m->inter},
                   {"head", m->vocab, m->hidden}};
    if (m->experts)
        return moe_make(item, m, i);
    if (i < ARRAY_LEN(linears) * ARRAY_LEN(bench_rows)) {
        uint32_t n = bench_rows[i / ARRAY_LEN(linears)], l = i % ARRAY_LEN(linears);
        if (l == 2)
            gated_item(item, m, n);
        else
            linear_item(item, m, linears[l].name, l == 4 && n > 16 ? 16 : n, linears[l].N,
                        linears[l].K);
        return true;
    }
    i -= ARRAY_LEN(linears) * ARRAY_LEN(bench_rows);
    uint32_t n = i % 2 ? 64 : 1;
    switch (i / 2) {
    case 0:
        attention_item(item, m, n == 1 ? 1 : 256);
        return true;
    case 1:
        norm_item(item, m, n);
        return true;
    case 2:
        split_item(item, m, n);
        return true;
    case 3:
        glu_item(item, m, n);
        return true;
    case 4:
        rope_item(item, m, n);
        return true;
    case 5:
        if (i % 2)
            return quant_make(item, m, 0);
        argmax_item(item, m);
        return true;
    }
    return quant_make(item, m, i - 11);
}
