/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/conn.h"

#include <errno.h>
#include <event2/buffer.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"
#include "daemon/gateway/request.h"
#include "ember/v1/step.pb-c.h"

void conn_fail(struct conn *conn, bool died, const char *format, ...)
{
    va_list ap;

    gw_pump(conn->model->gw);
    if (conn->failed)
        return;
    conn->failed = true;
    conn->died = died;
    va_start(ap, format);
    vsnprintf(conn->why, sizeof conn->why, format, ap);
    va_end(ap);
}

/* ---- out ---- */

/* At once where the socket takes it: through libevent each frame would cost two changes of epoll.
 */
static void send_bytes(struct conn *conn, const uint8_t *bytes, size_t len)
{
    struct evbuffer *out = bufferevent_get_output(conn->bev);

    if (!evbuffer_get_length(out)) {
        ssize_t n = send(bufferevent_getfd(conn->bev), bytes, len, MSG_DONTWAIT | MSG_NOSIGNAL);
        bytes += MAX(n, 0);
        len -= (size_t)MAX(n, 0);
    }
    if (len && evbuffer_add(out, bytes, len) < 0)
        conn_fail(conn, false, "no memory for a step");
}

/* There is one loop and one frame is built at a time: the memory is kept. */
static void send_frame(struct conn *conn, const Ember__V1__DriverFrame *frame)
{
    static struct buffer packed;
    size_t len = ember__v1__driver_frame__get_packed_size(frame);

    packed.len = 0;
    if (len > STEP_FRAME_MAX || buffer_reserve(&packed, len + 4) < 0) {
        conn_fail(conn, false, "a step of %zu bytes cannot be sent", len);
        return;
    }
    uint8_t *p = (uint8_t *)packed.data;
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(len >> (8 * i));
    ember__v1__driver_frame__pack(frame, p + 4);
    send_bytes(conn, p, len + 4);
}

static void hello(struct conn *conn)
{
    Ember__V1__Hello message = EMBER__V1__HELLO__INIT;
    Ember__V1__DriverFrame frame = EMBER__V1__DRIVER_FRAME__INIT;

    message.protocol = STEP_PROTOCOL;
    message.lease_token = conn->token;
    frame.kind_case = EMBER__V1__DRIVER_FRAME__KIND_HELLO;
    frame.hello = &message;
    send_frame(conn, &frame);
}

/* ---- grammars ---- */

#define GRAMMARS_MAX 256
#define UNFOLLOWED_MAX 4096

void conn_unfollow(struct gw_model *model, uint64_t sequence)
{
    struct conn *conn;

    TAILQ_FOREACH(conn, &model->conns, link)
    {
        if (!conn->unfollowed)
            conn->unfollowed = x_alloc(UNFOLLOWED_MAX * sizeof *conn->unfollowed);
        if (conn->n_unfollowed < UNFOLLOWED_MAX) /* beyond, it finds out by itself */
            conn->unfollowed[conn->n_unfollowed++] = sequence;
    }
}

static void send_grammar(struct conn *conn, const struct compiled *grammar, bool forget)
{
    Ember__V1__Grammar message = EMBER__V1__GRAMMAR__INIT;
    Ember__V1__DriverFrame frame = EMBER__V1__DRIVER_FRAME__INIT;

    message.id = grammar->id;
    if (!forget)
        message.program = (ProtobufCBinaryData){grammar->len, grammar->program};
    frame.kind_case = EMBER__V1__DRIVER_FRAME__KIND_GRAMMAR;
    frame.grammar = &message;
    send_frame(conn, &frame);
}

/*
 * Those used longest ago make room, but for those of the step that is being built: for one step
 * there may be more than there is room for.
 */
static void make_grammar_room(struct conn *conn, size_t len)
{
    while (conn->n_grammars > conn->n_pinned &&
           (conn->n_grammars >= GRAMMARS_MAX || conn->grammar_bytes + len > conn->grammar_room)) {
        struct compiled *old = conn->grammars[--conn->n_grammars];
        send_grammar(conn, old, true);
        conn->grammar_bytes -= old->len;
        compiled_unref(old);
    }
}

