/* SPDX-License-Identifier: Apache-2.0 */
#include "harness.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "kernels/ref/ref.h"

static uint64_t state = 0x9e3779b97f4a7c15;

uint32_t rnd(uint32_t n)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state >> 32) * n >> 32);
}

float rnd_float(void)
{
    return (float)((double)rnd(1u << 24) / (1 << 23) - 1);
}

static const uint8_t dtype_bytes[] = {
#define X(id, name, bytes) bytes,
    EMBER_DTYPES(X)
#undef X
};

void kcase_start(struct kcase *c, enum ember_op_kind kind, enum ember_rows rows, uint32_t n_rows)
{
    memset(c, 0, sizeof(*c));
    c->op.kind = (uint16_t)kind;
    c->op.rows = (uint16_t)rows;
    c->tolerance = 2e-6f;
    struct ember_step_header *header = x_alloc(sizeof(*header));
    *header = (struct ember_step_header){.n_tokens = rows == EMBER_ROWS_TOKENS ? n_rows : 0,
                                         .n_rows = rows == EMBER_ROWS_LOGITS ? n_rows : 0};
    c->in.data[EMBER_ARENA_IO] = (char *)header;
    c->in.len[EMBER_ARENA_IO] = sizeof(*header);
}

void arenas_free(struct arenas *a)
{
    for (int i = 0; i < EMBER_ARENA_COUNT; i++)
        free(a->data[i]);
    memset(a, 0, sizeof(*a));
}

void kcase_free(struct kcase *c)
{
    arenas_free(&c->in);
}

/* Grows an arena by n bytes of noise that reads as ordinary floats; returns where they begin. */
static size_t arena_grow(struct arenas *a, enum ember_arena arena, size_t n)
{
    size_t at = (a->len[arena] + 4 + 4 * rnd(8)) & ~(size_t)3;
    a->data[arena] = x_realloc(a->data[arena], at + n + 64);
    for (size_t i = a->len[arena] & ~(size_t)3; i + 4 <= at + n + 64; i += 4) {
        if (i < a->len[arena])
            continue;
        float noise = rnd_float();
        memcpy(a->data[arena] + i, &noise, 4);
    }
    a->len[arena] = at + n;
    return at;
}

static void store(void *p, enum ember_dtype dtype, float x)
{
    uint16_t half;
    int32_t zero = 0;
    switch (dtype) {
    case EMBER_F32:
        memcpy(p, &x, 4);
        break;
    case EMBER_F16:
        half = ref_to_f16(x);
        memcpy(p, &half, 2);
        break;
    case EMBER_BF16:
        half = ref_to_bf16(x);
        memcpy(p, &half, 2);
        break;
    default:
        memcpy(p, &zero, dtype_bytes[dtype]);
    }
}

struct ember_tensor *kcase_tensor(struct kcase *c, uint32_t slot, enum ember_arena arena,
                                  enum ember_dtype dtype, float scale, uint32_t rank, uint32_t d0,
                                  uint32_t d1, uint32_t d2)
{
    struct ember_tensor *t = &c->op.t[slot];
    uint64_t bytes = dtype_bytes[dtype],
             row = rank == 1 ? bytes : (uint64_t)d1 * bytes * (rank == 3 ? d2 : 1);
    uint64_t gap = rank == 2 ? 4 * rnd(4) : 0;
    *t = (struct ember_tensor){.arena = (uint8_t)arena,
                               .dtype = (uint8_t)dtype,
                               .rank = (uint8_t)rank,
                               .dim = {d0, rank > 1 ? d1 : 0, rank > 2 ? d2 : 0}};
    t->row_stride = rank == 1 ? 0 : row + gap;
    t->offset = arena_grow(&c->in, arena, (row + gap) * d0);
    for (uint64_t r = 0; r < d0; r++)
        for (uint64_t i = 0; i < row / bytes; i++)
            store(c->in.data[arena] + t->offset + r * (row + gap) + i * bytes, dtype,
                  rnd_float() * scale);
    return t;
}

