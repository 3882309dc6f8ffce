/* SPDX-License-Identifier: Apache-2.0 */
/* What it tells of itself: why something missed, what is stored, what is damaged. */
#include "util.h"

#include <string.h>

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
    struct cache *cache = must_open(*state, &cache_small);
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
    struct cache *cache = must_open(*state, &cache_small);

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
    struct cache *cache = must_open(*state, &cache_small);
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

int main(int argc, char **argv)
{
    damage_main(argc, argv);
    const struct CMUnitTest tests[] = {
        CACHE_TEST(test_explain),
        CACHE_TEST(test_cause_of_a_miss),
        CACHE_TEST(test_iterate_verify),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
