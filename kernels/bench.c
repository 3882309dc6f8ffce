/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/bench.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "kernels/backend.h"
#include "kernels/plan.h"
#include "kernels/step_io.h"

#define MAX_ARGS 64
#define CONTEXT 512      /* keys of a sequence */
#define SAMPLE_NS 200000 /* a sample repeats its launch until about this long */

struct model {
    const char *name;
    uint32_t hidden, inter, q_heads, kv_heads, dk, vocab, layers;
    uint32_t experts, topk; /* not 0: only what a mixture of experts has of its own is measured */
};

static const struct model models[] = {
    {"tiny", 256, 704, 4, 2, 64, 4096, 8},
    {"0.6B", 1024, 3072, 16, 8, 128, 151936, 28},
    {"1.7B", 2048, 6144, 16, 8, 128, 151936, 28},
    {"4B", 2560, 9728, 32, 8, 128, 151936, 36},
    {"30B-A3B", 2048, 768, 32, 4, 128, 151936, 48, 128, 8},
};

struct bench {
    const struct ember_backend *backend;
    const struct kernels_bench_options *options;
    struct ember_device *device;
    struct ember_queue *queue;
    struct ember_memory *memory[EMBER_ARENA_COUNT];
    uint64_t bytes[EMBER_ARENA_COUNT];
    struct kernels_bench_machine machine;
    kernels_bench_fn row;
    void *user;
    struct error *err;
};

/* One op to be measured. */
struct item {
    const struct model *model;
    char what[40];
    struct ember_op op;
    double bytes, flops;
    uint64_t weight_bytes; /* of the operand that rotates, 0: none */
    uint64_t io_bytes;     /* of IO_TURNS tables of experts that rotate, each; 0: none */
    uint64_t used[EMBER_ARENA_COUNT];
    uint32_t rows;
    char spec[96]; /* what a specialised build would fix */
    enum { RATE_FMA, RATE_BF16, RATE_INT8 } rate;
};

#define MAX_LAUNCHES 4

/* A launch with its arguments kept. */
struct launch {
    char kernel[32], spec[96];
    uint32_t grid[3], n_args;
    struct ember_launch_arg args[MAX_ARGS];
};

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int failed(struct bench *b, int r, const struct ember_backend_error *error)
{
    return backend_fail(b->backend, r, error, b->err);
}

/* ---- items ---- */

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

/* The x of a quantised item, made ahead: it is zeros and noise. */
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
    tensor(item, LINEAR_X, EMBER_ARENA_SCRATCH, EMBER_I8, rows, f->terms * EMBER_X8_COLUMNS(K));
    tensor(item, LINEAR_X_SCALE, EMBER_ARENA_SCRATCH, EMBER_F32, rows, segments);
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

#define IO_TURNS 64 /* tables of experts, so that those of few rows come from memory, too */

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

/* Item number i of a model; false when there are no more. */
static bool item_make(struct item *item, const struct model *m, uint32_t i)
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

/* ---- the device ---- */

static int arena_need(struct bench *b, enum ember_arena arena, uint64_t bytes)
{
    struct ember_backend_error error = {""};
    if (b->memory[arena] && b->bytes[arena] >= bytes)
        return 0;
    if (b->memory[arena])
        b->backend->memory_free(b->memory[arena]);
    b->memory[arena] = NULL;
    int r = b->backend->memory_alloc(b->device, bytes, &b->memory[arena], &error);
    if (r)
        return failed(b, r, &error);
    b->bytes[arena] = bytes;
    _cleanup_free_ uint32_t *noise = mem_alloc(1 << 18, sizeof(*noise));
    if (!noise)
        return error_set(b->err, ENOMEM, "no memory for a MiB of noise");
    for (uint32_t i = 0, x = 1; i < 1 << 18; i++, x = x * 1664525 + 1013904223)
        noise[i] = 0x3d203d20 | /* two bf16, or one float, of magnitude about 1/32; no small FP8 */
                   (x >> 8 & 0x807f807f);
    for (uint64_t at = 0; !r && at < bytes; at += MIB)
        r = b->backend->copy_in(b->queue, b->memory[arena], at, noise, MIN(bytes - at, MIB),
                                &error);
    if (!r)
        r = b->backend->queue_sync(b->queue, &error);
    return r ? failed(b, r, &error) : 0;
}

