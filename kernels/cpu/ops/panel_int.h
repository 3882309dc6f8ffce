/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Integer products by vectors; int_dot.h says by which instructions.
 *
 * A tile is INT_TILE_M rows (of QUADS and two terms half as many), woven, against INT_TILE_P
 * panels, whose sums fill half the registers: by VPDPBUSD there are for 16 products 8 words of x
 * and 2 lines of w to be loaded, and more would not keep up; beside the four instructions that such
 * a product is in PAIRS they do. Up to INT_FEW rows go against one panel instead: w is what they
 * wait for, and so it is used up as it comes. Of narrower vectors there are too few for that.
 * What sums come to as floats waits in memory. Some of k at a time goes over all rows, so that its
 * part of the panels stays in the first-level cache, while each tile fetches a share of the next
 * part.
 */
#ifndef EMBER_KERNELS_CPU_PANEL_INT_H
#define EMBER_KERNELS_CPU_PANEL_INT_H

#include "kernels/cpu/ops/int_dot.h"
#include "kernels/cpu/ops/panel.h"

#define INT_M 8 /* rows of x woven together; of QUADS and two terms half as many */
#define INT_P 2 /* panels that go together; of one row, streams of memory */
#if EMBER_ISA >= 2
#define INT_TILE_M (by == INT_BY_PAIRS ? 16 : 8) /* of one tile `by` is said */
#define INT_TILE_P (by == INT_BY_PAIRS ? 1 : 2)
#elif EMBER_ISA == 1 || defined(__aarch64__)
#define INT_TILE_M 4
#define INT_TILE_P 1
#else
#define INT_TILE_M 2
#define INT_TILE_P 1
#endif
#define INT_FEW 16
#define INT_V (INT_P * PV)
#define INT_AHEAD 3072       /* bytes that a panel of few rows is fetched ahead */
#define INT_STEP_K 512       /* of k at a time */
#define INT_SEGMENTS 16      /* segments of them, at most */
#define INT_SUMS 32768       /* segments of rows at a time, */
#define INT_X_BYTES 2097152u /* and bytes of them */
_Static_assert(INT_X_BYTES >= EMBER_INT8_K_MAX * 2 * INT_M &&
                   INT_SUMS >= EMBER_INT8_K_MAX / 32 * INT_M,
               "what is woven together");

/* How much of k is taken at a time. */
INLINE size_t int_step(const struct panels *q)
{
    return q->segment > INT_STEP_K ? q->segment : INT_STEP_K / q->segment * q->segment;
}

INLINE size_t int_segments(const struct panels *q)
{
    return (q->K + q->segment - 1) / q->segment;
}

/* ---- rows of x ---- */

/*
 * Rows of x: one, or `rows` together, which is INT_M, of QUADS and two terms half of it; INT_M
 * words (int_word) for each four of k, of two terms the upper and then the lower ones of half as
 * many rows. `sums`, not of PAIRS, is what the codes' zero point adds to each segment, negated;
 * with zero points of their own, what is to be multiplied with them.
 */
struct int_x {
    const char *x;
    const float *scale;  /* [segment][row] */
    const int32_t *sums; /* the same */
};

INLINE size_t int_rows_together(const int terms)
{
    return (size_t)(INT_M / terms);
}

/* From row r on, which begins a tile. */
INLINE struct int_x int_x_at(const enum int_by by, const int terms, const struct panels *q,
                             const struct int_x *x, size_t r)
{
    const size_t R = int_rows_together(terms), of = r / R, row = r % R, word = int_word(by);
    const size_t first = of * R * int_segments(q) + row;
    return (struct int_x){x->x + of * EMBER_X8_COLUMNS(q->K) / 4 * word * INT_M + row * word,
                          x->scale + first, x->sums + first};
}

#if EMBER_ISA >= 1

