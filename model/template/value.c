/* SPDX-License-Identifier: Apache-2.0 */
/* The arena, strings, lists and dicts. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

#include "model/template/internal.h"

#include "base/digest.h"

/* --- Arena --- */

#define CHUNK_MIN ((size_t)16 << 10)

struct chunk {
    struct chunk *next;
    size_t used, size;
    max_align_t data[];
};

void run_init(struct run *r, const struct template_limits *limits, struct error *err)
{
    static const struct template_limits fallback = {50000000, 256 * MIB, 64 * MIB, 1000};
    memset(r, 0, sizeof *r);
    r->limits = limits ? *limits : fallback;
    if (!r->limits.steps)
        r->limits.steps = fallback.steps;
    if (!r->limits.memory)
        r->limits.memory = fallback.memory;
    if (!r->limits.output)
        r->limits.output = fallback.output;
    if (!r->limits.depth)
        r->limits.depth = fallback.depth;
    r->err = err;
}

void run_clear(struct run *r)
{
    while (r->chunks) {
        struct chunk *c = r->chunks;
        r->chunks = c->next;
        free(c);
    }
}

static struct chunk *chunk_add(struct run *r, size_t size)
{
    size_t room = MAX(size, MIN((size_t)1 << 20, MAX(CHUNK_MIN, (size_t)r->memory / 2)));
    if (room > r->limits.memory - MIN(r->limits.memory, r->memory))
        room = size;
    struct chunk *c = NULL;
    if (room <= r->limits.memory - MIN(r->limits.memory, r->memory))
        c = mem_alloc(1, sizeof *c + room);
    if (!c)
        run_fail_code(r, ENOMEM, "it needs more than %llu bytes",
                      (unsigned long long)r->limits.memory);
    c->size = room;
    c->next = r->chunks;
    r->chunks = c;
    r->memory += room;
    return c;
}

void *arena(struct run *r, size_t n, size_t size)
{
    uint64_t bytes;
    if (!size_mul(n, size, &bytes) || bytes > r->limits.memory)
        run_fail_code(r, ENOMEM, "it needs more than %llu bytes",
                      (unsigned long long)r->limits.memory);
    bytes = size_align(bytes, sizeof(max_align_t));
    run_charge(r, bytes);
    struct chunk *c = r->chunks;
    if (!c || c->size - c->used < bytes)
        c = chunk_add(r, bytes);
    void *p = (char *)c->data + c->used;
    c->used += bytes;
    return p;
}

/* --- Failing --- */

static void failv(struct run *r, int errnum, const char *format, va_list ap)
{
    char text[ERROR_TEXT_MAX];
    vsnprintf(text, sizeof text, format, ap);
    r->outcome = TEMPLATE_ERROR;
    r->code = error_set(r->err, errnum, "line %u: %s", (unsigned)r->line, text);
}

void run_fail(struct run *r, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    failv(r, EINVAL, format, ap);
    va_end(ap);
    longjmp(r->jump, 1);
}

void run_fail_code(struct run *r, int errnum, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    failv(r, errnum, format, ap);
    va_end(ap);
    longjmp(r->jump, 1);
}

void run_refuse(struct run *r, struct str *message)
{
    r->outcome = TEMPLATE_REFUSED;
    r->code = error_set(r->err, EINVAL, "%.*s", (int)MIN(message->len, (size_t)ERROR_TEXT_MAX),
                        message->data);
    longjmp(r->jump, 1);
}

/* --- Strings --- */

struct str *str_wrap(struct run *r, const char *data, size_t len)
{
    struct str *s = arena(r, 1, sizeof *s);
    s->data = data;
    s->len = len;
    s->chars = SIZE_MAX;
    return s;
}

struct str *str_copy(struct run *r, const char *data, size_t len)
{
    char *copy = arena(r, len + 1, 1);
    if (len)
        memcpy(copy, data, len);
    return str_wrap(r, copy, len);
}

struct str *str_lit(struct run *r, const char *s)
{
    return str_wrap(r, s, strlen(s));
}

/* From here on a concatenation leaves as much room again behind it. */
#define CAT_ROOM 128

struct str *str_cat(struct run *r, struct str *a, struct str *b)
{
    size_t len = a->len + b->len;
    if (!b->len)
        return a;
    if (!a->len)
        return b;
    struct block *k = a->block;
    if (k && a->data + a->len == k->base + k->used && b->len <= k->cap - k->used) {
        run_charge(r, b->len);
        memcpy(k->base + k->used, b->data, b->len);
        k->used += b->len;
        struct str *s = str_wrap(r, a->data, len);
        s->block = k;
        return s;
    }
    size_t cap = len < CAT_ROOM ? len : len * 2;
    char *data = arena(r, cap, 1);
    memcpy(data, a->data, a->len);
    memcpy(data + a->len, b->data, b->len);
    struct str *s = str_wrap(r, data, len);
    if (cap > len) {
        s->block = arena(r, 1, sizeof *s->block);
        *s->block = (struct block){data, len, cap};
    }
    return s;
}

