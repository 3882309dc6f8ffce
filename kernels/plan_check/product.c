/* SPDX-License-Identifier: Apache-2.0 */
/* Weights in all their forms, x as it meets them, and the ops that read one. */
#include "kernels/plan_check/internal.h"

/* Rows of C bytes: one part of a weight, as its layout has them. */
static void part(struct check *c, int slot, const char *name, enum ember_layout layout, int rank,
                 uint64_t experts, uint64_t n, uint64_t cols)
{
    const struct ember_tensor *t = &c->op->t[slot];
    uint64_t size = dtype_size(t->dtype), kept = n, bytes, end, rows = rank == 3 ? experts : n;
    if (layout == EMBER_LAYOUT_TILES)
        kept = EMBER_PANEL_ROWS(n);
    check_operand(c, slot, name, WEIGHT, rank, rows, rank == 3 ? n : cols, rank == 3 ? cols : 0);
    if (c->failed)
        return;
    if (t->row_stride != cols * size * (rank == 3 ? kept : 1))
        check_fail(c, "%s is not packed", name);
    else if (layout == EMBER_LAYOUT_TILES &&
             (!size_mul(cols * size * kept, rank == 3 ? experts : 1, &bytes) ||
              !size_add(t->offset, bytes, &end) || end > c->plan->arena_bytes[t->arena]))
        check_fail(c, "%s: its last panel ends outside its arena", name);
}

/* Scales and zero points. */
static void check_scales(struct check *c, const struct weight_slots *s, int64_t quant,
                         enum ember_layout layout, int rank, uint64_t experts, uint64_t n,
                         uint64_t groups)
{
    part(c, s->w_scale, "weight scale", layout, rank, experts, n, groups);
    if (!c->failed && c->op->t[s->w_scale].dtype != EMBER_U8 &&
        !dtype_is_float(c->op->t[s->w_scale].dtype))
        check_fail(c, "weight scale is %s, not a float type",
                   dtype_name(c->op->t[s->w_scale].dtype));
    if (check_absent(c, s->w_zero))
        return;
    if (quant != EMBER_QUANT_INT4)
        check_fail(c, "zero points for codes of another kind than int4");
    part(c, s->w_zero, "weight zero", layout, rank, experts, n, groups);
    check_dtype(c, s->w_zero, "weight zero", EMBER_U8);
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
    int64_t quant = check_int(c, s->quant, "quantisation", EMBER_QUANT_NONE, EMBER_QUANT_COUNT - 1);
    enum ember_layout layout =
        (enum ember_layout)check_int(c, s->layout, "layout", EMBER_LAYOUT_ROWS, EMBER_LAYOUT_TILES);
    uint64_t group, cols;
    bool four = quant == EMBER_QUANT_INT4 || quant == EMBER_QUANT_FP4;
    if (c->failed)
        return quant;
    if (quant == EMBER_QUANT_NONE) {
        const struct ember_tensor *w = &c->op->t[s->w];
        if (!check_absent(c, s->w_scale) || !check_absent(c, s->w_zero))
            check_fail(c, "scales for a weight that is not quantised");
        if (!dtype_is_float(w->dtype))
            check_fail(c, "weight is %s, not a float type", dtype_name(w->dtype));
        else if (layout == EMBER_LAYOUT_TILES && w->dtype != EMBER_BF16)
            check_fail(c, "weight is %s in tiles, not bf16", dtype_name(w->dtype));
        if (layout == EMBER_LAYOUT_TILES)
            k = (k + 31) / 32 * 32;
        part(c, s->w, "weight", layout, rank, experts, n, k);
        return quant;
    }
    if (layout != EMBER_LAYOUT_TILES)
        check_fail(c, "a weight of kind %lld in layout %d", (long long)quant, (int)layout);
    group = (uint64_t)check_int(c, s->group, "group", 32, DIM_MAX);
    if (group % 32 && group < k)
        check_fail(c, "groups of %llu, not a multiple of 32", (unsigned long long)group);
    cols = four ? (k + 31) / 32 * 16 : k;
    cols = (cols + EMBER_TILE_LINE - 1) / EMBER_TILE_LINE * EMBER_TILE_LINE;
    part(c, s->w, "weight", layout, rank, experts, n, cols);
    check_dtype(c, s->w, "weight", (enum ember_dtype)dtypes[quant]);
    check_scales(c, s, quant, layout, rank, experts, n, (k + group - 1) / group);
    return quant;
}

