/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Internal to cache/: single flight. One leader per key among the threads of this process; the
 * leader then takes the key's byte in the lock file, which makes it the one builder on the host.
 */
#ifndef EMBER_CACHE_FLIGHT_H
#define EMBER_CACHE_FLIGHT_H

#include "cache/cache.h"

struct flights; /* of one cache */
struct flight;

/* lock_fd: of the file `lock` in dir, borrowed. NULL when memory is short. */
struct flights *flights_new(const char *dir, int lock_fd);
void flights_free(struct flights *flights);

struct flight_wait {
    const struct cache_key *key;
    const struct cache_build *build;
    uint64_t started_ns, told_ns;
    bool waited;
};

/*
 * Becomes the builder of wait->key, waiting within wait->build's bounds.
 *   0            *ret_flight is the caller's to end
 *   FLIGHT_AGAIN somebody else has finished: look in the cache again
 *   FLIGHT_VALUE a thread of this process built it but could not store it: *ret_value is a copy
 *   -ETIMEDOUT, -ECANCELED, or the error of the build that this thread waited for
 */
#define FLIGHT_AGAIN 1
#define FLIGHT_VALUE 2
int flight_begin(struct flights *flights, struct flight_wait *wait, struct flight **ret_flight,
                 struct cache_value *ret_value, struct error *err);

/*
 * Lets go of the key. result < 0: the waiting threads get *err. unstored (may be NULL): a value for
 * them that is not in the cache.
 */
void flight_end(struct flights *flights, struct flight *flight, int result,
                const struct cache_value *unstored, const struct error *err);

#endif
