/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Byte pair encoding (Sennrich et al., 2016): of all adjacent pairs that have a merge, the one of
 * lowest rank merges, the leftmost first, until none is left. Short words are scanned, long ones go
 * through a queue over a linked list (n log n whatever the text).
 */
#include "model/tokenizer/internal.h"

#include <errno.h>
#include <string.h>

#include "base/digest.h"
#include "model/tokenizer/unicode.h"

#define SCAN_MAX 40

static int no_memory(struct encoder *e, size_t len)
{
    return error_set(e->err, ENOMEM, "no memory to encode a text of %zu bytes", len);
}

#define NO_RANK UINT32_MAX

/* The rank of a pair's merge, or NO_RANK. */
static uint32_t merge_find(const struct tokenizer *t, uint32_t left, uint32_t right)
{
    uint64_t key = merge_key(left, right);
    uint32_t n = t->h->merges.n, i = merge_bucket(key, n / MERGE_BUCKET) * MERGE_BUCKET;
    for (; t->merges[i] != MERGE_EMPTY; i = i + 1 == n ? 0 : i + 1)
        if (t->merges[i] >> MERGE_RANK_BITS == key)
            return (uint32_t)t->merges[i] & ((1u << MERGE_RANK_BITS) - 1);
    return NO_RANK;
}

/* --- From text to the symbols that merging begins with --- */

static int room_for(struct encoder *e, size_t n)
{
    struct scratch *s = e->s;
    if (n <= s->symbols_cap)
        return 0;
    size_t cap = n + n / 2 + 64;
    struct symbol *symbols = n < INT32_MAX ? realloc(s->symbols, cap * sizeof *symbols) : NULL;
    if (!symbols)
        return no_memory(e, n);
    s->symbols = symbols;
    s->symbols_cap = cap;
    return 0;
}

struct unknown {
    bool pending;
};

static int unknown_char(struct encoder *e, struct unknown *u, size_t *n)
{
    const struct image_header *h = e->t->h;
    if (!(h->flags & FLAG_UNK))
        return 0; /* without unk_token, the reference drops it */
    if (h->unk_id == NO_ID)
        return error_set(e->err, EBADMSG, "the tokenizer's unk_token is not in its vocabulary");
    if (u->pending && !(h->flags & FLAG_FUSE_UNK))
        e->s->symbols[(*n)++].id = h->unk_id;
    u->pending = true;
    return 0;
}

/* A character (or spelled byte) that is no token: its bytes, or the unknown token. */
static int missing_char(struct encoder *e, struct unknown *u, const char *s, size_t len, size_t *n)
{
    const struct image_header *h = e->t->h;
    bool bytes = h->flags & FLAG_BYTE_FALLBACK;
    for (size_t i = 0; i < len && bytes; i++)
        bytes = h->byte_fallback[(uint8_t)s[i]] != NO_ID;
    if (!bytes)
        return unknown_char(e, u, n);
    for (size_t i = 0; i < len; i++)
        e->s->symbols[(*n)++].id = h->byte_fallback[(uint8_t)s[i]];
    return 0;
}

static void known_char(struct encoder *e, struct unknown *u, uint32_t id, size_t *n)
{
    if (u->pending)
        e->s->symbols[(*n)++].id = e->t->h->unk_id;
    u->pending = false;
    e->s->symbols[(*n)++].id = id;
}

static int byte_symbols(struct encoder *e, const char *word, size_t len, size_t *ret_n)
{
    struct unknown u = {0};
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        uint32_t id = e->t->h->byte_token[(uint8_t)word[i]];
        if (id != NO_ID) {
            known_char(e, &u, id, &n);
            continue;
        }
        char c[4];
        int r = missing_char(e, &u, c, utf8_put(byte_level_char((uint8_t)word[i]), c), &n);
        if (r < 0)
            return r;
    }
    if (u.pending)
        e->s->symbols[n++].id = e->t->h->unk_id;
    *ret_n = n;
    return 0;
}

/* The key of a character: with the affixes where the model has some. */
static const char *char_key(const struct encoder *e, const char *s, size_t n, bool first, bool last,
                            struct buffer *room, size_t *ret_len)
{
    const struct image_header *h = e->t->h;
    *ret_len = n;
    if (!(h->flags & FLAG_AFFIX))
        return s;
    room->len = 0;
    if ((!first && buffer_append(room, str_of(e->t, h->prefix), h->prefix.len) < 0) ||
        buffer_append(room, s, n) < 0 ||
        (last && buffer_append(room, str_of(e->t, h->suffix), h->suffix.len) < 0))
        return NULL;
    *ret_len = room->len;
    return room->data;
}

