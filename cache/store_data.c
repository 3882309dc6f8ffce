/* SPDX-License-Identifier: Apache-2.0 */
/* Entries, records and the quarantine in LMDB. Format, locking and the rules for room: store.c. */
#include "cache/store_internal.h"

#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>

#include "cache/record.h"

#define ENTRY_BYTES 26
#define SUBJECT_KEY_BYTES 26
#define QUARANTINE_HEAD 16
#define QUARANTINE_KEEP (64 * KIB)
#define QUARANTINE_ENTRIES 32
#define ROOM_SHORT 1 /* of a write body: evict first */

/* ---- Entries ---- */

static void subject_key(uint8_t out[SUBJECT_KEY_BYTES], unsigned kind, uint64_t subject,
                        const struct digest *key)
{
    for (int i = 0; i < 2; i++)
        out[i] = (uint8_t)(kind >> (8 - 8 * i));
    for (int i = 0; i < 8; i++)
        out[2 + i] = (uint8_t)(subject >> (56 - 8 * i));
    memcpy(out + 10, key, sizeof *key);
}

static int entry_read(struct store *s, MDB_txn *txn, const struct digest *key,
                      struct store_entry *ret)
{
    MDB_val k = val_of(key, sizeof *key), v;
    int rc = mdb_get(txn, s->db[DB_ENTRIES], &k, &v);

    *ret = (struct store_entry){.key = *key};
    if (rc || v.mv_size != ENTRY_BYTES)
        return rc ? rc : MDB_CORRUPTED;
    ret->last_use_ns = get_le(v.mv_data, 8);
    ret->size = get_le((uint8_t *)v.mv_data + 8, 8);
    ret->subject = get_le((uint8_t *)v.mv_data + 16, 8);
    ret->kind = (unsigned)get_le((uint8_t *)v.mv_data + 24, 2);
    return 0;
}

static int entry_write(struct store *s, MDB_txn *txn, const struct store_entry *entry)
{
    uint8_t bytes[ENTRY_BYTES];
    MDB_val k = val_of(&entry->key, sizeof entry->key), v = val_of(bytes, sizeof bytes);

    put_le(bytes, 8, entry->last_use_ns);
    put_le(bytes + 8, 8, entry->size);
    put_le(bytes + 16, 8, entry->subject);
    put_le(bytes + 24, 2, entry->kind);
    return mdb_put(txn, s->db[DB_ENTRIES], &k, &v, 0);
}

static int del_if_there(MDB_txn *txn, MDB_dbi db, const void *key, size_t len)
{
    MDB_val k = val_of(key, len);
    int rc = mdb_del(txn, db, &k, NULL);

    return rc == MDB_NOTFOUND ? 0 : rc;
}

/* Removes a key from the three databases; MDB_NOTFOUND when it has no value. */
static int remove_key(struct store *s, MDB_txn *txn, const struct digest *key)
{
    uint8_t index[SUBJECT_KEY_BYTES];
    struct store_entry entry;
    MDB_val k = val_of(key, sizeof *key);
    int rc = entry_read(s, txn, key, &entry);

    if (!rc) {
        subject_key(index, entry.kind, entry.subject, key);
        rc = del_if_there(txn, s->db[DB_SUBJECTS], index, sizeof index);
        if (!rc)
            rc = del_if_there(txn, s->db[DB_ENTRIES], key, sizeof *key);
    } else if (rc == MDB_NOTFOUND)
        rc = 0;
    return rc ? rc : mdb_del(txn, s->db[DB_VALUES], &k, NULL);
}

/* Bytes of the pages that the databases use. */
static int live_bytes(struct store *s, MDB_txn *txn, uint64_t *ret)
{
    uint64_t pages = 0;

    for (int i = 0; i < DB_COUNT; i++) {
        MDB_stat stat;
        int rc = mdb_stat(txn, s->db[i], &stat);
        if (rc)
            return rc;
        pages += stat.ms_branch_pages + stat.ms_leaf_pages + stat.ms_overflow_pages;
    }
    *ret = pages * s->page;
    return 0;
}

