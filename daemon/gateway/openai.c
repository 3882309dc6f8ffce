/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/openai_private.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- one function for each field that is more than a number ---- */

static void prompt_text(struct parse *p, struct api_prompt *prompt, json_t *v)
{
    prompt->text = json_string_value(v);
    prompt->len = json_string_length(v);
}

static bool alloc_prompts(struct parse *p, size_t n)
{
    p->r->prompts = mem_alloc(n + 1, sizeof *p->r->prompts);
    p->r->n_prompts = p->r->prompts ? n : 0;
    if (!p->r->prompts)
        parse_bad(p, "no memory for %zu prompts", n);
    return p->r->prompts != NULL;
}

/* A string, strings, token ids, or lists of token ids. */
static void f_prompt(struct parse *p)
{
    json_t *v = p->value, *first = json_array_get(v, 0);
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    bool one = !json_is_array(v) || !n || json_is_integer(first);

    if (json_is_array(v) && !n && p->r->kind != API_DETOKENIZE) {
        parse_bad(p, "the list is empty");
        return;
    }
    if (!one && n > 1024) {
        parse_bad(p, "%zu prompts; at most 1024", n);
        return;
    }
    if (!alloc_prompts(p, one ? 1 : n))
        return;
    for (size_t i = 0; i < p->r->n_prompts; i++) {
        json_t *element = one ? v : json_array_get(v, i);
        if (json_is_string(element))
            prompt_text(p, &p->r->prompts[i], element);
        else if (json_is_array(element) && (json_array_size(element) || element == v))
            parse_ids(p, element, &p->r->prompts[i].ids, &p->r->prompts[i].n_ids);
        else
            parse_bad(p, "expected a string, strings, token ids or lists of token ids");
    }
}

static void f_messages(struct parse *p)
{
    size_t i;
    json_t *message;

    if (!json_is_array(p->value) || !json_array_size(p->value)) {
        parse_bad(p, "expected a list of at least one message");
        return;
    }
    json_array_foreach(p->value, i, message)
    {
        if (!json_is_object(message) || !json_is_string(json_object_get(message, "role")))
            parse_bad(p, "message %zu is not an object with a role", i);
    }
    p->r->messages = p->value;
}

static void f_stop(struct parse *p)
{
    size_t n = json_is_array(p->value) ? json_array_size(p->value) : 1;

    if (n > API_STOPS_MAX)
        parse_bad(p, "%zu strings; at most %d", n, API_STOPS_MAX);
    for (size_t i = 0; i < n && n <= API_STOPS_MAX; i++) {
        json_t *v = json_is_array(p->value) ? json_array_get(p->value, i) : p->value;
        if (!json_is_string(v))
            parse_bad(p, "expected a string or strings");
        else if (!json_string_length(v))
            parse_bad(p, "an empty string would stop at once");
        else {
            p->r->stops[p->r->n_stops] = json_string_value(v);
            p->r->stop_lens[p->r->n_stops++] = json_string_length(v);
        }
    }
}

static void f_stop_token_ids(struct parse *p)
{
    if (!json_is_array(p->value) || json_array_size(p->value) > 256)
        parse_bad(p, "expected a list of at most 256 token ids");
    else
        parse_ids(p, p->value, &p->r->stop_ids, &p->r->n_stop_ids);
}

static void f_allowed_token_ids(struct parse *p)
{
    size_t n = json_array_size(p->value);

    if (!n || n > API_TOKENS_MAX)
        parse_bad(p, "expected a list of 1 to %d token ids", API_TOKENS_MAX);
    else
        parse_ids(p, p->value, &p->r->sampling.allowed, &p->r->sampling.n_allowed);
}

static void f_bad_words(struct parse *p)
{
    size_t i;
    json_t *v;

    if (!json_is_array(p->value) || json_array_size(p->value) > API_BAD_WORDS_MAX)
        parse_bad(p, "expected a list of at most %d texts", API_BAD_WORDS_MAX);
    json_array_foreach(p->value, i, v)
    {
        if (!json_string_length(v))
            parse_bad(p, "element %zu is not a text", i);
    }
    p->r->bad_words = p->value;
}

