/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products by matrix tiles. A tile of w is 16 lines of a panel, read as they are, or written out
 * from 4 bits; a tile of x is 16 rows of 64 bytes.
 *
 * bf16: x is the sum of two bf16, and each tile of w meets both, the upper term first. The order of
 * an output is that of TDPBF16PS over k in steps of 32, the same for any number of rows; tiles are
 * as high as there are rows, and one row goes by vectors, in the same order.
 *
 * Integers are exact, so few rows go by VPDPBUSD.
 */
#ifndef EMBER_KERNELS_CPU_PANEL_AMX_H
#define EMBER_KERNELS_CPU_PANEL_AMX_H

#include "kernels/cpu/ops/panel_vnni.h"

/*
 * What LDTILECFG reads. The compiler's own functions say less than what their instructions read (8
 * bytes of this; of a tile nothing), so these say all.
 */
struct amx_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
#define AMX_LOAD(tile, at, stride)                                                                 \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(at), "r"((long)(stride)) : "memory")
#define AMX_STORE(tile, to, stride)                                                                \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((long)(stride))         \
                     : "memory")
#define AMX_ZERO(tile) __asm__ volatile("tilezero %tmm" #tile)
#define AMX_BF16(c, a, b) __asm__ volatile("tdpbf16ps %tmm" #b ", %tmm" #a ", %tmm" #c)
#define AMX_INT8(c, a, b) __asm__ volatile("tdpbssd %tmm" #b ", %tmm" #a ", %tmm" #c)
#define AMX_UINT8(c, a, b) __asm__ volatile("tdpbusd %tmm" #b ", %tmm" #a ", %tmm" #c)

/* Tiles 0 and 1 are sums of rows0 rows, 2 and 3 of rows1; 4 and 5 x of those; 6 and 7 w. `bytes` of
 * k a step. */
INLINE void amx_configure(size_t rows0, size_t rows1, size_t bytes)
{
    struct amx_config config = {.palette = 1};
    const size_t rows[8] = {rows0, rows0, rows1, rows1, rows0, rows1, bytes / 4, bytes / 4};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = (uint8_t)rows[i];
        config.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? bytes : 64);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}
INLINE void amx_release(void)
{
    __asm__ volatile("tilerelease");
}

/* ---- bf16 ---- */

INLINE vf amx_float(__m256i bf16)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

/* Two bf16 whose sum is x but for 2^-17 of it. */
INLINE void amx_split(vf x, __m256i *ret_high, __m256i *ret_low)
{
    __m256i high = (__m256i)_mm512_cvtneps_pbh(x);
    vf back = amx_float(high);
    *ret_high = high;
    *ret_low = (__m256i)_mm512_cvtneps_pbh(v_sub(x, back));
}

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

/* ---- integers ---- */

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
