/* SPDX-License-Identifier: Apache-2.0 */
/* What fleet.c (leases), watch.c (what emberd knows) and the page of figures share. */
#ifndef EMBER_DAEMON_GATEWAY_FLEET_H
#define EMBER_DAEMON_GATEWAY_FLEET_H

#include "daemon/gateway/gateway.h"
#include "ember/v1/ember.pb-c.h"
#include "proto/grpc/client.h"

#define FLEET_RPC_MS 10000

/* A lease of an earlier gateway, until its model can be driven. */
struct old_lease {
    char *model, *id, *token, *socket;
};

struct fleet {
    struct gw *gw;
    struct grpc_client *client;
    struct grpc_client_call *listing, *watching, *asking;
    bool connected, listed_once;
    bool list_again; /* something has changed since the list under way was asked for */
    uint64_t listed_ns, status_ns;
    Ember__V1__GetStatusResponse *status; /* the last one; NULL: none yet */
    struct old_lease *old;
    size_t n_old;
    bool ending;
};

/* emberd's figures as of late; asks for newer ones. NULL: it has not been reached. */
const Ember__V1__GetStatusResponse *fleet_status(struct gw *gw);
/* Called every half second: the list, the watch, whatever is due. */
void fleet_watch(struct gw *gw);
/* Models that the configuration names by their folder are made known to emberd. */
void fleet_load_folders(struct fleet *fleet);
/* A lease of an earlier gateway has been noted for the model. */
bool fleet_has_old(const struct fleet *fleet, const char *model);
/*
 * The model of that name, made if need be. When emberd has another under it than before (by its
 * path, its weights' digest, or, after another load, its tokenizer's files), the one before is
 * replaced: its requests end, since their tokens mean nothing to the new one.
 */
struct gw_model *fleet_model(struct gw *gw, const char *name, const char *path, const char *digest,
                             double load_ms);

#endif
