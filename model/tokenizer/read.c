/* SPDX-License-Identifier: Apache-2.0 */
/* Reading whole JSON files, through xz(1) when the name ends in .xz. */
#include "model/tokenizer/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fd.h"

extern char **environ;

static int read_pipe(int fd, const char *path, size_t limit, struct buffer *out, struct error *err)
{
    for (;;) {
        if (buffer_reserve(out, 65536) < 0 || out->len > limit)
            return error_set(err, EFBIG, "%s: too large", path);
        ssize_t n = read(fd, out->data + out->len, 65536);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return error_sys(err, errno, "%s: reading from xz", path);
        if (n == 0)
            return 0;
        out->len += (size_t)n;
    }
}

static int read_xz(const char *path, size_t limit, struct buffer *out, struct error *err)
{
    _cleanup_fd_ int file = open(path, O_RDONLY | O_CLOEXEC);
    int pipe_fds[2], status = 0;
    char *argv[] = {"xz", "-dc", NULL};
    posix_spawn_file_actions_t actions;
    pid_t pid;
    if (file < 0)
        return error_sys(err, errno, "%s", path);
    if (pipe2(pipe_fds, O_CLOEXEC) < 0)
        return error_sys(err, errno, "%s: pipe", path);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, file, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, pipe_fds[1], STDOUT_FILENO);
    int failed = posix_spawnp(&pid, "xz", &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    fd_close(pipe_fds[1]);
    int r = failed ? error_sys(err, failed, "%s: cannot run xz", path)
                   : read_pipe(pipe_fds[0], path, limit, out, err);
    fd_close(pipe_fds[0]);
    while (!failed && waitpid(pid, &status, 0) < 0 && errno == EINTR)
        continue;
    if (r >= 0 && status)
        return error_set(err, EBADMSG, "%s: xz could not decompress it", path);
    return r;
}

int read_json_file(const char *path, size_t limit, struct buffer *out, struct error *err)
{
    size_t n = strlen(path);
    if (n > 3 && !strcmp(path + n - 3, ".xz"))
        return read_xz(path, limit, out, err);
    int r = fd_read_file(path, limit, &out->data, &out->len, err);
    out->cap = r < 0 ? 0 : out->len + 1;
    return r;
}
