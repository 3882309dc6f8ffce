/* SPDX-License-Identifier: Apache-2.0 */
/* rope_table, split_norm_rope and attention against the reference. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "harness.h"
#include "kernels/plan.h"
#include "kernels/ref/ref.h"

static const enum ember_dtype floats[] = {EMBER_F32, EMBER_F16, EMBER_BF16};

static void rope_case(uint32_t half, enum ember_rope kind, uint32_t longest)
{
    struct kcase c;
    uint32_t n = 9;
    kcase_start(&c, EMBER_OP_ROPE_TABLE, EMBER_ROWS_TOKENS, n);
    kcase_tensor(&c, ROPE_POSITIONS, EMBER_ARENA_IO, EMBER_I32, 0, 1, n, 0, 0);
    kcase_tensor(&c, ROPE_LEN, EMBER_ARENA_IO, EMBER_I32, 0, 1, n, 0, 0);
    kcase_tensor(&c, ROPE_INV_FREQ, EMBER_ARENA_WEIGHTS, EMBER_F32, 1, 1, half, 0, 0);
    kcase_tensor(&c, ROPE_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, 2 * half, 0);
    for (uint32_t i = 0; i < n; i++) {
        int32_t position = i == 8 ? 1000000 : i == 0 ? 0 : (int32_t)rnd(longest);
        *(int32_t *)kcase_row(&c, ROPE_POSITIONS, i) = position;
        *(int32_t *)kcase_row(&c, ROPE_LEN, i) = i & 1 ? position + 1 : (int32_t)longest;
    }
    for (uint32_t j = 0; j < half; j++)
        *(float *)kcase_row(&c, ROPE_INV_FREQ, j) = powf(10000, -(float)j / (float)half);
    c.op.i[ROPE_I_KIND] = kind;
    c.op.f[ROPE_F_ATTENTION_FACTOR] = kind ? 1 : 1.2;
    c.op.f[ROPE_F_THETA] = 10000;
    c.op.f[ROPE_F_FACTOR] = 2;
    c.op.f[ROPE_F_MAX_POSITION] = 4096;
    /* The stretched frequencies may differ by an ulp, which a position of 1000000 makes large. */
    c.tolerance = kind ? 0.07f : 1.2e-7f;
    kcase_rows(&c, ROPE_POSITIONS, 1);
    kcase_rows(&c, ROPE_LEN, 1);
    kcase_out(&c, ROPE_OUT, 1);
    kcase_check(&c, "rope_table");
    kcase_free(&c);
}

static void test_rope_table(void **ctx)
{
    static const uint32_t halves[] = {1, 2, 5, 16, 32, 64};
    for (size_t i = 0; i < ARRAY_LEN(halves); i++) {
        rope_case(halves[i], EMBER_ROPE_STATIC, 1000000);
        if (halves[i] > 1)
            rope_case(halves[i], EMBER_ROPE_DYNAMIC_NTK, 30000);
    }
}

/* Stretched frequencies themselves, at position 1: sin(x) = x - ... shows them to an ulp or so. */
static void test_rope_stretched(void **ctx)
{
    struct kcase c;
    uint32_t half = 32;
    kcase_start(&c, EMBER_OP_ROPE_TABLE, EMBER_ROWS_TOKENS, 4);
    kcase_tensor(&c, ROPE_POSITIONS, EMBER_ARENA_IO, EMBER_I32, 0, 1, 4, 0, 0);
    kcase_tensor(&c, ROPE_LEN, EMBER_ARENA_IO, EMBER_I32, 0, 1, 4, 0, 0);
    kcase_tensor(&c, ROPE_INV_FREQ, EMBER_ARENA_WEIGHTS, EMBER_F32, 1, 1, half, 0, 0);
    kcase_tensor(&c, ROPE_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, 4, 2 * half, 0);
    for (uint32_t i = 0; i < 4; i++) {
        *(int32_t *)kcase_row(&c, ROPE_POSITIONS, i) = 1;
        *(int32_t *)kcase_row(&c, ROPE_LEN, i) = (int32_t)(5000 << i);
    }
    c.op.i[ROPE_I_KIND] = EMBER_ROPE_DYNAMIC_NTK;
    c.op.f[ROPE_F_ATTENTION_FACTOR] = 1;
    c.op.f[ROPE_F_THETA] = 1e6;
    c.op.f[ROPE_F_FACTOR] = 8;
    c.op.f[ROPE_F_MAX_POSITION] = 4096;
    c.tolerance = 1.2e-7f;
    kcase_out(&c, ROPE_OUT, 1);
    kcase_rows(&c, ROPE_POSITIONS, 1);
    kcase_rows(&c, ROPE_LEN, 1);
    kcase_check(&c, "rope_table stretched");
    kcase_free(&c);
}

