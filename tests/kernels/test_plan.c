/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The checker of plans: a plan with every kind of op passes; each way of spoiling an operand is
 * refused; whatever passes after random damage runs inside its arenas, which stand between
 * inaccessible pages.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "kernels/plan.h"
#include "kernels/ref/ref.h"

enum {
    T = 6,
    S = 2,
    R = 3,
    P = 4,
    V = 20,
    D = 8,
    HQ = 4,
    HKV = 2,
    DK = 4,
    DV = 2,
    I = 12,
    E = 4,
    K = 2,
    NOPE = 3,
    RANK = 6,
    LATENT = 2 * RANK + DK
};

/* ---- a plan with every kind ---- */

static struct plan *plan;
static uint64_t weights_at;

static struct ember_tensor w(uint32_t rank, uint32_t d0, uint32_t d1, uint32_t d2)
{
    struct ember_tensor t = {.arena = EMBER_ARENA_WEIGHTS,
                             .dtype = EMBER_F16,
                             .rank = (uint8_t)rank,
                             .dim = {d0, d1, d2},
                             .offset = weights_at};
    uint64_t row = 2;
    for (uint32_t d = 1; d < rank; d++)
        row *= t.dim[d];
    t.row_stride = rank > 1 ? row : 0;
    weights_at = (weights_at + row * d0 + 63) & ~UINT64_C(63);
    return t;
}

static struct ember_tensor s(uint32_t rows, uint32_t cols)
{
    struct ember_tensor t = {0};
    assert_int_equal(plan_scratch(plan, EMBER_F32, rows, cols, &t, NULL), 0);
    return t;
}

static struct ember_tensor io(uint64_t offset, uint32_t n)
{
    return (struct ember_tensor){
        .arena = EMBER_ARENA_IO, .dtype = EMBER_I32, .rank = 1, .dim = {n}, .offset = offset};
}

static struct ember_op *op(enum ember_op_kind kind)
{
    struct ember_op *o = plan_op(plan, kind, EMBER_ROWS_TOKENS);
    assert_non_null(o);
    return o;
}

static void make_attention(struct ember_tensor qkv, struct ember_tensor rope,
                           struct ember_tensor out)
{
    uint64_t page = (uint64_t)KV_PAGE_SIZE * (HKV * (DK + DV) + LATENT) * 4;
    struct ember_tensor q = s(T, HQ * DK), k, v;
    struct ember_op *o = op(EMBER_OP_SPLIT_NORM_ROPE);
    plan->arena_bytes[EMBER_ARENA_KV] = page;
    k = (struct ember_tensor){
        .arena = EMBER_ARENA_KV, .rank = 3, .dim = {HKV, KV_PAGE_SIZE, DK}, .row_stride = page};
    v = k;
    v.dim[2] = DV;
    v.offset = (uint64_t)KV_PAGE_SIZE * HKV * DK * 4;
    o->t[SNR_QKV] = qkv;
    o->t[SNR_Q_NORM] = w(1, DK, 0, 0);
    o->t[SNR_K_NORM] = w(1, DK, 0, 0);
    o->t[SNR_ROPE] = rope;
    o->t[SNR_Q] = q;
    o->t[SNR_K] = k;
    o->t[SNR_V] = v;
    o->t[SNR_KV_SLOT] = io(plan->io.kv_slot, T);
    o->i[SNR_I_Q_HEADS] = HQ;
    o->i[SNR_I_KV_HEADS] = HKV;
    o->i[SNR_I_DK] = DK;
    o->i[SNR_I_DV] = DV;
    o->i[SNR_I_ROTARY] = DK;
    o->i[SNR_I_NORM] = EMBER_QK_NORM_HEAD;
    o->i[SNR_I_PAGE_SIZE] = KV_PAGE_SIZE;
    o = op(EMBER_OP_ATTENTION);
    o->t[ATTN_Q] = q;
    o->t[ATTN_K] = k;
    o->t[ATTN_V] = v;
    o->t[ATTN_PAGES] = io(plan->io.pages, S);
    o->t[ATTN_PAGES].rank = 2;
    o->t[ATTN_PAGES].dim[1] = P;
    o->t[ATTN_PAGES].row_stride = P * 4;
    o->t[ATTN_SEQ_OF] = io(plan->io.seq_of, T);
    o->t[ATTN_POSITIONS] = io(plan->io.positions, T);
    o->t[ATTN_SINKS] = w(1, HQ, 0, 0);
    o->t[ATTN_OUT] = out;
    o->i[ATTN_I_Q_HEADS] = HQ;
    o->i[ATTN_I_KV_HEADS] = HKV;
    o->i[ATTN_I_DK] = DK;
    o->i[ATTN_I_DV] = DV;
    o->i[ATTN_I_PAGE_SIZE] = KV_PAGE_SIZE;
    o->f[ATTN_F_SCALE] = 1;
}

