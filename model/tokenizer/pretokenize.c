/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pre-tokenizers: each cuts a piece and hands the parts to the next, the last one to the model.
 * Parts are handed on as they are found; only the one that later text may still extend waits.
 */
#include "model/tokenizer/internal.h"

#include <errno.h>
#include <string.h>

#include "model/tokenizer/unicode.h"

/* Finds the matches that a component splits at. */
struct matcher {
    const struct image_comp *c;
    struct finder f;
};

/* A cut in progress: what a behaviour still holds. */
struct cut {
    struct encoder *e;
    uint32_t next; /* the component that gets the parts */
    const char *text;
    bool first;
    enum split_behavior behavior;
    bool have, previous;
    size_t start, end;
};

static bool char_matches(const struct encoder *e, const struct image_comp *c, const char *s,
                         size_t n, uint32_t cp)
{
    switch (c->kind) {
    case PRE_DIGITS:
        return uni_is_numeric(cp);
    case PRE_PUNCTUATION:
        return uni_is_punct(cp);
    case PRE_WHITESPACE_SPLIT:
        return uni_is_space(cp);
    default: /* PRE_METASPACE */
        return n == c->pattern.len && !memcmp(s, str_of(e->t, c->pattern), n);
    }
}

static int next_match(struct encoder *e, struct matcher *m, const char *text, size_t len,
                      size_t *ret_start, size_t *ret_end)
{
    if (m->c->kind == PRE_SPLIT || m->c->kind == PRE_BYTE_LEVEL)
        return comp_find(e->t, m->c, e->s->regex, text, len, &m->f, ret_start, ret_end, e->err);
    while (m->f.pos < len) {
        uint32_t cp;
        size_t at = m->f.pos, n = utf8_get(text + at, &cp);
        m->f.pos += n;
        if (char_matches(e, m->c, text + at, n, cp)) {
            *ret_start = at;
            *ret_end = at + n;
            return 1;
        }
    }
    return 0;
}

static int cut_out(struct cut *c, size_t start, size_t end)
{
    if (start == end)
        return 0;
    return pretokenize(c->e, c->next, c->text + start, end - start, c->first && start == 0);
}

static int cut_flush(struct cut *c)
{
    if (!c->have)
        return 0;
    c->have = false;
    return cut_out(c, c->start, c->end);
}

static void cut_hold(struct cut *c, size_t start, size_t end)
{
    c->have = true;
    c->start = start;
    c->end = end;
}

/* A match belongs to the gap in front of it, unless another match stands between. */
static int merged_previous(struct cut *c, size_t start, size_t end, bool match)
{
    if (match && !c->previous && c->have) {
        c->end = end;
        return 0;
    }
    int r = cut_flush(c);
    cut_hold(c, start, end);
    return r;
}

/* A match belongs to the gap behind it. */
static int merged_next(struct cut *c, size_t start, size_t end, bool match)
{
    if (!match && c->have) {
        c->end = end;
        return cut_flush(c);
    }
    int r = cut_flush(c);
    cut_hold(c, start, end);
    return match || r < 0 ? r : cut_flush(c);
}

static int contiguous(struct cut *c, size_t start, size_t end, bool match)
{
    if (match == c->previous && c->have) {
        c->end = end;
        return 0;
    }
    int r = cut_flush(c);
    cut_hold(c, start, end);
    return r;
}

/* Takes the next span, a match or the gap between two. */
static int cut_span(struct cut *c, size_t start, size_t end, bool match)
{
    int r;
    switch (c->behavior) {
    case SPLIT_REMOVED:
        return match ? 0 : cut_out(c, start, end);
    case SPLIT_MERGED_PREVIOUS:
        r = merged_previous(c, start, end, match);
        break;
    case SPLIT_MERGED_NEXT:
        r = merged_next(c, start, end, match);
        break;
    case SPLIT_CONTIGUOUS:
        r = contiguous(c, start, end, match);
        break;
    default:
        return cut_out(c, start, end);
    }
    c->previous = match;
    return r;
}

static int split(struct encoder *e, uint32_t k, enum split_behavior behavior, const char *text,
                 size_t len, bool first)
{
    struct matcher m = {&e->t->pre[k], FINDER_START};
    struct cut c = {.e = e, .next = k + 1, .text = text, .first = first, .behavior = behavior};
    bool invert = m.c->flags & COMP_INVERT;
    size_t done = 0, start, end;
    int r;
    while ((r = next_match(e, &m, text, len, &start, &end)) > 0) {
        if (start > done && (r = cut_span(&c, done, start, invert)) < 0)
            return r;
        if ((r = cut_span(&c, start, end, !invert)) < 0)
            return r;
        done = end;
    }
    if (r >= 0 && done < len)
        r = cut_span(&c, done, len, invert);
    return r < 0 ? r : cut_flush(&c);
}

