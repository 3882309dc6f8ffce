/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/engine.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/topology.h"
#include "engine/engine_private.h"
#include "kernels/backend.h"

#define PREFETCH_DELAY_MS 1000
#define PREFETCH_BYTES MIB /* between two looks at whether to stop */
#define STATE_SLOTS 65     /* one for each sequence of the largest bucket, one for the canary */

const struct engine_start *engine_started(const struct engine *engine)
{
    return &engine->start;
}

const struct model_info *engine_model(const struct engine *engine)
{
    return model_info(engine->model);
}

bool engine_early(const struct engine *engine)
{
    return engine->early;
}

const struct error *engine_broken(const struct engine *engine)
{
    return engine->broken.code ? &engine->broken : NULL;
}

const char *engine_source_dir(const struct engine *engine)
{
    return engine->source_dir;
}

struct engine_limits engine_limits(const struct engine *engine)
{
    struct engine_limits limits = {.pages = engine->pages};

    for (int i = 0; i < BUCKET_TAPS; i++) {
        const struct bucket *b = &engine->buckets[i];
        if (atomic_load(&b->state) != BUCKET_READY)
            continue;
        limits.max_tokens = MAX(limits.max_tokens, b->request.tokens);
        limits.max_seqs = MAX(limits.max_seqs, b->request.seqs);
    }
    for (int a = EMBER_ARENA_KV; a < EMBER_ARENA_COUNT; a++)
        limits.bytes += engine->memory_bytes[a];
    return limits;
}

/* KV bytes an instance gets when nothing is configured. */
static uint64_t kv_default(uint64_t kv_page_bytes, uint32_t max_positions)
{
    uint64_t pages = (MIN(max_positions, 8192u) + KV_PAGE_SIZE - 1) / KV_PAGE_SIZE;
    uint64_t bytes = MIN(pages * kv_page_bytes, 512 * MIB);

    return MAX(bytes, 4 * kv_page_bytes);
}

static int read_manifest(struct engine *engine, struct error *err)
{
    struct stat st;

    if (fstat(engine->options.manifest, &st) < 0)
        return error_sys(err, errno, "manifest");
    if (st.st_size <= 0 || (uint64_t)st.st_size > GIB)
        return error_set(err, EBADMSG, "manifest: %lld bytes", (long long)st.st_size);
    void *data =
        mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, engine->options.manifest, 0);
    if (data == MAP_FAILED)
        return error_sys(err, errno, "manifest: map");
    int r = manifest_read(data, (size_t)st.st_size, &engine->model, &engine->layout,
                          &engine->source_dir, err);
    munmap(data, (size_t)st.st_size);
    return r;
}

static int open_device(struct engine *engine, struct error *err)
{
    struct ember_device_options options = {.threads = engine->options.threads,
                                           .isa = engine->options.isa,
                                           .pin = engine->options.pin,
                                           .place = engine->options.place};
    struct ember_backend_error e = {0};

    int r = backend_find(engine->options.backend ? engine->options.backend : "cpu",
                         &engine->backend, err);
    if (r < 0)
        return r;
    r = engine->backend->device_open(&options, &engine->device, &e);
    if (r < 0)
        return backend_fail(engine->backend, r, &e, err);
    engine->backend->device_info(engine->device, &engine->device_info);
    r = engine->backend->queue_create(engine->device, &engine->queue, &e);
    return r < 0 ? backend_fail(engine->backend, r, &e, err) : 0;
}

static int attach_weights(struct engine *engine, struct error *err)
{
    struct ember_share share = {.kind = engine->early ? EMBER_SHARE_FD_FILLING : EMBER_SHARE_FD,
                                .fd = engine->options.weights,
                                .bytes = engine->layout->bytes};
    struct ember_memory **memory = &engine->memory[EMBER_ARENA_WEIGHTS];
    struct ember_backend_error e = {0};

    int r = engine->backend->memory_import(engine->device, &share, memory, &e);
    if (r == -ENOTSUP && engine->early) { /* then when they are whole */
        r = filling_wait(engine->filling, UINT64_MAX, NULL, NULL, err);
        if (r < 0)
            return r;
        share.kind = EMBER_SHARE_FD;
        r = engine->backend->memory_import(engine->device, &share, memory, &e);
    }
    engine->memory_bytes[EMBER_ARENA_WEIGHTS] = engine->layout->bytes;
    return r < 0 ? backend_fail(engine->backend, r, &e, err) : 0;
}

