/* SPDX-License-Identifier: Apache-2.0 */
/* What configs come to: refusals, rope tables against values derived from the papers' formulas,
 * windows. */
#include "configs.h"

#include <errno.h>
#include <math.h>

#include "model/model_private.h"
#include "shared_dir.h"

static struct model *accept(const char *json)
{
    struct model *model = NULL;
    struct error err = {0};
    if (parse_config(json, &model, &err) < 0)
        fail_msg("%s\n  gives \"%s\"", json, err.text);
    return model;
}

static void test_refusals(void **state)
{
    expect_refused("", -EINVAL, "config.json: line 1");
    expect_refused("[1]", -EINVAL, "not a JSON object");
    expect_refused("{}", -EINVAL, "model_type is missing");
    expect_refused("{\"model_type\":\"mamba\"}", -ENOTSUP, "known are: llama");
    expect_refused(CONFIG("llama", ",\"rope_theta\":NaN"), -EINVAL, "NaN or Infinity");
    expect_refused(CONFIG("llama", ",\"rope_theta\":-Infinity"), -EINVAL, "NaN or Infinity");
    expect_refused(CONFIG("llama", ",\"rope_theta\":1e999"), -EINVAL, "overflow");
    expect_refused(CONFIG("llama", ",\"rope_theta\":0"), -EINVAL, "rope_theta");
    expect_refused(CONFIG("llama", ",\"head_dim\":-8"), -EINVAL, "head_dim is -8");
    expect_refused(CONFIG("llama", ",\"head_dim\":1.5"), -EINVAL, "not a whole number");
    expect_refused(CONFIG("llama", ",\"hidden_act\":\"softsign\""), -ENOTSUP, "known are: silu");
    expect_refused(CONFIG("llama", ",\"eos_token_id\":\"x\""), -EINVAL, "eos_token_id");
    expect_refused(CONFIG("llama", ",\"tie_word_embeddings\":\"x\""), -EINVAL, "true nor false");
    expect_refused(CONFIG("llama", ",\"rope_scaling\":{\"type\":\"odd\",\"factor\":2}"), -ENOTSUP,
                   "rope type \"odd\" is not known");
    expect_refused(CONFIG("llama", ",\"rope_scaling\":{\"type\":\"linear\"}"), -EINVAL,
                   "factor is missing");
    expect_refused(CONFIG("qwen3_moe", ",\"num_experts\":4,\"num_experts_per_tok\":5,"
                                       "\"moe_intermediate_size\":8"),
                   -EINVAL, "5 experts a token of 4");
    expect_refused(CONFIG("qwen2", ",\"use_sliding_window\":true,\"sliding_window\":8,"
                                   "\"layer_types\":[\"full_attention\"]"),
                   -EINVAL, "layer_types has no word for layer 0");
}

/* A config with one value replaced by another. */
static void with_value(char *out, size_t room, const char *key, const char *value)
{
    const char *whole = CONFIG("llama", ""), *at = strstr(whole, key), *end;
    assert_non_null(at);
    at += strlen(key) + 2;
    end = at + strcspn(at, ",}");
    snprintf(out, room, "%.*s%s%s", (int)(at - whole), whole, value, end);
}

static void test_absurd(void **state)
{
    static const char *const keys[] = {
        "hidden_size",         "intermediate_size", "num_attention_heads",    "num_hidden_layers",
        "num_key_value_heads", "vocab_size",        "max_position_embeddings"};
    static const char *const values[] = {"0",     "-1",   "4000000000", "9223372036854775807",
                                         "\"8\"", "1e300"};
    char json[1024];
    for (size_t k = 0; k < ARRAY_LEN(keys); k++)
        for (size_t v = 0; v < ARRAY_LEN(values); v++) {
            with_value(json, sizeof json, keys[k], values[v]);
            expect_refused(json, -EINVAL, keys[k]);
        }
    with_value(json, sizeof json, "num_hidden_layers", "1025");
    expect_refused(json, -EINVAL, "not within 1..1024");
    with_value(json, sizeof json, "num_key_value_heads", "4");
    expect_refused(json, -EINVAL, "2 attention heads over 4 key-value heads");
}

static void test_info(void **state)
{
    struct model *m = accept(CONFIG("llama", ",\"eos_token_id\":[7,9],\"bos_token_id\":null"));
    const struct model_info *info = model_info(m);
    assert_string_equal(info->architecture, "llama");
    assert_int_equal(info->bos_id, -1);
    assert_int_equal(info->n_eos, 2);
    assert_int_equal(info->eos_ids[1], 9);
    assert_int_equal(info->rope_exact_len, 0);
    /* 2 layers, K and V, 1 head of 16, 16 tokens, float32 */
    assert_int_equal(info->kv_page_bytes[KV_F32], 2 * 2 * 16 * 16 * 4);
    assert_int_equal(info->kv_page_bytes[KV_BF16], 2 * 2 * 16 * 16 * 2);
    assert_int_equal(info->kv_page_bytes[KV_INT8], 2 * 2 * (16 * 16 + 16 * 4));
    enum kv_kind kind;
    struct error err = {0};
    assert_int_equal(kv_kind_find("int8", &kind, &err), 0);
    assert_int_equal(kind, KV_INT8);
    assert_int_equal(kv_kind_find("int4", &kind, &err), -EINVAL);
    assert_non_null(strstr(err.text, "bf16"));
    assert_int_equal(info->parameters,
                     2 * 300 * 32 + 32 +
                         2 * (2 * 32 + (32 + 16 + 16) * 32 + 32 * 32 + 3 * 48 * 32));
    model_free(m);
}

