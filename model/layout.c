/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layouts. What is resident follows from the model alone; what a checkpoint adds is the dtype of
 * each slot and the prefix of its names. So a layout is made from (model, dtypes, variant), by the
 * loader from a checkpoint and by an instance from the manifest, and comes out the same.
 */
#include "model/model_private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define TENSOR_ALIGN 64
#define PAGE_ALIGN 4096

/* A layout owns its arrays, names and constants: it outlives its model. */
struct layout {
    struct weights_layout public;
    struct weight *weights;
    struct weight_source *sources;
    struct buffer text;
    float *constants;
    uint32_t variant;
};

void weights_layout_free(struct weights_layout *layout)
{
    struct layout *own = (struct layout *)layout;
    if (!own)
        return;
    free(own->weights);
    free(own->sources);
    buffer_free(&own->text);
    free(own->constants);
    free(own);
}
/* weights_layout_free takes the public half. */
static void layout_free(struct layout *own)
{
    if (own)
        weights_layout_free(&own->public);
}
DEFINE_CLEANUP(struct layout *, layout_free)

uint32_t layout_variant(const struct weights_layout *layout)
{
    return ((const struct layout *)layout)->variant;
}

static bool dtype_is_float(uint8_t dtype)
{
    return dtype == EMBER_F32 || dtype == EMBER_F16 || dtype == EMBER_BF16;
}

/* Places slot i at *at and moves *at behind it. */
static int place(const struct model *model, uint32_t i, uint8_t dtype, uint64_t *at,
                 struct weight *ret, struct error *err)
{
    const struct slot *slot = &model->slots[i];
    uint64_t start = size_align(*at, slot->page_start ? PAGE_ALIGN : TENSOR_ALIGN);
    struct weight w = {.dtype = dtype,
                       .rank = slot->rank,
                       .offset = start,
                       .first_source = slot->first_part,
                       .n_sources = slot->n_parts};
    if (!dtype_is_float(dtype))
        return error_set(err, EINVAL, "%s: dtype %u is no float type",
                         model_text(model, slot->name), dtype);
    if (model->parts[slot->first_part].constant && dtype != EMBER_F32)
        return error_set(err, EINVAL, "%s: a constant of dtype %s, not f32",
                         model_text(model, slot->name), dtype_name(dtype));
    memcpy(w.dim, slot->dim, sizeof w.dim);
    if (!size_mul(slot->elements, dtype_size(dtype), &w.bytes) || !size_add(start, w.bytes, at) ||
        *at > INT64_MAX)
        return error_set(err, EOVERFLOW, "%s does not fit an arena", model_text(model, slot->name));
    *ret = w;
    return 0;
}

/* Names go to the text as offsets first, since it moves while it grows; resolve() turns them into
 * pointers. */
static int add_text(struct layout *own, const char *text, size_t *ret_at)
{
    *ret_at = own->text.len;
    return buffer_append(&own->text, text, strlen(text) + 1);
}

static int add_names(struct layout *own, const struct model *model, size_t *at_weights,
                     size_t *at_sources)
{
    struct buffer name = {0};
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < model->n_slots; i++)
        r = add_text(own, model_text(model, model->slots[i].name), &at_weights[i]);
    for (uint32_t i = 0; r == 0 && i < model->n_parts; i++)
        if (!model->parts[i].constant)
            r = model_part_name(model, &model->parts[i], own->variant, &name)
                    ? add_text(own, name.data, &at_sources[i])
                    : -ENOMEM;
    buffer_free(&name);
    return r;
}

static void resolve(struct layout *own, const struct model *model, const size_t *at_weights,
                    const size_t *at_sources)
{
    float *constant = own->constants;
    for (uint32_t i = 0; i < model->n_slots; i++)
        own->weights[i].name = own->text.data + at_weights[i];
    for (uint32_t i = 0; i < model->n_parts; i++) {
        const struct part *part = &model->parts[i];
        if (!part->constant) {
            own->sources[i].tensor = own->text.data + at_sources[i];
            continue;
        }
        memcpy(constant, part->constant, part->elements * sizeof *constant);
        own->sources[i].constant = constant;
        constant += part->elements;
    }
}