/* ---- Reading ---- */

int store_read_begin(struct store *s, struct store_read **ret, struct error *err)
{
    MDB_txn *txn;
    int rc = store_txn_begin(s, MDB_RDONLY, &txn);

    if (rc)
        return store_fail(s, rc, "beginning to read", err);
    struct store_read *read = x_alloc(sizeof *read);
    read->store = s;
    read->txn = txn;
    *ret = read;
    return 0;
}

void store_read_end(struct store_read *read)
{
    if (!read)
        return;
    mdb_txn_abort(read->txn);
    store_txn_left(read->store);
    free(read);
}

int store_read_record(struct store_read *read, const struct digest *key, const void **ret_bytes,
                      size_t *ret_len, struct store_entry *ret_entry, struct error *err)
{
    struct store *s = read->store;
    MDB_val k = val_of(key, sizeof *key), v;
    int rc = mdb_get(read->txn, s->db[DB_VALUES], &k, &v);

    if (rc == MDB_NOTFOUND)
        return STORE_ABSENT;
    if (rc)
        return store_fail(s, rc, "reading a value", err);
    if (ret_entry)
        entry_read(s, read->txn, key, ret_entry); /* zeros will do when it is missing */
    *ret_bytes = v.mv_data;
    *ret_len = v.mv_size;
    return 0;
}

int store_scan(struct store_read *read, store_scan_fn *callback, void *ctx, struct error *err)
{
    struct store *s = read->store;
    _cleanup_cursor_ MDB_cursor *cursor = NULL;
    struct store_entry entry;
    MDB_val k, v;
    int r, rc = mdb_cursor_open(read->txn, s->db[DB_VALUES], &cursor);

    while (!rc && !(rc = mdb_cursor_get(cursor, &k, &v, MDB_NEXT))) {
        struct digest key;
        if (k.mv_size != sizeof key)
            continue;
        memcpy(&key, k.mv_data, sizeof key);
        entry_read(s, read->txn, &key, &entry);
        r = callback(ctx, &entry, v.mv_data, v.mv_size);
        if (r)
            return r;
    }
    return rc == MDB_NOTFOUND ? 0 : store_fail(s, rc, "listing values", err);
}

int store_scan_subject(struct store_read *read, unsigned kind, uint64_t subject,
                       store_scan_fn *callback, void *ctx, struct error *err)
{
    static const struct digest first;
    struct store *s = read->store;
    _cleanup_cursor_ MDB_cursor *cursor = NULL;
    uint8_t from[SUBJECT_KEY_BYTES];
    struct store_entry entry;
    MDB_val k = val_of(from, sizeof from), v;
    int rc = mdb_cursor_open(read->txn, s->db[DB_SUBJECTS], &cursor);

    subject_key(from, kind, subject, &first);
    if (!rc)
        rc = mdb_cursor_get(cursor, &k, &v, MDB_SET_RANGE);
    for (; !rc; rc = mdb_cursor_get(cursor, &k, &v, MDB_NEXT)) {
        const void *bytes;
        size_t len;
        struct digest key;
        if (k.mv_size != sizeof from || memcmp(k.mv_data, from, 10))
            return 0;
        memcpy(&key, (uint8_t *)k.mv_data + 10, sizeof key);
        int r = store_read_record(read, &key, &bytes, &len, &entry, err);
        if (!r)
            r = callback(ctx, &entry, bytes, len);
        if (r && r != STORE_ABSENT)
            return r;
    }
    return rc == MDB_NOTFOUND ? 0 : store_fail(s, rc, "searching by subject", err);
}

