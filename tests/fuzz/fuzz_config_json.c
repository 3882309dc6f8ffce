/* SPDX-License-Identifier: Apache-2.0 */
/* A config.json: whatever is accepted has a layout and a plan that passes its check. */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "model/model_private.h"

static void plan(const struct model *model)
{
    struct plan_request request = {.tokens = 16, .seqs = 2, .rows = 4, .taps = true};
    struct weights_layout *layout = NULL;
    struct plan *made = NULL;
    struct error err = {0};
    uint8_t *dtypes = mem_alloc(model->n_slots, 1);
    if (!dtypes)
        return;
    for (uint32_t i = 0; i < model->n_slots; i++)
        dtypes[i] = model->parts[model->slots[i].first_part].constant ? EMBER_F32 : EMBER_BF16;
    if (layout_make(model, dtypes, 0, &layout, &err) == 0) {
        int r = model_plan(model, layout, &request, &made, &err);
        assert(r == 0 || r == -EOVERFLOW || r == -ENOMEM);
    }
    plan_free(made);
    weights_layout_free(layout);
    free(dtypes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct model *model = NULL;
    struct error err = {0};
    if (model_from_config((const char *)data, size, "fuzz", &model, &err) < 0) {
        assert(err.text[0] && !model);
        return 0;
    }
    if (model->n_parts < 20000)
        plan(model);
    model_free(model);
    return 0;
}