static int char_symbols(struct encoder *e, const char *word, size_t len, size_t *ret_n)
{
    _cleanup_(buffer_free) struct buffer room = {0};
    struct unknown u = {0};
    size_t n = 0;
    for (size_t i = 0; i < len;) {
        size_t k = utf8_len(word[i]), key_len;
        const char *key = char_key(e, word + i, k, i == 0, i + k == len, &room, &key_len);
        if (!key)
            return no_memory(e, len);
        uint32_t id = vocab_find(e->t, key, key_len);
        int r = 0;
        if (id != NO_ID)
            known_char(e, &u, id, &n);
        else
            r = missing_char(e, &u, key, key_len, &n);
        if (r < 0)
            return r;
        i += k;
    }
    if (u.pending)
        e->s->symbols[n++].id = e->t->h->unk_id;
    *ret_n = n;
    return 0;
}

/* --- Merging --- */

/* Few symbols: look at all pairs each time. ids[0..n) in place; returns the new n. */
static size_t merge_scan(const struct tokenizer *t, uint32_t *ids, size_t n)
{
    uint32_t pair[SCAN_MAX];
    for (size_t i = 0; i + 1 < n; i++)
        pair[i] = merge_find(t, ids[i], ids[i + 1]);
    for (;;) {
        size_t best = SIZE_MAX;
        uint32_t rank = NO_RANK;
        for (size_t i = 0; i + 1 < n; i++)
            if (pair[i] < rank) {
                rank = pair[i];
                best = i;
            }
        if (best == SIZE_MAX)
            return n;
        ids[best] = t->ranks[rank];
        memmove(ids + best + 1, ids + best + 2, (n - best - 2) * sizeof *ids);
        if (n > best + 2)
            memmove(pair + best + 1, pair + best + 2, (n - best - 3) * sizeof *pair);
        n--;
        if (best > 0)
            pair[best - 1] = merge_find(t, ids[best - 1], ids[best]);
        if (best + 1 < n)
            pair[best] = merge_find(t, ids[best], ids[best + 1]);
    }
}

/* A heap of four children a node: the smallest key on top. */
static void heap_down(struct queued *q, size_t n, size_t i)
{
    struct queued x = q[i];
    for (;;) {
        size_t child = i * 4 + 1, best = child, end = MIN(child + 4, n);
        if (child >= n)
            break;
        for (size_t k = child + 1; k < end; k++)
            if (q[k].key < q[best].key)
                best = k;
        if (q[best].key >= x.key)
            break;
        q[i] = q[best];
        i = best;
    }
    q[i] = x;
}

static void heap_push(struct queued *q, size_t *n, struct queued x)
{
    size_t i = (*n)++;
    while (i > 0 && q[(i - 1) / 4].key > x.key) {
        q[i] = q[(i - 1) / 4];
        i = (i - 1) / 4;
    }
    q[i] = x;
}

static void queue_pair(const struct tokenizer *t, struct scratch *s, int32_t left, size_t *n)
{
    int32_t right = left < 0 ? -1 : s->symbols[left].next;
    if (right < 0)
        return;
    uint32_t rank = merge_find(t, s->symbols[left].id, s->symbols[right].id);
    if (rank != NO_RANK)
        heap_push(s->queue, n,
                  (struct queued){(uint64_t)rank << 32 | (uint32_t)left, t->ranks[rank]});
}

static size_t link_and_queue(const struct tokenizer *t, struct scratch *s, size_t n)
{
    size_t queued = 0;
    for (size_t i = 0; i < n; i++) {
        s->symbols[i].prev = (int32_t)i - 1;
        s->symbols[i].next = i + 1 < n ? (int32_t)i + 1 : -1;
        s->symbols[i].dead = 0;
    }
    for (size_t i = 0; i + 1 < n; i++) {
        uint32_t rank = merge_find(t, s->symbols[i].id, s->symbols[i + 1].id);
        if (rank != NO_RANK)
            s->queue[queued++] =
                (struct queued){(uint64_t)rank << 32 | (uint32_t)i, t->ranks[rank]};
    }
    for (size_t i = queued / 4 + 1; i-- > 0;)
        if (i < queued)
            heap_down(s->queue, queued, i);
    return queued;
}

/* One entry of the queue: an outdated one is left, as the pair now standing there has its own. */
static void merge_one(const struct tokenizer *t, struct scratch *s, struct queued top, size_t *n)
{
    int32_t at = (int32_t)(uint32_t)top.key, right, prev;
    struct symbol *left = &s->symbols[at];
    if (left->dead || left->next < 0)
        return;
    right = left->next;
    uint32_t rank = merge_find(t, left->id, s->symbols[right].id);
    if (rank == NO_RANK || t->ranks[rank] != top.id)
        return;
    left->id = top.id;
    left->next = s->symbols[right].next;
    s->symbols[right].dead = 1;
    if (left->next >= 0)
        s->symbols[left->next].prev = at;
    prev = left->prev;
    queue_pair(t, s, prev, n);
    queue_pair(t, s, at, n);
}

