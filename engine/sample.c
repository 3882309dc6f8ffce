/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/sample.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "base/mem.h"

struct candidate {
    float logit;
    uint32_t token;
};

/* The splitmix64 finaliser (Steele, Lea, Flood 2014) over a counter: uniform in [0, 1). */
static double uniform(uint64_t seed, uint64_t index)
{
    uint64_t z = seed + (index + 1) * UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static bool better(struct candidate a, struct candidate b)
{
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

static int by_falling_logit(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    return better(*x, *y) ? -1 : 1;
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

static uint32_t argmax(const float *logits, uint32_t vocab)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best] || (isnan(logits[best]) && !isnan(logits[i])))
            best = i;
    return best;
}

/* Keeps the k best of n in c[0..k), unordered, by a min-heap on the k. */
static void keep_best(struct candidate *c, uint32_t n, uint32_t k)
{
    for (uint32_t i = 1; i < k; i++) /* heapify by insertion: the worst on top */
        for (uint32_t j = i; j && better(c[(j - 1) / 2], c[j]); j = (j - 1) / 2) {
            struct candidate t = c[j];
            c[j] = c[(j - 1) / 2];
            c[(j - 1) / 2] = t;
        }
    for (uint32_t i = k; i < n; i++) {
        if (!better(c[i], c[0]))
            continue;
        c[0] = c[i];
        for (uint32_t j = 0;;) {
            uint32_t worst = j, l = 2 * j + 1, r = l + 1;
            if (l < k && better(c[worst], c[l]))
                worst = l;
            if (r < k && better(c[worst], c[r]))
                worst = r;
            if (worst == j)
                break;
            struct candidate t = c[j];
            c[j] = c[worst];
            c[worst] = t;
            j = worst;
        }
    }
}

/* How many of the sorted candidates top-p and min-p leave; weights[] become exp(logit / T - max).
 */
static uint32_t cut(const struct sampling *s, const struct candidate *c, double *weights,
                    uint32_t n)
{
    double total = 0, sum = 0;
    uint32_t kept = 0;

    for (uint32_t i = 0; i < n; i++) {
        weights[i] = exp(((double)c[i].logit - c[0].logit) / s->temperature);
        total += weights[i];
    }
    while (kept < n) {
        if (kept && s->min_p > 0 && weights[kept] < s->min_p * weights[0])
            break;
        sum += weights[kept++];
        if (s->top_p > 0 && s->top_p < 1 && sum >= s->top_p * total)
            break;
    }
    return kept;
}

int sample_token(const struct sampling *s, const float *logits, uint32_t vocab, uint32_t *ret_token,
                 struct error *err)
{
    if (s->temperature == 0 || s->top_k == 1) {
        *ret_token = argmax(logits, vocab);
        return 0;
    }
    _cleanup_free_ struct candidate *c = mem_alloc(vocab, sizeof *c);
    _cleanup_free_ double *weights = mem_alloc(vocab, sizeof *weights);
    uint32_t n = 0;
    if (!c || !weights)
        return error_set(err, ENOMEM, "no memory to sample from %u tokens", vocab);
    for (uint32_t i = 0; i < vocab; i++)
        if (!isnan(logits[i]) && logits[i] != -INFINITY)
            c[n++] = (struct candidate){logits[i], i};
    if (!n) {
        *ret_token = 0;
        return 0;
    }
    if (s->top_k && s->top_k < n) {
        keep_best(c, n, s->top_k);
        n = s->top_k;
    }
    qsort(c, n, sizeof *c, by_falling_logit);
    n = cut(s, c, weights, n);
    double total = 0, sum = 0;
    for (uint32_t i = 0; i < n; i++)
        total += weights[i];
    double want = uniform(s->seed, s->index) * total;
    uint32_t i = 0;
    while (i + 1 < n && (sum += weights[i]) <= want)
        i++;
    *ret_token = c[i].token;
    return 0;
}