/* Eight rows of 32 bytes to `to`: four bytes of each in turn. */
INLINE void int_weave(const char *const *x, char *to)
{
    __m256i a[8], b[8];
    UNROLL
    for (int i = 0; i < 8; i++)
        a[i] = _mm256_loadu_si256((const void *)x[i]);
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
        _mm256_store_si256((void *)(to + i * 32), _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
        _mm256_store_si256((void *)(to + 128 + i * 32),
                           _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
    }
}

/* The sums of one row, or of rows woven together as [segment][row], times the zero point. */
INLINE void int_sums(const int one, const int four, int terms, const struct panels *q,
                     const char *x, int32_t *ret)
{
    const size_t half = EMBER_X8_COLUMNS(q->K), wide = one ? 1 : INT_M;
    const __m256i zero = _mm256_set1_epi32(!four ? -128 : q->zero ? -1 : -8);
    for (size_t k = 0, end; k < q->K; k = end, ret += one ? 1 : INT_M / terms) {
        end = q->K - k < q->segment ? q->K : k + q->segment;
        __m256i high = _mm256_setzero_si256(), low = high;
        /* Behind K there are zeros to a multiple of 64; a segment is one of 32. */
        for (size_t at = k * wide, stop = (end + 31) / 32 * 32 * wide; at < stop; at += 32) {
            const __m256i v = _mm256_loadu_si256((const void *)(x + at));
            high = x_add_bytes(high, v, 1);
            if (four && terms == 2)
                low = x_add_bytes(low, one ? _mm256_loadu_si256((const void *)(x + half + at)) : v,
                                  0);
        }
        if (one) { /* the sum of all lanes in each */
            high = x_sum_lanes(high);
            low = x_sum_lanes(low);
        } else if (terms == 2)
            low = _mm256_permute2x128_si256(low, low, 0x81);
        if (terms == 2)
            high = _mm256_add_epi32(_mm256_slli_epi32(high, 8), low);
        high = _mm256_mullo_epi32(high, zero);
        if (one)
            *ret = _mm256_extract_epi32(high, 0);
        else if (terms == 2)
            _mm_storeu_si128((void *)ret, _mm256_castsi256_si128(high));
        else
            _mm256_storeu_si256((void *)ret, high);
    }
}

/* Four words, upper terms and of two terms lower ones, as pairs. */
INLINE __m256i int_pairs4(const int terms, const char *upper, const char *lower)
{
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m128i u = _mm_shuffle_epi8(_mm_loadu_si128((const void *)upper), order);
    if (terms == 1)
        return _mm256_cvtepi8_epi16(u);
    const __m128i l = _mm_shuffle_epi8(_mm_loadu_si128((const void *)lower), order);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(l, u)),
                                   _mm_unpackhi_epi8(l, u), 1);
}
INLINE void int_pairs(int terms, const char *upper, const char *lower, size_t n, char *to)
{
    for (size_t i = 0; terms == 1 && i < n; i += 16)
        _mm256_store_si256((void *)(to + 2 * i), int_pairs4(1, upper + i, lower + i));
    for (size_t i = 0; terms == 2 && i < n; i += 16)
        _mm256_store_si256((void *)(to + 2 * i), int_pairs4(2, upper + i, lower + i));
}

/* INT_M rows of bytes (of two terms half as many) as they are woven together; sums not of PAIRS. */
INLINE void int_pack_rows(const enum int_by by, const int four, int terms, const struct panels *q,
                          const char *const *x, char *to, int32_t *sums)
{
    const size_t half = EMBER_X8_COLUMNS(q->K);
    const int R = by == INT_BY_PAIRS ? INT_M : INT_M / terms;
    for (size_t k = 0; k < half; k += 32) {
        _Alignas(32) char words[2][256];
        const char *upper[INT_M], *lower[INT_M];
        for (int m = 0; m < R; m++) {
            upper[m] = x[m] + k;
            lower[m] = upper[m] + (terms == 2 ? half : 0);
            if (R < INT_M)
                upper[R + m] = lower[m];
        }
        if (by != INT_BY_PAIRS) {
            int_weave(upper, to + k * INT_M);
            continue;
        }
        int_weave(upper, words[0]);
        if (terms == 2)
            int_weave(lower, words[1]);
        int_pairs(terms, words[0], words[1], 256, to + k * 2 * INT_M);
    }
    if (by != INT_BY_PAIRS)
        int_sums(0, four, terms, q, to, sums);
}

