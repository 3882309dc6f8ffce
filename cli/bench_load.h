/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench load: what getting a model's parts ready takes, against doing it without our caches. Each
 * part is a section: a function that adds its object to a model's row and, when people read it,
 * prints its lines.
 */
#ifndef EMBER_CLI_BENCH_LOAD_H
#define EMBER_CLI_BENCH_LOAD_H

#include <jansson.h>

#include "base/error.h"
#include "base/verbs.h"

/* A section of one path. `cache_dir` is a private cache for this run, not open. -ENOENT: the path
 * has no such part, which is no failure. */
typedef int (*bench_load_section)(const struct verb_call *call, const char *path,
                                  const char *cache_dir, json_t *row, struct error *err);

int bench_load_tokenizer(const struct verb_call *call, const char *path, const char *cache_dir,
                         json_t *row, struct error *err); /* bench_load_tokenizer.c */

int bench_load_weights(const struct verb_call *call, const char *path, const char *cache_dir,
                       json_t *row, struct error *err); /* bench_load_weights.c */

#endif
