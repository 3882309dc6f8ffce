/* SPDX-License-Identifier: Apache-2.0 */
/* Attention: QKV, heads normed and turned, K and V into their pages, the output's product. */
#include "model/plan/internal.h"

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
bool build_kv_exact(const struct builder *b)
{
    return b->d->quant.int8_x;
}

static void split(struct builder *b, const struct desc_attn *a, struct ember_tensor k,
                  struct ember_tensor v)
{
    struct ember_op *o = build_op(b, EMBER_OP_SPLIT_NORM_ROPE, EMBER_ROWS_TOKENS);
    o->t[SNR_QKV] = build_narrow(b->qkv, (a->q_heads + a->kv_heads) * a->dk + a->kv_heads * a->dv);
    o->t[SNR_Q_NORM] = build_weight(b, W_Q_NORM);
    o->t[SNR_K_NORM] = build_weight(b, W_K_NORM);
    if (a->rope >= 0) {
        o->t[SNR_ROPE] = b->ropes[a->rope];
        o->i[SNR_I_ROTARY] = b->d->ropes[a->rope].rotary;
    }
    o->t[SNR_Q] = build_narrow(b->q, a->q_heads * a->dk);
    o->t[SNR_K] = k;
    o->t[SNR_V] = v;
    o->t[SNR_KV_SLOT] = build_io(b->plan->io.kv_slot, b->tokens);
    o->i[SNR_I_Q_HEADS] = a->q_heads;
    o->i[SNR_I_KV_HEADS] = a->kv_heads;
    o->i[SNR_I_DK] = a->dk;
    o->i[SNR_I_DV] = a->dv;
    o->i[SNR_I_INTERLEAVED] = a->interleaved;
    o->i[SNR_I_NORM] = a->qk_norm;
    o->i[SNR_I_NORM_AFTER] = a->norm_after_rope;
    o->i[SNR_I_PAGE_SIZE] = KV_PAGE_SIZE;
    o->i[SNR_I_KV_EXACT] = build_kv_exact(b);
    o->f[SNR_F_EPS] = b->d->eps;
    o->f[SNR_F_W_BIAS] = b->d->norm_w_bias;
    o->f[SNR_F_V_SCALE] = a->v_scale;
}

/* Keys that the page table of a sequence has room for. */
static uint64_t keys(const struct builder *b)
{
    return (uint64_t)b->plan->io.shape.pages * KV_PAGE_SIZE;
}

void build_kv(struct builder *b, const struct desc_attn *a, struct ember_tensor *ret_k,
              struct ember_tensor *ret_v)
{
    *ret_k = kv_block(b, b->kv_at, a->kv_heads, a->dk);
    b->kv_at += model_kv_block(b->kv, a->kv_heads, a->dk);
    *ret_v = kv_block(b, b->kv_at, a->kv_heads, a->dv);
    b->kv_at += model_kv_block(b->kv, a->kv_heads, a->dv);
}

struct ember_tensor build_attend(struct builder *b, const struct desc_attn *a,
                                 struct ember_tensor k, struct ember_tensor v)
{
    struct ember_tensor out = build_narrow(b->attn, a->q_heads * a->dv);
    struct ember_op *o = build_op(b, EMBER_OP_ATTENTION, EMBER_ROWS_TOKENS);
    o->t[ATTN_Q] = build_narrow(b->q, a->q_heads * a->dk);
    o->t[ATTN_K] = k;
    o->t[ATTN_V] = v;
    o->t[ATTN_PAGES] =
        (struct ember_tensor){.arena = EMBER_ARENA_IO,
                              .dtype = EMBER_I32,
                              .rank = 2,
                              .dim = {b->plan->io.shape.seqs, b->plan->io.shape.pages},
                              .offset = b->plan->io.pages,
                              .row_stride = (uint64_t)b->plan->io.shape.pages * 4};
    o->t[ATTN_SEQ_OF] = build_io(b->plan->io.seq_of, b->tokens);
    o->t[ATTN_POSITIONS] = build_io(b->plan->io.positions, b->tokens);
    o->t[ATTN_SINKS] = build_weight(b, W_SINKS);
    o->t[ATTN_OUT] = out;
    if (b->parts.rank)
        o->t[ATTN_PARTS] =
            build_narrow(b->parts, a->q_heads * (a->dv + 2) * attention_parts(keys(b)));
    o->i[ATTN_I_Q_HEADS] = a->q_heads;
    o->i[ATTN_I_KV_HEADS] = a->kv_heads;
    o->i[ATTN_I_DK] = a->dk;
    o->i[ATTN_I_DV] = a->dv;
    o->i[ATTN_I_PAGE_SIZE] = KV_PAGE_SIZE;
    o->i[ATTN_I_WINDOW] = a->window;
    o->i[ATTN_I_KV_EXACT] = build_kv_exact(b);
    o->f[ATTN_F_SCALE] = a->scale;
    o->f[ATTN_F_SOFTCAP] = a->softcap;
    return out;
}

void build_attention(struct builder *b, const struct desc_attn *a, struct ember_tensor in)
{
    struct ember_tensor k, v;
    if (a->latent.rank) {
        build_latent(b, a, in);
        return;
    }
    build_kv(b, a, &k, &v);
    build_linear(b, in, W_QKV, W_QKV_B,
                 build_narrow(b->qkv, (a->q_heads + a->kv_heads) * a->dk + a->kv_heads * a->dv));
    split(b, a, k, v);
    build_linear(b, build_attend(b, a, k, v), W_O, W_O_B, b->delta);
}

void build_attention_room(struct builder *b)
{
    uint32_t qkv = 0, q = 0, out = 0;
    for (uint32_t i = 0; i < b->d->info.n_layers; i++) {
        const struct desc_attn *a = &b->d->attns[b->d->layers[i].attn];
        qkv = MAX(qkv, a->latent.rank ? build_latent_width(&a->latent)
                                      : (a->q_heads + a->kv_heads) * a->dk + a->kv_heads * a->dv);
        q = MAX(q, a->q_heads * a->dk);
        out = MAX(out, a->q_heads * a->dv);
    }
    build_room(b, EMBER_F32, b->tokens, qkv, &b->qkv);
    build_room(b, EMBER_F32, b->tokens, q, &b->q);
    build_room(b, EMBER_F32, b->tokens, out, &b->attn);
    build_latent_room(b);
    if (b->tokens > PARTS_TOKENS)
        return;
    uint32_t widest = 0;
    for (uint32_t i = 0; i < b->d->info.n_layers; i++) {
        const struct desc_attn *a = &b->d->attns[b->d->layers[i].attn];
        widest = MAX(widest, a->q_heads * (a->dv + 2) * attention_parts(keys(b)));
    }
    build_room(b, EMBER_F32, b->tokens, widest, &b->parts);
}