/* Attention over latents: heads of q [NOPE, DK] times a matrix each, beside what is turned. */
static void make_latent(struct ember_tensor rope)
{
    struct ember_tensor q = s(T, HQ * (NOPE + DK)), out = s(T, HQ * (RANK + DK)), x = q, y = out;
    struct ember_op *o = op(EMBER_OP_SPLIT_LATENT);
    o->t[SPLIT_Q] = q;
    o->t[SPLIT_KV] = s(T, RANK + DK);
    o->t[SPLIT_NORM] = w(1, RANK, 0, 0);
    o->t[SPLIT_ROPE] = rope;
    o->t[SPLIT_OUT] = out;
    o->t[SPLIT_K] = (struct ember_tensor){.arena = EMBER_ARENA_KV,
                                          .rank = 3,
                                          .dim = {1, KV_PAGE_SIZE, RANK + DK},
                                          .offset = (uint64_t)KV_PAGE_SIZE * HKV * (DK + DV) * 4,
                                          .row_stride = plan->arena_bytes[EMBER_ARENA_KV]};
    o->t[SPLIT_V] = o->t[SPLIT_K];
    o->t[SPLIT_V].dim[2] = RANK;
    o->t[SPLIT_V].offset += (uint64_t)KV_PAGE_SIZE * (RANK + DK) * 4;
    o->t[SPLIT_KV_SLOT] = io(plan->io.kv_slot, T);
    o->i[SPLIT_I_HEADS] = HQ;
    o->i[SPLIT_I_NOPE] = NOPE;
    o->i[SPLIT_I_ROTARY] = DK;
    o->i[SPLIT_I_RANK] = RANK;
    o->i[SPLIT_I_PAGE_SIZE] = KV_PAGE_SIZE;
    x.dim[0] = y.dim[0] = T * HQ;
    x.dim[1] = NOPE;
    x.row_stride = (NOPE + DK) * 4;
    y.dim[1] = RANK;
    y.row_stride = (RANK + DK) * 4;
    o = op(EMBER_OP_MOE_LINEAR);
    o->t[MOE_X] = x;
    o->t[MOE_W] = w(3, HQ, RANK, NOPE);
    o->t[MOE_OUT] = y;
    o->i[MOE_I_TOPK] = HQ;
    o->i[MOE_I_PER_SLOT] = 1;
}

static struct ember_op *linear(struct ember_tensor x, struct ember_tensor weight,
                               struct ember_tensor out)
{
    struct ember_op *o = op(EMBER_OP_LINEAR);
    o->t[LINEAR_X] = x;
    o->t[LINEAR_W] = weight;
    o->t[LINEAR_OUT] = out;
    o->f[LINEAR_F_SCALE] = 1;
    return o;
}

static void expert_linear(struct ember_tensor x, struct ember_tensor weight,
                          struct ember_tensor ids, struct ember_tensor out, bool per_slot)
{
    struct ember_op *o = op(EMBER_OP_MOE_LINEAR);
    o->t[MOE_X] = x;
    o->t[MOE_W] = weight;
    o->t[MOE_IDS] = ids;
    o->t[MOE_OUT] = out;
    o->i[MOE_I_TOPK] = K;
    o->i[MOE_I_PER_SLOT] = per_slot;
}

static void make_moe(struct ember_tensor h, struct ember_tensor out)
{
    struct ember_tensor logits = s(T, E), ids, weights = s(T, K), two = s(T * K, 2 * I),
                        one = s(T * K, I), y = s(T * K, D), shared = s(T, D), gate = s(T, 1);
    struct ember_op *o;
    assert_int_equal(plan_scratch(plan, EMBER_I32, T, K, &ids, NULL), 0);
    linear(h, w(2, E, D, 0), logits);
    o = op(EMBER_OP_MOE_ROUTE);
    o->t[ROUTE_LOGITS] = logits;
    o->t[ROUTE_BIAS] = w(1, E, 0, 0);
    o->t[ROUTE_IDS] = ids;
    o->t[ROUTE_WEIGHTS] = weights;
    o->i[ROUTE_I_TOPK] = K;
    o->f[ROUTE_F_SCALE] = 1;
    expert_linear(h, w(3, E, 2 * I, D), ids, two, false);
    o = op(EMBER_OP_GLU);
    o->t[GLU_X] = two;
    o->t[GLU_OUT] = one;
    o->i[GLU_I_REPEAT] = K;
    expert_linear(one, w(3, E, D, I), ids, y, true);
    linear(h, w(2, D, D, 0), shared);
    linear(h, w(2, 1, D, 0), gate);
    o = op(EMBER_OP_ACT);
    o->t[ACT_X] = shared;
    o->t[ACT_OUT] = shared;
    o = op(EMBER_OP_MOE_COMBINE);
    o->t[COMBINE_Y] = y;
    o->t[COMBINE_WEIGHTS] = weights;
    o->t[COMBINE_SHARED] = shared;
    o->t[COMBINE_GATE] = gate;
    o->t[COMBINE_OUT] = out;
    o->i[COMBINE_I_TOPK] = K;
}