/* The one used last comes to the front. */
static void define_grammar(struct conn *conn, struct compiled *grammar)
{
    size_t at = 0;

    while (at < conn->n_grammars && conn->grammars[at] != grammar)
        at++;
    if (at == conn->n_grammars) {
        make_grammar_room(conn, grammar->len);
        if (conn->n_grammars == conn->cap_grammars) {
            conn->cap_grammars = MAX(64, 2 * conn->cap_grammars);
            conn->grammars = x_realloc(conn->grammars, conn->cap_grammars * sizeof *conn->grammars);
        }
        send_grammar(conn, grammar, false);
        conn->grammar_bytes += grammar->len;
        conn->grammars[conn->n_grammars] = compiled_ref(grammar);
        at = conn->n_grammars++;
    }
    conn->n_pinned += at >= conn->n_pinned;
    memmove(conn->grammars + 1, conn->grammars, at * sizeof *conn->grammars);
    conn->grammars[0] = grammar;
}

/* A sequence that samples under a grammar: at its first such step here, all that came before. */
static void follow_grammar(struct conn *conn, const struct sched_seq *from,
                           Ember__V1__SequenceStep *to)
{
    const struct gw_part *part = from->user;
    struct gw_job *job = part->job;
    struct choice *choice = &job->choices[part->index * job->api.n + from->choice];

    to->grammar = job->grammar->id;
    to->ends = job->suppress;
    to->n_ends = job->n_suppress;
    if (choice->followed == from->id)
        return;
    if (choice->followed)
        conn_unfollow(conn->model, choice->followed);
    choice->followed = from->id;
    if (conn->grammar_room < job->grammar->len) {
        conn_fail(conn, false, "it takes no grammars of %zu bytes", job->grammar->len);
        return;
    }
    define_grammar(conn, job->grammar);
    to->generated = (uint32_t *)from->known + from->prompt_len;
    to->n_generated = from->n_known - from->prompt_len;
}

/* Messages of one step; kept and grown, since there is one loop and one step is built at a time. */
static struct {
    Ember__V1__SequenceStep *seqs, **list;
    Ember__V1__Sampling *sampling;
    uint32_t room;
} scratch;

static bool make_room(uint32_t n)
{
    if (scratch.room >= n)
        return true;
    n = MAX(n, 2 * scratch.room);
    free(scratch.seqs);
    free(scratch.list);
    free(scratch.sampling);
    scratch.seqs = mem_alloc(n, sizeof *scratch.seqs);
    scratch.list = mem_alloc(n, sizeof *scratch.list);
    scratch.sampling = mem_alloc(n, sizeof *scratch.sampling);
    scratch.room = scratch.seqs && scratch.list && scratch.sampling ? n : 0;
    return scratch.room;
}

static bool needs_history(const Ember__V1__Sampling *s)
{
    return s->n_bad_lens || (s->repetition_penalty != 0 && s->repetition_penalty != 1) ||
           s->frequency_penalty != 0 || s->presence_penalty != 0;
}

/*
 * Each choice draws its own numbers, the same whatever else runs: mixed as splitmix64 does. Those
 * of several prompts too, unless the client has given the seed: then each is as it is alone.
 */
static uint64_t choice_seed(const struct gw_part *part, uint64_t seed, uint32_t choice)
{
    const struct api_request *api = &part->job->api;
    uint64_t z = (choice + (api->seeded ? 0 : (uint64_t)part->index * api->n)) *
                 UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return seed ^ (z ^ (z >> 31));
}

/* The tokens behind this chunk's, as far as the prompt knows them. */
static void add_targets(const struct sched_seq *from, Ember__V1__SequenceStep *to)
{
    uint32_t next = from->position + 1;

    to->prompt_logprobs = true;
    if (next >= from->prompt_len || next > from->n_known)
        return;
    to->targets = (uint32_t *)from->known + next;
    to->n_targets = MIN(from->n_tokens, MIN(from->prompt_len, from->n_known) - next);
}

