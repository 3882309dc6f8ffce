/* SPDX-License-Identifier: Apache-2.0 */
/* The driver's end of the step protocol, one step at a time: what `generate` and `bench` drive an
 * instance with. */
#ifndef EMBER_CLI_STEP_CLIENT_H
#define EMBER_CLI_STEP_CLIENT_H

#include <stdint.h>

#include "base/error.h"
#include "base/mem.h"
#include "ember/v1/step.pb-c.h"

struct step_client;

/* Connects to an instance's socket and says Hello. -EACCES: not the lease's token; -EPIPE: the
 * instance has gone. */
int step_client_open(const char *socket, const char *token, struct step_client **ret,
                     struct error *err);
void step_client_free(struct step_client *client);
DEFINE_CLEANUP(struct step_client *, step_client_free)

const Ember__V1__Welcome *step_client_welcome(const struct step_client *client);

/*
 * Runs one step; *ret_result is valid until the next call. -EPIPE: the instance has gone (start
 * again elsewhere); -ETIMEDOUT after timeout_ms; -ECANCELED when the user interrupts; other errors
 * are the step's own.
 */
int step_client_run(struct step_client *client, const Ember__V1__Step *step, int timeout_ms,
                    const Ember__V1__StepResult **ret_result, struct error *err);

#endif
