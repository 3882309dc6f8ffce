/* SPDX-License-Identifier: Apache-2.0 */
/* Our client against our server, both on one loop, over a Unix socket. */
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/clock.h"
#include "echo_service.h"
#include "proto/grpc/client.h"

enum { MANY = 100000 };

struct world {
    struct event_base *base;
    struct grpc_server *server;
    struct grpc_client *client;
    struct echo echo;
    char path[64];
};

struct result {
    struct event_base *base;
    unsigned messages, done;
    size_t bytes;
    bool cancel_at_first;
    uint32_t last_index;
    enum grpc_status status;
    char text[256], reply[256];
};

static void on_message(struct grpc_client_call *call, const ProtobufCMessage *message, void *user)
{
    const echo_response *response = (const echo_response *)message;
    struct result *result = user;

    if (result->messages)
        assert_int_equal(response->index, result->last_index + 1);
    result->last_index = response->index;
    result->messages++;
    result->bytes += response->padding.len;
    snprintf(result->reply, sizeof result->reply, "%s", response->text);
    if (result->cancel_at_first)
        grpc_client_cancel(call);
}

static void on_done(struct grpc_client_call *call, enum grpc_status status, const char *text,
                    void *user)
{
    struct result *result = user;

    result->done++;
    result->status = status;
    snprintf(result->text, sizeof result->text, "%s", text);
    event_base_loopbreak(result->base);
}

static const struct grpc_client_callbacks callbacks = {on_message, on_done};

static void setup(struct world *w, const struct grpc_server_options *options)
{
    struct error err = {0};

    *w = (struct world){.base = event_base_new()};
    w->echo.base = w->base;
    snprintf(w->path, sizeof w->path, "/tmp/ember-test-grpc-%d", (int)getpid());
    assert_int_equal(grpc_server_new(w->base, options, &w->server, &err), 0);
    assert_int_equal(echo_register(&w->echo, w->server, &err), 0);
    assert_int_equal(grpc_server_listen_unix(w->server, w->path, 0600, &err), 0);
    assert_int_equal(grpc_client_new(w->base, w->path, 0, &w->client, &err), 0);
}

static void teardown(struct world *w)
{
    grpc_client_free(w->client);
    grpc_server_free(w->server);
    assert_int_equal(w->echo.held, 0);
    assert_int_equal(access(w->path, F_OK), -1);
    event_base_free(w->base);
}

static struct grpc_client_call *start(struct world *w, const char *method,
                                      const echo_request *request, uint64_t timeout_ms,
                                      struct result *result)
{
    struct grpc_client_call *call;
    struct error err = {0};
    char path[64];

    result->base = w->base;
    snprintf(path, sizeof path, "/ember.test.Echo/%s", method);
    int r =
        grpc_client_start(w->client, path, &request->base, &ember__test__echo_response__descriptor,
                          timeout_ms, &callbacks, result, &call, &err);
    assert_int_equal(r, 0);
    return call;
}

static void call(struct world *w, const char *method, const echo_request *request,
                 uint64_t timeout_ms, struct result *result)
{
    start(w, method, request, timeout_ms, result);
    while (!result->done)
        assert_int_equal(event_base_loop(w->base, EVLOOP_ONCE), 0);
    assert_int_equal(result->done, 1);
}

/* Runs the loop until the server holds no call, or two seconds are over. */
static void settle(struct world *w)
{
    uint64_t start_ns = clock_ns();

    while ((w->echo.held || grpc_server_stats(w->server).open_calls) &&
           clock_ms_since(start_ns) < 2000)
        event_base_loop(w->base, EVLOOP_NONBLOCK);
    assert_int_equal(w->echo.held, 0);
    assert_int_equal(grpc_server_stats(w->server).open_calls, 0);
    assert_int_equal(grpc_server_stats(w->server).held, 0);
}

