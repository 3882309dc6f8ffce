/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who is next. Within a priority, the client that has been served least: every planned token is
 * charged to its client (generated ones at output_weight), and the one with the least charged goes
 * first. A client that comes back after a pause is lifted to the least of those who stayed: it is
 * owed nothing for having been away. Within a client: by arrival. (The virtual token counter of
 * Sheng et al., "Fairness in Serving Large Language Models", 2024.)
 *
 * When all seats or pages are taken, a sequence that waits may displace a running one: of a lower
 * priority; or, when its client has nothing running on the instance's model, of the client that has
 * most, if that has two or more. After that its client has one running, so that this never goes to
 * and fro.
 */
#include "scheduler/sched_private.h"

#include <string.h>

/* How many of a client's first waiting sequences are looked at for a cached prefix, and how often
 * one may be passed over. */
#define LOOK_AHEAD 8

/* ---- clients ---- */

static struct client **client_bucket(struct sched_model *model, uint64_t id)
{
    return &model->clients[(id * UINT64_C(0x9e3779b97f4a7c15)) >> 56];
}

/* model->waiting has a place for every client, so that queueing cannot fail. */
static bool make_place(struct sched_model *model)
{
    uint32_t cap = MAX(16, model->cap_waiting * 2);

    if (model->n_clients < model->cap_waiting)
        return true;
    struct client **moved = reallocarray(model->waiting, cap, sizeof(struct client *));
    if (!moved)
        return false;
    model->waiting = moved;
    model->cap_waiting = cap;
    return true;
}

struct client *client_get(struct sched_model *model, uint64_t id)
{
    struct client **bucket = client_bucket(model, id), *client;

    for (client = *bucket; client; client = client->next)
        if (client->id == id)
            return client;
    client = make_place(model) ? mem_alloc(1, sizeof *client) : NULL;
    if (!client)
        return NULL;
    *client = (struct client){.id = id, .at_waiting = UINT32_MAX, .next = *bucket};
    *bucket = client;
    model->n_clients++;
    return client;
}

/* The least charged of those who have something to do, `except` left out. */
static void update_floor(struct sched_model *model, const struct client *except)
{
    uint64_t least = UINT64_MAX;

    for (size_t b = 0; b < ARRAY_LEN(model->clients); b++)
        for (struct client *c = model->clients[b]; c; c = c->next)
            if (c->live && c != except)
                least = MIN(least, c->served);
    if (least != UINT64_MAX)
        model->floor = MAX(model->floor, least);
}

/* Forgets those who have nothing to do and would be lifted to the floor anyway. */
static void forget_idle(struct sched_model *model, const struct client *except)
{
    for (size_t b = 0; b < ARRAY_LEN(model->clients); b++) {
        for (struct client **at = &model->clients[b], *c; (c = *at);) {
            if (c->live || c == except || c->served > model->floor) {
                at = &c->next;
                continue;
            }
            *at = c->next;
            free(c);
            model->n_clients--;
        }
    }
}

void client_join(struct sched_model *model, struct client *client)
{
    if (client->live++)
        return;
    update_floor(model, client);
    forget_idle(model, client);
    client->served = MAX(client->served, model->floor);
}

void client_leave(struct sched_model *model, struct client *client)
{
    assert(client->live);
    client->live--;
}

void client_charge(struct sched_model *model, struct client *client, uint64_t cost)
{
    if (__builtin_add_overflow(client->served, cost, &client->served))
        client->served = UINT64_MAX;
}

void clients_free(struct sched_model *model)
{
    for (size_t b = 0; b < ARRAY_LEN(model->clients); b++) {
        for (struct client *c = model->clients[b], *next; c; c = next) {
            next = c->next;
            free(c);
        }
        model->clients[b] = NULL;
    }
    free(model->waiting);
    model->waiting = NULL;
}

/* ---- lists ---- */

static bool arrived_before(const struct seq *a, const struct seq *b)
{
    if (a->request->priority != b->request->priority)
        return a->request->priority < b->request->priority;
    if (a->request->id != b->request->id)
        return a->request->id < b->request->id;
    return a->choice < b->choice;
}

bool seq_before(const struct seq *a, const struct seq *b)
{
    const struct client *x = a->request->client, *y = b->request->client;

    if (a->request->priority == b->request->priority && x != y) {
        if (x->served != y->served)
            return x->served < y->served;
        if (x->running != y->running)
            return x->running < y->running;
    }
    return arrived_before(a, b);
}

void queue_insert(struct seq_list *list, struct seq *seq)
{
    struct seq *after = list->tail;

    if (list->head && arrived_before(seq, list->head))
        after = NULL; /* back from an instance: older than all others */
    while (after && arrived_before(seq, after))
        after = after->prev;
    seq->prev = after;
    seq->next = after ? after->next : list->head;
    *(seq->prev ? &seq->prev->next : &list->head) = seq;
    *(seq->next ? &seq->next->prev : &list->tail) = seq;
    seq->list = list;
    list->n++;
}

void queue_remove(struct seq *seq)
{
    struct seq_list *list = seq->list;

    *(seq->prev ? &seq->prev->next : &list->head) = seq->next;
    *(seq->next ? &seq->next->prev : &list->tail) = seq->prev;
    seq->prev = seq->next = NULL;
    seq->list = NULL;
    list->n--;
}