struct ember_tensor *kcase_packed(struct kcase *c, uint32_t slot, enum ember_dtype dtype,
                                  float scale, uint32_t rank, uint32_t d0, uint32_t d1, uint32_t d2,
                                  uint32_t kept)
{
    struct ember_tensor *t = &c->op.t[slot];
    uint64_t bytes = dtype_bytes[dtype], cols = rank == 3 ? d2 : d1;
    uint64_t rows = rank == 3 ? (uint64_t)d0 * kept : kept;
    *t = (struct ember_tensor){.arena = EMBER_ARENA_WEIGHTS,
                               .dtype = (uint8_t)dtype,
                               .rank = (uint8_t)rank,
                               .dim = {d0, d1, rank == 3 ? d2 : 0},
                               .row_stride = cols * bytes * (rank == 3 ? kept : 1)};
    t->offset = arena_grow(&c->in, EMBER_ARENA_WEIGHTS, rows * cols * bytes);
    for (uint64_t i = 0; i < rows * cols; i++)
        store(c->in.data[EMBER_ARENA_WEIGHTS] + t->offset + i * bytes, dtype, rnd_float() * scale);
    return t;
}

void *kcase_row(struct kcase *c, uint32_t slot, uint32_t row)
{
    struct ember_tensor *t = &c->op.t[slot];
    uint64_t stride = t->rank == 1 ? dtype_bytes[t->dtype] : t->row_stride;
    return c->in.data[t->arena] + t->offset + row * stride;
}

void kcase_rows(struct kcase *c, uint32_t slot, uint32_t rows)
{
    c->rows[slot] = rows;
}

void kcase_out(struct kcase *c, uint32_t slot, uint32_t rows)
{
    c->rows[slot] = rows;
    c->out[c->n_out++] = slot;
}

/* ---- running ---- */

static struct arenas arenas_copy(const struct arenas *a)
{
    struct arenas copy = *a;
    for (int i = 0; i < EMBER_ARENA_COUNT; i++) {
        copy.data[i] = NULL;
        if (!a->len[i])
            continue;
        if (posix_memalign((void **)&copy.data[i], 64, a->len[i] + 64))
            fail_msg("no memory for %zu bytes", a->len[i]);
        memcpy(copy.data[i], a->data[i], a->len[i]);
    }
    return copy;
}

struct run_sink {
    struct arenas *arenas;
    enum cpu_isa isa;
    cpu_kernel_fn fn;
    uint32_t n_blocks;
};

static int run_launch(void *p, const struct ember_launch *launch)
{
    struct run_sink *sink = p;
    uint64_t args[64] = {0};
    assert_true(launch->n_args <= 64);
    for (uint32_t i = 0; i < launch->n_args; i++) {
        const struct ember_launch_arg *arg = &launch->args[i];
        args[i] = arg->value;
        if (arg->arena >= 0)
            args[i] += (uint64_t)(uintptr_t)sink->arenas->data[arg->arena];
    }
    cpu_kernel_fn fn = sink->fn ? sink->fn : cpu_kernel_lookup(launch->kernel, sink->isa);
    assert_non_null(fn);
    uint32_t n_blocks = sink->n_blocks ? sink->n_blocks : launch->grid[0];
    assert_int_equal(launch->grid[1] * launch->grid[2], 1);
    for (uint32_t b = n_blocks; b-- > 0;)
        fn(args, b, n_blocks);
    return 0;
}

void kcase_run(const struct kcase *c, const struct ember_op *op, enum cpu_isa isa, cpu_kernel_fn fn,
               uint32_t n_blocks, struct arenas *ret)
{
    struct ember_backend_error error = {""};
    *ret = arenas_copy(&c->in);
    struct run_sink sink = {ret, isa, fn, n_blocks};
    if (c->convert)
        c->convert(c, isa, ret, true);
    int r = cpu_lower(isa, op, run_launch, &sink, &error);
    if (r)
        fail_msg("lowering: %d %s", r, error.text);
    if (c->convert)
        c->convert(c, isa, ret, false);
}

void kcase_chain(const struct kcase *c, const struct ember_op *first, const struct ember_op *second,
                 enum cpu_isa isa, uint32_t n_blocks, struct arenas *ret)
{
    struct arenas between;
    kcase_run(c, first, isa, NULL, n_blocks, &between);
    struct kcase then = {.op = *second, .in = between};
    kcase_run(&then, second, isa, NULL, n_blocks, ret);
    arenas_free(&between);
}

