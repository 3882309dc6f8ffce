/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A checkpoint is a list of tensors over one or more open shard files, and a hash table of their
 * names (open addressing, a power of two at least twice the count).
 */
#include "model/checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "base/digest.h"
#include "base/fault.h"
#include "base/fd.h"
#include "model/safetensors.h"

#define CONFIG_BYTES_MAX (16 * MIB)
#define INDEX_BYTES_MAX (256 * MIB)
#define SHARDS_MAX 4096
#define SINGLE "model.safetensors"
#define INDEX "model.safetensors.index.json"

struct shard {
    char *path;
    int fd;
};

struct checkpoint {
    char *dir, *config;
    size_t config_len;
    struct shard *shards;
    uint32_t n_shards;
    struct tensor_list list;
    uint32_t *slots; /* tensor index + 1, 0: free */
    size_t n_slots;
};

void checkpoint_free(struct checkpoint *c)
{
    if (!c)
        return;
    for (uint32_t i = 0; i < c->n_shards; i++) {
        fd_close(c->shards[i].fd);
        free(c->shards[i].path);
    }
    free(c->shards);
    free(c->dir);
    free(c->config);
    free(c->slots);
    tensor_list_free(&c->list);
    free(c);
}

const char *checkpoint_config(const struct checkpoint *c, size_t *ret_len)
{
    *ret_len = c->config_len;
    return c->config;
}

const char *checkpoint_dir(const struct checkpoint *c)
{
    return c->dir;
}

/* The slot where `name` is or would go. */
static size_t find_slot(const struct checkpoint *c, const char *name)
{
    size_t at = checksum_of(name, strlen(name)) & (c->n_slots - 1);
    while (c->slots[at] && strcmp(c->list.tensors[c->slots[at] - 1].name, name))
        at = (at + 1) & (c->n_slots - 1);
    return at;
}

const struct checkpoint_tensor *checkpoint_find(const struct checkpoint *c, const char *name)
{
    uint32_t index = c->slots[find_slot(c, name)];
    return index ? &c->list.tensors[index - 1] : NULL;
}

/* Builds the table of names; a name may stand in one shard only. */
static int hash_names(struct checkpoint *c, struct error *err)
{
    size_t n = 16;
    if (c->list.count >= UINT32_MAX / 4)
        return error_set(err, EBADMSG, "%s: %zu tensors are too many", c->dir, c->list.count);
    while (n < c->list.count * 2)
        n *= 2;
    c->slots = mem_alloc(n, sizeof *c->slots);
    if (!c->slots)
        return error_set(err, ENOMEM, "%s: no memory for %zu tensors", c->dir, c->list.count);
    c->n_slots = n;
    for (size_t i = 0; i < c->list.count; i++) {
        const struct checkpoint_tensor *t = &c->list.tensors[i];
        size_t at = find_slot(c, t->name);
        if (c->slots[at]) {
            const struct checkpoint_tensor *other = &c->list.tensors[c->slots[at] - 1];
            return error_set(err, EBADMSG, "%s and %s both hold tensor %s",
                             c->shards[other->shard].path, c->shards[t->shard].path, t->name);
        }
        c->slots[at] = (uint32_t)i + 1;
    }
    return 0;
}

/* Opens a shard and reads its header. Takes `path`. */
static int open_shard(struct checkpoint *c, char *path, struct error *err)
{
    struct shard *shards = reallocarray(c->shards, c->n_shards + 1, sizeof *shards);
    struct shard *s;
    if (!path || !shards) {
        free(path);
        c->shards = shards ? shards : c->shards;
        return error_set(err, ENOMEM, "%s: no memory for shard %u", c->dir, c->n_shards);
    }
    c->shards = shards;
    s = &shards[c->n_shards++];
    s->path = path;
    s->fd =
        fault_hit(FAULT_FD) ? (errno = EMFILE, -1) : open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (s->fd < 0)
        return error_sys(err, errno, "%s", path);
    return safetensors_read(s->fd, c->n_shards - 1, path, &c->list, err);
}

static char *join(const char *dir, const char *name)
{
    char *path = NULL;
    return asprintf(&path, "%s/%s", dir, name) < 0 ? NULL : path;
}

static int shard_number(struct checkpoint *c, const char *file)
{
    size_t dir = strlen(c->dir) + 1;
    for (uint32_t i = c->n_shards; i-- > 0;)
        if (!strcmp(c->shards[i].path + dir, file))
            return (int)i;
    return -1;
}

/* Opens every shard that the weight map names. */
static int open_shards(struct checkpoint *c, json_t *map, const char *index, struct error *err)
{
    const char *name;
    json_t *value;
    json_object_foreach(map, name, value)
    {
        const char *file = json_string_value(value);
        int r;
        if (!file || !*file || strchr(file, '/') || *file == '.' || strlen(file) > NAME_MAX)
            return error_set(err, EBADMSG, "%s: tensor %s: \"%.64s\" is not the name of a shard",
                             index, name, file ? file : "(no string)");
        if (shard_number(c, file) >= 0)
            continue;
        if (c->n_shards == SHARDS_MAX)
            return error_set(err, EBADMSG, "%s: names more than %d shards", index, SHARDS_MAX);
        r = open_shard(c, join(c->dir, file), err);
        if (r == -ENOENT)
            return error_set(err, ENOENT, "%s: shard %s of tensor %s is missing: download it",
                             index, file, name);
        if (r < 0)
            return r;
    }
    return 0;
}

