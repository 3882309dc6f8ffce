/* SPDX-License-Identifier: Apache-2.0 */
#include "model/grammar/rules.h"

#include <errno.h>
#include <string.h>

void rules_wrong(struct rules *x, int errnum, const char *what)
{
    unsigned line, column;

    text_place(x->s, MIN(x->at, x->n), &line, &column);
    build_fail(x->b, errnum, "the grammar at line %u column %u: %s", line, column, what);
}

/* Behind a text that is not closed `at` is beyond the end. */
static bool stands(const struct rules *x, const char *text)
{
    size_t n = strlen(text);

    return x->at <= x->n && x->n - x->at >= n && !memcmp(x->s + x->at, text, n);
}

void rules_skip(struct rules *x)
{
    while (x->at < x->n) {
        char c = x->s[x->at];
        if (stands(x, x->comment))
            while (x->at < x->n && x->s[x->at] != '\n')
                x->at++;
        else if (c == ' ' || c == '\t' || c == '\r' || (c == '\n' && x->lines))
            x->at++;
        else
            return;
    }
}

bool rules_take(struct rules *x, const char *text)
{
    rules_skip(x);
    if (!stands(x, text))
        return false;
    x->at += strlen(text);
    return true;
}

bool rules_number(struct rules *x, uint32_t *ret)
{
    uint64_t v = 0;

    rules_skip(x);
    size_t start = x->at;
    for (; x->at < x->n && x->s[x->at] >= '0' && x->s[x->at] <= '9'; x->at++)
        v = MIN(v * 10 + (unsigned)(x->s[x->at] - '0'), 1000000000u);
    *ret = (uint32_t)v;
    return x->at > start;
}

uint32_t rules_named(struct rules *x, const char *name, size_t len)
{
    build_work(x->b, x->b->n_rules);
    uint32_t rule = build_find_rule(x->b, name, len);
    return rule == NO_RULE ? build_rule(x->b, name, len) : rule;
}

/* A character by its code. */
static uint32_t code(struct rules *x, unsigned digits)
{
    static const char all[] = "0123456789abcdefABCDEF";
    uint32_t v = 0;

    for (unsigned i = 0; i < digits; i++, x->at++) {
        const char *found = x->at < x->n && x->s[x->at] ? strchr(all, x->s[x->at]) : NULL;
        if (!found) {
            rules_wrong(x, EINVAL, "expected a hexadecimal digit");
            return 0;
        }
        v = v << 4 | (uint32_t)(found - all < 16 ? found - all : found - all - 6);
    }
    if (v > CHAR_MAX_CODE || (v >= 0xD800 && v < 0xE000))
        rules_wrong(x, EINVAL, "no such character");
    return v;
}

bool rules_escape(struct rules *x, uint32_t c, uint32_t *ret)
{
    static const char letters[] = "n\nr\rt\tf\fv\vb\ba\a";

    for (size_t i = 0; i + 1 < sizeof letters; i += 2)
        if (c == (uint8_t)letters[i]) {
            *ret = (uint8_t)letters[i + 1];
            return true;
        }
    if (c != 'x' && c != 'u' && c != 'U')
        return false;
    *ret = code(x, c == 'x' ? 2 : c == 'u' ? 4 : 8);
    return true;
}

bool rules_repeat(struct rules *x, struct node **node)
{
    if (rules_take(x, "*"))
        *node = node_repeat(x->b, *node, 0, MANY);
    else if (rules_take(x, "+"))
        *node = node_repeat(x->b, *node, 1, MANY);
    else if (rules_take(x, "?"))
        *node = node_repeat(x->b, *node, 0, 1);
    else
        return false;
    return true;
}
