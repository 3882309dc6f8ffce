/* SPDX-License-Identifier: Apache-2.0 */
/*
 * norm: x += delta_scale * delta, then each group of a row normalised; norm_int: and that as
 * integers, handed over; add: x += scale * delta. Blocks split rows, or those that are handed over
 * together. Sums of a group: two accumulators a lane, even and odd vectors.
 */
#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/ops/x_int.h"
#include "kernels/cpu/simd.h"
#if EMBER_ISA == 4
#include "kernels/cpu/ops/x_tiles.h"
#endif

#ifdef SPEC_D
#define NORM_D SPEC_D
#else
#define NORM_D args[NRM_D]
#endif

INLINE void add_row(float *x, const float *delta, size_t n, float scale)
{
    for (size_t i = 0; i < n; i += VL) {
        size_t left = V_LEFT(i, n);
        v_put(x + i, v_fma(v_set(scale), v_get(delta + i, left), v_get(x + i, left)), left);
    }
}

/* The sum of (x - mean)^2; lanes of the tail are kept out. */
INLINE float sum_squares(const float *x, size_t n, float mean)
{
    vf s0 = v_zero(), s1 = v_zero(), mv = v_set(mean);
    size_t i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL) {
        vf a = v_sub(v_load(x + i), mv), b = v_sub(v_load(x + i + VL), mv);
        s0 = v_fma(a, a, s0);
        s1 = v_fma(b, b, s1);
    }
    if (i + VL <= n) {
        vf a = v_sub(v_load(x + i), mv);
        s0 = v_fma(a, a, s0);
        i += VL;
    }
    float tail = 0;
    for (; i < n; i++)
        tail = tail + (x[i] - mean) * (x[i] - mean);
    return v_sum(v_add(s0, s1)) + tail;
}

INLINE float sum_plain(const float *x, size_t n)
{
    vf s = v_zero();
    for (size_t i = 0; i < n; i += VL)
        s = v_add(s, v_get(x + i, V_LEFT(i, n)));
    return v_sum(s);
}

/* Where elements k .. of a row go: floats, or (AMX) x of a product. */
struct norm_out {
    float *row;
    char *x; /* NULL: floats */
    size_t k, K, rows, r;
};

INLINE void norm_put(const struct norm_out *out, size_t i, vf y, size_t left)
{
#if EMBER_ISA == 4
    if (out->x) {
        size_t low;
        char *at = x_tiles_at(out->x, out->K, out->rows, out->r, out->k + i, &low);
        x_tiles_put(at, low, _mm512_maskz_mov_ps(v_mask(left), y), out->k + i, out->K);
        return;
    }
#endif
    v_put(out->row + out->k + i, y, left);
}

INLINE void norm_write(const uint64_t *args, const float *x, const struct norm_out *out, size_t n,
                       float mean, float scale, const enum ember_dtype w_dtype)
{
    const void *w = arg_pointer(args[NRM_W]), *b = arg_pointer(args[NRM_B]);
    const enum ember_dtype b_dtype = (enum ember_dtype)args[NRM_B_DTYPE];
    vf mv = v_set(mean), sv = v_set(scale), w_bias = v_set(arg_float(args[NRM_W_BIAS]));
    for (size_t i = 0; i < n; i += VL) {
        size_t left = V_LEFT(i, n);
        vf y = v_mul(v_sub(v_get(x + i, left), mv), sv);
        if (w)
            y = v_mul(y, v_add(v_get_w(w, i, w_dtype, left), w_bias));
        if (b)
            y = v_add(y, v_get_w(b, i, b_dtype, left));
        norm_put(out, i, y, left);
    }
}

INLINE void norm_group(const uint64_t *args, const float *x, const struct norm_out *out, size_t n)
{
    float mean = 0;
    if (args[NRM_KIND] == EMBER_NORM_LAYER)
        mean = sum_plain(x, n) / (float)n;
    float var = sum_squares(x, n, mean) / (float)n;
    float scale = 1.0f / __builtin_sqrtf(var + arg_float(args[NRM_EPS]));
    switch (args[NRM_W_DTYPE]) {
    case EMBER_BF16:
        norm_write(args, x, out, n, mean, scale, EMBER_BF16);
        break;
    case EMBER_F16:
        norm_write(args, x, out, n, mean, scale, EMBER_F16);
        break;
    default:
        norm_write(args, x, out, n, mean, scale, EMBER_F32);
    }
}

/* Row r, to where `to` says. */
INLINE void norm_row(const uint64_t *args, size_t D, size_t r, struct norm_out to)
{
    const size_t group = args[NRM_GROUP] ? args[NRM_GROUP] : D;
    const char *delta = arg_pointer(args[NRM_DELTA]);
    float *row = (float *)(arg_pointer(args[NRM_X]) + r * args[NRM_X_STRIDE]);
    if (delta)
        add_row(row, (const float *)(delta + r * args[NRM_DELTA_STRIDE]), D,
                arg_float(args[NRM_DELTA_SCALE]));
    for (; to.k < D; to.k += group)
        norm_group(args, row + to.k, &to, group);
}

KERNEL(norm)
{
    const size_t D = NORM_D, rows = arg_rows(args);
    char *out = arg_pointer(args[NRM_OUT]);
    struct range range = block_range(rows, block, n_blocks);
    for (size_t r = range.first; r < range.end; r++) {
        const struct norm_out to = {.row = (float *)(out + r * args[NRM_OUT_STRIDE]),
                                    .x = rows > 1 ? arg_pointer(args[NRM_OUT_X]) : NULL,
                                    .K = D,
                                    .rows = rows,
                                    .r = r};
        norm_row(args, D, r, to);
    }
}

/* Rows of OUT are room for floats: a block takes its first ones over and over. */
KERNEL(norm_int)
{
    const size_t D = NORM_D, rows = arg_rows(args);
    const struct x_int to = {.x = arg_pointer(args[NRM_OUT_X]),
                             .scale = arg_pointer(args[NRM_OUT_X_SCALE]),
                             .x_stride = args[NRM_OUT_X_STRIDE],
                             .scale_stride = args[NRM_OUT_X_SCALE_STRIDE],
                             .n = rows,
                             .K = D,
                             .segment = args[NRM_SEGMENT],
                             .terms = (int)args[NRM_TERMS],
                             .form = x_int_form(rows, D, args[NRM_SEGMENT], (int)args[NRM_TERMS])};
    const size_t height = x_int_height(&to);
    struct range range = block_range((rows + height - 1) / height, block, n_blocks);
    char *room = arg_pointer(args[NRM_OUT]) + range.first * height * args[NRM_OUT_STRIDE];
    for (size_t t = range.first; t < range.end; t++) {
        const float *from[X_ROWS_MAX] = {NULL};
        for (size_t i = 0; i < height && t * height + i < rows; i++) {
            float *row = (float *)(room + i * args[NRM_OUT_STRIDE]);
            norm_row(args, D, t * height + i, (struct norm_out){.row = row});
            from[i] = row;
        }
        x_int_put(&to, t * height, from);
    }
}

KERNEL(add)
{
    char *x = arg_pointer(args[ADDA_X]);
    const char *delta = arg_pointer(args[ADDA_DELTA]);
    struct range range = block_range(arg_rows(args), block, n_blocks);
    for (size_t r = range.first; r < range.end; r++)
        add_row((float *)(x + r * args[ADDA_X_STRIDE]),
                (const float *)(delta + r * args[ADDA_DELTA_STRIDE]), args[ADDA_D],
                arg_float(args[ADDA_SCALE]));
}
