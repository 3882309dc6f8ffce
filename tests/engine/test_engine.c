/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine on the embedded model, over the backend that the first argument names: exact texts,
 * and the same bits fresh or restored, alone or batched, whole or in chunks, in whichever bucket.
 */
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "base/fault.h"
#include "engine/engine.h"
#include "engine/load.h"

#define MODEL SOURCE_ROOT "/models/ember-tiny"
#define PAGES 64

static const char *backend = "cpu";
static struct loaded loaded = {.weights = -1, .manifest = -1};
static char cache_dir[] = "/tmp/ember-test-engine-XXXXXX";

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    return remove(path);
}

static int setup(void **state)
{
    struct load_options options = {0};
    struct error err = {0};

    assert_non_null(mkdtemp(cache_dir));
    if (load_checkpoint(MODEL, &options, &loaded, &err) < 0)
        fail_msg("%s", err.text);
    return 0;
}

static int teardown(void **state)
{
    loaded_close(&loaded);
    nftw(cache_dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return 0;
}

static struct engine_options options(struct cache *cache)
{
    return (struct engine_options){.backend = backend,
                                   .cache = cache,
                                   .compile = true,
                                   .weights = loaded.weights,
                                   .manifest = loaded.manifest};
}

static struct engine *open_with(struct cache *cache)
{
    struct engine_options o = options(cache);
    struct engine *engine = NULL;
    struct error err = {0};

    if (engine_open(&o, &engine, &err) < 0)
        fail_msg("%s", err.text);
    return engine;
}

static struct cache *open_cache(void)
{
    struct cache *cache = NULL;
    struct error err = {0};

    if (cache_open(cache_dir, NULL, &cache, &err) < 0)
        fail_msg("%s", err.text);
    return cache;
}

static void adopt_all(struct engine *engine)
{
    struct error err = {0};

    assert_int_equal(engine_background(engine, &err), 0);
    while (!engine_settled(engine)) {
        struct pollfd p = {.fd = engine_background_fd(engine), .events = POLLIN};
        assert_true(poll(&p, 1, 30000) == 1);
        if (engine_adopt(engine, NULL, NULL, &err) < 0)
            fail_msg("%s", err.text);
    }
}

/* Pages of a test's sequence: out of order, so that nothing works by luck. */
static void some_pages(uint32_t pages[PAGES], uint32_t first)
{
    for (uint32_t i = 0; i < PAGES; i++)
        pages[i] = first + (i * 7) % PAGES;
}

static struct engine_result step(struct engine *engine, const struct engine_seq *seqs, uint32_t n)
{
    struct engine_step s = {.seqs = seqs, .n_seqs = n, .logits = true};
    struct engine_result result = {0};
    struct error err = {0};

    if (engine_step(engine, &s, &result, &err) < 0)
        fail_msg("%s", err.text);
    return result;
}

/* A prompt in one piece. */
static struct engine_seq whole_prompt(const uint32_t *tokens, uint32_t n, const uint32_t *pages)
{
    return (struct engine_seq){.tokens = tokens,
                               .n_tokens = n,
                               .prompt_len = n,
                               .pages = pages,
                               .n_pages = PAGES,
                               .sample = true};
}

static struct engine_result run_one(struct engine *engine, const uint32_t *tokens, uint32_t n,
                                    uint32_t position, uint32_t prompt_len, const uint32_t *pages)
{
    struct engine_seq seq = whole_prompt(tokens, n, pages);

    seq.position = position;
    seq.prompt_len = prompt_len;
    return step(engine, &seq, 1);
}

static size_t ids_of(const json_t *list, uint32_t *ret, size_t room)
{
    size_t n = json_array_size(list);

    assert_true(n <= room);
    for (size_t i = 0; i < n; i++)
        ret[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    return n;
}

/* The committed texts, token by token. */
static void generates_the_expected_tokens(void **state)
{
    json_t *json = json_load_file(MODEL "/expected_text.json", 0, NULL), *item;
    struct engine *engine = open_with(NULL);
    uint32_t pages[PAGES], prompt[512], want[512];
    size_t index;

    some_pages(pages, 3);
    assert_true(json_array_size(json_object_get(json, "cases")) >= 5);
    json_array_foreach(json_object_get(json, "cases"), index, item)
    {
        size_t n = ids_of(json_object_get(item, "prompt_ids"), prompt, 512);
        size_t m = ids_of(json_object_get(item, "greedy_ids"), want, 512);
        struct engine_result r = {0};
        for (size_t done = 0; done < n; done += 64)
            r = run_one(engine, prompt + done, (uint32_t)MIN(64, n - done), (uint32_t)done,
                        (uint32_t)n, pages);
        for (size_t i = 0; i < m; i++) {
            assert_int_equal(r.greedy[0], want[i]);
            r = run_one(engine, &want[i], 1, (uint32_t)(n + i), (uint32_t)n, pages);
        }
    }
    json_decref(json);
    engine_free(engine);
}

static const uint32_t prompt_a[] = {1, 345, 201, 3288, 532, 341, 33, 2, 201, 1, 347, 201};
static const uint32_t prompt_b[] = {1,   345, 201, 381,  364, 261, 2359, 33,  2,    201, 1,
                                    347, 201, 35,  2359, 336, 404, 2854, 308, 1061, 290};

static float *copy_logits(struct engine *engine, const struct engine_result *r, uint32_t row)
{
    uint32_t vocab = engine_model(engine)->vocab_size;
    float *copy = malloc(vocab * sizeof *copy);

    assert_non_null(copy);
    memcpy(copy, r->logits + (size_t)row * vocab, vocab * sizeof *copy);
    return copy;
}

static void assert_same_bits(struct engine *engine, const float *a, const float *b)
{
    assert_memory_equal(a, b, engine_model(engine)->vocab_size * sizeof *a);
}

static void restored_graph_gives_the_bits_of_a_fresh_one(void **state)
{
    uint32_t pages[PAGES];
    some_pages(pages, 0);
    struct cache *cache = open_cache();
    struct engine *fresh = open_with(cache), *restored = open_with(cache);
    const struct engine_start *f = engine_started(fresh), *r = engine_started(restored);

    assert_int_equal(f->graphs_captured, 1);
    assert_int_equal(r->graphs_captured, 0);
    assert_int_equal(r->graphs_restored, 1);
    assert_int_equal(r->kernels_compiled, 0);
    struct engine_result rf = run_one(fresh, prompt_b, ARRAY_LEN(prompt_b), 0, 21, pages);
    struct engine_result rr = run_one(restored, prompt_b, ARRAY_LEN(prompt_b), 0, 21, pages);
    assert_same_bits(fresh, rf.logits, rr.logits);
    engine_free(fresh);
    engine_free(restored);
    cache_close(cache);
}

static void batch_bucket_and_chunk_do_not_change_bits(void **state)
{
    uint32_t pa[PAGES], pb[PAGES];
    struct engine *engine = open_with(NULL);
    some_pages(pa, 0);
    some_pages(pb, PAGES);

    struct engine_result r = run_one(engine, prompt_b, 21, 0, 21, pb);
    float *alone = copy_logits(engine, &r, 0);

    struct engine_seq both[] = {whole_prompt(prompt_a, 12, pa), whole_prompt(prompt_b, 21, pb)};
    r = step(engine, both, 2);
    assert_int_equal(r.n_rows, 2);
    assert_same_bits(engine, alone, r.logits + engine_model(engine)->vocab_size);

    adopt_all(engine);
    assert_int_equal(engine_limits(engine).max_tokens, 512);
    for (uint32_t chunk = 1; chunk <= 21; chunk++) { /* through the buckets of 1, 16 and 64 */
        for (uint32_t done = 0; done < 21; done += chunk)
            r = run_one(engine, prompt_b + done, MIN(chunk, 21 - done), done, 21, pb);
        assert_same_bits(engine, alone, r.logits);
    }
    free(alone);
    engine_free(engine);
}

static bool always(void *ctx)
{
    ++*(int *)ctx;
    return true;
}

/* A graph that is not proved yet gives way to whoever waits, and is proved later. */
static void adoption_gives_way(void **state)
{
    struct engine *engine = open_with(NULL);
    struct error err = {0};
    int asked = 0;

    assert_int_equal(engine_background(engine, &err), 0);
    struct pollfd p = {.fd = engine_background_fd(engine), .events = POLLIN};
    assert_int_equal(poll(&p, 1, 30000), 1);
    for (int i = 0; i < 5; i++)
        assert_int_equal(engine_adopt(engine, always, &asked, &err), 1);
    assert_int_equal(asked, 5);
    assert_int_equal(engine_limits(engine).max_tokens, 64);
    assert_int_equal(poll(&p, 1, 0), 1); /* it can be taken up again */
    while (!engine_settled(engine))
        assert_true(poll(&p, 1, 30000) == 1 && engine_adopt(engine, NULL, NULL, &err) >= 0);
    assert_int_equal(engine_limits(engine).max_tokens, 512);
    engine_free(engine);
}

/* Each graph that cannot be made is told once, and the first bucket serves on. */
static void dropped_graphs_are_told(void **state)
{
    struct engine *engine = open_with(NULL);
    uint32_t pages[PAGES];
    struct error err = {0};
    int told = 0;

    some_pages(pages, 0);
    setenv("EMBER_FAULT", "alloc", 1); /* every one from here on */
    fault_init();
    assert_int_equal(engine_background(engine, &err), 0);
    usleep(100000); /* most likely all of them are dropped by now: also then nobody may miss them */
    while (!engine_settled(engine)) {
        struct pollfd p = {.fd = engine_background_fd(engine), .events = POLLIN};
        assert_int_equal(poll(&p, 1, 30000), 1);
        struct error why = {0};
        if (engine_adopt(engine, NULL, NULL, &why) < 0) {
            assert_true(strlen(why.text) > 10);
            told++;
        }
    }
    unsetenv("EMBER_FAULT");
    fault_init();
    assert_int_equal(told, 3);
    assert_int_equal(engine_limits(engine).max_tokens, 64);
    assert_int_equal(run_one(engine, prompt_a, 12, 0, 12, pages).greedy[0], 43);
    engine_free(engine);
}

/* One whose proof fails is dropped alone: the others come. */
static void graph_that_fails_its_proof_is_dropped_alone(void **state)
{
    struct engine *engine = open_with(NULL);
    struct error err = {0};
    int told = 0;

    setenv("EMBER_FAULT", "canary:1", 1);
    fault_init();
    assert_int_equal(engine_background(engine, &err), 0);
    while (!engine_settled(engine)) {
        struct pollfd p = {.fd = engine_background_fd(engine), .events = POLLIN};
        assert_int_equal(poll(&p, 1, 30000), 1);
        told += engine_adopt(engine, NULL, NULL, &err) == -EBADMSG;
    }
    unsetenv("EMBER_FAULT");
    fault_init();
    assert_int_equal(told, 1);
    assert_non_null(strstr(err.text, "canary"));
    assert_int_equal(engine_started(engine)->graphs_captured, 3);
    engine_free(engine);
}

/* ---- early: a load that goes on in another thread ---- */

struct early_load {
    pthread_t thread;
    sem_t attachable;
    atomic_bool give_up;
    int weights, manifest, filling, result;
    struct loaded loaded;
};

static void on_attachable(void *ctx, int weights, int manifest, int filling)
{
    struct early_load *load = ctx;

    load->weights = fcntl(weights, F_DUPFD_CLOEXEC, 0);
    load->manifest = fcntl(manifest, F_DUPFD_CLOEXEC, 0);
    load->filling = fcntl(filling, F_DUPFD_CLOEXEC, 0);
    sem_post(&load->attachable);
}

static int on_load_progress(void *ctx, uint64_t done, uint64_t total)
{
    return atomic_load(&((struct early_load *)ctx)->give_up);
}

static void *load_slowly(void *arg)
{
    struct early_load *load = arg;
    struct load_options o = {.rate = 60 * MIB, /* a quarter of a second */
                             .attachable = on_attachable,
                             .progress = on_load_progress,
                             .ctx = load};

    load->result = load_checkpoint(MODEL, &o, &load->loaded, NULL);
    return NULL;
}

static void start_load(struct early_load *load)
{
    *load = (struct early_load){.loaded = {.weights = -1, .manifest = -1}};
    sem_init(&load->attachable, 0, 0);
    assert_int_equal(pthread_create(&load->thread, NULL, load_slowly, load), 0);
    sem_wait(&load->attachable);
}

static void end_load(struct early_load *load)
{
    pthread_join(load->thread, NULL);
    close(load->weights);
    close(load->manifest);
    close(load->filling);
    loaded_close(&load->loaded);
    sem_destroy(&load->attachable);
}

static struct engine_options early_options(const struct early_load *load, struct cache *cache)
{
    struct engine_options o = options(cache);

    o.weights = load->weights;
    o.manifest = load->manifest;
    o.filling = load->filling;
    o.early = true;
    return o;
}

/* The first step begins before the weights have arrived, and gives the bits of any other. */
static void early_engine_gives_the_same_bits(void **state)
{
    struct cache *cache = open_cache();
    struct engine *engine = open_with(cache), *early = NULL;
    struct early_load load;
    struct error err = {0};
    uint32_t pages[PAGES];

    some_pages(pages, 0);
    struct engine_result r = run_one(engine, prompt_b, 21, 0, 21, pages);
    float *whole = copy_logits(engine, &r, 0);
    start_load(&load);
    struct engine_options o = early_options(&load, cache);
    if (engine_open(&o, &early, &err) < 0)
        fail_msg("%s", err.text);
    assert_true(engine_early(early));
    assert_false(engine_settled(early));
    r = run_one(early, prompt_b, 21, 0, 21, pages);
    assert_same_bits(engine, whole, r.logits);
    assert_false(engine_early(early));
    assert_true(engine_started(early)->canary_ms > 0);
    adopt_all(early);
    r = run_one(early, prompt_b, 21, 0, 21, pages);
    assert_same_bits(engine, whole, r.logits);
    free(whole);
    engine_free(early);
    engine_free(engine);
    end_load(&load);
    cache_close(cache);
}

/* Nobody asks for a step: it is proved when the weights are there. */
static void early_engine_is_proved_without_a_step(void **state)
{
    struct engine *early = NULL;
    struct early_load load;
    struct error err = {0};

    start_load(&load);
    struct engine_options o = early_options(&load, NULL);
    if (engine_open(&o, &early, &err) < 0)
        fail_msg("%s", err.text);
    adopt_all(early);
    assert_false(engine_early(early));
    assert_int_equal(engine_limits(early).max_tokens, 512);
    engine_free(early);
    end_load(&load);
}

static void failed_load_breaks_its_early_engines(void **state)
{
    struct engine *early = NULL;
    struct early_load load;
    struct engine_result result;
    struct error err = {0};
    uint32_t pages[PAGES];

    some_pages(pages, 0);
    start_load(&load);
    atomic_store(&load.give_up, true);
    struct engine_options o = early_options(&load, NULL);
    int r = engine_open(&o, &early, &err); /* a backend that waits for all of it fails here */
    if (r == 0) {
        struct engine_seq seq = whole_prompt(prompt_b, 21, pages);
        struct engine_step s = {.seqs = &seq, .n_seqs = 1};
        r = engine_step(early, &s, &result, &err);
        assert_non_null(engine_broken(early));
        assert_int_equal(engine_step(early, &s, &result, &err), -EPIPE);
        engine_free(early);
    }
    assert_int_equal(r, -EPIPE);
    assert_non_null(strstr(err.text, "load"));
    end_load(&load);
    assert_int_equal(load.result, -ECANCELED);
}

/* A proof that fails at the end lets no token out. */
static void early_engine_without_proof_gives_nothing(void **state)
{
    struct cache *cache = open_cache();
    struct engine *early = NULL;
    struct early_load load;
    struct engine_result result;
    struct error err = {0};
    uint32_t pages[PAGES];

    some_pages(pages, 0);
    engine_free(open_with(cache)); /* the record is there */
    start_load(&load);
    setenv("EMBER_FAULT", "canary:1", 1);
    fault_init();
    struct engine_options o = early_options(&load, cache);
    assert_int_equal(engine_open(&o, &early, &err), 0);
    struct engine_seq seq = whole_prompt(prompt_b, 21, pages);
    struct engine_step s = {.seqs = &seq, .n_seqs = 1};
    assert_int_equal(engine_step(early, &s, &result, &err), -EBADMSG);
    unsetenv("EMBER_FAULT");
    fault_init();
    assert_non_null(strstr(err.text, "canary"));
    assert_non_null(engine_broken(early));
    engine_free(early);
    end_load(&load);
    cache_close(cache);
}

static void no_memory_for_absurd_kv(void **state)
{
    struct engine_options o = options(NULL);
    struct engine *engine = NULL;
    struct error err = {0};

    o.kv_bytes = UINT64_MAX;
    assert_int_equal(engine_open(&o, &engine, &err), -EINVAL);
    assert_non_null(strstr(err.text, "kv_bytes"));
}

static void refuses_bad_steps_and_serves_on(void **state)
{
    struct engine *engine = open_with(NULL);
    uint32_t pages[PAGES], bad_page[] = {engine_limits(engine).pages}, bad_token[] = {4096};
    uint32_t many[600] = {0};
    some_pages(pages, 0);
    const struct {
        struct engine_seq seq;
        int want;
    } cases[] = {
        {{.tokens = prompt_a, .n_tokens = 0, .pages = pages, .n_pages = PAGES}, -EINVAL},
        {{.tokens = bad_token, .n_tokens = 1, .pages = pages, .n_pages = PAGES}, -EINVAL},
        {{.tokens = prompt_a, .n_tokens = 1, .pages = bad_page, .n_pages = 1}, -EINVAL},
        {{.tokens = prompt_b, .n_tokens = 21, .pages = pages, .n_pages = 1}, -EINVAL},
        {{.tokens = prompt_a, .n_tokens = 1, .position = 2048, .pages = pages, .n_pages = PAGES},
         -EINVAL},
        {{.tokens = prompt_a,
          .n_tokens = 1,
          .position = UINT32_MAX,
          .pages = pages,
          .n_pages = PAGES},
         -EINVAL},
        {{.tokens = many, .n_tokens = 600, .pages = pages, .n_pages = PAGES}, -E2BIG},
    };

    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct engine_step s = {.seqs = &cases[i].seq, .n_seqs = 1};
        struct engine_result result;
        struct error err = {0};
        assert_int_equal(engine_step(engine, &s, &result, &err), cases[i].want);
        assert_true(strlen(err.text) > 10);
    }
    assert_int_equal(run_one(engine, prompt_a, 12, 0, 12, pages).greedy[0], 43);
    engine_free(engine);
}

static void wrong_canary_is_not_ready(void **state)
{
    struct cache *cache = open_cache();
    struct engine *engine = NULL;
    struct engine_options o = options(cache);
    struct error err = {0};

    engine_free(open_with(cache)); /* the record is there */
    setenv("EMBER_FAULT", "canary:1", 1);
    fault_init();
    assert_int_equal(engine_open(&o, &engine, &err), -EBADMSG);
    assert_non_null(strstr(err.text, "canary"));
    unsetenv("EMBER_FAULT");
    fault_init();
    engine_free(open_with(cache));
    cache_close(cache);
}

/* Weights of the right size that are not those of the manifest: only the canary can tell. */
static void other_weights_are_found_by_the_canary(void **state)
{
    struct cache *cache = open_cache();
    off_t size = lseek(loaded.weights, 0, SEEK_END);
    int fd = memfd_create("other", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    char *data = mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, loaded.weights, 0);
    struct engine_options o = options(cache);
    struct engine *engine = NULL;
    struct error err = {0};

    assert_true(data != MAP_FAILED && fd >= 0);
    engine_free(open_with(cache));
    for (off_t done = 0; done < size;)
        done += write(fd, data + done, (size_t)(size - done));
    /* Layer 0 begins on a page boundary behind the embedding; flip a bit of many of its values. */
    for (off_t at = 4096 * 256 * 2; at < 4096 * 256 * 2 + 65536; at += 64) {
        char byte = (char)(data[at] ^ 0x10);
        assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    }
    munmap(data, (size_t)size);
    assert_int_equal(
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL), 0);
    o.weights = fd;
    assert_int_equal(engine_open(&o, &engine, &err), -EBADMSG);
    assert_non_null(strstr(err.text, "canary"));
    close(fd);
    cache_close(cache);
}

