/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A graph in memory is its stored form in one block, with pointers into it: storing appends the
 * block, and parsing is a check and a copy. The form is canonical: sections in one order, without
 * gaps, padding zero, so that equal graphs are equal bytes.
 */
#include "kernels/graph.h"

#include <errno.h>
#include <string.h>

#include "kernels/backend.h"

#define GRAPH_VERSION 1
#define ARGS_MAX 256 /* of one launch */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the stored form is used in place");

struct graph_header {
    char magic[4];
    uint32_t version;
    uint64_t bytes;
    uint32_t n_arenas, n_segments, n_kernels, n_launches, n_args, reserved;
    uint64_t arenas, segments, kernels, launches, args, relocs; /* offsets */
};

struct graph_launch {
    uint32_t kernel, grid[3], first_arg, n_args;
};

_Static_assert(sizeof(struct graph_header) == 88, "stored");
_Static_assert(sizeof(struct graph_launch) == 24, "stored");
_Static_assert(sizeof(struct graph_kernel) == 128, "stored");
_Static_assert(sizeof(struct plan_segment) == 16, "stored");

struct graph {
    char *block;
    const struct graph_header *header;
    const uint64_t *arenas;
    const struct plan_segment *segments;
    const struct graph_kernel *kernels;
    const struct graph_launch *launches;
    const uint64_t *args;
    const int8_t *relocs;
};

static const char *const ARENA_NAMES[EMBER_ARENA_COUNT] = {"weights", "kv", "state", "scratch",
                                                           "io"};

/* Fills the offsets and the size in from the counts; false when they do not fit in 64 bits. */
static bool lay_out(struct graph_header *h)
{
    const struct {
        uint64_t *offset;
        uint64_t count, size;
    } sections[] = {
        {&h->arenas, h->n_arenas, sizeof(uint64_t)},
        {&h->segments, h->n_segments, sizeof(struct plan_segment)},
        {&h->kernels, h->n_kernels, sizeof(struct graph_kernel)},
        {&h->launches, h->n_launches, sizeof(struct graph_launch)},
        {&h->args, h->n_args, sizeof(uint64_t)},
        {&h->relocs, h->n_args, sizeof(int8_t)},
    };
    uint64_t at = sizeof *h;

    /* Counts are 32 bits and sizes below 129, so nothing here can wrap 64. */
    for (size_t i = 0; i < ARRAY_LEN(sections); i++) {
        *sections[i].offset = at;
        at = size_align(at + sections[i].count * sections[i].size, 8);
    }
    h->bytes = at;
    return at <= PTRDIFF_MAX;
}

/* Takes the block, whose header is right. */
static void attach(struct graph *graph, char *block)
{
    const struct graph_header *h = (const struct graph_header *)block;

    graph->block = block;
    graph->header = h;
    graph->arenas = (const uint64_t *)(block + h->arenas);
    graph->segments = (const struct plan_segment *)(block + h->segments);
    graph->kernels = (const struct graph_kernel *)(block + h->kernels);
    graph->launches = (const struct graph_launch *)(block + h->launches);
    graph->args = (const uint64_t *)(block + h->args);
    graph->relocs = (const int8_t *)(block + h->relocs);
}

void graph_free(struct graph *graph)
{
    if (!graph)
        return;
    free(graph->block);
    free(graph);
}

/* ---- checking ---- */

/* A NUL-terminated name of plain characters, zero behind its end; an empty one only where allowed.
 */
static bool name_valid(const char *s, size_t size, bool may_be_empty)
{
    size_t len = strnlen(s, size);

    if (len == size || (!len && !may_be_empty))
        return false;
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)s[i];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
              memchr("_.-=,", c, 5)))
            return false;
    }
    for (size_t i = len; i < size; i++)
        if (s[i])
            return false;
    return true;
}

static int bad(struct error *err, const char *what, uint64_t index)
{
    return error_set(err, EBADMSG, "captured graph: %s (%llu)", what, (unsigned long long)index);
}

static int check_segments(const struct graph *g, struct error *err)
{
    uint64_t next = 0;

    for (uint32_t i = 0; i < g->header->n_segments; i++) {
        const struct plan_segment *s = &g->segments[i];
        if (s->kind > SEGMENT_HEAD)
            return bad(err, "segment of unknown kind", i);
        if (s->first != next)
            return bad(err, "segment does not begin where the one before ends", i);
        next += s->count;
        if (next > g->header->n_launches)
            return bad(err, "segment ends behind the last launch", i);
    }
    if (next != g->header->n_launches)
        return bad(err, "launches behind the last segment, from", next);
    return 0;
}

