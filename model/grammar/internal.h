/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of this folder share.
 *
 *   front ends   schema*.c, regex.c, ebnf.c, lark.c (rules.c), grammar.c     text → nodes
 *   ir.c         nodes: expressions over characters, bytes and rules
 *   nfa.c        one rule's nodes → an automaton with empty edges → a deterministic one (machine)
 *   machine.c    machines without calls: both, or one but not the other
 *   link.c       rules that can be left out, copied in or must be called → program bytes
 *   program.c    program bytes, checked in full
 *   vocab.c      a vocabulary's bytes as a trie
 *   match.c      running a program;  mask.c: the tokens that may follow
 */
#ifndef EMBER_MODEL_GRAMMAR_INTERNAL_H
#define EMBER_MODEL_GRAMMAR_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/mem.h"

#define MANY UINT32_MAX /* no upper limit of a repetition */
#define NO_RULE UINT32_MAX
#define CHAR_MAX_CODE 0x10FFFFu

/* Limits of one compilation; what goes beyond is refused. */
#define BUILD_BYTES_MAX (48u << 20)    /* of nodes */
#define NFA_STATES_MAX (400u << 10)    /* of one rule */
#define MACHINE_STATES_MAX (60u << 10) /* of one rule, and of all */
#define BUILD_WORK_MAX (24u << 20)     /* elementary operations */
#define NESTING_MAX 200
#define CLASS_MAX 512 /* ranges of a class of characters */

struct range {
    uint32_t lo, hi; /* inclusive */
};

/* X(kind): what a node stands for */
enum node_kind {
    NODE_NONE,   /* nothing at all, not even the empty text */
    NODE_EMPTY,  /* the empty text */
    NODE_BYTES,  /* these bytes */
    NODE_CHARS,  /* one character of these ranges */
    NODE_SEQ,    /* the kids, one behind the other */
    NODE_ALT,    /* one of the kids */
    NODE_REPEAT, /* kids[0], min to max times */
    NODE_RULE,   /* whatever the rule says */
    NODE_MACHINE,
    NODE_GRAPH,
};

struct node {
    enum node_kind kind;
    bool json; /* CHARS: as characters are written within a JSON string */
    uint32_t n;
    uint32_t min, max;
    uint32_t rule;    /* RULE; REPEAT: the rule of its kid once it is counted, or NO_RULE */
    uint32_t measure; /* link.c: how many states it takes, 0: not known yet */
    union {
        struct node **kids;
        const uint8_t *bytes;
        const struct range *ranges;
        const struct machine *machine;
        const struct graph *graph;
    };
};

/* A small automaton whose edges carry nodes. State 0 is its start, state 1 its end. */
struct graph {
    uint32_t n_states, n_edges, cap;
    struct graph_edge {
        uint32_t from, to;
        struct node *label; /* NULL: the empty text */
    } * edges;
};

/* A deterministic automaton. State 0 is the start and is never entered again. */
struct machine {
    uint32_t n;
    uint32_t *byte_first, *call_first; /* [n + 1] */
    struct byte_edge {
        uint8_t lo, hi;
        uint32_t to;
    } * bytes; /* by state, by lo, not overlapping */
    struct call_edge {
        uint32_t rule, min, max, to; /* the rule min to max times, then `to` */
    } * calls;
    bool *final;
};
void machine_free(struct machine *machine);
DEFINE_CLEANUP(struct machine *, machine_free)

struct rule {
    struct node *node; /* NULL: named but not defined */
    char *name;
};

/*
 * Nodes and rules under construction. The first failure stays: from then on every constructor gives
 * a NODE_NONE, and whoever began looks at `failed` in the end.
 */
struct build {
    struct chunk *chunks;
    size_t used; /* bytes of all chunks */
    uint64_t work;
    struct rule *rules;
    uint32_t n_rules, cap_rules;
    struct machine **machines; /* owned, of NODE_MACHINE */
    uint32_t n_machines, cap_machines;
    struct error *err;
    int failed;
};

