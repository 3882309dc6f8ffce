/* SPDX-License-Identifier: Apache-2.0 */
/* emberd: start, signals, stop. */
#include <errno.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/mem.h"
#include "daemon/address.h"
#include "daemon/manager/manager.h"

#define LAST_REPLIES_MS 200 /* for calls that are still open when every child has gone */

/* ---- the ground we stand on ---- */

static int make_dirs(const char *path, mode_t mode, struct error *err)
{
    _cleanup_free_ char *copy = x_strdup(path);
    int above = 0; /* why one above it could not be made */

    for (char *p = copy + 1; *p; p++) {
        if (*p != '/')
            continue;
        *p = 0;
        if (mkdir(copy, 0755) < 0 && errno != EEXIST && !above)
            above = errno;
        *p = '/';
    }
    if (mkdir(copy, mode) < 0 && errno != EEXIST)
        return error_sys(err, above ? above : errno, "cannot make the directory %s", path);
    return 0;
}

static int take_lock(struct mgr *mgr, struct error *err)
{
    _cleanup_free_ char *path = x_printf("%s/emberd.lock", mgr->options.runtime_dir);
    _cleanup_fd_ int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    char text[32] = "";

    if (fd < 0)
        return error_sys(err, errno, "%s", path);
    if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK)
            return error_sys(err, errno, "%s", path);
        if (pread(fd, text, sizeof text - 1, 0) < 0)
            *text = 0;
        text[strcspn(text, "\n")] = 0;
        return error_set(err, EBUSY,
                         "another emberd (pid %s) runs in %s; stop it, or give this one another "
                         "runtime_dir and socket",
                         *text ? text : "unknown", mgr->options.runtime_dir);
    }
    int n = snprintf(text, sizeof text, "%d\n", (int)getpid());
    if (ftruncate(fd, 0) < 0 || pwrite(fd, text, (size_t)n, 0) != n)
        return error_sys(err, errno, "%s", path);
    mgr->lock_fd = TAKE_FD(fd);
    return 0;
}

/* Sockets of instances that a killed manager left. We hold the lock: nobody else's are there. */
static int sweep(struct mgr *mgr, struct error *err)
{
    _cleanup_free_ char *path = x_printf("%s/instances", mgr->options.runtime_dir);
    struct dirent *entry;
    unsigned swept = 0;

    int r = make_dirs(path, 0700, err);
    DIR *dir = r < 0 ? NULL : opendir(path);
    if (r == 0 && !dir)
        return error_sys(err, errno, "%s", path);
    while (dir && (entry = readdir(dir))) {
        size_t len = strlen(entry->d_name);
        if (len > 5 && !strcmp(entry->d_name + len - 5, ".sock"))
            swept += unlinkat(dirfd(dir), entry->d_name, 0) == 0;
    }
    if (dir)
        closedir(dir);
    if (swept)
        log_info("stale sockets removed", "count=%u", swept);
    return r;
}

static int prepare_runtime_dir(struct mgr *mgr, struct error *err)
{
    /* "/instances/ixxxx-NNNNNNNN.sock" and the NUL have to fit behind it in sun_path. */
    if (strlen(mgr->options.runtime_dir) > 70)
        return error_set(err, ENAMETOOLONG,
                         "runtime_dir = %s: at most 70 bytes, since sockets' paths are short",
                         mgr->options.runtime_dir);
    int r = make_dirs(mgr->options.runtime_dir, 0755, err);
    if (r == 0)
        r = take_lock(mgr, err);
    return r < 0 ? r : sweep(mgr, err);
}

/* ---- models of the configuration ---- */

static int register_path(struct mgr *mgr, const char *configured, struct mgr_model **ret,
                         struct error *err)
{
    _cleanup_free_ char *path = realpath(configured, NULL), *checked = NULL;
    char name[MGR_NAME_MAX + 1];

    int r = mgr_model_path_check(path ? path : configured, &checked, err);
    if (r == 0)
        r = mgr_model_name_of(checked, name, err);
    return r < 0 ? r : mgr_model_register(mgr, name, checked, ret, err);
}