/* What an op lowers to. */
struct launches {
    struct launch list[MAX_LAUNCHES];
    struct ember_kernel *kernels[MAX_LAUNCHES];
    uint32_t n;
};

static int take_launch(void *sink, const struct ember_launch *from)
{
    struct launches *all = sink;
    if (from->n_args > MAX_ARGS || all->n == MAX_LAUNCHES)
        return -E2BIG;
    struct launch *to = &all->list[all->n++];
    memcpy(to->kernel, from->kernel, sizeof(to->kernel));
    memcpy(to->spec, from->spec, sizeof(to->spec));
    memcpy(to->grid, from->grid, sizeof(to->grid));
    memcpy(to->args, from->args, from->n_args * sizeof(*to->args));
    to->n_args = from->n_args;
    return 0;
}

/* topk different experts for each row, of which each is as likely. */
static void fill_experts(int32_t *ids, size_t rows, uint32_t E, uint32_t topk)
{
    uint32_t seed = 1;
    for (size_t i = 0; i < rows * topk; i++) {
        bool taken;
        do {
            seed = seed * 1664525 + 1013904223;
            ids[i] = (int32_t)((uint64_t)(seed >> 8) * E >> 24);
            taken = false;
            for (size_t j = i - i % topk; j < i; j++)
                taken = taken || ids[j] == ids[i];
        } while (taken);
    }
}

/* Integers of the IO arena: rows, positions 0.. or the last, one sequence, page i at i, expert ids.
 */
static int fill_io(struct bench *b, const struct item *item)
{
    struct ember_backend_error error = {""};
    uint64_t bytes = item->op.kind == EMBER_OP_ARGMAX ? sizeof(struct ember_step_header)
                                                      : item->used[EMBER_ARENA_IO];
    _cleanup_free_ char *io = mem_alloc(1, bytes);
    if (!io)
        return error_set(b->err, ENOMEM, "no memory for %llu bytes", (unsigned long long)bytes);
    *(struct ember_step_header *)io =
        (struct ember_step_header){.n_tokens = item->rows, .n_seqs = 1, .n_rows = item->rows};
    for (uint32_t s = 0; s < EMBER_OP_TENSORS; s++) {
        const struct ember_tensor *t = &item->op.t[s];
        if (!t->rank || t->arena != EMBER_ARENA_IO || t->dtype != EMBER_I32 ||
            item->op.kind == EMBER_OP_ARGMAX)
            continue;
        uint32_t n = t->dim[0] * (t->rank > 1 ? t->dim[1] : 1);
        for (uint32_t i = 0; i < n; i++)
            ((int32_t *)(io + t->offset))[i] = (int32_t)i;
        if (item->op.kind == EMBER_OP_MOE_LINEAR)
            fill_experts((int32_t *)(io + t->offset), (size_t)IO_TURNS * t->dim[0],
                         item->op.t[MOE_W].dim[0], t->dim[1]);
        if (item->op.kind == EMBER_OP_ATTENTION && s == ATTN_SEQ_OF)
            memset(io + t->offset, 0, n * 4);
        if (item->op.kind == EMBER_OP_ATTENTION && s == ATTN_POSITIONS && item->rows == 1)
            *(int32_t *)(io + t->offset) = CONTEXT - 1;
    }
    int r = b->backend->copy_in(b->queue, b->memory[EMBER_ARENA_IO], 0, io, bytes, &error);
    if (!r)
        r = b->backend->queue_sync(b->queue, &error);
    return r ? failed(b, r, &error) : 0;
}

/* One launch, with the weights `shift` bytes further, and what lies in IO behind the header
 * `io_shift`. */
