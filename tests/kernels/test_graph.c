/* SPDX-License-Identifier: Apache-2.0 */
/* Captured graphs: capture, store, parse, instantiate, run; damage of every kind is refused. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "kernels/backend.h"
#include "toy.h"

static const char *fence_path;

static struct graph *capture(const struct rig *rig, const struct toy *toy)
{
    struct graph *graph = NULL;
    struct error err = {0};
    if (graph_capture(rig->backend, rig->device, toy->plan, &graph, &err))
        fail_msg("%s", err.text);
    return graph;
}

static struct graph *copy_of(const struct graph *graph)
{
    _cleanup_(buffer_free) struct buffer stored = {0}, again = {0};
    struct graph *copy = NULL;
    struct error err = {0};

    assert_int_equal(graph_store(graph, &stored, NULL), 0);
    if (graph_parse(stored.data, stored.len, &copy, &err))
        fail_msg("%s", err.text);
    assert_int_equal(graph_store(copy, &again, NULL), 0);
    assert_int_equal(again.len, stored.len);
    assert_memory_equal(again.data, stored.data, stored.len);
    return copy;
}

static void launch_by_launch(struct rig *rig, struct ember_backend *plain)
{
    *plain = *rig->backend;
    plain->graph_instantiate = NULL;
    plain->graph_launch = NULL;
    plain->graph_free = NULL;
    rig->backend = plain;
}

static void close_to(const struct toy *toy, const char *got, const char *want)
{
    const struct step_io *io = &toy->plan->io;
    const float *a = (const float *)(got + io->logits), *b = (const float *)(want + io->logits);
    float largest = 0;

    for (int i = 0; i < 2 * TOY_VOCAB; i++)
        largest = MAX(largest, __builtin_fabsf(b[i]));
    assert_true(largest > 0.1f);
    for (int i = 0; i < 2 * TOY_VOCAB; i++)
        assert_true(__builtin_fabsf(a[i] - b[i]) <= 1e-4f * largest);
    assert_memory_equal(got + io->sampled, want + io->sampled, 8);
}

/* Everything that runs the toy gives the same bits, close to the reference. */
static void test_same_bits(void **ctx)
{
    for (uint32_t seed = 1; seed < 4; seed++) {
        struct toy toy;
        struct rig cpu, alone, fence;
        struct ember_backend plain;
        toy_make(&toy, seed);
        rig_open(&cpu, &toy, "cpu", 2);
        rig_open(&alone, &toy, "cpu", 1);
        rig_open(&fence, &toy, fence_path, 0);
        launch_by_launch(&alone, &plain);

        _cleanup_(graph_freep) struct graph *fresh = capture(&cpu, &toy);
        _cleanup_(graph_freep) struct graph *restored = copy_of(fresh);
        _cleanup_(graph_freep) struct graph *fenced = capture(&fence, &toy);
        _cleanup_free_ char *want = toy_reference(&toy);
        _cleanup_free_ char *a = rig_run(&cpu, &toy, fresh, false);
        _cleanup_free_ char *b = rig_run(&cpu, &toy, restored, true);
        _cleanup_free_ char *c = rig_run(&alone, &toy, restored, false);
        _cleanup_free_ char *d = rig_run(&fence, &toy, fenced, true);
        close_to(&toy, a, want);
        assert_memory_equal(a, b, toy.plan->io.bytes);
        assert_memory_equal(a, c, toy.plan->io.bytes);
        assert_memory_equal(a, d, toy.plan->io.bytes);

        rig_close(&cpu);
        rig_close(&alone);
        rig_close(&fence);
        toy_free(&toy);
    }
}

/* ---- damage ---- */

static void refuse(const struct buffer *good, size_t at, const void *bytes, size_t n,
                   const char *text)
{
    _cleanup_free_ char *bad = x_alloc(good->len);
    struct graph *graph = NULL;
    struct error err = {0};

    memcpy(bad, good->data, good->len);
    memcpy(bad + at, bytes, n);
    assert_int_equal(graph_parse(bad, good->len, &graph, &err), -EBADMSG);
    assert_null(graph);
    if (!strstr(err.text, text))
        fail_msg("\"%s\" does not say \"%s\"", err.text, text);
}

static void refuse32(const struct buffer *good, size_t at, uint32_t value, const char *text)
{
    refuse(good, at, &value, sizeof value, text);
}

static uint64_t u64_at(const struct buffer *b, size_t at)
{
    uint64_t v;
    memcpy(&v, b->data + at, sizeof v);
    return v;
}

