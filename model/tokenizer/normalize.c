/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Normalizers. Unicode normal forms (UAX 15) come from utf8proc's tables, character by character;
 * the canonical ordering is ours because utf8proc's takes quadratic time on long runs of marks.
 */
#include "model/tokenizer/internal.h"

#include <errno.h>
#include <string.h>
#include <utf8proc.h>

#include "model/tokenizer/unicode.h"

struct text {
    const char *s;
    size_t len;
};

static int no_memory(struct error *err, size_t len)
{
    return error_set(err, ENOMEM, "no memory to normalize a text of %zu bytes", len);
}

static int too_long(struct error *err)
{
    return error_set(err, E2BIG, "the tokenizer's normalizers make the text too long");
}

static int ccc(int32_t c)
{
    return c < 0x300 ? 0 : utf8proc_get_property(c)->combining_class;
}

/* Stable counting sort of a long run of marks by combining class. */
static int order_long(int32_t *c, size_t n)
{
    size_t at[257] = {0};
    int32_t *sorted = mem_alloc(n, sizeof *sorted);
    if (!sorted)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++)
        at[ccc(c[i]) + 1]++;
    for (size_t i = 0; i < 256; i++)
        at[i + 1] += at[i];
    for (size_t i = 0; i < n; i++)
        sorted[at[ccc(c[i])]++] = c[i];
    memcpy(c, sorted, n * sizeof *c);
    free(sorted);
    return 0;
}

static void order_short(int32_t *c, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        int32_t x = c[i];
        int k = ccc(x);
        size_t j = i;
        for (; j > 0 && ccc(c[j - 1]) > k; j--)
            c[j] = c[j - 1];
        c[j] = x;
    }
}

/* The canonical ordering algorithm: within each run of non-starters. */
static int order(int32_t *c, size_t n)
{
    for (size_t i = 0; i < n;) {
        size_t from = i;
        while (i < n && ccc(c[i]) != 0)
            i++;
        int r = 0;
        if (i - from > 32)
            r = order_long(c + from, i - from);
        else if (i - from > 1)
            order_short(c + from, i - from);
        if (r < 0)
            return r;
        i += i == from;
    }
    return 0;
}

/* One span in a normal form, appended to *out. */
static int normal_span(struct scratch *s, const char *text, size_t len, utf8proc_option_t options,
                       struct buffer *out)
{
    /* No character decomposes to more than 18 (U+FDFA). */
    struct buffer *b = &s->decomposed;
    size_t n = 0;
    int last_class = 0;
    for (size_t i = 0; i < len;) {
        uint32_t c;
        b->len = n * sizeof(int32_t);
        if (buffer_reserve(b, 20 * sizeof(int32_t)) < 0)
            return -ENOMEM;
        i += utf8_get(text + i, &c);
        utf8proc_ssize_t k = utf8proc_decompose_char((int32_t)c, (int32_t *)(void *)b->data + n, 19,
                                                     options, &last_class);
        if (k < 0 || k > 19)
            return -EILSEQ;
        n += (size_t)k;
    }
    int32_t *cs = (void *)b->data;
    int r = order(cs, n);
    if (r < 0)
        return r;
    utf8proc_ssize_t bytes = utf8proc_reencode(cs, (utf8proc_ssize_t)n, options);
    if (bytes < 0)
        return -EILSEQ;
    return buffer_append(out, b->data, (size_t)bytes);
}

static size_t next_non_ascii(const char *s, size_t i, size_t n)
{
    while (i < n && (unsigned char)s[i] < 0x80)
        i++;
    return i;
}

/*
 * ASCII characters are starters that nothing composes with from the left, so only spans of others,
 * each with the one ASCII character before it, need work.
 */
static int normal_form(struct scratch *s, struct text *t, unsigned options, struct buffer *out)
{
    size_t done = 0, i;
    int r = 0;
    while ((i = next_non_ascii(t->s, done, t->len)) < t->len && r >= 0) {
        size_t from = i - (i > done), to = i;
        while (to < t->len && (unsigned char)t->s[to] >= 0x80)
            to++;
        r = buffer_append(out, t->s + done, from - done);
        if (r >= 0)
            r = normal_span(s, t->s + from, to - from, (utf8proc_option_t)options, out);
        done = to;
    }
    return r < 0 ? r : buffer_append(out, t->s + done, t->len - done);
}

static int put_cp(struct buffer *out, uint32_t c)
{
    char bytes[4];
    return buffer_append(out, bytes, utf8_put(c, bytes));
}