#else

INLINE void int_pairs_strided(int terms, const char *upper, const char *lower, size_t n, char *to,
                              size_t apart)
{
    for (size_t k = 0; k < n; k += 4, to += apart) {
        int16_t pair[4];
        for (size_t i = 0; i < 4; i++)
            pair[(i & 1) * 2 + i / 2] =
                (int16_t)(terms == 2 ? (int8_t)upper[k + i] * 256 + (uint8_t)lower[k + i]
                                     : (int8_t)upper[k + i]);
        __builtin_memcpy(to, pair, sizeof(pair));
    }
}
INLINE void int_pairs(int terms, const char *upper, const char *lower, size_t n, char *to)
{
    int_pairs_strided(terms, upper, lower, n, to, sizeof(int16_t[4]));
}
INLINE void int_pack_rows(const enum int_by by, const int four, int terms, const struct panels *q,
                          const char *const *x, char *to, int32_t *sums)
{
    const size_t half = EMBER_X8_COLUMNS(q->K), word = int_word(by);
    for (size_t m = 0; m < INT_M; m++)
        int_pairs_strided(terms, x[m], x[m] + half, half, to + m * word, INT_M * word);
    (void)four, (void)sums;
}
INLINE void int_sums(const int one, const int four, int terms, const struct panels *q,
                     const char *x, int32_t *ret)
{
    (void)one, (void)four, (void)terms, (void)q, (void)x, (void)ret;
}

#endif

/* ---- panels ---- */

/* Panels with scales and zero points of some segments, from `first` on. */
struct int_w {
    const char *w[INT_P];
    size_t first;
    _Alignas(64) float scale[INT_SEGMENTS][INT_P][EMBER_PANEL];
    _Alignas(64) int32_t zero[INT_SEGMENTS][INT_P][EMBER_PANEL]; /* of PAIRS twice 16 bits each */
};

INLINE void int_scales(const struct panels *q, size_t p, size_t k, size_t stop, const int f16,
                       float (*ret)[INT_P][EMBER_PANEL])
{
    struct panels of = *q;
    if (f16)
        of.scale_dtype = EMBER_F16;
    for (size_t g = k / q->group, end = (g + 1) * q->group; k < stop; k += q->segment, ret++) {
        if (k >= end) {
            g++;
            end += q->group;
        }
        UNROLL
        for (int v = 0; v < PV; v++)
            v_store(ret[0][0] + v * VL, panel_scale(&of, p, g, v));
    }
}

INLINE void int_zeros(const enum int_by by, const struct panels *q, size_t p, size_t g,
                      int32_t *ret)
{
    const int32_t twice = by == INT_BY_PAIRS ? 0x10001 : 1;
    for (size_t i = 0; i < EMBER_PANEL; i++)
        ret[i] = twice * (q->zero ? q->zero[(p * q->groups + g) * EMBER_PANEL + i] : 8);
}

/* Panels p, p + step, ..., of which those beyond the last are the last again, with the scales of
 * k .. stop - 1. */
INLINE void int_panels_at(const enum int_by by, const int P, const int four, const struct panels *q,
                          size_t p, size_t step, size_t last, size_t k, size_t stop,
                          struct int_w *ret)
{
    ret->first = k / q->segment;
    for (int j = 0; j < P; j++, p = last - p < step ? last : p + step) {
        ret->w[j] = q->w + p * q->panel_bytes;
        if (q->scale_dtype == EMBER_F16)
            int_scales(q, p, k, stop, 1, (void *)ret->scale[0][j]);
        else
            int_scales(q, p, k, stop, 0, (void *)ret->scale[0][j]);
        if (four && (q->zero || by == INT_BY_PAIRS))
            for (size_t s = 0, at = k; at < stop; s++, at += q->segment)
                int_zeros(by, q, p, at / q->group, ret->zero[s][j]);
    }
}

/* ---- tiles ---- */

