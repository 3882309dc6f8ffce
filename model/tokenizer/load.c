/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer.json to an image: the vocabulary, the merges and the added tokens. */
#include "model/tokenizer/internal.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "model/tokenizer/unicode.h"

#define FILE_MAX ((size_t)256 << 20)
#define CONFIG_MAX ((size_t)16 << 20)

/* An added token of the file, with the id that it gets. */
struct added {
    const char *content;
    size_t len;
    uint32_t id;
    bool single_word, lstrip, rstrip, normalized, special;
};

struct loader {
    struct image_parts p;
    struct error *err;
    const json_t *root, *model, *vocab;
    json_t *ids; /* content → index into added, for those seen */
    struct added *added;
    size_t n_added;
};

static void loader_free(struct loader *l)
{
    image_parts_free(&l->p);
    json_decref(l->ids);
    free(l->added);
}

static int bad(struct loader *l, const char *what)
{
    return error_set(l->err, EBADMSG, "tokenizer.json: %s", what);
}

static int no_memory(struct loader *l)
{
    return error_set(l->err, ENOMEM, "no memory for a tokenizer");
}

static const char *string_field(const json_t *j, const char *name)
{
    const char *s = json_string_value(json_object_get(j, name));
    return s ? s : "";
}

/* The id of a model key in the file; false when it has none. */
static bool model_id(const struct loader *l, const char *key, size_t len, uint32_t *ret_id)
{
    const json_t *v = json_object_getn(l->vocab, key, len);
    if (!json_is_integer(v))
        return false;
    *ret_id = (uint32_t)json_integer_value(v); /* load_vocab has checked the range */
    return true;
}

static int check_ids(struct loader *l)
{
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)l->vocab, key, v)
    {
        json_int_t id = json_integer_value(v);
        if (!json_is_integer(v) || id < 0 || id >= IMAGE_MAX_IDS)
            return error_set(l->err, EBADMSG,
                             "tokenizer.json: the id of token '%.60s' is not in 0..%u", key,
                             IMAGE_MAX_IDS - 1);
        l->p.h.n_ids = MAX(l->p.h.n_ids, (uint32_t)id + 1);
    }
    return 0;
}

/* The bytes that a byte-level key spells; false when some character spells none. */
static bool unspell(const char *key, size_t len, struct buffer *out)
{
    out->len = 0;
    for (size_t i = 0; i < len;) {
        uint32_t c;
        i += utf8_get(key + i, &c);
        char b = (char)byte_level_byte(c);
        if (byte_level_byte(c) < 0 || buffer_append(out, &b, 1) < 0)
            return false;
    }
    return len > 0;
}

/* The texts of ids: zeroed room for all, filled by set_token. */
static int make_tokens(struct loader *l)
{
    size_t n = l->p.h.n_ids * sizeof(struct image_token);
    int r = buffer_reserve(&l->p.tokens, n);
    if (r < 0)
        return no_memory(l);
    memset(l->p.tokens.data, 0, n);
    l->p.tokens.len = n;
    return 0;
}

static int set_token(struct loader *l, uint32_t id, const char *s, size_t len, uint32_t flags)
{
    struct image_token *t = (struct image_token *)(void *)l->p.tokens.data + id;
    t->flags = TOKEN_PRESENT | flags;
    return image_add_string(&l->p, s, len, &t->text) < 0 ? no_memory(l) : 0;
}

static int add_vocab(struct loader *l, const char *key, size_t len, uint32_t id,
                     struct buffer *room)
{
    struct image_vocab v = {.id = id};
    bool bytes = l->p.h.flags & FLAG_BYTES;
    int r = set_token(l, id, key, len, 0);
    if (r < 0)
        return r;
    v.key = ((struct image_token *)(void *)l->p.tokens.data)[id].text;
    if (bytes) {
        if (!unspell(key, len, room))
            return 0;
        if (room->len == 1)
            l->p.h.byte_token[(uint8_t)room->data[0]] = id;
        if (image_add_string(&l->p, room->data, room->len, &v.key) < 0)
            return no_memory(l);
    }
    return buffer_append(&l->p.vocab, &v, sizeof v) < 0 ? no_memory(l) : 0;
}

