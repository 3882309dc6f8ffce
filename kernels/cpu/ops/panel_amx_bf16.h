/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16 by matrix tiles: x is the sum of two bf16, and each tile of w meets both, the upper term
 * first. The order of an output is that of TDPBF16PS over k in steps of 32, the same for any number
 * of rows; tiles are as high as there are rows, and one row goes by vectors, in the same order.
 */
#ifndef EMBER_KERNELS_CPU_PANEL_AMX_BF16_H
#define EMBER_KERNELS_CPU_PANEL_AMX_BF16_H

#include "kernels/cpu/ops/panel_amx.h"
#include "kernels/cpu/ops/x_tiles.h"

/* Where a weight's panels are that are multiplied at once: P, or of a gated one P / 2 of gate and
 * as many of up. */
INLINE void amx_bf16_panels(const int P, const struct panels *q, size_t p, const char *w[4])
{
    const int side_by_side = q->gate ? P / 2 : P;
    UNROLL
    for (int j = 0; j < P; j++)
        w[j] = q->w + (p + (size_t)(j % side_by_side) +
                       (size_t)(j / side_by_side) * (q->gate ? q->gate->panels : 0)) *
                          q->panel_bytes;
}

/* Sums of gate and up to row r of x of the next product, or to its floats. */
INLINE void amx_bf16_gated(const struct panels *q, size_t p, const struct panel_rows *rows,
                           size_t r, vf gate, vf up, const struct post *post)
{
    const size_t I = q->N / 2, n = p * EMBER_PANEL;
    const vf v = glu_value(post_value(gate, n, VL, post), post_value(up, I + n, VL, post),
                           q->gate->act, q->gate->limit, q->gate->alpha);
    if (rows->out_x) {
        size_t low;
        char *at = x_tiles_at(rows->out_x, I, rows->all, rows->first + r, n, &low);
        x_tiles_put(at, low, v, n, I);
        return;
    }
    v_store(rows->out[r] + n, v);
}

/* Rows r .. r + m - 1 <= r + 15 of P tiles of sums to where they belong. */
INLINE void amx_bf16_put(const int P, const struct panels *q, size_t p,
                         const struct panel_rows *rows, size_t r, size_t m, float (*sums)[256],
                         const struct post *post)
{
    for (size_t i = 0; i < m; i++) {
        if (q->gate) {
            UNROLL
            for (int j = 0; j < P / 2; j++)
                amx_bf16_gated(q, p + (size_t)j, rows, r + i, v_load(sums[j] + i * 16),
                               v_load(sums[P / 2 + j] + i * 16), post);
            continue;
        }
        UNROLL
        for (int j = 0; j < P; j++) {
            const vf v = v_load(sums[j] + i * 16);
            panel_line(q, p + (size_t)j, rows->out[r + i], &v, post, rows->stream);
        }
    }
}

/* ---- up to 16 rows ---- */

/* All m rows against P <= 4 panels, which are read once: fetched ahead. */
INLINE void amx_bf16_low(const int P, const struct panels *q, size_t p,
                         const struct panel_rows *rows, const struct post *post)
{
    _Alignas(64) float sums[4][256];
    const size_t steps = (q->K + 31) / 32, m = rows->n;
    const char *x = rows->tmp, *w[4];
    amx_bf16_panels(P, q, p, w);
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    for (size_t s = 0; s < steps; s++, x += m * 128) {
        const size_t at = s * 1024;
        UNROLL
        for (size_t line = 0; line < 1024; line += 64)
            UNROLL
        for (int j = 0; j < P; j++)
            __builtin_prefetch(w[j] + at + PANEL_AHEAD + line);
        AMX_LOAD(4, x, 64);
        AMX_LOAD(5, x + m * 64, 64);
        AMX_LOAD(6, w[0] + at, 64);
        AMX_BF16(0, 4, 6);
        AMX_BF16(0, 5, 6);
        if (P > 1) {
            AMX_LOAD(7, w[1] + at, 64);
            AMX_BF16(1, 4, 7);
            AMX_BF16(1, 5, 7);
        }
        if (P > 2) {
            AMX_LOAD(6, w[2] + at, 64);
            AMX_BF16(2, 4, 6);
            AMX_BF16(2, 5, 6);
        }
        if (P > 3) {
            AMX_LOAD(7, w[3] + at, 64);
            AMX_BF16(3, 4, 7);
            AMX_BF16(3, 5, 7);
        }
    }
    AMX_STORE(0, sums[0], 64);
    AMX_STORE(1, sums[1], 64);
    AMX_STORE(2, sums[2], 64);
    AMX_STORE(3, sums[3], 64);
    amx_bf16_put(P, q, p, rows, 0, m, sums, post);
}

