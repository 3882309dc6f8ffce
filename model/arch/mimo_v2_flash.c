/* SPDX-License-Identifier: Apache-2.0 */
/* MiMo V2: heads whose v is narrower than k; windowed layers have their own heads, rope and sinks.
 */
#include <math.h>

#include "model/arch.h"

#define HEADS_MAX 4096
#define HEAD_DIM_MAX 4096

static void refine(struct desc *desc, struct config *config)
{
    struct desc_attn *full = &desc->attns[ATTN_FULL], *sliding = &desc->attns[ATTN_SLIDING];
    full->dv = (uint32_t)config_int(config, NULL, "v_head_dim", full->dk, 1, HEAD_DIM_MAX);
    full->v_scale = config_number(config, NULL, "attention_value_scale", 1, 1e-6, 1e6);
    sliding->v_scale = full->v_scale;
    sliding->q_heads =
        (uint32_t)config_int(config, NULL, "swa_num_attention_heads", full->q_heads, 1, HEADS_MAX);
    sliding->kv_heads =
        (uint32_t)config_int(config, NULL, "swa_num_key_value_heads", full->kv_heads, 1, HEADS_MAX);
    sliding->dk = (uint32_t)config_int(config, NULL, "swa_head_dim", full->dk, 1, HEAD_DIM_MAX);
    sliding->dv = (uint32_t)config_int(config, NULL, "swa_v_head_dim", full->dv, 1, HEAD_DIM_MAX);
    sliding->scale = 1 / sqrt(sliding->dk);
    full->sinks = config_bool(config, NULL, "add_full_attention_sink_bias", false);
    sliding->sinks = config_bool(config, NULL, "add_swa_attention_sink_bias", true);
}

const struct arch arch_mimo_v2_flash = {
    .model_type = "mimo_v2_flash",
    .names = {.sinks = "self_attn.attention_sink_bias"},
    .eps = "rms_norm_eps|layernorm_epsilon",
    .eps_fallback = 1e-5,
    .qkv_bias = {"attention_bias", false},
    .window = WINDOW_TYPES,
    .window_pattern = 6,
    .moe = {.sparse = SPARSE_FIRST,
            .route = EMBER_ROUTE_SIGMOID,
            .normalize = {"norm_topk_prob", true},
            .route_bias = true,
            .grouped = true,
            .scale = "routed_scaling_factor",
            .shared_count = "n_shared_experts"},
    .refine = refine,
};
