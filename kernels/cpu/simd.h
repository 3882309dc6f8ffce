/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small vector layer: VL floats at a time, for the ISA that EMBER_ISA names (0 SSE2, 1 AVX2 + FMA
 * + F16C, 2 AVX-512 F/BW/DQ/VL, 3 with VNNI and BF16, 4 with AMX). On AArch64 there is 0 alone, and
 * it is NEON (simd_neon.h). What is not here is written in plain C by its user.
 *
 * Everything is exact in the sense of kernel.h: one order of operations for each element whatever
 * its place in a vector or a tail. Tails are loads of part of a vector (the other lanes 0), so an
 * element meets the same instructions. The build says -ffp-contract=off; v_fma fuses where the ISA
 * can (NEON too) and is mul + add in SSE2.
 */
#ifndef EMBER_KERNELS_CPU_SIMD_H
#define EMBER_KERNELS_CPU_SIMD_H

#include <stddef.h>
#include <stdint.h>

#include <ember/op.h>

#ifndef EMBER_ISA
#error "EMBER_ISA is not set"
#endif

#if defined(__aarch64__)
#include "kernels/cpu/simd_neon.h"
#else
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline, unused))
#define UNROLL _Pragma("GCC unroll 16")

/* A kernel's entry: exported with the ISA in its name ahead of time, static in a specialised build.
 */
#ifdef SPEC_ENTRY
#define KERNEL(name)                                                                               \
    static __attribute__((unused)) void name(const uint64_t *args, uint32_t block,                 \
                                             uint32_t n_blocks)
#else
#define KERNEL_SYMBOL3(isa, name) cpu_kernel_##isa##_##name
#define KERNEL_SYMBOL2(isa, name) KERNEL_SYMBOL3(isa, name)
#define KERNEL_SYMBOL(name) KERNEL_SYMBOL2(EMBER_ISA, name)
#define KERNEL(name)                                                                               \
    void KERNEL_SYMBOL(name)(const uint64_t *args, uint32_t block, uint32_t n_blocks);             \
    void KERNEL_SYMBOL(name)(const uint64_t *args, uint32_t block, uint32_t n_blocks)
#endif

#if EMBER_ISA >= 2 && EMBER_ISA < 16

#define VL 16
typedef __m512 vf;
typedef __m512i vi;
#define v_zero() _mm512_setzero_ps()
#define v_set(x) _mm512_set1_ps(x)
#define v_load(p) _mm512_loadu_ps(p)
#define v_store(p, v) _mm512_storeu_ps(p, v)
#define v_add(a, b) _mm512_add_ps(a, b)
#define v_sub(a, b) _mm512_sub_ps(a, b)
#define v_mul(a, b) _mm512_mul_ps(a, b)
#define v_div(a, b) _mm512_div_ps(a, b)
#define v_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define v_min(a, b) _mm512_min_ps(a, b) /* b when one is NaN */
#define v_max(a, b) _mm512_max_ps(a, b)
#define v_abs(a) _mm512_abs_ps(a)
#define v_to_int(a) _mm512_cvtps_epi32(a) /* to nearest */
#define v_from_int(a) _mm512_cvtepi32_ps(a)
/* 2^n for integers n in -126..127 */
#define v_exp2i(n)                                                                                 \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23))
/* a < b ? x : y; y when a or b is NaN */
#define v_select_lt(a, b, x, y) _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x)
/* |a| with the sign of b */
#define v_copysign(a, b)                                                                           \
    _mm512_castsi512_ps(_mm512_ternarylogic_epi32(                                                 \
        _mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(b), _mm512_castps_si512(a), 0xca))

INLINE __mmask16 v_mask(size_t n)
{
    return (__mmask16)((1u << n) - 1);
}
INLINE vf v_load_part(const float *p, size_t n)
{
    return _mm512_maskz_loadu_ps(v_mask(n), p);
}
INLINE void v_store_part(float *p, vf v, size_t n)
{
    _mm512_mask_storeu_ps(p, v_mask(n), v);
}
INLINE vf v_load_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
INLINE vf v_load_bf16_part(const uint16_t *p, size_t n)
{
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(v_mask(n), p)), 16));
}
INLINE vf v_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
}
INLINE vf v_load_f16_part(const uint16_t *p, size_t n)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(v_mask(n), p));
}
/* Lanes i and i + 8, then i and i + 4. */
INLINE __m128 v_fold_add(vf v)
{
    __m256 y = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    return _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
}
INLINE float v_reduce_max(vf v)
{
    return _mm512_reduce_max_ps(v);
}
/* The sums of four vectors, each in the order of v_sum. */
INLINE __m128 v_sum4(vf a, vf b, vf c, vf d)
{
    vf ab = v_add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    vf cd = v_add(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    vf s = v_add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    s = v_add(s, _mm512_permute_ps(s, 0x4e));
    s = v_add(s, _mm512_permute_ps(s, 0xb1));
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(
        _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), s));
}

