/* SPDX-License-Identifier: Apache-2.0 */
/* Gemma 3: Gemma 2 with normalised q and k instead of caps, five windowed layers to a full one,
 * each with its rope. */
#include <math.h>

#include "model/arch.h"

static void refine(struct desc *desc, struct config *config)
{
    double scalar = config_number(config, NULL, "query_pre_attn_scalar", 256, 1e-3, 1e6);
    double cap = config_number(config, NULL, "attn_logit_softcapping", 0, 0, 1e6);
    for (uint32_t i = 0; i < desc->n_attns; i++) {
        desc->attns[i].scale = 1 / sqrt(scalar);
        desc->attns[i].softcap = cap;
    }
    desc->embed_scale = (float)sqrt(desc->info.hidden_size);
    desc->logit_softcap = config_number(config, NULL, "final_logit_softcapping", 0, 0, 1e6);
}

const struct arch arch_gemma3_text = {
    .model_type = "gemma3_text",
    .names = {.norm = {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                       "post_feedforward_layernorm"}},
    .norm_w_bias = 1,
    .head_dim_fallback = 256,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .act = "hidden_activation|hidden_act",
    .tied = true,
    .refine = refine,
    .qk_norm = EMBER_QK_NORM_HEAD,
    .theta = 1000000,
    .window = WINDOW_TYPES,
    .window_pattern = 6,
};
