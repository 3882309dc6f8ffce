/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lowering: one op to one launch. Which kernel, which argument words, in how many grains.
 *
 * A launch's grid says into how many blocks its work may be cut: grains of GRAIN_WORK multiply-adds
 * as the op was planned. A small op is one, so that no thread is woken for it. How many blocks are
 * made of them is the pool's affair (pool_blocks), which knows its threads; a captured graph does
 * not.
 */
#include "kernels/cpu/kernel.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "kernels/cpu/ops/args.h"

#define GRAIN_WORK (64u << 10)
#define MAX_GRAINS 4096

struct lowering {
    const struct ember_op *op;
    enum cpu_isa isa;
    struct ember_launch launch;
    struct ember_launch_arg args[KERNEL_MAX_ARGS];
    ember_emit_fn emit;
    void *sink;
    struct ember_backend_error *error;
};

static int unsupported(struct lowering *l, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static int unsupported(struct lowering *l, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    vsnprintf(l->error->text, sizeof(l->error->text), format, ap);
    va_end(ap);
    return -ENOTSUP;
}

/* ---- argument words ---- */

static void set_int(struct lowering *l, uint32_t slot, uint64_t value)
{
    l->args[slot] = (struct ember_launch_arg){.value = value, .arena = -1};
    if (l->launch.n_args <= slot)
        l->launch.n_args = slot + 1;
}

static void set_float(struct lowering *l, uint32_t slot, double value)
{
    float narrow = (float)value;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof(bits));
    set_int(l, slot, bits);
}

static void set_double(struct lowering *l, uint32_t slot, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    set_int(l, slot, bits);
}

/* The address of an operand, 0 when it is absent. */
static void set_tensor(struct lowering *l, uint32_t slot, uint32_t operand)
{
    const struct ember_tensor *t = &l->op->t[operand];
    set_int(l, slot, 0);
    if (t->rank)
        l->args[slot] = (struct ember_launch_arg){.value = t->offset, .arena = t->arena};
}

static void set_rows(struct lowering *l, uint32_t slot, uint32_t operand)
{
    set_tensor(l, slot, operand);
    set_int(l, slot + 1, l->op->t[operand].row_stride);
}

static void set_weight(struct lowering *l, uint32_t slot, uint32_t operand)
{
    set_tensor(l, slot, operand);
    set_int(l, slot + 1, l->op->t[operand].dtype);
}

/* The words that every kernel begins with; max_rows is what the op was planned for. */
static void begin(struct lowering *l, const char *kernel, uint64_t max_rows)
{
    snprintf(l->launch.kernel, sizeof(l->launch.kernel), "%s", kernel);
    uint64_t at = l->op->rows == EMBER_ROWS_LOGITS ? offsetof(struct ember_step_header, n_rows)
                                                   : offsetof(struct ember_step_header, n_tokens);
    set_int(l, ARG_ROWS, 0);
    l->args[ARG_ROWS] = (struct ember_launch_arg){.value = at, .arena = EMBER_ARENA_IO};
    set_int(l, ARG_MAX_ROWS, max_rows);
}

/* The kernel of a family for a weight's dtype. */
static int begin_dtype(struct lowering *l, const char *family, uint32_t operand, uint64_t max_rows)
{
    char name[32];
    switch (l->op->t[operand].dtype) {
    case EMBER_F32:
        snprintf(name, sizeof(name), "%s.f32", family);
        break;
    case EMBER_F16:
        snprintf(name, sizeof(name), "%s.f16", family);
        break;
    case EMBER_BF16:
        snprintf(name, sizeof(name), "%s.bf16", family);
        break;
    default:
        return unsupported(l, "%s: no kernel for weights of dtype number %u", family,
                           l->op->t[operand].dtype);
    }
    begin(l, name, max_rows);
    return 0;
}

/* `units` is what the kernel splits, `work` what all of it costs. */
static void blocks(struct lowering *l, uint64_t units, double work)
{
    double n = work / GRAIN_WORK;
    if (n > MAX_GRAINS)
        n = MAX_GRAINS;
    if (n > (double)units)
        n = (double)units;
    l->launch.grid[0] = n < 2 ? 1 : (uint32_t)n;
    l->launch.grid[1] = l->launch.grid[2] = 1;
}

static int emit_launch(struct lowering *l)
{
    l->launch.args = l->args;
    return l->emit(l->sink, &l->launch);
}

/* An operand that kernels read with one dtype only. */
static int need_dtype(struct lowering *l, uint32_t operand, enum ember_dtype dtype,
                      const char *what)
{
    if (l->op->t[operand].dtype == dtype)
        return 0;
    return unsupported(l, "%s has dtype number %u, these kernels take %u", what,
                       l->op->t[operand].dtype, dtype);
}

/* K and V pages: of one dtype, with heads no wider than the kernels have room for. */
static int need_kv(struct lowering *l, uint32_t k, uint32_t v)
{
    const struct ember_tensor *a = &l->op->t[k], *b = &l->op->t[v];
    if (a->dtype != b->dtype || (a->dtype != EMBER_F32 && a->dtype != EMBER_F16 &&
                                 a->dtype != EMBER_BF16 && a->dtype != EMBER_I8))
        return unsupported(l,
                           "K has dtype number %u and V %u, these kernels take f32, f16, bf16 "
                           "or i8 for both",
                           a->dtype, b->dtype);
    if (a->dim[2] > ATTENTION_DIM_MAX || b->dim[2] > ATTENTION_DIM_MAX)
        return unsupported(l, "heads of %u and %u, these kernels take %d", a->dim[2], b->dim[2],
                           ATTENTION_DIM_MAX);
    return 0;
}

