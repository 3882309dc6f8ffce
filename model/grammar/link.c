/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From rules to a program. Small rules that do not contain themselves are copied into their users,
 * where the subset construction settles what a pushdown automaton would have to try; the others are
 * called. States from which no end can be reached go, so that whatever is allowed can be finished.
 */
#include <errno.h>
#include <string.h>

#include "model/grammar/grammar.h"
#include "model/grammar/internal.h"
#include "model/grammar/program.h"

#define INLINE_MAX 64 /* states of a rule that is copied */
#define REPEAT_MAX 48 /* states of a repetition that is written out */
#define KID_MAX 400   /* states of what is repeated without end, written out */
#define SIZE_MAX_ (1u << 30)

enum { NEW, VISITING, DONE };

struct link {
    struct build *b;
    uint8_t *seen;   /* by rule */
    bool *recursive; /* contains itself */
    bool *nullable;  /* the empty text is one of its texts */
    uint32_t *size;
    struct node **inlined;
    uint32_t cap;
    unsigned depth;
    /* Rules that are called, in the order in which they were met; 0 is the root. */
    uint32_t *called, *index; /* index by rule: place in called + 1 */
    uint32_t n_called;
    struct machine **machines; /* by place */
    bool **alive;              /* by place, by state */
    uint32_t *order, n_order;  /* places in their final order */
    uint8_t *sorted;
};

static uint32_t add(uint32_t a, uint64_t b)
{
    return (uint32_t)MIN(a + b, SIZE_MAX_);
}

static bool make_room(struct link *l)
{
    uint32_t n = l->b->n_rules, cap = MAX(n + 64, 2 * l->cap);

    if (n <= l->cap || l->b->failed)
        return !l->b->failed;
#define GROW(array)                                                                                \
    do {                                                                                           \
        l->array = x_realloc(l->array, cap * sizeof *l->array);                                    \
        memset(l->array + l->cap, 0, (cap - l->cap) * sizeof *l->array);                           \
    } while (0)
    GROW(seen);
    GROW(recursive);
    GROW(nullable);
    GROW(size);
    GROW(inlined);
    GROW(index);
#undef GROW
    l->cap = cap;
    return true;
}

/* ---- sizes, and who contains whom ---- */

static uint32_t visit(struct link *l, struct node *node);

static bool begins_with(const struct node *node, uint32_t rule)
{
    if (node->kind == NODE_SEQ)
        node = node->kids[0];
    return node->kind == NODE_RULE && node->rule == rule;
}

/* a: a x | y becomes a: y x*. */
static void unroll_left(struct build *b, uint32_t rule)
{
    struct node *node = b->rules[rule].node;
    struct list heads = {0}, tails = {0};
    uint32_t n = node->kind == NODE_ALT ? node->n : 0;

    for (uint32_t i = 0; i < n; i++) {
        struct node *kid = node->kids[i];
        if (!begins_with(kid, rule))
            list_add(b, &heads, kid);
        else if (kid->kind == NODE_SEQ)
            list_add(b, &tails, node_seq(b, kid->kids + 1, kid->n - 1));
    }
    if (tails.n) {
        struct node *tail = node_repeat(b, node_alt(b, tails.items, tails.n), 0, MANY);
        b->rules[rule].node = node_pair(b, node_alt(b, heads.items, heads.n), tail);
    }
    list_free(&heads);
    list_free(&tails);
}

static uint32_t visit_rule(struct link *l, uint32_t r)
{
    struct build *b = l->b;

    if (!make_room(l))
        return 1;
    if (l->seen[r] == VISITING)
        l->recursive[r] = true;
    if (l->seen[r] == NEW) {
        if (!b->rules[r].node) {
            build_fail(b, EINVAL, "rule \"%.64s\" is used but not defined",
                       b->rules[r].name ? b->rules[r].name : "?");
            return 1;
        }
        l->seen[r] = VISITING;
        unroll_left(b, r);
        uint32_t size = visit(l, b->rules[r].node);
        l->size[r] = size;
        l->seen[r] = DONE;
        if (!l->recursive[r] && size <= INLINE_MAX)
            l->inlined[r] = b->rules[r].node;
    }
    return l->inlined[r] ? l->size[r] : 2;
}

/* A repetition that would be too large is a rule with a counter. */
static uint32_t visit_repeat(struct link *l, struct node *node)
{
    uint64_t kid = visit(l, node->kids[0]);
    uint64_t times = node->max == MANY ? (uint64_t)node->min + 1 : node->max;

    if (times <= 1 || (node->max == MANY && node->min <= 1 && kid <= KID_MAX) ||
        kid * times <= REPEAT_MAX)
        return add(4, kid * times + times);
    node->rule = build_rule(l->b, NULL, 0);
    build_define(l->b, node->rule, node->kids[0]);
    if (!make_room(l))
        return 1;
    l->seen[node->rule] = DONE;
    l->size[node->rule] = (uint32_t)MIN(kid, SIZE_MAX_);
    return 2;
}

