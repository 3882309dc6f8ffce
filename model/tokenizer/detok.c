/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decoding, as a row of stages. The reference decodes a list of strings by each decoder in turn;
 * here the strings flow through in pieces: feed(stage, bytes, end), `end` closing a string. A stage
 * hands on what no later input can change and holds the rest, so that streaming and whole decoding
 * are the same code. Every piece is whole UTF-8 characters.
 *
 *   Replace       string by string; holds an open string's tail that may begin the pattern
 *   ByteFallback  "<0xNN>" strings gather to a run: its text if the run is valid UTF-8, otherwise
 *                 U+FFFD for each of its bytes; certain when the run ends or cannot become valid
 *   Fuse          all strings become one that ends at the end
 *   Strip         removes characters at the start of a string, holds those that may be at its end
 *   Metaspace     replacement to space; dropped in the first string
 *   ByteLevel     characters to bytes; holds an unfinished UTF-8 sequence; one string comes out
 *   join          no decoder: a space between strings
 */
#include "model/tokenizer/internal.h"

#include <errno.h>
#include <string.h>

#include "model/tokenizer/unicode.h"

struct stage {
    const struct image_comp *c;
    struct buffer held; /* of the open string */
    struct buffer run;  /* bytes across strings: ByteFallback, ByteLevel */
    bool open;          /* a string has begun and not ended */
    bool through;       /* ByteFallback: the open string is no byte */
    bool broken;        /* ByteFallback: the run cannot become valid */
    size_t checked;     /* ByteFallback: valid prefix of the run */
    uint32_t stripped;  /* Strip: characters removed at the start */
    bool past_start;    /* Strip: a character was kept */
    bool past_first;    /* Metaspace: the first string has ended */
};

struct detok {
    const struct tokenizer *t;
    bool skip_special, any;
    size_t n_stages;
    struct stage stages[IMAGE_MAX_COMPS];
    struct regex_scratch *regex; /* when a stage needs it */
    struct buffer *out;
    struct error *err;
    int64_t budget; /* bytes that may still flow between stages in this call */
};

/* A hostile chain of Replace decoders could grow one token without end. */
#define BUDGET_PUSH ((int64_t)64 << 20)
#define BUDGET_FINISH ((int64_t)4 << 30)

static int feed(struct detok *d, size_t k, const char *s, size_t len, bool end);

int detok_new(const struct tokenizer *t, bool skip_special, struct detok **ret_detok)
{
    _cleanup_(detok_freep) struct detok *d = mem_alloc(1, sizeof *d);
    if (!d)
        return -ENOMEM;
    d->t = t;
    d->skip_special = skip_special;
    d->n_stages = t->h->n_dec;
    for (size_t i = 0; i < d->n_stages; i++) {
        d->stages[i].c = &t->dec[i];
        if ((t->dec[i].flags & COMP_REGEX) && !d->regex && !(d->regex = regex_scratch_new()))
            return -ENOMEM;
    }
    *ret_detok = TAKE(d);
    return 0;
}

void detok_free(struct detok *d)
{
    if (!d)
        return;
    for (size_t i = 0; i < d->n_stages; i++) {
        buffer_free(&d->stages[i].held);
        buffer_free(&d->stages[i].run);
    }
    regex_scratch_free(d->regex);
    free(d);
}

/* Removes the first n bytes. */
static void drop(struct buffer *b, size_t n)
{
    b->len -= n;
    if (b->len)
        memmove(b->data, b->data + n, b->len);
}

static int replaced(struct detok *d, size_t k, const char *s, size_t len, bool end)
{
    const struct image_comp *c = d->stages[k].c;
    struct finder f = FINDER_START;
    size_t done = 0, start, stop;
    int r;
    while ((r = comp_find(d->t, c, d->regex, s, len, &f, &start, &stop, d->err)) > 0) {
        r = feed(d, k + 1, s + done, start - done, false);
        if (r >= 0)
            r = feed(d, k + 1, str_of(d->t, c->content), c->content.len, false);
        if (r < 0)
            return r;
        done = stop;
    }
    return r < 0 ? r : feed(d, k + 1, s + done, len - done, end);
}

