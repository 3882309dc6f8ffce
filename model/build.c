/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The builder: from a description to a plan. One function for each part of a block; which ops come
 * out depends on what the description says is there.
 *
 * Scratch is laid out once: x, the residual stream [T, D]; h, a normed copy; delta, what a sublayer
 * adds; and the sublayers' own buffers, as wide as the widest layer needs. All layers use the same
 * ones. Rope tables are written by the embedding's segment and read by every layer.
 */
#include "model/model_private.h"

#include <errno.h>
#include <string.h>

/* Steps of so few tokens or rows have room for attention (argmax) in parts; larger ones keep all
 * threads busy by their rows. */
#define PARTS_TOKENS 16

struct builder {
    const struct model *model;
    const struct desc *d;
    const struct weights_layout *layout;
    struct plan *plan;
    struct error *err;
    int failed;
    uint32_t tokens, rows; /* T, R */
    bool taps;
    enum ember_dtype kv;
    uint32_t layer;
    uint64_t kv_at; /* where the layer's K block stands in a page */
    struct ember_tensor x, h, delta, qkv, q, attn, parts, gate_up, inner, ropes[DESC_ROPES];
    struct ember_tensor route_logits, route_ids, route_weights, experts, experts_inner, experts_out,
        shared, shared_gate;
    struct ember_tensor gathered, final, argmax_parts;
    double linear_scale, linear_softcap;
    /* x of a linear whose weight asks for another form; room for the backend's own, of an MLP's
     * inner activations beside that of what it reads */
    struct ember_tensor sorted, x8, x8_scale, x_tmp, inner_tmp;
    /* x that was last handed over in the backend's form, and where; rank 0: none */
    struct ember_tensor handed, handed_tmp;
};

/* Ops go nowhere once something has failed: the caller still gets one to fill in. */
static struct ember_op *op(struct builder *b, enum ember_op_kind kind, enum ember_rows rows)
{
    static _Thread_local struct ember_op sink;
    struct ember_op *o = b->failed ? NULL : plan_op(b->plan, kind, rows);
    if (!o && !b->failed)
        b->failed = error_set(b->err, ENOMEM, "no memory for op %u of a plan", b->plan->n_ops);
    return o ? o : &sink;
}

static void segment(struct builder *b, enum segment_kind kind, uint32_t variant)
{
    if (!b->failed)
        b->failed = plan_segment(b->plan, kind, variant, b->err);
}

/* ---- operands ---- */

static struct ember_tensor slot_tensor(const struct builder *b, uint32_t slot)
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

/* Scales or zero points of a quantised slot; absent when it has none. */
static struct ember_tensor slot_groups(const struct builder *b, uint32_t slot, uint64_t at,
                                       uint8_t dtype)
{
    const struct weight *w = &b->layout->weights[slot];
    struct ember_tensor t = slot_tensor(b, slot);
    if (!at)
        return (struct ember_tensor){0};
    t.dtype = dtype;
    t.offset = w->offset + at;
    t.dim[t.rank - 1] = w->groups;
    t.row_stride =
        (uint64_t)w->groups * dtype_size(dtype) * (t.rank > 2 ? weight_rows(w) / w->dim[0] : 1);
    return t;
}

static struct ember_tensor weight(const struct builder *b, enum layer_weight id)
{
    return slot_tensor(b, b->model->layer_slots[b->layer][id]);
}

static struct ember_tensor io_vector(uint64_t offset, uint32_t n)
{
    return (struct ember_tensor){
        .arena = EMBER_ARENA_IO, .dtype = EMBER_I32, .rank = 1, .dim = {n}, .offset = offset};
}

/* Columns of a buffer that is as wide as the widest user; rows stay packed for this one. */
static struct ember_tensor narrow(struct ember_tensor t, uint32_t cols)
{
    t.dim[1] = cols;
    t.row_stride = (uint64_t)cols * dtype_size(t.dtype);
    return t;
}

static struct ember_tensor logits_tensor(const struct builder *b)
{
    uint32_t vocab = b->d->info.vocab_size;
    return (struct ember_tensor){.arena = EMBER_ARENA_IO,
                                 .dtype = EMBER_F32,
                                 .rank = 2,
                                 .dim = {b->rows, vocab},
                                 .offset = b->plan->io.logits,
                                 .row_stride = (uint64_t)vocab * 4};
}

/* ---- ops ---- */

static void norm(struct builder *b, enum ember_rows rows, struct ember_tensor x,
                 const struct ember_tensor *delta, struct ember_tensor w, struct ember_tensor bias,
                 struct ember_tensor out, struct ember_tensor out_x)
{
    struct ember_op *o = op(b, EMBER_OP_NORM, rows);
    o->t[NORM_X] = x;
    o->t[NORM_W] = w;
    o->t[NORM_B] = bias;
    o->t[NORM_OUT] = out;
    o->t[NORM_OUT_X] = out_x;
    o->i[NORM_I_KIND] = b->d->norm;
    o->f[NORM_F_EPS] = b->d->eps;
    o->f[NORM_F_W_BIAS] = b->d->norm_w_bias;
    if (delta) {
        o->t[NORM_DELTA] = *delta;
        o->f[NORM_F_DELTA_SCALE] = b->d->residual_scale;
    }
}

