/* SPDX-License-Identifier: Apache-2.0 */
#include "cache/lockfile.h"

#include <errno.h>
#include <fcntl.h>
#include <time.h>

#include "base/clock.h"
#include "base/mem.h"

int lockfile_open(const char *dir, bool read_only, int *ret_fd, struct error *err)
{
    _cleanup_free_ char *path = x_printf("%s/lock", dir);
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | (read_only ? 0 : O_CREAT), 0600);

    if (fd < 0 && !read_only)
        return error_sys(err, errno, "%s", path);
    *ret_fd = fd;
    return 0;
}

off_t lockfile_byte(const struct digest *key)
{
    uint64_t hash;

    memcpy(&hash, key->bytes, sizeof hash);
    return (off_t)(1 + (hash >> 2));
}

int lockfile_try(int fd, off_t byte, pid_t *ret_holder)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};

    if (!fcntl(fd, F_SETLK, &lock))
        return 0;
    if (errno != EAGAIN && errno != EACCES)
        return -errno;
    if (ret_holder)
        *ret_holder = !fcntl(fd, F_GETLK, &lock) && lock.l_type != F_UNLCK ? lock.l_pid : 0;
    return 1;
}

void lockfile_unlock(int fd, off_t byte)
{
    struct flock lock = {.l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};

    if (fd >= 0)
        fcntl(fd, F_SETLK, &lock);
}

int lockfile_lock(int fd, off_t byte, unsigned timeout_ms)
{
    uint64_t deadline = clock_ns() + timeout_ms * UINT64_C(1000000);
    struct timespec pause = {0, 100000};

    if (fd < 0)
        return 0;
    for (;;) {
        int r = lockfile_try(fd, byte, NULL);
        if (r <= 0)
            return r;
        if (clock_ns() >= deadline)
            return -ETIMEDOUT;
        nanosleep(&pause, NULL);
        pause.tv_nsec = MIN(pause.tv_nsec * 2, 5000000);
    }
}
