/* SPDX-License-Identifier: Apache-2.0 */
#include "model/quant/convert.h"

#include <errno.h>
#include <string.h>

/* Part of a stored tensor that some kept rows come from, and where they go. */
struct job {
    const struct checkpoint *checkpoint;
    const struct checkpoint_tensor *tensor;
    const struct weight_source *source;
    uint32_t first, rows; /* kept rows */
    uint8_t *to;
    struct error *err;
};

/*
 * Columns [first, first + n) of `rows` stored rows of `width` bytes, all of the matrix's or, with
 * `first` at a column of a later one, those from there on; the caller frees. NULL with the error
 * set.
 */
static uint8_t *read_block(const struct job *job, uint32_t rows, uint64_t width, uint64_t first,
                           uint64_t n, int *ret)
{
    _cleanup_free_ uint8_t *block = mem_alloc(rows, n);
    *ret = block ? 0 : error_set(job->err, ENOMEM, "%s: no memory to read it", job->tensor->name);
    if (n == width && *ret == 0)
        *ret = checkpoint_read(job->checkpoint, job->tensor, first, block, rows * n, job->err);
    else
        for (uint32_t r = 0; r < rows && *ret == 0; r++)
            *ret = checkpoint_read(job->checkpoint, job->tensor, r * width + first, block + r * n,
                                   n, job->err);
    return *ret < 0 ? NULL : TAKE(block);
}

static uint32_t word_at(const uint8_t *p)
{
    uint32_t w;
    memcpy(&w, p, sizeof w);
    return w;
}

static void put_nibble(uint8_t *row, uint32_t k, uint32_t code)
{
    row[k / 32 * 16 + k % 16] |= (uint8_t)((code & 15) << (k % 32 >= 16 ? 4 : 0));
}

/* ---- order ---- */

int convert_order(const char *name, const int32_t *groups, uint32_t k, uint32_t group,
                  int32_t *order, struct error *err)
{
    uint32_t n = (uint32_t)(((uint64_t)k + group - 1) / group);
    _cleanup_free_ uint32_t *used = mem_alloc(n, sizeof *used);
    if (!used)
        return error_set(err, ENOMEM, "%s: no memory for %u groups", name, n);
    for (uint32_t i = 0; i < k; i++) {
        uint32_t g = (uint32_t)groups[i];
        if (g >= n)
            return error_set(err, EINVAL, "tensor %s: column %u is of group %d of %u", name, i,
                             groups[i], n);
        if (used[g] == MIN(group, k - g * group))
            return error_set(err, EINVAL, "tensor %s: group %u has more than its %u columns", name,
                             g, used[g]);
        order[g * group + used[g]++] = (int32_t)i;
    }
    return 0;
}

/* order[i]: the stored column that is kept as column i; the caller frees. */
static int32_t *read_order(const struct job *job, const char *name, uint32_t k, int *ret)
{
    const struct checkpoint_tensor *t = checkpoint_find(job->checkpoint, name);
    _cleanup_free_ int32_t *groups = mem_alloc(k, sizeof *groups);
    _cleanup_free_ int32_t *order = mem_alloc(k, sizeof *order);
    if (!groups || !order) {
        *ret = error_set(job->err, ENOMEM, "%s: no memory for %u columns", name, k);
        return NULL;
    }
    if (!t) { /* one part of a fused tensor may do without */
        for (uint32_t i = 0; i < k; i++)
            order[i] = (int32_t)i;
        return TAKE(order);
    }
    *ret = checkpoint_read(job->checkpoint, t, 0, groups, k * sizeof *groups, job->err);
    if (*ret == 0)
        *ret = convert_order(name, groups, k, job->source->group, order, job->err);
    return *ret < 0 ? NULL : TAKE(order);
}

static int order_row(const struct job *job)
{
    int r = 0;
    uint32_t k = job->source->columns;
    _cleanup_free_ int32_t *order = read_order(job, job->tensor->name, k, &r);
    if (order)
        memcpy(job->to, order, k * sizeof *order);
    return r;
}

/* ---- codes ---- */

static const uint8_t awq_column[8] = {0, 2, 4, 6, 1, 3, 5, 7};

/* Rows come eight to a word: the stored block begins at a multiple of eight. */
static int awq_codes(const struct job *job)
{
    const struct weight_source *s = job->source;
    uint32_t first = job->first & ~7u, words = (job->first + job->rows - first + 7) / 8;
    int r;
    _cleanup_free_ uint8_t *block =
        read_block(job, s->columns, (uint64_t)s->rows / 2, first / 2, (uint64_t)words * 4, &r);
    for (uint32_t k = 0; block && k < s->columns; k++)
        for (uint32_t w = 0; w < words; w++) {
            uint32_t word = word_at(block + ((uint64_t)k * words + w) * 4);
            for (uint32_t i = 0; i < 8; i++) {
                uint32_t n = first + 8 * w + awq_column[i] - job->first;
                if (n < job->rows)
                    put_nibble(job->to + (uint64_t)n * s->row_bytes, k, word >> 4 * i);
            }
        }
    return r;
}

