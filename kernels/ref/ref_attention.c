/* SPDX-License-Identifier: Apache-2.0 */
/* Reference: rope_table, split_norm_rope, attention. */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "kernels/ref/private.h"

static float inv_freq_at(const struct ref *r, uint32_t row, uint32_t j, uint32_t half)
{
    const double *f = r->op->f;
    double n = ((const int32_t *)ref_base(r, ROPE_LEN))[row], longest = f[ROPE_F_MAX_POSITION];
    if (r->op->i[ROPE_I_KIND] != EMBER_ROPE_DYNAMIC_NTK || n <= longest)
        return ((const float *)ref_base(r, ROPE_INV_FREQ))[j];
    double dim = 2.0 * half;
    double base = f[ROPE_F_THETA] *
                  pow(f[ROPE_F_FACTOR] * n / longest - (f[ROPE_F_FACTOR] - 1), dim / (dim - 2));
    return (float)pow(base, -2.0 * j / dim);
}

/* positions, len i32 [T], inv_freq f32 [half] -> out [T, 2 half] */
void ref_rope_table(const struct ref *r)
{
    const int32_t *positions = ref_base(r, ROPE_POSITIONS);
    uint32_t half = r->op->t[ROPE_INV_FREQ].dim[0];
    for (uint32_t row = 0; row < r->rows; row++) {
        float *out = ref_row(r, ROPE_OUT, row);
        for (uint32_t j = 0; j < half; j++) {
            float angle = (float)positions[row] * inv_freq_at(r, row, j, half);
            out[j] = (float)(r->op->f[ROPE_F_ATTENTION_FACTOR] * (double)(float)cos((double)angle));
            out[half + j] =
                (float)(r->op->f[ROPE_F_ATTENTION_FACTOR] * (double)(float)sin((double)angle));
        }
    }
}

static void rotate(double *x, const float *rope, int64_t rotary, bool interleaved)
{
    int64_t half = rotary / 2;
    for (int64_t j = 0; rope && j < half; j++) {
        int64_t a = interleaved ? 2 * j : j;
        int64_t b = interleaved ? 2 * j + 1 : j + half;
        double xa = x[a], xb = x[b];
        x[a] = xa * rope[j] - xb * rope[half + j];
        x[b] = xb * rope[j] + xa * rope[half + j];
    }
}

/* x [n] in place; the op's eps and what is added to its weights */
static void rms_norm(const struct ref *r, uint32_t norm, double eps, double bias, double *x,
                     int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    double scale = 1 / sqrt(sum / (double)n + eps);
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] * scale * (ref_weight(r, norm, 0, (uint64_t)i, 1 - bias) + bias);
}

static void norm_side(const struct ref *r, uint32_t norm, double *x, int64_t heads)
{
    const double eps = r->op->f[SNR_F_EPS], bias = r->op->f[SNR_F_W_BIAS];
    int64_t dk = r->op->i[SNR_I_DK];
    if (r->op->i[SNR_I_NORM] == EMBER_QK_NORM_ROW)
        rms_norm(r, norm, eps, bias, x, heads * dk);
    for (int64_t h = 0; r->op->i[SNR_I_NORM] == EMBER_QK_NORM_HEAD && h < heads; h++)
        rms_norm(r, norm, eps, bias, x + h * dk, dk);
}

/* from [heads, dk] -> x [heads, dk], normalised and rotated */
static void side(const struct ref *r, uint32_t norm, const float *from, double *x, int64_t heads,
                 const float *rope)
{
    int64_t dk = r->op->i[SNR_I_DK];
    for (int64_t i = 0; i < heads * dk; i++)
        x[i] = from[i];
    if (!r->op->i[SNR_I_NORM_AFTER])
        norm_side(r, norm, x, heads);
    for (int64_t h = 0; h < heads; h++)
        rotate(x + h * dk, rope, r->op->i[SNR_I_ROTARY], r->op->i[SNR_I_INTERLEAVED]);
    if (r->op->i[SNR_I_NORM_AFTER])
        norm_side(r, norm, x, heads);
}

/* The scales of an int8 block of n rows of d codes. */
static float *scales(const void *block, int64_t n, int64_t d)
{
    return (float *)((char *)block + (n * d + 3) / 4 * 4);
}

