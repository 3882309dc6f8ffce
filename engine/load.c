/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loading. The layout's sources are cut into chunks; threads take chunks in arena order, so that
 * what arrives first is what a forward pass needs first. The digest of the weights is the digest of
 * the chunks' digests in order: the same for any number of threads.
 */
#include "engine/load.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/fd.h"
#include "base/mem.h"
#include "cache/resident.h"
#include "model/checkpoint.h"

#define CHUNK_BYTES (512u * 1024) /* fits the second-level cache, twice */
#define THREADS_MAX 8

struct chunk {
    const struct weight *weight;
    const struct weight_source *source;
    uint64_t to;    /* in the weights arena */
    uint64_t first; /* in the source */
    uint32_t bytes;
};

struct load {
    const struct checkpoint *checkpoint;
    struct resident *resident;
    struct chunk *chunks;
    struct digest *digests;
    size_t n_chunks;
    atomic_size_t next;
    atomic_uint_fast64_t done;
    atomic_bool stop;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t running;
    struct error error; /* the first */
};

void loaded_close(struct loaded *loaded)
{
    loaded->weights = fd_close(loaded->weights);
    loaded->manifest = fd_close(loaded->manifest);
}

static int cut(const struct weights_layout *layout, struct load *load, struct error *err)
{
    size_t n = 0;

    for (uint32_t i = 0; i < layout->n_sources; i++)
        n += (layout->sources[i].bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    load->chunks = mem_alloc(n, sizeof *load->chunks);
    load->digests = mem_alloc(n, sizeof *load->digests);
    if (!load->chunks || !load->digests)
        return error_set(err, ENOMEM, "no memory for a list of %zu chunks", n);
    for (uint32_t w = 0; w < layout->n_weights; w++) {
        const struct weight *weight = &layout->weights[w];
        for (uint32_t s = 0; s < weight->n_sources; s++) {
            const struct weight_source *source = &layout->sources[weight->first_source + s];
            for (uint64_t at = 0; at < source->bytes; at += CHUNK_BYTES)
                load->chunks[load->n_chunks++] =
                    (struct chunk){weight, source, weight->offset + source->offset + at, at,
                                   (uint32_t)MIN(source->bytes - at, CHUNK_BYTES)};
        }
    }
    return 0;
}

static int pwrite_all(int fd, const char *data, size_t n, uint64_t offset, struct error *err)
{
    for (size_t done = 0; done < n;) {
        ssize_t r = fault_hit(FAULT_WRITE)
                        ? (errno = ENOSPC, -1)
                        : pwrite(fd, data + done, n - done, (off_t)(offset + done));
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return error_sys(err, errno, "weights: write of %zu bytes into memory", n - done);
        done += (size_t)r;
    }
    return 0;
}

/*
 * A page that is written whole is not zeroed first, so write(2) beats a mapping; but a memfd of
 * explicit huge pages takes no write(2).
 */
static int put(struct load *load, const char *data, const struct chunk *chunk, struct error *err)
{
    if (resident_page(load->resident) == (uint64_t)sysconf(_SC_PAGESIZE))
        return pwrite_all(resident_fd(load->resident), data, chunk->bytes, chunk->to, err);
    memcpy((char *)resident_data(load->resident) + chunk->to, data, chunk->bytes);
    return 0;
}

static int load_chunk(struct load *load, size_t index, char *buffer, struct error *err)
{
    const struct chunk *chunk = &load->chunks[index];
    int r;

    fault_hit(FAULT_LOAD_MID);
    r = weight_source_read(load->checkpoint, chunk->weight, chunk->source, chunk->first, buffer,
                           chunk->bytes, err);
    if (r < 0)
        return r;
    load->digests[index] = digest_of(buffer, chunk->bytes);
    return put(load, buffer, chunk, err);
}

static void *worker(void *arg)
{
    struct load *load = arg;
    _cleanup_free_ char *buffer = mem_alloc(CHUNK_BYTES, 1);
    struct error error = {0};
    int r = buffer ? 0 : error_set(&error, ENOMEM, "no memory for a read buffer");

    while (r == 0 && !atomic_load(&load->stop)) {
        size_t index = atomic_fetch_add(&load->next, 1);
        if (index >= load->n_chunks)
            break;
        r = load_chunk(load, index, buffer, &error);
        atomic_fetch_add(&load->done, load->chunks[index].bytes);
    }
    pthread_mutex_lock(&load->lock);
    if (r < 0 && !load->error.code)
        load->error = error;
    if (r < 0)
        atomic_store(&load->stop, true);
    load->running--;
    pthread_cond_signal(&load->changed);
    pthread_mutex_unlock(&load->lock);
    return NULL;
}

static uint32_t thread_count(uint32_t asked)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;

    return asked ? MIN(asked, THREADS_MAX) : (uint32_t)MIN(MAX(n, 1), THREADS_MAX);
}

