/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests of OpenAI's API with the fields that vLLM's server adds: parsed, checked, in one form
 * for completions and chats. Formats: https://platform.openai.com/docs/api-reference and vLLM's
 * OpenAI-compatible server. Pure: runs on a worker.
 */
#ifndef EMBER_DAEMON_GATEWAY_OPENAI_H
#define EMBER_DAEMON_GATEWAY_OPENAI_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/mem.h"
#include "ember/v1/step.pb-c.h"

#define API_N_MAX 128
#define API_CHOICES_MAX 4096
#define API_UNITS_MAX 5000000 /* of what a body holds once it is parsed */
#define API_LOGPROBS_MAX 20
#define API_STOPS_MAX 64
#define API_TOKENS_MAX                                                                             \
    1024 /* of logit_bias, allowed_token_ids, bad_words: they go with each step */
#define API_BAD_WORDS_MAX 256
#define API_UNKNOWN_MAX 8

enum api_tool_choice { API_TOOLS_AUTO, API_TOOLS_NONE, API_TOOLS_REQUIRED, API_TOOLS_NAMED };
enum api_kind { API_COMPLETION, API_CHAT, API_TOKENIZE, API_DETOKENIZE };

struct api_prompt {
    const char *text; /* NULL: ids were given; in the request's JSON, or owned as `owned` */
    size_t len;
    char *owned;
    uint32_t *ids;
    size_t n_ids;
};

/* Which of the sampling's numbers the client has set; the others are the model's defaults. */
enum { API_TEMPERATURE = 1, API_TOP_P = 2, API_TOP_K = 4, API_MIN_P = 8, API_REPETITION = 16 };

/* X(NAME, what `spec` is) */
#define API_GRAMMARS(X)                                                                            \
    X(NONE, "nothing")                                                                             \
    X(SCHEMA, "a JSON Schema")                                                                     \
    X(OBJECT, "nothing: any JSON object")                                                          \
    X(REGEX, "a string")                                                                           \
    X(RULES, "a string: EBNF or Lark")                                                             \
    X(CHOICE, "a list of strings")

/* What the text has to keep to. */
struct api_grammar {
    enum api_grammar_kind {
#define X(name, what) API_GRAMMAR_##name,
        API_GRAMMARS(X)
#undef X
    } kind;
    const json_t *spec;     /* borrowed */
    json_t *owned;          /* what `spec` is, when a schema came as text */
    const char *whitespace; /* a pattern, or NULL */
    bool compact;
    const char *or_begins; /* a text that begins so keeps to nothing: a call; or NULL */
    const char *field;     /* that asked for it */
};

struct api_request {
    enum api_kind kind;
    json_t *json; /* owned; what is borrowed below lives in it */
    const char *model;
    struct api_prompt *prompts;
    size_t n_prompts;
    json_t *messages; /* borrowed; of chats */
    json_t *tools;    /* borrowed; NULL: none, an empty list too */
    enum api_tool_choice tool_choice;
    const char *tool_name; /* API_TOOLS_NAMED */
    bool parallel_calls, include_reasoning;
    bool stream, include_usage, continuous_usage, echo;
    bool add_special, add_special_set, skip_special, add_generation_prompt, continue_final;
    bool ignore_eos, include_stop, return_ids, return_strings;
    bool tokens_as_ids;  /* names of tokens in log-probabilities are "token_id:N" */
    int64_t truncate;    /* only so many tokens of a prompt count; -1: what fits; 0: all */
    bool truncate_right; /* its first ones, not its last */
    uint32_t n, max_tokens, min_tokens; /* max_tokens UINT32_MAX: what there is room for */
    int logprobs, prompt_logprobs;      /* how many of the best; -1: none at all */
    Ember__V1__Sampling sampling;       /* arrays owned */
    unsigned set;                       /* API_TEMPERATURE | ... */
    struct api_grammar grammar;
    bool seeded;
    const char *stops[API_STOPS_MAX];
    size_t stop_lens[API_STOPS_MAX], n_stops;
    uint32_t *stop_ids;
    size_t n_stop_ids;
    json_t *bad_words; /* borrowed; sampling.bad_tokens once they are tokenized */
    int64_t priority;
    const char *cache_salt, *user, *template_name, *request_id;
    const char *unknown[API_UNKNOWN_MAX]; /* fields that mean nothing to us */
    size_t n_unknown;
};

struct api_error {
    int status;
    char param[64]; /* the field's name, or empty */
    const char *code;
    struct error err;
};

/*
 * Parses a body. 0, or -EINVAL and *fail. The request keeps nothing of `body`. Prompts of chats and
 * texts are left to be tokenized. api_request_free is idempotent.
 */
int api_parse(enum api_kind kind, const char *body, size_t len, struct api_request *ret,
              struct api_error *fail);
void api_request_free(struct api_request *request);

#endif