static void fill(struct conn *conn, const struct sched_seq *from, Ember__V1__Sampling *sampling,
                 Ember__V1__SequenceStep *to)
{
    const struct gw_part *part = from->user;
    const struct gw_job *job = part->job;

    ember__v1__sequence_step__init(to);
    to->id = from->id;
    to->n_tokens = from->n_tokens;
    to->tokens = (uint32_t *)from->tokens;
    to->position = from->position;
    to->prompt_len = from->prompt_len;
    to->n_pages = from->n_pages;
    to->pages = (uint32_t *)from->pages;
    to->sample = from->sample;
    to->sample_index = from->sample_index;
    to->token_from_previous = from->token_from_previous;
    if (from->prompt_logprobs)
        add_targets(from, to);
    if (!from->sample && !from->prompt_logprobs)
        return;
    *sampling = *(const Ember__V1__Sampling *)from->sampling;
    sampling->seed = choice_seed(part, sampling->seed, from->choice);
    to->sampling = sampling;
    if (needs_history(sampling)) {
        to->history = (uint32_t *)from->known;
        to->n_history = from->n_known;
    }
    if (from->suppress_stop) {
        to->suppress = job->suppress;
        to->n_suppress = job->n_suppress;
    }
    if (job->grammar && from->sample)
        follow_grammar(conn, from, to);
}

static void note_flight(struct conn *conn, const struct sched_step *step, bool prompts)
{
    struct conn_flight *f = &conn->flights[conn->n_flights++];

    *f = (struct conn_flight){.id = step->id, .sent_ns = clock_ns(), .n_seqs = step->n_seqs};
    if (!prompts)
        return;
    f->prompts = x_alloc(step->n_seqs * sizeof *f->prompts);
    for (uint32_t i = 0; i < step->n_seqs; i++)
        f->prompts[i] = step->seqs[i].prompt_logprobs;
}

void conn_send(struct conn *conn, const struct sched_step *step)
{
    Ember__V1__Step message = EMBER__V1__STEP__INIT;
    Ember__V1__DriverFrame frame = EMBER__V1__DRIVER_FRAME__INIT;
    bool prompts = false;

    if (conn->n_flights == SCHED_FLIGHTS || !make_room(step->n_seqs)) {
        conn_fail(conn, false, "no room for a step");
        return;
    }
    conn->n_pinned = 0;
    for (uint32_t i = 0; i < step->n_seqs; i++) {
        fill(conn, &step->seqs[i], &scratch.sampling[i], &scratch.seqs[i]);
        scratch.list[i] = &scratch.seqs[i];
        prompts |= step->seqs[i].prompt_logprobs;
        request_first_step(step->seqs[i].user);
    }
    message.id = step->id;
    message.joins = step->joins;
    message.n_sequences = step->n_seqs;
    message.sequences = scratch.list;
    message.ended = conn->unfollowed;
    message.n_ended = conn->n_unfollowed;
    frame.kind_case = EMBER__V1__DRIVER_FRAME__KIND_STEP;
    frame.step = &message;
    METRICS_OBSERVE(&conn->model->metrics.step_tokens, iteration, step->n_tokens);
    note_flight(conn, step, prompts);
    send_frame(conn, &frame);
    conn->n_unfollowed = 0;
}

/* ---- in ---- */

static void welcome(struct conn *conn, const Ember__V1__Welcome *w)
{
    struct gw_model *model = conn->model;
    struct sched_limits limits = {.pages = w->pages,
                                  .page_size = w->page_size,
                                  .max_tokens = w->max_tokens,
                                  .max_seqs = w->max_seqs,
                                  .max_positions = w->max_positions,
                                  .token_refs = w->token_refs && model->gw->options.token_refs,
                                  .joins = w->joins};
    struct error err = {0};

    event_remove_timer(conn->readable);
    conn->max_tokens = w->max_tokens;
    conn->grammar_room = w->grammar_bytes;
    if (strcmp(w->model, model->name))
        conn_fail(conn, false, "it runs %s, not %s", w->model, model->name);
    else if (sched_instance_add(model->sched, &limits, conn, clock_ns(), &conn->sched, &err) < 0)
        conn_fail(conn, false, "%s", error_text(&err));
    else
        log_info(conn->taken_up ? "instance taken up" : "instance ready",
                 "id=%s model=%s pages=%u max_tokens=%u max_seqs=%u", conn->id, model->name,
                 w->pages, w->max_tokens, w->max_seqs);
    if (conn->sched && model->asleep)
        sched_instance_drain(conn->sched);
    model->metrics.taken_up += conn->sched && conn->taken_up;
    gw_pump(model->gw);
}

/* The result in the scheduler's form: arrays that live for the call. */
struct result_room {
    struct sched_seq_result *seqs;
    struct sched_logprob *top;
    const void **prompts;
};

