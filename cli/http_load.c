/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/http_load.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/mem.h"
#include "cli/output.h"

#define READ_BYTES (64u << 10)
#define NOTHING SIZE_MAX

enum part { PART_HEAD, PART_SIZE, PART_CHUNK, PART_CHUNK_END, PART_BODY, PART_TRAILER };

struct link {
    int fd;
    size_t stream; /* NOTHING: idle */
    enum part part;
    size_t left;        /* of the chunk or body */
    struct buffer in;   /* not looked at yet */
    struct buffer line; /* of the event stream, not whole yet */
    bool held;          /* until there have been enough events */
    bool failed;        /* the stream brought an error */
};

struct load {
    const struct load_run *run;
    struct load_stream *streams;
    size_t n, next, open, n_links, n_held;
    struct link *links;
    int epoll;
    uint64_t start_ns, now_ns, events;
    bool told;
};

/* ---- out ---- */

static int connect_to(struct load *load, size_t i, struct error *err)
{
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)load->run->port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = i};
    int on = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    load->links[i].fd = fd;
    if (fd < 0)
        return error_sys(err, errno, "socket");
    if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
        return error_sys(err, errno, "127.0.0.1:%u", load->run->port);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (epoll_ctl(load->epoll, EPOLL_CTL_ADD, fd, &event) < 0)
        return error_sys(err, errno, "epoll");
    return 0;
}

static int send_request(int fd, const struct load_stream *stream, struct error *err)
{
    _cleanup_(buffer_free) struct buffer out = {0};
    size_t body = stream->body ? strlen(stream->body) : 0;

    if (stream->body)
        buffer_printf(&out,
                      "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                      "Content-Length: %zu\r\n\r\n",
                      stream->path, body);
    else
        buffer_printf(&out, "GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n", stream->path);
    if (buffer_append(&out, stream->body ? stream->body : "", body) < 0)
        return error_set(err, ENOMEM, "no memory for a request");
    for (size_t at = 0; at < out.len;) {
        ssize_t n = send(fd, out.data + at, out.len - at, MSG_NOSIGNAL);
        if (n < 0 && errno != EINTR)
            return error_sys(err, errno, "the gateway does not take a request");
        at += n > 0 ? (size_t)n : 0;
    }
    return 0;
}

static int send_stream(struct load *load, size_t i, struct error *err)
{
    struct link *link = &load->links[i];
    struct load_stream *stream = &load->streams[link->stream];
    int r = link->fd < 0 ? connect_to(load, i, err) : 0;

    link->held = false;
    if (r < 0)
        return r;
    *stream = (struct load_stream){
        .path = stream->path, .body = stream->body, .after_events = stream->after_events};
    stream->sent_ns = clock_ns() - load->start_ns;
    return send_request(link->fd, stream, err);
}

/* The next stream goes out on an idle connection. */
static int begin(struct load *load, size_t i, struct error *err)
{
    struct link *link = &load->links[i];

    link->stream = NOTHING;
    if (load->next == load->n)
        return 0;
    link->stream = load->next++;
    link->part = PART_HEAD;
    link->failed = false;
    link->line.len = 0;
    load->open++;
    link->held = load->streams[link->stream].after_events > load->events;
    load->n_held += link->held;
    return link->held ? 0 : send_stream(load, i, err);
}

static int send_held(struct load *load, struct error *err)
{
    int r = 0;

    for (size_t i = 0; i < load->n_links && r == 0 && load->n_held; i++) {
        struct link *link = &load->links[i];
        if (!link->held || load->streams[link->stream].after_events > load->events)
            continue;
        load->n_held--;
        r = send_stream(load, i, err);
    }
    return r;
}

/* ---- in: events ---- */

/* The text of an event, between its quotes; false: none, or an empty one. */
static bool text_of(const char *line, const char **ret, size_t *ret_len)
{
    static const char key[] = "\"text\":\"";
    const char *p = strstr(line, key), *end;

    if (!p)
        return false;
    p += sizeof key - 1;
    for (end = p; *end && *end != '"'; end++)
        end += *end == '\\' && end[1];
    *ret = p;
    *ret_len = (size_t)(end - p);
    return end > p;
}

