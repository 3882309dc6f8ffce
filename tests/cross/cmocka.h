/* SPDX-License-Identifier: Apache-2.0 */
/*
 * As much of cmocka's interface as the kernels' tests use, for processors that there is no cmocka
 * of: tools/check-aarch64 puts this folder in front. A failed assertion ends its test.
 */
#ifndef EMBER_TESTS_CROSS_CMOCKA_H
#define EMBER_TESTS_CROSS_CMOCKA_H

#include <inttypes.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern jmp_buf cross_out; /* tests/cross/cmocka.c */

struct CMUnitTest {
    const char *name;
    void (*run)(void **state);
};
#define cmocka_unit_test(f)                                                                        \
    {                                                                                              \
#f, f                                                                                      \
    }

#define cross_fail(...)                                                                            \
    do {                                                                                           \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                            \
        fprintf(stderr, __VA_ARGS__);                                                              \
        fputc('\n', stderr);                                                                       \
        longjmp(cross_out, 1);                                                                     \
    } while (0)
#define fail_msg(...) cross_fail(__VA_ARGS__)
#define fail() cross_fail("failed")
#define skip() longjmp(cross_out, 2)
#define print_message(...) printf(__VA_ARGS__)
#define assert_true(x)                                                                             \
    do {                                                                                           \
        if (!(x))                                                                                  \
            cross_fail("%s", #x);                                                                  \
    } while (0)
#define assert_false(x) assert_true(!(x))
#define assert_null(x) assert_true(!(x))
#define assert_non_null(x) assert_true(x)
#define assert_int_equal(a, b)                                                                     \
    do {                                                                                           \
        intmax_t a_ = (intmax_t)(a), b_ = (intmax_t)(b);                                           \
        if (a_ != b_)                                                                              \
            cross_fail("%s is %jd, not %s, %jd", #a, a_, #b, b_);                                  \
    } while (0)
#define assert_int_not_equal(a, b) assert_true((intmax_t)(a) != (intmax_t)(b))
#define assert_string_equal(a, b) assert_true(!strcmp(a, b))
#define assert_memory_equal(a, b, n) assert_true(!memcmp(a, b, n))

int cross_run(const struct CMUnitTest *tests, size_t n);
#define cmocka_run_group_tests(tests, setup, teardown)                                             \
    cross_run(tests, sizeof(tests) / sizeof((tests)[0]))

#endif
