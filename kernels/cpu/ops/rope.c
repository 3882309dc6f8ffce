/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rope_table and split_norm_rope. Blocks split rows.
 *
 * Angles reach the longest position in radians (10^6), so sine and cosine are computed in double:
 * reduction by pi/2 in three parts (33, 33 and 53 bits; the products with a quadrant number below
 * 2^20 are exact), then Taylor series on
 * [-pi/4, pi/4], good to 1e-15.
 */
#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/ops/kv.h"
#include "kernels/cpu/simd.h"

INLINE void sin_cos(double x, double *ret_sin, double *ret_cos)
{
    double n = x * 0.63661977236758134308;
    long long quadrant = (long long)(n + (n < 0 ? -0.5 : 0.5));
    n = (double)quadrant;
    double r = x - n * 1.57079632673412561417e+00;
    r = r - n * 6.07710050630396597660e-11;
    r = r - n * 2.02226624879595063154e-21;
    double t = r * r;
    double s =
        r * (1 + t * (-1.0 / 6 +
                      t * (1.0 / 120 + t * (-1.0 / 5040 + t * (1.0 / 362880 +
                                                               t * (-1.0 / 39916800 +
                                                                    t * (1.0 / 6227020800.0 -
                                                                         t / 1307674368000.0)))))));
    double c =
        1 + t * (-0.5 + t * (1.0 / 24 +
                             t * (-1.0 / 720 + t * (1.0 / 40320 + t * (-1.0 / 3628800 +
                                                                       t * (1.0 / 479001600 -
                                                                            t / 87178291200.0))))));
    double sine = quadrant & 1 ? c : s, cosine = quadrant & 1 ? s : c;
    *ret_sin = quadrant & 2 ? -sine : sine;
    *ret_cos = (quadrant + 1) & 2 ? -cosine : cosine;
}

/* ln x for finite x > 0: x = m 2^e with m in [sqrt(1/2), sqrt 2), then 2 atanh((m - 1) / (m + 1)).
 */
INLINE double log_double(double x)
{
    union {
        double value;
        uint64_t bits;
    } u = {x};
    int e = (int)(u.bits >> 52) - 1023;
    u.bits = (u.bits & 0x000fffffffffffff) | 0x3ff0000000000000;
    if (u.value > 1.41421356237309504880) {
        u.value = u.value * 0.5;
        e++;
    }
    double z = (u.value - 1) / (u.value + 1), t = z * z, sum = 0;
    for (int k = 23; k >= 1; k -= 2)
        sum = sum * t + 1.0 / k;
    return 2 * z * sum + e * 0.69314718055994530942;
}

/* e^x for |x| < 700. */
INLINE double exp_double(double x)
{
    double n = x * 1.44269504088896340736;
    long long e = (long long)(n + (n < 0 ? -0.5 : 0.5));
    double r = x - (double)e * 6.93147180369123816490e-01;
    r = r - (double)e * 1.90821492927058770002e-10;
    double sum = 1;
    for (int k = 14; k >= 1; k--)
        sum = sum * r / k + 1;
    union {
        uint64_t bits;
        double value;
    } u = {(uint64_t)(e + 1023) << 52};
    return sum * u.value;
}

KERNEL(rope_table)
{
    const int32_t *positions = (const int32_t *)arg_pointer(args[RPT_POSITIONS]);
    const int32_t *lengths = (const int32_t *)arg_pointer(args[RPT_LEN]);
    const float *table = (const float *)arg_pointer(args[RPT_INV_FREQ]);
    char *out = arg_pointer(args[RPT_OUT]);
    const size_t half = args[RPT_HALF];
    const double attention = arg_double(args[RPT_ATTENTION_FACTOR_F64]);
    const double factor = arg_double(args[RPT_FACTOR_F64]);
    const double longest = arg_double(args[RPT_MAX_POSITION_F64]);
    struct range range = block_range(arg_rows(args), block, n_blocks);
    for (size_t r = range.first; r < range.end; r++) {
        float *row = (float *)(out + r * args[RPT_OUT_STRIDE]);
        double log_base = 0;
        int stretched = args[RPT_KIND] == EMBER_ROPE_DYNAMIC_NTK && lengths[r] > longest;
        if (stretched) {
            double dim = 2.0 * (double)half;
            log_base = log_double(arg_double(args[RPT_THETA_F64])) +
                       log_double(factor * lengths[r] / longest - (factor - 1)) * (dim / (dim - 2));
        }
        for (size_t j = 0; j < half; j++) {
            float inv_freq =
                stretched ? (float)exp_double(-log_base * (double)j / (double)half) : table[j];
            float angle = (float)positions[r] * inv_freq;
            double s, c;
            sin_cos(angle, &s, &c);
            row[j] = (float)(attention * (double)(float)c);
            row[half + j] = (float)(attention * (double)(float)s);
        }
    }
}

