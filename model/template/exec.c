/* SPDX-License-Identifier: Apache-2.0 */
/* Running statements: frames, assignments, loops, macros, captured blocks. */
#include <errno.h>

#include "model/template/internal.h"

static enum flow exec_body(struct run *r, struct frame *f, const struct nodes *body);

static void assign(struct run *r, struct frame *f, const struct node *target, struct value v);

static enum flow exec(struct run *r, struct frame *f, const struct node *n);

/* --- Frames --- */

static struct value resolve(struct run *r, struct str *name)
{
    const struct value *v = dict_get(r, r->vars, v_str(name));
    if (v)
        return *v;
    const struct builtin *b = find_in(functions_table, name);
    if (!b)
        return v_missing();
    struct method *m = arena(r, 1, sizeof *m);
    *m = (struct method){b->name, b->call, v_missing()};
    return (struct value){.type = T_FUNCTION, .method = m};
}

/* Fills the slots as the scope is entered; those of parameters keep what they hold. */
static void frame_load(struct run *r, struct frame *f)
{
    for (size_t i = 0; i < f->scope->n; i++) {
        const struct slot *k = &f->scope->v[i];
        struct frame *up = f;
        switch (k->load) {
        case LOAD_PARAM:
            break;
        case LOAD_UNDEFINED:
            f->slots[i] = v_missing();
            break;
        case LOAD_RESOLVE:
            f->slots[i] = resolve(r, k->name);
            break;
        case LOAD_ALIAS:
            for (uint32_t d = 0; d < k->depth; d++)
                up = up->parent;
            f->slots[i] = up->slots[k->slot];
            break;
        }
    }
}

static struct frame *frame_new(struct run *r, const struct scope *scope, struct frame *parent)
{
    struct frame *f = arena(r, 1, sizeof *f);
    *f = (struct frame){parent, scope, arena(r, scope->n, sizeof *f->slots)};
    return f;
}

/* --- Output --- */

static void emit(struct run *r, const char *data, size_t len)
{
    r->output += len;
    if (r->output > r->limits.output)
        run_fail_code(r, EFBIG, "the text is longer than %llu bytes",
                      (unsigned long long)r->limits.output);
    sb_add(r, r->out, data, len);
}

static void emit_value(struct run *r, struct value v)
{
    struct str *s = to_str(r, v);
    emit(r, s->data, s->len);
}

static enum flow capture(struct run *r, struct frame *f, const struct nodes *body,
                         struct value *ret)
{
    struct sb text = {0}, *outer = r->out;
    r->out = &text;
    enum flow flow = exec_body(r, f, body);
    r->out = outer;
    *ret = v_str(sb_take(r, &text));
    return flow;
}

/* --- Assignment --- */

static struct value *slot_of(struct frame *f, const struct node *n)
{
    for (uint32_t d = 0; d < n->depth; d++)
        f = f->parent;
    return &f->slots[n->slot];
}

static void unpack(struct run *r, struct frame *f, const struct node *target, struct value v)
{
    if (v.type == T_UNDEFINED && target->kids.n)
        run_fail(r, "ValueError: not enough values to unpack (expected %zu, got 0)",
                 target->kids.n);
    if (!iterable(v))
        run_fail(r, "TypeError: cannot unpack non-iterable %s object", type_name(v));
    struct seq *items = to_list(r, v);
    if (items->n > target->kids.n)
        run_fail(r, "ValueError: too many values to unpack (expected %zu)", target->kids.n);
    if (items->n < target->kids.n)
        run_fail(r, "ValueError: not enough values to unpack (expected %zu, got %zu)",
                 target->kids.n, items->n);
    for (size_t i = 0; i < items->n; i++)
        assign(r, f, target->kids.v[i], items->v[i]);
}

static void assign(struct run *r, struct frame *f, const struct node *target, struct value v)
{
    switch (target->kind) {
    case N_NAME:
        *slot_of(f, target) = v;
        if (target->toplevel)
            dict_set(r, r->vars, v_str(target->name), v);
        break;
    case N_NSREF:
        dict_set(r, slot_of(f, target)->dict, target->value, v);
        break;
    default:
        unpack(r, f, target, v);
    }
}

/* Jinja2 looks whether they are namespaces before it evaluates what is assigned. */
static void check_namespaces(struct run *r, struct frame *f, const struct node *target)
{
    if (target->kind == N_NSREF && slot_of(f, target)->type != T_NAMESPACE)
        run_fail(r, "TemplateRuntimeError: cannot assign attribute on non-namespace object");
    for (size_t i = 0; i < target->kids.n; i++)
        check_namespaces(r, f, target->kids.v[i]);
}

