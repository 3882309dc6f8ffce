/* SPDX-License-Identifier: Apache-2.0 */
/* The server against clients that do not keep to the protocol: bytes written by hand. */
#include <errno.h>
#include <nghttp2/nghttp2.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/mem.h"
#include "echo_service.h"

#define PREFACE "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#define SETTINGS "\0\0\0\4\0\0\0\0\0"
#define SETTINGS_ACK "\0\0\0\4\1\0\0\0\0"

enum { DATA = 0, HEADERS = 1, RST_STREAM = 3, PING = 6, GOAWAY = 7, STALL_MS = 150 };
enum { END_STREAM = 1, END_HEADERS = 4 };

struct world {
    struct event_base *base;
    struct grpc_server *server;
    struct echo echo;
    int fd;           /* our end of the connection */
    struct buffer in; /* what the server has sent */
    bool eof;
};

static void add_client(struct world *w)
{
    struct error err = {0};
    int pair[2];

    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
    assert_int_equal(grpc_server_add_connection(w->server, pair[1], &err), 0);
    w->fd = pair[0];
}

static void setup(struct world *w)
{
    struct grpc_server_options options = {
        .stall_ms = STALL_MS, .reset_budget = 50, .control_budget = 100, .max_message = 1000};
    struct error err = {0};

    *w = (struct world){.base = event_base_new()};
    w->echo.base = w->base;
    assert_int_equal(grpc_server_new(w->base, &options, &w->server, &err), 0);
    assert_int_equal(echo_register(&w->echo, w->server, &err), 0);
    add_client(w);
}

static void teardown(struct world *w)
{
    fd_close(w->fd);
    grpc_server_free(w->server);
    assert_int_equal(w->echo.held, 0);
    event_base_free(w->base);
    buffer_free(&w->in);
}

/* Lets the server work and collects what it answers, until it has been quiet. */
static void spin(struct world *w)
{
    char bytes[4096];

    for (int quiet = 0; quiet < 3; quiet++) {
        event_base_loop(w->base, EVLOOP_NONBLOCK);
        ssize_t n;
        while ((n = read(w->fd, bytes, sizeof bytes)) > 0) {
            buffer_append(&w->in, bytes, (size_t)n);
            quiet = 0;
        }
        w->eof |= n == 0 || (n < 0 && errno != EAGAIN);
    }
}

static void spin_ms(struct world *w, double ms)
{
    uint64_t start_ns = clock_ns();

    while (clock_ms_since(start_ns) < ms) {
        spin(w);
        usleep(1000);
    }
}

static void put(struct world *w, const void *bytes, size_t n)
{
    const char *p = bytes;

    while (n) {
        ssize_t done = send(w->fd, p, n, MSG_NOSIGNAL);
        if (done < 0 && errno != EAGAIN)
            return; /* the server has hung up */
        if (done > 0) {
            p += done;
            n -= (size_t)done;
        }
        if (n)
            spin(w);
    }
}

static void put_frame(struct world *w, uint8_t type, uint8_t flags, uint32_t stream,
                      const void *payload, size_t n)
{
    uint8_t header[9] = {(uint8_t)(n >> 16),
                         (uint8_t)(n >> 8),
                         (uint8_t)n,
                         type,
                         flags,
                         (uint8_t)(stream >> 24),
                         (uint8_t)(stream >> 16),
                         (uint8_t)(stream >> 8),
                         (uint8_t)stream};

    put(w, header, sizeof header);
    put(w, payload, n);
}

/* A HPACK literal without indexing (RFC 7541, 6.2.2), both strings raw. */
static void add_header(struct buffer *b, const char *name, const char *value)
{
    uint8_t name_len = (uint8_t)strlen(name), value_len = (uint8_t)strlen(value);

    assert_true(strlen(name) < 127 && strlen(value) < 127);
    buffer_append(b, "\0", 1);
    buffer_append(b, &name_len, 1);
    buffer_append(b, name, name_len);
    buffer_append(b, &value_len, 1);
    buffer_append(b, value, value_len);
}

