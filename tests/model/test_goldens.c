/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans against reference numbers, through the reference ops: logits and hidden states of a prompt
 * in one step and in chunks, then greedy tokens one by one. Arguments: names of cases; none: all
 * that must pass.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "run_model.h"
#include "shared_dir.h"

#define TOLERANCE 1e-4         /* of the largest value; the reference ops sum in double */
#define INTEGER_TOLERANCE 1e-3 /* of weights that meet x as 16-bit integers */
#define TOKENS_MAX 256

/* X(case) */
#define CASES(X)                                                                                   \
    X("llama")                                                                                     \
    X("llama3-rope-scaling")                                                                       \
    X("mistral-sliding")                                                                           \
    X("qwen2")                                                                                     \
    X("qwen2-yarn")                                                                                \
    X("qwen3")                                                                                     \
    X("qwen3-moe")                                                                                 \
    X("phi3")                                                                                      \
    X("olmo2")                                                                                     \
    X("glm")                                                                                       \
    X("glm4")                                                                                      \
    X("granite")                                                                                   \
    X("smollm3")                                                                                   \
    X("seed-oss")                                                                                  \
    X("starcoder2")                                                                                \
    X("exaone4")                                                                                   \
    X("gemma2")                                                                                    \
    X("gemma3")                                                                                    \
    X("ernie45")                                                                                   \
    X("ernie45-moe")                                                                               \
    X("hunyuan-dense")                                                                             \
    X("qwen2-moe")                                                                                 \
    X("minimax-m2")                                                                                \
    X("glm4-moe")                                                                                  \
    X("deepseek-v2")                                                                               \
    X("deepseek-v3")                                                                               \
    X("kimi-k2")                                                                                   \
    X("glm4-moe-lite")                                                                             \
    X("mimo-v2")                                                                                   \
    X("gpt-oss")                                                                                   \
    X("qwen3-awq")                                                                                 \
    X("qwen3-gptq")                                                                                \
    X("qwen3-gptq-desc-act")                                                                       \
    X("qwen3-fp8-block")                                                                           \
    X("qwen3-w4a16-compressed-tensors")                                                            \
    X("qwen3-w8a8-compressed-tensors")                                                             \
    X("gpt-oss-mxfp4")

struct golden {
    char *dir;
    struct run_model run;
    struct checkpoint *expected;
    int32_t prompt[TOKENS_MAX], greedy[TOKENS_MAX];
    uint32_t n_prompt, n_greedy;
    double tolerance;
};

static uint32_t read_ids(json_t *list, int32_t *ids)
{
    size_t n = json_array_size(list);
    assert_in_range(n, 1, TOKENS_MAX);
    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(list, i));
    return (uint32_t)n;
}

static void open_golden(const char *name, struct golden *g)
{
    struct error err = {0};
    char *below = x_printf("goldens/%s", name), *path;
    json_t *root;
    memset(g, 0, sizeof *g);
    g->tolerance = strstr(name, "awq") || strstr(name, "gptq") || strstr(name, "w4a16")
                       ? INTEGER_TOLERANCE
                       : TOLERANCE;
    g->dir = shared_path(below);
    free(below);
    if (!g->dir) { /* the smaller ones are kept here too */
        g->dir = x_printf(SOURCE_ROOT "/tests/goldens/%s", name);
        if (access(g->dir, R_OK) < 0) {
            free(g->dir);
            g->dir = NULL;
        }
    }
    if (!g->dir) {
        print_message("[  SKIPPED ] no reference data for %s: set EMBER_SHARED\n", name);
        skip();
    }
    path = x_printf("%s/case.json", g->dir);
    root = json_load_file(path, 0, NULL);
    assert_non_null(root);
    free(path);
    g->n_prompt = read_ids(json_object_get(root, "prompt_ids"), g->prompt);
    g->n_greedy = read_ids(json_object_get(root, "greedy_ids"), g->greedy);
    json_decref(root);
    path = x_printf("%s/expected.safetensors", g->dir);
    if (checkpoint_open_file(path, &g->expected, &err) < 0 ||
        run_model_open(g->dir, g->n_prompt + g->n_greedy, &g->run, &err) < 0)
        fail_msg("%s: %s", name, err.text);
    free(path);
}

static void close_golden(struct golden *g)
{
    run_model_close(&g->run);
    checkpoint_free(g->expected);
    free(g->dir);
}

/* An expected tensor [tokens, width]; the caller frees. */
static float *expected(const struct golden *g, const char *name, uint32_t width)
{
    const struct checkpoint_tensor *t = checkpoint_find(g->expected, name);
    struct error err = {0};
    float *values;
    if (!t)
        return NULL;
    assert_int_equal(t->bytes, (uint64_t)g->n_prompt * width * 4);
    values = mem_alloc(t->bytes, 1);
    if (checkpoint_read(g->expected, t, 0, values, t->bytes, &err) < 0)
        fail_msg("%s", err.text);
    return values;
}

