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

/*
 * Weights that a process has not read yet are not in its page table, and what is fetched ahead of
 * itself does not put them there: then each product waits for memory. So every page is touched
 * before the first one; where it is mapped that is a load out of a line that is needed anyway.
 */
INLINE void touch_panels(const struct panels *q, struct range panels)
{
    const char *end = q->w + panels.end * q->panel_bytes;
    for (const char *at = q->w + panels.first * q->panel_bytes; at < end; at += 4096)
        (void)*(const volatile char *)at;
}

INLINE void bf16_panels(const struct panels *q, const struct panel_rows *rows, struct range panels,
                        const struct post *post)
{
    touch_panels(q, panels);
#if EMBER_ISA == 4
    bf16_amx(q, rows, panels, post);
#else
    bf16_vectors(q, rows, panels, post);
#endif
}

INLINE void int_panels(enum ember_quant quant, const struct panels *q,
                       const struct panel_rows *rows, struct range panels, const struct post *post)
{
    touch_panels(q, panels);
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
    touch_panels(q, panels);
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