/* What is fetched while a tile is multiplied: `step` bytes of each for a line. */
struct int_fetch {
    const char *at[INT_P];
    size_t step;
};

/* k .. stop - 1 of M rows (one, or woven ones) against P panels, from the first-th of w on, added
 * to acc, [M] rows `apart` floats apart of [P][16], which is not read where k is 0. four: of 4
 * bits. F lines are fetched for each. */
INLINE void int_tile(const enum int_by by, const int M, const int P, const int F, const int four,
                     const int terms, const struct panels *q, const struct int_w *w, size_t first,
                     const struct int_x *x, size_t k, size_t stop, const struct int_fetch *fetch,
                     float *acc, const size_t apart)
{
    const int V = P * PV, lines = by == INT_BY_BYTES ? 4 : 1; /* at a time */
    const size_t word = int_word(by), rows = M == 1 ? 1 : int_rows_together(terms);
    const size_t step = M == 1 ? word : word * INT_M, half = EMBER_X8_COLUMNS(q->K);
    const size_t tile = half / 4 * word * INT_M, lower = M == 1 ? half : 4 * rows;
    const size_t segments = int_segments(q) * rows; /* of a tile */
    size_t done = 0;                                /* of what is fetched */
    for (size_t s = k / q->segment, end; k < stop; s++, k = end) {
        vi sum[INT_FEW][INT_V], lows[INT_FEW][INT_V], zero[INT_V];
        end = stop - k < q->segment ? stop : k + q->segment;
        UNROLL
        for (int j = 0; j < V; j++)
            zero[j] = four && (q->zero || by == INT_BY_PAIRS)
                          ? vi_load(w->zero[s - w->first][first] + j * VL)
                          : vi_zero();
        UNROLL
        for (int m = 0; m < M; m++) {
            const size_t row = (size_t)m / rows * segments + s * rows + (size_t)m % rows;
            vi begin = vi_zero();
            if (by != INT_BY_PAIRS) {
                begin = vi_set_at(x->sums + row);
                v_keep(begin); /* loaded once for all panels */
            }
            UNROLL
            for (int j = 0; j < V; j++) {
                vi of = begin;
                if (by != INT_BY_PAIRS && four && q->zero)
                    of = vi_mul32(begin, zero[j]);
                lows[m][j] = of;
                sum[m][j] = by == INT_BY_QUADS && terms == 2 ? vi_zero() : of;
            }
        }
        for (size_t line = four ? k / 8 : k / 4, last = four ? (end + 31) / 32 * 4 : (end + 3) / 4;
             line < last; line += (size_t)lines) {
            UNROLL
            for (int i = 0; i < lines; i++, done += fetch->step) {
                const size_t l = line + (size_t)i;
                const char *at = x->x + (!four       ? l
                                         : lines > 1 ? 2 * line + (size_t)i
                                                     : l / 4 * 8 + l % 4) *
                                            step;
                vi v[INT_V];
                UNROLL
                for (int j = 0; j < V; j++) {
                    v[j] = vi_load(w->w[first + (size_t)(j / PV)] + l * EMBER_TILE_LINE +
                                   j % PV * VL * 4);
                    if (j % PV == 0 && j / PV < F)
                        __builtin_prefetch(fetch->at[j / PV] + done);
                }
                UNROLL
                for (int high = 0; high < 1 + four; high++, at += 4 * step) {
                    struct int_codes codes[INT_V];
                    UNROLL
                    for (int j = 0; j < V; j++)
                        codes[j] = int_codes(by, four, high, v[j], zero[j]);
                    UNROLL
                    for (int m = 0; m < M; m++)
                        int_dot(by, V, terms, i + high == 0, codes,
                                at + (size_t)m / rows * tile + (size_t)m % rows * word, lower,
                                sum[m], lows[m]);
                }
            }
            UNROLL
            for (int m = 0; by == INT_BY_BYTES && m < M; m++)
                UNROLL
            for (int j = 0; j < V; j++)
                sum[m][j] = vi_add(sum[m][j], vi_madd16(lows[m][j], vi_set16(1)));
        }
        UNROLL
        for (int j = 0; j < V; j++) {
            const vf scale = v_load(w->scale[s - w->first][first] + j * VL);
            UNROLL
            for (int m = 0; m < M; m++) {
                const size_t row = (size_t)m / rows * segments + s * rows + (size_t)m % rows;
                float *to = acc + (size_t)m * apart + (size_t)j * VL;
                vi of = sum[m][j];
                if (by == INT_BY_QUADS && terms == 2)
                    of = vi_add(vi_sll32(of, 8), lows[m][j]);
                v_store(to, v_add(v_load_if(s > 0, to),
                                  v_mul(v_from_int(of), v_mul(v_set(x->scale[row]), scale))));
            }
        }
    }
}

