/* SPDX-License-Identifier: Apache-2.0 */
/*
 * x as integers (ember/op.h, quantize): how floats become them, and the forms in which they are
 * handed over to the products of a variant. n rows, of k up to K, half = EMBER_X8_COLUMNS(K) bytes
 * a term, segments of some of k:
 *
 *   ROWS   as in ember/op.h
 *   ONE    the only row; scales [segment], then sums [segment][term]
 *   WOVEN  tiles of X_TILE / terms rows in the bytes of so many: of each four of k eight words,
 *          those of eight rows, or the upper and then the lower terms of four. Scales
 *          [tile][segment][row], then sums [tile][segment][8], of which each is that of a word
 *   UNITS  units of 16 rows of one term: of each 64 of k 16 lines. Of two terms: upper, lower,
 *          upper, ... of the sixteens. Scales [segment][row], rows filled up to sixteens
 *
 * Rows beyond the last mean nothing, columns beyond K are zeros. A sum is that of the integers of a
 * segment, of two terms that of each.
 */
#ifndef EMBER_KERNELS_CPU_X_INT_H
#define EMBER_KERNELS_CPU_X_INT_H

#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/simd.h"

#define X_TILE 8
#define X_UNIT 16
#define X_UNITS_K_MAX 16384 /* more, and two panels are more than the second-level cache has */
#define X_ROWS_MAX X_TILE   /* that are put at a time */
#define X_UNITS_LEAST 17    /* rows that matrix tiles take, */
#define X_UNITS_FEW 5       /* or as few of one term and large segments */

enum x_int_form { X_INT_ROWS, X_INT_ONE, X_INT_WOVEN, X_INT_UNITS };

/* Few rows go by matrix tiles where sums are of many products. */
INLINE size_t x_units_least(size_t K, size_t segment, int terms)
{
    return terms == 1 && (segment % 128 == 0 || segment >= K) ? X_UNITS_FEW : X_UNITS_LEAST;
}

/* The form of n rows where they are handed over. */
INLINE enum x_int_form x_int_form(size_t n, size_t K, size_t segment, int terms)
{
#if EMBER_ISA == 4
    if (n >= x_units_least(K, segment, terms) && K <= X_UNITS_K_MAX)
        return X_INT_UNITS;
#endif
    (void)K, (void)segment, (void)terms;
    if (EMBER_ISA < 1)
        return X_INT_ROWS;
    return n == 1 ? X_INT_ONE : X_INT_WOVEN;
}

struct x_int {
    char *x;
    char *scale;
    size_t x_stride, scale_stride; /* of ROWS */
    size_t n, K, segment;
    int terms;
    enum x_int_form form;
};

INLINE size_t x_int_segments(const struct x_int *x)
{
    return (x->K + x->segment - 1) / x->segment;
}

/* Rows that are put together. */
INLINE size_t x_int_height(const struct x_int *x)
{
    return x->form == X_INT_WOVEN ? (size_t)(X_TILE / x->terms) : 1;
}

/* Of ONE and WOVEN. */
INLINE int32_t *x_int_sums(const struct x_int *x)
{
    const size_t height = x_int_height(x);
    return (int32_t *)x->scale + (x->n + height - 1) / height * height * x_int_segments(x);
}

/* ---- floats to integers ---- */

/* A maximum by magnitude, NaN when one element is NaN or infinite. */
INLINE float largest_finite(const float *x, size_t K)
{
    vf most = v_zero(), odd = v_zero();
    for (size_t k = 0; k < K; k += VL) {
        vf v = v_get(x + k, V_LEFT(k, K));
        most = v_max(v_abs(v), most);
        odd = v_fma(v, v_zero(), odd); /* 0, or NaN for ever */
    }
    return v_reduce_max(most) + v_sum(odd);
}

/* Of a group. scale NaN or 0: its integers are zeros. */
struct x_scale {
    float scale, inverse; /* the latter 0: it would be beyond floats */
};

