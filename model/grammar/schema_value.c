/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/grammar/schema.h"

/* ---- texts of values ---- */

static void write_number(struct buffer *out, const json_t *v)
{
    char text[64];

    if (json_is_integer(v)) {
        buffer_printf(out, "%lld", (long long)json_integer_value(v));
        return;
    }
    for (int precision = 1; precision <= 17; precision++) { /* the shortest that is the same */
        snprintf(text, sizeof text, "%.*g", precision, json_real_value(v));
        if (strtod(text, NULL) == json_real_value(v))
            break;
    }
    buffer_printf(out, "%s%s", text, strpbrk(text, ".e") ? "" : ".0");
}

static void write_value(struct schema *x, struct buffer *out, const json_t *v)
{
    const char *comma = x->compact ? ", " : ",", *key;
    json_t *kid;
    size_t i = 0;

    if (json_is_object(v)) {
        buffer_append(out, "{", 1);
        json_object_foreach((json_t *)v, key, kid)
        {
            json_t *name = json_string(key);
            buffer_printf(out, "%s", i++ ? comma : "");
            write_value(x, out, name);
            buffer_printf(out, x->compact ? ": " : ":");
            write_value(x, out, kid);
            json_decref(name);
        }
        buffer_append(out, "}", 1);
    } else if (json_is_array(v)) {
        buffer_append(out, "[", 1);
        json_array_foreach(v, i, kid)
        {
            buffer_printf(out, "%s", i ? comma : "");
            write_value(x, out, kid);
        }
        buffer_append(out, "]", 1);
    } else if (json_is_number(v)) {
        write_number(out, v);
    } else {
        char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
        if (!text || buffer_append(out, text, strlen(text)) < 0)
            build_fail(x->b, ENOMEM, "no memory for a value");
        free(text);
    }
}

struct node *literal_node(struct schema *x, const json_t *value)
{
    struct buffer text = {0};

    write_value(x, &text, value);
    build_work(x->b, text.len);
    struct node *node = node_bytes(x->b, text.data, text.len);
    buffer_free(&text);
    return node;
}

/* ---- whether a value is valid ---- */

static bool equal(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b))
        return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

static unsigned type_of(const json_t *v)
{
    double d = json_number_value(v);

    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return TYPE(object);
    case JSON_ARRAY:
        return TYPE(array);
    case JSON_STRING:
        return TYPE(string);
    case JSON_INTEGER:
        return TYPE(integer);
    case JSON_REAL:
        return d == floor(d) ? TYPE(integer) : TYPE(number);
    case JSON_NULL:
        return TYPE(null);
    default:
        return TYPE(boolean);
    }
}

static bool has(const json_t *list, const json_t *value)
{
    json_t *v;
    size_t i;

    json_array_foreach(list, i, v) if (equal(v, value)) return true;
    return false;
}

static bool number_valid(const json_t *s, const json_t *value)
{
    double d = json_number_value(value);
    const json_t *v;

    if ((v = json_object_get(s, "minimum")) && d < json_number_value(v))
        return false;
    if ((v = json_object_get(s, "maximum")) && d > json_number_value(v))
        return false;
    if (json_is_number(v = json_object_get(s, "exclusiveMinimum")) && d <= json_number_value(v))
        return false;
    if (json_is_number(v = json_object_get(s, "exclusiveMaximum")) && d >= json_number_value(v))
        return false;
    v = json_object_get(s, "multipleOf");
    return !json_is_number(v) || fmod(d, json_number_value(v)) == 0;
}

static size_t characters(const char *s, size_t n)
{
    size_t count = 0;

    for (size_t i = 0; i < n; i++)
        count += (s[i] & 0xC0) != 0x80;
    return count;
}

static bool within(const json_t *s, const char *least, const char *most, size_t n)
{
    const json_t *min = json_object_get(s, least), *max = json_object_get(s, most);

    return !(min && (double)n < json_number_value(min)) &&
           !(max && (double)n > json_number_value(max));
}

static bool string_valid(struct schema *x, const json_t *s, const json_t *value)
{
    const char *text = json_string_value(value),
               *pattern = json_string_value(json_object_get(s, "pattern"));
    size_t len = json_string_length(value);

    return within(s, "minLength", "maxLength", characters(text, len)) &&
           (!pattern || pattern_matches(x, pattern, text, len)) && format_matches(x, s, text, len);
}

static bool array_valid(struct schema *x, const json_t *s, const json_t *value)
{
    const json_t *items = json_object_get(s, "items"), *rest = items,
                 *prefix = json_object_get(s, "prefixItems");
    json_t *v;
    size_t i;

    if (json_is_array(items)) {
        prefix = items;
        rest = json_object_get(s, "additionalItems");
    }
    json_array_foreach(value, i, v)
    {
        const json_t *own = i < json_array_size(prefix) ? json_array_get(prefix, i) : rest;
        if (own && !value_valid(x, own, v))
            return false;
    }
    return within(s, "minItems", "maxItems", json_array_size(value));
}

