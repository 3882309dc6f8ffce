/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the bodies of attention share: a query, the K and V it reads, and how its keys are cut.
 *
 * For one query (a row and a query head) everything depends on its position alone. Its keys are cut
 * into parts of EMBER_ATTN_PART keys (a power of two more where that would make more than
 * EMBER_ATTN_PARTS), a part into chunks of CHUNK keys. Over the chunks of a part: scores; new
 * maximum; what was summed so far scaled down; exponentials added lane by lane; then p_j v_j added
 * for j ascending. Then the parts are put together, in order. Several queries that read the same K
 * and V (the heads of a group, and neighbouring rows of a sequence) go through the keys together,
 * which changes nothing for each one.
 *
 * A body is a file that includes this one and defines:
 *
 * - ROW_TILE, rows whose queries may share K and V;
 * - QUERIES, queries that go through the keys together;
 * - SUMS, floats of their sums;
 * - struct room, what it needs beside its queries;
 * - room_start(args, room, query, n), what it makes of n queries;
 * - run_part(args, kv, room, query, n, from, to): keys from .. to - 1 of n queries of one sequence,
 *   rows ascending: top, total and sum of each;
 *
 * and then includes attention_rows.h for all that is around a part.
 */
#ifndef EMBER_KERNELS_CPU_ATTENTION_H
#define EMBER_KERNELS_CPU_ATTENTION_H

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

#define CHUNK 64 /* keys, a multiple of every VL; a part is a multiple of it */
#define LOWEST -3.0e38f

struct query {
    _Alignas(64) float p[CHUNK + 4]; /* scores of the chunk, then exponentials */
    const float *q;
    float *out, *sum;         /* its row of the output; of the part: sum of p v */
    uint32_t first, end;      /* keys that it sees */
    float top, total;         /* of the part: largest score so far, sum of exponentials below it */
    float all_top, all_total; /* of the parts so far, whose sum is in out */
};

/* K and V of one sequence and KV head. */
struct kv {
    const char *k, *v;         /* of the head in page 0 */
    size_t k_scales, v_scales; /* int8: bytes from there to the scales */
    const int32_t *pages;
    enum ember_dtype dtype;
    float scale, softcap;
};

/* e^x of x <= 0 to 2^-22 of it; 0 where that is no normal number, NaN for NaN. */
INLINE vf exp_below(vf x)
{
#if VL == 16
    vf y = v_max(v_set(-110.0f), x); /* 2^-158 is 0 */
    vf n = _mm512_roundscale_ps(v_mul(y, v_set(1.44269504f)), 8);
    vf r = v_fma(n, v_set(-0.693359375f), y);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    vf p = v_set(1.0f / 720);
    p = v_fma(p, r, v_set(1.0f / 120));
    p = v_fma(p, r, v_set(1.0f / 24));
    p = v_fma(p, r, v_set(1.0f / 6));
    p = v_fma(p, r, v_set(0.5f));
    p = v_fma(p, r, v_set(1.0f));
    p = v_fma(p, r, v_set(1.0f));
    return _mm512_scalef_ps(p, n);
#else
    return v_exp(x);
#endif
}

INLINE float exp_one(float x)
{
    return v_first(v_exp(v_set(x)));
}
/* The keys of a page that come a chunk later, on their way while these are used. */
INLINE void fetch(const char *at, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(at + i, 0, 2);
}

INLINE int overlaps(const struct query *query, size_t from, size_t to)
{
    return query->first < to && query->end > from;
}

#endif
