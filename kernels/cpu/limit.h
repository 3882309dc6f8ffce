/* SPDX-License-Identifier: Apache-2.0 */
/* How many processors this process may use. */
#ifndef EMBER_KERNELS_CPU_LIMIT_H
#define EMBER_KERNELS_CPU_LIMIT_H

#include <stdbool.h>
#include <stdint.h>

/*
 * The smaller of the affinity mask and the cgroup's CPU quota (v2 cpu.max, v1 cfs quota; every
 * ancestor counts), rounded down since a spinning thread beyond the quota gets all of them
 * throttled. At least 1.
 */
uint32_t cpu_limit(void);

/* Whether a quota is why it is no more: then others run on the same processors. */
bool cpu_limit_shared(void);

/* The quota's part, for tests: `proc` is a /proc/self/cgroup file, `root` where cgroups are
 * mounted. 0: none. */
uint32_t cpu_limit_cgroup(const char *proc, const char *root);

#endif
