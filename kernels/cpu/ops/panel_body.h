/* SPDX-License-Identifier: Apache-2.0 */
/* Which body of panel products a variant uses. */
#ifndef EMBER_KERNELS_CPU_PANEL_BODY_H
#define EMBER_KERNELS_CPU_PANEL_BODY_H

#if EMBER_ISA == 4
#include "kernels/cpu/ops/panel_amx_bf16.h"
#include "kernels/cpu/ops/panel_amx_fp.h"
#include "kernels/cpu/ops/panel_amx_int.h"
#else
#include "kernels/cpu/ops/panel_fp.h"
#include "kernels/cpu/ops/panel_int.h"
#endif

INLINE void bf16_panels(const struct panels *q, const struct panel_rows *rows, struct range panels,
                        const struct post *post)
{
#if EMBER_ISA == 4
    bf16_amx(q, rows, panels, post);
#else
    bf16_vectors(q, rows, panels, post);
#endif
}

INLINE void int_panels(enum ember_quant quant, const struct panels *q,
                       const struct panel_rows *rows, struct range panels, const struct post *post)
{
#if EMBER_ISA == 4
    if (int_by_tiles(q, rows)) {
        int_amx(quant, q, rows, panels, post);
        return;
    }
#endif
    int_vectors(quant, q, rows, panels, post);
}

INLINE void fp_panels(enum ember_quant quant, const struct panels *q, const struct panel_rows *rows,
                      struct range panels, const struct post *post)
{
#if EMBER_ISA == 4
    fp_amx(quant, q, rows, panels, post);
#else
    fp_vectors(quant, q, rows, panels, post);
#endif
}

#if EMBER_ISA != 4
/* m rows of K floats to what bf16_panels and fp_panels read; these bodies read the floats. */
INLINE void bf16_pack(const char *const *x, size_t m, size_t K, char *to)
{
    (void)x, (void)m, (void)K, (void)to;
}
INLINE void fp_pack(const char *const *x, size_t m, size_t K, char *to)
{
    (void)x, (void)m, (void)K, (void)to;
}
#endif

#endif