struct shape {
    uint32_t hq, hkv, dk, dv, page_size;
};

static const enum ember_dtype kv_dtypes[] = {EMBER_F32, EMBER_BF16, EMBER_F16, EMBER_I8};

/* What float32 loses in pages in tiles, and where a product is of two terms each. */
#define TILES_TOLERANCE 1.2e-5f

static float bf16_value(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* The two terms of a float in pages in tiles. */
static void terms(float x, uint16_t ret[2])
{
    ret[0] = ref_to_bf16(x);
    ret[1] = isfinite(bf16_value(ret[0])) ? ref_to_bf16(x - bf16_value(ret[0])) : 0;
}

/* What two terms can say, so that nothing is lost on the way to tiles and back. */
static float in_terms(float x)
{
    uint16_t two[2];
    terms(x, two);
    return bf16_value(two[0]) + bf16_value(two[1]);
}

/* Where element d of a head's key (value) `slot` begins in a page in tiles, in units of bf16; of
 * two terms the upper one, `term` elements before the lower one. */
static uint64_t tile_place(bool value, uint32_t n_terms, uint32_t slot, uint32_t d, uint64_t *term)
{
    uint64_t tile = value ? d / 16 : d / 32, line = value ? slot / 2 : d % 32 / 2;
    uint64_t column = value ? d % 16 * 2 + slot % 2 : slot * 2 + d % 2;
    *term = value ? 8 * 32 : 16 * 32;
    return tile * *term * n_terms + line * 32 + column;
}

/* One head's block of a page of 16 tokens, from rows to tiles or back. */
static void convert_head(char *block, bool value, enum ember_dtype dtype, uint32_t width, bool to)
{
    uint32_t n_terms = dtype == EMBER_F32 ? 2 : 1, n = 16 * width;
    uint16_t *half = x_alloc(n * 2 * n_terms);
    float *wide = x_alloc(n * sizeof(float));
    memcpy(half, block, n * 2 * n_terms);
    memcpy(wide, block, n * 2 * n_terms);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t term, at = tile_place(value, n_terms, i / width, i % width, &term);
        uint16_t two[2];
        if (n_terms == 1 && to)
            memcpy(block + at * 2, half + i, 2);
        else if (n_terms == 1)
            memcpy(block + i * 2, half + at, 2);
        else if (to) {
            terms(wide[i], two);
            memcpy(block + at * 2, &two[0], 2);
            memcpy(block + (at + term) * 2, &two[1], 2);
        } else {
            float x = bf16_value(half[at]) + bf16_value(half[at + term]);
            memcpy(block + i * 4, &x, 4);
        }
    }
    free(half);
    free(wide);
}

/* [rows, columns] to [columns, rows]. */
static void transpose(char *block, uint32_t size, uint32_t rows, uint32_t columns)
{
    size_t n = (size_t)rows * columns * size;
    char *from = x_alloc(n);
    memcpy(from, block, n);
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t c = 0; c < columns; c++) {
            size_t at = (size_t)r * columns + c, to = (size_t)c * rows + r;
            if (size == 4)
                ((uint32_t *)block)[to] = ((uint32_t *)from)[at];
            else if (size == 2)
                ((uint16_t *)block)[to] = ((uint16_t *)from)[at];
            else
                block[to] = from[at];
        }
    free(from);
}

