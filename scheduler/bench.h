/* SPDX-License-Identifier: Apache-2.0 */
/* What the scheduler itself costs; the clock is the caller's. */
#ifndef EMBER_SCHEDULER_BENCH_H
#define EMBER_SCHEDULER_BENCH_H

#include <stdint.h>

#include "base/error.h"

/*
 * Microseconds a step of `n` decoding sequences of 16 clients: planned and taken back, two in
 * flight. The mean of the best of `rounds` stretches of 200 steps, since others use the processor,
 * too.
 */
int sched_bench(uint32_t n, uint32_t rounds, uint64_t (*clock_ns)(void), double *ret_us,
                struct error *err);

#endif
