/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dot-product tiles: M rows of x against NT rows of w along K, accumulators in registers.
 *
 * The order of every output: lane l adds x[k] w[k] for k = l, l + VL, ... (the tail by masked
 * loads, so that absent lanes add 0), then v_sum's tree. It is the same for each tile shape, so a
 * row alone and a row in a batch agree to the bit.
 */
#ifndef EMBER_KERNELS_CPU_TILE_H
#define EMBER_KERNELS_CPU_TILE_H

#include "kernels/cpu/ops/post.h"

#if EMBER_ISA >= 2
#define TILE_M 6
#define TILE_ONE_N 6
#elif EMBER_ISA == 1
#define TILE_M 3
#define TILE_ONE_N 6
#else
#define TILE_M 2
#define TILE_ONE_N 6
#endif
#define TILE_N 4
#define TILE_PREFETCH 512 /* bytes */
#define TILE_STREAMS_M 4  /* rows of x up to which memory is what there is to wait for */

/* Elements first .. end - 1 of one row, which holds dot products. */
static __attribute__((noinline, unused)) void tile_post_row(float *out, size_t first, size_t end,
                                                            const struct post *post)
{
    for (size_t n = first; n < end; n += VL) {
        size_t left = V_LEFT(n, end);
        v_put(out + n, post_value(v_get(out + n, left), n, left, post), left);
    }
}

/*
 * x: M rows of K floats; w: NT rows w_step bytes apart; out: M rows, of which elements n, n +
 * n_step, ... become the dot products. prefetch: bytes that each row of w is fetched ahead, 0: not
 * at all.
 */
INLINE void tile_dot(const int M, const int NT, const enum ember_dtype dtype, const float *const *x,
                     const char *w, size_t w_step, size_t K, size_t prefetch, float *const *out,
                     size_t n, size_t n_step)
{
    const size_t w_size = dtype == EMBER_F32 ? 4 : 2;
    vf acc[TILE_M][TILE_ONE_N];
    UNROLL
    for (int m = 0; m < M; m++)
        UNROLL
    for (int j = 0; j < NT; j++)
        acc[m][j] = v_zero();
    size_t k = 0;
    for (; k + VL <= K; k += VL) {
        vf xv[TILE_M];
        UNROLL
        for (int m = 0; m < M; m++)
            xv[m] = v_load(x[m] + k);
        UNROLL
        for (int j = 0; j < NT; j++) {
            if (prefetch)
                __builtin_prefetch(w + j * w_step + k * w_size + prefetch);
            vf wv = v_load_w(w + j * w_step, k, dtype);
            UNROLL
            for (int m = 0; m < M; m++)
                acc[m][j] = v_fma(xv[m], wv, acc[m][j]);
        }
    }
    if (k < K) {
        UNROLL
        for (int j = 0; j < NT; j++) {
            vf wv = v_load_w_part(w + j * w_step, k, dtype, K - k);
            UNROLL
            for (int m = 0; m < M; m++)
                acc[m][j] = v_fma(v_load_part(x[m] + k, K - k), wv, acc[m][j]);
        }
    }
    UNROLL
    for (int m = 0; m < M; m++) {
        float *to = out[m] + n;
        UNROLL
        for (int j = 0; j + 4 <= NT; j += 4) {
            float sums[4];
            _mm_storeu_ps(sums, v_sum4(acc[m][j], acc[m][j + 1], acc[m][j + 2], acc[m][j + 3]));
            UNROLL
            for (int i = 0; i < 4; i++)
                to[(j + i) * n_step] = sums[i];
        }
        if (NT % 4) {
            UNROLL
            for (int j = NT & ~3; j < NT; j++)
                to[j * n_step] = v_sum(acc[m][j]);
        }
    }
}

/*
 * M rows against rows first .. end - 1 of w. When memory is what there is to wait for (few rows of
 * x), a tile's rows of w are spread over the whole range, so that each of them continues where it
 * ended: a few long streams, which the processor fetches ahead by itself, and not many short ones.
 */
INLINE void tile_strip(const int M, const enum ember_dtype dtype, const float *const *x,
                       const char *w, size_t w_stride, size_t K, float *const *out, size_t first,
                       size_t end, const struct post *post)
{
    const int NT = M == 1 ? TILE_ONE_N : TILE_N;
    size_t n = first;
    if (M <= TILE_STREAMS_M && end - first >= (size_t)4 * NT) {
        /* Odd, since rows are often a power of two long and would all fall into one set of the
         * first-level cache. */
        size_t spacing = ((end - first) / NT - 1) | 1;
        for (; n < first + spacing; n++)
            tile_dot(M, NT, dtype, x, w + n * w_stride, spacing * w_stride, K, TILE_PREFETCH, out,
                     n, spacing);
        n = first + spacing * NT;
    }
    while (n < end) {
        if (n + NT > end && end - first >= (size_t)NT)
            n = end - NT; /* a whole tile, some of it again: the same values */
        if (n + NT <= end) {
            tile_dot(M, NT, dtype, x, w + n * w_stride, w_stride, K, 0, out, n, 1);
            n += NT;
        } else {
            tile_dot(M, 1, dtype, x, w + n * w_stride, w_stride, K, 0, out, n, 1);
            n++;
        }
    }
    if (post->b || post->scale != 1 || post->softcap > 0)
        for (int m = 0; m < M; m++)
            tile_post_row(out[m], first, end, post);
}

/* How many of `left` rows to take next: full tiles of about the same height, as few of them as will
 * do. */
INLINE size_t tile_height(size_t left)
{
    size_t passes = (left + TILE_M - 1) / TILE_M;
    return (left + passes - 1) / passes;
}

/* m <= TILE_M rows. */
INLINE void tile_rows(size_t m, const enum ember_dtype dtype, const float *const *x, const char *w,
                      size_t w_stride, size_t K, float *const *out, size_t first, size_t end,
                      const struct post *post)
{
    switch (m) {
    case 1:
        tile_strip(1, dtype, x, w, w_stride, K, out, first, end, post);
        break;
    case 2:
        tile_strip(2, dtype, x, w, w_stride, K, out, first, end, post);
        break;
#if TILE_M > 2
    case 3:
        tile_strip(3, dtype, x, w, w_stride, K, out, first, end, post);
        break;
#endif
#if TILE_M > 3
    case 4:
        tile_strip(4, dtype, x, w, w_stride, K, out, first, end, post);
        break;
    case 5:
        tile_strip(5, dtype, x, w, w_stride, K, out, first, end, post);
        break;
    case 6:
        tile_strip(6, dtype, x, w, w_stride, K, out, first, end, post);
        break;
#endif
    }
}

#endif
