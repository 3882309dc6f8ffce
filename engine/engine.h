/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine: one model, attached and ready to run steps, in this process.
 *
 * engine_open goes from resident weights (two descriptors) to READY: it attaches the weights,
 * restores the captured graph of the first bucket from the cache (or captures it), resolves the
 * kernels that the graph launches (specialised builds from the cache, or compiled now, or
 * ahead-of-time), and proves all of it with the canary. The other buckets follow in the background,
 * largest first: a thread restores or captures them, and engine_adopt, called between steps, makes
 * them usable.
 *
 * Nothing here knows sequences beyond a step: KV pages are named by the caller. One thread calls.
 *
 * Early: an engine can be opened while its weights are still being read. It is open when
 * everything but the weights is there; the canary is outstanding. The first step runs layer by
 * layer as they arrive, and its result is given out only when all weights are there and sealed and
 * the canary has passed, so nothing unproved ever leaves the engine. When the load fails, or the
 * proof, the engine is broken (engine_broken): every call fails and it can only be freed.
 *
 * The canary: a fixed input of CANARY_TOKENS tokens runs through the segments embed, one layer of
 * each variant and the head's probe, on a KV page of its own. The digest of the final-normed row
 * and the probe's logits is the same for every bucket, since results do not depend on buckets; it
 * is recorded in the cache per (weights, device) by the first instance and compared by every later
 * one.
 */
#ifndef EMBER_ENGINE_ENGINE_H
#define EMBER_ENGINE_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/mem.h"
#include "cache/cache.h"
#include "model/model.h"

struct engine;

struct engine_options {
    const char *backend;   /* "cpu" or the path of a plug-in; NULL: "cpu" */
    const char *isa;       /* CPU: force a variant; NULL: the best */
    uint32_t threads;      /* 0: what the machine allows */
    uint32_t pin, place;   /* as in struct ember_device_options: enum ember_pin, which instance */
    struct cache *cache;   /* borrowed; NULL: nothing is cached */
    bool compile;          /* build specialised kernels that the cache lacks */
    int weights, manifest; /* borrowed descriptors: sealed memfds as engine/load.h makes them */
    /*
     * The weights are still being read: the descriptors are those of load_options.attachable, and
     * `filling` is the third of them, borrowed. See "Early" above.
     */
    bool early;
    int filling;
    enum kv_kind kv;   /* what K and V are kept in */
    uint64_t kv_bytes; /* KV memory; 0: of up to 8,192 tokens or 512 MiB, at least 64 tokens */
    /* > 0: also a bucket of that many tokens with all logits and hidden states. */
    uint32_t tap_tokens;
};

/* Artefacts that the cache did not have, by the cause; `why` is that of the first. */
struct engine_miss {
    enum cache_kind kind;
    struct cache_miss why;
    uint32_t n;
};
#define ENGINE_MISSES_MAX 12 /* the last one takes what is beyond */

/* What a start took, in milliseconds, and what it found. */
struct engine_start {
    double attach_ms, graphs_ms, kernels_ms, canary_ms;
    double compile_ms, capture_ms, restore_ms; /* parts of kernels_ms and graphs_ms */
    uint32_t kernels_compiled, kernels_cached, kernels_plain; /* plain: ahead-of-time */
    uint32_t graphs_captured, graphs_restored;
    struct engine_miss misses[ENGINE_MISSES_MAX];
    size_t n_misses;
    char notice[256]; /* something the operator should hear once, or empty */
};

struct engine_limits {
    uint32_t pages;      /* KV pages 0..pages-1 are the caller's */
    uint32_t max_tokens; /* of one step, now: grows as buckets are adopted */
    uint32_t max_seqs;
    uint64_t bytes; /* KV, scratch and I/O memory reserved by this engine */
};

/* A sequence's part of a step: n_tokens tokens at position, position + 1, ... */
struct engine_seq {
    const uint32_t *tokens;
    uint32_t n_tokens, position, prompt_len;
    const uint32_t *pages; /* all its pages, covering position + n_tokens */
    uint32_t n_pages;
    bool sample; /* the last token's logits are wanted */
};

