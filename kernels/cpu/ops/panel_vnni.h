/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Integer products by VPDPBUSD, which multiplies unsigned bytes with signed ones: codes are made
 * unsigned by adding a bias (128 to int8, 12 to twice an E2M1; 4 bits have their zero point), and
 * what that adds to a sum, bias * (sum of x), is taken off where the sum begins. Of x in two terms
 * the lower one is unsigned itself.
 *
 * A tile is VNNI_M / terms rows, woven, against two panels, whose sums fill half the registers;
 * what they come to as floats waits in memory. Some of k at a time goes over all rows, so that its
 * part of the panels stays in the first-level cache, and the next part is fetched meanwhile.
 */
#ifndef EMBER_KERNELS_CPU_PANEL_VNNI_H
#define EMBER_KERNELS_CPU_PANEL_VNNI_H

#include "kernels/cpu/ops/panel.h"

#define VNNI_M 8              /* rows of a tile, of two terms half as many */
#define VNNI_P 2              /* its panels, */
#define VNNI_P_ONE 4          /* and those of one row */
#define VNNI_STEP_K 512       /* of k at a time */
#define VNNI_SEGMENTS 16      /* segments of them, at most */
#define VNNI_SUMS 32768       /* segments of rows at a time, */
#define VNNI_X_BYTES 1048576u /* and bytes of them */

/* sum + a . b: gcc 12 keeps two registers for each sum of the intrinsic, and has too few then. */
INLINE vi vnni_dot(vi sum, vi a_unsigned, vi b_signed)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a_unsigned), "v"(b_signed));
    return sum;
}

/* What the codes' bias adds to the sums of row x in each segment, negated; with zero points, what
 * is to be multiplied with them. Segments are multiples of 32, of which eight are summed at once.
 */
INLINE void vnni_sums(const struct panels *q, const int four, enum ember_quant quant, const char *x,
                      int32_t *ret, size_t step)
{
    const size_t half = EMBER_X8_COLUMNS(q->K), segments = (q->K + q->segment - 1) / q->segment;
    const uint32_t bias = !four ? 128 : quant == EMBER_QUANT_FP4 ? 12 : q->zero ? 1 : 8;
    const vi ones = _mm512_set1_epi8(1), pair = _mm512_set1_epi16(1);
    const vi order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 0, 8, 1, 9, 2, 10, 3, 11);
    size_t s = 0, end = q->segment;
    uint32_t sum = 0;
    for (size_t k = 0; k < half; k += 256) {
        uint32_t eight[8], low[8] = {0};
        for (int term = 0; term < (four ? q->terms : 1); term++) {
            vi d[4];
            UNROLL
            for (size_t i = 0; i < 4; i++) {
                const char *at = x + (size_t)term * half + k + i * 64;
                d[i] = vi_zero();
                if (k + i * 64 < half)
                    d[i] = term ? _mm512_dpbusd_epi32(d[i], vi_load(at), ones)
                                : _mm512_dpbusd_epi32(d[i], ones, vi_load(at));
            }
            vi a = vi_madd16(_mm512_packs_epi32(d[0], d[1]), pair);
            vi b = vi_madd16(_mm512_packs_epi32(d[2], d[3]), pair);
            a = vi_madd16(_mm512_packs_epi32(a, b), pair); /* of 16, [quarter][line] */
            a = vi_add(a, _mm512_shuffle_i32x4(a, a, 0xb1));
            _mm256_storeu_si256((void *)(term ? low : eight),
                                _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, a)));
        }
        for (size_t i = 0; i < 8 && s < segments; i++) {
            sum += (q->terms == 2 ? eight[i] << 8 : eight[i]) + low[i];
            if (k + i * 32 + 32 < end && k + i * 32 + 32 < q->K)
                continue;
            ret[s++ * step] = (int32_t)(0 - bias * sum);
            sum = 0;
            end += q->segment;
        }
    }
}

