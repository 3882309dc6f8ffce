/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a model wrote: two bytes choose family, reasoning and options, the rest is the text.
 * Whatever it is, pieces do not matter, arguments of whole calls are JSON objects, and a text
 * without a call, of a form without thoughts, is content as it was written.
 */
#include "base/utf8.h"
#include "tests/model/chat/collect.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char tools[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"get\",\"parameters\":{"
    "\"properties\":{\"city\":{\"type\":\"string\"},\"n\":{\"type\":"
    "\"integer\"}}}}}]";

static void check_calls(const struct collect *c)
{
    size_t i;
    json_t *call;
    json_array_foreach(c->calls, i, call)
    {
        json_t *args =
            json_loads(json_string_value(json_object_get(call, "arguments")), JSON_ALLOW_NUL, NULL);
        bool whole = json_is_true(json_object_get(call, "whole"));
        /* A lone half of a surrogate pair is a valid escape that jansson does not take. */
        if (whole && !json_is_object(args) &&
            !strstr(json_string_value(json_object_get(call, "arguments")), "\\u"))
            abort();
        json_decref(args);
    }
}

static void check_content(const struct chat_form *form, const struct collect *c, const char *text)
{
    const struct buffer *content = &c->text[CHAT_CONTENT];
    size_t len = strlen(text);
    if (form->reasoning || form->tools == CHAT_TOOLS_HARMONY || json_array_size(c->calls))
        return;
    if (content->len != len || (len && memcmp(content->data, text, len)))
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2 || size > 4096 || memchr(data, 0, size))
        return 0;
    _cleanup_free_ char *text = x_strndup((const char *)data + 2, size - 2);
    if (!utf8_valid(text))
        return 0;
    json_t *list = json_loads(tools, 0, NULL);
    struct chat_options o = {
        .form = {data[0] % (CHAT_TOOLS_HARMONY + 1), (data[1] & 15) % (CHAT_REASONING_HARMONY + 1)},
        .tools = list,
        .one_call = data[1] & 16,
        .prompt = data[1] & 32 ? "<think>\n" : "",
        .prompt_len = data[1] & 32 ? 8 : 0};
    struct collect whole, pieces;
    collect_run(&o, text, size - 2, size, 0, &whole);
    check_calls(&whole);
    check_content(&o.form, &whole, text);
    json_t *want = collect_message(&whole);
    for (int live = 0; live < 2; live++)
        for (size_t step = 0; step < 2; step++) {
            size_t i;
            json_t *call;
            o.live = live;
            collect_run(&o, text, size - 2, step, 1, &pieces);
            json_t *got = collect_message(&pieces);
            json_array_foreach(json_object_get(got, "calls"), i, call) if (live)
                json_object_del(call, "id");
            json_array_foreach(json_object_get(want, "calls"), i, call) if (live)
                json_object_del(call, "id");
            if (!json_equal(want, got))
                abort();
            json_decref(got);
            collect_free(&pieces);
        }
    json_decref(want);
    collect_free(&whole);
    json_decref(list);
    return 0;
}
