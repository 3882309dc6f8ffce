/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/tokenizer.h"

#include <unistd.h>

#include "base/value.h"
#include "engine/tokenizer.h"

int cli_tokenizer(const char *path, struct tokenizer **ret, struct error *err)
{
    _cleanup_(cache_closep) struct cache *cache = NULL;
    _cleanup_free_ char *dir = NULL;

    if (value_expand("%C/emberd", &dir, NULL) == 0) {
        struct cache_options options = {.read_only = access(dir, W_OK) < 0};
        if (access(dir, F_OK) == 0)
            cache_open(dir, &options, &cache, NULL);
    }
    return engine_tokenizer_open(cache, path, ret, err);
}
