/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dot-product tiles against FP8 weights in rows (ember/op.h, enum ember_quant): as tile.h, but a
 * vector of w is made from codes as it is needed.
 *
 * The order of every output: k in steps of 32, of each VL at a time, lane l of which adds to lane l
 * of the accumulator; then v_sum's tree. It is the same for each tile shape.
 */
#ifndef EMBER_KERNELS_CPU_TILE_QUANT_H
#define EMBER_KERNELS_CPU_TILE_QUANT_H

#include "kernels/cpu/ops/tile.h"

/* A quantised matrix: addresses of row 0 and bytes from row to row. */
struct quant_matrix {
    const char *w, *scale;
    size_t w_stride, scale_stride;
    enum ember_dtype scale_dtype;
    size_t K, group;
};

/*
 * Part h of the 32 codes at `at`, VL of them, less a factor that is left to the scale: E4M3 is read
 * as halves, whose exponent's bias is 8 more, or as a float's bits, which also makes denormals
 * right.
 */
#define FP8_FACTOR 256.0f
#if EMBER_ISA >= 2
INLINE vf v_codes(const uint8_t *at, const int h)
{
    __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(at + 16 * h)));
    return _mm512_cvtph_ps(
        _mm256_and_si256(_mm256_slli_epi16(b, 7), _mm256_set1_epi16((short)0xbfff)));
}
#elif EMBER_ISA == 1
INLINE vf v_codes(const uint8_t *at, const int h)
{
    __m128i b = _mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)(at + 8 * h)));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(b, 7), _mm_set1_epi16((short)0xbfff)));
}
#else
INLINE vf v_codes(const uint8_t *at, const int h)
{
    int32_t word;
    __builtin_memcpy(&word, at + 4 * h, 4);
    __m128i b = _mm_unpacklo_epi8(_mm_cvtsi32_si128(word), _mm_setzero_si128());
    __m128i code = _mm_unpacklo_epi16(b, _mm_setzero_si128());
    __m128i size = _mm_slli_epi32(_mm_and_si128(code, _mm_set1_epi32(0x7f)), 20);
    __m128i sign = _mm_and_si128(_mm_slli_epi32(code, 24), _mm_set1_epi32(INT32_MIN));
    return _mm_or_ps(_mm_mul_ps(_mm_castsi128_ps(size), _mm_set1_ps(0x1p112f)),
                     _mm_castsi128_ps(sign));
}
#endif

INLINE float quant_scale(const struct quant_matrix *q, size_t n, size_t g)
{
    return scale_at(q->scale + n * q->scale_stride, g, q->scale_dtype);
}

/* Eight steps of the baseline's four lanes, unrolled in every tile, would be most of the build. */
#if EMBER_ISA == 0
#define UNROLL_WIDE
#else
#define UNROLL_WIDE UNROLL
#endif

/* 32 elements from `at` on: of each row of x, and of rows of w that are w_step bytes apart. */
INLINE void quant_block(const int M, const int NT, const float *const *x, const char *w,
                        size_t w_step, size_t at, const float *scale, vf acc[TILE_M][TILE_ONE_N])
{
    UNROLL_WIDE
    for (int h = 0; h < 32 / VL; h++) {
        vf xv[TILE_M];
        UNROLL
        for (int m = 0; m < M; m++)
            xv[m] = v_load(x[m] + at + h * VL);
        UNROLL
        for (int j = 0; j < NT; j++) {
            vf wv = v_mul(v_codes((const uint8_t *)w + j * w_step + at, h), v_set(scale[j]));
            UNROLL
            for (int m = 0; m < M; m++)
                acc[m][j] = v_fma(xv[m], wv, acc[m][j]);
        }
    }
}

/* What a group leaves beside its whole blocks, as a block: zeros of x add nothing. */
struct quant_rest {
    float x[TILE_M][32];
    uint8_t w[TILE_ONE_N][32];
};

INLINE void quant_fill(const int M, const int NT, const float *const *x, const char *w,
                       size_t w_step, size_t at, size_t left, struct quant_rest *rest)
{
    __builtin_memset(rest, 0, sizeof *rest);
    for (int m = 0; m < M; m++)
        for (size_t i = 0; i < left; i++)
            rest->x[m][i] = x[m][at + i];
    for (int j = 0; j < NT; j++)
        for (size_t i = 0; i < left; i++)
            rest->w[j][i] = ((const uint8_t *)w + j * w_step + at)[i];
}

