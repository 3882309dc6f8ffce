/* SPDX-License-Identifier: Apache-2.0 */
/* Our state as messages. Strings in them are ours: pack before anything changes. */
#include "base/clock.h"
#include "daemon/manager/manager.h"

static Ember__V1__Warmth model_warmth(const struct mgr_model *m)
{
    static const Ember__V1__Warmth warmth[] = {
#define X(id, as, from) [id] = EMBER__V1__WARMTH__##as,
        MGR_MODEL_STATES(X)
#undef X
    };
    if (m->state == MODEL_PARKED && m->instances[INSTANCE_HOT])
        return EMBER__V1__WARMTH__HOT;
    if (m->state == MODEL_PARKED && m->instances[INSTANCE_WARM])
        return EMBER__V1__WARMTH__WARM;
    return warmth[m->state];
}

void mgr_describe_model(const struct mgr_model *m, Ember__V1__Model *ret)
{
    uint64_t now = clock_ns();

    ember__v1__model__init(ret);
    ret->name = (char *)m->name;
    ret->path = m->path;
    ret->architecture = (char *)m->architecture;
    ret->warmth = model_warmth(m);
    ret->weights_bytes = m->weights_bytes;
    ret->parameters = m->parameters;
    ret->vocab_size = m->vocab_size;
    ret->max_positions = m->max_positions;
    ret->standby_target = mgr_model_target(m);
    ret->standby = m->instances[INSTANCE_WARM];
    ret->leased = m->instances[INSTANCE_HOT];
    ret->starting = m->instances[INSTANCE_STARTING];
    ret->load_ms = (double)m->load_ns / 1e6;
    ret->idle_seconds = m->used_ns && now > m->used_ns ? (double)(now - m->used_ns) / 1e9 : 0;
    ret->digest = (char *)m->digest;
    ret->quant = m->state == MODEL_PARKED && !*m->quant ? (char *)m->recipe : m->quant;
    ret->from_pack = m->state == MODEL_PARKED && m->from_pack;
    ret->error = (char *)m->error.text;
    ret->notice = m->state == MODEL_PARKED ? (char *)m->notice : (char *)"";
    ret->kv_type = (char *)kv_kind_name(mgr_model_kv_kind(m));
    ret->instance_bytes = m->state == MODEL_PARKED ? mgr_model_instance_bytes(m) : 0;
}

void mgr_describe_instance(const struct mgr_instance *i, struct mgr_describe_room *room,
                           Ember__V1__Instance *ret)
{
    static const Ember__V1__Warmth warmth[] = {
#define X(id, as, from) [id] = EMBER__V1__WARMTH__##as,
        MGR_INSTANCE_STATES(X)
#undef X
    };

    ember__v1__instance__init(ret);
    for (size_t k = 0; k < i->n_phases; k++) {
        ember__v1__phase_time__init(&room->phases[k]);
        room->phases[k].name = (char *)i->phases[k].name;
        room->phases[k].ms = i->phases[k].ms;
        room->list[k] = &room->phases[k];
    }
    ret->phases = room->list;
    ret->n_phases = i->n_phases;
    ret->id = (char *)i->id;
    ret->model = i->model->name;
    ret->warmth = warmth[i->state];
    ret->pid = i->pid;
    ret->socket = i->socket;
    ret->start_ms = i->ready_ns ? (double)(i->ready_ns - i->started_ns) / 1e6 : 0;
    ret->age_seconds = clock_ms_since(i->started_ns) / 1e3;
    ret->bytes = i->bytes;
    ret->lease_holder = i->state == INSTANCE_HOT ? (char *)i->holder : (char *)"";
    ret->driver_connected = i->driver_connected;
    ret->backend = i->model->mgr->options.backend;
    ret->kernels_compiled = i->kernels_compiled;
    ret->graphs_captured = i->graphs_captured;
    ret->model_path = i->model->path;
    ret->model_digest = (char *)i->model->digest;
}