static void room_free(struct result_room *room)
{
    free(room->seqs);
    free(room->top);
    free(room->prompts);
}

static bool translate(const Ember__V1__StepResult *from, const struct conn_flight *flight,
                      struct result_room *room, struct sched_result *to)
{
    size_t n_top = 0, at = 0, used = 0;

    for (size_t i = 0; i < from->n_sequences; i++)
        n_top += from->sequences[i]->n_top;
    room->seqs = mem_alloc(from->n_sequences + 1, sizeof *room->seqs);
    room->top = mem_alloc(n_top + 1, sizeof *room->top);
    if (flight->prompts)
        room->prompts = mem_alloc(flight->n_seqs + 1, sizeof *room->prompts);
    if (!room->seqs || !room->top || (flight->prompts && !room->prompts))
        return false;
    for (size_t i = 0; i < from->n_sequences; i++) {
        const Ember__V1__SequenceResult *s = from->sequences[i];
        room->seqs[i] = (struct sched_seq_result){.token = s->token,
                                                  .logprob = s->logprob,
                                                  .ended = s->ended,
                                                  .top = room->top + at,
                                                  .n_top = (uint32_t)s->n_top};
        for (size_t k = 0; k < s->n_top; k++, at++)
            room->top[at] = (struct sched_logprob){s->top[k]->token, s->top[k]->logprob};
    }
    for (uint32_t i = 0; flight->prompts && i < flight->n_seqs; i++)
        if (flight->prompts[i] && used < from->n_prompts)
            room->prompts[i] = from->prompts[used++];
    *to = (struct sched_result){.step = from->id,
                                .seqs = room->seqs,
                                .n_seqs = (uint32_t)from->n_sequences,
                                .prompt_logprobs = room->prompts,
                                .error = from->error,
                                .error_text = from->error_text};
    return true;
}

static void result(struct conn *conn, const Ember__V1__StepResult *from)
{
    struct result_room room = {0};
    struct sched_result to;
    struct error err = {0};
    uint64_t now = clock_ns();

    if (!conn->sched || !conn->n_flights) {
        conn_fail(conn, false, "a result without a step");
        return;
    }
    struct conn_flight flight = conn->flights[0];
    memmove(conn->flights, conn->flights + 1, sizeof *conn->flights * --conn->n_flights);
    METRICS_OBSERVE(&conn->model->metrics.step, step, (double)(now - flight.sent_ns) / 1e9);
    if (from->error)
        log_warn("step refused", "id=%s error=\"%s\"", conn->id, from->error_text);
    if (!translate(from, &flight, &room, &to))
        conn_fail(conn, false, "no memory for a result");
    else if (sched_step_done(conn->sched, &to, now, &err) < 0)
        conn_fail(conn, true, "%s", error_text(&err));
    if (from->max_tokens > conn->max_tokens && !conn->failed) {
        conn->max_tokens = from->max_tokens;
        sched_instance_grow(conn->sched, from->max_tokens);
    }
    room_free(&room);
    free(flight.prompts);
    gw_pump(conn->model->gw);
}

/*
 * Memory of one message, taken in a row and given back as a whole: unpacked, a result is some
 * allocations for each sequence. What does not fit is allocated, and the next time it does.
 */
static struct arena {
    uint8_t *block;
    size_t size, used, wanted;
    struct extra {
        struct extra *next;
        max_align_t data[];
    } * extras;
} arena;

#define ARENA_FIRST (16u << 10)
#define ARENA_MOST (4u << 20)

static void *arena_alloc(void *data, size_t size)
{
    struct arena *a = data;

    if (size > STEP_FRAME_MAX * 8)
        return NULL;
    size = (size + sizeof(max_align_t) - 1) / sizeof(max_align_t) * sizeof(max_align_t);
    a->wanted += size;
    if (a->size - a->used >= size) {
        a->used += size;
        return a->block + a->used - size;
    }
    struct extra *extra = malloc(sizeof *extra + size);
    if (!extra)
        return NULL;
    extra->next = a->extras;
    a->extras = extra;
    return extra->data;
}

static void arena_free_one(void *data, void *pointer)
{
}