static enum flow exec_setblock(struct run *r, struct frame *f, const struct node *n)
{
    struct frame *in = frame_new(r, n->scope, f);
    struct value v;
    check_namespaces(r, f, n->a);
    frame_load(r, in);
    enum flow flow = capture(r, in, &n->body, &v);
    if (flow != FLOW_ON)
        return flow;
    if (n->b)
        v = apply_filter(r, in, n->b, v);
    assign(r, f, n->a, v);
    return FLOW_ON;
}

/* --- Loops --- */

struct loop_filter {
    const struct node *node;
    struct frame *frame;
};

/* The items that the loop's `if` lets through, one at a time. */
static bool filter_next(struct run *r, struct iter *it, struct value *ret)
{
    struct loop_filter *x = it->state;
    struct value item;
    while (iter_next(r, it->inner, &item)) {
        assign(r, x->frame, x->node->d, item);
        if (truthy(r, eval(r, x->frame, x->node->c))) {
            *ret = item;
            return true;
        }
    }
    return false;
}

static struct iter *loop_source(struct run *r, struct frame *f, const struct node *n,
                                struct value items)
{
    struct iter *it = iter_begin(r, items);
    if (!n->c)
        return it;
    struct loop_filter *x = arena(r, 1, sizeof *x);
    *x = (struct loop_filter){n, frame_new(r, n->test_scope, f)};
    frame_load(r, x->frame);
    struct iter *filtered = v_iter(r, items, filter_next, x, NULL).iter;
    filtered->inner = it;
    return filtered;
}

/* Whether there is another item; it waits in l->after. */
static bool loop_peek(struct run *r, struct loop *l)
{
    struct value next;
    if (l->after.type == T_MISSING && iter_next(r, l->source, &next))
        l->after = next;
    return l->after.type != T_MISSING;
}

static bool loop_next(struct run *r, struct loop *l)
{
    struct value item = l->after;
    if (item.type == T_MISSING && !iter_next(r, l->source, &item))
        return false;
    l->after = v_missing();
    l->index0++;
    l->before = l->current;
    l->current = item;
    return true;
}

/* Without a length of its own the rest is gone through and kept. */
static int64_t loop_length(struct run *r, struct loop *l)
{
    if (l->length >= 0)
        return l->length;
    struct value rest = seq_new(r, T_LIST, 0), item;
    while (iter_next(r, l->source, &item))
        seq_add(r, rest.seq, item);
    l->source = v_iter(r, rest, NULL, NULL, NULL).iter;
    l->length = (int64_t)rest.seq->n + l->index0 + 1 + (l->after.type != T_MISSING);
    return l->length;
}

/* What else says to break or continue is about the loop around. */
static enum flow run_loop(struct run *r, struct frame *f, const struct node *n, struct value items,
                          int64_t depth0)
{
    struct loop *l = arena(r, 1, sizeof *l);
    struct frame *in = frame_new(r, n->scope, f);
    bool through = false;
    *l = (struct loop){.node = n, .outer = f, .index0 = -1, .depth0 = depth0, .length = -1};
    l->source = loop_source(r, f, n, items);
    if (!n->c && has_length(items))
        l->length = (int64_t)length(r, items);
    while (loop_next(r, l)) {
        assign(r, in, n->a, l->current);
        in->slots[0] = (struct value){.type = T_LOOP, .loop = l};
        frame_load(r, in);
        enum flow flow = exec_body(r, in, &n->body);
        if (flow == FLOW_BREAK)
            break;
        /* As Jinja2 has it: only a body that ran to its end keeps else from running. */
        through |= flow == FLOW_ON;
    }
    if (!through && n->els.n) {
        struct frame *other = frame_new(r, n->else_scope, f);
        frame_load(r, other);
        return exec_body(r, other, &n->els);
    }
    return FLOW_ON;
}

struct value call_loop(struct run *r, struct loop *l, struct value items)
{
    struct sb text = {0}, *outer = r->out;
    if (!l->node->flag)
        run_fail(r, "TypeError: The loop must have the 'recursive' marker to be called "
                    "recursively.");
    run_enter(r);
    r->out = &text;
    run_loop(r, l->outer, l->node, items, l->depth0 + 1);
    r->out = outer;
    run_leave(r);
    return v_str(sb_take(r, &text));
}

static struct value loop_cycle(struct run *r, const struct value *self, struct args *a)
{
    if (!a->n)
        run_fail(r, "TypeError: no items for cycling given");
    return a->pos[(size_t)self->loop->index0 % a->n];
}

static struct value loop_changed(struct run *r, const struct value *self, struct args *a)
{
    struct value now = seq_new(r, T_TUPLE, a->n);
    for (size_t i = 0; i < a->n; i++)
        seq_add(r, now.seq, a->pos[i]);
    if (equal(r, self->loop->changed, now))
        return v_bool(false);
    self->loop->changed = now;
    return v_bool(true);
}

