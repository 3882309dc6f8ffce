/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weights in tiles (ember/op.h, layout TILES): which are, and how rows become panels while they are
 * loaded. All that is quantised, and bf16 matrices that are only multiplied with, or are the head
 * as well; other tables of embeddings are read by rows and stay so.
 */
#include "model/model_private.h"

#include <errno.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define WORD 4

void weight_choose_layout(const struct model *model, uint32_t slot, struct weight *w)
{
    bool multiplied = model->slots[slot].linear || (slot == model->head && w->rank == 2);
    w->layout = EMBER_LAYOUT_ROWS;
    if (w->quant == EMBER_QUANT_NONE && !(w->dtype == EMBER_BF16 && multiplied))
        return;
    w->layout = EMBER_LAYOUT_TILES;
    w->row_bytes = size_align(w->row_bytes, EMBER_TILE_LINE);
}

/* Matrices, rows of one as it is and as it is kept. */
static uint64_t matrices(const struct weight *w)
{
    return w->rank > 2 ? w->dim[0] : 1;
}
static uint64_t matrix_rows(const struct weight *w)
{
    return w->rank > 2 ? w->dim[1] : w->rank > 1 ? w->dim[0] : 1;
}
static uint64_t kept_rows(const struct weight *w)
{
    uint64_t n = matrix_rows(w);
    return w->layout == EMBER_LAYOUT_TILES ? size_align(n, EMBER_PANEL) : n;
}

uint64_t weight_rows(const struct weight *w)
{
    return matrices(w) * kept_rows(w);
}

/* A piece of a weight: rows of `row` bytes, kept as `kept`, of which `unit` bytes stay together. */
struct piece {
    uint64_t at, row, kept;
    uint32_t unit;
};

static bool piece_of(const struct weight *w, uint8_t index, struct piece *ret)
{
    uint64_t k = w->dim[w->rank - 1], size = index == 1 ? dtype_size(w->scale_dtype) : 1;
    bool four = w->quant == EMBER_QUANT_INT4 || w->quant == EMBER_QUANT_FP4;
    if (index == 0) {
        uint64_t row = four ? size_align(k, 32) / 2 : k * dtype_size(w->dtype);
        *ret = (struct piece){0, row, w->row_bytes, WORD};
        return true;
    }
    *ret = (struct piece){index == 1 ? w->scale_at : w->zero_at, w->groups * size, w->groups * size,
                          (uint32_t)size};
    return ret->at != 0;
}

/* ---- runs ---- */

struct runs {
    struct weight_run *list; /* NULL: counted only */
    size_t n, bytes;
};

static void add_run(struct runs *runs, struct weight_run run)
{
    if (runs->list)
        runs->list[runs->n] = run;
    runs->n++;
}

static void cut_source(struct runs *runs, const struct weight *w, const struct weight_source *s)
{
    for (uint64_t at = 0; at < s->bytes; at += runs->bytes)
        add_run(runs, (struct weight_run){.weight = w,
                                          .source = s,
                                          .first = at,
                                          .to = w->offset + s->offset + at,
                                          .bytes = (size_t)MIN(s->bytes - at, runs->bytes)});
}

static void cut_panels(struct runs *runs, const struct weight *w, uint8_t index,
                       const struct piece *piece)
{
    uint64_t panel = piece->kept * EMBER_PANEL, all = weight_rows(w) / EMBER_PANEL;
    uint64_t step = MAX(runs->bytes / panel, 1);
    for (uint64_t at = 0; at < all; at += step) {
        uint32_t n = (uint32_t)MIN(all - at, step);
        add_run(runs, (struct weight_run){.weight = w,
                                          .first = at,
                                          .to = w->offset + piece->at + at * panel,
                                          .bytes = (size_t)(n * panel),
                                          .panels = n,
                                          .piece = index});
    }
}

static void cut(struct runs *runs, const struct weights_layout *layout)
{
    for (uint32_t i = 0; i < layout->n_weights; i++) {
        const struct weight *w = &layout->weights[i];
        struct piece piece;
        for (uint8_t p = 0; w->layout == EMBER_LAYOUT_TILES && p < 3; p++)
            if (piece_of(w, p, &piece))
                cut_panels(runs, w, p, &piece);
        for (uint32_t s = w->first_source; s < w->first_source + w->n_sources; s++)
            if (w->layout != EMBER_LAYOUT_TILES ||
                (w->order_at && layout->sources[s].offset >= w->order_at))
                cut_source(runs, w, &layout->sources[s]);
    }
}

int weights_layout_runs(const struct weights_layout *layout, size_t bytes, struct weight_run **ret,
                        size_t *ret_n, struct error *err)
{
    struct runs runs = {.bytes = bytes};
    cut(&runs, layout);
    runs.list = mem_alloc(runs.n, sizeof *runs.list);
    if (!runs.list)
        return error_set(err, ENOMEM, "no memory for a list of %zu pieces", runs.n);
    *ret_n = runs.n;
    runs.n = 0;
    cut(&runs, layout);
    *ret = runs.list;
    return 0;
}

/* ---- rows to panels ---- */

