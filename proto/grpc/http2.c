/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/grpc/http2.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/fd.h"

enum {
    READ_SIZE = 32 * 1024,
    READ_ROUNDS = 4,           /* of READ_SIZE, before other connections have their turn */
    WRITE_SIZE = 64 * 1024,    /* frames are gathered up to this much for one send */
    KEEP_SIZE = 8 * 1024,      /* an idle connection keeps no larger output buffer */
    OUTBOUND_FRAMES_MAX = 4096 /* frames waiting; beyond it nothing more is read */
};

static void flush(struct h2 *h2);

/* The last thing that an event callback does; h2 may be gone afterwards. */
static void finish_turn(struct h2 *h2)
{
    if (!h2->over && h2->ops->settled)
        h2->ops->settled(h2);
    if (!h2->over && !h2->connecting && h2->out_pos == h2->out.len &&
        !nghttp2_session_want_read(h2->session) && !nghttp2_session_want_write(h2->session))
        h2_fail(h2, 0, "closed in good order");
    if (h2->over) {
        event_del(h2->read_event);
        event_del(h2->write_event);
        event_del(h2->wake_event);
        h2->ops->closed(h2, h2->code, h2->why);
    }
}

/* One send of what is pending. True when the socket took everything. */
static bool send_pending(struct h2 *h2)
{
    while (h2->out_pos < h2->out.len) {
        ssize_t n = send(h2->fd, h2->out.data + h2->out_pos, h2->out.len - h2->out_pos,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)) {
            event_add(h2->write_event, NULL);
            return false;
        }
        if (n < 0) {
            h2_fail(h2, -errno, "the peer has gone");
            return false;
        }
        h2->out_pos += (size_t)n;
    }
    h2->out_pos = h2->out.len = 0;
    if (h2->out.cap > KEEP_SIZE)
        buffer_free(&h2->out);
    return true;
}

/* Takes serialised frames from nghttp2. True when there were any. */
static bool gather(struct h2 *h2)
{
    while (h2->out.len < WRITE_SIZE) {
        const uint8_t *data;
        ssize_t n = nghttp2_session_mem_send(h2->session, &data);
        if (n == 0)
            break;
        if (n < 0 || buffer_append(&h2->out, data, (size_t)n) < 0) {
            h2_fail(h2, -ENOMEM, "out of memory while sending");
            return false;
        }
    }
    return h2->out.len > 0;
}

static void flush(struct h2 *h2)
{
    if (h2->over || h2->connecting)
        return;
    while (send_pending(h2) && gather(h2))
        ;
}

/* A peer that makes us queue answers without reading them is not listened to until it does. */
static void throttle(struct h2 *h2)
{
    bool stuffed = nghttp2_session_get_outbound_queue_size(h2->session) > OUTBOUND_FRAMES_MAX;

    if (h2->over || stuffed != h2->reading)
        return;
    h2->reading = !stuffed;
    if (stuffed)
        event_del(h2->read_event);
    else
        event_add(h2->read_event, NULL);
}

static void on_writable(evutil_socket_t fd, short what, void *user)
{
    struct h2 *h2 = user;
    int error = 0;
    socklen_t size = sizeof error;

    if (h2->connecting) {
        h2->connecting = false;
        if (getsockopt(h2->fd, SOL_SOCKET, SO_ERROR, &error, &size) < 0)
            error = errno;
        if (error)
            h2_fail(h2, -error, "cannot connect");
    }
    flush(h2);
    throttle(h2);
    finish_turn(h2);
}

static void on_wake(evutil_socket_t fd, short what, void *user)
{
    struct h2 *h2 = user;

    flush(h2);
    throttle(h2);
    finish_turn(h2);
}

/* One read. True when there may be more at once. */
static bool read_some(struct h2 *h2)
{
    uint8_t data[READ_SIZE];
    ssize_t n = recv(h2->fd, data, sizeof data, MSG_DONTWAIT);

    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return false;
    if (n <= 0) {
        h2_fail(h2, n ? -errno : -EPIPE,
                n ? strerror(errno) : "the peer has closed the connection");
        return false;
    }
    if (h2->ops->received)
        h2->ops->received(h2, data, (size_t)n);
    ssize_t taken = nghttp2_session_mem_recv(h2->session, data, (size_t)n);
    if (taken < 0) {
        flush(h2); /* a GOAWAY that says why may be waiting */
        h2_fail(h2, taken == NGHTTP2_ERR_NOMEM ? -ENOMEM : -EPROTO, nghttp2_strerror((int)taken));
        return false;
    }
    return (size_t)n == sizeof data;
}

static void on_readable(evutil_socket_t fd, short what, void *user)
{
    struct h2 *h2 = user;

    for (int i = 0; i < READ_ROUNDS && !h2->over; i++)
        if (!read_some(h2))
            break;
    flush(h2);
    throttle(h2);
    finish_turn(h2);
}

int h2_init(struct h2 *h2, struct event_base *base, int fd, const struct h2_ops *ops)
{
    h2->ops = ops;
    h2->fd = fd;
    h2->read_event = event_new(base, fd, EV_READ | EV_PERSIST, on_readable, h2);
    h2->write_event = event_new(base, fd, EV_WRITE, on_writable, h2);
    h2->wake_event = event_new(base, -1, 0, on_wake, h2);
    if (!h2->read_event || !h2->write_event || !h2->wake_event) {
        h2_clear(h2);
        return -ENOMEM;
    }
    return 0;
}

void h2_start(struct h2 *h2, bool connecting)
{
    h2->connecting = connecting;
    h2->reading = true;
    event_add(h2->read_event, NULL);
    if (connecting)
        event_add(h2->write_event, NULL);
    h2_wake(h2);
}

void h2_wake(struct h2 *h2)
{
    if (h2->wake_event)
        event_active(h2->wake_event, EV_TIMEOUT, 0);
}

void h2_fail(struct h2 *h2, int code, const char *why)
{
    if (h2->over)
        return;
    h2->over = true;
    h2->code = code;
    snprintf(h2->why, sizeof h2->why, "%s", why);
    h2_wake(h2);
}

static struct event *event_gone(struct event *event)
{
    if (event)
        event_free(event);
    return NULL;
}

void h2_clear(struct h2 *h2)
{
    h2->read_event = event_gone(h2->read_event);
    h2->write_event = event_gone(h2->write_event);
    h2->wake_event = event_gone(h2->wake_event);
    nghttp2_session_del(h2->session);
    h2->session = NULL;
    h2->fd = fd_close(h2->fd);
    buffer_free(&h2->out);
    h2->out_pos = 0;
}

nghttp2_nv h2_header(const char *name, const char *value)
{
    return (nghttp2_nv){.name = (uint8_t *)name,
                        .namelen = strlen(name),
                        .value = (uint8_t *)value,
                        .valuelen = strlen(value)};
}
