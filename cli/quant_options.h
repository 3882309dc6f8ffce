/* SPDX-License-Identifier: Apache-2.0 */
/* The options by which verbs say what is quantised while a checkpoint is loaded. */
#ifndef EMBER_CLI_QUANT_OPTIONS_H
#define EMBER_CLI_QUANT_OPTIONS_H

#include "base/verbs.h"

/* Rows for a table of options. */
#define CLI_QUANT_OPTIONS                                                                          \
    {"quant", VALUE_ENUM, .limits = "none|q8|q4",                                                  \
     .help = "quantise matrices while they are read: 8 or 4 bits a weight; under q4 the head and " \
             "matrices of fewer than 2^19 values have 8"},                                         \
        {"keep", VALUE_STRING, .repeat = true,                                                     \
         .help = "with --quant: leave tensors whose name matches this pattern as they are"},       \
    {                                                                                              \
        "quant-for", VALUE_STRING,                                                                 \
            .repeat = true,                                                                        \
            .help = "with --quant: PATTERN=q8 or PATTERN=q4 for tensors whose name matches"        \
    }

/*
 * The rules as text (model/quant/rules.h), checked; *ret is "" when --quant is not given or
 * none, and the caller's. -EINVAL: a pattern without --quant, or a malformed one.
 */
int cli_quant(const struct verb_call *call, char **ret, struct error *err);

#endif
