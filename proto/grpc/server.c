/* SPDX-License-Identifier: Apache-2.0 */
/* The server as a whole: what it serves, where it listens, how it stops. */
#include "proto/grpc/server-internal.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/fd.h"

enum { ACCEPT_BATCH = 16, BACKLOG = 511, ACCEPT_PAUSE_MS = 100, RECURSION_CHECK_MAX = 64 };

#define NGROUPS_ADMIT 1024 /* other groups of a peer that are looked at */

static bool admit_self_or_root(const struct ucred *peer, void *user)
{
    return peer->uid == geteuid() || peer->uid == 0;
}

static struct grpc_server_options options_with_defaults(const struct grpc_server_options *options)
{
    struct grpc_server_options o = options ? *options : (struct grpc_server_options){0};

    o.max_message = o.max_message ? MIN(o.max_message, UINT32_MAX) : 4 * MIB;
    o.max_queued = o.max_queued ? o.max_queued : 8 * MIB;
    o.max_held = o.max_held ? o.max_held : 256 * MIB;
    o.max_connections = o.max_connections ? o.max_connections : 512;
    o.max_streams = o.max_streams ? o.max_streams : 256;
    o.stall_ms = o.stall_ms ? o.stall_ms : 10000;
    o.reset_budget = o.reset_budget ? o.reset_budget : 1000;
    o.control_budget = o.control_budget ? o.control_budget : 10000;
    if (!o.admit)
        o.admit = admit_self_or_root;
    return o;
}

static struct timeval timeval_ms(unsigned ms)
{
    return (struct timeval){.tv_sec = ms / 1000, .tv_usec = (suseconds_t)(ms % 1000) * 1000};
}

/* Accepting. */

static void set_accepting(struct grpc_server *server, bool on)
{
    struct listener *l;

    server->accept_paused = !on;
    LIST_FOREACH(l, &server->listeners, link)
    {
        if (on)
            event_add(l->event, NULL);
        else
            event_del(l->event);
    }
}

/* Out of descriptors or memory, or full: the backlog keeps who comes now. */
static void pause_accepting(struct grpc_server *server)
{
    struct timeval tv = timeval_ms(ACCEPT_PAUSE_MS);

    set_accepting(server, false);
    event_add(server->accept_event, &tv);
}

static void on_accept_again(evutil_socket_t fd, short what, void *user)
{
    struct grpc_server *server = user;

    if (server->stats.open_connections < server->options.max_connections)
        set_accepting(server, true);
}

/* Asks about the peer as a member of each of its other groups. */
static bool admit_by_group(struct grpc_server *server, int fd, const struct ucred *peer)
{
    gid_t groups[NGROUPS_ADMIT];
    socklen_t size = sizeof groups;

    if (getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, groups, &size) < 0)
        return false; /* ERANGE: in more groups than anybody has */
    for (size_t i = 0; i < size / sizeof *groups; i++) {
        struct ucred as = {.pid = peer->pid, .uid = peer->uid, .gid = groups[i]};
        if (server->options.admit(&as, server->options.admit_user))
            return true;
    }
    return false;
}

/* -EACCES for a peer that is refused. *ret_has: it has credentials, i.e. is on a Unix socket. */
static int admit(struct grpc_server *server, int fd, struct ucred *ret_peer, bool *ret_has)
{
    struct sockaddr_storage address;
    socklen_t size = sizeof address, cred_size = sizeof *ret_peer;

    if (getsockname(fd, (struct sockaddr *)&address, &size) < 0)
        return -errno;
    *ret_has = address.ss_family == AF_UNIX;
    if (!*ret_has)
        return 0;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, ret_peer, &cred_size) < 0)
        return -errno;
    return server->options.admit(ret_peer, server->options.admit_user) ||
                   admit_by_group(server, fd, ret_peer)
               ? 0
               : -EACCES;
}