/* K and V pages between rows, which the reference knows, and the form of a variant. */
static void convert_pages(const struct kcase *c, enum cpu_isa isa, struct arenas *arenas, bool to)
{
    bool attention = c->op.kind == EMBER_OP_ATTENTION, latent = c->op.kind == EMBER_OP_SPLIT_LATENT;
    const struct ember_tensor *k = &c->op.t[attention ? ATTN_K
                                            : latent  ? SPLIT_K
                                                      : SNR_K],
                              *v = &c->op.t[attention ? ATTN_V
                                            : latent  ? SPLIT_V
                                                      : SNR_V];
    if (!cpu_kv_tiles(isa, &c->op)) {
        uint32_t bytes = k->dtype == EMBER_F32 ? 4 : k->dtype == EMBER_I8 ? 1 : 2;
        for (uint64_t page = 0; page < c->pages; page++)
            for (uint32_t h = 0; h < k->dim[0]; h++)
                transpose(arenas->data[EMBER_ARENA_KV] + k->offset + page * k->row_stride +
                              (uint64_t)h * k->dim[1] * k->dim[2] * bytes,
                          bytes, k->dim[to ? 1 : 2], k->dim[to ? 2 : 1]);
        return;
    }
    uint64_t size = k->dtype == EMBER_F32 ? 4 : 2;
    for (uint32_t side = 0; side < 2; side++) {
        const struct ember_tensor *t = side ? v : k;
        char *at = arenas->data[EMBER_ARENA_KV] + t->offset;
        for (uint64_t page = 0; page < c->pages; page++)
            for (uint32_t h = 0; h < t->dim[0]; h++)
                convert_head(at + page * t->row_stride + h * 16 * t->dim[2] * size, side, t->dtype,
                             t->dim[2], to);
    }
}

/* K and V pages of one of two layers: K and V blocks side by side in a page. */
static void kv_tensors(struct kcase *c, uint32_t k_slot, uint32_t v_slot, const struct shape *s,
                       uint32_t pages, enum ember_dtype dtype)
{
    uint64_t k_bytes = size_align(kv_block_bytes(dtype, s->hkv, s->page_size, s->dk), 4),
             v_bytes = size_align(kv_block_bytes(dtype, s->hkv, s->page_size, s->dv), 4);
    uint64_t page = k_bytes + v_bytes + 64;
    struct ember_tensor *k = kcase_tensor(c, k_slot, EMBER_ARENA_KV, EMBER_F32, 1, 1,
                                          (uint32_t)(pages * page / 4), 0, 0);
    k->rank = 3;
    k->dtype = (uint8_t)dtype;
    k->dim[0] = s->hkv;
    k->dim[1] = s->page_size;
    k->dim[2] = s->dk;
    k->row_stride = page;
    c->op.t[v_slot] = *k;
    c->op.t[v_slot].dim[2] = s->dv;
    c->op.t[v_slot].offset += k_bytes;
    c->convert = convert_pages;
    c->pages = pages;
    c->tiles_tolerance = TILES_TOLERANCE;
    for (uint32_t p = 0; dtype == EMBER_F32 && p < pages; p++)
        for (uint64_t i = 0; i < (k_bytes + v_bytes) / 4; i++) {
            float *x = (float *)kcase_row(c, k_slot, p) + i;
            *x = in_terms(*x);
        }
    if (dtype == EMBER_F32)
        return;
    /* Other noise than that of floats: halves, or codes with scales of which some are 0. */
    for (uint32_t p = 0; p < pages; p++)
        for (uint32_t side = 0; side < 2; side++) {
            char *block = kcase_row(c, side ? v_slot : k_slot, p);
            uint32_t rows = s->hkv * s->page_size, n = rows * (side ? s->dv : s->dk);
            for (uint32_t i = 0; i < n; i++)
                if (dtype == EMBER_I8)
                    block[i] = (char)rnd(256);
                else
                    ((uint16_t *)block)[i] =
                        dtype == EMBER_BF16 ? ref_to_bf16(rnd_float()) : ref_to_f16(rnd_float());
            for (uint32_t i = 0; dtype == EMBER_I8 && i < rows; i++)
                ((float *)(block + size_align(n, 4)))[i] = i % 7 == 3 ? 0 : 0.01f * rnd_float();
        }
}

