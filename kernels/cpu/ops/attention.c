/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attention over paged K and V (kv.h: K transposed, V in rows) by vectors, as float32.
 *
 * A score is one chain of multiply-adds over dk, for VL keys at a time, a lane each, so that
 * nothing is summed across lanes; a sum of values is one chain over the keys, a lane for each
 * column. Both are done for blocks of queries, so that what is loaded is used for all of them.
 */
#include "kernels/cpu/ops/attention.h"

#define ROW_TILE 16 /* rows whose queries may share K and V */
#define QUERIES 32  /* queries that go through the keys together */
#define SUMS 8192   /* floats of q, or sums, of those */
#define MANY 4      /* queries of a block; the last one may have FEW */
#define FEW 2
#define AHEAD 2 /* lines that are fetched of each row of q and of the output, a chunk */
#if VL == 16
#define WIDE 4 /* vectors that meet a block of queries at a time */
#else
#define WIDE 2
#endif
#define KEYS (CHUNK / VL) /* vectors of keys of a chunk */
/* Compiled once, whoever calls. */
#define OUT_OF_LINE static __attribute__((noinline, unused))

struct room {
    float q[SUMS]; /* of each block, scaled: element by element */
    _Alignas(64) float top[QUERIES], total[QUERIES][VL]; /* as in struct query, lane by lane */
    size_t ahead;                                 /* rows to those that are next, 0: not known */
    float k_scale[CHUNK], v_scale[CHUNK];         /* int8: of the chunk */
    float loose[2 * VL * ATTENTION_DIM_MAX];      /* keys of pages that are not whole vectors */
    float no_p[CHUNK], no_sum[ATTENTION_DIM_MAX]; /* of queries that fill up a block */
};

/* How many queries go together. */
INLINE size_t queries(size_t dk, size_t dv)
{
    size_t n = SUMS / (dk > dv ? dk : dv) / MANY * MANY;
    return n < QUERIES ? n : QUERIES;
}

/* Queries of the block that begins with query i of n. */
INLINE size_t block_size(size_t i, size_t n)
{
    return n - i <= FEW ? FEW : MANY;
}

/* q of a block of `some` queries, scaled, element by element; those from n on are zeros. */
INLINE void pack_block(const struct query *query, size_t n, size_t some, float scale, float *to,
                       const size_t dk)
{
    const __m128 by = _mm_set1_ps(scale);
    size_t d = 0;
    for (; some == FEW && d + 4 <= dk; d += 4) {
        const __m128 a = _mm_mul_ps(_mm_loadu_ps(query[0].q + d), by);
        const __m128 b = n == FEW ? _mm_mul_ps(_mm_loadu_ps(query[1].q + d), by) : _mm_setzero_ps();
        _mm_storeu_ps(to + d * FEW, _mm_unpacklo_ps(a, b));
        _mm_storeu_ps(to + d * FEW + 4, _mm_unpackhi_ps(a, b));
    }
    for (; n == MANY && d + 4 <= dk; d += 4) {
        __m128 q[MANY];
        UNROLL
        for (int i = 0; i < MANY; i++)
            q[i] = _mm_mul_ps(_mm_loadu_ps(query[i].q + d), by);
        _MM_TRANSPOSE4_PS(q[0], q[1], q[2], q[3]);
        UNROLL
        for (int i = 0; i < MANY; i++)
            _mm_storeu_ps(to + (d + (size_t)i) * MANY, q[i]);
    }
    for (; d < dk; d++)
        for (size_t i = 0; i < some; i++)
            to[d * some + i] = i < n ? query[i].q[d] * scale : 0;
}

INLINE void room_start(const uint64_t *args, struct room *room, const struct query *query, size_t n)
{
    const size_t dk = ATTENTION_DK;
    room->ahead = n == QUERIES ? QUERIES * args[ATT_KV_HEADS] / args[ATT_Q_HEADS] : 0;
    for (size_t i = 0; i < n; i += MANY)
        pack_block(query + i, n - i < MANY ? n - i : MANY, block_size(i, n),
                   arg_float(args[ATT_SCALE]), room->q + i * dk, dk);
    for (size_t i = 0; i < CHUNK; i++)
        room->no_p[i] = 0;
}

