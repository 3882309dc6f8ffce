/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/tokenizer.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Times of files move in ticks of the kernel's clock, or of two seconds on the oldest systems. */
#define SETTLED_S 3
#define LEASE_MIN (64 * KIB) /* smaller values may be copies that go with the read */
#define WAIT_MS 30000 /* for another process that compiles the same; then we parse ourselves */

/* What the image depends on, and the files themselves once they had to be read. */
struct source {
    struct digest json, config;
    struct tokenizer_files files;
    bool read;
};

/* ---- digests of files ---- */

static bool file_of(const char *path, const char *name, char **ret_file, struct stat *ret_st)
{
    struct stat st;

    if (stat(path, &st) < 0)
        return false;
    *ret_file = S_ISDIR(st.st_mode) ? x_printf("%s/%s", path, name) : x_strdup(path);
    return stat(*ret_file, ret_st) == 0 && S_ISREG(ret_st->st_mode);
}

static struct cache_key *file_key(const char *path, const struct stat *st)
{
    char subject[CACHE_SUBJECT_MAX];
    const char *slash = strrchr(path, '/');

    snprintf(subject, sizeof subject, "file digest %s", slash ? slash + 1 : path);
    struct cache_key *key = cache_key_begin(CACHE_RECORD, subject);
    cache_key_add_string(key, "record", "file digest");
    cache_key_add_u64(key, "device", st->st_dev);
    cache_key_add_u64(key, "inode", st->st_ino);
    cache_key_add_u64(key, "size", (uint64_t)st->st_size);
    cache_key_add_u64(key, "mtime_s", (uint64_t)st->st_mtim.tv_sec);
    cache_key_add_u64(key, "mtime_ns", (uint64_t)st->st_mtim.tv_nsec);
    cache_key_add_u64(key, "ctime_s", (uint64_t)st->st_ctim.tv_sec);
    cache_key_add_u64(key, "ctime_ns", (uint64_t)st->st_ctim.tv_nsec);
    return key;
}

static bool same_file(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec &&
           a->st_ctim.tv_sec == b->st_ctim.tv_sec && a->st_ctim.tv_nsec == b->st_ctim.tv_nsec;
}

/* A change within the clock's tick of another one would not show. */
static bool settled(const struct stat *st)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return st->st_ctim.tv_sec + SETTLED_S < now.tv_sec &&
           st->st_mtim.tv_sec + SETTLED_S < now.tv_sec;
}

/* The digests of both files without reading the large one; false when that cannot be known. */
static bool digests_noted(struct cache *cache, const char *path, struct source *s)
{
    _cleanup_(tokenizer_files_free) struct tokenizer_files small = {0};
    _cleanup_(cache_key_freep) struct cache_key *key = NULL;
    _cleanup_cache_value_ struct cache_value value = {0};
    _cleanup_free_ char *file = NULL;
    struct stat st;

    if (!file_of(path, "tokenizer.json", &file, &st))
        return false;
    key = file_key(file, &st);
    if (cache_get(cache, key, &value, NULL) != 0 || value.len != sizeof s->json ||
        tokenizer_read(path, true, &small, NULL) < 0)
        return false;
    memcpy(&s->json, value.data, sizeof s->json);
    s->config = digest_of(small.config.data ? small.config.data : "", small.config.len);
    return true;
}

/* Reads both files, and notes the digest of the large one when that is safe. */
static int digests_read(struct cache *cache, const char *path, struct source *s, struct error *err)
{
    _cleanup_free_ char *file = NULL;
    struct stat before, after;
    bool known = file_of(path, "tokenizer.json", &file, &before);

    int r = tokenizer_read(path, false, &s->files, err);
    if (r < 0)
        return r;
    s->read = true;
    s->json = digest_of(s->files.json.data, s->files.json.len);
    s->config = digest_of(s->files.config.data ? s->files.config.data : "", s->files.config.len);
    if (known && stat(file, &after) == 0 && same_file(&before, &after) && settled(&after)) {
        _cleanup_(cache_key_freep) struct cache_key *key = file_key(file, &after);
        cache_put(cache, key, &s->json, sizeof s->json, NULL);
    }
    return 0;
}

/* ---- images ---- */

static struct cache_key *image_key(const struct source *s)
{
    struct cache_key *key = cache_key_begin(CACHE_TOKENIZER, "tokenizer.json");

    cache_key_add(key, "tokenizer.json", &s->json, sizeof s->json);
    cache_key_add(key, "tokenizer_config.json", &s->config, sizeof s->config);
    cache_key_add_u64(key, "version", TOKENIZER_IMAGE_VERSION);
    cache_key_add_string(key, "byte_order",
                         __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? "little" : "big");
    return key;
}

/* ---- pages of the store ---- */

struct engine_lease {
    struct cache_read *read;
    char *pages; /* our own mapping of the store's pages that hold the image */
    size_t len;
};

static size_t page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* The whole pages around an image. */
static char *pages_of(const void *image, size_t len, size_t *ret_len)
{
    uintptr_t from = (uintptr_t)image & ~(uintptr_t)(page_size() - 1);

    *ret_len = size_align((uintptr_t)image + len - from, page_size());
    return (char *)from;
}

static void image_release(void *image, size_t len)
{
    size_t n;
    char *pages = pages_of(image, len, &n);

    munmap(pages, n);
}

/*
 * The store is mapped shared, so that its pages can be mapped a second time (mremap from a length
 * of 0): at an address of ours, where a copy can take their place later without any pointer
 * changing.
 */
