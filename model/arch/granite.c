/* SPDX-License-Identifier: Apache-2.0 */
/* Granite 3: llama with factors on embeddings, attention, residual and logits. */
#include "model/arch.h"

static void refine(struct desc *desc, struct config *config)
{
    double scale = config_number(config, NULL, "attention_multiplier", 1, 1e-6, 1e6);
    desc->attns[ATTN_FULL].scale = desc->attns[ATTN_SLIDING].scale = scale;
    desc->embed_scale = config_number(config, NULL, "embedding_multiplier", 1, 1e-6, 1e6);
    desc->residual_scale = config_number(config, NULL, "residual_multiplier", 1, 1e-6, 1e6);
    desc->logit_scale = 1 / config_number(config, NULL, "logits_scaling", 1, 1e-6, 1e6);
}

const struct arch arch_granite = {
    .model_type = "granite",
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .mlp_bias = {"mlp_bias", false},
    .refine = refine,
};
