/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/instance/grammars.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "base/topology.h"
#include "engine/tokenizer.h"

#define GRAMMARS_MAX 4096

struct definition {
    uint64_t id;
    struct grammar *grammar;
    size_t len;
};

/* A sequence under a grammar. */
struct follower {
    uint64_t id;
    struct matcher *matcher; /* NULL: free */
    uint32_t n;              /* tokens so far */
    bool over;               /* an end has been sampled */
};

struct grammars {
    struct cache *cache;
    const char *dir;
    uint32_t vocab_size;
    /* Read by a thread of its own: `reading` until it has been joined. */
    pthread_t reader;
    bool reading;
    struct vocab *vocab;
    struct error vocab_error;
    struct definition *defined;
    size_t n_defined;
    size_t programs;            /* bytes of the defined ones */
    struct follower *followers; /* open addressing by id */
    size_t n_followers, room;
};

static void *read_vocab(void *arg)
{
    struct grammars *g = arg;
    _cleanup_(tokenizer_freep) struct tokenizer *tokenizer = NULL;

    if (engine_tokenizer_open(g->cache, g->dir, &tokenizer, &g->vocab_error) == 0)
        vocab_new(tokenizer, g->vocab_size, &g->vocab, &g->vocab_error);
    return NULL;
}

static void *read_apart(void *arg)
{
    cpus_unbind(); /* steps go on meanwhile */
    return read_vocab(arg);
}

static void start_reading(struct grammars *g)
{
    if (g->vocab || g->reading)
        return;
    g->vocab_error = (struct error){0};
    g->reading = pthread_create(&g->reader, NULL, read_apart, g) == 0;
    if (!g->reading)
        read_vocab(g);
}

static int need_vocab(struct grammars *g, struct error *err)
{
    start_reading(g);
    if (g->reading)
        pthread_join(g->reader, NULL);
    g->reading = false;
    if (g->vocab)
        return 0;
    return error_set(err, g->vocab_error.code ? -g->vocab_error.code : ENOMEM,
                     "no tokens for grammars: %s", error_text(&g->vocab_error));
}

struct grammars *grammars_new(struct cache *cache, const char *dir, uint32_t vocab)
{
    struct grammars *g = x_alloc(sizeof *g);

    *g = (struct grammars){.cache = cache, .dir = dir, .vocab_size = vocab};
    g->defined = x_alloc(GRAMMARS_MAX * sizeof *g->defined);
    return g;
}

static void forget(struct grammars *g, size_t i)
{
    g->programs -= g->defined[i].len;
    grammar_unref(g->defined[i].grammar);
    g->defined[i] = g->defined[--g->n_defined];
}

void grammars_reset(struct grammars *g)
{
    for (size_t i = 0; i < g->room; i++)
        matcher_free(g->followers[i].matcher);
    free(g->followers);
    g->followers = NULL;
    g->room = g->n_followers = 0;
    while (g->n_defined)
        forget(g, 0);
}

void grammars_free(struct grammars *g)
{
    if (!g)
        return;
    grammars_reset(g);
    if (g->reading)
        pthread_join(g->reader, NULL);
    vocab_free(g->vocab);
    free(g->defined);
    free(g);
}

/* ---- definitions ---- */

static struct definition *find_definition(struct grammars *g, uint64_t id)
{
    for (size_t i = 0; i < g->n_defined; i++)
        if (g->defined[i].id == id)
            return &g->defined[i];
    return NULL;
}

