/* SPDX-License-Identifier: Apache-2.0 */
/* emberctl verify: prints what verify_run.h finds. */
#include "cli/commands.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli/output.h"
#include "cli/verify_run.h"

static json_t *number(double value)
{
    return isfinite(value) ? json_real(value) : json_string(isnan(value) ? "nan" : "inf");
}

static double worst_hidden(const struct verify_result *result)
{
    double worst = 0;

    for (uint32_t i = 0; i < result->n_hidden; i++)
        worst = fmax(worst, result->hidden_error[i]);
    return worst;
}

static json_t *to_json(const char *dir, const struct verify_result *result)
{
    char greedy[48];
    json_t *json = json_pack("{s:s, s:s, s:s, s:o, s:i, s:i}", "folder", dir, "form", result->kind,
                             "result", result->passed ? "pass" : "FAIL", "error",
                             number(result->logits_error), "greedy_expected", (int)result->greedy,
                             "greedy_equal", (int)result->greedy_equal);

    snprintf(greedy, sizeof greedy, "%u/%u", result->greedy_equal, result->greedy);
    json_object_set_new(json, "greedy", json_string(greedy));
    if (result->cases) {
        json_object_set_new(json, "cases", json_integer(result->cases));
        json_object_set_new(json, "cases_passed", json_integer(result->cases_passed));
    } else {
        json_object_set_new(json, "cosine", number(result->cosine));
    }
    if (result->n_hidden) {
        json_t *layers = json_array();
        for (uint32_t i = 0; i < result->n_hidden; i++)
            json_array_append_new(layers, number(result->hidden_error[i]));
        json_object_set_new(json, "hidden_errors", layers);
        json_object_set_new(json, "worst_hidden", number(worst_hidden(result)));
        if (result->first_bad_hidden >= 0)
            json_object_set_new(json, "first_bad_hidden", json_integer(result->first_bad_hidden));
    }
    if (result->greedy_equal < result->greedy)
        json_object_set_new(json, "greedy_difference",
                            json_pack("{s:i, s:i}", "expected", (int)result->greedy_want, "got",
                                      (int)result->greedy_got));
    json_object_set_new(json, "detail", json_string(result->detail));
    return json;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

static void print_one(const char *dir, const struct verify_result *r)
{
    char hidden[32] = "";

    if (r->n_hidden)
        snprintf(hidden, sizeof hidden, "  layers %.1e", worst_hidden(r));
    if (*r->kind == '-') { /* nothing was computed */
        printf("FAIL  %s\n      %s\n", base_name(dir), r->detail);
        return;
    }
    printf("%-4s  %-34s  error %.1e", r->passed ? "pass" : "FAIL", base_name(dir), r->logits_error);
    if (r->cases)
        printf("  cases %u/%u", r->cases_passed, r->cases);
    else
        printf("  cosine %.7f", r->cosine);
    printf("  greedy %u/%u%s\n", r->greedy_equal, r->greedy, hidden);
    if (!r->passed)
        printf("      %s\n", r->detail);
    if (!r->passed && r->n_hidden) {
        printf("      hidden:");
        for (uint32_t i = 0; i < r->n_hidden; i++)
            printf(" %u:%.0e%s", i, r->hidden_error[i], (int)i == r->first_bad_hidden ? "!" : "");
        putchar('\n');
    }
}

int run_verify(const struct verb_call *call)
{
    struct verify_options options = {.backend = verb_string(call, "backend"),
                                     .isa = cli_isa(call),
                                     .threads = (uint32_t)verb_int(call, "threads"),
                                     .kv = (enum kv_kind)verb_choice(call, "kv-type"),
                                     .compile = verb_flag(call, "compile"),
                                     .tolerance = verb_real(call, "tolerance")};
    json_t *list = cli_json(call) ? json_array() : NULL;
    int failed = 0, status = CLI_OK;

    for (int i = 0; i < call->argc; i++) {
        struct verify_result *result = x_alloc(sizeof *result);
        struct error err = {0};
        int r = verify_folder(call->argv[i], &options, result, &err);
        if (r < 0) {
            strcpy(result->kind, "-");
            result->passed = false;
            result->logits_error = NAN;
            snprintf(result->detail, sizeof result->detail, "%s", error_text(&err));
        }
        status = cli_worse(status, r < 0 ? cli_exit(&err) : result->passed ? CLI_OK : CLI_FAILED);
        failed += !result->passed;
        if (list)
            json_array_append_new(list, to_json(call->argv[i], result));
        else
            print_one(call->argv[i], result);
        free(result);
    }
    if (list)
        cli_print_json(list);
    else if (call->argc > 1)
        printf("%d of %d passed\n", call->argc - failed, call->argc);
    return status;
}