struct stored {
    struct toy toy;
    struct rig rig;
    struct graph *graph;
    struct buffer bytes;
};

static void stored_make(struct stored *s)
{
    memset(s, 0, sizeof *s);
    toy_make(&s->toy, 9);
    rig_open(&s->rig, &s->toy, "cpu", 1);
    s->graph = capture(&s->rig, &s->toy);
    assert_int_equal(graph_store(s->graph, &s->bytes, NULL), 0);
}

static void stored_free(struct stored *s)
{
    buffer_free(&s->bytes);
    graph_free(s->graph);
    rig_close(&s->rig);
    toy_free(&s->toy);
}

static void test_damage(void **ctx)
{
    _cleanup_(stored_free) struct stored s;
    stored_make(&s);
    const struct buffer *b = &s.bytes;
    uint64_t segments = u64_at(b, 48), kernels = u64_at(b, 56), launches = u64_at(b, 64);
    uint64_t args = u64_at(b, 72), relocs = u64_at(b, 80), huge = UINT64_MAX - 4;
    size_t moved = 0;

    refuse(b, 0, "EMBX", 4, "magic");
    refuse32(b, 4, 99, "version");
    refuse(b, 8, &huge, 8, "offsets");
    refuse32(b, 16, 4, "arenas");
    for (size_t at = 20; at < 36; at += 4) { /* each count, too large and too small */
        refuse32(b, at, UINT32_MAX, "offsets");
        refuse32(b, at, 0, "offsets");
    }
    for (size_t at = 40; at < 88; at += 8)
        refuse(b, at, &huge, 8, "offsets");
    refuse32(b, segments, 77, "segment of unknown kind");
    refuse32(b, segments + 8, 1, "begin");
    refuse32(b, segments + 12, UINT32_MAX, "segment ends");
    refuse(b, kernels, "\0", 1, "kernel name");
    refuse(b, kernels, "/", 1, "kernel name");
    refuse(b, kernels + 31, "x", 1, "kernel name");
    refuse(b, kernels + 32 + 95, "x", 1, "specialisation");
    refuse32(b, launches, UINT32_MAX, "not listed");
    refuse32(b, launches + 4, 0, "grid");
    refuse(b, launches + 4, "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", 12, "grid");
    refuse32(b, launches + 16, 3, "out of place");
    refuse32(b, launches + 20, UINT32_MAX, "out of place");
    refuse(b, relocs, "\x05", 1, "arena");
    refuse(b, relocs, "\xfe", 1, "arena");
    for (uint64_t i = 0; i < (args < relocs ? (relocs - args) / 8 : 0); i++) {
        if (b->data[relocs + i] < 0)
            continue;
        refuse(b, args + 8 * i, &huge, 8, "offset");
        uint64_t end = graph_arena_bytes(s.graph, (enum ember_arena)b->data[relocs + i]);
        refuse(b, args + 8 * i, &end, 8, "offset");
        moved++;
    }
    assert_true(moved > 20);
}

static void test_lengths(void **ctx)
{
    _cleanup_(stored_free) struct stored s;
    struct graph *graph = NULL;
    stored_make(&s);

    for (size_t n = 0; n < s.bytes.len; n++) {
        _cleanup_free_ char *cut =
            x_alloc(n ? n : 1); /* its own block: a sanitizer sees overreads */
        memcpy(cut, s.bytes.data, n);
        assert_int_equal(graph_parse(cut, n, &graph, NULL), -EBADMSG);
    }
    assert_int_equal(buffer_append(&s.bytes, "", 1), 0);
    assert_int_equal(graph_parse(s.bytes.data, s.bytes.len, &graph, NULL), -EBADMSG);
}

/* Any flipped bit is refused or gives a graph that stays within its arenas: reading it does no
 * harm. */
static void test_flips(void **ctx)
{
    _cleanup_(stored_free) struct stored s;
    size_t refused = 0, flips = 0;
    stored_make(&s);

    for (size_t bit = 0; bit < s.bytes.len * 8; bit += 5) {
        struct graph *graph = NULL;
        s.bytes.data[bit / 8] ^= (char)(1 << bit % 8);
        int r = graph_parse(s.bytes.data, s.bytes.len, &graph, NULL);
        s.bytes.data[bit / 8] ^= (char)(1 << bit % 8);
        assert_true(r == 0 || r == -EBADMSG);
        refused += r < 0;
        flips++;
        graph_free(graph);
    }
    assert_true(refused > flips / 4);
}

/* ---- instantiating ---- */

