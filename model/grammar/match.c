/* SPDX-License-Identifier: Apache-2.0 */
#include "model/grammar/match.h"

#include <errno.h>
#include <string.h>

#include "base/digest.h"
#include "model/grammar/vocab.h"

#define PENDING_MAX 2048 /* entries waiting for their rule's node */

/* Scratch of one step: the set under construction. */
struct closing {
    struct item items[ITEMS_MAX]; /* all, those without byte edges too */
    uint32_t n;
    struct pending {
        uint32_t rule;
        struct entry entry;
    } pending[PENDING_MAX];
    uint32_t n_pending;
    struct entry entries[PENDING_MAX];
    bool may_end;
};

/* ---- interning ---- */

static bool grow(struct states *s, void *array, uint32_t *cap, uint64_t n, size_t size)
{
    void **p = array;

    if (n <= *cap)
        return true;
    uint64_t more = MAX(MAX(n, 256), *cap + (uint64_t)*cap / 2);
    void *grown = more > UINT32_MAX / 32 ? NULL : reallocarray(*p, more, size);
    if (!grown) {
        s->failed = true;
        return false;
    }
    s->bytes += (more - *cap) * size;
    *p = grown;
    *cap = (uint32_t)more;
    return true;
}

static bool rehash(struct states *s, struct interned *t, uint32_t n, const void *first,
                   size_t stride)
{
    if (2 * n < t->size)
        return true;
    uint32_t size = MAX(256, 2 * t->size);
    uint32_t *table = mem_alloc(size, sizeof *table);
    if (!table) {
        s->failed = true;
        return false;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint64_t hash;
        memcpy(&hash, (const char *)first + i * stride, sizeof hash);
        uint32_t at = (uint32_t)hash & (size - 1);
        while (table[at])
            at = (at + 1) & (size - 1);
        table[at] = i + 1;
    }
    s->bytes += (size - t->size) * sizeof *table;
    free(t->table);
    *t = (struct interned){table, size};
    return true;
}

static int by_entry(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;

    if (x->call != y->call)
        return x->call < y->call ? -1 : 1;
    if (x->below != y->below)
        return x->below < y->below ? -1 : 1;
    if (x->left != y->left)
        return x->left < y->left ? -1 : 1;
    return x->need < y->need ? -1 : x->need > y->need;
}

/* Sorts, and drops what is there twice. */
static uint32_t sort_entries(struct entry *e, uint32_t n)
{
    uint32_t out = 0;

    if (n > 1)
        qsort(e, n, sizeof *e, by_entry);
    for (uint32_t i = 0; i < n; i++)
        if (!out || by_entry(&e[out - 1], &e[i]))
            e[out++] = e[i];
    return out;
}

/* Sorted entries to a node's number. */
static uint32_t find_node(struct states *s, const struct entry *entries, uint32_t n, bool *ret_new)
{
    uint64_t hash = checksum_of(entries, n * sizeof *entries);

    *ret_new = false;
    if (!rehash(s, &s->by_node, s->n_nodes,
                s->nodes ? (const char *)s->nodes + offsetof(struct stack_node, hash) : NULL,
                sizeof *s->nodes))
        return NODE_BOTTOM;
    uint32_t at = (uint32_t)hash & (s->by_node.size - 1);
    for (; s->by_node.table[at]; at = (at + 1) & (s->by_node.size - 1)) {
        const struct stack_node *x = &s->nodes[s->by_node.table[at] - 1];
        if (x->hash == hash && x->n == n &&
            (!n || !memcmp(s->entries + x->first, entries, n * sizeof *entries)))
            return s->by_node.table[at] - 1;
    }
    if (!grow(s, &s->nodes, &s->cap_nodes, (uint64_t)s->n_nodes + 1, sizeof *s->nodes) ||
        !grow(s, &s->entries, &s->cap_entries, (uint64_t)s->n_entries + n, sizeof *s->entries))
        return NODE_BOTTOM;
    if (n)
        memcpy(s->entries + s->n_entries, entries, n * sizeof *entries);
    bool counted = false;
    for (uint32_t i = 0; i < n; i++)
        counted |= entries[i].left != 1 || s->nodes[entries[i].below].counted;
    s->nodes[s->n_nodes] = (struct stack_node){s->n_entries, n, s->n_nodes, counted, hash};
    s->n_entries += n;
    s->by_node.table[at] = ++s->n_nodes;
    *ret_new = true;
    return s->n_nodes - 1;
}

