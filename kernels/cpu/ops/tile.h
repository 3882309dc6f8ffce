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

#include "kernels/cpu/simd.h"

#if EMBER_ISA == 2
#define TILE_M 6
#define TILE_ONE_N 8 /* rows of w in flight when there is one row of x */
#elif EMBER_ISA == 1
#define TILE_M 3
#define TILE_ONE_N 8
#else
#define TILE_M 2
#define TILE_ONE_N 8
#endif
#define TILE_N 4

/* What follows the dot product: out = cap(scale * (dot + b)). */
struct tile_post {
    const void *b;
    enum ember_dtype b_dtype;
    float scale, softcap;
};

/* Elements first .. end - 1 of one row, which holds dot products. */
static __attribute__((noinline, unused)) void tile_post_row(float *out, size_t first, size_t end,
                                                            const struct tile_post *post)
{
    for (size_t n = first; n < end; n += VL) {
        size_t left = V_LEFT(n, end);
        vf v = v_get(out + n, left);
        if (post->b)
            v = v_add(v, v_get_w(post->b, n, post->b_dtype, left));
        v = v_mul(v_set(post->scale), v);
        if (post->softcap > 0)
            v = v_softcap(v, post->softcap);
        v_put(out + n, v, left);
    }
}

/* x: M rows of K floats; w: row n, the others behind it; out: M rows, the dot
 * products become elements n .. n + NT - 1. */
INLINE void tile_dot(const int M, const int NT, const enum ember_dtype dtype, const float *const *x,
                     const char *w, size_t w_stride, size_t K, size_t prefetch, float *const *out,
                     size_t n)
{
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
                __builtin_prefetch(w + j * w_stride + prefetch + k * (dtype == EMBER_F32 ? 4 : 2));
            vf wv = v_load_w(w + j * w_stride, k, dtype);
            UNROLL
            for (int m = 0; m < M; m++)
                acc[m][j] = v_fma(xv[m], wv, acc[m][j]);
        }
    }
    if (k < K) {
        UNROLL
        for (int j = 0; j < NT; j++) {
            vf wv = v_load_w_part(w + j * w_stride, k, dtype, K - k);
            UNROLL
            for (int m = 0; m < M; m++)
                acc[m][j] = v_fma(v_load_part(x[m] + k, K - k), wv, acc[m][j]);
        }
    }
    UNROLL
    for (int m = 0; m < M; m++) {
        UNROLL
        for (int j = 0; j + 4 <= NT; j += 4) {
            _mm_storeu_ps(out[m] + n + j,
                          v_sum4(acc[m][j], acc[m][j + 1], acc[m][j + 2], acc[m][j + 3]));
        }
        if (NT % 4) {
            UNROLL
            for (int j = NT & ~3; j < NT; j++)
                out[m][n + j] = v_sum(acc[m][j]);
        }
    }
}

/* M rows against rows first .. end - 1 of w. */
INLINE void tile_strip(const int M, const enum ember_dtype dtype, const float *const *x,
                       const char *w, size_t w_stride, size_t K, float *const *out, size_t first,
                       size_t end, const struct tile_post *post)
{
    const int NT = M == 1 ? TILE_ONE_N : TILE_N;
    size_t n = first;
    for (; n + NT <= end; n += NT)
        tile_dot(M, NT, dtype, x, w + n * w_stride, w_stride, K, 0, out, n);
    for (; n < end; n++)
        tile_dot(M, 1, dtype, x, w + n * w_stride, w_stride, K, 0, out, n);
    if (post->b || post->scale != 1 || post->softcap > 0)
        for (int m = 0; m < M; m++)
            tile_post_row(out[m], first, end, post);
}

/* m <= TILE_M rows. */
INLINE void tile_rows(size_t m, const enum ember_dtype dtype, const float *const *x, const char *w,
                      size_t w_stride, size_t K, float *const *out, size_t first, size_t end,
                      const struct tile_post *post)
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
