/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products with a weight: the form in which x meets it, columns in an order of their own, and x
 * that is handed over by the op that makes it.
 */
#include "model/plan/internal.h"

#include <errno.h>
#include <string.h>

/*
 * One scale a token where the checkpoint says so; else as finely as the weight's own groups, at
 * most X_GROUP. 8 bits when activations are quantised, and before what is made here in 4 bits or in
 * groups so large that x has no more error than w (the head's are smaller, and so are those of x
 * there). 16 bits, which are as good as floats, for all else.
 */
#define X_GROUP 128
#define X_GROUP_MADE 256 /* where a group ends costs as much as 256 products */
#define X_GROUP_HEAD 64  /* of what has groups of 128 */

struct x_form build_x_form(const struct builder *b, const struct weight *w)
{
    bool large = w->quant == EMBER_QUANT_INT4 || w->group >= X_GROUP_MADE;
    bool made8 = w->made && (large || w->group >= X_GROUP);
    struct x_form form = {b->d->quant.int8_x || made8 ? 1 : 2, !made8  ? X_GROUP
                                                               : large ? X_GROUP_MADE
                                                                       : X_GROUP_HEAD};
    uint32_t k = w->dim[w->rank - 1];
    if (w->quant != EMBER_QUANT_INT4 && w->quant != EMBER_QUANT_INT8)
        return (struct x_form){0, 0};
    if (form.terms == 1 && w->group >= k && !w->made)
        form.group = 0;
    else if (w->group < k)
        while (w->group % form.group)
            form.group /= 2;
    return form;
}

static uint32_t x_segments(struct x_form form, uint32_t k)
{
    return form.group ? (k + form.group - 1) / form.group : 1;
}

/* Where x as integers goes, and their scales. */
static struct ember_tensor integers_room(const struct builder *b, struct ember_tensor x,
                                         struct x_form form, bool hand_over,
                                         struct ember_tensor *ret_scale)
{
    uint32_t scales = x_segments(form, x.dim[1]) * (hand_over ? 1 + form.terms : 1);
    *ret_scale = build_rows(b->x8_scale, scales);
    return build_rows(b->x8, form.terms * EMBER_X8_COLUMNS(x.dim[1]));
}

struct ember_tensor build_quantize(struct builder *b, enum ember_rows rows, struct ember_tensor x,
                                   struct x_form form, uint32_t repeat, bool hand_over,
                                   struct ember_tensor *ret_scale)
{
    struct ember_op *o = build_op(b, EMBER_OP_QUANTIZE, rows);
    o->t[QUANTIZE_X] = x;
    o->t[QUANTIZE_OUT] = integers_room(b, x, form, hand_over, &o->t[QUANTIZE_SCALE]);
    o->i[QUANTIZE_I_REPEAT] = repeat;
    o->i[QUANTIZE_I_GROUP] = form.group;
    o->i[QUANTIZE_I_TERMS] = form.terms;
    o->i[QUANTIZE_I_HAND_OVER] = hand_over;
    *ret_scale = o->t[QUANTIZE_SCALE];
    return o->t[QUANTIZE_OUT];
}

struct ember_tensor build_x_tmp(const struct builder *b, const struct weight *w)
{
    if (w->layout != EMBER_LAYOUT_TILES || build_x_form(b, w).terms)
        return (struct ember_tensor){0};
    return build_rows(b->x_tmp, (uint32_t)EMBER_X_TMP_BYTES(w->dim[w->rank - 1]));
}

const struct handed *build_hand_over(struct builder *b, struct ember_tensor x,
                                     enum layer_weight reader, struct ember_tensor room,
                                     bool integers)
{
    const struct weight *w;
    struct x_form form;
    b->handed = (struct handed){.x = {0}};
    if (reader == LAYER_WEIGHT_COUNT)
        return &b->handed;
    w = &b->layout->weights[b->model->layer_slots[b->layer][reader]];
    form = build_x_form(b, w);
    if (form.terms && integers && !w->order_at) {
        b->handed.x = x;
        b->handed.to = integers_room(b, x, form, true, &b->handed.scale);
        b->handed.form = form;
    } else if (!w->quant && build_x_tmp(b, w).rank) {
        b->handed.x = x;
        b->handed.to = build_rows(room, (uint32_t)EMBER_X_TMP_BYTES(x.dim[1]));
    }
    return &b->handed;
}

/* Rows of an operand of a weight; in tiles only from the beginning of a panel on. */
static struct ember_tensor weight_part(struct builder *b, const struct weight *w,
                                       struct ember_tensor t, uint32_t first, uint32_t n)
{
    if (w->layout == EMBER_LAYOUT_TILES && first % EMBER_PANEL && !b->failed)
        b->failed = error_set(b->err, ENOTSUP,
                              "%s: a part of it begins at row %u, which is no multiple of %d",
                              w->name, first, EMBER_PANEL);
    return t.rank ? tensor_rows(t, first, n) : t;
}

