/* SPDX-License-Identifier: Apache-2.0 */
#include "model/chat/scan.h"

#include <string.h>

enum scan_state {
    VALUE,      /* a value must come */
    FIRST_ITEM, /* behind [: a value or ] */
    FIRST_KEY,  /* behind {: a key or } */
    KEY,        /* behind a comma in an object */
    COLON,
    NEXT, /* behind a value in a container: a comma or its end */
    DONE,
    STRING,
    ESCAPE,
    HEX,
    LITERAL,
    MINUS,
    ZERO,
    DIGITS,
    POINT,
    FRACTION,
    EXPONENT,
    EXPONENT_SIGN,
    EXPONENT_DIGITS,
};

static bool blank(unsigned char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static bool digit(unsigned char c)
{
    return c >= '0' && c <= '9';
}

static bool in_object(const struct scan *s)
{
    unsigned at = s->depth - 1;
    return s->stack[at / 8] >> at % 8 & 1;
}

/* A value has ended: what may follow it. */
static void value_ended(struct scan *s)
{
    s->state = s->depth ? NEXT : DONE;
}

static enum scan_event open_container(struct scan *s, bool object)
{
    if (s->depth == SCAN_DEPTH_MAX)
        return SCAN_BAD;
    uint8_t bit = (uint8_t)(1u << s->depth % 8);
    uint8_t *byte = &s->stack[s->depth / 8];
    *byte = object ? *byte | bit : *byte & (uint8_t)~bit;
    s->depth++;
    s->state = object ? FIRST_KEY : FIRST_ITEM;
    return SCAN_BEGIN;
}

static enum scan_event close_container(struct scan *s, unsigned char c)
{
    if (!s->depth || in_object(s) != (c == '}'))
        return SCAN_BAD;
    s->depth--;
    value_ended(s);
    return SCAN_END;
}

static enum scan_event begin_literal(struct scan *s, const char *rest)
{
    s->rest = rest;
    s->state = LITERAL;
    return SCAN_BEGIN;
}

static enum scan_event begin_value(struct scan *s, unsigned char c)
{
    switch (c) {
    case '{':
    case '[':
        return open_container(s, c == '{');
    case '"':
        s->state = STRING;
        s->after = NEXT;
        return SCAN_BEGIN;
    case 't':
        return begin_literal(s, "rue");
    case 'f':
        return begin_literal(s, "alse");
    case 'n':
        return begin_literal(s, "ull");
    case '-':
        s->state = MINUS;
        return SCAN_BEGIN;
    default:
        if (!digit(c))
            return SCAN_BAD;
        s->state = c == '0' ? ZERO : DIGITS;
        return SCAN_BEGIN;
    }
}

static enum scan_event between(struct scan *s, unsigned char c)
{
    if (blank(c))
        return SCAN_IN;
    switch (s->state) {
    case FIRST_ITEM:
        return c == ']' ? close_container(s, c) : begin_value(s, c);
    case FIRST_KEY:
        if (c == '}')
            return close_container(s, c);
        /* fallthrough */
    case KEY:
        if (c != '"')
            return SCAN_BAD;
        s->state = STRING;
        s->after = COLON;
        return SCAN_KEY_BEGIN;
    case COLON:
        s->state = VALUE;
        return c == ':' ? SCAN_IN : SCAN_BAD;
    case NEXT:
        if (c != ',')
            return close_container(s, c);
        s->state = in_object(s) ? KEY : VALUE;
        return SCAN_IN;
    case DONE:
        return SCAN_BAD;
    default:
        return begin_value(s, c);
    }
}

static enum scan_event in_string(struct scan *s, unsigned char c)
{
    if (s->state == HEX) {
        bool hex = digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
        if (++s->hex == 4)
            s->state = STRING;
        return hex ? SCAN_IN : SCAN_BAD;
    }
    if (s->state == ESCAPE) {
        s->state = c == 'u' ? HEX : STRING;
        s->hex = 0;
        return c && strchr("\"\\/bfnrtu", c) ? SCAN_IN : SCAN_BAD;
    }
    if (c == '\\') {
        s->state = ESCAPE;
        return SCAN_IN;
    }
    if (c != '"')
        return c < 0x20 ? SCAN_BAD : SCAN_IN;
    if (s->after == COLON) {
        s->state = COLON;
        return SCAN_KEY;
    }
    value_ended(s);
    return SCAN_END;
}

/* 1: the number goes on, 0: it may have ended, -1: it is broken. */
static int number_byte(struct scan *s, unsigned char c)
{
    static const struct {
        uint8_t from, on_zero, on_digit, on_point, on_e, on_sign;
        bool may_end;
    } rows[] = {
        {MINUS, ZERO, DIGITS, 0, 0, 0, false},
        {ZERO, 0, 0, POINT, EXPONENT, 0, true},
        {DIGITS, DIGITS, DIGITS, POINT, EXPONENT, 0, true},
        {POINT, FRACTION, FRACTION, 0, 0, 0, false},
        {FRACTION, FRACTION, FRACTION, 0, EXPONENT, 0, true},
        {EXPONENT, EXPONENT_DIGITS, EXPONENT_DIGITS, 0, 0, EXPONENT_SIGN, false},
        {EXPONENT_SIGN, EXPONENT_DIGITS, EXPONENT_DIGITS, 0, 0, 0, false},
        {EXPONENT_DIGITS, EXPONENT_DIGITS, EXPONENT_DIGITS, 0, 0, 0, true},
    };
    unsigned i = s->state - MINUS;
    uint8_t to = c == '0'               ? rows[i].on_zero
                 : digit(c)             ? rows[i].on_digit
                 : c == '.'             ? rows[i].on_point
                 : c == 'e' || c == 'E' ? rows[i].on_e
                 : c == '+' || c == '-' ? rows[i].on_sign
                                        : 0;
    if (to)
        s->state = to;
    return to ? 1 : rows[i].may_end ? 0 : -1;
}

enum scan_event scan_byte(struct scan *s, unsigned char c)
{
    if (s->state >= MINUS) {
        int r = number_byte(s, c);
        if (r)
            return r < 0 ? SCAN_BAD : SCAN_IN;
        if (!s->depth) /* outside a container only the end of the text ends a number */
            return SCAN_BAD;
        s->state = NEXT;
        enum scan_event e = between(s, c);
        return e == SCAN_END ? SCAN_END_BOTH : e == SCAN_IN ? SCAN_END_BEFORE : e;
    }
    if (s->state == LITERAL) {
        if ((unsigned char)*s->rest != c)
            return SCAN_BAD;
        if (*++s->rest)
            return SCAN_IN;
        value_ended(s);
        return SCAN_END;
    }
    if (s->state >= STRING)
        return in_string(s, c);
    return between(s, c);
}

bool scan_done(const struct scan *s)
{
    return s->state == DONE;
}
