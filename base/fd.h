/* SPDX-License-Identifier: Apache-2.0 */
/*
 * File descriptors: closing, whole reads and writes, passing them over Unix sockets.
 * Every descriptor that we make is close-on-exec; a child gets what it needs by explicit means.
 */
#ifndef EMBER_BASE_FD_H
#define EMBER_BASE_FD_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/error.h"

/* Closes fd when >= 0; returns -1 for `fd = fd_close(fd);`. Keeps errno. */
int fd_close(int fd);
static inline void fd_closep(int *fd)
{
    *fd = fd_close(*fd);
}
#define _cleanup_fd_ __attribute__((cleanup(fd_closep)))
#define TAKE_FD(fd)                                                                                \
    ({                                                                                             \
        int take_ = (fd);                                                                          \
        (fd) = -1;                                                                                 \
        take_;                                                                                     \
    })

/* Reads exactly n bytes at offset; a short file is -EBADMSG. `what` names the file in the text. */
int fd_pread_all(int fd, void *buffer, size_t n, uint64_t offset, const char *what,
                 struct error *err);
int fd_write_all(int fd, const void *buffer, size_t n, const char *what, struct error *err);

/*
 * A whole file as a NUL-terminated string, at most `limit` bytes (more is -EFBIG).
 * The caller frees *ret_data.
 */
int fd_read_file(const char *path, size_t limit, char **ret_data, size_t *ret_len,
                 struct error *err);

/* What fits into room - 1 bytes of a file of /proc or /sys, whose size says nothing; with a NUL
 * behind it. Returns the length or a negative errno. */
ssize_t fd_read_pseudo(const char *path, char *text, size_t room);

/*
 * A stream socket that is connected to the Unix socket at `path`; flags: SOCK_NONBLOCK or 0. The
 * descriptor, or a negative errno with the path in the text: -ECONNREFUSED when nobody listens.
 */
int fd_connect(const char *path, int flags, struct error *err);

/* One message with up to FD_PASS_MAX descriptors over a SOCK_SEQPACKET socket. */
#define FD_PASS_MAX 16
int fd_send(int socket, const void *data, size_t len, const int *fds, size_t n_fds);
/*
 * Receives one message; returns its length, 0 at end of stream, or a negative errno (-EMSGSIZE when
 * it did not fit: message and descriptors are dropped). *n_fds: room on entry, number received on
 * return.
 */
ssize_t fd_recv(int socket, void *data, size_t room, int *fds, size_t *n_fds);

/* Opens /dev/null as whichever of descriptors 0 to 2 are closed, so that no file of ours becomes
 * one. */
void fd_hold_stdio(void);

/* Raises the soft limit of descriptors to the hard one: a server's own must not be select(2)'s
 * 1,024. */
void fd_raise_limit(void);

#endif