static int gptq_codes(const struct job *job)
{
    const struct weight_source *s = job->source;
    int r = 0;
    _cleanup_free_ int32_t *order = s->order ? read_order(job, s->order, s->columns, &r) : NULL;
    if (r < 0)
        return r;
    _cleanup_free_ uint8_t *block =
        read_block(job, s->columns / 8, (uint64_t)s->rows * 4, (uint64_t)job->first * 4,
                   (uint64_t)job->rows * 4, &r);
    for (uint32_t i = 0; block && i < s->columns; i++) {
        uint32_t k = order ? (uint32_t)order[i] : i;
        for (uint32_t n = 0; n < job->rows; n++)
            put_nibble(job->to + (uint64_t)n * s->row_bytes, i,
                       word_at(block + ((uint64_t)(k / 8) * job->rows + n) * 4) >> 4 * (k % 8));
    }
    return r;
}

static int packed_codes(const struct job *job)
{
    const struct weight_source *s = job->source;
    uint64_t width = (uint64_t)(s->columns + 7) / 8 * 4;
    _cleanup_free_ uint8_t *row = mem_alloc(width, 1);
    int r = row ? 0 : error_set(job->err, ENOMEM, "%s: no memory for a row", job->tensor->name);
    for (uint32_t n = 0; n < job->rows && r == 0; n++) {
        r = checkpoint_read(job->checkpoint, job->tensor, (job->first + n) * width, row, width,
                            job->err);
        for (uint32_t k = 0; k < s->columns; k++)
            put_nibble(job->to + (uint64_t)n * s->row_bytes, k,
                       word_at(row + k / 8 * 4) >> 4 * (k % 8));
    }
    return r;
}

/* `before` are values of one byte wherever it is not 0. */
static int copy_rows(const struct job *job)
{
    uint64_t width = job->source->row_bytes;
    return checkpoint_read(job->checkpoint, job->tensor, job->source->before + job->first * width,
                           job->to, job->rows * width, job->err);
}

/* Kept rows are columns of the stored matrix, whose rows are as many as these have values. */
static int copy_turned(const struct job *job)
{
    const struct weight_source *s = job->source;
    int r;
    _cleanup_free_ uint8_t *block =
        read_block(job, s->columns, s->rows, s->before + job->first, job->rows, &r);
    for (uint32_t k = 0; block && k < s->columns; k++)
        for (uint32_t n = 0; n < job->rows; n++)
            job->to[n * (uint64_t)s->row_bytes + k] = block[(uint64_t)k * job->rows + n];
    return r;
}

/* Refuses bytes that are NaN: those whose bits under `mask` are `bad`. */
static int checked(const struct job *job, int r, uint8_t mask, uint8_t bad)
{
    uint64_t n = job->rows * (uint64_t)job->source->row_bytes;
    unsigned found = 0;
    for (uint64_t i = 0; r == 0 && i < n; i++)
        found |= (job->to[i] & mask) == bad;
    return found ? error_set(job->err, EINVAL, "tensor %s: holds NaN in rows %u to %u",
                             job->tensor->name, job->first, job->first + job->rows - 1)
                 : r;
}

/* Within 16 bytes: pairs of neighbours become pairs 16 apart. */
static int mxfp4_codes(const struct job *job)
{
    uint64_t n = job->rows * (uint64_t)job->source->row_bytes;
    int r = copy_rows(job);
    for (uint64_t at = 0; r == 0 && at < n; at += 16) {
        uint8_t old[16];
        memcpy(old, job->to + at, 16);
        memset(job->to + at, 0, 16);
        for (uint32_t k = 0; k < 32; k++)
            put_nibble(job->to + at, k, old[k / 2] >> 4 * (k % 2));
    }
    return r;
}

/* ---- scales and zero points ---- */

static int turned(const struct job *job)
{
    const struct weight_source *s = job->source;
    uint64_t size = s->size;
    int r;
    _cleanup_free_ uint8_t *block =
        read_block(job, s->columns, s->rows * size, job->first * size, job->rows * size, &r);
    for (uint32_t g = 0; block && g < s->columns; g++)
        for (uint32_t n = 0; n < job->rows; n++)
            memcpy(job->to + n * (uint64_t)s->row_bytes + g * size,
                   block + ((uint64_t)g * job->rows + n) * size, size);
    return r;
}

