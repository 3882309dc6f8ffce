/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attention over paged K and V.
 *
 * For one query (a row and a query head) everything depends on its position alone. Its keys are cut
 * into parts of EMBER_ATTN_PART keys (a power of two more where that would make more than
 * EMBER_ATTN_PARTS), a part into chunks of CHUNK keys. Over the chunks of a part: scores; new
 * maximum; what was summed so far scaled down; exponentials added lane by lane; sum += p_j v_j for
 * j ascending. Then the parts are put together, in order. Several queries that read the same K and
 * V (the heads of a group, and neighbouring rows of a sequence) go through the keys together, which
 * changes nothing for each one.
 *
 * `attention` does whole rows. `attention_parts` and `attention_join` do the same in two launches,
 * for steps of few rows: parts go to scratch first, so that one row's keys are spread over all
 * threads. Blocks split (groups of ROW_TILE rows) x KV heads, and parts.
 */
#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/ops/kv.h"
#include "kernels/cpu/simd.h"

#ifdef SPEC_DK
#define ATTENTION_DK SPEC_DK
#else
#define ATTENTION_DK args[ATT_DK]
#endif
#ifdef SPEC_DV
#define ATTENTION_DV SPEC_DV
#else
#define ATTENTION_DV args[ATT_DV]
#endif
#ifdef SPEC_PAGE
#define ATTENTION_PAGE SPEC_PAGE
#else
#define ATTENTION_PAGE args[ATT_PAGE_SIZE]
#endif

#define CHUNK 64        /* keys, a multiple of every VL; a part is a multiple of it */
#define STEP 16         /* keys of one page that are widened and used at a time */
#define ROW_TILE 8      /* rows whose queries may share K and V */
#define QUERIES 16      /* queries that go through the keys together */
#define FETCH_QUERIES 4 /* more than these and the arithmetic takes longer than memory */
#define SUMS 8192       /* floats of their sums */
#define LOWEST -3.0e38f

struct query {
    const float *q;
    float *out, *sum;         /* its row of the output; of the part: sum of p v */
    uint32_t first, end;      /* keys that it sees */
    float top, total;         /* of the part: largest score so far, sum of exponentials below it */
    float all_top, all_total; /* of the parts so far, whose sum is in out */
    float p[CHUNK + 4];       /* scores of the chunk, then exponentials */
};

/* K and V of one sequence and KV head. */
struct kv {
    const char *k, *v;         /* of the head in page 0 */
    size_t k_scales, v_scales; /* int8: bytes from there to the scales */
    const int32_t *pages;
    enum ember_dtype dtype;
    float scale, softcap;
    float *wide; /* room for STEP keys or values */
};

/* Keys key .. key + n - 1, all in one page. */
struct step {
    size_t page, slot, key, n;
};

INLINE struct step step_at(size_t key, size_t end, size_t page_size)
{
    struct step s = {key / page_size, key % page_size, key, STEP};
    size_t left = page_size - s.slot;
    s.n = s.n < left ? s.n : left;
    s.n = s.n < end - key ? s.n : end - key;
    return s;
}

INLINE float exp_one(float x)
{
    return v_first(v_exp(v_set(x)));
}

/* ---- scores ---- */

/* Scores of NQ queries against n keys, four keys at a time. */
INLINE void scores(const int NQ, struct query *query, size_t at, const float *keys, size_t n,
                   const size_t dk)
{
    for (size_t j = 0; j < n; j += 4) {
        const float *k[4];
        for (size_t i = 0; i < 4; i++)
            k[i] = keys + (j + i < n ? j + i : j) * dk;
        vf acc[4][4];
        UNROLL
        for (int q = 0; q < NQ; q++)
            UNROLL
        for (int i = 0; i < 4; i++)
            acc[q][i] = v_zero();
        size_t d = 0;
        for (; d + VL <= dk; d += VL) {
            vf kv[4];
            UNROLL
            for (int i = 0; i < 4; i++)
                kv[i] = v_load(k[i] + d);
            UNROLL
            for (int q = 0; q < NQ; q++) {
                vf qv = v_load(query[q].q + d);
                UNROLL
                for (int i = 0; i < 4; i++)
                    acc[q][i] = v_fma(qv, kv[i], acc[q][i]);
            }
        }
        if (d < dk) {
            UNROLL
            for (int q = 0; q < NQ; q++) {
                vf qv = v_load_part(query[q].q + d, dk - d);
                UNROLL
                for (int i = 0; i < 4; i++)
                    acc[q][i] = v_fma(qv, v_load_part(k[i] + d, dk - d), acc[q][i]);
            }
        }
        UNROLL
        for (int q = 0; q < NQ; q++)
            _mm_storeu_ps(query[q].p + at + j, v_sum4(acc[q][0], acc[q][1], acc[q][2], acc[q][3]));
    }
}

