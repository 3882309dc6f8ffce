/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear and moe_linear over weights in tiles, in one file since the bodies behind them are most of
 * the kernels' code and need to be compiled once a variant.
 *
 * linear: out[rows, N] = cap(scale * (x[rows, K] . w[N, K]^T + b)). Blocks split panels, and rows
 * beyond PANEL_ROWS of them.
 *
 * moe_linear: out[slot, N] = x[row of slot, K] . w[ids[slot], N, K]^T + b[ids[slot], N]. Slots are
 * sorted by expert (a counting sort over up to MOE_CHUNK slots). Blocks split the panels of the
 * experts that were chosen, all behind one another, by what they cost: their bytes and their
 * products. So a block reads its part of an expert once for all the slots that chose it.
 */
#include "kernels/cpu/ops/args.h"
#include "kernels/cpu/ops/moe_sort.h"
#include "kernels/cpu/ops/panel_body.h"

/* ---- linear ---- */

#define LINEAR_STREAM_BYTES 2097152u
#define LINEAR_WOVEN_BYTES 786432u

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
    for (size_t i = 0; i < rows->n; i++) {
        rows->x[i] = arg_pointer(args[LIN_X]) + (range.first + i) * args[LIN_X_STRIDE];
        rows->out[i] =
            (float *)(arg_pointer(args[LIN_OUT]) + (range.first + i) * args[LIN_OUT_STRIDE]);
    }
}

/* Whether lines of n rows of N products are whole, and more than stay in cache until they are read.
 */
INLINE int linear_streams(const uint64_t *args, size_t n, size_t N)
{
    return n * N * sizeof(float) >= LINEAR_STREAM_BYTES &&
           (args[LIN_OUT] | args[LIN_OUT_STRIDE]) % 64 == 0;
}

KERNEL(linear_tiles)
{
    const size_t n = arg_rows(args);
    const struct post post = linear_post(args);
    const struct panel_gate gate = {(enum ember_act)args[LINT_ACT], arg_float(args[LINT_LIMIT]),
                                    arg_float(args[LINT_ALPHA]), args[LIN_N] / 2 / EMBER_PANEL};
    struct panels q = linear_panels(args);
    size_t panels = (args[LIN_N] + 15) / EMBER_PANEL;
    struct panel_part part;
    if (args[LINT_GLU]) {
        q.gate = &gate;
        panels = gate.panels;
    }
    for (size_t turn = 0; panel_part(n, BF16_ROWS, panels, block, n_blocks, turn, &part); turn++) {
        struct panel_rows rows;
        linear_rows(args, part.rows, &rows);
        rows.tmp = arg_pointer(args[LINT_X_TMP]) + part.rows.first * args[LINT_X_TMP_STRIDE];
        if (EMBER_ISA == 4 && n > 1)
            rows.x[0] = NULL;
        rows.stream = linear_streams(args, n, args[LIN_N]);
        rows.out_x = n > 1 ? arg_pointer(args[LINT_OUT_X]) : NULL;
        rows.first = part.rows.first;
        rows.all = n;
        bf16_panels(&q, &rows, part.panels, &post);
    }
}

/* How many rows a part may have: woven ones as many as stay in the second-level cache. */
INLINE size_t linear_woven_rows(enum ember_quant quant, const struct panels *q)
{
    const int pairs = int_by(quant != EMBER_QUANT_INT8, q->terms) == INT_BY_PAIRS;
    const size_t most =
        LINEAR_WOVEN_BYTES / (EMBER_X8_COLUMNS(q->K) * (pairs ? 2 : (size_t)q->terms));
    return most < PANEL_ROWS ? PANEL_ROWS : most > INT_ROWS ? INT_ROWS : most;
}

/* Others are cut where there would be fewer than 16 panels to a part. */
INLINE size_t linear_int_rows(size_t n, size_t panels, uint32_t n_blocks)
{
    const size_t cuts = n_blocks / ((panels + 15) / 16), high = cuts > 1 ? n / cuts : n;
    return high < PANEL_ROWS ? PANEL_ROWS : high > INT_ROWS ? INT_ROWS : high;
}

