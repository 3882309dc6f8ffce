/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One JSON value (RFC 8259), byte by byte: says where it ends and that it is valid so far. Nothing
 * is built. Input is valid UTF-8.
 */
#ifndef EMBER_MODEL_CHAT_SCAN_H
#define EMBER_MODEL_CHAT_SCAN_H

#include <stdbool.h>
#include <stdint.h>

#define SCAN_DEPTH_MAX 256

struct scan {
    uint8_t state;    /* enum scan_state */
    uint8_t after;    /* state behind a string: a key differs from a value */
    const char *rest; /* of the literal */
    unsigned depth, hex;
    uint8_t stack[SCAN_DEPTH_MAX / 8]; /* a bit each: 1 is an object */
};
#define SCAN_START ((struct scan){0})

/* What a byte did. Numbers end before the byte that follows them. */
enum scan_event {
    SCAN_BAD = -1,
    SCAN_IN,
    SCAN_KEY_BEGIN,  /* a key's opening quote */
    SCAN_KEY,        /* a key's closing quote */
    SCAN_BEGIN,      /* a value's first byte */
    SCAN_END,        /* a value's last byte; of the outermost one: all is done */
    SCAN_END_BEFORE, /* a number has ended before this byte, a comma or blank */
    SCAN_END_BOTH,   /* a number has ended before this byte, which ends the container around it */
};

enum scan_event scan_byte(struct scan *s, unsigned char c);
/* The outermost value has ended. */
bool scan_done(const struct scan *s);

#endif
