/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loading: a checkpoint's folder becomes two sealed memfds, the weights and their manifest.
 *
 * Bytes go from the page cache or disk through a small buffer into the memfd by read and write (a
 * page that is written whole is never zeroed first), by several threads; each tensor's digest is
 * taken on the way. Nothing is mapped.
 */
#ifndef EMBER_ENGINE_LOAD_H
#define EMBER_ENGINE_LOAD_H

#include <stdint.h>

#include "base/digest.h"
#include "base/error.h"
#include "model/model.h"

struct load_options {
    uint32_t threads; /* 0: one a processor, at most 8 */
    /* Called once, when the checkpoint has been checked and its size is known; non-zero refuses
     * (a negative errno, with the text in err). May be NULL. */
    int (*admit)(void *ctx, const struct model_info *info, uint64_t bytes, struct error *err);
    /* Called by the loading thread now and then, and at the end; non-zero cancels. May be NULL. */
    int (*progress)(void *ctx, uint64_t done, uint64_t total);
    void *ctx;
};

struct loaded {
    int weights, manifest; /* sealed memfds, the caller's; -1 before */
    uint64_t bytes;
    struct digest digest; /* of the weights, in arena order */
    double ms;
};

/*
 * Loads the checkpoint in `dir`; *ret's descriptors are the caller's (loaded_close). Errors: those
 * of opening, describing and laying out the checkpoint (model/checkpoint.h, model/model.h), what
 * `admit` returned, -ECANCELED, -ENOMEM, -ENOSPC (no memory behind the memfd), -EIO.
 */
int load_checkpoint(const char *dir, const struct load_options *options, struct loaded *ret,
                    struct error *err);
/* Closes both descriptors; idempotent. */
void loaded_close(struct loaded *loaded);

#endif
