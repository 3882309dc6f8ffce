/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Worker threads for what must not hold up the loop: parsing, templates, tokenizing, reading files.
 * A piece of work belongs to a worker between work_submit and its `done`, which runs on the loop.
 */
#ifndef EMBER_DAEMON_GATEWAY_WORK_H
#define EMBER_DAEMON_GATEWAY_WORK_H

#include <event2/event.h>

#include "base/error.h"

struct work_pool;

/* Embedded in what it is about. */
struct work {
    void (*run)(struct work *work);  /* on a worker */
    void (*done)(struct work *work); /* on the loop; may free it */
    struct work *next;
};

int work_pool_new(struct event_base *base, unsigned threads, struct work_pool **ret,
                  struct error *err);
void work_submit(struct work_pool *pool, struct work *work);
/* Waits for the workers; `done` is called for everything that was submitted. */
void work_pool_free(struct work_pool *pool);

#endif