static int hash_vocab(struct loader *l)
{
    const struct image_vocab *v = (void *)l->p.vocab.data;
    size_t n = l->p.vocab.len / sizeof *v, n_slots = 16;
    while (n_slots < n + n / 2)
        n_slots *= 2;
    if (buffer_reserve(&l->p.slots, n_slots * sizeof(uint32_t)) < 0)
        return no_memory(l);
    uint32_t *slots = (void *)l->p.slots.data;
    memset(slots, 0, n_slots * sizeof *slots);
    l->p.slots.len = n_slots * sizeof *slots;
    for (size_t i = 0; i < n; i++) {
        size_t k = checksum_of(l->p.strings.data + v[i].key.off, v[i].key.len) & (n_slots - 1);
        while (slots[k])
            k = (k + 1) & (n_slots - 1);
        slots[k] = (uint32_t)i + 1;
    }
    return 0;
}

static void find_special_ids(struct loader *l)
{
    const char *unk = json_string_value(json_object_get(l->model, "unk_token"));
    char name[8];
    l->p.h.unk_id = NO_ID;
    if (unk) {
        l->p.h.flags |= FLAG_UNK;
        model_id(l, unk, strlen(unk), &l->p.h.unk_id);
    }
    for (unsigned i = 0; i < 256; i++) {
        snprintf(name, sizeof name, "<0x%02X>", i);
        model_id(l, name, 6, &l->p.h.byte_fallback[i]);
    }
}

static int load_vocab(struct loader *l)
{
    _cleanup_(buffer_free) struct buffer room = {0};
    const char *key;
    size_t len;
    json_t *v;
    json_object_keylen_foreach((json_t *)l->vocab, key, len, v)
    {
        int r = add_vocab(l, key, len, (uint32_t)json_integer_value(v), &room);
        if (r < 0)
            return r;
    }
    return hash_vocab(l);
}

/* --- Merges --- */

/* "left right", or ["left", "right"]. */
static bool merge_sides(const json_t *j, const char **a, size_t *n_a, const char **b, size_t *n_b)
{
    if (json_is_array(j)) {
        const json_t *x = json_array_get(j, 0), *y = json_array_get(j, 1);
        *a = json_string_value(x);
        *b = json_string_value(y);
        *n_a = json_string_length(x);
        *n_b = json_string_length(y);
        return json_array_size(j) == 2 && *a && *b;
    }
    const char *s = json_string_value(j), *space = s ? strchr(s, ' ') : NULL;
    if (!space || strchr(space + 1, ' '))
        return false;
    *a = s;
    *n_a = (size_t)(space - s);
    *b = space + 1;
    *n_b = json_string_length(j) - *n_a - 1;
    return true;
}

static void put_merge(struct loader *l, uint32_t left, uint32_t right, uint32_t rank)
{
    uint64_t *slots = (void *)l->p.merges.data, key = merge_key(left, right);
    uint32_t n = (uint32_t)(l->p.merges.len / sizeof *slots);
    uint32_t i = merge_bucket(key, n / MERGE_BUCKET) * MERGE_BUCKET;
    while (slots[i] != MERGE_EMPTY && slots[i] >> MERGE_RANK_BITS != key)
        i = i + 1 == n ? 0 : i + 1;
    /* A repeated pair takes the later rank, as in the reference. */
    slots[i] = key << MERGE_RANK_BITS | rank;
}

/* Notes which characters stand side by side in a merged token. */
static void note_pairs(struct loader *l, const char *s, size_t len)
{
    uint32_t a, b;
    for (size_t i = utf8_get(s, &a), n; i < len; i += n, a = b) {
        n = utf8_get(s + i, &b);
        uint32_t bit = pair_bit(a, b);
        l->p.pairs.data[bit / 8] |= (char)(1 << bit % 8);
    }
}

