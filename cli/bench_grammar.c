/* SPDX-License-Identifier: Apache-2.0 */
/*
 * emberctl bench grammar: what structured output costs with a tokenizer's vocabulary. Each grammar
 * is compiled, then texts are drawn from it (any allowed token, the same ones each time) and the
 * masks timed, in processor time: of texts that nobody has asked for before, and of the same again.
 */
#include "cli/commands.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/value.h"
#include "cli/measure.h"
#include "cli/output.h"
#include "engine/tokenizer.h"
#include "model/grammar/grammar.h"

#define COMPILES 9
#define TEXTS 4
#define TOKENS 200

enum kind { SCHEMA, REGEX, RULES };

static const struct example {
    const char *name;
    enum kind kind;
    const char *text;
} examples[] = {
    {"any object", SCHEMA, "{\"type\":\"object\"}"},
    {"tool call", SCHEMA,
     "{\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\"},\"unit\":{\"enum\":["
     "\"C\","
     "\"F\"]},\"days\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":14}},\"required\":[\"city\","
     "\"days\"]}"},
    {"recursive", SCHEMA,
     "{\"$defs\":{\"n\":{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\","
     "\"maxLength\":40},\"kind\":{\"enum\":[\"file\",\"folder\"]},\"size\":{\"type\":\"number\","
     "\"minimum\":0},\"kids\":{\"type\":\"array\",\"items\":{\"$ref\":\"#/$defs/"
     "n\"}}},\"required\":["
     "\"name\",\"kind\"]}},\"$ref\":\"#/$defs/n\"}"},
    {"lengths", SCHEMA,
     "{\"type\":\"array\",\"minItems\":3,\"maxItems\":8,\"items\":{\"type\":\"string\","
     "\"minLength\":"
     "5,\"maxLength\":500}}"},
    {"formats", SCHEMA,
     "{\"type\":\"object\",\"properties\":{\"id\":{\"type\":\"string\",\"format\":\"uuid\"},\"at\":"
     "{"
     "\"type\":\"string\",\"format\":\"date-time\"},\"mail\":{\"type\":\"string\",\"format\":"
     "\"email"
     "\"},\"code\":{\"type\":\"string\",\"pattern\":\"^[A-Z]{3}-[0-9]{2,6}$\"}},\"required\":["
     "\"id\","
     "\"at\",\"mail\",\"code\"]}"},
    {"words", REGEX, "[a-z]+( [a-z]+){3,30}\\."},
    {"anything", REGEX, "(.|\\n){1,400}"},
    {"SQL", RULES,
     "root ::= \"SELECT \" col (\", \" col)* \" FROM \" col (\" WHERE \" cond (\" AND \" cond)*)?\n"
     "cond ::= col \" = \" ([0-9]+ | \"'\" [^'\\n]* \"'\") | \"(\" cond \")\"\ncol ::= [a-z_]+"}};

struct figures {
    double compile_ms, cold_us, warm_us, worst_us; /* worst: of all masks that were new */
    size_t bytes, tokens;
};

/* Processor time of this thread: what others do meanwhile does not count. */
static uint64_t spent_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int compile(const struct example *e, struct buffer *out, struct error *err)
{
    size_t len = strlen(e->text);

    if (e->kind == REGEX)
        return grammar_from_regex(e->text, len, out, err);
    if (e->kind == RULES)
        return grammar_from_rules(e->text, len, out, err);
    json_t *schema = json_loads(e->text, 0, NULL);
    int r = grammar_from_schema(schema, NULL, out, err);
    json_decref(schema);
    return r;
}

/* The n-th token (modulo their number) of a mask; UINT32_MAX: it is empty. */
static uint32_t pick(const uint64_t *mask, uint32_t size, uint64_t n)
{
    uint64_t count = 0;

    for (uint32_t w = 0; w < (size + 63) / 64; w++)
        count += (uint64_t)__builtin_popcountll(mask[w]);
    n = count ? n % count : 0;
    for (uint32_t i = 0; count && i < size; i++)
        if (mask[i / 64] >> i % 64 & 1 && !n--)
            return i;
    return UINT32_MAX;
}

/* One text, the same for the same number; adds up the time of its masks. */
static int draw(struct grammar *g, const struct vocab *v, uint64_t number, uint64_t *ns,
                uint64_t *worst, size_t *tokens, struct error *err)
{
    _cleanup_(matcher_freep) struct matcher *m = NULL;
    uint64_t state = number * UINT64_C(0x9e3779b97f4a7c15) + 1;
    int r = matcher_new(g, &m, err);

    for (int i = 0; i < TOKENS && r == 0 && !matcher_must_end(m); i++) {
        uint64_t start = spent_ns();
        const uint64_t *mask = matcher_mask(m);
        uint64_t took = spent_ns() - start;
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        uint32_t token = mask ? pick(mask, vocab_size(v), state >> 20) : UINT32_MAX;
        if (token == UINT32_MAX || !matcher_take(m, token))
            return error_set(err, ENOMEM, "no token may follow, or no memory for it");
        *ns += took;
        *worst = MAX(*worst, took);
        ++*tokens;
    }
    return r;
}

