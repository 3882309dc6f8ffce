/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that move or map rows: embed, gather, copy, glu, act, argmax. */
#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/ops/glu.h"

INLINE void embed(const uint64_t *args, uint32_t block, uint32_t n_blocks,
                  const enum ember_dtype dtype)
{
    const int32_t *tokens = (const int32_t *)arg_pointer(args[EMB_TOKENS]);
    const char *table = arg_pointer(args[EMB_TABLE]);
    char *out = arg_pointer(args[EMB_OUT]);
    const size_t D = args[EMB_D];
    vf scale = v_set(arg_float(args[EMB_SCALE]));
    struct range range = block_range(arg_rows(args), block, n_blocks);
    for (size_t r = range.first; r < range.end; r++) {
        uint32_t token = (uint32_t)tokens[r];
        const char *w = table + (token < args[EMB_V] ? token : 0) * args[EMB_TABLE_STRIDE];
        float *row = (float *)(out + r * args[EMB_OUT_STRIDE]);
        for (size_t i = 0; i < D; i += VL) {
            size_t left = V_LEFT(i, D);
            v_put(row + i, v_mul(scale, v_get_w(w, i, dtype, left)), left);
        }
    }
}

KERNEL(embed_f32)
{
    embed(args, block, n_blocks, EMBER_F32);
}
KERNEL(embed_f16)
{
    embed(args, block, n_blocks, EMBER_F16);
}
KERNEL(embed_bf16)
{
    embed(args, block, n_blocks, EMBER_BF16);
}

/* Element d of a row of codes in a panel, `at` its first word: what code - zero is. */
INLINE float table_code(const uint8_t *at, size_t d, enum ember_quant quant, float zero)
{
    if (quant == EMBER_QUANT_INT8)
        return (float)(int8_t)at[d / 4 * EMBER_TILE_LINE + d % 4];
    size_t byte = d / 32 * 16 + d % 16;
    int code = at[byte / 4 * EMBER_TILE_LINE + byte % 4] >> (d % 32 >= 16 ? 4 : 0) & 15;
    return (float)code - zero;
}

/* A row out of a table in tiles: its words stand 64 bytes apart. */
INLINE void table_row(const uint64_t *args, size_t n, float *out)
{
    const enum ember_quant quant = (enum ember_quant)args[EMB_QUANT];
    const size_t D = args[EMB_D], G = args[EMB_GROUPS], lane = n % EMBER_PANEL;
    const float scale = arg_float(args[EMB_SCALE]);
    const char *panel = arg_pointer(args[EMB_TABLE]) + (n - lane) * args[EMB_TABLE_STRIDE];
    const uint8_t *at = (const uint8_t *)panel + lane * 4;
    const uint8_t *zeros = (const uint8_t *)arg_pointer(args[EMB_ZEROS]);
    if (quant == EMBER_QUANT_NONE) {
        for (size_t d = 0; d < D; d++) {
            union {
                uint32_t bits;
                float value;
            } u = {(uint32_t)((const uint16_t *)(at + d / 2 * EMBER_TILE_LINE))[d % 2] << 16};
            out[d] = scale * u.value;
        }
        return;
    }
    for (size_t d = 0, g = 0; d < D; g++) {
        size_t end = D - d < args[EMB_GROUP] ? D : d + args[EMB_GROUP];
        size_t s = (n - lane) * G + g * EMBER_PANEL + lane;
        float zero = zeros ? zeros[s] : 8;
        float factor =
            scale_at(arg_pointer(args[EMB_SCALES]), s, (enum ember_dtype)args[EMB_SCALES_DTYPE]);
        for (; d < end; d++)
            out[d] = scale * (factor * table_code(at, d, quant, zero));
    }
}

KERNEL(embed_tiles)
{
    const int32_t *tokens = (const int32_t *)arg_pointer(args[EMB_TOKENS]);
    char *out = arg_pointer(args[EMB_OUT]);
    struct range range = block_range(arg_rows(args), block, n_blocks);
    for (size_t r = range.first; r < range.end; r++) {
        uint32_t token = (uint32_t)tokens[r];
        table_row(args, token < args[EMB_V] ? token : 0, (float *)(out + r * args[EMB_OUT_STRIDE]));
    }
}

