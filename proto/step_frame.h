/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames of the step protocol (ember/v1/step.proto) on a stream socket: a little-endian u32 length,
 * then that many bytes of one protobuf message.
 */
#ifndef EMBER_PROTO_STEP_FRAME_H
#define EMBER_PROTO_STEP_FRAME_H

#include <protobuf-c/protobuf-c.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/mem.h"

#define STEP_FRAME_MAX (16 * MIB)
#define STEP_PROTOCOL 1

/* Bytes that have arrived and are not a whole frame yet. Zero-initialise; free with
 * frame_reader_free. */
struct frame_reader {
    struct buffer bytes;
    size_t consumed; /* bytes of the frame that frame_next returned last */
};

void frame_reader_free(struct frame_reader *reader);

/*
 * Reads what the socket has, once. 0: something came; 1: nothing now (EAGAIN); -EPIPE: the peer has
 * closed; another negative errno: the socket failed.
 */
int frame_fill(struct frame_reader *reader, int fd);

/*
 * The next whole frame among the bytes read: 0 and its payload, valid until the next call; 1: not
 * there yet; -EMSGSIZE: its length is 0 or beyond STEP_FRAME_MAX.
 */
int frame_next(struct frame_reader *reader, const uint8_t **ret_data, size_t *ret_len);

/* The frame that frame_next returned last has not been taken: it returns the same again. */
void frame_unread(struct frame_reader *reader);

/*
 * Sends one message whole, waiting at most timeout_ms for a slow reader each time it does not take
 * any more. -ETIMEDOUT, -EPIPE, -EMSGSIZE or the socket's error.
 */
int frame_send(int fd, const ProtobufCMessage *message, int timeout_ms);

#endif
