/* SPDX-License-Identifier: Apache-2.0 */
/* Reference: moe_route, moe_linear, moe_combine. */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "kernels/ref/private.h"

static void softmax(double *x, int64_t n)
{
    double top = -INFINITY, total = 0;
    for (int64_t i = 0; i < n; i++)
        top = fmax(top, x[i]);
    for (int64_t i = 0; i < n; i++)
        total += x[i] = exp(x[i] - top);
    for (int64_t i = 0; i < n; i++)
        x[i] /= total;
}

/* Index of the best value not taken, lowest of equals. */
static int64_t best_free(const double *x, const bool *taken, int64_t n)
{
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || x[i] > x[best]))
            best = i;
    return best;
}

/* Takes the experts of groups that are not among the best. */
static void limit_groups(const struct ref *r, const double *choice, bool *taken, int64_t E)
{
    int64_t groups = r->op->i[ROUTE_I_GROUPS], size = E / groups;
    double *score = calloc((size_t)groups, sizeof(*score));
    bool *kept = calloc((size_t)groups, sizeof(*kept));
    if (!score || !kept)
        abort();
    for (int64_t g = 0; g < groups; g++) {
        double best = -INFINITY, second = -INFINITY;
        for (int64_t i = g * size; i < (g + 1) * size; i++) {
            second = fmax(second, fmin(best, choice[i]));
            best = fmax(best, choice[i]);
        }
        score[g] = r->op->t[ROUTE_BIAS].rank ? best + second : best;
    }
    for (int64_t i = 0; i < r->op->i[ROUTE_I_TOP_GROUPS]; i++)
        kept[best_free(score, kept, groups)] = true;
    for (int64_t i = 0; i < E; i++)
        taken[i] = !kept[i / size];
    free(score);
    free(kept);
}

static void route_row(const struct ref *r, uint32_t row, double *score, double *choice, bool *taken)
{
    const int64_t *attribute = r->op->i;
    int64_t E = r->op->t[ROUTE_LOGITS].dim[1], topk = attribute[ROUTE_I_TOPK];
    const float *logits = ref_row(r, ROUTE_LOGITS, row);
    int32_t *ids = ref_row(r, ROUTE_IDS, row);
    float *out = ref_row(r, ROUTE_WEIGHTS, row);
    double weights[64], total = 1e-20;
    for (int64_t i = 0; i < E; i++) {
        score[i] =
            attribute[ROUTE_I_KIND] == EMBER_ROUTE_SIGMOID ? ref_sigmoid(logits[i]) : logits[i];
        taken[i] = false;
    }
    if (attribute[ROUTE_I_KIND] == EMBER_ROUTE_SOFTMAX)
        softmax(score, E);
    for (int64_t i = 0; i < E; i++)
        choice[i] = score[i] + ref_weight(r, ROUTE_BIAS, 0, (uint64_t)i, 0);
    if (attribute[ROUTE_I_GROUPS] > 1)
        limit_groups(r, choice, taken, E);
    for (int64_t j = 0; j < topk; j++) {
        int64_t best = best_free(choice, taken, E);
        taken[best] = true;
        ids[j] = (int32_t)best;
        weights[j] = score[best];
    }
    if (attribute[ROUTE_I_KIND] == EMBER_ROUTE_TOPK_SOFTMAX)
        softmax(weights, topk);
    for (int64_t j = 0; j < topk; j++)
        total += weights[j];
    for (int64_t j = 0; j < topk; j++)
        out[j] = (float)(weights[j] / (attribute[ROUTE_I_NORMALIZE] ? total : 1) *
                         r->op->f[ROUTE_F_SCALE]);
}

/* logits [T, E], bias [E] -> ids i32 [T, k], weights [T, k]; k <= 64 */
void ref_moe_route(const struct ref *r)
{
    size_t E = r->op->t[ROUTE_LOGITS].dim[1];
    double *score = calloc(E, sizeof(*score)), *choice = calloc(E, sizeof(*choice));
    bool *taken = calloc(E, sizeof(*taken));
    if (!score || !choice || !taken)
        abort();
    for (uint32_t row = 0; row < r->rows; row++)
        route_row(r, row, score, choice, taken);
    free(score);
    free(choice);
    free(taken);
}

/* x [T or T k, K], w [E, N, K], b [E, N], ids [T, k] (absent: 0 .. k - 1) -> out [T k, N] */
void ref_moe_linear(const struct ref *r)
{
    uint32_t topk = (uint32_t)r->op->i[MOE_I_TOPK];
    uint64_t N = r->op->t[MOE_W].dim[1];
    const int64_t *i = r->op->i;
    const struct ref_quant q = {
        MOE_X,
        MOE_X_SCALE,
        MOE_W,
        MOE_W_SCALE,
        MOE_W_ZERO,
        i[MOE_I_QUANT],
        i[MOE_I_GROUP],
        i[MOE_I_LAYOUT],
        r->op->t[MOE_X_SCALE].rank ? (uint64_t)i[MOE_I_K] : r->op->t[MOE_X].dim[1],
        i[MOE_I_X_GROUP],
        i[MOE_I_X_TERMS],
    };
    double *w = calloc(q.K, sizeof(*w));
    if (!w)
        abort();
    for (uint32_t slot = 0; slot < r->rows * topk; slot++) {
        const int32_t *ids = ref_row(r, MOE_IDS, slot / topk);
        int32_t e = ids ? ids[slot % topk] : (int32_t)(slot % topk);
        uint32_t x_row = r->op->i[MOE_I_PER_SLOT] ? slot : slot / topk;
        float *out = ref_row(r, MOE_OUT, slot);
        for (uint64_t n = 0; n < N; n++) {
            ref_weights(r, &q, (uint64_t)e, n, w);
            out[n] = (float)(ref_weight(r, MOE_B, (uint64_t)e, n, 0) +
                             ref_dot(r, &q, x_row, (uint64_t)e, n, w));
        }
    }
    free(w);
}

/* y [T k, D], weights [T, k], shared [T, D], gate [T, 1] -> out [T, D] */
void ref_moe_combine(const struct ref *r)
{
    uint32_t topk = (uint32_t)r->op->i[COMBINE_I_TOPK];
    for (uint32_t row = 0; row < r->rows; row++) {
        const float *weights = ref_row(r, COMBINE_WEIGHTS, row),
                    *shared = ref_row(r, COMBINE_SHARED, row);
        const float *gate = ref_row(r, COMBINE_GATE, row);
        float *out = ref_row(r, COMBINE_OUT, row);
        for (uint32_t d = 0; d < r->op->t[COMBINE_OUT].dim[1]; d++) {
            double sum = 0;
            for (uint32_t j = 0; j < topk; j++)
                sum +=
                    (double)weights[j] * ((const float *)ref_row(r, COMBINE_Y, row * topk + j))[d];
            if (shared)
                sum += shared[d] * (gate ? ref_sigmoid(gate[0]) : 1);
            out[d] = (float)sum;
        }
    }
}
