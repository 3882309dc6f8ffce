/* SPDX-License-Identifier: Apache-2.0 */
/* Why a key misses: the factors in which the nearest stored entry differs. */
#include <errno.h>
#include <stdio.h>

#include "cache/internal.h"

#define EXPLAIN_ENTRIES 256 /* looked at per subject */

struct search {
    const struct cache_key *key;
    unsigned seen, best; /* differing factors of the best so far */
    uint64_t best_created;
    struct buffer factors; /* of the best so far */
    bool exact, damaged;
};

static bool find_factor(const void *factors, size_t len, const char *name, struct cache_factor *ret)
{
    size_t pos = 0;

    while (cache_factor_next(factors, len, &pos, ret))
        if (!strcmp(ret->name, name))
            return true;
    return false;
}

static bool same_value(const struct cache_factor *a, const struct cache_factor *b)
{
    return a->full_len == b->full_len && a->is_digest == b->is_digest &&
           !memcmp(a->value, b->value, a->value_len);
}

/* Says the differences (text may be NULL) and counts them: changed, then new, then gone. */
static unsigned differences(const struct cache_key *key, const void *stored, size_t stored_len,
                            struct buffer *text)
{
    struct cache_factor now, then;
    unsigned n = 0;

    for (size_t pos = 0; cache_factor_next(key->factors.data, key->factors.len, &pos, &now);) {
        bool known = find_factor(stored, stored_len, now.name, &then);
        if (known && same_value(&now, &then))
            continue;
        n++;
        if (text && known)
            buffer_printf(text, "%s'%s' is %s, stored was %s", n > 1 ? "; " : "", now.name,
                          now.text, then.text);
        else if (text)
            buffer_printf(text, "%s'%s' (%s) is new", n > 1 ? "; " : "", now.name, now.text);
    }
    for (size_t pos = 0; cache_factor_next(stored, stored_len, &pos, &then);) {
        if (find_factor(key->factors.data, key->factors.len, then.name, &now))
            continue;
        n++;
        if (text)
            buffer_printf(text, "%s'%s' (%s) is no more", n > 1 ? "; " : "", then.name, then.text);
    }
    return n;
}

static int consider(void *ctx, const struct store_entry *entry, const void *bytes, size_t len)
{
    struct search *s = ctx;
    struct record record;

    if (++s->seen > EXPLAIN_ENTRIES)
        return 1;
    s->exact |= digest_equal(&entry->key, &s->key->digest);
    if (record_parse(bytes, len, &record, NULL) < 0) {
        s->damaged = true;
        return 0;
    }
    unsigned n = differences(s->key, record.factors, record.factors_len, NULL);
    if (s->best_created && (n > s->best || (n == s->best && record.created_ns <= s->best_created)))
        return 0;
    s->best = n;
    s->best_created = MAX(record.created_ns, 1u);
    s->factors.len = 0;
    return buffer_append(&s->factors, record.factors, record.factors_len) < 0 ? -ENOMEM : 0;
}

static void conclude(struct search *s, struct buffer *text)
{
    char label[RECORD_LABEL_MAX];

    record_label(s->key->kind, s->key->subject, strlen(s->key->subject), label);
    buffer_printf(text, "%s: ", label);
    if (s->exact)
        buffer_printf(text, "is stored; a miss would mean that its value is damaged");
    else if (!s->best_created)
        buffer_printf(text, "%s",
                      s->damaged ? "only damaged entries are stored for it" : "never stored here");
    else if (!differences(s->key, s->factors.data, s->factors.len, text))
        buffer_printf(text, "the same factors are stored in another order");
}

/* Looks for the nearest entry; the caller frees search->factors. */
static int look(struct cache *cache, const struct cache_key *key, struct search *search,
                struct error *err)
{
    _cleanup_(store_read_endp) struct store_read *read = NULL;
    int r = cache_check_process(cache, err);

    search->key = key;
    if (!r)
        r = store_read_begin(cache->store, &read, err);
    if (!r)
        r = store_scan_subject(read, key->kind, checksum_of(key->subject, strlen(key->subject)),
                               consider, search, err);
    return r;
}

/* The name of the one factor that differs. */
static void name_difference(const struct search *s, char ret[CACHE_CAUSE_MAX])
{
    struct cache_factor now, then;
    const struct buffer *key = &s->key->factors;

    for (size_t pos = 0; cache_factor_next(key->data, key->len, &pos, &now);) {
        if (find_factor(s->factors.data, s->factors.len, now.name, &then) &&
            same_value(&now, &then))
            continue;
        snprintf(ret, CACHE_CAUSE_MAX, "%s", now.name);
        return;
    }
    for (size_t pos = 0; cache_factor_next(s->factors.data, s->factors.len, &pos, &then);)
        if (!find_factor(key->data, key->len, then.name, &now))
            snprintf(ret, CACHE_CAUSE_MAX, "%s", then.name);
}

static void name_cause(const struct search *s, char ret[CACHE_CAUSE_MAX])
{
    if (s->exact || (!s->best_created && s->damaged))
        snprintf(ret, CACHE_CAUSE_MAX, "damaged");
    else if (!s->best_created)
        snprintf(ret, CACHE_CAUSE_MAX, "absent");
    else if (s->best != 1)
        snprintf(ret, CACHE_CAUSE_MAX, "several");
    else
        name_difference(s, ret);
}

void cache_explain_miss(struct cache *cache, const struct cache_key *key, struct cache_miss *ret)
{
    struct search search = {0};
    struct buffer text = {0};
    struct error err = {0};

    *ret = (struct cache_miss){.cause = "unknown"};
    if (look(cache, key, &search, &err) < 0) {
        snprintf(ret->text, sizeof ret->text, "cannot tell why: %s", error_text(&err));
    } else {
        name_cause(&search, ret->cause);
        conclude(&search, &text);
        snprintf(ret->text, sizeof ret->text, "%s", text.data ? text.data : "");
    }
    buffer_free(&text);
    buffer_free(&search.factors);
}
