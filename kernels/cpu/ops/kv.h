/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys and values in the forms that a KV page keeps them in (ember/op.h): float32 to them and back.
 * Widening is exact for all but int8, whose scale the users apply themselves: to a key's score, and
 * to a value's weight.
 *
 * How a head's elements stand in its block of a page: V as in ember/op.h, [page_size, dv]; K
 * transposed, [dk, page_size], so that a vector holds one element of many keys. Or both in tiles
 * (below). Scales of int8 stand as in ember/op.h.
 */
#ifndef EMBER_KERNELS_CPU_KV_H
#define EMBER_KERNELS_CPU_KV_H

#include "kernels/cpu/simd.h"

INLINE size_t kv_size(enum ember_dtype dtype)
{
    return dtype == EMBER_F32 ? 4 : dtype == EMBER_I8 ? 1 : 2;
}

/* Bytes from an int8 block of n elements to its scales. */
INLINE size_t kv_scales_at(size_t n)
{
    return (n + 3) & ~(size_t)3;
}

/* VL codes as float32. */
INLINE vf v_load_i8(const int8_t *p)
{
#if VL == 16
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
#elif VL == 8
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)));
#else
    float wide[VL];
    for (int i = 0; i < VL; i++)
        wide[i] = (float)(int)p[i];
    return v_load(wide);
#endif
}

/* VL elements as float32. */
INLINE vf kv_load(const char *p, const enum ember_dtype dtype)
{
    return dtype == EMBER_I8 ? v_load_i8((const int8_t *)p) : v_load_w(p, 0, dtype);
}

/* Element i as float32. */
INLINE float kv_at(const char *p, size_t i, enum ember_dtype dtype)
{
    return dtype == EMBER_I8 ? (float)((const int8_t *)p)[i] : w_at(p, i, dtype);
}

/* n <= VL elements as float32, then zeros. */
INLINE vf kv_get(const char *p, const enum ember_dtype dtype, size_t n)
{
    float wide[VL] = {0};
    if (n >= VL)
        return kv_load(p, dtype);
    if (dtype != EMBER_I8)
        return v_load_w_part(p, 0, dtype, n);
    for (size_t i = 0; i < n; i++)
        wide[i] = kv_at(p, i, dtype);
    return v_load(wide);
}

INLINE uint32_t kv_bits(float x)
{
    union {
        float value;
        uint32_t bits;
    } u = {x};
    return u.bits;
}

/* To nearest, ties to even; a NaN stays one. */
INLINE uint16_t kv_to_bf16(float x)
{
    uint32_t bits = kv_bits(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

/* The same for half precision: what does not fit becomes infinite, what is small a denormal. */
INLINE uint16_t kv_to_f16(float x)
{
    uint32_t bits = kv_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    union {
        uint32_t bits;
        float value;
    } u = {magnitude};
    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x47800000) /* 65536 */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) { /* 2^-14: the sum's last bits count 2^-24, rounded by the add */
        u.value += 0.5f;
        return (uint16_t)(sign | (u.bits - 0x3f000000));
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((magnitude - 0x38000000) >> 13));
}

/*
 * n floats to `out`; int8 as the op `quantize` does it, with the scale in *scale: the largest
 * magnitude over 127, codes to nearest; a row that is not all finite has scale NaN and zeros.
 */
INLINE void kv_narrow(const float *from, enum ember_dtype dtype, size_t n, char *out, float *scale)
{
    switch (dtype) {
    case EMBER_BF16:
        for (size_t i = 0; i < n; i++)
            ((uint16_t *)out)[i] = kv_to_bf16(from[i]);
        return;
    case EMBER_F16:
        for (size_t i = 0; i < n; i++)
            ((uint16_t *)out)[i] = kv_to_f16(from[i]);
        return;
    case EMBER_I8: {
        int8_t *to = (int8_t *)out;
        vf most = v_zero(), sum = v_zero();
        for (size_t i = 0; i < n; i += VL) {
            vf x = v_get(from + i, V_LEFT(i, n));
            most = v_max(v_abs(x), most);
            sum = v_add(sum, v_sub(x, x)); /* NaN unless all are finite */
        }
        float top = v_reduce_max(most), finite = v_sum(sum);
        *scale = finite == 0 ? top / 127 : __builtin_nanf("");
        for (size_t i = 0; i < n; i += VL) {
            size_t left = V_LEFT(i, n);
            vf x = v_div(v_get(from + i, left), v_set(*scale));
            vi code = v_to_int(v_min(v_set(127.0f), v_max(v_set(-127.0f), x)));
            int32_t codes[VL];
            __builtin_memcpy(codes, &code, sizeof(codes));
            for (size_t j = 0; j < left; j++)
                to[i + j] = *scale > 0 ? (int8_t)codes[j] : 0;
        }
        return;
    }
    default:
        for (size_t i = 0; i < n; i += VL)
            v_put((float *)out + i, v_get(from + i, V_LEFT(i, n)), V_LEFT(i, n));
    }
}

/* A key, narrowed, to its place in a head's block: an element for each page_size. */
INLINE void kv_key_column(char *out, enum ember_dtype dtype, const char *key, size_t dk,
                          size_t page_size)
{
    if (kv_size(dtype) == 4)
        for (size_t d = 0; d < dk; d++)
            ((uint32_t *)out)[d * page_size] = ((const uint32_t *)key)[d];
    else if (kv_size(dtype) == 2)
        for (size_t d = 0; d < dk; d++)
            ((uint16_t *)out)[d * page_size] = ((const uint16_t *)key)[d];
    else
        for (size_t d = 0; d < dk; d++)
            out[d * page_size] = key[d];
}