/* The node without far counts. */
static uint32_t clip_node(struct states *s, uint32_t node)
{
    struct stack_node x = s->nodes[node];
    _cleanup_free_ struct entry *copy = mem_alloc(x.n + 1, sizeof *copy);
    bool changed = false, made;

    if (!copy) {
        s->failed = true;
        return node;
    }
    for (uint32_t i = 0; i < x.n; i++) {
        struct entry e = s->entries[x.first + i], c = e;
        c.need = e.need > COUNT_FAR ? FOREVER : e.need;
        c.left = e.left > COUNT_FAR ? FOREVER : e.left;
        c.below = s->nodes[e.below].clip;
        changed |= memcmp(&e, &c, sizeof e) != 0;
        copy[i] = c;
    }
    return changed ? find_node(s, copy, sort_entries(copy, x.n), &made) : node;
}

/* The same as find_node; a new node gets its clip. */
static uint32_t intern_node(struct states *s, const struct entry *entries, uint32_t n)
{
    bool made;
    uint32_t node = find_node(s, entries, n, &made);

    if (made) {
        uint32_t clip = clip_node(s, node);
        s->nodes[node].clip = clip;
    }
    return node;
}

static int by_item(const void *a, const void *b)
{
    const struct item *x = a, *y = b;

    if (x->state != y->state)
        return x->state < y->state ? -1 : 1;
    return x->node < y->node ? -1 : x->node > y->node;
}

static uint32_t intern_set(struct states *s, struct item *items, uint32_t n, bool may_end)
{
    uint32_t out = 0;

    if (!n && !may_end)
        return SET_DEAD;
    if (n > 1)
        qsort(items, n, sizeof *items, by_item);
    for (uint32_t i = 0; i < n; i++)
        if (!out || by_item(&items[out - 1], &items[i]))
            items[out++] = items[i];
    uint64_t hash = checksum_of(items, out * sizeof *items) ^ may_end;
    if (!rehash(s, &s->by_set, s->n_sets,
                s->sets ? (const char *)s->sets + offsetof(struct set, hash) : NULL,
                sizeof *s->sets))
        return SET_DEAD;
    uint32_t at = (uint32_t)hash & (s->by_set.size - 1);
    for (; s->by_set.table[at]; at = (at + 1) & (s->by_set.size - 1)) {
        const struct set *x = &s->sets[s->by_set.table[at] - 1];
        if (x->hash == hash && x->n == out && x->may_end == may_end &&
            (!out || !memcmp(s->items + x->first, items, out * sizeof *items)))
            return s->by_set.table[at] - 1;
    }
    if (!grow(s, &s->sets, &s->cap_sets, (uint64_t)s->n_sets + 1, sizeof *s->sets) ||
        !grow(s, &s->items, &s->cap_items, (uint64_t)s->n_items + out, sizeof *s->items))
        return SET_DEAD;
    if (out)
        memcpy(s->items + s->n_items, items, out * sizeof *items);
    s->sets[s->n_sets] = (struct set){.first = s->n_items,
                                      .n = out,
                                      .clip = SET_UNKNOWN,
                                      .same = SET_UNKNOWN,
                                      .may_end = may_end,
                                      .hash = hash};
    s->n_items += out;
    s->by_set.table[at] = ++s->n_sets;
    return s->n_sets - 1;
}

/* ---- closing a set: ends of rules, then calls ---- */

static void add_item(struct closing *c, uint32_t state, uint32_t node)
{
    for (uint32_t i = 0; i < c->n; i++)
        if (c->items[i].state == state && c->items[i].node == node)
            return;
    if (c->n < ITEMS_MAX)
        c->items[c->n++] = (struct item){state, node};
}

static void add_pending(struct closing *c, uint32_t rule, struct entry entry)
{
    if (entry.left && c->n_pending < PENDING_MAX)
        c->pending[c->n_pending++] = (struct pending){rule, entry};
}

