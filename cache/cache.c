/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening, reading, storing, building. Reads never write: last uses and damage are noted in the
 * struct cache and written with the next put, or when the cache is closed.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/fd.h"
#include "cache/flight.h"
#include "cache/internal.h"
#include "cache/lockfile.h"

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static struct cache *registry;

/* ---- Opening ---- */

/* f_type as in statfs(2) and linux/magic.h */
static const struct {
    uint32_t type;
    const char *name;
} network_types[] = {
    {0x6969, "NFS"},       {0xff534d42, "CIFS"},   {0xfe534d42, "SMB2"},   {0x517b, "SMB"},
    {0x65735546, "FUSE"},  {0x0bd00bd0, "Lustre"}, {0x00c36400, "Ceph"},   {0x47504653, "GPFS"},
    {0x01021997, "9p"},    {0x5346414f, "AFS"},    {0x6b414653, "kAFS"},   {0x7461636f, "OCFS2"},
    {0x01161970, "GFS2"},  {0x19830326, "BeeGFS"}, {0x786f4256, "vboxsf"}, {0x73757245, "Coda"},
    {0xaad7aaea, "PanFS"}, {0xbacbacbc, "vmhgfs"}, {0x013111a8, "IBRIX"},  {0x61756673, "aufs"},
    {0x564c, "NCP"},
};

static const char *network_name(const char *dir)
{
    struct statfs fs;

    if (statfs(dir, &fs) < 0)
        return NULL;
    for (size_t i = 0; i < ARRAY_LEN(network_types); i++)
        if (network_types[i].type == (uint32_t)fs.f_type)
            return network_types[i].name;
    return NULL;
}

static int make_directory(const char *dir, struct error *err)
{
    _cleanup_free_ char *path = x_strdup(dir);

    for (char *slash = path + 1; *path; slash++) {
        bool last = !*slash;
        if (*slash != '/' && !last)
            continue;
        *slash = 0;
        if (mkdir(path, 0700) < 0 && errno != EEXIST)
            return error_sys(err, errno, "%s: cannot make the cache's directory", path);
        if (last)
            break;
        *slash = '/';
    }
    return 0;
}

/* The cache holds code that we run: nobody else may write into it. */
static int check_directory(struct cache *cache, struct error *err)
{
    struct stat st;

    if (stat(cache->dir, &st) < 0)
        return error_sys(err, errno, "%s", cache->dir);
    if (!S_ISDIR(st.st_mode))
        return error_set(err, ENOTDIR, "%s: not a directory", cache->dir);
    if ((st.st_mode & 022) || (st.st_uid != geteuid() && st.st_uid != 0))
        return error_set(err, EPERM,
                         "%s: mode %o, owner %u: others could put code there; chmod go-w it or "
                         "choose another cache directory",
                         cache->dir, (unsigned)st.st_mode & 07777, (unsigned)st.st_uid);
    cache->dev = st.st_dev;
    cache->ino = st.st_ino;
    return 0;
}

static struct cache *registry_find(uint64_t dev, uint64_t ino)
{
    pid_t pid = getpid();

    for (struct cache *c = registry; c; c = c->next)
        if (c->dev == dev && c->ino == ino && c->pid == pid)
            return c;
    return NULL;
}

static int registry_add(struct cache *cache, struct error *err)
{
    int r = 0;

    pthread_mutex_lock(&registry_lock);
    if (registry_find(cache->dev, cache->ino))
        r = error_set(err, EBUSY, "%s: open in this process already", cache->dir);
    else {
        cache->next = registry;
        registry = cache;
    }
    pthread_mutex_unlock(&registry_lock);
    return r;
}

static void registry_remove(struct cache *cache)
{
    pthread_mutex_lock(&registry_lock);
    for (struct cache **at = &registry; *at; at = &(*at)->next)
        if (*at == cache) {
            *at = cache->next;
            break;
        }
    pthread_mutex_unlock(&registry_lock);
}

static void note_warnings(struct cache *cache, const char *aside)
{
    const char *network = network_name(cache->dir);
    struct buffer text = {0};

    if (network) {
        cache->warnings |= CACHE_WARN_NETWORK;
        buffer_printf(&text,
                      "%s is on %s: several hosts must not share it, and builds may stall there; "
                      "use a local directory",
                      cache->dir, network);
    }
    if (aside) {
        cache->warnings |= CACHE_WARN_ASIDE;
        buffer_printf(&text, "%s%s/" STORE_FILE " was moved to " STORE_FILE ".old: %s",
                      text.len ? "; " : "", cache->dir, aside);
    }
    cache->warning_text = text.data;
}