void check_integers(struct check *c, int x, int scale, enum access access, bool handed,
                    uint64_t rows, uint64_t k, int64_t terms, int64_t group)
{
    const struct ember_tensor *t = &c->op->t[x], *of = &c->op->t[scale];
    uint64_t bytes = (uint64_t)terms * EMBER_X8_COLUMNS(k);
    uint64_t segments = group ? (k + (uint64_t)group - 1) / (uint64_t)group : 1;
    if (handed) {
        rows = EMBER_X8_ROWS(rows);
        segments *= 1 + (uint64_t)terms;
    }
    check_operand(c, x, "integers", access, 2, rows, bytes, 0);
    check_dtype(c, x, "integers", EMBER_I8);
    check_floats(c, scale, "scales of integers", access, rows, segments);
    if (!c->failed && handed &&
        (t->offset % EMBER_TILE_LINE || t->row_stride != bytes || of->offset % EMBER_TILE_LINE ||
         of->row_stride != segments * sizeof(float)))
        check_fail(c, "integers that are handed over are not packed, or not aligned");
}

/* Integer x: [x_rows, k] in one or two terms with its scales. */
static void check_integer_x(struct check *c, const struct weight_slots *s, int64_t quant,
                            uint64_t x_rows, uint64_t k)
{
    bool handed = c->op->kind == EMBER_OP_LINEAR && c->op->i[LINEAR_I_X_READY];
    int64_t x_group = check_int(c, s->x_group, "group of x", 0, DIM_MAX);
    int64_t terms = check_int(c, s->x_terms, "terms of x", 1, 2), group = c->op->i[s->group];
    bool whole = (uint64_t)group >= k;
    uint64_t segment = x_group ? (uint64_t)x_group : k;
    if (quant != EMBER_QUANT_INT4 && quant != EMBER_QUANT_INT8)
        check_fail(c, "integer x with a weight of kind %lld", (long long)quant);
    if (x_group ? x_group % 32 || (!whole && group % x_group) : !whole)
        check_fail(c, "groups of x of %lld with groups of %lld", (long long)x_group,
                   (long long)group);
    if (segment > (terms == 2 ? EMBER_INT16_GROUP_MAX : EMBER_INT8_K_MAX))
        check_fail(c, "%llu products of %lld terms in a sum", (unsigned long long)segment,
                   (long long)terms);
    check_integers(c, s->x, s->x_scale, IN, handed, x_rows, k, terms, x_group);
}

void check_product(struct check *c, const struct weight_slots *s, uint64_t x_rows, int rank,
                   uint64_t experts, uint64_t n)
{
    bool integer = !check_absent(c, s->x_scale);
    uint64_t k = integer ? (uint64_t)check_int(c, s->k, "columns of x", 1, EMBER_INT8_K_MAX)
                         : check_cols(c, s->x);
    int64_t quant = check_weight(c, s, rank, experts, n, k);
    const struct ember_op *op = c->op;
    if (c->failed)
        return;
    if (integer) {
        check_integer_x(c, s, quant, x_rows, k);
    } else {
        if (quant == EMBER_QUANT_INT4 || quant == EMBER_QUANT_INT8)
            check_fail(c, "float x with a weight of kind %lld", (long long)quant);
        check_floats(c, s->x, "x", IN, x_rows, k);
    }
    if (quant == EMBER_QUANT_NONE && op->i[s->layout] == EMBER_LAYOUT_ROWS &&
        op->t[s->w].dtype == EMBER_BF16)
        check_fail(c, "bf16 in rows is for tables alone");
    if (!integer && op->i[s->layout] == EMBER_LAYOUT_TILES) {
        check_x_tmp(c, s->x_tmp, "x tmp", OUT, x_rows, k);
        check_distinct(c, s->x_tmp, -1);
    } else if (!check_absent(c, s->x_tmp))
        check_fail(c, "an x tmp for a weight that needs none");
}

