/* SPDX-License-Identifier: Apache-2.0 */
/* Expressions, with Jinja2's precedences. */
#include "model/template/parse_internal.h"

static struct node *parse_or(struct parser *p);

static const char *op_text(uint8_t op)
{
    static const char *const text[] = {
        "+",  "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">",
        ">=", "=", ".", ":", ",",  "|", ";",  "(", ")",  "[",  "]", "{",  "}"};
    return text[op];
}

struct node *node_new(struct parser *p, enum node_kind kind, uint32_t line)
{
    struct node *n = arena(p->r, 1, sizeof *n);
    n->kind = (uint8_t)kind;
    n->line = line;
    return n;
}

void nodes_add(struct parser *p, struct nodes *list, struct node *n)
{
    if (list->n == list->cap) {
        size_t cap = MAX((size_t)4, list->cap * 2);
        struct node **grown = arena(p->r, cap, sizeof(struct node *));
        if (list->n)
            memcpy(grown, list->v, list->n * sizeof(struct node *));
        list->v = grown;
        list->cap = cap;
    }
    list->v[list->n++] = n;
}

/* --- Tokens --- */

bool at_op(const struct parser *p, enum token_op op)
{
    return p->at->type == TOK_OP && p->at->op == op;
}

bool at_name(const struct parser *p, const char *name)
{
    return p->at->type == TOK_NAME && str_is(p->at->value.s, name);
}

bool skip_op(struct parser *p, enum token_op op)
{
    bool is = at_op(p, op);
    p->at += is;
    return is;
}

bool skip_name(struct parser *p, const char *name)
{
    bool is = at_name(p, name);
    p->at += is;
    return is;
}

void fail_token(struct parser *p, const char *wanted)
{
    static const char *const kinds[] = {"template data",
                                        "begin of print statement",
                                        "end of print statement",
                                        "begin of statement block",
                                        "end of statement block",
                                        "name",
                                        "a string",
                                        "a number",
                                        "a number",
                                        "operator",
                                        "end of template"};
    const struct token *t = p->at;
    p->r->line = t->line;
    if (t->type == TOK_NAME)
        run_fail(p->r, "expected %s, got '%.*s'", wanted, (int)MIN(t->value.s->len, (size_t)100),
                 t->value.s->data);
    if (t->type == TOK_OP)
        run_fail(p->r, "expected %s, got '%s'", wanted, op_text(t->op));
    run_fail(p->r, "expected %s, got %s", wanted, kinds[t->type]);
}

void expect_op(struct parser *p, enum token_op op)
{
    char wanted[8] = "''";
    if (skip_op(p, op))
        return;
    wanted[0] = '\'';
    strcpy(wanted + 1, op_text(op));
    strcat(wanted, "'");
    fail_token(p, wanted);
}

void expect_name(struct parser *p, const char *name)
{
    if (!skip_name(p, name))
        fail_token(p, name);
}

struct str *take_name(struct parser *p)
{
    if (p->at->type != TOK_NAME)
        fail_token(p, "a name");
    return (p->at++)->value.s;
}

/* --- Primaries --- */

static struct node *constant(struct parser *p, struct value v)
{
    struct node *n = node_new(p, N_CONST, p->at->line);
    n->value = v;
    p->at++;
    return n;
}

static struct node *parse_string(struct parser *p)
{
    struct node *n = constant(p, p->at->value);
    for (; p->at->type == TOK_STRING; p->at++)
        n->value = v_str(str_cat(p->r, n->value.s, p->at->value.s));
    str_freeze(n->value.s);
    return n;
}

/* Whether another item stands before `close`, with a comma in front if it is not the first. */
static bool another(struct parser *p, const struct node *n, enum token_op close)
{
    if (n->kids.n && !at_op(p, close))
        expect_op(p, O_COMMA);
    return !at_op(p, close);
}

