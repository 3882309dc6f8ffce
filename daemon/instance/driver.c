/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/instance/driver.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"
#include "daemon/instance/grammars.h"
#include "daemon/instance/run_step.h"

void drivers_init(struct drivers *drivers)
{
    for (int i = 0; i < DRIVER_CONNECTIONS; i++)
        drivers->connections[i].fd = -1;
}

static void drop(struct drivers *drivers, struct connection *c)
{
    bool was_driver = c->is_driver;

    c->fd = fd_close(c->fd);
    c->is_driver = false;
    frame_reader_free(&c->reader);
    if (!was_driver)
        return;
    grammars_reset(drivers->grammars);
    drivers->changed(drivers->ctx, false);
}

void drivers_free(struct drivers *drivers)
{
    for (int i = 0; i < DRIVER_CONNECTIONS; i++) {
        drivers->connections[i].is_driver = false; /* nobody is left to tell */
        drop(drivers, &drivers->connections[i]);
    }
}

void drivers_accept(struct drivers *drivers, int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd < 0)
        return;
    for (int i = 0; i < DRIVER_CONNECTIONS; i++) {
        struct connection *c = &drivers->connections[i];
        if (c->fd < 0) {
            *c = (struct connection){.fd = fd, .since = clock_ns()};
            return;
        }
    }
    fd_close(fd);
}

size_t drivers_poll(const struct drivers *drivers, struct pollfd *fds)
{
    size_t n = 0;

    for (int i = 0; i < DRIVER_CONNECTIONS; i++)
        if (drivers->connections[i].fd >= 0)
            fds[n++] = (struct pollfd){.fd = drivers->connections[i].fd, .events = POLLIN};
    return n;
}

static int send_frame(struct connection *c, Ember__V1__InstanceFrame *frame)
{
    return frame_send(c->fd, &frame->base, DRIVER_WRITE_MS);
}

/* Says why and drops the connection. */
static void refuse(struct drivers *drivers, struct connection *c, int errnum, const char *text)
{
    Ember__V1__StepResult fatal = EMBER__V1__STEP_RESULT__INIT;
    Ember__V1__InstanceFrame frame = EMBER__V1__INSTANCE_FRAME__INIT;

    fatal.error = errnum;
    fatal.error_text = (char *)text;
    frame.kind_case = EMBER__V1__INSTANCE_FRAME__KIND_FATAL;
    frame.fatal = &fatal;
    frame_send(c->fd, &frame.base, 0);
    drop(drivers, c);
}

static int welcome(struct drivers *drivers, struct connection *c)
{
    const struct model_info *info = engine_model(drivers->engine);
    struct engine_limits limits = engine_limits(drivers->engine);
    Ember__V1__Welcome welcome = EMBER__V1__WELCOME__INIT;
    Ember__V1__InstanceFrame frame = EMBER__V1__INSTANCE_FRAME__INIT;

    welcome.protocol = STEP_PROTOCOL;
    welcome.instance_id = (char *)drivers->instance_id;
    welcome.model = (char *)drivers->model;
    welcome.tokenizer_dir = (char *)engine_source_dir(drivers->engine);
    welcome.vocab_size = info->vocab_size;
    welcome.max_positions = info->max_positions;
    welcome.page_size = KV_PAGE_SIZE;
    welcome.pages = limits.pages;
    welcome.max_tokens = limits.max_tokens;
    welcome.max_seqs = limits.max_seqs;
    welcome.n_eos_ids = info->n_eos;
    welcome.eos_ids = (int32_t *)info->eos_ids;
    welcome.bos_id = info->bos_id;
    welcome.token_refs = true;
    welcome.joins = true;
    welcome.grammar_bytes = GRAMMARS_PROGRAMS_KEPT;
    frame.kind_case = EMBER__V1__INSTANCE_FRAME__KIND_WELCOME;
    frame.welcome = &welcome;
    return send_frame(c, &frame);
}

