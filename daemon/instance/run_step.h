/* SPDX-License-Identifier: Apache-2.0 */
/* From a Step message to the engine and back: sampling included, nothing about sockets. */
#ifndef EMBER_DAEMON_INSTANCE_RUN_STEP_H
#define EMBER_DAEMON_INSTANCE_RUN_STEP_H

#include <protobuf-c/protobuf-c.h>

#include "ember/v1/step.pb-c.h"
#include "daemon/instance/grammars.h"
#include "engine/engine.h"

/*
 * Runs the step and calls `reply` once with the result, which lives for that call. A step that
 * cannot be run is a result with `error` set.
 */
void run_step(struct engine *engine, struct grammars *grammars, const Ember__V1__Step *step,
              void (*reply)(void *ctx, const Ember__V1__StepResult *result), void *ctx);

#endif
