/* SPDX-License-Identifier: Apache-2.0 */
/* GLM-4 9B: half of each head is rotated, in neighbouring pairs; gate and up are one matrix. */
#include "model/arch.h"

const struct arch arch_glm = {
    .model_type = "glm",
    .names = {.gate_up = "mlp.gate_up_proj"},
    .head_dim_fallback = 128,
    .qkv_bias = {"attention_bias", false},
    .interleaved = true,
    .partial = 0.5,
};
