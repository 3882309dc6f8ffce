/* SPDX-License-Identifier: Apache-2.0 */
#include "util.h"

#include <fcntl.h>
#include <ftw.h>
#include <lmdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fault.h"

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        int rc_ = (x);                                                                             \
        if (rc_) {                                                                                 \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, mdb_strerror(rc_));         \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

char *dir_make(void)
{
    const char *tmp = getenv("TMPDIR");
    char *dir = x_printf("%s/ember-cache-test-XXXXXX", tmp ? tmp : "/tmp");

    if (!mkdtemp(dir))
        abort();
    return dir;
}

const struct cache_options cache_small = {.limit = 2 * MIB, .initial = 128 * KIB, .use_ms = -1};

int cache_setup(void **state)
{
    *state = dir_make();
    return 0;
}

int cache_teardown(void **state)
{
    unsetenv("EMBER_FAULT");
    fault_init();
    dir_remove(*state);
    return 0;
}

void arm(const char *spec)
{
    setenv("EMBER_FAULT", spec, 1);
    fault_init();
}

struct cache_stats stats_of(struct cache *cache)
{
    struct cache_stats stats;

    assert_int_equal(cache_stats(cache, &stats, NULL), 0);
    return stats;
}

int build_good(void *ctx, struct buffer *out, struct error *err)
{
    ++*(int *)ctx;
    return buffer_append(out, "rebuilt", 7);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    return remove(path);
}

void dir_remove(char *dir)
{
    nftw(dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    free(dir);
}

struct cache *must_open(const char *dir, const struct cache_options *options)
{
    struct cache *cache = NULL;
    struct error err = {0};
    int r = cache_open(dir, options, &cache, &err);

    if (r)
        fprintf(stderr, "cache_open: %s\n", error_text(&err));
    if (r)
        abort();
    return cache;
}

struct cache_key *key_of(const char *subject, unsigned n)
{
    struct cache_key *key = cache_key_begin(CACHE_KERNEL, subject);

    cache_key_add_string(key, "compiler", "cc 12.2");
    cache_key_add_u64(key, "n", n);
    return key;
}

void fill(uint8_t *out, size_t len, unsigned seed)
{
    uint32_t x = seed * 2654435761u + 12345;

    for (size_t i = 0; i < len; i++) {
        x = x * 1664525u + 1013904223u;
        out[i] = (uint8_t)(x >> 24);
    }
}

int put_n(struct cache *cache, const char *subject, unsigned n, size_t len, struct error *err)
{
    _cleanup_(cache_key_freep) struct cache_key *key = key_of(subject, n);
    _cleanup_free_ uint8_t *bytes = x_alloc(len);

    fill(bytes, len, n);
    return cache_put(cache, key, bytes, len, err);
}

int get_n(struct cache *cache, const char *subject, unsigned n, size_t len, struct error *err)
{
    _cleanup_(cache_key_freep) struct cache_key *key = key_of(subject, n);
    _cleanup_free_ uint8_t *bytes = x_alloc(len);
    _cleanup_cache_value_ struct cache_value value = {0};
    int r = cache_get(cache, key, &value, err);

    fill(bytes, len, n);
    if (!r && (value.len != len || memcmp(value.data, bytes, len)))
        return -EILSEQ;
    return r;
}

/* ---- Damage ---- */

static void do_damage(const char *dir, const struct digest *key, enum damage how)
{
    _cleanup_free_ char *path = x_printf("%s/store.mdb", dir);
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi db;
    MDB_val k = {sizeof *key, (void *)key}, v;

    CHECK(mdb_env_create(&env));
    CHECK(mdb_env_set_maxdbs(env, 8));
    CHECK(mdb_env_set_maxreaders(env, 1024));
    CHECK(mdb_env_set_mapsize(env, 4 * MIB));
    CHECK(mdb_env_open(env, path, MDB_NOSUBDIR, 0600));
    CHECK(mdb_txn_begin(env, NULL, 0, &txn));
    CHECK(mdb_dbi_open(txn, "values", 0, &db));
    CHECK(mdb_get(txn, db, &k, &v));
    _cleanup_free_ uint8_t *copy = x_alloc(v.mv_size + 1);
    size_t len = v.mv_size;
    memcpy(copy, v.mv_data, len);
    if (how == DAMAGE_FLIP_PAYLOAD)
        copy[len - 1] ^= 0x10;
    else if (how == DAMAGE_FLIP_HEAD)
        copy[33] ^= 0x01;
    else if (how == DAMAGE_CUT)
        len /= 2;
    else if (how == DAMAGE_EMPTY)
        len = 0;
    if (how == DAMAGE_SWAP) { /* a whole record, but of another key */
        struct cache_key *other = key_of("other", 99);
        struct digest d = cache_key_digest(other);
        MDB_val o = {sizeof d, &d};
        CHECK(mdb_get(txn, db, &o, &v));
        free(TAKE(copy));
        copy = x_alloc(v.mv_size);
        len = v.mv_size;
        memcpy(copy, v.mv_data, len);
        cache_key_free(other);
    }
    v = (MDB_val){len, copy};
    CHECK(mdb_put(txn, db, &k, &v, 0));
    CHECK(mdb_txn_commit(txn));
    mdb_env_close(env);
}

void damage(const char *dir, const struct digest *key, enum damage how)
{
    char hex[DIGEST_HEX_SIZE], number[16];
    pid_t pid = fork();

    if (!pid) {
        snprintf(number, sizeof number, "%d", how);
        execl("/proc/self/exe", "test", "--damage", dir, digest_hex(key, hex), number,
              (char *)NULL);
        _exit(127);
    }
    if (child_wait(pid))
        abort();
}

void damage_main(int argc, char **argv)
{
    struct digest key;

    if (argc != 5 || strcmp(argv[1], "--damage"))
        return;
    for (size_t i = 0; i < sizeof key.bytes; i++)
        sscanf(argv[3] + 2 * i, "%2hhx", &key.bytes[i]);
    do_damage(argv[2], &key, (enum damage)atoi(argv[4]));
    exit(0);
}

void write_version(const char *dir, unsigned version)
{
    _cleanup_free_ char *path = x_printf("%s/store.mdb", dir);
    uint8_t bytes[8] = {'E', 'M', 'B', 'S', (uint8_t)version};
    MDB_val k = {7, "version"}, v = {sizeof bytes, bytes};
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi db;

    CHECK(mdb_env_create(&env));
    CHECK(mdb_env_set_maxdbs(env, 8));
    CHECK(mdb_env_open(env, path, MDB_NOSUBDIR, 0600));
    CHECK(mdb_txn_begin(env, NULL, 0, &txn));
    CHECK(mdb_dbi_open(txn, "format", MDB_CREATE, &db));
    CHECK(mdb_put(txn, db, &k, &v, 0));
    CHECK(mdb_txn_commit(txn));
    mdb_env_close(env);
}

int child_wait(pid_t pid)
{
    int status;

    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        abort();
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}
