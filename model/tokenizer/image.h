/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The compiled tokenizer: one block of memory without pointers, in this machine's byte order.
 *
 *   struct image_header, then the sections that it names, each aligned to 8 bytes:
 *   strings   bytes of all texts; every (off, len) below points into them
 *   tokens    struct image_token [n_ids]: the spelling of each id, for decoding and look-ups
 *   vocab     struct image_vocab [n_vocab]: the model's keys, as bytes that the encoder looks for
 *   slots     u32 [n_slots]: open-addressed hash of vocab, by checksum_of(key): index + 1, 0 empty
 *   merges    u64 [8 * buckets]: hash by (left, right) in buckets of a cache line, filled from the
 *             front, overflowing into the next: left << 43 | right << 22 | rank, all ones empty
 *   ranks     u32 [n_ranks]: the id that the merge of each rank makes
 *   added     struct image_added [n_added]: patterns of added tokens, those matched against the raw
 *             text first (n_added_raw), each part sorted by bytes and free of duplicates
 *   comps     struct image_comp: normalizers, pre-tokenizers, decoders, sequences flattened
 *   post      struct image_post: templates of the post-processors, one behind the other
 *   pairs     u8 [PAIRS_BYTES] or nothing: a filter of the character pairs that occur in merges
 *   known     u8 [KNOWN_BYTES] or nothing: BMP characters that are tokens
 *
 * With FLAG_BYTES the last pre-tokenizer is ByteLevel: keys in vocab are the raw bytes and
 * `byte_token` gives each byte's id. Without, keys are the characters.
 * image_check validates all of this; the encoder then indexes without further checks.
 */
#ifndef EMBER_MODEL_TOKENIZER_IMAGE_H
#define EMBER_MODEL_TOKENIZER_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/digest.h"
#include "base/error.h"
#include "base/mem.h"

#define IMAGE_MAGIC UINT64_C(0x314B4F5452454D45) /* "EMERTOK1" on little-endian hosts */
#define IMAGE_MAX_IDS (1u << 21)                 /* MERGE_ID_BITS */
#define IMAGE_MAX_RANKS (1u << 21)               /* fewer than fit into MERGE_RANK_BITS */
#define IMAGE_MAX_COMPS 64                       /* all components */
#define IMAGE_MAX_PRE 32                         /* pre-tokenizers */
#define PAIRS_BYTES 65536u
#define KNOWN_BYTES 8192u
#define NO_ID UINT32_MAX
/* No text within grows beyond this, whatever a tokenizer.json makes of it. */
#define IMAGE_MAX_TEXT ((size_t)INT32_MAX / 4)

enum image_flag {
    FLAG_BYTES = 1,
    FLAG_FUSE_UNK = 2,
    FLAG_BYTE_FALLBACK = 4,
    FLAG_IGNORE_MERGES = 8,
    FLAG_UNK = 16,          /* unk_token is set; unk_id is NO_ID when the vocabulary lacks it */
    FLAG_DECODER = 32,      /* there is a decoder; without one, tokens are joined by spaces */
    FLAG_AFFIX = 64,        /* continuing_subword_prefix or end_of_word_suffix is not empty */
    FLAG_SCAN_MERGES = 128, /* merges are regular: a scan gives what the queue would */
};

struct image_str {
    uint32_t off, len;
};

enum token_flag { TOKEN_PRESENT = 1, TOKEN_SPECIAL = 2, TOKEN_ADDED = 4 };
struct image_token {
    struct image_str text;
    uint32_t flags;
};

struct image_vocab {
    struct image_str key;
    uint32_t id;
};

#define MERGE_ID_BITS 21
#define MERGE_RANK_BITS 22
#define MERGE_BUCKET 8u
#define MERGE_EMPTY UINT64_MAX

enum added_flag { ADDED_SINGLE_WORD = 1, ADDED_LSTRIP = 2, ADDED_RSTRIP = 4 };
struct image_added {
    struct image_str pattern;
    uint32_t id, flags;
};

#define IMAGE_COMPS(X)                                                                             \
    X(NORM_NFC)                                                                                    \
    X(NORM_NFD)                                                                                    \
    X(NORM_NFKC)                                                                                   \
    X(NORM_NFKD)                                                                                   \
    X(NORM_LOWERCASE)                                                                              \
    X(NORM_STRIP)                                                                                  \
    X(NORM_STRIP_ACCENTS)                                                                          \
    X(NORM_PREPEND)                                                                                \
    X(NORM_REPLACE)                                                                                \
    X(NORM_BYTE_LEVEL)                                                                             \
    X(PRE_SPLIT)                                                                                   \
    X(PRE_BYTE_LEVEL)                                                                              \
    X(PRE_DIGITS)                                                                                  \
    X(PRE_METASPACE)                                                                               \
    X(PRE_PUNCTUATION)                                                                             \
    X(PRE_WHITESPACE)                                                                              \
    X(PRE_WHITESPACE_SPLIT)                                                                        \
    X(DEC_BYTE_LEVEL)                                                                              \
    X(DEC_BYTE_FALLBACK)                                                                           \
    X(DEC_REPLACE)                                                                                 \
    X(DEC_STRIP)                                                                                   \
    X(DEC_FUSE)                                                                                    \
    X(DEC_METASPACE)
