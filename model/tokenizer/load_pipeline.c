/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Normalizers, pre-tokenizers, decoders and post-processors of a tokenizer.json, each sequence
 * flattened into a row of components. Field names and defaults are those of the format.
 */
#include "model/tokenizer/internal.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "model/tokenizer/unicode.h"

#define MAX_DEPTH 16

/* ByteLevel's own pattern (GPT-2's). */
static const char byte_level_pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

struct loader {
    struct image_parts *p;
    struct error *err;
    const char *role; /* "normalizer", ... for messages */
    unsigned depth;
    uint32_t n; /* components so far in this role */
};

typedef int (*load_func)(struct loader *l, const char *type, const json_t *j);

static int bad(struct loader *l, const char *type, const char *what)
{
    return error_set(l->err, EBADMSG, "tokenizer.json: %s %s: %s", l->role, type, what);
}

static int unknown(struct loader *l, const char *type)
{
    return error_set(l->err, ENOTSUP, "tokenizer.json: %s of type '%.80s' is not supported",
                     l->role, type);
}

static bool flag(const json_t *j, const char *name, bool otherwise)
{
    const json_t *v = json_object_get(j, name);
    return json_is_boolean(v) ? json_is_true(v) : otherwise;
}

static int add_comp(struct loader *l, const char *type, struct image_comp *c, const char *pattern,
                    size_t pattern_len, const char *content, size_t content_len)
{
    size_t n = l->p->comps.len / sizeof *c;
    if (n == IMAGE_MAX_COMPS || l->n == IMAGE_MAX_PRE)
        return bad(l, type, "too many components");
    if (image_add_string(l->p, pattern, pattern_len, &c->pattern) < 0 ||
        image_add_string(l->p, content, content_len, &c->content) < 0 ||
        buffer_append(&l->p->comps, c, sizeof *c) < 0)
        return error_set(l->err, ENOMEM, "no memory for a tokenizer");
    l->n++;
    return 0;
}

static int add_plain(struct loader *l, const char *type, enum comp_kind kind, uint32_t flags,
                     uint32_t n)
{
    struct image_comp c = {.kind = kind, .flags = flags, .n = n};
    return add_comp(l, type, &c, "", 0, "", 0);
}

/* {"String": s} or {"Regex": s}. */
static const json_t *get_pattern(const json_t *j, uint32_t *flags)
{
    const json_t *pattern = json_object_get(j, "pattern");
    const json_t *s = json_object_get(pattern, "String");
    if (!s) {
        s = json_object_get(pattern, "Regex");
        *flags |= COMP_REGEX;
    }
    return json_is_string(s) ? s : NULL;
}

/* A pattern must compile now, so that a bad one is an error of the file that has it. */
static int check_pattern(struct loader *l, const char *type, const struct image_comp *c,
                         const json_t *s)
{
    _cleanup_(regex_freep) struct regex *re = NULL;
    if (!(c->flags & COMP_REGEX))
        return 0;
    int r = regex_compile(json_string_value(s), json_string_length(s), &re, l->err);
    return r < 0 ? error_prefix(l->err, "tokenizer.json: %s %s", l->role, type) : 0;
}

static int add_replace(struct loader *l, const char *type, enum comp_kind kind, const json_t *j)
{
    struct image_comp c = {.kind = kind};
    const json_t *pattern = get_pattern(j, &c.flags), *content = json_object_get(j, "content");
    if (!pattern || !json_is_string(content))
        return bad(l, type, "pattern {String or Regex} and content are needed");
    int r = check_pattern(l, type, &c, pattern);
    return r < 0 ? r
                 : add_comp(l, type, &c, json_string_value(pattern), json_string_length(pattern),
                            json_string_value(content), json_string_length(content));
}

/* Pre-tokenizer and decoder share it. */
static int add_metaspace(struct loader *l, const char *type, enum comp_kind kind, const json_t *j)
{
    static const char *const schemes[] = {"always", "first", "never"};
    struct image_comp c = {.kind = kind, .flags = flag(j, "split", true) ? COMP_SPLIT : 0};
    const json_t *mark = json_object_get(j, "replacement");
    const json_t *scheme = json_object_get(j, "prepend_scheme");
    size_t len = json_string_length(mark);
    if (!len || len != utf8_len(*json_string_value(mark)))
        return bad(l, type, "replacement must be one character");
    if (json_is_string(scheme)) {
        while (c.n < PREPEND_SCHEMES && strcmp(json_string_value(scheme), schemes[c.n]))
            c.n++;
        if (c.n == PREPEND_SCHEMES)
            return bad(l, type, "unknown prepend_scheme");
    }
    if (!flag(j, "add_prefix_space", true)) {
        if (json_is_string(scheme) && c.n != PREPEND_NEVER)
            return bad(l, type, "add_prefix_space contradicts prepend_scheme");
        c.n = PREPEND_NEVER;
    }
    return add_comp(l, type, &c, json_string_value(mark), len, "", 0);
}

