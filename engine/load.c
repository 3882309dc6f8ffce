/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loading a checkpoint. The layout is cut into chunks (runs of model/model.h), and chunks that
 * begin in the same huge page are one thread's. The digest of the weights is the digest of the
 * chunks' digests in order: the same for any number of threads.
 */
#include "engine/load.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/mem.h"
#include "engine/load_private.h"
#include "engine/packs.h"
#include "model/quant/convert.h"
#include "model/pack/pack.h"

#define CHUNK_BYTES (512u * 1024) /* fits the second-level cache, twice */

struct load {
    const struct checkpoint *checkpoint;
    const struct weights_layout *layout;
    struct weight_run *chunks;
    struct digest *digests;
    size_t n_chunks, longest;
};

void loaded_close(struct loaded *loaded)
{
    loaded->weights = fd_close(loaded->weights);
    loaded->manifest = fd_close(loaded->manifest);
}

/* ---- what every load does ---- */

static int write_manifest(const struct loading *loading, int *ret_fd, struct error *err)
{
    _cleanup_(buffer_free) struct buffer bytes = {0};

    int r = manifest_write(loading->config, loading->config_len, loading->dir, loading->layout,
                           &bytes, err);
    if (r < 0)
        return r;
    _cleanup_fd_ int fd = memfd_create("ember-manifest", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return error_sys(err, errno, "memfd for the manifest");
    r = fd_write_all(fd, bytes.data, bytes.len, "manifest", err);
    if (r == 0 &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) < 0)
        r = error_sys(err, errno, "sealing the manifest");
    if (r == 0)
        *ret_fd = TAKE_FD(fd);
    return r;
}

/* Those who cannot attach early attach later: nothing here fails the load. */
static void tell_attachable(struct loading *loading)
{
    const struct load_options *options = loading->options;
    _cleanup_fd_ int weights = -1, manifest = -1;

    if (!options->attachable || filling_create(&loading->filling, NULL) < 0 ||
        resident_share_early(loading->resident, &weights, NULL) < 0 ||
        write_manifest(loading, &manifest, NULL) < 0)
        return;
    options->attachable(options->ctx, weights, manifest, filling_fd(loading->filling));
}

int loading_begin(struct loading *loading, const struct model *model, struct error *err)
{
    const struct load_options *options = loading->options;
    int r = 0;

    if (options->admit)
        r = options->admit(options->ctx, model_info(model), loading->layout->bytes, err);
    if (r == 0)
        r = resident_create("ember-weights", loading->layout->bytes, &loading->resident, err);
    if (r == 0)
        tell_attachable(loading);
    return r;
}

int loading_end(struct loading *loading, struct loaded *ret, struct error *err)
{
    _cleanup_fd_ int weights = -1, manifest = -1;

    int r = resident_seal(loading->resident, err);
    if (r == 0 && (weights = fcntl(resident_fd(loading->resident), F_DUPFD_CLOEXEC, 0)) < 0)
        r = error_sys(err, errno, "descriptor of the weights");
    if (r == 0)
        r = write_manifest(loading, &manifest, err);
    if (r < 0)
        return r;
    if (loading->filling)
        filling_done(loading->filling, &loading->layout->digest);
    ret->weights = TAKE_FD(weights);
    ret->manifest = TAKE_FD(manifest);
    ret->bytes = loading->layout->bytes;
    ret->digest = loading->layout->digest;
    ret->ms = clock_ms_since(loading->start_ns);
    return 0;
}

void loading_clear(struct loading *loading)
{
    if (loading->filling)
        filling_fail(loading->filling); /* says nothing when it is done */
    filling_free(loading->filling);
    resident_free(loading->resident);
}

/* ---- chunks ---- */

static int cut(struct load *load, struct error *err)
{
    int r = weights_layout_runs(load->layout, CHUNK_BYTES, &load->chunks, &load->n_chunks, err);

    if (r < 0)
        return r;
    for (size_t i = 0; i < load->n_chunks; i++)
        load->longest = MAX(load->longest, load->chunks[i].bytes);
    load->digests = mem_alloc(load->n_chunks, sizeof *load->digests);
    return load->digests ? 0 : error_set(err, ENOMEM, "no memory for %zu digests", load->n_chunks);
}

