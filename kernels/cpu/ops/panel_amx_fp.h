/* SPDX-License-Identifier: Apache-2.0 */
/*
 * FP8 and FP4 by matrix tiles: both fit bf16, so that lines of codes are written out as lines of
 * bf16, some steps of 32 k ahead of their products, for all rows of x at once. x is the sum of two
 * bf16, as in panel_amx_bf16.h.
 *
 * A scale that is a power of two goes into the exponents of what is written (one below 2^-117 or
 * above 2^119 counts as that). Others are applied to the sums of their group: out += sum * scale.
 * Within that the order is that of TDPBF16PS, the same for any number of rows, one too: lines are
 * read by vectors, so that a tile of one row does not wait for memory.
 */
#ifndef EMBER_KERNELS_CPU_PANEL_AMX_FP_H
#define EMBER_KERNELS_CPU_PANEL_AMX_FP_H

#include "kernels/cpu/ops/panel_amx_bf16.h"

#define FP_ROWS 128    /* rows of x that a line is written out for */
#define FP_LINES 8192u /* bytes of bf16 that are written out at a time */
#define FP_STEP 1024u  /* bytes of them of a panel's 32 k */

/* x of weights of small floats, whose lines are written out byte by byte. */
INLINE void fp_pack(const char *const *x, size_t m, size_t K, char *to)
{
    x_tiles_pack(1, x, m, K, to);
}

/* ---- lines of codes to lines of bf16 ---- */

/*
 * Scaled codes are written times the largest power of two that keeps them finite, and what their
 * scale 2^(s - 127) lacks to that is taken off their exponents; a zero stays one, since the
 * subtraction saturates. A scale beyond what keeps all codes normal counts as the last that does.
 */
#define FP8_UP 119
#define FP4_UP 125

INLINE vi fp_exponents(const struct panels *q, size_t p, size_t step, const int up, const int low)
{
    const size_t g = q->group == 32 ? step : step * 32 / q->group;
    __m128i s = _mm_loadu_si128((const void *)(q->scale + (p * q->groups + g) * EMBER_PANEL));
    s = _mm_max_epu8(s, _mm_set1_epi8((char)low));
    vi down = _mm512_cvtepu8_epi32(_mm_subs_epu8(_mm_set1_epi8((char)(up + 127)), s));
    down = _mm512_slli_epi32(down, 7);
    return _mm512_or_si512(down, _mm512_slli_epi32(down, 16));
}

INLINE void fp_put(const int scaled, vi line, vi exponents, char *to)
{
    _mm512_store_si512((void *)to, scaled ? _mm512_subs_epu16(line, exponents) : line);
}

/* E4M3 whose exponent is 0: multiples of 2^-9, which bf16 has as normal numbers. Of an index VPERMW
 * reads five bits: those of a number that is not small do not matter. */
INLINE vi fp8_small(const int up, vi code, vi line)
{
    const int16_t e = (int16_t)(up << 7);
    const vi table = _mm512_castsi128_si512(_mm_setr_epi16(
        0, 0x3b00 + e, 0x3b80 + e, 0x3bc0 + e, 0x3c00 + e, 0x3c20 + e, 0x3c40 + e, 0x3c60 + e));
    const __mmask32 small = _mm512_testn_epi16_mask(code, vi_set16(0x0780));
    const __mmask32 some = _mm512_test_epi16_mask(code, vi_set16(0x07f0));
    line = _mm512_mask_permutexvar_epi16(line, small, vi_srl16(code, 4), table);
    const vi sign = vi_and(code, vi_set16((short)0x8000));
    return _mm512_or_si512(line, _mm512_maskz_mov_epi16(some, sign)); /* no zero has a sign */
}

