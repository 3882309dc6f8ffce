/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this processor can multiply at most, in registers, with the instructions that weights in
 * tiles are multiplied with: MSR_BYTES steps in every block. A step's multiply-adds, counted twice,
 * go to MSR_OUT as a float for each block, so that who measures need not know the variant.
 */
#include "kernels/cpu/ops/measure.h"
#include "kernels/cpu/ops/panel_body.h"

#if EMBER_ISA == 4
#define MEASURE_AMX(name, multiply, k)                                                             \
    KERNEL(name)                                                                                   \
    {                                                                                              \
        _Alignas(64) char zeros[1024] = {0};                                                       \
        amx_configure(16, 16, 64);                                                                 \
        AMX_LOAD(4, zeros, 64);                                                                    \
        AMX_LOAD(5, zeros, 64);                                                                    \
        AMX_LOAD(6, zeros, 64);                                                                    \
        AMX_LOAD(7, zeros, 64);                                                                    \
        for (size_t n = args[MSR_BYTES]; n > 0; n--) {                                             \
            multiply(0, 4, 6);                                                                     \
            multiply(1, 4, 7);                                                                     \
            multiply(2, 5, 6);                                                                     \
            multiply(3, 5, 7);                                                                     \
        }                                                                                          \
        amx_release();                                                                             \
        ((float *)arg_pointer(args[MSR_OUT]))[block] = 4 * 2 * 16 * 16 * k;                        \
    }
MEASURE_AMX(measure_bf16, AMX_BF16, 32)
MEASURE_AMX(measure_int8, AMX_INT8, 64)
#else
KERNEL(measure_bf16)
{
    measure_vectors(args, block);
}
KERNEL(measure_int8)
{
    vi acc[MEASURE_CHAINS], a = vi_set16(1), b = vi_set16(3);
    UNROLL
    for (int i = 0; i < MEASURE_CHAINS; i++)
        acc[i] = vi_zero();
    for (size_t n = args[MSR_BYTES]; n > 0; n--) {
        UNROLL
        for (int i = 0; i < MEASURE_CHAINS; i++) {
#if EMBER_ISA == 3
            acc[i] = int_quads(acc[i], a, b);
#else
            acc[i] = vi_add(acc[i], vi_madd16(a, b));
#endif
            /* The chains are alike, and each is to stay in its register. */
            __asm__ volatile("" : "+" V_REGISTER(acc[i]));
        }
    }
    for (int i = 1; i < MEASURE_CHAINS; i++)
        acc[0] = vi_add(acc[0], acc[i]);
    const float each = EMBER_ISA == 3 ? 8.0f : 4.0f;
    const float sum = v_sum(v_from_int(acc[0]));
    ((float *)arg_pointer(args[MSR_OUT]))[block] =
        each * MEASURE_CHAINS * VL + (sum == sum ? 0.0f : 1.0f);
}
#endif
