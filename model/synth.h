/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Synthetic checkpoints: random weights in the shape of a given config.json, so that load, spawn
 * and step times of a model can be measured without its download. Names and shapes come from the
 * same description as the layout's.
 */
#ifndef EMBER_MODEL_SYNTH_H
#define EMBER_MODEL_SYNTH_H

#include <stddef.h>
#include <stdint.h>

#include <ember/op.h>

#include "base/error.h"

struct synth_options {
    uint64_t seed;        /* equal seeds, equal bytes, however they are cut into shards */
    uint32_t max_layers;  /* 0: as many as the config says */
    uint8_t dtype;        /* EMBER_BF16, EMBER_F16 or EMBER_F32 */
    uint64_t shard_bytes; /* 0: 4 GiB; beyond it the checkpoint is cut and gets an index */
};

/* Called after each few MiB; a non-zero return (a negative errno) stops the writing and is handed
 * back. */
typedef int (*synth_progress_fn)(void *ctx, uint64_t done, uint64_t total);

/*
 * Writes config.json (the given one; layers cut, quantisation dropped, dtype set) and the weights
 * to out_dir, which is made when missing. Matrices are normal with variance 1/columns and norms are
 * 1, so that activations stay near 1. -EEXIST when out_dir holds a checkpoint already, -ENOSPC with
 * the numbers when the disk has too little room. After a failure what was made is removed, out_dir
 * too if it was, and nothing else: files that were there are never written over.
 */
int synth_write(const char *config_path, const char *out_dir, const struct synth_options *options,
                synth_progress_fn progress, void *ctx, struct error *err);
/* The same from the text of a config.json, which errors call `name`. */
int synth_write_config(const char *text, size_t len, const char *name, const char *out_dir,
                       const struct synth_options *options, synth_progress_fn progress, void *ctx,
                       struct error *err);

#endif
