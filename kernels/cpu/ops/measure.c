/* SPDX-License-Identifier: Apache-2.0 */
/* What this processor can do at most, as kernels so that they run on the same threads: read
 * bandwidth, FMA rate. */
#include "kernels/cpu/ops/measure.h"

/*
 * Reads MSR_BYTES once, up to a few lines, in eight streams a block that lie an odd number of lines
 * apart; one float a block goes to MSR_OUT.
 */
KERNEL(measure_read)
{
    struct range range = block_range(args[MSR_BYTES] / 4096, block, n_blocks);
    const char *p = arg_pointer(args[MSR_IN]) + range.first * 4096;
    size_t bytes = (range.end - range.first) / 8 * 4096;
    bytes = bytes ? bytes - 64 : 0;
    vf sum[8];
    UNROLL
    for (int i = 0; i < 8; i++)
        sum[i] = v_zero();
    for (size_t at = 0; at < bytes; at += VL * sizeof(float)) {
        UNROLL
        for (int i = 0; i < 8; i++) {
            __builtin_prefetch(p + i * bytes + at + 512);
            sum[i] = v_add(sum[i], v_load((const float *)(p + i * bytes + at)));
        }
    }
    for (int i = 1; i < 8; i++)
        sum[0] = v_add(sum[0], sum[i]);
    ((float *)arg_pointer(args[MSR_OUT]))[block] = v_sum(sum[0]);
}

KERNEL(measure_fma)
{
    measure_vectors(args, block);
}
