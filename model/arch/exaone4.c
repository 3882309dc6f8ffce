/* SPDX-License-Identifier: Apache-2.0 */
/* EXAONE 4: norms behind the sublayers; layers without a window do not rotate if others have one.
 */
#include "model/arch.h"

static void refine(struct desc *desc, struct config *config)
{
    if (desc->attns[ATTN_SLIDING].window)
        desc->attns[ATTN_FULL].rope = -1;
}

const struct arch arch_exaone4 = {
    .model_type = "exaone4",
    .names = {.norm = {[NORM_ATTN_OUT] = "post_attention_layernorm",
                       [NORM_MLP_OUT] = "post_feedforward_layernorm"}},
    .eps_fallback = 1e-5,
    .qk_norm = EMBER_QK_NORM_HEAD,
    .window = WINDOW_TYPES,
    .window_pattern = 4,
    .refine = refine,
};
