/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attention over paged K and V in tiles (kv.h), for matrix units.
 *
 * q and the exponentials p are sums of two bf16, K and V of float32 pages, too; the product of two
 * lower terms is left out. The order of a score is that of TDPBF16PS over dk in steps of 32, each
 * step three products: upper with upper, upper with lower, lower with upper. A sum takes the 16
 * values of a page in two products: upper p with upper, then lower values; lower p with upper
 * values. bf16 pages have no lower terms.
 *
 * More than FEW queries go by tiles as high as they are many. Fewer go by vectors, to the same bits
 * (amx_bf16_one in panel_amx_bf16.h): of each product even and odd ones are summed apart from zero
 * by FMAs, and their sum is added; subnormals are zeros.
 *
 * Values that a query does not see meet a p of 0, which only what is not finite survives. So a sum
 * that is not finite is made again from the values alone that the query sees.
 */
#if EMBER_ISA == 4
#include "kernels/cpu/ops/attention.h"
#include "kernels/cpu/ops/panel_amx.h"

#define PAGE 16              /* keys */
#define PAGES (CHUNK / PAGE) /* of a chunk */
#define TILE 16              /* queries of a tile */
#define FEW 2                /* queries */
#define PAIR (2 * TILE)
#define QUERIES (2 * PAIR) /* that go through the keys together */
#define ROW_TILE 32        /* rows whose queries may share K and V */
#define SUMS 16384         /* floats of q, or sums, of those */

struct room {
    /* Many queries: of each 32 of dk the upper terms of all, then the lower ones. Few: of each
     * query the upper terms, then the lower ones, as floats. */
    _Alignas(64) char q[SUMS * 4];
    /* Many: of each page the upper terms of all queries, twice if V has two terms, then the lower
     * ones, beside zeros then. */
    _Alignas(64) char p[PAGES][2][QUERIES * 64];
    _Alignas(64) float p_few[FEW][2][CHUNK];
    _Alignas(64) float sums[SUMS];
    _Alignas(64) float top[QUERIES], total[QUERIES]; /* of the part, as in struct query */
};

/* Rows of n queries as they are kept: more than a pair of tiles are filled up to two pairs. */
INLINE size_t kept(size_t n)
{
    return n > PAIR ? 2 * PAIR : n;
}

/* How many queries go together. */
INLINE size_t queries(size_t dk, size_t dv)
{
    size_t n = SUMS / (dk > dv ? dk : dv);
    return n < QUERIES ? n : QUERIES;
}

INLINE void room_start(const uint64_t *args, struct room *room, const struct query *query, size_t n)
{
    const size_t dk = ATTENTION_DK;
    for (size_t i = 0; i < n; i++)
        for (size_t d = 0; d < dk; d += 16) {
            __m256i high, low;
            amx_split(v_load(query[i].q + d), &high, &low);
            if (n <= FEW) {
                float *to = (float *)room->q + i * 2 * dk + d;
                v_store(to, amx_float(high));
                v_store(to + dk, amx_float(low));
            } else {
                char *to = room->q + (d / 32 * 2 * kept(n) + i) * 64 + d % 32 * 2;
                _mm256_store_si256((void *)to, high);
                _mm256_store_si256((void *)(to + kept(n) * 64), low);
            }
        }
}

/* A chunk: pages first .. end - 1 of its PAGES are seen; what is fetched while they are used. */
struct pages {
    size_t first, end;
    const char *k[PAGES], *v[PAGES], *next_k[PAGES], *next_v[PAGES];
};

/* ---- softmax ---- */

/* Lanes of the keys from `key` on that a query sees. */
INLINE __mmask16 seen(const struct query *query, size_t key)
{
    size_t from = query->first > key ? query->first - key : 0,
           to = query->end > key ? query->end - key : 0;
    __mmask16 below = from < 16 ? v_mask(from) : 0xffff, up_to = to < 16 ? v_mask(to) : 0xffff;
    return up_to & (__mmask16)~below;
}

