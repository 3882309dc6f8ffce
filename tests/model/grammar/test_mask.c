/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Masks against the plain way: every token of the vocabulary, byte by byte, at places of random
 * texts. The plain way runs a grammar of its own, so that neither tries, slices, clipped counts nor
 * kept masks are what it says yes by.
 */
#include <errno.h>
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "model/grammar/grammar.h"

static struct vocab *tiny, *real;
static uint64_t state;

static uint32_t draw(uint32_t n)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((state >> 33) * n >> 31);
}

/* A random pattern: classes, alternatives, counts small and large. */
static void pattern(struct buffer *out, unsigned depth)
{
    static const char *const atoms[] = {"a",      "[a-f]", ".",       "[^\"]",    "\"",
                                        "[ \\n]", "\\\\",  "\\d",     "\xC3\xA9", "the",
                                        "[^a-z]", "\\w",   "(.|\\n)", "x"};
    static const char *const counts[] = {"",     "*",     "+",      "?",        "{2}",
                                         "{3,}", "{0,5}", "{2,60}", "{10,700}", "{300}"};

    for (unsigned i = 0, n = 1 + draw(4); i < n; i++) {
        if (depth < 3 && draw(4) == 0) {
            buffer_printf(out, "(");
            pattern(out, depth + 1);
            buffer_printf(out, "|");
            pattern(out, depth + 1);
            buffer_printf(out, ")");
        } else {
            buffer_printf(out, "%s", atoms[draw(ARRAY_LEN(atoms))]);
        }
        buffer_printf(out, "%s", counts[draw(ARRAY_LEN(counts))]);
    }
}

static const char *const schemas[] = {
    "{\"type\":\"object\"}",
    "{\"type\":\"string\",\"maxLength\":20}",
    "{\"type\":\"string\",\"minLength\":400,\"maxLength\":4000}",
    "{\"type\":\"array\",\"items\":{\"type\":\"number\",\"minimum\":-3.5,\"maximum\":1000},"
    "\"minItems\":2,"
    "\"maxItems\":90}",
    "{\"properties\":{\"a\":{\"type\":\"string\",\"pattern\":\"^[a-z "
    "\\u00e9]{3,200}$\"},\"b\":{\"enum\":["
    "\"one\",\"two\",3]}},\"type\":\"object\",\"required\":[\"b\"]}",
    "{\"$defs\":{\"t\":{\"type\":\"array\",\"items\":{\"anyOf\":[{\"$ref\":\"#/$defs/"
    "t\"},{\"type\":"
    "\"string\"}]}}},\"$ref\":\"#/$defs/t\"}"};
static const char *const rules[] = {
    "root ::= \"a\" root \"x\" | \"a\" root \"y\" | \"b\" [a-z]{0,300}",
    "root ::= (w \" \")* w \".\"\nw ::= [a-z]{1,9} | \"\\\"\" root \"\\\"\""};

static unsigned missing; /* tokens that masks left out though they may follow */

/* Whether the token may follow the text, by bytes. */
static bool plainly(struct grammar *g, const struct buffer *text, const struct vocab *v,
                    uint32_t token)
{
    struct matcher *m;
    size_t len;
    const uint8_t *bytes = vocab_token(v, token, &len);

    if (!len)
        return false;
    assert_int_equal(matcher_new(g, &m, NULL), 0);
    assert_true(matcher_take_bytes(m, text->data ? text->data : "", text->len));
    bool ok = matcher_take_bytes(m, bytes, len);
    matcher_free(m);
    return ok;
}

static void compare(const struct buffer *program, const struct vocab *v, unsigned places,
                    unsigned every, const char *what)
{
    struct grammar *g, *plain;
    struct matcher *m;
    struct buffer text = {0};

    assert_int_equal(grammar_open(program->data, program->len, v, &g, NULL), 0);
    assert_int_equal(grammar_open(program->data, program->len, v, &plain, NULL), 0);
    assert_int_equal(matcher_new(g, &m, NULL), 0);
    for (unsigned i = 0; i < places && !matcher_must_end(m); i++) {
        const uint64_t *mask = matcher_mask(m);
        uint32_t chosen = UINT32_MAX, seen = 0;
        size_t len;
        assert_non_null(mask);
        for (uint32_t t = 0; t < vocab_size(v); t++) {
            bool allowed = mask[t / 64] >> t % 64 & 1;
            bool may = (t + i) % every ? allowed : plainly(plain, &text, v, t);
            if (allowed && !may)
                fail_msg("%s: token %u at byte %zu is allowed and may not follow", what, t,
                         text.len);
            if (may && !allowed && (vocab_token(v, t, &len), len <= 32)) /* see match.h */
                missing++;
            if (allowed && draw(++seen) == 0)
                chosen = t;
        }
        if (chosen == UINT32_MAX) {
            assert_true(matcher_may_end(m));
            break;
        }
        const uint8_t *bytes = vocab_token(v, chosen, &len);
        assert_true(matcher_take(m, chosen));
        buffer_append(&text, bytes, len);
        if (draw(5) == 0)
            grammar_trim(g);
    }
    buffer_free(&text);
    matcher_free(m);
    grammar_unref(g);
    grammar_unref(plain);
}

