/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "base/mem.h"
#include "proto/grpc/status.h"

static void test_numbers(void **state)
{
    /* from the public table, not from ours */
    assert_int_equal(GRPC_NOT_FOUND, 5);
    assert_int_equal(GRPC_RESOURCE_EXHAUSTED, 8);
    assert_int_equal(GRPC_UNAVAILABLE, 14);
    assert_int_equal(GRPC_UNAUTHENTICATED, 16);
    assert_string_equal(grpc_status_name(4), "DEADLINE_EXCEEDED");
    assert_string_equal(grpc_status_name(17), "UNKNOWN");
    assert_string_equal(grpc_status_name(-1), "UNKNOWN");
}

static void test_errors(void **state)
{
    static const struct {
        int errnum;
        enum grpc_status status;
    } cases[] = {
        {0, GRPC_OK},
        {ENOENT, GRPC_NOT_FOUND},
        {EINVAL, GRPC_INVALID_ARGUMENT},
        {ENOMEM, GRPC_RESOURCE_EXHAUSTED},
        {ENOSPC, GRPC_RESOURCE_EXHAUSTED},
        {EBADMSG, GRPC_DATA_LOSS},
        {ENOTSUP, GRPC_UNIMPLEMENTED},
        {ETIMEDOUT, GRPC_DEADLINE_EXCEEDED},
        {ECANCELED, GRPC_CANCELLED},
        {EAGAIN, GRPC_UNAVAILABLE},
        {EBUSY, GRPC_UNAVAILABLE},
        {EACCES, GRPC_PERMISSION_DENIED},
        {EPERM, GRPC_PERMISSION_DENIED},
        {EEXIST, GRPC_ALREADY_EXISTS},
        {ESTALE, GRPC_FAILED_PRECONDITION},
        {EXDEV, GRPC_INTERNAL},
    };

    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        assert_int_equal(grpc_status_of_error(-cases[i].errnum), cases[i].status);
    /* the way back keeps the status */
    for (int status = 0; status <= 16; status++) {
        int code = grpc_status_to_error(status);
        assert_true(status ? code < 0 : code == 0);
        if (status != GRPC_UNKNOWN)
            assert_int_equal(grpc_status_of_error(code), status);
    }
    assert_int_equal(grpc_status_to_error(99), -EIO);
    assert_int_equal(grpc_status_of_http(404), GRPC_UNIMPLEMENTED);
}

static void test_messages(void **state)
{
    char out[64], back[64];

    grpc_message_encode("a%b\n\xc3\xa4~", out, sizeof out);
    assert_string_equal(out, "a%25b%0A%C3%A4~");
    grpc_message_decode(out, strlen(out), back, sizeof back);
    assert_string_equal(back, "a%b\n\xc3\xa4~");
    assert_int_equal(grpc_message_encode("ab%", out, 5), 2); /* no half an escape */
    assert_string_equal(out, "ab");
    grpc_message_decode("50% off%4%zz%00", 15, back, sizeof back);
    assert_string_equal(back, "50% off%4%zz?");
    assert_int_equal(grpc_message_decode("abcdef", 6, back, 4), 3);
}

static void test_timeouts(void **state)
{
    char text[GRPC_TIMEOUT_TEXT_MAX];
    uint64_t ns = 42;

    assert_int_equal(grpc_timeout_parse("1S", 2, &ns), 0);
    assert_int_equal(ns, 1000000000);
    assert_int_equal(grpc_timeout_parse("250m", 4, &ns), 0);
    assert_int_equal(ns, 250000000);
    assert_int_equal(grpc_timeout_parse("99999999H", 9, &ns), 0);
    assert_true(ns == UINT64_MAX);
    static const char *const bad[] = {"", "S", "1", "1x", "-1S", "123456789S", "1 S", "1s"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        assert_int_equal(grpc_timeout_parse(bad[i], strlen(bad[i]), &ns), -EINVAL);
    assert_true(ns == UINT64_MAX);

    grpc_timeout_format(1500, text);
    assert_string_equal(text, "1500m");
    grpc_timeout_format(100000001, text);
    assert_string_equal(text, "100001S");
    grpc_timeout_format(UINT64_MAX, text);
    assert_string_equal(text, "99999999H");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_messages),
        cmocka_unit_test(test_timeouts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
