/* SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *process_name = "ember";
static enum log_level max_level = LOG_LEVEL_INFO;

void log_init(const char *process, enum log_level level)
{
    process_name = process;
    max_level = level;
}

int log_level_parse(const char *name)
{
    static const struct {
        const char *name;
        enum log_level level;
    } levels[] = {{"error", LOG_LEVEL_ERROR},
                  {"warn", LOG_LEVEL_WARN},
                  {"info", LOG_LEVEL_INFO},
                  {"debug", LOG_LEVEL_DEBUG}};

    for (size_t i = 0; i < sizeof levels / sizeof levels[0]; i++)
        if (!strcmp(levels[i].name, name))
            return (int)levels[i].level;
    return -EINVAL;
}

void log_write(enum log_level level, const char *message, const char *fields, ...)
{
    char line[2048];
    size_t room = sizeof line - 1, used = 0;
    va_list ap;
    int n;

    if (level > max_level)
        return;
    if (!isatty(STDERR_FILENO))
        used += (size_t)snprintf(line, room, "<%d>", (int)level);
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