static size_t constant_elements(const struct model *model)
{
    size_t n = 0;
    for (uint32_t i = 0; i < model->n_parts; i++)
        n += model->parts[i].constant ? model->parts[i].elements : 0;
    return n;
}

static void fill_sources(struct layout *own, const struct model *model)
{
    for (uint32_t i = 0; i < model->n_slots; i++) {
        const struct slot *slot = &model->slots[i];
        uint32_t size = dtype_size(own->weights[i].dtype);
        for (uint32_t p = slot->first_part; p < slot->first_part + slot->n_parts; p++) {
            own->sources[p].offset = model->parts[p].first * size;
            own->sources[p].bytes = model->parts[p].elements * size;
            if (model->parts[p].transposed) {
                own->sources[p].rows = model->parts[p].dim[1];
                own->sources[p].columns = model->parts[p].dim[2];
            }
        }
    }
}

int layout_make(const struct model *model, const uint8_t *dtypes, uint32_t variant,
                struct weights_layout **ret, struct error *err)
{
    _cleanup_(layout_freep) struct layout *own = mem_alloc(1, sizeof *own);
    _cleanup_free_ size_t *at_weights = mem_alloc(model->n_slots, sizeof *at_weights);
    _cleanup_free_ size_t *at_sources = mem_alloc(model->n_parts, sizeof *at_sources);
    uint64_t at = 0;
    int r;
    if (!own || !at_weights || !at_sources ||
        !(own->weights = mem_alloc(model->n_slots, sizeof *own->weights)) ||
        !(own->sources = mem_alloc(model->n_parts, sizeof *own->sources)) ||
        !(own->constants = mem_alloc(constant_elements(model), sizeof *own->constants)))
        return error_set(err, ENOMEM, "no memory for a layout of %u tensors", model->n_slots);
    own->variant = variant;
    for (uint32_t i = 0; i < model->n_slots; i++)
        if ((r = place(model, i, dtypes[i], &at, &own->weights[i], err)) < 0)
            return r;
    if (add_names(own, model, at_weights, at_sources) < 0)
        return error_set(err, ENOMEM, "no memory for the names of %u tensors", model->n_parts);
    fill_sources(own, model);
    resolve(own, model, at_weights, at_sources);
    own->public = (struct weights_layout){.bytes = size_align(at, PAGE_ALIGN),
                                          .n_weights = model->n_slots,
                                          .n_sources = model->n_parts,
                                          .weights = own->weights,
                                          .sources = own->sources};
    *ret = &TAKE(own)->public;
    return 0;
}

int layout_check(const struct model *model, const struct weights_layout *layout, struct error *err)
{
    uint64_t end;
    if (layout->n_weights != model->n_slots)
        return error_set(err, EINVAL, "a layout of %u tensors for a model of %u", layout->n_weights,
                         model->n_slots);
    for (uint32_t i = 0; i < model->n_slots; i++) {
        const struct weight *w = &layout->weights[i];
        const struct slot *s = &model->slots[i];
        if (w->rank != s->rank || memcmp(w->dim, s->dim, sizeof w->dim) ||
            !dtype_is_float(w->dtype) || w->bytes != s->elements * dtype_size(w->dtype) ||
            w->offset % TENSOR_ALIGN || !size_add(w->offset, w->bytes, &end) || end > layout->bytes)
            return error_set(err, EINVAL, "the layout's %s is not that of this model",
                             model_text(model, s->name));
    }
    return 0;
}

/* ---- bytes ---- */

static inline void copy_element(void *to, const void *from, uint32_t size)
{
    if (size == 2)
        memcpy(to, from, 2);
    else
        memcpy(to, from, 4);
}

/*
 * Kept rows [row, row + n) of one matrix are columns of the stored one: a strip of each stored row
 * is read and scattered.
 */
