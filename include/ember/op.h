/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The op set: what a plan is made of and what a backend must be able to lower.
 *
 * An op is plain data: a kind, up to EMBER_OP_TENSORS operands and a few attributes whose meaning
 * the table of each kind below fixes. Operands live in five arenas and are named by (arena,
 * offset); no op holds an address. All activations are float32, row-major; a weight keeps its
 * stored dtype.
 *
 * Row counts are dynamic: an op is planned for a bucket of T tokens, S sequences and R logit rows,
 * and a step brings n_tokens <= T, n_seqs <= S, n_rows <= R in its header at the start of the IO
 * arena (struct ember_step_header). An op works on the first n rows of the count it names in
 * `rows`.
 *
 * Exactness: the value of an output element must not depend on the bucket, on n_tokens, on the
 * other rows of the batch, on the number of threads or on the launch grid. A backend therefore
 * fixes one order of accumulation per element.
 */
#ifndef EMBER_OP_H
#define EMBER_OP_H

#include <stdint.h>

#define EMBER_DTYPES(X)                                                                            \
    X(EMBER_F32, "f32", 4)                                                                         \
    X(EMBER_F16, "f16", 2)                                                                         \
    X(EMBER_BF16, "bf16", 2)                                                                       \
    X(EMBER_I32, "i32", 4)                                                                         \
    X(EMBER_I8, "i8", 1)                                                                           \
    X(EMBER_U8, "u8", 1)                                                                           \
    X(EMBER_F8, "f8e4m3", 1)

enum ember_dtype {
#define X(id, name, size) id,
    EMBER_DTYPES(X)
#undef X
        EMBER_DTYPE_COUNT
};

/* Where an operand lives. */
enum ember_arena {
    EMBER_ARENA_WEIGHTS, /* shared, read-only: checkpoint tensors and constants of the model */
    EMBER_ARENA_KV,      /* KV pages; page p starts at p * (row_stride of the K or V operand) */
    EMBER_ARENA_STATE,   /* recurrent state, one slot a sequence */
    EMBER_ARENA_SCRATCH, /* activations of one step */
    EMBER_ARENA_IO,      /* step input and output, laid out by kernels/step_io.h */
    EMBER_ARENA_COUNT
};

/*
 * An operand of up to three dimensions; the last is contiguous. rank 0: absent.
 * row_stride: bytes from one index of the first dimension to the next (for rank 1: 0).
 * 32 bytes, no padding: ops are digested as bytes.
 */
struct ember_tensor {
    uint8_t arena, dtype, rank, reserved;
    uint32_t dim[3];
    uint64_t offset;
    uint64_t row_stride;
};

/* Which count of the step header bounds an op's rows. */
enum ember_rows { EMBER_ROWS_TOKENS, EMBER_ROWS_LOGITS };

/* The first 32 bytes of the IO arena. */
struct ember_step_header {
    uint32_t n_tokens, n_seqs, n_rows, reserved[5];
};

#define EMBER_OP_TENSORS 12
#define EMBER_OP_INTS 12
#define EMBER_OP_FLOATS 6

struct ember_op {
    uint16_t kind; /* enum ember_op_kind */
    uint16_t rows; /* enum ember_rows */
    /* Index into the plan's segments: embed, layer 0.., head; used by the canary. */
    uint32_t segment;
    struct ember_tensor t[EMBER_OP_TENSORS];
    int64_t i[EMBER_OP_INTS];
    double f[EMBER_OP_FLOATS];
};

