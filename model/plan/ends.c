/* SPDX-License-Identifier: Apache-2.0 */
/* Both ends of a model: the embedding with the rope tables, and the head. */
#include "model/plan/internal.h"

static void rope_table(struct builder *b, uint32_t i)
{
    const struct desc_rope *rope = &b->d->ropes[i];
    struct ember_op *o = build_op(b, EMBER_OP_ROPE_TABLE, EMBER_ROWS_TOKENS);
    o->t[ROPE_POSITIONS] = build_io(b->plan->io.positions, b->tokens);
    o->t[ROPE_LEN] = build_io(b->plan->io.rope_len, b->tokens);
    o->t[ROPE_INV_FREQ] = build_slot(b, b->model->ropes[i]);
    o->t[ROPE_OUT] = b->ropes[i];
    o->i[ROPE_I_KIND] = rope->kind;
    o->f[ROPE_F_ATTENTION_FACTOR] = rope->attention_factor;
    o->f[ROPE_F_THETA] = rope->theta;
    o->f[ROPE_F_FACTOR] = rope->factor;
    o->f[ROPE_F_MAX_POSITION] = rope->max_position;
}

void build_embed(struct builder *b)
{
    const struct weight *table = &b->layout->weights[b->model->embed];
    struct ember_op *o;
    build_segment(b, SEGMENT_EMBED, 0);
    o = build_op(b, EMBER_OP_EMBED, EMBER_ROWS_TOKENS);
    o->t[EMBED_TOKENS] = build_io(b->plan->io.tokens, b->tokens);
    o->t[EMBED_TABLE] = build_slot(b, b->model->embed);
    o->t[EMBED_OUT] = b->x;
    o->t[EMBED_SCALE] = build_slot_groups(b, b->model->embed, table->scale_at, table->scale_dtype);
    o->t[EMBED_ZERO] = build_slot_groups(b, b->model->embed, table->zero_at, EMBER_U8);
    o->i[EMBED_I_QUANT] = table->quant;
    o->i[EMBED_I_GROUP] = table->group;
    o->i[EMBED_I_LAYOUT] = table->layout;
    o->f[EMBED_F_SCALE] = b->d->embed_scale;
    for (uint32_t i = 0; i < b->d->n_ropes; i++)
        rope_table(b, i);
    build_tap(b, 0, b->x);
}

static struct ember_tensor logits_tensor(const struct builder *b)
{
    uint32_t vocab = b->d->info.vocab_size;
    return (struct ember_tensor){.arena = EMBER_ARENA_IO,
                                 .dtype = EMBER_F32,
                                 .rank = 2,
                                 .dim = {b->rows, vocab},
                                 .offset = b->plan->io.logits,
                                 .row_stride = (uint64_t)vocab * 4};
}

/* The final norm, of the rows that get logits; with taps of all rows first, since the last tap is
 * of those. */
static void final_norm(struct builder *b)
{
    struct ember_tensor w = build_slot(b, b->model->final_norm);
    struct ember_tensor bias = build_slot(b, b->model->final_norm_b);
    struct ember_op *o;
    if (b->taps) {
        build_norm(b, EMBER_ROWS_TOKENS, b->x, NULL, w, bias, b->h, NULL);
        build_tap(b, b->d->info.n_layers, b->h);
    }
    o = build_op(b, EMBER_OP_GATHER, EMBER_ROWS_LOGITS);
    o->t[GATHER_X] = b->taps ? b->h : b->x;
    o->t[GATHER_INDEX] = build_io(b->plan->io.rows, b->rows);
    o->t[GATHER_OUT] = b->taps ? b->final : b->gathered;
    if (!b->taps)
        build_norm(b, EMBER_ROWS_LOGITS, b->gathered, NULL, w, bias, b->final, NULL);
}

static void logits(struct builder *b, uint32_t first, uint32_t n)
{
    b->linear_scale = b->d->logit_scale;
    b->linear_softcap = b->d->logit_softcap;
    build_linear_part(b, EMBER_ROWS_LOGITS, b->final, b->model->head, first, n,
                      (struct ember_tensor){0}, tensor_columns(logits_tensor(b), first, n));
}

void build_head(struct builder *b)
{
    uint32_t vocab = b->d->info.vocab_size, probe = MIN(vocab, (uint32_t)MODEL_PROBE_ROWS);
    struct ember_op *o;
    build_segment(b, SEGMENT_HEAD_PROBE, 0);
    final_norm(b);
    logits(b, 0, probe);
    build_segment(b, SEGMENT_HEAD, 0);
    if (probe < vocab)
        logits(b, probe, vocab - probe);
    o = build_op(b, EMBER_OP_ARGMAX, EMBER_ROWS_LOGITS);
    o->t[ARGMAX_X] = logits_tensor(b);
    o->t[ARGMAX_OUT] = build_io(b->plan->io.sampled, b->rows);
    o->t[ARGMAX_PARTS] = b->argmax_parts;
    b->plan->probe_rows = probe;
    b->plan->final_hidden = b->final;
}