static int read_strip(const struct checkpoint *checkpoint, const struct checkpoint_tensor *t,
                      const struct weight_source *source, uint32_t size, uint64_t matrix,
                      uint32_t row, uint32_t n, uint8_t *to, struct error *err)
{
    _cleanup_free_ uint8_t *strip = mem_alloc(n, size);
    if (!strip)
        return error_set(err, ENOMEM, "no memory for %u elements", n);
    for (uint32_t k = 0; k < source->rows; k++) {
        uint64_t at = ((matrix * source->rows + k) * source->columns + row) * size;
        int r = checkpoint_read(checkpoint, t, at, strip, (size_t)n * size, err);
        if (r < 0)
            return r;
        for (uint32_t i = 0; i < n; i++)
            copy_element(to + ((uint64_t)i * source->rows + k) * size, strip + i * size, size);
    }
    return 0;
}

/* A run of kept bytes: whole rows of one matrix at a time, its ends through a row's buffer. */
static int read_transposed(const struct checkpoint *checkpoint, const struct checkpoint_tensor *t,
                           const struct weight_source *source, uint32_t size, uint64_t first,
                           uint8_t *to, size_t n, struct error *err)
{
    uint64_t row_bytes = (uint64_t)source->rows * size;
    _cleanup_free_ uint8_t *one = mem_alloc(row_bytes, 1);
    if (!one)
        return error_set(err, ENOMEM, "no memory for a row of %u elements", source->rows);
    while (n) {
        uint64_t row = first / row_bytes, skip = first % row_bytes;
        uint64_t left = source->columns - row % source->columns, whole = n / row_bytes;
        bool part = skip || whole == 0;
        uint32_t rows = part ? 1 : (uint32_t)MIN(left, whole);
        size_t used = part ? (size_t)MIN(row_bytes - skip, n) : (size_t)(rows * row_bytes);
        int r = read_strip(checkpoint, t, source, size, row / source->columns,
                           (uint32_t)(row % source->columns), rows, part ? one : to, err);
        if (r < 0)
            return r;
        if (part)
            memcpy(to, one + skip, used);
        to += used;
        first += used;
        n -= used;
    }
    return 0;
}

int weight_source_read(const struct checkpoint *checkpoint, const struct weight *weight,
                       const struct weight_source *source, uint64_t first, void *to, size_t n,
                       struct error *err)
{
    const struct checkpoint_tensor *t;
    uint64_t end;
    if (!size_add(first, n, &end) || end > source->bytes)
        return error_set(err, ERANGE, "%s: bytes %llu + %zu of a source of %llu", weight->name,
                         (unsigned long long)first, n, (unsigned long long)source->bytes);
    if (source->constant) {
        memcpy(to, (const uint8_t *)source->constant + first, n);
        return 0;
    }
    t = checkpoint_find(checkpoint, source->tensor);
    if (!t || t->bytes != source->bytes || t->dtype != weight->dtype)
        return error_set(err, EBADMSG, "%s: tensor %s is gone or has changed",
                         checkpoint_dir(checkpoint), source->tensor);
    if (source->columns)
        return read_transposed(checkpoint, t, source, dtype_size(weight->dtype), first, to, n, err);
    return checkpoint_read(checkpoint, t, first, to, n, err);
}

/* ---- from a checkpoint ---- */

/* "[4, 16]" */
static const char *shape_text(char *out, size_t room, uint32_t rank, const uint64_t *dim)
{
    size_t at = (size_t)snprintf(out, room, "[");
    for (uint32_t d = 0; d < rank && d < CHECKPOINT_RANK_MAX && at < room; d++)
        at += (size_t)snprintf(out + at, room - at, d ? ", %llu" : "%llu",
                               (unsigned long long)dim[d]);
    if (at < room)
        snprintf(out + at, room - at, "]");
    return out;
}

