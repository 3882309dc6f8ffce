/* SPDX-License-Identifier: Apache-2.0 */
/*
 * emberctl bench spawn: how fast instances start, over a folder or a known shape, with the limit
 * measured in the same run beside the figure. The daemon is a private one; nothing that runs
 * already is touched.
 */
#include "cli/commands.h"

#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache/cache.h"
#include "cli/bench_model.h"
#include "cli/lab.h"
#include "cli/measure.h"
#include "cli/output.h"
#include "engine/engine.h"
#include "engine/load.h"

static const uint32_t bench_ids[] = {1}; /* the least that gives a first token */

struct bench {
    const struct verb_call *call;
    const char *name;
    char *model;
    struct lab lab;
    struct lab_options options;
    struct prompt prompt;
    unsigned spawns, burst;
    uint64_t weights_bytes;
    double copy, fill; /* bytes/s: memcpy; from the page cache into new memory */
    json_t *rows;
    char *ids; /* of the first start; every other must give the same */
    bool same;
};

static void row(struct bench *b, const char *what, double value, const char *unit,
                const char *limit)
{
    char text[64];

    snprintf(text, sizeof text, unit[0] == 'x' ? "%.1f%s" : "%.2f %s", value, unit);
    json_array_append_new(b->rows, json_pack("{s:s, s:s, s:s, s:f, s:s, s:s}", "model", b->name,
                                             "what", what, "text", text, "value", value, "unit",
                                             unit, "limit", limit));
    if (!cli_json(b->call)) {
        printf("  %-58s %12s   %s\n", what, text, limit);
        fflush(stdout);
    }
}

static void check_ids(struct bench *b, const struct start *start)
{
    char *ids = json_dumps(start->ids, JSON_COMPACT);

    if (!b->ids)
        b->ids = x_strdup(ids);
    b->same &= !strcmp(b->ids, ids);
    free(ids);
}

/* ---- caches: compile against hit, capture against restore, in this process ---- */

static int open_once(struct bench *b, const struct loaded *loaded, struct cache *cache,
                     struct engine_start *ret, struct error *err)
{
    struct engine_options options = {
        .cache = cache, .compile = true, .weights = loaded->weights, .manifest = loaded->manifest};
    struct engine *engine;

    int r = engine_open(&options, &engine, err);
    if (r == 0) {
        *ret = *engine_started(engine);
        engine_free(engine);
    }
    return r;
}

static int bench_caches(struct bench *b, struct error *err)
{
    enum { HITS = 9 };
    _cleanup_free_ char *dir = x_printf("%s/engine-cache", b->lab.dir);
    struct load_options load = {0};
    struct loaded loaded = {.weights = -1, .manifest = -1};
    struct cache *cache = NULL;
    struct engine_start cold = {0}, warm = {0};
    double kernels[HITS], restores[HITS];

    int r = load_checkpoint(b->model, &load, &loaded, err);
    b->weights_bytes = loaded.bytes;
    if (r == 0)
        r = cache_open(dir, NULL, &cache, err);
    if (r == 0)
        r = open_once(b, &loaded, cache, &cold, err);
    for (int i = 0; i < HITS && r == 0; i++) {
        r = open_once(b, &loaded, cache, &warm, err);
        kernels[i] = warm.kernels_ms;
        restores[i] = warm.restore_ms;
    }
    cache_close(cache);
    loaded_close(&loaded);
    if (r < 0)
        return r;
    double hit = quantile(kernels, HITS, 0.5), restore = quantile(restores, HITS, 0.5);
    row(b, "kernels compiled", cold.compile_ms, "ms", "");
    row(b, "kernels from the cache", hit, "ms", "");
    if (cold.kernels_compiled)
        row(b, "  compile against hit", cold.compile_ms / hit, "x", "target 50x");
    row(b, "graph captured", cold.capture_ms, "ms", "");
    row(b, "graph restored", restore, "ms", "");
    row(b, "  capture against restore", cold.capture_ms / restore, "x", "target 10x");
    return 0;
}

/* ---- whole starts of the daemon ---- */

struct restart {
    const char *what;
    unsigned times; /* the median counts */
    bool with_store;
    double target_ms; /* 0: none */
    bool plus_copy;
};

