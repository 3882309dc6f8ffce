/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of this folder share: the opened tokenizer and one thread's working memory. */
#ifndef EMBER_MODEL_TOKENIZER_INTERNAL_H
#define EMBER_MODEL_TOKENIZER_INTERNAL_H

#include <stdatomic.h>

#include "model/tokenizer/image.h"
#include "model/tokenizer/regex.h"
#include "model/tokenizer/tokenizer.h"

struct scratch;

struct tokenizer {
    const struct image_header *h;
    const char *strings;
    const struct image_token *tokens;
    const struct image_vocab *vocab;
    const uint32_t *slots;
    const uint64_t *merges;
    const uint32_t *ranks;
    const struct image_added *added;
    const struct image_comp *norm, *pre, *dec;
    const struct image_post *post;
    const uint8_t *pairs, *known;         /* NULL when absent */
    struct regex *regex[IMAGE_MAX_COMPS]; /* by component, NULL where there is none */
    uint32_t added_first[2][257];         /* per set: where the patterns of each first byte begin */
    void (*release)(void *image, size_t len); /* of the image, when it is ours */
    _Atomic(struct scratch *) spare;          /* one kept for the next call */
};

static inline const char *str_of(const struct tokenizer *t, struct image_str s)
{
    return t->strings + s.off;
}

/* Ids under construction. */
struct ids {
    uint32_t *data;
    size_t n, cap;
};
int ids_reserve(struct ids *v, size_t extra);
static inline int ids_push(struct ids *v, uint32_t id)
{
    if (v->n == v->cap) {
        int r = ids_reserve(v, 1);
        if (r < 0)
            return r;
    }
    v->data[v->n++] = id;
    return 0;
}

/*
 * The word cache: direct-mapped by checksum_of(word). It holds results only, so that a lost entry
 * costs time and nothing else.
 */
#define CACHE_SLOTS 32768u
#define CACHE_KEY 30
#define CACHE_IDS 8
struct cache_entry {
    uint8_t len, n; /* len 0: empty */
    char key[CACHE_KEY];
    uint32_t ids[CACHE_IDS];
};

struct symbol {
    uint32_t id;
    int32_t prev, next; /* -1: none */
    uint32_t dead;
};
struct queued {
    uint64_t key; /* rank << 32 | position: the order of merging */
    uint32_t id;
};

/* Working memory of one call. Every buffer keeps its room for the next one. */
struct scratch {
    struct regex_scratch *regex;
    struct buffer norm[2], decomposed;
    struct buffer stage[IMAGE_MAX_COMPS];
    struct cache_entry *cache;
    struct symbol *symbols;
    struct queued *queue;
    size_t symbols_cap, queue_cap;
};

struct encoder {
    const struct tokenizer *t;
    struct scratch *s;
    struct ids out;
    struct error *err;
};

struct scratch *scratch_take(const struct tokenizer *t); /* NULL when memory is short */
void scratch_give(const struct tokenizer *t, struct scratch *s);

/* Successive matches of a component's pattern, as Oniguruma's find_iter gives them. */
struct finder {
    size_t pos, last_end;
};
#define FINDER_START ((struct finder){0, SIZE_MAX})
/* 1 with bounds, 0 at the end, negative on failure. */
int comp_find(const struct tokenizer *t, const struct image_comp *c, struct regex_scratch *s,
              const char *text, size_t len, struct finder *f, size_t *ret_start, size_t *ret_end,
              struct error *err);

/* The id of a model key, or NO_ID. */
uint32_t vocab_find(const struct tokenizer *t, const char *key, size_t len);

/*
 * Runs the normalizers. The result is the input itself or lies in s->norm. *first: whether the text
 * begins where the original does; cleared when its beginning was removed.
 */
int normalize(const struct tokenizer *t, struct scratch *s, const char *text, size_t len,
              const char **ret_text, size_t *ret_len, bool *first, struct error *err);

/* Pre-tokenizes a piece from component k on and encodes what comes out. */
int pretokenize(struct encoder *e, uint32_t k, const char *text, size_t len, bool first);

/* Encodes one word of the pre-tokenizer. */
int bpe_word(struct encoder *e, const char *word, size_t len);

/* Splits at added tokens of a set (0: raw text, 1: normalized); text between goes to `gap`. */
typedef int (*gap_func)(struct encoder *e, const char *text, size_t len, bool first);
int added_split(struct encoder *e, int set, const char *text, size_t len, bool first, gap_func gap);

/* A whole file of at most `limit` bytes, decompressed when its name ends in .xz. */
int read_json_file(const char *path, size_t limit, struct buffer *out, struct error *err);

/* load_pipeline.c: the components of a parsed tokenizer.json into *p. */
struct json_t;
int load_pipeline(struct image_parts *p, const struct json_t *root, struct error *err);
int load_post_id(struct image_parts *p, uint32_t kind, uint32_t id);

#endif
