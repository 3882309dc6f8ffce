/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Oniguruma's Ruby syntax (its doc/RE) rewritten for PCRE2 (pcre2pattern(3)). What differs:
 *   \s \w \b        Unicode properties; PCRE2's own sets differ by a few characters
 *   \h \H \v \uHHHH hexadecimal digit, vertical tab, code point
 *   \p{Script}      the Script property; PCRE2 takes a bare name as Script_Extensions
 *   (?m) (?i)       "dot matches newline"; an isolated option spans the alternatives behind it
 *   {,n} {n}? {n}+  0 to n; optional; repeated, not possessive
 *   [a[b]] [a&&b]   union and intersection of classes
 */
#include "model/tokenizer/regex.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "model/tokenizer/unicode.h"

#define MAX_DEPTH 100

/* Class contents, and the complement of those that have no short negation. */
#define SPACE_SET                                                                                  \
    "\\x09-\\x0d\\x20\\x85\\xa0\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}"   \
    "\\x{3000}"
#define WORD_SET "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"
#define HEX_SET "0-9A-Fa-f"

struct tr {
    const char *p, *end;
    struct buffer *out;
    struct error *err;
    size_t start[MAX_DEPTH];   /* where each open group began in out */
    unsigned close[MAX_DEPTH]; /* groups to close with it: isolated options */
    unsigned depth;
    size_t atom; /* where the last atom began in out */
};

static int put(struct buffer *b, const char *s)
{
    return buffer_append(b, s, strlen(s));
}

static int unsupported(struct tr *t, const char *what)
{
    return error_set(t->err, ENOTSUP, "pattern construct %s is not supported", what);
}

static int malformed(struct tr *t, const char *what)
{
    return error_set(t->err, EBADMSG, "malformed pattern: %s", what);
}

/* Names that Oniguruma has and PCRE2 lacks or means differently. Value: class contents. */
static const struct {
    const char *name, *set;
} property_names[] = {
    {"alnum", "\\p{Alphabetic}\\p{Nd}"},
    {"alpha", "\\p{Alphabetic}"},
    {"ascii", "\\x00-\\x7f"},
    {"blank", "\\p{Zs}\\x09"},
    {"cntrl", "\\p{Cc}"},
    {"digit", "\\p{Nd}"},
    {"lower", "\\p{Lowercase}"},
    {"punct", "\\p{P}$+<=>^`|~"},
    {"space", SPACE_SET},
    {"upper", "\\p{Uppercase}"},
    {"word", WORD_SET},
    {"xdigit", HEX_SET},
    {"any", "\\x00-\\x{10ffff}"},
    {"assigned", "\\P{Cn}"},
    {"letter", "\\p{L}"},
    {"uppercaseletter", "\\p{Lu}"},
    {"lowercaseletter", "\\p{Ll}"},
    {"titlecaseletter", "\\p{Lt}"},
    {"modifierletter", "\\p{Lm}"},
    {"otherletter", "\\p{Lo}"},
    {"mark", "\\p{M}"},
    {"nonspacingmark", "\\p{Mn}"},
    {"spacingmark", "\\p{Mc}"},
    {"enclosingmark", "\\p{Me}"},
    {"number", "\\p{N}"},
    {"decimalnumber", "\\p{Nd}"},
    {"letternumber", "\\p{Nl}"},
    {"othernumber", "\\p{No}"},
    {"punctuation", "\\p{P}"},
    {"connectorpunctuation", "\\p{Pc}"},
    {"dashpunctuation", "\\p{Pd}"},
    {"openpunctuation", "\\p{Ps}"},
    {"closepunctuation", "\\p{Pe}"},
    {"initialpunctuation", "\\p{Pi}"},
    {"finalpunctuation", "\\p{Pf}"},
    {"otherpunctuation", "\\p{Po}"},
    {"symbol", "\\p{S}"},
    {"mathsymbol", "\\p{Sm}"},
    {"currencysymbol", "\\p{Sc}"},
    {"modifiersymbol", "\\p{Sk}"},
    {"othersymbol", "\\p{So}"},
    {"separator", "\\p{Z}"},
    {"spaceseparator", "\\p{Zs}"},
    {"lineseparator", "\\p{Zl}"},
    {"paragraphseparator", "\\p{Zp}"},
    {"other", "\\p{C}"},
    {"control", "\\p{Cc}"},
    {"format", "\\p{Cf}"},
    {"unassigned", "\\p{Cn}"},
    {"privateuse", "\\p{Co}"},
    {"casedletter", "\\p{L&}"},
    {"lc", "\\p{L&}"},
};

