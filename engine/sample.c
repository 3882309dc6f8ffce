/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The inverse CDF in falling order of probability without sorting a vocabulary: candidates are
 * summed in buckets of falling logit, the bucket in which the wanted sum is reached is found, and
 * in it alone the candidate, by a quickselect on sums. A top-k small against the vocabulary is
 * kept in a heap and sorted.
 */
#include "engine/sample.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/weigh.h"

struct candidate {
    float logit;
    uint32_t token;
    double weight; /* exp((logit - best) / temperature) */
};

/* The splitmix64 finaliser (Steele, Lea, Flood 2014) over a counter: uniform in [0, 1). */
static double uniform(uint64_t seed, uint64_t index)
{
    uint64_t z = seed + (index + 1) * UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static bool better(const struct candidate *a, const struct candidate *b)
{
    return a->logit > b->logit || (a->logit == b->logit && a->token < b->token);
}

static int by_falling_logit(const void *a, const void *b)
{
    return better(a, b) ? -1 : 1;
}

static void swap(struct candidate *a, struct candidate *b)
{
    struct candidate t = *a;

    *a = *b;
    *b = t;
}

int sampling_check(const struct sampling *s, struct error *err)
{
    if (!(s->temperature >= 0) || !isfinite(s->temperature))
        return error_set(err, EINVAL, "temperature is %g; it is a number from 0", s->temperature);
    if (!(s->top_p >= 0))
        return error_set(err, EINVAL, "top_p is %g; it is a number from 0 to 1", s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return error_set(err, EINVAL, "min_p is %g; it is a number from 0 to 1", s->min_p);
    return 0;
}

/* ---- top-k: a heap, the worst on top ---- */

static void sift_down(struct candidate *c, uint32_t k)
{
    for (uint32_t j = 0;;) {
        uint32_t worst = j, l = 2 * j + 1, r = l + 1;
        if (l < k && better(&c[worst], &c[l]))
            worst = l;
        if (r < k && better(&c[worst], &c[r]))
            worst = r;
        if (worst == j)
            return;
        swap(&c[j], &c[worst]);
        j = worst;
    }
}

static void sift_up(struct candidate *c, uint32_t j)
{
    for (; j && better(&c[(j - 1) / 2], &c[j]); j = (j - 1) / 2)
        swap(&c[j], &c[(j - 1) / 2]);
}

/* The k best, sorted; how many there are. */
static uint32_t best_of(const float *logits, uint32_t vocab, uint32_t k, struct candidate *c)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < vocab; i++) {
        struct candidate one = {.logit = logits[i], .token = i};
        if (!(logits[i] > -INFINITY) || (n == k && logits[i] < c[0].logit)) /* NaN as well */
            continue;
        if (n < k) {
            c[n] = one;
            sift_up(c, n++);
        } else if (better(&one, &c[0])) {
            c[0] = one;
            sift_down(c, k);
        }
    }
    qsort(c, n, sizeof *c, by_falling_logit);
    return n;
}

/* How many of the sorted candidates top-p and min-p leave, and the sum of their weights. */
static uint32_t cut(const struct sampling *s, struct candidate *c, uint32_t n, double *ret_sum)
{
    double total = 0, sum = 0;
    uint32_t kept = 0;

    for (uint32_t i = 0; i < n; i++) {
        c[i].weight = exp(((double)c[i].logit - c[0].logit) / s->temperature);
        total += c[i].weight;
    }
    while (kept < n) {
        if (kept && s->min_p > 0 && c[kept].weight < s->min_p)
            break;
        sum += c[kept++].weight;
        if (s->top_p > 0 && s->top_p < 1 && sum >= s->top_p * total)
            break;
    }
    *ret_sum = sum;
    return kept;
}

static int from_top_k(const struct sampling *s, const float *logits, uint32_t vocab,
                      uint32_t *ret_token, struct error *err)
{
    _cleanup_free_ struct candidate *c = mem_alloc(s->top_k, sizeof *c);
    double total, sum = 0;
    uint32_t i = 0;

    if (!c)
        return error_set(err, ENOMEM, "no memory to sample from %u tokens", s->top_k);
    uint32_t n = cut(s, c, best_of(logits, vocab, s->top_k, c), &total);
    double want = uniform(s->seed, s->index) * total;
    while (i + 1 < n && (sum += c[i].weight) <= want)
        i++;
    *ret_token = n ? c[i].token : 0;
    return 0;
}

/* ---- everything: buckets of falling logit ---- */

struct field {
    const float *logits;
    uint32_t vocab;
    double best, scale, min_weight;
    bool has_last; /* by top-p: nothing behind `last` counts */
    struct candidate last;
    double sums[WEIGH_BUCKETS];
    uint32_t counts[WEIGH_BUCKETS];
    double total;
};

/* Whether token i, with its weight, counts. */
static bool counts(const struct field *f, const struct candidate *c)
{
    return c->logit > -INFINITY && c->weight >= f->min_weight &&
           !(f->has_last && better(&f->last, c));
}