/* Longest tail of s that a longer string could turn into a match of the pattern. */
static size_t open_tail(const char *s, size_t len, const char *pattern, size_t n)
{
    for (size_t k = MIN(len, n - 1); k > 0; k--)
        if (!memcmp(s + len - k, pattern, k))
            return k;
    return 0;
}

/* Where the last match in s ends. */
static size_t last_match_end(const char *s, size_t len, const char *pattern, size_t n)
{
    size_t done = 0;
    const char *p;
    while ((p = memmem(s + done, len - done, pattern, n)))
        done = (size_t)(p - s) + n;
    return done;
}

static int do_replace(struct detok *d, size_t k, const char *s, size_t len, bool end)
{
    struct stage *g = &d->stages[k];
    const char *pattern = str_of(d->t, g->c->pattern);
    size_t n = g->c->pattern.len, keep = 0;
    if (end && !g->held.len)
        return replaced(d, k, s, len, true);
    if (buffer_append(&g->held, s, len) < 0)
        return -ENOMEM;
    if (!end) {
        if ((g->c->flags & COMP_REGEX) || !n)
            return 0;
        size_t matched = last_match_end(g->held.data, g->held.len, pattern, n);
        keep = open_tail(g->held.data + matched, g->held.len - matched, pattern, n);
    }
    size_t now = g->held.len - keep;
    int r = replaced(d, k, g->held.data, now, end);
    drop(&g->held, now);
    return r;
}

/* The byte of "<0xNN>", or -1. The reference's number parser takes a plus sign as well. */
static int fallback_byte(const char *s, size_t len)
{
    if (len != 6 || memcmp(s, "<0x", 3) || s[5] != '>')
        return -1;
    int value = 0;
    for (int i = 3; i < 5; i++) {
        char c = s[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0 && !(i == 3 && c == '+'))
            return -1;
        value = value * 16 + MAX(digit, 0);
    }
    return value;
}

static int put_replacements(struct detok *d, size_t k, size_t n)
{
    int r = 0;
    for (; n > 0 && r >= 0; n--)
        r = feed(d, k, UTF8_REPLACEMENT, 3, true);
    return r;
}

static int end_run(struct detok *d, size_t k)
{
    struct stage *g = &d->stages[k];
    int r = 0;
    if (g->run.len && !g->broken) {
        if (g->checked == g->run.len)
            r = feed(d, k + 1, g->run.data, g->run.len, true);
        else
            r = put_replacements(d, k + 1, g->run.len);
    }
    g->run.len = g->checked = 0;
    g->broken = false;
    return r;
}

static int add_to_run(struct detok *d, size_t k, int byte)
{
    struct stage *g = &d->stages[k];
    char b = (char)byte;
    size_t valid, bad, n;
    if (g->broken)
        return put_replacements(d, k + 1, 1);
    if (buffer_append(&g->run, &b, 1) < 0)
        return -ENOMEM;
    enum utf8_state state =
        utf8_scan(g->run.data + g->checked, g->run.len - g->checked, &valid, &bad);
    g->checked += valid;
    if (state != UTF8_INVALID)
        return 0;
    n = g->run.len;
    g->broken = true;
    g->run.len = g->checked = 0;
    return put_replacements(d, k + 1, n);
}

static int do_byte_fallback(struct detok *d, size_t k, const char *s, size_t len, bool end)
{
    struct stage *g = &d->stages[k];
    int r = 0;
    if (!g->through && g->held.len + len <= 6) {
        if (buffer_append(&g->held, s, len) < 0)
            return -ENOMEM;
        if (!end)
            return 0;
        int byte = fallback_byte(g->held.data, g->held.len);
        if (byte >= 0) {
            g->held.len = 0;
            return add_to_run(d, k, byte);
        }
        s = "";
        len = 0;
    }
    if (!g->through) {
        r = end_run(d, k);
        if (r >= 0)
            r = feed(d, k + 1, g->held.data, g->held.len, false);
        g->held.len = 0;
    }
    g->through = !end;
    return r < 0 ? r : feed(d, k + 1, s, len, end);
}

/* Strip's start: bytes to skip at the front of s. */
static size_t strip_start(struct detok *d, struct stage *g, const char *s, size_t len)
{
    const char *c = str_of(d->t, g->c->content);
    size_t n = g->c->content.len, i = 0;
    while (!g->past_start && i < len) {
        if (g->stripped < g->c->n && len - i >= n && !memcmp(s + i, c, n)) {
            g->stripped++;
            i += n;
        } else {
            g->past_start = true;
        }
    }
    return i;
}