int store_scan_quarantine(struct store_read *read,
                          int (*callback)(void *ctx, const struct store_entry *entry,
                                          const char *reason, const void *bytes, size_t len),
                          void *ctx, struct error *err)
{
    struct store *s = read->store;
    _cleanup_cursor_ MDB_cursor *cursor = NULL;
    MDB_val k, v;
    int rc = mdb_cursor_open(read->txn, s->db[DB_QUARANTINE], &cursor);

    while (!rc && !(rc = mdb_cursor_get(cursor, &k, &v, MDB_NEXT))) {
        const uint8_t *p = v.mv_data;
        char reason[ERROR_TEXT_MAX];
        if (k.mv_size != 24 || v.mv_size < QUARANTINE_HEAD || memcmp(p, "EMBQ", 4))
            continue;
        size_t reason_len = get_le(p + 6, 2);
        if (reason_len >= sizeof reason || reason_len > v.mv_size - QUARANTINE_HEAD)
            continue;
        struct store_entry entry = {.kind = (unsigned)get_le(p + 4, 2), .size = get_le(p + 8, 8)};
        for (int i = 0; i < 8; i++)
            entry.last_use_ns = entry.last_use_ns << 8 | ((uint8_t *)k.mv_data)[i];
        memcpy(&entry.key, (uint8_t *)k.mv_data + 8, sizeof entry.key);
        memcpy(reason, p + QUARANTINE_HEAD, reason_len);
        reason[reason_len] = 0;
        int r = callback(ctx, &entry, reason, p + QUARANTINE_HEAD + reason_len,
                         v.mv_size - QUARANTINE_HEAD - reason_len);
        if (r)
            return r;
    }
    return rc == MDB_NOTFOUND ? 0 : store_fail(s, rc, "listing the quarantine", err);
}

/* ---- Writing ---- */

struct trim {
    uint64_t max_bytes; /* of entries' records; used when max_live is 0 */
    uint64_t max_live;  /* of pages; 0: not by pages */
    uint64_t min_free;  /* remove at least so many bytes of pages */
    uint64_t older_than_ns;
    bool drop_quarantine;
    uint64_t removed, bytes;
};

static int by_last_use(const void *a, const void *b)
{
    const struct store_entry *x = a, *y = b;

    return x->last_use_ns < y->last_use_ns ? -1 : x->last_use_ns > y->last_use_ns;
}

static int list_entries(struct store *s, MDB_txn *txn, struct store_entry **ret, size_t *ret_n)
{
    _cleanup_cursor_ MDB_cursor *cursor = NULL;
    MDB_stat stat;
    MDB_val k, v;
    size_t n = 0;
    int rc = mdb_stat(txn, s->db[DB_ENTRIES], &stat);

    if (rc)
        return rc;
    _cleanup_free_ struct store_entry *list = mem_alloc(stat.ms_entries, sizeof *list);
    if (!list)
        return ENOMEM;
    rc = mdb_cursor_open(txn, s->db[DB_ENTRIES], &cursor);
    while (!rc && !(rc = mdb_cursor_get(cursor, &k, &v, MDB_NEXT)) && n < stat.ms_entries) {
        struct digest key;
        if (k.mv_size != sizeof key)
            continue;
        memcpy(&key, k.mv_data, sizeof key);
        rc = entry_read(s, txn, &key, &list[n++]);
    }
    if (rc && rc != MDB_NOTFOUND)
        return rc;
    qsort(list, n, sizeof *list, by_last_use);
    *ret = TAKE(list);
    *ret_n = n;
    return 0;
}

/* What removing an entry gives back, in bytes of pages. */
static uint64_t page_bytes(struct store *s, uint64_t size)
{
    return size > s->page / 2 - 64 ? size_align(size + 16, s->page) : size;
}

