/* SPDX-License-Identifier: Apache-2.0 */
/* attention over paged K and V in rows (attention.h), as float32. */
#include "kernels/cpu/ops/attention.h"

#define STEP 16         /* keys of one page that are widened and used at a time */
#define ROW_TILE 8      /* rows whose queries may share K and V */
#define QUERIES 16      /* queries that go through the keys together */
#define FETCH_QUERIES 4 /* more than these and the arithmetic takes longer than memory */
#define SUMS 8192       /* floats of their sums */

struct room {
    float wide[STEP * ATTENTION_DIM_MAX]; /* STEP keys or values */
};

/* How many queries go together. */
INLINE size_t queries(size_t dk, size_t dv)
{
    size_t n = SUMS / dv;
    return n < QUERIES ? n : QUERIES;
}

INLINE void room_start(const uint64_t *args, struct room *room, const struct query *query, size_t n)
{
}

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

/* One chunk, of which some query sees the keys from .. to - 1. */
INLINE void run_chunk(const uint64_t *args, const struct kv *kv, struct room *room,
                      struct query *query, size_t n, size_t chunk, size_t from, size_t to)
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
        const float *keys = kv_widen(k + s.slot * dk * size, kv->dtype, s.n * dk, room->wide);
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
        const float *values = kv_widen(v + s.slot * dv * size, kv->dtype, s.n * dv, room->wide);
        for (size_t q = 0; kv->dtype == EMBER_I8 && q < n; q++)
            scale_keys(query[q].p + (key - chunk), v + kv->v_scales + 4 * s.slot, s.n);
        all_values(query, n, &s, key - chunk, values, keep, dv);
    }
}

/* Keys from .. to - 1 for n queries of one sequence, rows ascending: top, total and sum of each. */
INLINE void run_part(const uint64_t *args, const struct kv *kv, struct room *room,
                     struct query *query, size_t n, size_t from, size_t to)
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
        run_chunk(args, kv, room, query, n, chunk, chunk > first ? chunk : first,
                  chunk + CHUNK < end ? chunk + CHUNK : end);
}

#include "kernels/cpu/ops/attention_rows.h"

KERNEL(attention)
{
    attention_rows(args, block, n_blocks);
}

KERNEL(attention_parts)
{
    attention_row_parts(args, block, n_blocks);
}

KERNEL(attention_join)
{
    attention_row_joins(args, block, n_blocks);
}