/* 32 k of FP8 of panel p: even bytes of a line, then odd ones. */
INLINE void fp8_write(const int scaled, const struct panels *q, size_t p, size_t step, char *to)
{
    const int up = scaled ? FP8_UP : 0;
    const char *w = q->w + p * q->panel_bytes + step * 512;
    const vi bits = vi_set16((short)0x87f0), bias = vi_set16((short)((120 + up) << 7));
    const vi exponents = scaled ? fp_exponents(q, p, step, up, 10) : vi_zero();
    UNROLL
    for (size_t i = 0; i < 8; i++, w += 64, to += 128) {
        const vi codes = vi_load(w);
        __builtin_prefetch(w + PANEL_AHEAD);
        vi even = vi_and(vi_sra16(vi_sll16(codes, 8), 4), bits);
        vi odd = vi_and(vi_sra16(codes, 4), bits);
        vi a = _mm512_add_epi16(even, bias), b = _mm512_add_epi16(odd, bias);
        if (__builtin_expect(_mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78)) != 0, 0)) {
            a = fp8_small(up, even, a);
            b = fp8_small(up, odd, b);
        }
        fp_put(scaled, a, exponents, to);
        fp_put(scaled, b, exponents, to + 64);
    }
}

/* 32 k of FP4 of panel p: of a line the lower halves of even and odd bytes, then the upper ones,
 * which are 16 k on. Of an index VPERMW reads five bits: the fifth does not matter. */
INLINE void fp4_write(const int scaled, const struct panels *q, size_t p, size_t step, char *to)
{
    const int e = scaled ? FP4_UP << 7 : 0, n = -0x8000 + e;
    const char *w = q->w + p * q->panel_bytes + step * 256;
    const __m256i half = _mm256_setr_epi16(
        0, (short)(0x3f00 + e), (short)(0x3f80 + e), (short)(0x3fc0 + e), (short)(0x4000 + e),
        (short)(0x4040 + e), (short)(0x4080 + e), (short)(0x40c0 + e), 0, (short)(0x3f00 + n),
        (short)(0x3f80 + n), (short)(0x3fc0 + n), (short)(0x4000 + n), (short)(0x4040 + n),
        (short)(0x4080 + n), (short)(0x40c0 + n));
    const vi table = _mm512_inserti64x4(_mm512_castsi256_si512(half), half, 1);
    const vi exponents = scaled ? fp_exponents(q, p, step, FP4_UP, 2) : vi_zero();
    UNROLL
    for (size_t i = 0; i < 4; i++, w += 64, to += 128) {
        const vi codes = vi_load(w);
        __builtin_prefetch(w + PANEL_AHEAD);
        fp_put(scaled, _mm512_permutexvar_epi16(codes, table), exponents, to);
        fp_put(scaled, _mm512_permutexvar_epi16(vi_srl16(codes, 8), table), exponents, to + 64);
        fp_put(scaled, _mm512_permutexvar_epi16(vi_srl16(codes, 4), table), exponents, to + 512);
        fp_put(scaled, _mm512_permutexvar_epi16(vi_srl16(codes, 12), table), exponents, to + 576);
    }
}

/* Step `step` of panel p as FP_STEP bytes of bf16 at `to`. */
typedef void (*fp_write_fn)(const struct panels *q, size_t p, size_t step, char *to);

#define FP_WRITE(name, body, scaled)                                                               \
    static __attribute__((noinline)) void name(const struct panels *q, size_t p, size_t step,      \
                                               char *to)                                           \
    {                                                                                              \
        body(scaled, q, p, step, to);                                                              \
    }
FP_WRITE(fp8_plain, fp8_write, 0)
FP_WRITE(fp8_scaled, fp8_write, 1)
FP_WRITE(fp4_plain, fp4_write, 0)
FP_WRITE(fp4_scaled, fp4_write, 1)

/* ---- products ---- */