static int lease_pages(struct cache_read *read, const void *stored, size_t len,
                       struct tokenizer **ret, struct engine_lease **ret_lease)
{
    size_t n;
    char *from = pages_of(stored, len, &n);
    char *pages = mremap(from, 0, n, MREMAP_MAYMOVE);

    if (pages == MAP_FAILED)
        return -errno;
    int r = tokenizer_take(pages + ((const char *)stored - from), len, image_release, ret, NULL);
    if (r < 0) {
        munmap(pages, n);
        return r;
    }
    *ret_lease = x_alloc(sizeof **ret_lease);
    **ret_lease = (struct engine_lease){read, pages, n};
    return 0;
}

int engine_lease_settle(struct engine_lease *lease, struct error *err)
{
    char *copy = mmap(NULL, lease->len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (copy == MAP_FAILED)
        return error_sys(err, errno, "no memory for a tokenizer of %zu bytes", lease->len);
    memcpy(copy, lease->pages, lease->len);
    mprotect(copy, lease->len, PROT_READ);
    /* One step for whoever reads there: a fault meanwhile waits for the mapping's lock. */
    if (mremap(copy, lease->len, lease->len, MREMAP_MAYMOVE | MREMAP_FIXED, lease->pages) ==
        MAP_FAILED) {
        int r = error_sys(err, errno, "moving a tokenizer of %zu bytes", lease->len);
        munmap(copy, lease->len);
        return r;
    }
    engine_lease_free(lease);
    return 0;
}

void engine_lease_free(struct engine_lease *lease)
{
    if (!lease)
        return;
    cache_read_end(lease->read);
    free(lease);
}

/* 0, or anything else when the cache has no good image under this key. */
static int open_stored(struct cache *cache, const struct cache_key *key, struct tokenizer **ret,
                       struct engine_lease **ret_lease)
{
    _cleanup_(cache_read_endp) struct cache_read *read = NULL;
    const void *stored;
    size_t len;

    if (cache_read_begin(cache, &read, NULL) < 0)
        return -EIO;
    int r = cache_read_get(read, key, &stored, &len, NULL);
    if (r == 0 && len < LEASE_MIN)
        r = -ENOTSUP;
    if (r == 0)
        r = lease_pages(read, stored, len, ret, ret_lease);
    if (r == 0)
        read = NULL; /* the lease's now */
    return r;
}

/* ---- images that are not stored yet ---- */

struct compile {
    const struct source *source;
    bool ran;
};

static int compile(void *ctx, struct buffer *out, struct error *err)
{
    _cleanup_(tokenizer_freep) struct tokenizer *t = NULL;
    struct compile *c = ctx;
    const struct tokenizer_files *f = &c->source->files;
    const void *image;
    size_t len;

    c->ran = true;
    int r = tokenizer_load_text(f->json.data, f->json.len, f->config.data, f->config.len, &t, err);
    if (r < 0)
        return r;
    tokenizer_image(t, &image, &len);
    return buffer_append(out, image, len) < 0
               ? error_set(err, ENOMEM, "no memory for a tokenizer of %zu bytes", len)
               : 0;
}

static void value_release(void *image, size_t len)
{
    free(image);
}

static int open_built(struct cache *cache, const struct cache_key *key, const struct source *s,
                      struct tokenizer **ret, struct error *err)
{
    struct compile ctx = {s, false};
    struct cache_build build = {.build = compile, .ctx = &ctx, .timeout_ms = WAIT_MS};
    _cleanup_cache_value_ struct cache_value value = {0};
    const struct tokenizer_files *f = &s->files;
    int r = cache_get_or_build(cache, key, &build, &value, err);

    if (r >= 0 && tokenizer_take(value.data, value.len, value_release, ret, NULL) == 0) {
        value = (struct cache_value){0};
        return 0;
    }
    if (r < 0 && ctx.ran)
        return r;
    /* Stored bytes that are no image go, so that the next start has a good one. */
    if (r >= 0) {
        struct digest digest = cache_key_digest(key);
        cache_remove(cache, &digest, NULL);
    }
    return tokenizer_load_text(f->json.data, f->json.len, f->config.data, f->config.len, ret, err);
}

int engine_tokenizer_lease(struct cache *cache, const char *path, struct tokenizer **ret,
                           struct engine_lease **ret_lease, struct error *err)
{
    struct source s = {0};
    int r = 0;

    *ret_lease = NULL;
    if (!cache)
        return tokenizer_load(path, ret, err);
    for (bool noted = digests_noted(cache, path, &s);; noted = false) {
        if (!noted)
            r = digests_read(cache, path, &s, err);
        if (r < 0)
            break;
        _cleanup_(cache_key_freep) struct cache_key *key = image_key(&s);
        if (open_stored(cache, key, ret, ret_lease) == 0)
            break;
        if (s.read) {
            r = open_built(cache, key, &s, ret, err);
            break;
        }
    }
    tokenizer_files_free(&s.files);
    if (r < 0 && err && !strncmp(err->text, path, strlen(path)))
        return r; /* a file's error begins with its path */
    return r < 0 ? error_prefix(err, "%s", path) : 0;
}

int engine_tokenizer_open(struct cache *cache, const char *path, struct tokenizer **ret,
                          struct error *err)
{
    struct engine_lease *lease;
    struct tokenizer *t;
    int r = engine_tokenizer_lease(cache, path, &t, &lease, err);

    if (r < 0)
        return r;
    if (lease)
        r = engine_lease_settle(lease, err);
    if (r < 0) {
        tokenizer_free(t);
        engine_lease_free(lease);
        return r;
    }
    *ret = t;
    return 0;
}
