/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layouts. What is resident follows from the model alone; what a checkpoint adds is the form of
 * each slot and the prefix of its names. So a layout is made from (model, forms, variant), by the
 * loader from a checkpoint and by an instance from the manifest, and comes out the same.
 */
#include "model/model_private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "model/quant/convert.h"
#include "model/quant/quantize.h"

#define TENSOR_ALIGN 64
#define PAGE_ALIGN 4096

/* A layout owns its arrays, names and constants: it outlives its model. */
struct layout {
    struct weights_layout public;
    struct weight *weights;
    struct weight_source *sources;
    struct buffer text;
    float *constants;
    uint32_t variant, n_sources;
};

void weights_layout_free(struct weights_layout *layout)
{
    struct layout *own = (struct layout *)layout;
    if (!own)
        return;
    for (uint32_t i = 0; i < own->n_sources; i++)
        if (own->sources[i].convert == CONVERT_MADE_INT8 ||
            own->sources[i].convert == CONVERT_MADE_INT4) /* the other pieces only borrow it */
            quant_memo_free(own->sources[i].memo);
    free(own->weights);
    free(own->sources);
    buffer_free(&own->text);
    free(own->constants);
    free(own);
}

bool weights_layout_made(const struct weights_layout *layout)
{
    bool made = false;

    for (uint32_t i = 0; i < layout->n_weights; i++)
        made |= layout->weights[i].made;
    return made;
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

/* A slot in its plain form. */
static int place_plain(const struct model *model, uint32_t i, uint8_t dtype, struct weight *w,
                       struct error *err)
{
    const struct slot *slot = &model->slots[i];
    if (!dtype_is_float(dtype))
        return error_set(err, EINVAL, "%s: dtype %u is no float type",
                         model_text(model, slot->name), dtype);
    if (model->parts[slot->first_part].constant && dtype != EMBER_F32)
        return error_set(err, EINVAL, "%s: a constant of dtype %s, not f32",
                         model_text(model, slot->name), dtype_name(dtype));
    w->row_bytes = (uint64_t)slot->dim[slot->rank - 1] * dtype_size(dtype);
    weight_choose_layout(model, i, w);
    if (!size_mul(weight_rows(w), w->row_bytes, &w->bytes))
        return error_set(err, EOVERFLOW, "%s does not fit an arena", model_text(model, slot->name));
    return 0;
}

/* Places slot i at *at and moves *at behind it. */
static int place(const struct model *model, uint32_t i, const struct slot_form *form, uint64_t *at,
                 struct weight *ret, struct error *err)
{
    const struct slot *slot = &model->slots[i];
    struct weight w = {.dtype = form->dtype,
                       .rank = slot->rank,
                       .offset = size_align(*at, slot->page_start ? PAGE_ALIGN : TENSOR_ALIGN)};
    int r;
    memcpy(w.dim, slot->dim, sizeof w.dim);
    if (form->quant) {
        r = quant_check(model, slot, form, err);
        r = r < 0 ? r : quant_place(model, i, form, &w, err);
    } else if (form->scale_dtype || form->flags)
        r = error_set(err, EINVAL, "%s: scales of a tensor that is not quantised",
                      model_text(model, slot->name));
    else
        r = place_plain(model, i, form->dtype, &w, err);
    if (r < 0)
        return r;
    if (!size_add(w.offset, w.bytes, at) || *at > INT64_MAX)
        return error_set(err, EOVERFLOW, "%s does not fit an arena", model_text(model, slot->name));
    *ret = w;
    return 0;
}

/* Names go to the text as offsets + 1 first, since it moves while it grows; resolve() turns them
 * into pointers. */
static int add_text(struct layout *own, const char *text, const char **ret)
{
    *ret = (const char *)(uintptr_t)(own->text.len + 1);
    return buffer_append(&own->text, text, strlen(text) + 1);
}

static void resolve_text(const struct layout *own, const char **at)
{
    if (*at)
        *at = own->text.data + (uintptr_t)*at - 1;
}

static void resolve(struct layout *own, uint32_t n_weights, uint32_t n_sources)
{
    for (uint32_t i = 0; i < n_weights; i++)
        resolve_text(own, &own->weights[i].name);
    for (uint32_t i = 0; i < n_sources; i++) {
        resolve_text(own, &own->sources[i].tensor);
        resolve_text(own, &own->sources[i].order);
    }
}

static size_t constant_elements(const struct model *model)
{
    size_t n = 0;
    for (uint32_t i = 0; i < model->n_parts; i++)
        n += model->parts[i].constant ? model->parts[i].elements : 0;
    return n;
}

/* The sources of a plain slot; `constants` moves behind those that it takes. */
static int plain_sources(struct layout *own, const struct model *model, const struct slot *slot,
                         uint32_t size, struct weight_source *to, float **constants)
{
    struct buffer name = {0};
    int r = 0;
    for (uint32_t p = 0; p < slot->n_parts && r == 0; p++, to++) {
        const struct part *part = &model->parts[slot->first_part + p];
        to->offset = part->first * size;
        to->bytes = part->elements * size;
        if (part->transposed) {
            to->rows = part->dim[1];
            to->columns = part->dim[2];
        }
        if (part->of_rows)
            to->whole = part_whole(part, &to->before);
        if (part->constant) {
            memcpy(*constants, part->constant, part->elements * sizeof **constants);
            to->constant = *constants;
            *constants += part->elements;
            continue;
        }
        r = model_part_name(model, part, own->variant, &name)
                ? add_text(own, name.data, &to->tensor)
                : -ENOMEM;
    }
    buffer_free(&name);
    return r;
}

static int fill_sources(struct layout *own, const struct model *model)
{
    float *constants = own->constants;
    int r = 0;
    for (uint32_t i = 0; i < model->n_slots && r == 0; i++) {
        const struct slot *slot = &model->slots[i];
        struct weight *w = &own->weights[i];
        struct weight_source *to = own->sources + w->first_source;
        r = add_text(own, model_text(model, slot->name), &w->name);
        if (r == 0)
            r = w->quant ? quant_sources(model, slot, w, own->variant, &own->text, to)
                         : plain_sources(own, model, slot, dtype_size(w->dtype), to, &constants);
    }
    return r;
}

/* Numbers the slots' sources; *ret is how many there are. */
static int count_sources(struct layout *own, const struct model *model,
                         const struct slot_form *forms, uint32_t *ret)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < model->n_slots; i++) {
        const struct slot *slot = &model->slots[i];
        own->weights[i].first_source = (uint32_t)n;
        own->weights[i].n_sources =
            forms[i].quant ? quant_source_count(slot, &forms[i]) : slot->n_parts;
        n += own->weights[i].n_sources;
    }
    *ret = (uint32_t)n;
    own->sources = n > UINT32_MAX ? NULL : mem_alloc(n, sizeof *own->sources);
    own->n_sources = own->sources ? *ret : 0;
    return own->sources ? 0 : -ENOMEM;
}

