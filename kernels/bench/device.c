/* SPDX-License-Identifier: Apache-2.0 */
/* An op on the device: memory with something in it, its launches, how long they take. */
#include "kernels/bench/internal.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"

int bench_arena(struct bench *b, enum ember_arena arena, uint64_t bytes)
{
    struct ember_backend_error error = {""};
    if (b->memory[arena] && b->bytes[arena] >= bytes)
        return 0;
    if (b->memory[arena])
        b->backend->memory_free(b->memory[arena]);
    b->memory[arena] = NULL;
    int r = b->backend->memory_alloc(b->device, bytes, &b->memory[arena], &error);
    if (r)
        return bench_failed(b, r, &error);
    b->bytes[arena] = bytes;
    _cleanup_free_ uint32_t *noise = mem_alloc(1 << 18, sizeof(*noise));
    if (!noise)
        return error_set(b->err, ENOMEM, "no memory for a MiB of noise");
    for (uint32_t i = 0, x = 1; i < 1 << 18; i++, x = x * 1664525 + 1013904223)
        noise[i] = 0x3d203d20 | /* two bf16, or one float, of magnitude about 1/32; no small FP8 */
                   (x >> 8 & 0x807f807f);
    for (uint64_t at = 0; !r && at < bytes; at += MIB)
        r = b->backend->copy_in(b->queue, b->memory[arena], at, noise, MIN(bytes - at, MIB),
                                &error);
    if (!r)
        r = b->backend->queue_sync(b->queue, &error);
    return r ? bench_failed(b, r, &error) : 0;
}

int bench_take_launch(void *sink, const struct ember_launch *from)
{
    struct launches *all = sink;
    if (from->n_args > MAX_ARGS || all->n == MAX_LAUNCHES)
        return -E2BIG;
    struct launch to = {.n_args = from->n_args};
    snprintf(to.kernel, sizeof(to.kernel), "%s", from->kernel);
    snprintf(to.spec, sizeof(to.spec), "%s", from->spec);
    memcpy(to.grid, from->grid, sizeof(to.grid));
    memcpy(to.args, from->args, from->n_args * sizeof(*to.args));
    all->list[all->n++] = to;
    return 0;
}

/* topk different experts for each row, of which each is as likely. */
static void fill_experts(int32_t *ids, size_t rows, uint32_t E, uint32_t topk)
{
    uint32_t seed = 1;
    for (size_t i = 0; i < rows * topk; i++) {
        bool taken;
        do {
            seed = seed * 1664525 + 1013904223;
            ids[i] = (int32_t)((uint64_t)(seed >> 8) * E >> 24);
            taken = false;
            for (size_t j = i - i % topk; j < i; j++)
                taken = taken || ids[j] == ids[i];
        } while (taken);
    }
}

int bench_fill_io(struct bench *b, const struct item *item)
{
    struct ember_backend_error error = {""};
    uint64_t bytes = item->op.kind == EMBER_OP_ARGMAX ? sizeof(struct ember_step_header)
                                                      : item->used[EMBER_ARENA_IO];
    _cleanup_free_ char *io = mem_alloc(1, bytes);
    if (!io)
        return error_set(b->err, ENOMEM, "no memory for %llu bytes", (unsigned long long)bytes);
    *(struct ember_step_header *)io =
        (struct ember_step_header){.n_tokens = item->rows, .n_seqs = 1, .n_rows = item->rows};
    for (uint32_t s = 0; s < EMBER_OP_TENSORS; s++) {
        const struct ember_tensor *t = &item->op.t[s];
        if (!t->rank || t->arena != EMBER_ARENA_IO || t->dtype != EMBER_I32 ||
            item->op.kind == EMBER_OP_ARGMAX)
            continue;
        uint32_t n = t->dim[0] * (t->rank > 1 ? t->dim[1] : 1);
        for (uint32_t i = 0; i < n; i++)
            ((int32_t *)(io + t->offset))[i] = (int32_t)i;
        if (item->op.kind == EMBER_OP_MOE_LINEAR)
            fill_experts((int32_t *)(io + t->offset), (size_t)IO_TURNS * t->dim[0],
                         item->op.t[MOE_W].dim[0], t->dim[1]);
        if (item->op.kind == EMBER_OP_ATTENTION && s == ATTN_SEQ_OF)
            memset(io + t->offset, 0, n * 4);
        if (item->op.kind == EMBER_OP_ATTENTION && s == ATTN_POSITIONS && item->rows == 1)
            *(int32_t *)(io + t->offset) = CONTEXT - 1;
    }
    int r = b->backend->copy_in(b->queue, b->memory[EMBER_ARENA_IO], 0, io, bytes, &error);
    if (!r)
        r = b->backend->queue_sync(b->queue, &error);
    return r ? bench_failed(b, r, &error) : 0;
}

