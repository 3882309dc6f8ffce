/* SPDX-License-Identifier: Apache-2.0 */
#include "model/desc.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/arch.h"
#include "model/model_private.h"

/* More than any model has; what a file says beyond that is damage or malice. */
#define LAYERS_MAX 1024
#define HIDDEN_MAX (1 << 17)
#define VOCAB_MAX (1 << 24)
#define HEADS_MAX 4096
#define HEAD_DIM_MAX 4096
#define INNER_MAX (1 << 22)
#define EXPERTS_MAX 4096
#define POSITIONS_MAX (1 << 27)

void desc_clear(struct desc *desc)
{
    for (uint32_t i = 0; i < desc->n_ropes; i++)
        free(desc->ropes[i].inv_freq);
    free(desc->layers);
    *desc = (struct desc){0};
}

/* X(word, enum ember_act) */
#define ACTIVATIONS(X)                                                                             \
    X("silu", EMBER_ACT_SILU)                                                                      \
    X("swish", EMBER_ACT_SILU)                                                                     \
    X("gelu", EMBER_ACT_GELU_ERF)                                                                  \
    X("gelu_new", EMBER_ACT_GELU_TANH)                                                             \
    X("gelu_pytorch_tanh", EMBER_ACT_GELU_TANH)                                                    \
    X("relu2", EMBER_ACT_RELU2)

/* enum ember_act of a config's word; notes -ENOTSUP with those known. */
static uint8_t desc_act(struct config *config, const char *word)
{
#define X(known, act)                                                                              \
    if (!strcmp(word, known))                                                                      \
        return act;
    ACTIVATIONS(X)
#undef X
#define X(known, act) " " known
    config_fail(config, ENOTSUP, "activation \"%s\" is not known; known are:" ACTIVATIONS(X), word);
#undef X
    return EMBER_ACT_SILU;
}

uint8_t desc_add_attn(struct desc *desc, struct config *config, uint8_t of)
{
    if (desc->n_attns == DESC_ATTNS) {
        config_fail(config, ENOTSUP, "more than %d kinds of attention", DESC_ATTNS);
        return of;
    }
    desc->attns[desc->n_attns] = desc->attns[of];
    return (uint8_t)desc->n_attns++;
}

static bool flag(struct config *config, const struct arch_flag *f)
{
    return f->key ? config_bool(config, NULL, f->key, f->fallback) : f->fallback;
}

static uint32_t count(struct config *config, const char *keys, int64_t fallback, int64_t max)
{
    return (uint32_t)config_int(config, NULL, keys, fallback, 1, max);
}

static const char * or (const char *name, const char *fallback)
{
    return name ? name : fallback;
}

