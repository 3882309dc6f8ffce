/* SPDX-License-Identifier: Apache-2.0 */
/* tool_choice that forces calls: the JSON Schema that the answer then has to satisfy. */
#ifndef EMBER_DAEMON_GATEWAY_TOOLS_H
#define EMBER_DAEMON_GATEWAY_TOOLS_H

#include <jansson.h>
#include <stdbool.h>

/* The function of `tools` called so, or NULL. */
json_t *tools_find(const json_t *tools, const char *name);

/* The name of the first function, of all or of those called so, whose arguments cannot be an
 * object, or NULL. */
const char *tools_without_object(const json_t *tools, const char *name);

/*
 * With a name: the schema of that function's arguments. Without: of a list of {"name",
 * "parameters"} of any of the functions, with one element when `one`, at least one otherwise. The
 * schemas of the arguments are then definitions, and their references ("#/$defs/x", "#") point to
 * where each is. The caller's.
 */
json_t *tools_schema(const json_t *tools, const char *name, bool one);

#endif