struct launch_names {
    char *kernel, *spec;
};
static int note_names(void *p, const struct ember_launch *launch)
{
    struct launch_names *names = p;
    memcpy(names->kernel, launch->kernel, 32);
    memcpy(names->spec, launch->spec, 96);
    return 0;
}

void kcase_launch(const struct ember_op *op, enum cpu_isa isa, char kernel[32], char spec[96])
{
    struct ember_backend_error error = {""};
    struct launch_names names = {kernel, spec};
    assert_int_equal(cpu_lower(isa, op, note_names, &names, &error), 0);
}

/* ---- comparing ---- */

static uint64_t row_bytes(const struct ember_tensor *t)
{
    uint64_t bytes = dtype_bytes[t->dtype];
    return t->rank == 1 ? bytes : bytes * t->dim[1] * (t->rank == 3 ? t->dim[2] : 1);
}

static char *row_at(const struct arenas *a, const struct ember_tensor *t, uint64_t row)
{
    return a->data[t->arena] + t->offset +
           row * (t->rank == 1 ? dtype_bytes[t->dtype] : t->row_stride);
}

/* Output operand: close for floats, equal for integers. Then copies it from `want`, so that the
 * rest can be compared. */
static void compare_output(float tolerance, const struct ember_tensor *t, const struct arenas *want,
                           struct arenas *got, const char *what, const char *isa)
{
    double most = 0;
    uint64_t n = row_bytes(t) / dtype_bytes[t->dtype];
    for (uint32_t r = 0; r < t->dim[0]; r++)
        for (uint64_t i = 0; t->dtype == EMBER_F32 && i < n; i++)
            most = fmax(most, fabs(((float *)row_at(want, t, r))[i]));
    for (uint32_t r = 0; r < t->dim[0]; r++) {
        for (uint64_t i = 0; i < n; i++) {
            if (t->dtype != EMBER_F32) {
                uint64_t size = dtype_bytes[t->dtype];
                int32_t has = 0, wants = 0; /* I8: its bits */
                memcpy(&has, row_at(got, t, r) + i * size, size);
                memcpy(&wants, row_at(want, t, r) + i * size, size);
                if (has != wants)
                    fail_msg("%s (%s): row %u element %llu: %d, not %d", what, isa, r,
                             (unsigned long long)i, has, wants);
                continue;
            }
            float w = ((float *)row_at(want, t, r))[i], g = ((float *)row_at(got, t, r))[i];
            if (!(fabs((double)w - g) <= tolerance * most))
                fail_msg("%s (%s): row %u element %llu: %.9g, not %.9g (largest %.9g)", what, isa,
                         r, (unsigned long long)i, (double)g, (double)w, most);
        }
        memcpy(row_at(got, t, r), row_at(want, t, r), row_bytes(t));
    }
}

static void compare_bytes(const struct arenas *want, const struct arenas *got, const char *what,
                          const char *why)
{
    for (int a = 0; a < EMBER_ARENA_COUNT; a++)
        for (size_t i = 0; i < want->len[a]; i++)
            if (want->data[a][i] != got->data[a][i])
                fail_msg("%s: %s: arena %d byte %zu differs", what, why, a, i);
}

static void check_reference(const struct kcase *c, enum cpu_isa isa, const char *what)
{
    struct arenas want = arenas_copy(&c->in), got;
    const float tolerance =
        isa == CPU_ISA_AMX && c->tiles_tolerance > 0 ? c->tiles_tolerance : c->tolerance;
    assert_int_equal(ref_op(&c->op, (void *const *)want.data), 0);
    kcase_run(c, &c->op, isa, NULL, 0, &got);
    for (uint32_t i = 0; i < c->n_out; i++)
        compare_output(tolerance, &c->op.t[c->out[i]], &want, &got, what, cpu_isa_name(isa));
    for (uint32_t i = 0; i < ARRAY_LEN(c->view); i++)
        if (c->view[i].rank)
            compare_output(tolerance, &c->view[i], &want, &got, what, cpu_isa_name(isa));
    for (uint32_t i = 0; i < ARRAY_LEN(c->ignored); i++) {
        const struct ember_tensor *ignored = &c->op.t[c->ignored[i]];
        for (uint32_t row = 0; c->ignored[i] && row < ignored->dim[0]; row++)
            memcpy(row_at(&got, ignored, row), row_at(&want, ignored, row), row_bytes(ignored));
    }
    compare_bytes(&want, &got, what, "bytes beside the output");
    arenas_free(&want);
    arenas_free(&got);
}

