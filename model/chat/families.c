/* SPDX-License-Identifier: Apache-2.0 */
/* Families as data, their names, and how a template gives them away. */
#include <string.h>

#include "model/chat/internal.h"

#define QWEN_XML                                                                                   \
    .body = BODY_XML, .call_open = "<function=", .name_end = ">",                                  \
    .key_open = "<parameter=", .key_end = ">", .value_close = "</parameter>",                      \
    .function_close = "</function>"

static const struct family families[] = {
    [CHAT_TOOLS_HERMES] = {BODY_JSON, .call_open = "<tool_call>", .call_close = "</tool_call>"},
    [CHAT_TOOLS_QWEN3_CODER] = {.section_open = "<tool_call>",
                                .section_close = "</tool_call>",
                                .loose = true,
                                QWEN_XML},
    [CHAT_TOOLS_LLAMA3_JSON] = {BODY_JSON, .call_open = "<|python_tag|>", .bare = true},
    [CHAT_TOOLS_MISTRAL] = {BODY_NAMED, .call_open = "[TOOL_CALLS]", .separator = "[ARGS]",
                            .ends_reasoning = true},
    [CHAT_TOOLS_DEEPSEEK] = {BODY_NAMED, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
                             "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
                             .ends_reasoning = true},
    [CHAT_TOOLS_DEEPSEEK_V32] = {BODY_XML, "<｜DSML｜function_calls>", "</｜DSML｜function_calls>",
                                 .call_open = "<｜DSML｜invoke name=\"", .name_end = "\"",
                                 .key_open = "<｜DSML｜parameter name=\"", .key_end = "\"",
                                 .value_close = "</｜DSML｜parameter>",
                                 .function_close = "</｜DSML｜invoke>"},
    [CHAT_TOOLS_GLM45] = {BODY_XML, .call_open = "<tool_call>", .key_open = "<arg_key>",
                          .key_end = "</arg_key>", .value_open = "<arg_value>",
                          .value_close = "</arg_value>", .function_close = "</tool_call>"},
    [CHAT_TOOLS_KIMI_K2] = {BODY_NAMED, "<|tool_calls_section_begin|>",
                            "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                            "<|tool_call_end|>", "<|tool_call_argument_begin|>",
                            .ends_reasoning = true},
    [CHAT_TOOLS_MINIMAX_M2] = {BODY_XML, "<minimax:tool_call>", "</minimax:tool_call>",
                               .call_open = "<invoke name=\"", .name_end = "\"",
                               .key_open = "<parameter name=\"", .key_end = "\"",
                               .value_close = "</parameter>", .function_close = "</invoke>"},
    [CHAT_TOOLS_SEED_OSS] = {.section_open = "<seed:tool_call>",
                             .section_close = "</seed:tool_call>",
                             QWEN_XML},
    [CHAT_TOOLS_FUNCTIONARY] = {BODY_NAMED, .call_open = "<function=", .call_close = "</function>",
                                .separator = ">"},
    [CHAT_TOOLS_TOOL_CALLS] = {BODY_JSON, .call_open = "<tool_calls>",
                               .call_close = "</tool_calls>"},
    [CHAT_TOOLS_NEMOTRON] = {BODY_JSON, .call_open = "<TOOLCALL>", .call_close = "</TOOLCALL>"},
    [CHAT_TOOLS_COHERE] = {BODY_JSON, .call_open = "<|START_ACTION|>",
                           .call_close = "<|END_ACTION|>", .ends_reasoning = true},
    [CHAT_TOOLS_HARMONY] = {BODY_HARMONY},
};

const struct family *chat_family(enum chat_tools tools)
{
    return tools == CHAT_TOOLS_NONE ? NULL : &families[tools];
}

const struct thought *chat_thought(enum chat_reasoning reasoning)
{
    static const struct thought thoughts[] = {{NULL, NULL},
#define X(id, names, open, close) {open, close},
                                              CHAT_REASONINGS(X)
#undef X
    };
    return &thoughts[reasoning];
}

const char *chat_calls_begin(struct chat_form form)
{
    const struct family *f = chat_family(form.tools);

    if (!f || f->bare)
        return NULL;
    return f->section_open ? f->section_open : f->call_open;
}

bool chat_is_harmony(struct chat_form form)
{
    return form.reasoning == CHAT_REASONING_HARMONY || form.tools == CHAT_TOOLS_HARMONY;
}

/* ---- what a template shows ---- */

static bool has(const char *text, size_t len, const char *word)
{
    return memmem(text, len, word, strlen(word)) != NULL;
}

