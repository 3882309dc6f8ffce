/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/tools.h"

#include <errno.h>
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

/* References are from the root: "#/$defs/x". */
static int move_definitions(json_t *from, json_t *root, struct error *err)
{
    static const char *const names[] = {"$defs", "definitions"};
    const char *key;
    json_t *v;

    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        json_t *defs = json_object_get(from, names[i]), *all = json_object_get(root, names[i]);
        if (!json_is_object(defs))
            continue;
        if (!all) {
            all = json_object();
            json_object_set_new(root, names[i], all);
        }
        json_object_foreach(defs, key, v)
        {
            json_t *there = json_object_get(all, key);
            if (there && !json_equal(there, v))
                return error_set(err, EINVAL,
                                 "two functions define \"%.64s\" in %s, and not in the same way",
                                 key, names[i]);
            json_object_set(all, key, v);
        }
        json_object_del(from, names[i]);
    }
    return 0;
}

int tools_schema(const json_t *tools, const char *name, bool one, json_t **ret, struct error *err)
{
    json_t *any = json_array(), *root;
    int r = 0;

    if (name) {
        json_decref(any);
        *ret = parameters_of(tools_find(tools, name));
        return 0;
    }
    root = json_object();
    for (size_t i = 0; i < json_array_size(tools) && r == 0; i++) {
        json_t *function = function_at(tools, i), *parameters = parameters_of(function);
        r = move_definitions(parameters, root, err);
        json_array_append_new(any, json_pack("{s:s, s:{s:{s:O}, s:o}, s:[s, s], s:b}", "type",
                                             "object", "properties", "name", "const",
                                             json_object_get(function, "name"), "parameters",
                                             parameters, "required", "name", "parameters",
                                             "additionalProperties", 0));
    }
    json_object_update_new(root, json_pack("{s:s, s:i, s:{s:o}}", "type", "array", "minItems", 1,
                                           "items", "anyOf", any));
    if (one)
        json_object_set_new(root, "maxItems", json_integer(1));
    if (r < 0) {
        json_decref(root);
        return r;
    }
    *ret = root;
    return 0;
}
