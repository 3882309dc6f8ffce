/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"

#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

int error_setv(struct error *err, int errnum, const char *format, va_list ap)
{
    if (err) {
        err->code = -errnum;
        vsnprintf(err->text, sizeof err->text, format, ap);
        utf8_tame(err->text); /* names and contents of files, or cut short */
    }
    return -errnum;
}

int error_set(struct error *err, int errnum, const char *format, ...)
{
    va_list ap;

    va_start(ap, format);
    error_setv(err, errnum, format, ap);
    va_end(ap);
    return -errnum;
}

int error_sys(struct error *err, int errnum, const char *format, ...)
{
    va_list ap;

    if (!err)
        return -errnum;
    va_start(ap, format);
    error_setv(err, errnum, format, ap);
    va_end(ap);
    size_t used = strlen(err->text);
    char buffer[128];
    snprintf(err->text + used, sizeof err->text - used, ": %s",
             strerror_r(errnum, buffer, sizeof buffer));
    utf8_tame(err->text);
    return -errnum;
}

int error_prefix(struct error *err, const char *format, ...)
{
    char text[ERROR_TEXT_MAX];
    va_list ap;

    if (!err)
        return -1;
    va_start(ap, format);
    int n = vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    if (n >= 0 && (size_t)n < sizeof text)
        snprintf(text + n, sizeof text - (size_t)n, ": %s", err->text);
    utf8_tame(text);
    memcpy(err->text, text, sizeof text);
    return err->code;
}

const char *error_text(const struct error *err)
{
    if (!err)
        return "unknown error";
    return err->text[0] ? err->text : strerror(-err->code);
}