/* The rule has ended: every caller goes on, or calls once more. */
static void end_rule(struct grammar *g, struct closing *c, uint32_t node)
{
    struct stack_node x = g->states.nodes[node];

    if (node == NODE_BOTTOM)
        c->may_end = true;
    for (uint32_t i = 0; i < x.n; i++) {
        struct entry e = g->states.entries[x.first + i];
        const struct program_call *call = &g->program.calls[e.call];
        e.left -= e.left != FOREVER;
        e.need -= e.need != FOREVER && e.need;
        add_pending(c, call->rule, e);
        if (!e.need)
            add_item(c, call->to, e.below);
    }
}

static void begin_calls(struct grammar *g, struct closing *c, struct item at)
{
    for (uint32_t i = g->program.call_first[at.state]; i < g->program.call_first[at.state + 1];
         i++) {
        const struct program_call *call = &g->program.calls[i];
        add_pending(c, call->rule, (struct entry){i, call->min, call->max, at.node});
    }
}

/* All that wait for the rule: one node for them, and the rule's start. */
static void begin_rule(struct grammar *g, struct closing *c, uint32_t rule)
{
    uint32_t n = 0, kept = 0;

    for (uint32_t i = 0; i < c->n_pending; i++) {
        if (c->pending[i].rule == rule)
            c->entries[n++] = c->pending[i].entry;
        else
            c->pending[kept++] = c->pending[i];
    }
    c->n_pending = kept;
    n = sort_entries(c->entries, n);
    uint32_t node = intern_node(&g->states, c->entries, n);
    if (g->states.failed)
        return;
    add_item(c, g->program.rules[rule], node);
    begin_calls(g, c, (struct item){g->program.rules[rule], node});
}

/*
 * c->items are the states behind a byte. Rules at another's start have higher numbers, and none
 * ends at its start: so each rule's callers are all known when its turn comes.
 */
static uint32_t close_set(struct grammar *g, struct closing *c)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < c->n; i++) {
        if (g->program.final[c->items[i].state])
            end_rule(g, c, c->items[i].node);
        begin_calls(g, c, c->items[i]);
    }
    while (c->n_pending && !g->states.failed) {
        uint32_t rule = c->pending[0].rule;
        for (uint32_t i = 1; i < c->n_pending; i++)
            rule = MIN(rule, c->pending[i].rule);
        begin_rule(g, c, rule);
    }
    if (g->states.failed)
        return SET_DEAD;
    for (uint32_t i = 0; i < c->n; i++) {
        uint32_t q = c->items[i].state;
        if (g->program.edge_first[q] != g->program.edge_first[q + 1])
            c->items[n++] = c->items[i];
    }
    return intern_set(&g->states, c->items, n, c->may_end);
}

static void closing_begin(struct closing *c)
{
    c->n = c->n_pending = 0;
    c->may_end = false;
}

/* The edge of a state for a byte, or where the next one begins. */
static const struct program_edge *edge_for(const struct program *p, uint32_t state, uint8_t byte,
                                           unsigned *lo, unsigned *hi)
{
    uint32_t from = p->edge_first[state], to = p->edge_first[state + 1];

    while (from < to) { /* the first edge that does not end before the byte */
        uint32_t mid = from + (to - from) / 2;
        if (p->edges[mid].hi < byte)
            from = mid + 1;
        else
            to = mid;
    }
    if (from > p->edge_first[state])
        *lo = MAX(*lo, p->edges[from - 1].hi + 1u);
    if (from == p->edge_first[state + 1])
        return NULL;
    const struct program_edge *e = &p->edges[from];
    if (e->lo > byte) {
        *hi = MIN(*hi, e->lo - 1u);
        return NULL;
    }
    *lo = MAX(*lo, e->lo);
    *hi = MIN(*hi, e->hi);
    return e;
}

static bool has_next(struct states *s, uint32_t set)
{
    if (s->sets[set].next)
        return true;
    uint32_t *next = malloc(256 * sizeof *next);
    if (!next) {
        s->failed = true;
        return false;
    }
    memset(next, 0xFF, 256 * sizeof *next);
    s->sets[set].next = next;
    s->bytes += 256 * sizeof *next;
    return true;
}