static int block_scales(const struct job *job)
{
    const struct weight_source *s = job->source;
    int r = 0;
    const uint64_t first = (uint64_t)s->from_row + job->first;
    for (uint32_t n = 0; n < job->rows && r == 0; n++)
        r = checkpoint_read(job->checkpoint, job->tensor,
                            (first + n) / s->block_rows * (uint64_t)s->row_bytes,
                            job->to + n * (uint64_t)s->row_bytes, s->row_bytes, job->err);
    return r;
}

/* Group g of a kept row lies within one block of stored rows. */
static int turned_scales(const struct job *job)
{
    const struct weight_source *s = job->source;
    const uint64_t wide = ((uint64_t)s->rows + s->block_columns - 1) / s->block_columns;
    _cleanup_free_ uint8_t *blocks = mem_alloc(wide, s->size);
    int r = blocks ? 0 : error_set(job->err, ENOMEM, "%s: no memory for a row", job->tensor->name);
    for (uint32_t g = 0; g < s->columns && r == 0; g++) {
        uint64_t row = s->from_row + (uint64_t)g * s->group;
        r = checkpoint_read(job->checkpoint, job->tensor, row / s->block_rows * wide * s->size,
                            blocks, wide * s->size, job->err);
        for (uint32_t n = 0; n < job->rows && r == 0; n++)
            memcpy(job->to + n * (uint64_t)s->row_bytes + (uint64_t)g * s->size,
                   blocks + (uint64_t)((job->first + n) / s->block_columns) * s->size, s->size);
    }
    return r;
}

static int zeros(const struct job *job, bool awq)
{
    const struct weight_source *s = job->source;
    uint32_t first = job->first & ~7u, words = (job->first + job->rows - first + 7) / 8;
    int r;
    _cleanup_free_ uint8_t *block =
        read_block(job, s->columns, (uint64_t)s->rows / 2, first / 2, (uint64_t)words * 4, &r);
    for (uint32_t g = 0; block && g < s->columns; g++)
        for (uint32_t c = 0; c < 8 * words; c++) {
            uint32_t word = word_at(block + ((uint64_t)g * words + c / 8) * 4);
            uint32_t n = first + c / 8 * 8 + (awq ? awq_column[c % 8] : c % 8) - job->first;
            if (n < job->rows)
                job->to[n * (uint64_t)s->row_bytes + g] =
                    (uint8_t)((word >> 4 * (c % 8) & 15) + s->size);
        }
    return r;
}

/* ---- */

/* Whole kept rows; `to` holds zeros. */
static int convert_rows(const struct job *job)
{
    switch (job->source->convert) {
    case CONVERT_COPY:
        return copy_rows(job);
    case CONVERT_FP8:
        return checked(job, copy_rows(job), 0x7f, 0x7f);
    case CONVERT_FP8_TURNED:
        return checked(job, copy_turned(job), 0x7f, 0x7f);
    case CONVERT_E8M0:
        return checked(job, copy_rows(job), 0xff, 0xff);
    case CONVERT_AWQ:
        return awq_codes(job);
    case CONVERT_GPTQ:
        return gptq_codes(job);
    case CONVERT_PACKED:
        return packed_codes(job);
    case CONVERT_MXFP4:
        return mxfp4_codes(job);
    case CONVERT_TURN:
        return turned(job);
    case CONVERT_BLOCKS:
        return block_scales(job);
    case CONVERT_BLOCKS_TURNED:
        return turned_scales(job);
    case CONVERT_ZERO_AWQ:
        return zeros(job, true);
    case CONVERT_ZERO_GPTQ:
        return zeros(job, false);
    case CONVERT_ORDER:
        return order_row(job);
    }
    return error_set(job->err, EINVAL, "%s: conversion %u is not known", job->tensor->name,
                     job->source->convert);
}

int convert_read(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor,
                 const struct weight_source *source, uint64_t first, void *to, size_t n,
                 struct error *err)
{
    uint64_t row = first / source->row_bytes, skip = first % source->row_bytes;
    uint64_t rows = (skip + n + source->row_bytes - 1) / source->row_bytes;
    _cleanup_free_ uint8_t *whole = mem_alloc(rows, source->row_bytes);
    struct job job = {checkpoint, tensor, source, (uint32_t)row, (uint32_t)rows, whole, err};
    int r = whole ? convert_rows(&job)
                  : error_set(err, ENOMEM, "%s: no memory for %llu rows", tensor->name,
                              (unsigned long long)rows);
    if (r == 0)
        memcpy(to, whole + skip, n);
    return r;
}