/* Chunks that begin in one block. The arena is there up to where the next item begins. */
static int make_items(const struct load *load, struct fill *fill, struct error *err)
{
    fill->items = mem_alloc(load->n_chunks, sizeof *fill->items);
    if (!fill->items)
        return error_set(err, ENOMEM, "no memory for a list of %zu chunks", load->n_chunks);
    for (size_t i = 0; i < load->n_chunks; i++) {
        const struct weight_run *chunk = &load->chunks[i];
        struct fill_item *item = fill->n_items ? &fill->items[fill->n_items - 1] : NULL;
        if (!item || item->at / FILL_BLOCK != chunk->to / FILL_BLOCK) {
            if (item)
                item->end = chunk->to;
            item = &fill->items[fill->n_items++];
            *item = (struct fill_item){.at = chunk->to, .first = i};
        }
        item->n++;
        item->bytes += chunk->bytes;
    }
    if (fill->n_items)
        fill->items[fill->n_items - 1].end = load->layout->bytes;
    return 0;
}

static int load_chunks(struct fill *fill, const struct fill_item *item, uint8_t *buffer,
                       struct error *err)
{
    struct load *load = fill->ctx;

    for (size_t i = item->first; i < item->first + item->n; i++) {
        const struct weight_run *chunk = &load->chunks[i];
        uint8_t *to = fill_place(fill, chunk->to, buffer);
        int r = weight_run_read(load->checkpoint, load->layout, chunk, to, err);
        if (r < 0)
            return r;
        load->digests[i] = digest_of(to, chunk->bytes);
        r = fill_put(fill, to, chunk->to, chunk->bytes, err);
        if (r < 0)
            return r;
    }
    return 0;
}

int load_range(const struct checkpoint *checkpoint, const struct weights_layout *layout,
               uint64_t at, uint64_t n, uint8_t *to, struct error *err)
{
    struct load load = {.checkpoint = checkpoint, .layout = layout};
    _cleanup_free_ uint8_t *buffer = NULL;
    int r = cut(&load, err);
    if (r == 0 && !(buffer = mem_alloc(load.longest, 1)))
        r = error_set(err, ENOMEM, "no memory for a read buffer");

    memset(to, 0, n);
    for (size_t i = 0; i < load.n_chunks && r == 0; i++) {
        const struct weight_run *chunk = &load.chunks[i];
        uint64_t first = MAX(chunk->to, at), last = MIN(chunk->to + chunk->bytes, at + n);
        if (first >= last)
            continue;
        r = weight_run_read(checkpoint, layout, chunk, buffer, err);
        if (r == 0)
            memcpy(to + (first - at), buffer + (first - chunk->to), last - first);
    }
    free(load.chunks);
    free(load.digests);
    return r;
}

static int fill_from_checkpoint(const struct checkpoint *checkpoint, struct loading *loading,
                                struct error *err)
{
    struct load load = {.checkpoint = checkpoint, .layout = loading->layout};
    struct fill fill = {.work = load_chunks,
                        .ctx = &load,
                        .options = loading->options,
                        .resident = loading->resident,
                        .filling = loading->filling};

    int r = cut(&load, err);
    fill.buffer_bytes = load.longest;
    if (r == 0)
        r = make_items(&load, &fill, err);
    if (r == 0)
        r = fill_run(&fill, err);
    if (r == 0)
        loading->layout->digest = digest_of(load.digests, load.n_chunks * sizeof *load.digests);
    free(fill.items);
    free(load.chunks);
    free(load.digests);
    return r;
}

/* ---- checkpoints ---- */

/* Whether any tensor is not kept as it is stored. Rows that only move, into tiles, do not count: a
 * pack would save a tenth of a load that the page cache feeds, and nothing of one from the disk. */
static bool converts(const struct weights_layout *layout)
{
    for (uint32_t i = 0; i < layout->n_sources; i++) {
        const struct weight_source *s = &layout->sources[i];
        if (s->columns || (s->convert != CONVERT_NONE && s->convert != CONVERT_COPY))
            return true;
    }
    return false;
}

