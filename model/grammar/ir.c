/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdarg.h>
#include <string.h>

#include "model/grammar/internal.h"

#define CHUNK_BYTES (64u << 10)

struct chunk {
    struct chunk *next;
    size_t used, size;
    _Alignas(16) uint8_t bytes[];
};

static struct node nothing = {.kind = NODE_NONE, .rule = NO_RULE, .measure = 1};

void build_free(struct build *b)
{
    while (b->chunks) {
        struct chunk *next = b->chunks->next;
        free(b->chunks);
        b->chunks = next;
    }
    for (uint32_t i = 0; i < b->n_machines; i++)
        machine_free(b->machines[i]);
    free(b->machines);
    free(b->rules);
    *b = (struct build){.err = b->err, .failed = b->failed};
}

int build_fail(struct build *b, int errnum, const char *format, ...)
{
    va_list ap;

    if (b->failed)
        return b->failed;
    va_start(ap, format);
    b->failed = error_setv(b->err, errnum, format, ap);
    va_end(ap);
    return b->failed;
}

bool build_work(struct build *b, uint64_t n)
{
    b->work += n;
    if (b->work > BUILD_WORK_MAX)
        build_fail(b, E2BIG, "the grammar is too large or too ambiguous");
    return !b->failed;
}

void *build_alloc(struct build *b, size_t n, size_t size)
{
    uint64_t want;

    if (b->failed)
        return NULL;
    if (!size_mul(n, size, &want) || want > BUILD_BYTES_MAX || b->used + want > BUILD_BYTES_MAX) {
        build_fail(b, E2BIG, "the grammar is too large");
        return NULL;
    }
    want = size_align(MAX(want, 1), 16);
    if (!b->chunks || b->chunks->size - b->chunks->used < want) {
        size_t room = MAX(want, CHUNK_BYTES);
        struct chunk *c = mem_alloc(1, sizeof *c + room);
        if (!c) {
            build_fail(b, ENOMEM, "no memory for the grammar");
            return NULL;
        }
        c->size = room;
        c->next = b->chunks;
        b->chunks = c;
    }
    void *p = b->chunks->bytes + b->chunks->used;
    b->chunks->used += want;
    b->used += want;
    return p;
}

/* ---- nodes ---- */

static struct node *node_new(struct build *b, enum node_kind kind)
{
    struct node *node = build_alloc(b, 1, sizeof *node);

    if (!node)
        return NULL;
    node->kind = kind;
    node->rule = NO_RULE;
    return node;
}

struct node *node_none(struct build *b)
{
    return &nothing;
}

struct node *node_empty(struct build *b)
{
    struct node *node = node_new(b, NODE_EMPTY);
    return node ? node : &nothing;
}

struct node *node_bytes(struct build *b, const void *bytes, size_t n)
{
    struct node *node = n ? node_new(b, NODE_BYTES) : node_empty(b);
    uint8_t *copy = n ? build_alloc(b, n, 1) : NULL;

    if (!n)
        return node;
    if (!node || !copy || n > UINT32_MAX)
        return &nothing;
    memcpy(copy, bytes, n);
    node->bytes = copy;
    node->n = (uint32_t)n;
    return node;
}

struct node *node_text(struct build *b, const char *text)
{
    return node_bytes(b, text, strlen(text));
}

static int by_low(const void *a, const void *b)
{
    const struct range *x = a, *y = b;
    return x->lo < y->lo ? -1 : x->lo > y->lo;
}

size_t ranges_normalize(struct range *r, size_t n)
{
    size_t out = 0;

    if (n)
        qsort(r, n, sizeof *r, by_low);
    for (size_t i = 0; i < n; i++) {
        if (out && r[i].lo <= r[out - 1].hi + 1)
            r[out - 1].hi = MAX(r[out - 1].hi, r[i].hi);
        else
            r[out++] = r[i];
    }
    return out;
}

size_t ranges_invert(const struct range *r, size_t n, struct range *ret)
{
    uint32_t from = 0;
    size_t out = 0;

    for (size_t i = 0; i < n; i++) {
        if (r[i].lo > from)
            ret[out++] = (struct range){from, r[i].lo - 1};
        from = r[i].hi + 1;
    }
    if (from <= CHAR_MAX_CODE)
        ret[out++] = (struct range){from, CHAR_MAX_CODE};
    return out;
}

struct node *node_chars(struct build *b, const struct range *ranges, size_t n, bool json)
{
    struct node *node = node_new(b, NODE_CHARS);
    struct range *copy = build_alloc(b, n, sizeof *copy);

    if (!node || !copy)
        return &nothing;
    memcpy(copy, ranges, n * sizeof *copy);
    node->n = (uint32_t)ranges_normalize(copy, n);
    node->ranges = copy;
    node->json = json;
    return node->n ? node : &nothing;
}

static struct node *node_of(struct build *b, enum node_kind kind, struct node *const *kids,
                            size_t n)
{
    struct node *node = node_new(b, kind);
    struct node **copy = build_alloc(b, n, sizeof *copy);

    if (!node || !copy)
        return &nothing;
    memcpy(copy, kids, n * sizeof *copy);
    node->kids = copy;
    node->n = (uint32_t)n;
    return node;
}

