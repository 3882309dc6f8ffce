/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/step_frame.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#define READ_BYTES (64u * 1024)

void frame_reader_free(struct frame_reader *reader)
{
    buffer_free(&reader->bytes);
    reader->consumed = 0;
}

static void drop_consumed(struct frame_reader *reader)
{
    struct buffer *b = &reader->bytes;

    if (!reader->consumed)
        return;
    memmove(b->data, b->data + reader->consumed, b->len - reader->consumed);
    b->len -= reader->consumed;
    reader->consumed = 0;
}

int frame_fill(struct frame_reader *reader, int fd)
{
    drop_consumed(reader);
    int r = buffer_reserve(&reader->bytes, READ_BYTES);
    if (r < 0)
        return r;
    ssize_t n;
    do
        n = recv(fd, reader->bytes.data + reader->bytes.len, READ_BYTES, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? 1 : -errno;
    if (n == 0)
        return -EPIPE;
    reader->bytes.len += (size_t)n;
    return 0;
}

int frame_next(struct frame_reader *reader, const uint8_t **ret_data, size_t *ret_len)
{
    drop_consumed(reader);
    const uint8_t *p = (const uint8_t *)reader->bytes.data;
    if (reader->bytes.len < 4)
        return 1;
    uint32_t len = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    if (!len || len > STEP_FRAME_MAX)
        return -EMSGSIZE;
    if (reader->bytes.len - 4 < len)
        return 1;
    *ret_data = p + 4;
    *ret_len = len;
    reader->consumed = 4 + (size_t)len;
    return 0;
}

void frame_unread(struct frame_reader *reader)
{
    reader->consumed = 0;
}

static int send_all(int fd, const uint8_t *data, size_t n, int timeout_ms)
{
    while (n) {
        ssize_t r = send(fd, data, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (r >= 0) {
            data += r;
            n -= (size_t)r;
            continue;
        }
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return errno == ECONNRESET ? -EPIPE : -errno;
        struct pollfd p = {.fd = fd, .events = POLLOUT};
        int ready = poll(&p, 1, timeout_ms);
        if (ready == 0)
            return -ETIMEDOUT;
        if (ready < 0 && errno != EINTR)
            return -errno;
    }
    return 0;
}

int frame_send(int fd, const ProtobufCMessage *message, int timeout_ms)
{
    size_t len = protobuf_c_message_get_packed_size(message);
    if (!len || len > STEP_FRAME_MAX)
        return -EMSGSIZE;
    _cleanup_free_ uint8_t *frame = mem_alloc(len + 4, 1);
    if (!frame)
        return -ENOMEM;
    for (int i = 0; i < 4; i++)
        frame[i] = (uint8_t)(len >> (8 * i));
    protobuf_c_message_pack(message, frame + 4);
    return send_all(fd, frame, len + 4, timeout_ms);
}
