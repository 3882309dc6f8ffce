/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One safetensors file's header (the format's own specification): u64 little-endian length of the
 * header, a JSON object {"name": {"dtype", "shape", "data_offsets": [begin, end]}, ...,
 * "__metadata__": {...}}, then the data, to which the offsets are relative.
 */
#ifndef EMBER_MODEL_SAFETENSORS_H
#define EMBER_MODEL_SAFETENSORS_H

#include "base/error.h"
#include "model/checkpoint.h"

#define SAFETENSORS_HEADER_MAX (100 * MIB)
#define DTYPE_UNKNOWN 255

/* Tensors of one or more files; names are owned. Zero-initialise. */
struct tensor_list {
    struct checkpoint_tensor *tensors;
    size_t count, cap;
};
void tensor_list_free(struct tensor_list *list);

/*
 * Reads a header (`json` is the text behind the length, `file_bytes` the file's size) and appends
 * its tensors, offsets made absolute. Checks every count and offset, sizes against dtype and shape,
 * that no two tensors overlap and that they fill the file to its end. -EBADMSG names `what` and the
 * tensor.
 */
int safetensors_parse(const char *json, size_t len, uint64_t file_bytes, uint32_t shard,
                      const char *what, struct tensor_list *list, struct error *err);

/* The same from an open file. */
int safetensors_read(int fd, uint32_t shard, const char *what, struct tensor_list *list,
                     struct error *err);

/* "BF16" for EMBER_BF16, ...; NULL when the format has no word for it. */
const char *safetensors_dtype_word(enum ember_dtype dtype);

#endif