INLINE struct x_scale x_scale_of(const float *x, size_t n, const int two)
{
    struct x_scale s = {largest_finite(x, n) / (two ? 32767.0f : 127.0f), 0};
    if (s.scale != s.scale)
        s.scale = __builtin_nanf(""); /* one NaN of many */
    else if (s.scale > 0x1p-100f)
        s.inverse = 1 / s.scale;
    return s;
}

/*
 * x / scale to nearest, as the reference divides. A product with the inverse is off by 2^-22 of the
 * largest integer at most: it tells the integer unless it is as near as that to the middle of two.
 */
INLINE vi x_integers(vf x, const struct x_scale *s, const int two)
{
    const vf top = v_set(two ? 32767.0f : 127.0f), bottom = v_set(two ? -32767.0f : -127.0f);
    if (!(s->scale > 0))
        return vi_zero();
#if VL == 16
    if (s->inverse > 0) {
        const vf product = v_mul(x, v_set(s->inverse));
        const vi q = v_to_int(product);
        const vf off = v_abs(v_sub(product, v_from_int(q)));
        const vf sure = v_set(0.5f - (two ? 32767.0f : 127.0f) * 0x1p-22f);
        if (__builtin_expect(!_mm512_cmp_ps_mask(off, sure, _CMP_NLT_UQ), 1))
            return q;
    }
#endif
    return v_to_int(v_min(top, v_max(bottom, v_div(x, v_set(s->scale)))));
}

/* Integers of VL elements: one byte each, or two that are `half` apart. */
INLINE void put_integers(int8_t *to, size_t half, const int two, vi n, size_t left)
{
    int8_t high[VL], low[VL];
#if VL == 16
    if (left >= VL) {
        _mm_storeu_si128((void *)to, _mm512_cvtepi32_epi8(two ? _mm512_srai_epi32(n, 8) : n));
        if (two)
            _mm_storeu_si128((void *)(to + half), _mm512_cvtepi32_epi8(n));
        return;
    }
#endif
    int32_t q[VL];
    __builtin_memcpy(q, &n, sizeof(q));
    for (int i = 0; i < VL; i++) {
        high[i] = (int8_t)(two ? q[i] >> 8 : q[i]);
        low[i] = (int8_t)(q[i] & 255);
    }
    if (left >= VL) {
        __builtin_memcpy(to, high, VL);
        if (two)
            __builtin_memcpy(to + half, low, VL);
        return;
    }
    for (size_t i = 0; i < left; i++) {
        to[i] = high[i];
        if (two)
            to[half + i] = low[i];
    }
}

/* ---- rows ---- */

/* A row; sums NULL: nobody wants them. */
INLINE void x_int_row(const int two, const float *x, size_t K, size_t segment, int8_t *to,
                      float *scales, int32_t *sums)
{
    const size_t half = EMBER_X8_COLUMNS(K);
    for (size_t k = 0, end, s = 0; k < K; s++) {
        end = K - k < segment ? K : k + segment;
        const struct x_scale scale = x_scale_of(x + k, end - k, two);
        vi high = vi_zero(), low = vi_zero();
        scales[s] = scale.scale;
        for (; k < end; k += VL) {
            const size_t left = V_LEFT(k, end);
            const vi q = x_integers(v_get(x + k, left), &scale, two);
            put_integers(to + k, half, two, q, left);
            high = vi_add(high, two ? vi_sra32(q, 8) : q);
            if (two)
                low = vi_add(low, vi_and(q, vi_set32(255)));
        }
        k = end;
        if (sums) {
            *sums++ = vi_sum(high);
            if (two)
                *sums++ = vi_sum(low);
        }
    }
    for (size_t k = K; k < half; k++) {
        to[k] = 0;
        if (two)
            to[half + k] = 0;
    }
}

#if EMBER_ISA >= 1

