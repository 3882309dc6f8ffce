/* SPDX-License-Identifier: Apache-2.0 */
/* Qwen3 MoE: Qwen3's attention; softmax over all experts, then the best k, without shared experts.
 */
#include "model/arch.h"

const struct arch arch_qwen3_moe = {
    .model_type = "qwen3_moe",
    .alias = "qwen3_vl_moe_text",
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .qk_norm = EMBER_QK_NORM_HEAD,
    .window = WINDOW_SWITCHED,
    .moe = {.sparse = SPARSE_STEP,
            .route = EMBER_ROUTE_SOFTMAX,
            .normalize = {"norm_topk_prob", false}},
};
