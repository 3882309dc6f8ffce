/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of float x with weights of small floats, FP8 and FP4, in tiles: by vectors.
 * panel_amx_fp.h has the body for matrix tiles.
 *
 * The order of every output: within a group of the weight's scales even k are added to one sum and
 * odd k to another, k ascending; the two are added, and their sum times the scale is added to those
 * of the groups before.
 */
#ifndef EMBER_KERNELS_CPU_PANEL_FP_H
#define EMBER_KERNELS_CPU_PANEL_FP_H

#include "kernels/cpu/ops/panel.h"

#define FP_M 4      /* rows of x at a time */
#define FP_BLOCK 32 /* of k: 8 lines of FP8, 4 of FP4 */

/* Four codes of each of VL rows, as they stand in a line: of FP8 k .. k + 3, of FP4 also k + 16 ..
 * in the upper halves (high). */
#if EMBER_ISA >= 2 && EMBER_ISA < 16
#define vi_sll32(a, n) _mm512_slli_epi32(a, n)
#define vi_srl32(a, n) _mm512_srli_epi32(a, n)
#define vi_or(a, b) _mm512_or_si512(a, b)
#define vi_set32(x) _mm512_set1_epi32(x)
#define v_cast(a) _mm512_castsi512_ps(a)
#elif EMBER_ISA == 1
#define vi_sll32(a, n) _mm256_slli_epi32(a, n)
#define vi_srl32(a, n) _mm256_srli_epi32(a, n)
#define vi_or(a, b) _mm256_or_si256(a, b)
#define vi_set32(x) _mm256_set1_epi32(x)
#define v_cast(a) _mm256_castsi256_ps(a)
#else
#define vi_sll32(a, n) _mm_slli_epi32(a, n)
#define vi_srl32(a, n) _mm_srli_epi32(a, n)
#define vi_or(a, b) _mm_or_si128(a, b)
#define vi_set32(x) _mm_set1_epi32(x)
#define v_cast(a) _mm_castsi128_ps(a)
#endif

/* E4M3 in byte j of each lane. Its exponent and fraction as those of a float lack 2^120, which also
 * makes denormals right. */
INLINE vf fp8_value(vi line, const int j)
{
    vi size = j < 3 ? vi_sll32(line, 20 - 8 * j) : vi_srl32(line, 4);
    vi sign = vi_and(vi_sll32(line, 24 - 8 * j), vi_set32(INT32_MIN));
    return v_mul(v_cast(vi_or(vi_and(size, vi_set32(0x07f00000)), sign)), v_set(0x1p120f));
}

/* E2M1 in the lowest four bits of each lane. */
INLINE vf fp4_value(vi code)
{
#if EMBER_ISA >= 2 && EMBER_ISA < 16
    return _mm512_permutexvar_ps(code, _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f,
                                                      -1, -1.5f, -2, -3, -4, -6));
#elif EMBER_ISA == 1
    vf size = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), code);
    return _mm256_or_ps(size, v_cast(vi_and(vi_sll32(code, 28), vi_set32(INT32_MIN))));
#else
    vi c = vi_and(code, vi_set32(7)), twice = c; /* 0, 1, 2, 3, 4, 6, 8, 12 */
    twice = _mm_sub_epi32(twice, _mm_cmpgt_epi32(c, vi_set32(4)));
    twice = _mm_sub_epi32(twice, _mm_cmpgt_epi32(c, vi_set32(5)));
    twice = _mm_add_epi32(twice, vi_and(_mm_cmpgt_epi32(c, vi_set32(6)), vi_set32(3)));
    vi sign = vi_and(vi_sll32(code, 28), vi_set32(INT32_MIN));
    return v_cast(_mm_or_si128(_mm_castps_si128(v_mul(v_from_int(twice), v_set(0.5f))), sign));
#endif
}

/* Values of k + 4 i + j of a block. */
INLINE vf fp_value(const enum ember_quant quant, const char *block, const int v, const int i,
                   const int j)
{
    if (quant == EMBER_QUANT_FP8)
        return fp8_value(vi_load(block + i * EMBER_TILE_LINE + v * VL * 4), j);
    const vi line = vi_load(block + i % 4 * EMBER_TILE_LINE + v * VL * 4);
    return fp4_value(vi_srl32(line, 8 * j + i / 4 * 4));
}

