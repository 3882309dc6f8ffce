/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gRPC status codes (the public table in grpc/doc/statuscodes.md), what they are in terms of
 * base/error.h, and the two text encodings of the wire: grpc-message and grpc-timeout
 * (grpc/doc/PROTOCOL-HTTP2.md).
 */
#ifndef EMBER_PROTO_GRPC_STATUS_H
#define EMBER_PROTO_GRPC_STATUS_H

#include <stddef.h>
#include <stdint.h>

/* X(constant, number, name, errno that a client's error carries for it) */
#define GRPC_STATUSES(X)                                                                           \
    X(GRPC_OK, 0, "OK", 0)                                                                         \
    X(GRPC_CANCELLED, 1, "CANCELLED", ECANCELED)                                                   \
    X(GRPC_UNKNOWN, 2, "UNKNOWN", EIO)                                                             \
    X(GRPC_INVALID_ARGUMENT, 3, "INVALID_ARGUMENT", EINVAL)                                        \
    X(GRPC_DEADLINE_EXCEEDED, 4, "DEADLINE_EXCEEDED", ETIMEDOUT)                                   \
    X(GRPC_NOT_FOUND, 5, "NOT_FOUND", ENOENT)                                                      \
    X(GRPC_ALREADY_EXISTS, 6, "ALREADY_EXISTS", EEXIST)                                            \
    X(GRPC_PERMISSION_DENIED, 7, "PERMISSION_DENIED", EACCES)                                      \
    X(GRPC_RESOURCE_EXHAUSTED, 8, "RESOURCE_EXHAUSTED", ENOMEM)                                    \
    X(GRPC_FAILED_PRECONDITION, 9, "FAILED_PRECONDITION", ESTALE)                                  \
    X(GRPC_ABORTED, 10, "ABORTED", EINTR)                                                          \
    X(GRPC_OUT_OF_RANGE, 11, "OUT_OF_RANGE", ERANGE)                                               \
    X(GRPC_UNIMPLEMENTED, 12, "UNIMPLEMENTED", ENOTSUP)                                            \
    X(GRPC_INTERNAL, 13, "INTERNAL", EPROTO)                                                       \
    X(GRPC_UNAVAILABLE, 14, "UNAVAILABLE", EAGAIN)                                                 \
    X(GRPC_DATA_LOSS, 15, "DATA_LOSS", EBADMSG)                                                    \
    X(GRPC_UNAUTHENTICATED, 16, "UNAUTHENTICATED", EKEYREJECTED)

enum grpc_status {
#define X(id, number, name, errnum) id = number,
    GRPC_STATUSES(X)
#undef X
};

/* "NOT_FOUND"; "UNKNOWN" for a number outside the table. */
const char *grpc_status_name(int status);

/* The status for an error code of base/error.h (0 or negative errno). Unlisted codes: INTERNAL. */
enum grpc_status grpc_status_of_error(int code);

/* The code (0 or negative errno) that a client reports for a status. Numbers outside: -EIO. */
int grpc_status_to_error(int status);

/* The status that stands for an HTTP status other than 200 when no grpc-status came. */
enum grpc_status grpc_status_of_http(int http_status);

/*
 * Percent-encodes `text` as a grpc-message value: bytes outside 0x20..0x7e and '%' become %XX.
 * Cuts at `room` - 1 bytes, never inside an escape. Returns the length written, without the NUL.
 */
size_t grpc_message_encode(const char *text, char *ret, size_t room);
/* The reverse; a malformed escape is kept as it is. NUL bytes become '?'. */
size_t grpc_message_decode(const char *text, size_t len, char *ret, size_t room);

/* A grpc-timeout value (1 to 8 digits and one of HMSmun) in nanoseconds, saturating. 0 or -EINVAL.
 */
int grpc_timeout_parse(const char *text, size_t len, uint64_t *ret_ns);
#define GRPC_TIMEOUT_TEXT_MAX 16
/* A timeout in milliseconds as a grpc-timeout value, rounded up where a coarser unit is needed. */
void grpc_timeout_format(uint64_t ms, char ret[GRPC_TIMEOUT_TEXT_MAX]);

#endif