/* Panels from one of a pair to the other, which of a gated weight are gate and up. */
INLINE size_t int_apart(const struct panels *q, size_t others)
{
    return q->gate ? q->gate->panels : others;
}

/* Products of gate and up to a row. Compiled once: each activation is here. */
static __attribute__((noinline, unused)) void int_gated(const struct panels *q, size_t p,
                                                        float *out, const float *gate,
                                                        const float *up, const struct post *post,
                                                        int stream)
{
    const size_t I = q->gate->panels * EMBER_PANEL;
    for (size_t j = 0, n = p * EMBER_PANEL; j < PV; j++, n += VL) {
        const vf v = glu_value(post_value(v_load(gate + j * VL), n, VL, post),
                               post_value(v_load(up + j * VL), I + n, VL, post), q->gate->act,
                               q->gate->limit, q->gate->alpha);
        if (stream)
            v_stream(out + n, v);
        else
            v_store(out + n, v);
    }
}

/* A panel's sums to a row. */
INLINE void int_put(const struct panels *q, size_t p, float *out, const float *sums,
                    const struct post *post, const int stream)
{
    vf v[PV];
    UNROLL
    for (int j = 0; j < PV; j++)
        v[j] = v_load(sums + j * VL);
    panel_line(q, p, out, v, post, stream);
}

/* One row against some panels: several streams of them, each of which goes on where it ended. Of a
 * gated weight they are gate and up. */
INLINE void int_one(const enum int_by by, const int four, const int terms, const struct panels *q,
                    const struct int_x *x, float *out, struct range panels, const struct post *post)
{
    const size_t all = panels.end - panels.first, step = int_step(q);
    const size_t streams = q->gate ? all : all / INT_P, apart = int_apart(q, streams);
    const size_t last = q->gate ? 2 * apart - 1 : panels.end - 1;
    const size_t line = four ? 8 : 16; /* bytes of a panel for one of k */
    for (size_t turn = 0, n; turn < streams + (q->gate ? 0 : all % INT_P); turn++) {
        _Alignas(64) float acc[INT_P][EMBER_PANEL];
        const size_t p = panels.first + (turn < streams ? turn : turn + streams * (INT_P - 1));
        n = turn < streams ? INT_P : 1;
        for (size_t k = 0, stop; k < q->K; k = stop) {
            struct int_w w;
            struct int_fetch fetch = {.step = EMBER_TILE_LINE};
            stop = q->K - k < step ? q->K : k + step;
            int_panels_at(by, (int)n, four, q, p, apart, last, k, stop, &w);
            for (size_t j = 0; j < n; j++)
                fetch.at[j] = w.w[j] + k * line + PANEL_AHEAD;
            if (n > 1)
                int_tile(by, 1, INT_P, INT_P, four, terms, q, &w, 0, x, k, stop, &fetch, acc[0], 0);
            else
                int_tile(by, 1, 1, 1, four, terms, q, &w, 0, x, k, stop, &fetch, acc[0], 0);
        }
        if (q->gate)
            int_gated(q, p, out, acc[0], acc[1], post, 0);
        for (size_t j = 0; !q->gate && j < n; j++)
            int_put(q, p + j * streams, out, acc[j], post, 0);
    }
}

/* Rows of a tile. */
INLINE size_t int_high(const enum int_by by, const int terms, size_t most)
{
    return by == INT_BY_QUADS ? most / (size_t)terms : most;
}

