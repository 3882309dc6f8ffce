/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A vocabulary as tries, and shares of it that are decided without walking.
 *
 * A safe character is any but '"', '\', those below U+0020 (what is left may stand in a JSON string
 * as it is) and the line ends U+2028 and U+2029 (which `.` does not match). A token that is made of
 * 1 to SAFE_MAX whole safe characters is in slice k, its number of characters. Where a safe
 * character, whichever, leads to one and the same place, and so on for k characters, the slices up
 * to k are allowed as a whole: most of a vocabulary at once. The other tokens have a trie of their
 * own, which is what has to be walked then.
 */
#ifndef EMBER_MODEL_GRAMMAR_VOCAB_H
#define EMBER_MODEL_GRAMMAR_VOCAB_H

#include "model/grammar/grammar.h"

#define SAFE_MAX 32
#define NO_TOKEN UINT32_MAX
#define TOKEN_BYTES_MAX 255

/* In preorder; children by byte. */
struct trie_node {
    uint32_t end;   /* the first node behind its subtree */
    uint32_t token; /* a token that ends here; more by `same` */
    uint8_t byte, depth;
};

struct trie {
    struct trie_node *nodes;
    uint32_t n;
};

struct vocab {
    uint32_t size, words;
    uint32_t *first; /* [size + 1] */
    uint8_t *bytes;
    uint32_t *same; /* [size] the next token with the same bytes */
    struct trie all, unsafe;
    uint64_t *slices; /* [SAFE_MAX][words]: tokens of up to k + 1 safe characters */
};

#endif
