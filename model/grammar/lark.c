/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Grammars in the form of Lark, as far as they say which texts there are:
 *
 *   rule: item*  | ...      NAME: item* | ...     names of terminals are in capitals
 *   "text"  "text"i  "a".."z"  /regex/  ( ... )  [ ... ]  * + ?  ~ n  ~ n..m   // comment
 *   ?rule  !rule  -> alias  NAME.2                shape the tree, and mean nothing here
 *   %ignore X                                     X, or nothing, behind each terminal of a rule
 *   %import common.X [-> Y]
 *
 * Lark's lexer takes the longest terminal; here any way to cut the text into terminals will do.
 */
#include <errno.h>
#include <string.h>

#include "model/grammar/rules.h"

/* X(name, regular expression): what `%import common` knows */
#define COMMON(X)                                                                                  \
    X(DIGIT, "[0-9]")                                                                              \
    X(HEXDIGIT, "[0-9a-fA-F]")                                                                     \
    X(INT, "[0-9]+")                                                                               \
    X(SIGNED_INT, "[+-]?[0-9]+")                                                                   \
    X(DECIMAL, "[0-9]+\\.[0-9]*|\\.[0-9]+")                                                        \
    X(FLOAT, "[0-9]+[eE][+-]?[0-9]+|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?")                \
    X(SIGNED_FLOAT, "[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?)")  \
    X(NUMBER, "[0-9]+([eE][+-]?[0-9]+)?|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?")            \
    X(SIGNED_NUMBER,                                                                               \
      "[+-]?([0-9]+([eE][+-]?[0-9]+)?|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?)")             \
    X(LCASE_LETTER, "[a-z]")                                                                       \
    X(UCASE_LETTER, "[A-Z]")                                                                       \
    X(LETTER, "[A-Za-z]")                                                                          \
    X(WORD, "[A-Za-z]+")                                                                           \
    X(CNAME, "[_A-Za-z][_A-Za-z0-9]*")                                                             \
    X(WS_INLINE, "[ \\t]+")                                                                        \
    X(WS, "[ \\t\\f\\r\\n]+")                                                                      \
    X(CR, "\\r")                                                                                   \
    X(LF, "\\n")                                                                                   \
    X(NEWLINE, "(\\r?\\n)+")                                                                       \
    X(ESCAPED_STRING, "\"([^\"\\\\\\n]|\\\\[^\\n])*\"")

static const struct {
    const char *name, *regex;
} common[] = {
#define X(name, regex) {#name, regex},
    COMMON(X)
#undef X
};

static struct node *alternatives(struct rules *x);

static void skip_lines(struct rules *x)
{
    x->lines++;
    rules_skip(x);
    x->lines--;
}

static size_t name(struct rules *x)
{
    size_t n = 0;

    rules_skip(x);
    for (; x->at + n < x->n; n++) {
        char c = x->s[x->at + n];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
              (n && c >= '0' && c <= '9')))
            break;
    }
    return n;
}

static bool is_terminal(const char *s, size_t n)
{
    while (n && *s == '_')
        s++, n--;
    return n && *s >= 'A' && *s <= 'Z';
}

/* A terminal that stands in a rule. */
static struct node *spaced(struct rules *x, struct node *node)
{
    return x->gap && !x->terminal ? node_pair(x->b, node, x->gap) : node;
}

/* ---- items ---- */

