/* SPDX-License-Identifier: Apache-2.0 */
/* A pack, as damaged or hostile as it may be: its checksums are made right first, so that the rest
 * is reached. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "model/pack/internal.h"

#define FILE_MOST (64 * MIB)

/* `bytes`: of the file; zeros stand behind the input. */
static void try_open(const uint8_t *data, size_t size, uint64_t bytes)
{
    struct pack *pack = NULL;
    struct error err = {0};
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size || ftruncate(fd, (off_t)bytes) < 0)
        abort();
    int r = pack_open_fd(fd, "fuzz.pack", &pack, &err);
    assert(r == 0 || err.text[0]);
    for (uint32_t i = 0; pack && i < pack_info(pack)->segments && i < 4; i++) {
        void *to = malloc(pack_segment_bytes(pack, i));
        if (to)
            pack_segment_read(pack, i, to, &err);
        free(to);
    }
    pack_free(pack);
    close(fd);
}

/* Sizes and checksums as the reader wants them. */
static uint64_t mend(uint8_t *copy, size_t size)
{
    struct pack_header h;
    memcpy(&h, copy, sizeof h);
    h.file_bytes = MAX(size, MIN(h.file_bytes, FILE_MOST));
    struct pack_section *s = &h.sections[0];
    uint64_t table = (uint64_t)s->n_segments * sizeof(struct digest);
    if (s->manifest_at <= size && s->manifest_bytes <= size - s->manifest_at &&
        s->index_at <= size && s->index_bytes <= size - s->index_at && s->table_at <= size &&
        table <= size - s->table_at) {
        struct digest_state *state = digest_begin();
        digest_update(state, copy + s->manifest_at, s->manifest_bytes);
        digest_update(state, copy + s->index_at, s->index_bytes);
        digest_update(state, copy + s->table_at, table);
        s->meta = digest_end(state);
    }
    memcpy(copy, &h, sizeof h);
    h.checksum = pack_header_checksum(copy);
    memcpy(copy, &h, sizeof h);
    return h.file_bytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *copy;
    try_open(data, size, size);
    if (size < PACK_HEADER_BYTES || !(copy = malloc(size)))
        return 0;
    memcpy(copy, data, size);
    uint64_t bytes = mend(copy, size);
    try_open(copy, size, bytes);
    free(copy);
    return 0;
}