/* A step of 16 rows (or fewer) against P <= 4 panels, whose lines are at w. */
INLINE void fp_low(const int P, const char *x, size_t m, const char *w)
{
    AMX_LOAD(4, x, 64);
    AMX_LOAD(5, x + m * 64, 64);
    AMX_LOAD(6, w, 64);
    AMX_BF16(0, 4, 6);
    AMX_LOAD(7, w + FP_STEP, 64);
    AMX_BF16(1, 4, 7);
    AMX_BF16(0, 5, 6);
    AMX_BF16(1, 5, 7);
    if (P == 2)
        return;
    AMX_LOAD(6, w + 2 * FP_STEP, 64);
    AMX_BF16(2, 4, 6);
    AMX_LOAD(7, w + 3 * FP_STEP, 64);
    AMX_BF16(3, 4, 7);
    AMX_BF16(2, 5, 6);
    AMX_BF16(3, 5, 7);
}

/* A step of 16 rows at x and m more at y against two panels. */
INLINE void fp_high(const char *x, const char *y, size_t m, const char *w)
{
    AMX_LOAD(4, x, 64);
    AMX_LOAD(6, w, 64);
    AMX_BF16(0, 4, 6);
    AMX_LOAD(5, y, 64);
    AMX_BF16(2, 5, 6);
    AMX_LOAD(7, w + FP_STEP, 64);
    AMX_BF16(1, 4, 7);
    AMX_BF16(3, 5, 7);
    AMX_LOAD(4, x + 1024, 64);
    AMX_BF16(0, 4, 6);
    AMX_LOAD(5, y + m * 64, 64);
    AMX_BF16(2, 5, 6);
    AMX_BF16(1, 4, 7);
    AMX_BF16(3, 5, 7);
}

/* Rows of x against some panels. */
struct fp_part {
    const struct panels *q;
    fp_write_fn write;
    size_t steps, segment; /* of 32 k: all, and those whose sums have a scale of their own */
    int scaled;            /* what is written has its scale */
    size_t p, panels;      /* from p on, as many as P or fewer */
    const char *x;         /* as fp_pack made it */
    size_t n;              /* rows; <= 16, or of two panels <= FP_ROWS */
};

/* Of each 32 rows four tiles, those of the first 16 rows first: the sums of a segment, and those of
 * all segments before times their scales. */
struct fp_sums {
    _Alignas(64) float tiles[FP_ROWS / 32][4][256];
    _Alignas(64) float acc[FP_ROWS / 32][4][256];
};

/* Whether a segment ends before step `end`. */
INLINE int fp_ends(const struct fp_part *a, size_t end)
{
    return end % a->segment == 0 || end == a->steps;
}

/* Steps first .. end - 1, all of one segment, whose lines are at w, with 32 rows from g * 32 on. */
INLINE void fp_multiply(const int P, const struct fp_part *a, size_t first, size_t end,
                        const char *w, size_t g, size_t *shape, float (*tiles)[256])
{
    const size_t row_bytes = EMBER_X_TMP_BYTES(a->q->K);
    const size_t m = a->n - g * 32 < 32 ? a->n - g * 32 : 32, low = m < 16 ? m : 16;
    const char *x = a->x + g * 32 * row_bytes, *y = x + 16 * row_bytes;
    if (m != *shape)
        amx_configure(low, m > 16 ? m - 16 : low, 64);
    *shape = m;
    if (first % a->segment == 0) {
        AMX_ZERO(0);
        AMX_ZERO(1);
        AMX_ZERO(2);
        AMX_ZERO(3);
    } else if (a->n > 32) {
        AMX_LOAD(0, tiles[0], 64);
        AMX_LOAD(1, tiles[1], 64);
        AMX_LOAD(2, tiles[2], 64);
        AMX_LOAD(3, tiles[3], 64);
    }
    for (size_t s = first; s < end; s++, w += P * FP_STEP) {
        if (P == 2 && m > 16)
            fp_high(x + s * 2048, y + s * (m - 16) * 128, m - 16, w);
        else
            fp_low(P, x + s * low * 128, low, w);
    }
    if (a->n > 32 || fp_ends(a, end)) {
        AMX_STORE(0, tiles[0], 64);
        AMX_STORE(1, tiles[1], 64);
        AMX_STORE(2, tiles[2], 64);
        AMX_STORE(3, tiles[3], 64);
    }
}

