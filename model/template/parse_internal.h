/* SPDX-License-Identifier: Apache-2.0 */
/* From a template's text to its tree: lex.c, parse_expr.c, parse_stmt.c, scope.c. */
#ifndef EMBER_MODEL_TEMPLATE_PARSE_INTERNAL_H
#define EMBER_MODEL_TEMPLATE_PARSE_INTERNAL_H

#include "model/template/internal.h"

enum token_type {
    TOK_DATA,
    TOK_VAR_BEGIN,
    TOK_VAR_END,
    TOK_BLOCK_BEGIN,
    TOK_BLOCK_END,
    TOK_NAME,
    TOK_STRING,
    TOK_INT,
    TOK_FLOAT,
    TOK_OP,
    TOK_EOF
};
enum token_op {
    O_ADD,
    O_SUB,
    O_MUL,
    O_DIV,
    O_FLOORDIV,
    O_MOD,
    O_POW,
    O_TILDE,
    O_EQ,
    O_NE,
    O_LT,
    O_LE,
    O_GT,
    O_GE,
    O_ASSIGN,
    O_DOT,
    O_COLON,
    O_COMMA,
    O_PIPE,
    O_SEMI,
    O_LPAREN,
    O_RPAREN,
    O_LBRACKET,
    O_RBRACKET,
    O_LBRACE,
    O_RBRACE
};
struct token {
    uint8_t type, op;
    uint32_t line;
    struct value value; /* DATA, NAME, STRING, INT, FLOAT */
};
struct tokens {
    struct token *v;
    size_t n, cap;
};
/* The tokens of a text (valid UTF-8), ended by TOK_EOF; white space is trimmed as Jinja2 does it
 * with trim_blocks and lstrip_blocks. */
void lex(struct run *r, const char *text, size_t len, struct tokens *ret);

struct parser {
    struct run *r;
    struct token *at;
    bool soft;           /* within an if: unknown filters fail when they are reached */
    uint32_t loops;      /* for statements around */
    struct nodes blocks; /* so far: their names differ */
};
/* ---- parse_expr.c ---- */

struct node *node_new(struct parser *p, enum node_kind kind, uint32_t line);
void nodes_add(struct parser *p, struct nodes *list, struct node *n);

/* Whether the next token is this; skip_ takes it when it is, expect_ fails when it is not. */
bool at_op(const struct parser *p, enum token_op op);
bool at_name(const struct parser *p, const char *name);
bool skip_op(struct parser *p, enum token_op op);
bool skip_name(struct parser *p, const char *name);
void expect_op(struct parser *p, enum token_op op);
void expect_name(struct parser *p, const char *name);
/* Takes a name, any. */
struct str *take_name(struct parser *p);
/* "expected WANTED, got what is there". */
void fail_token(struct parser *p, const char *wanted) __attribute__((noreturn));

struct node *parse_expression(struct parser *p);
/* One expression, or several with commas as a tuple. condexpr: they may be `a if b else c`. end: a
 * name that ends it, or NULL. parentheses: nothing at all is the empty tuple. */
struct node *parse_tuple(struct parser *p, bool condexpr, const char *end, bool parentheses);
/* What is assigned to: a name, a tuple of them, and with_namespace also NAME.ATTRIBUTE. */
struct node *parse_target(struct parser *p, const char *end, bool with_namespace);
/* The filters behind n (NULL: a captured text); start: the first one stands here without a |. */
struct node *parse_filters(struct parser *p, struct node *n, bool start);

/* ---- parse_stmt.c, scope.c ---- */

/* The root, whose body is the template; names are not resolved yet. */
struct node *parse_template(struct run *r, struct token *tokens);
/* Gives each name of the tree its slot, and each body its scope. */
void resolve_names(struct run *r, struct node *root);

#endif
