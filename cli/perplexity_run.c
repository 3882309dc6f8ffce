/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/perplexity_run.h"

#include <errno.h>
#include <string.h>

#include "base/fd.h"
#include "base/value.h"
#include "cli/output.h"
#include "cli/tokenizer.h"

#define TEXT_MAX (64 * MIB)

void perplexity_text_free(struct perplexity_text *text)
{
    free(text->ids);
    free(text->ends);
}

static int add_document(const struct tokenizer *tokenizer, const char *text, size_t len,
                        struct perplexity_text *to, struct error *err)
{
    size_t n, before = to->n ? to->ends[to->n - 1] : 0;
    _cleanup_free_ uint32_t *ids = NULL;
    void *moved;

    int r = tokenizer_encode(tokenizer, text, len, true, &ids, &n, err);
    if (r < 0)
        return r;
    if ((moved = reallocarray(to->ids, before + n + 1, sizeof *ids)))
        to->ids = moved;
    if (moved && (moved = reallocarray(to->ends, to->n + 1, sizeof *to->ends)))
        to->ends = moved;
    if (!moved)
        return error_set(err, ENOMEM, "no memory for %zu ids", before + n);
    memcpy(to->ids + before, ids, n * sizeof *ids);
    to->ends[to->n++] = before + n;
    return 0;
}

int perplexity_text(const struct verb_call *call, const char *dir, struct perplexity_text *ret,
                    struct error *err)
{
    _cleanup_(tokenizer_freep) struct tokenizer *tokenizer = NULL;
    _cleanup_free_ char *standard = NULL, *text = NULL;
    const char *path = verb_string(call, "text");
    size_t len;

    int r = path ? 0 : value_expand("%D/models/perplexity.txt", &standard, err);
    if (r == 0)
        r = fd_read_file(path ? path : standard, TEXT_MAX, &text, &len, err);
    if (r == 0)
        r = cli_tokenizer(dir, &tokenizer, err);
    for (size_t at = 0; r == 0 && at < len;) {
        size_t n = strcspn(text + at, "\f");
        r = add_document(tokenizer, text + at, n, ret, err);
        at += n + 1;
    }
    if (r == 0 && !ret->n)
        r = error_set(err, EINVAL, "%s: the text is empty", path ? path : standard);
    return r;
}

struct view {
    struct progress progress;
    uint64_t done, total; /* of the text's ids */
};

static int on_load(void *ctx, uint64_t done, uint64_t total)
{
    struct view *view = ctx;

    progress_update(&view->progress, "loading", done, total);
    return cli_interrupted ? -ECANCELED : 0;
}

static int on_step(void *ctx, uint32_t tokens)
{
    struct view *view = ctx;

    view->done += tokens;
    progress_update(&view->progress, "predicting", view->done, view->total);
    return cli_interrupted ? -ECANCELED : 0;
}

static int run(const struct verb_call *call, const struct loaded *loaded, enum kv_kind kv,
               struct view *view, const struct perplexity_text *text, struct perplexity *ret,
               struct error *err)
{
    struct engine_options options = {.threads = (uint32_t)verb_int(call, "threads"),
                                     .weights = loaded->weights,
                                     .manifest = loaded->manifest,
                                     .kv = kv,
                                     .tap_tokens = PERPLEXITY_STEP};
    struct perplexity_options how = {
        .window = (uint32_t)verb_int(call, "window"), .progress = on_step, .ctx = view};
    _cleanup_(engine_freep) struct engine *engine = NULL;

    int r = engine_open(&options, &engine, err);
    for (size_t i = 0, at = 0; r == 0 && i < text->n; at = text->ends[i++])
        r = perplexity_add(engine, text->ids + at, text->ends[i] - at, &how, ret, err);
    if (r == 0 && !ret->tokens)
        r = error_set(err, EINVAL, "the text has no token to predict");
    return r;
}

int perplexity_run(const struct verb_call *call, const char *dir, const char *quant,
                   enum kv_kind kv, const struct perplexity_text *text,
                   struct perplexity_report *ret, struct error *err)
{
    struct view view = {.total = text->ends[text->n - 1]};
    struct load_options options = {.threads = (uint32_t)verb_int(call, "threads"),
                                   .quant = quant,
                                   .progress = on_load,
                                   .ctx = &view};
    struct loaded loaded = {.weights = -1, .manifest = -1};

    progress_begin(&view.progress, call, dir);
    int r = load_checkpoint(dir, &options, &loaded, err);
    if (r == 0) {
        ret->weights_bytes = loaded.bytes;
        ret->load_ms = loaded.ms;
        r = run(call, &loaded, kv, &view, text, &ret->perplexity, err);
    }
    progress_end(&view.progress);
    loaded_close(&loaded);
    return r;
}
