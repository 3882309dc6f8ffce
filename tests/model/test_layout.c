/* SPDX-License-Identifier: Apache-2.0 */
/* From synthetic checkpoints: layouts, what is wrong with a checkpoint, plans, manifests. */
#include "configs.h"

#include <errno.h>
#include <sys/stat.h>

#include "model/model_private.h"
#include "model/safetensors.h"
#include "model/synth.h"
#include "run_model.h"

#define MOE                                                                                        \
    ",\"num_experts\":4,\"num_experts_per_tok\":2,\"moe_intermediate_size\":8,\"head_dim\":16"

static char dir[64], out[80];

static int setup(void **state)
{
    make_dir(dir);
    snprintf(out, sizeof out, "%s/out", dir);
    return 0;
}

static int teardown(void **state)
{
    remove_dir(dir);
    return 0;
}

static int synth(const char *json, const struct synth_options *options, struct error *err)
{
    char path[80];
    snprintf(path, sizeof path, "%s/config.json", dir);
    write_file(dir, "config.json", json, strlen(json));
    return synth_write(path, out, options, NULL, NULL, err);
}

/* A checkpoint of this config, its model and layout. */
struct opened {
    struct checkpoint *checkpoint;
    struct model *model;
    struct weights_layout *layout;
};

static void open_synth(const char *json, const struct synth_options *options, struct opened *o)
{
    struct error err = {0};
    const char *config;
    size_t len;
    memset(o, 0, sizeof *o);
    if (synth(json, options, &err) < 0 || checkpoint_open(out, &o->checkpoint, &err) < 0)
        fail_msg("%s", err.text);
    config = checkpoint_config(o->checkpoint, &len);
    if (model_from_config(config, len, out, &o->model, &err) < 0 ||
        model_layout(o->model, o->checkpoint, NULL, &o->layout, &err) < 0)
        fail_msg("%s", err.text);
}

static void close_opened(struct opened *o)
{
    weights_layout_free(o->layout);
    model_free(o->model);
    checkpoint_free(o->checkpoint);
    memset(o, 0, sizeof *o);
    remove_dir(out);
}

static const struct weight *find_weight(const struct weights_layout *layout, const char *name)
{
    for (uint32_t i = 0; i < layout->n_weights; i++)
        if (!strcmp(layout->weights[i].name, name))
            return &layout->weights[i];
    fail_msg("no weight %s", name);
    return NULL;
}

/* Order, alignment, no overlap; sources fill their tensors. */
static void check_layout(const struct weights_layout *l)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < l->n_weights; i++) {
        const struct weight *w = &l->weights[i];
        uint64_t filled = 0;
        assert_int_equal(w->offset % 64, 0);
        assert_true(w->offset >= at);
        at = w->offset + w->bytes;
        for (uint32_t s = w->first_source; s < w->first_source + w->n_sources; s++) {
            assert_int_equal(l->sources[s].offset, filled);
            assert_true(!l->sources[s].tensor != !l->sources[s].constant);
            filled += l->sources[s].bytes;
        }
        assert_true(w->layout == EMBER_LAYOUT_TILES ? filled <= w->bytes : filled == w->bytes);
    }
    assert_true(at <= l->bytes);
}

static void test_fused(void **state)
{
    struct synth_options options = {.dtype = EMBER_BF16};
    struct opened o;
    const struct weight *w;
    open_synth(CONFIG("qwen2", ""), &options, &o);
    check_layout(o.layout);
    assert_string_equal(o.layout->weights[0].name, "embed");
    assert_string_equal(o.layout->weights[o.layout->n_weights - 1].name, "head");
    w = find_weight(o.layout, "layers.1.qkv");
    assert_int_equal(w->dim[0], 32 + 16 + 16);
    assert_int_equal(w->dim[1], 32);
    assert_int_equal(w->dtype, EMBER_BF16);
    assert_int_equal(w->n_sources, 3);
    assert_string_equal(o.layout->sources[w->first_source + 1].tensor,
                        "model.layers.1.self_attn.k_proj.weight");
    assert_int_equal(o.layout->sources[w->first_source + 1].offset, 32 * 32 * 2);
    assert_int_equal(find_weight(o.layout, "layers.0.norm_attn_in")->offset % 4096, 0);
    assert_int_equal(find_weight(o.layout, "layers.1.norm_attn_in")->offset % 4096, 0);
    w = find_weight(o.layout, "layers.1.qkv_bias");
    assert_int_equal(w->rank, 1);
    assert_int_equal(w->dim[0], 64);
    w = find_weight(o.layout, "rope.0");
    assert_int_equal(w->dtype, EMBER_F32);
    assert_true(((const float *)o.layout->sources[w->first_source].constant)[0] == 1.0f);
    close_opened(&o);
}

