/* SPDX-License-Identifier: Apache-2.0 */
/* Configs of tests: a small llama with extra members, and temporary checkpoint folders. */
#ifndef EMBER_TESTS_CONFIGS_H
#define EMBER_TESTS_CONFIGS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "model/model.h"

#define SMALL                                                                                      \
    "\"hidden_size\":32,\"intermediate_size\":48,\"num_attention_heads\":2,"                       \
    "\"num_hidden_layers\":2,\"num_key_value_heads\":1,\"vocab_size\":300,"                        \
    "\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5"
/* Later members win nowhere: duplicates are refused, so `extra` must be new keys. */
#define CONFIG(type, extra) "{\"model_type\":\"" type "\"," SMALL extra "}"

static inline int parse_config(const char *json, struct model **ret, struct error *err)
{
    return model_from_config(json, strlen(json), "config.json", ret, err);
}

/* Fails with this number, and its text holds `words`. */
static inline void expect_refused(const char *json, int code, const char *words)
{
    struct model *model = NULL;
    struct error err = {0};
    int r = parse_config(json, &model, &err);
    if (r != code || !strstr(err.text, words) || model)
        fail_msg("%s\n  gives %d \"%s\", not %d \"%s\"", json, r, err.text, code, words);
}

static inline void write_file(const char *dir, const char *name, const void *data, size_t len)
{
    char path[512];
    FILE *f;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, len, f), len);
    assert_int_equal(fclose(f), 0);
}

static inline char *make_dir(char dir[64])
{
    strcpy(dir, "/tmp/ember-test-XXXXXX");
    assert_non_null(mkdtemp(dir));
    return dir;
}

static inline void remove_dir(const char *dir)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    assert_int_equal(system(command), 0);
}

#endif
