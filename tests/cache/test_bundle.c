/* SPDX-License-Identifier: Apache-2.0 */
/* Bundles: there and back, and every way in which one can be malformed. */
#include "util.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/fd.h"
#include "cache/bundle.h"

static const struct cache_options small = {.limit = 4 * MIB, .initial = 128 * KIB};

static int memory_file(const void *bytes, size_t len)
{
    int fd = memfd_create("bundle", MFD_CLOEXEC);

    assert_true(fd >= 0);
    assert_int_equal(fd_write_all(fd, bytes, len, "memfd", NULL), 0);
    assert_int_equal(lseek(fd, 0, SEEK_SET), 0);
    return fd;
}

/* Exports n values of the given size to a buffer. */
static struct buffer make_bundle(const char *dir, unsigned n, size_t len)
{
    _cleanup_free_ char *from = x_printf("%s/from", dir);
    _cleanup_fd_ int fd = memory_file("", 0);
    struct cache *cache = must_open(from, &small);
    struct buffer bytes = {0};
    uint64_t count;

    for (unsigned i = 0; i < n; i++)
        assert_int_equal(put_n(cache, "s", i, len, NULL), 0);
    assert_int_equal(cache_export(cache, fd, NULL, NULL, &count, NULL), 0);
    assert_int_equal(count, n);
    cache_close(cache);
    off_t size = lseek(fd, 0, SEEK_END);
    assert_int_equal(buffer_reserve(&bytes, (size_t)size), 0);
    assert_int_equal(fd_pread_all(fd, bytes.data, (size_t)size, 0, "memfd", NULL), 0);
    bytes.len = (size_t)size;
    return bytes;
}

static int import_bytes(struct cache *cache, const void *bytes, size_t len,
                        struct cache_import_result *ret, struct error *err)
{
    _cleanup_fd_ int fd = memory_file(bytes, len);

    return cache_import(cache, fd, ret, err);
}

static bool only_even(void *ctx, const struct cache_entry *entry)
{
    struct cache_factor factor;

    for (size_t pos = 0; cache_factor_next(entry->factors, entry->factors_len, &pos, &factor);)
        if (!strcmp(factor.name, "n"))
            return atoi(factor.text) % 2 == 0;
    return false;
}

static void test_there_and_back(void **state)
{
    struct buffer bytes = make_bundle(*state, 30, 20000);
    _cleanup_free_ char *to = x_printf("%s/to", (char *)*state);
    struct cache *cache = must_open(to, &small);
    struct cache_import_result result;

    assert_int_equal(import_bytes(cache, bytes.data, bytes.len, &result, NULL), 0);
    assert_int_equal(result.imported, 30);
    assert_int_equal(result.present, 0);
    for (unsigned i = 0; i < 30; i++)
        assert_int_equal(get_n(cache, "s", i, 20000, NULL), 0);
    assert_int_equal(import_bytes(cache, bytes.data, bytes.len, &result, NULL), 0);
    assert_int_equal(result.imported, 0);
    assert_int_equal(result.present, 30);
    struct cache_miss miss;
    struct cache_key *key = key_of("s", 77);
    cache_explain_miss(cache, key, &miss);
    assert_non_null(strstr(miss.text, "'n' is 77")); /* the labels came along */
    cache_key_free(key);
    cache_close(cache);
    buffer_free(&bytes);
}

/* Through a pipe, with a filter. */
static void test_pipe(void **state)
{
    _cleanup_free_ char *from = x_printf("%s/from", (char *)*state);
    _cleanup_free_ char *to = x_printf("%s/to", (char *)*state);
    int fds[2];

    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    if (!pid) {
        struct cache *cache = must_open(from, &small);
        for (unsigned i = 0; i < 11; i++)
            put_n(cache, "s", i, 30000, NULL);
        int r = cache_export(cache, fds[1], only_even, NULL, NULL, NULL);
        cache_close(cache);
        _exit(r ? 1 : 0);
    }
    close(fds[1]);
    struct cache *cache = must_open(to, &small);
    struct cache_import_result result;
    assert_int_equal(cache_import(cache, fds[0], &result, NULL), 0);
    assert_int_equal(result.imported, 6);
    assert_int_equal(get_n(cache, "s", 4, 30000, NULL), 0);
    assert_int_equal(get_n(cache, "s", 5, 30000, NULL), CACHE_MISS);
    assert_int_equal(child_wait(pid), 0);
    cache_close(cache);
    close(fds[0]);
}

static int count_records(void *ctx, const struct record *record, const void *bytes, size_t len,
                         struct error *err)
{
    ++*(unsigned *)ctx;
    return 0;
}

static int read_bytes(const void *bytes, size_t len, unsigned *ret_records, struct error *err)
{
    _cleanup_fd_ int fd = memory_file(bytes, len);

    *ret_records = 0;
    return bundle_read(fd, 4 * MIB, count_records, ret_records, err);
}