/* Rows [first, first + n), counted over all matrices without padding, of a piece. */
static int read_rows(const struct checkpoint *checkpoint, const struct weights_layout *layout,
                     const struct weight *w, const struct piece *piece, uint64_t first, uint64_t n,
                     uint8_t *to, struct error *err)
{
    uint64_t at = first * piece->row, end = at + n * piece->row;
    for (uint32_t s = w->first_source; s < w->first_source + w->n_sources && at < end; s++) {
        const struct weight_source *source = &layout->sources[s];
        uint64_t from = source->offset - piece->at, part;
        int r;
        if (source->offset < piece->at || at < from || at >= from + source->bytes)
            continue;
        part = MIN(end, from + source->bytes) - at;
        r = weight_source_read(checkpoint, w, source, at - from, to, (size_t)part, err);
        if (r < 0)
            return r;
        to += part;
        at += part;
    }
    return at == end ? 0 : error_set(err, EINVAL, "%s: no source for its last rows", w->name);
}

/* 16 rows of `row` bytes, of which `n` are there, to a panel of `words` words a row. */
static void panel_of_words(const uint8_t *rows, size_t row, size_t n, size_t words, uint8_t *to)
{
    size_t whole = row / WORD, j = 0;
#if defined(__SSE2__)
    for (; n == EMBER_PANEL && j + 4 <= whole; j += 4)
        for (size_t q = 0; q < EMBER_PANEL; q += 4) {
            const uint8_t *at = rows + q * row + j * WORD;
            __m128i a = _mm_loadu_si128((const void *)at);
            __m128i b = _mm_loadu_si128((const void *)(at + row));
            __m128i c = _mm_loadu_si128((const void *)(at + 2 * row));
            __m128i d = _mm_loadu_si128((const void *)(at + 3 * row));
            __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
            __m128i ab2 = _mm_unpackhi_epi32(a, b), cd2 = _mm_unpackhi_epi32(c, d);
            uint8_t *out = to + j * EMBER_TILE_LINE + q * WORD;
            _mm_storeu_si128((void *)out, _mm_unpacklo_epi64(ab, cd));
            _mm_storeu_si128((void *)(out + EMBER_TILE_LINE), _mm_unpackhi_epi64(ab, cd));
            _mm_storeu_si128((void *)(out + 2 * EMBER_TILE_LINE), _mm_unpacklo_epi64(ab2, cd2));
            _mm_storeu_si128((void *)(out + 3 * EMBER_TILE_LINE), _mm_unpackhi_epi64(ab2, cd2));
        }
#endif
    for (; j < words; j++)
        for (size_t r = 0; r < EMBER_PANEL; r++) {
            size_t left = j * WORD < row && r < n ? MIN(row - j * WORD, WORD) : 0;
            uint8_t *out = to + j * EMBER_TILE_LINE + r * WORD;
            memset(out, 0, WORD);
            memcpy(out, rows + (left ? r * row + j * WORD : 0), left);
        }
}

/* The same for scales and zero points: elements of `unit` bytes. */
static void panel_of_units(const uint8_t *rows, size_t row, size_t n, size_t unit, uint8_t *to)
{
    for (size_t g = 0; g < row / unit; g++)
        for (size_t r = 0; r < EMBER_PANEL; r++) {
            uint8_t *out = to + (g * EMBER_PANEL + r) * unit;
            if (r < n)
                memcpy(out, rows + r * row + g * unit, unit);
            else
                memset(out, 0, unit);
        }
}

/* Panels of one matrix: rows [first, first + n) of all rows; the last panel may be filled up. */
static int read_panels(const struct checkpoint *checkpoint, const struct weights_layout *layout,
                       const struct weight *w, const struct piece *piece, uint64_t first,
                       uint64_t n, uint8_t *to, struct error *err)
{
    _cleanup_free_ uint8_t *rows = mem_alloc(n, piece->row);
    int r = rows ? read_rows(checkpoint, layout, w, piece, first, n, rows, err)
                 : error_set(err, ENOMEM, "%s: no memory for %llu rows", w->name,
                             (unsigned long long)n);
    for (uint64_t i = 0; r == 0 && i < n; i += EMBER_PANEL, to += piece->kept * EMBER_PANEL) {
        size_t here = (size_t)MIN(n - i, EMBER_PANEL);
        if (piece->unit == WORD && piece->at == 0)
            panel_of_words(rows + i * piece->row, piece->row, here, piece->kept / WORD, to);
        else
            panel_of_units(rows + i * piece->row, piece->row, here, piece->unit, to);
    }
    return r;
}

int weight_run_read(const struct checkpoint *checkpoint, const struct weights_layout *layout,
                    const struct weight_run *run, void *to, struct error *err)
{
    const struct weight *w = run->weight;
    uint64_t N = matrix_rows(w), per_matrix = kept_rows(w) / EMBER_PANEL;
    struct piece piece;
    uint8_t *at = to;
    if (run->source)
        return weight_source_read(checkpoint, w, run->source, run->first, to, run->bytes, err);
    piece_of(w, run->piece, &piece);
    for (uint64_t p = run->first, n; p < run->first + run->panels; p += n) {
        uint64_t e = p / per_matrix, row = p % per_matrix * EMBER_PANEL;
        n = MIN(run->first + run->panels - p, per_matrix - p % per_matrix);
        int r = read_panels(checkpoint, layout, w, &piece, e * N + row,
                            MIN(n * EMBER_PANEL, N - row), at, err);
        if (r < 0)
            return r;
        at += n * piece.kept * EMBER_PANEL;
    }
    return 0;
}