static bool pcre2_knows(const char *pattern)
{
    int code;
    PCRE2_SIZE offset;
    pcre2_code *re =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF, &code, &offset, NULL);
    pcre2_code_free(re);
    return re != NULL;
}

/* Class contents for a property name; false when nobody knows the name. */
static bool property_set(const char *name, size_t n, char set[160])
{
    char key[48];
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)name[i];
        if (c == ' ' || c == '_' || c == '-')
            continue;
        if (!isalnum(c) || k + 1 == sizeof key)
            return false;
        key[k++] = (char)tolower(c);
    }
    key[k] = 0;
    for (size_t i = 0; i < ARRAY_LEN(property_names); i++)
        if (!strcmp(key, property_names[i].name))
            return strcpy(set, property_names[i].set), true;
    if (k == 1 || k == 2) {
        key[0] = (char)toupper((unsigned char)key[0]);
        if (strchr("LMNPSZC", key[0])) {
            snprintf(set, 160, "\\p{%s}", key);
            return pcre2_knows(set);
        }
    }
    snprintf(set, 160, "\\p{sc:%s}", key);
    if (k && pcre2_knows(set))
        return true;
    snprintf(set, 160, "\\p{%s}", key);
    return k && pcre2_knows(set);
}

/* Behind "\p" or "\P": the braces. */
static int read_property(struct tr *t, bool *negated, char set[160])
{
    const char *close =
        t->p < t->end && *t->p == '{' ? memchr(t->p, '}', (size_t)(t->end - t->p)) : NULL;
    if (!close)
        return malformed(t, "\\p without {name}");
    const char *name = t->p + 1;
    if (name < close && *name == '^') {
        *negated = !*negated;
        name++;
    }
    t->p = close + 1;
    if (property_set(name, (size_t)(close - name), set))
        return 0;
    return error_set(t->err, ENOTSUP, "pattern: unknown character property '%.*s'",
                     (int)MIN(close - name, 60), name);
}

/*
 * The escape behind a backslash as a set of characters, in a class and outside alike.
 * 1: *set and *negated hold it; 0: it is not a set.
 */
static int escape_set(struct tr *t, bool *negated, char set[160])
{
    static const struct {
        char letter;
        const char *set;
    } sets[] = {{'d', "\\p{Nd}"}, {'s', SPACE_SET}, {'w', WORD_SET}, {'h', HEX_SET}};
    char c = *t->p;
    for (size_t i = 0; i < ARRAY_LEN(sets); i++)
        if (tolower((unsigned char)c) == sets[i].letter) {
            t->p++;
            *negated = c != sets[i].letter;
            strcpy(set, sets[i].set);
            return 1;
        }
    if (c != 'p' && c != 'P')
        return 0;
    t->p++;
    *negated = c == 'P';
    int r = read_property(t, negated, set);
    return r < 0 ? r : 1;
}

static int hex_digits(struct tr *t, unsigned min, unsigned max, uint32_t *ret_c)
{
    uint32_t c = 0;
    unsigned n = 0;
    for (; n < max && t->p < t->end && isxdigit((unsigned char)*t->p); n++, t->p++)
        c = c << 4 | (uint32_t)(*t->p <= '9' ? *t->p - '0' : (*t->p | 0x20) - 'a' + 10);
    if (n < min || c > 0x10FFFF)
        return malformed(t, "bad hexadecimal escape");
    *ret_c = c;
    return 0;
}