/* A weight operand [rows, cols] of any dtype, in panels when its last one is filled up. */
static struct ember_tensor codes(enum ember_dtype dtype, uint32_t rows, uint32_t cols)
{
    struct ember_tensor t = w(2, EMBER_PANEL_ROWS(rows), (cols * dtype_size(dtype) + 1) / 2, 0);
    t.dtype = dtype;
    t.dim[0] = rows;
    t.dim[1] = cols;
    t.row_stride = (uint64_t)cols * dtype_size(dtype);
    return t;
}

static struct ember_tensor bytes_of(enum ember_dtype dtype, uint32_t rows, uint32_t cols)
{
    struct ember_tensor t;
    assert_int_equal(plan_scratch(plan, dtype, rows, cols, &t, NULL), 0);
    return t;
}

/* x as integers of `terms` bytes, in groups of `group`, against a weight in tiles. */
static void integer_linear(struct ember_tensor x, enum ember_quant quant, uint32_t group,
                           uint32_t x_group, uint32_t terms, bool handed, struct ember_tensor out)
{
    bool four = quant == EMBER_QUANT_INT4;
    uint32_t rows = handed ? EMBER_X8_ROWS(T) : T,
             scales = x_group ? (D + x_group - 1) / x_group : 1;
    struct ember_op *o = op(EMBER_OP_QUANTIZE);
    o->t[QUANTIZE_X] = x;
    o->t[QUANTIZE_OUT] = bytes_of(EMBER_I8, rows, terms * EMBER_X8_COLUMNS(D));
    o->t[QUANTIZE_SCALE] = s(rows, scales * (handed ? 1 + terms : 1));
    o->i[QUANTIZE_I_HAND_OVER] = handed;
    o->i[QUANTIZE_I_GROUP] = x_group;
    o->i[QUANTIZE_I_TERMS] = terms;
    struct ember_tensor x8 = o->t[QUANTIZE_OUT], scale = o->t[QUANTIZE_SCALE];
    o = linear(x8, codes(four ? EMBER_U8 : EMBER_I8, D, 64), out);
    o->t[LINEAR_W_SCALE] = codes(EMBER_F16, D, (D + group - 1) / group);
    if (four)
        o->t[LINEAR_W_ZERO] = codes(EMBER_U8, D, (D + group - 1) / group);
    o->t[LINEAR_X_SCALE] = scale;
    o->i[LINEAR_I_QUANT] = quant;
    o->i[LINEAR_I_GROUP] = group;
    o->i[LINEAR_I_LAYOUT] = EMBER_LAYOUT_TILES;
    o->i[LINEAR_I_K] = D;
    o->i[LINEAR_I_X_GROUP] = x_group;
    o->i[LINEAR_I_X_TERMS] = terms;
    o->i[LINEAR_I_X_READY] = handed;
}

/* h through a permutation and weights in every kind of form. */
static void make_quantised(struct ember_tensor h)
{
    struct ember_tensor sorted = s(T, D), out = s(T, D), order = w(1, 2 * D, 0, 0);
    struct ember_op *o = op(EMBER_OP_PERMUTE);
    order.dtype = EMBER_I32;
    order.dim[0] = D;
    o->t[PERMUTE_X] = h;
    o->t[PERMUTE_ORDER] = order;
    o->t[PERMUTE_OUT] = sorted;
    integer_linear(sorted, EMBER_QUANT_INT4, 32, 32, 2, true, out);
    integer_linear(sorted, EMBER_QUANT_INT4, 32, 32, 1, false, out);
    integer_linear(h, EMBER_QUANT_INT8, 1 << 20, 0, 1, true, out);
    o = linear(h, codes(EMBER_F8, D, (D + 63) / 64 * 64), out);
    o->t[LINEAR_W_SCALE] = codes(EMBER_F32, D, 1);
    o->t[LINEAR_X_TMP] = bytes_of(EMBER_U8, T, (uint32_t)EMBER_X_TMP_BYTES(D));
    o->i[LINEAR_I_QUANT] = EMBER_QUANT_FP8;
    o->i[LINEAR_I_GROUP] = 1 << 20;
    o->i[LINEAR_I_LAYOUT] = EMBER_LAYOUT_TILES;
    o = linear(h, codes(EMBER_BF16, D, (D + 31) / 32 * 32), out);
    o->t[LINEAR_X_TMP] = bytes_of(EMBER_U8, T, (uint32_t)EMBER_X_TMP_BYTES(D));
    o->i[LINEAR_I_LAYOUT] = EMBER_LAYOUT_TILES;
}