static uint32_t visit_graph(struct link *l, const struct graph *g)
{
    uint32_t size = g->n_states;

    for (uint32_t i = 0; i < g->n_edges; i++)
        if (g->edges[i].label)
            size = add(size, visit(l, g->edges[i].label));
    return size;
}

static uint32_t visit_kind(struct link *l, struct node *node)
{
    uint32_t size = 1;

    switch (node->kind) {
    case NODE_NONE:
    case NODE_EMPTY:
        return 1;
    case NODE_BYTES:
        return node->n;
    case NODE_CHARS:
        for (uint32_t i = 0; i < node->n; i++)
            size = add(size, node->ranges[i].hi < 0x80 ? 1 : 4);
        return size;
    case NODE_SEQ:
    case NODE_ALT:
        for (uint32_t i = 0; i < node->n && !l->b->failed; i++)
            size = add(size, visit(l, node->kids[i]));
        return size;
    case NODE_REPEAT:
        return visit_repeat(l, node);
    case NODE_RULE:
        return visit_rule(l, node->rule);
    case NODE_MACHINE:
        return node->machine->n;
    case NODE_GRAPH:
        return visit_graph(l, node->graph);
    }
    return size;
}

static uint32_t visit(struct link *l, struct node *node)
{
    if (node->measure || l->b->failed || !build_work(l->b, 1))
        return node->measure;
    if (++l->depth > 20 * NESTING_MAX) {
        build_fail(l->b, E2BIG, "the grammar is nested too deeply");
        return 1;
    }
    uint32_t size = visit_kind(l, node);
    l->depth--;
    node->measure = MAX(size, 1);
    return size;
}

/* ---- the empty text ---- */

static bool nullable(struct link *l, const struct node *node);

static bool graph_nullable(struct link *l, const struct graph *g)
{
    bool *reached = mem_alloc(g->n_states, 1), changed = true;

    if (!reached) {
        build_fail(l->b, ENOMEM, "no memory for the grammar");
        return false;
    }
    reached[0] = true;
    while (changed && !l->b->failed) {
        changed = false;
        for (uint32_t i = 0; i < g->n_edges; i++) {
            const struct graph_edge *e = &g->edges[i];
            if (reached[e->from] && !reached[e->to] && (!e->label || nullable(l, e->label)))
                reached[e->to] = changed = true;
        }
        build_work(l->b, g->n_edges);
    }
    bool end = reached[1];
    free(reached);
    return end;
}

static bool nullable(struct link *l, const struct node *node)
{
    if (!build_work(l->b, 1))
        return false;
    switch (node->kind) {
    case NODE_NONE:
    case NODE_BYTES:
    case NODE_CHARS:
        return false;
    case NODE_EMPTY:
        return true;
    case NODE_SEQ:
        for (uint32_t i = 0; i < node->n; i++)
            if (!nullable(l, node->kids[i]))
                return false;
        return true;
    case NODE_ALT:
        for (uint32_t i = 0; i < node->n; i++)
            if (nullable(l, node->kids[i]))
                return true;
        return false;
    case NODE_REPEAT:
        return !node->min || nullable(l, node->kids[0]);
    case NODE_RULE:
        return l->nullable[node->rule];
    case NODE_MACHINE:
        return node->machine->final[0];
    case NODE_GRAPH:
        return graph_nullable(l, node->graph);
    }
    return false;
}

static void find_nullable(struct link *l)
{
    bool changed = true;

    while (changed && !l->b->failed) {
        changed = false;
        for (uint32_t r = 0; r < l->b->n_rules && !l->b->failed; r++)
            if (l->seen[r] == DONE && !l->nullable[r] && nullable(l, l->b->rules[r].node))
                l->nullable[r] = changed = true;
    }
}

/* ---- machines ---- */

static uint32_t place(struct link *l, uint32_t rule)
{
    if (!l->index[rule]) {
        l->called[l->n_called++] = rule;
        l->index[rule] = l->n_called;
    }
    return l->index[rule] - 1;
}

static void make_machines(struct link *l, uint32_t root)
{
    struct nfa_rules rules = {l->inlined, l->nullable};
    uint64_t states = 0;

    place(l, root);
    for (uint32_t i = 0; i < l->n_called; i++) {
        struct machine *m =
            machine_of(l->b, l->b->rules[l->called[i]].node, &rules, l->called[i] != root);
        if (!m)
            return;
        l->machines[i] = m;
        states += m->n;
        if (states > MACHINE_STATES_MAX)
            build_fail(l->b, E2BIG, "the grammar is too large: more than %u states",
                       MACHINE_STATES_MAX);
        for (uint32_t c = 0; c < m->call_first[m->n]; c++)
            m->calls[c].rule = place(l, m->calls[c].rule);
        l->alive[i] = mem_alloc(m->n, 1);
        if (!l->alive[i])
            build_fail(l->b, ENOMEM, "no memory for the grammar");
        if (l->b->failed)
            return;
    }
}

