/* SPDX-License-Identifier: Apache-2.0 */
/* From a target's text to a socket. */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/un.h>

#include "base/fd.h"
#include "proto/grpc/client-internal.h"

static const char *unix_path(const char *target)
{
    if (!strncmp(target, "unix://", 7))
        return target + 7;
    if (!strncmp(target, "unix:", 5))
        return target + 5;
    return target[0] == '/' || target[0] == '.' ? target : NULL;
}

/* "host:port" or "[v6]:port" → both parts; the caller frees *ret_host. NULL: not of this form. */
static const char *split_port(const char *target, char **ret_host)
{
    const char *colon = strrchr(target, ':');
    size_t n = colon ? (size_t)(colon - target) : 0;

    if (!n || !colon[1] || strspn(colon + 1, "0123456789") != strlen(colon + 1))
        return NULL;
    if (target[0] == '[' && target[n - 1] == ']') {
        target++;
        n -= 2;
    } else if (memchr(target, ':', n)) {
        return NULL;
    }
    if (!n)
        return NULL;
    *ret_host = x_strndup(target, n);
    return colon + 1;
}

int client_check_target(const char *target, struct error *err)
{
    const size_t room = sizeof((struct sockaddr_un *)NULL)->sun_path;
    const char *path = unix_path(target);
    _cleanup_free_ char *host = NULL;

    if (path && (!*path || strlen(path) >= room))
        return error_set(err, EINVAL, "socket path %s has %zu bytes, 1 to %zu are possible", path,
                         strlen(path), room - 1);
    if (!path && !split_port(target, &host))
        return error_set(err, EINVAL, "%s is neither a socket path nor host:port", target);
    return 0;
}

static int tcp_socket(const char *target, bool *ret_connecting, struct error *err)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    struct addrinfo *list;
    _cleanup_free_ char *host = NULL;
    const char *port = split_port(target, &host);
    int one = 1;

    int r = getaddrinfo(host, port, &hints, &list);
    if (r)
        return error_set(err, EHOSTUNREACH, "cannot resolve %s: %s", target, gai_strerror(r));
    _cleanup_fd_ int fd = socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int errnum = fd < 0 || connect(fd, list->ai_addr, list->ai_addrlen) < 0 ? errno : 0;
    freeaddrinfo(list);
    if (errnum && errnum != EINPROGRESS)
        return error_sys(err, errnum, "cannot connect to %s", target);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    *ret_connecting = errnum == EINPROGRESS;
    return TAKE_FD(fd);
}

int client_socket(const char *target, bool *ret_connecting, struct error *err)
{
    const char *path = unix_path(target);

    if (!path)
        return tcp_socket(target, ret_connecting, err);
    *ret_connecting = false;
    return fd_connect(path, SOCK_NONBLOCK, err);
}