static struct node *parse_list(struct parser *p)
{
    struct node *n = node_new(p, N_LIST, p->at->line);
    expect_op(p, O_LBRACKET);
    while (another(p, n, O_RBRACKET))
        nodes_add(p, &n->kids, parse_expression(p));
    expect_op(p, O_RBRACKET);
    return n;
}

static struct node *parse_dict(struct parser *p)
{
    struct node *n = node_new(p, N_DICT, p->at->line);
    expect_op(p, O_LBRACE);
    while (another(p, n, O_RBRACE)) {
        nodes_add(p, &n->kids, parse_expression(p));
        expect_op(p, O_COLON);
        nodes_add(p, &n->kids, parse_expression(p));
    }
    expect_op(p, O_RBRACE);
    return n;
}

static struct node *parse_name(struct parser *p, bool with_namespace)
{
    if (at_name(p, "true") || at_name(p, "True"))
        return constant(p, v_bool(true));
    if (at_name(p, "false") || at_name(p, "False"))
        return constant(p, v_bool(false));
    if (at_name(p, "none") || at_name(p, "None"))
        return constant(p, v_none());
    struct node *n = node_new(p, N_NAME, p->at->line);
    n->name = take_name(p);
    if (with_namespace && skip_op(p, O_DOT)) {
        n->kind = N_NSREF;
        n->value = v_str(take_name(p));
    }
    return n;
}

static struct node *parse_primary(struct parser *p, bool with_namespace)
{
    struct node *n;
    switch (p->at->type) {
    case TOK_NAME:
        return parse_name(p, with_namespace);
    case TOK_STRING:
        return parse_string(p);
    case TOK_INT:
    case TOK_FLOAT:
        return constant(p, p->at->value);
    }
    if (at_op(p, O_LBRACKET))
        return parse_list(p);
    if (at_op(p, O_LBRACE))
        return parse_dict(p);
    if (!skip_op(p, O_LPAREN))
        fail_token(p, "an expression");
    n = parse_tuple(p, true, NULL, true);
    expect_op(p, O_RPAREN);
    return n;
}

static bool tuple_end(struct parser *p, const char *end)
{
    return p->at->type == TOK_VAR_END || p->at->type == TOK_BLOCK_END || at_op(p, O_RPAREN) ||
           (end && at_name(p, end));
}

struct node *parse_tuple(struct parser *p, bool condexpr, const char *end, bool parentheses)
{
    struct node *t = node_new(p, N_TUPLE, p->at->line);
    bool is_tuple = false;
    for (;;) {
        if (t->kids.n)
            expect_op(p, O_COMMA);
        if (tuple_end(p, end))
            break;
        nodes_add(p, &t->kids, condexpr ? parse_expression(p) : parse_or(p));
        if (!at_op(p, O_COMMA))
            break;
        is_tuple = true;
    }
    if (is_tuple)
        return t;
    if (t->kids.n)
        return t->kids.v[0];
    if (!parentheses)
        fail_token(p, "an expression");
    return t;
}

static void make_target(struct parser *p, struct node *n)
{
    p->r->line = n->line;
    n->ctx = CTX_STORE;
    if (n->kind == N_TUPLE)
        for (size_t i = 0; i < n->kids.n; i++)
            make_target(p, n->kids.v[i]);
    else if (n->kind != N_NAME && n->kind != N_NSREF)
        run_fail(p->r, "can't assign to an expression");
}

struct node *parse_target(struct parser *p, const char *end, bool with_namespace)
{
    struct node *t = node_new(p, N_TUPLE, p->at->line);
    bool is_tuple = false;
    for (;;) {
        if (t->kids.n)
            expect_op(p, O_COMMA);
        if (tuple_end(p, end))
            break;
        nodes_add(p, &t->kids, parse_primary(p, with_namespace));
        if (!at_op(p, O_COMMA))
            break;
        is_tuple = true;
    }
    if (!is_tuple && !t->kids.n)
        fail_token(p, "a name to assign to");
    if (!is_tuple)
        t = t->kids.v[0];
    make_target(p, t);
    return t;
}

/* --- Postfixes --- */

