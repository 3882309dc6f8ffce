/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A checkpoint's tokenizer from the artefact cache: compiled from tokenizer.json once, mapped
 * after.
 *
 * Two entries belong to one tokenizer. The image (CACHE_TOKENIZER) is found by what it depends on:
 * the digests of tokenizer.json and tokenizer_config.json and the image's version; it travels in
 * bundles and is good on every host of the same byte order. Since hashing tokenizer.json costs as
 * much as mapping the image, a small record (CACHE_RECORD, "file digest") notes the digest of a
 * file by device, inode, size, modification and change time, as the kernel keeps them; it is only
 * made when the last change is so old that another one could not bear the same time, and any doubt
 * about it is settled by reading the file.
 */
#ifndef EMBER_ENGINE_TOKENIZER_H
#define EMBER_ENGINE_TOKENIZER_H

#include "base/error.h"
#include "cache/cache.h"
#include "model/tokenizer/tokenizer.h"

/*
 * The tokenizer of a checkpoint's folder (or of one tokenizer.json, .xz too). cache may be NULL:
 * then it is parsed, as it is when the cache has no image, or a damaged one; the image is stored
 * then for the next. A cache that fails costs time only. The tokenizer does not need the cache once
 * it is open. Errors are those of tokenizer_load.
 */
int engine_tokenizer_open(struct cache *cache, const char *path, struct tokenizer **ret,
                          struct error *err);

/*
 * The same for a process in a hurry: the tokenizer is usable before its image has been copied,
 * which takes several times as long as all else. *ret_lease is NULL, or the hold on the store's
 * pages that the tokenizer reads meanwhile: a read of the cache, which must be short
 * (cache/cache.h). So engine_lease_settle follows soon, from any thread, while others use the
 * tokenizer.
 */
struct engine_lease;
int engine_tokenizer_lease(struct cache *cache, const char *path, struct tokenizer **ret,
                           struct engine_lease **ret_lease, struct error *err);

/*
 * Puts a copy of the pages in the place of the store's and ends the hold; frees the lease. -ENOMEM:
 * nothing has changed, try again later.
 */
int engine_lease_settle(struct engine_lease *lease, struct error *err);
/* Ends the hold when the tokenizer is no longer used; before the cache is closed. NULL is fine. */
void engine_lease_free(struct engine_lease *lease);
DEFINE_CLEANUP(struct engine_lease *, engine_lease_free)

#endif
