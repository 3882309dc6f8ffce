/* SPDX-License-Identifier: Apache-2.0 */
/* One process, one store: keys, values, who may open it. */
#include "util.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void test_keys(void **state)
{
    struct cache_key *a = cache_key_begin(CACHE_KERNEL, "x"),
                     *b = cache_key_begin(CACHE_KERNEL, "y");
    struct digest da, db;

    cache_key_add_string(a, "ab", "c");
    cache_key_add_string(b, "a", "bc");
    da = cache_key_digest(a);
    db = cache_key_digest(b);
    assert_false(digest_equal(&da, &db));
    cache_key_free(b);
    b = cache_key_begin(CACHE_KERNEL, "another label");
    cache_key_add_string(b, "ab", "c");
    db = cache_key_digest(b);
    assert_true(digest_equal(&da, &db)); /* the subject is no part of it */
    cache_key_free(b);
    b = cache_key_begin(CACHE_GRAPH, "x");
    cache_key_add_string(b, "ab", "c");
    db = cache_key_digest(b);
    assert_false(digest_equal(&da, &db)); /* the kind is */
    cache_key_free(a);
    cache_key_free(b);
    cache_key_free(NULL);
    assert_string_equal(cache_kind_name(CACHE_GRAPH), "graph");
    assert_null(cache_kind_name(999));
}