void queue_push(struct seq *seq, struct sched_instance *instance)
{
    struct sched_model *model = seq->request->model;
    struct client *client = seq->request->client;

    seq->instance = instance;
    if (instance) {
        instance->work += seq->n_known;
        instance->waiting_pages += pages_for(model, seq->n_known);
        queue_insert(&instance->waiting, seq);
        return;
    }
    queue_insert(&client->waiting, seq);
    if (client->at_waiting == UINT32_MAX) {
        client->at_waiting = model->n_waiting_clients; /* its place was made by sched_submit */
        model->waiting[model->n_waiting_clients++] = client;
    }
}

void queue_pull(struct seq *seq)
{
    struct sched_model *model = seq->request->model;
    struct sched_instance *instance = seq->instance;
    struct client *client = seq->request->client;

    queue_remove(seq);
    seq->instance = NULL;
    if (instance) {
        instance->work -= seq->n_known;
        instance->waiting_pages -= pages_for(model, seq->n_known);
    } else if (!client->waiting.n) {
        struct client *last = model->waiting[--model->n_waiting_clients];
        model->waiting[client->at_waiting] = last;
        last->at_waiting = client->at_waiting;
        client->at_waiting = UINT32_MAX;
    }
}

/* ---- choice ---- */

/* Waiting for another's prompt tokens is worth a step from so many on. */
#define WORTH_WAITING 32

/* Its next blocks that are not cached are just being computed for another: soon they will be. */
static bool is_being_computed(const struct sched_instance *instance, const struct seq *seq)
{
    uint32_t shareable = seq_shareable(seq), last = UINT32_MAX;

    for (uint32_t i = 0; i < instance->n_computing && shareable; i++) {
        const struct seq *other = instance->computing[i];
        if (!seq_runs(other) || !other->n_hashes ||
            !digest_equal(&other->hashes[0], &seq->hashes[0]))
            continue;
        if (last == UINT32_MAX)
            last = route_hits(instance, seq) + pages_for(instance->model, WORTH_WAITING) - 1;
        if (last < MIN(shareable, other->n_hashes) &&
            digest_equal(&other->hashes[last], &seq->hashes[last]))
            return true;
    }
    return false;
}

static bool eligible(const struct sched_instance *instance, const struct seq *seq,
                     const struct company *company)
{
    return company_takes(company, seq) &&
           route_fits(instance, seq->n_known, seq->request->max_tokens > 0) &&
           !is_being_computed(instance, seq);
}

/* How many that are not eligible are looked at, of a client. */
#define LOOK_PAST 16

static struct seq *first_eligible(const struct sched_instance *instance, struct seq *seq,
                                  const struct company *company)
{
    for (int i = 0; seq && i < LOOK_PAST; i++, seq = seq->next)
        if (eligible(instance, seq, company))
            return seq;
    return NULL;
}

/* Of a client's first few of equal priority, the one of which most is cached here. */
static struct seq *prefer_cached(const struct sched_instance *instance, struct seq *head,
                                 const struct company *company)
{
    struct seq *best = head, *seq = head;
    uint32_t hits = route_hits(instance, head);

    if (head->passed_over >= LOOK_AHEAD)
        return head;
    for (int i = 0; i < LOOK_AHEAD && (seq = seq->next); i++) {
        if (seq->request->priority != head->request->priority)
            break;
        uint32_t n = eligible(instance, seq, company) ? route_hits(instance, seq) : 0;
        if (n > hits) {
            hits = n;
            best = seq;
        }
    }
    return best;
}

struct seq *queue_next(struct sched_instance *instance, const struct company *company)
{
    struct sched_model *model = instance->model;
    struct seq *best = NULL, *seq;

    for (uint32_t i = 0; i < model->n_waiting_clients; i++) {
        seq = first_eligible(instance, model->waiting[i]->waiting.head, company);
        if (seq && (!best || seq_before(seq, best)))
            best = seq;
    }
    if (best && model->n_instances > 1)
        best = prefer_cached(instance, best, company);
    for (seq = instance->waiting.head; seq; seq = seq->next)
        if (eligible(instance, seq, company) && (!best || seq_before(seq, best)))
            best = seq;
    return best;
}

struct seq *queue_next_lone(const struct sched_instance *instance)
{
    const struct sched_model *model = instance->model;
    struct seq *best = NULL;

    for (uint32_t i = 0; i <= model->n_waiting_clients; i++) {
        struct seq *seq =
            i < model->n_waiting_clients ? model->waiting[i]->waiting.head : instance->waiting.head;
        for (; seq; seq = seq->next)
            if (seq->lone && (!best || seq_before(seq, best)) &&
                route_fits(instance, seq->n_known, seq->request->max_tokens > 0))
                best = seq;
    }
    return best;
}

struct seq *fair_victim(const struct sched_instance *instance, const struct seq *seq)
{
    const struct client *client = seq->request->client;
    struct seq *urgent = NULL, *fair = NULL;

    for (uint32_t i = 0; i < instance->n_running; i++) {
        struct seq *r = instance->running[i];
        if (r->request->priority > seq->request->priority && (!urgent || arrived_before(urgent, r)))
            urgent = r;
        if (r->request->priority != seq->request->priority || r->request->client->running < 2)
            continue;
        if (!fair || r->request->client->running > fair->request->client->running ||
            (r->request->client == fair->request->client && arrived_before(fair, r)))
            fair = r;
    }
    if (urgent)
        return urgent;
    return client->running ? NULL : fair;
}