static void failing_compiler_costs_nothing_but_speed(void **state)
{
    uint32_t pages[PAGES];
    some_pages(pages, 0);
    setenv("EMBER_FAULT", "compile", 1);
    fault_init();
    struct engine *engine = open_with(NULL);
    assert_int_equal(engine_started(engine)->kernels_compiled, 0);
    assert_int_equal(run_one(engine, prompt_a, 12, 0, 12, pages).greedy[0], 43);
    engine_free(engine);
    unsetenv("EMBER_FAULT");
    fault_init();
}

/* Whole prompt, chunks, single tokens behind it and beside another sequence: one kind, one answer.
 */
static void every_kind_of_kv(void **state)
{
    uint32_t pages[PAGES], vocab = 0, tokens[24];
    struct error err = {0};

    some_pages(pages, 0);
    for (uint32_t i = 0; i < ARRAY_LEN(tokens); i++)
        tokens[i] = prompt_a[i % 12] + i / 12;
    for (enum kv_kind kind = 0; kind < KV_KIND_COUNT; kind++) {
        struct engine_options o = options(NULL);
        struct engine *engine = NULL;
        o.kv = kind;
        o.compile = false;
        if (engine_open(&o, &engine, &err) < 0)
            fail_msg("%s: %s", kv_kind_name(kind), err.text);
        vocab = engine_model(engine)->vocab_size;
        _cleanup_free_ float *whole = x_alloc(vocab * sizeof(float));
        struct engine_result result = run_one(engine, tokens, 24, 0, 24, pages);
        memcpy(whole, result.logits, vocab * sizeof(float));
        for (uint32_t done = 0, n; done < 24; done += n) {
            n = done < 18 ? 9 : 1;
            result = run_one(engine, tokens + done, n, done, 24, pages);
        }
        assert_memory_equal(result.logits, whole, vocab * sizeof(float));
        assert_int_equal(engine_limits(engine).bytes > 0, 1);
        engine_free(engine);
    }
    struct engine_options o = options(NULL);
    struct engine *engine = NULL;
    o.kv = KV_KIND_COUNT;
    assert_int_equal(engine_open(&o, &engine, &err), -EINVAL);
}

