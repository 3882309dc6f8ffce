/* SPDX-License-Identifier: Apache-2.0 */
/* Perplexity of a checkpoint on a text, loaded and run in this process. */
#ifndef EMBER_CLI_PERPLEXITY_RUN_H
#define EMBER_CLI_PERPLEXITY_RUN_H

#include "base/verbs.h"
#include "engine/load.h"
#include "engine/perplexity.h"

/* Rows for a table of options. */
#define CLI_PERPLEXITY_OPTIONS                                                                     \
    {"text", VALUE_PATH,                                                                           \
     .help = "the text to be predicted (default: one that comes with emberd)"},                    \
        {"window", VALUE_INT, .fallback = "512", .limits = "2..1048576",                           \
         .help = "tokens that are predicted from one another"},                                    \
    {                                                                                              \
        "threads", VALUE_INT, .fallback = "0", .limits = "0..1024",                                \
                              .help = "0: what the machine allows"                                 \
    }

/* A text as the ids of a checkpoint's tokenizer. A form feed in it ends a document: what is behind
 * it is not predicted from what is before. */
struct perplexity_text {
    uint32_t *ids;
    size_t *ends; /* of the documents, in ids */
    size_t n;     /* documents */
};
void perplexity_text_free(struct perplexity_text *text);
/* The text of --text, or the default one. */
int perplexity_text(const struct verb_call *call, const char *dir, struct perplexity_text *ret,
                    struct error *err);

struct perplexity_report {
    struct perplexity perplexity;
    uint64_t weights_bytes;
    double load_ms;
};
/* Loads `dir` with `quant` ("": as it is), runs the text with K and V as `kv` says; shows progress,
 * obeys interrupts. */
int perplexity_run(const struct verb_call *call, const char *dir, const char *quant,
                   enum kv_kind kv, const struct perplexity_text *text,
                   struct perplexity_report *ret, struct error *err);

#endif