static void split_case(const struct shape *s, uint32_t rotary, uint32_t norm, uint32_t after,
                       uint32_t interleaved, enum ember_dtype dtype, bool weights)
{
    struct kcase c;
    char what[128];
    uint32_t n = 5, pages = 4, cols = (s->hq + s->hkv) * s->dk + s->hkv * s->dv;
    snprintf(what, sizeof(what),
             "split_norm_rope hq=%u hkv=%u dk=%u dv=%u rotary=%u norm=%u after=%u pairs=%u", s->hq,
             s->hkv, s->dk, s->dv, rotary, norm, after, interleaved);
    kcase_start(&c, EMBER_OP_SPLIT_NORM_ROPE, EMBER_ROWS_TOKENS, n);
    kcase_tensor(&c, SNR_QKV, EMBER_ARENA_SCRATCH, EMBER_F32, 3, 2, n, cols, 0);
    if (norm != EMBER_QK_NORM_NONE && weights) {
        kcase_tensor(&c, SNR_Q_NORM, EMBER_ARENA_WEIGHTS, dtype, 1, 1,
                     norm == EMBER_QK_NORM_ROW ? s->hq * s->dk : s->dk, 0, 0);
        kcase_tensor(&c, SNR_K_NORM, EMBER_ARENA_WEIGHTS, dtype, 1, 1,
                     norm == EMBER_QK_NORM_ROW ? s->hkv * s->dk : s->dk, 0, 0);
    }
    if (rotary) {
        kcase_tensor(&c, SNR_ROPE, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, rotary, 0);
        for (uint32_t r = 0; r < n; r++)
            for (uint32_t j = 0; j < rotary / 2; j++) {
                float angle = 7 * rnd_float(), *row = kcase_row(&c, SNR_ROPE, r);
                row[j] = cosf(angle);
                row[rotary / 2 + j] = sinf(angle);
            }
    }
    kcase_tensor(&c, SNR_Q, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, s->hq * s->dk, 0);
    kv_tensors(&c, SNR_K, SNR_V, s, pages, EMBER_F32);
    kcase_tensor(&c, SNR_KV_SLOT, EMBER_ARENA_IO, EMBER_I32, 0, 1, n, 0, 0);
    for (uint32_t r = 0; r < n; r++) /* distinct slots, across pages */
        *(int32_t *)kcase_row(&c, SNR_KV_SLOT, r) = (int32_t)((r * 7 + 3) % (pages * s->page_size));
    const int64_t ints[] = {s->hq,       s->hkv, s->dk, s->dv,       rotary,
                            interleaved, norm,   after, s->page_size};
    memcpy(c.op.i, ints, sizeof(ints));
    c.op.f[SNR_F_EPS] = 1e-6;
    c.op.f[SNR_F_W_BIAS] = weights ? after : 0;
    c.op.f[SNR_F_V_SCALE] = after ? 0.5 : 1;
    kcase_rows(&c, SNR_QKV, 1);
    kcase_rows(&c, SNR_ROPE, 1);
    kcase_rows(&c, SNR_KV_SLOT, 1);
    kcase_out(&c, SNR_Q, 1);
    for (uint32_t i = 0; i < 2; i++) {
        const struct ember_tensor *t = &c.op.t[i ? SNR_V : SNR_K];
        c.view[i] = *t;
        c.view[i].rank = 2;
        c.view[i].dim[0] = pages;
        c.view[i].dim[1] = t->dim[0] * t->dim[1] * t->dim[2];
    }
    kcase_check(&c, what);
    kcase_free(&c);
}

