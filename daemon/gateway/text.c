/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/text.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/digest.h"
#include "base/fd.h"
#include "engine/tokenizer.h"
#include "model/model.h"
#include "model/pack/pack.h"
#include "model/template/template.h"

#define JSON_FILE_MAX (16u << 20)

/* ---- loading ---- */

/* Where a model's text comes from. */
struct source {
    char *dir;    /* of the tokenizer's files */
    char *config; /* config.json, which a pack has in itself; NULL: it cannot be read */
    size_t config_len;
};

static void source_free(struct source *s)
{
    free(s->dir);
    free(s->config);
}

/* path: a checkpoint's folder, or a pack. */
static struct source source_of(const char *path)
{
    _cleanup_(pack_freep) struct pack *pack = NULL;
    struct source s = {0};

    if (pack_looks_like(path) && pack_open(path, &pack, NULL) == 0) {
        const char *config = pack_config(pack, &s.config_len);
        s.dir = pack_tokenizer_dir(pack, path);
        s.config = x_strndup(config, s.config_len);
        return s;
    }
    _cleanup_free_ char *file = x_printf("%s/config.json", path);
    s.dir = x_strdup(path);
    if (fd_read_file(file, JSON_FILE_MAX, &s.config, &s.config_len, NULL) < 0)
        s.config = NULL;
    return s;
}

/* NULL: a config that is refused never gets an instance either. */
static struct model *describe(const struct source *s)
{
    struct model *model = NULL;

    if (s->config)
        model_from_config(s->config, s->config_len, s->dir, &model, NULL);
    return model;
}

uint32_t text_max_positions(const char *path)
{
    _cleanup_(source_free) struct source s = source_of(path);
    _cleanup_(model_freep) struct model *model = describe(&s);

    return model ? model_info(model)->max_positions : 0;
}

/* What only the description knows. */
static void read_description(struct text *text, const struct source *s)
{
    _cleanup_(model_freep) struct model *model = describe(s);

    if (!model)
        return;
    text->rope_exact_len = model_info(model)->rope_exact_len;
    text->vocab_size = MIN(text->vocab_size, model_info(model)->vocab_size);
}

/* An object from DIR/NAME, or NULL when there is none that can be read. */
static json_t *read_json(const char *dir, const char *name)
{
    _cleanup_free_ char *path = x_printf("%s/%s", dir, name), *data = NULL;
    size_t len;

    if (fd_read_file(path, JSON_FILE_MAX, &data, &len, NULL) < 0)
        return NULL;
    return json_loadb(data, len, 0, NULL);
}

static void add_eos(struct text *text, json_t *v)
{
    size_t n = json_is_array(v) ? json_array_size(v) : 1;

    for (size_t i = 0; i < n; i++) {
        json_t *id = json_is_array(v) ? json_array_get(v, i) : v;
        bool known = !json_is_integer(id) || json_integer_value(id) < 0 ||
                     json_integer_value(id) > INT32_MAX || text->n_eos == TEXT_EOS_MAX;
        for (uint32_t k = 0; k < text->n_eos && !known; k++)
            known = text->eos[k] == json_integer_value(id);
        if (!known)
            text->eos[text->n_eos++] = (uint32_t)json_integer_value(id);
    }
}

static void read_config(struct text *text, const struct source *s)
{
    json_t *root = s->config ? json_loadb(s->config, s->config_len, 0, NULL) : NULL;
    json_t *inner = json_object_get(root, "text_config");
    json_t *model = json_is_object(inner) ? inner : root;

    add_eos(text, json_object_get(model, "eos_token_id"));
    add_eos(text, json_object_get(root, "eos_token_id"));
    json_decref(root);
}

static void read_defaults(struct text *text, const char *dir)
{
    json_t *root = read_json(dir, "generation_config.json");
    const struct {
        const char *name;
        float *to;
        unsigned bit;
    } rows[] = {{"temperature", &text->defaults.temperature, API_TEMPERATURE},
                {"top_p", &text->defaults.top_p, API_TOP_P},
                {"min_p", &text->defaults.min_p, API_MIN_P},
                {"repetition_penalty", &text->defaults.repetition_penalty, API_REPETITION}};

    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        json_t *v = json_object_get(root, rows[i].name);
        double x = json_number_value(v);
        if (!json_is_number(v) || !(x >= 0 && x <= 100))
            continue;
        *rows[i].to = (float)x;
        text->defaults.set |= rows[i].bit;
    }
    json_int_t k = json_integer_value(json_object_get(root, "top_k"));
    if (k > 0 && k <= INT32_MAX) {
        text->defaults.top_k = (uint32_t)k;
        text->defaults.set |= API_TOP_K;
    }
    add_eos(text, json_object_get(root, "eos_token_id"));
    json_decref(root);
}

