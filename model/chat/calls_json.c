/* SPDX-License-Identifier: Apache-2.0 */
/* Calls as JSON objects, and the arguments' object alone. */
#include <string.h>

#include "model/chat/internal.h"

static bool word_is(const char *text, size_t len, const char *word)
{
    return strlen(word) == len && !memcmp(text, word, len);
}

/* A JSON text without a container around it; NULL: it is none. */
static json_t *decode(const char *text, size_t len)
{
    return json_loadb(text, len, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
}

static void note_key(struct call *c, const char *text, size_t len)
{
    if (word_is(text, len, "\"name\"") || word_is(text, len, "\"tool_name\"") ||
        word_is(text, len, "\"function\""))
        c->key_kind = KEY_NAME;
    else if (word_is(text, len, "\"arguments\"") || word_is(text, len, "\"parameters\""))
        c->key_kind = KEY_ARGUMENTS;
    else
        c->key_kind = KEY_OTHER;
}

static bool take_name(struct chat_parser *p, const char *text, size_t len)
{
    struct call *c = &p->call;
    json_t *name = decode(text, len);
    const char *s = json_string_value(name);
    size_t n = json_string_length(name);
    bool good = s && n && n <= NAME_MAX_LEN && strlen(s) == n && !c->name_known &&
                (!c->strict || chat_function(p, s));

    if (good) {
        chat_append(&c->name, s, n);
        c->name_known = true;
    }
    json_decref(name);
    return good;
}

/* Arguments that came before the name, as a string of JSON, or as nothing. */
static bool take_arguments(struct chat_parser *p, const char *text, size_t len)
{
    struct call *c = &p->call;
    json_t *v = NULL;
    bool good = true;

    if (c->given || c->args.len)
        return false;
    if (*text == '{') {
        chat_append(&c->args, text, len); /* sent when the name has come */
        return true;
    }
    v = decode(text, len);
    if (json_is_string(v)) {
        json_t *inner = decode(json_string_value(v), json_string_length(v));
        good = json_is_object(inner);
        if (good)
            chat_append(&c->args, json_string_value(v), json_string_length(v));
        json_decref(inner);
    } else {
        good = json_is_null(v);
    }
    json_decref(v);
    return good;
}

static void send_streamed(struct chat_parser *p, size_t end)
{
    struct call *c = &p->call;

    if (c->stream_at == SIZE_MAX || end <= c->stream_at)
        return;
    chat_arguments(p, p->in.data + c->stream_at, end - c->stream_at);
    c->stream_at = end;
}

/* A member of the call's object has ended behind in[end - 1]. */
static bool value_ended(struct chat_parser *p, size_t end)
{
    struct call *c = &p->call;
    const char *text = p->in.data + c->at;

    if (c->stream_at != SIZE_MAX) {
        send_streamed(p, end);
        c->stream_at = SIZE_MAX;
        return true;
    }
    if (c->key_kind == KEY_NAME)
        return take_name(p, text, end - c->at);
    return c->key_kind != KEY_ARGUMENTS || take_arguments(p, text, end - c->at);
}

/* The object has ended: the call is whole, if it has a name. */
static bool object_ended(struct chat_parser *p, size_t end)
{
    struct call *c = &p->call;
    struct scan scan = c->scan;
    bool strict = c->strict, json = c->json, list = c->list;

    if (!c->name_known)
        return false;
    if (!c->given && c->args.len) {
        _cleanup_(buffer_free) struct buffer args = c->args;
        c->args = (struct buffer){0};
        chat_arguments(p, args.data, args.len);
    }
    p->pos = end;
    chat_call_whole(p);
    c->scan = scan;
    c->strict = strict;
    c->json = json;
    c->list = list;
    c->stage = 1;
    return true;
}

/* One byte at pos; false: this is no call. */
static bool json_byte(struct chat_parser *p)
{
    struct call *c = &p->call;
    char byte = p->in.data[p->pos];
    enum scan_event e = scan_byte(&c->scan, (unsigned char)byte);
    unsigned depth = c->scan.depth, base = c->list ? 1 : 0;
    bool opens = e == SCAN_BEGIN && (byte == '{' || byte == '[');

    switch (e) {
    case SCAN_BAD:
        return false;
    case SCAN_KEY_BEGIN:
        if (depth == base + 1)
            c->at = p->pos;
        return true;
    case SCAN_KEY:
        if (depth == base + 1)
            note_key(c, p->in.data + c->at, p->pos + 1 - c->at);
        return true;
    case SCAN_BEGIN:
        depth -= opens;
        if (depth == base && base && byte != '{')
            return false; /* a list of something else */
        if (depth != base + 1)
            return true;
        c->at = p->pos;
        if (c->key_kind == KEY_ARGUMENTS && byte == '{' && c->name_known && !c->given)
            c->stream_at = p->pos;
        return true;
    case SCAN_END:
        if (depth == base + 1)
            return value_ended(p, p->pos + 1);
        return depth != base || (base && byte == ']') || object_ended(p, p->pos + 1);
    case SCAN_END_BEFORE:
        return depth != base + 1 || value_ended(p, p->pos);
    case SCAN_END_BOTH:
        if (depth == base && !value_ended(p, p->pos))
            return false;
        return depth == base ? object_ended(p, p->pos + 1)
                             : depth != base + 1 || value_ended(p, p->pos + 1);
    default:
        return true;
    }
}

enum step chat_body_json(struct chat_parser *p)
{
    struct call *c = &p->call;

    c->json = true;
    if (!c->stage) {
        size_t at = chat_skip_blank(p, p->pos);
        if (at == p->in.len)
            return STEP_MORE;
        p->pos = at;
        if (p->in.data[at] != '{' && p->in.data[at] != '[')
            return STEP_BAD;
        c->list = p->in.data[at] == '[';
        c->stage = 1;
    }
    while (p->pos < p->in.len) {
        unsigned whole = p->n_whole;
        if (!json_byte(p))
            return STEP_BAD;
        if (p->n_whole == whole)
            p->pos++;
        if (scan_done(&c->scan) || (p->o.one_call && p->n_whole)) {
            p->mark = p->pos;
            return STEP_OK;
        }
    }
    send_streamed(p, p->in.len);
    return STEP_MORE;
}

enum step chat_body_object(struct chat_parser *p)
{
    struct call *c = &p->call;

    if (c->stream_at == SIZE_MAX) {
        size_t at = chat_skip_blank(p, p->pos);
        if (at == p->in.len)
            return STEP_MORE;
        p->pos = at;
        if (p->in.data[at] != '{')
            return STEP_BAD;
        c->stream_at = at;
        c->scan = SCAN_START;
        if (!c->name.len)
            chat_append(&c->name, p->o.function, strlen(p->o.function));
    }
    while (p->pos < p->in.len) {
        if (scan_byte(&c->scan, (unsigned char)p->in.data[p->pos]) == SCAN_BAD)
            return STEP_BAD;
        p->pos++;
        if (scan_done(&c->scan)) {
            send_streamed(p, p->pos);
            return STEP_OK;
        }
    }
    send_streamed(p, p->in.len);
    return STEP_MORE;
}
