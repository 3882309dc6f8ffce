/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The `fence` backend: the CPU's kernels behind a device that forgives nothing.
 *
 *   - Device memory is inaccessible (PROT_NONE) but while the queue's own thread works on commands:
 * a host that reads or writes through memory_address dies of SIGSEGV.
 *   - Nothing runs before queue_sync (or QUEUE_MAX commands): a host that uses a result early reads
 * poison, one that reuses the source of a copy early gets an error from queue_sync.
 *   - Freeing memory that queued commands may use aborts.
 *   - Blocks run in falling order, on one thread.
 *   - Only the mandatory slots.
 *
 * A queue has a thread; a device's memory list and the count of open windows are under its lock.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <ember/backend.h>

#include "base/digest.h"
#include "base/mem.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/variant.h"

#define QUEUE_MAX 65536
#define POISON 0xa5

struct ember_kernel {
    cpu_kernel_fn entry;
};

struct ember_device {
    enum cpu_isa isa;
    struct ember_kernel *kernels;
    pthread_mutex_t lock;
    struct ember_memory *memories;
    uint32_t windows; /* queues that have memory open */
    uint32_t queued;  /* commands of all queues not done yet */
};

struct ember_memory {
    struct ember_device *device;
    struct ember_memory *next, **link;
    struct mapping map;
    bool writable;
};

struct command {
    enum { COMMAND_IN, COMMAND_OUT, COMMAND_LAUNCH } kind;
    struct ember_memory *memory;
    uint64_t offset, bytes, checksum;
    const void *from;
    void *to;
    cpu_kernel_fn entry;
    uint32_t n_blocks;
    uint64_t *args;
};

struct ember_queue {
    struct ember_device *device;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct command *commands;
    uint32_t count;
    bool go, stop;
    struct ember_backend_error error; /* first one since the last sync */
    int failed;
};

static int fail(struct ember_backend_error *error, int errnum, const char *text)
{
    snprintf(error->text, sizeof error->text, "%s", text);
    return -errnum;
}

/* Misuse that no reply could make good again. */
static void misuse(const char *text)
{
    fprintf(stderr, "fence backend: %s\n", text);
    abort();
}

/* ---- device ---- */

static void fence_device_close(struct ember_device *device)
{
    if (!device)
        return;
    if (device->memories)
        misuse("device closed before its memory was freed");
    free(device->kernels);
    pthread_mutex_destroy(&device->lock);
    free(device);
}

static int fence_device_open(const struct ember_device_options *options, struct ember_device **ret,
                             struct ember_backend_error *error)
{
    struct ember_device *device;
    enum cpu_isa isa;
    int r = cpu_variant_choose(options, &isa, error);

    if (r < 0)
        return r;
    device = x_alloc(sizeof *device);
    pthread_mutex_init(&device->lock, NULL);
    device->isa = isa;
    device->kernels = x_alloc(cpu_kernel_count() * sizeof *device->kernels);
    for (uint32_t i = 0; i < cpu_kernel_count(); i++)
        device->kernels[i].entry = cpu_kernel_lookup(cpu_kernel_name(i), isa);
    *ret = device;
    return 0;
}

static void fence_device_info(struct ember_device *device, struct ember_device_info *ret)
{
    memset(ret, 0, sizeof *ret);
    cpu_variant_describe(device->isa, "fence", ret);
    cpu_variant_memory(ret);
    ret->threads = 1;
    ret->shares_host_memory = 1;
}

/* ---- memory ---- */

static int protect(const struct ember_memory *memory, bool open)
{
    int protection = !open ? PROT_NONE : memory->writable ? PROT_READ | PROT_WRITE : PROT_READ;
    return mprotect(memory->map.base, memory->map.length, protection);
}

/* The first window opens all of the device's memory, the last one to go closes it. */
static void window(struct ember_device *device, bool open)
{
    pthread_mutex_lock(&device->lock);
    if (open ? device->windows++ == 0 : --device->windows == 0)
        for (struct ember_memory *m = device->memories; m; m = m->next)
            if (protect(m, open))
                misuse("mprotect failed");
    pthread_mutex_unlock(&device->lock);
}

static void link_memory(struct ember_memory *memory)
{
    struct ember_device *device = memory->device;

    pthread_mutex_lock(&device->lock);
    memory->next = device->memories;
    memory->link = &device->memories;
    if (memory->next)
        memory->next->link = &memory->next;
    device->memories = memory;
    if (device->windows && protect(memory, true))
        misuse("mprotect failed");
    pthread_mutex_unlock(&device->lock);
}

