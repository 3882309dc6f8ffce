/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The reference op set: every op in plain scalar C, sums in double, written to be read beside
 * ember/op.h. Tests compare each backend's kernels with it; nothing else runs it.
 */
#ifndef EMBER_KERNELS_REF_H
#define EMBER_KERNELS_REF_H

#include <ember/op.h>

/*
 * Runs one op over arenas in host memory; arena[EMBER_ARENA_IO] starts with the step header that
 * bounds the rows. The op has passed plan_check or was made by a test: nothing is checked here. 0,
 * or -EINVAL for an unknown kind.
 */
int ref_op(const struct ember_op *op, void *const arena[EMBER_ARENA_COUNT]);

/* Element i (in elements, not bytes) of an array of dtype, as a double. */
double ref_load(const void *p, uint64_t i, enum ember_dtype dtype);
/* f16 and bf16 from float32, rounded to nearest even; for making test weights. */
uint16_t ref_to_f16(float x);
uint16_t ref_to_bf16(float x);

#endif
