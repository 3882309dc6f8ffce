/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The parser's loop: reasoning, content, sections, and what becomes of a call. Each step decides as
 * much as the text so far allows, whatever pieces it came in, or asks for more; that is why pieces
 * do not matter.
 */
#include <stdio.h>
#include <string.h>

#include "base/digest.h"
#include "model/chat/internal.h"

/* ---- text ---- */

void chat_append(struct buffer *out, const void *bytes, size_t n)
{
    if (n && buffer_append(out, bytes, n) < 0)
        abort();
}

bool chat_is_blank(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

size_t chat_skip_blank(const struct chat_parser *p, size_t at)
{
    while (at < p->in.len && chat_is_blank(p->in.data[at]))
        at++;
    return at;
}

void chat_trim(const char **s, size_t *n)
{
    while (*n && chat_is_blank(**s)) {
        (*s)++;
        (*n)--;
    }
    while (*n && chat_is_blank((*s)[*n - 1]))
        (*n)--;
}

/* White space goes out with the text behind it; what nothing follows is decided at the end. */
void chat_say(struct chat_parser *p, enum chat_channel channel, const char *text, size_t len)
{
    struct buffer *blank = &p->blank[channel];
    size_t start = 0, end = len;

    while (end && chat_is_blank(text[end - 1]))
        end--;
    if (end && p->trim[channel] && !p->said[channel]) {
        blank->len = 0;
        while (chat_is_blank(text[start]))
            start++;
    }
    if (end) {
        if (blank->len)
            p->sink.text(p->sink.ctx, channel, blank->data, blank->len);
        blank->len = 0;
        p->sink.text(p->sink.ctx, channel, text + start, end - start);
        p->said[channel] = true;
    }
    chat_append(blank, text + end, len - end);
}

static void say_to(struct chat_parser *p, enum chat_channel channel, size_t end)
{
    chat_say(p, channel, p->in.data + p->mark, end - p->mark);
    p->mark = p->pos = end;
}

enum answer chat_at(const struct chat_parser *p, size_t at, const char *word, bool end)
{
    size_t n = strlen(word), left = p->in.len - at;

    if (memcmp(p->in.data + at, word, MIN(n, left)))
        return NO;
    return left >= n ? YES : end ? NO : MAYBE;
}

int chat_find(const struct chat_parser *p, const char *const *words, size_t n, bool end,
              size_t *ret_at)
{
    for (size_t at = p->pos; at < p->in.len; at++)
        for (size_t i = 0; i < n; i++) {
            if (!words[i] || p->in.data[at] != *words[i])
                continue;
            enum answer answer = chat_at(p, at, words[i], end);
            if (answer == NO)
                continue;
            *ret_at = at;
            return answer == YES ? (int)i : -1;
        }
    *ret_at = p->in.len;
    return -1;
}

/* ---- calls ---- */

const json_t *chat_function(const struct chat_parser *p, const char *name)
{
    size_t i;
    json_t *tool;

    json_array_foreach((json_t *)p->o.tools, i, tool)
    {
        const json_t *function = json_object_get(tool, "function");
        const char *s = json_string_value(json_object_get(function, "name"));
        if (s && !strcmp(s, name))
            return function;
    }
    return NULL;
}

static void call_free(struct call *c)
{
    buffer_free(&c->name);
    buffer_free(&c->id);
    buffer_free(&c->key);
    buffer_free(&c->args);
}

void chat_call_reset(struct chat_parser *p)
{
    call_free(&p->call);
    p->call = (struct call){.stream_at = SIZE_MAX, .typed = -1};
}

/* The model's own id where its template wants that back; Mistral's are nine letters and digits. */
static void make_id(const struct chat_parser *p, char buf[64])
{
    static const char letters[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    uint64_t seed[2] = {p->o.id_seed, p->n_index};
    struct digest d = digest_of(seed, sizeof seed);
    char hex[DIGEST_HEX_SIZE];

    if (p->o.form.tools != CHAT_TOOLS_MISTRAL) {
        snprintf(buf, 64, "call_%.24s", digest_hex(&d, hex));
        return;
    }
    for (int i = 0; i < 9; i++)
        buf[i] = letters[d.bytes[i] % (sizeof letters - 1)];
    buf[9] = 0;
}

static void call_begin(struct chat_parser *p)
{
    char id[64];

    if (p->call.begun)
        return;
    p->call.begun = true;
    make_id(p, id);
    p->sink.call(p->sink.ctx, p->n_index, p->call.id.len ? p->call.id.data : id, p->call.name.data);
}

void chat_arguments(struct chat_parser *p, const char *text, size_t len)
{
    p->call.given = true;
    if (!p->o.live) {
        chat_append(&p->call.args, text, len);
        return;
    }
    call_begin(p);
    if (len)
        p->sink.arguments(p->sink.ctx, p->n_index, text, len);
}

void chat_call_whole(struct chat_parser *p)
{
    struct call *c = &p->call;

    if (!c->given)
        chat_arguments(p, "{}", 2);
    call_begin(p);
    if (c->args.len)
        p->sink.arguments(p->sink.ctx, p->n_index, c->args.data, c->args.len);
    p->sink.call_end(p->sink.ctx, p->n_index, true);
    p->n_index++;
    p->n_whole++;
    p->blank[CHAT_CONTENT].len = 0;
    p->trim[CHAT_CONTENT] = true;
    p->section_used = true;
    p->mark = p->pos;
    bool fenced = c->fenced;
    chat_call_reset(p);
    p->call.fenced = fenced;
}

void chat_call_broken(struct chat_parser *p)
{
    if (p->call.begun) {
        p->sink.call_end(p->sink.ctx, p->n_index, false);
        p->n_index++;
    }
    chat_call_reset(p);
    p->started = true;
    p->in_section = false;
    say_to(p, CHAT_CONTENT, p->pos);
}

static enum step chat_body(struct chat_parser *p, bool end)
{
    switch (p->call.json ? BODY_JSON : p->family->body) {
    case BODY_JSON:
        return chat_body_json(p);
    case BODY_NAMED:
        return chat_body_named(p, end);
    case BODY_XML:
        return chat_body_xml(p, end);
    default:
        return chat_body_object(p);
    }
}

/* ---- steps: true when the loop should go on ---- */

static bool step_reason_start(struct chat_parser *p, bool end)
{
    size_t at = chat_skip_blank(p, p->pos);
    bool none = at == p->in.len;
    enum answer open = none ? (end ? NO : MAYBE) : chat_at(p, at, p->thought->open, end);
    enum answer close = none ? NO : chat_at(p, at, p->thought->close, end);

    if (open != YES && close != YES && (open == MAYBE || close == MAYBE))
        return false;
    if (open == YES || close == YES)
        p->mark = p->pos = at + strlen(open == YES ? p->thought->open : p->thought->close);
    p->trim[CHAT_CONTENT] = close == YES; /* a thought that was none */
    p->state = open == YES ? S_REASON : S_CONTENT;
    return true;
}

static bool step_reason(struct chat_parser *p, bool end)
{
    bool implied = p->family && p->family->ends_reasoning;
    const char *words[] = {p->thought->close, implied ? p->family->section_open : NULL,
                           implied ? p->family->call_open : NULL};
    size_t at;
    int which = chat_find(p, words, ARRAY_LEN(words), end, &at);

    p->trim[CHAT_REASONING] = true;
    say_to(p, CHAT_REASONING, at);
    if (which < 0)
        return false;
    if (which == 0)
        p->mark = p->pos = at + strlen(p->thought->close);
    p->trim[CHAT_CONTENT] = true;
    p->state = S_CONTENT;
    return true;
}

static void enter_call(struct chat_parser *p, size_t at, size_t len)
{
    if (!p->in_section || p->section_used)
        p->mark = at;
    p->pos = at + len;
    chat_call_reset(p);
    p->state = S_CALL;
}

/* A family without markers: a call only where the text begins. True: that is decided. */
static bool bare_start(struct chat_parser *p, bool end)
{
    size_t at = chat_skip_blank(p, p->pos);
    const char *open = p->family->call_open;
    enum answer answer = NO;

    if (at == p->in.len) {
        p->started = end;
        return end;
    }
    if (open)
        answer = chat_at(p, at, open, end);
    if (answer == MAYBE)
        return false;
    p->started = true;
    char c = p->in.data[at];
    if (answer == YES) {
        enter_call(p, at, strlen(open));
    } else if (c == '{' || (c == '[' && p->o.forced == CHAT_FORCED_CALLS)) {
        enter_call(p, at, 0);
        p->call.strict = p->o.forced == CHAT_FREE;
    }
    return true;
}

static bool step_content(struct chat_parser *p, bool end)
{
    const struct family *f = p->family;
    size_t at = p->in.len;
    int which = -1;

    if (f && f->bare && !p->started)
        return bare_start(p, end);
    if (f && !f->bare) {
        const char *words[] = {f->section_open ? f->section_open : f->call_open,
                               f->section_open && f->loose ? f->call_open : NULL,
                               p->in_section ? f->section_close : NULL,
                               p->in_section ? f->call_close : NULL};
        which = chat_find(p, words, ARRAY_LEN(words), end, &at);
    }
    say_to(p, CHAT_CONTENT, at);
    if (which < 0)
        return false;
    if (which == 0 && f->section_open) {
        p->pos = at + strlen(f->section_open);
        p->in_section = true;
        p->section_used = false;
        p->state = S_SECTION;
    } else if (which <= 1) {
        enter_call(p, at, strlen(f->call_open));
        p->call.strict = which == 1; /* as if the section had been opened */
        if (which == 1)
            p->in_section = p->section_used = true;
    } else {
        p->mark = p->pos = at + strlen(which == 2 ? f->section_close : f->call_close);
    }
    return true;
}

static bool step_section(struct chat_parser *p, bool end)
{
    const struct family *f = p->family;
    size_t at = chat_skip_blank(p, p->pos);
    enum answer open = at == p->in.len ? (end ? NO : MAYBE) : chat_at(p, at, f->call_open, end);
    enum answer close = at == p->in.len ? NO : chat_at(p, at, f->section_close, end);

    if (open == YES) {
        enter_call(p, at, strlen(f->call_open));
        return true;
    }
    if (close == YES && p->section_used) {
        p->mark = p->pos = at + strlen(f->section_close);
        p->in_section = false;
        p->state = S_CONTENT;
        return true;
    }
    if (!end && close != YES && (open == MAYBE || close == MAYBE))
        return false;
    p->state = S_CONTENT;
    if (!p->section_used) { /* it holds no call: it is text */
        p->pos = close == YES ? at + strlen(f->section_close) : at;
        chat_call_broken(p);
    } else if (end && (open == MAYBE || close == MAYBE)) {
        p->mark = p->pos = p->in.len; /* cut within an end marker */
    }
    return true;
}

static bool step_call(struct chat_parser *p, bool end)
{
    enum step step = chat_body(p, end);

    if (step == STEP_OK) {
        if (!p->call.json) /* those have ended their calls themselves */
            chat_call_whole(p);
        p->state = S_AFTER;
    } else if (step == STEP_BAD || end) {
        if (step == STEP_MORE)
            p->pos = p->in.len;
        p->state = S_CONTENT;
        chat_call_broken(p);
    } else {
        return false;
    }
    return true;
}

/* Behind a call: its end marker, a fence, a semicolon between bare ones. */
static bool step_after(struct chat_parser *p, bool end)
{
    const struct family *f = p->family;
    const char *words[] = {f->call_close, p->call.fenced ? "```" : NULL, f->bare ? ";" : NULL};
    size_t at = chat_skip_blank(p, p->pos);

    for (size_t i = 0; i < ARRAY_LEN(words) && at < p->in.len; i++) {
        enum answer answer = words[i] ? chat_at(p, at, words[i], false) : NO;
        if (answer == MAYBE && !end)
            return false;
        if (answer == NO)
            continue;
        /* Cut within it at the end: no part of a marker is text. */
        p->mark = p->pos = MIN(at + strlen(words[i]), p->in.len);
        p->started &= i != 2;
        p->call.fenced &= i != 1;
        if (i == 0)
            p->state = p->in_section ? S_SECTION : S_CONTENT;
        else if (i == 2)
            p->state = S_CONTENT;
        return true;
    }
    if (at == p->in.len && !end)
        return false;
    if (!f->section_open)
        p->in_section = f->call_close != NULL;
    p->state = f->section_open && p->in_section ? S_SECTION : S_CONTENT;
    return true;
}

static bool step(struct chat_parser *p, bool end)
{
    if (p->o.one_call && p->n_whole && p->state != S_IGNORE)
        p->state = S_IGNORE;
    switch (p->state) {
    case S_REASON_START:
        return step_reason_start(p, end);
    case S_REASON:
        return step_reason(p, end);
    case S_CONTENT:
        return step_content(p, end);
    case S_SECTION:
        return step_section(p, end);
    case S_CALL:
        return step_call(p, end);
    case S_AFTER:
        return step_after(p, end);
    case S_IGNORE:
        p->mark = p->pos = p->in.len;
        return false;
    default:
        return chat_step_harmony(p, end);
    }
}

/* ---- from outside ---- */

/* Behind blanks: of the text and of the word. */
static bool ends_with(const char *text, size_t n, const char *word)
{
    size_t len = strlen(word);

    while (n && chat_is_blank(text[n - 1]))
        n--;
    return n >= len && !memcmp(text + n - len, word, len);
}

const char *chat_answer_begins(struct chat_form form, const char *prompt, size_t len)
{
    if (chat_is_harmony(form))
        return ends_with(prompt, len, "<|start|>assistant") ? "<|channel|>final<|message|>" : NULL;
    if (form.reasoning && ends_with(prompt, len, chat_thought(form.reasoning)->open))
        return chat_thought(form.reasoning)->close;
    return NULL;
}

static void start_reasoning(struct chat_parser *p)
{
    const struct chat_options *o = &p->o;
    enum chat_reasoning r = o->form.reasoning;

    p->state = S_CONTENT;
    if (r == CHAT_REASONING_NONE || r == CHAT_REASONING_HARMONY)
        return;
    p->thought = chat_thought(r);
    if (ends_with(o->prompt, o->prompt_len, p->thought->close))
        p->trim[CHAT_CONTENT] = true;
    else if (ends_with(o->prompt, o->prompt_len, p->thought->open) ||
             r == CHAT_REASONING_THINK_OPEN)
        p->state = S_REASON;
    else
        p->state = S_REASON_START;
}

struct chat_parser *chat_parser_new(const struct chat_options *options,
                                    const struct chat_sink *sink)
{
    static const struct family arguments = {BODY_ARGS, .bare = true};
    static const struct family calls = {BODY_JSON, .bare = true};
    struct chat_parser *p = x_alloc(sizeof *p);

    p->o = *options;
    p->sink = *sink;
    p->call.stream_at = SIZE_MAX;
    if (options->forced == CHAT_FORCED_ARGUMENTS)
        p->family = &arguments;
    else if (options->forced == CHAT_FORCED_CALLS)
        p->family = &calls;
    else if (json_array_size(options->tools))
        p->family = chat_family(options->form.tools);
    start_reasoning(p);
    if (options->forced == CHAT_FREE && chat_is_harmony(options->form))
        chat_start_harmony(p);
    p->o.prompt = NULL;
    return p;
}

void chat_parser_free(struct chat_parser *p)
{
    if (!p)
        return;
    call_free(&p->call);
    buffer_free(&p->in);
    buffer_free(&p->blank[0]);
    buffer_free(&p->blank[1]);
    free(p);
}

void chat_parser_push(struct chat_parser *p, const char *text, size_t len)
{
    chat_append(&p->in, text, len);
    while (p->pos < p->in.len && step(p, false))
        continue;
    if (p->state == S_CALL || p->state == S_MESSAGE_CALL || !p->mark)
        return; /* offsets into what was read are kept there */
    memmove(p->in.data, p->in.data + p->mark, p->in.len - p->mark);
    p->in.len -= p->mark;
    p->pos -= p->mark;
    p->mark = 0;
}

void chat_parser_finish(struct chat_parser *p)
{
    struct buffer *blank = &p->blank[CHAT_CONTENT];

    chat_append(&p->in, "", 0);
    if (!p->in.data && buffer_reserve(&p->in, 0) < 0)
        abort();
    while (step(p, true))
        continue;
    if (blank->len && !p->n_whole && (p->said[CHAT_CONTENT] || !p->trim[CHAT_CONTENT]))
        p->sink.text(p->sink.ctx, CHAT_CONTENT, blank->data, blank->len);
    blank->len = 0;
}

unsigned chat_parser_calls(const struct chat_parser *p)
{
    return p->n_whole;
}

bool chat_parser_done(const struct chat_parser *p)
{
    return p->o.one_call && p->n_whole;
}
