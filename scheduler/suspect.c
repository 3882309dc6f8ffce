/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who is to blame when an instance dies, or refuses a step: one of those in flight, or none of
 * them (somebody has killed it). Found by testing groups while they are replayed:
 *
 *   - Those in flight at a death become suspects, as one group. On an instance one group at a time
 *     is in flight, beside those whom nobody suspects. Whoever brings a token leaves his group: a
 *     kill from outside costs all of them one replay together.
 *   - A group in flight at another death is cut into SPLIT parts, each a group of its own.
 *   - A part of one is lone: it runs with nobody else in flight.
 *   - A suspect in flight at a death with nobody else is guilty, and fails. Others never do.
 *
 * Each death of a guilty one makes its group SPLIT times smaller. Of n sequences in flight it thus
 * takes at most 2 + ceil(log8(n)) instances with it (3 of up to 8, 4 of up to 64), two when it was
 * by itself, and those who were beside it wait for at most SPLIT replays at each size. When every
 * sequence is guilty (the instance cannot run at all) it is n * 8 / 7 + 2 deaths.
 */
#include "scheduler/sched_private.h"

#define SPLIT 8

void company_add(struct company *company, const struct seq *seq)
{
    company->mixed |= company->any && company->any != seq;
    company->any = seq;
    company->lone |= seq->lone;
    if (seq->suspect)
        company->group = seq->suspect;
}

static struct company company_in(const struct flight *flights, uint32_t n)
{
    struct company company = {0};

    for (uint32_t f = 0; f < n; f++)
        for (uint32_t i = 0; i < flights[f].n; i++)
            company_add(&company, flights[f].entries[i]);
    return company;
}

struct company company_of(const struct sched_instance *instance)
{
    if (!instance->model->n_suspects)
        return (struct company){0}; /* anybody may join anybody */
    return company_in(instance->flights, instance->n_flights);
}

static void set_lone(struct seq *seq)
{
    seq->request->model->n_lone += !seq->lone;
    seq->lone = true;
}

void suspect_clear(struct seq *seq)
{
    struct sched_model *model = seq->request->model;

    model->n_suspects -= seq->suspect != 0;
    model->n_lone -= seq->lone;
    seq->suspect = 0;
    seq->lone = false;
}

/* Was taken off meanwhile, and runs elsewhere; or has ended. */
static bool is_away(const struct sched_instance *instance, const struct seq *seq)
{
    return seq->state == SEQ_ENDED || (seq_runs(seq) && seq->instance != instance);
}

/* Those who were clean become one group; how many were of `group` already. */
static uint32_t strike(struct sched_instance *instance, const struct flight *flight, uint64_t group,
                       uint64_t fresh, uint64_t death)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < flight->n; i++) {
        struct seq *seq = flight->entries[i];
        if (is_away(instance, seq) || seq->struck_by == death)
            continue;
        seq->struck_by = death;
        if (seq->suspect) {
            n += seq->suspect == group;
        } else {
            seq->suspect = fresh;
            seq->request->model->n_suspects++;
        }
    }
    return n;
}

/* The n of `group` become groups of `size`, numbered from `fresh` on; *at: how many have. */
static void split(struct sched_instance *instance, const struct flight *flight, uint64_t group,
                  uint64_t fresh, uint32_t n, uint32_t size, uint32_t *at)
{
    for (uint32_t i = 0; i < flight->n; i++) {
        struct seq *seq = flight->entries[i];
        if (is_away(instance, seq) || seq->suspect != group)
            continue;
        uint32_t part = (*at)++ / size;
        seq->suspect = fresh + part;
        if (MIN(size, n - part * size) == 1)
            set_lone(seq);
    }
}

struct seq *suspect_death(struct sched_instance *instance, const struct flight *flights,
                          uint32_t n_flights, uint64_t death, bool certain)
{
    struct sched *sched = instance->model->sched;
    struct company company = company_in(flights, n_flights);
    uint64_t fresh = sched->next_group + 1, parts = fresh + 1;
    uint32_t n = 0, at = 0;

    sched->next_group += 1 + SPLIT;
    for (uint32_t f = 0; f < n_flights; f++)
        n += strike(instance, &flights[f], company.group, fresh, death);
    if (n == 1 && !company.mixed && certain)
        return (struct seq *)company.any;
    for (uint32_t f = 0; f < n_flights && n; f++)
        split(instance, &flights[f], company.group, parts, n, (n + SPLIT - 1) / SPLIT, &at);
    return NULL;
}
