/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From what a chat model writes to a message: content, reasoning and tool calls, while it streams.
 *
 * A family (enum chat_tools) is how calls are written, a reasoning form where thinking begins and
 * ends. Both are found from the model's chat template (chat_detect), or named as vLLM's options
 * name them. The parser takes text in pieces of any size and gives the same message for all of
 * them:
 *   - a call is whole when its arguments are one JSON object, as written or made from the family's
 *     key and value form with the types of the tool's schema; a missing end marker does not spoil
 * it;
 *   - what begins as a call and turns out not to be one is content, as it was written;
 *   - markers appear in no other text. White space next to reasoning and calls is dropped.
 *
 * `live` sends arguments as they come, which cannot be taken back: a call that breaks off is then
 * ended by call_end(whole = false), and its text is content all the same. Without it calls are sent
 * when they are whole.
 *
 * Forms: the models' own chat templates, and for harmony
 * https://cookbook.openai.com/articles/openai-harmony.
 */
#ifndef EMBER_MODEL_CHAT_CHAT_H
#define EMBER_MODEL_CHAT_CHAT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/mem.h"

/* X(family, its names as --tool-parser takes them, separated by blanks) */
#define CHAT_TOOLS(X)                                                                              \
    X(HERMES, "hermes qwen25 longcat")                                                             \
    X(QWEN3_CODER, "qwen3_coder qwen3_xml nemotron_v3 step3p5")                                    \
    X(LLAMA3_JSON, "llama3_json llama4_json")                                                      \
    X(MISTRAL, "mistral")                                                                          \
    X(DEEPSEEK, "deepseek_v3 deepseek_v31")                                                        \
    X(DEEPSEEK_V32, "deepseek_v32")                                                                \
    X(GLM45, "glm45 glm47")                                                                        \
    X(KIMI_K2, "kimi_k2")                                                                          \
    X(MINIMAX_M2, "minimax_m2")                                                                    \
    X(SEED_OSS, "seed_oss")                                                                        \
    X(FUNCTIONARY, "functionary functionary_v31")                                                  \
    X(TOOL_CALLS, "jamba apriel hunyuan_a13b")                                                     \
    X(NEMOTRON, "nemotron")                                                                        \
    X(COHERE, "cohere command")                                                                    \
    X(HARMONY, "openai gpt_oss")

enum chat_tools {
    CHAT_TOOLS_NONE,
#define X(id, names) CHAT_TOOLS_##id,
    CHAT_TOOLS(X)
#undef X
};

/* X(form, its names as --reasoning-parser takes them, what opens it, what closes it) */
#define CHAT_REASONINGS(X)                                                                         \
    X(THINK, "think qwen3 glm45 kimi_k2 minimax_m2 deepseek_v3 step3 nemotron_v3", "<think>",      \
      "</think>")                                                                                  \
    X(THINK_OPEN, "deepseek_r1 minimax_m2_append_think", "<think>", "</think>")                    \
    X(SEED, "seed_oss", "<seed:think>", "</seed:think>")                                           \
    X(MM_THINK, "minimax_m3", "<mm:think>", "</mm:think>")                                         \
    X(MISTRAL, "mistral", "[THINK]", "[/THINK]")                                                   \
    X(COHERE, "cohere command", "<|START_THINKING|>", "<|END_THINKING|>")                          \
    X(HARMONY, "openai openai_gptoss gpt_oss", "", "")

enum chat_reasoning {
    CHAT_REASONING_NONE,
#define X(id, names, open, close) CHAT_REASONING_##id,
    CHAT_REASONINGS(X)
#undef X
};

struct chat_form {
    enum chat_tools tools;
    enum chat_reasoning reasoning;
};

/* What the text of a chat template shows; both NONE when it shows nothing. */
struct chat_form chat_detect(const char *template_text, size_t len);
/* By a name of the tables; "none" is NONE. False: no such name. */
bool chat_tools_named(const char *name, enum chat_tools *ret);
bool chat_reasoning_named(const char *name, enum chat_reasoning *ret);
/* The first of its names, or "none": into buf, returned. */
#define CHAT_NAME_SIZE 32
const char *chat_tools_name(enum chat_tools tools, char buf[CHAT_NAME_SIZE]);
const char *chat_reasoning_name(enum chat_reasoning reasoning, char buf[CHAT_NAME_SIZE]);
/* Whether the text of a special token means something to the parser: others may be left out. */
bool chat_wants(struct chat_form form, const char *token, size_t len);

/*
 * What has to follow a prompt so that the answer itself begins: the end of a thought that the
 * prompt has opened, harmony's header. NULL: nothing.
 */
const char *chat_answer_begins(struct chat_form form, const char *prompt, size_t len);
/* The marker that a text with calls begins with; NULL: no text does, or one without a marker may.
 */
const char *chat_calls_begin(struct chat_form form);

enum chat_channel { CHAT_CONTENT, CHAT_REASONING };

/* What the parser says; texts are whole UTF-8 when what it was given was, and never empty. */
struct chat_sink {
    void *ctx;
    void (*text)(void *ctx, enum chat_channel channel, const char *text, size_t len);
    /* A call begins; indices count from 0. Strings live for the call only. */
    void (*call)(void *ctx, unsigned index, const char *id, const char *name);
    void (*arguments)(void *ctx, unsigned index, const char *text, size_t len);
    void (*call_end)(void *ctx, unsigned index, bool whole);
};

/* How the output was constrained by us: then it has none of the family's markers. */
enum chat_forced {
    CHAT_FREE,
    CHAT_FORCED_ARGUMENTS, /* one JSON object: the arguments of `function` */
    CHAT_FORCED_CALLS      /* a JSON list of {"name", "parameters"} */
};

struct chat_options {
    struct chat_form form;
    const json_t *tools; /* the request's, borrowed for the parser's life; NULL: none */
    const char *prompt;  /* the prompt that was rendered: its end may have opened the reasoning */
    size_t prompt_len;
    enum chat_forced forced;
    const char *function; /* borrowed; CHAT_FORCED_ARGUMENTS */
    bool live;
    bool one_call;    /* parallel_tool_calls: false */
    uint64_t id_seed; /* ids of calls are made from it; different for each answer */
};

struct chat_parser;
/* Never fails but for memory, which aborts: outputs are bounded by the tokens of a request. */
struct chat_parser *chat_parser_new(const struct chat_options *options,
                                    const struct chat_sink *sink);
void chat_parser_free(struct chat_parser *p);
DEFINE_CLEANUP(struct chat_parser *, chat_parser_free)
void chat_parser_push(struct chat_parser *p, const char *text, size_t len);
/* The end of the text: what was held back goes out. Nothing may be pushed then. */
void chat_parser_finish(struct chat_parser *p);
/* How many whole calls have come. */
unsigned chat_parser_calls(const struct chat_parser *p);
/* one_call, and it has come: what follows is ignored, the output may be ended. */
bool chat_parser_done(const struct chat_parser *p);

#endif