/* n rows from r on, as tiles, against panels p and p + 1, which is nobody's where p is the last; or
 * gate and up of p. A tile's products go to their rows while it is in the first level. */
INLINE void int_pair(const enum int_by by, const int four, const int terms, const struct panels *q,
                     const struct int_x *x, const struct panel_rows *rows, size_t r, size_t n,
                     size_t p, size_t last, float (*acc)[INT_P][EMBER_PANEL],
                     const struct post *post)
{
    const size_t M = int_high(by, terms, INT_TILE_M), step = int_step(q), line = four ? 8 : 16;
    const size_t turns = (n + M - 1) / M * (INT_P / INT_TILE_P);
    const size_t share = (turns + INT_P - 1) / INT_P; /* turns that fetch from one panel */
    for (size_t k = 0, stop; k < q->K; k = stop) {
        struct int_w w;
        stop = q->K - k < step ? q->K : k + step;
        int_panels_at(by, INT_P, four, q, p, int_apart(q, 1), last, k, stop, &w);
        const size_t next = stop < q->K ? stop * line : (q->gate ? 1 : INT_P) * q->panel_bytes;
        const size_t bytes = (stop - k) * line;
        for (size_t i = 0, turn = 0; i < n; i += M) {
            const struct int_x of = int_x_at(by, terms, q, x, i);
            for (size_t j = 0; j < INT_P; j += INT_TILE_P, turn++) {
                const struct int_fetch fetch = {
                    {w.w[turn % INT_P] + next + turn / INT_P * bytes / share},
                    EMBER_TILE_LINE / share};
                if (M == 2 || n - i > M / 2)
                    int_tile(by, (int)int_high(by, terms, INT_TILE_M), INT_TILE_P, 1, four, terms,
                             q, &w, j, &of, k, stop, &fetch, acc[i][j], INT_P * EMBER_PANEL);
                else
                    int_tile(by, (int)int_high(by, terms, INT_TILE_M) / 2, INT_TILE_P, 1, four,
                             terms, q, &w, j, &of, k, stop, &fetch, acc[i][j], INT_P * EMBER_PANEL);
            }
            for (size_t at = i; stop == q->K && at < n && at < i + M; at++)
                if (q->gate)
                    int_gated(q, p, rows->out[r + at], acc[at][0], acc[at][1], post, rows->stream);
                else
                    for (size_t j = 0; j < INT_P && p + j <= last; j++)
                        int_put(q, p + j, rows->out[r + at], acc[at][j], post, rows->stream);
        }
    }
}

/* The first M rows against panel p, to acc. */
INLINE void int_panel(const enum int_by by, const int M, const int four, const int terms,
                      const struct panels *q, const struct int_x *x, size_t p,
                      float (*acc)[EMBER_PANEL])
{
    const size_t step = int_step(q), line = four ? 8 : 16;
    for (size_t k = 0, stop; k < q->K; k = stop) {
        struct int_fetch fetch = {.step = EMBER_TILE_LINE};
        struct int_w w;
        stop = q->K - k < step ? q->K : k + step;
        int_panels_at(by, 1, four, q, p, 1, p, k, stop, &w);
        fetch.at[0] = w.w[0] + k * line + INT_AHEAD;
        int_tile(by, M, 1, 1, four, terms, q, &w, 0, x, k, stop, &fetch, acc[0], EMBER_PANEL);
    }
}

/* n rows from r on, at most M, against some panels. */
INLINE void int_few(const enum int_by by, const int M, const int four, const int terms,
                    const struct panels *q, const struct int_x *x, const struct panel_rows *rows,
                    size_t r, size_t n, struct range panels, const struct post *post)
{
    for (size_t p = panels.first; p < panels.end; p++) {
        _Alignas(64) float acc[2][INT_FEW][EMBER_PANEL];
        int_panel(by, M, four, terms, q, x, p, acc[0]);
        if (q->gate)
            int_panel(by, M, four, terms, q, x, p + q->gate->panels, acc[1]);
        for (size_t i = 0; i < n; i++)
            if (q->gate)
                int_gated(q, p, rows->out[r + i], acc[0][i], acc[1][i], post, rows->stream);
            else
                int_put(q, p, rows->out[r + i], acc[0][i], post, rows->stream);
    }
}

