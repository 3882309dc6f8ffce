/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What evhttp lacks, on the bufferevents of its connections:
 *
 *   - a request has a time within which all of it must have come, however slowly the bytes drip;
 *   - the pages of HTML that evhttp answers by itself (malformed or oversized requests) become
 *     error objects of OpenAI's form before they leave; a header block beyond max_headers is 431;
 *   - such a refusal is sent at once, and its connection lingers (linger.h), so that a client that
 *     still sends can read it.
 *
 * Nothing tells when evhttp frees a bufferevent, so nothing here points to one: a connection is its
 * descriptor together with the kernel's cookie of the socket.
 */
#ifndef EMBER_DAEMON_GATEWAY_GUARD_H
#define EMBER_DAEMON_GATEWAY_GUARD_H

#include <event2/bufferevent.h>
#include <stdint.h>

#include "daemon/gateway/options.h"

struct guard;

/* `begun` is called when requests begin to come where none was coming: guard_sweep is to be called
 * from time to time until it says that none is. */
struct guard *guard_new(struct event_base *base, const struct gateway_options *options,
                        void (*begun)(void *arg), void *arg);
void guard_free(struct guard *guard);
/* A new connection's bufferevent, before it has a socket. */
void guard_watch(struct guard *guard, struct bufferevent *bev);
/* A whole request has come from this descriptor. */
void guard_arrived(struct guard *guard, int fd);
/* Ends connections whose request has been coming for longer than limit; returns how many.
 * *ret_coming: requests that may still be coming. */
unsigned guard_sweep(struct guard *guard, uint64_t now, uint64_t limit_ns, size_t *ret_coming);

#endif