/* Scores of the chunk in query->p, scaled, capped, those of keys unseen the lowest; what is largest
 * in each lane. */
INLINE vf scale_scores(struct query *query, size_t chunk, const struct kv *kv)
{
    const vf lowest = v_set(-__builtin_inff());
    const int whole = query->first <= chunk && query->end >= chunk + CHUNK;
    vf most = lowest;
    UNROLL
    for (int i = 0; i < PAGES; i++) {
        vf s = v_mul(v_load(query->p + i * PAGE), v_set(kv->scale));
        if (kv->softcap > 0)
            s = v_softcap(s, kv->softcap);
        if (!whole)
            s = _mm512_mask_mov_ps(lowest, seen(query, chunk + (size_t)i * PAGE), s);
        v_store(query->p + i * PAGE, s);
        most = v_max(most, s);
    }
    return most;
}

INLINE vf fold(const int largest, vf a, vf b)
{
    return largest ? v_max(a, b) : v_add(a, b);
}

/* Lane i: the largest lane (the sum of the lanes) of v[i]: lanes j and j + 8, of those j and j + 4,
 * and so on, as v_sum does. */
INLINE vf fold_rows(const int largest, vf v[TILE])
{
    UNROLL
    for (int i = 0; i < 8; i++)
        v[i] = fold(largest, _mm512_shuffle_f32x4(v[i], v[i + 8], 0x44),
                    _mm512_shuffle_f32x4(v[i], v[i + 8], 0xee));
    UNROLL
    for (int i = 0; i < 4; i++)
        v[i] = fold(largest, _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88),
                    _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd));
    UNROLL
    for (int i = 0; i < 2; i++) {
        __m512d a = _mm512_castps_pd(v[i]), b = _mm512_castps_pd(v[i + 2]);
        v[i] = fold(largest, _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    vf rows =
        fold(largest, _mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xdd));
    return _mm512_permutexvar_ps(
        _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15), rows);
}

INLINE void scale_sum(float *sum, float keep, size_t dv)
{
    for (size_t d = 0; d < dv; d += 16)
        v_store(sum + d, v_mul(v_load(sum + d), v_set(keep)));
}

/* ---- many queries, by tiles ---- */

/* Scores of M <= 2 tiles of queries from `first` on, of n kept, against P <= 2 pages. */
INLINE void tile_scores(const int M, const int P, const int planes, struct query *query,
                        size_t first, size_t n, const struct room *room, const struct pages *pages,
                        size_t page, const size_t dk)
{
    const char *q = room->q + first * 64;
    const char *k0 = pages->k[page], *k1 = P > 1 ? pages->k[page + 1] : k0;
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
#define TILE_PRODUCTS()                                                                            \
    AMX_BF16(0, 4, 6);                                                                             \
    if (P > 1)                                                                                     \
        AMX_BF16(1, 4, 7);                                                                         \
    if (M > 1)                                                                                     \
        AMX_BF16(2, 5, 6);                                                                         \
    if (M > 1 && P > 1)                                                                            \
    AMX_BF16(3, 5, 7)
    for (size_t d = 0; d < dk; d += 32, q += n * 128, k0 += planes * 1024, k1 += planes * 1024) {
        AMX_LOAD(4, q, 64);
        AMX_LOAD(6, k0, 64);
        if (P > 1)
            AMX_LOAD(7, k1, 64);
        if (M > 1)
            AMX_LOAD(5, q + TILE * 64, 64);
        TILE_PRODUCTS();
        AMX_LOAD(4, q + n * 64, 64);
        if (M > 1)
            AMX_LOAD(5, q + (n + TILE) * 64, 64);
        TILE_PRODUCTS();
        if (planes == 1)
            continue;
        AMX_LOAD(4, q, 64);
        AMX_LOAD(6, k0 + 1024, 64);
        if (P > 1)
            AMX_LOAD(7, k1 + 1024, 64);
        if (M > 1)
            AMX_LOAD(5, q + TILE * 64, 64);
        TILE_PRODUCTS();
    }
    float *to = query[first].p + page * PAGE;
    float *second = query[first + (M > 1 ? TILE : 0)].p + page * PAGE;
    AMX_STORE(0, to, sizeof(struct query));
    if (P > 1)
        AMX_STORE(1, to + PAGE, sizeof(struct query));
    if (M > 1)
        AMX_STORE(2, second, sizeof(struct query));
    if (M > 1 && P > 1)
        AMX_STORE(3, second + PAGE, sizeof(struct query));
}