/* Whether a merge works on ids whose text is not what they were read from. */
static bool is_stand_in(const struct loader *l, uint32_t id)
{
    if ((l->p.h.flags & FLAG_UNK) && id == l->p.h.unk_id)
        return true;
    if (!(l->p.h.flags & FLAG_BYTE_FALLBACK))
        return false;
    for (unsigned i = 0; i < 256; i++)
        if (l->p.h.byte_fallback[i] == id)
            return true;
    return false;
}

static int add_merge(struct loader *l, const json_t *j, uint32_t rank, struct buffer *room,
                     bool *regular)
{
    const char *a, *b;
    size_t n_a, n_b, n_prefix = l->p.h.prefix.len;
    uint32_t left, right, id;
    if (!merge_sides(j, &a, &n_a, &b, &n_b) || n_b < n_prefix)
        return error_set(l->err, EBADMSG, "tokenizer.json: merge %u is not a pair of tokens", rank);
    room->len = 0;
    if (buffer_append(room, a, n_a) < 0 || buffer_append(room, b + n_prefix, n_b - n_prefix) < 0)
        return no_memory(l);
    if (!model_id(l, a, n_a, &left) || !model_id(l, b, n_b, &right) ||
        !model_id(l, room->data, room->len, &id))
        return error_set(l->err, EBADMSG,
                         "tokenizer.json: merge %u ('%.40s') has a token outside the vocabulary",
                         rank, room->data);
    if (is_stand_in(l, left) || is_stand_in(l, right) || is_stand_in(l, id))
        *regular = false;
    if (l->p.pairs.len && room->len)
        note_pairs(l, room->data, room->len);
    put_merge(l, left, right, rank);
    return buffer_append(&l->p.ranks, &id, sizeof id) < 0 ? no_memory(l) : 0;
}

static int make_merge_table(struct loader *l, size_t n)
{
    /* Six of a bucket's eight on average. */
    uint64_t bytes = (n / 6 + 1) * MERGE_BUCKET * sizeof(uint64_t);
    if (n > IMAGE_MAX_RANKS)
        return bad(l, "more than two million merges");
    if (buffer_reserve(&l->p.merges, bytes) < 0)
        return no_memory(l);
    l->p.merges.len = bytes;
    memset(l->p.merges.data, 0xFF, bytes);
    return 0;
}

static int make_filters(struct loader *l)
{
    const char *key;
    size_t len;
    json_t *v;
    if (buffer_reserve(&l->p.pairs, PAIRS_BYTES) < 0 ||
        buffer_reserve(&l->p.known, KNOWN_BYTES) < 0)
        return no_memory(l);
    memset(l->p.pairs.data, 0, l->p.pairs.len = PAIRS_BYTES);
    memset(l->p.known.data, 0, l->p.known.len = KNOWN_BYTES);
    json_object_keylen_foreach((json_t *)l->vocab, key, len, v)
    {
        uint32_t c;
        if (len && utf8_get(key, &c) == len && c < 0x10000)
            l->p.known.data[c / 8] |= (char)(1 << c % 8);
    }
    return 0;
}

static int load_merges(struct loader *l)
{
    _cleanup_(buffer_free) struct buffer room = {0};
    const json_t *merges = json_object_get(l->model, "merges");
    uint32_t rank = 0;
    bool regular = true;
    size_t i;
    json_t *j;
    int r = make_merge_table(l, json_array_size(merges));
    if (r >= 0 && !(l->p.h.flags & (FLAG_BYTES | FLAG_AFFIX)))
        r = make_filters(l);
    json_array_foreach(merges, i, j)
    {
        const char *s = json_string_value(j);
        if (s && !strncmp(s, "#version", 8))
            continue;
        if (r < 0 || (r = add_merge(l, j, rank++, &room, &regular)) < 0)
            return r;
    }
    if (!regular)
        l->p.pairs.len = l->p.known.len = 0;
    if (regular && !(l->p.h.flags & FLAG_AFFIX))
        l->p.h.flags |= FLAG_SCAN_MERGES;
    return r;
}

/* --- The model --- */