static void cache_free(struct cache *cache)
{
    flights_free(cache->flights);
    store_close(cache->store);
    registry_remove(cache);
    fd_close(cache->lock_fd);
    pthread_mutex_destroy(&cache->lock);
    free(cache->warning_text);
    free(cache->dir);
    free(cache);
}
DEFINE_CLEANUP(struct cache *, cache_free)

int cache_open(const char *dir, const struct cache_options *options, struct cache **ret,
               struct error *err)
{
    struct cache_options o = options ? *options : (struct cache_options){0};
    _cleanup_(cache_freep) struct cache *cache = x_alloc(sizeof *cache);
    const char *aside;

    cache->dir = x_strdup(dir);
    cache->lock_fd = -1;
    cache->pid = getpid();
    cache->read_only = o.read_only;
    cache->limit = o.limit ? o.limit : GIB;
    cache->use_ns = (uint64_t)(o.use_ms < 0 ? 0 : o.use_ms ? o.use_ms : 3600000) * 1000000;
    pthread_mutex_init(&cache->lock, NULL);
    int r = o.read_only ? 0 : make_directory(dir, err);
    if (!r)
        r = check_directory(cache, err);
    if (!r)
        r = registry_add(cache, err);
    if (!r)
        r = lockfile_open(dir, o.read_only, &cache->lock_fd, err);
    if (r < 0)
        return r;
    struct store_options store = {.limit = cache->limit,
                                  .initial = o.initial ? o.initial : 64 * MIB,
                                  .read_only = o.read_only,
                                  .lock_fd = cache->lock_fd};
    r = store_open(dir, &store, &cache->store, &aside, err);
    if (r < 0)
        return r;
    note_warnings(cache, aside);
    cache->flights = flights_new(dir, cache->lock_fd);
    *ret = TAKE(cache);
    return 0;
}

/* Writes the noted uses; a failure only makes eviction less exact. */
static void flush_uses(struct cache *cache)
{
    struct digest keys[CACHE_PENDING];

    pthread_mutex_lock(&cache->lock);
    size_t n = cache->n_pending;
    memcpy(keys, cache->pending, n * sizeof *keys);
    cache->n_pending = 0;
    pthread_mutex_unlock(&cache->lock);
    if (n && !cache->read_only)
        store_touch(cache->store, keys, n, wall_ns(), NULL);
}

void cache_close(struct cache *cache)
{
    if (!cache)
        return;
    if (cache->pid == getpid())
        flush_uses(cache);
    cache_free(cache);
}

unsigned cache_warnings(const struct cache *cache, const char **ret_text)
{
    if (ret_text)
        *ret_text = cache->warning_text ? cache->warning_text : "";
    return cache->warnings;
}

int cache_set_aside(const char *dir, struct error *err)
{
    _cleanup_fd_ int fd = -1;
    struct stat st;

    if (stat(dir, &st) < 0)
        return error_sys(err, errno, "%s", dir);
    pthread_mutex_lock(&registry_lock);
    bool open_here = registry_find(st.st_dev, st.st_ino);
    pthread_mutex_unlock(&registry_lock);
    if (open_here)
        return error_set(err, EBUSY, "%s: open in this process", dir);
    int r = lockfile_open(dir, false, &fd, err);
    if (r < 0)
        return r;
    r = lockfile_lock(fd, LOCKFILE_OPEN_BYTE, 10000);
    if (r < 0)
        return error_sys(err, -r, "%s: another process is opening it", dir);
    return store_set_aside(dir, err); /* the lock goes with the descriptor */
}

int cache_check_process(const struct cache *cache, struct error *err)
{
    if (cache->pid != getpid())
        return error_set(err, ECHILD, "%s: was opened before a fork", cache->dir);
    return 0;
}

/* ---- Reading ---- */

void cache_value_free(struct cache_value *value)
{
    free(value->data);
    *value = (struct cache_value){0};
}

bool cache_record_is_bad(const struct digest *key, const void *bytes, size_t len)
{
    struct record record;

    return record_parse(bytes, len, &record, NULL) < 0 || !digest_equal(&record.key, key) ||
           record_check_payload(&record, NULL) < 0;
}

