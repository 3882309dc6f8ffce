/* SPDX-License-Identifier: Apache-2.0 */
/* A mixture of experts: routing, the experts' products, the shared expert, what combines them. */
#include "model/plan/internal.h"

#include <errno.h>

static void route(struct builder *b, const struct desc_mlp *m, struct ember_tensor in)
{
    struct ember_op *o;
    build_linear(b, in, W_ROUTER, W_ROUTER_B, b->route_logits);
    o = build_op(b, EMBER_OP_MOE_ROUTE, EMBER_ROWS_TOKENS);
    o->t[ROUTE_LOGITS] = b->route_logits;
    o->t[ROUTE_BIAS] = build_weight(b, W_ROUTE_BIAS);
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
    build_stack_linear(b, x, b->model->layer_slots[b->layer][id], build_weight(b, id + 1),
                       b->route_ids, m->topk, per_slot, out);
}

/* The expert that every token passes; its output stands in b->shared. */
static void shared(struct builder *b, const struct desc_mlp *m, struct ember_tensor in)
{
    struct ember_tensor first = build_narrow(b->gate_up, 2 * m->shared_inner);
    struct ember_tensor inner = build_narrow(b->inner, m->shared_inner);
    build_gated(b, m, in, W_SHARED_GATE_UP, W_SHARED_GATE_UP, first, inner, W_SHARED_DOWN);
    build_linear(b, inner, W_SHARED_DOWN, W_SHARED_DOWN, b->shared);
    if (m->shared_gated)
        build_linear(b, in, W_SHARED_SIGMOID, W_SHARED_SIGMOID, b->shared_gate);
}

void build_moe(struct builder *b, const struct desc_mlp *m, struct ember_tensor in)
{
    struct ember_op *o;
    route(b, m, in);
    if (m->shared_inner)
        shared(b, m, in);
    expert_linear(b, m, in, W_EXPERTS_GATE_UP, b->experts, false);
    build_glu(b, m, b->experts, b->experts_inner, m->topk);
    expert_linear(b, m, b->experts_inner, W_EXPERTS_DOWN, b->experts_out, true);
    o = build_op(b, EMBER_OP_MOE_COMBINE, EMBER_ROWS_TOKENS);
    o->t[COMBINE_Y] = b->experts_out;
    o->t[COMBINE_WEIGHTS] = b->route_weights;
    if (m->shared_inner)
        o->t[COMBINE_SHARED] = b->shared;
    if (m->shared_inner && m->shared_gated)
        o->t[COMBINE_GATE] = b->shared_gate;
    o->t[COMBINE_OUT] = b->delta;
    o->i[COMBINE_I_TOPK] = m->topk;
}

void build_moe_room(struct builder *b, const struct desc_mlp *m)
{
    uint32_t slots, hidden = b->d->info.hidden_size;
    if (__builtin_mul_overflow(b->tokens, m->topk, &slots)) {
        b->failed = error_set(b->err, EOVERFLOW, "%u tokens of %u experts each are too many",
                              b->tokens, m->topk);
        return;
    }
    build_room(b, EMBER_F32, b->tokens, m->experts, &b->route_logits);
    build_room(b, EMBER_I32, b->tokens, m->topk, &b->route_ids);
    build_room(b, EMBER_F32, b->tokens, m->topk, &b->route_weights);
    build_room(b, EMBER_F32, slots, 2 * m->inner, &b->experts);
    build_room(b, EMBER_F32, slots, m->inner, &b->experts_inner);
    build_room(b, EMBER_F32, slots, hidden, &b->experts_out);
    if (m->shared_inner)
        build_room(b, EMBER_F32, b->tokens, hidden, &b->shared);
    if (m->shared_gated)
        build_room(b, EMBER_F32, b->tokens, 1, &b->shared_gate);
}
