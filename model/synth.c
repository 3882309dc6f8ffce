/* SPDX-License-Identifier: Apache-2.0 */
#include "model/synth.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <jansson.h>

#include "base/fd.h"
#include "model/model_private.h"
#include "model/safetensors.h"

#define CHUNK_BYTES (4 * MIB)
#define SHARD_BYTES_DEFAULT (4 * GIB)
#define SHARDS_MAX 4096
#define TABLE_BITS 12 /* five indices in one 64-bit random number */
#define TABLE_SIZE (1u << TABLE_BITS)
#define FREE_MARGIN (64 * MIB)

struct synth {
    struct model *model;
    char *config; /* as it will be written */
    const char *dir;
    struct synth_options options;
    synth_progress_fn progress;
    void *ctx;
    struct error *err;
    uint64_t done, total;
    uint32_t n_shards;
    uint32_t *shard_of; /* [n_parts] */
    uint8_t *chunk;
    bool made_dir;
    char **made; /* names of the files that are ours, [n_made] */
    size_t n_made;
    double normal[TABLE_SIZE]; /* quantiles of the normal distribution */
};

/* ---- the config ---- */

/* Lists with an entry for each layer are cut with the layers. */
static void cut_lists(json_t *object, size_t layers, size_t keep)
{
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value) if (json_is_array(value) &&
                                                json_array_size(value) ==
                                                    layers) while (json_array_size(value) > keep)
        json_array_remove(value, keep);
}

static int edit_config(struct synth *s, json_t *root)
{
    json_t *text = json_object_get(root, "text_config");
    json_int_t layers;
    text = json_is_object(text) ? text : json_object_get(root, "llm_config");
    text = json_is_object(text) ? text : root;
    layers = json_integer_value(json_object_get(text, "num_hidden_layers"));
    if (s->options.max_layers && layers > s->options.max_layers) {
        cut_lists(text, (size_t)layers, s->options.max_layers);
        json_object_set_new(text, "num_hidden_layers", json_integer(s->options.max_layers));
    }
    json_object_del(root, "quantization_config");
    json_object_del(text, "quantization_config");
    json_object_del(text, "torch_dtype");
    json_object_set_new(text, "dtype",
                        json_string(s->options.dtype == EMBER_BF16  ? "bfloat16"
                                    : s->options.dtype == EMBER_F16 ? "float16"
                                                                    : "float32"));
    s->config = json_dumps(root, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_ENSURE_ASCII);
    return s->config ? 0 : error_set(s->err, ENOMEM, "no memory for a config");
}

static int read_config(struct synth *s, const char *text, size_t len, const char *path)
{
    json_error_t trouble;
    json_t *root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &trouble);
    int r;
    if (!json_is_object(root))
        r = error_set(s->err, EINVAL, "%s: line %d: %s", path, trouble.line,
                      root ? "not an object" : trouble.text);
    else
        r = edit_config(s, root);
    json_decref(root);
    if (r == 0)
        r = model_from_config(s->config, strlen(s->config), path, &s->model, s->err);
    return r;
}

/* ---- where tensors go ---- */

/* Some rows of a tensor are written with the first of them. */
static bool is_written(const struct part *part)
{
    return !part->constant && part->from_row == 0;
}

/* Values of a part's tensor, all of them. */
static uint64_t part_values(const struct part *part)
{
    uint64_t before;
    return part_whole(part, &before);
}

static uint64_t part_bytes(const struct synth *s, const struct part *part)
{
    return part_values(part) * dtype_size(s->options.dtype);
}

static int cut_shards(struct synth *s)
{
    uint64_t limit = s->options.shard_bytes ? s->options.shard_bytes : SHARD_BYTES_DEFAULT;
    uint64_t in_shard = 0;
    s->shard_of = mem_alloc(s->model->n_parts, sizeof *s->shard_of);
    if (!s->shard_of)
        return error_set(s->err, ENOMEM, "no memory for %u tensors", s->model->n_parts);
    s->n_shards = 1;
    for (uint32_t i = 0; i < s->model->n_parts; i++) {
        const struct part *part = &s->model->parts[i];
        uint64_t bytes = part_bytes(s, part);
        if (!is_written(part))
            continue;
        if (in_shard && (bytes > limit || in_shard > limit - bytes)) {
            in_shard = 0;
            s->n_shards++;
        }
        s->shard_of[i] = s->n_shards - 1;
        in_shard += bytes;
        s->total += bytes;
    }
    return s->n_shards <= SHARDS_MAX
               ? 0
               : error_set(s->err, EINVAL, "%u shards are too many: make them larger", s->n_shards);
}

