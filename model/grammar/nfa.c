/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From nodes to a deterministic machine: an automaton with empty edges first (Thompson's), then the
 * subset construction, in which calling a rule is one more symbol of the alphabet.
 */
#include <errno.h>
#include <string.h>

#include "base/digest.h"
#include "model/grammar/internal.h"

#define NO_EDGE UINT32_MAX

enum edge_kind { EDGE_EMPTY, EDGE_BYTES, EDGE_CALL };

struct nfa {
    struct build *b;
    const struct nfa_rules *rules;
    uint32_t *head; /* [cap] first edge of a state */
    uint32_t n, cap;
    struct nfa_edge {
        uint32_t next, to;
        uint8_t kind, lo, hi;
        uint32_t rule, min, max;
    } * edges;
    uint32_t n_edges, cap_edges;
    unsigned depth;
};

static bool grow(struct build *b, void *array, uint32_t *cap, uint32_t n, size_t size)
{
    void **p = array;

    if (n < *cap)
        return true;
    uint32_t more = MAX(256, 2 * *cap);
    void *grown = reallocarray(*p, more, size);
    if (!grown) {
        build_fail(b, ENOMEM, "no memory for the grammar");
        return false;
    }
    *p = grown;
    *cap = more;
    return true;
}

static uint32_t state(struct nfa *a)
{
    if (a->n >= NFA_STATES_MAX)
        build_fail(a->b, E2BIG, "the grammar is too large: a rule of it has more than %u states",
                   NFA_STATES_MAX);
    if (a->b->failed || !grow(a->b, &a->head, &a->cap, a->n, sizeof *a->head))
        return 0;
    a->head[a->n] = NO_EDGE;
    return a->n++;
}

static void edge(struct nfa *a, uint32_t from, struct nfa_edge e)
{
    if (a->b->failed || !grow(a->b, &a->edges, &a->cap_edges, a->n_edges, sizeof *a->edges) ||
        !build_work(a->b, 1))
        return;
    e.next = a->head[from];
    a->edges[a->n_edges] = e;
    a->head[from] = a->n_edges++;
}

static void empty(struct nfa *a, uint32_t from, uint32_t to)
{
    edge(a, from, (struct nfa_edge){.to = to, .kind = EDGE_EMPTY});
}

static void bytes(struct nfa *a, uint32_t from, uint32_t to, uint8_t lo, uint8_t hi)
{
    edge(a, from, (struct nfa_edge){.to = to, .kind = EDGE_BYTES, .lo = lo, .hi = hi});
}

static void text(struct nfa *a, uint32_t from, uint32_t to, const uint8_t *s, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t next = i + 1 == n ? to : state(a);
        bytes(a, from, next, s[i], s[i]);
        from = next;
    }
}

/* ---- characters ---- */

static unsigned encode(uint32_t c, uint8_t *s)
{
    if (c < 0x80)
        return s[0] = (uint8_t)c, 1;
    if (c < 0x800)
        return s[0] = (uint8_t)(0xC0 | c >> 6), s[1] = (uint8_t)(0x80 | (c & 63)), 2;
    if (c < 0x10000)
        return s[0] = (uint8_t)(0xE0 | c >> 12), s[1] = (uint8_t)(0x80 | (c >> 6 & 63)),
               s[2] = (uint8_t)(0x80 | (c & 63)), 3;
    return s[0] = (uint8_t)(0xF0 | c >> 18), s[1] = (uint8_t)(0x80 | (c >> 12 & 63)),
           s[2] = (uint8_t)(0x80 | (c >> 6 & 63)), s[3] = (uint8_t)(0x80 | (c & 63)), 4;
}

/* A range as sequences of byte ranges: it is cut wherever a byte could not take all its values. */
static void range(struct nfa *a, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi)
{
    static const uint32_t borders[] = {0x7F, 0x7FF, 0xFFFF};
    uint8_t first[4], last[4];

    if (lo > hi || a->b->failed)
        return;
    for (unsigned i = 0; i < ARRAY_LEN(borders); i++)
        if (lo <= borders[i] && hi > borders[i]) {
            range(a, from, to, lo, borders[i]);
            range(a, from, to, borders[i] + 1, hi);
            return;
        }
    for (unsigned bits = 6; hi > 0x7F && bits <= 18; bits += 6) {
        uint32_t mask = (1u << bits) - 1;
        if ((lo & ~mask) == (hi & ~mask))
            break;
        uint32_t cut = (lo & mask) ? lo | mask : (hi & mask) != mask ? (hi & ~mask) - 1 : 0;
        if (!cut)
            continue;
        range(a, from, to, lo, cut);
        range(a, from, to, cut + 1, hi);
        return;
    }
    unsigned n = encode(lo, first);
    encode(hi, last);
    for (unsigned i = 0; i < n; i++) {
        uint32_t next = i + 1 == n ? to : state(a);
        bytes(a, from, next, first[i], last[i]);
        from = next;
    }
}