/* The form in which x meets a quantised weight as integers (ember/op.h). */
struct x_form {
    uint32_t terms, group; /* terms 0: as floats */
};

/*
 * One scale a token where the checkpoint says so; else as finely as the weight's own groups, at
 * most X_GROUP. 8 bits when activations are quantised, and before what is made here in 4 bits or in
 * groups so large that x has no more error than w (the head's are smaller, and so are those of x
 * there). 16 bits, which are as good as floats, for all else.
 */
#define X_GROUP 128
#define X_GROUP_MADE 256 /* where a group ends costs as much as 256 products */
#define X_GROUP_HEAD 64  /* of what has groups of 128 */

static struct x_form x_form(const struct builder *b, const struct weight *w)
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

/* x as integers, in b->x8 and b->x8_scale; *ret_scale is the latter. */
static struct ember_tensor quantize(struct builder *b, enum ember_rows rows, struct ember_tensor x,
                                    struct x_form form, uint32_t repeat,
                                    struct ember_tensor *ret_scale)
{
    struct ember_op *o = op(b, EMBER_OP_QUANTIZE, rows);
    o->t[QUANTIZE_X] = x;
    o->t[QUANTIZE_OUT] = narrow(b->x8, form.terms * EMBER_X8_COLUMNS(x.dim[1]));
    o->t[QUANTIZE_SCALE] = narrow(b->x8_scale, x_segments(form, x.dim[1]));
    o->i[QUANTIZE_I_REPEAT] = repeat;
    o->i[QUANTIZE_I_GROUP] = form.group;
    o->i[QUANTIZE_I_TERMS] = form.terms;
    *ret_scale = o->t[QUANTIZE_SCALE];
    return o->t[QUANTIZE_OUT];
}

/* What a linear over bf16 or small floats in tiles needs beside its x. */
static struct ember_tensor x_tmp(const struct builder *b, const struct weight *w)
{
    if (w->layout != EMBER_LAYOUT_TILES || x_form(b, w).terms)
        return (struct ember_tensor){0};
    return narrow(b->x_tmp, (uint32_t)EMBER_X_TMP_BYTES(w->dim[w->rank - 1]));
}

/*
 * x, which is about to be made, goes to the linear over a layer's weight, and to nobody else: what
 * OUT_X is, of bf16 weights. LAYER_WEIGHT_COUNT: to others, too.
 */
