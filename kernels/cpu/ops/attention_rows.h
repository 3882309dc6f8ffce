/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All of attention but the parts themselves (attention.h): which queries go together, the joining
 * of parts, the sinks.
 *
 * attention_rows does whole rows. attention_row_parts and attention_row_joins do the same in two
 * launches, for steps of few rows: parts go to scratch first, so that one row's keys are spread
 * over all threads. Blocks split KV heads x (groups of ROW_TILE rows), and parts.
 */
#ifndef EMBER_KERNELS_CPU_ATTENTION_ROWS_H
#define EMBER_KERNELS_CPU_ATTENTION_ROWS_H

/* Keys of a part for a row that sees keys below end. */
INLINE size_t part_keys(size_t end)
{
    size_t keys = EMBER_ATTN_PART;
    while (keys * EMBER_ATTN_PARTS < end)
        keys *= 2;
    return keys;
}

/* Adds a part to those before it, whose top, total and sum are *top, *total and out. */
INLINE void join(float *out, float *top, float *total, const float *sum, float part_top,
                 float part_total, int is_first, const size_t dv)
{
    if (is_first) {
        *top = part_top;
        *total = part_total;
        for (size_t d = 0; d < dv; d += VL)
            v_put(out + d, v_get(sum + d, V_LEFT(d, dv)), V_LEFT(d, dv));
        return;
    }
    float most = part_top > *top ? part_top : *top;
    float keep = most == *top ? 1.0f : exp_one(*top - most);
    float more = most == part_top ? 1.0f : exp_one(part_top - most);
    *top = most;
    *total = *total * keep + part_total * more;
    for (size_t d = 0; d < dv; d += VL) {
        size_t left = V_LEFT(d, dv);
        v_put(out + d,
              v_fma(v_set(more), v_get(sum + d, left), v_mul(v_set(keep), v_get(out + d, left))),
              left);
    }
}

/* The sink, and out over the total. */
INLINE void finish(const uint64_t *args, float *out, float top, float total, size_t head)
{
    const size_t dv = ATTENTION_DV;
    float keep = 1;
    if (args[ATT_SINKS]) {
        float sink =
            w_at(arg_pointer(args[ATT_SINKS]), head, (enum ember_dtype)args[ATT_SINKS_DTYPE]);
        float most = sink > top ? sink : top;
        keep = exp_one(top - most);
        total = total * keep + exp_one(sink - most);
    }
    vf scale = v_set(keep / total);
    for (size_t d = 0; d < dv; d += VL) {
        size_t left = V_LEFT(d, dv);
        v_put(out + d, v_mul(scale, v_get(out + d, left)), left);
    }
}
INLINE uint32_t row_end(const uint64_t *args, size_t row)
{
    return ((const uint32_t *)arg_pointer(args[ATT_POSITIONS]))[row] + 1;
}

INLINE uint32_t row_first(const uint64_t *args, size_t row)
{
    uint32_t end = row_end(args, row), window = (uint32_t)args[ATT_WINDOW];
    return window && end > window ? end - window : 0;
}

/* Behind the last row that may go with row `first`: of the same sequence, cut into the same parts,
 * one position after the other. */
INLINE size_t tile_end(const uint64_t *args, size_t first, size_t limit)
{
    const int32_t *seq_of = (const int32_t *)arg_pointer(args[ATT_SEQ_OF]);
    size_t keys = part_keys(row_end(args, first)), end = first + 1;
    while (end < limit && seq_of[end] == seq_of[first] &&
           row_end(args, end) > row_end(args, end - 1) && part_keys(row_end(args, end)) == keys)
        end++;
    return end;
}

INLINE void query_start(const uint64_t *args, struct query *query, size_t row, size_t head,
                        float *sum)
{
    const size_t dk = ATTENTION_DK, dv = ATTENTION_DV;
    query->q = (const float *)(arg_pointer(args[ATT_Q]) + row * args[ATT_Q_STRIDE]) + head * dk;
    query->out = (float *)(arg_pointer(args[ATT_OUT]) + row * args[ATT_OUT_STRIDE]) + head * dv;
    query->sum = sum;
    query->first = row_first(args, row);
    query->end = row_end(args, row);
}