/* Without surrogates, which UTF-8 does not have. */
static void plain(struct nfa *a, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi)
{
    range(a, from, to, lo, MIN(hi, 0xD7FF));
    range(a, from, to, MAX(lo, 0xE000), MIN(hi, CHAR_MAX_CODE));
}

/* A character that a JSON string can only hold escaped. */
static void escaped(struct nfa *a, uint32_t from, uint32_t to, uint32_t c)
{
    static const char shorts[] = "\"\"\\\\\bb\ff\nn\rr\tt", digits[] = "0123456789abcdef";
    uint32_t slash = state(a), s[4];

    bytes(a, from, slash, '\\', '\\');
    for (unsigned i = 0; i + 1 < sizeof shorts; i += 2)
        if ((uint8_t)shorts[i] == c)
            bytes(a, slash, to, (uint8_t)shorts[i + 1], (uint8_t)shorts[i + 1]);
    if (c >= 0x20)
        return;
    for (unsigned i = 0; i < 4; i++)
        s[i] = state(a);
    bytes(a, slash, s[0], 'u', 'u');
    bytes(a, s[0], s[1], '0', '0');
    bytes(a, s[1], s[2], '0', '0');
    bytes(a, s[2], s[3], (uint8_t)digits[c >> 4], (uint8_t)digits[c >> 4]);
    bytes(a, s[3], to, (uint8_t)digits[c & 15], (uint8_t)digits[c & 15]);
    if ((c & 15) > 9)
        bytes(a, s[3], to, (uint8_t)(digits[c & 15] - 32), (uint8_t)(digits[c & 15] - 32));
}

static void chars(struct nfa *a, const struct node *node, uint32_t from, uint32_t to)
{
    for (uint32_t i = 0; i < node->n && !a->b->failed; i++) {
        struct range r = node->ranges[i];
        if (!node->json) {
            plain(a, from, to, r.lo, r.hi);
            continue;
        }
        for (uint32_t c = r.lo; c <= MIN(r.hi, '\\'); c++)
            if ((c < 0x20 && c) || c == '"' || c == '\\')
                escaped(a, from, to, c);
        plain(a, from, to, MAX(r.lo, 0x20), MIN(r.hi, '"' - 1));
        plain(a, from, to, MAX(r.lo, '"' + 1), MIN(r.hi, '\\' - 1));
        plain(a, from, to, MAX(r.lo, '\\' + 1), r.hi);
    }
}

/* ---- nodes ---- */

static void emit(struct nfa *a, const struct node *node, uint32_t from, uint32_t to);

static void seq(struct nfa *a, const struct node *node, uint32_t from, uint32_t to)
{
    for (uint32_t i = 0; i < node->n; i++) {
        uint32_t next = i + 1 == node->n ? to : state(a);
        emit(a, node->kids[i], from, next);
        from = next;
    }
}

static void repeat(struct nfa *a, const struct node *node, uint32_t from, uint32_t to)
{
    uint32_t end = state(a), at = state(a);

    empty(a, from, at);
    empty(a, end, to);
    for (uint32_t i = 0; i < node->min && !a->b->failed; i++) {
        uint32_t next = state(a);
        emit(a, node->kids[0], at, next);
        at = next;
    }
    empty(a, at, end);
    if (node->max == MANY) {
        uint32_t loop = state(a);
        empty(a, at, loop);
        emit(a, node->kids[0], loop, loop);
        empty(a, loop, end);
        return;
    }
    for (uint32_t i = node->min; i < node->max && !a->b->failed; i++) {
        uint32_t next = state(a);
        emit(a, node->kids[0], at, next);
        empty(a, next, end);
        at = next;
    }
}

static void call(struct nfa *a, uint32_t rule, uint32_t min, uint32_t max, uint32_t from,
                 uint32_t to)
{
    if (a->rules->nullable[rule])
        min = 0;
    if (!min)
        empty(a, from, to);
    edge(a, from,
         (struct nfa_edge){
             .to = to, .kind = EDGE_CALL, .rule = rule, .min = MAX(min, 1), .max = max});
}

