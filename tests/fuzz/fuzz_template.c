/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A chat template from anywhere, optionally a NUL byte and a JSON context behind it: it must
 * compile or fail cleanly, and render within its limits or fail cleanly.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "model/template/template.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char sample[] =
    "{\"messages\":[{\"role\":\"user\",\"content\":\" h\\u00e9llo \"},{\"role\":\"assistant\","
    "\"content\":null,\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{\"a\":1,\"b\":"
    "2.5}}}]}],\"tools\":[{\"function\":{\"name\":\"f\"}}],\"add_generation_prompt\":true,"
    "\"bos_token\":\"<s>\",\"n\":3,\"s\":\"a b\",\"l\":[3,1,2],\"d\":{\"x\":1}}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *end = size ? memchr(data, 0, size) : NULL;
    size_t len = end ? (size_t)(end - data) : size;
    const char *context = end ? (const char *)end + 1 : sample;
    _cleanup_(template_freep) struct template *t = NULL;
    _cleanup_(buffer_free) struct buffer out = {0};
    const struct template_options options = {
        .limits = {.steps = 200000, .memory = 8 << 20, .output = 1 << 20, .depth = 200}};
    enum template_outcome outcome;
    struct error err = {0};
    if (template_compile((const char *)data, len, &t, &err) < 0)
        return 0;
    json_t *j = json_loadb(context, end ? size - len - 1 : sizeof sample - 1, JSON_ALLOW_NUL, NULL);
    if (!j)
        return 0;
    int r = template_render(t, j, &options, &out, &outcome, &err);
    json_decref(j);
    if ((r == 0) != (outcome == TEMPLATE_OK) || (r < 0 && out.len) || out.len > 1 << 20)
        abort();
    return 0;
}
