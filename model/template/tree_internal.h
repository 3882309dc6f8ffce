/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A compiled template: a tree whose names are resolved as Jinja2 compiles them. Each scope (the
 * template, a macro's, loop's or captured block's body) has slots that are filled when it is
 * entered, from the context, from an outer slot, or with nothing; scope.c decides which.
 */
#ifndef EMBER_MODEL_TEMPLATE_TREE_INTERNAL_H
#define EMBER_MODEL_TEMPLATE_TREE_INTERNAL_H

#include "model/template/value_internal.h"

enum node_kind {
    /* expressions */
    N_CONST,
    N_NAME,
    N_NSREF,
    N_TUPLE,
    N_LIST,
    N_DICT, /* kids: key, value, key, value, ... */
    N_NEG,
    N_POS,
    N_NOT,
    N_AND,
    N_OR,
    N_BINARY,
    N_CONCAT,
    N_COMPARE, /* a, then kids: N_OPERAND */
    N_OPERAND,
    N_COND, /* b if a else c */
    N_GETATTR,
    N_GETITEM,
    N_SLICE,
    N_CALL,   /* a(kids, extra, *b, **c) */
    N_FILTER, /* the same; a is NULL for the captured text */
    N_TEST,
    N_KEYWORD,
    /* statements */
    N_DATA,
    N_PRINT,
    N_IF,         /* a; body; kids: N_IF for elif; els */
    N_FOR,        /* a in b if c; d: the target again, for the filter's scope */
    N_SET,        /* a = b */
    N_SETBLOCK,   /* a, filter b */
    N_MACRO,      /* a: the name; kids: parameters, extra: their defaults */
    N_CALLBLOCK,  /* b: the call */
    N_GENERATION, /* its body is a scope of its own */
    N_FILTERBLOCK,
    N_WITH, /* kids = extra */
    N_BLOCK,
    N_BREAK,
    N_CONTINUE
};

enum name_ctx { CTX_LOAD, CTX_STORE, CTX_PARAM };

struct nodes {
    struct node **v;
    size_t n, cap;
};

struct node {
    uint8_t kind, op, ctx;
    bool flag; /* FOR: recursive; MACRO, CALLBLOCK: uses caller */
    bool varargs, kwargs;
    bool toplevel; /* SET and friends: also written to the context */
    uint32_t line;
    struct str *name;
    struct node *a, *b, *c, *d;
    struct nodes kids, extra, body, els;
    struct value value;   /* N_CONST, N_DATA */
    uint32_t depth, slot; /* N_NAME, N_NSREF */
    uint32_t caller_slot, varargs_slot, kwargs_slot;
    struct scope *scope, *test_scope, *else_scope;
    const struct builtin *builtin; /* N_FILTER, N_TEST; NULL: no such */
};

enum slot_load { LOAD_PARAM, LOAD_RESOLVE, LOAD_ALIAS, LOAD_UNDEFINED };
struct slot {
    struct str *name;
    enum slot_load load;
    uint32_t depth, slot; /* LOAD_ALIAS: where from */
    bool stored;
};
struct scope {
    struct scope *parent;
    struct slot *v;
    size_t n, cap;
};

#endif
