/* SPDX-License-Identifier: Apache-2.0 */
/* Everything about ember-gateway that can be configured (base/config.h says how and where). */
#ifndef EMBER_DAEMON_GATEWAY_OPTIONS_H
#define EMBER_DAEMON_GATEWAY_OPTIONS_H

#include "base/config.h"

/* X(section, member, type, default, limits, RELOAD or RESTART, meaning) */
/* clang-format off */
#define GATEWAY_OPTIONS(X) \
    X("gateway", emberd, STRING, "", "", RESTART, \
      "emberd's control API: a Unix socket's path or host:port; empty: $EMBER_SOCKET or its default") \
    X("gateway", listen, STRING, "127.0.0.1:8000", "", RESTART, \
      "host:port on which HTTP is served; port 0 takes a free one and logs it") \
    X("gateway", model, PATHS, "", "", RESTART, \
      "models that are served: names that emberd knows, or checkpoint folders; empty: all of emberd's") \
    X("gateway", state_file, PATH, "%t/emberd/gateway.leases", "", RESTART, \
      "where leases are noted, so that a restarted gateway takes its instances up again; empty: nowhere") \
    X("gateway", cache_dir, PATH, "%C/emberd", "", RESTART, \
      "artefact cache that tokenizers are kept in, emberd's own or another; empty: none") \
    X("gateway", tool_parser, STRING, "auto", "", RESTART, \
      "how models write tool calls: auto (as the chat template shows), none, or a name such as hermes") \
    X("gateway", reasoning_parser, STRING, "auto", "", RESTART, \
      "how models write their reasoning: auto, none, or a name such as deepseek_r1") \
    X("gateway", log_level, ENUM, "info", "error|warn|info|debug", RELOAD, \
      "the least urgent messages that are logged") \
    X("gateway", workers, INT, "2", "1..64", RESTART, \
      "threads for parsing, templates and tokenizing, and as many for schemas and grammars") \
    X("gateway", grammar_cache, BYTES, "32MiB", "0..4GiB", RESTART, \
      "compiled schemas and grammars that are kept for the next request") \
    X("gateway", admin, BOOL, "no", "", RESTART, \
      "serve /sleep, /wake_up, /is_sleeping and /reset_prefix_cache") \
    X("gateway", drain_timeout, DURATION, "30s", "0..1h", RELOAD, \
      "how long running streams may go on after SIGTERM") \
    X("http", tls_certificate, PATH, "", "", RELOAD, \
      "PEM file with the certificate and its chain; empty: plain HTTP") \
    X("http", tls_key, PATH, "", "", RELOAD, \
      "PEM file with the certificate's key") \
    X("http", api_keys, PATH, "", "", RELOAD, \
      "file of accepted API keys, one a line; empty: everybody may ask") \
    X("http", cors_origins, STRING, "", "", RELOAD, \
      "origins that browsers may call from, separated by commas, or *; empty: none") \
    X("http", max_body, BYTES, "16MiB", "1KiB..1GiB", RESTART, \
      "largest body of a request") \
    X("http", max_headers, BYTES, "64KiB", "1KiB..1MiB", RESTART, \
      "largest header block of a request") \
    X("http", client_timeout, DURATION, "60s", "1s..1h", RESTART, \
      "how long a client may neither send nor take a byte that is due, and a connection be idle") \
    X("http", request_timeout, DURATION, "60s", "1s..1h", RELOAD, \
      "how long a request may take to arrive as a whole, however slowly it drips") \
    X("http", reader_backlog, BYTES, "1MiB", "4KiB..1GiB", RELOAD, \
      "a stream whose reader lets more than so much pile up is ended") \
    X("http", heartbeat, DURATION, "5s", "100ms..10m", RELOAD, \
      "a stream that still waits for its first token gets a comment so often") \
    X("scheduler", max_queue, INT, "1024", "1..1000000", RESTART, \
      "sequences that may wait for each model; beyond it requests get 429") \
    X("scheduler", queue_timeout, DURATION, "5m", "1s..24h", RELOAD, \
      "how long a request may wait for its first step, loading included") \
    X("scheduler", step_tokens, INT, "0", "0..1000000", RESTART, \
      "tokens of one step; 0: what the instance takes") \
    X("scheduler", prefill_tokens, INT, "0", "0..1000000", RESTART, \
      "of them for prompts in a step that generates as well; 0: no limit of its own") \
    X("scheduler", step_time, DURATION, "200ms", "0..1h", RESTART, \
      "prompts are cut so that a step takes about so long, at the speed that is measured; 0: as long as it likes") \
    X("scheduler", prefix_cache, BOOL, "yes", "", RESTART, \
      "share KV pages between requests that begin alike") \
    X("scheduler", token_refs, BOOL, "yes", "", RESTART, \
      "plan a step before the tokens of the one in flight are back") \
    X("scheduler", stall_timeout, DURATION, "60s", "100ms..1h", RESTART, \
      "a step that takes so long means that its instance is replaced") \
    X("scheduler", min_instances, INT, "0", "0..1024", RESTART, \
      "instances of each model that are kept leased") \
    X("scheduler", max_instances, INT, "1", "1..1024", RESTART, \
      "most instances of each model") \
    X("scheduler", wait_target, DURATION, "1s", "1ms..1h", RESTART, \
      "another instance is wanted when a request has waited for so long") \
    X("scheduler", backlog_target, DURATION, "5s", "1ms..1h", RESTART, \
      "as many instances are wanted as work off what waits within so long, at the measured speed") \
    X("scheduler", per_model, STRING, "", "", RESTART, \
      "what differs for a model: \"NAME min=1 max=4 standby=2 idle=30s, OTHER max=8\"; standby is emberd's to keep") \
    X("scheduler", idle_release, DURATION, "60s", "0..24h", RESTART, \
      "an instance without work for so long is given back")
/* clang-format on */

struct gateway_options {
    GATEWAY_OPTIONS(CONFIG_MEMBER)
};

/* For config_read and its like; options are a struct gateway_options. */
extern const struct config_program gateway_program;

#endif