int grammars_define(struct grammars *g, const Ember__V1__Grammar *message, struct error *err)
{
    struct definition *known = find_definition(g, message->id), *d = &g->defined[g->n_defined];
    size_t len = message->program.len;

    if (!message->id || (known && len))
        return error_set(err, EINVAL, "grammar %llu is defined already, or no name",
                         (unsigned long long)message->id);
    if (!len) {
        if (known)
            forget(g, (size_t)(known - g->defined));
        return 0;
    }
    if (g->n_defined == GRAMMARS_MAX || len > GRAMMARS_PROGRAMS_MAX - g->programs)
        return error_set(err, E2BIG, "%zu grammars of %zu bytes, and another of %zu", g->n_defined,
                         g->programs, len);
    *d = (struct definition){.id = message->id, .len = len};
    start_reading(g);
    /* Only checked yet: who waits for the vocabulary is the first to sample. */
    int r = grammar_open(message->program.data, len, NULL, &d->grammar, err);
    if (r < 0)
        return r;
    g->programs += len;
    g->n_defined++;
    return 0;
}

/* ---- sequences ---- */

static size_t slot(const struct grammars *g, uint64_t id)
{
    return (size_t)((id * UINT64_C(0x9e3779b97f4a7c15)) >> 32) & (g->room - 1);
}

static struct follower *find_follower(struct grammars *g, uint64_t id)
{
    if (!g->room)
        return NULL;
    for (size_t at = slot(g, id); g->followers[at].matcher; at = (at + 1) & (g->room - 1))
        if (g->followers[at].id == id)
            return &g->followers[at];
    return NULL;
}

static void put(struct grammars *g, struct follower f)
{
    size_t at = slot(g, f.id);

    while (g->followers[at].matcher)
        at = (at + 1) & (g->room - 1);
    g->followers[at] = f;
    g->n_followers++;
}

/* Takes one out, and puts those behind it where they belong now. */
static void take_out(struct grammars *g, struct follower *f)
{
    matcher_free(f->matcher);
    f->matcher = NULL;
    g->n_followers--;
    for (size_t at = ((size_t)(f - g->followers) + 1) & (g->room - 1); g->followers[at].matcher;
         at = (at + 1) & (g->room - 1)) {
        struct follower moved = g->followers[at];
        g->followers[at].matcher = NULL;
        g->n_followers--;
        put(g, moved);
    }
}

static int make_room(struct grammars *g, struct error *err)
{
    size_t room = MAX(64, 2 * g->room), old = g->room;
    struct follower *before = g->followers;

    if (g->n_followers >= GRAMMARS_MATCHERS_MAX)
        return error_set(err, E2BIG, "more than %d sequences under grammars",
                         GRAMMARS_MATCHERS_MAX);
    if (2 * g->n_followers + 2 < g->room)
        return 0;
    struct follower *grown = mem_alloc(room, sizeof *grown);
    if (!grown)
        return error_set(err, ENOMEM, "no memory for a sequence's grammar");
    g->followers = grown;
    g->room = room;
    g->n_followers = 0;
    for (size_t i = 0; i < old; i++)
        if (before[i].matcher)
            put(g, before[i]);
    free(before);
    return 0;
}

void grammars_end(struct grammars *g, const uint64_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct follower *f = find_follower(g, ids[i]);
        if (f)
            take_out(g, f);
    }
}

static bool is_end(const Ember__V1__SequenceStep *seq, uint32_t token)
{
    for (size_t i = 0; i < seq->n_ends; i++)
        if (seq->ends[i] == token)
            return true;
    return false;
}

static int replay(struct matcher *m, const Ember__V1__SequenceStep *seq, struct error *err)
{
    if (seq->n_generated != seq->sample_index)
        return error_set(err, EINVAL, "%zu tokens of a sequence's grammar, expected %u",
                         seq->n_generated, seq->sample_index);
    for (size_t i = 0; i < seq->n_generated; i++)
        if (!matcher_take(m, seq->generated[i]) && !is_end(seq, seq->generated[i]))
            return error_set(err, EINVAL, "token %zu, %u, does not keep to its grammar", i,
                             seq->generated[i]);
    return 0;
}

static int follow(struct grammars *g, const Ember__V1__SequenceStep *seq, struct matcher **ret,
                  struct error *err)
{
    _cleanup_(matcher_freep) struct matcher *m = NULL;
    struct definition *d = find_definition(g, seq->grammar);