/* Equal tokens, in a time that does not depend on where they differ. */
static bool token_equal(const char *lease, const char *token)
{
    size_t n = strlen(lease);
    unsigned difference = 0;

    if (!n || strlen(token) != n)
        return false;
    for (size_t i = 0; i < n; i++)
        difference |= (unsigned char)(lease[i] ^ token[i]);
    return !difference;
}

static void hello(struct drivers *drivers, struct connection *c, const Ember__V1__Hello *hello)
{
    if (hello->protocol != STEP_PROTOCOL) {
        refuse(drivers, c, EPROTO, "this instance speaks step protocol 1");
        return;
    }
    if (!token_equal(drivers->lease, hello->lease_token))
        drivers->refresh(drivers->ctx);
    if (!token_equal(drivers->lease, hello->lease_token)) {
        refuse(drivers, c, EACCES, "the token is not that of this instance's lease");
        return;
    }
    for (int i = 0; i < DRIVER_CONNECTIONS; i++)
        if (&drivers->connections[i] != c && drivers->connections[i].is_driver)
            drop(drivers, &drivers->connections[i]);
    c->is_driver = true;
    drivers->changed(drivers->ctx, true);
    if (welcome(drivers, c) < 0)
        drop(drivers, c);
}

struct reply {
    struct connection *connection;
    int result;
};

static void reply(void *ctx, const Ember__V1__StepResult *result)
{
    struct reply *r = ctx;
    Ember__V1__InstanceFrame frame = EMBER__V1__INSTANCE_FRAME__INIT;

    if (r->result < 0)
        return;
    frame.kind_case = EMBER__V1__INSTANCE_FRAME__KIND_RESULT;
    frame.result = (Ember__V1__StepResult *)result;
    r->result = send_frame(r->connection, &frame);
}

/*
 * Unpacked, a frame of empty submessages takes 80 times its bytes. What a sound step needs is four
 * bytes for each of one (tokens and pages, packed) and a little.
 */
#define UNPACKED_PER_BYTE 4
#define UNPACKED_EXTRA (1u << 20)

struct allowance {
    size_t left; /* counts what is asked for: nothing is freed before the message */
};

static void *allowed_alloc(void *data, size_t size)
{
    struct allowance *a = data;

    if (size > a->left)
        return NULL;
    a->left -= size;
    return malloc(size);
}

static void allowed_free(void *data, void *pointer)
{
    free(pointer);
}

static Ember__V1__DriverFrame *unpack(const uint8_t *data, size_t len)
{
    struct allowance allowance = {len * UNPACKED_PER_BYTE + UNPACKED_EXTRA};
    ProtobufCAllocator allocator = {allowed_alloc, allowed_free, &allowance};

    return ember__v1__driver_frame__unpack(&allocator, len, data);
}

/*
 * The steps behind the first that join it and have arrived by now; the frame behind them stays.
 * What goes wrong shows when that is read.
 */
static size_t gather(struct connection *c, Ember__V1__DriverFrame **frames)
{
    const uint8_t *data;
    size_t n = 1, len;

    frame_fill(&c->reader, c->fd);
    while (n < RUN_STEPS_MAX && frame_next(&c->reader, &data, &len) == 0) {
        frames[n] = unpack(data, len);
        if (!frames[n] || frames[n]->kind_case != EMBER__V1__DRIVER_FRAME__KIND_STEP ||
            !frames[n]->step->joins) {
            ember__v1__driver_frame__free_unpacked(frames[n], NULL);
            frame_unread(&c->reader);
            break;
        }
        n++;
    }
    return n;
}

/* `first` is the caller's. */
static void take_step(struct drivers *drivers, struct connection *c, Ember__V1__DriverFrame *first)
{
    Ember__V1__DriverFrame *frames[RUN_STEPS_MAX] = {first};
    Ember__V1__Step *steps[RUN_STEPS_MAX];
    struct reply r = {.connection = c};
    size_t n = gather(c, frames);

    for (size_t i = 0; i < n; i++)
        steps[i] = frames[i]->step;
    run_steps(drivers->engine, drivers->grammars, steps, n, reply, &r);
    for (size_t i = 1; i < n; i++)
        ember__v1__driver_frame__free_unpacked(frames[i], NULL);
    if (r.result == 0)
        return;
    log_warn("driver dropped", "instance=%s reason=\"%s\"", drivers->instance_id,
             strerror(-r.result));
    drop(drivers, c);
}