static bool known_damaged(struct cache *cache, const struct digest *key)
{
    for (size_t i = 0; i < MIN(cache->n_damaged, CACHE_DAMAGED); i++)
        if (digest_equal(&cache->damaged[i], key))
            return true;
    return false;
}

static bool was_damaged(struct cache *cache, const struct digest *key)
{
    pthread_mutex_lock(&cache->lock);
    bool known = known_damaged(cache, key);
    pthread_mutex_unlock(&cache->lock);
    return known;
}

/* Remembers the key; true when it was known before. */
static bool note_damaged(struct cache *cache, const struct digest *key)
{
    pthread_mutex_lock(&cache->lock);
    bool known = known_damaged(cache, key);
    if (!known)
        cache->damaged[cache->n_damaged++ % CACHE_DAMAGED] = *key;
    pthread_mutex_unlock(&cache->lock);
    return known;
}

int cache_quarantine(struct cache *cache, const struct digest *key, const char *label,
                     const char *reason, struct error *err)
{
    bool again = note_damaged(cache, key);
    struct error why = {0};

    if (again)
        COUNT(cache, miss_damaged_again);
    else
        COUNT(cache, miss_damaged);
    int r = cache->read_only
                ? -EROFS
                : store_quarantine(cache->store, key, reason, cache_record_is_bad, &why);
    error_set(err, EBADMSG, "%s: stored value damaged%s: %s; %s%s", label,
              again ? " again (is the storage failing?)" : "", reason,
              r >= 0 ? "moved to quarantine" : "left in place",
              r >= 0 || cache->read_only ? "" : why.text);
    return again ? CACHE_MISS_DAMAGED_AGAIN : CACHE_MISS_DAMAGED;
}

/* Notes a use when the stored note is old enough. */
static void note_use(struct cache *cache, const struct store_entry *entry)
{
    if (cache->read_only || wall_ns() - entry->last_use_ns < cache->use_ns)
        return;
    pthread_mutex_lock(&cache->lock);
    for (size_t i = 0; i < cache->n_pending; i++)
        if (digest_equal(&cache->pending[i], &entry->key)) {
            pthread_mutex_unlock(&cache->lock);
            return;
        }
    if (cache->n_pending < CACHE_PENDING)
        cache->pending[cache->n_pending++] = entry->key;
    pthread_mutex_unlock(&cache->lock);
}

struct cache_read {
    struct cache *cache;
    struct store_read *read;
    void **copies;
    size_t n_copies;
    struct {
        struct digest key;
        struct error why;
        char label[RECORD_LABEL_MAX];
    } bad; /* the last damaged one, quarantined at the end */
    bool have_bad;
};

static int check_key(const struct cache_key *key, struct error *err)
{
    if (key->broken)
        return error_set(err, EINVAL, "cache key of '%s': %s", key->subject, key->broken);
    return 0;
}

/* The pages of a large value at once: one call instead of a fault for each few of them. */
static void map_payload(const struct record *record)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE),
              from = (uintptr_t)record->payload & ~(page - 1);

    if (record->payload_len >= MIB)
        madvise((void *)from, (uintptr_t)record->payload + record->payload_len - from,
                MADV_POPULATE_READ); /* older kernels refuse: then they fault */
}

/* 0 with *ret_record whole, a miss, -EBADMSG (damaged, *err says how), or another error. */
static int lookup(struct cache *cache, struct store_read *read, const struct cache_key *key,
                  struct record *ret_record, struct error *err)
{
    struct store_entry entry;
    const void *bytes;
    size_t len;
    int r = store_read_record(read, &key->digest, &bytes, &len, &entry, err);

    if (r == STORE_ABSENT)
        return CACHE_MISS;
    if (r < 0) {
        COUNT(cache, miss_error);
        return r == -EBADMSG ? -EIO : r; /* the tree's damage, not the value's */
    }
    r = record_parse(bytes, len, ret_record, err);
    if (!r)
        map_payload(ret_record);
    if (!r)
        r = record_check_payload(ret_record, err);
    if (!r && !digest_equal(&ret_record->key, &key->digest))
        r = error_set(err, EBADMSG, "the value of another key is stored there");
    if (r < 0)
        return r;
    COUNT(cache, hits);
    note_use(cache, &entry);
    return 0;
}

static int get(struct cache *cache, const struct cache_key *key, struct cache_value *ret_value,
               struct error *err)
{
    _cleanup_(store_read_endp) struct store_read *read = NULL;
    char label[RECORD_LABEL_MAX];
    struct record record;
    struct error why = {0};
    int r = cache_check_process(cache, err);

