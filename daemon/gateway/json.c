/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/json.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void append(struct buffer *out, const void *bytes, size_t n)
{
    if (buffer_append(out, bytes, n) < 0)
        abort();
}

void js_raw(struct buffer *out, const char *text)
{
    append(out, text, strlen(text));
}

void js_printf(struct buffer *out, const char *format, ...)
{
    char text[512];
    va_list ap;

    va_start(ap, format);
    int n = vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    append(out, text, MIN((size_t)MAX(n, 0), sizeof text - 1));
}

/* Length of the well-formed UTF-8 character at p, 0 when there is none (RFC 3629). */
static size_t character(const unsigned char *p, size_t n)
{
    static const struct {
        unsigned char first, last, low, high, len;
    } rows[] = {
        {0x00, 0x7f, 0, 0, 1},       {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3},
        {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3},
        {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4}};

    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        if (*p < rows[i].first || *p > rows[i].last)
            continue;
        if (rows[i].len == 1)
            return 1;
        if (n < rows[i].len || p[1] < rows[i].low || p[1] > rows[i].high)
            return 0;
        for (size_t k = 2; k < rows[i].len; k++)
            if ((p[k] & 0xc0) != 0x80)
                return 0;
        return rows[i].len;
    }
    return 0;
}

static void escape(struct buffer *out, unsigned char c)
{
    static const char *const names[] = {
        ['\b'] = "\\b", ['\t'] = "\\t", ['\n'] = "\\n", ['\f'] = "\\f",
        ['\r'] = "\\r", ['"'] = "\\\"", ['\\'] = "\\\\"};
    char text[8];

    if (c < ARRAY_LEN(names) && names[c]) {
        js_raw(out, names[c]);
        return;
    }
    snprintf(text, sizeof text, "\\u%04x", c);
    js_raw(out, text);
}

void js_string(struct buffer *out, const char *text, size_t len)
{
    const unsigned char *p = (const unsigned char *)text;
    size_t plain = 0, i = 0;

    if (!text) {
        js_raw(out, "null");
        return;
    }
    append(out, "\"", 1);
    while (i < len) {
        if (p[i] >= 0x20 && p[i] < 0x7f && p[i] != '"' && p[i] != '\\') {
            i++; /* nearly all there is */
            continue;
        }
        size_t n = character(p + i, len - i);
        if (n && p[i] >= 0x80) {
            i += n;
            continue;
        }
        append(out, p + plain, i - plain);
        if (n)
            escape(out, p[i]);
        else
            append(out, "\xef\xbf\xbd", 3);
        plain = ++i;
    }
    append(out, p + plain, len - plain);
    append(out, "\"", 1);
}

void js_cstring(struct buffer *out, const char *text)
{
    js_string(out, text, text ? strlen(text) : 0);
}

void js_float(struct buffer *out, float value)
{
    char text[32];

    if (!isfinite(value)) {
        js_raw(out, "null");
        return;
    }
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtof(text, NULL) == value)
            break;
    }
    js_raw(out, text);
}

void js_bool(struct buffer *out, bool value)
{
    js_raw(out, value ? "true" : "false");
}
