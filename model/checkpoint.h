/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checkpoints in Hugging Face form: a folder with config.json and model.safetensors, or an index
 * (model.safetensors.index.json) with its shards. Format: the safetensors specification: u64 header
 * length, a JSON object {name: {dtype, shape, data_offsets}}, then the data.
 *
 * Opening reads and checks headers only: every offset lies in its file, no two tensors overlap,
 * sizes are dtype times shape, shards are as long as their headers say, the index names only shards
 * and tensors that exist.
 */
#ifndef EMBER_MODEL_CHECKPOINT_H
#define EMBER_MODEL_CHECKPOINT_H

#include <stddef.h>
#include <stdint.h>

#include <ember/op.h>

#include "base/digest.h"
#include "base/error.h"
#include "base/mem.h"

#define CHECKPOINT_RANK_MAX 4
#define CHECKPOINT_SHAPE_TEXT 96 /* bytes of any shape as text */

struct checkpoint;

struct checkpoint_tensor {
    const char *name;
    uint8_t dtype; /* enum ember_dtype, or 255 for a dtype we do not hold (dtype_name says which) */
    uint8_t rank;
    char dtype_name[12];
    uint64_t dim[CHECKPOINT_RANK_MAX];
    uint64_t offset, bytes; /* in the shard's file */
    uint32_t shard;
};

/*
 * -ENOENT (no such folder, config.json or weights), -EBADMSG (malformed, truncated, overlapping,
 * contradictory: the text names file and tensor), -ENOMEM, or the system's. The caller owns *ret.
 */
int checkpoint_open(const char *dir, struct checkpoint **ret, struct error *err);
void checkpoint_free(struct checkpoint *checkpoint);
DEFINE_CLEANUP(struct checkpoint *, checkpoint_free)

/* config.json as text, as read. */
const char *checkpoint_config(const struct checkpoint *checkpoint, size_t *ret_len);
/* The folder, as it was given to checkpoint_open. */
const char *checkpoint_dir(const struct checkpoint *checkpoint);
/* NULL when there is none of that name. */
const struct checkpoint_tensor *checkpoint_find(const struct checkpoint *checkpoint,
                                                const char *name);

/* A shape as people read it, "[4, 16]"; returns out. */
const char *checkpoint_shape_text(char out[CHECKPOINT_SHAPE_TEXT], uint32_t rank,
                                  const uint64_t *dim);

/* Reads bytes [first, first + n) of a tensor into `to`, by pread, never by mapping. */
int checkpoint_read(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor,
                    uint64_t first, void *to, size_t n, struct error *err);

/*
 * What stands for the checkpoint's contents without reading them: a digest of config.json, of every
 * shard's name, size and time of modification, and of what its header says.
 */
struct digest checkpoint_key(const struct checkpoint *checkpoint);

/* A single .safetensors file (verify's expected.safetensors). */
int checkpoint_open_file(const char *path, struct checkpoint **ret, struct error *err);

#endif