static char *shard_name(const struct synth *s, uint32_t shard)
{
    if (s->n_shards == 1)
        return x_strdup("model.safetensors");
    return x_printf("model-%05u-of-%05u.safetensors", shard + 1, s->n_shards);
}

static int check_room(const struct synth *s)
{
    struct statvfs fs;
    uint64_t free_bytes;
    if (statvfs(s->dir, &fs) < 0)
        return error_sys(s->err, errno, "%s", s->dir);
    free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (free_bytes < FREE_MARGIN || free_bytes - FREE_MARGIN < s->total)
        return error_set(s->err, ENOSPC,
                         "%s: the checkpoint takes %llu MiB, the disk has %llu MiB free: make "
                         "room, or fewer layers",
                         s->dir, (unsigned long long)(s->total / MIB),
                         (unsigned long long)(free_bytes / MIB));
    return 0;
}

/* ---- values ---- */

/* The quantile function of the normal distribution by bisection of its distribution: 4096 values,
 * once. */
static void make_normal(double *table)
{
    for (uint32_t i = 0; i < TABLE_SIZE; i++) {
        double p = (i + 0.5) / TABLE_SIZE, low = -8, high = 8;
        for (int step = 0; step < 50; step++) {
            double middle = (low + high) / 2;
            if (erfc(-middle / M_SQRT2) / 2 < p)
                low = middle;
            else
                high = middle;
        }
        table[i] = (low + high) / 2;
    }
}