/* emberd is ended, started and asked for an instance: from its exec to the first token. */
static int one_start(struct bench *b, const struct restart *restart, double *ret_ms,
                     struct error *err)
{
    struct start start;

    int r = lab_stop(&b->lab, restart->with_store, err); /* killed, or ended in order */
    if (!restart->with_store)
        lab_drop_store(&b->lab);
    if (r == 0)
        r = lab_start(&b->lab, &b->options, restart->with_store, err);
    if (r == 0)
        r = measure_start(b->lab.socket, &b->prompt, b->lab.exec_ns, false, &start, err);
    if (r < 0)
        return r;
    check_ids(b, &start);
    *ret_ms = start.since_exec_ms;
    start_free(&start);
    return 0;
}

static int whole_start(struct bench *b, const struct restart *restart, struct error *err)
{
    double ms[9], ready[9];
    char limit[96] = "";
    int r = 0;

    b->options.standby = 0;
    for (unsigned i = 0; i < restart->times && r == 0; i++) {
        r = one_start(b, restart, &ms[i], err);
        ready[i] = b->lab.ready_ms;
    }
    if (r < 0)
        return r;
    if (restart->plus_copy)
        snprintf(limit, sizeof limit,
                 "target %.0f ms (%.0f + the bytes from page cache to new memory)",
                 restart->target_ms + (double)b->weights_bytes / b->fill * 1e3, restart->target_ms);
    else if (restart->target_ms > 0)
        snprintf(limit, sizeof limit, "target %.0f ms", restart->target_ms);
    row(b, restart->what, quantile(ms, restart->times, 0.5), "ms", limit);
    if (restart->with_store)
        row(b, "  of which emberd, exec to ready", quantile(ready, restart->times, 0.5), "ms", "");
    return 0;
}

static int restarts(struct bench *b, struct error *err)
{
    /* The target for descriptors is set for models up to 0.6B: mapping grows with the model. */
    const struct restart rows[] = {
        {"first start ever: exec to first token", 1, false, 0, false},
        {"restart, weights in the page cache: exec to first token", 3, false, 300, true},
        {"restart, weights handed over as descriptors: to first token", 5, true,
         b->weights_bytes < 1400 * MIB ? 150 : 0, false}};
    int r = 0;

    for (size_t i = 0; i < ARRAY_LEN(rows) && r == 0; i++)
        r = whole_start(b, &rows[i], err);
    return r;
}

/* ---- spawns ---- */

static int from_empty(struct bench *b, struct error *err)
{
    unsigned n = MIN(b->spawns, 20u);
    _cleanup_free_ double *ms = x_alloc(n * sizeof *ms);
    bool small = b->weights_bytes < 64 * MIB;

    int r = measure_spawns(b->lab.socket, n, false, 0, ms, err);
    if (r < 0)
        return r;
    row(b, "spawn, pool empty: p50", quantile(ms, n, 0.5), "ms",
        small ? "target 25 ms" : "target 60 ms");
    row(b, "spawn, pool empty: max", quantile(ms, n, 1), "ms", "");
    return 0;
}

static int restart_with_pool(struct bench *b, unsigned standby, struct error *err)
{
    _cleanup_(control_freep) struct control *control = NULL;

    b->options.standby = standby;
    int r = lab_stop(&b->lab, false, err);
    if (r == 0)
        r = lab_start(&b->lab, &b->options, true, err);
    if (r == 0)
        r = lab_control(&b->lab, &control, err);
    return r == 0 ? lab_wait_standby(control, standby, 60000, err) : r;
}

static int from_pool(struct bench *b, struct error *err)
{
    _cleanup_free_ double *ms = x_alloc(b->spawns * sizeof *ms);

    int r = restart_with_pool(b, 2, err);
    if (r == 0)
        r = measure_spawns(b->lab.socket, b->spawns, true, 1, ms, err);
    if (r < 0)
        return r;
    row(b, "spawn, pool warm: p50", quantile(ms, b->spawns, 0.5), "ms", "target 1 ms");
    row(b, "spawn, pool warm: p99", quantile(ms, b->spawns, 0.99), "ms", "target 5 ms");
    row(b, "memory of emberd itself", (double)lab_rss(&b->lab) / MIB, "MiB", "target 20 MiB");
    return 0;
}

