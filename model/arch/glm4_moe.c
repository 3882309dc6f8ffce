/* SPDX-License-Identifier: Apache-2.0 */
/* GLM-4.5 to 4.7: dense layers first, then sigmoid routing in groups beside a shared expert. */
#include "model/arch.h"

static void refine(struct desc *desc, struct config *config)
{
    if (!config_bool(config, NULL, "use_qk_norm", false))
        for (uint32_t i = 0; i < desc->n_attns; i++)
            desc->attns[i].qk_norm = EMBER_QK_NORM_NONE;
}

const struct arch arch_glm4_moe = {
    .model_type = "glm4_moe",
    .eps_fallback = 1e-5,
    .head_dim_fallback = 128,
    .qkv_bias = {"attention_bias", false},
    .qk_norm = EMBER_QK_NORM_HEAD,
    .partial = 0.5,
    .moe = {.sparse = SPARSE_FIRST,
            .route = EMBER_ROUTE_SIGMOID,
            .normalize = {"norm_topk_prob", true},
            .route_bias = true,
            .grouped = true,
            .scale = "routed_scaling_factor",
            .shared_count = "n_shared_experts"},
    .refine = refine,
};
