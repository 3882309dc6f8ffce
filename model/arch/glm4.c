/* SPDX-License-Identifier: Apache-2.0 */
/* GLM-4-0414: GLM with a norm before and behind each sublayer. */
#include "model/arch.h"

const struct arch arch_glm4 = {
    .model_type = "glm4",
    .names = {.gate_up = "mlp.gate_up_proj",
              .norm = {"input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
                       "post_mlp_layernorm"}},
    .head_dim_fallback = 128,
    .qkv_bias = {"attention_bias", false},
    .interleaved = true,
    .partial = 0.5,
};
