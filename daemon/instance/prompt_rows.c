/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/instance/prompt_rows.h"

#include <errno.h>

#include "engine/sample.h"

struct prompt_rows {
    const Ember__V1__SequenceStep *seq;
    uint32_t vocab, n_top, n;
    Ember__V1__PromptLogprobs message;
    Ember__V1__SequenceResult *results, **list;
    Ember__V1__TokenLogprob *top, **top_list;
    struct token_logprob *best;
};

void prompt_rows_free(struct prompt_rows *rows)
{
    if (!rows)
        return;
    free(rows->results);
    free(rows->list);
    free(rows->top);
    free(rows->top_list);
    free(rows->best);
    free(rows);
}

static int check(const Ember__V1__SequenceStep *seq, uint32_t vocab, struct error *err)
{
    if (seq->n_targets > seq->n_tokens)
        return error_set(err, EINVAL, "%zu targets for %zu tokens", seq->n_targets, seq->n_tokens);
    if (seq->token_from_previous)
        return error_set(err, EINVAL, "prompt_logprobs of a token that is not known");
    for (size_t i = 0; i < seq->n_targets; i++)
        if (seq->targets[i] >= vocab)
            return error_set(err, EINVAL, "target %zu is %u, the vocabulary has %u", i,
                             seq->targets[i], vocab);
    return 0;
}

int prompt_rows_new(struct engine *engine, const Ember__V1__SequenceStep *seq,
                    struct prompt_rows **ret, struct error *err)
{
    uint32_t vocab = engine_model(engine)->vocab_size;
    uint32_t n_top = MIN(seq->sampling ? seq->sampling->logprobs : 0, vocab);
    int r = check(seq, vocab, err);

    if (r < 0)
        return r;
    struct prompt_rows *rows = mem_alloc(1, sizeof *rows);
    size_t n = seq->n_targets, tops = n * n_top;
    if (rows) {
        *rows = (struct prompt_rows){.seq = seq,
                                     .vocab = vocab,
                                     .n_top = n_top,
                                     .results = mem_alloc(n + 1, sizeof *rows->results),
                                     .list = mem_alloc(n + 1, sizeof *rows->list),
                                     .top = mem_alloc(tops + 1, sizeof *rows->top),
                                     .top_list = mem_alloc(tops + 1, sizeof *rows->top_list),
                                     .best = mem_alloc(n_top + 1, sizeof *rows->best)};
        ember__v1__prompt_logprobs__init(&rows->message);
    }
    if (!rows || !rows->results || !rows->list || !rows->top || !rows->top_list || !rows->best) {
        prompt_rows_free(rows);
        return error_set(err, ENOMEM, "no memory for the log-probabilities of %zu tokens", n);
    }
    *ret = rows;
    return 0;
}

static void add(struct prompt_rows *rows, const float *logits)
{
    Ember__V1__SequenceResult *result = &rows->results[rows->n];
    size_t first = (size_t)rows->n * rows->n_top;

    ember__v1__sequence_result__init(result);
    rows->list[rows->n] = result;
    result->token = rows->seq->targets[rows->n];
    double norm = logits_norm(logits, rows->vocab);
    result->logprob = (float)(logits[result->token] - norm);
    result->top = rows->top_list + first;
    result->n_top = rows->n_top;
    if (rows->n_top)
        logits_top(logits, rows->vocab, norm, rows->n_top, rows->best);
    for (uint32_t i = 0; i < rows->n_top; i++) {
        Ember__V1__TokenLogprob *t = &rows->top[first + i];
        ember__v1__token_logprob__init(t);
        t->token = rows->best[i].token;
        t->logprob = rows->best[i].logprob;
        result->top[i] = t;
    }
    rows->n++;
}

int prompt_rows_run(struct prompt_rows *rows, struct engine *engine, struct error *err)
{
    const Ember__V1__SequenceStep *seq = rows->seq;
    struct engine_limits limits = engine_limits(engine);
    uint32_t most = MIN(limits.max_seqs, limits.max_tokens);
    _cleanup_free_ struct engine_seq *parts = mem_alloc(most, sizeof *parts);
    struct engine_result from;

    if (!parts)
        return error_set(err, ENOMEM, "no memory for %u rows", most);
    for (uint32_t at = 0; at + 1 < seq->n_tokens;) {
        uint32_t n = MIN(most, (uint32_t)seq->n_tokens - 1 - at);
        for (uint32_t i = 0; i < n; i++)
            parts[i] = (struct engine_seq){.tokens = seq->tokens + at + i,
                                           .n_tokens = 1,
                                           .position = seq->position + at + i,
                                           .prompt_len = seq->prompt_len,
                                           .pages = seq->pages,
                                           .n_pages = (uint32_t)seq->n_pages,
                                           .sample = true};
        struct engine_step step = {.seqs = parts, .n_seqs = n, .logits = true};
        int r = engine_step(engine, &step, &from, err);
        if (r < 0)
            return r;
        for (uint32_t i = 0; i < n && rows->n < seq->n_targets; i++)
            add(rows, from.logits + (size_t)i * rows->vocab);
        at += n;
    }
    return 0;
}

bool prompt_rows_wants_last(const struct prompt_rows *rows)
{
    return rows->seq->n_targets == rows->seq->n_tokens;
}

void prompt_rows_add_last(struct prompt_rows *rows, const float *logits)
{
    if (prompt_rows_wants_last(rows) && rows->n < rows->seq->n_targets)
        add(rows, logits);
}

Ember__V1__PromptLogprobs *prompt_rows_message(struct prompt_rows *rows)
{
    rows->message.id = rows->seq->id;
    rows->message.first = rows->seq->position;
    rows->message.n_rows = rows->n;
    rows->message.rows = rows->list;
    return &rows->message;
}
