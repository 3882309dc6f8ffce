/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include "model/grammar/schema.h"

#define HOUR "([01][0-9]|2[0-3])"
#define CLOCK HOUR ":[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]" HOUR ":[0-5][0-9])"
#define DAY28 "(0[1-9]|1[0-9]|2[0-8])"
#define DATE                                                                                       \
    "[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"   \
    "|02-" DAY28 ")"
#define BYTE10 "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
#define IPV4 "(" BYTE10 "\\.){3}" BYTE10
#define H16 "[0-9a-fA-F]{1,4}"
#define LABEL "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
#define HOST LABEL "(\\." LABEL "){0,4}"
#define NAME "[a-zA-Z0-9]+(-[a-zA-Z0-9]+)*"
#define DOMAIN NAME "(\\." NAME ")*"
#define PCHAR "([a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
#define PATH "(/" PCHAR "*)*"
#define REST "(\\?(" PCHAR "|[/?])*)?(#(" PCHAR "|[/?])*)?"
#define URI "(https?|ftp)://" DOMAIN "(:[1-9][0-9]{0,3})?" PATH REST

/*
 * X(format, pattern): what is made is of the format (RFC 3339, 4122, 4291, 3986, 1123, 6901),
 * though not all that is of the format is made. February has 28 days, an address one @.
 */
#define FORMATS(X)                                                                                 \
    X("date", DATE)                                                                                \
    X("time", CLOCK)                                                                               \
    X("date-time", DATE "T" CLOCK)                                                                 \
    X("duration", "P([1-9][0-9]{0,3}Y([1-9][0-9]?M)?([1-9][0-9]?D)?|[1-9][0-9]?M([1-9][0-9]?D)?|[" \
                  "1-9][0-9]{0,3}"                                                                 \
                  "D)(T[1-9][0-9]?H([1-9][0-9]?M([1-9][0-9]?S)?)?)?|PT([1-9][0-9]?H([1-9][0-9]?M(" \
                  "[1-9][0-9]?S)"                                                                  \
                  "?)?|[1-9][0-9]{0,2}M([1-9][0-9]?S)?|[1-9][0-9]{0,3}S)|P[1-9][0-9]{0,2}W")       \
    X("uuid", "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}")       \
    X("email", "[a-zA-Z0-9_+-]+(\\.[a-zA-Z0-9_+-]+)*@" NAME "(\\." NAME ")+")                      \
    X("ipv4", IPV4)                                                                                \
    X("ipv6", "(" H16 ":){7}" H16 "|::(" H16 ":){0,5}" H16 "|(" H16 ":){1,3}:(" H16 ":){0,2}" H16) \
    X("hostname", HOST)                                                                            \
    X("uri", URI)                                                                                  \
    X("iri", URI)                                                                                  \
    X("uri-reference", URI "|" PATH REST)                                                          \
    X("iri-reference", URI "|" PATH REST)                                                          \
    X("json-pointer", "(/([a-zA-Z0-9_. -]|~[01]){0,32}){0,16}")                                    \
    X("relative-json-pointer", "(0|[1-9][0-9]{0,3})(#|(/([a-zA-Z0-9_. -]|~[01]){0,32}){0,16})")

static const struct {
    const char *name, *pattern;
} formats[] = {
#define X(name, pattern) {name, pattern},
    FORMATS(X)
#undef X
};

/* Formats of the specification that are not done: more would be valid than is meant. */
static const char *const refused[] = {"idn-email", "idn-hostname", "uri-template", "regex"};

static struct node *chars(struct build *b, const char *ranges)
{
    struct range r[8];
    size_t n = 0;

    for (; ranges[2 * n]; n++)
        r[n] = (struct range){(uint8_t)ranges[2 * n], (uint8_t)ranges[2 * n + 1]};
    return node_chars(b, r, n, false);
}

/* \uXXXX of anything but NUL and half a surrogate pair. */
static struct node *unicode_escape(struct build *b)
{
    struct node *hex = chars(b, "09afAF"), *nonzero = chars(b, "19afAF"), *zero = chars(b, "00");
    struct node *d = chars(b, "ddDD"), *three = node_repeat(b, hex, 3, 3);
    struct node *forms[6] = {node_pair(b, chars(b, "19acACefEF"), three)};

    for (unsigned i = 1; i < 4; i++) { /* zeros, a digit that is none, the rest */
        struct node *kids[] = {node_repeat(b, zero, i, i), nonzero,
                               node_repeat(b, hex, 3 - i, 3 - i)};
        forms[i] = node_seq(b, kids, 3);
    }
    struct node *two = node_repeat(b, hex, 2, 2);
    struct node *low[] = {d, chars(b, "07"), two};
    struct node *pair[] = {d, chars(b, "89abAB"), two, node_text(b, "\\u"),
                           d, chars(b, "cfCF"),   two};
    forms[4] = node_seq(b, low, 3);
    forms[5] = node_seq(b, pair, 7);
    return node_pair(b, node_text(b, "u"), node_alt(b, forms, 6));
}