/* Room for what rows are turned into. */
struct int_room {
    _Alignas(64) char x[INT_X_BYTES];
    int32_t sums[INT_SUMS];
    float scales[INT_SUMS];
};

/* n rows from r on woven together, or the only one: of those that are not handed over. */
INLINE struct int_x int_pack(const enum int_by by, const int four, const int terms,
                             const struct panels *q, const struct panel_rows *rows, size_t r,
                             size_t n, struct int_room *room)
{
    const size_t R = by == INT_BY_PAIRS ? INT_M : int_rows_together(terms);
    const size_t half = EMBER_X8_COLUMNS(q->K), segments = int_segments(q);
    if (n == 1 && by == INT_BY_PAIRS) {
        int_pairs(terms, rows->x[r], rows->x[r] + half, half, room->x);
        return (struct int_x){room->x, rows->scale[r], room->sums};
    }
    if (n == 1) {
        int_sums(1, four, terms, q, rows->x[r], room->sums);
        return (struct int_x){rows->x[r], rows->scale[r], room->sums};
    }
    for (size_t i = 0; i < n; i += R) {
        const char *of[INT_M];
        for (size_t m = 0; m < R; m++) { /* the last row fills up those that it is woven with */
            const size_t at = r + (i + m < n ? i + m : n - 1);
            of[m] = rows->x[at];
            for (size_t s = 0; s < segments; s++)
                room->scales[i * segments + s * R + m] = rows->scale[at][s];
        }
        int_pack_rows(by, four, terms, q, of, room->x + i * half / 4 * int_word(by) * INT_M / R,
                      room->sums + i * segments);
    }
    return (struct int_x){room->x, room->scales, room->sums};
}

/* The same of rows that are, from row `first` of all on: as pairs, or with their sums times the
 * zero point. */
INLINE struct int_x int_ready_pairs(const int terms, const struct panels *q, const struct x_int *x,
                                    size_t first, size_t n, struct int_room *room)
{
    const size_t half = EMBER_X8_COLUMNS(q->K), segments = int_segments(q);
    const char *from = x->x + first * half * (size_t)terms;
    const float *scale = (const float *)x->scale + first * segments;
    if (x->form == X_INT_ONE || terms == 1) {
        int_pairs(terms, from, from + half,
                  x->form == X_INT_ONE ? half : (n + INT_M - 1) / INT_M * INT_M * half, room->x);
        return (struct int_x){room->x, scale, room->sums};
    }
    for (size_t i = 0; i < n; i += INT_M / 2) { /* four rows are half of what is woven here */
        char *to = room->x + i / INT_M * 2 * INT_M * half + i % INT_M * 8;
        for (size_t k = 0; k < half; k += 4, from += 32, to += INT_M * 8)
            int_pairs(2, from, from + 16, 16, to);
        for (size_t s = 0; s < segments; s++)
            for (size_t m = 0; m < INT_M / 2; m++)
                room->scales[i / INT_M * INT_M * segments + s * INT_M + i % INT_M + m] =
                    scale[i * segments + s * (INT_M / 2) + m];
    }
    return (struct int_x){room->x, room->scales, room->sums};
}
INLINE struct int_x int_ready(const enum int_by by, const int four, const int terms,
                              const struct panels *q, const struct x_int *x, size_t first, size_t n,
                              struct int_room *room)
{
    const size_t segments = int_segments(q);
    if (by == INT_BY_PAIRS)
        return int_ready_pairs(terms, q, x, first, n, room);
    const size_t height = x_int_height(x), all = (n + height - 1) / height * height * segments;
    const int32_t *of = x_int_sums(x) + first * segments * (size_t)terms;
    const int32_t zero = !four ? -128 : q->zero ? -1 : -8;
    for (size_t i = 0; i < all; i++)
        if (terms == 1)
            room->sums[i] = of[i] * zero;
        else if (x->form == X_INT_ONE)
            room->sums[i] = (of[2 * i] * 256 + (four ? of[2 * i + 1] : 0)) * zero;
        else
            room->sums[i] =
                (of[i / 4 * 8 + i % 4] * 256 + (four ? of[i / 4 * 8 + 4 + i % 4] : 0)) * zero;
    return (struct int_x){x->x + first * EMBER_X8_COLUMNS(q->K) * (size_t)terms,
                          (const float *)x->scale + first * segments, room->sums};
}

