/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/manager/child.h"

#include <errno.h>
#include <event2/event_struct.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/close_range.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/mem.h"
#include "daemon/link.h"

#define LINE_MAX_BYTES 1024

struct child {
    struct event_base *base;
    struct event on_channel, on_exit, on_output, on_deadline;
    const struct child_handlers *handlers;
    void *owner;
    pid_t pid;
    int pidfd, channel, output;
    uint64_t forked_ns, deadline_ns;
    const char *missing;
    char label[64];
    bool stopping;
    struct error why;
    char line[LINE_MAX_BYTES], last_line[256];
    size_t line_len;
};

/* ---- start ---- */

static bool executable(char *path, size_t room, const char *dir, const char *between,
                       const char *program)
{
    int n = snprintf(path, room, "%s/%s%s", dir, between, program);
    return n > 0 && (size_t)n < room && !access(path, X_OK);
}

bool child_program(const char *program, char *path, size_t room)
{
    const char *libexec = getenv("EMBER_LIBEXEC");
    static const char *const around[] = {"", "../libexec/ember/", "../instance/", "../loader/"};
    char self[PATH_MAX];
    ssize_t n;

    if (libexec && *libexec)
        return executable(path, room, libexec, "", program);
    n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n <= 0)
        return false;
    self[n] = 0;
    char *slash = strrchr(self, '/');
    if (!slash)
        return false;
    *slash = 0;
    for (size_t i = 0; i < ARRAY_LEN(around); i++)
        if (executable(path, room, self, around[i], program))
            return true;
    return false;
}

/* The environment without what systemd means for us alone. */
static char **child_environment(void)
{
    static const char *const ours[] = {"NOTIFY_SOCKET=", "LISTEN_", "WATCHDOG_"};
    static char **kept;
    extern char **environ;
    size_t n = 0, out = 0;

    if (kept)
        return kept;
    while (environ[n])
        n++;
    kept = x_alloc((n + 1) * sizeof *kept);
    for (size_t i = 0; i < n; i++) {
        bool drop = false;
        for (size_t k = 0; k < ARRAY_LEN(ours); k++)
            drop |= !strncmp(environ[i], ours[k], strlen(ours[k]));
        if (!drop)
            kept[out++] = environ[i];
    }
    return kept;
}

struct launch {
    const char *path;
    char *const *argv, *const *envp;
    int channel, output, null;
    pid_t parent;
    int nice;
    volatile int error; /* shared with the parent: vfork */
};

/* Children are more dispensable than the manager. Failing is no reason not to start. */
static void set_priorities(int nice_value)
{
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

    if (fd >= 0) {
        ssize_t written = write(fd, "300", 3);
        (void)written;
        close(fd);
    }
    if (nice_value)
        setpriority(PRIO_PROCESS, 0, nice_value);
}

/* Runs in the parent's memory until the exec: system calls only. */
static _Noreturn void launch_in_child(struct launch *l)
{
    struct sigaction reset = {.sa_handler = SIG_DFL};
    sigset_t none;

    for (int sig = 1; sig < NSIG; sig++)
        sigaction(sig, &reset, NULL);
    sigemptyset(&none);
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != l->parent || dup2(l->null, 0) < 0 ||
        dup2(l->output, 1) < 0 || dup2(l->output, 2) < 0)
        goto fail;
    if (l->channel == LINK_FD ? fcntl(LINK_FD, F_SETFD, 0) < 0 : dup2(l->channel, LINK_FD) < 0)
        goto fail;
    setsid(); /* a terminal's Ctrl-C is for the manager, which drains */
    set_priorities(l->nice);
    close_range(LINK_FD + 1, ~0U, 0);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (fault_hit(FAULT_EXEC))
        errno = ENOENT;
    else
        execve(l->path, l->argv, l->envp);
fail:
    l->error = errno ? errno : ESRCH;
    _exit(127);
}

static __attribute__((noinline)) pid_t launch_vfork(struct launch *l)
{
    if (fault_hit(FAULT_FORK)) {
        errno = EAGAIN;
        return -1;
    }
    pid_t pid = vfork();
    if (pid == 0)
        launch_in_child(l);
    return pid;
}

static int launch(struct launch *l, pid_t *ret_pid, struct error *err)
{
    sigset_t all, before;
    siginfo_t info;

    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before); /* no handler may run in the shared memory */
    pid_t pid = launch_vfork(l);
    int saved = errno;
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (pid < 0)
        return error_sys(err, saved, "cannot start %s", l->path);
    if (l->error) {
        waitid(P_PID, (id_t)pid, &info, WEXITED);
        error_sys(err, l->error, "cannot execute %s", l->path);
        if (err && l->error == ENOENT) /* not to be taken for a model that is not there */
            err->code = -ENOEXEC;
        return l->error == ENOENT ? -ENOEXEC : -l->error;
    }
    *ret_pid = pid;
    return 0;
}

static void on_channel(int fd, short what, void *arg);
static void on_exit_event(int fd, short what, void *arg);
static void on_output(int fd, short what, void *arg);
static void on_deadline(int fd, short what, void *arg);