static int load_affixes(struct loader *l)
{
    const char *prefix = string_field(l->model, "continuing_subword_prefix");
    const char *suffix = string_field(l->model, "end_of_word_suffix");
    if (*prefix || *suffix)
        l->p.h.flags |= FLAG_AFFIX;
    if (strlen(prefix) > 64 || strlen(suffix) > 64)
        return bad(l, "continuing_subword_prefix or end_of_word_suffix is too long");
    return image_add_string(&l->p, prefix, strlen(prefix), &l->p.h.prefix) < 0 ||
                   image_add_string(&l->p, suffix, strlen(suffix), &l->p.h.suffix) < 0
               ? no_memory(l)
               : 0;
}

static int check_model(struct loader *l)
{
    const json_t *type = json_object_get(l->model, "type");
    const json_t *dropout = json_object_get(l->model, "dropout");
    if (!json_is_object(l->model))
        return bad(l, "there is no model");
    if (json_is_string(type) && strcmp(json_string_value(type), "BPE"))
        return error_set(l->err, ENOTSUP,
                         "tokenizer.json: model of type '%.60s' is not supported (only BPE)",
                         json_string_value(type));
    if (!json_is_object(l->vocab) || !json_is_array(json_object_get(l->model, "merges")))
        return bad(l, "a BPE model needs a vocab object and a merges list");
    if (json_is_number(dropout) && json_number_value(dropout) != 0)
        return error_set(l->err, ENOTSUP,
                         "tokenizer.json: dropout %g makes ids random; set it to null",
                         json_number_value(dropout));
    return 0;
}

static void model_flags(struct loader *l)
{
    static const struct {
        const char *name;
        enum image_flag flag;
    } flags[] = {{"fuse_unk", FLAG_FUSE_UNK},
                 {"byte_fallback", FLAG_BYTE_FALLBACK},
                 {"ignore_merges", FLAG_IGNORE_MERGES}};
    for (size_t i = 0; i < ARRAY_LEN(flags); i++)
        if (json_is_true(json_object_get(l->model, flags[i].name)))
            l->p.h.flags |= flags[i].flag;
    const struct image_comp *pre = (const void *)l->p.comps.data;
    uint32_t last = l->p.h.n_norm + l->p.h.n_pre;
    if (l->p.h.n_pre && pre[last - 1].kind == PRE_BYTE_LEVEL && !(l->p.h.flags & FLAG_AFFIX))
        l->p.h.flags |= FLAG_BYTES;
}

static int load_model(struct loader *l)
{
    memset(l->p.h.byte_token, 0xFF, sizeof l->p.h.byte_token);
    memset(l->p.h.byte_fallback, 0xFF, sizeof l->p.h.byte_fallback);
    int r = check_model(l);
    if (r >= 0)
        r = load_affixes(l);
    if (r < 0)
        return r;
    model_flags(l);
    r = check_ids(l);
    if (r < 0)
        return r;
    find_special_ids(l);
    return 0;
}

/* --- Added tokens --- */

static struct added *added_by_content(const struct loader *l, const char *s, size_t len)
{
    const json_t *v = json_object_getn(l->ids, s, len);
    return v ? &l->added[json_integer_value(v)] : NULL;
}

/*
 * The file's own ids are not used, as in the reference: a token of the model keeps the model's id,
 * others count on from the end of the vocabulary.
 */
static int assign_id(struct loader *l, struct added *a, int64_t *max_id)
{
    json_int_t size = (json_int_t)json_object_size(l->vocab);
    if (!model_id(l, a->content, a->len, &a->id)) {
        int64_t id = *max_id >= size || (size == 0 && *max_id >= 0) ? *max_id + 1 : size;
        if (id >= IMAGE_MAX_IDS)
            return bad(l, "too many added tokens");
        a->id = (uint32_t)id;
    }
    *max_id = MAX(*max_id, (int64_t)a->id);
    l->p.h.n_ids = MAX(l->p.h.n_ids, a->id + 1);
    return 0;
}

static bool flag(const json_t *j, const char *name)
{
    return json_is_true(json_object_get(j, name));
}