/* Latents of rows that share pages, some in neighbouring slots, and q of all heads. */
static void latent_case(uint32_t heads, uint32_t nope, uint32_t rotary, uint32_t rank,
                        uint32_t interleaved, enum ember_dtype dtype, enum ember_dtype norm)
{
    static const uint32_t slots[] = {3, 4, 5, 9, 18, 17, 33, 34, 35, 36, 37};
    struct kcase c;
    char what[128];
    const uint32_t n = ARRAY_LEN(slots), pages = 4;
    const struct shape s = {heads, 1, rank + rotary, rank, 16};
    snprintf(what, sizeof(what), "split_latent heads=%u nope=%u rotary=%u rank=%u pairs=%u kv=%u",
             heads, nope, rotary, rank, interleaved, dtype);
    kcase_start(&c, EMBER_OP_SPLIT_LATENT, EMBER_ROWS_TOKENS, n);
    kcase_tensor(&c, SPLIT_Q, EMBER_ARENA_SCRATCH, EMBER_F32, 3, 2, n, heads * (nope + rotary), 0);
    kcase_tensor(&c, SPLIT_KV, EMBER_ARENA_SCRATCH, EMBER_F32, 2, 2, n, rank + rotary, 0);
    kcase_tensor(&c, SPLIT_NORM, EMBER_ARENA_WEIGHTS, norm, 1, 1, rank, 0, 0);
    kcase_tensor(&c, SPLIT_ROPE, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, rotary, 0);
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t j = 0; j < rotary / 2; j++) {
            float angle = 7 * rnd_float(), *row = kcase_row(&c, SPLIT_ROPE, r);
            row[j] = cosf(angle);
            row[rotary / 2 + j] = sinf(angle);
        }
    kcase_tensor(&c, SPLIT_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, heads * (rank + rotary),
                 0);
    kv_tensors(&c, SPLIT_K, SPLIT_V, &s, pages, dtype);
    kcase_tensor(&c, SPLIT_KV_SLOT, EMBER_ARENA_IO, EMBER_I32, 0, 1, n, 0, 0);
    for (uint32_t r = 0; r < n; r++)
        *(int32_t *)kcase_row(&c, SPLIT_KV_SLOT, r) = (int32_t)slots[r];
    const int64_t ints[] = {heads, nope, rotary, rank, interleaved, s.page_size};
    memcpy(c.op.i, ints, sizeof(ints));
    c.op.f[SPLIT_F_EPS] = 1e-6;
    kcase_rows(&c, SPLIT_Q, 1);
    kcase_rows(&c, SPLIT_KV, 1);
    kcase_rows(&c, SPLIT_ROPE, 1);
    kcase_rows(&c, SPLIT_KV_SLOT, 1);
    kcase_out(&c, SPLIT_OUT, 1);
    for (uint32_t i = 0; i < 2 && dtype == EMBER_F32; i++) { /* others: what rounding leaves */
        const struct ember_tensor *t = &c.op.t[i ? SPLIT_V : SPLIT_K];
        c.view[i] = *t;
        c.view[i].rank = 2;
        c.view[i].dim[0] = pages;
        c.view[i].dim[1] = t->dim[1] * t->dim[2];
    }
    kcase_check(&c, what);
    kcase_free(&c);
}

static void test_latent(void **ctx)
{
    for (uint32_t i = 0; i < 8; i++) {
        latent_case(4, 16, 8, 16, i & 1, EMBER_F32, floats[i % 3]);
        latent_case(3, 5, 2 + 2 * i, 33 + i, i & 1, EMBER_F32, floats[(i + 1) % 3]);
    }
    latent_case(16, 128, 64, 512, 1, EMBER_F32, EMBER_BF16); /* DeepSeek-V2 Lite */
    latent_case(2, 192, 64, 448, 1, EMBER_F32, EMBER_BF16);  /* in tiles where there are */
}

static const struct shape shapes[] = {
    {4, 2, 64, 64, 16}, {2, 1, 128, 128, 16}, {3, 3, 20, 12, 16},   {8, 2, 24, 40, 5},
    {6, 1, 17, 33, 24}, {1, 1, 2, 1, 3},      {32, 2, 80, 80, 16},  {5, 5, 96, 64, 40},
    {6, 2, 32, 48, 16}, {5, 1, 96, 16, 16},   {2, 2, 256, 256, 16},
};

static void test_split(void **ctx)
{
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        uint32_t dk = shapes[i].dk & ~1u;
        for (uint32_t norm = 0; norm < 3; norm++)
            for (uint32_t bits = 0; bits < 4; bits++)
                split_case(&shapes[i], dk, norm, bits & 1, bits >> 1, floats[(i + bits) % 3], true);
        split_case(&shapes[i], dk / 2 & ~1u, EMBER_QK_NORM_HEAD, 0, 0, EMBER_BF16, false);
        split_case(&shapes[i], 0, EMBER_QK_NORM_NONE, 0, 0, EMBER_F32, false);
    }
}

