/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/instance/run_step.h"

#include <errno.h>
#include <string.h>

#include "base/fault.h"
#include "daemon/instance/prompt_rows.h"
#include "engine/sample.h"

#define LOGPROBS_MAX 64

/*
 * What the step before and those that joined it sampled, for token_from_previous. One engine a
 * process, one thread; a driver that has just come refers to nothing but its own steps.
 */
static struct {
    struct sampled {
        uint64_t id;
        uint32_t token;
    } * list;
    size_t n, room;
} previous;

/* Everything that a result points to, sized by the step. */
struct work {
    struct grammars *grammars;
    struct engine_seq *seqs;
    uint32_t *from_previous;   /* [n_seqs] the tokens that stand for a reference */
    struct prompt_rows **rows; /* [n_seqs] NULL: no prompt log-probabilities */
    size_t n_seqs;
    Ember__V1__SequenceResult *results, **result_list;
    Ember__V1__PromptLogprobs **prompt_list;
    Ember__V1__TokenLogprob *top;
    Ember__V1__TokenLogprob **top_list;
    struct token_logprob *best;
    float *logits;    /* one row, for what changes it */
    uint32_t *counts; /* [vocab] zeros */
    uint32_t *history;
};

static void work_free(struct work *work)
{
    for (size_t i = 0; work->rows && i < work->n_seqs; i++)
        prompt_rows_free(work->rows[i]);
    free(work->rows);
    free(work->seqs);
    free(work->from_previous);
    free(work->results);
    free(work->result_list);
    free(work->prompt_list);
    free(work->top);
    free(work->top_list);
    free(work->best);
    free(work->logits);
    free(work->counts);
    free(work->history);
}

