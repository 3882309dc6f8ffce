/* SPDX-License-Identifier: Apache-2.0 */
/* A manifest, as damaged or hostile as it may be: its checksum is made right first, so that the
 * rest is reached. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "model/model.h"

#define TOTAL_AT 8
#define CHECKSUM_AT 16
#define CHECKED_FROM 24

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct weights_layout *layout = NULL;
    struct model *model = NULL;
    struct error err = {0};
    char *dir = NULL;
    uint8_t *copy;
    if (manifest_read(data, size, &model, &layout, &dir, &err) == 0)
        goto done;
    if (size < CHECKED_FROM || !(copy = malloc(size)))
        return 0;
    memcpy(copy, data, size);
    uint64_t total, sum;
    memcpy(&total, copy + TOTAL_AT, 8);
    if (total >= CHECKED_FROM && total <= size) {
        sum = checksum_of(copy + CHECKED_FROM, total - CHECKED_FROM);
        memcpy(copy + CHECKSUM_AT, &sum, 8);
    }
    int r = manifest_read(copy, size, &model, &layout, &dir, &err);
    assert(r == 0 || err.text[0]);
    free(copy);
done:
    for (uint32_t i = 0; layout && i < layout->n_weights; i++)
        assert(layout->weights[i].offset + layout->weights[i].bytes <= layout->bytes);
    free(dir);
    weights_layout_free(layout);
    model_free(model);
    return 0;
}
