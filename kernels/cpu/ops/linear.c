/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear: out[rows, N] = cap(scale * (x[rows, K] . w[N, K]^T + b)). Blocks split N.
 *
 * w comes from memory once: a block takes as many rows of w as fit into half of the second-level
 * cache and runs all rows of x over them, TILE_M at a time, before it goes on.
 */
#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/ops/tile.h"

#ifdef SPEC_K
#define LINEAR_K SPEC_K
#else
#define LINEAR_K args[LIN_K]
#endif
#ifdef SPEC_N
#define LINEAR_N SPEC_N
#else
#define LINEAR_N args[LIN_N]
#endif

#define LINEAR_CACHE_BYTES (384u << 10)

INLINE void linear(const uint64_t *args, uint32_t block, uint32_t n_blocks,
                   const enum ember_dtype dtype)
{
    const size_t rows = arg_rows(args), K = LINEAR_K;
    const char *x = arg_pointer(args[LIN_X]), *w = arg_pointer(args[LIN_W]);
    char *out = arg_pointer(args[LIN_OUT]);
    const size_t w_stride = args[LIN_W_STRIDE];
    const struct post post = {arg_pointer(args[LIN_B]), (enum ember_dtype)args[LIN_B_DTYPE],
                              arg_float(args[LIN_SCALE]), arg_float(args[LIN_SOFTCAP])};
    struct range range = block_range(LINEAR_N, block, n_blocks);
    size_t step =
        rows <= TILE_M ? range.end - range.first : LINEAR_CACHE_BYTES / w_stride & ~(size_t)3;
    if (step < TILE_N)
        step = TILE_N;
    for (size_t n = range.first; n < range.end; n += step) {
        size_t end = range.end - n < step ? range.end : n + step;
        for (size_t r = 0, m; r < rows; r += m) {
            m = tile_height(rows - r);
            const float *xs[TILE_M];
            float *outs[TILE_M];
            for (size_t i = 0; i < m; i++) {
                xs[i] = (const float *)(x + (r + i) * args[LIN_X_STRIDE]);
                outs[i] = (float *)(out + (r + i) * args[LIN_OUT_STRIDE]);
            }
            tile_rows(m, dtype, xs, w, w_stride, K, outs, n, end, &post);
        }
    }
}

KERNEL(linear_f32)
{
    linear(args, block, n_blocks, EMBER_F32);
}
KERNEL(linear_f16)
{
    linear(args, block, n_blocks, EMBER_F16);
}