struct ember_op *build_linear_rows(struct builder *b, enum ember_rows rows, struct ember_tensor x,
                                   uint32_t slot, uint32_t first, uint32_t n,
                                   struct ember_tensor bias, struct ember_tensor out)
{
    const struct weight *w = &b->layout->weights[slot];
    struct ember_tensor scale = build_slot_groups(b, slot, w->scale_at, w->scale_dtype),
                        x_scale = {0};
    struct ember_tensor zero = build_slot_groups(b, slot, w->zero_at, EMBER_U8);
    struct x_form form = build_x_form(b, w);
    bool handed = b->handed.x.rank && !memcmp(&b->handed.x, &x, sizeof x);
    uint32_t k = x.dim[1];
    struct ember_op *o;
    if (form.terms && handed) {
        x = b->handed.to;
        x_scale = b->handed.scale;
    } else if (form.terms)
        x = build_quantize(b, rows, x, form, 0, true, &x_scale);
    o = build_op(b, EMBER_OP_LINEAR, rows);
    o->t[LINEAR_X] = x;
    o->t[LINEAR_W] = weight_part(b, w, build_slot(b, slot), first, n);
    o->t[LINEAR_B] = bias.rank ? tensor_rows(bias, first, n) : bias;
    o->t[LINEAR_OUT] = out;
    o->t[LINEAR_W_SCALE] = weight_part(b, w, scale, first, n);
    o->t[LINEAR_W_ZERO] = weight_part(b, w, zero, first, n);
    o->t[LINEAR_X_SCALE] = x_scale;
    o->t[LINEAR_X_TMP] = build_x_tmp(b, w);
    if (handed && !form.terms) {
        o->t[LINEAR_X_TMP] = b->handed.to;
        o->i[LINEAR_I_X_READY] = 1;
    }
    o->i[LINEAR_I_QUANT] = w->quant;
    o->i[LINEAR_I_GROUP] = w->group;
    o->i[LINEAR_I_LAYOUT] = w->layout;
    if (form.terms) {
        o->i[LINEAR_I_K] = k;
        o->i[LINEAR_I_X_GROUP] = form.group;
        o->i[LINEAR_I_X_TERMS] = form.terms;
        o->i[LINEAR_I_X_READY] = 1;
    }
    o->f[LINEAR_F_SCALE] = b->linear_scale;
    o->f[LINEAR_F_SOFTCAP] = b->linear_softcap;
    return o;
}

/* The columns of x in the order of part `part` of a slot. */
static struct ember_tensor permute(struct builder *b, enum ember_rows rows, struct ember_tensor x,
                                   uint32_t slot, uint32_t part)
{
    const struct weight *w = &b->layout->weights[slot];
    struct ember_op *o = build_op(b, EMBER_OP_PERMUTE, rows);
    o->t[PERMUTE_X] = x;
    o->t[PERMUTE_ORDER] =
        (struct ember_tensor){.arena = EMBER_ARENA_WEIGHTS,
                              .dtype = EMBER_I32,
                              .rank = 1,
                              .dim = {x.dim[1]},
                              .offset = w->offset + w->order_at + (uint64_t)part * x.dim[1] * 4};
    o->t[PERMUTE_OUT] = build_narrow(b->sorted, x.dim[1]);
    return o->t[PERMUTE_OUT];
}

void build_linear_part(struct builder *b, enum ember_rows rows, struct ember_tensor x,
                       uint32_t slot, uint32_t first, uint32_t n, struct ember_tensor bias,
                       struct ember_tensor out)
{
    const struct slot *s = &b->model->slots[slot];
    if (!b->layout->weights[slot].order_at) {
        build_linear_rows(b, rows, x, slot, first, n, bias, out);
        return;
    }
    for (uint32_t p = 0; p < s->n_parts; p++) {
        const struct part *part = &b->model->parts[s->first_part + p];
        uint32_t from = (uint32_t)(part->first / s->dim[1]), to = from + part->dim[0];
        from = MAX(from, first);
        to = MIN(to, first + n);
        if (from < to)
            build_linear_rows(b, rows, permute(b, rows, x, slot, p), slot, from, to - from, bias,
                              tensor_columns(out, from - first, to - from));
    }
}

void build_linear(struct builder *b, struct ember_tensor x, enum layer_weight id,
                  enum layer_weight bias, struct ember_tensor out)
{
    uint32_t slot = b->model->layer_slots[b->layer][id];
    struct ember_tensor none = {0};
    build_linear_part(b, EMBER_ROWS_TOKENS, x, slot, 0, b->model->slots[slot].dim[0],
                      bias == id ? none : build_weight(b, bias), out);
}