/* Reads the list; a content that comes twice keeps its place and takes the later flags. */
static int load_added(struct loader *l)
{
    const json_t *list = json_object_get(l->root, "added_tokens");
    int64_t max_id = -1;
    size_t i;
    json_t *j;
    l->ids = json_object();
    l->added = mem_alloc(json_array_size(list) + 1, sizeof *l->added);
    if (!l->added || !l->ids)
        return no_memory(l);
    json_array_foreach(list, i, j)
    {
        const json_t *content = json_object_get(j, "content");
        struct added a = {
            json_string_value(content), json_string_length(content), 0,
            flag(j, "single_word"),     flag(j, "lstrip"),           flag(j, "rstrip"),
            flag(j, "normalized"),      flag(j, "special")};
        if (!a.content)
            return bad(l, "an added token has no content");
        if (!a.len)
            continue;
        struct added *old = added_by_content(l, a.content, a.len);
        if (old) {
            a.id = old->id;
            a.special |= old->special;
            *old = a;
            continue;
        }
        int r = assign_id(l, &a, &max_id);
        if (r < 0)
            return r;
        if (json_object_setn_new(l->ids, a.content, a.len, json_integer((json_int_t)l->n_added)))
            return no_memory(l);
        l->added[l->n_added++] = a;
    }
    return 0;
}

static int write_added_texts(struct loader *l)
{
    for (size_t i = 0; i < l->n_added; i++) {
        const struct added *a = &l->added[i];
        int r =
            set_token(l, a->id, a->content, a->len, TOKEN_ADDED | (a->special ? TOKEN_SPECIAL : 0));
        if (r < 0)
            return r;
    }
    return 0;
}

struct pattern {
    struct image_added a;
    size_t order; /* special tokens before others, then as in the file */
    const char *s;
};

static int compare_patterns(const void *x, const void *y)
{
    const struct pattern *a = x, *b = y;
    size_t n = MIN(a->a.pattern.len, b->a.pattern.len);
    int r = memcmp(a->s, b->s, n);
    if (r)
        return r;
    if (a->a.pattern.len != b->a.pattern.len)
        return a->a.pattern.len < b->a.pattern.len ? -1 : 1;
    return a->order < b->order ? -1 : 1;
}

/* Sorts, drops what repeats an earlier pattern, appends to the section. */
static int write_patterns(struct loader *l, struct pattern *p, size_t n, uint32_t *ret_n)
{
    for (size_t i = 0; i < n; i++)
        p[i].s = l->p.strings.data + p[i].a.pattern.off;
    if (n)
        qsort(p, n, sizeof *p, compare_patterns);
    *ret_n = 0;
    for (size_t i = 0; i < n; i++) {
        struct image_str s = p[i].a.pattern;
        if (!s.len || (i && p[i - 1].a.pattern.len == s.len && !memcmp(p[i - 1].s, p[i].s, s.len)))
            continue;
        if (buffer_append(&l->p.added, &p[i].a, sizeof p[i].a) < 0)
            return no_memory(l);
        ++*ret_n;
    }
    return 0;
}

/* The pattern of one token: its text, in the set of normalized ones after the normalizers. */
static int make_pattern(struct loader *l, const struct tokenizer *normalizer, struct scratch *s,
                        const struct added *a, size_t order, struct pattern *ret)
{
    const char *text = a->content;
    size_t len = a->len;
    bool first = true;
    int r = normalizer ? normalize(normalizer, s, text, len, &text, &len, &first, l->err) : 0;
    if (r < 0)
        return r;
    *ret = (struct pattern){.a = {.id = a->id,
                                  .flags = (a->single_word ? ADDED_SINGLE_WORD : 0) |
                                           (a->lstrip ? ADDED_LSTRIP : 0) |
                                           (a->rstrip ? ADDED_RSTRIP : 0)},
                            .order = order + (a->special ? 0 : l->n_added)};
    return image_add_string(&l->p, text, len, &ret->a.pattern) < 0 ? no_memory(l) : 0;
}

