/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tokenizers through the cache: parsed once, mapped after, never an old file's for a new one's, and
 * whatever is wrong with the cache costs time only. "Mapped" is seen in the cache's own counters.
 */
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/fd.h"
#include "engine/tokenizer.h"

#define MODEL SOURCE_ROOT "/models/ember-tiny"

struct place {
    char dir[64], *model, *json, *config, *cache_dir;
    struct cache *cache;
};

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    return remove(path);
}

static void write_file(const char *path, const char *data, size_t len)
{
    struct error err = {0};
    _cleanup_fd_ int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || fd_write_all(fd, data, len, path, &err) < 0)
        fail_msg("%s: %s", path, err.text);
}

static void read_file(const char *path, struct buffer *ret)
{
    if (fd_read_file(path, 1 << 28, &ret->data, &ret->len, NULL) < 0)
        fail_msg("%s cannot be read", path);
}

static int setup(void **state)
{
    struct place *p = x_alloc(sizeof *p);
    _cleanup_(buffer_free) struct buffer data = {0};
    strcpy(p->dir, "/tmp/ember-test-tokenizer-XXXXXX");
    assert_non_null(mkdtemp(p->dir));
    p->model = x_printf("%s/model", p->dir);
    p->json = x_printf("%s/tokenizer.json", p->model);
    p->config = x_printf("%s/tokenizer_config.json", p->model);
    p->cache_dir = x_printf("%s/cache", p->dir);
    assert_int_equal(mkdir(p->model, 0700), 0);
    read_file(MODEL "/tokenizer.json", &data);
    write_file(p->json, data.data, data.len);
    assert_int_equal(cache_open(p->cache_dir, NULL, &p->cache, NULL), 0);
    *state = p;
    return 0;
}

