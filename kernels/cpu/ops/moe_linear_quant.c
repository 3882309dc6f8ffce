/* SPDX-License-Identifier: Apache-2.0 */
/* moe_linear over FP8 weights; as moe_linear.c, with the tiles of tile_quant.h. */
#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/ops/moe_sort.h"
#include "kernels/cpu/ops/tile_quant.h"

/* The matrix of expert e: N rows of each operand behind those of the expert before. */
INLINE struct quant_matrix moe_matrix(const uint64_t *args, size_t e)
{
    const size_t first = e * args[MOEA_N];
    return (struct quant_matrix){.w = arg_pointer(args[MOEA_W]) + first * args[MOEA_W_STRIDE],
                                 .scale = arg_pointer(args[MOEQ_SCALES]) +
                                          first * args[MOEQ_SCALES_STRIDE],
                                 .w_stride = args[MOEA_W_STRIDE],
                                 .scale_stride = args[MOEQ_SCALES_STRIDE],
                                 .scale_dtype = (enum ember_dtype)args[MOEQ_SCALES_DTYPE],
                                 .K = args[MOEA_K],
                                 .group = args[MOEQ_GROUP]};
}

INLINE void moe_quant_expert(const uint64_t *args, size_t e, size_t first, const uint16_t *slots,
                             size_t n_slots, struct range range)
{
    const size_t topk = args[MOEA_TOPK];
    const struct quant_matrix q = moe_matrix(args, e);
    const char *b = arg_pointer(args[MOEA_B]);
    const struct post post = {b ? b + e * args[MOEA_B_STRIDE] : NULL,
                              (enum ember_dtype)args[MOEA_B_DTYPE], 1.0f, 0.0f};
    for (size_t s = 0, m; s < n_slots; s += m) {
        m = tile_height(n_slots - s);
        const float *xs[TILE_M];
        float *outs[TILE_M];
        for (size_t i = 0; i < m; i++) {
            size_t slot = first + slots[s + i];
            size_t row = args[MOEA_PER_SLOT] ? slot : slot / topk;
            xs[i] = (const float *)(arg_pointer(args[MOEA_X]) + row * args[MOEA_X_STRIDE]);
            outs[i] = (float *)(arg_pointer(args[MOEA_OUT]) + slot * args[MOEA_OUT_STRIDE]);
        }
        quant_rows(m, xs, &q, outs, range.first, range.end, &post);
    }
}

KERNEL(moe_linear_fp8)
{
    const size_t E = args[MOEA_E], n_slots = arg_rows(args) * args[MOEA_TOPK];
    struct range range = block_range(args[MOEA_N], block, n_blocks);
    uint16_t order[MOE_CHUNK];
    uint32_t start[ROUTE_MAX_EXPERTS + 2];
    for (size_t first = 0; first < n_slots; first += MOE_CHUNK) {
        size_t n = n_slots - first < MOE_CHUNK ? n_slots - first : MOE_CHUNK;
        moe_sort(args, first, n, order, start);
        for (size_t e = 0; e < E; e++)
            moe_quant_expert(args, e, first, order + start[e], start[e + 1] - start[e], range);
    }
}
