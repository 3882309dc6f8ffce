/* SPDX-License-Identifier: Apache-2.0 */
/* By protobuf-c's reflection: descriptors tell where in the struct each field is. */
#include "cli/protojson.h"

#include <ctype.h>
#include <stdio.h>

static json_t *enum_json(const ProtobufCEnumDescriptor *type, int value)
{
    const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(type, value);
    char name[64];
    size_t i = 0;

    if (!v)
        return json_integer(value);
    for (; v->name[i] && i + 1 < sizeof name; i++)
        name[i] = (char)tolower((unsigned char)v->name[i]);
    name[i] = 0;
    return json_string(name);
}

static json_t *scalar(const ProtobufCFieldDescriptor *field, const void *at)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_STRING: {
        const char *s = *(char *const *)at;
        json_t *text = json_string(s ? s : "");
        return text ? text : json_string("(not UTF-8)");
    }
    case PROTOBUF_C_TYPE_BOOL:
        return json_boolean(*(const protobuf_c_boolean *)at);
    case PROTOBUF_C_TYPE_DOUBLE:
        return json_real(*(const double *)at);
    case PROTOBUF_C_TYPE_FLOAT:
        return json_real(*(const float *)at);
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        return json_integer(*(const uint32_t *)at);
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
        return json_integer(*(const int32_t *)at);
    case PROTOBUF_C_TYPE_ENUM:
        return enum_json(field->descriptor, *(const int *)at);
    case PROTOBUF_C_TYPE_MESSAGE: {
        const ProtobufCMessage *m = *(const ProtobufCMessage *const *)at;
        return m ? message_json(m) : json_null();
    }
    case PROTOBUF_C_TYPE_BYTES:
        return json_null();
    default: /* the 64-bit integers */
        return json_integer((json_int_t) * (const uint64_t *)at);
    }
}

static size_t element_size(const ProtobufCFieldDescriptor *field)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        return sizeof(void *);
    case PROTOBUF_C_TYPE_BOOL:
        return sizeof(protobuf_c_boolean);
    case PROTOBUF_C_TYPE_ENUM:
        return sizeof(int);
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_FLOAT:
    case PROTOBUF_C_TYPE_FIXED32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
        return 4;
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    default:
        return 8;
    }
}

json_t *message_json(const ProtobufCMessage *message)
{
    const ProtobufCMessageDescriptor *type = message->descriptor;
    json_t *object = json_object();

    for (unsigned i = 0; i < type->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &type->fields[i];
        const char *base = (const char *)message;
        if (field->label != PROTOBUF_C_LABEL_REPEATED) {
            json_object_set_new(object, field->name, scalar(field, base + field->offset));
            continue;
        }
        json_t *list = json_array();
        size_t n = *(const size_t *)(base + field->quantifier_offset), size = element_size(field);
        const char *items = *(const char *const *)(base + field->offset);
        for (size_t j = 0; j < n; j++)
            json_array_append_new(list, scalar(field, items + j * size));
        json_object_set_new(object, field->name, list);
    }
    return object;
}
