/* SPDX-License-Identifier: Apache-2.0 */
#include "model/model_private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PARTS_MAX (1u << 20)
#define TEXT_MAX (1u << 28)

/* The first failure is kept; the adders do nothing after it. */
struct maker {
    struct model *model;
    struct error *err;
    int failed;
    uint32_t layer;
};

static const char *const weight_names[LAYER_WEIGHT_COUNT] = {
#define X(id, name) [id] = name,
    LAYER_WEIGHTS(X)
#undef X
};

/* Appends a template's name, '#' the layer and '*' the expert; returns its offset. */
static uint32_t add_text(struct maker *m, const char *prefix, const char *template, uint32_t expert,
                         const char *suffix)
{
    struct buffer *text = &m->model->text;
    const char *words[] = {prefix, template, suffix};
    uint32_t start = (uint32_t)text->len;
    int r = text->len > TEXT_MAX ? -ENOMEM : 0;
    for (size_t w = 0; w < ARRAY_LEN(words); w++)
        for (const char *s = words[w]; r == 0 && *s;) {
            size_t plain = strcspn(s, "#*");
            r = buffer_append(text, s, plain);
            s += plain;
            if (r == 0 && *s)
                r = buffer_printf(text, "%u", *s++ == '#' ? m->layer : expert);
        }
    if (r == 0)
        r = buffer_append(text, "", 1);
    if (r < 0 && !m->failed)
        m->failed = error_set(m->err, ENOMEM, "no memory for the names of layer %u", m->layer);
    return start;
}

static bool grow(struct maker *m, void **array, uint32_t count, uint32_t *cap, size_t size)
{
    uint32_t bigger = *cap ? *cap * 2 : 256;
    void *moved;
    if (m->failed)
        return false;
    if (count < *cap)
        return true;
    moved = bigger <= PARTS_MAX ? reallocarray(*array, bigger, size) : NULL;
    if (!moved) {
        m->failed = error_set(m->err, ENOMEM, "no memory for %u tensors", bigger);
        return false;
    }
    *array = moved;
    *cap = bigger;
    return true;
}

/* Opens a slot; its parts follow. Returns its number. */
static uint32_t add_slot(struct maker *m, const char *name, uint8_t rank, uint32_t d0, uint32_t d1,
                         uint32_t d2)
{
    struct model *model = m->model;
    struct slot slot = {.rank = rank, .dim = {d0, d1, d2}, .elements = 1};
    if (!grow(m, (void **)&model->slots, model->n_slots, &model->cap_slots, sizeof *model->slots))
        return SLOT_NONE;
    for (int d = 0; d < rank; d++)
        if (!size_mul(slot.elements, slot.dim[d], &slot.elements) ||
            slot.elements > INT64_MAX / 8) {
            m->failed = error_set(m->err, EOVERFLOW, "%s is too large", name);
            return SLOT_NONE;
        }
    slot.matrix = rank > 1;
    slot.name = add_text(m, "", name, 0, "");
    slot.first_part = model->n_parts;
    model->slots[model->n_slots] = slot;
    return model->n_slots++;
}

/* A part of the slot opened last, behind the parts it has. */
static void add_part(struct maker *m, uint32_t name, const void *constant, uint8_t rank,
                     uint32_t d0, uint32_t d1, uint32_t d2)
{
    struct model *model = m->model;
    struct part part = {.name = name, .constant = constant, .rank = rank, .dim = {d0, d1, d2}};
    struct slot *slot;
    if (!grow(m, (void **)&model->parts, model->n_parts, &model->cap_parts, sizeof *model->parts))
        return;
    slot = &model->slots[model->n_slots - 1];
    part.elements = 1;
    for (int d = 0; d < rank; d++)
        part.elements *= part.dim[d];
    if (slot->n_parts) {
        const struct part *last = &model->parts[model->n_parts - 1];
        part.first = last->first + last->elements;
    }
    model->parts[model->n_parts++] = part;
    slot->n_parts++;
}