/* X(id, name) */
#define EMBER_OPS(X)                                                                               \
    X(EMBER_OP_EMBED, "embed")                                                                     \
    X(EMBER_OP_NORM, "norm")                                                                       \
    X(EMBER_OP_ADD, "add")                                                                         \
    X(EMBER_OP_LINEAR, "linear")                                                                   \
    X(EMBER_OP_ROPE_TABLE, "rope_table")                                                           \
    X(EMBER_OP_SPLIT_NORM_ROPE, "split_norm_rope")                                                 \
    X(EMBER_OP_ATTENTION, "attention")                                                             \
    X(EMBER_OP_GLU, "glu")                                                                         \
    X(EMBER_OP_ACT, "act")                                                                         \
    X(EMBER_OP_MOE_ROUTE, "moe_route")                                                             \
    X(EMBER_OP_MOE_LINEAR, "moe_linear")                                                           \
    X(EMBER_OP_MOE_COMBINE, "moe_combine")                                                         \
    X(EMBER_OP_GATHER, "gather")                                                                   \
    X(EMBER_OP_COPY, "copy")                                                                       \
    X(EMBER_OP_ARGMAX, "argmax")                                                                   \
    X(EMBER_OP_PERMUTE, "permute")                                                                 \
    X(EMBER_OP_QUANTIZE, "quantize")                                                               \
    X(EMBER_OP_SPLIT_LATENT, "split_latent")

enum ember_op_kind {
#define X(id, name) id,
    EMBER_OPS(X)
#undef X
        EMBER_OP_COUNT
};

enum ember_act { EMBER_ACT_SILU, EMBER_ACT_GELU_TANH, EMBER_ACT_GELU_ERF, EMBER_ACT_RELU2 };
/* How a linear is gated: not, up behind gate (glu's layout 0), or the two interleaved (1). */
enum ember_glu { EMBER_GLU_NONE, EMBER_GLU_HALVES, EMBER_GLU_PAIRS };
enum ember_norm { EMBER_NORM_RMS, EMBER_NORM_LAYER };
enum ember_rope { EMBER_ROPE_STATIC, EMBER_ROPE_DYNAMIC_NTK };
/* How split_norm_rope normalises q and k: not, each head over dk, or all heads of q (k) as one row.
 */
enum ember_qk_norm { EMBER_QK_NORM_NONE, EMBER_QK_NORM_HEAD, EMBER_QK_NORM_ROW };
/* softmax over all experts then top-k; sigmoid then top-k; top-k of the logits then softmax of
 * those. */
enum ember_route { EMBER_ROUTE_SOFTMAX, EMBER_ROUTE_SIGMOID, EMBER_ROUTE_TOPK_SOFTMAX };

/*
 * How a weight [N, K] of linear and moe_linear is kept. Its value is
 *
 *   w[n, k] = scale[n, k / group] * (code[n, k] - zero[n, k / group])
 *
 * Codes:
 *
 * - INT4: 0..15, two a byte. Each 32 elements of k are 16 bytes; byte i holds k = i in its low and
 * k = i + 16 in its high half. Rows are filled up to a multiple of 32.
 *
 * - FP4: E2M1 (sign, 2 bits of exponent of bias 1, 1 of fraction: 0, 0.5, 1, 1.5, 2, 3, 4, 6),
 * packed as INT4 is.
 *
 * - INT8: -128..127.
 *
 * - FP8: E4M3 (OCP, "fn": bias 7, no infinity). The two NaN codes do not occur.
 *
 * scale: f32, f16, bf16, or u8 as E8M0, 2^(s - 127); [N, G], G = ceil(K / group).
 *
 * zero: u8 [N, G], INT4 only; absent: 8 for INT4, else 0.
 *
 * group is a multiple of 32, or at least K.
 *
 * Integers. INT4 and INT8 are multiplied with x as integers (of the quantize op), in segments of k
 * of X_GROUP elements (0: one segment, K). With q the integer of x, xs its scale, and c the code -
 * zero:
 *
 *   acc = 0; for each segment s, in order: acc = acc + (float)(sum over s of q * c) * (xs * scale)
 *
 * The sum is exact in 32 bits, the four float operations are each rounded to float32: every body
 * gives the same bits. X_GROUP is a multiple of 32 and divides group, where that is below K; one
 * segment asks for group >= K; with two terms X_GROUP is at most EMBER_INT16_GROUP_MAX. K is at
 * most EMBER_INT8_K_MAX.
 *
 * Small floats. FP8 and FP4 are multiplied with float x.
 *
 * Layout ROWS: rows behind one another, as above. Layout TILES: every row filled up with zero bytes
 * to a multiple of 64, rows in panels of 16, the last of a matrix filled up with rows of zeros. The
 * 4-byte words j of a panel's rows stand side by side: word j of row n is at 64 j + 4 (n % 16) of
 * panel n / 16. So a 64-byte line is 4 bytes of k for 16 rows: 2 elements of bf16, 4 of INT8, and
 * of INT4 two times 4, k and k + 16; and 16 lines are one tile of a matrix unit. Scales and zero
 * points of a panel are [G, 16]. The operand's dimensions are those of ROWS with the last one
 * filled up; row_stride is that of one row (16 of them are a panel) or, of rank 3, of one matrix
 * with its last panel filled up. Some rows of a matrix can be an operand when the first of them
 * begins a panel. What is quantised is always in TILES, F16 and F32 in ROWS; BF16 in TILES, or in
 * ROWS when it is only a table of embed.
 */
