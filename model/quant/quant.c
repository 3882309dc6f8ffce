/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantised checkpoints: what quantization_config says, which tensors each form has, where they are
 * kept. Whether a matrix is quantised is what the checkpoint holds for it, so modules that a config
 * leaves out need no rule: their plain tensors are there.
 */
#include "model/model_private.h"

#include <errno.h>
#include <string.h>

#include "model/quant/convert.h"

#define ALIGN 64

/* ---- quantization_config ---- */

static void refuse(struct config *config, const char *method, const char *why)
{
    config_fail(config, ENOTSUP,
                "weights are quantised (\"%s\": %s), which this build does not read: use another "
                "checkpoint of the model",
                method, why);
}

/* A group of 4-bit codes: a multiple of 32, or -1 for whole rows. */
static uint32_t read_group(struct config *config, json_t *q, const char *method)
{
    int64_t group = config_int(config, q, "group_size", CONFIG_REQUIRED, -1, 1 << 20);
    if (group == 0 || (group > 0 && group % 32))
        config_fail(config, ENOTSUP,
                    "weights are quantised (\"%s\") in groups of %lld, which this build does not "
                    "read: it reads multiples of 32, and -1",
                    method, (long long)group);
    return group > 0 ? (uint32_t)group : 0;
}

static void read_bits(struct config *config, json_t *q, const char *method)
{
    if (config_int(config, q, "bits|w_bit", 4, 0, 64) != 4)
        refuse(config, method, "bits is not 4");
}

static void read_awq(struct config *config, json_t *q, struct desc_quant *d)
{
    d->method = QUANT_AWQ;
    read_bits(config, q, "awq");
    d->group = read_group(config, q, "awq");
    if (!config_bool(config, q, "zero_point", true))
        refuse(config, "awq", "no zero_point");
    if (strcasecmp(config_string(config, q, "version", "gemm"), "gemm"))
        refuse(config, "awq", "version is not gemm");
}

static void read_gptq(struct config *config, json_t *q, struct desc_quant *d)
{
    const char *format = config_string(config, q, "checkpoint_format", "gptq");
    d->method = QUANT_GPTQ;
    read_bits(config, q, "gptq");
    d->group = read_group(config, q, "gptq");
    d->zero_add = !strcmp(format, "gptq_v2") ? 0 : 1; /* the first format stores zero - 1 */
    if (strcmp(format, "gptq") && strcmp(format, "gptq_v2"))
        refuse(config, "gptq", "checkpoint_format is neither gptq nor gptq_v2");
}

static void read_fp8(struct config *config, json_t *q, struct desc_quant *d)
{
    json_t *block = config_get(config, q, "weight_block_size");
    json_int_t rows = json_integer_value(json_array_get(block, 0));
    json_int_t cols = json_integer_value(json_array_get(block, 1));
    d->method = QUANT_FP8_BLOCK;
    if (json_array_size(block) != 2) {
        refuse(config, "fp8", "no weight_block_size of two numbers");
        return;
    }
    if (rows < 1 || rows > 1 << 20 || cols < 32 || cols > 1 << 20 || cols % 32)
        refuse(config, "fp8", "blocks that are no multiple of 32 columns");
    if (strcmp(config_string(config, q, "fmt", "e4m3"), "e4m3"))
        refuse(config, "fp8", "fmt is not e4m3");
    d->block_rows = (uint32_t)rows;
    d->group = (uint32_t)cols;
}

/* One side (weights, input_activations) of a compressed-tensors group is as described. */
static bool ct_is(struct config *config, json_t *args, int64_t bits, const char *strategy,
                  bool dynamic)
{
    return config_int(config, args, "num_bits", 0, 0, 64) == bits &&
           !strcmp(config_string(config, args, "type", "int"), "int") &&
           !strcmp(config_string(config, args, "strategy", "tensor"), strategy) &&
           config_bool(config, args, "symmetric", true) &&
           config_bool(config, args, "dynamic", false) == dynamic;
}