/* What is kept of K and V in each form, exactly: no norm, no rotation. */
static void kept_case(const struct shape *s, enum ember_dtype dtype, bool exact)
{
    struct kcase c;
    char what[128];
    uint32_t n = 7, pages = 4, cols = (s->hq + s->hkv) * s->dk + s->hkv * s->dv;
    snprintf(what, sizeof(what), "split_norm_rope hkv=%u dk=%u dv=%u keeps dtype %u", s->hkv, s->dk,
             s->dv, dtype);
    kcase_start(&c, EMBER_OP_SPLIT_NORM_ROPE, EMBER_ROWS_TOKENS, n);
    kcase_tensor(&c, SNR_QKV, EMBER_ARENA_SCRATCH, EMBER_F32, 300, 2, n, cols, 0);
    kcase_tensor(&c, SNR_Q, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, s->hq * s->dk, 0);
    kv_tensors(&c, SNR_K, SNR_V, s, pages, dtype);
    kcase_tensor(&c, SNR_KV_SLOT, EMBER_ARENA_IO, EMBER_I32, 0, 1, n, 0, 0);
    for (uint32_t r = 0; r < n; r++)
        *(int32_t *)kcase_row(&c, SNR_KV_SLOT, r) = (int32_t)((r * 7 + 3) % (pages * s->page_size));
    /* Rows of zeros, of denormals, of what is too large for a half, and with what is no number. */
    static const float odd[] = {0, 1e-41f, 66000, INFINITY, NAN, 3e-6f};
    for (uint32_t r = 0; r < 6; r++)
        for (uint32_t i = s->hq * s->dk; i < cols; i += r < 3 ? 1 : 5)
            ((float *)kcase_row(&c, SNR_QKV, r))[i] = r == 2 && i % 3   ? rnd_float()
                                                      : r == 3 && i % 2 ? -INFINITY
                                                                        : odd[r];
    for (uint32_t r = 0; dtype == EMBER_F32 && !exact && r < n; r++)
        for (uint32_t i = 0; i < cols; i++) {
            float *x = (float *)kcase_row(&c, SNR_QKV, r) + i;
            *x = in_terms(*x);
        }
    const int64_t ints[] = {s->hq, s->hkv, s->dk, s->dv, 0, 0, 0, 0, s->page_size, exact};
    memcpy(c.op.i, ints, sizeof(ints));
    c.op.f[SNR_F_V_SCALE] = 0.5;
    kcase_rows(&c, SNR_QKV, 1);
    kcase_rows(&c, SNR_KV_SLOT, 1);
    kcase_out(&c, SNR_Q, 1);
    for (uint32_t i = 0; i < 2; i++) {
        const struct ember_tensor *t = &c.op.t[i ? SNR_V : SNR_K];
        c.view[i] = *t;
        c.view[i].rank = 2;
        c.view[i].dtype = EMBER_I32; /* its bits */
        c.view[i].dim[0] = pages;
        c.view[i].dim[1] = (uint32_t)(kv_block_bytes(dtype, t->dim[0], t->dim[1], t->dim[2]) / 4);
    }
    kcase_check(&c, what);
    kcase_free(&c);
}

static void test_kept(void **ctx)
{
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++)
        for (size_t j = 0; j < ARRAY_LEN(kv_dtypes); j++)
            kept_case(&shapes[i], kv_dtypes[j], false);
    kept_case(&shapes[0], EMBER_F32, true);
}

