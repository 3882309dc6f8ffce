/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_model.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/value.h"
#include "cli/measure.h"
#include "cli/output.h"
#include "cli/quant_options.h"
#include "cli/shapes.h"

#define STEPS_MAX 400
#define PROFILED_MAX 100
#define WARM_UP 3

/* ---- which model ---- */

static int on_progress(void *ctx, uint64_t done, uint64_t total)
{
    progress_update(ctx, "writing random weights", done, total);
    return cli_interrupted ? -ECANCELED : 0;
}

static int no_model(const char *name, struct error *err)
{
    _cleanup_free_ char *names = shape_names();

    return error_set(err, ENOENT, "%s: no such folder, and no shape of that name (%s, or tiny)",
                     name, names);
}

int bench_model_find(const struct verb_call *call, const char *name, uint32_t layers,
                     char **ret_dir, struct error *err)
{
    _cleanup_free_ char *fallback = NULL, *config = shape_config(name);
    struct progress progress;

    if (!config && !strcmp(name, "tiny"))
        return value_expand("%D/models/ember-tiny", ret_dir, err);
    if (!config) {
        *ret_dir = realpath(name, NULL);
        return *ret_dir ? 0 : no_model(name, err);
    }
    const char *dir = verb_string(call, "dir");
    int r = dir ? 0 : value_expand("%C/emberd-synth", &fallback, err);
    progress_begin(&progress, call, name);
    if (r == 0)
        r = shape_checkpoint(dir ? dir : fallback, name, layers, on_progress, &progress, ret_dir,
                             err);
    progress_end(&progress);
    return r;
}

/* ---- opening ---- */

static int read_manifest(struct bench_model *m, struct error *err)
{
    struct stat st;

    if (fstat(m->loaded.manifest, &st) < 0)
        return error_sys(err, errno, "manifest");
    void *data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, m->loaded.manifest, 0);
    if (data == MAP_FAILED)
        return error_sys(err, errno, "manifest: map");
    int r = manifest_read(data, (size_t)st.st_size, &m->model, &m->layout, NULL, err);
    munmap(data, (size_t)st.st_size);
    return r;
}

/* Waits until the engine has all its buckets. */
static int settle(struct bench_model *m, struct error *err)
{
    int r = engine_background(m->engine, err);

    while (r >= 0 && !engine_settled(m->engine)) {
        struct pollfd p = {.fd = engine_background_fd(m->engine), .events = POLLIN};
        if (cli_interrupted)
            return error_set(err, ECANCELED, "interrupted");
        poll(&p, 1, 100);
        r = engine_adopt(m->engine, NULL, NULL, err);
    }
    return r < 0 ? r : 0;
}

int bench_model_open(struct bench_model *m, const struct verb_call *call, uint32_t tokens,
                     struct error *err)
{
    _cleanup_free_ char *quant = NULL;

    m->loaded = (struct loaded){.weights = -1, .manifest = -1};
    int r = cli_quant(call, &quant, err);
    if (r == 0)
        r = load_checkpoint(m->dir, &(struct load_options){.quant = quant}, &m->loaded, err);
    if (r == 0)
        r = read_manifest(m, err);
    if (r < 0)
        return r;
    m->kv = (enum kv_kind)verb_choice(call, "kv-type");
    m->n_pages = (tokens + KV_PAGE_SIZE - 1) / KV_PAGE_SIZE;
    struct engine_options options = {.threads = (uint32_t)verb_int(call, "threads"),
                                     .pin = (uint32_t)verb_choice(call, "pin"),
                                     .isa = cli_isa(call),
                                     .compile = true,
                                     .weights = m->loaded.weights,
                                     .manifest = m->loaded.manifest,
                                     .kv = m->kv,
                                     .kv_bytes =
                                         m->n_pages * model_info(m->model)->kv_page_bytes[m->kv]};
    m->pages = mem_alloc(m->n_pages, sizeof *m->pages);
    if (!m->pages)
        return error_set(err, ENOMEM, "no memory for %u page numbers", m->n_pages);
    for (uint32_t i = 0; i < m->n_pages; i++)
        m->pages[i] = i;
    r = engine_open(&options, &m->engine, err);
    if (r == 0)
        r = engine_fill_kv(m->engine, err);
    return r == 0 ? settle(m, err) : r;
}

void bench_model_free(struct bench_model *m)
{
    engine_free(m->engine);
    weights_layout_free(m->layout);
    model_free(m->model);
    if (m->dir && m->pages)
        loaded_close(&m->loaded);
    free(m->pages);
    free(m->dir);
    *m = (struct bench_model){0};
}

