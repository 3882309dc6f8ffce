/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/options.h"

static const struct config_key keys[] = {
#define X(...) CONFIG_ROW(struct gateway_options, __VA_ARGS__)
    GATEWAY_OPTIONS(X)
#undef X
};

const struct config_program gateway_program = {
    .name = "ember-gateway",
    .version = EMBER_VERSION,
    .summary = "serves emberd's models to OpenAI clients over HTTP",
    .about =
        "ember-gateway leases instances from emberd, batches the requests of all clients into "
        "their steps, and answers as OpenAI's API does. It holds nothing that a restart would lose "
        "for good, and may run on its own beside any emberd on the same host.\n\n"
        "SIGTERM ends it after the streams that are under way.",
    .default_file = "/etc/emberd/gateway.conf",
    .own_file = "emberd/gateway.conf",
    .see_also = "emberd(8), emberctl(1)",
    .keys = keys,
    .n_keys = ARRAY_LEN(keys),
};
