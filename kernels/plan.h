/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans: what model/ makes for one bucket and graph.h captures.
 *
 * A plan is a list of ops (ember/op.h) over the five arenas, cut into segments: one for the
 * embedding, one for each layer, one for the head's probe (final norm and the logits of the first
 * few vocabulary entries) and one for the rest of the head. The canary runs some segments and not
 * others, so a segment's ops touch no scratch of another but what the embedding's segment wrote,
 * which therefore always runs: the residual stream and the rope tables.
 *
 * The builder half (plan_new .. plan_op) is for model/; the rest reads.
 */
#ifndef EMBER_KERNELS_PLAN_H
#define EMBER_KERNELS_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include <ember/op.h>

#include "base/digest.h"
#include "base/error.h"
#include "base/mem.h"
#include "kernels/step_io.h"

enum segment_kind { SEGMENT_EMBED, SEGMENT_LAYER, SEGMENT_HEAD_PROBE, SEGMENT_HEAD };

struct plan_segment {
    uint32_t kind;         /* enum segment_kind */
    uint32_t variant;      /* layers alike in every shape and attribute share a variant number */
    uint32_t first, count; /* its ops */
};

struct plan {
    struct step_io io;
    uint64_t arena_bytes[EMBER_ARENA_COUNT]; /* KV: bytes of one page; STATE: of one slot */
    uint32_t probe_rows;                     /* vocabulary entries the head's probe computes */
    /* Offset and width in scratch of the final-normed rows [R, D], which the canary digests too. */
    struct ember_tensor final_hidden;
    uint32_t n_segments, n_ops;
    struct plan_segment *segments;
    struct ember_op *ops;
    uint32_t cap_segments, cap_ops;
};

/* A plan with an IO layout and no ops. */
int plan_new(const struct step_shape *shape, struct plan **ret, struct error *err);
void plan_free(struct plan *plan);
DEFINE_CLEANUP(struct plan *, plan_free)

/* Scratch for a [rows, cols] tensor, 64-byte aligned, never reused by the plan itself. */
int plan_scratch(struct plan *plan, enum ember_dtype dtype, uint32_t rows, uint32_t cols,
                 struct ember_tensor *ret, struct error *err);

/* Opens the next segment; ops go to the one opened last. */
int plan_segment(struct plan *plan, enum segment_kind kind, uint32_t variant, struct error *err);

/* Appends a zeroed op of this kind and returns it for filling in; NULL when memory is short. */
struct ember_op *plan_op(struct plan *plan, enum ember_op_kind kind, enum ember_rows rows);

/* A view of columns [first, first + cols) of a rank-2 tensor. */
struct ember_tensor tensor_columns(struct ember_tensor t, uint32_t first, uint32_t cols);
/* A view of rows [first, first + rows) of a rank-2 or rank-1 tensor. */
struct ember_tensor tensor_rows(struct ember_tensor t, uint32_t first, uint32_t rows);
uint32_t dtype_size(enum ember_dtype dtype);
static inline bool dtype_is_float(uint8_t dtype)
{
    return dtype == EMBER_F32 || dtype == EMBER_F16 || dtype == EMBER_BF16;
}
/* Bytes of a K or V block [heads, slots, width] of a KV page, scales included. UINT64_MAX: it does
 * not fit. */
uint64_t kv_block_bytes(enum ember_dtype dtype, uint64_t heads, uint64_t slots, uint64_t width);
/* Parts that attention may cut a query's keys into when the page table has room for `keys`. */
uint32_t attention_parts(uint64_t keys);
const char *dtype_name(enum ember_dtype dtype);
const char *op_name(enum ember_op_kind kind);

/*
 * Checks every op: operands present, ranks, dtypes and dimensions agree, each inside its arena. A
 * plan that passes cannot make a kernel leave its arenas. -EINVAL names op, segment and operand.
 */
int plan_check(const struct plan *plan, struct error *err);

/* What the plan computes, as 128 bits: equal plans, equal digests, in any process. */
struct digest plan_digest(const struct plan *plan);

#endif
