/* SPDX-License-Identifier: Apache-2.0 */
/* Opening an image, looking things up in it, and the working memory of calls. */
#include "model/tokenizer/internal.h"

#include <errno.h>
#include <string.h>

#include "model/tokenizer/unicode.h"

static void scratch_free(struct scratch *s);

/* Working memory beyond this is not kept for the next call. */
#define SCRATCH_KEEP (8u << 20)

static void open_sections(struct tokenizer *t, const void *image)
{
    const char *base = image;
    const struct image_header *h = image;
    t->h = h;
    t->strings = base + h->strings.off;
    t->tokens = (const void *)(base + h->tokens.off);
    t->vocab = (const void *)(base + h->vocab.off);
    t->slots = (const void *)(base + h->slots.off);
    t->merges = (const void *)(base + h->merges.off);
    t->ranks = (const void *)(base + h->ranks.off);
    t->added = (const void *)(base + h->added.off);
    t->norm = (const void *)(base + h->comps.off);
    t->pre = t->norm + h->n_norm;
    t->dec = t->pre + h->n_pre;
    t->post = (const void *)(base + h->post.off);
    t->pairs = h->pairs.n ? (const uint8_t *)base + h->pairs.off : NULL;
    t->known = h->known.n ? (const uint8_t *)base + h->known.off : NULL;
}

/* Patterns are sorted, so those of one first byte are neighbours. */
static void index_added(struct tokenizer *t)
{
    for (int set = 0; set < 2; set++) {
        uint32_t i = set ? t->h->n_added_raw : 0, end = set ? t->h->added.n : t->h->n_added_raw;
        for (unsigned b = 0; b < 256; b++) {
            t->added_first[set][b] = i;
            while (i < end && (unsigned char)*str_of(t, t->added[i].pattern) == b)
                i++;
        }
        t->added_first[set][256] = i;
    }
}

static int compile_patterns(struct tokenizer *t, struct error *err)
{
    for (uint32_t i = 0; i < t->h->comps.n; i++) {
        const struct image_comp *c = &t->norm[i];
        if (!(c->flags & COMP_REGEX))
            continue;
        int r = regex_compile(str_of(t, c->pattern), c->pattern.len, &t->regex[i], err);
        if (r < 0)
            return r;
    }
    return 0;
}

/* A tokenizer on an image that was checked. */
static int open_image(const void *image, struct tokenizer **ret_tokenizer, struct error *err)
{
    _cleanup_(tokenizer_freep) struct tokenizer *t = mem_alloc(1, sizeof *t);
    if (!t)
        return error_set(err, ENOMEM, "no memory for a tokenizer");
    open_sections(t, image);
    index_added(t);
    int r = compile_patterns(t, err);
    if (r < 0)
        return r;
    *ret_tokenizer = TAKE(t);
    return 0;
}

int tokenizer_map(const void *image, size_t len, struct tokenizer **ret_tokenizer,
                  struct error *err)
{
    int r = image_check(image, len, err);
    return r < 0 ? r : open_image(image, ret_tokenizer, err);
}

int tokenizer_take(void *image, size_t len, void (*release)(void *image, size_t len),
                   struct tokenizer **ret_tokenizer, struct error *err)
{
    int r = image_check_frame(image, len, err);
    if (r >= 0)
        r = open_image(image, ret_tokenizer, err);
    if (r >= 0)
        (*ret_tokenizer)->release = release;
    return r;
}

void tokenizer_free(struct tokenizer *t)
{
    if (!t)
        return;
    for (size_t i = 0; i < IMAGE_MAX_COMPS; i++)
        regex_free(t->regex[i]);
    scratch_free(atomic_load(&t->spare));
    if (t->release)
        t->release((void *)t->h, t->h->total_len);
    free(t);
}

void tokenizer_image(const struct tokenizer *t, const void **ret_image, size_t *ret_len)
{
    *ret_image = t->h;
    *ret_len = t->h->total_len;
}

uint32_t tokenizer_vocab_size(const struct tokenizer *t)
{
    return t->h->n_ids;
}

const char *tokenizer_token_text(const struct tokenizer *t, uint32_t id, size_t *ret_len)
{
    if (id >= t->h->n_ids || !(t->tokens[id].flags & TOKEN_PRESENT))
        return NULL;
    *ret_len = t->tokens[id].text.len;
    return str_of(t, t->tokens[id].text);
}

bool tokenizer_is_special(const struct tokenizer *t, uint32_t id)
{
    return id < t->h->n_ids && (t->tokens[id].flags & TOKEN_SPECIAL);
}

uint32_t vocab_find(const struct tokenizer *t, const char *key, size_t len)
{
    uint32_t mask = t->h->slots.n - 1, i = (uint32_t)checksum_of(key, len) & mask;
    for (; t->slots[i]; i = (i + 1) & mask) {
        const struct image_vocab *v = &t->vocab[t->slots[i] - 1];
        if (v->key.len == len && !memcmp(str_of(t, v->key), key, len))
            return v->id;
    }
    return NO_ID;
}

