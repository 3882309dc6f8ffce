/* SPDX-License-Identifier: Apache-2.0 */
/*
 * x as products by matrix tiles read it: rows in sixteens, the last of n - n / 16 * 16; of each 32
 * of k the upper terms of a sixteen's rows, 64 bytes each, then the lower ones; zeros behind the
 * last k.
 */
#ifndef EMBER_KERNELS_CPU_X_TILES_H
#define EMBER_KERNELS_CPU_X_TILES_H

#include "kernels/cpu/ops/panel_amx.h"

/*
 * m <= 16 rows of K floats as tiles: of each 32 of k m rows of upper terms, then m of lower ones.
 * by_bytes: of each four k in the order 0, 2, 1, 3, that of the bytes of a line of codes in 16-bit
 * lanes, even ones first.
 */
INLINE void x_tiles_pack(const int by_bytes, const char *const *x, size_t m, size_t K, char *to)
{
    const vi order = _mm512_setr_epi32(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    for (size_t i = 0; i < m; i++) {
        const float *row = (const float *)x[i];
        char *at = to + i * 64;
        for (size_t k = 0; k < K; k += 32, at += m * 128)
            for (size_t j = 0; j < 32; j += 16) {
                __m256i high = _mm256_setzero_si256(), low = high;
                if (k + j < K) {
                    const vf v = v_get(row + k + j, V_LEFT(k + j, K));
                    amx_split(by_bytes ? _mm512_permutexvar_ps(order, v) : v, &high, &low);
                }
                _mm256_storeu_si256((void *)(at + j * 2), high);
                _mm256_storeu_si256((void *)(at + m * 64 + j * 2), low);
            }
    }
}

/* x of weights of bf16 */
INLINE void bf16_pack(const char *const *x, size_t m, size_t K, char *to)
{
    x_tiles_pack(0, x, m, K, to);
}

/* Where row r of n rows has its k, a multiple of 16. *ret_low: bytes from upper to lower terms. */
INLINE char *x_tiles_at(char *x, size_t K, size_t n, size_t r, size_t k, size_t *ret_low)
{
    const size_t m = n - r / 16 * 16 < 16 ? n - r / 16 * 16 : 16;
    *ret_low = m * 64;
    return x + r / 16 * 16 * EMBER_X_TMP_BYTES(K) + k / 32 * m * 128 + r % 16 * 64 + k % 32 * 2;
}

/* 16 of k, which begin where x_tiles_at says; zeros beyond the last. */
INLINE void x_tiles_put(char *at, size_t low, vf x, size_t k, size_t K)
{
    __m256i upper, lower;
    amx_split(x, &upper, &lower);
    _mm256_storeu_si256((void *)at, upper);
    _mm256_storeu_si256((void *)(at + low), lower);
    if (k % 32 || k + 16 < K)
        return;
    _mm256_storeu_si256((void *)(at + 32), _mm256_setzero_si256());
    _mm256_storeu_si256((void *)(at + low + 32), _mm256_setzero_si256());
}

#endif
