/* SPDX-License-Identifier: Apache-2.0 */
/* Resident memory: sealing, mapping, refusals, budgets from made-up /proc and cgroup trees. */
#include "util.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/fd.h"
#include "cache/resident.h"

static void test_life(void **state)
{
    const uint64_t bytes = 3 * MIB + 123;
    struct resident *r = NULL;
    const void *a, *b;
    struct error err;

    assert_int_equal(resident_create("test", bytes, &r, &err), 0);
    assert_int_equal(resident_size(r), bytes);
    assert_true(fcntl(resident_fd(r), F_GETFD) & FD_CLOEXEC);
    fill(resident_data(r), bytes, 5);
    assert_int_equal(resident_map_readonly(resident_fd(r), bytes, false, &a, &err), -EPERM);
    assert_non_null(strstr(err.text, "seals"));
    assert_int_equal(resident_seal(r, &err), 0);
    assert_null(resident_data(r));
    int fd = fcntl(resident_fd(r), F_DUPFD_CLOEXEC, 0);
    resident_free(r);
    assert_int_equal(resident_map_readonly(fd, bytes, false, &a, &err), 0);
    assert_int_equal(resident_map_readonly(fd, bytes, true, &b, &err), 0);
    _cleanup_free_ uint8_t *want = x_alloc(bytes);
    fill(want, bytes, 5);
    assert_memory_equal(a, want, bytes);
    assert_memory_equal(b, want, bytes);
    /* Nobody can change, shrink, grow or unseal it. */
    assert_int_equal(pwrite(fd, "x", 1, 0), -1);
    assert_int_equal(ftruncate(fd, 0), -1);
    assert_int_equal(ftruncate(fd, 64 * MIB), -1);
    assert_ptr_equal(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), -1);
    resident_unmap(a, bytes);
    resident_unmap(b, bytes);
    assert_int_equal(resident_map_readonly(fd, bytes + 1, false, &a, &err), -EBADMSG);
    assert_int_equal(resident_map_readonly(fd, 0, false, &a, &err), -EBADMSG);
    close(fd);
    resident_free(NULL);
}

static void test_refusals(void **state)
{
    struct resident *r = NULL;
    struct error err;
    const void *addr;

    assert_int_equal(resident_create("test", 0, &r, &err), -EINVAL);
    assert_int_equal(resident_create("test", UINT64_MAX, &r, &err), -EINVAL);
    assert_int_equal(resident_create("test", UINT64_C(1) << 52, &r, &err), -ENOMEM);
    assert_non_null(strstr(err.text, "4503599627370496 bytes"));
    assert_non_null(strstr(err.text, "are available"));
    assert_null(r);
    char name[] = "/tmp/ember-plain-XXXXXX";
    _cleanup_fd_ int plain = mkstemp(name);
    assert_int_equal(unlink(name), 0);
    assert_int_equal(ftruncate(plain, 4096), 0);
    assert_int_equal(resident_map_readonly(plain, 4096, false, &addr, &err), -EPERM);
    assert_int_equal(resident_map_readonly(-1, 4096, false, &addr, &err), -EPERM);
    _cleanup_fd_ int partly = memfd_create("t", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(partly, 4096), 0);
    assert_int_equal(fcntl(partly, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    assert_int_equal(resident_map_readonly(partly, 4096, false, &addr, &err), -EPERM);
}

static void test_faults(void **state)
{
    struct resident *r = NULL;
    struct error err;

    setenv("EMBER_FAULT", "fd:0", 1);
    fault_init();
    assert_int_equal(resident_create("test", 4096, &r, &err), -EMFILE);
    setenv("EMBER_FAULT", "mmap:0", 1);
    fault_init();
    assert_int_equal(resident_create("test", 4096, &r, &err), -ENOMEM);
    unsetenv("EMBER_FAULT");
    fault_init();
    assert_null(r);
}

/* ---- Budgets ---- */

static void write_file(const char *root, const char *name, const char *text)
{
    _cleanup_free_ char *path = x_printf("%s/%s", root, name);

    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0700);
        *slash = '/';
    }
    _cleanup_fd_ int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(fd_write_all(fd, text, strlen(text), path, NULL), 0);
}

