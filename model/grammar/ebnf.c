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

#include "model/grammar/rules.h"

static struct node *alternatives(struct rules *x);

static bool is_name(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
}

static size_t name(struct rules *x)
{
    size_t n = 0;

    rules_skip(x);
    if (x->at < x->n && x->s[x->at] == '.') /* any character */
        return 0;
    while (x->at + n < x->n && is_name(x->s[x->at + n]))
        n++;
    return n;
}

/* Whether a definition begins here: that is where the rule before it ends. */
static bool at_definition(struct rules *x)
{
    size_t start = x->at, n = name(x);
    bool found = false;

    if (n) {
        x->at += n;
        found = rules_take(x, "::=");
    }
    x->at = start;
    return found;
}

static uint32_t next_char(struct rules *x)
{
    uint32_t c = 0;
    size_t len = text_char(x->s + x->at, x->n - x->at, &c);

    if (!len)
        rules_wrong(x, EINVAL, "not UTF-8, or the end of the text");
    x->at += len;
    if (c != '\\' || !len)
        return c;
    len = text_char(x->s + x->at, x->n - x->at, &c);
    x->at += len;
    if (rules_escape(x, c, &c))
        return c;
    if (!len || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'))
        rules_wrong(x, EINVAL, "an unknown escape");
    return c;
}

static struct node *quoted(struct rules *x, char quote)
{
    struct list list = {0};

    while (x->at < x->n && x->s[x->at] != quote && !x->b->failed) {
        uint32_t c = next_char(x);
        list_add(x->b, &list, node_chars(x->b, &(struct range){c, c}, 1, false));
    }
    if (x->at == x->n)
        rules_wrong(x, EINVAL, "a text without its closing quote");
    x->at++;
    struct node *node = node_seq(x->b, list.items, list.n);
    list_free(&list);
    return node;
}

static struct node *class(struct rules *x)
{
    struct range r[CLASS_MAX], all[CLASS_MAX + 1];
    size_t n = 0;
    bool inverted = x->at < x->n && x->s[x->at] == '^';

    x->at += inverted;
    while (x->at < x->n && x->s[x->at] != ']' && !x->b->failed) {
        uint32_t lo = next_char(x), hi = lo;
        if (x->at + 1 < x->n && x->s[x->at] == '-' && x->s[x->at + 1] != ']') {
            x->at++;
            hi = next_char(x);
        }
        if (hi < lo)
            rules_wrong(x, EINVAL, "a range whose end comes before its beginning");
        if (n == ARRAY_LEN(r))
            n = ranges_normalize(r, n);
        if (n == ARRAY_LEN(r))
            rules_wrong(x, E2BIG, "too many characters in a class");
        else
            r[n++] = (struct range){lo, hi};
    }
    if (x->at == x->n)
        rules_wrong(x, EINVAL, "a class without its ]");
    x->at++;
    if (!inverted)
        return node_chars(x->b, r, n, false);
    n = ranges_normalize(r, n);
    n = ranges_invert(r, n, all);
    return node_chars(x->b, all, n, false);
}

static struct node *reference(struct rules *x)
{
    size_t n = name(x);
    const char *s = x->s + x->at;

    if (!n) {
        rules_wrong(x, EINVAL, "expected a text, a class, a name or a group");
        return node_none(x->b);
    }
    x->at += n;
    return node_rule(x->b, rules_named(x, s, n));
}

static struct node *primary(struct rules *x)
{
    if (rules_take(x, "(=") || rules_take(x, "TagDispatch("))
        rules_wrong(x, ENOTSUP, "look-ahead and tags are not supported");
    if (rules_take(x, "\""))
        return quoted(x, '"');
    if (rules_take(x, "'"))
        return quoted(x, '\'');
    if (rules_take(x, "["))
        return class(x);
    if (rules_take(x, "."))
        return any_char(x->b, false);
    if (!rules_take(x, "("))
        return reference(x);
    struct node *inner = alternatives(x);
    if (!rules_take(x, ")"))
        rules_wrong(x, EINVAL, "a group without its )");
    return inner;
}

static struct node *braces(struct rules *x, struct node *node)
{
    uint32_t min = 0, max;
    bool some = rules_number(x, &min);

    max = min;
    if (rules_take(x, ",") && !rules_number(x, &max))
        max = MANY;
    else if (!some && max == min && !max)
        rules_wrong(x, EINVAL, "expected a number");
    if (!rules_take(x, "}"))
        rules_wrong(x, EINVAL, "a repetition without its }");
    if (max < min)
        rules_wrong(x, EINVAL, "a repetition whose limits are the wrong way round");
    return node_repeat(x->b, node, min, MAX(max, min));
}

static struct node *item(struct rules *x)
{
    struct node *node = primary(x);

    while (!x->b->failed) {
        if (rules_take(x, "{"))
            node = braces(x, node);
        else if (!rules_repeat(x, &node))
            break;
    }
    return node;
}

static struct node *sequence(struct rules *x)
{
    struct list list = {0};

    for (rules_skip(x);
         x->at < x->n && !x->b->failed && !strchr("|)", x->s[x->at]) && !at_definition(x);
         rules_skip(x))
        list_add(x->b, &list, item(x));
    struct node *node = node_seq(x->b, list.items, list.n);
    list_free(&list);
    return node;
}

static struct node *alternatives(struct rules *x)
{
    struct list list = {0};

    if (++x->nesting > NESTING_MAX)
        rules_wrong(x, E2BIG, "nested too deeply");
    do
        list_add(x->b, &list, sequence(x));
    while (rules_take(x, "|") && !x->b->failed);
    x->nesting--;
    struct node *node = node_alt(x->b, list.items, list.n);
    list_free(&list);
    return node;
}

static void definition(struct rules *x)
{
    size_t n = name(x);
    const char *s = x->s + x->at;

    if (!n || !at_definition(x)) {
        rules_wrong(x, EINVAL, "expected `name ::= ...`");
        return;
    }
    uint32_t rule = rules_named(x, s, n);
    if (!x->b->failed && x->b->rules[rule].node)
        rules_wrong(x, EINVAL, "a rule that is defined already");
    x->at += n;
    rules_take(x, "::=");
    build_define(x->b, rule, alternatives(x));
}

struct node *ebnf_root(struct build *b, const char *text, size_t len)
{
    struct rules x = {.b = b, .s = text, .n = len, .comment = "#", .lines = 1};

    for (rules_skip(&x); x.at < x.n && !b->failed; rules_skip(&x))
        definition(&x);
    uint32_t root = b->failed ? NO_RULE : build_find_rule(b, "root", 4);
    if (root == NO_RULE || !b->rules[root].node)
        build_fail(b, EINVAL, "the grammar has no rule \"root\"");
    return node_rule(b, root);
}