/* Values of a chunk that are in one page: those of keys first .. end - 1, counted from the chunk's
 * own first one; next: what is fetched meanwhile. */
struct piece {
    const char *v, *next;
    size_t first, end;
};

/* A chunk, of which some query sees the keys from .. to - 1, counted likewise. */
struct chunk {
    size_t at, from, to;
    const char *k[KEYS], *next_k[KEYS]; /* of each vector of keys */
    size_t n_pieces;
    struct piece piece[CHUNK];
};

/* ---- scores ---- */

/* Scores of M queries, q element by element, against P vectors of keys. */
INLINE void scores(const int M, const int P, const enum ember_dtype dtype, const float *q,
                   const char *const *k, const char *const *next, const size_t stride,
                   struct query *query, size_t at, const size_t dk)
{
    const size_t step = stride * kv_size(dtype);
    vf acc[MANY][WIDE];
    UNROLL
    for (int m = 0; m < M; m++)
        UNROLL
    for (int p = 0; p < P; p++)
        acc[m][p] = v_zero();
    for (size_t d = 0, i = 0; d < dk; d++, i += step, q += M) {
        vf kv[WIDE];
        UNROLL
        for (int p = 0; p < P; p++) {
            kv[p] = kv_load(k[p] + i, dtype);
            __builtin_prefetch(next[p] + i, 0, 2);
        }
        UNROLL
        for (int m = 0; m < M; m++) {
            vf qv = v_set(q[m]);
            UNROLL
            for (int p = 0; p < P; p++)
                acc[m][p] = v_fma(qv, kv[p], acc[m][p]);
        }
    }
    UNROLL
    for (int m = 0; m < M; m++)
        UNROLL
    for (int p = 0; p < P; p++)
        v_store(query[m].p + at + p * VL, acc[m][p]);
}

/* Scores of n queries against P vectors of keys. */
INLINE void wide_scores(const int P, const enum ember_dtype dtype, const float *q,
                        struct query *query, size_t n, const char *const *k,
                        const char *const *next, const size_t stride, size_t at, const size_t dk)
{
    for (size_t i = 0; i < n; i += MANY, q += MANY * dk, query += MANY, next = k)
        if (block_size(i, n) == MANY)
            scores(MANY, P, dtype, q, k, next, stride, query, at, dk);
        else
            scores(FEW, P, dtype, q, k, next, stride, query, at, dk);
}

INLINE void all_scores(const enum ember_dtype dtype, const uint64_t *args, const struct room *room,
                       struct query *query, size_t n, const struct chunk *c)
{
    const size_t dk = ATTENTION_DK, page_size = ATTENTION_PAGE, end = (c->to + VL - 1) / VL;
    for (size_t i = c->from / VL / 2 * 2, some; i < end; i += some) {
        some = WIDE > 2 && i % WIDE == 0 && i + 2 < end ? WIDE : 2;
        if (some == 2)
            wide_scores(2, dtype, room->q, query, n, c->k + i, c->next_k + i, page_size, i * VL,
                        dk);
        else
            wide_scores(WIDE, dtype, room->q, query, n, c->k + i, c->next_k + i, page_size, i * VL,
                        dk);
    }
}

