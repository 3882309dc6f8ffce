/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Grammars of the form `name ::= ...`: GBNF (llama.cpp) and xgrammar's EBNF.
 *
 *   "text" 'text'   with \n \r \t \" \' \\ \xHH \uHHHH \UHHHHHHHH
 *   [a-z] [^a-z]    one character;  . any character
 *   name  ( ... )   * + ? {m} {m,} {m,n}   |   # comment
 */
#include <errno.h>
#include <string.h>

#include "model/grammar/internal.h"

struct ebnf {
    struct build *b;
    const char *s;
    size_t n, at;
    unsigned depth;
};

static struct node *alternatives(struct ebnf *x);

static void wrong(struct ebnf *x, int errnum, const char *what)
{
    unsigned line, column;

    text_place(x->s, MIN(x->at, x->n), &line, &column);
    build_fail(x->b, errnum, "the grammar at line %u column %u: %s", line, column, what);
}

static void skip(struct ebnf *x)
{
    while (x->at < x->n) {
        if (x->s[x->at] == '#')
            while (x->at < x->n && x->s[x->at] != '\n')
                x->at++;
        else if (strchr(" \t\r\n", x->s[x->at]) && x->s[x->at])
            x->at++;
        else
            return;
    }
}

static bool take(struct ebnf *x, const char *text)
{
    size_t n = strlen(text);

    skip(x);
    if (x->n - x->at < n || memcmp(x->s + x->at, text, n))
        return false;
    x->at += n;
    return true;
}

static bool is_name(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
}

static size_t name(struct ebnf *x)
{
    size_t n = 0;

    skip(x);
    if (x->at < x->n && x->s[x->at] == '.') /* any character */
        return 0;
    while (x->at + n < x->n && is_name(x->s[x->at + n]))
        n++;
    return n;
}

/* Whether a definition begins here: that is where the rule before it ends. */
static bool at_definition(struct ebnf *x)
{
    size_t start = x->at, n = name(x);
    bool found = false;

    if (n) {
        x->at += n;
        found = take(x, "::=");
    }
    x->at = start;
    return found;
}

static uint32_t hex(struct ebnf *x, unsigned digits)
{
    uint32_t v = 0;

    for (unsigned i = 0; i < digits; i++, x->at++) {
        const char *all = "0123456789abcdefABCDEF",
                   *found = x->at < x->n && x->s[x->at] ? strchr(all, x->s[x->at]) : NULL;
        if (!found) {
            wrong(x, EINVAL, "expected a hexadecimal digit");
            return 0;
        }
        v = v << 4 | (uint32_t)(found - all < 16 ? found - all : found - all - 6);
    }
    return v;
}

