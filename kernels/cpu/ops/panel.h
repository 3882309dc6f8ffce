/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products with weights in tiles (ember/op.h, layout TILES): what every body of them shares, and
 * the bodies that need nothing but the vector layer. panel_vnni.h and panel_amx_*.h have the
 * others.
 *
 * A body computes some rows of x against some panels. A lane of a vector is a row of w, so sums
 * need no folding, and one order holds for any number of rows: bf16 adds even k to one sum and odd
 * k to another, k ascending, and adds the two; integers are added segment by segment as op.h says.
 */
#ifndef EMBER_KERNELS_CPU_PANEL_H
#define EMBER_KERNELS_CPU_PANEL_H

#include "kernels/cpu/ops/glu.h"
#include "kernels/cpu/ops/post.h"
#include "kernels/cpu/ops/x_int.h"

#define PV (EMBER_PANEL / VL) /* vectors of a panel */
#define PANEL_ROWS 128        /* rows of x at a time: what they are turned into fits half the L2 */
#define INT_ROWS 512          /* the same of integers, which are smaller */
#define BF16_ROWS 256         /* of bf16, where only some of k has to stay there */
/* Bytes that a panel is fetched ahead. Processors with VNNI and no AMX are AMD's, whose own
 * fetching is the better one as long as nobody reads far ahead of it. */
#if EMBER_ISA == 3
#define PANEL_AHEAD 256
#else
#define PANEL_AHEAD 2048
#endif

/* How gate and up are joined, each of so many panels of a weight. */
struct panel_gate {
    enum ember_act act;
    float limit, alpha;
    size_t panels;
};

/* A weight, and the integers' segments. */
struct panels {
    const char *w, *scale;
    const struct panel_gate *gate; /* NULL: none */
    const uint8_t *zero;           /* NULL: none */
    size_t panel_bytes, K, N;
    size_t groups, group, segment; /* of quantised ones */
    enum ember_dtype scale_dtype;
    int terms;
};

/* Rows of x with their scales and where their products go; n <= BF16_ROWS of bf16, else INT_ROWS.
 */
struct panel_rows {
    size_t n;
    const char *x[INT_ROWS]; /* NULL: only tmp is there */
    const float *scale[INT_ROWS];
    float *out[INT_ROWS];
    const char *tmp;           /* x as bf16_pack made it */
    const struct x_int *ready; /* integers of all rows, handed over; NULL: x and scale hold them */
    int stream;                /* products are more than caches hold, in whole lines */
    char *out_x;               /* where gated ones go, as x of all rows (x_tiles.h); NULL: to out */
    size_t first, all;         /* of which these are first, first + 1, ... */
};

/* Scales of group g of a panel: its v-th VL rows. */
INLINE vf panel_scale(const struct panels *q, size_t p, size_t g, const int v)
{
    const size_t at = (p * q->groups + g) * EMBER_PANEL + (size_t)v * VL;
    if (q->scale_dtype == EMBER_U8) {
#if EMBER_ISA >= 2 && EMBER_ISA < 16
        const __m512i s = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(q->scale + at)));
        return _mm512_castsi512_ps(
            _mm512_max_epi32(_mm512_slli_epi32(s, 23), _mm512_set1_epi32(1 << 22)));
#endif
        float two[VL];
        for (int i = 0; i < VL; i++)
            two[i] = scale_at(q->scale, at + (size_t)i, EMBER_U8);
        return v_load(two);
    }
    return v_load_w(q->scale, at, q->scale_dtype);
}

/* Row i of a panel's products, as vectors; columns beyond N are dropped. */
INLINE void panel_put(const struct panels *q, size_t p, float *out, const vf *v,
                      const struct post *post)
{
    size_t n = p * EMBER_PANEL;
    UNROLL
    for (int j = 0; j < PV; j++, n += VL) {
        if (n >= q->N)
            return;
        size_t left = V_LEFT(n, q->N);
        v_put(out + n, post_value(v[j], n, left, post), left);
    }
}

#if EMBER_ISA >= 2 && EMBER_ISA < 16
/* Sums of panel p to their row. stream: past the caches. */
INLINE void panel_line(const struct panels *q, size_t p, float *out, vf v, const struct post *post,
                       const int stream)
{
    const size_t n = p * EMBER_PANEL, left = V_LEFT(n, q->N);
    v = post_value(v, n, left, post);
    if (stream && left == VL)
        _mm512_stream_ps(out + n, v);
    else
        v_put(out + n, v, left);
}
#endif

/* ---- which rows and panels a block does ---- */

struct panel_part {
    struct range rows, panels;
};

/*
 * Rows are cut first, into as few equal parts of at most `most` as there can be, then panels; parts
 * of one range of rows follow each other, so that their x stays in cache. Turn t of block b: t = 0,
 * 1, ... until false.
 */
