/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/tools.h"

#include <string.h>

#include "base/mem.h"

static json_t *function_at(const json_t *tools, size_t i)
{
    return json_object_get(json_array_get(tools, i), "function");
}

json_t *tools_find(const json_t *tools, const char *name)
{
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const char *s = json_string_value(json_object_get(function_at(tools, i), "name"));
        if (s && !strcmp(s, name))
            return function_at(tools, i);
    }
    return NULL;
}

static bool says_object(const json_t *type)
{
    const char *word = json_string_value(type);
    bool any = false;

    for (size_t i = 0; i < json_array_size(type); i++)
        any |= says_object(json_array_get(type, i));
    return !type || any || (word && !strcmp(word, "object"));
}

const char *tools_without_object(const json_t *tools, const char *name)
{
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const char *own = json_string_value(json_object_get(function_at(tools, i), "name"));
        const json_t *parameters = json_object_get(function_at(tools, i), "parameters");
        if ((!name || (own && !strcmp(own, name))) &&
            !says_object(json_object_get(parameters, "type")))
            return own;
    }
    return NULL;
}

/* A copy of the schema of a function's arguments; without one, any object. */
static json_t *parameters_of(const json_t *function)
{
    json_t *schema = json_deep_copy(json_object_get(function, "parameters"));

    if (!json_is_object(schema)) {
        json_decref(schema);
        schema = json_object();
    }
    if (!json_object_get(schema, "type"))
        json_object_set_new(schema, "type", json_string("object"));
    return schema;
}

static bool is_one_of(const char *word, const char *const *words, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(word, words[i]))
            return true;
    return false;
}

/*
 * References are from the root, "#" or "#/$defs/x": they follow the schema to where it is now.
 * `named`: the members' keys are names and no keywords.
 */
static void move_references(json_t *schema, bool named, const char *root)
{
    static const char *const names[] = {"properties", "patternProperties", "$defs", "definitions"},
                             *const values[] = {"const", "enum", "default", "examples"};
    const char *key;
    json_t *v;
    size_t i;

    json_array_foreach(schema, i, v) move_references(v, false, root);
    json_object_foreach(schema, key, v)
    {
        const char *to = !named && !strcmp(key, "$ref") ? json_string_value(v) : NULL;
        if (to && *to == '#') {
            _cleanup_free_ char *moved = x_printf("%s%s", root, to + 1);
            json_string_set(v, moved);
        } else if (named || !is_one_of(key, values, ARRAY_LEN(values))) {
            move_references(v, !named && is_one_of(key, names, ARRAY_LEN(names)), root);
        }
    }
}

json_t *tools_schema(const json_t *tools, const char *name, bool one)
{
    json_t *any = json_array(), *definitions = json_object(), *root;

    if (name) {
        json_decref(any);
        json_decref(definitions);
        return parameters_of(tools_find(tools, name));
    }
    for (size_t i = 0; i < json_array_size(tools); i++) {
        json_t *function = function_at(tools, i), *parameters = parameters_of(function);
        _cleanup_free_ char *at = x_printf("#/$defs/tool%zu", i);
        move_references(parameters, false, at);
        json_object_set_new(definitions, at + strlen("#/$defs/"), parameters);
        json_array_append_new(any, json_pack("{s:s, s:{s:{s:O}, s:{s:s}}, s:[s, s], s:b}", "type",
                                             "object", "properties", "name", "const",
                                             json_object_get(function, "name"), "parameters",
                                             "$ref", at, "required", "name", "parameters",
                                             "additionalProperties", 0));
    }
    root = json_pack("{s:o, s:s, s:i, s:{s:o}}", "$defs", definitions, "type", "array", "minItems",
                     1, "items", "anyOf", any);
    if (one)
        json_object_set_new(root, "maxItems", json_integer(1));
    return root;
}
