/* SPDX-License-Identifier: Apache-2.0 */
#include "base/digest.h"

#include <stdio.h>
#include <xxhash.h>

#include "base/mem.h"

struct digest_state {
    XXH3_state_t *xxh;
};

static struct digest canonical(XXH128_hash_t hash)
{
    struct digest d;
    XXH128_canonical_t c;

    XXH128_canonicalFromHash(&c, hash);
    memcpy(d.bytes, c.digest, sizeof d.bytes);
    return d;
}

struct digest digest_of(const void *data, size_t len)
{
    return canonical(XXH3_128bits(data, len));
}

uint64_t checksum_of(const void *data, size_t len)
{
    return XXH3_64bits(data, len);
}

struct digest_state *digest_begin(void)
{
    struct digest_state *state = x_alloc(sizeof *state);

    state->xxh = XXH3_createState();
    if (!state->xxh)
        abort();
    XXH3_128bits_reset(state->xxh);
    return state;
}

void digest_update(struct digest_state *state, const void *data, size_t len)
{
    XXH3_128bits_update(state->xxh, data, len);
}

void digest_update_string(struct digest_state *state, const char *s)
{
    uint64_t len = s ? strlen(s) : 0;

    digest_update(state, &len, sizeof len);
    digest_update(state, s ? s : "", len);
}

struct digest digest_end(struct digest_state *state)
{
    struct digest d = canonical(XXH3_128bits_digest(state->xxh));

    XXH3_freeState(state->xxh);
    free(state);
    return d;
}

char *digest_hex(const struct digest *d, char hex[DIGEST_HEX_SIZE])
{
    for (size_t i = 0; i < sizeof d->bytes; i++)
        sprintf(hex + 2 * i, "%02x", d->bytes[i]);
    return hex;
}
