/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_load.h"

#include <errno.h>
#include <stdio.h>

#include "base/value.h"
#include "cli/commands.h"
#include "cli/lab.h"
#include "cli/output.h"

static const bench_load_section sections[] = {bench_load_weights, bench_load_tokenizer};

/* All sections of one path; a path that has none of the parts is an error. */
static int bench_path(const struct verb_call *call, const char *path, const char *cache_dir,
                      json_t *rows, struct error *err)
{
    json_t *row = json_pack("{s:s}", "path", path);
    bool any = false;
    int r = 0;

    json_array_append_new(rows, row);
    if (!cli_json(call))
        printf("%s\n", path);
    for (size_t i = 0; i < ARRAY_LEN(sections) && r == 0 && !cli_interrupted; i++) {
        r = sections[i](call, path, cache_dir, row, err);
        any |= r == 0;
        if (r == -ENOENT)
            r = 0;
    }
    return r == 0 && !any && !cli_interrupted ? err->code : r;
}

int run_bench_load(const struct verb_call *call)
{
    _cleanup_free_ char *tiny = NULL;
    json_t *rows = json_array();
    struct error err = {0};
    char *dir = lab_dir_new(false, &err);
    int r = dir ? 0 : err.code;

    cli_catch_interrupts();
    if (r == 0 && !call->argc)
        r = value_expand("%D/models/ember-tiny", &tiny, &err);
    for (int i = 0; r == 0 && i < (tiny ? 1 : call->argc); i++)
        r = bench_path(call, tiny ? tiny : call->argv[i], dir, rows, &err);
    lab_dir_remove(dir);
    if (cli_json(call) && r == 0)
        cli_print_json(json_incref(rows));
    json_decref(rows);
    if (r < 0)
        return cli_fail(call, &err);
    return cli_interrupted ? CLI_INTERRUPTED : CLI_OK;
}