static int measure(const struct example *e, const struct vocab *v, struct figures *ret,
                   struct error *err)
{
    _cleanup_(buffer_free) struct buffer program = {0};
    _cleanup_(grammar_unrefp) struct grammar *g = NULL;
    double ms[COMPILES];
    uint64_t ns[2] = {0}, worst[2] = {0};
    size_t tokens[2] = {0};
    int r = 0;

    for (int i = 0; i < COMPILES && r == 0; i++) {
        uint64_t start = spent_ns();
        program.len = 0;
        r = compile(e, &program, err);
        ms[i] = (double)(spent_ns() - start) / 1e6;
    }
    if (r == 0)
        r = grammar_open(program.data, program.len, v, &g, err);
    for (unsigned pass = 0; pass < 2; pass++)
        for (uint64_t i = 0; i < TEXTS && r == 0; i++)
            r = draw(g, v, i, &ns[pass], &worst[pass], &tokens[pass], err);
    if (r < 0)
        return error_prefix(err, "%s", e->name);
    *ret = (struct figures){.compile_ms = quantile(ms, COMPILES, 0.5),
                            .bytes = program.len,
                            .tokens = tokens[0],
                            .cold_us = (double)ns[0] / 1e3 / (double)tokens[0],
                            .warm_us = (double)ns[1] / 1e3 / (double)tokens[1],
                            .worst_us = (double)worst[0] / 1e3};
    return 0;
}

static void print(const struct verb_call *call, const struct example *e, const struct figures *f,
                  json_t *rows)
{
    if (!cli_json(call))
        printf("%-12s %9.2f ms %8zu B %6zu %10.1f us %10.1f us %10.1f us\n", e->name, f->compile_ms,
               f->bytes, f->tokens, f->cold_us, f->worst_us, f->warm_us);
    json_array_append_new(rows, json_pack("{s:s,s:f,s:I,s:I,s:f,s:f,s:f}", "grammar", e->name,
                                          "compile_ms", f->compile_ms, "program_bytes",
                                          (json_int_t)f->bytes, "tokens", (json_int_t)f->tokens,
                                          "new_mask_us", f->cold_us, "worst_mask_us", f->worst_us,
                                          "known_mask_us", f->warm_us));
}

static int bench(const struct verb_call *call, const char *path, json_t **ret, struct error *err)
{
    _cleanup_(tokenizer_freep) struct tokenizer *t = NULL;
    _cleanup_(vocab_freep) struct vocab *v = NULL;
    int r = engine_tokenizer_open(NULL, path, &t, err);
    uint64_t start = spent_ns();

    if (r == 0)
        r = vocab_new(t, tokenizer_vocab_size(t), &v, err);
    if (r < 0)
        return r;
    double ms = (double)(spent_ns() - start) / 1e6;
    json_t *rows = json_array();
    if (!cli_json(call))
        printf("%s: %u tokens, their trie in %.1f ms (once an instance)\n%-12s %12s %10s %6s %13s "
               "%13s %13s\n",
               path, vocab_size(v), ms, "grammar", "compile", "program", "tokens", "new mask",
               "worst", "known mask");
    for (size_t i = 0; i < ARRAY_LEN(examples) && r == 0; i++) {
        struct figures f = {0};
        r = measure(&examples[i], v, &f, err);
        if (r == 0)
            print(call, &examples[i], &f, rows);
    }
    *ret = json_pack("{s:s,s:I,s:f,s:o}", "tokenizer", path, "tokens", (json_int_t)vocab_size(v),
                     "trie_ms", ms, "grammars", rows);
    return r;
}

int run_bench_grammar(const struct verb_call *call)
{
    _cleanup_free_ char *tiny = NULL;
    json_t *reply = NULL;
    struct error err = {0};
    int r = call->argc ? 0 : value_expand("%D/models/ember-tiny", &tiny, &err);

    if (r == 0)
        r = bench(call, tiny ? tiny : call->argv[0], &reply, &err);
    if (r == 0 && cli_json(call))
        cli_print_json(json_incref(reply));
    json_decref(reply);
    return r < 0 ? cli_fail(call, &err) : CLI_OK;
}
