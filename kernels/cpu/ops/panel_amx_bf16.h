/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16 by matrix tiles: x is the sum of two bf16, and each tile of w meets both, the upper term
 * first. The order of an output is that of TDPBF16PS over k in steps of 32, the same for any number
 * of rows; tiles are as high as there are rows, and one row goes by vectors, in the same order.
 */
#ifndef EMBER_KERNELS_CPU_PANEL_AMX_BF16_H
#define EMBER_KERNELS_CPU_PANEL_AMX_BF16_H

#include "kernels/cpu/ops/panel_amx.h"

/* m <= 16 rows of K floats as tiles: of each 32 of k m rows of upper terms, then m of lower ones.
 */
INLINE void bf16_pack(const char *const *x, size_t m, size_t K, char *to)
{
    for (size_t i = 0; i < m; i++) {
        const float *row = (const float *)x[i];
        char *at = to + i * 64;
        for (size_t k = 0; k < K; k += 32, at += m * 128)
            for (size_t j = 0; j < 32; j += 16) {
                __m256i high = _mm256_setzero_si256(), low = high;
                if (k + j < K)
                    amx_split(v_get(row + k + j, V_LEFT(k + j, K)), &high, &low);
                _mm256_storeu_si256((void *)(at + j * 2), high);
                _mm256_storeu_si256((void *)(at + m * 64 + j * 2), low);
            }
    }
}

/* m rows of a tile of sums in memory to their places. */
INLINE void amx_put(const struct panels *q, size_t p, const float *sums, size_t m,
                    float *const *out, const struct post *post)
{
    for (size_t i = 0; i < m; i++) {
        vf v = v_load(sums + i * 16);
        panel_put(q, p, out[i], &v, post);
    }
}

/* Up to 16 rows against P <= 4 panels. */
INLINE void amx_bf16_low(const int P, const struct panels *q, size_t p, const char *x, size_t m,
                         float *const *out, const struct post *post)
{
    _Alignas(64) float sums[4][256];
    const char *w0 = q->w + p * q->panel_bytes, *w1 = w0 + q->panel_bytes * (P > 1);
    const char *w2 = w1 + q->panel_bytes * (P > 2), *w3 = w2 + q->panel_bytes * (P > 3);
    const size_t steps = (q->K + 31) / 32;
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    for (size_t s = 0; s < steps; s++, x += m * 128) {
        const size_t at = s * 1024;
        UNROLL
        for (size_t line = 0; line < 1024; line += 64) {
            __builtin_prefetch(w0 + at + PANEL_AHEAD + line);
            if (P > 1)
                __builtin_prefetch(w1 + at + PANEL_AHEAD + line);
            if (P > 2)
                __builtin_prefetch(w2 + at + PANEL_AHEAD + line);
            if (P > 3)
                __builtin_prefetch(w3 + at + PANEL_AHEAD + line);
        }
        AMX_LOAD(4, x, 64);
        AMX_LOAD(5, x + m * 64, 64);
        AMX_LOAD(6, w0 + at, 64);
        AMX_BF16(0, 4, 6);
        AMX_BF16(0, 5, 6);
        if (P > 1) {
            AMX_LOAD(7, w1 + at, 64);
            AMX_BF16(1, 4, 7);
            AMX_BF16(1, 5, 7);
        }
        if (P > 2) {
            AMX_LOAD(6, w2 + at, 64);
            AMX_BF16(2, 4, 6);
            AMX_BF16(2, 5, 6);
        }
        if (P > 3) {
            AMX_LOAD(7, w3 + at, 64);
            AMX_BF16(3, 4, 7);
            AMX_BF16(3, 5, 7);
        }
    }
    AMX_STORE(0, sums[0], 64);
    AMX_STORE(1, sums[1], 64);
    AMX_STORE(2, sums[2], 64);
    AMX_STORE(3, sums[3], 64);
    UNROLL
    for (int j = 0; j < P; j++)
        amx_put(q, p + (size_t)j, sums[j], m, out, post);
}

#define AMX_BF16_STEPS 32      /* of 32 k at a time, for all rows */
#define AMX_BF16_BYTES 786432u /* of x at a time, which stay in the second-level cache */

/*
 * Steps first .. end - 1 of 16 rows and m more against P <= 2 panels, onto `sums`, which step 0
 * clears. Meanwhile the lines of `out` are fetched, and `fetch` bytes a step from `next` on.
 */
