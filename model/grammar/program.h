/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Program bytes, all numbers little-endian u32 but where noted:
 *
 *   magic "EGR1"; rules; states; byte edges; call edges; bytes in all; 0; 0
 *   [rules + 1]       first state of each rule: its start
 *   [states + 1]      first byte edge of each state
 *   [states + 1]      first call edge of each state
 *   [states, padded]  u8: 1 when the rule may end here
 *   [byte edges]      to; u8 lo; u8 hi; u16 0       by state, by lo, not overlapping
 *   [call edges]      rule; min; max; to            the rule min to max times, then `to`
 *
 * Edges stay within a rule. Rule 0 is the root, which nobody calls. No other rule ends at its start
 * (the empty text is no part of any), and the calls at a rule's start name later rules only, so
 * that no rule begins with itself.
 */
#ifndef EMBER_MODEL_GRAMMAR_PROGRAM_H
#define EMBER_MODEL_GRAMMAR_PROGRAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define PROGRAM_MAGIC 0x31524745u /* "EGR1" */
#define PROGRAM_HEADER 8          /* words */

struct program_edge {
    uint32_t to;
    uint8_t lo, hi;
    uint16_t zero;
};
struct program_call {
    uint32_t rule, min, max, to;
};

/* Points into the bytes. */
struct program {
    uint32_t n_rules, n_states, n_edges, n_calls;
    const uint32_t *rules, *edge_first, *call_first;
    const uint8_t *final;
    const struct program_edge *edges;
    const struct program_call *calls;
};

/* -EBADMSG: not a sound program. `bytes` is 8-byte aligned and outlives *ret. */
int program_check(const void *bytes, size_t len, struct program *ret, struct error *err);

#endif
