/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Added tokens: found leftmost-longest, from the left, without overlap. The patterns of a set are
 * sorted, so that a prefix of the text narrows them to a range, byte by byte.
 */
#include "model/tokenizer/internal.h"

#include <string.h>

#include "model/tokenizer/unicode.h"

/* First pattern in [low, high) whose byte `at` is >= b; all are equal before it and may end there.
 */
static uint32_t narrow(const struct tokenizer *t, uint32_t low, uint32_t high, size_t at, int b)
{
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        struct image_str p = t->added[mid].pattern;
        int x = at < p.len ? (unsigned char)str_of(t, p)[at] : -1;
        if (x < b)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

/* The longest pattern of the set that the text starts with, or NULL. */
static const struct image_added *longest(const struct tokenizer *t, int set, const char *text,
                                         size_t len)
{
    const struct image_added *best = NULL;
    unsigned b = (unsigned char)text[0];
    uint32_t low = t->added_first[set][b], high = t->added_first[set][b + 1];
    for (size_t at = 1; low < high; at++) {
        if (t->added[low].pattern.len == at)
            best = &t->added[low++];
        if (at == len)
            break;
        b = (unsigned char)text[at];
        low = narrow(t, low, high, at, (int)b);
        high = narrow(t, low, high, at, (int)b + 1);
    }
    return best;
}

static const struct image_added *find(const struct tokenizer *t, int set, const char *text,
                                      size_t len, size_t from, size_t *ret_start)
{
    const uint32_t *first = t->added_first[set];
    for (size_t i = from; i < len; i++) {
        unsigned char b = (unsigned char)text[i];
        if (first[b] == first[b + 1])
            continue;
        const struct image_added *a = longest(t, set, text + i, len - i);
        if (a)
            return *ret_start = i, a;
    }
    return NULL;
}

static bool word_before(const char *text, size_t at)
{
    uint32_t c;
    if (!at)
        return false;
    utf8_get(text + at - utf8_last_len(text, at), &c);
    return uni_is_word(c);
}

static bool word_behind(const char *text, size_t len, size_t at)
{
    uint32_t c;
    if (at == len)
        return false;
    utf8_get(text + at, &c);
    return uni_is_word(c);
}

static size_t strip_left(const char *text, size_t at, size_t low)
{
    while (at > low) {
        uint32_t c;
        size_t n = utf8_last_len(text, at);
        utf8_get(text + at - n, &c);
        if (!uni_is_space(c))
            break;
        at -= n;
    }
    return at < low ? low : at;
}

static size_t strip_right(const char *text, size_t len, size_t at)
{
    while (at < len) {
        uint32_t c;
        size_t n = utf8_get(text + at, &c);
        if (!uni_is_space(c))
            break;
        at += n;
    }
    return at;
}

int added_split(struct encoder *e, int set, const char *text, size_t len, bool first, gap_func gap)
{
    const struct tokenizer *t = e->t;
    if (t->added_first[set][0] == t->added_first[set][256])
        return len ? gap(e, text, len, first) : 0;
    size_t done = 0, from = 0, start;
    const struct image_added *a;
    int r = 0;
    while ((a = find(t, set, text, len, from, &start)) && r >= 0) {
        size_t stop = start + a->pattern.len;
        from = stop;
        if ((a->flags & ADDED_SINGLE_WORD) &&
            (word_before(text, start) || word_behind(text, len, stop)))
            continue;
        if (a->flags & ADDED_LSTRIP)
            start = strip_left(text, start, done);
        if (a->flags & ADDED_RSTRIP)
            stop = strip_right(text, len, stop);
        if (done < start)
            r = gap(e, text + done, start - done, first && !done);
        if (r >= 0)
            r = ids_push(&e->out, a->id);
        done = stop;
    }
    return r >= 0 && done < len ? gap(e, text + done, len - done, first && !done) : r;
}
