/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gRPC's message framing inside HTTP/2 DATA: one flag byte (1 = compressed), a 32-bit big-endian
 * length, the message. HTTP/2 frame boundaries mean nothing: a message may come in single bytes,
 * and several may come at once.
 */
#ifndef EMBER_PROTO_GRPC_FRAME_H
#define EMBER_PROTO_GRPC_FRAME_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/mem.h"

#define GRPC_FRAME_HEADER 5

/* Zero-initialise, then set `max`. */
struct grpc_frame_reader {
    size_t max; /* longest message accepted, in bytes */
    uint8_t header[GRPC_FRAME_HEADER];
    size_t n_header;
    struct buffer body; /* grows with what has arrived, never with what was announced */
};

void grpc_frame_reader_free(struct grpc_frame_reader *reader);

/* True when a message has begun and not ended: the end of the stream here is damage. */
bool grpc_frame_midway(const struct grpc_frame_reader *reader);

/*
 * Takes n bytes and calls `message` for each message that they complete; `data` lives for the call.
 * Returns 0, or -EMSGSIZE (announced longer than max), -EBADMSG (a flag byte other than 0 and 1),
 * -ENOMEM, or the first non-zero return of `message`; the reader is of no further use after these.
 */
int grpc_frame_feed(struct grpc_frame_reader *reader, const uint8_t *data, size_t n,
                    int (*message)(bool compressed, const uint8_t *data, size_t len, void *user),
                    void *user);

/* Appends the framed message to `out`. 0, -ENOMEM, or -EMSGSIZE when it exceeds 4 GiB or `max`. */
int grpc_frame_append(struct buffer *out, const ProtobufCMessage *message, size_t max);

#endif