/* Shapes agree up to leading ones: [1, 8] holds a vector of 8. */
static bool shape_fits(const struct part *part, const struct checkpoint_tensor *t)
{
    uint32_t skip = t->rank > part->rank ? (uint32_t)(t->rank - part->rank) : 0;
    if (t->rank < part->rank || t->rank > CHECKPOINT_RANK_MAX)
        return false;
    for (uint32_t d = 0; d < skip; d++)
        if (t->dim[d] != 1)
            return false;
    for (uint32_t d = 0; d < part->rank; d++)
        if (t->dim[skip + d] != part->dim[d])
            return false;
    return true;
}

/* Finds and checks a part's tensor. */
static int find_part(const struct model *model, const struct checkpoint *checkpoint,
                     const struct part *part, uint32_t variant, struct buffer *name,
                     const struct checkpoint_tensor **ret, struct error *err)
{
    uint64_t want[3] = {part->dim[0], part->dim[1], part->dim[2]};
    const struct checkpoint_tensor *t;
    char has_text[96], want_text[96];
    if (!model_part_name(model, part, variant, name))
        return error_set(err, ENOMEM, "no memory for a name");
    t = checkpoint_find(checkpoint, name->data);
    if (!t)
        return error_set(err, ENOENT,
                         "%s: tensor %s is missing: the checkpoint is incomplete, or not of the "
                         "architecture \"%s\" that its config.json says",
                         checkpoint_dir(checkpoint), name->data, model->desc.info.architecture);
    if (!shape_fits(part, t))
        return error_set(err, EINVAL, "%s: tensor %s has shape %s; config.json asks for %s",
                         checkpoint_dir(checkpoint), name->data,
                         shape_text(has_text, sizeof has_text, t->rank, t->dim),
                         shape_text(want_text, sizeof want_text, part->rank, want));
    if (!dtype_is_float(t->dtype))
        return error_set(err, ENOTSUP, "%s: tensor %s has dtype %s; bf16, f16 and f32 are read",
                         checkpoint_dir(checkpoint), name->data, t->dtype_name);
    *ret = t;
    return 0;
}

static int slot_dtype(const struct model *model, const struct checkpoint *checkpoint,
                      const struct slot *slot, uint32_t variant, struct buffer *name, uint8_t *ret,
                      struct error *err)
{
    const struct checkpoint_tensor *first = NULL, *t = NULL;
    for (uint32_t p = slot->first_part; p < slot->first_part + slot->n_parts; p++) {
        int r;
        if (model->parts[p].constant) {
            *ret = EMBER_F32;
            return 0;
        }
        r = find_part(model, checkpoint, &model->parts[p], variant, name, &t, err);
        if (r < 0)
            return r;
        first = first ? first : t;
        if (t->dtype != first->dtype)
            return error_set(
                err, ENOTSUP, "%s: tensor %s is %s but %s, kept as one tensor with it, is %s",
                checkpoint_dir(checkpoint), t->name, t->dtype_name, first->name, first->dtype_name);
    }
    *ret = first->dtype;
    return 0;
}

/* The prefix under which the checkpoint has the embedding; 0 when under none. */
static uint32_t find_variant(const struct model *model, const struct checkpoint *checkpoint,
                             struct buffer *name)
{
    const struct part *embed = &model->parts[model->slots[model->embed].first_part];
    for (uint32_t v = 0; model_part_name(model, embed, v, name); v++)
        if (checkpoint_find(checkpoint, name->data))
            return v;
    return 0;
}

int model_layout(const struct model *model, const struct checkpoint *checkpoint,
                 struct weights_layout **ret, struct error *err)
{
    _cleanup_free_ uint8_t *dtypes = mem_alloc(model->n_slots, 1);
    struct buffer name = {0};
    uint32_t variant = find_variant(model, checkpoint, &name);
    int r = dtypes ? 0 : error_set(err, ENOMEM, "no memory for %u tensors", model->n_slots);
    for (uint32_t i = 0; r == 0 && i < model->n_slots; i++)
        r = slot_dtype(model, checkpoint, &model->slots[i], variant, &name, &dtypes[i], err);
    buffer_free(&name);
    return r < 0 ? r : layout_make(model, dtypes, variant, ret, err);
}
