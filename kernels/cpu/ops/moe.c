/* SPDX-License-Identifier: Apache-2.0 */
/* moe_route (blocks split rows) and moe_combine (blocks split rows, then pieces of a row). */
#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/simd.h"

/* Softmax over n logits in place; NaN stays NaN. */
INLINE void softmax_row(float *x, size_t n)
{
    float top = -__builtin_inff(), total = 0;
    for (size_t i = 0; i < n; i++)
        top = x[i] > top ? x[i] : top;
    vf sum = v_zero();
    for (size_t i = 0; i < n; i += VL) {
        size_t left = V_LEFT(i, n);
        vf e = v_exp(v_sub(v_get(x + i, left), v_set(top)));
        v_put(x + i, e, left);
        sum = v_add(sum, v_get(x + i, left)); /* read back: lanes of the tail are 0 again */
    }
    total = v_sum(sum);
    for (size_t i = 0; i < n; i++)
        x[i] = x[i] / total;
}

INLINE int route_taken(const uint64_t *taken, size_t i)
{
    return (int)(taken[i / 64] >> i % 64 & 1);
}
INLINE void route_take(uint64_t *taken, size_t i)
{
    taken[i / 64] |= UINT64_C(1) << i % 64;
}

/* The best of n not taken, the lowest index of equals; a NaN counts as -infinity. Some index is
 * free. */
INLINE size_t route_best(const float *choice, size_t n, const uint64_t *taken)
{
    size_t best = n;
    float top = 0;
    for (size_t i = 0; i < n; i++) {
        if (route_taken(taken, i))
            continue;
        float c = choice[i] == choice[i] ? choice[i] : -__builtin_inff();
        if (best == n || c > top) {
            best = i;
            top = c;
        }
    }
    return best;
}

/* Takes the experts of all groups but the best top_groups out of the choice. */
INLINE void route_groups(const uint64_t *args, const float *choice, size_t E, uint64_t *taken)
{
    const size_t groups = args[RTE_GROUPS], size = E / groups;
    float group_score[ROUTE_MAX_GROUPS];
    uint64_t kept = 0;
    for (size_t g = 0; g < groups; g++) {
        float best = -__builtin_inff(), second = best;
        for (size_t i = g * size; i < (g + 1) * size; i++) {
            if (choice[i] > best) {
                second = best;
                best = choice[i];
            } else if (choice[i] > second) {
                second = choice[i];
            }
        }
        group_score[g] = args[RTE_BIAS] ? best + second : best;
    }
    for (size_t i = 0; i < args[RTE_TOP_GROUPS]; i++)
        route_take(&kept, route_best(group_score, groups, &kept));
    for (size_t i = 0; i < E; i++)
        if (!route_taken(&kept, i / size))
            route_take(taken, i);
}

INLINE void route_row(const uint64_t *args, size_t r)
{
    const size_t E = args[RTE_E], topk = args[RTE_TOPK];
    const float *logits =
        (const float *)(arg_pointer(args[RTE_LOGITS]) + r * args[RTE_LOGITS_STRIDE]);
    int32_t *ids = (int32_t *)(arg_pointer(args[RTE_IDS]) + r * args[RTE_IDS_STRIDE]);
    float *weights = (float *)(arg_pointer(args[RTE_WEIGHTS]) + r * args[RTE_WEIGHTS_STRIDE]);
    const void *bias = arg_pointer(args[RTE_BIAS]);
    float score[ROUTE_MAX_EXPERTS], biased[ROUTE_MAX_EXPERTS];
    uint64_t taken[ROUTE_MAX_EXPERTS / 64] = {0};
    for (size_t i = 0; i < E; i++)
        score[i] = logits[i];
    if (args[RTE_KIND] == EMBER_ROUTE_SOFTMAX)
        softmax_row(score, E);
    if (args[RTE_KIND] == EMBER_ROUTE_SIGMOID)
        for (size_t i = 0; i < E; i += VL)
            v_put(score + i, v_sigmoid(v_get(score + i, V_LEFT(i, E))), V_LEFT(i, E));
    for (size_t i = 0; i < E; i++)
        biased[i] =
            score[i] + (bias ? w_at(bias, i, (enum ember_dtype)args[RTE_BIAS_DTYPE]) : 0.0f);
    if (args[RTE_GROUPS] > 1)
        route_groups(args, biased, E, taken);
    for (size_t j = 0; j < topk; j++) {
        size_t best = route_best(biased, E, taken);
        route_take(taken, best);
        ids[j] = (int32_t)best;
        weights[j] = score[best];
    }
    if (args[RTE_KIND] == EMBER_ROUTE_TOPK_SOFTMAX)
        softmax_row(weights, topk);
    float total = 1e-20f;
    for (size_t j = 0; j < topk; j++)
        total = total + weights[j];
    for (size_t j = 0; j < topk; j++)
        weights[j] =
            (args[RTE_NORMALIZE] ? weights[j] / total : weights[j]) * arg_float(args[RTE_SCALE]);
}

KERNEL(moe_route)
{
    struct range range = block_range(arg_rows(args), block, n_blocks);
    for (size_t r = range.first; r < range.end; r++)
        route_row(args, r);
}

#define COMBINE_PIECE 256

INLINE void combine_piece(const uint64_t *args, size_t r, size_t first, size_t end)
{
    const size_t topk = args[CMB_TOPK];
    const char *y = arg_pointer(args[CMB_Y]) + r * topk * args[CMB_Y_STRIDE];
    const float *weights =
        (const float *)(arg_pointer(args[CMB_WEIGHTS]) + r * args[CMB_WEIGHTS_STRIDE]);
    const float *shared = NULL;
    float *out = (float *)(arg_pointer(args[CMB_OUT]) + r * args[CMB_OUT_STRIDE]);
    vf gate = v_set(1.0f);
    if (args[CMB_SHARED])
        shared = (const float *)(arg_pointer(args[CMB_SHARED]) + r * args[CMB_SHARED_STRIDE]);
    if (args[CMB_GATE])
        gate = v_sigmoid(
            v_set(*(const float *)(arg_pointer(args[CMB_GATE]) + r * args[CMB_GATE_STRIDE])));
    for (size_t i = first; i < end; i += VL) {
        size_t left = V_LEFT(i, end);
        vf sum = v_zero();
        for (size_t j = 0; j < topk; j++)
            sum = v_fma(v_set(weights[j]),
                        v_get((const float *)(y + j * args[CMB_Y_STRIDE]) + i, left), sum);
        if (shared)
            sum = v_fma(gate, v_get(shared + i, left), sum);
        v_put(out + i, sum, left);
    }
}

KERNEL(moe_combine)
{
    const size_t D = args[CMB_D], pieces = (D + COMBINE_PIECE - 1) / COMBINE_PIECE;
    struct range range = block_range(arg_rows(args) * pieces, block, n_blocks);
    for (size_t p = range.first; p < range.end; p++) {
        size_t first = p % pieces * COMBINE_PIECE;
        combine_piece(args, p / pieces, first,
                      D - first < COMBINE_PIECE ? D : first + COMBINE_PIECE);
    }
}
