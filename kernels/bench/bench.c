/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/bench/internal.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"

#define SAMPLE_NS 200000 /* a sample repeats its launch until about this long */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, uint32_t n)
{
    qsort(x, n, sizeof(*x), compare_doubles);
    return n % 2 ? x[n / 2] : 0.5 * (x[n / 2 - 1] + x[n / 2]);
}

/* The specialised kernel, or NULL when this machine cannot build it. */
static struct ember_module *build(struct bench *b, const char *kernel, const char *spec,
                                  struct ember_kernel **ret)
{
    struct ember_backend_error error = {""};
    struct ember_kernel_source source;
    struct ember_module *module = NULL;
    _cleanup_free_ void *blob = NULL;
    size_t len = 0;
    const struct ember_backend *be = b->backend;
    if (!*spec || !be->kernel_source || !be->kernel_compile || !be->module_load || !be->module_find)
        return NULL;
    if (be->kernel_source(b->device, kernel, spec, &source, &error) ||
        be->kernel_compile(b->device, &source, &blob, &len, &error) ||
        be->module_load(b->device, blob, len, &module, &error))
        return NULL;
    if (be->module_find(module, kernel, ret, &error)) {
        be->module_free(module);
        return NULL;
    }
    return module;
}

/* Pairs of samples, the order of each pair turned around every time. */
static int pairs(struct bench *b, const struct item *item, const struct launches *launches,
                 struct ember_kernel *spec, struct kernels_bench_row *row)
{
    uint32_t n = b->options->pairs ? b->options->pairs : 31, turn = 0;
    _cleanup_free_ double *times = mem_alloc(3 * (size_t)n, sizeof(*times));
    double once = 0, *of[2] = {times, times + n}, *gain = times + 2 * (size_t)n;
    if (!times)
        return error_set(b->err, ENOMEM, "no memory for %u samples", n);
    int r = bench_sample(b, launches, NULL, item->weight_bytes, item->io_bytes, &turn, 3, &once);
    uint32_t repeat = once >= SAMPLE_NS ? 1 : (uint32_t)(SAMPLE_NS / fmax(once, 50));
    for (uint32_t i = 0; !r && i < n; i++) {
        for (uint32_t j = 0; !r && j < 2; j++) {
            uint32_t which = (i + j) % 2;
            if (which == 0 || spec)
                r = bench_sample(b, launches, which ? spec : NULL, item->weight_bytes,
                                 item->io_bytes, &turn, repeat, &of[which][i]);
        }
        gain[i] = spec ? 1 - of[1][i] / of[0][i] : 0;
    }
    if (r)
        return r;
    row->gain = median(gain, n);
    row->aot_ns = median(of[0], n);
    row->spec_ns = spec ? median(of[1], n) : 0;
    return 0;
}

/* The rate that an op's kernel is held against. */
static double rate_of(const struct bench *b, const struct item *item)
{
    return item->rate == RATE_INT8   ? b->machine.int8_per_s
           : item->rate == RATE_BF16 ? b->machine.bf16_per_s
                                     : b->machine.flops_per_s;
}

static int run_item(struct bench *b, struct item *item)
{
    struct ember_backend_error error = {""};
    struct launches launches = {.n = 0};
    struct ember_kernel *spec = NULL;
    item->op.rows = EMBER_ROWS_TOKENS;
    int r = b->backend->lower(b->device, &item->op, bench_take_launch, &launches, &error);
    if (r)
        return bench_failed(b, r, &error);
    const struct launch *last = &launches.list[launches.n - 1];
    if (b->options->kernel && strncmp(last->kernel, b->options->kernel, strlen(b->options->kernel)))
        return 0;
    for (int a = 0; !r && a < EMBER_ARENA_COUNT; a++)
        if (item->used[a])
            r = bench_arena(b, a, item->used[a]);
    if (!r)
        r = bench_fill_io(b, item);
    if (r)
        return r;
    for (uint32_t i = 0; !r && i < launches.n; i++)
        r = b->backend->kernel_find(b->device, launches.list[i].kernel, &launches.kernels[i],
                                    &error);
    if (r)
        return bench_failed(b, r, &error);
    struct kernels_bench_row row = {.model = item->model->name,
                                    .what = item->what,
                                    .bytes = item->bytes,
                                    .flops = item->flops,
                                    .specialised = last->spec[0] != '\0'};
    snprintf(row.kernel, sizeof(row.kernel), "%s", last->kernel);
    snprintf(row.spec, sizeof(row.spec), "%s", item->spec);
    struct ember_module *module = build(b, last->kernel, item->spec, &spec);
    r = pairs(b, item, &launches, spec, &row);
    if (module && b->backend->module_free)
        b->backend->module_free(module);
    if (r)
        return r;
    double best = spec ? fmin(row.aot_ns, row.spec_ns) : row.aot_ns;
    row.bandwidth = row.bytes / best * 1e9 / b->machine.read_bytes_per_s;
    row.peak = row.flops / best * 1e9 / rate_of(b, item);
    return b->row(b->user, &b->machine, &row);
}

/* Weights for one model: its size, or as much as comes from memory anyway, or its largest operand.
 */
static int run_model(struct bench *b, const struct model *m)
{
    uint64_t layer =
        (2ull * m->q_heads + 2ull * m->kv_heads) * m->dk * m->hidden + 3ull * m->inter * m->hidden;
    uint64_t bytes = MIN(2 * (m->layers * layer + (uint64_t)m->vocab * m->hidden), BENCH_MAX_BYTES);
    struct item item;
    int r = bench_machine(b);
    if (r)
        return r;
    b->bytes[EMBER_ARENA_WEIGHTS] = 0; /* a smaller one than the last model's must shrink, too */
    r = bench_arena(b, EMBER_ARENA_WEIGHTS, bytes);
    for (uint32_t i = 0; !r && bench_item(&item, m, i); i++)
        r = run_item(b, &item);
    return r;
}

static int run_all(struct bench *b)
{
    int r = bench_machine(b);
    if (!r)
        r = b->row(b->user, &b->machine, NULL);
    for (const struct model *m = bench_models; !r && m->name; m++)
        if (!b->options->model || !strcmp(b->options->model, m->name))
            r = run_model(b, m);
    return r;
}

/* Runs `what` with an open device and ends it. */
static int with_device(struct bench *b, int (*what)(struct bench *b))
{
    struct ember_backend_error error = {""};
    struct ember_device_options device = {.threads = b->options->threads, .isa = b->options->isa};
    int r = b->backend->device_open(&device, &b->device, &error);
    if (r)
        return bench_failed(b, r, &error);
    r = b->backend->queue_create(b->device, &b->queue, &error);
    r = r ? bench_failed(b, r, &error) : what(b);
    if (b->queue)
        b->backend->queue_free(b->queue);
    for (int a = 0; a < EMBER_ARENA_COUNT; a++)
        if (b->memory[a])
            b->backend->memory_free(b->memory[a]);
    b->backend->device_close(b->device);
    return r;
}

int kernels_bench(const struct ember_backend *backend, const struct kernels_bench_options *options,
                  kernels_bench_fn row, void *user, struct error *err)
{
    struct bench b = {.backend = backend, .options = options, .row = row, .user = user, .err = err};
    return with_device(&b, run_all);
}

int kernels_bench_measure(const struct ember_backend *backend,
                          const struct kernels_bench_options *options,
                          struct kernels_bench_machine *ret, struct error *err)
{
    struct bench b = {.backend = backend, .options = options, .machine = *ret, .err = err};
    int r = with_device(&b, bench_machine);
    if (!r)
        *ret = b.machine;
    return r;
}
