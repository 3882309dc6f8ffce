/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/request.h"

#include <string.h>

#include "base/clock.h"
#include "daemon/gateway/json.h"

static void raw_buffer(struct buffer *out, const struct buffer *from)
{
    if (from->len && buffer_append(out, from->data, from->len) < 0)
        abort();
}

static void string_buffer(struct buffer *out, const struct buffer *from)
{
    js_string(out, from->data ? from->data : "", from->len);
}

/* {"id":...,"object":...,"created":...,"model":... */
static void object_head(const struct gw_job *job, const char *object, struct buffer *out)
{
    js_raw(out, "{\"id\":");
    js_cstring(out, job->id);
    js_raw(out, ",\"object\":");
    js_cstring(out, object);
    js_printf(out, ",\"created\":%ld,\"model\":", job->created);
    js_cstring(out, job->model->name);
}

void respond_init(struct gw_job *job)
{
    if (!job->api.stream)
        return;
    js_raw(&job->head, "data: ");
    object_head(job, job->kind == API_CHAT ? "chat.completion.chunk" : "text_completion",
                &job->head);
}

static void usage(const struct gw_job *job, struct buffer *out)
{
    uint64_t prompt = 0, cached = 0, generated = 0;

    for (size_t i = 0; i < job->api.n_prompts; i++) {
        prompt += job->api.prompts[i].n_ids;
        cached += job->parts[i].n_cached;
    }
    for (uint32_t i = 0; i < job->n_choices; i++)
        generated += job->choices[i].n_generated;
    js_printf(out,
              "{\"prompt_tokens\":%llu,\"completion_tokens\":%llu,\"total_tokens\":%llu,"
              "\"prompt_tokens_details\":{\"cached_tokens\":%llu}}",
              (unsigned long long)prompt, (unsigned long long)generated,
              (unsigned long long)(prompt + generated), (unsigned long long)cached);
}

/* ---- log-probabilities of a choice: what is pending, or all ---- */

static void list(struct buffer *out, const char *name, const struct buffer *echo,
                 const struct buffer *own)
{
    js_printf(out, "\"%s\":[", name);
    if (echo)
        raw_buffer(out, echo);
    if (echo && echo->len && own->len)
        js_raw(out, ",");
    raw_buffer(out, own);
    js_raw(out, "]");
}

/* The prompt's entries come with the first text. */
static void completion_logprobs(const struct gw_job *job, struct choice *c, struct buffer *out)
{
    const struct gw_part *part = c->part;
    bool echo = job->api.echo && !c->begun;

    js_raw(out, "{");
    list(out, "text_offset", echo ? &part->echo_offsets : NULL, &c->lp_offsets);
    js_raw(out, ",");
    list(out, "token_logprobs", echo ? &part->echo_lp : NULL, &c->lp);
    js_raw(out, ",");
    list(out, "tokens", echo ? &part->echo_tokens : NULL, &c->lp_tokens);
    js_raw(out, ",");
    list(out, "top_logprobs", echo ? &part->echo_top : NULL, &c->lp_top);
    js_raw(out, "}");
}

static void logprobs(const struct gw_job *job, struct choice *c, struct buffer *out)
{
    js_raw(out, ",\"logprobs\":");
    if (job->api.logprobs < 0) {
        js_raw(out, "null");
    } else if (job->kind == API_CHAT) {
        js_raw(out, "{\"content\":[");
        raw_buffer(out, &c->lp);
        js_raw(out, "],\"refusal\":null}");
    } else {
        completion_logprobs(job, c, out);
    }
    c->lp.len = c->lp_tokens.len = c->lp_top.len = c->lp_offsets.len = 0;
}

static void reasons(const struct choice *c, bool last, struct buffer *out)
{
    js_raw(out, ",\"finish_reason\":");
    js_cstring(out, last ? c->reason : NULL);
    js_raw(out, ",\"stop_reason\":");
    if (last && c->stop_string)
        js_cstring(out, c->stop_string);
    else if (last && c->stop_token >= 0)
        js_printf(out, "%lld", (long long)c->stop_token);
    else
        js_raw(out, "null");
}

static void prompt_ids(const struct gw_job *job, const struct gw_part *part, struct buffer *out)
{
    const struct api_prompt *prompt = &job->api.prompts[part->index];

    js_raw(out, ",\"prompt_token_ids\":[");
    for (size_t i = 0; i < prompt->n_ids; i++)
        js_printf(out, "%s%u", i ? "," : "", prompt->ids[i]);
    js_raw(out, "]");
}

/* A chat's prompt is beside its choices. */
static void token_ids(const struct gw_job *job, struct choice *c, struct buffer *out)
{
    if (!job->api.return_ids)
        return;
    if (!c->prompt_ids_sent && job->kind != API_CHAT)
        prompt_ids(job, c->part, out);
    c->prompt_ids_sent = true;
    js_raw(out, ",\"token_ids\":[");
    raw_buffer(out, &c->ids);
    js_raw(out, "]");
    c->ids.len = 0;
}

