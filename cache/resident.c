/* SPDX-License-Identifier: Apache-2.0 */
#include "cache/resident.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/fd.h"
#include "base/topology.h"

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL)
#define SMALL_FILE (256 * KIB)

struct resident {
    int fd;
    void *data;
    uint64_t bytes, mapped, page;
    pthread_mutex_t making; /* of huge pages */
    _Atomic uint64_t made;  /* up to here they were tried for */
};

#define HUGE_PAGE (2 * MIB)
#define AT_ONCE (32 * MIB) /* that huge pages are made of */
#define TURNS 3            /* to make one that could not be made among others */

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* madvise(2); since Linux 6.1 */
#endif

/* ---- Budget ---- */

/* The number behind `name` at the start of a line; false when there is none. */
static bool number_after(const char *text, const char *name, uint64_t *ret)
{
    size_t len = strlen(name);

    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (!strncmp(line, name, len)) {
            char *end;
            uint64_t v = strtoull(line + len, &end, 10);
            if (end == line + len)
                return false;
            *ret = v;
            return true;
        }
        if (!*line)
            break;
    }
    return false;
}

static bool read_number(const char *dir, const char *file, uint64_t *ret)
{
    _cleanup_free_ char *path = x_printf("%s/%s", dir, file), *text = NULL;
    size_t len;

    return !fd_read_file(path, SMALL_FILE, &text, &len, NULL) && number_after(text, "", ret);
}

static uint64_t stat_number(const char *dir, const char *name)
{
    _cleanup_free_ char *path = x_printf("%s/memory.stat", dir), *text = NULL;
    uint64_t v = 0;
    size_t len;

    if (!fd_read_file(path, SMALL_FILE, &text, &len, NULL))
        number_after(text, name, &v);
    return v;
}

/* What one control group leaves, v1 or v2 by its files. "max" is no number: no bound. */
static uint64_t group_budget(const char *dir, bool v2)
{
    uint64_t limit, usage;

    if (!read_number(dir, v2 ? "memory.max" : "memory.limit_in_bytes", &limit) ||
        !read_number(dir, v2 ? "memory.current" : "memory.usage_in_bytes", &usage))
        return UINT64_MAX;
    uint64_t cache = stat_number(dir, v2 ? "inactive_file " : "total_inactive_file ");
    usage -= MIN(usage, cache);
    return limit > usage ? limit - usage : 0;
}

/* The group at `path` and all above it. */
static uint64_t groups_budget(const char *root, const char *path, bool v2)
{
    _cleanup_free_ char *dir = x_printf("%s%s", root, path);
    uint64_t least = UINT64_MAX;

    for (size_t root_len = strlen(root);;) {
        least = MIN(least, group_budget(dir, v2));
        char *slash = strrchr(dir, '/');
        if (!slash || (size_t)(slash - dir) < root_len)
            return least;
        *slash = 0;
    }
}

/* A line of /proc/self/cgroup: "0::/path" (v2) or "N:memory,...:/path" (v1). */
static uint64_t line_budget(const char *line, size_t len, const char *cgroup_root)
{
    _cleanup_free_ char *copy = x_strndup(line, len);
    char *controllers = strchr(copy, ':'),
         *path = controllers ? strchr(controllers + 1, ':') : NULL;

    if (!path || strstr(path, "/../"))
        return UINT64_MAX;
    *path++ = 0;
    controllers++;
    if (!*controllers) { /* a hybrid host has the v2 tree under unified/ without a memory controller
                          */
        return groups_budget(cgroup_root, strcmp(path, "/") ? path : "", true);
    }
    char *state = NULL;
    for (char *c = strtok_r(controllers, ",", &state); c; c = strtok_r(NULL, ",", &state))
        if (!strcmp(c, "memory")) {
            _cleanup_free_ char *root = x_printf("%s/memory", cgroup_root);
            return groups_budget(root, strcmp(path, "/") ? path : "", false);
        }
    return UINT64_MAX;
}

