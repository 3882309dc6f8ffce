/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantising: rows of floats to the kept forms of ember/op.h (int8 and int4 with a scale for each
 * group of neighbours). Pure arithmetic: no file, no thread; the same bits on every processor.
 *
 * Nearest rounding at scale = max / 127 (or / 7) is not the best: a scale that clips the largest
 * value a little, or lets it fall between two codes, may leave a smaller error over the group. For
 * each group a grid of scales is tried. An error of a value w counts v = w^2 + the group's mean of
 * w^2: large weights matter more (by trial, docs/performance.md). For given codes q the best scale
 * in the least-squares sense is sum(v w q) / sum(v q q), and what it leaves is sum(v w w) - sum(v w
 * q)^2 / sum(v q q): so a candidate is worth sum(v w q)^2 / sum(v q q), which needs one pass over
 * the group and no second rounding. The winner's scale is rounded to f16 and the codes are those
 * nearest to it.
 */
#ifndef EMBER_MODEL_QUANT_QUANTIZE_H
#define EMBER_MODEL_QUANT_QUANTIZE_H

#include <stdint.h>

#include <ember/op.h>

struct quantize_form {
    uint8_t quant;  /* EMBER_QUANT_INT8 or EMBER_QUANT_INT4 */
    uint32_t group; /* values a scale covers: a multiple of 32 */
};

/*
 * Quantises a row of k floats; `w` has k rounded up to a multiple of 32 of them, zeros behind the
 * k. codes: as in ember/op.h, k (INT8) or 16 ceil(k / 32) (INT4) bytes; scales: f16, one a group.
 * -EDOM: a NaN or an infinity, -ERANGE: a value for which no f16 scale is large enough; what is
 * written then means nothing.
 */
int quantize_row(const struct quantize_form *form, const float *w, uint32_t k, uint8_t *codes,
                 uint16_t *scales);

/* What a quantised row stands for: k floats. */
void quantize_value(const struct quantize_form *form, const uint8_t *codes, const uint16_t *scales,
                    uint32_t k, float *to);

/* float32 to f16, to nearest even, too large is infinite; and back. */
uint16_t quantize_to_f16(float x);
float quantize_from_f16(uint16_t h);

#endif
