/* SPDX-License-Identifier: Apache-2.0 */
/* A whole plan: its IO layout, its segments, each op. */
#include "kernels/plan_check/internal.h"

#include <errno.h>
#include <math.h>
#include <string.h>

static void (*const checks[EMBER_OP_COUNT])(struct check *c) = {
    [EMBER_OP_EMBED] = check_embed,
    [EMBER_OP_NORM] = check_norm,
    [EMBER_OP_ADD] = check_add,
    [EMBER_OP_LINEAR] = check_linear,
    [EMBER_OP_ROPE_TABLE] = check_rope_table,
    [EMBER_OP_SPLIT_NORM_ROPE] = check_split_norm_rope,
    [EMBER_OP_ATTENTION] = check_attention,
    [EMBER_OP_GLU] = check_glu,
    [EMBER_OP_ACT] = check_act,
    [EMBER_OP_MOE_ROUTE] = check_moe_route,
    [EMBER_OP_MOE_LINEAR] = check_moe_linear,
    [EMBER_OP_MOE_COMBINE] = check_moe_combine,
    [EMBER_OP_GATHER] = check_gather,
    [EMBER_OP_COPY] = check_copy,
    [EMBER_OP_ARGMAX] = check_argmax,
    [EMBER_OP_PERMUTE] = check_permute,
    [EMBER_OP_QUANTIZE] = check_quantize,
    [EMBER_OP_SPLIT_LATENT] = check_split_latent,
};

static int check_op(const struct plan *plan, uint32_t index, struct error *err)
{
    const struct ember_op *op = &plan->ops[index];
    struct check c = {.plan = plan, .op = op};
    if (op->kind >= EMBER_OP_COUNT || op->rows > EMBER_ROWS_LOGITS)
        return error_set(err, EINVAL, "plan: op %u is of kind %u, rows %u: not known", index,
                         op->kind, op->rows);
    c.n = op->rows == EMBER_ROWS_LOGITS ? plan->io.shape.rows : plan->io.shape.tokens;
    for (int f = 0; f < EMBER_OP_FLOATS; f++)
        if (!isfinite(op->f[f]))
            check_fail(&c, "float attribute %d is not finite", f);
    for (int s = 0; s < EMBER_OP_TENSORS; s++)
        if (op->t[s].rank && op->t[s].arena != EMBER_ARENA_KV)
            check_place(&c, "an operand", &op->t[s]);
    if (!c.failed)
        checks[op->kind](&c);
    if (c.failed)
        return error_set(err, EINVAL, "plan: segment %u, op %u (%s): %s", op->segment, index,
                         op_name(op->kind), c.what);
    return 0;
}

/* Segments cut the ops without gap or overlap, in order. */
static int check_segments(const struct plan *plan, struct error *err)
{
    uint32_t at = 0;
    for (uint32_t s = 0; s < plan->n_segments; s++) {
        const struct plan_segment *segment = &plan->segments[s];
        if (segment->kind > SEGMENT_HEAD)
            return error_set(err, EINVAL, "plan: segment %u is of kind %u", s, segment->kind);
        if (segment->first != at || segment->count > plan->n_ops - at)
            return error_set(err, EINVAL, "plan: segment %u has ops %u + %u of %u, expected %u", s,
                             segment->first, segment->count, plan->n_ops, at);
        for (uint32_t i = 0; i < segment->count; i++, at++)
            if (plan->ops[at].segment != s)
                return error_set(err, EINVAL, "plan: op %u says segment %u but lies in %u", at,
                                 plan->ops[at].segment, s);
    }
    if (at != plan->n_ops)
        return error_set(err, EINVAL, "plan: %u of %u ops lie in no segment", plan->n_ops - at,
                         plan->n_ops);
    return 0;
}

int plan_check(const struct plan *plan, struct error *err)
{
    struct step_io io;
    int r = step_io_layout(&plan->io.shape, &io, err);
    if (r < 0)
        return r;
    /* The shape was copied; behind it stand offsets, without padding among them. */
    if (memcmp(&io.tokens, &plan->io.tokens, sizeof io - offsetof(struct step_io, tokens)) ||
        plan->arena_bytes[EMBER_ARENA_IO] < io.bytes)
        return error_set(err, EINVAL, "plan: its IO layout is not that of its step shape");
    r = check_segments(plan, err);
    for (uint32_t i = 0; r == 0 && i < plan->n_ops; i++)
        r = check_op(plan, i, err);
    return r;
}