/* The spelling of a byte-level token as raw bytes; false when it has another character. */
static bool spelled_bytes(const char *s, size_t len, struct buffer *out)
{
    for (size_t i = 0; i < len;) {
        uint32_t c;
        i += utf8_get(s + i, &c);
        int byte = byte_level_byte(c);
        char b = (char)byte;
        if (byte < 0 || buffer_append(out, &b, 1) < 0)
            return false;
    }
    return true;
}

int64_t tokenizer_token_id(const struct tokenizer *t, const char *content, size_t len)
{
    _cleanup_(buffer_free) struct buffer bytes = {0};
    uint32_t id = NO_ID;
    if (!utf8_valid(content, len))
        return -1;
    /* Added tokens first; they are few. */
    for (uint32_t i = 0; i < t->h->added.n; i++) {
        struct image_str text = t->tokens[t->added[i].id].text;
        if (text.len == len && !memcmp(str_of(t, text), content, len))
            return t->added[i].id;
    }
    if (!(t->h->flags & FLAG_BYTES))
        id = vocab_find(t, content, len);
    else if (spelled_bytes(content, len, &bytes) && bytes.len)
        id = vocab_find(t, bytes.data, bytes.len);
    return id == NO_ID ? -1 : (int64_t)id;
}

int ids_reserve(struct ids *v, size_t extra)
{
    uint64_t need;
    if (!size_add(v->n, extra, &need))
        return -ENOMEM;
    if (need <= v->cap)
        return 0;
    size_t cap = MAX(need, v->cap + v->cap / 2 + 16);
    if (cap > PTRDIFF_MAX / sizeof *v->data)
        return -ENOMEM;
    uint32_t *data = realloc(v->data, cap * sizeof *data);
    if (!data)
        return -ENOMEM;
    v->data = data;
    v->cap = cap;
    return 0;
}

struct scratch *scratch_take(const struct tokenizer *t)
{
    /* The spare is a cache beside an immutable tokenizer, hence the cast. */
    struct scratch *s = atomic_exchange(&((struct tokenizer *)t)->spare, NULL);
    if (s)
        return s;
    s = mem_alloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->regex = regex_scratch_new();
    s->cache = mem_alloc(CACHE_SLOTS, sizeof *s->cache);
    if (!s->regex || !s->cache) {
        scratch_free(s);
        return NULL;
    }
    return s;
}

static size_t scratch_size(const struct scratch *s)
{
    size_t n = s->norm[0].cap + s->norm[1].cap + s->decomposed.cap +
               s->symbols_cap * sizeof *s->symbols + s->queue_cap * sizeof *s->queue;
    for (size_t i = 0; i < IMAGE_MAX_COMPS; i++)
        n += s->stage[i].cap;
    return n;
}

void scratch_give(const struct tokenizer *t, struct scratch *s)
{
    struct scratch *none = NULL;
    if (scratch_size(s) > SCRATCH_KEEP ||
        !atomic_compare_exchange_strong(&((struct tokenizer *)t)->spare, &none, s))
        scratch_free(s);
}

static void scratch_free(struct scratch *s)
{
    if (!s)
        return;
    regex_scratch_free(s->regex);
    buffer_free(&s->norm[0]);
    buffer_free(&s->norm[1]);
    buffer_free(&s->decomposed);
    for (size_t i = 0; i < IMAGE_MAX_COMPS; i++)
        buffer_free(&s->stage[i]);
    free(s->cache);
    free(s->symbols);
    free(s->queue);
    free(s);
}

static int literal_find(const char *pattern, size_t n, const char *text, size_t len, size_t from,
                        size_t *ret_start, size_t *ret_end)
{
    const char *p = n ? memmem(text + from, len - from, pattern, n) : text + from;
    if (!p)
        return 0;
    *ret_start = (size_t)(p - text);
    *ret_end = *ret_start + n;
    return 1;
}

int comp_find(const struct tokenizer *t, const struct image_comp *c, struct regex_scratch *s,
              const char *text, size_t len, struct finder *f, size_t *ret_start, size_t *ret_end,
              struct error *err)
{
    const struct regex *re = t->regex[c - t->norm];
    while (f->pos <= len) {
        size_t start, end;
        int r = re ? regex_find(re, s, text, len, f->pos, &start, &end, err)
                   : literal_find(str_of(t, c->pattern), c->pattern.len, text, len, f->pos, &start,
                                  &end);
        if (r <= 0)
            return r;
        if (start == end && end == f->last_end) {
            /* An empty match right behind the last one does not count. */
            f->pos += f->pos < len ? utf8_len(text[f->pos]) : 1;
            continue;
        }
        f->pos = f->last_end = end;
        *ret_start = start;
        *ret_end = end;
        return 1;
    }
    return 0;
}