/* A norm hands integers over to a linear. */
static void make_normed(struct ember_tensor x, struct ember_tensor h)
{
    struct ember_tensor x8, scale, out = s(T, D);
    struct ember_op *o;
    integer_linear(h, EMBER_QUANT_INT8, 64, 32, 2, true, out);
    o = &plan->ops[plan->n_ops - 2]; /* instead of the quantize */
    x8 = o->t[QUANTIZE_OUT];
    scale = o->t[QUANTIZE_SCALE];
    memset(o->t, 0, sizeof o->t);
    memset(o->i, 0, sizeof o->i);
    o->kind = EMBER_OP_NORM;
    o->t[NORM_X] = x;
    o->t[NORM_W] = w(1, D, 0, 0);
    o->t[NORM_OUT] = h;
    o->t[NORM_OUT_X] = x8;
    o->t[NORM_OUT_X_SCALE] = scale;
    o->i[NORM_I_X_GROUP] = 32;
    o->i[NORM_I_X_TERMS] = 2;
}

/* A norm hands x over to a gated linear, and that to another. */
static void make_gated(struct ember_tensor x, struct ember_tensor h, struct ember_tensor delta)
{
    struct ember_tensor inner = s(T, I), h_x, inner_x;
    struct ember_op *o = op(EMBER_OP_NORM);
    h_x = bytes_of(EMBER_U8, T, (uint32_t)EMBER_X_TMP_BYTES(D));
    inner_x = bytes_of(EMBER_U8, T, (uint32_t)EMBER_X_TMP_BYTES(I));
    o->t[NORM_X] = x;
    o->t[NORM_W] = w(1, D, 0, 0);
    o->t[NORM_OUT] = h;
    o->t[NORM_OUT_X] = h_x;
    o = linear(h, codes(EMBER_BF16, 2 * I, (D + 31) / 32 * 32), inner);
    o->t[LINEAR_X_TMP] = h_x;
    o->t[LINEAR_GATE_UP] = s(T, 2 * I);
    o->t[LINEAR_OUT_X] = inner_x;
    o->i[LINEAR_I_LAYOUT] = EMBER_LAYOUT_TILES;
    o->i[LINEAR_I_X_READY] = 1;
    o->i[LINEAR_I_GLU] = EMBER_GLU_HALVES;
    o = linear(inner, codes(EMBER_BF16, D, (I + 31) / 32 * 32), delta);
    o->t[LINEAR_X_TMP] = inner_x;
    o->i[LINEAR_I_LAYOUT] = EMBER_LAYOUT_TILES;
    o->i[LINEAR_I_X_READY] = 1;
}

static void make_head(struct ember_tensor x)
{
    struct ember_tensor g = s(R, D), logits = {.arena = EMBER_ARENA_IO,
                                               .rank = 2,
                                               .dim = {R, V},
                                               .offset = plan->io.logits,
                                               .row_stride = V * 4};
    struct ember_tensor tap = x;
    struct ember_op *o;
    assert_int_equal(plan_segment(plan, SEGMENT_HEAD, 0, NULL), 0);
    tap.arena = EMBER_ARENA_IO;
    tap.offset = plan->io.hidden;
    o = op(EMBER_OP_COPY);
    o->t[COPY_X] = x;
    o->t[COPY_OUT] = tap;
    o = op(EMBER_OP_GATHER);
    o->rows = EMBER_ROWS_LOGITS;
    o->t[GATHER_X] = x;
    o->t[GATHER_INDEX] = io(plan->io.rows, R);
    o->t[GATHER_OUT] = g;
    linear(g, w(2, V, D, 0), logits)->rows = EMBER_ROWS_LOGITS;
    o = op(EMBER_OP_ARGMAX);
    o->rows = EMBER_ROWS_LOGITS;
    o->t[ARGMAX_X] = logits;
    o->t[ARGMAX_OUT] = io(plan->io.sampled, R);
}

static int setup(void **state)
{
    struct step_shape shape = {
        .tokens = T, .seqs = S, .rows = R, .pages = P, .vocab = V, .hidden = D, .taps = 1};
    struct ember_tensor x, h, delta, rope, qkv, attn;
    struct ember_op *o;
    weights_at = 0;
    assert_int_equal(plan_new(&shape, &plan, NULL), 0);
    x = s(T, D), h = s(T, D), delta = s(T, D), rope = s(T, DK);
    qkv = s(T, HQ * DK + HKV * (DK + DV)), attn = s(T, HQ * DV);
    assert_int_equal(plan_segment(plan, SEGMENT_EMBED, 0, NULL), 0);
    o = op(EMBER_OP_EMBED);
    o->t[EMBED_TOKENS] = io(plan->io.tokens, T);
    o->t[EMBED_TABLE] = w(2, V, D, 0);
    o->t[EMBED_OUT] = x;
    o->f[EMBED_F_SCALE] = 1;
    o = op(EMBER_OP_ROPE_TABLE);
    o->t[ROPE_POSITIONS] = io(plan->io.positions, T);
    o->t[ROPE_LEN] = io(plan->io.rope_len, T);
    o->t[ROPE_INV_FREQ] = w(1, DK / 2, 0, 0);
    o->t[ROPE_INV_FREQ].dtype = EMBER_F32;
    o->t[ROPE_OUT] = rope;
    assert_int_equal(plan_segment(plan, SEGMENT_LAYER, 0, NULL), 0);
    o = op(EMBER_OP_NORM);
    o->t[NORM_X] = x;
    o->t[NORM_W] = w(1, D, 0, 0);
    o->t[NORM_B] = w(1, D, 0, 0);
    o->t[NORM_OUT] = h;
    o->t[NORM_DELTA] = delta;
    linear(h, w(2, HQ * DK + HKV * (DK + DV), D, 0), qkv)->t[LINEAR_B] =
        w(1, HQ * DK + HKV * (DK + DV), 0, 0);
    make_attention(qkv, rope, attn);
    make_latent(rope);
    linear(attn, w(2, D, HQ * DV, 0), delta);
    o = op(EMBER_OP_ADD);
    o->t[ADD_X] = x;
    o->t[ADD_DELTA] = delta;
    make_quantised(h);
    make_gated(x, h, delta);
    make_normed(x, h);
    make_moe(h, delta);
    make_head(x);
    plan->arena_bytes[EMBER_ARENA_WEIGHTS] = weights_at;
    return 0;
}