static int trim_body(struct store *s, MDB_txn *txn, void *ctx)
{
    struct trim *t = ctx;
    _cleanup_free_ struct store_entry *list = NULL;
    size_t n = 0;
    uint64_t live, total = 0, freed = 0;
    int rc = list_entries(s, txn, &list, &n);

    if (!rc)
        rc = live_bytes(s, txn, &live);
    if (!rc && t->drop_quarantine)
        rc = mdb_drop(txn, s->db[DB_QUARANTINE], 0);
    if (rc)
        return rc;
    t->removed = t->bytes = 0;
    for (size_t i = 0; i < n; i++)
        total += list[i].size;
    for (size_t i = 0; i < n; i++) {
        bool big = t->max_live ? live > t->max_live : total > t->max_bytes;
        if (!big && freed >= t->min_free && list[i].last_use_ns >= t->older_than_ns)
            break;
        rc = remove_key(s, txn, &list[i].key);
        if (rc && rc != MDB_NOTFOUND)
            return rc;
        uint64_t pages = page_bytes(s, list[i].size);
        live -= MIN(live, pages);
        freed += pages;
        total -= list[i].size;
        t->removed++;
        t->bytes += list[i].size;
    }
    return 0;
}

/* Deleting copies pages first: it may go so far beyond the limit. */
static uint64_t trim_headroom(struct store *s)
{
    return MAX(s->options.limit / 8, MIB);
}

static int trim(struct store *s, struct trim *t)
{
    return store_update(s, trim_body, t, trim_headroom(s));
}

/* Any change: LMDB uses a page again in the second transaction after the one that freed it. */
static int tick_body(struct store *s, MDB_txn *txn, void *unused)
{
    return store_format_write(s, txn);
}

int store_trim(struct store *s, uint64_t max_bytes, uint64_t older_than_ns, bool drop_quarantine,
               uint64_t *ret_removed, uint64_t *ret_bytes, struct error *err)
{
    struct trim t = {
        .max_bytes = max_bytes, .older_than_ns = older_than_ns, .drop_quarantine = drop_quarantine};
    int rc = trim(s, &t);

    if (rc)
        return store_fail(s, rc, "removing old entries", err);
    store_update(s, tick_body, NULL, trim_headroom(s)); /* only speeds up the reuse */
    *ret_removed = t.removed;
    *ret_bytes = t.bytes;
    return 0;
}

struct put {
    const struct store_entry *entry;
    const void *head, *payload;
    size_t head_len, payload_len;
    uint64_t need;
};

static int put_body(struct store *s, MDB_txn *txn, void *ctx)
{
    struct put *p = ctx;
    uint8_t index[SUBJECT_KEY_BYTES];
    uint64_t live;
    MDB_val k = val_of(&p->entry->key, sizeof p->entry->key), v;
    int rc = remove_key(s, txn, &p->entry->key);

    if (!rc || rc == MDB_NOTFOUND)
        rc = live_bytes(s, txn, &live);
    if (rc)
        return rc;
    if (live + p->need > s->options.limit / 8 * 7)
        return ROOM_SHORT;
    v = val_of(NULL, p->head_len + p->payload_len);
    rc = mdb_put(txn, s->db[DB_VALUES], &k, &v, MDB_RESERVE);
    if (rc)
        return rc;
    memcpy(v.mv_data, p->head, p->head_len);
    if (p->payload_len)
        memcpy((uint8_t *)v.mv_data + p->head_len, p->payload, p->payload_len);
    rc = entry_write(s, txn, p->entry);
    subject_key(index, p->entry->kind, p->entry->subject, &p->entry->key);
    k = val_of(index, sizeof index);
    v = val_of("", 0);
    return rc ? rc : mdb_put(txn, s->db[DB_SUBJECTS], &k, &v, 0);
}