static void read_names(const struct arch *arch, struct desc_names *n)
{
    bool norms = false;
    *n = arch->names;
    n->embed = or (n->embed, "model.embed_tokens");
    n->head = or (n->head, "lm_head");
    n->final_norm = or (n->final_norm, "model.norm");
    n->layer = or (n->layer, "model.layers.#.");
    for (int i = 0; i < BLOCK_NORMS; i++)
        norms |= n->norm[i] != NULL;
    if (!norms) {
        n->norm[NORM_ATTN_IN] = "input_layernorm";
        n->norm[NORM_MLP_IN] = "post_attention_layernorm";
    }
    n->q = or (n->q, "self_attn.q_proj");
    n->k = or (n->k, "self_attn.k_proj");
    n->v = or (n->v, "self_attn.v_proj");
    n->o = or (n->o, "self_attn.o_proj");
    n->q_norm = or (n->q_norm, "self_attn.q_norm");
    n->k_norm = or (n->k_norm, "self_attn.k_norm");
    n->sinks = or (n->sinks, "self_attn.sinks");
    n->q_down = or (n->q_down, "self_attn.q_a_proj");
    n->q_down_norm = or (n->q_down_norm, "self_attn.q_a_layernorm");
    n->q_up = or (n->q_up, "self_attn.q_b_proj");
    n->kv_down = or (n->kv_down, "self_attn.kv_a_proj_with_mqa");
    n->kv_down_norm = or (n->kv_down_norm, "self_attn.kv_a_layernorm");
    n->kv_up = or (n->kv_up, "self_attn.kv_b_proj");
    n->gate = or (n->gate, "mlp.gate_proj");
    n->up = or (n->up, "mlp.up_proj");
    n->down = or (n->down, "mlp.down_proj");
    n->router = or (n->router, "mlp.gate");
    n->route_bias = or (n->route_bias, "mlp.gate.e_score_correction_bias");
    n->expert_gate = or (n->expert_gate, "mlp.experts.*.gate_proj");
    n->expert_up = or (n->expert_up, "mlp.experts.*.up_proj");
    n->expert_down = or (n->expert_down, "mlp.experts.*.down_proj");
    n->shared_gate = or (n->shared_gate, "mlp.shared_experts.gate_proj");
    n->shared_up = or (n->shared_up, "mlp.shared_experts.up_proj");
    n->shared_down = or (n->shared_down, "mlp.shared_experts.down_proj");
    n->shared_sigmoid = or (n->shared_sigmoid, "mlp.shared_expert_gate");
}

static void read_info(struct config *config, struct model_info *info)
{
    info->vocab_size = count(config, "vocab_size", CONFIG_REQUIRED, VOCAB_MAX);
    info->hidden_size = count(config, "hidden_size|n_embd", CONFIG_REQUIRED, HIDDEN_MAX);
    info->n_layers = count(config, "num_hidden_layers|n_layer", CONFIG_REQUIRED, LAYERS_MAX);
    info->max_positions =
        count(config, "max_position_embeddings|n_positions", CONFIG_REQUIRED, POSITIONS_MAX);
    info->n_eos = config_ids(config, "eos_token_id", info->eos_ids, MODEL_EOS_MAX);
    if (config_ids(config, "bos_token_id", &info->bos_id, 1) == 0)
        info->bos_id = -1;
}

static void read_attention(const struct arch *arch, struct config *config, struct desc *d)
{
    struct desc_attn *a = &d->attns[ATTN_FULL];
    int64_t dk;
    a->q_heads = count(config, "num_attention_heads|n_head", CONFIG_REQUIRED, HEADS_MAX);
    a->kv_heads = count(config, "num_key_value_heads", a->q_heads, HEADS_MAX);
    dk = arch->head_dim_fallback ? arch->head_dim_fallback : d->info.hidden_size / a->q_heads;
    a->dk = count(config, "head_dim", dk, HEAD_DIM_MAX);
    a->dv = a->dk;
    a->interleaved = arch->interleaved;
    a->sinks = arch->sinks;
    a->qk_norm = arch->qk_norm;
    a->norm_after_rope = arch->norm_after_rope;
    a->qkv_bias = flag(config, &arch->qkv_bias);
    a->o_bias = flag(config, &arch->o_bias);
    a->scale = a->dk ? 1 / sqrt(a->dk) : 1;
    a->v_scale = 1;
    if (arch->latent)
        desc_read_latent(d, config);
    d->n_attns = 1;
    d->attns[desc_add_attn(d, config, ATTN_FULL)].window = 0;
}

static void read_ropes(const struct arch *arch, struct config *config, struct desc *d)
{
    static const char *const types[] = {
        [ATTN_FULL] = "full_attention", [ATTN_SLIDING] = "sliding_attention"};
    for (uint32_t i = 0; i < ARRAY_LEN(types); i++)
        d->attns[i].rope = desc_add_rope(
            d, config, types[i], arch->latent ? d->attns[i].latent.rotary : d->attns[i].dk,
            arch->partial > 0 ? arch->partial : 1, arch->theta > 0 ? arch->theta : 10000);
}

