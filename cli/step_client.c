/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/step_client.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/fd.h"
#include "cli/output.h"
#include "proto/step_frame.h"

#define HELLO_TIMEOUT_MS 10000

struct step_client {
    int fd;
    struct frame_reader reader;
    Ember__V1__InstanceFrame *welcome, *last;
};

void step_client_free(struct step_client *client)
{
    if (!client)
        return;
    fd_close(client->fd);
    frame_reader_free(&client->reader);
    if (client->welcome)
        ember__v1__instance_frame__free_unpacked(client->welcome, NULL);
    if (client->last)
        ember__v1__instance_frame__free_unpacked(client->last, NULL);
    free(client);
}

const Ember__V1__Welcome *step_client_welcome(const struct step_client *client)
{
    return client->welcome->welcome;
}

static int wait_readable(int fd, uint64_t until_ns, struct error *err)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};

    for (;;) {
        uint64_t now = clock_ns();
        if (now >= until_ns)
            return error_set(err, ETIMEDOUT, "the instance did not answer in time");
        int r = poll(&p, 1, (int)((until_ns - now) / 1000000 + 1));
        if (r > 0)
            return 0;
        if (cli_interrupted)
            return error_set(err, ECANCELED, "interrupted");
        if (r < 0 && errno != EINTR)
            return error_sys(err, errno, "instance's socket");
    }
}

static int receive(struct step_client *client, int timeout_ms, Ember__V1__InstanceFrame **ret,
                   struct error *err)
{
    uint64_t until = clock_ns() + (uint64_t)timeout_ms * 1000000;
    const uint8_t *data;
    size_t len;
    int r;

    while ((r = frame_next(&client->reader, &data, &len)) == 1) {
        r = wait_readable(client->fd, until, err);
        if (r < 0)
            return r;
        r = frame_fill(&client->reader, client->fd);
        if (r < 0)
            return error_set(err, r == -ECONNRESET ? EPIPE : -r, "the instance has gone");
    }
    if (r < 0)
        return error_set(err, EBADMSG, "the instance sent a frame that is too large");
    Ember__V1__InstanceFrame *frame = ember__v1__instance_frame__unpack(NULL, len, data);
    if (!frame)
        return error_set(err, EBADMSG, "the instance sent a malformed frame");
    if (frame->kind_case == EMBER__V1__INSTANCE_FRAME__KIND_FATAL) {
        r = error_set(err, frame->fatal->error > 0 ? frame->fatal->error : EPROTO,
                      "the instance refused: %s", frame->fatal->error_text);
        ember__v1__instance_frame__free_unpacked(frame, NULL);
        return r;
    }
    *ret = frame;
    return 0;
}

static int send_message(struct step_client *client, Ember__V1__DriverFrame *frame,
                        struct error *err)
{
    int r = frame_send(client->fd, &frame->base, HELLO_TIMEOUT_MS);
    return r < 0 ? error_sys(err, -r, "the instance does not take the step") : 0;
}

static int say_hello(struct step_client *client, const char *token, struct error *err)
{
    Ember__V1__Hello hello = EMBER__V1__HELLO__INIT;
    Ember__V1__DriverFrame frame = EMBER__V1__DRIVER_FRAME__INIT;

    hello.protocol = STEP_PROTOCOL;
    hello.lease_token = (char *)token;
    frame.kind_case = EMBER__V1__DRIVER_FRAME__KIND_HELLO;
    frame.hello = &hello;
    int r = send_message(client, &frame, err);
    if (r == 0)
        r = receive(client, HELLO_TIMEOUT_MS, &client->welcome, err);
    if (r == 0 && client->welcome->kind_case != EMBER__V1__INSTANCE_FRAME__KIND_WELCOME)
        r = error_set(err, EPROTO, "the instance did not say welcome");
    return r;
}

int step_client_open(const char *socket_path, const char *token, struct step_client **ret,
                     struct error *err)
{
    _cleanup_(step_client_freep) struct step_client *client = x_alloc(sizeof *client);
    int r = client->fd = fd_connect(socket_path, 0, err);

    if (r == -ENOENT || r == -ECONNREFUSED)
        return error_set(err, EPIPE, "%s: the instance has gone", socket_path);
    if (r >= 0)
        r = say_hello(client, token, err);
    if (r < 0)
        return r;
    *ret = TAKE(client);
    return 0;
}

int step_client_run(struct step_client *client, const Ember__V1__Step *step, int timeout_ms,
                    const Ember__V1__StepResult **ret_result, struct error *err)
{
    Ember__V1__DriverFrame frame = EMBER__V1__DRIVER_FRAME__INIT;

    if (client->last)
        ember__v1__instance_frame__free_unpacked(TAKE(client->last), NULL);
    frame.kind_case = EMBER__V1__DRIVER_FRAME__KIND_STEP;
    frame.step = (Ember__V1__Step *)step;
    int r = send_message(client, &frame, err);
    if (r == 0)
        r = receive(client, timeout_ms, &client->last, err);
    if (r < 0)
        return r;
    if (client->last->kind_case != EMBER__V1__INSTANCE_FRAME__KIND_RESULT)
        return error_set(err, EPROTO, "the instance answered a step with something else");
    const Ember__V1__StepResult *result = client->last->result;
    if (result->error)
        return error_set(err, result->error > 0 ? result->error : EPROTO, "step: %s",
                         result->error_text);
    *ret_result = result;
    return 0;
}
