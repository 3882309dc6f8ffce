/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/measure.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/mem.h"
#include "cli/generation.h"
#include "cli/output.h"

void start_free(struct start *start)
{
    json_decref(start->phases);
    json_decref(start->ids);
    *start = (struct start){0};
}

static json_t *phases_of(const Ember__V1__SpawnInstanceResponse *response)
{
    json_t *phases = json_object();

    for (size_t i = 0; i < response->n_phases; i++)
        json_object_set_new(phases, response->phases[i]->name, json_real(response->phases[i]->ms));
    return phases;
}

static int run(struct generation *g, const struct prompt *prompt, struct start *ret,
               struct error *err)
{
    _cleanup_(buffer_free) struct buffer text = {0};
    uint32_t token;

    int r = generation_prompt(g, prompt->ids, prompt->n_ids, err);
    while (r == 0)
        r = generation_next(g, &token, err);
    if (r < 0)
        return r;
    ret->ids = json_array();
    for (uint32_t i = g->n_prompt; i < g->n_tokens; i++)
        json_array_append_new(ret->ids, json_integer(g->tokens[i]));
    if (prompt->tokenizer)
        r = tokenizer_decode(prompt->tokenizer, g->tokens + g->n_prompt, g->n_tokens - g->n_prompt,
                             true, &text, err);
    if (text.data)
        snprintf(ret->text, sizeof ret->text, "%s", text.data);
    return r < 0 ? r : 0;
}

int measure_start(const char *socket, const struct prompt *prompt, uint64_t exec_ns, bool keep_warm,
                  struct start *ret, struct error *err)
{
    struct generation_options options = {.max_tokens = prompt->new_tokens};
    _cleanup_(control_freep) struct control *control = NULL;
    struct generation g = {0};
    struct start start = {0};

    int r = control_open_socket(socket, &control, err);
    if (r == 0)
        r = generation_begin(&g, control, &options, err);
    if (r == 0) {
        start.spawn_ms = g.spawn_ms;
        start.phases = phases_of(g.spawned);
        r = run(&g, prompt, &start, err);
    }
    if (r == 0) {
        start.first_token_ms = g.first_token_ms;
        if (exec_ns)
            start.since_exec_ms = (double)(g.started_ns - exec_ns) / 1e6 + g.first_token_ms;
    }
    generation_end(&g, keep_warm);
    if (r < 0)
        start_free(&start);
    else
        *ret = start;
    return r;
}

struct burst {
    const char *socket;
    const struct prompt *prompt;
    struct start start;
    struct error err;
    uint64_t began_ns, ready_ns;
    pthread_barrier_t *barrier;
    int result;
    pthread_t thread;
};

/* Spawns with everybody else, holds the instance until all have theirs, then generates. */
static void *one_of_burst(void *arg)
{
    struct burst *b = arg;
    struct generation_options options = {.max_tokens = b->prompt->new_tokens};
    _cleanup_(control_freep) struct control *control = NULL;
    struct generation g = {0};

    b->result = control_open_socket(b->socket, &control, &b->err);
    pthread_barrier_wait(b->barrier);
    b->began_ns = clock_ns();
    if (b->result == 0)
        b->result = generation_begin(&g, control, &options, &b->err);
    b->ready_ns = clock_ns();
    if (b->result == 0) {
        b->start.spawn_ms = g.spawn_ms;
        b->start.phases = phases_of(g.spawned);
    }
    pthread_barrier_wait(b->barrier);
    if (b->result == 0)
        b->result = run(&g, b->prompt, &b->start, &b->err);
    b->start.first_token_ms = g.first_token_ms;
    generation_end(&g, true);
    return NULL;
}

int measure_burst(const char *socket, const struct prompt *prompt, size_t n, struct start *starts,
                  double *ret_all_ms, struct error *err)
{
    _cleanup_free_ struct burst *all = x_alloc(n * sizeof *all);
    pthread_barrier_t barrier;
    uint64_t first = UINT64_MAX, last = 0;
    int r = 0;

    pthread_barrier_init(&barrier, NULL, (unsigned)n);
    for (size_t i = 0; i < n; i++) {
        all[i] = (struct burst){.socket = socket, .prompt = prompt, .barrier = &barrier};
        if (pthread_create(&all[i].thread, NULL, one_of_burst, &all[i])) {
            fprintf(stderr, "emberctl: no thread for a burst of %zu\n", n);
            abort(); /* the others wait at the barrier for good */
        }
    }
    for (size_t i = 0; i < n; i++)
        pthread_join(all[i].thread, NULL);
    pthread_barrier_destroy(&barrier);
    for (size_t i = 0; i < n; i++) {
        first = MIN(first, all[i].began_ns);
        last = MAX(last, all[i].ready_ns);
        starts[i] = all[i].start;
        if (all[i].result < 0 && r == 0) {
            r = all[i].result;
            if (err)
                *err = all[i].err;
        }
    }
    *ret_all_ms = (double)(last - first) / 1e6;
    return r;
}