static void read_ct_packed(struct config *config, json_t *weights, json_t *acts,
                           struct desc_quant *d)
{
    bool channel = ct_is(config, weights, 4, "channel", false);
    json_t *actorder = config_get(config, weights, "actorder");
    d->method = QUANT_CT_PACKED;
    if (acts || !(channel || ct_is(config, weights, 4, "group", false)))
        refuse(config, "compressed-tensors",
               "pack-quantized other than symmetric 4-bit groups or channels with plain "
               "activations");
    if (actorder && (!json_is_string(actorder) || (strcmp(json_string_value(actorder), "weight") &&
                                                   strcmp(json_string_value(actorder), "static"))))
        refuse(config, "compressed-tensors", "actorder that reorders groups");
    d->group = channel ? 0 : read_group(config, weights, "compressed-tensors");
}

static void read_ct_int8(struct config *config, json_t *weights, json_t *acts, struct desc_quant *d)
{
    d->method = QUANT_CT_INT8;
    d->int8_x = acts != NULL;
    if (!ct_is(config, weights, 8, "channel", false) ||
        (acts && !ct_is(config, acts, 8, "token", true)))
        refuse(config, "compressed-tensors",
               "int-quantized other than symmetric 8-bit channels with plain or dynamic 8-bit "
               "activations per token");
}

static void read_compressed(struct config *config, json_t *q, struct desc_quant *d)
{
    const char *format = config_string(config, q, "format", "none");
    json_t *groups = config_get(config, q, "config_groups"), *group, *weights, *acts, *targets;
    void *first = json_object_iter(groups);
    if (json_object_size(groups) != 1) {
        refuse(config, "compressed-tensors", "not one group in config_groups");
        return;
    }
    group = json_object_iter_value(first);
    weights = config_get(config, group, "weights");
    acts = config_get(config, group, "input_activations");
    targets = config_get(config, group, "targets");
    if (json_is_object(config_get(config, group, "output_activations")) ||
        json_is_object(config_get(config, q, "kv_cache_scheme")))
        refuse(config, "compressed-tensors", "output_activations or a kv_cache_scheme");
    else if (json_array_size(targets) != 1 || !json_is_string(json_array_get(targets, 0)) ||
             strcmp(json_string_value(json_array_get(targets, 0)), "Linear"))
        refuse(config, "compressed-tensors", "targets other than \"Linear\"");
    else if (!json_is_object(weights))
        refuse(config, "compressed-tensors", "a group without weights");
    else if (!strcmp(format, "pack-quantized"))
        read_ct_packed(config, weights, acts, d);
    else if (!strcmp(format, "int-quantized"))
        read_ct_int8(config, weights, acts, d);
    else
        config_fail(config, ENOTSUP,
                    "weights are quantised (\"compressed-tensors\", format \"%s\"); pack-quantized "
                    "and int-quantized are read",
                    format);
}

void quant_read(struct config *config, struct desc_quant *ret)
{
    json_t *q = config_get(config, NULL, "quantization_config");
    const char *method;
    if (!q || !json_is_object(q))
        return;
    method = config_string(config, q, "quant_method", "unnamed method");
    if (!strcmp(method, "awq"))
        read_awq(config, q, ret);
    else if (!strcmp(method, "gptq"))
        read_gptq(config, q, ret);
    else if (!strcmp(method, "fp8"))
        read_fp8(config, q, ret);
    else if (!strcmp(method, "compressed-tensors"))
        read_compressed(config, q, ret);
    else if (!strcmp(method, "mxfp4"))
        *ret = (struct desc_quant){.method = QUANT_MXFP4, .group = 32};
    else
        config_fail(config, ENOTSUP,
                    "weights are quantised (\"%s\"), which this build does not read; it reads awq, "
                    "gptq, fp8, compressed-tensors and mxfp4",
                    method);
}

