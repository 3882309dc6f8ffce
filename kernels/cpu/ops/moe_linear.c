/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_linear: out[slot, N] = x[row of slot, K] . w[ids[slot], N, K]^T + b[ids[slot], N]. Blocks
 * split N.
 *
 * Slots are sorted by expert first (a counting sort over up to MOE_CHUNK slots), so that a block
 * reads its part of an expert's weights once for all the slots that chose it.
 */
#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/ops/moe_sort.h"
#include "kernels/cpu/ops/tile.h"

#ifdef SPEC_K
#define MOE_K_DIM SPEC_K
#else
#define MOE_K_DIM args[MOEA_K]
#endif

INLINE void moe_expert(const uint64_t *args, const enum ember_dtype dtype, size_t e, size_t first,
                       const uint16_t *slots, size_t n_slots, struct range range)
{
    const char *x = arg_pointer(args[MOEA_X]);
    char *out = arg_pointer(args[MOEA_OUT]);
    const size_t topk = args[MOEA_TOPK];
    const char *w = arg_pointer(args[MOEA_W]) + e * args[MOEA_W_EXPERT_STRIDE];
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
            xs[i] = (const float *)(x + row * args[MOEA_X_STRIDE]);
            outs[i] = (float *)(out + slot * args[MOEA_OUT_STRIDE]);
        }
        tile_rows(m, dtype, xs, w, args[MOEA_W_STRIDE], MOE_K_DIM, outs, range.first, range.end,
                  &post);
    }
}

INLINE void moe_linear(const uint64_t *args, uint32_t block, uint32_t n_blocks,
                       const enum ember_dtype dtype)
{
    const size_t E = args[MOEA_E], n_slots = arg_rows(args) * args[MOEA_TOPK];
    struct range range = block_range(args[MOEA_N], block, n_blocks);
    uint16_t order[MOE_CHUNK];
    uint32_t start[ROUTE_MAX_EXPERTS + 2];
    for (size_t first = 0; first < n_slots; first += MOE_CHUNK) {
        size_t n = n_slots - first < MOE_CHUNK ? n_slots - first : MOE_CHUNK;
        moe_sort(args, first, n, order, start);
        for (size_t e = 0; e < E; e++)
            moe_expert(args, dtype, e, first, order + start[e], start[e + 1] - start[e], range);
    }
}

KERNEL(moe_linear_f32)
{
    moe_linear(args, block, n_blocks, EMBER_F32);
}
KERNEL(moe_linear_f16)
{
    moe_linear(args, block, n_blocks, EMBER_F16);
}
