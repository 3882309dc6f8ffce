/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which name means which slot. Jinja2 compiles a template to a Python function, its names to that
 * function's variables; what a name sees then depends on where else in the scope it is read and
 * assigned. For each scope:
 *   - a name that is read before anything assigns it is filled from an outer scope's slot or, when
 * no outer scope knows it, from the context as the scope is entered;
 *   - a name that is assigned first is empty until then, but where the outer scope knows it, it
 * begins as a copy of that;
 *   - a name that only some branches of an if assign begins as if it had been read first.
 * Bodies of loops, macros, call, filter, with and set blocks are scopes; bodies of if are not.
 */
#include "model/template/parse_internal.h"

/* --- Slots --- */

static struct slot *own(struct scope *s, const struct str *name)
{
    for (size_t i = 0; i < s->n; i++)
        if (str_same(s->v[i].name, name))
            return &s->v[i];
    return NULL;
}

/* The slot that the name means in `s`: how many scopes up, and which. */
static bool find(struct scope *s, const struct str *name, uint32_t *ret_depth, uint32_t *ret_slot)
{
    uint32_t depth = 0;
    for (; s; s = s->parent, depth++) {
        struct slot *k = own(s, name);
        if (!k)
            continue;
        *ret_depth = depth;
        *ret_slot = (uint32_t)(k - s->v);
        return true;
    }
    return false;
}

static struct slot *define(struct run *r, struct scope *s, struct str *name, enum slot_load load)
{
    struct slot *k = own(s, name);
    run_charge(r, 8 * s->n);
    if (!k) {
        if (s->n == s->cap) {
            size_t cap = MAX((size_t)8, s->cap * 2);
            struct slot *grown = arena(r, cap, sizeof *grown);
            if (s->n)
                memcpy(grown, s->v, s->n * sizeof *grown);
            s->v = grown;
            s->cap = cap;
        }
        k = &s->v[s->n++];
        *k = (struct slot){.name = name};
    }
    k->load = load;
    return k;
}

/* As a copy of the outer scope's, when that has one; else `otherwise`. */
static void load_outer(struct run *r, struct scope *s, struct str *name, enum slot_load otherwise)
{
    uint32_t depth, slot;
    bool outer = s->parent && find(s->parent, name, &depth, &slot);
    struct slot *k = define(r, s, name, outer ? LOAD_ALIAS : otherwise);
    if (outer) {
        k->depth = depth + 1;
        k->slot = slot;
    }
}

static void note_load(struct run *r, struct scope *s, struct str *name)
{
    uint32_t depth, slot;
    if (!find(s, name, &depth, &slot))
        define(r, s, name, LOAD_RESOLVE);
}

static void note_store(struct run *r, struct scope *s, struct str *name)
{
    if (!own(s, name))
        load_outer(r, s, name, LOAD_UNDEFINED);
    own(s, name)->stored = true;
}

static void note_param(struct run *r, struct scope *s, struct str *name)
{
    define(r, s, name, LOAD_PARAM)->stored = true;
}

/* --- First pass: what a scope's own statements read and assign --- */

static void note(struct run *r, struct scope *s, const struct node *n, bool as_param);

static void note_all(struct run *r, struct scope *s, const struct nodes *list, bool as_param)
{
    for (size_t i = 0; i < list->n; i++)
        note(r, s, list->v[i], as_param);
}

static struct scope branch(struct run *r, const struct scope *s)
{
    struct scope copy = *s;
    copy.cap = s->n + 8;
    copy.v = arena(r, copy.cap, sizeof *copy.v);
    if (s->n)
        memcpy(copy.v, s->v, s->n * sizeof *copy.v);
    return copy;
}

static void merge(struct run *r, struct scope *s, struct scope *branches, size_t n)
{
    struct scope before = branch(r, s);
    for (size_t b = 0; b < n; b++)
        for (size_t i = 0; i < branches[b].n; i++) {
            const struct slot *k = &branches[b].v[i];
            struct slot *mine = define(r, s, k->name, k->load);
            bool stored = mine->stored || k->stored;
            *mine = *k;
            mine->stored = stored;
        }
    for (size_t i = 0; i < s->n; i++) {
        size_t count = 0;
        struct str *name = s->v[i].name;
        const struct slot *old = own(&before, name);
        if (!s->v[i].stored || (old && old->stored))
            continue;
        for (size_t b = 0; b < n; b++) {
            const struct slot *k = own(&branches[b], name);
            count += k && k->stored;
        }
        if (count > 0 && count < n)
            load_outer(r, s, name, LOAD_RESOLVE);
    }
}

