/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Specialised builds: the embedded text compiles with nothing but a compiler, says its name, and
 * gives the bits of the ahead-of-time kernel. Skipped where there is no compiler.
 */
#include <dlfcn.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/mem.h"
#include "harness.h"

static char folder[] = "/tmp/ember-spec-XXXXXX";

static int setup(void **ctx)
{
    return mkdtemp(folder) ? 0 : -1;
}

static int teardown(void **ctx)
{
    return rmdir(folder);
}

static bool have_compiler(void)
{
    return system("cc --version >/dev/null 2>&1") == 0;
}

/* Builds and loads; the files are gone afterwards. */
static void *build(const char *kernel, enum cpu_isa isa, const char *spec)
{
    char options[256], source[64], object[64];
    const char *text;
    size_t len;
    snprintf(source, sizeof(source), "%s/k.c", folder);
    snprintf(object, sizeof(object), "%s/k.so", folder);
    assert_int_equal(cpu_kernel_options(kernel, isa, spec, options, sizeof(options)), 0);
    assert_int_equal(cpu_kernel_source_text(kernel, &text, &len), 0);
    FILE *f = fopen(source, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, len, f), len);
    assert_int_equal(fclose(f), 0);
    _cleanup_free_ char *command =
        x_printf("cc %s -shared -nostdlib -Wl,-z,defs -o %s %s -lc", options, object, source);
    if (system(command))
        fail_msg("%s failed", command);
    void *so = dlopen(object, RTLD_NOW | RTLD_LOCAL);
    if (!so)
        fail_msg("%s", dlerror());
    unlink(source);
    unlink(object);
    return so;
}

static void compare(struct kcase *c, const char *spec)
{
    char kernel[32], lowered[96], name[32];
    enum cpu_isa isa = cpu_isa_best();
    kcase_launch(&c->op, CPU_ISA_BASELINE, kernel, lowered);
    if (*lowered)
        assert_string_equal(lowered, spec);
    void *so = build(kernel, isa, spec);
    snprintf(name, sizeof(name), "%s", kernel);
    for (char *p = name; *p; p++)
        *p = *p == '.' ? '_' : *p;
    assert_string_equal(dlsym(so, CPU_SPEC_NAME), name);
    cpu_kernel_fn fn = (cpu_kernel_fn)dlsym(so, CPU_SPEC_ENTRY);
    assert_non_null(fn);
    for (uint32_t n_blocks = 1; n_blocks < 4; n_blocks += 2) {
        struct arenas want, got;
        kcase_run(c, &c->op, isa, NULL, 1, &want);
        kcase_run(c, &c->op, isa, fn, n_blocks, &got);
        for (int a = 0; a < EMBER_ARENA_COUNT; a++)
            if (want.len[a] && memcmp(want.data[a], got.data[a], want.len[a]))
                fail_msg("%s \"%s\": arena %d differs from the ahead-of-time kernel", kernel, spec,
                         a);
        arenas_free(&want);
        arenas_free(&got);
    }
    dlclose(so);
}

static void test_linear(void **ctx)
{
    if (!have_compiler())
        skip();
    for (uint32_t rows = 1; rows < 9; rows += 7) {
        struct kcase c;
        kcase_start(&c, EMBER_OP_LINEAR, EMBER_ROWS_TOKENS, rows);
        kcase_tensor(&c, LINEAR_X, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, 200, 0);
        kcase_tensor(&c, LINEAR_W, EMBER_ARENA_WEIGHTS, EMBER_F16, 1, 2, 77, 200, 0);
        kcase_tensor(&c, LINEAR_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, rows, 77, 0);
        c.op.f[LINEAR_F_SCALE] = 0.5;
        c.op.f[LINEAR_F_SOFTCAP] = 2;
        compare(&c, "K=200,N=77");
        kcase_free(&c);
    }
}

static void test_attention(void **ctx)
{
    struct kcase c;
    if (!have_compiler())
        skip();
    kcase_start(&c, EMBER_OP_ATTENTION, EMBER_ROWS_TOKENS, 12);
    kcase_tensor(&c, ATTN_Q, EMBER_ARENA_SCRATCH, EMBER_F32, 3, 2, 12, 4 * 64, 0);
    kcase_tensor(&c, ATTN_K, EMBER_ARENA_KV, EMBER_F32, 1, 3, 2, 16, 64);
    c.op.t[ATTN_K].row_stride *= 2;
    kcase_tensor(&c, ATTN_V, EMBER_ARENA_KV, EMBER_F32, 1, 3, 2, 16, 64);
    c.op.t[ATTN_V].row_stride *= 2;
    kcase_tensor(&c, ATTN_PAGES, EMBER_ARENA_IO, EMBER_I32, 0, 2, 1, 1, 0);
    kcase_tensor(&c, ATTN_SEQ_OF, EMBER_ARENA_IO, EMBER_I32, 0, 1, 12, 0, 0);
    kcase_tensor(&c, ATTN_POSITIONS, EMBER_ARENA_IO, EMBER_I32, 0, 1, 12, 0, 0);
    for (int32_t r = 0; r < 12; r++)
        *(int32_t *)kcase_row(&c, ATTN_POSITIONS, (uint32_t)r) = r;
    kcase_tensor(&c, ATTN_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, 12, 4 * 64, 0);
    /* exact: the kernel that is specialised, whatever the variant */
    const int64_t ints[] = {4, 2, 64, 64, 16, 7, 1};
    memcpy(c.op.i, ints, sizeof(ints));
    c.op.f[ATTN_F_SCALE] = 0.125;
    compare(&c, "DK=64,DV=64,PAGE=16");
    kcase_free(&c);
}

