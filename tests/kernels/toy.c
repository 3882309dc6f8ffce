/* SPDX-License-Identifier: Apache-2.0 */
#include "toy.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "base/fd.h"
#include "kernels/backend.h"
#include "kernels/ref/ref.h"

static struct ember_tensor weight(struct toy *toy, uint32_t rank, uint32_t n, uint32_t k)
{
    struct ember_tensor t = {.arena = EMBER_ARENA_WEIGHTS,
                             .dtype = EMBER_F32,
                             .rank = (uint8_t)rank,
                             .dim = {n, rank == 2 ? k : 0, 0},
                             .offset = toy->weights_bytes,
                             .row_stride = rank == 2 ? k * 4 : 0};
    toy->weights_bytes = size_align(toy->weights_bytes + (uint64_t)n * (rank == 2 ? k : 1) * 4, 64);
    return t;
}

static struct ember_tensor scratch(struct toy *toy, uint32_t rows, uint32_t cols)
{
    struct ember_tensor t;
    assert_int_equal(plan_scratch(toy->plan, EMBER_F32, rows, cols, &t, NULL), 0);
    return t;
}

static struct ember_tensor io_ints(uint64_t offset, uint32_t n)
{
    return (struct ember_tensor){
        .arena = EMBER_ARENA_IO, .dtype = EMBER_I32, .rank = 1, .dim = {n, 0, 0}, .offset = offset};
}

static struct ember_op *op(struct toy *toy, enum ember_op_kind kind, enum ember_rows rows)
{
    struct ember_op *o = plan_op(toy->plan, kind, rows);
    assert_non_null(o);
    return o;
}

static void add_norm(struct toy *toy, enum ember_rows rows, struct ember_tensor x,
                     struct ember_tensor out)
{
    struct ember_op *o = op(toy, EMBER_OP_NORM, rows);
    o->t[NORM_X] = x;
    o->t[NORM_W] = weight(toy, 1, x.dim[1], 0);
    o->t[NORM_OUT] = out;
    o->f[NORM_F_EPS] = 1e-6;
}

static void add_linear(struct toy *toy, enum ember_rows rows, struct ember_tensor x,
                       struct ember_tensor out)
{
    struct ember_op *o = op(toy, EMBER_OP_LINEAR, rows);
    o->t[LINEAR_X] = x;
    o->t[LINEAR_W] = weight(toy, 2, out.dim[1], x.dim[1]);
    o->t[LINEAR_OUT] = out;
    o->f[LINEAR_F_SCALE] = 1;
}

static void add_layer(struct toy *toy, struct ember_tensor x)
{
    struct ember_tensor normed = scratch(toy, TOY_TOKENS, TOY_HIDDEN);
    struct ember_tensor wide = scratch(toy, TOY_TOKENS, 4 * TOY_HIDDEN);
    struct ember_tensor mid = scratch(toy, TOY_TOKENS, 2 * TOY_HIDDEN);
    struct ember_tensor delta = scratch(toy, TOY_TOKENS, TOY_HIDDEN);
    struct ember_op *o;

    add_norm(toy, EMBER_ROWS_TOKENS, x, normed);
    add_linear(toy, EMBER_ROWS_TOKENS, normed, wide);
    o = op(toy, EMBER_OP_GLU, EMBER_ROWS_TOKENS);
    o->t[GLU_X] = wide;
    o->t[GLU_OUT] = mid;
    o->i[GLU_I_ACT] = EMBER_ACT_SILU;
    add_linear(toy, EMBER_ROWS_TOKENS, mid, delta);
    o = op(toy, EMBER_OP_ADD, EMBER_ROWS_TOKENS);
    o->t[ADD_X] = x;
    o->t[ADD_DELTA] = delta;
    o->f[ADD_F_SCALE] = 1;
}

