/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The system's C compiler, for specialised kernels.
 *
 * EMBER_CC names it (a path or a name looked up in PATH; "never" switches compiling off); without
 * it `cc` is looked up. A compiler is identified without running it, so that a start from the cache
 * costs no exec: by the base name behind all symbolic links and the GNU build id of that file,
 * which every distribution's package carries and which is the same wherever the package is
 * installed; without one by its size and time of modification.
 */
#ifndef EMBER_KERNELS_CPU_COMPILE_H
#define EMBER_KERNELS_CPU_COMPILE_H

#include <stddef.h>

#include "base/error.h"

struct compiler {
    char path[256];
    char identity[160];
};

/* -ENOENT: there is no C compiler; -ENOTSUP: compiling is switched off. */
int compiler_find(struct compiler *ret, struct error *err);

#define COMPILE_TIMEOUT_MS 30000

/*
 * Builds a translation unit into a shared object without libraries. `options` are split at spaces;
 * the compiler is run without a shell, dies with the calling thread and is killed with all of its
 * helpers after timeout_ms (-ETIMEDOUT). A failure is -EIO with the first lines of what the
 * compiler said. The caller frees *ret_blob. Temporary files live in a private folder below TMPDIR
 * (or /tmp) that is removed before returning; those of builders that were killed are removed by the
 * next build.
 */
int compile_object(const struct compiler *compiler, const char *text, size_t len,
                   const char *options, int timeout_ms, void **ret_blob, size_t *ret_len,
                   struct error *err);

#endif
