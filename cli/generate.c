/* SPDX-License-Identifier: Apache-2.0 */
/* emberctl generate: leases an instance, drives it, streams the text. */
#include "cli/commands.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fd.h"
#include "cli/generation.h"
#include "cli/output.h"
#include "cli/tokenizer.h"
#include "model/template/template.h"
#include "model/tokenizer/tokenizer.h"

#define PROMPT_MAX (16 * MIB)

static int read_stdin(struct buffer *text, struct error *err)
{
    ssize_t n;

    do {
        if (text->len > PROMPT_MAX || buffer_reserve(text, 65536) < 0)
            return error_set(err, EFBIG, "the prompt on standard input is larger than 16 MiB");
        n = read(STDIN_FILENO, text->data + text->len, 65536);
        if (n < 0 && errno != EINTR)
            return error_sys(err, errno, "standard input");
        text->len += n > 0 ? (size_t)n : 0;
        text->data[text->len] = 0;
    } while (n);
    return 0;
}

/* The words of the command line, or standard input for "-" or when it is not a terminal. */
static int read_prompt(const struct verb_call *call, struct buffer *text, struct error *err)
{
    if ((!call->argc && !isatty(STDIN_FILENO)) || (call->argc == 1 && !strcmp(call->argv[0], "-")))
        return read_stdin(text, err);
    for (int i = 0; i < call->argc; i++)
        if (buffer_printf(text, "%s%s", i ? " " : "", call->argv[i]) < 0)
            return error_set(err, ENOMEM, "no memory for the prompt");
    return text->len ? 0
                     : error_set(err, EINVAL, "no prompt: give it as words, or on standard input");
}

/* *text as a user's message, in the words of the model's own chat template. */
static int chat_form(const char *dir, struct buffer *text, struct error *err)
{
    _cleanup_(chat_template_freep) struct chat_template *chat = NULL;
    _cleanup_(buffer_free) struct buffer turn = {0};

    int r = template_from_checkpoint(dir, &chat, err);
    if (r < 0)
        return error_prefix(err, "--chat");
    json_t *context = json_pack("{s:[{s:s, s:s%}], s:b}", "messages", "role", "user", "content",
                                text->data, text->len, "add_generation_prompt", 1);
    if (!context)
        return error_set(err, EINVAL, "the prompt is not valid UTF-8");
    r = chat_template_render(chat, NULL, context, NULL, &turn, NULL, err);
    json_decref(context);
    if (r < 0)
        return error_prefix(err, "%s: chat template", dir);
    buffer_free(text);
    *text = turn;
    turn = (struct buffer){0};
    return 0;
}

struct output {
    const struct verb_call *call;
    struct detok *detok;
    struct buffer text; /* all of it, for --json */
    struct buffer piece;
};

static int emit(struct output *out, struct error *err)
{
    if (buffer_append(&out->text, out->piece.data, out->piece.len) < 0)
        return error_set(err, ENOMEM, "no memory for the text");
    if (!cli_json(out->call)) {
        fwrite(out->piece.data, 1, out->piece.len, stdout);
        if (fflush(stdout) || ferror(stdout)) /* nobody reads on: no more tokens for nobody */
            return error_sys(err, errno, "standard output");
    }
    out->piece.len = 0;
    return 0;
}

static int push_prompt(struct output *out, const uint32_t *ids, size_t n, struct error *err)
{
    int r = 0;

    for (size_t i = 0; i < n && r == 0; i++)
        r = detok_push(out->detok, ids[i], &out->piece, err);
    out->piece.len = 0;
    return r;
}

static int stream(struct generation *g, struct output *out, const char **ret_reason,
                  struct error *err)
{
    uint32_t token;
    int r = 0;

    *ret_reason = "length";
    while (!cli_interrupted) {
        uint32_t before = g->n_tokens;
        int end = generation_next(g, &token, err);
        if (end < 0)
            return end;
        if (g->n_tokens > before) {
            r = detok_push(out->detok, token, &out->piece, err);
            if (r == 0)
                r = emit(out, err);
            if (end)
                *ret_reason = "stop";
        }
        if (r < 0 || end)
            break;
    }
    if (cli_interrupted)
        *ret_reason = "interrupted";
    if (r == 0)
        r = detok_finish(out->detok, &out->piece, err);
    return r == 0 ? emit(out, err) : r;
}

