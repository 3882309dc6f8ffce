/* SPDX-License-Identifier: Apache-2.0 */
/* Small tokenizers for tests, made of one component and a vocabulary that shows its work. */
#ifndef EMBER_TESTS_TOK_HELPER_H
#define EMBER_TESTS_TOK_HELPER_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/unicode.h"

/* Adds every substring of s (bars left out) to the vocabulary, so that any word is one token. */
static inline void add_substrings(json_t *vocab, const char *s)
{
    char text[256];
    size_t n = 0;
    for (; *s; s++)
        if (*s != '|')
            text[n++] = *s;
    for (size_t i = 0; i < n; i += utf8_len(text[i]))
        for (size_t k = i; k < n;) {
            k += utf8_len(text[k]);
            if (!json_object_getn(vocab, text + i, k - i))
                json_object_setn_new(vocab, text + i, k - i,
                                     json_integer((json_int_t)json_object_size(vocab)));
        }
}

/*
 * {<parts>, model: every substring of `a` and `b` is a token, whole words first}. `parts` is the
 * inside of a JSON object, with single quotes for double ones.
 */
static inline struct tokenizer *make_tokenizer(const char *parts, const char *a, const char *b)
{
    char *text = x_printf("{%s}", parts);
    for (char *p = text; *p; p++)
        if (*p == '\'')
            *p = '"';
    json_error_t e;
    json_t *root = json_loads(text, 0, &e);
    if (!root)
        fail_msg("%s: %s", text, e.text);
    json_t *vocab = json_object();
    add_substrings(vocab, a);
    add_substrings(vocab, b);
    json_object_set_new(root, "model",
                        json_pack("{s:s, s:b, s:o, s:[]}", "type", "BPE", "ignore_merges", 1,
                                  "vocab", vocab, "merges"));
    char *json = json_dumps(root, JSON_COMPACT);
    struct tokenizer *t = NULL;
    struct error err = {0};
    if (tokenizer_load_text(json, strlen(json), NULL, 0, &t, &err) < 0)
        fail_msg("%s: %s", parts, err.text);
    free(json);
    free(text);
    json_decref(root);
    return t;
}

/* The tokens of a text, with bars between. */
static inline char *tokens_of(const struct tokenizer *t, const char *text)
{
    struct error err = {0};
    struct buffer out = {0};
    uint32_t *ids;
    size_t n, len;
    if (tokenizer_encode(t, text, strlen(text), true, &ids, &n, &err) < 0)
        fail_msg("'%s': %s", text, err.text);
    buffer_append(&out, "", 0);
    for (size_t i = 0; i < n; i++) {
        const char *s = tokenizer_token_text(t, ids[i], &len);
        buffer_printf(&out, "%s%.*s", i ? "|" : "", (int)len, s);
    }
    free(ids);
    return out.data;
}

static inline void expect_tokens(const char *parts, const char *text, const char *expected)
{
    struct tokenizer *t = make_tokenizer(parts, text, expected);
    char *got = tokens_of(t, text);
    assert_string_equal(got, expected);
    free(got);
    tokenizer_free(t);
}

/* A load that must fail, with this in its message. */
static inline void expect_refused(const char *json, int code, const char *message)
{
    struct tokenizer *t = NULL;
    struct error err = {0};
    char *text = x_strdup(json);
    for (char *p = text; *p; p++)
        if (*p == '\'')
            *p = '"';
    assert_int_equal(tokenizer_load_text(text, strlen(text), NULL, 0, &t, &err), code);
    if (!strstr(err.text, message))
        fail_msg("'%s' does not have '%s'", err.text, message);
    free(text);
}

#endif
