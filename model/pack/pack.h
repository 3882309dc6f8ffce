/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packs: resident weights as a file. A pack holds the weights arena byte for byte, as
 * model/layout.c laid it out and the kernels read it, cut into segments with checksums, and the
 * manifest that says what it is. So a load is large reads into the final memory, and nothing is
 * converted. docs/pack-format.md has the bytes.
 *
 * A pack says which family of layouts its bytes are of (WEIGHTS_FAMILY). A reader that does not
 * know the family says so by -ESTALE, and the caller goes back to the checkpoint.
 */
#ifndef EMBER_MODEL_PACK_PACK_H
#define EMBER_MODEL_PACK_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/digest.h"
#include "base/error.h"
#include "base/mem.h"
#include "model/model.h"

#define PACK_SEGMENT_BYTES (2 * MIB) /* of the packs that are written */
#define PACK_RECIPE_MAX 63

/* ---- writing ---- */

struct pack_source {
    const char *config; /* config.json as text */
    size_t config_len;
    const char *dir;                     /* the checkpoint's folder */
    const struct weights_layout *layout; /* with the digest of its bytes */
    struct digest key;                   /* of the checkpoint: checkpoint_key() */
    const char *recipe; /* how it was quantised here, "" when its numbers are the checkpoint's; at
                           most PACK_RECIPE_MAX bytes */
    int arena;          /* borrowed: a memfd or file that holds layout->bytes bytes */
};

struct pack_write_options {
    uint64_t rate; /* bytes a second at most; 0: no limit */
    /* Called behind each segment; non-zero cancels. May be NULL. */
    int (*progress)(void *ctx, uint64_t done, uint64_t total);
    void *ctx;
};

/*
 * Writes `path` with all that is missing of it: segments go to PATH.part, which takes the final
 * name when it is whole and on disk. Another call, or another process after this one was killed,
 * goes on with the segments that PATH.part has already, if it is of the same source; every one is
 * read back and compared first. A pack that was there is replaced.
 *
 * -EBUSY: another process is writing it. -ENOSPC: the disk (or RLIMIT_FSIZE, in a process that
 * ignores SIGXFSZ) has no room, and PATH.part is removed. -ECANCELED: PATH.part stays. Otherwise
 * the system's errors.
 */
int pack_write(const struct pack_source *source, const char *path,
               const struct pack_write_options *options, struct error *err);

/* ---- reading ---- */

struct pack;

struct pack_info {
    uint64_t file_bytes, arena_bytes;
    uint32_t segments, segment_bytes;
    struct digest key;
    char recipe[PACK_RECIPE_MAX + 1], family[32];
};

/*
 * Opens a pack and checks all of it but the segments: magic, version, lengths, overlaps, checksums,
 * that the index is that of the layout. -EBADMSG: no pack, or damaged; -ESTALE: another version or
 * family of layouts, named.
 */
int pack_open(const char *path, struct pack **ret, struct error *err);
/* The same from a descriptor, which is borrowed; `name` stands in texts. */
int pack_open_fd(int fd, const char *name, struct pack **ret, struct error *err);
void pack_free(struct pack *pack);
DEFINE_CLEANUP(struct pack *, pack_free)

/* True for a regular file that begins as a pack does. */
bool pack_looks_like(const char *path);

/* What stands in it; all live as long as the pack. */
const struct pack_info *pack_info(const struct pack *pack);
const struct model *pack_model(const struct pack *pack);
const struct weights_layout *pack_layout(const struct pack *pack);
/* The checkpoint's config.json, and the folder that it was in. */
const char *pack_config(const struct pack *pack, size_t *ret_len);
const char *pack_dir(const struct pack *pack);
/* The folder with the tokenizer of the pack at `path`: the checkpoint's, or that of a pack which
 * was moved to another host. Caller frees. */
char *pack_tokenizer_dir(const struct pack *pack, const char *path);

/* Segment i holds bytes [pack_segment_at, + pack_segment_bytes) of the arena. */
uint64_t pack_segment_at(const struct pack *pack, uint32_t i);
uint32_t pack_segment_bytes(const struct pack *pack, uint32_t i);
/* Where it stands in the file: a multiple of 2 MiB. */
uint64_t pack_segment_file_at(const struct pack *pack, uint32_t i);
int pack_fd(const struct pack *pack);
/* Its checksum, which `found` has to equal: 0, or -EBADMSG naming the segment and its tensors. */
int pack_segment_check(const struct pack *pack, uint32_t i, const struct digest *found,
                       struct error *err);
/* Reads and checks segment i; `to` has room for it. */
int pack_segment_read(const struct pack *pack, uint32_t i, void *to, struct error *err);

#endif
