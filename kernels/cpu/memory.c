/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cpu/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/fault.h"
#include "base/mem.h"

#define HUGE_PAGE (2 * MIB)
/* Below this a huge page's zeroing costs a start more than it saves. */
#define HUGE_FROM (32 * MIB)

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

static int out_of_memory(uint64_t bytes, struct error *err)
{
    return error_set(err, ENOMEM, "cannot map %llu bytes", (unsigned long long)bytes);
}

/* Maps at a huge page's boundary, for which a huge page more is reserved and given back. */
static void *map_aligned(size_t length, int protection, int flags, int fd)
{
    size_t room;
    char *area, *at;

    if (length < HUGE_PAGE)
        return mmap(NULL, length, protection, flags, fd, 0);
    if (!size_add(length, HUGE_PAGE, &room))
        return MAP_FAILED;
    area = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (area == MAP_FAILED)
        return MAP_FAILED;
    at = (char *)size_align((uintptr_t)area, HUGE_PAGE);
    if (mmap(at, length, protection, flags | MAP_FIXED, fd, 0) == MAP_FAILED) {
        munmap(area, room);
        return MAP_FAILED;
    }
    if (at > area)
        munmap(area, (size_t)(at - area));
    munmap(at + length, room - length - (size_t)(at - area));
    return at;
}

int mapping_make(uint64_t bytes, int protection, struct mapping *ret, struct error *err)
{
    uint64_t length = size_align(bytes, 4096);
    void *at;

    if (!bytes)
        return error_set(err, EINVAL, "0 bytes of memory asked for");
    if (length > PTRDIFF_MAX || fault_hit(FAULT_MMAP))
        return out_of_memory(bytes, err);
    at = map_aligned(length, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
    if (at == MAP_FAILED)
        return out_of_memory(bytes, err);
    if (length >= HUGE_FROM)
        madvise(at, length, MADV_HUGEPAGE);
    *ret = (struct mapping){at, length, bytes};
    return 0;
}

static int check_sealed(int fd, uint64_t bytes, bool filling, size_t *ret_page, struct error *err)
{
    int seals = fcntl(fd, F_GET_SEALS);
    struct stat st;

    if (seals < 0 || fstat(fd, &st) < 0)
        return error_sys(err, errno, "shared memory is not a memfd");
    if (!(seals & F_SEAL_SHRINK) || (!filling && !(seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE))))
        return error_set(err, EPERM,
                         "shared memory is not sealed against shrinking and writing (seals %#x)",
                         seals);
    if (st.st_size < 0 || (uint64_t)st.st_size < bytes)
        return error_set(err, EBADMSG, "shared memory has %lld bytes, expected %llu",
                         (long long)st.st_size, (unsigned long long)bytes);
    /* A hugetlb memfd is mapped and unmapped in whole pages of its own size. */
    *ret_page = st.st_blksize > 4096 && !(st.st_blksize & (st.st_blksize - 1))
                    ? (size_t)st.st_blksize
                    : 4096;
    return 0;
}

int mapping_import(int fd, uint64_t bytes, int protection, bool filling, struct mapping *ret,
                   struct error *err)
{
    size_t page = 0;
    uint64_t length;
    void *at;
    int r = check_sealed(fd, bytes, filling, &page, err);

    if (r < 0)
        return r;
    if (!bytes)
        return error_set(err, EINVAL, "0 bytes of shared memory");
    length = size_align(bytes, page);
    if (length > PTRDIFF_MAX || page > HUGE_PAGE || fault_hit(FAULT_MMAP))
        return out_of_memory(bytes, err);
    at = map_aligned(length, protection, MAP_SHARED, fd);
    if (at == MAP_FAILED)
        return out_of_memory(bytes, err);
    *ret = (struct mapping){at, length, bytes};
    return 0;
}

void mapping_free(struct mapping *mapping)
{
    if (mapping->base)
        munmap(mapping->base, mapping->length);
    mapping->base = NULL;
}

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14; the C library's headers may be older */
#endif

int mapping_populate(const struct mapping *mapping, uint64_t offset, uint64_t bytes)
{
    uint64_t first = offset & ~UINT64_C(4095), last;

    if (!size_add(offset, bytes, &last) || last > mapping->bytes)
        return -EINVAL;
    last = MIN(size_align(last, 4096), mapping->length);
    return madvise(mapping->base + first, last - first, MADV_POPULATE_READ) < 0 ? -errno : 0;
}