static void times_of_kernels(void **state)
{
    struct engine_profile_row rows[ENGINE_PROFILE_MAX];
    uint32_t pages[PAGES], token = 5, linear = 0;
    struct engine *engine = open_with(NULL);
    struct error err = {0};

    some_pages(pages, 0);
    int r = engine_profile(engine, &err);
    if (strcmp(backend, "cpu")) { /* no more than the mandatory slots */
        assert_int_equal(r, -ENOTSUP);
        assert_non_null(strstr(err.text, "keeps no times"));
        assert_int_equal(engine_profile_end(engine, rows), 0);
        engine_free(engine);
        return;
    }
    assert_int_equal(r, 0);
    for (uint32_t i = 0; i < 3; i++)
        run_one(engine, &token, 1, i, 1, pages);
    uint32_t n = engine_profile_end(engine, rows);
    assert_true(n > 4);
    for (uint32_t i = 0; i < n; i++) {
        assert_true(i == 0 || rows[i].ns <= rows[i - 1].ns);
        assert_true(rows[i].launches && rows[i].launches % 3 == 0);
        linear |= !strncmp(rows[i].kernel, "linear", 6);
    }
    assert_true(linear);
    run_one(engine, &token, 1, 3, 1, pages); /* without times */
    assert_int_equal(engine_profile_end(engine, rows), 0);
    assert_int_equal(engine_fill_kv(engine, &err), 0);
    engine_free(engine);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(generates_the_expected_tokens),
        cmocka_unit_test(restored_graph_gives_the_bits_of_a_fresh_one),
        cmocka_unit_test(batch_bucket_and_chunk_do_not_change_bits),
        cmocka_unit_test(adoption_gives_way),
        cmocka_unit_test(dropped_graphs_are_told),
        cmocka_unit_test(graph_that_fails_its_proof_is_dropped_alone),
        cmocka_unit_test(early_engine_gives_the_same_bits),
        cmocka_unit_test(early_engine_is_proved_without_a_step),
        cmocka_unit_test(failed_load_breaks_its_early_engines),
        cmocka_unit_test(early_engine_without_proof_gives_nothing),
        cmocka_unit_test(no_memory_for_absurd_kv),
        cmocka_unit_test(refuses_bad_steps_and_serves_on),
        cmocka_unit_test(wrong_canary_is_not_ready),
        cmocka_unit_test(other_weights_are_found_by_the_canary),
        cmocka_unit_test(failing_compiler_costs_nothing_but_speed),
        cmocka_unit_test(every_kind_of_kv),
        cmocka_unit_test(times_of_kernels),
    };

    if (argc > 1)
        backend = argv[1];
    return cmocka_run_group_tests(tests, setup, teardown);
}
