/* SPDX-License-Identifier: Apache-2.0 */
#include "model/grammar/vocab.h"

#include <endian.h>
#include <errno.h>
#include <string.h>

#include "model/grammar/internal.h"

static int no_memory(struct error *err, uint32_t size)
{
    return error_set(err, ENOMEM, "no memory for a trie of %u tokens", size);
}

/* The number of safe characters, 0 when it is not made of them alone. */
static unsigned safe_chars(const uint8_t *s, size_t n)
{
    unsigned count = 0;

    for (size_t at = 0; at < n; count++) {
        uint32_t c;
        size_t len = text_char((const char *)s + at, n - at, &c);
        if (!len || c < 0x20 || c == '"' || c == '\\' || c == 0x2028 || c == 0x2029)
            return 0;
        at += len;
    }
    return count;
}

struct sortable {
    uint64_t key; /* the first 8 bytes */
    uint32_t token, len;
    const uint8_t *bytes;
};

static int by_bytes(const void *a, const void *b)
{
    const struct sortable *x = a, *y = b;

    if (x->key != y->key)
        return x->key < y->key ? -1 : 1;
    int r = memcmp(x->bytes, y->bytes, MIN(x->len, y->len));
    if (r)
        return r;
    if (x->len != y->len)
        return x->len < y->len ? -1 : 1;
    return x->token < y->token ? -1 : 1;
}

static struct sortable sortable(const struct vocab *v, uint32_t token)
{
    struct sortable s = {.token = token,
                         .len = v->first[token + 1] - v->first[token],
                         .bytes = v->bytes + v->first[token]};
    uint8_t key[8] = {0};

    memcpy(key, s.bytes, MIN(s.len, 8));
    memcpy(&s.key, key, 8);
    s.key = be64toh(s.key);
    return s;
}

static uint32_t common(const struct sortable *x, const struct sortable *y)
{
    uint32_t n = 0;
    while (n < x->len && n < y->len && x->bytes[n] == y->bytes[n])
        n++;
    return n;
}

/* Sorted tokens to a trie. */
static bool make_trie(struct vocab *v, const struct sortable *t, uint32_t n, struct trie *ret)
{
    uint32_t open[TOKEN_BYTES_MAX + 1]; /* the nodes of the last token */
    size_t total = 0, used = 0;

    for (uint32_t i = 0; i < n; i++)
        total += t[i].len - (i ? common(&t[i - 1], &t[i]) : 0);
    if (total > UINT32_MAX || !(ret->nodes = mem_alloc(total + 1, sizeof *ret->nodes)))
        return false;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t shared = i ? common(&t[i - 1], &t[i]) : 0;
        if (i && shared == t[i].len) { /* the same bytes, since it is sorted */
            struct trie_node *last = &ret->nodes[open[shared - 1]];
            v->same[t[i].token] = last->token;
            last->token = t[i].token;
            continue;
        }
        for (uint32_t d = shared; i && d < t[i - 1].len; d++)
            ret->nodes[open[d]].end = (uint32_t)used;
        for (uint32_t d = shared; d < t[i].len; d++) {
            open[d] = (uint32_t)used;
            ret->nodes[used++] =
                (struct trie_node){.token = NO_TOKEN, .byte = t[i].bytes[d], .depth = (uint8_t)d};
        }
        ret->nodes[used - 1].token = t[i].token;
    }
    for (uint32_t d = 0; n && d < t[n - 1].len; d++)
        ret->nodes[open[d]].end = (uint32_t)used;
    ret->n = (uint32_t)used;
    return true;
}