/* ---- tensors of a quantised part ---- */

enum piece { CODES, SCALES, ZEROS, ORDER, PIECES };

static const struct {
    uint8_t quant, codes, scales, zeros; /* enum ember_quant; conversions */
    const char *suffix[PIECES];          /* instead of ".weight" */
} methods[] = {
    [QUANT_AWQ] = {EMBER_QUANT_INT4,
                   CONVERT_AWQ,
                   CONVERT_TURN,
                   CONVERT_ZERO_AWQ,
                   {".qweight", ".scales", ".qzeros", NULL}},
    [QUANT_GPTQ] = {EMBER_QUANT_INT4,
                    CONVERT_GPTQ,
                    CONVERT_TURN,
                    CONVERT_ZERO_GPTQ,
                    {".qweight", ".scales", ".qzeros", ".g_idx"}},
    [QUANT_FP8_BLOCK] = {EMBER_QUANT_FP8,
                         CONVERT_FP8,
                         CONVERT_BLOCKS,
                         CONVERT_NONE,
                         {".weight", ".weight_scale_inv", NULL, NULL}},
    [QUANT_CT_PACKED] = {EMBER_QUANT_INT4,
                         CONVERT_PACKED,
                         CONVERT_COPY,
                         CONVERT_NONE,
                         {".weight_packed", ".weight_scale", NULL, NULL}},
    [QUANT_CT_INT8] = {EMBER_QUANT_INT8,
                       CONVERT_COPY,
                       CONVERT_COPY,
                       CONVERT_NONE,
                       {".weight", ".weight_scale", NULL, NULL}},
    [QUANT_MXFP4] = {EMBER_QUANT_FP4,
                     CONVERT_MXFP4,
                     CONVERT_E8M0,
                     CONVERT_NONE,
                     {"_blocks", "_scales", NULL, NULL}},
};

static uint8_t code_dtype(uint8_t quant)
{
    return quant == EMBER_QUANT_INT8 ? EMBER_I8 : quant == EMBER_QUANT_FP8 ? EMBER_F8 : EMBER_U8;
}

/* Columns of a slot's matrices, and the scales that cover a row of them. */
static uint32_t columns(const struct slot *slot)
{
    return slot->dim[slot->rank - 1];
}
/* Bytes of a row of k codes, not filled up. */
static uint32_t code_bytes(uint8_t quant, uint32_t k)
{
    bool four = quant == EMBER_QUANT_INT4 || quant == EMBER_QUANT_FP4;
    return four ? (uint32_t)size_align(k, 32) / 2 : k;
}
static uint32_t group_of(const struct model *model, uint32_t k)
{
    uint32_t group = model->desc.quant.group;
    return group ? group : (uint32_t)size_align(k, 32);
}
static uint32_t count_groups(uint32_t k, uint32_t group)
{
    return (uint32_t)(((uint64_t)k + group - 1) / group);
}
static uint32_t groups_of(const struct model *model, uint32_t k)
{
    return count_groups(k, group_of(model, k));
}

static int piece_name(const struct model *model, const struct part *part, uint32_t variant,
                      enum piece piece, struct buffer *name)
{
    const char *suffix = methods[model->desc.quant.method].suffix[piece];
    if (!model_part_name(model, part, variant, name))
        return -ENOMEM;
    if (name->len > 7 && !strcmp(name->data + name->len - 7, ".weight"))
        name->len -= 7;
    return buffer_printf(name, "%s", suffix);
}

/*
 * Groups along the rows of a matrix that is kept transposed, of blocks of the stored one: as large
 * as they can be so that none of them reaches over two blocks, wherever its head begins.
 */
static uint32_t turned_group(const struct model *model, const struct slot *slot)
{
    uint32_t a = model->desc.quant.block_rows, b;
    for (uint32_t p = 0; p < slot->n_parts; p++)
        for (b = model->parts[slot->first_part + p].from_row; b;) {
            uint32_t rest = a % b;
            a = b;
            b = rest;
        }
    return a;
}