static void each_vocab(const struct buffer *program, const char *what)
{
    compare(program, tiny, 12, 1, what);
    if (real)
        compare(program, real, 2, 23, what);
}

static void test_patterns(void **unused)
{
    unsigned done = 0, short_ones = 0;

    for (unsigned i = 0; i < 40; i++) {
        struct buffer text = {0}, program = {0};
        struct error err = {0};
        state = i;
        missing = 0;
        pattern(&text, 0);
        int r = grammar_from_regex(text.data, text.len, &program, &err);
        if (r == 0)
            each_vocab(&program, text.data);
        else if (!strstr(err.text, "empty text"))
            assert_int_equal(r, -E2BIG);
        if (missing)
            print_message("%u left out: %s\n", missing, text.data);
        done += r == 0;
        short_ones += missing != 0;
        buffer_free(&text);
        buffer_free(&program);
    }
    assert_true(done > 25);
    assert_true(short_ones <= 5); /* counts within counts: too many places at once to look at all */
}

static void test_schemas(void **unused)
{
    for (size_t i = 0; i < ARRAY_LEN(schemas); i++) {
        struct buffer program = {0};
        json_t *schema = json_loads(schemas[i], 0, NULL);
        assert_non_null(schema);
        assert_int_equal(grammar_from_schema(schema, NULL, &program, NULL), 0);
        json_decref(schema);
        state = i;
        missing = 0;
        each_vocab(&program, schemas[i]);
        assert_int_equal(missing, 0);
        buffer_free(&program);
    }
}

static void test_rules(void **unused)
{
    for (size_t i = 0; i < ARRAY_LEN(rules); i++) {
        struct buffer program = {0};
        assert_int_equal(grammar_from_rules(rules[i], strlen(rules[i]), &program, NULL), 0);
        state = i;
        missing = 0;
        each_vocab(&program, rules[i]);
        assert_int_equal(missing, 0);
        buffer_free(&program);
    }
}

/* A program is the same bytes each time, and any one of them changed is noticed or harmless. */
static void test_damage(void **unused)
{
    struct buffer one = {0}, two = {0};

    assert_int_equal(grammar_from_rules(rules[1], strlen(rules[1]), &one, NULL), 0);
    assert_int_equal(grammar_from_rules(rules[1], strlen(rules[1]), &two, NULL), 0);
    assert_int_equal(one.len, two.len);
    assert_memory_equal(one.data, two.data, one.len);
    for (size_t i = 0; i < one.len; i++)
        for (unsigned change = 1; change < 256; change = change * 2 + 1) {
            struct grammar *g = NULL;
            two.data[i] = (char)(two.data[i] ^ (int)change);
            if (grammar_open(two.data, two.len, tiny, &g, NULL) == 0) {
                struct matcher *m;
                assert_int_equal(matcher_new(g, &m, NULL), 0);
                if (i % 16 == 0)
                    assert_non_null(matcher_mask(m));
                matcher_take_bytes(m, "abc \"def\"", 9);
                matcher_free(m);
            }
            grammar_unref(g);
            two.data[i] = one.data[i];
        }
    for (size_t n = 0; n < one.len; n++) {
        struct grammar *g = NULL;
        struct error err = {0};
        assert_int_equal(grammar_open(one.data, n, tiny, &g, &err), -EBADMSG);
    }
    buffer_free(&one);
    buffer_free(&two);
}

static void open_vocab(const char *path, struct vocab **ret)
{
    struct tokenizer *t = NULL;

    if (tokenizer_load(path, &t, NULL) == 0)
        vocab_new(t, tokenizer_vocab_size(t), ret, NULL);
    tokenizer_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_patterns),
                                       cmocka_unit_test(test_schemas), cmocka_unit_test(test_rules),
                                       cmocka_unit_test(test_damage)};
    const char *shared = getenv("EMBER_SHARED");
    char path[1024];

    open_vocab(SOURCE_ROOT "/models/ember-tiny", &tiny);
    snprintf(path, sizeof path, "%s/tokenizers/qwen3/tokenizer.json.xz",
             shared ? shared : SOURCE_ROOT "/../shared");
    open_vocab(path, &real);
    if (!tiny)
        return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    vocab_free(tiny);
    vocab_free(real);
    return failed;
}