enum ember_layout { EMBER_LAYOUT_ROWS, EMBER_LAYOUT_TILES };
#define EMBER_PANEL 16                                            /* rows */
#define EMBER_TILE_LINE 64                                        /* bytes */
#define EMBER_PANEL_ROWS(n) (((n) + 15) / 16 * 16)                /* rows of a matrix as kept */
#define EMBER_X8_COLUMNS(k) (((k) + 63) / 64 * 64)                /* one term of an integer x */
#define EMBER_X8_ROWS(n) (((n) + 15) / 16 * 16)                   /* of one that is handed over */
#define EMBER_X_TMP_BYTES(k) ((uint64_t)(((k) + 31) / 32) * 128u) /* a row of LINEAR_X_TMP */
#define EMBER_INT16_GROUP_MAX 256

enum ember_quant {
    EMBER_QUANT_NONE,
    EMBER_QUANT_INT4,
    EMBER_QUANT_FP4,
    EMBER_QUANT_INT8,
    EMBER_QUANT_FP8,
    EMBER_QUANT_COUNT
};
#define EMBER_INT8_K_MAX 131072

/*
 * Slots of each kind. T tokens, R rows, D hidden, V vocabulary, E experts, k experts a token.
 * [opt] may be absent. "x" without a word on layout is [rows, D] float32.
 */

/*
 * embed: out[r] = scale * table[token[r]]. A token >= V is a caller's error, checked before a step.
 * The table may have any form of a linear's weight, since it often is that of the head, but those
 * of small floats.
 */
enum {
    EMBED_TOKENS /* i32 [T], IO */,
    EMBED_TABLE /* [V, D] */,
    EMBED_OUT /* [T, D] */,
    EMBED_SCALE /* [opt] [V, G] */,
    EMBED_ZERO /* [opt] u8 [V, G] */
};
enum { EMBED_I_QUANT, EMBED_I_GROUP, EMBED_I_LAYOUT };
enum { EMBED_F_SCALE };

/*
 * norm: if DELTA is there, x += delta_scale * delta (in place) first; then, over each group of
 * GROUP consecutive elements of a row (0: the whole row), out = x * rsqrt(mean(x^2) + eps) * (w +
 * w_bias) for RMS, or (x - mean) * rsqrt(var + eps) * w + b for LAYER. A grouped w has GROUP
 * elements. OUT may be the same tensor as X. The mean is accumulated in at least float32. OUT_X: as
 * in linear; with OUT_X_SCALE what quantize makes of OUT, with X_GROUP and X_TERMS, and hands over.
 */
enum {
    NORM_X,
    NORM_W,
    NORM_B /* [opt] */,
    NORM_OUT,
    NORM_DELTA /* [opt] */,
    NORM_OUT_X /* [opt] u8 [rows, EMBER_X_TMP_BYTES(D)], or i8 as OUT of quantize */,
    NORM_OUT_X_SCALE /* [opt] as SCALE of quantize */
};
enum { NORM_I_KIND /* enum ember_norm */, NORM_I_GROUP, NORM_I_X_GROUP, NORM_I_X_TERMS };
enum { NORM_F_EPS, NORM_F_W_BIAS, NORM_F_DELTA_SCALE };

