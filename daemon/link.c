/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/link.h"

#include <errno.h>

#include "base/mem.h"

int link_send(int fd, const ProtobufCMessage *message, const int *fds, size_t n_fds)
{
    uint8_t packet[LINK_PACKET_MAX];
    size_t len = protobuf_c_message_get_packed_size(message);

    if (len > sizeof packet)
        return -EMSGSIZE;
    protobuf_c_message_pack(message, packet);
    return fd_send(fd, packet, len, fds, n_fds);
}

int link_recv(int fd, const ProtobufCMessageDescriptor *type, ProtobufCMessage **ret_message,
              int *fds, size_t *n_fds)
{
    uint8_t packet[LINK_PACKET_MAX];

    ssize_t n = fd_recv(fd, packet, sizeof packet, fds, n_fds);
    if (n == 0 || n == -ECONNRESET)
        return -EPIPE;
    if (n < 0)
        return n == -EAGAIN || n == -EWOULDBLOCK ? 1 : (int)n;
    ProtobufCMessage *message = protobuf_c_message_unpack(type, NULL, (size_t)n, packet);
    if (message) {
        *ret_message = message;
        return 0;
    }
    while (*n_fds)
        fd_close(fds[--*n_fds]);
    return -EBADMSG;
}
