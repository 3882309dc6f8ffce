/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys and values in the forms that a KV page keeps them in (ember/op.h): float32 to them and back.
 * Widening is exact for all but int8, whose scale the users apply themselves: to a key's score, and
 * to a value's weight.
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

/* n elements as float32: `from` itself, or `to` filled. */
INLINE const float *kv_widen(const char *from, enum ember_dtype dtype, size_t n, float *to)
{
    size_t i = 0;
    switch (dtype) {
    case EMBER_BF16:
        for (; i < n; i += VL)
            v_put(to + i, v_get_w(from, i, EMBER_BF16, V_LEFT(i, n)), V_LEFT(i, n));
        return to;
    case EMBER_F16:
        for (; i < n; i += VL)
            v_put(to + i, v_get_w(from, i, EMBER_F16, V_LEFT(i, n)), V_LEFT(i, n));
        return to;
    case EMBER_I8:
        for (; i + VL <= n; i += VL)
            v_store(to + i, v_load_i8((const int8_t *)from + i));
        for (; i < n; i++)
            to[i] = (float)(int)((const int8_t *)from)[i];
        return to;
    default:
        return (const float *)from;
    }
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

#endif
