/* SPDX-License-Identifier: Apache-2.0 */
#include "base/text.h"

#include <string.h>

#define MEANING_COLUMN 28

static void spaces(struct buffer *out, size_t n)
{
    buffer_printf(out, "%*s", (int)n, "");
}

void text_wrap(struct buffer *out, size_t column, size_t indent, const char *text)
{
    bool fresh = true; /* nothing on this line yet that a space must follow */

    while (*text) {
        if (*text == '\n') {
            buffer_printf(out, "\n");
            text++;
            column = 0;
            fresh = true;
            continue;
        }
        if (*text == ' ') {
            text++;
            continue;
        }
        size_t len = strcspn(text, " \n");
        if (!fresh && column + 1 + len > TEXT_WIDTH) {
            buffer_printf(out, "\n");
            column = 0;
            fresh = true;
        }
        if (fresh && column == 0) {
            spaces(out, indent);
            column = indent;
        } else if (!fresh) {
            buffer_printf(out, " ");
            column++;
        }
        buffer_append(out, text, len);
        column += len;
        text += len;
        fresh = false;
    }
    buffer_printf(out, "\n");
}

void text_row(struct buffer *out, const char *term, const char *meaning)
{
    size_t column = 2 + strlen(term);

    buffer_printf(out, "  %s", term);
    if (column + 2 > MEANING_COLUMN) {
        buffer_printf(out, "\n");
        column = 0;
    }
    spaces(out, MEANING_COLUMN - column);
    text_wrap(out, MEANING_COLUMN, MEANING_COLUMN, meaning);
}

void text_man(struct buffer *out, const char *text)
{
    bool line_start = true;

    for (; *text; text++) {
        if (line_start && (*text == '.' || *text == '\''))
            buffer_printf(out, "\\&");
        if (*text == '\\')
            buffer_printf(out, "\\e");
        else if (*text == '-')
            buffer_printf(out, "\\-");
        else
            buffer_append(out, text, 1);
        line_start = *text == '\n';
    }
}