static int allocate(struct work *work, const Ember__V1__Step *step, struct error *err)
{
    size_t n = step->n_sequences, tops = 0;

    for (size_t i = 0; i < n; i++)
        if (step->sequences[i]->sampling && step->sequences[i]->sampling->logprobs)
            tops = n * LOGPROBS_MAX;
    work->n_seqs = n;
    work->seqs = mem_alloc(n, sizeof *work->seqs);
    work->from_previous = mem_alloc(n, sizeof *work->from_previous);
    work->rows = mem_alloc(n, sizeof *work->rows);
    work->results = mem_alloc(n, sizeof *work->results);
    work->result_list = mem_alloc(n, sizeof *work->result_list);
    work->prompt_list = mem_alloc(n, sizeof *work->prompt_list);
    work->top = mem_alloc(tops, sizeof *work->top);
    work->top_list = mem_alloc(tops, sizeof *work->top_list);
    work->best = mem_alloc(LOGPROBS_MAX, sizeof *work->best);
    if (!work->seqs || !work->from_previous || !work->rows || !work->results ||
        !work->result_list || !work->prompt_list || (tops && (!work->top || !work->top_list)) ||
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

static struct logits_change change_of(const Ember__V1__SequenceStep *seq)
{
    const Ember__V1__Sampling *s = seq->sampling;
    struct logits_change change = {.suppress = seq->suppress, .n_suppress = seq->n_suppress};

    if (!s)
        return change;
    change.bias_tokens = s->bias_tokens;
    change.bias_values = s->bias_values;
    change.n_bias = s->n_bias_tokens;
    change.allowed = s->allowed;
    change.n_allowed = s->n_allowed;
    change.bad_tokens = s->bad_tokens;
    change.n_bad_tokens = s->n_bad_tokens;
    change.bad_lens = s->bad_lens;
    change.n_bad = s->n_bad_lens;
    change.repetition = s->repetition_penalty;
    change.frequency = s->frequency_penalty;
    change.presence = s->presence_penalty;
    change.history = seq->history;
    change.n_history = seq->n_history;
    change.n_prompt = MIN(seq->prompt_len, seq->n_history);
    return change;
}

static bool wants_logprobs(const Ember__V1__SequenceStep *seq)
{
    return seq->sampling && (seq->sampling->logprobs || seq->sampling->sampled_logprob);
}

static bool needs_logits(const Ember__V1__SequenceStep *seq)
{
    struct logits_change change = change_of(seq);

    return (seq->sample && (wants_logprobs(seq) || logits_change_any(&change) || seq->grammar ||
                            (seq->sampling && seq->sampling->temperature != 0))) ||
           seq->prompt_logprobs;
}

static int check(struct engine *engine, const Ember__V1__SequenceStep *seq, size_t index,
                 struct error *err)
{
    struct sampling sampling = sampling_of(seq);
    struct logits_change change = change_of(seq);

    if (seq->n_tokens > UINT32_MAX || seq->n_pages > UINT32_MAX || seq->n_targets > UINT32_MAX)
        return error_set(err, E2BIG, "sequence %zu is too long", index);
    if (seq->prompt_logprobs && !seq->n_tokens)
        return error_set(err, EINVAL, "sequence %zu of the step has no tokens", index);
    if (seq->sampling && seq->sampling->logprobs > LOGPROBS_MAX)
        return error_set(err, EINVAL, "logprobs is %u, at most %d", seq->sampling->logprobs,
                         LOGPROBS_MAX);
    if (seq->sampling && seq->sampling->n_bias_tokens != seq->sampling->n_bias_values)
        return error_set(err, EINVAL, "%zu biased tokens with %zu biases",
                         seq->sampling->n_bias_tokens, seq->sampling->n_bias_values);
    int r = sampling_check(&sampling, err);
    return r < 0 ? r : logits_change_check(&change, engine_model(engine)->vocab_size, err);
}

/* The token that the step before sampled for this id. */
static int resolve(const Ember__V1__SequenceStep *seq, uint32_t *ret, struct error *err)
{
    if (seq->n_tokens != 1)
        return error_set(err, EINVAL, "token_from_previous with %zu tokens", seq->n_tokens);
    for (size_t i = 0; i < previous.n; i++) {
        if (previous.list[i].id != seq->id)
            continue;
        *ret = previous.list[i].token;
        return 0;
    }
    return error_set(err, ESTALE, "the step before sampled nothing for sequence %llu",
                     (unsigned long long)seq->id);
}

static int translate_one(struct engine *engine, const Ember__V1__SequenceStep *seq, size_t i,
                         struct work *work, struct error *err)
{
    struct engine_seq *to = &work->seqs[i];
    int r = check(engine, seq, i, err);

    *to = (struct engine_seq){.tokens = seq->tokens,
                              .n_tokens = (uint32_t)seq->n_tokens,
                              .position = seq->position,
                              .prompt_len = seq->prompt_len,
                              .pages = seq->pages,
                              .n_pages = (uint32_t)seq->n_pages,
                              .sample = seq->sample};
    if (r == 0 && seq->token_from_previous) {
        r = resolve(seq, &work->from_previous[i], err);
        to->tokens = &work->from_previous[i];
    }
    if (r == 0 && seq->prompt_logprobs)
        r = prompt_rows_new(engine, seq, &work->rows[i], err);
    if (r < 0 || !seq->prompt_logprobs)
        return r;
    to->tokens += to->n_tokens - 1; /* the others are run before */
    to->position += to->n_tokens - 1;
    to->n_tokens = 1;
    to->sample |= prompt_rows_wants_last(work->rows[i]);
    return 0;
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
        ret->logits |= needs_logits(step->sequences[i]);
        r = translate_one(engine, step->sequences[i], i, work, err);
    }
    ret->seqs = work->seqs;
    ret->n_seqs = (uint32_t)step->n_sequences;
    return r;
}

/* ---- choosing ---- */

static void add_logprobs(struct work *work, uint32_t row, Ember__V1__SequenceResult *result,
                         const float *logits, uint32_t vocab, uint32_t n)
{
    double norm = logits_norm(logits, vocab);

    n = MIN(n, vocab);
    result->logprob = (float)(logits[result->token] - norm);
    if (!n)
        return;
    logits_top(logits, vocab, norm, n, work->best);
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

/* The history with the token that only we know. */
static int complete_history(const Ember__V1__SequenceStep *seq, uint32_t token, struct work *work,
                            struct logits_change *change, struct error *err)
{
    if (!seq->token_from_previous || !logits_change_history(change))
        return 0;
    free(work->history);
    work->history = mem_alloc(change->n_history + 1, sizeof *work->history);
    if (!work->history)
        return error_set(err, ENOMEM, "no memory for %zu tokens", change->n_history + 1);
    if (change->n_history)
        memcpy(work->history, change->history, change->n_history * sizeof *work->history);
    work->history[change->n_history++] = token;
    change->history = work->history;
    return 0;
}

/* *logits becomes a changed copy, when anything changes it. */
static int change_logits(struct engine *engine, const Ember__V1__SequenceStep *seq, size_t index,
                         struct work *work, const float **logits, bool *ret_changed,
                         struct error *err)
{
    uint32_t vocab = engine_model(engine)->vocab_size;
    struct logits_change change = change_of(seq);

    *ret_changed = logits_change_any(&change) || seq->grammar;
    if (!*ret_changed)
        return 0;
    if (!work->logits)
        work->logits = mem_alloc(vocab, sizeof *work->logits);
    if (!work->counts)
        work->counts = mem_alloc(vocab, sizeof *work->counts);
    if (!work->logits || !work->counts)
        return error_set(err, ENOMEM, "no memory for a row of %u logits", vocab);
    int r = complete_history(seq, work->from_previous[index], work, &change, err);
    if (r < 0)
        return r;
    memcpy(work->logits, *logits, vocab * sizeof **logits);
    logits_change_apply(&change, work->logits, vocab, work->counts);
    *logits = work->logits;
    return 0;
}

/* `from_row`: the engine's; `row`: the result's. Log-probabilities are those of the model, before
 * changes. */
static int choose(struct engine *engine, const Ember__V1__SequenceStep *seq, size_t index,
                  const struct engine_result *from, uint32_t from_row, uint32_t row,
                  struct work *work, struct error *err)
{
    uint32_t vocab = engine_model(engine)->vocab_size;
    const float *raw = from->logits ? from->logits + (size_t)from_row * vocab : NULL, *logits = raw;
    Ember__V1__SequenceResult *result = &work->results[row];
    struct sampling sampling = sampling_of(seq);
    struct matcher *matcher = NULL;
    bool changed, ended;

    ember__v1__sequence_result__init(result);
    work->result_list[row] = result;
    result->id = seq->id;
    result->token = (uint32_t)from->greedy[from_row];
    int r = seq->grammar ? grammars_find(work->grammars, seq, &matcher, err) : 0;
    if (r == 0)
        r = change_logits(engine, seq, index, work, &logits, &changed, err);
    if (r == 0 && matcher)
        r = grammars_restrict(work->grammars, matcher, seq, work->logits, err);
    if (r == 0 && (changed || sampling.temperature != 0))
        r = sample_token(&sampling, logits, vocab, &result->token, err);
    if (r == 0 && matcher) {
        grammars_take(work->grammars, matcher, seq, result->token, &ended);
        result->ended = ended;
    }
    if (r == 0 && wants_logprobs(seq))
        add_logprobs(work, row, result, raw, vocab, seq->sampling->logprobs);
    return r;
}

/* ---- the step ---- */

static int run_prompt_rows(struct engine *engine, struct work *work, struct error *err)
{
    int r = 0;

    for (size_t i = 0; i < work->n_seqs && r == 0; i++)
        if (work->rows[i])
            r = prompt_rows_run(work->rows[i], engine, err);
    return r;
}

static int collect(struct engine *engine, const Ember__V1__Step *step,
                   const struct engine_result *from, struct work *work,
                   Ember__V1__StepResult *result, struct error *err)
{
    uint32_t vocab = engine_model(engine)->vocab_size, row = 0, from_row = 0;
    int r = 0;

    for (size_t i = 0; i < step->n_sequences && r == 0; i++) {
        if (work->rows[i]) {
            if (work->seqs[i].sample)
                prompt_rows_add_last(work->rows[i], from->logits + (size_t)from_row * vocab);
            work->prompt_list[result->n_prompts++] = prompt_rows_message(work->rows[i]);
        }
        if (step->sequences[i]->sample)
            r = choose(engine, step->sequences[i], i, from, from_row, row++, work, err);
        from_row += work->seqs[i].sample;
    }
    result->sequences = work->result_list;
    result->n_sequences = row;
    result->prompts = work->prompt_list;
    return r;
}

/* What the next step may refer to. One that joins has come too late: it adds to the step before,
 * with which it keeps to the limits of one. */
static int remember(const Ember__V1__StepResult *result, bool joins, uint32_t max_seqs,
                    struct error *err)
{
    if (!joins || previous.n + result->n_sequences > max_seqs)
        previous.n = 0;
    size_t n = previous.n + result->n_sequences;
    if (n > previous.room) {
        struct sampled *moved = reallocarray(previous.list, n, sizeof *moved);
        if (!moved)
            return error_set(err, ENOMEM, "no memory for %zu results", n);
        previous.list = moved;
        previous.room = n;
    }
    for (size_t i = 0; i < result->n_sequences; i++)
        previous.list[previous.n++] =
            (struct sampled){result->sequences[i]->id, result->sequences[i]->token};
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
        r = run_prompt_rows(engine, work, err);
    if (r == 0)
        r = engine_step(engine, &request, &from, err);
    if (r == 0)
        r = collect(engine, step, &from, work, result, err);
    if (r == 0)
        r = remember(result, step->joins, engine_limits(engine).max_seqs, err);
    if (r < 0)
        return r;
    result->compute_ms = from.compute_ms;
    result->max_tokens = engine_limits(engine).max_tokens;
    return 0;
}

/* The result of each of the steps that `together` consists of: its part of the whole. */
static void reply_each(Ember__V1__Step *const *steps, size_t n, Ember__V1__StepResult *whole,
                       void (*reply)(void *ctx, const Ember__V1__StepResult *result), void *ctx)
{
    Ember__V1__StepResult part = *whole;

    for (size_t s = 0; s < n; s++) {
        part.id = steps[s]->id;
        part.n_sequences = part.n_prompts = 0;
        for (size_t i = 0; i < steps[s]->n_sequences && !part.error; i++) {
            part.n_sequences += steps[s]->sequences[i]->sample;
            part.n_prompts += steps[s]->sequences[i]->prompt_logprobs;
        }
        reply(ctx, &part);
        part.sequences += part.n_sequences;
        part.prompts += part.n_prompts;
    }
}

static void run_together(struct engine *engine, struct grammars *grammars,
                         Ember__V1__Step *const *steps, size_t n, const Ember__V1__Step *together,
                         void (*reply)(void *ctx, const Ember__V1__StepResult *result), void *ctx)
{
    Ember__V1__StepResult result = EMBER__V1__STEP_RESULT__INIT;
    struct work work = {.grammars = grammars};
    struct error err = {0};

    for (size_t s = 0; s < n; s++)
        grammars_end(grammars, steps[s]->ended, steps[s]->n_ended);
    int r = run(engine, together, &work, &result, &err);
    if (r < 0 && engine_broken(engine)) { /* we end: the driver asks another instance, as ever */
        work_free(&work);
        return;
    }
    if (r < 0) {
        previous.n = 0;
        result.error = -r;
        result.error_text = (char *)error_text(&err);
    }
    reply_each(steps, n, &result, reply, ctx);
    grammars_tidy(grammars);
    work_free(&work);
}

/* All sequences in one step, when that keeps to the limits; the list is the caller's to free. */
static bool join_steps(struct engine *engine, Ember__V1__Step *const *steps, size_t n,
                       Ember__V1__Step *ret)
{
    struct engine_limits limits = engine_limits(engine);
    size_t seqs = 0, tokens = 0;

    for (size_t s = 0; s < n; s++) {
        seqs += steps[s]->n_sequences;
        for (size_t i = 0; i < steps[s]->n_sequences; i++)
            tokens += steps[s]->sequences[i]->n_tokens;
    }
    *ret = *steps[0];
    ret->sequences = seqs <= limits.max_seqs && tokens <= limits.max_tokens
                         ? mem_alloc(seqs, sizeof *ret->sequences)
                         : NULL;
    if (!ret->sequences)
        return false;
    ret->n_sequences = 0;
    for (size_t s = 0; s < n; s++)
        for (size_t i = 0; i < steps[s]->n_sequences; i++)
            ret->sequences[ret->n_sequences++] = steps[s]->sequences[i];
    return true;
}

void run_steps(struct engine *engine, struct grammars *grammars, Ember__V1__Step *const *steps,
               size_t n, void (*reply)(void *ctx, const Ember__V1__StepResult *result), void *ctx)
{
    Ember__V1__Step all;

    if (n > 1 && join_steps(engine, steps, n, &all)) {
        run_together(engine, grammars, steps, n, &all, reply, ctx);
        free(all.sequences);
        return;
    }
    for (size_t s = 0; s < n && !engine_broken(engine); s++)
        run_together(engine, grammars, steps + s, 1, steps[s], reply, ctx);
}