#ifdef SPEC_DK
#define SPLIT_DK SPEC_DK
#else
#define SPLIT_DK args[SPL_DK]
#endif
#ifdef SPEC_DV
#define SPLIT_DV SPEC_DV
#else
#define SPLIT_DV args[SPL_DV]
#endif

INLINE void rotate(float *x, const float *rope, size_t rotary, size_t interleaved)
{
    size_t half = rotary / 2;
    const float *cosine = rope, *sine = rope + half;
    if (interleaved) {
        for (size_t j = 0; j < half; j++) {
            float a = x[2 * j], b = x[2 * j + 1];
            x[2 * j] = a * cosine[j] - b * sine[j];
            x[2 * j + 1] = b * cosine[j] + a * sine[j];
        }
        return;
    }
    for (size_t j = 0; j < half; j += VL) {
        size_t left = V_LEFT(j, half);
        vf a = v_get(x + j, left), b = v_get(x + half + j, left);
        vf c = v_get(cosine + j, left), s = v_get(sine + j, left);
        v_put(x + j, v_sub(v_mul(a, c), v_mul(b, s)), left);
        v_put(x + half + j, v_add(v_mul(b, c), v_mul(a, s)), left);
    }
}

/* rsqrt(mean of squares + eps) of n floats. */
INLINE float rms_scale(const float *x, size_t n, float eps)
{
    vf sum = v_zero();
    for (size_t i = 0; i < n; i += VL) {
        vf a = v_get(x + i, V_LEFT(i, n));
        sum = v_fma(a, a, sum);
    }
    return 1.0f / __builtin_sqrtf(v_sum(sum) / (float)n + eps);
}

/* The parts of one side, q or k, that its heads share. */
struct side {
    const char *w; /* NULL: all ones */
    enum ember_dtype w_dtype;
    float row_scale;
};

INLINE void normalise(const uint64_t *args, const struct side *side, const float *from, float *to,
                      size_t n, size_t w_first, float scale)
{
    vf sv = v_set(scale), w_bias = v_set(arg_float(args[SPL_W_BIAS]));
    for (size_t i = 0; i < n; i += VL) {
        size_t left = V_LEFT(i, n);
        vf y = v_mul(v_get(from + i, left), sv);
        if (side->w)
            y = v_mul(y, v_add(v_get_w(side->w, w_first + i, side->w_dtype, left), w_bias));
        v_put(to + i, y, left);
    }
}

/* One head of q or k: from -> to. */
INLINE void split_head(const uint64_t *args, const struct side *side, size_t head,
                       const float *from, float *to, const float *rope)
{
    const size_t dk = SPLIT_DK, kind = args[SPL_NORM], after = args[SPL_NORM_AFTER];
    const float eps = arg_float(args[SPL_EPS]);
    size_t w_first = kind == EMBER_QK_NORM_ROW ? head * dk : 0;
    if (kind == EMBER_QK_NORM_NONE || after)
        for (size_t i = 0; i < dk; i += VL)
            v_put(to + i, v_get(from + i, V_LEFT(i, dk)), V_LEFT(i, dk));
    else
        normalise(args, side, from, to, dk, w_first,
                  kind == EMBER_QK_NORM_ROW ? side->row_scale : rms_scale(from, dk, eps));
    if (rope)
        rotate(to, rope, args[SPL_ROTARY], args[SPL_INTERLEAVED]);
    if (kind != EMBER_QK_NORM_NONE && after)
        normalise(args, side, to, to, dk, w_first,
                  kind == EMBER_QK_NORM_ROW ? side->row_scale : rms_scale(to, dk, eps));
}

INLINE struct side split_side(const uint64_t *args, size_t w, size_t w_dtype, const float *x,
                              size_t n)
{
    struct side side = {arg_pointer(args[w]), (enum ember_dtype)args[w_dtype], 0};
    /* A rotation keeps the sum of squares, so the scale of a row is that of its input, before and
     * after. */
    if (args[SPL_NORM] == EMBER_QK_NORM_ROW)
        side.row_scale = rms_scale(x, n, arg_float(args[SPL_EPS]));
    return side;
}

/* What the heads of a row share. */
struct split {
    const float *q, *k, *v, *rope;
    float *q_out;
    size_t page, slot;
    struct side q_side, k_side;
};