uint32_t grammar_step(struct grammar *g, uint32_t set, uint8_t byte)
{
    struct states *s = &g->states;
    struct closing *c = g->closing;
    unsigned lo = 0, hi = 255;

    if (set == SET_DEAD || (s->sets[set].next && s->sets[set].next[byte] != SET_UNKNOWN))
        return set == SET_DEAD ? SET_DEAD : s->sets[set].next[byte];
    if (!has_next(s, set))
        return SET_DEAD;
    closing_begin(c);
    for (uint32_t i = 0; i < s->sets[set].n; i++) {
        struct item at = s->items[s->sets[set].first + i];
        const struct program_edge *e = edge_for(&g->program, at.state, byte, &lo, &hi);
        if (e)
            add_item(c, e->to, at.node);
    }
    uint32_t to = close_set(g, c);
    if (s->failed)
        return SET_DEAD;
    for (unsigned b = lo; b <= hi; b++) /* all bytes that take the same edges */
        s->sets[set].next[b] = to;
    return to;
}

uint32_t grammar_clip(struct grammar *g, uint32_t set)
{
    struct states *s = &g->states;
    struct closing *c = g->closing;

    if (s->sets[set].clip != SET_UNKNOWN)
        return s->sets[set].clip;
    uint32_t n = s->sets[set].n;
    for (uint32_t i = 0; i < n; i++) {
        struct item at = s->items[s->sets[set].first + i];
        c->items[i] = (struct item){at.state, s->nodes[at.node].clip};
    }
    uint32_t clip = intern_set(s, c->items, n, s->sets[set].may_end);
    if (s->failed)
        return set;
    s->sets[set].clip = clip;
    s->sets[clip].clip = clip;
    return clip;
}

/* ---- life ---- */

static void states_free(struct states *s)
{
    for (uint32_t i = 0; i < s->n_sets; i++) {
        free(s->sets[i].next);
        free(s->sets[i].mask);
    }
    free(s->sets);
    free(s->items);
    free(s->nodes);
    free(s->entries);
    free(s->by_set.table);
    free(s->by_node.table);
    *s = (struct states){0};
}

/* The dead set and the bottom of all stacks have number 0. */
static bool states_begin(struct states *s)
{
    bool made;

    if (!grow(s, &s->sets, &s->cap_sets, 1, sizeof *s->sets))
        return false;
    s->sets[0] = (struct set){.clip = SET_DEAD, .same = SET_DEAD, .hash = 0};
    s->n_sets = 1;
    find_node(s, NULL, 0, &made);
    return !s->failed;
}

/* The beginning of a text. */
static uint32_t first_set(struct grammar *g)
{
    closing_begin(g->closing);
    add_item(g->closing, 0, NODE_BOTTOM);
    return close_set(g, g->closing);
}

int grammar_open(const void *program, size_t len, const struct vocab *vocab, struct grammar **ret,
                 struct error *err)
{
    _cleanup_(grammar_unrefp) struct grammar *g = mem_alloc(1, sizeof *g);

    if (!g)
        return error_set(err, ENOMEM, "no memory for a grammar");
    g->refs = 1;
    g->len = len;
    g->vocab = vocab;
    g->bytes = mem_alloc(len + 1, 1);
    g->closing = mem_alloc(1, sizeof *g->closing);
    if (!g->bytes || !g->closing || !states_begin(&g->states))
        return error_set(err, ENOMEM, "no memory for a grammar of %zu bytes", len);
    memcpy(g->bytes, program, len);
    int r = program_check(g->bytes, len, &g->program, err);
    if (r == 0)
        *ret = TAKE(g);
    return r;
}

void grammar_use_vocab(struct grammar *g, const struct vocab *vocab)
{
    g->vocab = vocab;
}

void grammar_unref(struct grammar *g)
{
    if (!g || --g->refs)
        return;
    states_free(&g->states);
    free(g->bytes);
    free(g->closing);
    free(g);
}

size_t grammar_memory(const struct grammar *g)
{
    return sizeof *g + g->len + sizeof *g->closing + g->states.bytes;
}

/* ---- forgetting ---- */