    if (!r)
        r = check_key(key, err);
    if (r < 0)
        return r;
    r = store_read_begin(cache->store, &read, err);
    if (r < 0) {
        COUNT(cache, miss_error);
        return r;
    }
    r = lookup(cache, read, key, &record, &why);
    if (r == -EBADMSG) {
        store_read_end(TAKE(read));
        record_label(key->kind, key->subject, strlen(key->subject), label);
        return cache_quarantine(cache, &key->digest, label, why.text, err);
    }
    if (r) {
        if (r < 0 && err)
            *err = why;
        return r;
    }
    void *copy = mem_alloc(record.payload_len, 1);
    if (!copy)
        return error_set(err, ENOMEM, "%s: no memory for %zu bytes", key->subject,
                         record.payload_len);
    memcpy(copy, record.payload, record.payload_len);
    *ret_value = (struct cache_value){copy, record.payload_len};
    return 0;
}

int cache_get(struct cache *cache, const struct cache_key *key, struct cache_value *ret_value,
              struct error *err)
{
    int r = get(cache, key, ret_value, err);

    if (r == CACHE_MISS)
        COUNT(cache, miss_absent);
    return r;
}

int cache_read_begin(struct cache *cache, struct cache_read **ret, struct error *err)
{
    struct store_read *store_read;
    int r = cache_check_process(cache, err);

    if (!r)
        r = store_read_begin(cache->store, &store_read, err);
    if (r < 0)
        return r;
    struct cache_read *read = x_alloc(sizeof *read);
    read->cache = cache;
    read->read = store_read;
    *ret = read;
    return 0;
}

/* Small values share pages and lie anywhere in them. */
static int align_payload(struct cache_read *read, const struct record *record, const void **ret,
                         struct error *err)
{
    if ((uintptr_t)record->payload % RECORD_ALIGN == 0) {
        *ret = record->payload;
        return 0;
    }
    void **copies = realloc(read->copies, (read->n_copies + 1) * sizeof *copies);
    if (copies)
        read->copies = copies;
    void *copy = copies ? mem_alloc(record->payload_len, 1) : NULL;
    if (!copy)
        return error_set(err, ENOMEM, "no memory for %zu bytes", record->payload_len);
    memcpy(copy, record->payload, record->payload_len);
    *ret = read->copies[read->n_copies++] = copy;
    return 0;
}

int cache_read_get(struct cache_read *read, const struct cache_key *key, const void **ret_data,
                   size_t *ret_len, struct error *err)
{
    struct record record;
    struct error why = {0};
    int r = check_key(key, err);

    if (r < 0)
        return r;
    r = lookup(read->cache, read->read, key, &record, &why);
    if (r == -EBADMSG) {
        record_label(key->kind, key->subject, strlen(key->subject), read->bad.label);
        read->bad.key = key->digest;
        read->bad.why = why;
        read->have_bad = true;
        error_set(err, EBADMSG, "%s: stored value damaged: %s", read->bad.label, why.text);
        return was_damaged(read->cache, &key->digest) ? CACHE_MISS_DAMAGED_AGAIN
                                                      : CACHE_MISS_DAMAGED;
    }
    if (r == CACHE_MISS)
        COUNT(read->cache, miss_absent);
    if (r) {
        if (r < 0 && err)
            *err = why;
        return r;
    }
    r = align_payload(read, &record, ret_data, err);
    if (!r)
        *ret_len = record.payload_len;
    return r;
}

void cache_read_end(struct cache_read *read)
{
    if (!read)
        return;
    store_read_end(read->read);
    if (read->have_bad)
        cache_quarantine(read->cache, &read->bad.key, read->bad.label, read->bad.why.text, NULL);
    for (size_t i = 0; i < read->n_copies; i++)
        free(read->copies[i]);
    free(read->copies);
    free(read);
}

/* ---- Storing ---- */

int cache_put(struct cache *cache, const struct cache_key *key, const void *data, size_t len,
              struct error *err)
{
    _cleanup_(buffer_free) struct buffer head = {0};
    uint64_t now = wall_ns(), size;
    int r = cache_check_process(cache, err);