static void test_norm(void **ctx)
{
    struct kcase c;
    if (!have_compiler())
        skip();
    kcase_start(&c, EMBER_OP_NORM, EMBER_ROWS_TOKENS, 5);
    kcase_tensor(&c, NORM_X, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, 5, 100, 0);
    kcase_tensor(&c, NORM_W, EMBER_ARENA_WEIGHTS, EMBER_BF16, 1, 1, 100, 0, 0);
    kcase_tensor(&c, NORM_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, 5, 100, 0);
    c.op.f[NORM_F_EPS] = 1e-6;
    compare(&c, "D=100");
    kcase_free(&c);
}

static void test_moe_linear(void **ctx)
{
    struct kcase c;
    if (!have_compiler())
        skip();
    kcase_start(&c, EMBER_OP_MOE_LINEAR, EMBER_ROWS_TOKENS, 5);
    kcase_tensor(&c, MOE_X, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, 5, 48, 0);
    kcase_tensor(&c, MOE_W, EMBER_ARENA_WEIGHTS, EMBER_F16, 1, 3, 4, 10, 48);
    kcase_tensor(&c, MOE_IDS, EMBER_ARENA_SCRATCH, EMBER_I32, 0, 2, 5, 2, 0);
    for (uint32_t i = 0; i < 10; i++)
        ((int32_t *)kcase_row(&c, MOE_IDS, i / 2))[i % 2] = (int32_t)rnd(4);
    kcase_tensor(&c, MOE_OUT, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, 10, 10, 0);
    c.op.i[MOE_I_TOPK] = 2;
    compare(&c, "K=48");
    kcase_free(&c);
}

static void test_split(void **ctx)
{
    struct kcase c;
    const uint32_t cols = (4 + 2 * 2) * 64;
    if (!have_compiler())
        skip();
    kcase_start(&c, EMBER_OP_SPLIT_NORM_ROPE, EMBER_ROWS_TOKENS, 5);
    kcase_tensor(&c, SNR_QKV, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, 5, cols, 0);
    kcase_tensor(&c, SNR_Q_NORM, EMBER_ARENA_WEIGHTS, EMBER_BF16, 1, 1, 64, 0, 0);
    kcase_tensor(&c, SNR_K_NORM, EMBER_ARENA_WEIGHTS, EMBER_BF16, 1, 1, 64, 0, 0);
    kcase_tensor(&c, SNR_ROPE, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, 5, 64, 0);
    kcase_tensor(&c, SNR_Q, EMBER_ARENA_SCRATCH, EMBER_F32, 1, 2, 5, 4 * 64, 0);
    kcase_tensor(&c, SNR_K, EMBER_ARENA_KV, EMBER_F32, 1, 3, 2, 16, 64);
    kcase_tensor(&c, SNR_V, EMBER_ARENA_KV, EMBER_F32, 1, 3, 2, 16, 64);
    kcase_tensor(&c, SNR_KV_SLOT, EMBER_ARENA_IO, EMBER_I32, 0, 1, 5, 0, 0);
    for (int32_t r = 0; r < 5; r++)
        *(int32_t *)kcase_row(&c, SNR_KV_SLOT, (uint32_t)r) = 3 * r;
    const int64_t ints[] = {4, 2, 64, 64, 64, 0, EMBER_QK_NORM_HEAD, 0, 16};
    memcpy(c.op.i, ints, sizeof(ints));
    c.op.f[SNR_F_EPS] = 1e-6;
    c.op.f[SNR_F_V_SCALE] = 1;
    compare(&c, "DK=64,DV=64");
    kcase_free(&c);
}

/* Every kernel's text and options are well formed for every ISA, whether this processor runs it or
 * not. */
static void test_options(void **ctx)
{
    char options[256];
    for (uint32_t i = 0; i < cpu_kernel_count(); i++)
        for (enum cpu_isa isa = 0; isa < CPU_ISA_COUNT; isa++)
            assert_int_equal(cpu_kernel_options(cpu_kernel_name(i), isa, "K=999999,N=999999",
                                                options, sizeof(options)),
                             0);
    assert_int_equal(cpu_kernel_options("linear.f16", 0, "K=12,N=3", options, sizeof(options)), 0);
    assert_non_null(strstr(options, " -DSPEC_K=12 -DSPEC_N=3"));
    static const char *const bad[] = {"K",   "K=",   "K=1,", ",K=1", "K=1 -I/",
                                      "k=1", "K=1;", "K=-1", "=1"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        assert_int_equal(cpu_kernel_options("linear.f16", 0, bad[i], options, sizeof(options)),
                         -EINVAL);
    assert_int_equal(cpu_kernel_options("linear", 0, "", options, sizeof(options)), -ENOENT);
    assert_int_equal(cpu_kernel_options("linear.f16", 0, "", options, 40), -ENOSPC);
    assert_null(cpu_kernel_lookup("linear", 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_options),    cmocka_unit_test(test_linear),
        cmocka_unit_test(test_attention),  cmocka_unit_test(test_norm),
        cmocka_unit_test(test_moe_linear), cmocka_unit_test(test_split),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