static void dispatch(struct drivers *drivers, struct connection *c, const uint8_t *data, size_t len)
{
    Ember__V1__DriverFrame *frame = unpack(data, len);

    if (!frame) {
        refuse(drivers, c, EBADMSG,
               "the frame is not a DriverFrame, or not of a step that could be run");
    } else if (frame->kind_case == EMBER__V1__DRIVER_FRAME__KIND_HELLO && !c->is_driver) {
        hello(drivers, c, frame->hello);
    } else if (frame->kind_case == EMBER__V1__DRIVER_FRAME__KIND_STEP && c->is_driver) {
        take_step(drivers, c, frame);
    } else if (frame->kind_case == EMBER__V1__DRIVER_FRAME__KIND_GRAMMAR && c->is_driver) {
        struct error err = {0};
        if (grammars_define(drivers->grammars, frame->grammar, &err) < 0)
            refuse(drivers, c, -err.code, error_text(&err));
    } else {
        refuse(drivers, c, EPROTO, "expected Hello first, and once");
    }
    if (frame)
        ember__v1__driver_frame__free_unpacked(frame, NULL);
}

/* Serves one frame that has been read whole. 1: there is none. -errno: the connection is dropped.
 */
static int serve_one(struct drivers *drivers, struct connection *c)
{
    const uint8_t *data;
    size_t len;

    int r = frame_next(&c->reader, &data, &len);
    if (r < 0) {
        refuse(drivers, c, EMSGSIZE, "a frame of 0 or more than 16 MiB");
        return r;
    }
    if (!c->is_driver && (r == 0 ? len : c->reader.bytes.len) > DRIVER_HELLO_BYTES) {
        refuse(drivers, c, EACCES, "a large frame before a Hello that was accepted");
        return -EACCES;
    }
    if (r == 0)
        dispatch(drivers, c, data, len);
    return r;
}

void drivers_serve(struct drivers *drivers, int fd)
{
    for (int i = 0; i < DRIVER_CONNECTIONS; i++) {
        struct connection *c = &drivers->connections[i];
        if (c->fd != fd)
            continue;
        if (serve_one(drivers, c) != 1)
            return;
        int r = frame_fill(&c->reader, fd);
        if (r < 0)
            drop(drivers, c);
        else if (r == 0)
            serve_one(drivers, c);
        return;
    }
}

bool drivers_pending(const struct drivers *drivers, int *ret_fd)
{
    for (int i = 0; i < DRIVER_CONNECTIONS; i++) {
        const struct connection *c = &drivers->connections[i];
        if (c->fd < 0 || c->reader.bytes.len < c->reader.consumed + 4)
            continue;
        const uint8_t *p = (const uint8_t *)c->reader.bytes.data + c->reader.consumed;
        uint64_t len = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        if (c->reader.bytes.len - c->reader.consumed - 4 >= len || len > STEP_FRAME_MAX) {
            *ret_fd = c->fd;
            return true;
        }
    }
    return false;
}

int drivers_expire(struct drivers *drivers)
{
    int next = -1;

    for (int i = 0; i < DRIVER_CONNECTIONS; i++) {
        struct connection *c = &drivers->connections[i];
        if (c->fd < 0 || c->is_driver)
            continue;
        int left = DRIVER_HELLO_MS - (int)((clock_ns() - c->since) / 1000000);
        if (left <= 0)
            drop(drivers, c);
        else if (next < 0 || left < next)
            next = left;
    }
    return next;
}

void drivers_end_lease(struct drivers *drivers)
{
    drivers->lease[0] = 0;
    for (int i = 0; i < DRIVER_CONNECTIONS; i++)
        if (drivers->connections[i].is_driver)
            drop(drivers, &drivers->connections[i]);
}