static void test_broken_keys(void **state)
{
    struct cache *cache = must_open(*state, &cache_small);
    char long_name[CACHE_NAME_MAX + 2];
    struct cache_value value = {0};
    struct error err;

    memset(long_name, 'n', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = 0;
    struct cache_key *key = key_of("s", 1);
    cache_key_add_string(key, long_name, "v");
    assert_int_equal(cache_put(cache, key, "x", 1, &err), -EINVAL);
    assert_int_equal(cache_get(cache, key, &value, &err), -EINVAL);
    assert_non_null(strstr(err.text, "too long"));
    cache_key_free(key);
    key = cache_key_begin(CACHE_KERNEL, "s");
    for (int i = 0; i <= CACHE_FACTORS_MAX; i++)
        cache_key_add_string(key, "f", "v");
    assert_int_equal(cache_put(cache, key, "x", 1, &err), -EINVAL);
    cache_key_free(key);
    cache_close(cache);
}

static void test_roundtrip(void **state)
{
    static const size_t sizes[] = {0, 1, 15, 16, 100, 2000, 4000, 4096, 50 * KIB, 500 * KIB};
    struct cache *cache = must_open(*state, &cache_small);

    for (unsigned i = 0; i < ARRAY_LEN(sizes); i++) {
        assert_int_equal(get_n(cache, "r", i, sizes[i], NULL), CACHE_MISS);
        assert_int_equal(put_n(cache, "r", i, sizes[i], NULL), 0);
        assert_int_equal(get_n(cache, "r", i, sizes[i], NULL), 0);
    }
    struct cache_stats stats = stats_of(cache);
    assert_int_equal(stats.hits, ARRAY_LEN(sizes));
    assert_int_equal(stats.miss_absent, ARRAY_LEN(sizes));
    assert_int_equal(stats.puts, ARRAY_LEN(sizes));
    assert_int_equal(stats.entries, ARRAY_LEN(sizes));
    cache_close(cache);
    cache = must_open(*state, &cache_small);
    for (unsigned i = 0; i < ARRAY_LEN(sizes); i++)
        assert_int_equal(get_n(cache, "r", i, sizes[i], NULL), 0);
    cache_close(cache);
}

static void test_replace_and_remove(void **state)
{
    struct cache *cache = must_open(*state, &cache_small);
    struct cache_key *key = key_of("s", 1);
    struct digest digest = cache_key_digest(key);
    struct cache_value value = {0};

    assert_int_equal(cache_put(cache, key, "first", 5, NULL), 0);
    assert_int_equal(cache_put(cache, key, "second", 6, NULL), 0);
    assert_int_equal(cache_get(cache, key, &value, NULL), 0);
    assert_int_equal(value.len, 6);
    assert_memory_equal(value.data, "second", 6);
    cache_value_free(&value);
    assert_int_equal(stats_of(cache).entries, 1);
    assert_int_equal(cache_remove(cache, &digest, NULL), 0);
    assert_int_equal(cache_remove(cache, &digest, NULL), CACHE_MISS);
    assert_int_equal(cache_get(cache, key, &value, NULL), CACHE_MISS);
    cache_key_free(key);
    cache_close(cache);
}

static void test_views(void **state)
{
    struct cache *cache = must_open(*state, &cache_small);
    _cleanup_free_ uint8_t *want = x_alloc(50 * KIB);
    struct cache_read *read;
    const void *data;
    size_t len;

    for (unsigned n = 0; n < 40; n++)
        assert_int_equal(put_n(cache, "v", n, n < 20 ? n * 7 : 50 * KIB / 40 * n, NULL), 0);
    assert_int_equal(cache_read_begin(cache, &read, NULL), 0);
    for (unsigned n = 0; n < 40; n++) {
        struct cache_key *key = key_of("v", n);
        size_t expect = n < 20 ? n * 7 : 50 * KIB / 40 * n;
        assert_int_equal(cache_read_get(read, key, &data, &len, NULL), 0);
        assert_int_equal((uintptr_t)data % 16, 0);
        assert_int_equal(len, expect);
        fill(want, len, n);
        assert_memory_equal(data, want, len);
        cache_key_free(key);
    }
    /* A snapshot: what is replaced meanwhile does not change under the reader. */
    struct cache_key *key = key_of("v", 39);
    assert_int_equal(cache_read_get(read, key, &data, &len, NULL), 0);
    assert_int_equal(cache_put(cache, key, "new", 3, NULL), 0);
    fill(want, len, 39);
    assert_memory_equal(data, want, len);
    cache_read_end(read);
    cache_read_end(NULL);
    cache_key_free(key);
    cache_close(cache);
}

static void test_moved(void **state)
{
    struct cache *cache = must_open(*state, &cache_small);
    char *elsewhere = x_printf("%s-moved", (char *)*state);

    assert_int_equal(put_n(cache, "m", 1, 5000, NULL), 0);
    cache_close(cache);
    assert_int_equal(rename(*state, elsewhere), 0);
    free(*state);
    *state = elsewhere;
    cache = must_open(elsewhere, &cache_small);
    assert_int_equal(get_n(cache, "m", 1, 5000, NULL), 0);
    assert_int_equal(cache_warnings(cache, NULL) & CACHE_WARN_ASIDE, 0);
    cache_close(cache);
}

static void test_open_rules(void **state)
{
    struct cache *cache = must_open(*state, &cache_small), *second = NULL;
    struct error err;
    struct stat st;

    assert_int_equal(cache_open(*state, &cache_small, &second, &err), -EBUSY);
    assert_null(second);
    assert_int_equal(cache_set_aside(*state, &err), -EBUSY);
    assert_int_equal(put_n(cache, "o", 1, 10, NULL), 0);
    pid_t pid = fork();
    if (!pid) {
        struct error child_err;
        int bad = put_n(cache, "o", 2, 10, &child_err) != -ECHILD;
        bad |= get_n(cache, "o", 1, 10, NULL) != -ECHILD;
        cache_close(cache);
        _exit(bad);
    }
    assert_int_equal(child_wait(pid), 0);
    assert_int_equal(get_n(cache, "o", 1, 10, NULL), 0);
    cache_close(cache);
    cache_close(NULL);

    _cleanup_free_ char *deep = x_printf("%s/a/b/c", (char *)*state);
    cache = must_open(deep, NULL);
    assert_int_equal(stat(deep, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
    cache_close(cache);
    assert_int_equal(chmod(deep, 0777), 0);
    assert_int_equal(cache_open(deep, NULL, &cache, &err), -EPERM);
    assert_non_null(strstr(err.text, "chmod"));
    _cleanup_free_ char *none = x_printf("%s/none", (char *)*state);
    assert_int_equal(cache_open(none, &(struct cache_options){.read_only = true}, &cache, &err),
                     -ENOENT);
}

static void test_read_only(void **state)
{
    struct cache_options ro = {.read_only = true};
    struct cache *cache = must_open(*state, &cache_small);
    struct cache_key *key = key_of("s", 1);
    struct digest digest = cache_key_digest(key);

    assert_int_equal(put_n(cache, "s", 1, 6000, NULL), 0);
    cache_close(cache);
    cache = must_open(*state, &ro);
    assert_int_equal(get_n(cache, "s", 1, 6000, NULL), 0);
    assert_int_equal(put_n(cache, "s", 2, 6000, NULL), -EROFS);
    cache_close(cache);
    damage(*state, &digest, DAMAGE_FLIP_PAYLOAD);
    cache = must_open(*state, &ro);
    assert_int_equal(get_n(cache, "s", 1, 6000, NULL), CACHE_MISS_DAMAGED);
    struct cache_stats stats = stats_of(cache);
    assert_int_equal(stats.entries, 1);
    assert_int_equal(stats.quarantined, 0);
    cache_close(cache);
    cache_key_free(key);
}

int main(int argc, char **argv)
{
    damage_main(argc, argv);
    const struct CMUnitTest tests[] = {
        CACHE_TEST(test_keys),       CACHE_TEST(test_broken_keys),
        CACHE_TEST(test_roundtrip),  CACHE_TEST(test_replace_and_remove),
        CACHE_TEST(test_views),      CACHE_TEST(test_moved),
        CACHE_TEST(test_open_rules), CACHE_TEST(test_read_only),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
