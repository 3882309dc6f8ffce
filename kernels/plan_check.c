/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The checker of plans. Each kind has a function that states, operand by operand, what the op set
 * (ember/op.h) asks for. The first failure is kept; later checks of that op do nothing.
 */
#include "kernels/plan.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define DIM_MAX (INT64_C(1) << 30)

enum access { IN, WEIGHT, OUT, INOUT };

struct check {
    const struct plan *plan;
    const struct ember_op *op;
    uint64_t n; /* rows that the op's count may reach */
    int failed;
    char what[160];
};

static void fail(struct check *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void fail(struct check *c, const char *format, ...)
{
    va_list ap;
    if (c->failed)
        return;
    c->failed = 1;
    va_start(ap, format);
    vsnprintf(c->what, sizeof c->what, format, ap);
    va_end(ap);
}

static bool absent(const struct check *c, int slot)
{
    return c->op->t[slot].rank == 0;
}

/* Bytes from a tensor's offset to behind its last element; false when that overflows. */
static bool extent(const struct ember_tensor *t, uint64_t *ret)
{
    uint64_t row = dtype_size(t->dtype), last;
    for (int d = t->rank == 1 ? 0 : 1; d < t->rank; d++)
        if (!size_mul(row, t->dim[d], &row))
            return false;
    if (t->rank == 1) {
        *ret = row;
        return true;
    }
    if (t->row_stride < row && t->dim[0] > 1)
        return false;
    return size_mul(t->row_stride, t->dim[0] - 1, &last) && size_add(last, row, ret);
}

static bool dtype_is_float(uint8_t dtype)
{
    return dtype == EMBER_F32 || dtype == EMBER_F16 || dtype == EMBER_BF16;
}

static void check_access(struct check *c, const char *name, const struct ember_tensor *t,
                         enum access access)
{
    uint8_t a = t->arena;
    if (access == WEIGHT && a != EMBER_ARENA_WEIGHTS)
        fail(c, "%s is not in the weights arena", name);
    else if (access != WEIGHT && a == EMBER_ARENA_WEIGHTS)
        fail(c, "%s is an activation but in the weights arena", name);
    else if (access != WEIGHT && a != EMBER_ARENA_SCRATCH && a != EMBER_ARENA_IO)
        fail(c, "%s is in arena %u, not in scratch or IO", name, a);
    else if ((access == OUT || access == INOUT) && a == EMBER_ARENA_IO &&
             t->offset < c->plan->io.inputs_end)
        fail(c, "%s would write over the step's inputs", name);
}

/* What every present operand must satisfy, whatever its kind. */
static void check_place(struct check *c, const char *name, const struct ember_tensor *t)
{
    uint64_t bytes = 0, end;
    if (t->arena >= EMBER_ARENA_COUNT || t->dtype >= EMBER_DTYPE_COUNT || t->rank > 3 ||
        t->reserved) {
        fail(c, "%s has arena %u, dtype %u, rank %u", name, t->arena, t->dtype, t->rank);
        return;
    }
    for (int d = 0; d < t->rank; d++)
        if (t->dim[d] == 0 || t->dim[d] > DIM_MAX) {
            fail(c, "%s has dimension %d of %u", name, d, t->dim[d]);
            return;
        }
    if (t->offset % dtype_size(t->dtype) || t->row_stride % dtype_size(t->dtype))
        fail(c, "%s is not aligned to its elements", name);
    else if (!extent(t, &bytes) || !size_add(t->offset, bytes, &end) ||
             end > c->plan->arena_bytes[t->arena])
        fail(c, "%s at %llu, row stride %llu, ends outside its arena of %llu bytes", name,
             (unsigned long long)t->offset, (unsigned long long)t->row_stride,
             (unsigned long long)c->plan->arena_bytes[t->arena]);
}

/* An operand of known rank; ROWS of its first dimension must be there, cols (if any) exact. */
static void operand(struct check *c, int slot, const char *name, enum access access, int rank,
                    uint64_t rows, uint64_t cols, uint64_t third)
{
    const struct ember_tensor *t = &c->op->t[slot];
    if (c->failed)
        return;
    if (t->rank != rank) {
        fail(c, "%s has rank %u, not %d", name, t->rank, rank);
        return;
    }
    check_place(c, name, t);
    check_access(c, name, t, access);
    if (c->failed)
        return;
    if (access == WEIGHT ? t->dim[0] != rows : t->dim[0] < rows)
        fail(c, "%s has %u rows, not %llu", name, t->dim[0], (unsigned long long)rows);
    else if (rank > 1 && t->dim[1] != cols)
        fail(c, "%s has %u columns, not %llu", name, t->dim[1], (unsigned long long)cols);
    else if (rank > 2 && t->dim[2] != third)
        fail(c, "%s has a third dimension of %u, not %llu", name, t->dim[2],
             (unsigned long long)third);
}

/* Float32 activations [rows, cols]. */
static void act(struct check *c, int slot, const char *name, enum access access, uint64_t rows,
                uint64_t cols)
{
    operand(c, slot, name, access, 2, rows, cols, 0);
    if (!c->failed && c->op->t[slot].dtype != EMBER_F32)
        fail(c, "%s is %s, not f32", name, dtype_name(c->op->t[slot].dtype));
}

/* Weights of a float dtype: [rows], [rows, cols] or [rows, cols, third], packed. */
static void weight(struct check *c, int slot, const char *name, int rank, uint64_t rows,
                   uint64_t cols, uint64_t third)
{
    const struct ember_tensor *t = &c->op->t[slot];
    operand(c, slot, name, WEIGHT, rank, rows, cols, third);
    if (!c->failed && !dtype_is_float(t->dtype))
        fail(c, "%s is %s, not a float type", name, dtype_name(t->dtype));
    if (!c->failed && rank > 1 &&
        t->row_stride != (uint64_t)cols * (rank > 2 ? third : 1) * dtype_size(t->dtype))
        fail(c, "%s is not packed", name);
}

/*
 * int32 step inputs. They are the very ones of the IO layout: whoever starts a step has checked
 * those, and no other bytes may be taken for indices.
 */
static void index_input(struct check *c, int slot, const char *name, uint64_t rows, uint64_t offset)
{
    operand(c, slot, name, IN, 1, rows, 0, 0);
    if (!c->failed && c->op->t[slot].dtype != EMBER_I32)
        fail(c, "%s is %s, not i32", name, dtype_name(c->op->t[slot].dtype));
    if (!c->failed && (c->op->t[slot].arena != EMBER_ARENA_IO || c->op->t[slot].offset != offset))
        fail(c, "%s is not the step's", name);
}

static int64_t int_in(struct check *c, int slot, const char *name, int64_t min, int64_t max)
{
    int64_t v = c->op->i[slot];
    if (v < min || v > max) {
        fail(c, "%s is %lld, not within %lld..%lld", name, (long long)v, (long long)min,
             (long long)max);
        return min > 0 ? min : 1; /* usable: the check goes on after the failure is noted */
    }
    return v;
}

static bool overlap(const struct ember_tensor *a, const struct ember_tensor *b)
{
    uint64_t na = 0, nb = 0;
    if (!a->rank || !b->rank || a->arena != b->arena || !extent(a, &na) || !extent(b, &nb))
        return false;
    return a->offset < b->offset + nb && b->offset < a->offset + na;
}

/* An output may not lie over an input, but for the one named (the same tensor, in place; -1: none).
 */
static void distinct(struct check *c, int out, int in_place)
{
    const struct ember_op *op = c->op;
    for (int s = 0; s < EMBER_OP_TENSORS && !c->failed; s++) {
        if (s == out || !overlap(&op->t[out], &op->t[s]))
            continue;
        if (s == in_place && op->t[s].offset == op->t[out].offset &&
            op->t[s].row_stride == op->t[out].row_stride)
            continue;
        fail(c, "operand %d lies over the output, operand %d", s, out);
    }
}

static uint32_t cols_of(const struct check *c, int slot)
{
    return c->op->t[slot].dim[1];
}

/* The columns of `out` in the form of a backend's own products. */
static void check_x_tmp(struct check *c, int slot, const char *name, enum access access,
                        uint64_t rows, uint64_t k)
{
    const struct ember_tensor *t = &c->op->t[slot];
    operand(c, slot, name, access, 2, rows, EMBER_X_TMP_BYTES(k), 0);
    if (!c->failed && t->dtype != EMBER_U8)
        fail(c, "%s is %s, not u8", name, dtype_name(t->dtype));
    if (!c->failed && (t->offset % EMBER_TILE_LINE || t->row_stride != EMBER_X_TMP_BYTES(k)))
        fail(c, "%s is not packed, or not aligned", name);
}

static void check_norm(struct check *c)
{
    uint32_t d = cols_of(c, NORM_X);
    int64_t group = int_in(c, NORM_I_GROUP, "group", 0, DIM_MAX);
    uint32_t n = group ? (uint32_t)group : d;
    bool delta = !absent(c, NORM_DELTA);
    int_in(c, NORM_I_KIND, "norm kind", EMBER_NORM_RMS, EMBER_NORM_LAYER);
    act(c, NORM_X, "x", delta ? INOUT : IN, c->n, d);
    if (!c->failed && d % n)
        fail(c, "groups of %u do not divide %u", n, d);
    weight(c, NORM_W, "weight", 1, n, 0, 0);
    if (!absent(c, NORM_B))
        weight(c, NORM_B, "bias", 1, n, 0, 0);
    act(c, NORM_OUT, "out", OUT, c->n, d);
    if (delta)
        act(c, NORM_DELTA, "delta", IN, c->n, d);
    distinct(c, NORM_OUT, NORM_X);
    if (absent(c, NORM_OUT_X))
        return;
    check_x_tmp(c, NORM_OUT_X, "out x", OUT, c->n, d);
    distinct(c, NORM_OUT_X, -1);
}

static void check_add(struct check *c)
{
    uint32_t d = cols_of(c, ADD_X);
    act(c, ADD_X, "x", INOUT, c->n, d);
    act(c, ADD_DELTA, "delta", IN, c->n, d);
    distinct(c, ADD_X, -1);
}

/* A weight operand of one dtype, packed. */
static void packed(struct check *c, int slot, const char *name, enum ember_dtype dtype, int rank,
                   uint64_t rows, uint64_t cols, uint64_t third)
{
    const struct ember_tensor *t = &c->op->t[slot];
    operand(c, slot, name, WEIGHT, rank, rows, cols, third);
    if (!c->failed && t->dtype != dtype)
        fail(c, "%s is %s, not %s", name, dtype_name(t->dtype), dtype_name(dtype));
    if (!c->failed && rank > 1 &&
        t->row_stride != cols * (rank > 2 ? third : 1) * dtype_size(t->dtype))
        fail(c, "%s is not packed", name);
}

/* Where the operands of a weight stand in an op, and its attributes; -1: the op has none. */
struct weight_slots {
    int x, w, w_scale, w_zero, x_scale, x_tmp;
    int quant, group, layout, k, x_group, x_terms;
};

/* Rows of C bytes: one part of a weight, as its layout has them. */
static void part(struct check *c, int slot, const char *name, enum ember_layout layout, int rank,
                 uint64_t experts, uint64_t n, uint64_t cols)
{
    const struct ember_tensor *t = &c->op->t[slot];
    uint64_t size = dtype_size(t->dtype), kept = n, bytes, end, rows = rank == 3 ? experts : n;
    if (layout == EMBER_LAYOUT_TILES)
        kept = EMBER_PANEL_ROWS(n);
    operand(c, slot, name, WEIGHT, rank, rows, rank == 3 ? n : cols, rank == 3 ? cols : 0);
    if (c->failed)
        return;
    if (t->row_stride != cols * size * (rank == 3 ? kept : 1))
        fail(c, "%s is not packed", name);
    else if (layout == EMBER_LAYOUT_TILES &&
             (!size_mul(cols * size * kept, rank == 3 ? experts : 1, &bytes) ||
              !size_add(t->offset, bytes, &end) || end > c->plan->arena_bytes[t->arena]))
        fail(c, "%s: its last panel ends outside its arena", name);
}

static void part_dtype(struct check *c, int slot, const char *name, enum ember_dtype dtype)
{
    if (!c->failed && c->op->t[slot].dtype != dtype)
        fail(c, "%s is %s, not %s", name, dtype_name(c->op->t[slot].dtype), dtype_name(dtype));
}

/* Scales and zero points. */
static void check_scales(struct check *c, const struct weight_slots *s, int64_t quant,
                         enum ember_layout layout, int rank, uint64_t experts, uint64_t n,
                         uint64_t groups)
{
    part(c, s->w_scale, "weight scale", layout, rank, experts, n, groups);
    if (!c->failed && c->op->t[s->w_scale].dtype != EMBER_U8 &&
        !dtype_is_float(c->op->t[s->w_scale].dtype))
        fail(c, "weight scale is %s, not a float type", dtype_name(c->op->t[s->w_scale].dtype));
    if (absent(c, s->w_zero))
        return;
    if (quant != EMBER_QUANT_INT4)
        fail(c, "zero points for codes of another kind than int4");
    part(c, s->w_zero, "weight zero", layout, rank, experts, n, groups);
    part_dtype(c, s->w_zero, "weight zero", EMBER_U8);
}

/*
 * The weight [n, k] ([experts, n, k] when rank is 3) in whichever form the op says. Returns the
 * form.
 */
static int64_t check_weight(struct check *c, const struct weight_slots *s, int rank,
                            uint64_t experts, uint64_t n, uint64_t k)
{
    static const uint8_t dtypes[EMBER_QUANT_COUNT] = {[EMBER_QUANT_INT4] = EMBER_U8,
                                                      [EMBER_QUANT_FP4] = EMBER_U8,
                                                      [EMBER_QUANT_INT8] = EMBER_I8,
                                                      [EMBER_QUANT_FP8] = EMBER_F8};
    int64_t quant = int_in(c, s->quant, "quantisation", EMBER_QUANT_NONE, EMBER_QUANT_COUNT - 1);
    enum ember_layout layout =
        (enum ember_layout)int_in(c, s->layout, "layout", EMBER_LAYOUT_ROWS, EMBER_LAYOUT_TILES);
    uint64_t group, cols;
    bool four = quant == EMBER_QUANT_INT4 || quant == EMBER_QUANT_FP4;
    if (c->failed)
        return quant;
    if (quant == EMBER_QUANT_NONE) {
        const struct ember_tensor *w = &c->op->t[s->w];
        if (!absent(c, s->w_scale) || !absent(c, s->w_zero))
            fail(c, "scales for a weight that is not quantised");
        if (!dtype_is_float(w->dtype))
            fail(c, "weight is %s, not a float type", dtype_name(w->dtype));
        else if (layout == EMBER_LAYOUT_TILES && w->dtype != EMBER_BF16)
            fail(c, "weight is %s in tiles, not bf16", dtype_name(w->dtype));
        if (layout == EMBER_LAYOUT_TILES)
            k = (k + 31) / 32 * 32;
        part(c, s->w, "weight", layout, rank, experts, n, k);
        return quant;
    }
    if (layout != EMBER_LAYOUT_TILES)
        fail(c, "a weight of kind %lld in layout %d", (long long)quant, (int)layout);
    group = (uint64_t)int_in(c, s->group, "group", 32, DIM_MAX);
    if (group % 32 && group < k)
        fail(c, "groups of %llu, not a multiple of 32", (unsigned long long)group);
    cols = four ? (k + 31) / 32 * 16 : k;
    cols = (cols + EMBER_TILE_LINE - 1) / EMBER_TILE_LINE * EMBER_TILE_LINE;
    part(c, s->w, "weight", layout, rank, experts, n, cols);
    part_dtype(c, s->w, "weight", (enum ember_dtype)dtypes[quant]);
    check_scales(c, s, quant, layout, rank, experts, n, (k + group - 1) / group);
    return quant;
}

/* Integer x: [x_rows, k] in one or two terms with its scales. */
static void check_integer_x(struct check *c, const struct weight_slots *s, int64_t quant,
                            uint64_t x_rows, uint64_t k)
{
    int64_t x_group = int_in(c, s->x_group, "group of x", 0, DIM_MAX);
    int64_t terms = int_in(c, s->x_terms, "terms of x", 1, 2), group = c->op->i[s->group];
    bool whole = (uint64_t)group >= k;
    uint64_t segment = x_group ? (uint64_t)x_group : k;
    if (quant != EMBER_QUANT_INT4 && quant != EMBER_QUANT_INT8)
        fail(c, "integer x with a weight of kind %lld", (long long)quant);
    if (x_group ? x_group % 32 || (!whole && group % x_group) : !whole)
        fail(c, "groups of x of %lld with groups of %lld", (long long)x_group, (long long)group);
    if (segment > (terms == 2 ? EMBER_INT16_GROUP_MAX : EMBER_INT8_K_MAX))
        fail(c, "%llu products of %lld terms in a sum", (unsigned long long)segment,
             (long long)terms);
    operand(c, s->x, "x", IN, 2, x_rows, (uint64_t)terms * EMBER_X8_COLUMNS(k), 0);
    part_dtype(c, s->x, "x", EMBER_I8);
    act(c, s->x_scale, "x scale", IN, x_rows, (k + segment - 1) / segment);
}

/* x and the weight of a linear. */
static void check_product(struct check *c, const struct weight_slots *s, uint64_t x_rows, int rank,
                          uint64_t experts, uint64_t n)
{
    bool integer = !absent(c, s->x_scale);
    uint64_t k = integer ? (uint64_t)int_in(c, s->k, "columns of x", 1, DIM_MAX) : cols_of(c, s->x);
    int64_t quant = check_weight(c, s, rank, experts, n, k);
    const struct ember_op *op = c->op;
    if (c->failed)
        return;
    if (integer) {
        check_integer_x(c, s, quant, x_rows, k);
    } else {
        if (quant == EMBER_QUANT_INT4 || quant == EMBER_QUANT_INT8)
            fail(c, "float x with a weight of kind %lld", (long long)quant);
        act(c, s->x, "x", IN, x_rows, k);
    }
    if (quant == EMBER_QUANT_NONE && op->i[s->layout] == EMBER_LAYOUT_ROWS &&
        op->t[s->w].dtype == EMBER_BF16)
        fail(c, "bf16 in rows is for tables alone");
    if (!integer && op->i[s->layout] == EMBER_LAYOUT_TILES) {
        check_x_tmp(c, s->x_tmp, "x tmp", OUT, x_rows, k);
        distinct(c, s->x_tmp, -1);
    } else if (!absent(c, s->x_tmp))
        fail(c, "an x tmp for a weight that needs none");
}

static void check_embed(struct check *c)
{
    static const struct weight_slots slots = {
        .w = EMBED_TABLE,
        .w_scale = EMBED_SCALE,
        .w_zero = EMBED_ZERO,
        .quant = EMBED_I_QUANT,
        .group = EMBED_I_GROUP,
        .layout = EMBED_I_LAYOUT,
    };
    uint32_t d = cols_of(c, EMBED_OUT);
    index_input(c, EMBED_TOKENS, "tokens", c->n, c->plan->io.tokens);
    if (check_weight(c, &slots, 2, 0, c->plan->io.shape.vocab, d) == EMBER_QUANT_FP8)
        fail(c, "a table of FP8");
    act(c, EMBED_OUT, "out", OUT, c->n, d);
}

/* The operands that a kind writes, KV apart; ends with -1. */
static const int8_t outputs[EMBER_OP_COUNT][5] = {
    [EMBER_OP_EMBED] = {EMBED_OUT, -1},
    [EMBER_OP_NORM] = {NORM_OUT, NORM_X, NORM_OUT_X, -1},
    [EMBER_OP_ADD] = {ADD_X, -1},
    [EMBER_OP_LINEAR] = {LINEAR_OUT, LINEAR_X_TMP, LINEAR_GATE_UP, LINEAR_OUT_X, -1},
    [EMBER_OP_ROPE_TABLE] = {ROPE_OUT, -1},
    [EMBER_OP_SPLIT_NORM_ROPE] = {SNR_Q, -1},
    [EMBER_OP_ATTENTION] = {ATTN_OUT, -1},
    [EMBER_OP_GLU] = {GLU_OUT, -1},
    [EMBER_OP_ACT] = {ACT_OUT, -1},
    [EMBER_OP_MOE_ROUTE] = {ROUTE_IDS, ROUTE_WEIGHTS, -1},
    [EMBER_OP_MOE_LINEAR] = {MOE_OUT, -1},
    [EMBER_OP_MOE_COMBINE] = {COMBINE_OUT, -1},
    [EMBER_OP_GATHER] = {GATHER_OUT, -1},
    [EMBER_OP_COPY] = {COPY_OUT, -1},
    [EMBER_OP_ARGMAX] = {ARGMAX_OUT, -1},
    [EMBER_OP_PERMUTE] = {PERMUTE_OUT, -1},
    [EMBER_OP_QUANTIZE] = {QUANTIZE_OUT, QUANTIZE_SCALE, -1},
};

static bool writes_over(const struct ember_op *op, const struct ember_tensor *t)
{
    for (const int8_t *slot = outputs[op->kind]; *slot >= 0; slot++) {
        bool reads =
            *slot == LINEAR_X_TMP && op->kind == EMBER_OP_LINEAR && op->i[LINEAR_I_X_READY];
        if (!reads && overlap(&op->t[*slot], t))
            return true;
    }
    return false;
}

static bool same_tensor(const struct ember_tensor *a, const struct ember_tensor *b)
{
    return !memcmp(a, b, sizeof *a);
}

/* x and its other form must be what one op of the same segment put there last. */
static void handed_over(struct check *c)
{
    const struct ember_tensor *x = &c->op->t[LINEAR_X], *tmp = &c->op->t[LINEAR_X_TMP];
    for (const struct ember_op *op = c->op; tmp->rank && op-- > c->plan->ops && !c->failed;) {
        if (op->segment != c->op->segment)
            break;
        if (!writes_over(op, x) && !writes_over(op, tmp))
            continue;
        if (op->rows == c->op->rows &&
            ((op->kind == EMBER_OP_NORM && same_tensor(&op->t[NORM_OUT], x) &&
              same_tensor(&op->t[NORM_OUT_X], tmp)) ||
             (op->kind == EMBER_OP_LINEAR && same_tensor(&op->t[LINEAR_OUT], x) &&
              same_tensor(&op->t[LINEAR_OUT_X], tmp))))
            return;
        break;
    }
    fail(c, "x was not handed over by an op before it");
}

static void check_linear(struct check *c)
{
    static const struct weight_slots slots = {
        LINEAR_X,        LINEAR_W,     LINEAR_W_SCALE,   LINEAR_W_ZERO,
        LINEAR_X_SCALE,  LINEAR_X_TMP, LINEAR_I_QUANT,   LINEAR_I_GROUP,
        LINEAR_I_LAYOUT, LINEAR_I_K,   LINEAR_I_X_GROUP, LINEAR_I_X_TERMS,
    };
    uint32_t n = c->op->t[LINEAR_W].dim[0], out = n;
    check_product(c, &slots, c->n, 2, 0, n);
    if (!absent(c, LINEAR_B))
        weight(c, LINEAR_B, "bias", 1, n, 0, 0);
    if (int_in(c, LINEAR_I_GLU, "gating", EMBER_GLU_NONE, EMBER_GLU_PAIRS)) {
        int_in(c, LINEAR_I_ACT, "activation", EMBER_ACT_SILU, EMBER_ACT_RELU2);
        if (n % 2)
            fail(c, "%u rows of gate and up", n);
        out = n / 2;
        act(c, LINEAR_GATE_UP, "gate and up", OUT, c->n, n);
        distinct(c, LINEAR_GATE_UP, -1);
    } else if (!absent(c, LINEAR_GATE_UP))
        fail(c, "room for gate and up of a linear without");
    act(c, LINEAR_OUT, "out", OUT, c->n, out);
    distinct(c, LINEAR_OUT, -1);
    if (!absent(c, LINEAR_OUT_X)) {
        check_x_tmp(c, LINEAR_OUT_X, "out x", OUT, c->n, out);
        distinct(c, LINEAR_OUT_X, -1);
    }
    if (int_in(c, LINEAR_I_X_READY, "x ready", 0, 1)) {
        if (c->op->i[LINEAR_I_QUANT])
            fail(c, "x ready for a weight that is quantised: nobody writes its form of x");
        handed_over(c);
    }
}

static void check_rope_table(struct check *c)
{
    uint32_t half = c->op->t[ROPE_INV_FREQ].dim[0];
    index_input(c, ROPE_POSITIONS, "positions", c->n, c->plan->io.positions);
    index_input(c, ROPE_LEN, "rope_len", c->n, c->plan->io.rope_len);
    weight(c, ROPE_INV_FREQ, "inv_freq", 1, half, 0, 0);
    if (!c->failed && c->op->t[ROPE_INV_FREQ].dtype != EMBER_F32)
        fail(c, "inv_freq is not f32");
    act(c, ROPE_OUT, "out", OUT, c->n, 2 * (uint64_t)half);
    int_in(c, ROPE_I_KIND, "rope kind", EMBER_ROPE_STATIC, EMBER_ROPE_DYNAMIC_NTK);
    if (!c->failed && c->op->i[ROPE_I_KIND] == EMBER_ROPE_DYNAMIC_NTK &&
        (half < 2 || !(c->op->f[ROPE_F_MAX_POSITION] > 0) || !(c->op->f[ROPE_F_THETA] > 0)))
        fail(c, "dynamic rope without theta, maximum position or width");
}

/* K or V pages: [heads, page_size, width] at its place in page 0, one page apart. */
static void kv_block(struct check *c, int slot, const char *name, uint64_t heads, uint64_t slots,
                     uint64_t width)
{
    const struct ember_tensor *t = &c->op->t[slot];
    uint64_t bytes;
    if (c->failed)
        return;
    if (t->arena != EMBER_ARENA_KV || t->rank != 3 || t->dim[0] != heads || t->dim[1] != slots ||
        t->dim[2] != width || t->reserved) {
        fail(c, "%s is not a [%llu, %llu, %llu] block of KV pages", name, (unsigned long long)heads,
             (unsigned long long)slots, (unsigned long long)width);
        return;
    }
    if (!(dtype_is_float(t->dtype) || t->dtype == EMBER_I8) || t->offset % sizeof(float) ||
        t->row_stride % sizeof(float))
        fail(c, "%s has dtype %s or a misaligned place", name, dtype_name(t->dtype));
    else if (!size_add(t->offset, kv_block_bytes(t->dtype, heads, slots, width), &bytes) ||
             bytes > c->plan->arena_bytes[EMBER_ARENA_KV])
        fail(c, "%s at %llu leaves its page of %llu bytes", name, (unsigned long long)t->offset,
             (unsigned long long)c->plan->arena_bytes[EMBER_ARENA_KV]);
    else if (t->row_stride != c->plan->arena_bytes[EMBER_ARENA_KV])
        fail(c, "%s has pages %llu bytes apart, not %llu", name, (unsigned long long)t->row_stride,
             (unsigned long long)c->plan->arena_bytes[EMBER_ARENA_KV]);
}

static uint64_t kv_end(const struct ember_tensor *t)
{
    return t->offset + kv_block_bytes(t->dtype, t->dim[0], t->dim[1], t->dim[2]);
}

static bool kv_overlap(const struct ember_tensor *k, const struct ember_tensor *v)
{
    return k->offset < kv_end(v) && v->offset < kv_end(k);
}

#define HEADS_MAX (1 << 14)
#define HEAD_DIM_MAX (1 << 14)
#define PAGE_MAX (1 << 12)

static void check_split_norm_rope(struct check *c)
{
    int64_t hq = int_in(c, SNR_I_Q_HEADS, "q heads", 1, HEADS_MAX);
    int64_t hkv = int_in(c, SNR_I_KV_HEADS, "kv heads", 1, HEADS_MAX);
    int64_t dk = int_in(c, SNR_I_DK, "dk", 1, HEAD_DIM_MAX);
    int64_t dv = int_in(c, SNR_I_DV, "dv", 1, HEAD_DIM_MAX);
    int64_t rotary = int_in(c, SNR_I_ROTARY, "rotary", 0, dk);
    int64_t page = int_in(c, SNR_I_PAGE_SIZE, "page size", 1, PAGE_MAX);
    int64_t norm = int_in(c, SNR_I_NORM, "qk norm", EMBER_QK_NORM_NONE, EMBER_QK_NORM_ROW);
    bool row = norm == EMBER_QK_NORM_ROW;
    int_in(c, SNR_I_INTERLEAVED, "interleaved", 0, 1);
    int_in(c, SNR_I_NORM_AFTER, "norm after", 0, 1);
    int_in(c, SNR_I_KV_EXACT, "kv exact", 0, 1);
    if (rotary % 2)
        fail(c, "rotary is odd: %lld", (long long)rotary);
    act(c, SNR_QKV, "qkv", IN, c->n, (uint64_t)(hq * dk + hkv * dk + hkv * dv));
    if (norm != EMBER_QK_NORM_NONE) {
        weight(c, SNR_Q_NORM, "q norm", 1, (uint64_t)(row ? hq * dk : dk), 0, 0);
        weight(c, SNR_K_NORM, "k norm", 1, (uint64_t)(row ? hkv * dk : dk), 0, 0);
    }
    if (rotary && !absent(c, SNR_ROPE))
        act(c, SNR_ROPE, "rope", IN, c->n, (uint64_t)rotary);
    act(c, SNR_Q, "q", OUT, c->n, (uint64_t)(hq * dk));
    kv_block(c, SNR_K, "k", (uint64_t)hkv, (uint64_t)page, (uint64_t)dk);
    kv_block(c, SNR_V, "v", (uint64_t)hkv, (uint64_t)page, (uint64_t)dv);
    if (!c->failed && kv_overlap(&c->op->t[SNR_K], &c->op->t[SNR_V]))
        fail(c, "k and v overlap");
    if (!c->failed && c->op->t[SNR_K].dtype != c->op->t[SNR_V].dtype)
        fail(c, "k is %s and v %s", dtype_name(c->op->t[SNR_K].dtype),
             dtype_name(c->op->t[SNR_V].dtype));
    index_input(c, SNR_KV_SLOT, "kv_slot", c->n, c->plan->io.kv_slot);
    distinct(c, SNR_Q, -1);
}

static void check_attention(struct check *c)
{
    int64_t hq = int_in(c, ATTN_I_Q_HEADS, "q heads", 1, HEADS_MAX);
    int64_t hkv = int_in(c, ATTN_I_KV_HEADS, "kv heads", 1, HEADS_MAX);
    int64_t dk = int_in(c, ATTN_I_DK, "dk", 1, HEAD_DIM_MAX);
    int64_t dv = int_in(c, ATTN_I_DV, "dv", 1, HEAD_DIM_MAX);
    int64_t page = int_in(c, ATTN_I_PAGE_SIZE, "page size", 1, PAGE_MAX);
    int_in(c, ATTN_I_WINDOW, "window", 0, INT32_MAX);
    int_in(c, ATTN_I_KV_EXACT, "kv exact", 0, 1);
    if (hq % hkv)
        fail(c, "%lld q heads over %lld kv heads", (long long)hq, (long long)hkv);
    act(c, ATTN_Q, "q", IN, c->n, (uint64_t)(hq * dk));
    kv_block(c, ATTN_K, "k", (uint64_t)hkv, (uint64_t)page, (uint64_t)dk);
    kv_block(c, ATTN_V, "v", (uint64_t)hkv, (uint64_t)page, (uint64_t)dv);
    operand(c, ATTN_PAGES, "pages", IN, 2, c->plan->io.shape.seqs, c->plan->io.shape.pages, 0);
    if (!c->failed &&
        (c->op->t[ATTN_PAGES].dtype != EMBER_I32 || c->op->t[ATTN_PAGES].arena != EMBER_ARENA_IO ||
         c->op->t[ATTN_PAGES].offset != c->plan->io.pages ||
         c->op->t[ATTN_PAGES].row_stride != (uint64_t)c->plan->io.shape.pages * 4))
        fail(c, "pages is not the step's page table");
    index_input(c, ATTN_SEQ_OF, "seq_of", c->n, c->plan->io.seq_of);
    index_input(c, ATTN_POSITIONS, "positions", c->n, c->plan->io.positions);
    if (!absent(c, ATTN_SINKS))
        weight(c, ATTN_SINKS, "sinks", 1, (uint64_t)hq, 0, 0);
    act(c, ATTN_OUT, "out", OUT, c->n, (uint64_t)(hq * dv));
    distinct(c, ATTN_OUT, -1);
    if (!c->failed && c->op->t[ATTN_K].dtype != c->op->t[ATTN_V].dtype)
        fail(c, "k is %s and v %s", dtype_name(c->op->t[ATTN_K].dtype),
             dtype_name(c->op->t[ATTN_V].dtype));
    if (absent(c, ATTN_PARTS))
        return;
    uint64_t parts = attention_parts((uint64_t)c->plan->io.shape.pages * (uint64_t)page);
    act(c, ATTN_PARTS, "parts", OUT, c->n, (uint64_t)(hq * (dv + 2)) * parts);
    distinct(c, ATTN_PARTS, -1);
}

static void check_glu(struct check *c)
{
    uint32_t inner = cols_of(c, GLU_OUT);
    int64_t repeat = int_in(c, GLU_I_REPEAT, "repeat", 0, HEADS_MAX);
    uint64_t rows = c->n * (uint64_t)(repeat ? repeat : 1);
    int_in(c, GLU_I_ACT, "activation", EMBER_ACT_SILU, EMBER_ACT_RELU2);
    int_in(c, GLU_I_LAYOUT, "layout", 0, 1);
    act(c, GLU_X, "x", IN, rows, 2 * (uint64_t)inner);
    act(c, GLU_OUT, "out", OUT, rows, inner);
    distinct(c, GLU_OUT, -1);
}

static void check_act(struct check *c)
{
    uint32_t d = cols_of(c, ACT_X);
    int_in(c, ACT_I_ACT, "activation", EMBER_ACT_SILU, EMBER_ACT_RELU2);
    act(c, ACT_X, "x", IN, c->n, d);
    act(c, ACT_OUT, "out", OUT, c->n, d);
    distinct(c, ACT_OUT, ACT_X);
}

/* Expert ids [rows, k]; `k` comes from the attributes of the op. */
static void route_ids(struct check *c, int slot, enum access access, uint64_t k)
{
    operand(c, slot, "ids", access, 2, c->n, k, 0);
    if (!c->failed && c->op->t[slot].dtype != EMBER_I32)
        fail(c, "ids is not i32");
}

static void check_moe_route(struct check *c)
{
    uint32_t experts = cols_of(c, ROUTE_LOGITS);
    int64_t k = int_in(c, ROUTE_I_TOPK, "experts a token", 1, experts ? experts : 1);
    int64_t groups = int_in(c, ROUTE_I_GROUPS, "groups", 0, experts ? experts : 1);
    int_in(c, ROUTE_I_KIND, "router kind", EMBER_ROUTE_SOFTMAX, EMBER_ROUTE_TOPK_SOFTMAX);
    int_in(c, ROUTE_I_NORMALIZE, "normalize", 0, 1);
    if (groups > 1) {
        int64_t top = int_in(c, ROUTE_I_TOP_GROUPS, "top groups", 1, groups);
        if (experts % groups || top * (experts / groups) < k)
            fail(c, "%u experts in %lld groups, %lld of them eligible, for %lld a token", experts,
                 (long long)groups, (long long)top, (long long)k);
    }
    act(c, ROUTE_LOGITS, "logits", IN, c->n, experts);
    if (!absent(c, ROUTE_BIAS))
        weight(c, ROUTE_BIAS, "bias", 1, experts, 0, 0);
    route_ids(c, ROUTE_IDS, OUT, (uint64_t)k);
    act(c, ROUTE_WEIGHTS, "weights", OUT, c->n, (uint64_t)k);
    distinct(c, ROUTE_IDS, -1);
    distinct(c, ROUTE_WEIGHTS, -1);
}

/* Expert ids index the weights, so they must be what a router of the same segment put there last.
 */
static void routed_ids(struct check *c)
{
    const struct ember_tensor *ids = &c->op->t[MOE_IDS];
    for (const struct ember_op *op = c->op; op-- > c->plan->ops && !c->failed;) {
        if (op->segment != c->op->segment)
            break;
        if (!writes_over(op, ids))
            continue;
        if (op->kind == EMBER_OP_MOE_ROUTE && op->rows == c->op->rows &&
            same_tensor(&op->t[ROUTE_IDS], ids) &&
            op->t[ROUTE_LOGITS].dim[1] <= c->op->t[MOE_W].dim[0])
            return;
        break;
    }
    fail(c, "ids are not those of a router before it");
}

static void check_moe_linear(struct check *c)
{
    static const struct weight_slots slots_of = {
        MOE_X,       MOE_W,       MOE_W_SCALE,  MOE_W_ZERO, MOE_X_SCALE,   MOE_X_TMP,
        MOE_I_QUANT, MOE_I_GROUP, MOE_I_LAYOUT, MOE_I_K,    MOE_I_X_GROUP, MOE_I_X_TERMS,
    };
    const struct ember_tensor *w = &c->op->t[MOE_W];
    int64_t k = int_in(c, MOE_I_TOPK, "experts a token", 1, HEADS_MAX);
    uint64_t slots = c->n * (uint64_t)k;
    bool per_slot = int_in(c, MOE_I_PER_SLOT, "per slot", 0, 1) == 1;
    check_product(c, &slots_of, per_slot ? slots : c->n, 3, w->dim[0], w->dim[1]);
    if (!absent(c, MOE_B))
        weight(c, MOE_B, "bias", 2, w->dim[0], w->dim[1], 0);
    route_ids(c, MOE_IDS, IN, (uint64_t)k);
    routed_ids(c);
    act(c, MOE_OUT, "out", OUT, slots, w->dim[1]);
    distinct(c, MOE_OUT, -1);
}

static void check_moe_combine(struct check *c)
{
    uint32_t d = cols_of(c, COMBINE_OUT);
    int64_t k = int_in(c, COMBINE_I_TOPK, "experts a token", 1, HEADS_MAX);
    act(c, COMBINE_Y, "y", IN, c->n * (uint64_t)k, d);
    act(c, COMBINE_WEIGHTS, "weights", IN, c->n, (uint64_t)k);
    if (!absent(c, COMBINE_SHARED))
        act(c, COMBINE_SHARED, "shared", IN, c->n, d);
    if (!absent(c, COMBINE_GATE))
        act(c, COMBINE_GATE, "gate", IN, c->n, 1);
    act(c, COMBINE_OUT, "out", OUT, c->n, d);
    distinct(c, COMBINE_OUT, COMBINE_SHARED);
}

static void check_gather(struct check *c)
{
    uint32_t d = cols_of(c, GATHER_OUT);
    if (c->op->rows != EMBER_ROWS_LOGITS)
        fail(c, "gather counts in tokens, not in logit rows");
    act(c, GATHER_X, "x", IN, c->plan->io.shape.tokens, d);
    index_input(c, GATHER_INDEX, "index", c->n, c->plan->io.rows);
    act(c, GATHER_OUT, "out", OUT, c->n, d);
    distinct(c, GATHER_OUT, -1);
}

static void check_copy(struct check *c)
{
    uint32_t d = cols_of(c, COPY_X);
    act(c, COPY_X, "x", IN, c->n, d);
    act(c, COPY_OUT, "out", OUT, c->n, d);
    distinct(c, COPY_OUT, -1);
}

static void check_argmax(struct check *c)
{
    act(c, ARGMAX_X, "x", IN, c->n, cols_of(c, ARGMAX_X));
    operand(c, ARGMAX_OUT, "out", OUT, 1, c->n, 0, 0);
    if (!c->failed && c->op->t[ARGMAX_OUT].dtype != EMBER_I32)
        fail(c, "out is not i32");
    distinct(c, ARGMAX_OUT, -1);
    if (absent(c, ARGMAX_PARTS))
        return;
    operand(c, ARGMAX_PARTS, "parts", OUT, 2, c->n, EMBER_ARGMAX_PARTS, 0);
    if (!c->failed && c->op->t[ARGMAX_PARTS].dtype != EMBER_I32)
        fail(c, "parts is not i32");
    distinct(c, ARGMAX_PARTS, -1);
}

static void check_permute(struct check *c)
{
    uint32_t d = cols_of(c, PERMUTE_X);
    act(c, PERMUTE_X, "x", IN, c->n, d);
    packed(c, PERMUTE_ORDER, "order", EMBER_I32, 1, d, 0, 0);
    act(c, PERMUTE_OUT, "out", OUT, c->n, d);
    distinct(c, PERMUTE_OUT, -1);
}

static void check_quantize(struct check *c)
{
    uint32_t d = cols_of(c, QUANTIZE_X);
    int64_t repeat = int_in(c, QUANTIZE_I_REPEAT, "repeat", 0, HEADS_MAX);
    int64_t terms = int_in(c, QUANTIZE_I_TERMS, "terms", 1, 2);
    int64_t group = int_in(c, QUANTIZE_I_GROUP, "group", 0, DIM_MAX);
    uint64_t rows = c->n * (uint64_t)(repeat ? repeat : 1);
    if (group % 32)
        fail(c, "groups of %lld, not a multiple of 32", (long long)group);
    act(c, QUANTIZE_X, "x", IN, rows, d);
    operand(c, QUANTIZE_OUT, "out", OUT, 2, rows, (uint64_t)terms * EMBER_X8_COLUMNS(d), 0);
    part_dtype(c, QUANTIZE_OUT, "out", EMBER_I8);
    act(c, QUANTIZE_SCALE, "scale", OUT, rows, group ? (d + group - 1) / group : 1);
    distinct(c, QUANTIZE_OUT, -1);
    distinct(c, QUANTIZE_SCALE, -1);
}

static void (*const checks[EMBER_OP_COUNT])(struct check *c) = {
    [EMBER_OP_EMBED] = check_embed,
    [EMBER_OP_NORM] = check_norm,
    [EMBER_OP_ADD] = check_add,
    [EMBER_OP_LINEAR] = check_linear,
    [EMBER_OP_ROPE_TABLE] = check_rope_table,
    [EMBER_OP_SPLIT_NORM_ROPE] = check_split_norm_rope,
    [EMBER_OP_ATTENTION] = check_attention,
    [EMBER_OP_GLU] = check_glu,
    [EMBER_OP_ACT] = check_act,
    [EMBER_OP_MOE_ROUTE] = check_moe_route,
    [EMBER_OP_MOE_LINEAR] = check_moe_linear,
    [EMBER_OP_MOE_COMBINE] = check_moe_combine,
    [EMBER_OP_GATHER] = check_gather,
    [EMBER_OP_COPY] = check_copy,
    [EMBER_OP_ARGMAX] = check_argmax,
    [EMBER_OP_PERMUTE] = check_permute,
    [EMBER_OP_QUANTIZE] = check_quantize,
};

static int check_op(const struct plan *plan, uint32_t index, struct error *err)
{
    const struct ember_op *op = &plan->ops[index];
    struct check c = {.plan = plan, .op = op};
    if (op->kind >= EMBER_OP_COUNT || op->rows > EMBER_ROWS_LOGITS)
        return error_set(err, EINVAL, "plan: op %u is of kind %u, rows %u: not known", index,
                         op->kind, op->rows);
    c.n = op->rows == EMBER_ROWS_LOGITS ? plan->io.shape.rows : plan->io.shape.tokens;
    for (int f = 0; f < EMBER_OP_FLOATS; f++)
        if (!isfinite(op->f[f]))
            fail(&c, "float attribute %d is not finite", f);
    for (int s = 0; s < EMBER_OP_TENSORS; s++)
        if (op->t[s].rank && op->t[s].arena != EMBER_ARENA_KV)
            check_place(&c, "an operand", &op->t[s]);
    if (!c.failed)
        checks[op->kind](&c);
    if (c.failed)
        return error_set(err, EINVAL, "plan: segment %u, op %u (%s): %s", op->segment, index,
                         op_name(op->kind), c.what);
    return 0;
}

/* Segments cut the ops without gap or overlap, in order. */
static int check_segments(const struct plan *plan, struct error *err)
{
    uint32_t at = 0;
    for (uint32_t s = 0; s < plan->n_segments; s++) {
        const struct plan_segment *segment = &plan->segments[s];
        if (segment->kind > SEGMENT_HEAD)
            return error_set(err, EINVAL, "plan: segment %u is of kind %u", s, segment->kind);
        if (segment->first != at || segment->count > plan->n_ops - at)
            return error_set(err, EINVAL, "plan: segment %u has ops %u + %u of %u, expected %u", s,
                             segment->first, segment->count, plan->n_ops, at);
        for (uint32_t i = 0; i < segment->count; i++, at++)
            if (plan->ops[at].segment != s)
                return error_set(err, EINVAL, "plan: op %u says segment %u but lies in %u", at,
                                 plan->ops[at].segment, s);
    }
    if (at != plan->n_ops)
        return error_set(err, EINVAL, "plan: %u of %u ops lie in no segment", plan->n_ops - at,
                         plan->n_ops);
    return 0;
}

int plan_check(const struct plan *plan, struct error *err)
{
    struct step_io io;
    int r = step_io_layout(&plan->io.shape, &io, err);
    if (r < 0)
        return r;
    /* The shape was copied; behind it stand offsets, without padding among them. */
    if (memcmp(&io.tokens, &plan->io.tokens, sizeof io - offsetof(struct step_io, tokens)) ||
        plan->arena_bytes[EMBER_ARENA_IO] < io.bytes)
        return error_set(err, EINVAL, "plan: its IO layout is not that of its step shape");
    r = check_segments(plan, err);
    for (uint32_t i = 0; r == 0 && i < plan->n_ops; i++)
        r = check_op(plan, i, err);
    return r;
}