static void add_head(struct toy *toy, struct ember_tensor x)
{
    const struct step_io *io = &toy->plan->io;
    struct ember_tensor rows = scratch(toy, 2, TOY_HIDDEN), normed = scratch(toy, 2, TOY_HIDDEN);
    struct ember_tensor logits = {.arena = EMBER_ARENA_IO,
                                  .dtype = EMBER_F32,
                                  .rank = 2,
                                  .dim = {2, TOY_VOCAB, 0},
                                  .offset = io->logits,
                                  .row_stride = TOY_VOCAB * 4};
    struct ember_op *o = op(toy, EMBER_OP_GATHER, EMBER_ROWS_LOGITS);

    o->t[GATHER_X] = x;
    o->t[GATHER_INDEX] = io_ints(io->rows, 2);
    o->t[GATHER_OUT] = rows;
    add_norm(toy, EMBER_ROWS_LOGITS, rows, normed);
    add_linear(toy, EMBER_ROWS_LOGITS, normed, logits);
    o = op(toy, EMBER_OP_ARGMAX, EMBER_ROWS_LOGITS);
    o->t[ARGMAX_X] = logits;
    o->t[ARGMAX_OUT] = io_ints(io->sampled, 2);
}

static void fill(struct toy *toy, uint32_t seed)
{
    const struct step_io *io = &toy->plan->io;
    struct ember_step_header header = {.n_tokens = TOY_TOKENS - 1, .n_seqs = 1, .n_rows = 2};
    int32_t *tokens, *rows;
    uint64_t s = seed;

    toy->weights = x_alloc(toy->weights_bytes);
    for (uint64_t i = 0; i < toy->weights_bytes / 4; i++) {
        s = s * 6364136223846793005u + 1442695040888963407u;
        float f = (float)(int32_t)(s >> 32) / 2147483648.0f * 0.3f;
        memcpy(toy->weights + 4 * i, &f, 4);
    }
    toy->io = x_alloc(io->bytes);
    memcpy(toy->io, &header, sizeof header);
    tokens = (int32_t *)(toy->io + io->tokens);
    for (int i = 0; i < TOY_TOKENS; i++)
        tokens[i] = (int32_t)((seed + 37u * (uint32_t)i) % TOY_VOCAB);
    rows = (int32_t *)(toy->io + io->rows);
    rows[0] = 1;
    rows[1] = TOY_TOKENS - 2;
}

void toy_make(struct toy *toy, uint32_t seed)
{
    struct step_shape shape = {
        .tokens = TOY_TOKENS, .seqs = 1, .rows = 2, .pages = 1, .vocab = TOY_VOCAB};
    struct ember_tensor x;
    struct ember_op *o;
    struct error err = {0};

    memset(toy, 0, sizeof *toy);
    assert_int_equal(plan_new(&shape, &toy->plan, NULL), 0);
    assert_int_equal(plan_segment(toy->plan, SEGMENT_EMBED, 0, NULL), 0);
    x = scratch(toy, TOY_TOKENS, TOY_HIDDEN);
    o = op(toy, EMBER_OP_EMBED, EMBER_ROWS_TOKENS);
    o->t[EMBED_TOKENS] = io_ints(toy->plan->io.tokens, TOY_TOKENS);
    o->t[EMBED_TABLE] = weight(toy, 2, TOY_VOCAB, TOY_HIDDEN);
    o->t[EMBED_OUT] = x;
    o->f[EMBED_F_SCALE] = 1;
    for (int i = 0; i < TOY_LAYERS; i++) {
        assert_int_equal(plan_segment(toy->plan, SEGMENT_LAYER, 0, NULL), 0);
        add_layer(toy, x);
    }
    assert_int_equal(plan_segment(toy->plan, SEGMENT_HEAD, 0, NULL), 0);
    add_head(toy, x);
    toy->plan->arena_bytes[EMBER_ARENA_WEIGHTS] = toy->weights_bytes;
    toy->plan->final_hidden = x;
    if (plan_check(toy->plan, &err))
        fail_msg("%s", err.text);
    fill(toy, seed);
}

void toy_free(struct toy *toy)
{
    plan_free(toy->plan);
    free(toy->weights);
    free(toy->io);
}

