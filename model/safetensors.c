/* SPDX-License-Identifier: Apache-2.0 */
#include "model/safetensors.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <jansson.h>

#include "base/fd.h"

/* X(word, bits, enum ember_dtype or DTYPE_UNKNOWN) */
#define SAFETENSORS_DTYPES(X)                                                                      \
    X("F32", 32, EMBER_F32)                                                                        \
    X("F16", 16, EMBER_F16)                                                                        \
    X("BF16", 16, EMBER_BF16)                                                                      \
    X("I32", 32, EMBER_I32)                                                                        \
    X("I8", 8, EMBER_I8)                                                                           \
    X("U8", 8, EMBER_U8)                                                                           \
    X("F64", 64, DTYPE_UNKNOWN)                                                                    \
    X("I64", 64, DTYPE_UNKNOWN)                                                                    \
    X("U64", 64, DTYPE_UNKNOWN)                                                                    \
    X("U32", 32, DTYPE_UNKNOWN)                                                                    \
    X("I16", 16, DTYPE_UNKNOWN)                                                                    \
    X("U16", 16, DTYPE_UNKNOWN)                                                                    \
    X("BOOL", 8, DTYPE_UNKNOWN)                                                                    \
    X("F8_E4M3", 8, EMBER_F8)                                                                      \
    X("F8_E5M2", 8, DTYPE_UNKNOWN)                                                                 \
    X("F8_E8M0", 8, DTYPE_UNKNOWN)                                                                 \
    X("F6_E2M3", 6, DTYPE_UNKNOWN)                                                                 \
    X("F6_E3M2", 6, DTYPE_UNKNOWN)                                                                 \
    X("F4", 4, DTYPE_UNKNOWN)                                                                      \
    X("C64", 64, DTYPE_UNKNOWN)

static const struct {
    const char *word;
    uint32_t bits;
    uint8_t dtype;
} dtypes[] = {
#define X(word, bits, dtype) {word, bits, dtype},
    SAFETENSORS_DTYPES(X)
#undef X
};

/* Bits an element takes, 0 for a dtype that this build has never heard of. */
static uint32_t safetensors_bits(const char *dtype)
{
    for (size_t i = 0; i < ARRAY_LEN(dtypes); i++)
        if (!strcmp(dtypes[i].word, dtype))
            return dtypes[i].bits;
    return 0;
}

/* enum ember_dtype, or DTYPE_UNKNOWN. */
static uint8_t safetensors_dtype(const char *dtype)
{
    for (size_t i = 0; i < ARRAY_LEN(dtypes); i++)
        if (!strcmp(dtypes[i].word, dtype))
            return dtypes[i].dtype;
    return DTYPE_UNKNOWN;
}

const char *safetensors_dtype_word(enum ember_dtype dtype)
{
    for (size_t i = 0; i < ARRAY_LEN(dtypes); i++)
        if (dtypes[i].dtype == dtype)
            return dtypes[i].word;
    return NULL;
}

void tensor_list_free(struct tensor_list *list)
{
    for (size_t i = 0; i < list->count; i++)
        free((char *)list->tensors[i].name);
    free(list->tensors);
    *list = (struct tensor_list){0};
}

static int tensor_list_add(struct tensor_list *list, const struct checkpoint_tensor *tensor,
                           const char *name, struct error *err)
{
    if (list->count == list->cap) {
        size_t cap = list->cap ? list->cap * 2 : 64;
        void *moved = reallocarray(list->tensors, cap, sizeof *list->tensors);
        if (!moved)
            return error_set(err, ENOMEM, "no memory for %zu tensors", cap);
        list->tensors = moved;
        list->cap = cap;
    }
    char *copy = strdup(name);
    if (!copy)
        return error_set(err, ENOMEM, "no memory for a tensor's name");
    list->tensors[list->count] = *tensor;
    list->tensors[list->count++].name = copy;
    return 0;
}

/* A JSON integer >= 0. */
static bool get_u64(const json_t *value, uint64_t *ret)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return false;
    *ret = (uint64_t)json_integer_value(value);
    return true;
}

/* What is being read, for the texts of its errors. */
struct reading {
    const char *what;
    uint64_t data_start, file_bytes;
    uint32_t shard;
    struct error *err;
};

static int parse_shape(const struct reading *in, const char *name, const json_t *shape,
                       struct checkpoint_tensor *t, uint64_t *ret_elements)
{
    uint64_t elements = 1, dim;
    size_t rank = json_array_size(shape);
    if (!json_is_array(shape) || rank > UINT8_MAX)
        return error_set(in->err, EBADMSG, "%s: tensor %s has no shape", in->what, name);
    t->rank = (uint8_t)rank;
    for (size_t d = 0; d < rank; d++) {
        if (!get_u64(json_array_get(shape, d), &dim) || !size_mul(elements, dim, &elements))
            return error_set(in->err, EBADMSG, "%s: tensor %s: dimension %zu is absurd", in->what,
                             name, d);
        if (d < CHECKPOINT_RANK_MAX)
            t->dim[d] = dim;
    }
    *ret_elements = elements;
    return 0;
}

static int parse_offsets(const struct reading *in, const char *name, const json_t *offsets,
                         struct checkpoint_tensor *t)
{
    uint64_t begin, end, room = in->file_bytes - in->data_start;
    if (json_array_size(offsets) != 2 || !get_u64(json_array_get(offsets, 0), &begin) ||
        !get_u64(json_array_get(offsets, 1), &end) || begin > end)
        return error_set(in->err, EBADMSG, "%s: tensor %s has no valid data_offsets", in->what,
                         name);
    if (end > room)
        return error_set(in->err, EBADMSG,
                         "%s: tensor %s ends at byte %llu of the data, the file holds %llu: it is "
                         "truncated or its header is wrong; download it again",
                         in->what, name, (unsigned long long)end, (unsigned long long)room);
    t->offset = in->data_start + begin;
    t->bytes = end - begin;
    return 0;
}