/* add: x += scale * delta, in place. */
enum { ADD_X, ADD_DELTA };
enum { ADD_F_SCALE };

/*
 * linear: out[r, n] = cap(scale * (sum_k x[r, k] * w[n, k] + b[n])), where cap(v) is v when softcap
 * is 0 and softcap * tanh(v / softcap) otherwise. w is [N, K], or (QUANT) codes:
 * u8 [N, 16 ceil(K / 32)] for 4 bits, i8 or f8e4m3 [N, K] for 8, with W_SCALE and W_ZERO; how it
 * lies says LAYOUT (enum ember_layout).
 * Integer x: what quantize makes, with K, X_GROUP and X_TERMS as there.
 *
 * Gated (GLU): rows of w are gate and up of an MLP, and out[rows, N / 2] is what glu makes of the
 * products, each rounded to float32, with ACT, LIMIT and ALPHA as there. GATE_UP is room for a
 * backend that makes the products first; what is in it before and after means nothing.
 *
 * Handing over: where all that reads OUT is linears over BF16 in TILES, an op may have OUT_X, in
 * which a backend leaves the rows in the form that its own products read; OUT means nothing then.
 * Those linears have the two as their X and X_TMP, and X_READY. Without X_READY what is in X_TMP
 * before and after means nothing. Integer x is handed over by quantize, or a norm, whose integers
 * and scales such a linear has as X and X_SCALE.
 */
enum {
    LINEAR_X /* f32 [rows, K]; i8 [rows, terms * EMBER_X8_COLUMNS(K)] with LINEAR_X_SCALE, or as
                quantize hands them over */
    ,
    LINEAR_W,
    LINEAR_B /* [opt] [N] */,
    LINEAR_OUT /* [rows, N], gated [rows, N / 2] */,
    LINEAR_W_SCALE /* [opt] [N, G] */,
    LINEAR_W_ZERO /* [opt] u8 [N, G] */,
    LINEAR_X_SCALE /* [opt] f32 [rows, segments] */,
    LINEAR_X_TMP /* float x, w in TILES: u8 [rows, EMBER_X_TMP_BYTES(K)], the backend's to write */,
    LINEAR_GATE_UP /* gated: f32 [rows, N], the backend's to write to */,
    LINEAR_OUT_X /* [opt] u8 [rows, EMBER_X_TMP_BYTES(columns of OUT)] */
};
enum {
    LINEAR_I_QUANT /* enum ember_quant */,
    LINEAR_I_GROUP,
    LINEAR_I_LAYOUT /* enum ember_layout */,
    LINEAR_I_K /* with integer x */,
    LINEAR_I_X_GROUP,
    LINEAR_I_X_TERMS,
    LINEAR_I_X_READY /* 0 or 1 */,
    LINEAR_I_GLU /* enum ember_glu */,
    LINEAR_I_ACT
};
enum { LINEAR_F_SCALE, LINEAR_F_SOFTCAP, LINEAR_F_LIMIT, LINEAR_F_ALPHA };

/*
 * rope_table: for token r and j < half: angle = float32(position[r]) * inv_freq[j], both rounded to
 * float32 as the reference does; out[r, j] = attention_factor * cos(angle), out[r, half + j] =
 * attention_factor * sin(angle). DYNAMIC_NTK (Hugging Face "dynamic"): with n = rope_len[r] >
 * max_position the base theta becomes theta * (factor * n / max_position - (factor - 1)) ^ (2 half
 * / (2 half - 2)) and inv_freq[j] = base ^ (-2j / (2 half)); otherwise the table's.
 */