static int launch_once(struct bench *b, const struct launch *launch, struct ember_kernel *kernel,
                       uint64_t shift, uint64_t io_shift, struct ember_backend_error *error)
{
    uint64_t args[MAX_ARGS];
    for (uint32_t a = 0; a < launch->n_args; a++) {
        const struct ember_launch_arg *arg = &launch->args[a];
        args[a] = arg->value;
        if (arg->arena >= 0 && b->memory[arg->arena])
            args[a] += b->backend->memory_address(b->memory[arg->arena]);
        if (arg->arena == EMBER_ARENA_WEIGHTS)
            args[a] += shift;
        if (arg->arena == EMBER_ARENA_IO && arg->value >= sizeof(struct ember_step_header))
            args[a] += io_shift;
    }
    return b->backend->launch(b->queue, kernel, launch->grid, args, launch->n_args, error);
}

/* Nanoseconds an op takes, over `repeat` of them, each with the weights one step further and the
 * experts io_step. spec, if not NULL, stands for the last kernel. */
static int sample(struct bench *b, const struct launches *op, struct ember_kernel *spec,
                  uint64_t step, uint64_t io_step, uint32_t *turn, uint32_t repeat, double *ret_ns)
{
    struct ember_backend_error error = {""};
    uint32_t turns = step ? (uint32_t)(b->bytes[EMBER_ARENA_WEIGHTS] / step) : 1;
    double start = now_ns();
    int r = 0;
    for (uint32_t i = 0; !r && i < repeat; i++, ++*turn)
        for (uint32_t j = 0; !r && j < op->n; j++)
            r = launch_once(b, &op->list[j], spec && j + 1 == op->n ? spec : op->kernels[j],
                            *turn % turns * step, *turn % IO_TURNS * io_step, &error);
    if (!r)
        r = b->backend->queue_sync(b->queue, &error);
    if (r)
        return failed(b, r, &error);
    *ret_ns = (now_ns() - start) / repeat;
    return 0;
}

/* ---- the machine ---- */

static int measure(struct bench *b, const char *name, uint64_t amount, double *ret_ns)
{
    struct ember_backend_error error = {""};
    uint32_t turn = 0, blocks = b->machine.threads * 8;
    struct launches op = {.list = {{.grid = {blocks, 1, 1}, .n_args = 3}}, .n = 1};
    op.list[0].args[0].arena = EMBER_ARENA_WEIGHTS;
    op.list[0].args[1] = (struct ember_launch_arg){.value = amount, .arena = -1};
    op.list[0].args[2].arena = EMBER_ARENA_SCRATCH;
    int r = arena_need(b, EMBER_ARENA_SCRATCH, 4ull * blocks);
    if (r)
        return r;
    if (b->backend->kernel_find(b->device, name, &op.kernels[0], &error))
        return error_set(b->err, ENOTSUP,
                         "%s backend: has no kernel %s to measure the machine with",
                         b->backend->name, name);
    *ret_ns = INFINITY;
    for (int i = 0; !r && i < 21; i++) {
        double ns = 0;
        r = sample(b, &op, NULL, 0, 0, &turn, 1, &ns);
        *ret_ns = fmin(*ret_ns, ns);
    }
    return r;
}

/* The rate of a kernel that tells its multiply-adds a step and block; keeps the best. */
static int measure_rate(struct bench *b, const char *name, double *best)
{
    const uint64_t steps = 20000;
    struct ember_backend_error error = {""};
    float each = 0;
    double ns;
    int r = measure(b, name, steps, &ns);
    if (r)
        return r;
    r = b->backend->copy_out(b->queue, &each, b->memory[EMBER_ARENA_SCRATCH], 0, sizeof(each),
                             &error);
    if (!r)
        r = b->backend->queue_sync(b->queue, &error);
    if (r)
        return failed(b, r, &error);
    *best = fmax(*best, (double)each * (double)steps * b->machine.threads * 8 / ns * 1e9);
    return 0;
}

/* The best seen so far: called again before each model, since somebody else may be using the
 * machine now. */