/* Does layer i have a window by its architecture's rule, layer_types apart? */
static bool window_by_rule(const struct arch *arch, struct config *config, uint32_t i)
{
    switch (arch->window) {
    case WINDOW_NONE:
        return false;
    case WINDOW_ALL:
    case WINDOW_SWITCHED:
        return true;
    case WINDOW_FROM:
        return i >= config_int(config, NULL, "max_window_layers", 28, 0, INT32_MAX);
    case WINDOW_TYPES: {
        int64_t n = config_int(config, NULL, "sliding_window_pattern|_sliding_window_pattern",
                               arch->window_pattern, 1, LAYERS_MAX);
        return (i + 1) % n != 0;
    }
    case WINDOW_PARITY:
        return i % 2 == 0;
    }
    return false;
}

/* List `key` has an integer for layer i: *ret. */
static bool layer_number(struct config *config, const char *key, uint32_t i, json_int_t *ret)
{
    json_t *value = json_array_get(config_get(config, NULL, key), i);
    if (json_is_integer(value))
        *ret = json_integer_value(value);
    return json_is_integer(value);
}

/* layer_types[i], or what MiMo V2's first spelling comes to; NULL when there is no such list. */
static const char *layer_type(struct config *config, uint32_t i, uint32_t n_layers)
{
    json_t *types = config_get(config, NULL, "layer_types");
    const char *type;
    json_int_t hybrid;
    if (!json_is_array(types)) {
        if (!layer_number(config, "hybrid_layer_pattern", i, &hybrid))
            return NULL;
        return hybrid ? "sliding_attention" : "full_attention";
    }
    type = json_string_value(json_array_get(types, i));
    if (json_array_size(types) < n_layers || !type)
        config_fail(config, EINVAL, "layer_types has no word for layer %u", i);
    return type;
}

static uint32_t read_window(const struct arch *arch, struct config *config)
{
    json_t *given = json_object_get(config_root(config), "sliding_window");
    bool switched = arch->window == WINDOW_SWITCHED || arch->window == WINDOW_FROM;
    if (arch->window == WINDOW_NONE || (given && json_is_null(given)) ||
        (switched && !config_bool(config, NULL, "use_sliding_window", false)))
        return 0;
    if (!given && arch->window_fallback == WINDOW_ABSENT)
        return 0;
    return (uint32_t)config_int(config, NULL, "sliding_window",
                                arch->window_fallback ? arch->window_fallback : 4096, 0, INT32_MAX);
}

static void read_windows(const struct arch *arch, struct config *config, struct desc *d)
{
    bool typed = arch->window >= WINDOW_FROM;
    uint32_t window = read_window(arch, config);
    d->attns[ATTN_SLIDING].window = window;
    for (uint32_t i = 0; i < d->info.n_layers; i++) {
        const char *type = typed ? layer_type(config, i, d->info.n_layers) : NULL;
        bool sliding = window && window_by_rule(arch, config, i);
        if (type && !strcmp(type, "sliding_attention"))
            sliding = true;
        else if (type && !strcmp(type, "full_attention"))
            sliding = false;
        else if (type)
            config_fail(config, ENOTSUP, "layer %u is of type \"%s\", which is not known", i, type);
        if (sliding && !window)
            config_fail(config, EINVAL, "layer %u slides but there is no sliding_window", i);
        d->layers[i].attn = sliding ? ATTN_SLIDING : ATTN_FULL;
    }
}

static void read_mlp(const struct arch *arch, struct config *config, struct desc *d,
                     struct desc_mlp *m)
{
    m->kind = arch->plain_mlp ? MLP_PLAIN : MLP_GATED;
    m->act = desc_act(config, config_string(config, NULL, or (arch->act, "hidden_act"), "silu"));
    m->bias = flag(config, &arch->mlp_bias);
    m->inner = count(config, "intermediate_size|n_inner", CONFIG_REQUIRED, INNER_MAX);
}

