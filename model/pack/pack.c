/* SPDX-License-Identifier: Apache-2.0 */
#include "model/pack/internal.h"

#include <stdio.h>
#include <string.h>

uint64_t pack_header_checksum(const uint8_t block[PACK_HEADER_BYTES])
{
    return checksum_of(block + PACK_CHECKED_FROM, PACK_HEADER_BYTES - PACK_CHECKED_FROM);
}

static int add_entry(const struct weight *w, uint32_t name_at, struct buffer *out)
{
    struct pack_tensor t = {.offset = w->offset,
                            .bytes = w->bytes,
                            .row_bytes = w->row_bytes,
                            .scale_at = w->scale_at,
                            .zero_at = w->zero_at,
                            .order_at = w->order_at,
                            .group = w->group,
                            .groups = w->groups,
                            .name_at = name_at,
                            .dtype = w->dtype,
                            .rank = w->rank,
                            .quant = w->quant,
                            .scale_dtype = w->scale_dtype};
    memcpy(t.dim, w->dim, sizeof t.dim);
    return buffer_append(out, &t, sizeof t);
}

int pack_index_make(const struct weights_layout *layout, struct buffer *out)
{
    uint32_t counts[2] = {layout->n_weights, 0};
    for (uint32_t i = 0; i < layout->n_weights; i++)
        counts[1] += (uint32_t)strlen(layout->weights[i].name) + 1;
    int r = buffer_append(out, counts, sizeof counts);
    uint32_t name_at = 0;
    for (uint32_t i = 0; r == 0 && i < layout->n_weights; i++) {
        r = add_entry(&layout->weights[i], name_at, out);
        name_at += (uint32_t)strlen(layout->weights[i].name) + 1;
    }
    for (uint32_t i = 0; r == 0 && i < layout->n_weights; i++)
        r = buffer_append(out, layout->weights[i].name, strlen(layout->weights[i].name) + 1);
    return r;
}

void pack_tensors_text(const struct weights_layout *layout, uint64_t at, uint64_t bytes, char *out,
                       size_t room)
{
    const char *first = NULL, *last = NULL;
    for (uint32_t i = 0; i < layout->n_weights; i++) {
        const struct weight *w = &layout->weights[i];
        if (w->offset + w->bytes <= at || w->offset >= at + bytes)
            continue;
        first = first ? first : w->name;
        last = w->name;
    }
    if (!first)
        snprintf(out, room, "no tensor");
    else if (first == last)
        snprintf(out, room, "%s", first);
    else
        snprintf(out, room, "%s to %s", first, last);
}
