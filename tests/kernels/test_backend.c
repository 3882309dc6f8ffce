/* SPDX-License-Identifier: Apache-2.0 */
/* Backends: finding them, the CPU's memory, compiler and modules, and that the fence fences. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/fd.h"
#include "kernels/backend.h"
#include "kernels/cpu/compile.h"
#include "toy.h"

static const char *fence_path, *broken_path;

/* ---- finding ---- */

static void refuse_plugin(const char *name, int want, const char *text)
{
    const struct ember_backend *backend = NULL;
    struct error err = {0};

    assert_int_equal(backend_find(name, &backend, &err), want);
    assert_null(backend);
    if (!strstr(err.text, text))
        fail_msg("\"%s\" does not say \"%s\"", err.text, text);
}

static void test_find(void **ctx)
{
    static const struct {
        const char *how;
        int want;
        const char *text;
    } broken[] = {
        {"null", -EINVAL, "nothing"},       {"abi", -ESTALE, "ABI 3"},
        {"short", -EINVAL, "64 bytes"},     {"name", -EINVAL, "name"},
        {"slot", -EINVAL, "slot copy_out"}, {"group", -EINVAL, "slot graph_instantiate"},
    };
    const struct ember_backend *a, *b;

    assert_int_equal(backend_find("cpu", &a, NULL), 0);
    assert_string_equal(a->name, "cpu");
    refuse_plugin("tpu", -ENOENT, "\"tpu\"");
    refuse_plugin("/nowhere/x.so", -ENOENT, "/nowhere/x.so");
    for (size_t i = 0; i < ARRAY_LEN(broken); i++) {
        setenv("EMBER_TEST_BROKEN", broken[i].how, 1);
        refuse_plugin(broken_path, broken[i].want, broken[i].text);
    }
    setenv("EMBER_TEST_BROKEN", "not", 1);
    assert_int_equal(backend_find(broken_path, &a, NULL), 0);
    assert_int_equal(backend_find(fence_path, &a, NULL), 0);
    assert_int_equal(backend_find(fence_path, &b, NULL), 0);
    assert_ptr_equal(a, b);
    assert_null(a->graph_instantiate);
    assert_null(a->kernel_source);
    assert_null(a->memory_export);
}

/* ---- the CPU device ---- */

static struct ember_device *open_cpu(const char *isa)
{
    struct ember_device_options options = {.threads = 1, .isa = isa};
    struct ember_backend_error e = {""};
    struct ember_device *device = NULL;
    if (cpu_backend()->device_open(&options, &device, &e))
        fail_msg("%s", e.text);
    return device;
}

static void test_variants(void **ctx)
{
    const struct ember_backend *cpu = cpu_backend();
    struct ember_device_options options = {.isa = "mmx"};
    struct ember_backend_error e = {""};
    struct ember_device *device = NULL;
    struct ember_device_info best, base, forced;

    assert_int_equal(cpu->device_open(&options, &device, &e), -EINVAL);
    assert_non_null(strstr(e.text, "baseline avx2 avx512"));
    options = (struct ember_device_options){.index = 1};
    assert_int_equal(cpu->device_open(&options, &device, &e), -ENODEV);
    cpu->device_info(device = open_cpu(NULL), &best);
    cpu->device_close(device);
    cpu->device_info(device = open_cpu("baseline"), &base);
    cpu->device_close(device);
    setenv("EMBER_ISA", "baseline", 1);
    cpu->device_info(device = open_cpu(NULL), &forced);
    cpu->device_close(device);
    unsetenv("EMBER_ISA");
    assert_non_null(strstr(base.fingerprint, "baseline"));
    assert_string_equal(base.fingerprint, forced.fingerprint);
    assert_true(best.memory_total >= best.memory_free && best.memory_free);
    assert_int_equal(best.threads, 1);
    print_message("%s: %s\n", best.name, best.fingerprint);
}

static void import_fails(struct ember_device *device, int fd, uint64_t bytes, int want)
{
    struct ember_share share = {EMBER_SHARE_FD, fd, {0}, bytes};
    struct ember_memory *memory = NULL;
    struct ember_backend_error e = {""};
    assert_int_equal(cpu_backend()->memory_import(device, &share, &memory, &e), want);
    assert_null(memory);
    assert_true(*e.text);
}

