/* SPDX-License-Identifier: Apache-2.0 */
/* Phi-3 and 4: llama with fused projections. Their "longrope" scaling is not read yet. */
#include "model/arch.h"

const struct arch arch_phi3 = {
    .model_type = "phi3",
    .names = {.qkv = "self_attn.qkv_proj", .gate_up = "mlp.gate_up_proj"},
    .eps_fallback = 1e-5,
    .window = WINDOW_ALL,
    .window_fallback = WINDOW_ABSENT,
};