static void test_experts(void **state)
{
    struct synth_options options = {.dtype = EMBER_F32};
    struct opened o;
    const struct weight *w;
    open_synth(CONFIG("qwen3_moe", ",\"tie_word_embeddings\":true" MOE), &options, &o);
    check_layout(o.layout);
    w = find_weight(o.layout, "layers.0.experts_gate_up");
    assert_int_equal(w->rank, 3);
    assert_int_equal(w->dim[0], 4);
    assert_int_equal(w->dim[1], 16);
    assert_int_equal(w->dim[2], 32);
    assert_int_equal(w->n_sources, 8);
    assert_string_equal(o.layout->sources[w->first_source + 5].tensor,
                        "model.layers.0.mlp.experts.2.up_proj.weight");
    assert_int_equal(o.layout->sources[w->first_source + 5].offset, (2 * 16 + 8) * 32 * 4);
    w = find_weight(o.layout, "layers.0.experts_down");
    assert_int_equal(w->dim[1], 32);
    assert_int_equal(w->dim[2], 8);
    for (uint32_t i = 0; i < o.layout->n_weights; i++) /* tied: no head of its own */
        assert_string_not_equal(o.layout->weights[i].name, "head");
    close_opened(&o);
}

/* Rewrites model.safetensors: each tensor's name, dtype or shape may be changed by an edit of the
 * header. */
