/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products with weights in tiles (ember/op.h, layout TILES): what every body of them shares, and
 * the body of bf16 by vectors. panel_int.h, panel_fp.h and panel_amx_*.h have the others.
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

/* The same of a row that is one of many. stream: past the caches, in whole lines. */
INLINE void panel_line(const struct panels *q, size_t p, float *out, const vf *v,
                       const struct post *post, const int stream)
{
    const size_t n = p * EMBER_PANEL;
    if (!stream || q->N - n < EMBER_PANEL) {
        panel_put(q, p, out, v, post);
        return;
    }
    UNROLL
    for (int j = 0; j < PV; j++)
        v_stream(out + n + j * VL, post_value(v[j], n + (size_t)j * VL, VL, post));
}

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

#endif
