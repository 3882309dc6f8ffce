/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Structured logging of the processes. Libraries (everything outside daemon/ and cli/) never log.
 *
 * A line on stderr: `<N>process: message key=value key="two words"`, N being the syslog priority
 * prefix that systemd's journal and the parent read; a terminal gets none, and a file the time
 * (log_stamp). One write(2) a line.
 *
 *     log_info("instance ready", "model=%s id=%s ms=%.1f", name, id, ms);
 */
#ifndef EMBER_BASE_LOG_H
#define EMBER_BASE_LOG_H

#include <stdbool.h>
#include <stddef.h>

enum log_level { LOG_LEVEL_ERROR = 3, LOG_LEVEL_WARN = 4, LOG_LEVEL_INFO = 6, LOG_LEVEL_DEBUG = 7 };

/* What a `log_level` option says, by its place in "error|warn|info|debug". */
enum log_level log_level_of(int choice);

/* Names the process in each line; lines above `level` are dropped. Before it: "ember", INFO. */
void log_init(const char *process, enum log_level level);

/* Lines begin with the time instead of <N>: for the process whose stderr people keep. */
void log_stamp(bool on);

/* Writes a line (without its end) of another process in this one's form. */
void log_pass(const char *text, size_t len);

/*
 * One line: `message`, a few constant words, then `fields`: key=VALUE or key="VALUE", a blank
 * between them, VALUE as printf has it (%s, %d, %u, %x, %f, %g, with l, ll or z). Lines are logfmt:
 * a value in quotes has " and \ escaped by \, control characters as in JSON (\n, \u001b); one
 * without gets quotes when what it prints needs them. What is beyond 2 KiB is cut, its quotes
 * closed. Use the macros.
 */
void log_write(enum log_level level, const char *message, const char *fields, ...)
    __attribute__((format(printf, 3, 4)));

#define log_error(message, ...) log_write(LOG_LEVEL_ERROR, message, "" __VA_ARGS__)
#define log_warn(message, ...) log_write(LOG_LEVEL_WARN, message, "" __VA_ARGS__)
#define log_info(message, ...) log_write(LOG_LEVEL_INFO, message, "" __VA_ARGS__)
#define log_debug(message, ...) log_write(LOG_LEVEL_DEBUG, message, "" __VA_ARGS__)

#endif
