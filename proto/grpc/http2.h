/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Private to proto/grpc: one HTTP/2 connection, nghttp2's session tied to a non-blocking socket and
 * an event loop. The server and the client embed a `struct h2` and say what frames mean.
 *
 * Reading happens in the read event; what that makes to be sent leaves in the same callback. Frames
 * submitted at any other time leave through h2_wake(): an event made active runs in the same turn
 * of the loop, so several messages share one write and nothing waits for a timer.
 *
 * A connection never goes away inside a callback of nghttp2 or a call from outside: h2_fail() and
 * the peer's end only mark it, and ops->closed runs as the last thing of an event callback. It may
 * free the structure around the `struct h2`.
 */
#ifndef EMBER_PROTO_GRPC_HTTP2_H
#define EMBER_PROTO_GRPC_HTTP2_H

#include <event2/event.h>
#include <nghttp2/nghttp2.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/mem.h"

struct h2;

struct h2_ops {
    /* Bytes that arrived, before nghttp2 takes them. May be NULL. */
    void (*received)(struct h2 *h2, const uint8_t *data, size_t n);
    /* After a batch of reading or writing, outside nghttp2. May be NULL; must not free h2. */
    void (*settled)(struct h2 *h2);
    /* The connection is over, for the reason given (0: in good order). Frees h2 if it likes. */
    void (*closed)(struct h2 *h2, int code, const char *why);
};

struct h2 {
    const struct h2_ops *ops;
    nghttp2_session *session; /* set by the owner between h2_init and h2_start */
    struct event *read_event, *write_event, *wake_event;
    int fd;
    struct buffer out; /* serialised frames that the socket has not taken yet, from out_pos on */
    size_t out_pos;
    bool connecting, over, reading;
    int code;     /* why it is over: negative errno */
    char why[96]; /* and in words */
};

/* Takes fd (non-blocking) whether it succeeds or not. 0 or -ENOMEM. */
int h2_init(struct h2 *h2, struct event_base *base, int fd, const struct h2_ops *ops);
/* Begins to read and write; `connecting`: wait first for connect(2) to finish. */
void h2_start(struct h2 *h2, bool connecting);
/* Sends what has been submitted, later in this turn of the loop. */
void h2_wake(struct h2 *h2);
/* Marks the connection as over; ops->closed follows from the loop. The first reason stands. */
void h2_fail(struct h2 *h2, int code, const char *why);
/* Closes the socket and frees the session and events. Idempotent. Not the structure itself. */
void h2_clear(struct h2 *h2);

/* A header to submit; strings are copied by nghttp2. */
nghttp2_nv h2_header(const char *name, const char *value);

#endif
