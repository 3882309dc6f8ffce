/* SPDX-License-Identifier: Apache-2.0 */
/* Integers by matrix tiles. They are exact, so few rows go by VPDPBUSD. */
#ifndef EMBER_KERNELS_CPU_PANEL_AMX_INT_H
#define EMBER_KERNELS_CPU_PANEL_AMX_INT_H

#include "kernels/cpu/ops/panel_amx.h"
#include "kernels/cpu/ops/panel_vnni.h"

#define AMX_ROWS_LEAST 8    /* below them vectors are as quick */
#define AMX_CHUNK 1024      /* of k, of which two panels stay in the first-level cache */
#define AMX_X_BYTES 262144u /* of gathered x */

/* Codes of 4 bits from k on, n of them (a multiple of 32), as lines of signed bytes, less their
 * zero points. */
INLINE void amx_expand(enum ember_quant quant, const struct panels *q, size_t p, size_t k, size_t n,
                       char *to)
{
    const char *w = q->w + p * q->panel_bytes;
    const vi nibble = _mm512_set1_epi8(15);
    const vi table = _mm512_broadcast_i32x4(
        quant == EMBER_QUANT_FP4
            ? _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
            : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (size_t end = k + n; k < end; k += 32, to += 512) {
        vi zero = quant == EMBER_QUANT_INT4 ? _mm512_set1_epi8(8) : vi_zero();
        if (quant == EMBER_QUANT_INT4 && q->zero) {
            vi z = vnni_zero(q, p, k / q->group, quant);
            zero = _mm512_mullo_epi32(z, _mm512_set1_epi32(0x01010101));
        }
        UNROLL
        for (size_t j = 0; j < 4; j++) {
            const vi codes = vi_load(w + (k / 8 + j) * EMBER_TILE_LINE);
            vi low = _mm512_shuffle_epi8(table, vi_and(codes, nibble));
            vi high = _mm512_shuffle_epi8(table, vi_and(vi_srl16(codes, 4), nibble));
            _mm512_storeu_si512((void *)(to + j * 64), _mm512_sub_epi8(low, zero));
            _mm512_storeu_si512((void *)(to + 256 + j * 64), _mm512_sub_epi8(high, zero));
        }
    }
}

/* Sums of a segment to the floats of P panels: m rows of 16 of each, `low` those of the second
 * term. */
INLINE void amx_add(const int P, const int terms, int32_t (*sums)[256], int32_t (*low)[256],
                    size_t m, const float *const *scales, size_t s, const vf *scale, float *acc)
{
    for (size_t i = 0; i < m; i++) {
        const vf of_x = v_set(scales[i][s]);
        UNROLL
        for (int j = 0; j < P; j++) {
            float *at = acc + i * 32 + j * 16;
            vi sum = vi_load(sums[j] + i * 16);
            if (terms == 2)
                sum = vi_add(_mm512_slli_epi32(sum, 8), vi_load(low[j] + i * 16));
            v_store(at, v_add(v_load(at), v_mul(v_from_int(sum), v_mul(of_x, scale[j]))));
        }
    }
}

/* What the rows of a part have in common. */
struct amx_part {
    const struct panels *q;
    enum ember_quant quant;
    const char *x;              /* rows `stride` bytes apart */
    size_t stride, bytes, p, n; /* bytes of k a step; panels p and, if n is 2, p + 1 */
    const char *w[2];           /* lines of the chunk, one behind another */
    int ahead;                  /* whether w is fetched ahead: it is read once */
};

/* The lines that a step reads, ahead. */
INLINE void amx_fetch(const struct amx_part *a, size_t at)
{
    for (size_t line = 0; line < a->bytes * 16; line += 64) {
        __builtin_prefetch(a->w[0] + at + PANEL_AHEAD + line);
        if (a->n == 2)
            __builtin_prefetch(a->w[1] + at + PANEL_AHEAD + line);
    }
}

/* Scales of group g of the panels. */
INLINE void amx_scales(const struct amx_part *a, size_t g, vf *ret)
{
    ret[0] = panel_scale(a->q, a->p, g, 0, a->quant);
    ret[1] = a->n == 2 ? panel_scale(a->q, a->p + 1, g, 0, a->quant) : v_zero();
}

/* k .. end - 1 of one term for up to 32 rows: rows r .. r + m - 1, m > 16 or not. */
INLINE void amx_one(const struct amx_part *a, size_t r, size_t m, size_t first, size_t k,
                    size_t end, const float *const *scales, float *acc)
{
    _Alignas(64) int32_t sums[4][256];
    const size_t s = k / a->q->segment, g = k / a->q->group;
    const char *x = a->x + r * a->stride, *y = x + 16 * a->stride;
    const int two = a->n == 2, high = m > 16;
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    for (; k < end; k += a->bytes) {
        const size_t at = (k - first) * 16;
        if (a->ahead)
            amx_fetch(a, at);
        AMX_LOAD(4, x + k, a->stride);
        AMX_LOAD(6, a->w[0] + at, 64);
        AMX_INT8(0, 4, 6);
        if (two) {
            AMX_LOAD(7, a->w[1] + at, 64);
            AMX_INT8(1, 4, 7);
        }
        if (high) {
            AMX_LOAD(5, y + k, a->stride);
            AMX_INT8(2, 5, 6);
            if (two)
                AMX_INT8(3, 5, 7);
        }
    }
    AMX_STORE(0, sums[0], 64);
    AMX_STORE(1, sums[1], 64);
    if (high) {
        AMX_STORE(2, sums[2], 64);
        AMX_STORE(3, sums[3], 64);
    }
    vf scale[2];
    amx_scales(a, g, scale);
    const size_t first_rows = high ? 16 : m;
    if (two)
        amx_add(2, 1, sums, sums, first_rows, scales + r, s, scale, acc + r * 32);
    else
        amx_add(1, 1, sums, sums, first_rows, scales + r, s, scale, acc + r * 32);
    if (high && two)
        amx_add(2, 1, sums + 2, sums, m - 16, scales + r + 16, s, scale, acc + (r + 16) * 32);
    else if (high)
        amx_add(1, 1, sums + 2, sums, m - 16, scales + r + 16, s, scale, acc + (r + 16) * 32);
}

/* The same with x in two terms, for up to 16 rows. */
INLINE void amx_two(const struct amx_part *a, size_t r, size_t m, size_t first, size_t k,
                    size_t end, const float *const *scales, float *acc)
{
    _Alignas(64) int32_t sums[4][256];
    const size_t s = k / a->q->segment, g = k / a->q->group, half = EMBER_X8_COLUMNS(a->q->K);
    const char *x = a->x + r * a->stride;
    const int two = a->n == 2;
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    for (; k < end; k += a->bytes) {
        const size_t at = (k - first) * 16;
        if (a->ahead)
            amx_fetch(a, at);
        AMX_LOAD(4, x + k, a->stride);
        AMX_LOAD(5, x + half + k, a->stride);
        AMX_LOAD(6, a->w[0] + at, 64);
        AMX_INT8(0, 4, 6);
        AMX_UINT8(2, 5, 6);
        if (two) {
            AMX_LOAD(7, a->w[1] + at, 64);
            AMX_INT8(1, 4, 7);
            AMX_UINT8(3, 5, 7);
        }
    }
    AMX_STORE(0, sums[0], 64);
    AMX_STORE(1, sums[1], 64);
    AMX_STORE(2, sums[2], 64);
    AMX_STORE(3, sums[3], 64);
    vf scale[2];
    amx_scales(a, g, scale);
    if (two)
        amx_add(2, 2, sums, sums + 2, m, scales + r, s, scale, acc + r * 32);
    else
        amx_add(1, 2, sums, sums + 2, m, scales + r, s, scale, acc + r * 32);
}

/* One chunk of k of two panels: all rows over it, while it is in the first-level cache. */
INLINE void amx_chunk(const struct amx_part *a, size_t n, size_t first, size_t end,
                      const float *const *scales, float *acc)
{
    const size_t height = a->q->terms == 2 ? 16 : 32;
    size_t shape = 0;
    for (size_t r = 0, m; r < n; r += m) {
        m = n - r < height ? n - r : height;
        if (m != shape)
            amx_configure(m < 16 ? m : 16, a->q->terms == 2 ? m : m > 16 ? m - 16 : 1, a->bytes);
        shape = m;
        for (size_t k = first, stop; k < end; k = stop) {
            stop = end - k < a->q->segment ? end : k + a->q->segment;
            if (a->q->terms == 2)
                amx_two(a, r, m, first, k, stop, scales, acc);
            else
                amx_one(a, r, m, first, k, stop, scales, acc);
        }
    }
}

/* n <= PANEL_ROWS rows of x, `stride` bytes apart. */
INLINE void amx_rows(enum ember_quant quant, const struct panels *q, const char *x, size_t stride,
                     size_t n, const float *const *scales, float *const *out, struct range panels,
                     const struct post *post)
{
    _Alignas(64) char lines[2][AMX_CHUNK * EMBER_PANEL];
    _Alignas(64) float acc[PANEL_ROWS * 32];
    const int four = quant != EMBER_QUANT_INT8;
    const size_t chunk = q->segment > AMX_CHUNK ? q->segment : AMX_CHUNK / q->segment * q->segment;
    struct amx_part a = {
        .q = q, .quant = quant, .x = x, .stride = stride, .bytes = q->segment % 64 ? 32 : 64};
    a.ahead = !four && n <= 32;
    if (q->segment >= q->K)
        a.bytes = 64;
    for (a.p = panels.first; a.p < panels.end; a.p += a.n) {
        a.n = panels.end - a.p < 2 ? 1 : 2;
        for (size_t i = 0; i < n; i++) {
            v_store(acc + i * 32, v_zero());
            v_store(acc + i * 32 + 16, v_zero());
        }
        for (size_t k = 0, end; k < q->K; k = end) {
            end = q->K - k < chunk ? q->K : k + chunk;
            for (size_t j = 0; j < a.n; j++) {
                a.w[j] = q->w + (a.p + j) * q->panel_bytes + k * EMBER_PANEL;
                if (!four)
                    continue;
                /* A step of 64 may read behind them: x is zero there. */
                amx_expand(quant, q, a.p + j, k, (end - k + 31) / 32 * 32, lines[j]);
                a.w[j] = lines[j];
            }
            amx_chunk(&a, n, k, end, scales, acc);
        }
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < a.n; j++) {
                vf v = v_load(acc + i * 32 + j * 16);
                panel_put(q, a.p + j, out[i], &v, post);
            }
    }
    amx_release();
}

static __attribute__((unused)) void int_amx(enum ember_quant quant, const struct panels *q,
                                            const struct panel_rows *rows, struct range panels,
                                            const struct post *post)
{
    _Alignas(64) char gathered[AMX_X_BYTES];
    const size_t row = EMBER_X8_COLUMNS(q->K) * (size_t)q->terms;
    const size_t most = rows->stride ? rows->n : AMX_X_BYTES / row;
    if (rows->n < AMX_ROWS_LEAST || most < 16 ||
        (quant != EMBER_QUANT_INT8 && q->segment > AMX_CHUNK)) {
        int_vnni(quant, q, rows, panels, post);
        return;
    }
    for (size_t r = 0, n; r < rows->n; r += n) {
        n = rows->n - r < most ? rows->n - r : most;
        if (!rows->stride)
            for (size_t i = 0; i < n; i++)
                __builtin_memcpy(gathered + i * row, rows->x[r + i], row);
        amx_rows(quant, q, rows->stride ? rows->x[r] : gathered, rows->stride ? rows->stride : row,
                 n, rows->scale + r, rows->out + r, panels, post);
    }
}

#endif