KERNEL(linear_int)
{
    const size_t n = arg_rows(args);
    const struct post post = linear_post(args);
    const struct panel_gate gate = {(enum ember_act)args[LINI_ACT], arg_float(args[LINI_LIMIT]),
                                    arg_float(args[LINI_ALPHA]), args[LIN_N] / 2 / EMBER_PANEL};
    size_t panels = (args[LIN_N] + 15) / EMBER_PANEL;
    struct panels q = linear_panels(args);
    struct panel_part part;
    if (args[LINI_GLU]) {
        q.gate = &gate;
        panels = gate.panels;
    }
    q.scale = arg_pointer(args[LINI_SCALES]);
    q.scale_dtype = (enum ember_dtype)args[LINI_SCALES_DTYPE];
    q.zero = (const uint8_t *)arg_pointer(args[LINI_ZEROS]);
    q.groups = args[LINI_GROUPS];
    q.group = args[LINI_GROUP];
    q.segment = args[LINI_SEGMENT];
    q.terms = (int)args[LINI_TERMS];
    const struct x_int x = {.x = arg_pointer(args[LIN_X]),
                            .scale = arg_pointer(args[LINI_X_SCALE]),
                            .n = n,
                            .K = q.K,
                            .segment = q.segment,
                            .terms = q.terms,
                            .form = args[LINI_X_READY] ? x_int_form(n, q.K, q.segment, q.terms)
                                                       : X_INT_ROWS};
    const size_t most = x.form == X_INT_WOVEN
                            ? linear_woven_rows((enum ember_quant)args[LINI_QUANT], &q)
                            : linear_int_rows(n, panels, n_blocks);
    for (size_t turn = 0; panel_part(n, most, panels, block, n_blocks, turn, &part); turn++) {
        struct panel_rows rows;
        linear_rows(args, part.rows, &rows);
        rows.stream = linear_streams(args, n, q.gate ? args[LIN_N] / 2 : args[LIN_N]);
        rows.ready = x.form == X_INT_ROWS ? NULL : &x;
        rows.first = part.rows.first;
        for (size_t i = 0; i < rows.n; i++)
            rows.scale[i] = (const float *)(arg_pointer(args[LINI_X_SCALE]) +
                                            (part.rows.first + i) * args[LINI_X_SCALE_STRIDE]);
        int_panels((enum ember_quant)args[LINI_QUANT], &q, &rows, part.panels, &post);
    }
}

