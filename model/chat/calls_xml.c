/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls as a name, then keys and values in tags. Values are texts: the tool's schema says whether
 * one is a string or JSON. A value may hold what looks like its own end tag; it ends at the one
 * that a key, or the end of the call, follows.
 */
#include <string.h>

#include "model/chat/internal.h"

enum stage { STAGE_NAME, STAGE_NEXT, STAGE_KEY, STAGE_ATTRIBUTES, STAGE_OPEN, STAGE_VALUE };

enum type {
    TYPE_STRING = 1,
    TYPE_INTEGER = 2,
    TYPE_NUMBER = 4,
    TYPE_BOOLEAN = 8,
    TYPE_OBJECT = 16,
    TYPE_ARRAY = 32,
    TYPE_NULL = 64
};

/* ---- types ---- */

static unsigned type_named(const char *s)
{
    static const char *const names[] = {"string", "integer", "number", "boolean",
                                        "object", "array",   "null"};
    for (size_t i = 0; s && i < ARRAY_LEN(names); i++)
        if (!strcmp(s, names[i]))
            return 1u << i;
    return 0;
}

static unsigned type_of(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_STRING:
        return TYPE_STRING;
    case JSON_INTEGER:
        return TYPE_INTEGER | TYPE_NUMBER;
    case JSON_REAL:
        return TYPE_NUMBER;
    case JSON_TRUE:
    case JSON_FALSE:
        return TYPE_BOOLEAN;
    case JSON_OBJECT:
        return TYPE_OBJECT;
    case JSON_ARRAY:
        return TYPE_ARRAY;
    default:
        return TYPE_NULL;
    }
}

/* What a schema allows; 0: it does not say. */
static unsigned types_of(const json_t *schema, unsigned depth)
{
    static const char *const unions[] = {"anyOf", "oneOf", "allOf"};
    const json_t *type = json_object_get(schema, "type"), *item;
    unsigned types = type_named(json_string_value(type));
    size_t i;

    json_array_foreach((json_t *)type, i, item) types |= type_named(json_string_value(item));
    if (types || depth > 8)
        return types;
    for (size_t k = 0; k < ARRAY_LEN(unions); k++)
        json_array_foreach(json_object_get(schema, unions[k]), i, item) types |=
            types_of(item, depth + 1);
    json_array_foreach(json_object_get(schema, "enum"), i, item) types |= type_of(item);
    if (json_object_get(schema, "const"))
        types |= type_of(json_object_get(schema, "const"));
    return types;
}

/* Of an argument of a function; 0: unknown. */
static unsigned argument_types(const struct chat_parser *p, const char *function, const char *key)
{
    const json_t *parameters = json_object_get(chat_function(p, function), "parameters");

    return types_of(json_object_get(json_object_get(parameters, "properties"), key), 0);
}

/* ---- writing the arguments' JSON ---- */

static void add_string(struct buffer *out, const char *s, size_t n)
{
    json_t *v = json_stringn(s, n);
    char *text = v ? json_dumps(v, JSON_ENCODE_ANY) : NULL;

    /* What is not UTF-8 cannot be written: then nothing of it is. */
    chat_append(out, text ? text : "\"\"", text ? strlen(text) : 2);
    free(text);
    json_decref(v);
}

/* The words that Python writes for JSON's. */
static const char *from_python(const char *s, size_t n)
{
    static const char *const words[][2] = {{"True", "true"}, {"False", "false"}, {"None", "null"}};

    for (size_t i = 0; i < ARRAY_LEN(words); i++)
        if (strlen(words[i][0]) == n && !memcmp(words[i][0], s, n))
            return words[i][1];
    return NULL;
}

/* A Python literal as JSON: lists, dicts and strings in single quotes; 0 when it is none. */
static size_t python_value(const char *s, size_t n, unsigned depth, struct buffer *out);

