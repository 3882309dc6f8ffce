/* SPDX-License-Identifier: Apache-2.0 */
/* Slots of a mixture of experts by expert: what moe_linear's kernels share. */
#ifndef EMBER_KERNELS_CPU_MOE_SORT_H
#define EMBER_KERNELS_CPU_MOE_SORT_H

#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/simd.h"

/* order[0..n) = slots of the chunk by expert; start[e] .. start[e + 1] are those of expert e. */
static void moe_sort(const uint64_t *args, size_t first, size_t n, uint16_t *order, uint32_t *start)
{
    const char *ids = arg_pointer(args[MOEA_IDS]);
    const size_t E = args[MOEA_E], topk = args[MOEA_TOPK], stride = args[MOEA_IDS_STRIDE];
    uint16_t expert[MOE_CHUNK];
    for (size_t e = 0; e < E + 2; e++)
        start[e] = 0;
    for (size_t i = 0; i < n; i++) {
        size_t slot = first + i;
        uint32_t id = ids ? ((const uint32_t *)(ids + slot / topk * stride))[slot % topk]
                          : (uint32_t)(slot % topk);
        expert[i] = (uint16_t)(id < E ? id : E - 1);
        start[expert[i] + 2]++;
    }
    for (size_t e = 2; e < E + 2; e++)
        start[e] += start[e - 1];
    for (size_t i = 0; i < n; i++)
        order[start[expert[i] + 1]++] = (uint16_t)i;
}

#endif