uint64_t resident_budget_at(const char *proc, const char *cgroup_root)
{
    _cleanup_free_ char *meminfo_path = x_printf("%s/meminfo", proc), *meminfo = NULL;
    _cleanup_free_ char *group_path = x_printf("%s/self/cgroup", proc), *groups = NULL;
    uint64_t least = UINT64_MAX, kib;
    size_t len;

    if (!fd_read_file(meminfo_path, SMALL_FILE, &meminfo, &len, NULL) &&
        number_after(meminfo, "MemAvailable:", &kib))
        size_mul(kib, KIB, &least);
    if (fd_read_file(group_path, SMALL_FILE, &groups, &len, NULL) < 0)
        return least;
    for (const char *line = groups; *line;) {
        size_t n = strcspn(line, "\n");
        least = MIN(least, line_budget(line, n, cgroup_root));
        line += n + (line[n] == '\n');
    }
    return least;
}

uint64_t resident_host_budget(void)
{
    return resident_budget_at("/proc", "/sys/fs/cgroup");
}

uint64_t resident_host_total(void)
{
    struct sysinfo info;
    uint64_t units, bytes;

    if (sysinfo(&info) < 0 || !size_add(info.totalram, info.totalswap, &units) ||
        !size_mul(units, info.mem_unit, &bytes))
        return UINT64_MAX;
    return bytes;
}

/* ---- Making ---- */

/* Size of explicit huge pages when enough are free for bytes, else 0. */
static uint64_t huge_page_for(uint64_t bytes)
{
    _cleanup_free_ char *meminfo = NULL;
    uint64_t kib = 0, free_pages = 0, reserved = 0, page;
    size_t len;

    if (fd_read_file("/proc/meminfo", SMALL_FILE, &meminfo, &len, NULL) < 0 ||
        !number_after(meminfo, "Hugepagesize:", &kib) ||
        !number_after(meminfo, "HugePages_Free:", &free_pages) ||
        !number_after(meminfo, "HugePages_Rsvd:", &reserved) || !size_mul(kib, KIB, &page) ||
        !page || (page & (page - 1)))
        return 0;
    uint64_t unreserved = free_pages - MIN(free_pages, reserved);
    return unreserved && (bytes - 1) / page < unreserved ? page : 0;
}

/* At a huge page's boundary, or no page of the mapping could be one. */
static void *map_aligned(const struct resident *r)
{
    size_t room = r->mapped + HUGE_PAGE;
    char *area = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (area == MAP_FAILED)
        return MAP_FAILED;
    char *at = (char *)size_align((uintptr_t)area, HUGE_PAGE);
    char *end = (char *)size_align((uintptr_t)at + r->mapped, 4096);
    if (mmap(at, r->mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, r->fd, 0) ==
        MAP_FAILED) {
        munmap(area, room);
        return MAP_FAILED;
    }
    if (at > area)
        munmap(area, (size_t)(at - area));
    if (area + room > end)
        munmap(end, (size_t)(area + room - end));
    return at;
}

static int make_memfd(struct resident *r, const char *name, uint64_t huge)
{
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING | (huge ? MFD_HUGETLB : 0);

    r->page = huge ? huge : (uint64_t)sysconf(_SC_PAGESIZE);
    r->mapped = size_align(r->bytes, r->page);
    r->fd = fault_hit(FAULT_FD) ? (errno = EMFILE, -1) : memfd_create(name, flags);
    if (r->fd < 0 || ftruncate(r->fd, (off_t)(huge ? r->mapped : r->bytes)) < 0)
        return -errno;
    r->data = fault_hit(FAULT_MMAP) ? (errno = ENOMEM, MAP_FAILED) : map_aligned(r);
    if (r->data == MAP_FAILED) {
        r->data = NULL;
        return -errno;
    }
    memory_interleave(r->data, r->mapped);
    if (!huge)
        madvise(r->data, r->mapped, MADV_HUGEPAGE); /* no effect where the host's shared memory has
                                                       none; resident_touch then asks for each */
    return 0;
}

