/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing with the reference: the cases of an expected.json. */
#include "model/tokenizer/tokenizer.h"

#include <errno.h>
#include <jansson.h>
#include <string.h>

#include "base/utf8.h"
#include "model/tokenizer/internal.h"

#define EXPECTED_MAX ((size_t)256 << 20)

struct verify {
    const struct tokenizer *t;
    struct buffer *report;
    const char *path;
    size_t index, mismatches;
    const char *text; /* of the case */
    size_t len;
};

/* --- Comparing --- */

static void head(struct verify *v, const char *what)
{
    v->mismatches++;
    buffer_printf(v->report, "%s: case %zu: %s differs, text ", v->path, v->index, what);
    utf8_excerpt(v->report, v->text, v->len, 0);
}

static void id_context(struct verify *v, const char *label, const uint32_t *ids, size_t n,
                       size_t at)
{
    buffer_printf(v->report, "\n  %s:", label);
    for (size_t i = at > 2 ? at - 2 : 0; i < MIN(n, at + 3); i++) {
        size_t len = 0;
        const char *s = tokenizer_token_text(v->t, ids[i], &len);
        buffer_printf(v->report, i == at ? " [%u " : " %u ", ids[i]);
        utf8_excerpt(v->report, s ? s : "", len, 0);
        if (i == at)
            buffer_printf(v->report, "]");
    }
    if (at >= n)
        buffer_printf(v->report, " [end]");
}

static void compare_ids(struct verify *v, const char *what, const uint32_t *ours, size_t n_ours,
                        const uint32_t *theirs, size_t n_theirs)
{
    size_t at = 0;
    while (at < n_ours && at < n_theirs && ours[at] == theirs[at])
        at++;
    if (at == n_ours && at == n_theirs)
        return;
    head(v, what);
    buffer_printf(v->report, ", first at id %zu (%zu ids, expected %zu)", at, n_ours, n_theirs);
    id_context(v, "expected", theirs, n_theirs, at);
    id_context(v, "got     ", ours, n_ours, at);
    buffer_printf(v->report, "\n");
}

static void compare_text(struct verify *v, const char *what, const struct buffer *ours,
                         const char *theirs, size_t n)
{
    size_t at = 0, chars = 0;
    while (at < ours->len && at < n && ours->data[at] == theirs[at])
        at++;
    if (at == ours->len && at == n)
        return;
    for (size_t i = 0; i < at; i++)
        chars += ((unsigned char)theirs[i] & 0xC0) != 0x80;
    head(v, what);
    buffer_printf(v->report, ", first at character %zu\n  expected: ", chars);
    utf8_excerpt(v->report, theirs, n, at);
    buffer_printf(v->report, "\n  got     : ");
    utf8_excerpt(v->report, ours->data ? ours->data : "", ours->len, at);
    buffer_printf(v->report, "\n");
}

static int read_ids(struct verify *v, const json_t *j, uint32_t **ret_ids, size_t *ret_n,
                    struct error *err)
{
    size_t n = json_array_size(j), i;
    json_t *item;
    _cleanup_free_ uint32_t *ids = mem_alloc(n + 1, sizeof *ids);
    if (!ids)
        return error_set(err, ENOMEM, "%s: no memory for %zu ids", v->path, n);
    if (!json_is_array(j))
        return error_set(err, EBADMSG, "%s: case %zu has no list of ids", v->path, v->index);
    json_array_foreach(j, i, item)
    {
        json_int_t id = json_integer_value(item);
        if (!json_is_integer(item) || id < 0 || id > INT32_MAX)
            return error_set(err, EBADMSG, "%s: case %zu: id %zu is no id", v->path, v->index, i);
        ids[i] = (uint32_t)id;
    }
    *ret_ids = TAKE(ids);
    *ret_n = n;
    return 0;
}

static int check_encode(struct verify *v, const char *what, bool special, const uint32_t *ids,
                        size_t n, struct error *err)
{
    _cleanup_free_ uint32_t *ours = NULL;
    size_t n_ours;
    int r = tokenizer_encode(v->t, v->text, v->len, special, &ours, &n_ours, err);
    if (r >= 0)
        compare_ids(v, what, ours, n_ours, ids, n);
    return r;
}

/* Decoded texts are those of `ids`, the ones without what the post-processor adds. */
static int check_decode(struct verify *v, const json_t *j, const char *what, bool skip,
                        const uint32_t *ids, size_t n, struct error *err)
{
    _cleanup_(buffer_free) struct buffer ours = {0};
    const json_t *text = json_object_get(j, what);
    if (!text)
        return 0;
    int r = tokenizer_decode(v->t, ids, n, skip, &ours, err);
    if (r >= 0)
        compare_text(v, what, &ours, json_string_value(text), json_string_length(text));
    return r;
}

static int check_case(struct verify *v, const json_t *j, struct error *err)
{
    _cleanup_free_ uint32_t *ids = NULL, *with = NULL;
    size_t n = 0, n_with = 0;
    const json_t *text = json_object_get(j, "text"), *special;
    v->text = json_string_value(text);
    v->len = json_string_length(text);
    if (!v->text)
        return error_set(err, EBADMSG, "%s: case %zu has no text", v->path, v->index);
    int r = read_ids(v, json_object_get(j, "ids"), &ids, &n, err);
    if (r >= 0)
        r = check_encode(v, "ids", false, ids, n, err);
    special = json_object_get(j, "ids_with_special");
    if (r >= 0 && special) {
        r = read_ids(v, special, &with, &n_with, err);
    } else if (r >= 0) {
        with = mem_alloc(n + 1, sizeof *with);
        if (!with)
            return error_set(err, ENOMEM, "%s: no memory", v->path);
        memcpy(with, ids, n * sizeof *ids);
        n_with = n;
    }
    if (r >= 0)
        r = check_encode(v, "ids_with_special", true, with, n_with, err);
    if (r >= 0)
        r = check_decode(v, j, "decoded", false, ids, n, err);
    return r < 0 ? r : check_decode(v, j, "decoded_skip_special", true, ids, n, err);
}

int tokenizer_verify(const struct tokenizer *t, const char *path, struct buffer *report,
                     size_t *ret_cases, size_t *ret_mismatches, struct error *err)
{
    _cleanup_(buffer_free) struct buffer data = {0};
    json_auto_t *root = NULL;
    struct verify v = {.t = t, .report = report, .path = path};
    json_error_t e;
    json_t *item;
    int r = read_json_file(path, EXPECTED_MAX, &data, err);
    if (r < 0)
        return r;
    root = json_loadb(data.data ? data.data : "", data.len, JSON_ALLOW_NUL, &e);
    if (!root)
        return error_set(err, EBADMSG, "%s: line %d: %s", path, e.line, e.text);
    const json_t *cases = json_is_array(root) ? root : json_object_get(root, "cases");
    if (!json_is_array(cases))
        return error_set(err, EBADMSG, "%s: there is no list of cases", path);
    json_array_foreach(cases, v.index, item)
    {
        r = check_case(&v, item, err);
        if (r < 0)
            return error_prefix(err, "%s: case %zu", path, v.index);
    }
    *ret_cases = json_array_size(cases);
    *ret_mismatches = v.mismatches;
    return 0;
}
