/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/ref/ref.h"

#include <errno.h>
#include <math.h>
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

double ref_act(double x, enum ember_act act)
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

/* ---- quantised weights ---- */

/* Code k of row n: two a byte, 32 of them in 16 bytes. */
static int half_byte(const uint8_t *row, uint64_t k)
{
    return row[k / 32 * 16 + k % 16] >> (k % 32 >= 16 ? 4 : 0) & 15;
}

double ref_e2m1(int code)
{
    static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -values[code & 7] : values[code & 7];
}

/* Row n of an operand [N, C] or, over all matrices, [E, N, C]. */
static const void *flat_row(const struct ref *r, uint32_t operand, uint64_t n)
{
    const struct ember_tensor *t = &r->op->t[operand];
    uint64_t rows = t->rank == 3 ? t->dim[1] : 1;
    return (char *)ref_base(r, operand) + n * (t->row_stride / rows);
}

static double code_at(const struct ref *r, const struct ref_quant *q, uint64_t n, uint64_t k)
{
    const void *row = flat_row(r, q->w, n);
    if (q->quant == EMBER_QUANT_INT4)
        return half_byte(row, k);
    if (q->quant == EMBER_QUANT_FP4)
        return ref_e2m1(half_byte(row, k));
    return ref_load(row, k, r->op->t[q->w].dtype);
}

static double scale_at(const struct ref *r, const struct ref_quant *q, uint64_t n, uint64_t g)
{
    const void *row = flat_row(r, q->w_scale, n);
    if (r->op->t[q->w_scale].dtype == EMBER_U8)
        return ldexp(1, ((const uint8_t *)row)[g] - 127);
    return ref_load(row, g, r->op->t[q->w_scale].dtype);
}

static double weight_at(const struct ref *r, const struct ref_quant *q, uint64_t n, uint64_t k)
{
    double zero = q->quant == EMBER_QUANT_INT4 ? 8 : 0;
    uint64_t g = q->quant ? k / (uint64_t)q->group : 0;
    if (!q->quant)
        return code_at(r, q, n, k);
    if (r->op->t[q->w_zero].rank)
        zero = ((const uint8_t *)flat_row(r, q->w_zero, n))[g];
    return scale_at(r, q, n, g) * (code_at(r, q, n, k) - zero);
}

double ref_dot(const struct ref *r, const struct ref_quant *q, uint64_t x_row, uint64_t n)
{
    const float *x = ref_row(r, q->x, x_row);
    const int8_t *xi = ref_row(r, q->x, x_row);
    double sum = 0;
    if (r->op->t[q->x_scale].rank) {
        for (uint64_t k = 0; k < q->K; k++)
            sum += xi[k] * code_at(r, q, n, k);
        return sum * *(const float *)ref_row(r, q->x_scale, x_row) * scale_at(r, q, n, 0);
    }
    for (uint64_t k = 0; k < q->K; k++)
        sum += x[k] * weight_at(r, q, n, k);
    return sum;
}

/* ---- rows ---- */

/* tokens i32 [T], table [V, D] -> out [T, D] */
static void embed(const struct ref *r)
{
    const int32_t *tokens = ref_base(r, EMBED_TOKENS);
    const struct ref_quant q = {.w = EMBED_TABLE,
                                .w_scale = EMBED_SCALE,
                                .w_zero = EMBED_ZERO,
                                .quant = r->op->i[EMBED_I_QUANT],
                                .group = r->op->i[EMBED_I_GROUP]};
    for (uint32_t row = 0; row < r->rows; row++) {
        float *out = ref_row(r, EMBED_OUT, row);
        for (uint32_t d = 0; d < r->op->t[EMBED_OUT].dim[1]; d++)
            out[d] = (float)(r->op->f[EMBED_F_SCALE] * weight_at(r, &q, (uint32_t)tokens[row], d));
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

/* x [rows, K], w [N, K], b [N] -> out [rows, N] */
static void linear(const struct ref *r)
{
    const struct ref_quant q = {LINEAR_X,
                                LINEAR_X_SCALE,
                                LINEAR_W,
                                LINEAR_W_SCALE,
                                LINEAR_W_ZERO,
                                r->op->i[LINEAR_I_QUANT],
                                r->op->i[LINEAR_I_GROUP],
                                r->op->t[LINEAR_X].dim[1]};
    for (uint32_t row = 0; row < r->rows; row++) {
        float *out = ref_row(r, LINEAR_OUT, row);
        for (uint32_t n = 0; n < r->op->t[LINEAR_W].dim[0]; n++) {
            double sum = ref_dot(r, &q, row, n);
            sum += ref_weight(r, LINEAR_B, 0, n, 0);
            out[n] = (float)ref_cap(r->op->f[LINEAR_F_SCALE] * sum, r->op->f[LINEAR_F_SOFTCAP]);
        }
    }
}

static double glu_value(const struct ref *r, double gate, double up)
{
    double limit = r->op->f[GLU_F_LIMIT];
    if (!(limit > 0))
        return ref_act(gate, (enum ember_act)r->op->i[GLU_I_ACT]) * up;
    gate = fmin(gate, limit);
    up = fmax(fmin(up, limit), -limit);
    return gate * ref_sigmoid(r->op->f[GLU_F_ALPHA] * gate) * (up + 1);
}

/* x [rows, 2 I] -> out [rows, I] */
static void glu(const struct ref *r)
{
    uint32_t I = r->op->t[GLU_OUT].dim[1];
    uint32_t rows = r->rows * (r->op->i[GLU_I_REPEAT] ? (uint32_t)r->op->i[GLU_I_REPEAT] : 1);
    for (uint32_t row = 0; row < rows; row++) {
        const float *x = ref_row(r, GLU_X, row);
        float *out = ref_row(r, GLU_OUT, row);
        for (uint32_t j = 0; j < I; j++) {
            bool pairs = r->op->i[GLU_I_LAYOUT];
            out[j] = (float)glu_value(r, pairs ? x[2 * j] : x[j], pairs ? x[2 * j + 1] : x[I + j]);
        }
    }
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

/* x [rows, K] -> out i8 [rows, K], scale [rows, 1] */
static void quantize(const struct ref *r)
{
    uint32_t rows =
        r->rows * (r->op->i[QUANTIZE_I_REPEAT] ? (uint32_t)r->op->i[QUANTIZE_I_REPEAT] : 1);
    for (uint32_t row = 0; row < rows; row++) {
        const float *x = ref_row(r, QUANTIZE_X, row);
        int8_t *out = ref_row(r, QUANTIZE_OUT, row);
        float *scale = ref_row(r, QUANTIZE_SCALE, row), most = 0;
        bool finite = true;
        for (uint32_t k = 0; k < r->op->t[QUANTIZE_X].dim[1]; k++) {
            most = fmaxf(most, fabsf(x[k]));
            finite = finite && isfinite(x[k]);
        }
        scale[0] = finite ? most / 127 : NAN;
        for (uint32_t k = 0; k < r->op->t[QUANTIZE_X].dim[1]; k++)
            out[k] =
                scale[0] > 0 ? (int8_t)fmaxf(fminf(nearbyintf(x[k] / scale[0]), 127), -127) : 0;
    }
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
