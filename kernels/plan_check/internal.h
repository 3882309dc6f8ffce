/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The checker of plans. Each kind has a function that states, operand by operand, what the op set
 * (ember/op.h) asks for. The first failure of an op is kept; later checks of it do nothing.
 *
 * In all of these `slot` is the operand's (or attribute's) place in the op, `name` what people
 * read.
 */
#ifndef EMBER_KERNELS_PLAN_CHECK_INTERNAL_H
#define EMBER_KERNELS_PLAN_CHECK_INTERNAL_H

#include "kernels/plan.h"

#define DIM_MAX (INT64_C(1) << 30)
#define HEADS_MAX (1 << 14)
#define HEAD_DIM_MAX (1 << 14)
#define PAGE_MAX (1 << 12)

struct check {
    const struct plan *plan;
    const struct ember_op *op;
    uint64_t n; /* rows that the op's count may reach */
    int failed;
    char what[160];
};

/* What an op does with an operand; WEIGHT: reads it in the weights arena. */
enum access { IN, WEIGHT, OUT, INOUT };

static inline bool check_absent(const struct check *c, int slot)
{
    return c->op->t[slot].rank == 0;
}

static inline uint32_t check_cols(const struct check *c, int slot)
{
    return c->op->t[slot].dim[1];
}

/* ---- operands.c ---- */

/* Keeps the first reason. */
void check_fail(struct check *c, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* What every present operand must satisfy, whatever its kind. */
void check_place(struct check *c, const char *name, const struct ember_tensor *t);

/* An operand of known rank; ROWS of its first dimension must be there, all of the others exact. */
void check_operand(struct check *c, int slot, const char *name, enum access access, int rank,
                   uint64_t rows, uint64_t cols, uint64_t third);

void check_dtype(struct check *c, int slot, const char *name, enum ember_dtype dtype);

/* Float32 activations [rows, cols]. */
void check_floats(struct check *c, int slot, const char *name, enum access access, uint64_t rows,
                  uint64_t cols);

/* Weights of a float dtype: [rows], [rows, cols] or [rows, cols, third], packed. */
void check_float_weight(struct check *c, int slot, const char *name, int rank, uint64_t rows,
                        uint64_t cols, uint64_t third);

/*
 * int32 step inputs. They are the very ones of the IO layout: whoever starts a step has checked
 * those, and no other bytes may be taken for indices.
 */
void check_index(struct check *c, int slot, const char *name, uint64_t rows, uint64_t offset);

/* An attribute within [min, max]; returns it, or one that the check may go on with. */
int64_t check_int(struct check *c, int slot, const char *name, int64_t min, int64_t max);

/* Rows of k values in the form of a backend's own products. */
void check_x_tmp(struct check *c, int slot, const char *name, enum access access, uint64_t rows,
                 uint64_t k);

bool check_overlap(const struct ember_tensor *a, const struct ember_tensor *b);

/* An output may not lie over an operand, but for the one named (the same tensor, in place; -1:
 * none). */
void check_distinct(struct check *c, int out, int in_place);

/* ---- product.c ---- */

/* Where the operands of a product stand in an op, and its attributes. A table has no x. */
struct weight_slots {
    int x, w, w_scale, w_zero, x_scale, x_tmp;
    int quant, group, layout, k, x_group, x_terms;
};

/* x [x_rows, k] and the weight [n, k] ([experts, n, k] when rank is 3) of a linear. */
void check_product(struct check *c, const struct weight_slots *s, uint64_t x_rows, int rank,
                   uint64_t experts, uint64_t n);

/*
 * Integers [rows, k] in one or two terms, and their scales, one a group (0: one a row). handed: in
 * the form of a backend's own products.
 */
void check_integers(struct check *c, int x, int scale, enum access access, bool handed,
                    uint64_t rows, uint64_t k, int64_t terms, int64_t group);

/* ---- flow.c ---- */

/* x of a linear and its other form (its scales) are what one op of the same segment put there last.
 */
void check_handed_over(struct check *c);

/* Expert ids index the weights, so they are what a router of the same segment put there last. */
void check_routed_ids(struct check *c);

/* ---- the kinds ---- */

void check_embed(struct check *c);
void check_linear(struct check *c);
void check_permute(struct check *c);
void check_quantize(struct check *c);

void check_rope_table(struct check *c);
void check_split_norm_rope(struct check *c);
void check_split_latent(struct check *c);
void check_attention(struct check *c);

void check_moe_route(struct check *c);
void check_moe_linear(struct check *c);
void check_moe_combine(struct check *c);

void check_norm(struct check *c);
void check_add(struct check *c);
void check_glu(struct check *c);
void check_act(struct check *c);
void check_gather(struct check *c);
void check_copy(struct check *c);
void check_argmax(struct check *c);

#endif