static void sum_up(struct field *f)
{
    struct weighed w;

    memset(f->sums, 0, sizeof f->sums);
    memset(f->counts, 0, sizeof f->counts);
    for (uint32_t at = 0; at < f->vocab; at += WEIGH_BLOCK) {
        uint32_t n = MIN(f->vocab - at, WEIGH_BLOCK);
        weigh(f->logits + at, n, f->best, f->scale, &w);
        for (uint32_t i = 0; i < n; i++) {
            struct candidate c = {f->logits[at + i], at + i, w.weight[i]};
            if (!counts(f, &c))
                continue;
            f->sums[w.bucket[i]] += c.weight;
            f->counts[w.bucket[i]]++;
        }
    }
    f->total = 0;
    for (uint32_t b = 0; b < WEIGH_BUCKETS; b++)
        f->total += f->sums[b];
}

/* Whether one of the block may be in the bucket. */
static bool touches(const struct field *f, uint32_t at, uint32_t n, uint32_t bucket)
{
    double width = 1 / (f->scale * WEIGH_A_NAT); /* of a bucket, in logits; one more on each side */
    float high = (float)(f->best - (bucket - 1.0) * width);
    float low = bucket == WEIGH_BUCKETS - 1 ? -INFINITY : (float)(f->best - (bucket + 2.0) * width);
    bool any = false;

    for (uint32_t i = 0; i < n; i++)
        any |= f->logits[at + i] >= low && f->logits[at + i] <= high;
    return any;
}

/* Those of one bucket. */
static void gather(const struct field *f, uint32_t bucket, struct candidate *c)
{
    struct weighed w;
    uint32_t n = 0;

    for (uint32_t at = 0; at < f->vocab && n < f->counts[bucket]; at += WEIGH_BLOCK) {
        uint32_t m = MIN(f->vocab - at, WEIGH_BLOCK);
        if (!touches(f, at, m, bucket))
            continue;
        weigh(f->logits + at, m, f->best, f->scale, &w);
        for (uint32_t i = 0; i < m; i++) {
            if ((uint32_t)w.bucket[i] != bucket)
                continue;
            c[n] = (struct candidate){f->logits[at + i], at + i, w.weight[i]};
            n += counts(f, &c[n]);
            if (n == f->counts[bucket])
                return;
        }
    }
}

/* Those better than the pivot in front, then the pivot; its place, and the sum in front of it. */
static uint32_t partition(struct candidate *c, uint32_t n, uint32_t pivot, double *ret_sum)
{
    uint32_t at = 0;
    double sum = 0;

    swap(&c[pivot], &c[n - 1]);
    for (uint32_t i = 0; i + 1 < n; i++) {
        if (!better(&c[i], &c[n - 1]))
            continue;
        sum += c[i].weight;
        swap(&c[i], &c[at++]);
    }
    swap(&c[at], &c[n - 1]);
    *ret_sum = sum;
    return at;
}

/* The first in falling order with which the sum is more than `want`; else the last of all. */
static struct candidate reaching(struct candidate *c, uint32_t n, double want)
{
    struct candidate last = c[0];

    while (n) {
        double front;
        uint32_t at = partition(c, n, (uint32_t)(n * UINT64_C(2654435761) >> 7) % n, &front);
        if (front > want) {
            n = at;
            continue;
        }
        last = c[at];
        if (front + c[at].weight > want)
            break;
        want -= front + c[at].weight;
        c += at + 1;
        n -= at + 1;
    }
    return last;
}

/* The same over the whole field; -ENOMEM. */
static int find_reaching(const struct field *f, double want, struct candidate *ret,
                         struct error *err)
{
    uint32_t b = 0, last = 0;
    double before = 0;

    for (; b < WEIGH_BUCKETS; b++) {
        if (!f->counts[b])
            continue;
        last = b; /* the last that is not empty, should rounding pass them all */
        if (before + f->sums[b] > want)
            break;
        before += f->sums[b];
    }
    _cleanup_free_ struct candidate *c = mem_alloc(f->counts[last], sizeof *c);
    if (!c)
        return error_set(err, ENOMEM, "no memory to sample from %u tokens", f->counts[last]);
    gather(f, last, c);
    *ret = reaching(c, f->counts[last], b < WEIGH_BUCKETS ? want - before : INFINITY);
    return 0;
}

static int from_all(const struct sampling *s, const float *logits, uint32_t vocab, float best,
                    uint32_t *ret_token, struct error *err)
{
    struct field f = {
        .logits = logits, .vocab = vocab, .best = best, .scale = 1.0 / s->temperature};
    struct candidate drawn;
    int r = 0;

    sum_up(&f);
    if (s->top_p > 0 && s->top_p < 1) {
        /* the sum up to `last` is at least top_p of all: just below is what may not suffice */
        r = find_reaching(&f, nextafter(s->top_p * f.total, 0), &f.last, err);
        f.has_last = true;
    }
    f.min_weight = s->min_p;
    if (r == 0 && (f.has_last || f.min_weight > 0))
        sum_up(&f);
    if (r == 0)
        r = find_reaching(&f, uniform(s->seed, s->index) * f.total, &drawn, err);
    if (r == 0)
        *ret_token = drawn.token;
    return r;
}

int sample_token(const struct sampling *s, const float *logits, uint32_t vocab, uint32_t *ret_token,
                 struct error *err)
{
    uint32_t best = logits_best(logits, vocab);

    if (s->temperature == 0 || s->top_k == 1 || !isfinite(logits[best])) {
        *ret_token = best;
        return 0;
    }
    if (s->top_k && s->top_k < vocab)
        return from_top_k(s, logits, vocab, ret_token, err);
    return from_all(s, logits, vocab, logits[best], ret_token, err);
}
