/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The argument words of each kernel, shared by the bodies and by lower.c. Words 0 and 1 of every
 * kernel are the address of the row count in the step header and the rows that the op was planned
 * for. A float is its bits in the low half, *_F64 a double's bits. A stride is the bytes from one
 * row to the next; an absent operand is address 0.
 */
#ifndef EMBER_KERNELS_CPU_ARGS_H
#define EMBER_KERNELS_CPU_ARGS_H

enum { ARG_ROWS, ARG_MAX_ROWS, ARG_FIRST };

/* embed.DTYPE */
enum {
    EMB_TOKENS = ARG_FIRST,
    EMB_TABLE,
    EMB_TABLE_STRIDE,
    EMB_OUT,
    EMB_OUT_STRIDE,
    EMB_D,
    EMB_SCALE,
    EMB_V,
    /* embed.tiles: strides of a table are those of one row, 16 of which are a panel */
    EMB_QUANT,
    EMB_SCALES,
    EMB_SCALES_DTYPE,
    EMB_ZEROS,
    EMB_GROUPS,
    EMB_GROUP
};

/* norm */
enum {
    NRM_X = ARG_FIRST,
    NRM_X_STRIDE,
    NRM_W,
    NRM_W_DTYPE,
    NRM_B,
    NRM_B_DTYPE,
    NRM_OUT,
    NRM_OUT_STRIDE,
    NRM_DELTA,
    NRM_DELTA_STRIDE,
    NRM_D,
    NRM_KIND,
    NRM_GROUP,
    NRM_EPS,
    NRM_W_BIAS,
    NRM_DELTA_SCALE,
    NRM_OUT_X, /* x of linears over tiles instead of OUT, for more than one row; 0: none */
    /* norm_int: OUT_X and what follows are those of linear.int; rows of OUT are room */
    NRM_OUT_X_STRIDE,
    NRM_OUT_X_SCALE,
    NRM_OUT_X_SCALE_STRIDE,
    NRM_SEGMENT,
    NRM_TERMS
};

/* add */
enum { ADDA_X = ARG_FIRST, ADDA_X_STRIDE, ADDA_DELTA, ADDA_DELTA_STRIDE, ADDA_D, ADDA_SCALE };

/* linear.DTYPE */
enum {
    LIN_X = ARG_FIRST,
    LIN_X_STRIDE,
    LIN_W,
    LIN_W_STRIDE,
    LIN_B,
    LIN_B_DTYPE,
    LIN_OUT,
    LIN_OUT_STRIDE,
    LIN_N,
    LIN_K,
    LIN_SCALE,
    LIN_SOFTCAP
};

/* linear.fp: those of linear, then; X_TMP: x as x_fp made it */
enum {
    LINF_QUANT = LIN_SOFTCAP + 1,
    LINF_SCALES,
    LINF_SCALES_DTYPE,
    LINF_GROUPS,
    LINF_GROUP,
    LINF_X_TMP,
    LINF_X_TMP_STRIDE
};

/* linear.tiles: those of linear, then; X_TMP: x as x_tiles made it, 0: it has not. GLU: of w, gate
 * and up stand one behind the other, whose products are joined. OUT_X: x of the next linear over
 * tiles, 0: none. */
enum {
    LINT_X_TMP = LIN_SOFTCAP + 1,
    LINT_X_TMP_STRIDE,
    LINT_GLU,
    LINT_ACT,
    LINT_LIMIT,
    LINT_ALPHA,
    LINT_OUT_X
};

/* linear.int: those of linear, then */
enum {
    LINI_QUANT = LIN_SOFTCAP + 1,
    LINI_SCALES,
    LINI_SCALES_DTYPE,
    LINI_ZEROS,
    LINI_GROUPS,
    LINI_GROUP,
    LINI_SEGMENT,
    LINI_TERMS,
    LINI_X_SCALE,
    LINI_X_SCALE_STRIDE,
    LINI_X_READY, /* x was handed over (x_int.h) */
    LINI_GLU,     /* as in linear.tiles */
    LINI_ACT,
    LINI_LIMIT,
    LINI_ALPHA
};

/* x_tiles, x_fp, moe_x_tiles, moe_x_fp: rows of bf16 pairs of a linear or moe_linear .tiles or .fp
 * behind it, with whose words it is launched */

