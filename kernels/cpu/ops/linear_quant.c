/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear over quantised weights: out[rows, N] = cap(scale * (x[rows, K] . w[N, K]^T + b)); and
 * embed out of a table that is one. Blocks of linear split N. For many rows of x, rows of w become
 * floats once; where those are too long, a block takes as many rows of w as stay in the
 * second-level cache, as linear.c does.
 */
#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/ops/tile_quant.h"

#define LINEAR_CACHE_BYTES (384u << 10)

INLINE struct quant_matrix linear_matrix(const uint64_t *args)
{
    return (struct quant_matrix){.w = arg_pointer(args[LIN_W]),
                                 .scale = arg_pointer(args[LINQ_SCALES]),
                                 .zero = arg_pointer(args[LINQ_ZEROS]),
                                 .w_stride = args[LIN_W_STRIDE],
                                 .scale_stride = args[LINQ_SCALES_STRIDE],
                                 .zero_stride = args[LINQ_ZEROS_STRIDE],
                                 .scale_dtype = (enum ember_dtype)args[LINQ_SCALES_DTYPE],
                                 .K = args[LIN_K],
                                 .group = args[LINQ_GROUP]};
}

#define EXPAND_K 4096 /* TILE_N rows of it fit the second-level cache */

/* Once for all forms: the tiles of float weights are as many again. */
__attribute__((noinline)) static void expanded_rows(size_t m, const float *const *xs,
                                                    const float *w, size_t K, float *const *outs,
                                                    size_t count, const struct tile_post *post)
{
    tile_rows(m, EMBER_F32, xs, (const char *)w, K * sizeof *w, K, outs, 0, count, post);
}

/* Many rows of x: TILE_N rows of w at a time are turned into floats once for all of them. */
INLINE void linear_expanded(const uint64_t *args, const enum ember_quant quant,
                            const struct quant_matrix *q, const struct tile_post *post,
                            struct range range)
{
    const size_t rows = arg_rows(args);
    const size_t b_size = post->b_dtype == EMBER_F32 ? 4 : 2;
    float w[TILE_N * EXPAND_K];
    for (size_t n = range.first; n < range.end; n += TILE_N) {
        const size_t count = range.end - n < TILE_N ? range.end - n : TILE_N;
        struct tile_post here = *post;
        if (post->b)
            here.b = (const char *)post->b + n * b_size;
        for (size_t j = 0; j < count; j++)
            quant_expand(quant, q, n + j, w + j * q->K);
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

/* quant EMBER_QUANT_NONE: int8 x with int8 w. */
INLINE void linear_quant(const uint64_t *args, uint32_t block, uint32_t n_blocks,
                         const enum ember_quant quant)
{
    const size_t rows = arg_rows(args);
    const char *x = arg_pointer(args[LIN_X]), *x_scale = arg_pointer(args[LINQ_X_SCALE]);
    char *out = arg_pointer(args[LIN_OUT]);
    const struct quant_matrix q = linear_matrix(args);
    const struct tile_post post = {arg_pointer(args[LIN_B]), (enum ember_dtype)args[LIN_B_DTYPE],
                                   arg_float(args[LIN_SCALE]), arg_float(args[LIN_SOFTCAP])};
    struct range range = block_range(args[LIN_N], block, n_blocks);
    if (quant != EMBER_QUANT_NONE && rows > TILE_M && q.K <= EXPAND_K) {
        linear_expanded(args, quant, &q, &post, range);
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
            const char *xs[TILE_M];
            float *outs[TILE_M], scales[TILE_M];
            for (size_t i = 0; i < m; i++) {
                xs[i] = x + (r + i) * args[LIN_X_STRIDE];
                outs[i] = (float *)(out + (r + i) * args[LIN_OUT_STRIDE]);
                if (quant == EMBER_QUANT_NONE)
                    scales[i] = *(const float *)(x_scale + (r + i) * args[LINQ_X_SCALE_STRIDE]);
            }
            if (quant == EMBER_QUANT_NONE)
                int8_rows(m, (const int8_t *const *)xs, scales, &q, outs, n, end, &post);
            else
                quant_rows(m, quant, (const float *const *)xs, &q, outs, n, end, &post);
        }
    }
}

/* Rows of the table as floats, times the op's scale. */
INLINE void embed_quant(const uint64_t *args, uint32_t block, uint32_t n_blocks,
                        const enum ember_quant quant)
{
    const uint64_t *forms = args + EMBQ_SCALES - LINQ_SCALES;
    const int32_t *tokens = (const int32_t *)arg_pointer(args[EMB_TOKENS]);
    const vf scale = v_set(arg_float(args[EMB_SCALE]));
    const struct quant_matrix table = {.w = arg_pointer(args[EMB_TABLE]),
                                       .scale = arg_pointer(forms[LINQ_SCALES]),
                                       .zero = arg_pointer(forms[LINQ_ZEROS]),
                                       .w_stride = args[EMB_TABLE_STRIDE],
                                       .scale_stride = forms[LINQ_SCALES_STRIDE],
                                       .zero_stride = forms[LINQ_ZEROS_STRIDE],
                                       .scale_dtype = (enum ember_dtype)forms[LINQ_SCALES_DTYPE],
                                       .K = args[EMB_D],
                                       .group = forms[LINQ_GROUP]};
    struct range range = block_range(arg_rows(args), block, n_blocks);
    for (size_t r = range.first; r < range.end; r++) {
        uint32_t token = (uint32_t)tokens[r];
        float *row = (float *)(arg_pointer(args[EMB_OUT]) + r * args[EMB_OUT_STRIDE]);
        quant_expand(quant, &table, token < args[EMB_V] ? token : 0, row);
        for (size_t i = 0; i < table.K; i += VL) {
            size_t left = V_LEFT(i, table.K);
            v_put(row + i, v_mul(scale, v_get(row + i, left)), left);
        }
    }
}

KERNEL(embed_int4)
{
    embed_quant(args, block, n_blocks, EMBER_QUANT_INT4);
}
KERNEL(embed_int8)
{
    embed_quant(args, block, n_blocks, EMBER_QUANT_INT8);
}
KERNEL(linear_int4)
{
    linear_quant(args, block, n_blocks, EMBER_QUANT_INT4);
}
KERNEL(linear_fp4)
{
    linear_quant(args, block, n_blocks, EMBER_QUANT_FP4);
}
KERNEL(linear_int8)
{
    linear_quant(args, block, n_blocks, EMBER_QUANT_INT8);
}
KERNEL(linear_fp8)
{
    linear_quant(args, block, n_blocks, EMBER_QUANT_FP8);
}
KERNEL(linear_int8x8)
{
    linear_quant(args, block, n_blocks, EMBER_QUANT_NONE);
}
