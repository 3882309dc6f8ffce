/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The manifest: what an instance needs to know about a model that is resident, in one sealed memfd.
 * Little-endian:
 *
 *   0   magic "EMBM"            4   version u32
 *   8   total bytes u64         16  checksum u64 of everything behind it (base/digest.h)
 *   24  weights digest [16]     40  layout digest [16]: names, shapes and places of all tensors
 *   56  config bytes u64        64  folder bytes u64
 *   72  tensors u32             76  name variant u32
 *   80  forms [tensors] (struct slot_form, 4 bytes), config text, folder text
 *
 * Names, shapes and offsets are not stored: they follow from config and forms (layout.c). The
 * layout digest proves that this build derives what the writer had; -ESTALE when not.
 */
#include "model/model_private.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MANIFEST_MAGIC 0x4d424d45u /* "EMBM" */
#define MANIFEST_VERSION 3
#define CHECKED_FROM 24

struct manifest_header {
    uint32_t magic, version;
    uint64_t total, checksum;
    struct digest weights, layout;
    uint64_t config_len, dir_len;
    uint32_t n_weights, variant;
};
_Static_assert(sizeof(struct manifest_header) == 80, "the header is written as it stands");
_Static_assert(sizeof(struct slot_form) == 4, "forms are written as they stand");
_Static_assert(__BYTE_ORDER == __LITTLE_ENDIAN, "manifests are written in host order");

static struct digest layout_digest(const struct weights_layout *layout)
{
    struct digest_state *state = digest_begin();
    digest_update(state, &layout->bytes, sizeof layout->bytes);
    for (uint32_t i = 0; i < layout->n_weights; i++) {
        const struct weight *w = &layout->weights[i];
        digest_update_string(state, w->name);
        digest_update(state, &w->dtype, sizeof w->dtype);
        digest_update(state, &w->rank, sizeof w->rank);
        digest_update(state, w->dim, sizeof w->dim);
        digest_update(state, &w->offset, sizeof w->offset);
        digest_update(state, &w->bytes, sizeof w->bytes);
        digest_update(state, &w->quant, sizeof w->quant);
        digest_update(state, &w->scale_dtype, sizeof w->scale_dtype);
        digest_update(state, &w->layout, sizeof w->layout);
        digest_update(state, &w->row_bytes, sizeof w->row_bytes);
        digest_update(state, &w->group, sizeof w->group);
        digest_update(state, &w->scale_at, sizeof w->scale_at);
        digest_update(state, &w->zero_at, sizeof w->zero_at);
        digest_update(state, &w->order_at, sizeof w->order_at);
    }
    return digest_end(state);
}

int manifest_write(const char *config, size_t config_len, const char *source_dir,
                   const struct weights_layout *layout, struct buffer *out, struct error *err)
{
    struct manifest_header h = {.magic = MANIFEST_MAGIC,
                                .version = MANIFEST_VERSION,
                                .weights = layout->digest,
                                .layout = layout_digest(layout),
                                .config_len = config_len,
                                .dir_len = strlen(source_dir),
                                .n_weights = layout->n_weights,
                                .variant = layout_variant(layout)};
    size_t start = out->len;
    int r;
    h.total =
        sizeof h + (uint64_t)h.n_weights * sizeof(struct slot_form) + h.config_len + h.dir_len;
    r = buffer_append(out, &h, sizeof h);
    for (uint32_t i = 0; r == 0 && i < layout->n_weights; i++) {
        struct slot_form form = layout_form(&layout->weights[i]);
        r = buffer_append(out, &form, sizeof form);
    }
    if (r == 0)
        r = buffer_append(out, config, config_len);
    if (r == 0)
        r = buffer_append(out, source_dir, h.dir_len);
    if (r < 0) {
        out->len = start;
        return error_set(err, ENOMEM, "no memory for a manifest of %llu bytes",
                         (unsigned long long)h.total);
    }
    h.checksum = checksum_of(out->data + start + CHECKED_FROM, h.total - CHECKED_FROM);
    memcpy(out->data + start, &h, sizeof h);
    return 0;
}

