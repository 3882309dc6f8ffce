/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/quant_options.h"

#include <errno.h>
#include <string.h>

#include "model/quant/rules.h"

/* "PATTERN=q8" as the line "q8=PATTERN". */
static int add_for(struct buffer *text, const char *option, struct error *err)
{
    const char *kind = strrchr(option, '=');

    if (!kind || kind == option)
        return error_set(err, EINVAL, "--quant-for \"%s\" is not PATTERN=q8 or PATTERN=q4", option);
    return buffer_printf(text, "\n%s=%.*s", kind + 1, (int)(kind - option), option);
}

int cli_quant(const struct verb_call *call, char **ret, struct error *err)
{
    static const char *const kinds[] = {"none", "q8", "q4"};
    _cleanup_(quantize_rules_freep) struct quantize_rules *rules = NULL;
    _cleanup_(buffer_free) struct buffer text = {0};
    int kind = verb_choice(call, "quant"), r = 0;
    size_t n_keep, n_for;
    const char *const *keep = verb_strings(call, "keep", &n_keep);
    const char *const *other = verb_strings(call, "quant-for", &n_for);

    if (kind <= 0) {
        if (n_keep || n_for)
            return error_set(err, EINVAL, "--keep and --quant-for need --quant=q8 or --quant=q4");
        *ret = x_strdup("");
        return 0;
    }
    r = buffer_printf(&text, "%s", kinds[kind]);
    for (size_t i = 0; i < n_keep && r == 0; i++)
        r = buffer_printf(&text, "\nkeep=%s", keep[i]);
    for (size_t i = 0; i < n_for && r == 0; i++)
        r = add_for(&text, other[i], err);
    if (r == 0)
        r = quantize_rules_parse(text.data, &rules, err);
    if (r < 0)
        return r;
    *ret = x_strdup(text.data);
    return 0;
}
