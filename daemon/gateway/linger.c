/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/linger.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/mem.h"

#define IDLE_S 2

struct lingerer {
    struct lingerers *all;
    LIST_ENTRY(lingerer) link;
    struct event *readable;
    uint64_t since_ns;
    int fd;
};

struct lingerers {
    struct event_base *base;
    const struct gateway_options *options;
    LIST_HEAD(, lingerer) list;
};

struct lingerers *lingerers_new(struct event_base *base, const struct gateway_options *options)
{
    struct lingerers *all = x_alloc(sizeof *all);

    all->base = base;
    all->options = options;
    LIST_INIT(&all->list);
    return all;
}

static void end(struct lingerer *l)
{
    LIST_REMOVE(l, link);
    if (l->readable)
        event_free(l->readable);
    fd_close(l->fd);
    free(l);
}

void lingerers_free(struct lingerers *all)
{
    if (!all)
        return;
    while (!LIST_EMPTY(&all->list))
        end(LIST_FIRST(&all->list));
    free(all);
}

/* One read for a turn of the loop: others have their turns, however much there is. */
static void on_readable(int fd, short what, void *arg)
{
    static char dropped[64 << 10];
    struct lingerer *l = arg;

    if (what & EV_TIMEOUT) {
        end(l);
        return;
    }
    ssize_t n = recv(fd, dropped, sizeof dropped, MSG_DONTWAIT);
    bool goes_on = n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
    if (!goes_on || clock_ns() - l->since_ns > l->all->options->request_timeout)
        end(l);
}

void linger(struct lingerers *all, int fd)
{
    static const struct timeval idle = {IDLE_S, 0};
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);

    if (copy < 0)
        return;
    shutdown(copy, SHUT_WR);
    struct lingerer *l = x_alloc(sizeof *l);
    *l = (struct lingerer){.all = all, .since_ns = clock_ns(), .fd = copy};
    LIST_INSERT_HEAD(&all->list, l, link);
    l->readable = event_new(all->base, copy, EV_READ | EV_PERSIST, on_readable, l);
    if (!l->readable || event_add(l->readable, &idle) < 0)
        end(l);
}