static int measure_machine(struct bench *b)
{
    struct ember_device_info info;
    double ns;
    b->backend->device_info(b->device, &info);
    snprintf(b->machine.device, sizeof(b->machine.device), "%s", info.name);
    b->machine.threads = MAX(info.threads, 1);
    int r = arena_need(b, EMBER_ARENA_WEIGHTS, BENCH_MAX_BYTES);
    if (!r)
        r = measure(b, "measure_read", BENCH_MAX_BYTES, &ns);
    if (r)
        return r;
    b->machine.read_bytes_per_s =
        fmax(b->machine.read_bytes_per_s, (double)BENCH_MAX_BYTES / ns * 1e9);
    r = measure_rate(b, "measure_fma", &b->machine.flops_per_s);
    if (!r)
        r = measure_rate(b, "measure_bf16", &b->machine.bf16_per_s);
    return r ? r : measure_rate(b, "measure_int8", &b->machine.int8_per_s);
}

/* ---- rows ---- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, uint32_t n)
{
    qsort(x, n, sizeof(*x), compare_doubles);
    return n % 2 ? x[n / 2] : 0.5 * (x[n / 2 - 1] + x[n / 2]);
}

/* The specialised kernel, or NULL when this machine cannot build it. */
static struct ember_module *build(struct bench *b, const char *kernel, const char *spec,
                                  struct ember_kernel **ret)
{
    struct ember_backend_error error = {""};
    struct ember_kernel_source source;
    struct ember_module *module = NULL;
    _cleanup_free_ void *blob = NULL;
    size_t len = 0;
    const struct ember_backend *be = b->backend;
    if (!*spec || !be->kernel_source || !be->kernel_compile || !be->module_load || !be->module_find)
        return NULL;
    if (be->kernel_source(b->device, kernel, spec, &source, &error) ||
        be->kernel_compile(b->device, &source, &blob, &len, &error) ||
        be->module_load(b->device, blob, len, &module, &error))
        return NULL;
    if (be->module_find(module, kernel, ret, &error)) {
        be->module_free(module);
        return NULL;
    }
    return module;
}

/* Pairs of samples, the order of each pair turned around every time. */
static int pairs(struct bench *b, const struct item *item, const struct launches *launches,
                 struct ember_kernel *spec, struct kernels_bench_row *row)
{
    uint32_t n = b->options->pairs ? b->options->pairs : 31, turn = 0;
    _cleanup_free_ double *times = mem_alloc(3 * (size_t)n, sizeof(*times));
    double once = 0, *of[2] = {times, times + n}, *gain = times + 2 * (size_t)n;
    if (!times)
        return error_set(b->err, ENOMEM, "no memory for %u samples", n);
    int r = sample(b, launches, NULL, item->weight_bytes, item->io_bytes, &turn, 3, &once);
    uint32_t repeat = once >= SAMPLE_NS ? 1 : (uint32_t)(SAMPLE_NS / fmax(once, 50));
    for (uint32_t i = 0; !r && i < n; i++) {
        for (uint32_t j = 0; !r && j < 2; j++) {
            uint32_t which = (i + j) % 2;
            if (which == 0 || spec)
                r = sample(b, launches, which ? spec : NULL, item->weight_bytes, item->io_bytes,
                           &turn, repeat, &of[which][i]);
        }
        gain[i] = spec ? 1 - of[1][i] / of[0][i] : 0;
    }
    if (r)
        return r;
    row->gain = median(gain, n);
    row->aot_ns = median(of[0], n);
    row->spec_ns = spec ? median(of[1], n) : 0;
    return 0;
}

/* The rate that an op's kernel is held against. */
static double rate_of(const struct bench *b, const struct item *item)
{
    return item->rate == RATE_INT8   ? b->machine.int8_per_s
           : item->rate == RATE_BF16 ? b->machine.bf16_per_s
                                     : b->machine.flops_per_s;
}

