/* SPDX-License-Identifier: Apache-2.0 */
#include "scheduler/scale.h"

#include <math.h>
#include <string.h>

#include "scheduler/sched_private.h"

/* ---- more ---- */

static void raise_to(uint32_t *wanted, double n, const char *why, const char **ret_why)
{
    if (n <= *wanted)
        return;
    *wanted = n < UINT32_MAX ? (uint32_t)n : UINT32_MAX;
    *ret_why = why;
}

uint32_t scale_wanted(const struct scale_config *config, const struct scale_state *s,
                      const char **ret_why)
{
    double busy = (double)s->ready - s->idle;
    double have = (double)s->ready + s->starting;
    double capacity = s->tokens_per_s * (double)config->backlog_target_ns / 1e9;
    uint32_t wanted = config->min;

    *ret_why = "min";
    raise_to(&wanted, busy + config->standby, "standby", ret_why);
    if (s->waiting)
        raise_to(&wanted, 1, "load", ret_why);
    if (s->waiting && capacity > 0)
        raise_to(&wanted, ceil((double)s->backlog_tokens / capacity), "load", ret_why);
    if (s->waiting && s->oldest_wait_ns > config->wait_target_ns && !s->starting)
        raise_to(&wanted, have + 1, "wait", ret_why);
    if (wanted > config->max) {
        wanted = config->max;
        *ret_why = "max";
    }
    return wanted;
}

/* ---- fewer ---- */

static bool longer_idle(const struct sched_instance *a, const struct sched_instance *b)
{
    return !b || a->idle_since < b->idle_since;
}

/* A draining one that has emptied, else one that has been idle for long enough. */
static struct sched_instance *to_release(const struct sched_model *model, bool spare, uint64_t now,
                                         uint64_t *recheck)
{
    struct sched_instance *best = NULL;

    for (uint32_t i = 0; i < model->n_instances; i++) {
        struct sched_instance *instance = model->instances[i];
        if (!sched_instance_idle(instance))
            continue;
        if (instance->draining)
            return instance;
        if (spare && longer_idle(instance, best))
            best = instance;
    }
    if (best && now - best->idle_since < model->config.idle_ns) {
        *recheck = MIN(*recheck, best->idle_since + model->config.idle_ns);
        best = NULL;
    }
    return best;
}

/* Drains the one with the least to do, when one fewer would have been enough for idle_ns. */
static void consolidate(struct sched_model *model, uint32_t ready, uint64_t now, uint64_t *recheck)
{
    struct sched_instance *least = NULL;
    uint64_t seats = 0;

    for (uint32_t i = 0; i < model->n_instances; i++) {
        struct sched_instance *instance = model->instances[i];
        if (instance->draining)
            continue;
        seats += instance->limits.max_seqs;
        if (!least || instance->n_running < least->n_running)
            least = instance;
    }
    if (!least || model->n_waiting ||
        2 * (uint64_t)model->n_running > seats - least->limits.max_seqs) {
        model->surplus_since = 0;
        return;
    }
    if (!model->surplus_since)
        model->surplus_since = MAX(now, 1);
    if (now - model->surplus_since < model->config.idle_ns) {
        *recheck = MIN(*recheck, model->surplus_since + model->config.idle_ns);
        return;
    }
    sched_instance_drain(least);
    least->surplus = true;
    model->surplus_since = 0;
}

/* Those that were found one too many are taken back before others are started. */
static uint32_t undrain(struct sched_model *model, uint32_t n)
{
    uint32_t back = 0;

    for (uint32_t i = 0; i < model->n_instances && back < n; i++) {
        struct sched_instance *instance = model->instances[i];
        if (!instance->surplus)
            continue;
        sched_instance_resume(instance);
        back++;
    }
    return back;
}

static struct scale_state state_of(const struct sched_model *model, uint32_t starting, uint64_t now)
{
    struct sched_stats stats;
    struct scale_state state = {.starting = starting, .tokens_per_s = model_speed(model)};

    sched_model_stats(model, now, &stats);
    state.waiting = model->n_waiting;
    state.oldest_wait_ns = stats.oldest_wait_ns;
    state.backlog_tokens = stats.backlog_tokens;
    for (uint32_t i = 0; i < model->n_instances; i++) {
        const struct sched_instance *instance = model->instances[i];
        state.ready += !instance->draining;
        state.idle += !instance->draining && sched_instance_idle(instance);
    }
    return state;
}

struct sched_scale sched_scale(struct sched_model *model, uint32_t starting, uint64_t now)
{
    const struct sched_model_config *c = &model->config;
    struct scale_config config = {c->min_instances, c->max_instances, c->standby, c->wait_target_ns,
                                  c->backlog_target_ns};
    struct scale_state state = state_of(model, starting, now);
    struct sched_scale ret = {.recheck = UINT64_MAX};

    ret.wanted = scale_wanted(&config, &state, &ret.why);
    uint64_t have = (uint64_t)state.ready + starting;
    if (ret.wanted > have)
        state.ready += undrain(model, (uint32_t)(ret.wanted - have));
    if (state.waiting && state.oldest_wait_ns <= c->wait_target_ns)
        ret.recheck = now + (c->wait_target_ns - state.oldest_wait_ns) + 1;
    uint32_t keep = MAX(c->min_instances, state.waiting ? ret.wanted : c->standby);
    bool spare = !starting && state.ready > keep && ret.wanted <= state.ready;
    ret.release = to_release(model, spare && state.idle > c->standby, now, &ret.recheck);
    if (!ret.release && spare && state.ready > 1 && state.idle <= c->standby)
        consolidate(model, state.ready, now, &ret.recheck);
    return ret;
}
