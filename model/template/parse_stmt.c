/* SPDX-License-Identifier: Apache-2.0 */
/* Statements. */
#include "model/template/parse_internal.h"

static void parse_body(struct parser *p, struct nodes *body, const char *const *ends);

static void block_end(struct parser *p)
{
    if (p->at->type != TOK_BLOCK_END)
        fail_token(p, "'%}'");
    p->at++;
}

/*
 * The statements up to the tag that begins with one of `ends` (NULL-terminated), whose name is
 * taken; returns which. The tag that opened the body ends here too. Bodies that are scopes of their
 * own are not `soft`.
 */
static size_t parse_until(struct parser *p, struct nodes *body, const char *const *ends, bool soft)
{
    bool before = p->soft;
    p->soft = soft;
    skip_op(p, O_COLON);
    block_end(p);
    parse_body(p, body, ends);
    p->soft = before;
    for (size_t i = 0; ends[i]; i++)
        if (skip_name(p, ends[i]))
            return i;
    p->r->line = p->at->line;
    run_fail(p->r, "unexpected end of template: '%s' is missing", ends[0]);
}

static void until(struct parser *p, struct nodes *body, const char *end)
{
    parse_until(p, body, (const char *const[]){end, NULL}, false);
}

static struct node *parse_if(struct parser *p, uint32_t line)
{
    static const char *const ends[] = {"endif", "elif", "else", NULL};
    struct node *first = node_new(p, N_IF, line), *n = first;
    bool before = p->soft;
    for (;;) {
        p->soft = true;
        n->a = parse_tuple(p, false, NULL, false);
        size_t end = parse_until(p, &n->body, ends, true);
        p->soft = before;
        if (end == 0)
            return first;
        if (end == 2)
            break;
        n = node_new(p, N_IF, p->at->line);
        nodes_add(p, &first->kids, n);
    }
    parse_until(p, &first->els, (const char *const[]){"endif", NULL}, true);
    return first;
}

static struct node *copy_target(struct parser *p, const struct node *n)
{
    struct node *copy = node_new(p, (enum node_kind)n->kind, n->line);
    *copy = *n;
    copy->kids = (struct nodes){0};
    for (size_t i = 0; i < n->kids.n; i++)
        nodes_add(p, &copy->kids, copy_target(p, n->kids.v[i]));
    return copy;
}

static struct node *parse_for(struct parser *p, uint32_t line)
{
    static const char *const ends[] = {"endfor", "else", NULL};
    struct node *n = node_new(p, N_FOR, line);
    n->a = parse_target(p, "in", false);
    n->d = copy_target(p, n->a);
    expect_name(p, "in");
    n->b = parse_tuple(p, false, "recursive", false);
    bool before = p->soft;
    p->soft = false;
    if (skip_name(p, "if"))
        n->c = parse_expression(p);
    p->soft = before;
    n->flag = skip_name(p, "recursive");
    p->loops++;
    size_t end = parse_until(p, &n->body, ends, false);
    p->loops--;
    uint32_t loops = p->loops;
    if (n->flag) /* a recursive loop is a function: its else is in no loop */
        p->loops = 0;
    if (end == 1)
        until(p, &n->els, "endfor");
    p->loops = loops;
    return n;
}

static struct node *parse_set(struct parser *p, uint32_t line)
{
    struct node *n = node_new(p, N_SET, line);
    n->a = parse_target(p, NULL, true);
    if (skip_op(p, O_ASSIGN)) {
        n->b = parse_tuple(p, true, NULL, false);
        return n;
    }
    n->kind = N_SETBLOCK;
    bool before = p->soft;
    p->soft = false;
    n->b = parse_filters(p, NULL, false);
    p->soft = before;
    until(p, &n->body, "endset");
    return n;
}

static void parse_signature(struct parser *p, struct node *n)
{
    expect_op(p, O_LPAREN);
    while (!at_op(p, O_RPAREN)) {
        if (n->kids.n)
            expect_op(p, O_COMMA);
        struct node *param = node_new(p, N_NAME, p->at->line);
        param->name = take_name(p);
        param->ctx = CTX_PARAM;
        nodes_add(p, &n->kids, param);
        if (skip_op(p, O_ASSIGN))
            nodes_add(p, &n->extra, parse_expression(p));
        else if (n->extra.n)
            run_fail(p->r, "non-default argument follows default argument");
    }
    expect_op(p, O_RPAREN);
}

/* The body of a macro: loops around it are not its own. */
static void parse_macro_body(struct parser *p, struct node *n, const char *end)
{
    uint32_t loops = p->loops;
    p->loops = 0;
    until(p, &n->body, end);
    p->loops = loops;
}

static struct node *parse_macro(struct parser *p, uint32_t line)
{
    struct node *n = node_new(p, N_MACRO, line);
    n->a = node_new(p, N_NAME, line);
    n->a->name = n->name = take_name(p);
    n->a->ctx = CTX_STORE;
    parse_signature(p, n);
    parse_macro_body(p, n, "endmacro");
    return n;
}

static struct node *parse_call_block(struct parser *p, uint32_t line)
{
    struct node *n = node_new(p, N_CALLBLOCK, line);
    if (at_op(p, O_LPAREN))
        parse_signature(p, n);
    n->b = parse_expression(p);
    p->r->line = line;
    if (n->b->kind != N_CALL)
        run_fail(p->r, "expected call");
    parse_macro_body(p, n, "endcall");
    return n;
}

