/* SPDX-License-Identifier: Apache-2.0 */
/* Ops over rows of activations. */
#include "kernels/plan_check/internal.h"

void check_norm(struct check *c)
{
    uint32_t d = check_cols(c, NORM_X);
    int64_t group = check_int(c, NORM_I_GROUP, "group", 0, DIM_MAX);
    uint32_t n = group ? (uint32_t)group : d;
    bool delta = !check_absent(c, NORM_DELTA);
    check_int(c, NORM_I_KIND, "norm kind", EMBER_NORM_RMS, EMBER_NORM_LAYER);
    check_floats(c, NORM_X, "x", delta ? INOUT : IN, c->n, d);
    if (!c->failed && d % n)
        check_fail(c, "groups of %u do not divide %u", n, d);
    check_float_weight(c, NORM_W, "weight", 1, n, 0, 0);
    if (!check_absent(c, NORM_B))
        check_float_weight(c, NORM_B, "bias", 1, n, 0, 0);
    check_floats(c, NORM_OUT, "out", OUT, c->n, d);
    if (delta)
        check_floats(c, NORM_DELTA, "delta", IN, c->n, d);
    check_distinct(c, NORM_OUT, NORM_X);
    if (check_absent(c, NORM_OUT_X)) {
        if (!check_absent(c, NORM_OUT_X_SCALE))
            check_fail(c, "scales of integers that are not there");
        return;
    }
    if (check_absent(c, NORM_OUT_X_SCALE)) {
        check_x_tmp(c, NORM_OUT_X, "out x", OUT, c->n, d);
    } else {
        int64_t x_group = check_int(c, NORM_I_X_GROUP, "group of x", 0, DIM_MAX);
        if (x_group % 32)
            check_fail(c, "groups of x of %lld, not a multiple of 32", (long long)x_group);
        check_integers(c, NORM_OUT_X, NORM_OUT_X_SCALE, OUT, true, c->n, d,
                       check_int(c, NORM_I_X_TERMS, "terms of x", 1, 2), x_group);
        check_distinct(c, NORM_OUT_X_SCALE, -1);
    }
    check_distinct(c, NORM_OUT_X, -1);
}

void check_add(struct check *c)
{
    uint32_t d = check_cols(c, ADD_X);
    check_floats(c, ADD_X, "x", INOUT, c->n, d);
    check_floats(c, ADD_DELTA, "delta", IN, c->n, d);
    check_distinct(c, ADD_X, -1);
}

void check_glu(struct check *c)
{
    uint32_t inner = check_cols(c, GLU_OUT);
    int64_t repeat = check_int(c, GLU_I_REPEAT, "repeat", 0, HEADS_MAX);
    uint64_t rows = c->n * (uint64_t)(repeat ? repeat : 1);
    check_int(c, GLU_I_ACT, "activation", EMBER_ACT_SILU, EMBER_ACT_RELU2);
    check_int(c, GLU_I_LAYOUT, "layout", 0, 1);
    check_floats(c, GLU_X, "x", IN, rows, 2 * (uint64_t)inner);
    check_floats(c, GLU_OUT, "out", OUT, rows, inner);
    check_distinct(c, GLU_OUT, -1);
}

void check_act(struct check *c)
{
    uint32_t d = check_cols(c, ACT_X);
    check_int(c, ACT_I_ACT, "activation", EMBER_ACT_SILU, EMBER_ACT_RELU2);
    check_floats(c, ACT_X, "x", IN, c->n, d);
    check_floats(c, ACT_OUT, "out", OUT, c->n, d);
    check_distinct(c, ACT_OUT, ACT_X);
}

void check_gather(struct check *c)
{
    uint32_t d = check_cols(c, GATHER_OUT);
    if (c->op->rows != EMBER_ROWS_LOGITS)
        check_fail(c, "gather counts in tokens, not in logit rows");
    check_floats(c, GATHER_X, "x", IN, c->plan->io.shape.tokens, d);
    check_index(c, GATHER_INDEX, "index", c->n, c->plan->io.rows);
    check_floats(c, GATHER_OUT, "out", OUT, c->n, d);
    check_distinct(c, GATHER_OUT, -1);
}

void check_copy(struct check *c)
{
    uint32_t d = check_cols(c, COPY_X);
    check_floats(c, COPY_X, "x", IN, c->n, d);
    check_floats(c, COPY_OUT, "out", OUT, c->n, d);
    check_distinct(c, COPY_OUT, -1);
}

void check_argmax(struct check *c)
{
    check_floats(c, ARGMAX_X, "x", IN, c->n, check_cols(c, ARGMAX_X));
    check_operand(c, ARGMAX_OUT, "out", OUT, 1, c->n, 0, 0);
    check_dtype(c, ARGMAX_OUT, "out", EMBER_I32);
    check_distinct(c, ARGMAX_OUT, -1);
    if (check_absent(c, ARGMAX_PARTS))
        return;
    check_operand(c, ARGMAX_PARTS, "parts", OUT, 2, c->n, EMBER_ARGMAX_PARTS, 0);
    check_dtype(c, ARGMAX_PARTS, "parts", EMBER_I32);
    check_distinct(c, ARGMAX_PARTS, -1);
}
