/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tokenizers: parsing tokenizer.json against mapping its image, and bytes a second of encoding on
 * one core. English is the licences that Debian installs, unless --text names something else; the
 * hard texts are one character a million times, where a quadratic merge would show: they are
 * encoded in two lengths.
 */
#include "cli/bench_load.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/fd.h"
#include "cli/measure.h"
#include "cli/output.h"
#include "engine/tokenizer.h"
#include "model/pack/pack.h"

#define PARSES 3
#define MAPS 25
#define TEXT_BYTES (1u << 20)
#define BUDGET_NS 200000000u /* of one text */

static const char *const licences[] = {"GPL-3",    "GFDL-1.3", "LGPL-2.1", "Apache-2.0",
                                       "Artistic", "GPL-2",    "GFDL-1.2", "MPL-2.0"};

/* At least TEXT_BYTES of English, or of the file that was named. */
static int english(const struct verb_call *call, struct buffer *out, struct error *err)
{
    const char *path = verb_string(call, "text");
    int r = 0;

    for (size_t i = 0; i < (path ? 1 : ARRAY_LEN(licences)) && r == 0; i++) {
        _cleanup_free_ char *file = x_printf("/usr/share/common-licenses/%s", licences[i]);
        _cleanup_free_ char *data = NULL;
        size_t len;
        r = fd_read_file(path ? path : file, 64 << 20, &data, &len, err);
        if (r == -ENOENT && !path)
            r = 0;
        else if (r == 0 && buffer_append(out, data, len) < 0)
            r = error_set(err, ENOMEM, "no memory for a text");
    }
    if (r == 0 && !out->len)
        return error_set(err, ENODATA, "no English text here: name one with --text=FILE");
    for (size_t n = out->len; r == 0 && out->len < TEXT_BYTES;)
        if (buffer_reserve(out, n) < 0 || buffer_append(out, out->data, n) < 0)
            r = error_set(err, ENOMEM, "no memory for a text");
    return r;
}

/* Megabytes (10^6) a second: the best of as many runs as the budget allows, two at least. */
static int encode_rate(const struct tokenizer *t, const char *text, size_t len, double *ret,
                       struct error *err)
{
    uint64_t begin = clock_ns(), best = UINT64_MAX;

    for (int runs = 0; runs < 2 || clock_ns() - begin < BUDGET_NS; runs++) {
        _cleanup_free_ uint32_t *ids = NULL;
        uint64_t start = clock_ns();
        size_t n;
        int r = tokenizer_encode(t, text, len, true, &ids, &n, err);
        if (r < 0)
            return r;
        best = MIN(best, clock_ns() - start);
    }
    *ret = (double)len * 1e3 / (double)MAX(best, 1);
    return 0;
}

static int parse_time(const char *path, double *ret_ms, struct error *err)
{
    double ms[PARSES];

    for (int i = 0; i < PARSES; i++) {
        _cleanup_(tokenizer_freep) struct tokenizer *t = NULL;
        uint64_t start = clock_ns();
        int r = tokenizer_load(path, &t, err);
        if (r < 0)
            return r;
        ms[i] = clock_ms_since(start);
    }
    *ret_ms = quantile(ms, PARSES, 0.5);
    return 0;
}

struct map_times {
    double ms, worst_ms, settle_ms;
};

/* From a cache that is not open to a tokenizer, as a process that starts does it. */
static int map_time(const char *path, const char *cache_dir, struct map_times *ret_times,
                    struct tokenizer **ret, struct error *err)
{
    double ms[MAPS], settle[MAPS];

