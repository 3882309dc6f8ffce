/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/policy.h"

#include <errno.h>
#include <string.h>

#include "base/mem.h"
#include "model/chat/chat.h"

/* A parser's name; takes it. */
static int set_tools(int *to, char *name, struct error *err)
{
    _cleanup_free_ char *word = name; /* ours now */
    enum chat_tools tools = CHAT_TOOLS_NONE;

    if (strcmp(word, "auto") && !chat_tools_named(word, &tools))
        return error_set(err, EINVAL,
                         "\"%.64s\" is no parser of tool calls (docs/gateway.md has them)", name);
    *to = strcmp(word, "auto") ? (int)tools : -1;
    return 0;
}

static int set_reasoning(int *to, char *name, struct error *err)
{
    _cleanup_free_ char *word = name; /* ours now */
    enum chat_reasoning reasoning = CHAT_REASONING_NONE;

    if (strcmp(word, "auto") && !chat_reasoning_named(word, &reasoning))
        return error_set(err, EINVAL,
                         "\"%.64s\" is no parser of reasoning (docs/gateway.md has them)", name);
    *to = strcmp(word, "auto") ? (int)reasoning : -1;
    return 0;
}

/* X(word, type, limits, where it goes) */
#define WORDS(X)                                                                                   \
    X("min", INT, "0..1024", p->min = (uint32_t)v.i)                                               \
    X("max", INT, "1..1024", p->max = (uint32_t)v.i)                                               \
    X("standby", INT, "0..256", p->standby = (int)v.i)                                             \
    X("idle", DURATION, "0..24h", p->idle_ns = v.u)                                                \
    X("tool-parser", STRING, NULL, r = set_tools(&p->tools, v.s, err))                             \
    X("reasoning-parser", STRING, NULL, r = set_reasoning(&p->reasoning, v.s, err))

static int take_word(const char *word, struct policy *p, struct error *err)
{
    const char *equals = strchr(word, '=');
    union value v = {0};

#define X(name, type, limits, store)                                                               \
    if (equals && !strncmp(word, name "=", strlen(name) + 1)) {                                    \
        int r = value_parse(VALUE_##type, limits, equals + 1, &v, err);                            \
        if (r < 0)                                                                                 \
            return error_prefix(err, "per_model: %s", name);                                       \
        store;                                                                                     \
        return r < 0 ? error_prefix(err, "per_model") : 0;                                         \
    }
    WORDS(X)
#undef X
    return error_set(err, EINVAL,
                     "per_model: \"%.64s\" is none of min=, max=, standby=, idle=, "
                     "tool-parser=, reasoning-parser=",
                     word);
}

/* Reads all of per_model; what it says of `model` (NULL: nobody) goes to *p. */
static int read_all(const struct gateway_options *options, const char *model, struct policy *p,
                    struct error *err)
{
    _cleanup_free_ char *text = x_strdup(options->per_model);
    char *save_model = NULL, *save_word = NULL;

    for (char *one = strtok_r(text, ",", &save_model); one;
         one = strtok_r(NULL, ",", &save_model)) {
        char *name = strtok_r(one, " \t", &save_word), *word;
        struct policy unused, *to = name && model && !strcmp(name, model) ? p : &unused;
        if (!name)
            continue;
        if (strchr(name, '='))
            return error_set(err, EINVAL, "per_model: \"%.64s\": a model's name comes first", name);
        while ((word = strtok_r(NULL, " \t", &save_word))) {
            int r = take_word(word, to, err);
            if (r < 0)
                return r;
        }
    }
    return 0;
}

int policy_check(const struct gateway_options *options, struct error *err)
{
    struct policy p = {0};
    int r = set_tools(&p.tools, x_strdup(options->tool_parser), err);

    if (r < 0)
        return error_prefix(err, "tool_parser");
    r = set_reasoning(&p.reasoning, x_strdup(options->reasoning_parser), err);
    if (r < 0)
        return error_prefix(err, "reasoning_parser");
    return read_all(options, NULL, NULL, err);
}

struct policy policy_of(const struct gateway_options *options, const char *model)
{
    struct policy p = {.min = (uint32_t)options->min_instances,
                       .max = (uint32_t)options->max_instances,
                       .standby = -1,
                       .idle_ns = options->idle_release,
                       .tools = -1,
                       .reasoning = -1};

    set_tools(&p.tools, x_strdup(options->tool_parser), NULL);
    set_reasoning(&p.reasoning, x_strdup(options->reasoning_parser), NULL);
    read_all(options, model, &p, NULL);
    p.max = MAX(p.max, p.min);
    return p;
}