static void edit_header(const char *from, const char *to)
{
    char path[128], *at;
    uint64_t len;
    static char bytes[1 << 20];
    snprintf(path, sizeof path, "%s/model.safetensors", out);
    FILE *f = fopen(path, "r+");
    size_t n = fread(bytes, 1, sizeof bytes, f);
    memcpy(&len, bytes, 8);
    assert_int_equal(strlen(from), strlen(to));
    at = memmem(bytes + 8, len, from, strlen(from));
    assert_non_null(at);
    memcpy(at, to, strlen(to));
    rewind(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    fclose(f);
}

static void layout_refused(const char *from, const char *to, int code, const char *words)
{
    struct synth_options options = {.dtype = EMBER_BF16};
    struct weights_layout *layout = NULL;
    struct checkpoint *c = NULL;
    struct error err = {0};
    struct opened o;
    open_synth(CONFIG("llama", ""), &options, &o);
    edit_header(from, to);
    if (checkpoint_open(out, &c, &err) < 0)
        fail_msg("%s", err.text);
    int r = model_layout(o.model, c, NULL, &layout, &err);
    if (r != code || !strstr(err.text, words) || layout)
        fail_msg("%d \"%s\", not %d \"%s\"", r, err.text, code, words);
    checkpoint_free(c);
    close_opened(&o);
}

static void test_wrong_tensors(void **state)
{
    layout_refused("model.layers.1.mlp.up_proj", "model.layers.1.mlp.xp_proj", -ENOENT,
                   "tensor model.layers.1.mlp.up_proj.weight is missing");
    layout_refused("q_proj.weight\":{\"dtype\":\"BF16\",\"shape\":[32,32]",
                   "q_proj.weight\":{\"dtype\":\"BF16\",\"shape\":[16,64]", -EINVAL,
                   "self_attn.q_proj.weight has shape [16, 64]; config.json asks for [32, 32]");
    layout_refused("q_proj.weight\":{\"dtype\":\"BF16\"", "q_proj.weight\":{\"dtype\":\"I16\" ",
                   -ENOTSUP, "has dtype I16");
    layout_refused("q_proj.weight\":{\"dtype\":\"BF16\"", "q_proj.weight\":{\"dtype\":\"F16\" ",
                   -ENOTSUP, "k_proj.weight is BF16 but model.layers.0.self_attn.q_proj.weight");
    layout_refused("lm_head", "lm_heap", -ENOENT, "lm_head.weight is missing");
}

/* The language model of a wrapper lies under another prefix. */
static void test_prefix(void **state)
{
    struct synth_options options = {.dtype = EMBER_BF16};
    struct opened o;
    char old[128], new[128];
    static char text[1 << 20], renamed[1 << 20];
    open_synth(CONFIG("llama", ""), &options, &o);
    snprintf(old, sizeof old, "%s/model.safetensors", out);
    FILE *f = fopen(old, "r");
    size_t n = fread(text, 1, sizeof text, f), at = 8;
    uint64_t len, new_len;
    fclose(f);
    memcpy(&len, text, 8);
    for (size_t i = 8; i < 8 + len; i++) {
        if (!memcmp(text + i, "\"model.", 7)) {
            memcpy(renamed + at, "\"model.language_model.", 22);
            at += 22;
            i += 6;
        } else
            renamed[at++] = text[i];
    }
    new_len = at - 8;
    memcpy(renamed, &new_len, 8);
    memcpy(renamed + at, text + 8 + len, n - 8 - len);
    write_file(out, "model.safetensors", renamed, at + n - 8 - len);
    struct checkpoint *c = NULL;
    struct weights_layout *layout = NULL;
    struct error err = {0};
    if (checkpoint_open(out, &c, &err) < 0 || model_layout(o.model, c, NULL, &layout, &err) < 0)
        fail_msg("%s", err.text);
    snprintf(new, sizeof new, "%s",
             layout->sources[find_weight(layout, "layers.1.qkv")->first_source].tensor);
    assert_string_equal(new, "model.language_model.layers.1.self_attn.q_proj.weight");
    weights_layout_free(layout);
    checkpoint_free(c);
    close_opened(&o);
}

/* ---- plans ---- */

static void test_segments(void **state)
{
    struct synth_options options = {.dtype = EMBER_BF16};
    struct plan_request request = {.tokens = 8, .seqs = 4, .rows = 4};
    struct plan *plan = NULL, *again = NULL, *taps = NULL;
    struct error err = {0};
    struct opened o;
    open_synth(CONFIG("llama", ""), &options, &o);
    if (model_plan(o.model, o.layout, &request, &plan, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(plan->n_segments, 1 + 2 + 2);
    assert_int_equal(plan->segments[0].kind, SEGMENT_EMBED);
    assert_int_equal(plan->segments[1].kind, SEGMENT_LAYER);
    assert_int_equal(plan->segments[1].variant, plan->segments[2].variant);
    assert_int_equal(plan->segments[3].kind, SEGMENT_HEAD_PROBE);
    assert_int_equal(plan->segments[4].kind, SEGMENT_HEAD);
    assert_int_equal(plan->probe_rows, MODEL_PROBE_ROWS);
    assert_int_equal(plan->final_hidden.dim[1], 32);
    assert_int_equal(plan->io.shape.pages, 4);
    assert_int_equal(plan->arena_bytes[EMBER_ARENA_KV], model_info(o.model)->kv_page_bytes[KV_F32]);
    assert_int_equal(plan->arena_bytes[EMBER_ARENA_WEIGHTS], o.layout->bytes);
    assert_int_equal(model_plan(o.model, o.layout, &request, &again, &err), 0);
    struct digest a = plan_digest(plan), b = plan_digest(again);
    assert_true(digest_equal(&a, &b));
    request.taps = true;
    assert_int_equal(model_plan(o.model, o.layout, &request, &taps, &err), 0);
    b = plan_digest(taps);
    assert_false(digest_equal(&a, &b));
    plan_free(plan);
    plan_free(again);
    plan_free(taps);
    request.rows = 0;
    plan = NULL;
    assert_int_equal(model_plan(o.model, o.layout, &request, &plan, &err), -EINVAL);
    assert_null(plan);
    close_opened(&o);
}

/* A dense and a MoE layer are different variants. */
static void test_variants(void **state)
{
    struct synth_options options = {.dtype = EMBER_BF16};
    struct plan_request request = {.tokens = 8, .seqs = 4, .rows = 4};
    struct plan *plan = NULL;
    struct error err = {0};
    struct opened o;
    open_synth(CONFIG("qwen3_moe", ",\"mlp_only_layers\":[1]" MOE), &options, &o);
    if (model_plan(o.model, o.layout, &request, &plan, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_not_equal(plan->segments[1].variant, plan->segments[2].variant);
    plan_free(plan);
    close_opened(&o);
}

/* A layout of one model is not taken for another's. */
static void test_foreign_layout(void **state)
{
    struct synth_options options = {.dtype = EMBER_BF16};
    struct plan_request request = {.tokens = 8, .seqs = 4, .rows = 4};
    struct plan *plan = NULL;
    struct model *other = NULL;
    struct error err = {0};
    struct opened o;
    open_synth(CONFIG("llama", ""), &options, &o);
    assert_int_equal(parse_config(CONFIG("llama", ",\"head_dim\":8"), &other, &err), 0);
    assert_int_equal(model_plan(other, o.layout, &request, &plan, &err), -EINVAL);
    model_free(other);
    close_opened(&o);
}

/* ---- manifests ---- */

static void test_manifest(void **state)
{
    struct synth_options options = {.dtype = EMBER_F16};
    struct weights_layout *layout = NULL;
    struct model *model = NULL;
    struct buffer bytes = {0};
    struct error err = {0};
    struct opened o;
    const char *config;
    char *where = NULL;
    size_t len;
    open_synth(CONFIG("qwen3_moe", MOE), &options, &o);
    memset(o.layout->digest.bytes, 0xab, sizeof o.layout->digest.bytes);
    config = checkpoint_config(o.checkpoint, &len);
    assert_int_equal(manifest_write(config, len, out, o.layout, &bytes, &err), 0);
    if (manifest_read(bytes.data, bytes.len, &model, &layout, &where, &err) < 0)
        fail_msg("%s", err.text);
    assert_string_equal(where, out);
    assert_true(digest_equal(&layout->digest, &o.layout->digest));
    assert_int_equal(layout->bytes, o.layout->bytes);
    assert_int_equal(layout->n_weights, o.layout->n_weights);
    assert_int_equal(layout->n_sources, o.layout->n_sources);
    for (uint32_t i = 0; i < layout->n_weights; i++) {
        assert_string_equal(layout->weights[i].name, o.layout->weights[i].name);
        assert_int_equal(layout->weights[i].offset, o.layout->weights[i].offset);
        assert_int_equal(layout->weights[i].dtype, o.layout->weights[i].dtype);
    }
    free(where);
    weights_layout_free(layout);
    model_free(model);
    model = NULL;
    layout = NULL;
    for (size_t i = 0; i < bytes.len; i++) { /* any bit flipped, any length cut */
        bytes.data[i] ^= (char)(1 << i % 8);
        int r = manifest_read(bytes.data, bytes.len, &model, &layout, NULL, &err);
        if (r >= 0)
            fail_msg("byte %zu may be damaged", i);
        bytes.data[i] ^= (char)(1 << i % 8);
        assert_int_equal(manifest_read(bytes.data, i, &model, &layout, NULL, &err), -EBADMSG);
    }
    assert_int_equal(manifest_read(bytes.data, bytes.len, &model, &layout, NULL, &err), 0);
    weights_layout_free(layout);
    model_free(model);
    buffer_free(&bytes);
    close_opened(&o);
}

/* ---- synthetic checkpoints ---- */

static int stop(void *ctx, uint64_t done, uint64_t total)
{
    return done > 5000 ? -ECANCELED : 0;
}

static void read_tensor(const char *name, void *to, size_t n)
{
    struct checkpoint *c = NULL;
    struct error err = {0};
    if (checkpoint_open(out, &c, &err) < 0 ||
        checkpoint_read(c, checkpoint_find(c, name), 0, to, n, &err) < 0)
        fail_msg("%s", err.text);
    checkpoint_free(c);
}

static void test_synth_same(void **state)
{
    struct synth_options options = {.seed = 3, .dtype = EMBER_F32};
    const char *name = "model.layers.1.mlp.down_proj.weight";
    float one[48 * 32], two[48 * 32], other[48 * 32];
    double sum = 0, squares = 0;
    struct opened o;
    open_synth(CONFIG("llama", ""), &options, &o);
    read_tensor(name, one, sizeof one);
    assert_int_equal(model_info(o.model)->n_layers, 2);
    close_opened(&o);
    options.shard_bytes = 20000; /* in shards, the same */
    open_synth(CONFIG("llama", ""), &options, &o);
    read_tensor(name, two, sizeof two);
    assert_memory_equal(one, two, sizeof one);
    char path[128];
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", out);
    assert_int_equal(access(path, R_OK), 0);
    close_opened(&o);
    options.seed = 4;
    open_synth(CONFIG("llama", ""), &options, &o);
    read_tensor(name, other, sizeof other);
    assert_memory_not_equal(one, other, sizeof one);
    close_opened(&o);
    for (size_t i = 0; i < ARRAY_LEN(one); i++) {
        sum += one[i];
        squares += (double)one[i] * one[i];
    }
    assert_true(sum / ARRAY_LEN(one) < 0.01 && sum / ARRAY_LEN(one) > -0.01);
    assert_true(squares / ARRAY_LEN(one) * 48 > 0.9 && squares / ARRAY_LEN(one) * 48 < 1.1);
}

/* Halves are the float32 values rounded. */
static void test_synth_dtypes(void **state)
{
    struct synth_options options = {.seed = 3, .dtype = EMBER_F32};
    const char *name = "model.layers.0.mlp.down_proj.weight";
    float full[1536];
    uint16_t half[1536], brain[1536];
    struct opened o;
    open_synth(CONFIG("llama", ""), &options, &o);
    read_tensor(name, full, sizeof full);
    close_opened(&o);
    options.dtype = EMBER_F16;
    open_synth(CONFIG("llama", ""), &options, &o);
    read_tensor(name, half, sizeof half);
    close_opened(&o);
    options.dtype = EMBER_BF16;
    open_synth(CONFIG("llama", ""), &options, &o);
    read_tensor(name, brain, sizeof brain);
    close_opened(&o);
    for (size_t i = 0; i < ARRAY_LEN(full); i++) {
        _Float16 h;
        uint32_t bits = (uint32_t)brain[i] << 16;
        float b;
        memcpy(&h, &half[i], 2);
        memcpy(&b, &bits, 4);
        if (h != (_Float16)full[i])
            fail_msg("element %zu: %g as f16 is %g", i, full[i], (double)h);
        if (!(__builtin_fabsf(b - full[i]) <= __builtin_fabsf(full[i]) / 256))
            fail_msg("element %zu: %g as bf16 is %g", i, full[i], b);
    }
}

static void test_synth_cut(void **state)
{
    struct synth_options options = {.dtype = EMBER_BF16, .max_layers = 1};
    struct opened o;
    open_synth(CONFIG("qwen3", ",\"layer_types\":[\"full_attention\",\"full_attention\"],"
                               "\"quantization_config\":{\"quant_method\":\"fp8\"}"),
               &options, &o);
    assert_int_equal(model_info(o.model)->n_layers, 1);
    close_opened(&o);
}

static void test_synth_refuses(void **state)
{
    struct synth_options options = {.dtype = EMBER_BF16};
    struct error err = {0};
    struct stat st;
    char path[80], file[128];
    assert_int_equal(synth(CONFIG("mamba", ""), &options, &err), -ENOTSUP);
    assert_int_equal(synth(CONFIG("llama", ""), &options, &err), 0);
    assert_int_equal(synth(CONFIG("llama", ""), &options, &err), -EEXIST);
    remove_dir(out);
    snprintf(path, sizeof path, "%s/config.json", dir);
    assert_int_equal(synth_write(path, out, &options, stop, NULL, &err), -ECANCELED);
    snprintf(file, sizeof file, "%s/model.safetensors", out);
    assert_int_equal(stat(file, &st), -1);
    options.dtype = EMBER_I8;
    assert_int_equal(synth_write(path, out, &options, NULL, NULL, &err), -EINVAL);
    /* 13 TB */
    options.dtype = EMBER_F32;
    const char *big =
        "{\"model_type\":\"llama\",\"hidden_size\":65536,\"intermediate_size\":262144,"
        "\"num_attention_heads\":64,\"num_hidden_layers\":48,\"vocab_size\":300,"
        "\"max_position_embeddings\":64}";
    assert_int_equal(synth(big, &options, &err), -ENOSPC);
    assert_non_null(strstr(err.text, "MiB free"));
}

int main(void)
{
#define T(test) cmocka_unit_test_setup_teardown(test, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_fused),      T(test_experts),      T(test_wrong_tensors),  T(test_prefix),
        T(test_segments),   T(test_variants),     T(test_foreign_layout), T(test_manifest),
        T(test_synth_same), T(test_synth_dtypes), T(test_synth_cut),      T(test_synth_refuses),
    };
    return cmocka_run_group_tests_name("layout", tests, NULL, NULL);
}