static int make_tries(struct vocab *v, struct error *err)
{
    struct sortable *all = mem_alloc(v->size + 1, sizeof *all);
    uint32_t n = 0, unsafe = 0;

    if (!all)
        return no_memory(err, v->size);
    for (uint32_t i = 0; i < v->size; i++) {
        if (v->first[i] == v->first[i + 1])
            continue;
        all[n++] = sortable(v, i);
    }
    qsort(all, n, sizeof *all, by_bytes);
    bool ok = make_trie(v, all, n, &v->all);
    for (uint32_t i = 0; i < n; i++) {
        unsigned k = safe_chars(all[i].bytes, all[i].len);
        if (k && k <= SAFE_MAX)
            v->slices[(size_t)(k - 1) * v->words + all[i].token / 64] |= UINT64_C(1)
                                                                         << all[i].token % 64;
        else
            all[unsafe++] = all[i];
    }
    for (size_t i = v->words; i < (size_t)SAFE_MAX * v->words; i++)
        v->slices[i] |= v->slices[i - v->words];
    ok = ok && make_trie(v, all, unsafe, &v->unsafe);
    free(all);
    return ok ? 0 : no_memory(err, v->size);
}

static struct vocab *allocate(uint32_t size)
{
    struct vocab *v = mem_alloc(1, sizeof *v);

    if (!v)
        return NULL;
    v->size = size;
    v->words = (size + 63) / 64;
    v->first = mem_alloc((size_t)size + 1, sizeof *v->first);
    v->same = mem_alloc((size_t)size + 1, sizeof *v->same);
    v->slices = mem_alloc((size_t)SAFE_MAX * v->words + 1, sizeof *v->slices);
    if (v->first && v->same && v->slices) {
        memset(v->same, 0xFF, size * sizeof *v->same);
        return v;
    }
    vocab_free(v);
    return NULL;
}

int vocab_from_bytes(const uint8_t *bytes, const uint32_t *first, uint32_t size, struct vocab **ret,
                     struct error *err)
{
    _cleanup_(vocab_freep) struct vocab *v = allocate(size);
    uint32_t used = 0;

    if (!v || !(v->bytes = mem_alloc((size_t)first[size] + 1, 1)))
        return no_memory(err, size);
    for (uint32_t i = 0; i < size; i++) {
        uint32_t len = first[i + 1] - first[i];
        v->first[i] = used;
        if (len > TOKEN_BYTES_MAX)
            continue;
        memcpy(v->bytes + used, bytes + first[i], len);
        used += len;
    }
    v->first[size] = used;
    int r = make_tries(v, err);
    if (r == 0)
        *ret = TAKE(v);
    return r;
}

int vocab_new(const struct tokenizer *tokenizer, uint32_t size, struct vocab **ret,
              struct error *err)
{
    _cleanup_(buffer_free) struct buffer bytes = {0};
    _cleanup_free_ uint32_t *first = mem_alloc((size_t)size + 1, sizeof *first);
    uint32_t known = tokenizer_vocab_size(tokenizer);
    int r = 0;

    if (!first)
        return no_memory(err, size);
    for (uint32_t i = 0; i < size && r == 0; i++) {
        first[i] = (uint32_t)bytes.len;
        if (i < known && !tokenizer_is_special(tokenizer, i))
            r = tokenizer_token_bytes(tokenizer, i, &bytes, err);
        if (r == 0 && bytes.len > UINT32_MAX)
            r = no_memory(err, size);
    }
    if (r < 0)
        return r;
    first[size] = (uint32_t)bytes.len;
    return vocab_from_bytes((const uint8_t *)bytes.data, first, size, ret, err);
}

void vocab_free(struct vocab *v)
{
    if (!v)
        return;
    free(v->first);
    free(v->bytes);
    free(v->same);
    free(v->all.nodes);
    free(v->unsafe.nodes);
    free(v->slices);
    free(v);
}

uint32_t vocab_size(const struct vocab *v)
{
    return v->size;
}

const uint8_t *vocab_token(const struct vocab *v, uint32_t token, size_t *ret_len)
{
    *ret_len = token < v->size ? v->first[token + 1] - v->first[token] : 0;
    return v->bytes + (*ret_len ? v->first[token] : 0);
}