KERNEL(copy)
{
    const char *x = arg_pointer(args[CPY_X]);
    const uint32_t *index = (const uint32_t *)arg_pointer(args[CPY_INDEX]);
    char *out = arg_pointer(args[CPY_OUT]);
    struct range range = block_range(arg_rows(args), block, n_blocks);
    for (size_t r = range.first; r < range.end; r++) {
        size_t from = r;
        if (index)
            from = index[r] < args[CPY_X_ROWS] ? index[r] : 0;
        __builtin_memcpy(out + r * args[CPY_OUT_STRIDE], x + from * args[CPY_X_STRIDE],
                         args[CPY_BYTES]);
    }
}

/* Elementwise kernels cut each row into pieces of this many outputs; blocks split the pieces. */
#define PIECE 512

struct piece {
    size_t row, first, end;
};
INLINE struct piece piece_at(size_t index, size_t n)
{
    size_t per_row = (n + PIECE - 1) / PIECE, first = index % per_row * PIECE;
    return (struct piece){index / per_row, first, n - first < PIECE ? n : first + PIECE};
}

/* Even elements of 2 * n floats to *ret_even, odd ones to *ret_odd. */
INLINE void split_pairs(const float *x, size_t n, vf *ret_even, vf *ret_odd)
{
    float even[VL] = {0}, odd[VL] = {0};
    for (size_t i = 0; i < n; i++) {
        even[i] = x[2 * i];
        odd[i] = x[2 * i + 1];
    }
    *ret_even = v_load(even);
    *ret_odd = v_load(odd);
}

INLINE void glu(const uint64_t *args, uint32_t block, uint32_t n_blocks, const enum ember_act act)
{
    const char *x = arg_pointer(args[GLUA_X]);
    char *out = arg_pointer(args[GLUA_OUT]);
    const size_t I = args[GLUA_I], repeat = args[GLUA_REPEAT] ? args[GLUA_REPEAT] : 1;
    const float limit = arg_float(args[GLUA_LIMIT]), alpha = arg_float(args[GLUA_ALPHA]);
    size_t rows = *(const uint32_t *)arg_pointer(args[ARG_ROWS]) * repeat;
    rows = rows < args[ARG_MAX_ROWS] ? rows : args[ARG_MAX_ROWS];
    struct range range = block_range(rows * ((I + PIECE - 1) / PIECE), block, n_blocks);
    for (size_t p = range.first; p < range.end; p++) {
        struct piece piece = piece_at(p, I);
        const float *in = (const float *)(x + piece.row * args[GLUA_X_STRIDE]);
        float *to = (float *)(out + piece.row * args[GLUA_OUT_STRIDE]);
        for (size_t i = piece.first; i < piece.end; i += VL) {
            size_t left = V_LEFT(i, piece.end);
            vf gate, up;
            if (args[GLUA_LAYOUT]) {
                split_pairs(in + 2 * i, left, &gate, &up);
            } else {
                gate = v_get(in + i, left);
                up = v_get(in + I + i, left);
            }
            v_put(to + i, glu_value(gate, up, act, limit, alpha), left);
        }
    }
}

KERNEL(glu)
{
    switch (args[GLUA_ACT]) {
    case EMBER_ACT_SILU:
        glu(args, block, n_blocks, EMBER_ACT_SILU);
        break;
    case EMBER_ACT_GELU_TANH:
        glu(args, block, n_blocks, EMBER_ACT_GELU_TANH);
        break;
    case EMBER_ACT_GELU_ERF:
        glu(args, block, n_blocks, EMBER_ACT_GELU_ERF);
        break;
    default:
        glu(args, block, n_blocks, EMBER_ACT_RELU2);
    }
}

KERNEL(act)
{
    const char *x = arg_pointer(args[ACTA_X]);
    char *out = arg_pointer(args[ACTA_OUT]);
    const size_t D = args[ACTA_D];
    struct range range = block_range(arg_rows(args) * ((D + PIECE - 1) / PIECE), block, n_blocks);
    for (size_t p = range.first; p < range.end; p++) {
        struct piece piece = piece_at(p, D);
        const float *in = (const float *)(x + piece.row * args[ACTA_X_STRIDE]);
        float *to = (float *)(out + piece.row * args[ACTA_OUT_STRIDE]);
        for (size_t i = piece.first; i < piece.end; i += VL) {
            size_t left = V_LEFT(i, piece.end);
            v_put(to + i, v_act(v_get(in + i, left), (enum ember_act)args[ACTA_ACT]), left);
        }
    }
}