static void put_headers(struct world *w, uint32_t stream, const char *verb, const char *method,
                        const char *type, uint8_t flags)
{
    _cleanup_(buffer_free) struct buffer b = {0};
    char path[100];

    snprintf(path, sizeof path, "/ember.test.Echo/%s", method);
    add_header(&b, ":method", verb);
    add_header(&b, ":scheme", "http");
    add_header(&b, ":path", path);
    add_header(&b, ":authority", "x");
    if (type)
        add_header(&b, "content-type", type);
    put_frame(w, HEADERS, END_HEADERS | flags, stream, b.data, b.len);
}

static void begin(struct world *w)
{
    put(w, PREFACE, 24);
    put(w, SETTINGS, 9);
    put(w, SETTINGS_ACK, 9);
}

/* The n-th frame of a type in what the server sent: its payload, or NULL. */
static const uint8_t *frame(const struct world *w, uint8_t type, unsigned nth, size_t *ret_len,
                            uint8_t *ret_flags)
{
    const uint8_t *p = (const uint8_t *)w->in.data, *end = p + w->in.len;

    while (end - p >= 9) {
        size_t len = (size_t)p[0] << 16 | (size_t)p[1] << 8 | p[2];
        assert_true(len <= (size_t)(end - p - 9));
        if (p[3] == type && nth-- == 0) {
            *ret_len = len;
            *ret_flags = p[4];
            return p + 9;
        }
        p += 9 + len;
    }
    return NULL;
}

static bool sent(const struct world *w, const char *text)
{
    return w->in.len && memmem(w->in.data, w->in.len, text, strlen(text));
}

/* The value of grpc-status in the last trailers is found by decoding them with nghttp2. */
static int last_status(const struct world *w, const char *want)
{
    nghttp2_hd_inflater *inflater;
    int value = -1;
    size_t len;
    uint8_t flags;

    assert_int_equal(nghttp2_hd_inflate_new(&inflater), 0);
    for (unsigned i = 0;; i++) {
        const uint8_t *block = frame(w, HEADERS, i, &len, &flags);
        if (!block)
            break;
        int inflated = 0;
        do {
            nghttp2_nv nv;
            ssize_t n = nghttp2_hd_inflate_hd2(inflater, &nv, &inflated, block, len, 1);
            assert_true(n >= 0);
            block += n;
            len -= (size_t)n;
            if (inflated & NGHTTP2_HD_INFLATE_EMIT && nv.namelen == strlen(want) &&
                !memcmp(nv.name, want, nv.namelen))
                value = atoi((const char *)nv.value);
        } while (!(inflated & NGHTTP2_HD_INFLATE_FINAL));
        nghttp2_hd_inflate_end_headers(inflater);
    }
    nghttp2_hd_inflate_del(inflater);
    return value;
}

/* The server is well when a call on a fresh connection is answered. */
static void check_alive(struct world *w)
{
    fd_close(w->fd);
    buffer_free(&w->in);
    w->eof = false;
    add_client(w);
    begin(w);
    put_headers(w, 1, "POST", "Echo", "application/grpc", 0);
    put_frame(w, DATA, END_STREAM, 1, "\0\0\0\0\4\x0a\2hi", 9);
    spin(w);
    assert_int_equal(last_status(w, "grpc-status"), 0);
    assert_true(sent(w, "hi"));
}

/* The request in frames of one byte each, written byte by byte. */
static void test_single_bytes(void **state)
{
    const char *message = "\0\0\0\0\4\x0a\2hi";
    struct world w;

    setup(&w);
    begin(&w);
    put_headers(&w, 1, "POST", "Echo", "application/grpc+proto", 0);
    for (size_t i = 0; i < 9; i++) {
        put_frame(&w, DATA, i == 8 ? END_STREAM : 0, 1, message + i, 1);
        spin(&w);
    }
    assert_int_equal(last_status(&w, "grpc-status"), 0);
    assert_true(sent(&w, "hi"));
    teardown(&w);
}

