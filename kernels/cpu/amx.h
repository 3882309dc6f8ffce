/* SPDX-License-Identifier: Apache-2.0 */
/* Whether AMX is there and works. */
#ifndef EMBER_KERNELS_CPU_AMX_H
#define EMBER_KERNELS_CPU_AMX_H

#include <stdbool.h>

/*
 * Tiles of int8 and bf16: announced by the processor, granted by the kernel to this process (to
 * threads started from now on), and giving the right sums in a trial that survives SIGILL. Found
 * out once; any thread may ask.
 */
bool cpu_amx_works(void);

#endif