static int adopt(struct ember_device *device, int r, const struct mapping *map, bool writable,
                 const struct error *err, struct ember_memory **ret,
                 struct ember_backend_error *error)
{
    struct ember_memory *memory;

    if (r < 0) {
        snprintf(error->text, sizeof error->text, "%s", error_text(err));
        return r;
    }
    memory = x_alloc(sizeof *memory);
    memory->device = device;
    memory->map = *map;
    memory->writable = writable;
    link_memory(memory);
    *ret = memory;
    return 0;
}

static int fence_memory_alloc(struct ember_device *device, uint64_t bytes,
                              struct ember_memory **ret, struct ember_backend_error *error)
{
    struct mapping map;
    struct error err = {0};
    int r = mapping_make(bytes, PROT_NONE, &map, &err);

    return adopt(device, r, &map, true, &err, ret, error);
}

static int fence_memory_import(struct ember_device *device, const struct ember_share *share,
                               struct ember_memory **ret, struct ember_backend_error *error)
{
    struct mapping map;
    struct error err = {0};
    int r;

    if (share->kind != EMBER_SHARE_FD)
        return fail(error, ENOTSUP, "memory is shared as a file descriptor here, not as a handle");
    r = mapping_import(share->fd, share->bytes, PROT_NONE, false, &map, &err);
    return adopt(device, r, &map, false, &err, ret, error);
}

static void fence_memory_free(struct ember_memory *memory)
{
    if (!memory)
        return;
    pthread_mutex_lock(&memory->device->lock);
    if (memory->device->queued)
        misuse("memory freed while commands are queued: queue_sync first");
    *memory->link = memory->next;
    if (memory->next)
        memory->next->link = memory->link;
    pthread_mutex_unlock(&memory->device->lock);
    mapping_free(&memory->map);
    free(memory);
}

static uint64_t fence_memory_address(struct ember_memory *memory)
{
    return (uintptr_t)memory->map.base;
}

/* ---- queue ---- */

static void note_failure(struct ember_queue *queue, int errnum, const char *text)
{
    if (!queue->failed)
        queue->failed = fail(&queue->error, errnum, text);
}

static void execute(struct ember_queue *queue, const struct command *c)
{
    switch (c->kind) {
    case COMMAND_IN:
        if (checksum_of(c->from, c->bytes) != c->checksum)
            note_failure(queue, EBUSY, "the source of a copy_in was changed before queue_sync");
        memcpy(c->memory->map.base + c->offset, c->from, c->bytes);
        break;
    case COMMAND_OUT:
        memcpy(c->to, c->memory->map.base + c->offset, c->bytes);
        break;
    case COMMAND_LAUNCH:
        for (uint32_t b = c->n_blocks; b-- > 0;)
            c->entry(c->args, b, c->n_blocks);
        break;
    }
}

static void clear_commands(struct ember_queue *queue)
{
    for (uint32_t i = 0; i < queue->count; i++)
        free(queue->commands[i].args);
    pthread_mutex_lock(&queue->device->lock);
    queue->device->queued -= queue->count;
    pthread_mutex_unlock(&queue->device->lock);
    queue->count = 0;
}

/* Under the queue's lock, which the host does not hold while it waits. */
static void run_all(struct ember_queue *queue)
{
    window(queue->device, true);
    for (uint32_t i = 0; i < queue->count; i++)
        execute(queue, &queue->commands[i]);
    window(queue->device, false);
    clear_commands(queue);
}

static void *worker(void *arg)
{
    struct ember_queue *queue = arg;

    pthread_mutex_lock(&queue->lock);
    for (;;) {
        while (!queue->go && !queue->stop)
            pthread_cond_wait(&queue->changed, &queue->lock);
        if (queue->count)
            run_all(queue);
        if (queue->stop)
            break;
        queue->go = false;
        pthread_cond_broadcast(&queue->changed);
    }
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

static int fence_queue_create(struct ember_device *device, struct ember_queue **ret,
                              struct ember_backend_error *error)
{
    struct ember_queue *queue = x_alloc(sizeof *queue);
    int r;

    queue->device = device;
    queue->commands = x_alloc(QUEUE_MAX * sizeof *queue->commands);
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->changed, NULL);
    r = pthread_create(&queue->thread, NULL, worker, queue);
    if (r) {
        free(queue->commands);
        free(queue);
        return fail(error, r, "no thread for a queue");
    }
    *ret = queue;
    return 0;
}

static void fence_queue_free(struct ember_queue *queue)
{
    if (!queue)
        return;
    pthread_mutex_lock(&queue->lock);
    queue->stop = true;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
    pthread_join(queue->thread, NULL);
    pthread_cond_destroy(&queue->changed);
    pthread_mutex_destroy(&queue->lock);
    free(queue->commands);
    free(queue);
}

