/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loading: a checkpoint's folder, or a pack, becomes two sealed memfds, the weights and their
 * manifest.
 *
 * Several threads take what is to be read in arena order, first layer first. Where the host gives
 * shared memory huge pages, bytes are read straight into them; elsewhere through a small buffer and
 * write(2), since a small page that is written whole is never zeroed first. Digests are taken on
 * the way. While that goes on, the memory can be in use already (load_options.attachable).
 */
#ifndef EMBER_ENGINE_LOAD_H
#define EMBER_ENGINE_LOAD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/digest.h"
#include "base/error.h"
#include "model/model.h"
#include "model/pack/pack.h"

struct load_options {
    uint32_t threads;  /* 0: one a processor, at most 8 */
    uint64_t rate;     /* bytes a second at most; 0: no limit */
    const char *packs; /* folder where a checkpoint's pack may be (engine/packs.h); NULL: none */
    const char *quant; /* what to quantise (model/quant/rules.h); NULL or "": nothing */
    /* Called once, when the checkpoint has been checked and its size is known; non-zero refuses
     * (a negative errno, with the text in err). May be NULL. */
    int (*admit)(void *ctx, const struct model_info *info, uint64_t bytes, struct error *err);
    /*
     * Called once, behind admit, when there is memory and nothing in it yet: the weights for
     * reading (sealed against shrinking alone), their manifest (whose digest is zero when it is not
     * known before the end) and the page that says how far they are there (cache/filling.h). The
     * descriptors are borrowed. May be NULL.
     */
    void (*attachable)(void *ctx, int weights, int manifest, int filling);
    /* Called by the loading thread now and then, and at the end; non-zero cancels. May be NULL. */
    int (*progress)(void *ctx, uint64_t done, uint64_t total);
    void *ctx;
};

struct loaded {
    int weights, manifest; /* sealed memfds, the caller's; -1 before */
    uint64_t bytes;
    struct digest digest; /* of the weights, in arena order */
    struct digest key;    /* of the checkpoint that was read: checkpoint_key() */
    double ms;
    bool from_pack;
    char recipe[PACK_RECIPE_MAX + 1]; /* of that pack: how it was quantised; or "" */
    bool converted;                   /* not a plain copy: a pack would spare work */
    uint32_t repaired; /* segments of a pack that were made again from the checkpoint */
    char notice[256];  /* what the operator should hear: damage, a pack of another build; or "" */
};

/*
 * Loads the checkpoint in `path`, or the pack that `path` is; *ret's descriptors are the caller's
 * (loaded_close). A pack of options->packs that is the checkpoint's is read instead of it, and
 * the checkpoint instead of a pack that cannot be used. Errors: those of opening, describing and
 * laying out the checkpoint (model/checkpoint.h, model/model.h, model/pack/pack.h), what `admit`
 * returned, -EINVAL (a quant that is malformed, matches nothing, or asked of a pack), -ECANCELED,
 * -ENOMEM, -ENOSPC (no memory behind the memfd), -EIO.
 */
int load_model(const char *path, const struct load_options *options, struct loaded *ret,
               struct error *err);
/* The checkpoint alone, whatever packs there are. */
int load_checkpoint(const char *dir, const struct load_options *options, struct loaded *ret,
                    struct error *err);
/*
 * The pack alone. A damaged segment is made again from the checkpoint, if that is still where it
 * was and as it was; else the load fails naming the segment and its tensors.
 */
int load_pack(const char *path, const struct load_options *options, struct loaded *ret,
              struct error *err);
/* Closes both descriptors; idempotent. */
void loaded_close(struct loaded *loaded);

#endif
