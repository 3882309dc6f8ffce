/* SPDX-License-Identifier: Apache-2.0 */
/*
 * emberctl demo: the degrees of warmth side by side, on a private emberd, each with the same text
 * as proof.
 * ./demo builds everything and runs this.
 */
#include "cli/commands.h"

#include <stdio.h>
#include <string.h>

#include "base/value.h"
#include "cli/lab.h"
#include "cli/measure.h"
#include "cli/output.h"

#define BURST 16
#define POOL 2

static const char question[] = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n";

static const char *const phase_names[] = {"exec", "attach", "kernels", "graphs", "canary"};

struct demo {
    const struct verb_call *call;
    struct lab lab;
    struct lab_options options;
    struct prompt prompt;
    json_t *rows;
    bool same_text;
    char text[512];
};

/* One line of the table. `ready_ms`: what the row is about, from the beginning to READY. */
static void add_row(struct demo *demo, const char *name, double ready_ms, double first_token_ms,
                    double load_ms, const struct start *start)
{
    json_t *row = json_pack("{s:s, s:f, s:f}", "start", name, "ready", ready_ms, "first_token",
                            first_token_ms);

    if (load_ms > 0)
        json_object_set_new(row, "load", json_real(load_ms));
    for (size_t i = 0; i < ARRAY_LEN(phase_names); i++) {
        json_t *ms = json_object_get(start->phases, phase_names[i]);
        if (json_number_value(ms) > 0) /* an early instance is proved behind READY */
            json_object_set(row, phase_names[i], ms);
    }
    json_object_set_new(row, "text", json_string(start->text));
    if (!demo->text[0])
        snprintf(demo->text, sizeof demo->text, "%s", start->text);
    demo->same_text &= !strcmp(demo->text, start->text);
    json_array_append_new(demo->rows, row);
}

static double phase(const struct start *start, const char *name)
{
    return json_number_value(json_object_get(start->phases, name));
}

/* emberd is started, loads the model, starts an instance, answers: all counted from its exec. */
static int whole_start(struct demo *demo, const char *name, struct error *err)
{
    struct start start;

    demo->options.standby = 0;
    int r = lab_start(&demo->lab, &demo->options, false, err);
    if (r == 0)
        r = measure_start(demo->lab.socket, &demo->prompt, demo->lab.exec_ns, false, &start, err);
    if (r < 0)
        return r;
    double ready = start.since_exec_ms - start.first_token_ms + start.spawn_ms;
    add_row(demo, name, ready, start.since_exec_ms, phase(&start, "load"), &start);
    start_free(&start);
    return 0;
}

static int one_spawn(struct demo *demo, const char *name, struct error *err)
{
    struct start start;

    int r = measure_start(demo->lab.socket, &demo->prompt, 0, false, &start, err);
    if (r < 0)
        return r;
    add_row(demo, name, start.spawn_ms, start.first_token_ms, 0, &start);
    start_free(&start);
    return 0;
}

/* The same emberd again, its weights handed over, now with a pool. */
static int fill_pool(struct demo *demo, struct error *err)
{
    _cleanup_(control_freep) struct control *control = NULL;

    demo->options.standby = POOL;
    int r = lab_stop(&demo->lab, false, err);
    if (r == 0)
        r = lab_start(&demo->lab, &demo->options, true, err);
    if (r == 0)
        r = lab_control(&demo->lab, &control, err);
    return r == 0 ? lab_wait_standby(control, POOL, 30000, err) : r;
}

static int burst(struct demo *demo, struct error *err)
{
    struct start starts[BURST] = {0}, *slowest = &starts[0];
    _cleanup_(control_freep) struct control *control = NULL;
    double all;

    int r = lab_control(&demo->lab, &control, err);
    if (r == 0)
        r = lab_wait_standby(control, POOL, 30000, err);
    if (r == 0)
        r = measure_burst(demo->lab.socket, &demo->prompt, BURST, starts, &all, err);
    for (int i = 0; i < BURST && r == 0; i++) {
        if (starts[i].spawn_ms > slowest->spawn_ms)
            slowest = &starts[i];
        demo->same_text &= !strcmp(demo->text, starts[i].text);
    }
    if (r == 0)
        add_row(demo, "16 instances at once, the last", all, slowest->first_token_ms, 0, slowest);
    for (int i = 0; i < BURST; i++)
        start_free(&starts[i]);
    return r;
}

static int run_all(struct demo *demo, struct error *err)
{
    int r = whole_start(demo, "first start ever", err);

    if (r == 0)
        r = lab_stop(&demo->lab, false, err);
    lab_drop_store(&demo->lab);
    if (r == 0)
        r = whole_start(demo, "second start, with caches", err);
    if (r == 0)
        r = one_spawn(demo, "instance, pool empty", err);
    if (r == 0)
        r = fill_pool(demo, err);
    if (r == 0)
        r = one_spawn(demo, "instance, pool warm", err);
    return r == 0 ? burst(demo, err) : r;
}

static int report(struct demo *demo)
{
    static const struct column columns[] = {{"start", "START", COLUMN_TEXT},
                                            {"ready", "TO READY", COLUMN_MS},
                                            {"load", "load", COLUMN_MS},
                                            {"exec", "exec", COLUMN_MS},
                                            {"attach", "attach", COLUMN_MS},
                                            {"kernels", "kernels", COLUMN_MS},
                                            {"graphs", "graphs", COLUMN_MS},
                                            {"canary", "canary", COLUMN_MS},
                                            {"first_token", "FIRST TOKEN", COLUMN_MS},
                                            {0}};

    if (!cli_json(demo->call))
        printf("\n");
    cli_print_list(demo->call, json_incref(demo->rows), columns, "");
    if (cli_json(demo->call))
        return demo->same_text ? CLI_OK : CLI_FAILED;
    printf("\nEach of them, asked \"Who are you?\", answered with the same tokens%s:\n  %s\n",
           demo->same_text ? "" : " -- NO, THEY DIFFER", demo->text);
    printf(
        "\nNext:\n"
        "  build/demo/daemon/emberd &                          serve it, OpenAI clients at "
        "http://127.0.0.1:8000/v1 too\n"
        "  build/demo/cli/emberctl generate --chat \"What is a river?\"\n"
        "  build/demo/cli/emberctl load DIR                    your own checkpoint (Hugging Face "
        "form)\n"
        "  build/demo/cli/emberctl bench spawn                 the same table, measured many "
        "times\n");
    return demo->same_text ? CLI_OK : CLI_FAILED;
}

int run_demo(const struct verb_call *call)
{
    struct demo demo = {.call = call, .rows = json_array(), .same_text = true};
    _cleanup_(tokenizer_freep) struct tokenizer *tokenizer = NULL;
    _cleanup_free_ char *model = NULL;
    _cleanup_free_ uint32_t *ids = NULL;
    struct error err = {0};
    size_t n = 0;

    cli_catch_interrupts();
    int r = value_expand("%D/models/ember-tiny", &model, &err);
    demo.options.model = model;
    if (r == 0)
        r = tokenizer_load(model, &tokenizer, &err);
    if (r == 0)
        r = tokenizer_encode(tokenizer, question, strlen(question), true, &ids, &n, &err);
    demo.prompt = (struct prompt){.ids = ids, .n_ids = n, .new_tokens = 40, .tokenizer = tokenizer};
    if (r == 0)
        r = lab_new(&demo.lab, &err);
    if (r == 0)
        r = run_all(&demo, &err);
    lab_free(&demo.lab);
    int status = r < 0 ? cli_fail(call, &err) : report(&demo);
    json_decref(demo.rows);
    return status;
}
