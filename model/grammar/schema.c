/* SPDX-License-Identifier: Apache-2.0 */
#include "model/grammar/schema.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/digest.h"

/* What would change what is valid, and is not done. */
static const char *const refused[] = {
    "not",           "if",          "then",        "else",     "dependentRequired",
    "dependencies",  "contains",    "minContains", "disallow", "dependentSchemas",
    "$recursiveRef", "$dynamicRef", "maxContains", "extends",  "divisibleBy",
};

/* ---- errors ---- */

/* The path of `wanted` below `at`, by identity. */
static bool find_path(const json_t *at, const json_t *wanted, char *path, size_t len, size_t room)
{
    const char *key;
    json_t *v;
    size_t i;

    path[len] = 0;
    if (at == wanted)
        return true;
    json_object_foreach((json_t *)at, key, v)
    {
        int n = snprintf(path + len, room - len, "/%.100s", key);
        if (len + (size_t)n < room && find_path(v, wanted, path, len + (size_t)n, room))
            return true;
    }
    json_array_foreach(at, i, v)
    {
        int n = snprintf(path + len, room - len, "/%zu", i);
        if (len + (size_t)n < room && find_path(v, wanted, path, len + (size_t)n, room))
            return true;
    }
    return false;
}

struct node *schema_fail(struct schema *x, int errnum, const json_t *s, const char *keyword,
                         const char *format, ...)
{
    char path[200] = "", text[200];
    va_list ap;

    if (x->b->failed)
        return node_none(x->b);
    va_start(ap, format);
    vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    if (!find_path(x->root, s, path, 0, sizeof path))
        path[0] = 0;
    build_fail(x->b, errnum, "%s at #%s%s%s: %s", *keyword ? keyword : "the schema", path,
               *keyword ? "/" : "", keyword, text);
    return node_none(x->b);
}

/* ---- references ---- */

/* One step of a JSON pointer, %XX and ~0 ~1 undone. */
static const json_t *pointer_step(const json_t *at, const char *s, size_t n)
{
    char name[512];
    size_t len = 0;

    for (size_t i = 0; i < n; i++) {
        unsigned code;
        if (len + 1 == sizeof name)
            return NULL;
        if (s[i] == '%' && i + 2 < n && sscanf(s + i + 1, "%2x", &code) == 1) {
            name[len++] = (char)code;
            i += 2;
        } else {
            name[len++] = s[i];
        }
        if (len >= 2 && name[len - 2] == '~' && (name[len - 1] == '0' || name[len - 1] == '1')) {
            name[len - 2] = name[len - 1] == '0' ? '~' : '/';
            len--;
        }
    }
    name[len] = 0;
    if (json_is_array(at))
        return len && strspn(name, "0123456789") == len
                   ? json_array_get(at, strtoul(name, NULL, 10))
                   : NULL;
    return json_object_get(at, name);
}

/* A schema below `at` whose keyword has this value: $anchor, $id. */
static const json_t *find_named(const json_t *at, const char *keyword, const char *name)
{
    const char *key, *own = json_string_value(json_object_get(at, keyword));
    const json_t *found = own && !strcmp(own, name) ? at : NULL;
    json_t *v;
    size_t i;

    json_object_foreach((json_t *)at, key, v) if (!found) found = find_named(v, keyword, name);
    json_array_foreach(at, i, v) if (!found) found = find_named(v, keyword, name);
    return found;
}

const json_t *schema_resolve(struct schema *x, const json_t *s)
{
    const char *ref = json_string_value(json_object_get(s, "$ref"));
    const char *hash = ref ? strchr(ref, '#') : NULL;
    const json_t *at = x->root;

    if (!ref) {
        schema_fail(x, EINVAL, s, "$ref", "expected a string");
        return NULL;
    }
    build_work(x->b, 64);
    if (hash != ref) { /* what is in front of the # names a schema */
        _cleanup_free_ char *id = x_strndup(ref, hash ? (size_t)(hash - ref) : strlen(ref));
        at = find_named(x->root, "$id", id);
    }
    if (at && hash && hash[1] && hash[1] != '/') {
        at = find_named(at, "$anchor", hash + 1);
    } else if (at && hash && hash[1]) {
        for (const char *p = hash + 1; at && *p == '/';) {
            size_t n = strcspn(p + 1, "/");
            at = pointer_step(at, p + 1, n);
            p += n + 1;
        }
    }
    if (!at)
        schema_fail(x, ENOTSUP, s, "$ref", "\"%.100s\" names nothing within the schema", ref);
    return at;
}

/* ---- conjunctions ---- */

static bool is_in(const char *const *list, size_t n, const char *word)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(list[i], word))
            return true;
    return false;
}

