/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection that has been refused before its request was read. To close it at once would reset
 * it while the client still sends, and a reset takes back an answer that the client has not read
 * yet. So the sending half is closed, and what still comes is read and dropped: until the client
 * closes as well, has sent nothing for two seconds, or has used up the time that a request has.
 */
#ifndef EMBER_DAEMON_GATEWAY_LINGER_H
#define EMBER_DAEMON_GATEWAY_LINGER_H

#include <event2/event.h>

#include "daemon/gateway/options.h"

struct lingerers;

/* options->request_timeout is looked at when bytes come; options must outlive this. */
struct lingerers *lingerers_new(struct event_base *base, const struct gateway_options *options);
/* Ends all of them; accepts NULL. */
void lingerers_free(struct lingerers *lingerers);
/*
 * `fd` has been given everything that is to be sent, and its owner is about to close it: a copy of
 * it lingers. Without room for one the connection ends with its owner.
 */
void linger(struct lingerers *lingerers, int fd);

#endif
