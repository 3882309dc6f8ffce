/* SPDX-License-Identifier: Apache-2.0 */
/* emberctl pack, pack verify: packs are written and looked through without a daemon. */
#include "cli/commands.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/output.h"
#include "cli/quant_options.h"
#include "cli/quant_report.h"
#include "engine/load.h"
#include "engine/packs.h"
#include "model/pack/pack.h"

static int on_progress(void *ctx, uint64_t done, uint64_t total, const char *phase)
{
    progress_update(ctx, phase, done, total);
    return cli_interrupted;
}

static int on_read(void *ctx, uint64_t done, uint64_t total)
{
    return on_progress(ctx, done, total, "reading");
}

static int on_written(void *ctx, uint64_t done, uint64_t total)
{
    return on_progress(ctx, done, total, "writing");
}

/* Beside the folder, under its name. */
static char *default_output(const char *dir)
{
    size_t len = strlen(dir);

    while (len > 1 && dir[len - 1] == '/')
        len--;
    return x_printf("%.*s.pack", (int)len, dir);
}

static json_t *describe(const char *path, const struct pack *pack)
{
    const struct pack_info *info = pack_info(pack);
    char hex[DIGEST_HEX_SIZE];

    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:I, s:I, s:i}", "file", path, "model",
                     pack_dir(pack), "numbers", *info->recipe ? info->recipe : "the checkpoint's",
                     "layout", info->family, "digest", digest_hex(&pack_layout(pack)->digest, hex),
                     "bytes", (json_int_t)info->file_bytes, "weights_bytes",
                     (json_int_t)info->arena_bytes, "segments", (int)info->segments);
}

static const struct column pack_columns[] = {
    {"file", "pack", COLUMN_TEXT},       {"model", "made from", COLUMN_TEXT},
    {"numbers", "numbers", COLUMN_TEXT}, {"layout", "layout", COLUMN_TEXT},
    {"bytes", "size", COLUMN_BYTES},     {"segments", "segments", COLUMN_NUMBER},
    {"digest", "digest", COLUMN_TEXT},   {0}};

static const struct column quantised_columns[] = {
    {"file", "pack", COLUMN_TEXT},
    {"model", "made from", COLUMN_TEXT},
    {"numbers", "quantised as", COLUMN_TEXT},
    {"layout", "layout", COLUMN_TEXT},
    {"bytes", "size", COLUMN_BYTES},
    {"segments", "segments", COLUMN_NUMBER},
    {"digest", "digest", COLUMN_TEXT},
    {"q8_weights", "weights of 8 bits", COLUMN_NUMBER},
    {"q4_weights", "weights of 4 bits", COLUMN_NUMBER},
    {"error", "error of all weights", COLUMN_ERROR},
    {"tokens", "tokens predicted", COLUMN_NUMBER},
    {"perplexity", "perplexity before", COLUMN_NUMBER},
    {"quantised_perplexity", "perplexity now", COLUMN_NUMBER},
    {"change", "change", COLUMN_CHANGE},
    {0}};

static int write_pack(const struct verb_call *call, const char *dir, const char *quant,
                      const char *output, struct error *err)
{
    struct progress progress;
    struct load_options load = {.quant = quant, .progress = on_read, .ctx = &progress};
    struct pack_write_options options = {
        .rate = verb_bytes(call, "rate"), .progress = on_written, .ctx = &progress};
    struct loaded loaded = {.weights = -1, .manifest = -1};

    progress_begin(&progress, call, dir);
    int r = load_checkpoint(dir, &load, &loaded, err);
    if (r == 0)
        r = packs_write(dir, &loaded.key, quant, loaded.weights, loaded.manifest, output, &options,
                        err);
    loaded_close(&loaded);
    progress_end(&progress);
    return r;
}