/* Waits for the workers, telling how far they are every 50 ms. */
static void watch(struct load *load, const struct load_options *options, uint64_t total)
{
    pthread_mutex_lock(&load->lock);
    while (load->running) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 50 * 1000 * 1000;
        if (until.tv_nsec >= 1000000000) {
            until.tv_sec++;
            until.tv_nsec -= 1000000000;
        }
        pthread_cond_timedwait(&load->changed, &load->lock, &until);
        if (!options->progress || atomic_load(&load->stop))
            continue;
        pthread_mutex_unlock(&load->lock);
        int r = options->progress(options->ctx, atomic_load(&load->done), total);
        pthread_mutex_lock(&load->lock);
        if (r && !load->error.code) {
            error_set(&load->error, ECANCELED, "the load was cancelled");
            atomic_store(&load->stop, true);
        }
    }
    pthread_mutex_unlock(&load->lock);
}

static int run_workers(struct load *load, const struct load_options *options, uint64_t total,
                       struct error *err)
{
    uint32_t n = thread_count(options->threads), started = 0;
    pthread_t threads[THREADS_MAX];

    pthread_mutex_init(&load->lock, NULL);
    pthread_cond_init(&load->changed, NULL);
    load->running = n;
    for (; started < n; started++)
        if (pthread_create(&threads[started], NULL, worker, load))
            break;
    if (!started)
        worker(load);
    pthread_mutex_lock(&load->lock);
    load->running -= started ? n - started : n - 1;
    pthread_mutex_unlock(&load->lock);
    watch(load, options, total);
    for (uint32_t i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    pthread_cond_destroy(&load->changed);
    pthread_mutex_destroy(&load->lock);
    if (load->error.code) {
        *(err ? err : &(struct error){0}) = load->error;
        return load->error.code;
    }
    return 0;
}

static int fill(const struct checkpoint *checkpoint, struct weights_layout *layout,
                struct resident *resident, const struct load_options *options, struct error *err)
{
    struct load load = {.checkpoint = checkpoint, .resident = resident};
    uint64_t total = 0;

    int r = cut(layout, &load, err);
    for (size_t i = 0; i < load.n_chunks; i++)
        total += load.chunks[i].bytes;
    if (r == 0)
        r = run_workers(&load, options, total, err);
    if (r == 0)
        layout->digest = digest_of(load.digests, load.n_chunks * sizeof *load.digests);
    if (r == 0 && options->progress)
        options->progress(options->ctx, total, total);
    free(load.chunks);
    free(load.digests);
    return r;
}

static int write_manifest(const struct checkpoint *checkpoint, const struct weights_layout *layout,
                          int *ret_fd, struct error *err)
{
    _cleanup_(buffer_free) struct buffer bytes = {0};
    size_t config_len;
    const char *config = checkpoint_config(checkpoint, &config_len);

    int r = manifest_write(config, config_len, checkpoint_dir(checkpoint), layout, &bytes, err);
    if (r < 0)
        return r;
    _cleanup_fd_ int fd = memfd_create("ember-manifest", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return error_sys(err, errno, "memfd for the manifest");
    r = fd_write_all(fd, bytes.data, bytes.len, "manifest", err);
    if (r == 0 &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) < 0)
        r = error_sys(err, errno, "sealing the manifest");
    if (r == 0)
        *ret_fd = TAKE_FD(fd);
    return r;
}

int load_checkpoint(const char *dir, const struct load_options *options, struct loaded *ret,
                    struct error *err)
{
    _cleanup_(checkpoint_freep) struct checkpoint *checkpoint = NULL;
    _cleanup_(model_freep) struct model *model = NULL;
    _cleanup_(weights_layout_freep) struct weights_layout *layout = NULL;
    _cleanup_(resident_freep) struct resident *resident = NULL;
    struct loaded loaded = {.weights = -1, .manifest = -1};
    uint64_t start = clock_ns();
    size_t config_len;

    int r = checkpoint_open(dir, &checkpoint, err);
    if (r < 0)
        return r;
    const char *config = checkpoint_config(checkpoint, &config_len);
    r = model_from_config(config, config_len, dir, &model, err);
    if (r == 0)
        r = model_layout(model, checkpoint, &layout, err);
    if (r == 0 && options->admit)
        r = options->admit(options->ctx, model_info(model), layout->bytes, err);
    if (r == 0)
        r = resident_create("ember-weights", layout->bytes, &resident, err);
    if (r == 0)
        r = fill(checkpoint, layout, resident, options, err);
    if (r == 0)
        r = resident_seal(resident, err);
    if (r == 0 && (loaded.weights = fcntl(resident_fd(resident), F_DUPFD_CLOEXEC, 0)) < 0)
        r = error_sys(err, errno, "descriptor of the weights");
    if (r == 0)
        r = write_manifest(checkpoint, layout, &loaded.manifest, err);
    if (r < 0) {
        loaded_close(&loaded);
        return r;
    }
    loaded.bytes = layout->bytes;
    loaded.digest = layout->digest;
    loaded.ms = clock_ms_since(start);
    *ret = loaded;
    return 0;
}
