/* SPDX-License-Identifier: Apache-2.0 */
/*
 * JSON Schema to nodes. What holds for a value is a conjunction of schema objects: a schema, what
 * it refers to, the parts of its allOf, and one branch of each anyOf and oneOf. Each different
 * conjunction becomes a rule, so that what refers to itself ends.
 */
#ifndef EMBER_MODEL_GRAMMAR_SCHEMA_H
#define EMBER_MODEL_GRAMMAR_SCHEMA_H

#include <jansson.h>

#include "model/grammar/grammar.h"
#include "model/grammar/internal.h"

#define PARTS_MAX 48
#define VALUES_MAX 20000 /* rules for values */

struct conj {
    struct part {
        const json_t *s;
        unsigned chosen; /* bit 0: its anyOf has been, bit 1: its oneOf */
    } parts[PARTS_MAX];
    size_t n;
    bool none; /* false is among them */
};

struct schema {
    struct build *b;
    const json_t *root;
    bool compact;
    struct node *space; /* where white space may stand */
    struct value_rule {
        struct conj *key;
        uint64_t hash;
        uint32_t rule;
    } * values;
    size_t n_values, cap_values;
    uint32_t *table;
    size_t table_size;
    const json_t **checked; /* schema objects whose keywords have been looked at */
    size_t n_checked, cap_checked;
    unsigned depth;
    struct node *string;   /* any string */
    const json_t *listing; /* the enum whose values are being looked at */
    bool maybe;            /* value_valid: what is perhaps of a format passes */
};

/* Fails the build naming the keyword and its place; returns NODE_NONE. */
struct node *schema_fail(struct schema *x, int errnum, const json_t *s, const char *keyword,
                         const char *format, ...) __attribute__((format(printf, 5, 6)));

void conj_add(struct schema *x, struct conj *c, const json_t *s);
/* The value that satisfies them all: a rule, made if need be. */
struct node *value_node(struct schema *x, const struct conj *c);
/* What a $ref means; NULL when the build has failed. */
const json_t *schema_resolve(struct schema *x, const json_t *s);

/* The keyword of each part that has it: `for (i = 0; (v = conj_next(c, "x", &i));)`. */
const json_t *conj_next(const struct conj *c, const char *keyword, size_t *i);
/* The largest (or least) value of a keyword that is a count; `none` when nobody has it. */
uint32_t conj_count(struct schema *x, const struct conj *c, const char *keyword, bool largest,
                    uint32_t none);

/* Types as bits. */
#define TYPES(X) X(null) X(boolean) X(integer) X(number) X(string) X(array) X(object)
enum {
#define X(name) TYPE_AT_##name,
    TYPES(X)
#undef X
        TYPE_COUNT
};
#define TYPE(name) (1u << TYPE_AT_##name)
unsigned schema_types(struct schema *x, const json_t *s); /* all when it says nothing */

/* ---- schema_object.c ---- */
struct node *object_node(struct schema *x, const struct conj *c);
struct node *array_node(struct schema *x, const struct conj *c);
/* Whether text is found by the pattern. */
bool pattern_matches(struct schema *x, const char *pattern, const char *text, size_t len);

/* ---- schema_value.c ---- */
/* Whether a value satisfies a schema; of formats only a part is known, see x->maybe. */
bool value_valid(struct schema *x, const json_t *s, const json_t *value);
/* A value's text. */
struct node *literal_node(struct schema *x, const json_t *value);
/* Whether some value made from `a` might satisfy `b`: false only when that is certain. */
bool might_match(struct schema *x, const json_t *a, const json_t *b, unsigned depth);

/* ---- schema_number.c ---- */
struct node *number_node(struct schema *x, const struct conj *c, bool integer);

/* ---- schema_string.c ---- */
struct node *string_node(struct schema *x, const struct conj *c);
/* Whether a string is surely of a schema's format, if it has one; with x->maybe, whether perhaps.
 */
bool format_matches(struct schema *x, const json_t *s, const char *text, size_t len);
/* A string's content between its quotes. */
struct node *quoted_node(struct build *b, struct node *content);
/* Any one character that a string holds without an escape. */
struct node *plain_char(struct build *b);

#endif