/* The language model of a multimodal wrapper. */
static void test_wrapper(void **state)
{
    struct model *m =
        accept("{\"model_type\":\"x\",\"eos_token_id\":5,\"tie_word_embeddings\":true,"
               "\"text_config\":" CONFIG("qwen3", ",\"head_dim\":16") "}");
    assert_string_equal(model_info(m)->architecture, "qwen3");
    assert_int_equal(model_info(m)->eos_ids[0], 5);
    assert_true(m->desc.tied);
    model_free(m);
}

struct rope_case {
    const char *json;
    double attention_factor;
    double inv_freq[8];
};

static const struct rope_case rope_cases[] = {
#define DEFAULT_8                                                                                  \
    {                                                                                              \
        1.0, 0.316227766, 0.1, 0.0316227766, 0.01, 0.00316227766, 0.001, 0.000316227766            \
    }
    {CONFIG("llama", ""), 1, DEFAULT_8},
    {CONFIG("llama", ",\"rope_scaling\":null,\"rope_theta\":10000.0"), 1, DEFAULT_8},
    {CONFIG("llama", ",\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":10000}"), 1,
     DEFAULT_8},
    {CONFIG("llama", ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":4.0}"),
     1,
     {0.25, 0.0790569415, 0.025, 0.00790569415, 0.0025, 0.000790569415, 0.00025, 7.90569415e-05}},
    {CONFIG("llama",
            ",\"rope_theta\":500000.0,\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,"
            "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
            "\"original_max_position_embeddings\":32}"),
     1,
     {1, 0.0242403431, 0.00470075387, 0.000911583092, 0.000176776695, 3.4281022e-05, 6.64786987e-06,
      1.28917317e-06}},
    {CONFIG("llama", ",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,"
                     "\"original_max_position_embeddings\":4096}"),
     1.1386294361119891,
     {1, 0.316227766, 0.1, 0.025693506, 0.00625, 0.00138349648, 0.00025, 7.90569415e-05}},
    {CONFIG("llama",
            ",\"rope_parameters\":{\"rope_theta\":150000.0,\"rope_type\":\"yarn\",\"factor\":8.0,"
            "\"truncate\":false,\"original_max_position_embeddings\":4096}"),
     1.2079441541679836,
     {1, 0.225418, 0.0508132748, 0.00724585633, 0.000662177949, 7.27533467e-05, 1.63999139e-05,
      3.6968358e-06}},
    {CONFIG("llama", ",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,\"mscale\":0.707,"
                     "\"mscale_all_dim\":1.0,\"beta_fast\":16,\"beta_slow\":2,"
                     "\"original_max_position_embeddings\":4096}"),
     0.92104235531633993,
     {1, 0.316227766, 0.1, 0.0316227766, 0.00675, 0.00110679718, 2.5e-05, 7.90569415e-06}},
    {CONFIG("llama",
            ",\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4.0,\"attention_factor\":1.5,"
            "\"original_max_position_embeddings\":4096}"),
     1.5,
     {1, 0.316227766, 0.1, 0.025693506, 0.00625, 0.00138349648, 0.00025, 7.90569415e-05}},
};

static void check_rope(const struct rope_case *want)
{
    struct model *m = accept(want->json);
    assert_int_equal(m->desc.n_ropes, 1);
    const struct desc_rope *rope = &m->desc.ropes[0];
    assert_int_equal(rope->rotary, 16);
    if (fabs(rope->attention_factor / want->attention_factor - 1) > 1e-9)
        fail_msg("%s: attention factor %.12g", want->json, rope->attention_factor);
    for (int j = 0; j < 8; j++)
        if (!(fabs(rope->inv_freq[j] / want->inv_freq[j] - 1) < 1e-6))
            fail_msg("%s: frequency %d is %.9g, not %.9g", want->json, j, rope->inv_freq[j],
                     want->inv_freq[j]);
    model_free(m);
}

static void test_ropes(void **state)
{
    for (size_t i = 0; i < ARRAY_LEN(rope_cases); i++)
        check_rope(&rope_cases[i]);
}