int grpc_server_add_connection(struct grpc_server *server, int fd, struct error *err)
{
    _cleanup_fd_ int owned = fd;
    struct ucred peer = {0};
    bool has_peer;
    int one = 1;

    int r = admit(server, owned, &peer, &has_peer);
    if (r < 0) {
        server->stats.refused++;
        return error_sys(err, -r, "connection of pid %d, uid %d refused", (int)peer.pid,
                         (int)peer.uid);
    }
    if (evutil_make_socket_nonblocking(owned) < 0)
        return error_sys(err, errno, "cannot make a socket non-blocking");
    if (!has_peer)
        setsockopt(owned, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return conn_new(server, TAKE_FD(owned), has_peer ? &peer : NULL, err);
}

static void on_acceptable(evutil_socket_t fd, short what, void *user)
{
    struct listener *l = user;
    struct grpc_server *server = l->server;

    for (int i = 0; i < ACCEPT_BATCH; i++) {
        if (server->stats.open_connections >= server->options.max_connections) {
            pause_accepting(server);
            return;
        }
        int peer = -1;
        if (fault_hit(FAULT_FD))
            errno = EMFILE;
        else
            peer = accept4(l->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (peer < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM))
            pause_accepting(server);
        if (peer < 0)
            return;
        grpc_server_add_connection(server, peer, NULL);
    }
}

/* Listening. */

static void listener_free(struct listener *l)
{
    struct stat now;

    if (l->event)
        event_free(l->event);
    if (l->path && stat(l->path, &now) == 0 && now.st_dev == l->made.st_dev &&
        now.st_ino == l->made.st_ino)
        unlink(l->path);
    fd_close(l->fd);
    free(l->path);
    free(l);
}

/* Takes fd when it succeeds. */
static int add_listener(struct grpc_server *server, int fd, const char *path, struct error *err)
{
    if (server->stopping)
        return error_set(err, ESHUTDOWN, "the server is shutting down");
    if (evutil_make_socket_nonblocking(fd) < 0)
        return error_sys(err, errno, "cannot make a listening socket non-blocking");
    struct listener *l = x_alloc(sizeof *l);
    l->server = server;
    l->fd = -1;
    l->event = event_new(server->base, fd, EV_READ | EV_PERSIST, on_acceptable, l);
    if (!l->event || event_add(l->event, NULL) < 0) {
        listener_free(l);
        return error_set(err, ENOMEM, "cannot watch a listening socket");
    }
    l->fd = fd;
    if (path && stat(path, &l->made) == 0)
        l->path = x_strdup(path);
    LIST_INSERT_HEAD(&server->listeners, l, link);
    return 0;
}

int grpc_server_listen_fd(struct grpc_server *server, int fd, struct error *err)
{
    int listening = 0;
    socklen_t size = sizeof listening;

    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) < 0)
        return error_sys(err, errno, "descriptor %d cannot be listened on", fd);
    if (!listening)
        return error_set(err, EINVAL, "descriptor %d is a socket, but not a listening one", fd);
    return add_listener(server, fd, NULL, err);
}

/* True when a socket is there and nobody answers. A file of another kind refuses connections too,
 * but is not ours to remove. */
static bool is_stale(const char *path)
{
    struct stat st;

    if (lstat(path, &st) < 0 || !S_ISSOCK(st.st_mode))
        return false;
    _cleanup_fd_ int fd = fd_connect(path, SOCK_NONBLOCK, NULL);

    return fd == -ECONNREFUSED;
}

int grpc_server_listen_unix(struct grpc_server *server, const char *path, mode_t mode,
                            struct error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    _cleanup_fd_ int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd < 0)
        return error_sys(err, errno, "cannot make a socket");
    if (strlen(path) >= sizeof address.sun_path)
        return error_set(err, ENAMETOOLONG,
                         "socket path %s has %zu bytes, at most %zu are possible", path,
                         strlen(path), sizeof address.sun_path - 1);
    strcpy(address.sun_path, path);
    int r = bind(fd, (struct sockaddr *)&address, sizeof address);
    if (r < 0 && errno == EADDRINUSE && is_stale(path)) {
        unlink(path);
        r = bind(fd, (struct sockaddr *)&address, sizeof address);
    }
    if (r < 0)
        return error_sys(err, errno, "cannot create socket %s", path);
    if (chmod(path, mode) < 0 || listen(fd, BACKLOG) < 0) {
        int errnum = errno;
        unlink(path);
        return error_sys(err, errnum, "cannot listen on socket %s", path);
    }
    r = add_listener(server, fd, path, err);
    if (r < 0)
        unlink(path);
    else
        TAKE_FD(fd);
    return r;
}

/* Parses a numeric loopback address ("localhost" is 127.0.0.1). */
static int loopback(const char *address, uint16_t port, struct sockaddr_storage *ret,
                    socklen_t *ret_size)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};

    if (!strcmp(address, "localhost"))
        address = "127.0.0.1";
    if (inet_pton(AF_INET, address, &in.sin_addr) == 1) {
        memcpy(ret, &in, sizeof in);
        *ret_size = sizeof in;
        return ntohl(in.sin_addr.s_addr) >> 24 == 127 ? 0 : -EACCES;
    }
    if (inet_pton(AF_INET6, address, &in6.sin6_addr) == 1) {
        memcpy(ret, &in6, sizeof in6);
        *ret_size = sizeof in6;
        return IN6_IS_ADDR_LOOPBACK(&in6.sin6_addr) ? 0 : -EACCES;
    }
    return -EINVAL;
}

