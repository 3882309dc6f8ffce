/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loading a pack: each segment is read where it belongs and checked there. A segment that is in the
 * page cache is read from it; one that is not is read past it (O_DIRECT), so that a load neither
 * waits for the copy nor drives out what others have there.
 */
#include "engine/load_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/fd.h"
#include "model/pack/pack.h"

#define PIECE (512u * 1024)     /* fits the second-level cache, twice */
#define PIECE_DIRECT (1u << 20) /* enough for a disk to be busy with */

struct pack_load {
    const struct pack *pack;
    const char *path;
    int direct; /* the file again, O_DIRECT; -1: not here */
    pthread_mutex_t lock;
    struct checkpoint *checkpoint; /* opened when a segment is damaged, under the lock */
    struct loaded *result;
};

/* ---- reading ---- */

static bool cached(const struct pack *pack, uint64_t at)
{
    char byte;
    struct iovec one = {&byte, 1};

    return preadv2(pack_fd(pack), &one, 1, (off_t)at, RWF_NOWAIT) == 1;
}

static int read_piece(const struct pack_load *load, bool direct, uint64_t at, uint8_t *to, size_t n,
                      struct error *err)
{
    ssize_t r = direct ? pread(load->direct, to, n, (off_t)at) : -1;

    if (r == (ssize_t)n)
        return 0;
    return fd_pread_all(pack_fd(load->pack), to, n, at, load->path, err);
}

/*
 * Piece by piece, so that a piece is still in the processor's cache when it is digested and put in
 * its place. What is there is not to be believed before this has returned 0.
 */
static int read_segment(struct fill *fill, const struct fill_item *item, uint8_t *buffer,
                        struct error *err)
{
    const struct pack_load *load = fill->ctx;
    uint32_t i = (uint32_t)item->first;
    uint64_t from = pack_segment_file_at(load->pack, i);
    bool direct = load->direct >= 0 && item->bytes % 4096 == 0 && !cached(load->pack, from);
    size_t step = direct ? PIECE_DIRECT : PIECE;
    struct digest_state *state = digest_begin();
    int r = 0;

    for (uint64_t done = 0; done < item->bytes && r == 0; done += step) {
        size_t n = (size_t)MIN(item->bytes - done, step);
        uint8_t *to = fill_place(fill, item->at + done, buffer);
        r = read_piece(load, direct, from + done, to, n, err);
        if (r == 0 && !done && fault_hit(FAULT_PACK_READ))
            *to ^= 1;
        if (r == 0) {
            digest_update(state, to, n);
            r = fill_put(fill, to, item->at + done, n, err);
        }
    }
    struct digest found = digest_end(state);
    return r < 0 ? r : pack_segment_check(load->pack, i, &found, err);
}

/* ---- damage ---- */

/* The checkpoint that the pack was made from, unchanged: the pack's layout has its sources. */
static int open_source(struct pack_load *load, struct error *err)
{
    _cleanup_(checkpoint_freep) struct checkpoint *checkpoint = NULL;

    if (load->checkpoint)
        return 0;
    int r = checkpoint_open(pack_dir(load->pack), &checkpoint, err);
    if (r < 0)
        return r;
    struct digest key = checkpoint_key(checkpoint);
    if (!digest_equal(&key, &pack_info(load->pack)->key))
        return error_set(err, ESTALE, "%s has changed since it was packed", pack_dir(load->pack));
    load->checkpoint = TAKE(checkpoint);
    return 0;
}

/* Makes segment i from the checkpoint; `why` is what was wrong with it. */
static int make_again(struct pack_load *load, uint32_t i, uint8_t *to, const struct error *why,
                      struct error *err)
{
    struct error other = {0};
    uint32_t n = pack_segment_bytes(load->pack, i);

    pthread_mutex_lock(&load->lock);
    int r = open_source(load, &other);
    if (r == 0)
        r = load_range(load->checkpoint, pack_layout(load->pack), pack_segment_at(load->pack, i), n,
                       to, &other);
    if (r == 0) {
        struct digest found = digest_of(to, n);
        r = pack_segment_check(load->pack, i, &found, NULL) < 0
                ? error_set(&other, ESTALE, "%s gives other bytes", pack_dir(load->pack))
                : 0;
    }
    if (r == 0) {
        load->result->repaired++;
        snprintf(load->result->notice, sizeof load->result->notice, "%.160s; made again from %.80s",
                 why->text, pack_dir(load->pack));
    }
    pthread_mutex_unlock(&load->lock);
    if (r == 0)
        return 0;
    return error_set(err, EBADMSG, "%s; it cannot be made again: %s", why->text,
                     error_text(&other));
}

static int load_segment(struct fill *fill, const struct fill_item *item, uint8_t *buffer,
                        struct error *err)
{
    struct error why = {0};
    uint8_t *to;

    int r = read_segment(fill, item, buffer, &why);
    if (r == 0)
        return 0;
    to = fill_place(fill, item->at, buffer);
    r = make_again(fill->ctx, (uint32_t)item->first, to, &why, err);
    return r < 0 ? r : fill_put(fill, to, item->at, (size_t)item->bytes, err);
}

/* ---- the load ---- */

static int fill_from_pack(struct pack_load *load, struct loading *loading, struct error *err)
{
    const struct pack_info *info = pack_info(load->pack);
    struct fill fill = {.work = load_segment,
                        .buffer_bytes = info->segment_bytes,
                        .ctx = load,
                        .options = loading->options,
                        .resident = loading->resident,
                        .filling = loading->filling,
                        .n_items = info->segments};

    fill.items = mem_alloc(info->segments, sizeof *fill.items);
    if (!fill.items)
        return error_set(err, ENOMEM, "%s: no memory for %u segments", load->path, info->segments);
    for (uint32_t i = 0; i < info->segments; i++) {
        uint64_t at = pack_segment_at(load->pack, i), n = pack_segment_bytes(load->pack, i);
        fill.items[i] = (struct fill_item){.at = at, .bytes = n, .end = at + n, .first = i};
    }
    int r = fill_run(&fill, err);
    free(fill.items);
    return r;
}

int load_pack(const char *path, const struct load_options *options, struct loaded *ret,
              struct error *err)
{
    _cleanup_(pack_freep) struct pack *pack = NULL;
    struct loaded loaded = {.weights = -1, .manifest = -1, .from_pack = true};
    struct loading loading = {.options = options, .start_ns = clock_ns()};

    int r = pack_open(path, &pack, err);
    if (r < 0)
        return r;
    _cleanup_free_ char *dir = pack_tokenizer_dir(pack, path);
    struct pack_load load = {.pack = pack,
                             .path = path,
                             .direct = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT),
                             .result = &loaded};
    pthread_mutex_init(&load.lock, NULL);
    loading.config = pack_config(pack, &loading.config_len);
    loading.dir = dir;
    loading.layout = (struct weights_layout *)pack_layout(pack); /* its digest is the pack's */
    loaded.key = pack_info(pack)->key;
    snprintf(loaded.recipe, sizeof loaded.recipe, "%s", pack_info(pack)->recipe);
    r = loading_begin(&loading, pack_model(pack), err);
    if (r == 0)
        r = fill_from_pack(&load, &loading, err);
    if (r == 0)
        r = loading_end(&loading, &loaded, err);
    loading_clear(&loading);
    checkpoint_free(load.checkpoint);
    fd_close(load.direct);
    pthread_mutex_destroy(&load.lock);
    if (r == 0)
        *ret = loaded;
    return r;
}
