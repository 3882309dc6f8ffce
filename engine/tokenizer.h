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

#endif
