/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a checkpoint's folder (for a pack: the one it was made from, else the one it lies in) says
 * about text: tokenizer, chat template, ends of sequence, defaults of sampling. Immutable once
 * loaded; all functions may run on workers.
 */
#ifndef EMBER_DAEMON_GATEWAY_TEXT_H
#define EMBER_DAEMON_GATEWAY_TEXT_H

#include "cache/cache.h"
#include "daemon/gateway/openai.h"
#include "model/chat/chat.h"
#include "model/tokenizer/tokenizer.h"

#define TEXT_EOS_MAX 16

struct text {
    char *path, *dir; /* as asked for; of the tokenizer's files */
    uint64_t stamp;   /* text_changed */
    struct tokenizer *tokenizer;
    struct engine_lease *lease; /* of the tokenizer, until text_settle */
    struct chat_template *chat; /* NULL: chat_error says why */
    struct error chat_error;
    struct chat_form form; /* how it writes calls and thoughts, as its template shows it */
    bool null_content;     /* its template tells messages with calls by content that is none */
    uint32_t eos[TEXT_EOS_MAX], n_eos;
    uint32_t vocab_size;
    uint32_t rope_exact_len; /* as in model/model.h */
    struct {
        float temperature, top_p, min_p, repetition_penalty;
        uint32_t top_k;
        unsigned set; /* API_TEMPERATURE | ... */
    } defaults;       /* of generation_config.json */
};

/* How many tokens a sequence of that checkpoint may have; 0: its config.json does not say. */
uint32_t text_max_positions(const char *path);

/* path: a checkpoint's folder, or a pack. cache (may be NULL) holds compiled tokenizers. */
int text_load(const char *path, struct cache *cache, struct text **ret, struct error *err);
/* A file that it was read from has changed since, as sizes and times say. */
bool text_changed(const struct text *text);
/* Ends what the tokenizer holds of the cache; others may use the text meanwhile. */
void text_settle(struct text *text);
void text_free(struct text *text);

/*
 * Makes token ids of every prompt (chats are rendered first) and puts the model's defaults where
 * the client left a number out. -EINVAL and *fail.
 */
int text_prepare(const struct text *text, struct api_request *request, struct api_error *fail);

#endif