/* What cannot be registered is said and left out: the daemon serves the rest. */
static void register_configured(struct mgr *mgr)
{
    struct error err = {0};
    struct mgr_model *m;

    if (mgr->options.default_model && *mgr->options.default_model &&
        register_path(mgr, mgr->options.default_model, &mgr->default_model, &err) < 0)
        log_warn("default model left out", "error=\"%s\"", err.text);
    if (mgr->default_model)
        mgr->default_model->configured = true;
    for (char **path = mgr->options.preload; path && *path; path++) {
        if (register_path(mgr, *path, &m, &err) < 0)
            log_warn("model not preloaded", "error=\"%s\"", err.text);
        else
            m->configured = true, m->wanted = m->state == MODEL_COLD;
    }
}

/* ---- systemd ---- */

void mgr_notify_status(struct mgr *mgr)
{
    static char last[128];
    char text[sizeof last];
    uint32_t resident = 0, standby = 0, leased = 0;
    struct mgr_model *m;

    if (!mgr_notify_wanted())
        return;
    TAILQ_FOREACH(m, &mgr->models, link)
    {
        resident += m->state == MODEL_PARKED;
        standby += m->instances[INSTANCE_WARM];
        leased += m->instances[INSTANCE_HOT];
    }
    snprintf(text, sizeof text, "STATUS=%u models resident, %u standbys, %u leased", resident,
             standby, leased);
    if (strcmp(text, last))
        mgr_notify(text);
    memcpy(last, text, sizeof last);
}

static void on_watchdog(int fd, short what, void *arg)
{
    mgr_notify("WATCHDOG=1");
}

static void start_watchdog(struct mgr *mgr)
{
    uint64_t usec = 0;

    event_assign(&mgr->on_watchdog, mgr->base, -1, EV_PERSIST, on_watchdog, mgr);
    if (sd_watchdog_enabled(0, &usec) <= 0)
        return;
    struct timeval tv = {(time_t)(usec / 3 / 1000000), (suseconds_t)(usec / 3 % 1000000)};
    event_add(&mgr->on_watchdog, &tv);
}

/* ---- stop ---- */

static void on_last_reply(void *user)
{
    struct mgr *mgr = user;
    event_base_loopbreak(mgr->base);
}

/* Looks every few milliseconds whether the last child has gone. */
static void on_drained(int fd, short what, void *arg)
{
    struct mgr *mgr = arg;
    struct mgr_instance *i;
    struct mgr_model *m;
    bool done = TAILQ_EMPTY(&mgr->instances) && !mgr->gateway.child;

    TAILQ_FOREACH(m, &mgr->models, link)
    done &= m->loader == NULL && m->packer == NULL;
    TAILQ_FOREACH(i, &mgr->instances, link)
    if (mgr->killing && i->child)
        child_kill(i->child);
    if (mgr->killing && mgr->gateway.child && mgr->stop_now)
        child_kill(mgr->gateway.child);
    if (!done)
        return;
    event_del(&mgr->on_drained);
    grpc_server_shutdown(mgr->server, LAST_REPLIES_MS, on_last_reply, mgr);
}

static void on_drain_timeout(int fd, short what, void *arg)
{
    struct mgr *mgr = arg;
    mgr->killing = true;
}

static void fail_all(struct mgr *mgr, const struct error *why)
{
    struct mgr_model *m;

    TAILQ_FOREACH(m, &mgr->models, link)
    {
        mgr_spawn_fail(m, m->n_waiting, why);
        mgr_watch_loaded(m, why);
        m->wanted = false;
        if (m->loader)
            child_kill(m->loader);
        mgr_pack_stop(m);
    }
}

/* Standbys go at once; the gateway, and leased instances with a driver, get until
 * shutdown_timeout. */