struct node *plain_char(struct build *b)
{
    static const struct range plain[] = {
        {0x20, '"' - 1}, {'"' + 1, '\\' - 1}, {'\\' + 1, CHAR_MAX_CODE}};

    return node_chars(b, plain, ARRAY_LEN(plain), false);
}

/* One character of a string, in any way that JSON has to write it. */
static struct node *string_char(struct build *b)
{
    static const struct range shorts[] = {{'"', '"'}, {'/', '/'}, {'\\', '\\'}, {'b', 'b'},
                                          {'f', 'f'}, {'n', 'n'}, {'r', 'r'},   {'t', 't'}};
    struct node *after =
        node_either(b, node_chars(b, shorts, ARRAY_LEN(shorts), false), unicode_escape(b));

    return node_either(b, plain_char(b), node_pair(b, node_text(b, "\\"), after));
}

struct node *quoted_node(struct build *b, struct node *content)
{
    struct node *kids[] = {node_text(b, "\""), content, node_text(b, "\"")};
    return node_seq(b, kids, 3);
}

/* NULL: nothing to hold it to. `json`: as it is written within a JSON string. */
static struct node *format_node(struct schema *x, const json_t *s, const json_t *v, bool json)
{
    const char *name = json_string_value(v);

    if (!name)
        return schema_fail(x, EINVAL, s, "format", "expected a string");
    for (size_t i = 0; i < ARRAY_LEN(formats); i++)
        if (!strcmp(formats[i].name, name))
            return regex_node(x->b, formats[i].pattern, strlen(formats[i].pattern), REGEX_WHOLE,
                              json);
    for (size_t i = 0; i < ARRAY_LEN(refused); i++)
        if (!strcmp(refused[i], name))
            return schema_fail(x, ENOTSUP, s, "format", "\"%s\" is not supported", name);
    return NULL;
}

bool format_matches(struct schema *x, const json_t *s, const char *text, size_t len)
{
    const json_t *v = json_object_get(s, "format");
    struct node *node = v && !x->b->failed ? format_node(x, s, v, false) : NULL;
    struct machine *m = node ? machine_of(x->b, node, NULL, false) : NULL;
    bool found = !node || x->maybe || (m && machine_accepts(m, text, len));

    machine_free(m);
    return found;
}

static struct node *pattern_node(struct schema *x, const json_t *s, const json_t *v)
{
    bool before = x->b->failed;

    if (!json_is_string(v))
        return schema_fail(x, EINVAL, s, "pattern", "expected a string");
    struct node *node =
        regex_node(x->b, json_string_value(v), json_string_length(v), REGEX_FIND, true);
    if (x->b->failed && !before && x->b->err) { /* say where */
        struct error inner = *x->b->err;
        x->b->failed = 0;
        schema_fail(x, -inner.code, s, "pattern", "%.150s", inner.text);
    }
    return node;
}

/* What must hold beside each other: of one, as it is; of several, one machine. */
static void both(struct schema *x, struct machine **all, struct node **only, struct node *node)
{
    if (!*all && !*only) {
        *only = node;
        return;
    }
    if (*only) {
        *all = machine_of(x->b, *only, NULL, false);
        *only = NULL;
    }
    *all = machine_narrow(x->b, *all, node, false);
    if (!*all)
        *only = node_none(x->b);
}

struct node *string_node(struct schema *x, const struct conj *c)
{
    uint32_t min = conj_count(x, c, "minLength", true, 0),
             max = conj_count(x, c, "maxLength", false, MANY);
    struct machine *machine = NULL;
    struct node *only = NULL;
    const json_t *v;

    if (max < min)
        return node_none(x->b);
    for (size_t i = 0; (v = conj_next(c, "pattern", &i)) && !x->b->failed;)
        both(x, &machine, &only, pattern_node(x, c->parts[i - 1].s, v));
    for (size_t i = 0; (v = conj_next(c, "format", &i)) && !x->b->failed;) {
        struct node *format = format_node(x, c->parts[i - 1].s, v, true);
        if (format)
            both(x, &machine, &only, format);
    }
    if (!machine && !only) {
        if (min || max != MANY)
            return quoted_node(x->b, node_repeat(x->b, string_char(x->b), min, max));
        if (!x->string) {
            uint32_t rule = build_rule(x->b, NULL, 0);
            build_define(x->b, rule,
                         quoted_node(x->b, node_repeat(x->b, string_char(x->b), 0, MANY)));
            x->string = node_rule(x->b, rule);
        }
        return x->string;
    }
    if ((min || max != MANY) && !x->b->failed)
        both(x, &machine, &only, node_repeat(x->b, any_char(x->b, true), min, max));
    struct node *content = machine ? node_machine(x->b, machine) : only;
    return content ? quoted_node(x->b, content) : node_none(x->b);
}
