/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many instances of a model there are to be: the options for all models, and what per_model
 * says of one: "NAME min=1 max=4 standby=2 idle=30s, OTHER max=8".
 */
#ifndef EMBER_DAEMON_GATEWAY_POLICY_H
#define EMBER_DAEMON_GATEWAY_POLICY_H

#include "daemon/gateway/options.h"

struct policy {
    uint32_t min, max; /* instances leased */
    int standby;       /* asked of emberd; -1: emberd's own number */
    uint64_t idle_ns;  /* an instance without work for so long is given back */
    int tools;         /* enum chat_tools; -1: what the template shows */
    int reasoning;     /* enum chat_reasoning, the same */
};

/* -EINVAL with a text that names the word of per_model that is wrong. */
int policy_check(const struct gateway_options *options, struct error *err);
/* Of the model; per_model has passed policy_check. */
struct policy policy_of(const struct gateway_options *options, const char *model);

#endif
