/* SPDX-License-Identifier: Apache-2.0 */
/* Seed-OSS: llama with biases on q, k and v. */
#include "model/arch.h"

const struct arch arch_seed_oss = {
    .model_type = "seed_oss",
    .head_dim_fallback = 128,
    .qkv_bias = {"attention_bias", true},
    .o_bias = {"attention_out_bias", false},
    .mlp_bias = {"mlp_bias", false},
};
