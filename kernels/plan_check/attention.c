/* SPDX-License-Identifier: Apache-2.0 */
/* Rope tables, K and V in their pages, attention. */
#include "kernels/plan_check/internal.h"

void check_rope_table(struct check *c)
{
    uint32_t half = c->op->t[ROPE_INV_FREQ].dim[0];
    check_index(c, ROPE_POSITIONS, "positions", c->n, c->plan->io.positions);
    check_index(c, ROPE_LEN, "rope_len", c->n, c->plan->io.rope_len);
    check_float_weight(c, ROPE_INV_FREQ, "inv_freq", 1, half, 0, 0);
    check_dtype(c, ROPE_INV_FREQ, "inv_freq", EMBER_F32);
    check_floats(c, ROPE_OUT, "out", OUT, c->n, 2 * (uint64_t)half);
    check_int(c, ROPE_I_KIND, "rope kind", EMBER_ROPE_STATIC, EMBER_ROPE_DYNAMIC_NTK);
    if (!c->failed && c->op->i[ROPE_I_KIND] == EMBER_ROPE_DYNAMIC_NTK &&
        (half < 2 || !(c->op->f[ROPE_F_MAX_POSITION] > 0) || !(c->op->f[ROPE_F_THETA] > 0)))
        check_fail(c, "dynamic rope without theta, maximum position or width");
}

/* K or V pages: [heads, page_size, width] at its place in page 0, one page apart. */
static void kv_block(struct check *c, int slot, const char *name, uint64_t heads, uint64_t slots,
                     uint64_t width)
{
    const struct ember_tensor *t = &c->op->t[slot];
    uint64_t bytes;
    if (c->failed)
        return;
    if (t->arena != EMBER_ARENA_KV || t->rank != 3 || t->dim[0] != heads || t->dim[1] != slots ||
        t->dim[2] != width || t->reserved) {
        check_fail(c, "%s is not a [%llu, %llu, %llu] block of KV pages", name,
                   (unsigned long long)heads, (unsigned long long)slots, (unsigned long long)width);
        return;
    }
    if (!(dtype_is_float(t->dtype) || t->dtype == EMBER_I8) || t->offset % sizeof(float) ||
        t->row_stride % sizeof(float))
        check_fail(c, "%s has dtype %s or a misaligned place", name, dtype_name(t->dtype));
    else if (!size_add(t->offset, kv_block_bytes(t->dtype, heads, slots, width), &bytes) ||
             bytes > c->plan->arena_bytes[EMBER_ARENA_KV])
        check_fail(c, "%s at %llu leaves its page of %llu bytes", name,
                   (unsigned long long)t->offset,
                   (unsigned long long)c->plan->arena_bytes[EMBER_ARENA_KV]);
    else if (t->row_stride != c->plan->arena_bytes[EMBER_ARENA_KV])
        check_fail(c, "%s has pages %llu bytes apart, not %llu", name,
                   (unsigned long long)t->row_stride,
                   (unsigned long long)c->plan->arena_bytes[EMBER_ARENA_KV]);
}

static uint64_t kv_end(const struct ember_tensor *t)
{
    return t->offset + kv_block_bytes(t->dtype, t->dim[0], t->dim[1], t->dim[2]);
}

static bool kv_overlap(const struct ember_tensor *k, const struct ember_tensor *v)
{
    return k->offset < kv_end(v) && v->offset < kv_end(k);
}

/* K and V that a token is written to: blocks apart, of one dtype. */
static void kv_pair(struct check *c, int k, int v)
{
    const struct ember_tensor *a = &c->op->t[k], *b = &c->op->t[v];
    if (!c->failed && kv_overlap(a, b))
        check_fail(c, "k and v overlap");
    if (!c->failed && a->dtype != b->dtype)
        check_fail(c, "k is %s and v %s", dtype_name(a->dtype), dtype_name(b->dtype));
}

void check_split_norm_rope(struct check *c)
{
    int64_t hq = check_int(c, SNR_I_Q_HEADS, "q heads", 1, HEADS_MAX);
    int64_t hkv = check_int(c, SNR_I_KV_HEADS, "kv heads", 1, HEADS_MAX);
    int64_t dk = check_int(c, SNR_I_DK, "dk", 1, HEAD_DIM_MAX);
    int64_t dv = check_int(c, SNR_I_DV, "dv", 1, HEAD_DIM_MAX);
    int64_t rotary = check_int(c, SNR_I_ROTARY, "rotary", 0, dk);
    int64_t page = check_int(c, SNR_I_PAGE_SIZE, "page size", 1, PAGE_MAX);
    int64_t norm = check_int(c, SNR_I_NORM, "qk norm", EMBER_QK_NORM_NONE, EMBER_QK_NORM_ROW);
    bool row = norm == EMBER_QK_NORM_ROW;
    check_int(c, SNR_I_INTERLEAVED, "interleaved", 0, 1);
    check_int(c, SNR_I_NORM_AFTER, "norm after", 0, 1);
    check_int(c, SNR_I_KV_EXACT, "kv exact", 0, 1);
    if (rotary % 2)
        check_fail(c, "rotary is odd: %lld", (long long)rotary);
    check_floats(c, SNR_QKV, "qkv", IN, c->n, (uint64_t)(hq * dk + hkv * dk + hkv * dv));
    if (norm != EMBER_QK_NORM_NONE) {
        check_float_weight(c, SNR_Q_NORM, "q norm", 1, (uint64_t)(row ? hq * dk : dk), 0, 0);
        check_float_weight(c, SNR_K_NORM, "k norm", 1, (uint64_t)(row ? hkv * dk : dk), 0, 0);
    }
    if (rotary && !check_absent(c, SNR_ROPE))
        check_floats(c, SNR_ROPE, "rope", IN, c->n, (uint64_t)rotary);
    check_floats(c, SNR_Q, "q", OUT, c->n, (uint64_t)(hq * dk));
    kv_block(c, SNR_K, "k", (uint64_t)hkv, (uint64_t)page, (uint64_t)dk);
    kv_block(c, SNR_V, "v", (uint64_t)hkv, (uint64_t)page, (uint64_t)dv);
    kv_pair(c, SNR_K, SNR_V);
    check_index(c, SNR_KV_SLOT, "kv_slot", c->n, c->plan->io.kv_slot);
    check_distinct(c, SNR_Q, -1);
}

