/* SPDX-License-Identifier: Apache-2.0 */
/* What the text has to keep to: response_format and its like, and calls of tools. */
#include "daemon/gateway/openai_private.h"

#include <stdlib.h>
#include <string.h>

#include "daemon/gateway/tools.h"

/* ---- structured output ---- */

static struct api_grammar *ask_grammar(struct parse *p, enum api_grammar_kind kind)
{
    struct api_grammar *g = &p->r->grammar;

    if (g->kind != API_GRAMMAR_NONE)
        parse_bad(p, "only one of json, regex, choice, grammar and json_object, and in one field");
    g->kind = kind;
    g->field = p->name;
    return g;
}

/* An object, a truth value, or the same as text. */
void parse_schema(struct parse *p, json_t *schema)
{
    struct api_grammar *g = ask_grammar(p, API_GRAMMAR_SCHEMA);

    if (json_is_string(schema) && !g->owned) {
        g->owned = json_loadb(json_string_value(schema), json_string_length(schema),
                              JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, NULL);
        schema = g->owned;
    }
    if (!json_is_object(schema) && !json_is_boolean(schema))
        parse_bad(p, "expected a JSON Schema: an object, or its text");
    g->spec = schema;
}

void parse_grammar_text(struct parse *p, enum api_grammar_kind kind, json_t *text)
{
    if (!json_is_string(text) || !json_string_length(text))
        parse_bad(p, "expected a text");
    ask_grammar(p, kind)->spec = text;
}

void parse_choice(struct parse *p, json_t *list)
{
    if (!json_is_array(list) || !json_array_size(list))
        parse_bad(p, "expected a list of texts");
    ask_grammar(p, API_GRAMMAR_CHOICE)->spec = list;
}

void parse_response_format(struct parse *p)
{
    const char *type = json_string_value(json_object_get(p->value, "type"));
    json_t *of = json_object_get(p->value, "json_schema"), *schema = json_object_get(of, "schema");

    if (type && !strcmp(type, "json_object"))
        ask_grammar(p, API_GRAMMAR_OBJECT);
    else if (type && !strcmp(type, "json_schema") && schema)
        parse_schema(p, schema);
    else if (type && !strcmp(type, "json_schema"))
        parse_bad(p, "expected {\"type\": \"json_schema\", \"json_schema\": {\"schema\": {...}}}");
    else if (!type || strcmp(type, "text"))
        parse_bad(p, "only the types \"text\", \"json_object\" and \"json_schema\" are supported");
}

static void one_structured(struct parse *p, const char *key, json_t *v)
{
    struct api_grammar *g = &p->r->grammar;

    if (!strcmp(key, "json"))
        parse_schema(p, v);
    else if (!strcmp(key, "regex"))
        parse_grammar_text(p, API_GRAMMAR_REGEX, v);
    else if (!strcmp(key, "choice"))
        parse_choice(p, v);
    else if (!strcmp(key, "grammar"))
        parse_grammar_text(p, API_GRAMMAR_RULES, v);
    else if (!strcmp(key, "json_object") && json_is_true(v))
        ask_grammar(p, API_GRAMMAR_OBJECT);
    else if (!strcmp(key, "whitespace_pattern") && json_is_string(v))
        g->whitespace = json_string_value(v);
    else if (!strcmp(key, "disable_any_whitespace"))
        g->compact = json_is_true(v);
    else if (strcmp(key, "disable_fallback") && strcmp(key, "backend") && !json_is_false(v))
        parse_bad(p, "%.64s is not supported", key);
}

void parse_structured_outputs(struct parse *p)
{
    enum api_grammar_kind before = p->r->grammar.kind;
    const char *key;
    json_t *v;

    if (!json_is_object(p->value))
        parse_bad(p, "expected an object");
    json_object_foreach(p->value, key, v)
    {
        if (!json_is_null(v))
            one_structured(p, key, v);
    }
    if (p->r->grammar.kind == API_GRAMMAR_NONE || p->r->grammar.kind == before)
        parse_bad(p, "expected one of json, regex, choice, grammar and json_object");
}

/* ---- tools ---- */

void parse_tool_choice(struct parse *p)
{
    const char *choice = json_string_value(p->value);
    json_t *function = json_object_get(p->value, "function");

    if (json_is_object(p->value)) {
        p->r->tool_choice = API_TOOLS_NAMED;
        p->r->tool_name = json_string_value(json_object_get(function, "name"));
        if (!p->r->tool_name)
            parse_bad(p, "expected {\"type\": \"function\", \"function\": {\"name\": ...}}");
    } else if (choice && !strcmp(choice, "none")) {
        p->r->tool_choice = API_TOOLS_NONE;
    } else if (choice && !strcmp(choice, "required")) {
        p->r->tool_choice = API_TOOLS_REQUIRED;
    } else if (!choice || strcmp(choice, "auto")) {
        parse_bad(p, "expected \"none\", \"auto\", \"required\" or one of the tools");
    }
}

void parse_tools(struct parse *p)
{
    size_t i;
    json_t *tool;

    if (!json_is_array(p->value)) {
        parse_bad(p, "expected a list");
        return;
    }
    json_array_foreach(p->value, i, tool)
    {
        json_t *function = json_object_get(tool, "function");
        json_t *parameters = json_object_get(function, "parameters");
        if (!json_string_length(json_object_get(function, "name")))
            parse_bad(
                p, "element %zu is not {\"type\": \"function\", \"function\": {\"name\": ...}}", i);
        else if (parameters && !json_is_object(parameters) && !json_is_null(parameters))
            parse_bad(p, "the parameters of element %zu are no JSON schema", i);
    }
    if (json_array_size(p->value))
        p->r->tools = p->value;
}

/* A call is wanted whatever the model would say: a schema makes it. */
void parse_forced_calls(struct parse *p)
{
    struct api_request *r = p->r;
    const char *name;
    json_t *schema;

    p->name = "tool_choice";
    if (r->tool_choice != API_TOOLS_REQUIRED && r->tool_choice != API_TOOLS_NAMED)
        return;
    if (!r->tools)
        parse_bad(p, "needs tools");
    else if (r->tool_name && !tools_find(r->tools, r->tool_name))
        parse_bad(p, "there is no tool \"%.64s\"", r->tool_name);
    else if (r->grammar.kind != API_GRAMMAR_NONE)
        parse_bad(p, "cannot force a call beside %s", r->grammar.field);
    else if ((name = tools_without_object(r->tools, r->tool_name)))
        parse_bad(p, "the parameters of \"%.64s\" are no object's", name);
    if (p->fail->status)
        return;
    schema = tools_schema(r->tools, r->tool_name, !r->parallel_calls);
    r->grammar = (struct api_grammar){
        .kind = API_GRAMMAR_SCHEMA, .spec = schema, .owned = schema, .field = p->name};
}
