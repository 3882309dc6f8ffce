/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.json as a checked bag of values.
 *
 * A getter names a key, or several spellings "a|b" of which the first that is there and not null
 * counts, the range that is sane and a fallback. Errors stick: the first is kept (config_error),
 * getters go on returning the fallback, so that a reader of twenty keys checks once.
 *
 * A multimodal wrapper keeps its language model's values in text_config or llm_config: getters look
 * there first and in the outer object only for what both may say (token ids, tie_word_embeddings).
 */
#ifndef EMBER_MODEL_CONFIG_H
#define EMBER_MODEL_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "base/error.h"
#include "base/mem.h"

struct config;

/* -EINVAL: not JSON, not an object, or holds NaN or Infinity (line and reason in the text). */
int config_parse(const char *json, size_t len, const char *name, struct config **ret,
                 struct error *err);
void config_json_free(struct config *config);
DEFINE_CLEANUP(struct config *, config_json_free)

/* The object with the language model's values; borrowed. */
json_t *config_root(const struct config *config);
/* Getters below look into `object`, which was got from this config; NULL: the language model's
 * values. */
json_t *config_get(const struct config *config, json_t *object, const char *keys);
bool config_has(const struct config *config, json_t *object, const char *keys);

#define CONFIG_REQUIRED INT64_MIN
/* An integer within min..max; the fallback may lie outside. */
int64_t config_int(struct config *config, json_t *object, const char *keys, int64_t fallback,
                   int64_t min, int64_t max);
/* A finite number within min..max; a fallback of NAN means required. */
double config_number(struct config *config, json_t *object, const char *keys, double fallback,
                     double min, double max);
bool config_bool(struct config *config, json_t *object, const char *keys, bool fallback);
/* Borrowed from the config. */
const char *config_string(struct config *config, json_t *object, const char *keys,
                          const char *fallback);

/* Token ids: a number, a list, or null. Returns how many there are, at most `room`. */
uint32_t config_ids(struct config *config, const char *key, int32_t *ids, uint32_t room);

/* Notes an error of the reader's own, unless there is one. */
void config_fail(struct config *config, int errnum, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The first error: 0, or its number with *err set. */
int config_error(const struct config *config, struct error *err);

#endif
