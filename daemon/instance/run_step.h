/* SPDX-License-Identifier: Apache-2.0 */
/* From a Step message to the engine and back: sampling included, nothing about sockets. */
#ifndef EMBER_DAEMON_INSTANCE_RUN_STEP_H
#define EMBER_DAEMON_INSTANCE_RUN_STEP_H

#include <protobuf-c/protobuf-c.h>

#include "ember/v1/step.pb-c.h"
#include "daemon/instance/grammars.h"
#include "engine/engine.h"

#define RUN_STEPS_MAX 8

/*
 * Runs 1 .. RUN_STEPS_MAX steps as one, the others of which join the first, or one after the other
 * when they are too large for that; calls `reply` once for each, in order, with the result, which
 * lives for that call. A step that cannot be run is a result with `error` set, and so are those
 * that were run with it.
 */
void run_steps(struct engine *engine, struct grammars *grammars, Ember__V1__Step *const *steps,
               size_t n, void (*reply)(void *ctx, const Ember__V1__StepResult *result), void *ctx);

#endif