/* One pass over a machine's states, from the last to the first. */
static bool revive(struct link *l, uint32_t i)
{
    const struct machine *m = l->machines[i];
    bool *alive = l->alive[i], changed = false;

    for (uint32_t q = m->n; q-- > 0;) {
        bool now = m->final[q];
        if (alive[q])
            continue;
        for (uint32_t e = m->byte_first[q]; e < m->byte_first[q + 1] && !now; e++)
            now = alive[m->bytes[e].to];
        for (uint32_t c = m->call_first[q]; c < m->call_first[q + 1] && !now; c++)
            now = alive[m->calls[c].to] && l->alive[m->calls[c].rule][0];
        changed |= alive[q] = now;
    }
    build_work(l->b, m->n);
    return changed;
}

static void find_alive(struct link *l)
{
    bool changed = true;

    while (changed && !l->b->failed) {
        changed = false;
        for (uint32_t i = l->n_called; i-- > 0 && !l->b->failed;)
            while (revive(l, i) && !l->b->failed)
                changed = true;
    }
}

static bool call_alive(const struct link *l, uint32_t i, uint32_t c)
{
    const struct call_edge *x = &l->machines[i]->calls[c];
    return l->alive[x->rule][0] && l->alive[i][x->to];
}

/* Orders rules so that those at another's start come behind it. */
static void sort_rule(struct link *l, uint32_t i)
{
    const struct machine *m = l->machines[i];

    if (l->sorted[i] == VISITING) {
        const char *name = l->b->rules[l->called[i]].name;
        build_fail(l->b, ENOTSUP,
                   "rule \"%.64s\" can begin with itself by way of another (left recursion)",
                   name ? name : "?");
    }
    if (l->sorted[i] != NEW || l->b->failed)
        return;
    if (++l->depth > 20 * NESTING_MAX)
        build_fail(l->b, E2BIG, "the grammar is nested too deeply");
    l->sorted[i] = VISITING;
    for (uint32_t c = m->call_first[0]; c < m->call_first[1]; c++)
        if (call_alive(l, i, c))
            sort_rule(l, m->calls[c].rule);
    l->depth--;
    l->sorted[i] = DONE;
    l->order[l->n_order++] = i; /* the last one first */
}

/* ---- writing ---- */

struct writer {
    uint32_t *rule;   /* by place: its number, or NO_RULE */
    uint32_t **state; /* by place, by state: its number */
    uint32_t n_rules, n_states, n_edges, n_calls;
};

static void number(struct link *l, struct writer *w)
{
    for (uint32_t k = l->n_order; k-- > 0;) {
        uint32_t i = l->order[k];
        const struct machine *m = l->machines[i];
        if (!l->alive[i][0])
            continue;
        w->rule[i] = w->n_rules++;
        w->state[i] = x_alloc(m->n * sizeof **w->state);
        for (uint32_t q = 0; q < m->n; q++) {
            if (!l->alive[i][q])
                continue;
            w->state[i][q] = w->n_states++;
            for (uint32_t e = m->byte_first[q]; e < m->byte_first[q + 1]; e++)
                w->n_edges += l->alive[i][m->bytes[e].to];
            for (uint32_t c = m->call_first[q]; c < m->call_first[q + 1]; c++)
                w->n_calls += call_alive(l, i, c);
        }
    }
}

struct sections {
    uint32_t *rules, *edge_first, *call_first;
    uint8_t *final;
    struct program_edge *edges;
    struct program_call *calls;
    uint32_t q, e, c;
};

static void write_rule(struct link *l, const struct writer *w, uint32_t i, struct sections *s)
{
    const struct machine *m = l->machines[i];

    for (uint32_t q = 0; q < m->n; q++) {
        if (!l->alive[i][q])
            continue;
        s->edge_first[s->q] = s->e;
        s->call_first[s->q] = s->c;
        s->final[s->q++] = m->final[q];
        for (uint32_t e = m->byte_first[q]; e < m->byte_first[q + 1]; e++)
            if (l->alive[i][m->bytes[e].to])
                s->edges[s->e++] = (struct program_edge){w->state[i][m->bytes[e].to],
                                                         m->bytes[e].lo, m->bytes[e].hi, 0};
        for (uint32_t c = m->call_first[q]; c < m->call_first[q + 1]; c++)
            if (call_alive(l, i, c))
                s->calls[s->c++] =
                    (struct program_call){w->rule[m->calls[c].rule], m->calls[c].min,
                                          m->calls[c].max, w->state[i][m->calls[c].to]};
    }
}