    if (r < 0)
        return r;
    if (cache->read_only)
        return error_set(err, EROFS, "%s: opened read-only", cache->dir);
    r = record_head(key, data, len, now, &head, err);
    if (r < 0)
        return r;
    if (!size_add(head.len, len, &size))
        return error_set(err, EFBIG, "%s: value too large", key->subject);
    flush_uses(cache);
    struct store_entry entry = {.key = key->digest,
                                .kind = key->kind,
                                .subject = checksum_of(key->subject, strlen(key->subject)),
                                .last_use_ns = now,
                                .size = size};
    r = store_put(cache->store, &entry, head.data, head.len, data, len, err);
    if (r < 0)
        COUNT(cache, put_errors);
    else
        COUNT(cache, puts);
    return r;
}

int cache_remove(struct cache *cache, const struct digest *key, struct error *err)
{
    int r = cache_check_process(cache, err);

    if (r < 0)
        return r;
    if (cache->read_only)
        return error_set(err, EROFS, "%s: opened read-only", cache->dir);
    r = store_delete(cache->store, key, err);
    return r == STORE_ABSENT ? CACHE_MISS : r;
}

/* ---- Building ---- */

static int run_build(const struct cache_build *build, struct cache_value *ret_value,
                     struct error *err)
{
    _cleanup_(buffer_free) struct buffer out = {0};
    struct error why = {0};
    int r = build->build(build->ctx, &out, &why);

    if (r < 0) {
        if (!why.code)
            error_sys(&why, -r, "the build failed");
        if (err)
            *err = why;
        return r;
    }
    if (!out.data && buffer_reserve(&out, 0) < 0)
        return error_set(err, ENOMEM, "no memory for an empty value");
    *ret_value = (struct cache_value){out.data, out.len};
    out = (struct buffer){0};
    return 0;
}

/* As the builder of the key: builds, stores, lets the waiting ones go. */
static int build_and_store(struct cache *cache, const struct cache_key *key,
                           const struct cache_build *build, bool store, struct flight *flight,
                           struct cache_value *ret_value, struct error *err)
{
    struct cache_value value = {0};
    struct error why = {0};
    int r = run_build(build, &value, &why);

    if (!r && fault_hit(FAULT_COMPILE_MID)) {
        cache_value_free(&value);
        r = error_set(&why, EIO, "%s: the builder was stopped (fault point)", key->subject);
    }
    if (r < 0) {
        COUNT(cache, build_errors);
        flight_end(cache->flights, flight, r, NULL, &why);
        if (err)
            *err = why;
        return r;
    }
    COUNT(cache, builds);
    if (store)
        r = cache_put(cache, key, value.data, value.len, err);
    flight_end(cache->flights, flight, 0, store && !r ? NULL : &value, NULL);
    *ret_value = value;
    return store && !r ? CACHE_BUILT : CACHE_UNSTORED;
}

int cache_get_or_build(struct cache *cache, const struct cache_key *key,
                       const struct cache_build *build, struct cache_value *ret_value,
                       struct error *err)
{
    struct flight_wait wait = {.key = key, .build = build, .started_ns = clock_ns()};
    struct flight *flight = NULL;
    bool counted = false;

    if (!cache) {
        int r = run_build(build, ret_value, err);
        if (!r)
            error_set(err, ENOENT, "there is no cache");
        return r < 0 ? r : CACHE_UNSTORED;
    }
    int r = cache_check_process(cache, err);
    if (!r)
        r = check_key(key, err);
    if (r < 0)
        return r;
    for (;;) {
        r = cache_get(cache, key, ret_value, err);
        if (!r)
            return 0;
        bool storable = r != CACHE_MISS_DAMAGED_AGAIN;
        r = flight_begin(cache->flights, &wait, &flight, ret_value, err);
        if (wait.waited && !counted) {
            COUNT(cache, waits);
            counted = true;
        }
        if (r == FLIGHT_AGAIN)
            continue;
        if (r == FLIGHT_VALUE) {
            error_set(err, EIO, "%s: another thread built it and could not store it", key->subject);
            return CACHE_UNSTORED;
        }
        if (r < 0) {
            if (r == -ETIMEDOUT)
                COUNT(cache, wait_timeouts);
            return r;
        }
        /* Somebody may have stored it between our look and our lock. */
        int found = get(cache, key, ret_value, storable ? NULL : err);
        if (!found) {
            flight_end(cache->flights, flight, 0, NULL, NULL);
            return 0;
        }
        return build_and_store(cache, key, build, storable && found != CACHE_MISS_DAMAGED_AGAIN,
                               flight, ret_value, err);
    }
}