void check_embed(struct check *c)
{
    static const struct weight_slots slots = {
        .w = EMBED_TABLE,
        .w_scale = EMBED_SCALE,
        .w_zero = EMBED_ZERO,
        .quant = EMBED_I_QUANT,
        .group = EMBED_I_GROUP,
        .layout = EMBED_I_LAYOUT,
    };
    uint32_t d = check_cols(c, EMBED_OUT);
    check_index(c, EMBED_TOKENS, "tokens", c->n, c->plan->io.tokens);
    int64_t quant = check_weight(c, &slots, 2, 0, c->plan->io.shape.vocab, d);
    if (quant == EMBER_QUANT_FP8 || quant == EMBER_QUANT_FP4)
        check_fail(c, "a table of small floats");
    check_floats(c, EMBED_OUT, "out", OUT, c->n, d);
}

void check_linear(struct check *c)
{
    static const struct weight_slots slots = {
        LINEAR_X,        LINEAR_W,     LINEAR_W_SCALE,   LINEAR_W_ZERO,
        LINEAR_X_SCALE,  LINEAR_X_TMP, LINEAR_I_QUANT,   LINEAR_I_GROUP,
        LINEAR_I_LAYOUT, LINEAR_I_K,   LINEAR_I_X_GROUP, LINEAR_I_X_TERMS,
    };
    uint32_t n = c->op->t[LINEAR_W].dim[0], out = n;
    check_product(c, &slots, c->n, 2, 0, n);
    if (!check_absent(c, LINEAR_B))
        check_float_weight(c, LINEAR_B, "bias", 1, n, 0, 0);
    if (check_int(c, LINEAR_I_GLU, "gating", EMBER_GLU_NONE, EMBER_GLU_PAIRS)) {
        check_int(c, LINEAR_I_ACT, "activation", EMBER_ACT_SILU, EMBER_ACT_RELU2);
        if (n % 2)
            check_fail(c, "%u rows of gate and up", n);
        out = n / 2;
        check_floats(c, LINEAR_GATE_UP, "gate and up", OUT, c->n, n);
        check_distinct(c, LINEAR_GATE_UP, -1);
    } else if (!check_absent(c, LINEAR_GATE_UP))
        check_fail(c, "room for gate and up of a linear without");
    check_floats(c, LINEAR_OUT, "out", OUT, c->n, out);
    check_distinct(c, LINEAR_OUT, -1);
    if (!check_absent(c, LINEAR_OUT_X)) {
        check_x_tmp(c, LINEAR_OUT_X, "out x", OUT, c->n, out);
        check_distinct(c, LINEAR_OUT_X, -1);
    }
    if (check_int(c, LINEAR_I_X_READY, "x ready", 0, 1)) {
        if (c->op->i[LINEAR_I_QUANT] && check_absent(c, LINEAR_X_SCALE))
            check_fail(c, "x ready for a weight of small floats: nobody writes its form of x");
        check_handed_over(c);
    }
}

void check_permute(struct check *c)
{
    uint32_t d = check_cols(c, PERMUTE_X);
    check_floats(c, PERMUTE_X, "x", IN, c->n, d);
    check_operand(c, PERMUTE_ORDER, "order", WEIGHT, 1, d, 0, 0);
    check_dtype(c, PERMUTE_ORDER, "order", EMBER_I32);
    check_floats(c, PERMUTE_OUT, "out", OUT, c->n, d);
    check_distinct(c, PERMUTE_OUT, -1);
}

void check_quantize(struct check *c)
{
    uint32_t d = check_cols(c, QUANTIZE_X);
    int64_t repeat = check_int(c, QUANTIZE_I_REPEAT, "repeat", 0, HEADS_MAX);
    int64_t terms = check_int(c, QUANTIZE_I_TERMS, "terms", 1, 2);
    int64_t group = check_int(c, QUANTIZE_I_GROUP, "group", 0, DIM_MAX);
    bool handed = check_int(c, QUANTIZE_I_HAND_OVER, "hand over", 0, 1);
    uint64_t rows = c->n * (uint64_t)(repeat ? repeat : 1);
    if (handed && repeat)
        check_fail(c, "%lld rows for each that are handed over", (long long)repeat);
    if (group % 32)
        check_fail(c, "groups of %lld, not a multiple of 32", (long long)group);
    check_floats(c, QUANTIZE_X, "x", IN, rows, d);
    check_integers(c, QUANTIZE_OUT, QUANTIZE_SCALE, OUT, handed, rows, d, terms, group);
    check_distinct(c, QUANTIZE_OUT, -1);
    check_distinct(c, QUANTIZE_SCALE, -1);
}
