/* SPDX-License-Identifier: Apache-2.0 */
/* Messages of ember.v1 as JSON objects with the field names of the .proto file. */
#ifndef EMBER_CLI_PROTOJSON_H
#define EMBER_CLI_PROTOJSON_H

#include <jansson.h>

#include "ember/v1/ember.pb-c.h"

/* Any message: scalars, strings, enums by name in lower case, nested and repeated messages. */
json_t *message_json(const ProtobufCMessage *message);

static inline json_t *model_json(const Ember__V1__Model *model)
{
    return message_json(&model->base);
}
static inline json_t *instance_json(const Ember__V1__Instance *instance)
{
    return message_json(&instance->base);
}

#endif
