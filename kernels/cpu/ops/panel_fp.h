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

/* Rows and panels at a time. */
#if EMBER_ISA >= 2 && EMBER_ISA < 16
#define FP_M 3
#define FP_P 4
#elif EMBER_ISA == 1
#define FP_M 3
#define FP_P 1
#else
#define FP_M 1
#define FP_P 1
#endif
#define FP_V                                                                                       \
    (BF16_P_FEW * PV) /* vectors of the panels that one row reads at once; FP_P has no more */
#define FP_BLOCK 32   /* of k: 8 lines of FP8, 4 of FP4 */
#define FP_CHUNK 128  /* of k: what many rows have written out at a time */

/* E4M3 in each byte of a line: byte j of each lane to ret[j]. Exponent and fraction as those of a
 * float lack 2^120, which also makes denormals right. */
INLINE void fp8_values(vi line, vf *ret)
{
    const vi keep = vi_set16((int16_t)0x87f0), upper = vi_set32((int32_t)0xffff0000);
    const vi even = vi_and(vi_sra16(vi_sll16(line, 8), 4), keep);
    const vi odd = vi_and(vi_sra16(line, 4), keep);
    ret[0] = v_mul(v_cast(vi_sll32(even, 16)), v_set(0x1p120f));
    ret[1] = v_mul(v_cast(vi_sll32(odd, 16)), v_set(0x1p120f));
    ret[2] = v_mul(v_cast(vi_and(even, upper)), v_set(0x1p120f));
    ret[3] = v_mul(v_cast(vi_and(odd, upper)), v_set(0x1p120f));
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

INLINE size_t fp_block_bytes(const enum ember_quant quant)
{
    return quant == EMBER_QUANT_FP8 ? 512 : 256;
}

/* Values of k + 4 i .. of a block. */
INLINE void fp_values(const enum ember_quant quant, const char *block, const int v, const int i,
                      vf *ret)
{
    if (quant == EMBER_QUANT_FP8) {
        fp8_values(vi_load(block + i * EMBER_TILE_LINE + v * VL * 4), ret);
        return;
    }
    const vi line = vi_load(block + i % 4 * EMBER_TILE_LINE + v * VL * 4);
    UNROLL
    for (int j = 0; j < 4; j++)
        ret[j] = fp4_value(vi_srl32(line, 8 * j + i / 4 * 4));
}

/* ---- one row ---- */

/* Row 0 against P panels from p on. */
INLINE void fp_row(const int P, const enum ember_quant quant, const struct panels *q, size_t p,
                   const struct panel_rows *rows, const struct post *post)
{
    const size_t block_bytes = fp_block_bytes(quant);
    const char *w = q->w + p * q->panel_bytes;
    vf total[FP_V], even[FP_V], odd[FP_V];
    UNROLL
    for (int j = 0; j < P * PV; j++)
        total[j] = v_zero();
    for (size_t k = 0, g = 0, end; k < q->K; k = end, g++) {
        end = q->K - k < q->group ? q->K : k + q->group;
        UNROLL
        for (int j = 0; j < P * PV; j++)
            even[j] = odd[j] = v_zero();
        for (; k < end; k += FP_BLOCK, w += block_bytes) {
            const float *x = (const float *)rows->x[0] + k;
            /* Behind their ends the next panels are fetched. */
            const char *ahead = w + PANEL_AHEAD;
            float last[FP_BLOCK];
            if ((size_t)(ahead - q->w) >= (p + 1) * q->panel_bytes)
                ahead += (size_t)(P - 1) * q->panel_bytes;
            if (q->K - k < FP_BLOCK) { /* there is no x behind K */
                for (size_t i = 0; i < FP_BLOCK; i++)
                    last[i] = i < q->K - k ? x[i] : 0;
                x = last;
            }
            UNROLL
            for (int i = 0; i < FP_BLOCK / 4; i++) {
                UNROLL
                for (int j = 0; j < P * PV; j++) {
                    const size_t panel = (size_t)(j / PV) * q->panel_bytes;
                    vf v[4];
                    if (j % PV == 0 && i < (int)block_bytes / 64)
                        __builtin_prefetch(ahead + panel + i * 64);
                    fp_values(quant, w + panel, j % PV, i, v);
                    even[j] = v_fma(v_set(x[4 * i]), v[0], even[j]);
                    odd[j] = v_fma(v_set(x[4 * i + 1]), v[1], odd[j]);
                    even[j] = v_fma(v_set(x[4 * i + 2]), v[2], even[j]);
                    odd[j] = v_fma(v_set(x[4 * i + 3]), v[3], odd[j]);
                }
            }
        }
        UNROLL
        for (int j = 0; j < P * PV; j++)
            total[j] = v_fma(v_add(even[j], odd[j]),
                             panel_scale(q, p + (size_t)(j / PV), g, j % PV), total[j]);
    }
    UNROLL
    for (int i = 0; i < P; i++)
        panel_put(q, p + (size_t)i, rows->out[0], total + i * PV, post);
}

/* ---- many rows: codes are written out as floats once for all of them ---- */

/* Sums of a row: those of the group so far, and of all groups before. */
struct fp_sums {
    vf even[FP_P * PV], odd[FP_P * PV], total[FP_P * PV];
};

/* In a register: otherwise gcc reads it anew for every product. */
INLINE vf v_kept(vf v)
{
#if !defined(__aarch64__)
    __asm__("" : "+x"(v));
#endif
    return v;
}

/* Some of k: whole groups, or a part of one. */
struct fp_piece {
    size_t k, n, group;
    int begins, ends; /* the first group, the last one */
    vf scale[FP_CHUNK / FP_BLOCK][FP_P * PV];
    const char
        *fetch; /* a line of each panel while two of k are multiplied, then `step` bytes on */
    size_t apart, step;
};

/* M rows of x against a piece, of which w are the values: of each k vectors of P panels. */
INLINE void fp_tile(const int M, const int P, const struct fp_piece *piece, const vf *w,
                    const float *const *x, struct fp_sums *sums)
{
    const char *fetch = piece->fetch;
    for (size_t k = 0, g = 0, end; k < piece->n; k = end, g++) {
        vf even[FP_M][FP_P * PV], odd[FP_M][FP_P * PV];
        const int begins = k > 0 || piece->begins;
        end = piece->n - k < piece->group ? piece->n : k + piece->group;
        UNROLL
        for (int m = 0; m < M; m++) {
            UNROLL
            for (int j = 0; j < P * PV; j++) {
                even[m][j] = begins ? v_zero() : sums[m].even[j];
                odd[m][j] = begins ? v_zero() : sums[m].odd[j];
            }
        }
        for (; k + 2 <= end; k += 2, w += 2 * P * PV, fetch += piece->step) {
            UNROLL
            for (int i = 0; i < P; i++)
                __builtin_prefetch(fetch + (size_t)i * piece->apart);
            vf v[FP_P * PV];
            UNROLL
            for (int j = 0; j < P * PV; j++)
                v[j] = v_kept(w[j]);
            UNROLL
            for (int m = 0; m < M; m++)
                UNROLL
            for (int j = 0; j < P * PV; j++)
                even[m][j] = v_fma(v_set(x[m][k]), v[j], even[m][j]);
            UNROLL
            for (int j = 0; j < P * PV; j++)
                v[j] = v_kept(w[P * PV + j]);
            UNROLL
            for (int m = 0; m < M; m++)
                UNROLL
            for (int j = 0; j < P * PV; j++)
                odd[m][j] = v_fma(v_set(x[m][k + 1]), v[j], odd[m][j]);
        }
        if (k < end) /* the last of all k */
            for (int m = 0; m < M; m++)
                for (int j = 0; j < P * PV; j++)
                    even[m][j] = v_fma(v_set(x[m][k]), w[j], even[m][j]);
        UNROLL
        for (int m = 0; m < M; m++) {
            UNROLL
            for (int j = 0; j < P * PV; j++) {
                if (end < piece->n || piece->ends) {
                    const vf sum = v_add(even[m][j], odd[m][j]);
                    sums[m].total[j] = v_fma(sum, piece->scale[g][j], sums[m].total[j]);
                } else {
                    sums[m].even[j] = even[m][j];
                    sums[m].odd[j] = odd[m][j];
                }
            }
        }
    }
}

/* All rows against a piece. */
INLINE void fp_tiles(const int P, const struct panel_rows *rows, struct fp_piece *piece,
                     const vf *w, struct fp_sums *sums)
{
    for (size_t r = 0, m; r < rows->n; r += m) {
        const float *x[FP_M];
        m = FP_M < 3 ? 1 : rows->n - r == 2 || rows->n - r == 4 ? 2 : 3;
        for (size_t i = 0; i < m; i++)
            x[i] = (const float *)rows->x[r + i] + piece->k;
        if (FP_M < 3)
            fp_tile(1, P, piece, w, x, sums + r);
        else if (m == 2)
            fp_tile(2, P, piece, w, x, sums + r);
        else
            fp_tile(3, P, piece, w, x, sums + r);
        piece->fetch += piece->n / 2 * piece->step;
    }
}

/* Compiled once for both forms of codes. */
static __attribute__((noinline, unused)) void fp_tiles_several(const struct panel_rows *rows,
                                                               struct fp_piece *piece, const vf *w,
                                                               struct fp_sums *sums)
{
    fp_tiles(FP_P, rows, piece, w, sums);
}
static __attribute__((noinline, unused)) void fp_tiles_one(const struct panel_rows *rows,
                                                           struct fp_piece *piece, const vf *w,
                                                           struct fp_sums *sums)
{
    fp_tiles(1, rows, piece, w, sums);
}

/* The piece of P panels from p on that begins at k, and its values. */
INLINE void fp_piece(const int P, const enum ember_quant quant, const struct panels *q, size_t p,
                     size_t k, size_t passes, struct fp_piece *ret, vf *w)
{
    const size_t block_bytes = fp_block_bytes(quant), first = k / q->group;
    /* End of its groups. */
    size_t end = (first + (q->group < FP_CHUNK ? FP_CHUNK / q->group : 1)) * q->group;
    if (end > q->K)
        end = q->K;
    const char *from = q->w + p * q->panel_bytes + k / FP_BLOCK * block_bytes;
    ret->k = k;
    ret->n = end - k < FP_CHUNK ? end - k : FP_CHUNK;
    ret->group = q->group < ret->n ? q->group : ret->n;
    ret->begins = k % q->group == 0;
    ret->ends = k + ret->n == end;
    ret->apart = q->panel_bytes;
    ret->step = block_bytes / (FP_BLOCK / 2) / passes;
    ret->fetch = from + PANEL_AHEAD; /* behind their ends the next panels */
    if ((size_t)(ret->fetch - q->w) >= (p + 1) * q->panel_bytes)
        ret->fetch += (size_t)(P - 1) * q->panel_bytes;
    for (size_t g = 0; g * q->group < ret->n; g++)
        for (int j = 0; j < P * PV; j++)
            ret->scale[g][j] = panel_scale(q, p + (size_t)(j / PV), first + g, j % PV);
    for (size_t b = 0; b < ret->n; b += FP_BLOCK, from += block_bytes) {
        UNROLL
        for (int i = 0; i < FP_BLOCK / 4; i++) {
            UNROLL
            for (int j = 0; j < P * PV; j++) {
                vf v[4];
                fp_values(quant, from + (size_t)(j / PV) * q->panel_bytes, j % PV, i, v);
                UNROLL
                for (int c = 0; c < 4; c++)
                    w[(b + (size_t)(4 * i + c)) * P * PV + (size_t)j] = v[c];
            }
        }
    }
}

/* All rows against P panels from p on. */
INLINE void fp_rows(const int P, const enum ember_quant quant, const struct panels *q, size_t p,
                    const struct panel_rows *rows, const struct post *post)
{
    const size_t passes = (rows->n + FP_M - 1) / FP_M;
    struct fp_sums sums[PANEL_ROWS];
    vf w[FP_CHUNK * FP_P * PV];
    struct fp_piece piece;
    for (size_t r = 0; r < rows->n; r++)
        for (int j = 0; j < P * PV; j++)
            sums[r].total[j] = v_zero();
    for (size_t k = 0; k < q->K; k += piece.n) {
        fp_piece(P, quant, q, p, k, passes, &piece, w);
        if (P == FP_P)
            fp_tiles_several(rows, &piece, w, sums);
        else
            fp_tiles_one(rows, &piece, w, sums);
    }
    for (size_t r = 0; r < rows->n; r++)
        for (int i = 0; i < P; i++)
            panel_put(q, p + (size_t)i, rows->out[r], sums[r].total + i * PV, post);
}

INLINE void fp_vectors_of(const enum ember_quant quant, const struct panels *q,
                          const struct panel_rows *rows, struct range panels,
                          const struct post *post)
{
    size_t p = panels.first;
    if (rows->n == 1) {
        for (; p + BF16_P_FEW <= panels.end; p += BF16_P_FEW)
            fp_row(BF16_P_FEW, quant, q, p, rows, post);
#if BF16_P_FEW > 1
        for (; p < panels.end; p++)
            fp_row(1, quant, q, p, rows, post);
#endif
        return;
    }
    for (; p + FP_P <= panels.end; p += FP_P)
        fp_rows(FP_P, quant, q, p, rows, post);
#if FP_P > 1
    for (; p < panels.end; p++)
        fp_rows(1, quant, q, p, rows, post);
#endif
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