/* The group of a slot that the checkpoint has quantised. */
static uint32_t slot_group(const struct model *model, const struct slot *slot)
{
    const struct part *part = &model->parts[slot->first_part];
    bool turned = part->transposed && model->desc.quant.method == QUANT_FP8_BLOCK;
    return turned ? turned_group(model, slot) : group_of(model, columns(slot));
}

/* What a piece of a part must be: dtype (255: any float) and shape. */
struct want {
    uint8_t dtype, rank;
    uint64_t dim[CHECKPOINT_RANK_MAX];
};
#define ANY_FLOAT 255

static struct want piece_want(const struct model *model, const struct part *part, enum piece piece)
{
    const struct desc_quant *q = &model->desc.quant;
    uint64_t shape[3], n, k, g;
    part_shape(part, shape);
    n = shape[0];
    k = shape[1];
    g = groups_of(model, (uint32_t)k);
    switch (q->method) {
    case QUANT_AWQ:
    case QUANT_GPTQ:
        if (piece == CODES)
            return q->method == QUANT_AWQ ? (struct want){EMBER_I32, 2, {k, n / 8}}
                                          : (struct want){EMBER_I32, 2, {k / 8, n}};
        if (piece == SCALES)
            return (struct want){ANY_FLOAT, 2, {g, n}};
        return piece == ZEROS ? (struct want){EMBER_I32, 2, {g, n / 8}}
                              : (struct want){EMBER_I32, 1, {k}};
    case QUANT_FP8_BLOCK:
        return piece == CODES
                   ? (struct want){EMBER_F8, 2, {n, k}}
                   : (struct want){ANY_FLOAT, 2, {(n + q->block_rows - 1) / q->block_rows, g}};
    case QUANT_CT_PACKED:
        return piece == CODES ? (struct want){EMBER_I32, 2, {n, (k + 7) / 8}}
                              : (struct want){ANY_FLOAT, 2, {n, g}};
    case QUANT_CT_INT8:
        return piece == CODES ? (struct want){EMBER_I8, 2, {n, k}}
                              : (struct want){ANY_FLOAT, 2, {n, 1}};
    default: /* a stack [E, K, N] by the names of the plain form, kept as [E, N, K] */
        return piece == CODES ? (struct want){EMBER_U8, 4, {n, part->dim[2], k / 32, 16}}
                              : (struct want){EMBER_U8, 3, {n, part->dim[2], k / 32}};
    }
}

/* The tensor of a piece, checked. 0, -ENOENT (missing; no text) or an error. */
static int find_piece(const struct model *model, const struct checkpoint *checkpoint,
                      const struct part *part, uint32_t variant, enum piece piece,
                      struct buffer *name, const struct checkpoint_tensor **ret, struct error *err)
{
    struct want want = piece_want(model, part, piece);
    const struct checkpoint_tensor *t;
    char has[CHECKPOINT_SHAPE_TEXT], wants[CHECKPOINT_SHAPE_TEXT];
    if (piece_name(model, part, variant, piece, name) < 0)
        return error_set(err, ENOMEM, "no memory for a name");
    t = checkpoint_find(checkpoint, name->data);
    if (!t)
        return -ENOENT;
    if (want.dtype == ANY_FLOAT ? !dtype_is_float(t->dtype) : t->dtype != want.dtype)
        return error_set(err, EINVAL, "%s: tensor %s has dtype %s, not %s",
                         checkpoint_dir(checkpoint), t->name, t->dtype_name,
                         want.dtype == ANY_FLOAT  ? "F32, F16 or BF16"
                         : want.dtype == EMBER_F8 ? "F8_E4M3"
                                                  : dtype_name(want.dtype));
    if (t->rank != want.rank || memcmp(t->dim, want.dim, want.rank * sizeof *want.dim))
        return error_set(err, EINVAL, "%s: tensor %s has shape %s; config.json asks for %s",
                         checkpoint_dir(checkpoint), t->name,
                         checkpoint_shape_text(has, t->rank, t->dim),
                         checkpoint_shape_text(wants, want.rank, want.dim));
    *ret = t;
    return 0;
}