static void check_blocks(const struct kcase *c, enum cpu_isa isa, const char *what)
{
    static const uint32_t counts[] = {1, 2, 3, 7, 64, 501};
    struct arenas want;
    kcase_run(c, &c->op, isa, NULL, 0, &want);
    for (size_t i = 0; i < ARRAY_LEN(counts); i++) {
        struct arenas got;
        kcase_run(c, &c->op, isa, NULL, counts[i], &got);
        compare_bytes(&want, &got, what, "another number of blocks");
        arenas_free(&got);
    }
    arenas_free(&want);
}

/* Row r alone, in a bucket of one: the operands that go by rows start at r. */
static void check_row(struct kcase *c, enum cpu_isa isa, uint32_t r, const struct arenas *batch,
                      const char *what)
{
    struct ember_op alone = c->op;
    struct ember_step_header *header = (void *)c->in.data[EMBER_ARENA_IO], saved = *header;
    for (uint32_t s = 0; s < EMBER_OP_TENSORS; s++) {
        struct ember_tensor *t = &alone.t[s];
        if (!c->rows[s] || !t->rank)
            continue;
        t->offset +=
            (uint64_t)r * c->rows[s] * (t->rank == 1 ? dtype_bytes[t->dtype] : t->row_stride);
        t->dim[0] = c->rows[s];
    }
    header->n_tokens = header->n_tokens ? 1 : 0;
    header->n_rows = header->n_rows ? 1 : 0;
    struct arenas got;
    kcase_run(c, &alone, isa, NULL, 0, &got);
    *header = saved;
    for (uint32_t i = 0; i < c->n_out; i++) {
        const struct ember_tensor *t = &alone.t[c->out[i]];
        for (uint32_t j = 0; c->rows[c->out[i]] && j < t->dim[0]; j++)
            if (memcmp(row_at(batch, t, j), row_at(&got, t, j), row_bytes(t)))
                fail_msg("%s (%s): row %u alone differs from the batch", what, cpu_isa_name(isa),
                         r);
    }
    arenas_free(&got);
}

static void check_rows(struct kcase *c, enum cpu_isa isa, const char *what)
{
    const struct ember_step_header *header = (const void *)c->in.data[EMBER_ARENA_IO];
    uint32_t n = header->n_tokens ? header->n_tokens : header->n_rows;
    struct arenas batch;
    kcase_run(c, &c->op, isa, NULL, 0, &batch);
    for (uint32_t r = 0; r < n; r++)
        check_row(c, isa, r, &batch, what);
    arenas_free(&batch);
}

/* The outputs of every variant, byte by byte. */
static void check_same(const struct kcase *c, enum cpu_isa isa, const char *what)
{
    struct arenas want, got;
    kcase_run(c, &c->op, CPU_ISA_BASELINE, NULL, 0, &want);
    kcase_run(c, &c->op, isa, NULL, 0, &got);
    for (uint32_t i = 0; i < c->n_out; i++) {
        const struct ember_tensor *t = &c->op.t[c->out[i]];
        for (uint32_t r = 0; r < t->dim[0]; r++)
            if (memcmp(row_at(&want, t, r), row_at(&got, t, r), row_bytes(t)))
                fail_msg("%s (%s): row %u differs from the baseline's", what, cpu_isa_name(isa), r);
    }
    arenas_free(&want);
    arenas_free(&got);
}

void kcase_check(struct kcase *c, const char *what)
{
    for (enum cpu_isa isa = 0; isa < CPU_ISA_COUNT; isa++) {
        if (!cpu_isa_supported(isa))
            continue;
        check_reference(c, isa, what);
        check_blocks(c, isa, what);
        check_rows(c, isa, what);
        if (c->same)
            check_same(c, isa, what);
    }
}