/* Rows as the bodies want them against some panels. */
INLINE void int_rows(const enum int_by by, const int four, const int terms, const struct panels *q,
                     const struct int_x *x, const int one, const struct panel_rows *rows, size_t r,
                     size_t n, struct range panels, const struct post *post)
{
    _Alignas(64) float acc[INT_ROWS][INT_P][EMBER_PANEL];
    const size_t last = q->gate ? 2 * q->gate->panels - 1 : panels.end - 1;
    const size_t few = int_high(by, terms, INT_FEW);
    (void)few;
    if (one)
        int_one(by, four, terms, q, x, rows->out[r], panels, post);
#if EMBER_ISA >= 2
    else if (n <= few / 4)
        int_few(by, (int)int_high(by, terms, INT_FEW) / 4, four, terms, q, x, rows, r, n, panels,
                post);
    else if (n <= few / 2)
        int_few(by, (int)int_high(by, terms, INT_FEW) / 2, four, terms, q, x, rows, r, n, panels,
                post);
    else if (n <= few)
        int_few(by, (int)int_high(by, terms, INT_FEW), four, terms, q, x, rows, r, n, panels, post);
#endif
    else
        for (size_t p = panels.first; p < panels.end; p += q->gate ? 1 : INT_P)
            int_pair(by, four, terms, q, x, rows, r, n, p, last, acc, post);
    if (rows->stream)
        v_fence();
}

/* terms: of x as it is given. */
INLINE void int_rows_of(const enum int_by by, const int four, const int terms,
                        const struct panels *q, const struct panel_rows *rows, struct range panels,
                        const struct post *post)
{
    const size_t bytes = EMBER_X8_COLUMNS(q->K) * (by == INT_BY_PAIRS ? 2 : (size_t)terms);
    const size_t fit = INT_X_BYTES / (bytes * INT_M), some = INT_SUMS / int_segments(q) / INT_M;
    const size_t most = (fit < some ? fit : some) * INT_M;
    struct int_room room;
    for (size_t r = 0, n; r < rows->n; r += n) {
        struct int_x x;
        n = rows->n - r < most ? rows->n - r : most;
        if (rows->ready)
            x = int_ready(by, four, terms, q, rows->ready, rows->first + r, n, &room);
        else
            x = int_pack(by, four, terms, q, rows, r, n, &room);
        int_rows(by, four, by == INT_BY_PAIRS ? 1 : terms, q, &x,
                 n == 1 && !(rows->ready && rows->ready->form == X_INT_WOVEN), rows, r, n, panels,
                 post);
    }
}

static __attribute__((noinline, unused)) void
int_vectors(enum ember_quant quant, const struct panels *q, const struct panel_rows *rows,
            struct range panels, const struct post *post)
{
    if (int_by(0, 1) == INT_BY_PAIRS && quant == EMBER_QUANT_INT8)
        int_rows_of(INT_BY_PAIRS, 0, q->terms, q, rows, panels, post);
    else if (quant == EMBER_QUANT_INT8 && q->terms == 1)
        int_rows_of(int_by(0, 1), 0, 1, q, rows, panels, post);
    else if (quant == EMBER_QUANT_INT8)
        int_rows_of(int_by(0, 2), 0, 2, q, rows, panels, post);
    else if (q->terms == 1)
        int_rows_of(int_by(1, 1), 1, 1, q, rows, panels, post);
    else
        int_rows_of(int_by(1, 2), 1, 2, q, rows, panels, post);
}

#endif
