/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/quant_report.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/output.h"
#include "cli/perplexity_run.h"

#define WORST 8 /* tensors that people are shown */

struct entry {
    const char *name; /* of a tensor; the layout's */
    uint8_t quant;
    int layer; /* -1: none */
    uint64_t values;
    struct weight_error e;
};

static double relative(const struct weight_error *e)
{
    return e->power > 0 ? sqrt(e->error / e->power) : 0;
}

static int worst_first(const void *a, const void *b)
{
    double x = relative(&((const struct entry *)a)->e), y = relative(&((const struct entry *)b)->e);

    return x > y ? -1 : x < y;
}

static int layer_of(const char *name)
{
    int layer = -1;

    return sscanf(name, "layers.%d.", &layer) == 1 ? layer : -1;
}

/* Errors of all quantised tensors, in arena order. */
static int measure(const struct checkpoint *checkpoint, const struct weights_layout *layout,
                   struct progress *progress, struct entry *entries, size_t *ret_n,
                   struct error *err)
{
    size_t n = 0;

    for (uint32_t i = 0; i < layout->n_weights; i++) {
        const struct weight *w = &layout->weights[i];
        if (!w->made)
            continue;
        if (cli_interrupted)
            return error_set(err, ECANCELED, "interrupted");
        struct entry *e = &entries[n++];
        *e = (struct entry){.name = w->name,
                            .quant = w->quant,
                            .layer = layer_of(w->name),
                            .values =
                                (uint64_t)w->dim[0] * w->dim[1] * (w->rank > 2 ? w->dim[2] : 1)};
        int r = weight_quantise_error(checkpoint, layout, i, &e->e, err);
        if (r < 0)
            return r;
        progress_update(progress, "comparing", w->offset + w->bytes, layout->bytes);
    }
    *ret_n = n;
    return 0;
}

static void add(struct weight_error *sum, const struct weight_error *e)
{
    sum->error += e->error;
    sum->power += e->power;
}

static json_t *layers_json(const struct entry *entries, size_t n)
{
    json_t *list = json_array();

    for (size_t i = 0; i < n;) {
        struct weight_error sum = {0};
        int layer = entries[i].layer;
        for (; i < n && entries[i].layer == layer; i++)
            add(&sum, &entries[i].e);
        if (layer >= 0)
            json_array_append_new(list,
                                  json_pack("{s:i, s:f}", "layer", layer, "error", relative(&sum)));
    }
    return list;
}

static void to_json(struct entry *entries, size_t n, json_t *json)
{
    json_t *tensors = json_array();
    struct weight_error sum = {0};
    uint64_t q8 = 0, q4 = 0;

    for (size_t i = 0; i < n; i++) {
        add(&sum, &entries[i].e);
        *(entries[i].quant == EMBER_QUANT_INT8 ? &q8 : &q4) += entries[i].values;
    }
    json_object_set_new(json, "q8_weights", json_integer((json_int_t)q8));
    json_object_set_new(json, "q4_weights", json_integer((json_int_t)q4));
    json_object_set_new(json, "error", json_real(relative(&sum)));
    json_object_set_new(json, "layers", layers_json(entries, n));
    qsort(entries, n, sizeof *entries, worst_first);
    for (size_t i = 0; i < n; i++)
        json_array_append_new(tensors,
                              json_pack("{s:s, s:s, s:f}", "tensor", entries[i].name, "quant",
                                        entries[i].quant == EMBER_QUANT_INT8 ? "q8" : "q4", "error",
                                        relative(&entries[i].e)));
    json_object_set_new(json, "tensors", tensors);
}

static int add_errors(const struct verb_call *call, const char *dir,
                      const struct weights_layout *layout, json_t *json, struct error *err)
{
    _cleanup_(checkpoint_freep) struct checkpoint *checkpoint = NULL;
    _cleanup_free_ struct entry *entries = NULL;
    struct progress progress;
    size_t n = 0;

    int r = checkpoint_open(dir, &checkpoint, err);
    if (r < 0)
        return r;
    entries = mem_alloc(layout->n_weights, sizeof *entries);
    if (!entries)
        return error_set(err, ENOMEM, "no memory for %u tensors", layout->n_weights);
    progress_begin(&progress, call, dir);
    r = measure(checkpoint, layout, &progress, entries, &n, err);
    progress_end(&progress);
    if (r == 0)
        to_json(entries, n, json);
    return r;
}

static int add_perplexity(const struct verb_call *call, const char *dir, const char *quant,
                          json_t *json, struct error *err)
{
    _cleanup_(perplexity_text_free) struct perplexity_text text = {0};
    struct perplexity_report plain = {0}, quantised = {0};

    int r = perplexity_text(call, dir, &text, err);
    if (r == 0)
        r = perplexity_run(call, dir, "", KV_AUTO, &text, &plain, err);
    if (r == 0)
        r = perplexity_run(call, dir, quant, KV_AUTO, &text, &quantised, err);
    if (r < 0)
        return r;
    double before = perplexity_value(&plain.perplexity);
    double after = perplexity_value(&quantised.perplexity);
    json_object_set_new(json, "tokens", json_integer((json_int_t)plain.perplexity.tokens));
    json_object_set_new(json, "perplexity", json_real(before));
    json_object_set_new(json, "quantised_perplexity", json_real(after));
    json_object_set_new(json, "change", json_real(after / before - 1));
    return 0;
}

int quant_report(const struct verb_call *call, const char *dir, const char *quant,
                 const struct weights_layout *layout, json_t *json, struct error *err)
{
    _cleanup_free_ char *tokenizer = x_printf("%s/tokenizer.json", dir);

    int r = add_errors(call, dir, layout, json, err);
    if (r < 0 || !verb_flag(call, "perplexity"))
        return r;
    if (access(tokenizer, F_OK) < 0 && !verb_given(call, "text"))
        return 0; /* a checkpoint without words */
    return add_perplexity(call, dir, quant, json, err);
}

void quant_report_print(const json_t *json)
{
    const json_t *layers = json_object_get(json, "layers"),
                 *tensors = json_object_get(json, "tensors"), *item;
    size_t i;

    if (json_array_size(layers))
        printf("errors of layers, percent");
    json_array_foreach(layers, i, item) printf(
        "%s%.3g", i % 12 ? " " : "\n  ", 100 * json_real_value(json_object_get(item, "error")));
    printf("%sworst tensors, percent\n", json_array_size(layers) ? "\n" : "");
    json_array_foreach(tensors, i, item)
    {
        if (i == WORST)
            break;
        printf("  %-28s %s  %.3g\n", json_string_value(json_object_get(item, "tensor")),
               json_string_value(json_object_get(item, "quant")),
               100 * json_real_value(json_object_get(item, "error")));
    }
}