static int teardown(void **state)
{
    plan_free(plan);
    plan = NULL;
    return 0;
}

static void test_passes(void **state)
{
    bool seen[EMBER_OP_COUNT] = {0};
    struct error err = {0};
    if (plan_check(plan, &err) < 0)
        fail_msg("%s", err.text);
    for (uint32_t i = 0; i < plan->n_ops; i++)
        seen[plan->ops[i].kind] = true;
    for (int k = 0; k < EMBER_OP_COUNT; k++)
        assert_true(seen[k]);
}

/* ---- spoiling ---- */

static void refused(uint32_t i, int slot, const char *how)
{
    struct error err = {0};
    int r = plan_check(plan, &err);
    if (r != -EINVAL || !strstr(err.text, op_name(plan->ops[i].kind)))
        fail_msg("op %u (%s), operand %d, %s: %d \"%s\"", i, op_name(plan->ops[i].kind), slot, how,
                 r, err.text);
}

static bool optional(uint16_t kind, int slot)
{
    return (kind == EMBER_OP_NORM && (slot == NORM_B || slot == NORM_DELTA || slot == NORM_OUT_X ||
                                      slot == NORM_OUT_X_SCALE)) ||
           (kind == EMBER_OP_LINEAR &&
            (slot == LINEAR_B || slot == LINEAR_W_ZERO || slot == LINEAR_OUT_X)) ||
           (kind == EMBER_OP_SPLIT_NORM_ROPE && slot == SNR_ROPE) ||
           (kind == EMBER_OP_ATTENTION && slot == ATTN_SINKS) ||
           (kind == EMBER_OP_MOE_ROUTE && slot == ROUTE_BIAS) ||
           (kind == EMBER_OP_MOE_COMBINE && (slot == COMBINE_SHARED || slot == COMBINE_GATE));
}

