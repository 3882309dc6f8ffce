/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Integer products by VPDPBUSD, which multiplies unsigned bytes with signed ones: codes of 8 bits
 * are made unsigned by adding 128, those of 4 bits are left with their zero point, and what that
 * adds to a sum, the zero point * (sum of x), is taken off where the sum begins. Of x in two terms
 * the lower one is unsigned itself.
 *
 * A tile is VNNI_M / terms rows, woven, against two panels, whose sums fill half the registers: for
 * 16 products there are 8 words of x and 2 lines of w to be loaded, and more would not keep up. Up
 * to two tiles of rows go against one panel instead: w is what they wait for, and so it is used up
 * as it comes.
 * What sums come to as floats waits in memory. Some of k at a time goes over all rows, so that its
 * part of the panels stays in the first-level cache, while each tile fetches a share of the next
 * part.
 */
#ifndef EMBER_KERNELS_CPU_PANEL_VNNI_H
#define EMBER_KERNELS_CPU_PANEL_VNNI_H

#include "kernels/cpu/ops/panel.h"

#define VNNI_M 8              /* rows of a tile, of two terms half as many */
#define VNNI_P 2              /* its panels; of one row, streams of memory */
#define VNNI_ROWS 16          /* rows against one panel, of two terms half as many */
#define VNNI_AHEAD 3072       /* bytes that their panel is fetched ahead */
#define VNNI_STEP_K 512       /* of k at a time */
#define VNNI_SEGMENTS 16      /* segments of them, at most */
#define VNNI_SUMS 32768       /* segments of rows at a time, */
#define VNNI_X_BYTES 1048576u /* and bytes of them */
_Static_assert(VNNI_X_BYTES >= EMBER_INT8_K_MAX * VNNI_M &&
                   VNNI_SUMS >= EMBER_INT8_K_MAX / 32 * VNNI_M,
               "a tile");

/* sum + a . b: gcc 12 keeps two registers for each sum of the intrinsic, and has too few then. */
INLINE vi vnni_dot(vi sum, vi a_unsigned, vi b_signed)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a_unsigned), "v"(b_signed));
    return sum;
}

/* How much of k is taken at a time. */
INLINE size_t vnni_step(const struct panels *q)
{
    return q->segment > VNNI_STEP_K ? q->segment : VNNI_STEP_K / q->segment * q->segment;
}

/* ---- rows of x ---- */

/* Rows of x, which of several are tiles: eight rows, or the upper and then the lower terms of four,
 * woven. `sums` is what the codes' zero point adds to each segment, negated; with zero points of
 * their own, what is to be multiplied with them. */
struct vnni_x {
    const char *x;
    const float *scale; /* [segment][row] */
    const int32_t *sums;
};

/* Eight rows of n bytes, a multiple of 32, to `to`: four bytes of each in turn. */
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
            _mm256_store_si256((void *)(to + i * 32),
                               _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
            _mm256_store_si256((void *)(to + 128 + i * 32),
                               _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
        }
    }
}