static void test_budgets(void **state)
{
    char *dir = dir_make();
    _cleanup_free_ char *proc = x_printf("%s/proc", dir), *cg = x_printf("%s/cg", dir);

    assert_true(resident_budget_at(proc, cg) == UINT64_MAX);
    write_file(proc, "meminfo", "MemTotal:  900 kB\nMemFree: 1 kB\nMemAvailable:     500 kB\n");
    assert_int_equal(resident_budget_at(proc, cg), 500 * KIB);
    /* v2: the tightest of the group and its parents; page cache that can go is not usage */
    write_file(proc, "self/cgroup", "0::/a/b\n");
    assert_int_equal(resident_budget_at(proc, cg), 500 * KIB);
    write_file(cg, "a/b/memory.max", "max\n");
    write_file(cg, "a/b/memory.current", "100000\n");
    assert_int_equal(resident_budget_at(proc, cg), 500 * KIB);
    write_file(cg, "a/memory.max", "400000\n");
    write_file(cg, "a/memory.current", "150000\n");
    assert_int_equal(resident_budget_at(proc, cg), 250000);
    write_file(cg, "a/memory.stat", "anon 5\nfile 7\ninactive_file 50000\n");
    assert_int_equal(resident_budget_at(proc, cg), 300000);
    write_file(cg, "a/b/memory.max", "120000\n");
    assert_int_equal(resident_budget_at(proc, cg), 20000);
    write_file(cg, "a/b/memory.current", "130000\n");
    assert_int_equal(resident_budget_at(proc, cg), 0);
    /* a container that sees its own group as the root */
    write_file(proc, "self/cgroup", "0::/\n");
    assert_int_equal(resident_budget_at(proc, cg), 500 * KIB);
    write_file(cg, "memory.max", "200000\n");
    write_file(cg, "memory.current", "1000\n");
    assert_int_equal(resident_budget_at(proc, cg), 199000);
    /* v1 */
    write_file(proc, "self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/m\n1:name=systemd:/\n");
    assert_int_equal(resident_budget_at(proc, cg), 500 * KIB);
    write_file(cg, "memory/m/memory.limit_in_bytes", "300000\n");
    write_file(cg, "memory/m/memory.usage_in_bytes", "100000\n");
    write_file(cg, "memory/m/memory.stat", "inactive_file 3\ntotal_inactive_file 60000\n");
    assert_int_equal(resident_budget_at(proc, cg), 260000);
    write_file(cg, "memory/memory.limit_in_bytes", "9223372036854771712\n");
    write_file(cg, "memory/memory.usage_in_bytes", "100000\n");
    assert_int_equal(resident_budget_at(proc, cg), 260000);
    dir_remove(dir);
}

static void test_host_budget(void **state)
{
    uint64_t budget = resident_host_budget();

    assert_true(budget > MIB);
    assert_true(budget < UINT64_C(1) << 50);
}

static uint64_t shm_pss_kib(void *addr)
{
    _cleanup_free_ char *wanted = x_printf("%lx-", (unsigned long)(uintptr_t)addr);
    FILE *f = fopen("/proc/self/smaps", "re");
    char line[512];
    uint64_t pss = 0;
    bool inside = false;

    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        if (!strncmp(line, wanted, strlen(wanted)))
            inside = true;
        else if (inside && sscanf(line, "Pss: %lu", &pss) == 1)
            break;
    }
    fclose(f);
    return pss;
}