/* Zero points of a group in 32-bit lanes. */
INLINE vi vnni_zero(const struct panels *q, size_t p, size_t g)
{
    return _mm512_cvtepu8_epi32(
        _mm_loadu_si128((const void *)(q->zero + (p * q->groups + g) * EMBER_PANEL)));
}

/* Eight rows of n bytes, a multiple of 64, to `to`: four bytes of each in turn. */
INLINE void vnni_weave(const char *const *x, size_t n, char *to)
{
    for (size_t k = 0; k < n; k += 32, to += 256) {
        __m256i a[8], b[8];
        UNROLL
        for (int i = 0; i < 8; i++)
            a[i] = _mm256_loadu_si256((const void *)(x[i] + k));
        UNROLL
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
        }
        UNROLL
        for (int i = 0; i < 8; i += 4) {
            a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
        UNROLL
        for (int i = 0; i < 4; i++) {
            _mm256_storeu_si256((void *)(to + i * 32),
                                _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
            _mm256_storeu_si256((void *)(to + 128 + i * 32),
                                _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
        }
    }
}

/* Scales and zero points of some panels' segments, [segment][panel][16]. */
struct vnni_scales {
    _Alignas(64) float scale[VNNI_SEGMENTS][VNNI_P_ONE][VL];
    _Alignas(64) int32_t zero[VNNI_SEGMENTS][VNNI_P_ONE][VL];
};

/* Those of k .. stop - 1. */
INLINE void vnni_scales(const struct panels *q, const int P, enum ember_quant quant,
                        const size_t *p, size_t k, size_t stop, struct vnni_scales *ret)
{
    for (size_t s = 0, g = k / q->group, end = (g + 1) * q->group; k < stop; s++, k += q->segment) {
        if (k >= end) {
            g++;
            end += q->group;
        }
        for (int j = 0; j < P; j++) {
            v_store(ret->scale[s][j], panel_scale(q, p[j], g, 0, quant));
            if (q->zero)
                _mm512_store_si512((void *)ret->zero[s][j], vnni_zero(q, p[j], g));
        }
    }
}

/* Rows of x, which of several are tiles of eight: rows, or the upper and then the lower terms of
 * four, woven. */
struct vnni_x {
    const char *x;
    const float *scale;  /* [segment][row] */
    const int32_t *sums; /* of vnni_sums */
};

/* A line against M rows from k on: `codes` unsigned, `plain` as signed bytes. */
INLINE void vnni_line(const int M, const int P, const int terms, const vi *codes, const vi *plain,
                      const char *x, const char *y, vi (*high)[VNNI_P_ONE], vi (*low)[VNNI_P_ONE])
{
    UNROLL
    for (int m = 0; m < M; m++) {
        const vi h = vi_set_at(x + m * 4);
        UNROLL
        for (int j = 0; j < P; j++)
            high[m][j] = vnni_dot(high[m][j], codes[j], h);
        if (terms == 2) {
            const vi l = vi_set_at(y + m * 4);
            UNROLL
            for (int j = 0; j < P; j++)
                low[m][j] = vnni_dot(low[m][j], l, plain[j]);
        }
    }
}

/* k .. stop - 1 of M rows against P panels, added to acc [M][P][16]; what is `ahead` bytes behind
 * each line is fetched. four: of 4 bits. */
INLINE void vnni_tile(const int M, const int P, const int four, const int terms,
                      enum ember_quant quant, const struct panels *q, const size_t *p,
                      const struct vnni_scales *scales, const struct vnni_x *x, size_t k,
                      size_t stop, size_t ahead, float *acc)
{
    const size_t step = M == 1 ? 4 : 32;
    const char *y = x->x + (M == 1 ? EMBER_X8_COLUMNS(q->K) : 16);
    const char *w[VNNI_P_ONE];
    const vi flip = _mm512_set1_epi8((char)0x80), nibble = _mm512_set1_epi8(15);
    const vi table = _mm512_broadcast_i32x4(
        quant == EMBER_QUANT_FP4
            ? _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
            : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    UNROLL
    for (int j = 0; j < P; j++)
        w[j] = q->w + p[j] * q->panel_bytes;
    const size_t first = k / q->segment;
    for (size_t s = first, end; k < stop; s++, k = end) {
        vi high[VNNI_M][VNNI_P_ONE], low[VNNI_M][VNNI_P_ONE];
        end = stop - k < q->segment ? stop : k + q->segment;
        UNROLL
        for (int m = 0; m < M; m++)
            UNROLL
        for (int j = 0; j < P; j++) {
            vi begin = _mm512_set1_epi32(x->sums[s * (size_t)M + (size_t)m]);
            if (four && q->zero)
                begin = _mm512_mullo_epi32(begin, vi_load(scales->zero[s - first][j]));
            high[m][j] = terms == 2 ? vi_zero() : begin;
            low[m][j] = begin;
        }
        for (size_t line = four ? k / 8 : k / 4, last = four ? (end + 31) / 32 * 4 : (end + 3) / 4;
             line < last; line++) {
            const size_t at = (four ? line / 4 * 8 + line % 4 : line) * step;
            vi codes[VNNI_P_ONE], plain[VNNI_P_ONE];
            UNROLL
            for (int j = 0; j < P; j++) {
                const char *from = w[j] + line * EMBER_TILE_LINE;
                plain[j] = vi_load(from);
                codes[j] = four ? _mm512_shuffle_epi8(table, vi_and(plain[j], nibble))
                                : _mm512_xor_si512(plain[j], flip);
                __builtin_prefetch(from + ahead);
            }
            vnni_line(M, P, terms, codes, four ? codes : plain, x->x + at, y + at, high, low);
            if (!four)
                continue;
            UNROLL
            for (int j = 0; j < P; j++)
                codes[j] = _mm512_shuffle_epi8(table, vi_and(vi_srl16(plain[j], 4), nibble));
            vnni_line(M, P, terms, codes, codes, x->x + at + 4 * step, y + at + 4 * step, high,
                      low);
        }
        UNROLL
        for (int j = 0; j < P; j++) {
            const vf scale = v_load(scales->scale[s - first][j]);
            UNROLL
            for (int m = 0; m < M; m++) {
                float *to = acc + (m * P + j) * VL;
                vi sum = high[m][j];
                if (terms == 2)
                    sum = vi_add(_mm512_slli_epi32(sum, 8), low[m][j]);
                v_store(to, v_add(v_load(to),
                                  v_mul(v_from_int(sum),
                                        v_mul(v_set(x->scale[s * (size_t)M + (size_t)m]), scale))));
            }
        }
    }
}

/* How much of k is taken at a time. */
INLINE size_t vnni_step(const struct panels *q)
{
    return q->segment > VNNI_STEP_K ? q->segment : VNNI_STEP_K / q->segment * q->segment;
}

/* One row against some panels: several streams of them, each of which goes on where it ended. */
INLINE void vnni_one(const int four, const int terms, enum ember_quant quant,
                     const struct panels *q, const struct vnni_x *x, float *out,
                     struct range panels, const struct post *post)
{
    const size_t streams = (panels.end - panels.first) / VNNI_P_ONE, step = vnni_step(q);
    for (size_t turn = 0, n; turn < streams + (panels.end - panels.first) % VNNI_P_ONE; turn++) {
        _Alignas(64) float acc[VNNI_P_ONE][VL] = {0};
        size_t p[VNNI_P_ONE];
        const size_t i = turn < streams ? turn : turn + streams * (VNNI_P_ONE - 1);
        n = turn < streams ? VNNI_P_ONE : 1;
        for (size_t j = 0; j < n; j++)
            p[j] = panels.first + i + j * streams;
        for (size_t k = 0, stop; k < q->K; k = stop) {
            struct vnni_scales scales;
            stop = q->K - k < step ? q->K : k + step;
            vnni_scales(q, (int)n, quant, p, k, stop, &scales);
            if (n > 1)
                vnni_tile(1, VNNI_P_ONE, four, terms, quant, q, p, &scales, x, k, stop, PANEL_AHEAD,
                          acc[0]);
            else
                vnni_tile(1, 1, four, terms, quant, q, p, &scales, x, k, stop, PANEL_AHEAD, acc[0]);
        }
        for (size_t j = 0; j < n; j++) {
            vf v = v_load(acc[j]);
            panel_put(q, p[j], out, &v, post);
        }
    }
}

INLINE void vnni_rows(const int four, const int terms, enum ember_quant quant,
                      const struct panels *q, const struct panel_rows *rows, struct range panels,
                      const struct post *post)
{
    const int M = VNNI_M / terms; /* as many sums as there are registers */
    const size_t segments = (q->K + q->segment - 1) / q->segment;
    const size_t half = EMBER_X8_COLUMNS(q->K);
    const size_t step = vnni_step(q);
    const size_t line = four ? 8 : 16; /* bytes of a panel for one of k */
    _Alignas(64) float acc[INT_ROWS][VNNI_P][VL];
    _Alignas(64) char woven[VNNI_X_BYTES];
    int32_t sums[VNNI_SUMS];
    float x_scales[VNNI_SUMS];
    struct vnni_x x;
    size_t most = VNNI_SUMS / segments / VNNI_M * VNNI_M;
    if (most > VNNI_X_BYTES / terms / half / VNNI_M * VNNI_M)
        most = VNNI_X_BYTES / terms / half / VNNI_M * VNNI_M;
    for (size_t r = 0, n; r < rows->n; r += n) {
        n = rows->n - r < most ? rows->n - r : most;
        if (n == 1) {
            vnni_sums(q, four, quant, rows->x[r], sums, 1);
            x.x = rows->x[r];
            x.scale = rows->scale[r];
            x.sums = sums;
            vnni_one(four, terms, quant, q, &x, rows->out[r], panels, post);
            continue;
        }
        for (size_t i = 0; i < n; i += (size_t)M) {
            const char *of[8];
            for (size_t m = 0; m < (size_t)M; m++) {
                const size_t at = r + (i + m < n ? i + m : n - 1);
                of[m] = rows->x[at];
                vnni_sums(q, four, quant, of[m], sums + i * segments + m, (size_t)M);
                for (size_t s = 0; s < segments; s++)
                    x_scales[i * segments + m + s * (size_t)M] = rows->scale[at][s];
                if (terms == 2)
                    of[4 + m] = of[m] + half;
            }
            vnni_weave(of, half, woven + i * half * terms);
        }
        for (size_t p = panels.first; p < panels.end; p += VNNI_P) {
            const size_t both[VNNI_P] = {p, p + 1 < panels.end ? p + 1 : p}; /* for nobody */
            __builtin_memset(acc, 0, (n + VNNI_M - 1) / VNNI_M * VNNI_M * sizeof acc[0]);
            for (size_t k = 0, stop; k < q->K; k = stop) {
                stop = q->K - k < step ? q->K : k + step;
                struct vnni_scales scales;
                size_t ahead = (stop - k) * line;
                vnni_scales(q, VNNI_P, quant, both, k, stop, &scales);
                if (stop == q->K)
                    ahead = VNNI_P * q->panel_bytes - k * line;
                for (size_t i = 0; i < n; i += (size_t)M) {
                    x.x = woven + i * half * terms;
                    x.scale = x_scales + i * segments;
                    x.sums = sums + i * segments;
                    vnni_tile(M, VNNI_P, four, terms, quant, q, both, &scales, &x, k, stop,
                              i ? 0 : ahead, acc[i][0]);
                }
            }
            for (size_t i = 0; i < n; i++)
                for (size_t j = 0; j < VNNI_P && p + j < panels.end; j++) {
                    vf v = v_load(acc[i][j]);
                    panel_put(q, p + j, rows->out[r + i], &v, post);
                }
        }
    }
}

static __attribute__((unused)) void int_vnni(enum ember_quant quant, const struct panels *q,
                                             const struct panel_rows *rows, struct range panels,
                                             const struct post *post)
{
    if (q->K > q->segment * VNNI_SUMS)
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
