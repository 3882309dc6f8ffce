/* SPDX-License-Identifier: Apache-2.0 */
/* From texts to programs, but for JSON Schema (schema.c). */
#include "model/grammar/grammar.h"

#include <errno.h>
#include <string.h>

#include "model/grammar/internal.h"

static int check_size(size_t len, struct error *err)
{
    if (len > GRAMMAR_SOURCE_MAX)
        return error_set(err, E2BIG, "%zu bytes; at most %u", len, GRAMMAR_SOURCE_MAX);
    return 0;
}

int grammar_from_regex(const char *pattern, size_t len, struct buffer *out, struct error *err)
{
    struct build b = {.err = err};

    int r = check_size(len, err);
    if (r < 0)
        return r;
    r = link_program(&b, regex_node(&b, pattern, len, REGEX_WHOLE, false), out);
    build_free(&b);
    return r;
}

int grammar_from_choice(const char *const *choices, const size_t *lens, size_t n,
                        struct buffer *out, struct error *err)
{
    struct build b = {.err = err};
    struct list all = {0};
    size_t total = 0;

    for (size_t i = 0; i < n; i++) {
        total += lens[i];
        if (!lens[i])
            return list_free(&all), build_free(&b),
                   error_set(err, EINVAL, "choice %zu is the empty text", i);
        if (total > GRAMMAR_SOURCE_MAX)
            break;
        list_add(&b, &all, node_bytes(&b, choices[i], lens[i]));
    }
    int r = check_size(total, err);
    if (r == 0)
        r = link_program(&b, node_alt(&b, all.items, all.n), out);
    list_free(&all);
    build_free(&b);
    return r;
}

int grammar_from_rules(const char *text, size_t len, struct buffer *out, struct error *err)
{
    struct build b = {.err = err};
    int r = check_size(len, err);

    if (r < 0)
        return r;
    struct node *root =
        memmem(text, len, "::=", 3) ? ebnf_root(&b, text, len) : lark_root(&b, text, len);
    r = link_program(&b, root, out);
    build_free(&b);
    return r;
}
