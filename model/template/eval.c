/* SPDX-License-Identifier: Apache-2.0 */
/* Evaluating expressions. */
#include "model/template/internal.h"

static struct value call(struct run *r, struct value fn, struct args *a);

static struct frame *frame_up(struct frame *f, uint32_t depth)
{
    while (depth-- > 0)
        f = f->parent;
    return f;
}

static struct value eval_name(struct run *r, struct frame *f, const struct node *n)
{
    struct value v = frame_up(f, n->depth)->slots[n->slot];
    return v.type == T_MISSING ? undefined_name(r, n->name) : v;
}

static struct value eval_seq(struct run *r, struct frame *f, const struct node *n)
{
    struct value v = seq_new(r, n->kind == N_LIST ? T_LIST : T_TUPLE, n->kids.n);
    for (size_t i = 0; i < n->kids.n; i++)
        seq_add(r, v.seq, eval(r, f, n->kids.v[i]));
    return v;
}

static struct value eval_dict(struct run *r, struct frame *f, const struct node *n)
{
    struct dict *d = dict_new(r);
    for (size_t i = 0; i + 1 < n->kids.n; i += 2) {
        struct value key = eval(r, f, n->kids.v[i]);
        dict_set(r, d, key, eval(r, f, n->kids.v[i + 1]));
    }
    return v_dict(d);
}

static struct value eval_concat(struct run *r, struct frame *f, const struct node *n)
{
    struct str *s = str_lit(r, "");
    for (size_t i = 0; i < n->kids.n; i++)
        s = str_cat(r, s, to_str(r, eval(r, f, n->kids.v[i])));
    return v_str(s);
}

static struct value eval_compare(struct run *r, struct frame *f, const struct node *n)
{
    struct value left = eval(r, f, n->a);
    for (size_t i = 0; i < n->kids.n; i++) {
        const struct node *k = n->kids.v[i];
        struct value right = eval(r, f, k->a);
        if (!compare(r, (enum op)k->op, left, right))
            return v_bool(false);
        left = right;
    }
    return v_bool(true);
}

static struct value eval_cond(struct run *r, struct frame *f, const struct node *n)
{
    if (truthy(r, eval(r, f, n->a)))
        return eval(r, f, n->b);
    if (n->c)
        return eval(r, f, n->c);
    return undefined_text(r, "the inline if-expression evaluated to false and no else section was "
                             "defined.");
}

static struct value part(struct run *r, struct frame *f, const struct node *n)
{
    return n ? eval(r, f, n) : v_none();
}

static struct value eval_item(struct run *r, struct frame *f, const struct node *n)
{
    struct value object = eval(r, f, n->a);
    if (n->b->kind != N_SLICE)
        return get_item(r, object, eval(r, f, n->b));
    struct value from = part(r, f, n->b->a), to = part(r, f, n->b->b);
    return get_slice(r, object, from, to, part(r, f, n->b->c));
}

/* --- Calls --- */

static void add_keyword(struct run *r, struct args *a, struct value name, struct value v)
{
    if (!is_str(name))
        run_fail(r, "TypeError: keywords must be strings");
    for (size_t i = 0; i < a->n_kw; i++)
        if (str_same(a->kw[i].name, name.s))
            run_fail(r, "TypeError: got multiple values for keyword argument '%.*s'",
                     (int)MIN(name.s->len, (size_t)100), name.s->data);
    a->kw[a->n_kw++] = (struct keyword){name.s, v};
}

static void eval_args(struct run *r, struct frame *f, const struct node *n, struct args *a,
                      size_t room)
{
    struct seq *more = NULL;
    struct dict *named = NULL;
    a->pos = arena(r, n->kids.n, sizeof *a->pos);
    for (size_t i = 0; i < n->kids.n; i++)
        a->pos[a->n++] = eval(r, f, n->kids.v[i]);
    struct keyword *kw = arena(r, n->extra.n + room, sizeof *kw);
    for (size_t i = 0; i < n->extra.n; i++)
        kw[i].value = eval(r, f, n->extra.v[i]->a);
    if (n->b)
        more = to_list(r, eval(r, f, n->b));
    if (n->c) {
        struct value v = eval(r, f, n->c);
        if (v.type != T_DICT)
            run_fail(r, "TypeError: argument after ** must be a mapping, not %s", type_name(v));
        named = v.dict;
    }
    a->kw = arena(r, n->extra.n + room + (named ? named->n : 0), sizeof *a->kw);
    for (size_t i = 0; i < n->extra.n; i++)
        add_keyword(r, a, v_str(n->extra.v[i]->name), kw[i].value);
    for (size_t i = 0; named && i < named->n; i++)
        add_keyword(r, a, named->v[i].key, named->v[i].value);
    if (more) {
        struct value *all = arena(r, a->n + more->n, sizeof *all);
        if (a->n)
            memcpy(all, a->pos, a->n * sizeof *all);
        if (more->n)
            memcpy(all + a->n, more->v, more->n * sizeof *all);
        a->pos = all;
        a->n += more->n;
    }
}

