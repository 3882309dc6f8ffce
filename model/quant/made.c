/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrices that are quantised while they are loaded: which ones, and their bytes.
 *
 * Codes and scales of a part stand in two places and are two sources, but are found together. Who
 * makes the codes leaves the scales in the part's memo, where the scales' readers find them; a row
 * that is not there (another order of reading, no memory) is quantised again, to the same bits. The
 * last scale that is taken frees the memo.
 */
#include "model/model_private.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "model/quant/convert.h"
#include "model/quant/quantize.h"

#define SMALL 1024      /* values; smaller matrices are not worth an error */
#define FEW (1u << 19)  /* smaller ones are q8 under q4: in a large model they are few bytes */
#define GROUP 32        /* values of a scale */
#define GROUP_LARGE 256 /* of q8 where there are many: an eighth of the work on sums */
#define GROUP_HEAD 128  /* of a large head, which meets few rows and makes the logits */
#define ROWS_AT_ONCE 16 /* their floats stay in the second-level cache */
#define ROWS_TURNED 256 /* of a matrix that is stored transposed: each costs a read a column */

/* ---- which ---- */

static const struct slot_form kinds[QUANTIZE_KIND_COUNT] = {
    [QUANTIZE_Q8] = {EMBER_I8, EMBER_QUANT_INT8, EMBER_F16, FORM_MADE},
    [QUANTIZE_Q4] = {EMBER_U8, EMBER_QUANT_INT4, EMBER_F16, FORM_MADE},
};

/* Few weights carry more each, so small matrices have the finer groups (docs/performance.md). */
static uint32_t group_of(const struct model *model, uint32_t i, enum quantize_kind kind)
{
    if (kind != QUANTIZE_Q8 || model->slots[i].elements < FEW)
        return GROUP;
    return i == model->head ? GROUP_HEAD : GROUP_LARGE;
}

static bool may_be_made(const struct model *model, uint32_t i)
{
    const struct slot *slot = &model->slots[i];
    return slot->linear || (slot->table && model->head == i);
}

/* What becomes of a slot unless a pattern says otherwise. */
static enum quantize_kind usual_kind(const struct model *model, uint32_t i,
                                     const struct quantize_rules *rules)
{
    const struct slot *slot = &model->slots[i];
    if (!may_be_made(model, i) || slot->keep || slot->elements < SMALL)
        return QUANTIZE_KEEP;
    return i == model->head || slot->elements < FEW ? QUANTIZE_Q8 : quantize_rules_default(rules);
}

/* What rules have been good for. */
enum use { USE_NONE, USE_VAIN /* matched what is never quantised */, USE_MADE };

/* The kind that the rules choose for a slot by any of its names; says so in `uses`. */
static int choose_kind(const struct model *model, const struct quantize_rules *rules,
                       uint32_t variant, uint32_t i, enum use *uses, enum quantize_kind *ret)
{
    const struct slot *slot = &model->slots[i];
    enum quantize_kind usual = usual_kind(model, i, rules), kind = usual;
    struct buffer name = {0};
    uint32_t best = UINT32_MAX;
    int r = 0;
    for (uint32_t p = 0; p <= slot->n_parts && r == 0; p++) {
        const char *text = model_text(model, slot->name);
        uint32_t line;
        if (p && !model_part_name(model, &model->parts[slot->first_part + p - 1], variant, &name))
            r = -ENOMEM;
        else if (p)
            text = name.data;
        enum quantize_kind k = quantize_rules_choose(rules, text, usual, &line);
        if (r == 0 && line && line < best) {
            best = line;
            kind = k;
        }
    }
    buffer_free(&name);
    if (best != UINT32_MAX && (kind == QUANTIZE_KEEP || may_be_made(model, i)))
        uses[best] = USE_MADE;
    else if (best != UINT32_MAX && uses[best] == USE_NONE)
        uses[best] = USE_VAIN;
    *ret = kind;
    return r;
}

int quant_make_forms(const struct model *model, const struct quantize_rules *rules,
                     uint32_t variant, const char *dir, struct slot_form *forms, struct error *err)
{
    uint32_t n_rules = quantize_rules_count(rules);
    _cleanup_free_ enum use *uses = mem_alloc(n_rules + 1, sizeof *uses);
    if (!uses)
        return error_set(err, ENOMEM, "no memory for %u patterns", n_rules);
    if (model->desc.quant.method != QUANT_NONE)
        return error_set(err, ENOTSUP,
                         "%s: the checkpoint is quantised already; load it as it is, or quantise "
                         "the one it was made from",
                         dir);
    for (uint32_t i = 0; i < model->n_slots; i++) {
        enum quantize_kind kind;
        if (choose_kind(model, rules, variant, i, uses, &kind) < 0)
            return error_set(err, ENOMEM, "no memory for a name");
        if (kind == QUANTIZE_KEEP || !may_be_made(model, i))
            continue;
        forms[i] = kinds[kind];
        forms[i].flags |= (uint8_t)(__builtin_ctz(group_of(model, i, kind) / 16) << 4);
    }
    for (uint32_t line = 1; line <= n_rules; line++)
        if (uses[line] != USE_MADE)
            return error_set(err, EINVAL, "%s: \"%s\" matches %s", dir,
                             quantize_rules_text(rules, line),
                             uses[line] == USE_VAIN
                                 ? "only tensors that are never quantised (norms, biases, ...)"
                                 : "no tensor that an earlier pattern has left");
    return 0;
}