/* Numbers that the packing does not allow for, before they are divided. */
static int check_part(const struct model *model, const struct part *part, struct error *err)
{
    uint8_t method = model->desc.quant.method;
    uint32_t n = part->dim[0], k = part->dim[1];
    bool words = method == QUANT_AWQ || method == QUANT_GPTQ;
    bool stack = part->rank == 3;
    if (part->of_rows && method == QUANT_FP8_BLOCK)
        return 0;
    if (part->of_rows)
        return error_set(err, ENOTSUP,
                         "tensor %s: kept as matrices of heads, some of them transposed, which is "
                         "read of plain weights and of fp8 in blocks alone",
                         model_text(model, part->name));
    if (stack != (method == QUANT_MXFP4) || (words && (n % 8 || k % 8)) ||
        (stack && (!part->transposed || k % 32)))
        return error_set(err, ENOTSUP,
                         "tensor %s: a matrix of %u by %u is not read in this quantised form",
                         model_text(model, part->name), n, k);
    return 0;
}

/* Are this GPTQ tensor's columns out of their groups' order? 1, 0 or an error. */
static int find_order(const struct model *model, const struct checkpoint *checkpoint,
                      const struct checkpoint_tensor *t, uint32_t k, struct error *err)
{
    uint32_t group = group_of(model, k);
    _cleanup_free_ int32_t *groups = mem_alloc(k, sizeof *groups);
    _cleanup_free_ int32_t *order = mem_alloc(k, sizeof *order);
    bool moved = false;
    int r;
    if (!groups || !order)
        return error_set(err, ENOMEM, "%s: no memory for %u columns", t->name, k);
    if ((r = checkpoint_read(checkpoint, t, 0, groups, k * sizeof *groups, err)) < 0 ||
        (r = convert_order(t->name, groups, k, group, order, err)) < 0)
        return r;
    for (uint32_t i = 0; i < k; i++)
        moved |= order[i] != (int32_t)i;
    return moved;
}

static int missing(const struct checkpoint *checkpoint, const struct buffer *name,
                   struct error *err)
{
    return error_set(err, ENOENT,
                     "%s: tensor %s is missing: the checkpoint is incomplete, or its "
                     "quantization_config is wrong",
                     checkpoint_dir(checkpoint), name->data);
}

/* One part: its codes are there; the rest must be too. */
static int part_form(const struct model *model, const struct checkpoint *checkpoint,
                     const struct part *part, uint32_t variant, struct buffer *name,
                     struct slot_form *form, struct error *err)
{
    const struct checkpoint_tensor *t = NULL;
    uint8_t method = model->desc.quant.method;
    int r = find_piece(model, checkpoint, part, variant, SCALES, name, &t, err);
    if (r < 0)
        return r == -ENOENT ? missing(checkpoint, name, err) : r;
    if (form->quant && t->dtype != form->scale_dtype)
        return error_set(
            err, ENOTSUP, "%s: tensor %s is %s, but those kept as one tensor with it are %s",
            checkpoint_dir(checkpoint), t->name, t->dtype_name, dtype_name(form->scale_dtype));
    form->dtype = code_dtype(methods[method].quant);
    form->quant = methods[method].quant;
    form->scale_dtype = t->dtype;
    if (methods[method].suffix[ZEROS]) {
        r = find_piece(model, checkpoint, part, variant, ZEROS, name, &t, err);
        if (r < 0)
            return r == -ENOENT ? missing(checkpoint, name, err) : r;
        form->flags |= FORM_ZERO;
    }
    if (!methods[method].suffix[ORDER])
        return 0;
    r = find_piece(model, checkpoint, part, variant, ORDER, name, &t, err);
    if (r < 0)
        return r == -ENOENT ? 0 : r;
    r = find_order(model, checkpoint, t, part->dim[1], err);
    if (r > 0)
        form->flags |= FORM_ORDER;
    return r < 0 ? r : 0;
}

