/* SPDX-License-Identifier: Apache-2.0 */
/* DeepSeek-V2: attention over latents; experts by softmax, in groups where topk_method says so. */
#include <errno.h>
#include <string.h>

#include "model/arch.h"

static void refine(struct desc *desc, struct config *config)
{
    const char *method = config_string(config, NULL, "topk_method", "greedy");
    bool grouped = !strcmp(method, "group_limited_greedy");
    if (!grouped && strcmp(method, "greedy"))
        config_fail(config, ENOTSUP,
                    "topk_method is \"%s\"; greedy and group_limited_greedy are known", method);
    for (uint32_t i = 0; i < desc->n_mlps; i++) {
        struct desc_mlp *m = &desc->mlps[i];
        m->groups = grouped ? m->groups : 0;
        if (m->normalize) /* instead of the factor, as published */
            m->route_scale = 1;
    }
    if (strcmp(config_string(config, NULL, "scoring_func", "softmax"), "softmax"))
        config_fail(config, ENOTSUP, "scoring_func is not softmax");
}

const struct arch arch_deepseek_v2 = {
    .model_type = "deepseek_v2",
    .latent = true,
    .moe = {.sparse = SPARSE_FIRST,
            .route = EMBER_ROUTE_SOFTMAX,
            .normalize = {"norm_topk_prob", false},
            .grouped = true,
            .scale = "routed_scaling_factor",
            .shared_count = "n_shared_experts"},
    .refine = refine,
};
