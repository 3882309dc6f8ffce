/* SPDX-License-Identifier: Apache-2.0 */
/* StarCoder2: LayerNorm, a plain MLP, biases everywhere. */
#include "model/arch.h"

const struct arch arch_starcoder2 = {
    .model_type = "starcoder2",
    .names = {.up = "mlp.c_fc", .down = "mlp.c_proj"},
    .norm = EMBER_NORM_LAYER,
    .norm_bias = true,
    .eps = "norm_epsilon",
    .eps_fallback = 1e-5,
    .qkv_bias = {"use_bias", true},
    .o_bias = {"use_bias", true},
    .mlp_bias = {"use_bias", true},
    .plain_mlp = true,
    .window = WINDOW_ALL,
    .window_fallback = WINDOW_ABSENT,
    .tied = true,
};
