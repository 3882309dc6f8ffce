/* SPDX-License-Identifier: Apache-2.0 */
/* A stored record as it may come out of a damaged store. */
#include <stdlib.h>
#include <string.h>

#include "cache/record.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct record record;
    struct error err = {0};
    struct cache_factor factor;
    size_t pos = 0;

    if (record_parse(data, size, &record, &err) < 0) {
        if (!err.text[0])
            abort();
        /* The factor walk takes hostile bytes by itself. */
        while (cache_factor_next(data, size, &pos, &factor))
            ;
        return 0;
    }
    unsigned n = 0;
    while (cache_factor_next(record.factors, record.factors_len, &pos, &factor))
        n += strlen(factor.name) > 0;
    if (n != record.n_factors ||
        (const uint8_t *)record.payload + record.payload_len != data + size)
        abort();
    record_check_payload(&record, &err);
    return 0;
}
