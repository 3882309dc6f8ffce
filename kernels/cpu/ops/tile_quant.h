/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dot-product tiles against quantised weights (ember/op.h, enum ember_quant): as tile.h, but a
 * vector of w is made from codes as it is needed: code * scale + (-zero * scale), one fused
 * multiply-add.
 *
 * The order of every output: k in steps of 32, of each VL at a time, lane l of which adds to lane l
 * of the accumulator; then v_sum's tree. It is the same for each tile shape. Sums of int8 products
 * are exact, so they have no order.
 */
#ifndef EMBER_KERNELS_CPU_TILE_QUANT_H
#define EMBER_KERNELS_CPU_TILE_QUANT_H

#include "kernels/cpu/ops/tile.h"

/* A quantised matrix: addresses of row 0 and bytes from row to row. */
struct quant_matrix {
    const char *w, *scale, *zero; /* zero: NULL when absent */
    size_t w_stride, scale_stride, zero_stride;
    enum ember_dtype scale_dtype;
    size_t K, group;
};

/* ---- codes ---- */

#if EMBER_ISA == 2

/* Part h of the 32 codes at `at`, VL of them. */
INLINE vf v_codes(const uint8_t *at, const int h, const enum ember_quant quant)
{
    if (quant == EMBER_QUANT_INT8)
        return v_from_int(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(at + 16 * h))));
    if (quant == EMBER_QUANT_FP8) {
        __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(at + 16 * h)));
        return _mm512_cvtph_ps(
            _mm256_and_si256(_mm256_slli_epi16(b, 7), _mm256_set1_epi16((short)0xbfff)));
    }
    __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)at));
    if (h)
        code = _mm512_srli_epi32(code, 4);
    if (quant == EMBER_QUANT_INT4)
        return v_from_int(_mm512_and_si512(code, _mm512_set1_epi32(15)));
    return _mm512_permutexvar_ps(code, _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f,
                                                      -1, -1.5f, -2, -3, -4, -6));
}

#elif EMBER_ISA == 1

INLINE vf v_codes(const uint8_t *at, const int h, const enum ember_quant quant)
{
    if (quant == EMBER_QUANT_INT8)
        return v_from_int(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(at + 8 * h))));
    if (quant == EMBER_QUANT_FP8) {
        __m128i b = _mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)(at + 8 * h)));
        return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(b, 7), _mm_set1_epi16((short)0xbfff)));
    }
    __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(at + 8 * (h & 1))));
    if (h & 2)
        code = _mm256_srli_epi32(code, 4);
    if (quant == EMBER_QUANT_INT4)
        return v_from_int(_mm256_and_si256(code, _mm256_set1_epi32(15)));
    __m256 size = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), code);
    __m256i sign = _mm256_and_si256(_mm256_slli_epi32(code, 28), _mm256_set1_epi32(INT32_MIN));
    return _mm256_xor_ps(size, _mm256_castsi256_ps(sign));
}

#else

/* Four bytes, zero-extended to 32 bits; the bits below `mask` << shift are a float's exponent and
 * fraction but for a factor, which also makes denormals right. */
INLINE __m128i v_four(const uint8_t *at)
{
    int32_t word;
    __builtin_memcpy(&word, at, 4);
    __m128i b = _mm_unpacklo_epi8(_mm_cvtsi32_si128(word), _mm_setzero_si128());
    return _mm_unpacklo_epi16(b, _mm_setzero_si128());
}
INLINE vf v_small_float(__m128i code, int mask, int shift, int sign, float factor)
{
    __m128i size = _mm_slli_epi32(_mm_and_si128(code, _mm_set1_epi32(mask)), shift);
    __m128i s = _mm_and_si128(_mm_slli_epi32(code, sign), _mm_set1_epi32(INT32_MIN));
    return _mm_or_ps(_mm_mul_ps(_mm_castsi128_ps(size), _mm_set1_ps(factor)), _mm_castsi128_ps(s));
}

