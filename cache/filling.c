/* SPDX-License-Identifier: Apache-2.0 */
#include "cache/filling.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/fd.h"

#define FILLING_MAGIC 0x46504d45u /* "EMPF" */
#define PAGE_BYTES 4096
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define LOOK_EVERY_NS 100000000 /* a waiter that is not woken looks for itself */

struct page {
    uint32_t magic;
    _Atomic uint32_t state;
    _Atomic uint32_t changes; /* the futex: counts publications */
    uint32_t zero;
    _Atomic uint64_t bytes;
    struct digest digest; /* written before state becomes FILLING_DONE */
};

struct filling {
    int fd;
    struct page *page;
};

void filling_free(struct filling *filling)
{
    if (!filling)
        return;
    if (filling->page)
        munmap(filling->page, PAGE_BYTES);
    fd_close(filling->fd);
    free(filling);
}

int filling_fd(const struct filling *filling)
{
    return filling->fd;
}

static int map(struct filling *filling, int fd, struct error *err)
{
    void *at = fault_hit(FAULT_MMAP)
                   ? (errno = ENOMEM, MAP_FAILED)
                   : mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        return error_sys(err, errno, "page of a load's progress");
    filling->page = at;
    return 0;
}

int filling_create(struct filling **ret, struct error *err)
{
    _cleanup_(filling_freep) struct filling *filling = x_alloc(sizeof *filling);

    filling->fd = fault_hit(FAULT_FD)
                      ? (errno = EMFILE, -1)
                      : memfd_create("ember-filling", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (filling->fd < 0 || ftruncate(filling->fd, PAGE_BYTES) < 0 ||
        fcntl(filling->fd, F_ADD_SEALS, SEALS) < 0)
        return error_sys(err, errno, "memfd of a load's progress");
    int r = map(filling, filling->fd, err);
    if (r < 0)
        return r;
    filling->page->magic = FILLING_MAGIC;
    *ret = TAKE(filling);
    return 0;
}

int filling_attach(int fd, struct filling **ret, struct error *err)
{
    _cleanup_(filling_freep) struct filling *filling = x_alloc(sizeof *filling);
    int seals = fcntl(fd, F_GET_SEALS);
    struct stat st;

    filling->fd = -1;
    if (seals < 0 || (seals & SEALS) != SEALS || fstat(fd, &st) < 0 || st.st_size != PAGE_BYTES)
        return error_set(err, EBADMSG, "fd %d: not the page of a load's progress", fd);
    int r = map(filling, fd, err);
    if (r < 0)
        return r;
    if (filling->page->magic != FILLING_MAGIC)
        return error_set(err, EBADMSG, "fd %d: not the page of a load's progress", fd);
    *ret = TAKE(filling);
    return 0;
}

/* ---- publishing ---- */

static void publish(struct filling *filling)
{
    atomic_fetch_add_explicit(&filling->page->changes, 1, memory_order_release);
    syscall(SYS_futex, &filling->page->changes, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void filling_advance(struct filling *filling, uint64_t bytes)
{
    uint64_t before = atomic_load_explicit(&filling->page->bytes, memory_order_relaxed);

    while (before < bytes)
        if (atomic_compare_exchange_weak_explicit(&filling->page->bytes, &before, bytes,
                                                  memory_order_release, memory_order_relaxed)) {
            publish(filling);
            return;
        }
}

static void end(struct filling *filling, enum filling_state state)
{
    uint32_t before = FILLING_GOES_ON;

    atomic_compare_exchange_strong_explicit(&filling->page->state, &before, (uint32_t)state,
                                            memory_order_release, memory_order_relaxed);
    publish(filling);
}

void filling_done(struct filling *filling, const struct digest *digest)
{
    filling->page->digest = *digest;
    end(filling, FILLING_DONE);
}

void filling_fail(struct filling *filling)
{
    end(filling, FILLING_FAILED);
}

/* ---- reading ---- */

enum filling_state filling_state(const struct filling *filling)
{
    uint32_t state = atomic_load_explicit(&filling->page->state, memory_order_acquire);

    return state == FILLING_GOES_ON || state == FILLING_DONE ? (enum filling_state)state
                                                             : FILLING_FAILED;
}

struct digest filling_digest(const struct filling *filling)
{
    return filling->page->digest;
}

uint64_t filling_bytes(const struct filling *filling)
{
    return atomic_load_explicit(&filling->page->bytes, memory_order_acquire);
}

int filling_wait(const struct filling *filling, uint64_t bytes, bool (*stop)(void *ctx), void *ctx,
                 struct error *err)
{
    static const struct timespec look = {0, LOOK_EVERY_NS};

    for (;;) {
        uint32_t changes = atomic_load_explicit(&filling->page->changes, memory_order_acquire);
        enum filling_state state = filling_state(filling);
        if (state == FILLING_DONE || (state == FILLING_GOES_ON && filling_bytes(filling) >= bytes))
            return 0;
        if (state == FILLING_FAILED)
            return error_set(err, EPIPE, "the load has ended before all weights had arrived");
        if (stop && stop(ctx))
            return error_set(err, ECANCELED, "the wait for the weights was given up");
        syscall(SYS_futex, &filling->page->changes, FUTEX_WAIT, changes, &look, NULL, 0);
    }
}
