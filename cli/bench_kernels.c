/* SPDX-License-Identifier: Apache-2.0 */
/* emberctl bench kernels: specialised against not, and against the machine's limits in the same
 * run. */
#include "cli/commands.h"

#include <errno.h>
#include <stdio.h>

#include "cli/output.h"
#include "kernels/backend.h"
#include "kernels/bench.h"

struct view {
    const struct verb_call *call;
    json_t *rows;
    struct error *err;
};

static void print_head(const struct kernels_bench_machine *m)
{
    print_machine(m);
    printf("%-7s %-20s %-18s %11s %11s %7s %9s %9s  %s\n", "model", "what", "kernel", "plain",
           "special", "gain", "of bandw.", "of peak", "");
}

static int on_row(void *user, const struct kernels_bench_machine *m,
                  const struct kernels_bench_row *row)
{
    struct view *view = user;

    if (!row) {
        if (!cli_json(view->call))
            print_head(m);
        return 0;
    }
    json_array_append_new(
        view->rows,
        json_pack("{s:s,s:s,s:s,s:s,s:b,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f}", "model", row->model,
                  "what", row->what, "kernel", row->kernel, "spec", row->spec, "specialised",
                  row->specialised, "plain_ns", row->aot_ns, "special_ns", row->spec_ns, "gain",
                  row->gain, "of_bandwidth", row->bandwidth, "of_peak", row->peak,
                  "read_bytes_per_s", m->read_bytes_per_s, "flops_per_s", m->flops_per_s,
                  "bf16_per_s", m->bf16_per_s, "int8_per_s", m->int8_per_s));
    if (!cli_json(view->call)) {
        printf("%-7s %-20s %-18s %8.1f us %8.1f us %6.1f%% %8.0f%% %8.0f%%  %s\n", row->model,
               row->what, row->kernel, row->aot_ns / 1e3, row->spec_ns / 1e3, row->gain * 100,
               row->bandwidth * 100, row->peak * 100, row->specialised ? "specialised" : "");
        fflush(stdout);
    }
    return cli_interrupted ? error_set(view->err, ECANCELED, "interrupted") : 0;
}

int run_bench_kernels(const struct verb_call *call)
{
    static const char *const models[] = {"tiny", "0.6B", "1.7B", "4B",
                                         "30B-A3B"}; /* as in main.c */
    int model = verb_choice(call, "model");
    struct kernels_bench_options options = {.model = model < 0 ? NULL : models[model],
                                            .kernel = verb_string(call, "kernel"),
                                            .threads = (uint32_t)verb_int(call, "threads"),
                                            .isa = cli_isa(call)};
    struct error err = {0};
    struct view view = {.call = call, .rows = json_array(), .err = &err};

    cli_catch_interrupts();
    int r = kernels_bench(cpu_backend(), &options, on_row, &view, &err);
    if (cli_json(call))
        cli_print_json(json_incref(view.rows));
    json_decref(view.rows);
    return r < 0 ? cli_fail(call, &err) : CLI_OK;
}
