/* SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"

static const char *process_name = "ember";
static enum log_level max_level = LOG_LEVEL_INFO;
static bool stamped;

enum log_level log_level_of(int choice)
{
    static const enum log_level levels[] = {LOG_LEVEL_ERROR, LOG_LEVEL_WARN, LOG_LEVEL_INFO,
                                            LOG_LEVEL_DEBUG};
    return levels[choice];
}

void log_init(const char *process, enum log_level level)
{
    process_name = process;
    max_level = level;
}

void log_stamp(bool on)
{
    stamped = on;
}

/* What stands in front of a line: the level for the journal, the time in a file, or nothing. */
static size_t line_head(char *line, size_t room, int level)
{
    const char *word = level <= LOG_LEVEL_ERROR  ? "error: "
                       : level == LOG_LEVEL_WARN ? "warning: "
                                                 : "";
    struct timespec now;
    struct tm tm;

    if (isatty(STDERR_FILENO))
        return (size_t)snprintf(line, room, "%s", word);
    if (!stamped)
        return (size_t)snprintf(line, room, "<%d>", level);
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &tm);
    size_t used = strftime(line, room, "%Y-%m-%dT%H:%M:%S", &tm);
    return used +
           (size_t)snprintf(line + used, room - used, ".%03ldZ %s", now.tv_nsec / 1000000, word);
}

void log_pass(const char *text, size_t len)
{
    char line[2048];
    int level = LOG_LEVEL_INFO;

    if (len > 2 && text[0] == '<' && text[1] >= '0' && text[1] <= '7' && text[2] == '>') {
        level = text[1] - '0';
        text += 3;
        len -= 3;
    }
    if (!len)
        return;
    size_t used = line_head(line, sizeof line, level);
    len = MIN(len, sizeof line - used - 1);
    memcpy(line + used, text, len);
    line[used + len] = '\n';
    ssize_t written = write(STDERR_FILENO, line, used + len + 1);
    (void)written;
}

/* ---- fields, as logfmt has them ---- */

/* The line that is being written: a byte is kept for its end, and one for a quote that is open. */
struct line {
    char text[2048];
    size_t used;
};

static size_t line_room(const struct line *line)
{
    return sizeof line->text - 2 - MIN(line->used, sizeof line->text - 2);
}

static bool line_add(struct line *line, const char *bytes, size_t len)
{
    if (len > line_room(line))
        return false;
    memcpy(line->text + line->used, bytes, len);
    line->used += len;
    return true;
}

/* One byte within quotes, escaped as in JSON. False: no room. */
static bool add_escaped(struct line *line, unsigned char c)
{
    static const char short_forms[] = "\"\"\\\\\nn\rr\tt";
    char text[8] = {(char)c};
    int len = 1;

    for (const char *p = short_forms; *p; p += 2)
        if ((unsigned char)*p == c)
            len = snprintf(text, sizeof text, "\\%c", p[1]);
    if (len == 1 && (c < 0x20 || c == 0x7f))
        len = snprintf(text, sizeof text, "\\u%04x", c);
    return line_add(line, text, (size_t)len);
}

static bool needs_quotes(const char *value)
{
    for (; *value; value++)
        if ((unsigned char)*value <= 0x20 || strchr("\"=\x7f", *value))
            return true;
    return false;
}

/* False: not all of it. */
static bool add_value(struct line *line, const char *value, bool quoted)
{
    size_t len = strlen(value), fits = MIN(len, line_room(line));

    if (!quoted && !needs_quotes(value)) {
        line_add(line, value, fits);
        return fits == len;
    }
    if (!line_add(line, "\"", 1))
        return false;
    while (*value && add_escaped(line, (unsigned char)*value))
        value++;
    line->text[line->used++] = '"';
    return !*value;
}

/* What one conversion of a format makes of its argument. Those that no field has are not known. */
static int print_one(char *to, size_t room, const char *spec, size_t len, va_list *ap)
{
    char one[16];
    char kind = spec[len - 1];
    int longs = 0;

    if (len >= sizeof one)
        abort();
    memcpy(one, spec, len);
    one[len] = 0;
    for (const char *p = one; *p; p++)
        longs += *p == 'l' || *p == 'z'; /* a size_t is a long */
    switch (kind) {
    case '%':
        return snprintf(to, room, "%%");
    case 's':
        return snprintf(to, room, one, va_arg(*ap, const char *));
    case 'f':
    case 'g':
        return snprintf(to, room, one, va_arg(*ap, double));
    case 'd':
    case 'u':
    case 'x':
        return longs == 2   ? snprintf(to, room, one, va_arg(*ap, long long))
               : longs == 1 ? snprintf(to, room, one, va_arg(*ap, long))
                            : snprintf(to, room, one, va_arg(*ap, int));
    default:
        abort();
    }
}

/* Prints the format up to `end`, or to its end; returns where that is. */
static const char *print_until(char end, const char *format, char *to, size_t room, va_list *ap)
{
    size_t used = 0;

    for (; *format && *format != end; format++) {
        size_t len = *format == '%' ? 2 + strcspn(format + 1, "%sfgdux") : 1;
        int n = len > 1 ? print_one(to + used, room - used, format, len, ap)
                        : snprintf(to + used, room - used, "%c", *format);
        used = MIN(used + (size_t)MAX(n, 0), room - 1);
        format += len - 1;
    }
    return format;
}

/* key=value key="%s" ...: each value is printed by itself, so that none can pass for another. None
 * stands behind one that is cut. */
static void add_fields(struct line *line, const char *fields, va_list *ap)
{
    char value[sizeof line->text];

    while (*fields) {
        size_t key = strcspn(fields, "=");
        bool quoted = fields[key] && fields[key + 1] == '"';
        if (line_room(line) < key + 2)
            return;
        line_add(line, " ", 1);
        line_add(line, fields, key + !!fields[key]);
        fields += key + !!fields[key] + quoted;
        *value = 0;
        fields = print_until(quoted ? '"' : ' ', fields, value, sizeof value, ap);
        fields += quoted && *fields;
        fields += *fields == ' ';
        if (!add_value(line, value, quoted))
            return;
    }
}

void log_write(enum log_level level, const char *message, const char *fields, ...)
{
    struct line line;
    va_list ap;

    if (level > max_level)
        return;
    line.used = line_head(line.text, sizeof line.text, (int)level);
    line_add(&line, process_name, strlen(process_name));
    line_add(&line, ": ", 2);
    line_add(&line, message, MIN(strlen(message), line_room(&line)));
    va_start(ap, fields);
    add_fields(&line, fields, &ap);
    va_end(ap);
    line.text[line.used++] = '\n';
    ssize_t written = write(STDERR_FILENO, line.text, line.used);
    (void)written;
}
