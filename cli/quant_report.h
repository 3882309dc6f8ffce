/* SPDX-License-Identifier: Apache-2.0 */
/* What quantising a checkpoint costs: errors of its tensors and layers, and perplexity. */
#ifndef EMBER_CLI_QUANT_REPORT_H
#define EMBER_CLI_QUANT_REPORT_H

#include <jansson.h>

#include "base/error.h"
#include "base/verbs.h"
#include "model/model.h"

/*
 * Of the checkpoint in `dir`, quantised by `quant` to `layout`. Adds to `json`: "q8_weights" and
 * "q4_weights" (how many have 8 and 4 bits now); "error" (of all quantised weights together: the
 * root of the mean square of differences over that of values), "layers" [{"layer", "error"}],
 * "tensors" [{"tensor", "quant", "error"}] worst first; and, unless --no-perplexity is given or the
 * folder has no tokenizer, "perplexity" before and "quantised_perplexity" after, "change" and
 * "tokens". Shows progress.
 */
int quant_report(const struct verb_call *call, const char *dir, const char *quant,
                 const struct weights_layout *layout, json_t *json, struct error *err);

/* The same for people: layers and the worst tensors, as lines behind those of the pack. */
void quant_report_print(const json_t *json);

#endif