uint8_t part_shape(const struct part *part, uint64_t ret[3])
{
    if (part->of_rows) {
        ret[0] = part->of_rows;
        ret[1] = part->dim[part->rank - 1];
        return 2;
    }
    for (int d = 0; d < 3; d++)
        ret[d] = part->dim[d];
    return part->rank;
}

uint64_t part_whole(const struct part *part, uint64_t *ret_before)
{
    uint64_t columns = part->dim[part->rank - 1];
    *ret_before = part->from_row * columns;
    return part->of_rows ? part->of_rows * columns : part->elements;
}

/* ---- tensors of a layer ---- */

static void open_weight(struct maker *m, enum layer_weight id, uint8_t rank, uint32_t d0,
                        uint32_t d1, uint32_t d2)
{
    char name[96];
    snprintf(name, sizeof name, "layers.%u.%s", m->layer, weight_names[id]);
    m->model->layer_slots[m->layer][id] = add_slot(m, name, rank, d0, d1, d2);
}

/* The slot opened last is one that may be quantised. */
static void mark_linear(struct maker *m)
{
    if (!m->failed)
        m->model->slots[m->model->n_slots - 1].linear = true;
}

/* The slot opened last is one where an error costs much and a bit saves nothing. */
static void mark_keep(struct maker *m)
{
    if (!m->failed)
        m->model->slots[m->model->n_slots - 1].keep = true;
}

static void layer_part(struct maker *m, const char *module, const char *suffix, uint32_t expert,
                       uint8_t rank, uint32_t d0, uint32_t d1)
{
    if (!m->failed)
        add_part(m, add_text(m, m->model->desc.names.layer, module, expert, suffix), NULL, rank, d0,
                 d1, 0);
}

static void add_vector(struct maker *m, enum layer_weight id, const char *module,
                       const char *suffix, uint32_t n)
{
    open_weight(m, id, 1, n, 0, 0);
    layer_part(m, module, suffix, 0, 1, n, 0);
}

static void add_matrix(struct maker *m, enum layer_weight id, const char *module, uint32_t n,
                       uint32_t k)
{
    open_weight(m, id, 2, n, k, 0);
    mark_linear(m);
    layer_part(m, module, ".weight", 0, 2, n, k);
}

static void add_norm(struct maker *m, enum block_norm which, enum layer_weight id)
{
    const struct desc *d = &m->model->desc;
    if (!d->names.norm[which])
        return;
    add_vector(m, id, d->names.norm[which], ".weight", d->info.hidden_size);
    if (d->norm_bias) /* the bias's id stands behind the weight's */
        add_vector(m, id + 1, d->names.norm[which], ".bias", d->info.hidden_size);
}

/* q, k and v as one tensor (rank 2: [rows, D]; rank 1: their biases). */
static void add_qkv(struct maker *m, const struct desc_attn *a, enum layer_weight id,
                    const char *suffix, uint8_t rank)
{
    const struct desc *d = &m->model->desc;
    uint32_t k = d->info.hidden_size, q_rows = a->q_heads * a->dk, k_rows = a->kv_heads * a->dk,
             v_rows = a->kv_heads * a->dv;
    open_weight(m, id, rank, q_rows + k_rows + v_rows, k, 0);
    if (rank == 2)
        mark_linear(m);
    if (d->names.qkv) {
        layer_part(m, d->names.qkv, suffix, 0, rank, q_rows + k_rows + v_rows, k);
        return;
    }
    layer_part(m, d->names.q, suffix, 0, rank, q_rows, k);
    layer_part(m, d->names.k, suffix, 0, rank, k_rows, k);
    layer_part(m, d->names.v, suffix, 0, rank, v_rows, k);
}

/*
 * What kv_up of the checkpoint [H (nope + dv), rank] makes of a latent, as one matrix a head: rows
 * of k transposed, since it is q that is multiplied with them, and rows of v.
 */
