/* SPDX-License-Identifier: Apache-2.0 */
/* gpt-oss: sinks, windows on even layers, experts with biases and a clamped GLU whose gate and up
 * alternate. */
#include "model/arch.h"

static void refine(struct desc *desc, struct config *config)
{
    struct desc_mlp *moe = &desc->mlps[desc->n_mlps - 1];
    moe->expert_bias = true;
    moe->glu_interleaved = true;
    moe->glu_limit = config_number(config, NULL, "swiglu_limit", 7, 1e-3, 1e6);
    moe->glu_alpha = 1.702;
}

const struct arch arch_gpt_oss = {
    .model_type = "gpt_oss",
    .names = {.router = "mlp.router",
              .experts_gate_up = "mlp.experts.gate_up_proj",
              .experts_down = "mlp.experts.down_proj"},
    .eps_fallback = 1e-5,
    .head_dim_fallback = 64,
    .qkv_bias = {"attention_bias", true},
    .o_bias = {"attention_bias", true},
    .sinks = true,
    .theta = 150000,
    .window = WINDOW_PARITY,
    .window_fallback = 128,
    .moe = {.sparse = SPARSE_ALL,
            .inner = "intermediate_size",
            .route = EMBER_ROUTE_TOPK_SOFTMAX,
            .router_bias = true},
    .refine = refine,
};