/* As tile_dot: rows n, n + n_step, ... of q. */
INLINE void quant_dot(const int M, const int NT, const float *const *x,
                      const struct quant_matrix *q, size_t prefetch, float *const *out, size_t n,
                      size_t n_step)
{
    const char *w = q->w + n * q->w_stride;
    const size_t w_step = n_step * q->w_stride, K = q->K;
    vf acc[TILE_M][TILE_ONE_N];
    UNROLL
    for (int m = 0; m < M; m++)
        UNROLL
    for (int j = 0; j < NT; j++)
        acc[m][j] = v_zero();
    for (size_t g = 0, k = 0; k < K; g++) {
        size_t end = K - k < q->group ? K : k + q->group;
        float scale[TILE_ONE_N];
        UNROLL
        for (int j = 0; j < NT; j++)
            scale[j] = quant_scale(q, n + j * n_step, g) * FP8_FACTOR;
        const float *xs[TILE_M];
        const char *ws = w + k;
        size_t step = w_step, left = end - k, at;
        struct quant_rest rest;
        UNROLL
        for (int m = 0; m < M; m++)
            xs[m] = x[m] + k;
        for (;;) { /* the whole blocks, then the rest as one: a second body would double the code */
            for (at = 0; at + 32 <= left; at += 32) {
                if (prefetch && (k + at) % 64 == 0) {
                    UNROLL
                    for (int j = 0; j < NT; j++)
                        __builtin_prefetch(ws + j * step + at + prefetch);
                }
                quant_block(M, NT, xs, ws, step, at, scale, acc);
            }
            if (at == left)
                break;
            quant_fill(M, NT, xs, ws, step, at, left - at, &rest);
            for (int m = 0; m < M; m++)
                xs[m] = rest.x[m];
            ws = (const char *)rest.w;
            step = sizeof rest.w[0];
            left = 32;
        }
        k = end;
    }
    UNROLL
    for (int m = 0; m < M; m++)
        UNROLL
    for (int j = 0; j < NT; j++)
        out[m][n + j * n_step] = v_sum(acc[m][j]);
}

/* As tile_strip. */
INLINE void quant_strip(const int M, const float *const *x, const struct quant_matrix *q,
                        float *const *out, size_t first, size_t end, const struct post *post)
{
    const int NT = TILE_N;
    size_t n = first;
    if (M <= TILE_STREAMS_M && end - first >= (size_t)4 * NT) {
        size_t spacing = ((end - first) / NT - 1) | 1;
        for (; n < first + spacing; n++)
            quant_dot(M, NT, x, q, TILE_PREFETCH, out, n, spacing);
        n = first + spacing * NT;
    }
    while (n < end) {
        if (n + NT > end && end - first >= (size_t)NT)
            n = end - NT;
        if (n + NT <= end) {
            quant_dot(M, NT, x, q, 0, out, n, 1);
            n += NT;
        } else {
            quant_dot(M, 1, x, q, 0, out, n, 1);
            n++;
        }
    }
    if (post->b || post->scale != 1 || post->softcap > 0)
        for (int m = 0; m < M; m++)
            tile_post_row(out[m], first, end, post);
}

/* m <= TILE_M rows. */
INLINE void quant_rows(size_t m, const float *const *x, const struct quant_matrix *q,
                       float *const *out, size_t first, size_t end, const struct post *post)
{
    size_t i = 0; /* three heights instead of six: each costs seconds of compiling */
#if TILE_M > 3
    for (; i + 4 <= m; i += 4)
        quant_strip(4, x + i, q, out + i, first, end, post);
#endif
    for (; i + 2 <= m; i += 2)
        quant_strip(2, x + i, q, out + i, first, end, post);
    for (; i < m; i++)
        quant_strip(1, x + i, q, out + i, first, end, post);
}

/*
 * Row n of q as the floats that quant_dot makes of it, K of them. tile_dot adds them up in the same
 * order, so either way gives the same bits.
 */
INLINE void quant_expand(const struct quant_matrix *q, size_t n, float *to)
{
    const uint8_t *w = (const uint8_t *)q->w + n * q->w_stride;
    for (size_t g = 0, k = 0; k < q->K; g++) {
        size_t end = q->K - k < q->group ? q->K : k + q->group;
        const vf factor = v_set(quant_scale(q, n, g) * FP8_FACTOR);
        for (; k < end; k += 32) {
            size_t left = end - k;
            const uint8_t *at = w + k;
            uint8_t filled[32];
            if (left < 32) {
                for (size_t i = 0; i < 32; i++)
                    filled[i] = i < left ? at[i] : 0;
                at = filled;
            }
            UNROLL
            for (int h = 0; h < 32 / VL; h++) {
                const size_t from = (size_t)h * VL;
                if (from >= left)
                    break;
                v_put(to + k + from, v_mul(v_codes(at, h), factor), left - from);
            }
        }
        k = end;
    }
}

#endif
