/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rope tables. Formulas and their float32 roundings are those of Hugging Face transformers'
 * modeling_rope_utils: "default", "linear", "dynamic" (NTK by parts of the length), "yarn" (Peng et
 * al. 2023, appendix A) and "llama3" (Llama 3.1's wavelengths). Both spellings are read:
 * rope_parameters (flat, or one entry for each layer type) and rope_theta with rope_scaling.
 */
#include "model/desc.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define THETA_MIN 1.001 /* yarn divides by its logarithm */
#define THETA_MAX 1e12
#define FACTOR_MAX 1e6

/* Where a table's values are looked up. */
struct rope_source {
    struct config *config;
    json_t *params; /* the scaling object, or NULL */
    double theta;
    double max_position, original; /* the model's, and that before it was stretched */
};

/* The older spelling of Gemma 3 and MiMo V2: windowed layers have a base of their own and no
 * scaling. */
#define LOCAL_BASE "rope_local_base_freq|swa_rope_theta"

static bool has_local_base(struct config *config, const char *layer_type)
{
    return layer_type && !strcmp(layer_type, "sliding_attention") &&
           !config_has(config, NULL, "rope_parameters") && config_has(config, NULL, LOCAL_BASE);
}

static json_t *find_params(struct config *config, const char *layer_type)
{
    json_t *params = config_get(config, NULL, "rope_parameters|rope_scaling"), *own;
    if (params && !json_is_object(params))
        config_fail(config, EINVAL, "rope_parameters|rope_scaling is not an object");
    if (!json_is_object(params) || has_local_base(config, layer_type))
        return NULL;
    own = layer_type ? json_object_get(params, layer_type) : NULL;
    return json_is_object(own) ? own : params;
}

/* base^(2j/rotary) for each j, in float32 throughout. */
static void powers(double theta, uint32_t rotary, float *pos_freq)
{
    for (uint32_t j = 0; j < rotary / 2; j++)
        pos_freq[j] = powf((float)theta, (float)(2 * j) / (float)rotary);
}

static void table_default(double theta, uint32_t rotary, float *inv_freq)
{
    powers(theta, rotary, inv_freq);
    for (uint32_t j = 0; j < rotary / 2; j++)
        inv_freq[j] = 1.0f / inv_freq[j];
}

static void table_linear(const struct rope_source *from, struct desc_rope *rope)
{
    double factor = config_number(from->config, from->params, "factor", NAN, 1e-3, FACTOR_MAX);
    for (uint32_t j = 0; j < rope->rotary / 2; j++)
        rope->inv_freq[j] /= (float)factor;
}

static void table_dynamic(const struct rope_source *from, struct desc_rope *rope)
{
    double alpha = config_number(from->config, from->params, "alpha", 0, 0, FACTOR_MAX);
    if (rope->rotary < 4)
        config_fail(from->config, EINVAL, "dynamic rope scaling of %u elements", rope->rotary);
    else if (alpha > 0) { /* Hunyuan: one stretch for every length */
        rope->theta *= pow(alpha, rope->rotary / (rope->rotary - 2.0));
        table_default(rope->theta, rope->rotary, rope->inv_freq);
        return;
    }
    rope->kind = EMBER_ROPE_DYNAMIC_NTK;
    rope->factor = config_number(from->config, from->params, "factor", NAN, 1.0, FACTOR_MAX);
    rope->max_position = from->max_position;
}

static void table_llama3(const struct rope_source *from, struct desc_rope *rope)
{
    struct config *c = from->config;
    double factor = config_number(c, from->params, "factor", NAN, 1e-3, FACTOR_MAX);
    double low = config_number(c, from->params, "low_freq_factor", NAN, 1e-6, FACTOR_MAX);
    double high = config_number(c, from->params, "high_freq_factor", NAN, 1e-6, FACTOR_MAX);
    float longest = (float)(from->original / low), shortest = (float)(from->original / high);

    for (uint32_t j = 0; j < rope->rotary / 2; j++) {
        float f = rope->inv_freq[j], wavelength = (float)(2 * M_PI) / f, smooth;
        if (wavelength > longest)
            rope->inv_freq[j] = f / (float)factor;
        else if (!(wavelength < shortest)) {
            smooth = ((float)from->original / wavelength - (float)low) / (float)(high - low);
            rope->inv_freq[j] = (1.0f - smooth) * f / (float)factor + smooth * f;
        }
    }
}

/* The dimension at which `rotations` full turns are made over the original length. */
static double correction_dim(const struct rope_source *from, double rotations, uint32_t rotary)
{
    return rotary * log(from->original / (rotations * 2 * M_PI)) / (2 * log(from->theta));
}

static double yarn_mscale(double scale, double mscale)
{
    return scale <= 1 ? 1.0 : 0.1 * mscale * log(scale) + 1.0;
}

static double yarn_attention_factor(const struct rope_source *from, double factor)
{
    struct config *c = from->config;
    double mscale = config_number(c, from->params, "mscale", 0, -100, 100);
    double all = config_number(c, from->params, "mscale_all_dim", 0, -100, 100);
    double fallback = mscale != 0 && all != 0
                          ? yarn_mscale(factor, mscale) / yarn_mscale(factor, all)
                          : yarn_mscale(factor, 1);
    return config_number(c, from->params, "attention_factor", fallback, 1e-6, 1e6);
}

double desc_rope_scale(struct config *config)
{
    json_t *params = find_params(config, NULL);
    const char *kind = params ? config_string(config, params, "rope_type|type", "default") : "";
    double all, factor;
    if (!params || !strcmp(kind, "default"))
        return 1;
    all = config_number(config, params, "mscale_all_dim", 0, -100, 100);
    factor = config_number(config, params, "factor", 1, 1e-3, FACTOR_MAX);
    return all != 0 ? pow(yarn_mscale(factor, all), 2) : 1;
}

static void table_yarn(const struct rope_source *from, struct desc_rope *rope)
{
    struct config *c = from->config;
    double factor = config_number(c, from->params, "factor", from->max_position / from->original,
                                  1e-3, FACTOR_MAX);
    double fast = config_number(c, from->params, "beta_fast", 32, 0, 1e6);
    double slow = config_number(c, from->params, "beta_slow", 1, 0, 1e6);
    double low = correction_dim(from, fast > 0 ? fast : 32, rope->rotary);
    double high = correction_dim(from, slow > 0 ? slow : 1, rope->rotary);

    if (config_bool(c, from->params, "truncate", true)) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, rope->rotary - 1.0);
    if (low == high)
        high += 0.001;
    powers(from->theta, rope->rotary, rope->inv_freq);
    for (uint32_t j = 0; j < rope->rotary / 2; j++) {
        float pos = rope->inv_freq[j];
        float ramp = ((float)j - (float)low) / (float)(high - low);
        float keep = 1.0f - fminf(fmaxf(ramp, 0.0f), 1.0f);
        rope->inv_freq[j] = 1.0f / ((float)factor * pos) * (1.0f - keep) + 1.0f / pos * keep;
    }
    rope->attention_factor = yarn_attention_factor(from, factor);
}