static void copy_machine(struct nfa *a, const struct machine *m, uint32_t from, uint32_t to)
{
    uint32_t base = a->n;

    for (uint32_t i = 0; i < m->n; i++)
        state(a);
    if (a->b->failed)
        return;
    empty(a, from, base);
    for (uint32_t i = 0; i < m->n; i++) {
        for (uint32_t e = m->byte_first[i]; e < m->byte_first[i + 1]; e++)
            bytes(a, base + i, base + m->bytes[e].to, m->bytes[e].lo, m->bytes[e].hi);
        if (m->final[i])
            empty(a, base + i, to);
    }
}

static void copy_graph(struct nfa *a, const struct graph *g, uint32_t from, uint32_t to)
{
    uint32_t base = a->n;

    for (uint32_t i = 0; i < g->n_states; i++)
        state(a);
    if (a->b->failed)
        return;
    empty(a, from, base);
    empty(a, base + 1, to);
    for (uint32_t i = 0; i < g->n_edges; i++) {
        const struct graph_edge *e = &g->edges[i];
        if (e->label)
            emit(a, e->label, base + e->from, base + e->to);
        else
            empty(a, base + e->from, base + e->to);
    }
}

static void rule(struct nfa *a, uint32_t r, uint32_t from, uint32_t to)
{
    if (a->rules->inlined[r])
        emit(a, a->rules->inlined[r], from, to);
    else
        call(a, r, 1, 1, from, to);
}

static void emit(struct nfa *a, const struct node *node, uint32_t from, uint32_t to)
{
    if (a->b->failed)
        return;
    if (++a->depth > 4 * NESTING_MAX)
        build_fail(a->b, E2BIG, "the grammar is nested too deeply");
    switch (node->kind) {
    case NODE_NONE:
        break;
    case NODE_EMPTY:
        empty(a, from, to);
        break;
    case NODE_BYTES:
        text(a, from, to, node->bytes, node->n);
        break;
    case NODE_CHARS:
        chars(a, node, from, to);
        break;
    case NODE_SEQ:
        seq(a, node, from, to);
        break;
    case NODE_ALT:
        for (uint32_t i = 0; i < node->n; i++)
            emit(a, node->kids[i], from, to);
        break;
    case NODE_REPEAT:
        if (node->rule == NO_RULE)
            repeat(a, node, from, to);
        else
            call(a, node->rule, node->min, node->max, from, to);
        break;
    case NODE_RULE:
        rule(a, node->rule, from, to);
        break;
    case NODE_MACHINE:
        copy_machine(a, node->machine, from, to);
        break;
    case NODE_GRAPH:
        copy_graph(a, node->graph, from, to);
        break;
    }
    a->depth--;
}

/* ---- the subset construction ---- */

/* Sets of states, each a state of the machine: those with edges of their own, and the end. */
struct subsets {
    struct nfa *a;
    uint32_t end;
    uint32_t *items, n_items, cap_items; /* of all sets */
    struct subset {
        uint32_t first, n;
        uint64_t hash;
    } * sets;
    uint32_t n, cap;
    uint32_t *table, table_size; /* open addressing: index + 1 */
    uint32_t *mark, stamp;       /* [a->n] */
    uint32_t *stack;             /* [a->n] */
    uint32_t *found, n_found;    /* [a->n] the set being made */
    /* The machine, as it grows. */
    struct byte_edge *bytes;
    uint32_t n_bytes, cap_bytes;
    struct call_edge *calls;
    uint32_t n_calls, cap_calls;
};

static void set_begin(struct subsets *s)
{
    s->stamp++;
    s->n_found = 0;
}

/* Adds a state and all that empty edges lead to. */
static void set_add(struct subsets *s, uint32_t q)
{
    uint32_t depth = 0;

    if (s->mark[q] == s->stamp)
        return;
    s->mark[q] = s->stamp;
    s->stack[depth++] = q;
    while (depth) {
        uint32_t at = s->stack[--depth];
        bool own = at == s->end;
        for (uint32_t e = s->a->head[at]; e != NO_EDGE; e = s->a->edges[e].next) {
            const struct nfa_edge *edge_ = &s->a->edges[e];
            build_work(s->a->b, 1);
            if (edge_->kind != EDGE_EMPTY) {
                own = true;
            } else if (s->mark[edge_->to] != s->stamp) {
                s->mark[edge_->to] = s->stamp;
                s->stack[depth++] = edge_->to;
            }
        }
        if (own)
            s->found[s->n_found++] = at;
    }
}

