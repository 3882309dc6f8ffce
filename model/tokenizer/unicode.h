/* SPDX-License-Identifier: Apache-2.0 */
/* UTF-8 and the character classes of the Unicode standard that tokenizers ask for. */
#ifndef EMBER_MODEL_TOKENIZER_UNICODE_H
#define EMBER_MODEL_TOKENIZER_UNICODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define UTF8_REPLACEMENT "\xEF\xBF\xBD"

/* What utf8_scan found behind the valid prefix. */
enum utf8_state { UTF8_COMPLETE, UTF8_INCOMPLETE, UTF8_INVALID };

/*
 * Length of the longest valid prefix, and why it ends there: the end of the text, a sequence that
 * more bytes could complete, or one that nothing can. *ret_bad is the length of the offending part
 * (the maximal subpart of the Unicode standard, chapter 3.9), which one U+FFFD replaces.
 */
enum utf8_state utf8_scan(const char *s, size_t n, size_t *ret_valid, size_t *ret_bad);
static inline bool utf8_valid(const char *s, size_t n)
{
    size_t valid, bad;
    return utf8_scan(s, n, &valid, &bad) == UTF8_COMPLETE;
}

/* The character at s, which is valid UTF-8; returns its length in bytes. */
static inline size_t utf8_get(const char *s, uint32_t *ret_c)
{
    const unsigned char *u = (const unsigned char *)s;
    if (u[0] < 0x80)
        return *ret_c = u[0], 1;
    if (u[0] < 0xE0)
        return *ret_c = (u[0] & 0x1Fu) << 6 | (u[1] & 0x3Fu), 2;
    if (u[0] < 0xF0)
        return *ret_c = (u[0] & 0xFu) << 12 | (u[1] & 0x3Fu) << 6 | (u[2] & 0x3Fu), 3;
    return *ret_c = (u[0] & 7u) << 18 | (u[1] & 0x3Fu) << 12 | (u[2] & 0x3Fu) << 6 | (u[3] & 0x3Fu),
           4;
}
/* Bytes of the character that starts with this byte of valid UTF-8. */
static inline size_t utf8_len(char first)
{
    unsigned char u = (unsigned char)first;
    return u < 0x80 ? 1 : u < 0xE0 ? 2 : u < 0xF0 ? 3 : 4;
}
/* Length of the last character of valid, non-empty UTF-8. */
static inline size_t utf8_last_len(const char *s, size_t n)
{
    size_t k = 1;
    while (k < n && k < 4 && ((unsigned char)s[n - k] & 0xC0) == 0x80)
        k++;
    return k;
}
/* Writes 1 to 4 bytes. */
size_t utf8_put(uint32_t c, char out[4]);

bool uni_is_space(uint32_t c);   /* White_Space */
bool uni_is_numeric(uint32_t c); /* categories Nd, Nl, No */
bool uni_is_punct(uint32_t c);   /* categories P*, and ASCII punctuation */
bool uni_is_word(uint32_t c);    /* \w of UTS 18: Alphabetic, M*, Nd, Pc, Join_Control */
bool uni_is_mark(uint32_t c);    /* category Mn */
/* Full lower case without context; returns the number of characters, 1 or 2. */
size_t uni_lower(uint32_t c, uint32_t out[2]);

/* The printable character that byte-level vocabularies write for a byte, and back (-1: none). */
uint32_t byte_level_char(uint8_t byte);
int byte_level_byte(uint32_t c);

#endif