INLINE vf v_codes(const uint8_t *at, const int h, const enum ember_quant quant)
{
    if (quant == EMBER_QUANT_INT8)
        return v_from_int(_mm_srai_epi32(_mm_slli_epi32(v_four(at + 4 * h), 24), 24));
    if (quant == EMBER_QUANT_FP8) /* 2^120, of which 2^8 is in the scale */
        return v_small_float(v_four(at + 4 * h), 0x7f, 20, 24, 0x1p112f);
    __m128i code = v_four(at + 4 * (h & 3));
    if (h & 4)
        code = _mm_srli_epi32(code, 4);
    if (quant == EMBER_QUANT_INT4)
        return v_from_int(_mm_and_si128(code, _mm_set1_epi32(15)));
    return v_small_float(code, 7, 22, 28, 0x1p126f);
}

#endif

/* What v_codes leaves to the scale: it reads E4M3 as halves, whose exponent's bias is 8 more. */
#define QUANT_FACTOR(quant) ((quant) == EMBER_QUANT_FP8 ? 256.0f : 1.0f)

INLINE float quant_scale(const struct quant_matrix *q, size_t n, size_t g)
{
    const char *row = q->scale + n * q->scale_stride;
    union {
        uint32_t bits;
        float value;
    } u;
    if (q->scale_dtype != EMBER_U8)
        return w_at(row, g, q->scale_dtype);
    u.bits = (uint32_t)((const uint8_t *)row)[g] << 23;
    if (!u.bits)
        u.bits = 1u << 22; /* 2^-127 */
    return u.value;
}

/* Eight steps of the baseline's four lanes, unrolled in every tile, would be most of the build. */
#if EMBER_ISA == 0
#define UNROLL_WIDE
#else
#define UNROLL_WIDE UNROLL
#endif

/* ---- float x ---- */