/* Each merge takes one entry out and puts at most two in, and n - 1 merges are possible. */
static int merge_queue(struct encoder *e, size_t n)
{
    struct scratch *s = e->s;
    if (3 * n > s->queue_cap) {
        struct queued *queue = realloc(s->queue, 3 * n * sizeof *queue);
        if (!queue)
            return no_memory(e, n);
        s->queue = queue;
        s->queue_cap = 3 * n;
    }
    size_t queued = link_and_queue(e->t, s, n);
    while (queued > 0) {
        struct queued top = s->queue[0];
        s->queue[0] = s->queue[--queued];
        if (queued)
            heap_down(s->queue, queued, 0);
        merge_one(e->t, s, top, &queued);
    }
    for (size_t i = 0; i < n; i++)
        if (!s->symbols[i].dead && ids_push(&e->out, s->symbols[i].id) < 0)
            return no_memory(e, n);
    return 0;
}

static int merge_symbols(struct encoder *e, size_t n)
{
    if (n > SCAN_MAX || !(e->t->h->flags & FLAG_SCAN_MERGES))
        return n ? merge_queue(e, n) : 0;
    uint32_t ids[SCAN_MAX];
    for (size_t i = 0; i < n; i++)
        ids[i] = e->s->symbols[i].id;
    n = n ? merge_scan(e->t, ids, n) : 0;
    if (ids_reserve(&e->out, n) < 0)
        return no_memory(e, n);
    if (n)
        memcpy(e->out.data + e->out.n, ids, n * sizeof *ids);
    e->out.n += n;
    return 0;
}

/* --- Words --- */

static int encode_uncached(struct encoder *e, const char *word, size_t len)
{
    const struct image_header *h = e->t->h;
    size_t n = 0, worst;
    /* A byte gives at most two symbols (the UTF-8 of its spelling); affixes only lengthen. */
    worst = len * 2 + 2;
    if (h->flags & FLAG_AFFIX)
        worst += len * (h->prefix.len + 1) + h->suffix.len;
    int r = room_for(e, worst);
    if (r >= 0)
        r = h->flags & FLAG_BYTES ? byte_symbols(e, word, len, &n) : char_symbols(e, word, len, &n);
    return r < 0 ? r : merge_symbols(e, n);
}

static int encode_cached(struct encoder *e, const char *word, size_t len)
{
    if (len > CACHE_KEY)
        return encode_uncached(e, word, len);
    struct cache_entry *c = &e->s->cache[checksum_of(word, len) % CACHE_SLOTS];
    if (c->len == len && !memcmp(c->key, word, len)) {
        if (ids_reserve(&e->out, CACHE_IDS) < 0)
            return no_memory(e, len);
        memcpy(e->out.data + e->out.n, c->ids, sizeof c->ids);
        e->out.n += c->n;
        return 0;
    }
    size_t from = e->out.n;
    int r = encode_uncached(e, word, len);
    size_t n = e->out.n - from;
    if (r < 0 || n > CACHE_IDS)
        return r;
    c->len = (uint8_t)len;
    c->n = (uint8_t)n;
    memcpy(c->key, word, len);
    if (n)
        memcpy(c->ids, e->out.data + from, n * sizeof *c->ids);
    return 0;
}

static bool is_known(const struct tokenizer *t, uint32_t c)
{
    return c < 0x10000 && (t->known[c / 8] >> c % 8 & 1);
}

static bool may_merge(const struct tokenizer *t, uint32_t a, uint32_t b)
{
    uint32_t bit = pair_bit(a, b);
    return t->pairs[bit / 8] >> bit % 8 & 1;
}

/*
 * Character models often get whole texts as one word. Between two characters that are tokens and
 * stand side by side in no merged token, no merge can happen: each part is encoded by itself.
 */
static int encode_parts(struct encoder *e, const char *word, size_t len)
{
    size_t start = 0;
    uint32_t a, b;
    bool known;
    size_t i = utf8_get(word, &a);
    known = is_known(e->t, a);
    while (i < len) {
        size_t n = utf8_get(word + i, &b);
        bool next_known = is_known(e->t, b);
        if (known && next_known && !may_merge(e->t, a, b)) {
            int r = encode_cached(e, word + start, i - start);
            if (r < 0)
                return r;
            start = i;
        }
        a = b;
        known = next_known;
        i += n;
    }
    return encode_cached(e, word + start, len - start);
}

int bpe_word(struct encoder *e, const char *word, size_t len)
{
    const struct image_header *h = e->t->h;
    if (!len)
        return 0;
    if (h->flags & FLAG_IGNORE_MERGES) {
        uint32_t id = vocab_find(e->t, word, len);
        if (id != NO_ID)
            return ids_push(&e->out, id) < 0 ? no_memory(e, len) : 0;
    }
    if (e->t->pairs)
        return encode_parts(e, word, len);
    return encode_cached(e, word, len);
}
