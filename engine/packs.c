/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/packs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"

#define MANIFEST_MAX GIB

char *packs_path(const char *folder, const struct checkpoint *checkpoint, const char *quant)
{
    const char *dir = checkpoint_dir(checkpoint), *slash;
    struct digest key = checkpoint_key(checkpoint);
    struct digest_state *state = digest_begin();
    _cleanup_free_ char *name = NULL;
    char hex[DIGEST_HEX_SIZE];
    size_t len = strlen(dir);

    while (len && dir[len - 1] == '/')
        len--;
    for (slash = dir + len; slash > dir && slash[-1] != '/';)
        slash--;
    len = MIN(len - (size_t)(slash - dir), 128u);
    name = x_strndup(slash, len);
    digest_update(state, key.bytes, sizeof key.bytes);
    digest_update_string(state, WEIGHTS_FAMILY);
    if (quant && *quant) {
        digest_update_string(state, quant);
        digest_update_string(state, QUANTIZE_VERSION);
    }
    struct digest of = digest_end(state);
    return x_printf("%s/%s-%.16s.pack", folder, *name ? name : "model", digest_hex(&of, hex));
}

void packs_used(const char *path)
{
    utimensat(AT_FDCWD, path, NULL, 0);
}

/* ---- room ---- */

struct kept {
    char *path;
    uint64_t bytes;
    struct timespec used;
};

struct kept_list {
    struct kept *list;
    size_t n, room;
    uint64_t bytes;
};

static void kept_free(struct kept_list *kept)
{
    for (size_t i = 0; i < kept->n; i++)
        free(kept->list[i].path);
    free(kept->list);
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n > m && !strcmp(name + n - m, end);
}

/* All packs and parts but `except` and its part. */
static void list_kept(const char *folder, const char *except, struct kept_list *ret)
{
    DIR *dir = opendir(folder);
    struct dirent *entry;
    struct stat st;

    while (dir && (entry = readdir(dir))) {
        if (!ends_with(entry->d_name, ".pack") && !ends_with(entry->d_name, ".pack.part"))
            continue;
        _cleanup_free_ char *path = x_printf("%s/%s", folder, entry->d_name);
        if (!strncmp(path, except, strlen(except)) || lstat(path, &st) < 0 || !S_ISREG(st.st_mode))
            continue;
        if (ret->n == ret->room) {
            ret->room = ret->room * 2 + 16;
            ret->list = x_realloc(ret->list, ret->room * sizeof *ret->list);
        }
        uint64_t bytes = (uint64_t)st.st_blocks * 512;
        ret->list[ret->n++] = (struct kept){TAKE(path), bytes, st.st_mtim};
        ret->bytes += bytes;
    }
    if (dir)
        closedir(dir);
}

static int by_use(const void *a, const void *b)
{
    const struct timespec *x = &((const struct kept *)a)->used,
                          *y = &((const struct kept *)b)->used;

    if (x->tv_sec != y->tv_sec)
        return x->tv_sec < y->tv_sec ? -1 : 1;
    return x->tv_nsec < y->tv_nsec ? -1 : x->tv_nsec > y->tv_nsec;
}

/* A part that somebody is writing is locked, and stays. */
static bool remove_kept(const char *path)
{
    _cleanup_fd_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);

    return fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0 && unlink(path) == 0;
}

static int make_room(const struct packs_options *options, const char *path, uint64_t need,
                     struct error *err)
{
    struct kept_list kept = {0};

    if (!options->limit)
        return 0;
    if (need > options->limit)
        return error_set(err, E2BIG, "%s would have %llu bytes; packs may take %llu (packs_limit)",
                         path, (unsigned long long)need, (unsigned long long)options->limit);
    list_kept(options->folder, path, &kept);
    if (kept.n) /* no list is no array of none */
        qsort(kept.list, kept.n, sizeof *kept.list, by_use);
    for (size_t i = 0; i < kept.n && kept.bytes + need > options->limit; i++)
        if (remove_kept(kept.list[i].path))
            kept.bytes -= kept.list[i].bytes;
    int r = kept.bytes + need > options->limit
                ? error_set(err, EBUSY, "%s: no room: packs that are being written take %llu bytes",
                            path, (unsigned long long)kept.bytes)
                : 0;
    kept_free(&kept);
    return r;
}

/* ---- writing ---- */

struct resident_model {
    struct model *model;
    struct weights_layout *layout;
    char *config;
    size_t config_len;
};

static void resident_model_clear(struct resident_model *m)
{
    weights_layout_free(m->layout);
    model_free(m->model);
    free(m->config);
}

