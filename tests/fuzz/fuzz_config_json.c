/* SPDX-License-Identifier: Apache-2.0 */
/* A config.json: whatever is accepted has a layout and a plan that passes its check. */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "model/model_private.h"

/* Plain forms, or quantised where the model's may be. */
static void fill_forms(const struct model *model, bool quantised, struct slot_form *forms)
{
    static const uint8_t dtypes[EMBER_QUANT_COUNT] = {[EMBER_QUANT_INT4] = EMBER_U8,
                                                      [EMBER_QUANT_FP4] = EMBER_U8,
                                                      [EMBER_QUANT_INT8] = EMBER_I8,
                                                      [EMBER_QUANT_FP8] = EMBER_F8};
    struct error err = {0};
    for (uint32_t i = 0; i < model->n_slots; i++) {
        const struct slot *slot = &model->slots[i];
        forms[i] = (struct slot_form){
            .dtype = model->parts[slot->first_part].constant ? EMBER_F32 : EMBER_BF16};
        for (uint8_t q = 1; quantised && q < EMBER_QUANT_COUNT; q++)
            for (uint8_t flags = 0; flags < 4; flags++) {
                struct slot_form form = {dtypes[q], q, q == EMBER_QUANT_FP4 ? EMBER_U8 : EMBER_F16,
                                         flags};
                if (quant_check(model, slot, &form, &err) == 0)
                    forms[i] = form;
            }
    }
}

static void plan(const struct model *model, bool quantised)
{
    struct plan_request request = {.tokens = 16, .seqs = 2, .rows = 4, .taps = true};
    struct weights_layout *layout = NULL;
    struct plan *made = NULL;
    struct error err = {0};
    struct slot_form *forms = mem_alloc(model->n_slots, sizeof *forms);
    if (!forms)
        return;
    fill_forms(model, quantised, forms);
    if (layout_make(model, forms, 0, &layout, &err) == 0) {
        int r = model_plan(model, layout, &request, &made, &err);
        assert(r == 0 || r == -EOVERFLOW || r == -ENOMEM);
    }
    plan_free(made);
    weights_layout_free(layout);
    free(forms);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct model *model = NULL;
    struct error err = {0};
    if (model_from_config((const char *)data, size, "fuzz", &model, &err) < 0) {
        assert(err.text[0] && !model);
        return 0;
    }
    if (model->n_parts < 20000) {
        plan(model, false);
        plan(model, true);
    }
    model_free(model);
    return 0;
}
