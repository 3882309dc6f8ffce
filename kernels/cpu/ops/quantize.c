/* SPDX-License-Identifier: Apache-2.0 */
/* quantize: floats to integers, as rows or handed over (x_int.h). Blocks split rows, or tiles. */
#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/ops/x_int.h"

KERNEL(quantize)
{
    const char *x = arg_pointer(args[QNT_X]);
    const size_t repeat = args[QNT_REPEAT] ? args[QNT_REPEAT] : 1;
    size_t rows = *(const uint32_t *)arg_pointer(args[ARG_ROWS]) * repeat;
    rows = rows < args[ARG_MAX_ROWS] ? rows : args[ARG_MAX_ROWS];
    const struct x_int to = {
        .x = arg_pointer(args[QNT_OUT]),
        .scale = arg_pointer(args[QNT_SCALE]),
        .x_stride = args[QNT_OUT_STRIDE],
        .scale_stride = args[QNT_SCALE_STRIDE],
        .n = rows,
        .K = args[QNT_K],
        .segment = args[QNT_GROUP],
        .terms = (int)args[QNT_TERMS],
        .form = args[QNT_HAND_OVER]
                    ? x_int_form(rows, args[QNT_K], args[QNT_GROUP], (int)args[QNT_TERMS])
                    : X_INT_ROWS};
    const size_t height = x_int_height(&to);
    struct range range = block_range((rows + height - 1) / height, block, n_blocks);
    for (size_t t = range.first; t < range.end; t++) {
        const float *from[X_ROWS_MAX] = {NULL};
        for (size_t i = 0; i < height && t * height + i < rows; i++)
            from[i] = (const float *)(x + (t * height + i) * args[QNT_X_STRIDE]);
        x_int_put(&to, t * height, from);
    }
}
