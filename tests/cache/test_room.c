/* SPDX-License-Identifier: Apache-2.0 */
/* Room: growing, evicting, fragmentation, a full map and a full disk, collecting. */
#include "util.h"

#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

static void test_grow_then_evict(void **state)
{
    struct cache *cache = must_open(*state, &cache_small);
    unsigned n, present = 0;

    for (n = 0; n < 20; n++)
        assert_int_equal(put_n(cache, "s", n, 50 * KIB, NULL), 0);
    struct cache_stats stats = stats_of(cache);
    assert_true(stats.grown >= 3);
    assert_int_equal(stats.evicted, 0);
    assert_int_equal(stats.entries, 20);
    assert_in_range(stats.map_bytes, 20 * 50 * KIB, 2 * MIB);
    for (; n < 200; n++) {
        assert_int_equal(put_n(cache, "s", n, 50 * KIB, NULL), 0);
        assert_int_equal(get_n(cache, "s", 0, 50 * KIB, NULL), 0); /* used: must stay */
    }
    stats = stats_of(cache);
    assert_true(stats.evicted > 100);
    assert_in_range(stats.file_bytes, 1, 2 * MIB + 2 * MIB / 8);
    for (n = 1; n < 200; n++)
        present += !get_n(cache, "s", n, 50 * KIB, NULL);
    assert_in_range(present, 20, 40);
    assert_int_equal(get_n(cache, "s", 199, 50 * KIB, NULL), 0);
    cache_close(cache);
}

/* Values of all sizes for a long time: fragmentation must not end the storing. */
static void test_churn(void **state)
{
    struct cache *cache = must_open(*state, &cache_small);
    uint32_t x = 7;

    for (unsigned n = 0; n < 600; n++) {
        x = x * 1664525u + 1013904223u;
        size_t len = (x >> 8) % (n % 10 ? 20 * KIB : 400 * KIB);
        struct error err = {0};
        int r = put_n(cache, "s", n, len, &err);
        if (r)
            fail_msg("put %u of %zu: %s", n, len, err.text);
        assert_int_equal(get_n(cache, "s", n, len, NULL), 0);
    }
    assert_int_equal(put_n(cache, "s", 9999, 1100 * KIB, NULL), -EFBIG);
    struct cache_verify_result verify;
    assert_int_equal(cache_verify(cache, &verify, NULL), 0);
    assert_int_equal(verify.damaged, 0);
    cache_close(cache);
}

static void test_faults(void **state)
{
    struct cache *cache = must_open(*state, &cache_small);
    struct error err;
    int built = 0;

    assert_int_equal(put_n(cache, "s", 1, 1000, NULL), 0);
    arm("cache-put:1"); /* map full once: grows, stores */
    uint64_t grown = stats_of(cache).grown;
    assert_int_equal(put_n(cache, "s", 2, 1000, &err), 0);
    assert_int_equal(stats_of(cache).grown, grown + 1);
    arm("cache-put:0"); /* always */
    assert_int_equal(put_n(cache, "s", 3, 1000, &err), -ENOSPC);
    arm("cache-full:0");
    assert_int_equal(put_n(cache, "s", 3, 1000, &err), -ENOSPC);
    struct cache_key *key = key_of("b", 77);
    struct cache_build build = {.build = build_good, .ctx = &built, .timeout_ms = 1000};
    struct cache_value value = {0};
    assert_int_equal(cache_get_or_build(cache, key, &build, &value, &err), CACHE_UNSTORED);
    assert_memory_equal(value.data, "rebuilt", 7);
    assert_non_null(strstr(err.text, "No space"));
    cache_value_free(&value);
    arm("");
    assert_int_equal(get_n(cache, "s", 1, 1000, NULL), 0);
    assert_int_equal(put_n(cache, "s", 3, 1000, &err), 0);
    assert_int_equal(cache_get_or_build(cache, key, &build, &value, &err), CACHE_BUILT);
    cache_value_free(&value);
    assert_int_equal(cache_get_or_build(NULL, key, &build, &value, &err), CACHE_UNSTORED);
    cache_value_free(&value);
    cache_key_free(key);
    cache_close(cache);
}

/* A really full file system. */
static void test_disk_full(void **state)
{
    _cleanup_free_ char *mount_point = x_printf("%s/tmpfs", (char *)*state);
    struct error err = {0};
    unsigned stored = 0;
    int r = 0;

    assert_int_equal(mkdir(mount_point, 0700), 0);
    if (mount("none", mount_point, "tmpfs", 0, "size=1m,mode=0700") < 0) {
        print_message("skipped: cannot mount a tmpfs here (%s)\n", strerror(errno));
        skip();
    }
    struct cache *cache = must_open(mount_point, &(struct cache_options){.limit = 64 * MIB});
    while (stored < 1000 && !(r = put_n(cache, "s", stored, 60 * KIB, &err)))
        stored++;
    if (r != -ENOSPC || !strstr(err.text, "No space"))
        print_message("%d %s\n", r, err.text);
    int still_there = 0;
    for (unsigned n = 0; n < stored; n++)
        still_there += !get_n(cache, "s", n, 60 * KIB, NULL);
    struct cache_gc_result gc;
    int collected = cache_gc(cache, 300 * KIB, 0, &gc, NULL);
    int after = put_n(cache, "s", 5000, 60 * KIB, &err);
    cache_close(cache);
    umount(mount_point);
    assert_int_equal(r, -ENOSPC);
    assert_in_range(stored, 8, 17);
    assert_int_equal(still_there, stored);
    if (!collected) /* deleting needs a few pages itself; when they are there, room comes back */
        assert_int_equal(after, 0);
}

static void test_gc(void **state)
{
    struct cache *cache = must_open(*state, &cache_small);
    struct cache_gc_result gc;

    for (unsigned n = 0; n < 20; n++)
        assert_int_equal(put_n(cache, "s", n, 10000, NULL), 0);
    assert_int_equal(get_n(cache, "s", 0, 10000, NULL), 0);
    cache_close(cache); /* the noted use of 0 is written here */
    cache = must_open(*state, &cache_small);
    assert_int_equal(cache_gc(cache, 55000, 0, &gc, NULL), 0);
    assert_int_equal(gc.kept, 5);
    assert_int_equal(gc.removed, 15);
    assert_int_equal(get_n(cache, "s", 0, 10000, NULL), 0);
    assert_int_equal(get_n(cache, "s", 1, 10000, NULL), CACHE_MISS);
    assert_int_equal(get_n(cache, "s", 19, 10000, NULL), 0);
    assert_int_equal(cache_gc(cache, UINT64_MAX, 3600, &gc, NULL), 0);
    assert_int_equal(gc.removed, 0);
    usleep(1100000);
    assert_int_equal(put_n(cache, "s", 50, 10000, NULL), 0); /* writes the noted uses as well */
    usleep(1100000);
    assert_int_equal(put_n(cache, "s", 51, 10000, NULL), 0);
    assert_int_equal(cache_gc(cache, UINT64_MAX, 1, &gc, NULL), 0);
    assert_int_equal(gc.kept, 1);
    assert_int_equal(get_n(cache, "s", 51, 10000, NULL), 0);
    cache_close(cache);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        CACHE_TEST(test_grow_then_evict), CACHE_TEST(test_churn), CACHE_TEST(test_faults),
        CACHE_TEST(test_disk_full),       CACHE_TEST(test_gc),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