#if VL == 16
/* 16 words of 16 rows, one another's columns. */
INLINE void kv_transpose(vi *v)
{
    vi a[16];
    UNROLL
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    UNROLL
    for (int i = 0; i < 16; i += 4)
        UNROLL
    for (int j = 0; j < 2; j++) {
        v[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + 2 + j]);
        v[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + 2 + j]);
    }
    /* v[4 g + c] has of rows 4 g .. the columns c, 4 + c, 8 + c, 12 + c, four words each */
    UNROLL
    for (int c = 0; c < 4; c++) {
        a[c] = _mm512_shuffle_i32x4(v[c], v[4 + c], 0x44);
        a[4 + c] = _mm512_shuffle_i32x4(v[c], v[4 + c], 0xee);
        a[8 + c] = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0x44);
        a[12 + c] = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0xee);
    }
    UNROLL
    for (int c = 0; c < 4; c++) {
        v[c] = _mm512_shuffle_i32x4(a[c], a[8 + c], 0x88);
        v[4 + c] = _mm512_shuffle_i32x4(a[c], a[8 + c], 0xdd);
        v[8 + c] = _mm512_shuffle_i32x4(a[4 + c], a[12 + c], 0x88);
        v[12 + c] = _mm512_shuffle_i32x4(a[4 + c], a[12 + c], 0xdd);
    }
}
#endif

/* n <= 16 keys of slots behind one another, narrowed, `apart` bytes from each to the next. */
INLINE void kv_key_columns(char *out, enum ember_dtype dtype, const char *keys, size_t apart,
                           size_t n, size_t dk, size_t page_size)
{
    const size_t size = kv_size(dtype);
#if VL == 16
    for (size_t d = 0; n > 3 && d < dk; d += 16) {
        const __mmask16 columns = v_mask(V_LEFT(d, dk)), rows = v_mask(n);
        vi v[16];
        UNROLL
        for (size_t i = 0; i < 16; i++) {
            const char *at = keys + i * apart + d * size;
            v[i] = vi_zero();
            if (i >= n)
                continue;
            v[i] = size == 4   ? _mm512_maskz_loadu_epi32(columns, at)
                   : size == 2 ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(columns, at))
                               : _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(columns, at));
        }
        kv_transpose(v);
        UNROLL
        for (size_t j = 0; j < 16; j++) {
            char *to = out + (d + j) * page_size * size;
            if (d + j >= dk)
                continue;
            if (size == 4)
                _mm512_mask_storeu_epi32(to, rows, v[j]);
            else if (size == 2)
                _mm512_mask_cvtepi32_storeu_epi16(to, rows, v[j]);
            else
                _mm512_mask_cvtepi32_storeu_epi8(to, rows, v[j]);
        }
    }
    if (n > 3)
        return;
#endif
    for (size_t i = 0; i < n; i++)
        kv_key_column(out + i * size, dtype, keys + i * apart, dk, page_size);
}

/*
 * Pages in tiles. A head's K (V) of a page of 16 tokens is as many bytes as in rows, of them 64 a
 * line:
 *
 *   K: of each 32 of dk 16 lines; line i holds elements 2i and 2i + 1 of all 16 keys, side by side
 *   V: of each 16 of dv 8 lines; line i holds the 16 elements of keys 2i and 2i + 1, side by side
 *
 * which is how a matrix unit reads bf16; dk is a multiple of 32, dv of 16. bf16 pages hold that
 * once. float32 pages hold it twice: each 16 (8) lines of upper terms are followed by those of
 * lower ones, whose sum is the value but for 2^-18 of it; what is not finite has a lower term of 0.
 */
#if VL == 16
INLINE __m256i kv_bf16(vf x)
{
    const vi bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
    vi even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    vi up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), even);
    vi nan = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
}

/* One of the two terms of x. */
INLINE __m256i kv_term(vf x, int lower)
{
    __m256i high = kv_bf16(x);
    if (!lower)
        return high;
    vf back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
    vf left = v_sub(x, back);
    return _mm256_maskz_mov_epi16(_mm512_cmp_ps_mask(left, left, _CMP_ORD_Q), kv_bf16(left));
}

/* The key (value) of token `slot` of a page to its head's lines there; `terms` 1 or 2. */
INLINE void kv_key_tiles(char *head, int terms, size_t slot, const float *x, size_t dk)
{
    const vi lines =
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(64));
    for (size_t d = 0; d < dk; d += 32)
        for (int term = 0; term < terms; term++, head += 1024) {
            vi pairs = _mm512_inserti64x4(_mm512_castsi256_si512(kv_term(v_load(x + d), term)),
                                          kv_term(v_load(x + d + 16), term), 1);
            _mm512_i32scatter_epi32(head + slot * 4, lines, pairs, 1);
        }
}
INLINE void kv_value_tiles(char *head, int terms, size_t slot, const float *x, size_t dv)
{
    const __mmask32 mask = slot & 1 ? 0xaaaaaaaa : 0x55555555;
    for (size_t d = 0; d < dv; d += 16)
        for (int term = 0; term < terms; term++, head += 512) {
            vi wide = _mm512_cvtepu16_epi32(kv_term(v_load(x + d), term));
            wide = _mm512_sll_epi32(wide, _mm_cvtsi32_si128(slot & 1 ? 16 : 0));
            _mm512_mask_storeu_epi16(head + slot / 2 * 64, mask, wide);
        }
}
#endif

#endif