/* What needs no table of its own. */
static void table_plain(const struct rope_source *from, struct desc_rope *rope)
{
}

/* X(word, function) */
#define ROPE_KINDS(X)                                                                              \
    X("default", table_plain)                                                                      \
    X("mrope", table_plain) /* text alone: all sections have the same position */                  \
    X("linear", table_linear)                                                                      \
    X("dynamic", table_dynamic)                                                                    \
    X("yarn", table_yarn)                                                                          \
    X("llama3", table_llama3)

static void fill(const struct rope_source *from, const char *kind, struct desc_rope *rope)
{
    table_default(from->theta, rope->rotary, rope->inv_freq);
#define X(word, function)                                                                          \
    if (!strcmp(kind, word)) {                                                                     \
        function(from, rope);                                                                      \
        return;                                                                                    \
    }
    ROPE_KINDS(X)
#undef X
#define X(word, function) " " word
    config_fail(from->config, ENOTSUP, "rope type \"%s\" is not known; known are:" ROPE_KINDS(X),
                kind);
#undef X
}

static bool rope_equal(const struct desc_rope *a, const struct desc_rope *b)
{
    return a->kind == b->kind && a->rotary == b->rotary &&
           a->attention_factor == b->attention_factor && a->theta == b->theta &&
           a->factor == b->factor && a->max_position == b->max_position &&
           !memcmp(a->inv_freq, b->inv_freq, a->rotary / 2 * sizeof *a->inv_freq);
}

int32_t desc_add_rope(struct desc *desc, struct config *config, const char *layer_type,
                      uint32_t head_dim, double partial, double theta)
{
    struct rope_source from = {.config = config, .params = find_params(config, layer_type)};
    struct desc_rope rope = {.kind = EMBER_ROPE_STATIC, .attention_factor = 1};
    const char *kind = "default";

    partial = config_number(config, NULL, "partial_rotary_factor|rotary_pct", partial, 0, 1);
    if (config_has(config, NULL, "rotary_dim"))
        partial = (double)config_int(config, NULL, "rotary_dim", 0, 0, head_dim) / head_dim;
    theta = config_number(
        config, NULL, has_local_base(config, layer_type) ? "rope_local_base_freq" : "rope_theta",
        theta, THETA_MIN, THETA_MAX);
    if (from.params) {
        partial = config_number(config, from.params, "partial_rotary_factor", partial, 0, 1);
        theta = config_number(config, from.params, "rope_theta", theta, THETA_MIN, THETA_MAX);
        kind = config_string(config, from.params, "rope_type|type", "default");
    }
    from.theta = rope.theta = theta;
    from.max_position = desc->info.max_positions;
    from.original =
        config_number(config, NULL, "original_max_position_embeddings", from.max_position, 1, 1e9);
    if (from.params)
        from.original = config_number(config, from.params, "original_max_position_embeddings",
                                      from.original, 1, 1e9);
    rope.rotary = (uint32_t)(head_dim * partial) & ~1u;
    if (rope.rotary == 0)
        return -1;
    if (desc->n_ropes == DESC_ROPES ||
        !(rope.inv_freq = mem_alloc(rope.rotary / 2, sizeof *rope.inv_freq))) {
        config_fail(config, ENOMEM, "no room for rope table %u", desc->n_ropes);
        return -1;
    }
    fill(&from, kind, &rope);
    for (uint32_t j = 0; j < rope.rotary / 2; j++)
        if (!isfinite(rope.inv_freq[j]))
            config_fail(config, EINVAL, "rope scaling \"%s\" gives no finite frequencies", kind);
    for (uint32_t i = 0; i < desc->n_ropes; i++)
        if (rope_equal(&desc->ropes[i], &rope)) {
            free(rope.inv_freq);
            return (int32_t)i;
        }
    desc->ropes[desc->n_ropes] = rope;
    return (int32_t)desc->n_ropes++;
}
