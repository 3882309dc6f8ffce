/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pages are indices; every list and chain is a pair of index arrays in struct page. The free list
 * is one list in the order of handing out: pages without content are put in front, pages with
 * content at the end.
 */
#include "scheduler/kvpages.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#define NONE KVPAGE_NONE

struct page {
    struct digest hash; /* of its content, when `known` */
    uint32_t refs;
    uint32_t prev, next; /* free list, when refs is 0 */
    uint32_t chain;      /* next in its bucket, when `known` */
    bool known;
};

struct kvpages {
    uint32_t n, page_size, available;
    uint32_t head, tail; /* free list */
    uint32_t mask;       /* buckets - 1 */
    uint32_t *buckets;
    struct page *pages;
    uint32_t *tokens; /* [n, page_size] content of known pages */
};

int kvpages_new(uint32_t n_pages, uint32_t page_size, struct kvpages **ret, struct error *err)
{
    _cleanup_(kvpages_freep) struct kvpages *p = NULL;
    uint32_t buckets = 16;

    if (!n_pages || n_pages > UINT32_MAX / 4 || !page_size || page_size > KVHASH_MAX_TOKENS)
        return error_set(err, EINVAL, "%u KV pages of %u tokens: 1 to %u pages of 1 to %d", n_pages,
                         page_size, UINT32_MAX / 4, KVHASH_MAX_TOKENS);
    while (buckets < n_pages)
        buckets *= 2;
    p = mem_alloc(1, sizeof *p);
    if (!p)
        return error_set(err, ENOMEM, "no memory for %u KV pages", n_pages);
    p->n = p->available = n_pages;
    p->page_size = page_size;
    p->mask = buckets - 1;
    p->buckets = mem_alloc(buckets, sizeof *p->buckets);
    p->pages = mem_alloc(n_pages, sizeof *p->pages);
    p->tokens = mem_alloc(n_pages, page_size * sizeof *p->tokens);
    if (!p->buckets || !p->pages || !p->tokens)
        return error_set(err, ENOMEM, "no memory for %u KV pages", n_pages);
    memset(p->buckets, 0xff, buckets * sizeof *p->buckets);
    for (uint32_t i = 0; i < n_pages; i++)
        p->pages[i] =
            (struct page){.prev = i ? i - 1 : NONE, .next = i + 1 < n_pages ? i + 1 : NONE};
    p->tail = n_pages - 1;
    *ret = TAKE(p);
    return 0;
}

void kvpages_free(struct kvpages *p)
{
    if (!p)
        return;
    free(p->buckets);
    free(p->pages);
    free(p->tokens);
    free(p);
}

/* ---- hashes ---- */

struct digest kvhash_root(uint64_t seed, uint64_t extra, const void *salt, size_t salt_len)
{
    struct digest salted = digest_of(salt_len ? salt : "", salt_len);
    struct {
        uint64_t seed, extra, len;
        struct digest salt;
    } root = {seed, extra, salt_len, salted};

    return digest_of(&root, sizeof root);
}

struct digest kvhash_next(const struct digest *parent, const uint32_t *tokens, uint32_t page_size)
{
    struct {
        struct digest parent;
        uint32_t tokens[KVHASH_MAX_TOKENS];
    } block;

    assert(page_size <= KVHASH_MAX_TOKENS);
    block.parent = *parent;
    memcpy(block.tokens, tokens, page_size * sizeof *tokens);
    return digest_of(&block, sizeof block.parent + page_size * sizeof *tokens);
}

static uint32_t *bucket_of(const struct kvpages *p, const struct digest *hash)
{
    uint32_t h;
    memcpy(&h, hash->bytes, sizeof h);
    return &p->buckets[h & p->mask];
}

static uint32_t find_hash(const struct kvpages *p, const struct digest *hash)
{
    uint32_t i = *bucket_of(p, hash);
    while (i != NONE && !digest_equal(&p->pages[i].hash, hash))
        i = p->pages[i].chain;
    return i;
}

static bool same_tokens(const struct kvpages *p, uint32_t page, const uint32_t *tokens)
{
    return !memcmp(p->tokens + (size_t)page * p->page_size, tokens, p->page_size * sizeof *tokens);
}

