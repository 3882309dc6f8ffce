/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the model layer share: a model's resident tensors ("slots") and the checkpoint
 * tensors that they are made of ("parts"), enumerable without a checkpoint.
 */
#ifndef EMBER_MODEL_PRIVATE_H
#define EMBER_MODEL_PRIVATE_H

#include "model/desc.h"
#include "model/model.h"

/* Bytes that a layer's K or V block takes in a KV page. */
uint64_t model_kv_block(enum ember_dtype kv, uint32_t heads, uint32_t width);
/* Bytes of a page: those of all layers. */
uint64_t model_kv_page(const struct model *model, enum ember_dtype kv);

/* Resident tensors of a layer: X(id, name). Names appear as "layers.3.qkv". */
#define LAYER_WEIGHTS(X)                                                                           \
    X(W_NORM_ATTN_IN, "norm_attn_in")                                                              \
    X(W_NORM_ATTN_IN_B, "norm_attn_in_bias")                                                       \
    X(W_QKV, "qkv") /* of latents: what q and kv are made of */                                    \
    X(W_QKV_B, "qkv_bias")                                                                         \
    X(W_Q_NORM, "q_norm")                                                                          \
    X(W_K_NORM, "k_norm")                                                                          \
    X(W_SINKS, "sinks")                                                                            \
    X(W_Q_UP, "q_up")                                                                              \
    X(W_K_UP, "k_up") /* [H, rank, nope] */                                                        \
    X(W_V_UP, "v_up") /* [H, dv, rank] */                                                          \
    X(W_O, "o")                                                                                    \
    X(W_O_B, "o_bias")                                                                             \
    X(W_NORM_ATTN_OUT, "norm_attn_out")                                                            \
    X(W_NORM_ATTN_OUT_B, "norm_attn_out_bias")                                                     \
    X(W_NORM_MLP_IN, "norm_mlp_in")                                                                \
    X(W_NORM_MLP_IN_B, "norm_mlp_in_bias")                                                         \
    X(W_GATE_UP, "gate_up") /* of a plain MLP: its first matrix */                                 \
    X(W_GATE_UP_B, "gate_up_bias")                                                                 \
    X(W_DOWN, "down")                                                                              \
    X(W_DOWN_B, "down_bias")                                                                       \
    X(W_ROUTER, "router")                                                                          \
    X(W_ROUTER_B, "router_bias")                                                                   \
    X(W_ROUTE_BIAS, "route_bias")                                                                  \
    X(W_EXPERTS_GATE_UP, "experts_gate_up") /* [E, 2 I, D] */                                      \
    X(W_EXPERTS_GATE_UP_B, "experts_gate_up_bias")                                                 \
    X(W_EXPERTS_DOWN, "experts_down") /* [E, D, I] */                                              \
    X(W_EXPERTS_DOWN_B, "experts_down_bias")                                                       \
    X(W_SHARED_GATE_UP, "shared_gate_up")                                                          \
    X(W_SHARED_DOWN, "shared_down")                                                                \
    X(W_SHARED_SIGMOID, "shared_sigmoid")                                                          \
    X(W_NORM_MLP_OUT, "norm_mlp_out")                                                              \
    X(W_NORM_MLP_OUT_B, "norm_mlp_out_bias")

enum layer_weight {
#define X(id, name) id,
    LAYER_WEIGHTS(X)
#undef X
        LAYER_WEIGHT_COUNT
};

#define SLOT_NONE UINT32_MAX

/* A checkpoint tensor that makes up a run of a slot's elements, or (constant) bytes of our own. */
struct part {
    uint32_t name; /* offset in the model's text */
    uint8_t rank;
    uint32_t dim[3]; /* as the checkpoint must have it */
    uint64_t first, elements;
    bool transposed;      /* of rank 3: each matrix is kept transposed */
    const void *constant; /* float32 */
    /* Not 0: the checkpoint's tensor is a matrix of so many rows, of which these are some, from
     * `from_row` on. Others have the rest. */
    uint32_t of_rows, from_row;
};

/* What a checkpoint decides about a slot. */
struct slot_form {
    uint8_t dtype; /* of the values, or of the codes */
    uint8_t quant; /* enum ember_quant */
    uint8_t scale_dtype, flags;
};
#define FORM_ZERO 1  /* has zero points */
#define FORM_ORDER 2 /* columns are sorted by group */
#define FORM_MADE 4  /* quantised while it is loaded, in groups of 16 << (flags >> 4) */

struct slot {
    uint32_t name;
    uint8_t rank;
    bool page_start; /* begins on a page boundary of the arena */
    bool matrix;     /* multiplied with, rather than added or scaled by */
    bool linear;     /* a matrix that may be quantised */
    bool keep;       /* small and sensitive: not quantised here unless asked for by name */
    bool table;      /* rows are looked up as well (the embedding) */
    bool heads;      /* a matrix for each head of attention, whose rows of x are its own */
    uint32_t dim[3];
    uint64_t elements;
    uint32_t first_part, n_parts;
};