enum {
    ROPE_POSITIONS /* i32 [T] */,
    ROPE_LEN /* i32 [T] */,
    ROPE_INV_FREQ /* f32 [half], weights */,
    ROPE_OUT /* f32 [T, 2 half] */
};
enum { ROPE_I_KIND /* enum ember_rope */ };
enum { ROPE_F_ATTENTION_FACTOR, ROPE_F_THETA, ROPE_F_FACTOR, ROPE_F_MAX_POSITION };

/*
 * split_norm_rope: takes a fused projection [T, Hq dk + Hkv dk + Hkv dv] apart; normalises q and k;
 * rotates the first `rotary` elements of each q and k head; writes q to OUT and k, v to the KV page
 * and slot that KV_SLOT names (page * page_size + slot in page).
 * INTERLEAVED 0: pairs (j, j + rotary/2) (the "rotate half" form); 1: pairs (2j, 2j + 1).
 * NORM_AFTER 1: the norm comes behind the rotation. v is multiplied by V_SCALE.
 * A page of one layer holds K as [Hkv, page_size, dk] and V as [Hkv, page_size, dv]; the K and V
 * operands' offset is that block's place in page 0 and row_stride the distance to the next page.
 * Both are f32, bf16 or f16 (rounded to nearest, ties to even), or i8: then each row of codes has a
 * scale as in quantize, f32 [Hkv, page_size] behind the codes, from the next multiple of 4 on.
 * ROPE absent or ROTARY 0: no rotation.
 * How the elements of a head's block stand in its bytes is the backend's, as long as attention
 * finds them; the order above is that of the reference. Unless KV_EXACT is 1 a backend may keep a
 * float32 as the sum of two bf16, which is the value but for 2^-17 of it, and multiply it as such;
 * numbers below 2^-126 count as 0 then. It is the same in all ops over one K and V.
 */
enum {
    SNR_QKV,
    SNR_Q_NORM /* [opt] */,
    SNR_K_NORM /* [opt] */,
    SNR_ROPE /* [opt] [T, rotary] */,
    SNR_Q /* out [T, Hq dk] */,
    SNR_K /* KV */,
    SNR_V /* KV */,
    SNR_KV_SLOT /* i32 [T] */
};
enum {
    SNR_I_Q_HEADS,
    SNR_I_KV_HEADS,
    SNR_I_DK,
    SNR_I_DV,
    SNR_I_ROTARY,
    SNR_I_INTERLEAVED,
    SNR_I_NORM /* enum ember_qk_norm */,
    SNR_I_NORM_AFTER,
    SNR_I_PAGE_SIZE,
    SNR_I_KV_EXACT
};
enum { SNR_F_EPS, SNR_F_W_BIAS, SNR_F_V_SCALE };

/*
 * split_latent: what multi-head latent attention (DeepSeek-V2) keeps of a token and asks of the
 * others, so that attention is over one KV head. Of kv [T, RANK + ROTARY] the first RANK elements
 * are normalised (RMS) to the latent c and the rest is rotated to k_rope; K is [c, k_rope], dk =
 * RANK + ROTARY, and V is c, dv = RANK. Of each head [NOPE + ROTARY] of q the last ROTARY elements
 * are rotated and written behind the first RANK elements of that head in OUT, which are left alone:
 * q_nope times the head's part of the matrix that makes keys of latents goes there. A rotation is
 * as in split_norm_rope over ROTARY elements; K, V, KV_SLOT and what a backend may do with them are
 * as there, with one head.
 */
enum {
    SPLIT_Q /* [T, Hq (NOPE + ROTARY)] */,
    SPLIT_KV /* [T, RANK + ROTARY] */,
    SPLIT_NORM /* [RANK] */,
    SPLIT_ROPE /* [T, ROTARY] */,
    SPLIT_OUT /* [T, Hq (RANK + ROTARY)] */,
    SPLIT_K /* KV */,
    SPLIT_V /* KV */,
    SPLIT_KV_SLOT /* i32 [T] */
};
enum {
    SPLIT_I_HEADS,
    SPLIT_I_NOPE,
    SPLIT_I_ROTARY,
    SPLIT_I_RANK,
    SPLIT_I_INTERLEAVED,
    SPLIT_I_PAGE_SIZE,
    SPLIT_I_KV_EXACT
};
enum { SPLIT_F_EPS, SPLIT_F_W_BIAS };