/* The same where pages are not whole vectors: keys are gathered first. */
INLINE void loose_scores(const uint64_t *args, const struct kv *kv, struct room *room,
                         struct query *query, size_t n, const struct chunk *c)
{
    const size_t dk = ATTENTION_DK, page_size = ATTENTION_PAGE;
    const char *k[2] = {(const char *)room->loose, (const char *)(room->loose + VL)};
    for (size_t at = c->from / (2 * VL) * (2 * VL); at < c->to; at += 2 * VL) {
        for (size_t i = 0; i < 2 * VL; i++) {
            const size_t key = c->at + at + i;
            const int unseen = at + i < c->from || at + i >= c->to;
            const char *page = kv->k + (unseen ? 0
                                               : (size_t)(uint32_t)kv->pages[key / page_size] *
                                                     args[ATT_K_PAGE_STRIDE]);
            for (size_t d = 0; d < dk; d++)
                room->loose[d * 2 * VL + i] =
                    unseen ? 0 : kv_at(page, d * page_size + key % page_size, kv->dtype);
        }
        wide_scores(2, EMBER_F32, room->q, query, n, k, k, 2 * VL, at, dk);
    }
}

#define FORM(dtype)                                                                                \
    OUT_OF_LINE void scores_##dtype(const uint64_t *args, const struct room *room,                 \
                                    struct query *query, size_t n, const struct chunk *c)          \
    {                                                                                              \
        all_scores(EMBER_##dtype, args, room, query, n, c);                                        \
    }
FORM(F32)
FORM(BF16)
FORM(F16)
FORM(I8)
#undef FORM

INLINE void chunk_scores(const uint64_t *args, const struct kv *kv, struct room *room,
                         struct query *query, size_t n, const struct chunk *c)
{
    if (ATTENTION_PAGE % VL)
        loose_scores(args, kv, room, query, n, c);
    else if (kv->dtype == EMBER_BF16)
        scores_BF16(args, room, query, n, c);
    else if (kv->dtype == EMBER_F16)
        scores_F16(args, room, query, n, c);
    else if (kv->dtype == EMBER_I8)
        scores_I8(args, room, query, n, c);
    else
        scores_F32(args, room, query, n, c);
}

/* ---- softmax ---- */

/* Scores of the chunk scaled, capped, those of keys unseen the lowest; the largest. */
INLINE float scale_scores(struct query *query, const struct chunk *c, const struct room *room,
                          const struct kv *kv)
{
    static const float lanes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int whole = query->first <= c->at && query->end >= c->at + CHUNK;
    const vf lowest = v_set(-__builtin_inff()), lane = v_load(lanes);
    const float first = query->first > c->at ? (float)(query->first - c->at) : 0;
    const float end = whole ? CHUNK : (float)(query->end - c->at);
    vf most = lowest;
    UNROLL
    for (int i = 0; i < KEYS; i++) {
        vf s = v_load(query->p + i * VL);
        if (kv->dtype == EMBER_I8)
            s = v_mul(s, v_load(room->k_scale + i * VL));
        if (kv->softcap > 0)
            s = v_softcap(s, kv->softcap);
        if (!whole) {
            vf key = v_add(lane, v_set((float)(i * VL)));
            s = v_select_lt(key, v_set(first), lowest, v_select_lt(key, v_set(end), s, lowest));
        }
        v_store(query->p + i * VL, s);
        most = v_max(most, s);
    }
    return v_reduce_max(most);
}

/* Scores to exponentials, those of int8 times the values' scales; onto the sum of them. */
INLINE void exponentials(struct query *query, float *total, float top, float keep,
                         const struct room *room, const struct kv *kv)
{
    vf sum = v_zero();
    UNROLL
    for (int i = 0; i < KEYS; i++) {
        vf p = exp_below(v_sub(v_load(query->p + i * VL), v_set(top)));
        sum = v_add(sum, p);
        if (kv->dtype == EMBER_I8)
            p = v_mul(p, v_load(room->v_scale + i * VL));
        v_store(query->p + i * VL, p);
    }
    v_store(total, v_fma(v_load(total), v_set(keep), sum));
}

/* Scores of the chunk to exponentials; keep: what the sums so far are to be multiplied with. Keys
 * unseen get 0. Lines of the next tile's q and output are fetched meanwhile, some a chunk. */
INLINE void softmax(const uint64_t *args, struct query *query, size_t n, const struct chunk *c,
                    struct room *room, const struct kv *kv, float *keep)
{
    const size_t dk = ATTENTION_DK, dv = ATTENTION_DV;
    _Alignas(64) float top[QUERIES];
    for (size_t i = 0; i < QUERIES; i += VL)
        v_store(top + i, v_load(room->top + i));
    for (size_t q = 0; q < n; q++) {
        float most;
        if (!overlaps(query + q, c->at + c->from, c->at + c->to))
            continue;
        most = scale_scores(query + q, c, room, kv);
        top[q] = most > top[q] ? most : top[q];
    }
    for (size_t i = 0; i < n; i += VL) {
        v_store(keep + i, exp_below(v_sub(v_load(room->top + i), v_load(top + i))));
        v_store(room->top + i, v_load(top + i));
    }
    for (size_t q = 0; q < n; q++) {
        for (size_t i = 0; room->ahead && i < AHEAD; i++) {
            const size_t d = (c->at / CHUNK * AHEAD + i) * 16;
            __builtin_prefetch(query[q].q + room->ahead * (args[ATT_Q_STRIDE] / 4) + d % dk, 0, 2);
            __builtin_prefetch(query[q].out + room->ahead * (args[ATT_OUT_STRIDE] / 4) + d % dv, 1,
                               2);
        }
        if (overlaps(query + q, c->at + c->from, c->at + c->to))
            exponentials(query + q, room->total[q], top[q], keep[q], room, kv);
    }
}

/* ---- values ---- */

/* A query that values are added for: its exponentials, its sum, what that is multiplied with. */
struct adding {
    const float *p;
    float *sum, keep;
};

/* sum = keep * sum + sum of p_j v_j, of keys from .. to - 1, for M queries and T vectors of columns
 * from d on. */
INLINE void columns(const int M, const int T, const enum ember_dtype dtype,
                    const struct adding *query, const struct chunk *c, size_t from, size_t to,
                    size_t d, size_t left, const size_t dv)
{
    const size_t size = kv_size(dtype);
    const float *weight[MANY];
    vf acc[MANY][WIDE];
    UNROLL
    for (int m = 0; m < M; m++) {
        weight[m] = query[m].p;
        UNROLL
        for (int t = 0; t < T; t++)
            acc[m][t] = v_mul(v_set(query[m].keep), v_get(query[m].sum + d + t * VL, left));
    }
    for (const struct piece *piece = c->piece; piece < c->piece + c->n_pieces; piece++) {
        const size_t first = piece->first > from ? piece->first : from,
                     end = piece->end < to ? piece->end : to;
        const size_t skip = ((first - piece->first) * dv + d) * size;
        const char *v = piece->v + skip, *next = piece->next + skip;
        for (size_t j = first; j < end; j++, v += dv * size, next += dv * size) {
            vf values[WIDE];
            UNROLL
            for (int t = 0; t < T; t++) {
                values[t] = kv_get(v + (size_t)t * VL * size, dtype, left);
                if (t * VL * size % 64 == 0)
                    __builtin_prefetch(next + (size_t)t * VL * size, 0, 2);
            }
            UNROLL
            for (int m = 0; m < M; m++) {
                vf p = v_set(weight[m][j]);
                UNROLL
                for (int t = 0; t < T; t++)
                    acc[m][t] = v_fma(p, values[t], acc[m][t]);
            }
        }
    }
    UNROLL
    for (int m = 0; m < M; m++)
        UNROLL
    for (int t = 0; t < T; t++)
        v_put(query[m].sum + d + t * VL, acc[m][t], left);
}

/* Keys from .. to - 1 for M queries, which see all of them. */
INLINE void some_values(const int M, const enum ember_dtype dtype, const uint64_t *args,
                        const struct adding *query, const struct chunk *c, size_t from, size_t to)
{
    const size_t dv = ATTENTION_DV;
    size_t d = 0;
    for (; d + WIDE * VL <= dv; d += WIDE * VL)
        columns(M, WIDE, dtype, query, c, from, to, d, VL, dv);
    for (; d < dv; d += VL)
        columns(M, 1, dtype, query, c, from, to, d, V_LEFT(d, dv), dv);
}
#define FORM(dtype)                                                                                \
    OUT_OF_LINE void values_##dtype(const uint64_t *args, int many, const struct adding *query,    \
                                    const struct chunk *c, size_t from, size_t to)                 \
    {                                                                                              \
        if (many)                                                                                  \
            some_values(MANY, EMBER_##dtype, args, query, c, from, to);                            \
        else                                                                                       \
            some_values(FEW, EMBER_##dtype, args, query, c, from, to);                             \
    }
FORM(F32)
FORM(BF16)
FORM(F16)
FORM(I8)
#undef FORM

INLINE void values(const uint64_t *args, enum ember_dtype dtype, size_t n,
                   const struct adding *query, const struct chunk *c, size_t from, size_t to)
{
    if (dtype == EMBER_BF16)
        values_BF16(args, n == MANY, query, c, from, to);
    else if (dtype == EMBER_F16)
        values_F16(args, n == MANY, query, c, from, to);
    else if (dtype == EMBER_I8)
        values_I8(args, n == MANY, query, c, from, to);
    else
        values_F32(args, n == MANY, query, c, from, to);
}

/* Keys of a chunk that a query sees. */
struct seen {
    size_t from, to;
};
INLINE struct seen chunk_seen(const struct query *query, const struct chunk *c)
{
    size_t from = query->first > c->at ? query->first - c->at : 0,
           to = query->end > c->at ? query->end - c->at : 0;
    return (struct seen){from, to < CHUNK ? to : CHUNK};
}

/* The values of a chunk for a block of n queries, filled up to `some`: those that all see for all
 * together, in front of them and behind them each by itself. */
INLINE void block_values(const uint64_t *args, enum ember_dtype dtype, struct room *room,
                         struct query *query, size_t n, size_t some, const struct chunk *c,
                         const float *keep)
{
    const struct adding none = {room->no_p, room->no_sum, 0};
    struct adding adding[MANY];
    struct seen seen[MANY], all = {0, CHUNK};
    for (size_t i = 0; i < some; i++) {
        if (i >= n) {
            adding[i] = none;
            continue;
        }
        seen[i] = chunk_seen(query + i, c);
        adding[i] = (struct adding){query[i].p, query[i].sum, keep[i]};
        all.from = seen[i].from > all.from ? seen[i].from : all.from;
        all.to = seen[i].to < all.to ? seen[i].to : all.to;
    }
    all.to = all.to > all.from ? all.to : all.from;
    for (int behind = 0; behind < 2; behind++) {
        for (size_t i = 0; i < n; i++) {
            size_t from = behind && seen[i].from < all.to ? all.to : seen[i].from,
                   to = !behind && seen[i].to > all.from ? all.from : seen[i].to;
            if (from >= to)
                continue;
            values(args, dtype, FEW, (const struct adding[FEW]){adding[i], none}, c, from, to);
            adding[i].keep = 1;
        }
        if (behind || all.from == all.to)
            continue;
        values(args, dtype, some, adding, c, all.from, all.to);
        for (size_t i = 0; i < n; i++)
            adding[i].keep = 1;
    }
}

/* ---- parts ---- */

/*
 * The chunk from key `at` on, of which some query sees the keys from .. to - 1. What is fetched
 * meanwhile is what is read four pages later: V while K is used; while V is, K a chunk further
 * where there are keys before `end`, else K of the next head, which is behind this one's, from the
 * row's first chunk on, which begins with key `row`.
 */
INLINE void chunk_start(const uint64_t *args, const struct kv *kv, struct room *room,
                        struct chunk *c, size_t at, size_t from, size_t to, size_t row, size_t end)
{
    const size_t dk = ATTENTION_DK, dv = ATTENTION_DV, page_size = ATTENTION_PAGE;
    const size_t size = kv_size(kv->dtype);
    c->at = at;
    c->from = from - at;
    c->to = to - at;
    c->n_pieces = 0;
    for (size_t key = from, some; key < to; key += some) {
        const size_t slot = key % page_size, left = page_size - slot;
        const size_t page = (size_t)(uint32_t)kv->pages[key / page_size];
        const char *k = kv->k + page * args[ATT_K_PAGE_STRIDE],
                   *v = kv->v + page * args[ATT_V_PAGE_STRIDE];
        const int further = key + CHUNK < end;
        const size_t next = further ? key + CHUNK : key - at + row;
        const char *next_k = kv->k + (further ? 0 : page_size * dk * size);
        if (next < end)
            next_k += (size_t)(uint32_t)kv->pages[next / page_size] * args[ATT_K_PAGE_STRIDE];
        some = left < to - key ? left : to - key;
        c->piece[c->n_pieces++] = (struct piece){v + slot * dv * size, next_k + slot * dk * size,
                                                 key - at, key - at + some};
        for (size_t i = key / VL * VL; page_size % VL == 0 && i < key + some; i += VL) {
            c->k[(i - at) / VL] = k + i % page_size * size;
            c->next_k[(i - at) / VL] = v + i % page_size * size;
        }
        for (size_t i = 0; kv->dtype == EMBER_I8 && i < some; i++) {
            room->k_scale[key - at + i] = ((const float *)(k + kv->k_scales))[slot + i];
            room->v_scale[key - at + i] = ((const float *)(v + kv->v_scales))[slot + i];
        }
    }
    if (page_size % VL)
        return;
    /* Vectors beside them meet queries too, in pairs or more: any that there is will do. */
    const size_t first = c->from / VL, last = (c->to - 1) / VL;
    for (size_t i = 0; i < KEYS; i++)
        if (i < first || i > last) {
            c->k[i] = c->k[i < first ? first : last];
            c->next_k[i] = c->next_k[i < first ? first : last];
        }
}

/* One chunk of n queries. */
INLINE void run_chunk(const uint64_t *args, const struct kv *kv, struct room *room,
                      struct query *query, size_t n, const struct chunk *c)
{
    float keep[QUERIES];
    chunk_scores(args, kv, room, query, n, c);
    softmax(args, query, n, c, room, kv, keep);
    for (size_t i = 0; i < n; i += MANY)
        block_values(args, kv->dtype, room, query + i, n - i < MANY ? n - i : MANY,
                     block_size(i, n), c, keep + i);
}

/* Keys from .. to - 1 for n queries of one sequence, rows ascending: top, total and sum of each. */
OUT_OF_LINE void run_part(const uint64_t *args, const struct kv *kv, struct room *room,
                          struct query *query, size_t n, size_t from, size_t to)
{
    const size_t dv = ATTENTION_DV;
    size_t first = query[0].first > from ? query[0].first : from,
           end = query[n - 1].end < to ? query[n - 1].end : to;
    struct chunk c;
    for (size_t i = 0; i < QUERIES; i += VL)
        v_store(room->top + i, v_set(LOWEST));
    for (size_t q = 0; q < n; q++) {
        v_store(room->total[q], v_zero());
        for (size_t d = 0; d < dv; d += VL)
            v_put(query[q].sum + d, v_zero(), V_LEFT(d, dv));
    }
    for (size_t at = first / CHUNK * CHUNK; at < end; at += CHUNK) {
        chunk_start(args, kv, room, &c, at, at > first ? at : first,
                    at + CHUNK < end ? at + CHUNK : end, query[0].first / CHUNK * CHUNK,
                    query[n - 1].end);
        run_chunk(args, kv, room, query, n, &c);
    }
    for (size_t q = 0; q < n; q++) {
        query[q].top = room->top[q];
        query[q].total = v_sum(v_load(room->total[q]));
    }
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
