/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention over latents (struct desc_latent): all heads read the one latent of a token, so that a
 * step reads that once for all of them, and prompts and single tokens are computed alike. Per head,
 * what makes keys of latents is multiplied with q, and what makes values with what comes out.
 */
#include "model/plan/internal.h"

/* Heads of a buffer [T, H stride] from column `first` on, `cols` of each: a row for each of them.
 */
static struct ember_tensor heads_of(const struct builder *b, struct ember_tensor t,
                                    const struct desc_attn *a, uint32_t stride, uint32_t cols)
{
    t.dim[0] = b->tokens * a->q_heads;
    t.dim[1] = cols;
    t.row_stride = (uint64_t)stride * dtype_size(t.dtype);
    return t;
}

/* out = x times the matrix of each head. */
static void heads_linear(struct builder *b, const struct desc_attn *a, struct ember_tensor x,
                         enum layer_weight id, struct ember_tensor out)
{
    const struct ember_tensor none = {0};
    build_stack_linear(b, x, b->model->layer_slots[b->layer][id], none, none, a->q_heads, true,
                       out);
}

uint32_t build_latent_width(const struct desc_latent *l)
{
    return l->q_rank + l->rank + l->rotary;
}

/* q [T, H (nope + rotary)], of its own latent or of x; kv: the rest of what is made of x. */
static struct ember_tensor queries(struct builder *b, const struct desc_attn *a,
                                   struct ember_tensor in, struct ember_tensor *ret_kv)
{
    const struct desc_latent *l = &a->latent;
    struct ember_tensor made = build_narrow(b->qkv, build_latent_width(l)),
                        q = build_narrow(b->heads, a->q_heads * (l->nope + l->rotary));
    build_linear(b, in, W_QKV, W_QKV, made);
    *ret_kv = tensor_columns(made, l->q_rank, l->rank + l->rotary);
    if (l->q_rank) {
        struct ember_tensor latent = build_narrow(b->latent, l->q_rank);
        build_norm(b, EMBER_ROWS_TOKENS, tensor_columns(made, 0, l->q_rank), NULL,
                   build_weight(b, W_Q_NORM), (struct ember_tensor){0}, latent,
                   build_hand_over(b, latent, W_Q_UP, b->x_tmp, true))
            ->f[NORM_F_EPS] = l->eps;
        in = latent;
    }
    build_linear(b, in, W_Q_UP, W_Q_UP, q);
    return q;
}

static void split(struct builder *b, const struct desc_attn *a, struct ember_tensor q,
                  struct ember_tensor kv, struct ember_tensor k, struct ember_tensor v)
{
    const struct desc_latent *l = &a->latent;
    struct ember_op *o = build_op(b, EMBER_OP_SPLIT_LATENT, EMBER_ROWS_TOKENS);
    o->t[SPLIT_Q] = q;
    o->t[SPLIT_KV] = kv;
    o->t[SPLIT_NORM] = build_weight(b, W_K_NORM);
    o->t[SPLIT_ROPE] = b->ropes[a->rope];
    o->t[SPLIT_OUT] = build_narrow(b->q, a->q_heads * a->dk);
    o->t[SPLIT_K] = k;
    o->t[SPLIT_V] = v;
    o->t[SPLIT_KV_SLOT] = build_io(b->plan->io.kv_slot, b->tokens);
    o->i[SPLIT_I_HEADS] = a->q_heads;
    o->i[SPLIT_I_NOPE] = l->nope;
    o->i[SPLIT_I_ROTARY] = l->rotary;
    o->i[SPLIT_I_RANK] = l->rank;
    o->i[SPLIT_I_INTERLEAVED] = a->interleaved;
    o->i[SPLIT_I_PAGE_SIZE] = KV_PAGE_SIZE;
    o->i[SPLIT_I_KV_EXACT] = build_kv_exact(b);
    o->f[SPLIT_F_EPS] = l->eps;
    o->f[SPLIT_F_W_BIAS] = b->d->norm_w_bias;
}

void build_latent(struct builder *b, const struct desc_attn *a, struct ember_tensor in)
{
    const struct desc_latent *l = &a->latent;
    struct ember_tensor k, v, q, kv, out, values = build_narrow(b->heads, a->q_heads * l->v);
    build_kv(b, a, &k, &v);
    q = queries(b, a, in, &kv);
    split(b, a, q, kv, k, v);
    heads_linear(b, a, heads_of(b, q, a, l->nope + l->rotary, l->nope), W_K_UP,
                 heads_of(b, b->q, a, a->dk, l->rank));
    out = build_attend(b, a, k, v);
    heads_linear(b, a, heads_of(b, out, a, l->rank, l->rank), W_V_UP,
                 heads_of(b, values, a, l->v, l->v));
    build_linear(b, values, W_O, W_O, b->delta);
}

void build_latent_room(struct builder *b)
{
    uint32_t latent = 0, heads = 0;
    for (uint32_t i = 0; i < b->d->info.n_layers; i++) {
        const struct desc_attn *a = &b->d->attns[b->d->layers[i].attn];
        const struct desc_latent *l = &a->latent;
        if (!l->rank)
            continue;
        latent = MAX(latent, l->q_rank);
        heads = MAX(heads, a->q_heads * MAX(l->nope + l->rotary, l->v));
    }
    build_room(b, EMBER_F32, b->tokens, latent, &b->latent);
    build_room(b, EMBER_F32, b->tokens, heads, &b->heads);
}
