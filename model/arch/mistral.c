/* SPDX-License-Identifier: Apache-2.0 */
/* Mistral 7B (Jiang et al. 2023): llama with a window on every layer, 4096 unless the config says
 * null. */
#include "model/arch.h"

const struct arch arch_mistral = {
    .model_type = "mistral",
    .window = WINDOW_ALL,
};
