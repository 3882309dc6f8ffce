/* SPDX-License-Identifier: Apache-2.0 */
/* What an op relies on must be what an op before it has written. */
#include "kernels/plan_check/internal.h"

#include <string.h>

/* The operands that a kind writes, KV apart; ends with -1. */
static const int8_t outputs[EMBER_OP_COUNT][5] = {
    [EMBER_OP_EMBED] = {EMBED_OUT, -1},
    [EMBER_OP_NORM] = {NORM_OUT, NORM_X, NORM_OUT_X, NORM_OUT_X_SCALE, -1},
    [EMBER_OP_ADD] = {ADD_X, -1},
    [EMBER_OP_LINEAR] = {LINEAR_OUT, LINEAR_X_TMP, LINEAR_GATE_UP, LINEAR_OUT_X, -1},
    [EMBER_OP_ROPE_TABLE] = {ROPE_OUT, -1},
    [EMBER_OP_SPLIT_NORM_ROPE] = {SNR_Q, -1},
    [EMBER_OP_ATTENTION] = {ATTN_OUT, -1},
    [EMBER_OP_GLU] = {GLU_OUT, -1},
    [EMBER_OP_ACT] = {ACT_OUT, -1},
    [EMBER_OP_MOE_ROUTE] = {ROUTE_IDS, ROUTE_WEIGHTS, -1},
    [EMBER_OP_MOE_LINEAR] = {MOE_OUT, -1},
    [EMBER_OP_MOE_COMBINE] = {COMBINE_OUT, -1},
    [EMBER_OP_GATHER] = {GATHER_OUT, -1},
    [EMBER_OP_COPY] = {COPY_OUT, -1},
    [EMBER_OP_ARGMAX] = {ARGMAX_OUT, -1},
    [EMBER_OP_PERMUTE] = {PERMUTE_OUT, -1},
    [EMBER_OP_QUANTIZE] = {QUANTIZE_OUT, QUANTIZE_SCALE, -1},
    [EMBER_OP_SPLIT_LATENT] = {SPLIT_OUT, -1},
};

static bool writes_over(const struct ember_op *op, const struct ember_tensor *t)
{
    for (const int8_t *slot = outputs[op->kind]; *slot >= 0; slot++) {
        bool reads =
            *slot == LINEAR_X_TMP && op->kind == EMBER_OP_LINEAR && op->i[LINEAR_I_X_READY];
        if (!reads && check_overlap(&op->t[*slot], t))
            return true;
    }
    return false;
}

static bool same_tensor(const struct ember_tensor *a, const struct ember_tensor *b)
{
    return !memcmp(a, b, sizeof *a);
}

/* Whether `from` hands x and its other form over to c->op. */
static bool hands_over(const struct check *c, const struct ember_op *from,
                       const struct ember_tensor *x, const struct ember_tensor *other)
{
    const int64_t *i = c->op->i;
    switch (from->kind) {
    case EMBER_OP_NORM:
        if (from->t[NORM_OUT_X_SCALE].rank)
            return same_tensor(&from->t[NORM_OUT_X], x) &&
                   same_tensor(&from->t[NORM_OUT_X_SCALE], other) &&
                   from->t[NORM_X].dim[1] == i[LINEAR_I_K] &&
                   from->i[NORM_I_X_GROUP] == i[LINEAR_I_X_GROUP] &&
                   from->i[NORM_I_X_TERMS] == i[LINEAR_I_X_TERMS];
        return same_tensor(&from->t[NORM_OUT], x) && same_tensor(&from->t[NORM_OUT_X], other);
    case EMBER_OP_LINEAR:
        return same_tensor(&from->t[LINEAR_OUT], x) && same_tensor(&from->t[LINEAR_OUT_X], other);
    case EMBER_OP_QUANTIZE:
        return same_tensor(&from->t[QUANTIZE_OUT], x) &&
               same_tensor(&from->t[QUANTIZE_SCALE], other) && from->i[QUANTIZE_I_HAND_OVER] &&
               from->t[QUANTIZE_X].dim[1] == i[LINEAR_I_K] &&
               from->i[QUANTIZE_I_GROUP] == i[LINEAR_I_X_GROUP] &&
               from->i[QUANTIZE_I_TERMS] == i[LINEAR_I_X_TERMS];
    default:
        return false;
    }
}

void check_handed_over(struct check *c)
{
    bool integer = !check_absent(c, LINEAR_X_SCALE);
    const struct ember_tensor *x = &c->op->t[LINEAR_X];
    const struct ember_tensor *other = &c->op->t[integer ? LINEAR_X_SCALE : LINEAR_X_TMP];
    for (const struct ember_op *op = c->op; other->rank && op-- > c->plan->ops && !c->failed;) {
        if (op->segment != c->op->segment)
            break;
        if (!writes_over(op, x) && !writes_over(op, other))
            continue;
        if (op->rows == c->op->rows && hands_over(c, op, x, other))
            return;
        break;
    }
    check_fail(c, "x was not handed over by an op before it");
}

void check_routed_ids(struct check *c)
{
    const struct ember_tensor *ids = &c->op->t[MOE_IDS];
    for (const struct ember_op *op = c->op; op-- > c->plan->ops && !c->failed;) {
        if (op->segment != c->op->segment)
            break;
        if (!writes_over(op, ids))
            continue;
        if (op->kind == EMBER_OP_MOE_ROUTE && op->rows == c->op->rows &&
            same_tensor(&op->t[ROUTE_IDS], ids) &&
            op->t[ROUTE_LOGITS].dim[1] <= c->op->t[MOE_W].dim[0])
            return;
        break;
    }
    check_fail(c, "ids are not those of a router before it");
}