/* Looks once at each schema object's keywords. */
static void check_keywords(struct schema *x, const json_t *s)
{
    const char *key;
    json_t *v;

    for (size_t i = x->n_checked; i-- > 0 && x->n_checked - i < 64;)
        if (x->checked[i] == s)
            return;
    if (x->n_checked == x->cap_checked) {
        x->cap_checked = MAX(64, 2 * x->cap_checked);
        x->checked = x_realloc(x->checked, x->cap_checked * sizeof *x->checked);
    }
    x->checked[x->n_checked++] = s;
    json_object_foreach((json_t *)s, key, v)
    {
        build_work(x->b, 8);
        if (is_in(refused, ARRAY_LEN(refused), key))
            schema_fail(x, ENOTSUP, s, key, "the keyword is not supported");
    }
    if (json_is_true(json_object_get(s, "uniqueItems")) &&
        !(json_is_integer(json_object_get(s, "maxItems")) &&
          json_integer_value(json_object_get(s, "maxItems")) <= 1))
        schema_fail(x, ENOTSUP, s, "uniqueItems", "the keyword is not supported");
}

void conj_add(struct schema *x, struct conj *c, const json_t *s)
{
    if (json_is_true(s) || c->none || x->b->failed)
        return;
    if (json_is_false(s)) {
        c->none = true;
        return;
    }
    if (!json_is_object(s)) {
        schema_fail(x, EINVAL, s, "", "expected an object, true or false");
        return;
    }
    if (!json_object_size(s))
        return;
    for (size_t i = 0; i < c->n; i++)
        if (c->parts[i].s == s)
            return;
    if (c->n == PARTS_MAX) {
        schema_fail(x, E2BIG, s, "", "more than %d schemas for one value", PARTS_MAX);
        return;
    }
    check_keywords(x, s);
    c->parts[c->n++] = (struct part){.s = s};
}

const json_t *conj_next(const struct conj *c, const char *keyword, size_t *i)
{
    while (*i < c->n) {
        const json_t *v = json_object_get(c->parts[(*i)++].s, keyword);
        if (v)
            return v;
    }
    return NULL;
}

uint32_t conj_count(struct schema *x, const struct conj *c, const char *keyword, bool largest,
                    uint32_t none)
{
    const json_t *v;
    uint32_t best = none;
    bool any = false;

    for (size_t i = 0; (v = conj_next(c, keyword, &i));) {
        double n = json_number_value(v);
        if (!json_is_number(v) || !(n >= 0) || n != (double)(uint64_t)MIN(n, 1e15))
            schema_fail(x, EINVAL, c->parts[i - 1].s, keyword, "expected a count");
        uint32_t count = (uint32_t)MIN(n, 1e9);
        best = !any ? count : largest ? MAX(best, count) : MIN(best, count);
        any = true;
    }
    return best;
}

/* Adds what references and allOf mean. */
static void expand(struct schema *x, struct conj *c)
{
    size_t k;
    json_t *v;

    for (size_t i = 0; i < c->n && !c->none && !x->b->failed; i++) {
        const json_t *s = c->parts[i].s, *all = json_object_get(s, "allOf");
        if (json_object_get(s, "$ref")) {
            const json_t *target = schema_resolve(x, s);
            if (target)
                conj_add(x, c, target);
        }
        if (all && (!json_is_array(all) || !json_array_size(all)))
            schema_fail(x, EINVAL, s, "allOf", "expected a list of schemas");
        json_array_foreach(all, k, v) conj_add(x, c, v);
    }
}

/* ---- choices ---- */

static void check_exclusive(struct schema *x, const json_t *s, const json_t *branches, size_t i)
{
    const json_t *a = json_array_get(branches, i), *b;

    for (size_t k = 0; k < json_array_size(branches) && !x->b->failed; k++) {
        b = json_array_get(branches, k);
        build_work(x->b, 200);
        if (k != i && might_match(x, a, b, 0))
            schema_fail(x, ENOTSUP, s, "oneOf",
                        "what branch %zu allows might satisfy branch %zu as well; use anyOf, or "
                        "make them exclusive",
                        i, k);
    }
}

static struct node *choose(struct schema *x, const struct conj *c, size_t part, unsigned which)
{
    const char *keyword = which == 1 ? "anyOf" : "oneOf";
    const json_t *s = c->parts[part].s, *branches = json_object_get(s, keyword);
    struct list all = {0};

    if (!json_is_array(branches) || !json_array_size(branches))
        return schema_fail(x, EINVAL, s, keyword, "expected a list of schemas");
    for (size_t i = 0; i < json_array_size(branches) && !x->b->failed; i++) {
        struct conj with = *c;
        with.parts[part].chosen |= which;
        if (which == 2)
            check_exclusive(x, s, branches, i);
        conj_add(x, &with, json_array_get(branches, i));
        if (!with.none)
            list_add(x->b, &all, value_node(x, &with));
    }
    struct node *node = node_alt(x->b, all.items, all.n);
    list_free(&all);
    return node;
}

