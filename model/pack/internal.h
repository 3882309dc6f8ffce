/* SPDX-License-Identifier: Apache-2.0 */
/* What the writer and the reader of packs share: the structures of docs/pack-format.md. */
#ifndef EMBER_MODEL_PACK_INTERNAL_H
#define EMBER_MODEL_PACK_INTERNAL_H

#include "model/pack/pack.h"

#define PACK_MAGIC 0x504b4d45u /* "EMKP" */
#define PACK_VERSION 1
#define PACK_HEADER_BYTES 4096
#define PACK_SECTIONS_MAX 8
#define PACK_CHECKED_FROM 16
#define PACK_ALIGN (2 * MIB)
#define PACK_SEGMENT_MOST (64 * MIB)
#define PACK_META_MOST GIB

enum pack_state { PACK_WRITING, PACK_WHOLE };

struct pack_section {
    char family[32];
    uint64_t manifest_at, manifest_bytes;
    uint64_t index_at, index_bytes;
    uint64_t table_at;
    uint32_t n_segments, segment_bytes;
    uint64_t data_at, arena_bytes;
    struct digest meta;    /* of manifest, index and table, in this order */
    struct digest weights; /* as in the manifest */
};

struct pack_header {
    uint32_t magic, version;
    uint64_t checksum; /* of the rest of the block of PACK_HEADER_BYTES */
    uint32_t state, n_sections;
    uint64_t file_bytes;
    struct digest key;
    char recipe[PACK_RECIPE_MAX + 1];
    uint8_t zero[16];
    struct pack_section sections[PACK_SECTIONS_MAX];
};
_Static_assert(sizeof(struct pack_section) == 128, "written as it stands");
_Static_assert(sizeof(struct pack_header) == 128 + 128 * PACK_SECTIONS_MAX, "written as it stands");

/* An index entry; its name follows in the names' text, in order, each with its NUL. */
struct pack_tensor {
    uint64_t offset, bytes, row_bytes, scale_at, zero_at, order_at;
    uint32_t dim[3], group, groups, name_at;
    uint8_t dtype, rank, quant, scale_dtype;
    uint32_t reserved;
};
_Static_assert(sizeof(struct pack_tensor) == 80, "written as it stands");

/* Appends the index of a layout: u32 count, u32 bytes of the names, entries, names. 0 or -ENOMEM.
 */
int pack_index_make(const struct weights_layout *layout, struct buffer *out);
/* "layers.3.qkv to layers.3.down": the tensors that have bytes in [at, at + bytes). */
void pack_tensors_text(const struct weights_layout *layout, uint64_t at, uint64_t bytes, char *out,
                       size_t room);
/* The checksum of a header block. */
uint64_t pack_header_checksum(const uint8_t block[PACK_HEADER_BYTES]);

#endif
