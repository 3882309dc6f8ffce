/* SPDX-License-Identifier: Apache-2.0 */
/* A mixture of experts. */
#include "kernels/plan_check/internal.h"

/* Expert ids [rows, k]; `k` comes from the attributes of the op. */
static void check_ids(struct check *c, int slot, enum access access, uint64_t k)
{
    check_operand(c, slot, "ids", access, 2, c->n, k, 0);
    check_dtype(c, slot, "ids", EMBER_I32);
}

void check_moe_route(struct check *c)
{
    uint32_t experts = check_cols(c, ROUTE_LOGITS);
    int64_t k = check_int(c, ROUTE_I_TOPK, "experts a token", 1, experts ? experts : 1);
    int64_t groups = check_int(c, ROUTE_I_GROUPS, "groups", 0, experts ? experts : 1);
    check_int(c, ROUTE_I_KIND, "router kind", EMBER_ROUTE_SOFTMAX, EMBER_ROUTE_TOPK_SOFTMAX);
    check_int(c, ROUTE_I_NORMALIZE, "normalize", 0, 1);
    if (groups > 1) {
        int64_t top = check_int(c, ROUTE_I_TOP_GROUPS, "top groups", 1, groups);
        if (experts % groups || top * (experts / groups) < k)
            check_fail(c, "%u experts in %lld groups, %lld of them eligible, for %lld a token",
                       experts, (long long)groups, (long long)top, (long long)k);
    }
    check_floats(c, ROUTE_LOGITS, "logits", IN, c->n, experts);
    if (!check_absent(c, ROUTE_BIAS))
        check_float_weight(c, ROUTE_BIAS, "bias", 1, experts, 0, 0);
    check_ids(c, ROUTE_IDS, OUT, (uint64_t)k);
    check_floats(c, ROUTE_WEIGHTS, "weights", OUT, c->n, (uint64_t)k);
    check_distinct(c, ROUTE_IDS, -1);
    check_distinct(c, ROUTE_WEIGHTS, -1);
}

void check_moe_linear(struct check *c)
{
    static const struct weight_slots slots_of = {
        MOE_X,       MOE_W,       MOE_W_SCALE,  MOE_W_ZERO, MOE_X_SCALE,   MOE_X_TMP,
        MOE_I_QUANT, MOE_I_GROUP, MOE_I_LAYOUT, MOE_I_K,    MOE_I_X_GROUP, MOE_I_X_TERMS,
    };
    const struct ember_tensor *w = &c->op->t[MOE_W];
    int64_t k = check_int(c, MOE_I_TOPK, "experts a token", 1, HEADS_MAX);
    uint64_t slots = c->n * (uint64_t)k;
    bool per_slot = check_int(c, MOE_I_PER_SLOT, "per slot", 0, 1) == 1;
    check_product(c, &slots_of, per_slot ? slots : c->n, 3, w->dim[0], w->dim[1]);
    if (!check_absent(c, MOE_B))
        check_float_weight(c, MOE_B, "bias", 2, w->dim[0], w->dim[1], 0);
    if (check_absent(c, MOE_IDS)) {
        if (!per_slot || (uint64_t)k != w->dim[0])
            check_fail(c, "%u matrices for %lld slots that say of which they are", w->dim[0],
                       (long long)k);
    } else {
        check_ids(c, MOE_IDS, IN, (uint64_t)k);
        check_routed_ids(c);
    }
    check_floats(c, MOE_OUT, "out", OUT, slots, w->dim[1]);
    check_distinct(c, MOE_OUT, -1);
}

void check_moe_combine(struct check *c)
{
    uint32_t d = check_cols(c, COMBINE_OUT);
    int64_t k = check_int(c, COMBINE_I_TOPK, "experts a token", 1, HEADS_MAX);
    check_floats(c, COMBINE_Y, "y", IN, c->n * (uint64_t)k, d);
    check_floats(c, COMBINE_WEIGHTS, "weights", IN, c->n, (uint64_t)k);
    if (!check_absent(c, COMBINE_SHARED))
        check_floats(c, COMBINE_SHARED, "shared", IN, c->n, d);
    if (!check_absent(c, COMBINE_GATE))
        check_floats(c, COMBINE_GATE, "gate", IN, c->n, 1);
    check_floats(c, COMBINE_OUT, "out", OUT, c->n, d);
    check_distinct(c, COMBINE_OUT, COMBINE_SHARED);
}
