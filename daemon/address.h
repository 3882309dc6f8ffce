/* SPDX-License-Identifier: Apache-2.0 */
/* "host:port" in options, and sockets that listen there. Nothing here asks a name server. */
#ifndef EMBER_DAEMON_ADDRESS_H
#define EMBER_DAEMON_ADDRESS_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define ADDRESS_TEXT_MAX 80

/*
 * Splits "host:port", "[::1]:port" or ":port" (host is then empty). -EINVAL with a text that says
 * what to write.
 */
int address_split(const char *text, char *ret_host, size_t room, uint16_t *ret_port,
                  struct error *err);

/*
 * A TCP socket, non-blocking and close-on-exec, that listens at "host:port"; the host is a number
 * or "localhost", empty means every IPv4 interface, port 0 a free port. The descriptor, or a
 * negative errno: -EADDRINUSE when somebody else has the port.
 */
int address_listen(const char *text, struct error *err);

/* What a socket is bound to, as address_listen takes it; "" when it is no TCP socket. */
void address_of(int fd, char ret_text[ADDRESS_TEXT_MAX]);

#endif