KERNEL(permute)
{
    const char *x = arg_pointer(args[PRM_X]);
    const uint32_t *order = (const uint32_t *)arg_pointer(args[PRM_ORDER]);
    char *out = arg_pointer(args[PRM_OUT]);
    const size_t K = args[PRM_K];
    struct range range = block_range(arg_rows(args), block, n_blocks);
    for (size_t r = range.first; r < range.end; r++) {
        const float *from = (const float *)(x + r * args[PRM_X_STRIDE]);
        float *to = (float *)(out + r * args[PRM_OUT_STRIDE]);
        for (size_t k = 0; k < K; k++)
            to[k] = from[order[k] < K ? order[k] : 0];
    }
}

/*
 * The largest value first, four accumulators at a time, then the first place that holds it. In
 * v_max(x, best) a NaN in x leaves best alone.
 */
INLINE int32_t argmax_row(const float *x, size_t n)
{
    const float lowest = -__builtin_inff();
    vf best[4] = {v_set(lowest), v_set(lowest), v_set(lowest), v_set(lowest)};
    size_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL)
        UNROLL
    for (int j = 0; j < 4; j++)
        best[j] = v_max(v_load(x + i + (size_t)j * VL), best[j]);
    float top = v_reduce_max(v_max(v_max(best[0], best[1]), v_max(best[2], best[3])));
    for (; i < n; i++)
        top = x[i] > top ? x[i] : top;
    for (i = 0; i + 64 <= n; i += 64) {
        int found = 0;
        for (size_t j = 0; j < 64; j++)
            found |= x[i + j] == top;
        if (found)
            break;
    }
    for (; i < n; i++)
        if (x[i] == top)
            return (int32_t)i;
    return 0;
}

KERNEL(argmax)
{
    const char *x = arg_pointer(args[AMX_X]);
    int32_t *out = (int32_t *)arg_pointer(args[AMX_OUT]);
    struct range range = block_range(arg_rows(args), block, n_blocks);
    for (size_t r = range.first; r < range.end; r++)
        out[r] = argmax_row((const float *)(x + r * args[AMX_X_STRIDE]), args[AMX_V]);
}

/* The best of each part of a row. */
KERNEL(argmax_parts)
{
    const char *x = arg_pointer(args[AMX_X]);
    char *parts = arg_pointer(args[AMX_PARTS]);
    struct range range = block_range(arg_rows(args) * EMBER_ARGMAX_PARTS, block, n_blocks);
    for (size_t i = range.first; i < range.end; i++) {
        size_t r = i / EMBER_ARGMAX_PARTS, part = i % EMBER_ARGMAX_PARTS;
        struct range cut = block_range(args[AMX_V], (uint32_t)part, EMBER_ARGMAX_PARTS);
        const float *row = (const float *)(x + r * args[AMX_X_STRIDE]);
        ((int32_t *)(parts + r * args[AMX_PARTS_STRIDE]))[part] =
            (int32_t)cut.first + argmax_row(row + cut.first, cut.end - cut.first);
    }
}

KERNEL(argmax_join)
{
    const char *x = arg_pointer(args[AMX_X]);
    int32_t *out = (int32_t *)arg_pointer(args[AMX_OUT]);
    struct range range = block_range(arg_rows(args), block, n_blocks);
    for (size_t r = range.first; r < range.end; r++) {
        const float *row = (const float *)(x + r * args[AMX_X_STRIDE]);
        const int32_t *part =
            (const int32_t *)(arg_pointer(args[AMX_PARTS]) + r * args[AMX_PARTS_STRIDE]);
        size_t best = 0; /* a part may be empty; its place is then the next one's */
        for (size_t i = 0; i < EMBER_ARGMAX_PARTS; i++) {
            size_t at = (size_t)part[i];
            if (at < args[AMX_V] &&
                (row[at] > row[best] || (row[best] != row[best] && row[at] == row[at])))
                best = at;
        }
        out[r] = (int32_t)best;
    }
}