static void test_bodies(void **state)
{
    static const struct {
        const char *bytes;
        size_t n;
        int status;
    } cases[] = {
        {"\0\0\0\0\0", 5, GRPC_OK},                       /* an empty message is a message */
        {"", 0, GRPC_UNIMPLEMENTED},                      /* none */
        {"\0\0\0\0\0\0\0\0\0\0", 10, GRPC_UNIMPLEMENTED}, /* two in one frame */
        {"\0\0\0\0\4\x0a", 6, GRPC_INTERNAL},             /* cut short */
        {"\0\0\0", 3, GRPC_INTERNAL},                     /* in the header */
        {"\0\0\0\0\0garbage", 12, GRPC_INTERNAL},         /* behind the message */
        {"\0\0\0\x03\xe9", 5, GRPC_RESOURCE_EXHAUSTED},   /* 1,001 bytes, announced only */
        {"\0\xff\xff\xff\xff", 5, GRPC_RESOURCE_EXHAUSTED},
        {"\1\0\0\0\1x", 6, GRPC_INTERNAL},        /* compressed with nothing */
        {"\0\0\0\0\2\xff\xff", 7, GRPC_INTERNAL}, /* no protobuf */
    };

    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct world w;
        setup(&w);
        begin(&w);
        put_headers(&w, 1, "POST", "Echo", "application/grpc", 0);
        put_frame(&w, DATA, END_STREAM, 1, cases[i].bytes, cases[i].n);
        spin(&w);
        assert_int_equal(last_status(&w, "grpc-status"), cases[i].status);
        assert_int_equal(grpc_server_stats(w.server).held, 0);
        assert_int_equal(grpc_server_stats(w.server).open_calls, 0);
        teardown(&w);
    }
}

/* A client that leaves in the middle of a dialogue leaves nothing behind. */
static void test_leaves_dialogue(void **state)
{
    struct world w;

    setup(&w);
    begin(&w);
    put_headers(&w, 1, "POST", "Chat", "application/grpc", 0);
    put_frame(&w, DATA, 0, 1, "\0\0\0\0\4\x0a\2hi", 9);
    spin(&w);
    assert_true(sent(&w, "hi"));
    assert_int_equal(grpc_server_stats(w.server).open_calls, 1);
    fd_close(w.fd);
    w.fd = -1;
    for (int i = 0; i < 3; i++)
        event_base_loop(w.base, EVLOOP_NONBLOCK);
    assert_int_equal(grpc_server_stats(w.server).open_calls, 0);
    assert_int_equal(grpc_server_stats(w.server).cancelled, 1);
    teardown(&w); /* what it had left would be the leak checker's */
}

static void test_http_errors(void **state)
{
    struct world w;

    setup(&w);
    begin(&w);
    put_headers(&w, 1, "POST", "Echo", "application/json", END_STREAM);
    spin(&w);
    assert_int_equal(last_status(&w, ":status"), 415);
    put_headers(&w, 3, "POST", "Echo", NULL, END_STREAM);
    spin(&w);
    assert_int_equal(last_status(&w, ":status"), 415);
    put_headers(&w, 5, "GET", "Echo", "application/grpc", END_STREAM);
    spin(&w);
    assert_int_equal(last_status(&w, ":status"), 405);
    put_headers(&w, 7, "POST", "Nothing", "application/grpc", END_STREAM);
    spin(&w);
    assert_int_equal(last_status(&w, "grpc-status"), GRPC_UNIMPLEMENTED);
    assert_false(w.eof);
    teardown(&w);
}

static void test_garbage(void **state)
{
    char junk[3000];
    struct world w;

    setup(&w);
    put(&w, "GET / HTTP/1.1\r\nHost: x\r\n\r\n", 27);
    spin(&w);
    assert_true(w.eof);
    assert_int_equal(grpc_server_stats(w.server).open_connections, 0);
    check_alive(&w);

    for (size_t i = 0; i < sizeof junk; i++)
        junk[i] = (char)(i * 7919 >> 3);
    fd_close(w.fd);
    add_client(&w);
    begin(&w);
    put(&w, junk, sizeof junk);
    spin_ms(&w, STALL_MS * 2);
    assert_true(w.eof);
    check_alive(&w);
    teardown(&w);
}

/* Nothing at all, half a preface, half a frame header, half a payload, headers without an end. */
static void test_stalls(void **state)
{
    static const struct {
        const char *bytes;
        size_t n;
        bool begun;
    } cases[] = {
        {"", 0, false},
        {PREFACE, 10, false},
        {PREFACE, 24, false},
        {"\0\0\x08\6", 4, true},
        {"\0\0\x08\6\0\0\0\0\0abc", 12, true},
        {"\0\0\1\1\0\0\0\0\1\x83", 10, true},
    };

    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct world w;
        setup(&w);
        if (cases[i].begun)
            begin(&w);
        put(&w, cases[i].bytes, cases[i].n);
        spin_ms(&w, STALL_MS * 0.4);
        assert_false(w.eof);
        spin_ms(&w, STALL_MS * 1.5);
        assert_true(w.eof);
        check_alive(&w);
        teardown(&w);
    }
}

