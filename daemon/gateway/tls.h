/* SPDX-License-Identifier: Apache-2.0 */
/* TLS for the HTTP server: OpenSSL below libevent's bufferevents. TLS 1.2 and 1.3. */
#ifndef EMBER_DAEMON_GATEWAY_TLS_H
#define EMBER_DAEMON_GATEWAY_TLS_H

#include <event2/bufferevent.h>
#include <stdbool.h>

#include "base/error.h"

struct tls;

/* From PEM files: the certificate with its chain, and its key. The text says which file is wrong.
 */
int tls_new(const char *certificate, const char *key, struct tls **ret, struct error *err);
/* Connections that were made from it live on. */
void tls_free(struct tls *tls);
/* A server's end without a socket yet; NULL when memory is short. */
struct bufferevent *tls_bufferevent(struct tls *tls, struct event_base *base);
/* Whether the bufferevent is one of those. */
bool tls_is_on(struct bufferevent *bev);

/*
 * libevent tells of a write to an encrypted bufferevent later in the loop, when the output may hold
 * something again: behind this call (and until callbacks are set again) it is told of only while
 * the output is empty. A plain bufferevent is left as it is: it tells at once.
 */
void tls_tell_when_empty(struct bufferevent *bev);

#endif
