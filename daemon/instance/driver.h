/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Drivers: the connections on an instance's socket. One of them, the one whose Hello named the
 * lease's token, is the driver and may send steps; the newest such connection wins, so that a
 * driver that restarts takes over. Whatever a connection sends can end only that connection.
 */
#ifndef EMBER_DAEMON_INSTANCE_DRIVER_H
#define EMBER_DAEMON_INSTANCE_DRIVER_H

#include <poll.h>

#include "engine/engine.h"
#include "proto/step_frame.h"

#define DRIVER_CONNECTIONS 8    /* more than that are refused */
#define DRIVER_HELLO_BYTES 4096 /* largest frame of a connection that is not the driver */
#define DRIVER_HELLO_MS 5000    /* a connection that says nothing is dropped */
#define DRIVER_WRITE_MS 10000   /* so is a driver that does not read */

struct connection {
    int fd; /* -1: free */
    bool is_driver;
    uint64_t since; /* clock_ns of accept */
    struct frame_reader reader;
};

struct drivers {
    struct engine *engine;
    struct grammars *grammars; /* of the driver */
    const char *instance_id, *model;
    char lease[65]; /* token; "" when not leased */
    struct connection connections[DRIVER_CONNECTIONS];
    /* Told when the driver changes: connected or gone. */
    void (*changed)(void *ctx, bool connected);
    /* Asked when a Hello names another token than the lease's: a grant may still be under way. */
    void (*refresh)(void *ctx);
    void *ctx;
};

void drivers_init(struct drivers *drivers);
void drivers_free(struct drivers *drivers);

/* Accepts one connection from the listening socket. */
void drivers_accept(struct drivers *drivers, int listener);
/* Fills poll entries (room for DRIVER_CONNECTIONS); returns how many. */
size_t drivers_poll(const struct drivers *drivers, struct pollfd *fds);
/* Serves what has arrived on connection fd: at most one step, so that the caller's loop stays
 * responsive. */
void drivers_serve(struct drivers *drivers, int fd);
/* True when a frame that has been read already waits to be served; *ret_fd is its connection. */
bool drivers_pending(const struct drivers *drivers, int *ret_fd);
/* Drops connections that have not said Hello in time; returns ms until the next may be due, -1 for
 * none. */
int drivers_expire(struct drivers *drivers);
/* The lease is over: the driver is dropped, its token forgotten. */
void drivers_end_lease(struct drivers *drivers);

#endif