static void take_text(struct load *load, struct load_stream *stream, const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++) /* FNV-1a */
        stream->digest = (stream->digest ^ (unsigned char)text[i]) * UINT64_C(0x100000001b3);
    if (!stream->first_ns)
        stream->first_ns = load->now_ns;
    else
        stream->longest_ns = MAX(stream->longest_ns, load->now_ns - stream->last_ns);
    stream->last_ns = load->now_ns;
    load->events++;
}

static void take_line(struct load *load, struct link *link, const char *line)
{
    struct load_stream *stream = &load->streams[link->stream];
    const char *text, *usage;
    size_t len;

    if (strncmp(line, "data: ", 6))
        return;
    if (!strcmp(line + 6, "[DONE]")) {
        stream->complete = !link->failed;
    } else if (!strncmp(line + 6, "{\"error\"", 8)) {
        link->failed = true;
        snprintf(stream->error, sizeof stream->error, "%s", line + 6);
    } else if (text_of(line, &text, &len)) {
        take_text(load, stream, text, len);
    }
    usage = strstr(line, "\"completion_tokens\":");
    if (usage)
        stream->tokens = (uint32_t)strtoul(usage + 20, NULL, 10);
}

static int take_bytes(struct load *load, struct link *link, const char *bytes, size_t n,
                      struct error *err)
{
    while (n) {
        const char *end = memchr(bytes, '\n', n);
        size_t len = end ? (size_t)(end - bytes) : n;
        if (buffer_append(&link->line, bytes, len) < 0)
            return error_set(err, ENOMEM, "no memory for an event");
        if (end) {
            take_line(load, link, link->line.len ? link->line.data : "");
            link->line.len = 0;
            len++;
        }
        bytes += len;
        n -= len;
    }
    return 0;
}

/* ---- in: HTTP ---- */

static int take_head(struct load *load, struct link *link, char *head, struct error *err)
{
    struct load_stream *stream = &load->streams[link->stream];
    const char *length = strcasestr(head, "\r\nContent-Length:");

    if (sscanf(head, "HTTP/1.1 %d", &stream->status) != 1)
        return error_set(err, EPROTO, "the gateway's reply is not HTTP: %.60s", head);
    link->left = length ? strtoul(length + 17, NULL, 10) : 0;
    link->part = strcasestr(head, "\r\nTransfer-Encoding: chunked") ? PART_SIZE : PART_BODY;
    return 0;
}

static void end(struct load *load, struct link *link)
{
    struct load_stream *stream = &load->streams[link->stream];

    if (!stream->first_ns) { /* no event stream */
        stream->complete = stream->status == 200 && !link->failed;
        stream->first_ns = load->now_ns;
    }
    stream->last_ns = load->now_ns;
    load->open--;
}

/* Takes what is there of the part; *ret_used 0: more has to come. 1: the reply is whole. */
static int take_part(struct load *load, struct link *link, char *data, size_t n, size_t *ret_used,
                     struct error *err)
{
    char *at =
        link->part == PART_HEAD ? memmem(data, n, "\r\n\r\n", 4) : memmem(data, n, "\r\n", 2);
    size_t used = MIN(n, link->left);
    int r = 0;

    *ret_used = 0;
    switch (link->part) {
    case PART_HEAD:
        if (!at)
            return 0;
        *at = 0;
        *ret_used = (size_t)(at - data) + 4;
        r = take_head(load, link, data, err);
        return r == 0 && link->part == PART_BODY && !link->left ? 1 : r;
    case PART_SIZE:
        if (!at)
            return 0;
        *ret_used = (size_t)(at - data) + 2;
        link->left = strtoul(data, NULL, 16);
        link->part = link->left ? PART_CHUNK : PART_TRAILER;
        return 0;
    case PART_CHUNK:
    case PART_BODY:
        *ret_used = used;
        link->left -= used;
        r = link->part == PART_CHUNK ? take_bytes(load, link, data, used, err) : 0;
        if (r < 0 || link->left)
            return r;
        if (link->part == PART_BODY)
            return 1;
        link->part = PART_CHUNK_END;
        return 0;
    case PART_CHUNK_END:
    case PART_TRAILER:
        if (n < 2)
            return 0;
        *ret_used = 2;
        r = link->part == PART_TRAILER;
        link->part = PART_SIZE;
        return r;
    }
    return 0;
}