/* ---- what the sources of a part remember ---- */

struct quant_memo {
    pthread_mutex_t lock;
    uint16_t *scales; /* of all rows */
    bool *have;
    uint32_t taken;
};

struct quant_memo *quant_memo_new(void)
{
    struct quant_memo *memo = mem_alloc(1, sizeof *memo);
    if (memo)
        pthread_mutex_init(&memo->lock, NULL);
    return memo;
}

static void memo_clear(struct quant_memo *memo)
{
    free(memo->scales);
    free(memo->have);
    memo->scales = NULL;
    memo->have = NULL;
    memo->taken = 0;
}

void quant_memo_free(struct quant_memo *memo)
{
    if (!memo)
        return;
    memo_clear(memo);
    pthread_mutex_destroy(&memo->lock);
    free(memo);
}

/* A piece of one row. */
struct row {
    const struct weight_source *source;
    struct quantize_form form;
    uint32_t groups;
    uint8_t *codes;
    uint16_t *scales;
};

static void memo_put(const struct row *row, uint64_t number)
{
    struct quant_memo *memo = row->source->memo;
    size_t bytes = row->groups * sizeof *row->scales;
    if (!memo)
        return;
    pthread_mutex_lock(&memo->lock);
    if (!memo->scales && !memo->have) {
        memo->scales = mem_alloc(row->source->rows, bytes);
        memo->have = mem_alloc(row->source->rows, sizeof *memo->have);
    }
    if (memo->scales && memo->have) {
        memcpy(memo->scales + number * row->groups, row->scales, bytes);
        memo->have[number] = true;
    }
    pthread_mutex_unlock(&memo->lock);
}

/* False when the row is not there. */
static bool memo_take(const struct row *row, uint64_t number)
{
    struct quant_memo *memo = row->source->memo;
    bool found;
    if (!memo)
        return false;
    pthread_mutex_lock(&memo->lock);
    found = memo->scales && memo->have && memo->have[number];
    if (found)
        memcpy(row->scales, memo->scales + number * row->groups, row->groups * sizeof *row->scales);
    if (++memo->taken == row->source->rows)
        memo_clear(memo);
    pthread_mutex_unlock(&memo->lock);
    return found;
}

/* ---- bytes ---- */

static bool makes_codes(const struct weight_source *source)
{
    return source->convert == CONVERT_MADE_INT8 || source->convert == CONVERT_MADE_INT4;
}

static struct quantize_form form_of(const struct weight_source *source)
{
    bool int8 = source->convert == CONVERT_MADE_INT8 || source->convert == CONVERT_MADE_SCALES8;
    return (struct quantize_form){.quant = int8 ? EMBER_QUANT_INT8 : EMBER_QUANT_INT4,
                                  .group = source->group};
}

static void row_free(struct row *row)
{
    free(row->codes);
    free(row->scales);
}

static int row_new(const struct weight_source *source, struct row *ret, struct error *err)
{
    *ret = (struct row){.source = source, .form = form_of(source)};
    ret->groups = (source->columns + source->group - 1) / source->group;
    ret->codes = mem_alloc(size_align(source->columns, 32), 1);
    ret->scales = mem_alloc(ret->groups, sizeof *ret->scales);
    return ret->codes && ret->scales
               ? 0
               : error_set(err, ENOMEM, "no memory for a row of %u weights", source->columns);
}

static int make_row(const struct row *row, const struct checkpoint_tensor *t, uint64_t number,
                    const float *w, struct error *err)
{
    int r = quantize_row(&row->form, w, row->source->columns, row->codes, row->scales);
    if (r == -EDOM)
        return error_set(
            err, EINVAL,
            "tensor %s: row %llu holds a NaN or an infinity, which cannot be quantised", t->name,
            (unsigned long long)number);
    if (r == -ERANGE)
        return error_set(err, EINVAL,
                         "tensor %s: row %llu holds values that are too large for scales of 16 "
                         "bits; keep it (keep=%s)",
                         t->name, (unsigned long long)number, t->name);
    return 0;
}