/* The normalizers that go character by character. */
static int by_character(const struct image_comp *c, struct text *t, struct buffer *out)
{
    int r = 0;
    for (size_t i = 0; i < t->len && r >= 0;) {
        uint32_t cp, low[2];
        size_t n = utf8_get(t->s + i, &cp);
        if (c->kind == NORM_LOWERCASE) {
            size_t k = uni_lower(cp, low);
            r = put_cp(out, low[0]);
            if (k == 2 && r >= 0)
                r = put_cp(out, low[1]);
        } else if (c->kind == NORM_STRIP_ACCENTS) {
            r = uni_is_mark(cp) ? 0 : buffer_append(out, t->s + i, n);
        } else { /* NORM_BYTE_LEVEL */
            for (size_t k = 0; k < n && r >= 0; k++)
                r = put_cp(out, byte_level_char((uint8_t)t->s[i + k]));
        }
        i += n;
    }
    return r;
}

/*
 * Strip removes white space at the ends. The reference counts the end of the text in bytes where it
 * means characters, so that behind k bytes of longer characters it leaves k spaces more at the
 * right when it strips on that side; the ids depend on it.
 */
static int strip(const struct image_comp *c, struct text *t, bool *first, struct buffer *out)
{
    size_t lead = 0, trail = 0, i = 0, end = t->len, n_chars = 0;
    uint32_t cp;
    while ((c->flags & COMP_LEFT) && i < t->len) {
        size_t n = utf8_get(t->s + i, &cp);
        if (!uni_is_space(cp))
            break;
        i += n;
        lead++;
    }
    while ((c->flags & COMP_RIGHT) && end > 0) {
        size_t n = utf8_last_len(t->s, end);
        utf8_get(t->s + end - n, &cp);
        if (!uni_is_space(cp))
            break;
        end -= n;
        trail++;
    }
    *first = *first && !lead;
    int r = 0;
    for (i = 0; i < t->len && r >= 0; n_chars++) {
        size_t n = utf8_get(t->s + i, &cp);
        if (n_chars >= lead && n_chars < t->len - trail)
            r = buffer_append(out, t->s + i, n);
        i += n;
    }
    return r;
}

static int replace(const struct tokenizer *tok, struct scratch *s, const struct image_comp *c,
                   struct text *t, bool *first, struct buffer *out, struct error *err)
{
    struct finder f = FINDER_START;
    size_t done = 0, start, end;
    int r;
    while ((r = comp_find(tok, c, s->regex, t->s, t->len, &f, &start, &end, err)) > 0) {
        if (start == 0 && end > 0 && !c->content.len)
            *first = false;
        if (out->len > IMAGE_MAX_TEXT)
            return too_long(err);
        if (buffer_append(out, t->s + done, start - done) < 0 ||
            buffer_append(out, str_of(tok, c->content), c->content.len) < 0)
            return -ENOMEM;
        done = end;
    }
    return r < 0 ? r : buffer_append(out, t->s + done, t->len - done);
}

static int step(const struct tokenizer *tok, struct scratch *s, const struct image_comp *c,
                struct text *t, bool *first, struct buffer *out, struct error *err)
{
    int r;
    switch (c->kind) {
    case NORM_NFC:
        return normal_form(s, t, UTF8PROC_STABLE | UTF8PROC_COMPOSE, out);
    case NORM_NFD:
        return normal_form(s, t, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE, out);
    case NORM_NFKC:
        return normal_form(s, t, UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT, out);
    case NORM_NFKD:
        return normal_form(s, t, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT, out);
    case NORM_STRIP:
        return strip(c, t, first, out);
    case NORM_REPLACE:
        return replace(tok, s, c, t, first, out, err);
    case NORM_PREPEND:
        r = buffer_append(out, str_of(tok, c->content), c->content.len);
        return r < 0 ? r : buffer_append(out, t->s, t->len);
    default:
        return by_character(c, t, out);
    }
}

/* True when the component leaves this text as it is, and no copy is needed. */
static bool is_noop(const struct image_comp *c, const struct text *t)
{
    if (!t->len)
        return c->kind != NORM_REPLACE;
    return c->kind <= NORM_NFKD && next_non_ascii(t->s, 0, t->len) == t->len;
}

int normalize(const struct tokenizer *tok, struct scratch *s, const char *text, size_t len,
              const char **ret_text, size_t *ret_len, bool *first, struct error *err)
{
    struct text t = {text, len};
    unsigned turn = 0;
    for (uint32_t i = 0; i < tok->h->n_norm; i++) {
        const struct image_comp *c = &tok->norm[i];
        struct buffer *out = &s->norm[turn];
        if (is_noop(c, &t))
            continue;
        out->len = 0;
        if (buffer_reserve(out, t.len + t.len / 8 + 16) < 0)
            return no_memory(err, t.len);
        int r = step(tok, s, c, &t, first, out, err);
        if (r >= 0 && out->len > IMAGE_MAX_TEXT)
            r = too_long(err);
        if (r < 0)
            return r == -ENOMEM ? no_memory(err, t.len) : r;
        t = (struct text){out->data, out->len};
        turn ^= 1;
    }
    *ret_text = t.s;
    *ret_len = t.len;
    return 0;
}
