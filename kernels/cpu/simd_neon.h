/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The baseline's four lanes on AArch64: the operations of SSE2 that simd.h and the bodies use below
 * AVX2, under those names, by NEON. Each is one instruction or two, so that a body written for the
 * baseline is a NEON body; what is better otherwise here (fused multiply-add) simd.h takes from
 * NEON itself. Semantics are SSE2's also where NEON's own differ: min and max give b when one is
 * NaN.
 */
#ifndef EMBER_KERNELS_CPU_SIMD_NEON_H
#define EMBER_KERNELS_CPU_SIMD_NEON_H

#include <arm_neon.h>

typedef float32x4_t __m128;
typedef int32x4_t __m128i;

#define NEON_OP static inline __attribute__((always_inline, unused))
#define as_u(v) vreinterpretq_u32_s32(v)
#define as_s(v) vreinterpretq_s32_u32(v)
#define as_16(v) vreinterpretq_s16_s32(v)
#define from_16(v) vreinterpretq_s32_s16(v)
#define bits_of(v) vreinterpretq_s32_f32(v)
#define float_of(v) vreinterpretq_f32_s32(v)

/* ---- floats ---- */

#define _mm_setzero_ps() vdupq_n_f32(0)
#define _mm_set1_ps(x) vdupq_n_f32(x)
#define _mm_loadu_ps(p) vld1q_f32(p)
#define _mm_storeu_ps(p, v) vst1q_f32(p, v)
#define _mm_add_ps(a, b) vaddq_f32(a, b)
#define _mm_sub_ps(a, b) vsubq_f32(a, b)
#define _mm_mul_ps(a, b) vmulq_f32(a, b)
#define _mm_div_ps(a, b) vdivq_f32(a, b)
#define _mm_cvtss_f32(a) vgetq_lane_f32(a, 0)
#define _mm_castsi128_ps(a) float_of(a)
#define _mm_castps_si128(a) bits_of(a)
#define _mm_and_ps(a, b) float_of(vandq_s32(bits_of(a), bits_of(b)))
#define _mm_or_ps(a, b) float_of(vorrq_s32(bits_of(a), bits_of(b)))
#define _mm_xor_ps(a, b) float_of(veorq_s32(bits_of(a), bits_of(b)))
#define _mm_andnot_ps(a, b) float_of(vbicq_s32(bits_of(b), bits_of(a)))
#define _mm_cmplt_ps(a, b) float_of(as_s(vcltq_f32(a, b)))

NEON_OP __m128 _mm_min_ps(__m128 a, __m128 b)
{
    return vbslq_f32(vcltq_f32(a, b), a, b);
}
NEON_OP __m128 _mm_max_ps(__m128 a, __m128 b)
{
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}
NEON_OP __m128 _mm_max_ss(__m128 a, __m128 b)
{
    return vsetq_lane_f32(vgetq_lane_f32(_mm_max_ps(a, b), 0), a, 0);
}
NEON_OP __m128 _mm_add_ss(__m128 a, __m128 b)
{
    return vsetq_lane_f32(vgetq_lane_f32(a, 0) + vgetq_lane_f32(b, 0), a, 0);
}
/* The high halves of b and a. */
NEON_OP __m128 _mm_movehl_ps(__m128 a, __m128 b)
{
    return vcombine_f32(vget_high_f32(b), vget_high_f32(a));
}
NEON_OP __m128 _mm_shuffle_ps(__m128 a, __m128 b, int lanes)
{
    return (__m128){a[lanes & 3], a[lanes >> 2 & 3], b[lanes >> 4 & 3], b[lanes >> 6 & 3]};
}
#define _MM_TRANSPOSE4_PS(r0, r1, r2, r3)                                                          \
    do {                                                                                           \
        float32x4x2_t low_ = vzipq_f32(r0, r2), high_ = vzipq_f32(r1, r3);                         \
        float32x4x2_t first_ = vzipq_f32(low_.val[0], high_.val[0]);                               \
        float32x4x2_t second_ = vzipq_f32(low_.val[1], high_.val[1]);                              \
        (r0) = first_.val[0];                                                                      \
        (r1) = first_.val[1];                                                                      \
        (r2) = second_.val[0];                                                                     \
        (r3) = second_.val[1];                                                                     \
    } while (0)

