/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cpu/compile.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/fd.h"
#include "base/mem.h"
#include "base/topology.h"

#define ARGV_MAX 64
#define OBJECT_MAX (16 * MIB)
#define SAID_MAX 4096 /* of what the compiler prints */
#define FOLDER_PREFIX "ember-cc-"
#define FOLDER_ATTEMPTS 8

/* ---- one compiler process ---- */

struct job {
    const char *path;
    char *const *argv;
    char *const *env;
    int in, said; /* its stdin; its stdout and stderr */
    const char *folder;
};

/* In the child of a vfork: system calls only. */
static void run_child(const struct job *job, pid_t parent)
{
    static const struct rlimit cpu = {60, 60};
    struct sigaction plain = {.sa_handler = SIG_DFL};
    sigset_t none;

    for (int s = 1; s < 32; s++)
        sigaction(s, &plain, NULL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setpgid(0, 0);
    cpus_unbind();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(127);
    setrlimit(RLIMIT_CPU, &cpu); /* helpers of a killed driver end too */
    if (dup2(job->in, 0) < 0 || dup2(job->said, 1) < 0 || dup2(job->said, 2) < 0 ||
        chdir(job->folder))
        _exit(127);
    if (!fault_hit(FAULT_EXEC))
        execve(job->path, job->argv, job->env);
    _exit(127);
}

/* All signals are blocked meanwhile, lest a handler of ours run in the child on our memory. */
static pid_t __attribute__((noinline)) start(const struct job *job)
{
    pid_t parent = getpid(), pid;
    sigset_t all, old;

    if (fault_hit(FAULT_FORK)) {
        errno = EAGAIN;
        return -1;
    }
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    pid = vfork();
    if (pid == 0)
        run_child(job, parent);
    int saved = errno;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    errno = saved;
    return pid;
}

/* Reads what it says until it closes the pipe; the pipe's end is the end of all helpers. False:
 * time is up. */
static bool listen_to(int said, uint64_t deadline, char *text, size_t *len)
{
    char rest[512];

    for (;;) {
        uint64_t now = clock_ns();
        struct pollfd p = {said, POLLIN, 0};
        if (now >= deadline)
            return false;
        int r = poll(&p, 1, (int)((deadline - now) / 1000000) + 1);
        if (r <= 0)
            continue; /* the clock decides */
        bool room = *len < SAID_MAX - 1;
        ssize_t n =
            room ? read(said, text + *len, SAID_MAX - 1 - *len) : read(said, rest, sizeof rest);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return true;
        *len += room ? (size_t)n : 0;
    }
}

static int reap(pid_t pid)
{
    int status;

    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return -1;
    return status;
}

/* The errors of what was said, on one line: the lines with "error" in them, or else the first ones.
 */
static void first_lines(char *said, char *ret, size_t size)
{
    bool errors_only = strstr(said, "error") != NULL;
    char *save = NULL;
    size_t at = 0;

    *ret = '\0';
    for (char *line = strtok_r(said, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        if (errors_only && !strstr(line, "error"))
            continue;
        int n = snprintf(ret + at, size - at, "%s%s", at ? "; " : "", line);
        if (n < 0 || (size_t)n >= size - at)
            return;
        at += (size_t)n;
    }
}

static int judge(const struct job *job, int status, char *said, struct error *err)
{
    char lines[320];

    if (status >= 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return 0;
    first_lines(said, lines, sizeof lines);
    if (status >= 0 && WIFSIGNALED(status))
        return error_set(err, EIO, "%s died of signal %d: %s", job->path, WTERMSIG(status), lines);
    return error_set(err, EIO, "%s failed: %s", job->path,
                     *lines ? lines : "it could not be run and said nothing");
}

static int run(struct job *job, int timeout_ms, struct error *err)
{
    uint64_t deadline = clock_ns() + (uint64_t)timeout_ms * 1000000u;
    char said[SAID_MAX];
    size_t len = 0;
    int ends[2];

    if (pipe2(ends, O_CLOEXEC) < 0)
        return error_sys(err, errno, "pipe to the C compiler");
    _cleanup_fd_ int from = ends[0];
    job->said = ends[1];
    pid_t pid = start(job);
    int saved = errno;
    fd_close(ends[1]);
    if (pid < 0)
        return error_sys(err, saved, "cannot start %s", job->path);
    bool ended = listen_to(from, deadline, said, &len);
    said[len] = '\0';
    if (!ended)
        kill(-pid, SIGKILL);
    int status = reap(pid);
    kill(-pid, SIGKILL); /* helpers that it left behind, if any */
    if (!ended)
        return error_set(err, ETIMEDOUT, "%s: no result in %d ms", job->path, timeout_ms);
    return judge(job, status, said, err);
}

/* ---- the private folder ---- */

static void remove_folder(const char *path)
{
    DIR *dir = opendir(path);
    struct dirent *e;

    if (!dir)
        return;
    while ((e = readdir(dir)))
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            unlinkat(dirfd(dir), e->d_name, 0);
    closedir(dir);
    rmdir(path);
}

/* A folder of ours that nobody holds the lock of: its builder was killed. */
static void sweep_one(const char *path)
{
    _cleanup_fd_ int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    struct stat st;

    if (fd >= 0 && !fstat(fd, &st) && st.st_uid == geteuid() &&
        time(NULL) - st.st_mtime > 2 && /* not one that is about to be locked */
        !flock(fd, LOCK_EX | LOCK_NB))
        remove_folder(path);
}

static void sweep(const char *tmp)
{
    DIR *dir = opendir(tmp);
    struct dirent *e;

    if (!dir)
        return;
    while ((e = readdir(dir))) {
        if (strncmp(e->d_name, FOLDER_PREFIX, strlen(FOLDER_PREFIX)))
            continue;
        _cleanup_free_ char *path = x_printf("%s/%s", tmp, e->d_name);
        sweep_one(path);
    }
    closedir(dir);
}

/*
 * One attempt. 1: another builder's sweep has taken it for a dead one's, since we were held up
 * between making and locking it for longer than sweep_one waits. Once it is locked it is ours.
 */
static int try_folder(const char *tmp, char **ret_path, int *ret_fd, struct error *err)
{
    _cleanup_free_ char *path = x_printf("%s/" FOLDER_PREFIX "XXXXXX", tmp);
    struct stat ours, there;

    if (!mkdtemp(path))
        return error_sys(err, errno, "cannot make a temporary folder in %s", tmp);
    if (fault_hit(FAULT_COMPILE_SWEPT))
        rmdir(path);
    _cleanup_fd_ int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT)
        return 1;
    bool locked = fd >= 0 && !flock(fd, LOCK_EX | LOCK_NB);
    if (fd < 0 || (!locked && errno != EWOULDBLOCK)) {
        int saved = errno;
        rmdir(path);
        return error_sys(err, saved, "%s", path);
    }
    if (!locked || fstat(fd, &ours) < 0 || stat(path, &there) < 0 || there.st_ino != ours.st_ino)
        return 1;
    *ret_path = TAKE(path);
    *ret_fd = TAKE_FD(fd);
    return 0;
}

/* Makes and locks it. *ret_path is the caller's. */
static int make_folder(char **ret_path, int *ret_fd, struct error *err)
{
    const char *tmp = getenv("TMPDIR");
    int r = 1;

    tmp = tmp && *tmp == '/' ? tmp : "/tmp";
    sweep(tmp);
    for (int i = 0; r > 0 && i < FOLDER_ATTEMPTS; i++)
        r = try_folder(tmp, ret_path, ret_fd, err);
    return r > 0
               ? error_set(err, EBUSY, "%s: temporary folders are removed while they are made", tmp)
               : r;
}

/* ---- compiling ---- */

/* The environment with TMPDIR replaced and messages in plain English. */
static char **make_env(char *tmpdir)
{
    size_t n = 0, at = 0;

    while (environ[n])
        n++;
    char **env = x_alloc((n + 3) * sizeof *env);
    for (size_t i = 0; i < n; i++)
        if (strncmp(environ[i], "TMPDIR=", 7) && strncmp(environ[i], "LC_ALL=", 7))
            env[at++] = environ[i];
    env[at++] = tmpdir;
    env[at] = "LC_ALL=C";
    return env;
}

/* Splits options (modified) behind argv[0]. */
static int make_argv(const char *path, char *options, char **argv, struct error *err)
{
    static char *const fixed[] = {"-pipe", "-shared", "-fPIC",  "-nostdlib", "-x",
                                  "c",     "-o",      "object", "-"};
    char *save = NULL;
    size_t n = 0;

    argv[n++] = (char *)path;
    for (char *word = strtok_r(options, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
        if (n + ARRAY_LEN(fixed) + 1 > ARGV_MAX)
            return error_set(err, E2BIG, "too many compiler options");
        argv[n++] = word;
    }
    memcpy(argv + n, fixed, sizeof fixed);
    argv[n + ARRAY_LEN(fixed)] = NULL;
    return 0;
}

static int source_fd(const char *text, size_t len, struct error *err)
{
    _cleanup_fd_ int fd = memfd_create("ember-kernel-source", MFD_CLOEXEC);
    int r;

    if (fd < 0 || fault_hit(FAULT_FD))
        return error_sys(err, fd < 0 ? errno : EMFILE, "a kernel's source");
    r = fd_write_all(fd, text, len, "a kernel's source", err);
    if (r < 0)
        return r;
    if (lseek(fd, 0, SEEK_SET) < 0)
        return error_sys(err, errno, "a kernel's source");
    return TAKE_FD(fd);
}

static int compile_in(const struct compiler *compiler, const char *folder, int source,
                      const char *options, int timeout_ms, void **ret_blob, size_t *ret_len,
                      struct error *err)
{
    _cleanup_free_ char *words = x_strdup(options);
    _cleanup_free_ char *tmpdir = x_printf("TMPDIR=%s", folder);
    _cleanup_free_ char *object = x_printf("%s/object", folder);
    _cleanup_free_ char **env = make_env(tmpdir);
    char *argv[ARGV_MAX], *blob;
    struct job job = {compiler->path, argv, env, source, -1, folder};
    int r;

    if ((r = make_argv(compiler->path, words, argv, err)) < 0 ||
        (r = run(&job, timeout_ms, err)) < 0 ||
        (r = fd_read_file(object, OBJECT_MAX, &blob, ret_len, err)) < 0)
        return r;
    *ret_blob = blob;
    return 0;
}

int compile_object(const struct compiler *compiler, const char *text, size_t len,
                   const char *options, int timeout_ms, void **ret_blob, size_t *ret_len,
                   struct error *err)
{
    _cleanup_fd_ int lock = -1;
    _cleanup_free_ char *folder = NULL;
    int r;

    if (fault_hit(FAULT_COMPILE))
        return error_set(err, EIO, "%s failed: injected fault", compiler->path);
    _cleanup_fd_ int source = source_fd(text, len, err);
    if (source < 0)
        return source;
    r = make_folder(&folder, &lock, err);
    if (r < 0)
        return r;
    r = compile_in(compiler, folder, source, options, timeout_ms, ret_blob, ret_len, err);
    remove_folder(folder);
    return r;
}