    if (!d)
        return error_set(err, EINVAL, "grammar %llu is not defined",
                         (unsigned long long)seq->grammar);
    int r = make_room(g, err);
    if (r == 0)
        r = need_vocab(g, err);
    if (r == 0)
        grammar_use_vocab(d->grammar, g->vocab);
    if (r == 0)
        r = matcher_new(d->grammar, &m, err);
    if (r == 0)
        r = replay(m, seq, err);
    if (r < 0)
        return r;
    *ret = m;
    put(g, (struct follower){.id = seq->id, .matcher = TAKE(m), .n = seq->sample_index});
    return 0;
}

int grammars_find(struct grammars *g, const Ember__V1__SequenceStep *seq, struct matcher **ret,
                  struct error *err)
{
    struct follower *f = find_follower(g, seq->id);

    if (!f)
        return follow(g, seq, ret, err);
    if (f->n != seq->sample_index)
        return error_set(err, EINVAL, "sample %u of a sequence whose grammar is at %u",
                         seq->sample_index, f->n);
    *ret = f->matcher;
    return 0;
}

/* ---- sampling ---- */

static void forbid(float *logits, uint32_t first, uint64_t allowed, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (!(allowed >> i & 1))
            logits[first + i] = -INFINITY;
}

/* Where nothing that is allowed has a chance left (suppressed, biased away, no number): the first
 * that is allowed, or an end. */
static void allow_one(const uint64_t *mask, uint32_t vocab, const Ember__V1__SequenceStep *seq,
                      float *logits)
{
    for (uint32_t i = 0; i < vocab; i++)
        if (mask[i / 64] >> i % 64 & 1) {
            logits[i] = 0;
            return;
        }
    for (size_t i = 0; i < seq->n_ends; i++)
        if (seq->ends[i] < vocab) {
            logits[seq->ends[i]] = 0;
            return;
        }
    logits[0] = 0; /* the text is over, and nobody waits for what comes behind it */
}

int grammars_restrict(struct grammars *g, struct matcher *m, const Ember__V1__SequenceStep *seq,
                      float *logits, struct error *err)
{
    float kept[64];
    size_t n_kept = MIN(seq->n_ends, ARRAY_LEN(kept));
    const uint64_t *mask = matcher_mask(m);
    bool any = false;

    if (!mask)
        return error_set(err, ENOMEM, "no memory for the mask of %u tokens", g->vocab_size);
    for (size_t i = 0; i < n_kept; i++)
        kept[i] = seq->ends[i] < g->vocab_size ? logits[seq->ends[i]] : -INFINITY;
    for (uint32_t first = 0; first < g->vocab_size; first += 64)
        if (mask[first / 64] != UINT64_MAX)
            forbid(logits, first, mask[first / 64], MIN(g->vocab_size - first, 64));
    for (size_t i = 0; i < n_kept && matcher_may_end(m); i++)
        if (seq->ends[i] < g->vocab_size)
            logits[seq->ends[i]] = kept[i];
    for (uint32_t i = 0; i < g->vocab_size && !any; i++)
        any = logits[i] > -INFINITY;
    if (!any)
        allow_one(mask, g->vocab_size, seq, logits);
    return 0;
}

void grammars_take(struct grammars *g, struct matcher *m, const Ember__V1__SequenceStep *seq,
                   uint32_t token, bool *ret_ended)
{
    struct follower *f = find_follower(g, seq->id);
    bool text = !f->over && matcher_take(m, token);

    f->n++;
    f->over |= !text;
    *ret_ended = f->over || matcher_must_end(m);
}

void grammars_tidy(struct grammars *g)
{
    size_t total = 0;

    for (size_t i = 0; i < g->n_defined; i++)
        total += grammar_memory(g->defined[i].grammar);
    for (size_t i = 0; total > GRAMMARS_KEEP && i < g->n_defined; i++)
        grammar_trim(g->defined[i].grammar);
}