size_t str_chars(struct str *s)
{
    if (s->chars != SIZE_MAX)
        return s->chars;
    size_t n = 0;
    for (size_t i = 0; i < s->len; i++)
        n += ((unsigned char)s->data[i] & 0xC0) != 0x80;
    return s->chars = n;
}

void str_freeze(struct str *s)
{
    s->block = NULL;
    str_chars(s);
}

size_t str_offset(struct str *s, size_t chars)
{
    if (str_chars(s) == s->len)
        return MIN(chars, s->len);
    size_t i = 0;
    while (chars > 0 && i < s->len) {
        i++;
        while (i < s->len && ((unsigned char)s->data[i] & 0xC0) == 0x80)
            i++;
        chars--;
    }
    return i;
}

struct str *str_sub(struct run *r, struct str *s, size_t from, size_t to)
{
    return from == 0 && to == s->len ? s : str_wrap(r, s->data + from, to - from);
}

bool str_is(const struct str *s, const char *lit)
{
    return strlen(lit) == s->len && !memcmp(s->data, lit, s->len);
}

bool str_same(const struct str *a, const struct str *b)
{
    return a == b || (a->len == b->len && (!a->len || !memcmp(a->data, b->data, a->len)));
}

int str_order(const struct str *a, const struct str *b)
{
    size_t n = MIN(a->len, b->len);
    int d = n ? memcmp(a->data, b->data, n) : 0;
    return d ? (d < 0 ? -1 : 1) : (a->len > b->len) - (a->len < b->len);
}

size_t str_find(struct run *r, const struct str *s, const struct str *needle, size_t from,
                size_t to)
{
    run_charge(r, to > from ? to - from : 0);
    if (from > to || to - from < needle->len)
        return SIZE_MAX;
    if (!needle->len)
        return from;
    const char *p = memmem(s->data + from, to - from, needle->data, needle->len);
    return p ? (size_t)(p - s->data) : SIZE_MAX;
}

size_t str_rfind(struct run *r, const struct str *s, const struct str *needle, size_t from,
                 size_t to)
{
    run_charge(r, to > from ? to - from : 0);
    if (from > to || to - from < needle->len)
        return SIZE_MAX;
    for (size_t i = to - needle->len + 1; i-- > from;)
        if (!needle->len || !memcmp(s->data + i, needle->data, needle->len))
            return i;
    return SIZE_MAX;
}

/* --- Texts being made --- */

void sb_add(struct run *r, struct sb *b, const char *data, size_t len)
{
    if (b->cap - b->len < len) {
        size_t cap = MAX(b->len + len, MAX((size_t)32, b->cap * 2));
        char *grown = arena(r, cap, 1);
        if (b->len)
            memcpy(grown, b->data, b->len);
        b->data = grown;
        b->cap = cap;
    }
    if (len)
        memcpy(b->data + b->len, data, len);
    b->len += len;
    run_charge(r, len);
}

void sb_str(struct run *r, struct sb *b, const struct str *s)
{
    sb_add(r, b, s->data, s->len);
}

void sb_char(struct run *r, struct sb *b, uint32_t c)
{
    char u[4];
    size_t n = 0;
    if (c < 0x80) {
        u[n++] = (char)c;
    } else if (c < 0x800) {
        u[n++] = (char)(0xC0 | c >> 6);
        u[n++] = (char)(0x80 | (c & 0x3F));
    } else if (c < 0x10000) {
        u[n++] = (char)(0xE0 | c >> 12);
        u[n++] = (char)(0x80 | (c >> 6 & 0x3F));
        u[n++] = (char)(0x80 | (c & 0x3F));
    } else {
        u[n++] = (char)(0xF0 | c >> 18);
        u[n++] = (char)(0x80 | (c >> 12 & 0x3F));
        u[n++] = (char)(0x80 | (c >> 6 & 0x3F));
        u[n++] = (char)(0x80 | (c & 0x3F));
    }
    sb_add(r, b, u, n);
}

void sb_fill(struct run *r, struct sb *b, uint32_t c, size_t n)
{
    while (n-- > 0)
        sb_char(r, b, c);
}

void sb_printf(struct run *r, struct sb *b, const char *format, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, format);
    int n = vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    sb_add(r, b, text, MIN((size_t)MAX(n, 0), sizeof text - 1));
}

struct str *sb_take(struct run *r, struct sb *b)
{
    struct str *s = str_wrap(r, b->data ? b->data : "", b->len);
    *b = (struct sb){0};
    return s;
}

/* --- Lists --- */

struct value seq_new(struct run *r, enum value_type type, size_t cap)
{
    struct seq *s = arena(r, 1, sizeof *s);
    if (cap)
        s->v = arena(r, cap, sizeof *s->v);
    s->cap = cap;
    return (struct value){.type = (uint8_t)type, .seq = s};
}

