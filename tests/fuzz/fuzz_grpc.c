/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bytes as a client would send them to a gRPC server with the built-in services. An input that does
 * not begin with HTTP/2's preface gets it, and a SETTINGS frame, put in front, so that mutations
 * reach past them.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/fd.h"
#include "proto/grpc/server.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
                              "\0\0\0\4\0\0\0\0\0";

/* Reads and drops what the server answers. */
static void drain(int fd)
{
    char bytes[4096];

    while (read(fd, bytes, sizeof bytes) > 0)
        ;
}

static void put(struct event_base *base, int fd, const void *bytes, size_t n)
{
    const char *p = bytes;

    while (n) {
        ssize_t done = send(fd, p, n, MSG_NOSIGNAL);
        if (done < 0 && errno != EAGAIN)
            return;
        if (done > 0) {
            p += done;
            n -= (size_t)done;
        }
        event_base_loop(base, EVLOOP_NONBLOCK);
        drain(fd);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct event_base *base = event_base_new();
    struct grpc_server_options options = {.max_message = 4096, .max_queued = 65536};
    struct grpc_server *server;
    int pair[2];

    if (!base || grpc_server_new(base, &options, &server, NULL) < 0 ||
        socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0 ||
        grpc_server_add_connection(server, pair[1], NULL) < 0)
        abort();
    if (size < 24 || memcmp(data, preface, 24))
        put(base, pair[0], preface, sizeof preface - 1);
    put(base, pair[0], data, size);
    event_base_loop(base, EVLOOP_NONBLOCK);
    drain(pair[0]);
    if (grpc_server_stats(server).held > (64u << 20))
        abort();
    grpc_server_free(server);
    event_base_free(base);
    fd_close(pair[0]);
    return 0;
}