INLINE int panel_part(size_t rows, size_t most, size_t panels, uint32_t block, uint32_t n_blocks,
                      size_t turn, struct panel_part *ret)
{
    size_t cuts = (rows + most - 1) / most;
    if (!cuts)
        return 0;
    size_t height = ((rows + cuts - 1) / cuts + 31) / 32 * 32;
    cuts = (rows + height - 1) / height;
    size_t per_cut = n_blocks / cuts ? n_blocks / cuts : 1;
    size_t index = block + turn * n_blocks;
    if (index >= cuts * per_cut)
        return 0;
    size_t first = index / per_cut * height;
    ret->rows = (struct range){first, rows - first < height ? rows : first + height};
    ret->panels = block_range(panels, (uint32_t)(index % per_cut), (uint32_t)per_cut);
    return 1;
}

/* ---- bf16 ---- */

/* Line (k, k + 1) of a panel: its v-th VL rows as floats. */
INLINE vf panel_even(const uint32_t *line, const int v)
{
    return v_even_bf16(line + v * VL);
}
INLINE vf panel_odd(const uint32_t *line, const int v)
{
    return v_odd_bf16(line + v * VL);
}

#if EMBER_ISA >= 2 && EMBER_ISA < 16
#define BF16_M 6   /* rows at a time */
#define BF16_P 2   /* panels at a time */
#define BF16_FEW 3 /* as many rows wait for memory, which is read fastest in BF16_P_FEW streams */
#define BF16_P_FEW 4
#elif EMBER_ISA == 1
#define BF16_M 3
#define BF16_P 1
#define BF16_FEW 1
#define BF16_P_FEW 2
#else
#define BF16_M 1
#define BF16_P 1
#define BF16_FEW 1
#define BF16_P_FEW 1
#endif

/* What is fetched while two of k are multiplied: a line of each of P streams. */
struct panel_fetch {
    const char *at;     /* of the first stream */
    size_t apart, step; /* bytes between streams, and on to the next two of k */
    size_t turn, jump;  /* from k = turn on, an even number, `jump` bytes further */
};

/* P panels a little ahead, and behind their ends the next P. */
INLINE struct panel_fetch panel_ahead(const struct panels *q, size_t p, const int P)
{
    const size_t turn = q->K < PANEL_AHEAD / 32 ? 0 : (q->K - PANEL_AHEAD / 32) & ~(size_t)1;
    return (struct panel_fetch){q->w + p * q->panel_bytes + PANEL_AHEAD, q->panel_bytes, 64, turn,
                                (size_t)(P - 1) * q->panel_bytes};
}

/* M rows from r on against P panels from p on. Behind the last row it is taken again. */
INLINE void bf16_tile(const int M, const int P, const struct panels *q, size_t p,
                      const struct panel_rows *rows, size_t r, struct panel_fetch fetch,
                      const struct post *post)
{
    const float *x[BF16_M];
    float *out[BF16_M];
    vf even[BF16_M][4], odd[BF16_M][4], v[4]; /* M rows, P * PV vectors */
    size_t k = 0;
    UNROLL
    for (int m = 0; m < M; m++) {
        const size_t row = r + (size_t)m < rows->n ? r + (size_t)m : rows->n - 1;
        x[m] = (const float *)rows->x[row];
        out[m] = rows->out[row];
        UNROLL
        for (int j = 0; j < P * PV; j++)
            even[m][j] = odd[m][j] = v_zero();
    }
    for (size_t end = fetch.turn; k + 2 <= q->K; end = q->K, fetch.at += fetch.jump)
        for (; k + 2 <= end; k += 2, fetch.at += fetch.step) {
            const char *line = q->w + p * q->panel_bytes + k * 32;
            UNROLL
            for (int i = 0; i < P; i++)
                __builtin_prefetch(fetch.at + (size_t)i * fetch.apart);
            /* One half after the other: so the sums, half of the lines and an x fit into registers.
             */
            UNROLL
            for (int j = 0; j < P * PV; j++)
                v[j] = panel_even((const uint32_t *)(line + (size_t)(j / PV) * q->panel_bytes),
                                  j % PV);
            UNROLL
            for (int m = 0; m < M; m++)
                UNROLL
            for (int j = 0; j < P * PV; j++)
                even[m][j] = v_fma(v_set(x[m][k]), v[j], even[m][j]);
            UNROLL
            for (int j = 0; j < P * PV; j++)
                v[j] =
                    panel_odd((const uint32_t *)(line + (size_t)(j / PV) * q->panel_bytes), j % PV);
            UNROLL
            for (int m = 0; m < M; m++)
                UNROLL
            for (int j = 0; j < P * PV; j++)
                odd[m][j] = v_fma(v_set(x[m][k + 1]), v[j], odd[m][j]);
        }
    if (k < q->K)
        for (int j = 0; j < P * PV; j++) {
            const char *line = q->w + (p + (size_t)(j / PV)) * q->panel_bytes + k * 32;
            for (int m = 0; m < M; m++)
                even[m][j] =
                    v_fma(v_set(x[m][k]), panel_even((const uint32_t *)line, j % PV), even[m][j]);
        }
    UNROLL
    for (int m = 0; m < M; m++)
        UNROLL
    for (int i = 0; i < P; i++) {
        vf sum[PV];
        UNROLL
        for (int j = 0; j < PV; j++)
            sum[j] = v_add(even[m][i * PV + j], odd[m][i * PV + j]);
        panel_put(q, p + (size_t)i, out[m], sum, post);
    }
}

