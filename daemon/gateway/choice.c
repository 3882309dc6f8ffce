/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/request.h"

#include <errno.h>
#include <string.h>

#include "base/clock.h"
#include "base/digest.h"
#include "daemon/gateway/json.h"

int choice_init(struct choice *choice, struct gw_part *part, uint32_t index)
{
    const struct gw_job *job = part->job;
    const struct text *text = job->model->text;
    uint64_t seed = (checksum_of(job->id, strlen(job->id)) ^ clock_ns()) + index;

    *choice = (struct choice){.part = part, .index = index, .stop_token = -1};
    choice->message =
        message_new(text, &job->api, &job->api.prompts[part->index], seed, &choice->text);
    /* What a message needs to see among special tokens it takes out of the text itself. */
    return detok_new(text->tokenizer, job->api.skip_special && !choice->message, &choice->detok);
}

void choice_free(struct choice *choice)
{
    detok_free(choice->detok);
    message_free(choice->message);
    choice->message = NULL;
    stop_free(&choice->stop);
    buffer_free(&choice->text);
    buffer_free(&choice->before);
    buffer_free(&choice->after);
    buffer_free(&choice->ids);
    buffer_free(&choice->lp);
    buffer_free(&choice->lp_tokens);
    buffer_free(&choice->lp_top);
    buffer_free(&choice->lp_offsets);
    choice->detok = NULL;
}

/* ---- log-probabilities ---- */

static size_t count_characters(const char *text, size_t len)
{
    size_t n = 0;

    for (size_t i = 0; i < len; i++)
        n += (text[i] & 0xc0) != 0x80;
    return n;
}

static void token_text(const struct gw_job *job, uint32_t token, struct buffer *out)
{
    const struct tokenizer *t = job->model->text->tokenizer;
    size_t len;

    out->len = 0;
    if (job->api.tokens_as_ids) {
        js_printf(out, "token_id:%u", token);
        return;
    }
    if (tokenizer_token_bytes(t, token, out, NULL) == 0 && out->len)
        return;
    const char *spelling = tokenizer_token_text(t, token, &len);
    if (spelling)
        js_printf(out, "%.*s", (int)MIN(len, (size_t)500), spelling);
    else
        js_raw(out, "");
}

static void comma(struct buffer *out)
{
    if (out->len)
        js_raw(out, ",");
}

static void token_object(const struct gw_job *job, uint32_t token, float logprob,
                         struct buffer *scratch, struct buffer *out)
{
    token_text(job, token, scratch);
    js_raw(out, "{\"token\":");
    js_string(out, scratch->data ? scratch->data : "", scratch->len);
    js_raw(out, ",\"logprob\":");
    js_float(out, MAX(logprob, -9999.0f)); /* JSON has no infinity */
    js_raw(out, ",\"bytes\":[");
    for (size_t i = 0; i < scratch->len; i++)
        js_printf(out, "%s%u", i ? "," : "", (unsigned char)scratch->data[i]);
    js_raw(out, "]");
}

static void chat_entry(const struct gw_job *job, uint32_t token, float logprob,
                       const struct sched_logprob *top, uint32_t n_top, struct buffer *out)
{
    struct buffer scratch = {0};

    comma(out);
    token_object(job, token, logprob, &scratch, out);
    js_raw(out, ",\"top_logprobs\":[");
    for (uint32_t i = 0; i < MIN(n_top, (uint32_t)job->api.logprobs); i++) {
        if (i)
            js_raw(out, ",");
        token_object(job, top[i].token, top[i].logprob, &scratch, out);
        js_raw(out, "}");
    }
    js_raw(out, "]}");
    buffer_free(&scratch);
}

struct lists {
    struct buffer *tokens, *logprobs, *top, *offsets;
};