/*
 * attention: causal, paged. Token r of sequence s = seq_of[r] at position p sees the keys 0..p of
 * s, or p - window + 1..p when window > 0. Key j lives in page page_table[s, j / page_size], slot j
 * % page_size. scores = cap(scale * q.k), softmax in float32; a sink adds exp(sink[h]) to the
 * denominator alone. Query head h reads KV head h / (Hq / Hkv). K and V are of one dtype.
 * Unless KV_EXACT is 1 a backend may take q, the exponentials, and float32 K and V, as sums of two
 * bf16 each (split_norm_rope).
 *
 * PARTS is room for a backend that cuts a query's keys into parts and spreads them over threads;
 * what is in it before and after means nothing. A query has at most EMBER_ATTN_PARTS parts, of at
 * least EMBER_ATTN_PART keys but for the last; parts is the most that the page table allows.
 */
#define EMBER_ATTN_PART 256
#define EMBER_ATTN_PARTS 32
enum {
    ATTN_Q,
    ATTN_K,
    ATTN_V,
    ATTN_PAGES /* i32 [S, pages a sequence] */,
    ATTN_SEQ_OF /* i32 [T] */,
    ATTN_POSITIONS /* i32 [T] */,
    ATTN_SINKS /* [opt] [Hq] */,
    ATTN_OUT /* [T, Hq dv] */,
    ATTN_PARTS /* [opt] f32 [T, Hq parts (dv + 2)] */
};
enum {
    ATTN_I_Q_HEADS,
    ATTN_I_KV_HEADS,
    ATTN_I_DK,
    ATTN_I_DV,
    ATTN_I_PAGE_SIZE,
    ATTN_I_WINDOW,
    ATTN_I_KV_EXACT
};
enum { ATTN_F_SCALE, ATTN_F_SOFTCAP };

/*
 * glu: out[r, j] = act(gate) * up. LAYOUT 0: gate = x[r, j], up = x[r, I + j]; 1: interleaved, gate
 * = x[r, 2j], up = x[r, 2j + 1]. limit > 0 (gpt-oss): gate = min(gate, limit), up = clamp(up,
 * -limit, limit), out = gate * sigmoid(alpha * gate) * (up + 1). REPEAT: rows are n * repeat (k for
 * expert rows), 0 means 1.
 */
enum { GLU_X /* [rows, 2 I] */, GLU_OUT /* [rows, I] */ };
enum { GLU_I_ACT, GLU_I_LAYOUT, GLU_I_REPEAT };
enum { GLU_F_LIMIT, GLU_F_ALPHA };

/* act: out[r] = act(x[r]). */
enum { ACT_X, ACT_OUT };
enum { ACT_I_ACT };

/*
 * moe_route: logits [T, E] → ids i32 [T, k] by falling score (equal scores: lower id first),
 * weights f32 [T, k]. BIAS is added to the scores for choosing only. GROUPS > 1: experts are in
 * `groups` equal groups, only the best `top_groups` stay eligible (a group's score: the sum of its
 * two best biased scores when there is a bias, else its best). NORMALIZE: weights are divided by
 * their sum + 1e-20. Then they are multiplied by scale.
 */
enum { ROUTE_LOGITS, ROUTE_BIAS /* [opt] [E] */, ROUTE_IDS, ROUTE_WEIGHTS };
enum {
    ROUTE_I_KIND /* enum ember_route */,
    ROUTE_I_TOPK,
    ROUTE_I_NORMALIZE,
    ROUTE_I_GROUPS,
    ROUTE_I_TOP_GROUPS
};
enum { ROUTE_F_SCALE };

