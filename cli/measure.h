/* SPDX-License-Identifier: Apache-2.0 */
/* Measured starts, against a daemon that is given: what `demo` and `bench spawn` are made of. */
#ifndef EMBER_CLI_MEASURE_H
#define EMBER_CLI_MEASURE_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "cli/control.h"
#include "cli/lab.h"
#include "model/tokenizer/tokenizer.h"

/* Tokens and not text: a gateway has its tokenizer loaded before an instance is asked for. */
struct prompt {
    const uint32_t *ids;
    size_t n_ids;
    uint32_t new_tokens;
    const struct tokenizer *tokenizer; /* gives the text of what came; may be NULL */
};

/* One start: spawn to first token, and the text that came. */
struct start {
    double spawn_ms;       /* SpawnInstance, as the caller sees it */
    double first_token_ms; /* from the call of SpawnInstance to the first token in hand */
    double since_exec_ms;  /* from emberd's exec to the first token; 0 when not asked for */
    json_t *phases;        /* {"exec": ms, ...} of the spawn */
    json_t *ids;           /* tokens that came */
    char text[512];
};
void start_free(struct start *start);

/* Spawns on the default model, generates, gives the instance back (or stops it). exec_ns 0: not
 * since an exec. */
int measure_start(const char *socket, const struct prompt *prompt, uint64_t exec_ns, bool keep_warm,
                  struct start *ret, struct error *err);

/* `n` of them at once, each on its own connection. *ret_all_ms: call to the last READY. Fills
 * starts[n]. */
int measure_burst(const char *socket, const struct prompt *prompt, size_t n, struct start *starts,
                  double *ret_all_ms, struct error *err);

/* Spawn and give back, n times, without generating: milliseconds of each SpawnInstance. */
int measure_spawns(const char *socket, size_t n, bool keep_warm, unsigned standby, double *ret_ms,
                   struct error *err);

/* The q-quantile (0..1) of n values; sorts them. */
double quantile(double *values, size_t n, double q);

/* Bytes a second of memcpy between buffers beyond the caches, by `threads` threads: best of three.
 */
double copy_bandwidth(unsigned threads);

/*
 * Bytes a second from a file in the page cache into new memory of a memfd by plain read and write
 * with `threads` threads: what a load is bounded by where the kernel hands memory out in small
 * pages. 0: cannot be read.
 */
double page_cache_bandwidth(const char *path, unsigned threads);

#endif
