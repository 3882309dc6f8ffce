/* SPDX-License-Identifier: Apache-2.0 */
/* Qwen3: q and k are normalised head by head before they are rotated. */
#include "model/arch.h"

const struct arch arch_qwen3 = {
    .model_type = "qwen3",
    .alias = "qwen3_vl_text",
    .head_dim_fallback = 128,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .qk_norm = EMBER_QK_NORM_HEAD,
    .window = WINDOW_FROM,
};
