/* SPDX-License-Identifier: Apache-2.0 */
#include "model/model_private.h"

#include <errno.h>
#include <stdlib.h>

#define CONFIG_LEN_MAX (16 * MIB)

void model_free(struct model *model)
{
    if (!model)
        return;
    desc_clear(&model->desc);
    free(model->slots);
    free(model->parts);
    free(model->layer_slots);
    buffer_free(&model->text);
    free(model);
}

const struct model_info *model_info(const struct model *model)
{
    return &model->desc.info;
}

static const char *const kv_names[] = {
#define X(id, name, dtype) name,
    KV_KINDS(X)
#undef X
};

const char *kv_kind_name(enum kv_kind kind)
{
    return (unsigned)kind < KV_KIND_COUNT ? kv_names[kind] : "?";
}

int kv_kind_find(const char *name, enum kv_kind *ret, struct error *err)
{
    for (int i = 0; i < KV_KIND_COUNT; i++)
        if (!strcmp(name, kv_names[i])) {
            *ret = i;
            return 0;
        }
    return error_set(err, EINVAL, "K and V cannot be kept in \"%.32s\"; there are " KV_CHOICES,
                     name);
}

uint64_t model_kv_block(enum ember_dtype kv, uint32_t heads, uint32_t width)
{
    return size_align(kv_block_bytes(kv, heads, KV_PAGE_SIZE, width), 64);
}

uint64_t model_kv_page(const struct model *model, enum ember_dtype kv)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < model->desc.info.n_layers; i++) {
        const struct desc_attn *a = &model->desc.attns[model->desc.layers[i].attn];
        bytes += model_kv_block(kv, a->kv_heads, a->dk) + model_kv_block(kv, a->kv_heads, a->dv);
    }
    return bytes;
}

void model_settle_kv(struct model *model, const struct weights_layout *layout)
{
    struct model_info *info = &model->desc.info;
    const enum kv_kind kind = weights_layout_made(layout) ? KV_BF16 : KV_F32;

    info->kv_dtype[KV_AUTO] = info->kv_dtype[kind];
    info->kv_page_bytes[KV_AUTO] = info->kv_page_bytes[kind];
}

static int finish_info(struct model *model, struct error *err)
{
    static const enum ember_dtype kv[] = {
#define X(id, name, dtype) dtype,
        KV_KINDS(X)
#undef X
    };
    struct model_info *info = &model->desc.info;
    for (int i = 0; i < KV_KIND_COUNT; i++) {
        info->kv_dtype[i] = kv[i];
        info->kv_page_bytes[i] = model_kv_page(model, kv[i]);
    }
    for (uint32_t i = 0; i < model->desc.n_ropes; i++) {
        const struct desc_rope *rope = &model->desc.ropes[i];
        uint32_t exact = (uint32_t)rope->max_position;
        if (rope->kind == EMBER_ROPE_DYNAMIC_NTK)
            info->rope_exact_len = info->rope_exact_len ? MIN(info->rope_exact_len, exact) : exact;
    }
    for (uint32_t i = 0; i < model->n_parts; i++)
        if (!model->parts[i].constant &&
            !size_add(info->parameters, model->parts[i].elements, &info->parameters))
            return error_set(err, EOVERFLOW, "the model has too many parameters to count");
    return 0;
}

int model_from_config(const char *json, size_t len, const char *name, struct model **ret,
                      struct error *err)
{
    _cleanup_(config_json_freep) struct config *config = NULL;
    _cleanup_(model_freep) struct model *model = mem_alloc(1, sizeof *model);
    int r;
    if (!model)
        return error_set(err, ENOMEM, "%s: no memory", name);
    if (len > CONFIG_LEN_MAX)
        return error_set(err, EINVAL, "%s: %zu bytes are too many for a config", name, len);
    if ((r = config_parse(json, len, name, &config, err)) < 0 ||
        (r = desc_read(config, &model->desc, err)) < 0)
        return r;
    if ((r = model_make_slots(model, err)) < 0 || (r = finish_info(model, err)) < 0)
        return error_prefix(err, "%s", name);
    *ret = TAKE(model);
    return 0;
}