/* Exponentials of n <= TILE queries from `first` on to terms of p; what the queries' sums are to be
 * multiplied with goes to `keep`. */
INLINE void tile_softmax(const int planes, const struct kv *kv, struct room *room,
                         struct query *query, size_t first, size_t n, size_t chunk, float *keep)
{
    vf rows[TILE];
    query += first;
    for (size_t q = 0; q < TILE; q++)
        rows[q] = q < n ? scale_scores(query + q, chunk, kv) : v_zero();
    const vf before = v_load(room->top + first), top = v_max(before, fold_rows(1, rows));
    const vf kept = exp_below(v_sub(before, top));
    v_store(keep, kept);
    v_store(room->top + first, top);
    for (size_t q = 0; q < TILE; q++) {
        rows[q] = v_zero();
        if (q >= n)
            continue;
        const vf top_here = v_set(room->top[first + q]);
        char *to = room->p[0][0] + (first + q) * 32 * (size_t)planes;
        vf sum = v_zero();
        UNROLL
        for (int i = 0; i < PAGES; i++, to += sizeof(room->p[0])) {
            vf p = exp_below(v_sub(v_load(query[q].p + i * PAGE), top_here));
            __m256i high, low;
            sum = v_add(sum, p);
            amx_split(p, &high, &low);
            _mm256_store_si256((void *)to, high);
            _mm256_store_si256((void *)(to + sizeof(room->p[0][0])), low);
            if (planes == 2)
                _mm256_store_si256((void *)(to + 32), high);
        }
        rows[q] = sum;
    }
    v_store(room->total + first,
            v_add(v_mul(v_load(room->total + first), kept), fold_rows(0, rows)));
}

/* 16 T columns, from d on, of the sums of M tiles of queries from `first` on. */
INLINE void tile_values(const int M, const int T, const int planes, struct room *room, size_t first,
                        const struct pages *pages, size_t d, const size_t dv)
{
    float *sum = room->sums + first * dv + d, *second = sum + (M > 1 ? TILE : 0) * dv;
    const size_t stride = dv * sizeof(float), bytes = (size_t)planes * 512, row = bytes / 16;
    AMX_LOAD(0, sum, stride);
    if (T > 1)
        AMX_LOAD(1, sum + 16, stride);
    if (M > 1)
        AMX_LOAD(2, second, stride);
    if (M > 1 && T > 1)
        AMX_LOAD(3, second + 16, stride);
    for (size_t i = pages->first; i < pages->end; i++) {
        const char *v = pages->v[i] + d / 16 * bytes;
        const int P = T;
        const char *p = room->p[i][0] + first * row, *p_low = room->p[i][1] + first * row;
        AMX_LOAD(4, p, row);
        AMX_LOAD(6, v, 64);
        if (T > 1)
            AMX_LOAD(7, v + bytes, 64);
        if (M > 1)
            AMX_LOAD(5, p + TILE * row, row);
        TILE_PRODUCTS();
        AMX_LOAD(4, p_low, row);
        if (M > 1)
            AMX_LOAD(5, p_low + TILE * row, row);
        TILE_PRODUCTS();
    }
    AMX_STORE(0, sum, stride);
    if (T > 1)
        AMX_STORE(1, sum + 16, stride);
    if (M > 1)
        AMX_STORE(2, second, stride);
    if (M > 1 && T > 1)
        AMX_STORE(3, second + 16, stride);
}

