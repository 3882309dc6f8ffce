/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writing packs. PATH.part holds the header (state PACK_WRITING), manifest and index from the
 * start; each segment is followed by its checksum in the table. One process writes at a time: it
 * holds a flock(2) on PATH.part, which the kernel releases when it dies. Data is on disk before the
 * header says PACK_WHOLE, and that before the file gets its name.
 */
#include "model/pack/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/fd.h"

/* Bytes that wait for the disk at most, so that others' writes do not. */
#define SYNC_EVERY (64 * MIB)

struct writer {
    const struct pack_source *source;
    const struct pack_write_options *options;
    const char *path;
    char *part; /* PATH.part */
    int fd;
    struct pack_header header;
    struct buffer manifest, index;
    struct digest *table;
    uint8_t *segment, *stored;
    uint64_t started_ns, written, unsynced;
};

static void writer_clear(struct writer *w)
{
    fd_close(w->fd); /* and with it the lock */
    free(w->part);
    buffer_free(&w->manifest);
    buffer_free(&w->index);
    free(w->table);
    free(w->segment);
    free(w->stored);
}

static struct pack_section *section_of(struct writer *w)
{
    return &w->header.sections[0];
}

/* ---- writes that may meet a full disk ---- */

static int put(struct writer *w, const void *data, size_t n, uint64_t at, struct error *err)
{
    for (size_t done = 0; done < n;) {
        ssize_t r = fault_hit(FAULT_PACK_WRITE)
                        ? (errno = ENOSPC, -1)
                        : pwrite(w->fd, (const char *)data + done, n - done, (off_t)(at + done));
        if (r < 0 && errno == EINTR)
            continue;
        if (r == 0)
            errno = ENOSPC;
        if (r <= 0) /* a limit on the size of files counts as a full disk */
            return error_sys(err, errno == EFBIG || errno == EDQUOT ? ENOSPC : errno,
                             "%s: writing a pack of %llu bytes", w->part,
                             (unsigned long long)w->header.file_bytes);
        done += (size_t)r;
    }
    return 0;
}

static int sync_data(struct writer *w, struct error *err)
{
    w->unsynced = 0;
    return fdatasync(w->fd) < 0 ? error_sys(err, errno, "%s: fdatasync", w->part) : 0;
}

static int put_header(struct writer *w, enum pack_state state, struct error *err)
{
    uint8_t block[PACK_HEADER_BYTES] = {0};
    w->header.state = state;
    memcpy(block, &w->header, sizeof w->header);
    w->header.checksum = pack_header_checksum(block);
    memcpy(block, &w->header, sizeof w->header);
    return put(w, block, sizeof block, 0, err);
}

/* ---- what it will be ---- */

static int prepare(struct writer *w, struct error *err)
{
    const struct pack_source *source = w->source;
    struct pack_section *s = section_of(w);
    int r = manifest_write(source->config, source->config_len, source->dir, source->layout,
                           &w->manifest, err);
    if (r < 0)
        return r;
    if (pack_index_make(source->layout, &w->index) < 0)
        return error_set(err, ENOMEM, "%s: no memory for an index", w->path);
    if (strlen(source->recipe) > PACK_RECIPE_MAX)
        return error_set(err, EINVAL, "a recipe of %zu bytes; at most %d fit",
                         strlen(source->recipe), PACK_RECIPE_MAX);
    strcpy(s->family, WEIGHTS_FAMILY);
    s->arena_bytes = source->layout->bytes;
    s->segment_bytes = PACK_SEGMENT_BYTES;
    s->n_segments = (uint32_t)((s->arena_bytes + s->segment_bytes - 1) / s->segment_bytes);
    s->manifest_at = PACK_HEADER_BYTES;
    s->manifest_bytes = w->manifest.len;
    s->index_at = size_align(s->manifest_at + s->manifest_bytes, 64);
    s->index_bytes = w->index.len;
    s->table_at = size_align(s->index_at + s->index_bytes, 64);
    s->data_at = size_align(s->table_at + s->n_segments * sizeof(struct digest), PACK_ALIGN);
    s->weights = source->layout->digest;
    w->header.magic = PACK_MAGIC;
    w->header.version = PACK_VERSION;
    w->header.n_sections = 1;
    w->header.file_bytes = s->data_at + s->arena_bytes;
    w->header.key = source->key;
    strcpy(w->header.recipe, source->recipe);
    w->table = mem_alloc(s->n_segments, sizeof *w->table);
    w->segment = mem_alloc(s->segment_bytes, 1);
    w->stored = mem_alloc(s->segment_bytes, 1);
    if (!w->table || !w->segment || !w->stored || !(w->part = mem_alloc(strlen(w->path) + 6, 1)))
        return error_set(err, ENOMEM, "%s: no memory to write it", w->path);
    sprintf(w->part, "%s.part", w->path);
    return 0;
}

