/* SPDX-License-Identifier: Apache-2.0 */
/* What is asked of an operand or an attribute, whatever its op. */
#include "kernels/plan_check/internal.h"

#include <stdarg.h>
#include <stdio.h>

void check_fail(struct check *c, const char *format, ...)
{
    va_list ap;
    if (c->failed)
        return;
    c->failed = 1;
    va_start(ap, format);
    vsnprintf(c->what, sizeof c->what, format, ap);
    va_end(ap);
}

/* Bytes from a tensor's offset to behind its last element; false when that overflows. */
static bool extent(const struct ember_tensor *t, uint64_t *ret)
{
    uint64_t row = dtype_size(t->dtype), last;
    for (int d = t->rank == 1 ? 0 : 1; d < t->rank; d++)
        if (!size_mul(row, t->dim[d], &row))
            return false;
    if (t->rank == 1) {
        *ret = row;
        return true;
    }
    if (t->row_stride < row && t->dim[0] > 1)
        return false;
    return size_mul(t->row_stride, t->dim[0] - 1, &last) && size_add(last, row, ret);
}

static void check_access(struct check *c, const char *name, const struct ember_tensor *t,
                         enum access access)
{
    uint8_t a = t->arena;
    if (access == WEIGHT && a != EMBER_ARENA_WEIGHTS)
        check_fail(c, "%s is not in the weights arena", name);
    else if (access != WEIGHT && a == EMBER_ARENA_WEIGHTS)
        check_fail(c, "%s is an activation but in the weights arena", name);
    else if (access != WEIGHT && a != EMBER_ARENA_SCRATCH && a != EMBER_ARENA_IO)
        check_fail(c, "%s is in arena %u, not in scratch or IO", name, a);
    else if ((access == OUT || access == INOUT) && a == EMBER_ARENA_IO &&
             t->offset < c->plan->io.inputs_end)
        check_fail(c, "%s would write over the step's inputs", name);
}

void check_place(struct check *c, const char *name, const struct ember_tensor *t)
{
    uint64_t bytes = 0, end;
    if (t->arena >= EMBER_ARENA_COUNT || t->dtype >= EMBER_DTYPE_COUNT || t->rank > 3 ||
        t->reserved) {
        check_fail(c, "%s has arena %u, dtype %u, rank %u", name, t->arena, t->dtype, t->rank);
        return;
    }
    for (int d = 0; d < t->rank; d++)
        if (t->dim[d] == 0 || t->dim[d] > DIM_MAX) {
            check_fail(c, "%s has dimension %d of %u", name, d, t->dim[d]);
            return;
        }
    if (t->offset % dtype_size(t->dtype) || t->row_stride % dtype_size(t->dtype))
        check_fail(c, "%s is not aligned to its elements", name);
    else if (!extent(t, &bytes) || !size_add(t->offset, bytes, &end) ||
             end > c->plan->arena_bytes[t->arena])
        check_fail(c, "%s at %llu, row stride %llu, ends outside its arena of %llu bytes", name,
                   (unsigned long long)t->offset, (unsigned long long)t->row_stride,
                   (unsigned long long)c->plan->arena_bytes[t->arena]);
}

void check_operand(struct check *c, int slot, const char *name, enum access access, int rank,
                   uint64_t rows, uint64_t cols, uint64_t third)
{
    const struct ember_tensor *t = &c->op->t[slot];
    if (c->failed)
        return;
    if (t->rank != rank) {
        check_fail(c, "%s has rank %u, not %d", name, t->rank, rank);
        return;
    }
    check_place(c, name, t);
    check_access(c, name, t, access);
    if (c->failed)
        return;
    if (access == WEIGHT ? t->dim[0] != rows : t->dim[0] < rows)
        check_fail(c, "%s has %u rows, not %llu", name, t->dim[0], (unsigned long long)rows);
    else if (rank > 1 && t->dim[1] != cols)
        check_fail(c, "%s has %u columns, not %llu", name, t->dim[1], (unsigned long long)cols);
    else if (rank > 2 && t->dim[2] != third)
        check_fail(c, "%s has a third dimension of %u, not %llu", name, t->dim[2],
                   (unsigned long long)third);
}

void check_floats(struct check *c, int slot, const char *name, enum access access, uint64_t rows,
                  uint64_t cols)
{
    check_operand(c, slot, name, access, 2, rows, cols, 0);
    check_dtype(c, slot, name, EMBER_F32);
}

void check_float_weight(struct check *c, int slot, const char *name, int rank, uint64_t rows,
                        uint64_t cols, uint64_t third)
{
    const struct ember_tensor *t = &c->op->t[slot];
    check_operand(c, slot, name, WEIGHT, rank, rows, cols, third);
    if (!c->failed && !dtype_is_float(t->dtype))
        check_fail(c, "%s is %s, not a float type", name, dtype_name(t->dtype));
    if (!c->failed && rank > 1 &&
        t->row_stride != (uint64_t)cols * (rank > 2 ? third : 1) * dtype_size(t->dtype))
        check_fail(c, "%s is not packed", name);
}

void check_index(struct check *c, int slot, const char *name, uint64_t rows, uint64_t offset)
{
    check_operand(c, slot, name, IN, 1, rows, 0, 0);
    check_dtype(c, slot, name, EMBER_I32);
    if (!c->failed && (c->op->t[slot].arena != EMBER_ARENA_IO || c->op->t[slot].offset != offset))
        check_fail(c, "%s is not the step's", name);
}

int64_t check_int(struct check *c, int slot, const char *name, int64_t min, int64_t max)
{
    int64_t v = c->op->i[slot];
    if (v < min || v > max) {
        check_fail(c, "%s is %lld, not within %lld..%lld", name, (long long)v, (long long)min,
                   (long long)max);
        return min > 0 ? min : 1; /* usable: the check goes on after the failure is noted */
    }
    return v;
}

bool check_overlap(const struct ember_tensor *a, const struct ember_tensor *b)
{
    uint64_t na = 0, nb = 0;
    if (!a->rank || !b->rank || a->arena != b->arena || !extent(a, &na) || !extent(b, &nb))
        return false;
    return a->offset < b->offset + nb && b->offset < a->offset + na;
}

void check_distinct(struct check *c, int out, int in_place)
{
    const struct ember_op *op = c->op;
    for (int s = 0; s < EMBER_OP_TENSORS && !c->failed; s++) {
        if (s == out || !check_overlap(&op->t[out], &op->t[s]))
            continue;
        if (s == in_place && op->t[s].offset == op->t[out].offset &&
            op->t[s].row_stride == op->t[out].row_stride)
            continue;
        check_fail(c, "operand %d lies over the output, operand %d", s, out);
    }
}

void check_dtype(struct check *c, int slot, const char *name, enum ember_dtype dtype)
{
    if (!c->failed && c->op->t[slot].dtype != dtype)
        check_fail(c, "%s is %s, not %s", name, dtype_name(c->op->t[slot].dtype),
                   dtype_name(dtype));
}

void check_x_tmp(struct check *c, int slot, const char *name, enum access access, uint64_t rows,
                 uint64_t k)
{
    const struct ember_tensor *t = &c->op->t[slot];
    check_operand(c, slot, name, access, 2, rows, EMBER_X_TMP_BYTES(k), 0);
    check_dtype(c, slot, name, EMBER_U8);
    if (!c->failed && (t->offset % EMBER_TILE_LINE || t->row_stride != EMBER_X_TMP_BYTES(k)))
        check_fail(c, "%s is not packed, or not aligned", name);
}