static struct value bound(struct run *r, const char *name, function_fn fn, struct value self)
{
    struct method *m = arena(r, 1, sizeof *m);
    *m = (struct method){name, fn, self};
    return (struct value){.type = T_METHOD, .method = m};
}

struct value loop_attr(struct run *r, struct value v, struct str *name)
{
    struct loop *l = v.loop;
    if (str_is(name, "index0"))
        return v_int(l->index0);
    if (str_is(name, "index"))
        return v_int(l->index0 + 1);
    if (str_is(name, "first"))
        return v_bool(l->index0 == 0);
    if (str_is(name, "last"))
        return v_bool(!loop_peek(r, l));
    if (str_is(name, "length"))
        return v_int(loop_length(r, l));
    if (str_is(name, "revindex"))
        return v_int(loop_length(r, l) - l->index0);
    if (str_is(name, "revindex0"))
        return v_int(loop_length(r, l) - l->index0 - 1);
    if (str_is(name, "depth"))
        return v_int(l->depth0 + 1);
    if (str_is(name, "depth0"))
        return v_int(l->depth0);
    if (str_is(name, "previtem"))
        return l->index0 == 0 ? undefined_text(r, "there is no previous item") : l->before;
    if (str_is(name, "nextitem"))
        return loop_peek(r, l) ? l->after : undefined_text(r, "there is no next item");
    if (str_is(name, "cycle"))
        return bound(r, "cycle", loop_cycle, v);
    if (str_is(name, "changed"))
        return bound(r, "changed", loop_changed, v);
    return v_missing();
}

/* --- Macros --- */

static struct value v_macro(struct run *r, const struct node *n, struct frame *f)
{
    struct macro *m = arena(r, 1, sizeof *m);
    *m = (struct macro){n, f};
    return (struct value){.type = T_MACRO, .macro = m};
}

struct value macro_attr(struct run *r, struct value v, struct str *name)
{
    const struct node *n = v.macro->node;
    if (str_is(name, "name"))
        return n->name ? v_str(n->name) : v_none();
    if (str_is(name, "arguments")) {
        struct value list = seq_new(r, T_TUPLE, n->kids.n);
        for (size_t i = 0; i < n->kids.n; i++)
            seq_add(r, list.seq, v_str(n->kids.v[i]->name));
        return list;
    }
    if (str_is(name, "caller"))
        return v_bool(n->flag);
    if (str_is(name, "catch_kwargs"))
        return v_bool(n->kwargs);
    if (str_is(name, "catch_varargs"))
        return v_bool(n->varargs);
    return v_missing();
}

/* Takes a keyword out of the arguments. */
static struct value take_keyword(struct args *a, const struct str *name)
{
    for (size_t i = 0; i < a->n_kw; i++)
        if (str_same(a->kw[i].name, name)) {
            struct value v = a->kw[i].value;
            memmove(&a->kw[i], &a->kw[i + 1], (--a->n_kw - i) * sizeof *a->kw);
            return v;
        }
    return v_missing();
}

static void macro_rest(struct run *r, const struct macro *m, struct frame *f, struct args *a)
{
    const struct node *n = m->node;
    struct str anonymous = {.data = "None", .len = 4};
    const struct str *name = n->name ? n->name : &anonymous;
    if (n->kwargs) {
        struct dict *d = dict_new(r);
        for (size_t i = 0; i < a->n_kw; i++)
            dict_set(r, d, v_str(a->kw[i].name), a->kw[i].value);
        f->slots[n->kwargs_slot] = v_dict(d);
    } else if (a->n_kw) {
        run_fail(r, "TypeError: macro '%.*s' takes no keyword argument '%.*s'",
                 (int)MIN(name->len, (size_t)100), name->data,
                 (int)MIN(a->kw[0].name->len, (size_t)100), a->kw[0].name->data);
    }
    if (n->varargs) {
        struct value rest = seq_new(r, T_TUPLE, 0);
        for (size_t i = n->kids.n; i < a->n; i++)
            seq_add(r, rest.seq, a->pos[i]);
        f->slots[n->varargs_slot] = rest;
    } else if (a->n > n->kids.n) {
        run_fail(r, "TypeError: macro '%.*s' takes not more than %zu argument(s)",
                 (int)MIN(name->len, (size_t)100), name->data, n->kids.n);
    }
}

