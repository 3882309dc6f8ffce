/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/ref/ref.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/ref/private.h"

/* ---- numbers ---- */

static float bits_float(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static uint32_t float_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    return bits;
}

static double f16_value(uint16_t h)
{
    int exponent = h >> 10 & 31, fraction = h & 1023;
    double sign = h & 0x8000 ? -1 : 1;
    if (exponent == 31)
        return fraction ? NAN : sign * INFINITY;
    if (!exponent)
        return sign * ldexp(fraction, -24);
    return sign * ldexp(1024 + fraction, exponent - 25);
}

static double f8_value(uint8_t b)
{
    int exponent = b >> 3 & 15, fraction = b & 7;
    double sign = b & 0x80 ? -1 : 1;
    return sign * (exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9));
}

double ref_load(const void *p, uint64_t i, enum ember_dtype dtype)
{
    switch (dtype) {
    case EMBER_F16:
        return f16_value(((const uint16_t *)p)[i]);
    case EMBER_BF16:
        return bits_float((uint32_t)((const uint16_t *)p)[i] << 16);
    case EMBER_I8:
        return ((const int8_t *)p)[i];
    case EMBER_U8:
        return ((const uint8_t *)p)[i];
    case EMBER_F8:
        return f8_value(((const uint8_t *)p)[i]);
    default:
        return ((const float *)p)[i];
    }
}