/* Sizes of KV, state, scratch and I/O: what the largest bucket's plan wants. */
static int reserve(struct engine *engine, struct error *err)
{
    const struct model_info *info = model_info(engine->model);
    uint64_t *bytes = engine->memory_bytes;
    uint64_t page = info->kv_page_bytes[engine->options.kv];
    struct ember_backend_error e = {0};

    for (int i = 0; i < BUCKET_COUNT; i++) {
        struct bucket *b = &engine->buckets[i];
        if (!b->request.tokens || (i != BUCKET_T512 && i != BUCKET_T64 && i != BUCKET_TAPS))
            continue; /* the small ones want less than the first */
        int r = bucket_plan(engine, b, err);
        if (r < 0)
            return r;
        for (int a = EMBER_ARENA_KV; a < EMBER_ARENA_COUNT; a++)
            bytes[a] = MAX(bytes[a], b->plan->arena_bytes[a]);
        engine->staging_bytes = MAX(engine->staging_bytes, b->plan->io.inputs_end);
    }
    uint64_t kv =
        engine->options.kv_bytes ? engine->options.kv_bytes : kv_default(page, info->max_positions);
    if (kv < page || kv / page > INT32_MAX / KV_PAGE_SIZE - 1)
        return error_set(err, EINVAL, "kv_bytes is %llu; one page of this model takes %llu",
                         (unsigned long long)kv, (unsigned long long)page);
    engine->pages = (uint32_t)(kv / page);
    if (!size_mul(engine->pages + UINT64_C(1), page, &bytes[EMBER_ARENA_KV]) ||
        !size_mul(bytes[EMBER_ARENA_STATE], STATE_SLOTS, &bytes[EMBER_ARENA_STATE]))
        return error_set(err, ENOMEM, "%u KV pages of %llu bytes are more than there can be",
                         engine->pages, (unsigned long long)page);
    for (int a = EMBER_ARENA_KV; a < EMBER_ARENA_COUNT; a++) {
        int r = bytes[a] ? engine->backend->memory_alloc(engine->device, bytes[a],
                                                         &engine->memory[a], &e)
                         : 0;
        if (r < 0)
            return backend_fail(engine->backend, r, &e, err);
    }
    engine->staging = mem_alloc(engine->staging_bytes, 1);
    engine->sampled = mem_alloc(MAX(512u, engine->options.tap_tokens), sizeof *engine->sampled);
    if (!engine->staging || !engine->sampled)
        return error_set(err, ENOMEM, "no memory for %llu bytes of step inputs",
                         (unsigned long long)engine->staging_bytes);
    return 0;
}

void engine_note_miss(struct engine *engine, enum cache_kind kind, const struct cache_miss *why)
{
    struct engine_start *s = &engine->start;
    size_t i = 0;

    if (!*why->cause)
        return;
    while (i < s->n_misses &&
           (s->misses[i].kind != kind || strcmp(s->misses[i].why.cause, why->cause)))
        i++;
    if (i == ENGINE_MISSES_MAX) {
        s->misses[--i].n++;
        return;
    }
    if (i == s->n_misses) {
        s->misses[s->n_misses++].kind = kind;
        s->misses[i].why = *why;
    }
    s->misses[i].n++;
}

/* Instantiates a prepared bucket and proves it; CANARY_LATER: it stays prepared. */
static int finish(struct engine *engine, struct bucket *bucket, bool prove, struct error *err)
{
    int r = bucket->exec ? 0 : bucket_instantiate(engine, bucket, err);
    if (r == 0 && prove)
        r = canary_prove(engine, bucket, err);
    if (r != 0)
        return r;
    engine->start.capture_ms += bucket->capture_ms;
    engine->start.restore_ms += bucket->restore_ms;
    *(bucket->restored ? &engine->start.graphs_restored : &engine->start.graphs_captured) += 1;
    if (!bucket->restored)
        engine_note_miss(engine, CACHE_GRAPH, &bucket->miss);
    atomic_store(&bucket->state, BUCKET_READY);
    return 0;
}

