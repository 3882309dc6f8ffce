/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/instance/run_step.h"

#include <errno.h>

#include "base/fault.h"
#include "engine/sample.h"

#define LOGPROBS_MAX 64

/* Everything that a result points to; one allocation each, sized by the step. */
struct work {
    struct engine_seq *seqs;
    Ember__V1__SequenceResult *results, **result_list;
    Ember__V1__TokenLogprob *top;
    Ember__V1__TokenLogprob **top_list;
    struct token_logprob *best;
};

static void work_free(struct work *work)
{
    free(work->seqs);
    free(work->results);
    free(work->result_list);
    free(work->top);
    free(work->top_list);
    free(work->best);
}

static int allocate(struct work *work, const Ember__V1__Step *step, struct error *err)
{
    size_t n = step->n_sequences, tops = n * LOGPROBS_MAX;

    work->seqs = mem_alloc(n, sizeof *work->seqs);
    work->results = mem_alloc(n, sizeof *work->results);
    work->result_list = mem_alloc(n, sizeof *work->result_list);
    work->top = mem_alloc(tops, sizeof *work->top);
    work->top_list = mem_alloc(tops, sizeof *work->top_list);
    work->best = mem_alloc(LOGPROBS_MAX, sizeof *work->best);
    if (!work->seqs || !work->results || !work->result_list || !work->top || !work->top_list ||
        !work->best)
        return error_set(err, ENOMEM, "no memory for a step of %zu sequences", n);
    return 0;
}

static struct sampling sampling_of(const Ember__V1__SequenceStep *seq)
{
    const Ember__V1__Sampling *s = seq->sampling;

    if (!s)
        return (struct sampling){0};
    return (struct sampling){.temperature = s->temperature,
                             .top_k = s->top_k,
                             .top_p = s->top_p,
                             .min_p = s->min_p,
                             .seed = s->seed,
                             .index = seq->sample_index};
}

static bool needs_logits(const Ember__V1__SequenceStep *seq)
{
    return seq->sample && seq->sampling &&
           (seq->sampling->temperature != 0 || seq->sampling->logprobs);
}

/* Checks what the engine does not know about and fills its form of the step. */
static int translate(struct engine *engine, const Ember__V1__Step *step, struct work *work,
                     struct engine_step *ret, struct error *err)
{
    struct engine_limits limits = engine_limits(engine);

    if (step->n_sequences > limits.max_seqs)
        return error_set(err, E2BIG, "%zu sequences in a step; this instance takes %u",
                         step->n_sequences, limits.max_seqs);
    int r = allocate(work, step, err);
    ret->logits = false;
    for (size_t i = 0; i < step->n_sequences && r == 0; i++) {
        const Ember__V1__SequenceStep *seq = step->sequences[i];
        struct sampling sampling = sampling_of(seq);
        if (seq->n_tokens > UINT32_MAX || seq->n_pages > UINT32_MAX)
            return error_set(err, E2BIG, "sequence %zu is too long", i);
        if (seq->sampling && seq->sampling->logprobs > LOGPROBS_MAX)
            return error_set(err, EINVAL, "logprobs is %u, at most %d", seq->sampling->logprobs,
                             LOGPROBS_MAX);
        r = sampling_check(&sampling, err);
        ret->logits |= needs_logits(seq);
        work->seqs[i] = (struct engine_seq){.tokens = seq->tokens,
                                            .n_tokens = (uint32_t)seq->n_tokens,
                                            .position = seq->position,
                                            .prompt_len = seq->prompt_len,
                                            .pages = seq->pages,
                                            .n_pages = (uint32_t)seq->n_pages,
                                            .sample = seq->sample};
    }
    ret->seqs = work->seqs;
    ret->n_seqs = (uint32_t)step->n_sequences;
    return r;
}

static void add_logprobs(struct work *work, uint32_t row, Ember__V1__SequenceResult *result,
                         const float *logits, uint32_t vocab, uint32_t n)
{
    n = MIN(n, vocab);
    result->logprob = sample_logprob(logits, vocab, result->token);
    sample_top(logits, vocab, n, work->best);
    result->top = &work->top_list[(size_t)row * LOGPROBS_MAX];
    result->n_top = n;
    for (uint32_t i = 0; i < n; i++) {
        Ember__V1__TokenLogprob *t = &work->top[(size_t)row * LOGPROBS_MAX + i];
        ember__v1__token_logprob__init(t);
        t->token = work->best[i].token;
        t->logprob = work->best[i].logprob;
        result->top[i] = t;
    }
}

static int choose(struct engine *engine, const Ember__V1__SequenceStep *seq,
                  const struct engine_result *from, uint32_t row, struct work *work,
                  struct error *err)
{
    uint32_t vocab = engine_model(engine)->vocab_size;
    const float *logits = from->logits ? from->logits + (size_t)row * vocab : NULL;
    Ember__V1__SequenceResult *result = &work->results[row];
    struct sampling sampling = sampling_of(seq);

    ember__v1__sequence_result__init(result);
    work->result_list[row] = result;
    result->id = seq->id;
    result->token = (uint32_t)from->greedy[row];
    if (sampling.temperature != 0) {
        int r = sample_token(&sampling, logits, vocab, &result->token, err);
        if (r < 0)
            return r;
    }
    if (seq->sampling && seq->sampling->logprobs)
        add_logprobs(work, row, result, logits, vocab, seq->sampling->logprobs);
    return 0;
}

static int run(struct engine *engine, const Ember__V1__Step *step, struct work *work,
               Ember__V1__StepResult *result, struct error *err)
{
    struct engine_step request = {0};
    struct engine_result from;

    fault_hit(FAULT_INSTANCE_STEP);
    int r = translate(engine, step, work, &request, err);
    if (r == 0)
        r = engine_step(engine, &request, &from, err);
    if (r < 0)
        return r;
    uint32_t row = 0;
    for (size_t i = 0; i < step->n_sequences && r == 0; i++)
        if (step->sequences[i]->sample)
            r = choose(engine, step->sequences[i], &from, row++, work, err);
    result->sequences = work->result_list;
    result->n_sequences = row;
    result->compute_ms = from.compute_ms;
    return r;
}

void run_step(struct engine *engine, const Ember__V1__Step *step,
              void (*reply)(void *ctx, const Ember__V1__StepResult *result), void *ctx)
{
    Ember__V1__StepResult result = EMBER__V1__STEP_RESULT__INIT;
    struct work work = {0};
    struct error err = {0};

    result.id = step->id;
    int r = run(engine, step, &work, &result, &err);
    if (r < 0) {
        result.n_sequences = 0;
        result.error = -r;
        result.error_text = (char *)error_text(&err);
    }
    reply(ctx, &result);
    work_free(&work);
}