INLINE void tile_configure(size_t n, size_t bytes)
{
    amx_configure(n < TILE ? n : TILE, n > PAIR ? TILE : n > TILE ? n - TILE : n, bytes);
}

/* M: tiles of queries, 1, 2, or two times 2. */
INLINE void tile_chunk(const int M, const int planes, const struct kv *kv, struct room *room,
                       struct query *query, size_t n, size_t chunk, const struct pages *pages,
                       const size_t dk, const size_t dv)
{
    _Alignas(64) float keep[QUERIES];
    const size_t rows = kept(n);
    size_t page = pages->first, d = 0;
    if (planes == 1)
        tile_configure(n, 64);
    for (; page + 2 <= pages->end; page += 2)
        for (size_t q = 0; q < rows; q += PAIR)
            tile_scores(M, 2, planes, query, q, rows, room, pages, page, dk);
    for (size_t q = 0; page < pages->end && q < rows; q += PAIR)
        tile_scores(M, 1, planes, query, q, rows, room, pages, page, dk);
    for (size_t q = 0; q < n; q += TILE)
        tile_softmax(planes, kv, room, query, q, n - q < TILE ? n - q : TILE, chunk, keep + q);
    for (size_t q = 0; q < n; q++)
        if (keep[q] != 1)
            scale_sum(room->sums + q * dv, keep[q], dv);
    if (planes == 1)
        tile_configure(n, 32);
    for (; d + 32 <= dv; d += 32)
        for (size_t q = 0; q < rows; q += PAIR)
            tile_values(M, 2, planes, room, q, pages, d, dv);
    for (size_t q = 0; d < dv && q < rows; q += PAIR)
        tile_values(M, 1, planes, room, q, pages, d, dv);
}

/* ---- few queries, by vectors ---- */

INLINE vf bf16_even(vi line)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(line, 16));
}
INLINE vf bf16_odd(vi line)
{
    return _mm512_castsi512_ps(_mm512_and_si512(line, _mm512_set1_epi32((int)0xffff0000)));
}

/* Sums of products with even and odd elements, from zero. */
struct both {
    vf even, odd;
};
INLINE struct both both_fma(float even, float odd, vf even_line, vf odd_line, struct both sum)
{
    return (struct both){v_fma(v_set(even), even_line, sum.even),
                         v_fma(v_set(odd), odd_line, sum.odd)};
}
INLINE vf both_add(vf sum, struct both both)
{
    return v_add(sum, v_add(both.even, both.odd));
}

INLINE void few_scores(const int NQ, const int planes, const float *terms, const char *k,
                       const char *next, const size_t dk, vf score[FEW])
{
    const struct both zero = {v_zero(), v_zero()};
    UNROLL
    for (int q = 0; q < NQ; q++)
        score[q] = v_zero();
    for (size_t d = 0; d < dk; d += 32, k += planes * 1024, next += planes * 1024) {
        struct both upper[FEW], cross[FEW], lower[FEW];
        UNROLL
        for (int q = 0; q < NQ; q++)
            upper[q] = cross[q] = lower[q] = zero;
#pragma GCC unroll 4
        for (size_t i = 0; i < 16; i++) {
            const vi line = vi_load(k + i * 64);
            const vf even = bf16_even(line), odd = bf16_odd(line);
            __builtin_prefetch(next + i * 64, 0, 2);
            UNROLL
            for (int q = 0; q < NQ; q++) {
                const float *high = terms + (size_t)q * 2 * dk + d + 2 * i, *low = high + dk;
                upper[q] = both_fma(high[0], high[1], even, odd, upper[q]);
                lower[q] = both_fma(low[0], low[1], even, odd, lower[q]);
            }
            if (planes == 1)
                continue;
            const vi second = vi_load(k + 1024 + i * 64);
            const vf even_low = bf16_even(second), odd_low = bf16_odd(second);
            __builtin_prefetch(next + 1024 + i * 64, 0, 2);
            UNROLL
            for (int q = 0; q < NQ; q++) {
                const float *high = terms + (size_t)q * 2 * dk + d + 2 * i;
                cross[q] = both_fma(high[0], high[1], even_low, odd_low, cross[q]);
            }
        }
        UNROLL
        for (int q = 0; q < NQ; q++) {
            score[q] = both_add(both_add(score[q], upper[q]), lower[q]);
            if (planes == 2)
                score[q] = both_add(score[q], cross[q]);
        }
    }
}

