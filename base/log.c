/* SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
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

void log_write(enum log_level level, const char *message, const char *fields, ...)
{
    char line[2048];
    size_t room = sizeof line - 1, used = 0;
    va_list ap;
    int n;

    if (level > max_level)
        return;
    used = line_head(line, room, (int)level);
    n = snprintf(line + used, room - used, "%s: %s%s", process_name, message, *fields ? " " : "");
    used = used + (size_t)n < room ? used + (size_t)n : room - 1;
    va_start(ap, fields);
    n = vsnprintf(line + used, room - used, fields, ap);
    va_end(ap);
    used = n < 0 ? used : used + (size_t)n < room ? used + (size_t)n : room - 1;
    for (size_t i = 0; i < used; i++) /* one event, one line, whatever a client put in its name */
        if ((unsigned char)line[i] < 0x20)
            line[i] = ' ';
    line[used++] = '\n';
    ssize_t written = write(STDERR_FILENO, line, used);
    (void)written;
}