static int pattern_set(struct loader *l, bool normalized, const struct tokenizer *normalizer,
                       uint32_t *ret_n)
{
    _cleanup_free_ struct pattern *p = mem_alloc(l->n_added + 1, sizeof *p);
    struct scratch *s = normalizer ? scratch_take(normalizer) : NULL;
    size_t n = 0;
    int r = 0;
    if (!p || (normalizer && !s))
        r = no_memory(l);
    for (size_t i = 0; i < l->n_added && r >= 0; i++)
        if (l->added[i].normalized == normalized)
            r = make_pattern(l, normalizer, s, &l->added[i], i, &p[n++]);
    if (s)
        scratch_give(normalizer, s);
    return r < 0 ? r : write_patterns(l, p, n, ret_n);
}

/* --- All of it --- */

static void free_image(void *image, size_t len)
{
    free(image);
}

static int build(struct loader *l, struct tokenizer **ret_tokenizer)
{
    _cleanup_free_ void *image = NULL;
    size_t len;
    int r = image_build(&l->p, &image, &len, l->err);
    if (r >= 0)
        r = tokenizer_map(image, len, ret_tokenizer, l->err);
    if (r < 0)
        return r;
    (*ret_tokenizer)->release = free_image;
    image = NULL;
    return 0;
}

/* Normalized patterns need the normalizers: those of a tokenizer that has only components yet. */
static int build_normalizer(struct loader *l, struct tokenizer **ret_normalizer)
{
    _cleanup_(loader_free) struct loader n = {.err = l->err, .root = l->root};
    n.vocab = n.model = NULL;
    int r = load_pipeline(&n.p, l->root, l->err);
    n.p.post.len = 0;
    n.p.h.n_ids = 0;
    memset(n.p.h.byte_token, 0xFF, sizeof n.p.h.byte_token);
    memset(n.p.h.byte_fallback, 0xFF, sizeof n.p.h.byte_fallback);
    n.p.h.unk_id = NO_ID;
    if (r >= 0)
        r = hash_vocab(&n);
    if (r >= 0)
        r = make_merge_table(&n, 0);
    return r < 0 ? r : build(&n, ret_normalizer);
}

static int load_patterns(struct loader *l)
{
    _cleanup_(tokenizer_freep) struct tokenizer *normalizer = NULL;
    uint32_t n;
    bool any = false;
    int r = 0;
    for (size_t i = 0; i < l->n_added; i++)
        any |= l->added[i].normalized;
    if (any && l->p.h.n_norm)
        r = build_normalizer(l, &normalizer);
    if (r >= 0)
        r = pattern_set(l, false, NULL, &l->p.h.n_added_raw);
    return r < 0 ? r : pattern_set(l, true, normalizer, &n);
}

/* --- tokenizer_config.json --- */

static const char *config_token(const json_t *config, const char *name)
{
    const json_t *v = json_object_get(config, name);
    return json_string_value(json_is_object(v) ? json_object_get(v, "content") : v);
}

static int config_post_id(struct loader *l, const json_t *config, const char *which, bool otherwise)
{
    char key[32];
    snprintf(key, sizeof key, "add_%s_token", which);
    const json_t *v = json_object_get(config, key);
    if (!(json_is_boolean(v) ? json_is_true(v) : otherwise))
        return 0;
    snprintf(key, sizeof key, "%s_token", which);
    const char *token = config_token(config, key);
    uint32_t id;
    if (!token)
        return 0;
    const struct added *a = added_by_content(l, token, strlen(token));
    if (a)
        id = a->id;
    else if (!model_id(l, token, strlen(token), &id))
        return error_set(l->err, EBADMSG, "tokenizer_config.json: %s '%.60s' is not a token", key,
                         token);
    return load_post_id(&l->p, POST_ID, id);
}