static void f_logit_bias(struct parse *p)
{
    Ember__V1__Sampling *s = &p->r->sampling;
    size_t n = json_object_size(p->value);
    const char *key;
    json_t *v;

    if (!json_is_object(p->value) || n > API_TOKENS_MAX) {
        parse_bad(p, "expected an object of at most %d tokens", API_TOKENS_MAX);
        return;
    }
    s->bias_tokens = mem_alloc(n + 1, sizeof *s->bias_tokens);
    s->bias_values = mem_alloc(n + 1, sizeof *s->bias_values);
    if (!s->bias_tokens || !s->bias_values) {
        parse_bad(p, "no memory for %zu tokens", n);
        return;
    }
    json_object_foreach(p->value, key, v)
    {
        char *end;
        unsigned long token = strtoul(key, &end, 10);
        double bias = json_number_value(v);
        if (*key < '0' || *key > '9' || *end || token > INT32_MAX)
            parse_bad(p, "\"%.32s\" is not a token id", key);
        else if (!json_is_number(v) || !(bias >= -100 && bias <= 100))
            parse_bad(p, "the bias of token %lu is not a number from -100 to 100", token);
        s->bias_tokens[s->n_bias_tokens++] = (uint32_t)token;
        s->bias_values[s->n_bias_values++] = (float)bias;
    }
}

/* A switch within the field; false when it is not there. */
static bool member(struct parse *p, const char *name)
{
    json_t *v = json_object_get(p->value, name);

    if (v && !json_is_boolean(v) && !json_is_null(v))
        parse_bad(p, "%s: expected true or false", name);
    return json_is_true(v);
}

static void f_stream_options(struct parse *p)
{
    if (!json_is_object(p->value))
        parse_bad(p, "expected an object");
    p->r->include_usage = member(p, "include_usage");
    p->r->continuous_usage = member(p, "continuous_usage_stats");
}

/* A number of alternatives for completions, a switch for chats. */
static void f_logprobs(struct parse *p)
{
    if (p->r->kind == API_COMPLETION && json_is_boolean(p->value))
        p->r->logprobs = json_is_true(p->value) ? 0 : -1;
    else if (p->r->kind == API_COMPLETION)
        p->r->logprobs = (int)parse_integer(p, 0, API_LOGPROBS_MAX);
    else if (parse_boolean(p))
        p->r->logprobs = MAX(p->r->logprobs, 0);
}

static void f_top_logprobs(struct parse *p)
{
    bool wanted = json_is_true(json_object_get(p->r->json, "logprobs"));
    int n = (int)parse_integer(p, 0, API_LOGPROBS_MAX);

    if (wanted)
        p->r->logprobs = n;
    else if (n)
        parse_bad(p, "needs logprobs: true");
}

static void f_prompt_logprobs(struct parse *p)
{
    p->r->prompt_logprobs = (int)parse_integer(p, 0, API_LOGPROBS_MAX);
}

/* The older name: max_completion_tokens goes before it. */
static void f_max_tokens(struct parse *p)
{
    json_t *newer = json_object_get(p->r->json, "max_completion_tokens");
    uint32_t n = (uint32_t)parse_integer(p, p->r->kind == API_CHAT, INT32_MAX);

    if (!newer || json_is_null(newer))
        p->r->max_tokens = n;
}

static void f_seed(struct parse *p)
{
    p->r->sampling.seed = (uint64_t)parse_integer(p, INT64_MIN, INT64_MAX);
    p->r->seeded = true;
}

static void f_best_of(struct parse *p)
{
    json_t *n = json_object_get(p->r->json, "n");

    if (parse_integer(p, 1, API_N_MAX) != (json_is_integer(n) ? json_integer_value(n) : 1))
        parse_bad(p, "choosing the best of more than n is not supported");
}

static void f_suffix(struct parse *p)
{
    if (json_is_string(p->value) && json_string_length(p->value))
        parse_bad(p, "inserting before a suffix is not supported");
}

static void f_list(struct parse *p)
{
    if (!json_is_array(p->value))
        parse_bad(p, "expected a list");
}

static void f_object(struct parse *p)
{
    if (!json_is_object(p->value))
        parse_bad(p, "expected an object");
}

/* Nothing is lost by leaving out an empty list. */
static void f_unless_empty(struct parse *p)
{
    if (!json_is_array(p->value) || json_array_size(p->value))
        parse_bad(p, "not supported");
}

static void f_modalities(struct parse *p)
{
    size_t i;
    json_t *v;

    json_array_foreach(p->value, i, v)
    {
        if (!json_is_string(v) || strcmp(json_string_value(v), "text"))
            parse_bad(p, "only \"text\" is supported");
    }
}

static void f_truncate(struct parse *p)
{
    p->r->truncate = parse_integer(p, -1, INT32_MAX);
    if (!p->r->truncate)
        parse_bad(p, "0 tokens would be left");
}

