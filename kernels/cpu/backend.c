/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPU as a device: memory is memory, a queue runs what is put into it at once, on the pool.
 * Only kernel_source, kernel_compile and the module slots may be called from several threads.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "base/mem.h"
#include "base/topology.h"
#include "kernels/backend.h"
#include "kernels/cpu/compile.h"
#include "kernels/cpu/limit.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/module.h"
#include "kernels/cpu/pool.h"
#include "kernels/cpu/variant.h"

struct ember_kernel {
    cpu_kernel_fn entry;
};

struct ember_device {
    enum cpu_isa isa;
    struct pool *pool;
    struct id_set nodes;          /* of memory that is this device's own */
    struct ember_kernel *kernels; /* as cpu_kernel_name() numbers them */
    struct compiler compiler;     /* path empty: not looked up yet */
    pthread_mutex_t lock;         /* guards compiler */
};

struct ember_memory {
    struct mapping map;
    bool writable;
};

struct ember_queue {
    struct pool *pool;
};

struct ember_module {
    struct module *object;
    struct ember_kernel kernel;
};

struct ember_native_graph {
    struct pool_launch *launches;
    uint64_t *words;
    uint64_t *ns; /* borrowed: where times go, or NULL */
    uint32_t count;
};

static int fail(struct ember_backend_error *error, int errnum, const char *text)
{
    snprintf(error->text, sizeof error->text, "%s", text);
    return -errnum;
}

/* A failure of ours as the ABI tells it. */
static int pass(struct ember_backend_error *error, int r, const struct error *err)
{
    snprintf(error->text, sizeof error->text, "%s", error_text(err));
    return r;
}

/* ---- device ---- */

static void cpu_device_close(struct ember_device *device)
{
    if (!device)
        return;
    pool_free(device->pool);
    free(device->kernels);
    pthread_mutex_destroy(&device->lock);
    free(device);
}
DEFINE_CLEANUP(struct ember_device *, cpu_device_close)

/* Threads and memory of an instance; see base/topology.h. */
static void place(struct ember_device *device, const struct ember_device_options *options)
{
    static const enum topology_pin pins[] = {[EMBER_PIN_NEVER] = TOPOLOGY_PIN_NEVER,
                                             [EMBER_PIN_AUTO] = TOPOLOGY_PIN_AUTO,
                                             [EMBER_PIN_ALWAYS] = TOPOLOGY_PIN_ALWAYS};
    _cleanup_(topology_freep) struct topology *topology = NULL;
    struct placement where;

    if (!options || options->pin == EMBER_PIN_NEVER || options->pin >= ARRAY_LEN(pins) ||
        !(topology = topology_host()))
        return;
    struct placement_options wanted = {.threads = pool_threads(device->pool),
                                       .place = options->place,
                                       .pin = pins[options->pin],
                                       .shared = cpu_limit_shared()};
    placement_choose(topology, &wanted, &where);
    device->nodes = where.memory;
    pool_place(device->pool, &where);
    placement_clear(&where);
}

static int cpu_device_open(const struct ember_device_options *options, struct ember_device **ret,
                           struct ember_backend_error *error)
{
    _cleanup_(cpu_device_closep) struct ember_device *device = NULL;
    enum cpu_isa isa;
    int r = cpu_variant_choose(options, &isa, error);

    if (r < 0)
        return r;
    if (options && options->index)
        return fail(error, ENODEV, "there is one CPU device, number 0");
    device = mem_alloc(1, sizeof *device);
    if (!device)
        return fail(error, ENOMEM, "no memory for a device");
    pthread_mutex_init(&device->lock, NULL);
    device->isa = isa;
    device->pool = pool_new(options ? options->threads : 0);
    device->kernels = mem_alloc(cpu_kernel_count(), sizeof *device->kernels);
    if (!device->pool || !device->kernels)
        return fail(error, ENOMEM, "no memory for a device");
    for (uint32_t i = 0; i < cpu_kernel_count(); i++)
        device->kernels[i].entry = cpu_kernel_lookup(cpu_kernel_name(i), isa);
    place(device, options);
    *ret = TAKE(device);
    return 0;
}

