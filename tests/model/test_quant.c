/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantised checkpoints that are damaged, incomplete or of a kind that is not read: what is said
 * about them. The good ones are those of tests/goldens, which test_goldens runs.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/fd.h"
#include "model/quant/convert.h"
#include "model/model_private.h"

#define GOLDENS SOURCE_ROOT "/tests/goldens/"

static char dir[] = "/tmp/ember-quant-XXXXXX";

static int make_dir(void **state)
{
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    char path[128];
    snprintf(path, sizeof path, "%s/config.json", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    unlink(path);
    return rmdir(dir);
}

/* A golden's file, `from` in it replaced by `to` of the same length wherever it stands (NULL: as it
 * is); config.json may change its length. */
static void copy_file(const char *golden, const char *file, const char *from, const char *to)
{
    char path[256];
    _cleanup_free_ char *data = NULL;
    size_t n, len = from ? strlen(from) : 0, found = 0;
    struct error err = {0};
    snprintf(path, sizeof path, GOLDENS "%s/%s", golden, file);
    if (fd_read_file(path, 1 << 20, &data, &n, &err) < 0)
        fail_msg("%s", err.text);
    snprintf(path, sizeof path, "%s/%s", dir, file);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (size_t i = 0; i < n;) {
        bool here = from && i + len <= n && !memcmp(data + i, from, len);
        assert_int_equal(fwrite(here ? to : data + i, 1, here ? strlen(to) : 1, f),
                         here ? strlen(to) : 1);
        i += here ? len : 1;
        found += here;
    }
    fclose(f);
    if (from && !found)
        fail_msg("%s/%s: no \"%s\"", golden, file, from);
}

/* Opens the copy; the checkpoint is the caller's. */
static int layout_of_copy(struct checkpoint **c, struct model **model,
                          struct weights_layout **layout, struct error *err)
{
    const char *config;
    size_t len;
    int r = checkpoint_open(dir, c, err);
    if (r < 0)
        return r;
    config = checkpoint_config(*c, &len);
    r = model_from_config(config, len, "config.json", model, err);
    return r < 0 ? r : model_layout(*model, *c, NULL, layout, err);
}

static void refused(int code, const char *words)
{
    struct checkpoint *c = NULL;
    struct model *model = NULL;
    struct weights_layout *layout = NULL;
    struct error err = {0};
    int r = layout_of_copy(&c, &model, &layout, &err);
    if (r != code || layout || !strstr(err.text, words))
        fail_msg("%d \"%s\", not %d \"%s\"", r, err.text, code, words);
    model_free(model);
    checkpoint_free(c);
}

static void config_refused(const char *golden, const char *from, const char *to, int code,
                           const char *words)
{
    copy_file(golden, "model.safetensors", NULL, NULL);
    copy_file(golden, "config.json", from, to);
    refused(code, words);
}

static void tensors_refused(const char *golden, const char *from, const char *to, int code,
                            const char *words)
{
    assert_int_equal(strlen(from), strlen(to));
    copy_file(golden, "config.json", NULL, NULL);
    copy_file(golden, "model.safetensors", from, to);
    refused(code, words);
}

#define W4A16 "qwen3-w4a16-compressed-tensors"
#define W8A8 "qwen3-w8a8-compressed-tensors"

static void test_configs(void **state)
{
    config_refused("qwen3-awq", "\"awq\"", "\"bitsandbytes\"", -ENOTSUP,
                   "quantised (\"bitsandbytes\")");
    config_refused("qwen3-awq", "\"bits\": 4", "\"bits\": 3", -ENOTSUP, "bits is not 4");
    config_refused("qwen3-awq", "\"group_size\": 32", "\"group_size\": 16", -ENOTSUP,
                   "groups of 16");
    config_refused("qwen3-awq", "\"group_size\": 32", "\"group_size\": 0", -ENOTSUP, "groups of 0");
    config_refused("qwen3-awq", "\"group_size\": 32", "\"group_size\": -7", -EINVAL, "group_size");
    config_refused("qwen3-awq", "\"group_size\": 32,", "", -EINVAL, "group_size is missing");
    config_refused("qwen3-awq", "\"version\": \"gemm\"", "\"version\": \"gemv\"", -ENOTSUP, "gemm");
    config_refused("qwen3-gptq", "\"gptq\",\n  \"damp", "\"marlin\",\n  \"damp", -ENOTSUP,
                   "checkpoint_format");
    config_refused("qwen3-fp8-block", "\"weight_block_size\"", "\"weight_blocks\"", -ENOTSUP,
                   "no weight_block_size");
    config_refused("qwen3-fp8-block", "\"e4m3\"", "\"e5m2\"", -ENOTSUP, "fmt");
    config_refused(W4A16, "\"pack-quantized\"", "\"nvfp4-pack-quantized\"", -ENOTSUP,
                   "format \"nvfp4-pack-quantized\"");
    config_refused(W4A16, "\"symmetric\": true", "\"symmetric\": false", -ENOTSUP, "symmetric");
    config_refused(W4A16, "\"Linear\"", "\"re:.*mlp.*\"", -ENOTSUP, "targets");
    config_refused(W8A8, "\"strategy\": \"token\"", "\"strategy\": \"tensor\"", -ENOTSUP,
                   "per token");
    config_refused(W8A8, "\"num_bits\": 8", "\"num_bits\": 6", -ENOTSUP, "8-bit");
}

static void test_tensors(void **state)
{
    tensors_refused("qwen3-awq", "layers.1.self_attn.k_proj.scales",
                    "layers.1.self_attn.k_proj.scalex", -ENOENT,
                    "tensor model.layers.1.self_attn.k_proj.scales is missing");
    tensors_refused("qwen3-awq", "layers.1.self_attn.k_proj.qzeros",
                    "layers.1.self_attn.k_proj.qzerox", -ENOENT,
                    "tensor model.layers.1.self_attn.k_proj.qzeros is missing");
    tensors_refused("qwen3-gptq", "layers.2.mlp.down_proj.qweight",
                    "layers.2.mlp.down_proj.qweighx", -ENOENT,
                    "tensor model.layers.2.mlp.down_proj.qweight is missing");
    tensors_refused("qwen3-gptq", "down_proj.scales\":{\"dtype\":\"F16\"",
                    "down_proj.scales\":{\"dtype\":\"I16\"", -EINVAL,
                    "down_proj.scales has dtype I16, not F32, F16 or BF16");
    tensors_refused("qwen3-fp8-block", "up_proj.weight\":{\"dtype\":\"F8_E4M3\"",
                    "up_proj.weight\":{\"dtype\":\"F8_E5M2\"", -EINVAL,
                    "up_proj.weight has dtype F8_E5M2, not F8_E4M3");
    tensors_refused(W8A8, "gate_proj.weight_scale\":{\"dtype\":\"BF16\"",
                    "gate_proj.weight_scale\":{\"dtype\":\"F16\" ", -ENOTSUP,
                    "up_proj.weight_scale is BF16, but those kept as one tensor with it are f16");
    config_refused("qwen3-awq", "\"group_size\": 32", "\"group_size\": 64", -EINVAL,
                   "scales has shape [4, 128]; config.json asks for [2, 128]");
    config_refused("qwen3-fp8-block", "   128,\n   128", "   128,\n   64", -EINVAL,
                   "weight_scale_inv has shape");
    config_refused("qwen3-awq", "\"awq\"", "\"gptq\"", -EINVAL, "qweight has shape");
}

static void test_order(void **state)
{
    const int32_t good[] = {1, 0, 1, 0, 2}, many[] = {0, 0, 0, 1, 2}, big[] = {0, 0, 1, 3, 1},
                  negative[] = {0, 0, 1, -1, 1};
    int32_t order[5];
    struct error err = {0};
    assert_int_equal(convert_order("t", good, 5, 2, order, &err), 0);
    assert_memory_equal(order, ((int32_t[]){1, 3, 0, 2, 4}), sizeof order);
    assert_int_equal(convert_order("t", many, 5, 2, order, &err), -EINVAL);
    assert_non_null(strstr(err.text, "tensor t: group 0 has more than its 2"));
    assert_int_equal(convert_order("t", big, 5, 2, order, &err), -EINVAL);
    assert_int_equal(convert_order("t", negative, 5, 2, order, &err), -EINVAL);
}

/* Every source in random pieces is the source in one piece; the sources fill what they should. */
static void check_pieces(const struct checkpoint *c, const struct weights_layout *layout)
{
    uint32_t seed = 1;
    for (uint32_t w = 0; w < layout->n_weights; w++) {
        const struct weight *weight = &layout->weights[w];
        for (uint32_t s = 0; s < weight->n_sources; s++) {
            const struct weight_source *source = &layout->sources[weight->first_source + s];
            uint8_t *whole = x_alloc(source->bytes), *pieces = x_alloc(source->bytes);
            struct error err = {0};
            assert_true(source->offset + source->bytes <= weight->bytes);
            if (weight_source_read(c, weight, source, 0, whole, source->bytes, &err) < 0)
                fail_msg("%s", err.text);
            for (uint64_t at = 0, n; at < source->bytes; at += n) {
                seed = seed * 1664525 + 1013904223;
                n = MIN(source->bytes - at, 4 + (seed >> 20 & ~3u));
                if (weight_source_read(c, weight, source, at, pieces + at, n, &err) < 0)
                    fail_msg("%s", err.text);
            }
            assert_memory_equal(whole, pieces, source->bytes);
            assert_int_equal(weight_source_read(c, weight, source, 4, whole, source->bytes, &err),
                             -ERANGE);
            free(whole);
            free(pieces);
        }
    }
}

static void check_manifest(const struct checkpoint *c, const struct weights_layout *layout)
{
    struct buffer out = {0};
    struct model *model = NULL;
    struct weights_layout *again = NULL;
    struct error err = {0};
    size_t len;
    const char *config = checkpoint_config(c, &len);
    assert_int_equal(manifest_write(config, len, dir, layout, &out, &err), 0);
    if (manifest_read(out.data, out.len, &model, &again, NULL, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(again->bytes, layout->bytes);
    assert_int_equal(again->n_sources, layout->n_sources);
    for (uint32_t i = 0; i < layout->n_weights; i++) {
        struct slot_form a = layout_form(&again->weights[i]), b = layout_form(&layout->weights[i]);
        assert_memory_equal(&a, &b, sizeof a);
        assert_int_equal(again->weights[i].order_at, layout->weights[i].order_at);
    }
    weights_layout_free(again);
    model_free(model);
    buffer_free(&out);
}

static void test_sources(void **state)
{
    static const char *const names[] = {"qwen3-awq",       "qwen3-gptq", "qwen3-gptq-desc-act",
                                        "qwen3-fp8-block", W4A16,        W8A8};
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        struct checkpoint *c = NULL;
        struct model *model = NULL;
        struct weights_layout *layout = NULL;
        struct error err = {0};
        copy_file(names[i], "config.json", NULL, NULL);
        copy_file(names[i], "model.safetensors", NULL, NULL);
        if (layout_of_copy(&c, &model, &layout, &err) < 0)
            fail_msg("%s", err.text);
        check_pieces(c, layout);
        check_manifest(c, layout);
        weights_layout_free(layout);
        model_free(model);
        checkpoint_free(c);
    }
}

/* A NaN among FP8 codes is named when it is read. */
static void test_nan(void **state)
{
    struct checkpoint *c = NULL;
    struct model *model = NULL;
    struct weights_layout *layout = NULL;
    struct error err = {0};
    char path[128];
    uint8_t byte = 0xff;
    int r = 0;
    copy_file("qwen3-fp8-block", "config.json", NULL, NULL);
    copy_file("qwen3-fp8-block", "model.safetensors", NULL, NULL);
    assert_int_equal(layout_of_copy(&c, &model, &layout, &err), 0);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    FILE *f = fopen(path, "r+");
    const struct checkpoint_tensor *t = checkpoint_find(c, "model.layers.1.mlp.down_proj.weight");
    assert_int_equal(fseek(f, (long)t->offset + 300, SEEK_SET), 0);
    assert_int_equal(fwrite(&byte, 1, 1, f), 1);
    fclose(f);
    for (uint32_t w = 0; w < layout->n_weights && r == 0; w++)
        for (uint32_t s = 0; s < layout->weights[w].n_sources && r == 0; s++) {
            const struct weight_source *source =
                &layout->sources[layout->weights[w].first_source + s];
            uint8_t *to = x_alloc(source->bytes);
            r = weight_source_read(c, &layout->weights[w], source, 0, to, source->bytes, &err);
            free(to);
        }
    assert_int_equal(r, -EINVAL);
    assert_non_null(strstr(err.text, "tensor model.layers.1.mlp.down_proj.weight: holds NaN"));
    weights_layout_free(layout);
    model_free(model);
    checkpoint_free(c);
}

/* A weight that is too wide for integers says so, be it quantised already or when it is loaded. */
static void width_case(const char *golden, const char *from, uint32_t width, struct slot_form form,
                       int code)
{
    _cleanup_free_ char *config = NULL, *to = x_printf("\"intermediate_size\": %u", width);
    struct model *model = NULL;
    struct error err = {0};
    char path[128];
    size_t len;
    copy_file(golden, "config.json", from, to);
    snprintf(path, sizeof path, "%s/config.json", dir);
    assert_int_equal(fd_read_file(path, 1 << 20, &config, &len, &err), 0);
    if (model_from_config(config, len, path, &model, &err) < 0)
        fail_msg("%s", err.text);
    const struct slot *slot = &model->slots[model->layer_slots[0][W_DOWN]];
    int r = quant_check(model, slot, &form, &err);
    if (r != code || (code && !strstr(err.text, "columns; quantised to integers it may have")))
        fail_msg("%s, %u wide: %d \"%s\"", golden, width, r, err.text);
    model_free(model);
}

static void test_widths(void **state)
{
    const struct slot_form awq = {EMBER_U8, EMBER_QUANT_INT4, EMBER_F16, FORM_ZERO};
    const struct slot_form q8 = {EMBER_I8, EMBER_QUANT_INT8, EMBER_F16, FORM_MADE | 3 << 4};
    const uint32_t most = EMBER_INT8_K_MAX;
    width_case("qwen3-awq", "\"intermediate_size\": 256", most, awq, 0);
    width_case("qwen3-awq", "\"intermediate_size\": 256", most + 32, awq, -ENOTSUP);
    width_case("llama", "\"intermediate_size\": 160", most, q8, 0);
    width_case("llama", "\"intermediate_size\": 160", most + 32, q8, -ENOTSUP);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_configs), cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_order),   cmocka_unit_test(test_sources),
        cmocka_unit_test(test_nan),     cmocka_unit_test(test_widths),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
