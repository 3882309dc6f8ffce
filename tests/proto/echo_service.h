/* SPDX-License-Identifier: Apache-2.0 */
/* The service of echo.proto, for the tests and for echo-server. */
#ifndef EMBER_TESTS_PROTO_ECHO_SERVICE_H
#define EMBER_TESTS_PROTO_ECHO_SERVICE_H

#include "ember/test/echo.pb-c.h"
#include "proto/grpc/server.h"

typedef Ember__Test__EchoRequest echo_request;
typedef Ember__Test__EchoResponse echo_response;

struct echo {
    struct event_base *base;
    unsigned calls, cancelled, held, overruns;
};

/* Registers the service, and its descriptors for reflection. 0 or negative errno. */
int echo_register(struct echo *echo, struct grpc_server *server, struct error *err);

#endif