/* Copies a set of the old states into the new ones; `map` knows the nodes. */
static uint32_t copy_set(struct states *to, const struct states *from, uint32_t set,
                         const uint32_t *map)
{
    struct item items[ITEMS_MAX];
    const struct set *x = &from->sets[set];

    for (uint32_t i = 0; i < x->n; i++) {
        struct item at = from->items[x->first + i];
        items[i] = (struct item){at.state, map[at.node]};
    }
    return intern_set(to, items, x->n, x->may_end);
}

/* Nodes that matchers need; those below have lower numbers. */
static void mark_nodes(const struct grammar *g, uint32_t *map)
{
    const struct states *s = &g->states;

    for (const struct matcher *m = g->matchers; m; m = m->next)
        for (uint32_t i = 0; i < s->sets[m->set].n; i++)
            map[s->items[s->sets[m->set].first + i].node] = 1;
    for (uint32_t n = s->n_nodes; n-- > 1;)
        for (uint32_t i = 0; map[n] && i < s->nodes[n].n; i++)
            map[s->entries[s->nodes[n].first + i].below] = 1;
}

void grammar_trim(struct grammar *g)
{
    struct states fresh = {0};
    const struct states *old = &g->states;
    _cleanup_free_ uint32_t *map = mem_alloc(old->n_nodes + 1, sizeof *map);
    _cleanup_free_ struct entry *entries = mem_alloc(PENDING_MAX, sizeof *entries);

    if (!map || !entries || !states_begin(&fresh)) {
        states_free(&fresh);
        return;
    }
    mark_nodes(g, map);
    map[NODE_BOTTOM] = NODE_BOTTOM;
    for (uint32_t n = 1; n < old->n_nodes; n++) {
        if (!map[n])
            continue;
        for (uint32_t i = 0; i < old->nodes[n].n; i++) {
            entries[i] = old->entries[old->nodes[n].first + i];
            entries[i].below = map[entries[i].below];
        }
        uint32_t count = sort_entries(entries, old->nodes[n].n);
        map[n] = intern_node(&fresh, entries, count);
    }
    for (struct matcher *m = g->matchers; m && !fresh.failed; m = m->next)
        m->moved = copy_set(&fresh, old, m->set, map);
    if (fresh.failed) { /* try again another time */
        states_free(&fresh);
        return;
    }
    for (struct matcher *m = g->matchers; m; m = m->next)
        m->set = m->moved;
    states_free(&g->states);
    g->states = fresh;
    g->kept = fresh.bytes;
}

/* ---- matchers ---- */

int matcher_new(struct grammar *g, struct matcher **ret, struct error *err)
{
    _cleanup_free_ struct matcher *m = mem_alloc(1, sizeof *m);
    uint32_t set = m ? first_set(g) : SET_DEAD;

    if (!m || g->states.failed) {
        g->states.failed = false;
        return error_set(err, ENOMEM, "no memory for a matcher");
    }
    g->refs++;
    *m = (struct matcher){.grammar = g, .next = g->matchers, .set = set};
    if (m->next)
        m->next->prev = m;
    g->matchers = m;
    *ret = TAKE(m);
    return 0;
}

void matcher_free(struct matcher *m)
{
    if (!m)
        return;
    if (m->next)
        m->next->prev = m->prev;
    if (m->prev)
        m->prev->next = m->next;
    else
        m->grammar->matchers = m->next;
    grammar_unref(m->grammar);
    free(m);
}

bool matcher_take_bytes(struct matcher *m, const void *bytes, size_t n)
{
    struct grammar *g = m->grammar;
    const uint8_t *s = bytes;
    uint32_t set = m->set;

    for (size_t i = 0; i < n && set != SET_DEAD; i++)
        set = grammar_step(g, set, s[i]);
    g->states.failed = false;
    if (set == SET_DEAD)
        return false;
    m->set = set;
    if (g->states.bytes > MAX(GRAMMAR_KEEP, 2 * g->kept))
        grammar_trim(g);
    return true;
}

bool matcher_take(struct matcher *m, uint32_t token)
{
    size_t len;
    const uint8_t *bytes = vocab_token(m->grammar->vocab, token, &len);

    return len && matcher_take_bytes(m, bytes, len);
}

bool matcher_may_end(const struct matcher *m)
{
    return m->grammar->states.sets[m->set].may_end;
}

bool matcher_must_end(const struct matcher *m)
{
    return !m->grammar->states.sets[m->set].n;
}