static int parse_tensor(const struct reading *in, const char *name, const json_t *entry,
                        struct tensor_list *list)
{
    struct checkpoint_tensor t = {.shard = in->shard};
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    uint64_t elements = 0, bits;
    int r;
    if (!dtype)
        return error_set(in->err, EBADMSG, "%s: tensor %s has no dtype", in->what, name);
    t.dtype = safetensors_dtype(dtype);
    strncpy(t.dtype_name, dtype, sizeof t.dtype_name - 1);
    if ((r = parse_shape(in, name, json_object_get(entry, "shape"), &t, &elements)) < 0 ||
        (r = parse_offsets(in, name, json_object_get(entry, "data_offsets"), &t)) < 0)
        return r;
    if (safetensors_bits(dtype) &&
        (!size_mul(elements, safetensors_bits(dtype), &bits) || bits % 8 || bits / 8 != t.bytes))
        return error_set(
            in->err, EBADMSG, "%s: tensor %s: %llu elements of %s do not take %llu bytes", in->what,
            name, (unsigned long long)elements, t.dtype_name, (unsigned long long)t.bytes);
    return tensor_list_add(list, &t, name, in->err);
}

static int by_offset(const void *a, const void *b)
{
    const struct checkpoint_tensor *x = *(const struct checkpoint_tensor *const *)a;
    const struct checkpoint_tensor *y = *(const struct checkpoint_tensor *const *)b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* The specification: tensors fill the data without hole or overlap. */
static int check_tiling(const struct reading *in, const struct tensor_list *list, size_t first)
{
    size_t n = list->count - first;
    _cleanup_free_ const struct checkpoint_tensor **order = mem_alloc(n, sizeof *order);
    uint64_t at = in->data_start;
    if (!order)
        return error_set(in->err, ENOMEM, "%s: no memory for %zu tensors", in->what, n);
    for (size_t i = 0; i < n; i++)
        order[i] = &list->tensors[first + i];
    qsort(order, n, sizeof *order, by_offset);
    for (size_t i = 0; i < n; i++) {
        const struct checkpoint_tensor *t = order[i];
        if (t->offset < at)
            return error_set(in->err, EBADMSG, "%s: tensor %s overlaps the one before it", in->what,
                             t->name);
        if (t->offset > at)
            return error_set(in->err, EBADMSG, "%s: %llu bytes before tensor %s belong to none",
                             in->what, (unsigned long long)(t->offset - at), t->name);
        at = t->offset + t->bytes;
    }
    if (at != in->file_bytes)
        return error_set(in->err, EBADMSG, "%s: %llu bytes behind the last tensor", in->what,
                         (unsigned long long)(in->file_bytes - at));
    return 0;
}

int safetensors_parse(const char *json, size_t len, uint64_t file_bytes, uint32_t shard,
                      const char *what, struct tensor_list *list, struct error *err)
{
    struct reading in = {what, 8 + (uint64_t)len, file_bytes, shard, err};
    size_t first = list->count;
    json_error_t trouble;
    const char *name;
    json_t *root, *entry;
    int r = 0;

    if (in.data_start > file_bytes)
        return error_set(err, EBADMSG, "%s: its header of %zu bytes does not fit its %llu bytes",
                         what, len, (unsigned long long)file_bytes);
    root = json_loadb(json, len, JSON_REJECT_DUPLICATES, &trouble);
    if (!json_is_object(root))
        r = error_set(err, EBADMSG, "%s: its header is not a JSON object: %s", what,
                      root ? "another kind of value" : trouble.text);
    else
        json_object_foreach(root, name, entry)
        {
            if (strcmp(name, "__metadata__"))
                r = parse_tensor(&in, name, entry, list);
            if (r < 0)
                break;
        }
    json_decref(root);
    return r < 0 ? r : check_tiling(&in, list, first);
}

int safetensors_read(int fd, uint32_t shard, const char *what, struct tensor_list *list,
                     struct error *err)
{
    struct stat st;
    uint8_t raw[8];
    uint64_t len = 0;
    int r;

    if (fstat(fd, &st) < 0)
        return error_sys(err, errno, "%s", what);
    if (!S_ISREG(st.st_mode))
        return error_set(err, EBADMSG, "%s: not a regular file", what);
    if (st.st_size < 8)
        return error_set(err, EBADMSG, "%s: too short for a safetensors file", what);
    r = fd_pread_all(fd, raw, sizeof raw, 0, what, err);
    if (r < 0)
        return r;
    for (int i = 7; i >= 0; i--)
        len = len << 8 | raw[i];
    if (len > SAFETENSORS_HEADER_MAX || len > (uint64_t)st.st_size - 8)
        return error_set(err, EBADMSG,
                         "%s: says that its header has %llu bytes; the file has %llu, and %llu is "
                         "the limit: not a safetensors file, or damaged",
                         what, (unsigned long long)len, (unsigned long long)st.st_size,
                         (unsigned long long)SAFETENSORS_HEADER_MAX);
    _cleanup_free_ char *json = mem_alloc((size_t)len + 1, 1);
    if (!json)
        return error_set(err, ENOMEM, "%s: no memory for a header of %llu bytes", what,
                         (unsigned long long)len);
    r = fd_pread_all(fd, json, (size_t)len, 8, what, err);
    return r < 0
               ? r
               : safetensors_parse(json, (size_t)len, (uint64_t)st.st_size, shard, what, list, err);
}
