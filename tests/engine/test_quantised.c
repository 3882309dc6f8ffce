/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checkpoints quantised while they are loaded: the same bytes whoever reads them in which order,
 * the same bits alone and in a batch, which tensors are left alone, what is refused.
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "base/fault.h"
#include "base/fd.h"
#include "engine/engine.h"
#include "engine/load.h"
#include "engine/packs.h"
#include "engine/perplexity.h"
#include "model/tokenizer/tokenizer.h"

#define MODEL SOURCE_ROOT "/models/ember-tiny"
#define GOLDENS SOURCE_ROOT "/tests/goldens/"
#define PAGES 8

/* The second makes 4 bits of what would be q8 in so small a model. */
static const char *const kinds[] = {"q8", "q4\nq4=^layers"};

static struct loaded load(const char *dir, const char *quant, uint32_t threads)
{
    struct load_options options = {.threads = threads, .quant = quant};
    struct loaded loaded = {.weights = -1, .manifest = -1};
    struct error err = {0};
    if (load_checkpoint(dir, &options, &loaded, &err) < 0)
        fail_msg("%s as %s: %s", dir, quant, err.text);
    return loaded;
}

static void refused(const char *dir, const char *quant, int code, const char *words)
{
    struct load_options options = {.quant = quant};
    struct loaded loaded = {.weights = -1, .manifest = -1};
    struct error err = {0};
    int r = load_checkpoint(dir, &options, &loaded, &err);
    if (r != code || !strstr(err.text, words))
        fail_msg("%s as %s: %d \"%s\", not %d \"%s\"", dir, quant, r, err.text, code, words);
}

/* A pack cannot be quantised any more. */
static void refused_pack(const char *path)
{
    struct load_options options = {.quant = "q8"};
    struct loaded loaded = {.weights = -1, .manifest = -1};
    struct error err = {0};
    assert_int_equal(load_model(path, &options, &loaded, &err), -EINVAL);
    assert_non_null(strstr(err.text, "is a pack"));
}

/* K and V: what is kept exactly stays so, what emberd quantised itself has bf16. */
static void auto_kv_follows_the_weights(void **state)
{
    static const char *const quants[] = {"", "q8", "q4", "q8\nkeep=^layers"};
    for (size_t i = 0; i < ARRAY_LEN(quants); i++) {
        struct loaded loaded = load(MODEL, quants[i], 1);
        struct engine_options options = {.weights = loaded.weights, .manifest = loaded.manifest};
        struct engine *engine = NULL;
        struct error err = {0};
        if (engine_open(&options, &engine, &err) < 0)
            fail_msg("%s: %s", quants[i], err.text);
        const struct model_info *info = engine_model(engine);
        const enum kv_kind kind = *quants[i] ? KV_BF16 : KV_F32;
        assert_int_equal(info->kv_dtype[KV_AUTO], info->kv_dtype[kind]);
        assert_int_equal(info->kv_page_bytes[KV_AUTO], info->kv_page_bytes[kind]);
        assert_int_equal(info->kv_dtype[KV_F32], EMBER_F32);
        engine_free(engine);
        loaded_close(&loaded);
    }
}

/* ---- bytes ---- */

static void same_bytes_for_any_number_of_threads(void **state)
{
    static const char *const dirs[] = {MODEL, GOLDENS "qwen3-moe"};
    for (size_t d = 0; d < ARRAY_LEN(dirs); d++)
        for (size_t k = 0; k < ARRAY_LEN(kinds); k++) {
            struct loaded one = load(dirs[d], kinds[k], 1), many = load(dirs[d], kinds[k], 5);
            assert_true(digest_equal(&one.digest, &many.digest));
            loaded_close(&one);
            loaded_close(&many);
        }
}

