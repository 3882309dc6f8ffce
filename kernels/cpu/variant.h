/* SPDX-License-Identifier: Apache-2.0 */
/* Which variant of the kernels a device runs, and what names it in cache keys. */
#ifndef EMBER_KERNELS_CPU_VARIANT_H
#define EMBER_KERNELS_CPU_VARIANT_H

#include "kernels/cpu/kernel.h"

/*
 * options->isa, else EMBER_ISA in the environment, else the best that the processor has. -EINVAL:
 * no such variant; -ENOTSUP: not on this processor; texts in error.
 */
int cpu_variant_choose(const struct ember_device_options *options, enum cpu_isa *ret,
                       struct ember_backend_error *error);

/*
 * Fills name and fingerprint: architecture, variant, and a digest of kernel and lowering sources
 * and of the compiler that built the ahead-of-time kernels. `kind` is put in front of the
 * fingerprint.
 */
void cpu_variant_describe(enum cpu_isa isa, const char *kind, struct ember_device_info *info);

/* Fills memory_total and memory_free. */
void cpu_variant_memory(struct ember_device_info *info);

#endif