/* Largest difference of a row, relative to the largest value of the whole. */
static double compare(const float *want, const float *got, uint32_t n, double largest)
{
    double worst = 0;
    for (uint32_t i = 0; i < n; i++) {
        double diff = fabs((double)want[i] - got[i]);
        worst = !(diff <= worst) ? diff : worst; /* NaN too */
    }
    return worst / largest;
}

static double largest_of(const float *v, size_t n)
{
    double largest = 0;
    for (size_t i = 0; i < n; i++)
        largest = fmax(largest, fabs(v[i]));
    return largest;
}

static void check_hidden(struct golden *g)
{
    const struct model_info *info = model_info(g->run.model);
    uint32_t d = info->hidden_size;
    for (uint32_t layer = 0; layer <= info->n_layers; layer++) {
        char name[32];
        snprintf(name, sizeof name, "hidden.%u", layer);
        float *want = expected(g, name, d);
        if (!want)
            return;
        double largest = largest_of(want, (size_t)g->n_prompt * d);
        for (uint32_t r = 0; r < g->n_prompt; r++) {
            double e =
                compare(want + (size_t)r * d, run_model_hidden(&g->run, layer, r), d, largest);
            if (!(e < g->tolerance))
                fail_msg("%s: %s, token %u: relative error %g", g->dir, name, r, e);
        }
        free(want);
    }
}

static void check_logits(struct golden *g, const float *want, uint32_t first, uint32_t n)
{
    uint32_t vocab = model_info(g->run.model)->vocab_size;
    double largest = largest_of(want, (size_t)g->n_prompt * vocab);
    for (uint32_t r = 0; r < n; r++) {
        double e = compare(want + (size_t)(first + r) * vocab, run_model_logits(&g->run, r), vocab,
                           largest);
        if (!(e < g->tolerance))
            fail_msg("%s: logits of token %u: relative error %g", g->dir, first + r, e);
    }
}

static void step(struct golden *g, uint32_t bucket, const int32_t *tokens, uint32_t n,
                 uint32_t first, bool taps)
{
    struct error err = {0};
    if (run_model_step(&g->run, bucket, tokens, n, first, g->n_prompt, taps, &err) < 0)
        fail_msg("%s: %s", g->dir, err.text);
}

/* The prompt in steps of `chunk`, then one token a step. */
static void generate(struct golden *g, const float *want, uint32_t chunk)
{
    uint32_t n = 0;
    for (uint32_t at = 0; at < g->n_prompt; at += n) {
        n = MIN(chunk, g->n_prompt - at);
        step(g, chunk, g->prompt + at, n, at, false);
        check_logits(g, want, at, n);
    }
    int32_t next = run_model_sampled(&g->run, n - 1);
    for (uint32_t i = 0; i < g->n_greedy; i++) {
        if (next != g->greedy[i])
            fail_msg("%s: greedy token %u is %d, not %d", g->dir, i, next, g->greedy[i]);
        step(g, 1, &next, 1, g->n_prompt + i, false);
        next = run_model_sampled(&g->run, 0);
    }
}

static void golden_case(void **state)
{
    struct golden g;
    open_golden(*state, &g);
    float *want = expected(&g, "logits", model_info(g.run.model)->vocab_size);
    assert_non_null(want);
    step(&g, g.n_prompt + 5, g.prompt, g.n_prompt, 0, true);
    check_hidden(&g);
    check_logits(&g, want, 0, g.n_prompt);
    generate(&g, want, g.n_prompt);
    generate(&g, want, 7);
    free(want);
    close_golden(&g);
}

int main(int argc, char **argv)
{
#define X(name) cmocka_unit_test_prestate(golden_case, (void *)name),
    struct CMUnitTest tests[] = {CASES(X)};
#undef X
    struct CMUnitTest some[64];
    const size_t n = ARRAY_LEN(tests);
#define X(name) name,
    static const char *const names[] = {CASES(X)};
#undef X
    for (size_t i = 0; i < n; i++)
        tests[i].name = names[i];
    if (argc < 2)
        return cmocka_run_group_tests_name("goldens", tests, NULL, NULL);
    for (int i = 1; i < argc && i <= (int)ARRAY_LEN(some); i++)
        some[i - 1] = (struct CMUnitTest){argv[i], golden_case, NULL, NULL, argv[i]};
    return _cmocka_run_group_tests("goldens", some, (size_t)MIN(argc - 1, (int)ARRAY_LEN(some)),
                                   NULL, NULL);
}