/* --- Normalizers --- */

static int load_normalizer(struct loader *l, const char *type, const json_t *j)
{
    static const struct {
        const char *type;
        enum comp_kind kind;
    } plain[] = {
        {"NFC", NORM_NFC},
        {"NFD", NORM_NFD},
        {"NFKC", NORM_NFKC},
        {"NFKD", NORM_NFKD},
        {"Lowercase", NORM_LOWERCASE},
        {"StripAccents", NORM_STRIP_ACCENTS},
        {"ByteLevel", NORM_BYTE_LEVEL},
    };
    for (size_t i = 0; i < ARRAY_LEN(plain); i++)
        if (!strcmp(type, plain[i].type))
            return add_plain(l, type, plain[i].kind, 0, 0);
    if (!strcmp(type, "Strip")) {
        uint32_t sides = (flag(j, "strip_left", true) ? COMP_LEFT : 0) |
                         (flag(j, "strip_right", true) ? COMP_RIGHT : 0);
        return add_plain(l, type, NORM_STRIP, sides, 0);
    }
    if (!strcmp(type, "Prepend")) {
        const json_t *s = json_object_get(j, "prepend");
        struct image_comp c = {.kind = NORM_PREPEND};
        if (!json_is_string(s))
            return bad(l, type, "prepend is needed");
        return add_comp(l, type, &c, "", 0, json_string_value(s), json_string_length(s));
    }
    if (!strcmp(type, "Replace"))
        return add_replace(l, type, NORM_REPLACE, j);
    return unknown(l, type);
}

/* --- Pre-tokenizers --- */

static int get_behavior(struct loader *l, const char *type, const json_t *j, uint32_t otherwise,
                        uint32_t *ret)
{
    /* Older files write them in lower case. */
    static const char *const names[][2] = {
        {"Removed", "removed"},
        {"Isolated", "isolated"},
        {"MergedWithPrevious", "merged_with_previous"},
        {"MergedWithNext", "merged_with_next"},
        {"Contiguous", "contiguous"},
    };
    const char *s = json_string_value(json_object_get(j, "behavior"));
    if (!s && otherwise < SPLIT_BEHAVIORS)
        return *ret = otherwise, 0;
    for (uint32_t i = 0; s && i < SPLIT_BEHAVIORS; i++)
        if (!strcmp(s, names[i][0]) || !strcmp(s, names[i][1]))
            return *ret = i, 0;
    return bad(l, type, "unknown behavior");
}

static int add_split(struct loader *l, const char *type, const json_t *j)
{
    struct image_comp c = {.kind = PRE_SPLIT, .flags = flag(j, "invert", false) ? COMP_INVERT : 0};
    const json_t *pattern = get_pattern(j, &c.flags);
    if (!pattern)
        return bad(l, type, "pattern {String or Regex} is needed");
    int r = get_behavior(l, type, j, SPLIT_BEHAVIORS, &c.n);
    if (r >= 0)
        r = check_pattern(l, type, &c, pattern);
    return r < 0 ? r
                 : add_comp(l, type, &c, json_string_value(pattern), json_string_length(pattern),
                            "", 0);
}

static int add_byte_level(struct loader *l, const char *type, const json_t *j)
{
    struct image_comp c = {
        .kind = PRE_BYTE_LEVEL,
        .flags = (flag(j, "add_prefix_space", true) ? COMP_PREFIX_SPACE : 0) |
                 (flag(j, "use_regex", true) ? COMP_REGEX : 0),
    };
    return add_comp(l, type, &c, byte_level_pattern, sizeof byte_level_pattern - 1, "", 0);
}

