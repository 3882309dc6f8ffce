/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/grpc/frame.h"

#include <errno.h>
#include <string.h>

void grpc_frame_reader_free(struct grpc_frame_reader *reader)
{
    buffer_free(&reader->body);
    reader->n_header = 0;
}

bool grpc_frame_midway(const struct grpc_frame_reader *reader)
{
    return reader->n_header > 0;
}

static size_t announced(const struct grpc_frame_reader *reader)
{
    const uint8_t *h = reader->header;

    return (size_t)h[1] << 24 | (size_t)h[2] << 16 | (size_t)h[3] << 8 | h[4];
}

/* Takes header bytes; true when the header is whole. */
static bool take_header(struct grpc_frame_reader *reader, const uint8_t **data, size_t *n)
{
    size_t take = MIN(*n, GRPC_FRAME_HEADER - reader->n_header);

    memcpy(reader->header + reader->n_header, *data, take);
    reader->n_header += take;
    *data += take;
    *n -= take;
    return reader->n_header == GRPC_FRAME_HEADER;
}

int grpc_frame_feed(struct grpc_frame_reader *reader, const uint8_t *data, size_t n,
                    int (*message)(bool compressed, const uint8_t *data, size_t len, void *user),
                    void *user)
{
    while (n) {
        if (reader->n_header < GRPC_FRAME_HEADER && !take_header(reader, &data, &n))
            return 0;
        size_t len = announced(reader);
        if (reader->header[0] > 1)
            return -EBADMSG;
        if (len > reader->max)
            return -EMSGSIZE;

        size_t take = MIN(n, len - reader->body.len);
        bool whole_here = !reader->body.len && take == len; /* no copy needed */
        if (!whole_here && buffer_append(&reader->body, data, take) < 0)
            return -ENOMEM;
        const uint8_t *bytes = whole_here ? data : (const uint8_t *)reader->body.data;
        data += take;
        n -= take;
        if (!whole_here && reader->body.len < len)
            return 0;

        reader->n_header = 0;
        int r = message(reader->header[0] == 1, bytes, len, user);
        if (r)
            return r;
        if (!whole_here)
            buffer_free(&reader->body);
    }
    return 0;
}

int grpc_frame_append(struct buffer *out, const ProtobufCMessage *message, size_t max)
{
    size_t len = protobuf_c_message_get_packed_size(message);

    if (len > UINT32_MAX || len > max)
        return -EMSGSIZE;
    int r = buffer_reserve(out, GRPC_FRAME_HEADER + len);
    if (r < 0)
        return r;
    uint8_t *p = (uint8_t *)out->data + out->len;
    p[0] = 0;
    p[1] = (uint8_t)(len >> 24);
    p[2] = (uint8_t)(len >> 16);
    p[3] = (uint8_t)(len >> 8);
    p[4] = (uint8_t)len;
    protobuf_c_message_pack(message, p + GRPC_FRAME_HEADER);
    out->len += GRPC_FRAME_HEADER + len;
    out->data[out->len] = 0;
    return 0;
}
