/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Regular expressions: what ECMA 262 and Python have in common and an automaton can do. Where the
 * two differ (whether \w, \d and \s know letters beyond ASCII), what both would match is made.
 *
 * Anchors: a part's variants are what it matches where ^ or $ have to hold at its ends, and where
 * they have not.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "model/grammar/internal.h"

#define COUNT_MAX 1000000000u

struct variants {
    struct node *v[2][2]; /* [at the text's beginning][at its end]; NULL: none */
};

struct regex {
    struct build *b;
    const char *s;
    size_t n, at;
    bool json;
    unsigned depth;
};

static struct variants alternatives(struct regex *x);

static void wrong(struct regex *x, int errnum, const char *what)
{
    build_fail(x->b, errnum, "the pattern at character %zu: %s", x->at + 1, what);
}

static bool more(const struct regex *x)
{
    return x->at < x->n && !x->b->failed;
}

static bool take(struct regex *x, const char *text)
{
    size_t n = strlen(text);

    if (x->n - x->at < n || memcmp(x->s + x->at, text, n))
        return false;
    x->at += n;
    return true;
}

size_t text_char(const char *s, size_t n, uint32_t *ret)
{
    size_t len = utf8_char(s, n);
    uint32_t c = len > 1 ? (uint8_t)*s & (0x7Fu >> len) : len ? (uint8_t)*s : 0;

    for (size_t i = 1; i < len; i++)
        c = c << 6 | (s[i] & 0x3F);
    if (len)
        *ret = c;
    return len;
}

void text_place(const char *text, size_t at, unsigned *ret_line, unsigned *ret_column)
{
    *ret_line = *ret_column = 1;
    for (size_t i = 0; i < at; i++) {
        *ret_column = text[i] == '\n' ? 1 : *ret_column + 1;
        *ret_line += text[i] == '\n';
    }
}

static uint32_t next_char(struct regex *x)
{
    uint32_t c = 0;
    size_t len = text_char(x->s + x->at, x->n - x->at, &c);

    if (!len)
        wrong(x, EINVAL, "not UTF-8");
    x->at += len;
    return c;
}

struct node *any_char(struct build *b, bool json)
{
    return node_chars(b, &(struct range){0, CHAR_MAX_CODE}, 1, json);
}

/* ---- sets of characters ---- */

struct chars {
    struct range r[CLASS_MAX + 1]; /* one more once it is inverted */
    size_t n;
    bool ascii_only; /* what it leaves out is not the same for everybody beyond ASCII */
};

static void add(struct regex *x, struct chars *c, uint32_t lo, uint32_t hi)
{
    if (c->n == CLASS_MAX)
        c->n = ranges_normalize(c->r, c->n);
    if (c->n == CLASS_MAX)
        wrong(x, E2BIG, "too many characters in a class");
    else
        c->r[c->n++] = (struct range){lo, hi};
}

static void invert(struct chars *c)
{
    size_t n = ranges_normalize(c->r, c->n);
    struct range old[CLASS_MAX];

    memcpy(old, c->r, n * sizeof *old);
    c->n = ranges_invert(old, n, c->r);
}

static void only_ascii(struct chars *c)
{
    size_t out = 0;

    for (size_t i = 0; i < c->n; i++)
        if (c->r[i].lo < 0x80)
            c->r[out++] = (struct range){c->r[i].lo, MIN(c->r[i].hi, 0x7F)};
    c->n = out;
}

/*
 * \d \w \s and their opposites: false when `name` is none of them. Of what is white space for some
 * and not for others neither \s nor \S takes anything, and so both do within [^...].
 */