INLINE void amx_bf16_few(const struct panels *q, const struct panel_rows *rows, struct range panels,
                         const struct post *post)
{
    size_t p = panels.first;
    amx_configure(rows->n, rows->n, 64);
    if (q->gate) {
        for (; p + 2 <= panels.end; p += 2)
            amx_bf16_low(4, q, p, rows, post);
        if (p < panels.end)
            amx_bf16_low(2, q, p, rows, post);
        return;
    }
    for (; p + 4 <= panels.end; p += 4)
        amx_bf16_low(4, q, p, rows, post);
    for (; p + 2 <= panels.end; p += 2)
        amx_bf16_low(2, q, p, rows, post);
    if (p < panels.end)
        amx_bf16_low(1, q, p, rows, post);
}

/* ---- more ---- */

#define AMX_X_BYTES_MOST 1048576u /* of x at a time: half the second-level cache */
#define AMX_SUMS_MOST 65536       /* floats, which stay there too */

/* Some steps of a pair of panels, or of one, and what is fetched meanwhile: in each step `lines`
 * lines of two others from `at` on. */
struct amx_steps {
    const char *w[4], *next[4];
    size_t first, end, at, lines;
};

INLINE void amx_bf16_fetch(const struct amx_steps *a, size_t s)
{
    for (size_t i = 0; i < a->lines; i++) {
        __builtin_prefetch(a->next[0] + s * 1024 + a->at + i * 64, 0, 2);
        __builtin_prefetch(a->next[1] + s * 1024 + a->at + i * 64, 0, 2);
    }
}

/* Steps of 16 rows and m more against P <= 2 panels, onto `sums`, which step 0 clears. */
INLINE void amx_bf16_high(const int P, const struct amx_steps *a, const char *x, size_t steps,
                          size_t m, float (*sums)[256])
{
    const char *y = x + steps * 2048 + a->first * m * 128; /* the second sixteen */
    const char *w0 = a->w[0], *w1 = a->w[P > 1];
    x += a->first * 2048;
    if (a->first) {
        AMX_LOAD(0, sums[0], 64);
        AMX_LOAD(1, sums[1], 64);
        AMX_LOAD(2, sums[2], 64);
        AMX_LOAD(3, sums[3], 64);
    } else {
        AMX_ZERO(0);
        AMX_ZERO(1);
        AMX_ZERO(2);
        AMX_ZERO(3);
    }
    for (size_t s = a->first; s < a->end; s++, x += 2048, y += m * 128) {
        amx_bf16_fetch(a, s);
        AMX_LOAD(4, x, 64);
        AMX_LOAD(6, w0 + s * 1024, 64);
        AMX_BF16(0, 4, 6);
        AMX_LOAD(5, y, 64);
        AMX_BF16(2, 5, 6);
        if (P > 1) {
            AMX_LOAD(7, w1 + s * 1024, 64);
            AMX_BF16(1, 4, 7);
            AMX_BF16(3, 5, 7);
        }
        AMX_LOAD(4, x + 1024, 64);
        AMX_BF16(0, 4, 6);
        AMX_LOAD(5, y + m * 64, 64);
        AMX_BF16(2, 5, 6);
        if (P > 1) {
            AMX_BF16(1, 4, 7);
            AMX_BF16(3, 5, 7);
        }
    }
    AMX_STORE(0, sums[0], 64);
    AMX_STORE(1, sums[1], 64);
    AMX_STORE(2, sums[2], 64);
    AMX_STORE(3, sums[3], 64);
}