struct node *node_seq(struct build *b, struct node *const *kids, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (kids[i]->kind == NODE_NONE)
            return &nothing;
    return n == 0 ? node_empty(b) : n == 1 ? kids[0] : node_of(b, NODE_SEQ, kids, n);
}

struct node *node_alt(struct build *b, struct node *const *kids, size_t n)
{
    struct list some = {0};

    for (size_t i = 0; i < n; i++)
        if (kids[i]->kind != NODE_NONE)
            list_add(b, &some, kids[i]);
    struct node *node = some.n == 0   ? &nothing
                        : some.n == 1 ? some.items[0]
                                      : node_of(b, NODE_ALT, some.items, some.n);
    list_free(&some);
    return node;
}

struct node *node_pair(struct build *b, struct node *first, struct node *second)
{
    struct node *kids[] = {first, second};
    return node_seq(b, kids, 2);
}

struct node *node_either(struct build *b, struct node *one, struct node *other)
{
    struct node *kids[] = {one, other};
    return node_alt(b, kids, 2);
}

struct node *node_repeat(struct build *b, struct node *kid, uint32_t min, uint32_t max)
{
    if (max == 0 || (kid->kind == NODE_NONE && min == 0))
        return node_empty(b);
    if (kid->kind == NODE_NONE || kid->kind == NODE_EMPTY || (min == 1 && max == 1))
        return kid;
    struct node *node = node_of(b, NODE_REPEAT, &kid, 1);
    if (node == &nothing)
        return node;
    node->min = min;
    node->max = max;
    return node;
}

struct node *node_rule(struct build *b, uint32_t rule)
{
    struct node *node = node_new(b, NODE_RULE);

    if (!node || rule == NO_RULE)
        return &nothing;
    node->rule = rule;
    return node;
}

struct node *node_machine(struct build *b, struct machine *machine)
{
    struct node *node = machine ? node_new(b, NODE_MACHINE) : NULL;

    if (machine && b->n_machines == b->cap_machines) {
        uint32_t cap = MAX(16, 2 * b->cap_machines);
        struct machine **grown = reallocarray(b->machines, cap, sizeof *grown);
        if (!grown) {
            build_fail(b, ENOMEM, "no memory for the grammar");
            machine_free(machine);
            return &nothing;
        }
        b->machines = grown;
        b->cap_machines = cap;
    }
    if (!machine)
        return &nothing;
    b->machines[b->n_machines++] = machine;
    if (!node)
        return &nothing;
    node->machine = machine;
    return node;
}

struct node *node_graph(struct build *b, const struct graph *graph)
{
    struct node *node = graph ? node_new(b, NODE_GRAPH) : NULL;

    if (!node)
        return &nothing;
    node->graph = graph;
    return node;
}

struct graph *graph_new(struct build *b, uint32_t n_states)
{
    struct graph *g = build_alloc(b, 1, sizeof *g);

    if (g)
        g->n_states = n_states;
    return g;
}

void graph_edge(struct build *b, struct graph *g, uint32_t from, uint32_t to, struct node *label)
{
    if (b->failed || (label && label->kind == NODE_NONE))
        return;
    if (g->n_edges == g->cap) {
        uint32_t cap = MAX(16, 2 * g->cap);
        struct graph_edge *grown = build_alloc(b, cap, sizeof *grown);
        if (!grown)
            return;
        if (g->n_edges)
            memcpy(grown, g->edges, g->n_edges * sizeof *grown);
        g->edges = grown;
        g->cap = cap;
    }
    g->edges[g->n_edges++] = (struct graph_edge){from, to, label};
}

/* ---- rules ---- */

uint32_t build_rule(struct build *b, const char *name, size_t len)
{
    if (b->failed)
        return NO_RULE;
    if (b->n_rules == b->cap_rules) {
        uint32_t cap = MAX(64, 2 * b->cap_rules);
        struct rule *grown =
            cap > (1u << 20) ? NULL : reallocarray(b->rules, cap, sizeof *b->rules);
        if (!grown) {
            build_fail(b, E2BIG, "the grammar has too many rules");
            return NO_RULE;
        }
        b->rules = grown;
        b->cap_rules = cap;
    }
    char *copy = name ? build_alloc(b, len + 1, 1) : NULL;
    if (copy)
        memcpy(copy, name, len);
    b->rules[b->n_rules] = (struct rule){.name = copy};
    return b->n_rules++;
}

uint32_t build_find_rule(const struct build *b, const char *name, size_t len)
{
    for (uint32_t i = 0; i < b->n_rules; i++)
        if (b->rules[i].name && strlen(b->rules[i].name) == len &&
            !memcmp(b->rules[i].name, name, len))
            return i;
    return NO_RULE;
}

void build_define(struct build *b, uint32_t rule, struct node *node)
{
    if (!b->failed && rule != NO_RULE)
        b->rules[rule].node = node;
}

void list_add(struct build *b, struct list *list, struct node *node)
{
    if (list->n == list->cap) {
        size_t cap = MAX(8, 2 * list->cap);
        struct node **grown = reallocarray(list->items, cap, sizeof *grown);
        if (!grown) {
            build_fail(b, ENOMEM, "no memory for the grammar");
            return;
        }
        list->items = grown;
        list->cap = cap;
    }
    list->items[list->n++] = node;
}

void list_free(struct list *list)
{
    free(list->items);
    *list = (struct list){0};
}