/* The prompt's text, as it was given or as its ids read. */
static void echo_text(const struct gw_job *job, const struct choice *c, struct buffer *out)
{
    const struct api_prompt *prompt = &job->api.prompts[c->part->index];

    if (prompt->text) {
        if (buffer_append(out, prompt->text, prompt->len) < 0)
            abort();
        return;
    }
    tokenizer_decode(job->model->text->tokenizer, prompt->ids, prompt->n_ids, false, out, NULL);
}

/* Chats echo the last message when it is continued. */
static void echo(const struct gw_job *job, struct choice *c)
{
    struct buffer whole = {0};

    if (!job->api.echo || c->begun)
        return;
    if (job->kind == API_CHAT) {
        json_t *last = json_array_get(job->api.messages, json_array_size(job->api.messages) - 1);
        json_t *content = json_object_get(last, "content");
        if (json_is_string(content) && job->api.continue_final)
            js_raw(&whole, json_string_value(content));
    } else {
        echo_text(job, c, &whole);
    }
    raw_buffer(&whole, &c->text);
    buffer_free(&c->text);
    c->text = whole;
}

/* ---- streams ---- */

static bool send_out(struct gw_job *job)
{
    if (!job->streaming) {
        http_stream_begin(job->http);
        job->streaming = true;
    }
    if (!job->any_token) /* until then heartbeats are counted from here */
        job->heartbeat_ns = clock_ns();
    gw_pump(job->gw); /* flushes */
    bool fast = http_stream_send(job->http, job->out.data, job->out.len);
    job->out.len = 0;
    return fast;
}

static void close_chunk(struct gw_job *job)
{
    if (job->api.continuous_usage) {
        js_raw(&job->out, ",\"usage\":");
        usage(job, &job->out);
    } else if (job->api.include_usage) {
        js_raw(&job->out, ",\"usage\":null");
    }
    js_raw(&job->out, "}\n\n");
}

/* The chunk that opens a chat's choice. */
static void role_chunk(struct gw_job *job, struct choice *c)
{
    raw_buffer(&job->out, &job->head);
    js_printf(&job->out,
              ",\"choices\":[{\"index\":%u,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},"
              "\"logprobs\":null,\"finish_reason\":null}]",
              c->index);
    if (job->api.return_ids)
        prompt_ids(job, c->part, &job->out);
    close_chunk(job);
    c->role_sent = true;
}

/* {"id":..., ... "choices":[{"index":0, */
static void open_chunk(struct gw_job *job, const struct choice *c, struct buffer *out)
{
    raw_buffer(out, &job->head);
    js_printf(out, ",\"choices\":[{\"index\":%u,", c->index);
}

/* What is the same around every text of a choice without anything special. */
static void make_ends(struct gw_job *job, struct choice *c)
{
    bool chat = job->kind == API_CHAT;

    open_chunk(job, c, &c->before);
    js_raw(&c->before, chat ? "\"delta\":{\"content\":" : "\"text\":");
    js_raw(&c->after, chat ? "}" : "");
    js_raw(&c->after, ",\"logprobs\":null,\"finish_reason\":null,\"stop_reason\":null}]");
    js_raw(&c->after, job->api.include_usage ? ",\"usage\":null}\n\n" : "}\n\n");
}

/* What is new of a chat's choice. */
static void delta(struct choice *c, struct buffer *out)
{
    size_t at;

    js_raw(out, "\"delta\":{");
    at = out->len;
    if (c->text.len) {
        js_raw(out, ",\"content\":");
        string_buffer(out, &c->text);
    }
    if (c->message)
        message_write(c->message, out);
    if (out->len > at) { /* the first member has no comma */
        memmove(out->data + at, out->data + at + 1, out->len - at - 1);
        out->len--;
    }
    js_raw(out, "}");
}

/* By far the most: a chunk in mid-stream with nothing but text. */
static bool is_plain(const struct gw_job *job, const struct choice *c, bool last)
{
    return !last && c->begun && job->api.logprobs < 0 && !job->api.return_ids &&
           !job->api.continuous_usage && !(c->message && message_pending(c->message));
}

static bool plain_chunk(struct gw_job *job, struct choice *c)
{
    if (!c->before.len)
        make_ends(job, c);
    raw_buffer(&job->out, &c->before);
    string_buffer(&job->out, &c->text);
    raw_buffer(&job->out, &c->after);
    c->text.len = 0;
    return send_out(job);
}

bool respond_chunk(struct gw_job *job, struct choice *c, bool last)
{
    struct buffer *out = &job->out;
    bool chat = job->kind == API_CHAT;

    if (chat && !c->role_sent)
        role_chunk(job, c);
    echo(job, c);
    if (!c->text.len && !last && !(c->message && message_pending(c->message)))
        return out->len ? send_out(job) : true;
    if (is_plain(job, c, last))
        return plain_chunk(job, c);
    open_chunk(job, c, out);
    if (chat) {
        delta(c, out);
    } else {
        js_raw(out, "\"text\":");
        string_buffer(out, &c->text);
    }
    logprobs(job, c, out);
    reasons(c, last, out);
    token_ids(job, c, out);
    js_raw(out, "}]");
    close_chunk(job);
    c->text.len = 0;
    c->begun = true;
    return send_out(job);
}

