/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/message.h"

#include <string.h>

#include "daemon/gateway/json.h"
#include "model/chat/chat.h"

struct message {
    const struct text *text;
    const struct api_request *request;
    struct chat_form form;
    struct chat_parser *parser;
    struct buffer *content;
    struct buffer reasoning; /* that was not written yet */
    struct buffer calls;     /* entries of tool_calls, the last one open when in_entry */
    struct buffer scratch;
    bool in_entry;
};

static void append(struct buffer *out, const char *bytes, size_t n)
{
    if (n && buffer_append(out, bytes, n) < 0)
        abort();
}

/* ---- what the parser says ---- */

static void on_text(void *ctx, enum chat_channel channel, const char *text, size_t len)
{
    struct message *m = ctx;

    if (channel == CHAT_CONTENT)
        append(m->content, text, len);
    else if (m->request->include_reasoning)
        append(&m->reasoning, text, len);
}

static void close_entry(struct message *m)
{
    if (m->in_entry)
        js_raw(&m->calls, "\"}}");
    m->in_entry = false;
}

static void open_entry(struct message *m, unsigned index)
{
    close_entry(m);
    js_raw(&m->calls, m->calls.len ? ",{" : "{");
    if (m->request->stream)
        js_printf(&m->calls, "\"index\":%u,", index);
    m->in_entry = true;
}

static void on_call(void *ctx, unsigned index, const char *id, const char *name)
{
    struct message *m = ctx;

    open_entry(m, index);
    js_raw(&m->calls, "\"id\":");
    js_cstring(&m->calls, id);
    js_raw(&m->calls, ",\"type\":\"function\",\"function\":{\"name\":");
    js_cstring(&m->calls, name);
    js_raw(&m->calls, ",\"arguments\":\"");
}

static void on_arguments(void *ctx, unsigned index, const char *text, size_t len)
{
    struct message *m = ctx;

    if (!m->in_entry) { /* its beginning has been sent */
        open_entry(m, index);
        js_raw(&m->calls, "\"function\":{\"arguments\":\"");
    }
    m->scratch.len = 0;
    js_string(&m->scratch, text, len);
    append(&m->calls, m->scratch.data + 1, m->scratch.len - 2); /* without its quotes */
}

static void on_call_end(void *ctx, unsigned index, bool whole)
{
    close_entry(ctx);
}

/* ---- from outside ---- */

struct message *message_new(const struct text *text, const struct api_request *request,
                            const struct api_prompt *prompt, uint64_t seed, struct buffer *content)
{
    bool tools = request->tools && request->tool_choice != API_TOOLS_NONE;
    struct chat_form form = text->form;
    struct message *m;

    if (!tools && form.tools != CHAT_TOOLS_HARMONY)
        form.tools = CHAT_TOOLS_NONE;
    enum chat_forced forced = request->tool_choice == API_TOOLS_NAMED      ? CHAT_FORCED_ARGUMENTS
                              : request->tool_choice == API_TOOLS_REQUIRED ? CHAT_FORCED_CALLS
                                                                           : CHAT_FREE;
    if (request->grammar.kind != API_GRAMMAR_NONE) /* of all of the text, or else it is a call */
        form = (struct chat_form){.tools = request->grammar.or_begins ? form.tools : 0};
    if (request->kind != API_CHAT || (!forced && !form.tools && !form.reasoning))
        return NULL;
    m = x_alloc(sizeof *m);
    *m = (struct message){.text = text, .request = request, .form = form, .content = content};
    const struct chat_sink sink = {.ctx = m,
                                   .text = on_text,
                                   .call = on_call,
                                   .arguments = on_arguments,
                                   .call_end = on_call_end};
    const struct chat_options options = {.form = form,
                                         .tools = tools ? request->tools : NULL,
                                         .prompt = prompt->text,
                                         .prompt_len = prompt->text ? prompt->len : 0,
                                         .forced = forced,
                                         .function = request->tool_name,
                                         .live = request->stream,
                                         .one_call = !request->parallel_calls,
                                         .id_seed = seed};
    m->parser = chat_parser_new(&options, &sink);
    return m;
}

void message_free(struct message *m)
{
    if (!m)
        return;
    chat_parser_free(m->parser);
    buffer_free(&m->reasoning);
    buffer_free(&m->calls);
    buffer_free(&m->scratch);
    free(m);
}

bool message_skips(const struct message *m, uint32_t token)
{
    size_t len;
    const char *spelling;

    if (!m->request->skip_special || !tokenizer_is_special(m->text->tokenizer, token))
        return false;
    spelling = tokenizer_token_text(m->text->tokenizer, token, &len);
    return !spelling || !chat_wants(m->form, spelling, len);
}

void message_push(struct message *m, const char *text, size_t len)
{
    if (len)
        chat_parser_push(m->parser, text, len);
}

void message_finish(struct message *m)
{
    chat_parser_finish(m->parser);
}

bool message_done(const struct message *m)
{
    return chat_parser_done(m->parser);
}

bool message_calls(const struct message *m)
{
    return chat_parser_calls(m->parser) > 0;
}

bool message_pending(const struct message *m)
{
    return m->reasoning.len || m->calls.len;
}

void message_write(struct message *m, struct buffer *out)
{
    /* Two names for one thing: vLLM's new one, and the one that most clients look for. */
    static const char *const names[] = {",\"reasoning\":", ",\"reasoning_content\":"};

    for (size_t i = 0; i < ARRAY_LEN(names) && m->reasoning.len; i++) {
        js_raw(out, names[i]);
        js_string(out, m->reasoning.data, m->reasoning.len);
    }
    close_entry(m);
    if (m->calls.len) {
        js_raw(out, ",\"tool_calls\":[");
        append(out, m->calls.data, m->calls.len);
        js_raw(out, "]");
    }
    m->reasoning.len = m->calls.len = 0;
}
