/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chat templates: the Jinja that they are written in, rendered to the byte as Hugging Face's
 * transformers render it (Jinja2's ImmutableSandboxedEnvironment with trim_blocks, lstrip_blocks
 * and the loop controls; tojson as json.dumps with ensure_ascii=False; raise_exception,
 * strftime_now and generation blocks). What that refuses is refused here too: include, import and
 * extends, methods that change their object, attributes that begin with an underscore.
 *
 * A template is compiled once, is immutable then, and may be rendered by several threads at a time.
 * Rendering is bounded in steps, depth, memory and output (struct template_limits).
 */
#ifndef EMBER_MODEL_TEMPLATE_TEMPLATE_H
#define EMBER_MODEL_TEMPLATE_TEMPLATE_H

#include <jansson.h>
#include <stdbool.h>
#include <time.h>

#include "base/mem.h"

struct template;

struct template_limits {
    uint64_t steps;  /* nodes evaluated, and bytes handled / 64; 0: 50 million */
    uint64_t memory; /* bytes of values that one rendering makes; 0: 256 MiB */
    uint64_t output; /* bytes; 0: 64 MiB */
    uint32_t depth;  /* nesting of expressions, blocks, calls and values; 0: 1000 */
};

struct template_options {
    const struct tm *now; /* what strftime_now formats; NULL: the local time */
    struct template_limits limits;
};

/* How a rendering ended. The negative errno beside it is -EINVAL for both failures but for limits.
 */
enum template_outcome {
    TEMPLATE_OK,
    TEMPLATE_REFUSED, /* raise_exception: err->text is its message, for the client to read */
    TEMPLATE_ERROR    /* the template failed: err->text begins with "line N: " */
};

/*
 * Compiles `len` bytes of UTF-8. -EINVAL: a syntax error, "line N: ..."; -ENOMEM: too large. The
 * caller owns *ret.
 */
int template_compile(const char *text, size_t len, struct template **ret, struct error *err);
void template_free(struct template *t); /* NULL is fine */
DEFINE_CLEANUP(struct template *, template_free)

/*
 * Appends the text to *out (untouched unless the outcome is TEMPLATE_OK). `context` is an object:
 * messages, tools, documents, add_generation_prompt, bos_token, eos_token, ... and whatever
 * chat_template_kwargs add; as transformers do, tools and documents count as None when they are
 * missing. Keys that begin with an underscore are dropped. The strings of `context` are read in
 * place: it must not change meanwhile. `options` may be NULL.
 * Returns 0, -EINVAL (refused or failed) or -ENOMEM, -ETIME, -EFBIG (memory, steps, output beyond
 * the limits); *ret_outcome (may be NULL) is always set.
 */
int template_render(const struct template *t, const json_t *context,
                    const struct template_options *options, struct buffer *out,
                    enum template_outcome *ret_outcome, struct error *err);

/* --- A checkpoint's templates --- */

struct chat_template;

/*
 * Reads DIR/chat_template.jinja or, when there is none, chat_template of DIR/tokenizer_config.json:
 * a string, or a list of {name, template} (also an object name: template). Special tokens
 * (bos_token, eos_token, ...: strings, or objects with `content`) come from tokenizer_config.json.
 * -ENOENT: the checkpoint has no chat template; -EBADMSG: malformed JSON; -EINVAL: the template
 * does not compile.
 */
int template_from_checkpoint(const char *dir, struct chat_template **ret, struct error *err);
void chat_template_free(struct chat_template *c); /* NULL is fine */
DEFINE_CLEANUP(struct chat_template *, chat_template_free)

/*
 * The source of the template to use, for what can be told from it: the template called `name` (a
 * request's chat_template naming one; NULL: choose), else tool_use when there are tools and it
 * exists, else default, else the only one. NULL when there is no such template. Owned by `c`.
 */
const char *chat_template_text(const struct chat_template *c, const char *name, bool has_tools,
                               size_t *ret_len);

/*
 * Renders with the special tokens under whatever `request` (an object: messages, tools, ...) says
 * itself. Otherwise as template_render; a template that `name` does not find is -ENOENT.
 */
int chat_template_render(const struct chat_template *c, const char *name, const json_t *request,
                         const struct template_options *options, struct buffer *out,
                         enum template_outcome *ret_outcome, struct error *err);

/* --- Comparing with the reference --- */

/*
 * Runs the cases of an expected.json (`path`) on the template in a file: an object with `cases`
 * (each with `input`, and `text`, `refused` or `error`), `tokens` (bos, eos, ...: the strings of
 * bos_token, ...) and `now` (2026-03-15T09:30:00). A refusal must have the same message; an error
 * only has to be one. Mismatches are appended to *report with the first differing character and
 * what surrounds it; *ret_cases and *ret_mismatches count. Mismatches are not errors.
 */
int template_verify_file(const char *template_path, const char *path, struct buffer *report,
                         size_t *ret_cases, size_t *ret_mismatches, struct error *err);

#endif