/* How many of `left` rows to take, so that few are taken twice. */
INLINE size_t bf16_height(const int P, size_t left)
{
    return BF16_M == 6 && P == 2 && (left <= 4 || left == 7 || left == 8) ? 4 : BF16_M;
}

/* All rows against P panels; compiled once for each P. */
INLINE void bf16_rows(const int P, const struct panels *q, size_t p, const struct panel_rows *rows,
                      const struct post *post)
{
    const size_t passes = (rows->n + BF16_M - 1) / BF16_M;
    /* The next panels, some of them in each pass, in one stream. */
    struct panel_fetch fetch = {q->w + (p + (size_t)P) * q->panel_bytes, passes > 1 ? 0 : 64,
                                (size_t)P * 64 / passes, 0, 0};
    for (size_t r = 0, m; r < rows->n; r += m, fetch.at += q->K / 2 * fetch.step) {
        m = bf16_height(P, rows->n - r);
#if BF16_M == 6
        if (m == 4)
            bf16_tile(4, P, q, p, rows, r, fetch, post);
        else
#endif
            bf16_tile(BF16_M, P, q, p, rows, r, fetch, post);
    }
}

/* M rows, which are all; returns the panels that are left. */
INLINE struct range bf16_few(const int M, const struct panels *q, const struct panel_rows *rows,
                             struct range panels, const struct post *post)
{
    for (; panels.first + BF16_P_FEW <= panels.end; panels.first += BF16_P_FEW)
        bf16_tile(M, BF16_P_FEW, q, panels.first, rows, 0, panel_ahead(q, panels.first, BF16_P_FEW),
                  post);
    return panels;
}

static __attribute__((unused)) void bf16_vectors(const struct panels *q,
                                                 const struct panel_rows *rows, struct range panels,
                                                 const struct post *post)
{
    if (rows->n == 1) {
        panels = bf16_few(1, q, rows, panels, post);
        for (; panels.first < panels.end; panels.first++)
            bf16_tile(1, 1, q, panels.first, rows, 0, panel_ahead(q, panels.first, 1), post);
        return;
    }
#if BF16_FEW == 3
    if (rows->n == 2)
        panels = bf16_few(2, q, rows, panels, post);
    else if (rows->n == 3)
        panels = bf16_few(3, q, rows, panels, post);
#endif
#if BF16_P > 1
    for (; panels.first + BF16_P <= panels.end; panels.first += BF16_P)
        bf16_rows(BF16_P, q, panels.first, rows, post);
#endif
    for (; panels.first < panels.end; panels.first++)
        bf16_rows(1, q, panels.first, rows, post);
}

/* ---- integers ---- */

/*
 * x as 16-bit pairs: of each four k, (0, 2) and (1, 3), which is how the bytes of a word of w fall
 * into even and odd ones. n is a multiple of 32, of `half` bytes a term.
 */
INLINE void int_pairs(const int8_t *x, size_t half, int terms, size_t n, int16_t *to)
{
    const uint8_t *low = (const uint8_t *)x + half;
    for (size_t k = 0; k < n; k += 4, to += 4) {
        for (int i = 0; i < 4; i++) {
            int at = (i & 1) * 2 + i / 2;
            to[at] = (int16_t)(terms == 2 ? x[k + (size_t)i] * 256 + low[k + (size_t)i]
                                          : x[k + (size_t)i]);
        }
    }
}

/* The codes of a line in 16-bit lanes, less their zero points: even bytes and odd ones. high: the
 * upper halves of the bytes. */
INLINE void int_codes(const char *line, const int v, const enum ember_quant quant, const int high,
                      vi zero, vi *ret_even, vi *ret_odd)
{
    vi w = vi_load(line + v * VL * 4);
    if (quant == EMBER_QUANT_INT8) {
        *ret_even = vi_sra16(vi_sll16(w, 8), 8);
        *ret_odd = vi_sra16(w, 8);
        return;
    }
    if (high)
        w = vi_srl16(w, 4);
    vi even = vi_and(w, vi_set16(15)), odd = vi_and(vi_srl16(w, 8), vi_set16(15));
    *ret_even = vi_sub16(even, zero);
    *ret_odd = vi_sub16(odd, zero);
}

