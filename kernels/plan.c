/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/plan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define SCRATCH_ALIGN 64

int plan_new(const struct step_shape *shape, struct plan **ret, struct error *err)
{
    _cleanup_(plan_freep) struct plan *plan = mem_alloc(1, sizeof *plan);
    int r;
    if (!plan)
        return error_set(err, ENOMEM, "no memory for a plan");
    r = step_io_layout(shape, &plan->io, err);
    if (r < 0)
        return r;
    plan->arena_bytes[EMBER_ARENA_IO] = plan->io.bytes;
    *ret = TAKE(plan);
    return 0;
}

void plan_free(struct plan *plan)
{
    if (!plan)
        return;
    free(plan->segments);
    free(plan->ops);
    free(plan);
}

int plan_scratch(struct plan *plan, enum ember_dtype dtype, uint32_t rows, uint32_t cols,
                 struct ember_tensor *ret, struct error *err)
{
    uint64_t stride, bytes, end, start;
    start = size_align(plan->arena_bytes[EMBER_ARENA_SCRATCH], SCRATCH_ALIGN);
    if (!size_mul(cols, dtype_size(dtype), &stride) || !size_mul(stride, rows, &bytes) ||
        !size_add(start, bytes, &end) || end > INT64_MAX - SCRATCH_ALIGN)
        return error_set(err, EOVERFLOW, "scratch of %u rows of %u %s does not fit an arena", rows,
                         cols, dtype_name(dtype));
    *ret = (struct ember_tensor){.arena = EMBER_ARENA_SCRATCH,
                                 .dtype = dtype,
                                 .rank = 2,
                                 .dim = {rows, cols, 0},
                                 .offset = start,
                                 .row_stride = stride};
    plan->arena_bytes[EMBER_ARENA_SCRATCH] = size_align(end, SCRATCH_ALIGN);
    return 0;
}

/* Room for one more element in an array of 32-bit count and capacity. */
static bool grow(void **array, uint32_t count, uint32_t *cap, size_t size)
{
    uint32_t bigger = *cap ? *cap * 2 : 16;
    void *moved;
    if (count < *cap)
        return true;
    if (*cap > UINT32_MAX / 4)
        return false;
    moved = reallocarray(*array, bigger, size);
    if (!moved)
        return false;
    *array = moved;
    *cap = bigger;
    return true;
}

int plan_segment(struct plan *plan, enum segment_kind kind, uint32_t variant, struct error *err)
{
    if (!grow((void **)&plan->segments, plan->n_segments, &plan->cap_segments,
              sizeof *plan->segments))
        return error_set(err, ENOMEM, "no memory for segment %u of a plan", plan->n_segments);
    plan->segments[plan->n_segments++] =
        (struct plan_segment){.kind = kind, .variant = variant, .first = plan->n_ops};
    return 0;
}

struct ember_op *plan_op(struct plan *plan, enum ember_op_kind kind, enum ember_rows rows)
{
    struct ember_op *op;
    if (plan->n_segments == 0 ||
        !grow((void **)&plan->ops, plan->n_ops, &plan->cap_ops, sizeof *plan->ops))
        return NULL;
    op = &plan->ops[plan->n_ops++];
    *op = (struct ember_op){.kind = kind, .rows = rows, .segment = plan->n_segments - 1};
    plan->segments[plan->n_segments - 1].count++;
    return op;
}

struct ember_tensor tensor_columns(struct ember_tensor t, uint32_t first, uint32_t cols)
{
    t.offset += (uint64_t)first * dtype_size(t.dtype);
    t.dim[1] = cols;
    return t;
}

struct ember_tensor tensor_rows(struct ember_tensor t, uint32_t first, uint32_t rows)
{
    t.offset += (uint64_t)first * (t.rank == 1 ? dtype_size(t.dtype) : t.row_stride);
    t.dim[0] = rows;
    return t;
}

uint64_t kv_block_bytes(enum ember_dtype dtype, uint64_t heads, uint64_t slots, uint64_t width)
{
    uint64_t rows, bytes;

    if (!size_mul(heads, slots, &rows) || !size_mul(rows, width, &bytes) ||
        !size_mul(bytes, dtype_size(dtype), &bytes) || bytes > UINT64_MAX / 4)
        return UINT64_MAX;
    return dtype == EMBER_I8 ? size_align(bytes, 4) + rows * sizeof(float) : bytes;
}

uint32_t attention_parts(uint64_t keys)
{
    uint64_t parts = (keys + EMBER_ATTN_PART - 1) / EMBER_ATTN_PART;

    return (uint32_t)MIN(MAX(parts, 1u), (uint64_t)EMBER_ATTN_PARTS);
}

uint32_t dtype_size(enum ember_dtype dtype)
{
    switch (dtype) {
#define X(id, name, size)                                                                          \
    case id:                                                                                       \
        return size;
        EMBER_DTYPES(X)
#undef X
    default:
        return 0;
    }
}

const char *dtype_name(enum ember_dtype dtype)
{
    switch (dtype) {
#define X(id, name, size)                                                                          \
    case id:                                                                                       \
        return name;
        EMBER_DTYPES(X)
#undef X
    default:
        return "?";
    }
}

const char *op_name(enum ember_op_kind kind)
{
    switch (kind) {
#define X(id, name)                                                                                \
    case id:                                                                                       \
        return name;
        EMBER_OPS(X)
#undef X
    default:
        return "?";
    }
}

struct digest plan_digest(const struct plan *plan)
{
    struct digest_state *state = digest_begin();
    /* Everything that decides what is computed; capacities and pointers do not. Ops, segments and
     * the step shape have no padding. */
    digest_update_string(state, "plan 1");
    digest_update(state, &plan->io.shape, sizeof plan->io.shape);
    digest_update(state, plan->arena_bytes, sizeof plan->arena_bytes);
    digest_update(state, &plan->probe_rows, sizeof plan->probe_rows);
    digest_update(state, &plan->final_hidden, sizeof plan->final_hidden);
    digest_update(state, &plan->n_segments, sizeof plan->n_segments);
    digest_update(state, &plan->n_ops, sizeof plan->n_ops);
    if (plan->n_segments)
        digest_update(state, plan->segments, plan->n_segments * sizeof *plan->segments);
    if (plan->n_ops)
        digest_update(state, plan->ops, plan->n_ops * sizeof *plan->ops);
    return digest_end(state);
}

_Static_assert(sizeof(struct ember_tensor) == 32, "ops are digested as bytes");
_Static_assert(sizeof(struct ember_op) ==
                   8 + EMBER_OP_TENSORS * 32 + EMBER_OP_INTS * 8 + EMBER_OP_FLOATS * 8,
               "no padding in an op");