/* Calls and thoughts: of the template that is used with tools. */
static void read_form(struct text *text)
{
    size_t len;
    const char *source = text->chat ? chat_template_text(text->chat, NULL, true, &len) : NULL;

    if (!source)
        return;
    text->form = chat_detect(source, len);
    text->null_content = memmem(source, len, "['content'] is none", 19) ||
                         memmem(source, len, "[\"content\"] is none", 19) ||
                         memmem(source, len, ".content is none", 16);
}

/* Changes when one of the files does. */
static uint64_t stamp_of(const char *path, const char *dir)
{
    static const char *const files[] = {"config.json", "generation_config.json", "tokenizer.json",
                                        "tokenizer_config.json", "chat_template.jinja"};
    uint64_t seen[ARRAY_LEN(files) + 1][4];

    memset(seen, 0, sizeof seen);
    for (size_t i = 0; i <= ARRAY_LEN(files); i++) {
        const bool is_file = i < ARRAY_LEN(files);
        _cleanup_free_ char *name = is_file ? x_printf("%s/%s", dir, files[i]) : x_strdup(path);
        struct stat st;
        if (stat(name, &st) < 0 || !S_ISREG(st.st_mode)) /* `path` is one when it is a pack */
            continue;
        seen[i][0] = (uint64_t)st.st_ino;
        seen[i][1] = (uint64_t)st.st_size;
        seen[i][2] = (uint64_t)st.st_mtim.tv_sec;
        seen[i][3] = (uint64_t)st.st_mtim.tv_nsec;
    }
    return checksum_of(seen, sizeof seen);
}

bool text_changed(const struct text *text)
{
    return stamp_of(text->path, text->dir) != text->stamp;
}

int text_load(const char *path, struct cache *cache, struct text **ret, struct error *err)
{
    _cleanup_(source_free) struct source s = source_of(path);
    struct text *text = x_alloc(sizeof *text);

    text->path = x_strdup(path);
    text->dir = x_strdup(s.dir);
    text->stamp = stamp_of(path, s.dir); /* first: what changes meanwhile is to be seen */
    int r = engine_tokenizer_lease(cache, s.dir, &text->tokenizer, &text->lease, err);
    if (r < 0) {
        text_free(text);
        return r;
    }
    text->vocab_size = tokenizer_vocab_size(text->tokenizer);
    read_config(text, &s);
    read_description(text, &s);
    read_defaults(text, s.dir);
    template_from_checkpoint(s.dir, &text->chat, &text->chat_error);
    read_form(text);
    *ret = text;
    return 0;
}

void text_settle(struct text *text)
{
    if (text->lease && engine_lease_settle(text->lease, NULL) == 0)
        text->lease = NULL;
}

void text_free(struct text *text)
{
    if (!text)
        return;
    free(text->path);
    free(text->dir);
    tokenizer_free(text->tokenizer);
    engine_lease_free(text->lease);
    chat_template_free(text->chat);
    free(text);
}

/* ---- preparing a request ---- */

static int fail_with(struct api_error *fail, const char *param, const struct error *err)
{
    fail->status = err->code == -ENOMEM ? 503 : 400;
    snprintf(fail->param, sizeof fail->param, "%s", param);
    fail->err = *err;
    return -EINVAL;
}

/* Parts of type text become one string, which is what text models' templates expect. */
static int join_parts(json_t *message, struct error *err)
{
    json_t *parts = json_object_get(message, "content"), *part;
    struct buffer text = {0};
    size_t i;
    int r = 0;

    if (!json_is_array(parts))
        return 0;
    json_array_foreach(parts, i, part)
    {
        json_t *t = json_object_get(part, "text");
        if (json_is_string(part))
            t = part;
        if (!json_is_string(t))
            r = error_set(err, EINVAL, "only text parts are supported in a message's content");
        else if (r == 0 && ((i && buffer_append(&text, "\n", 1) < 0) ||
                            buffer_append(&text, json_string_value(t), json_string_length(t)) < 0))
            r = error_set(err, ENOMEM, "no memory for a message");
    }
    if (r == 0)
        json_object_set_new(message, "content", json_stringn(text.data ? text.data : "", text.len));
    buffer_free(&text);
    return r;
}

