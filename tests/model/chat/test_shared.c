/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Round trip over the vendors' own templates: calls that a template renders must be found again,
 * whatever pieces they come in. Every template that writes calls must be known. Skips (77) without
 * shared/chat-templates.
 */
#include <dirent.h>

#include "base/fd.h"
#include "model/template/template.h"
#include "tests/model/chat/collect.h"
#include "tests/model/shared_dir.h"

/* Templates that render no calls from tool_calls, or refuse what we give them. */
static const char *const without[] = {
    "Kimi-K2-Instruct", /* writes to a list, which the sandbox refuses; moonshotai-Kimi-K2 does not
                         */
    "Kimi-K2-Thinking",
    "HuggingFaceTB-SmolLM3-3B", /* its calls are written by the system prompt alone */
    "LFM2-8B-A1B",              /* the same */
    "MiroThinker",              /* needs a variable of its own */
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", /* renders a call only as text with content */
    "fireworks-ai-llama-3-firefunction-v2",
    "google-gemma-2-2b-it",
    "google-gemma-4-31B-it", /* call:name{key:<|"|>value<|"|>} is not read */
    "google-gemma-4-31B-it-interleaved",
    "llama-cpp-deepseek-r1", /* needs arguments as text */
    "llama-cpp-rwkv-world",
    "meetkai-functionary-medium-v3.2", /* the same */
    "microsoft-Phi-3.5-mini-instruct",
    "Apertus-8B-Instruct", /* [{name: arguments}] is not read */
    "GigaChat3-10B-A1.8B", /* the call is a message of its own */
};

static bool listed(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(without); i++)
        if (!strcmp(without[i], name))
            return true;
    return false;
}

static json_t *tools(void)
{
    return json_pack(
        "[{s:s, s:{s:s, s:s, s:{s:s, s:{s:{s:s}, s:{s:s}, s:{s:s}, s:{s:s}, s:{s:s}, s:{s:s}}}}},"
        " {s:s, s:{s:s, s:s, s:{s:s, s:{}}}}]",
        "type", "function", "function", "name", "look_up", "description", "Looks up", "parameters",
        "type", "object", "properties", "city", "type", "string", "days", "type", "integer",
        "exact", "type", "boolean", "weights", "type", "array", "more", "type", "object", "code",
        "type", "string", "type", "function", "function", "name", "now", "description", "The time",
        "parameters", "type", "object", "properties");
}

static json_t *calls(void)
{
    return json_pack("[{s:s, s:s, s:{s:s, s:{s:s, s:i, s:b, s:[i,f,s], s:{s:n, s:s}, s:s}}}]", "id",
                     "call00001", "type", "function", "function", "name", "look_up", "arguments",
                     "city", "S\xC3\xA3o \"Paulo\" <b> & {x}", "days", 3, "exact", 1, "weights", 1,
                     2.5, "w", "more", "none", "k", "}{", "code",
                     "def f():\n    return 1 </parameter> 2\n\nprint(\"\xE4\xBD\xA0\")");
}

static int render(const struct template *t, json_t *messages, bool prompt, const json_t *tokens,
                  struct buffer *out)
{
    json_t *context = json_pack("{s:o, s:o, s:b}", "messages", messages, "tools", tools(),
                                "add_generation_prompt", prompt);
    json_t *usual = json_pack("{s:s, s:s}", "bos_token", "<s>", "eos_token", "</s>");
    json_object_update_missing(context, (json_t *)tokens);
    json_object_update_missing(context, usual);
    json_decref(usual);
    struct error err = {0};
    int r = template_render(t, context, NULL, out, NULL, &err);
    if (r < 0)
        fprintf(stderr, "%s\n", err.text);
    json_decref(context);
    return r;
}

static json_t *user(void)
{
    return json_pack("{s:s, s:s}", "role", "user", "content", "Look it up.");
}

