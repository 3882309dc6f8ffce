/* SPDX-License-Identifier: Apache-2.0 */
/* Text to ids: added tokens, normalizers, added tokens again, pre-tokenizers, model, templates. */
#include "model/tokenizer/internal.h"

#include <errno.h>
#include <string.h>

#include "model/tokenizer/unicode.h"

static int encode_piece(struct encoder *e, const char *text, size_t len, bool first)
{
    return pretokenize(e, 0, text, len, first);
}

static int encode_segment(struct encoder *e, const char *text, size_t len, bool first)
{
    int r = normalize(e->t, e->s, text, len, &text, &len, &first, e->err);
    return r < 0 ? r : added_split(e, 1, text, len, first, encode_piece);
}

/* One template around (or several times around) the ids so far. */
static int apply_template(const struct image_post *p, uint32_t n, struct ids *ids)
{
    struct ids out = {0};
    int r = 0;
    for (uint32_t i = 0; i < n && r >= 0; i++) {
        if (p[i].kind == POST_ID) {
            r = ids_push(&out, p[i].id);
        } else if (ids->n && (r = ids_reserve(&out, ids->n)) >= 0) {
            memcpy(out.data + out.n, ids->data, ids->n * sizeof *ids->data);
            out.n += ids->n;
        }
    }
    if (r < 0) {
        free(out.data);
        return r;
    }
    free(ids->data);
    *ids = out;
    return 0;
}

static int post_process(struct encoder *e)
{
    const struct image_post *post = e->t->post;
    uint32_t start = 0;
    for (uint32_t i = 0; i < e->t->h->post.n; i++) {
        if (post[i].kind != POST_END)
            continue;
        if (apply_template(post + start, i - start, &e->out) < 0)
            return error_set(e->err, ENOMEM, "no memory for %zu token ids", e->out.n);
        start = i + 1;
    }
    return 0;
}

int tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, bool add_special,
                     uint32_t **ret_ids, size_t *ret_n, struct error *err)
{
    struct encoder e = {.t = t, .err = err};
    int r;
    if (len > IMAGE_MAX_TEXT)
        return error_set(err, E2BIG, "a text of %zu bytes is too long to encode", len);
    if (!utf8_valid(text, len))
        return error_set(err, EILSEQ, "the text is not valid UTF-8");
    e.s = scratch_take(t);
    if (!e.s)
        return error_set(err, ENOMEM, "no memory to encode");
    r = added_split(&e, 0, text, len, true, encode_segment);
    scratch_give(t, e.s);
    if (r >= 0 && add_special)
        r = post_process(&e);
    if (r >= 0 && !e.out.data)
        r = ids_reserve(&e.out, 1);
    if (r < 0) {
        free(e.out.data);
        return r == -ENOMEM ? error_set(err, ENOMEM, "no memory to encode %zu bytes", len) : r;
    }
    *ret_ids = e.out.data;
    *ret_n = e.out.n;
    return 0;
}