static size_t python_string(const char *s, size_t n, struct buffer *out)
{
    _cleanup_(buffer_free) struct buffer text = {0};
    static const char from[] = "ntrbf", to[] = "\n\t\r\b\f";
    size_t i = 1;

    for (; i < n && s[i] != *s; i++) {
        char c = s[i];
        if (c == '\\') {
            if (++i == n || strchr("xuUN01234567", s[i]))
                return 0; /* no template writes codes */
            const char *at = strchr(from, s[i]);
            c = at ? to[at - from] : s[i];
        }
        chat_append(&text, &c, 1);
    }
    add_string(out, text.data ? text.data : "", text.len);
    return i < n ? i + 1 : 0;
}

static size_t skip_blanks(const char *s, size_t n, size_t at)
{
    while (at < n && chat_is_blank(s[at]))
        at++;
    return at;
}

/* A key and what follows it, up to the value. */
static size_t python_key(const char *s, size_t n, unsigned depth, struct buffer *out)
{
    size_t used = *s == '\'' || *s == '"' ? python_value(s, n, depth, out) : 0;
    size_t at = skip_blanks(s, n, used);

    if (!used || at == n || s[at] != ':')
        return 0;
    chat_append(out, ": ", 2);
    return skip_blanks(s, n, at + 1);
}

static size_t python_items(const char *s, size_t n, unsigned depth, struct buffer *out)
{
    char close = *s == '{' ? '}' : ']';
    size_t at = skip_blanks(s, n, 1);

    chat_append(out, s, 1);
    while (at < n && s[at] != close) {
        size_t key = close == '}' ? python_key(s + at, n - at, depth + 1, out) : 0;
        if ((close == '}' && !key) || at + key >= n)
            return 0;
        size_t used = python_value(s + at + key, n - at - key, depth + 1, out);
        at = skip_blanks(s, n, at + key + used);
        if (!used || at == n || (s[at] != ',' && s[at] != close))
            return 0;
        if (s[at] == ',') {
            at = skip_blanks(s, n, at + 1);
            chat_append(out, ", ", at < n && s[at] != close ? 2 : 0);
        }
    }
    chat_append(out, &close, 1);
    return at < n ? at + 1 : 0;
}

static size_t python_value(const char *s, size_t n, unsigned depth, struct buffer *out)
{
    size_t len = 0;

    if (depth > 64)
        return 0;
    if (*s == '\'' || *s == '"')
        return python_string(s, n, out);
    if (*s == '{' || *s == '[')
        return python_items(s, n, depth, out);
    while (len < n && !strchr(",:]} \n\r\t", s[len]))
        len++;
    const char *word = from_python(s, len);
    chat_append(out, word ? word : s, word ? strlen(word) : len);
    return len;
}

/* Appends JSON of a type that is wanted, from JSON or from Python's way to write it. */
static bool add_typed(struct buffer *out, const char *s, size_t n, unsigned types)
{
    _cleanup_(buffer_free) struct buffer python = {0};
    json_t *v = json_loadb(s, n, JSON_DECODE_ANY, NULL);

    if (!v && n && python_value(s, n, 0, &python) == n) {
        s = python.data;
        n = python.len;
        v = json_loadb(s, n, JSON_DECODE_ANY, NULL);
    }
    bool good = v && (type_of(v) & types);
    if (good)
        chat_append(out, s, n);
    json_decref(v);
    return good;
}

static void add_value(struct buffer *out, const char *s, size_t n, unsigned types, int typed)
{
    const unsigned others = ~(unsigned)TYPE_STRING;
    unsigned wanted = typed == 1 ? 0 : typed == 0 ? ~0u : types ? types & others : others;
    const char *word = s;
    size_t len = n;

    chat_trim(&word, &len);
    if (!wanted || !add_typed(out, word, len, wanted))
        add_string(out, s, n);
}