/* Row `at` of the n of a K or V block: d elements of x, as the block keeps them. */
static void keep(enum ember_dtype dtype, void *block, int64_t n, int64_t at, const double *x,
                 int64_t d)
{
    double most = 0, sum = 0;
    for (int64_t i = 0; i < d; i++) {
        float value = (float)x[i];
        if (dtype == EMBER_F32)
            ((float *)block)[at * d + i] = value;
        else if (dtype == EMBER_BF16)
            ((uint16_t *)block)[at * d + i] = ref_to_bf16(value);
        else if (dtype == EMBER_F16)
            ((uint16_t *)block)[at * d + i] = ref_to_f16(value);
        most = fmax(most, fabs(value));
        sum += value - value; /* NaN when one is not finite */
    }
    if (dtype != EMBER_I8)
        return;
    float scale = sum == 0 ? (float)most / 127.0f : NAN;
    scales(block, n, d)[at] = scale;
    for (int64_t i = 0; i < d; i++)
        ((int8_t *)block)[at * d + i] =
            scale > 0 ? (int8_t)fmin(127, fmax(-127, rint((double)((float)x[i] / scale)))) : 0;
}

/* qkv [T, Hq dk + Hkv dk + Hkv dv] -> q [T, Hq dk], K page [Hkv, page_size, dk], V page [Hkv,
 * page_size, dv] */
void ref_split_norm_rope(const struct ref *r)
{
    const int64_t *i = r->op->i;
    int64_t hq = i[SNR_I_Q_HEADS], hkv = i[SNR_I_KV_HEADS], dk = i[SNR_I_DK], dv = i[SNR_I_DV];
    double *x = calloc((size_t)(hq > hkv ? hq : hkv) * (size_t)dk + (size_t)dv, sizeof(*x));
    if (!x)
        abort();
    for (uint32_t row = 0; row < r->rows; row++) {
        const float *qkv = ref_row(r, SNR_QKV, row),
                    *rope = i[SNR_I_ROTARY] ? ref_row(r, SNR_ROPE, row) : NULL;
        int64_t kv_slot = ((const int32_t *)ref_base(r, SNR_KV_SLOT))[row];
        int64_t page = kv_slot / i[SNR_I_PAGE_SIZE], slot = kv_slot % i[SNR_I_PAGE_SIZE];
        float *q = ref_row(r, SNR_Q, row);
        void *k = ref_row(r, SNR_K, (uint64_t)page), *v = ref_row(r, SNR_V, (uint64_t)page);
        side(r, SNR_Q_NORM, qkv, x, hq, rope);
        for (int64_t j = 0; j < hq * dk; j++)
            q[j] = (float)x[j];
        side(r, SNR_K_NORM, qkv + hq * dk, x, hkv, rope);
        int64_t size = i[SNR_I_PAGE_SIZE];
        for (int64_t h = 0; h < hkv; h++)
            keep(r->op->t[SNR_K].dtype, k, hkv * size, h * size + slot, x + h * dk, dk);
        for (int64_t h = 0; h < hkv; h++) {
            for (int64_t j = 0; j < dv; j++)
                x[j] = r->op->f[SNR_F_V_SCALE] * qkv[(hq + hkv) * dk + h * dv + j];
            keep(r->op->t[SNR_V].dtype, v, hkv * size, h * size + slot, x, dv);
        }
    }
    free(x);
}

/* q [T, Hq (nope + rotary)], kv [T, rank + rotary] -> the rotated parts of out [T, Hq (rank +
 * rotary)], K page [page_size, rank + rotary], V page [page_size, rank] */
void ref_split_latent(const struct ref *r)
{
    const int64_t *i = r->op->i;
    int64_t nope = i[SPLIT_I_NOPE], rotary = i[SPLIT_I_ROTARY], rank = i[SPLIT_I_RANK];
    double *x = calloc((size_t)(rank + rotary), sizeof(*x));
    if (!x)
        abort();
    for (uint32_t row = 0; row < r->rows; row++) {
        const float *q = ref_row(r, SPLIT_Q, row), *kv = ref_row(r, SPLIT_KV, row),
                    *rope = ref_row(r, SPLIT_ROPE, row);
        float *out = ref_row(r, SPLIT_OUT, row);
        int64_t size = i[SPLIT_I_PAGE_SIZE],
                kv_slot = ((const int32_t *)ref_base(r, SPLIT_KV_SLOT))[row];
        uint64_t page = (uint64_t)(kv_slot / size);
        for (int64_t h = 0; h < i[SPLIT_I_HEADS]; h++) {
            for (int64_t j = 0; j < rotary; j++)
                x[j] = q[h * (nope + rotary) + nope + j];
            rotate(x, rope, rotary, i[SPLIT_I_INTERLEAVED]);
            for (int64_t j = 0; j < rotary; j++)
                out[h * (rank + rotary) + rank + j] = (float)x[j];
        }
        for (int64_t j = 0; j < rank + rotary; j++)
            x[j] = kv[j];
        rms_norm(r, SPLIT_NORM, r->op->f[SPLIT_F_EPS], r->op->f[SPLIT_F_W_BIAS], x, rank);
        rotate(x + rank, rope, rotary, i[SPLIT_I_INTERLEAVED]);
        keep(r->op->t[SPLIT_K].dtype, ref_row(r, SPLIT_K, page), size, kv_slot % size, x,
             rank + rotary);
        keep(r->op->t[SPLIT_V].dtype, ref_row(r, SPLIT_V, page), size, kv_slot % size, x, rank);
    }
    free(x);
}