static int run_item(struct bench *b, struct item *item)
{
    struct ember_backend_error error = {""};
    struct launches launches = {.n = 0};
    struct ember_kernel *spec = NULL;
    item->op.rows = EMBER_ROWS_TOKENS;
    int r = b->backend->lower(b->device, &item->op, take_launch, &launches, &error);
    if (r)
        return failed(b, r, &error);
    const struct launch *last = &launches.list[launches.n - 1];
    if (b->options->kernel && strncmp(last->kernel, b->options->kernel, strlen(b->options->kernel)))
        return 0;
    for (int a = 0; !r && a < EMBER_ARENA_COUNT; a++)
        if (item->used[a])
            r = arena_need(b, a, item->used[a]);
    if (!r)
        r = fill_io(b, item);
    if (r)
        return r;
    for (uint32_t i = 0; !r && i < launches.n; i++)
        r = b->backend->kernel_find(b->device, launches.list[i].kernel, &launches.kernels[i],
                                    &error);
    if (r)
        return failed(b, r, &error);
    struct kernels_bench_row row = {.model = item->model->name,
                                    .what = item->what,
                                    .bytes = item->bytes,
                                    .flops = item->flops,
                                    .specialised = last->spec[0] != '\0'};
    snprintf(row.kernel, sizeof(row.kernel), "%s", last->kernel);
    snprintf(row.spec, sizeof(row.spec), "%s", item->spec);
    struct ember_module *module = build(b, last->kernel, item->spec, &spec);
    r = pairs(b, item, &launches, spec, &row);
    if (module && b->backend->module_free)
        b->backend->module_free(module);
    if (r)
        return r;
    double best = spec ? fmin(row.aot_ns, row.spec_ns) : row.aot_ns;
    row.bandwidth = row.bytes / best * 1e9 / b->machine.read_bytes_per_s;
    row.peak = row.flops / best * 1e9 / rate_of(b, item);
    return b->row(b->user, &b->machine, &row);
}

/* Weights for one model: its size, or as much as comes from memory anyway, or its largest operand.
 */
static int run_model(struct bench *b, const struct model *m)
{
    uint64_t layer =
        (2ull * m->q_heads + 2ull * m->kv_heads) * m->dk * m->hidden + 3ull * m->inter * m->hidden;
    uint64_t bytes = MIN(2 * (m->layers * layer + (uint64_t)m->vocab * m->hidden), BENCH_MAX_BYTES);
    struct item item;
    int r = measure_machine(b);
    if (r)
        return r;
    b->bytes[EMBER_ARENA_WEIGHTS] = 0; /* a smaller one than the last model's must shrink, too */
    r = arena_need(b, EMBER_ARENA_WEIGHTS, bytes);
    for (uint32_t i = 0; !r && item_make(&item, m, i); i++)
        r = run_item(b, &item);
    return r;
}

static int run_all(struct bench *b)
{
    int r = measure_machine(b);
    if (!r)
        r = b->row(b->user, &b->machine, NULL);
    for (size_t i = 0; !r && i < ARRAY_LEN(models); i++)
        if (!b->options->model || !strcmp(b->options->model, models[i].name))
            r = run_model(b, &models[i]);
    return r;
}

/* Runs `what` with an open device and ends it. */
static int with_device(struct bench *b, int (*what)(struct bench *b))
{
    struct ember_backend_error error = {""};
    struct ember_device_options device = {.threads = b->options->threads, .isa = b->options->isa};
    int r = b->backend->device_open(&device, &b->device, &error);
    if (r)
        return failed(b, r, &error);
    r = b->backend->queue_create(b->device, &b->queue, &error);
    r = r ? failed(b, r, &error) : what(b);
    if (b->queue)
        b->backend->queue_free(b->queue);
    for (int a = 0; a < EMBER_ARENA_COUNT; a++)
        if (b->memory[a])
            b->backend->memory_free(b->memory[a]);
    b->backend->device_close(b->device);
    return r;
}

int kernels_bench(const struct ember_backend *backend, const struct kernels_bench_options *options,
                  kernels_bench_fn row, void *user, struct error *err)
{
    struct bench b = {.backend = backend, .options = options, .row = row, .user = user, .err = err};
    return with_device(&b, run_all);
}

int kernels_bench_measure(const struct ember_backend *backend,
                          const struct kernels_bench_options *options,
                          struct kernels_bench_machine *ret, struct error *err)
{
    struct bench b = {.backend = backend, .options = options, .machine = *ret, .err = err};
    int r = with_device(&b, measure_machine);
    if (!r)
        *ret = b.machine;
    return r;
}