static void wait_done(struct ember_queue *queue)
{
    queue->go = true;
    pthread_cond_broadcast(&queue->changed);
    while (queue->go)
        pthread_cond_wait(&queue->changed, &queue->lock);
}

static int fence_queue_sync(struct ember_queue *queue, struct ember_backend_error *error)
{
    int r;

    pthread_mutex_lock(&queue->lock);
    wait_done(queue);
    r = queue->failed;
    if (r)
        *error = queue->error;
    queue->failed = 0;
    pthread_mutex_unlock(&queue->lock);
    return r;
}

static void enqueue(struct ember_queue *queue, const struct command *command)
{
    pthread_mutex_lock(&queue->lock);
    if (queue->count == QUEUE_MAX)
        wait_done(queue);
    queue->commands[queue->count++] = *command;
    pthread_mutex_lock(&queue->device->lock);
    queue->device->queued++;
    pthread_mutex_unlock(&queue->device->lock);
    pthread_mutex_unlock(&queue->lock);
}

static bool within(const struct ember_memory *memory, uint64_t offset, uint64_t bytes)
{
    return offset <= memory->map.bytes && bytes <= memory->map.bytes - offset;
}

static int fence_copy_in(struct ember_queue *queue, struct ember_memory *to, uint64_t to_offset,
                         const void *from, uint64_t bytes, struct ember_backend_error *error)
{
    struct command c = {.kind = COMMAND_IN, .memory = to, .offset = to_offset, .bytes = bytes};

    if (!to->writable)
        return fail(error, EACCES, "a copy into imported memory, which is read-only");
    if (!within(to, to_offset, bytes))
        return fail(error, ERANGE, "a copy beyond the end of device memory");
    if (!bytes)
        return 0;
    c.from = from;
    c.checksum = checksum_of(from, bytes);
    enqueue(queue, &c);
    return 0;
}

static int fence_copy_out(struct ember_queue *queue, void *to, struct ember_memory *from,
                          uint64_t from_offset, uint64_t bytes, struct ember_backend_error *error)
{
    struct command c = {.kind = COMMAND_OUT, .memory = from, .offset = from_offset, .bytes = bytes};

    if (!within(from, from_offset, bytes))
        return fail(error, ERANGE, "a copy from beyond the end of device memory");
    if (!bytes)
        return 0;
    c.to = to;
    memset(to, POISON, bytes);
    enqueue(queue, &c);
    return 0;
}

/* ---- kernels ---- */

static int fence_lower(struct ember_device *device, const struct ember_op *op, ember_emit_fn emit,
                       void *sink, struct ember_backend_error *error)
{
    return cpu_lower(device->isa, op, emit, sink, error);
}

static int fence_kernel_find(struct ember_device *device, const char *name,
                             struct ember_kernel **ret, struct ember_backend_error *error)
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

static int fence_launch(struct ember_queue *queue, struct ember_kernel *kernel,
                        const uint32_t grid[3], const uint64_t *args, uint32_t n_args,
                        struct ember_backend_error *error)
{
    struct command c = {.kind = COMMAND_LAUNCH, .entry = kernel->entry};
    uint64_t blocks;

    if (!size_mul((uint64_t)grid[0] * grid[1], grid[2], &blocks) || !blocks || blocks > UINT32_MAX)
        return fail(error, EINVAL, "a launch with an empty or absurd grid");
    c.n_blocks = (uint32_t)blocks;
    c.args = mem_alloc(n_args, sizeof *args);
    if (!c.args)
        return fail(error, ENOMEM, "no memory for the arguments of a launch");
    if (n_args)
        memcpy(c.args, args, n_args * sizeof *args);
    enqueue(queue, &c);
    return 0;
}

__attribute__((visibility("default"))) const struct ember_backend *ember_backend_entry(void);
const struct ember_backend *ember_backend_entry(void)
{
    static const struct ember_backend backend = {
        .abi_version = EMBER_BACKEND_ABI_VERSION,
        .struct_size = sizeof backend,
        .name = "fence",
        .device_open = fence_device_open,
        .device_close = fence_device_close,
        .device_info = fence_device_info,
        .memory_alloc = fence_memory_alloc,
        .memory_import = fence_memory_import,
        .memory_free = fence_memory_free,
        .memory_address = fence_memory_address,
        .queue_create = fence_queue_create,
        .queue_free = fence_queue_free,
        .queue_sync = fence_queue_sync,
        .copy_in = fence_copy_in,
        .copy_out = fence_copy_out,
        .lower = fence_lower,
        .kernel_find = fence_kernel_find,
        .launch = fence_launch,
    };
    return &backend;
}