static uint32_t escape(struct rules *x)
{
    uint32_t c = 0;
    size_t len = text_char(x->s + x->at, x->n - x->at, &c);

    x->at += len;
    if (c != 'U' && rules_escape(x, c, &c))
        return c;
    if (!len || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'))
        rules_wrong(x, EINVAL, "an unknown escape");
    return c;
}

static struct node *one(struct rules *x, uint32_t c, bool any_case)
{
    struct range r[2] = {{c, c}, {c, c}};

    if (any_case && c < 0x80 && ((c | 32) >= 'a' && (c | 32) <= 'z'))
        r[0] = (struct range){c | 32, c | 32}, r[1] = (struct range){c & ~32u, c & ~32u};
    return node_chars(x->b, r, 2, false);
}

/* Behind the opening quote. Characters go to *list; a first pass finds the end and its flag. */
static void characters(struct rules *x, struct list *list, uint32_t *ret_last, size_t *ret_n)
{
    size_t end = x->at;
    uint32_t c = 0;

    while (end < x->n && x->s[end] != '"' && x->s[end] != '\n')
        end += x->s[end] == '\\' ? 2 : 1;
    bool any_case = end + 1 < x->n && x->s[end] == '"' && x->s[end + 1] == 'i';
    for (*ret_n = 0; x->at < end && !x->b->failed; ++*ret_n) {
        size_t len = text_char(x->s + x->at, x->n - x->at, &c);
        if (!len)
            rules_wrong(x, EINVAL, "not UTF-8");
        x->at += len;
        if (c == '\\')
            c = escape(x);
        list_add(x->b, list, one(x, c, any_case));
    }
    *ret_last = c;
    if (x->at >= x->n || x->s[x->at] != '"')
        rules_wrong(x, EINVAL, "a text without its closing quote");
    x->at += 1 + any_case;
}

static struct node *quoted(struct rules *x)
{
    struct list list = {0}, second = {0};
    uint32_t lo, hi;
    size_t n;

    characters(x, &list, &lo, &n);
    struct node *node = node_seq(x->b, list.items, list.n);
    if (!x->b->failed && rules_take(x, "..")) {
        size_t m = 0;
        if (rules_take(x, "\""))
            characters(x, &second, &hi, &m);
        if (n != 1 || m != 1 || hi < lo)
            rules_wrong(x, EINVAL, "a range is of two single characters, in order");
        else
            node = node_chars(x->b, &(struct range){lo, hi}, 1, false);
    }
    list_free(&list);
    list_free(&second);
    return spaced(x, node);
}

static struct node *regex(struct rules *x)
{
    size_t start = x->at;

    for (; x->at < x->n && x->s[x->at] != '/' && x->s[x->at] != '\n'; x->at++)
        x->at += x->s[x->at] == '\\';
    if (x->at >= x->n || x->s[x->at] != '/') {
        rules_wrong(x, EINVAL, "a pattern without its closing /");
        return node_none(x->b);
    }
    struct node *node = regex_node(x->b, x->s + start, x->at - start, REGEX_WHOLE, false);
    x->at++;
    if (x->at < x->n && x->s[x->at] >= 'a' && x->s[x->at] <= 'z')
        rules_wrong(x, ENOTSUP, "flags of a pattern are not supported");
    return spaced(x, node);
}

static struct node *group(struct rules *x, const char *end)
{
    if (++x->nesting > NESTING_MAX)
        rules_wrong(x, E2BIG, "nested too deeply");
    x->lines++;
    struct node *inner = alternatives(x);
    if (!rules_take(x, end))
        rules_wrong(x, EINVAL, "a group that is not closed");
    x->lines--;
    x->nesting--;
    return *end == ']' ? node_repeat(x->b, inner, 0, 1) : inner;
}

static struct node *primary(struct rules *x)
{
    if (rules_take(x, "("))
        return group(x, ")");
    if (rules_take(x, "["))
        return group(x, "]");
    if (rules_take(x, "\""))
        return quoted(x);
    if (rules_take(x, "/"))
        return regex(x);
    size_t n = name(x);
    const char *s = x->s + x->at;
    if (!n) {
        rules_wrong(x, EINVAL, "expected a text, a pattern, a name or a group");
        return node_none(x->b);
    }
    x->at += n;
    if (x->at < x->n && x->s[x->at] == '{')
        rules_wrong(x, ENOTSUP, "templates are not supported");
    struct node *node = node_rule(x->b, rules_named(x, s, n));
    return is_terminal(s, n) ? spaced(x, node) : node;
}

static uint32_t count(struct rules *x)
{
    uint32_t n;

    if (!rules_number(x, &n))
        rules_wrong(x, EINVAL, "expected a number");
    return n;
}

static struct node *item(struct rules *x)
{
    struct node *node = primary(x);

    while (!x->b->failed) {
        if (rules_take(x, "~")) {
            uint32_t min = count(x), max = rules_take(x, "..") ? count(x) : min;
            if (max < min)
                rules_wrong(x, EINVAL, "a repetition whose limits are the wrong way round");
            node = node_repeat(x->b, node, min, MAX(max, min));
        } else if (!rules_repeat(x, &node)) {
            break;
        }
    }
    return node;
}

static struct node *sequence(struct rules *x)
{
    struct list list = {0};

    for (rules_skip(x); x->at < x->n && !x->b->failed && !strchr("|)]\n", x->s[x->at]);
         rules_skip(x)) {
        if (rules_take(x, "->")) {
            x->at += name(x);
            continue;
        }
        list_add(x->b, &list, item(x));
    }
    struct node *node = node_seq(x->b, list.items, list.n);
    list_free(&list);
    return node;
}

/* A | at the beginning of the next line goes on. */
static bool another(struct rules *x)
{
    size_t start = x->at;

    skip_lines(x);
    if (rules_take(x, "|"))
        return true;
    x->at = start;
    return false;
}

static struct node *alternatives(struct rules *x)
{
    struct list list = {0};

    another(x);
    do
        list_add(x->b, &list, sequence(x));
    while (!x->b->failed && another(x));
    struct node *node = node_alt(x->b, list.items, list.n);
    list_free(&list);
    return node;
}

/* ---- statements ---- */

static void import_one(struct rules *x)
{
    size_t n = name(x);
    const char *s = x->s + x->at;

    x->at += n;
    for (size_t i = 0; i < ARRAY_LEN(common); i++) {
        if (strlen(common[i].name) != n || memcmp(common[i].name, s, n))
            continue;
        if (rules_take(x, "->")) {
            n = name(x);
            s = x->s + x->at;
            x->at += n;
        }
        build_define(
            x->b, rules_named(x, s, n),
            regex_node(x->b, common[i].regex, strlen(common[i].regex), REGEX_WHOLE, false));
        return;
    }
    rules_wrong(x, ENOTSUP, "no such terminal can be imported");
}

static void import(struct rules *x)
{
    if (!rules_take(x, "common")) {
        rules_wrong(x, ENOTSUP, "only `common` can be imported");
        return;
    }
    if (rules_take(x, ".")) {
        import_one(x);
        return;
    }
    if (!rules_take(x, "("))
        rules_wrong(x, EINVAL, "expected common.NAME or common (NAME, ...)");
    do
        import_one(x);
    while (rules_take(x, ",") && !x->b->failed);
    if (!rules_take(x, ")"))
        rules_wrong(x, EINVAL, "a list that is not closed");
}

static void definition(struct rules *x)
{
    while (rules_take(x, "?") || rules_take(x, "!"))
        ;
    size_t n = name(x);
    const char *s = x->s + x->at;
    x->at += n;
    if (n && rules_take(x, "."))
        count(x);
    if (!n || !rules_take(x, ":")) {
        rules_wrong(x, EINVAL, "expected `name: ...`");
        return;
    }
    uint32_t rule = rules_named(x, s, n);
    if (!x->b->failed && x->b->rules[rule].node)
        rules_wrong(x, EINVAL, "a rule that is defined already");
    x->terminal = is_terminal(s, n);
    build_define(x->b, rule, alternatives(x));
}

static void skip_line(struct rules *x)
{
    while (x->at < x->n && x->s[x->at] != '\n')
        x->at++;
}

/* %ignore counts for all rules, also those above it: a pass of its own. */
static void find_ignored(struct rules *x)
{
    struct list list = {0};

    for (skip_lines(x); x->at < x->n && !x->b->failed; skip_lines(x)) {
        if (!rules_take(x, "%ignore")) {
            skip_line(x);
            continue;
        }
        x->terminal = true;
        list_add(x->b, &list, alternatives(x));
    }
    if (list.n) {
        uint32_t gap = build_rule(x->b, NULL, 0);
        build_define(x->b, gap, node_repeat(x->b, node_alt(x->b, list.items, list.n), 0, 1));
        x->gap = node_rule(x->b, gap);
    }
    list_free(&list);
    x->at = 0;
}

struct node *lark_root(struct build *b, const char *text, size_t len)
{
    struct rules x = {.b = b, .s = text, .n = len, .comment = "//"};

    find_ignored(&x);
    for (skip_lines(&x); x.at < x.n && !b->failed; skip_lines(&x)) {
        if (rules_take(&x, "%ignore"))
            skip_line(&x);
        else if (rules_take(&x, "%import"))
            import(&x);
        else if (rules_take(&x, "%"))
            rules_wrong(&x, ENOTSUP, "only %import and %ignore are supported");
        else
            definition(&x);
    }
    uint32_t root = b->failed ? NO_RULE : build_find_rule(b, "start", 5);
    if (root == NO_RULE || !b->rules[root].node)
        build_fail(b, EINVAL, "the grammar has no rule \"start\" (or, with ::=, \"root\")");
    struct node *node = node_rule(b, root);
    return x.gap ? node_pair(b, x.gap, node) : node;
}
