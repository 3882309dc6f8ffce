/* SPDX-License-Identifier: Apache-2.0 */
/* Shapes of well-known models, for measuring without a download: numbers of their published
 * config.json. */
#ifndef EMBER_CLI_SHAPES_H
#define EMBER_CLI_SHAPES_H

#include <stdint.h>

#include "base/error.h"

/* Names of the shapes as a text: "qwen3-0.6b, qwen3-1.7b, ..."; the caller frees it. */
char *shape_names(void);

/* The config.json of a shape (the caller frees it); NULL when there is none of that name. */
char *shape_config(const char *name);

/*
 * A checkpoint of the shape in `dir`, written there unless it is there already: DIR/NAME, or cut to
 * its first `layers` (0: all) DIR/NAME-LAYERS. `progress` is told bytes; returns the folder's path
 * (the caller frees it).
 */
int shape_checkpoint(const char *dir, const char *name, uint32_t layers,
                     int (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx,
                     char **ret_path, struct error *err);

#endif
