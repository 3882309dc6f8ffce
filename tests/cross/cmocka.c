/* SPDX-License-Identifier: Apache-2.0 */
#include "cmocka.h"

jmp_buf cross_out;

int cross_run(const struct CMUnitTest *tests, size_t n)
{
    volatile int failed = 0;

    for (volatile size_t i = 0; i < n; i++) {
        int out = setjmp(cross_out);
        if (out == 0)
            tests[i].run(NULL);
        failed += out == 1;
        printf("%s %s\n", out == 0 ? "ok" : out == 1 ? "FAIL" : "skipped", tests[i].name);
    }
    return failed;
}
