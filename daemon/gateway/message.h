/* SPDX-License-Identifier: Apache-2.0 */
/* A chat's answer as a message: content, reasoning and tool calls, taken out of what streams. */
#ifndef EMBER_DAEMON_GATEWAY_MESSAGE_H
#define EMBER_DAEMON_GATEWAY_MESSAGE_H

#include "daemon/gateway/openai.h"
#include "daemon/gateway/text.h"

struct message;

/*
 * For the answer `index` to a prompt of a chat; NULL: its text is its content as it is, since the
 * model neither thinks nor was given tools. Content is appended to *content. `seed` makes the ids
 * of its calls. Borrows all of them for its life.
 */
struct message *message_new(const struct text *text, const struct api_request *request,
                            const struct api_prompt *prompt, uint64_t seed, struct buffer *content);
void message_free(struct message *m);
/* Whether the token's text is left out: a special one that means nothing to the parser. */
bool message_skips(const struct message *m, uint32_t token);
void message_push(struct message *m, const char *text, size_t len);
void message_finish(struct message *m);
/* parallel_tool_calls is false and the one call has come: the answer may end. */
bool message_done(const struct message *m);
/* It has whole calls. */
bool message_calls(const struct message *m);
/* There is something beside content that has not been written. */
bool message_pending(const struct message *m);
/*
 * Writes it as members of a JSON object: ,"reasoning":...,"tool_calls":[...] with a comma in front
 * of each. In a stream it is gone then; of a whole message it is called once.
 */
void message_write(struct message *m, struct buffer *out);

#endif
