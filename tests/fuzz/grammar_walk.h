/* SPDX-License-Identifier: Apache-2.0 */
/* What the grammar targets share: a small vocabulary, and a text drawn from a program. */
#ifndef EMBER_TESTS_FUZZ_GRAMMAR_WALK_H
#define EMBER_TESTS_FUZZ_GRAMMAR_WALK_H

#include <stdlib.h>
#include <string.h>

#include "model/grammar/grammar.h"

/* All single bytes, and some longer tokens. */
static inline struct vocab *walk_vocab(void)
{
    static const char *const words[] = {
        "\"",    "{\"", "\":", "\": ",     "},",       "ab",   "abc", "a b", "true",  "null",
        "false", "12",  "000", "\xC3\xA9", "\xE2\x82", "\n  ", "]}",  "[[",  "\\u00", "xx"};
    static struct vocab *v;
    uint8_t bytes[1024];
    uint32_t first[256 + ARRAY_LEN(words) + 1], used = 0, n = 0;

    if (v)
        return v;
    for (; n < 256; n++) {
        first[n] = used;
        bytes[used++] = (uint8_t)n;
    }
    for (size_t i = 0; i < ARRAY_LEN(words); i++) {
        first[n++] = used;
        memcpy(bytes + used, words[i], strlen(words[i]));
        used += (uint32_t)strlen(words[i]);
    }
    first[n] = used;
    if (vocab_from_bytes(bytes, first, n, &v, NULL) < 0)
        abort();
    return v;
}

/*
 * Draws a text. What the mask allows can be taken, and what it does not cannot; `sound`: something
 * is allowed wherever the text may not end (what we compiled has no dead ends).
 */
static inline void walk_program(const void *program, size_t len, uint32_t seed, bool sound)
{
    struct vocab *v = walk_vocab();
    struct grammar *g;
    struct matcher *m;
    struct error err = {0};

    if (grammar_open(program, len, v, &g, &err) < 0) {
        if (sound || !*error_text(&err))
            abort();
        return;
    }
    if (matcher_new(g, &m, &err) < 0)
        abort();
    for (unsigned i = 0; i < 40; i++) {
        const uint64_t *mask = matcher_mask(m);
        uint32_t allowed[320], n = 0;
        if (!mask)
            abort();
        for (uint32_t t = 0; t < vocab_size(v); t++)
            if (mask[t / 64] >> t % 64 & 1)
                allowed[n++] = t;
        if (!n && sound && !matcher_may_end(m))
            abort();
        if (!n)
            break;
        seed = seed * 1664525 + 1013904223;
        uint32_t token = seed % vocab_size(v);
        bool known = mask[token / 64] >> token % 64 & 1;
        if (!known && i % 8 == 0 && matcher_take(m, token))
            abort();
        if (!matcher_take(m, allowed[(seed >> 8) % n]))
            abort();
        if (i == 20)
            grammar_trim(g);
    }
    matcher_free(m);
    grammar_unref(g);
}

/* What a compiler returned: a sound program, or a refusal that says why and leaves nothing. */
static inline void walk_compiled(int r, const struct buffer *program, const struct error *err,
                                 uint32_t seed)
{
    if (r == 0)
        walk_program(program->data, program->len, seed, true);
    else if (!*error_text(err) || program->len)
        abort();
}

#endif
