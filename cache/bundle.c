/* SPDX-License-Identifier: Apache-2.0 */
#include "cache/bundle.h"

#include <errno.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/fd.h"
#include "cache/internal.h"

#define READ_STEP MIB
#define WHAT "bundle"

/* ---- Writing ---- */

struct bundle_writer {
    int fd;
    uint64_t count;
    struct buffer sums;
};

static int bundle_begin(struct bundle_writer *writer, int fd, uint64_t created_ns,
                        struct error *err)
{
    uint8_t head[16] = {'E', 'M', 'B', 'B'};

    *writer = (struct bundle_writer){.fd = fd};
    put_le(head + 4, 2, BUNDLE_VERSION);
    put_le(head + 8, 8, created_ns);
    return fd_write_all(fd, head, sizeof head, WHAT, err);
}

static int bundle_item(struct bundle_writer *writer, const void *record, size_t len,
                       struct error *err)
{
    uint8_t item[BUNDLE_ITEM] = {'E', 'M', 'B', 'I'};

    put_le(item + 8, 8, len);
    put_le(item + 16, 8, checksum_of(record, len));
    if (buffer_append(&writer->sums, item + 16, 8) < 0)
        return error_set(err, ENOMEM, WHAT ": no memory for its checksums");
    int r = fd_write_all(writer->fd, item, sizeof item, WHAT, err);
    if (!r)
        r = fd_write_all(writer->fd, record, len, WHAT, err);
    writer->count += !r;
    return r;
}

static int bundle_end(struct bundle_writer *writer, struct error *err)
{
    uint8_t end[BUNDLE_ITEM] = {'E', 'M', 'B', 'E'};

    put_le(end + 8, 8, writer->count);
    put_le(end + 16, 8, checksum_of(writer->sums.data ? writer->sums.data : "", writer->sums.len));
    buffer_free(&writer->sums);
    return fd_write_all(writer->fd, end, sizeof end, WHAT, err);
}

/* ---- Reading ---- */

/* Exactly n bytes of a stream. */
static int read_all(int fd, void *out, size_t n, uint64_t *offset, struct error *err)
{
    for (size_t done = 0; done < n;) {
        ssize_t r =
            fault_hit(FAULT_READ) ? (errno = EIO, -1) : read(fd, (char *)out + done, n - done);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return error_sys(err, errno, WHAT ": read at byte %llu", (unsigned long long)*offset);
        if (!r)
            return error_set(err, EBADMSG, WHAT ": ends at byte %llu, before its trailer",
                             (unsigned long long)*offset);
        done += (size_t)r;
        *offset += (size_t)r;
    }
    return 0;
}

static int read_record(int fd, uint64_t len, struct buffer *buf, uint64_t *offset,
                       struct error *err)
{
    buf->len = 0;
    while (len) {
        size_t step = MIN(len, READ_STEP);
        if (buffer_reserve(buf, step) < 0)
            return error_set(err, ENOMEM, WHAT ": no memory for an item at byte %llu",
                             (unsigned long long)*offset);
        int r = read_all(fd, buf->data + buf->len, step, offset, err);
        if (r < 0)
            return r;
        buf->len += step;
        len -= step;
    }
    return 0;
}

static int check_end(int fd, const uint8_t *end, const struct buffer *sums, uint64_t offset,
                     struct error *err)
{
    char byte;

    if (get_le(end + 8, 8) != sums->len / 8 || get_le(end + 4, 4) ||
        get_le(end + 16, 8) != checksum_of(sums->data ? sums->data : "", sums->len))
        return error_set(err, EBADMSG, WHAT ": the trailer does not match the %zu items before it",
                         sums->len / 8);
    if (read(fd, &byte, 1) > 0)
        return error_set(err, EBADMSG, WHAT ": bytes follow the trailer at %llu",
                         (unsigned long long)offset);
    return 0;
}