static void child_free(struct child *c)
{
    event_del(&c->on_channel);
    event_del(&c->on_exit);
    event_del(&c->on_output);
    event_del(&c->on_deadline);
    fd_close(c->channel);
    fd_close(c->output);
    fd_close(c->pidfd);
    free(c);
}

static int open_pipes(int pair[2], int pipe_fds[2], struct error *err)
{
    if (fault_hit(FAULT_FD))
        return error_sys(err, EMFILE, "cannot make a socket for a child");
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return error_sys(err, errno, "cannot make a socket for a child");
    if (pipe2(pipe_fds, O_CLOEXEC) < 0)
        return error_sys(err, errno, "cannot make a pipe for a child");
    fcntl(pair[0], F_SETFL, O_NONBLOCK);
    fcntl(pipe_fds[0], F_SETFL, O_NONBLOCK);
    return 0;
}

int child_start(struct event_base *base, const char *program, const char *label,
                const struct child_handlers *handlers, void *owner, struct child **ret,
                struct error *err)
{
    _cleanup_fd_ int ours = -1, theirs = -1, out_read = -1, out_write = -1, null = -1, pidfd = -1;
    int pair[2] = {-1, -1}, pipe_fds[2] = {-1, -1};
    char path[PATH_MAX];
    pid_t pid = -1;

    if (!child_program(program, path, sizeof path))
        return error_set(err, ENOEXEC,
                         "the program %s is not beside emberd; install it there or name its "
                         "folder in EMBER_LIBEXEC",
                         program);
    int r = open_pipes(pair, pipe_fds, err);
    ours = pair[0], theirs = pair[1], out_read = pipe_fds[0], out_write = pipe_fds[1];
    if (r < 0)
        return r;
    null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0)
        return error_sys(err, errno, "/dev/null");

    char *argv[] = {(char *)program, (char *)label, NULL};
    struct launch l = {path, argv,     child_environment(), theirs, out_write,
                       null, getpid(), handlers->nice,      0};
    uint64_t forked_ns = clock_ns();
    r = launch(&l, &pid, err);
    if (r < 0)
        return r;
    pidfd = pidfd_open(pid, 0);
    if (pidfd < 0) {
        r = error_sys(err, errno, "cannot watch process %d", (int)pid);
        kill(pid, SIGKILL); /* not reaped yet, so the number is still its own */
        waitpid(pid, NULL, 0);
        return r;
    }

    struct child *c = x_alloc(sizeof *c);
    *c = (struct child){.base = base,
                        .handlers = handlers,
                        .owner = owner,
                        .pid = pid,
                        .pidfd = TAKE_FD(pidfd),
                        .channel = TAKE_FD(ours),
                        .output = TAKE_FD(out_read),
                        .forked_ns = forked_ns};
    snprintf(c->label, sizeof c->label, "%s", label);
    event_assign(&c->on_channel, base, c->channel, EV_READ | EV_PERSIST, on_channel, c);
    event_assign(&c->on_exit, base, c->pidfd, EV_READ, on_exit_event, c);
    event_assign(&c->on_output, base, c->output, EV_READ | EV_PERSIST, on_output, c);
    event_assign(&c->on_deadline, base, -1, 0, on_deadline, c);
    event_add(&c->on_channel, NULL);
    event_add(&c->on_exit, NULL);
    event_add(&c->on_output, NULL);
    *ret = c;
    return 0;
}

/* ---- talking ---- */

int child_send(struct child *c, const ProtobufCMessage *message, const int *fds, size_t n_fds)
{
    if (c->channel < 0)
        return -EPIPE;
    int r = link_send(c->channel, message, fds, n_fds);
    if ((r == -EPIPE || r == -ECONNRESET) && !c->stopping) {
        child_stop(c, 1000000000u); /* its exit says why */
    } else if (r < 0 && !c->stopping) {
        child_last_words(c, -r, "does not take messages: %s", strerror(-r));
        child_kill(c);
    }
    return r;
}

/* One message if there is one: true when another may follow. */
static bool receive_one(struct child *c)
{
    static uint8_t data[LINK_PACKET_MAX];
    int fds[FD_PASS_MAX];
    size_t n_fds = ARRAY_LEN(fds);

    ssize_t r = fd_recv(c->channel, data, sizeof data, fds, &n_fds);
    if (r == -EAGAIN)
        return false;
    if (r == -EMSGSIZE) {
        child_last_words(c, EPROTO, "sent a message that is too large");
        child_kill(c);
        return true;
    }
    if (r <= 0) { /* it has closed its end: it is exiting, or soon will have to */
        event_del(&c->on_channel);
        c->channel = fd_close(c->channel);
        if (!c->stopping)
            child_stop(c, 1000000000u);
        return false;
    }
    c->handlers->message(c->owner, data, (size_t)r, fds, n_fds);
    for (size_t i = 0; i < n_fds; i++)
        fd_close(fds[i]);
    return true;
}

