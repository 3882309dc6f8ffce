/* SPDX-License-Identifier: Apache-2.0 */
/* Runs a chat parser over a text in some chopping and collects the message as JSON. */
#ifndef EMBER_TESTS_CHAT_COLLECT_H
#define EMBER_TESTS_CHAT_COLLECT_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/chat/chat.h"

struct collect {
    struct buffer text[2];
    json_t *calls; /* {"id", "name", "arguments", "whole", "pieces"} */
    unsigned pieces;
};

static inline void collect_text(void *ctx, enum chat_channel channel, const char *text, size_t len)
{
    struct collect *c = ctx;
    if (!len || buffer_append(&c->text[channel], text, len) < 0)
        abort();
}

static inline void collect_call(void *ctx, unsigned index, const char *id, const char *name)
{
    struct collect *c = ctx;
    if (index != json_array_size(c->calls))
        abort(); /* indices count up, one call at a time */
    json_array_append_new(c->calls, json_pack("{s:s, s:s, s:s, s:b}", "id", id, "name", name,
                                              "arguments", "", "whole", 0));
}

static inline void collect_arguments(void *ctx, unsigned index, const char *text, size_t len)
{
    struct collect *c = ctx;
    json_t *call = json_array_get(c->calls, index);
    const char *before = json_string_value(json_object_get(call, "arguments"));
    char *all = x_printf("%s%.*s", before, (int)len, text);
    if (!call || !len || json_is_true(json_object_get(call, "whole")))
        abort();
    /* A text that half a character ends is no string for jansson; such pieces are not made here. */
    json_object_set_new(call, "arguments", json_string(all));
    free(all);
    c->pieces++;
}

static inline void collect_end(void *ctx, unsigned index, bool whole)
{
    struct collect *c = ctx;
    json_t *call = json_array_get(c->calls, index);
    if (!call || index + 1 != json_array_size(c->calls))
        abort();
    json_object_set_new(call, "whole", json_boolean(whole));
}

static inline void collect_free(struct collect *c)
{
    buffer_free(&c->text[0]);
    buffer_free(&c->text[1]);
    json_decref(c->calls);
    c->calls = NULL;
}

static const struct chat_sink collect_sink = {.text = collect_text,
                                              .call = collect_call,
                                              .arguments = collect_arguments,
                                              .call_end = collect_end};

/* The next piece of text: `step` bytes, or up to 9 at random for 0, never within a character. */
static inline size_t piece_len(const char *text, size_t len, size_t step, unsigned *seed)
{
    size_t n = step;
    if (!step) {
        *seed = *seed * 1664525 + 1013904223;
        n = 1 + (*seed >> 16) % 9;
    }
    n = MIN(n, len);
    while (n < len && ((unsigned char)text[n] & 0xC0) == 0x80)
        n++;
    return n;
}

static inline void collect_run(const struct chat_options *options, const char *text, size_t len,
                               size_t step, unsigned seed, struct collect *ret)
{
    struct chat_sink sink = collect_sink;
    *ret = (struct collect){.calls = json_array()};
    sink.ctx = ret;
    struct chat_parser *p = chat_parser_new(options, &sink);
    for (size_t at = 0; at < len;) {
        size_t n = piece_len(text + at, len - at, step, &seed);
        chat_parser_push(p, text + at, n);
        at += n;
    }
    chat_parser_finish(p);
    chat_parser_free(p);
}

/* {"content", "reasoning", "calls": [{"id", "name", "arguments"}]}: whole calls, what is there. */
static inline json_t *collect_message(const struct collect *c)
{
    json_t *m = json_object(), *calls = json_array(), *call;
    static const char *const names[] = {"content", "reasoning"};
    size_t i;
    for (i = 0; i < 2; i++)
        if (c->text[i].len)
            json_object_set_new(m, names[i], json_stringn(c->text[i].data, c->text[i].len));
    json_array_foreach(c->calls, i, call)
    {
        if (json_is_true(json_object_get(call, "whole")))
            json_array_append_new(calls,
                                  json_pack("{s:O, s:O, s:O}", "id", json_object_get(call, "id"),
                                            "name", json_object_get(call, "name"), "arguments",
                                            json_object_get(call, "arguments")));
    }
    if (json_array_size(calls))
        json_object_set(m, "calls", calls);
    json_decref(calls);
    return m;
}

#endif