static uint16_t bound_port(int fd)
{
    struct sockaddr_storage address;
    socklen_t size = sizeof address;

    if (getsockname(fd, (struct sockaddr *)&address, &size) < 0)
        return 0;
    return ntohs(address.ss_family == AF_INET ? ((struct sockaddr_in *)&address)->sin_port
                                              : ((struct sockaddr_in6 *)&address)->sin6_port);
}

int grpc_server_listen_tcp(struct grpc_server *server, const char *address, uint16_t port,
                           uint16_t *ret_port, struct error *err)
{
    struct sockaddr_storage sockaddr = {0};
    socklen_t size;
    int one = 1;

    int r = loopback(address, port, &sockaddr, &size);
    if (r == -EACCES)
        return error_set(err, EACCES,
                         "%s is not a loopback address; plain TCP carries no credentials", address);
    if (r < 0)
        return error_set(err, EINVAL, "%s is not a numeric IP address", address);
    _cleanup_fd_ int fd = socket(sockaddr.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return error_sys(err, errno, "cannot make a TCP socket");
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&sockaddr, size) < 0 || listen(fd, BACKLOG) < 0)
        return error_sys(err, errno, "cannot listen on %s port %u", address, (unsigned)port);
    uint16_t got = bound_port(fd);
    r = add_listener(server, fd, NULL, err);
    if (r < 0)
        return r;
    TAKE_FD(fd);
    if (ret_port)
        *ret_port = got;
    return 0;
}

/* Services. */

static bool contains_itself(const ProtobufCMessageDescriptor *desc,
                            const ProtobufCMessageDescriptor **path, unsigned depth)
{
    if (depth == RECURSION_CHECK_MAX)
        return true;
    for (unsigned i = 0; i < depth; i++)
        if (path[i] == desc)
            return true;
    path[depth] = desc;
    for (unsigned i = 0; i < desc->n_fields; i++)
        if (desc->fields[i].type == PROTOBUF_C_TYPE_MESSAGE &&
            contains_itself(desc->fields[i].descriptor, path, depth + 1))
            return true;
    return false;
}

static int find_method(const ProtobufCServiceDescriptor *desc, const char *name)
{
    for (unsigned i = 0; i < desc->n_methods; i++)
        if (!strcmp(desc->methods[i].name, name))
            return (int)i;
    return -1;
}

static const struct service *find_service(const struct grpc_server *server, const char *name,
                                          size_t len)
{
    for (size_t i = 0; i < server->n_services; i++)
        if (strlen(server->services[i].desc->name) == len &&
            !memcmp(server->services[i].desc->name, name, len))
            return &server->services[i];
    return NULL;
}

int grpc_server_add_service(struct grpc_server *server, const ProtobufCServiceDescriptor *desc,
                            const struct grpc_method *methods, size_t n_methods, void *user,
                            struct error *err)
{
    const ProtobufCMessageDescriptor *path[RECURSION_CHECK_MAX];

    if (find_service(server, desc->name, strlen(desc->name)))
        return error_set(err, EEXIST, "service %s is registered already", desc->name);
    _cleanup_free_ struct grpc_method *table = x_alloc((desc->n_methods + 1) * sizeof *table);
    for (size_t i = 0; i < n_methods; i++) {
        int index = find_method(desc, methods[i].name);
        if (index < 0)
            return error_set(err, EINVAL, "service %s has no method %s", desc->name,
                             methods[i].name);
        if (contains_itself(desc->methods[index].input, path, 0))
            return error_set(err, EINVAL, "request type %s of %s.%s contains itself",
                             desc->methods[index].input->name, desc->name, methods[i].name);
        table[index] = methods[i];
    }
    server->services =
        x_realloc(server->services, (server->n_services + 1) * sizeof *server->services);
    server->services[server->n_services++] =
        (struct service){.desc = desc, .methods = TAKE(table), .user = user};
    return 0;
}

const struct service *server_find(const struct grpc_server *server, const char *path,
                                  const ProtobufCMethodDescriptor **ret_method, unsigned *ret_index)
{
    const char *slash = path[0] == '/' ? strchr(path + 1, '/') : NULL;
    const struct service *service =
        slash ? find_service(server, path + 1, (size_t)(slash - path - 1)) : NULL;
    int index = service ? find_method(service->desc, slash + 1) : -1;

    if (index < 0 || !service->methods[index].handler)
        return NULL;
    *ret_method = &service->desc->methods[index];
    *ret_index = (unsigned)index;
    return service;
}

/* Life and end. */

static void on_cancels(evutil_socket_t fd, short what, void *user)
{
    server_run_cancels(user);
}

static void on_done(evutil_socket_t fd, short what, void *user)
{
    struct grpc_server *server = user;
    void (*done)(void *) = server->done;

    server->done = NULL;
    if (done)
        done(server->done_user); /* may free the server */
}