static int load_pre_tokenizer(struct loader *l, const char *type, const json_t *j)
{
    uint32_t behavior;
    int r;
    if (!strcmp(type, "Split"))
        return add_split(l, type, j);
    if (!strcmp(type, "CharDelimiterSplit")) {
        const json_t *s = json_object_get(j, "delimiter");
        struct image_comp c = {.kind = PRE_SPLIT, .n = SPLIT_REMOVED};
        size_t len = json_string_length(s);
        if (!len || utf8_len(*json_string_value(s)) != len)
            return bad(l, type, "delimiter must be one character");
        return add_comp(l, type, &c, json_string_value(s), len, "", 0);
    }
    if (!strcmp(type, "ByteLevel"))
        return add_byte_level(l, type, j);
    if (!strcmp(type, "Metaspace"))
        return add_metaspace(l, type, PRE_METASPACE, j);
    if (!strcmp(type, "Digits"))
        return add_plain(l, type, PRE_DIGITS,
                         flag(j, "individual_digits", false) ? COMP_INDIVIDUAL : 0, 0);
    if (!strcmp(type, "Punctuation")) {
        r = get_behavior(l, type, j, SPLIT_ISOLATED, &behavior);
        return r < 0 ? r : add_plain(l, type, PRE_PUNCTUATION, 0, behavior);
    }
    if (!strcmp(type, "Whitespace"))
        return add_plain(l, type, PRE_WHITESPACE, 0, 0);
    if (!strcmp(type, "WhitespaceSplit"))
        return add_plain(l, type, PRE_WHITESPACE_SPLIT, 0, 0);
    if (!strcmp(type, "BertPreTokenizer")) {
        r = add_plain(l, type, PRE_WHITESPACE_SPLIT, 0, 0);
        return r < 0 ? r : add_plain(l, type, PRE_PUNCTUATION, 0, SPLIT_ISOLATED);
    }
    return unknown(l, type);
}

/* --- Decoders --- */

static int add_strip(struct loader *l, const char *type, const json_t *j)
{
    const json_t *content = json_object_get(j, "content");
    json_int_t start = json_integer_value(json_object_get(j, "start"));
    json_int_t stop = json_integer_value(json_object_get(j, "stop"));
    size_t len = json_string_length(content);
    struct image_comp c = {.kind = DEC_STRIP, .n = (uint32_t)start, .m = (uint32_t)stop};
    if (!len || len != utf8_len(*json_string_value(content)))
        return bad(l, type, "content must be one character");
    if (start < 0 || stop < 0 || start > INT32_MAX || stop > INT32_MAX)
        return bad(l, type, "start and stop must be small counts");
    return add_comp(l, type, &c, "", 0, json_string_value(content), len);
}

static int load_decoder(struct loader *l, const char *type, const json_t *j)
{
    if (!strcmp(type, "ByteLevel"))
        return add_plain(l, type, DEC_BYTE_LEVEL, 0, 0);
    if (!strcmp(type, "ByteFallback"))
        return add_plain(l, type, DEC_BYTE_FALLBACK, 0, 0);
    if (!strcmp(type, "Fuse"))
        return add_plain(l, type, DEC_FUSE, 0, 0);
    if (!strcmp(type, "Replace"))
        return add_replace(l, type, DEC_REPLACE, j);
    if (!strcmp(type, "Strip"))
        return add_strip(l, type, j);
    if (!strcmp(type, "Metaspace"))
        return add_metaspace(l, type, DEC_METASPACE, j);
    return unknown(l, type);
}

/* --- Sequences --- */

static int walk(struct loader *l, const json_t *j, const char *list_name, load_func load)
{
    const char *type = json_string_value(json_object_get(j, "type"));
    if (!type)
        return bad(l, "?", "a component without a type");
    if (strcmp(type, "Sequence"))
        return load(l, type, j);
    const json_t *list = json_object_get(j, list_name);
    size_t i;
    json_t *item;
    int r = 0;
    if (!json_is_array(list))
        return bad(l, type, "the list is missing");
    if (++l->depth > MAX_DEPTH)
        return bad(l, type, "nested too deep");
    json_array_foreach(list, i, item)
    {
        r = walk(l, item, list_name, load);
        if (r < 0)
            return r;
    }
    l->depth--;
    return r;
}

static int load_role(struct image_parts *p, const json_t *root, const char *role,
                     const char *list_name, load_func load, uint32_t *ret_n, struct error *err)
{
    struct loader l = {.p = p, .err = err, .role = role};
    const json_t *j = json_object_get(root, role);
    int r = !j || json_is_null(j) ? 0 : walk(&l, j, list_name, load);
    *ret_n = l.n;
    return r;
}

/* --- Post-processors --- */