static int take_all(struct load *load, size_t i, struct error *err)
{
    struct link *link = &load->links[i];
    size_t at = 0, used = 1;
    int r = 0;

    while (at < link->in.len && used && r == 0) {
        if (link->stream == NOTHING)
            return error_set(err, EPROTO, "the gateway sends what nobody has asked for");
        r = take_part(load, link, link->in.data + at, link->in.len - at, &used, err);
        at += used;
        if (r != 1)
            continue;
        end(load, link);
        r = begin(load, i, err);
    }
    memmove(link->in.data, link->in.data + at, link->in.len - at);
    link->in.len -= at;
    return r;
}

static int on_readable(struct load *load, size_t i, struct error *err)
{
    struct link *link = &load->links[i];

    if (buffer_reserve(&link->in, READ_BYTES) < 0)
        return error_set(err, ENOMEM, "no memory to read into");
    ssize_t n = recv(link->fd, link->in.data + link->in.len, READ_BYTES, MSG_DONTWAIT);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : error_sys(err, errno, "gateway");
    load->now_ns = clock_ns() - load->start_ns;
    link->in.len += (size_t)n;
    if (n)
        return take_all(load, i, err);
    link->fd = fd_close(link->fd); /* it closes a connection after some kinds of error */
    link->in.len = 0;
    if (link->stream == NOTHING || link->held) /* a held one goes out on a new connection */
        return 0;
    load->streams[link->stream].last_ns = load->now_ns;
    load->open--;
    return begin(load, i, err);
}

/* ---- the run ---- */

static bool over(const struct load *load)
{
    const struct load_run *run = load->run;

    if (run->until != SIZE_MAX && load->streams[run->until].complete)
        return true;
    return !load->open && load->next == load->n;
}

static int turn(struct load *load, struct error *err)
{
    struct epoll_event events[64];
    uint64_t limit = load->run->timeout_ns ? load->run->timeout_ns : UINT64_C(120000000000);
    int n = epoll_wait(load->epoll, events, ARRAY_LEN(events), (int)(limit / 1000000)), r = 0;

    if (cli_interrupted)
        return error_set(err, ECANCELED, "interrupted");
    if (n < 0)
        return errno == EINTR ? 0 : error_sys(err, errno, "epoll");
    if (!n)
        return error_set(err, ETIMEDOUT, "nothing came from the gateway for %llu s",
                         (unsigned long long)(limit / 1000000000));
    for (int i = 0; i < n && r == 0; i++)
        r = on_readable(load, events[i].data.u64, err);
    if (r == 0 && !load->told && load->run->at_events && load->events >= load->run->at_events) {
        load->told = true;
        load->run->at(load->run->ctx);
    }
    return r == 0 && load->n_held ? send_held(load, err) : r;
}

int load_run(const struct load_run *run, struct load_stream *streams, size_t n, struct error *err)
{
    struct load load = {.run = run, .streams = streams, .n = n, .start_ns = clock_ns()};
    size_t links = MIN(MAX(run->connections, 1u), n);
    int r = 0;

    load.n_links = links;
    load.links = x_alloc((links + 1) * sizeof *load.links);
    load.epoll = epoll_create1(EPOLL_CLOEXEC);
    if (load.epoll < 0)
        r = error_sys(err, errno, "epoll");
    for (size_t i = 0; i < links; i++)
        load.links[i] = (struct link){.fd = -1, .stream = NOTHING};
    for (size_t i = 0; i < links && r == 0; i++)
        r = begin(&load, i, err);
    while (r == 0 && !over(&load))
        r = turn(&load, err);
    for (size_t i = 0; i < links; i++) {
        fd_close(load.links[i].fd);
        buffer_free(&load.links[i].in);
        buffer_free(&load.links[i].line);
    }
    fd_close(load.epoll);
    free(load.links);
    return r;
}
