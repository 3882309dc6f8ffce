/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small HTTP/1.1 load client for measuring the gateway: many requests over kept-alive connections
 * in one thread, server-sent events read as they come, times taken when bytes arrive.
 */
#ifndef EMBER_CLI_HTTP_LOAD_H
#define EMBER_CLI_HTTP_LOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

struct load_stream {
    /* Asked: `body` is posted to `path`; NULL: a GET. Borrowed. */
    const char *path, *body;
    uint64_t after_events; /* not sent before so many events with text have come, in all */
    /* Seen; times in ns from the start of the run. */
    int status;    /* 0: nothing came */
    bool complete; /* the reply is whole; of a stream: it ended with [DONE] and brought no error */
    uint64_t sent_ns, first_ns, last_ns; /* first and last event with text, or the reply's end */
    uint64_t longest_ns;                 /* the longest pause between two events with text */
    uint32_t tokens;                     /* completion_tokens of the usage event */
    uint64_t digest;                     /* of the text, as it was escaped */
    char error[120];                     /* the event that told of one, its beginning */
};

struct load_run {
    unsigned port;        /* on 127.0.0.1 */
    unsigned connections; /* requests at once; the next one goes out when one has ended */
    size_t until;         /* the run is over with this stream; SIZE_MAX: when all have ended */
    /* Called once when so many events with text have come, all streams together; 0: never. */
    uint64_t at_events;
    void (*at)(void *ctx);
    void *ctx;
    uint64_t timeout_ns; /* without a byte from anyone; 0: two minutes */
};

/* Runs all. -EPROTO: a reply that is none; -ETIMEDOUT; -ECANCELED: interrupted; socket errors. */
int load_run(const struct load_run *run, struct load_stream *streams, size_t n, struct error *err);

#endif