static void test_idle_may_stay(void **state)
{
    struct world w;

    setup(&w);
    begin(&w);
    spin_ms(&w, STALL_MS * 2);
    assert_false(w.eof);
    put_frame(&w, PING, 0, 0, "12345678", 8);
    spin(&w);
    size_t len;
    uint8_t flags;
    const uint8_t *pong = frame(&w, PING, 0, &len, &flags);
    assert_non_null(pong);
    assert_int_equal(flags, 1);
    assert_memory_equal(pong, "12345678", 8);
    teardown(&w);
}

static void expect_calm(struct world *w)
{
    size_t len;
    uint8_t flags;

    spin_ms(w, STALL_MS * 2);
    const uint8_t *goaway = frame(w, GOAWAY, 0, &len, &flags);
    assert_non_null(goaway);
    assert_int_equal(goaway[7], NGHTTP2_ENHANCE_YOUR_CALM);
    assert_true(w->eof);
    assert_int_equal(grpc_server_stats(w->server).open_calls, 0);
    check_alive(w);
}

static void test_rapid_reset(void **state)
{
    struct world w;

    setup(&w);
    begin(&w);
    for (uint32_t i = 0; i < 200; i++) {
        put_headers(&w, 2 * i + 1, "POST", "Hang", "application/grpc", 0);
        put_frame(&w, RST_STREAM, 0, 2 * i + 1, "\0\0\0\x08", 4);
    }
    expect_calm(&w);
    teardown(&w);
}

static void test_ping_flood(void **state)
{
    struct world w;

    setup(&w);
    begin(&w);
    for (int i = 0; i < 300; i++)
        put_frame(&w, PING, 0, 0, "12345678", 8);
    expect_calm(&w);
    teardown(&w);
}

/* 10^5 streams on one connection, none of which ever sends its message. */
static void test_streams_without_end(void **state)
{
    struct world w;

    setup(&w);
    begin(&w);
    for (uint32_t i = 0; i < 100000 && !w.eof; i++) {
        put_headers(&w, 2 * i + 1, "POST", "Echo", "application/grpc", 0);
        if (i % 64 == 0)
            spin(&w);
        assert_true(grpc_server_stats(w.server).open_calls <= 256);
    }
    spin_ms(&w, STALL_MS * 2);
    assert_true(w.eof);
    check_alive(&w);
    teardown(&w);
}

/* Accepting pauses when descriptors run out, without spinning, and goes on when there are some. */
static void test_out_of_descriptors(void **state)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct rlimit before, tight;
    struct error err = {0};
    struct world w;

    setup(&w);
    snprintf(address.sun_path, sizeof address.sun_path, "/tmp/ember-test-fds-%d", (int)getpid());
    assert_int_equal(grpc_server_listen_unix(w.server, address.sun_path, 0600, &err), 0);
    while (grpc_server_stats(w.server).open_connections) /* its descriptor would be room later */
        spin_ms(&w, 20);
    int client = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_int_equal(connect(client, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    tight = before;
    tight.rlim_cur = (rlim_t)client + 1;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &tight), 0);
    unsigned turns = 0;
    uint64_t start_ns = clock_ns();
    while (clock_ms_since(start_ns) < 250) {
        event_base_loop(w.base, EVLOOP_ONCE);
        turns++;
    }
    assert_true(turns < 20);
    assert_int_equal(grpc_server_stats(w.server).connections, 1); /* not accepted yet */
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    spin_ms(&w, 200);
    assert_int_equal(grpc_server_stats(w.server).connections, 2);
    fd_close(client);
    teardown(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_single_bytes),
        cmocka_unit_test(test_bodies),
        cmocka_unit_test(test_leaves_dialogue),
        cmocka_unit_test(test_http_errors),
        cmocka_unit_test(test_garbage),
        cmocka_unit_test(test_stalls),
        cmocka_unit_test(test_idle_may_stay),
        cmocka_unit_test(test_rapid_reset),
        cmocka_unit_test(test_ping_flood),
        cmocka_unit_test(test_streams_without_end),
        cmocka_unit_test(test_out_of_descriptors),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
