/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weights outlive the manager in systemd's descriptor store (sd_notify(3), FDSTORE=1).
 *
 * A resident model has three descriptors there, named ember-HASH-weights, -manifest and -record,
 * HASH being that of its name (names of descriptors may not hold what names of models may).
 * The record is a StoredModel message in a sealed memfd; a pair without one is taken up too, under
 * the name of its folder. What does not check out is closed and removed from the store.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "base/digest.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/mem.h"
#include "cache/resident.h"
#include "daemon/manager/manager.h"
#include "model/model.h"

#define HASH_SIZE 17
#define RECORD_MAX (64 * KIB)
#define MANIFEST_MAX (256 * MIB)
#define SEALS (F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)

static const char *const parts[] = {"weights", "manifest", "record"};
enum { WEIGHTS, MANIFEST, RECORD, N_PARTS };

static void hash_of(const char *name, char hash[HASH_SIZE])
{
    char hex[DIGEST_HEX_SIZE];
    struct digest digest = digest_of(name, strlen(name));

    snprintf(hash, HASH_SIZE, "%.16s", digest_hex(&digest, hex));
}

/* ---- putting and removing ---- */

static void store(const char *hash, int part, int fd)
{
    char text[96];

    snprintf(text, sizeof text, "FDSTORE=1\nFDNAME=ember-%s-%s", hash, parts[part]);
    mgr_notify_fd(text, fd);
}

static void store_remove(const char *hash)
{
    char text[96];

    for (int part = 0; part < N_PARTS; part++) {
        snprintf(text, sizeof text, "FDSTOREREMOVE=1\nFDNAME=ember-%s-%s", hash, parts[part]);
        mgr_notify(text);
    }
}

