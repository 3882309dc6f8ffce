/* SPDX-License-Identifier: Apache-2.0 */
/* A plug-in whose table is wrong in the way that EMBER_TEST_BROKEN names; for backend_find's test.
 */
#include <stdlib.h>
#include <string.h>

#include <ember/backend.h>

static void nothing(void)
{
}

__attribute__((visibility("default"))) const struct ember_backend *ember_backend_entry(void);
const struct ember_backend *ember_backend_entry(void)
{
    static struct ember_backend table;
    const char *how = getenv("EMBER_TEST_BROKEN");
    void (*slot)(void) = nothing;

    if (!strcmp(how, "null"))
        return NULL;
    memset(&table, 0, sizeof table);
    table.abi_version = EMBER_BACKEND_ABI_VERSION + !strcmp(how, "abi");
    table.struct_size = !strcmp(how, "short") ? 64 : sizeof table;
    table.name = !strcmp(how, "name") ? "" : "broken";
    for (size_t at = offsetof(struct ember_backend, device_open);
         at < offsetof(struct ember_backend, memory_export); at += sizeof slot)
        memcpy((char *)&table + at, &slot, sizeof slot);
    if (!strcmp(how, "slot"))
        table.copy_out = NULL;
    if (!strcmp(how, "group"))
        memcpy(&table.graph_launch, &slot, sizeof slot);
    return &table;
}
