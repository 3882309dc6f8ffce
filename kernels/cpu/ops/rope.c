/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rope_table, split_norm_rope and split_latent. Blocks split rows.
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

INLINE void normalise(const struct side *side, float w_plus, const float *from, float *to, size_t n,
                      size_t w_first, float scale)
{
    vf sv = v_set(scale), w_bias = v_set(w_plus);
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
    const float eps = arg_float(args[SPL_EPS]), w_bias = arg_float(args[SPL_W_BIAS]);
    size_t w_first = kind == EMBER_QK_NORM_ROW ? head * dk : 0;
    if (kind == EMBER_QK_NORM_NONE || after)
        for (size_t i = 0; i < dk; i += VL)
            v_put(to + i, v_get(from + i, V_LEFT(i, dk)), V_LEFT(i, dk));
    else
        normalise(side, w_bias, from, to, dk, w_first,
                  kind == EMBER_QK_NORM_ROW ? side->row_scale : rms_scale(from, dk, eps));
    if (rope)
        rotate(to, rope, args[SPL_ROTARY], args[SPL_INTERLEAVED]);
    if (kind != EMBER_QK_NORM_NONE && after)
        normalise(side, w_bias, to, to, dk, w_first,
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

/* Rows on their way into a page. */
struct keeping {
    char *k, *v; /* the page's blocks */
    size_t page_size, heads;
    enum ember_dtype dtype;
    int tiles;
    size_t first; /* of keys whose slots follow one another */
    char keys[RUN * ATTENTION_DIM_MAX * sizeof(float)];
};

/* K and V of head h of row i of a run; follows: the slot of row i + 1 is the one behind. */
INLINE void keep_row(struct keeping *to, size_t h, size_t i, size_t slot, int follows,
                     const float *key, const float *value, const size_t dk, const size_t dv)
{
    const size_t page_size = to->page_size, rows = to->heads * page_size, at = h * page_size + slot;
    const size_t apart = dk * sizeof(float), size = kv_size(to->dtype);
#if VL == 16
    if (to->tiles) {
        const int terms = to->dtype == EMBER_F32 ? 2 : 1;
        kv_key_tiles(to->k + h * page_size * dk * 2 * (size_t)terms, terms, slot, key, dk);
        kv_value_tiles(to->v + h * page_size * dv * 2 * (size_t)terms, terms, slot, value, dv);
        return;
    }
#endif
    kv_narrow(key, to->dtype, dk, to->keys + i * apart,
              (float *)(to->k + kv_scales_at(rows * dk)) + at);
    kv_narrow(value, to->dtype, dv, to->v + at * dv * size,
              (float *)(to->v + kv_scales_at(rows * dv)) + at);
    if (follows)
        return;
    kv_key_columns(to->k + (h * page_size * dk + slot - (i - to->first)) * size, to->dtype,
                   to->keys + to->first * apart, apart, i + 1 - to->first, dk, page_size);
    to->first = i + 1;
}

/* K and V of n rows of a page, head h. */
INLINE void split_kv_head(const uint64_t *args, const struct split *s, size_t n, size_t h)
{
    const size_t dk = SPLIT_DK, dv = SPLIT_DV;
    const vf v_scale = v_set(arg_float(args[SPL_V_SCALE]));
    float key[ATTENTION_DIM_MAX], value[ATTENTION_DIM_MAX];
    struct keeping to;
    to.k = arg_pointer(args[SPL_K]) + s->page * args[SPL_K_PAGE_STRIDE];
    to.v = arg_pointer(args[SPL_V]) + s->page * args[SPL_V_PAGE_STRIDE];
    to.page_size = args[SPL_PAGE_SIZE];
    to.heads = args[SPL_KV_HEADS];
    to.dtype = (enum ember_dtype)args[SPL_KV_DTYPE];
    to.tiles = (int)args[SPL_KV_TILES];
    to.first = 0;
    for (size_t i = 0; i < n; i++) {
        split_head(args, &s[i].k_side, h, s[i].k + h * dk, key, s[i].rope);
        for (size_t d = 0; d < dv; d += VL)
            v_put(value + d, v_mul(v_scale, v_get(s[i].v + h * dv + d, V_LEFT(d, dv))),
                  V_LEFT(d, dv));
        keep_row(&to, h, i, s[i].slot, i + 1 < n && s[i + 1].slot == s[i].slot + 1, key, value, dk,
                 dv);
    }
}

/* Whether row r goes to the page of the row before it. */
INLINE int split_follows(const uint32_t *slot, size_t page_size, size_t r)
{
    return r && slot[r] / page_size == slot[r - 1] / page_size;
}

/* Rows that begin in a block's share, whole pages of them: those that follow the last one go with
 * it, those that follow a row of another block's do not. */
INLINE struct range split_range(const uint32_t *slot, size_t page_size, size_t rows, uint32_t block,
                                uint32_t n_blocks)
{
    struct range range = block_range(rows, block, n_blocks);
    while (range.first < range.end && split_follows(slot, page_size, range.first))
        range.first++;
    while (range.first < range.end && range.end < rows && split_follows(slot, page_size, range.end))
        range.end++;
    return range;
}

/* Rows that follow one another in a page share lines of K: one block does them all, the one that
 * the first belongs to, and a head of up to RUN of them before the next head. */
KERNEL(split_norm_rope)
{
    const size_t q_heads = args[SPL_Q_HEADS], dk = SPLIT_DK, page_size = args[SPL_PAGE_SIZE];
    const uint32_t *slot = (const uint32_t *)arg_pointer(args[SPL_KV_SLOT]);
    struct range range = split_range(slot, page_size, arg_rows(args), block, n_blocks);
    struct split split[RUN];
    for (size_t r = range.first, n; r < range.end; r += n) {
        for (n = 0; n < RUN && r + n < range.end && (!n || split_follows(slot, page_size, r + n));
             n++) {
            split[n] = split_start(args, r + n);
            for (size_t h = 0; h < q_heads; h++)
                split_head(args, &split[n].q_side, h, split[n].q + h * dk, split[n].q_out + h * dk,
                           split[n].rope);
        }
        for (size_t h = 0; h < args[SPL_KV_HEADS]; h++)
            split_kv_head(args, split, n, h);
    }
}

/* ---- split_latent ---- */

/* The rotated parts of q of row r, of all heads. */
INLINE void latent_q(const uint64_t *args, size_t r, const float *rope)
{
    const size_t rank = args[SLT_RANK], rotary = args[SLT_ROTARY], nope = args[SLT_NOPE];
    const float *from = (const float *)(arg_pointer(args[SLT_Q]) + r * args[SLT_Q_STRIDE]) + nope;
    float *to = (float *)(arg_pointer(args[SLT_OUT]) + r * args[SLT_OUT_STRIDE]) + rank;
    for (size_t h = 0; h < args[SLT_HEADS]; h++, from += nope + rotary, to += rank + rotary) {
        for (size_t i = 0; i < rotary; i += VL)
            v_put(to + i, v_get(from + i, V_LEFT(i, rotary)), V_LEFT(i, rotary));
        rotate(to, rope, rotary, args[SLT_INTERLEAVED]);
    }
}

/* The latent of row r, and behind it what is rotated. */
INLINE void latent_key(const uint64_t *args, size_t r, const float *rope, float *to)
{
    const size_t rank = args[SLT_RANK], rotary = args[SLT_ROTARY];
    const float *from = (const float *)(arg_pointer(args[SLT_KV]) + r * args[SLT_KV_STRIDE]);
    const struct side norm = {arg_pointer(args[SLT_NORM]), (enum ember_dtype)args[SLT_NORM_DTYPE],
                              0};
    normalise(&norm, arg_float(args[SLT_W_BIAS]), from, to, rank, 0,
              rms_scale(from, rank, arg_float(args[SLT_EPS])));
    for (size_t i = 0; i < rotary; i += VL)
        v_put(to + rank + i, v_get(from + rank + i, V_LEFT(i, rotary)), V_LEFT(i, rotary));
    rotate(to + rank, rope, rotary, args[SLT_INTERLEAVED]);
}

/* Blocks as in split_norm_rope. */
KERNEL(split_latent)
{
    const size_t rank = args[SLT_RANK], rotary = args[SLT_ROTARY], page_size = args[SLT_PAGE_SIZE];
    const uint32_t *slot = (const uint32_t *)arg_pointer(args[SLT_KV_SLOT]);
    struct range range = split_range(slot, page_size, arg_rows(args), block, n_blocks);
    float key[ATTENTION_DIM_MAX];
    struct keeping to;
    to.page_size = page_size;
    to.heads = 1;
    to.dtype = (enum ember_dtype)args[SLT_KV_DTYPE];
    to.tiles = (int)args[SLT_KV_TILES];
    for (size_t r = range.first, n; r < range.end; r += n) {
        const size_t page = slot[r] / page_size;
        for (n = 1; n < RUN && r + n < range.end && split_follows(slot, page_size, r + n); n++)
            ;
        to.k = arg_pointer(args[SLT_K]) + page * args[SLT_K_PAGE_STRIDE];
        to.v = arg_pointer(args[SLT_V]) + page * args[SLT_V_PAGE_STRIDE];
        to.first = 0;
        for (size_t i = 0; i < n; i++) {
            const float *rope =
                (const float *)(arg_pointer(args[SLT_ROPE]) + (r + i) * args[SLT_ROPE_STRIDE]);
            latent_q(args, r + i, rope);
            latent_key(args, r + i, rope, key);
            keep_row(&to, 0, i, slot[r + i] % page_size,
                     i + 1 < n && slot[r + i + 1] == slot[r + i] + 1, key, key, rank + rotary,
                     rank);
        }
    }
}