static void test_import(void **ctx)
{
    const struct ember_backend *cpu = cpu_backend();
    struct ember_device *device = open_cpu(NULL);
    struct ember_queue *queue;
    struct ember_memory *memory;
    struct ember_backend_error e = {""};
    char data[5000], out[5000];

    memset(data, 42, sizeof data);
    _cleanup_fd_ int unsealed = sealed_memfd(data, sizeof data, F_SEAL_GROW);
    _cleanup_fd_ int shrinks = sealed_memfd(data, sizeof data, F_SEAL_WRITE);
    _cleanup_fd_ int good = sealed_memfd(data, sizeof data, F_SEAL_SHRINK | F_SEAL_WRITE);
    _cleanup_fd_ int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    import_fails(device, unsealed, sizeof data, -EPERM);
    import_fails(device, shrinks, sizeof data, -EPERM);
    import_fails(device, good, sizeof data + 1, -EBADMSG);
    import_fails(device, good, 0, -EINVAL);
    import_fails(device, null, 1, -EINVAL);
    import_fails(device, -1, 1, -EBADF);

    struct ember_share share = {EMBER_SHARE_FD, good, {0}, sizeof data};
    assert_int_equal(cpu->memory_import(device, &share, &memory, &e), 0);
    assert_int_equal(cpu->memory_address(memory) % 4096, 0);
    assert_int_equal(cpu->queue_create(device, &queue, &e), 0);
    assert_int_equal(cpu->copy_in(queue, memory, 0, out, 1, &e), -EACCES);
    assert_int_equal(cpu->copy_out(queue, out, memory, 1, sizeof data, &e), -ERANGE);
    assert_int_equal(cpu->copy_out(queue, out, memory, UINT64_MAX, 2, &e), -ERANGE);
    assert_int_equal(cpu->copy_out(queue, out, memory, 0, sizeof data, &e), 0);
    assert_memory_equal(out, data, sizeof data);
    cpu->queue_free(queue);
    cpu->memory_free(memory);
    cpu->device_close(device);
}

static void test_alloc(void **ctx)
{
    const struct ember_backend *cpu = cpu_backend();
    struct ember_device *device = open_cpu(NULL);
    struct ember_memory *memory = NULL;
    struct ember_backend_error e = {""};

    assert_int_equal(cpu->memory_alloc(device, 0, &memory, &e), -EINVAL);
    assert_int_equal(cpu->memory_alloc(device, UINT64_MAX, &memory, &e), -ENOMEM);
    assert_int_equal(cpu->memory_alloc(device, UINT64_C(1) << 62, &memory, &e), -ENOMEM);
    assert_null(memory);
    assert_int_equal(cpu->memory_alloc(device, 100 * MIB, &memory, &e), 0);
    const char *p = (const char *)(uintptr_t)cpu->memory_address(memory);
    assert_int_equal((uintptr_t)p % (2 * MIB), 0);
    assert_int_equal(p[0] | p[50 * MIB] | p[100 * MIB - 1], 0);
    cpu->memory_free(memory);
    cpu->device_close(device);
}

/* ---- specialised kernels ---- */

static bool have_compiler(void)
{
    struct compiler c;
    if (compiler_find(&c, NULL) == 0)
        return true;
    print_message("no C compiler here\n");
    return false;
}

#define SOURCE(name, value)                                                                        \
    "const char ember_kernel_name[] = \"" name "\";"                                               \
    "void ember_kernel(const unsigned long *a, unsigned b, unsigned n)"                            \
    "{ ((unsigned long *)a[0])[b] = a[1] * " value "; }"

static struct ember_kernel_source source_of(const char *text)
{
    struct ember_kernel_source s = {.text = text, .text_len = strlen(text), .options = "-O1"};
    return s;
}