/* The escape behind a backslash as one character; 1 when it is one, 0 when not. */
static int escape_char(struct tr *t, bool in_class, uint32_t *ret_c)
{
    static const char from[] = "ntrfaev", to[] = "\n\t\r\f\a\x1b\v";
    char c = *t->p;
    const char *f = strchr(from, c);
    if (c && f) {
        t->p++;
        return *ret_c = (uint32_t)to[f - from], 1;
    }
    if (c == 'x' || c == 'u') {
        t->p++;
        if (c == 'x' && t->p < t->end && *t->p == '{') {
            t->p++;
            int r = hex_digits(t, 1, 8, ret_c);
            if (r < 0)
                return r;
            if (t->p == t->end || *t->p++ != '}')
                return malformed(t, "\\x{ without }");
            return 1;
        }
        int r = c == 'x' ? hex_digits(t, 1, 2, ret_c) : hex_digits(t, 4, 4, ret_c);
        return r < 0 ? r : 1;
    }
    if (c == '0' || (in_class && c >= '1' && c <= '7')) {
        uint32_t v = 0;
        for (int i = 0; i < 3 && t->p < t->end && *t->p >= '0' && *t->p <= '7'; i++)
            v = v * 8 + (uint32_t)(*t->p++ - '0');
        return *ret_c = v, 1;
    }
    if (in_class && c == 'b')
        return t->p++, *ret_c = 8, 1;
    if (!in_class && (isdigit((unsigned char)c) || (c && strchr("AzZGKRXkgbBNO", c))))
        return 0;
    if (c == 'c' || c == 'C' || c == 'M')
        return unsupported(t, "\\c, \\C- or \\M-");
    t->p += utf8_get(t->p, ret_c);
    return 1;
}

/* A character that stands for itself, in a class and outside. */
static int put_char(struct buffer *b, uint32_t c)
{
    char text[16];
    if (c >= 0xD800 && c < 0xE000) /* never in UTF-8: matches nothing */
        c = 0xFFFFFFFF;
    if (c == 0xFFFFFFFF)
        return -EBADMSG;
    if (c < 0x80 && isalnum((int)c))
        return text[0] = (char)c, buffer_append(b, text, 1);
    snprintf(text, sizeof text, "\\x{%x}", c);
    return put(b, text);
}

/* What a class gathers: contents for one PCRE2 class, and alternatives that do not fit in it. */
struct class
{
    struct buffer set, alt;
};

static void class_free(struct class *c)
{
    buffer_free(&c->set);
    buffer_free(&c->alt);
}

static int class_add_set(struct class *c, bool negated, const char *set)
{
    if (!negated)
        return put(&c->set, set);
    /* One property alone has its own complement. */
    if (set[0] == '\\' && (set[1] == 'p' || set[1] == 'P') && !strchr(set + 2, '\\') &&
        set[strlen(set) - 1] == '}') {
        char flipped[160];
        snprintf(flipped, sizeof flipped, "\\%c%s", set[1] == 'p' ? 'P' : 'p', set + 2);
        return put(&c->set, flipped);
    }
    return buffer_printf(&c->alt, "|[^%s]", set);
}

/* Writes the finished class as something that matches one character. */
static int class_write(struct class *c, bool negated, struct buffer *out)
{
    if (!c->alt.len) {
        if (!c->set.len)
            return put(out, negated ? "(?s:.)" : "(?!)");
        return buffer_printf(out, "[%s%s]", negated ? "^" : "", c->set.data);
    }
    const char *alt = c->alt.data + 1; /* without the first bar */
    const char *open = negated ? "(?:(?!" : "(?:", *close = negated ? ")(?s:.))" : ")";
    if (!c->set.len)
        return buffer_printf(out, "%s%s%s", open, alt, close);
    return buffer_printf(out, "%s[%s]|%s%s", open, c->set.data, alt, close);
}

static int read_class(struct tr *t, unsigned depth, struct buffer *out);

