/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parsing a request: openai.c has the table of fields, openai_structured.c those that say what the
 * text has to keep to, openai_values.c what all of them use.
 */
#ifndef EMBER_DAEMON_GATEWAY_OPENAI_PRIVATE_H
#define EMBER_DAEMON_GATEWAY_OPENAI_PRIVATE_H

#include "daemon/gateway/openai.h"

/* The parser's state: the first failure stays. */
struct parse {
    struct api_request *r;
    struct api_error *fail;
    const char *name; /* of the field */
    json_t *value;
};

/* ---- openai_values.c ---- */

/* The field is wrong: 400, naming it. */
void parse_bad(struct parse *p, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The field's value; something harmless behind parse_bad when it is another type or out of range.
 * An integer may be written 3.0. */
double parse_number(struct parse *p, double min, double max);
int64_t parse_integer(struct parse *p, int64_t min, int64_t max);
bool parse_boolean(struct parse *p);
const char *parse_string(struct parse *p);
/* An array of token ids into *ret, owned. */
void parse_ids(struct parse *p, json_t *array, uint32_t **ret, size_t *ret_n);

/* ---- openai_structured.c ---- */

/* A schema: an object, a truth value, or the same as text. */
void parse_schema(struct parse *p, json_t *schema);
/* A pattern or a grammar. */
void parse_grammar_text(struct parse *p, enum api_grammar_kind kind, json_t *text);
void parse_choice(struct parse *p, json_t *list);
void parse_response_format(struct parse *p);
void parse_structured_outputs(struct parse *p);
void parse_tool_choice(struct parse *p);
void parse_tools(struct parse *p);
/* Behind all fields: a call is wanted whatever the model would say, so a schema makes it. */
void parse_forced_calls(struct parse *p);

#endif
