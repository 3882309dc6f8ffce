/* SPDX-License-Identifier: Apache-2.0 */
/* What is read from logits and what changes them; choosing a token is sample.c. */
#include "engine/sample.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "engine/weigh.h"

typedef float v8f __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));

#define SPAN 256 /* logits looked through again to find where the largest stands */

/* The largest of at most SPAN; NaN never is. -infinity: there is no other number. */
static float largest(const float *logits, uint32_t n)
{
    float lanes[8], best = -INFINITY;
    v8f most = {-INFINITY, -INFINITY, -INFINITY, -INFINITY,
                -INFINITY, -INFINITY, -INFINITY, -INFINITY},
        l;

    for (uint32_t i = 0; i + 8 <= n; i += 8) {
        memcpy(&l, logits + i, sizeof l);
        v8i more = l > most;
        most = (v8f)((more & (v8i)l) | (~more & (v8i)most));
    }
    memcpy(lanes, &most, sizeof lanes);
    for (uint32_t i = 0; i < 8; i++)
        best = lanes[i] > best ? lanes[i] : best;
    for (uint32_t i = n / 8 * 8; i < n; i++)
        best = logits[i] > best ? logits[i] : best;
    return best;
}

uint32_t logits_best(const float *logits, uint32_t vocab)
{
    float best = -INFINITY;
    uint32_t span = 0;

    for (uint32_t at = 0; at < vocab; at += SPAN) {
        float most = largest(logits + at, MIN(vocab - at, SPAN));
        if (most > best) {
            best = most;
            span = at;
        }
    }
    for (uint32_t i = span; i < vocab && i < span + SPAN; i++)
        if (logits[i] == best)
            return i;
    for (uint32_t i = 0; i < vocab; i++) /* nothing above -infinity */
        if (!isnan(logits[i]))
            return i;
    return 0;
}

double logits_norm(const float *logits, uint32_t vocab)
{
    float best = logits[logits_best(logits, vocab)];
    struct weighed w;
    double sum = 0;

    if (!isfinite(best))
        return best; /* -infinity: nothing is likely; infinity or NaN: nothing is known */
    for (uint32_t at = 0; at < vocab; at += WEIGH_BLOCK) {
        uint32_t n = MIN(vocab - at, WEIGH_BLOCK);
        weigh(logits + at, n, best, 1, &w);
        for (uint32_t i = 0; i < n; i++)
            sum += w.weight[i];
    }
    return (double)best + log(sum);
}

void logits_top(const float *logits, uint32_t vocab, double norm, uint32_t n,
                struct token_logprob *ret)
{
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

static bool penalises(const struct logits_change *c)
{
    return (c->repetition != 0 && c->repetition != 1) || c->frequency != 0 || c->presence != 0;
}

bool logits_change_any(const struct logits_change *c)
{
    return c->n_bias || c->n_suppress || c->n_allowed || logits_change_history(c);
}

bool logits_change_history(const struct logits_change *c)
{
    return c->n_bad || penalises(c);
}

static int check_bad(const struct logits_change *c, uint32_t vocab, struct error *err)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < c->n_bad; i++) {
        sum += c->bad_lens[i];
        if (!c->bad_lens[i])
            return error_set(err, EINVAL, "bad run %zu has no tokens", i);
    }
    if (sum != c->n_bad_tokens)
        return error_set(err, EINVAL, "bad runs of %llu tokens in all, of which there are %zu",
                         (unsigned long long)sum, c->n_bad_tokens);
    for (size_t i = 0; i < c->n_bad_tokens; i++)
        if (c->bad_tokens[i] >= vocab)
            return error_set(err, EINVAL, "bad token %u: the vocabulary has %u", c->bad_tokens[i],
                             vocab);
    return 0;
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
    for (size_t i = 0; i < c->n_allowed; i++)
        if (c->allowed[i] >= vocab)
            return error_set(err, EINVAL, "allowed token %u: the vocabulary has %u", c->allowed[i],
                             vocab);
    for (size_t i = 0; i < c->n_history; i++)
        if (c->history[i] >= vocab)
            return error_set(err, EINVAL, "token %zu of the history is %u, the vocabulary has %u",
                             i, c->history[i], vocab);
    return check_bad(c, vocab, err);
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

static void keep_allowed(const struct logits_change *c, float *logits, uint32_t vocab,
                         uint32_t *counts)
{
    for (size_t i = 0; i < c->n_allowed; i++)
        counts[c->allowed[i]] = 1;
    for (uint32_t i = 0; i < vocab; i++)
        if (!counts[i])
            logits[i] = -INFINITY;
    for (size_t i = 0; i < c->n_allowed; i++)
        counts[c->allowed[i]] = 0;
}

/* The last token of each run whose others have just been generated. */
static void ban(const struct logits_change *c, float *logits)
{
    size_t generated = c->n_history - MIN(c->n_prompt, c->n_history);
    const uint32_t *run = c->bad_tokens, *end = c->history + c->n_history;

    for (size_t i = 0; i < c->n_bad; run += c->bad_lens[i++]) {
        size_t before = c->bad_lens[i] - 1;
        if (!before || (before <= generated && !memcmp(end - before, run, before * sizeof *run)))
            logits[run[before]] = -INFINITY;
    }
}

static void leave_one(const struct logits_change *c, float *logits)
{
    for (size_t i = 0; i < c->n_allowed; i++)
        if (logits[c->allowed[i]] > -INFINITY)
            return;
    logits[c->allowed[0]] = 0;
}

void logits_change_apply(const struct logits_change *c, float *logits, uint32_t vocab,
                         uint32_t *counts)
{
    for (size_t i = 0; i < c->n_bias; i++)
        logits[c->bias_tokens[i]] += c->bias_values[i];
    for (size_t i = 0; i < c->n_suppress; i++)
        if (c->suppress[i] < vocab)
            logits[c->suppress[i]] = -INFINITY;
    if (c->n_allowed)
        keep_allowed(c, logits, vocab, counts);
    ban(c, logits);
    if (penalises(c))
        penalise(c, logits, counts);
    if (c->n_allowed)
        leave_one(c, logits);
}