    for (int i = -1; i < MAPS; i++) {
        _cleanup_(cache_closep) struct cache *cache = NULL;
        _cleanup_(tokenizer_freep) struct tokenizer *t = NULL;
        struct engine_lease *lease = NULL;
        struct cache_stats stats = {0};
        uint64_t start = clock_ns();
        int r = cache_open(cache_dir, NULL, &cache, err);
        if (r == 0)
            r = engine_tokenizer_lease(cache, path, &t, &lease, err);
        double took = clock_ms_since(start);
        start = clock_ns();
        if (r == 0 && lease && engine_lease_settle(lease, err) < 0) {
            engine_lease_free(lease);
            return err->code;
        }
        double settled = clock_ms_since(start);
        if (r == 0)
            r = cache_stats(cache, &stats, err);
        if (r < 0)
            return r;
        if (i >= 0 && stats.builds)
            return error_set(err, EIO, "%s: the cache did not keep the image", path);
        if (i >= 0) {
            ms[i] = took;
            settle[i] = settled;
        }
        if (i == MAPS - 1)
            *ret = TAKE(t);
    }
    ret_times->ms = quantile(ms, MAPS, 0.5);
    ret_times->worst_ms = ms[MAPS - 1]; /* quantile has sorted them */
    ret_times->settle_ms = quantile(settle, MAPS, 0.5);
    return 0;
}

static int hard_texts(const struct verb_call *call, const struct tokenizer *t, json_t *list,
                      struct error *err)
{
    static const struct {
        const char *name, *unit;
    } rows[] = {
        {"one letter", "a"}, {"spaces", " "}, {"newlines", "\n"}, {"emoji", "\xF0\x9F\x98\x80"}};
    _cleanup_(buffer_free) struct buffer text = {0};

    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        double rate, quarter;
        text.len = 0;
        while (text.len < TEXT_BYTES)
            if (buffer_append(&text, rows[i].unit, strlen(rows[i].unit)) < 0)
                return error_set(err, ENOMEM, "no memory for a text");
        int r = encode_rate(t, text.data, text.len, &rate, err);
        if (r == 0)
            r = encode_rate(t, text.data, text.len / 4, &quarter, err);
        if (r < 0)
            return r;
        json_array_append_new(list, json_pack("{s:s, s:f, s:f}", "text", rows[i].name, "mb_per_s",
                                              rate, "quarter_mb_per_s", quarter));
        if (!cli_json(call))
            printf("  encode 1 MiB of %-18s %8.1f MB/s   %8.1f MB/s of a quarter of it\n",
                   rows[i].name, rate, quarter);
    }
    return 0;
}

int bench_load_tokenizer(const struct verb_call *call, const char *path, const char *cache_dir,
                         json_t *row, struct error *err)
{
    _cleanup_(tokenizer_freep) struct tokenizer *t = NULL;
    _cleanup_(buffer_free) struct buffer text = {0};
    double parse_ms = 0, rate = 0;
    struct map_times map = {0};
    const void *image;
    size_t len;

    int r = pack_looks_like(path) ? error_set(err, ENOENT, "%s: a pack has no tokenizer", path)
                                  : parse_time(path, &parse_ms, err);
    if (r == 0)
        r = map_time(path, cache_dir, &map, &t, err);
    if (r == 0)
        r = english(call, &text, err);
    if (r == 0)
        r = encode_rate(t, text.data, text.len, &rate, err);
    if (r < 0)
        return r;
    tokenizer_image(t, &image, &len);
    json_t *hard = json_array();
    json_object_set_new(row, "tokenizer",
                        json_pack("{s:i, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:o}", "vocabulary",
                                  tokenizer_vocab_size(t), "image_bytes", (json_int_t)len,
                                  "parse_ms", parse_ms, "map_ms", map.ms, "map_worst_ms",
                                  map.worst_ms, "settle_ms", map.settle_ms, "parse_to_map",
                                  parse_ms / map.ms, "english_mb_per_s", rate, "hard", hard));
    if (!cli_json(call))
        printf("  tokenizer of %u ids, image of %.1f MB\n"
               "  parse tokenizer.json             %10.2f ms\n"
               "  map the image from the cache     %10.2f ms   target 3 ms; the slowest of %d: "
               "%.2f\n"
               "    parsing against mapping        %10.1fx\n"
               "    its copy, made behind that     %10.2f ms\n"
               "  encode English, one core         %10.1f MB/s   target 10 MB/s\n",
               tokenizer_vocab_size(t), (double)len / 1e6, parse_ms, map.ms, MAPS, map.worst_ms,
               parse_ms / map.ms, map.settle_ms, rate);
    return hard_texts(call, t, hard, err);
}
