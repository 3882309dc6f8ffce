/* SPDX-License-Identifier: Apache-2.0 */
/* Llama 1 to 3 (Touvron et al. 2023): what all others are told as differences from. */
#include "model/arch.h"

const struct arch arch_llama = {
    .model_type = "llama",
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .mlp_bias = {"mlp_bias", false},
};
