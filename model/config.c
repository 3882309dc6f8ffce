/* SPDX-License-Identifier: Apache-2.0 */
#include "model/config.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct config {
    json_t *outer, *text;
    char name[256];
    struct error first;
};

void config_json_free(struct config *config)
{
    if (!config)
        return;
    json_decref(config->outer);
    free(config);
}

void config_fail(struct config *config, int errnum, const char *format, ...)
{
    va_list ap;
    if (config->first.code)
        return;
    va_start(ap, format);
    error_setv(&config->first, errnum, format, ap);
    va_end(ap);
    error_prefix(&config->first, "%s", config->name);
}

int config_error(const struct config *config, struct error *err)
{
    if (config->first.code && err)
        *err = config->first;
    return config->first.code;
}

/* What jansson says, in words for the one mistake that Python's json makes. */
static int parse_failed(const char *json, size_t len, const char *name, const json_error_t *trouble,
                        struct error *err)
{
    /* The parser stops behind "NaN" and "Infinity", but before the word of "-Infinity". */
    size_t at = trouble->position > 0 ? MIN((size_t)trouble->position, len) : 0;
    bool negative = len - at >= 8 && !memcmp(json + at, "Infinity", 8);
    if (negative || strstr(trouble->text, "NaN") || strstr(trouble->text, "Infinity"))
        return error_set(err, EINVAL,
                         "%s: line %d holds NaN or Infinity, which is no value for a model: "
                         "correct the file",
                         name, trouble->line);
    return error_set(err, EINVAL, "%s: line %d, column %d: %s", name, trouble->line,
                     trouble->column, trouble->text);
}

int config_parse(const char *json, size_t len, const char *name, struct config **ret,
                 struct error *err)
{
    _cleanup_(config_json_freep) struct config *config = mem_alloc(1, sizeof *config);
    json_error_t trouble;
    if (!config)
        return error_set(err, ENOMEM, "%s: no memory", name);
    snprintf(config->name, sizeof config->name, "%s", name);
    config->outer = json_loadb(json, len, JSON_REJECT_DUPLICATES, &trouble);
    if (!config->outer)
        return parse_failed(json, len, name, &trouble, err);
    if (!json_is_object(config->outer))
        return error_set(err, EINVAL, "%s: is not a JSON object", name);
    config->text = json_object_get(config->outer, "text_config");
    if (!json_is_object(config->text))
        config->text = json_object_get(config->outer, "llm_config");
    if (!json_is_object(config->text))
        config->text = config->outer;
    *ret = TAKE(config);
    return 0;
}

json_t *config_root(const struct config *config)
{
    return config->text;
}

static json_t *get_present(json_t *object, const char *key, size_t len)
{
    json_t *value = json_object_getn(object, key, len);
    return json_is_null(value) ? NULL : value;
}

/* Keys that a wrapper may state for its language model. */
static bool is_shared(const char *keys)
{
    size_t n = strlen(keys);
    return !strcmp(keys, "tie_word_embeddings") || !strcmp(keys, "quantization_config") ||
           (n > 9 && !strcmp(keys + n - 9, "_token_id"));
}

json_t *config_get(const struct config *config, json_t *object, const char *keys)
{
    json_t *value = NULL;
    for (const char *key = keys; !value;) {
        size_t len = strcspn(key, "|");
        value = get_present(object ? object : config->text, key, len);
        if (!value && !object && is_shared(keys))
            value = get_present(config->outer, key, len);
        if (!key[len])
            break;
        key += len + 1;
    }
    return value;
}

bool config_has(const struct config *config, json_t *object, const char *keys)
{
    return config_get(config, object, keys) != NULL;
}

int64_t config_int(struct config *config, json_t *object, const char *keys, int64_t fallback,
                   int64_t min, int64_t max)
{
    json_t *value = config_get(config, object, keys);
    int64_t v;
    if (!value) {
        if (fallback == CONFIG_REQUIRED)
            config_fail(config, EINVAL, "%s is missing", keys);
        return fallback == CONFIG_REQUIRED ? min : fallback;
    }
    if (json_is_integer(value))
        v = json_integer_value(value);
    else if (json_is_real(value) && json_real_value(value) == rint(json_real_value(value)) &&
             fabs(json_real_value(value)) < 9e15)
        v = (int64_t)json_real_value(value);
    else {
        config_fail(config, EINVAL, "%s is not a whole number", keys);
        return min;
    }
    if (v < min || v > max) {
        config_fail(config, EINVAL, "%s is %lld, not within %lld..%lld", keys, (long long)v,
                    (long long)min, (long long)max);
        return min;
    }
    return v;
}

double config_number(struct config *config, json_t *object, const char *keys, double fallback,
                     double min, double max)
{
    json_t *value = config_get(config, object, keys);
    double v;
    if (!value) {
        if (isnan(fallback))
            config_fail(config, EINVAL, "%s is missing", keys);
        return isnan(fallback) ? min : fallback;
    }
    if (!json_is_number(value)) {
        config_fail(config, EINVAL, "%s is not a number", keys);
        return min;
    }
    v = json_number_value(value);
    if (!(v >= min && v <= max)) {
        config_fail(config, EINVAL, "%s is %g, not within %g..%g", keys, v, min, max);
        return min;
    }
    return v;
}

bool config_bool(struct config *config, json_t *object, const char *keys, bool fallback)
{
    json_t *value = config_get(config, object, keys);
    if (!value)
        return fallback;
    if (json_is_integer(value) && (json_integer_value(value) & ~INT64_C(1)) == 0)
        return json_integer_value(value) == 1;
    if (!json_is_boolean(value))
        config_fail(config, EINVAL, "%s is neither true nor false", keys);
    return json_is_true(value);
}

const char *config_string(struct config *config, json_t *object, const char *keys,
                          const char *fallback)
{
    json_t *value = config_get(config, object, keys);
    if (!value) {
        if (!fallback)
            config_fail(config, EINVAL, "%s is missing", keys);
        return fallback ? fallback : "";
    }
    if (!json_is_string(value)) {
        config_fail(config, EINVAL, "%s is not a string", keys);
        return fallback ? fallback : "";
    }
    return json_string_value(value);
}

uint32_t config_ids(struct config *config, const char *key, int32_t *ids, uint32_t room)
{
    json_t *value = config_get(config, NULL, key);
    uint32_t n = 0;
    size_t count = json_is_array(value) ? json_array_size(value) : value ? 1 : 0;
    for (size_t i = 0; i < count; i++) {
        json_t *id = json_is_array(value) ? json_array_get(value, i) : value;
        if (!json_is_integer(id) || json_integer_value(id) < -1 ||
            json_integer_value(id) > INT32_MAX) {
            config_fail(config, EINVAL, "%s is not a token id or a list of them", key);
            return 0;
        }
        if (n < room && json_integer_value(id) >= 0)
            ids[n++] = (int32_t)json_integer_value(id);
    }
    return n;
}