static void test_unary(void **state)
{
    echo_request request = EMBER__TEST__ECHO_REQUEST__INIT;
    struct result ok = {0}, fails = {0}, missing = {0}, large = {0}, larger = {0};
    struct world w;

    setup(&w, NULL);
    request.text = (char *)"hello % \xc3\xa4";
    call(&w, "Echo", &request, 1000, &ok);
    assert_int_equal(ok.status, GRPC_OK);
    assert_int_equal(ok.messages, 1);
    assert_string_equal(ok.reply, request.text);

    request.status = GRPC_FAILED_PRECONDITION;
    call(&w, "Echo", &request, 0, &fails);
    assert_int_equal(fails.status, GRPC_FAILED_PRECONDITION);
    assert_string_equal(fails.text, request.text);
    call(&w, "Missing", &request, 0, &missing);
    assert_int_equal(missing.status, GRPC_UNIMPLEMENTED);

    request.status = 0;
    request.size = 4 << 20; /* more than a message may be */
    call(&w, "Echo", &request, 0, &large);
    assert_int_equal(large.status, GRPC_RESOURCE_EXHAUSTED);
    request.size = (4 << 20) - 100;
    call(&w, "Echo", &request, 0, &larger);
    assert_int_equal(larger.status, GRPC_OK);
    assert_int_equal(larger.bytes, request.size);
    settle(&w);
    teardown(&w);
}

static void test_deadline_and_cancel(void **state)
{
    echo_request request = EMBER__TEST__ECHO_REQUEST__INIT;
    struct result late = {0}, gone = {0}, first = {.cancel_at_first = true};
    struct world w;

    setup(&w, NULL);
    uint64_t start_ns = clock_ns();
    call(&w, "Hang", &request, 50, &late);
    assert_int_equal(late.status, GRPC_DEADLINE_EXCEEDED);
    assert_true(clock_ms_since(start_ns) >= 45 && clock_ms_since(start_ns) < 1000);
    settle(&w);
    assert_int_equal(w.echo.cancelled, 1);

    struct grpc_client_call *c = start(&w, "Hang", &request, 0, &gone);
    while (!w.echo.held)
        event_base_loop(w.base, EVLOOP_ONCE);
    grpc_client_cancel(c);
    assert_int_equal(gone.done, 0); /* never from inside */
    while (!gone.done)
        event_base_loop(w.base, EVLOOP_ONCE);
    assert_int_equal(gone.status, GRPC_CANCELLED);
    settle(&w);
    assert_int_equal(w.echo.cancelled, 2);

    request.count = 1000;
    call(&w, "Count", &request, 0, &first);
    assert_int_equal(first.messages, 1);
    assert_int_equal(first.status, GRPC_CANCELLED);
    settle(&w);
    teardown(&w);
}

static void test_stream(void **state)
{
    echo_request request = EMBER__TEST__ECHO_REQUEST__INIT;
    struct result all = {0}, slow = {0};
    struct grpc_server_options options = {.max_queued = 256 * 1024};
    struct world w;

    setup(&w, &options);
    request.count = 20000;
    request.size = 1000;
    request.paced = true;
    call(&w, "Count", &request, 0, &all);
    assert_int_equal(all.status, GRPC_OK);
    assert_int_equal(all.messages, 20000);
    assert_int_equal(all.bytes, 20000000);

    /* One turn of the handler produces far more than may wait for a reader. */
    request.paced = false;
    call(&w, "Count", &request, 0, &slow);
    assert_int_equal(slow.status, GRPC_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(slow.text, "slowly"));
    assert_true(slow.messages < 20000);
    settle(&w);
    assert_int_equal(w.echo.overruns, 1);
    assert_int_equal(w.echo.cancelled, 1);
    teardown(&w);
}

/* One connection, one call after the other: nothing may be left of any. */
static void test_many(void **state)
{
    echo_request request = EMBER__TEST__ECHO_REQUEST__INIT;
    struct world w;
    size_t before = 0;

    setup(&w, NULL);
    request.text = (char *)"again";
    uint64_t start_ns = clock_ns();
    for (int i = 0; i < MANY; i++) {
        struct result result = {0};
        call(&w, "Echo", &request, 0, &result);
        assert_int_equal(result.status, GRPC_OK);
        if (i == 1000)
            before = mallinfo2().uordblks;
    }
    print_message("%.1f us a call, client and server on one thread\n",
                  clock_ms_since(start_ns) * 1000 / MANY);
    settle(&w);
    assert_true(mallinfo2().uordblks < before + 64 * 1024);
    assert_int_equal(grpc_server_stats(w.server).calls, MANY);
    assert_int_equal(grpc_server_stats(w.server).connections, 1);
    teardown(&w);
}

