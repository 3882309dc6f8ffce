/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/lab.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fd.h"
#include "cli/output.h"

#define READY_TIMEOUT_MS 120000

char *lab_program(const char *name)
{
    static const char *const places[] = {"", "../daemon/", "../sbin/", "../bin/",
                                         "../libexec/ember/"};
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);

    self[n > 0 ? n : 0] = 0;
    char *slash = strrchr(self, '/');
    if (slash)
        *slash = 0;
    for (size_t i = 0; i < ARRAY_LEN(places); i++) {
        char *path = x_printf("%s/%s%s", self, places[i], name);
        if (access(path, X_OK) == 0)
            return path;
        free(path);
    }
    return NULL;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    remove(path);
    return 0;
}

char *lab_dir_new(bool sockets, struct error *err)
{
    const char *tmp = getenv("TMPDIR");
    bool usable = tmp && *tmp == '/' && (!sockets || strlen(tmp) < 60);
    _cleanup_free_ char *dir = x_printf("%s/ember-lab-XXXXXX", usable ? tmp : "/tmp");

    if (mkdtemp(dir))
        return TAKE(dir);
    error_sys(err, errno, "%s", dir);
    return NULL;
}

void lab_dir_remove(char *dir)
{
    if (dir)
        nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(dir);
}

int lab_new(struct lab *lab, struct error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    *lab = (struct lab){.notify = -1, .dir = lab_dir_new(true, err)};
    if (!lab->dir)
        return err->code;
    lab->socket = x_printf("%s/emberd.sock", lab->dir);
    lab->notify = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%s/notify", lab->dir);
    if (lab->notify < 0 || bind(lab->notify, (struct sockaddr *)&address, sizeof address) < 0)
        return error_sys(err, errno, "notification socket");
    return 0;
}

static void forget(struct lab *lab, const char *name)
{
    for (size_t i = 0; i < lab->n_store;) {
        if (strcmp(lab->store[i].name, name)) {
            i++;
            continue;
        }
        fd_close(lab->store[i].fd);
        lab->store[i] = lab->store[--lab->n_store];
    }
}

void lab_drop_store(struct lab *lab)
{
    while (lab->n_store)
        fd_close(lab->store[--lab->n_store].fd);
}

static void store(struct lab *lab, const char *name, int fd)
{
    if (lab->n_store == LAB_STORE_MAX) {
        fd_close(fd);
        return;
    }
    snprintf(lab->store[lab->n_store].name, sizeof lab->store[0].name, "%s", name);
    lab->store[lab->n_store++].fd = fd;
}

/* One notification; true when it says READY=1. */
static bool take(struct lab *lab, char *text, const int *fds, size_t n_fds)
{
    bool ready = false, keep = false, removal = false;
    const char *name = "stored";

    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        ready |= !strcmp(line, "READY=1");
        keep |= !strcmp(line, "FDSTORE=1");
        removal |= !strcmp(line, "FDSTOREREMOVE=1");
        if (!strncmp(line, "FDNAME=", 7))
            name = line + 7;
    }
    for (size_t i = 0; i < n_fds; i++)
        if (keep)
            store(lab, name, fds[i]);
        else
            fd_close(fds[i]);
    if (removal)
        forget(lab, name);
    return ready;
}

static int wait_ready(struct lab *lab, int timeout_ms, struct error *err)
{
    uint64_t until = clock_ns() + (uint64_t)timeout_ms * 1000000;

    for (;;) {
        char text[4096];
        int fds[FD_PASS_MAX];
        size_t n_fds = FD_PASS_MAX;
        ssize_t n = fd_recv(lab->notify, text, sizeof text - 1, fds, &n_fds);
        if (n >= 0) {
            text[n] = 0;
            if (take(lab, text, fds, n_fds))
                return 0;
            continue;
        }
        int status;
        if (lab->pid && waitpid(lab->pid, &status, WNOHANG) == lab->pid) {
            lab->pid = 0;
            return error_set(err, EPIPE, "emberd ended at its start (its last lines are above)");
        }
        if (clock_ns() > until || cli_interrupted)
            return error_set(err, cli_interrupted ? ECANCELED : ETIMEDOUT, "%s",
                             cli_interrupted ? "interrupted" : "emberd is not ready");
        struct pollfd p = {.fd = lab->notify, .events = POLLIN};
        poll(&p, 1, 20);
    }
}

/* Takes what emberd has notified meanwhile (fd store). */
static void lab_poll(struct lab *lab)
{
    for (;;) {
        char text[4096];
        int fds[FD_PASS_MAX];
        size_t n_fds = FD_PASS_MAX;
        ssize_t n = fd_recv(lab->notify, text, sizeof text - 1, fds, &n_fds);
        if (n < 0)
            return;
        text[n] = 0;
        take(lab, text, fds, n_fds);
    }
}