static int at_once(struct bench *b, struct error *err)
{
    _cleanup_free_ struct start *starts = x_alloc(b->burst * sizeof *starts);
    char what[64];
    double all;

    snprintf(what, sizeof what, "%u spawns at once, the last READY after", b->burst);
    int r = measure_burst(b->lab.socket, &b->prompt, b->burst, starts, &all, err);
    for (unsigned i = 0; i < b->burst; i++) {
        if (r == 0)
            check_ids(b, &starts[i]);
        start_free(&starts[i]);
    }
    if (r == 0)
        row(b, what, all, "ms",
            b->burst == 64 && b->weights_bytes < 64 * MIB ? "target 1000 ms" : "");
    return r;
}

/* The largest file of the checkpoint is a file of weights. */
static char *first_shard(const char *dir)
{
    _cleanup_free_ char *best = NULL;
    off_t size = 0;
    DIR *d = opendir(dir);

    for (struct dirent *e; d && (e = readdir(d));) {
        struct stat st;
        char *path = x_printf("%s/%s", dir, e->d_name);
        if (stat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > size) {
            size = st.st_size;
            free(best);
            best = TAKE(path);
        }
        free(path);
    }
    if (d)
        closedir(d);
    return TAKE(best);
}

static int bench_model(struct bench *b, struct error *err)
{
    cpu_set_t set;
    unsigned threads = sched_getaffinity(0, sizeof set, &set) == 0 ? (unsigned)CPU_COUNT(&set) : 1;
    _cleanup_free_ char *shard = first_shard(b->model);
    char text[24];

    int r = lab_new(&b->lab, err);
    if (r < 0) {
        lab_free(&b->lab);
        return r;
    }
    b->options = (struct lab_options){.model = b->model, .kv_bytes = 32 * MIB};
    b->prompt = (struct prompt){.ids = bench_ids, .n_ids = ARRAY_LEN(bench_ids), .new_tokens = 4};
    b->copy = copy_bandwidth(threads);
    b->fill = shard ? page_cache_bandwidth(shard, threads) : 0;
    if (b->fill <= 0)
        b->fill = b->copy;
    b->same = true;
    r = bench_caches(b, err);
    if (r == 0 && !cli_json(b->call))
        printf("  weights %s; measured with %u threads: memcpy %.1f GB/s, page cache to new memory "
               "%.1f "
               "GB/s\n",
               cli_bytes(b->weights_bytes, text), threads, b->copy / 1e9, b->fill / 1e9);
    if (r == 0)
        r = restarts(b, err);
    if (r == 0)
        r = from_empty(b, err);
    if (r == 0)
        r = from_pool(b, err);
    if (r == 0)
        r = at_once(b, err);
    if (r == 0 && !b->same)
        r = error_set(err, EPROTO, "%s: the starts did not all give the same tokens", b->name);
    if (r == 0 && !cli_json(b->call))
        printf("  every start gave the same tokens: %s\n", b->ids);
    lab_free(&b->lab);
    free(b->ids);
    b->ids = NULL;
    return r;
}

int run_bench_spawn(const struct verb_call *call)
{
    static char *tiny[] = {"tiny"};
    char **names = call->argc ? call->argv : tiny;
    int n = call->argc ? call->argc : 1;
    struct bench b = {.call = call,
                      .spawns = (unsigned)verb_int(call, "spawns"),
                      .burst = (unsigned)verb_int(call, "burst"),
                      .rows = json_array()};
    struct error err = {0};
    int r = 0;

    cli_catch_interrupts();
    for (int i = 0; i < n && r == 0; i++) {
        b.name = names[i];
        r = bench_model_find(call, names[i], 0, &b.model, &err);
        if (r == 0 && !cli_json(call))
            printf("%s\n", names[i]);
        if (r == 0)
            r = bench_model(&b, &err);
        free(TAKE(b.model));
    }
    if (cli_json(call))
        cli_print_json(json_incref(b.rows));
    json_decref(b.rows);
    return r < 0 ? cli_fail(call, &err) : CLI_OK;
}