/* Opens and locks PATH.part; it may have got its final name between the two. */
static int open_part(struct writer *w, struct error *err)
{
    struct stat ours, named;
    for (int attempt = 0; attempt < 10; attempt++) {
        w->fd = open(w->part, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
        if (w->fd < 0)
            return error_sys(err, errno, "%s", w->part);
        if (flock(w->fd, LOCK_EX | LOCK_NB) < 0) {
            int r = errno == EWOULDBLOCK
                        ? error_set(err, EBUSY, "%s: another process is writing it", w->path)
                        : error_sys(err, errno, "%s: lock", w->part);
            w->fd = fd_close(w->fd);
            return r;
        }
        if (fstat(w->fd, &ours) == 0 && stat(w->part, &named) == 0 && ours.st_ino == named.st_ino &&
            ours.st_dev == named.st_dev)
            return 0;
        w->fd = fd_close(w->fd);
    }
    return error_set(err, EBUSY, "%s: other processes keep writing it", w->path);
}

/* ---- going on ---- */

static bool holds(struct writer *w, const void *want, size_t n, uint64_t at)
{
    _cleanup_free_ char *found = mem_alloc(n, 1);
    return found && fd_pread_all(w->fd, found, n, at, w->part, NULL) == 0 &&
           !memcmp(found, want, n);
}

/* What is there is the beginning of the same pack, or all of it but for its name: its table is
 * worth a look. */
static bool same_pack(struct writer *w)
{
    const struct pack_section *s = section_of(w);
    struct pack_header h;
    if (fd_pread_all(w->fd, &h, sizeof h, 0, w->part, NULL) < 0)
        return false;
    h.checksum = 0;
    h.state = PACK_WRITING;
    h.sections[0].meta = (struct digest){{0}};
    return !memcmp(&h, &w->header, sizeof h) &&
           holds(w, w->manifest.data, w->manifest.len, s->manifest_at) &&
           holds(w, w->index.data, w->index.len, s->index_at) &&
           fd_pread_all(w->fd, w->table, s->n_segments * sizeof *w->table, s->table_at, w->part,
                        NULL) == 0;
}

/* Room for all of it is asked for at once, so that a full disk is met before hours of writing. */
static int begin(struct writer *w, struct error *err)
{
    const struct pack_section *s = section_of(w);
    memset(w->table, 0, s->n_segments * sizeof *w->table);
    if (ftruncate(w->fd, 0) < 0)
        return error_sys(err, errno, "%s", w->part);
    int r = put_header(w, PACK_WRITING, err);
    r = r < 0 ? r : put(w, w->manifest.data, w->manifest.len, s->manifest_at, err);
    r = r < 0 ? r : put(w, w->index.data, w->index.len, s->index_at, err);
    if (r < 0)
        return r;
    if (fallocate(w->fd, 0, 0, (off_t)w->header.file_bytes) == 0)
        return 0;
    if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINTR)
        return ftruncate(w->fd, (off_t)w->header.file_bytes) < 0
                   ? error_sys(err, errno == EFBIG ? ENOSPC : errno, "%s", w->part)
                   : 0;
    return error_sys(err, errno == EFBIG || errno == EDQUOT ? ENOSPC : errno,
                     "%s: room for %llu bytes", w->part, (unsigned long long)w->header.file_bytes);
}

