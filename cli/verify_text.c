/* SPDX-License-Identifier: Apache-2.0 */
/* emberctl verify tokenizer, verify template: text against what a reference gives. */
#include "cli/commands.h"

#include <errno.h>
#include <stdio.h>

#include "cli/output.h"
#include "model/template/template.h"
#include "model/tokenizer/tokenizer.h"

/* Runs the cases of one expected.json on `subject`; mismatches are not errors. */
typedef int (*verify_fn)(const void *subject, const char *path, struct buffer *report,
                         size_t *ret_cases, size_t *ret_mismatches, struct error *err);

/* One file of cases: prints its mismatches; returns an exit code. */
static int verify_cases(const struct verb_call *call, verify_fn verify, const void *subject,
                        const char *path, json_t *list)
{
    _cleanup_(buffer_free) struct buffer report = {0};
    struct error err = {0};
    size_t cases = 0, mismatches = 0;

    int r = verify(subject, path, &report, &cases, &mismatches, &err);
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
    return r < 0 ? cli_exit(&err) : mismatches ? CLI_FAILED : CLI_OK;
}

static int verify_files(const struct verb_call *call, verify_fn verify, const void *subject)
{
    json_t *list = json_array();
    int status = CLI_OK;

    for (int i = 0; i < call->argc; i++)
        status = cli_worse(status, verify_cases(call, verify, subject, call->argv[i], list));
    if (cli_json(call))
        cli_print_json(json_incref(list));
    json_decref(list);
    return status;
}

static int on_tokenizer(const void *tokenizer, const char *path, struct buffer *report,
                        size_t *ret_cases, size_t *ret_mismatches, struct error *err)
{
    return tokenizer_verify(tokenizer, path, report, ret_cases, ret_mismatches, err);
}

int run_verify_tokenizer(const struct verb_call *call)
{
    _cleanup_(tokenizer_freep) struct tokenizer *tokenizer = NULL;
    struct error err = {0};

    if (tokenizer_load(verb_string(call, "tokenizer"), &tokenizer, &err) < 0)
        return cli_fail(call, &err);
    return verify_files(call, on_tokenizer, tokenizer);
}

static int on_template(const void *template, const char *path, struct buffer *report,
                       size_t *ret_cases, size_t *ret_mismatches, struct error *err)
{
    return template_verify_file(template, path, report, ret_cases, ret_mismatches, err);
}

int run_verify_template(const struct verb_call *call)
{
    const char *template = verb_string(call, "template");
    struct error err = {0};

    if (!template) {
        error_set(&err, EINVAL, "which template? give it with --template=FILE");
        cli_fail(call, &err);
        return CLI_USAGE;
    }
    return verify_files(call, on_template, template);
}
