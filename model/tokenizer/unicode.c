/* SPDX-License-Identifier: Apache-2.0 */
#include "model/tokenizer/unicode.h"

#include <string.h>
#include <utf8proc.h>

/* Skips ASCII, eight bytes at a time. */
static size_t skip_ascii(const char *s, size_t i, size_t n)
{
    while (i + 8 <= n) {
        uint64_t w;
        memcpy(&w, s + i, 8);
        if (w & UINT64_C(0x8080808080808080))
            break;
        i += 8;
    }
    while (i < n && (unsigned char)s[i] < 0x80)
        i++;
    return i;
}

enum utf8_state utf8_scan(const char *s, size_t n, size_t *ret_valid, size_t *ret_bad)
{
    const unsigned char *u = (const unsigned char *)s;
    size_t i = 0;
    *ret_bad = 0;
    while ((i = skip_ascii(s, i, n)) < n) {
        unsigned char c = u[i], low = 0x80, high = 0xBF;
        size_t need = c >= 0xF0 ? 3 : c >= 0xE0 ? 2 : 1, k = 1;
        *ret_valid = i;
        *ret_bad = 1;
        if (c < 0xC2 || c > 0xF4)
            return UTF8_INVALID;
        if (c == 0xE0)
            low = 0xA0;
        else if (c == 0xED)
            high = 0x9F;
        else if (c == 0xF0)
            low = 0x90;
        else if (c == 0xF4)
            high = 0x8F;
        for (; k <= need; k++, low = 0x80, high = 0xBF) {
            *ret_bad = k;
            if (i + k == n)
                return UTF8_INCOMPLETE;
            if (u[i + k] < low || u[i + k] > high)
                return UTF8_INVALID;
        }
        i += k;
        *ret_bad = 0;
    }
    *ret_valid = n;
    return UTF8_COMPLETE;
}

size_t utf8_put(uint32_t c, char out[4])
{
    if (c < 0x80)
        return out[0] = (char)c, 1;
    if (c < 0x800) {
        out[0] = (char)(0xC0 | c >> 6);
        out[1] = (char)(0x80 | (c & 0x3F));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xE0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 0x3F));
        out[2] = (char)(0x80 | (c & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 0x3F));
    out[2] = (char)(0x80 | (c >> 6 & 0x3F));
    out[3] = (char)(0x80 | (c & 0x3F));
    return 4;
}

bool uni_is_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

static utf8proc_category_t category(uint32_t c)
{
    return utf8proc_category((utf8proc_int32_t)c);
}

bool uni_is_numeric(uint32_t c)
{
    utf8proc_category_t k = category(c);
    return k == UTF8PROC_CATEGORY_ND || k == UTF8PROC_CATEGORY_NL || k == UTF8PROC_CATEGORY_NO;
}

bool uni_is_punct(uint32_t c)
{
    if (c < 0x80)
        return c > 0x20 && c < 0x7F && !((c | 0x20) >= 'a' && (c | 0x20) <= 'z') &&
               !(c >= '0' && c <= '9');
    utf8proc_category_t k = category(c);
    return k >= UTF8PROC_CATEGORY_PC && k <= UTF8PROC_CATEGORY_PO;
}

bool uni_is_mark(uint32_t c)
{
    return category(c) == UTF8PROC_CATEGORY_MN;
}

bool uni_is_word(uint32_t c)
{
    utf8proc_category_t k = category(c);
    if ((k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_ME) || k == UTF8PROC_CATEGORY_ND ||
        k == UTF8PROC_CATEGORY_NL || k == UTF8PROC_CATEGORY_PC)
        return true;
    /* Join_Control, then the symbols with Other_Alphabetic (PropList.txt). */
    return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) ||
           (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
           (c >= 0x1F170 && c <= 0x1F189);
}

size_t uni_lower(uint32_t c, uint32_t out[2])
{
    if (c == 0x130) { /* the one lower case of two characters (SpecialCasing.txt) */
        out[0] = 'i';
        out[1] = 0x307;
        return 2;
    }
    out[0] = (uint32_t)utf8proc_tolower((utf8proc_int32_t)c);
    return 1;
}

/* Bytes that byte-level vocabularies write as themselves: the printable ones of Latin-1. */
static bool byte_is_plain(unsigned b)
{
    return (b >= '!' && b <= '~') || (b >= 0xA1 && b != 0xAD);
}

/* The others count up from U+0100 in their order: 00..20, 7F..A0, AD. */
uint32_t byte_level_char(uint8_t b)
{
    if (byte_is_plain(b))
        return b;
    return 0x100u + (b <= 0x20 ? b : b <= 0xA0 ? b - 0x7Fu + 33 : 67);
}

int byte_level_byte(uint32_t c)
{
    if (c < 0x100)
        return byte_is_plain(c) ? (int)c : -1;
    c -= 0x100;
    return c <= 0x20 ? (int)c : c < 67 ? (int)(c - 33 + 0x7F) : c == 67 ? 0xAD : -1;
}
