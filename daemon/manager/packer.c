/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packs in the background: when a load has had to convert what a pack would have spared, a process
 * writes the pack from the weights that are resident, while the model serves. One at a time, and
 * none while something is being loaded. It may be killed at any moment: the next one goes on where
 * it was.
 */
#include <errno.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "daemon/manager/manager.h"

/* It reads memory and writes to the disk: a step that waits for either comes first. */
#define PACKER_NICE 19

void mgr_pack_init(struct mgr *mgr)
{
    const struct emberd_options *o = &mgr->options;

    mgr->packs_dir = *o->packs_dir   ? x_strdup(o->packs_dir)
                     : *o->cache_dir ? x_printf("%s/packs", o->cache_dir)
                                     : x_strdup("");
}

const char *mgr_packs_dir(const struct mgr *mgr)
{
    return *mgr->packs_dir ? mgr->packs_dir : NULL;
}

void mgr_pack_loaded(struct mgr_model *model, const Ember__V1__LoaderDone *done)
{
    int policy = model->mgr->options.packs;

    model->pack_wanted = false;
    if (policy == EMBERD_PACKS_NEVER || done->key.len != sizeof model->pack_key ||
        !mgr_packs_dir(model->mgr))
        return;
    memcpy(model->pack_key, done->key.data, sizeof model->pack_key);
    model->pack_wanted = done->pack_wanted || (policy == EMBERD_PACKS_ALWAYS && !done->from_pack);
}

static void packer_message(void *owner, const uint8_t *data, size_t len, int *fds, size_t n_fds)
{
    struct mgr_model *model = owner;
    Ember__V1__FromLoader *m = ember__v1__from_loader__unpack(NULL, len, data);

    if (m && m->kind_case == EMBER__V1__FROM_LOADER__KIND_FAILED) {
        child_last_words(model->packer, m->failed->error, "%s", m->failed->text);
    } else if (m && m->kind_case == EMBER__V1__FROM_LOADER__KIND_PACKED) {
        model->mgr->counters.packs += m->packed->written;
        log_info(m->packed->written ? "pack written" : "pack is there already", "model=%s ms=%.0f",
                 model->name, m->packed->ms);
        child_last_words(model->packer, ECANCELED, "done");
    } else {
        child_last_words(model->packer, EPROTO, "sent what it may not send");
        child_kill(model->packer);
    }
    ember__v1__from_loader__free_unpacked(m, NULL);
}

static void packer_exited(void *owner, const struct error *why)
{
    struct mgr_model *model = owner;

    model->packer = NULL;
    if (why->code != -ECANCELED && model->state == MODEL_PARKED && !model->mgr->draining)
        log_warn("pack not written", "model=%s error=\"%s\"", model->name, why->text);
    mgr_model_check_left(model);
    mgr_settle_soon(model->mgr);
}

static void start(struct mgr_model *model)
{
    static const struct child_handlers handlers = {PACKER_NICE, packer_message, packer_exited};
    Ember__V1__LoaderPack pack = EMBER__V1__LOADER_PACK__INIT;
    Ember__V1__ToLoader message = EMBER__V1__TO_LOADER__INIT;
    int fds[] = {model->weights_fd, model->manifest_fd};
    struct error err = {0};

    model->pack_wanted = false; /* one try a load */
    if (child_start(model->mgr->base, "ember-loader", model->name, &handlers, model, &model->packer,
                    &err) < 0) {
        log_warn("pack not written", "model=%s error=\"%s\"", model->name, err.text);
        return;
    }
    pack.path = model->path;
    pack.quant = model->quant;
    pack.key.data = model->pack_key;
    pack.key.len = sizeof model->pack_key;
    pack.packs_dir = (char *)mgr_packs_dir(model->mgr);
    pack.limit = model->mgr->options.packs_limit;
    pack.rate = model->mgr->options.packs_rate;
    message.kind_case = EMBER__V1__TO_LOADER__KIND_PACK;
    message.pack = &pack;
    child_send(model->packer, &message.base, fds, ARRAY_LEN(fds));
}

void mgr_pack_settle(struct mgr *mgr)
{
    struct mgr_model *m, *next = NULL;

    TAILQ_FOREACH(m, &mgr->models, link)
    {
        if (m->packer || m->state == MODEL_LOADING || m->n_waiting)
            return;
        if (!next && m->pack_wanted && m->state == MODEL_PARKED)
            next = m;
    }
    if (next)
        start(next);
}

void mgr_pack_stop(struct mgr_model *model)
{
    model->pack_wanted = false;
    if (model->packer)
        child_kill(model->packer);
}
