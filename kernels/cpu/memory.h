/* SPDX-License-Identifier: Apache-2.0 */
/* Mappings that stand for device memory. */
#ifndef EMBER_KERNELS_CPU_MEMORY_H
#define EMBER_KERNELS_CPU_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

struct mapping {
    char *base;    /* aligned to a huge page when large */
    size_t length; /* what is mapped: `bytes` rounded up */
    uint64_t bytes;
};

/* Zeroed private memory, populated page by page as it is touched. bytes > 0. */
int mapping_make(uint64_t bytes, int protection, struct mapping *ret, struct error *err);

/*
 * The first `bytes` of a memfd that can no longer shrink or, unless it is still being filled, be
 * written to (F_SEAL_SHRINK, F_SEAL_WRITE or F_SEAL_FUTURE_WRITE), shared. -EPERM: a seal is
 * missing; -EBADMSG: it is shorter than that.
 */
int mapping_import(int fd, uint64_t bytes, int protection, bool filling, struct mapping *ret,
                   struct error *err);

void mapping_free(struct mapping *mapping);

/* Fills the page tables of a range; -EINVAL beyond the mapping or on a kernel before 5.14. */
int mapping_populate(const struct mapping *mapping, uint64_t offset, uint64_t bytes);

#endif