/* Arguments of tool calls travel as JSON text; templates walk them as objects. True: there were. */
static bool open_arguments(json_t *message)
{
    json_t *call;
    size_t i;
    bool any = false;

    json_array_foreach(json_object_get(message, "tool_calls"), i, call)
    {
        json_t *function = json_object_get(call, "function");
        const char *text = json_string_value(json_object_get(function, "arguments"));
        json_t *arguments = text ? json_loads(*text ? text : "{}", 0, NULL) : NULL;
        any |= arguments != NULL;
        if (arguments)
            json_object_set_new(function, "arguments", arguments);
    }
    return any;
}

/* A member under the name that the template may look for as well. */
static void also_called(json_t *message, const char *name, const char *other)
{
    json_t *v = json_object_get(message, name);

    if (json_is_string(v) && !json_object_get(message, other))
        json_object_set(message, other, v);
}

/* Content that there was none of; and of an assistant's turn that comes back, calls and thoughts.
 */
static void complete_turn(const struct text *text, json_t *message)
{
    const char *role = json_string_value(json_object_get(message, "role"));
    json_t *calls = json_object_get(message, "tool_calls"),
           *content = json_object_get(message, "content");
    bool empty = !content || json_is_null(content) ||
                 (json_is_string(content) && !json_string_length(content));

    if (!role || strcmp(role, "assistant")) {
        if (!content || json_is_null(content)) /* templates add strings to it */
            json_object_set_new(message, "content", json_string(""));
        return;
    }
    also_called(message, "reasoning", "reasoning_content");
    also_called(message, "reasoning_content", "reasoning");
    if (calls && !json_array_size(calls)) {
        json_object_del(message, "tool_calls");
        calls = NULL;
    }
    if (empty)
        json_object_set_new(message, "content",
                            calls && text->null_content ? json_null() : json_string(""));
    if (empty && calls && text->form.tools == CHAT_TOOLS_HARMONY)
        also_called(message, "reasoning_content", "thinking");
}

/* The template's variables: the request's fields and chat_template_kwargs. */
static json_t *template_context(const struct api_request *request, json_t *messages)
{
    static const char *const fields[] = {"documents", "reasoning_effort"};
    json_t *context = json_object(), *v;
    const char *key;

    json_object_set(context, "messages", messages);
    if (request->tools && request->tool_choice != API_TOOLS_NONE)
        json_object_set(context, "tools", request->tools);
    for (size_t i = 0; i < ARRAY_LEN(fields); i++) {
        v = json_object_get(request->json, fields[i]);
        if (v && !json_is_null(v))
            json_object_set(context, fields[i], v);
    }
    json_object_set_new(context, "add_generation_prompt",
                        json_boolean(request->add_generation_prompt));
    json_object_foreach(json_object_get(request->json, "chat_template_kwargs"), key, v)
        json_object_set(context, key, v);
    return context;
}

/* continue_final_message: what the template put behind the last message's text goes. */
static int cut_behind_last(const struct api_request *request, struct buffer *out, struct error *err)
{
    json_t *last = json_array_get(request->messages, json_array_size(request->messages) - 1);
    const char *content = json_string_value(json_object_get(last, "content"));
    size_t n = content ? strlen(content) : 0;
    char *found = NULL;

    while (n && strchr(" \t\r\n", content[n - 1])) /* most templates trim */
        n--;
    for (char *p = out->data;
         n && p && (p = memmem(p, out->len - (size_t)(p - out->data), content, n)); p++)
        found = p;
    if (!found)
        return error_set(err, EINVAL,
                         "continue_final_message: the template does not keep the last message");
    out->len = (size_t)(found - out->data) + n;
    return 0;
}

static int render_messages(const struct text *text, const struct api_request *request,
                           json_t *messages, struct buffer *out, struct error *err)
{
    json_t *context = template_context(request, messages);
    int r = chat_template_render(text->chat, request->template_name, context, NULL, out, NULL, err);

    json_decref(context);
    return r;
}

static int render(const struct text *text, struct api_request *request, struct buffer *out,
                  struct api_error *fail)
{
    struct error err = {0};
    json_t *message, *as_text;
    size_t i;
    bool opened = false;
    int r = 0;