/* "[:name:]" inside a class; 0 when it is none. */
static int class_posix(struct tr *t, struct class *c)
{
    const char *name = t->p + 2, *close = name;
    bool negated = name < t->end && *name == '^';
    char set[160];
    name += negated;
    for (close = name; close < t->end && isalpha((unsigned char)*close);)
        close++;
    if (t->end - close < 2 || close[0] != ':' || close[1] != ']' ||
        !property_set(name, (size_t)(close - name), set))
        return 0;
    t->p = close + 2;
    int r = class_add_set(c, negated, set);
    return r < 0 ? r : 1;
}

/* One character of a class: 1 and *ret_c, or 0 when a set was added instead. */
static int class_item(struct tr *t, struct class *c, uint32_t *ret_c)
{
    char set[160];
    bool negated;
    if (*t->p != '\\') {
        t->p += utf8_get(t->p, ret_c);
        return 1;
    }
    if (++t->p == t->end)
        return malformed(t, "a backslash at the end");
    int r = escape_set(t, &negated, set);
    if (r < 0)
        return r;
    if (r > 0) {
        r = class_add_set(c, negated, set);
        return r < 0 ? r : 0;
    }
    return escape_char(t, true, ret_c);
}

/* A character, or a range that begins with it. */
static int class_range(struct tr *t, struct class *c)
{
    uint32_t low, high;
    int r = class_item(t, c, &low);
    if (r <= 0)
        return r;
    if ((r = put_char(&c->set, low)) < 0)
        return malformed(t, "a surrogate in a class");
    if (t->end - t->p < 2 || t->p[0] != '-' || t->p[1] == ']')
        return 0;
    const char *dash = t->p++;
    if (*t->p == '[' || (*t->p == '&' && t->end - t->p > 1 && t->p[1] == '&')) {
        t->p = dash;
        return 0;
    }
    r = class_item(t, c, &high);
    if (r < 0)
        return r;
    if (r == 0) /* [a-\d]: the hyphen is a character */
        return put(&c->set, "\\-");
    if (high < low)
        return malformed(t, "an empty range in a class");
    r = put(&c->set, "-");
    return r < 0 ? r : put_char(&c->set, high);
}

static int class_nested(struct tr *t, unsigned depth, struct class *c)
{
    if (t->end - t->p > 1 && t->p[1] == ':') {
        int r = class_posix(t, c);
        if (r != 0)
            return r;
    }
    int r = put(&c->alt, "|");
    t->p++;
    return r < 0 ? r : read_class(t, depth + 1, &c->alt);
}

/* "left && right": the left side becomes a look-ahead in front of the right. */
static int class_intersect(struct tr *t, struct class *c, struct buffer *left)
{
    t->p += 2;
    int r = put(left, "(?=");
    if (r >= 0)
        r = class_write(c, false, left);
    if (r >= 0)
        r = put(left, ")");
    class_free(c);
    *c = (struct class){0};
    return r;
}

static int class_close(struct tr *t, struct class *c, bool negated, const struct buffer *left,
                       struct buffer *out)
{
    t->p++;
    if (!left->len)
        return class_write(c, negated, out);
    _cleanup_(buffer_free) struct buffer right = {0};
    int r = class_write(c, false, &right);
    if (r < 0)
        return r;
    return buffer_printf(out, negated ? "(?:(?!%s%s)(?s:.))" : "(?:%s%s)", left->data, right.data);
}

/* Behind the opening bracket. */
static int read_class(struct tr *t, unsigned depth, struct buffer *out)
{
    _cleanup_(class_free) struct class c = {0};
    _cleanup_(buffer_free) struct buffer left = {0};
    bool negated = t->p < t->end && *t->p == '^';
    int r = 0;
    if (depth > MAX_DEPTH)
        return unsupported(t, "of such depth");
    t->p += negated;
    for (bool first = true; t->p < t->end; first = false) {
        if (*t->p == ']' && !first)
            return class_close(t, &c, negated, &left, out);
        if (*t->p == '[')
            r = class_nested(t, depth, &c);
        else if (*t->p == '&' && t->end - t->p > 1 && t->p[1] == '&')
            r = class_intersect(t, &c, &left);
        else
            r = class_range(t, &c);
        if (r < 0)
            return r;
    }
    return malformed(t, "a class without ]");
}

