/* SPDX-License-Identifier: Apache-2.0 */
/* MLPs: plain, or gated with the gate joined to its product. */
#include "model/plan/internal.h"

void build_glu(struct builder *b, const struct desc_mlp *m, struct ember_tensor x,
               struct ember_tensor out, uint32_t repeat)
{
    struct ember_op *o = build_op(b, EMBER_OP_GLU, EMBER_ROWS_TOKENS);
    o->t[GLU_X] = x;
    o->t[GLU_OUT] = out;
    o->i[GLU_I_ACT] = m->act;
    o->i[GLU_I_LAYOUT] = m->glu_interleaved;
    o->i[GLU_I_REPEAT] = repeat;
    o->f[GLU_F_LIMIT] = m->glu_limit;
    o->f[GLU_F_ALPHA] = m->glu_alpha;
}

void build_gated(struct builder *b, const struct desc_mlp *m, struct ember_tensor x,
                 enum layer_weight id, enum layer_weight bias, struct ember_tensor first,
                 struct ember_tensor inner, enum layer_weight reader)
{
    uint32_t slot = b->model->layer_slots[b->layer][id];
    struct ember_tensor none = {0};
    struct ember_op *o;
    if (b->layout->weights[slot].order_at) {
        build_linear(b, x, id, bias, first);
        build_glu(b, m, first, inner, 0);
        return;
    }
    o = build_linear_rows(b, EMBER_ROWS_TOKENS, x, slot, 0, b->model->slots[slot].dim[0],
                          bias == id ? none : build_weight(b, bias), inner);
    o->t[LINEAR_GATE_UP] = first;
    o->t[LINEAR_OUT_X] = build_hand_over(b, inner, reader, b->inner_tmp, false)->to;
    o->i[LINEAR_I_GLU] = m->glu_interleaved ? EMBER_GLU_PAIRS : EMBER_GLU_HALVES;
    o->i[LINEAR_I_ACT] = m->act;
    o->f[LINEAR_F_LIMIT] = m->glu_limit;
    o->f[LINEAR_F_ALPHA] = m->glu_alpha;
}

void build_mlp(struct builder *b, const struct desc_mlp *m, struct ember_tensor in)
{
    struct ember_tensor inner = build_narrow(b->inner, m->inner);
    if (m->kind == MLP_PLAIN) {
        struct ember_tensor first = build_narrow(b->gate_up, m->inner);
        struct ember_op *o;
        build_linear(b, in, W_GATE_UP, W_GATE_UP_B, first);
        o = build_op(b, EMBER_OP_ACT, EMBER_ROWS_TOKENS);
        o->t[ACT_X] = first;
        o->t[ACT_OUT] = inner;
        o->i[ACT_I_ACT] = m->act;
    } else
        build_gated(b, m, in, W_GATE_UP, W_GATE_UP_B, build_narrow(b->gate_up, 2 * m->inner), inner,
                    W_DOWN);
    build_linear(b, inner, W_DOWN, W_DOWN_B, b->delta);
}

void build_mlp_room(struct builder *b)
{
    uint32_t first = 0, inner = 0;
    for (uint32_t i = 0; i < b->d->n_mlps; i++) {
        const struct desc_mlp *m = &b->d->mlps[i];
        uint32_t width = m->kind == MLP_MOE ? m->shared_inner : m->inner;
        first = MAX(first, m->kind == MLP_PLAIN ? width : 2 * width);
        inner = MAX(inner, width);
        if (m->kind == MLP_MOE && !b->failed)
            build_moe_room(b, m);
    }
    build_room(b, EMBER_F32, b->tokens, first, &b->gate_up);
    build_room(b, EMBER_F32, b->tokens, inner, &b->inner);
}