static int check_kernels(const struct graph *g, struct error *err)
{
    for (uint32_t i = 0; i < g->header->n_kernels; i++) {
        const struct graph_kernel *k = &g->kernels[i];
        if (!name_valid(k->name, sizeof k->name, false))
            return bad(err, "kernel name malformed", i);
        if (!name_valid(k->spec, sizeof k->spec, true))
            return bad(err, "kernel specialisation malformed", i);
    }
    return 0;
}

static int check_launches(const struct graph *g, struct error *err)
{
    uint64_t next = 0;

    for (uint32_t i = 0; i < g->header->n_launches; i++) {
        const struct graph_launch *l = &g->launches[i];
        uint64_t plane;
        if (l->kernel >= g->header->n_kernels)
            return bad(err, "launch of a kernel that is not listed", i);
        plane = (uint64_t)l->grid[0] * l->grid[1];
        if (!plane || !l->grid[2] || plane > UINT32_MAX || plane * l->grid[2] > UINT32_MAX)
            return bad(err, "launch with an empty or absurd grid", i);
        if (l->first_arg != next || l->n_args > ARGS_MAX)
            return bad(err, "launch's arguments out of place", i);
        next += l->n_args;
        if (next > g->header->n_args)
            return bad(err, "launch's arguments end behind the last", i);
    }
    return next == g->header->n_args ? 0 : bad(err, "arguments of no launch, from", next);
}

static int check_args(const struct graph *g, struct error *err)
{
    for (uint32_t i = 0; i < g->header->n_args; i++) {
        int arena = g->relocs[i];
        if (arena == -1)
            continue;
        if (arena < 0 || arena >= EMBER_ARENA_COUNT)
            return bad(err, "argument in an unknown arena", i);
        if (g->args[i] >= g->arenas[arena])
            return error_set(err, EBADMSG,
                             "captured graph: argument %u at offset %llu of the %s arena, which "
                             "has %llu bytes",
                             i, (unsigned long long)g->args[i], ARENA_NAMES[arena],
                             (unsigned long long)g->arenas[arena]);
    }
    return 0;
}

static int check_padding(const struct graph *g, struct error *err)
{
    const struct graph_header *h = g->header;

    /* Every section but the last has a size that is a multiple of 8. */
    for (uint64_t at = h->relocs + h->n_args; at < h->bytes; at++)
        if (g->block[at])
            return bad(err, "padding is not zero at", at);
    return 0;
}

static int check(const struct graph *g, struct error *err)
{
    int r;

    if ((r = check_segments(g, err)) < 0 || (r = check_kernels(g, err)) < 0 ||
        (r = check_launches(g, err)) < 0 || (r = check_args(g, err)) < 0)
        return r;
    return check_padding(g, err);
}

static int check_header(const void *data, size_t len, struct graph_header *ret, struct error *err)
{
    struct graph_header h, expected;

    if (len < sizeof h)
        return error_set(err, EBADMSG, "captured graph: %zu bytes are less than a header", len);
    memcpy(&h, data, sizeof h);
    if (memcmp(h.magic, "EMBG", 4))
        return error_set(err, EBADMSG, "captured graph: no EMBG magic");
    if (h.version != GRAPH_VERSION)
        return error_set(err, EBADMSG, "captured graph: version %u, this program reads %d",
                         h.version, GRAPH_VERSION);
    if (h.n_arenas != EMBER_ARENA_COUNT || h.reserved)
        return error_set(err, EBADMSG, "captured graph: %u arenas, expected %d", h.n_arenas,
                         EMBER_ARENA_COUNT);
    expected = h;
    if (!lay_out(&expected) || memcmp(&expected, &h, sizeof h))
        return error_set(err, EBADMSG, "captured graph: section offsets do not follow from counts");
    if (h.bytes != len)
        return error_set(err, EBADMSG, "captured graph: %zu bytes, its header says %llu", len,
                         (unsigned long long)h.bytes);
    *ret = h;
    return 0;
}

int graph_parse(const void *data, size_t len, struct graph **ret, struct error *err)
{
    _cleanup_(graph_freep) struct graph *graph = NULL;
    struct graph_header header;
    char *block;
    int r = check_header(data, len, &header, err);

    if (r < 0)
        return r;
    graph = mem_alloc(1, sizeof *graph);
    block = mem_alloc(len, 1);
    if (!graph || !block) {
        free(block);
        return error_set(err, ENOMEM, "captured graph: no memory for %zu bytes", len);
    }
    memcpy(block, data, len);
    attach(graph, block);
    r = check(graph, err);
    if (r < 0)
        return r;
    *ret = TAKE(graph);
    return 0;
}