static void test_arenas_too_small(void **ctx)
{
    _cleanup_(stored_free) struct stored s;
    struct ember_kernel *kernels[32];
    struct graph_exec *exec = NULL;
    struct error err = {0};
    stored_make(&s);
    rig_kernels(&s.rig, s.graph, kernels);

    s.rig.size[EMBER_ARENA_SCRATCH] = s.toy.plan->arena_bytes[EMBER_ARENA_SCRATCH] - 1;
    assert_int_equal(graph_instantiate(s.graph, s.rig.backend, s.rig.device, s.rig.base, s.rig.size,
                                       kernels, &exec, &err),
                     -ERANGE);
    assert_non_null(strstr(err.text, "scratch"));
    s.rig.size[EMBER_ARENA_SCRATCH]++;
    s.rig.base[EMBER_ARENA_SCRATCH] = UINT64_MAX - 100;
    assert_int_equal(graph_instantiate(s.graph, s.rig.backend, s.rig.device, s.rig.base, s.rig.size,
                                       kernels, &exec, &err),
                     -ERANGE);
    s.rig.base[EMBER_ARENA_SCRATCH] =
        s.rig.backend->memory_address(s.rig.memory[EMBER_ARENA_SCRATCH]);
    kernels[0] = NULL;
    assert_int_equal(graph_instantiate(s.graph, s.rig.backend, s.rig.device, s.rig.base, s.rig.size,
                                       kernels, &exec, &err),
                     -EINVAL);
    assert_null(exec);
}

static void test_segment_beyond_end(void **ctx)
{
    _cleanup_(stored_free) struct stored s;
    _cleanup_(graph_exec_freep) struct graph_exec *exec = NULL;
    struct ember_kernel *kernels[32];
    stored_make(&s);

    rig_kernels(&s.rig, s.graph, kernels);
    assert_int_equal(graph_instantiate(s.graph, s.rig.backend, s.rig.device, s.rig.base, s.rig.size,
                                       kernels, &exec, NULL),
                     0);
    assert_int_equal(graph_segment_count(s.graph), TOY_LAYERS + 2);
    assert_null(graph_segment_at(s.graph, TOY_LAYERS + 2));
    assert_int_equal(graph_exec_run_segment(exec, s.rig.queue, TOY_LAYERS + 2, NULL), -EINVAL);
}

static void test_op_beyond_backend(void **ctx)
{
    _cleanup_(stored_free) struct stored s;
    struct graph *graph = NULL;
    struct error err = {0};
    stored_make(&s);

    s.toy.plan->ops[2].kind = EMBER_OP_COUNT;
    assert_true(graph_capture(s.rig.backend, s.rig.device, s.toy.plan, &graph, &err) < 0);
    assert_null(graph);
    assert_non_null(strstr(err.text, "op 2"));
}

/* Not a check, a number to look at. */
static void test_cost(void **ctx)
{
    _cleanup_(stored_free) struct stored s;
    struct ember_kernel *kernels[32];
    uint64_t best = UINT64_MAX, captured = UINT64_MAX;
    stored_make(&s);

    rig_kernels(&s.rig, s.graph, kernels);
    for (int i = 0; i < 200; i++) {
        _cleanup_(graph_freep) struct graph *graph = NULL;
        _cleanup_(graph_exec_freep) struct graph_exec *exec = NULL;
        uint64_t start = clock_ns();
        assert_int_equal(graph_parse(s.bytes.data, s.bytes.len, &graph, NULL), 0);
        assert_int_equal(graph_instantiate(graph, s.rig.backend, s.rig.device, s.rig.base,
                                           s.rig.size, kernels, &exec, NULL),
                         0);
        best = MIN(best, clock_ns() - start);
        start = clock_ns();
        _cleanup_(graph_freep) struct graph *again = capture(&s.rig, &s.toy);
        captured = MIN(captured, clock_ns() - start);
    }
    print_message("%u launches: capture %.1f us, parse and instantiate %.1f us\n",
                  graph_launch_count(s.graph), (double)captured / 1e3, (double)best / 1e3);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),         cmocka_unit_test(test_damage),
        cmocka_unit_test(test_lengths),           cmocka_unit_test(test_flips),
        cmocka_unit_test(test_arenas_too_small),  cmocka_unit_test(test_segment_beyond_end),
        cmocka_unit_test(test_op_beyond_backend), cmocka_unit_test(test_cost),
    };
    fence_path = argc > 1 ? argv[1] : "./libember-backend-fence.so";
    return cmocka_run_group_tests(tests, NULL, NULL);
}
