/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The control socket between emberd and a child: one protobuf message of ember/v1/internal.proto a
 * packet, descriptors beside it. The child inherits its end as descriptor LINK_FD.
 */
#ifndef EMBER_DAEMON_LINK_H
#define EMBER_DAEMON_LINK_H

#include <protobuf-c/protobuf-c.h>
#include <stddef.h>
#include <stdint.h>

#include "base/fd.h"

#define LINK_FD 3
#define LINK_PACKET_MAX (64u * 1024)

/* Sends one message; the descriptors stay the caller's. -EMSGSIZE beyond LINK_PACKET_MAX. */
int link_send(int fd, const ProtobufCMessage *message, const int *fds, size_t n_fds);

/*
 * Receives one message of `type`: 0 and the message (free with protobuf_c_message_free_unpacked),
 * its descriptors in fds (room *n_fds; the caller's from then on). 1: nothing now, on a
 * non-blocking socket. -EPIPE: the peer has closed. -EBADMSG: not such a message.
 */
int link_recv(int fd, const ProtobufCMessageDescriptor *type, ProtobufCMessage **ret_message,
              int *fds, size_t *n_fds);

#endif
