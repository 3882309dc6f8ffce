/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Integers by matrix tiles. They are exact, so the fewest rows go by VPDPBUSD (int_by_tiles).
 *
 * Two tiles of x meet a pair of panels of w: of one term 32 rows, of two terms both terms of 16. Of
 * a gated weight a pair is a panel of gate and that of up. A pair meets the next rows for
 * AMX_STEP_K of k at a time, so that x stays in the first-level cache while w streams out of the
 * second; where there are no others, w streams out of memory. Where a segment ends, its sums become
 * floats while the tiles of the next segment are multiplied: vectors and tiles work side by side.
 */
#ifndef EMBER_KERNELS_CPU_PANEL_AMX_INT_H
#define EMBER_KERNELS_CPU_PANEL_AMX_INT_H

#include "kernels/cpu/ops/panel_amx.h"
#include "kernels/cpu/ops/panel_int.h"

#define AMX_STEP_K 512       /* of k at a time */
#define AMX_X_BYTES 1048576u /* of x in tiles */
#define AMX_W_BYTES 524288u  /* of w at a time, which stay in the second-level cache */
_Static_assert(X_UNITS_K_MAX * 32 <= AMX_W_BYTES && X_UNITS_K_MAX * 64 <= AMX_X_BYTES,
               "a pair, two units");
#define AMX_PAIRS 16 /* at a time */

/* Codes of 4 bits from k on, n of them (a multiple of 32), as lines of signed bytes, less their
 * zero points. */
INLINE void amx_expand(const struct panels *q, size_t p, size_t k, size_t n, char *to)
{
    const char *w = q->w + p * q->panel_bytes;
    const vi nibble = _mm512_set1_epi8(15);
    for (size_t end = k + n; k < end; k += 32, to += 512) {
        vi zero = _mm512_set1_epi8(8);
        if (q->zero) {
            const size_t at = (p * q->groups + k / q->group) * EMBER_PANEL;
            vi z = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(q->zero + at)));
            zero = _mm512_mullo_epi32(z, _mm512_set1_epi32(0x01010101));
        }
        UNROLL
        for (size_t j = 0; j < 4; j++) {
            const char *line = w + (k / 8 + j) * EMBER_TILE_LINE;
            const vi codes = vi_load(line);
            __builtin_prefetch(line + PANEL_AHEAD);
            vi low = vi_and(codes, nibble), high = vi_and(vi_srl16(codes, 4), nibble);
            _mm512_storeu_si512((void *)(to + j * 64), _mm512_sub_epi8(low, zero));
            _mm512_storeu_si512((void *)(to + 256 + j * 64), _mm512_sub_epi8(high, zero));
        }
    }
}

/*
 * x as the tiles read it. A unit is 16 rows of one term: of each 64 of k 16 lines. Units of two
 * terms are upper, lower, upper, ... of the sixteens.
 */
struct amx_x {
    const char *units;
    const float *scales; /* [segments][rows], rows a multiple of 16 */
    size_t half, rows;
};

/* n rows; scales to [segments][rows]. */
INLINE void amx_pack(const struct panels *q, const struct panel_rows *rows, size_t first, size_t n,
                     char *units, float *scales, struct amx_x *ret)
{
    const size_t half = EMBER_X8_COLUMNS(q->K), terms = (size_t)q->terms;
    const size_t segments = (q->K + q->segment - 1) / q->segment, height = (n + 15) / 16 * 16;
    for (size_t i = 0; i < n; i++) {
        const char *x = rows->x[first + i];
        char *to = units + i / 16 * terms * half * 16 + i % 16 * 64;
        for (size_t t = 0; t < terms; t++, x += half, to += half * 16)
            for (size_t k = 0; k < half; k += 64)
                _mm512_store_si512((void *)(to + k * 16), vi_load(x + k));
        for (size_t s = 0; s < segments; s++)
            scales[s * height + i] = rows->scale[first + i][s];
    }
    *ret = (struct amx_x){units, scales, half, height};
}

/* Rows that are handed over, from row `first` of all on, a multiple of 16. */
INLINE struct amx_x amx_ready(const struct x_int *x, size_t first)
{
    const size_t half = EMBER_X8_COLUMNS(x->K);
    return (struct amx_x){x->x + first * half * (size_t)x->terms, (const float *)x->scale + first,
                          half, (x->n + 15) / X_UNIT * X_UNIT};
}

