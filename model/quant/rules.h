/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which matrices are quantised while a checkpoint is loaded, and how. As text, which is what
 * travels from emberctl to the loader:
 *
 *   q8 | q4           the first line: what becomes of every eligible matrix
 *   keep=PATTERN      further lines, the first that matches decides:
 *   q8=PATTERN        a tensor whose resident name (layers.3.qkv) or one of whose names in the
 *   q4=PATTERN        checkpoint (model.layers.3.self_attn.q_proj.weight) has a match of PATTERN, a
 *                     regular expression (PCRE2)
 *
 * Under q4 the head becomes q8, and an embedding that is the head as well, since their error goes
 * straight into the logits; and so do matrices of fewer than 2^19 values: in a large model they are
 * a small part of the bytes, and a model that has no larger ones has none to spare.
 */
#ifndef EMBER_MODEL_QUANT_RULES_H
#define EMBER_MODEL_QUANT_RULES_H

#include "base/error.h"
#include "base/mem.h"

/* X(id, word) */
#define QUANTIZE_KINDS(X)                                                                          \
    X(QUANTIZE_KEEP, "keep")                                                                       \
    X(QUANTIZE_Q8, "q8")                                                                           \
    X(QUANTIZE_Q4, "q4")

enum quantize_kind {
#define X(id, word) id,
    QUANTIZE_KINDS(X)
#undef X
        QUANTIZE_KIND_COUNT
};

#define QUANTIZE_TEXT_MAX 8192 /* bytes of a text of rules */

struct quantize_rules;

/* -EINVAL: a line that is none of these, a pattern that does not compile; the text says which. */
int quantize_rules_parse(const char *text, struct quantize_rules **ret, struct error *err);
void quantize_rules_free(struct quantize_rules *rules);
DEFINE_CLEANUP(struct quantize_rules *, quantize_rules_free)

/* What the first line says. */
enum quantize_kind quantize_rules_default(const struct quantize_rules *rules);
/* What the first line that matches the name says, `otherwise` when there is none. *ret_asked is the
 * number of that line, 0 when there is none. */
enum quantize_kind quantize_rules_choose(const struct quantize_rules *rules, const char *name,
                                         enum quantize_kind otherwise, uint32_t *ret_asked);
/* How many lines with patterns there are, and the text of line i from 1 on. */
uint32_t quantize_rules_count(const struct quantize_rules *rules);
const char *quantize_rules_text(const struct quantize_rules *rules, uint32_t i);

#endif