/* Does the checkpoint hold this part in quantised form? 1, 0 or an error. */
static int has_codes(const struct model *model, const struct checkpoint *checkpoint,
                     const struct part *part, uint32_t variant, struct buffer *name,
                     struct error *err)
{
    const struct checkpoint_tensor *plain, *codes = NULL;
    int r;
    if (!model_part_name(model, part, variant, name))
        return error_set(err, ENOMEM, "no memory for a name");
    plain = checkpoint_find(checkpoint, name->data);
    if (plain && dtype_is_float(plain->dtype))
        return 0;
    if ((r = check_part(model, part, err)) < 0)
        return r;
    r = find_piece(model, checkpoint, part, variant, CODES, name, &codes, err);
    if (r == -ENOENT)
        return missing(checkpoint, name, err);
    return r < 0 ? r : 1;
}

int quant_find(const struct model *model, const struct checkpoint *checkpoint,
               const struct slot *slot, uint32_t variant, struct buffer *name,
               struct slot_form *ret, struct error *err)
{
    const struct part *parts = &model->parts[slot->first_part];
    struct slot_form form = {0};
    int first = 0, r;
    if (model->desc.quant.method == QUANT_NONE || !slot->linear)
        return 0;
    for (uint32_t p = 0; p < slot->n_parts; p++) {
        r = has_codes(model, checkpoint, &parts[p], variant, name, err);
        if (r < 0)
            return r;
        first = p ? first : r;
        if (r != first)
            return error_set(err, ENOTSUP, "%s: of the parts of %s some are quantised and %s is%s",
                             checkpoint_dir(checkpoint), model_text(model, slot->name),
                             model_text(model, parts[p].name), r ? "" : " not");
        if (r && (r = part_form(model, checkpoint, &parts[p], variant, name, &form, err)) < 0)
            return r;
    }
    if (!first)
        return 0;
    if ((r = quant_check(model, slot, &form, err)) < 0)
        return r;
    *ret = form;
    return 1;
}

/* ---- what is kept ---- */

/* Whether products of integers reach as far. */
static int check_columns(const struct model *model, const struct slot *slot,
                         const struct slot_form *form, struct error *err)
{
    bool integer = form->quant == EMBER_QUANT_INT4 || form->quant == EMBER_QUANT_INT8;
    uint32_t group = form->flags & FORM_MADE ? 32 : slot_group(model, slot);
    if (group % 32 && group < columns(slot))
        return error_set(err, ENOTSUP,
                         "%s: kept transposed, its scales are of %u values each, which is no "
                         "multiple of 32",
                         model_text(model, slot->name), group);
    if (integer && columns(slot) > EMBER_INT8_K_MAX)
        return error_set(err, ENOTSUP, "%s: %u columns; quantised to integers it may have %d",
                         model_text(model, slot->name), columns(slot), EMBER_INT8_K_MAX);
    return 0;
}

/* A form that is made here, of plain tensors. */
static int check_made(const struct model *model, const struct slot *slot,
                      const struct slot_form *form, struct error *err)
{
    bool int8 = form->quant == EMBER_QUANT_INT8;
    if (model->desc.quant.method != QUANT_NONE || !(slot->linear || slot->table) ||
        !(int8 || form->quant == EMBER_QUANT_INT4) || form->dtype != code_dtype(form->quant) ||
        form->scale_dtype != EMBER_F16 || !(form->flags >> 4) || (form->flags & 15) != FORM_MADE)
        return error_set(err, EINVAL, "%s: cannot be quantised as form %u, flags %u",
                         model_text(model, slot->name), form->quant, form->flags);
    return check_columns(model, slot, form, err);
}