static void macro_params(struct run *r, const struct macro *m, struct frame *f, struct args *a)
{
    const struct node *n = m->node;
    bool all = a->n >= n->kids.n, found_caller = false;
    for (size_t i = 0; i < n->kids.n; i++) {
        struct str *name = n->kids.v[i]->name;
        found_caller |= str_is(name, "caller");
        f->slots[n->kids.v[i]->slot] = i < a->n ? a->pos[i]
                                       : all    ? v_missing()
                                                : take_keyword(a, name);
    }
    if (n->flag && !found_caller) {
        struct value caller = take_keyword(a, str_lit(r, "caller"));
        f->slots[n->caller_slot] =
            caller.type == T_MISSING ? undefined_text(r, "No caller defined") : caller;
    }
    macro_rest(r, m, f, a);
}

static void macro_defaults(struct run *r, const struct node *n, struct frame *f)
{
    size_t plain = n->kids.n - n->extra.n;
    for (size_t i = 0; i < n->kids.n; i++) {
        struct value *v = &f->slots[n->kids.v[i]->slot];
        if (v->type != T_MISSING)
            continue;
        if (i >= plain) {
            *v = eval(r, f, n->extra.v[i - plain]);
            continue;
        }
        struct sb b = {0};
        sb_printf(r, &b, "parameter '%.*s' was not provided",
                  (int)MIN(n->kids.v[i]->name->len, (size_t)100), n->kids.v[i]->name->data);
        sb_add(r, &b, "", 1);
        *v = undefined_text(r, b.data);
    }
}

struct value call_macro(struct run *r, const struct macro *m, struct args *a)
{
    struct frame *f = frame_new(r, m->node->scope, m->frame);
    struct value text;
    run_enter(r);
    macro_params(r, m, f, a);
    frame_load(r, f);
    macro_defaults(r, m->node, f);
    capture(r, f, &m->node->body, &text);
    run_leave(r);
    return text;
}

/* --- Statements --- */

static enum flow exec_if(struct run *r, struct frame *f, const struct node *n)
{
    if (truthy(r, eval(r, f, n->a)))
        return exec_body(r, f, &n->body);
    for (size_t i = 0; i < n->kids.n; i++)
        if (truthy(r, eval(r, f, n->kids.v[i]->a)))
            return exec_body(r, f, &n->kids.v[i]->body);
    return exec_body(r, f, &n->els);
}

static enum flow exec_inner(struct run *r, struct frame *f, const struct node *n)
{
    struct frame *in = frame_new(r, n->scope, n->kind == N_BLOCK ? NULL : f);
    struct value v;
    for (size_t i = 0; n->kind == N_WITH && i < n->kids.n; i++)
        assign(r, in, n->kids.v[i], eval(r, f, n->extra.v[i]));
    frame_load(r, in);
    if (n->kind != N_FILTERBLOCK)
        return exec_body(r, in, &n->body);
    enum flow flow = capture(r, in, &n->body, &v);
    if (flow == FLOW_ON)
        emit_value(r, apply_filter(r, in, n->b, v));
    return flow;
}

static void print_kids(struct run *r, struct frame *f, const struct node *n)
{
    for (size_t i = 0; i < n->kids.n; i++)
        emit_value(r, eval(r, f, n->kids.v[i]));
}

static enum flow exec(struct run *r, struct frame *f, const struct node *n)
{
    r->line = n->line;
    run_charge(r, 0);
    switch (n->kind) {
    case N_DATA:
        emit(r, n->value.s->data, n->value.s->len);
        break;
    case N_PRINT:
        print_kids(r, f, n);
        break;
    case N_IF:
        return exec_if(r, f, n);
    case N_FOR:
        return run_loop(r, f, n, eval(r, f, n->b), 0);
    case N_SET:
        check_namespaces(r, f, n->a);
        assign(r, f, n->a, eval(r, f, n->b));
        break;
    case N_SETBLOCK:
        return exec_setblock(r, f, n);
    case N_MACRO:
        assign(r, f, n->a, v_macro(r, n, f));
        break;
    case N_CALLBLOCK:
        emit_value(r, eval_call_with(r, f, n->b, v_macro(r, n, f)));
        break;
    case N_BREAK:
        return FLOW_BREAK;
    case N_CONTINUE:
        return FLOW_CONTINUE;
    default:
        return exec_inner(r, f, n);
    }
    return FLOW_ON;
}

static enum flow exec_body(struct run *r, struct frame *f, const struct nodes *body)
{
    enum flow flow = FLOW_ON;
    run_enter(r);
    for (size_t i = 0; i < body->n && flow == FLOW_ON; i++)
        flow = exec(r, f, body->v[i]);
    run_leave(r);
    return flow;
}

void exec_root(struct run *r, const struct node *root)
{
    struct frame *f = frame_new(r, root->scope, NULL);
    frame_load(r, f);
    exec_body(r, f, &root->body);
}
