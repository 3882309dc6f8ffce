/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products by matrix tiles. A tile of w is 16 lines of a panel, read as they are, or written out
 * from 4 bits; a tile of x is 16 rows of 64 bytes.
 */
#ifndef EMBER_KERNELS_CPU_PANEL_AMX_H
#define EMBER_KERNELS_CPU_PANEL_AMX_H

#include "kernels/cpu/ops/panel.h"

/*
 * What LDTILECFG reads. The compiler's own functions say less than what their instructions read (8
 * bytes of this; of a tile nothing), so these say all.
 */
struct amx_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
#define AMX_LOAD(tile, at, stride)                                                                 \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(at), "r"((long)(stride)) : "memory")
#define AMX_STORE(tile, to, stride)                                                                \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((long)(stride))         \
                     : "memory")
#define AMX_ZERO(tile) __asm__ volatile("tilezero %tmm" #tile)
#define AMX_BF16(c, a, b) __asm__ volatile("tdpbf16ps %tmm" #b ", %tmm" #a ", %tmm" #c)
#define AMX_INT8(c, a, b) __asm__ volatile("tdpbssd %tmm" #b ", %tmm" #a ", %tmm" #c)
#define AMX_UINT8(c, a, b) __asm__ volatile("tdpbusd %tmm" #b ", %tmm" #a ", %tmm" #c)

/* Tiles 0 and 1 are sums of rows0 rows, 2 and 3 of rows1; 4 and 5 x of those; 6 and 7 w. `bytes` of
 * k a step. */
INLINE void amx_configure(size_t rows0, size_t rows1, size_t bytes)
{
    struct amx_config config = {.palette = 1};
    const size_t rows[8] = {rows0, rows0, rows1, rows1, rows0, rows1, bytes / 4, bytes / 4};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = (uint8_t)rows[i];
        config.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? bytes : 64);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}
INLINE void amx_release(void)
{
    __asm__ volatile("tilerelease");
}

INLINE vf amx_float(__m256i bf16)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

/* Two bf16 whose sum is x but for 2^-17 of it. */
INLINE void amx_split(vf x, __m256i *ret_high, __m256i *ret_low)
{
    __m256i high = (__m256i)_mm512_cvtneps_pbh(x);
    vf back = amx_float(high);
    *ret_high = high;
    *ret_low = (__m256i)_mm512_cvtneps_pbh(v_sub(x, back));
}

#endif