/*
 * moe_linear: out[r k + j, n] = sum_i x[row, i] * w[ids[r, j], n, i] + b[ids[r, j], n], where row
 * is r, or r k + j when PER_SLOT is 1. w is [E, N, K], or codes as in linear: u8 [E, N, 16 ceil(K /
 * 32)], i8 or f8e4m3 [E, N, K], with W_SCALE and W_ZERO [E, N, G] and X_SCALE and X_TMP for each
 * row of x.
 *
 * Without IDS each slot has the matrix of its own number, ids[r, j] = j, and k is E: a product for
 * each head of attention. PER_SLOT is 1 then.
 */
enum {
    MOE_X,
    MOE_W,
    MOE_B /* [opt] [E, N] */,
    MOE_IDS /* [opt] i32 [T, k] */,
    MOE_OUT /* [T k, N] */,
    MOE_W_SCALE /* [opt] */,
    MOE_W_ZERO /* [opt] */,
    MOE_X_SCALE /* [opt] */,
    MOE_X_TMP /* [opt] */
};
enum {
    MOE_I_TOPK,
    MOE_I_PER_SLOT,
    MOE_I_QUANT,
    MOE_I_GROUP,
    MOE_I_LAYOUT,
    MOE_I_K,
    MOE_I_X_GROUP,
    MOE_I_X_TERMS
};

/*
 * moe_combine: out[r] = sum_j weights[r, j] * y[r k + j], j ascending, + shared[r] * (gate ?
 * sigmoid(gate[r]) : 1).
 */
enum {
    COMBINE_Y,
    COMBINE_WEIGHTS,
    COMBINE_SHARED /* [opt] */,
    COMBINE_GATE /* [opt] [T, 1] */,
    COMBINE_OUT
};
enum { COMBINE_I_TOPK };

/* gather: out[r] = x[index[r]], rows = logits. */
enum { GATHER_X, GATHER_INDEX /* i32 [R] */, GATHER_OUT };

/* copy: out[r] = x[r]. */
enum { COPY_X, COPY_OUT };

/*
 * argmax: out[r] = the lowest index of the largest of logits[r]. NaN never wins; a row of NaN gives
 * 0. PARTS is room for a backend that spreads a row over threads; what is in it means nothing.
 */
enum {
    ARGMAX_X /* [R, V] */,
    ARGMAX_OUT /* i32 [R] */,
    ARGMAX_PARTS /* [opt] i32 [R, EMBER_ARGMAX_PARTS] */
};
#define EMBER_ARGMAX_PARTS 16

/*
 * permute: out[r, k] = x[r, order[k]]: the columns of x in the order of a weight whose own were
 * sorted by group (GPTQ's act-order). An entry of order beyond K counts as 0.
 */
enum { PERMUTE_X /* [rows, K] */, PERMUTE_ORDER /* i32 [K], weights */, PERMUTE_OUT };

/*
 * quantize: symmetric, one scale for GROUP elements of a row (0: for the whole row). One term:
 * scale = max |x| / 127 (in float32), out[r, k] = x / scale rounded to nearest, ties to even. Two
 * terms: the same with 32767, and the integer q is kept in two bytes: floor(q / 256) in the first
 * half of the row, q mod 256 (0..255) in the second. Zeros have scale 0. A group that is not all
 * finite has scale NaN and zeros. Each half is filled up with zeros to EMBER_X8_COLUMNS(K). REPEAT
 * as in glu.
 *
 * HAND_OVER 1, where all that reads OUT is linears with X_READY: a backend leaves the integers and
 * their scales as its own products read them, in OUT of EMBER_X8_ROWS(rows) rows and SCALE of as
 * many of 1 + terms times the columns, both without gaps, with whatever else it wants to know of
 * the integers. REPEAT is 0 then.
 */
enum {
    QUANTIZE_X /* [rows, K] */,
    QUANTIZE_OUT /* i8 [rows, terms * EMBER_X8_COLUMNS(K)] */,
    QUANTIZE_SCALE /* [rows, ceil(K / GROUP)] */
};
enum { QUANTIZE_I_REPEAT, QUANTIZE_I_GROUP, QUANTIZE_I_TERMS, QUANTIZE_I_HAND_OVER };

#endif
