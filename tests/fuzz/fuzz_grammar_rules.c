/* SPDX-License-Identifier: Apache-2.0 */
/* A grammar, EBNF or Lark, from any client: refused with a text, or a program without dead ends. */
#include "tests/fuzz/grammar_walk.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    _cleanup_(buffer_free) struct buffer program = {0};
    struct error err = {0};

    if (size > 4096)
        return 0;
    int r = grammar_from_rules((const char *)data, size, &program, &err);
    walk_compiled(r, &program, &err, (uint32_t)size);
    return 0;
}