KERNEL(linear_fp)
{
    const size_t n = arg_rows(args), panels = (args[LIN_N] + 15) / EMBER_PANEL;
    const struct post post = linear_post(args);
    struct panels q = linear_panels(args);
    struct panel_part part;
    q.scale = arg_pointer(args[LINF_SCALES]);
    q.scale_dtype = (enum ember_dtype)args[LINF_SCALES_DTYPE];
    q.groups = args[LINF_GROUPS];
    q.group = args[LINF_GROUP];
    for (size_t turn = 0; panel_part(n, PANEL_ROWS, panels, block, n_blocks, turn, &part); turn++) {
        struct panel_rows rows;
        linear_rows(args, part.rows, &rows);
        rows.stream = 0;
        rows.out_x = NULL;
        rows.tmp = arg_pointer(args[LINF_X_TMP]) + part.rows.first * args[LINF_X_TMP_STRIDE];
        fp_panels((enum ember_quant)args[LINF_QUANT], &q, &rows, part.panels, &post);
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

/* x as linear_fp reads it; blocks split rows, 16 at a time. */
KERNEL(x_fp)
{
    const size_t n = arg_rows(args);
    struct range range = block_range((n + 15) / 16, block, n_blocks);
    for (size_t b = range.first; b < range.end; b++) {
        const char *x[16];
        const size_t first = b * 16, m = n - first < 16 ? n - first : 16;
        for (size_t i = 0; i < m; i++)
            x[i] = arg_pointer(args[LIN_X]) + (first + i) * args[LIN_X_STRIDE];
        fp_pack(x, m, args[LIN_K], arg_pointer(args[LINF_X_TMP]) + first * args[LINF_X_TMP_STRIDE]);
    }
}

/* ---- moe_linear ---- */

#define MOE_PANEL_COST 12 /* of reading a panel, in rows of x that are multiplied with it */

INLINE struct panels moe_panels(const uint64_t *args)
{
    return (struct panels){.w = arg_pointer(args[MOEA_W]),
                           .panel_bytes = args[MOEA_W_STRIDE] * EMBER_PANEL,
                           .K = args[MOEA_K],
                           .N = args[MOEA_N]};
}

/* What a weight's form decides. */
enum moe_form { MOE_BF16, MOE_INT, MOE_FP };

INLINE struct panels moe_fp_panels(const uint64_t *args)
{
    struct panels q = moe_panels(args);
    q.scale = arg_pointer(args[MOEF_SCALES]);
    q.scale_dtype = (enum ember_dtype)args[MOEF_SCALES_DTYPE];
    q.groups = args[MOEF_GROUPS];
    q.group = args[MOEF_GROUP];
    return q;
}

INLINE struct panels moe_int_panels(const uint64_t *args)
{
    struct panels q = moe_panels(args);
    q.scale = arg_pointer(args[MOEI_SCALES]);
    q.scale_dtype = (enum ember_dtype)args[MOEI_SCALES_DTYPE];
    q.zero = (const uint8_t *)arg_pointer(args[MOEI_ZEROS]);
    q.groups = args[MOEI_GROUPS];
    q.group = args[MOEI_GROUP];
    q.segment = args[MOEI_SEGMENT];
    q.terms = (int)args[MOEI_TERMS];
    return q;
}

/* Slots of an expert against some of its panels; those before it are `before` of all. */
INLINE void moe_part(const uint64_t *args, const enum moe_form form, const struct panels *all,
                     size_t e, size_t first, const uint16_t *slots, size_t n_slots, size_t before,
                     struct range panels)
{
    const size_t tmp_at = form == MOE_FP ? MOEF_X_TMP : MOET_X_TMP;
    const size_t topk = args[MOEA_TOPK], kept = (args[MOEA_N] + 15) / 16 * 16;
    const char *b = arg_pointer(args[MOEA_B]);
    const struct post post = {b ? b + e * args[MOEA_B_STRIDE] : NULL,
                              (enum ember_dtype)args[MOEA_B_DTYPE], 1.0f, 0.0f};
    struct panels q = *all;
    q.w += e * args[MOEA_W_EXPERT_STRIDE];
    if (form != MOE_BF16) {
        const size_t scales = e * kept * q.groups;
        q.scale += scales * (q.scale_dtype == EMBER_F32 ? 4 : q.scale_dtype == EMBER_U8 ? 1 : 2);
        q.zero = q.zero ? q.zero + scales : NULL;
    }
    for (size_t s = 0, m; s < n_slots; s += m) {
        struct panel_rows rows;
        m = n_slots - s < PANEL_ROWS ? n_slots - s : PANEL_ROWS;
        rows.n = m;
        rows.stream = 0;
        rows.out_x = NULL;
        rows.ready = NULL;
        if (form != MOE_INT)
            rows.tmp = arg_pointer(args[tmp_at]) + (before + s) * args[tmp_at + 1];
        for (size_t i = 0; i < m; i++) {
            size_t slot = first + slots[s + i];
            size_t row = args[MOEA_PER_SLOT] ? slot : slot / topk;
            rows.x[i] = arg_pointer(args[MOEA_X]) + row * args[MOEA_X_STRIDE];
            rows.out[i] = (float *)(arg_pointer(args[MOEA_OUT]) + slot * args[MOEA_OUT_STRIDE]);
            if (form == MOE_INT)
                rows.scale[i] = (const float *)(arg_pointer(args[MOEI_X_SCALE]) +
                                                row * args[MOEI_X_SCALE_STRIDE]);
        }
        if (form == MOE_INT)
            int_panels((enum ember_quant)args[MOEI_QUANT], &q, &rows, panels, &post);
        else if (form == MOE_FP)
            fp_panels((enum ember_quant)args[MOEF_QUANT], &q, &rows, panels, &post);
        else
            bf16_panels(&q, &rows, panels, &post);
    }
}

INLINE void moe_tiles(const uint64_t *args, uint32_t block, uint32_t n_blocks,
                      const enum moe_form form)
{
    const struct panels q = form == MOE_INT  ? moe_int_panels(args)
                            : form == MOE_FP ? moe_fp_panels(args)
                                             : moe_panels(args);
    const size_t E = args[MOEA_E], n_slots = arg_rows(args) * args[MOEA_TOPK];
    const size_t per_expert = (args[MOEA_N] + 15) / EMBER_PANEL;
    uint16_t order[MOE_CHUNK];
    uint32_t start[ROUTE_MAX_EXPERTS + 2];
    for (size_t first = 0; first < n_slots; first += MOE_CHUNK) {
        size_t n = n_slots - first < MOE_CHUNK ? n_slots - first : MOE_CHUNK, used = 0, at = 0;
        moe_sort(args, first, n, order, start);
        for (size_t e = 0; e < E; e++)
            used += start[e + 1] > start[e];
        struct range part = block_range((n + used * MOE_PANEL_COST) * per_expert, block, n_blocks);
        for (size_t e = 0; e < E && at < part.end; e++) {
            const size_t slots = start[e + 1] - start[e], cost = slots + MOE_PANEL_COST;
            if (!slots)
                continue;
            /* Panel p costs from at + p cost on; it belongs to the block where that lies. */
            size_t from = part.first > at ? (part.first - at + cost - 1) / cost : 0;
            size_t end = (part.end - at + cost - 1) / cost;
            if (end > per_expert)
                end = per_expert;
            if (from < end)
                moe_part(args, form, &q, e, first, order + start[e], slots, first + start[e],
                         (struct range){from, end});
            at += cost * per_expert;
        }
    }
}

KERNEL(moe_linear_tiles)
{
    moe_tiles(args, block, n_blocks, MOE_BF16);
}

KERNEL(moe_linear_int)
{
    moe_tiles(args, block, n_blocks, MOE_INT);
}

KERNEL(moe_linear_fp)
{
    moe_tiles(args, block, n_blocks, MOE_FP);
}

/* x of every slot as the kernels above read it, in the order of the sorted slots. Blocks split
 * experts. */
INLINE void moe_pack(const uint64_t *args, uint32_t block, uint32_t n_blocks,
                     const enum moe_form form)
{
    const size_t n_slots = arg_rows(args) * args[MOEA_TOPK], topk = args[MOEA_TOPK];
    const size_t tmp_at = form == MOE_FP ? MOEF_X_TMP : MOET_X_TMP;
    uint16_t order[MOE_CHUNK];
    uint32_t start[ROUTE_MAX_EXPERTS + 2];
    struct range experts = block_range(args[MOEA_E], block, n_blocks);
    for (size_t first = 0; first < n_slots; first += MOE_CHUNK) {
        size_t n = n_slots - first < MOE_CHUNK ? n_slots - first : MOE_CHUNK;
        moe_sort(args, first, n, order, start);
        for (size_t e = experts.first; e < experts.end; e++) {
            if (form == MOE_BF16 && start[e + 1] - start[e] == 1)
                continue; /* one row is read as floats */
            for (size_t s = start[e], m; s < start[e + 1]; s += m) {
                const char *x[16];
                char *to = arg_pointer(args[tmp_at]) + (first + s) * args[tmp_at + 1];
                m = start[e + 1] - s < 16 ? start[e + 1] - s : 16;
                for (size_t i = 0; i < m; i++) {
                    size_t slot = first + order[s + i];
                    size_t row = args[MOEA_PER_SLOT] ? slot : slot / topk;
                    x[i] = arg_pointer(args[MOEA_X]) + row * args[MOEA_X_STRIDE];
                }
                if (form == MOE_FP)
                    fp_pack(x, m, args[MOEA_K], to);
                else
                    bf16_pack(x, m, args[MOEA_K], to);
            }
        }
    }
}

KERNEL(moe_x_tiles)
{
    moe_pack(args, block, n_blocks, MOE_BF16);
}

KERNEL(moe_x_fp)
{
    moe_pack(args, block, n_blocks, MOE_FP);
}
