/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The IO arena of one bucket: where a step's inputs and outputs stand.
 *
 * Inputs come first and are contiguous so that one copy brings them in; the page table is the last
 * of them, so that the copy can stop behind the rows in use. Every array starts on a 64-byte
 * boundary. All integers are int32.
 *
 *   header    struct ember_step_header
 *   tokens    [T]     token ids, sequence by sequence
 *   positions [T]     position of the token in its sequence, from 0
 *   rope_len  [T]     length that "dynamic" rope scaling sees: prompt length for prompt tokens,
 * position + 1 else seq_of    [T]     index of the token's sequence, < n_seqs kv_slot   [T] page *
 * page_size + slot, where its K and V go rows      [R]     which tokens get logits pages     [S, P]
 * page table
 *   -- outputs --
 *   sampled   [R]     argmax ids
 *   logits    [R, V]  float32
 *   hidden    [L + 1, T, D] float32, only when the bucket taps hidden states
 */
#ifndef EMBER_KERNELS_STEP_IO_H
#define EMBER_KERNELS_STEP_IO_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

#define KV_PAGE_SIZE 16 /* tokens a KV page holds */

struct step_shape {
    uint32_t tokens, seqs, rows, pages; /* T, S, R, P */
    uint32_t vocab;
    uint32_t hidden, taps; /* D and the number of hidden states tapped (0: none) */
};

struct step_io {
    struct step_shape shape;
    uint64_t tokens, positions, rope_len, seq_of, kv_slot, rows, pages; /* byte offsets */
    uint64_t inputs_end;
    uint64_t sampled, logits, hidden;
    uint64_t bytes;
};

/* Fills *ret; -EOVERFLOW or -EINVAL when a dimension is 0 or the sum does not fit. */
int step_io_layout(const struct step_shape *shape, struct step_io *ret, struct error *err);

#endif
