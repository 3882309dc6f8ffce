/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Resident weights on the CPU: one sealed memfd per model, mapped shared and read-only by every
 * instance, so that N instances cost one copy. No names: nothing in /dev/shm or any tmpfs, the
 * memory goes with the last descriptor and mapping.
 *
 * The loader: resident_create, write through resident_data, resident_seal, hand on resident_fd.
 * An instance: resident_map_readonly(fd), resident_unmap.
 *
 * Seals: SHRINK | GROW | WRITE | SEAL. F_SEAL_WRITE needs that no writable mapping exists, so
 * sealing unmaps the loader's; after it nobody can change or truncate the bytes, and no reader can
 * get a SIGBUS. Readers refuse a descriptor that lacks any of the seals.
 */
#ifndef EMBER_CACHE_RESIDENT_H
#define EMBER_CACHE_RESIDENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/mem.h"

struct resident;

/*
 * Bytes that this process may still allocate without pushing the host or its control group into
 * reclaim: the least of MemAvailable and, for the process's cgroup and all above it (v1 or v2), the
 * limit less the usage, clean page cache not counted as usage. UINT64_MAX when nothing can be read.
 */
uint64_t resident_host_budget(void);
/* Memory and swap of the host together, whoever uses them: more can never be held. UINT64_MAX when
 * it cannot be read. */
uint64_t resident_host_total(void);
/* resident_host_budget with other roots instead of "/proc" and "/sys/fs/cgroup", for tests. */
uint64_t resident_budget_at(const char *proc, const char *cgroup_root);

/*
 * A new memfd of `bytes` (> 0), mapped writable and zero. `name` shows in /proc/PID/maps only.
 * Uses explicit huge pages when enough are free, else plain pages with MADV_HUGEPAGE; on several
 * NUMA nodes they come from all in turn, for whoever touches them (base/topology.h).
 * -ENOMEM with the numbers when it would exceed resident_host_budget().
 */
int resident_create(const char *name, uint64_t bytes, struct resident **ret, struct error *err);
/* Writable until sealed, then NULL. */
void *resident_data(struct resident *r);
uint64_t resident_size(const struct resident *r);
/* Bytes of a page of its memory: 4096, or the huge page size when it has explicit huge pages. */
uint64_t resident_page(const struct resident *r);
/*
 * Makes the 2 MiB around byte `at` present, and some of those around it: 1 when they are one huge
 * page, so that reading straight into resident_data() costs no fault for each small page; 0 when
 * they are not (no support, no such page free, the end of the memory): then write(2) is the cheaper
 * way in. *ret_ms: how long the kernel took for 2 MiB, 0 when they were there; a host with
 * fragmented memory may take long. Any thread may call it.
 */
int resident_touch(struct resident *r, uint64_t at, double *ret_ms);
/* A read-only descriptor of memory that is not sealed yet, the caller's; it can no longer shrink
 * or grow from here on. */
int resident_share_early(struct resident *r, int *ret_fd, struct error *err);
/* Unmaps and seals. */
int resident_seal(struct resident *r, struct error *err);
/* The descriptor, still owned by r (dup or send it); close-on-exec. */
int resident_fd(const struct resident *r);
void resident_free(struct resident *r); /* closes and unmaps; idempotent */
DEFINE_CLEANUP(struct resident *, resident_free)

/*
 * Maps a sealed memfd shared and read-only. `bytes` must be its size (for explicit huge pages:
 * rounded up to them). -EBADMSG: wrong size; -EPERM: not sealed, or not a memfd. The fd stays the
 * caller's. With populate the pages' tables are filled at once (about 0.1 ms a GiB with huge pages,
 * tens of ms a GiB with small ones); without it each first touch faults in 64 KiB around it.
 */
int resident_map_readonly(int fd, uint64_t bytes, bool populate, const void **ret_addr,
                          struct error *err);
void resident_unmap(const void *addr, uint64_t bytes);

#endif