/* rope_table */
enum {
    RPT_POSITIONS = ARG_FIRST,
    RPT_LEN,
    RPT_INV_FREQ,
    RPT_OUT,
    RPT_OUT_STRIDE,
    RPT_HALF,
    RPT_KIND,
    RPT_ATTENTION_FACTOR_F64,
    RPT_THETA_F64,
    RPT_FACTOR_F64,
    RPT_MAX_POSITION_F64
};

/* split_norm_rope */
enum {
    SPL_QKV = ARG_FIRST,
    SPL_QKV_STRIDE,
    SPL_Q_NORM,
    SPL_Q_NORM_DTYPE,
    SPL_K_NORM,
    SPL_K_NORM_DTYPE,
    SPL_ROPE,
    SPL_ROPE_STRIDE,
    SPL_Q,
    SPL_Q_STRIDE,
    SPL_K,
    SPL_V,
    SPL_K_PAGE_STRIDE,
    SPL_V_PAGE_STRIDE,
    SPL_KV_SLOT,
    SPL_Q_HEADS,
    SPL_KV_HEADS,
    SPL_DK,
    SPL_DV,
    SPL_ROTARY,
    SPL_INTERLEAVED,
    SPL_NORM,
    SPL_NORM_AFTER,
    SPL_PAGE_SIZE,
    SPL_EPS,
    SPL_W_BIAS,
    SPL_V_SCALE,
    SPL_KV_DTYPE,
    SPL_KV_TILES /* pages in tiles (kv.h) */
};

/* split_latent */
enum {
    SLT_Q = ARG_FIRST,
    SLT_Q_STRIDE,
    SLT_KV,
    SLT_KV_STRIDE,
    SLT_NORM,
    SLT_NORM_DTYPE,
    SLT_ROPE,
    SLT_ROPE_STRIDE,
    SLT_OUT,
    SLT_OUT_STRIDE,
    SLT_K,
    SLT_V,
    SLT_K_PAGE_STRIDE,
    SLT_V_PAGE_STRIDE,
    SLT_KV_SLOT,
    SLT_HEADS,
    SLT_NOPE,
    SLT_ROTARY,
    SLT_RANK,
    SLT_INTERLEAVED,
    SLT_PAGE_SIZE,
    SLT_EPS,
    SLT_W_BIAS,
    SLT_KV_DTYPE,
    SLT_KV_TILES /* as in split_norm_rope */
};

/* attention, attention_parts, attention_join, attention.tiles, attention_parts.tiles */
enum {
    ATT_Q = ARG_FIRST,
    ATT_Q_STRIDE,
    ATT_K,
    ATT_V,
    ATT_K_PAGE_STRIDE,
    ATT_V_PAGE_STRIDE,
    ATT_PAGES,
    ATT_PAGES_STRIDE,
    ATT_SEQ_OF,
    ATT_POSITIONS,
    ATT_SINKS,
    ATT_SINKS_DTYPE,
    ATT_OUT,
    ATT_OUT_STRIDE,
    ATT_Q_HEADS,
    ATT_KV_HEADS,
    ATT_DK,
    ATT_DV,
    ATT_PAGE_SIZE,
    ATT_WINDOW,
    ATT_SCALE,
    ATT_SOFTCAP,
    ATT_KV_DTYPE,
    ATT_PARTS,
    ATT_PARTS_STRIDE,
    ATT_PARTS_EACH
};
#define ATTENTION_DIM_MAX 1024 /* of dk and dv */
#define KV_TILES_DIM_MAX 512   /* of those of pages in tiles */

/* glu; rows are the header's times GLUA_REPEAT */
enum {
    GLUA_X = ARG_FIRST,
    GLUA_X_STRIDE,
    GLUA_OUT,
    GLUA_OUT_STRIDE,
    GLUA_I,
    GLUA_ACT,
    GLUA_LAYOUT,
    GLUA_REPEAT,
    GLUA_LIMIT,
    GLUA_ALPHA
};

/* act */
enum { ACTA_X = ARG_FIRST, ACTA_X_STRIDE, ACTA_OUT, ACTA_OUT_STRIDE, ACTA_D, ACTA_ACT };

