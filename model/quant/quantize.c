/* SPDX-License-Identifier: Apache-2.0 */
#include "model/quant/quantize.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "model/quant/search.h"

#define F16_MAX 65504.0f
#define TINY 1e-30f /* no f16 scale is that small */

uint16_t quantize_to_f16(float x)
{
    uint32_t bits, sign, magnitude;
    memcpy(&bits, &x, sizeof bits);
    sign = bits >> 16 & 0x8000;
    magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) /* 65520: the first that is nearer to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) { /* below 2^-14: a multiple of 2^-24 */
        float scaled = fabsf(x) * 0x1p24f;
        return (uint16_t)(sign | (uint32_t)((scaled + 8388608.0f) - 8388608.0f));
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((magnitude - 0x38000000) >> 13));
}

float quantize_from_f16(uint16_t h)
{
    uint32_t exponent = h >> 10 & 31, fraction = h & 1023, bits;
    float x;
    if (!exponent) {
        x = (float)fraction * 0x1p-24f;
        return h & 0x8000 ? -x : x;
    }
    bits = (h & 0x8000u) << 16 | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- the instruction set ---- */

struct functions {
    quantize_sums_fn *sums;
    quantize_range_fn *range;
    quantize_codes_fn *codes8, *codes4;
};

static const struct functions *functions(void)
{
    static const struct functions plain = {quantize_sums_plain, quantize_range_plain,
                                           quantize_codes8_plain, quantize_codes4_plain};
#if defined(__x86_64__)
    static const struct functions avx2 = {quantize_sums_avx2, quantize_range_avx2,
                                          quantize_codes8_avx2, quantize_codes4_avx2};
    if (__builtin_cpu_supports("avx2"))
        return &avx2;
#endif
    return &plain;
}

/* ---- one group ---- */

/*
 * What is tried: code numbers on which the largest value falls, from well inside the range of codes
 * to beyond it, where it is clipped. Where the grid lies is by trial (docs/performance.md).
 */
static const struct grid {
    float first, step;
} grids[] = {
    [EMBER_QUANT_INT8] = {124, 0.4f},
    [EMBER_QUANT_INT4] = {7, 0.15f},
};

/* `extreme` is the value that is largest in size. */
static void make_tries(const struct quantize_form *form, float extreme, struct quantize_tries *ret)
{
    const struct grid *grid = &grids[form->quant];
    const float low = form->quant == EMBER_QUANT_INT8 ? -128 : -8;
    for (int i = 0; i < QUANTIZE_TRIES; i++) {
        /* the code that is largest in size is negative, so the scale's sign is free */
        ret->inverse[i] = -(grid->first + grid->step * (float)i) / extreme;
        ret->low[i] = low;
        ret->high[i] = -low - 1;
    }
}

static int best_of(const float wq[QUANTIZE_TRIES], const float qq[QUANTIZE_TRIES])
{
    float best = 0;
    int which = 0;
    for (int i = 0; i < QUANTIZE_TRIES; i++) {
        float worth = qq[i] > 0 ? wq[i] / qq[i] * wq[i] : 0;
        if (worth > best) {
            best = worth;
            which = i;
        }
    }
    return which;
}

struct choice {
    uint16_t scale;
    float inverse; /* 0: all codes are zero */
    float low, high;
};

static int choose(const struct functions *f, const struct quantize_form *form, const float *w,
                  uint32_t n, struct choice *ret)
{
    const float most = form->quant == EMBER_QUANT_INT8 ? 127 : 7;
    struct quantize_tries tries;
    float wq[QUANTIZE_TRIES], qq[QUANTIZE_TRIES], scale, lowest, highest, extreme;
    int i;
    *ret = (struct choice){.low = -most - 1, .high = most};
    if (!f->range(w, n, &lowest, &highest))
        return -EDOM;
    extreme = -lowest > highest ? lowest : highest;
    if (fabsf(extreme) < TINY)
        return 0;
    if (fabsf(extreme) > F16_MAX * most)
        return -ERANGE;
    make_tries(form, extreme, &tries);
    f->sums(w, n, &tries, wq, qq);
    i = best_of(wq, qq);
    ret->scale = quantize_to_f16(qq[i] > 0 ? wq[i] / qq[i] : 0);
    scale = quantize_from_f16(ret->scale);
    if (isinf(scale))
        return -ERANGE;
    ret->inverse = scale == 0 ? 0 : 1 / scale;
    return 0;
}

/* The codes of n values of which `real` are kept. */
static void put_codes(const struct functions *f, const struct quantize_form *form, const float *w,
                      uint32_t n, uint32_t real, const struct choice *c, uint8_t *codes)
{
    const uint32_t whole = form->quant == EMBER_QUANT_INT8 ? real & ~31u : n;
    uint8_t rest[32];
    (form->quant == EMBER_QUANT_INT8 ? f->codes8 : f->codes4)(w, whole, c->inverse, c->low, c->high,
                                                              codes);
    if (whole < n) {
        f->codes8(w + whole, 32, c->inverse, c->low, c->high, rest);
        memcpy(codes + whole, rest, real - whole);
    }
}

int quantize_row(const struct quantize_form *form, const float *w, uint32_t k, uint8_t *codes,
                 uint16_t *scales)
{
    const struct functions *f = functions();
    const uint32_t padded = (uint32_t)size_align(k, 32);
    for (uint32_t at = 0, g = 0; at < k; at += form->group, g++) {
        const uint32_t n = MIN(form->group, padded - at);
        struct choice c;
        int r = choose(f, form, w + at, n, &c);
        if (r < 0)
            return r;
        scales[g] = c.scale;
        put_codes(f, form, w + at, n, MIN(n, k - at), &c,
                  codes + (form->quant == EMBER_QUANT_INT8 ? at : at / 2));
    }
    return 0;
}

void quantize_value(const struct quantize_form *form, const uint8_t *codes, const uint16_t *scales,
                    uint32_t k, float *to)
{
    for (uint32_t i = 0; i < k; i++) {
        const float scale = quantize_from_f16(scales[i / form->group]);
        const int code = form->quant == EMBER_QUANT_INT8
                             ? (int8_t)codes[i]
                             : (codes[i / 32 * 16 + i % 16] >> (i % 32 >= 16 ? 4 : 0) & 15) - 8;
        to[i] = scale * (float)code;
    }
}
