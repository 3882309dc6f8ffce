/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cpu/limit.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/mem.h"
#include "base/topology.h"

#define SMALL_FILE 8192

static uint32_t affinity(void)
{
    struct id_set unbound;

    if (cpus_unbound(&unbound)) /* a pool may have bound this very thread to one of them */
        return id_set_count(&unbound);
    for (int cpus = 1024; cpus <= 1 << 20; cpus *= 4) {
        size_t size = CPU_ALLOC_SIZE(cpus);
        cpu_set_t *set = CPU_ALLOC(cpus);
        if (!set)
            return 1;
        int r = sched_getaffinity(0, size, set);
        uint32_t n = r ? 0 : (uint32_t)CPU_COUNT_S(size, set);
        int saved = errno;
        CPU_FREE(set);
        if (!r)
            return n ? n : 1;
        if (saved != EINVAL) /* EINVAL: more processors than the set has room for */
            break;
    }
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (uint32_t)n : 1;
}

/* One number, or two ("max 100000"), from a file; *ret_a is -1 for "max". */
static int read_numbers(const char *path, long long *ret_a, long long *ret_b)
{
    char text[SMALL_FILE], *end;

    if (fd_read_pseudo(path, text, sizeof text) < 0)
        return -ENOENT;
    if (!strncmp(text, "max", 3)) {
        *ret_a = -1;
        end = text + 3;
    } else {
        *ret_a = strtoll(text, &end, 10);
        if (end == text)
            return -EINVAL;
    }
    if (ret_b)
        *ret_b = strtoll(end, NULL, 10);
    return 0;
}

/* Processors that the quota of this one group allows; 0: no quota. */
static uint32_t group_quota(const char *dir, bool v2)
{
    _cleanup_free_ char *quota_path = x_printf("%s/%s", dir, v2 ? "cpu.max" : "cpu.cfs_quota_us");
    long long quota = -1, period = 0;

    if (read_numbers(quota_path, &quota, v2 ? &period : NULL))
        return 0;
    if (!v2) {
        _cleanup_free_ char *period_path = x_printf("%s/cpu.cfs_period_us", dir);
        if (read_numbers(period_path, &period, NULL))
            return 0;
    }
    if (quota <= 0 || period <= 0)
        return 0;
    return quota / period ? (uint32_t)MIN(quota / period, UINT32_MAX) : 1;
}

static uint32_t tighter(uint32_t a, uint32_t b)
{
    return !a ? b : !b ? a : MIN(a, b);
}

/* From the group at root + path upwards. Within a cgroup namespace the path may not exist: the root
 * still does. */
static uint32_t walk_up(const char *root, const char *path, bool v2)
{
    _cleanup_free_ char *dir = x_printf("%s%s", root, strcmp(path, "/") ? path : "");
    size_t floor = strlen(root);
    uint32_t limit = 0;

    for (;;) {
        limit = tighter(limit, group_quota(dir, v2));
        char *slash = strrchr(dir, '/');
        if (strlen(dir) <= floor || !slash || (size_t)(slash - dir) < floor)
            return limit;
        *slash = '\0';
    }
}

static bool has_cpu_controller(char *list)
{
    char *save = NULL;

    for (char *word = strtok_r(list, ",", &save); word; word = strtok_r(NULL, ",", &save))
        if (!strcmp(word, "cpu"))
            return true;
    return false;
}

/* A line of /proc/self/cgroup: "0::/a/b" (v2) or "4:cpu,cpuacct:/a/b" (v1). */
static uint32_t line_limit(const char *root, char *line)
{
    char *controllers = strchr(line, ':');
    char *path = controllers ? strchr(controllers + 1, ':') : NULL;

    if (!path)
        return 0;
    *path++ = '\0';
    controllers++;
    if (!*controllers)
        return walk_up(root, path, true);
    _cleanup_free_ char *both = x_printf("%s/cpu,cpuacct", root);
    _cleanup_free_ char *one = x_printf("%s/cpu", root);
    if (!has_cpu_controller(controllers))
        return 0;
    return walk_up(access(one, F_OK) ? both : one, path, false);
}

uint32_t cpu_limit_cgroup(const char *proc, const char *root)
{
    char text[SMALL_FILE], *save = NULL;
    uint32_t limit = 0;

    if (fd_read_pseudo(proc, text, sizeof text) < 0)
        return 0;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
        limit = tighter(limit, line_limit(root, line));
    return limit;
}

static uint32_t quota(void)
{
    return cpu_limit_cgroup("/proc/self/cgroup", "/sys/fs/cgroup");
}

uint32_t cpu_limit(void)
{
    return tighter(affinity(), quota());
}

bool cpu_limit_shared(void)
{
    uint32_t n = quota();

    return n && n < affinity();
}