/* The header of a manifest that is whole. */
static int read_header(const uint8_t *data, size_t len, struct manifest_header *h,
                       struct error *err)
{
    uint64_t sum;
    if (len < sizeof *h)
        return error_set(err, EBADMSG, "manifest: %zu bytes are too short", len);
    memcpy(h, data, sizeof *h);
    if (h->magic != MANIFEST_MAGIC)
        return error_set(err, EBADMSG, "manifest: wrong magic 0x%08x", h->magic);
    if (h->version != MANIFEST_VERSION)
        return error_set(err, ESTALE, "manifest: version %u, this build reads %u: load again",
                         h->version, MANIFEST_VERSION);
    if (!size_add(sizeof *h, (uint64_t)h->n_weights * sizeof(struct slot_form), &sum) ||
        !size_add(sum, h->config_len, &sum) || !size_add(sum, h->dir_len, &sum) ||
        sum != h->total || h->total > len)
        return error_set(err, EBADMSG, "manifest: says %llu bytes, its parts %llu, there are %zu",
                         (unsigned long long)h->total, (unsigned long long)sum, len);
    if (checksum_of(data + CHECKED_FROM, h->total - CHECKED_FROM) != h->checksum)
        return error_set(err, EBADMSG, "manifest: checksum differs");
    return 0;
}

static int read_layout(const struct manifest_header *h, const struct model *model,
                       const void *stored, struct weights_layout **ret, struct error *err)
{
    _cleanup_free_ struct slot_form *forms = mem_alloc(h->n_weights, sizeof *forms);
    _cleanup_(weights_layout_freep) struct weights_layout *layout = NULL;
    struct digest digest;
    int r;
    if (h->n_weights != model->n_slots)
        return error_set(err, ESTALE, "manifest: %u tensors, this build wants %u: load again",
                         h->n_weights, model->n_slots);
    if (!forms)
        return error_set(err, ENOMEM, "manifest: no memory for %u tensors", h->n_weights);
    memcpy(forms, stored, h->n_weights * sizeof *forms);
    r = layout_make(model, forms, h->variant, &layout, err);
    if (r < 0)
        return r == -ENOMEM ? r : error_prefix(err, "manifest");
    digest = layout_digest(layout);
    if (!digest_equal(&digest, &h->layout))
        return error_set(err, ESTALE, "manifest: made by a build with another layout: load again");
    layout->digest = h->weights;
    *ret = TAKE(layout);
    return 0;
}

int manifest_read(const void *data, size_t len, struct model **ret_model,
                  struct weights_layout **ret_layout, char **ret_dir, struct error *err)
{
    _cleanup_(model_freep) struct model *model = NULL;
    _cleanup_(weights_layout_freep) struct weights_layout *layout = NULL;
    _cleanup_free_ char *dir = NULL;
    const uint8_t *forms = (const uint8_t *)data + sizeof(struct manifest_header);
    struct manifest_header h;
    const char *config;
    int r = read_header(data, len, &h, err);
    if (r < 0)
        return r;
    config = (const char *)forms + (size_t)h.n_weights * sizeof(struct slot_form);
    if ((r = model_from_config(config, h.config_len, "manifest", &model, err)) < 0 ||
        (r = read_layout(&h, model, forms, &layout, err)) < 0)
        return r;
    model_settle_kv(model, layout);
    dir = strndup(config + h.config_len, h.dir_len);
    if (!dir)
        return error_set(err, ENOMEM, "manifest: no memory");
    if (ret_dir)
        *ret_dir = TAKE(dir);
    *ret_model = TAKE(model);
    *ret_layout = TAKE(layout);
    return 0;
}

int manifest_config(const void *data, size_t len, char **ret, size_t *ret_len, struct error *err)
{
    struct manifest_header h;
    int r = read_header(data, len, &h, err);
    if (r < 0)
        return r;
    const char *config =
        (const char *)data + sizeof h + (size_t)h.n_weights * sizeof(struct slot_form);
    char *copy = mem_alloc((size_t)h.config_len + 1, 1);
    if (!copy)
        return error_set(err, ENOMEM, "manifest: no memory for a config");
    memcpy(copy, config, (size_t)h.config_len);
    *ret = copy;
    *ret_len = (size_t)h.config_len;
    return 0;
}
