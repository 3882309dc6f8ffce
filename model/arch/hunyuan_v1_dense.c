/* SPDX-License-Identifier: Apache-2.0 */
/* Hunyuan dense: q and k are normalised behind the rotation. */
#include "model/arch.h"

const struct arch arch_hunyuan_v1_dense = {
    .model_type = "hunyuan_v1_dense",
    .names = {.q_norm = "self_attn.query_layernorm", .k_norm = "self_attn.key_layernorm"},
    .eps_fallback = 1e-5,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .qk_norm = EMBER_QK_NORM_HEAD,
    .norm_after_rope = true,
};