/* Sums of a segment that are still integers: rows `row` .. rows - 1 of them. */
struct amx_sums {
    const int32_t *sums; /* [units][16][32], as acc */
    const float *scales; /* of x, one a row */
    float *acc;          /* [32][32] */
    vf scale[2];
    size_t row, rows;
    int first; /* acc has nothing yet */
};

#define AMX_ADD 4 /* rows at a time */

/* Rows from .. end - 1, multiples of AMX_ADD, of sums as floats; added to acc, or the first. */
INLINE void amx_add_rows(const int terms, const int first, const struct amx_sums *a, size_t from,
                         size_t end)
{
    for (; from < end; from += AMX_ADD) {
        UNROLL
        for (size_t i = from; i < from + AMX_ADD; i++) {
            const vf of_x = v_set(a->scales[i]);
            UNROLL
            for (size_t j = 0; j < 2; j++) {
                vi sum = vi_load(a->sums + i * 32 + j * 16);
                if (terms == 2)
                    sum =
                        vi_add(_mm512_slli_epi32(sum, 8), vi_load(a->sums + 512 + i * 32 + j * 16));
                const vf v = v_mul(v_from_int(sum), v_mul(of_x, a->scale[j]));
                float *acc = a->acc + i * 32 + j * 16;
                v_store(acc, first ? v_add(v_zero(), v) : v_add(v_load(acc), v));
            }
        }
    }
}
INLINE void amx_add(const int terms, struct amx_sums *a, size_t end)
{
    if (a->first)
        amx_add_rows(terms, 1, a, a->row, end);
    else
        amx_add_rows(terms, 0, a, a->row, end);
    a->row = end;
}

/* What a block of pairs has in common for all rows. */
struct amx_block {
    const struct panels *q;
    const char *w;       /* lines of the first pair's first panel, */
    size_t second, step; /* from which the second's, and those of the next pair, are as far */
    size_t p, n, last;   /* the first pair's first panel; pairs; behind the last panel */
    size_t bytes, chunk; /* of k a step; of k at a time */
    size_t ahead, fetch; /* how far ahead w is fetched; bytes of each 1024 of a panel */
    int once;            /* w comes out of memory to be used once */
    size_t shape;        /* rows that tiles are configured for */
    const float *scales; /* [pairs][2][groups][16] */
};

/* What comes after w, on its way while w is used: into the first level where it is next. */
INLINE void amx_fetch(const struct amx_block *b, const char *w0, const char *w1)
{
    for (size_t i = 0; b->once && i < b->fetch; i += 64) {
        __builtin_prefetch(w0 + i);
        __builtin_prefetch(w1 + i);
    }
    for (size_t i = 0; !b->once && i < b->fetch; i += 64) {
        __builtin_prefetch(w0 + i, 0, 2);
        __builtin_prefetch(w1 + i, 0, 2);
    }
}

/*
 * k .. end - 1, one segment, of a pair for the units at x, while the segment before becomes floats.
 */
INLINE void amx_segment(const int terms, const int units, const struct amx_block *b, const char *x,
                        size_t half, const char *w0, const char *w1, size_t k, size_t end,
                        size_t ahead, struct amx_sums *before, int32_t *sums)
{
    const size_t steps = (end - k + b->bytes - 1) / b->bytes;
    const size_t share = (before->rows / AMX_ADD + steps - 1) / steps * AMX_ADD;
    const char *y = x + half * 16;
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    for (; k < end; k += b->bytes) {
        const size_t at = k / 64 * 1024 + k % 64;
        const size_t stop = before->row + share;
        amx_fetch(b, w0 + k * 16 + ahead, w1 + k * 16 + ahead);
        AMX_LOAD(4, x + at, 64);
        AMX_LOAD(6, w0 + k * 16, 64);
        AMX_INT8(0, 4, 6);
        AMX_LOAD(7, w1 + k * 16, 64);
        AMX_INT8(1, 4, 7);
        if (units == 2) {
            AMX_LOAD(5, y + at, 64);
            if (terms == 2) {
                AMX_UINT8(2, 5, 6);
                AMX_UINT8(3, 5, 7);
            } else {
                AMX_INT8(2, 5, 6);
                AMX_INT8(3, 5, 7);
            }
        }
        amx_add(terms, before, stop < before->rows ? stop : before->rows);
    }
    AMX_STORE(0, sums, 128);
    AMX_STORE(1, sums + 16, 128);
    if (units == 2) {
        AMX_STORE(2, sums + 512, 128);
        AMX_STORE(3, sums + 528, 128);
    }
}

