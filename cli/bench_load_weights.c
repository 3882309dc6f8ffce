/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weights, of a checkpoint or a pack: bytes a second of a load out of the page cache and from the
 * disk, beside what memory and disk gave in the same run, and the time from emberd's exec to a
 * first token. Every path behind the first is compared with it.
 */
#include "cli/bench_load.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fd.h"
#include "cli/lab.h"
#include "cli/measure.h"
#include "cli/output.h"
#include "engine/load.h"
#include "model/pack/pack.h"

#define RUNS 3
#define DISK_BYTES GIB /* of the limit's measurement, at most */
#define DISK_STEP (8 * MIB)
#define PROMPT 1 /* the least that gives a first token */

struct weights_bench {
    const struct verb_call *call;
    const char *path;
    json_t *row, *first; /* first: of the first path; NULL: this is it */
    unsigned threads;
    char *files[256];
    size_t n_files;
    uint64_t bytes; /* resident */
};

/* ---- the files ---- */

static bool is_weights(const char *name)
{
    size_t n = strlen(name);
    return n > 12 && !strcmp(name + n - 12, ".safetensors");
}

static int find_files(struct weights_bench *b, struct error *err)
{
    DIR *dir;
    struct dirent *entry;

    if (pack_looks_like(b->path)) {
        b->files[b->n_files++] = x_strdup(b->path);
        return 0;
    }
    if (!(dir = opendir(b->path)))
        return error_set(err, ENOENT, "%s: neither a checkpoint's folder nor a pack", b->path);
    while ((entry = readdir(dir)) && b->n_files < ARRAY_LEN(b->files))
        if (is_weights(entry->d_name))
            b->files[b->n_files++] = x_printf("%s/%s", b->path, entry->d_name);
    closedir(dir);
    return b->n_files ? 0 : error_set(err, ENOENT, "%s: has no weights", b->path);
}

/* Out of the page cache, as far as the kernel lets them go. */
static void drop(const struct weights_bench *b)
{
    for (size_t i = 0; i < b->n_files; i++) {
        _cleanup_fd_ int fd = open(b->files[i], O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
            fdatasync(fd);
            posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        }
    }
}

/* ---- the disk ---- */

struct disk {
    int fd;
    uint64_t bytes;
    atomic_uint_fast64_t next, done;
};

static void *read_disk(void *arg)
{
    struct disk *disk = arg;
    _cleanup_free_ char *buffer = aligned_alloc(4096, DISK_STEP);
    uint64_t at;

    while (buffer && (at = atomic_fetch_add(&disk->next, DISK_STEP)) < disk->bytes) {
        ssize_t n = pread(disk->fd, buffer, DISK_STEP, (off_t)at);
        if (n <= 0)
            break;
        atomic_fetch_add(&disk->done, (uint64_t)n);
    }
    return NULL;
}