static void add_kv_up(struct maker *m, const struct desc_attn *a, enum layer_weight id)
{
    const struct desc_latent *l = &a->latent;
    const bool key = id == W_K_UP;
    const uint32_t rows = l->nope + l->v;
    if (key)
        open_weight(m, id, 3, a->q_heads, l->rank, l->nope);
    else
        open_weight(m, id, 3, a->q_heads, l->v, l->rank);
    mark_linear(m);
    for (uint32_t h = 0; h < a->q_heads && !m->failed; h++) {
        struct part *part;
        uint32_t name =
            add_text(m, m->model->desc.names.layer, m->model->desc.names.kv_up, 0, ".weight");
        if (key)
            add_part(m, name, NULL, 3, 1, l->nope, l->rank);
        else
            add_part(m, name, NULL, 2, l->v, l->rank, 0);
        if (m->failed)
            return;
        part = &m->model->parts[m->model->n_parts - 1];
        part->transposed = key;
        part->of_rows = a->q_heads * rows;
        part->from_row = h * rows + (key ? 0 : l->nope);
    }
    if (!m->failed)
        m->model->slots[m->model->n_slots - 1].heads = true;
}

/* Attention over latents: what is made of x, fused; q and, head by head, what k and v are of them.
 */
static void add_latent(struct maker *m, const struct desc_attn *a)
{
    const struct desc *d = &m->model->desc;
    const struct desc_latent *l = &a->latent;
    const uint32_t hidden = d->info.hidden_size, q_rows = a->q_heads * (l->nope + l->rotary),
                   kv_rows = l->rank + l->rotary;
    open_weight(m, W_QKV, 2, l->q_rank + kv_rows, hidden, 0);
    mark_linear(m);
    if (l->q_rank)
        layer_part(m, d->names.q_down, ".weight", 0, 2, l->q_rank, hidden);
    layer_part(m, d->names.kv_down, ".weight", 0, 2, kv_rows, hidden);
    if (l->q_rank)
        add_vector(m, W_Q_NORM, d->names.q_down_norm, ".weight", l->q_rank);
    add_vector(m, W_K_NORM, d->names.kv_down_norm, ".weight", l->rank);
    add_matrix(m, W_Q_UP, l->q_rank ? d->names.q_up : d->names.q, q_rows,
               l->q_rank ? l->q_rank : hidden);
    add_kv_up(m, a, W_K_UP);
    add_kv_up(m, a, W_V_UP);
    add_matrix(m, W_O, d->names.o, hidden, a->q_heads * l->v);
}

static void add_attention(struct maker *m, const struct desc_attn *a)
{
    const struct desc *d = &m->model->desc;
    bool row = a->qk_norm == EMBER_QK_NORM_ROW;
    add_qkv(m, a, W_QKV, ".weight", 2);
    if (a->qkv_bias)
        add_qkv(m, a, W_QKV_B, ".bias", 1);
    if (a->qk_norm != EMBER_QK_NORM_NONE) {
        add_vector(m, W_Q_NORM, d->names.q_norm, ".weight", row ? a->q_heads * a->dk : a->dk);
        add_vector(m, W_K_NORM, d->names.k_norm, ".weight", row ? a->kv_heads * a->dk : a->dk);
    }
    if (a->sinks)
        add_vector(m, W_SINKS, d->names.sinks, "", a->q_heads);
    add_matrix(m, W_O, d->names.o, d->info.hidden_size, a->q_heads * a->dv);
    if (a->o_bias)
        add_vector(m, W_O_B, d->names.o, ".bias", d->info.hidden_size);
}

/* gate and up as one tensor, or a plain MLP's first matrix alone. */
static void add_gate_up(struct maker *m, const struct desc_mlp *mlp, enum layer_weight id,
                        const char *suffix, uint8_t rank)
{
    const struct desc *d = &m->model->desc;
    uint32_t k = d->info.hidden_size, rows = mlp->inner * (mlp->kind == MLP_PLAIN ? 1 : 2);
    open_weight(m, id, rank, rows, k, 0);
    if (rank == 2)
        mark_linear(m);
    if (mlp->kind == MLP_PLAIN)
        layer_part(m, d->names.up, suffix, 0, rank, rows, k);
    else if (d->names.gate_up)
        layer_part(m, d->names.gate_up, suffix, 0, rank, rows, k);
    else {
        layer_part(m, d->names.gate, suffix, 0, rank, mlp->inner, k);
        layer_part(m, d->names.up, suffix, 0, rank, mlp->inner, k);
    }
}