/* splitmix64 (Steele, Lea, Flood 2014). */
static inline uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static uint32_t float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Rounds to nearest even; the values are small and finite. */
static uint16_t to_bf16(float x)
{
    uint32_t bits = float_bits(x);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint16_t to_f16(float x)
{
    uint16_t sign = (uint16_t)(float_bits(x) >> 16 & 0x8000);
    float a = fabsf(x);
    int exponent;
    if (a < 0x1p-14f) /* subnormal */
        return sign | (uint16_t)lrintf(a * 0x1p24f);
    frexpf(a, &exponent);
    /* a = 2^(exponent - 1) * (1 + m / 1024); a carry out of m runs into the exponent, as it should.
     */
    return sign |
           (uint16_t)(((exponent + 14) << 10) + (int)lrintf(ldexpf(a, 11 - exponent)) - 1024);
}

/* What a tensor's values are drawn from: mean + deviation * normal. */
static void tensor_scale(const struct synth *s, const struct slot *slot, const struct part *part,
                         double *ret_mean, double *ret_deviation)
{
    const char *name = model_text(s->model, slot->name);
    *ret_mean = 0;
    *ret_deviation = 0.02;
    if (slot->matrix)
        *ret_deviation = 1 / sqrt(part->dim[part->rank - 1]);
    else if (strstr(name, "norm") && !strstr(name, "bias"))
        *ret_mean = 1 - s->model->desc.norm_w_bias;
}

union table {
    uint16_t half[TABLE_SIZE];
    float full[TABLE_SIZE];
};

static void make_table(const struct synth *s, double mean, double deviation, union table *ret)
{
    for (uint32_t i = 0; i < TABLE_SIZE; i++) {
        float x = (float)(mean + deviation * s->normal[i]);
        if (s->options.dtype == EMBER_F32)
            ret->full[i] = x;
        else
            ret->half[i] = s->options.dtype == EMBER_BF16 ? to_bf16(x) : to_f16(x);
    }
}

#define DEFINE_FILL(suffix, type)                                                                  \
    static void fill_##suffix(type *to, size_t n, const type *table, uint64_t *state)              \
    {                                                                                              \
        size_t i = 0;                                                                              \
        for (; i + 5 <= n; i += 5) {                                                               \
            uint64_t r = next_random(state);                                                       \
            for (int j = 0; j < 5; j++)                                                            \
                to[i + j] = table[r >> (TABLE_BITS * j) & (TABLE_SIZE - 1)];                       \
        }                                                                                          \
        for (; i < n; i++)                                                                         \
            to[i] = table[next_random(state) & (TABLE_SIZE - 1)];                                  \
    }
DEFINE_FILL(half, uint16_t)
DEFINE_FILL(full, float)

static int write_tensor(struct synth *s, int fd, const char *path, const struct slot *slot,
                        const struct part *part)
{
    const char *name = model_text(s->model, part->name);
    uint64_t state = checksum_of(name, strlen(name)) ^ s->options.seed, left = part_values(part);
    uint32_t size = dtype_size(s->options.dtype);
    union table table;
    double mean, deviation;
    tensor_scale(s, slot, part, &mean, &deviation);
    make_table(s, mean, deviation, &table);
    while (left) {
        size_t n = (size_t)MIN(left, CHUNK_BYTES / size / 5 * 5);
        int r;
        if (size == 4)
            fill_full((float *)s->chunk, n, table.full, &state);
        else
            fill_half((uint16_t *)s->chunk, n, table.half, &state);
        r = fd_write_all(fd, s->chunk, n * size, path, s->err);
        if (r < 0)
            return r;
        left -= n;
        s->done += n * size;
        r = s->progress ? s->progress(s->ctx, s->done, s->total) : 0;
        if (r < 0)
            return error_set(s->err, -r, "%s: stopped", path);
    }
    return 0;
}

/* ---- files ---- */

static int shard_header(const struct synth *s, uint32_t shard, struct buffer *out)
{
    uint64_t at = 0, len;
    const char *dtype = safetensors_dtype_word(s->options.dtype);
    int r = buffer_append(out, "\0\0\0\0\0\0\0\0{", 9);
    r = r < 0 ? r : buffer_printf(out, "\"__metadata__\":{\"format\":\"pt\"}");
    for (uint32_t i = 0; r == 0 && i < s->model->n_parts; i++) {
        const struct part *part = &s->model->parts[i];
        uint64_t shape[3];
        uint8_t rank = part_shape(part, shape);
        if (!is_written(part) || s->shard_of[i] != shard)
            continue;
        r = buffer_printf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%llu",
                          model_text(s->model, part->name), dtype, (unsigned long long)shape[0]);
        for (int d = 1; r == 0 && d < rank; d++)
            r = buffer_printf(out, ",%llu", (unsigned long long)shape[d]);
        if (r == 0)
            r = buffer_printf(out, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
                              (unsigned long long)(at + part_bytes(s, part)));
        at += part_bytes(s, part);
    }
    r = r < 0 ? r : buffer_append(out, "}", 1);
    while (r == 0 && out->len % 8)
        r = buffer_append(out, " ", 1);
    len = out->len - 8;
    for (int i = 0; r == 0 && i < 8; i++)
        out->data[i] = (char)(len >> (8 * i));
    return r < 0 ? error_set(s->err, ENOMEM, "no memory for a header") : 0;
}

static int write_shard_to(struct synth *s, uint32_t shard, int fd, const char *path)
{
    struct buffer header = {0};
    int r = shard_header(s, shard, &header);
    if (r == 0)
        r = fd_write_all(fd, header.data, header.len, path, s->err);
    buffer_free(&header);
    for (uint32_t i = 0; r == 0 && i < s->model->n_slots; i++) {
        const struct slot *slot = &s->model->slots[i];
        for (uint32_t p = slot->first_part; r == 0 && p < slot->first_part + slot->n_parts; p++)
            if (is_written(&s->model->parts[p]) && s->shard_of[p] == shard)
                r = write_tensor(s, fd, path, slot, &s->model->parts[p]);
    }
    return r;
}

/* A file that is there already is somebody else's. */
static int create(struct synth *s, const char *name, char **ret_path)
{
    _cleanup_free_ char *path = x_printf("%s/%s", s->dir, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0)
        return error_sys(s->err, errno, "%s", path);
    s->made = x_realloc(s->made, (s->n_made + 1) * sizeof *s->made);
    s->made[s->n_made++] = x_strdup(name);
    *ret_path = TAKE(path);
    return fd;
}

static int write_shard(struct synth *s, uint32_t shard)
{
    _cleanup_free_ char *name = shard_name(s, shard);
    _cleanup_free_ char *path = NULL;
    _cleanup_fd_ int fd = create(s, name, &path);
    return fd < 0 ? fd : write_shard_to(s, shard, fd, path);
}

