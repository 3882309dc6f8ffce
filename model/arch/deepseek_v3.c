/* SPDX-License-Identifier: Apache-2.0 */
/* DeepSeek-V3 and Kimi K2: attention over latents; experts by sigmoid, in groups, with a bias. */
#include <errno.h>
#include <string.h>

#include "model/arch.h"

static void refine(struct desc *desc, struct config *config)
{
    if (strcmp(config_string(config, NULL, "topk_method", "noaux_tc"), "noaux_tc") ||
        strcmp(config_string(config, NULL, "scoring_func", "sigmoid"), "sigmoid"))
        config_fail(config, ENOTSUP, "experts that are not chosen by sigmoid and noaux_tc");
}

const struct arch arch_deepseek_v3 = {
    .model_type = "deepseek_v3",
    .alias = "kimi_k2",
    .latent = true,
    .moe = {.sparse = SPARSE_FIRST,
            .route = EMBER_ROUTE_SIGMOID,
            .normalize = {"norm_topk_prob", true},
            .route_bias = true,
            .grouped = true,
            .scale = "routed_scaling_factor",
            .shared_count = "n_shared_experts"},
    .refine = refine,
};
