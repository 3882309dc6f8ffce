/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The builder: from a description to a plan. A file for each part of a block (ops.c what all use,
 * linear.c, attention.c, mlp.c, moe.c, ends.c) and plan.c for the whole; which ops come out depends
 * on what the description says is there.
 *
 * Scratch is laid out once: x, the residual stream [T, D]; h, a normed copy; delta, what a sublayer
 * adds; and the sublayers' own buffers, as wide as the widest layer needs. All layers use the same
 * ones. Rope tables are written by the embedding's segment and read by every layer.
 *
 * Nothing here returns an error: the first one is kept in `failed`, and what follows does nothing.
 */
#ifndef EMBER_MODEL_PLAN_INTERNAL_H
#define EMBER_MODEL_PLAN_INTERNAL_H

#include "model/model_private.h"

/* Steps of so few tokens or rows have room for attention (argmax) in parts; larger ones keep all
 * threads busy by their rows. */
#define PARTS_TOKENS 16

/* The form in which x meets a quantised weight as integers (ember/op.h). */
struct x_form {
    uint32_t terms, group; /* terms 0: as floats */
};

/* Floats that are handed over in the backend's form, and where; x of rank 0: none. */
struct handed {
    struct ember_tensor x, to, scale; /* scale: of integers */
    struct x_form form;
};

struct builder {
    const struct model *model;
    const struct desc *d; /* the model's */
    const struct weights_layout *layout;
    struct plan *plan;
    struct error *err;
    int failed;            /* 0, or the first error, which err says */
    uint32_t tokens, rows; /* T, R */
    bool taps;
    enum ember_dtype kv;
    uint32_t layer; /* the one that is being built */
    uint64_t kv_at; /* where the layer's K block stands in a page */
    /* scratch; rank 0: this plan has no use for it */
    struct ember_tensor x, h, delta, qkv, q, attn, latent, heads, parts, gate_up, inner,
        ropes[DESC_ROPES];
    struct ember_tensor route_logits, route_ids, route_weights, experts, experts_inner, experts_out,
        shared, shared_gate;
    struct ember_tensor gathered, final, argmax_parts;
    double linear_scale, linear_softcap; /* of a linear's output: 1 and 0 but for the head's */
    /* x of a linear whose weight asks for another form; room for the backend's own, of an MLP's
     * inner activations beside that of what it reads */
    struct ember_tensor sorted, x8, x8_scale, x_tmp, inner_tmp;
    struct handed handed; /* what was last handed over */
};

/* ---- ops.c ---- */

/* A new op of the plan, to be filled in. Never NULL: once something has failed, one that goes
 * nowhere. */
struct ember_op *build_op(struct builder *b, enum ember_op_kind kind, enum ember_rows rows);

/* Ops from here on belong to a new segment. */
void build_segment(struct builder *b, enum segment_kind kind, uint32_t variant);

/* A scratch buffer [rows, cols]; *ret is left as it is when cols is 0. */
void build_room(struct builder *b, enum ember_dtype dtype, uint32_t rows, uint32_t cols,
                struct ember_tensor *ret);

/* A resident tensor as an operand; rank 0 for SLOT_NONE. */
struct ember_tensor build_slot(const struct builder *b, uint32_t slot);

/* Scales or zero points of a quantised slot, `at` bytes behind its codes; rank 0 when `at` is 0. */
struct ember_tensor build_slot_groups(const struct builder *b, uint32_t slot, uint64_t at,
                                      uint8_t dtype);

/* A weight of the layer that is being built; rank 0: it has none. */
struct ember_tensor build_weight(const struct builder *b, enum layer_weight id);

/* n int32 of a step's inputs or outputs. */
struct ember_tensor build_io(uint64_t offset, uint32_t n);

/* The first columns of a buffer that is as wide as its widest user; rows stay packed for this one.
 */
struct ember_tensor build_narrow(struct ember_tensor t, uint32_t cols);

/* The bytes of a buffer as rows of `cols`, as many as there is room for. */
struct ember_tensor build_rows(struct ember_tensor t, uint32_t cols);

/* out = norm(x); delta, if not NULL, is added to x before. bias: rank 0 for none. to: as out is
 * handed over, or NULL. The op, so that it can be told otherwise. */
struct ember_op *build_norm(struct builder *b, enum ember_rows rows, struct ember_tensor x,
                            const struct ember_tensor *delta, struct ember_tensor w,
                            struct ember_tensor bias, struct ember_tensor out,
                            const struct handed *to);

/* x += delta, scaled as the model scales its residuals. */
void build_add(struct builder *b, struct ember_tensor x, struct ember_tensor delta);

/* x is hidden state `index` of the step's outputs, where those are asked for. */
void build_tap(struct builder *b, uint32_t index, struct ember_tensor x);