static struct value call_joiner(struct run *r, struct cycler *j)
{
    bool first = !j->used;
    j->used = true;
    return v_str(first ? str_lit(r, "") : j->sep);
}

/* What methods of Markup return is Markup. */
static struct value call_method(struct run *r, const struct method *m, struct args *a)
{
    a->what = m->name;
    struct value v = m->call(r, &m->self, a);
    if (!is_str(m->self) || !m->self.safe)
        return v;
    v.safe = is_str(v);
    for (size_t i = 0; is_seq(v) && i < v.seq->n; i++)
        v.seq->v[i].safe = is_str(v.seq->v[i]);
    return v;
}

static struct value call(struct run *r, struct value fn, struct args *a)
{
    struct value first;
    switch (fn.type) {
    case T_UNDEFINED:
        fail_undefined(r, fn);
    case T_MACRO:
        return call_macro(r, fn.macro, a);
    case T_FUNCTION:
    case T_METHOD:
        return call_method(r, fn.method, a);
    case T_LOOP:
        a->what = "loop";
        bind(r, a, "iterable", 1, &first);
        return call_loop(r, fn.loop, first);
    case T_JOINER:
        return call_joiner(r, fn.cycler);
    default:
        run_fail(r, "TypeError: '%s' object is not callable", type_name(fn));
    }
}

static struct value eval_call(struct run *r, struct frame *f, const struct node *n)
{
    struct args a = {0};
    struct value fn = eval(r, f, n->a);
    eval_args(r, f, n, &a, 0);
    r->line = n->line;
    return call(r, fn, &a);
}

struct value eval_call_with(struct run *r, struct frame *f, const struct node *n,
                            struct value caller)
{
    struct args a = {0};
    struct value fn = eval(r, f, n->a);
    eval_args(r, f, n, &a, 1);
    add_keyword(r, &a, v_str(str_lit(r, "caller")), caller);
    r->line = n->line;
    return call(r, fn, &a);
}

struct value apply_filter(struct run *r, struct frame *f, const struct node *n, struct value v)
{
    struct args a = {0};
    if (n->a)
        v = n->a->kind == N_FILTER ? apply_filter(r, f, n->a, v) : eval(r, f, n->a);
    eval_args(r, f, n, &a, 0);
    r->line = n->line;
    if (!n->builtin)
        run_fail(r, "No filter named '%.*s' found.", (int)MIN(n->name->len, (size_t)100),
                 n->name->data);
    a.what = n->builtin->name;
    return n->builtin->call(r, &v, &a);
}

static struct value eval_test(struct run *r, struct frame *f, const struct node *n)
{
    struct args a = {0};
    struct value v = eval(r, f, n->a);
    eval_args(r, f, n, &a, 0);
    r->line = n->line;
    if (!n->builtin)
        run_fail(r, "No test named '%.*s' found.", (int)MIN(n->name->len, (size_t)100),
                 n->name->data);
    a.what = n->builtin->name;
    return n->builtin->call(r, &v, &a);
}

static struct value eval_logic(struct run *r, struct frame *f, const struct node *n)
{
    struct value v = eval(r, f, n->a);
    return truthy(r, v) == (n->kind == N_AND) ? eval(r, f, n->b) : v;
}

static struct value eval_binary(struct run *r, struct frame *f, const struct node *n)
{
    struct value a = eval(r, f, n->a), b = eval(r, f, n->b);
    r->line = n->line;
    return binary(r, (enum op)n->op, a, b);
}

static struct value dispatch(struct run *r, struct frame *f, const struct node *n)
{
    switch (n->kind) {
    case N_CONST:
        return n->value;
    case N_NAME:
        return eval_name(r, f, n);
    case N_TUPLE:
    case N_LIST:
        return eval_seq(r, f, n);
    case N_DICT:
        return eval_dict(r, f, n);
    case N_NEG:
    case N_POS:
        return negate(r, eval(r, f, n->a), n->kind == N_NEG);
    case N_NOT:
        return v_bool(!truthy(r, eval(r, f, n->a)));
    case N_AND:
    case N_OR:
        return eval_logic(r, f, n);
    case N_BINARY:
        return eval_binary(r, f, n);
    case N_CONCAT:
        return eval_concat(r, f, n);
    case N_COMPARE:
        return eval_compare(r, f, n);
    case N_COND:
        return eval_cond(r, f, n);
    case N_GETATTR:
        return get_attr(r, eval(r, f, n->a), n->name);
    case N_GETITEM:
        return eval_item(r, f, n);
    case N_CALL:
        return eval_call(r, f, n);
    case N_FILTER:
        return apply_filter(r, f, n, v_none());
    case N_TEST:
        return eval_test(r, f, n);
    default:
        run_fail(r, "a slice may only stand alone in a subscript");
    }
}

struct value eval(struct run *r, struct frame *f, const struct node *n)
{
    run_enter(r);
    run_charge(r, 0);
    r->line = n->line;
    struct value v = dispatch(r, f, n);
    run_leave(r);
    return v;
}
