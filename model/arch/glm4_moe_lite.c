/* SPDX-License-Identifier: Apache-2.0 */
/* GLM-4.7-Flash: DeepSeek-V3's block. */
#include "model/arch.h"

const struct arch arch_glm4_moe_lite = {
    .model_type = "glm4_moe_lite",
    .eps_fallback = 1e-5,
    .latent = true,
    .moe = {.sparse = SPARSE_FIRST,
            .route = EMBER_ROUTE_SIGMOID,
            .normalize = {"norm_topk_prob", true},
            .route_bias = true,
            .grouped = true,
            .scale = "routed_scaling_factor",
            .shared_count = "n_shared_experts"},
};