/* The sums of one row, or of a woven tile as [segment][row]. */
INLINE void vnni_sums(const int M, const int four, const int terms, const struct panels *q,
                      const char *x, int32_t *ret)
{
    const size_t half = EMBER_X8_COLUMNS(q->K), wide = M == 1 ? 1 : 8;
    const int32_t zero = !four ? -128 : q->zero ? -1 : -8;
    const vi ones = _mm512_set1_epi8(1);
    for (size_t k = 0, end; k < q->K; k = end, ret += M) {
        end = q->K - k < q->segment ? q->K : k + q->segment;
        vi high = vi_zero(), low = vi_zero();
        /* Behind K there are zeros to a multiple of 64; a segment is one of 32. */
        const size_t stop = (end + 31) / 32 * 32 * wide;
        for (size_t at = k * wide; at < stop; at += 64) {
            const __mmask64 part = stop - at < 64 ? UINT32_MAX : UINT64_MAX;
            const vi v = _mm512_maskz_loadu_epi8(part, x + at);
            high = _mm512_dpbusd_epi32(high, ones, v);
            if (four && terms == 2)
                low = _mm512_dpbusd_epi32(
                    low, M == 1 ? _mm512_maskz_loadu_epi8(part, x + half + at) : v, ones);
        }
        if (M == 1) {
            uint32_t sum = (uint32_t)_mm512_reduce_add_epi32(high) << (terms == 2 ? 8 : 0);
            *ret = (int32_t)((sum + (uint32_t)_mm512_reduce_add_epi32(low)) * (uint32_t)zero);
            continue;
        }
        __m256i sum =
            _mm256_add_epi32(_mm512_castsi512_si256(high), _mm512_extracti64x4_epi64(high, 1));
        if (terms == 2) {
            __m256i of_low =
                _mm256_add_epi32(_mm512_castsi512_si256(low), _mm512_extracti64x4_epi64(low, 1));
            sum = _mm256_add_epi32(_mm256_slli_epi32(sum, 8),
                                   _mm256_permute2x128_si256(of_low, of_low, 0x81));
        }
        sum = _mm256_mullo_epi32(sum, _mm256_set1_epi32(zero));
        if (terms == 2)
            _mm_storeu_si128((void *)ret, _mm256_castsi256_si128(sum));
        else
            _mm256_storeu_si256((void *)ret, sum);
    }
}

/* ---- panels ---- */

/* Zero points of a group in 32-bit lanes. */
INLINE vi vnni_zero(const struct panels *q, size_t p, size_t g)
{
    return _mm512_cvtepu8_epi32(
        _mm_loadu_si128((const void *)(q->zero + (p * q->groups + g) * EMBER_PANEL)));
}

/* Panels with scales and zero points of some segments, from `first` on. */
struct vnni_w {
    const char *w[VNNI_P];
    size_t first;
    _Alignas(64) float scale[VNNI_SEGMENTS][VNNI_P][VL];
    _Alignas(64) int32_t zero[VNNI_SEGMENTS][VNNI_P][VL];
};

INLINE void vnni_scales(const struct panels *q, size_t p, size_t k, size_t stop, const int f16,
                        float (*ret)[VNNI_P][VL])
{
    struct panels of = *q;
    if (f16)
        of.scale_dtype = EMBER_F16;
    for (size_t g = k / q->group, end = (g + 1) * q->group; k < stop; k += q->segment, ret++) {
        if (k >= end) {
            g++;
            end += q->group;
        }
        v_store(ret[0][0], panel_scale(&of, p, g, 0));
    }
}

/* Panels p, p + step, ..., of which those beyond the last are the last again, with the scales of
 * k .. stop - 1. */
INLINE void vnni_panels(const int P, const struct panels *q, size_t p, size_t step, size_t last,
                        size_t k, size_t stop, struct vnni_w *ret)
{
    ret->first = k / q->segment;
    for (int j = 0; j < P; j++, p = last - p < step ? last : p + step) {
        ret->w[j] = q->w + p * q->panel_bytes;
        if (q->scale_dtype == EMBER_F16)
            vnni_scales(q, p, k, stop, 1, (void *)ret->scale[0][j]);
        else
            vnni_scales(q, p, k, stop, 0, (void *)ret->scale[0][j]);
        for (size_t s = 0, at = k; q->zero && at < stop; s++, at += q->segment)
            _mm512_store_si512((void *)ret->zero[s][j], vnni_zero(q, p, at / q->group));
    }
}

/* ---- tiles ---- */

/* A line of P panels against M rows: `codes` unsigned, `plain` as signed bytes; y: lower terms. Of
 * each tile of x, `tile` bytes apart, there are `rows`. */
INLINE void vnni_line(const int M, const int P, const int terms, const vi *codes, const vi *plain,
                      const char *x, const char *y, const size_t rows, const size_t tile,
                      vi (*high)[VNNI_P], vi (*low)[VNNI_P])
{
    UNROLL
    for (int m = 0; m < M; m++) {
        const size_t at = (size_t)m / rows * tile + (size_t)m % rows * 4;
        const vi h = vi_set_at(x + at);
        UNROLL
        for (int j = 0; j < P; j++)
            high[m][j] = vnni_dot(high[m][j], codes[j], h);
        if (terms == 2) {
            const vi l = vi_set_at(y + at);
            UNROLL
            for (int j = 0; j < P; j++)
                low[m][j] = vnni_dot(low[m][j], l, plain[j]);
        }
    }
}