/* Up to two units of x, m rows, against all pairs of a block, to acc [pairs][32][32]. */
INLINE void amx_units(const int terms, const int units, const struct amx_block *b,
                      const struct amx_x *x, size_t unit, size_t m, size_t ahead, float *acc)
{
    _Alignas(64) int32_t sums[2][1024];
    const struct panels *q = b->q;
    const char *rows = x->units + unit * x->half * 16;
    const float *scales = x->scales + unit / (size_t)terms * 16;
    struct amx_sums before = {.rows = 0};
    int turn = 0;
    for (size_t first = 0, stop; first < q->K; first = stop) {
        stop = q->K - first < b->chunk ? q->K : first + b->chunk;
        for (size_t j = 0; j < b->n; j++) {
            const char *w0 = b->w + j * b->step, *w1 = w0;
            const float *s0 = b->scales + j * 2 * q->groups * 16, *s1 = s0 + q->groups * 16;
            if (q->gate || b->p + 2 * j + 1 < b->last) /* else the same again, for nobody */
                w1 += b->second;
            for (size_t k = first, end; k < stop; k = end, turn = !turn) {
                const int over =
                    b->once && k * 16 + ahead >= q->panel_bytes; /* then the next pair */
                end = stop - k < q->segment ? stop : k + q->segment;
                amx_segment(terms, units, b, rows, x->half, w0, w1, k, end,
                            over ? ahead + b->step - q->panel_bytes : ahead, &before, sums[turn]);
                before.sums = sums[turn];
                before.scales = scales + k / q->segment * x->rows;
                before.acc = acc + j * 1024;
                before.scale[0] = v_load(s0 + k / q->group * 16);
                before.scale[1] = v_load(s1 + k / q->group * 16);
                before.first = !k;
                before.row = 0;
                before.rows = (m + AMX_ADD - 1) / AMX_ADD * AMX_ADD;
            }
        }
    }
    amx_add(terms, &before, before.rows);
}

/* A row of sums of a block. */
INLINE void amx_put_row(const struct amx_block *b, const float *acc, float *out, const int stream,
                        const struct post *post)
{
    const int plain = !post->b && post->scale == 1 && !(post->softcap > 0);
    for (size_t j = 0; j < b->n; j++, acc += 1024) {
        if (b->q->gate) {
            int_gated(b->q, b->p + j, out, acc, acc + 16, post, stream);
            continue;
        }
        for (size_t p = b->p + 2 * j, i = 0; i < 2 && p + i < b->last; i++) {
            vf v = v_load(acc + i * 16);
            if (plain && (p + i + 1) * EMBER_PANEL <= b->q->N)
                v_store(out + (p + i) * EMBER_PANEL, v);
            else
                panel_put(b->q, p + i, out, &v, post);
        }
    }
}

/* All rows of x against a block of pairs. */
INLINE void amx_rows(struct amx_block *b, const struct amx_x *x, size_t n,
                     const struct panel_rows *rows, size_t r, const struct post *post)
{
    _Alignas(64) float acc[AMX_PAIRS * 1024];
    const size_t height = b->q->terms == 2 ? 16 : 32, ahead = b->ahead;
    size_t unit = 0;
    for (size_t i = 0, m; i < n; i += m, unit += 2) {
        const size_t share = ahead + i / height * b->fetch;
        m = n - i < height ? n - i : height;
        if (m != b->shape)
            amx_configure(m < 16 ? m : 16, b->q->terms == 2 ? m : m > 16 ? m - 16 : 1, b->bytes);
        b->shape = m;
        if (b->q->terms == 2)
            amx_units(2, 2, b, x, unit, m, share, acc);
        else if (m > 16)
            amx_units(1, 2, b, x, unit, m, share, acc);
        else
            amx_units(1, 1, b, x, unit, m, share, acc);
        for (size_t j = 0; j < m; j++)
            amx_put_row(b, acc + j * 32, rows->out[r + i + j], rows->stream, post);
    }
}

