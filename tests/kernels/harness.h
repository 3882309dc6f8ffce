/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One op over random operands, run by the reference and by CPU kernels.
 *
 * A case owns five arenas. Tensors are made in them one after another with gaps of noise between
 * them and, where it makes sense, between rows; a run works on a copy of all arenas, so that a
 * comparison sees every byte that a kernel wrote, the ones that it should not have written too.
 */
#ifndef EMBER_TESTS_KERNELS_HARNESS_H
#define EMBER_TESTS_KERNELS_HARNESS_H

#include <stdbool.h>
#include <stdint.h>

#include <ember/op.h>

#include "kernels/cpu/kernel.h"

struct arenas {
    char *data[EMBER_ARENA_COUNT];
    size_t len[EMBER_ARENA_COUNT];
};

struct kcase {
    struct ember_op op;
    struct arenas in;
    uint32_t out[3], n_out;      /* operands that the op writes */
    struct ember_tensor view[2]; /* what it writes otherwise, as [pages, elements]; rank 0: none */
    uint32_t ignored[2];         /* operands that the op may fill as it likes; 0: none */
    /* Rows of the operand a row of the op stands for; 0: not rowed. */
    uint32_t rows[EMBER_OP_TENSORS];
    float tolerance;       /* of the largest magnitude in the output */
    float tiles_tolerance; /* the same of variants that keep K and V in tiles; 0: as the others */
    uint32_t pages;        /* of K and V, for `convert` */
    bool same;             /* all variants give the same bits */
    /* Brings arenas into the form of a variant (`to`), and back. */
    void (*convert)(const struct kcase *c, enum cpu_isa isa, struct arenas *arenas, bool to);
};

/* A pseudo-random number below n; a float in -1..1; the seed is fixed for each test program. */
uint32_t rnd(uint32_t n);
float rnd_float(void);

void kcase_start(struct kcase *c, enum ember_op_kind kind, enum ember_rows rows, uint32_t n_rows);
void kcase_free(struct kcase *c);

/* Makes operand `slot`, filled with random floats scaled by `scale` (integer dtypes: zeros). */
struct ember_tensor *kcase_tensor(struct kcase *c, uint32_t slot, enum ember_arena arena,
                                  enum ember_dtype dtype, float scale, uint32_t rank, uint32_t d0,
                                  uint32_t d1, uint32_t d2);
/* A weight without gaps: rows of a matrix are filled up to `kept` of them. */
struct ember_tensor *kcase_packed(struct kcase *c, uint32_t slot, enum ember_dtype dtype,
                                  float scale, uint32_t rank, uint32_t d0, uint32_t d1, uint32_t d2,
                                  uint32_t kept);
/* Where row `row` of an operand is in the case's own arenas. */
void *kcase_row(struct kcase *c, uint32_t slot, uint32_t row);
/* Names an output; `rows` as for kcase.rows. */
void kcase_rows(struct kcase *c, uint32_t slot, uint32_t rows);
void kcase_out(struct kcase *c, uint32_t slot, uint32_t rows);

/* Lowers and runs over a copy; fn NULL: the ahead-of-time kernel of isa; n_blocks 0: what lowering
 * chose. */
void kcase_run(const struct kcase *c, const struct ember_op *op, enum cpu_isa isa, cpu_kernel_fn fn,
               uint32_t n_blocks, struct arenas *ret);
/* The same of `first`, and of `second` behind it. */
void kcase_chain(const struct kcase *c, const struct ember_op *first, const struct ember_op *second,
                 enum cpu_isa isa, uint32_t n_blocks, struct arenas *ret);
void arenas_free(struct arenas *a);

/*
 * The whole check of a case on every ISA that this processor has: against the reference, for
 * several block counts, and each row alone. Fails the running cmocka test with `what` in the text.
 */
void kcase_check(struct kcase *c, const char *what);

/* The kernel and specialisation that an op lowers to on isa, whether this processor has it or not;
 * of several the last. */
void kcase_launch(const struct ember_op *op, enum cpu_isa isa, char kernel[32], char spec[96]);

#endif
