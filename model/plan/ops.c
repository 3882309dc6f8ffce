/* SPDX-License-Identifier: Apache-2.0 */
/* Operands, and the small ops that every part of a block is joined by. */
#include "model/plan/internal.h"

#include <errno.h>
#include <string.h>

#define ROWS_MAX (1u << 30) /* of an operand (plan_check) */

struct ember_op *build_op(struct builder *b, enum ember_op_kind kind, enum ember_rows rows)
{
    static _Thread_local struct ember_op sink;
    struct ember_op *o = b->failed ? NULL : plan_op(b->plan, kind, rows);
    if (!o && !b->failed)
        b->failed = error_set(b->err, ENOMEM, "no memory for op %u of a plan", b->plan->n_ops);
    return o ? o : &sink;
}

void build_segment(struct builder *b, enum segment_kind kind, uint32_t variant)
{
    if (!b->failed)
        b->failed = plan_segment(b->plan, kind, variant, b->err);
}

void build_room(struct builder *b, enum ember_dtype dtype, uint32_t rows, uint32_t cols,
                struct ember_tensor *ret)
{
    if (cols && !b->failed)
        b->failed = plan_scratch(b->plan, dtype, rows, cols, ret, b->err);
}

struct ember_tensor build_slot(const struct builder *b, uint32_t slot)
{
    struct ember_tensor t = {.arena = EMBER_ARENA_WEIGHTS};
    const struct weight *w;
    if (slot == SLOT_NONE)
        return (struct ember_tensor){0};
    w = &b->layout->weights[slot];
    t.dtype = w->dtype;
    t.rank = w->rank;
    t.offset = w->offset;
    memcpy(t.dim, w->dim, sizeof t.dim);
    t.dim[t.rank - 1] = (uint32_t)(w->row_bytes / dtype_size(w->dtype));
    if (t.rank > 1)
        t.row_stride = w->row_bytes * (t.rank > 2 ? weight_rows(w) / w->dim[0] : 1);
    return t;
}

struct ember_tensor build_slot_groups(const struct builder *b, uint32_t slot, uint64_t at,
                                      uint8_t dtype)
{
    const struct weight *w = &b->layout->weights[slot];
    struct ember_tensor t = build_slot(b, slot);
    if (!at)
        return (struct ember_tensor){0};
    t.dtype = dtype;
    t.offset = w->offset + at;
    t.dim[t.rank - 1] = w->groups;
    t.row_stride =
        (uint64_t)w->groups * dtype_size(dtype) * (t.rank > 2 ? weight_rows(w) / w->dim[0] : 1);
    return t;
}

struct ember_tensor build_weight(const struct builder *b, enum layer_weight id)
{
    return build_slot(b, b->model->layer_slots[b->layer][id]);
}

struct ember_tensor build_io(uint64_t offset, uint32_t n)
{
    return (struct ember_tensor){
        .arena = EMBER_ARENA_IO, .dtype = EMBER_I32, .rank = 1, .dim = {n}, .offset = offset};
}

struct ember_tensor build_narrow(struct ember_tensor t, uint32_t cols)
{
    t.dim[1] = cols;
    t.row_stride = (uint64_t)cols * dtype_size(t.dtype);
    return t;
}

struct ember_tensor build_rows(struct ember_tensor t, uint32_t cols)
{
    uint64_t bytes = t.dim[0] * t.row_stride, row = (uint64_t)cols * dtype_size(t.dtype);
    t.dim[0] = (uint32_t)MIN(bytes / row, ROWS_MAX);
    return build_narrow(t, cols);
}

struct ember_op *build_norm(struct builder *b, enum ember_rows rows, struct ember_tensor x,
                            const struct ember_tensor *delta, struct ember_tensor w,
                            struct ember_tensor bias, struct ember_tensor out,
                            const struct handed *to)
{
    struct ember_op *o = build_op(b, EMBER_OP_NORM, rows);
    o->t[NORM_X] = x;
    o->t[NORM_W] = w;
    o->t[NORM_B] = bias;
    o->t[NORM_OUT] = out;
    o->i[NORM_I_KIND] = b->d->norm;
    o->f[NORM_F_EPS] = b->d->eps;
    o->f[NORM_F_W_BIAS] = b->d->norm_w_bias;
    if (to) {
        o->t[NORM_OUT_X] = to->to;
        o->t[NORM_OUT_X_SCALE] = to->scale;
        o->i[NORM_I_X_GROUP] = to->form.group;
        o->i[NORM_I_X_TERMS] = to->form.terms;
    }
    if (delta) {
        o->t[NORM_DELTA] = *delta;
        o->f[NORM_F_DELTA_SCALE] = b->d->residual_scale;
    }
    return o;
}

void build_add(struct builder *b, struct ember_tensor x, struct ember_tensor delta)
{
    struct ember_op *o = build_op(b, EMBER_OP_ADD, EMBER_ROWS_TOKENS);
    o->t[ADD_X] = x;
    o->t[ADD_DELTA] = delta;
    o->f[ADD_F_SCALE] = b->d->residual_scale;
}

void build_tap(struct builder *b, uint32_t index, struct ember_tensor x)
{
    struct ember_tensor out = x;
    struct ember_op *o;
    if (!b->taps)
        return;
    out.arena = EMBER_ARENA_IO;
    out.row_stride = (uint64_t)b->d->info.hidden_size * 4;
    out.offset = b->plan->io.hidden + (uint64_t)index * b->tokens * out.row_stride;
    o = build_op(b, EMBER_OP_COPY, EMBER_ROWS_TOKENS);
    o->t[COPY_X] = x;
    o->t[COPY_OUT] = out;
}