float sample_logprob(const float *logits, uint32_t vocab, uint32_t token)
{
    float max = logits[argmax(logits, vocab)];
    double sum = 0;

    for (uint32_t i = 0; i < vocab; i++)
        sum += exp((double)logits[i] - max);
    return (float)((double)logits[token] - max - log(sum));
}

void sample_top(const float *logits, uint32_t vocab, uint32_t n, struct token_logprob *ret)
{
    float best = logits[argmax(logits, vocab)];
    double norm = (double)best - sample_logprob(logits, vocab, argmax(logits, vocab));
    uint32_t have = 0;

    for (uint32_t i = 0; i < vocab; i++) {
        uint32_t at = have;
        while (at && logits[i] > ret[at - 1].logprob)
            at--;
        if (at == n)
            continue;
        have = MIN(have + 1, n);
        for (uint32_t j = have - 1; j > at; j--)
            ret[j] = ret[j - 1];
        ret[at] = (struct token_logprob){i, logits[i]};
    }
    for (uint32_t i = 0; i < have; i++)
        ret[i].logprob = (float)((double)ret[i].logprob - norm);
    for (uint32_t i = have; i < n; i++)
        ret[i] = (struct token_logprob){0, -INFINITY};
}

/* ---- what changes logits ---- */

bool logits_change_penalty(const struct logits_change *c)
{
    return (c->repetition != 0 && c->repetition != 1) || c->frequency != 0 || c->presence != 0;
}

bool logits_change_any(const struct logits_change *c)
{
    return c->n_bias || c->n_suppress || logits_change_penalty(c);
}

int logits_change_check(const struct logits_change *c, uint32_t vocab, struct error *err)
{
    if (!(c->repetition >= 0) || !isfinite(c->repetition))
        return error_set(err, EINVAL, "repetition_penalty is %g; it is a number above 0",
                         c->repetition);
    if (!isfinite(c->frequency) || !isfinite(c->presence))
        return error_set(err, EINVAL, "a penalty is not a number");
    for (size_t i = 0; i < c->n_bias; i++)
        if (c->bias_tokens[i] >= vocab || !isfinite(c->bias_values[i]))
            return error_set(err, EINVAL, "the bias of token %u: the vocabulary has %u",
                             c->bias_tokens[i], vocab);
    for (size_t i = 0; i < c->n_history; i++)
        if (c->history[i] >= vocab)
            return error_set(err, EINVAL, "token %zu of the history is %u, the vocabulary has %u",
                             i, c->history[i], vocab);
    return 0;
}

#define IN_PROMPT (UINT32_C(1) << 31)

/* Each token of the history once: when its count is met the first time it is used and forgotten. */
static void penalise(const struct logits_change *c, float *logits, uint32_t *counts)
{
    for (size_t i = 0; i < c->n_history; i++) {
        if (i < c->n_prompt)
            counts[c->history[i]] |= IN_PROMPT;
        else
            counts[c->history[i]]++;
    }
    for (size_t i = 0; i < c->n_history; i++) {
        uint32_t token = c->history[i], count = counts[token] & ~IN_PROMPT;
        if (!counts[token])
            continue;
        counts[token] = 0;
        if (c->repetition != 0)
            logits[token] =
                logits[token] > 0 ? logits[token] / c->repetition : logits[token] * c->repetition;
        if (count)
            logits[token] -= c->frequency * (float)count + c->presence;
    }
}

void logits_change_apply(const struct logits_change *c, float *logits, uint32_t vocab,
                         uint32_t *counts)
{
    for (size_t i = 0; i < c->n_bias; i++)
        logits[c->bias_tokens[i]] += c->bias_values[i];
    for (size_t i = 0; i < c->n_suppress; i++)
        if (c->suppress[i] < vocab)
            logits[c->suppress[i]] = -INFINITY;
    if (logits_change_penalty(c))
        penalise(c, logits, counts);
}
