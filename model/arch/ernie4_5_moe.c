/* SPDX-License-Identifier: Apache-2.0 */
/* ERNIE 4.5 MoE: softmax with a correction for choosing, shared experts, a range of sparse layers.
 */
#include "model/arch.h"

const struct arch arch_ernie4_5_moe = {
    .model_type = "ernie4_5_moe",
    .names = {.route_bias = "mlp.moe_statics.e_score_correction_bias"},
    .eps_fallback = 1e-5,
    .interleaved = true,
    .qkv_bias = {"use_bias", false},
    .o_bias = {"use_bias", false},
    .mlp_bias = {"use_bias", false},
    .theta = 500000,
    .moe = {.sparse = SPARSE_RANGE,
            .topk = "moe_k",
            .route = EMBER_ROUTE_SOFTMAX,
            .normalize = {NULL, true},
            .route_bias = true,
            .shared_count = "moe_num_shared_experts"},
    .tied = true,
};