/* The values of one page onto sums; p: of each query upper and lower terms of the chunk, from the
 * page's first key on. Of `masked` values only those that are seen count. */
INLINE void few_values(const int NQ, const int planes, const int masked, const float *p,
                       const char *v, const char *next, __mmask16 mask, struct query *query,
                       const size_t dv)
{
    const struct both zero = {v_zero(), v_zero()};
    for (size_t d = 0; d < dv; d += 16, v += planes * 512, next += planes * 512) {
        struct both upper[FEW], lower[FEW];
        UNROLL
        for (int q = 0; q < NQ; q++)
            upper[q] = lower[q] = zero;
#pragma GCC unroll 4
        for (size_t i = 0; i < 8; i++) {
            vi line = vi_load(v + i * 64);
            if (masked)
                line = _mm512_maskz_mov_epi16((mask >> (2 * i) & 1 ? 0x55555555u : 0) |
                                                  (mask >> (2 * i) & 2 ? 0xaaaaaaaau : 0),
                                              line);
            const vf even = bf16_even(line), odd = bf16_odd(line);
            __builtin_prefetch(next + i * 64, 0, 2);
            UNROLL
            for (int q = 0; q < NQ; q++) {
                const float *high = p + (size_t)q * 2 * CHUNK + 2 * i, *low = high + CHUNK;
                upper[q] = both_fma(high[0], high[1], even, odd, upper[q]);
                lower[q] = both_fma(low[0], low[1], even, odd, lower[q]);
            }
        }
        if (planes == 2) {
#pragma GCC unroll 4
            for (size_t i = 0; i < 8; i++) {
                vi line = vi_load(v + 512 + i * 64);
                if (masked)
                    line = _mm512_maskz_mov_epi16((mask >> (2 * i) & 1 ? 0x55555555u : 0) |
                                                      (mask >> (2 * i) & 2 ? 0xaaaaaaaau : 0),
                                                  line);
                const vf even = bf16_even(line), odd = bf16_odd(line);
                __builtin_prefetch(next + 512 + i * 64, 0, 2);
                UNROLL
                for (int q = 0; q < NQ; q++) {
                    const float *high = p + (size_t)q * 2 * CHUNK + 2 * i;
                    upper[q] = both_fma(high[0], high[1], even, odd, upper[q]);
                }
            }
        }
        UNROLL
        for (int q = 0; q < NQ; q++) {
            float *sum = query[q].sum + d;
            v_store(sum, both_add(both_add(v_load(sum), upper[q]), lower[q]));
        }
    }
}