/* Prompts of several sequences and single tokens behind others, pages in a random order. */
static void attention_case(const struct shape *s, enum ember_dtype dtype, bool parts,
                           uint32_t longest, uint32_t window, double softcap, int sinks)
{
    const bool exact = dtype == EMBER_F32 && longest == 100;
    struct kcase c;
    char what[128];
    uint32_t seqs = 4, per_seq = (longest + s->page_size - 1) / s->page_size + 1, n = 0,
             seq_rows[4] = {1, 13, 9, 1};
    snprintf(what, sizeof(what),
             "attention hq=%u hkv=%u dk=%u dv=%u page=%u kv=%u parts=%d keys=%u window=%u cap=%g "
             "sinks=%d",
             s->hq, s->hkv, s->dk, s->dv, s->page_size, dtype, parts, longest, window, softcap,
             sinks);
    for (uint32_t i = 0; i < seqs; i++) {
        seq_rows[i] = seq_rows[i] < longest ? seq_rows[i] : longest;
        n += seq_rows[i];
    }
    kcase_start(&c, EMBER_OP_ATTENTION, EMBER_ROWS_TOKENS, n);
    kcase_tensor(&c, ATTN_Q, EMBER_ARENA_SCRATCH, EMBER_F32, 3, 2, n, s->hq * s->dk, 0);
    kv_tensors(&c, ATTN_K, ATTN_V, s, seqs * per_seq, dtype);
    kcase_tensor(&c, ATTN_PAGES, EMBER_ARENA_IO, EMBER_I32, 0, 2, seqs, per_seq, 0);
    for (uint32_t i = 0; i < seqs * per_seq;
         i++) /* a permutation: 1 is coprime to any count, so is count - 1 */
        ((int32_t *)kcase_row(&c, ATTN_PAGES, i / per_seq))[i % per_seq] =
            (int32_t)(((uint64_t)i * (seqs * per_seq - 1) + 2) % (seqs * per_seq));
    kcase_tensor(&c, ATTN_SEQ_OF, EMBER_ARENA_IO, EMBER_I32, 0, 1, n, 0, 0);
    kcase_tensor(&c, ATTN_POSITIONS, EMBER_ARENA_IO, EMBER_I32, 0, 1, n, 0, 0);
    for (uint32_t i = 0, r = 0; i < seqs; i++)
        for (uint32_t j = 0; j < seq_rows[i]; j++, r++) {
            *(int32_t *)kcase_row(&c, ATTN_SEQ_OF, r) = (int32_t)i;
            *(int32_t *)kcase_row(&c, ATTN_POSITIONS, r) =
                (int32_t)(i == 3 ? 0 : longest - seq_rows[i] + j);
        }
    if (sinks)
        kcase_tensor(&c, ATTN_SINKS, EMBER_ARENA_WEIGHTS, floats[sinks % 3], 2, 1, s->hq, 0, 0);
    kcase_tensor(&c, ATTN_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, s->hq * s->dv, 0);
    const int64_t ints[] = {s->hq, s->hkv, s->dk, s->dv, s->page_size, window, exact};
    memcpy(c.op.i, ints, sizeof(ints));
    if (exact)
        c.tiles_tolerance = 0;
    c.op.f[ATTN_F_SCALE] = 1 / sqrt(s->dk);
    c.op.f[ATTN_F_SOFTCAP] = softcap;
    kcase_rows(&c, ATTN_Q, 1);
    kcase_rows(&c, ATTN_SEQ_OF, 1);
    kcase_rows(&c, ATTN_POSITIONS, 1);
    kcase_out(&c, ATTN_OUT, 1);
    if (parts) { /* and without: the same bits */
        struct arenas whole, cut;
        kcase_run(&c, &c.op, cpu_isa_best(), NULL, 0, &whole);
        kcase_tensor(&c, ATTN_PARTS, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n,
                     s->hq * (s->dv + 2) * attention_parts(per_seq * s->page_size), 0);
        kcase_rows(&c, ATTN_PARTS, 1);
        c.ignored[0] = ATTN_PARTS;
        kcase_run(&c, &c.op, cpu_isa_best(), NULL, 0, &cut);
        for (uint32_t r = 0; r < n; r++) {
            uint64_t at = c.op.t[ATTN_OUT].offset + r * c.op.t[ATTN_OUT].row_stride;
            assert_memory_equal(whole.data[EMBER_ARENA_SCRATCH] + at,
                                cut.data[EMBER_ARENA_SCRATCH] + at, 4ull * s->hq * s->dv);
        }
        arenas_free(&whole);
        arenas_free(&cut);
    }
    kcase_check(&c, what);
    kcase_free(&c);
}

static void test_attention(void **ctx)
{
    static const uint32_t keys[] = {1, 15, 17, 64, 100, 333};
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        for (size_t k = 0; k < ARRAY_LEN(keys); k++) {
            enum ember_dtype dtype = kv_dtypes[(i + k) % 4];
            attention_case(&shapes[i], EMBER_F32, k & 1, keys[k], 0, k & 1 ? 0 : 20,
                           (int)(k + i) % 4);
            attention_case(&shapes[i], dtype, k & 1, keys[k], 1 + (uint32_t)(k * 7), 0, (int)k % 2);
        }
        attention_case(&shapes[i], EMBER_F32, true, 64, 16, 0, 0);
        attention_case(&shapes[i], EMBER_F32, false, 64, 64, 0, 0);
    }
    static const struct shape latent = {3, 1, 576, 512, 16};
    attention_case(&latent, EMBER_F32, true, 70, 0, 0, 0);
    attention_case(&latent, EMBER_BF16, false, 70, 0, 0, 0);
}