static void read_moe(const struct arch *arch, struct config *config, struct desc_mlp *m)
{
    const struct arch_moe *moe = &arch->moe;
    m->kind = MLP_MOE;
    m->bias = false;
    m->experts = count(config, "num_experts|num_local_experts|n_routed_experts|moe_num_experts",
                       CONFIG_REQUIRED, EXPERTS_MAX);
    m->topk = count(config, or (moe->topk, "num_experts_per_tok"), CONFIG_REQUIRED, EXPERTS_MAX);
    m->inner = count(config, or (moe->inner, "moe_intermediate_size"), CONFIG_REQUIRED, INNER_MAX);
    m->route = moe->route;
    m->normalize = flag(config, &moe->normalize);
    m->route_bias = moe->route_bias;
    m->router_bias = moe->router_bias;
    m->route_scale = moe->scale ? config_number(config, NULL, moe->scale, 1, 1e-6, 1e6) : 1;
    if (moe->grouped) {
        m->groups = count(config, "n_group", 1, EXPERTS_MAX);
        m->top_groups = count(config, "topk_group", 1, EXPERTS_MAX);
    }
    if (moe->shared_inner)
        m->shared_inner =
            (uint32_t)config_int(config, NULL, moe->shared_inner, CONFIG_REQUIRED, 0, INNER_MAX);
    if (moe->shared_count) {
        int64_t n = config_int(config, NULL, moe->shared_count, 0, 0, EXPERTS_MAX);
        if (n * m->inner > INNER_MAX)
            config_fail(config, EINVAL, "%s is %lld", moe->shared_count, (long long)n);
        else
            m->shared_inner = (uint32_t)n * m->inner;
    }
    m->shared_gated = moe->shared_gated;
    if (m->topk > m->experts)
        config_fail(config, EINVAL, "%u experts a token of %u", m->topk, m->experts);
}

static bool list_has(json_t *list, uint32_t i)
{
    size_t at;
    json_t *value;
    json_array_foreach(list, at, value) if (json_is_integer(value) &&
                                            json_integer_value(value) == i) return true;
    return false;
}

static bool is_sparse(const struct arch *arch, struct config *config, uint32_t i, uint32_t n)
{
    json_int_t freq;
    json_t *list;
    switch (arch->moe.sparse) {
    case SPARSE_NONE:
        return false;
    case SPARSE_ALL:
        return true;
    case SPARSE_STEP:
        return !list_has(config_get(config, NULL, "mlp_only_layers"), i) &&
               (i + 1) % config_int(config, NULL, "decoder_sparse_step", 1, 1, INT32_MAX) == 0;
    case SPARSE_FIRST:
        list = config_get(config, NULL, "mlp_layer_types");
        if (json_is_array(list) && json_array_size(list) >= n) {
            const char *type = json_string_value(json_array_get(list, i));
            return type && !strcmp(type, "sparse");
        }
        if (layer_number(config, "moe_layer_freq", i, &freq))
            return freq != 0;
        return i >= config_int(config, NULL, "first_k_dense_replace", 0, 0, INT32_MAX);
    case SPARSE_RANGE: {
        int64_t end = config_int(config, NULL, "moe_layer_end_index", n - 1, -1, INT32_MAX);
        int64_t step = config_int(config, NULL, "moe_layer_interval", 1, 1, INT32_MAX);
        return (i + 1) % step == 0 && (end < 0 || i <= end) &&
               i >= config_int(config, NULL, "moe_layer_start_index", 0, 0, INT32_MAX);
    }
    }
    return false;
}

/* MLP kind 0 is dense and kind 1 MoE; a model whose layers are all of one has only that. */
static void read_mlps(const struct arch *arch, struct config *config, struct desc *d)
{
    uint32_t sparse = 0;
    if (config_error(config, NULL))
        return;
    for (uint32_t i = 0; i < d->info.n_layers; i++) {
        d->layers[i].mlp = is_sparse(arch, config, i, d->info.n_layers);
        sparse += d->layers[i].mlp;
    }
    d->n_mlps = 1;
    read_mlp(arch, config, d, &d->mlps[0]);
    if (sparse == 0)
        return;
    d->mlps[d->n_mlps] = d->mlps[0];
    read_moe(arch, config, &d->mlps[d->n_mlps++]);
}

