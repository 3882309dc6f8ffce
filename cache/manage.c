/* SPDX-License-Identifier: Apache-2.0 */
/* Looking into the cache and keeping it tidy: what `emberctl cache` shows and does. */
#include <errno.h>
#include <stdio.h>

#include "cache/internal.h"

void cache_entry_fill(struct cache_entry *entry, const struct store_entry *stored,
                      const void *bytes, size_t len, struct error *reason_buf)
{
    struct record record;

    *entry = (struct cache_entry){.key = stored->key,
                                  .kind = stored->kind,
                                  .stored_bytes = len,
                                  .last_use_ns = stored->last_use_ns};
    if (record_parse(bytes, len, &record, reason_buf) < 0) {
        entry->state = CACHE_STATE_DAMAGED;
        entry->reason = reason_buf->text;
        return;
    }
    entry->kind = record.kind;
    memcpy(entry->subject, record.subject, record.subject_len);
    entry->bytes = record.payload_len;
    entry->created_ns = record.created_ns;
    entry->factors = record.factors;
    entry->factors_len = record.factors_len;
}

struct iteration {
    int (*callback)(void *ctx, const struct cache_entry *entry);
    void *ctx;
};

static int iterate_value(void *ctx, const struct store_entry *stored, const void *bytes, size_t len)
{
    struct iteration *it = ctx;
    struct cache_entry entry;
    struct error reason;

    cache_entry_fill(&entry, stored, bytes, len, &reason);
    return it->callback(it->ctx, &entry);
}

static int iterate_quarantined(void *ctx, const struct store_entry *stored, const char *reason,
                               const void *bytes, size_t len)
{
    struct iteration *it = ctx;
    struct cache_entry entry = {.key = stored->key,
                                .kind = stored->kind,
                                .state = CACHE_STATE_QUARANTINED,
                                .reason = reason,
                                .stored_bytes = stored->size,
                                .last_use_ns = stored->last_use_ns};

    return it->callback(it->ctx, &entry);
}

int cache_iterate(struct cache *cache, int (*callback)(void *ctx, const struct cache_entry *entry),
                  void *ctx, struct error *err)
{
    _cleanup_(store_read_endp) struct store_read *read = NULL;
    struct iteration it = {callback, ctx};
    int r = cache_check_process(cache, err);

    if (!r)
        r = store_read_begin(cache->store, &read, err);
    if (!r)
        r = store_scan(read, iterate_value, &it, err);
    if (!r)
        r = store_scan_quarantine(read, iterate_quarantined, &it, err);
    return r;
}

/* ---- Verifying ---- */

struct verification {
    struct cache_verify_result result;
    struct buffer bad; /* struct digest each */
};

static int verify_value(void *ctx, const struct store_entry *stored, const void *bytes, size_t len)
{
    struct verification *v = ctx;
    struct record record;
    bool bad = record_parse(bytes, len, &record, NULL) < 0 ||
               record_check_payload(&record, NULL) < 0 || !digest_equal(&record.key, &stored->key);

    v->result.checked++;
    v->result.bytes += len;
    v->result.damaged += bad;
    return bad ? buffer_append(&v->bad, &stored->key, sizeof stored->key) : 0;
}

/* Why a stored record is bad, in *err; 0 when it is good or gone by now. */
static int diagnose(struct cache *cache, const struct digest *key, struct error *err)
{
    _cleanup_(store_read_endp) struct store_read *read = NULL;
    struct record record;
    const void *bytes;
    size_t len;
    int r = store_read_begin(cache->store, &read, err);

    if (!r)
        r = store_read_record(read, key, &bytes, &len, NULL, err);
    if (r)
        return 0;
    r = record_parse(bytes, len, &record, err);
    if (!r)
        r = record_check_payload(&record, err);
    if (!r && !digest_equal(&record.key, key))
        r = error_set(err, EBADMSG, "the value of another key is stored there");
    return r;
}

int cache_verify(struct cache *cache, struct cache_verify_result *ret, struct error *err)
{
    struct verification v = {0};
    struct store_read *read = NULL;
    int r = cache_check_process(cache, err);

    if (!r)
        r = store_read_begin(cache->store, &read, err);
    if (r < 0)
        return r;
    r = store_scan(read, verify_value, &v, err);
    store_read_end(read);
    const struct digest *bad = (const struct digest *)v.bad.data;
    for (size_t i = 0; !r && i < v.bad.len / sizeof *bad; i++) {
        struct error why = {0};
        char hex[DIGEST_HEX_SIZE];
        if (diagnose(cache, &bad[i], &why) < 0)
            cache_quarantine(cache, &bad[i], digest_hex(&bad[i], hex), why.text, NULL);
    }
    buffer_free(&v.bad);
    if (r == -ENOMEM)
        error_set(err, ENOMEM, "no memory for the list of damaged values");
    if (!r)
        *ret = v.result;
    return r;
}

/* ---- Collecting ---- */

int cache_gc(struct cache *cache, uint64_t max_bytes, uint64_t max_age_s,
             struct cache_gc_result *ret, struct error *err)
{
    uint64_t now = wall_ns(), age_ns, removed, removed_bytes;
    int r = cache_check_process(cache, err);

    if (r < 0)
        return r;
    if (cache->read_only)
        return error_set(err, EROFS, "%s: opened read-only", cache->dir);
    if (!size_mul(max_age_s, 1000000000u, &age_ns) || age_ns > now)
        age_ns = now;
    r = store_trim(cache->store, max_bytes, max_age_s ? now - age_ns : 0, true, &removed,
                   &removed_bytes, err);
    struct store_info info;
    if (!r)
        r = store_info(cache->store, &info, err);
    if (r < 0)
        return r;
    *ret = (struct cache_gc_result){removed, removed_bytes, info.entries, info.live_bytes};
    return 0;
}

int cache_stats(struct cache *cache, struct cache_stats *ret, struct error *err)
{
    struct store_info info;
    int r = cache_check_process(cache, err);

    if (!r)
        r = store_info(cache->store, &info, err);
    if (r < 0)
        return r;
    *ret = (struct cache_stats){
#define X(id, name) .id = atomic_load(&cache->counters.id),
        CACHE_COUNTERS(X)
#undef X
            .entries = info.entries,
        .live_bytes = info.live_bytes,
        .map_bytes = info.map_bytes,
        .map_limit = cache->limit,
        .file_bytes = info.file_bytes,
        .quarantined = info.quarantined,
        .quarantined_bytes = info.quarantined_bytes};
    ret->evicted = info.evicted;
    ret->grown = info.grown;
    return 0;
}
