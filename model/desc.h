/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The description of a model: what model/arch/NAME.c (an architecture, static data) and a
 * config.json (numbers) come to. The builder (plan/) makes plans from it and knows no
 * architecture by name.
 *
 * A block is: x += scale * norm(attn(norm(x))); x += scale * norm(mlp(norm(x))), where each of the
 * four norms may be absent: pre-norm, post-norm and sandwich blocks are one form. Layers name one
 * of a few attention kinds and one of a few MLP kinds; layers that name the same ones are alike.
 */
#ifndef EMBER_MODEL_DESC_H
#define EMBER_MODEL_DESC_H

#include <stdbool.h>
#include <stdint.h>

#include <ember/op.h>

#include "model/config.h"
#include "model/model.h"

enum block_norm { NORM_ATTN_IN, NORM_ATTN_OUT, NORM_MLP_IN, NORM_MLP_OUT, BLOCK_NORMS };

/*
 * Names of checkpoint modules, without ".weight" or ".bias". Those of a layer stand behind `layer`,
 * in which '#' is the layer's number; '*' is an expert's number. NULL: llama's name, or no such
 * module.
 */
struct desc_names {
    const char *embed, *head, *final_norm, *layer;
    const char *norm[BLOCK_NORMS]; /* all NULL: llama's two */
    const char *q, *k, *v, *o;
    const char *qkv; /* stored fused: rows of q, k, v */
    const char *q_norm, *k_norm;
    const char *sinks; /* a whole tensor name */
    /* of latents */
    const char *q_down, *q_down_norm, *q_up, *kv_down, *kv_down_norm, *kv_up;
    const char *gate, *up, *down;
    const char *gate_up; /* stored fused: rows of gate, then up */
    const char *router;
    const char *route_bias; /* a whole tensor name: the score correction */
    const char *expert_gate, *expert_up, *expert_down;
    /* Whole tensors, stored stacked and transposed: [E, D, 2 I] and [E, I, D]; biases are
     * NAME_bias. */
    const char *experts_gate_up, *experts_down;
    const char *shared_gate, *shared_up, *shared_down, *shared_sigmoid;
};

/* A rope table: one kind of scaling over one width. */
struct desc_rope {
    uint32_t kind;   /* enum ember_rope */
    uint32_t rotary; /* elements of a head that it turns: twice the table's frequencies */
    double attention_factor, theta, factor, max_position;
    float *inv_freq; /* [rotary / 2], owned by the description */
};

/*
 * Multi-head latent attention: K and V of all heads are products with one latent of `rank` values a
 * token, beside `rotary` values that are turned by position. It is run as attention of all heads
 * over the one KV head [latent, turned], dk = rank + rotary and dv = rank, with the products moved
 * to q and to what comes out (split_latent of ember/op.h).
 */
struct desc_latent {
    uint32_t rank;            /* 0: attention is plain */
    uint32_t q_rank;          /* of the latent of q; 0: q is a product with x */
    uint32_t nope, rotary, v; /* of a head: values of q and k that are not turned, that are; of v */
    double eps;               /* of the norms of both latents */
};

struct desc_attn {
    uint32_t q_heads, kv_heads, dk, dv;
    uint32_t window; /* 0: full */
    int32_t rope;    /* index of a table, -1: no rotation */
    bool interleaved, sinks, qkv_bias, o_bias, norm_after_rope;
    uint8_t qk_norm; /* enum ember_qk_norm */
    double scale, softcap, v_scale;
    struct desc_latent latent;
};

enum mlp_kind { MLP_GATED, MLP_PLAIN, MLP_MOE };

struct desc_mlp {
    uint8_t kind, act; /* enum ember_act */
    bool bias;
    uint32_t inner; /* of the MLP, or of each expert */
    bool glu_interleaved;
    double glu_limit, glu_alpha;
    /* MoE */
    uint32_t experts, topk, groups, top_groups;
    uint8_t route; /* enum ember_route */
    bool normalize, route_bias, router_bias, expert_bias;
    double route_scale;
    uint32_t shared_inner; /* 0: no shared expert */
    bool shared_gated;     /* the shared expert's output times sigmoid(shared_sigmoid(x)) */
};

struct desc_layer {
    uint8_t attn, mlp;
};

/* How a checkpoint stores quantised matrices; quant/quant.c has each form's tensors. */
enum quant_method {
    QUANT_NONE,
    QUANT_AWQ,       /* AutoAWQ, "gemm" */
    QUANT_GPTQ,      /* AutoGPTQ and GPTQModel, with or without act-order */
    QUANT_FP8_BLOCK, /* E4M3 with a scale a block of the matrix */
    QUANT_CT_PACKED, /* compressed-tensors "pack-quantized", 4 bits */
    QUANT_CT_INT8,   /* compressed-tensors "int-quantized", 8 bits a channel */
    QUANT_MXFP4,     /* gpt-oss: experts in blocks of 32 */
};

struct desc_quant {
    uint8_t method;
    bool int8_x;      /* activations are quantised to int8, one scale a token */
    uint8_t zero_add; /* to a stored zero point */
    uint32_t group;   /* values a scale covers; 0: a whole row */
    uint32_t block_rows;
};

#define DESC_ATTNS 4
#define DESC_MLPS 2
#define DESC_ROPES 4

struct desc {
    struct model_info info;
    struct desc_names names;
    struct desc_quant quant;
    uint8_t norm; /* enum ember_norm */
    bool norm_bias, tied;
    double eps, norm_w_bias;
    double embed_scale, residual_scale, logit_scale, logit_softcap;
    uint32_t n_attns, n_mlps, n_ropes;
    struct desc_attn attns[DESC_ATTNS];
    struct desc_mlp mlps[DESC_MLPS];
    struct desc_rope ropes[DESC_ROPES];
    struct desc_layer *layers; /* [info.n_layers], owned */
};

/* Reads a config by the architecture that it names. -ENOTSUP, -EINVAL as model_from_config. */
int desc_read(struct config *config, struct desc *ret, struct error *err);
void desc_clear(struct desc *desc);

/* ---- for the reader and the architectures' own hooks ---- */

/* Attention kinds that the reader makes; hooks may add more (desc_add_attn). */
enum { ATTN_FULL, ATTN_SLIDING };
/* Appends a copy of kind `of`; returns its number, or `of` with an error noted when there is no
 * room. */
uint8_t desc_add_attn(struct desc *desc, struct config *config, uint8_t of);

/*
 * Adds the rope table that the config's rope_parameters or rope_theta/rope_scaling ask for
 * (`layer_type`: the entry of that name where they differ by it; may be NULL), for heads of
 * `head_dim` of which a share `partial` is turned unless the config says otherwise. Returns its
 * index; equal tables are shared.
 */
int32_t desc_add_rope(struct desc *desc, struct config *config, const char *layer_type,
                      uint32_t head_dim, double partial, double theta);

/*
 * Reads attention over latents (struct desc_latent) into the kind ATTN_FULL, whose q_heads are
 * known: ranks, widths of a head, and the scale, which grows with a rope that is stretched
 * (mscale_all_dim; DeepSeek-V2 and V3 as published).
 */
void desc_read_latent(struct desc *desc, struct config *config);
/* What stretching of the rope multiplies the scale of attention with. */
double desc_rope_scale(struct config *config);

#endif