/* Bytes, of four neighbours each, added to sums of 32 bits. */
INLINE __m256i x_add_bytes(__m256i sum, __m256i bytes, const int are_signed)
{
    const __m256i ones = _mm256_set1_epi8(1);
    const __m256i a = are_signed ? ones : bytes, b = are_signed ? bytes : ones;
#if EMBER_ISA >= 3
    return _mm256_dpbusd_epi32(sum, a, b);
#else
    return _mm256_add_epi32(sum,
                            _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
#endif
}

/* The sum of all lanes, in each. */
INLINE __m256i x_sum_lanes(__m256i v)
{
    v = _mm256_add_epi32(v, _mm256_permute2x128_si256(v, v, 1));
    v = _mm256_add_epi32(v, _mm256_shuffle_epi32(v, 0x4e));
    return _mm256_add_epi32(v, _mm256_shuffle_epi32(v, 0xb1));
}

/* The integers of 16 of k: of row i at [i], lower terms at [4 + i], to eight words of each four. */
INLINE void x_weave(const __m128i *row, char *to)
{
#if VL == 16
    const vi order = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    vi half[2];
    UNROLL
    for (int i = 0; i < 2; i++) {
        half[i] = _mm512_castsi128_si512(row[4 * i]);
        half[i] = _mm512_inserti32x4(half[i], row[4 * i + 1], 1);
        half[i] = _mm512_inserti32x4(half[i], row[4 * i + 2], 2);
        half[i] = _mm512_inserti32x4(half[i], row[4 * i + 3], 3);
    }
    _mm512_storeu_si512((void *)to, _mm512_permutex2var_epi32(half[0], order, half[1]));
    _mm512_storeu_si512(
        (void *)(to + 64),
        _mm512_permutex2var_epi32(half[0], _mm512_add_epi32(order, _mm512_set1_epi32(2)), half[1]));
#else
    __m256i a[4], b[4];
    UNROLL
    for (int i = 0; i < 4; i++)
        a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(row[i]), row[4 + i], 1);
    UNROLL
    for (int i = 0; i < 4; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLL
    for (int i = 0; i < 2; i++) {
        _mm256_storeu_si256((void *)(to + 64 * i), _mm256_unpacklo_epi64(b[i], b[2 + i]));
        _mm256_storeu_si256((void *)(to + 64 * i + 32), _mm256_unpackhi_epi64(b[i], b[2 + i]));
    }
#endif
}

/* The integers of 16 of k, which are as many of a row: one byte each, or two. */
INLINE void x_bytes(const float *x, size_t n, const struct x_scale *scale, const int two,
                    __m128i *ret, __m128i *ret_lower)
{
#if VL == 16
    const vi q = x_integers(v_get(x, n), scale, two);
    *ret = _mm512_cvtepi32_epi8(two ? _mm512_srai_epi32(q, 8) : q);
    *ret_lower = _mm512_cvtepi32_epi8(q);
#else
    const vi a = x_integers(v_get(x, n < VL ? n : VL), scale, two);
    const vi b = n > VL ? x_integers(v_get(x + VL, n - VL), scale, two) : vi_zero();
    const vi high = _mm256_packs_epi32(two ? vi_sra32(a, 8) : a, two ? vi_sra32(b, 8) : b);
    const vi low = _mm256_packs_epi32(vi_and(a, vi_set32(255)), vi_and(b, vi_set32(255)));
    const vi bytes = _mm256_packs_epi16(high, high), lower = _mm256_packus_epi16(low, low);
    /* of each half four of a and four of b */
    *ret = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    *ret_lower =
        _mm_unpacklo_epi32(_mm256_castsi256_si128(lower), _mm256_extracti128_si256(lower, 1));
#endif
}

/* m rows from `first` on, which begin a tile. */
INLINE void x_int_tile(const int terms, const struct x_int *to, size_t first, size_t m,
                       const float *const *x)
{
    const int M = X_TILE / terms, two = terms == 2;
    const size_t half = EMBER_X8_COLUMNS(to->K), segments = x_int_segments(to);
    char *at = to->x + first * half * (size_t)terms, *stop = at + half * X_TILE;
    float *scales = (float *)to->scale + first * segments;
    int32_t *sums = x_int_sums(to) + first * segments * (size_t)terms;
    for (size_t k = 0, end; k < to->K; k = end, scales += M, sums += X_TILE) {
        struct x_scale scale[X_TILE];
        __m256i sum = _mm256_setzero_si256(), lower = sum;
        end = to->K - k < to->segment ? to->K : k + to->segment;
        for (size_t i = 0; i < (size_t)M; i++) {
            scale[i] = i < m ? x_scale_of(x[i] + k, end - k, two) : (struct x_scale){0, 0};
            scales[i] = scale[i].scale;
        }
        for (; k < end; k += 16, at += 16 * X_TILE) {
            const size_t left = end - k < 16 ? end - k : 16;
            __m128i row[X_TILE], none;
            UNROLL
            for (size_t i = 0; i < (size_t)M; i++) {
                row[i] = _mm_setzero_si128();
                if (two)
                    row[i + 4] = row[i];
                if (i < m)
                    x_bytes(x[i] + k, left, &scale[i], two, &row[i], two ? &row[i + 4] : &none);
            }
            x_weave(row, at);
            UNROLL
            for (size_t i = 0; i < 4; i++) {
                const __m256i words = _mm256_loadu_si256((const void *)(at + i * 32));
                sum = x_add_bytes(sum, words, 1);
                if (two)
                    lower = x_add_bytes(lower, words, 0);
            }
        }
        _mm256_storeu_si256((void *)sums, two ? _mm256_blend_epi32(sum, lower, 0xf0) : sum);
    }
    __builtin_memset(at, 0, (size_t)(stop - at));
}

#endif

#if EMBER_ISA == 4

/* A row of a unit. */
INLINE void x_int_unit(const int terms, const struct x_int *to, size_t row, const float *x)
{
    const size_t half = EMBER_X8_COLUMNS(to->K), all = (to->n + 15) / X_UNIT * X_UNIT;
    int8_t *line =
        (int8_t *)to->x + row / X_UNIT * X_UNIT * half * (size_t)terms + row % X_UNIT * 64;
    float *scales = (float *)to->scale + row;
    for (size_t k = 0, end; k < to->K; scales += all) {
        end = to->K - k < to->segment ? to->K : k + to->segment;
        const struct x_scale scale = x_scale_of(x + k, end - k, terms == 2);
        *scales = scale.scale;
        for (; k < end; k += VL) /* behind the end of a line are zeros, not the next one's */
            put_integers(line + k / 64 * 1024 + k % 64, half * X_UNIT, terms == 2,
                         x_integers(v_get(x + k, V_LEFT(k, end)), &scale, terms == 2), VL);
        k = end;
    }
    for (size_t k = (to->K + VL - 1) / VL * VL; k < half; k += VL)
        put_integers(line + k / 64 * 1024 + k % 64, half * X_UNIT, terms == 2, vi_zero(), VL);
}

#endif

/* Rows first .. of floats, as many as x_int_height says, or to the last; x[i]: row first + i. */
INLINE void x_int_put_terms(const int terms, const struct x_int *to, size_t first,
                            const float *const *x)
{
    const size_t height = x_int_height(to), m = to->n - first < height ? to->n - first : height;
    (void)m;
#if EMBER_ISA >= 1
    if (to->form == X_INT_WOVEN) {
        x_int_tile(terms, to, first, m, x);
        return;
    }
#endif
#if EMBER_ISA == 4
    if (to->form == X_INT_UNITS) {
        x_int_unit(terms, to, first, x[0]);
        return;
    }
#endif
    x_int_row(terms == 2, x[0], to->K, to->segment, (int8_t *)to->x + first * to->x_stride,
              (float *)(to->scale + first * to->scale_stride),
              to->form == X_INT_ONE ? x_int_sums(to) : NULL);
}
INLINE void x_int_put(const struct x_int *to, size_t first, const float *const *x)
{
    if (to->terms == 2)
        x_int_put_terms(2, to, first, x);
    else
        x_int_put_terms(1, to, first, x);
}

#endif