/* What the template writes for an assistant's turn: behind the prompt, before the turn's end. */
static bool turn_of(const struct template *t, const json_t *tokens, struct buffer *prompt,
                    struct buffer *turn)
{
    _cleanup_(buffer_free) struct buffer plain = {0}, full = {0};
    if (render(t, json_pack("[o]", user()), true, tokens, prompt) < 0 ||
        render(t, json_pack("[o, {s:s, s:s}]", user(), "role", "assistant", "content", "XENDX"),
               false, tokens, &plain) < 0 ||
        render(t,
               json_pack("[o, {s:s, s:s, s:o}]", user(), "role", "assistant", "content", "",
                         "tool_calls", calls()),
               false, tokens, &full) < 0)
        return false;
    size_t same = 0, cut = 0;
    while (same < MIN(prompt->len, full.len) && prompt->data[same] == full.data[same])
        same++;
    for (size_t i = same; i && full.data[i - 1] != '>'; i--)
        if (full.data[i - 1] == '<')
            same = i - 1; /* not within a tag */
    char *end = strstr(plain.data, "XENDX");
    end = end ? end + 5 : plain.data + plain.len;
    /* The first of the tags behind a plain turn that is there too. */
    for (end += strcspn(end, "<["); *end && !cut; end += strcspn(end, "<[")) {
        size_t n = strcspn(end, ">~") + 1;
        _cleanup_free_ char *mark = x_strndup(end, n);
        char *at = strstr(full.data + same, mark);
        if (!at) /* functionary ends a turn with calls in another way */
            at = strstr(full.data + same, "<|eom_id|>");
        if (at)
            cut = (size_t)(full.data + full.len - at);
        end += MIN(n, strlen(end));
    }
    prompt->len = same;
    prompt->data[same] = 0;
    buffer_append(turn, full.data + same, full.len - same - cut);
    return true;
}

static bool check_message(const struct collect *c, const char *name, const char *how)
{
    json_t *want = calls(), *call = json_array_get(c->calls, 0), *got;
    json_t *f = json_object_get(json_array_get(want, 0), "function");
    const char *text = json_string_value(json_object_get(call, "arguments"));
    bool good = true;

    got = text ? json_loads(text, 0, NULL) : NULL;
    if (json_array_size(c->calls) != 1 || !json_is_true(json_object_get(call, "whole")) ||
        !json_equal(json_object_get(call, "name"), json_object_get(f, "name")) ||
        !json_equal(got, json_object_get(f, "arguments"))) {
        char *s = json_dumps(c->calls, 0);
        fprintf(stderr, "%s, %s: calls %s\n", name, how, s);
        free(s);
        good = false;
    }
    if (c->text[0].len) {
        fprintf(stderr, "%s, %s: content '%s'\n", name, how, c->text[0].data);
        good = false;
    }
    json_decref(got);
    json_decref(want);
    return good;
}

/* 1: passed, 0: it has none, -1: failed. */
static int check(const char *root, const char *name)
{
    _cleanup_free_ char *file = x_printf("%s/%s/template.jinja", root, name), *text = NULL;
    _cleanup_free_ char *cases = x_printf("%s/%s/expected.json", root, name);
    _cleanup_(template_freep) struct template *t = NULL;
    _cleanup_(buffer_free) struct buffer prompt = {0}, turn = {0};
    size_t len;
    if (fd_read_file(file, 1 << 24, &text, &len, NULL) < 0 ||
        template_compile(text, len, &t, NULL) < 0) {
        fprintf(stderr, "%s cannot be read\n", name);
        return -1;
    }
    json_t *expected = json_load_file(cases, 0, NULL);
    bool rendered = turn_of(t, json_object_get(expected, "tokens"), &prompt, &turn);
    json_decref(expected);
    struct chat_form form = chat_detect(text, len);
    if (listed(name))
        return 0;
    if (!rendered || !form.tools) {
        fprintf(stderr, "%s: %s\n", name, rendered ? "its calls are not known" : "not rendered");
        return -1;
    }
    json_t *list = tools();
    int result = 1;
    for (int live = 0; live < 2; live++)
        for (unsigned step = 0; step < 4; step++) {
            struct chat_options o = {.form = form,
                                     .tools = list,
                                     .prompt = prompt.data,
                                     .prompt_len = prompt.len,
                                     .live = live};
            struct collect c;
            collect_run(&o, turn.data, turn.len, step == 3 ? turn.len : step, step + 1, &c);
            if (!check_message(&c, name, step == 1 ? "byte by byte" : "in pieces")) {
                fprintf(stderr, "  from: %s\n", turn.data);
                result = -1;
            }
            collect_free(&c);
            if (result < 0)
                break;
        }
    json_decref(list);
    return result;
}

int main(void)
{
    _cleanup_free_ char *root = shared_path("chat-templates");
    size_t n[3] = {0};
    DIR *d = root ? opendir(root) : NULL;
    if (!d) {
        fprintf(stderr, "skipped: no shared/chat-templates (set EMBER_SHARED)\n");
        return 77;
    }
    for (struct dirent *e; (e = readdir(d));)
        if (e->d_name[0] != '.')
            n[check(root, e->d_name) + 1]++;
    closedir(d);
    printf("%zu templates give their calls back, %zu have none, %zu failed\n", n[2], n[1], n[0]);
    return n[0] || !n[2];
}
