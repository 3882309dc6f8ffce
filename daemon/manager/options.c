/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/manager/options.h"

static const struct config_key keys[] = {
#define X(...) CONFIG_ROW(struct emberd_options, __VA_ARGS__)
    EMBERD_OPTIONS(X)
#undef X
};

const struct config_program emberd_program = {
    .name = "emberd",
    .version = EMBER_VERSION,
    .summary = "keeps language models resident and starts instances of them at once",
    .about =
        "emberd holds the weights of models in memory, keeps compiled kernels and captured graphs "
        "in a cache on disk, and has warm instances standing by, so that a call of SpawnInstance "
        "is answered within milliseconds. It is controlled over gRPC on a Unix socket; emberctl(1) "
        "is the tool for that.\n\n"
        "Without any configuration it serves a small model of its own, and ember-gateway(8), which "
        "it runs, serves it to OpenAI clients at http://127.0.0.1:8000.\n\n"
        "SIGTERM ends it after the generations that are under way; SIGHUP reads the configuration "
        "again.",
    .default_file = "/etc/emberd/emberd.conf",
    .own_file = "emberd/emberd.conf",
    .see_also = "emberctl(1), ember-gateway(8)",
    .keys = keys,
    .n_keys = ARRAY_LEN(keys),
};
