/* SPDX-License-Identifier: Apache-2.0 */
/* A private emberd with a gateway in front, for measuring; and what is asked of it. */
#ifndef EMBER_CLI_SERVE_LAB_H
#define EMBER_CLI_SERVE_LAB_H

#include <time.h>

#include "base/verbs.h"
#include "cli/http_load.h"
#include "cli/lab.h"

struct serve_lab {
    struct lab lab;
    pid_t gateway;
    unsigned port;
    clockid_t cpu; /* the gateway's */
    char *log;
};

/*
 * Starts both. `options` are of the gateway, "--name=value", NULL-terminated, at most 16. A model
 * without tokenizer gets one of `vocab` made-up words, when `vocab` is not 0.
 */
int serve_lab_start(struct serve_lab *lab, const struct lab_options *emberd,
                    const char *const *options, uint32_t vocab, struct error *err);
/* Ends both. Idempotent. */
void serve_lab_free(struct serve_lab *lab);

/* CPU time that the gateway has used, ns. */
uint64_t serve_lab_cpu_ns(const struct serve_lab *lab);
/* Process ids of the model's leased instances; how many there are. */
int serve_lab_instances(struct serve_lab *lab, int32_t *ret_pids, size_t room, size_t *ret_n,
                        struct error *err);
/* Stops all instances of emberd's and waits until it has none and says so. */
int serve_lab_clear(struct serve_lab *lab, struct error *err);

/* A request for a streamed completion: `n_prompt` token ids made from `seed` (the first `n_shared`
 * from `shared`), greedy, exactly `n_output` tokens. */
struct serve_ask {
    uint32_t vocab, n_prompt, n_output, n_shared;
    uint64_t seed, shared;
    unsigned user; /* fairness: who asks */
};
/* Its body; the caller frees it. */
char *serve_body(const struct serve_ask *ask);

#endif
