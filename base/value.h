/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Typed values as people write them, in files and on command lines: one parser, one way to print
 * them back, one wording of "what would have been allowed". base/config.h and base/verbs.h share
 * it.
 */
#ifndef EMBER_BASE_VALUE_H
#define EMBER_BASE_VALUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/mem.h"

/* X(type, C type of a parsed value, word that stands for it in a synopsis) */
#define VALUE_TYPES(X)                                                                             \
    X(BOOL, bool, "yes|no")       /* yes no true false on off 1 0 */                               \
    X(INT, int64_t, "N")          /* decimal, within the range if there is one */                  \
    X(REAL, double, "X")          /* 0.7, 1e-3; finite, a point as the decimal sign */             \
    X(BYTES, uint64_t, "BYTES")   /* 1048576, 1024KiB, 1MiB (K, M, G, T alone mean the same) */    \
    X(DURATION, uint64_t, "TIME") /* nanoseconds, written 250ms, 30s, 5m, 1h, or 0 */              \
    X(STRING, char *, "TEXT")                                                                      \
    X(PATH, char *, "PATH")    /* after the expansion of %t, %C, %D and %% (value_expand) */       \
    X(PATHS, char **, "PATHS") /* NULL-terminated; written with ':' between; "" is none */         \
    X(ENUM, int, "WORD")       /* index into the choices "a|b|c" */

enum value_type {
#define X(type, ctype, word) VALUE_##type,
    VALUE_TYPES(X)
#undef X
};
/* Members' types for structs made from an X-macro: VALUE_CTYPE_BYTES is uint64_t, ... */
typedef bool VALUE_CTYPE_BOOL;
typedef int64_t VALUE_CTYPE_INT;
typedef double VALUE_CTYPE_REAL;
typedef uint64_t VALUE_CTYPE_BYTES;
typedef uint64_t VALUE_CTYPE_DURATION;
typedef char *VALUE_CTYPE_STRING;
typedef char *VALUE_CTYPE_PATH;
typedef char **VALUE_CTYPE_PATHS;
typedef int VALUE_CTYPE_ENUM;

union value {
    VALUE_CTYPE_BOOL b;
    VALUE_CTYPE_INT i;
    VALUE_CTYPE_REAL r;
    uint64_t u;  /* BYTES, DURATION */
    char *s;     /* STRING, PATH: owned */
    char **list; /* PATHS: owned */
    VALUE_CTYPE_ENUM choice;
};

/*
 * `limits`: "a|b|c" for ENUM; "min..max" (either side may be missing, written as the value is
 * written) for INT, REAL, BYTES and DURATION; NULL or "" otherwise. Returns 0 or -EINVAL with a
 * text such as `"3x" is not a time: write 250ms, 30s, 5m or 1h`. The caller owns *ret (value_free).
 */
int value_parse(enum value_type type, const char *limits, const char *text, union value *ret,
                struct error *err);
void value_free(enum value_type type, union value *v); /* idempotent */

/* Appends the value as value_parse would read it: 1GiB, 30s, yes. */
void value_print(enum value_type type, const char *limits, const union value *v,
                 struct buffer *out);

/* Bytes of the C type, for copying in and out of a struct's member. */
size_t value_size(enum value_type type);

/* "N", "BYTES", ... or the choices themselves for ENUM. */
const char *value_word(enum value_type type, const char *limits);

/*
 * Copies `text`, replacing %t (directory for run-time files: the parent of systemd's
 * RUNTIME_DIRECTORY, else $XDG_RUNTIME_DIR, which for root does not count below /run/user; else
 * /run as root, /tmp/emberd-UID), %C (for caches: CACHE_DIRECTORY's parent, $XDG_CACHE_HOME, else
 * /var/cache as root, ~/.cache), %D (this program's data:
 * $EMBER_DATADIR, ../share/emberd from the program, its source tree, or where it was to be
 * installed) and %% (a percent sign); a leading
 * "~/" is $HOME. Returns 0 and an owned string, or -EINVAL for another % sequence.
 */
int value_expand(const char *text, char **ret, struct error *err);

/*
 * The candidate closest to `word` in edits (insert, delete, replace, swap neighbours), or NULL when
 * none is close enough to be what was meant. `next(context, i)` returns the i-th, then NULL.
 */
const char *value_nearest(const char *word, const char *(*next)(const void *context, size_t i),
                          const void *context);

#endif
