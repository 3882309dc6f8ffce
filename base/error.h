/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Errors.
 *
 * A function that can fail returns 0 or a negative errno value and takes, last, a `struct error *`
 * that may be NULL. The number is for the program (it chooses a gRPC status, a retry, an exit
 * code), the text is for the person: it names the file, the number that is wrong and what to do. A
 * positive return is a condition that the function's own header documents, never an error.
 *
 * The numbers that this project gives a meaning of its own:
 *   EBADMSG   stored bytes are damaged (bad magic, length, checksum, malformed file)
 *   ENOTSUP   understood, but this build or machine cannot do it
 *   ESTALE    was valid once, for another version, processor or device
 *   ENOMEM    a memory budget (ours or the host's) would be exceeded
 *   ENOSPC    a disk or map is full
 *   ETIMEDOUT a deadline has passed;   ECANCELED the caller gave up
 *   EPIPE     the peer has gone
 */
#ifndef EMBER_BASE_ERROR_H
#define EMBER_BASE_ERROR_H

#include <stdarg.h>

#define ERROR_TEXT_MAX 512

struct error {
    int code;                  /* negative errno, 0 when unset */
    char text[ERROR_TEXT_MAX]; /* one line, no newline, always terminated */
};

/* Sets *err (when not NULL) and returns -errnum. errnum is a positive errno value. */
int error_set(struct error *err, int errnum, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
int error_setv(struct error *err, int errnum, const char *format, va_list ap)
    __attribute__((format(printf, 3, 0)));

/* As error_set, with ": " and the system's text for errnum behind the message. */
int error_sys(struct error *err, int errnum, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Puts "context: " before the text that *err holds already; returns err->code. */
int error_prefix(struct error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The text, or the system's text for the code when none was set. Never NULL. */
const char *error_text(const struct error *err);

#endif
