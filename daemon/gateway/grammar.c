/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/grammar.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/queue.h>

#include "base/digest.h"
#include "model/grammar/grammar.h"

#define ENTRIES_MAX 4096

struct entry {
    TAILQ_ENTRY(entry) link; /* the one asked for last is in front */
    struct digest digest;
    struct compiled *compiled;
};

struct grammar_cache {
    pthread_mutex_t lock;
    TAILQ_HEAD(entries, entry) entries;
    size_t limit, bytes, n;
    uint64_t next_id;
};

struct compiled *compiled_ref(struct compiled *c)
{
    atomic_fetch_add(&c->refs, 1);
    return c;
}

void compiled_unref(struct compiled *c)
{
    if (!c || atomic_fetch_sub(&c->refs, 1) != 1)
        return;
    free(c->program);
    free(c);
}

struct grammar_cache *grammar_cache_new(size_t limit)
{
    struct grammar_cache *cache = x_alloc(sizeof *cache);

    cache->limit = limit;
    pthread_mutex_init(&cache->lock, NULL);
    TAILQ_INIT(&cache->entries);
    return cache;
}

static void drop(struct grammar_cache *cache, struct entry *e)
{
    TAILQ_REMOVE(&cache->entries, e, link);
    cache->bytes -= e->compiled->len;
    cache->n--;
    compiled_unref(e->compiled);
    free(e);
}

void grammar_cache_free(struct grammar_cache *cache)
{
    if (!cache)
        return;
    while (!TAILQ_EMPTY(&cache->entries))
        drop(cache, TAILQ_FIRST(&cache->entries));
    pthread_mutex_destroy(&cache->lock);
    free(cache);
}

static struct compiled *look_up(struct grammar_cache *cache, const struct digest *digest)
{
    struct compiled *found = NULL;
    struct entry *e;

    pthread_mutex_lock(&cache->lock);
    TAILQ_FOREACH(e, &cache->entries, link)
    if (digest_equal(&e->digest, digest))
        break;
    if (e) {
        TAILQ_REMOVE(&cache->entries, e, link);
        TAILQ_INSERT_HEAD(&cache->entries, e, link);
        found = compiled_ref(e->compiled);
    }
    pthread_mutex_unlock(&cache->lock);
    return found;
}

/* Two workers may have made the same: the second one's is kept beside the first until it is old. */
static struct compiled *keep(struct grammar_cache *cache, const struct digest *digest,
                             struct buffer *program)
{
    struct compiled *c = x_alloc(sizeof *c);
    struct entry *e = x_alloc(sizeof *e);

    *c = (struct compiled){
        .refs = 2, .len = program->len, .program = (uint8_t *)TAKE(program->data)};
    *e = (struct entry){.digest = *digest, .compiled = c};
    pthread_mutex_lock(&cache->lock);
    c->id = ++cache->next_id;
    TAILQ_INSERT_HEAD(&cache->entries, e, link);
    cache->bytes += c->len;
    cache->n++;
    while (cache->bytes > cache->limit || cache->n > ENTRIES_MAX)
        drop(cache, TAILQ_LAST(&cache->entries, entries));
    pthread_mutex_unlock(&cache->lock);
    return c;
}

/* ---- compiling ---- */

static int from_choice(const json_t *spec, struct buffer *out, struct error *err)
{
    size_t n = json_array_size(spec), i;
    _cleanup_free_ const char **texts = mem_alloc(n + 1, sizeof *texts);
    _cleanup_free_ size_t *lens = mem_alloc(n + 1, sizeof *lens);
    json_t *v;

    if (!texts || !lens)
        return error_set(err, ENOMEM, "no memory for %zu choices", n);
    json_array_foreach(spec, i, v)
    {
        if (!json_is_string(v))
            return error_set(err, EINVAL, "choice %zu is no string", i);
        texts[i] = json_string_value(v);
        lens[i] = json_string_length(v);
    }
    return grammar_from_choice(texts, lens, n, out, err);
}

static int compile(const struct api_grammar *g, struct buffer *out, struct error *err)
{
    struct grammar_json_options options = {
        .whitespace = g->whitespace, .compact = g->compact, .or_begins = g->or_begins};

    switch (g->kind) {
    case API_GRAMMAR_SCHEMA:
        return grammar_from_schema(g->spec, &options, out, err);
    case API_GRAMMAR_OBJECT:
        return grammar_from_json_object(&options, out, err);
    case API_GRAMMAR_REGEX:
        return grammar_from_regex(json_string_value(g->spec), json_string_length(g->spec), out,
                                  err);
    case API_GRAMMAR_RULES:
        return grammar_from_rules(json_string_value(g->spec), json_string_length(g->spec), out,
                                  err);
    case API_GRAMMAR_CHOICE:
        return from_choice(g->spec, out, err);
    case API_GRAMMAR_NONE:
        break;
    }
    return error_set(err, EINVAL, "no grammar");
}

/* What is asked for, as one digest: the order of properties matters. */
static bool digest_of_request(const struct api_grammar *g, struct digest *ret)
{
    char *text = g->spec ? json_dumps(g->spec, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;

    if ((g->spec && !text) || (text && strlen(text) > GRAMMAR_SOURCE_MAX)) {
        free(text);
        return false;
    }
    struct digest_state *state = digest_begin();
    digest_update(state, &g->kind, sizeof g->kind);
    digest_update(state, &g->compact, sizeof g->compact);
    digest_update_string(state, g->whitespace);
    digest_update_string(state, g->or_begins);
    digest_update_string(state, text);
    *ret = digest_end(state);
    free(text);
    return true;
}

struct compiled *grammar_known(struct grammar_cache *cache, const struct api_request *request)
{
    struct digest digest;

    return digest_of_request(&request->grammar, &digest) ? look_up(cache, &digest) : NULL;
}

int grammar_of_request(struct grammar_cache *cache, const struct api_request *request,
                       struct compiled **ret, struct api_error *fail)
{
    const struct api_grammar *g = &request->grammar;
    _cleanup_(buffer_free) struct buffer program = {0};
    struct error err = {0};
    struct digest digest;
    int r = 0;

    *ret = NULL;
    if (g->kind == API_GRAMMAR_NONE)
        return 0;
    if (!digest_of_request(g, &digest))
        r = error_set(&err, E2BIG, "more than %u bytes", GRAMMAR_SOURCE_MAX);
    else if ((*ret = look_up(cache, &digest)))
        return 0;
    if (r == 0)
        r = compile(g, &program, &err);
    if (r == 0) {
        *ret = keep(cache, &digest, &program);
        return 0;
    }
    fail->status = r == -ENOMEM ? 503 : 400;
    snprintf(fail->param, sizeof fail->param, "%s", g->field);
    error_set(&fail->err, EINVAL, "%s: %s", g->field, error_text(&err));
    return -EINVAL;
}