uint32_t kvpages_find(const struct kvpages *p, const struct digest *hash, const uint32_t *tokens)
{
    uint32_t i = find_hash(p, hash);
    return i != NONE && same_tokens(p, i, tokens) ? i : NONE;
}

static void forget(struct kvpages *p, uint32_t page)
{
    uint32_t *at = bucket_of(p, &p->pages[page].hash);

    while (*at != page)
        at = &p->pages[*at].chain;
    *at = p->pages[page].chain;
    p->pages[page].known = false;
}

bool kvpages_register(struct kvpages *p, uint32_t page, const struct digest *hash,
                      const uint32_t *tokens)
{
    uint32_t other = find_hash(p, hash);
    uint32_t *bucket = bucket_of(p, hash);

    assert(page < p->n && p->pages[page].refs);
    if (other != NONE)
        return same_tokens(p, other, tokens);
    if (p->pages[page].known)
        forget(p, page);
    memcpy(p->tokens + (size_t)page * p->page_size, tokens, p->page_size * sizeof *tokens);
    p->pages[page].hash = *hash;
    p->pages[page].known = true;
    p->pages[page].chain = *bucket;
    *bucket = page;
    return true;
}

/* ---- free list ---- */

static void list_remove(struct kvpages *p, uint32_t i)
{
    struct page *page = &p->pages[i];

    *(page->prev == NONE ? &p->head : &p->pages[page->prev].next) = page->next;
    *(page->next == NONE ? &p->tail : &p->pages[page->next].prev) = page->prev;
    p->available--;
}

static void list_insert(struct kvpages *p, uint32_t i)
{
    struct page *page = &p->pages[i];
    bool last = page->known;

    page->prev = last ? p->tail : NONE;
    page->next = last ? NONE : p->head;
    *(page->prev == NONE ? &p->head : &p->pages[page->prev].next) = i;
    *(page->next == NONE ? &p->tail : &p->pages[page->next].prev) = i;
    p->available++;
}

uint32_t kvpages_count(const struct kvpages *p)
{
    return p->n;
}

uint32_t kvpages_available(const struct kvpages *p)
{
    return p->available;
}

uint32_t kvpages_refs(const struct kvpages *p, uint32_t page)
{
    assert(page < p->n);
    return p->pages[page].refs;
}

uint32_t kvpages_take(struct kvpages *p)
{
    uint32_t i = p->head;

    if (i == NONE)
        return NONE;
    list_remove(p, i);
    if (p->pages[i].known)
        forget(p, i);
    p->pages[i].refs = 1;
    return i;
}

void kvpages_ref(struct kvpages *p, uint32_t page)
{
    assert(page < p->n);
    if (!p->pages[page].refs++)
        list_remove(p, page);
}

void kvpages_unref(struct kvpages *p, uint32_t page)
{
    assert(page < p->n && p->pages[page].refs);
    if (!--p->pages[page].refs)
        list_insert(p, page);
}

/* ---- proof ---- */

int kvpages_verify(const struct kvpages *p, const uint32_t *held, struct error *err)
{
    uint32_t listed = 0, known = 0, chained = 0, before = NONE;

    for (uint32_t i = p->head; i != NONE; before = i, i = p->pages[i].next) {
        if (p->pages[i].refs || p->pages[i].prev != before || ++listed > p->n)
            return error_set(err, EBADMSG, "free list is broken at page %u", i);
    }
    if (listed != p->available || p->tail != before)
        return error_set(err, EBADMSG, "%u pages listed, %u available", listed, p->available);
    for (uint32_t i = 0; i < p->n; i++) {
        if (p->pages[i].refs != held[i])
            return error_set(err, EBADMSG, "page %u has %u references, %u are known", i,
                             p->pages[i].refs, held[i]);
        listed += p->pages[i].refs != 0;
        known += p->pages[i].known;
        if (p->pages[i].known && find_hash(p, &p->pages[i].hash) != i)
            return error_set(err, EBADMSG, "page %u is not found by its hash", i);
    }
    for (uint32_t b = 0; b <= p->mask; b++)
        for (uint32_t i = p->buckets[b]; i != NONE && chained <= p->n; i = p->pages[i].chain)
            chained++;
    if (listed != p->n || known != chained)
        return error_set(err, EBADMSG, "%u of %u pages accounted for, %u known, %u chained", listed,
                         p->n, known, chained);
    return 0;
}