static void test_dynamic(void **state)
{
    struct model *m =
        accept(CONFIG("llama", ",\"rope_scaling\":{\"rope_type\":\"dynamic\",\"factor\":2.0}"));
    const struct desc_rope *rope = &m->desc.ropes[0];
    assert_int_equal(rope->kind, EMBER_ROPE_DYNAMIC_NTK);
    assert_true(rope->factor == 2 && rope->max_position == 64 && rope->theta == 10000);
    assert_true(fabs(rope->inv_freq[1] - 0.316227766) < 1e-7);
    model_free(m);
}

/* Windows of the two layers. */
static void windows(const char *json, uint32_t first, uint32_t second)
{
    struct model *m = accept(json);
    uint32_t got[2];
    for (int i = 0; i < 2; i++)
        got[i] = m->desc.attns[m->desc.layers[i].attn].window;
    if (got[0] != first || got[1] != second)
        fail_msg("%s: windows %u and %u, not %u and %u", json, got[0], got[1], first, second);
    model_free(m);
}

static void test_windows(void **state)
{
    windows(CONFIG("llama", ",\"sliding_window\":8"), 0, 0);
    windows(CONFIG("mistral", ",\"sliding_window\":8"), 8, 8);
    windows(CONFIG("mistral", ",\"sliding_window\":null"), 0, 0);
    windows(CONFIG("mistral", ""), 4096, 4096); /* the reference's default */
    windows(CONFIG("qwen2", ",\"sliding_window\":8,\"max_window_layers\":1"), 0, 0);
    windows(CONFIG("qwen2",
                   ",\"use_sliding_window\":true,\"sliding_window\":8,\"max_window_layers\":1"),
            0, 8);
    windows(CONFIG("qwen2", ",\"use_sliding_window\":true,\"sliding_window\":8,\"layer_types\":["
                            "\"sliding_attention\",\"full_attention\"]"),
            8, 0);
    windows(CONFIG("qwen3_moe", ",\"use_sliding_window\":true,\"sliding_window\":8,"
                                "\"max_window_layers\":1,\"num_experts\":4,"
                                "\"num_experts_per_tok\":2,\"moe_intermediate_size\":8"),
            8, 8);
    expect_refused(CONFIG("qwen2", ",\"layer_types\":[\"sliding_attention\",\"full_attention\"]"),
                   -EINVAL, "no sliding_window");
}

#define MOE ",\"num_experts_per_tok\":2,\"moe_intermediate_size\":8"

static void sparse_layers(const char *json, int first, int second)
{
    struct model *m = accept(json);
    assert_int_equal(m->desc.mlps[m->desc.layers[0].mlp].kind == MLP_MOE, first);
    assert_int_equal(m->desc.mlps[m->desc.layers[1].mlp].kind == MLP_MOE, second);
    model_free(m);
}

static void test_moe(void **state)
{
    sparse_layers(CONFIG("qwen3_moe", ",\"num_experts\":4" MOE), 1, 1);
    sparse_layers(CONFIG("qwen3_moe", ",\"num_local_experts\":4,\"mlp_only_layers\":[0]" MOE), 0,
                  1);
    sparse_layers(CONFIG("qwen3_moe", ",\"num_experts\":4,\"decoder_sparse_step\":2" MOE), 0, 1);
}

/* Real configs of what is supported are read, and the others are refused by name, not by accident.
 */
static void test_real(void **state)
{
    static const struct {
        const char *file;
        uint64_t billions;
    } known[] = {
        {"Qwen--Qwen3-0.6B_config.json", 0},
        {"Qwen--Qwen3-8B_config.json", 8},
        {"Qwen--Qwen3-235B-A22B_config.json", 235},
        {"Qwen--Qwen3-30B-A3B_config.json", 30},
        {"meta-llama--Meta-Llama-3.1-8B_config.json", 8},
        {"meta-llama--Meta-Llama-3.1-405B_config.json", 405},
        {"OpenGVLab--InternVL3-1B_config.json", 0},
    };
    for (size_t i = 0; i < ARRAY_LEN(known); i++) {
        char *below = x_printf("configs/%s", known[i].file), *path = shared_path(below);
        struct error err = {0};
        struct model *m = NULL;
        char text[65536];
        free(below);
        if (!path) {
            print_message("[  SKIPPED ] no real configs: set EMBER_SHARED\n");
            skip();
        }
        FILE *f = fopen(path, "r");
        size_t n = fread(text, 1, sizeof text, f);
        fclose(f);
        if (model_from_config(text, n, path, &m, &err) < 0)
            fail_msg("%s", err.text);
        assert_int_equal(model_info(m)->parameters / 1000000000, known[i].billions);
        model_free(m);
        free(path);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals), cmocka_unit_test(test_absurd),
        cmocka_unit_test(test_info),     cmocka_unit_test(test_wrapper),
        cmocka_unit_test(test_ropes),    cmocka_unit_test(test_dynamic),
        cmocka_unit_test(test_windows),  cmocka_unit_test(test_moe),
        cmocka_unit_test(test_real),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
