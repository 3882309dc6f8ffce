/* SPDX-License-Identifier: Apache-2.0 */
/* emberctl perplexity. */
#include "cli/commands.h"

#include "cli/output.h"
#include "cli/perplexity_run.h"
#include "cli/quant_options.h"

static void add(json_t *json, const char *prefix, const struct perplexity_report *r)
{
    char key[64];

    snprintf(key, sizeof key, "%sperplexity", prefix);
    json_object_set_new(json, key, json_real(perplexity_value(&r->perplexity)));
    snprintf(key, sizeof key, "%sweights_bytes", prefix);
    json_object_set_new(json, key, json_integer((json_int_t)r->weights_bytes));
    snprintf(key, sizeof key, "%sload_ms", prefix);
    json_object_set_new(json, key, json_real(r->load_ms));
}

static int print(const struct verb_call *call, const char *dir, const char *word,
                 const struct perplexity_report *plain, const struct perplexity_report *quantised)
{
    static const struct column columns[] = {
        {"model", "model", 0},
        {"tokens", "tokens predicted", COLUMN_NUMBER},
        {"perplexity", "perplexity", 0},
        {"weights_bytes", "weights", COLUMN_BYTES},
        {"load_ms", "loaded in", COLUMN_MS},
        {"quant", "quantised as", 0},
        {"quantised_perplexity", "perplexity then", 0},
        {"change", "change", 0},
        {"quantised_weights_bytes", "weights then", COLUMN_BYTES},
        {"quantised_load_ms", "quantised in", COLUMN_MS},
        {0}};
    json_t *json =
        json_pack("{s:s, s:I}", "model", dir, "tokens", (json_int_t)plain->perplexity.tokens);

    add(json, "", plain);
    if (*word) {
        add(json, "quantised_", quantised);
        json_object_set_new(json, "quant", json_string(word));
        json_object_set_new(json, "change",
                            json_real(perplexity_value(&quantised->perplexity) /
                                          perplexity_value(&plain->perplexity) -
                                      1));
    }
    return cli_print_object(call, json, columns);
}

int run_perplexity(const struct verb_call *call)
{
    struct perplexity_report plain = {0}, quantised = {0};
    _cleanup_(perplexity_text_free) struct perplexity_text text = {0};
    _cleanup_free_ char *quant = NULL;
    const char *dir = call->argv[0];
    struct error err = {0};

    cli_catch_interrupts();
    int r = cli_quant(call, &quant, &err);
    if (r == 0)
        r = perplexity_text(call, dir, &text, &err);
    if (r == 0)
        r = perplexity_run(call, dir, "", &text, &plain, &err);
    if (r == 0 && *quant)
        r = perplexity_run(call, dir, quant, &text, &quantised, &err);
    if (r < 0)
        return cli_fail(call, &err);
    return print(call, dir, *quant ? (quant[1] == '8' ? "q8" : "q4") : "", &plain, &quantised);
}