static struct node *slice_part(struct parser *p)
{
    return at_op(p, O_COLON) || at_op(p, O_RBRACKET) || at_op(p, O_COMMA) ? NULL
                                                                          : parse_expression(p);
}

static struct node *parse_subscribed(struct parser *p)
{
    uint32_t line = p->at->line;
    struct node *first = at_op(p, O_COLON) ? NULL : parse_expression(p);
    if (!skip_op(p, O_COLON))
        return first;
    struct node *n = node_new(p, N_SLICE, line);
    n->a = first;
    n->b = slice_part(p);
    if (skip_op(p, O_COLON))
        n->c = slice_part(p);
    return n;
}

static struct node *parse_subscript(struct parser *p, struct node *object)
{
    struct node *n = node_new(p, N_GETITEM, p->at->line);
    n->a = object;
    if (skip_op(p, O_DOT)) {
        if (p->at->type == TOK_INT) {
            n->b = constant(p, p->at->value);
            return n;
        }
        n->kind = N_GETATTR;
        n->name = take_name(p);
        return n;
    }
    expect_op(p, O_LBRACKET);
    struct node *t = node_new(p, N_TUPLE, p->at->line);
    while (!at_op(p, O_RBRACKET)) {
        if (t->kids.n)
            expect_op(p, O_COMMA);
        nodes_add(p, &t->kids, parse_subscribed(p));
    }
    expect_op(p, O_RBRACKET);
    n->b = t->kids.n == 1 ? t->kids.v[0] : t;
    return n;
}

static void parse_arg(struct parser *p, struct node *n)
{
    bool keyword = p->at->type == TOK_NAME && p->at[1].type == TOK_OP && p->at[1].op == O_ASSIGN;
    uint32_t line = p->at->line;
    if (skip_op(p, O_MUL)) {
        if (n->b || n->c)
            run_fail(p->r, "invalid syntax for function call expression");
        n->b = parse_expression(p);
    } else if (skip_op(p, O_POW)) {
        if (n->c)
            run_fail(p->r, "invalid syntax for function call expression");
        n->c = parse_expression(p);
    } else if (keyword && !n->c) {
        struct node *k = node_new(p, N_KEYWORD, line);
        k->name = take_name(p);
        p->at++;
        k->a = parse_expression(p);
        nodes_add(p, &n->extra, k);
    } else {
        if (n->b || n->c || n->extra.n)
            run_fail(p->r, "invalid syntax for function call expression");
        nodes_add(p, &n->kids, parse_expression(p));
    }
}

static void parse_args(struct parser *p, struct node *n)
{
    expect_op(p, O_LPAREN);
    for (bool first = true; !at_op(p, O_RPAREN); first = false) {
        p->r->line = p->at->line;
        if (!first) {
            expect_op(p, O_COMMA);
            if (at_op(p, O_RPAREN))
                break;
        }
        parse_arg(p, n);
    }
    expect_op(p, O_RPAREN);
}

static struct node *parse_call(struct parser *p, struct node *callee)
{
    struct node *n = node_new(p, N_CALL, p->at->line);
    n->a = callee;
    parse_args(p, n);
    return n;
}

static struct node *parse_postfix(struct parser *p, struct node *n)
{
    for (;;) {
        if (at_op(p, O_DOT) || at_op(p, O_LBRACKET))
            n = parse_subscript(p, n);
        else if (at_op(p, O_LPAREN))
            n = parse_call(p, n);
        else
            return n;
    }
}

/* A name, perhaps with dots in it. */
static struct str *dotted_name(struct parser *p)
{
    struct str *name = take_name(p);
    while (skip_op(p, O_DOT)) {
        name = str_cat(p->r, name, str_lit(p->r, "."));
        name = str_cat(p->r, name, take_name(p));
    }
    return name;
}

static void check_known(struct parser *p, const struct node *n, const char *what)
{
    p->r->line = n->line;
    if (!n->builtin && !p->soft)
        run_fail(p->r, "No %s named '%.*s'.", what, (int)MIN(n->name->len, (size_t)100),
                 n->name->data);
}

