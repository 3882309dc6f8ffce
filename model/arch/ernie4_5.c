/* SPDX-License-Identifier: Apache-2.0 */
/* ERNIE 4.5: llama that rotates neighbouring pairs. */
#include "model/arch.h"

const struct arch arch_ernie4_5 = {
    .model_type = "ernie4_5",
    .eps_fallback = 1e-5,
    .head_dim_fallback = 128,
    .interleaved = true,
    .qkv_bias = {"use_bias", false},
    .o_bias = {"use_bias", false},
    .mlp_bias = {"use_bias", false},
    .theta = 500000,
    .tied = true,
};