/* Another order: scales and zero points before codes, a panel at a time. */
static void same_bytes_in_any_order(void **state)
{
    _cleanup_(checkpoint_freep) struct checkpoint *checkpoint = NULL;
    _cleanup_(weights_layout_freep) struct weights_layout *layout = NULL;
    _cleanup_(quantize_rules_freep) struct quantize_rules *rules = NULL;
    _cleanup_(model_freep) struct model *model = NULL;
    struct loaded loaded = load(GOLDENS "qwen3", kinds[1], 2);
    struct error err = {0};
    const char *config;
    size_t len;
    assert_int_equal(checkpoint_open(GOLDENS "qwen3", &checkpoint, &err), 0);
    config = checkpoint_config(checkpoint, &len);
    assert_int_equal(model_from_config(config, len, "x", &model, &err), 0);
    assert_int_equal(quantize_rules_parse(kinds[1], &rules, &err), 0);
    assert_int_equal(model_layout(model, checkpoint, rules, &layout, &err), 0);
    const uint8_t *want = mmap(NULL, layout->bytes, PROT_READ, MAP_SHARED, loaded.weights, 0);
    assert_true(want != MAP_FAILED);
    _cleanup_free_ uint8_t *got = mem_alloc(layout->bytes, 1);
    _cleanup_free_ struct weight_run *runs = NULL;
    size_t n_runs;
    assert_int_equal(weights_layout_runs(layout, 1001, &runs, &n_runs, &err), 0);
    while (n_runs-- > 0)
        assert_int_equal(
            weight_run_read(checkpoint, layout, &runs[n_runs], got + runs[n_runs].to, &err), 0);
    assert_memory_equal(got, want, layout->bytes);
    munmap((void *)want, layout->bytes);
    loaded_close(&loaded);
}

/* ---- which ---- */

static const struct weight *find(const struct weights_layout *layout, const char *name)
{
    for (uint32_t i = 0; i < layout->n_weights; i++)
        if (!strcmp(layout->weights[i].name, name))
            return &layout->weights[i];
    fail_msg("no %s", name);
    return NULL;
}

/* Loads and reads the manifest, as an instance does. */
static struct weights_layout *layout_of(const char *dir, const char *quant)
{
    struct loaded loaded = load(dir, quant, 0);
    struct weights_layout *layout = NULL;
    struct model *model = NULL;
    struct error err = {0};
    struct stat st;
    assert_int_equal(fstat(loaded.manifest, &st), 0);
    void *data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, loaded.manifest, 0);
    if (manifest_read(data, (size_t)st.st_size, &model, &layout, NULL, &err) < 0)
        fail_msg("%s as %s: %s", dir, quant, err.text);
    munmap(data, (size_t)st.st_size);
    model_free(model);
    loaded_close(&loaded);
    return layout;
}

static void is(const struct weights_layout *layout, const char *name, int quant)
{
    const struct weight *w = find(layout, name);
    if (w->quant != quant || w->made != (quant != EMBER_QUANT_NONE))
        fail_msg("%s is of form %d, not %d", name, w->quant, quant);
}

static void what_is_kept(void **state)
{
    struct weights_layout *layout = layout_of(MODEL, "q4");
    is(layout, "layers.0.qkv", EMBER_QUANT_INT8); /* few values */
    weights_layout_free(layout);

    layout = layout_of(MODEL, kinds[1]);
    is(layout, "embed", EMBER_QUANT_INT8); /* tied: the head */
    is(layout, "layers.0.qkv", EMBER_QUANT_INT4);
    is(layout, "layers.7.down", EMBER_QUANT_INT4);
    is(layout, "layers.7.norm_mlp_in", EMBER_QUANT_NONE);
    is(layout, "final_norm", EMBER_QUANT_NONE);
    weights_layout_free(layout);

    layout = layout_of(GOLDENS "qwen3-moe", "q4\nq4=experts");
    is(layout, "embed", EMBER_QUANT_NONE);
    is(layout, "head", EMBER_QUANT_INT8);
    is(layout, "layers.0.router", EMBER_QUANT_NONE);
    is(layout, "layers.0.experts_gate_up", EMBER_QUANT_INT4);
    is(layout, "layers.0.experts_down", EMBER_QUANT_INT4);
    weights_layout_free(layout);

    layout = layout_of(MODEL, "q8\nkeep=layers\\.0\\.\nq4=self_attn\\.q_proj\nkeep=^embed$");
    is(layout, "embed", EMBER_QUANT_NONE);
    is(layout, "layers.0.qkv", EMBER_QUANT_NONE);
    is(layout, "layers.1.qkv", EMBER_QUANT_INT4);
    is(layout, "layers.1.o", EMBER_QUANT_INT8);
    weights_layout_free(layout);

    layout = layout_of(GOLDENS "qwen3-moe", "q8\nq8=router");
    is(layout, "layers.0.router", EMBER_QUANT_INT8);
    weights_layout_free(layout);
}