/* Bytes a second of large reads past the page cache; 0: not possible here. */
static double disk_bandwidth(const struct weights_bench *b)
{
    pthread_t threads[8];
    struct stat st;
    unsigned n = MIN(b->threads, 8u), started = 0;
    _cleanup_fd_ int fd = open(b->files[0], O_RDONLY | O_CLOEXEC | O_DIRECT);

    if (fd < 0 || fstat(fd, &st) < 0)
        return 0;
    drop(b);
    struct disk disk = {.fd = fd, .bytes = MIN((uint64_t)st.st_size, DISK_BYTES)};
    uint64_t start = clock_ns();
    for (; started < n; started++)
        if (pthread_create(&threads[started], NULL, read_disk, &disk))
            break;
    for (unsigned i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    double seconds = clock_ms_since(start) / 1e3;
    return seconds > 0 ? (double)atomic_load(&disk.done) / seconds : 0;
}

/* ---- rows ---- */

static void say(struct weights_bench *b, const char *key, const char *what, double value,
                const char *text, const char *more)
{
    json_object_set_new(b->row, key, json_real(value));
    if (!cli_json(b->call)) {
        printf("  %-58s %14s   %s\n", what, text, more);
        fflush(stdout);
    }
}

static void say_rate(struct weights_bench *b, const char *key, const char *what, double rate,
                     const char *of, double limit)
{
    char text[32], more[96] = "";

    snprintf(text, sizeof text, "%.2f GB/s", rate / 1e9);
    if (limit > 0)
        snprintf(more, sizeof more, "%.0f %% of %s", rate / limit * 100, of);
    say(b, key, what, rate, text, more);
}

static void say_ms(struct weights_bench *b, const char *key, const char *what, double ms)
{
    double before = b->first ? json_real_value(json_object_get(b->first, key)) : 0;
    char text[32], more[96] = "";

    snprintf(text, sizeof text, "%.1f ms", ms);
    if (before > 0) {
        char name[64];
        snprintf(more, sizeof more, "%.0f %% of the first path's", ms / before * 100);
        snprintf(name, sizeof name, "%s_of_first", key);
        json_object_set_new(b->row, name, json_real(ms / before));
    }
    say(b, key, what, ms, text, more);
}

/* ---- loads in this process ---- */

static int loads(struct weights_bench *b, bool cold, double *ret_ms, struct error *err)
{
    struct load_options options = {0};
    double ms[RUNS];

    for (int i = 0; i < RUNS && !cli_interrupted; i++) {
        struct loaded loaded = {.weights = -1, .manifest = -1};
        if (cold)
            drop(b);
        int r = load_model(b->path, &options, &loaded, err);
        if (r < 0)
            return r;
        ms[i] = loaded.ms;
        b->bytes = loaded.bytes;
        loaded_close(&loaded);
    }
    *ret_ms = cli_interrupted ? 0 : quantile(ms, RUNS, 0.5);
    return 0;
}

static int measure_loads(struct weights_bench *b, struct error *err)
{
    double warm = 0, cold = 0, copy = copy_bandwidth(b->threads);
    double fill = page_cache_bandwidth(b->files[0], b->threads), disk;

    int r = loads(b, false, &warm, err);
    if (r < 0 || cli_interrupted)
        return r;
    disk = disk_bandwidth(b);
    r = loads(b, true, &cold, err);
    if (r < 0 || cli_interrupted)
        return r;
    char size[24], text[64];
    json_object_set_new(b->row, "weights_bytes", json_integer((json_int_t)b->bytes));
    snprintf(text, sizeof text, "%u threads", b->threads);
    say(b, "weights", "weights", (double)b->bytes, cli_bytes(b->bytes, size), text);
    say_rate(b, "memcpy", "limit: memcpy", copy, "", 0);
    say_rate(b, "fill", "limit: page cache to new memory by read and write", fill, "", 0);
    say_rate(b, "disk", "limit: disk, large reads past the page cache", disk, "", 0);
    say_ms(b, "load_ms", "load, files in the page cache", warm);
    say_rate(b, "load", "", (double)b->bytes / warm * 1e3, "page cache to new memory", fill);
    say_ms(b, "cold_load_ms", "load, files on disk", cold);
    say_rate(b, "cold_load", "", (double)b->bytes / cold * 1e3, "the disk's", disk);
    return 0;
}

/* ---- whole starts ---- */

static int one_start(struct weights_bench *b, struct lab *lab, const struct lab_options *options,
                     bool cold, double *ret_ms, struct error *err)
{
    uint32_t ids[PROMPT];
    struct prompt prompt = {.ids = ids, .n_ids = PROMPT, .new_tokens = 1};
    struct start start;

    for (uint32_t i = 0; i < PROMPT; i++)
        ids[i] = i + 1;
    int r = lab_stop(lab, false, err);
    lab_drop_store(lab);
    if (cold)
        drop(b);
    if (r == 0)
        r = lab_start(lab, options, false, err);
    if (r == 0)
        r = measure_start(lab->socket, &prompt, lab->exec_ns, false, &start, err);
    if (r < 0)
        return r;
    *ret_ms = start.since_exec_ms;
    start_free(&start);
    return 0;
}

static int starts(struct weights_bench *b, struct error *err)
{
    struct lab_options options = {.model = b->path};
    struct lab lab;
    double ms[2][RUNS], first;

    int r = lab_new(&lab, err);
    if (r < 0)
        return r;
    r = one_start(b, &lab, &options, false, &first, err); /* compiles the kernels */
    for (int cold = 0; cold < 2; cold++)
        for (int i = 0; i < RUNS && r == 0 && !cli_interrupted; i++)
            r = one_start(b, &lab, &options, cold, &ms[cold][i], err);
    lab_free(&lab);
    if (r < 0 || cli_interrupted)
        return r;
    say_ms(b, "first_token_ms", "emberd's exec to first token, files in the page cache",
           quantile(ms[0], RUNS, 0.5));
    say_ms(b, "cold_first_token_ms", "emberd's exec to first token, files on disk",
           quantile(ms[1], RUNS, 0.5));
    return 0;
}

int bench_load_weights(const struct verb_call *call, const char *path, const char *cache_dir,
                       json_t *row, struct error *err)
{
    static json_t *first; /* of this run's first path that has weights; borrowed */
    _cleanup_free_ char *whole = realpath(path, NULL);
    struct weights_bench b = {
        .call = call, .path = whole ? whole : path, .row = json_object(), .first = first};
    cpu_set_t set;

    b.threads = sched_getaffinity(0, sizeof set, &set) == 0 ? (unsigned)CPU_COUNT(&set) : 1;
    int r = find_files(&b, err);
    if (r == 0)
        r = measure_loads(&b, err);
    if (r == 0 && !cli_interrupted)
        r = starts(&b, err);
    for (size_t i = 0; i < b.n_files; i++)
        free(b.files[i]);
    if (r < 0) {
        json_decref(b.row);
        return r;
    }
    json_object_set_new(row, "weights", b.row);
    first = first ? first : b.row;
    return 0;
}
