/* SPDX-License-Identifier: Apache-2.0 */
#include "model/tokenizer/image.h"

#include <errno.h>
#include <string.h>

#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/unicode.h"

#define CHECKED_FROM (offsetof(struct image_header, checksum) + sizeof(uint64_t))

/* The sections: field of the header and of the parts, and the size of an element. */
#define SECTIONS(X)                                                                                \
    X(strings, 1)                                                                                  \
    X(tokens, sizeof(struct image_token))                                                          \
    X(vocab, sizeof(struct image_vocab))                                                           \
    X(slots, sizeof(uint32_t))                                                                     \
    X(merges, sizeof(uint64_t))                                                                    \
    X(ranks, sizeof(uint32_t))                                                                     \
    X(added, sizeof(struct image_added))                                                           \
    X(comps, sizeof(struct image_comp))                                                            \
    X(post, sizeof(struct image_post))                                                             \
    X(pairs, 1)                                                                                    \
    X(known, 1)

void image_parts_free(struct image_parts *p)
{
#define X(name, size) buffer_free(&p->name);
    SECTIONS(X)
#undef X
}

int image_add_string(struct image_parts *p, const char *s, size_t len, struct image_str *ret)
{
    if (p->strings.len + len > UINT32_MAX)
        return -EFBIG;
    *ret = (struct image_str){(uint32_t)p->strings.len, (uint32_t)len};
    return buffer_append(&p->strings, s, len);
}

static void add_section(struct image_section *s, const struct buffer *b, size_t size, char *image,
                        uint64_t *at)
{
    s->off = *at;
    s->n = (uint32_t)(b->len / size);
    if (image && b->len)
        memcpy(image + *at, b->data, b->len);
    *at = size_align(*at + b->len, 8);
}

int image_build(struct image_parts *p, void **ret_image, size_t *ret_len, struct error *err)
{
    uint64_t len = size_align(sizeof p->h, 8);
#define X(name, size) add_section(&p->h.name, &p->name, size, NULL, &len);
    SECTIONS(X)
#undef X
    p->h.magic = IMAGE_MAGIC;
    p->h.version = TOKENIZER_IMAGE_VERSION;
    p->h.header_size = sizeof p->h;
    p->h.total_len = len;
    char *image = mem_alloc(len, 1);
    if (!image)
        return error_set(err, ENOMEM, "no memory for a tokenizer of %llu bytes",
                         (unsigned long long)len);
    uint64_t at = size_align(sizeof p->h, 8);
#define X(name, size) add_section(&p->h.name, &p->name, size, image, &at);
    SECTIONS(X)
#undef X
    memcpy(image, &p->h, sizeof p->h);
    ((struct image_header *)image)->checksum =
        checksum_of(image + CHECKED_FROM, len - CHECKED_FROM);
    *ret_image = image;
    *ret_len = len;
    return 0;
}

static int damaged(struct error *err, const char *what)
{
    return error_set(err, EBADMSG, "tokenizer image is damaged: %s; it must be compiled again",
                     what);
}

static bool section_ok(const struct image_header *h, const struct image_section *s, size_t size)
{
    uint64_t bytes, end;
    return s->off >= sizeof *h && s->off % 8 == 0 && size_mul(s->n, size, &bytes) &&
           size_add(s->off, bytes, &end) && end <= h->total_len;
}

static bool str_ok(const struct image_header *h, struct image_str s)
{
    return s.len <= h->strings.n && s.off <= h->strings.n - s.len;
}

static bool id_ok(const struct image_header *h, uint32_t id)
{
    return id < h->n_ids || id == NO_ID;
}

static bool tables_ok(const struct image_header *h, const char *base)
{
    const struct image_token *tokens = (const void *)(base + h->tokens.off);
    const struct image_vocab *vocab = (const void *)(base + h->vocab.off);
    const uint32_t *slots = (const void *)(base + h->slots.off);
    const uint64_t *merges = (const void *)(base + h->merges.off);
    const uint32_t *ranks = (const void *)(base + h->ranks.off);
    size_t empty = 0;
    bool ok = true;
    for (uint32_t i = 0; i < h->tokens.n; i++)
        ok &= str_ok(h, tokens[i].text);
    for (uint32_t i = 0; i < h->vocab.n; i++)
        ok &= str_ok(h, vocab[i].key) && vocab[i].id < h->n_ids;
    for (uint32_t i = 0; i < h->slots.n; i++) {
        ok &= slots[i] <= h->vocab.n;
        empty += slots[i] == 0;
    }
    ok &= empty > 0; /* or a look-up never ends */
    empty = 0;
    for (uint32_t i = 0; i < h->merges.n; i++) {
        uint64_t rank = merges[i] & ((1u << MERGE_RANK_BITS) - 1);
        ok &= merges[i] == MERGE_EMPTY || rank < h->ranks.n;
        empty += merges[i] == MERGE_EMPTY;
    }
    for (uint32_t i = 0; i < h->ranks.n; i++)
        ok &= ranks[i] < h->n_ids;
    ok &= empty > 0;
    for (int i = 0; i < 256; i++)
        ok &= id_ok(h, h->byte_token[i]) && id_ok(h, h->byte_fallback[i]);
    return ok;
}