int layout_make(const struct model *model, const struct slot_form *forms, uint32_t variant,
                struct weights_layout **ret, struct error *err)
{
    _cleanup_(layout_freep) struct layout *own = mem_alloc(1, sizeof *own);
    uint32_t n_sources = 0;
    uint64_t at = 0;
    int r;
    if (!own || !(own->weights = mem_alloc(model->n_slots, sizeof *own->weights)) ||
        !(own->constants = mem_alloc(constant_elements(model), sizeof *own->constants)))
        return error_set(err, ENOMEM, "no memory for a layout of %u tensors", model->n_slots);
    own->variant = variant;
    for (uint32_t i = 0; i < model->n_slots; i++)
        if ((r = place(model, i, &forms[i], &at, &own->weights[i], err)) < 0)
            return r;
    if (count_sources(own, model, forms, &n_sources) < 0 || fill_sources(own, model) < 0)
        return error_set(err, ENOMEM, "no memory for the names of %u tensors", model->n_parts);
    resolve(own, model->n_slots, n_sources);
    own->public = (struct weights_layout){.bytes = size_align(at, PAGE_ALIGN),
                                          .n_weights = model->n_slots,
                                          .n_sources = n_sources,
                                          .weights = own->weights,
                                          .sources = own->sources};
    *ret = &TAKE(own)->public;
    return 0;
}