char *toy_reference(const struct toy *toy)
{
    uint64_t io_bytes = toy->plan->io.bytes;
    char *io = x_alloc(io_bytes);
    _cleanup_free_ char *rest = x_alloc(toy->plan->arena_bytes[EMBER_ARENA_SCRATCH]);
    void *arena[EMBER_ARENA_COUNT] = {0};

    memcpy(io, toy->io, io_bytes);
    arena[EMBER_ARENA_WEIGHTS] = toy->weights;
    arena[EMBER_ARENA_SCRATCH] = rest;
    arena[EMBER_ARENA_IO] = io;
    for (uint32_t i = 0; i < toy->plan->n_ops; i++)
        assert_int_equal(ref_op(&toy->plan->ops[i], arena), 0);
    return io;
}

int sealed_memfd(const void *data, size_t len, unsigned seals)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(fd_write_all(fd, data, len, "test", NULL), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

void rig_open(struct rig *rig, const struct toy *toy, const char *backend, uint32_t threads)
{
    struct ember_device_options options = {.threads = threads};
    struct ember_backend_error e = {""};
    struct error err = {0};

    memset(rig, 0, sizeof *rig);
    if (backend_find(backend, &rig->backend, &err))
        fail_msg("%s", err.text);
    if (rig->backend->device_open(&options, &rig->device, &e) ||
        rig->backend->queue_create(rig->device, &rig->queue, &e))
        fail_msg("%s", e.text);
    for (int a = 0; a < EMBER_ARENA_COUNT; a++) {
        _cleanup_fd_ int fd = -1;
        int r;
        rig->size[a] = MAX(toy->plan->arena_bytes[a], 4096);
        if (a == EMBER_ARENA_WEIGHTS) {
            fd = sealed_memfd(toy->weights, toy->weights_bytes, F_SEAL_SHRINK | F_SEAL_WRITE);
            struct ember_share share = {EMBER_SHARE_FD, fd, {0}, toy->weights_bytes};
            rig->size[a] = toy->weights_bytes;
            r = rig->backend->memory_import(rig->device, &share, &rig->memory[a], &e);
        } else {
            r = rig->backend->memory_alloc(rig->device, rig->size[a], &rig->memory[a], &e);
        }
        if (r)
            fail_msg("%s", e.text);
        rig->base[a] = rig->backend->memory_address(rig->memory[a]);
    }
}

void rig_close(struct rig *rig)
{
    rig->backend->queue_free(rig->queue);
    for (int a = 0; a < EMBER_ARENA_COUNT; a++)
        rig->backend->memory_free(rig->memory[a]);
    rig->backend->device_close(rig->device);
}

void rig_kernels(struct rig *rig, const struct graph *graph, struct ember_kernel **ret)
{
    struct ember_backend_error e = {""};
    for (uint32_t i = 0; i < graph_kernel_count(graph); i++)
        if (rig->backend->kernel_find(rig->device, graph_kernel_at(graph, i)->name, &ret[i], &e))
            fail_msg("%s", e.text);
}

char *rig_run(struct rig *rig, const struct toy *toy, const struct graph *graph, bool by_segment)
{
    _cleanup_(graph_exec_freep) struct graph_exec *exec = NULL;
    struct ember_kernel *kernels[32];
    struct ember_memory *io = rig->memory[EMBER_ARENA_IO];
    uint64_t bytes = toy->plan->io.bytes;
    char *out = x_alloc(bytes);
    struct ember_backend_error e = {""};
    struct error err = {0};
    int r;

    assert_true(graph_kernel_count(graph) <= ARRAY_LEN(kernels));
    rig_kernels(rig, graph, kernels);
    if (graph_instantiate(graph, rig->backend, rig->device, rig->base, rig->size, kernels, &exec,
                          &err))
        fail_msg("%s", err.text);
    r = rig->backend->copy_in(rig->queue, io, 0, toy->io, bytes, &e);
    assert_int_equal(r, 0);
    for (uint32_t s = 0; by_segment && s < graph_segment_count(graph); s++)
        assert_int_equal(graph_exec_run_segment(exec, rig->queue, s, &err), 0);
    if (!by_segment)
        assert_int_equal(graph_exec_run(exec, rig->queue, &err), 0);
    assert_int_equal(rig->backend->copy_out(rig->queue, out, io, 0, bytes, &e), 0);
    if (rig->backend->queue_sync(rig->queue, &e))
        fail_msg("%s", e.text);
    return out;
}
