/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An index of FileDescriptorSets for reflection. A descriptor is itself a protobuf message; of it
 * only names and imports are needed, so the wire format (protobuf.dev/programming-guides/encoding)
 * is walked directly instead of generating code for all of descriptor.proto.
 *
 * Field numbers, from google/protobuf/descriptor.proto:
 *   FileDescriptorSet.file 1; FileDescriptorProto name 1, package 2, dependency 3, message_type 4,
 *   enum_type 5, service 6, extension 7; DescriptorProto name 1, field 2, nested_type 3, enum_type
 * 4, extension 6, oneof_decl 8; EnumDescriptorProto name 1, value 2; ServiceDescriptorProto name 1,
 *   method 2; the name of a field, value, method or oneof is 1.
 */
#include <errno.h>
#include <string.h>

#include "proto/grpc/server-internal.h"

struct field {
    unsigned number;
    const uint8_t *data; /* of a length-delimited field, NULL for others */
    size_t size;
};

enum { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5, NESTING_MAX = 32 };

static bool take_varint(const uint8_t **p, const uint8_t *end, uint64_t *ret)
{
    uint64_t value = 0;

    for (unsigned shift = 0; shift < 64 && *p < end; shift += 7) {
        uint8_t byte = *(*p)++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80)) {
            *ret = value;
            return true;
        }
    }
    return false;
}

/* 1 and the next field, 0 at the end, -EBADMSG. */
static int next_field(const uint8_t **p, const uint8_t *end, struct field *ret)
{
    uint64_t key, n = 0;

    if (*p == end)
        return 0;
    if (!take_varint(p, end, &key) || key >> 3 > INT32_MAX)
        return -EBADMSG;
    *ret = (struct field){.number = (unsigned)(key >> 3)};
    switch (key & 7) {
    case WIRE_VARINT:
        return take_varint(p, end, &n) ? 1 : -EBADMSG;
    case WIRE_64:
        n = 8;
        break;
    case WIRE_32:
        n = 4;
        break;
    case WIRE_BYTES:
        if (!take_varint(p, end, &n))
            return -EBADMSG;
        ret->data = *p;
        break;
    default:
        return -EBADMSG;
    }
    if (n > (size_t)(end - *p))
        return -EBADMSG;
    ret->size = n;
    *p += n;
    return 1;
}

/* The first length-delimited field of a number; data NULL when absent. */
static struct field find_field(const uint8_t *data, size_t size, unsigned number)
{
    const uint8_t *p = data, *end = data + size;
    struct field field;

    while (next_field(&p, end, &field) > 0)
        if (field.number == number && field.data)
            return field;
    return (struct field){0};
}

/* What may be inside what, by field number. */
enum kind { KIND_FILE, KIND_MESSAGE, KIND_ENUM, KIND_SERVICE, KIND_LEAF, KIND_NONE };

static enum kind child_kind(enum kind parent, unsigned number)
{
    static const enum kind children[KIND_LEAF][9] = {
        [KIND_FILE] = {KIND_NONE, KIND_NONE, KIND_NONE, KIND_NONE, KIND_MESSAGE, KIND_ENUM,
                       KIND_SERVICE, KIND_LEAF, KIND_NONE},
        [KIND_MESSAGE] = {KIND_NONE, KIND_NONE, KIND_LEAF, KIND_MESSAGE, KIND_ENUM, KIND_NONE,
                          KIND_LEAF, KIND_NONE, KIND_LEAF},
        [KIND_ENUM] = {KIND_NONE, KIND_NONE, KIND_LEAF, KIND_NONE, KIND_NONE, KIND_NONE, KIND_NONE,
                       KIND_NONE, KIND_NONE},
        [KIND_SERVICE] = {KIND_NONE, KIND_NONE, KIND_LEAF, KIND_NONE, KIND_NONE, KIND_NONE,
                          KIND_NONE, KIND_NONE, KIND_NONE},
    };

    return parent >= KIND_LEAF || number > 8 ? KIND_NONE : children[parent][number];
}

/* True when `symbol`, relative to the element, names something inside it. */
static bool defines(enum kind kind, const uint8_t *data, size_t size, const char *symbol,
                    unsigned depth)
{
    const uint8_t *p = data, *end = data + size;
    struct field field;

    while (depth < NESTING_MAX && next_field(&p, end, &field) > 0) {
        enum kind child = child_kind(kind, field.number);
        if (child == KIND_NONE || !field.data)
            continue;
        struct field name = find_field(field.data, field.size, 1);
        if (!name.data || strncmp(symbol, (const char *)name.data, name.size))
            continue;
        const char *rest = symbol + name.size;
        if (!*rest || (*rest == '.' && defines(child, field.data, field.size, rest + 1, depth + 1)))
            return true;
    }
    return false;
}

static bool file_defines(const struct proto_file *file, const char *symbol)
{
    struct field package = find_field(file->data, file->size, 2);

    if (package.size) {
        if (strncmp(symbol, (const char *)package.data, package.size) ||
            symbol[package.size] != '.')
            return false;
        symbol += package.size + 1;
    }
    return defines(KIND_FILE, file->data, file->size, symbol, 0);
}

const struct proto_file *protoset_by_name(const struct grpc_server *server, const char *name,
                                          size_t len)
{
    for (size_t i = 0; i < server->n_files; i++)
        if (strlen(server->files[i].name) == len && !memcmp(server->files[i].name, name, len))
            return &server->files[i];
    return NULL;
}

const struct proto_file *protoset_by_symbol(const struct grpc_server *server, const char *symbol)
{
    for (size_t i = 0; i < server->n_files; i++)
        if (file_defines(&server->files[i], symbol))
            return &server->files[i];
    return NULL;
}

void protoset_imports(const struct proto_file *file,
                      void (*import)(const char *name, size_t len, void *user), void *user)
{
    const uint8_t *p = file->data, *end = p + file->size;
    struct field field;

    while (next_field(&p, end, &field) > 0)
        if (field.number == 3 && field.data)
            import((const char *)field.data, field.size, user);
}

static int add_file(struct grpc_server *server, const uint8_t *data, size_t size)
{
    struct field name = find_field(data, size, 1);

    if (!name.data)
        return -EBADMSG;
    if (protoset_by_name(server, (const char *)name.data, name.size))
        return 0; /* imported by more than one */
    server->files = x_realloc(server->files, (server->n_files + 1) * sizeof *server->files);
    server->files[server->n_files++] = (struct proto_file){
        .data = data, .size = size, .name = x_strndup((const char *)name.data, name.size)};
    return 0;
}

int grpc_server_add_protoset(struct grpc_server *server, const uint8_t *data, size_t size,
                             struct error *err)
{
    const uint8_t *p = data, *end = data + size;
    struct field field;
    int r;

    while ((r = next_field(&p, end, &field)) > 0)
        if (field.number == 1 && (!field.data || add_file(server, field.data, field.size) < 0))
            r = -EBADMSG;
    if (r < 0)
        return error_set(err, EBADMSG, "not a FileDescriptorSet (%zu bytes)", size);
    return 0;
}

void protoset_free(struct grpc_server *server)
{
    for (size_t i = 0; i < server->n_files; i++)
        free(server->files[i].name);
    free(server->files);
}