int graph_store(const struct graph *graph, struct buffer *out, struct error *err)
{
    if (buffer_append(out, graph->block, graph->header->bytes))
        return error_set(err, ENOMEM, "captured graph: no memory to store %llu bytes",
                         (unsigned long long)graph->header->bytes);
    return 0;
}

/* ---- capture ---- */

struct capture {
    struct buffer segments, kernels, launches, args, relocs;
    uint32_t n_kernels, n_launches, n_args;
    int failed; /* what emit itself met */
};

static void capture_free(struct capture *c)
{
    buffer_free(&c->segments);
    buffer_free(&c->kernels);
    buffer_free(&c->launches);
    buffer_free(&c->args);
    buffer_free(&c->relocs);
}

/* The index of (kernel, spec), added when new; negative errno when memory is short. */
static int64_t kernel_index(struct capture *c, const struct ember_launch *launch)
{
    const struct graph_kernel *have = (const struct graph_kernel *)c->kernels.data;
    struct graph_kernel k = {0};

    if (!memchr(launch->kernel, 0, sizeof launch->kernel) ||
        !memchr(launch->spec, 0, sizeof launch->spec))
        return -EINVAL;
    memcpy(k.name, launch->kernel, strlen(launch->kernel));
    memcpy(k.spec, launch->spec, strlen(launch->spec));
    for (uint32_t i = 0; i < c->n_kernels; i++)
        if (!memcmp(&have[i], &k, sizeof k))
            return i;
    if (buffer_append(&c->kernels, &k, sizeof k))
        return -ENOMEM;
    return c->n_kernels++;
}

static int emit_into(struct capture *c, const struct ember_launch *launch)
{
    struct graph_launch l = {0};
    int64_t kernel = kernel_index(c, launch);

    if (kernel < 0)
        return (int)kernel;
    if (launch->n_args > ARGS_MAX || c->n_launches == UINT32_MAX)
        return -E2BIG;
    l.kernel = (uint32_t)kernel;
    memcpy(l.grid, launch->grid, sizeof l.grid);
    l.first_arg = c->n_args;
    l.n_args = launch->n_args;
    for (uint32_t i = 0; i < launch->n_args; i++) {
        int8_t arena = (int8_t)launch->args[i].arena;
        if (launch->args[i].arena < -1 || launch->args[i].arena >= EMBER_ARENA_COUNT)
            return -EINVAL;
        if (buffer_append(&c->args, &launch->args[i].value, 8) ||
            buffer_append(&c->relocs, &arena, 1))
            return -ENOMEM;
    }
    if (c->n_args > UINT32_MAX - launch->n_args)
        return -E2BIG;
    c->n_args += launch->n_args;
    c->n_launches++;
    return buffer_append(&c->launches, &l, sizeof l);
}

static int emit(void *sink, const struct ember_launch *launch)
{
    struct capture *c = sink;
    return c->failed = emit_into(c, launch);
}

static int lower_segment(struct capture *c, const struct ember_backend *backend,
                         struct ember_device *device, const struct plan *plan, uint32_t index,
                         struct error *err)
{
    const struct plan_segment *from = &plan->segments[index];
    struct plan_segment to = {from->kind, from->variant, c->n_launches, 0};
    struct ember_backend_error error = {""};

    if (from->first > plan->n_ops || from->count > plan->n_ops - from->first)
        return error_set(err, EINVAL, "segment %u of the plan is outside its ops", index);
    for (uint32_t i = from->first; i < from->first + from->count; i++) {
        const struct ember_op *op = &plan->ops[i];
        int r = backend->lower(device, op, emit, c, &error);
        if (c->failed)
            return error_set(err, -c->failed,
                             "%s backend: op %u of the plan was lowered to a launch "
                             "that a graph cannot hold",
                             backend->name, i);
        if (r) {
            error.text[sizeof error.text - 1] = '\0';
            return error_set(err, r < 0 ? -r : EIO, "%s backend: op %u, segment %u: %s",
                             backend->name, i, index, error.text);
        }
    }
    to.count = c->n_launches - to.first;
    return buffer_append(&c->segments, &to, sizeof to)
               ? error_set(err, ENOMEM, "no memory for the segments of a graph")
               : 0;
}

static void put(char *block, uint64_t at, const struct buffer *from)
{
    if (from->len)
        memcpy(block + at, from->data, from->len);
}

/* The captured pieces as a stored form. */
static int assemble(const struct capture *c, const struct plan *plan, struct graph **ret,
                    struct error *err)
{
    _cleanup_(graph_freep) struct graph *graph = mem_alloc(1, sizeof *graph);
    struct graph_header h = {"EMBG", GRAPH_VERSION};
    char *block;
    int r;

