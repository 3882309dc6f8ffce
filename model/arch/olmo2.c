/* SPDX-License-Identifier: Apache-2.0 */
/* OLMo 2: norms behind the sublayers instead of before them, and over all heads of q and k. */
#include "model/arch.h"

const struct arch arch_olmo2 = {
    .model_type = "olmo2",
    .names = {.norm = {[NORM_ATTN_OUT] = "post_attention_layernorm",
                       [NORM_MLP_OUT] = "post_feedforward_layernorm"}},
    .eps_fallback = 1e-5,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .qk_norm = EMBER_QK_NORM_ROW,
};