static void add_argument(struct chat_parser *p, const char *value, size_t n)
{
    struct call *c = &p->call;
    _cleanup_(buffer_free) struct buffer out = {0};

    chat_append(&out, c->n_keys ? ", " : "{", c->n_keys ? 2 : 1);
    c->n_keys++;
    add_string(&out, c->key.data, c->key.len);
    chat_append(&out, ": ", 2);
    add_value(&out, value, n, argument_types(p, c->name.data, c->key.data), c->typed);
    chat_arguments(p, out.data, out.len);
}

/* ---- reading ---- */

/* What stands between c->at and `end`, trimmed: at c->at, *ret_len long. */
static enum step trimmed(struct chat_parser *p, size_t end, size_t *ret_len)
{
    const char *s = p->in.data + p->call.at;

    *ret_len = end - p->call.at;
    chat_trim(&s, ret_len);
    p->call.at = (size_t)(s - p->in.data);
    return *ret_len && *ret_len <= NAME_MAX_LEN ? STEP_OK : STEP_BAD;
}

/* The rest of the text until `word`. */
static enum step until(struct chat_parser *p, const char *word, bool end, size_t *ret_len)
{
    size_t at;

    if (chat_find(p, &word, 1, end, &at) < 0) {
        p->pos = at;
        return at - p->call.at > 2 * NAME_MAX_LEN ? STEP_BAD : STEP_MORE;
    }
    p->pos = at + strlen(word);
    return trimmed(p, at, ret_len);
}

static bool quoted(const char *word)
{
    return word && *word == '"';
}

/* GLM's names end at a line's end or the first tag. */
static enum step plain_name(struct chat_parser *p, bool end, size_t *ret_len)
{
    const char *const words[] = {"\n", "<"};
    size_t at;
    int which;

    p->call.at = chat_skip_blank(p, p->call.at);
    p->pos = MAX(p->pos, p->call.at);
    which = chat_find(p, words, 2, end, &at);
    p->pos = at;
    if (which < 0)
        return at - p->call.at > NAME_MAX_LEN ? STEP_BAD : STEP_MORE;
    return trimmed(p, at, ret_len);
}

static enum step read_name(struct chat_parser *p, bool end)
{
    const struct family *f = p->family;
    struct call *c = &p->call;
    size_t n = 0;

    if (!c->at)
        c->at = p->pos;
    enum step step = f->name_end ? until(p, f->name_end, end, &n) : plain_name(p, end, &n);
    if (step != STEP_OK)
        return step;
    const char *name = p->in.data + c->at;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)name[i] <= ' ' || strchr("<>{}\"", name[i]))
            return STEP_BAD;
    chat_append(&c->name, name, n);
    if (c->strict && !chat_function(p, c->name.data))
        return STEP_BAD;
    c->stage = quoted(f->name_end) ? STAGE_ATTRIBUTES : STAGE_NEXT;
    return STEP_OK;
}

/* The end of the call: its own tag, or the section's when that was forgotten. */
static enum answer at_end(const struct chat_parser *p, size_t at, bool end, bool *ret_own)
{
    enum answer own = chat_at(p, at, p->family->function_close, end);
    enum answer section =
        p->family->section_close ? chat_at(p, at, p->family->section_close, end) : NO;

    *ret_own = own == YES;
    return own == YES || section == YES ? YES : own == MAYBE || section == MAYBE ? MAYBE : NO;
}

static enum step read_next(struct chat_parser *p, bool end)
{
    struct call *c = &p->call;
    size_t at = chat_skip_blank(p, p->pos);
    bool own;

    if (at == p->in.len)
        return STEP_MORE;
    enum answer key = chat_at(p, at, p->family->key_open, end), close = at_end(p, at, end, &own);
    if (key == YES) {
        c->at = p->pos = at + strlen(p->family->key_open);
        c->stage = STAGE_KEY;
        return STEP_OK;
    }
    if (close == YES) {
        p->pos = own ? at + strlen(p->family->function_close) : at;
        chat_arguments(p, c->n_keys ? "}" : "{}", c->n_keys ? 1 : 2);
        return STEP_OK;
    }
    if (key == MAYBE || close == MAYBE)
        return STEP_MORE;
    p->pos = at;
    return STEP_BAD;
}

