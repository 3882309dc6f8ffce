/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the bench of kernels: items.c makes the ops that are measured, device.c runs one and
 * measures the machine, bench.c makes rows of both.
 */
#ifndef EMBER_KERNELS_BENCH_INTERNAL_H
#define EMBER_KERNELS_BENCH_INTERNAL_H

#include "kernels/backend.h"
#include "kernels/bench.h"
#include "kernels/plan.h"
#include "kernels/step_io.h"

/* ---- items.c ---- */

#define CONTEXT 512 /* keys of a sequence */
#define IO_TURNS 64 /* tables of experts, so that those of few rows come from memory, too */

struct model {
    const char *name;
    uint32_t hidden, inter, q_heads, kv_heads, dk, vocab, layers;
    uint32_t experts, topk; /* not 0: only what a mixture of experts has of its own is measured */
};

extern const struct model bench_models[]; /* up to one whose name is NULL */

/* One op to be measured. */
struct item {
    const struct model *model;
    char what[40];
    struct ember_op op;
    double bytes, flops;
    uint64_t weight_bytes; /* of the operand that rotates, 0: none */
    uint64_t io_bytes;     /* of IO_TURNS tables of experts that rotate, each; 0: none */
    uint64_t used[EMBER_ARENA_COUNT];
    uint32_t rows;
    char spec[96]; /* what a specialised build would fix */
    enum { RATE_FMA, RATE_BF16, RATE_INT8 } rate;
};

/* Item number i of a model; false when there are no more. */
bool bench_item(struct item *item, const struct model *m, uint32_t i);

/* ---- device.c ---- */

#define MAX_ARGS 64
#define MAX_LAUNCHES 4

struct bench {
    const struct ember_backend *backend;
    const struct kernels_bench_options *options;
    struct ember_device *device;
    struct ember_queue *queue;
    struct ember_memory *memory[EMBER_ARENA_COUNT];
    uint64_t bytes[EMBER_ARENA_COUNT];
    struct kernels_bench_machine machine;
    kernels_bench_fn row;
    void *user;
    struct error *err;
};

/* A launch with its arguments kept. */
struct launch {
    char kernel[32], spec[96];
    uint32_t grid[3], n_args;
    struct ember_launch_arg args[MAX_ARGS];
};

/* What an op lowers to. */
struct launches {
    struct launch list[MAX_LAUNCHES];
    struct ember_kernel *kernels[MAX_LAUNCHES];
    uint32_t n;
};

/* The backend's error as ours; returns a negative errno. */
static inline int bench_failed(struct bench *b, int r, const struct ember_backend_error *error)
{
    return backend_fail(b->backend, r, error, b->err);
}

/* Makes an arena at least so large, filled with noise. */
int bench_arena(struct bench *b, enum ember_arena arena, uint64_t bytes);

/* Integers of the IO arena: rows, positions 0.. or the last, one sequence, page i at i, expert ids.
 */
int bench_fill_io(struct bench *b, const struct item *item);

/* Takes down a launch of `sink`, a struct launches: what the backend's lower calls. */
int bench_take_launch(void *sink, const struct ember_launch *from);

/*
 * Nanoseconds an op takes, over `repeat` of them, each with the weights `step` bytes further and
 * the experts io_step; *turn counts on from call to call. spec, if not NULL, stands for the last
 * kernel.
 */
int bench_sample(struct bench *b, const struct launches *op, struct ember_kernel *spec,
                 uint64_t step, uint64_t io_step, uint32_t *turn, uint32_t repeat, double *ret_ns);

/* The machine's own rates to b->machine, the best seen so far: called again before each model,
 * since somebody else may be using the machine now. */
int bench_machine(struct bench *b);

#endif