void seq_add(struct run *r, struct seq *s, struct value v)
{
    if (s->n == s->cap) {
        size_t cap = MAX((size_t)4, s->cap * 2);
        struct value *grown = arena(r, cap, sizeof *grown);
        if (s->n)
            memcpy(grown, s->v, s->n * sizeof *grown);
        s->v = grown;
        s->cap = cap;
    }
    s->v[s->n++] = v;
}

struct value v_tuple2(struct run *r, struct value a, struct value b)
{
    struct value t = seq_new(r, T_TUPLE, 2);
    seq_add(r, t.seq, a);
    seq_add(r, t.seq, b);
    return t;
}

/* --- Dicts --- */

#define INDEX_FROM 8

struct dict *dict_new(struct run *r)
{
    return arena(r, 1, sizeof(struct dict));
}

bool hashable(struct value v)
{
    if (v.type == T_TUPLE) {
        for (size_t i = 0; i < v.seq->n; i++)
            if (!hashable(v.seq->v[i]))
                return false;
        return true;
    }
    return v.type != T_LIST && v.type != T_DICT && v.type != T_VIEW;
}

static uint64_t hash(struct value v)
{
    double f;
    uint64_t h;
    switch (v.type) {
    case T_STR:
        return checksum_of(v.s->data, v.s->len);
    case T_BOOL:
    case T_INT:
    case T_FLOAT:
        f = as_float(v) + 0.0; /* equal numbers are equal as doubles; -0.0 becomes 0.0 */
        return checksum_of(&f, sizeof f);
    case T_NONE:
        return 1;
    case T_TUPLE:
        h = v.seq->n;
        for (size_t i = 0; i < v.seq->n; i++)
            h = h * 1000003 + hash(v.seq->v[i]);
        return h;
    default:
        return checksum_of(&v.p, sizeof v.p);
    }
}

static void index_add(struct dict *d, size_t entry)
{
    size_t i = hash(d->v[entry].key) & (d->index_size - 1);
    while (d->index[i])
        i = (i + 1) & (d->index_size - 1);
    d->index[i] = (uint32_t)entry + 1;
}

static struct dict_entry *dict_find(struct run *r, const struct dict *d, struct value key)
{
    run_charge(r, 0);
    if (!d->index) {
        for (size_t i = 0; i < d->n; i++)
            if (equal(r, d->v[i].key, key))
                return &d->v[i];
        return NULL;
    }
    for (size_t i = hash(key) & (d->index_size - 1); d->index[i]; i = (i + 1) & (d->index_size - 1))
        if (equal(r, d->v[d->index[i] - 1].key, key))
            return &d->v[d->index[i] - 1];
    return NULL;
}

void dict_set(struct run *r, struct dict *d, struct value key, struct value value)
{
    if (!hashable(key))
        run_fail(r, "TypeError: unhashable type: '%s'", type_name(key));
    struct dict_entry *e = dict_find(r, d, key);
    if (e) {
        e->value = value;
        return;
    }
    if (d->n == d->cap) {
        size_t cap = MAX((size_t)4, d->cap * 2);
        struct dict_entry *grown = arena(r, cap, sizeof *grown);
        if (d->n)
            memcpy(grown, d->v, d->n * sizeof *grown);
        d->v = grown;
        d->cap = cap;
        if (cap > INDEX_FROM) {
            d->index_size = cap * 2;
            d->index = arena(r, d->index_size, sizeof *d->index);
            for (size_t i = 0; i < d->n; i++)
                index_add(d, i);
        }
    }
    d->v[d->n++] = (struct dict_entry){key, value};
    if (d->index)
        index_add(d, d->n - 1);
}

struct value *dict_get(struct run *r, const struct dict *d, struct value key)
{
    struct dict_entry *e = hashable(key) ? dict_find(r, d, key) : NULL;
    return e ? &e->value : NULL;
}

/* --- From JSON --- */

struct value json_value(struct run *r, const json_t *j)
{
    const char *key;
    size_t i, len;
    json_t *item;
    struct value v = v_none();
    run_enter(r);
    switch (json_typeof(j)) {
    case JSON_NULL:
        break;
    case JSON_TRUE:
    case JSON_FALSE:
        v = v_bool(json_is_true(j));
        break;
    case JSON_INTEGER:
        v = v_int(json_integer_value(j));
        break;
    case JSON_REAL:
        v = v_float(json_real_value(j));
        break;
    case JSON_STRING:
        v = v_str(str_wrap(r, json_string_value(j), json_string_length(j)));
        break;
    case JSON_ARRAY:
        v = seq_new(r, T_LIST, json_array_size(j));
        json_array_foreach(j, i, item) seq_add(r, v.seq, json_value(r, item));
        break;
    case JSON_OBJECT:
        v = v_dict(dict_new(r));
        json_object_keylen_foreach((json_t *)j, key, len, item)
            dict_set(r, v.dict, v_str(str_wrap(r, key, len)), json_value(r, item));
        break;
    }
    run_leave(r);
    return v;
}
