/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear over FP8 weights: out[rows, N] = cap(scale * (x[rows, K] . w[N, K]^T + b)). Blocks
 * split N. For many rows of x, rows of w become floats once; where those are too long, a block
 * takes as many rows of w as stay in the second-level cache, as linear.c does.
 */
#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/ops/tile_quant.h"

#define LINEAR_CACHE_BYTES (384u << 10)

INLINE struct quant_matrix linear_matrix(const uint64_t *args)
{
    return (struct quant_matrix){.w = arg_pointer(args[LIN_W]),
                                 .scale = arg_pointer(args[LINQ_SCALES]),
                                 .w_stride = args[LIN_W_STRIDE],
                                 .scale_stride = args[LINQ_SCALES_STRIDE],
                                 .scale_dtype = (enum ember_dtype)args[LINQ_SCALES_DTYPE],
                                 .K = args[LIN_K],
                                 .group = args[LINQ_GROUP]};
}

#define EXPAND_K 4096 /* TILE_N rows of it fit the second-level cache */

/* Once for all forms: the tiles of float weights are as many again. */
__attribute__((noinline)) static void expanded_rows(size_t m, const float *const *xs,
                                                    const float *w, size_t K, float *const *outs,
                                                    size_t count, const struct post *post)
{
    tile_rows(m, EMBER_F32, xs, (const char *)w, K * sizeof *w, K, outs, 0, count, post);
}

/* Many rows of x: TILE_N rows of w at a time are turned into floats once for all of them. */
INLINE void linear_expanded(const uint64_t *args, const struct quant_matrix *q,
                            const struct post *post, struct range range)
{
    const size_t rows = arg_rows(args);
    const size_t b_size = post->b_dtype == EMBER_F32 ? 4 : 2;
    float w[TILE_N * EXPAND_K];
    for (size_t n = range.first; n < range.end; n += TILE_N) {
        const size_t count = range.end - n < TILE_N ? range.end - n : TILE_N;
        struct post here = *post;
        if (post->b)
            here.b = (const char *)post->b + n * b_size;
        for (size_t j = 0; j < count; j++)
            quant_expand(q, n + j, w + j * q->K);
        for (size_t r = 0, m; r < rows; r += m) {
            m = tile_height(rows - r);
            const float *xs[TILE_M];
            float *outs[TILE_M];
            for (size_t i = 0; i < m; i++) {
                xs[i] = (const float *)(arg_pointer(args[LIN_X]) + (r + i) * args[LIN_X_STRIDE]);
                outs[i] =
                    (float *)(arg_pointer(args[LIN_OUT]) + (r + i) * args[LIN_OUT_STRIDE]) + n;
            }
            expanded_rows(m, xs, w, q->K, outs, count, &here);
        }
    }
}

KERNEL(linear_fp8)
{
    const size_t rows = arg_rows(args);
    const struct quant_matrix q = linear_matrix(args);
    const struct post post = {arg_pointer(args[LIN_B]), (enum ember_dtype)args[LIN_B_DTYPE],
                              arg_float(args[LIN_SCALE]), arg_float(args[LIN_SOFTCAP])};
    struct range range = block_range(args[LIN_N], block, n_blocks);
    if (rows > TILE_M && q.K <= EXPAND_K) {
        linear_expanded(args, &q, &post, range);
        return;
    }
    size_t step =
        rows <= TILE_M ? range.end - range.first : LINEAR_CACHE_BYTES / q.w_stride & ~(size_t)3;
    if (step < TILE_N)
        step = TILE_N;
    for (size_t n = range.first; n < range.end; n += step) {
        size_t end = range.end - n < step ? range.end : n + step;
        for (size_t r = 0, m; r < rows; r += m) {
            m = tile_height(rows - r);
            const float *xs[TILE_M];
            float *outs[TILE_M];
            for (size_t i = 0; i < m; i++) {
                xs[i] = (const float *)(arg_pointer(args[LIN_X]) + (r + i) * args[LIN_X_STRIDE]);
                outs[i] = (float *)(arg_pointer(args[LIN_OUT]) + (r + i) * args[LIN_OUT_STRIDE]);
            }
            quant_rows(m, xs, &q, outs, n, end, &post);
        }
    }
}
