/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lanes are candidates, so that no sum runs across lanes. Built with QUANTIZE(name) as name_plain
 * and, for AVX2, name_avx2; no multiplication and addition are ever fused (-ffp-contract=off), so
 * both give the same bits.
 */
#include "model/quant/search.h"

#ifndef QUANTIZE_SUFFIX
#error "QUANTIZE_SUFFIX is not set"
#endif
#define JOIN2(name, suffix) name##_##suffix
#define JOIN(name, suffix) JOIN2(name, suffix)
#define QUANTIZE(name) JOIN(name, QUANTIZE_SUFFIX)

#if defined(__AVX2__)
#include <immintrin.h>
#define LANES 8
typedef __m256 vec;
#define v_set(x) _mm256_set1_ps(x)
#define v_load(p) _mm256_loadu_ps(p)
#define v_store(p, v) _mm256_storeu_ps(p, v)
#define v_min(a, b) _mm256_min_ps(a, b)
#define v_max(a, b) _mm256_max_ps(a, b)
#elif defined(__SSE2__)
#include <emmintrin.h>
#define LANES 4
typedef __m128 vec;
#define v_set(x) _mm_set1_ps(x)
#define v_load(p) _mm_loadu_ps(p)
#define v_store(p, v) _mm_storeu_ps(p, v)
#define v_min(a, b) _mm_min_ps(a, b)
#define v_max(a, b) _mm_max_ps(a, b)
#else
#define LANES 1
typedef float vec;
#define v_set(x) (x)
#define v_load(p) (*(p))
#define v_store(p, v) (*(p) = (v))
#define v_min(a, b) ((a) < (b) ? (a) : (b))
#define v_max(a, b) ((a) > (b) ? (a) : (b))
#endif

/* Adding it leaves no bits behind the point of a value below 2^22. */
#define ROUNDER 12582912.0f

/* Arithmetic on vectors is the compiler's own. */
static inline __attribute__((always_inline)) vec code(vec x, vec inverse, vec low, vec high)
{
    const vec rounder = v_set(ROUNDER);
    return v_min(v_max((x * inverse + rounder) - rounder, low), high);
}

/* The mean of the squares. Lanes are values here: eight of them whatever the width of a vector, so
 * that both builds add in one order. */
static float mean_square(const float *w, uint32_t n)
{
    float lanes[8] = {0};
    for (uint32_t i = 0; i < n; i += 8)
        for (int l = 0; l < 8; l++)
            lanes[l] += w[i + l] * w[i + l];
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5]) + (lanes[2] + lanes[6]) +
            (lanes[3] + lanes[7])) /
           (float)n;
}

void QUANTIZE(quantize_sums)(const float *w, uint32_t n, const struct quantize_tries *t,
                             float wq[QUANTIZE_TRIES], float qq[QUANTIZE_TRIES])
{
    const float mean = mean_square(w, n);
    for (int c = 0; c < QUANTIZE_TRIES; c += 2 * LANES) {
        const int d = c + LANES;
        const vec inverse0 = v_load(t->inverse + c), inverse1 = v_load(t->inverse + d);
        const vec low0 = v_load(t->low + c), low1 = v_load(t->low + d);
        const vec high0 = v_load(t->high + c), high1 = v_load(t->high + d);
        vec a0 = v_set(0), a1 = v_set(0), b0 = v_set(0), b1 = v_set(0);
        for (uint32_t i = 0; i < n; i++) {
            const vec x = v_set(w[i]);
            const vec q0 = code(x, inverse0, low0, high0), q1 = code(x, inverse1, low1, high1);
            const vec v = v_set(w[i] * w[i] + mean), vx = v * x;
            a0 += vx * q0;
            a1 += vx * q1;
            b0 += v * (q0 * q0);
            b1 += v * (q1 * q1);
        }
        v_store(wq + c, a0);
        v_store(wq + d, a1);
        v_store(qq + c, b0);
        v_store(qq + d, b1);
    }
}

bool QUANTIZE(quantize_range)(const float *w, uint32_t n, float *ret_low, float *ret_high)
{
    vec low = v_set(0), high = v_set(0), none = v_set(0);
    float lows[LANES], highs[LANES], nones[LANES], sum = 0;
    for (uint32_t i = 0; i < n; i += LANES) {
        const vec x = v_load(w + i);
        low = v_min(x, low);
        high = v_max(x, high);
        none += x * v_set(0); /* NaN of what is not finite */
    }
    v_store(lows, low);
    v_store(highs, high);
    v_store(nones, none);
    *ret_low = *ret_high = 0;
    for (int l = 0; l < LANES; l++) {
        *ret_low = lows[l] < *ret_low ? lows[l] : *ret_low;
        *ret_high = highs[l] > *ret_high ? highs[l] : *ret_high;
        sum += nones[l];
    }
    return sum == 0;
}

/* 32 codes as integers. */
static inline __attribute__((always_inline)) void codes32(const float *w, float inverse, float low,
                                                          float high, int32_t q[32])
{
    float x[32];
    for (int i = 0; i < 32; i += LANES)
        v_store(x + i, code(v_load(w + i), v_set(inverse), v_set(low), v_set(high)));
    for (int i = 0; i < 32; i++)
        q[i] = (int32_t)x[i];
}

void QUANTIZE(quantize_codes8)(const float *w, uint32_t n, float inverse, float low, float high,
                               uint8_t *codes)
{
    for (uint32_t at = 0; at < n; at += 32) {
        int32_t q[32];
        codes32(w + at, inverse, low, high, q);
        for (int i = 0; i < 32; i++)
            codes[at + i] = (uint8_t)q[i];
    }
}

void QUANTIZE(quantize_codes4)(const float *w, uint32_t n, float inverse, float low, float high,
                               uint8_t *codes)
{
    const int32_t first = (int32_t)low;
    for (uint32_t at = 0; at < n; at += 32) {
        int32_t q[32];
        codes32(w + at, inverse, low, high, q);
        for (int i = 0; i < 16; i++)
            codes[at / 2 + i] = (uint8_t)((q[i] - first) | (q[i + 16] - first) << 4);
    }
}