/* The same of m rows alone. */
INLINE void amx_bf16_last(const int P, const struct amx_steps *a, const char *x, size_t m,
                          float (*sums)[256])
{
    const char *w0 = a->w[0], *w1 = a->w[P > 1];
    x += a->first * m * 128;
    if (a->first) {
        AMX_LOAD(0, sums[0], 64);
        AMX_LOAD(1, sums[1], 64);
    } else {
        AMX_ZERO(0);
        AMX_ZERO(1);
    }
    for (size_t s = a->first; s < a->end; s++, x += m * 128) {
        amx_bf16_fetch(a, s);
        AMX_LOAD(4, x, 64);
        AMX_LOAD(5, x + m * 64, 64);
        AMX_LOAD(6, w0 + s * 1024, 64);
        AMX_BF16(0, 4, 6);
        AMX_BF16(0, 5, 6);
        if (P > 1) {
            AMX_LOAD(7, w1 + s * 1024, 64);
            AMX_BF16(1, 4, 7);
            AMX_BF16(1, 5, 7);
        }
    }
    AMX_STORE(0, sums[0], 64);
    AMX_STORE(1, sums[1], 64);
}

/* All rows, in groups of 32, against some steps of P <= 2 panels; `sums` a group's four tiles, or,
 * when there are steps left for later, all groups'. */
INLINE void amx_bf16_pair(const int P, const struct panels *q, size_t p, struct amx_steps *a,
                          const struct panel_rows *rows, float (*sums)[256],
                          const struct post *post)
{
    const size_t steps = (q->K + 31) / 32, groups = (rows->n + 31) / 32;
    const size_t each = (16 + groups - 1) / groups; /* lines of a step that a group fetches */
    const int whole = a->first == 0 && a->end == steps;
    size_t shape = 0;
    amx_bf16_panels(P, q, p, a->w);
    amx_bf16_panels(P, q, p + (q->gate ? 1 : 2), a->next);
    a->next[1] = a->next[P > 1];
    for (size_t g = 0; g < groups; g++) {
        const size_t left = rows->n - g * 32, m = left < 32 ? left : 32;
        const char *x = rows->tmp + g * 32 * steps * 128;
        if (m != shape)
            amx_configure(m > 16 ? 16 : m, m > 16 ? m - 16 : m, 64);
        shape = m;
        a->at = g * each * 64;
        a->lines = g * each >= 16 ? 0 : g * each + each > 16 ? 16 - g * each : each;
        if (m > 16)
            amx_bf16_high(P, a, x, steps, m - 16, sums);
        else
            amx_bf16_last(P, a, x, m, sums);
        if (a->end == steps) {
            amx_bf16_put(P, q, p, rows, g * 32, m > 16 ? 16 : m, sums, post);
            if (m > 16)
                amx_bf16_put(P, q, p, rows, g * 32 + 16, m - 16, sums + 2, post);
        }
        if (!whole)
            sums += 4;
    }
}

/*
 * x is read again for each pair of panels: where all of it does not stay in cache, some of k at a
 * time, for as many panels as there is room for sums.
 */
INLINE void amx_bf16_many(const struct panels *q, const struct panel_rows *rows,
                          struct range panels, const struct post *post)
{
    _Alignas(64) float sums[AMX_SUMS_MOST / 256][256];
    const size_t steps = (q->K + 31) / 32, groups = (rows->n + 31) / 32;
    const size_t fit = AMX_X_BYTES_MOST / (groups * 32 * 128), pair = q->gate ? 1 : 2;
    const size_t chunk = steps <= fit ? steps : fit;
    const size_t pairs = steps <= fit ? panels.end : AMX_SUMS_MOST / 1024 / groups * pair;
    for (size_t first = panels.first, end; first < panels.end; first = end) {
        end = panels.end - first < pairs ? panels.end : first + pairs;
        for (size_t s = 0; s < steps; s += chunk) {
            struct amx_steps a = {.first = s, .end = steps - s < chunk ? steps : s + chunk};
            float(*at)[256] = sums;
            for (size_t p = first; p < end; p += pair) {
                if (q->gate || p + 1 < end)
                    amx_bf16_pair(2, q, p, &a, rows, at, post);
                else
                    amx_bf16_pair(1, q, p, &a, rows, at, post);
                at += chunk < steps ? groups * 4 : 0;
            }
        }
    }
}

/* ---- one row ---- */