/* One launch, with the weights `shift` bytes further, and what lies in IO behind the header
 * `io_shift`. */
static int launch_once(struct bench *b, const struct launch *launch, struct ember_kernel *kernel,
                       uint64_t shift, uint64_t io_shift, struct ember_backend_error *error)
{
    uint64_t args[MAX_ARGS];
    for (uint32_t a = 0; a < launch->n_args; a++) {
        const struct ember_launch_arg *arg = &launch->args[a];
        args[a] = arg->value;
        if (arg->arena >= 0 && b->memory[arg->arena])
            args[a] += b->backend->memory_address(b->memory[arg->arena]);
        if (arg->arena == EMBER_ARENA_WEIGHTS)
            args[a] += shift;
        if (arg->arena == EMBER_ARENA_IO && arg->value >= sizeof(struct ember_step_header))
            args[a] += io_shift;
    }
    return b->backend->launch(b->queue, kernel, launch->grid, args, launch->n_args, error);
}

int bench_sample(struct bench *b, const struct launches *op, struct ember_kernel *spec,
                 uint64_t step, uint64_t io_step, uint32_t *turn, uint32_t repeat, double *ret_ns)
{
    struct ember_backend_error error = {""};
    uint32_t turns = step ? (uint32_t)(b->bytes[EMBER_ARENA_WEIGHTS] / step) : 1;
    uint64_t start = clock_ns();
    int r = 0;
    for (uint32_t i = 0; !r && i < repeat; i++, ++*turn)
        for (uint32_t j = 0; !r && j < op->n; j++)
            r = launch_once(b, &op->list[j], spec && j + 1 == op->n ? spec : op->kernels[j],
                            *turn % turns * step, *turn % IO_TURNS * io_step, &error);
    if (!r)
        r = b->backend->queue_sync(b->queue, &error);
    if (r)
        return bench_failed(b, r, &error);
    *ret_ns = (double)(clock_ns() - start) / repeat;
    return 0;
}

static int measure(struct bench *b, const char *name, uint64_t amount, double *ret_ns)
{
    struct ember_backend_error error = {""};
    uint32_t turn = 0, blocks = b->machine.threads * 8;
    struct launches op = {.list = {{.grid = {blocks, 1, 1}, .n_args = 3}}, .n = 1};
    op.list[0].args[0].arena = EMBER_ARENA_WEIGHTS;
    op.list[0].args[1] = (struct ember_launch_arg){.value = amount, .arena = -1};
    op.list[0].args[2].arena = EMBER_ARENA_SCRATCH;
    int r = bench_arena(b, EMBER_ARENA_SCRATCH, 4ull * blocks);
    if (r)
        return r;
    if (b->backend->kernel_find(b->device, name, &op.kernels[0], &error))
        return error_set(b->err, ENOTSUP,
                         "%s backend: has no kernel %s to measure the machine with",
                         b->backend->name, name);
    *ret_ns = INFINITY;
    for (int i = 0; !r && i < 21; i++) {
        double ns = 0;
        r = bench_sample(b, &op, NULL, 0, 0, &turn, 1, &ns);
        *ret_ns = fmin(*ret_ns, ns);
    }
    return r;
}

/* The rate of a kernel that tells its multiply-adds a step and block; keeps the best. */
static int measure_rate(struct bench *b, const char *name, double *best)
{
    const uint64_t steps = 20000;
    struct ember_backend_error error = {""};
    float each = 0;
    double ns;
    int r = measure(b, name, steps, &ns);
    if (r)
        return r;
    r = b->backend->copy_out(b->queue, &each, b->memory[EMBER_ARENA_SCRATCH], 0, sizeof(each),
                             &error);
    if (!r)
        r = b->backend->queue_sync(b->queue, &error);
    if (r)
        return bench_failed(b, r, &error);
    *best = fmax(*best, (double)each * (double)steps * b->machine.threads * 8 / ns * 1e9);
    return 0;
}

int bench_machine(struct bench *b)
{
    struct ember_device_info info;
    double ns;
    b->backend->device_info(b->device, &info);
    snprintf(b->machine.device, sizeof(b->machine.device), "%s", info.name);
    b->machine.threads = MAX(info.threads, 1);
    int r = bench_arena(b, EMBER_ARENA_WEIGHTS, BENCH_MAX_BYTES);
    if (!r)
        r = measure(b, "measure_read", BENCH_MAX_BYTES, &ns);
    if (r)
        return r;
    b->machine.read_bytes_per_s =
        fmax(b->machine.read_bytes_per_s, (double)BENCH_MAX_BYTES / ns * 1e9);
    r = measure_rate(b, "measure_fma", &b->machine.flops_per_s);
    if (!r)
        r = measure_rate(b, "measure_bf16", &b->machine.bf16_per_s);
    return r ? r : measure_rate(b, "measure_int8", &b->machine.int8_per_s);
}
