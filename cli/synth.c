/* SPDX-License-Identifier: Apache-2.0 */
/* emberctl synth: a checkpoint with random weights of a given config.json or of a known shape. */
#include "cli/commands.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "cli/output.h"
#include "cli/shapes.h"
#include "model/synth.h"

struct shape {
    const char *name;
    unsigned hidden, intermediate, layers, heads, kv_heads, head_dim;
    const char *tied;
    unsigned experts, topk, moe_intermediate; /* experts 0: dense */
};

/* Qwen3 (Apache-2.0): the sizes in each model's published config.json. */
static const struct shape shapes[] = {
    {"qwen3-0.6b", 1024, 3072, 28, 16, 8, 128, "true"},
    {"qwen3-1.7b", 2048, 6144, 28, 16, 8, 128, "true"},
    {"qwen3-4b", 2560, 9728, 36, 32, 8, 128, "true"},
    {"qwen3-8b", 4096, 12288, 36, 32, 8, 128, "false"},
    {"qwen3-30b-a3b", 2048, 6144, 48, 32, 4, 128, "false", 128, 8, 768}};

char *shape_names(void)
{
    struct buffer names = {0};

    for (size_t i = 0; i < ARRAY_LEN(shapes); i++)
        buffer_printf(&names, "%s%s", i ? ", " : "", shapes[i].name);
    return names.data;
}

/* The keys that make a shape a mixture of experts; the caller frees. */
static char *experts_config(const struct shape *s)
{
    if (!s->experts)
        return x_strdup("\"architectures\": [\"Qwen3ForCausalLM\"], \"model_type\": \"qwen3\"");
    return x_printf("\"architectures\": [\"Qwen3MoeForCausalLM\"], \"model_type\": "
                    "\"qwen3_moe\", \"num_experts\": %u, \"num_experts_per_tok\": %u, "
                    "\"moe_intermediate_size\": %u, \"norm_topk_prob\": true, "
                    "\"decoder_sparse_step\": 1, \"mlp_only_layers\": []",
                    s->experts, s->topk, s->moe_intermediate);
}

char *shape_config(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        const struct shape *s = &shapes[i];
        if (strcmp(s->name, name))
            continue;
        _cleanup_free_ char *kind = experts_config(s);
        return x_printf("{%s, "
                        "\"hidden_size\": %u, \"intermediate_size\": %u, "
                        "\"num_hidden_layers\": %u, \"num_attention_heads\": %u, "
                        "\"num_key_value_heads\": %u, \"head_dim\": %u, "
                        "\"tie_word_embeddings\": %s, \"vocab_size\": 151936, "
                        "\"max_position_embeddings\": 40960, \"rms_norm_eps\": 1e-06, "
                        "\"rope_theta\": 1000000, \"hidden_act\": \"silu\", "
                        "\"attention_bias\": false, \"torch_dtype\": \"bfloat16\", "
                        "\"eos_token_id\": 151645, \"bos_token_id\": 151643}\n",
                        kind, s->hidden, s->intermediate, s->layers, s->heads, s->kv_heads,
                        s->head_dim, s->tied);
    }
    return NULL;
}

static int make_dir(const char *path, struct error *err)
{
    return mkdir(path, 0755) < 0 && errno != EEXIST ? error_sys(err, errno, "%s", path) : 0;
}

int shape_checkpoint(const char *dir, const char *name, uint32_t layers,
                     int (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx,
                     char **ret_path, struct error *err)
{
    _cleanup_free_ char *config = shape_config(name);
    _cleanup_free_ char *path =
        layers ? x_printf("%s/%s-%u", dir, name, layers) : x_printf("%s/%s", dir, name);
    _cleanup_free_ char *done = x_printf("%s/config.json", path);
    struct synth_options options = {.seed = 1, .dtype = EMBER_BF16, .max_layers = layers};

    if (!config)
        return error_set(err, ENOENT, "no shape is called %s", name);
    int r = make_dir(dir, err);
    if (r == 0 && access(done, R_OK) < 0)
        r = synth_write_config(config, strlen(config), name, path, &options, progress, ctx, err);
    if (r == 0)
        *ret_path = TAKE(path);
    return r;
}

static int on_progress(void *ctx, uint64_t done, uint64_t total)
{
    progress_update(ctx, "writing", done, total);
    return cli_interrupted ? -ECANCELED : 0;
}

int run_synth(const struct verb_call *call)
{
    const char *source = call->argv[0], *to = call->argv[1];
    struct synth_options options = {.seed = (uint64_t)verb_int(call, "seed"),
                                    .max_layers = (uint32_t)verb_int(call, "layers"),
                                    .dtype = EMBER_BF16};
    _cleanup_free_ char *config = shape_config(source);
    struct progress progress;
    struct error err = {0};
    int r = 0;

    cli_catch_interrupts();
    progress_begin(&progress, call, to);
    if (!config && access(source, F_OK) < 0) {
        _cleanup_free_ char *names = shape_names();
        r = error_set(&err, ENOENT, "%s: no such file, and no shape of that name (%s)", source,
                      names);
    } else if (config) {
        r = synth_write_config(config, strlen(config), source, to, &options, on_progress, &progress,
                               &err);
    } else {
        r = synth_write(source, to, &options, on_progress, &progress, &err);
    }
    progress_end(&progress);
    if (r < 0)
        return cli_fail(call, &err);
    if (cli_json(call)) {
        static const struct column none[] = {{0}};
        return cli_print_object(call, json_pack("{s:s, s:s}", "folder", to, "config", source),
                                none);
    }
    printf("%s: written; load it with: emberctl load %s\n", to, to);
    return CLI_OK;
}