/* \k<name>, \g<name>: as they are. */
static int copy_reference(struct tr *t)
{
    const char *from = t->p++;
    const char *close =
        t->p < t->end ? memchr(t->p, *t->p == '\'' ? '\'' : '>', (size_t)(t->end - t->p)) : NULL;
    if (!close || (*t->p != '<' && *t->p != '\''))
        return malformed(t, "\\k or \\g without <name>");
    if (*t->p == '\'')
        return unsupported(t, "\\k'name'");
    t->p = close + 1;
    int r = put(t->out, "\\");
    return r < 0 ? r : buffer_append(t->out, from, (size_t)(t->p - from));
}

static int read_escape(struct tr *t)
{
    char set[160];
    bool negated;
    uint32_t c;
    if (++t->p == t->end)
        return malformed(t, "a backslash at the end");
    t->atom = t->out->len;
    int r = escape_set(t, &negated, set);
    if (r < 0)
        return r;
    if (r > 0)
        return buffer_printf(t->out, "[%s%s]", negated ? "^" : "", set);
    r = escape_char(t, false, &c);
    if (r < 0)
        return r;
    if (r > 0)
        return put_char(t->out, c) < 0 ? malformed(t, "a surrogate") : 0;
    char letter = *t->p;
    if (letter == 'k' || letter == 'g')
        return copy_reference(t);
    t->p++;
    if (letter == 'b')
        return put(t->out, "(?:(?<=[" WORD_SET "])(?![" WORD_SET "])|(?<![" WORD_SET
                           "])(?=[" WORD_SET "]))");
    if (letter == 'B')
        return put(t->out, "(?:(?<=[" WORD_SET "])(?=[" WORD_SET "])|(?<![" WORD_SET
                           "])(?![" WORD_SET "]))");
    if (letter == 'N' || letter == 'O')
        return put(t->out, letter == 'N' ? "[^\\n]" : "(?s:.)");
    return buffer_printf(t->out, "\\%c", letter);
}

/* "(?imx-imx" behind the question mark: up to ':' or ')'. */
static int read_options(struct tr *t)
{
    char flags[16];
    size_t n = 0;
    while (t->p < t->end && *t->p && strchr("imx-", *t->p) && n + 1 < sizeof flags) {
        flags[n++] = *t->p == 'm' ? 's' : *t->p;
        t->p++;
    }
    flags[n] = 0;
    if (!n || t->p == t->end || (*t->p != ':' && *t->p != ')'))
        return unsupported(t, "(?...) of this kind");
    if (strchr(flags, 'x'))
        return unsupported(t, "(?x)");
    int r = buffer_printf(t->out, "(?%s:", flags);
    if (*t->p++ == ')') {
        t->close[t->depth]++;
        return r;
    }
    if (t->depth + 1 == MAX_DEPTH)
        return unsupported(t, "of such depth");
    t->start[++t->depth] = t->atom;
    t->close[t->depth] = 0;
    return r;
}

static int read_group(struct tr *t)
{
    const char *from = t->p++;
    t->atom = t->out->len;
    if (t->p < t->end && *t->p == '?') {
        t->p++;
        char c = t->p < t->end ? *t->p : 0;
        if (c == '#') {
            const char *close = memchr(t->p, ')', (size_t)(t->end - t->p));
            if (!close)
                return malformed(t, "(?# without )");
            t->p = close + 1;
            return 0;
        }
        if (c == '<' && t->end - t->p > 1 && t->p[1] != '=' && t->p[1] != '!') {
            const char *close = memchr(t->p, '>', (size_t)(t->end - t->p));
            if (!close)
                return malformed(t, "(?< without >");
            t->p = close + 1;
        } else if (c == '<' && t->end - t->p > 1) {
            t->p += 2;
        } else if (c && strchr(":=!>", c)) {
            t->p++;
        } else {
            return read_options(t);
        }
    }
    if (t->depth + 1 == MAX_DEPTH)
        return unsupported(t, "of such depth");
    t->start[++t->depth] = t->out->len;
    t->close[t->depth] = 0;
    return buffer_append(t->out, from, (size_t)(t->p - from));
}

