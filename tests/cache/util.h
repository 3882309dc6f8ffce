/* SPDX-License-Identifier: Apache-2.0 */
/* Helpers of the cache tests: a directory that goes away, keys, damage through LMDB itself. */
#ifndef EMBER_TESTS_CACHE_UTIL_H
#define EMBER_TESTS_CACHE_UTIL_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <errno.h>
#include <cmocka.h>

#include "cache/cache.h"

/* A test with a directory of its own in *state, and no faults armed behind it. */
#define CACHE_TEST(f) cmocka_unit_test_setup_teardown(f, cache_setup, cache_teardown)
int cache_setup(void **state);
int cache_teardown(void **state);

/* Room for 2 MiB, uses not written on a timer. */
extern const struct cache_options cache_small;

/* Arms fault points, as EMBER_FAULT says; "": none. */
void arm(const char *spec);
struct cache_stats stats_of(struct cache *cache);
/* A build that counts itself in the int ctx and gives "rebuilt". */
int build_good(void *ctx, struct buffer *out, struct error *err);

/* A fresh directory under $TMPDIR or /tmp (mode 0700); free the name with dir_remove. */
char *dir_make(void);
void dir_remove(char *dir);

struct cache *must_open(const char *dir, const struct cache_options *options);
/* kind KERNEL, subject, one factor "n" = n */
struct cache_key *key_of(const char *subject, unsigned n);
/* len bytes that depend on seed */
void fill(uint8_t *out, size_t len, unsigned seed);
/* Stores `len` bytes under key_of(subject, n), seeded with n; returns cache_put's result. */
int put_n(struct cache *cache, const char *subject, unsigned n, size_t len, struct error *err);
/* Looks it up; 0 only when the bytes are right too. */
int get_n(struct cache *cache, const char *subject, unsigned n, size_t len, struct error *err);

enum damage { DAMAGE_FLIP_PAYLOAD, DAMAGE_FLIP_HEAD, DAMAGE_CUT, DAMAGE_EMPTY, DAMAGE_SWAP };
/* In another process (exec'ed anew), through LMDB: damages the record of key. Aborts on failure. */
void damage(const char *dir, const struct digest *key, enum damage how);
/* Runs the damage when the test program was started for it; call first in main. */
void damage_main(int argc, char **argv);
/* Writes a store with this format version and nothing else. */
void write_version(const char *dir, unsigned version);

/* Waits for a child; its exit status, or 128 + the signal. */
int child_wait(pid_t pid);

#endif