static void f_truncation_side(struct parse *p)
{
    const char *side = json_string_value(p->value);

    p->r->truncate_right = side && !strcmp(side, "right");
    if (!side || (strcmp(side, "left") && strcmp(side, "right")))
        parse_bad(p, "expected \"left\" or \"right\"");
}

static void f_cache_salt(struct parse *p)
{
    p->r->cache_salt = parse_string(p);
    if (!json_string_length(p->value))
        parse_bad(p, "expected a text, or none at all");
}

/* -1: as much as it likes. */
static void f_thinking_budget(struct parse *p)
{
    if (parse_integer(p, -1, INT32_MAX) >= 0)
        parse_bad(p, "not supported");
}

static void f_unsupported(struct parse *p)
{
    parse_bad(p, "not supported");
}

static void f_truthy_unsupported(struct parse *p)
{
    if (!json_is_false(p->value))
        parse_bad(p, "not supported");
}

static void f_ignored(struct parse *p)
{
}

/*
 * X(field, kinds that take it, statement with `p`, the parse, and `r`, the request). A null counts
 * as not there.
 */
#define C (1 << API_COMPLETION)
#define H (1 << API_CHAT)
#define T (1 << API_TOKENIZE)
#define D (1 << API_DETOKENIZE)
#define G (C | H)
#define FIELDS(X)                                                                                  \
    X(model, G | T | D, r->model = parse_string(p))                                                \
    X(prompt, C | T, f_prompt(p))                                                                  \
    X(messages, H | T, f_messages(p))                                                              \
    X(tokens, D, f_prompt(p))                                                                      \
    X(max_tokens, G, f_max_tokens(p))                                                              \
    X(max_completion_tokens, G, r->max_tokens = (uint32_t)parse_integer(p, 1, INT32_MAX))          \
    X(min_tokens, G, r->min_tokens = (uint32_t)parse_integer(p, 0, INT32_MAX))                     \
    X(n, G, r->n = (uint32_t)parse_integer(p, 1, API_N_MAX))                                       \
    X(best_of, G, f_best_of(p))                                                                    \
    X(stream, G, r->stream = parse_boolean(p))                                                     \
    X(stream_options, G, f_stream_options(p))                                                      \
    X(echo, G, r->echo = parse_boolean(p))                                                         \
    X(logprobs, G, f_logprobs(p))                                                                  \
    X(top_logprobs, H, f_top_logprobs(p))                                                          \
    X(prompt_logprobs, G, f_prompt_logprobs(p))                                                    \
    X(stop, G, f_stop(p))                                                                          \
    X(stop_token_ids, G, f_stop_token_ids(p))                                                      \
    X(include_stop_str_in_output, G, r->include_stop = parse_boolean(p))                           \
    X(ignore_eos, G, r->ignore_eos = parse_boolean(p))                                             \
    X(skip_special_tokens, G | D, r->skip_special = parse_boolean(p))                              \
    X(add_special_tokens, G | T, (r->add_special = parse_boolean(p), r->add_special_set = true))   \
    X(return_token_ids, G, r->return_ids = parse_boolean(p))                                       \
    X(return_token_strs, T, r->return_strings = parse_boolean(p))                                  \
    X(temperature, G,                                                                              \
      (r->sampling.temperature = (float)parse_number(p, 0, 100), r->set |= API_TEMPERATURE))       \
    X(top_p, G, (r->sampling.top_p = (float)parse_number(p, 1e-9, 1), r->set |= API_TOP_P))        \
    X(top_k, G,                                                                                    \
      (r->sampling.top_k = (uint32_t)MAX(parse_integer(p, -1, INT32_MAX), 0),                      \
       r->set |= API_TOP_K))                                                                       \
    X(min_p, G, (r->sampling.min_p = (float)parse_number(p, 0, 1), r->set |= API_MIN_P))           \
    X(seed, G, f_seed(p))                                                                          \
    X(presence_penalty, G, r->sampling.presence_penalty = (float)parse_number(p, -2, 2))           \
    X(frequency_penalty, G, r->sampling.frequency_penalty = (float)parse_number(p, -2, 2))         \
    X(repetition_penalty, G,                                                                       \
      (r->sampling.repetition_penalty = (float)parse_number(p, 1e-6, 1e6),                         \
       r->set |= API_REPETITION))                                                                  \
    X(logit_bias, G, f_logit_bias(p))                                                              \
    X(priority, G, r->priority = parse_integer(p, INT64_MIN, INT64_MAX))                           \
    X(cache_salt, G, f_cache_salt(p))                                                              \
    X(user, G, r->user = parse_string(p))                                                          \
    X(add_generation_prompt, H | T, r->add_generation_prompt = parse_boolean(p))                   \
    X(continue_final_message, H | T, r->continue_final = parse_boolean(p))                         \
    X(chat_template, H | T, r->template_name = parse_string(p))                                    \
    X(chat_template_kwargs, H | T, f_object(p))                                                    \
    X(tools, H | T, parse_tools(p))                                                                \
    X(documents, H, f_list(p))                                                                     \
    X(tool_choice, H, parse_tool_choice(p))                                                        \
    X(response_format, G, parse_response_format(p))                                                \
    X(suffix, C, f_suffix(p))                                                                      \
    X(use_beam_search, G, f_truthy_unsupported(p))                                                 \
    X(structured_outputs, G, parse_structured_outputs(p))                                          \
    X(guided_json, G, parse_schema(p, p->value))                                                   \
    X(guided_regex, G, parse_grammar_text(p, API_GRAMMAR_REGEX, p->value))                         \
    X(guided_choice, G, parse_choice(p, p->value))                                                 \
    X(guided_grammar, G, parse_grammar_text(p, API_GRAMMAR_RULES, p->value))                       \
    X(guided_whitespace_pattern, G, r->grammar.whitespace = parse_string(p))                       \
    X(guided_decoding_backend, G, f_ignored(p))                                                    \
    X(logits_processors, G, f_unsupported(p))                                                      \
    X(allowed_token_ids, G, f_allowed_token_ids(p))                                                \
    X(logprob_token_ids, G, f_unsupported(p))                                                      \
    X(repetition_detection, G, f_unsupported(p))                                                   \
    X(thinking_token_budget, G, f_thinking_budget(p))                                              \
    X(watermarking, G, f_truthy_unsupported(p))                                                    \
    X(truncate_prompt_tokens, G, f_truncate(p))                                                    \
    X(truncation_side, G, f_truncation_side(p))                                                    \
    X(return_tokens_as_token_ids, G, r->tokens_as_ids = parse_boolean(p))                          \
    X(bad_words, G, f_bad_words(p))                                                                \
    X(functions, H, f_unless_empty(p))                                                             \
    X(web_search_options, H, f_unsupported(p))                                                     \
    X(modalities, H, f_modalities(p))                                                              \
    X(prompt_embeds, G, f_unsupported(p))                                                          \
    X(audio, H, f_unsupported(p))                                                                  \
    X(spaces_between_special_tokens, G, f_ignored(p))                                              \
    X(parallel_tool_calls, H, r->parallel_calls = parse_boolean(p))                                \
    X(include_reasoning, H, r->include_reasoning = parse_boolean(p))                               \
    X(reasoning_effort, H, parse_string(p))                                                        \
    X(request_id, G, r->request_id = parse_string(p))                                              \
    X(session_id, G, f_ignored(p))                                                                 \
    X(stream_interval, G, f_ignored(p))                                                            \
    X(length_penalty, G, f_ignored(p))                                                             \
    X(early_stopping, G, f_ignored(p))                                                             \
    X(prediction, H, f_ignored(p))                                                                 \
    X(verbosity, H, f_ignored(p))                                                                  \
    X(prompt_cache_key, G, f_ignored(p))                                                           \
    X(safety_identifier, G, f_ignored(p))                                                          \
    X(kv_transfer_params, G, f_ignored(p))                                                         \
    X(ec_transfer_params, G, f_ignored(p))                                                         \
    X(mm_processor_kwargs, H, f_ignored(p))                                                        \
    X(media_io_kwargs, H, f_ignored(p))                                                            \
    X(vllm_xargs, G, f_ignored(p))                                                                 \
    X(service_tier, G, f_ignored(p))                                                               \
    X(store, G, f_ignored(p))                                                                      \
    X(metadata, G, f_ignored(p))