/* Every length short of the whole, and every single flipped bit but those of the time stamp. */
static void test_cut_and_flipped(void **state)
{
    struct buffer bytes = make_bundle(*state, 2, 40);
    unsigned records;

    assert_int_equal(read_bytes(bytes.data, bytes.len, &records, NULL), 0);
    assert_int_equal(records, 2);
    for (size_t len = 0; len < bytes.len; len++) {
        struct error err = {0};
        assert_int_equal(read_bytes(bytes.data, len, &records, &err), -EBADMSG);
        assert_int_not_equal(err.text[0], 0);
    }
    for (size_t bit = 0; bit < bytes.len * 8; bit++) {
        if (bit / 8 >= 8 && bit / 8 < 16)
            continue;
        bytes.data[bit / 8] ^= (char)(1 << bit % 8);
        assert_true(read_bytes(bytes.data, bytes.len, &records, NULL) < 0);
        bytes.data[bit / 8] ^= (char)(1 << bit % 8);
    }
    assert_int_equal(buffer_append(&bytes, "x", 1), 0);
    assert_int_equal(read_bytes(bytes.data, bytes.len, &records, NULL), -EBADMSG);
    buffer_free(&bytes);
}

/* A length field of exabytes must not be believed. */
static void test_huge_lengths(void **state)
{
    struct buffer bytes = make_bundle(*state, 1, 40);
    struct error err;
    unsigned records;

    put_le(bytes.data + 24, 8, UINT64_MAX);
    assert_int_equal(read_bytes(bytes.data, bytes.len, &records, &err), -EFBIG);
    put_le(bytes.data + 24, 8, 4 * MIB);
    assert_int_equal(read_bytes(bytes.data, bytes.len, &records, &err), -EBADMSG);
    put_le(bytes.data + 24, 8, 0);
    assert_int_equal(read_bytes(bytes.data, bytes.len, &records, &err), -EBADMSG);
    put_le(bytes.data + 4, 2, 2);
    assert_int_equal(read_bytes(bytes.data, bytes.len, &records, &err), -ESTALE);
    buffer_free(&bytes);
}

/* A cut bundle: what came whole is kept, the rest is not there. */
static void test_partial(void **state)
{
    struct buffer bytes = make_bundle(*state, 10, 5000);
    _cleanup_free_ char *to = x_printf("%s/to", (char *)*state);
    struct cache *cache = must_open(to, &small);
    struct cache_import_result result;
    struct cache_verify_result verify;

    assert_int_equal(import_bytes(cache, bytes.data, bytes.len / 2, &result, NULL), -EBADMSG);
    assert_in_range(result.imported, 4, 5);
    assert_int_equal(cache_verify(cache, &verify, NULL), 0);
    assert_int_equal(verify.checked, result.imported);
    assert_int_equal(verify.damaged, 0);
    cache_close(cache);
    buffer_free(&bytes);
}

/* An import heals what is damaged here; an export leaves out what is. */
static void test_damaged(void **state)
{
    struct buffer bytes = make_bundle(*state, 3, 5000);
    _cleanup_free_ char *from = x_printf("%s/from", (char *)*state);
    struct cache_key *key = key_of("s", 1);
    struct digest digest = cache_key_digest(key);
    struct cache_import_result result;
    uint64_t count;

    damage(from, &digest, DAMAGE_FLIP_PAYLOAD);
    struct cache *cache = must_open(from, &small);
    _cleanup_fd_ int fd = memory_file("", 0);
    assert_int_equal(cache_export(cache, fd, NULL, NULL, &count, NULL), 0);
    assert_int_equal(count, 2);
    assert_int_equal(import_bytes(cache, bytes.data, bytes.len, &result, NULL), 0);
    assert_int_equal(result.present, 2);
    assert_int_equal(result.imported, 1);
    assert_int_equal(get_n(cache, "s", 1, 5000, NULL), 0);
    cache_close(cache);
    cache_key_free(key);
    buffer_free(&bytes);
}

static void test_write_fails(void **state)
{
    struct cache *cache = must_open(*state, &small);
    struct error err;
    int full = open("/dev/full", O_WRONLY | O_CLOEXEC);

    assert_int_equal(put_n(cache, "s", 1, 100, NULL), 0);
    assert_true(full >= 0);
    assert_int_equal(cache_export(cache, full, NULL, NULL, NULL, &err), -ENOSPC);
    close(full);
    cache_close(cache);
}

int main(int argc, char **argv)
{
    damage_main(argc, argv);
    const struct CMUnitTest tests[] = {
        CACHE_TEST(test_there_and_back), CACHE_TEST(test_pipe),    CACHE_TEST(test_cut_and_flipped),
        CACHE_TEST(test_huge_lengths),   CACHE_TEST(test_partial), CACHE_TEST(test_damaged),
        CACHE_TEST(test_write_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