static bool property_valid(struct schema *x, const json_t *s, const char *key, const json_t *value)
{
    const json_t *own = json_object_get(json_object_get(s, "properties"), key),
                 *more = json_object_get(s, "additionalProperties");
    bool known = own != NULL, ok = !own || value_valid(x, own, value);
    const char *pattern;
    json_t *v;

    json_object_foreach(json_object_get(s, "patternProperties"), pattern, v)
    {
        if (!pattern_matches(x, pattern, key, strlen(key)))
            continue;
        known = true;
        ok = ok && value_valid(x, v, value);
    }
    return ok && (known || !more || value_valid(x, more, value));
}

static bool object_valid(struct schema *x, const json_t *s, const json_t *value)
{
    const json_t *names = json_object_get(s, "propertyNames");
    const char *key;
    json_t *v;
    size_t i;

    json_array_foreach(json_object_get(s, "required"), i, v)
    {
        if (!json_is_string(v) || !json_object_get(value, json_string_value(v)))
            return false;
    }
    json_object_foreach((json_t *)value, key, v)
    {
        json_t *name = json_string(key);
        bool ok = property_valid(x, s, key, v) && (!names || value_valid(x, names, name));
        json_decref(name);
        if (!ok)
            return false;
    }
    return within(s, "minProperties", "maxProperties", json_object_size(value));
}

static size_t count_valid(struct schema *x, const json_t *list, const json_t *value, bool maybe)
{
    bool before = x->maybe;
    size_t i, n = 0;
    json_t *v;

    x->maybe = maybe;
    json_array_foreach(list, i, v) n += value_valid(x, v, value);
    x->maybe = before;
    return n;
}

/* Of formats it is only known what is certainly of them, which is not enough to count with. */
static bool one_valid(struct schema *x, const json_t *list, const json_t *value)
{
    size_t surely = count_valid(x, list, value, false), perhaps = count_valid(x, list, value, true);

    return x->maybe ? surely <= 1 && perhaps : surely == 1 && perhaps == 1;
}

static bool combined_valid(struct schema *x, const json_t *s, const json_t *value)
{
    const json_t *one = json_object_get(s, "oneOf"), *any = json_object_get(s, "anyOf");
    size_t i;
    json_t *v;

    json_array_foreach(json_object_get(s, "allOf"), i, v)
    {
        if (!value_valid(x, v, value))
            return false;
    }
    if ((any && !count_valid(x, any, value, x->maybe)) || (one && !one_valid(x, one, value)))
        return false;
    const json_t *target = json_object_get(s, "$ref") ? schema_resolve(x, s) : NULL;
    return !target || value_valid(x, target, value);
}

bool value_valid(struct schema *x, const json_t *s, const json_t *value)
{
    const json_t *v;
    bool ok;

    if (!json_is_object(s) || x->b->failed || !build_work(x->b, 20))
        return !json_is_false(s);
    if (++x->depth > NESTING_MAX)
        build_fail(x->b, E2BIG, "the schema is nested too deeply");
    ok = (schema_types(x, s) & type_of(value)) != 0;
    if ((v = json_object_get(s, "const")))
        ok = ok && equal(v, value);
    if ((v = json_object_get(s, "enum")) && v != x->listing)
        ok = ok && has(v, value);
    if (ok && json_is_number(value))
        ok = number_valid(s, value);
    else if (ok && json_is_string(value))
        ok = string_valid(x, s, value);
    else if (ok && json_is_array(value))
        ok = array_valid(x, s, value);
    else if (ok && json_is_object(value))
        ok = object_valid(x, s, value);
    ok = ok && !x->b->failed && combined_valid(x, s, value);
    x->depth--;
    return ok;
}

/* ---- whether two schemas can share a value that is made ---- */

static const json_t *property_of(const json_t *s, const char *name)
{
    return json_object_get(json_object_get(s, "properties"), name);
}

static bool requires(const json_t *s, const char *name)
{
    json_t *v;
    size_t i;

    json_array_foreach(json_object_get(s, "required"), i, v)
    {
        if (json_is_string(v) && !strcmp(json_string_value(v), name))
            return true;
    }
    return false;
}

/* Whether a, an object of its own `properties`, may make this one (see object_node). */
static bool makes(const json_t *a, const char *name)
{
    return property_of(a, name) || requires(a, name) || json_object_get(a, "patternProperties") ||
           json_object_get(a, "additionalProperties") || !json_object_get(a, "properties") ||
           json_object_get(a, "allOf") || json_object_get(a, "anyOf") ||
           json_object_get(a, "oneOf") || json_object_get(a, "$ref");
}