static void test_compile_load_call(void **ctx)
{
    const struct ember_backend *cpu = cpu_backend();
    struct ember_device *device = open_cpu(NULL);
    struct ember_queue *queue;
    struct ember_module *module[2];
    struct ember_kernel *kernel;
    struct ember_backend_error e = {""};
    const char *texts[2] = {SOURCE("a_b", "3"), SOURCE("a_b", "5")};

    if (!have_compiler())
        skip();
    assert_int_equal(cpu->queue_create(device, &queue, &e), 0);
    for (int i = 0; i < 2; i++) { /* both stay loaded: one must not be taken for the other */
        struct ember_kernel_source source = source_of(texts[i]);
        _cleanup_free_ void *blob = NULL;
        size_t len;
        uint64_t out[4] = {0}, args[2] = {(uintptr_t)out, 7};
        uint64_t start = clock_ns(), built;
        if (cpu->kernel_compile(device, &source, &blob, &len, &e))
            fail_msg("%s", e.text);
        built = clock_ns();
        if (cpu->module_load(device, blob, len, &module[i], &e))
            fail_msg("%s", e.text);
        print_message("compile %.1f ms, load %.3f ms\n", (double)(built - start) / 1e6,
                      clock_ms_since(built));
        assert_int_equal(cpu->module_find(module[i], "a.c", &kernel, &e), -ENOENT);
        assert_int_equal(cpu->module_find(module[i], "a.b", &kernel, &e), 0);
        assert_int_equal(cpu->launch(queue, kernel, (uint32_t[]){2, 2, 1}, args, 2, &e), 0);
        for (int j = 0; j < 4; j++)
            assert_int_equal(out[j], i ? 35 : 21);
    }
    cpu->module_free(module[0]);
    cpu->module_free(module[1]);
    cpu->module_free(NULL);
    cpu->queue_free(queue);
    cpu->device_close(device);
}

/* The toy's kernels built for its shapes give the bits of the ahead-of-time ones. */
static void test_specialised_graph(void **ctx)
{
    struct toy toy;
    struct rig rig;
    struct ember_kernel *kernels[32];
    struct ember_module *modules[32] = {0};
    struct ember_backend_error e = {""};
    struct graph *graph = NULL;
    uint32_t specialised = 0;

    if (!have_compiler())
        skip();
    toy_make(&toy, 5);
    rig_open(&rig, &toy, "cpu", 2);
    assert_int_equal(graph_capture(rig.backend, rig.device, toy.plan, &graph, NULL), 0);
    _cleanup_free_ char *want = rig_run(&rig, &toy, graph, false);
    rig_kernels(&rig, graph, kernels);
    for (uint32_t i = 0; i < graph_kernel_count(graph); i++) {
        const struct graph_kernel *k = graph_kernel_at(graph, i);
        struct ember_kernel_source source;
        _cleanup_free_ void *blob = NULL;
        size_t len;
        if (!*k->spec)
            continue;
        if (rig.backend->kernel_source(rig.device, k->name, k->spec, &source, &e) ||
            rig.backend->kernel_compile(rig.device, &source, &blob, &len, &e) ||
            rig.backend->module_load(rig.device, blob, len, &modules[i], &e) ||
            rig.backend->module_find(modules[i], k->name, &kernels[i], &e))
            fail_msg("%s", e.text);
        assert_true(*source.compiler);
        specialised++;
    }
    print_message("%u of %u kernels specialised\n", specialised, graph_kernel_count(graph));
    struct graph_exec *exec = NULL;
    _cleanup_free_ char *got = x_alloc(toy.plan->io.bytes);
    struct ember_memory *io = rig.memory[EMBER_ARENA_IO];
    assert_int_equal(
        graph_instantiate(graph, rig.backend, rig.device, rig.base, rig.size, kernels, &exec, NULL),
        0);
    assert_int_equal(rig.backend->copy_in(rig.queue, io, 0, toy.io, toy.plan->io.bytes, &e), 0);
    assert_int_equal(graph_exec_run(exec, rig.queue, NULL), 0);
    assert_int_equal(rig.backend->copy_out(rig.queue, got, io, 0, toy.plan->io.bytes, &e), 0);
    assert_memory_equal(got, want, toy.plan->io.bytes);
    graph_exec_free(exec);
    for (uint32_t i = 0; i < ARRAY_LEN(modules); i++)
        rig.backend->module_free(modules[i]);
    graph_free(graph);
    rig_close(&rig);
    toy_free(&toy);
}