static void note_if(struct run *r, struct scope *s, const struct node *n)
{
    struct scope branches[3];
    note(r, s, n->a, false);
    for (size_t i = 0; i < 3; i++) {
        branches[i] = branch(r, s);
        note_all(r, &branches[i], i == 0 ? &n->body : i == 1 ? &n->kids : &n->els, false);
    }
    merge(r, s, branches, 3);
}

static void note_children(struct run *r, struct scope *s, const struct node *n, bool as_param)
{
    if (n->a)
        note(r, s, n->a, as_param);
    if (n->b)
        note(r, s, n->b, as_param);
    if (n->c)
        note(r, s, n->c, as_param);
    note_all(r, s, &n->kids, as_param);
    note_all(r, s, &n->extra, as_param);
}

static void note(struct run *r, struct scope *s, const struct node *n, bool as_param)
{
    run_enter(r);
    switch (n->kind) {
    case N_NAME:
        if (as_param || n->ctx == CTX_PARAM)
            note_param(r, s, n->name);
        else if (n->ctx == CTX_STORE)
            note_store(r, s, n->name);
        else
            note_load(r, s, n->name);
        break;
    case N_NSREF:
        note_load(r, s, n->name);
        break;
    case N_IF:
        note_if(r, s, n);
        break;
    case N_FOR:
    case N_CALLBLOCK:
    case N_FILTERBLOCK:
        note(r, s, n->b, false);
        break;
    case N_SET:
        note(r, s, n->b, false);
        note(r, s, n->a, false);
        break;
    case N_SETBLOCK:
    case N_MACRO:
        note(r, s, n->a, false);
        break;
    case N_WITH:
        note_all(r, s, &n->extra, false);
        break;
    case N_BLOCK:
    case N_GENERATION:
        break;
    default:
        note_children(r, s, n, as_param);
    }
    run_leave(r);
}

/* --- Second pass: names to slots, and the scopes within --- */

static void bind_all(struct run *r, struct scope *s, const struct nodes *list, bool toplevel);
static void bind_names(struct run *r, struct scope *s, struct node *n, bool toplevel);

static struct scope *inner(struct run *r, struct scope *parent)
{
    struct scope *s = arena(r, 1, sizeof *s);
    s->parent = parent;
    return s;
}

/*
 * Whether a name is read somewhere below that was not assigned before, in the order of the text.
 * *done is set once it is known either way.
 */
static bool reads(struct run *r, const struct node *n, const char *name, bool *done);

static bool reads_any(struct run *r, const struct nodes *list, const char *name, bool *done)
{
    for (size_t i = 0; i < list->n && !*done; i++)
        if (reads(r, list->v[i], name, done))
            return true;
    return false;
}

static bool reads(struct run *r, const struct node *n, const char *name, bool *done)
{
    bool found;
    if (!n || *done || n->kind == N_BLOCK)
        return false;
    if (n->kind == N_NAME) {
        *done = str_is(n->name, name);
        return *done && n->ctx == CTX_LOAD;
    }
    run_enter(r);
    run_charge(r, 0);
    found = reads(r, n->a, name, done) || reads(r, n->b, name, done) ||
            reads(r, n->c, name, done) || reads_any(r, &n->kids, name, done) ||
            reads_any(r, &n->extra, name, done) || reads_any(r, &n->body, name, done) ||
            reads_any(r, &n->els, name, done);
    run_leave(r);
    return found;
}

static void check_loop(struct run *r, const struct node *n);

static void check_loop_all(struct run *r, const struct nodes *list)
{
    for (size_t i = 0; i < list->n; i++)
        check_loop(r, list->v[i]);
}

/* Nothing within a loop may assign to `loop`. */
static void check_loop(struct run *r, const struct node *n)
{
    if (!n)
        return;
    run_enter(r);
    run_charge(r, 0);
    r->line = n->line;
    if (n->kind == N_NAME && n->ctx == CTX_STORE && str_is(n->name, "loop"))
        run_fail(r, "Can't assign to special loop variable in for-loop target");
    check_loop(r, n->a);
    check_loop(r, n->b);
    check_loop(r, n->c);
    check_loop_all(r, &n->kids);
    check_loop_all(r, &n->extra);
    check_loop_all(r, &n->body);
    check_loop_all(r, &n->els);
    run_leave(r);
}