static void release(struct resident *r)
{
    if (r->data)
        munmap(r->data, r->mapped);
    r->data = NULL;
    r->fd = fd_close(r->fd);
}

int resident_create(const char *name, uint64_t bytes, struct resident **ret, struct error *err)
{
    _cleanup_(resident_freep) struct resident *r = x_alloc(sizeof *r);
    uint64_t huge, budget;

    r->fd = -1;
    r->bytes = bytes;
    pthread_mutex_init(&r->making, NULL);
    if (!bytes || bytes > INT64_MAX - GIB)
        return error_set(err, EINVAL, "%s: %llu bytes cannot be made resident", name,
                         (unsigned long long)bytes);
    huge = huge_page_for(bytes);
    if (huge && !make_memfd(r, name, huge)) {
        *ret = TAKE(r);
        return 0; /* huge pages are set aside already: no budget to check */
    }
    release(r);
    budget = resident_host_budget();
    if (bytes > budget)
        return error_set(
            err, ENOMEM,
            "%s: needs %llu bytes (%.2f GiB) of memory, %llu (%.2f GiB) are available; "
            "unload another model or raise the memory limit",
            name, (unsigned long long)bytes, (double)bytes / (double)GIB,
            (unsigned long long)budget, (double)budget / (double)GIB);
    int rc = make_memfd(r, name, 0);
    if (rc < 0)
        return error_sys(err, -rc, "%s: making a memfd of %llu bytes", name,
                         (unsigned long long)bytes);
    *ret = TAKE(r);
    return 0;
}

void *resident_data(struct resident *r)
{
    return r->data;
}

uint64_t resident_size(const struct resident *r)
{
    return r->bytes;
}

uint64_t resident_page(const struct resident *r)
{
    return r->page;
}

int resident_fd(const struct resident *r)
{
    return r->fd;
}

/* Of a block its first byte at most was touched: is its last page there as well? */
static bool whole(const struct resident *r, uint64_t block)
{
    unsigned char last = 0;
    return mincore((char *)r->data + block + HUGE_PAGE - 4096, 4096, &last) == 0 && (last & 1);
}

/* A read makes a page of shared memory, too, and disturbs nobody who writes. */
static void touch(const struct resident *r, uint64_t block)
{
    (void)*((const volatile unsigned char *)r->data + block);
}

/*
 * The blocks of [first, end). Where the host gives shared memory huge pages to those who ask, a
 * touch is all; else the kernel is told to make a huge page of each, which it does whatever the
 * host's settings are (but for `deny`). In one call, since each waits for work on all processors.
 */
static void make_present(const struct resident *r, uint64_t first, uint64_t end)
{
    bool small = false;

    for (uint64_t block = first; block < end; block += HUGE_PAGE) {
        touch(r, block);
        small = small || !whole(r, block);
    }
    if (small)
        madvise((char *)r->data + first, end - first, MADV_COLLAPSE);
}

/* The next AT_ONCE. */
static void make_more(struct resident *r)
{
    uint64_t first = atomic_load(&r->made);
    uint64_t end = MIN(first + AT_ONCE, r->mapped & ~(HUGE_PAGE - 1));

    make_present(r, first, end);
    atomic_store(&r->made, end);
}

int resident_touch(struct resident *r, uint64_t at, double *ret_ms)
{
    uint64_t block = at & ~(HUGE_PAGE - 1), start = clock_ns();

    *ret_ms = 0;
    if (!r->data || block + HUGE_PAGE > r->mapped)
        return 0;
    if (r->page >= HUGE_PAGE)
        return 1;
    uint64_t before = atomic_load(&r->made);
    if (before <= block) {
        pthread_mutex_lock(&r->making);
        while (atomic_load(&r->made) <= block)
            make_more(r);
        pthread_mutex_unlock(&r->making);
    } else if (before - block <= AT_ONCE && before + HUGE_PAGE <= r->mapped &&
               pthread_mutex_trylock(&r->making) == 0) {
        /* ahead of the others, who have what to fill meanwhile */
        if (atomic_load(&r->made) == before)
            make_more(r);
        pthread_mutex_unlock(&r->making);
    }
    /* Not while a page of it is in use, such as by a read that ends in this block. */
    for (int turn = 0; turn < TURNS && !whole(r, block); turn++)
        make_present(r, block, block + HUGE_PAGE);
    uint64_t made = MAX(atomic_load(&r->made) - before, HUGE_PAGE);
    *ret_ms = clock_ms_since(start) / (double)(made / HUGE_PAGE);
    return whole(r, block);
}