    if (!text->chat) {
        error_set(&err, ENOTSUP, "this model cannot chat: %s", error_text(&text->chat_error));
        return fail_with(fail, "messages", &err);
    }
    json_array_foreach(request->messages, i, message)
    {
        if (r == 0)
            r = join_parts(message, &err);
        complete_turn(text, message);
    }
    as_text = r == 0 ? json_deep_copy(request->messages) : NULL;
    json_array_foreach(request->messages, i, message) opened |= open_arguments(message);
    if (r == 0)
        r = render_messages(text, request, request->messages, out, &err);
    /* Some templates put arguments into their text as they are: they fail on objects. */
    if (r < 0 && opened && as_text && render_messages(text, request, as_text, out, NULL) == 0)
        r = 0;
    json_decref(as_text);
    if (r == 0 && request->continue_final)
        r = cut_behind_last(request, out, &err);
    return r < 0 ? fail_with(fail, r == -ENOENT ? "chat_template" : "messages", &err) : 0;
}

static int check_ids(const struct text *text, const struct api_request *request,
                     const struct api_prompt *prompt, struct api_error *fail)
{
    const char *param = request->kind == API_DETOKENIZE ? "tokens"
                        : request->messages             ? "messages"
                                                        : "prompt";
    struct error err = {0};

    if (!prompt->n_ids && request->kind != API_DETOKENIZE) {
        error_set(&err, EINVAL, "the prompt has no tokens");
        return fail_with(fail, param, &err);
    }
    for (size_t i = 0; i < prompt->n_ids; i++) {
        if (prompt->ids[i] < text->vocab_size)
            continue;
        error_set(&err, EINVAL, "token id %u is out of vocabulary (%u)", prompt->ids[i],
                  text->vocab_size);
        return fail_with(fail, param, &err);
    }
    return 0;
}

static int prepare_prompt(const struct text *text, struct api_request *request,
                          struct api_prompt *prompt, struct api_error *fail)
{
    struct error err = {0};

    if (!prompt->text && !prompt->ids) {
        struct buffer out = {0};
        int r = render(text, request, &out, fail);
        if (r < 0) {
            buffer_free(&out);
            return r;
        }
        const char *begin = request->grammar.kind != API_GRAMMAR_NONE
                                ? chat_answer_begins(text->form, out.data ? out.data : "", out.len)
                                : NULL;
        /* A grammar is of the answer: it leaves no room for a thought that the template opened. */
        if (begin && buffer_append(&out, begin, strlen(begin)) < 0) {
            buffer_free(&out);
            error_set(&err, ENOMEM, "no memory for a prompt");
            return fail_with(fail, "messages", &err);
        }
        prompt->owned = out.data;
        prompt->text = out.data ? out.data : "";
        prompt->len = out.len;
    }
    if (!prompt->ids &&
        tokenizer_encode(text->tokenizer, prompt->text, prompt->len, request->add_special,
                         &prompt->ids, &prompt->n_ids, &err) < 0)
        return fail_with(fail, request->messages ? "messages" : "prompt", &err);
    if (request->kind == API_TOKENIZE)
        return 0;
    return check_ids(text, request, prompt, fail);
}

/*
 * Tools that may be called, beside a schema for the answer: either is the model's choice. The
 * marker of a call has to be a text that masks know: special tokens are in none.
 */
static void leave_calls_open(const struct text *text, struct api_request *request)
{
    struct api_grammar *g = &request->grammar;
    const char *begins = chat_calls_begin(text->form);

    if (!begins || request->kind != API_CHAT || !request->tools ||
        request->tool_choice != API_TOOLS_AUTO ||
        (g->kind != API_GRAMMAR_SCHEMA && g->kind != API_GRAMMAR_OBJECT))
        return;
    int64_t id = tokenizer_token_id(text->tokenizer, begins, strlen(begins));
    if (id < 0 || !tokenizer_is_special(text->tokenizer, (uint32_t)id))
        g->or_begins = begins;
}

