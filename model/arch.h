/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Architectures. Each is one file in model/arch that states how it differs from llama: names of
 * modules and of config keys, kinds of norm, attention and MLP. Zero means "as llama". What a table
 * cannot say is done by `refine`, which edits the description, never a plan.
 *
 * To add one: write model/arch/NAME.c, add NAME to ARCHITECTURES below and the file to
 * model/meson.build, then `emberctl verify` against a reference.
 */
#ifndef EMBER_MODEL_ARCH_H
#define EMBER_MODEL_ARCH_H

#include "model/desc.h"

/* A switch of the config; without a key (or when it is absent) the fallback. */
struct arch_flag {
    const char *key;
    bool fallback;
};

/* Which layers have a window (`sliding_window` of them). */
enum arch_window {
    WINDOW_NONE,
    WINDOW_ALL,      /* every layer, when sliding_window is a number */
    WINDOW_SWITCHED, /* every layer, when use_sliding_window */
    WINDOW_FROM,  /* when use_sliding_window, from layer max_window_layers on; layer_types first */
    WINDOW_TYPES, /* layer_types, else every layer whose number + 1 is no multiple of window_pattern
                   */
    WINDOW_PARITY, /* layer_types, else layers 0, 2, 4, ... */
};

/* Which layers are MoE. */
enum arch_sparse {
    SPARSE_NONE,
    SPARSE_ALL,
    SPARSE_STEP,  /* decoder_sparse_step, mlp_only_layers */
    SPARSE_FIRST, /* mlp_layer_types or moe_layer_freq, else all from first_k_dense_replace on */
    SPARSE_RANGE, /* moe_layer_start_index, moe_layer_end_index, moe_layer_interval */
};

#define WINDOW_ABSENT UINT32_MAX

struct arch_moe {
    enum arch_sparse sparse;
    const char *inner; /* key of an expert's width; NULL: moe_intermediate_size */
    const char *topk;  /* NULL: num_experts_per_tok */
    uint8_t route;     /* enum ember_route */
    struct arch_flag normalize;
    bool route_bias;
    bool router_bias;
    bool grouped;             /* n_group, topk_group */
    const char *scale;        /* key of the factor on the weights; NULL: 1 */
    const char *shared_inner; /* key of the shared experts' width, or NULL */
    const char *shared_count; /* key of their number, each as wide as an expert, or NULL */
    bool shared_gated;
};

struct arch {
    const char *model_type, *alias; /* alias: another model_type of the same form, or NULL */
    struct desc_names names;
    /* norms */
    uint8_t norm; /* enum ember_norm */
    bool norm_bias;
    double norm_w_bias;
    const char *eps;     /* NULL: rms_norm_eps */
    double eps_fallback; /* 0: 1e-6 */
    /* attention */
    uint32_t head_dim_fallback; /* 0: hidden_size / num_attention_heads */
    struct arch_flag qkv_bias, o_bias;
    uint8_t qk_norm; /* enum ember_qk_norm */
    bool norm_after_rope, interleaved, sinks;
    bool latent; /* q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim */
    double partial, theta; /* fallbacks; 0: 1 and 10000 */
    enum arch_window window;
    uint32_t window_pattern;
    uint32_t window_fallback; /* when sliding_window is absent; 0: 4096, or WINDOW_ABSENT */
    /* MLP */
    bool plain_mlp;
    struct arch_flag mlp_bias;
    const char *act; /* key; NULL: hidden_act */
    struct arch_moe moe;
    bool tied; /* fallback of tie_word_embeddings */
    void (*refine)(struct desc *desc, struct config *config);
};

/* The architectures, each model/arch/NAME.c; in the order that error texts list them. */
#define ARCHITECTURES(X)                                                                           \
    X(llama)                                                                                       \
    X(mistral)                                                                                     \
    X(qwen2)                                                                                       \
    X(qwen3)                                                                                       \
    X(qwen3_moe)                                                                                   \
    X(deepseek_v2)                                                                                 \
    X(deepseek_v3)                                                                                 \
    X(ernie4_5)                                                                                    \
    X(ernie4_5_moe)                                                                                \
    X(exaone4)                                                                                     \
    X(gemma2)                                                                                      \
    X(gemma3_text)                                                                                 \
    X(glm)                                                                                         \
    X(glm4)                                                                                        \
    X(glm4_moe)                                                                                    \
    X(glm4_moe_lite)                                                                               \
    X(gpt_oss)                                                                                     \
    X(granite)                                                                                     \
    X(hunyuan_v1_dense)                                                                            \
    X(mimo_v2_flash)                                                                               \
    X(minimax_m2)                                                                                  \
    X(olmo2)                                                                                       \
    X(phi3)                                                                                        \
    X(qwen2_moe)                                                                                   \
    X(seed_oss)                                                                                    \
    X(smollm3)                                                                                     \
    X(starcoder2)

#define X(name) extern const struct arch arch_##name;
ARCHITECTURES(X)
#undef X

/* By a config's model_type; NULL when not known. */
const struct arch *arch_find(const char *model_type);
/* "llama, mistral, ..." in memory of the library. */
const char *arch_list(void);

#endif
