/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How far resident memory has been filled, shared between the loader that fills it and those who
 * use it already: one page in a memfd (sealed against growing and shrinking).
 *
 * Memory is filled from its beginning. The loader publishes, with release order, that everything
 * below some byte is there, and at the end that all of it is, with the weights' digest; a reader
 * that has seen so with acquire order may read those bytes. A loader that died cannot say so:
 * whoever reaps it does (filling_fail), and waiters wake with an error.
 */
#ifndef EMBER_CACHE_FILLING_H
#define EMBER_CACHE_FILLING_H

#include <stdbool.h>
#include <stdint.h>

#include "base/digest.h"
#include "base/error.h"
#include "base/mem.h"

struct filling;

/* A new one, nothing there yet. */
int filling_create(struct filling **ret, struct error *err);
/* From a descriptor, which stays the caller's. -EBADMSG: not such a page. */
int filling_attach(int fd, struct filling **ret, struct error *err);
void filling_free(struct filling *filling);
DEFINE_CLEANUP(struct filling *, filling_free)
/* The descriptor of one that was created, still its own. */
int filling_fd(const struct filling *filling);

/* All bytes below `bytes` are there; never less than before. */
void filling_advance(struct filling *filling, uint64_t bytes);
/* All is there, and sealed. */
void filling_done(struct filling *filling, const struct digest *digest);
/* It never will be; nothing happens when it is done. */
void filling_fail(struct filling *filling);

enum filling_state { FILLING_GOES_ON, FILLING_DONE, FILLING_FAILED };
enum filling_state filling_state(const struct filling *filling);
/* Of the weights, once it is done. */
struct digest filling_digest(const struct filling *filling);
uint64_t filling_bytes(const struct filling *filling);

/*
 * Waits until everything below `bytes` is there (UINT64_MAX: until it is done). `stop` (may be
 * NULL) is asked now and then; true ends the wait by -ECANCELED. -EPIPE: it failed.
 */
int filling_wait(const struct filling *filling, uint64_t bytes, bool (*stop)(void *ctx), void *ctx,
                 struct error *err);

#endif
