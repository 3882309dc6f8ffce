/* SPDX-License-Identifier: Apache-2.0 */
/* Reading packs: nothing in the file is trusted. */
#include "model/pack/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/fd.h"

struct pack {
    int fd, own_fd; /* own_fd: -1 when fd is borrowed */
    char *name;
    struct pack_info info;
    struct pack_section section;
    char *config, *dir;
    size_t config_len;
    struct model *model;
    struct weights_layout *layout;
    struct digest *table;
};

void pack_free(struct pack *pack)
{
    if (!pack)
        return;
    fd_close(pack->own_fd);
    weights_layout_free(pack->layout);
    model_free(pack->model);
    free(pack->config);
    free(pack->dir);
    free(pack->table);
    free(pack->name);
    free(pack);
}

const struct pack_info *pack_info(const struct pack *pack)
{
    return &pack->info;
}

const struct model *pack_model(const struct pack *pack)
{
    return pack->model;
}

const struct weights_layout *pack_layout(const struct pack *pack)
{
    return pack->layout;
}

const char *pack_config(const struct pack *pack, size_t *ret_len)
{
    *ret_len = pack->config_len;
    return pack->config;
}

const char *pack_dir(const struct pack *pack)
{
    return pack->dir;
}

char *pack_tokenizer_dir(const struct pack *pack, const char *path)
{
    _cleanup_free_ char *config = x_printf("%s/config.json", pack_dir(pack));
    const char *slash = strrchr(path, '/');

    if (access(config, R_OK) == 0)
        return x_strdup(pack_dir(pack));
    return slash ? x_strndup(path, (size_t)(slash - path)) : x_strdup(".");
}

int pack_fd(const struct pack *pack)
{
    return pack->fd;
}

bool pack_looks_like(const char *path)
{
    _cleanup_fd_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    uint32_t magic;
    return fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) &&
           fd_pread_all(fd, &magic, sizeof magic, 0, path, NULL) == 0 && magic == PACK_MAGIC;
}

/* ---- header ---- */

static bool terminated(const char *text, size_t room)
{
    return memchr(text, 0, room) != NULL;
}

static int read_header(const struct pack *pack, uint64_t file_bytes, struct pack_header *ret,
                       struct error *err)
{
    uint8_t block[PACK_HEADER_BYTES];
    struct pack_header h;
    if (file_bytes < sizeof block)
        return error_set(err, EBADMSG, "%s: %llu bytes are too few for a pack", pack->name,
                         (unsigned long long)file_bytes);
    int r = fd_pread_all(pack->fd, block, sizeof block, 0, pack->name, err);
    if (r < 0)
        return r;
    memcpy(&h, block, sizeof h);
    if (h.magic != PACK_MAGIC)
        return error_set(err, EBADMSG, "%s: not a pack", pack->name);
    if (h.version != PACK_VERSION)
        return error_set(err, ESTALE, "%s: a pack of version %u; this build reads %u", pack->name,
                         h.version, PACK_VERSION);
    if (pack_header_checksum(block) != h.checksum)
        return error_set(err, EBADMSG, "%s: the header's checksum differs", pack->name);
    if (h.state != PACK_WHOLE)
        return error_set(err, EBADMSG, "%s: was never finished", pack->name);
    if (h.file_bytes != file_bytes)
        return error_set(err, EBADMSG, "%s: has %llu bytes, its header says %llu: %s", pack->name,
                         (unsigned long long)file_bytes, (unsigned long long)h.file_bytes,
                         file_bytes < h.file_bytes ? "truncated?" : "something stands behind it");
    if (!h.n_sections || h.n_sections > PACK_SECTIONS_MAX || !terminated(h.recipe, sizeof h.recipe))
        return error_set(err, EBADMSG, "%s: a header of %u sections", pack->name, h.n_sections);
    *ret = h;
    return 0;
}

/* The section that this build reads; the text of -ESTALE names those that there are. */
static int find_section(struct pack *pack, const struct pack_header *h, struct error *err)
{
    char names[PACK_SECTIONS_MAX * 36] = "";
    for (uint32_t i = 0; i < h->n_sections; i++) {
        const struct pack_section *s = &h->sections[i];
        size_t len = strlen(names);
        if (!terminated(s->family, sizeof s->family))
            return error_set(err, EBADMSG, "%s: section %u has no name", pack->name, i);
        if (!strcmp(s->family, WEIGHTS_FAMILY)) {
            pack->section = *s;
            return 0;
        }
        snprintf(names + len, sizeof names - len, "%s%s", i ? ", " : "", s->family);
    }
    return error_set(err, ESTALE,
                     "%s: holds weights in the layout %s; this build reads %s: pack again from the "
                     "checkpoint",
                     pack->name, names, WEIGHTS_FAMILY);
}

