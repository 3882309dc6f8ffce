/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the files of the reference op set: where operands stand, how many rows there are. */
#ifndef EMBER_KERNELS_REF_PRIVATE_H
#define EMBER_KERNELS_REF_PRIVATE_H

#include "kernels/ref/ref.h"

struct ref {
    const struct ember_op *op;
    void *const *arena;
    uint32_t rows;
};

static inline void *ref_base(const struct ref *r, uint32_t operand)
{
    const struct ember_tensor *t = &r->op->t[operand];
    return t->rank ? (char *)r->arena[t->arena] + t->offset : NULL;
}

/* Row `row` of an operand; NULL when it is absent. */
static inline void *ref_row(const struct ref *r, uint32_t operand, uint64_t row)
{
    char *base = ref_base(r, operand);
    return base ? base + row * r->op->t[operand].row_stride : NULL;
}

/* Element i of row `row` of a weight; `absent` when there is no such operand. */
static inline double ref_weight(const struct ref *r, uint32_t operand, uint64_t row, uint64_t i,
                                double absent)
{
    const void *p = ref_row(r, operand, row);
    return p ? ref_load(p, i, r->op->t[operand].dtype) : absent;
}

/* The operands of a dot product with a weight in any of its forms (ember/op.h, ember_quant). */
struct ref_quant {
    uint32_t x, x_scale, w, w_scale, w_zero;
    int64_t quant, group, layout;
    uint64_t K;
    int64_t x_group, x_terms; /* of an integer x */
};

/* Row n of matrix e of w [K]; where x is integers, its codes less their zero points. */
void ref_weights(const struct ref *r, const struct ref_quant *q, uint64_t e, uint64_t n,
                 double *ret);
/* Row x_row of x times that. */
double ref_dot(const struct ref *r, const struct ref_quant *q, uint64_t x_row, uint64_t e,
               uint64_t n, const double *w);

double ref_sigmoid(double x);
double ref_cap(double x, double cap);

void ref_rope_table(const struct ref *r);
void ref_split_norm_rope(const struct ref *r);
void ref_split_latent(const struct ref *r);
void ref_attention(const struct ref *r);
void ref_moe_route(const struct ref *r);
void ref_moe_linear(const struct ref *r);
void ref_moe_combine(const struct ref *r);

#endif