/* Classes whose loader replaces the post-processor by [bos] A [eos], whatever the file says. */
static int load_config(struct loader *l, const json_t *config)
{
    static const char *const classes[] = {"Llama", "CodeLlama", "Gemma", "Cohere"};
    const char *class = string_field(config, "tokenizer_class");
    bool ours = false;
    for (size_t i = 0; i < ARRAY_LEN(classes); i++) {
        size_t n = strlen(classes[i]);
        ours |= !strncmp(class, classes[i], n) &&
                (!strcmp(class + n, "Tokenizer") || !strcmp(class + n, "TokenizerFast"));
    }
    if (!ours)
        return 0;
    l->p.post.len = 0;
    int r = config_post_id(l, config, "bos", true);
    if (r >= 0)
        r = load_post_id(&l->p, POST_SEQUENCE, 0);
    if (r >= 0)
        r = config_post_id(l, config, "eos", false);
    return r < 0 ? r : load_post_id(&l->p, POST_END, 0);
}

static int load_root(struct loader *l, const json_t *config, struct tokenizer **ret_tokenizer)
{
    if (!json_is_object(l->root))
        return bad(l, "not a JSON object");
    l->model = json_object_get(l->root, "model");
    l->vocab = json_object_get(l->model, "vocab");
    int r = load_pipeline(&l->p, l->root, l->err);
    if (r >= 0)
        r = load_model(l);
    if (r >= 0)
        r = load_added(l);
    if (r >= 0 && config)
        r = load_config(l, config);
    if (r >= 0)
        r = make_tokens(l);
    if (r >= 0)
        r = load_vocab(l);
    if (r >= 0)
        r = load_merges(l);
    if (r >= 0)
        r = write_added_texts(l);
    if (r >= 0)
        r = load_patterns(l);
    return r < 0 ? r : build(l, ret_tokenizer);
}

static int parse(const char *text, size_t len, const char *file, size_t flags, json_t **ret,
                 struct error *err)
{
    json_error_t e;
    *ret = json_loadb(text, len, JSON_ALLOW_NUL | flags, &e);
    return *ret ? 0 : error_set(err, EBADMSG, "%s: line %d: %s", file, e.line, e.text);
}

int tokenizer_load_text(const char *json, size_t len, const char *config, size_t config_len,
                        struct tokenizer **ret_tokenizer, struct error *err)
{
    json_auto_t *root = NULL, *conf = NULL;
    _cleanup_(loader_free) struct loader l = {.err = err};
    int r = parse(json, len, "tokenizer.json", 0, &root, err);
    /* model_max_length is often 10^30, which is no integer for the parser. */
    if (r >= 0 && config)
        r = parse(config, config_len, "tokenizer_config.json", JSON_DECODE_INT_AS_REAL, &conf, err);
    l.root = root;
    return r < 0 ? r : load_root(&l, conf, ret_tokenizer);
}

void tokenizer_files_free(struct tokenizer_files *files)
{
    buffer_free(&files->json);
    buffer_free(&files->config);
}

int tokenizer_read(const char *path, bool config_only, struct tokenizer_files *ret_files,
                   struct error *err)
{
    _cleanup_(tokenizer_files_free) struct tokenizer_files files = {0};
    _cleanup_free_ char *file = NULL, *config = NULL;
    struct stat st;
    bool dir = !stat(path, &st) && S_ISDIR(st.st_mode);
    file = dir ? x_printf("%s/tokenizer.json", path) : x_strdup(path);
    config = dir ? x_printf("%s/tokenizer_config.json", path) : NULL;
    int r = config_only ? 0 : read_json_file(file, FILE_MAX, &files.json, err);
    if (r >= 0 && dir && !stat(config, &st))
        r = read_json_file(config, CONFIG_MAX, &files.config, err);
    if (r < 0)
        return r;
    *ret_files = files;
    files = (struct tokenizer_files){0};
    return 0;
}

int tokenizer_load(const char *path, struct tokenizer **ret_tokenizer, struct error *err)
{
    _cleanup_(tokenizer_files_free) struct tokenizer_files files = {0};
    int r = tokenizer_read(path, false, &files, err);
    if (r < 0)
        return r;
    r = tokenizer_load_text(files.json.data, files.json.len, files.config.data, files.config.len,
                            ret_tokenizer, err);
    return r < 0 ? error_prefix(err, "%s", path) : 0;
}