bool respond_heartbeat(struct gw_job *job)
{
    js_raw(&job->out, ": waiting\n\n");
    return send_out(job);
}

static void end_stream(struct gw_job *job)
{
    struct buffer *out = &job->out;

    out->len = 0;
    if (job->fail.status) {
        js_raw(out, "data: ");
        http_error_json(out, job->fail.status, NULL, job->fail.code,
                        *job->fail.param ? job->fail.param : NULL, error_text(&job->fail.err));
        js_raw(out, "\n\n");
    } else if (job->api.include_usage) {
        raw_buffer(out, &job->head);
        js_raw(out, ",\"choices\":[],\"usage\":");
        usage(job, out);
        js_raw(out, "}\n\n");
    }
    js_raw(out, "data: [DONE]\n\n");
    send_out(job);
    http_stream_end(TAKE(job->http));
}

/* ---- whole objects ---- */

static void whole_choice(const struct gw_job *job, struct choice *c, struct buffer *out)
{
    bool chat = job->kind == API_CHAT;

    echo(job, c);
    js_printf(out, "{\"index\":%u,", c->index);
    js_raw(out, chat ? "\"message\":{\"role\":\"assistant\",\"content\":" : "\"text\":");
    if (c->message && !c->text.len && message_pending(c->message))
        js_raw(out, "null");
    else
        string_buffer(out, &c->text);
    js_raw(out, chat ? ",\"refusal\":null" : "");
    if (c->message)
        message_write(c->message, out);
    js_raw(out, chat ? "}" : "");
    logprobs(job, c, out);
    reasons(c, true, out);
    token_ids(job, c, out);
    if (job->api.prompt_logprobs >= 0 && !chat) {
        js_raw(out, ",\"prompt_logprobs\":[");
        raw_buffer(out, &c->part->prompt_lp);
        js_raw(out, "]");
    }
    js_raw(out, "}");
}

static void whole(struct gw_job *job)
{
    struct buffer *out = &job->out;

    object_head(job, job->kind == API_CHAT ? "chat.completion" : "text_completion", out);
    js_raw(out, ",\"choices\":[");
    for (uint32_t i = 0; i < job->n_choices; i++) {
        if (i)
            js_raw(out, ",");
        whole_choice(job, &job->choices[i], out);
    }
    js_raw(out, "],\"usage\":");
    usage(job, out);
    if (job->api.prompt_logprobs >= 0 && job->kind == API_CHAT) {
        js_raw(out, ",\"prompt_logprobs\":[");
        raw_buffer(out, &job->parts[0].prompt_lp);
        js_raw(out, "]");
    }
    if (job->api.return_ids && job->kind == API_CHAT)
        prompt_ids(job, &job->parts[0], out);
    js_raw(out, ",\"system_fingerprint\":null}");
    http_reply(TAKE(job->http), 200, "application/json", out->data, out->len);
}

void respond_end(struct gw_job *job)
{
    if (!job->http)
        return;
    if (job->streaming || (job->api.stream && !job->fail.status && job->model))
        end_stream(job);
    else if (job->fail.status)
        http_fail(TAKE(job->http), job->fail.status, NULL, job->fail.code,
                  *job->fail.param ? job->fail.param : NULL, job->retry_s,
                  error_text(&job->fail.err));
    else
        whole(job);
}

/* ---- /tokenize, /detokenize ---- */

static void token_strings(const struct gw_job *job, const struct api_prompt *prompt,
                          struct buffer *out)
{
    js_raw(out, ",\"token_strs\":[");
    for (size_t i = 0; i < prompt->n_ids; i++) {
        size_t len = 0;
        const char *s = tokenizer_token_text(job->model->text->tokenizer, prompt->ids[i], &len);
        if (i)
            js_raw(out, ",");
        js_string(out, s, len);
    }
    js_raw(out, "]");
}

void respond_tokens(struct gw_job *job)
{
    struct buffer *out = &job->out, text = {0};
    const struct api_prompt *prompt = &job->api.prompts[0];

    if (job->kind == API_TOKENIZE) {
        js_printf(out, "{\"count\":%zu,\"max_model_len\":%u,\"tokens\":[", prompt->n_ids,
                  job->model->max_positions);
        for (size_t i = 0; i < prompt->n_ids; i++)
            js_printf(out, "%s%u", i ? "," : "", prompt->ids[i]);
        js_raw(out, "]");
        if (job->api.return_strings)
            token_strings(job, prompt, out);
    } else {
        tokenizer_decode(job->model->text->tokenizer, prompt->ids, prompt->n_ids,
                         job->api.skip_special, &text, NULL);
        js_raw(out, "{\"prompt\":");
        string_buffer(out, &text);
    }
    js_raw(out, "}");
    buffer_free(&text);
}