INLINE void few_chunk(const int NQ, const int planes, const int masked, const struct kv *kv,
                      struct room *room, struct query *query, size_t chunk,
                      const struct pages *pages, const size_t dk, const size_t dv)
{
    for (size_t i = pages->first; i < pages->end; i++) {
        vf score[FEW];
        few_scores(NQ, planes, (const float *)room->q, pages->k[i], pages->next_k[i], dk, score);
        UNROLL
        for (int q = 0; q < NQ; q++)
            v_store(query[q].p + i * PAGE, score[q]);
    }
    UNROLL
    for (int q = 0; q < NQ; q++) {
        const float before = room->top[q], most = v_reduce_max(scale_scores(query + q, chunk, kv));
        const float top = most > before ? most : before;
        const float keep = v_first(exp_below(v_set(before - top)));
        vf sum = v_zero();
        UNROLL
        for (int i = 0; i < PAGES; i++) {
            vf p = exp_below(v_sub(v_load(query[q].p + i * PAGE), v_set(top)));
            __m256i high, low;
            sum = v_add(sum, p);
            amx_split(p, &high, &low);
            v_store(room->p_few[q][0] + i * PAGE, amx_float(high));
            v_store(room->p_few[q][1] + i * PAGE, amx_float(low));
        }
        room->total[q] = room->total[q] * keep + v_sum(sum);
        room->top[q] = top;
        if (keep != 1)
            scale_sum(query[q].sum, keep, dv);
    }
    for (size_t i = pages->first; i < pages->end; i++)
        few_values(NQ, planes, masked, room->p_few[0][0] + i * PAGE, pages->v[i], pages->next_v[i],
                   seen(query, chunk + i * PAGE), query, dv);
}

/* ---- parts ---- */

/*
 * The chunk's pages of which some query sees the keys from .. to - 1. What is fetched meanwhile is
 * what is read four pages later: V while K is used; while V is, K of the next chunk where there are
 * keys before `end`, else K of the next head, which is behind this one's, from the row's first
 * chunk on, which begins with key `row`.
 */
INLINE struct pages chunk_pages(const uint64_t *args, const struct kv *kv, size_t chunk,
                                size_t from, size_t to, size_t row, size_t end, size_t k_bytes)
{
    struct pages pages = {.first = (from - chunk) / PAGE, .end = (to - chunk + PAGE - 1) / PAGE};
    for (size_t i = pages.first; i < pages.end; i++) {
        const size_t at = chunk / PAGE + i;
        const int further = (at + PAGES) * PAGE < end;
        const size_t next = further ? at + PAGES : row / PAGE + i;
        const size_t here = (size_t)(uint32_t)kv->pages[at];
        pages.k[i] = kv->k + here * args[ATT_K_PAGE_STRIDE];
        pages.v[i] = pages.next_k[i] = kv->v + here * args[ATT_V_PAGE_STRIDE];
        pages.next_v[i] = kv->k + (further ? 0 : k_bytes);
        if (next * PAGE < end)
            pages.next_v[i] += (size_t)(uint32_t)kv->pages[next] * args[ATT_K_PAGE_STRIDE];
    }
    return pages;
}

/* Keys first .. end - 1 of a part; few: how many queries, or 0 and M tiles of them. */
INLINE void part_chunks(const int few, const int M, const int planes, const int masked,
                        const uint64_t *args, const struct kv *kv, struct room *room,
                        struct query *query, size_t n, size_t first, size_t end)
{
    const size_t dk = ATTENTION_DK, dv = ATTENTION_DV;
    const int alone = query[0].end == query[n - 1].end;
    for (size_t q = 0; q < QUERIES; q += 16) {
        v_store(room->top + q, v_set(LOWEST));
        v_store(room->total + q, v_zero());
    }
    for (size_t q = 0; q < n; q++)
        for (size_t d = 0; d < dv; d += 16)
            v_store((few ? query[q].sum : room->sums + q * dv) + d, v_zero());
    if (!few) {
        tile_configure(n, 64);
        if (planes == 2)
            for (size_t i = 0; i < PAGES; i++)
                for (size_t q = 0; q < n; q++)
                    _mm256_store_si256((void *)(room->p[i][1] + q * 64 + 32),
                                       _mm256_setzero_si256());
    }
    for (size_t chunk = first / CHUNK * CHUNK; chunk < end; chunk += CHUNK) {
        const struct pages pages =
            chunk_pages(args, kv, chunk, chunk > first ? chunk : first,
                        chunk + CHUNK < end ? chunk + CHUNK : end, query[0].first / CHUNK * CHUNK,
                        query[n - 1].end, dk * PAGE * 2 * (size_t)planes);
        if (few) {
            few_chunk(few, planes, masked, kv, room, query, chunk, &pages, dk, dv);
            continue;
        }
        for (size_t i = pages.first; alone && i < pages.end; i++) {
            fetch(pages.next_k[i], dk * PAGE * 2 * (size_t)planes);
            fetch(pages.next_v[i], dv * PAGE * 2 * (size_t)planes);
        }
        tile_chunk(M, planes, kv, room, query, n, chunk, &pages, dk, dv);
    }
    for (size_t q = 0; q < n; q++) {
        query[q].top = room->top[q];
        query[q].total = room->total[q];
        for (size_t d = 0; !few && d < dv; d += 16)
            v_store(query[q].sum + d, v_load(room->sums + q * dv + d));
    }
    if (!few)
        amx_release();
}

