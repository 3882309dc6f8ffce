/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Harmony, what gpt-oss writes: messages of <|channel|>, recipient, <|message|> and a text that
 * ends at a token. analysis is reasoning; a recipient makes a call; final, and commentary to
 * nobody, are content. The prompt ends within the first message's header.
 */
#include <string.h>

#include "model/chat/internal.h"

#define ROLE "<|start|>assistant"
#define MESSAGE "<|message|>"

static const char *const ends[] = {"<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>"};
#define CHANNEL 4 /* of these: a message began without <|start|> */

/* Behind the last such word of from .. end; NULL: there is none, or no text. */
static const char *behind_last(const char *from, const char *end, const char *word)
{
    const char *behind = NULL;

    while (from && (from = memmem(from, (size_t)(end - from), word, strlen(word))))
        behind = from += strlen(word);
    return behind;
}

void chat_start_harmony(struct chat_parser *p)
{
    static const struct family harmony = {BODY_HARMONY};
    const char *end = p->o.prompt ? p->o.prompt + p->o.prompt_len : NULL;

    if (!p->family)
        p->family = &harmony;
    p->state = S_HEADER;
    const char *at = behind_last(p->o.prompt, end, ROLE), *message = behind_last(at, end, MESSAGE);
    if (!at)
        return;
    chat_append(&p->in, at, (size_t)((message ? message : end) - at));
}

/* The word behind `label` in a header: *ret_len of it, or NULL. */
static const char *word_behind(const char *s, size_t n, const char *label, size_t *ret_len)
{
    const char *at = memmem(s, n, label, strlen(label));

    if (!at)
        return NULL;
    at += strlen(label);
    size_t left = n - (size_t)(at - s), len = 0;
    while (len < left && !chat_is_blank(at[len]) && at[len] != '<')
        len++;
    *ret_len = len;
    return at;
}

static bool is(const char *s, size_t n, const char *word)
{
    return s && strlen(word) == n && !memcmp(s, word, n);
}

/* A recipient that is one of the client's functions: the call's name is set. */
static bool to_function(struct chat_parser *p, const char *s, size_t n)
{
    static const char prefix[] = "functions.";
    bool ours = n > sizeof prefix - 1 && !memcmp(s, prefix, sizeof prefix - 1);
    size_t skip = ours ? sizeof prefix - 1 : 0;

    chat_call_reset(p);
    chat_append(&p->call.name, s + skip, n - skip);
    return json_array_size(p->o.tools) && n <= NAME_MAX_LEN && p->call.name.len &&
           (ours || chat_function(p, p->call.name.data));
}

/* Messages of one channel are told apart by a line's end. */
static void enter_message(struct chat_parser *p, enum chat_channel channel)
{
    p->channel = channel;
    p->state = S_MESSAGE;
    p->mark = p->pos;
    if (p->said[channel] && !p->blank[channel].len)
        chat_append(&p->blank[channel], "\n", 1);
}

static bool step_header(struct chat_parser *p, bool end)
{
    const char *const word = MESSAGE;
    size_t at, n_channel = 0, n_to = 0;

    if (chat_find(p, &word, 1, end, &at) < 0) {
        p->pos = at;
        if (!end)
            return false;
        /* Text without any form is content; a header that nothing follows is nothing. */
        if (!memmem(p->in.data + p->mark, p->in.len - p->mark, "<|", 2))
            chat_say(p, CHAT_CONTENT, p->in.data + p->mark, p->in.len - p->mark);
        p->mark = p->pos = p->in.len;
        return false;
    }
    const char *header = p->in.data + p->mark;
    size_t n = at - p->mark;
    const char *channel = word_behind(header, n, "<|channel|>", &n_channel);
    const char *to = word_behind(header, n, "to=", &n_to);
    p->pos = at + strlen(word);
    if (to && to_function(p, to, n_to)) {
        p->state = S_MESSAGE_CALL;
        return true;
    }
    if (to && n_to && !is(to, n_to, "user")) { /* a tool that is not the client's: as it was */
        size_t mark = p->mark;
        enter_message(p, CHAT_CONTENT);
        chat_say(p, CHAT_CONTENT, p->in.data + mark, p->pos - mark);
        return true;
    }
    enter_message(p, is(channel, n_channel, "analysis") ? CHAT_REASONING : CHAT_CONTENT);
    return true;
}

/* Until the message's end; what stands behind a call's arguments is nothing. */
static bool step_message(struct chat_parser *p, bool end)
{
    size_t at;
    int which = chat_find(p, ends, ARRAY_LEN(ends), end, &at);

    if (p->state == S_MESSAGE)
        chat_say(p, p->channel, p->in.data + p->mark, at - p->mark);
    p->mark = p->pos = at;
    if (which < 0)
        return false;
    if (which != CHANNEL)
        p->mark = p->pos = at + strlen(ends[which]);
    p->state = S_HEADER;
    return true;
}

static bool step_message_call(struct chat_parser *p, bool end)
{
    enum step step = chat_body_object(p);

    if (step == STEP_MORE && !end)
        return false;
    if (step == STEP_OK) {
        chat_call_whole(p);
        p->state = S_MESSAGE_END;
        return true;
    }
    if (step == STEP_MORE)
        p->pos = p->in.len;
    p->channel = CHAT_CONTENT;
    chat_call_broken(p);
    p->state = S_MESSAGE;
    return true;
}

bool chat_step_harmony(struct chat_parser *p, bool end)
{
    switch (p->state) {
    case S_HEADER:
        return step_header(p, end);
    case S_MESSAGE_CALL:
        return step_message_call(p, end);
    default:
        return step_message(p, end);
    }
}
