/* SPDX-License-Identifier: Apache-2.0 */
/* Reference data: $EMBER_SHARED, or ../shared beside the source root; tests without it skip. */
#ifndef EMBER_TESTS_SHARED_DIR_H
#define EMBER_TESTS_SHARED_DIR_H

#include <stdlib.h>
#include <unistd.h>

#include "base/mem.h"

/* A path below it, or NULL when it is not there. The caller frees. */
static inline char *shared_path(const char *below)
{
    const char *root = getenv("EMBER_SHARED");
    char *path =
        root ? x_printf("%s/%s", root, below) : x_printf(SOURCE_ROOT "/../shared/%s", below);
    if (access(path, R_OK) == 0)
        return path;
    free(path);
    return NULL;
}

#endif