int quant_check(const struct model *model, const struct slot *slot, const struct slot_form *form,
                struct error *err)
{
    if (form->flags & FORM_MADE)
        return check_made(model, slot, form, err);
    uint8_t method = model->desc.quant.method;
    const char *name = model_text(model, slot->name);
    uint8_t flags = methods[method].suffix[ZEROS] ? FORM_ZERO : 0;
    if (method == QUANT_NONE || !slot->linear || form->quant != methods[method].quant ||
        form->dtype != code_dtype(form->quant) ||
        !(method == QUANT_MXFP4 ? form->scale_dtype == EMBER_U8
                                : dtype_is_float(form->scale_dtype)) ||
        (form->flags & ~FORM_ORDER) != flags ||
        (form->flags & FORM_ORDER && !methods[method].suffix[ORDER]))
        return error_set(err, EINVAL, "%s: this model's cannot be of quantised form %u, dtype %u",
                         name, form->quant, form->dtype);
    if (form->flags & FORM_ORDER && slot->rank > 2)
        return error_set(err, ENOTSUP, "%s: experts whose columns are out of order", name);
    int r = check_columns(model, slot, form, err);
    for (uint32_t p = 0; p < slot->n_parts && r == 0; p++)
        r = check_part(model, &model->parts[slot->first_part + p], err);
    return r;
}

int quant_place(const struct model *model, uint32_t index, const struct slot_form *form,
                struct weight *w, struct error *err)
{
    const struct slot *slot = &model->slots[index];
    uint64_t k = columns(slot), rows = slot->elements / k, at, n;
    if (rows > UINT32_MAX || k > UINT32_MAX / 8)
        return error_set(err, EOVERFLOW, "%s: %llu rows are too many",
                         model_text(model, slot->name), (unsigned long long)rows);
    w->quant = form->quant;
    w->scale_dtype = form->scale_dtype;
    w->row_bytes = code_bytes(w->quant, columns(slot));
    weight_choose_layout(model, index, w);
    rows = weight_rows(w);
    w->made = form->flags & FORM_MADE;
    w->group = w->made ? 16u << (form->flags >> 4) : slot_group(model, slot);
    w->groups = count_groups(columns(slot), w->group);
    at = size_align(rows * w->row_bytes, ALIGN);
    w->scale_at = at;
    n = rows * w->groups;
    at = size_align(at + n * dtype_size(form->scale_dtype), ALIGN);
    if (form->flags & FORM_ZERO) {
        w->zero_at = at;
        at = size_align(at + n, ALIGN);
    }
    if (form->flags & FORM_ORDER) {
        w->order_at = at;
        at += (uint64_t)slot->n_parts * k * 4;
    }
    w->bytes = at;
    return 0;
}

uint32_t quant_source_count(const struct slot *slot, const struct slot_form *form)
{
    return slot->n_parts *
           (2 + (form->flags & FORM_ZERO ? 1 : 0) + (form->flags & FORM_ORDER ? 1 : 0));
}

static int add_text(struct buffer *text, const char *s, const char **ret)
{
    *ret = (const char *)(uintptr_t)(text->len + 1);
    return buffer_append(text, s, strlen(s) + 1);
}

