/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Integer products by VPDPBUSD, which multiplies unsigned bytes with signed ones: codes are made
 * unsigned by adding a bias (128 to int8, 12 to twice an E2M1; 4 bits have their zero point), and
 * what that adds to a sum, bias * (sum of x), is taken off where the sum begins. Of x in two terms
 * the lower one is unsigned itself.
 */
#ifndef EMBER_KERNELS_CPU_PANEL_VNNI_H
#define EMBER_KERNELS_CPU_PANEL_VNNI_H

#include "kernels/cpu/ops/panel.h"

#define VNNI_SEGMENTS 1024 /* of a row, of which sums are kept */
#define VNNI_M 6

/* Sums of x over each segment, of the upper and the lower term. */
struct vnni_sums {
    int32_t high[VNNI_M][VNNI_SEGMENTS], low[VNNI_M][VNNI_SEGMENTS];
};

INLINE void vnni_sum(const struct panels *q, const int8_t *x, int32_t *high, int32_t *low)
{
    const size_t half = EMBER_X8_COLUMNS(q->K);
    const vi ones = _mm512_set1_epi8(1);
    for (size_t s = 0, k = 0; k < q->K; s++) {
        const size_t end = q->K - k < q->segment ? q->K : k + q->segment;
        vi h = vi_zero(), l = vi_zero();
        for (; k < end; k += 64) {
            const __mmask64 part = end - k < 64 ? (UINT64_C(1) << (end - k)) - 1 : ~UINT64_C(0);
            h = _mm512_dpbusd_epi32(h, ones, _mm512_maskz_loadu_epi8(part, x + k));
            if (q->terms == 2)
                l = _mm512_dpbusd_epi32(l, _mm512_maskz_loadu_epi8(part, x + half + k), ones);
        }
        k = end;
        high[s] = _mm512_reduce_add_epi32(h);
        low[s] = _mm512_reduce_add_epi32(l);
    }
}

/* Zero points of a group in 32-bit lanes. */
INLINE vi vnni_zero(const struct panels *q, size_t p, size_t g, enum ember_quant quant)
{
    if (quant == EMBER_QUANT_INT8)
        return _mm512_set1_epi32(128);
    if (quant == EMBER_QUANT_FP4)
        return _mm512_set1_epi32(12);
    if (!q->zero)
        return _mm512_set1_epi32(8);
    return _mm512_cvtepu8_epi32(
        _mm_loadu_si128((const void *)(q->zero + (p * q->groups + g) * EMBER_PANEL)));
}

/* A line against M rows: `codes` unsigned, `plain` as signed bytes. */
INLINE void vnni_line(const int M, const int terms, vi codes, vi plain,
                      const struct panel_rows *rows, size_t r, size_t k, size_t half, vi *high,
                      vi *low, const int step)
{
    UNROLL
    for (int m = 0; m < M; m++) {
        const char *x = rows->x[r + (size_t)m] + k;
        high[m * step] = _mm512_dpbusd_epi32(high[m * step], codes, vi_set_at(x));
        if (terms == 2)
            low[m * step] = _mm512_dpbusd_epi32(low[m * step], vi_set_at(x + half), plain);
    }
}

