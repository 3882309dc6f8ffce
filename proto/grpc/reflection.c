/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grpc.reflection.v1 and v1alpha: what services are here, and the files that describe them. The two
 * versions differ in the package's name alone, so one handler and one set of types serves both.
 */
#include <errno.h>
#include <string.h>

#include "grpc/reflection/v1/reflection.pb-c.h"
#include "proto/grpc/server-internal.h"

typedef Grpc__Reflection__V1__ServerReflectionRequest reflection_request;
typedef Grpc__Reflection__V1__ServerReflectionResponse reflection_response;

extern const uint8_t grpc_reflection_v1_protoset[], grpc_reflection_v1alpha_protoset[];
extern const size_t grpc_reflection_v1_protoset_size, grpc_reflection_v1alpha_protoset_size;

static void send_error(struct grpc_call *call, reflection_response *response,
                       enum grpc_status status, const char *text)
{
    Grpc__Reflection__V1__ErrorResponse error = GRPC__REFLECTION__V1__ERROR_RESPONSE__INIT;

    error.error_code = status;
    error.error_message = (char *)text;
    response->message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE;
    response->error_response = &error;
    grpc_call_send(call, &response->base);
}

static void send_services(struct grpc_call *call, struct grpc_server *server,
                          reflection_response *response)
{
    Grpc__Reflection__V1__ListServiceResponse list =
        GRPC__REFLECTION__V1__LIST_SERVICE_RESPONSE__INIT;
    _cleanup_free_ Grpc__Reflection__V1__ServiceResponse *services =
        x_alloc(server->n_services * sizeof *services);
    _cleanup_free_ Grpc__Reflection__V1__ServiceResponse **pointers =
        x_alloc(server->n_services * sizeof *pointers);

    for (size_t i = 0; i < server->n_services; i++) {
        grpc__reflection__v1__service_response__init(&services[i]);
        services[i].name = (char *)server->services[i].desc->name;
        pointers[i] = &services[i];
    }
    list.n_service = server->n_services;
    list.service = pointers;
    response->message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_LIST_SERVICES_RESPONSE;
    response->list_services_response = &list;
    grpc_call_send(call, &response->base);
}

/* A file and all that it imports, each once. */
struct closure {
    const struct grpc_server *server;
    const struct proto_file **files; /* room for all of the server's */
    size_t n;
};

static void closure_add(const char *name, size_t len, void *user)
{
    struct closure *closure = user;
    const struct proto_file *file = protoset_by_name(closure->server, name, len);

    for (size_t i = 0; i < closure->n; i++)
        if (closure->files[i] == file)
            return;
    if (file)
        closure->files[closure->n++] = file;
}

static void send_file(struct grpc_call *call, const struct grpc_server *server,
                      reflection_response *response, const struct proto_file *file)
{
    Grpc__Reflection__V1__FileDescriptorResponse found =
        GRPC__REFLECTION__V1__FILE_DESCRIPTOR_RESPONSE__INIT;

    if (!file) {
        send_error(call, response, GRPC_NOT_FOUND, "no file of this server defines that");
        return;
    }
    _cleanup_free_ const struct proto_file **files = x_alloc(server->n_files * sizeof *files);
    _cleanup_free_ ProtobufCBinaryData *bytes = x_alloc(server->n_files * sizeof *bytes);
    struct closure closure = {.server = server, .files = files};
    closure.files[closure.n++] = file;
    for (size_t i = 0; i < closure.n; i++) { /* grows while it is walked */
        protoset_imports(files[i], closure_add, &closure);
        bytes[i] = (ProtobufCBinaryData){.len = files[i]->size, .data = (uint8_t *)files[i]->data};
    }
    found.n_file_descriptor_proto = closure.n;
    found.file_descriptor_proto = bytes;
    response->message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_FILE_DESCRIPTOR_RESPONSE;
    response->file_descriptor_response = &found;
    grpc_call_send(call, &response->base);
}

/* proto3 has no extensions of our own: a type that exists has none, others are unknown. */
static void send_extensions(struct grpc_call *call, const struct grpc_server *server,
                            reflection_response *response, const char *type)
{
    Grpc__Reflection__V1__ExtensionNumberResponse none =
        GRPC__REFLECTION__V1__EXTENSION_NUMBER_RESPONSE__INIT;

    if (!protoset_by_symbol(server, type)) {
        send_error(call, response, GRPC_NOT_FOUND, "no file of this server defines that type");
        return;
    }
    none.base_type_name = (char *)type;
    response->message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ALL_EXTENSION_NUMBERS_RESPONSE;
    response->all_extension_numbers_response = &none;
    grpc_call_send(call, &response->base);
}

static void on_info(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    reflection_request *request = (reflection_request *)message;
    struct grpc_server *server = user;
    reflection_response response = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__INIT;

    if (!request) {
        grpc_call_finish(call, GRPC_OK, NULL);
        return;
    }
    response.valid_host = request->host;
    response.original_request = request;
    switch (request->message_request_case) {
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES:
        send_services(call, server, &response);
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME:
        send_file(
            call, server, &response,
            protoset_by_name(server, request->file_by_filename, strlen(request->file_by_filename)));
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL:
        send_file(call, server, &response,
                  protoset_by_symbol(server, request->file_containing_symbol));
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_ALL_EXTENSION_NUMBERS_OF_TYPE:
        send_extensions(call, server, &response, request->all_extension_numbers_of_type);
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_EXTENSION:
        send_error(call, &response, GRPC_NOT_FOUND, "no file of this server defines extensions");
        break;
    default:
        send_error(call, &response, GRPC_INVALID_ARGUMENT, "the request asks for nothing");
    }
}

int reflection_init(struct grpc_server *server, struct error *err)
{
    static const struct grpc_method methods[] = {{"ServerReflectionInfo", GRPC_BIDI, on_info}};
    const ProtobufCServiceDescriptor *v1 = &grpc__reflection__v1__server_reflection__descriptor;

    server->reflection_alpha = *v1;
    server->reflection_alpha.name = "grpc.reflection.v1alpha.ServerReflection";
    server->reflection_alpha.package = "grpc.reflection.v1alpha";
    int r = grpc_server_add_service(server, v1, methods, ARRAY_LEN(methods), server, err);
    if (r == 0)
        r = grpc_server_add_service(server, &server->reflection_alpha, methods, ARRAY_LEN(methods),
                                    server, err);
    if (r == 0)
        r = grpc_server_add_protoset(server, grpc_reflection_v1_protoset,
                                     grpc_reflection_v1_protoset_size, err);
    if (r == 0)
        r = grpc_server_add_protoset(server, grpc_reflection_v1alpha_protoset,
                                     grpc_reflection_v1alpha_protoset_size, err);
    return r;
}
