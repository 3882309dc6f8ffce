/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The KV pages of one instance, and which of them hold a prefix that can be shared.
 *
 * A page is held by so many sequences (its reference count) or free. A full page whose tokens are
 * known can be registered under its block hash: the digest of the hash of the block before (the
 * first block's: the root, from seed and salt) and the block's tokens, so that equal hashes mean
 * equal histories. A registered page that becomes free keeps its content and can be taken up again
 * by its hash until it is handed out for something else. Handed out first: free pages without
 * content, then the least recently freed; a sequence gives its pages back last first, so that
 * prefixes outlive their continuations.
 *
 * Tokens are compared beside the hash: with the rule that a sequence stops registering where its
 * hash is taken by other tokens, pages are never shared by accident, only (if somebody finds a
 * collision) not shared.
 */
#ifndef EMBER_SCHEDULER_KVPAGES_H
#define EMBER_SCHEDULER_KVPAGES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/digest.h"
#include "base/error.h"
#include "base/mem.h"

#define KVPAGE_NONE UINT32_MAX

struct kvpages;

/* -EINVAL (a count is 0 or beyond what fits 32 bits), -ENOMEM. */
int kvpages_new(uint32_t n_pages, uint32_t page_size, struct kvpages **ret, struct error *err);
void kvpages_free(struct kvpages *pages);
DEFINE_CLEANUP(struct kvpages *, kvpages_free)

/* The hash before the first block. `extra`: whatever else the KV values depend on. */
struct digest kvhash_root(uint64_t seed, uint64_t extra, const void *salt, size_t salt_len);
/* The hash of a block of page_size tokens (at most KVHASH_MAX_TOKENS) behind `parent`. */
#define KVHASH_MAX_TOKENS 4096
struct digest kvhash_next(const struct digest *parent, const uint32_t *tokens, uint32_t page_size);

/* All pages; those that nobody holds; how many hold `page`. */
uint32_t kvpages_count(const struct kvpages *pages);
uint32_t kvpages_available(const struct kvpages *pages); /* free ones, with content or without */
uint32_t kvpages_refs(const struct kvpages *pages, uint32_t page);

/* The page that holds this block, held or free, or KVPAGE_NONE. Takes no reference. */
uint32_t kvpages_find(const struct kvpages *pages, const struct digest *hash,
                      const uint32_t *tokens);
/* Takes a page, without content and with one reference; KVPAGE_NONE when all are held. */
uint32_t kvpages_take(struct kvpages *pages);
/* One holder more, one less; a page that nobody holds keeps its content until it is taken. */
void kvpages_ref(struct kvpages *pages, uint32_t page);
void kvpages_unref(struct kvpages *pages, uint32_t page);
/*
 * The page, which the caller holds, is full of these tokens. False when the hash is taken by other
 * tokens: no block behind this one may be registered. True otherwise, also when another page holds
 * the block already (this one stays private).
 */
bool kvpages_register(struct kvpages *pages, uint32_t page, const struct digest *hash,
                      const uint32_t *tokens);

/* Checks the structure; `held[i]`: references the caller counts for page i. 0 or -EBADMSG. */
int kvpages_verify(const struct kvpages *pages, const uint32_t *held, struct error *err);

#endif