/* ---- the least a step costs ---- */

static double operand_bytes(const struct ember_tensor *t)
{
    if (!t->rank || t->arena != EMBER_ARENA_WEIGHTS)
        return 0;
    return (double)t->dim[0] * (double)(t->rank > 1 ? t->row_stride : dtype_size(t->dtype));
}

/* Share of the experts that rows x topk choices hit when every choice is as likely. */
static double experts_hit(double experts, double topk, double rows)
{
    return 1 - pow(1 - topk / experts, rows);
}

static void attention_cost(const struct ember_op *op, const struct bench_load *load,
                           struct step_cost *ret)
{
    double window = (double)op->i[ATTN_I_WINDOW], pairs = 0;
    double end = load->position + load->tokens;
    double most = window > 0 ? fmin(end, window + load->tokens - 1) : end;

    for (uint32_t i = 0; i < load->tokens; i++) {
        double keys = load->position + i + 1.0;
        pairs += window > 0 ? fmin(keys, window) : keys;
    }
    double k = (double)(op->i[ATTN_I_KV_HEADS] * op->i[ATTN_I_DK]),
           v = (double)(op->i[ATTN_I_KV_HEADS] * op->i[ATTN_I_DV]);
    ret->kv_bytes += load->seqs * most * (k + v) * dtype_size(op->t[ATTN_K].dtype);
    if (op->t[ATTN_K].dtype == EMBER_I8)
        ret->kv_bytes += load->seqs * most * 2 * (double)op->i[ATTN_I_KV_HEADS] * sizeof(float);
    ret->flops += 2.0 * load->seqs * pairs * (double)op->i[ATTN_I_Q_HEADS] *
                  (double)(op->i[ATTN_I_DK] + op->i[ATTN_I_DV]);
}

/* Columns of a product: x as integers is stored in other widths, and then K is said. */
static double columns_of(int64_t k, const struct ember_tensor *x)
{
    return k ? (double)k : x->dim[1];
}

static void op_cost(const struct ember_op *op, const struct bench_load *load, struct step_cost *ret)
{
    double rows = op->rows == EMBER_ROWS_LOGITS ? load->seqs : (double)load->seqs * load->tokens;
    double bytes = 0;

    for (int i = 0; i < EMBER_OP_TENSORS; i++)
        bytes += operand_bytes(&op->t[i]);
    if (op->kind == EMBER_OP_EMBED)
        bytes = rows * (double)op->t[EMBED_TABLE].row_stride;
    if (op->kind == EMBER_OP_LINEAR) /* rows of w: a gated one has half as many columns of out */
        ret->flops +=
            2 * rows * op->t[LINEAR_W].dim[0] * columns_of(op->i[LINEAR_I_K], &op->t[LINEAR_X]);
    if (op->kind == EMBER_OP_MOE_LINEAR) {
        double topk = (double)op->i[MOE_I_TOPK];
        bytes *= experts_hit(op->t[MOE_W].dim[0], topk, rows);
        ret->flops +=
            2 * rows * topk * op->t[MOE_OUT].dim[1] * columns_of(op->i[MOE_I_K], &op->t[MOE_X]);
    }
    if (op->kind == EMBER_OP_ATTENTION)
        attention_cost(op, load, ret);
    ret->weight_bytes += bytes;
}

int bench_model_cost(const struct bench_model *m, const struct bench_load *load,
                     struct step_cost *ret, struct error *err)
{
    struct plan_request request = {.tokens = load->seqs * load->tokens,
                                   .seqs = load->seqs,
                                   .rows = load->seqs,
                                   .kv = model_info(m->model)->kv_dtype[m->kv]};
    _cleanup_(plan_freep) struct plan *plan = NULL;
    struct step_cost cost = {0};

    int r = model_plan(m->model, m->layout, &request, &plan, err);
    if (r < 0)
        return r;
    for (uint32_t i = 0; i < plan->n_segments; i++) {
        const struct plan_segment *s = &plan->segments[i];
        for (uint32_t o = s->first; s->kind != SEGMENT_HEAD_PROBE && o < s->first + s->count; o++)
            op_cost(&plan->ops[o], load, &cost);
    }
    *ret = cost;
    return 0;
}

/* ---- running ---- */

struct stepper {
    struct bench_model *model;
    struct bench_load load;
    struct engine_seq *seqs;
    uint32_t *tokens;
    uint32_t seed, pages_each;
};