INLINE void amx_bf16_high(const int P, const struct panels *q, size_t p, const char *x, size_t m,
                          size_t first, size_t end, float (*sums)[256], float *const *out,
                          const char *next, size_t fetch)
{
    const char *w0 = q->w + p * q->panel_bytes, *w1 = w0 + q->panel_bytes * (P > 1);
    const char *y = x + (q->K + 31) / 32 * 2048 + first * m * 128; /* the second sixteen */
    x += first * 2048;
    if (first) {
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
    for (size_t s = first; s < end; s++, x += 2048, y += m * 128) {
        for (size_t at = 0; at < fetch; at += 64)
            __builtin_prefetch(next + s * 2048 + at, 0, 2);
        if (s < 16 + m) {
            __builtin_prefetch(out[s] + p * EMBER_PANEL, 1);
            if (P > 1)
                __builtin_prefetch(out[s] + (p + 1) * EMBER_PANEL, 1);
        }
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

/* n rows, of whose last 32 there are more than 16, against P <= 2 panels, while the next two
 * panels are fetched. */
INLINE void amx_bf16_rows(const int P, const struct panels *q, size_t p, const char *x, size_t n,
                          float *const *out, const struct post *post)
{
    _Alignas(64) float sums[PANEL_ROWS / 32][4][256];
    const size_t row_bytes = EMBER_X_TMP_BYTES(q->K), steps = (q->K + 31) / 32;
    const size_t groups = (n + 31) / 32, fetch = 2048 / groups;
    const char *next = q->w + (p + 2) * q->panel_bytes;
    size_t shape = 0;
    for (size_t s = 0, end; s < steps; s = end) {
        end = steps - s < AMX_BF16_STEPS ? steps : s + AMX_BF16_STEPS;
        for (size_t g = 0; g < groups; g++) {
            const size_t m = n - g * 32 < 32 ? n - g * 32 - 16 : 16;
            if (m != shape)
                amx_configure(16, m, 64);
            shape = m;
            amx_bf16_high(P, q, p, x + g * 32 * row_bytes, m, s, end, sums[g], out + g * 32,
                          next + g * fetch, fetch);
        }
    }
    for (size_t i = 0; i < n; i++) {
        UNROLL
        for (int j = 0; j < P; j++) {
            vf v = v_load(sums[i / 32][i % 32 / 16 * 2 + (size_t)j] + i % 16 * 16);
            panel_put(q, p + (size_t)j, out[i], &v, post);
        }
    }
}

/*
 * One row against P panels by vectors, from the floats, to the bits of TDPBF16PS: of each 32 of k
 * even and odd ones are summed apart from zero by FMAs, and their sum is added; subnormals are
 * zeros. A tile of one row would be as quick out of the caches, but fewer reads of memory are under
 * way then.
 */
INLINE void amx_bf16_one(const int P, const struct panels *q, size_t p, const float *x, float *out,
                         const struct post *post)
{
    const char *w = q->w + p * q->panel_bytes;
    const unsigned before = _mm_getcsr();
    vf acc[4];
    _mm_setcsr(before | 0x8040); /* subnormals are zeros */
    UNROLL
    for (int j = 0; j < P; j++)
        acc[j] = v_zero();
    for (size_t k = 0; k < q->K; k += 32, w += 1024) {
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
                const char *at = w + (size_t)j * q->panel_bytes + i * 64;
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
    for (int j = 0; j < P; j++) {
        __asm__ volatile("" : "+v"(acc[j])); /* and put after */
        panel_put(q, p + (size_t)j, out, &acc[j], post);
    }
}

INLINE void bf16_amx_row(const struct panels *q, const struct panel_rows *rows, struct range panels,
                         const struct post *post)
{
    const float *x = (const float *)rows->x[0];
    size_t p = panels.first;
    for (; p + 4 <= panels.end; p += 4)
        amx_bf16_one(4, q, p, x, rows->out[0], post);
    for (; p < panels.end; p++)
        amx_bf16_one(1, q, p, x, rows->out[0], post);
}

/* n rows whose terms are at x. */
INLINE void amx_bf16_part(const struct panels *q, const char *x, size_t n, float *const *out,
                          struct range panels, const struct post *post)
{
    const size_t left = n % 32 > 16 ? 0 : n % 32, high = n - left;
    const char *y = x + high * EMBER_X_TMP_BYTES(q->K);
    for (size_t p = panels.first, m; p < panels.end; p += m) {
        const size_t most = high ? 2 : 4;
        m = panels.end - p < most ? panels.end - p : most;
        if (high && m == 2)
            amx_bf16_rows(2, q, p, x, high, out, post);
        else if (high)
            amx_bf16_rows(1, q, p, x, high, out, post);
        if (!left)
            continue;
        amx_configure(left, left, 64);
        if (m == 4)
            amx_bf16_low(4, q, p, y, left, out + high, post);
        else if (m == 3)
            amx_bf16_low(3, q, p, y, left, out + high, post);
        else if (m == 2)
            amx_bf16_low(2, q, p, y, left, out + high, post);
        else
            amx_bf16_low(1, q, p, y, left, out + high, post);
    }
}

static __attribute__((unused)) void bf16_amx(const struct panels *q, const struct panel_rows *rows,
                                             struct range panels, const struct post *post)
{
    const size_t row_bytes = EMBER_X_TMP_BYTES(q->K), fit = AMX_BF16_BYTES / row_bytes / 32 * 32;
    const size_t most = fit > 32 ? fit : 32;
    if (rows->n == 1) {
        bf16_amx_row(q, rows, panels, post);
        return;
    }
    for (size_t r = 0, n; r < rows->n; r += n) {
        n = rows->n - r < most ? rows->n - r : most;
        amx_bf16_part(q, rows->tmp + r * row_bytes, n, rows->out + r, panels, post);
    }
    amx_release();
}

#endif