static bool named_set(struct regex *x, char name, bool inverted, struct chars *to)
{
    static const struct range digits[] = {{'0', '9'}},
                              words[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}},
                              spaces[] = {{'\t', '\r'}, {' ', ' '}},
                              all_spaces[] = {{'\t', '\r'},     {0x1C, ' '},      {0x85, 0x85},
                                              {0xA0, 0xA0},     {0x1680, 0x1680}, {0x2000, 0x200A},
                                              {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                                              {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
    const struct range *from;
    size_t n;

    switch (name) {
    case 'd':
    case 'D':
        from = digits, n = ARRAY_LEN(digits);
        break;
    case 'w':
    case 'W':
        from = words, n = ARRAY_LEN(words);
        break;
    case 's':
    case 'S':
        if ((name == 'S') != inverted)
            from = all_spaces, n = ARRAY_LEN(all_spaces);
        else
            from = spaces, n = ARRAY_LEN(spaces);
        break;
    default:
        return false;
    }
    struct chars own = {0};
    memcpy(own.r, from, n * sizeof *from);
    own.n = n;
    if (name < 'a') {
        invert(&own);
        if (name != 'S')
            only_ascii(&own);
    }
    to->ascii_only = true;
    for (size_t i = 0; i < own.n; i++)
        add(x, to, own.r[i].lo, own.r[i].hi);
    return true;
}

static uint32_t hex(struct regex *x, unsigned digits)
{
    uint32_t v = 0;

    for (unsigned i = 0; i < digits; i++, x->at++) {
        char c = x->at < x->n ? x->s[x->at] : 0;
        unsigned d = c >= '0' && c <= '9'   ? (unsigned)(c - '0')
                     : c >= 'a' && c <= 'f' ? (unsigned)(c - 'a' + 10)
                     : c >= 'A' && c <= 'F' ? (unsigned)(c - 'A' + 10)
                                            : 16;
        if (d == 16) {
            wrong(x, EINVAL, "expected a hexadecimal digit");
            return 0;
        }
        v = v << 4 | d;
    }
    return v;
}

static uint32_t unicode_escape(struct regex *x)
{
    if (!take(x, "{")) {
        uint32_t c = hex(x, 4);
        if (c >= 0xD800 && c < 0xDC00 && take(x, "\\u"))
            c = 0x10000 + ((c - 0xD800) << 10) + (hex(x, 4) - 0xDC00);
        if ((c >= 0xD800 && c < 0xE000) || c > CHAR_MAX_CODE)
            wrong(x, EINVAL, "half a surrogate pair");
        return c;
    }
    size_t end = x->at;
    while (end < x->n && x->s[end] != '}')
        end++;
    uint32_t c = end - x->at <= 6 ? hex(x, (unsigned)(end - x->at)) : UINT32_MAX;
    if (c > CHAR_MAX_CODE || !take(x, "}"))
        wrong(x, EINVAL, "no such character");
    return c;
}

/* Behind a backslash: one character. */
static uint32_t escape(struct regex *x)
{
    static const char letters[] = "t\tn\nr\rf\fv\va\a";
    uint32_t c = next_char(x);

    for (size_t i = 0; i + 1 < sizeof letters; i += 2)
        if (c == (uint8_t)letters[i])
            return (uint8_t)letters[i + 1];
    if (c == 'x')
        return hex(x, 2);
    if (c == 'u')
        return unicode_escape(x);
    if (c == 'c' && x->at < x->n)
        return next_char(x) & 31;
    if (c == '0' && !(x->at < x->n && x->s[x->at] >= '0' && x->s[x->at] <= '9'))
        return 0;
    if (c >= '0' && c <= '9')
        wrong(x, ENOTSUP, "back references are not supported");
    else if (c == 'p' || c == 'P')
        wrong(x, ENOTSUP, "\\p{...} is not supported");
    else if (c == 'b' || c == 'B')
        wrong(x, ENOTSUP, "\\b is not supported");
    else if (c == 'k')
        wrong(x, ENOTSUP, "back references are not supported");
    else if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'))
        wrong(x, EINVAL, "an unknown escape");
    return c;
}

/* One end of a range in a class, or a whole set (true). */
static bool class_part(struct regex *x, bool inverted, struct chars *to, uint32_t *ret)
{
    if (!take(x, "\\")) {
        *ret = next_char(x);
        return false;
    }
    if (x->at < x->n && named_set(x, x->s[x->at], inverted, to)) {
        x->at++;
        return true;
    }
    *ret = take(x, "b") ? '\b' : escape(x);
    return false;
}

static struct node *class(struct regex *x)
{
    struct chars set = {0};
    bool inverted = take(x, "^"), first = true;

    for (; more(x) && (first || x->s[x->at] != ']'); first = false) {
        uint32_t lo, hi;
        if (first && x->s[x->at] == ']') /* [] and [^] are JavaScript's; Python takes it as a ] */
            break;
        if (class_part(x, inverted, &set, &lo))
            continue;
        hi = lo;
        if (x->at + 1 < x->n && x->s[x->at] == '-' && x->s[x->at + 1] != ']') {
            x->at++;
            if (class_part(x, inverted, &set, &hi)) {
                add(x, &set, '-', '-');
                hi = lo;
            }
        }
        if (hi < lo)
            wrong(x, EINVAL, "a range whose end comes before its beginning");
        add(x, &set, lo, hi);
    }
    if (!take(x, "]") || (first && !x->b->failed))
        wrong(x, EINVAL, first ? "an empty class" : "a class without its ]");
    if (inverted) {
        invert(&set);
        if (set.ascii_only)
            only_ascii(&set);
    }
    return node_chars(x->b, set.r, set.n, x->json);
}

static struct node *one_char(struct regex *x, uint32_t c)
{
    return node_chars(x->b, &(struct range){c, c}, 1, x->json);
}

/* ---- structure ---- */

static struct variants plain(struct node *node)
{
    return (struct variants){.v = {{node, NULL}, {NULL, NULL}}};
}

static struct variants anchor(struct regex *x, bool begin)
{
    struct variants a = {0};

    a.v[begin][!begin] = node_empty(x->b);
    return a;
}

static void either(struct regex *x, struct node **to, struct node *node)
{
    *to = *to ? node_either(x->b, *to, node) : node;
}

/* One behind the other: an anchor that something stands before (or behind) cannot hold. */
static struct variants concatenate(struct regex *x, const struct variants *a,
                                   const struct variants *b)
{
    struct variants r = {0};

    for (unsigned i = 0; i < 16; i++) {
        struct node *first = a->v[i & 1][i >> 1 & 1], *second = b->v[i >> 2 & 1][i >> 3];
        if (!first || !second || ((i >> 1 & 1) && second->kind != NODE_EMPTY) ||
            ((i >> 2 & 1) && first->kind != NODE_EMPTY))
            continue;
        struct node *both = first->kind == NODE_EMPTY    ? second
                            : second->kind == NODE_EMPTY ? first
                                                         : node_pair(x->b, first, second);
        either(x, &r.v[(i & 1) | (i >> 2 & 1)][(i >> 1 & 1) | i >> 3], both);
    }
    return r;
}

static bool is_plain(const struct variants *a)
{
    return !a->v[0][1] && !a->v[1][0] && !a->v[1][1];
}

static struct variants group(struct regex *x)
{
    if (take(x, "?=") || take(x, "?!") || take(x, "?<=") || take(x, "?<!"))
        wrong(x, ENOTSUP, "look-around is not supported");
    else if (take(x, "?<") || take(x, "?P<")) {
        while (more(x) && x->s[x->at] != '>')
            x->at++;
        take(x, ">");
    } else if (!take(x, "?:") && take(x, "?")) {
        wrong(x, ENOTSUP, "only (?:...) and named groups are supported");
    }
    struct variants inner = alternatives(x);
    if (!take(x, ")"))
        wrong(x, EINVAL, "a group without its )");
    return inner;
}

static struct variants atom(struct regex *x)
{
    static const struct range dot[] = {
        {0, '\n' - 1}, {'\n' + 1, '\r' - 1}, {'\r' + 1, 0x2027}, {0x202A, CHAR_MAX_CODE}};
    struct chars set = {0};

    if (take(x, "("))
        return group(x);
    if (take(x, "["))
        return plain(class(x));
    if (take(x, "."))
        return plain(node_chars(x->b, dot, ARRAY_LEN(dot), x->json));
    if (take(x, "^") || take(x, "\\A"))
        return anchor(x, true);
    if (take(x, "$") || take(x, "\\Z") || take(x, "\\z"))
        return anchor(x, false);
    if (!take(x, "\\"))
        return plain(one_char(x, next_char(x)));
    if (x->at < x->n && named_set(x, x->s[x->at], false, &set)) {
        x->at++;
        return plain(node_chars(x->b, set.r, set.n, x->json));
    }
    return plain(one_char(x, escape(x)));
}

static bool number(struct regex *x, uint32_t *ret)
{
    size_t start = x->at;
    uint64_t v = 0;

    for (; x->at < x->n && x->s[x->at] >= '0' && x->s[x->at] <= '9'; x->at++)
        v = MIN(v * 10 + (unsigned)(x->s[x->at] - '0'), COUNT_MAX);
    *ret = (uint32_t)v;
    return x->at > start;
}

/* {m}, {m,} or {m,n}; anything else is text. */
static bool braces(struct regex *x, uint32_t *min, uint32_t *max)
{
    size_t start = x->at;
    uint32_t any;

    if (take(x, "{")) {
        bool some = number(x, min);
        *max = *min;
        if (some && take(x, ",") && !number(x, max))
            *max = MANY;
        if (some && take(x, "}"))
            return true;
        if (!some && take(x, ",") && (number(x, &any), take(x, "}")))
            wrong(x, EINVAL, "{,n} is a repetition for some and text for others: {0,n} or \\{,n}");
    }
    x->at = start;
    return false;
}

static bool quantifier(struct regex *x, uint32_t *min, uint32_t *max)
{
    if (take(x, "*"))
        *min = 0, *max = MANY;
    else if (take(x, "+"))
        *min = 1, *max = MANY;
    else if (take(x, "?"))
        *min = 0, *max = 1;
    else if (!braces(x, min, max))
        return false;
    if (*max < *min)
        wrong(x, EINVAL, "a repetition whose limits are the wrong way round");
    if (!take(x, "?") && x->at < x->n && x->s[x->at] == '+')
        wrong(x, ENOTSUP, "possessive repetition is not supported");
    return true;
}

static struct variants item(struct regex *x)
{
    uint32_t min, max;

    if (x->at < x->n && strchr("*+?", x->s[x->at]) && x->s[x->at]) {
        wrong(x, EINVAL, "nothing to repeat");
        return (struct variants){0};
    }
    struct variants a = atom(x);
    while (more(x) && quantifier(x, &min, &max)) {
        if (!is_plain(&a))
            wrong(x, ENOTSUP, "repeating ^ or $ is not supported");
        else if (a.v[0][0])
            a = plain(node_repeat(x->b, a.v[0][0], min, max));
    }
    return a;
}

static struct variants sequence(struct regex *x)
{
    struct variants done = plain(node_empty(x->b));
    struct list run = {0}; /* parts without anchors */

    while (more(x) && x->s[x->at] != '|' && x->s[x->at] != ')') {
        struct variants a = item(x);
        if (is_plain(&a) && a.v[0][0]) {
            list_add(x->b, &run, a.v[0][0]);
            continue;
        }
        struct variants before = plain(node_seq(x->b, run.items, run.n));
        done = concatenate(x, &done, &before);
        done = concatenate(x, &done, &a);
        run.n = 0;
    }
    struct variants rest = plain(node_seq(x->b, run.items, run.n));
    list_free(&run);
    return concatenate(x, &done, &rest);
}

static struct variants alternatives(struct regex *x)
{
    struct variants all = {0};
    struct list lists[2][2] = {0};

    if (++x->depth > NESTING_MAX)
        wrong(x, E2BIG, "nested too deeply");
    do {
        struct variants one = sequence(x);
        for (unsigned i = 0; i < 4; i++)
            if (one.v[i & 1][i >> 1])
                list_add(x->b, &lists[i & 1][i >> 1], one.v[i & 1][i >> 1]);
    } while (take(x, "|") && !x->b->failed);
    for (unsigned i = 0; i < 4; i++) {
        struct list *l = &lists[i & 1][i >> 1];
        if (l->n)
            all.v[i & 1][i >> 1] = node_alt(x->b, l->items, l->n);
        list_free(l);
    }
    x->depth--;
    return all;
}

struct node *regex_node(struct build *b, const char *pattern, size_t len, enum regex_mode mode,
                        bool json)
{
    struct regex x = {.b = b, .s = pattern, .n = len, .json = json};
    struct variants v = alternatives(&x);
    struct node *any = node_repeat(b, any_char(b, json), 0, MANY), *all[4];
    size_t n = 0;

    if (!b->failed && x.at < x.n)
        wrong(&x, EINVAL, "a ) without its (");
    for (unsigned i = 0; i < 4 && !b->failed; i++) {
        struct node *node = v.v[i & 1][i >> 1];
        if (!node)
            continue;
        if (mode == REGEX_FIND && !(i & 1))
            node = node_pair(b, any, node);
        if (mode == REGEX_FIND && !(i >> 1))
            node = node_pair(b, node, any);
        all[n++] = node;
    }
    return node_alt(b, all, n);
}