void build_free(struct build *b);
int build_fail(struct build *b, int errnum, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Zeroed memory that lives as long as the build; NULL once it has failed. */
void *build_alloc(struct build *b, size_t n, size_t size);
/* Counts work; false when there was too much of it. */
bool build_work(struct build *b, uint64_t n);

struct node *node_none(struct build *b);
struct node *node_empty(struct build *b);
struct node *node_bytes(struct build *b, const void *bytes, size_t n);
struct node *node_text(struct build *b, const char *text);
/* Ranges in any order, overlapping or not; copied. */
struct node *node_chars(struct build *b, const struct range *ranges, size_t n, bool json);
struct node *node_seq(struct build *b, struct node *const *kids, size_t n);
struct node *node_alt(struct build *b, struct node *const *kids, size_t n);
struct node *node_pair(struct build *b, struct node *first, struct node *second);
struct node *node_either(struct build *b, struct node *one, struct node *other);
struct node *node_repeat(struct build *b, struct node *kid, uint32_t min, uint32_t max);
struct node *node_rule(struct build *b, uint32_t rule);
/* Takes the machine. NULL gives a NODE_NONE. */
struct node *node_machine(struct build *b, struct machine *machine);
struct node *node_graph(struct build *b, const struct graph *graph);

/* A rule without a body; build_define gives it one. The name may be NULL. */
uint32_t build_rule(struct build *b, const char *name, size_t len);
uint32_t build_find_rule(const struct build *b, const char *name, size_t len); /* NO_RULE: none */
void build_define(struct build *b, uint32_t rule, struct node *node);

struct graph *graph_new(struct build *b, uint32_t n_states);
void graph_edge(struct build *b, struct graph *g, uint32_t from, uint32_t to, struct node *label);

/* Growing lists of nodes, for front ends: on the heap, freed by list_free. */
struct list {
    struct node **items;
    size_t n, cap;
};
void list_add(struct build *b, struct list *list, struct node *node);
void list_free(struct list *list);

/* Sorts and merges in place; returns how many are left. */
size_t ranges_normalize(struct range *ranges, size_t n);
/* What is left of all characters, of normalized ranges, to ret[n + 1]; returns how many. */
size_t ranges_invert(const struct range *ranges, size_t n, struct range *ret);

/* ---- nfa.c ---- */

/* How link.c wants a rule: copied in (its node) or called (NULL). */
struct nfa_rules {
    struct node *const *inlined; /* [n_rules] NULL: called */
    const bool *nullable;        /* [n_rules] */
};
/*
 * The machine of a node, or NULL when the build has failed. With `strict` state 0 is not final,
 * even where the empty text belongs to the node. `rules` may be NULL for a node without rules.
 */
struct machine *machine_of(struct build *b, const struct node *node, const struct nfa_rules *rules,
                           bool strict);

/* ---- machine.c: machines without calls ---- */

/* Texts of both (`without` false), or of a that are not of b. NULL: none, or the build has failed.
 */
struct machine *machine_combine(struct build *b, const struct machine *one,
                                const struct machine *other, bool without);
/* m with only, or without, the texts of a node that has no rules. Takes m. */
struct machine *machine_narrow(struct build *b, struct machine *m, const struct node *node,
                               bool without);
bool machine_accepts(const struct machine *m, const void *bytes, size_t n);

/* ---- link.c ---- */

/* Appends the program for a root. */
int link_program(struct build *b, struct node *root, struct buffer *out);

/* ---- regex.c ---- */

enum regex_mode {
    REGEX_WHOLE, /* the whole text has to match */
    REGEX_FIND,  /* it is enough that a part matches, unless ^ and $ say otherwise */
};
struct node *regex_node(struct build *b, const char *pattern, size_t len, enum regex_mode mode,
                        bool json);
/* Any one character of a text (not a surrogate); in JSON: but no \u escape of it. */
struct node *any_char(struct build *b, bool json);

/* ---- ebnf.c, lark.c ---- */

struct node *ebnf_root(struct build *b, const char *text, size_t len);
struct node *lark_root(struct build *b, const char *text, size_t len);
/* A line and column for messages. */
void text_place(const char *text, size_t at, unsigned *ret_line, unsigned *ret_column);
/* One UTF-8 character; 0 when it is none. */
size_t text_char(const char *s, size_t n, uint32_t *ret_code);

#endif