struct node *parse_filters(struct parser *p, struct node *n, bool start)
{
    while (start || at_op(p, O_PIPE)) {
        if (!start)
            p->at++;
        struct node *f = node_new(p, N_FILTER, p->at->line);
        f->a = n;
        f->name = dotted_name(p);
        f->builtin = find_filter(f->name);
        if (at_op(p, O_LPAREN))
            parse_args(p, f);
        check_known(p, f, "filter");
        n = f;
        start = false;
    }
    return n;
}

static bool test_argument(const struct parser *p)
{
    switch (p->at->type) {
    case TOK_NAME:
        return !at_name(p, "else") && !at_name(p, "or") && !at_name(p, "and");
    case TOK_STRING:
    case TOK_INT:
    case TOK_FLOAT:
        return true;
    }
    return at_op(p, O_LBRACKET) || at_op(p, O_LBRACE);
}

static struct node *parse_test(struct parser *p, struct node *value)
{
    struct node *n = node_new(p, N_TEST, p->at->line);
    p->at++;
    bool negated = skip_name(p, "not");
    n->a = value;
    n->name = dotted_name(p);
    n->builtin = find_test(n->name);
    if (at_op(p, O_LPAREN)) {
        parse_args(p, n);
    } else if (test_argument(p)) {
        if (at_name(p, "is"))
            run_fail(p->r, "You cannot chain multiple tests with is");
        nodes_add(p, &n->kids, parse_postfix(p, parse_primary(p, false)));
    }
    check_known(p, n, "test");
    if (!negated)
        return n;
    struct node *not = node_new(p, N_NOT, n->line);
    not ->a = n;
    return not ;
}

static struct node *parse_filter_expr(struct parser *p, struct node *n)
{
    for (;;) {
        if (at_op(p, O_PIPE))
            n = parse_filters(p, n, false);
        else if (at_name(p, "is"))
            n = parse_test(p, n);
        else if (at_op(p, O_LPAREN))
            n = parse_call(p, n);
        else
            return n;
    }
}

/* --- Operators --- */

static struct node *parse_unary(struct parser *p, bool with_filter)
{
    uint32_t line = p->at->line;
    struct node *n;
    run_enter(p->r);
    p->r->line = line;
    if (at_op(p, O_SUB) || at_op(p, O_ADD)) {
        n = node_new(p, at_op(p, O_SUB) ? N_NEG : N_POS, line);
        p->at++;
        n->a = parse_unary(p, false);
    } else {
        n = parse_primary(p, false);
    }
    n = parse_postfix(p, n);
    if (with_filter)
        n = parse_filter_expr(p, n);
    run_leave(p->r);
    return n;
}

static struct node *two(struct parser *p, enum node_kind kind, struct node *a, struct node *b)
{
    struct node *n = node_new(p, kind, a->line);
    n->a = a;
    n->b = b;
    return n;
}

static struct node *parse_pow(struct parser *p)
{
    struct node *n = parse_unary(p, true);
    while (skip_op(p, O_POW)) {
        n = two(p, N_BINARY, n, parse_unary(p, true));
        n->op = OP_POW;
    }
    return n;
}

static struct node *parse_math2(struct parser *p)
{
    struct node *n = parse_pow(p);
    while (at_op(p, O_MUL) || at_op(p, O_DIV) || at_op(p, O_FLOORDIV) || at_op(p, O_MOD)) {
        static const uint8_t ops[] = {
            [O_MUL] = OP_MUL, [O_DIV] = OP_DIV, [O_FLOORDIV] = OP_FLOORDIV, [O_MOD] = OP_MOD};
        uint8_t op = ops[p->at->op];
        p->at++;
        n = two(p, N_BINARY, n, parse_pow(p));
        n->op = op;
    }
    return n;
}

