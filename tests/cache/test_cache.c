/* SPDX-License-Identifier: Apache-2.0 */
/* One process: keys, values, damage, versions, room, explanations, management. */
#include "util.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"

static const struct cache_options small = {.limit = 2 * MIB, .initial = 128 * KIB, .use_ms = -1};

static int setup(void **state)
{
    *state = dir_make();
    return 0;
}

static int teardown(void **state)
{
    unsetenv("EMBER_FAULT");
    fault_init();
    dir_remove(*state);
    return 0;
}

static void arm(const char *spec)
{
    setenv("EMBER_FAULT", spec, 1);
    fault_init();
}

static struct cache_stats stats_of(struct cache *cache)
{
    struct cache_stats stats;

    assert_int_equal(cache_stats(cache, &stats, NULL), 0);
    return stats;
}

/* ---- Keys ---- */

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
    struct cache *cache = must_open(*state, &small);
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

/* ---- Values ---- */

static void test_roundtrip(void **state)
{
    static const size_t sizes[] = {0, 1, 15, 16, 100, 2000, 4000, 4096, 50 * KIB, 500 * KIB};
    struct cache *cache = must_open(*state, &small);

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
    cache = must_open(*state, &small);
    for (unsigned i = 0; i < ARRAY_LEN(sizes); i++)
        assert_int_equal(get_n(cache, "r", i, sizes[i], NULL), 0);
    cache_close(cache);
}

static void test_replace_and_remove(void **state)
{
    struct cache *cache = must_open(*state, &small);
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
    struct cache *cache = must_open(*state, &small);
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
    struct cache *cache = must_open(*state, &small);
    char *elsewhere = x_printf("%s-moved", (char *)*state);

    assert_int_equal(put_n(cache, "m", 1, 5000, NULL), 0);
    cache_close(cache);
    assert_int_equal(rename(*state, elsewhere), 0);
    free(*state);
    *state = elsewhere;
    cache = must_open(elsewhere, &small);
    assert_int_equal(get_n(cache, "m", 1, 5000, NULL), 0);
    assert_int_equal(cache_warnings(cache, NULL) & CACHE_WARN_ASIDE, 0);
    cache_close(cache);
}

/* ---- Opening ---- */

static void test_open_rules(void **state)
{
    struct cache *cache = must_open(*state, &small), *second = NULL;
    struct error err;
    struct stat st;

    assert_int_equal(cache_open(*state, &small, &second, &err), -EBUSY);
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
    struct cache *cache = must_open(*state, &small);
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
        cache = must_open(*state, &small);
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
        cache = must_open(*state, &small);
        assert_true(cache_warnings(cache, NULL) & CACHE_WARN_ASIDE);
        assert_int_equal(get_n(cache, "s", 1, 20000, NULL), CACHE_MISS);
        assert_int_equal(put_n(cache, "s", 1, 20000, NULL), 0);
        assert_int_equal(get_n(cache, "s", 1, 20000, NULL), 0);
        cache_close(cache);
    }
    assert_int_equal(cache_set_aside(*state, NULL), 0);
    cache = must_open(*state, &small);
    assert_int_equal(get_n(cache, "s", 1, 20000, NULL), CACHE_MISS);
    cache_close(cache);
}

/* ---- Damage of single values ---- */

static int build_good(void *ctx, struct buffer *out, struct error *err)
{
    ++*(int *)ctx;
    return buffer_append(out, "rebuilt", 7);
}