/* ---- values ---- */

unsigned schema_types(struct schema *x, const json_t *s)
{
    static const char *const names[] = {
#define X(name) #name,
        TYPES(X)
#undef X
    };
    const json_t *type = json_object_get(s, "type");
    size_t n = json_is_array(type) ? json_array_size(type) : 1;
    unsigned types = 0;

    if (!type)
        return (1u << TYPE_COUNT) - 1;
    for (size_t i = 0; i < n; i++) {
        const char *word = json_string_value(json_is_array(type) ? json_array_get(type, i) : type);
        unsigned bit = 0;
        for (unsigned k = 0; word && k < TYPE_COUNT; k++)
            if (!strcmp(word, names[k]))
                bit = 1u << k;
        if (!bit)
            schema_fail(x, EINVAL, s, "type", "\"%.40s\" is no type", word ? word : "?");
        types |= bit == TYPE(number) ? bit | TYPE(integer) : bit;
    }
    return types;
}

static struct node *typed(struct schema *x, const struct conj *c)
{
    unsigned types = (1u << TYPE_COUNT) - 1;
    struct node *all[TYPE_COUNT + 1];
    size_t n = 0;

    for (size_t i = 0; i < c->n; i++)
        types &= schema_types(x, c->parts[i].s);
    if (types & TYPE(object))
        all[n++] = object_node(x, c);
    if (types & TYPE(array))
        all[n++] = array_node(x, c);
    if (types & TYPE(string))
        all[n++] = string_node(x, c);
    if (types & (TYPE(number) | TYPE(integer)))
        all[n++] = number_node(x, c, !(types & TYPE(number)));
    if (types & TYPE(boolean)) {
        all[n++] = node_text(x->b, "true");
        all[n++] = node_text(x->b, "false");
    }
    if (types & TYPE(null))
        all[n++] = node_text(x->b, "null");
    return node_alt(x->b, all, n);
}

/* Of the values that one part lists, those that all parts allow. */
static struct node *listed(struct schema *x, const struct conj *c, const json_t *values, bool one)
{
    size_t n = one ? 1 : json_array_size(values);
    struct list all = {0};

    x->listing = values;
    for (size_t i = 0; i < n && !x->b->failed; i++) {
        const json_t *v = one ? values : json_array_get(values, i);
        bool ok = true;
        for (size_t k = 0; k < c->n && ok; k++)
            ok = value_valid(x, c->parts[k].s, v);
        if (ok)
            list_add(x->b, &all, literal_node(x, v));
    }
    x->listing = NULL;
    struct node *node = node_alt(x->b, all.items, all.n);
    list_free(&all);
    return node;
}

static struct node *build_value(struct schema *x, const struct conj *from)
{
    struct conj c = *from;
    const json_t *v;
    size_t i;

    expand(x, &c);
    if (c.none || x->b->failed)
        return node_none(x->b);
    i = 0;
    if ((v = conj_next(&c, "const", &i)))
        return listed(x, &c, v, true);
    i = 0;
    if ((v = conj_next(&c, "enum", &i))) {
        if (!json_is_array(v))
            return schema_fail(x, EINVAL, c.parts[i - 1].s, "enum", "expected a list of values");
        return listed(x, &c, v, false);
    }
    for (i = 0; i < c.n; i++)
        for (unsigned which = 1; which <= 2; which++)
            if (!(c.parts[i].chosen & which) &&
                json_object_get(c.parts[i].s, which == 1 ? "anyOf" : "oneOf"))
                return choose(x, &c, i, which);
    return typed(x, &c);
}

static bool same_conj(const struct conj *a, const struct conj *b)
{
    if (a->n != b->n || a->none != b->none)
        return false;
    for (size_t i = 0; i < a->n; i++)
        if (a->parts[i].s != b->parts[i].s || a->parts[i].chosen != b->parts[i].chosen)
            return false;
    return true;
}

static uint64_t hash_conj(const struct conj *c)
{
    uint64_t h = c->n;

    for (size_t i = 0; i < c->n; i++)
        h = (h ^ (uint64_t)(uintptr_t)c->parts[i].s ^ c->parts[i].chosen) *
            UINT64_C(0x9e3779b97f4a7c15);
    return h ^ h >> 31;
}