INLINE struct kv kv_start(const uint64_t *args, size_t row, size_t kv_head)
{
    const size_t dk = ATTENTION_DK, dv = ATTENTION_DV, page_size = ATTENTION_PAGE;
    const size_t kv_heads = args[ATT_KV_HEADS];
    const uint32_t seq = ((const uint32_t *)arg_pointer(args[ATT_SEQ_OF]))[row];
    enum ember_dtype dtype = (enum ember_dtype)args[ATT_KV_DTYPE];
    size_t k_at = kv_head * page_size * dk, v_at = kv_head * page_size * dv;
    return (struct kv){
        .k = arg_pointer(args[ATT_K]) + k_at * kv_size(dtype),
        .v = arg_pointer(args[ATT_V]) + v_at * kv_size(dtype),
        .k_scales = kv_scales_at(kv_heads * page_size * dk) - k_at + 4 * kv_head * page_size,
        .v_scales = kv_scales_at(kv_heads * page_size * dv) - v_at + 4 * kv_head * page_size,
        .pages = (const int32_t *)(arg_pointer(args[ATT_PAGES]) + seq * args[ATT_PAGES_STRIDE]),
        .dtype = dtype,
        .scale = arg_float(args[ATT_SCALE]),
        .softcap = arg_float(args[ATT_SOFTCAP])};
}

/* ---- whole rows ---- */

/* n queries over all their keys, part by part. */
INLINE void run_queries(const uint64_t *args, const struct kv *kv, struct room *room,
                        struct query *query, size_t n)
{
    const size_t dv = ATTENTION_DV, keys = part_keys(query[0].end);
    for (size_t from = query[0].first / keys * keys; from < query[n - 1].end; from += keys) {
        run_part(args, kv, room, query, n, from, from + keys);
        for (size_t q = 0; q < n; q++)
            if (overlaps(query + q, from, from + keys))
                join(query[q].out, &query[q].all_top, &query[q].all_total, query[q].sum,
                     query[q].top, query[q].total, query[q].first / keys * keys == from, dv);
    }
}

/* Rows first .. end - 1, a tile; KV head kv_head, all query heads of its group. */
INLINE void run_rows(const uint64_t *args, size_t first, size_t end, size_t kv_head)
{
    const size_t group = args[ATT_Q_HEADS] / args[ATT_KV_HEADS], n = (end - first) * group,
                 together = queries(ATTENTION_DK, ATTENTION_DV), dv = ATTENTION_DV;
    float sums[SUMS];
    struct query query[QUERIES];
    struct room room;
    struct kv kv = kv_start(args, first, kv_head);
    for (size_t i = 0; i < n; i += together) {
        size_t some = n - i < together ? n - i : together;
        for (size_t j = 0; j < some; j++)
            query_start(args, query + j, first + (i + j) / group, kv_head * group + (i + j) % group,
                        sums + j * dv);
        room_start(args, &room, query, some);
        run_queries(args, &kv, &room, query, some);
        for (size_t j = 0; j < some; j++)
            finish(args, query[j].out, query[j].all_top, query[j].all_total,
                   kv_head * group + (i + j) % group);
    }
}

INLINE void attention_rows(const uint64_t *args, uint32_t block, uint32_t n_blocks)
{
    const size_t rows = arg_rows(args), kv_heads = args[ATT_KV_HEADS];
    const size_t tiles = (rows + ROW_TILE - 1) / ROW_TILE;
    struct range range = block_range(tiles * kv_heads, block, n_blocks);
    for (size_t item = range.first; item < range.end; item++) {
        size_t first = item % tiles * ROW_TILE, kv_head = item / tiles;
        size_t last = first + ROW_TILE < rows ? first + ROW_TILE : rows;
        for (size_t end; first < last; first = end) {
            end = tile_end(args, first, last);
            run_rows(args, first, end, kv_head);
        }
    }
}

/* ---- parts and their joining ---- */

