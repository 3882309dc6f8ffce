/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Models: from a checkpoint's config.json to weights, layout and plans.
 *
 *   config.json ──model_from_config──▶ struct model (a description: blocks, norms, rope, attention
 * and MLP kinds, weight names; no code of its own per architecture)
 *   + checkpoint ──model_layout──────▶ struct weights_layout (what is resident, where in the arena)
 *   + bucket ──model_plan────────────▶ struct plan (kernels/plan.h)
 *
 * The manifest carries config and layout from the loader to every instance as one sealed memfd.
 */
#ifndef EMBER_MODEL_MODEL_H
#define EMBER_MODEL_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ember/op.h>

#include "base/digest.h"
#include "base/error.h"
#include "base/mem.h"
#include "kernels/plan.h"
#include "model/checkpoint.h"
#include "model/quant/rules.h"

#define MODEL_EOS_MAX 8
#define MODEL_PROBE_ROWS 256 /* vocabulary entries that the head's probe covers */

/* X(id, name, dtype): what K and V may be kept in. Auto follows the weights (model_settle_kv). */
#define KV_KINDS(X)                                                                                \
    X(KV_AUTO, "auto", EMBER_F32)                                                                  \
    X(KV_F32, "f32", EMBER_F32)                                                                    \
    X(KV_BF16, "bf16", EMBER_BF16)                                                                 \
    X(KV_F16, "f16", EMBER_F16)                                                                    \
    X(KV_INT8, "int8", EMBER_I8)
#define KV_CHOICES "auto|f32|bf16|f16|int8" /* as a choice of options, in the same order */

enum kv_kind {
#define X(id, name, dtype) id,
    KV_KINDS(X)
#undef X
        KV_KIND_COUNT
};
/* "auto", "f32", ... */
const char *kv_kind_name(enum kv_kind kind);
/* -EINVAL: no such kind; the text has those there are. */
int kv_kind_find(const char *name, enum kv_kind *ret, struct error *err);

struct model; /* a described model; immutable */

struct model_info {
    char architecture[48]; /* model_type of the config */
    uint32_t vocab_size, hidden_size, n_layers, max_positions;
    int32_t bos_id; /* -1: none */
    int32_t eos_ids[MODEL_EOS_MAX];
    uint32_t n_eos;
    /* Positions depend on the prompt's length when that is beyond this many tokens; 0: never. */
    uint32_t rope_exact_len;
    enum ember_dtype kv_dtype[KV_KIND_COUNT]; /* what each kind is in this model */
    uint64_t kv_page_bytes[KV_KIND_COUNT];    /* K and V of all layers for KV_PAGE_SIZE tokens */
    uint64_t parameters;                      /* by the config's shapes, embeddings included */
};

/*
 * Describes a config.json. `name` appears in error texts. -ENOTSUP: an architecture, activation,
 * rope kind or quantisation that is not known, named, with those that are; -EINVAL: a value that is
 * missing, NaN, negative or absurd.
 */
int model_from_config(const char *json, size_t len, const char *name, struct model **ret,
                      struct error *err);
void model_free(struct model *model);
DEFINE_CLEANUP(struct model *, model_free)
const struct model_info *model_info(const struct model *model);

/* ---- resident weights ---- */

/*
 * The family of layouts that this build makes: how the bytes of a resident tensor are ordered. To
 * be changed with whatever makes the bytes of an arena of the same shapes differ; packs of another
 * family are not read (model/pack/pack.h).
 */
#define WEIGHTS_FAMILY "tiles.3"
/* Changes when quantising makes other numbers of the same weights and rules: part of a pack's name
 * (engine/packs.h), so that a build does not find those of one that quantised otherwise. */
#define QUANTIZE_VERSION "2"

/* A part of a resident tensor: rows of a checkpoint tensor copied, or a constant computed by the
 * model layer. */
struct weight_source {
    const char *tensor; /* checkpoint name; NULL: a constant, `constant` holds the bytes */
    const void *constant;
    uint64_t offset, bytes; /* where in the resident tensor */
    /* Not 0: the checkpoint stores matrices [rows, columns] that are kept transposed, as [columns,
     * rows]. */
    uint32_t rows, columns;
    /* Of a quantised tensor: how stored bytes become kept ones; see model/quant/convert.h. */
    uint8_t convert, size;
    uint32_t row_bytes, group, block_rows;
    /* Name of the tensor of group numbers by which columns are sorted, or NULL. */
    const char *order;
    /* Of one that is quantised while it is loaded: block_rows rows of each matrix that is stored
     * transposed, and the scales found with its codes. */
    struct quant_memo *memo;
    /* Of some rows of a stored matrix, from `from_row` on: its values, and of those how many stand
     * before them. whole 0: the part is all of the tensor. */
    uint64_t whole, before;
    uint32_t from_row;
    uint32_t block_columns; /* of a matrix stored in blocks and kept transposed */
};

/*
 * A resident tensor: fused QKV and gate+up are one tensor with several sources, experts are
 * stacked. A quantised one (quant not EMBER_QUANT_NONE) is codes in rows of row_bytes, then scales,
 * zero points and the order of columns, each where its offset says; what they mean is in
 * ember/op.h. Its sources are those of the codes of each part, of the scales of each part, and so
 * on. Sources know nothing of tiles: their offsets are those of rows behind one another, and
 * weight_run_read puts the rows where the layout has them.
 */