/* The place of a conjunction's rule, with a new one (true) if there was none. */
static bool value_rule(struct schema *x, const struct conj *c, size_t *ret)
{
    uint64_t hash = hash_conj(c);

    if (2 * x->n_values >= x->table_size) {
        size_t size = MAX(256, 2 * x->table_size);
        free(x->table);
        x->table = x_alloc(size * sizeof *x->table);
        x->table_size = size;
        for (size_t i = 0; i < x->n_values; i++) {
            size_t at = x->values[i].hash & (size - 1);
            while (x->table[at])
                at = (at + 1) & (size - 1);
            x->table[at] = (uint32_t)i + 1;
        }
    }
    size_t at = hash & (x->table_size - 1);
    for (; x->table[at]; at = (at + 1) & (x->table_size - 1)) {
        *ret = x->table[at] - 1;
        if (x->values[*ret].hash == hash && same_conj(x->values[*ret].key, c))
            return false;
    }
    if (x->n_values == x->cap_values) {
        x->cap_values = MAX(64, 2 * x->cap_values);
        x->values = x_realloc(x->values, x->cap_values * sizeof *x->values);
    }
    struct conj *key = build_alloc(x->b, 1, sizeof *key);
    if (key)
        *key = *c;
    *ret = x->n_values++;
    x->values[*ret] = (struct value_rule){key, hash, build_rule(x->b, NULL, 0)};
    x->table[at] = (uint32_t)x->n_values;
    return key != NULL;
}

struct node *value_node(struct schema *x, const struct conj *c)
{
    size_t at;

    if (c->none || x->b->failed || !build_work(x->b, 50))
        return node_none(x->b);
    if (value_rule(x, c, &at)) {
        if (x->n_values > VALUES_MAX)
            build_fail(x->b, E2BIG, "the schema is too large: more than %d different values",
                       VALUES_MAX);
        if (++x->depth > NESTING_MAX)
            build_fail(x->b, E2BIG, "the schema is nested too deeply");
        struct node *node = build_value(x, c);
        x->depth--;
        build_define(x->b, x->values[at].rule, node);
    }
    return x->b->failed ? node_none(x->b) : node_rule(x->b, x->values[at].rule);
}

/* ---- the whole ---- */

static struct node *default_space(struct build *b)
{
    const struct range indent[] = {{' ', ' '}, {'\t', '\t'}};
    struct node *kids[] = {node_empty(b), node_text(b, " "), NULL};

    kids[2] =
        node_pair(b, node_text(b, "\n"), node_repeat(b, node_chars(b, indent, 2, false), 0, 20));
    uint32_t rule = build_rule(b, NULL, 0);
    build_define(b, rule, node_alt(b, kids, 3));
    return node_rule(b, rule);
}

/* White space of the client's own has to be white space of JSON. */
static struct node *own_space(struct build *b, const char *pattern)
{
    static const struct range white[] = {{'\t', '\n'}, {'\r', '\r'}, {' ', ' '}};
    struct machine *all = machine_of(b, node_repeat(b, node_chars(b, white, 3, false), 0, MANY),
                                     NULL, false),
                   *own = machine_of(b, regex_node(b, pattern, strlen(pattern), REGEX_WHOLE, false),
                                     NULL, false),
                   *more = machine_combine(b, own, all, true);
    if (more)
        build_fail(b, EINVAL, "the white space pattern allows more than JSON's white space");
    struct machine *both = machine_combine(b, own, all, false);
    machine_free(all);
    machine_free(own);
    machine_free(more);
    uint32_t rule = build_rule(b, NULL, 0);
    build_define(b, rule, node_machine(b, both));
    return node_rule(b, rule);
}

/* What nothing satisfies stays an error. */
static struct node *or_other(struct build *b, struct node *value, const char *begins)
{
    struct node *rest = node_repeat(b, any_char(b, false), 0, MANY);

    return value->kind == NODE_NONE
               ? value
               : node_either(b, value, node_pair(b, node_text(b, begins), rest));
}

int grammar_from_schema(const json_t *schema, const struct grammar_json_options *options,
                        struct buffer *out, struct error *err)
{
    struct build b = {.err = err};
    struct schema x = {.b = &b, .root = schema, .compact = options && options->compact};
    struct conj c = {0};

    x.space = x.compact                        ? node_empty(&b)
              : options && options->whitespace ? own_space(&b, options->whitespace)
                                               : default_space(&b);
    conj_add(&x, &c, schema);
    struct node *root = value_node(&x, &c);
    if (options && options->or_begins)
        root = or_other(&b, root, options->or_begins);
    int r = link_program(&b, root, out);
    free(x.values);
    free(x.table);
    free(x.checked);
    build_free(&b);
    return r;
}

int grammar_from_json_object(const struct grammar_json_options *options, struct buffer *out,
                             struct error *err)
{
    json_t *schema = json_pack("{s:s}", "type", "object");

    int r = schema ? grammar_from_schema(schema, options, out, err)
                   : error_set(err, ENOMEM, "no memory for a schema");
    json_decref(schema);
    return r;
}