    h.n_arenas = EMBER_ARENA_COUNT;
    h.n_segments = plan->n_segments;
    h.n_kernels = c->n_kernels;
    h.n_launches = c->n_launches;
    h.n_args = c->n_args;
    if (!graph || !lay_out(&h) || !(block = mem_alloc(h.bytes, 1)))
        return error_set(err, ENOMEM, "captured graph: no memory for %llu bytes",
                         (unsigned long long)h.bytes);
    memcpy(block, &h, sizeof h);
    memcpy(block + h.arenas, plan->arena_bytes, sizeof plan->arena_bytes);
    put(block, h.segments, &c->segments);
    put(block, h.kernels, &c->kernels);
    put(block, h.launches, &c->launches);
    put(block, h.args, &c->args);
    put(block, h.relocs, &c->relocs);
    attach(graph, block);
    r = check(graph, err);
    if (r < 0) {
        if (err)
            err->code = -EINVAL;
        return -EINVAL;
    }
    *ret = TAKE(graph);
    return 0;
}

int graph_capture(const struct ember_backend *backend, struct ember_device *device,
                  const struct plan *plan, struct graph **ret, struct error *err)
{
    _cleanup_(capture_free) struct capture c = {0};

    for (uint32_t i = 0; i < plan->n_segments; i++) {
        int r = lower_segment(&c, backend, device, plan, i, err);
        if (r < 0)
            return r;
    }
    return assemble(&c, plan, ret, err);
}

/* ---- reading ---- */

uint32_t graph_kernel_count(const struct graph *graph)
{
    return graph->header->n_kernels;
}

const struct graph_kernel *graph_kernel_at(const struct graph *graph, uint32_t index)
{
    return index < graph->header->n_kernels ? &graph->kernels[index] : NULL;
}

uint32_t graph_launch_count(const struct graph *graph)
{
    return graph->header->n_launches;
}

const struct graph_kernel *graph_launch_kernel(const struct graph *graph, uint32_t launch)
{
    return &graph->kernels[graph->launches[launch].kernel];
}

uint32_t graph_segment_count(const struct graph *graph)
{
    return graph->header->n_segments;
}

const struct plan_segment *graph_segment_at(const struct graph *graph, uint32_t index)
{
    return index < graph->header->n_segments ? &graph->segments[index] : NULL;
}

uint64_t graph_arena_bytes(const struct graph *graph, enum ember_arena arena)
{
    return graph->arenas[arena];
}

/* ---- instantiating ---- */

struct graph_exec {
    const struct ember_backend *backend;
    struct ember_native_graph *native; /* or NULL: launch by launch */
    uint32_t n_launches, n_segments;
    struct plan_segment *segments;
    struct ember_kernel **kernels; /* of each launch, as are the following */
    uint32_t (*grids)[3];
    const uint64_t **args;
    uint32_t *n_args;
    uint64_t *words; /* the arguments themselves */
};

void graph_exec_free(struct graph_exec *exec)
{
    if (!exec)
        return;
    if (exec->native)
        exec->backend->graph_free(exec->native);
    free(exec->segments);
    free(exec->kernels);
    free(exec->grids);
    free(exec->args);
    free(exec->n_args);
    free(exec->words);
    free(exec);
}

static int exec_alloc(const struct graph *graph, struct graph_exec **ret)
{
    _cleanup_(graph_exec_freep) struct graph_exec *exec = mem_alloc(1, sizeof *exec);
    const struct graph_header *h = graph->header;

    if (!exec)
        return -ENOMEM;
    exec->n_launches = h->n_launches;
    exec->n_segments = h->n_segments;
    exec->segments = mem_alloc(h->n_segments, sizeof *exec->segments);
    exec->kernels = mem_alloc(h->n_launches, sizeof *exec->kernels);
    exec->grids = mem_alloc(h->n_launches, sizeof *exec->grids);
    exec->args = mem_alloc(h->n_launches, sizeof *exec->args);
    exec->n_args = mem_alloc(h->n_launches, sizeof *exec->n_args);
    exec->words = mem_alloc(h->n_args, sizeof *exec->words);
    if (!exec->segments || !exec->kernels || !exec->grids || !exec->args || !exec->n_args ||
        !exec->words)
        return -ENOMEM;
    *ret = TAKE(exec);
    return 0;
}