static int first_bucket(struct engine *engine, struct error *err)
{
    struct bucket *bucket = &engine->buckets[BUCKET_T64];

    int r = bucket_graph(engine, engine->device, bucket, err);
    if (r == 0)
        r = finish(engine, bucket, !engine->early, err);
    engine->start.graphs_ms = bucket->capture_ms + bucket->restore_ms;
    return r;
}

static int tap_bucket(struct engine *engine, struct error *err)
{
    struct bucket *bucket = &engine->buckets[BUCKET_TAPS];

    if (!bucket->request.tokens)
        return 0;
    int r = bucket_graph(engine, engine->device, bucket, err);
    return r < 0 ? r : finish(engine, bucket, false, err);
}

static int set_requests(struct engine *engine, struct error *err)
{
    uint32_t taps = engine->options.tap_tokens;

    if ((unsigned)engine->options.kv >= KV_KIND_COUNT)
        return error_set(err, EINVAL, "K and V cannot be kept in kind number %d",
                         (int)engine->options.kv);
    enum ember_dtype kv = model_info(engine->model)->kv_dtype[engine->options.kv];
#define X(t, s, r)                                                                                 \
    engine->buckets[BUCKET_T##t].request =                                                         \
        (struct plan_request){.tokens = t, .seqs = s, .rows = r, .kv = kv};
    ENGINE_BUCKETS(X)
#undef X
    if (taps)
        engine->buckets[BUCKET_TAPS].request =
            (struct plan_request){.tokens = taps, .seqs = 1, .rows = taps, .taps = true, .kv = kv};
    return 0;
}

int engine_open(const struct engine_options *options, struct engine **ret, struct error *err)
{
    _cleanup_(engine_freep) struct engine *engine = x_alloc(sizeof *engine);
    uint64_t start = clock_ns();

    engine->options = *options;
    engine->wake = -1;
    int r = read_manifest(engine, err);
    if (r == 0)
        r = set_requests(engine, err);
    if (r == 0)
        r = open_device(engine, err);
    if (r == 0)
        r = preload_attach(engine, err);
    if (r == 0)
        r = attach_weights(engine, err);
    if (r == 0)
        r = reserve(engine, err);
    engine->start.attach_ms = clock_ms_since(start);
    if (r == 0)
        r = first_bucket(engine, err);
    if (r == 0)
        r = tap_bucket(engine, err);
    if (r < 0)
        return r;
    *ret = TAKE(engine);
    return 0;
}

static void stop_background(struct engine *engine)
{
    if (!engine->thread_running)
        return;
    atomic_store(&engine->stop, true);
    pthread_join(engine->thread, NULL);
    engine->thread_running = false;
}

void engine_free(struct engine *engine)
{
    if (!engine)
        return;
    stop_background(engine);
    for (int i = 0; i < BUCKET_COUNT; i++)
        bucket_free(&engine->buckets[i]);
    kernels_free(engine);
    for (int a = 0; a < EMBER_ARENA_COUNT; a++)
        if (engine->memory[a])
            engine->backend->memory_free(engine->memory[a]);
    if (engine->queue)
        engine->backend->queue_free(engine->queue);
    if (engine->device)
        engine->backend->device_close(engine->device);
    filling_free(engine->filling);
    weights_layout_free(engine->layout);
    model_free(engine->model);
    fd_close(engine->wake);
    free(engine->source_dir);
    free(engine->staging);
    free(engine->sampled);
    free(engine->logits);
    free(engine->hidden);
    free(engine);
}

/* ---- the background ---- */

static void prepare(struct engine *engine, struct ember_device *device, struct bucket *bucket)
{
    int r = device ? bucket_graph(engine, device, bucket, &bucket->error)
                   : error_set(&bucket->error, ENOMEM, "no second device handle");

    atomic_store(&bucket->state, r < 0 ? BUCKET_DROPPED : BUCKET_PREPARED);
    eventfd_write(engine->wake, 1);
}

/*
 * Maps the weights before somebody waits for it: a first touch costs about 0.3 us for each page of
 * 4 KiB, 100 ms for a model of 1.2 GB. In arena order, so that a step that comes meanwhile finds
 * its first layers mapped.
 */
static void prefetch_weights(struct engine *engine)
{
    uint64_t bytes = engine->memory_bytes[EMBER_ARENA_WEIGHTS];

    if (!engine->backend->memory_prefetch)
        return;
    /* Not during a burst: other instances that start now would pay for it, even at this priority.
     */
    for (int i = 0; i < PREFETCH_DELAY_MS / 10 && !atomic_load(&engine->stop); i++)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    for (uint64_t at = 0; at < bytes && !atomic_load(&engine->stop); at += PREFETCH_BYTES)
        if (engine->backend->memory_prefetch(engine->memory[EMBER_ARENA_WEIGHTS], at,
                                             MIN(bytes - at, PREFETCH_BYTES)) < 0)
            return;
}

static bool stopping(void *ctx)
{
    return atomic_load(&((struct engine *)ctx)->stop);
}

/* Owns every bucket in BUCKET_ABSENT, and a device handle of its own: lowering is not shared. */
static void *background(void *arg)
{
    struct engine *engine = arg;
    struct ember_device_options options = {.threads = 1, .isa = engine->options.isa};
    struct ember_device *device = NULL;
    struct ember_backend_error e = {0};
    struct sched_param none = {0};

    sched_setscheduler(0, SCHED_IDLE, &none); /* this thread alone; it may delay nobody */
    cpus_unbind();
    if (engine->early) {
        filling_wait(engine->filling, UINT64_MAX, stopping, engine, NULL);
        eventfd_write(engine->wake, 1); /* to be proved, or found broken */
    }
    if (engine->backend->device_open(&options, &device, &e) < 0)
        device = NULL;
    for (int i = 0; i < BUCKET_TAPS && !atomic_load(&engine->stop); i++)
        if (atomic_load(&engine->buckets[i].state) == BUCKET_ABSENT)
            prepare(engine, device, &engine->buckets[i]);
    if (device)
        engine->backend->device_close(device);
    prefetch_weights(engine);
    return NULL;
}

int engine_background(struct engine *engine, struct error *err)
{
    if (engine->thread_running || engine->wake >= 0)
        return 0;
    engine->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (engine->wake < 0)
        return error_sys(err, errno, "eventfd");
    int r = pthread_create(&engine->thread, NULL, background, engine);
    if (r)
        return error_sys(err, r, "background thread");
    engine->thread_running = true;
    return 0;
}

int engine_background_fd(const struct engine *engine)
{
    return engine->wake;
}

bool engine_settled(const struct engine *engine)
{
    if (engine->early)
        return false;
    for (int i = 0; i < BUCKET_TAPS; i++) {
        int state = atomic_load(&engine->buckets[i].state);
        if (state == BUCKET_ABSENT || state == BUCKET_PREPARED)
            return false;
        if (state == BUCKET_DROPPED && engine->buckets[i].error.code)
            return false; /* engine_adopt has not told yet */
    }
    return true;
}

int engine_adopt(struct engine *engine, bool (*waiting)(void *ctx), void *ctx, struct error *err)
{
    eventfd_t ignored;

    eventfd_read(engine->wake,
                 &ignored); /* first: a bucket that comes later makes it readable again */
    if (engine->broken.code) {
        if (err)
            *err = engine->broken;
        return engine->broken.code;
    }
    if (engine->early) {
        if (filling_state(engine->filling) == FILLING_GOES_ON)
            return 0;
        int proved = preload_finish(engine, err);
        eventfd_write(engine->wake, 1); /* a bucket may have come meanwhile */
        return proved < 0 ? proved : 1;
    }
    for (int i = 0; i < BUCKET_TAPS; i++) {
        struct bucket *bucket = &engine->buckets[i];
        if (atomic_load(&bucket->state) == BUCKET_DROPPED && bucket->error.code) {
            if (err)
                *err = bucket->error;
            int code = bucket->error.code;
            bucket->error.code = 0;         /* said once */
            eventfd_write(engine->wake, 1); /* there may be another */
            return code;
        }
        if (atomic_load(&bucket->state) != BUCKET_PREPARED)
            continue;
        engine->waiting = waiting;
        engine->waiting_ctx = ctx;
        int r = finish(engine, bucket, true, err);
        if (r < 0) {
            bucket->error.code = 0; /* told now */
            atomic_store(&bucket->state, BUCKET_DROPPED);
        }
        eventfd_write(engine->wake, 1); /* there may be another */
        return r < 0 ? r : 1;
    }
    return 0;
}
