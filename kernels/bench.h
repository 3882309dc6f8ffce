/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measuring kernels: each specialised against not, and against what the machine can do at most.
 *
 * Runs over any backend that has the specialisation slots; the shapes are those of ember-tiny and
 * of Qwen3 0.6B, 1.7B and 4B with random weights, and the experts of a layer of 30B-A3B. Weights
 * rotate through memory the size of the model (at most BENCH_MAX_BYTES), so that small models stay
 * in cache as they would and large ones come from memory; rows choose experts at random, others in
 * each turn.
 */
#ifndef EMBER_KERNELS_BENCH_H
#define EMBER_KERNELS_BENCH_H

#include <ember/backend.h>

#include "base/error.h"

#define BENCH_MAX_BYTES (UINT64_C(512) << 20)

struct kernels_bench_options {
    const char *model;  /* "tiny", "0.6B", "1.7B", "4B", "30B-A3B"; NULL: all */
    const char *kernel; /* only kernels whose name begins so; NULL: all */
    uint32_t threads;   /* 0: what the device takes by itself */
    uint32_t pairs;     /* pairs of runs a row, 0: 31 */
    const char *isa;    /* as in struct ember_device_options */
};

struct kernels_bench_row {
    const char *model, *what; /* "0.6B", "gate_up 1 row" */
    char kernel[32], spec[96];
    int specialised;        /* whether lowering asks for this specialisation */
    double aot_ns, spec_ns; /* medians; spec_ns 0: could not be compiled */
    double gain; /* median over the pairs of 1 - spec / aot; >= 0.03 earns a specialisation */
    double bytes, flops; /* read at least; multiply-adds counted twice */
    double bandwidth,
        peak; /* of the faster one: fractions of read_bytes_per_s and of the op's own rate */
};

struct kernels_bench_machine {
    char device[64];
    uint32_t threads;
    double read_bytes_per_s;       /* measured in this run over BENCH_MAX_BYTES, best so far */
    double flops_per_s;            /* FMAs in registers, counted twice */
    double bf16_per_s, int8_per_s; /* the same of what weights in tiles are multiplied with */
};

/* Called once before the first row with row NULL, then once a row. A non-zero return ends the run
 * and is passed back. */
typedef int (*kernels_bench_fn)(void *user, const struct kernels_bench_machine *machine,
                                const struct kernels_bench_row *row);

/*
 * Measures the machine alone, with the device's threads; *ret keeps the best of what it holds
 * already (zero it first) and of this run. -ENOTSUP as below.
 */
int kernels_bench_measure(const struct ember_backend *backend,
                          const struct kernels_bench_options *options,
                          struct kernels_bench_machine *ret, struct error *err);

/* -ENOTSUP: this backend has no kernel to measure the machine with. Rows whose kernel cannot be
 * compiled are still given. */
int kernels_bench(const struct ember_backend *backend, const struct kernels_bench_options *options,
                  kernels_bench_fn row, void *user, struct error *err);

#endif
