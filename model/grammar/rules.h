/* SPDX-License-Identifier: Apache-2.0 */
/* What reading EBNF and reading Lark have in common. */
#ifndef EMBER_MODEL_GRAMMAR_RULES_H
#define EMBER_MODEL_GRAMMAR_RULES_H

#include "model/grammar/internal.h"

/* A grammar's text, being read at `at`. */
struct rules {
    struct build *b;
    const char *s;
    size_t n, at;
    const char *comment; /* what begins one; it ends with the line */
    unsigned lines;      /* 0: new lines are no white space */
    unsigned nesting;
    bool terminal;    /* lark.c: what is being defined */
    struct node *gap; /* lark.c: what %ignore allows, or NULL */
};

/* Fails the build, naming line and column. */
void rules_wrong(struct rules *x, int errnum, const char *what);
/* White space and comments. */
void rules_skip(struct rules *x);
/* Behind them: the text, if it stands there, is passed. */
bool rules_take(struct rules *x, const char *text);
/* Behind them: a number, at most a billion; false: there is none. */
bool rules_number(struct rules *x, uint32_t *ret);
/* The rule of that name, new if need be. */
uint32_t rules_named(struct rules *x, const char *name, size_t len);
/* Behind a backslash and `c`: letters, \xHH, \uHHHH, \UHHHHHHHH. False: it is none of them. */
bool rules_escape(struct rules *x, uint32_t c, uint32_t *ret);
/* Takes *, + or ? behind a node. */
bool rules_repeat(struct rules *x, struct node **node);

#endif