/* Where parts begin and end, and where they get longer; windows that reach over them. */
static void test_attention_parts(void **ctx)
{
    static const uint32_t keys[] = {256, 257, 700, 8201};
    static const struct shape narrow[] = {
        {4, 2, 16, 8, 16}, {3, 1, 8, 20, 16}, {4, 2, 32, 16, 16}, {3, 1, 64, 48, 16}};
    for (size_t k = 0; k < ARRAY_LEN(keys); k++) {
        enum ember_dtype dtype = kv_dtypes[k % 4];
        for (size_t i = 0; i < ARRAY_LEN(narrow); i += 2) {
            attention_case(&narrow[i], dtype, true, keys[k], 0, 0, (int)k % 2);
            attention_case(&narrow[i + 1], dtype, true, keys[k], keys[k] / 2 + 3, 0, 0);
            attention_case(&narrow[i + k % 2], kv_dtypes[(k + 1) % 4], true, keys[k], 100,
                           k % 3 ? 0 : 9, 1);
        }
    }
}

/* NaN in keys behind the last one that is seen, and before a window, must not reach the output. */
static void test_attention_unseen(void **ctx)
{
    struct kcase c;
    const uint32_t page_size = 16, n = 10, first = 12;
    kcase_start(&c, EMBER_OP_ATTENTION, EMBER_ROWS_TOKENS, n);
    kcase_tensor(&c, ATTN_Q, EMBER_ARENA_SCRATCH, EMBER_F32, 3, 2, n, 2 * 32, 0);
    const struct shape s = {2, 1, 32, 32, page_size};
    kv_tensors(&c, ATTN_K, ATTN_V, &s, 2, EMBER_F32);
    kcase_tensor(&c, ATTN_PAGES, EMBER_ARENA_IO, EMBER_I32, 0, 2, 1, 2, 0);
    ((int32_t *)kcase_row(&c, ATTN_PAGES, 0))[1] = 1;
    kcase_tensor(&c, ATTN_SEQ_OF, EMBER_ARENA_IO, EMBER_I32, 0, 1, n, 0, 0);
    kcase_tensor(&c, ATTN_POSITIONS, EMBER_ARENA_IO, EMBER_I32, 0, 1, n, 0, 0);
    for (uint32_t r = 0; r < n; r++)
        *(int32_t *)kcase_row(&c, ATTN_POSITIONS, r) = (int32_t)(first + r);
    kcase_tensor(&c, ATTN_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, n, 2 * 32, 0);
    for (uint32_t key = 0; key < 32; key++) {
        float *k =
            (float *)((char *)kcase_row(&c, ATTN_K, 0) + key / 16 * c.op.t[ATTN_K].row_stride) +
            key % 16 * 32;
        float *v =
            (float *)((char *)kcase_row(&c, ATTN_V, 0) + key / 16 * c.op.t[ATTN_V].row_stride) +
            key % 16 * 32;
        for (uint32_t d = 0; (key < first - 9 || key > 21) && d < 32; d++)
            k[d] = v[d] = NAN;
    }
    const int64_t ints[] = {2, 1, 32, 32, page_size, 10};
    memcpy(c.op.i, ints, sizeof(ints));
    c.op.f[ATTN_F_SCALE] = 0.2;
    kcase_rows(&c, ATTN_Q, 1);
    kcase_rows(&c, ATTN_SEQ_OF, 1);
    kcase_rows(&c, ATTN_POSITIONS, 1);
    kcase_out(&c, ATTN_OUT, 1);
    kcase_check(&c, "attention, NaN in unseen keys");
    c.op.f[ATTN_F_SOFTCAP] = 3;
    kcase_check(&c, "attention with a cap, NaN in unseen keys");
    kcase_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rope_table),      cmocka_unit_test(test_rope_stretched),
        cmocka_unit_test(test_split),           cmocka_unit_test(test_kept),
        cmocka_unit_test(test_latent),          cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_parts), cmocka_unit_test(test_attention_unseen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
