/* SPDX-License-Identifier: Apache-2.0 */
/* emberctl verify tokenizer: a tokenizer against the ids and texts that a reference gives. */
#include "cli/commands.h"

#include <stdio.h>

#include "cli/output.h"
#include "model/tokenizer/tokenizer.h"

/* One file of cases: prints its mismatches; false when there are any or it cannot be run. */
static bool verify_cases(const struct verb_call *call, const struct tokenizer *tokenizer,
                         const char *path, json_t *list)
{
    _cleanup_(buffer_free) struct buffer report = {0};
    struct error err = {0};
    size_t cases = 0, mismatches = 0;

    int r = tokenizer_verify(tokenizer, path, &report, &cases, &mismatches, &err);
    json_array_append_new(list, json_pack("{s:s, s:I, s:I, s:s, s:s}", "file", path, "cases",
                                          (json_int_t)cases, "mismatches", (json_int_t)mismatches,
                                          "report", report.data ? report.data : "", "error",
                                          r < 0 ? error_text(&err) : ""));
    if (!cli_json(call)) {
        if (r < 0)
            printf("FAIL  %s\n", error_text(&err));
        else
            printf("%s  %s  %zu of %zu cases\n%s", mismatches ? "FAIL" : "pass", path,
                   cases - mismatches, cases, report.data ? report.data : "");
    }
    return r == 0 && !mismatches;
}

int run_verify_tokenizer(const struct verb_call *call)
{
    _cleanup_(tokenizer_freep) struct tokenizer *tokenizer = NULL;
    json_t *list = json_array();
    struct error err = {0};
    bool passed = true;

    if (tokenizer_load(verb_string(call, "tokenizer"), &tokenizer, &err) < 0) {
        json_decref(list);
        return cli_fail(call, &err);
    }
    for (int i = 0; i < call->argc; i++)
        passed &= verify_cases(call, tokenizer, call->argv[i], list);
    if (cli_json(call))
        cli_print_json(json_incref(list));
    json_decref(list);
    return passed ? CLI_OK : CLI_FAILED;
}