static struct node *parse_concat(struct parser *p)
{
    struct node *first = parse_math2(p);
    if (!at_op(p, O_TILDE))
        return first;
    struct node *n = node_new(p, N_CONCAT, first->line);
    nodes_add(p, &n->kids, first);
    while (skip_op(p, O_TILDE))
        nodes_add(p, &n->kids, parse_math2(p));
    return n;
}

static struct node *parse_math1(struct parser *p)
{
    struct node *n = parse_concat(p);
    while (at_op(p, O_ADD) || at_op(p, O_SUB)) {
        uint8_t op = at_op(p, O_ADD) ? OP_ADD : OP_SUB;
        p->at++;
        n = two(p, N_BINARY, n, parse_concat(p));
        n->op = op;
    }
    return n;
}

/* Takes a comparison operator. */
static bool comparison(struct parser *p, uint8_t *ret_op)
{
    if (p->at->type == TOK_OP && p->at->op >= O_EQ && p->at->op <= O_GE) {
        *ret_op = (uint8_t)(OP_EQ + ((p->at++)->op - O_EQ));
        return true;
    }
    if (skip_name(p, "in")) {
        *ret_op = OP_IN;
        return true;
    }
    if (at_name(p, "not") && p->at[1].type == TOK_NAME && str_is(p->at[1].value.s, "in")) {
        p->at += 2;
        *ret_op = OP_NOTIN;
        return true;
    }
    return false;
}

static struct node *parse_compare(struct parser *p)
{
    struct node *first = parse_math1(p), *n = NULL;
    uint8_t op;
    while (comparison(p, &op)) {
        if (!n)
            n = two(p, N_COMPARE, first, NULL);
        struct node *operand = node_new(p, N_OPERAND, p->at->line);
        operand->op = op;
        operand->a = parse_math1(p);
        nodes_add(p, &n->kids, operand);
    }
    return n ? n : first;
}

static struct node *parse_not(struct parser *p)
{
    uint32_t line = p->at->line;
    if (!skip_name(p, "not"))
        return parse_compare(p);
    run_enter(p->r);
    struct node *n = node_new(p, N_NOT, line);
    n->a = parse_not(p);
    run_leave(p->r);
    return n;
}

static struct node *parse_and(struct parser *p)
{
    struct node *n = parse_not(p);
    while (skip_name(p, "and"))
        n = two(p, N_AND, n, parse_not(p));
    return n;
}

static struct node *parse_or(struct parser *p)
{
    struct node *n = parse_and(p);
    while (skip_name(p, "or"))
        n = two(p, N_OR, n, parse_and(p));
    return n;
}

/*
 * Jinja2 lets unknown filters in both branches and the test wait until they are reached; here that
 * is known only behind the first branch, so a conditional looks again for an "if" of its own.
 */
static bool conditional_ahead(const struct parser *p)
{
    int depth = 0;
    for (const struct token *t = p->at; t->type >= TOK_NAME && t->type <= TOK_OP; t++) {
        if (t->type == TOK_OP && (t->op == O_LPAREN || t->op == O_LBRACKET || t->op == O_LBRACE))
            depth++;
        else if (t->type == TOK_OP &&
                 (t->op == O_RPAREN || t->op == O_RBRACKET || t->op == O_RBRACE) && depth-- == 0)
            return false;
        else if (depth == 0 && t->type == TOK_OP && t->op == O_COMMA)
            return false;
        else if (depth == 0 && t->type == TOK_NAME && str_is(t->value.s, "if"))
            return true;
    }
    return false;
}

struct node *parse_expression(struct parser *p)
{
    bool soft = p->soft;
    run_enter(p->r);
    if (!soft && conditional_ahead(p))
        p->soft = true;
    struct node *n = parse_or(p);
    while (skip_name(p, "if")) {
        struct node *cond = two(p, N_COND, n, NULL);
        cond->b = n;
        cond->a = parse_or(p);
        if (skip_name(p, "else"))
            cond->c = parse_expression(p);
        n = cond;
    }
    p->soft = soft;
    run_leave(p->r);
    return n;
}