static int close_options(struct tr *t)
{
    int r = 0;
    for (; t->close[t->depth] && r >= 0; t->close[t->depth]--)
        r = put(t->out, ")");
    return r;
}

static int read_close(struct tr *t)
{
    int r = close_options(t);
    t->p++;
    if (!t->depth)
        return malformed(t, "an unmatched )");
    t->atom = t->start[t->depth--];
    return r < 0 ? r : put(t->out, ")");
}

/* Puts the last atom, with its quantifier, into a group of its own. */
static int wrap_atom(struct tr *t, const char *suffix)
{
    int r = buffer_reserve(t->out, 4);
    if (r < 0)
        return r;
    memmove(t->out->data + t->atom + 3, t->out->data + t->atom, t->out->len - t->atom);
    memcpy(t->out->data + t->atom, "(?:", 3);
    t->out->len += 3;
    return put(t->out, suffix);
}

/* "{n}", "{n,}", "{n,m}", "{,m}"; anything else is a brace that stands for itself. */
static int read_interval(struct tr *t)
{
    const char *p = t->p + 1, *low = p;
    while (p < t->end && isdigit((unsigned char)*p))
        p++;
    size_t n_low = (size_t)(p - low), n_high = 0;
    bool comma = p < t->end && *p == ',';
    const char *high = p += comma;
    while (p < t->end && isdigit((unsigned char)*p))
        p++;
    n_high = (size_t)(p - high) * comma;
    if (p == t->end || *p != '}' || (!n_low && !n_high) || n_low > 6 || n_high > 6) {
        t->atom = t->out->len;
        t->p++;
        return put(t->out, "\\{");
    }
    t->p = p + 1;
    int r = buffer_printf(t->out, "{%.*s%s%.*s}", n_low ? (int)n_low : 1, n_low ? low : "0",
                          comma ? "," : "", (int)n_high, high);
    char next = t->p < t->end ? *t->p : 0;
    if (r < 0 || (next != '+' && next != '?'))
        return r;
    t->p++;
    if (next == '?' && comma)
        return put(t->out, "?");
    return wrap_atom(t, next == '+' ? ")+" : ")?");
}

static int read_quantifier(struct tr *t)
{
    int r = buffer_append(t->out, t->p++, 1);
    if (r >= 0 && t->p < t->end && (*t->p == '?' || *t->p == '+'))
        r = buffer_append(t->out, t->p++, 1);
    return r;
}

static int read_item(struct tr *t)
{
    size_t n;
    switch (*t->p) {
    case '\\':
        return read_escape(t);
    case '[':
        t->atom = t->out->len;
        t->p++;
        return read_class(t, 0, t->out);
    case '(':
        return read_group(t);
    case ')':
        return read_close(t);
    case '*':
    case '+':
    case '?':
        return read_quantifier(t);
    case '{':
        return read_interval(t);
    default:
        t->atom = t->out->len;
        n = utf8_len(*t->p);
        t->p += n;
        return buffer_append(t->out, t->p - n, n);
    }
}

int regex_translate(const char *pattern, size_t len, struct buffer *out, struct error *err)
{
    struct tr t = {.p = pattern, .end = pattern + len, .out = out, .err = err};
    if (!utf8_valid(pattern, len) || memchr(pattern, 0, len))
        return error_set(err, EBADMSG, "a pattern is not UTF-8 text");
    while (t.p < t.end) {
        int r = read_item(&t);
        if (r < 0)
            return r == -ENOMEM ? error_set(err, ENOMEM, "no memory for a pattern") : r;
    }
    if (t.depth)
        return error_set(err, EBADMSG, "malformed pattern: ( without )");
    return close_options(&t) < 0 ? error_set(err, ENOMEM, "no memory for a pattern") : 0;
}