enum comp_kind {
#define X(name) name,
    IMAGE_COMPS(X)
#undef X
        COMP_KINDS
};

enum comp_flag {
    COMP_REGEX = 1,         /* pattern is a regular expression, not a text */
    COMP_INVERT = 2,        /* Split: matches and gaps change places */
    COMP_LEFT = 4,          /* Strip normalizer */
    COMP_RIGHT = 8,         /* Strip normalizer */
    COMP_PREFIX_SPACE = 16, /* ByteLevel */
    COMP_INDIVIDUAL = 32,   /* Digits */
    COMP_SPLIT = 64,        /* Metaspace */
};

enum split_behavior {
    SPLIT_REMOVED,
    SPLIT_ISOLATED,
    SPLIT_MERGED_PREVIOUS,
    SPLIT_MERGED_NEXT,
    SPLIT_CONTIGUOUS,
    SPLIT_BEHAVIORS
};
enum prepend_scheme { PREPEND_ALWAYS, PREPEND_FIRST, PREPEND_NEVER, PREPEND_SCHEMES };

struct image_comp {
    uint32_t kind, flags;
    struct image_str pattern; /* Replace, Split, ByteLevel's own; Metaspace: the replacement */
    struct image_str content; /* Replace, Prepend, Strip decoder */
    uint32_t n, m; /* Split, Punctuation: behaviour; Metaspace: scheme; Strip: start, stop */
};

enum post_kind { POST_ID, POST_SEQUENCE, POST_END };
struct image_post {
    uint32_t kind, id;
};

struct image_section {
    uint64_t off;
    uint32_t n; /* elements */
    uint32_t reserved;
};

struct image_header {
    uint64_t magic;
    uint32_t version, header_size;
    uint64_t total_len;
    uint64_t checksum; /* checksum_of everything behind this field */
    uint32_t flags, unk_id;
    uint32_t n_ids, n_added_raw;
    uint32_t n_norm, n_pre, n_dec; /* in this order within comps */
    uint32_t max_added_len;
    struct image_str prefix, suffix; /* continuing_subword_prefix, end_of_word_suffix */
    struct image_section strings, tokens, vocab, slots, merges, ranks, added, comps, post, pairs,
        known;
    uint32_t byte_token[256];    /* FLAG_BYTES: id of each byte, or NO_ID */
    uint32_t byte_fallback[256]; /* id of "<0xNN>", or NO_ID */
};

static inline uint64_t merge_key(uint32_t left, uint32_t right)
{
    return (uint64_t)left << MERGE_ID_BITS | right;
}

/* The bucket of n that a pair is looked for in first. */
static inline uint32_t merge_bucket(uint64_t key, uint32_t n)
{
    uint64_t x = key * UINT64_C(0x9E3779B97F4A7C15);
    x ^= x >> 29;
    x *= UINT64_C(0xBF58476D1CE4E5B9);
    return (uint32_t)((x >> 32) * n >> 32);
}

static inline uint32_t pair_bit(uint32_t a, uint32_t b)
{
    uint64_t x = ((uint64_t)a << 32 | b) * UINT64_C(0x9E3779B97F4A7C15);
    return (uint32_t)(x >> 45); /* 19 bits: PAIRS_BYTES * 8 */
}

/* Checks bytes from a cache or another process in full. */
int image_check(const void *image, size_t len, struct error *err);
/* Checks all but the checksum and the tables that grow with the vocabulary. */
int image_check_frame(const void *image, size_t len, struct error *err);

/* The builder (load.c) fills these and image_build lays them out. */
struct image_parts {
    struct image_header h; /* flags, ids, counts, byte tables; not the sections */
    struct buffer strings, tokens, vocab, slots, merges, ranks, added, comps, post, pairs, known;
};
void image_parts_free(struct image_parts *p);
/* Adds a text to the strings. */
int image_add_string(struct image_parts *p, const char *s, size_t len, struct image_str *ret);
int image_build(struct image_parts *p, void **ret_image, size_t *ret_len, struct error *err);

#endif