struct weight {
    const char *name; /* "layers.3.qkv", "embed", "rope.0" */
    uint8_t dtype, rank;
    uint8_t quant, scale_dtype;           /* enum ember_quant; of the scales */
    uint8_t layout;                       /* enum ember_layout, of codes, scales and zero points */
    uint32_t dim[3];                      /* of the values, not of the codes */
    uint64_t offset, bytes;               /* in the weights arena; offset is a multiple of 64 */
    uint64_t row_bytes;                   /* from one row of dim[rank - 1] values to the next */
    uint32_t group, groups;               /* values a scale covers; scales a row */
    uint64_t scale_at, zero_at, order_at; /* from `offset` on; 0: none. order: i32 [parts, K] */
    bool made;                            /* quantised while it is loaded, not by the checkpoint */
    uint32_t first_source, n_sources;
};

struct weights_layout {
    uint64_t bytes;
    uint32_t n_weights, n_sources;
    const struct weight *weights; /* in arena order: embedding, layers in order, head */
    const struct weight_source *sources;
    struct digest digest; /* of the checkpoint's bytes; set by the loader, zero before */
};

/*
 * Where each tensor goes; checks that every one is there with the right shape and dtype (naming
 * file and tensor). rules, if not NULL, say which matrices are quantised while they are loaded.
 * Eligible are matrices that are multiplied with, and a tied embedding; routers, gates of a shared
 * expert, norms, biases and embeddings that are only looked up stay as they are. -ENOTSUP: the
 * checkpoint is quantised already, or a rule that matches nothing.
 */
int model_layout(const struct model *model, const struct checkpoint *checkpoint,
                 const struct quantize_rules *rules, struct weights_layout **ret,
                 struct error *err);
void weights_layout_free(struct weights_layout *layout);
DEFINE_CLEANUP(struct weights_layout *, weights_layout_free)
/* Whether some of the weights are quantised while they are loaded. */
bool weights_layout_made(const struct weights_layout *layout);

/*
 * What KV_AUTO is in this model, once a layout says how its weights are kept: bf16 where some of
 * them are quantised here, whose own error is far beyond that of K and V in bf16
 * (docs/performance.md, Quantising); else f32, which it is before. Models of manifest_read know.
 */
void model_settle_kv(struct model *model, const struct weights_layout *layout);

/* What quantising did to a resident tensor: sums over its values, so that tensors can be added up.
 */
struct weight_error {
    double error, power; /* of squared differences, of squared values */
};
/* Reads and quantises a tensor with `made` once more; the others are -EINVAL. */
int weight_quantise_error(const struct checkpoint *checkpoint, const struct weights_layout *layout,
                          uint32_t weight, struct weight_error *ret, struct error *err);

/*
 * Reads bytes [first, first + n) of a source, in rows: from the checkpoint, transposed where they
 * are kept so, or from the constant. first and n are multiples of an element's size.
 */
int weight_source_read(const struct checkpoint *checkpoint, const struct weight *weight,
                       const struct weight_source *source, uint64_t first, void *to, size_t n,
                       struct error *err);

/*
 * A run: consecutive bytes of the arena that are read in one go. Of a weight in rows they are part
 * of a source, of one in tiles some panels of its codes, scales or zero points.
 */
struct weight_run {
    const struct weight *weight;
    const struct weight_source *source; /* NULL: panels */
    uint64_t first;                     /* byte of the source, or panel */
    uint64_t to;                        /* in the arena */
    size_t bytes;
    uint32_t panels;
    uint8_t piece; /* of a weight in tiles: 0 codes, 1 scales, 2 zero points */
};

/*
 * Cuts a layout into runs of about `bytes` bytes, in arena order; what no run covers is padding,
 * and zero. The largest run may be longer: a panel is not cut. Caller frees *ret. -ENOMEM.
 */
int weights_layout_runs(const struct weights_layout *layout, size_t bytes, struct weight_run **ret,
                        size_t *ret_n, struct error *err);

/* Fills run->bytes bytes. The loader's one way to the bytes. */
int weight_run_read(const struct checkpoint *checkpoint, const struct weights_layout *layout,
                    const struct weight_run *run, void *to, struct error *err);

/* ---- plans ---- */

struct plan_request {
    uint32_t tokens, seqs, rows; /* the bucket: T, S, R */
    bool taps;                   /* copy hidden states 0..L to the IO arena (verify) */
    enum ember_dtype kv;         /* what K and V are kept in: EMBER_F32 (0), _BF16, _F16 or _I8 */
};

/* P, the pages a sequence may have, is that of max_positions. The plan passes plan_check. */
int model_plan(const struct model *model, const struct weights_layout *layout,
               const struct plan_request *request, struct plan **ret, struct error *err);

/* ---- the manifest ---- */

/* Appends config text, layout (without constants' bytes) and digest, with magic, version, length
 * and checksum. */
int manifest_write(const char *config, size_t config_len, const char *source_dir,
                   const struct weights_layout *layout, struct buffer *out, struct error *err);

/* Checks everything; *ret_dir (may be NULL) is the checkpoint's folder, for its tokenizer; caller
 * frees. */
int manifest_read(const void *data, size_t len, struct model **ret_model,
                  struct weights_layout **ret_layout, char **ret_dir, struct error *err);
/* The config text alone, NUL-terminated; the caller frees. */
int manifest_config(const void *data, size_t len, char **ret, size_t *ret_len, struct error *err);

#endif