static void test_damage(void **state)
{
    struct cache_key *key = key_of("s", 1);
    struct digest digest = cache_key_digest(key);
    struct error err;

    for (int how = DAMAGE_FLIP_PAYLOAD; how <= DAMAGE_SWAP; how++) {
        for (size_t len = 100; len <= 50000; len += 49900) {
            struct cache *cache = must_open(*state, &small);
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
    struct cache *cache = must_open(*state, &small);
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
    struct cache *cache = must_open(*state, &small);
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
    struct cache *cache = must_open(*state, &small);

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

/* ---- Room ---- */

static void test_grow_then_evict(void **state)
{
    struct cache *cache = must_open(*state, &small);
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
    struct cache *cache = must_open(*state, &small);
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
    struct cache *cache = must_open(*state, &small);
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

/* ---- Explanations ---- */

static struct cache_key *graph_key(const char *cpu, const char *compiler, const char *source)
{
    struct cache_key *key = cache_key_begin(CACHE_GRAPH, "tiny decode b8");

    cache_key_add_string(key, "source", source);
    cache_key_add_string(key, "cpu", cpu);
    if (compiler)
        cache_key_add_string(key, "compiler", compiler);
    return key;
}

static struct cache_miss explain(struct cache *cache, struct cache_key *key)
{
    struct cache_miss miss;
    cache_explain_miss(cache, key, &miss);
    cache_key_free(key);
    return miss;
}

static void test_explain(void **state)
{
    struct cache *cache = must_open(*state, &small);
    char source_a[500], source_b[500];

    memset(source_a, 'a', sizeof source_a);
    memset(source_b, 'b', sizeof source_b);
    source_a[499] = source_b[499] = 0;
    struct cache_miss miss = explain(cache, graph_key("avx2", "cc 12", source_a));
    assert_string_equal(miss.text, "graph 'tiny decode b8': never stored here");
    struct cache_key *key = graph_key("avx2", "cc 12", source_a);
    assert_int_equal(cache_put(cache, key, "x", 1, NULL), 0);
    cache_key_free(key);
    key = graph_key("sse2", "cc 11", source_b);
    assert_int_equal(cache_put(cache, key, "y", 1, NULL), 0);
    cache_key_free(key);
    miss = explain(cache, graph_key("avx512", "cc 12", source_a));
    assert_string_equal(miss.text, "graph 'tiny decode b8': 'cpu' is avx512, stored was avx2");
    miss = explain(cache, graph_key("avx2", NULL, source_a));
    assert_string_equal(miss.text, "graph 'tiny decode b8': 'compiler' (cc 12) is no more");
    miss = explain(cache, graph_key("avx2", "cc 12", source_b));
    assert_non_null(strstr(miss.text, "'source' is "));
    assert_non_null(strstr(miss.text, "(499 bytes)"));
    miss = explain(cache, graph_key("avx2", "cc 12", source_a));
    assert_non_null(strstr(miss.text, "is stored"));
    cache_close(cache);
}

static void cause_is(struct cache *cache, struct cache_key *key, const char *want)
{
    struct cache_miss miss = explain(cache, key);
    assert_string_equal(miss.cause, want);
}

static void test_cause_of_a_miss(void **state)
{
    struct cache *cache = must_open(*state, &small);

    cause_is(cache, graph_key("avx2", "cc 12", "a"), "absent");
    struct cache_key *key = graph_key("avx2", "cc 12", "a");
    assert_int_equal(cache_put(cache, key, "x", 1, NULL), 0);
    cache_key_free(key);
    cause_is(cache, graph_key("avx512", "cc 12", "a"), "cpu");
    cause_is(cache, graph_key("avx2", "cc 13", "a"), "compiler");
    cause_is(cache, graph_key("avx2", NULL, "a"), "compiler");
    cause_is(cache, graph_key("avx512", "cc 13", "a"), "several");
    cause_is(cache, graph_key("avx2", "cc 12", "a"), "damaged"); /* there, and yet it missed */
    cache_close(cache);
}

/* ---- Management ---- */

struct seen {
    unsigned ok, damaged, quarantined, factors;
    uint64_t bytes;
};

static int look(void *ctx, const struct cache_entry *entry)
{
    struct seen *seen = ctx;
    struct cache_factor factor;

    seen->ok += entry->state == CACHE_STATE_OK;
    seen->damaged += entry->state == CACHE_STATE_DAMAGED;
    seen->quarantined += entry->state == CACHE_STATE_QUARANTINED;
    seen->bytes += entry->bytes;
    for (size_t pos = 0; cache_factor_next(entry->factors, entry->factors_len, &pos, &factor);)
        seen->factors += !strcmp(factor.name, "n") || !strcmp(factor.text, "cc 12.2");
    if (entry->state != CACHE_STATE_OK)
        assert_non_null(entry->reason);
    return 0;
}

static int stop_at_once(void *ctx, const struct cache_entry *entry)
{
    return 42;
}

static void test_iterate_verify(void **state)
{
    struct cache *cache = must_open(*state, &small);
    struct cache_verify_result verify;
    struct seen seen = {0};

    for (unsigned n = 0; n < 10; n++)
        assert_int_equal(put_n(cache, "s", n, 1000 * n, NULL), 0);
    assert_int_equal(cache_iterate(cache, look, &seen, NULL), 0);
    assert_int_equal(seen.ok, 10);
    assert_int_equal(seen.bytes, 45000);
    assert_int_equal(seen.factors, 20);
    assert_int_equal(cache_iterate(cache, stop_at_once, NULL, NULL), 42);
    for (unsigned n = 3; n < 6; n++) {
        struct cache_key *key = key_of("s", n);
        struct digest digest = cache_key_digest(key);
        damage(*state, &digest, n == 3 ? DAMAGE_FLIP_HEAD : DAMAGE_FLIP_PAYLOAD);
        cache_key_free(key);
    }
    seen = (struct seen){0};
    assert_int_equal(cache_iterate(cache, look, &seen, NULL), 0);
    assert_int_equal(seen.damaged, 1); /* payloads are not read here */
    assert_int_equal(cache_verify(cache, &verify, NULL), 0);
    assert_int_equal(verify.checked, 10);
    assert_int_equal(verify.damaged, 3);
    seen = (struct seen){0};
    assert_int_equal(cache_iterate(cache, look, &seen, NULL), 0);
    assert_int_equal(seen.ok, 7);
    assert_int_equal(seen.quarantined, 3);
    assert_int_equal(cache_verify(cache, &verify, NULL), 0);
    assert_int_equal(verify.damaged, 0);
    cache_close(cache);
}

static void test_gc(void **state)
{
    struct cache *cache = must_open(*state, &small);
    struct cache_gc_result gc;

    for (unsigned n = 0; n < 20; n++)
        assert_int_equal(put_n(cache, "s", n, 10000, NULL), 0);
    assert_int_equal(get_n(cache, "s", 0, 10000, NULL), 0);
    cache_close(cache); /* the noted use of 0 is written here */
    cache = must_open(*state, &small);
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

/* Prints what opening and reading cost, and fails when they are off by far. */
static void test_speed(void **state)
{
    struct cache *cache = must_open(*state, NULL);
    struct cache_key *key = key_of("s", 1);
    double best_open = 1e9;

    assert_int_equal(put_n(cache, "s", 1, 50 * KIB, NULL), 0);
    cache_close(cache);
    for (int i = 0; i < 20; i++) {
        uint64_t start = clock_ns();
        cache = must_open(*state, NULL);
        best_open = MIN(best_open, clock_ms_since(start));
        cache_close(cache);
    }
    cache = must_open(*state, NULL);
    uint64_t start = clock_ns();
    for (int i = 0; i < 1000; i++) {
        struct cache_value value;
        assert_int_equal(cache_get(cache, key, &value, NULL), 0);
        cache_value_free(&value);
    }
    double get_us = clock_ms_since(start);
    start = clock_ns();
    for (int i = 0; i < 1000; i++) {
        struct cache_read *read;
        const void *data;
        size_t len;
        assert_int_equal(cache_read_begin(cache, &read, NULL), 0);
        assert_int_equal(cache_read_get(read, key, &data, &len, NULL), 0);
        cache_read_end(read);
    }
    print_message("open %.3f ms; 50 KiB: get %.1f us, view %.1f us\n", best_open, get_us,
                  clock_ms_since(start));
    assert_true(best_open < 5);
    assert_true(get_us < 1000);
    cache_key_free(key);
    cache_close(cache);
}

int main(int argc, char **argv)
{
    damage_main(argc, argv);
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_keys),
        TEST(test_broken_keys),
        TEST(test_roundtrip),
        TEST(test_replace_and_remove),
        TEST(test_views),
        TEST(test_moved),
        TEST(test_open_rules),
        TEST(test_read_only),
        TEST(test_versions),
        TEST(test_damaged_store),
        TEST(test_damage),
        TEST(test_rebuilt_once),
        TEST(test_damaged_view),
        TEST(test_quarantine_bounded),
        TEST(test_grow_then_evict),
        TEST(test_churn),
        TEST(test_faults),
        TEST(test_disk_full),
        TEST(test_explain),
        TEST(test_cause_of_a_miss),
        TEST(test_iterate_verify),
        TEST(test_gc),
        TEST(test_speed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