static int by_number(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static bool rehash(struct subsets *s)
{
    uint32_t size = MAX(256, 2 * s->table_size);
    uint32_t *table = mem_alloc(size, sizeof *table);

    if (!table) {
        build_fail(s->a->b, ENOMEM, "no memory for the grammar");
        return false;
    }
    for (uint32_t i = 1; i < s->n; i++) { /* the start is not among them: it is never entered */
        uint32_t at = (uint32_t)s->sets[i].hash & (size - 1);
        while (table[at])
            at = (at + 1) & (size - 1);
        table[at] = i + 1;
    }
    free(s->table);
    s->table = table;
    s->table_size = size;
    return true;
}

static uint32_t set_new(struct subsets *s, uint64_t hash)
{
    struct build *b = s->a->b;

    if (s->n >= MACHINE_STATES_MAX)
        build_fail(b, E2BIG, "the grammar is too large: a rule of it needs more than %u states",
                   MACHINE_STATES_MAX);
    if (b->failed || !grow(b, &s->sets, &s->cap, s->n, sizeof *s->sets))
        return 0;
    s->sets[s->n] = (struct subset){s->n_items, s->n_found, hash};
    for (uint32_t i = 0; i < s->n_found; i++) {
        if (!grow(b, &s->items, &s->cap_items, s->n_items, sizeof *s->items))
            return 0;
        s->items[s->n_items++] = s->found[i];
    }
    return s->n++;
}

/* The number of the set found, a new one if need be. */
static uint32_t set_end(struct subsets *s)
{
    qsort(s->found, s->n_found, sizeof *s->found, by_number);
    uint64_t hash = checksum_of(s->found, s->n_found * sizeof *s->found);
    if (!build_work(s->a->b, 1 + s->n_found) || (2 * s->n >= s->table_size && !rehash(s)))
        return 0;
    uint32_t at = (uint32_t)hash & (s->table_size - 1);
    for (; s->table[at]; at = (at + 1) & (s->table_size - 1)) {
        const struct subset *x = &s->sets[s->table[at] - 1];
        if (x->hash == hash && x->n == s->n_found &&
            !memcmp(s->items + x->first, s->found, x->n * sizeof *s->found))
            return s->table[at] - 1;
    }
    uint32_t made = set_new(s, hash);
    if (made)
        s->table[at] = made + 1;
    return made;
}

static void add_byte_edge(struct subsets *s, uint32_t first, uint8_t lo, uint8_t hi, uint32_t to)
{
    if (s->n_bytes > first && s->bytes[s->n_bytes - 1].to == to &&
        s->bytes[s->n_bytes - 1].hi + 1 == lo) {
        s->bytes[s->n_bytes - 1].hi = hi;
        return;
    }
    if (grow(s->a->b, &s->bytes, &s->cap_bytes, s->n_bytes, sizeof *s->bytes))
        s->bytes[s->n_bytes++] = (struct byte_edge){lo, hi, to};
}

/* Cuts the bytes where an edge begins or ends, and looks where each piece leads. */
static void byte_edges(struct subsets *s, uint32_t set)
{
    struct nfa *a = s->a;
    bool cut[257] = {false}, any = false;
    uint32_t first = s->n_bytes;

    for (uint32_t i = 0; i < s->sets[set].n; i++)
        for (uint32_t e = a->head[s->items[s->sets[set].first + i]]; e != NO_EDGE;
             e = a->edges[e].next)
            if (a->edges[e].kind == EDGE_BYTES)
                cut[a->edges[e].lo] = cut[a->edges[e].hi + 1] = any = true;
    for (unsigned lo = 0, hi; any && lo < 256 && !a->b->failed; lo = hi + 1) {
        for (hi = lo; hi < 255 && !cut[hi + 1]; hi++)
            ;
        set_begin(s);
        for (uint32_t i = 0; i < s->sets[set].n; i++)
            for (uint32_t e = a->head[s->items[s->sets[set].first + i]]; e != NO_EDGE;
                 e = a->edges[e].next)
                if (a->edges[e].kind == EDGE_BYTES && a->edges[e].lo <= lo && a->edges[e].hi >= lo)
                    set_add(s, a->edges[e].to);
        build_work(a->b, s->sets[set].n);
        if (s->n_found)
            add_byte_edge(s, first, (uint8_t)lo, (uint8_t)hi, set_end(s));
    }
}

static bool same_call(const struct nfa_edge *x, const struct nfa_edge *y)
{
    return x->rule == y->rule && x->min == y->min && x->max == y->max;
}

/* Calls of one rule with one count lead on together. */
static void call_edges(struct subsets *s, uint32_t set)
{
    struct nfa *a = s->a;
    uint32_t first = s->n_calls;

    for (uint32_t i = 0; i < s->sets[set].n && !a->b->failed; i++)
        for (uint32_t e = a->head[s->items[s->sets[set].first + i]]; e != NO_EDGE;
             e = a->edges[e].next) {
            const struct nfa_edge c = a->edges[e];
            bool known = c.kind != EDGE_CALL;
            for (uint32_t k = first; k < s->n_calls && !known; k++)
                known = s->calls[k].rule == c.rule && s->calls[k].min == c.min &&
                        s->calls[k].max == c.max;
            if (known || !build_work(a->b, s->sets[set].n))
                continue;
            set_begin(s);
            for (uint32_t k = i; k < s->sets[set].n; k++)
                for (uint32_t f = a->head[s->items[s->sets[set].first + k]]; f != NO_EDGE;
                     f = a->edges[f].next)
                    if (a->edges[f].kind == EDGE_CALL && same_call(&a->edges[f], &c))
                        set_add(s, a->edges[f].to);
            uint32_t to = set_end(s);
            if (grow(a->b, &s->calls, &s->cap_calls, s->n_calls, sizeof *s->calls))
                s->calls[s->n_calls++] = (struct call_edge){c.rule, c.min, c.max, to};
        }
}

static bool holds_end(const struct subsets *s, uint32_t set)
{
    for (uint32_t i = 0; i < s->sets[set].n; i++)
        if (s->items[s->sets[set].first + i] == s->end)
            return true;
    return false;
}

static struct machine *construct(struct subsets *s, uint32_t start, bool strict)
{
    struct build *b = s->a->b;
    struct machine *m = x_alloc(sizeof *m);
    uint32_t cap_first = 0, cap_calls = 0, cap_final = 0;

    if (rehash(s)) {
        set_begin(s);
        set_add(s, start);
        qsort(s->found, s->n_found, sizeof *s->found, by_number);
        set_new(s, 0);
    }
    for (uint32_t i = 0; !b->failed && i < s->n; i++) {
        if (!grow(b, &m->byte_first, &cap_first, i + 1, sizeof *m->byte_first) ||
            !grow(b, &m->call_first, &cap_calls, i + 1, sizeof *m->call_first) ||
            !grow(b, &m->final, &cap_final, i, sizeof *m->final))
            break;
        m->byte_first[i] = s->n_bytes;
        m->call_first[i] = s->n_calls;
        m->final[i] = holds_end(s, i) && (i || !strict);
        byte_edges(s, i);
        call_edges(s, i);
        m->byte_first[i + 1] = s->n_bytes;
        m->call_first[i + 1] = s->n_calls;
        m->n = i + 1;
    }
    m->bytes = TAKE(s->bytes);
    m->calls = TAKE(s->calls);
    if (b->failed) {
        machine_free(m);
        return NULL;
    }
    return m;
}

struct machine *machine_of(struct build *b, const struct node *node, const struct nfa_rules *rules,
                           bool strict)
{
    struct nfa a = {.b = b, .rules = rules};
    struct subsets s = {.a = &a};
    struct machine *m = NULL;
    uint32_t start = state(&a);

    s.end = state(&a);
    emit(&a, node, start, s.end);
    s.mark = mem_alloc(a.n, sizeof *s.mark);
    s.stack = mem_alloc(a.n, sizeof *s.stack);
    s.found = mem_alloc(a.n, sizeof *s.found);
    if (!s.mark || !s.stack || !s.found)
        build_fail(b, ENOMEM, "no memory for the grammar");
    if (!b->failed)
        m = construct(&s, start, strict);
    free(a.head);
    free(a.edges);
    free(s.mark);
    free(s.stack);
    free(s.found);
    free(s.items);
    free(s.sets);
    free(s.table);
    free(s.bytes);
    free(s.calls);
    return m;
}