/* In the child: descriptors 3.. are the store's, as sd_listen_fds(3) wants them. */
static void pass_store(const struct lab *lab)
{
    char names[LAB_STORE_MAX * 130] = "", number[32];
    int moved[LAB_STORE_MAX];

    for (size_t i = 0; i < lab->n_store; i++) /* out of the way first */
        moved[i] = fcntl(lab->store[i].fd, F_DUPFD, 200);
    for (size_t i = 0; i < lab->n_store; i++) {
        dup2(moved[i], 3 + (int)i);
        close(moved[i]);
        strcat(names, i ? ":" : "");
        strcat(names, lab->store[i].name);
    }
    snprintf(number, sizeof number, "%zu", lab->n_store);
    setenv("LISTEN_FDS", number, 1);
    setenv("LISTEN_FDNAMES", names, 1);
    snprintf(number, sizeof number, "%d", (int)getpid());
    setenv("LISTEN_PID", number, 1);
}

static void exec_emberd(const struct lab *lab, const char *program,
                        const struct lab_options *options, bool with_store)
{
    char *notify = x_printf("%s/notify", lab->dir);
    char *args[16];
    int n = 0;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setenv("NOTIFY_SOCKET", notify, 1);
    unsetenv("WATCHDOG_USEC");
    args[n++] = (char *)program;
    args[n++] = x_printf("--socket=%s", lab->socket);
    args[n++] = x_printf("--runtime-dir=%s/run", lab->dir);
    args[n++] = options->cache_dir ? x_printf("--cache-dir=%s", options->cache_dir)
                                   : x_printf("--cache-dir=%s/cache", lab->dir);
    args[n++] = x_printf("--default-model=%s", options->model);
    args[n++] = x_printf("--standby=%u", options->standby);
    args[n++] = x_printf("--standby-max=%u", options->standby > 8 ? options->standby : 8);
    args[n++] = "--no-gateway";
    args[n++] = getenv("EMBER_LAB_LOG") ? "--log-level=debug" : "--log-level=error";
    if (options->kv_bytes)
        args[n++] = x_printf("--kv-bytes=%llu", (unsigned long long)options->kv_bytes);
    if (options->compile_never)
        args[n++] = "--compile=never";
    args[n] = NULL;
    if (with_store)
        pass_store(lab);
    execv(program, args);
    perror(program);
    _exit(127);
}

int lab_start(struct lab *lab, const struct lab_options *options, bool with_store,
              struct error *err)
{
    _cleanup_free_ char *program = lab_program("emberd");

    if (!program)
        return error_set(err, ENOENT, "emberd is not beside emberctl; build it first");
    lab_poll(lab);
    lab->exec_ns = clock_ns();
    lab->pid = fork();
    if (lab->pid < 0)
        return error_sys(err, errno, "fork");
    if (!lab->pid)
        exec_emberd(lab, program, options, with_store);
    int r = wait_ready(lab, READY_TIMEOUT_MS, err);
    lab->ready_ms = clock_ms_since(lab->exec_ns);
    return r;
}

int lab_stop(struct lab *lab, bool kill_it, struct error *err)
{
    int status;

    if (!lab->pid)
        return 0;
    lab_poll(lab);
    kill(lab->pid, kill_it ? SIGKILL : SIGTERM);
    for (int i = 0; i < 1500; i++) {
        if (waitpid(lab->pid, &status, WNOHANG) == lab->pid) {
            lab->pid = 0;
            lab_poll(lab);
            return 0;
        }
        struct timespec pause = {0, 10000000};
        nanosleep(&pause, NULL);
        lab_poll(lab);
    }
    kill(lab->pid, SIGKILL);
    waitpid(lab->pid, &status, 0);
    lab->pid = 0;
    return error_set(err, ETIMEDOUT, "emberd did not end within 15 s of SIGTERM; it was killed");
}

int lab_control(struct lab *lab, struct control **ret, struct error *err)
{
    return control_open_socket(lab->socket, ret, err);
}

uint64_t lab_rss(const struct lab *lab)
{
    _cleanup_free_ char *path = x_printf("/proc/%d/statm", (int)lab->pid);
    unsigned long long size, resident = 0;
    FILE *f = fopen(path, "re");

    if (f && fscanf(f, "%llu %llu", &size, &resident) != 2)
        resident = 0;
    if (f)
        fclose(f);
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

void lab_free(struct lab *lab)
{
    if (!lab->dir)
        return;
    lab_stop(lab, false, NULL);
    lab_drop_store(lab);
    fd_close(lab->notify);
    lab_dir_remove(lab->dir);
    free(lab->socket);
    *lab = (struct lab){.notify = -1};
}

int lab_wait_standby(struct control *control, unsigned standby, int timeout_ms, struct error *err)
{
    uint64_t until = clock_ns() + (uint64_t)timeout_ms * 1000000;

    for (;;) {
        Ember__V1__GetStatusRequest request = EMBER__V1__GET_STATUS_REQUEST__INIT;
        Ember__V1__GetStatusResponse *status = NULL;
        int r = control_call(control, "GetStatus", &request.base,
                             &ember__v1__get_status_response__descriptor, 5000, &status, err);
        if (r < 0)
            return r;
        bool there = status->standby >= standby && status->starting == 0;
        protobuf_c_message_free_unpacked(&status->base, NULL);
        if (there)
            return 0;
        if (clock_ns() > until || cli_interrupted)
            return error_set(err, cli_interrupted ? ECANCELED : ETIMEDOUT,
                             "%u standby instances were not there in time", standby);
        struct timespec pause = {0, 2000000};
        nanosleep(&pause, NULL);
    }
}