static void test_server_restarts(void **state)
{
    echo_request request = EMBER__TEST__ECHO_REQUEST__INIT;
    struct result lost = {0}, again = {0};
    struct error err = {0};
    struct world w;

    setup(&w, NULL);
    start(&w, "Hang", &request, 0, &lost);
    while (!w.echo.held)
        event_base_loop(w.base, EVLOOP_ONCE);
    grpc_server_free(w.server);
    assert_int_equal(w.echo.cancelled, 1);
    while (!lost.done)
        event_base_loop(w.base, EVLOOP_ONCE);
    assert_int_equal(lost.status, GRPC_UNAVAILABLE);
    assert_int_equal(grpc_client_connect(w.client, &err), -ENOENT);
    assert_non_null(strstr(err.text, w.path));

    assert_int_equal(grpc_server_new(w.base, NULL, &w.server, &err), 0);
    assert_int_equal(echo_register(&w.echo, w.server, &err), 0);
    assert_int_equal(grpc_server_listen_unix(w.server, w.path, 0600, &err), 0);
    call(&w, "Echo", &request, 0, &again);
    assert_int_equal(again.status, GRPC_OK);
    teardown(&w);
}

static void on_shut(void *user)
{
    *(bool *)user = true;
}

static void test_shutdown(void **state)
{
    echo_request request = EMBER__TEST__ECHO_REQUEST__INIT;
    struct result finishes = {0}, hangs = {0};
    struct world w;
    bool shut = false;

    setup(&w, NULL);
    request.delay_ms = 30;
    start(&w, "Echo", &request, 0, &finishes);
    start(&w, "Hang", &request, 0, &hangs);
    while (w.echo.held < 2)
        event_base_loop(w.base, EVLOOP_ONCE);
    grpc_server_shutdown(w.server, 100, on_shut, &shut);
    while (!shut || !hangs.done || !finishes.done)
        assert_int_equal(event_base_loop(w.base, EVLOOP_ONCE), 0);
    assert_int_equal(finishes.status, GRPC_OK);
    assert_int_equal(hangs.status, GRPC_UNAVAILABLE);
    assert_int_equal(grpc_server_stats(w.server).open_connections, 0);
    teardown(&w);
}

