/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/fault.h"

void *mem_alloc(size_t n, size_t size)
{
    uint64_t bytes;

    if (!size_mul(n, size, &bytes) || bytes > PTRDIFF_MAX || fault_hit(FAULT_ALLOC))
        return NULL;
    return calloc(1, bytes ? bytes : 1);
}

static void *must(void *p)
{
    if (!p) {
        fputs("ember: out of memory\n", stderr);
        abort();
    }
    return p;
}

void *x_alloc(size_t size)
{
    return must(calloc(1, size ? size : 1));
}

void *x_realloc(void *p, size_t size)
{
    return must(realloc(p, size ? size : 1));
}

char *x_strdup(const char *s)
{
    return must(strdup(s));
}

char *x_strndup(const char *s, size_t n)
{
    return must(strndup(s, n));
}

char *x_printf(const char *format, ...)
{
    char *s = NULL;
    va_list ap;

    va_start(ap, format);
    int n = vasprintf(&s, format, ap);
    va_end(ap);
    return must(n < 0 ? NULL : s);
}

uint64_t mem_resident(void)
{
    unsigned long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");

    if (f && fscanf(f, "%*u %llu", &pages) != 1)
        pages = 0;
    if (f)
        fclose(f);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

void buffer_free(struct buffer *b)
{
    free(b->data);
    *b = (struct buffer){0};
}

int buffer_reserve(struct buffer *b, size_t extra)
{
    uint64_t need;

    if (!size_add(b->len, extra, &need) || !size_add(need, 1, &need) || need > PTRDIFF_MAX)
        return -ENOMEM;
    if (need <= b->cap)
        return 0;
    uint64_t cap = MAX(need, MAX(64, b->cap + b->cap / 2));
    char *data = fault_hit(FAULT_ALLOC) ? NULL : realloc(b->data, cap);
    if (!data)
        return -ENOMEM;
    b->data = data;
    b->cap = cap;
    b->data[b->len] = 0;
    return 0;
}

int buffer_append(struct buffer *b, const void *bytes, size_t n)
{
    int r = buffer_reserve(b, n);
    if (r < 0)
        return r;
    if (n)
        memcpy(b->data + b->len, bytes, n);
    b->len += n;
    b->data[b->len] = 0;
    return 0;
}

int buffer_printf(struct buffer *b, const char *format, ...)
{
    va_list ap;

    va_start(ap, format);
    int n = vsnprintf(NULL, 0, format, ap);
    va_end(ap);
    if (n < 0)
        return -EINVAL;
    int r = buffer_reserve(b, (size_t)n);
    if (r < 0)
        return r;
    va_start(ap, format);
    vsnprintf(b->data + b->len, (size_t)n + 1, format, ap);
    va_end(ap);
    b->len += (size_t)n;
    return 0;
}
