/* SPDX-License-Identifier: Apache-2.0 */
/* Qwen 1.5 and 2 MoE: Qwen2's attention; a shared expert behind a gate of its own. */
#include "model/arch.h"

const struct arch arch_qwen2_moe = {
    .model_type = "qwen2_moe",
    .names = {.shared_gate = "mlp.shared_expert.gate_proj",
              .shared_up = "mlp.shared_expert.up_proj",
              .shared_down = "mlp.shared_expert.down_proj"},
    .qkv_bias = {"qkv_bias", true},
    .window = WINDOW_FROM,
    .moe = {.sparse = SPARSE_STEP,
            .route = EMBER_ROUTE_SOFTMAX,
            .normalize = {"norm_topk_prob", false},
            .shared_inner = "shared_expert_intermediate_size",
            .shared_gated = true},
};
