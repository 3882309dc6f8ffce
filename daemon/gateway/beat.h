/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is to be done every so often on a loop that is often awake anyway: a timer that rides on its
 * turns. Each turn that does the work puts the timer off, since whoever is awake for a step need
 * not be woken up for this, with cold caches; without turns the timer makes one.
 */
#ifndef EMBER_DAEMON_GATEWAY_BEAT_H
#define EMBER_DAEMON_GATEWAY_BEAT_H

#include <event2/event.h>
#include <stdbool.h>
#include <stdint.h>

struct beat;

/* `turn` is called (with EV_TIMEOUT and arg) when no turn has asked for so long; it is to ask
 * beat_due. The first time is due at once. NULL: no memory. */
struct beat *beat_new(struct event_base *base, uint64_t every_ns, event_callback_fn turn,
                      void *arg);
void beat_free(struct beat *beat); /* accepts NULL */
/* In a turn of the loop, `now` being clock_ns(): whether the work is to be done in it. */
bool beat_due(struct beat *beat, uint64_t now);

#endif
