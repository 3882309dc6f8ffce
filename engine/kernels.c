/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Resolving the kernels that graphs launch: a specialised build from the cache, else compiled now,
 * else the ahead-of-time kernel, which always exists and gives the same bits. No compiler, a
 * failing compiler or a blob that does not load cost speed, never a start: the first reason is kept
 * as the notice.
 */
#include "engine/engine_private.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "kernels/backend.h"

struct compile {
    const struct engine *engine;
    const struct ember_kernel_source *source;
    const struct cache_key *key;
    struct cache_miss miss;
};

static int compile(void *ctx, struct buffer *out, struct error *err)
{
    struct compile *c = ctx;
    struct ember_backend_error e = {0};
    _cleanup_free_ void *blob = NULL;
    size_t len = 0;

    if (c->engine->options.cache) /* now, before the build is stored */
        cache_explain_miss(c->engine->options.cache, c->key, &c->miss);
    int r = c->engine->backend->kernel_compile(c->engine->device, c->source, &blob, &len, &e);
    if (r < 0)
        return backend_fail(c->engine->backend, r, &e, err);
    if (buffer_append(out, blob, len) < 0)
        return error_set(err, ENOMEM, "no memory for a kernel of %zu bytes", len);
    return 0;
}

static int refuse_to_build(void *ctx, struct buffer *out, struct error *err)
{
    return error_set(err, ENOTSUP, "compiling is switched off");
}

static struct cache_key *kernel_key(const struct engine *engine, const struct graph_kernel *kernel,
                                    const struct ember_kernel_source *source)
{
    char subject[CACHE_SUBJECT_MAX];
    struct digest text = digest_of(source->text, source->text_len);

    snprintf(subject, sizeof subject, "%s %s", kernel->name, kernel->spec);
    struct cache_key *key = cache_key_begin(CACHE_KERNEL, subject);
    cache_key_add_string(key, "kernel", kernel->name);
    cache_key_add(key, "source", text.bytes, sizeof text.bytes);
    cache_key_add_string(key, "options", source->options);
    cache_key_add_string(key, "compiler", source->compiler);
    cache_key_add_string(key, "backend", engine->backend->name);
    return key;
}

static int load_module(struct engine *engine, const struct cache_value *blob, struct resolved *ret,
                       struct error *err)
{
    const struct ember_backend *backend = engine->backend;
    struct ember_backend_error e = {0};

    int r = backend->module_load(engine->device, blob->data, blob->len, &ret->module, &e);
    if (r < 0)
        return backend_fail(backend, r, &e, err);
    r = backend->module_find(ret->module, ret->kernel.name, &ret->entry, &e);
    if (r < 0) {
        backend->module_free(ret->module);
        ret->module = NULL;
        return backend_fail(backend, r, &e, err);
    }
    return 0;
}

/* 0: ret holds a specialised build. Negative: there is none to be had. */
static int specialise(struct engine *engine, struct resolved *ret, struct error *err)
{
    const struct ember_backend *backend = engine->backend;
    struct ember_backend_error e = {0};
    struct ember_kernel_source source = {0};

    if (!backend->kernel_source || !backend->kernel_compile || !backend->module_load ||
        !backend->module_find || !backend->module_free)
        return error_set(err, ENOTSUP, "the %s backend has no specialised kernels", backend->name);
    int r = backend->kernel_source(engine->device, ret->kernel.name, ret->kernel.spec, &source, &e);
    if (r < 0)
        return backend_fail(backend, r, &e, err);
    _cleanup_(cache_key_freep) struct cache_key *key = kernel_key(engine, &ret->kernel, &source);
    struct compile ctx = {engine, &source, key, {""}};
    struct cache_build build = {.build = engine->options.compile ? compile : refuse_to_build,
                                .ctx = &ctx,
                                .timeout_ms = 30000};
    _cleanup_cache_value_ struct cache_value blob = {0};
    uint64_t start = clock_ns();
    r = cache_get_or_build(engine->options.cache, key, &build, &blob, err);
    if (r < 0)
        return r;
    bool built = r > 0;
    if (built) {
        engine->start.compile_ms += clock_ms_since(start);
        engine_note_miss(engine, CACHE_KERNEL, &ctx.miss);
    }
    r = load_module(engine, &blob, ret, err);
    if (r == 0)
        *(built ? &engine->start.kernels_compiled : &engine->start.kernels_cached) += 1;
    return r;
}

static int resolve(struct engine *engine, struct resolved *ret, struct error *err)
{
    struct ember_backend_error e = {0};
    struct error why = {0};

    if (ret->kernel.spec[0]) {
        if (specialise(engine, ret, &why) == 0)
            return 0;
        if (engine->options.compile && why.code != -ENOTSUP && !engine->start.notice[0])
            snprintf(engine->start.notice, sizeof engine->start.notice,
                     "ahead-of-time kernels are used: %s", why.text);
    }
    int r = engine->backend->kernel_find(engine->device, ret->kernel.name, &ret->entry, &e);
    if (r < 0)
        return backend_fail(engine->backend, r, &e, err);
    engine->start.kernels_plain++;
    return 0;
}

int kernels_resolve(struct engine *engine, const struct graph *graph, struct ember_kernel **ret,
                    struct error *err)
{
    for (uint32_t i = 0; i < graph_kernel_count(graph); i++) {
        const struct graph_kernel *want = graph_kernel_at(graph, i);
        struct resolved *found = NULL;
        for (uint32_t j = 0; j < engine->n_kernels && !found; j++)
            if (!strcmp(engine->kernels[j].kernel.name, want->name) &&
                !strcmp(engine->kernels[j].kernel.spec, want->spec))
                found = &engine->kernels[j];
        if (!found) {
            if (engine->n_kernels == ENGINE_KERNELS_MAX)
                return error_set(err, ENOTSUP, "a graph launches more than %d different kernels",
                                 ENGINE_KERNELS_MAX);
            found = &engine->kernels[engine->n_kernels];
            *found = (struct resolved){.kernel = *want};
            int r = resolve(engine, found, err);
            if (r < 0)
                return r;
            engine->n_kernels++;
        }
        ret[i] = found->entry;
    }
    return 0;
}

void kernels_free(struct engine *engine)
{
    for (uint32_t i = 0; i < engine->n_kernels; i++)
        if (engine->kernels[i].module)
            engine->backend->module_free(engine->kernels[i].module);
    engine->n_kernels = 0;
}