struct chat_form chat_detect(const char *text, size_t len)
{
    /* The first row whose words are all there; what is special comes before what it contains. */
    static const struct {
        enum chat_tools tools;
        const char *word, *also;
    } tools[] = {
        {CHAT_TOOLS_HARMONY, "<|channel|>", "<|message|>"},
        {CHAT_TOOLS_DEEPSEEK_V32, "｜DSML｜", ""},
        {CHAT_TOOLS_DEEPSEEK, "<｜tool▁call▁begin｜>", ""},
        {CHAT_TOOLS_KIMI_K2, "<|tool_call_argument_begin|>", ""},
        {CHAT_TOOLS_GLM45, "<arg_key>", "<tool_call>"},
        {CHAT_TOOLS_SEED_OSS, "<seed:tool_call>", ""},
        {CHAT_TOOLS_MINIMAX_M2, "<minimax:tool_call>", "<invoke name="},
        {CHAT_TOOLS_MINIMAX_M2, "minimax:tool_call", "<invoke name="},
        {CHAT_TOOLS_QWEN3_CODER, "<function=", "<parameter="},
        {CHAT_TOOLS_MISTRAL, "[TOOL_CALLS]", ""},
        {CHAT_TOOLS_COHERE, "<|START_ACTION|>", ""},
        {CHAT_TOOLS_NEMOTRON, "<TOOLCALL>", ""},
        {CHAT_TOOLS_FUNCTIONARY, "<function=", "</function>"},
        {CHAT_TOOLS_TOOL_CALLS, "<tool_calls>", ""},
        {CHAT_TOOLS_HERMES, "<tool_call>", ""},
        {CHAT_TOOLS_LLAMA3_JSON, "<|python_tag|>", ""},
        {CHAT_TOOLS_LLAMA3_JSON, "\"parameters\": ", "ipython"},
    };
    static const struct {
        enum chat_reasoning reasoning;
        const char *word;
    } reasonings[] = {
        {CHAT_REASONING_HARMONY, "<|channel|>analysis"},
        {CHAT_REASONING_SEED, "<seed:think>"},
        {CHAT_REASONING_SEED, "seed:think"},
        {CHAT_REASONING_MM_THINK, "<mm:think>"},
        {CHAT_REASONING_MISTRAL, "[THINK]"},
        {CHAT_REASONING_COHERE, "<|START_THINKING|>"},
        {CHAT_REASONING_THINK, "<think>"},
        {CHAT_REASONING_THINK, "</think>"},
    };
    struct chat_form form = {0};

    for (size_t i = 0; i < ARRAY_LEN(tools) && !form.tools; i++)
        if (has(text, len, tools[i].word) && has(text, len, tools[i].also))
            form.tools = tools[i].tools;
    for (size_t i = 0; i < ARRAY_LEN(reasonings) && !form.reasoning; i++)
        if (has(text, len, reasonings[i].word))
            form.reasoning = reasonings[i].reasoning;
    if (form.tools == CHAT_TOOLS_HARMONY)
        form.reasoning = CHAT_REASONING_HARMONY;
    return form;
}

/* ---- names ---- */

static const char *const tool_names[] = {"none",
#define X(id, names) names,
                                         CHAT_TOOLS(X)
#undef X
};
static const char *const reasoning_names[] = {"none",
#define X(id, names, open, close) names,
                                              CHAT_REASONINGS(X)
#undef X
};

/* The row that has the name among its words, or -1. */
static int named(const char *const *rows, size_t n, const char *name)
{
    size_t len = strlen(name);

    for (size_t i = 0; i < n && len; i++)
        for (const char *at = rows[i]; at; at = strchr(at, ' ')) {
            at += *at == ' ';
            if (!strncmp(at, name, len) && (!at[len] || at[len] == ' '))
                return (int)i;
        }
    return -1;
}

bool chat_tools_named(const char *name, enum chat_tools *ret)
{
    int i = named(tool_names, ARRAY_LEN(tool_names), name);

    if (i >= 0)
        *ret = (enum chat_tools)i;
    return i >= 0;
}

bool chat_reasoning_named(const char *name, enum chat_reasoning *ret)
{
    int i = named(reasoning_names, ARRAY_LEN(reasoning_names), name);

    if (i >= 0)
        *ret = (enum chat_reasoning)i;
    return i >= 0;
}

/* The first of a row's names. */
static const char *first_word(const char *names, char buf[CHAT_NAME_SIZE])
{
    size_t n = MIN(strcspn(names, " "), (size_t)CHAT_NAME_SIZE - 1);

    memcpy(buf, names, n);
    buf[n] = 0;
    return buf;
}

const char *chat_tools_name(enum chat_tools tools, char buf[CHAT_NAME_SIZE])
{
    return first_word(tool_names[tools], buf);
}

const char *chat_reasoning_name(enum chat_reasoning reasoning, char buf[CHAT_NAME_SIZE])
{
    return first_word(reasoning_names[reasoning], buf);
}

/* ---- special tokens ---- */

bool chat_wants(struct chat_form form, const char *token, size_t len)
{
    static const char *const harmony[] = {"<|start|>",  "<|channel|>",   "<|message|>", "<|end|>",
                                          "<|return|>", "<|constrain|>", "<|call|>"};
    const struct family *f = chat_family(form.tools);
    const struct thought *thought = chat_thought(form.reasoning);
    const char *words[16] = {thought->open, thought->close};
    size_t n = 2;

    if (!len)
        return false;
    for (size_t i = 0; i < ARRAY_LEN(harmony); i++)
        if (chat_is_harmony(form) && strlen(harmony[i]) == len && !memcmp(harmony[i], token, len))
            return true;
    if (f) {
        const char *more[] = {f->section_open,
                              f->section_close,
                              f->call_open,
                              f->call_close,
                              f->separator,
                              f->key_open,
                              f->key_end,
                              f->value_open,
                              f->value_close,
                              f->function_close,
                              form.tools == CHAT_TOOLS_MISTRAL ? "[CALL_ID]" : NULL};
        memcpy(words + n, more, sizeof more);
        n += ARRAY_LEN(more);
    }
    for (size_t i = 0; i < n; i++)
        if (words[i] && memmem(words[i], strlen(words[i]), token, len))
            return true;
    return false;
}
