/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tokenizers of decoder models: what a Hugging Face tokenizer.json describes, to the token.
 *
 * Understood: BPE models (byte level, or characters with byte fallback), with the normalizers,
 * pre-tokenizers, post-processors and decoders that such models use. Any other component is an
 * error (-ENOTSUP) that names it. `truncation` and `padding` are not applied: a server neither cuts
 * nor fills a prompt.
 *
 * A tokenizer lives in one relocatable image (image.h): tokenizer_load compiles tokenizer.json into
 * it, tokenizer_image gives its bytes to a cache, tokenizer_map uses such bytes without parsing.
 *
 * Text is UTF-8, NUL bytes included; invalid UTF-8 is -EILSEQ. A `struct tokenizer` is immutable
 * after creation and may be used by many threads at once; a `struct detok` belongs to one.
 *
 * Format and semantics: https://huggingface.co/docs/tokenizers, checked against its results.
 */
#ifndef EMBER_MODEL_TOKENIZER_H
#define EMBER_MODEL_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/mem.h"

struct tokenizer;

/*
 * Loads a tokenizer.json (.xz too, through xz(1)), or a directory that has one. With a directory,
 * tokenizer_config.json beside it is read as well: for the classes whose loader builds the
 * post-processor from add_bos_token and add_eos_token (Llama, Code Llama, Gemma, Cohere) these
 * replace the one in tokenizer.json. -EBADMSG: malformed; -ENOTSUP: an unknown component, named.
 */
int tokenizer_load(const char *path, struct tokenizer **ret_tokenizer, struct error *err);

/*
 * What tokenizer_load reads: the text of tokenizer.json, decompressed, and of tokenizer_config.json
 * (data NULL: a folder without it, or a file was named). With config_only, json stays empty.
 */
struct tokenizer_files {
    struct buffer json, config;
};
int tokenizer_read(const char *path, bool config_only, struct tokenizer_files *ret_files,
                   struct error *err);
void tokenizer_files_free(struct tokenizer_files *files); /* idempotent; also a cleanup function */

/* The same from the text of a tokenizer.json; config may be NULL (no tokenizer_config.json). */
int tokenizer_load_text(const char *json, size_t len, const char *config, size_t config_len,
                        struct tokenizer **ret_tokenizer, struct error *err);

/*
 * The compiled image, owned by the tokenizer: bytes to store as they are, valid on machines of the
 * same byte order and for the same TOKENIZER_IMAGE_VERSION.
 */
#define TOKENIZER_IMAGE_VERSION 2
void tokenizer_image(const struct tokenizer *t, const void **ret_image, size_t *ret_len);

/*
 * A tokenizer on an image that the caller keeps unchanged (a read-only mapping, 8-byte aligned)
 * until tokenizer_free. The image is checked in full first: -EBADMSG when it is damaged, -ESTALE
 * when it is of another version.
 */
int tokenizer_map(const void *image, size_t len, struct tokenizer **ret_tokenizer,
                  struct error *err);

/*
 * The same on bytes whose checksum somebody has verified just now (a cache): the tables are
 * believed, so that pages are touched when they are needed; sections and components are checked all
 * the same. The image becomes the tokenizer's on success: release(image, len) when it is freed.
 */
int tokenizer_take(void *image, size_t len, void (*release)(void *image, size_t len),
                   struct tokenizer **ret_tokenizer, struct error *err);

void tokenizer_free(struct tokenizer *t);
DEFINE_CLEANUP(struct tokenizer *, tokenizer_free)

/*
 * Token ids of a text, *ret_ids malloc'ed (never NULL on success), *ret_n of them. add_special: run
 * the post-processor (beginning-of-sequence tokens and so on). Special tokens that occur literally
 * in the text become their ids either way.
 */
int tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, bool add_special,
                     uint32_t **ret_ids, size_t *ret_n, struct error *err);

/* Appends the text of ids to *out. Ids outside the vocabulary are left out, as the reference does.
 */
int tokenizer_decode(const struct tokenizer *t, const uint32_t *ids, size_t n, bool skip_special,
                     struct buffer *out, struct error *err);

/* One more than the largest id: the size that arrays indexed by id need. */
uint32_t tokenizer_vocab_size(const struct tokenizer *t);

/* The id of a token by its spelling in tokenizer.json ("Ġthe", "<|im_end|>"), or -1. */
int64_t tokenizer_token_id(const struct tokenizer *t, const char *content, size_t len);

/* The spelling of an id in tokenizer.json; NULL for a hole. Not NUL-terminated. */
const char *tokenizer_token_text(const struct tokenizer *t, uint32_t id, size_t *ret_len);

/* True for ids that skip_special leaves out. */
bool tokenizer_is_special(const struct tokenizer *t, uint32_t id);

/*
 * Appends the bytes that a token stands for in the middle of a text: "Ġthe" gives " the", "<0xE5>"
 * the one byte E5, which is half a character. What grammars and stop strings work on.
 */
int tokenizer_token_bytes(const struct tokenizer *t, uint32_t id, struct buffer *out,
                          struct error *err);

/*
 * Streaming decode: bytes leave as soon as no later token can change them. All pieces of one detok,
 * concatenated, are tokenizer_decode's text of the same ids; each piece is whole UTF-8 characters.
 * The tokenizer must outlive it.
 */
struct detok;
int detok_new(const struct tokenizer *t, bool skip_special, struct detok **ret_detok);
void detok_free(struct detok *d);
DEFINE_CLEANUP(struct detok *, detok_free)
/* Appends to *out what has become certain with this id: often a word, at times nothing. */
int detok_push(struct detok *d, uint32_t id, struct buffer *out, struct error *err);
/* Appends what was held back; an unfinished character becomes U+FFFD. Then the detok is at its end.
 */
int detok_finish(struct detok *d, struct buffer *out, struct error *err);

/*
 * Runs the cases of an expected.json: an object with `cases`, or the list itself, of objects with
 * text, ids, and optionally ids_with_special, decoded, decoded_skip_special. `path` may end in .xz
 * (read through xz(1)). Mismatches are appended to *report as lines with the first differing id or
 * character and what surrounds it; *ret_cases and *ret_mismatches count. Mismatches are not errors.
 */
int tokenizer_verify(const struct tokenizer *t, const char *path, struct buffer *report,
                     size_t *ret_cases, size_t *ret_mismatches, struct error *err);

#endif
