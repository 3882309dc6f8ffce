/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many instances a model should have: a function of figures, so that it can be tried on paper.
 *
 * More, as the largest of
 *   - what works the backlog off within its target at the measured speed;
 *   - one more than there are, when somebody has waited longer than the target and none is on its
 * way;
 *   - those in use and `standby`;
 *   - min; and 1, when somebody waits;
 * but never more than max. Fewer: when an instance has been idle for idle_ns beyond min and
 * standby; or is drained first, when the load would have fitted one fewer, half full, all that
 * time.
 */
#ifndef EMBER_SCHEDULER_SCALE_H
#define EMBER_SCHEDULER_SCALE_H

#include <stdint.h>

struct scale_config {
    uint32_t min, max, standby;
    uint64_t wait_target_ns, backlog_target_ns;
};

struct scale_state {
    uint32_t ready;    /* instances that take new sequences */
    uint32_t starting; /* on their way */
    uint32_t idle;     /* of `ready`: with nothing to do */
    uint32_t waiting;  /* sequences */
    uint64_t oldest_wait_ns;
    uint64_t backlog_tokens;
    double tokens_per_s; /* of one instance */
};

/* The number wanted, starting ones included; *ret_why: "load", "wait", "standby", "min" or "max".
 */
uint32_t scale_wanted(const struct scale_config *config, const struct scale_state *state,
                      const char **ret_why);

#endif
