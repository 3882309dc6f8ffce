/* SPDX-License-Identifier: Apache-2.0 */
/* The monotonic clock, for the processes; pure code (scheduler/) takes the time as a parameter. */
#ifndef EMBER_BASE_CLOCK_H
#define EMBER_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Nanoseconds of CLOCK_MONOTONIC: the same clock in every process of a host. */
static inline uint64_t clock_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static inline double clock_ms_since(uint64_t start_ns)
{
    return (double)(clock_ns() - start_ns) / 1e6;
}

#endif