static int do_strip(struct detok *d, size_t k, const char *s, size_t len, bool end)
{
    struct stage *g = &d->stages[k];
    const char *c = str_of(d->t, g->c->content);
    size_t n = g->c->content.len, skip = strip_start(d, g, s, len), tail = 0;
    if (buffer_append(&g->held, s + skip, len - skip) < 0)
        return -ENOMEM;
    for (uint32_t i = 0; i < g->c->m; i++) {
        size_t rest = g->held.len - tail;
        if (rest < n || memcmp(g->held.data + rest - n, c, n))
            break;
        tail += n;
    }
    size_t now = g->held.len - tail;
    int r = feed(d, k + 1, g->held.data, now, end);
    drop(&g->held, now);
    if (end) {
        g->held.len = 0;
        g->stripped = 0;
        g->past_start = false;
    }
    return r;
}

static int do_metaspace(struct detok *d, size_t k, const char *s, size_t len, bool end)
{
    struct stage *g = &d->stages[k];
    const char *mark = str_of(d->t, g->c->pattern), *p;
    size_t n = g->c->pattern.len, done = 0;
    bool dropped = !g->past_first && g->c->n != PREPEND_NEVER;
    int r = 0;
    while (r >= 0 && (p = memmem(s + done, len - done, mark, n))) {
        r = feed(d, k + 1, s + done, (size_t)(p - s) - done, false);
        if (r >= 0 && !dropped)
            r = feed(d, k + 1, " ", 1, false);
        done = (size_t)(p - s) + n;
    }
    if (end)
        g->past_first = true;
    return r < 0 ? r : feed(d, k + 1, s + done, len - done, end);
}

/* Hands on the run as Rust's from_utf8_lossy would write it; an unfinished end stays unless final.
 */
static int lossy(struct detok *d, size_t k, bool final)
{
    struct buffer *run = &d->stages[k].run;
    size_t done = 0;
    int r = 0;
    while (done < run->len && r >= 0) {
        size_t valid, bad;
        enum utf8_state state = utf8_scan(run->data + done, run->len - done, &valid, &bad);
        r = feed(d, k + 1, run->data + done, valid, false);
        done += valid;
        if (state == UTF8_COMPLETE || (state == UTF8_INCOMPLETE && !final))
            break;
        if (r >= 0)
            r = feed(d, k + 1, UTF8_REPLACEMENT, 3, false);
        done += bad;
    }
    drop(run, done);
    return r;
}

/* A string of byte-level characters only stands for bytes; any other for itself. */
static int spelled(struct buffer *run, const char *s, size_t len)
{
    size_t from = run->len;
    for (size_t i = 0; i < len;) {
        uint32_t c = UINT32_MAX;
        /* An image may have been forged: never past the end. */
        i += utf8_len(s[i]) <= len - i ? utf8_get(s + i, &c) : 1;
        int byte = byte_level_byte(c);
        char b = (char)byte;
        if (byte < 0) {
            run->len = from;
            return buffer_append(run, s, len);
        }
        if (buffer_append(run, &b, 1) < 0)
            return -ENOMEM;
    }
    return 0;
}

static int do_byte_level(struct detok *d, size_t k, const char *s, size_t len, bool end)
{
    struct stage *g = &d->stages[k];
    int r;
    if (end && !g->held.len) {
        r = spelled(&g->run, s, len);
    } else {
        r = buffer_append(&g->held, s, len);
        if (r < 0 || !end)
            return r;
        r = spelled(&g->run, g->held.data, g->held.len);
        g->held.len = 0;
    }
    return r < 0 ? r : lossy(d, k, false);
}

static int feed(struct detok *d, size_t k, const char *s, size_t len, bool end)
{
    if (!len && !end)
        return 0;
    d->budget -= (int64_t)len + 1;
    if (d->budget < 0)
        return error_set(d->err, E2BIG, "the tokenizer's decoders make the text too long");
    if (k == d->n_stages)
        return buffer_append(d->out, s, len);
    switch (d->stages[k].c->kind) {
    case DEC_REPLACE:
        return do_replace(d, k, s, len, end);
    case DEC_BYTE_FALLBACK:
        return do_byte_fallback(d, k, s, len, end);
    case DEC_STRIP:
        return do_strip(d, k, s, len, end);
    case DEC_METASPACE:
        return do_metaspace(d, k, s, len, end);
    case DEC_BYTE_LEVEL:
        return do_byte_level(d, k, s, len, end);
    default: /* DEC_FUSE */
        return feed(d, k + 1, s, len, false);
    }
}

