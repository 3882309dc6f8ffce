/* SPDX-License-Identifier: Apache-2.0 */
/* emberctl perplexity. */
#include "cli/commands.h"

#include <stdio.h>
#include <string.h>

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

static int print(const struct verb_call *call, const char *dir, const char *changed,
                 const struct perplexity_report *plain, const struct perplexity_report *then)
{
    static const struct column columns[] = {{"model", "model", 0},
                                            {"tokens", "tokens predicted", COLUMN_NUMBER},
                                            {"perplexity", "perplexity", 0},
                                            {"weights_bytes", "weights", COLUMN_BYTES},
                                            {"load_ms", "loaded in", COLUMN_MS},
                                            {0}};
    static const struct column both[] = {{"model", "model", 0},
                                         {"tokens", "tokens predicted", COLUMN_NUMBER},
                                         {"perplexity", "perplexity", 0},
                                         {"weights_bytes", "weights", COLUMN_BYTES},
                                         {"load_ms", "loaded in", COLUMN_MS},
                                         {"changed", "changed to", 0},
                                         {"changed_perplexity", "perplexity then", 0},
                                         {"change", "change", COLUMN_CHANGE},
                                         {"changed_weights_bytes", "weights then", COLUMN_BYTES},
                                         {"changed_load_ms", "loaded in then", COLUMN_MS},
                                         {0}};
    json_t *json =
        json_pack("{s:s, s:I}", "model", dir, "tokens", (json_int_t)plain->perplexity.tokens);

    add(json, "", plain);
    if (*changed) {
        add(json, "changed_", then);
        json_object_set_new(json, "changed", json_string(changed));
        json_object_set_new(
            json, "change",
            json_real(perplexity_value(&then->perplexity) / perplexity_value(&plain->perplexity) -
                      1));
    }
    return cli_print_object(call, json, *changed ? both : columns);
}

/* "q4, KV int8": what is to be changed. */
static char *change_of(const char *quant, enum kv_kind kv)
{
    const char *name = kv == KV_AUTO ? "" : kv_kind_name(kv);

    return x_printf("%.*s%s%s%s", (int)strcspn(quant, "\n"), quant, *quant && *name ? ", " : "",
                    *name ? "KV " : "", name);
}

int run_perplexity(const struct verb_call *call)
{
    enum kv_kind kv = (enum kv_kind)verb_choice(call, "kv-type");
    struct perplexity_report plain = {0}, then = {0};
    _cleanup_(perplexity_text_free) struct perplexity_text text = {0};
    _cleanup_free_ char *quant = NULL, *changed = NULL;
    const char *dir = call->argv[0];
    struct error err = {0};

    cli_catch_interrupts();
    int r = cli_quant(call, &quant, &err);
    if (r == 0)
        changed = change_of(quant, kv);
    if (r == 0)
        r = perplexity_text(call, dir, &text, &err);
    if (r == 0)
        r = perplexity_run(call, dir, "", KV_AUTO, &text, &plain, &err);
    if (r == 0 && *changed)
        r = perplexity_run(call, dir, quant, kv, &text, &then, &err);
    return r < 0 ? cli_fail(call, &err) : print(call, dir, changed, &plain, &then);
}