static enum step read_key(struct chat_parser *p, bool end)
{
    struct call *c = &p->call;
    size_t n;
    enum step step = until(p, p->family->key_end, end, &n);

    if (step != STEP_OK)
        return step;
    c->key.len = 0;
    c->typed = -1;
    chat_append(&c->key, p->in.data + c->at, n);
    c->at = p->pos;
    c->stage = quoted(p->family->key_end) ? STAGE_ATTRIBUTES : STAGE_OPEN;
    return STEP_OK;
}

/* ... string="false"> behind a quoted name or key. */
static enum step read_attributes(struct chat_parser *p)
{
    struct call *c = &p->call;
    const char *from = p->in.data + p->pos;
    const char *close = memchr(from, '>', p->in.len - p->pos);
    bool of_key = c->key.len > 0;

    if (!close)
        return p->in.len - p->pos > NAME_MAX_LEN ? STEP_BAD : STEP_MORE;
    size_t n = (size_t)(close - from);
    if (memmem(from, n, "string=\"true\"", 13))
        c->typed = 1;
    else if (memmem(from, n, "string=\"false\"", 14))
        c->typed = 0;
    p->pos += n + 1;
    c->at = p->pos;
    c->stage = of_key ? STAGE_OPEN : STAGE_NEXT;
    return STEP_OK;
}

static enum step read_open(struct chat_parser *p, bool end)
{
    struct call *c = &p->call;
    const char *open = p->family->value_open;

    if (open) {
        size_t at = chat_skip_blank(p, p->pos);
        enum answer answer = at == p->in.len ? MAYBE : chat_at(p, at, open, end);
        if (answer == MAYBE)
            return STEP_MORE;
        p->pos = at;
        if (answer == NO)
            return STEP_BAD;
        p->pos += strlen(open);
    }
    c->at = p->pos;
    c->stage = STAGE_VALUE;
    return STEP_OK;
}

static void take_value(struct chat_parser *p, size_t end)
{
    const char *s = p->in.data + p->call.at;
    size_t n = end - p->call.at;

    if (!p->family->value_open) { /* tags on lines of their own */
        if (n && *s == '\n') {
            s++;
            n--;
        }
        if (n && s[n - 1] == '\n')
            n--;
    }
    add_argument(p, s, n);
    p->call.key.len = 0;
}

static enum step read_value(struct chat_parser *p, bool end)
{
    struct call *c = &p->call;
    const char *close = p->family->value_close;

    for (;;) {
        size_t at;
        bool own;
        int which = chat_find(p, &close, 1, end, &at);
        p->pos = at;
        if (which < 0)
            return STEP_MORE;
        size_t behind = chat_skip_blank(p, at + strlen(close));
        if (behind == p->in.len)
            return STEP_MORE;
        enum answer key = chat_at(p, behind, p->family->key_open, end);
        enum answer last = at_end(p, behind, end, &own);
        if (key == YES || last == YES) {
            take_value(p, at);
            p->pos = at + strlen(close);
            c->stage = STAGE_NEXT;
            return STEP_OK;
        }
        if (key == MAYBE || last == MAYBE)
            return STEP_MORE;
        p->pos = at + 1;
    }
}

enum step chat_body_xml(struct chat_parser *p, bool end)
{
    enum step step = STEP_OK;

    while (step == STEP_OK) {
        switch (p->call.stage) {
        case STAGE_NAME:
            step = read_name(p, end);
            break;
        case STAGE_NEXT:
            step = read_next(p, end);
            if (p->call.stage == STAGE_NEXT) /* no key: the end, or not there yet */
                return step;
            break;
        case STAGE_KEY:
            step = read_key(p, end);
            break;
        case STAGE_ATTRIBUTES:
            step = read_attributes(p);
            break;
        case STAGE_OPEN:
            step = read_open(p, end);
            break;
        default:
            step = read_value(p, end);
        }
    }
    return step;
}
