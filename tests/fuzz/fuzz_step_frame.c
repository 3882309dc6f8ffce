/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A byte stream of the step protocol. The first byte says in what portions the rest arrives; frames
 * must come out as they stand in the stream, and a message that unpacks must survive the way back.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/fd.h"
#include "ember/v1/step.pb-c.h"
#include "proto/step_frame.h"

static void send_back(const ProtobufCMessage *message)
{
    struct frame_reader reader = {0};
    const uint8_t *data;
    size_t len;
    int s[2];

    /* 0 and more than fits a socket's buffer have their own tests. */
    size_t size = protobuf_c_message_get_packed_size(message);
    if (size == 0 || size > 4096)
        return;
    assert(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, s) == 0);
    assert(frame_send(s[0], message, 1000) == 0);
    int r;
    while ((r = frame_next(&reader, &data, &len)) == 1)
        assert(frame_fill(&reader, s[1]) == 0);
    assert(r == 0 && len == size);
    _cleanup_free_ uint8_t *packed = x_alloc(size);
    assert(protobuf_c_message_pack(message, packed) == size && !memcmp(packed, data, size));
    frame_reader_free(&reader);
    fd_close(s[0]);
    fd_close(s[1]);
}

static void unpack(const uint8_t *data, size_t len)
{
    Ember__V1__DriverFrame *driver = ember__v1__driver_frame__unpack(NULL, len, data);
    Ember__V1__InstanceFrame *instance = ember__v1__instance_frame__unpack(NULL, len, data);

    if (driver)
        send_back(&driver->base);
    if (instance)
        send_back(&instance->base);
    if (driver)
        ember__v1__driver_frame__free_unpacked(driver, NULL);
    if (instance)
        ember__v1__instance_frame__free_unpacked(instance, NULL);
}

/* Takes the whole frames that have arrived; false when the stream is broken. */
static bool take(struct frame_reader *reader, const uint8_t *stream, size_t *at, size_t arrived)
{
    const uint8_t *data;
    size_t len;
    int r;

    while ((r = frame_next(reader, &data, &len)) == 0) {
        assert(*at + 4 + len <= arrived && !memcmp(stream + *at + 4, data, len));
        *at += 4 + len;
        unpack(data, len);
    }
    assert(r == 1 || r == -EMSGSIZE);
    return r == 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct frame_reader reader = {0};
    size_t arrived = 0, at = 0;
    int s[2];

    if (size < 2)
        return 0;
    size_t portion = 1 + data[0];
    data++, size--;
    assert(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, s) == 0);
    while (arrived < size) {
        size_t n = MIN(portion, size - arrived);
        assert(write(s[0], data + arrived, n) == (ssize_t)n);
        arrived += n;
        assert(frame_fill(&reader, s[1]) == 0);
        if (!take(&reader, data, &at, arrived))
            break;
    }
    frame_reader_free(&reader);
    fd_close(s[0]);
    fd_close(s[1]);
    return 0;
}
