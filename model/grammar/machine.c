/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include "model/grammar/internal.h"

#define GONE UINT32_MAX /* a state of the other machine that is none */

void machine_free(struct machine *m)
{
    if (!m)
        return;
    free(m->byte_first);
    free(m->call_first);
    free(m->bytes);
    free(m->calls);
    free(m->final);
    free(m);
}

static uint32_t next_of(const struct machine *m, uint32_t q, uint8_t byte, uint8_t *ret_until)
{
    for (uint32_t e = m->byte_first[q]; e < m->byte_first[q + 1]; e++) {
        if (m->bytes[e].lo > byte) {
            *ret_until = m->bytes[e].lo - 1;
            return GONE;
        }
        if (m->bytes[e].hi >= byte) {
            *ret_until = m->bytes[e].hi;
            return m->bytes[e].to;
        }
    }
    *ret_until = 255;
    return GONE;
}

bool machine_accepts(const struct machine *m, const void *bytes, size_t n)
{
    const uint8_t *s = bytes;
    uint32_t q = 0;
    uint8_t until;

    for (size_t i = 0; i < n && q != GONE; i++)
        q = next_of(m, q, s[i], &until);
    return q != GONE && m->final[q];
}

/* Pairs of states, found as they are reached. */
struct product {
    struct build *b;
    const struct machine *one, *other;
    struct pair {
        uint32_t one, other;
    } * pairs;
    uint32_t n, cap, *table, table_size;
    struct machine *m;
    uint32_t n_edges, cap_edges;
};

static uint32_t slot(const struct product *p, struct pair x)
{
    uint64_t h = (x.one + UINT64_C(0x9e3779b97f4a7c15)) * UINT64_C(0xbf58476d1ce4e5b9) ^
                 (x.other + 1) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)(h ^ h >> 29) & (p->table_size - 1);
}

static bool room(struct product *p)
{
    if (p->n >= MACHINE_STATES_MAX)
        build_fail(p->b, E2BIG, "a pattern together with its limits needs more than %u states",
                   MACHINE_STATES_MAX);
    if (p->b->failed || p->n < p->cap)
        return !p->b->failed;
    uint32_t cap = MAX(256, 2 * p->cap);
    p->pairs = x_realloc(p->pairs, cap * sizeof *p->pairs);
    p->m->byte_first = x_realloc(p->m->byte_first, (cap + 1) * sizeof *p->m->byte_first);
    p->m->final = x_realloc(p->m->final, cap * sizeof *p->m->final);
    p->cap = cap;
    free(p->table);
    p->table_size = 4 * cap;
    p->table = x_alloc(p->table_size * sizeof *p->table);
    for (uint32_t i = 0; i < p->n; i++) {
        uint32_t at = slot(p, p->pairs[i]);
        while (p->table[at])
            at = (at + 1) & (p->table_size - 1);
        p->table[at] = i + 1;
    }
    return true;
}

static uint32_t find(struct product *p, struct pair x)
{
    if (!room(p))
        return 0;
    uint32_t at = slot(p, x);
    for (; p->table[at]; at = (at + 1) & (p->table_size - 1)) {
        uint32_t i = p->table[at] - 1;
        if (p->pairs[i].one == x.one && p->pairs[i].other == x.other)
            return i;
    }
    p->pairs[p->n] = x;
    p->table[at] = ++p->n;
    return p->n - 1;
}

static void add_edge(struct product *p, uint8_t lo, uint8_t hi, uint32_t to)
{
    if (p->n_edges == p->cap_edges) {
        p->cap_edges = MAX(256, 2 * p->cap_edges);
        p->m->bytes = x_realloc(p->m->bytes, p->cap_edges * sizeof *p->m->bytes);
    }
    p->m->bytes[p->n_edges++] = (struct byte_edge){lo, hi, to};
}

static void explore(struct product *p, uint32_t i, bool without)
{
    struct pair at = p->pairs[i];

    for (unsigned byte = 0; byte < 256; byte++) {
        uint8_t until, until_other = 255;
        struct pair to = {next_of(p->one, at.one, (uint8_t)byte, &until), GONE};
        if (at.other != GONE)
            to.other = next_of(p->other, at.other, (uint8_t)byte, &until_other);
        unsigned lo = byte;
        byte = MIN(until, until_other);
        if (to.one != GONE && (to.other != GONE || without))
            add_edge(p, (uint8_t)lo, (uint8_t)byte, find(p, to));
        build_work(p->b, 1);
    }
}

/* Drops edges into states from which no end can be reached; false: the start is one of them. */
static bool trim(struct build *b, struct machine *m)
{
    bool *alive = mem_alloc(m->n, 1), changed = true;

    if (!alive) {
        build_fail(b, ENOMEM, "no memory for the grammar");
        return false;
    }
    memcpy(alive, m->final, m->n);
    while (changed && !b->failed) {
        changed = false;
        for (uint32_t i = m->n; i-- > 0;) {
            build_work(b, 1);
            for (uint32_t e = m->byte_first[i]; e < m->byte_first[i + 1] && !alive[i]; e++)
                if (alive[m->bytes[e].to])
                    alive[i] = changed = true;
        }
    }
    uint32_t out = 0, e = 0;
    for (uint32_t i = 0; i < m->n; i++) {
        uint32_t end = m->byte_first[i + 1];
        m->byte_first[i] = out;
        for (; e < end; e++)
            if (alive[m->bytes[e].to])
                m->bytes[out++] = m->bytes[e];
    }
    m->byte_first[m->n] = out;
    bool any = alive[0];
    free(alive);
    return any && !b->failed;
}

struct machine *machine_combine(struct build *b, const struct machine *one,
                                const struct machine *other, bool without)
{
    struct product p = {.b = b, .one = one, .other = other};

    if (b->failed || !one || (!other && !without))
        return NULL;
    p.m = x_alloc(sizeof *p.m);
    find(&p, (struct pair){0, other ? 0 : GONE});
    for (uint32_t i = 0; i < p.n && !b->failed; i++) {
        struct pair at = p.pairs[i];
        bool in_other = at.other != GONE && other->final[at.other];
        p.m->byte_first[i] = p.n_edges;
        p.m->final[i] = one->final[at.one] && in_other != without;
        explore(&p, i, without);
        p.m->byte_first[i + 1] = p.n_edges;
        p.m->n = i + 1;
    }
    p.m->call_first = x_alloc((p.m->n + 1) * sizeof *p.m->call_first);
    free(p.pairs);
    free(p.table);
    if (!b->failed && trim(b, p.m))
        return p.m;
    machine_free(p.m);
    return NULL;
}

struct machine *machine_narrow(struct build *b, struct machine *m, const struct node *node,
                               bool without)
{
    struct machine *other = m ? machine_of(b, node, NULL, false) : NULL,
                   *left = other ? machine_combine(b, m, other, without) : NULL;

    machine_free(m);
    machine_free(other);
    return left;
}