/* What is fetched while a tile is multiplied: `step` bytes of each for a line. */
struct vnni_fetch {
    const char *at[VNNI_P];
    size_t step;
};

/* k .. stop - 1 of M rows (of a tile, or of two: the first M of them) against P panels, added to
 * acc [M][P][16], which is not read where k is 0. four: of 4 bits. F lines are fetched for each. */
INLINE void vnni_tile(const int M, const int P, const int F, const int four, const int terms,
                      const struct panels *q, const struct vnni_w *w, const struct vnni_x *x,
                      size_t k, size_t stop, const struct vnni_fetch *fetch, float *acc)
{
    const size_t step = M == 1 ? 4 : 4 * VNNI_M, rows = M == 1 ? 1 : (size_t)(VNNI_M / terms);
    const size_t half = EMBER_X8_COLUMNS(q->K), tile = VNNI_M * half;
    const size_t sums = (q->K + q->segment - 1) / q->segment * rows; /* of a tile */
    const char *y = x->x + (M == 1 ? half : 4 * rows);
    const vi flip = _mm512_set1_epi8((char)0x80), nibble = _mm512_set1_epi8(15);
    size_t done = 0; /* of what is fetched */
    for (size_t s = k / q->segment, end; k < stop; s++, k = end) {
        vi high[VNNI_ROWS][VNNI_P], low[VNNI_ROWS][VNNI_P];
        end = stop - k < q->segment ? stop : k + q->segment;
        UNROLL
        for (int m = 0; m < M; m++) {
            const size_t row = (size_t)m / rows * sums + s * rows + (size_t)m % rows;
            vi begin = _mm512_set1_epi32(x->sums[row]);
            __asm__("" : "+v"(begin)); /* loaded once for all panels */
            UNROLL
            for (int j = 0; j < P; j++) {
                low[m][j] = begin;
                if (four && q->zero)
                    low[m][j] = _mm512_mullo_epi32(begin, vi_load(w->zero[s - w->first][j]));
                high[m][j] = terms == 2 ? vi_zero() : low[m][j];
            }
        }
        for (size_t line = four ? k / 8 : k / 4, last = four ? (end + 31) / 32 * 4 : (end + 3) / 4;
             line < last; line++, done += fetch->step) {
            const size_t at = (four ? line / 4 * 8 + line % 4 : line) * step;
            vi codes[VNNI_P], plain[VNNI_P];
            UNROLL
            for (int j = 0; j < P; j++) {
                plain[j] = vi_load(w->w[j] + line * EMBER_TILE_LINE);
                codes[j] = four ? vi_and(plain[j], nibble) : _mm512_xor_si512(plain[j], flip);
                if (j < F)
                    __builtin_prefetch(fetch->at[j] + done);
            }
            vnni_line(M, P, terms, codes, four ? codes : plain, x->x + at, y + at, rows, tile, high,
                      low);
            if (!four)
                continue;
            UNROLL
            for (int j = 0; j < P; j++)
                codes[j] = vi_and(vi_srl16(plain[j], 4), nibble);
            vnni_line(M, P, terms, codes, codes, x->x + at + 4 * step, y + at + 4 * step, rows,
                      tile, high, low);
        }
        UNROLL
        for (int j = 0; j < P; j++) {
            const vf scale = v_load(w->scale[s - w->first][j]);
            UNROLL
            for (int m = 0; m < M; m++) {
                const size_t row = (size_t)m / rows * sums + s * rows + (size_t)m % rows;
                float *to = acc + (m * P + j) * VL;
                vi sum = high[m][j];
                if (terms == 2)
                    sum = vi_add(_mm512_slli_epi32(sum, 8), low[m][j]);
                v_store(to, v_add(_mm512_maskz_load_ps(s ? 0xffff : 0, to),
                                  v_mul(v_from_int(sum), v_mul(v_set(x->scale[row]), scale))));
            }
        }
    }
}