bool cpu_kv_tiles(enum cpu_isa isa, const struct ember_op *op)
{
    static const struct {
        uint8_t kind, k, v, exact;
    } kinds[] = {{EMBER_OP_ATTENTION, ATTN_K, ATTN_V, ATTN_I_KV_EXACT},
                 {EMBER_OP_SPLIT_LATENT, SPLIT_K, SPLIT_V, SPLIT_I_KV_EXACT},
                 {EMBER_OP_SPLIT_NORM_ROPE, SNR_K, SNR_V, SNR_I_KV_EXACT}};
    size_t i = 0;
    while (i + 1 < sizeof(kinds) / sizeof(*kinds) && kinds[i].kind != op->kind)
        i++;
    const struct ember_tensor *k = &op->t[kinds[i].k], *v = &op->t[kinds[i].v];
    return isa == CPU_ISA_AMX && (k->dtype == EMBER_F32 || k->dtype == EMBER_BF16) &&
           k->dim[1] == 16 && k->dim[2] % 32 == 0 && v->dim[2] % 16 == 0 &&
           k->dim[2] <= KV_TILES_DIM_MAX && v->dim[2] <= KV_TILES_DIM_MAX && !op->i[kinds[i].exact];
}

/* A small weight (norm, bias, sinks) that may be any of the float dtypes, or absent. */
static int need_float(struct lowering *l, uint32_t operand, const char *what)
{
    const struct ember_tensor *t = &l->op->t[operand];
    if (!t->rank || t->dtype == EMBER_F32 || t->dtype == EMBER_F16 || t->dtype == EMBER_BF16)
        return 0;
    return unsupported(l, "%s has dtype number %u, not a float", what, t->dtype);
}

/*
 * What a specialised build fixes. Only where `emberctl bench kernels` shows a gain of 3 % or more
 * in the median of pairs: split_norm_rope (8 to 29 %), attention (1 to 8 %, mostly above 5) and
 * norm (2 to 11 %). The dot products of linear and moe_linear gain nothing from a constant K or N:
 * they wait for memory, or for the multipliers.
 */