static int check_arenas(const struct graph *graph, const uint64_t *base, const uint64_t *size,
                        struct error *err)
{
    for (int a = 0; a < EMBER_ARENA_COUNT; a++) {
        uint64_t end;
        if (size[a] < graph->arenas[a])
            return error_set(err, ERANGE, "the %s arena has %llu bytes, the graph needs %llu",
                             ARENA_NAMES[a], (unsigned long long)size[a],
                             (unsigned long long)graph->arenas[a]);
        if (!size_add(base[a], size[a], &end))
            return error_set(err, ERANGE, "the %s arena wraps the address space", ARENA_NAMES[a]);
    }
    return 0;
}

static void relocate(const struct graph *graph, const uint64_t *base,
                     struct ember_kernel *const *kernels, struct graph_exec *exec)
{
    for (uint32_t i = 0; i < graph->header->n_args; i++)
        exec->words[i] = graph->args[i] + (graph->relocs[i] < 0 ? 0 : base[graph->relocs[i]]);
    for (uint32_t i = 0; i < exec->n_launches; i++) {
        const struct graph_launch *l = &graph->launches[i];
        exec->kernels[i] = kernels[l->kernel];
        memcpy(exec->grids[i], l->grid, sizeof l->grid);
        exec->args[i] = exec->words + l->first_arg;
        exec->n_args[i] = l->n_args;
    }
    if (exec->n_segments)
        memcpy(exec->segments, graph->segments, exec->n_segments * sizeof *exec->segments);
}

static int make_native(struct graph_exec *exec, struct ember_device *device, struct error *err)
{
    struct ember_backend_error error = {""};
    int r;

    if (!exec->backend->graph_instantiate)
        return 0;
    r = exec->backend->graph_instantiate(device, exec->kernels, (const uint32_t(*)[3])exec->grids,
                                         exec->args, exec->n_args, exec->n_launches, &exec->native,
                                         &error);
    if (r == -ENOTSUP) /* this graph is not for it: launch by launch */
        return 0;
    return r < 0 ? backend_fail(exec->backend, r, &error, err) : 0;
}

int graph_instantiate(const struct graph *graph, const struct ember_backend *backend,
                      struct ember_device *device, const uint64_t base[EMBER_ARENA_COUNT],
                      const uint64_t size[EMBER_ARENA_COUNT], struct ember_kernel *const *kernels,
                      struct graph_exec **ret, struct error *err)
{
    _cleanup_(graph_exec_freep) struct graph_exec *exec = NULL;
    int r = check_arenas(graph, base, size, err);

    if (r < 0)
        return r;
    for (uint32_t i = 0; i < graph->header->n_kernels; i++)
        if (!kernels[i])
            return error_set(err, EINVAL, "kernel %s of a graph was not resolved",
                             graph->kernels[i].name);
    if (exec_alloc(graph, &exec))
        return error_set(err, ENOMEM, "no memory to instantiate a graph of %u launches",
                         graph->header->n_launches);
    exec->backend = backend;
    relocate(graph, base, kernels, exec);
    r = make_native(exec, device, err);
    if (r < 0)
        return r;
    *ret = TAKE(exec);
    return 0;
}

static int run_range(struct graph_exec *exec, struct ember_queue *queue, uint32_t first,
                     uint32_t count, struct error *err)
{
    struct ember_backend_error error = {""};
    int r = 0;

    if (exec->native) {
        r = exec->backend->graph_launch(queue, exec->native, first, count, &error);
        return r < 0 ? backend_fail(exec->backend, r, &error, err) : 0;
    }
    for (uint32_t i = first; i < first + count && !r; i++)
        r = exec->backend->launch(queue, exec->kernels[i], exec->grids[i], exec->args[i],
                                  exec->n_args[i], &error);
    return r < 0 ? backend_fail(exec->backend, r, &error, err) : 0;
}

int graph_exec_run(struct graph_exec *exec, struct ember_queue *queue, struct error *err)
{
    return run_range(exec, queue, 0, exec->n_launches, err);
}

int graph_exec_run_segment(struct graph_exec *exec, struct ember_queue *queue, uint32_t segment,
                           struct error *err)
{
    if (segment >= exec->n_segments)
        return error_set(err, EINVAL, "segment %u of a graph that has %u", segment,
                         exec->n_segments);
    return run_range(exec, queue, exec->segments[segment].first, exec->segments[segment].count,
                     err);
}

int graph_exec_profile(struct graph_exec *exec, uint64_t *ns, struct error *err)
{
    if (!exec->native || !exec->backend->graph_profile)
        return error_set(err, ENOTSUP, "%s backend: keeps no times of kernels",
                         exec->backend->name);
    return exec->backend->graph_profile(exec->native, ns);
}