/* The next step: other tokens each time, since experts are chosen by them. */
static int step(struct stepper *s, struct engine_result *ret, struct error *err)
{
    uint32_t vocab = model_info(s->model->model)->vocab_size, n = s->load.tokens;

    for (uint32_t i = 0; i < s->load.seqs; i++) {
        for (uint32_t t = 0; t < n; t++) {
            s->seed = s->seed * 1664525 + 1013904223;
            s->tokens[i * n + t] = (s->seed >> 8) % vocab;
        }
        s->seqs[i] = (struct engine_seq){.tokens = s->tokens + i * n,
                                         .n_tokens = n,
                                         .position = s->load.position,
                                         .prompt_len = n,
                                         .pages = s->model->pages + i * s->pages_each,
                                         .n_pages = s->pages_each,
                                         .sample = true};
    }
    struct engine_step now = {.seqs = s->seqs, .n_seqs = s->load.seqs};
    if (cli_interrupted)
        return error_set(err, ECANCELED, "interrupted");
    return engine_step(s->model->engine, &now, ret, err);
}

static void add_rows(struct step_times *to, const struct engine_profile_row *rows, uint32_t n,
                     double *ret_ms)
{
    *ret_ms = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = 0;
        while (j < to->n_rows && strcmp(to->rows[j].kernel, rows[i].kernel))
            j++;
        if (j == to->n_rows)
            to->rows[to->n_rows++] = (struct engine_profile_row){0};
        memcpy(to->rows[j].kernel, rows[i].kernel, sizeof rows->kernel);
        to->rows[j].ns += rows[i].ns;
        to->rows[j].launches += rows[i].launches;
        *ret_ms += (double)rows[i].ns / 1e6;
    }
}

/* Steps with times kept: the median of what lies outside of kernels. */
static int profile(struct stepper *s, double seconds, struct step_times *ret, struct error *err)
{
    struct engine_profile_row rows[ENGINE_PROFILE_MAX];
    double outside[PROFILED_MAX], kernels;
    uint64_t start = clock_ns();
    struct engine_result result;
    struct error none = {0};

    ret->overhead_ms = NAN;
    while (ret->profiled < PROFILED_MAX &&
           (ret->profiled < 3 || clock_ms_since(start) < seconds * 1e3)) {
        if (engine_profile(s->model->engine, &none) < 0)
            return 0;
        int r = step(s, &result, err);
        uint32_t n = engine_profile_end(s->model->engine, rows);
        if (r < 0)
            return r;
        add_rows(ret, rows, n, &kernels);
        ret->profiled_ms += result.compute_ms;
        outside[ret->profiled++] = result.compute_ms - kernels;
    }
    ret->overhead_ms = quantile(outside, ret->profiled, 0.5);
    return 0;
}

int bench_model_run(struct bench_model *m, const struct bench_load *load, double seconds,
                    struct step_times *ret, struct error *err)
{
    struct stepper s = {.model = m, .load = *load, .seed = 1};
    _cleanup_free_ struct engine_seq *seqs = mem_alloc(load->seqs, sizeof *seqs);
    _cleanup_free_ uint32_t *tokens = mem_alloc((size_t)load->seqs * load->tokens, sizeof *tokens);
    _cleanup_free_ double *ms = mem_alloc(STEPS_MAX, sizeof *ms);
    struct engine_result result;
    int r = 0;

    *ret = (struct step_times){0};
    s.pages_each = (load->position + load->tokens + KV_PAGE_SIZE - 1) / KV_PAGE_SIZE;
    if (!seqs || !tokens || !ms)
        return error_set(err, ENOMEM, "no memory for %u sequences", load->seqs);
    if ((uint64_t)s.pages_each * load->seqs > m->n_pages)
        return error_set(err, EINVAL, "%u sequences of %u tokens do not fit in %u KV pages",
                         load->seqs, load->position + load->tokens, m->n_pages);
    s.seqs = seqs;
    s.tokens = tokens;
    for (int i = 0; i < WARM_UP && r == 0; i++)
        r = step(&s, &result, err);
    uint64_t start = clock_ns();
    while (r == 0 && ret->steps < STEPS_MAX &&
           (ret->steps < 5 || clock_ms_since(start) < seconds * 1e3)) {
        r = step(&s, &result, err);
        ms[ret->steps++] = result.compute_ms;
    }
    if (r == 0)
        r = profile(&s, seconds / 3, ret, err);
    ret->ms = quantile(ms, ret->steps, 0.5);
    return r;
}

double step_times_of(const struct step_times *times, const char *kernel)
{
    double ns = 0;

    for (uint32_t i = 0; i < times->n_rows; i++)
        if (!strncmp(times->rows[i].kernel, kernel, strlen(kernel)))
            ns += (double)times->rows[i].ns;
    return times->profiled ? ns / times->profiled / 1e6 : 0;
}
