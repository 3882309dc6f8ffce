/* SPDX-License-Identifier: Apache-2.0 */
/* KV pages: references, what is found again, in which order free pages are handed out; and at
 * random. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <string.h>

#include "scheduler/kvpages.h"

#define SIZE 4

static void verify(const struct kvpages *pages, const uint32_t *held)
{
    struct error err = {0};
    if (kvpages_verify(pages, held, &err) < 0)
        fail_msg("%s", err.text);
}

static void sizes_are_checked(void **state)
{
    struct kvpages *pages = NULL;
    assert_int_equal(-EINVAL, kvpages_new(0, 16, &pages, NULL));
    assert_int_equal(-EINVAL, kvpages_new(16, 0, &pages, NULL));
    assert_int_equal(-EINVAL, kvpages_new(UINT32_MAX, 16, &pages, NULL));
    assert_int_equal(-EINVAL, kvpages_new(16, KVHASH_MAX_TOKENS + 1, &pages, NULL));
    assert_null(pages);
    kvpages_free(NULL);
}

static void hashes_depend_on_all_that_came_before(void **state)
{
    uint32_t a[SIZE] = {1, 2, 3, 4}, b[SIZE] = {1, 2, 3, 5};
    struct digest root = kvhash_root(1, 0, NULL, 0), salted = kvhash_root(1, 0, "x", 1);
    struct digest other = kvhash_root(2, 0, NULL, 0), longer = kvhash_root(1, 9, NULL, 0);
    struct digest ra = kvhash_next(&root, a, SIZE), rb = kvhash_next(&root, b, SIZE);
    struct digest sa = kvhash_next(&salted, a, SIZE), oa = kvhash_next(&other, a, SIZE);
    struct digest la = kvhash_next(&longer, a, SIZE), again = kvhash_next(&root, a, SIZE);
    struct digest raa = kvhash_next(&ra, a, SIZE), rba = kvhash_next(&rb, a, SIZE);

    assert_true(digest_equal(&ra, &again));
    assert_false(digest_equal(&ra, &rb));
    assert_false(digest_equal(&ra, &sa));
    assert_false(digest_equal(&ra, &oa));
    assert_false(digest_equal(&ra, &la));
    assert_false(digest_equal(&raa, &rba));
}

static void content_survives_until_the_page_is_wanted(void **state)
{
    _cleanup_(kvpages_freep) struct kvpages *pages = NULL;
    uint32_t tokens[SIZE] = {1, 2, 3, 4}, more[SIZE] = {5, 6, 7, 8};
    struct digest root = kvhash_root(1, 0, NULL, 0);
    struct digest first = kvhash_next(&root, tokens, SIZE),
                  second = kvhash_next(&first, more, SIZE);

    assert_int_equal(0, kvpages_new(3, SIZE, &pages, NULL));
    uint32_t a = kvpages_take(pages), b = kvpages_take(pages);
    assert_true(kvpages_register(pages, a, &first, tokens));
    assert_true(kvpages_register(pages, b, &second, more));
    assert_int_equal(kvpages_find(pages, &first, tokens), a);
    assert_int_equal(kvpages_find(pages, &first, more), KVPAGE_NONE); /* a hash is not enough */
    kvpages_ref(pages, a);
    kvpages_unref(pages, b); /* last first */
    kvpages_unref(pages, a);
    assert_int_equal(kvpages_refs(pages, a), 1);
    kvpages_unref(pages, a);
    assert_int_equal(kvpages_available(pages), 3);
    uint32_t c = kvpages_take(pages); /* the one without content */
    assert_true(c != a && c != b);
    assert_int_equal(kvpages_take(pages), b); /* the continuation, before the prefix */
    assert_int_equal(kvpages_find(pages, &second, more), KVPAGE_NONE);
    assert_int_equal(kvpages_find(pages, &first, tokens), a);
    kvpages_ref(pages, a);
    assert_int_equal(kvpages_take(pages), KVPAGE_NONE);
    verify(pages, (uint32_t[]){1, 1, 1});
}

static void a_taken_hash_is_told(void **state)
{
    _cleanup_(kvpages_freep) struct kvpages *pages = NULL;
    uint32_t tokens[SIZE] = {1, 2, 3, 4}, more[SIZE] = {5, 6, 7, 8};
    struct digest root = kvhash_root(1, 0, NULL, 0), hash = kvhash_next(&root, tokens, SIZE);

    assert_int_equal(0, kvpages_new(3, SIZE, &pages, NULL));
    uint32_t a = kvpages_take(pages), b = kvpages_take(pages);
    assert_true(kvpages_register(pages, a, &hash, tokens));
    assert_true(kvpages_register(pages, b, &hash, tokens)); /* the same block: stays private */
    assert_false(kvpages_register(pages, b, &hash, more));  /* a collision */
    assert_int_equal(kvpages_find(pages, &hash, tokens), a);
    verify(pages, (uint32_t[]){1, 1, 0});
}

static void at_random(void **state)
{
    enum { N = 17 };
    _cleanup_(kvpages_freep) struct kvpages *pages = NULL;
    uint32_t held[N] = {0}, content[N], random = 1;
    struct digest root = kvhash_root(1, 0, NULL, 0);

    memset(content, 0xff, sizeof content);
    assert_int_equal(0, kvpages_new(N, SIZE, &pages, NULL));
    for (int i = 0; i < 20000; i++) {
        random = random * 1664525 + 1013904223;
        uint32_t action = random >> 30, page = (random >> 20) % N, word = (random >> 8) % 12;
        uint32_t tokens[SIZE] = {word, word, word, word};
        struct digest hash = kvhash_next(&root, tokens, SIZE);
        if (action == 0) {
            uint32_t got = kvpages_take(pages);
            if (got == KVPAGE_NONE)
                continue;
            assert_int_equal(held[got], 0);
            held[got] = 1;
            content[got] = UINT32_MAX;
        } else if (action == 1 && held[page]) {
            kvpages_unref(pages, page);
            held[page]--;
        } else if (action == 2 && held[page] && content[page] == UINT32_MAX) {
            bool known = kvpages_find(pages, &hash, tokens) != KVPAGE_NONE;
            assert_true(kvpages_register(pages, page, &hash, tokens));
            content[page] = known ? UINT32_MAX : word;
        } else if (action == 3) {
            uint32_t found = kvpages_find(pages, &hash, tokens);
            if (found == KVPAGE_NONE)
                continue;
            assert_int_equal(content[found], word);
            kvpages_ref(pages, found);
            held[found]++;
        }
        verify(pages, held);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_are_checked),
        cmocka_unit_test(hashes_depend_on_all_that_came_before),
        cmocka_unit_test(content_survives_until_the_page_is_wanted),
        cmocka_unit_test(a_taken_hash_is_told),
        cmocka_unit_test(at_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