/* ---- linear.c ---- */

struct x_form build_x_form(const struct builder *b, const struct weight *w);

/* x as integers, in b->x8 and b->x8_scale; *ret_scale is the latter. hand_over: for linears alone.
 */
struct ember_tensor build_quantize(struct builder *b, enum ember_rows rows, struct ember_tensor x,
                                   struct x_form form, uint32_t repeat, bool hand_over,
                                   struct ember_tensor *ret_scale);

/* What a linear over bf16 or small floats in tiles needs beside its x; rank 0 for other weights. */
struct ember_tensor build_x_tmp(const struct builder *b, const struct weight *w);

/*
 * x, which is about to be made, goes to the linear over a layer's weight, and to nobody else: how
 * it is handed over, of bf16 weights in `room`, of those that want integers only if those can be
 * made. LAYER_WEIGHT_COUNT: to others, too.
 */
const struct handed *build_hand_over(struct builder *b, struct ember_tensor x,
                                     enum layer_weight reader, struct ember_tensor room,
                                     bool integers);

/* out = x w^T + bias with rows [first, first + n) of a slot that is in one piece. The op, so that
 * more can be asked of it. */
struct ember_op *build_linear_rows(struct builder *b, enum ember_rows rows, struct ember_tensor x,
                                   uint32_t slot, uint32_t first, uint32_t n,
                                   struct ember_tensor bias, struct ember_tensor out);

/* The same of any slot: parts whose columns are in an order of their own are multiplied one by
 * one. */
void build_linear_part(struct builder *b, enum ember_rows rows, struct ember_tensor x,
                       uint32_t slot, uint32_t first, uint32_t n, struct ember_tensor bias,
                       struct ember_tensor out);

/* The same of a whole weight of this layer; bias == id: none. */
void build_linear(struct builder *b, struct ember_tensor x, enum layer_weight id,
                  enum layer_weight bias, struct ember_tensor out);

/*
 * Slots of each row of x, or a row for each of `slots` (per_slot), times the matrices of a weight's
 * stack that ids name; ids of rank 0: each its own. bias: rank 0 for none.
 */
void build_stack_linear(struct builder *b, struct ember_tensor x, uint32_t slot,
                        struct ember_tensor bias, struct ember_tensor ids, uint32_t slots,
                        bool per_slot, struct ember_tensor out);

/* What the inputs of linears are turned into: as wide and high as the largest. After all other
 * rooms. */
void build_linear_room(struct builder *b);

/* ---- attention.c, mlp.c, moe.c: sublayers, from their input to b->delta, and their scratch ----
 */

void build_attention(struct builder *b, const struct desc_attn *a, struct ember_tensor in);
void build_attention_room(struct builder *b);
/* K and V of a layer in a page; later calls are for what stands behind them. */
void build_kv(struct builder *b, const struct desc_attn *a, struct ember_tensor *ret_k,
              struct ember_tensor *ret_v);
/* Whether K and V must be kept exactly (split_norm_rope). */
bool build_kv_exact(const struct builder *b);
/* attention of b->q over K and V of all heads; returns what comes out, in b->attn. */
struct ember_tensor build_attend(struct builder *b, const struct desc_attn *a,
                                 struct ember_tensor k, struct ember_tensor v);

/* latent.c: the same of attention over latents. Width of what is made of x, for b->qkv. */
void build_latent(struct builder *b, const struct desc_attn *a, struct ember_tensor in);
uint32_t build_latent_width(const struct desc_latent *l);
void build_latent_room(struct builder *b);

void build_mlp(struct builder *b, const struct desc_mlp *m, struct ember_tensor in);
/* Of all MLPs, those of experts, too. */
void build_mlp_room(struct builder *b);

void build_moe(struct builder *b, const struct desc_mlp *m, struct ember_tensor in);
void build_moe_room(struct builder *b, const struct desc_mlp *m);

/* out = act(gate) * up of x = [gate, up]. repeat: rows of experts for each token, or 0. */
void build_glu(struct builder *b, const struct desc_mlp *m, struct ember_tensor x,
               struct ember_tensor out, uint32_t repeat);

/*
 * The first half of a gated MLP: gate and up, as wide together as `first`, to `inner`, which goes
 * to the linear over `reader`.
 */
void build_gated(struct builder *b, const struct desc_mlp *m, struct ember_tensor x,
                 enum layer_weight id, enum layer_weight bias, struct ember_tensor first,
                 struct ember_tensor inner, enum layer_weight reader);

/* ---- ends.c ---- */

/* The embedding's segment: b->x and the rope tables. */
void build_embed(struct builder *b);

/* Both segments of the head: final norm, logits, the largest of each row. */
void build_head(struct builder *b);

#endif