int resident_share_early(struct resident *r, int *ret_fd, struct error *err)
{
    _cleanup_free_ char *path = x_printf("/proc/self/fd/%d", r->fd);

    /* Read-only, or the mappings of its holders would keep F_SEAL_WRITE from being set. */
    int fd = fault_hit(FAULT_FD) ? (errno = EMFILE, -1) : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return error_sys(err, errno, "read-only descriptor of a memfd");
    if (fcntl(r->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0) {
        int rc =
            error_sys(err, errno, "sealing a memfd of %llu bytes", (unsigned long long)r->bytes);
        fd_close(fd);
        return rc;
    }
    *ret_fd = fd;
    return 0;
}

int resident_seal(struct resident *r, struct error *err)
{
    if (r->data)
        munmap(r->data, r->mapped);
    r->data = NULL;
    if (fcntl(r->fd, F_ADD_SEALS, SEALS) < 0)
        return error_sys(err, errno, "sealing a memfd of %llu bytes", (unsigned long long)r->bytes);
    return 0;
}

void resident_free(struct resident *r)
{
    if (!r)
        return;
    release(r);
    pthread_mutex_destroy(&r->making);
    free(r);
}

/* ---- Using ---- */

/* The size that the descriptor of `bytes` must have, and what to map. */
static uint64_t file_size_for(int fd, uint64_t bytes)
{
    struct statfs fs;
    const uint32_t hugetlbfs = 0x958458f6;

    if (!fstatfs(fd, &fs) && (uint32_t)fs.f_type == hugetlbfs && fs.f_bsize > 0)
        return size_align(bytes, (uint64_t)fs.f_bsize);
    return bytes;
}

int resident_map_readonly(int fd, uint64_t bytes, bool populate, const void **ret_addr,
                          struct error *err)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);

    if (seals < 0)
        return error_set(err, EPERM, "fd %d: not a memfd, cannot be sealed", fd);
    if ((seals & SEALS) != SEALS)
        return error_set(err, EPERM,
                         "fd %d: seals are %#x, resident weights need %#x: someone could still "
                         "change them",
                         fd, (unsigned)seals, (unsigned)SEALS);
    if (fstat(fd, &st) < 0)
        return error_sys(err, errno, "fd %d", fd);
    uint64_t size = file_size_for(fd, bytes);
    if (!bytes || (uint64_t)st.st_size != size)
        return error_set(err, EBADMSG, "fd %d: %llu bytes, expected %llu", fd,
                         (unsigned long long)st.st_size, (unsigned long long)size);
    void *addr = fault_hit(FAULT_MMAP) ? (errno = ENOMEM, MAP_FAILED)
                                       : mmap(NULL, size, PROT_READ,
                                              MAP_SHARED | (populate ? MAP_POPULATE : 0), fd, 0);
    if (addr == MAP_FAILED)
        return error_sys(err, errno, "fd %d: mapping %llu bytes", fd, (unsigned long long)size);
    *ret_addr = addr;
    return 0;
}

/* munmap of a huge page mapping wants whole huge pages: rounding up covers them and nothing else.
 */
void resident_unmap(const void *addr, uint64_t bytes)
{
    if (addr && munmap((void *)addr, bytes) < 0)
        munmap((void *)addr, size_align(bytes, 2 * MIB));
}
