/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/policy.h"

#include <errno.h>
#include <string.h>

#include "base/mem.h"

/* X(word, type, limits, where it goes) */
#define WORDS(X)                                                                                   \
    X("min", INT, "0..1024", p->min = (uint32_t)v.i)                                               \
    X("max", INT, "1..1024", p->max = (uint32_t)v.i)                                               \
    X("standby", INT, "0..256", p->standby = (int)v.i)                                             \
    X("idle", DURATION, "0..24h", p->idle_ns = v.u)

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
        return 0;                                                                                  \
    }
    WORDS(X)
#undef X
    return error_set(err, EINVAL,
                     "per_model: \"%.64s\" is none of min=, max=, standby=, idle=", word);
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
    return read_all(options, NULL, NULL, err);
}

struct policy policy_of(const struct gateway_options *options, const char *model)
{
    struct policy p = {.min = (uint32_t)options->min_instances,
                       .max = (uint32_t)options->max_instances,
                       .standby = -1,
                       .idle_ns = options->idle_release};

    read_all(options, model, &p, NULL);
    p.max = MAX(p.max, p.min);
    return p;
}