static void cpu_device_info(struct ember_device *device, struct ember_device_info *ret)
{
    memset(ret, 0, sizeof *ret);
    cpu_variant_describe(device->isa, "cpu", ret);
    cpu_variant_memory(ret);
    ret->threads = pool_threads(device->pool);
    ret->shares_host_memory = 1;
}

/* ---- memory ---- */

static int cpu_memory_alloc(struct ember_device *device, uint64_t bytes, struct ember_memory **ret,
                            struct ember_backend_error *error)
{
    struct ember_memory *memory = mem_alloc(1, sizeof *memory);
    struct error err = {0};
    int r = memory ? mapping_make(bytes, PROT_READ | PROT_WRITE, &memory->map, &err)
                   : error_set(&err, ENOMEM, "no memory for a handle");

    if (r < 0) {
        free(memory);
        return pass(error, r, &err);
    }
    memory->writable = true;
    memory_spread(memory->map.base, memory->map.length, &device->nodes);
    *ret = memory;
    return 0;
}

static int cpu_memory_import(struct ember_device *device, const struct ember_share *share,
                             struct ember_memory **ret, struct ember_backend_error *error)
{
    struct ember_memory *memory;
    struct error err = {0};
    int r;

    if (share->kind != EMBER_SHARE_FD && share->kind != EMBER_SHARE_FD_FILLING)
        return fail(error, ENOTSUP, "memory is shared as a file descriptor here, not as a handle");
    memory = mem_alloc(1, sizeof *memory);
    r = memory ? mapping_import(share->fd, share->bytes, PROT_READ,
                                share->kind == EMBER_SHARE_FD_FILLING, &memory->map, &err)
               : error_set(&err, ENOMEM, "no memory for a handle");
    if (r < 0) {
        free(memory);
        return pass(error, r, &err);
    }
    *ret = memory;
    return 0;
}

static void cpu_memory_free(struct ember_memory *memory)
{
    if (!memory)
        return;
    mapping_free(&memory->map);
    free(memory);
}

static uint64_t cpu_memory_address(struct ember_memory *memory)
{
    return (uintptr_t)memory->map.base;
}

/* ---- queue ---- */

static int cpu_queue_create(struct ember_device *device, struct ember_queue **ret,
                            struct ember_backend_error *error)
{
    struct ember_queue *queue = mem_alloc(1, sizeof *queue);

    if (!queue)
        return fail(error, ENOMEM, "no memory for a queue");
    queue->pool = device->pool;
    *ret = queue;
    return 0;
}

static void cpu_queue_free(struct ember_queue *queue)
{
    free(queue);
}

static int cpu_queue_sync(struct ember_queue *queue, struct ember_backend_error *error)
{
    return 0;
}

static int cpu_memory_prefetch(struct ember_memory *memory, uint64_t offset, uint64_t bytes)
{
    return mapping_populate(&memory->map, offset, bytes);
}

static bool within(const struct ember_memory *memory, uint64_t offset, uint64_t bytes)
{
    return offset <= memory->map.bytes && bytes <= memory->map.bytes - offset;
}

static int cpu_copy_in(struct ember_queue *queue, struct ember_memory *to, uint64_t to_offset,
                       const void *from, uint64_t bytes, struct ember_backend_error *error)
{
    if (!to->writable)
        return fail(error, EACCES, "a copy into imported memory, which is read-only");
    if (!within(to, to_offset, bytes))
        return fail(error, ERANGE, "a copy beyond the end of device memory");
    if (bytes)
        memcpy(to->map.base + to_offset, from, bytes);
    return 0;
}

static int cpu_copy_out(struct ember_queue *queue, void *to, struct ember_memory *from,
                        uint64_t from_offset, uint64_t bytes, struct ember_backend_error *error)
{
    if (!within(from, from_offset, bytes))
        return fail(error, ERANGE, "a copy from beyond the end of device memory");
    if (bytes)
        memcpy(to, from->map.base + from_offset, bytes);
    return 0;
}

/* ---- kernels ---- */

static int cpu_lower_op(struct ember_device *device, const struct ember_op *op, ember_emit_fn emit,
                        void *sink, struct ember_backend_error *error)
{
    return cpu_lower(device->isa, op, emit, sink, error);
}

