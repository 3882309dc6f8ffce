/* SPDX-License-Identifier: Apache-2.0 */
/* Stored graphs: whatever parses stores back to the same bytes and keeps its promises. */
#include <assert.h>
#include <string.h>

#include "kernels/graph.h"

static void check_segments(const struct graph *graph)
{
    uint32_t next = 0;

    for (uint32_t i = 0; i < graph_segment_count(graph); i++) {
        const struct plan_segment *s = graph_segment_at(graph, i);
        assert(s->first == next && s->count <= graph_launch_count(graph) - next);
        next += s->count;
    }
    assert(next == graph_launch_count(graph));
}

static void check_kernels(const struct graph *graph)
{
    for (uint32_t i = 0; i < graph_kernel_count(graph); i++) {
        const struct graph_kernel *k = graph_kernel_at(graph, i);
        assert(memchr(k->name, 0, sizeof k->name) && *k->name);
        assert(memchr(k->spec, 0, sizeof k->spec));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    _cleanup_(graph_freep) struct graph *graph = NULL;
    _cleanup_(buffer_free) struct buffer out = {0};

    if (graph_parse(data, size, &graph, NULL))
        return 0;
    assert(!graph_store(graph, &out, NULL));
    assert(out.len == size && !memcmp(out.data, data, size));
    check_segments(graph);
    check_kernels(graph);
    return 0;
}