/* M rows from r on against P panels from p on; four: of 4 bits. */
INLINE void vnni_tile(const int M, const int P, const int four, const int terms,
                      enum ember_quant quant, const struct panels *q, size_t p,
                      const struct panel_rows *rows, size_t r, const struct vnni_sums *sums,
                      const struct post *post)
{
    const size_t half = EMBER_X8_COLUMNS(q->K);
    const char *w = q->w + p * q->panel_bytes;
    const vi flip = _mm512_set1_epi8((char)0x80), nibble = _mm512_set1_epi8(15);
    const vi table = _mm512_broadcast_i32x4(
        quant == EMBER_QUANT_FP4
            ? _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
            : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    vf acc[VNNI_M][4];
    UNROLL
    for (int m = 0; m < M; m++)
        UNROLL
    for (int j = 0; j < P; j++)
        acc[m][j] = v_zero();
    for (size_t s = 0, k = 0; k < q->K; s++) {
        const size_t g = k / q->group, end = q->K - k < q->segment ? q->K : k + q->segment;
        vi high[VNNI_M][4], low[VNNI_M][4];
        UNROLL
        for (int j = 0; j < P; j++) {
            const vi zero = vnni_zero(q, p + (size_t)j, g, quant);
            UNROLL
            for (int m = 0; m < M; m++) {
                high[m][j] = _mm512_sub_epi32(
                    vi_zero(), _mm512_mullo_epi32(zero, _mm512_set1_epi32(sums->high[m][s])));
                low[m][j] = vi_zero();
                if (terms == 2 && four)
                    low[m][j] = _mm512_sub_epi32(
                        vi_zero(), _mm512_mullo_epi32(zero, _mm512_set1_epi32(sums->low[m][s])));
            }
        }
        for (size_t line = four ? k / 8 : k / 4, stop = four ? (end + 31) / 32 * 4 : (end + 3) / 4;
             line < stop; line++) {
            const size_t at = four ? line / 4 * 32 + line % 4 * 4 : line * 4;
            UNROLL
            for (int j = 0; j < P; j++) {
                const char *from = w + (size_t)j * q->panel_bytes + line * EMBER_TILE_LINE;
                const vi codes = vi_load(from);
                if (M == 1)
                    __builtin_prefetch(from + PANEL_AHEAD);
                if (!four) {
                    vnni_line(M, terms, _mm512_xor_si512(codes, flip), codes, rows, r, at, half,
                              &high[0][j], &low[0][j], 4);
                    continue;
                }
                vi c = _mm512_shuffle_epi8(table, vi_and(codes, nibble));
                vnni_line(M, terms, c, c, rows, r, at, half, &high[0][j], &low[0][j], 4);
                c = _mm512_shuffle_epi8(table, vi_and(vi_srl16(codes, 4), nibble));
                vnni_line(M, terms, c, c, rows, r, at + 16, half, &high[0][j], &low[0][j], 4);
            }
        }
        UNROLL
        for (int j = 0; j < P; j++) {
            const vf scale = panel_scale(q, p + (size_t)j, g, 0, quant);
            UNROLL
            for (int m = 0; m < M; m++) {
                vi sum = high[m][j];
                if (terms == 2)
                    sum = vi_add(_mm512_slli_epi32(sum, 8), low[m][j]);
                acc[m][j] =
                    v_add(acc[m][j], v_mul(v_from_int(sum),
                                           v_mul(v_set(rows->scale[r + (size_t)m][s]), scale)));
            }
        }
        k = end;
    }
    UNROLL
    for (int m = 0; m < M; m++)
        UNROLL
    for (int j = 0; j < P; j++)
        panel_put(q, p + (size_t)j, rows->out[r + (size_t)m], &acc[m][j], post);
}

INLINE void vnni_rows(const int four, const int terms, enum ember_quant quant,
                      const struct panels *q, const struct panel_rows *rows, struct range panels,
                      const struct post *post)
{
    const int most = terms == 2 ? 4 : VNNI_M; /* as many sums as there are registers */
    struct vnni_sums sums;
    for (size_t r = 0, m; r < rows->n; r += m) {
        m = rows->n - r >= (size_t)most ? (size_t)most : 1;
        for (size_t i = 0; i < m; i++)
            vnni_sum(q, (const int8_t *)rows->x[r + i], sums.high[i], sums.low[i]);
        size_t p = panels.first;
        if (m == 1)
            for (; p + 4 <= panels.end; p += 4)
                vnni_tile(1, 4, four, terms, quant, q, p, rows, r, &sums, post);
        else
            for (; p + 2 <= panels.end; p += 2)
                vnni_tile(most, 2, four, terms, quant, q, p, rows, r, &sums, post);
        for (; p < panels.end; p++)
            for (size_t i = 0; i < m; i++) {
                if (i) { /* the last panel of many rows, row by row */
                    __builtin_memcpy(sums.high[0], sums.high[i], sizeof sums.high[0]);
                    __builtin_memcpy(sums.low[0], sums.low[i], sizeof sums.low[0]);
                }
                vnni_tile(1, 1, four, terms, quant, q, p, rows, r + i, &sums, post);
            }
    }
}

static __attribute__((unused)) void int_vnni(enum ember_quant quant, const struct panels *q,
                                             const struct panel_rows *rows, struct range panels,
                                             const struct post *post)
{
    if (q->K > q->segment * VNNI_SEGMENTS)
        int_vectors(quant, q, rows, panels, post);
    else if (quant == EMBER_QUANT_INT8 && q->terms == 1)
        vnni_rows(0, 1, quant, q, rows, panels, post);
    else if (quant == EMBER_QUANT_INT8)
        vnni_rows(0, 2, quant, q, rows, panels, post);
    else if (q->terms == 1)
        vnni_rows(1, 1, quant, q, rows, panels, post);
    else
        vnni_rows(1, 2, quant, q, rows, panels, post);
}

#endif
