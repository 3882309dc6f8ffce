/* SPDX-License-Identifier: Apache-2.0 */
/* A JSON Schema from any client: refused with a text, or a program without dead ends. */
#include <jansson.h>

#include "tests/fuzz/grammar_walk.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    _cleanup_(buffer_free) struct buffer program = {0};
    struct error err = {0};
    json_t *schema = json_loadb((const char *)data, size, JSON_DECODE_ANY, NULL);

    if (!schema || size > 4096) {
        json_decref(schema);
        return 0;
    }
    int r = grammar_from_schema(schema, NULL, &program, &err);
    json_decref(schema);
    walk_compiled(r, &program, &err, (uint32_t)size);
    return 0;
}
