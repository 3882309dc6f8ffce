/* SPDX-License-Identifier: Apache-2.0 */
/* Everything about emberd that can be configured (base/config.h says how and where). */
#ifndef EMBER_DAEMON_MANAGER_OPTIONS_H
#define EMBER_DAEMON_MANAGER_OPTIONS_H

#include "base/config.h"

/*
 * X(section, member, type, default, limits, RELOAD or RESTART, meaning)
 * Sizes are bytes, times nanoseconds; 0 stands for what the meaning says of it.
 */
/* clang-format off */
#define EMBERD_OPTIONS(X) \
    X("daemon", socket, PATH, "%t/emberd/emberd.sock", "", RESTART, \
      "Unix socket of the control API") \
    X("daemon", listen, STRING, "", "", RESTART, \
      "host:port on which the control API is served over TCP as well; loopback only") \
    X("daemon", runtime_dir, PATH, "%t/emberd", "", RESTART, \
      "directory for the sockets of instances; its stale contents are removed at start") \
    X("daemon", log_level, ENUM, "info", "error|warn|info|debug", RELOAD, \
      "the least urgent messages that are logged") \
    X("daemon", shutdown_timeout, DURATION, "10s", "0..1h", RELOAD, \
      "how long running generations may go on after SIGTERM") \
    X("cache", cache_dir, PATH, "%C/emberd", "", RESTART, \
      "directory of the kernel and graph cache") \
    X("cache", cache_limit, BYTES, "1GiB", "1MiB..", RESTART, \
      "largest size of the kernel and graph cache; what was used longest ago makes room") \
    X("cache", compile, ENUM, "auto", "auto|never", RELOAD, \
      "whether kernels are compiled for a model's shapes when there is a compiler") \
    X("cache", cc, STRING, "cc", "", RELOAD, \
      "the C compiler that kernels are compiled with") \
    X("packs", packs, ENUM, "auto", "auto|always|never", RELOAD, \
      "whether a pack of a checkpoint is written in the background: auto: when its load had to convert something") \
    X("packs", packs_dir, PATH, "", "", RESTART, \
      "folder of those packs; empty: packs in cache_dir") \
    X("packs", packs_limit, BYTES, "64GiB", "0..", RELOAD, \
      "bytes that packs may take; what was used longest ago makes room; 0: no bound") \
    X("packs", packs_rate, BYTES, "256MiB", "0..", RELOAD, \
      "bytes a second that are written at most; 0: no limit") \
    X("backend", backend, STRING, "cpu", "", RESTART, \
      "\"cpu\", or the path of a plug-in that speaks the ABI of include/ember/backend.h") \
    X("backend", threads, INT, "0", "0..1024", RELOAD, \
      "threads of one instance; 0: one for each processor that the daemon may use") \
    X("backend", pin, ENUM, "auto", "never|auto|always", RELOAD, \
      "whether an instance's threads keep to NUMA nodes and CPUs of its own; auto: where other instances lose nothing by it") \
    X("memory", memory_limit, BYTES, "0", "0..", RELOAD, \
      "bytes for weights, KV and graphs together; 0: what the host or cgroup has, less the reserve") \
    X("memory", memory_reserve, BYTES, "512MiB", "0..", RELOAD, \
      "bytes left to everything else when memory_limit is 0") \
    X("memory", kv_type, ENUM, "auto", "auto|f32|bf16|f16|int8", RELOAD, \
      "what instances keep K and V in; auto is f32, which loses nothing, or bf16 where emberd quantised the weights itself; bf16 and f16 halve a page, int8 (a scale for each token and head) quarters it") \
    X("memory", kv_bytes, BYTES, "0", "0..", RELOAD, \
      "KV memory of one instance; 0: chosen from the model's shape") \
    X("pool", standby, INT, "1", "0..256", RELOAD, \
      "warm instances kept ready for each model") \
    X("pool", standby_max, INT, "8", "0..1024", RELOAD, \
      "largest number of warm instances of all models together") \
    X("pool", max_burst, INT, "8", "1..1024", RELOAD, \
      "instances whose processes are started at the same time") \
    X("pool", early_start, ENUM, "auto", "auto|never", RELOAD, \
      "whether an instance that somebody waits for is started while its weights are still being read") \
    X("pool", spawn_timeout, DURATION, "30s", "100ms..1h", RELOAD, \
      "how long an instance may take from its start to READY") \
    X("pool", lease_ttl, DURATION, "30s", "1s..24h", RELOAD, \
      "how long a lease lasts without being renewed") \
    X("pool", lease_grace, DURATION, "10s", "0..1h", RELOAD, \
      "how long a lease whose holder has gone can be taken up again before its instance goes back to the pool") \
    X("pool", idle_unload, DURATION, "0", "0..", RELOAD, \
      "unload a model that nobody has leased for so long; 0: never") \
    X("models", default_model, PATH, "%D/models/ember-tiny", "", RESTART, \
      "checkpoint folder that is served when no model is named; empty: none") \
    X("models", preload, PATHS, "", "", RESTART, \
      "checkpoint folders that are made resident at start, separated by colons") \
    X("models", load_rate, BYTES, "0", "0..", RELOAD, \
      "bytes a second that a load reads at most; 0: no limit") \
    X("models", load_timeout_no_progress, DURATION, "60s", "1s..1h", RELOAD, \
      "a load that has read nothing for so long has failed") \
    X("gateway", gateway, BOOL, "yes", "", RESTART, \
      "run ember-gateway, which serves the models to OpenAI clients over HTTP") \
    X("gateway", gateway_listen, STRING, "127.0.0.1:8000", "", RESTART, \
      "host:port on which it serves; port 0 takes a free one; while it is taken, emberd goes on without") \
    X("gateway", gateway_config, PATH, "", "", RELOAD, \
      "its configuration file; empty: the one that ember-gateway finds by itself, wherever emberd has its own from") \
    X("gateway", gateway_options, STRING, "", "", RELOAD, \
      "further options for it, as on its command line; double quotes keep blanks within a word")
/* clang-format on */

struct emberd_options {
    EMBERD_OPTIONS(CONFIG_MEMBER)
};

/* Members of ENUM options. */
enum emberd_packs { EMBERD_PACKS_AUTO, EMBERD_PACKS_ALWAYS, EMBERD_PACKS_NEVER };
/* Members of `pin` are those of enum ember_pin (include/ember/backend.h). */
enum emberd_early { EMBERD_EARLY_AUTO, EMBERD_EARLY_NEVER };
enum emberd_compile { EMBERD_COMPILE_AUTO, EMBERD_COMPILE_NEVER };

/* For config_read and its like; options are a struct emberd_options. */
extern const struct config_program emberd_program;

#endif
