/* SPDX-License-Identifier: Apache-2.0 */
/* MiniMax M2: sigmoid routing with a correction, q and k normalised over all heads, half of a head
 * rotated. */
#include "model/arch.h"

const struct arch arch_minimax_m2 = {
    .model_type = "minimax_m2",
    .names = {.router = "block_sparse_moe.gate",
              .route_bias = "block_sparse_moe.e_score_correction_bias",
              .expert_gate = "block_sparse_moe.experts.*.w1",
              .expert_up = "block_sparse_moe.experts.*.w3",
              .expert_down = "block_sparse_moe.experts.*.w2"},
    .qk_norm = EMBER_QK_NORM_ROW,
    .theta = 5000000,
    .moe = {.sparse = SPARSE_ALL,
            .inner = "intermediate_size",
            .route = EMBER_ROUTE_SIGMOID,
            .normalize = {NULL, true},
            .route_bias = true},
};