static int cpu_kernel_find(struct ember_device *device, const char *name, struct ember_kernel **ret,
                           struct ember_backend_error *error)
{
    for (uint32_t i = 0; i < cpu_kernel_count(); i++) {
        if (!strcmp(name, cpu_kernel_name(i)) && device->kernels[i].entry) {
            *ret = &device->kernels[i];
            return 0;
        }
    }
    snprintf(error->text, sizeof error->text, "there is no kernel \"%.64s\"", name);
    return -ENOENT;
}

/* The blocks that a grid's grains are cut into; 0 when there are none, or too many. */
static uint32_t blocks_of(const struct pool *pool, const uint32_t grid[3])
{
    uint64_t plane = (uint64_t)grid[0] * grid[1], all;

    if (!size_mul(plane, grid[2], &all) || all > POOL_BLOCKS_MAX)
        return 0;
    return pool_blocks(pool, (uint32_t)all);
}

static int cpu_launch(struct ember_queue *queue, struct ember_kernel *kernel,
                      const uint32_t grid[3], const uint64_t *args, uint32_t n_args,
                      struct ember_backend_error *error)
{
    struct pool_launch launch = {kernel->entry, args, blocks_of(queue->pool, grid)};

    if (!launch.n_blocks)
        return fail(error, EINVAL, "a launch with an empty grid or more than 2^24 blocks");
    pool_run(queue->pool, &launch, 1);
    return 0;
}

/* ---- specialised kernels ---- */

static int find_compiler(struct ember_device *device, struct compiler *ret, struct error *err)
{
    int r = 0;

    pthread_mutex_lock(&device->lock);
    if (!*device->compiler.path)
        r = compiler_find(&device->compiler, err);
    if (r == 0)
        *ret = device->compiler;
    pthread_mutex_unlock(&device->lock);
    return r;
}

static int cpu_kernel_source(struct ember_device *device, const char *kernel, const char *spec,
                             struct ember_kernel_source *ret, struct ember_backend_error *error)
{
    struct ember_kernel_source source = {0};
    struct compiler compiler;
    struct error err = {0};
    int r = cpu_kernel_source_text(kernel, &source.text, &source.text_len);

    if (r == 0)
        r = cpu_kernel_options(kernel, device->isa, spec, source.options, sizeof source.options);
    if (r < 0) {
        snprintf(error->text, sizeof error->text, "no build of kernel \"%.32s\" for \"%.96s\"",
                 kernel, spec);
        return r;
    }
    r = find_compiler(device, &compiler, &err);
    if (r < 0)
        return pass(error, r, &err);
    snprintf(source.compiler, sizeof source.compiler, "%s", compiler.identity);
    *ret = source;
    return 0;
}

static int cpu_kernel_compile(struct ember_device *device, const struct ember_kernel_source *source,
                              void **ret_blob, size_t *ret_len, struct ember_backend_error *error)
{
    struct compiler compiler;
    struct error err = {0};
    int r = find_compiler(device, &compiler, &err);

    if (r == 0)
        r = compile_object(&compiler, source->text, source->text_len, source->options,
                           COMPILE_TIMEOUT_MS, ret_blob, ret_len, &err);
    return r < 0 ? pass(error, r, &err) : 0;
}

static int cpu_module_load(struct ember_device *device, const void *blob, size_t len,
                           struct ember_module **ret, struct ember_backend_error *error)
{
    struct ember_module *module = mem_alloc(1, sizeof *module);
    struct error err = {0};
    int r = module ? module_open(blob, len, &module->object, &err)
                   : error_set(&err, ENOMEM, "no memory for a module");

    if (r < 0) {
        free(module);
        return pass(error, r, &err);
    }
    *ret = module;
    return 0;
}

static int cpu_module_find(struct ember_module *module, const char *kernel,
                           struct ember_kernel **ret, struct ember_backend_error *error)
{
    struct error err = {0};
    int r = module_entry(module->object, kernel, &module->kernel.entry, &err);

    if (r < 0)
        return pass(error, r, &err);
    *ret = &module->kernel;
    return 0;
}

static void cpu_module_free(struct ember_module *module)
{
    if (!module)
        return;
    module_close(module->object);
    free(module);
}