int measure_spawns(const char *socket, size_t n, bool keep_warm, unsigned standby, double *ret_ms,
                   struct error *err)
{
    _cleanup_(control_freep) struct control *control = NULL;

    int r = control_open_socket(socket, &control, err);
    for (size_t i = 0; i < n && r == 0; i++) {
        Ember__V1__SpawnInstanceResponse *response = NULL;
        if (cli_interrupted)
            r = error_set(err, ECANCELED, "interrupted");
        else if (standby)
            r = lab_wait_standby(control, standby, 30000, err);
        uint64_t start = clock_ns();
        if (r == 0)
            r = control_spawn(control, "", 60000, &response, err);
        ret_ms[i] = clock_ms_since(start);
        if (r < 0)
            break;
        control_release(control, response->instance->id, keep_warm);
        protobuf_c_message_free_unpacked(&response->base, NULL);
    }
    return r;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double quantile(double *values, size_t n, double q)
{
    qsort(values, n, sizeof *values, by_value);
    size_t i = (size_t)(q * (double)n);
    return n ? values[MIN(i, n - 1)] : 0;
}

struct copier {
    char *from, *to;
    size_t bytes;
    pthread_t thread;
};

static void *copy(void *arg)
{
    struct copier *c = arg;
    memcpy(c->to, c->from, c->bytes);
    return NULL;
}

double copy_bandwidth(unsigned threads)
{
    enum { BYTES = 256 << 20 };
    struct copier copiers[16];
    double best = 0;

    threads = MIN(MAX(threads, 1u), 16u);
    char *from = malloc(BYTES), *to = malloc(BYTES);
    if (from && to) {
        memset(from, 1, BYTES);
        memset(to, 2, BYTES);
    }
    for (int run_no = 0; from && to && run_no < 3; run_no++) {
        uint64_t start = clock_ns();
        for (unsigned i = 0; i < threads; i++) {
            size_t part = BYTES / threads;
            copiers[i] = (struct copier){from + i * part, to + i * part, part, 0};
            if (pthread_create(&copiers[i].thread, NULL, copy, &copiers[i]))
                copiers[i].bytes = 0;
        }
        for (unsigned i = 0; i < threads; i++)
            if (copiers[i].bytes)
                pthread_join(copiers[i].thread, NULL);
        best = MAX(best, BYTES / (clock_ms_since(start) / 1e3));
    }
    free(from);
    free(to);
    return best;
}

struct filler {
    int from, to;
    uint64_t first, last;
    pthread_t thread;
    bool started;
};

static void *fill(void *arg)
{
    enum { STEP = 512 << 10 };
    struct filler *f = arg;
    _cleanup_free_ char *buffer = malloc(STEP);

    for (uint64_t at = f->first; buffer && at < f->last; at += STEP) {
        ssize_t n = pread(f->from, buffer, MIN(f->last - at, (uint64_t)STEP), (off_t)at);
        if (n <= 0 || pwrite(f->to, buffer, (size_t)n, (off_t)at) != n)
            break;
    }
    return NULL;
}

double page_cache_bandwidth(const char *path, unsigned threads)
{
    struct filler fillers[16];
    struct stat st;
    double best = 0;

    threads = MIN(MAX(threads, 1u), 16u);
    _cleanup_fd_ int from = open(path, O_RDONLY | O_CLOEXEC);
    if (from < 0 || fstat(from, &st) < 0)
        return 0;
    uint64_t bytes = (uint64_t)st.st_size; /* all of it: memory gets dearer with the amount */
    int runs = bytes > GIB * 3 / 2 ? 1 : 3;
    for (int run_no = 0; run_no < runs; run_no++) {
        _cleanup_fd_ int to = memfd_create("ember-bench", MFD_CLOEXEC);
        uint64_t start = clock_ns(), part = (bytes / threads + 4095) & ~UINT64_C(4095);
        for (unsigned i = 0; i < threads; i++) {
            fillers[i] = (struct filler){
                from, to, MIN(i * part, bytes), MIN((i + 1) * part, bytes), 0, false};
            fillers[i].started = !pthread_create(&fillers[i].thread, NULL, fill, &fillers[i]);
        }
        for (unsigned i = 0; i < threads; i++)
            if (fillers[i].started)
                pthread_join(fillers[i].thread, NULL);
        best = MAX(best, (double)bytes / (clock_ms_since(start) / 1e3));
    }
    return best;
}