/* True when [at, at + bytes) lies in [from, to). */
static bool lies_in(uint64_t at, uint64_t bytes, uint64_t from, uint64_t to)
{
    uint64_t end;
    return size_add(at, bytes, &end) && at >= from && end <= to;
}

/* Places and lengths: manifest, index, table and data in this order, none over another. */
static int check_places(const struct pack *pack, const struct pack_header *h, struct error *err)
{
    const struct pack_section *s = &pack->section;
    uint64_t table_bytes = (uint64_t)s->n_segments * sizeof(struct digest), want;
    bool sizes = s->segment_bytes >= PACK_ALIGN && s->segment_bytes <= PACK_SEGMENT_MOST &&
                 s->segment_bytes % PACK_ALIGN == 0 && s->arena_bytes &&
                 s->arena_bytes <= INT64_MAX / 2 && s->data_at % PACK_ALIGN == 0 &&
                 s->manifest_bytes + s->index_bytes <= PACK_META_MOST &&
                 s->manifest_bytes <= PACK_META_MOST && s->index_bytes <= PACK_META_MOST;
    if (!sizes)
        return error_set(err, EBADMSG, "%s: its header's sizes make no sense", pack->name);
    want = (s->arena_bytes - 1) / s->segment_bytes + 1;
    if (want != s->n_segments)
        return error_set(err, EBADMSG, "%s: %u segments; %llu bytes in segments of %u are %llu",
                         pack->name, s->n_segments, (unsigned long long)s->arena_bytes,
                         s->segment_bytes, (unsigned long long)want);
    if (!lies_in(s->manifest_at, s->manifest_bytes, PACK_HEADER_BYTES, s->index_at) ||
        !lies_in(s->index_at, s->index_bytes, PACK_HEADER_BYTES, s->table_at) ||
        !lies_in(s->table_at, table_bytes, PACK_HEADER_BYTES, s->data_at) ||
        !lies_in(s->data_at, s->arena_bytes, PACK_HEADER_BYTES, h->file_bytes))
        return error_set(err, EBADMSG, "%s: its parts overlap or lie outside the file", pack->name);
    return 0;
}

/* ---- manifest, index, table ---- */

static int read_part(const struct pack *pack, uint64_t at, uint64_t bytes, const char *what,
                     char **ret, struct error *err)
{
    _cleanup_free_ char *data = mem_alloc((size_t)bytes + 1, 1);
    if (!data)
        return error_set(err, ENOMEM, "%s: no memory for a %s of %llu bytes", pack->name, what,
                         (unsigned long long)bytes);
    int r = fd_pread_all(pack->fd, data, (size_t)bytes, at, pack->name, err);
    if (r == 0)
        *ret = TAKE(data);
    return r;
}

static int check_index(const struct pack *pack, const char *index, struct error *err)
{
    struct buffer want = {0};
    int r = pack_index_make(pack->layout, &want);
    if (r < 0)
        r = error_set(err, ENOMEM, "%s: no memory for its index", pack->name);
    else if (want.len != pack->section.index_bytes || memcmp(want.data, index, want.len))
        r = error_set(err, ESTALE,
                      "%s: its index is not that of the layout that this build makes: pack again "
                      "from the checkpoint",
                      pack->name);
    buffer_free(&want);
    return r;
}