static void spoil(uint32_t i, int slot)
{
    struct ember_op *o = &plan->ops[i];
    struct ember_tensor *t = &o->t[slot], good = *t;
#define SPOIL(change)                                                                              \
    change;                                                                                        \
    refused(i, slot, #change);                                                                     \
    *t = good
    SPOIL(t->offset = UINT64_MAX - 3);
    SPOIL(t->offset = plan->arena_bytes[t->arena]);
    if (dtype_size(t->dtype) > 1) {
        SPOIL(t->offset += 1);
    }
    SPOIL(t->arena = 9);
    SPOIL(t->arena = EMBER_ARENA_STATE);
    SPOIL(t->rank = t->rank == 1 ? 2 : 1);
    SPOIL(t->rank = 4);
    SPOIL(t->dtype = EMBER_DTYPE_COUNT);
    SPOIL(t->dtype = t->dtype == EMBER_U8 ? EMBER_I8 : EMBER_U8);
    if ((o->kind == EMBER_OP_LINEAR && slot == LINEAR_W && t->dtype == EMBER_F16) ||
        (o->kind == EMBER_OP_MOE_LINEAR && slot == MOE_W && t->dtype == EMBER_F16)) {
        SPOIL(t->dtype = EMBER_BF16); /* which is multiplied in tiles only */
    }
    SPOIL(t->dim[0] = 0);
    SPOIL(t->dim[0] = UINT32_MAX);
    SPOIL(t->reserved = 1);
    if (t->rank > 1) {
        SPOIL(t->dim[1] = 0);
        SPOIL(t->dim[t->rank - 1] += 1);
        SPOIL(t->row_stride = UINT64_C(1) << 62);
    }
    if (t->rank == 2 && t->dim[0] > 1) {
        SPOIL(t->row_stride = 0);
    }
    if (!optional(o->kind, slot)) {
        SPOIL(t->rank = 0);
    }
}

static void test_operands(void **state)
{
    for (uint32_t i = 0; i < plan->n_ops; i++)
        for (int slot = 0; slot < EMBER_OP_TENSORS; slot++)
            if (plan->ops[i].t[slot].rank)
                spoil(i, slot);
}

static void test_attributes(void **state)
{
    for (uint32_t i = 0; i < plan->n_ops; i++) {
        struct ember_op *o = &plan->ops[i], good = *o;
        o->f[0] = 0.0 / 0.0;
        refused(i, -1, "NaN");
        *o = good;
        if (o->kind == EMBER_OP_MOE_ROUTE || o->kind == EMBER_OP_ATTENTION ||
            o->kind == EMBER_OP_SPLIT_NORM_ROPE || o->kind == EMBER_OP_MOE_LINEAR ||
            o->kind == EMBER_OP_SPLIT_LATENT) {
            o->i[0] = o->kind == EMBER_OP_MOE_ROUTE ? 9 : 0;
            refused(i, -1, "attribute 0");
            o->i[0] = INT64_MIN;
            refused(i, -1, "attribute 0");
            *o = good;
        }
        if (o->kind == EMBER_OP_LINEAR && o->i[LINEAR_I_GLU]) {
            o->i[LINEAR_I_ACT] = 9;
            refused(i, -1, "activation");
            *o = good;
            o->i[LINEAR_I_GLU] = EMBER_GLU_NONE;
            refused(i, -1, "not gated");
            *o = good;
        }
        if (o->kind == EMBER_OP_SPLIT_LATENT) {
            o->i[SPLIT_I_ROTARY]--;
            refused(i, -1, "odd rotary");
            *o = good;
            o->i[SPLIT_I_RANK] = INT64_MAX;
            refused(i, -1, "rank");
            *o = good;
            o->t[SPLIT_V].offset = o->t[SPLIT_K].offset;
            refused(i, SPLIT_V, "over k");
            *o = good;
        }
        if (o->kind == EMBER_OP_MOE_LINEAR && !o->t[MOE_IDS].rank) {
            o->i[MOE_I_TOPK]++;
            refused(i, -1, "more slots than matrices");
            *o = good;
            o->i[MOE_I_PER_SLOT] = 0;
            refused(i, -1, "one x for all heads");
            *o = good;
        }
        if (o->kind == EMBER_OP_GLU) {
            o->i[GLU_I_REPEAT] = INT64_MAX;
            refused(i, -1, "repeat");
            *o = good;
        }
    }
}

static void test_plan_itself(void **state)
{
    struct error err = {0};
    plan->ops[0].kind = EMBER_OP_COUNT;
    assert_int_equal(plan_check(plan, &err), -EINVAL);
    plan->ops[0].kind = EMBER_OP_EMBED;
    plan->ops[1].segment = 2;
    assert_int_equal(plan_check(plan, &err), -EINVAL);
    plan->ops[1].segment = 0;
    plan->segments[1].count++;
    assert_int_equal(plan_check(plan, &err), -EINVAL);
    plan->segments[1].count--;
    plan->n_segments--;
    assert_int_equal(plan_check(plan, &err), -EINVAL);
    plan->n_segments++;
    plan->io.logits += 64;
    assert_int_equal(plan_check(plan, &err), -EINVAL);
    plan->io.logits -= 64;
    plan->arena_bytes[EMBER_ARENA_IO] -= 64;
    assert_int_equal(plan_check(plan, &err), -EINVAL);
    plan->arena_bytes[EMBER_ARENA_IO] += 64;
    assert_int_equal(plan_check(plan, &err), 0);
}

/* A table may be quantised as a head is, in integers; no body reads one of small floats. */
static void test_table_forms(void **state)
{
    struct ember_op *o = &plan->ops[0];
    struct error err = {0};
    o->t[EMBED_TABLE] = codes(EMBER_U8, V, 64);
    o->t[EMBED_SCALE] = codes(EMBER_F16, V, 1);
    plan->arena_bytes[EMBER_ARENA_WEIGHTS] = weights_at;
    o->i[EMBED_I_QUANT] = EMBER_QUANT_INT4;
    o->i[EMBED_I_GROUP] = 1 << 20;
    o->i[EMBED_I_LAYOUT] = EMBER_LAYOUT_TILES;
    if (plan_check(plan, &err) < 0)
        fail_msg("%s", err.text);
    o->i[EMBED_I_QUANT] = EMBER_QUANT_FP4;
    refused(0, EMBED_TABLE, "FP4");
    o->t[EMBED_TABLE].dtype = EMBER_F8;
    o->i[EMBED_I_QUANT] = EMBER_QUANT_FP8;
    refused(0, EMBED_TABLE, "FP8");
}

/* An output over an input is refused, but where the op set says "in place". */
static void test_overlap(void **state)
{
    for (uint32_t i = 0; i < plan->n_ops; i++)
        if (plan->ops[i].kind == EMBER_OP_LINEAR &&
            plan->ops[i].t[LINEAR_OUT].arena != EMBER_ARENA_IO) {
            struct ember_tensor good = plan->ops[i].t[LINEAR_OUT];
            plan->ops[i].t[LINEAR_OUT].offset = plan->ops[i].t[LINEAR_X].offset;
            refused(i, LINEAR_OUT, "over x");
            plan->ops[i].t[LINEAR_OUT] = good;
        }
}

/* A linear that takes x as ready needs it from an op that handed it over, and nothing between. */
static void test_handed_over(void **state)
{
    for (uint32_t i = 1; i < plan->n_ops; i++) {
        struct ember_op *o = &plan->ops[i], good = *o, *from = &plan->ops[i - 1], made = *from;
        if (o->kind != EMBER_OP_LINEAR || !o->i[LINEAR_I_X_READY] || o->t[LINEAR_X_SCALE].rank)
            continue;
        from->t[from->kind == EMBER_OP_NORM ? NORM_OUT_X : LINEAR_OUT_X].rank = 0;
        refused(i, LINEAR_X_TMP, "not handed over");
        *from = made;
        from->rows = EMBER_ROWS_LOGITS;
        refused(i, LINEAR_X_TMP, "other rows");
        *from = made;
        o->i[LINEAR_I_X_READY] = 2;
        refused(i, LINEAR_X_TMP, "ready 2");
        *o = good;
        /* This op once more, which writes over what the second time is ready no more. */
        *from = good;
        from->i[LINEAR_I_X_READY] = 0;
        from->t[LINEAR_OUT_X].rank = 0;
        refused(i, LINEAR_X_TMP, "written over");
        *from = made;
    }
}

/* The same of integers. */
static void test_handed_integers(void **state)
{
    uint32_t seen = 0;
    for (uint32_t i = 1; i < plan->n_ops; i++) {
        struct ember_op *o = &plan->ops[i], good = *o, *from = &plan->ops[i - 1], made = *from;
        if (from->kind == EMBER_OP_NORM && from->t[NORM_OUT_X_SCALE].rank) {
            seen++;
            from->i[NORM_I_X_GROUP] = 64;
            refused(i, LINEAR_X, "other groups");
            *from = made;
            o->t[LINEAR_X_SCALE].offset += EMBER_TILE_LINE;
            refused(i, LINEAR_X_SCALE, "other scales");
            *o = good;
            from->rows = EMBER_ROWS_LOGITS;
            refused(i, LINEAR_X, "other rows");
            *from = made;
        }
        if (from->kind != EMBER_OP_QUANTIZE || !o->i[LINEAR_I_X_READY])
            continue;
        seen++;
        from->i[QUANTIZE_I_HAND_OVER] = 0;
        from->t[QUANTIZE_SCALE].dim[1] /= 1 + (uint32_t)from->i[QUANTIZE_I_TERMS];
        refused(i, LINEAR_X, "not handed over");
        *from = made;
        from->t[QUANTIZE_SCALE].offset += EMBER_TILE_LINE;
        refused(i, LINEAR_X, "other scales");
        *from = made;
        from->t[QUANTIZE_X].dim[1]--;
        refused(i, LINEAR_X, "of other columns");
        *from = made;
        o->t[LINEAR_X].row_stride += EMBER_TILE_LINE;
        refused(i, LINEAR_X, "with gaps");
        *o = good;
        o->t[LINEAR_X].dim[0] = T;
        refused(i, LINEAR_X, "of too few rows");
        *o = good;
        from->i[QUANTIZE_I_REPEAT] = 1;
        refused(i - 1, QUANTIZE_OUT, "several rows for each");
        *from = made;
    }
    assert_true(seen >= 3);
}

/* Products of integers reach only so far, whatever else fits. */
static void test_integer_columns(void **state)
{
    for (uint32_t i = 0; i < plan->n_ops; i++) {
        struct ember_op *o = &plan->ops[i];
        struct error err = {0};
        if (o->kind != EMBER_OP_LINEAR || !o->t[LINEAR_X_SCALE].rank)
            continue;
        o->i[LINEAR_I_K] = EMBER_INT8_K_MAX + 1;
        assert_int_equal(plan_check(plan, &err), -EINVAL);
        assert_non_null(strstr(err.text, "columns of x is 131073"));
        return;
    }
    fail();
}

static void test_digest(void **state)
{
    struct digest before = plan_digest(plan), after;
    plan->ops[3].f[5] = 1;
    after = plan_digest(plan);
    assert_false(digest_equal(&before, &after));
    plan->ops[3].f[5] = 0;
    plan->cap_ops++;
    after = plan_digest(plan);
    assert_true(digest_equal(&before, &after));
    plan->cap_ops--;
}

/* ---- what passes stays inside ---- */

static uint64_t seed = 1;
static uint32_t rnd(uint32_t n)
{
    seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407;
    return (uint32_t)(seed >> 33) % n;
}

/* `bytes` that end at an inaccessible page, with another before them. */
static void *guarded(uint64_t bytes, void **ret_map, size_t *ret_size)
{
    uint64_t inner = (bytes + 4095) & ~UINT64_C(4095);
    uint8_t *map = mmap(NULL, inner + 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(map != MAP_FAILED);
    if (inner)
        assert_int_equal(mprotect(map + 4096, inner, PROT_READ | PROT_WRITE), 0);
    *ret_map = map;
    *ret_size = inner + 8192;
    return map + 4096 + inner - bytes;
}

static void run_guarded(void)
{
    void *arenas[EMBER_ARENA_COUNT], *maps[EMBER_ARENA_COUNT];
    size_t sizes[EMBER_ARENA_COUNT];
    for (int a = 0; a < EMBER_ARENA_COUNT; a++)
        arenas[a] = guarded(plan->arena_bytes[a], &maps[a], &sizes[a]);
    *(struct ember_step_header *)arenas[EMBER_ARENA_IO] =
        (struct ember_step_header){.n_tokens = T, .n_seqs = S, .n_rows = R};
    for (int32_t i = 0; i < T; i++) {
        ((int32_t *)((uint8_t *)arenas[EMBER_ARENA_IO] + plan->io.positions))[i] = i;
        ((int32_t *)((uint8_t *)arenas[EMBER_ARENA_IO] + plan->io.kv_slot))[i] = i;
    }
    for (uint32_t i = 0; i < plan->n_ops; i++)
        ref_op(&plan->ops[i], arenas);
    for (int a = 0; a < EMBER_ARENA_COUNT; a++)
        munmap(maps[a], sizes[a]);
}

static void damage(struct ember_op *o)
{
    struct ember_tensor *t = &o->t[rnd(EMBER_OP_TENSORS)];
    const struct ember_op *other = &plan->ops[rnd(plan->n_ops)];
    switch (rnd(8)) {
    case 0:
        t->offset += 64 * (uint64_t)(int64_t)((int32_t)rnd(64) - 32);
        break;
    case 1:
        t->dim[rnd(3)] += rnd(5) - 2;
        break;
    case 2:
        t->row_stride += 4 * (uint64_t)(int64_t)((int32_t)rnd(9) - 4);
        break;
    case 3:
        *t = other->t[rnd(EMBER_OP_TENSORS)];
        break;
    case 4:
        o->i[rnd(EMBER_OP_INTS)] += (int64_t)rnd(5) - 2;
        break;
    case 5:
        t->dtype = (uint8_t)rnd(EMBER_DTYPE_COUNT + 1);
        break;
    case 6:
        t->arena = (uint8_t)rnd(EMBER_ARENA_COUNT);
        break;
    default:
        o->rows ^= 1;
    }
}

static void test_inside(void **state)
{
    uint32_t passed = 0;
    run_guarded();
    for (int n = 0; n < 20000; n++) {
        struct ember_op *o = &plan->ops[rnd(plan->n_ops)], good = *o;
        damage(o);
        if (rnd(2))
            damage(o);
        if (plan_check(plan, NULL) == 0 && memcmp(o, &good, sizeof good)) {
            run_guarded();
            passed++;
        }
        *o = good;
    }
    print_message("%u damaged plans passed and stayed inside\n", passed);
    assert_in_range(passed, 100, 15000);
}

static void test_step_io(void **state)
{
    struct step_shape shape = {.tokens = 3, .seqs = 2, .rows = 2, .pages = 5, .vocab = 7};
    struct step_io layout;
    struct error err = {0};
    assert_int_equal(step_io_layout(&shape, &layout, &err), 0);
    assert_int_equal(layout.tokens, 64);
    assert_int_equal(layout.positions, 128);
    assert_int_equal(layout.pages, layout.rows + 64);
    assert_int_equal(layout.inputs_end, layout.pages + 2 * 5 * 4);
    assert_int_equal(layout.sampled % 64, 0);
    assert_true(layout.bytes >= layout.logits + 2 * 7 * 4);
    shape.seqs = 0;
    assert_int_equal(step_io_layout(&shape, &layout, &err), -EINVAL);
    shape.seqs = shape.pages = shape.rows = shape.vocab = 1u << 30;
    assert_int_equal(step_io_layout(&shape, &layout, &err), -EOVERFLOW);
    shape.vocab = UINT32_MAX;
    assert_int_equal(step_io_layout(&shape, &layout, &err), -EINVAL);
}

int main(void)
{
#define TEST(test) cmocka_unit_test_setup_teardown(test, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_passes),          TEST(test_operands),        TEST(test_attributes),
        TEST(test_plan_itself),     TEST(test_overlap),         TEST(test_handed_over),
        TEST(test_handed_integers), TEST(test_integer_columns), TEST(test_table_forms),
        TEST(test_digest),          TEST(test_inside),          cmocka_unit_test(test_step_io),
    };
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
