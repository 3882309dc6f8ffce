/* SPDX-License-Identifier: Apache-2.0 */
/* The search of a group's scale, compiled once for each of two instruction sets: quantize.c alone
 * includes this. */
#ifndef EMBER_MODEL_QUANT_SEARCH_H
#define EMBER_MODEL_QUANT_SEARCH_H

#include <stdbool.h>
#include <stdint.h>

#define QUANTIZE_TRIES 16 /* two vectors of AVX2, four of SSE2 */

/* Candidates: codes are w * inverse rounded to nearest, within low..high. */
struct quantize_tries {
    float inverse[QUANTIZE_TRIES], low[QUANTIZE_TRIES], high[QUANTIZE_TRIES];
};

/* The sums over n values (a multiple of 8) of v w q and v q q of each candidate, in the order of
 * the values; v = w w + their mean is what an error of a value counts. */
typedef void quantize_sums_fn(const float *w, uint32_t n, const struct quantize_tries *tries,
                              float wq[QUANTIZE_TRIES], float qq[QUANTIZE_TRIES]);
quantize_sums_fn quantize_sums_plain, quantize_sums_avx2;

/* The lowest and the highest of n values (a multiple of 8) and 0; false when one is not finite. */
typedef bool quantize_range_fn(const float *w, uint32_t n, float *ret_low, float *ret_high);
quantize_range_fn quantize_range_plain, quantize_range_avx2;

/* Codes of n values (a multiple of 32): w * inverse rounded to nearest even, within low..high, less
 * `low` when they are of 4 bits. */
typedef void quantize_codes_fn(const float *w, uint32_t n, float inverse, float low, float high,
                               uint8_t *codes);
quantize_codes_fn quantize_codes8_plain, quantize_codes8_avx2;
quantize_codes_fn quantize_codes4_plain, quantize_codes4_avx2;

#endif
