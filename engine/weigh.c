/* SPDX-License-Identifier: Apache-2.0 */
/*
 * exp(x) = 2^k exp(r), k = round(x / ln 2), |r| <= ln 2 / 2, exp(r) by its Taylor series to the
 * 13th power. Four at a time in the compiler's vectors; the body is compiled twice, for AVX2 and
 * for whatever there is, without fused operations: both give the same bits.
 */
#include "engine/weigh.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

typedef float v4f __attribute__((vector_size(16)));
typedef int32_t v4i __attribute__((vector_size(16)));
typedef double v4d __attribute__((vector_size(32)));
typedef int64_t v4l __attribute__((vector_size(32)));

#define LOWEST -706.0  /* exp of it is a normal number */
#define ROUND 0x1.8p52 /* added, it leaves the nearest integer in the low bits */
#define LOG2_E 0x1.71547652b82fep+0
#define LN2_HIGH 0x1.62e42fefa0000p-1 /* with zeros at its end, so that k times it is exact */
#define LN2_LOW 0x1.cf79abc9e3b3ap-40

#define ALL(x) ((v4d){(x), (x), (x), (x)})
/* a where the mask is set, else b */
#define SELECT(mask, a, b) ((v4d)(((mask) & (v4l)(a)) | (~(mask) & (v4l)(b))))

static inline __attribute__((always_inline)) void body(const float *logits, double best,
                                                       double scale, struct weighed *ret)
{
    static const double inverse[] = {1.0 / 6227020800,
                                     1.0 / 479001600,
                                     1.0 / 39916800,
                                     1.0 / 3628800,
                                     1.0 / 362880,
                                     1.0 / 40320,
                                     1.0 / 5040,
                                     1.0 / 720,
                                     1.0 / 120,
                                     1.0 / 24,
                                     1.0 / 6,
                                     1.0 / 2,
                                     1.0,
                                     1.0};

    for (uint32_t i = 0; i < WEIGH_BLOCK; i += 4) {
        v4f l;
        memcpy(&l, logits + i, sizeof l);
        v4d x = (__builtin_convertvector(l, v4d) - ALL(best)) * ALL(scale);
        x = SELECT((v4l)(x > ALL(LOWEST)), x, ALL(LOWEST)); /* NaN as well */
        v4d shifted = x * ALL(LOG2_E) + ALL(ROUND), k = shifted - ALL(ROUND);
        v4d r = x - k * ALL(LN2_HIGH) - k * ALL(LN2_LOW), sum = ALL(inverse[0]);
        for (size_t j = 1; j < sizeof inverse / sizeof *inverse; j++)
            sum = sum * r + ALL(inverse[j]);
        v4d weight = (v4d)((v4l)sum + ((v4l)shifted << 52));
        v4d depth = x * ALL(-WEIGH_A_NAT), most = ALL(WEIGH_BUCKETS - 1);
        v4i bucket = __builtin_convertvector(SELECT((v4l)(depth < most), depth, most), v4i);
        memcpy(ret->weight + i, &weight, sizeof weight);
        memcpy(ret->bucket + i, &bucket, sizeof bucket);
    }
}

static void weigh_any(const float *logits, double best, double scale, struct weighed *ret)
{
    body(logits, best, scale, ret);
}

#ifdef __x86_64__
__attribute__((target("avx2"))) static void weigh_avx2(const float *logits, double best,
                                                       double scale, struct weighed *ret)
{
    body(logits, best, scale, ret);
}
#endif

void weigh(const float *logits, uint32_t n, double best, double scale, struct weighed *ret)
{
    float padded[WEIGH_BLOCK];

    if (n < WEIGH_BLOCK) {
        for (uint32_t i = 0; i < WEIGH_BLOCK; i++)
            padded[i] = i < n ? logits[i] : -INFINITY;
        logits = padded;
    }
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) {
        weigh_avx2(logits, best, scale, ret);
        return;
    }
#endif
    weigh_any(logits, best, scale, ret);
}