static void read_scalars(const struct arch *arch, struct config *config, struct desc *d)
{
    d->norm = arch->norm;
    d->norm_bias = arch->norm_bias;
    d->norm_w_bias = arch->norm_w_bias;
    d->eps = config_number(config, NULL, or (arch->eps, "rms_norm_eps"),
                           arch->eps_fallback > 0 ? arch->eps_fallback : 1e-6, 0, 1);
    d->embed_scale = d->residual_scale = d->logit_scale = 1;
    d->tied = config_bool(config, NULL, "tie_word_embeddings", arch->tied);
}

/* What the builder relies on. */
static void check(struct config *config, const struct desc *d)
{
    for (uint32_t i = 0; i < d->n_attns; i++) {
        const struct desc_attn *a = &d->attns[i];
        if (a->q_heads % a->kv_heads)
            config_fail(config, EINVAL, "%u attention heads over %u key-value heads", a->q_heads,
                        a->kv_heads);
        if (a->rope >= 0 && d->ropes[a->rope].rotary > a->dk)
            config_fail(config, EINVAL, "rope turns %u elements of heads of %u",
                        d->ropes[a->rope].rotary, a->dk);
        if (a->latent.rank && (a->rope < 0 || d->ropes[a->rope].rotary != a->latent.rotary))
            config_fail(config, EINVAL, "rope does not turn all of qk_rope_head_dim, %u",
                        a->latent.rotary);
        if (a->dk > HEAD_DIM_MAX || a->dv > HEAD_DIM_MAX || a->dk == 0 || a->dv == 0)
            config_fail(config, EINVAL, "heads of %u and %u elements", a->dk, a->dv);
    }
    for (uint32_t i = 0; i < d->n_mlps; i++)
        if (d->mlps[i].groups > 1 &&
            (d->mlps[i].experts % d->mlps[i].groups || d->mlps[i].top_groups > d->mlps[i].groups ||
             d->mlps[i].experts / d->mlps[i].groups * d->mlps[i].top_groups < d->mlps[i].topk))
            config_fail(config, EINVAL, "%u experts in %u groups, %u of them for %u a token",
                        d->mlps[i].experts, d->mlps[i].groups, d->mlps[i].top_groups,
                        d->mlps[i].topk);
}

int desc_read(struct config *config, struct desc *ret, struct error *err)
{
    const char *type = config_string(config, NULL, "model_type", NULL);
    const struct arch *arch = arch_find(type);
    struct desc d = {0};
    int r;
    if (!arch && !config_error(config, NULL))
        config_fail(config, ENOTSUP, "architecture \"%s\" is not known; known are: %s", type,
                    arch_list());
    quant_read(config, &d.quant);
    if (config_error(config, NULL))
        return config_error(config, err);
    strncpy(d.info.architecture, type, sizeof d.info.architecture - 1);
    read_names(arch, &d.names);
    read_info(config, &d.info);
    read_attention(arch, config, &d);
    d.layers = mem_alloc(d.info.n_layers, sizeof *d.layers);
    if (!d.layers)
        config_fail(config, ENOMEM, "no memory for %u layers", d.info.n_layers);
    if (!config_error(config, NULL)) {
        read_ropes(arch, config, &d);
        read_windows(arch, config, &d);
        read_mlps(arch, config, &d);
        read_scalars(arch, config, &d);
        if (arch->refine && !config_error(config, NULL)) /* it may rely on what was read */
            arch->refine(&d, config);
        check(config, &d);
    }
    r = config_error(config, err);
    if (r < 0)
        desc_clear(&d);
    else
        *ret = d;
    return r;
}