static int entries(const char *path)
{
    int n = 0;
    DIR *dir = opendir(path);
    assert_non_null(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n - 2;
}

static void compile_fails(const char *text, int timeout_ms, int want, const char *say)
{
    struct compiler c;
    void *blob = NULL;
    size_t len;
    struct error err = {0};

    assert_int_equal(compiler_find(&c, NULL), 0);
    assert_int_equal(compile_object(&c, text, strlen(text), "-O1", timeout_ms, &blob, &len, &err),
                     want);
    assert_null(blob);
    if (!strstr(err.text, say))
        fail_msg("\"%s\" does not say \"%s\"", err.text, say);
}

static void script(const char *dir, const char *name, const char *text, char **ret_path)
{
    *ret_path = x_printf("%s/%s", dir, name);
    _cleanup_fd_ int fd = open(*ret_path, O_WRONLY | O_CREAT | O_CLOEXEC, 0700);
    assert_int_equal(fd_write_all(fd, text, strlen(text), *ret_path, NULL), 0);
}

static void test_compile_failures(void **ctx)
{
    char tmp[] = "/tmp/ember-test-XXXXXX";
    _cleanup_free_ char *slow = NULL, *silent = NULL;

    if (!have_compiler())
        skip();
    assert_non_null(mkdtemp(tmp));
    setenv("TMPDIR", tmp, 1);
    compile_fails("int f(void) { return nonsense; }", 30000, -EIO, "nonsense");
    setenv("EMBER_FAULT", "compile:1", 1);
    fault_init();
    compile_fails("", 30000, -EIO, "injected");
    unsetenv("EMBER_FAULT");
    fault_init();
    assert_int_equal(entries(tmp), 0);

    script(tmp, "slow", "#!/bin/sh\nsleep 60 &\nsleep 60\n", &slow);
    script(tmp, "silent", "#!/bin/sh\nexit 3\n", &silent);
    setenv("EMBER_CC", slow, 1);
    uint64_t start = clock_ns();
    compile_fails("", 200, -ETIMEDOUT, "200 ms");
    assert_true(clock_ms_since(start) < 5000);
    setenv("EMBER_CC", silent, 1);
    compile_fails("", 30000, -EIO, "said nothing");
    unsetenv("EMBER_CC");
    assert_int_equal(entries(tmp), 2);
    unlink(slow);
    unlink(silent);
    unsetenv("TMPDIR");
    assert_int_equal(rmdir(tmp), 0);
}

/* A builder that is killed takes its compiler along; the next one removes its folder. */
static void test_killed_builder(void **ctx)
{
    char tmp[] = "/tmp/ember-test-XXXXXX";
    _cleanup_free_ char *slow = NULL, *mark = NULL, *text = NULL;
    struct compiler c;

    if (!have_compiler())
        skip();
    assert_non_null(mkdtemp(tmp));
    mark = x_printf("%s/mark", tmp);
    text = x_printf("#!/bin/sh\necho $$ > %s\nexec sleep 60\n", mark);
    script(tmp, "slow", text, &slow);
    setenv("TMPDIR", tmp, 1);
    setenv("EMBER_CC", slow, 1);
    assert_int_equal(compiler_find(&c, NULL), 0);
    pid_t pid = fork();
    if (pid == 0) {
        void *blob;
        size_t len;
        compile_object(&c, "", 0, "", 30000, &blob, &len, NULL);
        _exit(0);
    }
    char number[32] = "";
    for (int i = 0; i < 2000 && !strchr(number, '\n'); i++) {
        _cleanup_fd_ int fd = open(mark, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || read(fd, number, sizeof number - 1) <= 0)
            usleep(2000);
    }
    pid_t compiler = atoi(number);
    assert_true(compiler > 0);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    char state = 'R';
    for (int i = 0; i < 2000 && state != 'Z'; i++) { /* gone, or a zombie whose reaper is slow */
        _cleanup_free_ char *path = x_printf("/proc/%d/stat", compiler);
        FILE *f = fopen(path, "re");
        if (!f || fscanf(f, "%*d %*s %c", &state) != 1)
            state = 'Z';
        if (f)
            fclose(f);
        usleep(1000);
    }
    assert_int_equal(state, 'Z');
    unlink(slow);
    unlink(mark);
    assert_int_equal(entries(tmp), 1);
    unsetenv("EMBER_CC");
    sleep(4); /* a folder this young might belong to a builder about to lock it */
    void *blob;
    size_t len;
    assert_int_equal(compiler_find(&c, NULL), 0);
    assert_int_equal(compile_object(&c, "int x;", 6, "-O1", 30000, &blob, &len, NULL), 0);
    free(blob);
    unsetenv("TMPDIR");
    assert_int_equal(entries(tmp), 0);
    assert_int_equal(rmdir(tmp), 0);
}

/*
 * A builder that is stopped for seconds between making its folder and locking it: another one's
 * sweep takes it away. It makes another, and does not leave its kernel to the next process.
 */
static void test_folder_swept_from_under_a_builder(void **ctx)
{
    char tmp[] = "/tmp/ember-test-XXXXXX";
    struct error err = {0};
    struct compiler c;
    void *blob = NULL;
    size_t len;

    if (!have_compiler())
        skip();
    assert_non_null(mkdtemp(tmp));
    setenv("TMPDIR", tmp, 1);
    assert_int_equal(compiler_find(&c, NULL), 0);
    setenv("EMBER_FAULT", "compile-swept:1", 1);
    fault_init();
    assert_int_equal(compile_object(&c, "int x;", 6, "-O1", 30000, &blob, &len, &err), 0);
    free(blob);
    setenv("EMBER_FAULT", "compile-swept:0", 1); /* again and again: an end is made of it */
    fault_init();
    compile_fails("int x;", 30000, -EBUSY, tmp);
    unsetenv("EMBER_FAULT");
    fault_init();
    unsetenv("TMPDIR");
    assert_int_equal(entries(tmp), 0);
    assert_int_equal(rmdir(tmp), 0);
}

static void test_no_compiler(void **ctx)
{
    const struct ember_backend *cpu = cpu_backend();
    struct ember_device *device = open_cpu(NULL);
    struct ember_kernel_source source;
    struct ember_backend_error e = {""};

    setenv("EMBER_CC", "no-such-compiler", 1);
    assert_int_equal(cpu->kernel_source(device, "linear.f32", "", &source, &e), -ENOENT);
    assert_non_null(strstr(e.text, "no C compiler (no-such-compiler)"));
    setenv("EMBER_CC", "never", 1);
    assert_int_equal(cpu->kernel_source(device, "linear.f32", "", &source, &e), -ENOTSUP);
    unsetenv("EMBER_CC");
    assert_int_equal(cpu->kernel_source(device, "no.such", "", &source, &e), -ENOENT);
    assert_int_equal(cpu->kernel_source(device, "linear.f32", "K=1 -o x", &source, &e), -EINVAL);
    cpu->device_close(device);
}

/* Finding and naming the compiler costs no exec: it is in every start's path. */
static void test_identity_is_cheap(void **ctx)
{
    struct compiler c;
    uint64_t best = UINT64_MAX;

    if (!have_compiler())
        skip();
    for (int i = 0; i < 20; i++) {
        uint64_t start = clock_ns();
        assert_int_equal(compiler_find(&c, NULL), 0);
        best = MIN(best, clock_ns() - start);
    }
    print_message("%s: %s, found in %.1f us\n", c.path, c.identity, (double)best / 1e3);
    assert_true(best < 2000000);
}

static void test_bad_modules(void **ctx)
{
    const struct ember_backend *cpu = cpu_backend();
    struct ember_device *device = open_cpu(NULL);
    struct ember_kernel_source source = source_of(SOURCE("a", "1"));
    struct ember_module *module = NULL;
    struct ember_backend_error e = {""};
    _cleanup_free_ unsigned char *blob = NULL;
    size_t len;

    assert_int_equal(cpu->module_load(device, "", 0, &module, &e), -EBADMSG);
    assert_int_equal(cpu->module_load(device, SOURCE("a", "1"), 100, &module, &e), -EBADMSG);
    if (!have_compiler())
        skip();
    assert_int_equal(cpu->kernel_compile(device, &source, (void **)&blob, &len, &e), 0);
    for (size_t n = 0; n < len; n += 61)
        assert_int_equal(cpu->module_load(device, blob, n, &module, &e), -EBADMSG);
    blob[18] ^= 1; /* machine */
    assert_int_equal(cpu->module_load(device, blob, len, &module, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "processor"));
    assert_null(module);
    cpu->device_close(device);
}

/* ---- the fence ---- */

static int signal_of_access(volatile char *p, bool write)
{
    static const struct rlimit no_core = {0, 0};
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        setrlimit(RLIMIT_CORE, &no_core);
        signal(SIGSEGV, SIG_DFL);
        if (write)
            *p = 1;
        _exit(*p == 77);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void test_fence_faults(void **ctx)
{
    struct toy toy;
    struct rig rig;

    toy_make(&toy, 1);
    rig_open(&rig, &toy, fence_path, 0);
    for (int when = 0; when < 2; when++) { /* before any work and after some */
        for (int a = 0; a < EMBER_ARENA_COUNT; a++) {
            assert_int_equal(signal_of_access((char *)(uintptr_t)rig.base[a], false), SIGSEGV);
            assert_int_equal(signal_of_access((char *)(uintptr_t)rig.base[a], true), SIGSEGV);
        }
        struct graph *graph = NULL;
        assert_int_equal(graph_capture(rig.backend, rig.device, toy.plan, &graph, NULL), 0);
        free(rig_run(&rig, &toy, graph, false));
        graph_free(graph);
    }
    rig_close(&rig);
    toy_free(&toy);
}

static void test_fence_is_late(void **ctx)
{
    struct toy toy;
    struct rig rig;
    struct ember_backend_error e = {""};
    char in[64], out[64];

    toy_make(&toy, 1);
    rig_open(&rig, &toy, fence_path, 0);
    const struct ember_backend *b = rig.backend;
    struct ember_memory *m = rig.memory[EMBER_ARENA_SCRATCH];
    memset(in, 1, sizeof in);
    assert_int_equal(b->copy_in(rig.queue, m, 0, in, sizeof in, &e), 0);
    assert_int_equal(b->copy_out(rig.queue, out, m, 0, sizeof out, &e), 0);
    assert_int_equal((unsigned char)out[0], 0xa5); /* poison until the sync */
    assert_int_equal(b->queue_sync(rig.queue, &e), 0);
    assert_memory_equal(in, out, sizeof in);

    assert_int_equal(b->copy_in(rig.queue, m, 0, in, sizeof in, &e), 0);
    in[5] = 2; /* too early */
    assert_int_equal(b->queue_sync(rig.queue, &e), -EBUSY);
    assert_non_null(strstr(e.text, "before queue_sync"));
    assert_int_equal(b->queue_sync(rig.queue, &e), 0);
    assert_int_equal(b->copy_in(rig.queue, rig.memory[EMBER_ARENA_WEIGHTS], 0, in, 1, &e), -EACCES);
    rig_close(&rig);
    toy_free(&toy);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_find),
        cmocka_unit_test(test_variants),
        cmocka_unit_test(test_import),
        cmocka_unit_test(test_alloc),
        cmocka_unit_test(test_compile_load_call),
        cmocka_unit_test(test_specialised_graph),
        cmocka_unit_test(test_compile_failures),
        cmocka_unit_test(test_killed_builder),
        cmocka_unit_test(test_folder_swept_from_under_a_builder),
        cmocka_unit_test(test_no_compiler),
        cmocka_unit_test(test_identity_is_cheap),
        cmocka_unit_test(test_bad_modules),
        cmocka_unit_test(test_fence_faults),
        cmocka_unit_test(test_fence_is_late),
    };
    fence_path = argc > 1 ? argv[1] : "./libember-backend-fence.so";
    broken_path = argc > 2 ? argv[2] : "./libember-backend-broken.so";
    return cmocka_run_group_tests(tests, NULL, NULL);
}