/* ---- segments ---- */

static void hold_back(struct writer *w)
{
    uint64_t rate = w->options->rate, due;
    if (!rate)
        return;
    due = w->started_ns + (uint64_t)((double)w->written / (double)rate * 1e9);
    uint64_t now = clock_ns();
    if (due > now) {
        struct timespec t = {(time_t)((due - now) / 1000000000u),
                             (long)((due - now) % 1000000000u)};
        nanosleep(&t, NULL);
    }
}

static int put_segment(struct writer *w, uint32_t i, struct error *err)
{
    const struct pack_section *s = section_of(w);
    uint64_t at = (uint64_t)i * s->segment_bytes;
    size_t n = (size_t)MIN(s->arena_bytes - at, s->segment_bytes);
    int r = fd_pread_all(w->source->arena, w->segment, n, at, "resident weights", err);
    if (r < 0)
        return r;
    struct digest digest = digest_of(w->segment, n);
    if (digest_equal(&digest, &w->table[i]) &&
        fd_pread_all(w->fd, w->stored, n, s->data_at + at, w->part, NULL) == 0 &&
        !memcmp(w->stored, w->segment, n))
        return 0; /* is there already */
    r = put(w, w->segment, n, s->data_at + at, err);
    if (r < 0)
        return r;
    w->table[i] = digest;
    w->written += n;
    w->unsynced += n;
    r = put(w, &digest, sizeof digest, s->table_at + i * sizeof digest, err);
    if (r == 0 && w->unsynced >= SYNC_EVERY)
        r = sync_data(w, err);
    hold_back(w);
    return r;
}

static int put_segments(struct writer *w, struct error *err)
{
    const struct pack_section *s = section_of(w);
    for (uint32_t i = 0; i < s->n_segments; i++) {
        int r = put_segment(w, i, err);
        if (r < 0)
            return r;
        uint64_t done = MIN((uint64_t)(i + 1) * s->segment_bytes, s->arena_bytes);
        if (w->options->progress && w->options->progress(w->options->ctx, done, s->arena_bytes))
            return error_set(err, ECANCELED, "%s: cancelled", w->path);
    }
    return 0;
}

/* ---- the end ---- */

static int sync_folder(const char *path, struct error *err)
{
    const char *slash = strrchr(path, '/');
    _cleanup_free_ char *dir = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
    _cleanup_fd_ int fd = dir ? open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (fd < 0 || fsync(fd) < 0)
        return error_sys(err, errno, "%s: syncing its folder", path);
    return 0;
}

static int finish(struct writer *w, struct error *err)
{
    struct pack_section *s = section_of(w);
    struct digest_state *state = digest_begin();
    digest_update(state, w->manifest.data, w->manifest.len);
    digest_update(state, w->index.data, w->index.len);
    digest_update(state, w->table, s->n_segments * sizeof *w->table);
    s->meta = digest_end(state);
    int r = sync_data(w, err);
    r = r < 0 ? r : put_header(w, PACK_WHOLE, err);
    r = r < 0 ? r : sync_data(w, err);
    if (r < 0)
        return r;
    if (rename(w->part, w->path) < 0)
        return error_sys(err, errno, "%s", w->path);
    return sync_folder(w->path, err);
}

int pack_write(const struct pack_source *source, const char *path,
               const struct pack_write_options *options, struct error *err)
{
    static const struct pack_write_options none;
    struct writer w = {.source = source,
                       .options = options ? options : &none,
                       .path = path,
                       .fd = -1,
                       .started_ns = clock_ns()};
    int r = prepare(&w, err);
    r = r < 0 ? r : open_part(&w, err);
    if (r == 0 && !same_pack(&w))
        r = begin(&w, err);
    r = r < 0 ? r : put_segments(&w, err);
    r = r < 0 ? r : finish(&w, err);
    if (r == -ENOSPC && w.fd >= 0)
        unlink(w.part); /* a disk without room has better uses for it */
    writer_clear(&w);
    return r;
}