/* A block of k: M rows, x[m] pointing at its first k, against VL rows of a panel. */
INLINE void fp_block(const int M, const enum ember_quant quant, const char *block, const int v,
                     const float *const *x, vf *even, vf *odd)
{
    UNROLL
    for (int i = 0; i < FP_BLOCK / 4; i++) {
        UNROLL
        for (int j = 0; j < 4; j++) {
            const vf w = fp_value(quant, block, v, i, j);
            UNROLL
            for (int m = 0; m < M; m++) {
                vf *sum = j % 2 ? &odd[m] : &even[m];
                *sum = v_fma(v_set(x[m][4 * i + j]), w, *sum);
            }
        }
    }
}

/* M rows from r on against the v-th VL rows of panel p. */
INLINE void fp_tile(const int M, const enum ember_quant quant, const struct panels *q, size_t p,
                    const int v, const struct panel_rows *rows, size_t r, vf *total)
{
    const size_t block_bytes = quant == EMBER_QUANT_FP8 ? 512 : 256;
    const char *w = q->w + p * q->panel_bytes;
    vf even[FP_M], odd[FP_M];
    for (int m = 0; m < M; m++)
        total[m] = v_zero();
    for (size_t k = 0, g = 0, end; k < q->K; g++) {
        end = q->K - k < q->group ? q->K : k + q->group;
        for (int m = 0; m < M; m++)
            even[m] = odd[m] = v_zero();
        for (; k < end; k += FP_BLOCK, w += block_bytes) {
            const float *x[FP_M];
            float last[FP_M][FP_BLOCK];
            for (int m = 0; m < M; m++)
                x[m] = (const float *)rows->x[r + (size_t)m] + k;
            if (q->K - k < FP_BLOCK) { /* there is no x behind K */
                for (int m = 0; m < M; m++) {
                    for (size_t i = 0; i < FP_BLOCK; i++)
                        last[m][i] = i < q->K - k ? x[m][i] : 0;
                    x[m] = last[m];
                }
            }
            if (M == 1)
                for (size_t at = 0; at < block_bytes; at += 64)
                    __builtin_prefetch(w + at + PANEL_AHEAD);
            fp_block(M, quant, w, v, x, even, odd);
        }
        k = end;
        const vf scale = panel_scale(q, p, g, v, EMBER_QUANT_NONE);
        for (int m = 0; m < M; m++)
            total[m] = v_fma(v_add(even[m], odd[m]), scale, total[m]);
    }
}

/* M rows from r on against panel p. */
INLINE void fp_panel(const int M, const enum ember_quant quant, const struct panels *q, size_t p,
                     const struct panel_rows *rows, size_t r, const struct post *post)
{
    vf sums[FP_M][PV];
    for (int v = 0; v < PV; v++) {
        vf total[FP_M];
        fp_tile(M, quant, q, p, v, rows, r, total);
        for (int m = 0; m < M; m++)
            sums[m][v] = total[m];
    }
    for (int m = 0; m < M; m++)
        panel_put(q, p, rows->out[r + (size_t)m], sums[m], post);
}

INLINE void fp_vectors_of(const enum ember_quant quant, const struct panels *q,
                          const struct panel_rows *rows, struct range panels,
                          const struct post *post)
{
    for (size_t p = panels.first; p < panels.end; p++) {
        size_t r = 0;
        for (; r + FP_M <= rows->n; r += FP_M)
            fp_panel(FP_M, quant, q, p, rows, r, post);
        for (; r < rows->n; r++)
            fp_panel(1, quant, q, p, rows, r, post);
    }
}

static __attribute__((unused)) void fp_vectors(enum ember_quant quant, const struct panels *q,
                                               const struct panel_rows *rows, struct range panels,
                                               const struct post *post)
{
    if (quant == EMBER_QUANT_FP8)
        fp_vectors_of(EMBER_QUANT_FP8, q, rows, panels, post);
    else
        fp_vectors_of(EMBER_QUANT_FP4, q, rows, panels, post);
}

#endif
