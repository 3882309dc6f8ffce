/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attention over paged K and V, softmax in one pass over chunks of up to CHUNK keys that never
 * cross a page.
 *
 * For one query (a row and a query head) the chunks, their order and the arithmetic in them depend
 * on its position and the page size alone: scores of a chunk; new maximum; what was summed so far
 * scaled down; exponentials added lane by lane; out += p_j v_j for j ascending. Several queries
 * that read the same K and V (the heads of a group, and neighbouring rows of a sequence) go through
 * the chunks together, which changes nothing for each one. `out` itself is the accumulator. Blocks
 * split (groups of ROW_TILE rows) x KV heads.
 */
#include "kernels/cpu/ops/args.h"
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

#define CHUNK 16   /* a multiple of every VL */
#define ROW_TILE 8 /* rows whose queries may share K and V */
#define QUERIES 8  /* queries that go through the keys together */

struct query {
    const float *q;
    float *out;
    uint32_t first, end; /* keys that it sees */
    float top, total;    /* maximum so far, sum of exponentials below it */
    float p[CHUNK];      /* scores of the chunk, then exponentials */
};

/* Where keys key .. key + n - 1 stand. */
struct chunk {
    const float *k, *v;
    uint32_t key, n;
};

/* Scores of NQ queries against the chunk's keys, four keys at a time. */
INLINE void scores(const int NQ, struct query *query, const struct chunk *chunk, const size_t dk)
{
    for (uint32_t j = 0; j < chunk->n; j += 4) {
        const float *k[4];
        for (uint32_t i = 0; i < 4; i++)
            k[i] = chunk->k + (j + i < chunk->n ? j + i : j) * dk;
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
            _mm_storeu_ps(query[q].p + j, v_sum4(acc[q][0], acc[q][1], acc[q][2], acc[q][3]));
    }
}

/* Scores to exponentials; returns what the sums so far are to be multiplied with. Keys unseen get
 * 0. */