static void test_stale_and_busy_socket(void **state)
{
    struct grpc_server *second;
    struct error err = {0};
    struct world w;

    setup(&w, NULL);
    assert_int_equal(grpc_server_new(w.base, NULL, &second, &err), 0);
    assert_int_equal(grpc_server_listen_unix(second, w.path, 0600, &err), -EADDRINUSE);
    assert_int_equal(grpc_server_listen_tcp(second, "0.0.0.0", 0, NULL, &err), -EACCES);
    grpc_server_free(second);

    /* a process that was killed leaves its socket file behind */
    char path[80];
    snprintf(path, sizeof path, "%s-stale", w.path);
    pid_t pid = fork();
    if (pid == 0) {
        struct grpc_server *dying;
        grpc_server_new(event_base_new(), NULL, &dying, NULL);
        _exit(grpc_server_listen_unix(dying, path, 0600, NULL) < 0);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_int_equal(access(path, F_OK), 0);
    assert_int_equal(grpc_server_listen_unix(w.server, path, 0600, &err), 0);

    /* a file of another kind is somebody's: it refuses connections as a stale socket does */
    char file[80];
    snprintf(file, sizeof file, "%s-file", w.path);
    assert_true(close(open(file, O_WRONLY | O_CREAT | O_CLOEXEC, 0600)) == 0);
    assert_int_equal(grpc_server_listen_unix(w.server, file, 0600, &err), -EADDRINUSE);
    assert_int_equal(unlink(file), 0);
    teardown(&w);
    assert_int_equal(access(path, F_OK), -1);
}

static bool admit_nobody(const struct ucred *peer, void *user)
{
    *(struct ucred *)user = *peer;
    return false;
}

static void test_refused_peer(void **state)
{
    echo_request request = EMBER__TEST__ECHO_REQUEST__INIT;
    struct ucred seen = {0};
    struct grpc_server_options options = {.admit = admit_nobody, .admit_user = &seen};
    struct result result = {0};
    struct world w;

    setup(&w, &options);
    call(&w, "Echo", &request, 0, &result);
    assert_int_equal(result.status, GRPC_UNAVAILABLE);
    assert_int_equal(seen.pid, getpid());
    assert_int_equal(seen.uid, geteuid());
    assert_int_equal(grpc_server_stats(w.server).refused, 1);
    teardown(&w);
}

/* The blocking helpers, against a server in another process. */

static pid_t serve(const char *path)
{
    int ready[2];
    char byte;

    assert_int_equal(pipe(ready), 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct event_base *base = event_base_new();
        struct echo echo = {.base = base};
        struct grpc_server *server;
        grpc_server_new(base, NULL, &server, NULL);
        echo_register(&echo, server, NULL);
        grpc_server_listen_unix(server, path, 0600, NULL);
        if (write(ready[1], "r", 1) == 1)
            event_base_dispatch(base);
        _exit(1);
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    close(ready[1]);
    return pid;
}

static int count_message(const ProtobufCMessage *response, void *user)
{
    return ++*(unsigned *)user == 500 ? 1 : 0;
}

static bool interrupted(void *user)
{
    return ++*(unsigned *)user >= 3;
}

static void test_sync(void **state)
{
    echo_request request = EMBER__TEST__ECHO_REQUEST__INIT;
    const ProtobufCMessageDescriptor *type = &ember__test__echo_response__descriptor;
    const char *echo = "/ember.test.Echo/Echo", *count = "/ember.test.Echo/Count";
    ProtobufCMessage *response = NULL;
    struct grpc_client *client;
    struct error err = {0};
    char path[64];

    snprintf(path, sizeof path, "/tmp/ember-test-sync-%d", (int)getpid());
    unlink(path);
    assert_int_equal(grpc_client_new(NULL, "nonsense", 0, &client, &err), -EINVAL);
    assert_int_equal(grpc_client_new(NULL, path, 0, &client, &err), 0);
    assert_int_equal(grpc_client_call_sync(client, echo, &request.base, type, 0, &response, &err),
                     -ENOENT);
    pid_t pid = serve(path);

    uint64_t start_ns = clock_ns();
    for (int i = 0; i < 2000; i++) {
        assert_int_equal(
            grpc_client_call_sync(client, echo, &request.base, type, 1000, &response, &err), 0);
        protobuf_c_message_free_unpacked(response, NULL);
    }
    print_message("%.1f us a round trip between processes\n", clock_ms_since(start_ns) / 2);

    request.status = GRPC_NOT_FOUND;
    request.text = (char *)"no such model";
    assert_int_equal(grpc_client_call_sync(client, echo, &request.base, type, 0, &response, &err),
                     -ENOENT);
    assert_string_equal(err.text, "no such model");
    assert_int_equal(grpc_client_last_status(client), GRPC_NOT_FOUND);
    request.status = 0;
    assert_int_equal(grpc_client_call_sync(client, "/ember.test.Echo/Hang", &request.base, type, 30,
                                           &response, &err),
                     -ETIMEDOUT);

    unsigned n = 0, polls = 0;
    struct grpc_client_stream stream = {.message = count_message, .user = &n};
    request.count = 400;
    assert_int_equal(grpc_client_stream_sync(client, count, &request.base, type, 0, &stream, &err),
                     0);
    assert_int_equal(n, 400);
    assert_int_equal(grpc_client_stream_sync(client, count, &request.base, type, 0, &stream, &err),
                     -ECANCELED);
    assert_int_equal(n, 500);
    grpc_client_on_interrupt(client, interrupted, &polls);
    assert_int_equal(grpc_client_stream_sync(client, "/ember.test.Echo/Hang", &request.base, type,
                                             0, &stream, &err),
                     -ECANCELED);
    assert_int_equal(polls, 3);
    assert_int_equal(grpc_client_call_sync(client, "/ember.test.Echo/Hang", &request.base, type, 0,
                                           &response, &err),
                     -ECANCELED);
    assert_int_equal(polls, 4);
    grpc_client_on_interrupt(client, NULL, NULL);

    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    assert_int_equal(grpc_client_call_sync(client, echo, &request.base, type, 0, &response, &err),
                     -EAGAIN);
    assert_int_equal(grpc_client_call_sync(client, echo, &request.base, type, 0, &response, &err),
                     -ECONNREFUSED);
    grpc_client_free(client);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unary),
        cmocka_unit_test(test_deadline_and_cancel),
        cmocka_unit_test(test_stream),
        cmocka_unit_test(test_many),
        cmocka_unit_test(test_server_restarts),
        cmocka_unit_test(test_shutdown),
        cmocka_unit_test(test_stale_and_busy_socket),
        cmocka_unit_test(test_refused_peer),
        cmocka_unit_test(test_sync),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