/* Panels from one of a pair to the other, which of a gated weight are gate and up. */
INLINE size_t vnni_apart(const struct panels *q, size_t others)
{
    return q->gate ? q->gate->panels : others;
}

/* Products of gate and up to a row. Compiled once: each activation is here. */
static __attribute__((noinline, unused)) void vnni_gated(const struct panels *q, size_t p,
                                                         float *out, const float *gate,
                                                         const float *up, const struct post *post,
                                                         int stream)
{
    const size_t n = p * EMBER_PANEL, I = q->gate->panels * EMBER_PANEL;
    const vf v =
        glu_value(post_value(v_load(gate), n, VL, post), post_value(v_load(up), I + n, VL, post),
                  q->gate->act, q->gate->limit, q->gate->alpha);
    if (stream)
        _mm512_stream_ps(out + n, v);
    else
        v_store(out + n, v);
}

/* One row against some panels: several streams of them, each of which goes on where it ended. Of a
 * gated weight they are gate and up. */
INLINE void vnni_one(const int four, const int terms, const struct panels *q,
                     const struct vnni_x *x, float *out, struct range panels,
                     const struct post *post)
{
    const size_t all = panels.end - panels.first, step = vnni_step(q);
    const size_t streams = q->gate ? all : all / VNNI_P, apart = vnni_apart(q, streams);
    const size_t last = q->gate ? 2 * apart - 1 : panels.end - 1;
    const size_t line = four ? 8 : 16; /* bytes of a panel for one of k */
    for (size_t turn = 0, n; turn < streams + (q->gate ? 0 : all % VNNI_P); turn++) {
        _Alignas(64) float acc[VNNI_P][VL];
        const size_t p = panels.first + (turn < streams ? turn : turn + streams * (VNNI_P - 1));
        n = turn < streams ? VNNI_P : 1;
        for (size_t k = 0, stop; k < q->K; k = stop) {
            struct vnni_w w;
            struct vnni_fetch fetch = {.step = EMBER_TILE_LINE};
            stop = q->K - k < step ? q->K : k + step;
            vnni_panels((int)n, q, p, apart, last, k, stop, &w);
            for (size_t j = 0; j < n; j++)
                fetch.at[j] = w.w[j] + k * line + PANEL_AHEAD;
            if (n > 1)
                vnni_tile(1, VNNI_P, VNNI_P, four, terms, q, &w, x, k, stop, &fetch, acc[0]);
            else
                vnni_tile(1, 1, 1, four, terms, q, &w, x, k, stop, &fetch, acc[0]);
        }
        if (q->gate)
            vnni_gated(q, p, out, acc[0], acc[1], post, 0);
        for (size_t j = 0; !q->gate && j < n; j++) {
            vf v = v_load(acc[j]);
            panel_put(q, p + j * streams, out, &v, post);
        }
    }
}

/* n rows from r on, as tiles, against panels p and p + 1, which is nobody's where p is the last; or
 * gate and up of p. A tile's products go to their rows while it is in the first level. */