static void add_dense_mlp(struct maker *m, const struct desc_mlp *mlp)
{
    const struct desc *d = &m->model->desc;
    add_gate_up(m, mlp, W_GATE_UP, ".weight", 2);
    if (mlp->bias)
        add_gate_up(m, mlp, W_GATE_UP_B, ".bias", 1);
    add_matrix(m, W_DOWN, d->names.down, d->info.hidden_size, mlp->inner);
    if (mlp->bias)
        add_vector(m, W_DOWN_B, d->names.down, ".bias", d->info.hidden_size);
}

/* All experts' matrices in one tensor [E, K, N], kept as [E, N, K]; the bias's id stands behind. */
static void add_stacked(struct maker *m, enum layer_weight id, const char *tensor,
                        const struct desc_mlp *mlp, uint32_t n, uint32_t k)
{
    open_weight(m, id, 3, mlp->experts, n, k);
    mark_linear(m);
    if (!m->failed)
        add_part(m, add_text(m, m->model->desc.names.layer, tensor, 0, ""), NULL, 3, mlp->experts,
                 k, n);
    if (!m->failed)
        m->model->parts[m->model->n_parts - 1].transposed = true;
    if (!mlp->expert_bias)
        return;
    open_weight(m, id + 1, 2, mlp->experts, n, 0);
    layer_part(m, tensor, "_bias", 0, 2, mlp->experts, n);
}

static void add_experts(struct maker *m, const struct desc_mlp *mlp)
{
    const struct desc *d = &m->model->desc;
    uint32_t k = d->info.hidden_size;
    if (d->names.experts_gate_up) {
        add_stacked(m, W_EXPERTS_GATE_UP, d->names.experts_gate_up, mlp, 2 * mlp->inner, k);
        add_stacked(m, W_EXPERTS_DOWN, d->names.experts_down, mlp, k, mlp->inner);
        return;
    }
    open_weight(m, W_EXPERTS_GATE_UP, 3, mlp->experts, 2 * mlp->inner, k);
    mark_linear(m);
    for (uint32_t e = 0; e < mlp->experts && !m->failed; e++) {
        layer_part(m, d->names.expert_gate, ".weight", e, 2, mlp->inner, k);
        layer_part(m, d->names.expert_up, ".weight", e, 2, mlp->inner, k);
    }
    open_weight(m, W_EXPERTS_DOWN, 3, mlp->experts, k, mlp->inner);
    mark_linear(m);
    for (uint32_t e = 0; e < mlp->experts && !m->failed; e++)
        layer_part(m, d->names.expert_down, ".weight", e, 2, k, mlp->inner);
}

static void add_moe(struct maker *m, const struct desc_mlp *mlp)
{
    const struct desc *d = &m->model->desc;
    uint32_t k = d->info.hidden_size, shared = mlp->shared_inner;
    add_matrix(m, W_ROUTER, d->names.router, mlp->experts, k);
    mark_keep(m);
    if (mlp->router_bias)
        add_vector(m, W_ROUTER_B, d->names.router, ".bias", mlp->experts);
    if (mlp->route_bias)
        add_vector(m, W_ROUTE_BIAS, d->names.route_bias, "", mlp->experts);
    add_experts(m, mlp);
    if (!shared)
        return;
    open_weight(m, W_SHARED_GATE_UP, 2, 2 * shared, k, 0);
    mark_linear(m);
    layer_part(m, d->names.shared_gate, ".weight", 0, 2, shared, k);
    layer_part(m, d->names.shared_up, ".weight", 0, 2, shared, k);
    add_matrix(m, W_SHARED_DOWN, d->names.shared_down, k, shared);
    if (!mlp->shared_gated)
        return;
    add_matrix(m, W_SHARED_SIGMOID, d->names.shared_sigmoid, 1, k);
    mark_keep(m);
}