static int load_opened(const struct checkpoint *checkpoint, const struct load_options *options,
                       struct loaded *ret, struct error *err)
{
    _cleanup_(model_freep) struct model *model = NULL;
    _cleanup_(quantize_rules_freep) struct quantize_rules *rules = NULL;
    _cleanup_(weights_layout_freep) struct weights_layout *layout = NULL;
    struct loading loading = {
        .options = options, .dir = checkpoint_dir(checkpoint), .start_ns = clock_ns()};
    struct loaded loaded = *ret;

    loading.config = checkpoint_config(checkpoint, &loading.config_len);
    _cleanup_free_ char *name = x_printf("%s/config.json", loading.dir);
    int r = model_from_config(loading.config, loading.config_len, name, &model, err);
    if (r == 0 && options->quant && *options->quant)
        r = quantize_rules_parse(options->quant, &rules, err);
    if (r == 0)
        r = model_layout(model, checkpoint, rules, &layout, err);
    loading.layout = layout;
    if (r == 0) {
        model_settle_kv(model, layout);
        r = loading_begin(&loading, model, err);
    }
    if (r == 0)
        r = fill_from_checkpoint(checkpoint, &loading, err);
    if (r == 0)
        r = loading_end(&loading, &loaded, err);
    loading_clear(&loading);
    if (r < 0)
        return r;
    loaded.converted = converts(layout);
    loaded.key = checkpoint_key(checkpoint);
    *ret = loaded;
    return 0;
}

int load_checkpoint(const char *dir, const struct load_options *options, struct loaded *ret,
                    struct error *err)
{
    _cleanup_(checkpoint_freep) struct checkpoint *checkpoint = NULL;
    struct loaded loaded = {.weights = -1, .manifest = -1};

    int r = checkpoint_open(dir, &checkpoint, err);
    if (r == 0)
        r = load_opened(checkpoint, options, &loaded, err);
    if (r == 0)
        *ret = loaded;
    return r;
}

/* ---- either ---- */

/*
 * The checkpoint's own pack, if there is one. What is wrong with it is no reason not to load: 1,
 * with a notice. Once memory has been admitted an error is final.
 */
static int try_pack(const struct checkpoint *checkpoint, const struct load_options *options,
                    struct loaded *ret, struct error *err)
{
    _cleanup_free_ char *path = packs_path(options->packs, checkpoint, options->quant);
    _cleanup_(pack_freep) struct pack *pack = NULL;
    struct error why = {0};

    if (access(path, F_OK) < 0)
        return 1;
    int r = pack_open(path, &pack, &why);
    if (r < 0) {
        snprintf(ret->notice, sizeof ret->notice, "%s", error_text(&why));
        if (r == -EBADMSG || r == -ESTALE)
            unlink(path); /* it is of no use to anybody, and another one will be written */
        return 1;
    }
    pack_free(TAKE(pack));
    packs_used(path);
    r = load_pack(path, options, ret, err);
    if (r == 0 && ret->repaired) /* a whole one is to be written */
        ret->converted = true;
    if (r == -EBADMSG || (r == 0 && ret->repaired)) /* the next load does without it */
        unlink(path);
    return r;
}

int load_model(const char *path, const struct load_options *options, struct loaded *ret,
               struct error *err)
{
    _cleanup_(checkpoint_freep) struct checkpoint *checkpoint = NULL;
    struct loaded loaded = {.weights = -1, .manifest = -1};

    if (pack_looks_like(path))
        return options->quant && *options->quant
                   ? error_set(err, EINVAL, "%s is a pack: it has been quantised, or not, for good",
                               path)
                   : load_pack(path, options, ret, err);
    int r = checkpoint_open(path, &checkpoint, err);
    if (r < 0)
        return r;
    r = options->packs && *options->packs ? try_pack(checkpoint, options, &loaded, err) : 1;
    if (r == 1)
        r = load_opened(checkpoint, options, &loaded, err);
    if (r == 0)
        *ret = loaded;
    return r;
}