static int finish(struct detok *d)
{
    int r = 0;
    for (size_t k = 0; k < d->n_stages && r >= 0; k++) {
        switch (d->stages[k].c->kind) {
        case DEC_BYTE_FALLBACK:
            r = end_run(d, k);
            break;
        case DEC_BYTE_LEVEL:
            r = lossy(d, k, true);
            if (r >= 0)
                r = feed(d, k + 1, "", 0, true);
            break;
        case DEC_FUSE:
            r = feed(d, k + 1, "", 0, true);
            break;
        default: /* the others hold nothing once a string has ended */
            break;
        }
    }
    return r;
}

static int finish_call(struct detok *d, int r)
{
    struct error *err = d->err;
    d->out = NULL;
    d->err = NULL;
    return r == -ENOMEM ? error_set(err, ENOMEM, "no memory to decode") : r;
}

int detok_push(struct detok *d, uint32_t id, struct buffer *out, struct error *err)
{
    size_t len;
    const char *s = tokenizer_token_text(d->t, id, &len);
    if (!s || (d->skip_special && tokenizer_is_special(d->t, id)))
        return 0;
    d->out = out;
    d->err = err;
    d->budget = BUDGET_PUSH;
    int r = 0;
    if (d->any && !(d->t->h->flags & FLAG_DECODER))
        r = buffer_append(out, " ", 1);
    d->any = true;
    return finish_call(d, r < 0 ? r : feed(d, 0, s, len, true));
}

int detok_finish(struct detok *d, struct buffer *out, struct error *err)
{
    d->out = out;
    d->err = err;
    d->budget = BUDGET_FINISH;
    return finish_call(d, finish(d));
}

int tokenizer_decode(const struct tokenizer *t, const uint32_t *ids, size_t n, bool skip_special,
                     struct buffer *out, struct error *err)
{
    _cleanup_(detok_freep) struct detok *d = NULL;
    int r = detok_new(t, skip_special, &d);
    if (r < 0)
        return error_set(err, -r, "no memory to decode");
    for (size_t i = 0; i < n && r >= 0; i++)
        r = detok_push(d, ids[i], out, err);
    return r < 0 ? r : detok_finish(d, out, err);
}

int tokenizer_token_bytes(const struct tokenizer *t, uint32_t id, struct buffer *out,
                          struct error *err)
{
    size_t len;
    const char *s = tokenizer_token_text(t, id, &len);
    struct detok d = {.t = t, .out = out, .err = err, .budget = BUDGET_PUSH};
    int r = 0;
    if (!s)
        return 0;
    for (uint32_t i = 0; i < t->h->n_dec; i++) {
        const struct image_comp *c = &t->dec[i];
        if (c->kind == DEC_BYTE_LEVEL)
            return spelled(out, s, len);
        if (c->kind == DEC_BYTE_FALLBACK && fallback_byte(s, len) >= 0) {
            char byte = (char)fallback_byte(s, len);
            return buffer_append(out, &byte, 1);
        }
        /* Of the others, those count that change the middle of a text. */
        if ((c->kind == DEC_REPLACE || c->kind == DEC_METASPACE) && d.n_stages < IMAGE_MAX_COMPS) {
            d.stages[d.n_stages].past_first = true;
            d.stages[d.n_stages++].c = c;
        }
    }
    for (size_t i = 0; i < d.n_stages && !d.regex && r >= 0; i++)
        if ((d.stages[i].c->flags & COMP_REGEX) && !(d.regex = regex_scratch_new()))
            r = -ENOMEM;
    if (r >= 0)
        r = feed(&d, 0, s, len, true);
    for (size_t i = 0; i < d.n_stages; i++)
        buffer_free(&d.stages[i].held);
    regex_scratch_free(d.regex);
    return r == -ENOMEM ? error_set(err, ENOMEM, "no memory to decode") : r;
}