static int make_record(const struct mgr_model *m)
{
    Ember__V1__StoredModel record = EMBER__V1__STORED_MODEL__INIT;

    record.name = (char *)m->name;
    record.path = m->path;
    record.standby = m->standby;
    record.kv_bytes = m->kv_asked;
    record.quant = m->quant;
    record.kv_type = (char *)(m->kv_kind >= 0 ? kv_kind_name((enum kv_kind)m->kv_kind) : "");
    record.from_pack = m->from_pack;
    record.recipe = (char *)m->recipe;
    record.notice = (char *)m->notice;
    record.load_ns = m->load_ns;
    record.instance_bytes = m->own_bytes;
    size_t len = ember__v1__stored_model__get_packed_size(&record);
    _cleanup_free_ uint8_t *data = mem_alloc(len + 1, 1);
    _cleanup_fd_ int fd = memfd_create("ember-record", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (!data || fd < 0)
        return -1;
    ember__v1__stored_model__pack(&record, data);
    if (fd_write_all(fd, data, len, "record", NULL) < 0 || fcntl(fd, F_ADD_SEALS, SEALS) < 0)
        return -1;
    return TAKE_FD(fd);
}

void mgr_fdstore_put(const struct mgr_model *m)
{
    char hash[HASH_SIZE];

    if (!mgr_notify_wanted())
        return;
    _cleanup_fd_ int record = make_record(m);
    hash_of(m->name, hash);
    store_remove(hash);
    if (record >= 0)
        store(hash, RECORD, record);
    store(hash, MANIFEST, m->manifest_fd);
    store(hash, WEIGHTS, m->weights_fd);
}

void mgr_fdstore_remove(const struct mgr_model *m)
{
    char hash[HASH_SIZE];

    if (!mgr_notify_wanted())
        return;
    hash_of(m->name, hash);
    store_remove(hash);
}

/* ---- taking up ---- */

struct found {
    char hash[HASH_SIZE];
    int fds[N_PARTS];
};

static int read_sealed(int fd, uint64_t limit, const char *what, char **ret, size_t *ret_len,
                       struct error *err)
{
    int seals = fcntl(fd, F_GET_SEALS);
    struct stat st;

    if (seals < 0 || (seals & SEALS & ~F_SEAL_SEAL) != (SEALS & ~F_SEAL_SEAL))
        return error_set(err, EPERM, "the %s is not a sealed memfd", what);
    if (fstat(fd, &st) < 0 || st.st_size <= 0 || (uint64_t)st.st_size > limit)
        return error_set(err, EBADMSG, "the %s has no sensible size", what);
    _cleanup_free_ char *data = mem_alloc((size_t)st.st_size, 1);
    if (!data)
        return error_set(err, ENOMEM, "no memory for the %s", what);
    int r = fd_pread_all(fd, data, (size_t)st.st_size, 0, what, err);
    if (r < 0)
        return r;
    *ret = TAKE(data);
    *ret_len = (size_t)st.st_size;
    return 0;
}

/* NULL when there is no record, or none that belongs to this hash. */
static Ember__V1__StoredModel *read_record(const struct found *f)
{
    _cleanup_free_ char *data = NULL;
    char hash[HASH_SIZE];
    size_t len;

    if (f->fds[RECORD] < 0 ||
        read_sealed(f->fds[RECORD], RECORD_MAX, "record", &data, &len, NULL) < 0)
        return NULL;
    Ember__V1__StoredModel *record =
        ember__v1__stored_model__unpack(NULL, len, (const uint8_t *)data);
    if (!record)
        return NULL;
    hash_of(record->name, hash);
    if (!strcmp(hash, f->hash))
        return record;
    ember__v1__stored_model__free_unpacked(record, NULL);
    return NULL;
}

static void set_from_manifest(struct mgr_model *m, const struct model *model,
                              const struct weights_layout *layout)
{
    const struct model_info *info = model_info(model);

    snprintf(m->architecture, sizeof m->architecture, "%s", info->architecture);
    digest_hex(&layout->digest, m->digest);
    m->weights_bytes = layout->bytes;
    m->parameters = info->parameters;
    memcpy(m->kv_page_bytes, info->kv_page_bytes, sizeof m->kv_page_bytes);
    m->vocab_size = info->vocab_size;
    m->max_positions = info->max_positions;
}

static void set_from_record(struct mgr_model *m, const Ember__V1__StoredModel *record)
{
    m->standby = record->standby >= 0 && record->standby <= 256 ? record->standby : -1;
    enum kv_kind kind;

    m->kv_asked = record->kv_bytes;
    free(m->quant);
    m->quant = x_strdup(record->quant);
    m->kv_kind = kv_kind_find(record->kv_type, &kind, NULL) == 0 ? (int)kind : -1;
    m->from_pack = record->from_pack;
    snprintf(m->recipe, sizeof m->recipe, "%s", record->recipe);
    snprintf(m->notice, sizeof m->notice, "%s", record->notice);
    m->load_ns = record->load_ns;
    m->own_bytes = record->instance_bytes;
}

static int take_up(struct mgr *mgr, struct found *f, const Ember__V1__StoredModel *record,
                   struct error *err)
{
    _cleanup_free_ char *data = NULL, *dir = NULL;
    _cleanup_(model_freep) struct model *model = NULL;
    _cleanup_(weights_layout_freep) struct weights_layout *layout = NULL;
    struct mgr_model *m;
    char name[MGR_NAME_MAX + 1];
    const void *mapped;
    size_t len;

    int r = read_sealed(f->fds[MANIFEST], MANIFEST_MAX, "manifest", &data, &len, err);
    if (r == 0)
        r = manifest_read(data, len, &model, &layout, &dir, err);
    if (r == 0)
        r = resident_map_readonly(f->fds[WEIGHTS], layout->bytes, false, &mapped, err);
    if (r < 0)
        return r;
    resident_unmap(mapped, layout->bytes);
    if (record)
        r = mgr_model_register(mgr, record->name, record->path, &m, err);
    else if ((r = mgr_model_name_of(dir, name, err)) == 0)
        r = mgr_model_register(mgr, name, dir, &m, err);
    if (r < 0)
        return r;
    if (m->state != MODEL_COLD)
        return error_set(err, EEXIST, "model %s is there already", m->name);
    set_from_manifest(m, model, layout);
    if (record)
        set_from_record(m, record);
    mgr_model_adopt(m, TAKE_FD(f->fds[WEIGHTS]), TAKE_FD(f->fds[MANIFEST]));
    return 0;
}

/* Files fd under its model; false when its name is not one of ours. */
static bool file_under(struct found *found, size_t *n, int fd, const char *name)
{
    char hash[HASH_SIZE], part_name[16];
    size_t i;

    if (sscanf(name, "ember-%16[0-9a-f]-%15s", hash, part_name) != 2)
        return false;
    for (int part = 0; part < N_PARTS; part++) {
        if (strcmp(part_name, parts[part]))
            continue;
        for (i = 0; i < *n && strcmp(found[i].hash, hash); i++)
            ;
        if (i == *n) {
            found[(*n)++] = (struct found){.fds = {-1, -1, -1}};
            memcpy(found[i].hash, hash, sizeof hash);
        }
        fd_close(found[i].fds[part]);
        found[i].fds[part] = fd;
        return true;
    }
    return false;
}

static void adopt_one(struct mgr *mgr, struct found *f)
{
    struct error err = {0};
    Ember__V1__StoredModel *record = read_record(f);
    int r = f->fds[WEIGHTS] >= 0 && f->fds[MANIFEST] >= 0
                ? take_up(mgr, f, record, &err)
                : error_set(&err, EBADMSG, "weights and manifest are not both there");

    if (r < 0) {
        log_warn("stored weights dropped", "hash=%s error=\"%s\"", f->hash, err.text);
        store_remove(f->hash);
    }
    if (record)
        ember__v1__stored_model__free_unpacked(record, NULL);
    for (int part = 0; part < N_PARTS; part++)
        fd_close(f->fds[part]);
}

uint64_t mgr_fdstore_adopt(struct mgr *mgr)
{
    char **names = NULL;
    int n = sd_listen_fds_with_names(1, &names);
    struct mgr_model *m;
    uint64_t bytes = 0;
    size_t n_found = 0;

    if (n <= 0)
        return 0;
    struct found *found = x_alloc((size_t)n * sizeof *found);
    mgr->listen_fds = x_alloc((size_t)n * sizeof *mgr->listen_fds);
    for (int i = 0; i < n; i++) {
        int fd = SD_LISTEN_FDS_START + i;
        if (file_under(found, &n_found, fd, names[i]))
            continue;
        if (sd_is_socket(fd, AF_UNSPEC, SOCK_STREAM, 1) > 0) {
            mgr->listen_fds[mgr->n_listen_fds++] = fd;
            continue;
        }
        log_warn("inherited descriptor not known", "name=\"%s\"", names[i]);
        fd_close(fd);
    }
    for (size_t i = 0; i < n_found; i++)
        adopt_one(mgr, &found[i]);
    free(found);
    for (int i = 0; i < n; i++)
        free(names[i]);
    free(names);
    TAILQ_FOREACH(m, &mgr->models, link)
    bytes += m->charged;
    return bytes;
}
