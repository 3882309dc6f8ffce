/* SPDX-License-Identifier: Apache-2.0 */
/* What loads of checkpoints and of packs share: filling memory by several threads. */
#ifndef EMBER_ENGINE_LOAD_PRIVATE_H
#define EMBER_ENGINE_LOAD_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "cache/filling.h"
#include "cache/resident.h"
#include "engine/load.h"
#include "model/checkpoint.h"

#define FILL_BLOCK (2 * MIB) /* a huge page: no two threads make one */

/* A piece of the arena that one thread fills. */
struct fill_item {
    uint64_t at, bytes; /* bytes: what counts as progress */
    uint64_t end;       /* the arena is there up to here when all items up to this one are done */
    size_t first, n;    /* the caller's */
};

struct fill {
    struct fill_item *items;
    size_t n_items;
    uint64_t total;
    size_t buffer_bytes; /* of each thread */
    /* Fills an item. `buffer` is the thread's, aligned to 4096. */
    int (*work)(struct fill *fill, const struct fill_item *item, uint8_t *buffer,
                struct error *err);
    void *ctx;
    const struct load_options *options;
    struct resident *resident;
    struct filling *filling; /* NULL: nobody looks */
    /* fill.c's own */
    bool *item_done;
    size_t first_open; /* item */
    atomic_size_t next;
    atomic_uint_fast64_t done;
    atomic_bool stop, small_pages;
    atomic_uint blocks, slow_blocks;
    uint64_t started_ns;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t running;
    struct error error; /* the first */
};

/* Fills everything; -ECANCELED when options->progress says so. */
int fill_run(struct fill *fill, struct error *err);
/* Where to put bytes for [at, at + n): the memory itself, or `buffer`. */
uint8_t *fill_place(struct fill *fill, uint64_t at, uint8_t *buffer);
/* Puts them there if they are in a buffer. */
int fill_put(struct fill *fill, const uint8_t *data, uint64_t at, size_t n, struct error *err);

/* A load as it is made ready: memory for `layout`, admitted, and told to those who may attach. */
struct loading {
    const char *config, *dir; /* borrowed */
    size_t config_len;
    struct weights_layout *layout; /* borrowed; its digest is set at the end */
    const struct load_options *options;
    struct resident *resident;
    struct filling *filling;
    uint64_t start_ns;
};
int loading_begin(struct loading *loading, const struct model *model, struct error *err);
/* Seals, publishes and fills *ret. */
int loading_end(struct loading *loading, struct loaded *ret, struct error *err);
/* Of a load that failed as well. */
void loading_clear(struct loading *loading);

/* Bytes [at, at + n) of the arena, made from a checkpoint of this layout. */
int load_range(const struct checkpoint *checkpoint, const struct weights_layout *layout,
               uint64_t at, uint64_t n, uint8_t *to, struct error *err);

#endif