static int read_resident(int manifest, struct resident_model *ret, struct error *err)
{
    _cleanup_free_ char *data = NULL;
    struct stat st;

    if (fstat(manifest, &st) < 0)
        return error_sys(err, errno, "manifest");
    if (st.st_size <= 0 || (uint64_t)st.st_size > MANIFEST_MAX)
        return error_set(err, EBADMSG, "manifest: %lld bytes", (long long)st.st_size);
    if (!(data = mem_alloc((size_t)st.st_size, 1)))
        return error_set(err, ENOMEM, "no memory for a manifest");
    int r = fd_pread_all(manifest, data, (size_t)st.st_size, 0, "manifest", err);
    if (r == 0)
        r = manifest_read(data, (size_t)st.st_size, &ret->model, &ret->layout, NULL, err);
    if (r == 0)
        r = manifest_config(data, (size_t)st.st_size, &ret->config, &ret->config_len, err);
    return r;
}

/* What a pack says of how it was quantised: the rules, or their digest where they are long. */
static void make_recipe(const char *quant, char recipe[PACK_RECIPE_MAX + 1])
{
    char hex[DIGEST_HEX_SIZE];
    size_t len = strlen(quant);
    struct digest digest = digest_of(quant, len);

    if (len <= PACK_RECIPE_MAX)
        snprintf(recipe, PACK_RECIPE_MAX + 1, "%s", quant);
    else
        snprintf(recipe, PACK_RECIPE_MAX + 1, "%.*s, rules %.16s", (int)strcspn(quant, "\n"), quant,
                 digest_hex(&digest, hex));
    for (char *p = recipe; *p; p++)
        *p = *p == '\n' ? ' ' : *p;
}

/* A pack that says something else than it holds would be found by who wants what it says. */
static int check_quant(const char *quant, const struct weights_layout *layout, struct error *err)
{
    bool made = weights_layout_made(layout);

    if (made == (*quant != 0))
        return 0;
    return error_set(err, EINVAL, "a pack of weights that are %squantised as one of \"%s\"",
                     made ? "" : "not ", quant);
}

static int write_opened(const struct checkpoint *checkpoint, const struct digest *key,
                        const char *quant, int weights, int manifest, const char *path,
                        const struct pack_write_options *options, struct error *err)
{
    struct resident_model model = {0};
    struct digest now = checkpoint_key(checkpoint);

    if (!digest_equal(&now, key))
        return error_set(err, ESTALE,
                         "%s has changed since it was loaded; load it again to pack it",
                         checkpoint_dir(checkpoint));
    char recipe[PACK_RECIPE_MAX + 1];

    quant = quant ? quant : "";
    make_recipe(quant, recipe);
    int r = read_resident(manifest, &model, err);
    if (r == 0)
        r = check_quant(quant, model.layout, err);
    if (r == 0) {
        struct pack_source source = {.config = model.config,
                                     .config_len = model.config_len,
                                     .dir = checkpoint_dir(checkpoint),
                                     .layout = model.layout,
                                     .key = *key,
                                     .recipe = recipe,
                                     .arena = weights};
        r = pack_write(&source, path, options, err);
    }
    resident_model_clear(&model);
    return r;
}

int packs_write(const char *dir, const struct digest *key, const char *quant, int weights,
                int manifest, const char *path, const struct pack_write_options *options,
                struct error *err)
{
    _cleanup_(checkpoint_freep) struct checkpoint *checkpoint = NULL;

    int r = checkpoint_open(dir, &checkpoint, err);
    return r < 0 ? r : write_opened(checkpoint, key, quant, weights, manifest, path, options, err);
}

int packs_keep(const char *dir, const struct digest *key, int weights, int manifest,
               const struct packs_options *options, struct error *err)
{
    struct pack_write_options write_options = {
        .rate = options->rate, .progress = options->progress, .ctx = options->ctx};
    _cleanup_(checkpoint_freep) struct checkpoint *checkpoint = NULL;
    _cleanup_(pack_freep) struct pack *there = NULL;
    struct stat st;

    int r = checkpoint_open(dir, &checkpoint, err);
    if (r < 0)
        return r;
    _cleanup_free_ char *path = packs_path(options->folder, checkpoint, options->quant);
    if (access(path, F_OK) == 0 && pack_open(path, &there, NULL) == 0)
        return 1;
    if (mkdir(options->folder, 0700) < 0 && errno != EEXIST)
        return error_sys(err, errno, "%s", options->folder);
    if (fstat(weights, &st) < 0)
        return error_sys(err, errno, "weights");
    r = make_room(options, path, (uint64_t)st.st_size + 4 * MIB, err);
    return r < 0 ? r
                 : write_opened(checkpoint, key, options->quant, weights, manifest, path,
                                &write_options, err);
}