INLINE void all_scores(struct query *query, size_t n, size_t at, const float *keys, size_t n_keys,
                       const size_t dk)
{
    size_t q = 0;
    for (; q + 4 <= n; q += 4)
        scores(4, query + q, at, keys, n_keys, dk);
    for (; q + 2 <= n; q += 2)
        scores(2, query + q, at, keys, n_keys, dk);
    if (q < n)
        scores(1, query + q, at, keys, n_keys, dk);
}

/* p[0..n-1] *= by[0..n-1] */
INLINE void scale_keys(float *p, const char *by, size_t n)
{
    for (size_t i = 0; i < n; i += VL) {
        size_t left = V_LEFT(i, n);
        v_put(p + i, v_mul(v_get(p + i, left), v_get((const float *)by + i, left)), left);
    }
}

/* The keys of a page that come a chunk later, on their way while these are used. */
INLINE void fetch(const char *at, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(at + i, 0, 2);
}

/* ---- softmax ---- */

/* Scores of keys chunk .. chunk + CHUNK - 1 to exponentials; returns what the sums so far are to be
 * multiplied with. Keys unseen get 0. */
INLINE float softmax(struct query *query, size_t chunk, const struct kv *kv)
{
    const float lowest = -__builtin_inff();
    vf s[CHUNK / VL], most = v_set(lowest);
    for (size_t i = 0; chunk + i < query->first; i++)
        query->p[i] = lowest;
    for (size_t i = query->end > chunk ? query->end - chunk : 0; i < CHUNK; i++)
        query->p[i] = lowest;
    UNROLL
    for (int i = 0; i < CHUNK / VL; i++) {
        vf raw = v_load(query->p + i * VL);
        s[i] = v_mul(raw, v_set(kv->scale));
        if (kv->softcap > 0)
            s[i] = v_softcap(s[i], kv->softcap);
        s[i] =
            v_select_lt(raw, v_set(LOWEST), v_set(lowest), s[i]); /* a scale may be 0 or negative */
        most = v_max(most, s[i]);
    }
    float top = v_reduce_max(most);
    top = top > query->top ? top : query->top;
    float keep = top == query->top ? 1.0f : exp_one(query->top - top);
    vf sum = v_zero();
    UNROLL
    for (int i = 0; i < CHUNK / VL; i++) {
        vf p = v_exp(v_sub(s[i], v_set(top)));
        v_store(query->p + i * VL, p);
        sum = v_add(sum, p);
    }
    query->total = query->total * keep + v_sum(sum);
    query->top = top;
    return keep;
}

/* ---- values ---- */

/* Values from .. to - 1 of a step that a query sees. */
struct seen {
    size_t from, to;
};
INLINE struct seen step_seen(const struct query *query, const struct step *s)
{
    size_t from = query->first > s->key ? query->first - s->key : 0,
           to = query->end > s->key ? query->end - s->key : 0;
    return (struct seen){from, to < s->n ? to : s->n};
}

