/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing with the reference: the cases of an expected.json. */
#include "model/template/template.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/fd.h"
#include "base/utf8.h"

#define FILE_MAX ((size_t)256 << 20)

struct verify {
    const struct template *t;
    struct buffer *report;
    const char *path;
    const json_t *tokens;
    struct template_options options;
    size_t index, mismatches;
};

static void head(struct verify *v, const json_t *j)
{
    const char *scenario = json_string_value(json_object_get(j, "scenario"));
    v->mismatches++;
    buffer_printf(v->report, "%s: case %zu%s%s%s: ", v->path, v->index, scenario ? " (" : "",
                  scenario ? scenario : "", scenario ? ")" : "");
}

static void compare_text(struct verify *v, const json_t *j, const char *want, size_t n,
                         const char *got, size_t len)
{
    size_t at = 0, chars = 0;
    while (at < n && at < len && want[at] == got[at])
        at++;
    if (at == n && at == len)
        return;
    for (size_t i = 0; i < at; i++)
        chars += ((unsigned char)want[i] & 0xC0) != 0x80;
    head(v, j);
    buffer_printf(v->report, "differs, first at character %zu\n  expected: ", chars);
    utf8_excerpt(v->report, want, n, at);
    buffer_printf(v->report, "\n  got     : ");
    utf8_excerpt(v->report, got, len, at);
    buffer_printf(v->report, "\n");
}

static void compare(struct verify *v, const json_t *j, enum template_outcome outcome,
                    const struct buffer *out, const struct error *err)
{
    static const char *const words[] = {"a text", "a refusal", "an error"};
    const json_t *text = json_object_get(j, "text"), *refused = json_object_get(j, "refused");
    enum template_outcome want = json_is_string(text)      ? TEMPLATE_OK
                                 : json_is_string(refused) ? TEMPLATE_REFUSED
                                                           : TEMPLATE_ERROR;
    if (want != outcome) {
        head(v, j);
        buffer_printf(v->report, "expected %s, got %s%s%s\n", words[want], words[outcome],
                      outcome == TEMPLATE_OK ? "" : ": ",
                      outcome == TEMPLATE_OK ? "" : error_text(err));
    } else if (want == TEMPLATE_OK) {
        compare_text(v, j, json_string_value(text), json_string_length(text),
                     out->data ? out->data : "", out->len);
    } else if (want == TEMPLATE_REFUSED) {
        const char *message = json_string_value(refused);
        compare_text(v, j, message, MIN(strlen(message), (size_t)ERROR_TEXT_MAX - 1), err->text,
                     strlen(err->text));
    }
}

/* `tokens` say bos, eos, ...; templates say bos_token, eos_token, ... */
static int build_context(struct verify *v, const json_t *j, json_t **ret, struct error *err)
{
    const char *key;
    json_t *item;
    const json_t *input = json_object_get(j, "input");
    if (!json_is_object(input))
        return error_set(err, EBADMSG, "%s: case %zu has no input", v->path, v->index);
    json_t *context = json_object();
    json_object_foreach((json_t *)v->tokens, key, item)
    {
        _cleanup_free_ char *name = x_printf("%s_token", key);
        json_object_set(context, name, item);
    }
    json_object_update(context, (json_t *)input);
    *ret = context;
    return 0;
}

static int check_case(struct verify *v, const json_t *j, struct error *err)
{
    _cleanup_(buffer_free) struct buffer out = {0};
    json_auto_t *context = NULL;
    enum template_outcome outcome;
    struct error why = {0};
    int r = build_context(v, j, &context, err);
    if (r < 0)
        return r;
    template_render(v->t, context, &v->options, &out, &outcome, &why);
    compare(v, j, outcome, &out, &why);
    return 0;
}

/* "2026-03-15T09:30:00" */
static int read_now(const char *path, const json_t *root, struct tm *ret, bool *ret_given,
                    struct error *err)
{
    const char *text = json_string_value(json_object_get(root, "now")), *end;
    *ret_given = text != NULL;
    if (!text)
        return 0;
    memset(ret, 0, sizeof *ret);
    end = strptime(text, "%Y-%m-%dT%H:%M:%S", ret);
    if (!end)
        return error_set(err, EBADMSG, "%s: now is \"%s\", not of the form 2026-03-15T09:30:00",
                         path, text);
    timegm(ret); /* day of the week and of the year */
    return 0;
}

static int verify(const struct template *t, const char *path, struct buffer *report,
                  size_t *ret_cases, size_t *ret_mismatches, struct error *err)
{
    _cleanup_free_ char *data = NULL;
    json_auto_t *root = NULL;
    struct verify v = {.t = t, .report = report, .path = path};
    struct tm now;
    json_error_t e;
    json_t *item;
    size_t len;
    bool given;
    int r = fd_read_file(path, FILE_MAX, &data, &len, err);
    if (r < 0)
        return r;
    root = json_loadb(data, len, JSON_ALLOW_NUL, &e);
    if (!root)
        return error_set(err, EBADMSG, "%s: line %d: %s", path, e.line, e.text);
    const json_t *cases = json_is_array(root) ? root : json_object_get(root, "cases");
    if (!json_is_array(cases))
        return error_set(err, EBADMSG, "%s: there is no list of cases", path);
    r = read_now(path, root, &now, &given, err);
    if (r < 0)
        return r;
    v.options.now = given ? &now : NULL;
    v.tokens = json_object_get(root, "tokens");
    json_array_foreach(cases, v.index, item)
    {
        r = check_case(&v, item, err);
        if (r < 0)
            return r;
    }
    *ret_cases = json_array_size(cases);
    *ret_mismatches = v.mismatches;
    return 0;
}

int template_verify_file(const char *template_path, const char *path, struct buffer *report,
                         size_t *ret_cases, size_t *ret_mismatches, struct error *err)
{
    _cleanup_free_ char *text = NULL;
    _cleanup_(template_freep) struct template *t = NULL;
    size_t len;
    int r = fd_read_file(template_path, FILE_MAX, &text, &len, err);
    if (r >= 0)
        r = template_compile(text, len, &t, err);
    if (r < 0)
        return error_prefix(err, "%s", template_path);
    return verify(t, path, report, ret_cases, ret_mismatches, err);
}