/* 32 elements from `at` on: of each row of x, and of rows of w that are w_step bytes apart. */
INLINE void quant_block(const int M, const int NT, const enum ember_quant quant,
                        const float *const *x, const char *w, size_t w_step, size_t at,
                        const float *scale, const float *offset, vf acc[TILE_M][TILE_ONE_N])
{
    const int four = quant == EMBER_QUANT_INT4 || quant == EMBER_QUANT_FP4;
    UNROLL_WIDE
    for (int h = 0; h < 32 / VL; h++) {
        vf xv[TILE_M];
        UNROLL
        for (int m = 0; m < M; m++)
            xv[m] = v_load(x[m] + at + h * VL);
        UNROLL
        for (int j = 0; j < NT; j++) {
            const uint8_t *codes = (const uint8_t *)w + j * w_step + (four ? at / 2 : at);
            vf wv = v_fma(v_codes(codes, h, quant), v_set(scale[j]), v_set(offset[j]));
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

INLINE void quant_fill(const int M, const int NT, const int four, const float *const *x,
                       const char *w, size_t w_step, size_t at, size_t left,
                       struct quant_rest *rest)
{
    const size_t bytes = four ? 16 : left; /* 4-bit codes stand in whole 16 bytes */
    __builtin_memset(rest, 0, sizeof *rest);
    for (int m = 0; m < M; m++)
        for (size_t i = 0; i < left; i++)
            rest->x[m][i] = x[m][at + i];
    for (int j = 0; j < NT; j++)
        for (size_t i = 0; i < bytes; i++)
            rest->w[j][i] = ((const uint8_t *)w + j * w_step + (four ? at / 2 : at))[i];
}

/* As tile_dot: rows n, n + n_step, ... of q. */
INLINE void quant_dot(const int M, const int NT, const enum ember_quant quant,
                      const float *const *x, const struct quant_matrix *q, size_t prefetch,
                      float *const *out, size_t n, size_t n_step)
{
    const int four = quant == EMBER_QUANT_INT4 || quant == EMBER_QUANT_FP4;
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
        float scale[TILE_ONE_N], offset[TILE_ONE_N];
        UNROLL
        for (int j = 0; j < NT; j++) {
            size_t row = n + j * n_step;
            float zero = quant == EMBER_QUANT_INT4 ? 8 : 0;
            if (quant == EMBER_QUANT_INT4 && q->zero)
                zero = ((const uint8_t *)q->zero + row * q->zero_stride)[g];
            scale[j] = quant_scale(q, row, g);
            offset[j] = -zero * scale[j];
            scale[j] *= QUANT_FACTOR(quant);
        }
        const float *xs[TILE_M];
        const char *ws = w + (four ? k / 2 : k);
        size_t step = w_step, left = end - k, at;
        struct quant_rest rest;
        UNROLL
        for (int m = 0; m < M; m++)
            xs[m] = x[m] + k;
        for (;;) { /* the whole blocks, then the rest as one: a second body would double the code */
            for (at = 0; at + 32 <= left; at += 32) {
                if (prefetch && (k + at) % (four ? 128 : 64) == 0) {
                    UNROLL
                    for (int j = 0; j < NT; j++)
                        __builtin_prefetch(ws + j * step + (four ? at / 2 : at) + prefetch);
                }
                quant_block(M, NT, quant, xs, ws, step, at, scale, offset, acc);
            }
            if (at == left)
                break;
            quant_fill(M, NT, four, xs, ws, step, at, left - at, &rest);
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
INLINE void quant_strip(const int M, const enum ember_quant quant, const float *const *x,
                        const struct quant_matrix *q, float *const *out, size_t first, size_t end,
                        const struct tile_post *post)
{
    const int NT = TILE_N;
    size_t n = first;
    if (M <= TILE_STREAMS_M && end - first >= (size_t)4 * NT) {
        size_t spacing = ((end - first) / NT - 1) | 1;
        for (; n < first + spacing; n++)
            quant_dot(M, NT, quant, x, q, TILE_PREFETCH, out, n, spacing);
        n = first + spacing * NT;
    }
    while (n < end) {
        if (n + NT > end && end - first >= (size_t)NT)
            n = end - NT;
        if (n + NT <= end) {
            quant_dot(M, NT, quant, x, q, 0, out, n, 1);
            n += NT;
        } else {
            quant_dot(M, 1, quant, x, q, 0, out, n, 1);
            n++;
        }
    }
    if (post->b || post->scale != 1 || post->softcap > 0)
        for (int m = 0; m < M; m++)
            tile_post_row(out[m], first, end, post);
}

/* m <= TILE_M rows. */
INLINE void quant_rows(size_t m, const enum ember_quant quant, const float *const *x,
                       const struct quant_matrix *q, float *const *out, size_t first, size_t end,
                       const struct tile_post *post)
{
    size_t i = 0; /* three heights instead of six: each costs seconds of compiling */
#if TILE_M > 3
    for (; i + 4 <= m; i += 4)
        quant_strip(4, quant, x + i, q, out + i, first, end, post);
#endif
    for (; i + 2 <= m; i += 2)
        quant_strip(2, quant, x + i, q, out + i, first, end, post);
    for (; i < m; i++)
        quant_strip(1, quant, x + i, q, out + i, first, end, post);
}

/*
 * Row n of q as the floats that quant_dot makes of it, K of them. tile_dot adds them up in the same
 * order, so either way gives the same bits.
 */
INLINE void quant_expand(const enum ember_quant quant, const struct quant_matrix *q, size_t n,
                         float *to)
{
    const int four = quant == EMBER_QUANT_INT4 || quant == EMBER_QUANT_FP4;
    const uint8_t *w = (const uint8_t *)q->w + n * q->w_stride;
    for (size_t g = 0, k = 0; k < q->K; g++) {
        size_t end = q->K - k < q->group ? q->K : k + q->group;
        float zero = quant == EMBER_QUANT_INT4 ? 8 : 0, scale = quant_scale(q, n, g);
        if (quant == EMBER_QUANT_INT4 && q->zero)
            zero = ((const uint8_t *)q->zero + n * q->zero_stride)[g];
        const vf offset = v_set(-zero * scale), factor = v_set(scale * QUANT_FACTOR(quant));
        for (; k < end; k += 32) {
            size_t left = end - k;
            const uint8_t *at = w + (four ? k / 2 : k);
            uint8_t filled[32];
            if (!four && left < 32) {
                for (size_t i = 0; i < 32; i++)
                    filled[i] = i < left ? at[i] : 0;
                at = filled;
            }
            UNROLL
            for (int h = 0; h < 32 / VL; h++) {
                const size_t from = (size_t)h * VL;
                if (from >= left)
                    break;
                v_put(to + k + from, v_fma(v_codes(at, h, quant), factor, offset), left - from);
            }
        }
        k = end;
    }
}

/* ---- int8 x ---- */

/* The sum of VL * 2 int8 products, to be added up in 32-bit lanes. */
#if EMBER_ISA == 2
#define INT8_STEP 32
INLINE vi v_int8_pairs(vi acc, const int8_t *x, const int8_t *w)
{
    __m512i a = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)x));
    __m512i b = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)w));
    return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b));
}
INLINE vi v_int_zero(void)
{
    return _mm512_setzero_si512();
}
INLINE int32_t v_int_sum(vi v)
{
    return _mm512_reduce_add_epi32(v);
}
#elif EMBER_ISA == 1
#define INT8_STEP 16
INLINE vi v_int8_pairs(vi acc, const int8_t *x, const int8_t *w)
{
    __m256i a = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)x));
    __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b));
}
INLINE vi v_int_zero(void)
{
    return _mm256_setzero_si256();
}
INLINE int32_t v_int_sum(vi v)
{
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
#else
#define INT8_STEP 8
INLINE __m128i v_int8_wide(const int8_t *p)
{
    __m128i b = _mm_loadl_epi64((const void *)p);
    return _mm_srai_epi16(_mm_unpacklo_epi8(b, b), 8);
}
INLINE vi v_int8_pairs(vi acc, const int8_t *x, const int8_t *w)
{
    return _mm_add_epi32(acc, _mm_madd_epi16(v_int8_wide(x), v_int8_wide(w)));
}
INLINE vi v_int_zero(void)
{
    return _mm_setzero_si128();
}
INLINE int32_t v_int_sum(vi s)
{
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
#endif

/* M rows of x against NT rows of w from n on. */
INLINE void int8_dot(const int M, const int NT, const int8_t *const *x, const float *x_scale,
                     const struct quant_matrix *q, float *const *out, size_t n)
{
    const int8_t *w = (const int8_t *)q->w + n * q->w_stride;
    vi acc[TILE_M][TILE_N];
    size_t k = 0;
    UNROLL
    for (int m = 0; m < M; m++)
        UNROLL
    for (int j = 0; j < NT; j++)
        acc[m][j] = v_int_zero();
    for (; k + INT8_STEP <= q->K; k += INT8_STEP) {
        UNROLL
        for (int j = 0; j < NT; j++) {
            UNROLL
            for (int m = 0; m < M; m++)
                acc[m][j] = v_int8_pairs(acc[m][j], x[m] + k, w + j * q->w_stride + k);
        }
    }
    UNROLL
    for (int j = 0; j < NT; j++) {
        UNROLL
        for (int m = 0; m < M; m++) {
            int32_t sum = v_int_sum(acc[m][j]);
            for (size_t i = k; i < q->K; i++)
                sum += x[m][i] * w[j * q->w_stride + i];
            out[m][n + (size_t)j] = (float)sum * x_scale[m] * quant_scale(q, n + (size_t)j, 0);
        }
    }
}

INLINE void int8_strip(const int M, const int8_t *const *x, const float *x_scale,
                       const struct quant_matrix *q, float *const *out, size_t first, size_t end,
                       const struct tile_post *post)
{
    size_t n = first;
    for (; n + TILE_N <= end; n += TILE_N)
        int8_dot(M, TILE_N, x, x_scale, q, out, n);
    for (; n < end; n++)
        int8_dot(M, 1, x, x_scale, q, out, n);
    if (post->b || post->scale != 1 || post->softcap > 0)
        for (int m = 0; m < M; m++)
            tile_post_row(out[m], first, end, post);
}

/* m <= TILE_M rows, in pieces of 3, 2 and 1. */
INLINE void int8_rows(size_t m, const int8_t *const *x, const float *x_scale,
                      const struct quant_matrix *q, float *const *out, size_t first, size_t end,
                      const struct tile_post *post)
{
    size_t i = 0;
#if TILE_M > 2
    for (; i + 3 <= m; i += 3)
        int8_strip(3, x + i, x_scale + i, q, out + i, first, end, post);
#endif
    for (; i + 2 <= m; i += 2)
        int8_strip(2, x + i, x_scale + i, q, out + i, first, end, post);
    for (; i < m; i++)
        int8_strip(1, x + i, x_scale + i, q, out + i, first, end, post);
}

#endif