/*
 * One row against P panels by vectors, from the floats, to the bits of TDPBF16PS: of each 32 of k
 * even and odd ones are summed apart from zero by FMAs, and their sum is added; subnormals are
 * zeros. A tile of one row would be as quick out of the caches, but fewer reads of memory are under
 * way then.
 */
INLINE void amx_bf16_one(const int P, const struct panels *q, size_t p,
                         const struct panel_rows *rows, const struct post *post)
{
    const float *x = (const float *)rows->x[0];
    const char *w[4];
    const unsigned before = _mm_getcsr();
    vf acc[4];
    amx_bf16_panels(P, q, p, w);
    _mm_setcsr(before | 0x8040); /* subnormals are zeros */
    UNROLL
    for (int j = 0; j < P; j++)
        acc[j] = v_zero();
    for (size_t k = 0; k < q->K; k += 32) {
        _Alignas(64) float high[32], low[32];
        vf sum[4][4]; /* of upper terms even and odd k, of lower ones even and odd k */
        UNROLL
        for (size_t j = 0; j < 32; j += 16) {
            __m256i h = _mm256_setzero_si256(), l = h;
            if (k + j < q->K)
                amx_split(v_get(x + k + j, V_LEFT(k + j, q->K)), &h, &l);
            v_store(high + j, amx_float(h));
            v_store(low + j, amx_float(l));
        }
        UNROLL
        for (int j = 0; j < P; j++)
            sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = v_zero();
        UNROLL
        for (size_t i = 0; i < 16; i++) {
            UNROLL
            for (int j = 0; j < P; j++) {
                const char *at = w[j] + k * 32 + i * 64;
                __builtin_prefetch(at + PANEL_AHEAD);
                vf even = panel_even((const uint32_t *)at, 0);
                vf odd = panel_odd((const uint32_t *)at, 0);
                sum[j][0] = v_fma(v_set(high[2 * i]), even, sum[j][0]);
                sum[j][1] = v_fma(v_set(high[2 * i + 1]), odd, sum[j][1]);
                sum[j][2] = v_fma(v_set(low[2 * i]), even, sum[j][2]);
                sum[j][3] = v_fma(v_set(low[2 * i + 1]), odd, sum[j][3]);
            }
        }
        UNROLL
        for (int j = 0; j < P; j++)
            acc[j] = v_add(v_add(acc[j], v_add(sum[j][0], sum[j][1])), v_add(sum[j][2], sum[j][3]));
    }
    UNROLL
    for (int j = 0; j < P; j++)
        __asm__ volatile("" : "+v"(acc[j])); /* computed before, */
    _mm_setcsr(before);
    UNROLL
    for (int j = 0; j < P; j++)
        __asm__ volatile("" : "+v"(acc[j])); /* and put after */
    if (q->gate) {
        UNROLL
        for (int j = 0; j < P / 2; j++)
            amx_bf16_gated(q, p + (size_t)j, rows, 0, acc[j], acc[P / 2 + j], post);
        return;
    }
    UNROLL
    for (int j = 0; j < P; j++)
        panel_put(q, p + (size_t)j, rows->out[0], &acc[j], post);
}

INLINE void amx_bf16_row(const struct panels *q, const struct panel_rows *rows, struct range panels,
                         const struct post *post)
{
    const size_t most = q->gate ? 2 : 4;
    size_t p = panels.first;
    for (; p + most <= panels.end; p += most)
        amx_bf16_one(4, q, p, rows, post);
    for (; p < panels.end; p++) {
        if (q->gate)
            amx_bf16_one(2, q, p, rows, post);
        else
            amx_bf16_one(1, q, p, rows, post);
    }
}

/* n <= BF16_ROWS rows. Panels of a gated weight are those of gate. */
static __attribute__((unused)) void bf16_amx(const struct panels *q, const struct panel_rows *rows,
                                             struct range panels, const struct post *post)
{
    if (rows->n == 1 && rows->x[0]) {
        amx_bf16_row(q, rows, panels, post);
        return;
    }
    if (rows->n <= 16)
        amx_bf16_few(q, rows, panels, post);
    else
        amx_bf16_many(q, rows, panels, post);
    amx_release();
    if (rows->stream)
        _mm_sfence();
}

#endif