int load_post_id(struct image_parts *p, uint32_t kind, uint32_t id)
{
    struct image_post post = {kind, id};
    if (kind == POST_ID) {
        if (id >= IMAGE_MAX_IDS)
            return -EBADMSG;
        p->h.n_ids = MAX(p->h.n_ids, id + 1);
    }
    return buffer_append(&p->post, &post, sizeof post);
}

/* The ids that a special token of a template stands for. */
static int template_token(struct loader *l, const json_t *tokens, const json_t *item)
{
    const char *name = json_string_value(json_object_get(item, "id"));
    const json_t *ids = json_object_get(json_object_get(tokens, name ? name : ""), "ids");
    size_t i;
    json_t *id;
    if (!json_is_array(ids))
        return bad(l, "TemplateProcessing", "a special token is not in special_tokens");
    json_array_foreach(ids, i, id)
    {
        json_int_t v = json_integer_value(id);
        if (!json_is_integer(id) || v < 0 || v >= IMAGE_MAX_IDS)
            return bad(l, "TemplateProcessing", "an id is out of range");
        if (load_post_id(l->p, POST_ID, (uint32_t)v) < 0)
            return error_set(l->err, ENOMEM, "no memory for a tokenizer");
    }
    return 0;
}

static int template(struct loader *l, const json_t *j)
{
    const json_t *single = json_object_get(j, "single");
    const json_t *tokens = json_object_get(j, "special_tokens");
    size_t i, n_sequences = 0;
    json_t *item;
    int r = 0;
    if (!json_is_array(single))
        return bad(l, "TemplateProcessing", "single is missing");
    json_array_foreach(single, i, item)
    {
        const json_t *special = json_object_get(item, "SpecialToken");
        const json_t *sequence = json_object_get(item, "Sequence");
        const char *id = json_string_value(json_object_get(sequence, "id"));
        if (special)
            r = template_token(l, tokens, special);
        else if (id && !strcmp(id, "A") && !n_sequences++)
            r = load_post_id(l->p, POST_SEQUENCE, 0);
        else
            return bad(l, "TemplateProcessing", "single has something else than one A");
        if (r < 0)
            return r;
    }
    return load_post_id(l->p, POST_END, 0);
}

/* "cls": [token, id], A, "sep": [token, id]; the reference's Bert and Roberta processors. */
static int classic(struct loader *l, const char *type, const json_t *j)
{
    const json_t *cls = json_array_get(json_object_get(j, "cls"), 1);
    const json_t *sep = json_array_get(json_object_get(j, "sep"), 1);
    json_int_t a = json_integer_value(cls), b = json_integer_value(sep);
    if (!json_is_integer(cls) || !json_is_integer(sep) || a < 0 || b < 0 || a >= IMAGE_MAX_IDS ||
        b >= IMAGE_MAX_IDS)
        return bad(l, type, "cls and sep must be [token, id]");
    int r = load_post_id(l->p, POST_ID, (uint32_t)a);
    if (r >= 0)
        r = load_post_id(l->p, POST_SEQUENCE, 0);
    if (r >= 0)
        r = load_post_id(l->p, POST_ID, (uint32_t)b);
    return r < 0 ? r : load_post_id(l->p, POST_END, 0);
}

static int load_post(struct loader *l, const char *type, const json_t *j)
{
    if (!strcmp(type, "ByteLevel")) /* only trims offsets */
        return 0;
    if (!strcmp(type, "TemplateProcessing"))
        return template(l, j);
    if (!strcmp(type, "BertProcessing") || !strcmp(type, "RobertaProcessing"))
        return classic(l, type, j);
    return unknown(l, type);
}

int load_pipeline(struct image_parts *p, const json_t *root, struct error *err)
{
    uint32_t n;
    int r = load_role(p, root, "normalizer", "normalizers", load_normalizer, &p->h.n_norm, err);
    if (r >= 0)
        r = load_role(p, root, "pre_tokenizer", "pretokenizers", load_pre_tokenizer, &p->h.n_pre,
                      err);
    if (r >= 0)
        r = load_role(p, root, "decoder", "decoders", load_decoder, &p->h.n_dec, err);
    if (r >= 0)
        r = load_role(p, root, "post_processor", "processors", load_post, &n, err);
    if (json_is_object(json_object_get(root, "decoder")))
        p->h.flags |= FLAG_DECODER;
    return r == -ENOMEM ? error_set(err, ENOMEM, "no memory for a tokenizer") : r;
}