static void completion_entry(const struct gw_job *job, const struct lists *to, size_t offset,
                             uint32_t token, const float *logprob, const struct sched_logprob *top,
                             uint32_t n_top)
{
    struct buffer scratch = {0};
    bool seen = false;

    comma(to->tokens);
    comma(to->logprobs);
    comma(to->top);
    comma(to->offsets);
    token_text(job, token, &scratch);
    js_string(to->tokens, scratch.data ? scratch.data : "", scratch.len);
    js_printf(to->offsets, "%zu", offset);
    if (!logprob) { /* the prompt's first token has none */
        js_raw(to->logprobs, "null");
        js_raw(to->top, "null");
        buffer_free(&scratch);
        return;
    }
    js_float(to->logprobs, MAX(*logprob, -9999.0f));
    js_raw(to->top, "{");
    for (uint32_t i = 0; i <= MIN(n_top, (uint32_t)job->api.logprobs); i++) {
        bool extra = i == MIN(n_top, (uint32_t)job->api.logprobs); /* the sampled one's turn */
        uint32_t id = extra ? token : top[i].token;
        if (extra && seen)
            break;
        seen |= id == token;
        token_text(job, id, &scratch);
        if (i)
            js_raw(to->top, ",");
        js_string(to->top, scratch.data ? scratch.data : "", scratch.len);
        js_raw(to->top, ":");
        js_float(to->top, MAX(extra ? *logprob : top[i].logprob, -9999.0f));
    }
    js_raw(to->top, "}");
    buffer_free(&scratch);
}

static void add_logprob(struct choice *choice, const struct sched_event *event)
{
    const struct gw_job *job = choice->part->job;
    struct lists lists = {&choice->lp_tokens, &choice->lp, &choice->lp_top, &choice->lp_offsets};
    struct buffer scratch = {0};

    if (job->kind == API_CHAT) {
        chat_entry(job, event->token, event->logprob, event->top, event->n_top, &choice->lp);
        return;
    }
    size_t base = job->api.echo ? choice->part->echo_chars : 0;
    completion_entry(job, &lists, base + choice->offset, event->token, &event->logprob, event->top,
                     event->n_top);
    token_text(job, event->token, &scratch);
    choice->offset += count_characters(scratch.data ? scratch.data : "", scratch.len);
    buffer_free(&scratch);
}

/* ---- text ---- */

/* Whether the token ends the choice and is no part of its text. */
static bool is_stop_token(const struct choice *choice, uint32_t token)
{
    const struct gw_job *job = choice->part->job;
    const struct text *text = job->model->text;

    for (size_t i = 0; i < job->api.n_stop_ids; i++)
        if (job->api.stop_ids[i] == token)
            return true;
    for (uint32_t i = 0; i < text->n_eos && !job->api.ignore_eos; i++)
        if (text->eos[i] == token)
            return true;
    return false;
}

/*
 * Puts new text (the last, when it is `final`) through the stop strings and on to the message, or
 * to the choice's text. True: the choice ends here, by a stop string or with the one call it may
 * make.
 */
static bool add_text(struct choice *choice, const struct buffer *piece, bool final)
{
    const struct gw_job *job = choice->part->job;
    static const struct stop_set none;
    static struct buffer passed; /* kept, like a token's piece */
    struct buffer *to = choice->message ? &passed : &choice->text;
    bool early = choice->n_generated < job->api.min_tokens;
    size_t which;

    passed.len = 0;
    choice->stopped =
        stop_push(&choice->stop, early ? &none : &job->stops, piece->data ? piece->data : "",
                  piece->len, job->api.include_stop, to, &which);
    if (choice->stopped)
        choice->stop_string = job->api.stops[which];
    else if (final)
        stop_finish(&choice->stop, to);
    if (choice->message) {
        message_push(choice->message, passed.data ? passed.data : "", passed.len);
        choice->stopped |= message_done(choice->message);
    }
    return choice->stopped;
}

bool choice_token(struct choice *choice, const struct sched_event *event)
{
    const struct gw_job *job = choice->part->job;
    static struct buffer piece; /* one token at a time: the memory is kept */

    if (choice->stopped)
        return false;
    choice->n_generated++;
    if (job->api.return_ids)
        js_printf(&choice->ids, "%s%u", choice->ids.len ? "," : "", event->token);
    if (job->api.logprobs >= 0)
        add_logprob(choice, event);
    if (is_stop_token(choice, event->token) && choice->n_generated >= job->api.min_tokens) {
        choice->stop_token = event->token;
        if (!job->api.include_stop || choice->message)
            return false;
    }
    piece.len = 0;
    if (choice->message && message_skips(choice->message, event->token))
        return false;
    if (detok_push(choice->detok, event->token, &piece, NULL) < 0)
        abort(); /* memory for a few bytes */
    return add_text(choice, &piece, false);
}