static void bind_for(struct run *r, struct scope *s, struct node *n, bool toplevel)
{
    check_loop(r, n);
    bind_names(r, s, n->b, toplevel);
    n->scope = inner(r, s);
    note_param(r, n->scope, str_lit(r, "loop")); /* slot 0 */
    note(r, n->scope, n->a, true);
    note_all(r, n->scope, &n->body, false);
    if (n->els.n) {
        n->else_scope = inner(r, s);
        note_all(r, n->else_scope, &n->els, false);
        bind_all(r, n->else_scope, &n->els, false);
    }
    if (n->c) {
        n->test_scope = inner(r, s);
        note(r, n->test_scope, n->d, true);
        note(r, n->test_scope, n->c, false);
        bind_names(r, n->test_scope, n->d, false);
        bind_names(r, n->test_scope, n->c, false);
    }
    bind_names(r, n->scope, n->a, false);
    bind_all(r, n->scope, &n->body, false);
}

static bool has_param(const struct node *n, const char *name)
{
    for (size_t i = 0; i < n->kids.n; i++)
        if (str_is(n->kids.v[i]->name, name))
            return true;
    return false;
}

/* Declares caller, varargs or kwargs when the body reads it. */
static bool special(struct run *r, struct node *n, const char *name, uint32_t *ret_slot)
{
    bool done = false;
    if (has_param(n, name) || !reads_any(r, &n->body, name, &done))
        return false;
    note_param(r, n->scope, str_lit(r, name));
    *ret_slot = (uint32_t)n->scope->n - 1;
    return true;
}

static void bind_macro(struct run *r, struct scope *s, struct node *n)
{
    n->scope = inner(r, s);
    note_all(r, n->scope, &n->kids, true);
    n->flag = special(r, n, "caller", &n->caller_slot);
    n->kwargs = special(r, n, "kwargs", &n->kwargs_slot);
    n->varargs = special(r, n, "varargs", &n->varargs_slot);
    note_all(r, n->scope, &n->extra, false);
    note_all(r, n->scope, &n->body, false);
    bind_all(r, n->scope, &n->kids, false);
    bind_all(r, n->scope, &n->extra, false);
    bind_all(r, n->scope, &n->body, false);
}

static void bind_captured(struct run *r, struct scope *s, struct node *n)
{
    n->scope = inner(r, s);
    note_all(r, n->scope, &n->body, false);
    if (n->b)
        note(r, n->scope, n->b, false);
    bind_all(r, n->scope, &n->body, false);
    if (n->b)
        bind_names(r, n->scope, n->b, false);
}

static void bind_with(struct run *r, struct scope *s, struct node *n)
{
    n->scope = inner(r, s);
    note_all(r, n->scope, &n->kids, true);
    note_all(r, n->scope, &n->body, false);
    bind_all(r, n->scope, &n->kids, false);
    bind_all(r, s, &n->extra, false);
    bind_all(r, n->scope, &n->body, false);
}

static void bind_all(struct run *r, struct scope *s, const struct nodes *list, bool toplevel)
{
    for (size_t i = 0; i < list->n; i++)
        bind_names(r, s, list->v[i], toplevel);
}

static void bind_children(struct run *r, struct scope *s, struct node *n, bool toplevel)
{
    if (n->a)
        bind_names(r, s, n->a, toplevel);
    if (n->b)
        bind_names(r, s, n->b, toplevel);
    if (n->c)
        bind_names(r, s, n->c, toplevel);
    bind_all(r, s, &n->kids, toplevel);
    bind_all(r, s, &n->extra, toplevel);
    bind_all(r, s, &n->body, toplevel);
    bind_all(r, s, &n->els, toplevel);
}

static void bind_names(struct run *r, struct scope *s, struct node *n, bool toplevel)
{
    run_enter(r);
    r->line = n->line;
    n->toplevel = toplevel;
    switch (n->kind) {
    case N_NAME:
    case N_NSREF:
        if (!find(s, n->name, &n->depth, &n->slot))
            run_fail(r, "'%.*s' is not known here", (int)MIN(n->name->len, (size_t)100),
                     n->name->data);
        break;
    case N_FOR:
        bind_for(r, s, n, toplevel);
        break;
    case N_MACRO:
        bind_names(r, s, n->a, toplevel);
        bind_macro(r, s, n);
        break;
    case N_CALLBLOCK:
        bind_names(r, s, n->b, toplevel);
        bind_macro(r, s, n);
        break;
    case N_SETBLOCK:
        bind_names(r, s, n->a, toplevel);
        bind_captured(r, s, n);
        break;
    case N_FILTERBLOCK:
    case N_GENERATION:
        bind_captured(r, s, n);
        break;
    case N_WITH:
        bind_with(r, s, n);
        break;
    case N_BLOCK:
        bind_captured(r, NULL, n);
        break;
    default:
        bind_children(r, s, n, toplevel);
    }
    run_leave(r);
}

void resolve_names(struct run *r, struct node *root)
{
    root->scope = inner(r, NULL);
    note_all(r, root->scope, &root->body, false);
    bind_all(r, root->scope, &root->body, true);
}