static int read_meta(struct pack *pack, struct error *err)
{
    const struct pack_section *s = &pack->section;
    uint64_t table_bytes = (uint64_t)s->n_segments * sizeof(struct digest);
    _cleanup_free_ char *manifest = NULL, *index = NULL, *table = NULL;
    int r = read_part(pack, s->manifest_at, s->manifest_bytes, "manifest", &manifest, err);
    r = r < 0 ? r : read_part(pack, s->index_at, s->index_bytes, "index", &index, err);
    r = r < 0 ? r : read_part(pack, s->table_at, table_bytes, "table", &table, err);
    if (r < 0)
        return r;
    struct digest_state *state = digest_begin();
    digest_update(state, manifest, s->manifest_bytes);
    digest_update(state, index, s->index_bytes);
    digest_update(state, table, table_bytes);
    struct digest found = digest_end(state);
    if (!digest_equal(&found, &s->meta))
        return error_set(err, EBADMSG, "%s: the checksum of its manifest, index and table differs",
                         pack->name);
    r = manifest_read(manifest, s->manifest_bytes, &pack->model, &pack->layout, &pack->dir, err);
    if (r < 0) {
        error_prefix(err, "%s", pack->name);
        return r;
    }
    if (pack->layout->bytes != s->arena_bytes || !digest_equal(&pack->layout->digest, &s->weights))
        return error_set(err, EBADMSG, "%s: header and manifest tell different weights",
                         pack->name);
    r = check_index(pack, index, err);
    if (r == 0)
        r = manifest_config(manifest, s->manifest_bytes, &pack->config, &pack->config_len, err);
    if (r == 0)
        pack->table = (struct digest *)TAKE(table);
    return r;
}

/* ---- opening ---- */

int pack_open_fd(int fd, const char *name, struct pack **ret, struct error *err)
{
    _cleanup_(pack_freep) struct pack *pack = mem_alloc(1, sizeof *pack);
    struct pack_header h;
    struct stat st;
    if (!pack)
        return error_set(err, ENOMEM, "%s: no memory", name);
    pack->fd = fd;
    pack->own_fd = -1;
    if (!(pack->name = strdup(name)))
        return error_set(err, ENOMEM, "%s: no memory", name);
    if (fstat(fd, &st) < 0)
        return error_sys(err, errno, "%s", name);
    if (!S_ISREG(st.st_mode))
        return error_set(err, EBADMSG, "%s: not a regular file", name);
    int r = read_header(pack, (uint64_t)st.st_size, &h, err);
    r = r < 0 ? r : find_section(pack, &h, err);
    r = r < 0 ? r : check_places(pack, &h, err);
    r = r < 0 ? r : read_meta(pack, err);
    if (r < 0)
        return r;
    pack->info = (struct pack_info){.file_bytes = h.file_bytes,
                                    .arena_bytes = pack->section.arena_bytes,
                                    .segments = pack->section.n_segments,
                                    .segment_bytes = pack->section.segment_bytes,
                                    .key = h.key};
    memcpy(pack->info.recipe, h.recipe, sizeof h.recipe);
    memcpy(pack->info.family, pack->section.family, sizeof pack->info.family);
    *ret = TAKE(pack);
    return 0;
}

int pack_open(const char *path, struct pack **ret, struct error *err)
{
    _cleanup_fd_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return error_sys(err, errno, "%s", path);
    int r = pack_open_fd(fd, path, ret, err);
    if (r == 0)
        (*ret)->own_fd = TAKE_FD(fd);
    return r;
}

/* ---- segments ---- */

uint64_t pack_segment_at(const struct pack *pack, uint32_t i)
{
    return (uint64_t)i * pack->section.segment_bytes;
}

uint32_t pack_segment_bytes(const struct pack *pack, uint32_t i)
{
    uint64_t left = pack->section.arena_bytes - pack_segment_at(pack, i);
    return (uint32_t)MIN(left, pack->section.segment_bytes);
}

uint64_t pack_segment_file_at(const struct pack *pack, uint32_t i)
{
    return pack->section.data_at + pack_segment_at(pack, i);
}

int pack_segment_check(const struct pack *pack, uint32_t i, const struct digest *found,
                       struct error *err)
{
    char tensors[160];
    if (digest_equal(found, &pack->table[i]))
        return 0;
    pack_tensors_text(pack->layout, pack_segment_at(pack, i), pack_segment_bytes(pack, i), tensors,
                      sizeof tensors);
    return error_set(err, EBADMSG, "%s: segment %u of %u (%s) is damaged: its checksum differs",
                     pack->name, i, pack->section.n_segments, tensors);
}

int pack_segment_read(const struct pack *pack, uint32_t i, void *to, struct error *err)
{
    uint32_t n = pack_segment_bytes(pack, i);
    int r = fd_pread_all(pack->fd, to, n, pack_segment_file_at(pack, i), pack->name, err);
    if (r < 0)
        return r;
    if (fault_hit(FAULT_PACK_READ))
        *(uint8_t *)to ^= 1;
    struct digest found = digest_of(to, n);
    return pack_segment_check(pack, i, &found, err);
}