int run_pack(const struct verb_call *call)
{
    _cleanup_(pack_freep) struct pack *pack = NULL;
    _cleanup_free_ char *dir = realpath(call->argv[0], NULL), *output = NULL, *quant = NULL;
    const char *asked = verb_string(call, "output");
    struct error err = {0};

    cli_catch_interrupts();
    signal(SIGXFSZ, SIG_IGN); /* a limit on the size of files is an error of the write */
    if (!dir)
        dir = x_strdup(call->argv[0]);
    output = asked ? x_strdup(asked) : default_output(dir);
    int r = cli_quant(call, &quant, &err);
    if (r == 0)
        r = write_pack(call, dir, quant, output, &err);
    if (r == 0)
        r = pack_open(output, &pack, &err);
    if (r < 0)
        return cli_fail(call, &err);
    json_t *json = describe(output, pack);
    if (!*quant)
        return cli_print_object(call, json, pack_columns);
    if (quant_report(call, dir, quant, pack_layout(pack), json, &err) < 0) {
        json_decref(json);
        return cli_fail(call, &err);
    }
    json_t *report = json_incref(json);
    r = cli_print_object(call, json, quantised_columns);
    if (!cli_json(call))
        quant_report_print(report);
    json_decref(report);
    return r;
}

/* ---- verify ---- */

static int verify_segments(const struct verb_call *call, const char *path, const struct pack *pack,
                           json_t *damage, struct error *err)
{
    const struct pack_info *info = pack_info(pack);
    _cleanup_free_ void *buffer = mem_alloc(info->segment_bytes, 1);
    struct progress progress;
    struct error why = {0};

    if (!buffer)
        return error_set(err, ENOMEM, "no memory for a segment");
    progress_begin(&progress, call, path);
    for (uint32_t i = 0; i < info->segments && !cli_interrupted; i++) {
        if (pack_segment_read(pack, i, buffer, &why) < 0)
            json_array_append_new(damage, json_string(why.text));
        progress_update(&progress, "reading", (uint64_t)(i + 1) * info->segment_bytes,
                        info->arena_bytes);
    }
    progress_end(&progress);
    return cli_interrupted ? error_set(err, ECANCELED, "interrupted") : 0;
}

static int verify_one(const struct verb_call *call, const char *path, json_t *list)
{
    _cleanup_(pack_freep) struct pack *pack = NULL;
    json_t *damage = json_array(), *row;
    struct error err = {0};

    int r = pack_open(path, &pack, &err);
    if (r == 0)
        r = verify_segments(call, path, pack, damage, &err);
    if (r < 0)
        json_array_append_new(damage, json_string(error_text(&err)));
    row = pack ? describe(path, pack) : json_pack("{s:s}", "file", path);
    size_t n = json_array_size(damage);
    bool unread = r == -ENOENT || r == -EACCES || r == -EISDIR || r == -ECANCELED;
    json_object_set_new(row, "result", json_string(unread ? "unread" : n ? "damaged" : "whole"));
    for (size_t i = 0; i < n && !cli_json(call); i++)
        fprintf(stderr, "%s\n", json_string_value(json_array_get(damage, i)));
    json_object_set_new(row, "damage", damage);
    json_array_append_new(list, row);
    return r < 0 ? cli_exit(&err) : n ? CLI_FAILED : CLI_OK;
}

int run_pack_verify(const struct verb_call *call)
{
    static const struct column columns[] = {{"result", "RESULT", COLUMN_TEXT},
                                            {"file", "PACK", COLUMN_TEXT},
                                            {"model", "MADE FROM", COLUMN_TEXT},
                                            {"numbers", "NUMBERS", COLUMN_TEXT},
                                            {"layout", "LAYOUT", COLUMN_TEXT},
                                            {"bytes", "SIZE", COLUMN_BYTES},
                                            {0}};
    json_t *list = json_array();
    int status = CLI_OK;

    cli_catch_interrupts();
    for (int i = 0; i < call->argc && !cli_interrupted; i++)
        status = cli_worse(status, verify_one(call, call->argv[i], list));
    cli_print_list(call, list, columns, "");
    return cli_interrupted ? CLI_INTERRUPTED : status;
}
