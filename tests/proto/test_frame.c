/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

#include "echo_service.h"
#include "proto/grpc/frame.h"

struct seen {
    unsigned n, compressed;
    size_t lengths[16];
    struct buffer bytes;
    int answer;
};

static int on_message(bool compressed, const uint8_t *data, size_t len, void *user)
{
    struct seen *seen = user;

    if (seen->n < ARRAY_LEN(seen->lengths))
        seen->lengths[seen->n] = len;
    seen->n++;
    seen->compressed += compressed;
    assert_int_equal(buffer_append(&seen->bytes, data, len), 0);
    return seen->answer;
}

/* "" , "abc", "" , 300 bytes of 'x' */
static struct buffer stream_of_four(void)
{
    struct buffer b = {0};

    buffer_append(&b, "\0\0\0\0\0", 5);
    buffer_append(&b, "\0\0\0\0\3abc", 8);
    buffer_append(&b, "\1\0\0\0\0", 5);
    buffer_append(&b, "\0\0\0\1\x2c", 5);
    for (int i = 0; i < 300; i++)
        buffer_append(&b, "x", 1);
    return b;
}

static void check_four(const struct seen *seen)
{
    assert_int_equal(seen->n, 4);
    assert_int_equal(seen->compressed, 1);
    assert_int_equal(seen->lengths[0], 0);
    assert_int_equal(seen->lengths[1], 3);
    assert_int_equal(seen->lengths[2], 0);
    assert_int_equal(seen->lengths[3], 300);
    assert_int_equal(seen->bytes.len, 303);
    assert_memory_equal(seen->bytes.data, "abcxxx", 6);
}

/* Every way of cutting the stream into pieces of one size, single bytes included. */
static void test_pieces(void **state)
{
    _cleanup_(buffer_free) struct buffer b = stream_of_four();

    for (size_t piece = 1; piece <= b.len; piece++) {
        struct grpc_frame_reader reader = {.max = 300};
        struct seen seen = {0};
        for (size_t at = 0; at < b.len; at += piece) {
            int r = grpc_frame_feed(&reader, (uint8_t *)b.data + at, MIN(piece, b.len - at),
                                    on_message, &seen);
            assert_int_equal(r, 0);
        }
        assert_false(grpc_frame_midway(&reader));
        check_four(&seen);
        buffer_free(&seen.bytes);
        grpc_frame_reader_free(&reader);
    }
}

static void test_midway(void **state)
{
    struct grpc_frame_reader reader = {.max = 10};
    struct seen seen = {0};

    assert_false(grpc_frame_midway(&reader));
    assert_int_equal(grpc_frame_feed(&reader, (const uint8_t *)"\0\0", 2, on_message, &seen), 0);
    assert_true(grpc_frame_midway(&reader));
    assert_int_equal(grpc_frame_feed(&reader, (const uint8_t *)"\0\0\2a", 4, on_message, &seen), 0);
    assert_true(grpc_frame_midway(&reader));
    assert_int_equal(grpc_frame_feed(&reader, (const uint8_t *)"b", 1, on_message, &seen), 0);
    assert_false(grpc_frame_midway(&reader));
    assert_int_equal(seen.n, 1);
    assert_memory_equal(seen.bytes.data, "ab", 2);
    buffer_free(&seen.bytes);
    grpc_frame_reader_free(&reader);
}

static int feed(size_t max, const char *bytes, size_t n, struct seen *seen)
{
    struct grpc_frame_reader reader = {.max = max};

    int r = grpc_frame_feed(&reader, (const uint8_t *)bytes, n, on_message, seen);
    grpc_frame_reader_free(&reader);
    buffer_free(&seen->bytes);
    return r;
}

static void test_refused(void **state)
{
    struct seen seen = {0};

    assert_int_equal(feed(10, "\0\0\0\0\x0b", 5, &seen), -EMSGSIZE);
    assert_int_equal(feed(10, "\0\xff\xff\xff\xff", 5, &seen), -EMSGSIZE);
    assert_int_equal(feed(10, "\2\0\0\0\0", 5, &seen), -EBADMSG);
    assert_int_equal(seen.n, 0);
    /* a good message, then garbage */
    assert_int_equal(feed(10, "\0\0\0\0\1a\xff\0\0\0\0", 11, &seen), -EBADMSG);
    assert_int_equal(seen.n, 1);
    /* the callback's word stops the reading */
    seen.answer = 7;
    assert_int_equal(feed(10, "\0\0\0\0\0\0\0\0\0\0", 10, &seen), 7);
    assert_int_equal(seen.n, 2);
}

static void test_append(void **state)
{
    echo_request request = EMBER__TEST__ECHO_REQUEST__INIT;
    struct buffer b = {0};

    request.text = (char *)"hi";
    assert_int_equal(grpc_frame_append(&b, &request.base, 4), 0);
    assert_int_equal(b.len, 9);
    assert_memory_equal(b.data, "\0\0\0\0\4\x0a\2hi", 9);
    assert_int_equal(grpc_frame_append(&b, &request.base, 3), -EMSGSIZE);
    assert_int_equal(b.len, 9);
    buffer_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_midway),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_append),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