static int write_text(struct synth *s, const char *name, const char *text, size_t len)
{
    _cleanup_free_ char *path = NULL;
    _cleanup_fd_ int fd = create(s, name, &path);
    return fd < 0 ? fd : fd_write_all(fd, text, len, path, s->err);
}

static int write_index(struct synth *s)
{
    struct buffer out = {0};
    const char *comma = "";
    int r = buffer_printf(&out, "{\"metadata\":{\"total_size\":%llu},\"weight_map\":{",
                          (unsigned long long)s->total);
    for (uint32_t i = 0; r == 0 && i < s->model->n_parts; i++) {
        if (!is_written(&s->model->parts[i]))
            continue;
        _cleanup_free_ char *shard = shard_name(s, s->shard_of[i]);
        r = buffer_printf(&out, "%s\n\"%s\":\"%s\"", comma,
                          model_text(s->model, s->model->parts[i].name), shard);
        comma = ",";
    }
    r = r < 0 ? r : buffer_printf(&out, "}}\n");
    r = r < 0 ? error_set(s->err, ENOMEM, "no memory for an index")
              : write_text(s, "model.safetensors.index.json", out.data, out.len);
    buffer_free(&out);
    return r;
}

static void remove_made(const struct synth *s)
{
    for (size_t i = 0; i < s->n_made; i++) {
        _cleanup_free_ char *path = x_printf("%s/%s", s->dir, s->made[i]);
        unlink(path);
    }
    if (s->made_dir)
        rmdir(s->dir);
}

/* The config comes last: without it a folder is no checkpoint. */
static int write_all(struct synth *s)
{
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < s->n_shards; i++)
        r = write_shard(s, i);
    if (r == 0 && s->n_shards > 1)
        r = write_index(s);
    if (r == 0)
        r = write_text(s, "config.json", s->config, strlen(s->config));
    return r;
}

static int prepare_dir(struct synth *s)
{
    static const char *const names[] = {"config.json", "model.safetensors",
                                        "model.safetensors.index.json"};
    s->made_dir = mkdir(s->dir, 0755) == 0;
    if (!s->made_dir && errno != EEXIST)
        return error_sys(s->err, errno, "%s", s->dir);
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        _cleanup_free_ char *path = x_printf("%s/%s", s->dir, names[i]);
        if (access(path, F_OK) == 0)
            return error_set(s->err, EEXIST, "%s: is there already; choose another folder", path);
    }
    return check_room(s);
}

static void synth_free(struct synth *s)
{
    for (size_t i = 0; i < s->n_made; i++)
        free(s->made[i]);
    free(s->made);
    model_free(s->model);
    free(s->config);
    free(s->shard_of);
    free(s->chunk);
}

int synth_write(const char *config_path, const char *out_dir, const struct synth_options *options,
                synth_progress_fn progress, void *ctx, struct error *err)
{
    _cleanup_free_ char *text = NULL;
    size_t len;
    int r = fd_read_file(config_path, 16 * MIB, &text, &len, err);

    return r < 0 ? r
                 : synth_write_config(text, len, config_path, out_dir, options, progress, ctx, err);
}

int synth_write_config(const char *text, size_t len, const char *name, const char *out_dir,
                       const struct synth_options *options, synth_progress_fn progress, void *ctx,
                       struct error *err)
{
    struct error own = {0};
    _cleanup_free_ struct synth *s = mem_alloc(1, sizeof *s);
    int r;
    if (!s)
        return error_set(err, ENOMEM, "no memory");
    s->dir = out_dir;
    s->options = *options;
    s->progress = progress;
    s->ctx = ctx;
    s->err = err ? err : &own;
    if (!safetensors_dtype_word(options->dtype) || dtype_size(options->dtype) < 2 ||
        options->dtype == EMBER_I32)
        return error_set(err, EINVAL, "weights of dtype %s", dtype_name(options->dtype));
    make_normal(s->normal);
    s->chunk = mem_alloc(CHUNK_BYTES, 1);
    r = s->chunk ? read_config(s, text, len, name) : error_set(err, ENOMEM, "no memory");
    if (r == 0 && (r = cut_shards(s)) == 0 && (r = prepare_dir(s)) == 0)
        r = write_all(s);
    if (r < 0)
        remove_made(s);
    synth_free(s);
    return r;
}