/* Four processes that map it cost one copy. */
static void test_shared(void **state)
{
    const uint64_t bytes = 8 * MIB;
    struct resident *r = NULL;
    int ready[2], go[2], done[2];
    char byte;
    pid_t pids[4];

    assert_int_equal(resident_create("test", bytes, &r, NULL), 0);
    fill(resident_data(r), bytes, 1);
    assert_int_equal(resident_seal(r, NULL), 0);
    assert_int_equal(pipe(ready) | pipe(go) | pipe(done), 0);
    for (int i = 0; i < 4; i++) {
        pids[i] = fork();
        if (pids[i])
            continue;
        const void *addr;
        close(go[1]);
        close(done[1]);
        if (resident_map_readonly(resident_fd(r), bytes, true, &addr, NULL))
            _exit(100);
        if (write(ready[1], "x", 1) != 1 || read(go[0], &byte, 1) != 1)
            _exit(101);
        uint64_t pss = shm_pss_kib((void *)addr);
        if (write(ready[1], "y", 1) != 1 || read(done[0], &byte, 1) != 0) /* all measure first */
            _exit(102);
        _exit((int)(pss / KIB)); /* MiB */
    }
    for (int i = 0; i < 4; i++)
        assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(write(go[1], "gogo", 4), 4);
    for (int i = 0; i < 4; i++)
        assert_int_equal(read(ready[0], &byte, 1), 1);
    close(done[1]);
    for (int i = 0; i < 4; i++) {
        int mib = child_wait(pids[i]);
        if (resident_page(r) == 4096) /* huge page mappings report no PSS */
            assert_in_range(mib, 1, 2);
    }
    close(ready[0]);
    close(ready[1]);
    close(go[0]);
    close(go[1]);
    close(done[0]);
    resident_free(r);
}

struct toucher {
    struct resident *r;
    uint64_t first;
};

static void *touch_and_write(void *ctx)
{
    struct toucher *t = ctx;
    double ms;

    for (uint64_t at = t->first; at < resident_size(t->r); at += 2 * 512 * KIB) {
        resident_touch(t->r, at, &ms);
        assert_true(ms >= 0);
        memset((char *)resident_data(t->r) + at, (int)(at / (512 * KIB) + 1), 512 * KIB);
    }
    return NULL;
}

/* Huge pages are made under who writes: no byte is lost or moved, whether the host has any or not.
 */
static void huge_pages_keep_what_is_written(void **state)
{
    const uint64_t bytes =
        70 * MIB + 512 * KIB; /* more than is made at once, and no whole blocks */
    struct resident *r = NULL;
    pthread_t other;
    double ms;

    assert_int_equal(resident_create("test", bytes, &r, NULL), 0);
    memset((char *)resident_data(r) + 5 * MIB, 0x77, 4096); /* small pages were there before */
    int huge = resident_touch(r, 4 * MIB, &ms);
    assert_true(huge == 0 || huge == 1);
    assert_int_equal(((unsigned char *)resident_data(r))[5 * MIB + 4095], 0x77);
    assert_int_equal(resident_touch(r, 4 * MIB, &ms), huge);
    assert_int_equal(resident_touch(r, 70 * MIB, &ms), resident_page(r) > 4096);
    assert_int_equal(resident_touch(r, UINT64_C(1) << 40, &ms), 0);
    struct toucher odd = {r, 512 * KIB}, even = {r, 0};
    assert_int_equal(pthread_create(&other, NULL, touch_and_write, &odd), 0);
    touch_and_write(&even);
    pthread_join(other, NULL);
    for (uint64_t at = 0; at < bytes; at += 4096)
        assert_int_equal(((unsigned char *)resident_data(r))[at],
                         (unsigned char)(at / (512 * KIB) + 1));
    assert_int_equal(resident_seal(r, NULL), 0);
    assert_int_equal(resident_touch(r, 0, &ms), 0);
    resident_free(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(huge_pages_keep_what_is_written),
        cmocka_unit_test(test_life),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_budgets),
        cmocka_unit_test(test_host_budget),
        cmocka_unit_test(test_shared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