void build_stack_linear(struct builder *b, struct ember_tensor x, uint32_t slot,
                        struct ember_tensor bias, struct ember_tensor ids, uint32_t slots,
                        bool per_slot, struct ember_tensor out)
{
    const struct weight *w = &b->layout->weights[slot];
    struct x_form form = build_x_form(b, w);
    struct ember_tensor x_scale = {0};
    uint32_t k = x.dim[1];
    struct ember_op *o;
    if (form.terms)
        x = build_quantize(b, EMBER_ROWS_TOKENS, x, form, per_slot ? slots : 0, false, &x_scale);
    o = build_op(b, EMBER_OP_MOE_LINEAR, EMBER_ROWS_TOKENS);
    o->t[MOE_X] = x;
    o->t[MOE_W] = build_slot(b, slot);
    o->t[MOE_B] = bias;
    o->t[MOE_IDS] = ids;
    o->t[MOE_OUT] = out;
    o->t[MOE_W_SCALE] = build_slot_groups(b, slot, w->scale_at, w->scale_dtype);
    o->t[MOE_W_ZERO] = build_slot_groups(b, slot, w->zero_at, EMBER_U8);
    o->t[MOE_X_SCALE] = x_scale;
    o->t[MOE_X_TMP] = build_x_tmp(b, w);
    o->i[MOE_I_TOPK] = slots;
    o->i[MOE_I_PER_SLOT] = per_slot;
    o->i[MOE_I_QUANT] = w->quant;
    o->i[MOE_I_GROUP] = w->group;
    o->i[MOE_I_LAYOUT] = w->layout;
    if (form.terms) {
        o->i[MOE_I_K] = k;
        o->i[MOE_I_X_GROUP] = form.group;
        o->i[MOE_I_X_TERMS] = form.terms;
    }
}

/* Bytes of what the inputs of linears are turned into. */
struct input_room {
    uint64_t x8, scales, tmp;
};

/* Rows that a weight's x may have: of each expert that is chosen, of each head. */
static uint64_t input_rows(const struct builder *b, uint32_t slot)
{
    uint64_t rows = MAX(b->tokens, b->rows), slots = 1;
    if (b->model->slots[slot].heads)
        slots = b->model->slots[slot].dim[0];
    else if (b->model->slots[slot].rank > 2)
        for (uint32_t i = 0; i < b->d->n_mlps; i++)
            slots = b->d->mlps[i].kind == MLP_MOE ? MAX(slots, b->d->mlps[i].topk) : slots;
    return rows * slots;
}

static void add_input(const struct builder *b, uint32_t slot, struct input_room *room)
{
    const struct weight *w = &b->layout->weights[slot];
    uint32_t k = w->dim[w->rank - 1];
    struct x_form form = build_x_form(b, w);
    uint64_t rows = input_rows(b, slot), handed = (rows + EMBER_PANEL - 1) / EMBER_PANEL;
    handed *= EMBER_PANEL; /* EMBER_X8_ROWS of any number */
    if (form.terms) {
        uint64_t scales = x_segments(form, k) * (1 + form.terms) * sizeof(float);
        room->x8 = MAX(room->x8, handed * form.terms * EMBER_X8_COLUMNS(k));
        room->scales = MAX(room->scales, handed * scales);
    } else if (w->layout == EMBER_LAYOUT_TILES)
        room->tmp = MAX(room->tmp, rows * EMBER_X_TMP_BYTES(k));
}

/* A buffer of so many bytes, to be cut into rows of any width. */
static void bytes_room(struct builder *b, enum ember_dtype dtype, uint64_t bytes,
                       struct ember_tensor *ret)
{
    uint64_t lines = (bytes + EMBER_TILE_LINE - 1) / EMBER_TILE_LINE;
    if (lines > UINT32_MAX && !b->failed)
        b->failed = error_set(b->err, EOVERFLOW,
                              "%u tokens of so many experts or heads are too "
                              "many",
                              b->tokens);
    if (lines)
        build_room(b, dtype, (uint32_t)lines, EMBER_TILE_LINE / dtype_size(dtype), ret);
}

void build_linear_room(struct builder *b)
{
    uint32_t rows = MAX(b->tokens, b->rows), sorted = 0, inner = 0;
    struct input_room room = {0};
    for (uint32_t i = 0; i < b->model->n_slots; i++) {
        const struct weight *w = &b->layout->weights[i];
        add_input(b, i, &room);
        if (w->order_at)
            sorted = MAX(sorted, w->dim[w->rank - 1]);
    }
    if (room.tmp && b->inner.rank)
        inner = (uint32_t)EMBER_X_TMP_BYTES(b->inner.dim[1]);
    build_room(b, EMBER_F32, rows, sorted, &b->sorted);
    bytes_room(b, EMBER_I8, room.x8, &b->x8);
    bytes_room(b, EMBER_F32, room.scales, &b->x8_scale);
    bytes_room(b, EMBER_U8, room.tmp, &b->x_tmp);
    build_room(b, EMBER_U8, b->tokens, inner, &b->inner_tmp);
}