INLINE void vnni_pair(const int four, const int terms, const struct panels *q,
                      const struct vnni_x *x, const struct panel_rows *rows, size_t r, size_t n,
                      size_t p, size_t last, float (*acc)[VNNI_P][VL], const struct post *post)
{
    const size_t M = (size_t)(VNNI_M / terms), half = EMBER_X8_COLUMNS(q->K);
    const size_t segments = (q->K + q->segment - 1) / q->segment, step = vnni_step(q);
    const size_t line = four ? 8 : 16, tiles = (n + M - 1) / M;
    const size_t share = (tiles + VNNI_P - 1) / VNNI_P; /* tiles that fetch from one panel */
    for (size_t k = 0, stop; k < q->K; k = stop) {
        struct vnni_w w;
        stop = q->K - k < step ? q->K : k + step;
        vnni_panels(VNNI_P, q, p, vnni_apart(q, 1), last, k, stop, &w);
        const size_t next = stop < q->K ? stop * line : (q->gate ? 1 : VNNI_P) * q->panel_bytes;
        const size_t bytes = (stop - k) * line;
        for (size_t i = 0, tile = 0; i < n; i += M, tile++) {
            const struct vnni_x of = {x->x + i * half * (size_t)terms, x->scale + i * segments,
                                      x->sums + i * segments};
            const struct vnni_fetch fetch = {
                {w.w[tile % VNNI_P] + next + tile / VNNI_P * bytes / share},
                EMBER_TILE_LINE / share};
            if (n - i > M / 2)
                vnni_tile((int)(VNNI_M / terms), VNNI_P, 1, four, terms, q, &w, &of, k, stop,
                          &fetch, acc[i][0]);
            else
                vnni_tile((int)(VNNI_M / terms / 2), VNNI_P, 1, four, terms, q, &w, &of, k, stop,
                          &fetch, acc[i][0]);
            for (size_t at = i; stop == q->K && at < n && at < i + M; at++)
                if (q->gate)
                    vnni_gated(q, p, rows->out[r + at], acc[at][0], acc[at][1], post, rows->stream);
                else
                    for (size_t j = 0; j < VNNI_P && p + j <= last; j++)
                        panel_line(q, p + j, rows->out[r + at], v_load(acc[at][j]), post,
                                   rows->stream);
        }
    }
}

/* The first M rows of one or two tiles against panel p, to acc. */
INLINE void vnni_panel(const int M, const int four, const int terms, const struct panels *q,
                       const struct vnni_x *x, size_t p, float (*acc)[VL])
{
    const size_t step = vnni_step(q), line = four ? 8 : 16;
    for (size_t k = 0, stop; k < q->K; k = stop) {
        struct vnni_fetch fetch = {.step = EMBER_TILE_LINE};
        struct vnni_w w;
        stop = q->K - k < step ? q->K : k + step;
        vnni_panels(1, q, p, 1, p, k, stop, &w);
        fetch.at[0] = w.w[0] + k * line + VNNI_AHEAD;
        vnni_tile(M, 1, 1, four, terms, q, &w, x, k, stop, &fetch, acc[0]);
    }
}

/* n rows from r on, of one or two tiles and at most M, against some panels. */
INLINE void vnni_few(const int M, const int four, const int terms, const struct panels *q,
                     const struct vnni_x *x, const struct panel_rows *rows, size_t r, size_t n,
                     struct range panels, const struct post *post)
{
    for (size_t p = panels.first; p < panels.end; p++) {
        _Alignas(64) float acc[2][VNNI_ROWS][VL];
        vnni_panel(M, four, terms, q, x, p, acc[0]);
        if (q->gate)
            vnni_panel(M, four, terms, q, x, p + q->gate->panels, acc[1]);
        for (size_t i = 0; i < n; i++)
            if (q->gate)
                vnni_gated(q, p, rows->out[r + i], acc[0][i], acc[1][i], post, rows->stream);
            else
                panel_line(q, p, rows->out[r + i], v_load(acc[0][i]), post, rows->stream);
    }
}

/* n rows from r on as tiles, or the only one: x, scales and sums of rows that are not handed over.
 */
INLINE struct vnni_x vnni_pack(const int four, const int terms, const struct panels *q,
                               const struct panel_rows *rows, size_t r, size_t n, char *woven,
                               float *scales, int32_t *sums)
{
    const size_t M = (size_t)(VNNI_M / terms), half = EMBER_X8_COLUMNS(q->K);
    const size_t segments = (q->K + q->segment - 1) / q->segment;
    if (n == 1) {
        vnni_sums(1, four, terms, q, rows->x[r], sums);
        return (struct vnni_x){rows->x[r], rows->scale[r], sums};
    }
    for (size_t i = 0; i < n; i += M) {
        const char *of[VNNI_M];
        for (size_t m = 0; m < M; m++) { /* the last tile's last row fills it */
            const size_t at = r + (i + m < n ? i + m : n - 1);
            of[m] = rows->x[at];
            if (terms == 2)
                of[M + m] = of[m] + half;
            for (size_t s = 0; s < segments; s++)
                scales[i * segments + s * M + m] = rows->scale[at][s];
        }
        vnni_weave(of, half, woven + i * half * (size_t)terms);
        vnni_sums((int)M, four, terms, q, woven + i * half * (size_t)terms, sums + i * segments);
    }
    return (struct vnni_x){woven, scales, sums};
}