/* Words are runs of \w, and runs of what is neither \w nor white space. */
static int whitespace(struct encoder *e, uint32_t k, const char *text, size_t len, bool first)
{
    size_t start = 0;
    int current = 0; /* 0: white space, 1: word, 2: other */
    for (size_t i = 0; i <= len;) {
        uint32_t cp = 0;
        size_t n = i < len ? utf8_get(text + i, &cp) : 1;
        int kind = i == len || uni_is_space(cp) ? 0 : uni_is_word(cp) ? 1 : 2;
        if (kind != current) {
            int r = current ? pretokenize(e, k + 1, text + start, i - start, first && !start) : 0;
            if (r < 0)
                return r;
            current = kind;
            start = i;
        }
        i += n;
    }
    return 0;
}

static bool starts_with(const char *text, size_t len, const char *prefix, size_t n)
{
    return len >= n && !memcmp(text, prefix, n);
}

/* Spaces become the replacement, one is put in front, and the text is cut before each. */
static int metaspace(struct encoder *e, uint32_t k, const char *text, size_t len, bool first)
{
    const struct image_comp *c = &e->t->pre[k];
    const char *mark = str_of(e->t, c->pattern);
    struct buffer *b = &e->s->stage[k];
    size_t n = c->pattern.len;
    int r = 0;
    b->len = 0;
    if (c->n == PREPEND_ALWAYS || (c->n == PREPEND_FIRST && first))
        if (text[0] != ' ' && !starts_with(text, len, mark, n))
            r = buffer_append(b, mark, n);
    for (size_t i = 0; i < len && r >= 0;) {
        const char *space = memchr(text + i, ' ', len - i);
        size_t to = space ? (size_t)(space - text) : len;
        r = buffer_append(b, text + i, to - i);
        if (space && r >= 0)
            r = buffer_append(b, mark, n);
        i = to + 1;
    }
    if (r < 0)
        return error_set(e->err, ENOMEM, "no memory for a text of %zu bytes", len);
    if (!(c->flags & COMP_SPLIT))
        return pretokenize(e, k + 1, b->data, b->len, first);
    return split(e, k, SPLIT_MERGED_NEXT, b->data, b->len, first);
}

/* Bytes as printable characters: only where a later component or an affix needs to see them. */
static int spell_bytes(struct encoder *e, uint32_t k, const char *text, size_t len, bool first)
{
    struct buffer *b = &e->s->stage[IMAGE_MAX_COMPS - 1 - k];
    b->len = 0;
    if (len > IMAGE_MAX_TEXT)
        return error_set(e->err, E2BIG, "the tokenizer's components make the text too long");
    for (size_t i = 0; i < len; i++) {
        char c[4];
        size_t n = utf8_put(byte_level_char((uint8_t)text[i]), c);
        if (buffer_append(b, c, n) < 0)
            return error_set(e->err, ENOMEM, "no memory for a text of %zu bytes", len);
    }
    return pretokenize(e, k + 1, b->data, b->len, first);
}

static int byte_level(struct encoder *e, uint32_t k, const char *text, size_t len, bool first)
{
    const struct image_comp *c = &e->t->pre[k];
    struct buffer *b = &e->s->stage[k];
    if ((c->flags & COMP_PREFIX_SPACE) && text[0] != ' ') {
        b->len = 0;
        if (buffer_append(b, " ", 1) < 0 || buffer_append(b, text, len) < 0)
            return error_set(e->err, ENOMEM, "no memory for a text of %zu bytes", len);
        text = b->data;
        len = b->len;
    }
    bool last = k + 1 == e->t->h->n_pre && (e->t->h->flags & FLAG_BYTES);
    if (!(c->flags & COMP_REGEX))
        return last ? bpe_word(e, text, len) : spell_bytes(e, k, text, len, first);
    struct matcher m = {c, FINDER_START};
    size_t done = 0, start, end;
    int r;
    /* The pattern covers any text, but for safety gaps are pieces too. */
    while ((r = next_match(e, &m, text, len, &start, &end)) > 0) {
        size_t bounds[3] = {done, start, end};
        for (int i = 0; i < 2; i++) {
            const char *part = text + bounds[i];
            size_t n = bounds[i + 1] - bounds[i];
            if (!n)
                continue;
            r = last ? bpe_word(e, part, n) : spell_bytes(e, k, part, n, first && !bounds[i]);
            if (r < 0)
                return r;
        }
        done = end;
    }
    if (r < 0 || done == len)
        return r;
    return last ? bpe_word(e, text + done, len - done)
                : spell_bytes(e, k, text + done, len - done, first && !done);
}

int pretokenize(struct encoder *e, uint32_t k, const char *text, size_t len, bool first)
{
    if (k == e->t->h->n_pre)
        return bpe_word(e, text, len);
    const struct image_comp *c = &e->t->pre[k];
    switch (c->kind) {
    case PRE_BYTE_LEVEL:
        return byte_level(e, k, text, len, first);
    case PRE_METASPACE:
        return metaspace(e, k, text, len, first);
    case PRE_WHITESPACE:
        return whitespace(e, k, text, len, first);
    case PRE_DIGITS:
        return split(e, k, c->flags & COMP_INDIVIDUAL ? SPLIT_ISOLATED : SPLIT_CONTIGUOUS, text,
                     len, first);
    case PRE_WHITESPACE_SPLIT:
        return split(e, k, SPLIT_REMOVED, text, len, first);
    default: /* PRE_SPLIT, PRE_PUNCTUATION */
        return split(e, k, (enum split_behavior)c->n, text, len, first);
    }
}