#define v_even_bf16(p) _mm512_castsi512_ps(_mm512_slli_epi32(vi_load(p), 16))
#define v_odd_bf16(p)                                                                              \
    _mm512_castsi512_ps(_mm512_and_si512(vi_load(p), _mm512_set1_epi32((int)0xffff0000)))
#define vi_zero() _mm512_setzero_si512()
#define vi_load(p) _mm512_loadu_si512((const void *)(p))
#define vi_set16(x) _mm512_set1_epi16(x)
#define vi_set_at(p) _mm512_set1_epi32(*(const int32_t *)(p))
#define vi_and(a, b) _mm512_and_si512(a, b)
#define vi_add(a, b) _mm512_add_epi32(a, b)
#define vi_sub16(a, b) _mm512_sub_epi16(a, b)
#define vi_sll16(a, n) _mm512_slli_epi16(a, n)
#define vi_srl16(a, n) _mm512_srli_epi16(a, n)
#define vi_sra16(a, n) _mm512_srai_epi16(a, n)
#define vi_madd16(a, b) _mm512_madd_epi16(a, b)
#define vi_add16(a, b) _mm512_add_epi16(a, b)
#define vi_xor(a, b) _mm512_xor_si512(a, b)
#define vi_sra32(a, n) _mm512_srai_epi32(a, n)
#define vi_sll32(a, n) _mm512_slli_epi32(a, n)
#define vi_srl32(a, n) _mm512_srli_epi32(a, n)
#define vi_set32(x) _mm512_set1_epi32(x)
#define v_cast(a) _mm512_castsi512_ps(a)
#define vi_madd8(a, b) _mm512_maddubs_epi16(a, b) /* unsigned bytes, signed ones */
#define v_stream(p, v) _mm512_stream_ps(p, v)
#define V_REGISTER "v"

#elif EMBER_ISA == 1

#define VL 8
typedef __m256 vf;
typedef __m256i vi;
#define v_zero() _mm256_setzero_ps()
#define v_set(x) _mm256_set1_ps(x)
#define v_load(p) _mm256_loadu_ps(p)
#define v_store(p, v) _mm256_storeu_ps(p, v)
#define v_add(a, b) _mm256_add_ps(a, b)
#define v_sub(a, b) _mm256_sub_ps(a, b)
#define v_mul(a, b) _mm256_mul_ps(a, b)
#define v_div(a, b) _mm256_div_ps(a, b)
#define v_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define v_min(a, b) _mm256_min_ps(a, b)
#define v_max(a, b) _mm256_max_ps(a, b)
#define v_abs(a) _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a)
#define v_to_int(a) _mm256_cvtps_epi32(a)
#define v_from_int(a) _mm256_cvtepi32_ps(a)
#define v_exp2i(n)                                                                                 \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23))
#define v_select_lt(a, b, x, y) _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ))
#define v_copysign(a, b) _mm256_or_ps(v_abs(a), _mm256_and_ps(_mm256_set1_ps(-0.0f), b))

INLINE __m256i v_mask(size_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE vf v_load_part(const float *p, size_t n)
{
    return _mm256_maskload_ps(p, v_mask(n));
}
INLINE void v_store_part(float *p, vf v, size_t n)
{
    _mm256_maskstore_ps(p, v_mask(n), v);
}
INLINE vf v_load_bf16(const uint16_t *p)
{
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}
INLINE vf v_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
}
INLINE __m128 v_fold_add(vf v)
{
    return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}
