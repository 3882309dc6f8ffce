/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What match.c and mask.c share: a grammar while it runs.
 *
 * A place in a text is a set of items (state, stack): which states of which rules it may be in, and
 * where each goes on when its rule ends. A stack is a node: a list of entries (call, count, stack
 * below), all callers of one rule at one place together, so that an ambiguous grammar costs one
 * node a place and rule and not one a way to parse. Sets and nodes are interned: equal ones are one
 * number, which makes the whole a deterministic automaton whose states are found as they are
 * needed, each with the next set by byte and, once asked for, its mask.
 *
 * For masks, counts beyond COUNT_FAR are as good as no count, if tokens of more bytes are left out
 * wherever something counts: `clip` is the same set with such counts taken away, and what masks are
 * made for. So all places of a long counted repetition but the first and last ones share a mask.
 */
#ifndef EMBER_MODEL_GRAMMAR_MATCH_H
#define EMBER_MODEL_GRAMMAR_MATCH_H

#include "model/grammar/grammar.h"
#include "model/grammar/program.h"

#define ITEMS_MAX 512 /* of a set; what goes beyond is dropped, which only forbids */
#define SET_DEAD 0
#define SET_UNKNOWN UINT32_MAX
#define NODE_BOTTOM 0
#define COUNT_FAR 32
#define FOREVER UINT32_MAX /* a count that never reaches 0 */

struct item {
    uint32_t state, node;
};
struct entry {
    uint32_t call, need, left, below; /* times that the rule must and may still end there */
};
struct stack_node {
    uint32_t first, n; /* entries */
    uint32_t clip;
    bool counted; /* a caller, or one of those below, counts */
    uint64_t hash;
};
struct set {
    uint32_t first, n; /* items with byte edges */
    uint32_t clip;     /* SET_UNKNOWN: not known yet */
    uint32_t same; /* the set behind any safe character, see vocab.h; SET_UNKNOWN, SET_DIFFERS */
    uint32_t walk; /* the last walk that met it */
    bool may_end;
    uint64_t hash;
    uint32_t *next; /* [256] or NULL */
    uint64_t *mask;
};
#define SET_DIFFERS (UINT32_MAX - 1)

/* A table of numbers by hash. */
struct interned {
    uint32_t *table, size; /* index + 1 */
};

struct states {
    struct set *sets;
    struct item *items;
    struct stack_node *nodes;
    struct entry *entries;
    uint32_t n_sets, n_items, n_nodes, n_entries;
    uint32_t cap_sets, cap_items, cap_nodes, cap_entries;
    struct interned by_set, by_node;
    size_t bytes;
    bool failed; /* memory was short */
};

struct grammar {
    unsigned refs;
    void *bytes;
    size_t len;
    struct program program;
    const struct vocab *vocab;
    struct states states;
    struct matcher *matchers;
    uint32_t walk;           /* number of the last */
    struct closing *closing; /* scratch */
    size_t kept;             /* bytes that the last trim left */
};

struct matcher {
    struct grammar *grammar;
    struct matcher *prev, *next;
    uint32_t set, moved; /* moved: the same among the states that a trim makes */
};

/* The set behind a byte; SET_DEAD: it may not follow. */
uint32_t grammar_step(struct grammar *g, uint32_t set, uint8_t byte);
/* The set with far counts taken away. */
uint32_t grammar_clip(struct grammar *g, uint32_t set);

#endif
