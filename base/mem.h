/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory and sizes: locals that clean themselves up, checked arithmetic, a growing byte buffer.
 *
 * A size that a file, a client or another process had a hand in goes through size_add/size_mul and
 * mem_alloc, which can fail and are replies. x_alloc and friends are for small sizes that we chose
 * ourselves: they abort, since nothing can go on without them.
 */
#ifndef EMBER_BASE_MEM_H
#define EMBER_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/error.h"

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

#define _cleanup_(f) __attribute__((cleanup(f)))

/* DEFINE_CLEANUP(struct foo *, foo_free) makes `_cleanup_(foo_freep) struct foo *x = NULL;` work.
 */
#define DEFINE_CLEANUP(type, func)                                                                 \
    static inline void func##p(type *p)                                                            \
    {                                                                                              \
        if (*p)                                                                                    \
            func(*p);                                                                              \
    }

static inline void freep(void *p)
{
    free(*(void **)p);
}
#define _cleanup_free_ _cleanup_(freep)

/* Takes ownership out of a cleanup variable: `return TAKE(x);` */
#define TAKE(p)                                                                                    \
    ({                                                                                             \
        __typeof__(p) take_ = (p);                                                                 \
        (p) = NULL;                                                                                \
        take_;                                                                                     \
    })

/* True and *ret_sum set when a + b fits; false and *ret_sum untouched otherwise. */
static inline bool size_add(uint64_t a, uint64_t b, uint64_t *ret_sum)
{
    uint64_t sum;
    if (__builtin_add_overflow(a, b, &sum))
        return false;
    *ret_sum = sum;
    return true;
}

static inline bool size_mul(uint64_t a, uint64_t b, uint64_t *ret_product)
{
    uint64_t product;
    if (__builtin_mul_overflow(a, b, &product))
        return false;
    *ret_product = product;
    return true;
}

/* Rounds up to a power of two; saturates at UINT64_MAX rather than wrapping. */
static inline uint64_t size_align(uint64_t n, uint64_t align)
{
    return n > UINT64_MAX - (align - 1) ? UINT64_MAX : (n + align - 1) & ~(align - 1);
}

/* Zeroed n * size bytes, or NULL when the product overflows, exceeds PTRDIFF_MAX or memory is
 * short. */
void *mem_alloc(size_t n, size_t size);

/* Zeroed memory, strdup, printf to a string: abort when the host has none left. Small sizes only.
 */
void *x_alloc(size_t size);
void *x_realloc(void *p, size_t size);
char *x_strdup(const char *s);
char *x_strndup(const char *s, size_t n);
char *x_printf(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Resident memory of this process, bytes; 0 when it cannot be read. */
uint64_t mem_resident(void);

/* A growing byte buffer. Zero-initialise; buffer_free is idempotent. data[len] is always a NUL. */
struct buffer {
    char *data;
    size_t len, cap;
};
void buffer_free(struct buffer *b);
/* Make room for `extra` more bytes; 0 or -ENOMEM. */
int buffer_reserve(struct buffer *b, size_t extra);
int buffer_append(struct buffer *b, const void *bytes, size_t n);
int buffer_printf(struct buffer *b, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