struct reader {
    int fd;
    uint64_t max_record, offset;
    struct buffer bytes, sums;
    int (*callback)(void *ctx, const struct record *record, const void *bytes, size_t len,
                    struct error *err);
    void *ctx;
};

static void reader_done(struct reader *reader)
{
    buffer_free(&reader->bytes);
    buffer_free(&reader->sums);
}

static int read_item(struct reader *rd, const uint8_t *item, struct error *err)
{
    uint64_t at = rd->offset - BUNDLE_ITEM, len = get_le(item + 8, 8);
    struct record record;

    if (memcmp(item, "EMBI", 4) || get_le(item + 4, 4))
        return error_set(err, EBADMSG, WHAT ": no item at byte %llu", (unsigned long long)at);
    if (len > rd->max_record)
        return error_set(err, EFBIG, WHAT ": the item at byte %llu says %llu bytes, limit %llu",
                         (unsigned long long)at, (unsigned long long)len,
                         (unsigned long long)rd->max_record);
    int r = read_record(rd->fd, len, &rd->bytes, &rd->offset, err);
    if (r < 0)
        return r;
    const void *bytes = rd->bytes.data ? rd->bytes.data : "";
    if (checksum_of(bytes, len) != get_le(item + 16, 8))
        return error_set(err, EBADMSG, WHAT ": the item at byte %llu fails its checksum",
                         (unsigned long long)at);
    if (buffer_append(&rd->sums, item + 16, 8) < 0)
        return error_set(err, ENOMEM, WHAT ": no memory for its checksums");
    r = record_parse(bytes, len, &record, err);
    if (!r)
        r = record_check_payload(&record, err);
    if (!r && !cache_kind_name(record.kind))
        r = error_set(err, EBADMSG, "unknown kind %u", record.kind);
    if (r < 0) {
        error_prefix(err, WHAT ": the item at byte %llu", (unsigned long long)at);
        return r;
    }
    r = rd->callback(rd->ctx, &record, bytes, len, err);
    return MIN(r, 0);
}

int bundle_read(int fd, uint64_t max_record,
                int (*callback)(void *ctx, const struct record *record, const void *bytes,
                                size_t len, struct error *err),
                void *ctx, struct error *err)
{
    _cleanup_(reader_done) struct reader rd = {
        .fd = fd, .max_record = max_record, .callback = callback, .ctx = ctx};
    uint8_t head[16], item[BUNDLE_ITEM];
    int r = read_all(fd, head, sizeof head, &rd.offset, err);

    if (r < 0)
        return r;
    if (memcmp(head, "EMBB", 4) || get_le(head + 6, 2))
        return error_set(err, EBADMSG, WHAT ": not a bundle (magic %02x%02x%02x%02x)", head[0],
                         head[1], head[2], head[3]);
    if (get_le(head + 4, 2) != BUNDLE_VERSION)
        return error_set(err, ESTALE, WHAT ": version %u, this build reads %d",
                         (unsigned)get_le(head + 4, 2), BUNDLE_VERSION);
    for (;;) {
        r = read_all(fd, item, sizeof item, &rd.offset, err);
        if (r < 0)
            return r;
        if (!memcmp(item, "EMBE", 4))
            return check_end(fd, item, &rd.sums, rd.offset, err);
        r = read_item(&rd, item, err);
        if (r < 0)
            return r;
    }
}

/* ---- Export and import ---- */

struct selection {
    bool (*filter)(void *ctx, const struct cache_entry *e);
    void *ctx;
    struct buffer keys; /* struct digest each */
};

static int select_entry(void *ctx, const struct store_entry *stored, const void *bytes, size_t len)
{
    struct selection *s = ctx;
    struct cache_entry entry;
    struct error reason;

    cache_entry_fill(&entry, stored, bytes, len, &reason);
    if (entry.state != CACHE_STATE_OK || (s->filter && !s->filter(s->ctx, &entry)))
        return 0;
    return buffer_append(&s->keys, &stored->key, sizeof stored->key);
}