INLINE float v_reduce_max(vf v)
{
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

#define v_even_bf16(p) _mm256_castsi256_ps(_mm256_slli_epi32(vi_load(p), 16))
#define v_odd_bf16(p)                                                                              \
    _mm256_castsi256_ps(_mm256_and_si256(vi_load(p), _mm256_set1_epi32((int)0xffff0000)))
#define vi_zero() _mm256_setzero_si256()
#define vi_load(p) _mm256_loadu_si256((const void *)(p))
#define vi_set16(x) _mm256_set1_epi16(x)
#define vi_set_at(p) _mm256_set1_epi32(*(const int32_t *)(p))
#define vi_and(a, b) _mm256_and_si256(a, b)
#define vi_add(a, b) _mm256_add_epi32(a, b)
#define vi_sub16(a, b) _mm256_sub_epi16(a, b)
#define vi_sll16(a, n) _mm256_slli_epi16(a, n)
#define vi_srl16(a, n) _mm256_srli_epi16(a, n)
#define vi_sra16(a, n) _mm256_srai_epi16(a, n)
#define vi_madd16(a, b) _mm256_madd_epi16(a, b)
#define vi_add16(a, b) _mm256_add_epi16(a, b)
#define vi_xor(a, b) _mm256_xor_si256(a, b)
#define vi_sra32(a, n) _mm256_srai_epi32(a, n)
#define vi_sll32(a, n) _mm256_slli_epi32(a, n)
#define vi_srl32(a, n) _mm256_srli_epi32(a, n)
#define vi_set32(x) _mm256_set1_epi32(x)
#define v_cast(a) _mm256_castsi256_ps(a)
#define vi_madd8(a, b) _mm256_maddubs_epi16(a, b) /* unsigned bytes, signed ones */
#define v_stream(p, v) _mm256_stream_ps(p, v)
#define V_REGISTER "x"

#elif EMBER_ISA == 0

#define VL 4
typedef __m128 vf;
typedef __m128i vi;
#define v_zero() _mm_setzero_ps()
#define v_set(x) _mm_set1_ps(x)
#define v_load(p) _mm_loadu_ps(p)
#define v_store(p, v) _mm_storeu_ps(p, v)
#define v_add(a, b) _mm_add_ps(a, b)
#define v_sub(a, b) _mm_sub_ps(a, b)
#define v_mul(a, b) _mm_mul_ps(a, b)
#define v_div(a, b) _mm_div_ps(a, b)
#if defined(__aarch64__)
#define v_fma(a, b, c) vfmaq_f32(c, a, b)
#else
#define v_fma(a, b, c) _mm_add_ps(_mm_mul_ps(a, b), c)
#endif
#define v_min(a, b) _mm_min_ps(a, b)
#define v_max(a, b) _mm_max_ps(a, b)
#define v_abs(a) _mm_andnot_ps(_mm_set1_ps(-0.0f), a)
#define v_to_int(a) _mm_cvtps_epi32(a)
#define v_from_int(a) _mm_cvtepi32_ps(a)
#define v_exp2i(n) _mm_castsi128_ps(_mm_slli_epi32(_mm_add_epi32(n, _mm_set1_epi32(127)), 23))
#define v_copysign(a, b) _mm_or_ps(v_abs(a), _mm_and_ps(_mm_set1_ps(-0.0f), b))

INLINE vf v_select_lt(vf a, vf b, vf x, vf y)
{
    vf m = _mm_cmplt_ps(a, b);
    return _mm_or_ps(_mm_and_ps(m, x), _mm_andnot_ps(m, y));
}
INLINE vf v_load_part(const float *p, size_t n)
{
    float t[4] = {p[0], n > 1 ? p[1] : 0, n > 2 ? p[2] : 0, 0};
    return _mm_loadu_ps(t);
}
INLINE void v_store_part(float *p, vf v, size_t n)
{
    float t[4];
    _mm_storeu_ps(t, v);
    for (size_t i = 0; i < n; i++)
        p[i] = t[i];
}
INLINE vf v_load_bf16(const uint16_t *p)
{
    return _mm_castsi128_ps(
        _mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const void *)p)));
}
/* Exponent and fraction move up by 13 bits, 2^112 corrects the exponent's bias, denormals included.
 */