/* Element e of key j of KV head g in K or V pages of rows of d. */
static double key_at(const struct ref *r, uint32_t operand, uint32_t seq, int64_t g, int64_t j,
                     int64_t d, int64_t e)
{
    int64_t page_size = r->op->i[ATTN_I_PAGE_SIZE];
    int32_t page = ((const int32_t *)ref_row(r, ATTN_PAGES, seq))[j / page_size];
    const void *block = ref_row(r, operand, (uint64_t)page);
    int64_t at = g * page_size + j % page_size;
    if (r->op->t[operand].dtype == EMBER_I8)
        return (double)((const int8_t *)block)[at * d + e] *
               scales(block, r->op->i[ATTN_I_KV_HEADS] * page_size, d)[at];
    return ref_load(block, (uint64_t)(at * d + e), r->op->t[operand].dtype);
}

/* One query head: q [dk] against keys first..last -> out [dv]; p has room for a double a key */
static void head(const struct ref *r, const float *q, float *out, uint32_t seq, int64_t h,
                 int64_t first, int64_t last, double *p)
{
    const int64_t *i = r->op->i;
    int64_t g = h / (i[ATTN_I_Q_HEADS] / i[ATTN_I_KV_HEADS]);
    double sink = ref_weight(r, ATTN_SINKS, 0, (uint64_t)h, -INFINITY), top = sink;
    for (int64_t j = first; j <= last; j++) {
        double sum = 0;
        for (int64_t d = 0; d < i[ATTN_I_DK]; d++)
            sum += q[d] * key_at(r, ATTN_K, seq, g, j, i[ATTN_I_DK], d);
        p[j] = ref_cap(r->op->f[ATTN_F_SCALE] * sum, r->op->f[ATTN_F_SOFTCAP]);
        top = fmax(top, p[j]);
    }
    double total = exp(sink - top);
    for (int64_t j = first; j <= last; j++)
        total += p[j] = exp(p[j] - top);
    for (int64_t d = 0; d < i[ATTN_I_DV]; d++) {
        double sum = 0;
        for (int64_t j = first; j <= last; j++)
            sum += p[j] / total * key_at(r, ATTN_V, seq, g, j, i[ATTN_I_DV], d);
        out[d] = (float)sum;
    }
}

/* q [T, Hq dk], K, V pages, page table i32 [S, P] -> out [T, Hq dv] */
void ref_attention(const struct ref *r)
{
    const int64_t *i = r->op->i;
    int64_t keys = (int64_t)r->op->t[ATTN_PAGES].dim[1] * i[ATTN_I_PAGE_SIZE];
    double *p = calloc((size_t)keys, sizeof(*p));
    if (!p)
        abort();
    for (uint32_t row = 0; row < r->rows; row++) {
        uint32_t seq = ((const uint32_t *)ref_base(r, ATTN_SEQ_OF))[row];
        int64_t last = ((const int32_t *)ref_base(r, ATTN_POSITIONS))[row];
        int64_t window = i[ATTN_I_WINDOW],
                first = window > 0 && last >= window ? last - window + 1 : 0;
        for (int64_t h = 0; h < i[ATTN_I_Q_HEADS]; h++)
            head(r, (const float *)ref_row(r, ATTN_Q, row) + h * i[ATTN_I_DK],
                 (float *)ref_row(r, ATTN_OUT, row) + h * i[ATTN_I_DV], seq, h, first, last, p);
    }
    free(p);
}