static void write_program(struct link *l, const struct writer *w, struct buffer *out)
{
    uint64_t padded = size_align(w->n_states, 4);
    uint64_t len = PROGRAM_HEADER * 4 + 4 * ((uint64_t)w->n_rules + 1) +
                   8 * ((uint64_t)w->n_states + 1) + padded + 8 * (uint64_t)w->n_edges +
                   16 * (uint64_t)w->n_calls;
    struct sections s = {0};

    if (len > GRAMMAR_PROGRAM_MAX) {
        build_fail(l->b, E2BIG, "the grammar is too large: its program has %llu bytes, at most %u",
                   (unsigned long long)len, GRAMMAR_PROGRAM_MAX);
        return;
    }
    uint32_t *words = mem_alloc(len, 1);
    if (!words) {
        build_fail(l->b, ENOMEM, "no memory for the grammar");
        return;
    }
    const uint32_t header[PROGRAM_HEADER] = {PROGRAM_MAGIC, w->n_rules, w->n_states,
                                             w->n_edges,    w->n_calls, (uint32_t)len};
    memcpy(words, header, sizeof header);
    s.rules = words + PROGRAM_HEADER;
    s.edge_first = s.rules + w->n_rules + 1;
    s.call_first = s.edge_first + w->n_states + 1;
    s.final = (uint8_t *)(s.call_first + w->n_states + 1);
    s.edges = (struct program_edge *)(s.final + padded);
    s.calls = (struct program_call *)(s.edges + w->n_edges);
    for (uint32_t k = l->n_order; k-- > 0;) {
        uint32_t i = l->order[k];
        if (w->rule[i] == NO_RULE)
            continue;
        s.rules[w->rule[i]] = s.q;
        write_rule(l, w, i, &s);
    }
    s.rules[w->n_rules] = s.q;
    s.edge_first[s.q] = s.e;
    s.call_first[s.q] = s.c;
    if (buffer_append(out, words, len) < 0)
        build_fail(l->b, ENOMEM, "no memory for the grammar");
    free(words);
}

static void finish(struct link *l, struct buffer *out)
{
    struct writer w = {.rule = x_alloc(l->n_called * sizeof *w.rule),
                       .state = x_alloc(l->n_called * sizeof *w.state)};

    memset(w.rule, 0xFF, l->n_called * sizeof *w.rule);
    number(l, &w);
    write_program(l, &w, out);
    for (uint32_t i = 0; i < l->n_called; i++)
        free(w.state[i]);
    free(w.state);
    free(w.rule);
}

/* Something has to be there to say, and something that is not the empty text. */
static void check_root(struct link *l)
{
    const struct machine *m = l->machines[0];
    bool any = false;

    for (uint32_t e = m->byte_first[0]; e < m->byte_first[1]; e++)
        any |= l->alive[0][m->bytes[e].to];
    for (uint32_t c = m->call_first[0]; c < m->call_first[1]; c++)
        any |= call_alive(l, 0, c);
    if (!any)
        build_fail(l->b, EINVAL,
                   l->alive[0][0] ? "nothing but the empty text satisfies it"
                                  : "no text at all satisfies it");
}

static void arrange(struct link *l)
{
    for (uint32_t i = l->n_called; i-- > 1 && !l->b->failed;)
        if (l->alive[i][0])
            sort_rule(l, i);
    if (!l->b->failed)
        sort_rule(l, 0);
}

int link_program(struct build *b, struct node *root, struct buffer *out)
{
    struct link l = {.b = b};
    uint32_t r = build_rule(b, NULL, 0);

    build_define(b, r, root);
    if (!b->failed)
        visit_rule(&l, r);
    l.called = x_alloc((b->n_rules + 1) * sizeof *l.called);
    l.machines = x_alloc((b->n_rules + 1) * sizeof *l.machines);
    l.alive = x_alloc((b->n_rules + 1) * sizeof *l.alive);
    l.order = x_alloc((b->n_rules + 1) * sizeof *l.order);
    l.sorted = x_alloc(b->n_rules + 1);
    if (make_room(&l))
        find_nullable(&l);
    if (!b->failed)
        make_machines(&l, r);
    if (!b->failed)
        find_alive(&l);
    if (!b->failed)
        check_root(&l);
    if (!b->failed)
        arrange(&l);
    if (!b->failed)
        finish(&l, out);
    for (uint32_t i = 0; i < l.n_called; i++) {
        machine_free(l.machines[i]);
        free(l.alive[i]);
    }
    free(l.seen), free(l.recursive), free(l.nullable), free(l.size), free(l.inlined);
    free(l.called), free(l.index), free(l.machines), free(l.alive), free(l.order), free(l.sorted);
    return b->failed;
}