void check_split_latent(struct check *c)
{
    int64_t heads = check_int(c, SPLIT_I_HEADS, "heads", 1, HEADS_MAX);
    int64_t nope = check_int(c, SPLIT_I_NOPE, "nope", 1, HEAD_DIM_MAX);
    int64_t rotary = check_int(c, SPLIT_I_ROTARY, "rotary", 2, HEAD_DIM_MAX);
    int64_t rank = check_int(c, SPLIT_I_RANK, "rank", 1, HEAD_DIM_MAX);
    int64_t page = check_int(c, SPLIT_I_PAGE_SIZE, "page size", 1, PAGE_MAX);
    check_int(c, SPLIT_I_INTERLEAVED, "interleaved", 0, 1);
    check_int(c, SPLIT_I_KV_EXACT, "kv exact", 0, 1);
    if (rotary % 2)
        check_fail(c, "rotary is odd: %lld", (long long)rotary);
    check_floats(c, SPLIT_Q, "q", IN, c->n, (uint64_t)(heads * (nope + rotary)));
    check_floats(c, SPLIT_KV, "kv", IN, c->n, (uint64_t)(rank + rotary));
    check_float_weight(c, SPLIT_NORM, "norm", 1, (uint64_t)rank, 0, 0);
    check_floats(c, SPLIT_ROPE, "rope", IN, c->n, (uint64_t)rotary);
    check_floats(c, SPLIT_OUT, "out", OUT, c->n, (uint64_t)(heads * (rank + rotary)));
    kv_block(c, SPLIT_K, "k", 1, (uint64_t)page, (uint64_t)(rank + rotary));
    kv_block(c, SPLIT_V, "v", 1, (uint64_t)page, (uint64_t)rank);
    kv_pair(c, SPLIT_K, SPLIT_V);
    check_index(c, SPLIT_KV_SLOT, "kv_slot", c->n, c->plan->io.kv_slot);
    check_distinct(c, SPLIT_OUT, -1);
}

void check_attention(struct check *c)
{
    int64_t hq = check_int(c, ATTN_I_Q_HEADS, "q heads", 1, HEADS_MAX);
    int64_t hkv = check_int(c, ATTN_I_KV_HEADS, "kv heads", 1, HEADS_MAX);
    int64_t dk = check_int(c, ATTN_I_DK, "dk", 1, HEAD_DIM_MAX);
    int64_t dv = check_int(c, ATTN_I_DV, "dv", 1, HEAD_DIM_MAX);
    int64_t page = check_int(c, ATTN_I_PAGE_SIZE, "page size", 1, PAGE_MAX);
    check_int(c, ATTN_I_WINDOW, "window", 0, INT32_MAX);
    check_int(c, ATTN_I_KV_EXACT, "kv exact", 0, 1);
    if (hq % hkv)
        check_fail(c, "%lld q heads over %lld kv heads", (long long)hq, (long long)hkv);
    check_floats(c, ATTN_Q, "q", IN, c->n, (uint64_t)(hq * dk));
    kv_block(c, ATTN_K, "k", (uint64_t)hkv, (uint64_t)page, (uint64_t)dk);
    kv_block(c, ATTN_V, "v", (uint64_t)hkv, (uint64_t)page, (uint64_t)dv);
    check_operand(c, ATTN_PAGES, "pages", IN, 2, c->plan->io.shape.seqs, c->plan->io.shape.pages,
                  0);
    if (!c->failed &&
        (c->op->t[ATTN_PAGES].dtype != EMBER_I32 || c->op->t[ATTN_PAGES].arena != EMBER_ARENA_IO ||
         c->op->t[ATTN_PAGES].offset != c->plan->io.pages ||
         c->op->t[ATTN_PAGES].row_stride != (uint64_t)c->plan->io.shape.pages * 4))
        check_fail(c, "pages is not the step's page table");
    check_index(c, ATTN_SEQ_OF, "seq_of", c->n, c->plan->io.seq_of);
    check_index(c, ATTN_POSITIONS, "positions", c->n, c->plan->io.positions);
    if (!check_absent(c, ATTN_SINKS))
        check_float_weight(c, ATTN_SINKS, "sinks", 1, (uint64_t)hq, 0, 0);
    check_floats(c, ATTN_OUT, "out", OUT, c->n, (uint64_t)(hq * dv));
    check_distinct(c, ATTN_OUT, -1);
    if (!c->failed && c->op->t[ATTN_K].dtype != c->op->t[ATTN_V].dtype)
        check_fail(c, "k is %s and v %s", dtype_name(c->op->t[ATTN_K].dtype),
                   dtype_name(c->op->t[ATTN_V].dtype));
    if (check_absent(c, ATTN_PARTS))
        return;
    uint64_t parts = attention_parts((uint64_t)c->plan->io.shape.pages * (uint64_t)page);
    check_floats(c, ATTN_PARTS, "parts", OUT, c->n, (uint64_t)(hq * (dv + 2)) * parts);
    check_distinct(c, ATTN_PARTS, -1);
}