static void on_channel(int fd, short what, void *arg)
{
    struct child *c = arg;

    for (int i = 0; i < 16 && receive_one(c); i++) /* the others want their turn too */
        ;
}

/* Its lines go to our log, one write each; the last may become its last words. */
static void put_line(struct child *c)
{
    const char *text = c->line;
    size_t len = c->line_len;

    c->line_len = 0;
    log_pass(text, len);
    if (len > 2 && text[0] == '<' && text[1] >= '0' && text[1] <= '7' && text[2] == '>') {
        if (text[1] > '4') /* what went well is no reason for an end */
            return;
        text += 3;
        len -= 3;
    }
    if (!len)
        return;
    len = MIN(len, sizeof c->last_line - 1);
    for (size_t i = 0; i < len; i++) /* it will stand between quotes */
        c->last_line[i] = text[i] == '"' ? '\'' : text[i];
    c->last_line[len] = 0;
}

static bool read_output(struct child *c)
{
    char data[4096];
    ssize_t n = read(c->output, data, sizeof data);

    if (n < 0)
        return errno == EINTR;
    if (n == 0) {
        event_del(&c->on_output);
        c->output = fd_close(c->output);
        return false;
    }
    for (ssize_t i = 0; i < n; i++) {
        if (data[i] == '\n' || c->line_len == sizeof c->line - 1)
            put_line(c);
        if (data[i] != '\n')
            c->line[c->line_len++] = data[i];
    }
    return true;
}

static void on_output(int fd, short what, void *arg)
{
    read_output(arg);
}

/* ---- the end ---- */

void child_last_words(struct child *c, int errnum, const char *format, ...)
{
    va_list ap;

    if (c->why.code)
        return;
    va_start(ap, format);
    error_setv(&c->why, errnum ? errnum : EIO, format, ap);
    va_end(ap);
}

void child_deadline(struct child *c, uint64_t ns, const char *missing)
{
    struct timeval tv = {(time_t)(ns / 1000000000u), (suseconds_t)(ns % 1000000000u / 1000)};

    if (c->stopping)
        return;
    c->deadline_ns = ns;
    c->missing = missing;
    if (ns)
        event_add(&c->on_deadline, &tv);
    else
        event_del(&c->on_deadline);
}

static void on_deadline(int fd, short what, void *arg)
{
    struct child *c = arg;

    if (!c->stopping)
        child_last_words(c, ETIMEDOUT, "no %s within %.1f s", c->missing,
                         (double)c->deadline_ns / 1e9);
    child_kill(c);
}

void child_kill(struct child *c)
{
    c->stopping = true;
    event_del(&c->on_deadline);
    pidfd_send_signal(c->pidfd, SIGKILL, NULL, 0);
}

void child_stop(struct child *c, uint64_t grace_ns)
{
    struct timeval tv = {(time_t)(grace_ns / 1000000000u),
                         (suseconds_t)(grace_ns % 1000000000u / 1000)};

    if (c->stopping)
        return;
    if (!grace_ns) {
        child_kill(c);
        return;
    }
    c->stopping = true;
    if (c->channel >= 0)
        shutdown(c->channel, SHUT_WR);
    event_add(&c->on_deadline, &tv);
}

static bool is_crash(int sig)
{
    return sig == SIGSEGV || sig == SIGBUS || sig == SIGILL || sig == SIGFPE || sig == SIGABRT;
}

static void explain_exit(struct child *c, const siginfo_t *info)
{
    const bool exited = info->si_code == CLD_EXITED;
    /* Why another process kills it stands in no line of its own. */
    const bool told = *c->last_line && (exited || is_crash(info->si_status));
    const char *colon = told ? ": " : "", *line = told ? c->last_line : "";

    if (exited && info->si_status == 0)
        child_last_words(c, EPIPE, "exited");
    else if (exited)
        child_last_words(c, EIO, "exited with status %d%s%s", info->si_status, colon, line);
    else
        child_last_words(c, is_crash(info->si_status) ? EFAULT : EIO,
                         "killed by signal %d (%s)%s%s", info->si_status,
                         sigdescr_np(info->si_status), colon, line);
}

static void on_exit_event(int fd, short what, void *arg)
{
    struct child *c = arg;
    siginfo_t info = {0};

    if (waitid(P_PIDFD, (id_t)c->pidfd, &info, WEXITED | WNOHANG) < 0 || !info.si_pid) {
        event_add(&c->on_exit, NULL);
        return;
    }
    c->stopping = true;
    while (c->channel >= 0 && receive_one(c))
        ;
    while (c->output >= 0 && read_output(c)) /* a grandchild may hold the pipe open: no wait */
        ;
    if (c->line_len)
        put_line(c);
    explain_exit(c, &info);
    c->handlers->exited(c->owner, &c->why);
    child_free(c);
}

pid_t child_pid(const struct child *c)
{
    return c->pid;
}

uint64_t child_forked_ns(const struct child *c)
{
    return c->forked_ns;
}
