/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/verify_run.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/mem.h"
#include "engine/engine.h"
#include "engine/load.h"
#include "engine/sample.h"
#include "model/checkpoint.h"
#include "model/tokenizer/tokenizer.h"

#define IDS_MAX 65536

struct ids {
    uint32_t *id;
    uint32_t n;
};

/* What one folder needs while it is verified. */
struct bench {
    const char *dir;
    const struct verify_options *options;
    struct loaded loaded;
    struct engine *engine;
    uint32_t *pages;
    uint32_t n_pages;
    json_t *json;
    struct tokenizer *tokenizer;
};

static void bench_free(struct bench *b)
{
    engine_free(b->engine);
    loaded_close(&b->loaded);
    free(b->pages);
    json_decref(b->json);
    tokenizer_free(b->tokenizer);
}

static int fail_detail(struct verify_result *ret, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static int fail_detail(struct verify_result *ret, const char *format, ...)
{
    va_list ap;

    ret->passed = false;
    if (ret->detail[0])
        return 0;
    va_start(ap, format);
    vsnprintf(ret->detail, sizeof ret->detail, format, ap);
    va_end(ap);
    return 0;
}

static int read_json(const char *dir, const char *name, json_t **ret, struct error *err)
{
    _cleanup_free_ char *path = x_printf("%s/%s", dir, name), *text = NULL;
    json_error_t e;
    size_t len;

    int r = fd_read_file(path, 64 * MIB, &text, &len, err);
    if (r < 0)
        return r;
    *ret = json_loadb(text, len, 0, &e);
    return *ret ? 0 : error_set(err, EBADMSG, "%s:%d: %s", path, e.line, e.text);
}

static int read_ids(const json_t *object, const char *key, struct ids *ret, struct error *err)
{
    const json_t *list = json_object_get(object, key);
    size_t n = json_array_size(list);

    if (!json_is_array(list) || n > IDS_MAX)
        return error_set(err, EBADMSG, "\"%s\" is not a list of at most %d ids", key, IDS_MAX);
    ret->id = mem_alloc(n, sizeof *ret->id);
    if (!ret->id)
        return error_set(err, ENOMEM, "no memory for %zu ids", n);
    for (size_t i = 0; i < n; i++)
        ret->id[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    ret->n = (uint32_t)n;
    return 0;
}

static int open_bench(struct bench *b, uint32_t tap_tokens, struct error *err)
{
    struct load_options load = {0};
    struct engine_options options = {.backend = b->options->backend,
                                     .isa = b->options->isa,
                                     .threads = b->options->threads,
                                     .kv = b->options->kv,
                                     .compile = b->options->compile,
                                     .cache = b->options->cache,
                                     .tap_tokens = tap_tokens};

    int r = load_checkpoint(b->dir, &load, &b->loaded, err);
    if (r < 0)
        return r;
    options.weights = b->loaded.weights;
    options.manifest = b->loaded.manifest;
    r = engine_open(&options, &b->engine, err);
    if (r < 0)
        return r;
    b->n_pages = engine_limits(b->engine).pages;
    b->pages = mem_alloc(b->n_pages, sizeof *b->pages);
    for (uint32_t i = 0; b->pages && i < b->n_pages; i++)
        b->pages[i] = b->n_pages - 1 - i; /* not in order: paging is verified as well */
    return b->pages ? 0 : error_set(err, ENOMEM, "no memory for %u page numbers", b->n_pages);
}

/* Worst |got - want| over the largest |want|; NaN anywhere is infinite. */
static double relative_error(const float *got, const float *want, size_t n, double *ret_cosine)
{
    double worst = 0, largest = 0, dot = 0, gg = 0, ww = 0;

    for (size_t i = 0; i < n; i++) {
        double difference = fabs((double)got[i] - want[i]);
        if (!(difference <= worst))
            worst = isnan(difference) ? INFINITY : difference;
        largest = fmax(largest, fabs((double)want[i]));
        dot += (double)got[i] * want[i];
        gg += (double)got[i] * got[i];
        ww += (double)want[i] * want[i];
    }
    if (ret_cosine)
        *ret_cosine = gg > 0 && ww > 0 ? dot / sqrt(gg * ww) : 0;
    return largest > 0 ? worst / largest : worst;
}

static int step_once(struct bench *b, const uint32_t *tokens, uint32_t n, uint32_t position,
                     uint32_t prompt_len, bool taps, bool logits, struct engine_result *ret,
                     struct error *err)
{
    struct engine_seq seq = {.tokens = tokens,
                             .n_tokens = n,
                             .position = position,
                             .prompt_len = prompt_len,
                             .pages = b->pages,
                             .n_pages = b->n_pages,
                             .sample = true};
    struct engine_step step = {.seqs = &seq, .n_seqs = 1, .logits = logits, .taps = taps};

    return engine_step(b->engine, &step, ret, err);
}

/* Runs on from the token that the prompt gave; counts how far it agrees. */
static int greedy(struct bench *b, uint32_t prompt_len, uint32_t first, const struct ids *want,
                  struct verify_result *ret, uint32_t *ret_equal, struct error *err)
{
    struct engine_result result;
    uint32_t token = first;

    for (uint32_t i = 0; i < want->n; i++) {
        if (token != want->id[i]) {
            ret->greedy_want = want->id[i];
            ret->greedy_got = token;
            *ret_equal = i;
            return fail_detail(ret, "greedy token %u is %u, expected %u", i, token, want->id[i]);
        }
        if (i + 1 == want->n)
            break;
        int r = step_once(b, &token, 1, prompt_len + i, prompt_len, false, false, &result, err);
        if (r < 0)
            return r;
        token = (uint32_t)result.greedy[0];
    }
    *ret_equal = want->n;
    return 0;
}

static int read_expected(const struct checkpoint *expected, const char *name, uint64_t rows,
                         uint64_t columns, float **ret, struct error *err)
{
    const struct checkpoint_tensor *t = checkpoint_find(expected, name);

    if (!t)
        return 1;
    if (t->dtype != EMBER_F32 || t->rank != 2 || t->dim[0] != rows || t->dim[1] != columns)
        return error_set(err, EBADMSG, "expected %s is not float32 [%llu, %llu]", name,
                         (unsigned long long)rows, (unsigned long long)columns);
    *ret = mem_alloc(t->bytes, 1);
    if (!*ret)
        return error_set(err, ENOMEM, "no memory for expected %s", name);
    return checkpoint_read(expected, t, 0, *ret, t->bytes, err);
}

static int compare_hidden(struct bench *b, const struct checkpoint *expected,
                          const struct engine_result *result, uint32_t tokens,
                          struct verify_result *ret, struct error *err)
{
    const struct model_info *info = engine_model(b->engine);

    ret->first_bad_hidden = -1;
    for (uint32_t i = 0; i <= info->n_layers && i < VERIFY_LAYERS_MAX; i++) {
        _cleanup_free_ float *want = NULL;
        char name[32];
        snprintf(name, sizeof name, "hidden.%u", i);
        int r = read_expected(expected, name, tokens, info->hidden_size, &want, err);
        if (r != 0)
            return r > 0 ? 0 : r;
        const float *got = result->hidden + (size_t)i * tokens * info->hidden_size;
        ret->hidden_error[i] = relative_error(got, want, (size_t)tokens * info->hidden_size, NULL);
        ret->n_hidden = i + 1;
        if (ret->first_bad_hidden < 0 && !(ret->hidden_error[i] <= b->options->tolerance)) {
            ret->first_bad_hidden = (int)i;
            if (i == 0)
                fail_detail(ret, "the embeddings are wrong (hidden.0, error %.2g)",
                            ret->hidden_error[0]);
            else
                fail_detail(ret, "%s %u is the first that goes wrong (hidden.%u, error %.2g)",
                            i == info->n_layers ? "the final norm or layer" : "layer", i - 1, i,
                            ret->hidden_error[i]);
        }
    }
    return 0;
}

static int verify_golden(struct bench *b, struct verify_result *ret, struct error *err)
{
    _cleanup_free_ char *path = x_printf("%s/expected.safetensors", b->dir);
    _cleanup_(checkpoint_freep) struct checkpoint *expected = NULL;
    _cleanup_free_ float *logits = NULL;
    struct ids prompt = {0}, want = {0};
    struct engine_result result;
    uint32_t first;

    int r = read_json(b->dir, "case.json", &b->json, err);
    if (r == 0)
        r = read_ids(b->json, "prompt_ids", &prompt, err);
    if (r == 0)
        r = read_ids(b->json, "greedy_ids", &want, err);
    _cleanup_free_ void *free_prompt = prompt.id, *free_want = want.id;
    if (r == 0 && (!prompt.n || prompt.n > 4096))
        r = error_set(err, EBADMSG, "%s/case.json: a prompt of %u tokens", b->dir, prompt.n);
    if (r == 0)
        r = checkpoint_open_file(path, &expected, err);
    if (r == 0)
        r = open_bench(b, prompt.n, err);
    if (r < 0)
        return r;
    uint32_t vocab = engine_model(b->engine)->vocab_size;
    r = read_expected(expected, "logits", prompt.n, vocab, &logits, err);
    if (r > 0)
        r = error_set(err, EBADMSG, "%s: has no tensor \"logits\"", path);
    if (r == 0)
        r = step_once(b, prompt.id, prompt.n, 0, prompt.n, true, true, &result, err);
    if (r < 0)
        return r;
    ret->tokens = prompt.n;
    ret->greedy = want.n;
    ret->logits_error =
        relative_error(result.logits, logits, (size_t)prompt.n * vocab, &ret->cosine);
    first = (uint32_t)result.greedy[prompt.n - 1];
    r = compare_hidden(b, expected, &result, prompt.n, ret, err);
    if (!(ret->logits_error <= b->options->tolerance))
        fail_detail(ret, "logits error %.3g, the tolerance is %.3g", ret->logits_error,
                    b->options->tolerance);
    if (r == 0)
        r = greedy(b, prompt.n, first, &want, ret, &ret->greedy_equal, err);
    return r;
}

/* ---- expected_text.json ---- */

static int check_prompt_ids(struct bench *b, const json_t *item, uint32_t index,
                            const struct ids *want, struct verify_result *ret, struct error *err)
{
    const char *prompt = json_string_value(json_object_get(item, "prompt"));
    _cleanup_free_ uint32_t *ids = NULL;
    size_t n;

    if (!prompt)
        return error_set(err, EBADMSG, "case %u has no prompt", index);
    int r = tokenizer_encode(b->tokenizer, prompt, strlen(prompt), true, &ids, &n, err);
    if (r < 0)
        return r;
    if (n != want->n || memcmp(ids, want->id, n * sizeof *ids))
        fail_detail(ret, "case %u: the prompt's %zu ids differ from the expected %u", index, n,
                    want->n);
    return 0;
}

static void check_top(const json_t *item, uint32_t index, const float *logits, uint32_t vocab,
                      struct verify_result *ret)
{
    const json_t *top = json_object_get(item, "first_top5");
    const json_t *ids = json_array_get(top, 0), *logprobs = json_array_get(top, 1);
    struct token_logprob best[16];
    uint32_t n = (uint32_t)MIN(json_array_size(ids), ARRAY_LEN(best));

    if (!top)
        return;
    double norm = logits_norm(logits, vocab);
    logits_top(logits, vocab, norm, n, best);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t token = (uint32_t)json_integer_value(json_array_get(ids, i));
        double want = json_number_value(json_array_get(logprobs, i));
        double error = token < vocab ? fabs(logits[token] - norm - want) : INFINITY;
        ret->logits_error = fmax(ret->logits_error, error);
        if (!(error <= 10 * 1e-3))
            fail_detail(ret, "case %u: log-probability of token %u differs by %.3g", index, token,
                        error);
        else if (best[i].token != token && fabs(best[i].logprob - want) > 1e-3)
            fail_detail(ret, "case %u: best token %u is %u, expected %u", index, i, best[i].token,
                        token);
    }
}

/* The continuation as a client would see it: streamed behind the prompt, without special tokens. */
static int stream_text(struct bench *b, const struct ids *prompt, const struct ids *greedy_ids,
                       struct buffer *text, struct error *err)
{
    _cleanup_(buffer_free) struct buffer head = {0};
    _cleanup_(detok_freep) struct detok *detok = NULL;

    int r = detok_new(b->tokenizer, true, &detok);
    if (r < 0)
        return error_set(err, -r, "no memory for the detokenizer");
    for (uint32_t i = 0; i < prompt->n && r == 0; i++)
        r = detok_push(detok, prompt->id[i], &head, err);
    for (uint32_t i = 0; i < greedy_ids->n && r == 0; i++)
        r = detok_push(detok, greedy_ids->id[i], text, err);
    return r == 0 ? detok_finish(detok, text, err) : r;
}

/* Prompt and continuation as one text with its special tokens. */
static int whole_text(struct bench *b, const struct ids *prompt, const struct ids *greedy_ids,
                      struct buffer *text, struct error *err)
{
    size_t n = (size_t)prompt->n + greedy_ids->n;
    _cleanup_free_ uint32_t *ids = mem_alloc(n, sizeof *ids);

    if (!ids)
        return error_set(err, ENOMEM, "no memory for %zu ids", n);
    memcpy(ids, prompt->id, prompt->n * sizeof *ids);
    memcpy(ids + prompt->n, greedy_ids->id, greedy_ids->n * sizeof *ids);
    return tokenizer_decode(b->tokenizer, ids, n, false, text, err);
}

/* References give either the continuation alone or the whole text, which then contains the prompt
 * (behind a beginning-of-text token where there is one). */
static int check_text(struct bench *b, const json_t *item, uint32_t index, const struct ids *prompt,
                      const struct ids *greedy_ids, struct verify_result *ret, struct error *err)
{
    const char *want = json_string_value(json_object_get(item, "greedy_text"));
    const char *given = json_string_value(json_object_get(item, "prompt"));
    _cleanup_(buffer_free) struct buffer text = {0};

    if (!want)
        return 0;
    int r = strstr(want, given) ? whole_text(b, prompt, greedy_ids, &text, err)
                                : stream_text(b, prompt, greedy_ids, &text, err);
    if (r < 0)
        return r;
    if (text.len != strlen(want) || memcmp(text.data, want, text.len))
        fail_detail(ret, "case %u: the text is \"%.60s\", expected \"%.60s\"", index, text.data,
                    want);
    return 0;
}

static int prefill(struct bench *b, const struct ids *prompt, struct engine_result *ret,
                   struct error *err)
{
    uint32_t chunk = engine_limits(b->engine).max_tokens;
    int r = 0;

    for (uint32_t done = 0; done < prompt->n && r == 0; done += chunk)
        r = step_once(b, prompt->id + done, MIN(chunk, prompt->n - done), done, prompt->n, false,
                      true, ret, err);
    return r;
}

static int verify_text_case(struct bench *b, const json_t *item, uint32_t index,
                            struct verify_result *ret, struct error *err)
{
    struct ids prompt = {0}, want = {0};
    struct engine_result result;
    uint32_t equal = 0;

    int r = read_ids(item, "prompt_ids", &prompt, err);
    if (r == 0)
        r = read_ids(item, "greedy_ids", &want, err);
    _cleanup_free_ void *free_prompt = prompt.id, *free_want = want.id;
    if (r == 0 && !prompt.n)
        r = error_set(err, EBADMSG, "case %u has an empty prompt", index);
    if (r == 0)
        r = check_prompt_ids(b, item, index, &prompt, ret, err);
    if (r == 0)
        r = prefill(b, &prompt, &result, err);
    if (r < 0)
        return r;
    check_top(item, index, result.logits, engine_model(b->engine)->vocab_size, ret);
    r = greedy(b, prompt.n, (uint32_t)result.greedy[0], &want, ret, &equal, err);
    ret->greedy += want.n;
    ret->greedy_equal += equal;
    ret->tokens += prompt.n;
    if (r == 0)
        r = check_text(b, item, index, &prompt, &want, ret, err);
    return r;
}

static int verify_text(struct bench *b, struct verify_result *ret, struct error *err)
{
    int r = read_json(b->dir, "expected_text.json", &b->json, err);
    if (r == 0)
        r = tokenizer_load(b->dir, &b->tokenizer, err);
    if (r == 0)
        r = open_bench(b, 0, err);
    const json_t *cases = r == 0 ? json_object_get(b->json, "cases") : NULL;
    for (size_t i = 0; i < json_array_size(cases) && r == 0; i++) {
        bool so_far = ret->passed;
        ret->passed = true;
        r = verify_text_case(b, json_array_get(cases, i), (uint32_t)i, ret, err);
        ret->cases++;
        ret->cases_passed += ret->passed;
        ret->passed &= so_far;
    }
    if (r == 0 && !ret->cases)
        fail_detail(ret, "expected_text.json has no cases");
    return r;
}

int verify_folder(const char *dir, const struct verify_options *options, struct verify_result *ret,
                  struct error *err)
{
    struct bench b = {.dir = dir, .options = options, .loaded = {.weights = -1, .manifest = -1}};
    _cleanup_free_ char *golden = x_printf("%s/case.json", dir);
    _cleanup_free_ char *text = x_printf("%s/expected_text.json", dir);
    struct verify_result result = {.passed = true, .first_bad_hidden = -1};
    int r;

    if (access(golden, R_OK) == 0) {
        strcpy(result.kind, "golden");
        r = verify_golden(&b, &result, err);
    } else if (access(text, R_OK) == 0) {
        strcpy(result.kind, "text");
        r = verify_text(&b, &result, err);
    } else if (access(dir, X_OK) < 0) {
        r = error_sys(err, errno, "%s", dir);
    } else {
        r = error_set(
            err, ENOENT,
            "%s: has neither case.json (with expected.safetensors) nor expected_text.json", dir);
    }
    bench_free(&b);
    if (r == 0)
        *ret = result;
    return r;
}