static void apply_defaults(const struct text *text, struct api_request *request)
{
    Ember__V1__Sampling *s = &request->sampling;
    unsigned use = text->defaults.set & ~request->set;

    if (use & API_TEMPERATURE)
        s->temperature = text->defaults.temperature;
    if (use & API_TOP_P)
        s->top_p = text->defaults.top_p;
    if (use & API_TOP_K)
        s->top_k = text->defaults.top_k;
    if (use & API_MIN_P)
        s->min_p = text->defaults.min_p;
    if (use & API_REPETITION)
        s->repetition_penalty = text->defaults.repetition_penalty;
    if (s->temperature < 1e-5f) /* below it, logits divided by it overflow: greedy */
        s->temperature = 0;
    if (request->logprobs >= 0) {
        s->logprobs = (uint32_t)request->logprobs;
        s->sampled_logprob = true;
    }
    if (request->prompt_logprobs >= 0)
        s->logprobs = MAX(s->logprobs, (uint32_t)request->prompt_logprobs);
}

/* One more run that must not be generated. */
static int ban(const struct text *text, Ember__V1__Sampling *s, const char *word, size_t len,
               struct error *err)
{
    uint32_t *run = NULL, *grown;
    size_t n, had = s->n_bad_tokens;
    int r = tokenizer_encode(text->tokenizer, word, len, false, &run, &n, err);

    if (r == 0 && had + n > API_TOKENS_MAX)
        r = error_set(err, EINVAL, "bad_words: more than %d tokens", API_TOKENS_MAX);
    if (r == 0 && n) {
        grown = realloc(s->bad_tokens, (had + n) * sizeof *grown);
        if (!grown) {
            r = error_set(err, ENOMEM, "no memory for a bad word");
        } else {
            memcpy(grown + had, run, n * sizeof *run);
            s->bad_tokens = grown;
            s->n_bad_tokens += n;
            s->bad_lens[s->n_bad_lens++] = (uint32_t)n;
        }
    }
    free(run);
    return r;
}

/* A word is one at the beginning of a text, and one behind a space. */
static int ban_words(const struct text *text, struct api_request *request, struct api_error *fail)
{
    Ember__V1__Sampling *s = &request->sampling;
    struct error err = {0};
    size_t i;
    json_t *v;
    int r = 0;

    if (!json_array_size(request->bad_words))
        return 0;
    s->bad_lens = mem_alloc(2 * json_array_size(request->bad_words), sizeof *s->bad_lens);
    if (!s->bad_lens)
        r = error_set(&err, ENOMEM, "no memory for bad words");
    json_array_foreach(request->bad_words, i, v)
    {
        const char *word = json_string_value(v);
        word += strspn(word, " ");
        _cleanup_free_ char *behind = x_printf(" %s", word);
        if (r == 0)
            r = ban(text, s, word, strlen(word), &err);
        if (r == 0)
            r = ban(text, s, behind, strlen(behind), &err);
    }
    for (size_t k = 0; r == 0 && k < s->n_bad_tokens; k++)
        if (s->bad_tokens[k] >= text->vocab_size)
            r = error_set(&err, EINVAL, "bad_words: token id %u is out of vocabulary (%u)",
                          s->bad_tokens[k], text->vocab_size);
    return r < 0 ? fail_with(fail, "bad_words", &err) : 0;
}

/* Ids that the model does not have cannot be biased or stopped at. */
static int check_sampling(const struct text *text, const struct api_request *request,
                          struct api_error *fail)
{
    struct error err = {0};

    for (size_t i = 0; i < request->sampling.n_allowed; i++) {
        if (request->sampling.allowed[i] < text->vocab_size)
            continue;
        error_set(&err, EINVAL, "allowed_token_ids: token id %u is out of vocabulary (%u)",
                  request->sampling.allowed[i], text->vocab_size);
        return fail_with(fail, "allowed_token_ids", &err);
    }

    for (size_t i = 0; i < request->sampling.n_bias_tokens; i++) {
        if (request->sampling.bias_tokens[i] < text->vocab_size)
            continue;
        error_set(&err, EINVAL, "logit_bias: token id %u is out of vocabulary (%u)",
                  request->sampling.bias_tokens[i], text->vocab_size);
        return fail_with(fail, "logit_bias", &err);
    }
    return 0;
}

int text_prepare(const struct text *text, struct api_request *request, struct api_error *fail)
{
    int r = 0;

    *fail = (struct api_error){0};
    for (size_t i = 0; i < request->n_prompts && r == 0; i++)
        r = prepare_prompt(text, request, &request->prompts[i], fail);
    if (r < 0 || request->kind == API_TOKENIZE || request->kind == API_DETOKENIZE)
        return r;
    r = check_sampling(text, request, fail);
    if (r == 0)
        r = ban_words(text, request, fail);
    leave_calls_open(text, request);
    apply_defaults(text, request);
    return r;
}