/* sum = keep * sum + sum of p_j v_j over the values seen, for NQ queries that see the same ones. */
INLINE void accumulate(const int NQ, const struct query *query, size_t at, const float *values,
                       struct seen seen, const float *keep, const size_t dv)
{
    size_t d = 0;
    for (; d + 4 * VL <= dv; d += 4 * VL) {
        vf acc[4][4];
        UNROLL
        for (int q = 0; q < NQ; q++)
            UNROLL
        for (int i = 0; i < 4; i++)
            acc[q][i] = v_mul(v_set(keep[q]), v_load(query[q].sum + d + i * VL));
        for (size_t j = seen.from; j < seen.to; j++) {
            const float *v = values + j * dv + d;
            vf p[4];
            UNROLL
            for (int q = 0; q < NQ; q++)
                p[q] = v_set(query[q].p[at + j]);
            UNROLL
            for (int i = 0; i < 4; i++) {
                vf vv = v_load(v + i * VL);
                UNROLL
                for (int q = 0; q < NQ; q++)
                    acc[q][i] = v_fma(p[q], vv, acc[q][i]);
            }
        }
        UNROLL
        for (int q = 0; q < NQ; q++)
            UNROLL
        for (int i = 0; i < 4; i++)
            v_store(query[q].sum + d + i * VL, acc[q][i]);
    }
    for (; d < dv; d += VL) {
        size_t left = V_LEFT(d, dv);
        for (int q = 0; q < NQ; q++) {
            vf acc = v_mul(v_set(keep[q]), v_get(query[q].sum + d, left));
            for (size_t j = seen.from; j < seen.to; j++)
                acc = v_fma(v_set(query[q].p[at + j]), v_get(values + j * dv + d, left), acc);
            v_put(query[q].sum + d, acc, left);
        }
    }
}

/* One step's values for n queries, as many at a time as see the same ones. */
INLINE void all_values(struct query *query, size_t n, const struct step *s, size_t at,
                       const float *values, float *keep, const size_t dv)
{
    for (size_t q = 0, some; q < n; q += some) {
        struct seen seen = step_seen(query + q, s);
        for (some = 1; some < 4 && q + some < n; some++) {
            struct seen other = step_seen(query + q + some, s);
            if (other.from != seen.from || other.to != seen.to)
                break;
        }
        some = some == 3 ? 2 : some;
        if (seen.from >= seen.to)
            continue;
        if (some == 4)
            accumulate(4, query + q, at, values, seen, keep + q, dv);
        else if (some == 2)
            accumulate(2, query + q, at, values, seen, keep + q, dv);
        else
            accumulate(1, query + q, at, values, seen, keep + q, dv);
        for (size_t i = 0; i < some; i++)
            keep[q + i] = 1;
    }
}

/* ---- parts ---- */

INLINE int overlaps(const struct query *query, size_t from, size_t to)
{
    return query->first < to && query->end > from;
}

/* One chunk, of which some query sees the keys from .. to - 1. */
INLINE void run_chunk(const uint64_t *args, const struct kv *kv, struct query *query, size_t n,
                      size_t chunk, size_t from, size_t to)
{
    const size_t dk = ATTENTION_DK, dv = ATTENTION_DV, page_size = ATTENTION_PAGE;
    const size_t size = kv_size(kv->dtype);
    float keep[QUERIES];
    struct step s;
    for (size_t key = from; key < to; key += s.n) {
        s = step_at(key, to, page_size);
        const char *k = kv->k + (size_t)(uint32_t)kv->pages[s.page] * args[ATT_K_PAGE_STRIDE];
        if (n <= FETCH_QUERIES && query[n - 1].end > key + CHUNK) {
            struct step next = step_at(key + CHUNK, query[n - 1].end, page_size);
            fetch(kv->k + (size_t)(uint32_t)kv->pages[next.page] * args[ATT_K_PAGE_STRIDE] +
                      next.slot * dk * size,
                  next.n * dk * size);
        }
        const float *keys = kv_widen(k + s.slot * dk * size, kv->dtype, s.n * dk, kv->wide);
        all_scores(query, n, key - chunk, keys, s.n, dk);
        for (size_t q = 0; kv->dtype == EMBER_I8 && q < n; q++)
            scale_keys(query[q].p + (key - chunk), k + kv->k_scales + 4 * s.slot, s.n);
    }
    for (size_t q = 0; q < n; q++)
        if (overlaps(query + q, from, to))
            keep[q] = softmax(query + q, chunk, kv);
    for (size_t key = from; key < to; key += s.n) {
        s = step_at(key, to, page_size);
        const char *v = kv->v + (size_t)(uint32_t)kv->pages[s.page] * args[ATT_V_PAGE_STRIDE];
        if (n <= FETCH_QUERIES && query[n - 1].end > key + CHUNK) {
            struct step next = step_at(key + CHUNK, query[n - 1].end, page_size);
            fetch(kv->v + (size_t)(uint32_t)kv->pages[next.page] * args[ATT_V_PAGE_STRIDE] +
                      next.slot * dv * size,
                  next.n * dv * size);
        }
        const float *values = kv_widen(v + s.slot * dv * size, kv->dtype, s.n * dv, kv->wide);
        for (size_t q = 0; kv->dtype == EMBER_I8 && q < n; q++)
            scale_keys(query[q].p + (key - chunk), v + kv->v_scales + 4 * s.slot, s.n);
        all_values(query, n, &s, key - chunk, values, keep, dv);
    }
}

