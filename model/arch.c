/* SPDX-License-Identifier: Apache-2.0 */
#include "model/arch.h"

#include <string.h>

static const struct arch *const architectures[] = {
#define X(name) &arch_##name,
    ARCHITECTURES(X)
#undef X
};

const struct arch *arch_find(const char *model_type)
{
    for (size_t i = 0; i < ARRAY_LEN(architectures); i++) {
        const struct arch *a = architectures[i];
        if (!strcmp(a->model_type, model_type) || (a->alias && !strcmp(a->alias, model_type)))
            return a;
    }
    return NULL;
}

const char *arch_list(void)
{
#define X(name) " " #name
    return &(ARCHITECTURES(X))[1];
#undef X
}