struct model {
    struct desc desc;
    struct slot *slots;
    struct part *parts;
    uint32_t n_slots, n_parts, cap_slots, cap_parts;
    struct buffer text;                          /* names, each with its NUL */
    uint32_t (*layer_slots)[LAYER_WEIGHT_COUNT]; /* SLOT_NONE: the layer has none */
    uint32_t embed, head, final_norm, final_norm_b, ropes[DESC_ROPES];
};

static inline const char *model_text(const struct model *model, uint32_t offset)
{
    return model->text.data + offset;
}

/* The shape that the checkpoint's tensor of a part has; returns its rank. */
uint8_t part_shape(const struct part *part, uint64_t ret[3]);
/* The values of that tensor, and of those how many stand before the part. */
uint64_t part_whole(const struct part *part, uint64_t *ret_before);

/* Fills slots and parts from model->desc. */
int model_make_slots(struct model *model, struct error *err);

/*
 * Checkpoints of multimodal wrappers keep the language model under another prefix. Variant 0 is the
 * plain one; the name of a part under a variant is written to `name`. False when there is no such
 * variant.
 */
bool model_part_name(const struct model *model, const struct part *part, uint32_t variant,
                     struct buffer *name);

/*
 * The layout that follows from the forms of the slots. `variant` names the parts. Never trusts
 * `forms`: -EINVAL for one that this model's slot cannot have.
 */
int layout_make(const struct model *model, const struct slot_form *forms, uint32_t variant,
                struct weights_layout **ret, struct error *err);
/* The form of one weight of a layout. */
struct slot_form layout_form(const struct weight *weight);
/* The variant that a layout was made with. */
uint32_t layout_variant(const struct weights_layout *layout);
/* 0 when the layout is one of this model. */
int layout_check(const struct model *model, const struct weights_layout *layout, struct error *err);

/* Rows [first, first + n) of a plain matrix of the checkpoint as float32: source->columns of them a
 * row, rows `stride` floats apart. The floats between are left alone. */
int layout_read_floats(const struct checkpoint *checkpoint, const struct checkpoint_tensor *t,
                       const struct weight_source *source, uint64_t first, uint32_t n,
                       uint32_t stride, float *to, struct error *err);

/* ---- tiles (tiles.c) ---- */

/* The rows of all matrices of a weight, as kept. */
uint64_t weight_rows(const struct weight *w);
/* Chooses the layout of a weight of known form, and its row_bytes from those in rows. */
void weight_choose_layout(const struct model *model, uint32_t slot, struct weight *w);

/* ---- quantised slots (quant/quant.c) ---- */

/* Reads quantization_config; -ENOTSUP names what is not known. Absent: method QUANT_NONE. */
void quant_read(struct config *config, struct desc_quant *ret);
/* The form of a slot whose tensors are quantised; *ret is untouched when they are not. 1, 0, or a
 * negative errno value naming the tensor that is missing or wrong. */
int quant_find(const struct model *model, const struct checkpoint *checkpoint,
               const struct slot *slot, uint32_t variant, struct buffer *name,
               struct slot_form *ret, struct error *err);
/* 0 when this slot may have this quantised form. */
int quant_check(const struct model *model, const struct slot *slot, const struct slot_form *form,
                struct error *err);
/* Fills layout, row_bytes, group, scale_at, zero_at, order_at and bytes. */
int quant_place(const struct model *model, uint32_t slot, const struct slot_form *form,
                struct weight *w, struct error *err);
/* The sources of a quantised slot, w->n_sources of them; their names are appended to `text` and
 * stand in `tensor` and `order` as offsets + 1 until the text has stopped growing. */
int quant_sources(const struct model *model, const struct slot *slot, const struct weight *w,
                  uint32_t variant, struct buffer *text, struct weight_source *ret);
/* How many sources a slot of this form has. */
uint32_t quant_source_count(const struct slot *slot, const struct slot_form *form);

/* ---- slots that are quantised while they are loaded (quant/made.c) ---- */

/* Gives slots the forms that the rules ask for. `dir` is named in errors. */
int quant_make_forms(const struct model *model, const struct quantize_rules *rules,
                     uint32_t variant, const char *dir, struct slot_form *forms, struct error *err);
/* Bytes of a source whose convert is one of CONVERT_MADE_*. */
int quant_made_read(const struct checkpoint *checkpoint, const struct checkpoint_tensor *t,
                    const struct weight_source *source, uint64_t first, void *to, size_t n,
                    struct error *err);
/* What the sources of one part remember together; NULL when memory is short. */
struct quant_memo *quant_memo_new(void);
void quant_memo_free(struct quant_memo *memo);

#endif
