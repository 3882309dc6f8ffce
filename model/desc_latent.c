/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over latents as a config says it. */
#include "model/desc.h"

#include <errno.h>
#include <math.h>

/* As in desc.c. */
#define DIM_MAX 4096
#define Q_RANK_MAX (1 << 17)

static uint32_t width(struct config *config, const char *key, int64_t min, int64_t max)
{
    return (uint32_t)config_int(config, NULL, key, CONFIG_REQUIRED, min, max);
}

void desc_read_latent(struct desc *desc, struct config *config)
{
    struct desc_attn *a = &desc->attns[ATTN_FULL];
    struct desc_latent *l = &a->latent;
    l->rank = width(config, "kv_lora_rank", 1, DIM_MAX);
    l->nope = width(config, "qk_nope_head_dim", 1, DIM_MAX);
    l->rotary = width(config, "qk_rope_head_dim", 2, DIM_MAX);
    l->v = width(config, "v_head_dim", 1, DIM_MAX);
    if (config_has(config, NULL, "q_lora_rank")) /* null: q is a product with x */
        l->q_rank = width(config, "q_lora_rank", 1, Q_RANK_MAX);
    l->eps = 1e-6; /* whatever the other norms have */
    if (l->rotary % 2)
        config_fail(config, EINVAL, "qk_rope_head_dim is odd: %u", l->rotary);
    if (config_bool(config, NULL, "attention_bias", false))
        config_fail(config, ENOTSUP, "attention over latents with biases (attention_bias)");
    a->kv_heads = 1;
    a->dk = l->rank + l->rotary;
    a->dv = l->rank;
    a->interleaved = config_bool(config, NULL, "rope_interleave", true);
    a->scale = desc_rope_scale(config) / sqrt((double)l->nope + l->rotary);
}
