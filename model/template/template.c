/* SPDX-License-Identifier: Apache-2.0 */
/* Compiling and rendering: where failures unwind to. */
#include "model/template/template.h"

#include <errno.h>
#include <utf8proc.h>

#include "model/template/parse_internal.h"

#define TEMPLATE_MAX ((size_t)4 << 20)

struct template
{
    struct chunk *chunks;
    struct node *root;
};

/* Offset of the first byte that is not UTF-8, or len. */
static size_t utf8_valid(const char *text, size_t len)
{
    utf8proc_int32_t c;
    for (size_t i = 0; i < len;) {
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)text + i,
                                              (utf8proc_ssize_t)MIN(len - i, (size_t)4), &c);
        if (n <= 0)
            return i;
        i += (size_t)n;
    }
    return len;
}

static struct node *compile(struct run *r, const char *text, size_t len)
{
    struct tokens tokens = {0};
    if (setjmp(r->jump))
        return NULL;
    lex(r, text, len, &tokens);
    struct node *root = parse_template(r, tokens.v);
    resolve_names(r, root);
    return root;
}

int template_compile(const char *text, size_t len, struct template **ret, struct error *err)
{
    static const struct template_limits limits = {.depth = 500};
    struct run r;
    if (len > TEMPLATE_MAX)
        return error_set(err, ENOMEM, "a chat template of %zu bytes, more than %zu", len,
                         TEMPLATE_MAX);
    size_t bad = utf8_valid(text, len);
    if (bad < len)
        return error_set(err, EINVAL, "line 1: byte %zu of the template is not UTF-8", bad);
    run_init(&r, &limits, err);
    struct node *root = compile(&r, text, len);
    struct template *t = root ? calloc(1, sizeof *t) : NULL;
    if (!t) {
        run_clear(&r);
        return root ? error_set(err, ENOMEM, "no memory for a template") : r.code;
    }
    *t = (struct template){r.chunks, root};
    *ret = t;
    return 0;
}

void template_free(struct template *t)
{
    if (!t)
        return;
    struct run r = {.chunks = t->chunks};
    run_clear(&r);
    free(t);
}

/* --- Rendering --- */

static void fill_context(struct run *r, const json_t *context)
{
    static const char *const always[] = {"tools", "documents"};
    struct value v = json_value(r, context);
    r->vars = dict_new(r);
    for (size_t i = 0; i < ARRAY_LEN(always); i++)
        dict_set(r, r->vars, v_str(str_lit(r, always[i])), v_none());
    for (size_t i = 0; i < v.dict->n; i++)
        if (!v.dict->v[i].key.s->len || v.dict->v[i].key.s->data[0] != '_')
            dict_set(r, r->vars, v.dict->v[i].key, v.dict->v[i].value);
}

static bool render(struct run *r, const struct node *root, const json_t *context, struct sb *text)
{
    if (setjmp(r->jump))
        return false;
    r->line = 1;
    fill_context(r, context);
    r->out = text;
    exec_root(r, root);
    return true;
}

int template_render(const struct template *t, const json_t *context,
                    const struct template_options *options, struct buffer *out,
                    enum template_outcome *ret_outcome, struct error *err)
{
    struct run r;
    struct sb text = {0};
    enum template_outcome unused;
    if (!ret_outcome)
        ret_outcome = &unused;
    *ret_outcome = TEMPLATE_ERROR;
    if (!json_is_object(context))
        return error_set(err, EBADMSG, "the context of a chat template is no JSON object");
    run_init(&r, options ? &options->limits : NULL, err);
    r.now = options ? options->now : NULL;
    int code = 0;
    if (!render(&r, t->root, context, &text)) {
        *ret_outcome = r.outcome;
        code = r.code;
    } else if (buffer_append(out, text.data ? text.data : "", text.len) < 0) {
        code = error_set(err, ENOMEM, "no memory for a prompt of %zu bytes", text.len);
    } else {
        *ret_outcome = TEMPLATE_OK;
    }
    run_clear(&r);
    return code;
}