static int select_all(struct cache *cache, struct selection *s, struct error *err)
{
    _cleanup_(store_read_endp) struct store_read *read = NULL;
    int r = store_read_begin(cache->store, &read, err);

    return r ? r : store_scan(read, select_entry, s, err);
}

/* A copy of one whole record: a slow reader of the bundle must not hold a snapshot open. */
static int copy_record(struct cache *cache, const struct digest *key, struct buffer *out,
                       struct error *err)
{
    _cleanup_(store_read_endp) struct store_read *read = NULL;
    const void *bytes;
    size_t len;
    int r = store_read_begin(cache->store, &read, err);

    if (!r)
        r = store_read_record(read, key, &bytes, &len, NULL, err);
    if (r)
        return r;
    if (cache_record_is_bad(key, bytes, len))
        return STORE_ABSENT;
    out->len = 0;
    if (buffer_append(out, bytes, len) < 0)
        return error_set(err, ENOMEM, WHAT ": no memory for %zu bytes", len);
    return 0;
}

int cache_export(struct cache *cache, int fd,
                 bool (*filter)(void *ctx, const struct cache_entry *e), void *ctx,
                 uint64_t *ret_count, struct error *err)
{
    struct selection selection = {filter, ctx};
    _cleanup_(buffer_free) struct buffer copy = {0};
    struct bundle_writer writer;
    int r = cache_check_process(cache, err);

    if (!r)
        r = select_all(cache, &selection, err);
    if (!r)
        r = bundle_begin(&writer, fd, wall_ns(), err);
    const struct digest *keys = (const struct digest *)selection.keys.data;
    for (size_t i = 0; !r && i < selection.keys.len / sizeof *keys; i++) {
        r = copy_record(cache, &keys[i], &copy, err);
        if (!r)
            r = bundle_item(&writer, copy.data, copy.len, err);
        else if (r == STORE_ABSENT) /* evicted or damaged meanwhile */
            r = 0;
    }
    buffer_free(&selection.keys);
    if (r < 0)
        return r;
    r = bundle_end(&writer, err);
    if (!r && ret_count)
        *ret_count = writer.count;
    return r;
}

struct import {
    struct cache *cache;
    struct cache_import_result *result;
};

static bool is_present(struct cache *cache, const struct digest *key)
{
    _cleanup_(store_read_endp) struct store_read *read = NULL;
    const void *bytes;
    size_t len;

    return !store_read_begin(cache->store, &read, NULL) &&
           !store_read_record(read, key, &bytes, &len, NULL, NULL) &&
           !cache_record_is_bad(key, bytes, len);
}

static int import_record(void *ctx, const struct record *record, const void *bytes, size_t len,
                         struct error *err)
{
    struct import *im = ctx;
    struct store_entry entry = {.key = record->key,
                                .kind = record->kind,
                                .subject = checksum_of(record->subject, record->subject_len),
                                .last_use_ns = wall_ns(),
                                .size = len};

    if (is_present(im->cache, &record->key)) {
        im->result->present++;
        return 0;
    }
    int r = store_put(im->cache->store, &entry, bytes, len, NULL, 0, err);
    if (r < 0) {
        COUNT(im->cache, put_errors);
        return r;
    }
    COUNT(im->cache, puts);
    im->result->imported++;
    im->result->bytes += len;
    return 0;
}

int cache_import(struct cache *cache, int fd, struct cache_import_result *ret, struct error *err)
{
    struct import im = {cache, ret};
    int r = cache_check_process(cache, err);

    *ret = (struct cache_import_result){0};
    if (r < 0)
        return r;
    if (cache->read_only)
        return error_set(err, EROFS, "%s: opened read-only", cache->dir);
    return bundle_read(fd, cache->limit / 2, import_record, &im, err);
}
