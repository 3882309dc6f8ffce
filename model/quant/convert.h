/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From the bytes of a quantised checkpoint tensor to those kept. Nothing is rounded: codes, scales
 * and zero points are moved and unpacked (kept forms: ember/op.h, enum ember_quant). Facts about
 * the stored forms are from their projects' own documentation: AutoAWQ, AutoGPTQ and GPTQModel,
 * compressed-tensors, the OCP MX and FP8 specifications.
 */
#ifndef EMBER_MODEL_QUANT_CONVERT_H
#define EMBER_MODEL_QUANT_CONVERT_H

#include "model/model.h"

/* N rows and K columns are those of the matrix as kept, G scales a row. */
enum source_convert {
    CONVERT_NONE,       /* a plain tensor */
    CONVERT_COPY,       /* rows as stored */
    CONVERT_FP8,        /* the same, but NaN is refused */
    CONVERT_FP8_TURNED, /* the same of [K, N] */
    CONVERT_E8M0,       /* the same for scales */
    CONVERT_AWQ,    /* i32 [K, N / 8], nibble i of a word: column 0, 2, 4, 6, 1, 3, 5, 7 of eight */
    CONVERT_GPTQ,   /* i32 [K / 8, N], nibble i of a word: k = 8 row + i */
    CONVERT_PACKED, /* i32 [N, K / 8], nibble i of a word: k = 8 column + i */
    CONVERT_MXFP4,  /* u8 [N, K / 32, 16], byte i: k = 2 i low, 2 i + 1 high */
    CONVERT_TURN,   /* [G, N] of `size` bytes an element */
    CONVERT_BLOCKS, /* [N / block_rows, G]: a row stands for block_rows */
    CONVERT_BLOCKS_TURNED, /* [K / block_rows, N / block_columns]: the same of [K, N] */
    CONVERT_ZERO_AWQ,      /* i32 [G, N / 8] in AWQ's order */
    CONVERT_ZERO_GPTQ,     /* i32 [G, N / 8], nibble i of a word: column i; `size` is added */
    CONVERT_ORDER,         /* i32 [K] group numbers; kept: the columns sorted by them */
    /* Quantised here, from a plain matrix [N, K] (made.c); codes and scales read the same
       tensor. */
    CONVERT_MADE_INT8,
    CONVERT_MADE_INT4,
    CONVERT_MADE_SCALES8, /* of INT8; f16 */
    CONVERT_MADE_SCALES4, /* of INT4 */
};

/* Bytes [first, first + n) of a source with a conversion. */
int convert_read(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor,
                 const struct weight_source *source, uint64_t first, void *to, size_t n,
                 struct error *err);

/*
 * The columns in the order of their groups (a stable sort). -EINVAL when a number is not below
 * ceil(k / group) or a group has not `group` columns (the last: what is left). `order` has k.
 */
int convert_order(const char *name, const int32_t *groups, uint32_t k, uint32_t group,
                  int32_t *order, struct error *err);

#endif