static void drain(struct mgr *mgr)
{
    static const struct error why = {-EAGAIN, "the daemon is shutting down"};
    static const struct timeval often = {0, 5000};
    uint64_t ns = mgr->options.shutdown_timeout;
    struct timeval limit = {(time_t)(ns / 1000000000u), (suseconds_t)(ns % 1000000000u / 1000)};
    struct mgr_instance *i;

    log_info("shutting down", "");
    mgr_notify("STOPPING=1");
    mgr->draining = true;
    mgr_service_health(mgr);
    mgr_gateway_stop(mgr);
    fail_all(mgr, &why);
    TAILQ_FOREACH(i, &mgr->instances, link)
    if (!i->driver_connected)
        mgr_instance_stop(i, why.text);
    mgr_watchers_end(mgr);
    event_assign(&mgr->on_drained, mgr->base, -1, EV_PERSIST, on_drained, mgr);
    event_add(&mgr->on_drained, &often);
    event_base_once(mgr->base, -1, EV_TIMEOUT, on_drain_timeout, mgr, &limit);
}

static void on_stop_signal(int sig, short what, void *arg)
{
    struct mgr *mgr = arg;

    if (mgr->draining)
        mgr->killing = mgr->stop_now = true;
    else
        drain(mgr);
}

/* ---- reload ---- */

static struct {
    int argc;
    char **argv;
} command_line;

static void needs_restart(const struct config_key *key, void *context)
{
    if (key->change == CONFIG_RESTART)
        log_warn("configuration change needs a restart", "key=%s.%s", key->section, key->name);
    else
        log_info("configuration changed", "key=%s.%s", key->section, key->name);
}

/* What a single value's limits cannot say: -errno with a text that names the key. */
static int check_options(const struct emberd_options *o, struct error *err)
{
    char host[128];
    uint16_t port;

    int r = mgr_budget_check(o, err);
    if (r == 0 && o->gateway && address_split(o->gateway_listen, host, sizeof host, &port, err) < 0)
        return error_prefix(err, "gateway_listen");
    return r;
}

static void on_reload(int sig, short what, void *arg)
{
    struct emberd_options fresh = {0};
    struct mgr *mgr = arg;
    struct error err = {0};
    char text[64];

    snprintf(text, sizeof text, "RELOADING=1\nMONOTONIC_USEC=%llu",
             (unsigned long long)(clock_ns() / 1000));
    mgr_notify(text);
    if (config_read(&emberd_program, command_line.argc, command_line.argv, &fresh, &err) < 0 ||
        check_options(&fresh, &err) < 0) {
        log_error("configuration not reloaded", "error=\"%s\"", err.text);
    } else {
        config_reload(&emberd_program, &mgr->options, &fresh, needs_restart, NULL);
        log_init("emberd", log_level_of(mgr->options.log_level));
        mgr_gateway_reload(mgr);
        mgr_settle_soon(mgr);
    }
    config_free(&emberd_program, &fresh);
    mgr_notify("READY=1");
}

/* ---- start ---- */

/* What would show only when the first model is wanted is said now. */
static void look_ahead(const struct mgr *mgr)
{
    const struct emberd_options *o = &mgr->options;
    struct error err = {0};
    char path[4096];

    if (!child_program("ember-instance", path, sizeof path) ||
        !child_program("ember-loader", path, sizeof path))
        log_warn("ember-loader or ember-instance is not beside emberd: nothing can be started", "");
    if (!strchr(o->backend, '/') ? strcmp(o->backend, "cpu") != 0 : access(o->backend, R_OK) < 0)
        log_warn("no such backend: no instance will start", "backend=\"%s\"", o->backend);
    if (make_dirs(o->cache_dir, 0700, &err) < 0 || access(o->cache_dir, W_OK) < 0)
        log_warn("no cache: each instance compiles and captures anew",
                 "cache_dir=\"%s\" error=\"%s\"", o->cache_dir,
                 *err.text ? err.text : strerror(errno));
    if (!mgr->default_model)
        return;
    snprintf(path, sizeof path, "%s/config.json", mgr->default_model->path);
    if (access(path, R_OK) < 0)
        log_warn("the default model cannot be read", "path=\"%s\" error=\"%s\"", path,
                 strerror(errno));
}