/* Where part number `part` (from the row's first on) of a query's stands: its sum, its top. */
struct place {
    float *sum, *top;
};
INLINE struct place part_place(const uint64_t *args, size_t row, size_t head, size_t part)
{
    const size_t dv = ATTENTION_DV, parts = args[ATT_PARTS_EACH], heads = args[ATT_Q_HEADS];
    float *at = (float *)(arg_pointer(args[ATT_PARTS]) + row * args[ATT_PARTS_STRIDE]);
    size_t i = head * parts + part;
    return (struct place){at + i * dv, at + heads * parts * dv + 2 * i};
}

/* The parts of a row: numbers first .. end - 1 of `keys` keys each. */
struct parts {
    size_t keys, first, end;
};
INLINE struct parts row_parts(const uint64_t *args, size_t row)
{
    size_t keys = part_keys(row_end(args, row));
    return (struct parts){keys, row_first(args, row) / keys, (row_end(args, row) - 1) / keys + 1};
}

/* Part number `part` of the rows of a tile for one KV head. */
INLINE void run_tile_part(const uint64_t *args, size_t first, size_t end, size_t kv_head,
                          size_t part)
{
    const size_t group = args[ATT_Q_HEADS] / args[ATT_KV_HEADS],
                 together = queries(ATTENTION_DK, ATTENTION_DV);
    struct query query[QUERIES];
    struct room room;
    struct place place[QUERIES];
    struct kv kv = kv_start(args, first, kv_head);
    size_t n = (end - first) * group, keys = row_parts(args, first).keys;
    for (size_t i = 0, some; i < n; i += some) {
        size_t count = 0;
        for (some = 0; i + some < n && count < together; some++) {
            size_t row = first + (i + some) / group, head = kv_head * group + (i + some) % group;
            struct parts parts = row_parts(args, row);
            if (part < parts.first || part >= parts.end)
                continue;
            place[count] = part_place(args, row, head, part - parts.first);
            query_start(args, query + count, row, head, place[count].sum);
            count++;
        }
        if (count) {
            room_start(args, &room, query, count);
            run_part(args, &kv, &room, query, count, part * keys, (part + 1) * keys);
        }
        for (size_t q = 0; q < count; q++) {
            place[q].top[0] = query[q].top;
            place[q].top[1] = query[q].total;
        }
    }
}

/* Units are (tile, KV head, part), numbered through: a block does its share of them. */
INLINE void attention_row_parts(const uint64_t *args, uint32_t block, uint32_t n_blocks)
{
    const size_t rows = arg_rows(args), kv_heads = args[ATT_KV_HEADS];
    size_t total = 0, at = 0;
    for (size_t first = 0, end; first < rows; first = end) {
        end = tile_end(args, first, first + ROW_TILE < rows ? first + ROW_TILE : rows);
        total += (row_parts(args, end - 1).end - row_parts(args, first).first) * kv_heads;
    }
    struct range range = block_range(total, block, n_blocks);
    for (size_t first = 0, end; first < rows && at < range.end; first = end) {
        end = tile_end(args, first, first + ROW_TILE < rows ? first + ROW_TILE : rows);
        size_t from = row_parts(args, first).first, parts = row_parts(args, end - 1).end - from;
        size_t unit = at > range.first ? at : range.first;
        at += parts * kv_heads;
        for (; unit < range.end && unit < at; unit++) {
            size_t i = unit + parts * kv_heads - at;
            run_tile_part(args, first, end, i / parts, from + i % parts);
        }
    }
}

INLINE void attention_row_joins(const uint64_t *args, uint32_t block, uint32_t n_blocks)
{
    const size_t heads = args[ATT_Q_HEADS], dv = ATTENTION_DV;
    struct range range = block_range(arg_rows(args) * heads, block, n_blocks);
    for (size_t i = range.first; i < range.end; i++) {
        size_t row = i / heads, head = i % heads;
        struct parts parts = row_parts(args, row);
        float *out = (float *)(arg_pointer(args[ATT_OUT]) + row * args[ATT_OUT_STRIDE]) + head * dv;
        float top = 0, total = 0;
        for (size_t part = 0; part < parts.end - parts.first; part++) {
            struct place place = part_place(args, row, head, part);
            join(out, &top, &total, place.sum, place.top[0], place.top[1], part == 0, dv);
        }
        finish(args, out, top, total, head);
    }
}

#endif