static bool added_ok(const struct image_header *h, const char *base)
{
    const struct image_added *added = (const void *)(base + h->added.off);
    for (uint32_t i = 0; i < h->added.n; i++) {
        if (!str_ok(h, added[i].pattern) || !added[i].pattern.len || added[i].id >= h->n_ids)
            return false;
    }
    return h->n_added_raw <= h->added.n;
}

static bool text_ok(const struct image_header *h, const char *base, struct image_str s)
{
    return str_ok(h, s) && utf8_valid(base + h->strings.off + s.off, s.len);
}

static bool comps_ok(const struct image_header *h, const char *base)
{
    const struct image_comp *comps = (const void *)(base + h->comps.off);
    const struct image_post *post = (const void *)(base + h->post.off);
    if (h->comps.n > IMAGE_MAX_COMPS || h->n_norm > h->comps.n || h->n_pre > IMAGE_MAX_PRE ||
        h->n_pre > h->comps.n - h->n_norm || h->n_dec != h->comps.n - h->n_norm - h->n_pre)
        return false;
    for (uint32_t i = 0; i < h->comps.n; i++) {
        const struct image_comp *c = &comps[i];
        enum comp_kind low = i < h->n_norm              ? NORM_NFC
                             : i < h->n_norm + h->n_pre ? PRE_SPLIT
                                                        : DEC_BYTE_LEVEL;
        enum comp_kind high = low == NORM_NFC    ? PRE_SPLIT
                              : low == PRE_SPLIT ? DEC_BYTE_LEVEL
                                                 : COMP_KINDS;
        if (c->kind < low || c->kind >= high || !text_ok(h, base, c->pattern) ||
            !text_ok(h, base, c->content))
            return false;
        if ((c->kind == PRE_SPLIT || c->kind == PRE_PUNCTUATION) && c->n >= SPLIT_BEHAVIORS)
            return false;
        if ((c->kind == PRE_METASPACE || c->kind == DEC_METASPACE) &&
            (c->n >= PREPEND_SCHEMES || !c->pattern.len))
            return false;
        if (c->kind == DEC_STRIP && !c->content.len)
            return false;
    }
    if ((h->flags & FLAG_BYTES) &&
        (!h->n_pre || comps[h->n_norm + h->n_pre - 1].kind != PRE_BYTE_LEVEL))
        return false;
    for (uint32_t i = 0, sequences = 0; i < h->post.n; i++) {
        if (post[i].kind > POST_END || (post[i].kind == POST_ID && post[i].id >= h->n_ids))
            return false;
        sequences = post[i].kind == POST_END ? 0 : sequences + (post[i].kind == POST_SEQUENCE);
        if (sequences > 1)
            return false;
    }
    return !h->post.n || post[h->post.n - 1].kind == POST_END;
}

static int check_header(const struct image_header *h, size_t len, struct error *err)
{
    if (len < sizeof *h || (uintptr_t)h % 8)
        return damaged(err, "too short");
    if (h->magic != IMAGE_MAGIC)
        return damaged(err, "no magic number");
    if (h->version != TOKENIZER_IMAGE_VERSION || h->header_size != sizeof *h)
        return error_set(err, ESTALE, "tokenizer image is of version %u, this build reads %u",
                         h->version, TOKENIZER_IMAGE_VERSION);
    if (h->total_len != len)
        return damaged(err, "wrong length");
    return 0;
}

static int check_frame(const struct image_header *h, struct error *err)
{
    const char *base = (const void *)h;
#define X(name, size)                                                                              \
    if (!section_ok(h, &h->name, size))                                                            \
        return damaged(err, "section " #name " lies outside");
    SECTIONS(X)
#undef X
    if (h->n_ids > IMAGE_MAX_IDS || h->n_ids != h->tokens.n || !id_ok(h, h->unk_id) ||
        (h->slots.n & (h->slots.n - 1)) || !h->slots.n || !h->merges.n ||
        h->merges.n % MERGE_BUCKET || h->ranks.n > IMAGE_MAX_RANKS ||
        (h->pairs.n && h->pairs.n != PAIRS_BYTES) || h->known.n != (h->pairs.n ? KNOWN_BYTES : 0) ||
        !text_ok(h, base, h->prefix) || !text_ok(h, base, h->suffix))
        return damaged(err, "impossible counts");
    if (!added_ok(h, base))
        return damaged(err, "an added token points outside");
    if (!comps_ok(h, base))
        return damaged(err, "an impossible component");
    return 0;
}

int image_check_frame(const void *image, size_t len, struct error *err)
{
    int r = check_header(image, len, err);
    return r < 0 ? r : check_frame(image, err);
}

int image_check(const void *image, size_t len, struct error *err)
{
    const struct image_header *h = image;
    const char *base = image;
    int r = check_header(h, len, err);
    if (r < 0)
        return r;
    if (checksum_of(base + CHECKED_FROM, len - CHECKED_FROM) != h->checksum)
        return damaged(err, "wrong checksum");
    r = check_frame(h, err);
    if (r < 0)
        return r;
    if (!tables_ok(h, base))
        return damaged(err, "a table points outside");
    return 0;
}