INLINE void part_of(const int planes, const int masked, const uint64_t *args, const struct kv *kv,
                    struct room *room, struct query *query, size_t n, size_t first, size_t end)
{
    if (n == 1)
        part_chunks(1, 0, planes, masked, args, kv, room, query, n, first, end);
    else if (n == 2)
        part_chunks(2, 0, planes, 0, args, kv, room, query, n, first, end);
    else if (n <= TILE)
        part_chunks(0, 1, planes, 0, args, kv, room, query, n, first, end);
    else
        part_chunks(0, 2, planes, 0, args, kv, room, query, n, first, end);
}

/* Out of line: what is computed must not leave the time in which subnormals are zeros. */
static __attribute__((noinline)) void part(const uint64_t *args, const struct kv *kv,
                                           struct room *room, struct query *query, size_t n,
                                           size_t first, size_t end)
{
    if (kv->dtype == EMBER_F32)
        part_of(2, 0, args, kv, room, query, n, first, end);
    else
        part_of(1, 0, args, kv, room, query, n, first, end);
}
static __attribute__((noinline)) void part_seen(const uint64_t *args, const struct kv *kv,
                                                struct room *room, struct query *query,
                                                size_t first, size_t end)
{
    room_start(args, room, query, 1);
    if (kv->dtype == EMBER_F32)
        part_of(2, 1, args, kv, room, query, 1, first, end);
    else
        part_of(1, 1, args, kv, room, query, 1, first, end);
}

INLINE int is_finite(const float *x, size_t n)
{
    vf sum = v_zero();
    for (size_t i = 0; i < n; i += 16)
        sum = v_add(sum, v_sub(v_load(x + i), v_load(x + i)));
    return v_sum(sum) == 0;
}

INLINE void run_part(const uint64_t *args, const struct kv *kv, struct room *room,
                     struct query *query, size_t n, size_t from, size_t to)
{
    const unsigned before = _mm_getcsr();
    size_t first = query[0].first > from ? query[0].first : from,
           end = query[n - 1].end < to ? query[n - 1].end : to, damaged = 0;
    _mm_setcsr(before | 0x8040); /* subnormals are zeros */
    part(args, kv, room, query, n, first, end);
    for (size_t q = 0; q < n; q++)
        if (!is_finite(query[q].sum, ATTENTION_DV)) {
            size_t q_first = query[q].first > from ? query[q].first : from,
                   q_end = query[q].end < to ? query[q].end : to;
            part_seen(args, kv, room, query + q, q_first, q_end);
            damaged++;
        }
    if (damaged)
        room_start(args, room, query, n);
    _mm_setcsr(before);
}

#include "kernels/cpu/ops/attention_rows.h"

KERNEL(attention_tiles)
{
    attention_rows(args, block, n_blocks);
}

KERNEL(attention_parts_tiles)
{
    attention_row_parts(args, block, n_blocks);
}
#endif