struct slot_form layout_form(const struct weight *w)
{
    uint32_t made = w->made ? FORM_MADE | (uint32_t)__builtin_ctz(w->group / 16) << 4 : 0;
    return (struct slot_form){
        .dtype = w->dtype,
        .quant = w->quant,
        .scale_dtype = w->scale_dtype,
        .flags = (uint8_t)((w->zero_at ? FORM_ZERO : 0) | (w->order_at ? FORM_ORDER : 0) | made)};
}

int layout_check(const struct model *model, const struct weights_layout *layout, struct error *err)
{
    uint64_t at = 0;
    if (layout->n_weights != model->n_slots)
        return error_set(err, EINVAL, "a layout of %u tensors for a model of %u", layout->n_weights,
                         model->n_slots);
    for (uint32_t i = 0; i < model->n_slots; i++) {
        const struct weight *w = &layout->weights[i];
        struct slot_form form = layout_form(w);
        struct weight want;
        int r = place(model, i, &form, &at, &want, err);
        if (r < 0)
            return error_prefix(err, "layout");
        if (w->rank != want.rank || memcmp(w->dim, want.dim, sizeof w->dim) ||
            w->offset != want.offset || w->bytes != want.bytes || w->row_bytes != want.row_bytes ||
            w->group != want.group || w->groups != want.groups || w->scale_at != want.scale_at ||
            w->zero_at != want.zero_at || w->made != want.made || w->order_at != want.order_at ||
            at > layout->bytes)
            return error_set(err, EINVAL, "the layout's %s is not that of this model",
                             model_text(model, model->slots[i].name));
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
        uint64_t at = (source->before + (matrix * source->rows + k) * source->columns + row) * size;
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

/* `bytes` of floats of a dtype as float32. */
static void widen(const uint8_t *from, uint8_t dtype, uint32_t n, float *to)
{
    if (dtype == EMBER_F32) {
        memcpy(to, from, (size_t)n * sizeof *to);
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, from + 2 * (size_t)i, sizeof half);
        if (dtype == EMBER_BF16)
            memcpy(&to[i], &(uint32_t){(uint32_t)half << 16}, sizeof *to);
        else
            to[i] = quantize_from_f16(half);
    }
}

int layout_read_floats(const struct checkpoint *checkpoint, const struct checkpoint_tensor *t,
                       const struct weight_source *source, uint64_t first, uint32_t n,
                       uint32_t stride, float *to, struct error *err)
{
    const uint32_t k = source->columns, size = dtype_size(t->dtype);
    const struct weight_source turned = {
        .rows = k, .columns = source->block_rows, .before = source->before};
    const uint64_t row_bytes = (uint64_t)k * size;
    _cleanup_free_ uint8_t *rows = NULL;
    int r;
    if (!dtype_is_float(t->dtype) ||
        t->bytes != (source->whole ? source->whole * size : source->rows * row_bytes))
        return error_set(err, EBADMSG, "%s: tensor %s is gone or has changed",
                         checkpoint_dir(checkpoint), t->name);
    rows = mem_alloc(n, row_bytes);
    if (!rows)
        return error_set(err, ENOMEM, "no memory for %u rows of %u", n, k);
    if (source->block_rows)
        r = read_transposed(checkpoint, t, &turned, size, first * row_bytes, rows, n * row_bytes,
                            err);
    else
        r = checkpoint_read(checkpoint, t, source->before * size + first * row_bytes, rows,
                            n * row_bytes, err);
    for (uint32_t i = 0; r == 0 && i < n; i++)
        widen(rows + i * row_bytes, t->dtype, k, to + (size_t)i * stride);
    return r;
}

int weight_source_read(const struct checkpoint *checkpoint, const struct weight *weight,
                       const struct weight_source *source, uint64_t first, void *to, size_t n,
                       struct error *err)
{
    const struct checkpoint_tensor *t;
    const uint32_t size = dtype_size(weight->dtype);
    uint64_t end;
    if (!size_add(first, n, &end) || end > source->bytes)
        return error_set(err, ERANGE, "%s: bytes %llu + %zu of a source of %llu", weight->name,
                         (unsigned long long)first, n, (unsigned long long)source->bytes);
    if (source->constant) {
        memcpy(to, (const uint8_t *)source->constant + first, n);
        return 0;
    }
    t = checkpoint_find(checkpoint, source->tensor);
    if (t && source->convert >= CONVERT_MADE_INT8)
        return quant_made_read(checkpoint, t, source, first, to, n, err);
    if (t && source->convert)
        return convert_read(checkpoint, t, source, first, to, n, err);
    if (!t || t->bytes != (source->whole ? source->whole * size : source->bytes) ||
        t->dtype != weight->dtype)
        return error_set(err, EBADMSG, "%s: tensor %s is gone or has changed",
                         checkpoint_dir(checkpoint), source->tensor);
    if (source->columns)
        return read_transposed(checkpoint, t, source, size, first, to, n, err);
    return checkpoint_read(checkpoint, t, source->before * size + first, to, n, err);
}

/* ---- from a checkpoint ---- */

/* Shapes agree up to leading ones: [1, 8] holds a vector of 8. */
static bool shape_fits(const uint64_t *want, uint8_t rank, const struct checkpoint_tensor *t)
{
    uint32_t skip = t->rank > rank ? (uint32_t)(t->rank - rank) : 0;
    if (t->rank < rank || t->rank > CHECKPOINT_RANK_MAX)
        return false;
    for (uint32_t d = 0; d < skip; d++)
        if (t->dim[d] != 1)
            return false;
    for (uint32_t d = 0; d < rank; d++)
        if (t->dim[skip + d] != want[d])
            return false;
    return true;
}

/* Finds and checks a part's tensor. */
static int find_part(const struct model *model, const struct checkpoint *checkpoint,
                     const struct part *part, uint32_t variant, struct buffer *name,
                     const struct checkpoint_tensor **ret, struct error *err)
{
    uint64_t want[3];
    const uint8_t rank = part_shape(part, want);
    const struct checkpoint_tensor *t;
    char has_text[CHECKPOINT_SHAPE_TEXT], want_text[CHECKPOINT_SHAPE_TEXT];
    if (!model_part_name(model, part, variant, name))
        return error_set(err, ENOMEM, "no memory for a name");
    t = checkpoint_find(checkpoint, name->data);
    if (!t)
        return error_set(err, ENOENT,
                         "%s: tensor %s is missing: the checkpoint is incomplete, or not of the "
                         "architecture \"%s\" that its config.json says",
                         checkpoint_dir(checkpoint), name->data, model->desc.info.architecture);
    if (!shape_fits(want, rank, t))
        return error_set(err, EINVAL, "%s: tensor %s has shape %s; config.json asks for %s",
                         checkpoint_dir(checkpoint), name->data,
                         checkpoint_shape_text(has_text, t->rank, t->dim),
                         checkpoint_shape_text(want_text, rank, want));
    if (!dtype_is_float(t->dtype))
        return error_set(err, ENOTSUP, "%s: tensor %s has dtype %s; bf16, f16 and f32 are read",
                         checkpoint_dir(checkpoint), name->data, t->dtype_name);
    *ret = t;
    return 0;
}

/* A plain slot. */
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

/* Forms of all slots as the checkpoint has them. */
static int find_forms(const struct model *model, const struct checkpoint *checkpoint,
                      uint32_t variant, struct buffer *name, struct slot_form *forms,
                      struct error *err)
{
    int r = 0;
    for (uint32_t i = 0; r >= 0 && i < model->n_slots; i++) {
        r = quant_find(model, checkpoint, &model->slots[i], variant, name, &forms[i], err);
        if (r == 0)
            r = slot_dtype(model, checkpoint, &model->slots[i], variant, name, &forms[i].dtype,
                           err);
    }
    return r < 0 ? r : 0;
}

int model_layout(const struct model *model, const struct checkpoint *checkpoint,
                 const struct quantize_rules *rules, struct weights_layout **ret, struct error *err)
{
    _cleanup_free_ struct slot_form *forms = mem_alloc(model->n_slots, sizeof *forms);
    _cleanup_(buffer_free) struct buffer name = {0};
    uint32_t variant = find_variant(model, checkpoint, &name);
    int r = forms ? find_forms(model, checkpoint, variant, &name, forms, err)
                  : error_set(err, ENOMEM, "no memory for %u tensors", model->n_slots);
    if (r == 0 && rules)
        r = quant_make_forms(model, rules, variant, checkpoint_dir(checkpoint), forms, err);
    return r < 0 ? r : layout_make(model, forms, variant, ret, err);
}