/* ---- native graphs: launch lists that the pool walks by itself ---- */

static void cpu_graph_free(struct ember_native_graph *graph)
{
    if (!graph)
        return;
    free(graph->launches);
    free(graph->words);
    free(graph);
}
DEFINE_CLEANUP(struct ember_native_graph *, cpu_graph_free)

/* Arguments are copied: the caller's need not outlive the call. */
static int fill_graph(const struct pool *pool, struct ember_native_graph *graph,
                      struct ember_kernel *const *kernels, const uint32_t (*grids)[3],
                      const uint64_t *const *args, const uint32_t *n_args,
                      struct ember_backend_error *error)
{
    uint64_t *words = graph->words;

    for (uint32_t i = 0; i < graph->count; i++) {
        graph->launches[i] =
            (struct pool_launch){kernels[i]->entry, words, blocks_of(pool, grids[i])};
        if (!graph->launches[i].n_blocks)
            return fail(error, EINVAL, "a launch with an empty grid or more than 2^24 blocks");
        if (n_args[i])
            memcpy(words, args[i], n_args[i] * sizeof *words);
        words += n_args[i];
    }
    return 0;
}

static int cpu_graph_instantiate(struct ember_device *device, struct ember_kernel *const *kernels,
                                 const uint32_t (*grids)[3], const uint64_t *const *args,
                                 const uint32_t *n_args, uint32_t n_launches,
                                 struct ember_native_graph **ret, struct ember_backend_error *error)
{
    _cleanup_(cpu_graph_freep) struct ember_native_graph *graph = mem_alloc(1, sizeof *graph);
    uint64_t n_words = 0;
    int r;

    for (uint32_t i = 0; i < n_launches; i++)
        n_words += n_args[i];
    if (!graph || !(graph->launches = mem_alloc(n_launches, sizeof *graph->launches)) ||
        !(graph->words = mem_alloc(n_words, sizeof *graph->words)))
        return fail(error, ENOMEM, "no memory for a graph");
    graph->count = n_launches;
    r = fill_graph(device->pool, graph, kernels, grids, args, n_args, error);
    if (r < 0)
        return r;
    *ret = TAKE(graph);
    return 0;
}

static int cpu_graph_launch(struct ember_queue *queue, struct ember_native_graph *graph,
                            uint32_t first, uint32_t count, struct ember_backend_error *error)
{
    if (first > graph->count || count > graph->count - first)
        return fail(error, ERANGE, "launches beyond the end of a graph");
    pool_run_timed(queue->pool, graph->launches + first, count,
                   graph->ns ? graph->ns + first : NULL);
    return 0;
}

static int cpu_graph_profile(struct ember_native_graph *graph, uint64_t *ns)
{
    graph->ns = ns;
    return 0;
}

const struct ember_backend *cpu_backend(void)
{
    static const struct ember_backend backend = {
        .abi_version = EMBER_BACKEND_ABI_VERSION,
        .struct_size = sizeof backend,
        .name = "cpu",
        .device_open = cpu_device_open,
        .device_close = cpu_device_close,
        .device_info = cpu_device_info,
        .memory_alloc = cpu_memory_alloc,
        .memory_import = cpu_memory_import,
        .memory_free = cpu_memory_free,
        .memory_address = cpu_memory_address,
        .queue_create = cpu_queue_create,
        .queue_free = cpu_queue_free,
        .queue_sync = cpu_queue_sync,
        .copy_in = cpu_copy_in,
        .copy_out = cpu_copy_out,
        .lower = cpu_lower_op,
        .kernel_find = cpu_kernel_find,
        .launch = cpu_launch,
        .kernel_source = cpu_kernel_source,
        .kernel_compile = cpu_kernel_compile,
        .module_load = cpu_module_load,
        .module_find = cpu_module_find,
        .module_free = cpu_module_free,
        .graph_instantiate = cpu_graph_instantiate,
        .graph_launch = cpu_graph_launch,
        .graph_free = cpu_graph_free,
        .memory_prefetch = cpu_memory_prefetch,
        .graph_profile = cpu_graph_profile,
    };
    return &backend;
}
