/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample TOKENIZER: a line of JSON in, a line of JSON out. A request has a `kind` (schema, regex,
 * rules, choice, json_object) and `spec`; `samples`, `seed` and `limit` ask for texts that a model
 * without any sense might write (any allowed token, until it may end); `match` is a list of texts
 * to be judged. The answer has the texts, whether each has ended, what matched; or an error.
 */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "model/grammar/grammar.h"

static uint64_t state;

static uint32_t draw(uint32_t n)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((state >> 33) * n >> 31);
}

static int compile(const json_t *request, struct buffer *out, struct error *err)
{
    const char *kind = json_string_value(json_object_get(request, "kind"));
    const json_t *spec = json_object_get(request, "spec");
    struct grammar_json_options options = {
        .whitespace = json_string_value(json_object_get(request, "whitespace")),
        .compact = json_is_true(json_object_get(request, "compact"))};
    const char *choices[64];
    size_t lens[64], n = 0;

    if (!strcmp(kind, "schema"))
        return grammar_from_schema(spec, &options, out, err);
    if (!strcmp(kind, "json_object"))
        return grammar_from_json_object(&options, out, err);
    if (!strcmp(kind, "regex"))
        return grammar_from_regex(json_string_value(spec), json_string_length(spec), out, err);
    if (!strcmp(kind, "rules"))
        return grammar_from_rules(json_string_value(spec), json_string_length(spec), out, err);
    for (; n < json_array_size(spec) && n < 64; n++) {
        choices[n] = json_string_value(json_array_get(spec, n));
        lens[n] = json_string_length(json_array_get(spec, n));
    }
    return grammar_from_choice(choices, lens, n, out, err);
}

/* A token among those of the mask; once the text is long, rather one that closes something. */
static uint32_t choose(const struct vocab *v, const uint64_t *mask, bool close)
{
    uint32_t n = 0, closing = 0, size = vocab_size(v);
    size_t len;

    for (uint32_t i = 0; i < size; i++) {
        if (!(mask[i / 64] >> i % 64 & 1))
            continue;
        const uint8_t *s = vocab_token(v, i, &len);
        n++;
        closing += len == 1 && strchr("\"]}", *s);
    }
    if (!n)
        return UINT32_MAX;
    bool pick_closing = close && closing && draw(2);
    uint32_t want = draw(pick_closing ? closing : n);
    for (uint32_t i = 0; i < size; i++) {
        if (!(mask[i / 64] >> i % 64 & 1))
            continue;
        const uint8_t *s = vocab_token(v, i, &len);
        if (pick_closing && !(len == 1 && strchr("\"]}", *s)))
            continue;
        if (!want--)
            return i;
    }
    return UINT32_MAX;
}

static bool sample(struct grammar *g, const struct vocab *v, unsigned limit, struct buffer *text)
{
    struct matcher *m;
    bool ended = false;

    if (matcher_new(g, &m, NULL) < 0)
        exit(1);
    for (unsigned i = 0; i < limit && !ended; i++) {
        if (matcher_must_end(m) || (matcher_may_end(m) && draw(4) == 0)) {
            ended = true;
            break;
        }
        uint32_t token = choose(v, matcher_mask(m), i > limit / 8);
        size_t len;
        if (token == UINT32_MAX || !matcher_take(m, token)) {
            buffer_printf(text, "<<dead end>>");
            break;
        }
        const uint8_t *s = vocab_token(v, token, &len);
        buffer_append(text, s, len);
    }
    ended = ended || matcher_must_end(m);
    matcher_free(m);
    return ended;
}

static void judge(struct grammar *g, const json_t *request, json_t *reply)
{
    json_t *list = json_array(), *v;
    size_t i;

    json_array_foreach(json_object_get(request, "match"), i, v)
    {
        struct matcher *m;
        if (matcher_new(g, &m, NULL) < 0)
            exit(1);
        bool ok = matcher_take_bytes(m, json_string_value(v), json_string_length(v)) &&
                  matcher_may_end(m);
        json_array_append_new(list, json_boolean(ok));
        matcher_free(m);
    }
    json_object_set_new(reply, "match", list);
}

/* Bytes as text, each a character of Latin-1: what was sampled may be cut within a character. */
static json_t *latin1(const struct buffer *b)
{
    struct buffer out = {0};

    for (size_t i = 0; i < b->len; i++) {
        uint8_t c = (uint8_t)b->data[i];
        char two[2] = {(char)(0xC0 | c >> 6), (char)(0x80 | (c & 63))};
        buffer_append(&out, c < 0x80 ? (char *)&c : two, c < 0x80 ? 1 : 2);
    }
    json_t *v = json_stringn(out.data ? out.data : "", out.len);
    buffer_free(&out);
    return v;
}

static json_t *answer(const json_t *request, const struct vocab *v)
{
    _cleanup_(buffer_free) struct buffer program = {0};
    _cleanup_(grammar_unrefp) struct grammar *g = NULL;
    json_t *reply = json_object(), *texts = json_array(), *ended = json_array();
    unsigned limit = (unsigned)json_integer_value(json_object_get(request, "limit"));
    json_int_t n = json_integer_value(json_object_get(request, "samples"));
    struct error err = {0};
    uint64_t start = clock_ns();

    int r = compile(request, &program, &err);
    json_object_set_new(reply, "ms", json_real((double)(clock_ns() - start) / 1e6));
    if (r == 0)
        r = grammar_open(program.data, program.len, v, &g, &err);
    json_object_set_new(reply, "texts", texts);
    json_object_set_new(reply, "ended", ended);
    if (r < 0) {
        json_object_set_new(reply, "error", json_string(error_text(&err)));
        json_object_set_new(reply, "code", json_integer(-r));
        return reply;
    }
    json_object_set_new(reply, "bytes", json_integer((json_int_t)program.len));
    state = (uint64_t)json_integer_value(json_object_get(request, "seed"));
    for (json_int_t i = 0; i < n; i++) {
        _cleanup_(buffer_free) struct buffer text = {0};
        json_array_append_new(ended, json_boolean(sample(g, v, limit ? limit : 300, &text)));
        json_array_append_new(texts, latin1(&text));
    }
    judge(g, request, reply);
    return reply;
}

int main(int argc, char **argv)
{
    _cleanup_(tokenizer_freep) struct tokenizer *t = NULL;
    _cleanup_(vocab_freep) struct vocab *v = NULL;
    struct error err = {0};
    char *line = NULL;
    size_t room = 0;

    if (argc != 2 || tokenizer_load(argv[1], &t, &err) < 0 ||
        vocab_new(t, tokenizer_vocab_size(t), &v, &err) < 0) {
        fprintf(stderr, "sample TOKENIZER: %s\n", error_text(&err));
        return 1;
    }
    while (getline(&line, &room, stdin) > 0) {
        json_t *request = json_loads(line, JSON_ALLOW_NUL, NULL),
               *reply = request ? answer(request, v) : json_null();
        json_dumpf(reply, stdout, JSON_COMPACT);
        putchar('\n');
        fflush(stdout);
        json_decref(reply);
        json_decref(request);
    }
    free(line);
    return 0;
}