/* moe_route */
enum {
    RTE_LOGITS = ARG_FIRST,
    RTE_LOGITS_STRIDE,
    RTE_BIAS,
    RTE_BIAS_DTYPE,
    RTE_IDS,
    RTE_IDS_STRIDE,
    RTE_WEIGHTS,
    RTE_WEIGHTS_STRIDE,
    RTE_E,
    RTE_KIND,
    RTE_TOPK,
    RTE_NORMALIZE,
    RTE_GROUPS,
    RTE_TOP_GROUPS,
    RTE_SCALE
};
#define ROUTE_MAX_EXPERTS 1024
#define ROUTE_MAX_GROUPS 64
#define MOE_CHUNK 8192 /* slots that are sorted by expert at a time */

/* moe_linear.DTYPE; IDS 0: the number of the slot in its row */
enum {
    MOEA_X = ARG_FIRST,
    MOEA_X_STRIDE,
    MOEA_W,
    MOEA_W_STRIDE,
    MOEA_W_EXPERT_STRIDE,
    MOEA_B,
    MOEA_B_STRIDE,
    MOEA_B_DTYPE,
    MOEA_IDS,
    MOEA_IDS_STRIDE,
    MOEA_OUT,
    MOEA_OUT_STRIDE,
    MOEA_E,
    MOEA_N,
    MOEA_K,
    MOEA_TOPK,
    MOEA_PER_SLOT
};

/* moe_linear.fp: those of moe_linear, then; scales as in moe_linear.int */
enum {
    MOEF_QUANT = MOEA_PER_SLOT + 1,
    MOEF_SCALES,
    MOEF_SCALES_DTYPE,
    MOEF_GROUPS,
    MOEF_GROUP,
    MOEF_X_TMP,
    MOEF_X_TMP_STRIDE
};

/* moe_linear.tiles: those of moe_linear, then */
enum { MOET_X_TMP = MOEA_PER_SLOT + 1, MOET_X_TMP_STRIDE };

/* moe_linear.int: those of moe_linear, then; scales and zero points of an expert are GROUPS times
 * its rows, filled up to panels */
enum {
    MOEI_QUANT = MOEA_PER_SLOT + 1,
    MOEI_SCALES,
    MOEI_SCALES_DTYPE,
    MOEI_ZEROS,
    MOEI_GROUPS,
    MOEI_GROUP,
    MOEI_SEGMENT,
    MOEI_TERMS,
    MOEI_X_SCALE,
    MOEI_X_SCALE_STRIDE
};

/* moe_combine */
enum {
    CMB_Y = ARG_FIRST,
    CMB_Y_STRIDE,
    CMB_WEIGHTS,
    CMB_WEIGHTS_STRIDE,
    CMB_SHARED,
    CMB_SHARED_STRIDE,
    CMB_GATE,
    CMB_GATE_STRIDE,
    CMB_OUT,
    CMB_OUT_STRIDE,
    CMB_D,
    CMB_TOPK
};

/* gather (CPY_INDEX set) and copy */
enum { CPY_X = ARG_FIRST, CPY_X_STRIDE, CPY_INDEX, CPY_OUT, CPY_OUT_STRIDE, CPY_BYTES, CPY_X_ROWS };

/* permute */
enum { PRM_X = ARG_FIRST, PRM_X_STRIDE, PRM_ORDER, PRM_OUT, PRM_OUT_STRIDE, PRM_K };

/* quantize; rows are the header's times QNT_REPEAT */
enum {
    QNT_X = ARG_FIRST,
    QNT_X_STRIDE,
    QNT_OUT,
    QNT_OUT_STRIDE,
    QNT_SCALE,
    QNT_SCALE_STRIDE,
    QNT_K,
    QNT_REPEAT,
    QNT_GROUP,
    QNT_TERMS,
    QNT_HAND_OVER /* to linear.int, in its own form (x_int.h) */
};

/* argmax, argmax_parts, argmax_join */
enum { AMX_X = ARG_FIRST, AMX_X_STRIDE, AMX_OUT, AMX_V, AMX_PARTS, AMX_PARTS_STRIDE };

/* measure_read, measure_fma: no row count */
enum { MSR_IN, MSR_BYTES, MSR_OUT };
#define MEASURE_CHAINS 12

#define KERNEL_MAX_ARGS 32

#endif