static void what_is_refused(void **state)
{
    refused(MODEL, "q3", -EINVAL, "\"q3\" is neither");
    refused(MODEL, "q8\nkeep=nothing_of_that_name", -EINVAL,
            "\"keep=nothing_of_that_name\" matches no tensor");
    refused(MODEL, "q8\nq4=norm", -EINVAL, "\"q4=norm\" matches only tensors that are never");
    refused(MODEL, "q8\nkeep=.\nq4=qkv", -EINVAL, "\"q4=qkv\" matches no tensor");
    refused(GOLDENS "qwen3-awq", "q8", -ENOTSUP, "quantised already");
}

/* ---- bad weights ---- */

static char spoilt[] = "/tmp/ember-test-quantised-XXXXXX";

/* A copy of a golden with one value of a tensor replaced by these bits (bf16). */
static void spoil(const char *golden, const char *tensor, uint64_t index, uint16_t bits)
{
    _cleanup_(checkpoint_freep) struct checkpoint *checkpoint = NULL;
    static const char *const files[] = {"config.json", "model.safetensors"};
    const struct checkpoint_tensor *t;
    struct error err = {0};
    char path[256];
    snprintf(path, sizeof path, GOLDENS "%s", golden);
    assert_int_equal(checkpoint_open(path, &checkpoint, &err), 0);
    assert_non_null(t = checkpoint_find(checkpoint, tensor));
    assert_int_equal(t->dtype, EMBER_BF16);
    for (int i = 0; i < 2; i++) {
        _cleanup_free_ char *data = NULL;
        size_t n;
        snprintf(path, sizeof path, GOLDENS "%s/%s", golden, files[i]);
        assert_int_equal(fd_read_file(path, 1 << 24, &data, &n, &err), 0);
        if (i)
            memcpy(data + t->offset + 2 * index, &bits, sizeof bits);
        snprintf(path, sizeof path, "%s/%s", spoilt, files[i]);
        FILE *f = fopen(path, "w");
        assert_true(f && fwrite(data, 1, n, f) == n && fclose(f) == 0);
    }
}

static void bad_weights_are_named(void **state)
{
    assert_non_null(mkdtemp(spoilt));
    spoil("qwen3", "model.layers.1.mlp.up_proj.weight", 64 * 3 + 1, 0x7fc0);
    refused(spoilt, "q8", -EINVAL,
            "tensor model.layers.1.mlp.up_proj.weight: row 3 holds a NaN or an infinity");
    spoil("qwen3", "model.layers.0.self_attn.o_proj.weight", 0, 0xff80);
    refused(spoilt, "q4", -EINVAL, "self_attn.o_proj.weight: row 0 holds a NaN or an infinity");
    spoil("qwen3", "model.layers.0.self_attn.o_proj.weight", 0, 0x7e00);
    refused(spoilt, kinds[1], -EINVAL, "keep=model.layers.0.self_attn.o_proj.weight");
    struct loaded loaded = load(spoilt, "q4\nkeep=layers.0.self_attn.o_proj", 0);
    loaded_close(&loaded);
    char path[256];
    snprintf(path, sizeof path, "%s/config.json", spoilt);
    unlink(path);
    snprintf(path, sizeof path, "%s/model.safetensors", spoilt);
    unlink(path);
    rmdir(spoilt);
}

static void faults_fail_the_load(void **state)
{
    static const char *const points[] = {"alloc", "read"};
    struct load_options options = {.threads = 1, .quant = "q4\nkeep=o_proj\nq4=^layers"};
    for (size_t p = 0; p < ARRAY_LEN(points); p++) {
        int failed = 0, passed = 0;
        for (int i = 1; i < 4000 && !passed; i += i < 60 ? 1 : 23) {
            struct loaded loaded = {.weights = -1, .manifest = -1};
            struct error err = {0};
            char fault[32];
            snprintf(fault, sizeof fault, "%s:%d", points[p], i);
            setenv("EMBER_FAULT", fault, 1);
            fault_init();
            int r = load_checkpoint(GOLDENS "qwen3", &options, &loaded, &err);
            passed += r == 0;
            failed += r < 0 && err.text[0];
            assert_true(r == 0 || err.text[0]);
            loaded_close(&loaded);
        }
        unsetenv("EMBER_FAULT");
        fault_init();
        assert_true(failed > 10);
    }
}