static void arena_reset(struct arena *a)
{
    while (a->extras) {
        struct extra *next = a->extras->next;
        free(a->extras);
        a->extras = next;
    }
    if (a->wanted > a->size && a->size < ARENA_MOST) {
        free(a->block);
        a->size = MIN(MAX(2 * a->wanted, ARENA_FIRST), ARENA_MOST);
        a->block = malloc(a->size);
        a->size = a->block ? a->size : 0;
    }
    a->used = a->wanted = 0;
}

static void frame_in(struct conn *conn, const uint8_t *data, size_t len)
{
    ProtobufCAllocator allocator = {arena_alloc, arena_free_one, &arena};
    Ember__V1__InstanceFrame *frame = ember__v1__instance_frame__unpack(&allocator, len, data);

    if (!frame)
        conn_fail(conn, true, "a malformed frame");
    else if (frame->kind_case == EMBER__V1__INSTANCE_FRAME__KIND_WELCOME && !conn->sched)
        welcome(conn, frame->welcome);
    else if (frame->kind_case == EMBER__V1__INSTANCE_FRAME__KIND_RESULT)
        result(conn, frame->result);
    else if (frame->kind_case == EMBER__V1__INSTANCE_FRAME__KIND_FATAL)
        conn_fail(conn, false, "%s", frame->fatal->error_text);
    else
        conn_fail(conn, true, "an unexpected frame");
    arena_reset(&arena);
}

/* Past libevent's buffers, which ask the kernel how much there is before they read it, and call
 * back a turn later: once a step, with cold caches. */
static void on_readable(int fd, short what, void *arg)
{
    struct conn *conn = arg;
    const uint8_t *data;
    size_t len;

    if (what & EV_TIMEOUT) {
        conn_fail(conn, true, "no Welcome in time");
        return;
    }
    int r = frame_fill(&conn->reader, fd);
    if (r < 0) {
        event_del(conn->readable);
        conn_fail(conn, true, "the instance has gone");
    }
    while (r == 0 && !conn->failed && (r = frame_next(&conn->reader, &data, &len)) == 0)
        frame_in(conn, data, len);
    if (r == -EMSGSIZE)
        conn_fail(conn, true, "a frame of 0 or more than %d bytes", (int)STEP_FRAME_MAX);
}

static void on_event(struct bufferevent *bev, short what, void *arg)
{
    if (what & (BEV_EVENT_EOF | BEV_EVENT_ERROR))
        conn_fail(arg, true, "the instance has gone");
}

/* ---- coming and going ---- */

int conn_new(struct gw_model *model, const char *id, const char *token, const char *path,
             struct conn **ret, struct error *err)
{
    struct timeval limit = {10, 0};
    _cleanup_fd_ int fd = fd_connect(path, SOCK_NONBLOCK, err);

    if (fd < 0)
        return fd;
    struct bufferevent *bev = bufferevent_socket_new(
        model->gw->base, fd, BEV_OPT_CLOSE_ON_FREE | BEV_OPT_DEFER_CALLBACKS);
    if (!bev)
        return error_set(err, ENOMEM, "no memory for a connection");
    (void)TAKE_FD(fd);
    struct conn *conn = x_alloc(sizeof *conn);
    *conn = (struct conn){.model = model,
                          .id = x_strdup(id),
                          .token = x_strdup(token),
                          .socket = x_strdup(path),
                          .bev = bev,
                          .since_ns = clock_ns()};
    conn->readable =
        event_new(model->gw->base, bufferevent_getfd(bev), EV_READ | EV_PERSIST, on_readable, conn);
    event_add(conn->readable, &limit);
    bufferevent_setcb(bev, NULL, NULL, on_event, conn);
    bufferevent_disable(bev, EV_READ);
    bufferevent_enable(bev, EV_WRITE);
    TAILQ_INSERT_TAIL(&model->conns, conn, link);
    hello(conn);
    *ret = conn;
    return 0;
}

void conn_free(struct conn *conn)
{
    TAILQ_REMOVE(&conn->model->conns, conn, link);
    for (unsigned i = 0; i < conn->n_flights; i++)
        free(conn->flights[i].prompts);
    for (size_t i = 0; i < conn->n_grammars; i++)
        compiled_unref(conn->grammars[i]);
    free(conn->grammars);
    free(conn->unfollowed);
    event_free(conn->readable);
    frame_reader_free(&conn->reader);
    bufferevent_free(conn->bev);
    free(conn->id);
    free(conn->token);
    free(conn->socket);
    free(conn);
}