/* n rows of x, from r on, against some panels, of a gated weight those of gate. */
INLINE void amx_panels(enum ember_quant quant, const struct panels *q, const struct amx_x *x,
                       size_t n, const struct panel_rows *rows, size_t r, struct range panels,
                       const struct post *post)
{
    _Alignas(64) char lines[AMX_W_BYTES];
    _Alignas(64) float scales[AMX_W_BYTES / 32];
    const int four = quant != EMBER_QUANT_INT8;
    const size_t height = q->terms == 2 ? 16 : 32, groups = (n + height - 1) / height;
    const size_t half = EMBER_X8_COLUMNS(q->K), fit = AMX_W_BYTES / (half * 32);
    const size_t a_pair = q->gate ? 1 : 2, apart = q->gate ? q->gate->panels : 1;
    struct amx_block b = {.q = q, .last = panels.end, .once = groups == 1, .scales = scales};
    const size_t most = !fit || (b.once && four) ? 1 : fit > AMX_PAIRS ? AMX_PAIRS : fit;
    b.bytes = q->segment % 64 && q->segment < q->K ? 32 : 64;
    b.chunk = q->segment > AMX_STEP_K ? q->segment : AMX_STEP_K / q->segment * q->segment;
    if (b.once) /* w as it comes */
        b.chunk = q->K;
    b.second = four ? half * 16 : apart * q->panel_bytes;
    b.step = four ? half * 32 : a_pair * q->panel_bytes;
    b.fetch = four ? 0 : (groups > 16 ? 64 : 1024 / groups / 64 * 64) * b.bytes / 64;
    for (b.p = panels.first; b.p < panels.end; b.p += b.n * a_pair) {
        const size_t left = (panels.end - b.p + a_pair - 1) / a_pair;
        b.n = left < most ? left : most;
        b.w = four ? lines : q->w + b.p * q->panel_bytes;
        b.ahead = b.once ? PANEL_AHEAD : b.n * b.step;
        for (size_t j = 0; j < 2 * b.n; j++) {
            size_t p = b.p + j / 2 * a_pair + j % 2 * apart;
            if (!q->gate && p >= panels.end) /* the last again, for nobody */
                p = panels.end - 1;
            for (size_t g = 0; g < q->groups; g++)
                v_store(scales + (j * q->groups + g) * 16, panel_scale(q, p, g, 0));
            if (four) /* a step of 64 may read behind them: x is zero there */
                amx_expand(q, p, 0, (q->K + 31) / 32 * 32, lines + j * half * 16);
        }
        amx_rows(&b, x, n, rows, r, post);
    }
}

/* Which body rows go by. */
INLINE int int_by_tiles(const struct panels *q, const struct panel_rows *rows)
{
    return rows->ready ? rows->ready->form == X_INT_UNITS
                       : rows->n >= X_UNITS_LEAST && q->K <= X_UNITS_K_MAX;
}

/* Out of line, as int_vectors: the room of one is not to stand on the stack beside the other's. */
static __attribute__((noinline, unused)) void int_amx(enum ember_quant quant,
                                                      const struct panels *q,
                                                      const struct panel_rows *rows,
                                                      struct range panels, const struct post *post)
{
    _Alignas(64) char units[AMX_X_BYTES];
    _Alignas(64) float scales[AMX_X_BYTES / 32];
    const size_t half = EMBER_X8_COLUMNS(q->K);
    const size_t most = AMX_X_BYTES / (half * (size_t)q->terms) / 32 * 32;
    for (size_t r = 0, n; r < rows->n; r += n) {
        struct amx_x x;
        n = rows->n - r < most ? rows->n - r : most;
        if (rows->ready)
            x = amx_ready(rows->ready, rows->first + r);
        else
            amx_pack(q, rows, r, n, units, scales, &x);
        amx_panels(quant, q, &x, n, rows, r, panels, post);
    }
    amx_release();
    if (rows->stream)
        _mm_sfence();
}

#endif