/* Evicts for a value of `need` bytes of pages; more in each round. */
static int make_room(struct store *s, uint64_t need, unsigned round)
{
    uint64_t target = s->options.limit / 4 * 3;
    struct trim t = {.max_live = target > need ? target - need : 1};
    if (round)
        t.min_free = need << MIN(round, 8u);
    int rc = trim(s, &t);

    if (rc)
        return rc;
    atomic_fetch_add(&s->evicted, t.removed);
    if (!t.removed) /* in round 0 there may be pages enough, but not in one run */
        return round ? MDB_MAP_FULL : 0;
    rc = store_update(s, tick_body, NULL, trim_headroom(s));
    return rc == MDB_MAP_FULL ? 0 : rc;
}

int store_put(struct store *s, const struct store_entry *entry, const void *head, size_t head_len,
              const void *payload, size_t payload_len, struct error *err)
{
    uint64_t size = entry->size;
    struct put p = {entry,    head,        payload,
                    head_len, payload_len, size_align(size + 16, s->page) + 4 * s->page};

    if (size > s->options.limit / 2 || p.need > s->options.limit / 4 * 3)
        return error_set(err, EFBIG, "%s: a value of %llu bytes, the cache is limited to %llu",
                         s->path, (unsigned long long)size, (unsigned long long)s->options.limit);
    for (unsigned round = 0;; round++) {
        int rc = store_update(s, put_body, &p, 0);
        if (rc == ROOM_SHORT || rc == MDB_MAP_FULL) {
            int r = round < 12 ? make_room(s, p.need, round) : MDB_MAP_FULL;
            if (!r)
                continue;
            if (r != MDB_MAP_FULL)
                return store_fail(s, r, "evicting old entries", err);
            return error_set(err, ENOSPC,
                             "%s: full (limit %llu bytes) and nothing more can be evicted", s->path,
                             (unsigned long long)s->options.limit);
        }
        return rc ? store_fail(s, rc, "storing a value", err) : 0;
    }
}

static int delete_body(struct store *s, MDB_txn *txn, void *ctx)
{
    return remove_key(s, txn, ctx);
}

int store_delete(struct store *s, const struct digest *key, struct error *err)
{
    int rc = store_update(s, delete_body, (void *)key, MIB);

    if (rc == MDB_NOTFOUND)
        return STORE_ABSENT;
    return rc ? store_fail(s, rc, "removing an entry", err) : 0;
}

struct touch {
    const struct digest *keys;
    size_t n;
    uint64_t now_ns;
};

static int touch_body(struct store *s, MDB_txn *txn, void *ctx)
{
    const struct touch *t = ctx;
    struct store_entry entry;

    for (size_t i = 0; i < t->n; i++) {
        int rc = entry_read(s, txn, &t->keys[i], &entry);
        if (rc == MDB_NOTFOUND)
            continue;
        entry.last_use_ns = t->now_ns;
        if (!rc)
            rc = entry_write(s, txn, &entry);
        if (rc)
            return rc;
    }
    return 0;
}

int store_touch(struct store *s, const struct digest *keys, size_t n, uint64_t now_ns,
                struct error *err)
{
    struct touch t = {keys, n, now_ns};
    int rc = store_update(s, touch_body, &t, 0);

    return rc ? store_fail(s, rc, "noting the last use", err) : 0;
}

/* ---- Quarantine ---- */

struct quarantine {
    const struct digest *key;
    const char *reason;
    bool (*still_bad)(const struct digest *key, const void *bytes, size_t len);
};

/* Keeps the newest QUARANTINE_ENTRIES - 1. */
static int quarantine_shorten(struct store *s, MDB_txn *txn)
{
    MDB_stat stat;
    int rc = mdb_stat(txn, s->db[DB_QUARANTINE], &stat);

    for (size_t n = rc ? 0 : stat.ms_entries; !rc && n >= QUARANTINE_ENTRIES; n--) {
        _cleanup_cursor_ MDB_cursor *cursor = NULL;
        MDB_val k, v;
        rc = mdb_cursor_open(txn, s->db[DB_QUARANTINE], &cursor);
        if (!rc)
            rc = mdb_cursor_get(cursor, &k, &v, MDB_FIRST);
        if (!rc)
            rc = mdb_cursor_del(cursor, 0);
    }
    return rc;
}

