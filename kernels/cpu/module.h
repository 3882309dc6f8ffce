/* SPDX-License-Identifier: Apache-2.0 */
/* Specialised kernels as shared objects in memory. */
#ifndef EMBER_KERNELS_CPU_MODULE_H
#define EMBER_KERNELS_CPU_MODULE_H

#include "base/error.h"
#include "kernels/cpu/kernel.h"

struct module;

/*
 * Loads an object that compile_object made. What the dynamic loader would follow blindly is checked
 * first (-EBADMSG): ELF header, machine, segments within the blob. Those who store blobs guard
 * their content by checksums. Nothing of the blob is left in any file system.
 */
int module_open(const void *blob, size_t len, struct module **ret, struct error *err);
void module_close(struct module *module);

/* -ENOENT: the module is not this kernel's. */
int module_entry(struct module *module, const char *kernel, cpu_kernel_fn *ret, struct error *err);

#endif
