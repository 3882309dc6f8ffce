/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear over weights in tiles: out[rows, N] = cap(scale * (x[rows, K] . w[N, K]^T + b)). Blocks
 * split panels, and rows beyond PANEL_ROWS of them.
 */
#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/ops/panel_body.h"

INLINE struct post linear_post(const uint64_t *args)
{
    return (struct post){arg_pointer(args[LIN_B]), (enum ember_dtype)args[LIN_B_DTYPE],
                         arg_float(args[LIN_SCALE]), arg_float(args[LIN_SOFTCAP])};
}

INLINE struct panels linear_panels(const uint64_t *args)
{
    return (struct panels){.w = arg_pointer(args[LIN_W]),
                           .panel_bytes = args[LIN_W_STRIDE] * EMBER_PANEL,
                           .K = args[LIN_K],
                           .N = args[LIN_N]};
}

INLINE void linear_rows(const uint64_t *args, struct range range, struct panel_rows *rows)
{
    rows->n = range.end - range.first;
    rows->stride = args[LIN_X_STRIDE];
    for (size_t i = 0; i < rows->n; i++) {
        rows->x[i] = arg_pointer(args[LIN_X]) + (range.first + i) * args[LIN_X_STRIDE];
        rows->out[i] =
            (float *)(arg_pointer(args[LIN_OUT]) + (range.first + i) * args[LIN_OUT_STRIDE]);
    }
}

KERNEL(linear_tiles)
{
    const size_t n = arg_rows(args), panels = (args[LIN_N] + 15) / EMBER_PANEL;
    const struct post post = linear_post(args);
    const struct panels q = linear_panels(args);
    struct panel_part part;
    for (size_t turn = 0; panel_part(n, panels, block, n_blocks, turn, &part); turn++) {
        struct panel_rows rows;
        linear_rows(args, part.rows, &rows);
        rows.tmp = arg_pointer(args[LINT_X_TMP]) + part.rows.first * args[LINT_X_TMP_STRIDE];
        bf16_panels(&q, &rows, part.panels, &post);
    }
}

KERNEL(linear_int)
{
    const size_t n = arg_rows(args), panels = (args[LIN_N] + 15) / EMBER_PANEL;
    const struct post post = linear_post(args);
    struct panels q = linear_panels(args);
    struct panel_part part;
    q.scale = arg_pointer(args[LINI_SCALES]);
    q.scale_dtype = (enum ember_dtype)args[LINI_SCALES_DTYPE];
    q.zero = (const uint8_t *)arg_pointer(args[LINI_ZEROS]);
    q.groups = args[LINI_GROUPS];
    q.group = args[LINI_GROUP];
    q.segment = args[LINI_SEGMENT];
    q.terms = (int)args[LINI_TERMS];
    for (size_t turn = 0; panel_part(n, panels, block, n_blocks, turn, &part); turn++) {
        struct panel_rows rows;
        linear_rows(args, part.rows, &rows);
        for (size_t i = 0; i < rows.n; i++)
            rows.scale[i] = (const float *)(arg_pointer(args[LINI_X_SCALE]) +
                                            (part.rows.first + i) * args[LINI_X_SCALE_STRIDE]);
        int_panels((enum ember_quant)args[LINI_QUANT], &q, &rows, part.panels, &post);
    }
}

/* x as linear_tiles reads it, which of one row are the floats; blocks split rows, 16 at a time. */
KERNEL(x_tiles)
{
    const size_t n = arg_rows(args) > 1 ? arg_rows(args) : 0;
    struct range range = block_range((n + 15) / 16, block, n_blocks);
    for (size_t b = range.first; b < range.end; b++) {
        const char *x[16];
        const size_t first = b * 16, m = n - first < 16 ? n - first : 16;
        for (size_t i = 0; i < m; i++)
            x[i] = arg_pointer(args[LIN_X]) + (first + i) * args[LIN_X_STRIDE];
        bf16_pack(x, m, args[LIN_K],
                  arg_pointer(args[LINT_X_TMP]) + first * args[LINT_X_TMP_STRIDE]);
    }
}