/* The part of row `number`'s piece that lies in bytes [first, first + n) of the source. */
static void copy_piece(const struct row *row, uint64_t number, uint64_t first, uint8_t *to,
                       size_t n)
{
    const struct weight_source *s = row->source;
    const uint64_t start = number * s->row_bytes, from = MAX(start, first),
                   end = MIN(start + s->row_bytes, first + n);
    const void *piece = makes_codes(s) ? (const void *)row->codes : (const void *)row->scales;
    memcpy(to + (from - first), (const uint8_t *)piece + (from - start), end - from);
}

/* Rows [number, number + rows), read and quantised. */
static int make_rows(const struct checkpoint *checkpoint, const struct checkpoint_tensor *t,
                     const struct row *row, uint64_t number, uint32_t rows, float *floats,
                     uint64_t first, uint8_t *to, size_t n, struct error *err)
{
    uint32_t stride = (uint32_t)size_align(row->source->columns, 32);
    int r = layout_read_floats(checkpoint, t, row->source, number, rows, stride, floats, err);
    for (uint32_t i = 0; i < rows && r == 0; i++) {
        r = make_row(row, t, number + i, floats + (size_t)i * stride, err);
        if (r == 0 && makes_codes(row->source))
            memo_put(row, number + i);
        if (r == 0)
            copy_piece(row, number + i, first, to, n);
    }
    return r;
}

int quant_made_read(const struct checkpoint *checkpoint, const struct checkpoint_tensor *t,
                    const struct weight_source *source, uint64_t first, void *to, size_t n,
                    struct error *err)
{
    uint64_t number = first / source->row_bytes,
             end = (first + n + source->row_bytes - 1) / source->row_bytes;
    uint32_t most = source->block_rows ? ROWS_TURNED : ROWS_AT_ONCE;
    uint64_t stride = size_align(source->columns, 32);
    _cleanup_free_ float *floats = mem_alloc(MIN(most, end - number), stride * sizeof *floats);
    _cleanup_(row_free) struct row row;
    int r = row_new(source, &row, err);
    if (r == 0 && !floats)
        r = error_set(err, ENOMEM, "no memory for rows of %u weights", source->columns);
    while (r == 0 && number < end) {
        uint32_t rows = (uint32_t)MIN(most, end - number);
        if (!makes_codes(source) && memo_take(&row, number)) {
            copy_piece(&row, number++, first, to, n);
            continue;
        }
        rows = makes_codes(source) ? rows : 1;
        r = make_rows(checkpoint, t, &row, number, rows, floats, first, to, n, err);
        number += rows;
    }
    return r;
}

/* ---- what it did ---- */

static void add_error(const struct row *row, const float *w, float *value, struct weight_error *sum)
{
    uint32_t k = row->source->columns;
    quantize_value(&row->form, row->codes, row->scales, k, value);
    for (uint32_t i = 0; i < k; i++) {
        double difference = (double)value[i] - w[i];
        sum->error += difference * difference;
        sum->power += (double)w[i] * w[i];
    }
}

static int part_error(const struct checkpoint *checkpoint, const struct weight_source *source,
                      struct weight_error *sum, struct error *err)
{
    const struct checkpoint_tensor *t = checkpoint_find(checkpoint, source->tensor);
    uint32_t most = source->block_rows ? ROWS_TURNED : ROWS_AT_ONCE;
    uint64_t stride = size_align(source->columns, 32);
    _cleanup_free_ float *floats = mem_alloc(most + 1, stride * sizeof *floats);
    _cleanup_(row_free) struct row row;
    int r = row_new(source, &row, err);
    if (r == 0 && (!floats || !t))
        r = t ? error_set(err, ENOMEM, "no memory for rows of %u weights", source->columns)
              : error_set(err, EBADMSG, "%s: tensor %s is gone", checkpoint_dir(checkpoint),
                          source->tensor);
    for (uint64_t number = 0; r == 0 && number < source->rows; number += most) {
        uint32_t rows = (uint32_t)MIN(most, source->rows - number);
        r = layout_read_floats(checkpoint, t, source, number, rows, (uint32_t)stride, floats, err);
        for (uint32_t i = 0; i < rows && r == 0; i++) {
            r = make_row(&row, t, number + i, floats + i * stride, err);
            if (r == 0)
                add_error(&row, floats + i * stride, floats + most * stride, sum);
        }
    }
    return r;
}

int weight_quantise_error(const struct checkpoint *checkpoint, const struct weights_layout *layout,
                          uint32_t weight, struct weight_error *ret, struct error *err)
{
    const struct weight *w = &layout->weights[weight];
    struct weight_error sum = {0};
    int r = w->made ? 0 : error_set(err, EINVAL, "%s is not quantised here", w->name);
    for (uint32_t s = 0; r == 0 && s < w->n_sources; s++)
        if (makes_codes(&layout->sources[w->first_source + s]))
            r = part_error(checkpoint, &layout->sources[w->first_source + s], &sum, err);
    if (r == 0)
        *ret = sum;
    return r;
}