static int start(struct mgr *mgr, struct error *err)
{

    int r = prepare_runtime_dir(mgr, err);
    if (r < 0)
        return r;
    mgr->base = event_base_new();
    if (!mgr->base)
        return error_set(err, ENOMEM, "no event loop");
    mgr_settle_init(mgr);
    mgr_pack_init(mgr);
    mgr_notify_init(mgr);
    start_watchdog(mgr);
    if (getrandom(&mgr->id_epoch, sizeof mgr->id_epoch, 0) < 0)
        mgr->id_epoch = (uint32_t)mgr->started_ns;
    mgr->id_epoch &= 0xffff;
    mgr_budget_init(mgr, mgr_fdstore_adopt(mgr));
    register_configured(mgr);
    look_ahead(mgr);
    return mgr_service_init(mgr, err);
}

static void watch_signals(struct mgr *mgr, struct event *events)
{
    static const struct {
        int signal;
        event_callback_fn handler;
    } table[] = {{SIGTERM, on_stop_signal}, {SIGINT, on_stop_signal}, {SIGHUP, on_reload}};

    signal(SIGPIPE, SIG_IGN);
    for (size_t i = 0; i < ARRAY_LEN(table); i++) {
        event_assign(&events[i], mgr->base, table[i].signal, EV_SIGNAL | EV_PERSIST,
                     table[i].handler, mgr);
        event_add(&events[i], NULL);
    }
}

static void finish(struct mgr *mgr)
{
    while (!TAILQ_EMPTY(&mgr->models))
        mgr_model_free(TAILQ_FIRST(&mgr->models));
    if (mgr->server)
        grpc_server_free(mgr->server);
    if (mgr->base) {
        mgr_notify_free();
        mgr_settle_free(mgr);
        free(mgr->packs_dir);
        mgr_gateway_free(mgr);
        event_base_free(mgr->base);
    }
    free(mgr->listen_fds);
    fd_close(mgr->lock_fd);
    config_free(&emberd_program, &mgr->options);
}

static int run(struct mgr *mgr)
{
    struct event signals[3];
    struct error err = {0};

    if (start(mgr, &err) < 0) {
        log_error("cannot start", "error=\"%s\"", err.text);
        return 1;
    }
    watch_signals(mgr, signals);
    mgr_gateway_init(mgr);
    mgr_settle_soon(mgr);
    mgr_service_health(mgr);
    mgr_notify("READY=1");
    log_info("ready", "socket=%s budget=%llu ms=%.1f",
             mgr->n_listen_fds ? "inherited" : mgr->options.socket,
             (unsigned long long)mgr_budget(mgr), clock_ms_since(mgr->started_ns));
    event_base_dispatch(mgr->base);
    log_info("ended", "");
    return 0;
}

int main(int argc, char **argv)
{
    struct mgr mgr = {.started_ns = clock_ns(), .lock_fd = -1, .gateway = {.listen_fd = -1}};
    struct error err = {0};

    TAILQ_INIT(&mgr.models);
    TAILQ_INIT(&mgr.instances);
    TAILQ_INIT(&mgr.watchers);
    fd_hold_stdio();
    fd_raise_limit();
    log_init("emberd", LOG_LEVEL_INFO);
    log_stamp(!getenv("JOURNAL_STREAM"));
    int action = config_read(&emberd_program, argc, argv, &mgr.options, &err);
    if (action < 0) {
        fprintf(stderr, "emberd: %s\n", err.text);
        return 2;
    }
    if (action != CONFIG_RUN) {
        struct buffer out = {0};
        config_print(&emberd_program, action, &mgr.options, &out);
        fwrite(out.data, 1, out.len, stdout);
        buffer_free(&out);
        config_free(&emberd_program, &mgr.options);
        return 0;
    }
    if (check_options(&mgr.options, &err) < 0) {
        fprintf(stderr, "emberd: %s\n", err.text);
        config_free(&emberd_program, &mgr.options);
        return 2;
    }
    command_line.argc = argc;
    command_line.argv = argv;
    log_init("emberd", log_level_of(mgr.options.log_level));
    int code = run(&mgr);
    finish(&mgr);
    return code;
}