/* The same of rows that are, from row `first` of all on: their sums times the zero point. */
INLINE struct vnni_x vnni_ready(const int four, const int terms, const struct panels *q,
                                const struct x_int *x, size_t first, size_t n, int32_t *sums)
{
    const size_t segments = (q->K + q->segment - 1) / q->segment;
    const size_t height = x_int_height(x), all = (n + height - 1) / height * height * segments;
    const int32_t *of = x_int_sums(x) + first * segments * (size_t)terms;
    const int32_t zero = !four ? -128 : q->zero ? -1 : -8;
    for (size_t i = 0; i < all; i++)
        if (terms == 1)
            sums[i] = of[i] * zero;
        else if (x->form == X_INT_ONE)
            sums[i] = (of[2 * i] * 256 + (four ? of[2 * i + 1] : 0)) * zero;
        else
            sums[i] = (of[i / 4 * 8 + i % 4] * 256 + (four ? of[i / 4 * 8 + 4 + i % 4] : 0)) * zero;
    return (struct vnni_x){x->x + first * EMBER_X8_COLUMNS(q->K) * (size_t)terms,
                           (const float *)x->scale + first * segments, sums};
}

INLINE void vnni_rows(const int four, const int terms, const struct panels *q,
                      const struct panel_rows *rows, struct range panels, const struct post *post)
{
    const size_t segments = (q->K + q->segment - 1) / q->segment, half = EMBER_X8_COLUMNS(q->K);
    const size_t fit = VNNI_X_BYTES / (half * VNNI_M), some = VNNI_SUMS / segments / VNNI_M;
    const size_t most = (fit < some ? fit : some) * (size_t)(VNNI_M / terms);
    _Alignas(64) float acc[INT_ROWS][VNNI_P][VL];
    _Alignas(64) char woven[VNNI_X_BYTES];
    int32_t sums[VNNI_SUMS];
    float scales[VNNI_SUMS];
    for (size_t r = 0, n; r < rows->n; r += n) {
        n = rows->n - r < most ? rows->n - r : most;
        const struct vnni_x x =
            rows->ready ? vnni_ready(four, terms, q, rows->ready, rows->first + r, n, sums)
                        : vnni_pack(four, terms, q, rows, r, n, woven, scales, sums);
        if (n == 1 && !(rows->ready && rows->ready->form == X_INT_WOVEN)) {
            vnni_one(four, terms, q, &x, rows->out[r], panels, post);
            continue;
        }
        const size_t last = q->gate ? 2 * q->gate->panels - 1 : panels.end - 1;
        if (n * (size_t)terms <= VNNI_ROWS / 4)
            vnni_few(VNNI_ROWS / 4 / terms, four, terms, q, &x, rows, r, n, panels, post);
        else if (n * (size_t)terms <= VNNI_ROWS / 2)
            vnni_few(VNNI_ROWS / 2 / terms, four, terms, q, &x, rows, r, n, panels, post);
        else if (n * (size_t)terms <= VNNI_ROWS)
            vnni_few(VNNI_ROWS / terms, four, terms, q, &x, rows, r, n, panels, post);
        else
            for (size_t p = panels.first; p < panels.end; p += q->gate ? 1 : VNNI_P)
                vnni_pair(four, terms, q, &x, rows, r, n, p, last, acc, post);
        if (rows->stream)
            _mm_sfence();
    }
}

static __attribute__((unused)) void int_vnni(enum ember_quant quant, const struct panels *q,
                                             const struct panel_rows *rows, struct range panels,
                                             const struct post *post)
{
    if (quant == EMBER_QUANT_INT8 && q->terms == 1)
        vnni_rows(0, 1, q, rows, panels, post);
    else if (quant == EMBER_QUANT_INT8)
        vnni_rows(0, 2, q, rows, panels, post);
    else if (q->terms == 1)
        vnni_rows(1, 1, q, rows, panels, post);
    else
        vnni_rows(1, 2, q, rows, panels, post);
}

#endif