/* Each tensor of the map is in the shard that the map says. */
static int check_map(const struct checkpoint *c, json_t *map, const char *index, struct error *err)
{
    size_t dir = strlen(c->dir) + 1;
    const char *name;
    json_t *value;
    json_object_foreach(map, name, value)
    {
        const struct checkpoint_tensor *t = checkpoint_find(c, name);
        if (!t || strcmp(c->shards[t->shard].path + dir, json_string_value(value)))
            return error_set(err, EBADMSG, "%s: tensor %s is not in shard %s", index, name,
                             json_string_value(value));
    }
    return 0;
}

static int open_indexed(struct checkpoint *c, const char *index, struct error *err)
{
    _cleanup_free_ char *text = NULL;
    json_error_t trouble;
    json_t *root, *map;
    size_t len;
    int r = fd_read_file(index, INDEX_BYTES_MAX, &text, &len, err);
    if (r < 0)
        return r;
    root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &trouble);
    map = json_object_get(root, "weight_map");
    if (!root)
        r = error_set(err, EBADMSG, "%s: line %d: %s", index, trouble.line, trouble.text);
    else if (!json_is_object(map))
        r = error_set(err, EBADMSG, "%s: has no weight_map", index);
    else if ((r = open_shards(c, map, index, err)) == 0 && (r = hash_names(c, err)) == 0)
        r = check_map(c, map, index, err);
    json_decref(root);
    return r;
}

int checkpoint_open(const char *dir, struct checkpoint **ret, struct error *err)
{
    _cleanup_(checkpoint_freep) struct checkpoint *c = mem_alloc(1, sizeof *c);
    _cleanup_free_ char *config = join(dir, "config.json");
    _cleanup_free_ char *single = join(dir, SINGLE);
    _cleanup_free_ char *index = join(dir, INDEX);
    int r;
    if (!c || !config || !single || !index || !(c->dir = strdup(dir)))
        return error_set(err, ENOMEM, "%s: no memory", dir);
    r = fd_read_file(config, CONFIG_BYTES_MAX, &c->config, &c->config_len, err);
    if (r == -ENOTDIR)
        return error_set(err, ENOTDIR, "%s: neither a checkpoint's folder nor a pack", dir);
    if (r < 0)
        return r;
    if (access(single, F_OK) == 0)
        r = open_shard(c, join(dir, SINGLE), err);
    else if (access(index, F_OK) == 0)
        r = open_indexed(c, index, err);
    else
        r = error_set(err, ENOENT, "%s: holds neither %s nor %s", dir, SINGLE, INDEX);
    if (r == 0 && !c->slots)
        r = hash_names(c, err);
    if (r < 0)
        return r;
    *ret = TAKE(c);
    return 0;
}

int checkpoint_open_file(const char *path, struct checkpoint **ret, struct error *err)
{
    _cleanup_(checkpoint_freep) struct checkpoint *c = mem_alloc(1, sizeof *c);
    int r;
    if (!c || !(c->dir = strdup(path)) || !(c->config = strdup("")))
        return error_set(err, ENOMEM, "%s: no memory", path);
    if ((r = open_shard(c, strdup(path), err)) < 0 || (r = hash_names(c, err)) < 0)
        return r;
    *ret = TAKE(c);
    return 0;
}

struct digest checkpoint_key(const struct checkpoint *c)
{
    struct digest_state *state = digest_begin();
    digest_update(state, &c->config_len, sizeof c->config_len);
    digest_update(state, c->config, c->config_len);
    for (uint32_t i = 0; i < c->n_shards; i++) {
        const char *slash = strrchr(c->shards[i].path, '/');
        struct stat st = {0};
        fstat(c->shards[i].fd, &st);
        int64_t facts[] = {st.st_size, st.st_mtim.tv_sec, st.st_mtim.tv_nsec};
        digest_update_string(state, slash ? slash + 1 : c->shards[i].path);
        digest_update(state, facts, sizeof facts);
    }
    for (size_t i = 0; i < c->list.count; i++) {
        const struct checkpoint_tensor *t = &c->list.tensors[i];
        uint64_t place[] = {t->offset, t->bytes, t->shard, t->rank};
        digest_update_string(state, t->name);
        digest_update_string(state, t->dtype_name);
        digest_update(state, place, sizeof place);
        digest_update(state, t->dim, sizeof t->dim);
    }
    return digest_end(state);
}

const char *checkpoint_shape_text(char out[CHECKPOINT_SHAPE_TEXT], uint32_t rank,
                                  const uint64_t *dim)
{
    size_t at = (size_t)snprintf(out, CHECKPOINT_SHAPE_TEXT, "[");
    for (uint32_t d = 0; d < rank && d < CHECKPOINT_RANK_MAX; d++)
        at += (size_t)snprintf(out + at, CHECKPOINT_SHAPE_TEXT - at, d ? ", %llu" : "%llu",
                               (unsigned long long)dim[d]);
    snprintf(out + at, CHECKPOINT_SHAPE_TEXT - at, "]");
    return out;
}

int checkpoint_read(const struct checkpoint *c, const struct checkpoint_tensor *t, uint64_t first,
                    void *to, size_t n, struct error *err)
{
    uint64_t end;
    int r;
    if (!size_add(first, n, &end) || end > t->bytes)
        return error_set(err, ERANGE, "%s: tensor %s: bytes %llu + %zu of %llu",
                         c->shards[t->shard].path, t->name, (unsigned long long)first, n,
                         (unsigned long long)t->bytes);
    r = fd_pread_all(c->shards[t->shard].fd, to, n, t->offset + first, c->shards[t->shard].path,
                     err);
    return r < 0 ? error_prefix(err, "tensor %s", t->name) : 0;
}