INLINE struct split split_start(const uint64_t *args, size_t r)
{
    const size_t dk = SPLIT_DK, q_heads = args[SPL_Q_HEADS], kv_heads = args[SPL_KV_HEADS];
    const float *q = (const float *)(arg_pointer(args[SPL_QKV]) + r * args[SPL_QKV_STRIDE]);
    const float *k = q + q_heads * dk;
    const uint32_t kv_slot = ((const uint32_t *)arg_pointer(args[SPL_KV_SLOT]))[r];
    return (struct split){
        .q = q,
        .k = k,
        .v = k + kv_heads * dk,
        .rope = args[SPL_ROPE] && args[SPL_ROTARY]
                    ? (const float *)(arg_pointer(args[SPL_ROPE]) + r * args[SPL_ROPE_STRIDE])
                    : NULL,
        .q_out = (float *)(arg_pointer(args[SPL_Q]) + r * args[SPL_Q_STRIDE]),
        .page = kv_slot / args[SPL_PAGE_SIZE],
        .slot = kv_slot % args[SPL_PAGE_SIZE],
        .q_side = split_side(args, SPL_Q_NORM, SPL_Q_NORM_DTYPE, q, q_heads * dk),
        .k_side = split_side(args, SPL_K_NORM, SPL_K_NORM_DTYPE, k, kv_heads * dk)};
}

#define RUN 16

/* K and V of n rows of a page, head h. */
INLINE void split_kv_head(const uint64_t *args, const struct split *s, size_t n, size_t h)
{
    const size_t dk = SPLIT_DK, dv = SPLIT_DV, page_size = args[SPL_PAGE_SIZE];
    const size_t rows = args[SPL_KV_HEADS] * page_size;
    const enum ember_dtype dtype = (enum ember_dtype)args[SPL_KV_DTYPE];
    const vf v_scale = v_set(arg_float(args[SPL_V_SCALE]));
    char *k_page = arg_pointer(args[SPL_K]) + s->page * args[SPL_K_PAGE_STRIDE];
    char *v_page = arg_pointer(args[SPL_V]) + s->page * args[SPL_V_PAGE_STRIDE];
    float key[ATTENTION_DIM_MAX], value[ATTENTION_DIM_MAX];
    char keys[RUN * ATTENTION_DIM_MAX * sizeof(float)];
    const size_t apart = dk * sizeof(float);
    size_t first = 0; /* of keys whose slots follow one another */
    for (size_t i = 0; i < n; i++) {
        const size_t at = h * page_size + s[i].slot;
        split_head(args, &s[i].k_side, h, s[i].k + h * dk, key, s[i].rope);
        for (size_t d = 0; d < dv; d += VL)
            v_put(value + d, v_mul(v_scale, v_get(s[i].v + h * dv + d, V_LEFT(d, dv))),
                  V_LEFT(d, dv));
#if VL == 16
        if (args[SPL_KV_TILES]) {
            const int terms = dtype == EMBER_F32 ? 2 : 1;
            kv_key_tiles(k_page + h * page_size * dk * 2 * (size_t)terms, terms, s[i].slot, key,
                         dk);
            kv_value_tiles(v_page + h * page_size * dv * 2 * (size_t)terms, terms, s[i].slot, value,
                           dv);
            continue;
        }
#endif
        kv_narrow(key, dtype, dk, keys + i * apart,
                  (float *)(k_page + kv_scales_at(rows * dk)) + at);
        kv_narrow(value, dtype, dv, v_page + at * dv * kv_size(dtype),
                  (float *)(v_page + kv_scales_at(rows * dv)) + at);
        if (i + 1 < n && s[i + 1].slot == s[i].slot + 1)
            continue;
        kv_key_columns(k_page + (h * page_size * dk + s[first].slot) * kv_size(dtype), dtype,
                       keys + first * apart, apart, i + 1 - first, dk, page_size);
        first = i + 1;
    }
}

/* Whether row r goes to the page of the row before it. */
INLINE int split_follows(const uint64_t *args, size_t r)
{
    const uint32_t *slot = (const uint32_t *)arg_pointer(args[SPL_KV_SLOT]);
    return r && slot[r] / args[SPL_PAGE_SIZE] == slot[r - 1] / args[SPL_PAGE_SIZE];
}

/* Rows that follow one another in a page share lines of K: one block does them all, the one that
 * the first belongs to, and a head of up to RUN of them before the next head. */
KERNEL(split_norm_rope)
{
    const size_t rows = arg_rows(args), q_heads = args[SPL_Q_HEADS], dk = SPLIT_DK;
    struct range range = block_range(rows, block, n_blocks);
    struct split split[RUN];
    while (range.first < range.end && split_follows(args, range.first))
        range.first++;
    while (range.first < range.end && range.end < rows && split_follows(args, range.end))
        range.end++;
    for (size_t r = range.first, n; r < range.end; r += n) {
        for (n = 0; n < RUN && r + n < range.end && (!n || split_follows(args, r + n)); n++) {
            split[n] = split_start(args, r + n);
            for (size_t h = 0; h < q_heads; h++)
                split_head(args, &split[n].q_side, h, split[n].q + h * dk, split[n].q_out + h * dk,
                           split[n].rope);
        }
        for (size_t h = 0; h < args[SPL_KV_HEADS]; h++)
            split_kv_head(args, split, n, h);
    }
}