/* The segment that ends before step `end`: out += sum * scale. */
INLINE void fp_add(const struct fp_part *a, size_t end, struct fp_sums *sums)
{
    const struct panels *q = a->q;
    const size_t group = (end - 1) * 32 / q->group;
    for (size_t j = 0; j < a->panels; j++) {
        const vf scale = panel_scale(q, a->p + j, group, 0);
        for (size_t r = 0; r < a->n; r += 16) {
            const size_t m = a->n - r < 16 ? a->n - r : 16, at = r % 32 / 16 * 2 + j;
            const float *from = sums->tiles[r / 32][at];
            float *to = sums->acc[r / 32][at];
            for (size_t i = 0; i < m * 16; i += 16)
                v_store(to + i, v_fma(v_load(from + i), scale,
                                      end <= a->segment ? v_zero() : v_load(to + i)));
        }
    }
}

/*
 * All of k, some steps at a time: they are written out, the sums of those before are added up, and
 * they are multiplied. In turns, since a tile is not loaded before stores in front of it are done.
 */
INLINE void fp_rows(const int P, const struct fp_part *a, float *const *out,
                    const struct post *post)
{
    _Alignas(64) char lines[FP_LINES];
    struct fp_sums sums;
    size_t shape = 0;
    for (size_t first = 0, end; first < a->steps; first = end) {
        const size_t left = a->segment - first % a->segment, most = FP_LINES / FP_STEP / (size_t)P;
        end = first + (left < most ? left : most);
        end = end < a->steps ? end : a->steps;
        for (size_t s = first; s < end; s++)
            for (size_t j = 0; j < a->panels; j++)
                a->write(a->q, a->p + j, s, lines + ((s - first) * (size_t)P + j) * FP_STEP);
        if (!a->scaled && first && fp_ends(a, first))
            fp_add(a, first, &sums);
        for (size_t g = 0; g * 32 < a->n; g++)
            fp_multiply(P, a, first, end, lines, g, &shape, sums.tiles[g]);
    }
    if (!a->scaled)
        fp_add(a, a->steps, &sums);
    for (size_t i = 0; i < a->n; i++)
        for (size_t j = 0; j < a->panels; j++) {
            float(*tiles)[256] = a->scaled ? sums.tiles[i / 32] : sums.acc[i / 32];
            vf v = v_load(tiles[i % 32 / 16 * 2 + j] + i % 16 * 16);
            panel_put(a->q, a->p + j, out[i], &v, post);
        }
}

static __attribute__((unused)) void fp_amx(enum ember_quant quant, const struct panels *q,
                                           const struct panel_rows *rows, struct range panels,
                                           const struct post *post)
{
    const int eight = quant == EMBER_QUANT_FP8;
    struct fp_part a = {.q = q, .steps = (q->K + 31) / 32, .scaled = q->scale_dtype == EMBER_U8};
    a.segment = a.scaled || q->group >= q->K ? a.steps : q->group / 32;
    a.write = eight ? a.scaled ? fp8_scaled : fp8_plain : a.scaled ? fp4_scaled : fp4_plain;
    for (size_t r = 0; r < rows->n; r += a.n) {
        a.n = rows->n - r < FP_ROWS ? rows->n - r : FP_ROWS;
        a.x = rows->tmp + r * EMBER_X_TMP_BYTES(q->K);
        for (a.p = panels.first; a.p < panels.end; a.p += a.panels) {
            const size_t left = panels.end - a.p, most = a.n <= 16 && left > 2 ? 4 : 2;
            a.panels = left < most ? left : most;
            if (most == 4)
                fp_rows(4, &a, rows->out + r, post);
            else
                fp_rows(2, &a, rows->out + r, post);
        }
    }
    amx_release();
}

#endif