INLINE float softmax(struct query *query, const struct chunk *chunk, float scale, float softcap)
{
    const float lowest = -__builtin_inff();
    vf s[CHUNK / VL], most = v_set(lowest);
    if (chunk->n < CHUNK || chunk->key < query->first || chunk->key + CHUNK > query->end) {
        for (int i = 0; i < CHUNK; i++) {
            uint32_t key = chunk->key + (uint32_t)i;
            if ((uint32_t)i >= chunk->n || key < query->first || key >= query->end)
                query->p[i] = lowest;
        }
    }
    UNROLL
    for (int i = 0; i < CHUNK / VL; i++) {
        vf raw = v_load(query->p + i * VL);
        s[i] = v_mul(raw, v_set(scale));
        if (softcap > 0)
            s[i] = v_softcap(s[i], softcap);
        s[i] = v_select_lt(raw, v_set(-3.0e38f), v_set(lowest),
                           s[i]); /* a scale may be 0 or negative */
        most = v_max(most, s[i]);
    }
    float top = v_reduce_max(most);
    top = top > query->top ? top : query->top;
    float keep = top == query->top ? 1.0f : v_first(v_exp(v_set(query->top - top)));
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

/* Keys from .. to - 1 of the chunk that a query sees. */
struct seen {
    uint32_t from, to;
};
INLINE struct seen keys_seen(const struct query *query, const struct chunk *chunk)
{
    return (struct seen){query->first > chunk->key ? query->first - chunk->key : 0,
                         query->end - chunk->key < chunk->n ? query->end - chunk->key : chunk->n};
}

/* out = keep * out + sum of p_j v_j over the keys seen, for NQ queries that see the same ones. */
INLINE void accumulate(const int NQ, const struct query *query, const struct chunk *chunk,
                       struct seen seen, const float *keep, const size_t dv)
{
    size_t d = 0;
    for (; d + 4 * VL <= dv; d += 4 * VL) {
        vf acc[2][4];
        UNROLL
        for (int q = 0; q < NQ; q++)
            UNROLL
        for (int i = 0; i < 4; i++)
            acc[q][i] = v_mul(v_set(keep[q]), v_load(query[q].out + d + i * VL));
        for (uint32_t j = seen.from; j < seen.to; j++) {
            const float *v = chunk->v + j * dv + d;
            vf vv[4];
            UNROLL
            for (int i = 0; i < 4; i++)
                vv[i] = v_load(v + i * VL);
            UNROLL
            for (int q = 0; q < NQ; q++) {
                vf p = v_set(query[q].p[j]);
                UNROLL
                for (int i = 0; i < 4; i++)
                    acc[q][i] = v_fma(p, vv[i], acc[q][i]);
            }
        }
        UNROLL
        for (int q = 0; q < NQ; q++)
            UNROLL
        for (int i = 0; i < 4; i++)
            v_store(query[q].out + d + i * VL, acc[q][i]);
    }
    for (; d < dv; d += VL) {
        size_t left = V_LEFT(d, dv);
        for (int q = 0; q < NQ; q++) {
            vf acc = v_mul(v_set(keep[q]), v_get(query[q].out + d, left));
            for (uint32_t j = seen.from; j < seen.to; j++)
                acc = v_fma(v_set(query[q].p[j]), v_get(chunk->v + j * dv + d, left), acc);
            v_put(query[q].out + d, acc, left);
        }
    }
}

/* The second half of a chunk for n queries, two at a time where they see the same keys. */
INLINE void all_outputs(struct query *query, size_t n, const struct chunk *chunk, float scale,
                        float softcap, const size_t dv)
{
    float keep[QUERIES];
    for (size_t q = 0; q < n; q++)
        if (query[q].first < chunk->key + chunk->n && query[q].end > chunk->key)
            keep[q] = softmax(query + q, chunk, scale, softcap);
    for (size_t q = 0; q < n; q++) {
        if (query[q].first >= chunk->key + chunk->n || query[q].end <= chunk->key)
            continue;
        struct seen seen = keys_seen(query + q, chunk), other = {1, 0};
        if (q + 1 < n && query[q + 1].end > chunk->key)
            other = keys_seen(query + q + 1, chunk);
        if (seen.from == other.from && seen.to == other.to) {
            accumulate(2, query + q, chunk, seen, keep + q, dv);
            q++;
        } else {
            accumulate(1, query + q, chunk, seen, keep + q, dv);
        }
    }
}

INLINE void all_scores(struct query *query, size_t n, const struct chunk *chunk, const size_t dk)
{
    size_t q = 0;
    for (; q + 4 <= n; q += 4)
        scores(4, query + q, chunk, dk);
    for (; q + 2 <= n; q += 2)
        scores(2, query + q, chunk, dk);
    if (q < n)
        scores(1, query + q, chunk, dk);
}

/* n queries of one sequence and KV head over all their keys. */
static void run_queries(const uint64_t *args, struct query *query, size_t n, const int32_t *pages,
                        size_t kv_head)
{
    const size_t dk = ATTENTION_DK, dv = ATTENTION_DV, page_size = ATTENTION_PAGE;
    const char *k = arg_pointer(args[ATT_K]), *v = arg_pointer(args[ATT_V]);
    const float scale = arg_float(args[ATT_SCALE]), softcap = arg_float(args[ATT_SOFTCAP]);
    uint32_t first = UINT32_MAX, end = 0;
    for (size_t i = 0; i < n; i++) {
        first = query[i].first < first ? query[i].first : first;
        end = query[i].end > end ? query[i].end : end;
    }
    for (size_t page = first / page_size; page * page_size < end; page++) {
        const char *k_page = k + (size_t)(uint32_t)pages[page] * args[ATT_K_PAGE_STRIDE];
        const char *v_page = v + (size_t)(uint32_t)pages[page] * args[ATT_V_PAGE_STRIDE];
        for (size_t slot = 0; slot < page_size; slot += CHUNK) {
            size_t key = page * page_size + slot, at = kv_head * page_size + slot;
            size_t keys = page_size - slot < CHUNK ? page_size - slot : CHUNK;
            if (key >= end)
                break;
            if (key + keys <= first)
                continue;
            struct chunk chunk = {(const float *)k_page + at * dk, (const float *)v_page + at * dv,
                                  (uint32_t)key, (uint32_t)(end - key < keys ? end - key : keys)};
            all_scores(query, n, &chunk, dk);
            all_outputs(query, n, &chunk, scale, softcap, dv);
        }
    }
}

INLINE void query_start(const uint64_t *args, struct query *query, size_t row, size_t head)
{
    const size_t dk = ATTENTION_DK, dv = ATTENTION_DV;
    uint32_t end = ((const uint32_t *)arg_pointer(args[ATT_POSITIONS]))[row] + 1;
    uint32_t window = (uint32_t)args[ATT_WINDOW];
    query->q = (const float *)(arg_pointer(args[ATT_Q]) + row * args[ATT_Q_STRIDE]) + head * dk;
    query->out = (float *)(arg_pointer(args[ATT_OUT]) + row * args[ATT_OUT_STRIDE]) + head * dv;
    query->first = window && end > window ? end - window : 0;
    query->end = end;
    query->top = -3.0e38f;
    query->total = 0;
    for (size_t d = 0; d < dv; d++)
        query->out[d] = 0;
}

INLINE void query_finish(const uint64_t *args, struct query *query, size_t head)
{
    const size_t dv = ATTENTION_DV;
    float total = query->total, keep = 1;
    if (args[ATT_SINKS]) {
        float sink =
            w_at(arg_pointer(args[ATT_SINKS]), head, (enum ember_dtype)args[ATT_SINKS_DTYPE]);
        float top = sink > query->top ? sink : query->top;
        keep = v_first(v_exp(v_set(query->top - top)));
        total = total * keep + v_first(v_exp(v_set(sink - top)));
    }
    vf scale = v_set(keep / total);
    for (size_t d = 0; d < dv; d += VL) {
        size_t left = V_LEFT(d, dv);
        v_put(query->out + d, v_mul(scale, v_get(query->out + d, left)), left);
    }
}

/* Rows first .. end - 1 of one sequence, KV head kv_head, all query heads of its group. */
INLINE void run_rows(const uint64_t *args, size_t first, size_t end, size_t kv_head)
{
    const size_t group = args[ATT_Q_HEADS] / args[ATT_KV_HEADS], n = (end - first) * group;
    const uint32_t seq = ((const uint32_t *)arg_pointer(args[ATT_SEQ_OF]))[first];
    const int32_t *pages =
        (const int32_t *)(arg_pointer(args[ATT_PAGES]) + seq * args[ATT_PAGES_STRIDE]);
    struct query query[QUERIES];
    for (size_t i = 0; i < n; i += QUERIES) {
        size_t some = n - i < QUERIES ? n - i : QUERIES;
        for (size_t j = 0; j < some; j++)
            query_start(args, query + j, first + (i + j) / group,
                        kv_head * group + (i + j) % group);
        run_queries(args, query, some, pages, kv_head);
        for (size_t j = 0; j < some; j++)
            query_finish(args, query + j, kv_head * group + (i + j) % group);
    }
}

KERNEL(attention)
{
    const size_t rows = arg_rows(args), kv_heads = args[ATT_KV_HEADS];
    const int32_t *seq_of = (const int32_t *)arg_pointer(args[ATT_SEQ_OF]);
    struct range range = block_range((rows + ROW_TILE - 1) / ROW_TILE * kv_heads, block, n_blocks);
    for (size_t item = range.first; item < range.end; item++) {
        size_t first = item / kv_heads * ROW_TILE, kv_head = item % kv_heads;
        size_t last = first + ROW_TILE < rows ? first + ROW_TILE : rows;
        while (first < last) {
            size_t end = first + 1;
            while (end < last && seq_of[end] == seq_of[first])
                end++;
            run_rows(args, first, end, kv_head);
            first = end;
        }
    }
}
