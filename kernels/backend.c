/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/backend.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "base/mem.h"

/* The plug-ins opened so far, never closed: objects of theirs may live anywhere. */
struct plugin {
    struct plugin *next;
    char *path;
    struct ember_backend table; /* slots beyond the plug-in's struct_size are NULL */
};
static struct plugin *plugins;
static pthread_mutex_t plugins_lock = PTHREAD_MUTEX_INITIALIZER;

#define SLOT(name)                                                                                 \
    {                                                                                              \
#name, offsetof(struct ember_backend, name)                                                \
    }
struct slot {
    const char *name;
    size_t at;
};
static const struct slot MANDATORY[] = {
    SLOT(device_open),   SLOT(device_close), SLOT(device_info),    SLOT(memory_alloc),
    SLOT(memory_import), SLOT(memory_free),  SLOT(memory_address), SLOT(queue_create),
    SLOT(queue_free),    SLOT(queue_sync),   SLOT(copy_in),        SLOT(copy_out),
    SLOT(lower),         SLOT(kernel_find),  SLOT(launch),
};
/* Optional, but all of a group or none. */
static const struct slot MODULES[] = {SLOT(kernel_source), SLOT(kernel_compile), SLOT(module_load),
                                      SLOT(module_find), SLOT(module_free)};
static const struct slot GRAPHS[] = {SLOT(graph_instantiate), SLOT(graph_launch), SLOT(graph_free)};

/* Every slot is a function pointer, all of one size on any platform that has dlsym. */
static bool has(const struct ember_backend *table, const struct slot *slot)
{
    void (*f)(void);
    memcpy(&f, (const char *)table + slot->at, sizeof f);
    return f != NULL;
}

static const char *first_missing(const struct ember_backend *table, const struct slot *slots,
                                 size_t n, size_t *ret_present)
{
    const char *missing = NULL;

    *ret_present = 0;
    for (size_t i = 0; i < n; i++) {
        if (has(table, &slots[i]))
            ++*ret_present;
        else if (!missing)
            missing = slots[i].name;
    }
    return missing;
}

static int check_slots(const char *path, const struct ember_backend *table, struct error *err)
{
    const char *missing;
    size_t present;

    missing = first_missing(table, MANDATORY, ARRAY_LEN(MANDATORY), &present);
    if (missing)
        return error_set(err, EINVAL, "%s: the mandatory slot %s is missing", path, missing);
    missing = first_missing(table, MODULES, ARRAY_LEN(MODULES), &present);
    if (missing && present)
        return error_set(err, EINVAL, "%s: the slot %s is missing beside its group", path, missing);
    missing = first_missing(table, GRAPHS, ARRAY_LEN(GRAPHS), &present);
    if (missing && present)
        return error_set(err, EINVAL, "%s: the slot %s is missing beside its group", path, missing);
    return 0;
}

static int check_table(const char *path, const struct ember_backend *from,
                       struct ember_backend *ret, struct error *err)
{
    if (!from)
        return error_set(err, EINVAL, "%s: %s returned nothing", path, EMBER_BACKEND_ENTRY);
    if (from->abi_version != EMBER_BACKEND_ABI_VERSION)
        return error_set(err, ESTALE,
                         "%s: built for backend ABI %u, this program has %d; rebuild the plug-in",
                         path, from->abi_version, EMBER_BACKEND_ABI_VERSION);
    if (from->struct_size < offsetof(struct ember_backend, memory_export))
        return error_set(err, EINVAL, "%s: its table has %u bytes, the mandatory part has %zu",
                         path, from->struct_size, offsetof(struct ember_backend, memory_export));
    memset(ret, 0, sizeof *ret);
    memcpy(ret, from, MIN(from->struct_size, sizeof *ret));
    if (!ret->name || !*ret->name)
        return error_set(err, EINVAL, "%s: the backend has no name", path);
    return check_slots(path, ret, err);
}

static int plugin_open(const char *path, struct plugin *plugin, struct error *err)
{
    const struct ember_backend *(*entry)(void);
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const char *text;
    int r;

    if (!handle) {
        text = dlerror();
        return error_set(err, ENOENT, "backend plug-in: %s", text ? text : path);
    }
    *(void **)&entry = dlsym(handle, EMBER_BACKEND_ENTRY);
    if (!entry)
        r = error_set(err, EINVAL, "%s: no backend plug-in, it lacks %s", path,
                      EMBER_BACKEND_ENTRY);
    else
        r = check_table(path, entry(), &plugin->table, err);
    if (r < 0)
        dlclose(handle); /* nothing of it has run but its entry */
    return r;
}

static int plugin_find(const char *path, const struct ember_backend **ret, struct error *err)
{
    struct plugin *p;
    int r;

    for (p = plugins; p; p = p->next) {
        if (!strcmp(p->path, path)) {
            *ret = &p->table;
            return 0;
        }
    }
    p = x_alloc(sizeof *p);
    r = plugin_open(path, p, err);
    if (r < 0) {
        free(p);
        return r;
    }
    p->path = x_strdup(path);
    p->next = plugins;
    plugins = p;
    *ret = &p->table;
    return 0;
}

int backend_find(const char *name, const struct ember_backend **ret, struct error *err)
{
    int r;

    if (!strcmp(name, "cpu")) {
        *ret = cpu_backend();
        return 0;
    }
    if (!strchr(name, '/'))
        return error_set(err, ENOENT,
                         "no backend \"%s\": give \"cpu\" or the path of a plug-in (with a '/')",
                         name);
    pthread_mutex_lock(&plugins_lock);
    r = plugin_find(name, ret, err);
    pthread_mutex_unlock(&plugins_lock);
    return r;
}

int backend_fail(const struct ember_backend *backend, int r,
                 const struct ember_backend_error *error, struct error *err)
{
    error_set(err, r < 0 ? -r : EIO, "%s backend: %.*s", backend->name,
              (int)strnlen(error->text, sizeof error->text), error->text);
    return r;
}
