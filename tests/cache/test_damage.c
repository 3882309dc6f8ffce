/* SPDX-License-Identifier: Apache-2.0 */
/* Damage: of the file, of single values, of a format that is not ours; it is seen, set aside, and
 * built again. */
#include "util.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static void test_versions(void **state)
{
    struct cache *cache = NULL;
    struct error err;
    const char *text;

    write_version(*state, 99);
    assert_int_equal(cache_open(*state, NULL, &cache, &err), -ESTALE);
    assert_non_null(strstr(err.text, "format 99"));
    _cleanup_free_ char *path = x_printf("%s/store.mdb", (char *)*state);
    assert_int_equal(unlink(path), 0);
    write_version(*state, 0);
    cache = must_open(*state, NULL);
    assert_true(cache_warnings(cache, &text) & CACHE_WARN_ASIDE);
    assert_non_null(strstr(text, "older format"));
    assert_int_equal(put_n(cache, "s", 1, 100, NULL), 0);
    cache_close(cache);
    _cleanup_free_ char *old = x_printf("%s/store.mdb.old", (char *)*state);
    assert_int_equal(access(old, F_OK), 0);
    cache = must_open(*state, NULL);
    assert_int_equal(cache_warnings(cache, NULL) & CACHE_WARN_ASIDE, 0);
    assert_int_equal(get_n(cache, "s", 1, 100, NULL), 0);
    cache_close(cache);
}

/* The file as a whole: garbage, cut short, empty. Each start goes on with an empty cache. */
static void test_damaged_store(void **state)
{
    _cleanup_free_ char *path = x_printf("%s/store.mdb", (char *)*state);
    struct cache *cache;

    for (int how = 0; how < 4; how++) {
        cache = must_open(*state, &cache_small);
        for (unsigned n = 0; n < 10; n++)
            assert_int_equal(put_n(cache, "s", n, 20000, NULL), 0);
        cache_close(cache);
        if (how == 0)
            assert_int_equal(truncate(path, 5 * 4096), 0);
        else if (how == 1)
            assert_int_equal(truncate(path, 100), 0);
        else if (how == 2) {
            int fd = open(path, O_WRONLY);
            char garbage[8192];
            memset(garbage, 0x5a, sizeof garbage);
            assert_int_equal(write(fd, garbage, sizeof garbage), sizeof garbage);
            close(fd);
        } else {
            _cleanup_free_ char *marker = x_printf("%s/store.damaged", (char *)*state);
            close(open(marker, O_CREAT | O_WRONLY, 0600));
        }
        cache = must_open(*state, &cache_small);
        assert_true(cache_warnings(cache, NULL) & CACHE_WARN_ASIDE);
        assert_int_equal(get_n(cache, "s", 1, 20000, NULL), CACHE_MISS);
        assert_int_equal(put_n(cache, "s", 1, 20000, NULL), 0);
        assert_int_equal(get_n(cache, "s", 1, 20000, NULL), 0);
        cache_close(cache);
    }
    assert_int_equal(cache_set_aside(*state, NULL), 0);
    cache = must_open(*state, &cache_small);
    assert_int_equal(get_n(cache, "s", 1, 20000, NULL), CACHE_MISS);
    cache_close(cache);
}

static void test_damage(void **state)
{
    struct cache_key *key = key_of("s", 1);
    struct digest digest = cache_key_digest(key);
    struct error err;

    for (int how = DAMAGE_FLIP_PAYLOAD; how <= DAMAGE_SWAP; how++) {
        for (size_t len = 100; len <= 50000; len += 49900) {
            struct cache *cache = must_open(*state, &cache_small);
            assert_int_equal(put_n(cache, "other", 99, len, NULL), 0);
            assert_int_equal(put_n(cache, "s", 1, len, NULL), 0);
            struct cache_stats before = stats_of(cache);
            damage(*state, &digest, how);
            assert_int_equal(get_n(cache, "s", 1, len, &err), CACHE_MISS_DAMAGED);
            assert_non_null(strstr(err.text, "moved to quarantine"));
            assert_int_equal(get_n(cache, "s", 1, len, NULL), CACHE_MISS);
            struct cache_stats after = stats_of(cache);
            assert_int_equal(after.quarantined, before.quarantined + 1);
            assert_int_equal(after.entries, before.entries - 1);
            assert_int_equal(after.miss_damaged, 1);
            assert_int_equal(get_n(cache, "other", 99, len, NULL), 0);
            cache_close(cache);
        }
    }
    cache_key_free(key);
}