static void check_done(struct grpc_server *server)
{
    if (server->stopping && LIST_EMPTY(&server->conns))
        event_active(server->done_event, EV_TIMEOUT, 0);
}

static void on_grace_over(evutil_socket_t fd, short what, void *user)
{
    struct grpc_server *server = user;
    struct server_conn *conn, *next;
    struct grpc_call *call, *next_call;

    for (conn = LIST_FIRST(&server->conns); conn; conn = next) {
        next = LIST_NEXT(conn, link);
        for (call = LIST_FIRST(&conn->calls); call; call = next_call) {
            next_call = LIST_NEXT(call, link);
            call_abort(call, GRPC_UNAVAILABLE, "the server is shutting down");
        }
        nghttp2_session_terminate_session(conn->h2.session, NGHTTP2_NO_ERROR);
        if (!nghttp2_session_want_write(conn->h2.session) || conn->h2.out.len)
            h2_fail(&conn->h2, -ESHUTDOWN, "the server is shutting down");
        h2_wake(&conn->h2);
    }
}

int grpc_server_new(struct event_base *base, const struct grpc_server_options *options,
                    struct grpc_server **ret_server, struct error *err)
{
    struct grpc_server *server = x_alloc(sizeof *server);

    server->base = base;
    server->options = options_with_defaults(options);
    LIST_INIT(&server->listeners);
    LIST_INIT(&server->conns);
    LIST_INIT(&server->orphans);
    LIST_INIT(&server->health);
    LIST_INIT(&server->watches);
    TAILQ_INIT(&server->cancels);
    server->cancel_event = event_new(base, -1, 0, on_cancels, server);
    server->accept_event = evtimer_new(base, on_accept_again, server);
    server->grace_event = evtimer_new(base, on_grace_over, server);
    server->done_event = event_new(base, -1, 0, on_done, server);
    int r =
        server->cancel_event && server->accept_event && server->grace_event && server->done_event
            ? 0
            : error_set(err, ENOMEM, "cannot make the events of a gRPC server");
    if (r == 0)
        r = health_init(server, err);
    if (r == 0)
        r = reflection_init(server, err);
    if (r < 0) {
        grpc_server_free(server);
        return r;
    }
    *ret_server = server;
    return 0;
}

static void close_listeners(struct grpc_server *server)
{
    while (!LIST_EMPTY(&server->listeners)) {
        struct listener *l = LIST_FIRST(&server->listeners);
        LIST_REMOVE(l, link);
        listener_free(l);
    }
    if (server->accept_event)
        event_del(server->accept_event);
}

void grpc_server_free(struct grpc_server *server)
{
    if (!server)
        return;
    server->stopping = true;
    server->done = NULL;
    close_listeners(server);
    while (!LIST_EMPTY(&server->conns))
        conn_free(LIST_FIRST(&server->conns));
    server_run_cancels(server);
    for (struct grpc_call *call; (call = LIST_FIRST(&server->orphans));) {
        LIST_REMOVE(call, link);
        call->server = NULL;
    }
    health_free(server);
    protoset_free(server);
    for (size_t i = 0; i < server->n_services; i++)
        free(server->services[i].methods);
    free(server->services);
    struct event *events[] = {server->cancel_event, server->accept_event, server->grace_event,
                              server->done_event};
    for (size_t i = 0; i < ARRAY_LEN(events); i++)
        if (events[i])
            event_free(events[i]);
    free(server);
}

void grpc_server_shutdown(struct grpc_server *server, unsigned grace_ms, void (*done)(void *user),
                          void *user)
{
    struct timeval tv = timeval_ms(grace_ms);
    struct server_conn *conn;

    if (!server->stopping) {
        server->stopping = true;
        close_listeners(server);
        health_stop(server);
        LIST_FOREACH(conn, &server->conns, link)
        conn_goaway(conn);
    }
    if (done) {
        server->done = done;
        server->done_user = user;
    }
    event_add(server->grace_event, &tv);
    check_done(server);
}

void server_conn_gone(struct grpc_server *server)
{
    server->stats.open_connections--;
    if (server->accept_paused && !server->stopping)
        event_active(server->accept_event, EV_TIMEOUT, 0);
    check_done(server);
}

bool server_hold(struct grpc_call *call, size_t n)
{
    struct grpc_server *server = call->server;

    if (n > server->options.max_held - MIN(server->stats.held, server->options.max_held))
        return false;
    server->stats.held += n;
    call->held += n;
    return true;
}

void server_release(struct grpc_call *call, size_t n)
{
    if (call->server)
        call->server->stats.held -= n;
    call->held -= n;
}

struct grpc_server_stats grpc_server_stats(const struct grpc_server *server)
{
    return server->stats;
}