/* ---- integers ---- */

#define _mm_setzero_si128() vdupq_n_s32(0)
#define _mm_set1_epi32(x) vdupq_n_s32(x)
#define _mm_set1_epi16(x) from_16(vdupq_n_s16(x))
#define _mm_loadu_si128(p) vld1q_s32((const int32_t *)(p))
#define _mm_storeu_si128(p, v) vst1q_s32((int32_t *)(p), v)
#define _mm_loadl_epi64(p) vcombine_s32(vld1_s32((const int32_t *)(p)), vdup_n_s32(0))
#define _mm_cvtsi32_si128(x) vsetq_lane_s32(x, vdupq_n_s32(0), 0)
#define _mm_cvtsi128_si32(a) vgetq_lane_s32(a, 0)
#define _mm_cvtps_epi32(a) vcvtnq_s32_f32(a)
#define _mm_cvtepi32_ps(a) vcvtq_f32_s32(a)
#define _mm_and_si128(a, b) vandq_s32(a, b)
#define _mm_or_si128(a, b) vorrq_s32(a, b)
#define _mm_xor_si128(a, b) veorq_s32(a, b)
#define _mm_andnot_si128(a, b) vbicq_s32(b, a)
#define _mm_add_epi32(a, b) vaddq_s32(a, b)
#define _mm_sub_epi32(a, b) vsubq_s32(a, b)
#define _mm_add_epi16(a, b) from_16(vaddq_s16(as_16(a), as_16(b)))
#define _mm_sub_epi16(a, b) from_16(vsubq_s16(as_16(a), as_16(b)))
#define _mm_cmpgt_epi32(a, b) as_s(vcgtq_s32(a, b))
#define _mm_cmpgt_epi16(a, b) from_16(vreinterpretq_s16_u16(vcgtq_s16(as_16(a), as_16(b))))
#define _mm_slli_epi32(a, n) vshlq_s32(a, vdupq_n_s32(n))
#define _mm_srai_epi32(a, n) vshlq_s32(a, vdupq_n_s32(-(n)))
#define _mm_srli_epi32(a, n) as_s(vshlq_u32(as_u(a), vdupq_n_s32(-(n))))
#define _mm_slli_epi16(a, n) from_16(vshlq_s16(as_16(a), vdupq_n_s16(n)))
#define _mm_srai_epi16(a, n) from_16(vshlq_s16(as_16(a), vdupq_n_s16(-(n))))
#define _mm_srli_epi16(a, n)                                                                       \
    from_16(vreinterpretq_s16_u16(                                                                 \
        vshlq_u16(vreinterpretq_u16_s16(as_16(a)), vdupq_n_s16((int16_t)(-(n))))))
#define _mm_unpacklo_ps(a, b) vzip1q_f32(a, b)
#define _mm_unpackhi_ps(a, b) vzip2q_f32(a, b)
#define _mm_unpacklo_epi16(a, b) from_16(vzip1q_s16(as_16(a), as_16(b)))
#define _mm_unpackhi_epi16(a, b) from_16(vzip2q_s16(as_16(a), as_16(b)))
#define _mm_unpacklo_epi8(a, b)                                                                    \
    vreinterpretq_s32_s8(vzip1q_s8(vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b)))
#define _mm_unpackhi_epi8(a, b)                                                                    \
    vreinterpretq_s32_s8(vzip2q_s8(vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b)))

/* Sums of neighbouring products of 16 bits. */
NEON_OP __m128i _mm_madd_epi16(__m128i a, __m128i b)
{
    return vpaddq_s32(vmull_s16(vget_low_s16(as_16(a)), vget_low_s16(as_16(b))),
                      vmull_high_s16(as_16(a), as_16(b)));
}
NEON_OP __m128i _mm_shuffle_epi32(__m128i a, int lanes)
{
    return (__m128i){a[lanes & 3], a[lanes >> 2 & 3], a[lanes >> 4 & 3], a[lanes >> 6 & 3]};
}

#endif