struct engine_step {
    const struct engine_seq *seqs;
    uint32_t n_seqs;
    bool logits; /* copy the logits out, not only their argmax */
    bool taps;   /* use the tap bucket: logits of every token, hidden states */
};

/* Valid until the next call on the engine. */
struct engine_result {
    /* Rows with logits: sequences with `sample`, in order; every token with taps. */
    uint32_t n_rows;
    const int32_t *greedy; /* [n_rows] argmax */
    const float *logits;   /* [n_rows, vocab] when asked for, else NULL */
    const float *hidden;   /* [n_layers + 1, tap_tokens, hidden_size] with taps, else NULL */
    double compute_ms;
};

/*
 * Errors: -EBADMSG (the manifest or the canary), -ENOMEM, -EINVAL (kv_bytes below one page),
 * -ENOTSUP (an op or option that the backend lacks), -ESTALE or -EINVAL (the plug-in), or the
 * system's. Kernels that cannot be compiled and a cache that fails are no errors: they cost time.
 */
int engine_open(const struct engine_options *options, struct engine **ret, struct error *err);
void engine_free(struct engine *engine);
DEFINE_CLEANUP(struct engine *, engine_free)

/* What its start took so far; buckets that are adopted later add to it. */
const struct engine_start *engine_started(const struct engine *engine);
const struct model_info *engine_model(const struct engine *engine);
/* True while the weights of an early engine are not all there and proved. */
bool engine_early(const struct engine *engine);
/* Why no step can be run any more, or NULL. */
const struct error *engine_broken(const struct engine *engine);
/* The checkpoint's folder, where its tokenizer is. */
const char *engine_source_dir(const struct engine *engine);
struct engine_limits engine_limits(const struct engine *engine);

/*
 * Runs one step. Everything in it is checked first: -EINVAL (a token beyond the vocabulary, a page
 * beyond `pages`, too few pages, a position beyond max_positions), -E2BIG (more tokens or sequences
 * than the limits). A refused step has changed nothing.
 */
int engine_step(struct engine *engine, const struct engine_step *step, struct engine_result *ret,
                struct error *err);

/* Starts the background thread that brings the other buckets; at most once. */
int engine_background(struct engine *engine, struct error *err);
/* An eventfd that becomes readable when a bucket is ready to adopt, -1 without background. */
int engine_background_fd(const struct engine *engine);
/*
 * Proves an early engine whose weights have arrived, or adopts at most one bucket: instantiate
 * (tens of microseconds) and canary. `waiting` (may be NULL) is asked between the canary's segments
 * whether somebody waits for the engine: then the bucket stays for a later call. 1: there may be
 * more, 0: nothing to do; a bucket that fails its proof is dropped and reported as a negative
 * errno, the engine serves on.
 */
int engine_adopt(struct engine *engine, bool (*waiting)(void *ctx), void *ctx, struct error *err);
/* True when every bucket has been adopted, or dropped and reported. */
bool engine_settled(const struct engine *engine);

/* ---- measuring ---- */

/* One kernel's part of the steps that ran since engine_profile. */
struct engine_profile_row {
    char kernel[32];
    uint64_t launches, ns; /* from the start of a launch's first block to the end of its last */
};
#define ENGINE_PROFILE_MAX 64

/* Keeps times of all launches of the buckets that are ready from now on, from zero. -ENOTSUP: the
 * backend has none. */
int engine_profile(struct engine *engine, struct error *err);
/* Ends that; rows by falling time, at most ENGINE_PROFILE_MAX; returns how many. */
uint32_t engine_profile_end(struct engine *engine, struct engine_profile_row *rows);

/* Writes small numbers all over the KV pages: memory never written takes no bandwidth to read. */
int engine_fill_kv(struct engine *engine, struct error *err);

#endif
