/* SPDX-License-Identifier: Apache-2.0 */
/*
 * echo-server SOCKET: serves echo.proto until standard input ends or SIGTERM comes. Prints "ready
 * PORT" (a loopback TCP port as well). A line "health N" on standard input sets the health of
 * ember.test.Echo.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "echo_service.h"

struct program {
    struct event_base *base;
    struct grpc_server *server;
};

static void on_done(void *user)
{
    event_base_loopbreak(user);
}

static void on_term(evutil_socket_t fd, short what, void *user)
{
    struct program *p = user;

    grpc_server_shutdown(p->server, 500, on_done, p->base);
}

static void on_stdin(evutil_socket_t fd, short what, void *user)
{
    struct program *p = user;
    char line[64];
    ssize_t n = read(fd, line, sizeof line - 1);

    if (n <= 0) {
        event_base_loopbreak(p->base);
        return;
    }
    line[n] = 0;
    if (!strncmp(line, "health ", 7))
        grpc_server_set_health(p->server, "ember.test.Echo", (enum grpc_health)atoi(line + 7));
}

int main(int argc, char **argv)
{
    struct program p = {.base = event_base_new()};
    struct echo echo = {.base = p.base};
    struct grpc_server_options options = {.max_queued = 1 << 20};
    struct error err = {0};
    uint16_t port = 0;

    if (argc != 2 || grpc_server_new(p.base, &options, &p.server, &err) < 0 ||
        echo_register(&echo, p.server, &err) < 0 ||
        grpc_server_listen_unix(p.server, argv[1], 0600, &err) < 0 ||
        grpc_server_listen_tcp(p.server, "127.0.0.1", 0, &port, &err) < 0) {
        fprintf(stderr, "echo-server: %s\n", argc == 2 ? err.text : "one argument, a socket path");
        return 1;
    }
    struct event *term = evsignal_new(p.base, SIGTERM, on_term, &p);
    struct event *input = event_new(p.base, STDIN_FILENO, EV_READ | EV_PERSIST, on_stdin, &p);
    evsignal_add(term, NULL);
    event_add(input, NULL);
    printf("ready %u\n", (unsigned)port);
    fflush(stdout);
    event_base_dispatch(p.base);
    event_free(term);
    event_free(input);
    grpc_server_free(p.server);
    event_base_free(p.base);
    return 0;
}
