/* SPDX-License-Identifier: Apache-2.0 */
/* Qwen2 and 2.5: llama with biases on q, k and v alone, and windows on the upper layers if switched
 * on. */
#include "model/arch.h"

const struct arch arch_qwen2 = {
    .model_type = "qwen2",
    .qkv_bias = {NULL, true},
    .window = WINDOW_FROM,
};