/* Keys from .. to - 1 for n queries of one sequence, rows ascending: top, total and sum of each. */
INLINE void run_part(const uint64_t *args, const struct kv *kv, struct query *query, size_t n,
                     size_t from, size_t to)
{
    const size_t dv = ATTENTION_DV;
    size_t first = query[0].first > from ? query[0].first : from,
           end = query[n - 1].end < to ? query[n - 1].end : to;
    for (size_t q = 0; q < n; q++) {
        query[q].top = LOWEST;
        query[q].total = 0;
        for (size_t d = 0; d < dv; d += VL)
            v_put(query[q].sum + d, v_zero(), V_LEFT(d, dv));
    }
    for (size_t chunk = first / CHUNK * CHUNK; chunk < end; chunk += CHUNK)
        run_chunk(args, kv, query, n, chunk, chunk > first ? chunk : first,
                  chunk + CHUNK < end ? chunk + CHUNK : end);
}

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

/* ---- rows ---- */

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

INLINE struct kv kv_start(const uint64_t *args, size_t row, size_t kv_head, float *wide)
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
        .softcap = arg_float(args[ATT_SOFTCAP]),
        .wide = wide};
}

/* How many queries go together. */
INLINE size_t queries(size_t dv)
{
    size_t n = SUMS / dv;
    return n < QUERIES ? n : QUERIES;
}

/* ---- whole rows ---- */

/* n queries over all their keys, part by part. */
INLINE void run_queries(const uint64_t *args, const struct kv *kv, struct query *query, size_t n)
{
    const size_t dv = ATTENTION_DV, keys = part_keys(query[0].end);
    for (size_t from = query[0].first / keys * keys; from < query[n - 1].end; from += keys) {
        run_part(args, kv, query, n, from, from + keys);
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
                 together = queries(ATTENTION_DV), dv = ATTENTION_DV;
    float sums[SUMS], wide[STEP * ATTENTION_DIM_MAX];
    struct query query[QUERIES];
    struct kv kv = kv_start(args, first, kv_head, wide);
    for (size_t i = 0; i < n; i += together) {
        size_t some = n - i < together ? n - i : together;
        for (size_t j = 0; j < some; j++)
            query_start(args, query + j, first + (i + j) / group, kv_head * group + (i + j) % group,
                        sums + j * dv);
        run_queries(args, &kv, query, some);
        for (size_t j = 0; j < some; j++)
            finish(args, query[j].out, query[j].all_top, query[j].all_total,
                   kv_head * group + (i + j) % group);
    }
}

KERNEL(attention)
{
    const size_t rows = arg_rows(args), kv_heads = args[ATT_KV_HEADS];
    struct range range = block_range((rows + ROW_TILE - 1) / ROW_TILE * kv_heads, block, n_blocks);
    for (size_t item = range.first; item < range.end; item++) {
        size_t first = item / kv_heads * ROW_TILE, kv_head = item % kv_heads;
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
    const size_t group = args[ATT_Q_HEADS] / args[ATT_KV_HEADS], together = queries(ATTENTION_DV);
    float wide[STEP * ATTENTION_DIM_MAX];
    struct query query[QUERIES];
    struct place place[QUERIES];
    struct kv kv = kv_start(args, first, kv_head, wide);
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
        if (count)
            run_part(args, &kv, query, count, part * keys, (part + 1) * keys);
        for (size_t q = 0; q < count; q++) {
            place[q].top[0] = query[q].top;
            place[q].top[1] = query[q].total;
        }
    }
}

/* Units are (tile, KV head, part), numbered through: a block does its share of them. */
KERNEL(attention_parts)
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

KERNEL(attention_join)
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
