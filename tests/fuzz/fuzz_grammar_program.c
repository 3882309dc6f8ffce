/* SPDX-License-Identifier: Apache-2.0 */
/* Program bytes from a hostile driver: refused, or run within bounds. */
#include "tests/fuzz/grammar_walk.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    walk_program(data, size, (uint32_t)size, false);
    return 0;
}
