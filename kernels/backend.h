/* SPDX-License-Identifier: Apache-2.0 */
/* Finding a backend: the built-in CPU backend by name, any other from a shared object. */
#ifndef EMBER_KERNELS_BACKEND_H
#define EMBER_KERNELS_BACKEND_H

#include <ember/backend.h>

#include "base/error.h"

/* The built-in CPU backend (kernels/cpu). */
const struct ember_backend *cpu_backend(void);

/*
 * "cpu", or the path of a plug-in (anything with a '/' in it). A plug-in is opened once and never
 * closed. -ESTALE: built for another ABI version; -EINVAL: a mandatory slot is missing (named).
 */
int backend_find(const char *name, const struct ember_backend **ret, struct error *err);

/* Turns a slot's failure into ours: "NAME backend: TEXT". Returns r. */
int backend_fail(const struct ember_backend *backend, int r,
                 const struct ember_backend_error *error, struct error *err);

#endif
