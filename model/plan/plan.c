/* SPDX-License-Identifier: Apache-2.0 */
/* A whole plan: embedding, layers, head, over scratch that is laid out once. */
#include "model/plan/internal.h"

#include <errno.h>
#include <string.h>

/*
 * What a sublayer reads: the residual stream, normed if the block has a norm there. `pending`:
 * b->delta is still to be added to it, which the norm does on its way. reader: as in hand_over.
 */
static struct ember_tensor sublayer_input(struct builder *b, enum layer_weight id, bool pending,
                                          enum layer_weight reader)
{
    struct ember_tensor w = build_weight(b, id);
    if (w.rank) {
        build_norm(b, EMBER_ROWS_TOKENS, b->x, pending ? &b->delta : NULL, w,
                   build_weight(b, id + 1), b->h, build_hand_over(b, b->h, reader, b->x_tmp, true));
        return b->h;
    }
    b->handed.x = w;
    if (pending)
        build_add(b, b->x, b->delta);
    return b->x;
}

static void sublayer_output(struct builder *b, enum layer_weight id)
{
    struct ember_tensor w = build_weight(b, id), none = {0};
    if (w.rank)
        build_norm(b, EMBER_ROWS_TOKENS, b->delta, NULL, w,
                   b->d->norm_bias ? build_weight(b, id + 1) : none, b->delta, NULL);
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

/* Who alone reads what attention begins with, as in hand_over. */
static enum layer_weight attention_reader(const struct desc_attn *a)
{
    return a->latent.rank && !a->latent.q_rank ? LAYER_WEIGHT_COUNT : W_QKV;
}

static void layer(struct builder *b, uint32_t variant)
{
    const struct desc_layer *layer = &b->d->layers[b->layer];
    const struct desc_mlp *mlp = &b->d->mlps[layer->mlp];
    struct ember_tensor in;
    build_segment(b, SEGMENT_LAYER, variant);
    const struct desc_attn *attn = &b->d->attns[layer->attn];
    in = sublayer_input(b, W_NORM_ATTN_IN, false, attention_reader(attn));
    build_attention(b, attn, in);
    sublayer_output(b, W_NORM_ATTN_OUT);
    in = sublayer_input(b, W_NORM_MLP_IN, true,
                        mlp->kind == MLP_MOE ? LAYER_WEIGHT_COUNT : W_GATE_UP);
    if (mlp->kind == MLP_MOE)
        build_moe(b, mlp, in);
    else
        build_mlp(b, mlp, in);
    sublayer_output(b, W_NORM_MLP_OUT);
    build_add(b, b->x, b->delta);
    if (b->layer + 1 < b->d->info.n_layers)
        build_tap(b, b->layer + 1, b->x);
}

static void room(struct builder *b)
{
    uint32_t hidden = b->d->info.hidden_size;
    build_room(b, EMBER_F32, b->tokens, hidden, &b->x);
    build_room(b, EMBER_F32, b->tokens, hidden, &b->h);
    build_room(b, EMBER_F32, b->tokens, hidden, &b->delta);
    for (uint32_t i = 0; i < b->d->n_ropes; i++)
        build_room(b, EMBER_F32, b->tokens, b->d->ropes[i].rotary, &b->ropes[i]);
    build_attention_room(b);
    build_mlp_room(b);
    build_room(b, EMBER_F32, b->rows, hidden, &b->gathered);
    build_room(b, EMBER_F32, b->rows, hidden, &b->final);
    if (b->rows <= PARTS_TOKENS)
        build_room(b, EMBER_I32, b->rows, EMBER_ARGMAX_PARTS, &b->argmax_parts);
    build_linear_room(b);
}

static int build(struct builder *b)
{
    _cleanup_free_ uint32_t *variants = mem_alloc(b->d->info.n_layers, sizeof *variants);
    if (!variants)
        return error_set(b->err, ENOMEM, "no memory for %u layers", b->d->info.n_layers);
    b->plan->arena_bytes[EMBER_ARENA_WEIGHTS] = b->layout->bytes;
    b->plan->arena_bytes[EMBER_ARENA_KV] = model_kv_page(b->model, b->kv);
    room(b);
    build_embed(b);
    for (b->layer = 0; b->layer < b->d->info.n_layers && !b->failed; b->layer++)
        layer(b, layer_variant(b, b->layer, variants));
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
                        .linear_scale = 1,
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