static struct node *parse_with(struct parser *p, uint32_t line)
{
    struct node *n = node_new(p, N_WITH, line);
    while (p->at->type != TOK_BLOCK_END) {
        if (n->kids.n)
            expect_op(p, O_COMMA);
        nodes_add(p, &n->kids, parse_target(p, NULL, false));
        expect_op(p, O_ASSIGN);
        nodes_add(p, &n->extra, parse_expression(p));
    }
    until(p, &n->body, "endwith");
    return n;
}

static struct node *parse_filter_block(struct parser *p, uint32_t line)
{
    struct node *n = node_new(p, N_FILTERBLOCK, line);
    bool before = p->soft;
    p->soft = false;
    n->b = parse_filters(p, NULL, true);
    p->soft = before;
    until(p, &n->body, "endfilter");
    return n;
}

static struct node *parse_generation(struct parser *p, uint32_t line)
{
    struct node *n = node_new(p, N_GENERATION, line);
    parse_macro_body(p, n, "endgeneration");
    return n;
}

static struct node *parse_block(struct parser *p, uint32_t line)
{
    struct node *n = node_new(p, N_BLOCK, line);
    n->name = take_name(p);
    for (size_t i = 0; i < p->blocks.n; i++)
        if (str_same(p->blocks.v[i]->name, n->name))
            run_fail(p->r, "block '%.*s' defined twice", (int)MIN(n->name->len, (size_t)100),
                     n->name->data);
    nodes_add(p, &p->blocks, n);
    skip_name(p, "scoped");
    skip_name(p, "required");
    parse_macro_body(p, n, "endblock");
    if (p->at->type == TOK_NAME && str_same(p->at->value.s, n->name))
        p->at++;
    return n;
}

static struct node *parse_print(struct parser *p, uint32_t line)
{
    struct node *n = node_new(p, N_PRINT, line);
    while (p->at->type != TOK_BLOCK_END) {
        if (n->kids.n)
            expect_op(p, O_COMMA);
        nodes_add(p, &n->kids, parse_expression(p));
    }
    return n;
}

static struct node *loop_control(struct parser *p, uint32_t line, enum node_kind kind)
{
    if (!p->loops)
        run_fail(p->r, "'%s' outside loop", kind == N_BREAK ? "break" : "continue");
    return node_new(p, kind, line);
}

static struct node *parse_break(struct parser *p, uint32_t line)
{
    return loop_control(p, line, N_BREAK);
}

static struct node *parse_continue(struct parser *p, uint32_t line)
{
    return loop_control(p, line, N_CONTINUE);
}

static const struct {
    const char *name;
    struct node *(*parse)(struct parser *p, uint32_t line);
} statements[] = {
    {"if", parse_if},           {"for", parse_for},
    {"set", parse_set},         {"macro", parse_macro},
    {"call", parse_call_block}, {"filter", parse_filter_block},
    {"with", parse_with},       {"generation", parse_generation},
    {"block", parse_block},     {"print", parse_print},
    {"break", parse_break},     {"continue", parse_continue},
};

static const char *const refused[] = {"include", "import", "from", "extends", "autoescape"};

static struct node *parse_statement(struct parser *p)
{
    uint32_t line = p->at->line;
    p->r->line = line;
    if (p->at->type != TOK_NAME)
        fail_token(p, "a tag's name");
    for (size_t i = 0; i < ARRAY_LEN(statements); i++)
        if (skip_name(p, statements[i].name))
            return statements[i].parse(p, line);
    for (size_t i = 0; i < ARRAY_LEN(refused); i++)
        if (at_name(p, refused[i]))
            run_fail(p->r, "'%s' is not allowed: a chat template stands alone", refused[i]);
    run_fail(p->r, "Encountered unknown tag '%.*s'.", (int)MIN(p->at->value.s->len, (size_t)100),
             p->at->value.s->data);
}

static struct node *parse_data(struct parser *p)
{
    struct node *n = node_new(p, N_DATA, p->at->line);
    n->value = (p->at++)->value;
    return n;
}

static struct node *parse_variable(struct parser *p)
{
    struct node *n = node_new(p, N_PRINT, p->at->line);
    p->at++;
    nodes_add(p, &n->kids, parse_tuple(p, true, NULL, false));
    if (p->at->type != TOK_VAR_END)
        fail_token(p, "'}}'");
    p->at++;
    return n;
}

static bool at_end(const struct parser *p, const char *const *ends)
{
    for (size_t i = 0; ends && ends[i]; i++)
        if (at_name(p, ends[i]))
            return true;
    return false;
}

static void parse_body(struct parser *p, struct nodes *body, const char *const *ends)
{
    run_enter(p->r);
    while (p->at->type != TOK_EOF) {
        p->r->line = p->at->line;
        if (p->at->type == TOK_DATA) {
            nodes_add(p, body, parse_data(p));
        } else if (p->at->type == TOK_VAR_BEGIN) {
            nodes_add(p, body, parse_variable(p));
        } else {
            p->at++;
            if (at_end(p, ends))
                break;
            nodes_add(p, body, parse_statement(p));
            block_end(p);
        }
    }
    run_leave(p->r);
}

struct node *parse_template(struct run *r, struct token *tokens)
{
    struct parser p = {.r = r, .at = tokens};
    struct node *root = node_new(&p, N_BLOCK, 1);
    parse_body(&p, &root->body, NULL);
    return root;
}