static void add_layer(struct maker *m)
{
    const struct desc *d = &m->model->desc;
    const struct desc_layer *layer = &d->layers[m->layer];
    const struct desc_mlp *mlp = &d->mlps[layer->mlp];
    uint32_t first = m->model->n_slots;
    for (int i = 0; i < LAYER_WEIGHT_COUNT; i++)
        m->model->layer_slots[m->layer][i] = SLOT_NONE;
    add_norm(m, NORM_ATTN_IN, W_NORM_ATTN_IN);
    if (d->attns[layer->attn].latent.rank)
        add_latent(m, &d->attns[layer->attn]);
    else
        add_attention(m, &d->attns[layer->attn]);
    add_norm(m, NORM_ATTN_OUT, W_NORM_ATTN_OUT);
    add_norm(m, NORM_MLP_IN, W_NORM_MLP_IN);
    if (mlp->kind == MLP_MOE)
        add_moe(m, mlp);
    else
        add_dense_mlp(m, mlp);
    add_norm(m, NORM_MLP_OUT, W_NORM_MLP_OUT);
    if (!m->failed)
        m->model->slots[first].page_start = true;
}

/* ---- tensors of the model ---- */

static uint32_t add_top(struct maker *m, const char *name, const char *module, const char *suffix,
                        uint8_t rank, uint32_t d0, uint32_t d1)
{
    uint32_t slot = add_slot(m, name, rank, d0, d1, 0);
    if (!m->failed)
        add_part(m, add_text(m, "", module, 0, suffix), NULL, rank, d0, d1, 0);
    return slot;
}

static void add_embedding(struct maker *m)
{
    struct model *model = m->model;
    const struct desc *d = &model->desc;
    char name[32];
    model->embed =
        add_top(m, "embed", d->names.embed, ".weight", 2, d->info.vocab_size, d->info.hidden_size);
    if (!m->failed)
        model->slots[model->embed].table = true;
    for (uint32_t i = 0; i < d->n_ropes; i++) {
        uint32_t half = d->ropes[i].rotary / 2;
        snprintf(name, sizeof name, "rope.%u", i);
        model->ropes[i] = add_slot(m, name, 1, half, 0, 0);
        if (!m->failed)
            add_part(m, model->slots[model->ropes[i]].name, d->ropes[i].inv_freq, 1, half, 0, 0);
    }
}

static void add_head(struct maker *m)
{
    struct model *model = m->model;
    const struct desc *d = &model->desc;
    uint32_t hidden = d->info.hidden_size;
    model->final_norm = add_top(m, "final_norm", d->names.final_norm, ".weight", 1, hidden, 0);
    if (!m->failed)
        model->slots[model->final_norm].page_start = true;
    model->final_norm_b =
        d->norm_bias ? add_top(m, "final_norm_bias", d->names.final_norm, ".bias", 1, hidden, 0)
                     : SLOT_NONE;
    model->head = model->embed;
    if (d->tied)
        return;
    model->head = add_top(m, "head", d->names.head, ".weight", 2, d->info.vocab_size, hidden);
    mark_linear(m);
}

int model_make_slots(struct model *model, struct error *err)
{
    struct maker m = {.model = model, .err = err};
    model->layer_slots = mem_alloc(model->desc.info.n_layers, sizeof *model->layer_slots);
    if (!model->layer_slots)
        return error_set(err, ENOMEM, "no memory for %u layers", model->desc.info.n_layers);
    add_embedding(&m);
    for (m.layer = 0; m.layer < model->desc.info.n_layers && !m.failed; m.layer++)
        add_layer(&m);
    if (!m.failed)
        add_head(&m);
    return m.failed;
}

/* ---- names under a wrapper ---- */

static const struct {
    const char *model, *other; /* what stands for "model.", what stands before other names */
} variants[] = {
    {"model.", ""},
    {"model.language_model.", ""},
    {"language_model.model.", "language_model."},
    {"", ""},
};

bool model_part_name(const struct model *model, const struct part *part, uint32_t variant,
                     struct buffer *name)
{
    const char *plain = model_text(model, part->name);
    bool inner = !strncmp(plain, "model.", 6);
    if (variant >= ARRAY_LEN(variants))
        return false;
    name->len = 0;
    return buffer_printf(name, "%s%s", inner ? variants[variant].model : variants[variant].other,
                         inner ? plain + 6 : plain) == 0;
}
