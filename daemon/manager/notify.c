/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Telling systemd (sd_notify(3)), without ever waiting for it: libsystemd's sd_notify blocks when
 * the receiver's queue is full, and a loop that serves spawns in a millisecond must not. What does
 * not fit goes into a queue of ours and out later, in order. A status that has to wait is dropped:
 * there will be a newer one.
 */
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/log.h"
#include "base/mem.h"
#include "daemon/manager/manager.h"

#define QUEUE_MOST 4096

struct message {
    TAILQ_ENTRY(message) link;
    int fd;
    char text[];
};

static struct {
    int socket;
    TAILQ_HEAD(, message) queue;
    unsigned queued;
    struct event on_retry;
} notify = {.socket = -1};

static void flush(int fd, short what, void *arg);

void mgr_notify_init(struct mgr *mgr)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const char *path = getenv("NOTIFY_SOCKET");
    size_t len = path ? strlen(path) : 0;

    TAILQ_INIT(&notify.queue);
    event_assign(&notify.on_retry, mgr->base, -1, 0, flush, NULL);
    if (!len || len >= sizeof address.sun_path || (*path != '/' && *path != '@'))
        return;
    memcpy(address.sun_path, path, len);
    if (*path == '@')
        address.sun_path[0] = 0;
    notify.socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (notify.socket >= 0 &&
        connect(notify.socket, (struct sockaddr *)&address,
                (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len)) < 0) {
        log_warn("NOTIFY_SOCKET not reachable", "path=\"%s\" error=\"%s\"", path, strerror(errno));
        notify.socket = fd_close(notify.socket);
    }
}

bool mgr_notify_wanted(void)
{
    return notify.socket >= 0;
}

static int send_now(const char *text, int fd)
{
    return fd_send(notify.socket, text, strlen(text), &fd, fd >= 0);
}

static void message_free(struct message *m)
{
    TAILQ_REMOVE(&notify.queue, m, link);
    notify.queued--;
    fd_close(m->fd);
    free(m);
}

static void flush(int fd, short what, void *arg)
{
    static const struct timeval soon = {0, 20000};
    struct message *m;

    while ((m = TAILQ_FIRST(&notify.queue))) {
        int r = send_now(m->text, m->fd);
        if (r == -EAGAIN || r == -ENOBUFS) {
            event_add(&notify.on_retry, &soon);
            return;
        }
        if (r < 0)
            log_warn("systemd not told", "message=\"%s\" error=\"%s\"", m->text, strerror(-r));
        message_free(m);
    }
}

void mgr_notify_fd(const char *text, int fd)
{
    size_t len = strlen(text);

    if (notify.socket < 0)
        return;
    if (notify.queued && !strncmp(text, "STATUS=", 7))
        return;
    if (notify.queued >= QUEUE_MOST) {
        log_warn("systemd does not listen", "dropped=\"%s\"", text);
        return;
    }
    struct message *m = x_alloc(sizeof *m + len + 1);
    memcpy(m->text, text, len + 1);
    m->fd = fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 3) : -1; /* its model may go before it is sent */
    TAILQ_INSERT_TAIL(&notify.queue, m, link);
    notify.queued++;
    if (!event_pending(&notify.on_retry, EV_TIMEOUT, NULL))
        flush(-1, 0, NULL);
}

void mgr_notify(const char *text)
{
    mgr_notify_fd(text, -1);
}

void mgr_notify_free(void)
{
    if (notify.socket < 0)
        return;
    flush(-1, 0, NULL);
    while (!TAILQ_EMPTY(&notify.queue))
        message_free(TAILQ_FIRST(&notify.queue));
    event_del(&notify.on_retry);
    notify.socket = fd_close(notify.socket);
}
