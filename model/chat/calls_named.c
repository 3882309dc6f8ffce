/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls as a name and an object. DeepSeek V3 puts the word "function" first and a fence around the
 * object; Kimi's name is an id, functions.NAME:N; Mistral's old form is a list of JSON objects.
 */
#include <string.h>

#include "model/chat/internal.h"

enum stage { STAGE_START, STAGE_HEADER, STAGE_BEHIND, STAGE_FENCE, STAGE_OBJECT };

static bool name_ok(const char *s, size_t n)
{
    if (!n || n > NAME_MAX_LEN)
        return false;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)s[i] <= ' ' || strchr("<>{}[]\"", s[i]))
            return false;
    return true;
}

/* functions.get_weather:0: the whole is the id that the template wants back. */
static void take_kimi(struct call *c, const char *s, size_t n)
{
    const char *colon = memrchr(s, ':', n);

    chat_append(&c->id, s, n);
    if (colon && colon > s) {
        size_t digits = 0, rest = n - (size_t)(colon - s) - 1;
        while (digits < rest && colon[1 + digits] >= '0' && colon[1 + digits] <= '9')
            digits++;
        if (rest && digits == rest)
            n = (size_t)(colon - s);
    }
    if (n > 10 && !memcmp(s, "functions.", 10)) {
        s += 10;
        n -= 10;
    }
    chat_append(&c->name, s, n);
}

static bool take_header(struct chat_parser *p, const char *s, size_t n)
{
    struct call *c = &p->call;
    const char *id = memmem(s, n, "[CALL_ID]", 9);

    if (p->o.form.tools == CHAT_TOOLS_MISTRAL && id) {
        const char *text = id + 9;
        size_t len = n - (size_t)(text - s);
        chat_trim(&text, &len);
        if (name_ok(text, len))
            chat_append(&c->id, text, len);
        n = (size_t)(id - s);
    }
    chat_trim(&s, &n);
    if (!name_ok(s, n))
        return false;
    if (p->o.form.tools == CHAT_TOOLS_KIMI_K2)
        take_kimi(c, s, n);
    else
        chat_append(&c->name, s, n);
    return c->name.len > 0;
}

/* Until the separator, or the object itself, which Mistral's older forms put behind the name. */
static enum step read_header(struct chat_parser *p, bool end)
{
    struct call *c = &p->call;
    const char *words[] = {p->family->separator,
                           p->o.form.tools == CHAT_TOOLS_MISTRAL ? "{" : NULL};
    size_t at;
    int which = chat_find(p, words, ARRAY_LEN(words), end, &at);

    if (which < 0) {
        p->pos = at;
        return at - c->at > 2 * NAME_MAX_LEN ? STEP_BAD : STEP_MORE;
    }
    p->pos = at;
    if (!take_header(p, p->in.data + c->at, at - c->at))
        return STEP_BAD;
    p->pos = which ? at : at + strlen(words[0]);
    c->stage = p->o.form.tools == CHAT_TOOLS_DEEPSEEK ? STAGE_BEHIND : STAGE_OBJECT;
    return STEP_OK;
}

/* DeepSeek: the object (V3.1), or the name, when what came was the word "function" (V3). */
static enum step read_behind(struct chat_parser *p)
{
    struct call *c = &p->call;
    size_t at = chat_skip_blank(p, p->pos);

    if (at == p->in.len)
        return STEP_MORE;
    if (p->in.data[at] == '{') {
        c->stage = STAGE_OBJECT;
        return STEP_OK;
    }
    const char *line = memchr(p->in.data + at, '\n', p->in.len - at);
    if (strcmp(c->name.data, "function")) {
        p->pos = at;
        return STEP_BAD;
    }
    if (!line)
        return p->in.len - at > 2 * NAME_MAX_LEN ? STEP_BAD : STEP_MORE;
    const char *name = p->in.data + at;
    size_t n = (size_t)(line - name);
    chat_trim(&name, &n);
    c->name.len = 0;
    p->pos = at;
    if (!name_ok(name, n))
        return STEP_BAD;
    chat_append(&c->name, name, n);
    p->pos = (size_t)(line - p->in.data);
    c->stage = STAGE_FENCE;
    return STEP_OK;
}

static enum step read_fence(struct chat_parser *p, bool end)
{
    struct call *c = &p->call;
    size_t at = chat_skip_blank(p, p->pos);
    enum answer answer = at == p->in.len ? MAYBE : chat_at(p, at, "```json", end);

    if (answer == MAYBE)
        return STEP_MORE;
    c->fenced = answer == YES;
    p->pos = answer == YES ? at + strlen("```json") : at;
    c->stage = STAGE_OBJECT;
    return STEP_OK;
}

static enum step read_start(struct chat_parser *p)
{
    struct call *c = &p->call;
    size_t at = chat_skip_blank(p, p->pos);

    if (at == p->in.len)
        return STEP_MORE;
    c->at = p->pos;
    if (p->o.form.tools == CHAT_TOOLS_MISTRAL && p->in.data[at] == '[')
        return chat_body_json(p);
    c->stage = STAGE_HEADER;
    return STEP_OK;
}

enum step chat_body_named(struct chat_parser *p, bool end)
{
    enum step step = STEP_OK;

    while (step == STEP_OK) {
        switch (p->call.stage) {
        case STAGE_START:
            step = read_start(p);
            if (p->call.json)
                return step;
            break;
        case STAGE_HEADER:
            step = read_header(p, end);
            break;
        case STAGE_BEHIND:
            step = read_behind(p);
            break;
        case STAGE_FENCE:
            step = read_fence(p, end);
            break;
        default:
            return chat_body_object(p);
        }
    }
    return step;
}
