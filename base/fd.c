/* SPDX-License-Identifier: Apache-2.0 */
#include "base/fd.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/mem.h"

int fd_close(int fd)
{
    if (fd >= 0) {
        int saved = errno;
        close(fd);
        errno = saved;
    }
    return -1;
}

int fd_pread_all(int fd, void *buffer, size_t n, uint64_t offset, const char *what,
                 struct error *err)
{
    size_t done = 0;

    while (done < n) {
        ssize_t r = fault_hit(FAULT_READ)
                        ? (errno = EIO, -1)
                        : pread(fd, (char *)buffer + done, n - done, (off_t)(offset + done));
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return error_sys(err, errno, "%s: read of %zu bytes at %llu", what, n - done,
                             (unsigned long long)(offset + done));
        if (r == 0)
            return error_set(err, EBADMSG, "%s: ends at byte %llu, %zu bytes too early", what,
                             (unsigned long long)(offset + done), n - done);
        done += (size_t)r;
    }
    return 0;
}

int fd_write_all(int fd, const void *buffer, size_t n, const char *what, struct error *err)
{
    size_t done = 0;

    while (done < n) {
        ssize_t r = fault_hit(FAULT_WRITE) ? (errno = ENOSPC, -1)
                                           : write(fd, (const char *)buffer + done, n - done);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return error_sys(err, errno, "%s: write", what);
        done += (size_t)r;
    }
    return 0;
}

/* Files of /proc and /sys say that they have no bytes: these are read to their end. */
static int read_unsized(int fd, const char *path, size_t limit, char **ret_data, size_t *ret_len,
                        struct error *err)
{
    struct buffer data = {0};
    char chunk[4096];
    ssize_t n;

    while ((n = read(fd, chunk, sizeof chunk)) > 0 && data.len + (size_t)n <= limit)
        if (buffer_append(&data, chunk, (size_t)n) < 0)
            break;
    if (n == 0 && buffer_reserve(&data, 1) == 0) {
        *ret_len = data.len;
        *ret_data = data.data;
        return 0;
    }
    int saved = n < 0 ? errno : n > 0 && data.len + (size_t)n > limit ? EFBIG : ENOMEM;
    buffer_free(&data);
    return error_sys(err, saved, "%s", path);
}

int fd_read_file(const char *path, size_t limit, char **ret_data, size_t *ret_len,
                 struct error *err)
{
    /* O_NONBLOCK: a FIFO in the file's place is refused below, not waited for. */
    _cleanup_fd_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st;

    if (fd < 0 || fstat(fd, &st) < 0)
        return error_sys(err, errno, "%s", path);
    if (!S_ISREG(st.st_mode))
        return error_set(err, EINVAL, "%s: not a regular file", path);
    if ((uint64_t)st.st_size > limit)
        return error_set(err, EFBIG, "%s: %llu bytes, the limit is %zu", path,
                         (unsigned long long)st.st_size, limit);
    _cleanup_free_ char *data = mem_alloc((size_t)st.st_size + 1, 1);
    if (!data)
        return error_set(err, ENOMEM, "%s: no memory for %llu bytes", path,
                         (unsigned long long)st.st_size);
    if (!st.st_size)
        return read_unsized(fd, path, limit, ret_data, ret_len, err);
    int r = fd_pread_all(fd, data, (size_t)st.st_size, 0, path, err);
    if (r < 0)
        return r;
    *ret_len = (size_t)st.st_size;
    *ret_data = TAKE(data);
    return 0;
}

ssize_t fd_read_pseudo(const char *path, char *text, size_t room)
{
    _cleanup_fd_ int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t len = 0;

    if (fd < 0)
        return -errno;
    while (len < room - 1) {
        ssize_t n = read(fd, text + len, room - 1 - len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (!n)
            break;
        len += (size_t)n;
    }
    text[len] = '\0';
    return (ssize_t)len;
}

int fd_connect(const char *path, int flags, struct error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t len = strlen(path);
    _cleanup_fd_ int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);

    if (fd < 0)
        return error_sys(err, errno, "cannot make a socket");
    if (len >= sizeof address.sun_path)
        return error_set(err, ENAMETOOLONG, "%s: a socket's path has %zu bytes at most", path,
                         sizeof address.sun_path - 1);
    memcpy(address.sun_path, path, len);
    if (connect(fd, (const struct sockaddr *)&address, sizeof address) < 0)
        return error_sys(err, errno, "cannot connect to %s", path);
    return TAKE_FD(fd);
}

int fd_send(int socket, const void *data, size_t len, const int *fds, size_t n_fds)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * FD_PASS_MAX)];
    } control = {0};
    struct iovec iov = {(void *)data, len};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

    if (n_fds > FD_PASS_MAX)
        return -EINVAL;
    if (n_fds) {
        msg.msg_control = control.bytes;
        msg.msg_controllen = CMSG_SPACE(sizeof(int) * n_fds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * n_fds);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * n_fds);
    }
    ssize_t r;
    do
        r = sendmsg(socket, &msg, MSG_NOSIGNAL);
    while (r < 0 && errno == EINTR);
    return r < 0 ? -errno : 0;
}

ssize_t fd_recv(int socket, void *data, size_t room, int *fds, size_t *n_fds)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * FD_PASS_MAX)];
    } control;
    struct iovec iov = {data, room};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.bytes,
                         .msg_controllen = sizeof control.bytes};
    size_t got = 0, want = *n_fds;
    bool dropped = false;
    ssize_t r;

    *n_fds = 0;
    do
        r = recvmsg(socket, &msg, MSG_CMSG_CLOEXEC);
    while (r < 0 && errno == EINTR);
    if (r < 0)
        return -errno;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
            if (got < want)
                fds[got++] = fd;
            else
                dropped = true, fd_close(fd);
        }
    }
    if (dropped || (msg.msg_flags & (MSG_TRUNC | MSG_CTRUNC))) {
        while (got)
            fd_close(fds[--got]);
        return -EMSGSIZE;
    }
    *n_fds = got;
    return r;
}

void fd_hold_stdio(void)
{
    int fd;

    do
        fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd < 3);
    fd_close(fd);
}

void fd_raise_limit(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}