static int teardown(void **state)
{
    struct place *p = *state;
    cache_close(p->cache);
    nftw(p->dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(p->model);
    free(p->json);
    free(p->config);
    free(p->cache_dir);
    free(p);
    return 0;
}

static struct cache_stats stats(struct place *p)
{
    struct cache_stats s;
    assert_int_equal(cache_stats(p->cache, &s, NULL), 0);
    return s;
}

/* The ids that a fresh open gives a text, and that parsing gives. */
static void expect_same(struct place *p, struct cache *cache)
{
    static const char text[] = "Once upon a time, \xE4\xBD\xA0\xE5\xA5\xBD 123\n\n  the end.";
    _cleanup_(tokenizer_freep) struct tokenizer *mapped = NULL, *parsed = NULL;
    _cleanup_free_ uint32_t *a = NULL, *b = NULL;
    struct error err = {0};
    size_t n, m;

    if (engine_tokenizer_open(cache, p->model, &mapped, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(tokenizer_load(p->model, &parsed, NULL), 0);
    assert_int_equal(tokenizer_encode(mapped, text, sizeof text - 1, true, &a, &n, NULL), 0);
    assert_int_equal(tokenizer_encode(parsed, text, sizeof text - 1, true, &b, &m, NULL), 0);
    assert_int_equal(n, m);
    assert_memory_equal(a, b, n * sizeof *a);
    _cleanup_(buffer_free) struct buffer out = {0};
    assert_int_equal(tokenizer_decode(mapped, a, n, true, &out, NULL), 0);
    assert_string_equal(out.data, text);
}

static void compiled_once(void **state)
{
    struct place *p = *state;
    expect_same(p, NULL);
    expect_same(p, p->cache);
    assert_int_equal(stats(p).builds, 1);
    expect_same(p, p->cache);
    expect_same(p, p->cache);
    assert_int_equal(stats(p).builds, 1);
    cache_close(p->cache);
    assert_int_equal(cache_open(p->cache_dir, NULL, &p->cache, NULL), 0);
    expect_same(p, p->cache);
    assert_int_equal(stats(p).builds, 0);
}

/* The source tree's own file is older than the compiler's run that made this test. */
static void digest_of_an_old_file_is_noted(void **state)
{
    struct place *p = *state;
    free(p->model);
    p->model = x_strdup(MODEL);
    expect_same(p, p->cache);
    assert_int_equal(stats(p).entries, 2);
    uint64_t hits = stats(p).hits;
    expect_same(p, p->cache);
    assert_int_equal(stats(p).hits, hits + 2);
    assert_int_equal(stats(p).builds, 1);
}

/* A file that was changed within the tick of its times: its digest must not be remembered. */
static void fresh_files_are_not_noted(void **state)
{
    struct place *p = *state;
    expect_same(p, p->cache);
    assert_int_equal(stats(p).entries, 1);
    expect_same(p, p->cache);
    assert_int_equal(stats(p).builds, 1);
}

static void another_file_is_another_tokenizer(void **state)
{
    struct place *p = *state;
    _cleanup_(buffer_free) struct buffer data = {0};
    expect_same(p, p->cache);
    read_file(p->json, &data);
    char *at = strstr(data.data, "\"<|im_end|>\"");
    assert_non_null(at);
    memcpy(at, "\"<|im_xyz|>\"", 12);
    write_file(p->json, data.data, data.len);
    _cleanup_(tokenizer_freep) struct tokenizer *t = NULL;
    assert_int_equal(engine_tokenizer_open(p->cache, p->model, &t, NULL), 0);
    assert_true(tokenizer_token_id(t, "<|im_xyz|>", 10) >= 0);
    assert_int_equal(stats(p).builds, 2);
}

static void config_is_part_of_it(void **state)
{
    static const char config[] =
        "{\"tokenizer_class\": \"LlamaTokenizer\", \"add_bos_token\": true, "
        "\"bos_token\": \"<|im_start|>\", "
        "\"model_max_length\": 1000000000000000019884624838656}";
    struct place *p = *state;
    expect_same(p, p->cache);
    write_file(p->config, config, sizeof config - 1);
    expect_same(p, p->cache);
    assert_int_equal(stats(p).builds, 2);
}

/* Flips a byte within each image in the store's file. */
static void damage_images(struct place *p)
{
    _cleanup_free_ char *path = x_printf("%s/store.mdb", p->cache_dir);
    _cleanup_(buffer_free) struct buffer data = {0};
    size_t n = 0;
    cache_close(p->cache);
    read_file(path, &data);
    for (char *at = data.data, *end = at + data.len;
         (at = memmem(at, (size_t)(end - at), "EMERTOK1", 8)); at++, n++)
        at[5000] ^= 1;
    assert_true(n > 0);
    write_file(path, data.data, data.len);
    assert_int_equal(cache_open(p->cache_dir, NULL, &p->cache, NULL), 0);
}

static void damage_is_a_miss(void **state)
{
    struct place *p = *state;
    expect_same(p, p->cache);
    damage_images(p);
    expect_same(p, p->cache);
    assert_int_equal(stats(p).builds, 1);
    assert_true(stats(p).miss_damaged > 0);
    expect_same(p, p->cache);
    assert_int_equal(stats(p).builds, 1);
}

static void a_cache_that_cannot_store(void **state)
{
    struct place *p = *state;
    cache_close(p->cache);
    struct cache_options options = {.read_only = true};
    assert_int_equal(cache_open(p->cache_dir, &options, &p->cache, NULL), 0);
    expect_same(p, p->cache);
    expect_same(p, p->cache);
    assert_int_equal(stats(p).entries, 0);
}

static const char long_text[] = "Once upon a time there was a king, who had 12 daughters. ";

struct user {
    const struct tokenizer *t;
    const uint32_t *want;
    size_t n;
    atomic_bool stop;
    unsigned rounds, wrong;
};

static void *use(void *arg)
{
    struct user *u = arg;
    while (!atomic_load(&u->stop) || !u->rounds) {
        _cleanup_free_ uint32_t *ids = NULL;
        size_t n = 0;
        int r = tokenizer_encode(u->t, long_text, sizeof long_text - 1, true, &ids, &n, NULL);
        u->wrong += r < 0 || n != u->n || memcmp(ids, u->want, n * sizeof *ids);
        u->rounds++;
    }
    return NULL;
}

/* While others use it a copy takes the place of the store's pages, and the cache may go. */
static void settled_in_use(void **state)
{
    struct place *p = *state;
    _cleanup_(tokenizer_freep) struct tokenizer *parsed = NULL;
    _cleanup_free_ uint32_t *want = NULL;
    size_t n;
    assert_int_equal(tokenizer_load(p->model, &parsed, NULL), 0);
    assert_int_equal(
        tokenizer_encode(parsed, long_text, sizeof long_text - 1, true, &want, &n, NULL), 0);
    expect_same(p, p->cache);
    for (int i = 0; i < 20; i++) {
        _cleanup_(tokenizer_freep) struct tokenizer *t = NULL;
        struct engine_lease *lease = NULL;
        pthread_t threads[2];
        assert_int_equal(engine_tokenizer_lease(p->cache, p->model, &t, &lease, NULL), 0);
        assert_non_null(lease);
        struct user users[2] = {{.t = t, .want = want, .n = n}, {.t = t, .want = want, .n = n}};
        for (int k = 0; k < 2; k++)
            assert_int_equal(pthread_create(&threads[k], NULL, use, &users[k]), 0);
        assert_int_equal(engine_lease_settle(lease, NULL), 0);
        cache_close(p->cache);
        for (int k = 0; k < 2; k++) {
            atomic_store(&users[k].stop, true);
            pthread_join(threads[k], NULL);
            assert_true(users[k].rounds > 0);
            assert_int_equal(users[k].wrong, 0);
        }
        assert_int_equal(cache_open(p->cache_dir, NULL, &p->cache, NULL), 0);
    }
}

/* Given back unsettled: the tokenizer goes first, then the hold. */
static void lease_given_back(void **state)
{
    struct place *p = *state;
    expect_same(p, p->cache);
    struct tokenizer *t = NULL;
    struct engine_lease *lease = NULL;
    assert_int_equal(engine_tokenizer_lease(p->cache, p->model, &t, &lease, NULL), 0);
    tokenizer_free(t);
    engine_lease_free(lease);
    expect_same(p, p->cache);
}

static void errors_are_the_parsers(void **state)
{
    struct place *p = *state;
    struct tokenizer *t = NULL;
    struct error err = {0};
    write_file(p->json, "{\"model\": {\"type\": \"Unigram\"}}", 30);
    assert_int_equal(engine_tokenizer_open(p->cache, p->model, &t, &err), -ENOTSUP);
    assert_non_null(strstr(err.text, "Unigram"));
    assert_int_equal(stats(p).entries, 0);
    unlink(p->json);
    assert_int_equal(engine_tokenizer_open(p->cache, p->model, &t, &err), -ENOENT);
    assert_null(t);
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(compiled_once),
        TEST(digest_of_an_old_file_is_noted),
        TEST(fresh_files_are_not_noted),
        TEST(another_file_is_another_tokenizer),
        TEST(config_is_part_of_it),
        TEST(damage_is_a_miss),
        TEST(a_cache_that_cannot_store),
        TEST(settled_in_use),
        TEST(lease_given_back),
        TEST(errors_are_the_parsers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
