/* SPDX-License-Identifier: Apache-2.0 */
#include "model/grammar/program.h"

#include <errno.h>

#include "model/grammar/grammar.h"

static int damaged(struct error *err, const char *what)
{
    return error_set(err, EBADMSG, "not a grammar program: %s", what);
}

/* Counts that rise from 0 to `end`. */
static bool rising(const uint32_t *first, uint32_t n, uint32_t end, bool strictly)
{
    for (uint32_t i = 0; i < n; i++)
        if (first[i] > first[i + 1] || (strictly && first[i] == first[i + 1]))
            return false;
    return first[0] == 0 && first[n] == end;
}

static bool sound_state(const struct program *p, uint32_t q, uint32_t lo, uint32_t hi)
{
    int last = -1;

    for (uint32_t e = p->edge_first[q]; e < p->edge_first[q + 1]; e++) {
        const struct program_edge *x = &p->edges[e];
        if (x->lo <= last || x->hi < x->lo || x->to < lo || x->to >= hi || x->zero)
            return false;
        last = x->hi;
    }
    for (uint32_t c = p->call_first[q]; c < p->call_first[q + 1]; c++) {
        const struct program_call *x = &p->calls[c];
        if (!x->rule || x->rule >= p->n_rules || !x->min || x->max < x->min || x->to < lo ||
            x->to >= hi)
            return false;
    }
    return p->final[q] <= 1;
}

static bool sound_rule(const struct program *p, uint32_t r)
{
    uint32_t start = p->rules[r];

    for (uint32_t q = start; q < p->rules[r + 1]; q++)
        if (!sound_state(p, q, start, p->rules[r + 1]))
            return false;
    for (uint32_t c = p->call_first[start]; c < p->call_first[start + 1]; c++)
        if (p->calls[c].rule <= r)
            return false;
    return !r || !p->final[start];
}

int program_check(const void *bytes, size_t len, struct program *ret, struct error *err)
{
    const uint32_t *w = bytes;

    if (len < PROGRAM_HEADER * 4 || len > GRAMMAR_PROGRAM_MAX || len % 4)
        return damaged(err, "its length");
    if (w[0] != PROGRAM_MAGIC || w[5] != len || w[6] || w[7])
        return damaged(err, "its header");
    struct program p = {.n_rules = w[1], .n_states = w[2], .n_edges = w[3], .n_calls = w[4]};
    if (!p.n_rules || p.n_rules > len / 4 || p.n_states > len / 4 || p.n_edges > len / 8 ||
        p.n_calls > len / 16)
        return damaged(err, "its counts");
    uint64_t padded = size_align(p.n_states, 4);
    if (PROGRAM_HEADER * 4 + 4 * ((uint64_t)p.n_rules + 1) + 8 * ((uint64_t)p.n_states + 1) +
            padded + 8 * (uint64_t)p.n_edges + 16 * (uint64_t)p.n_calls !=
        len)
        return damaged(err, "its sizes");
    p.rules = w + PROGRAM_HEADER;
    p.edge_first = p.rules + p.n_rules + 1;
    p.call_first = p.edge_first + p.n_states + 1;
    p.final = (const uint8_t *)(p.call_first + p.n_states + 1);
    p.edges = (const struct program_edge *)(p.final + padded);
    p.calls = (const struct program_call *)(p.edges + p.n_edges);
    if (!rising(p.rules, p.n_rules, p.n_states, true) ||
        !rising(p.edge_first, p.n_states, p.n_edges, false) ||
        !rising(p.call_first, p.n_states, p.n_calls, false))
        return damaged(err, "its tables");
    for (uint32_t r = 0; r < p.n_rules; r++)
        if (!sound_rule(&p, r))
            return damaged(err, "a rule");
    *ret = p;
    return 0;
}