/* ---- packs ---- */

/* Packed, the bytes are the same; damage is made good from the checkpoint by the forms of the pack;
 * no pack says of its weights what they are not. */
static void packs_of_quantised_weights(void **state)
{
    struct loaded loaded = load(GOLDENS "qwen3", kinds[1], 0),
                  again = {.weights = -1, .manifest = -1};
    struct load_options options = {0};
    struct error err = {0};
    char path[] = "/tmp/ember-test-pack-XXXXXX";
    _cleanup_fd_ int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(packs_write(GOLDENS "qwen3", &loaded.key, "", loaded.weights, loaded.manifest,
                                 path, NULL, &err),
                     -EINVAL);
    if (packs_write(GOLDENS "qwen3", &loaded.key, kinds[1], loaded.weights, loaded.manifest, path,
                    NULL, &err) < 0 ||
        load_pack(path, &options, &again, &err) < 0)
        fail_msg("%s", err.text);
    assert_true(digest_equal(&again.digest, &loaded.digest));
    assert_int_equal(again.repaired, 0);
    loaded_close(&again);

    _cleanup_(pack_freep) struct pack *pack = NULL;
    assert_int_equal(pack_open(path, &pack, &err), 0);
    assert_string_equal(pack_info(pack)->recipe, "q4 q4=^layers");
    _cleanup_fd_ int file = open(path, O_RDWR | O_CLOEXEC);
    uint64_t at = pack_segment_file_at(pack, 0) + 70000;
    char byte;
    assert_int_equal(pread(file, &byte, 1, (off_t)at), 1);
    byte ^= 4;
    assert_int_equal(pwrite(file, &byte, 1, (off_t)at), 1);
    if (load_pack(path, &options, &again, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(again.repaired, 1);
    assert_true(digest_equal(&again.digest, &loaded.digest));
    loaded_close(&again);
    loaded_close(&loaded);
    refused_pack(path);
    unlink(path);
}

/* ---- steps ---- */

static const uint32_t prompt[] = {1, 345, 201, 3288, 532, 341, 33, 2, 201, 1, 347, 201};
static const uint32_t other[] = {1, 345, 201, 381, 364, 261, 2359, 33};

static const float *run(struct engine *engine, const struct engine_seq *seqs, uint32_t n,
                        struct engine_result *ret)
{
    struct engine_step step = {.seqs = seqs, .n_seqs = n, .logits = true};
    struct error err = {0};
    if (engine_step(engine, &step, ret, &err) < 0)
        fail_msg("%s", err.text);
    return ret->logits;
}

static void alone_as_in_a_batch(void **state)
{
    static const uint32_t pages_a[PAGES] = {3, 1, 5}, pages_b[PAGES] = {7, 2, 6};
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++) {
        struct loaded loaded = load(MODEL, kinds[k], 0);
        struct engine_options options = {.weights = loaded.weights, .manifest = loaded.manifest};
        _cleanup_(engine_freep) struct engine *engine = NULL;
        struct error err = {0};
        if (engine_open(&options, &engine, &err) < 0)
            fail_msg("%s", err.text);
        struct engine_seq a = {.tokens = prompt,
                               .n_tokens = 12,
                               .prompt_len = 12,
                               .pages = pages_a,
                               .n_pages = 3,
                               .sample = true};
        struct engine_seq b = {.tokens = other,
                               .n_tokens = 8,
                               .prompt_len = 8,
                               .pages = pages_b,
                               .n_pages = 3,
                               .sample = true};
        struct engine_result result;
        size_t bytes = engine_model(engine)->vocab_size * sizeof(float);
        _cleanup_free_ float *alone = mem_alloc(bytes, 1);
        memcpy(alone, run(engine, &a, 1, &result), bytes);
        run(engine, (struct engine_seq[]){b, a}, 2, &result);
        assert_memory_equal(result.logits + bytes / sizeof(float), alone, bytes);
        for (uint32_t i = 0; i < 12; i++) { /* one token at a time */
            struct engine_seq one = a;
            one.tokens = prompt + i;
            one.n_tokens = 1;
            one.position = i;
            run(engine, &one, 1, &result);
        }
        assert_memory_equal(result.logits, alone, bytes);
        if (k == 0)
            assert_int_equal(result.greedy[0], 43); /* as of the plain model */
        loaded_close(&loaded);
    }
}

/* ---- perplexity ---- */

/* Of documents that a form feed parts. */
static double perplexity(const char *dir, const char *quant, const char *text, size_t len)
{
    struct loaded loaded = load(dir, quant, 0);
    struct engine_options options = {
        .weights = loaded.weights, .manifest = loaded.manifest, .tap_tokens = PERPLEXITY_STEP};
    struct perplexity_options how = {0};
    _cleanup_(tokenizer_freep) struct tokenizer *tokenizer = NULL;
    _cleanup_(engine_freep) struct engine *engine = NULL;
    struct perplexity sum = {0};
    struct error err = {0};
    if (engine_open(&options, &engine, &err) < 0 || tokenizer_load(dir, &tokenizer, &err) < 0)
        fail_msg("%s", err.text);
    for (size_t at = 0; at < len;) {
        size_t n = strcspn(text + at, "\f"), n_ids;
        _cleanup_free_ uint32_t *ids = NULL;
        if (tokenizer_encode(tokenizer, text + at, n, true, &ids, &n_ids, &err) < 0 ||
            perplexity_add(engine, ids, n_ids, &how, &sum, &err) < 0)
            fail_msg("%s", err.text);
        at += n + 1;
    }
    loaded_close(&loaded);
    assert_true(sum.tokens > 50);
    return perplexity_value(&sum);
}

/*
 * The text is what ember-tiny itself says when it draws every token by its probability: there its
 * perplexity is at a minimum over its weights, so any change of them can only raise it, but for
 * the noise of 11,000 draws (about 0.05 %).
 */
static void perplexity_stays(void **state)
{
    _cleanup_free_ char *text = NULL;
    struct error err = {0};
    size_t len;
    assert_int_equal(
        fd_read_file(SOURCE_ROOT "/tests/engine/tiny_text.txt", 1 << 20, &text, &len, &err), 0);
    double plain = perplexity(MODEL, "", text, len);
    double q8 = perplexity(MODEL, "q8", text, len) / plain - 1;
    double q4 = perplexity(MODEL, "q4", text, len) / plain - 1;
    print_message("perplexity %.4f, q8 %+.3f %%, q4 %+.3f %%\n", plain, 100 * q8, 100 * q4);
    assert_true(fabs(q8) <= 0.001);
    assert_true(fabs(q4) <= 0.03);
}

/* Models made by others, on the text that a reference generated with them. */
static void perplexity_of_public_models(void **state)
{
    static const char *const names[] = {"BabyLlama-tok105-hf", "stories260K-hf"};
    int found = 0;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        const char *shared = getenv("EMBER_SHARED");
        _cleanup_free_ char *dir =
            x_printf("%s/public-models/%s", shared ? shared : SOURCE_ROOT "/../shared", names[i]);
        _cleanup_free_ char *path = x_printf("%s/expected_text.json", dir);
        json_t *json = json_load_file(path, 0, NULL);
        const char *text = json_string_value(
            json_object_get(json_array_get(json_object_get(json, "cases"), 0), "greedy_text"));
        if (!text)
            continue;
        found++;
        double plain = perplexity(dir, "", text, strlen(text));
        double q8 = perplexity(dir, "q8", text, strlen(text)) / plain - 1;
        print_message("%s: perplexity %.4f, q8 %+.3f %%\n", names[i], plain, 100 * q8);
        assert_true(fabs(q8) <= 0.005); /* a hundred tokens: the noise of few */
        json_decref(json);
    }
    if (!found) {
        print_message("../shared/public-models is not there\n");
        skip();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(auto_kv_follows_the_weights),
        cmocka_unit_test(same_bytes_for_any_number_of_threads),
        cmocka_unit_test(same_bytes_in_any_order),
        cmocka_unit_test(what_is_kept),
        cmocka_unit_test(what_is_refused),
        cmocka_unit_test(bad_weights_are_named),
        cmocka_unit_test(faults_fail_the_load),
        cmocka_unit_test(packs_of_quantised_weights),
        cmocka_unit_test(alone_as_in_a_batch),
        cmocka_unit_test(perplexity_stays),
        cmocka_unit_test(perplexity_of_public_models),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
