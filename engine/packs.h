/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The folder of packs that are kept for checkpoints: one file each, named after the checkpoint's
 * folder and key and the family of layouts, so that a changed checkpoint or another build has
 * another name. Bounded by bytes; what was used longest ago leaves.
 */
#ifndef EMBER_ENGINE_PACKS_H
#define EMBER_ENGINE_PACKS_H

#include <stdint.h>

#include "base/error.h"
#include "engine/load.h"
#include "model/checkpoint.h"
#include "model/pack/pack.h"

/* Where the pack of a checkpoint, quantised as `quant` says (NULL or "": not), is or would be; the
 * caller frees. */
char *packs_path(const char *folder, const struct checkpoint *checkpoint, const char *quant);
/* Notes a use. */
void packs_used(const char *path);

struct packs_options {
    const char *folder;
    uint64_t limit;    /* bytes that all packs may take; 0: no bound */
    uint64_t rate;     /* bytes a second at most; 0: no limit */
    const char *quant; /* what the weights were loaded with; NULL or "": as they are */
    int (*progress)(void *ctx, uint64_t done, uint64_t total); /* non-zero cancels; may be NULL */
    void *ctx;
};

/*
 * Writes the pack of the checkpoint in `dir` from its resident weights (descriptors as
 * engine/load.h makes them). Makes room first: what is there of other checkpoints goes, least
 * recently used first. `key` is what the checkpoint had when it was loaded. 1: there is one
 * already. -E2BIG: it would exceed the limit alone; otherwise those of packs_write().
 */
int packs_keep(const char *dir, const struct digest *key, int weights, int manifest,
               const struct packs_options *options, struct error *err);

/*
 * Writes a pack of resident weights to `path`; `quant` is what they were loaded with. -EINVAL: they
 * were not. -ESTALE: the checkpoint in `dir` has not the key any more that it was loaded with;
 * otherwise those of opening it and of pack_write().
 */
int packs_write(const char *dir, const struct digest *key, const char *quant, int weights,
                int manifest, const char *path, const struct pack_write_options *options,
                struct error *err);

#endif
