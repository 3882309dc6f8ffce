/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Internal to cache/: locks that the kernel releases when their process dies.
 *
 * One file, `lock`, in the cache's directory; a lock is one byte of it (POSIX record locks). They
 * belong to the process: not inherited by fork, gone with it however it dies, and the kernel names
 * the holder. Byte 0 is held around opening and closing LMDB (its own open and close race), the
 * byte 1 + (hash mod 2^62) of a key while that key is built. Nothing is ever written to the file.
 * The price: closing ANY descriptor of the file in a process drops all its locks, so each process
 * has it open once (cache_open sees to that), and threads are kept apart by flight.c.
 */
#ifndef EMBER_CACHE_LOCKFILE_H
#define EMBER_CACHE_LOCKFILE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/digest.h"
#include "base/error.h"

#define LOCKFILE_OPEN_BYTE 0

/* A descriptor; with read_only it may be -1 (no such file or a read-only file system). */
int lockfile_open(const char *dir, bool read_only, int *ret_fd, struct error *err);
off_t lockfile_byte(const struct digest *key);
/* 0: locked; 1: another process has it (*ret_holder, may be NULL, its pid or 0); or -errno. */
int lockfile_try(int fd, off_t byte, pid_t *ret_holder);
void lockfile_unlock(int fd, off_t byte);
/* Waits up to timeout_ms: 0, -ETIMEDOUT, -errno. fd -1 counts as locked. */
int lockfile_lock(int fd, off_t byte, unsigned timeout_ms);

#endif
