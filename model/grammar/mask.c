/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Masks: the trie of the vocabulary and the grammar's automaton, walked together. A set's mask is
 * made once. Slices of safe characters (vocab.h) spare most of the walk wherever text may be free.
 */
#include <string.h>

#include "model/grammar/internal.h"
#include "model/grammar/match.h"
#include "model/grammar/vocab.h"

/*
 * How much a walk may look at, counted so that it depends on the set alone and not on what is known
 * already: the same mask whatever ran before. A grammar beyond it loses tokens, never soundness.
 */
#define WALK_MAX (2u << 20)
#define WALK_NEW_SET 256

/* What a set met for the first time in this walk costs, and 0 afterwards. */
static uint32_t cost(struct grammar *g, uint32_t set)
{
    struct set *x = &g->states.sets[set];

    if (x->walk == g->walk)
        return 1;
    x->walk = g->walk;
    return WALK_NEW_SET + 16 * x->n;
}

static void allow(const struct vocab *v, uint64_t *mask, uint32_t token)
{
    for (; token != NO_TOKEN; token = v->same[token])
        mask[token / 64] |= UINT64_C(1) << token % 64;
}

/* Whether something counts there: then what is longer than COUNT_FAR bytes is left out. */
static bool counts(const struct grammar *g, uint32_t set)
{
    const struct states *s = &g->states;
    bool any = false;

    for (uint32_t i = 0; i < s->sets[set].n; i++)
        any |= s->nodes[s->items[s->sets[set].first + i].node].counted;
    return any;
}

static void walk(struct grammar *g, uint32_t set, const struct trie *trie, uint64_t *mask)
{
    uint32_t sets[TOKEN_BYTES_MAX + 1] = {set};
    unsigned deepest = counts(g, set) ? COUNT_FAR : TOKEN_BYTES_MAX;
    uint64_t spent = 0;

    g->walk++;
    for (uint32_t i = 0; i < trie->n && spent < WALK_MAX;) {
        const struct trie_node *node = &trie->nodes[i];
        uint32_t to =
            node->depth < deepest ? grammar_step(g, sets[node->depth], node->byte) : SET_DEAD;
        if (to == SET_DEAD) {
            i = node->end;
            spent++;
            continue;
        }
        spent += cost(g, to);
        allow(g->vocab, mask, node->token);
        sets[node->depth + 1] = to;
        i++;
    }
}

/* ---- characters that all lead to one place ---- */

/* Where continuation bytes lo .. hi lead, if to one place; else SET_DIFFERS. */
static uint32_t bytes_lead(struct grammar *g, uint32_t set, unsigned lo, unsigned hi)
{
    uint32_t to = grammar_step(g, set, (uint8_t)lo);

    for (unsigned b = lo + 1; b <= hi && to != SET_DIFFERS; b++)
        if (grammar_step(g, set, (uint8_t)b) != to)
            to = SET_DIFFERS;
    return to;
}

/* Behind a lead byte: lo .. hi, then `more` times 80 .. BF. */
static uint32_t tail_leads(struct grammar *g, uint32_t set, unsigned lo, unsigned hi, unsigned more)
{
    uint32_t at = bytes_lead(g, set, lo, hi);

    for (; more && at != SET_DIFFERS; more--)
        at = bytes_lead(g, at, 0x80, 0xBF);
    return at;
}

/* Lead bytes, what may follow them, and how many more bytes then. E2 80 comes below. */
static const struct {
    uint8_t lead, last, lo, hi, more;
} forms[] = {{0xC2, 0xDF, 0x80, 0xBF, 0}, {0xE0, 0xE0, 0xA0, 0xBF, 1}, {0xE1, 0xE1, 0x80, 0xBF, 1},
             {0xE2, 0xE2, 0x81, 0xBF, 1}, {0xE3, 0xEC, 0x80, 0xBF, 1}, {0xED, 0xED, 0x80, 0x9F, 1},
             {0xEE, 0xEF, 0x80, 0xBF, 1}, {0xF0, 0xF0, 0x90, 0xBF, 2}, {0xF1, 0xF3, 0x80, 0xBF, 2},
             {0xF4, 0xF4, 0x80, 0x8F, 2}};

/* U+2000 to U+203F, without the two line ends among them, all lead there. */
static bool around_line_ends(struct grammar *g, uint32_t set, uint32_t to)
{
    uint32_t at = grammar_step(g, grammar_step(g, set, 0xE2), 0x80);

    return bytes_lead(g, at, 0x80, 0xA7) == to && bytes_lead(g, at, 0xAA, 0xBF) == to;
}

static uint32_t find_same(struct grammar *g, uint32_t set)
{
    uint32_t to = grammar_step(g, set, ' ');

    for (unsigned b = 0x21; b < 0x80; b++)
        if (b != '"' && b != '\\' && grammar_step(g, set, (uint8_t)b) != to)
            return SET_DIFFERS;
    for (size_t i = 0; i < ARRAY_LEN(forms); i++) {
        uint32_t lead = bytes_lead(g, set, forms[i].lead, forms[i].last);
        if (lead == SET_DIFFERS ||
            tail_leads(g, lead, forms[i].lo, forms[i].hi, forms[i].more) != to)
            return SET_DIFFERS;
    }
    return around_line_ends(g, set, to) ? to : SET_DIFFERS;
}

static uint32_t same_of(struct grammar *g, uint32_t set)
{
    if (g->states.sets[set].same == SET_UNKNOWN) {
        uint32_t to = find_same(g, set);
        if (!g->states.failed)
            g->states.sets[set].same = to;
        return to;
    }
    return g->states.sets[set].same;
}

/*
 * How many safe characters in a row may follow, whichever they are: up to SAFE_MAX. False when it
 * depends on the characters.
 */
static bool count_safe(struct grammar *g, uint32_t set, unsigned *ret)
{
    unsigned n = 0;

    for (; n < SAFE_MAX; n++) {
        uint32_t to = same_of(g, set);
        if (to == SET_DIFFERS)
            return false;
        if (to == SET_DEAD)
            break;
        set = to;
    }
    *ret = n;
    return true;
}

static void make_mask(struct grammar *g, uint32_t set, uint64_t *mask)
{
    const struct vocab *v = g->vocab;
    unsigned n;

    if (!count_safe(g, set, &n)) {
        walk(g, set, &v->all, mask);
        return;
    }
    if (n)
        memcpy(mask, v->slices + (size_t)(n - 1) * v->words, v->words * sizeof *mask);
    walk(g, set, &v->unsafe, mask);
}

const uint64_t *matcher_mask(struct matcher *m)
{
    struct grammar *g = m->grammar;
    uint32_t set = grammar_clip(g, m->set);

    if (!g->states.failed && !g->states.sets[set].mask) {
        uint64_t *mask = mem_alloc(g->vocab->words + 1, sizeof *mask);
        if (mask)
            make_mask(g, set, mask);
        if (!mask || g->states.failed) {
            free(mask);
            g->states.failed = false;
            return NULL;
        }
        g->states.sets[set].mask = mask;
        g->states.bytes += (g->vocab->words + 1) * sizeof *mask;
    }
    bool failed = g->states.failed;
    g->states.failed = false;
    return failed ? NULL : g->states.sets[set].mask;
}