static void one_field(struct parse *p)
{
    struct api_request *r = p->r;

#define X(field, kinds, statement)                                                                 \
    if ((kinds) >> r->kind & 1 && !strcmp(p->name, #field)) {                                      \
        if (!json_is_null(p->value))                                                               \
            (void)(statement);                                                                     \
        return;                                                                                    \
    }
    FIELDS(X)
#undef X
    if (r->n_unknown < API_UNKNOWN_MAX)
        r->unknown[r->n_unknown++] = p->name;
}

/* What no single field can know. */
static void check_whole(struct parse *p)
{
    struct api_request *r = p->r;

    p->name = r->kind == API_CHAT ? "messages" : r->kind == API_DETOKENIZE ? "tokens" : "prompt";
    if (!r->messages && !r->n_prompts)
        parse_bad(p, "missing");
    if (r->messages && r->n_prompts)
        parse_bad(p, "not together with messages");
    else if (r->messages && !alloc_prompts(p, 1))
        return;
    if (r->kind != API_COMPLETION && r->n_prompts > 1)
        parse_bad(p, "only one at a time");
    if (r->kind == API_DETOKENIZE && r->n_prompts && !r->prompts[0].ids)
        parse_bad(p, "expected a list of token ids");
    p->name = "n";
    if (r->n_prompts * r->n > API_CHOICES_MAX)
        parse_bad(p, "%zu prompts of %u choices each; at most %d in all", r->n_prompts, r->n,
                  API_CHOICES_MAX);
    p->name = "min_tokens";
    if (r->min_tokens > r->max_tokens)
        parse_bad(p, "%u is more than max_tokens, %u", r->min_tokens, r->max_tokens);
    p->name = "stream_options";
    if (!r->stream && (r->include_usage || r->continuous_usage))
        parse_bad(p, "only with stream: true");
    p->name = "continue_final_message";
    if (r->continue_final && r->add_generation_prompt &&
        json_object_get(r->json, "add_generation_prompt"))
        parse_bad(p, "not together with add_generation_prompt");
    if (r->continue_final)
        r->add_generation_prompt = false;
    parse_forced_calls(p);
    p->name = "prompt_logprobs";
    if (r->stream && r->prompt_logprobs >= 0)
        parse_bad(p, "not with stream: true");
}

/*
 * Memory that a text takes once it is parsed, in units of some 40 bytes: a number is one, a list or
 * an object nearly ten.
 */
static bool takes_too_much(const char *body, size_t len)
{
    size_t units = 0;
    bool in_string = false;

    for (size_t i = 0; i < len && units <= API_UNITS_MAX; i++) {
        char c = body[i];
        if (c == '"')
            in_string = !in_string;
        else if (in_string)
            i += c == '\\';
        else
            units += c == '[' || c == '{' ? 9 : c == ',' || c == ':';
    }
    return units > API_UNITS_MAX;
}

int api_parse(enum api_kind kind, const char *body, size_t len, struct api_request *ret,
              struct api_error *fail)
{
    struct parse p = {.r = ret, .fail = fail, .name = ""};
    json_error_t e;

    *ret = (struct api_request){.kind = kind,
                                .n = 1,
                                .max_tokens = kind == API_CHAT ? UINT32_MAX : 16,
                                .logprobs = -1,
                                .prompt_logprobs = -1,
                                .skip_special = kind != API_DETOKENIZE,
                                .add_special = kind != API_CHAT,
                                .add_generation_prompt = true,
                                .parallel_calls = true,
                                .include_reasoning = true};
    ember__v1__sampling__init(&ret->sampling);
    ret->sampling.temperature = 1;
    *fail = (struct api_error){0};
    if (takes_too_much(body, len)) {
        fail->status = 413;
        fail->code = "request_too_large";
        return error_set(&fail->err, EINVAL,
                         "the body has too many values: more than %u units, of "
                         "which a number is 1 and a list or an object 9",
                         API_UNITS_MAX);
    }
    ret->json = json_loadb(body, len, JSON_REJECT_DUPLICATES, &e);
    if (!ret->json || !json_is_object(ret->json)) {
        fail->status = 400;
        if (ret->json)
            error_set(&fail->err, EINVAL, "the body is not a JSON object");
        else
            error_set(&fail->err, EINVAL, "the body is not JSON: line %d column %d: %s", e.line,
                      e.column,
                      json_error_code(&e) == json_error_null_character
                          ? "a text with \\u0000 in it is not taken"
                          : e.text);
    } else {
        json_object_foreach(ret->json, p.name, p.value) one_field(&p);
        check_whole(&p);
    }
    if (fail->status)
        api_request_free(ret);
    return fail->status ? -EINVAL : 0;
}

void api_request_free(struct api_request *r)
{
    for (size_t i = 0; i < r->n_prompts; i++) {
        free(r->prompts[i].ids);
        free(r->prompts[i].owned);
    }
    free(r->prompts);
    free(r->stop_ids);
    free(r->sampling.bias_tokens);
    free(r->sampling.bias_values);
    free(r->sampling.allowed);
    free(r->sampling.bad_tokens);
    free(r->sampling.bad_lens);
    json_decref(r->grammar.owned);
    json_decref(r->json);
    *r = (struct api_request){0};
}