static bool objects_might_match(struct schema *x, const json_t *a, const json_t *b, unsigned depth)
{
    bool closed = json_is_false(json_object_get(b, "additionalProperties")) &&
                  !json_object_get(b, "patternProperties");
    const char *key;
    json_t *v;
    size_t i;

    json_array_foreach(json_object_get(b, "required"), i, v)
    {
        const char *name = json_string_value(v);
        const json_t *of_a = name ? property_of(a, name) : NULL,
                     *of_b = name ? property_of(b, name) : NULL;
        if (name && (!makes(a, name) || json_is_false(of_a) ||
                     (of_a && of_b && !might_match(x, of_a, of_b, depth + 1))))
            return false;
    }
    json_array_foreach(json_object_get(a, "required"), i, v)
    {
        const char *name = json_string_value(v);
        if (name && closed && !property_of(b, name))
            return false;
    }
    json_object_foreach(json_object_get(b, "properties"), key, v)
    {
        const json_t *of_a = property_of(a, key);
        if (requires(a, key) && of_a && !might_match(x, of_a, v, depth + 1))
            return false;
    }
    return true;
}

static bool listed_might_match(struct schema *x, const json_t *s, const json_t *other, bool *ret)
{
    const json_t *one = json_object_get(s, "const"), *list = json_object_get(s, "enum");
    json_t *v;
    size_t i;

    *ret = false;
    x->maybe = true;
    if (one)
        *ret = value_valid(x, other, one);
    else
        json_array_foreach(list, i, v) *ret |= value_valid(x, s, v) && value_valid(x, other, v);
    x->maybe = false;
    return one || list;
}

static bool numbers_apart(const json_t *a, const json_t *b)
{
    const json_t *max = json_object_get(a, "maximum"), *min = json_object_get(b, "minimum"),
                 *below = json_object_get(a, "exclusiveMaximum"),
                 *above = json_object_get(b, "exclusiveMinimum");
    double top = json_number_value(max ? max : below), least = json_number_value(min ? min : above);

    return (max || below) && (min || above) && (top < least || (top == least && (!max || !min)));
}

static bool branches_might_match(struct schema *x, const json_t *branches, const json_t *other,
                                 bool first, unsigned depth)
{
    json_t *v;
    size_t i;

    json_array_foreach(branches, i, v)
    {
        if (first ? might_match(x, v, other, depth) : might_match(x, other, v, depth))
            return true;
    }
    return !branches;
}

/* What a schema refers to and the parts of its allOf only narrow it. */
static bool narrowed_apart(struct schema *x, const json_t *a, const json_t *b, unsigned depth)
{
    const json_t *target;
    json_t *v;
    size_t i;

    if (json_object_get(a, "$ref") && (target = schema_resolve(x, a)) &&
        !might_match(x, target, b, depth))
        return true;
    if (json_object_get(b, "$ref") && (target = schema_resolve(x, b)) &&
        !might_match(x, a, target, depth))
        return true;
    json_array_foreach(json_object_get(a, "allOf"), i, v)
    {
        /* one part alone may make more than all together do: only types and lists tell */
        if (!json_object_get(v, "properties") && !might_match(x, v, b, depth))
            return true;
    }
    json_array_foreach(json_object_get(b, "allOf"), i, v)
    {
        if (!might_match(x, a, v, depth))
            return true;
    }
    return !branches_might_match(x, json_object_get(a, "anyOf"), b, true, depth) ||
           !branches_might_match(x, json_object_get(a, "oneOf"), b, true, depth) ||
           !branches_might_match(x, json_object_get(b, "anyOf"), a, false, depth) ||
           !branches_might_match(x, json_object_get(b, "oneOf"), a, false, depth);
}

bool might_match(struct schema *x, const json_t *a, const json_t *b, unsigned depth)
{
    bool listed;

    if (json_is_false(a) || json_is_false(b))
        return false;
    if (!json_is_object(a) || !json_is_object(b) || depth > 12 || !build_work(x->b, 100))
        return true;
    unsigned shared = schema_types(x, a) & schema_types(x, b);
    if (!shared)
        return false;
    if (listed_might_match(x, a, b, &listed) || listed_might_match(x, b, a, &listed))
        return listed;
    if (!(shared & ~(TYPE(number) | TYPE(integer))) && (numbers_apart(a, b) || numbers_apart(b, a)))
        return false;
    if (shared == TYPE(object) && !objects_might_match(x, a, b, depth))
        return false;
    return !narrowed_apart(x, a, b, depth + 1);
}