uint16_t ref_to_bf16(float x)
{
    uint32_t bits = float_bits(x);
    if (isnan(x))
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint16_t ref_to_f16(float x)
{
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    double a = fabs((double)x);
    if (isnan(x))
        return 0x7e00;
    if (a >= 65520)
        return sign | 0x7c00;
    if (a <
        0x1p-14) /* denormal: a multiple of 2^-24; may round up into the smallest normal number */
        return sign | (uint16_t)nearbyint(a * 0x1p24);
    int exponent;
    double fraction = nearbyint(frexp(a, &exponent) * 2048); /* 1024..2048 */
    return sign | (uint16_t)((exponent + 13) * 1024 + (int)fraction);
}

double ref_sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

double ref_cap(double x, double cap)
{
    return cap > 0 ? cap * tanh(x / cap) : x;
}

static double ref_act(double x, enum ember_act act)
{
    switch (act) {
    case EMBER_ACT_SILU:
        return x * ref_sigmoid(x);
    case EMBER_ACT_GELU_TANH:
        return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case EMBER_ACT_GELU_ERF:
        return 0.5 * x * (1 + erf(x / sqrt(2)));
    default:
        return x > 0 ? x * x : 0;
    }
}

/* ---- weights ---- */

/* The value of an E2M1 code, 0..15. */
static double ref_e2m1(int code)
{
    static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -values[code & 7] : values[code & 7];
}

/*
 * Byte `at` of row n of matrix e of an operand [N, C] or [E, N, C]. unit: bytes that stay together
 * in a panel (ember/op.h, layout TILES).
 */
static const uint8_t *byte_at(const struct ref *r, uint32_t operand, int64_t layout, uint64_t e,
                              uint64_t n, uint64_t at, uint32_t unit)
{
    const struct ember_tensor *t = &r->op->t[operand];
    const uint8_t *base = ref_base(r, operand);
    uint64_t rows = layout == EMBER_LAYOUT_TILES ? EMBER_PANEL_ROWS(t->dim[1]) : t->dim[1];
    uint64_t row = t->rank == 3 ? t->row_stride / rows : t->row_stride;
    base += t->rank == 3 ? e * t->row_stride : 0;
    if (layout == EMBER_LAYOUT_ROWS)
        return base + n * row + at;
    return base + n / EMBER_PANEL * EMBER_PANEL * row + at / unit * unit * EMBER_PANEL +
           n % EMBER_PANEL * unit + at % unit;
}

/* The code as a number. */
static double code_at(const struct ref *r, const struct ref_quant *q, uint64_t e, uint64_t n,
                      uint64_t k)
{
    enum ember_dtype dtype = r->op->t[q->w].dtype;
    bool four = q->quant == EMBER_QUANT_INT4 || q->quant == EMBER_QUANT_FP4;
    uint64_t size = dtype == EMBER_F32 ? 4 : dtype == EMBER_F16 || dtype == EMBER_BF16 ? 2 : 1;
    const uint8_t *p = byte_at(r, q->w, q->layout, e, n, four ? k / 32 * 16 + k % 16 : k * size, 4);
    int half = *p >> (k % 32 >= 16 ? 4 : 0) & 15;
    if (q->quant == EMBER_QUANT_INT4)
        return half;
    return four ? ref_e2m1(half) : ref_load(p, 0, dtype);
}

static double scale_at(const struct ref *r, const struct ref_quant *q, uint64_t e, uint64_t n,
                       uint64_t g)
{
    enum ember_dtype dtype = r->op->t[q->w_scale].dtype;
    uint32_t size = dtype == EMBER_F32 ? 4 : dtype == EMBER_U8 ? 1 : 2;
    const uint8_t *p = byte_at(r, q->w_scale, q->layout, e, n, g * size, size);
    return dtype == EMBER_U8 ? ldexp(1, *p - 127) : ref_load(p, 0, dtype);
}

static double zero_at(const struct ref *r, const struct ref_quant *q, uint64_t e, uint64_t n,
                      uint64_t g)
{
    if (r->op->t[q->w_zero].rank)
        return *byte_at(r, q->w_zero, q->layout, e, n, g, 1);
    return q->quant == EMBER_QUANT_INT4 ? 8 : 0;
}

/* One value of w. */
static double ref_weight_at(const struct ref *r, const struct ref_quant *q, uint64_t e, uint64_t n,
                            uint64_t k)
{
    uint64_t g = q->quant ? k / (uint64_t)q->group : 0;
    if (!q->quant)
        return code_at(r, q, e, n, k);
    return scale_at(r, q, e, n, g) * (code_at(r, q, e, n, k) - zero_at(r, q, e, n, g));
}

/* Integer k of row x of K of them. */
static double integer_at(const int8_t *x, const struct ref_quant *q, uint64_t k)
{
    if (q->x_terms == 1)
        return x[k];
    return 256 * x[k] + (uint8_t)x[EMBER_X8_COLUMNS(q->K) + k];
}

void ref_weights(const struct ref *r, const struct ref_quant *q, uint64_t e, uint64_t n,
                 double *ret)
{
    bool integers = r->op->t[q->x_scale].rank;
    for (uint64_t k = 0; k < q->K; k++)
        ret[k] = integers ? code_at(r, q, e, n, k) - zero_at(r, q, e, n, k / (uint64_t)q->group)
                          : ref_weight_at(r, q, e, n, k);
}

static float integer_dot(const struct ref *r, const struct ref_quant *q, uint64_t x_row, uint64_t e,
                         uint64_t n, const double *w)
{
    const int8_t *x = ref_row(r, q->x, x_row);
    const float *xs = ref_row(r, q->x_scale, x_row);
    uint64_t segment = q->x_group ? (uint64_t)q->x_group : q->K;
    float acc = 0;
    for (uint64_t s = 0; s * segment < q->K; s++) {
        uint64_t g = s * segment / (uint64_t)q->group;
        double sum = 0;
        for (uint64_t k = s * segment; k < q->K && k < (s + 1) * segment; k++)
            sum += integer_at(x, q, k) * w[k];
        acc += (float)sum * (xs[s] * (float)scale_at(r, q, e, n, g));
    }
    return acc;
}

double ref_dot(const struct ref *r, const struct ref_quant *q, uint64_t x_row, uint64_t e,
               uint64_t n, const double *w)
{
    const float *x = ref_row(r, q->x, x_row);
    double sum = 0;
    if (r->op->t[q->x_scale].rank)
        return integer_dot(r, q, x_row, e, n, w);
    for (uint64_t k = 0; k < q->K; k++)
        sum += x[k] * w[k];
    return sum;
}

/* ---- rows ---- */

/* tokens i32 [T], table [V, D] -> out [T, D] */
static void embed(const struct ref *r)
{
    const struct ref_quant q = {.w = EMBED_TABLE,
                                .w_scale = EMBED_SCALE,
                                .w_zero = EMBED_ZERO,
                                .quant = r->op->i[EMBED_I_QUANT],
                                .group = r->op->i[EMBED_I_GROUP],
                                .layout = r->op->i[EMBED_I_LAYOUT]};
    const int32_t *tokens = ref_base(r, EMBED_TOKENS);
    for (uint32_t row = 0; row < r->rows; row++) {
        float *out = ref_row(r, EMBED_OUT, row);
        for (uint32_t d = 0; d < r->op->t[EMBED_OUT].dim[1]; d++)
            out[d] = (float)(r->op->f[EMBED_F_SCALE] *
                             ref_weight_at(r, &q, 0, (uint32_t)tokens[row], d));
    }
}

/* n elements of one group: x [n] -> out [n] */
static void norm_group(const struct ref *r, const float *x, float *out, uint32_t n)
{
    bool layer = r->op->i[NORM_I_KIND] == EMBER_NORM_LAYER;
    double mean = 0, var = 0;
    for (uint32_t i = 0; layer && i < n; i++)
        mean += (double)x[i] / n;
    for (uint32_t i = 0; i < n; i++)
        var += (x[i] - mean) * (x[i] - mean) / n;
    double scale = 1 / sqrt(var + r->op->f[NORM_F_EPS]);
    for (uint32_t i = 0; i < n; i++) {
        double w = ref_weight(r, NORM_W, 0, i, 1 - r->op->f[NORM_F_W_BIAS]);
        out[i] = (float)((x[i] - mean) * scale * (w + r->op->f[NORM_F_W_BIAS]) +
                         ref_weight(r, NORM_B, 0, i, 0));
    }
}

/* What integers are made of, in which operands. */
struct ref_integers {
    uint32_t x, out, scale;
    int64_t group, terms; /* group 0: the row */
};
static void quantize_row(const struct ref *r, const struct ref_integers *of, uint32_t row);

/* x, delta, out [rows, D]; w, b [D] or [GROUP] */
static void norm(const struct ref *r)
{
    uint32_t D = r->op->t[NORM_X].dim[1];
    uint32_t group = r->op->i[NORM_I_GROUP] ? (uint32_t)r->op->i[NORM_I_GROUP] : D;
    for (uint32_t row = 0; row < r->rows; row++) {
        float *x = ref_row(r, NORM_X, row);
        const float *delta = ref_row(r, NORM_DELTA, row);
        for (uint32_t d = 0; delta && d < D; d++)
            x[d] = (float)(x[d] + r->op->f[NORM_F_DELTA_SCALE] * delta[d]);
        for (uint32_t d = 0; d < D; d += group)
            norm_group(r, x + d, (float *)ref_row(r, NORM_OUT, row) + d, group);
        if (r->op->t[NORM_OUT_X_SCALE].rank)
            quantize_row(r,
                         &(struct ref_integers){NORM_OUT, NORM_OUT_X, NORM_OUT_X_SCALE,
                                                r->op->i[NORM_I_X_GROUP], r->op->i[NORM_I_X_TERMS]},
                         row);
    }
}

/* x, delta [rows, D] */
static void add(const struct ref *r)
{
    for (uint32_t row = 0; row < r->rows; row++) {
        float *x = ref_row(r, ADD_X, row);
        const float *delta = ref_row(r, ADD_DELTA, row);
        for (uint32_t d = 0; d < r->op->t[ADD_X].dim[1]; d++)
            x[d] = (float)(x[d] + r->op->f[ADD_F_SCALE] * delta[d]);
    }
}

static double glu_value(double gate, double up, enum ember_act act, double limit, double alpha)
{
    if (!(limit > 0))
        return ref_act(gate, act) * up;
    gate = fmin(gate, limit);
    up = fmax(fmin(up, limit), -limit);
    return gate * ref_sigmoid(alpha * gate) * (up + 1);
}

/* x [2 I] -> out [I]; pairs: gate and up are interleaved */
static void glu_row(const float *x, uint32_t I, bool pairs, enum ember_act act, double limit,
                    double alpha, float *out)
{
    for (uint32_t j = 0; j < I; j++)
        out[j] = (float)glu_value(pairs ? x[2 * j] : x[j], pairs ? x[2 * j + 1] : x[I + j], act,
                                  limit, alpha);
}

/* x [rows, K], w [N, K], b [N] -> out [rows, N] */
static void linear(const struct ref *r)
{
    const int64_t *i = r->op->i;
    const struct ref_quant q = {
        LINEAR_X,
        LINEAR_X_SCALE,
        LINEAR_W,
        LINEAR_W_SCALE,
        LINEAR_W_ZERO,
        i[LINEAR_I_QUANT],
        i[LINEAR_I_GROUP],
        i[LINEAR_I_LAYOUT],
        r->op->t[LINEAR_X_SCALE].rank ? (uint64_t)i[LINEAR_I_K] : r->op->t[LINEAR_X].dim[1],
        i[LINEAR_I_X_GROUP],
        i[LINEAR_I_X_TERMS],
    };
    const uint32_t N = r->op->t[LINEAR_W].dim[0];
    const bool gated = i[LINEAR_I_GLU] != EMBER_GLU_NONE;
    double *w = calloc(q.K, sizeof(*w));
    if (!w)
        abort();
    for (uint32_t n = 0; n < N; n++) {
        ref_weights(r, &q, 0, n, w);
        for (uint32_t row = 0; row < r->rows; row++) {
            float *out = ref_row(r, gated ? LINEAR_GATE_UP : LINEAR_OUT, row);
            double sum = ref_dot(r, &q, row, 0, n, w);
            sum += ref_weight(r, LINEAR_B, 0, n, 0);
            out[n] = (float)ref_cap(r->op->f[LINEAR_F_SCALE] * sum, r->op->f[LINEAR_F_SOFTCAP]);
        }
    }
    free(w);
    for (uint32_t row = 0; gated && row < r->rows; row++)
        glu_row(ref_row(r, LINEAR_GATE_UP, row), N / 2, i[LINEAR_I_GLU] == EMBER_GLU_PAIRS,
                (enum ember_act)i[LINEAR_I_ACT], r->op->f[LINEAR_F_LIMIT], r->op->f[LINEAR_F_ALPHA],
                ref_row(r, LINEAR_OUT, row));
}

/* x [rows, 2 I] -> out [rows, I] */
static void glu(const struct ref *r)
{
    uint32_t I = r->op->t[GLU_OUT].dim[1];
    uint32_t rows = r->rows * (r->op->i[GLU_I_REPEAT] ? (uint32_t)r->op->i[GLU_I_REPEAT] : 1);
    for (uint32_t row = 0; row < rows; row++)
        glu_row(ref_row(r, GLU_X, row), I, r->op->i[GLU_I_LAYOUT],
                (enum ember_act)r->op->i[GLU_I_ACT], r->op->f[GLU_F_LIMIT], r->op->f[GLU_F_ALPHA],
                ref_row(r, GLU_OUT, row));
}

/* x [rows, D] -> out [rows, D] */
static void act(const struct ref *r)
{
    for (uint32_t row = 0; row < r->rows; row++) {
        const float *x = ref_row(r, ACT_X, row);
        float *out = ref_row(r, ACT_OUT, row);
        for (uint32_t d = 0; d < r->op->t[ACT_OUT].dim[1]; d++)
            out[d] = (float)ref_act(x[d], (enum ember_act)r->op->i[ACT_I_ACT]);
    }
}

/* x [*, D], index i32 [rows] or none -> out [rows, D], any dtype */
static void move_rows(const struct ref *r, uint32_t x, uint32_t out, const int32_t *index)
{
    static const uint8_t size[] = {
#define X(id, name, bytes) bytes,
        EMBER_DTYPES(X)
#undef X
    };
    uint64_t bytes = (uint64_t)r->op->t[x].dim[1] * size[r->op->t[x].dtype];
    for (uint32_t row = 0; row < r->rows; row++)
        memmove(ref_row(r, out, row), ref_row(r, x, index ? (uint32_t)index[row] : row), bytes);
}

/* x [rows, K], order [K] -> out [rows, K] */
static void permute(const struct ref *r)
{
    const int32_t *order = ref_base(r, PERMUTE_ORDER);
    uint32_t K = r->op->t[PERMUTE_X].dim[1];
    for (uint32_t row = 0; row < r->rows; row++)
        for (uint32_t k = 0; k < K; k++)
            ((float *)ref_row(r, PERMUTE_OUT, row))[k] =
                ((const float *)ref_row(r, PERMUTE_X, row))[(uint32_t)order[k] < K ? order[k] : 0];
}

/* n elements of a group -> their integers, in one byte or two that are `half` apart; the scale. */
static float quantize_group(const float *x, uint64_t n, int64_t terms, uint64_t half, int8_t *out)
{
    float most = 0, top = terms == 2 ? 32767 : 127, scale;
    bool finite = true;
    for (uint64_t k = 0; k < n; k++) {
        most = fmaxf(most, fabsf(x[k]));
        finite = finite && isfinite(x[k]);
    }
    scale = finite ? most / top : NAN;
    for (uint64_t k = 0; k < n; k++) {
        int q = scale > 0 ? (int)fmaxf(fminf(nearbyintf(x[k] / scale), top), -top) : 0;
        out[k] = (int8_t)(terms == 2 ? q >> 8 : q);
        if (terms == 2)
            out[half + k] = (int8_t)(q & 255);
    }
    return scale;
}

static void quantize_row(const struct ref *r, const struct ref_integers *of, uint32_t row)
{
    uint64_t K = r->op->t[of->x].dim[1], group = of->group ? (uint64_t)of->group : K;
    const float *x = ref_row(r, of->x, row);
    int8_t *out = ref_row(r, of->out, row);
    float *scale = ref_row(r, of->scale, row);
    memset(out, 0, r->op->t[of->out].dim[1]);
    for (uint64_t k = 0; k < K; k += group)
        scale[k / group] = quantize_group(x + k, K - k < group ? K - k : group, of->terms,
                                          EMBER_X8_COLUMNS(K), out + k);
}

/* x [rows, K] -> out i8 [rows, terms * columns], scale [rows, groups] */
static void quantize(const struct ref *r)
{
    const int64_t *i = r->op->i;
    const struct ref_integers of = {QUANTIZE_X, QUANTIZE_OUT, QUANTIZE_SCALE, i[QUANTIZE_I_GROUP],
                                    i[QUANTIZE_I_TERMS]};
    uint32_t repeat = i[QUANTIZE_I_REPEAT] ? (uint32_t)i[QUANTIZE_I_REPEAT] : 1;
    for (uint32_t row = 0; row < r->rows * repeat; row++)
        quantize_row(r, &of, row);
}

/* x [rows, V] -> out i32 [rows] */
static void argmax(const struct ref *r)
{
    int32_t *out = ref_base(r, ARGMAX_OUT);
    for (uint32_t row = 0; row < r->rows; row++) {
        const float *x = ref_row(r, ARGMAX_X, row);
        int64_t best = -1;
        for (uint32_t v = 0; v < r->op->t[ARGMAX_X].dim[1]; v++)
            if (!isnan(x[v]) && (best < 0 || x[v] > x[best]))
                best = v;
        out[row] = best < 0 ? 0 : (int32_t)best;
    }
}

int ref_op(const struct ember_op *op, void *const arena[EMBER_ARENA_COUNT])
{
    const struct ember_step_header *header = arena[EMBER_ARENA_IO];
    struct ref r = {op, arena, op->rows == EMBER_ROWS_LOGITS ? header->n_rows : header->n_tokens};
    switch (op->kind) {
    case EMBER_OP_EMBED:
        embed(&r);
        return 0;
    case EMBER_OP_NORM:
        norm(&r);
        return 0;
    case EMBER_OP_ADD:
        add(&r);
        return 0;
    case EMBER_OP_LINEAR:
        linear(&r);
        return 0;
    case EMBER_OP_ROPE_TABLE:
        ref_rope_table(&r);
        return 0;
    case EMBER_OP_SPLIT_NORM_ROPE:
        ref_split_norm_rope(&r);
        return 0;
    case EMBER_OP_SPLIT_LATENT:
        ref_split_latent(&r);
        return 0;
    case EMBER_OP_ATTENTION:
        ref_attention(&r);
        return 0;
    case EMBER_OP_GLU:
        glu(&r);
        return 0;
    case EMBER_OP_ACT:
        act(&r);
        return 0;
    case EMBER_OP_MOE_ROUTE:
        ref_moe_route(&r);
        return 0;
    case EMBER_OP_MOE_LINEAR:
        ref_moe_linear(&r);
        return 0;
    case EMBER_OP_MOE_COMBINE:
        ref_moe_combine(&r);
        return 0;
    case EMBER_OP_GATHER:
        move_rows(&r, GATHER_X, GATHER_OUT, ref_base(&r, GATHER_INDEX));
        return 0;
    case EMBER_OP_COPY:
        move_rows(&r, COPY_X, COPY_OUT, NULL);
        return 0;
    case EMBER_OP_ARGMAX:
        argmax(&r);
        return 0;
    case EMBER_OP_PERMUTE:
        permute(&r);
        return 0;
    case EMBER_OP_QUANTIZE:
        quantize(&r);
        return 0;
    }
    return -EINVAL;
}