/* Zero points of a group in 16-bit lanes, twice each. */
INLINE vi int_zero(const struct panels *q, size_t p, size_t g, const int v)
{
    int16_t z[2 * VL];
    for (int i = 0; i < 2 * VL; i++)
        z[i] = q->zero ? q->zero[(p * q->groups + g) * EMBER_PANEL + (size_t)(v * VL + i / 2)] : 8;
    return vi_load(z);
}

/* M rows, as pairs `pairs_step` elements apart, against panel p. */
INLINE void int_tile(const int M, const enum ember_quant quant, const struct panels *q, size_t p,
                     const int16_t *pairs, size_t pairs_step, const struct panel_rows *rows,
                     size_t r, const struct post *post)
{
    const int four = quant != EMBER_QUANT_INT8;
    const char *w = q->w + p * q->panel_bytes;
    vf acc[4][PV];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < PV; v++)
            acc[m][v] = v_zero();
    for (size_t s = 0, k = 0; k < q->K; s++) {
        const size_t g = k / q->group, end = q->K - k < q->segment ? q->K : k + q->segment;
        vi sum[4][PV], zero[PV];
        UNROLL
        for (int v = 0; v < PV; v++) {
            zero[v] = quant == EMBER_QUANT_INT4 ? int_zero(q, p, g, v) : vi_zero();
            UNROLL
            for (int m = 0; m < M; m++)
                sum[m][v] = vi_zero();
        }
        /* Steps of a line; of 4 bits, 32 of k are four lines, each twice. */
        for (size_t line = four ? k / 8 : k / 4, stop = four ? (end + 31) / 32 * 4 : (end + 3) / 4;
             line < stop; line++) {
            UNROLL
            for (int high = 0; high < 1 + four; high++) {
                const size_t at = four ? line / 4 * 8 + line % 4 + (size_t)high * 4 : line;
                UNROLL
                for (int v = 0; v < PV; v++) {
                    vi even, odd;
                    int_codes(w + line * EMBER_TILE_LINE, v, quant, high, zero[v], &even, &odd);
                    UNROLL
                    for (int m = 0; m < M; m++) {
                        const char *x = (const char *)(pairs + (size_t)m * pairs_step + at * 4);
                        sum[m][v] = vi_add(sum[m][v], vi_madd16(even, vi_set_at(x)));
                        sum[m][v] = vi_add(sum[m][v], vi_madd16(odd, vi_set_at(x + 4)));
                    }
                }
            }
        }
        UNROLL
        for (int v = 0; v < PV; v++) {
            vf scale = panel_scale(q, p, g, v);
            UNROLL
            for (int m = 0; m < M; m++)
                acc[m][v] =
                    v_add(acc[m][v], v_mul(v_from_int(sum[m][v]),
                                           v_mul(v_set(rows->scale[r + (size_t)m][s]), scale)));
        }
        k = end;
    }
    for (int m = 0; m < M; m++)
        panel_put(q, p, rows->out[r + (size_t)m], acc[m], post);
}

#define INT_PAIRS 131072 /* elements of x as pairs at a time: a quarter of a MiB */
_Static_assert(INT_PAIRS >= EMBER_INT8_K_MAX, "a row");

INLINE void int_vectors_of(const enum ember_quant quant, const struct panels *q,
                           const struct panel_rows *rows, struct range panels,
                           const struct post *post)
{
    _Alignas(64) int16_t pairs[INT_PAIRS];
    const size_t half = EMBER_X8_COLUMNS(q->K), most = INT_PAIRS / half;
    for (size_t r = 0, m; r < rows->n; r += m) {
        m = rows->n - r >= 4 && most >= 4 ? 4 : 1;
        for (size_t i = 0; i < m; i++)
            int_pairs((const int8_t *)rows->x[r + i], half, q->terms, half, pairs + i * half);
        for (size_t p = panels.first; p < panels.end; p++) {
            if (m == 4)
                int_tile(4, quant, q, p, pairs, half, rows, r, post);
            else
                int_tile(1, quant, q, p, pairs, half, rows, r, post);
        }
    }
}

static __attribute__((unused)) void int_vectors(enum ember_quant quant, const struct panels *q,
                                                const struct panel_rows *rows, struct range panels,
                                                const struct post *post)
{
    if (quant == EMBER_QUANT_INT4)
        int_vectors_of(EMBER_QUANT_INT4, q, rows, panels, post);
    else
        int_vectors_of(EMBER_QUANT_INT8, q, rows, panels, post);
}

#endif