static struct ember_tensor hand_over(struct builder *b, struct ember_tensor x,
                                     enum layer_weight reader, struct ember_tensor room)
{
    struct ember_tensor none = {0};
    const struct weight *w;
    b->handed = none;
    if (reader == LAYER_WEIGHT_COUNT)
        return none;
    w = &b->layout->weights[b->model->layer_slots[b->layer][reader]];
    if (!x_tmp(b, w).rank || w->quant)
        return none;
    b->handed = x;
    b->handed_tmp = narrow(room, (uint32_t)EMBER_X_TMP_BYTES(x.dim[1]));
    return b->handed_tmp;
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

/* Rows [first, first + n) of a slot that is in one piece. */
static struct ember_op *linear_rows(struct builder *b, enum ember_rows rows, struct ember_tensor x,
                                    uint32_t slot, uint32_t first, uint32_t n,
                                    struct ember_tensor bias, struct ember_tensor out)
{
    const struct weight *w = &b->layout->weights[slot];
    struct ember_tensor scale = slot_groups(b, slot, w->scale_at, w->scale_dtype), x_scale = {0};
    struct ember_tensor zero = slot_groups(b, slot, w->zero_at, EMBER_U8);
    struct x_form form = x_form(b, w);
    uint32_t k = x.dim[1];
    struct ember_op *o;
    if (form.terms)
        x = quantize(b, rows, x, form, 0, &x_scale);
    o = op(b, EMBER_OP_LINEAR, rows);
    o->t[LINEAR_X] = x;
    o->t[LINEAR_W] = weight_part(b, w, slot_tensor(b, slot), first, n);
    o->t[LINEAR_B] = bias.rank ? tensor_rows(bias, first, n) : bias;
    o->t[LINEAR_OUT] = out;
    o->t[LINEAR_W_SCALE] = weight_part(b, w, scale, first, n);
    o->t[LINEAR_W_ZERO] = weight_part(b, w, zero, first, n);
    o->t[LINEAR_X_SCALE] = x_scale;
    o->t[LINEAR_X_TMP] = x_tmp(b, w);
    if (b->handed.rank && !memcmp(&b->handed, &x, sizeof x)) {
        o->t[LINEAR_X_TMP] = b->handed_tmp;
        o->i[LINEAR_I_X_READY] = 1;
    }
    o->i[LINEAR_I_QUANT] = w->quant;
    o->i[LINEAR_I_GROUP] = w->group;
    o->i[LINEAR_I_LAYOUT] = w->layout;
    if (form.terms) {
        o->i[LINEAR_I_K] = k;
        o->i[LINEAR_I_X_GROUP] = form.group;
        o->i[LINEAR_I_X_TERMS] = form.terms;
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
    struct ember_op *o = op(b, EMBER_OP_PERMUTE, rows);
    o->t[PERMUTE_X] = x;
    o->t[PERMUTE_ORDER] =
        (struct ember_tensor){.arena = EMBER_ARENA_WEIGHTS,
                              .dtype = EMBER_I32,
                              .rank = 1,
                              .dim = {x.dim[1]},
                              .offset = w->offset + w->order_at + (uint64_t)part * x.dim[1] * 4};
    o->t[PERMUTE_OUT] = narrow(b->sorted, x.dim[1]);
    return o->t[PERMUTE_OUT];
}

/*
 * out = x w^T + bias with rows [first, first + n) of a slot. Parts whose columns are in an order of
 * their own are multiplied one by one.
 */
static void linear_part(struct builder *b, enum ember_rows rows, struct ember_tensor x,
                        uint32_t slot, uint32_t first, uint32_t n, struct ember_tensor bias,
                        struct ember_tensor out)
{
    const struct slot *s = &b->model->slots[slot];
    if (!b->layout->weights[slot].order_at) {
        linear_rows(b, rows, x, slot, first, n, bias, out);
        return;
    }
    for (uint32_t p = 0; p < s->n_parts; p++) {
        const struct part *part = &b->model->parts[s->first_part + p];
        uint32_t from = (uint32_t)(part->first / s->dim[1]), to = from + part->dim[0];
        from = MAX(from, first);
        to = MIN(to, first + n);
        if (from < to)
            linear_rows(b, rows, permute(b, rows, x, slot, p), slot, from, to - from, bias,
                        tensor_columns(out, from - first, to - from));
    }
}

static void linear(struct builder *b, struct ember_tensor x, enum layer_weight id,
                   enum layer_weight bias, struct ember_tensor out)
{
    uint32_t slot = b->model->layer_slots[b->layer][id];
    struct ember_tensor none = {0};
    b->linear_scale = 1;
    b->linear_softcap = 0;
    linear_part(b, EMBER_ROWS_TOKENS, x, slot, 0, b->model->slots[slot].dim[0],
                bias == id ? none : weight(b, bias), out);
}

static void add(struct builder *b, struct ember_tensor x, struct ember_tensor delta)
{
    struct ember_op *o = op(b, EMBER_OP_ADD, EMBER_ROWS_TOKENS);
    o->t[ADD_X] = x;
    o->t[ADD_DELTA] = delta;
    o->f[ADD_F_SCALE] = b->d->residual_scale;
}

static void tap(struct builder *b, uint32_t index, struct ember_tensor x)
{
    struct ember_tensor out = x;
    struct ember_op *o;
    if (!b->taps)
        return;
    out.arena = EMBER_ARENA_IO;
    out.row_stride = (uint64_t)b->d->info.hidden_size * 4;
    out.offset = b->plan->io.hidden + (uint64_t)index * b->tokens * out.row_stride;
    o = op(b, EMBER_OP_COPY, EMBER_ROWS_TOKENS);
    o->t[COPY_X] = x;
    o->t[COPY_OUT] = out;
}

/* ---- the embedding ---- */

static void build_rope(struct builder *b, uint32_t i)
{
    const struct desc_rope *rope = &b->d->ropes[i];
    struct ember_op *o = op(b, EMBER_OP_ROPE_TABLE, EMBER_ROWS_TOKENS);
    o->t[ROPE_POSITIONS] = io_vector(b->plan->io.positions, b->tokens);
    o->t[ROPE_LEN] = io_vector(b->plan->io.rope_len, b->tokens);
    o->t[ROPE_INV_FREQ] = slot_tensor(b, b->model->ropes[i]);
    o->t[ROPE_OUT] = b->ropes[i];
    o->i[ROPE_I_KIND] = rope->kind;
    o->f[ROPE_F_ATTENTION_FACTOR] = rope->attention_factor;
    o->f[ROPE_F_THETA] = rope->theta;
    o->f[ROPE_F_FACTOR] = rope->factor;
    o->f[ROPE_F_MAX_POSITION] = rope->max_position;
}

static void build_embed(struct builder *b)
{
    const struct weight *table = &b->layout->weights[b->model->embed];
    struct ember_op *o;
    segment(b, SEGMENT_EMBED, 0);
    o = op(b, EMBER_OP_EMBED, EMBER_ROWS_TOKENS);
    o->t[EMBED_TOKENS] = io_vector(b->plan->io.tokens, b->tokens);
    o->t[EMBED_TABLE] = slot_tensor(b, b->model->embed);
    o->t[EMBED_OUT] = b->x;
    o->t[EMBED_SCALE] = slot_groups(b, b->model->embed, table->scale_at, table->scale_dtype);
    o->t[EMBED_ZERO] = slot_groups(b, b->model->embed, table->zero_at, EMBER_U8);
    o->i[EMBED_I_QUANT] = table->quant;
    o->i[EMBED_I_GROUP] = table->group;
    o->i[EMBED_I_LAYOUT] = table->layout;
    o->f[EMBED_F_SCALE] = b->d->embed_scale;
    for (uint32_t i = 0; i < b->d->n_ropes; i++)
        build_rope(b, i);
    tap(b, 0, b->x);
}

/* ---- attention ---- */

static struct ember_tensor kv_block(const struct builder *b, uint64_t offset, uint32_t heads,
                                    uint32_t width)
{
    return (struct ember_tensor){.arena = EMBER_ARENA_KV,
                                 .dtype = (uint8_t)b->kv,
                                 .rank = 3,
                                 .dim = {heads, KV_PAGE_SIZE, width},
                                 .offset = offset,
                                 .row_stride = b->plan->arena_bytes[EMBER_ARENA_KV]};
}

/* Activations that are rounded to 8 bits make more of an error of 2^-17 than it is: some of them
 * fall on the other side. */
static bool kv_exact(const struct builder *b)
{
    return b->d->quant.int8_x;
}

static void build_split(struct builder *b, const struct desc_attn *a, struct ember_tensor k,
                        struct ember_tensor v)
{
    struct ember_op *o = op(b, EMBER_OP_SPLIT_NORM_ROPE, EMBER_ROWS_TOKENS);
    o->t[SNR_QKV] = narrow(b->qkv, (a->q_heads + a->kv_heads) * a->dk + a->kv_heads * a->dv);
    o->t[SNR_Q_NORM] = weight(b, W_Q_NORM);
    o->t[SNR_K_NORM] = weight(b, W_K_NORM);
    if (a->rope >= 0) {
        o->t[SNR_ROPE] = b->ropes[a->rope];
        o->i[SNR_I_ROTARY] = b->d->ropes[a->rope].rotary;
    }
    o->t[SNR_Q] = narrow(b->q, a->q_heads * a->dk);
    o->t[SNR_K] = k;
    o->t[SNR_V] = v;
    o->t[SNR_KV_SLOT] = io_vector(b->plan->io.kv_slot, b->tokens);
    o->i[SNR_I_Q_HEADS] = a->q_heads;
    o->i[SNR_I_KV_HEADS] = a->kv_heads;
    o->i[SNR_I_DK] = a->dk;
    o->i[SNR_I_DV] = a->dv;
    o->i[SNR_I_INTERLEAVED] = a->interleaved;
    o->i[SNR_I_NORM] = a->qk_norm;
    o->i[SNR_I_NORM_AFTER] = a->norm_after_rope;
    o->i[SNR_I_PAGE_SIZE] = KV_PAGE_SIZE;
    o->i[SNR_I_KV_EXACT] = kv_exact(b);
    o->f[SNR_F_EPS] = b->d->eps;
    o->f[SNR_F_W_BIAS] = b->d->norm_w_bias;
    o->f[SNR_F_V_SCALE] = a->v_scale;
}

/* Keys that the page table of a sequence has room for. */
static uint64_t keys(const struct builder *b)
{
    return (uint64_t)b->plan->io.shape.pages * KV_PAGE_SIZE;
}

static void build_attention(struct builder *b, const struct desc_attn *a, struct ember_tensor in)
{
    struct ember_tensor k = kv_block(b, b->kv_at, a->kv_heads, a->dk), v, out;
    struct ember_op *o;
    b->kv_at += model_kv_block(b->kv, a->kv_heads, a->dk);
    v = kv_block(b, b->kv_at, a->kv_heads, a->dv);
    b->kv_at += model_kv_block(b->kv, a->kv_heads, a->dv);
    out = narrow(b->attn, a->q_heads * a->dv);

    linear(b, in, W_QKV, W_QKV_B,
           narrow(b->qkv, (a->q_heads + a->kv_heads) * a->dk + a->kv_heads * a->dv));
    build_split(b, a, k, v);
    o = op(b, EMBER_OP_ATTENTION, EMBER_ROWS_TOKENS);
    o->t[ATTN_Q] = narrow(b->q, a->q_heads * a->dk);
    o->t[ATTN_K] = k;
    o->t[ATTN_V] = v;
    o->t[ATTN_PAGES] =
        (struct ember_tensor){.arena = EMBER_ARENA_IO,
                              .dtype = EMBER_I32,
                              .rank = 2,
                              .dim = {b->plan->io.shape.seqs, b->plan->io.shape.pages},
                              .offset = b->plan->io.pages,
                              .row_stride = (uint64_t)b->plan->io.shape.pages * 4};
    o->t[ATTN_SEQ_OF] = io_vector(b->plan->io.seq_of, b->tokens);
    o->t[ATTN_POSITIONS] = io_vector(b->plan->io.positions, b->tokens);
    o->t[ATTN_SINKS] = weight(b, W_SINKS);
    o->t[ATTN_OUT] = out;
    if (b->parts.rank)
        o->t[ATTN_PARTS] = narrow(b->parts, a->q_heads * (a->dv + 2) * attention_parts(keys(b)));
    o->i[ATTN_I_Q_HEADS] = a->q_heads;
    o->i[ATTN_I_KV_HEADS] = a->kv_heads;
    o->i[ATTN_I_DK] = a->dk;
    o->i[ATTN_I_DV] = a->dv;
    o->i[ATTN_I_PAGE_SIZE] = KV_PAGE_SIZE;
    o->i[ATTN_I_WINDOW] = a->window;
    o->i[ATTN_I_KV_EXACT] = kv_exact(b);
    o->f[ATTN_F_SCALE] = a->scale;
    o->f[ATTN_F_SOFTCAP] = a->softcap;
    linear(b, out, W_O, W_O_B, b->delta);
}

/* ---- MLPs ---- */

static void glu(struct builder *b, const struct desc_mlp *m, struct ember_tensor x,
                struct ember_tensor out, uint32_t repeat)
{
    struct ember_op *o = op(b, EMBER_OP_GLU, EMBER_ROWS_TOKENS);
    o->t[GLU_X] = x;
    o->t[GLU_OUT] = out;
    o->i[GLU_I_ACT] = m->act;
    o->i[GLU_I_LAYOUT] = m->glu_interleaved;
    o->i[GLU_I_REPEAT] = repeat;
    o->f[GLU_F_LIMIT] = m->glu_limit;
    o->f[GLU_F_ALPHA] = m->glu_alpha;
}

/*
 * The first half of a gated MLP: gate and up, as wide together as `first`, to `inner`, which goes
 * to the linear over `reader`.
 */
static void gated(struct builder *b, const struct desc_mlp *m, struct ember_tensor x,
                  enum layer_weight id, enum layer_weight bias, struct ember_tensor first,
                  struct ember_tensor inner, enum layer_weight reader)
{
    uint32_t slot = b->model->layer_slots[b->layer][id];
    struct ember_tensor none = {0};
    struct ember_op *o;
    if (b->layout->weights[slot].order_at) {
        linear(b, x, id, bias, first);
        glu(b, m, first, inner, 0);
        return;
    }
    b->linear_scale = 1;
    b->linear_softcap = 0;
    o = linear_rows(b, EMBER_ROWS_TOKENS, x, slot, 0, b->model->slots[slot].dim[0],
                    bias == id ? none : weight(b, bias), inner);
    o->t[LINEAR_GATE_UP] = first;
    o->t[LINEAR_OUT_X] = hand_over(b, inner, reader, b->inner_tmp);
    o->i[LINEAR_I_GLU] = m->glu_interleaved ? EMBER_GLU_PAIRS : EMBER_GLU_HALVES;
    o->i[LINEAR_I_ACT] = m->act;
    o->f[LINEAR_F_LIMIT] = m->glu_limit;
    o->f[LINEAR_F_ALPHA] = m->glu_alpha;
}

static void build_dense(struct builder *b, const struct desc_mlp *m, struct ember_tensor in)
{
    struct ember_tensor inner = narrow(b->inner, m->inner);
    if (m->kind == MLP_PLAIN) {
        struct ember_tensor first = narrow(b->gate_up, m->inner);
        struct ember_op *o;
        linear(b, in, W_GATE_UP, W_GATE_UP_B, first);
        o = op(b, EMBER_OP_ACT, EMBER_ROWS_TOKENS);
        o->t[ACT_X] = first;
        o->t[ACT_OUT] = inner;
        o->i[ACT_I_ACT] = m->act;
    } else
        gated(b, m, in, W_GATE_UP, W_GATE_UP_B, narrow(b->gate_up, 2 * m->inner), inner, W_DOWN);
    linear(b, inner, W_DOWN, W_DOWN_B, b->delta);
}

static void build_route(struct builder *b, const struct desc_mlp *m, struct ember_tensor in)
{
    struct ember_op *o;
    linear(b, in, W_ROUTER, W_ROUTER_B, b->route_logits);
    o = op(b, EMBER_OP_MOE_ROUTE, EMBER_ROWS_TOKENS);
    o->t[ROUTE_LOGITS] = b->route_logits;
    o->t[ROUTE_BIAS] = weight(b, W_ROUTE_BIAS);
    o->t[ROUTE_IDS] = b->route_ids;
    o->t[ROUTE_WEIGHTS] = b->route_weights;
    o->i[ROUTE_I_KIND] = m->route;
    o->i[ROUTE_I_TOPK] = m->topk;
    o->i[ROUTE_I_NORMALIZE] = m->normalize;
    o->i[ROUTE_I_GROUPS] = m->groups;
    o->i[ROUTE_I_TOP_GROUPS] = m->top_groups;
    o->f[ROUTE_F_SCALE] = m->route_scale;
}

static void expert_linear(struct builder *b, const struct desc_mlp *m, struct ember_tensor x,
                          enum layer_weight id, struct ember_tensor out, bool per_slot)
{
    uint32_t slot = b->model->layer_slots[b->layer][id];
    const struct weight *w = &b->layout->weights[slot];
    struct x_form form = x_form(b, w);
    struct ember_tensor x_scale = {0};
    uint32_t k = x.dim[1];
    struct ember_op *o;
    if (form.terms)
        x = quantize(b, EMBER_ROWS_TOKENS, x, form, per_slot ? m->topk : 0, &x_scale);
    o = op(b, EMBER_OP_MOE_LINEAR, EMBER_ROWS_TOKENS);
    o->t[MOE_X] = x;
    o->t[MOE_W] = weight(b, id);
    o->t[MOE_W_SCALE] = slot_groups(b, slot, w->scale_at, w->scale_dtype);
    o->t[MOE_W_ZERO] = slot_groups(b, slot, w->zero_at, EMBER_U8);
    o->t[MOE_X_SCALE] = x_scale;
    o->t[MOE_X_TMP] = x_tmp(b, w);
    o->i[MOE_I_QUANT] = w->quant;
    o->i[MOE_I_GROUP] = w->group;
    o->i[MOE_I_LAYOUT] = w->layout;
    if (form.terms) {
        o->i[MOE_I_K] = k;
        o->i[MOE_I_X_GROUP] = form.group;
        o->i[MOE_I_X_TERMS] = form.terms;
    }
    o->t[MOE_B] = weight(b, id + 1);
    o->t[MOE_IDS] = b->route_ids;
    o->t[MOE_OUT] = out;
    o->i[MOE_I_TOPK] = m->topk;
    o->i[MOE_I_PER_SLOT] = per_slot;
}

/* The expert that every token passes; its output stands in b->shared. */
static void build_shared(struct builder *b, const struct desc_mlp *m, struct ember_tensor in)
{
    struct ember_tensor first = narrow(b->gate_up, 2 * m->shared_inner);
    struct ember_tensor inner = narrow(b->inner, m->shared_inner);
    gated(b, m, in, W_SHARED_GATE_UP, W_SHARED_GATE_UP, first, inner, W_SHARED_DOWN);
    linear(b, inner, W_SHARED_DOWN, W_SHARED_DOWN, b->shared);
    if (m->shared_gated)
        linear(b, in, W_SHARED_SIGMOID, W_SHARED_SIGMOID, b->shared_gate);
}

static void build_moe(struct builder *b, const struct desc_mlp *m, struct ember_tensor in)
{
    struct ember_op *o;
    build_route(b, m, in);
    if (m->shared_inner)
        build_shared(b, m, in);
    expert_linear(b, m, in, W_EXPERTS_GATE_UP, b->experts, false);
    glu(b, m, b->experts, b->experts_inner, m->topk);
    expert_linear(b, m, b->experts_inner, W_EXPERTS_DOWN, b->experts_out, true);
    o = op(b, EMBER_OP_MOE_COMBINE, EMBER_ROWS_TOKENS);
    o->t[COMBINE_Y] = b->experts_out;
    o->t[COMBINE_WEIGHTS] = b->route_weights;
    if (m->shared_inner)
        o->t[COMBINE_SHARED] = b->shared;
    if (m->shared_inner && m->shared_gated)
        o->t[COMBINE_GATE] = b->shared_gate;
    o->t[COMBINE_OUT] = b->delta;
    o->i[COMBINE_I_TOPK] = m->topk;
}

/* ---- a layer ---- */

/*
 * What a sublayer reads: the residual stream, normed if the block has a norm there. `pending`:
 * b->delta is still to be added to it, which the norm does on its way. reader: as in hand_over.
 */
static struct ember_tensor sublayer_input(struct builder *b, enum layer_weight id, bool pending,
                                          enum layer_weight reader)
{
    struct ember_tensor w = weight(b, id);
    if (w.rank) {
        norm(b, EMBER_ROWS_TOKENS, b->x, pending ? &b->delta : NULL, w, weight(b, id + 1), b->h,
             hand_over(b, b->h, reader, b->x_tmp));
        return b->h;
    }
    b->handed = w;
    if (pending)
        add(b, b->x, b->delta);
    return b->x;
}

static void sublayer_output(struct builder *b, enum layer_weight id)
{
    struct ember_tensor w = weight(b, id), none = {0};
    if (w.rank)
        norm(b, EMBER_ROWS_TOKENS, b->delta, NULL, w, b->d->norm_bias ? weight(b, id + 1) : none,
             b->delta, none);
}

static bool same_form(const struct weight *a, const struct weight *b)
{
    struct slot_form x = layout_form(a), y = layout_form(b);
    return !memcmp(&x, &y, sizeof x);
}

/* Layers share a variant when their kinds and forms are the same; else the layer starts its own.
 */
static uint32_t layer_variant(const struct builder *b, uint32_t layer, uint32_t *variants)
{
    uint32_t next = 0;
    for (uint32_t other = 0; other < layer; other++) {
        bool same = !memcmp(&b->d->layers[other], &b->d->layers[layer], sizeof *b->d->layers);
        for (int i = 0; same && i < LAYER_WEIGHT_COUNT; i++) {
            uint32_t s = b->model->layer_slots[layer][i], t = b->model->layer_slots[other][i];
            same = s == SLOT_NONE || same_form(&b->layout->weights[s], &b->layout->weights[t]);
        }
        if (same)
            return variants[layer] = variants[other];
        next = MAX(next, variants[other] + 1);
    }
    return variants[layer] = next;
}

static void build_layer(struct builder *b, uint32_t variant)
{
    const struct desc_layer *layer = &b->d->layers[b->layer];
    const struct desc_mlp *mlp = &b->d->mlps[layer->mlp];
    struct ember_tensor in;
    segment(b, SEGMENT_LAYER, variant);
    in = sublayer_input(b, W_NORM_ATTN_IN, false, W_QKV);
    build_attention(b, &b->d->attns[layer->attn], in);
    sublayer_output(b, W_NORM_ATTN_OUT);
    in = sublayer_input(b, W_NORM_MLP_IN, true,
                        mlp->kind == MLP_MOE ? LAYER_WEIGHT_COUNT : W_GATE_UP);
    if (mlp->kind == MLP_MOE)
        build_moe(b, mlp, in);
    else
        build_dense(b, mlp, in);
    sublayer_output(b, W_NORM_MLP_OUT);
    add(b, b->x, b->delta);
    if (b->layer + 1 < b->d->info.n_layers)
        tap(b, b->layer + 1, b->x);
}

/* ---- the head ---- */

/* The final norm, of the rows that get logits; with taps of all rows first, since the last tap is
 * of those. */
static void build_final_norm(struct builder *b)
{
    struct ember_tensor w = slot_tensor(b, b->model->final_norm);
    struct ember_tensor bias = slot_tensor(b, b->model->final_norm_b), none = {0};
    struct ember_op *o;
    if (b->taps) {
        norm(b, EMBER_ROWS_TOKENS, b->x, NULL, w, bias, b->h, none);
        tap(b, b->d->info.n_layers, b->h);
    }
    o = op(b, EMBER_OP_GATHER, EMBER_ROWS_LOGITS);
    o->t[GATHER_X] = b->taps ? b->h : b->x;
    o->t[GATHER_INDEX] = io_vector(b->plan->io.rows, b->rows);
    o->t[GATHER_OUT] = b->taps ? b->final : b->gathered;
    if (!b->taps)
        norm(b, EMBER_ROWS_LOGITS, b->gathered, NULL, w, bias, b->final, none);
}

static void build_logits(struct builder *b, uint32_t first, uint32_t n)
{
    b->linear_scale = b->d->logit_scale;
    b->linear_softcap = b->d->logit_softcap;
    linear_part(b, EMBER_ROWS_LOGITS, b->final, b->model->head, first, n, (struct ember_tensor){0},
                tensor_columns(logits_tensor(b), first, n));
}

static void build_head(struct builder *b)
{
    uint32_t vocab = b->d->info.vocab_size, probe = MIN(vocab, (uint32_t)MODEL_PROBE_ROWS);
    struct ember_op *o;
    segment(b, SEGMENT_HEAD_PROBE, 0);
    build_final_norm(b);
    build_logits(b, 0, probe);
    segment(b, SEGMENT_HEAD, 0);
    if (probe < vocab)
        build_logits(b, probe, vocab - probe);
    o = op(b, EMBER_OP_ARGMAX, EMBER_ROWS_LOGITS);
    o->t[ARGMAX_X] = logits_tensor(b);
    o->t[ARGMAX_OUT] = io_vector(b->plan->io.sampled, b->rows);
    o->t[ARGMAX_PARTS] = b->argmax_parts;
    b->plan->probe_rows = probe;
    b->plan->final_hidden = b->final;
}

/* ---- scratch ---- */

static void scratch(struct builder *b, enum ember_dtype dtype, uint32_t rows, uint32_t cols,
                    struct ember_tensor *ret)
{
    if (cols && !b->failed)
        b->failed = plan_scratch(b->plan, dtype, rows, cols, ret, b->err);
}

static void scratch_attention(struct builder *b)
{
    uint32_t qkv = 0, q = 0, out = 0;
    for (uint32_t i = 0; i < b->d->info.n_layers; i++) {
        const struct desc_attn *a = &b->d->attns[b->d->layers[i].attn];
        qkv = MAX(qkv, (a->q_heads + a->kv_heads) * a->dk + a->kv_heads * a->dv);
        q = MAX(q, a->q_heads * a->dk);
        out = MAX(out, a->q_heads * a->dv);
    }
    scratch(b, EMBER_F32, b->tokens, qkv, &b->qkv);
    scratch(b, EMBER_F32, b->tokens, q, &b->q);
    scratch(b, EMBER_F32, b->tokens, out, &b->attn);
    if (b->tokens > PARTS_TOKENS)
        return;
    uint32_t widest = 0;
    for (uint32_t i = 0; i < b->d->info.n_layers; i++) {
        const struct desc_attn *a = &b->d->attns[b->d->layers[i].attn];
        widest = MAX(widest, a->q_heads * (a->dv + 2) * attention_parts(keys(b)));
    }
    scratch(b, EMBER_F32, b->tokens, widest, &b->parts);
}

static void scratch_moe(struct builder *b, const struct desc_mlp *m)
{
    uint32_t slots, hidden = b->d->info.hidden_size;
    if (__builtin_mul_overflow(b->tokens, m->topk, &slots)) {
        b->failed = error_set(b->err, EOVERFLOW, "%u tokens of %u experts each are too many",
                              b->tokens, m->topk);
        return;
    }
    scratch(b, EMBER_F32, b->tokens, m->experts, &b->route_logits);
    scratch(b, EMBER_I32, b->tokens, m->topk, &b->route_ids);
    scratch(b, EMBER_F32, b->tokens, m->topk, &b->route_weights);
    scratch(b, EMBER_F32, slots, 2 * m->inner, &b->experts);
    scratch(b, EMBER_F32, slots, m->inner, &b->experts_inner);
    scratch(b, EMBER_F32, slots, hidden, &b->experts_out);
    if (m->shared_inner)
        scratch(b, EMBER_F32, b->tokens, hidden, &b->shared);
    if (m->shared_gated)
        scratch(b, EMBER_F32, b->tokens, 1, &b->shared_gate);
}

static void scratch_mlps(struct builder *b)
{
    uint32_t first = 0, inner = 0;
    for (uint32_t i = 0; i < b->d->n_mlps; i++) {
        const struct desc_mlp *m = &b->d->mlps[i];
        uint32_t width = m->kind == MLP_MOE ? m->shared_inner : m->inner;
        first = MAX(first, m->kind == MLP_PLAIN ? width : 2 * width);
        inner = MAX(inner, width);
        if (m->kind == MLP_MOE && !b->failed)
            scratch_moe(b, m);
    }
    scratch(b, EMBER_F32, b->tokens, first, &b->gate_up);
    scratch(b, EMBER_F32, b->tokens, inner, &b->inner);
}

/* What the inputs of linears are turned into: as wide and high as the largest. */
static void scratch_inputs(struct builder *b)
{
    uint32_t rows = MAX(b->tokens, b->rows), sorted = 0, x8 = 0, scales = 0, tmp = 0, inner = 0;
    uint64_t slots = 1;
    for (uint32_t i = 0; i < b->model->n_slots; i++) {
        const struct weight *w = &b->layout->weights[i];
        uint32_t k = w->dim[w->rank - 1];
        struct x_form form = x_form(b, w);
        if (form.terms) {
            x8 = MAX(x8, form.terms * EMBER_X8_COLUMNS(k));
            scales = MAX(scales, x_segments(form, k));
        }
        if (w->order_at)
            sorted = MAX(sorted, k);
        if (w->layout == EMBER_LAYOUT_TILES && !form.terms)
            tmp = MAX(tmp, (uint32_t)EMBER_X_TMP_BYTES(k));
    }
    if (tmp && b->inner.rank)
        inner = (uint32_t)EMBER_X_TMP_BYTES(b->inner.dim[1]);
    for (uint32_t i = 0; i < b->d->n_mlps; i++)
        slots = b->d->mlps[i].kind == MLP_MOE ? MAX(slots, b->d->mlps[i].topk) : slots;
    if (rows * slots > UINT32_MAX && !b->failed)
        b->failed = error_set(b->err, EOVERFLOW, "%u tokens of %u experts each are too many", rows,
                              (uint32_t)slots);
    scratch(b, EMBER_F32, rows, sorted, &b->sorted);
    scratch(b, EMBER_I8, (uint32_t)(rows * slots), x8, &b->x8);
    scratch(b, EMBER_F32, (uint32_t)(rows * slots), scales, &b->x8_scale);
    scratch(b, EMBER_U8, (uint32_t)(rows * slots), tmp, &b->x_tmp);
    scratch(b, EMBER_U8, b->tokens, inner, &b->inner_tmp);
}

static void build_scratch(struct builder *b)
{
    uint32_t hidden = b->d->info.hidden_size;
    scratch(b, EMBER_F32, b->tokens, hidden, &b->x);
    scratch(b, EMBER_F32, b->tokens, hidden, &b->h);
    scratch(b, EMBER_F32, b->tokens, hidden, &b->delta);
    for (uint32_t i = 0; i < b->d->n_ropes; i++)
        scratch(b, EMBER_F32, b->tokens, b->d->ropes[i].rotary, &b->ropes[i]);
    scratch_attention(b);
    scratch_mlps(b);
    scratch(b, EMBER_F32, b->rows, hidden, &b->gathered);
    scratch(b, EMBER_F32, b->rows, hidden, &b->final);
    if (b->rows <= PARTS_TOKENS)
        scratch(b, EMBER_I32, b->rows, EMBER_ARGMAX_PARTS, &b->argmax_parts);
    scratch_inputs(b);
}

/* ---- */

static int build(struct builder *b)
{
    _cleanup_free_ uint32_t *variants = mem_alloc(b->d->info.n_layers, sizeof *variants);
    if (!variants)
        return error_set(b->err, ENOMEM, "no memory for %u layers", b->d->info.n_layers);
    b->plan->arena_bytes[EMBER_ARENA_WEIGHTS] = b->layout->bytes;
    b->plan->arena_bytes[EMBER_ARENA_KV] = model_kv_page(b->model, b->kv);
    build_scratch(b);
    build_embed(b);
    for (b->layer = 0; b->layer < b->d->info.n_layers && !b->failed; b->layer++)
        build_layer(b, layer_variant(b, b->layer, variants));
    build_head(b);
    return b->failed ? b->failed : plan_check(b->plan, b->err);
}

int model_plan(const struct model *model, const struct weights_layout *layout,
               const struct plan_request *request, struct plan **ret, struct error *err)
{
    const struct model_info *info = &model->desc.info;
    struct step_shape shape = {.tokens = request->tokens,
                               .seqs = request->seqs,
                               .rows = request->rows,
                               .pages = (info->max_positions + KV_PAGE_SIZE - 1) / KV_PAGE_SIZE,
                               .vocab = info->vocab_size,
                               .hidden = info->hidden_size,
                               .taps = request->taps ? info->n_layers + 1 : 0};
    _cleanup_(plan_freep) struct plan *plan = NULL;
    struct builder b = {.model = model,
                        .d = &model->desc,
                        .layout = layout,
                        .err = err,
                        .tokens = request->tokens,
                        .rows = request->rows,
                        .kv = request->kv,
                        .taps = request->taps};
    int r;
    if ((r = layout_check(model, layout, err)) < 0 || (r = plan_new(&shape, &plan, err)) < 0)
        return r;
    b.plan = plan;
    r = build(&b);
    if (r < 0)
        return r;
    *ret = TAKE(plan);
    return 0;
}
