/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/fd.h"
#include "base/mem.h"

#define BACKLOG 512

int address_split(const char *text, char *ret_host, size_t room, uint16_t *ret_port,
                  struct error *err)
{
    const char *colon = strrchr(text, ':'), *host = text;
    size_t len = colon ? (size_t)(colon - text) : 0;
    char *end = NULL;

    unsigned long port = colon && colon[1] >= '0' && colon[1] <= '9' ? strtoul(colon + 1, &end, 10)
                                                                     : UINT16_MAX + 1ul;
    if (!colon || port > UINT16_MAX || *end)
        return error_set(err, EINVAL, "\"%.64s\": write host:port, e.g. 127.0.0.1:8000", text);
    if (len > 1 && *host == '[' && host[len - 1] == ']') {
        host++;
        len -= 2;
    }
    if (len >= room)
        return error_set(err, EINVAL, "\"%.64s\": the host's name is too long", text);
    memcpy(ret_host, host, len);
    ret_host[len] = 0;
    *ret_port = (uint16_t)port;
    return 0;
}

static int listen_at(const struct addrinfo *at, const char *text, struct error *err)
{
    int on = 1;
    _cleanup_fd_ int fd =
        socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP);

    if (fd < 0)
        return error_sys(err, errno, "cannot make a socket for %s", text);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, at->ai_addr, at->ai_addrlen) < 0 || listen(fd, BACKLOG) < 0)
        return error_sys(err, errno, "cannot listen on %s", text);
    return TAKE_FD(fd);
}

int address_listen(const char *text, struct error *err)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
    struct addrinfo *at = NULL;
    char host[256], service[8];
    uint16_t port;

    int r = address_split(text, host, sizeof host, &port, err);
    if (r < 0)
        return r;
    if (!*host)
        strcpy(host, "0.0.0.0");
    else if (!strcmp(host, "localhost"))
        strcpy(host, "127.0.0.1");
    snprintf(service, sizeof service, "%u", port);
    if (getaddrinfo(host, service, &hints, &at) != 0)
        return error_set(err, EINVAL, "\"%.64s\" is not an address: write it as numbers", host);
    r = listen_at(at, text, err);
    freeaddrinfo(at);
    return r;
}

void address_of(int fd, char ret_text[ADDRESS_TEXT_MAX])
{
    struct sockaddr_storage address = {0};
    socklen_t len = sizeof address;
    char host[INET6_ADDRSTRLEN] = "";

    *ret_text = 0;
    if (getsockname(fd, (struct sockaddr *)&address, &len) < 0)
        return;
    if (address.ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)&address;
        inet_ntop(AF_INET, &in->sin_addr, host, sizeof host);
        snprintf(ret_text, ADDRESS_TEXT_MAX, "%s:%u", host, ntohs(in->sin_port));
    } else if (address.ss_family == AF_INET6) {
        const struct sockaddr_in6 *in = (const struct sockaddr_in6 *)&address;
        inet_ntop(AF_INET6, &in->sin6_addr, host, sizeof host);
        snprintf(ret_text, ADDRESS_TEXT_MAX, "[%s]:%u", host, ntohs(in->sin6_port));
    }
}