/* The conversion, rows and width of a piece. */
static void fill_source(const struct model *model, const struct slot *slot, const struct weight *w,
                        const struct part *part, enum piece piece, struct weight_source *s)
{
    uint8_t method = model->desc.quant.method;
    uint32_t size = piece == SCALES ? dtype_size(w->scale_dtype) : 1;
    s->columns = piece == CODES || piece == ORDER ? columns(slot) : w->groups;
    s->group = w->group;
    s->block_rows = model->desc.quant.block_rows;
    s->size = (uint8_t)size;
    s->row_bytes = piece == CODES ? code_bytes(w->quant, columns(slot)) : w->groups * size;
    s->convert = piece == CODES    ? methods[method].codes
                 : piece == SCALES ? methods[method].scales
                                   : methods[method].zeros;
    if (part->of_rows && part->transposed) {
        s->block_columns = model->desc.quant.group;
        s->convert = piece == CODES ? CONVERT_FP8_TURNED : CONVERT_BLOCKS_TURNED;
    }
    if (piece == ZEROS)
        s->size = method == QUANT_GPTQ ? model->desc.quant.zero_add : 0;
    if (piece == ORDER) {
        s->convert = CONVERT_ORDER;
        s->row_bytes = columns(slot) * 4;
    }
}

/* The same for a slot that is quantised here. */
static void fill_made(const struct slot *slot, const struct weight *w, const struct part *part,
                      enum piece piece, struct weight_source *s)
{
    bool int8 = w->quant == EMBER_QUANT_INT8;
    s->columns = columns(slot);
    s->group = w->group;
    s->block_rows = part->transposed ? part->dim[2] : 0;
    if (piece == CODES) {
        s->row_bytes = code_bytes(w->quant, columns(slot));
        s->convert = int8 ? CONVERT_MADE_INT8 : CONVERT_MADE_INT4;
    } else {
        s->row_bytes = w->groups * 2;
        s->convert = int8 ? CONVERT_MADE_SCALES8 : CONVERT_MADE_SCALES4;
    }
}

/* One memory for the sources of each part; without them scales are only found twice. */
static void share_memos(struct weight_source *sources, uint32_t n_sources, uint32_t n_parts)
{
    for (uint32_t p = 0; p < n_parts; p++)
        sources[p].memo = quant_memo_new();
    for (uint32_t i = n_parts; i < n_sources; i++)
        sources[i].memo = sources[i % n_parts].memo;
}

int quant_sources(const struct model *model, const struct slot *slot, const struct weight *w,
                  uint32_t variant, struct buffer *text, struct weight_source *ret)
{
    struct weight_source *first = ret;
    static const uint8_t all[] = {CODES, SCALES, ZEROS, ORDER};
    const uint64_t starts[PIECES] = {0, w->scale_at, w->zero_at, w->order_at};
    struct buffer name = {0};
    uint32_t k = columns(slot);
    int r = 0;
    for (size_t i = 0; i < ARRAY_LEN(all) && r == 0; i++) {
        uint64_t at = starts[all[i]];
        if (all[i] != CODES && !at)
            continue;
        for (uint32_t p = 0; p < slot->n_parts && r == 0; p++, ret++) {
            const struct part *part = &model->parts[slot->first_part + p];
            if (w->made)
                fill_made(slot, w, part, all[i], ret);
            else
                fill_source(model, slot, w, part, all[i], ret);
            if (part->of_rows)
                ret->whole = part_whole(part, &ret->before);
            ret->from_row = part->from_row;
            ret->rows = (uint32_t)(all[i] == ORDER ? 1 : part->elements / k);
            ret->offset = at;
            ret->bytes = (uint64_t)ret->rows * ret->row_bytes;
            at += ret->bytes;
            if (w->made)
                r = model_part_name(model, part, variant, &name) ? 0 : -ENOMEM;
            else
                r = piece_name(model, part, variant, all[i], &name);
            if (r == 0)
                r = add_text(text, name.data, &ret->tensor);
            if (r == 0 && all[i] == CODES && w->order_at)
                r = piece_name(model, part, variant, ORDER, &name);
            if (r == 0 && all[i] == CODES && w->order_at)
                r = add_text(text, name.data, &ret->order);
        }
    }
    buffer_free(&name);
    if (r == 0 && w->made)
        share_memos(first, (uint32_t)(ret - first), slot->n_parts);
    return r;
}