static void test_rebuilt_once(void **state)
{
    struct cache *cache = must_open(*state, &cache_small);
    struct cache_key *key = key_of("s", 1);
    struct digest digest = cache_key_digest(key);
    int built = 0;
    struct cache_build build = {.build = build_good, .ctx = &built, .timeout_ms = 1000};
    struct cache_value value = {0};
    struct error err;

    assert_int_equal(put_n(cache, "s", 1, 3000, NULL), 0);
    damage(*state, &digest, DAMAGE_FLIP_PAYLOAD);
    assert_int_equal(cache_get_or_build(cache, key, &build, &value, &err), CACHE_BUILT);
    cache_value_free(&value);
    assert_int_equal(cache_get_or_build(cache, key, &build, &value, &err), 0);
    assert_int_equal(value.len, 7);
    cache_value_free(&value);
    assert_int_equal(built, 1);
    damage(*state, &digest, DAMAGE_FLIP_PAYLOAD);
    assert_int_equal(cache_get_or_build(cache, key, &build, &value, &err), CACHE_UNSTORED);
    assert_non_null(strstr(err.text, "again"));
    assert_memory_equal(value.data, "rebuilt", 7);
    cache_value_free(&value);
    assert_int_equal(built, 2);
    assert_int_equal(stats_of(cache).entries, 0);
    assert_int_equal(stats_of(cache).miss_damaged_again, 1);
    cache_key_free(key);
    cache_close(cache);
}

static void test_damaged_view(void **state)
{
    struct cache *cache = must_open(*state, &cache_small);
    struct cache_key *key = key_of("s", 1);
    struct digest digest = cache_key_digest(key);
    struct cache_read *read;
    const void *data;
    size_t len;

    assert_int_equal(put_n(cache, "s", 1, 30000, NULL), 0);
    damage(*state, &digest, DAMAGE_CUT);
    assert_int_equal(cache_read_begin(cache, &read, NULL), 0);
    assert_int_equal(cache_read_get(read, key, &data, &len, NULL), CACHE_MISS_DAMAGED);
    assert_int_equal(stats_of(cache).quarantined, 0);
    cache_read_end(read);
    assert_int_equal(stats_of(cache).quarantined, 1);
    cache_key_free(key);
    cache_close(cache);
}

/* The quarantine stays small however much is damaged. */
static void test_quarantine_bounded(void **state)
{
    struct cache *cache = must_open(*state, &cache_small);

    for (unsigned n = 0; n < 40; n++) {
        struct cache_key *key = key_of("s", n);
        struct digest digest = cache_key_digest(key);
        assert_int_equal(put_n(cache, "s", n, 40000, NULL), 0);
        damage(*state, &digest, DAMAGE_FLIP_HEAD);
        assert_int_equal(get_n(cache, "s", n, 40000, NULL), CACHE_MISS_DAMAGED);
        cache_key_free(key);
    }
    struct cache_stats stats = stats_of(cache);
    assert_int_equal(stats.quarantined, 32);
    assert_in_range(stats.quarantined_bytes, 1, 600 * KIB);
    struct cache_gc_result gc;
    assert_int_equal(cache_gc(cache, UINT64_MAX, 0, &gc, NULL), 0);
    assert_int_equal(stats_of(cache).quarantined, 0);
    cache_close(cache);
}

int main(int argc, char **argv)
{
    damage_main(argc, argv);
    const struct CMUnitTest tests[] = {
        CACHE_TEST(test_versions),     CACHE_TEST(test_damaged_store),
        CACHE_TEST(test_damage),       CACHE_TEST(test_rebuilt_once),
        CACHE_TEST(test_damaged_view), CACHE_TEST(test_quarantine_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