static json_t *summary(const struct generation *g, const struct output *out, const char *reason)
{
    uint32_t made = g->n_tokens - g->n_prompt;
    double ms = clock_ms_since(g->started_ns);
    double decode_ms = ms - g->first_token_ms;
    json_t *ids = json_array();

    for (uint32_t i = 0; i < made; i++)
        json_array_append_new(ids, json_integer(g->tokens[g->n_prompt + i]));
    return json_pack("{s:o?, s:s, s:o, s:i, s:i, s:f, s:f, s:f, s:i}", "text",
                     json_stringn_nocheck(out->text.data ? out->text.data : "", out->text.len),
                     "finish_reason", reason, "ids", ids, "prompt_tokens", (int)g->n_prompt,
                     "tokens", (int)made, "spawn_ms", g->spawn_ms, "first_token_ms",
                     g->first_token_ms, "tokens_per_second",
                     made > 1 && decode_ms > 0 ? (made - 1) * 1000.0 / decode_ms : 0.0, "replays",
                     (int)g->replays);
}

static void print_summary(const struct verb_call *call, json_t *s)
{
    char a[24], b[24];

    if (cli_json(call)) {
        cli_print_json(s);
        return;
    }
    putchar('\n');
    if (isatty(STDERR_FILENO) || verb_flag(call, "stats"))
        fprintf(stderr,
                "[%d prompt tokens, %d new, instance in %s, first token after %s, %.1f tokens/s]\n",
                (int)json_integer_value(json_object_get(s, "prompt_tokens")),
                (int)json_integer_value(json_object_get(s, "tokens")),
                cli_ms(json_number_value(json_object_get(s, "spawn_ms")), a),
                cli_ms(json_number_value(json_object_get(s, "first_token_ms")), b),
                json_number_value(json_object_get(s, "tokens_per_second")));
    json_decref(s);
}

static struct generation_options options_of(const struct verb_call *call)
{
    return (struct generation_options){.model = verb_string(call, "model"),
                                       .temperature = (float)verb_real(call, "temperature"),
                                       .top_p = (float)verb_real(call, "top-p"),
                                       .min_p = (float)verb_real(call, "min-p"),
                                       .top_k = (uint32_t)verb_int(call, "top-k"),
                                       .seed = (uint64_t)verb_int(call, "seed"),
                                       .max_tokens = (uint32_t)verb_int(call, "max-tokens"),
                                       .ignore_eos = verb_flag(call, "ignore-eos")};
}

static int generate(const struct verb_call *call, struct generation *g, struct buffer *prompt,
                    struct error *err)
{
    _cleanup_(tokenizer_freep) struct tokenizer *tokenizer = NULL;
    _cleanup_free_ uint32_t *ids = NULL;
    struct output out = {.call = call};
    const char *reason = "stop";
    size_t n;

    const char *dir = step_client_welcome(g->client)->tokenizer_dir;
    const bool chat = verb_flag(call, "chat");

    int r = cli_tokenizer(dir, &tokenizer, err);
    if (r == 0 && chat)
        r = chat_form(dir, prompt, err);
    if (r == 0) /* a template writes the special tokens itself */
        r = tokenizer_encode(tokenizer, prompt->data, prompt->len, !chat, &ids, &n, err);
    if (r == 0)
        r = generation_prompt(g, ids, n, err);
    if (r == 0 && detok_new(tokenizer, true, &out.detok) < 0)
        r = error_set(err, ENOMEM, "no memory for the detokenizer");
    if (r == 0)
        r = push_prompt(&out, ids, n, err);
    if (r == 0)
        r = stream(g, &out, &reason, err);
    if (r == 0)
        print_summary(call, summary(g, &out, reason));
    detok_free(out.detok);
    buffer_free(&out.text);
    buffer_free(&out.piece);
    return r;
}

int run_generate(const struct verb_call *call)
{
    _cleanup_(control_freep) struct control *control = NULL;
    _cleanup_(buffer_free) struct buffer prompt = {0};
    struct generation_options options = options_of(call);
    struct generation g = {0};
    struct progress progress;
    struct error err = {0};

    cli_catch_interrupts();
    int r = read_prompt(call, &prompt, &err);
    if (r == 0)
        r = control_open(call, &control, &err);
    if (r == 0) {
        progress_wait(&progress, call, options.model);
        r = generation_begin(&g, control, &options, &err);
        progress_end(&progress);
    }
    if (r == 0)
        r = generate(call, &g, &prompt, &err);
    generation_end(&g, true);
    if (r < 0)
        return cli_fail(call, &err);
    return cli_interrupted ? CLI_INTERRUPTED : CLI_OK;
}