static int quarantine_body(struct store *s, MDB_txn *txn, void *ctx)
{
    const struct quarantine *q = ctx;
    _cleanup_free_ uint8_t *bytes = NULL;
    struct store_entry entry;
    struct timespec now;
    uint8_t key[24];
    MDB_val k = val_of(q->key, sizeof *q->key), v;
    int rc = mdb_get(txn, s->db[DB_VALUES], &k, &v);

    if (rc)
        return rc;
    if (!q->still_bad(q->key, v.mv_data, v.mv_size))
        return MDB_NOTFOUND;
    entry_read(s, txn, q->key, &entry);
    size_t reason_len = MIN(strlen(q->reason), ERROR_TEXT_MAX - 1);
    size_t keep = MIN(v.mv_size, MIN(QUARANTINE_KEEP, s->options.limit / 256));
    size_t len = QUARANTINE_HEAD + reason_len + keep;
    bytes = mem_alloc(len, 1);
    if (!bytes)
        return ENOMEM;
    memcpy(bytes, "EMBQ", 4);
    put_le(bytes + 4, 2, entry.kind);
    put_le(bytes + 6, 2, reason_len);
    put_le(bytes + 8, 8, v.mv_size);
    memcpy(bytes + QUARANTINE_HEAD, q->reason, reason_len);
    memcpy(bytes + QUARANTINE_HEAD + reason_len, v.mv_data, keep);
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    for (int i = 0; i < 8; i++)
        key[i] = (uint8_t)(ns >> (56 - 8 * i));
    memcpy(key + 8, q->key, sizeof *q->key);
    rc = remove_key(s, txn, q->key);
    if (!rc)
        rc = quarantine_shorten(s, txn);
    k = val_of(key, sizeof key);
    v = val_of(bytes, len);
    return rc ? rc : mdb_put(txn, s->db[DB_QUARANTINE], &k, &v, 0);
}

int store_quarantine(struct store *s, const struct digest *key, const char *reason,
                     bool (*still_bad)(const struct digest *key, const void *bytes, size_t len),
                     struct error *err)
{
    struct quarantine q = {key, reason, still_bad};
    int rc = store_update(s, quarantine_body, &q, MIB);

    if (rc == MDB_NOTFOUND)
        return STORE_ABSENT;
    return rc ? store_fail(s, rc, "moving a damaged value to quarantine", err) : 0;
}

/* ---- Figures ---- */

int store_info(struct store *s, struct store_info *ret, struct error *err)
{
    struct store_info info = {.grown = atomic_load(&s->grown), .evicted = atomic_load(&s->evicted)};
    MDB_stat values, quarantine;
    MDB_envinfo env;
    MDB_txn *txn;
    struct stat st;
    int rc = store_txn_begin(s, MDB_RDONLY, &txn);

    if (rc)
        return store_fail(s, rc, "reading its figures", err);
    rc = mdb_stat(txn, s->db[DB_VALUES], &values);
    if (!rc)
        rc = mdb_stat(txn, s->db[DB_QUARANTINE], &quarantine);
    if (!rc)
        rc = live_bytes(s, txn, &info.live_bytes);
    if (!rc)
        rc = mdb_env_info(s->env, &env);
    mdb_txn_abort(txn);
    store_txn_left(s);
    if (rc)
        return store_fail(s, rc, "reading its figures", err);
    info.entries = values.ms_entries;
    info.map_bytes = env.me_mapsize;
    info.quarantined = quarantine.ms_entries;
    info.quarantined_bytes = s->page * (quarantine.ms_branch_pages + quarantine.ms_leaf_pages +
                                        quarantine.ms_overflow_pages);
    info.file_bytes = stat(s->path, &st) < 0 ? 0 : (uint64_t)st.st_size;
    *ret = info;
    return 0;
}
