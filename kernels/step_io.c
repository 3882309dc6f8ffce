/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/step_io.h"

#include <errno.h>

#include <ember/op.h>

#include "base/mem.h"

#define STEP_IO_ALIGN 64
/* Kernels index rows and columns with 32 bits. */
#define STEP_DIM_MAX (UINT32_C(1) << 30)

/* Places `rows` x `cols` elements of `size` bytes at *at (aligned) and moves *at behind them. */
static bool place(uint64_t *at, uint64_t rows, uint64_t cols, uint64_t size, uint64_t *ret_offset)
{
    uint64_t bytes, start = size_align(*at, STEP_IO_ALIGN), end;
    if (!size_mul(rows, cols, &bytes) || !size_mul(bytes, size, &bytes) ||
        !size_add(start, bytes, &end) || end > INT64_MAX)
        return false;
    *ret_offset = start;
    *at = end;
    return true;
}

static int check_dim(const char *name, uint32_t value, struct error *err)
{
    if (value == 0 || value > STEP_DIM_MAX)
        return error_set(err, EINVAL, "step shape: %s is %u, not within 1..%u", name, value,
                         STEP_DIM_MAX);
    return 0;
}

static int check_shape(const struct step_shape *s, struct error *err)
{
    int r;
    if ((r = check_dim("tokens", s->tokens, err)) || (r = check_dim("seqs", s->seqs, err)) ||
        (r = check_dim("rows", s->rows, err)) || (r = check_dim("pages", s->pages, err)) ||
        (r = check_dim("vocab", s->vocab, err)))
        return r;
    if (s->taps &&
        ((r = check_dim("hidden", s->hidden, err)) || (r = check_dim("taps", s->taps, err))))
        return r;
    return 0;
}

int step_io_layout(const struct step_shape *shape, struct step_io *ret, struct error *err)
{
    struct step_io io = {.shape = *shape};
    uint64_t at = sizeof(struct ember_step_header), tapped;
    int r = check_shape(shape, err);
    if (r < 0)
        return r;
    if (!place(&at, shape->tokens, 1, 4, &io.tokens) ||
        !place(&at, shape->tokens, 1, 4, &io.positions) ||
        !place(&at, shape->tokens, 1, 4, &io.rope_len) ||
        !place(&at, shape->tokens, 1, 4, &io.seq_of) ||
        !place(&at, shape->tokens, 1, 4, &io.kv_slot) || !place(&at, shape->rows, 1, 4, &io.rows) ||
        !place(&at, shape->seqs, shape->pages, 4, &io.pages))
        goto overflow;
    io.inputs_end = at;
    if (!place(&at, shape->rows, 1, 4, &io.sampled) ||
        !place(&at, shape->rows, shape->vocab, 4, &io.logits) ||
        !size_mul(shape->taps, shape->tokens, &tapped) ||
        !place(&at, tapped, shape->taps ? shape->hidden : 0, 4, &io.hidden))
        goto overflow;
    io.bytes = size_align(at, STEP_IO_ALIGN);
    *ret = io;
    return 0;
overflow:
    return error_set(err, EOVERFLOW,
                     "step shape: %u tokens, %u sequences of %u pages, %u rows of %u logits do not "
                     "fit an IO arena",
                     shape->tokens, shape->seqs, shape->pages, shape->rows, shape->vocab);
}