void choice_finish(struct choice *choice, const struct sched_event *event)
{
    const struct text *text = choice->part->job->model->text;
    struct buffer piece = {0};

    choice->ended = true;
    choice->reason = event->reason == SCHED_LENGTH ? "length" : "stop";
    if (choice->stop_token >= 0 && event->reason != SCHED_STOP)
        choice->stop_token = -1;
    if (!choice->stopped) {
        if (detok_finish(choice->detok, &piece, NULL) < 0)
            abort();
        add_text(choice, &piece, true);
        buffer_free(&piece);
    }
    if (choice->message) {
        message_finish(choice->message);
        if (message_calls(choice->message) && event->reason != SCHED_LENGTH)
            choice->reason = "tool_calls";
    }
    if (choice->stopped)
        return;
    for (uint32_t i = 0; i < text->n_eos; i++) /* stop_reason is null for the model's own end */
        if (choice->stop_token == text->eos[i])
            choice->stop_token = -1;
}

/* ---- the prompt's ---- */

static void prompt_entry(struct gw_part *part, uint32_t position, const float *logprob,
                         const struct sched_logprob *top, uint32_t n_top)
{
    struct gw_job *job = part->job;
    const struct api_prompt *prompt = &job->api.prompts[part->index];
    struct buffer scratch = {0}, *out = &part->prompt_lp;
    uint32_t token = prompt->ids[position];

    comma(out);
    if (!logprob) {
        js_raw(out, "null");
        return;
    }
    /* vLLM's form: {"id": {logprob, rank, decoded_token}, ...}, the best and the prompt's own,
     * whose rank nobody knows when it is none of the best. */
    bool seen = false;
    uint32_t n = MIN(n_top, (uint32_t)MAX(job->api.prompt_logprobs, 0));
    js_raw(out, "{");
    for (uint32_t i = 0; i <= n; i++) {
        uint32_t id = i < n ? top[i].token : token;
        if (i == n && seen)
            break;
        seen |= id == token;
        token_text(job, id, &scratch);
        js_printf(out, "%s\"%u\":{\"logprob\":", i ? "," : "", id);
        js_float(out, MAX(i < n ? top[i].logprob : *logprob, -9999.0f));
        if (i < n)
            js_printf(out, ",\"rank\":%u,\"decoded_token\":", i + 1);
        else
            js_raw(out, ",\"rank\":null,\"decoded_token\":");
        js_string(out, scratch.data ? scratch.data : "", scratch.len);
        js_raw(out, "}");
    }
    js_raw(out, "}");
    buffer_free(&scratch);
}

static void echo_entry(struct gw_part *part, uint32_t position, const float *logprob,
                       const struct sched_logprob *top, uint32_t n_top)
{
    const struct gw_job *job = part->job;
    struct lists lists = {&part->echo_tokens, &part->echo_lp, &part->echo_top, &part->echo_offsets};
    uint32_t token = job->api.prompts[part->index].ids[position];
    struct buffer scratch = {0};

    completion_entry(job, &lists, part->echo_chars, token, logprob, top, n_top);
    token_text(job, token, &scratch);
    part->echo_chars += count_characters(scratch.data ? scratch.data : "", scratch.len);
    buffer_free(&scratch);
}

static void add_prompt_row(struct gw_part *part, uint32_t position, const float *logprob,
                           const struct sched_logprob *top, uint32_t n_top)
{
    const struct gw_job *job = part->job;

    if (job->api.prompt_logprobs >= 0)
        prompt_entry(part, position, logprob, top, n_top);
    if (job->api.echo && job->api.logprobs >= 0)
        echo_entry(part, position, logprob, top, n_top);
}

void part_prompt(struct gw_part *part, const struct sched_event *event)
{
    const Ember__V1__PromptLogprobs *rows = event->prompt_logprobs;
    const struct api_prompt *prompt = &part->job->api.prompts[part->index];
    struct sched_logprob top[64];

    if (event->first == 0)
        add_prompt_row(part, 0, NULL, NULL, 0);
    for (size_t i = 0; rows && i < rows->n_rows; i++) {
        const Ember__V1__SequenceResult *row = rows->rows[i];
        size_t position = (size_t)rows->first + i + 1, n = MIN(row->n_top, ARRAY_LEN(top));
        if (position <= event->first || position > (size_t)event->first + event->count ||
            position >= prompt->n_ids)
            continue; /* told already, before the sequence was replayed */
        for (size_t k = 0; k < n; k++)
            top[k] = (struct sched_logprob){row->top[k]->token, row->top[k]->logprob};
        add_prompt_row(part, (uint32_t)position, &row->logprob, top, (uint32_t)n);
    }
}
