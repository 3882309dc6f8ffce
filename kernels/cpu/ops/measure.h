/* SPDX-License-Identifier: Apache-2.0 */
/* The multiply-add rate of the vector layer: what measure_fma is, and measure_bf16 where bf16 is
 * multiplied by vectors. */
#ifndef EMBER_KERNELS_CPU_MEASURE_H
#define EMBER_KERNELS_CPU_MEASURE_H

#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/simd.h"

/* MSR_BYTES steps of MEASURE_CHAINS independent FMAs in registers in every block; what a step is,
 * multiply-adds counted twice, goes to MSR_OUT as a float for each block. */
INLINE void measure_vectors(const uint64_t *args, uint32_t block)
{
    vf acc[MEASURE_CHAINS], a = v_set(1.0f), b = v_set(1e-9f);
    UNROLL
    for (int i = 0; i < MEASURE_CHAINS; i++)
        acc[i] = v_set((float)i);
    for (size_t n = args[MSR_BYTES]; n > 0; n--) {
        UNROLL
        for (int i = 0; i < MEASURE_CHAINS; i++)
            acc[i] = v_fma(acc[i], a, b);
        __asm__ volatile("" : "+x"(a)); /* the loop stays a loop */
    }
    for (int i = 1; i < MEASURE_CHAINS; i++)
        acc[0] = v_add(acc[0], acc[i]);
    const float sum = v_sum(acc[0]); /* so that it is computed */
    ((float *)arg_pointer(args[MSR_OUT]))[block] =
        2.0f * MEASURE_CHAINS * VL + (sum == sum ? 0.0f : 1.0f);
}

#endif