INLINE vf v_load_f16(const uint16_t *p)
{
    __m128i h = _mm_unpacklo_epi16(_mm_loadl_epi64((const void *)p), _mm_setzero_si128());
    __m128i magnitude = _mm_and_si128(h, _mm_set1_epi32(0x7fff));
    __m128i sign = _mm_slli_epi32(_mm_and_si128(h, _mm_set1_epi32(0x8000)), 16);
    __m128i special = _mm_and_si128(_mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x7bff)),
                                    _mm_set1_epi32(0x7f800000));
    vf v = _mm_mul_ps(_mm_castsi128_ps(_mm_slli_epi32(magnitude, 13)), _mm_set1_ps(0x1p112f));
    return _mm_or_ps(v, _mm_castsi128_ps(_mm_or_si128(sign, special)));
}
INLINE __m128 v_fold_add(vf v)
{
    return v;
}
INLINE float v_reduce_max(vf v)
{
    __m128 x = _mm_max_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

#define v_even_bf16(p) _mm_castsi128_ps(_mm_slli_epi32(vi_load(p), 16))
#define v_odd_bf16(p) _mm_castsi128_ps(_mm_and_si128(vi_load(p), _mm_set1_epi32((int)0xffff0000)))
#define vi_zero() _mm_setzero_si128()
#define vi_load(p) _mm_loadu_si128((const void *)(p))
#define vi_set16(x) _mm_set1_epi16(x)
#define vi_set_at(p) _mm_set1_epi32(*(const int32_t *)(p))
#define vi_and(a, b) _mm_and_si128(a, b)
#define vi_add(a, b) _mm_add_epi32(a, b)
#define vi_sub16(a, b) _mm_sub_epi16(a, b)
#define vi_sll16(a, n) _mm_slli_epi16(a, n)
#define vi_srl16(a, n) _mm_srli_epi16(a, n)
#define vi_sra16(a, n) _mm_srai_epi16(a, n)
#define vi_madd16(a, b) _mm_madd_epi16(a, b)
#define vi_add16(a, b) _mm_add_epi16(a, b)
#define vi_xor(a, b) _mm_xor_si128(a, b)
#define vi_sra32(a, n) _mm_srai_epi32(a, n)
#define vi_sll32(a, n) _mm_slli_epi32(a, n)
#define vi_srl32(a, n) _mm_srli_epi32(a, n)
#define vi_set32(x) _mm_set1_epi32(x)
#define v_cast(a) _mm_castsi128_ps(a)
#if defined(__aarch64__)
#define v_stream(p, v) v_store(p, v)
#define v_fence() ((void)0)
#define V_REGISTER "w"
#else
#define v_stream(p, v) _mm_stream_ps(p, v)
#define V_REGISTER "x"
#endif

#else
#error "EMBER_ISA names no variant"
#endif

/* Past the caches (v_stream), before others read it. */
#ifndef v_fence
#define v_fence() _mm_sfence()
#endif

/* In a register, whatever the compiler thinks of it: not loaded or computed anew. */
#define v_keep(v) __asm__("" : "+" V_REGISTER(v))

/* Products of 32-bit lanes, their lower halves. */
typedef uint32_t vi_lanes __attribute__((vector_size(sizeof(vi))));
INLINE vi vi_mul32(vi a, vi b)
{
    return (vi)((vi_lanes)a * (vi_lanes)b);
}

#if EMBER_ISA < 2
INLINE __m128 v_sum4(vf a, vf b, vf c, vf d)
{
    __m128 r0 = v_fold_add(a), r1 = v_fold_add(b), r2 = v_fold_add(c), r3 = v_fold_add(d);
    _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
    return _mm_add_ps(_mm_add_ps(r0, r2), _mm_add_ps(r1, r3));
}
INLINE vf v_load_bf16_part(const uint16_t *p, size_t n)
{
    uint16_t t[VL] = {0};
    for (size_t i = 0; i < n; i++)
        t[i] = p[i];
    return v_load_bf16(t);
}
INLINE vf v_load_f16_part(const uint16_t *p, size_t n)
{
    uint16_t t[VL] = {0};
    for (size_t i = 0; i < n; i++)
        t[i] = p[i];
    return v_load_f16(t);
}
#endif

/* The sum of a vector's lanes: halves until four are left, then (0 + 2) + (1 + 3). */
INLINE float v_sum(vf v)
{
    __m128 x = v_fold_add(v);
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}

/* The sum of 32-bit lanes. */
INLINE int32_t vi_sum(vi v)
{
    uint32_t t[VL], sum = 0;
    __builtin_memcpy(t, &v, sizeof(t));
    for (int i = 0; i < VL; i++)
        sum += t[i];
    return (int32_t)sum;
}

INLINE float v_first(vf v)
{
    float t[VL];
    v_store(t, v);
    return t[0];
}

/* VL elements of a weight from index i on, as float32. */
INLINE vf v_load_w(const void *w, size_t i, enum ember_dtype dtype)
{
    if (dtype == EMBER_BF16)
        return v_load_bf16((const uint16_t *)w + i);
    if (dtype == EMBER_F16)
        return v_load_f16((const uint16_t *)w + i);
    return v_load((const float *)w + i);
}
INLINE vf v_load_w_part(const void *w, size_t i, enum ember_dtype dtype, size_t n)
{
    if (dtype == EMBER_BF16)
        return v_load_bf16_part((const uint16_t *)w + i, n);
    if (dtype == EMBER_F16)
        return v_load_f16_part((const uint16_t *)w + i, n);
    return v_load_part((const float *)w + i, n);
}

/* n = VL or what is left of a row: one path for whole vectors and tails. */
#define V_LEFT(i, n) ((n) - (i) < VL ? (n) - (i) : VL)
INLINE vf v_load_if(int loads, const float *p)
{
#if EMBER_ISA >= 2
    return _mm512_maskz_loadu_ps(loads ? 0xffff : 0, p);
#else
    return loads ? v_load(p) : v_zero();
#endif
}
INLINE vf v_get(const float *p, size_t n)
{
    return n >= VL ? v_load(p) : v_load_part(p, n);
}
INLINE void v_put(float *p, vf v, size_t n)
{
    if (n >= VL)
        v_store(p, v);
    else
        v_store_part(p, v, n);
}
INLINE vf v_get_w(const void *w, size_t i, enum ember_dtype dtype, size_t n)
{
    return n >= VL ? v_load_w(w, i, dtype) : v_load_w_part(w, i, dtype, n);
}

/* One element of a vector of weights. */
INLINE float w_at(const void *w, size_t i, enum ember_dtype dtype)
{
    if (dtype == EMBER_F32)
        return ((const float *)w)[i];
    return v_first(v_load_w_part(w, i, dtype, 1));
}

/* Scale i of a quantised weight: a float type, or u8 for 2^(s - 127). */
INLINE float scale_at(const void *scales, size_t i, enum ember_dtype dtype)
{
    if (dtype != EMBER_U8)
        return w_at(scales, i, dtype);
    const uint32_t s = ((const uint8_t *)scales)[i];
    union {
        uint32_t bits;
        float value;
    } u = {s ? s << 23 : 1u << 22}; /* 2^-127 is below the normal numbers */
    return u.value;
}

/*
 * e^x to about an ulp; 0 below -87.3, e^88.3 above that, NaN for NaN. x = n ln 2 + r with ln 2 in
 * two parts of which the first has few bits, then the series of e^r to the seventh power.
 */
INLINE vf v_exp(vf x)
{
    const vf lowest = v_set(-87.3f);
    vf y = v_min(v_set(88.3f), v_max(lowest, x));
    vi n = v_to_int(v_mul(y, v_set(1.44269504f)));
    vf f = v_from_int(n);
    vf r = v_fma(f, v_set(-0.693359375f), y);
    r = v_fma(f, v_set(2.12194440e-4f), r);
    vf p = v_set(1.0f / 5040);
    p = v_fma(p, r, v_set(1.0f / 720));
    p = v_fma(p, r, v_set(1.0f / 120));
    p = v_fma(p, r, v_set(1.0f / 24));
    p = v_fma(p, r, v_set(1.0f / 6));
    p = v_fma(p, r, v_set(0.5f));
    p = v_fma(v_mul(r, r), p, r);
    p = v_add(p, v_set(1.0f));
    return v_select_lt(x, lowest, v_zero(), v_mul(p, v_exp2i(n)));
}

INLINE vf v_sigmoid(vf x)
{
    return v_div(v_set(1.0f), v_add(v_set(1.0f), v_exp(v_sub(v_zero(), x))));
}

/* Below 0.65 x times a polynomial in x^2 (Chebyshev fit of tanh(x) / x), beyond it 1 - 2 / (e^2x +
 * 1). */
INLINE vf v_tanh(vf x)
{
    vf a = v_abs(x), t = v_mul(a, a);
    vf p = v_set(-5.465067518e-03f);
    p = v_fma(p, t, v_set(2.041179989e-02f));
    p = v_fma(p, t, v_set(-5.366401977e-02f));
    p = v_fma(p, t, v_set(1.333039597e-01f));
    p = v_fma(p, t, v_set(-3.333322833e-01f));
    p = v_fma(v_mul(p, t), a, a);
    vf e = v_exp(v_add(a, a));
    vf far = v_sub(v_set(1.0f), v_div(v_set(2.0f), v_add(e, v_set(1.0f))));
    return v_copysign(v_select_lt(a, v_set(0.65f), p, far), x);
}

/* Below 1 x times a polynomial in x^2, from 1 to 4 1 - e^-Q(x) with Q = -ln erfc fitted; 1 beyond.
 */
INLINE vf v_erf(vf x)
{
    vf a = v_min(v_set(4.0f), v_abs(x)), t = v_mul(a, a);
    vf p = v_set(7.875875047e-05f);
    p = v_fma(p, t, v_set(-8.016864282e-04f));
    p = v_fma(p, t, v_set(5.189087423e-03f));
    p = v_fma(p, t, v_set(-2.685421201e-02f));
    p = v_fma(p, t, v_set(1.128359472e-01f));
    p = v_fma(p, t, v_set(-3.761262667e-01f));
    p = v_fma(p, t, v_set(1.128379166e+00f));
    vf q = v_set(-1.637151414e-06f);
    q = v_fma(q, a, v_set(4.605804268e-05f));
    q = v_fma(q, a, v_set(-5.968056256e-04f));
    q = v_fma(q, a, v_set(4.759596294e-03f));
    q = v_fma(q, a, v_set(-2.642113601e-02f));
    q = v_fma(q, a, v_set(1.100800830e-01f));
    q = v_fma(q, a, v_set(6.318260515e-01f));
    q = v_fma(q, a, v_set(1.130233435e+00f));
    q = v_fma(q, a, v_set(-3.201380519e-04f));
    vf far = v_sub(v_set(1.0f), v_exp(v_sub(v_zero(), q)));
    return v_copysign(v_select_lt(a, v_set(1.0f), v_mul(p, a), far), x);
}

INLINE vf v_softcap(vf x, float cap)
{
    return v_mul(v_set(cap), v_tanh(v_div(x, v_set(cap))));
}

INLINE vf v_act(vf x, enum ember_act act)
{
    switch (act) {
    case EMBER_ACT_SILU:
        return v_mul(x, v_sigmoid(x));
    case EMBER_ACT_GELU_TANH: {
        vf inner = v_mul(v_set(0.7978845608f), v_fma(v_mul(v_set(0.044715f), v_mul(x, x)), x, x));
        return v_mul(v_mul(v_set(0.5f), x), v_add(v_set(1.0f), v_tanh(inner)));
    }
    case EMBER_ACT_GELU_ERF:
        return v_mul(v_mul(v_set(0.5f), x),
                     v_add(v_set(1.0f), v_erf(v_mul(x, v_set(0.7071067812f)))));
    default: {
        vf y = v_max(v_zero(), x);
        return v_mul(y, y);
    }
    }
}

/* Part `block` of n_blocks of 0..n-1. */
struct range {
    size_t first, end;
};
INLINE struct range block_range(size_t n, uint32_t block, uint32_t n_blocks)
{
    return (struct range){n * block / n_blocks, n * ((size_t)block + 1) / n_blocks};
}

INLINE float arg_float(uint64_t word)
{
    union {
        uint32_t bits;
        float value;
    } u = {(uint32_t)word};
    return u.value;
}
INLINE double arg_double(uint64_t word)
{
    union {
        uint64_t bits;
        double value;
    } u = {word};
    return u.value;
}
INLINE char *arg_pointer(uint64_t word)
{
    return (char *)(uintptr_t)word;
}
/* Rows of this step: the header's count, never more than the op was planned for. */
INLINE size_t arg_rows(const uint64_t *args)
{
    uint32_t n = *(const uint32_t *)arg_pointer(args[0]);
    return n < args[1] ? n : args[1];
}

#endif
