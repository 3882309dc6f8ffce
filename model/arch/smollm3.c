/* SPDX-License-Identifier: Apache-2.0 */
/* SmolLM3: every fourth layer does not rotate (no_rope_layers: 0 where there is none). */
#include <errno.h>

#include "model/arch.h"

static bool rotates(struct config *config, uint32_t layer)
{
    json_t *list = config_get(config, NULL, "no_rope_layers");
    if (json_is_array(list) && layer < json_array_size(list))
        return json_integer_value(json_array_get(list, layer)) != 0;
    return (layer + 1) % config_int(config, NULL, "no_rope_layer_interval", 4, 1, INT32_MAX) != 0;
}

static void refine(struct desc *desc, struct config *config)
{
    uint8_t plain = desc_add_attn(desc, config, ATTN_FULL);
    desc->attns[plain].rope = -1;
    for (uint32_t i = 0; i < desc->info.n_layers; i++)
        if (!rotates(config, i))
            desc->layers[i].attn = plain;
    if (config_bool(config, NULL, "use_sliding_window", false))
        config_fail(config, ENOTSUP, "windows of smollm3 are not read");
}

const struct arch arch_smollm3 = {
    .model_type = "smollm3",
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .mlp_bias = {"mlp_bias", false},
    .theta = 2000000,
    .tied = true,
    .refine = refine,
};