static void specialise(struct lowering *l, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void specialise(struct lowering *l, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    vsnprintf(l->launch.spec, sizeof(l->launch.spec), format, ap);
    va_end(ap);
}

/* ---- one function an op ---- */

/* What follows a launch that leaves floats where the next linear wants its x in a matrix unit's
 * form. */
static int hand_over(struct lowering *l, uint32_t out, uint32_t out_x)
{
    const struct ember_tensor *x = &l->op->t[out];
    if (!l->op->t[out_x].rank || l->isa != CPU_ISA_AMX)
        return 0;
    int r = emit_launch(l);
    if (r)
        return r;
    l->launch = (struct ember_launch){.n_args = 0};
    begin(l, "x_tiles", x->dim[0]);
    set_rows(l, LIN_X, out);
    set_int(l, LIN_K, x->dim[1]);
    set_rows(l, LINT_X_TMP, out_x);
    blocks(l, (x->dim[0] + 15) / 16, 4.0 * x->dim[0] * x->dim[1]);
    return 0;
}

static int lower_embed(struct lowering *l)
{
    const struct ember_op *op = l->op;
    const struct ember_tensor *table = &op->t[EMBED_TABLE], *out = &op->t[EMBED_OUT];
    const struct ember_tensor *scale = &op->t[EMBED_SCALE];
    if (op->i[EMBED_I_LAYOUT] == EMBER_LAYOUT_TILES && op->i[EMBED_I_QUANT] != EMBER_QUANT_FP8) {
        begin(l, "embed.tiles", out->dim[0]);
        set_int(l, EMB_QUANT, (uint64_t)op->i[EMBED_I_QUANT]);
        set_tensor(l, EMB_SCALES, EMBED_SCALE);
        set_int(l, EMB_SCALES_DTYPE, scale->dtype);
        set_tensor(l, EMB_ZEROS, EMBED_ZERO);
        set_int(l, EMB_GROUPS, scale->dim[1]);
        set_int(l, EMB_GROUP, (uint64_t)op->i[EMBED_I_GROUP]);
    } else if (op->i[EMBED_I_QUANT]) {
        return unsupported(l, "embed: no kernel for a table quantised as %lld",
                           (long long)op->i[EMBED_I_QUANT]);
    } else {
        int r = begin_dtype(l, "embed", EMBED_TABLE, out->dim[0]);
        if (r)
            return r;
    }
    set_tensor(l, EMB_TOKENS, EMBED_TOKENS);
    set_rows(l, EMB_TABLE, EMBED_TABLE);
    set_rows(l, EMB_OUT, EMBED_OUT);
    set_int(l, EMB_D, out->dim[1]);
    set_float(l, EMB_SCALE, op->f[EMBED_F_SCALE]);
    set_int(l, EMB_V, table->dim[0]);
    blocks(l, out->dim[0], (double)out->dim[0] * out->dim[1]);
    return 0;
}

static int lower_norm(struct lowering *l)
{
    const struct ember_tensor *x = &l->op->t[NORM_X];
    bool whole = l->op->i[NORM_I_GROUP] % EMBER_PANEL == 0;
    bool integers = l->op->t[NORM_OUT_X_SCALE].rank;
    int r = need_float(l, NORM_W, "norm weight");
    if (!r)
        r = need_float(l, NORM_B, "norm bias");
    if (r)
        return r;
    begin(l, integers ? "norm_int" : "norm", x->dim[0]);
    set_rows(l, NRM_X, NORM_X);
    set_int(l, NRM_OUT_X, 0);
    if (integers) {
        set_rows(l, NRM_OUT_X, NORM_OUT_X);
        set_rows(l, NRM_OUT_X_SCALE, NORM_OUT_X_SCALE);
        set_int(l, NRM_SEGMENT,
                l->op->i[NORM_I_X_GROUP] ? (uint64_t)l->op->i[NORM_I_X_GROUP] : x->dim[1]);
        set_int(l, NRM_TERMS, (uint64_t)l->op->i[NORM_I_X_TERMS]);
    } else if (whole && l->isa == CPU_ISA_AMX)
        set_tensor(l, NRM_OUT_X, NORM_OUT_X);
    set_weight(l, NRM_W, NORM_W);
    set_weight(l, NRM_B, NORM_B);
    set_rows(l, NRM_OUT, NORM_OUT);
    set_rows(l, NRM_DELTA, NORM_DELTA);
    set_int(l, NRM_D, x->dim[1]);
    set_int(l, NRM_KIND, (uint64_t)l->op->i[NORM_I_KIND]);
    set_int(l, NRM_GROUP, (uint64_t)l->op->i[NORM_I_GROUP]);
    set_float(l, NRM_EPS, l->op->f[NORM_F_EPS]);
    set_float(l, NRM_W_BIAS, l->op->f[NORM_F_W_BIAS]);
    set_float(l, NRM_DELTA_SCALE, l->op->f[NORM_F_DELTA_SCALE]);
    if (!integers)
        specialise(l, "D=%u", x->dim[1]);
    blocks(l, x->dim[0], (integers ? 5.0 : 1.0) * x->dim[0] * x->dim[1]);
    return whole || integers ? 0 : hand_over(l, NORM_OUT, NORM_OUT_X);
}

static int lower_add(struct lowering *l)
{
    const struct ember_tensor *x = &l->op->t[ADD_X];
    begin(l, "add", x->dim[0]);
    set_rows(l, ADDA_X, ADD_X);
    set_rows(l, ADDA_DELTA, ADD_DELTA);
    set_int(l, ADDA_D, x->dim[1]);
    set_float(l, ADDA_SCALE, l->op->f[ADD_F_SCALE]);
    blocks(l, x->dim[0], (double)x->dim[0] * x->dim[1]);
    return 0;
}

/* Where the operands of a weight stand in an op, and its attributes. */
struct weight_slots {
    uint32_t w, w_scale, w_zero, x_scale, x_tmp, quant, group, layout, x_group, x_terms, k;
};

/* The bytes from one row to the next, of any matrix of a stack; 16 of them are a panel. */
static uint64_t row_stride(const struct ember_tensor *t, int64_t layout)
{
    if (t->rank < 3)
        return t->row_stride;
    return t->row_stride /
           (layout == EMBER_LAYOUT_TILES ? EMBER_PANEL_ROWS((uint64_t)t->dim[1]) : t->dim[1]);
}

/*
 * The kernel of a family for a weight's form, with the words from `at` on that are this form's. The
 * families' other words are the caller's. *ret_k: columns of x.
 */
static int begin_weight(struct lowering *l, const char *family, const struct weight_slots *s,
                        uint32_t x, uint32_t at, uint64_t max_rows, uint32_t *ret_k)
{
    const struct ember_op *op = l->op;
    const struct ember_tensor *w = &op->t[s->w], *scale = &op->t[s->w_scale];
    int64_t quant = op->i[s->quant], layout = op->i[s->layout];
    bool tiles = layout == EMBER_LAYOUT_TILES, integer = op->t[s->x_scale].rank;
    char name[32];
    *ret_k = integer ? (uint32_t)op->i[s->k] : op->t[x].dim[1];
    if (quant == EMBER_QUANT_NONE && !tiles)
        return begin_dtype(l, family, s->w, max_rows);
    if (quant == EMBER_QUANT_NONE && tiles && w->dtype == EMBER_BF16) {
        snprintf(name, sizeof(name), "%s.tiles", family);
        begin(l, name, max_rows);
        set_rows(l, at, s->x_tmp);
        return 0;
    }
    if ((quant == EMBER_QUANT_FP8 || quant == EMBER_QUANT_FP4) && tiles && !integer) {
        snprintf(name, sizeof(name), "%s.fp", family);
        begin(l, name, max_rows);
        set_int(l, at, (uint64_t)quant);
        set_tensor(l, at + 1, s->w_scale);
        set_int(l, at + 2, scale->dtype);
        set_int(l, at + 3, scale->dim[scale->rank - 1]);
        set_int(l, at + 4, (uint64_t)op->i[s->group]);
        set_rows(l, at + 5, s->x_tmp);
        return 0;
    }
    if (!tiles || !integer || (quant != EMBER_QUANT_INT4 && quant != EMBER_QUANT_INT8))
        return unsupported(
            l, "%s: no kernel for weights quantised as %lld in layout %lld with %s x", family,
            (long long)quant, (long long)layout, integer ? "integer" : "float");
    snprintf(name, sizeof(name), "%s.int", family);
    begin(l, name, max_rows);
    set_int(l, at, (uint64_t)quant);
    set_tensor(l, at + 1, s->w_scale);
    set_int(l, at + 2, scale->dtype);
    set_tensor(l, at + 3, s->w_zero);
    set_int(l, at + 4, scale->dim[scale->rank - 1]);
    set_int(l, at + 5, (uint64_t)op->i[s->group]);
    set_int(l, at + 6, op->i[s->x_group] ? (uint64_t)op->i[s->x_group] : *ret_k);
    set_int(l, at + 7, (uint64_t)op->i[s->x_terms]);
    set_rows(l, at + 8, s->x_scale);
    return 0;
}

/* What brings x into the form that a matrix unit reads, with the words of the launch behind it. */
static int emit_x_tiles(struct lowering *l, const char *kernel, bool needed, uint64_t units,
                        double work)
{
    char after[sizeof(l->launch.kernel)];
    if (!needed || l->isa != CPU_ISA_AMX)
        return 0;
    memcpy(after, l->launch.kernel, sizeof(after));
    snprintf(l->launch.kernel, sizeof(l->launch.kernel), "%s", kernel);
    blocks(l, units, work);
    int r = emit_launch(l);
    memcpy(l->launch.kernel, after, sizeof(after));
    return r;
}

/* Whether integer x that is handed over is woven for any number of rows (x_int.h). */
static bool woven(const struct lowering *l)
{
    return l->isa >= CPU_ISA_AVX2 && l->isa <= CPU_ISA_VNNI;
}

/* Whether the product of gate and up is gated where it is made: of bf16 by matrix tiles, of
 * integers that are handed over by those and by vectors from AVX2 on. */
static bool gates(const struct lowering *l)
{
    const struct ember_op *op = l->op;
    if (op->i[LINEAR_I_GLU] != EMBER_GLU_HALVES || op->t[LINEAR_W].dim[0] % (2 * EMBER_PANEL))
        return false;
    if (op->t[LINEAR_X_SCALE].rank)
        return op->i[LINEAR_I_X_READY] && (woven(l) || l->isa == CPU_ISA_AMX);
    return l->isa == CPU_ISA_AMX && op->t[LINEAR_X_TMP].rank && !op->i[LINEAR_I_QUANT];
}

static int lower_op(struct lowering *l);

/* A gated linear as a linear and a glu. */
static int lower_gated(struct lowering *l)
{
    const struct ember_op *op = l->op;
    struct ember_op part = *op;
    part.i[LINEAR_I_GLU] = EMBER_GLU_NONE;
    part.t[LINEAR_OUT] = op->t[LINEAR_GATE_UP];
    part.t[LINEAR_GATE_UP] = part.t[LINEAR_OUT_X] = (struct ember_tensor){0};
    l->op = &part;
    int r = lower_op(l);
    if (!r)
        r = emit_launch(l);
    if (r)
        return r;
    part = (struct ember_op){.kind = EMBER_OP_GLU, .rows = op->rows, .segment = op->segment};
    part.t[GLU_X] = op->t[LINEAR_GATE_UP];
    part.t[GLU_OUT] = op->t[LINEAR_OUT];
    part.i[GLU_I_ACT] = op->i[LINEAR_I_ACT];
    part.i[GLU_I_LAYOUT] = op->i[LINEAR_I_GLU] == EMBER_GLU_PAIRS;
    part.f[GLU_F_LIMIT] = op->f[LINEAR_F_LIMIT];
    part.f[GLU_F_ALPHA] = op->f[LINEAR_F_ALPHA];
    l->launch = (struct ember_launch){.n_args = 0};
    r = lower_op(l);
    l->op = op;
    return r ? r : hand_over(l, LINEAR_OUT, LINEAR_OUT_X);
}

/* The words of linear.tiles beside those of linear and x. */
static void tiles_args(struct lowering *l)
{
    const struct ember_op *op = l->op;
    set_int(l, LINT_GLU, op->i[LINEAR_I_GLU] != EMBER_GLU_NONE);
    set_int(l, LINT_ACT, (uint64_t)op->i[LINEAR_I_ACT]);
    set_float(l, LINT_LIMIT, op->f[LINEAR_F_LIMIT]);
    set_float(l, LINT_ALPHA, op->f[LINEAR_F_ALPHA]);
    set_int(l, LINT_OUT_X, 0);
    if (op->i[LINEAR_I_GLU])
        set_tensor(l, LINT_OUT_X, LINEAR_OUT_X);
}

/* The words of linear.int beside those of linear and its weight. */
static void int_args(struct lowering *l)
{
    const struct ember_op *op = l->op;
    set_int(l, LINI_X_READY, (uint64_t)op->i[LINEAR_I_X_READY]);
    set_int(l, LINI_GLU, op->i[LINEAR_I_GLU] != EMBER_GLU_NONE);
    set_int(l, LINI_ACT, (uint64_t)op->i[LINEAR_I_ACT]);
    set_float(l, LINI_LIMIT, op->f[LINEAR_F_LIMIT]);
    set_float(l, LINI_ALPHA, op->f[LINEAR_F_ALPHA]);
}

static int lower_linear(struct lowering *l)
{
    static const struct weight_slots slots = {
        LINEAR_W,         LINEAR_W_SCALE,   LINEAR_W_ZERO,  LINEAR_X_SCALE,
        LINEAR_X_TMP,     LINEAR_I_QUANT,   LINEAR_I_GROUP, LINEAR_I_LAYOUT,
        LINEAR_I_X_GROUP, LINEAR_I_X_TERMS, LINEAR_I_K,
    };
    const struct ember_op *op = l->op;
    const struct ember_tensor *w = &op->t[LINEAR_W], *out = &op->t[LINEAR_OUT];
    bool tiles = op->t[LINEAR_X_TMP].rank && !op->i[LINEAR_I_QUANT];
    uint64_t panels = (w->dim[0] + EMBER_PANEL - 1) / EMBER_PANEL, rows = out->dim[0];
    uint32_t K;
    if (op->i[LINEAR_I_GLU] && !gates(l))
        return lower_gated(l);
    int r = begin_weight(l, "linear", &slots, LINEAR_X, LIN_SOFTCAP + 1, rows, &K);
    if (!r)
        r = need_float(l, LINEAR_B, "linear bias");
    if (r)
        return r;
    set_rows(l, LIN_X, LINEAR_X);
    set_rows(l, LIN_W, LINEAR_W);
    set_weight(l, LIN_B, LINEAR_B);
    set_rows(l, LIN_OUT, LINEAR_OUT);
    set_int(l, LIN_N, w->dim[0]);
    set_int(l, LIN_K, K);
    set_float(l, LIN_SCALE, op->f[LINEAR_F_SCALE]);
    set_float(l, LIN_SOFTCAP, op->f[LINEAR_F_SOFTCAP]);
    if (tiles)
        tiles_args(l);
    if (op->t[LINEAR_X_SCALE].rank)
        int_args(l);
    r = emit_x_tiles(l, tiles ? "x_tiles" : "x_fp",
                     op->t[LINEAR_X_TMP].rank && !op->i[LINEAR_I_X_READY], (rows + 15) / 16,
                     4.0 * (double)rows * K);
    if (r)
        return r;
    panels /= op->i[LINEAR_I_GLU] ? 2 : 1;
    uint64_t units = panels * (rows + 127) / 128;
    if (tiles && l->isa != CPU_ISA_AMX && rows > 1) /* vectors take two panels at once */
        units = (units + 1) / 2;
    if (op->t[LINEAR_X_SCALE].rank && rows > 32) /* each turns its x into its own form, */
        units = (panels + 15) / 16 * ((rows + 255) / 256);
    if (op->i[LINEAR_I_X_READY] && woven(l)) /* or takes two panels at once */
        units = (op->i[LINEAR_I_GLU] ? panels : (panels + 1) / 2) * ((rows + 127) / 128);
    blocks(l, units, (double)rows * w->dim[0] * K);
    const bool handed = tiles && op->i[LINEAR_I_GLU]; /* where it is gated */
    return handed ? 0 : hand_over(l, LINEAR_OUT, LINEAR_OUT_X);
}

static int lower_rope_table(struct lowering *l)
{
    const struct ember_tensor *out = &l->op->t[ROPE_OUT], *inv_freq = &l->op->t[ROPE_INV_FREQ];
    int r = need_dtype(l, ROPE_INV_FREQ, EMBER_F32, "inv_freq");
    if (r)
        return r;
    begin(l, "rope_table", out->dim[0]);
    set_tensor(l, RPT_POSITIONS, ROPE_POSITIONS);
    set_tensor(l, RPT_LEN, ROPE_LEN);
    set_tensor(l, RPT_INV_FREQ, ROPE_INV_FREQ);
    set_rows(l, RPT_OUT, ROPE_OUT);
    set_int(l, RPT_HALF, inv_freq->dim[0]);
    set_int(l, RPT_KIND, (uint64_t)l->op->i[ROPE_I_KIND]);
    set_double(l, RPT_ATTENTION_FACTOR_F64, l->op->f[ROPE_F_ATTENTION_FACTOR]);
    set_double(l, RPT_THETA_F64, l->op->f[ROPE_F_THETA]);
    set_double(l, RPT_FACTOR_F64, l->op->f[ROPE_F_FACTOR]);
    set_double(l, RPT_MAX_POSITION_F64, l->op->f[ROPE_F_MAX_POSITION]);
    blocks(l, out->dim[0], 64.0 * out->dim[0] * inv_freq->dim[0]);
    return 0;
}

static int lower_split_norm_rope(struct lowering *l)
{
    const struct ember_op *op = l->op;
    const struct ember_tensor *qkv = &op->t[SNR_QKV];
    int r = need_float(l, SNR_Q_NORM, "q norm");
    if (!r)
        r = need_float(l, SNR_K_NORM, "k norm");
    if (!r)
        r = need_kv(l, SNR_K, SNR_V);
    if (r)
        return r;
    begin(l, "split_norm_rope", qkv->dim[0]);
    set_rows(l, SPL_QKV, SNR_QKV);
    set_weight(l, SPL_Q_NORM, SNR_Q_NORM);
    set_weight(l, SPL_K_NORM, SNR_K_NORM);
    set_rows(l, SPL_ROPE, SNR_ROPE);
    set_rows(l, SPL_Q, SNR_Q);
    set_tensor(l, SPL_K, SNR_K);
    set_tensor(l, SPL_V, SNR_V);
    set_int(l, SPL_K_PAGE_STRIDE, op->t[SNR_K].row_stride);
    set_int(l, SPL_V_PAGE_STRIDE, op->t[SNR_V].row_stride);
    set_tensor(l, SPL_KV_SLOT, SNR_KV_SLOT);
    static const uint8_t slot[] = {SPL_Q_HEADS, SPL_KV_HEADS,   SPL_DK,
                                   SPL_DV,      SPL_ROTARY,     SPL_INTERLEAVED,
                                   SPL_NORM,    SPL_NORM_AFTER, SPL_PAGE_SIZE};
    static const uint8_t attribute[] = {SNR_I_Q_HEADS, SNR_I_KV_HEADS,   SNR_I_DK,
                                        SNR_I_DV,      SNR_I_ROTARY,     SNR_I_INTERLEAVED,
                                        SNR_I_NORM,    SNR_I_NORM_AFTER, SNR_I_PAGE_SIZE};
    for (size_t i = 0; i < sizeof(slot); i++)
        set_int(l, slot[i], (uint64_t)op->i[attribute[i]]);
    set_float(l, SPL_EPS, op->f[SNR_F_EPS]);
    set_float(l, SPL_W_BIAS, op->f[SNR_F_W_BIAS]);
    set_float(l, SPL_V_SCALE, op->f[SNR_F_V_SCALE]);
    set_int(l, SPL_KV_DTYPE, op->t[SNR_K].dtype);
    set_int(l, SPL_KV_TILES, cpu_kv_tiles(l->isa, op));
    specialise(l, "DK=%u,DV=%u", (uint32_t)op->i[SNR_I_DK], (uint32_t)op->i[SNR_I_DV]);
    blocks(l, qkv->dim[0], 2.0 * qkv->dim[0] * qkv->dim[1]);
    return 0;
}

static int lower_split_latent(struct lowering *l)
{
    const struct ember_op *op = l->op;
    const struct ember_tensor *out = &op->t[SPLIT_OUT];
    int r = need_float(l, SPLIT_NORM, "latent norm");
    if (!r)
        r = need_kv(l, SPLIT_K, SPLIT_V);
    if (r)
        return r;
    begin(l, "split_latent", out->dim[0]);
    set_rows(l, SLT_Q, SPLIT_Q);
    set_rows(l, SLT_KV, SPLIT_KV);
    set_weight(l, SLT_NORM, SPLIT_NORM);
    set_rows(l, SLT_ROPE, SPLIT_ROPE);
    set_rows(l, SLT_OUT, SPLIT_OUT);
    set_tensor(l, SLT_K, SPLIT_K);
    set_tensor(l, SLT_V, SPLIT_V);
    set_int(l, SLT_K_PAGE_STRIDE, op->t[SPLIT_K].row_stride);
    set_int(l, SLT_V_PAGE_STRIDE, op->t[SPLIT_V].row_stride);
    set_tensor(l, SLT_KV_SLOT, SPLIT_KV_SLOT);
    set_int(l, SLT_HEADS, (uint64_t)op->i[SPLIT_I_HEADS]);
    set_int(l, SLT_NOPE, (uint64_t)op->i[SPLIT_I_NOPE]);
    set_int(l, SLT_ROTARY, (uint64_t)op->i[SPLIT_I_ROTARY]);
    set_int(l, SLT_RANK, (uint64_t)op->i[SPLIT_I_RANK]);
    set_int(l, SLT_INTERLEAVED, (uint64_t)op->i[SPLIT_I_INTERLEAVED]);
    set_int(l, SLT_PAGE_SIZE, (uint64_t)op->i[SPLIT_I_PAGE_SIZE]);
    set_float(l, SLT_EPS, op->f[SPLIT_F_EPS]);
    set_float(l, SLT_W_BIAS, op->f[SPLIT_F_W_BIAS]);
    set_int(l, SLT_KV_DTYPE, op->t[SPLIT_K].dtype);
    set_int(l, SLT_KV_TILES, cpu_kv_tiles(l->isa, op));
    blocks(l, out->dim[0],
           4.0 * out->dim[0] *
               (double)(op->i[SPLIT_I_HEADS] * op->i[SPLIT_I_ROTARY] + 2 * op->i[SPLIT_I_RANK]));
    return 0;
}

static void attention_args(struct lowering *l)
{
    const struct ember_op *op = l->op;
    set_rows(l, ATT_Q, ATTN_Q);
    set_tensor(l, ATT_K, ATTN_K);
    set_tensor(l, ATT_V, ATTN_V);
    set_int(l, ATT_K_PAGE_STRIDE, op->t[ATTN_K].row_stride);
    set_int(l, ATT_V_PAGE_STRIDE, op->t[ATTN_V].row_stride);
    set_rows(l, ATT_PAGES, ATTN_PAGES);
    set_tensor(l, ATT_SEQ_OF, ATTN_SEQ_OF);
    set_tensor(l, ATT_POSITIONS, ATTN_POSITIONS);
    set_weight(l, ATT_SINKS, ATTN_SINKS);
    set_rows(l, ATT_OUT, ATTN_OUT);
    static const uint8_t slot[] = {ATT_Q_HEADS, ATT_KV_HEADS,  ATT_DK,
                                   ATT_DV,      ATT_PAGE_SIZE, ATT_WINDOW};
    static const uint8_t attribute[] = {ATTN_I_Q_HEADS, ATTN_I_KV_HEADS,  ATTN_I_DK,
                                        ATTN_I_DV,      ATTN_I_PAGE_SIZE, ATTN_I_WINDOW};
    for (size_t i = 0; i < sizeof(slot); i++)
        set_int(l, slot[i], (uint64_t)op->i[attribute[i]]);
    set_float(l, ATT_SCALE, op->f[ATTN_F_SCALE]);
    set_float(l, ATT_SOFTCAP, op->f[ATTN_F_SOFTCAP]);
    set_int(l, ATT_KV_DTYPE, op->t[ATTN_K].dtype);
    set_rows(l, ATT_PARTS, ATTN_PARTS);
    set_int(l, ATT_PARTS_EACH, 0);
    if (op->t[ATTN_PARTS].rank)
        set_int(l, ATT_PARTS_EACH,
                op->t[ATTN_PARTS].dim[1] /
                    (uint64_t)(op->i[ATTN_I_Q_HEADS] * (op->i[ATTN_I_DV] + 2)));
    specialise(l, "DK=%u,DV=%u,PAGE=%u", (uint32_t)op->i[ATTN_I_DK], (uint32_t)op->i[ATTN_I_DV],
               (uint32_t)op->i[ATTN_I_PAGE_SIZE]);
}

/* With room for parts: two launches, the parts and their joining. */
static int lower_attention(struct lowering *l)
{
    const struct ember_op *op = l->op;
    const struct ember_tensor *q = &op->t[ATTN_Q], *pages = &op->t[ATTN_PAGES];
    int r = need_float(l, ATTN_SINKS, "sinks");
    if (!r)
        r = need_kv(l, ATTN_K, ATTN_V);
    if (r)
        return r;
    const bool tiles = cpu_kv_tiles(l->isa, op);
    const char *whole = tiles ? "attention.tiles" : "attention";
    const char *parts = tiles ? "attention_parts.tiles" : "attention_parts";
    begin(l, op->t[ATTN_PARTS].rank ? parts : whole, q->dim[0]);
    attention_args(l);
    if (tiles)
        specialise(l, "%s", "");
    /* The context is not known here: half of what the page table could hold, up to 1024 keys. */
    double keys = 0.5 * pages->dim[1] * (double)op->i[ATTN_I_PAGE_SIZE];
    double work = 2.0 * q->dim[0] * q->dim[1] * (keys < 1024 ? keys : 1024);
    uint64_t heads = (uint64_t)op->i[ATTN_I_KV_HEADS];
    if (!op->t[ATTN_PARTS].rank) {
        blocks(l, (q->dim[0] + 7) / 8 * heads, work);
        return 0;
    }
    /* Few rows wait for memory; and compiling it would hold up the buckets that come in the
     * background. */
    specialise(l, "%s", "");
    blocks(l, q->dim[0] * heads * EMBER_ATTN_PARTS, work);
    r = emit_launch(l);
    if (r)
        return r;
    begin(l, "attention_join", q->dim[0]);
    blocks(l, q->dim[0] * (uint64_t)op->i[ATTN_I_Q_HEADS],
           0.5 * q->dim[0] * q->dim[1] * (keys < 1024 ? keys : 1024) / EMBER_ATTN_PART);
    return 0;
}

static int lower_glu(struct lowering *l)
{
    const struct ember_op *op = l->op;
    const struct ember_tensor *out = &op->t[GLU_OUT];
    begin(l, "glu", out->dim[0]);
    set_rows(l, GLUA_X, GLU_X);
    set_rows(l, GLUA_OUT, GLU_OUT);
    set_int(l, GLUA_I, out->dim[1]);
    set_int(l, GLUA_ACT, (uint64_t)op->i[GLU_I_ACT]);
    set_int(l, GLUA_LAYOUT, (uint64_t)op->i[GLU_I_LAYOUT]);
    set_int(l, GLUA_REPEAT, (uint64_t)op->i[GLU_I_REPEAT]);
    set_float(l, GLUA_LIMIT, op->f[GLU_F_LIMIT]);
    set_float(l, GLUA_ALPHA, op->f[GLU_F_ALPHA]);
    blocks(l, out->dim[0] * ((out->dim[1] + 511) / 512), 8.0 * out->dim[0] * out->dim[1]);
    return 0;
}

static int lower_act(struct lowering *l)
{
    const struct ember_tensor *out = &l->op->t[ACT_OUT];
    begin(l, "act", out->dim[0]);
    set_rows(l, ACTA_X, ACT_X);
    set_rows(l, ACTA_OUT, ACT_OUT);
    set_int(l, ACTA_D, out->dim[1]);
    set_int(l, ACTA_ACT, (uint64_t)l->op->i[ACT_I_ACT]);
    blocks(l, out->dim[0] * ((out->dim[1] + 511) / 512), 8.0 * out->dim[0] * out->dim[1]);
    return 0;
}

static int lower_moe_route(struct lowering *l)
{
    const struct ember_op *op = l->op;
    const struct ember_tensor *logits = &op->t[ROUTE_LOGITS];
    int64_t groups = op->i[ROUTE_I_GROUPS], topk = op->i[ROUTE_I_TOPK];
    int64_t experts = logits->dim[1];
    if (experts > ROUTE_MAX_EXPERTS || groups > ROUTE_MAX_GROUPS)
        return unsupported(l, "moe_route: %lld experts in %lld groups, these kernels take %d in %d",
                           (long long)experts, (long long)groups, ROUTE_MAX_EXPERTS,
                           ROUTE_MAX_GROUPS);
    if (groups > 1 &&
        (experts % groups || op->i[ROUTE_I_TOP_GROUPS] < 1 || op->i[ROUTE_I_TOP_GROUPS] > groups))
        return unsupported(l,
                           "moe_route: %lld experts do not make %lld equal groups, or none is kept",
                           (long long)experts, (long long)groups);
    int64_t eligible = groups > 1 ? experts / groups * op->i[ROUTE_I_TOP_GROUPS] : experts;
    if (topk < 1 || topk > eligible)
        return unsupported(l, "moe_route: top %lld of %lld eligible experts", (long long)topk,
                           (long long)eligible);
    int r = need_float(l, ROUTE_BIAS, "router bias");
    if (r)
        return r;
    begin(l, "moe_route", logits->dim[0]);
    set_rows(l, RTE_LOGITS, ROUTE_LOGITS);
    set_weight(l, RTE_BIAS, ROUTE_BIAS);
    set_rows(l, RTE_IDS, ROUTE_IDS);
    set_rows(l, RTE_WEIGHTS, ROUTE_WEIGHTS);
    set_int(l, RTE_E, logits->dim[1]);
    set_int(l, RTE_KIND, (uint64_t)op->i[ROUTE_I_KIND]);
    set_int(l, RTE_TOPK, (uint64_t)topk);
    set_int(l, RTE_NORMALIZE, (uint64_t)op->i[ROUTE_I_NORMALIZE]);
    set_int(l, RTE_GROUPS, (uint64_t)groups);
    set_int(l, RTE_TOP_GROUPS, (uint64_t)op->i[ROUTE_I_TOP_GROUPS]);
    set_float(l, RTE_SCALE, op->f[ROUTE_F_SCALE]);
    blocks(l, logits->dim[0], 4.0 * logits->dim[0] * logits->dim[1] * (double)topk);
    return 0;
}

static int lower_moe_linear(struct lowering *l)
{
    static const struct weight_slots slots = {
        MOE_W,       MOE_W_SCALE,  MOE_W_ZERO,    MOE_X_SCALE,   MOE_X_TMP, MOE_I_QUANT,
        MOE_I_GROUP, MOE_I_LAYOUT, MOE_I_X_GROUP, MOE_I_X_TERMS, MOE_I_K,
    };
    const struct ember_op *op = l->op;
    const struct ember_tensor *w = &op->t[MOE_W], *b = &op->t[MOE_B], *out = &op->t[MOE_OUT];
    const uint64_t tokens = out->dim[0] / (uint64_t)op->i[MOE_I_TOPK];
    if (w->dim[0] > ROUTE_MAX_EXPERTS)
        return unsupported(l, "moe_linear: %u experts, these kernels take %d", w->dim[0],
                           ROUTE_MAX_EXPERTS);
    uint32_t K;
    int r = begin_weight(l, "moe_linear", &slots, MOE_X, MOEA_PER_SLOT + 1, tokens, &K);
    if (!r)
        r = need_float(l, MOE_B, "expert bias");
    if (r)
        return r;
    double rows = (double)tokens * (double)op->i[MOE_I_TOPK];
    set_rows(l, MOEA_X, MOE_X);
    set_tensor(l, MOEA_W, MOE_W);
    set_int(l, MOEA_W_STRIDE, row_stride(w, op->i[MOE_I_LAYOUT]));
    set_int(l, MOEA_W_EXPERT_STRIDE, w->row_stride);
    set_rows(l, MOEA_B, MOE_B);
    set_int(l, MOEA_B_DTYPE, b->dtype);
    set_rows(l, MOEA_IDS, MOE_IDS);
    set_rows(l, MOEA_OUT, MOE_OUT);
    set_int(l, MOEA_E, w->dim[0]);
    set_int(l, MOEA_N, w->dim[1]);
    set_int(l, MOEA_K, K);
    set_int(l, MOEA_TOPK, (uint64_t)op->i[MOE_I_TOPK]);
    set_int(l, MOEA_PER_SLOT, (uint64_t)op->i[MOE_I_PER_SLOT]);
    r = emit_x_tiles(l, op->i[MOE_I_QUANT] ? "moe_x_fp" : "moe_x_tiles", op->t[MOE_X_TMP].rank,
                     w->dim[0], 4.0 * rows * K);
    if (r)
        return r;
    blocks(l, (w->dim[1] + 15) / 16 * (uint64_t)op->i[MOE_I_TOPK], rows * w->dim[1] * K);
    return 0;
}

static int lower_moe_combine(struct lowering *l)
{
    const struct ember_tensor *out = &l->op->t[COMBINE_OUT];
    int64_t topk = l->op->i[COMBINE_I_TOPK];
    begin(l, "moe_combine", out->dim[0]);
    set_rows(l, CMB_Y, COMBINE_Y);
    set_rows(l, CMB_WEIGHTS, COMBINE_WEIGHTS);
    set_rows(l, CMB_SHARED, COMBINE_SHARED);
    set_rows(l, CMB_GATE, COMBINE_GATE);
    set_rows(l, CMB_OUT, COMBINE_OUT);
    set_int(l, CMB_D, out->dim[1]);
    set_int(l, CMB_TOPK, (uint64_t)topk);
    blocks(l, out->dim[0] * ((out->dim[1] + 255) / 256),
           (double)out->dim[0] * out->dim[1] * (double)topk);
    return 0;
}

static int lower_rows(struct lowering *l, uint32_t x, uint32_t out, bool indexed)
{
    const struct ember_tensor *from = &l->op->t[x], *to = &l->op->t[out];
    if (from->dtype != to->dtype)
        return unsupported(l, "copy between dtypes %u and %u", from->dtype, to->dtype);
    uint64_t bytes = from->rank > 1 ? from->dim[1] : 1;
    bytes *= from->dtype == EMBER_F32 || from->dtype == EMBER_I32    ? 4
             : from->dtype == EMBER_F16 || from->dtype == EMBER_BF16 ? 2
                                                                     : 1;
    begin(l, "copy", to->dim[0]);
    set_rows(l, CPY_X, x);
    set_int(l, CPY_INDEX, 0);
    if (indexed)
        set_tensor(l, CPY_INDEX, GATHER_INDEX);
    set_rows(l, CPY_OUT, out);
    if (from->rank == 1) { /* a vector of one element a row */
        set_int(l, CPY_X_STRIDE, bytes);
        set_int(l, CPY_OUT_STRIDE, bytes);
    }
    set_int(l, CPY_BYTES, bytes);
    set_int(l, CPY_X_ROWS, from->dim[0]);
    blocks(l, to->dim[0], (double)to->dim[0] * (double)bytes / 2);
    return 0;
}

static int lower_argmax(struct lowering *l)
{
    const struct ember_tensor *x = &l->op->t[ARGMAX_X];
    bool parts = l->op->t[ARGMAX_PARTS].rank;
    begin(l, parts ? "argmax_parts" : "argmax", x->dim[0]);
    set_rows(l, AMX_X, ARGMAX_X);
    set_tensor(l, AMX_OUT, ARGMAX_OUT);
    set_int(l, AMX_V, x->dim[1]);
    blocks(l, x->dim[0] * (parts ? EMBER_ARGMAX_PARTS : 1), (double)x->dim[0] * x->dim[1]);
    if (!parts)
        return 0;
    set_rows(l, AMX_PARTS, ARGMAX_PARTS);
    int r = emit_launch(l);
    if (r)
        return r;
    begin(l, "argmax_join", x->dim[0]);
    blocks(l, x->dim[0], x->dim[0]);
    return 0;
}

static int lower_permute(struct lowering *l)
{
    const struct ember_tensor *x = &l->op->t[PERMUTE_X];
    int r = need_dtype(l, PERMUTE_ORDER, EMBER_I32, "order");
    if (r)
        return r;
    begin(l, "permute", x->dim[0]);
    set_rows(l, PRM_X, PERMUTE_X);
    set_tensor(l, PRM_ORDER, PERMUTE_ORDER);
    set_rows(l, PRM_OUT, PERMUTE_OUT);
    set_int(l, PRM_K, x->dim[1]);
    blocks(l, x->dim[0], 2.0 * x->dim[0] * x->dim[1]);
    return 0;
}

static int lower_quantize(struct lowering *l)
{
    const struct ember_tensor *x = &l->op->t[QUANTIZE_X];
    int r = need_dtype(l, QUANTIZE_OUT, EMBER_I8, "int8 x");
    if (r)
        return r;
    begin(l, "quantize", x->dim[0]);
    set_rows(l, QNT_X, QUANTIZE_X);
    set_rows(l, QNT_OUT, QUANTIZE_OUT);
    set_rows(l, QNT_SCALE, QUANTIZE_SCALE);
    set_int(l, QNT_K, x->dim[1]);
    set_int(l, QNT_REPEAT, (uint64_t)l->op->i[QUANTIZE_I_REPEAT]);
    set_int(l, QNT_GROUP,
            l->op->i[QUANTIZE_I_GROUP] ? (uint64_t)l->op->i[QUANTIZE_I_GROUP] : x->dim[1]);
    set_int(l, QNT_TERMS, (uint64_t)l->op->i[QUANTIZE_I_TERMS]);
    set_int(l, QNT_HAND_OVER, (uint64_t)l->op->i[QUANTIZE_I_HAND_OVER]);
    blocks(l, x->dim[0], 4.0 * x->dim[0] * x->dim[1]);
    return 0;
}

static int lower_op(struct lowering *l)
{
    switch (l->op->kind) {
    case EMBER_OP_EMBED:
        return lower_embed(l);
    case EMBER_OP_NORM:
        return lower_norm(l);
    case EMBER_OP_ADD:
        return lower_add(l);
    case EMBER_OP_LINEAR:
        return lower_linear(l);
    case EMBER_OP_ROPE_TABLE:
        return lower_rope_table(l);
    case EMBER_OP_SPLIT_NORM_ROPE:
        return lower_split_norm_rope(l);
    case EMBER_OP_SPLIT_LATENT:
        return lower_split_latent(l);
    case EMBER_OP_ATTENTION:
        return lower_attention(l);
    case EMBER_OP_GLU:
        return lower_glu(l);
    case EMBER_OP_ACT:
        return lower_act(l);
    case EMBER_OP_MOE_ROUTE:
        return lower_moe_route(l);
    case EMBER_OP_MOE_LINEAR:
        return lower_moe_linear(l);
    case EMBER_OP_MOE_COMBINE:
        return lower_moe_combine(l);
    case EMBER_OP_GATHER:
        return lower_rows(l, GATHER_X, GATHER_OUT, true);
    case EMBER_OP_COPY:
        return lower_rows(l, COPY_X, COPY_OUT, false);
    case EMBER_OP_ARGMAX:
        return lower_argmax(l);
    case EMBER_OP_PERMUTE:
        return lower_permute(l);
    case EMBER_OP_QUANTIZE:
        return lower_quantize(l);
    }
    return unsupported(l, "op kind %u is not known", l->op->kind);
}

int cpu_lower(enum cpu_isa isa, const struct ember_op *op, ember_emit_fn emit, void *sink,
              struct ember_backend_error *error)
{
    struct lowering l = {.op = op, .isa = isa, .emit = emit, .sink = sink, .error = error};
    int r = lower_op(&l);
    return r ? r : emit_launch(&l);
}
