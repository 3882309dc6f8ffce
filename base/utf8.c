/* SPDX-License-Identifier: Apache-2.0 */
#include "base/utf8.h"

#include <string.h>

/* Length by the first byte, 0: it starts none; the second byte's range, which excludes overlong
 * forms, surrogates and what is beyond U+10FFFF. */
static size_t expected(const unsigned char *p, unsigned char *ret_low, unsigned char *ret_high)
{
    *ret_low = p[0] == 0xe0 ? 0xa0 : p[0] == 0xf0 ? 0x90 : 0x80;
    *ret_high = p[0] == 0xed ? 0x9f : p[0] == 0xf4 ? 0x8f : 0xbf;
    if (p[0] < 0x80)
        return 1;
    return p[0] < 0xc2 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : p[0] < 0xf5 ? 4 : 0;
}

size_t utf8_char(const char *text, size_t len)
{
    const unsigned char *p = (const unsigned char *)text;
    unsigned char low, high;

    if (!len)
        return 0;
    size_t n = expected(p, &low, &high);
    if (!n || n > len || (n > 1 && (p[1] < low || p[1] > high)))
        return 0;
    for (size_t i = 2; i < n; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    return n;
}

bool utf8_valid(const char *text)
{
    size_t left = strlen(text), n;

    for (; left; text += n, left -= n)
        if (!(n = utf8_char(text, left)))
            return false;
    return true;
}

/* A character that would be whole if the text went on. */
static bool is_cut(const char *text, size_t len)
{
    const unsigned char *p = (const unsigned char *)text;
    unsigned char low, high;

    if (expected(p, &low, &high) <= len || (len > 1 && (p[1] < low || p[1] > high)))
        return false;
    for (size_t i = 2; i < len; i++)
        if ((p[i] & 0xc0) != 0x80)
            return false;
    return true;
}

static bool is_control(const char *text, size_t n)
{
    unsigned char c = (unsigned char)text[0];

    if (n == 2) /* U+0080 to U+009F */
        return c == 0xc2 && (unsigned char)text[1] < 0xa0;
    return n == 1 && ((c < 0x20 && c != '\n' && c != '\t') || c == 0x7f);
}

void utf8_tame(char *text)
{
    size_t left = strlen(text);
    char *to = text;

    while (left) {
        size_t n = utf8_char(text, left);
        if (!n && is_cut(text, left))
            break;
        if (!n || is_control(text, n))
            *to++ = '?';
        else
            to = (char *)memmove(to, text, n) + n;
        n += !n;
        text += n;
        left -= n;
    }
    *to = 0;
}

void utf8_tame_line(char *text)
{
    utf8_tame(text);
    for (; *text; text++)
        if (*text == '\n' || *text == '\t')
            *text = '?';
}

void utf8_excerpt(struct buffer *out, const char *text, size_t len, size_t at)
{
    const size_t around = 24;
    size_t from = at > around ? at - around : 0, to = MIN(len, at + around);

    while (from > 0 && from < len && ((unsigned char)text[from] & 0xC0) == 0x80)
        from--;
    while (to < len && ((unsigned char)text[to] & 0xC0) == 0x80)
        to++;
    buffer_printf(out, "\"%s", from ? "..." : "");
    for (size_t i = from; i < to; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c == '\n')
            buffer_printf(out, "\\n");
        else if (c < 0x20 || c == 0x7F)
            buffer_printf(out, "\\x%02x", c);
        else
            buffer_append(out, &text[i], 1);
    }
    buffer_printf(out, "%s\"", to < len ? "..." : "");
}