static uint32_t next_char(struct ebnf *x)
{
    static const char letters[] = "n\nr\rt\tf\fv\vb\ba\a";
    uint32_t c = 0;
    size_t len = text_char(x->s + x->at, x->n - x->at, &c);

    if (!len)
        wrong(x, EINVAL, "not UTF-8, or the end of the text");
    x->at += len;
    if (c != '\\' || !len)
        return c;
    len = text_char(x->s + x->at, x->n - x->at, &c);
    x->at += len;
    if (c == 'x')
        return hex(x, 2);
    if (c == 'u' || c == 'U') {
        uint32_t code = hex(x, c == 'u' ? 4 : 8);
        if (code > CHAR_MAX_CODE || (code >= 0xD800 && code < 0xE000))
            wrong(x, EINVAL, "no such character");
        return code;
    }
    for (size_t i = 0; i + 1 < sizeof letters; i += 2)
        if (c == (uint8_t)letters[i])
            return (uint8_t)letters[i + 1];
    if (!len || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'))
        wrong(x, EINVAL, "an unknown escape");
    return c;
}

static struct node *quoted(struct ebnf *x, char quote)
{
    struct list list = {0};

    while (x->at < x->n && x->s[x->at] != quote && !x->b->failed) {
        uint32_t c = next_char(x);
        list_add(x->b, &list, node_chars(x->b, &(struct range){c, c}, 1, false));
    }
    if (x->at == x->n)
        wrong(x, EINVAL, "a text without its closing quote");
    x->at++;
    struct node *node = node_seq(x->b, list.items, list.n);
    list_free(&list);
    return node;
}

static struct node *class(struct ebnf *x)
{
    struct range r[512], all[513];
    size_t n = 0, out = 0;
    uint32_t from = 0;
    bool inverted = x->at < x->n && x->s[x->at] == '^';

    x->at += inverted;
    while (x->at < x->n && x->s[x->at] != ']' && !x->b->failed) {
        uint32_t lo = next_char(x), hi = lo;
        if (x->at + 1 < x->n && x->s[x->at] == '-' && x->s[x->at + 1] != ']') {
            x->at++;
            hi = next_char(x);
        }
        if (hi < lo)
            wrong(x, EINVAL, "a range whose end comes before its beginning");
        if (n == ARRAY_LEN(r))
            n = ranges_normalize(r, n);
        if (n == ARRAY_LEN(r))
            wrong(x, E2BIG, "too many characters in a class");
        else
            r[n++] = (struct range){lo, hi};
    }
    if (x->at == x->n)
        wrong(x, EINVAL, "a class without its ]");
    x->at++;
    if (!inverted)
        return node_chars(x->b, r, n, false);
    n = ranges_normalize(r, n);
    for (size_t i = 0; i < n; i++) {
        if (r[i].lo > from)
            all[out++] = (struct range){from, r[i].lo - 1};
        from = r[i].hi + 1;
    }
    if (from <= CHAR_MAX_CODE)
        all[out++] = (struct range){from, CHAR_MAX_CODE};
    return node_chars(x->b, all, out, false);
}

static struct node *reference(struct ebnf *x)
{
    size_t n = name(x);
    const char *s = x->s + x->at;

    if (!n) {
        wrong(x, EINVAL, "expected a text, a class, a name or a group");
        return node_none(x->b);
    }
    build_work(x->b, x->b->n_rules);
    uint32_t rule = build_find_rule(x->b, s, n);
    if (rule == NO_RULE)
        rule = build_rule(x->b, s, n);
    x->at += n;
    return node_rule(x->b, rule);
}

static struct node *primary(struct ebnf *x)
{
    if (take(x, "(=") || take(x, "TagDispatch("))
        wrong(x, ENOTSUP, "look-ahead and tags are not supported");
    if (take(x, "\""))
        return quoted(x, '"');
    if (take(x, "'"))
        return quoted(x, '\'');
    if (take(x, "["))
        return class(x);
    if (take(x, "."))
        return any_char(x->b, false);
    if (!take(x, "("))
        return reference(x);
    struct node *inner = alternatives(x);
    if (!take(x, ")"))
        wrong(x, EINVAL, "a group without its )");
    return inner;
}

static bool number(struct ebnf *x, uint32_t *ret)
{
    uint64_t v = 0;

    skip(x);
    size_t start = x->at;
    for (; x->at < x->n && x->s[x->at] >= '0' && x->s[x->at] <= '9'; x->at++)
        v = MIN(v * 10 + (unsigned)(x->s[x->at] - '0'), 1000000000u);
    *ret = (uint32_t)v;
    return x->at > start;
}

static struct node *braces(struct ebnf *x, struct node *node)
{
    uint32_t min = 0, max;
    bool some = number(x, &min);

    max = min;
    if (take(x, ",") && !number(x, &max))
        max = MANY;
    else if (!some && max == min && !max)
        wrong(x, EINVAL, "expected a number");
    if (!take(x, "}"))
        wrong(x, EINVAL, "a repetition without its }");
    if (max < min)
        wrong(x, EINVAL, "a repetition whose limits are the wrong way round");
    return node_repeat(x->b, node, min, MAX(max, min));
}

static struct node *item(struct ebnf *x)
{
    struct node *node = primary(x);

    while (!x->b->failed) {
        if (take(x, "*"))
            node = node_repeat(x->b, node, 0, MANY);
        else if (take(x, "+"))
            node = node_repeat(x->b, node, 1, MANY);
        else if (take(x, "?"))
            node = node_repeat(x->b, node, 0, 1);
        else if (take(x, "{"))
            node = braces(x, node);
        else
            break;
    }
    return node;
}

static struct node *sequence(struct ebnf *x)
{
    struct list list = {0};

    for (skip(x); x->at < x->n && !x->b->failed && !strchr("|)", x->s[x->at]) && !at_definition(x);
         skip(x))
        list_add(x->b, &list, item(x));
    struct node *node = node_seq(x->b, list.items, list.n);
    list_free(&list);
    return node;
}

static struct node *alternatives(struct ebnf *x)
{
    struct list list = {0};

    if (++x->depth > NESTING_MAX)
        wrong(x, E2BIG, "nested too deeply");
    do
        list_add(x->b, &list, sequence(x));
    while (take(x, "|") && !x->b->failed);
    x->depth--;
    struct node *node = node_alt(x->b, list.items, list.n);
    list_free(&list);
    return node;
}

static void definition(struct ebnf *x)
{
    size_t n = name(x);
    const char *s = x->s + x->at;

    if (!n || !at_definition(x)) {
        wrong(x, EINVAL, "expected `name ::= ...`");
        return;
    }
    build_work(x->b, x->b->n_rules);
    uint32_t rule = build_find_rule(x->b, s, n);
    if (rule == NO_RULE)
        rule = build_rule(x->b, s, n);
    if (!x->b->failed && x->b->rules[rule].node)
        wrong(x, EINVAL, "a rule that is defined already");
    x->at += n;
    take(x, "::=");
    build_define(x->b, rule, alternatives(x));
}

struct node *ebnf_root(struct build *b, const char *text, size_t len)
{
    struct ebnf x = {.b = b, .s = text, .n = len};

    for (skip(&x); x.at < x.n && !b->failed; skip(&x))
        definition(&x);
    uint32_t root = b->failed ? NO_RULE : build_find_rule(b, "root", 4);
    if (root == NO_RULE || !b->rules[root].node)
        build_fail(b, EINVAL, "the grammar has no rule \"root\"");
    return node_rule(b, root);
}
