/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Values of the template interpreter, and what all that makes them needs.
 *
 * Everything that one compilation or one rendering makes lives in its arena and goes with it:
 * values are never freed one by one, so cycles (a macro and the frame that holds it) need no care.
 * A failure anywhere unwinds to the entry point by longjmp (run_fail); nothing below it owns
 * anything else. So no function here returns an error, and pointers that are returned are valid as
 * long as the arena of `r` is.
 *
 * Values are Python's: strings count code points, integers are 64 bits wide (what does not fit
 * fails), dicts keep their order.
 */
#ifndef EMBER_MODEL_TEMPLATE_VALUE_INTERNAL_H
#define EMBER_MODEL_TEMPLATE_VALUE_INTERNAL_H

#include <errno.h>
#include <setjmp.h>
#include <string.h>

#include "model/template/template.h"

/* --- Values --- */

enum value_type {
    T_MISSING, /* no value: an empty slot, an argument not given */
    T_UNDEFINED,
    T_NONE,
    T_BOOL,
    T_INT,
    T_FLOAT,
    T_STR,
    T_LIST,
    T_TUPLE,
    T_DICT,
    T_NAMESPACE,
    T_VIEW, /* dict.keys(), values(), items() */
    T_RANGE,
    T_ITER, /* a generator: can be gone through once */
    T_MACRO,
    T_FUNCTION,
    T_METHOD, /* a function with its object */
    T_LOOP,
    T_CYCLER,
    T_JOINER
};

struct run;
struct args;

/* Bytes with room behind, shared by strings that are each other's beginnings: makes a = a + b
 * cheap. */
struct block {
    char *base;
    size_t used, cap;
};

struct str {
    const char *data; /* UTF-8, valid, not terminated */
    size_t len;
    size_t chars; /* code points, SIZE_MAX when not yet counted */
    struct block *block;
};

struct value {
    uint8_t type;
    bool safe; /* of T_STR: Markup */
    union {
        bool b;
        int64_t i;
        double f;
        struct str *s;
        struct seq *seq;   /* LIST, TUPLE */
        struct dict *dict; /* DICT, NAMESPACE */
        struct undefined *undef;
        struct view *view;
        struct range *range;
        struct iter *iter;
        struct macro *macro;
        struct method *method; /* METHOD, FUNCTION */
        struct loop *loop;
        struct cycler *cycler;
        const void *p;
    };
};

struct seq {
    struct value *v;
    size_t n, cap;
};

struct dict_entry {
    struct value key, value;
};

struct dict {
    struct dict_entry *v;
    size_t n, cap;
    uint32_t *index; /* open addressing, entry + 1; NULL while small */
    size_t index_size;
};

struct undefined {
    const char *text; /* the whole error message, or NULL: made from the rest */
    struct str *name;
    struct value object; /* what has no such attribute; MISSING: a name */
    bool unsafe;
};

enum view_kind { VIEW_KEYS, VIEW_VALUES, VIEW_ITEMS };
struct view {
    enum view_kind kind;
    struct dict *dict;
};

struct range {
    int64_t start, stop, step;
    size_t n;
};

/* One pass over something; `next` is NULL for the plain ones. */
struct iter {
    struct value source;
    size_t pos;
    bool (*next)(struct run *r, struct iter *it, struct value *ret);
    void *state;
    struct iter *inner;
    const char *repr;
};

struct frame {
    struct frame *parent;
    const struct scope *scope;
    struct value *slots;
};

struct macro {
    const struct node *node; /* N_MACRO or N_CALLBLOCK */
    struct frame *frame;     /* where it was defined */
};

typedef struct value (*function_fn)(struct run *r, const struct value *self, struct args *a);

struct method {
    const char *name;
    function_fn call;
    struct value self;
};

struct cycler {
    struct seq *items;
    size_t pos;
    struct str *sep; /* joiner */
    bool used;
};

struct loop {
    const struct node *node;
    struct frame *outer; /* of the for statement */
    struct iter *source;
    struct value before, current, after, changed;
    int64_t index0, depth0;
    int64_t length; /* -1: not yet known */
};

struct keyword {
    struct str *name;
    struct value value;
};
struct args {
    const char *what; /* the function's name, for messages */
    struct value *pos;
    size_t n;
    struct keyword *kw;
    size_t n_kw;
};

/* Binary operators and comparisons. */
enum op {
    OP_ADD,
    OP_SUB,
    OP_MUL,
    OP_DIV,
    OP_FLOORDIV,
    OP_MOD,
    OP_POW,
    OP_EQ,
    OP_NE,
    OP_LT,
    OP_LE,
    OP_GT,
    OP_GE,
    OP_IN,
    OP_NOTIN
};

/* --- A compilation or a rendering --- */

struct chunk;
struct sb { /* a text being made, in the arena */
    char *data;
    size_t len, cap;
};

struct run {
    jmp_buf jump;
    struct chunk *chunks;
    uint64_t memory, steps;
    uint32_t depth, line;
    struct template_limits limits;
    struct error *err;
    int code;
    enum template_outcome outcome;
    const struct tm *now;
    struct dict *vars; /* the context; top-level assignments go here */
    struct sb *out;
    const struct node *root;
    uint64_t output;
};

/* Formats the message behind "line N: ", N being r->line, and unwinds; run_fail is -EINVAL. */
void run_fail(struct run *r, const char *format, ...)
    __attribute__((format(printf, 2, 3), noreturn));
void run_fail_code(struct run *r, int errnum, const char *format, ...)
    __attribute__((format(printf, 3, 4), noreturn));
/* Unwinds with the template's own words: it does not take this context (raise_exception). */
void run_refuse(struct run *r, struct str *message) __attribute__((noreturn));

/* An empty run with an empty arena. Limits that are 0 (limits NULL: all) are the defaults; err is
 * where a failure is said, and may be NULL. The caller sets r->jump before anything can fail. */
void run_init(struct run *r, const struct template_limits *limits, struct error *err);
/* Frees the arena, and with it all that was made. */
void run_clear(struct run *r);

/* n times size bytes, zeroed, aligned for anything; fails beyond the limit of memory. */
void *arena(struct run *r, size_t n, size_t size);

/* Counts work; fails when there was too much. */
static inline void run_charge(struct run *r, uint64_t bytes)
{
    r->steps += 1 + bytes / 64;
    if (__builtin_expect(r->steps > r->limits.steps, 0))
        run_fail_code(r, ETIME, "it takes more than %llu steps",
                      (unsigned long long)r->limits.steps);
}
/* Around whatever may recurse; fails when it has gone too deep. */
static inline void run_enter(struct run *r)
{
    if (__builtin_expect(++r->depth > r->limits.depth, 0))
        run_fail_code(r, EINVAL, "nested deeper than %u", (unsigned)r->limits.depth);
}
static inline void run_leave(struct run *r)
{
    r->depth--;
}

/* --- Making and asking values --- */

static inline struct value v_none(void)
{
    return (struct value){.type = T_NONE};
}
static inline struct value v_missing(void)
{
    return (struct value){.type = T_MISSING};
}
static inline struct value v_bool(bool b)
{
    return (struct value){.type = T_BOOL, .b = b};
}
static inline struct value v_int(int64_t i)
{
    return (struct value){.type = T_INT, .i = i};
}
static inline struct value v_float(double f)
{
    return (struct value){.type = T_FLOAT, .f = f};
}
static inline struct value v_str(struct str *s)
{
    return (struct value){.type = T_STR, .s = s};
}
static inline bool is_str(struct value v)
{
    return v.type == T_STR;
}
static inline bool is_seq(struct value v)
{
    return v.type == T_LIST || v.type == T_TUPLE;
}
static inline bool is_int(struct value v)
{
    return v.type == T_INT || v.type == T_BOOL;
}
static inline bool is_number(struct value v)
{
    return is_int(v) || v.type == T_FLOAT;
}
static inline int64_t as_int(struct value v)
{
    return v.type == T_BOOL ? v.b : v.i;
}
static inline double as_float(struct value v)
{
    return v.type == T_FLOAT ? v.f : (double)as_int(v);
}

/* --- value.c: strings --- */

/* A string of bytes that outlive the arena, or lie in it: not copied. Valid UTF-8. */
struct str *str_wrap(struct run *r, const char *data, size_t len);
/* The same of a copy. */
struct str *str_copy(struct run *r, const char *data, size_t len);
/* A string of a C literal. */
struct str *str_lit(struct run *r, const char *s);
/* a and b, neither of which is changed; cheap again and again for a text that grows. */
struct str *str_cat(struct run *r, struct str *a, struct str *b);
/* Bytes [from, to), shared. */
struct str *str_sub(struct run *r, struct str *s, size_t from, size_t to);
/* Code points; counted once. */
size_t str_chars(struct str *s);
/* Where code point number `chars` begins, in bytes; the end when there are fewer. */
size_t str_offset(struct str *s, size_t chars);
/* For strings of a template, which several renderings share: nothing is written to it any more. */
void str_freeze(struct str *s);
bool str_is(const struct str *s, const char *lit);
bool str_same(const struct str *a, const struct str *b);
/* -1, 0 or 1, by code points. */
int str_order(const struct str *a, const struct str *b);
/* Byte offset of the first (last) `needle` within [from, to), or SIZE_MAX. */
size_t str_find(struct run *r, const struct str *s, const struct str *needle, size_t from,
                size_t to);
size_t str_rfind(struct run *r, const struct str *s, const struct str *needle, size_t from,
                 size_t to);

/* --- value.c: texts being made; a zeroed struct sb is an empty one --- */

void sb_add(struct run *r, struct sb *b, const char *data, size_t len);
void sb_str(struct run *r, struct sb *b, const struct str *s);
/* A code point, once or n times. */
void sb_char(struct run *r, struct sb *b, uint32_t c);
void sb_fill(struct run *r, struct sb *b, uint32_t c, size_t n);
/* At most 511 bytes of it. */
void sb_printf(struct run *r, struct sb *b, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The text as a string; b is empty again. */
struct str *sb_take(struct run *r, struct sb *b);

/* --- value.c: lists and dicts --- */

/* An empty list or tuple with room for cap values. */
struct value seq_new(struct run *r, enum value_type type, size_t cap);
void seq_add(struct run *r, struct seq *s, struct value v);
struct value v_tuple2(struct run *r, struct value a, struct value b);

struct dict *dict_new(struct run *r);
/* Sets or replaces, in the first one's place; fails for a key that is not hashable. */
void dict_set(struct run *r, struct dict *d, struct value key, struct value value);
/* The value in its place, valid until the dict grows; NULL: no such key, or none that can be. */
struct value *dict_get(struct run *r, const struct dict *d, struct value key);
bool hashable(struct value v);
static inline struct value v_dict(struct dict *d)
{
    return (struct value){.type = T_DICT, .dict = d};
}

/* A JSON value, whose strings stay j's: it must outlive the run. */
struct value json_value(struct run *r, const json_t *j);

/* --- compare.c --- */

/* The name of the type as Python's messages have it. */
const char *type_name(struct value v);
bool truthy(struct run *r, struct value v);
/* Python's ==: numbers by value, lists and dicts by content, other objects by identity. */
bool equal(struct run *r, struct value a, struct value b);
/* -1, 0, 1; 2: unordered (NaN). Fails for types that have no order, naming `op`. */
int order(struct run *r, struct value a, struct value b, enum op op);
/* a op b for ==, !=, <, <=, >, >=, in, not in. */
bool compare(struct run *r, enum op op, struct value a, struct value b);
/* len(v); fails where has_length is false. */
size_t length(struct run *r, struct value v);
bool has_length(struct value v);

/* An undefined value: of a name, of an attribute or element of `object` (unsafe: one that the
 * sandbox keeps), or with a message of its own, a string that stays valid. */
struct value undefined_name(struct run *r, struct str *name);
struct value undefined_attr(struct run *r, struct value object, struct str *name, bool unsafe);
struct value undefined_text(struct run *r, const char *text);
/* Fails as using the undefined value v does. */
void fail_undefined(struct run *r, struct value v) __attribute__((noreturn));

/* --- iter.c --- */

bool iterable(struct value v);
/* One pass over v; of a generator or a loop the one that is under way. Fails when v is not
 * iterable. */
struct iter *iter_begin(struct run *r, struct value v);
/* The next one to *ret; false at the end. */
bool iter_next(struct run *r, struct iter *it, struct value *ret);
/* All that is left of v, as a new list. */
struct seq *to_list(struct run *r, struct value v);
/* A generator: `next` is called with `state` and `source` in the iter; NULL: source's own items.
 * repr: how it prints, NULL as generators do. */
struct value v_iter(struct run *r, struct value source,
                    bool (*next)(struct run *, struct iter *, struct value *), void *state,
                    const char *repr);
/* Item i, which is there. */
struct value range_item(const struct range *x, size_t i);
struct value view_item(struct run *r, const struct view *v, size_t i);

/* --- print.c --- */

/* As str() and repr() have it; undefined values print as nothing. */
void print_str(struct run *r, struct sb *b, struct value v);
void print_repr(struct run *r, struct sb *b, struct value v);
/* str(v): v itself where it is a string. */
struct str *to_str(struct run *r, struct value v);
/* The shortest digits that give the same double, as repr() has them. */
void print_float(struct run *r, struct sb *b, double f);
/* &, <, >, quotes as references. */
struct str *escape_html(struct run *r, struct str *s);

/* --- unicode.c --- */

/* The code point at *pos, which is below len, and *pos behind it; U+FFFD for a bad byte. */
uint32_t utf8_next(const char *data, size_t len, size_t *pos);
/* Where the character before pos > 0 begins. */
size_t utf8_prev(const char *data, size_t pos);
/* As Python's str.isspace, isprintable, isalpha, ... of one code point. */
bool uc_space(uint32_t c);
bool uc_printable(uint32_t c);
bool uc_alpha(uint32_t c);
bool uc_digit(uint32_t c);
bool uc_decimal(uint32_t c);
bool uc_numeric(uint32_t c);
bool uc_upper(uint32_t c);
bool uc_lower(uint32_t c);
enum str_case { CASE_UPPER, CASE_LOWER, CASE_TITLE, CASE_CAPITAL, CASE_SWAP };
/* str.upper() and its like; may change the number of characters. */
struct str *str_case(struct run *r, struct str *s, enum str_case how);

/* --- operators.c --- */

/* a op b for + - * / // % **. */
struct value binary(struct run *r, enum op op, struct value a, struct value b);
/* -v, or +v when not minus. */
struct value negate(struct run *r, struct value v, bool minus);
/* object[key] and object.name, each of which falls back to the other, as Jinja2's do; undefined
 * when there is neither. */
struct value get_item(struct run *r, struct value object, struct value key);
struct value get_attr(struct run *r, struct value object, struct str *name);
/* object[from:to:step]; NONE or MISSING: not given. */
struct value get_slice(struct run *r, struct value object, struct value from, struct value to,
                       struct value step);

/* --- format.c --- */

/* format % args, and format.format(...). */
struct value format_percent(struct run *r, struct str *format, struct value args);
struct value format_braces(struct run *r, struct str *format, struct args *a);
/* round(v, digits), half to even; digits NONE: to an integer. */
struct value round_value(struct run *r, struct value v, struct value digits);
/* float(s) and int(s, base): false when s is no number. An integer beyond 64 bits fails. */
bool parse_float(struct run *r, const struct str *s, double *ret);
bool parse_int(struct run *r, const struct str *s, int base, int64_t *ret);
/* int(f); *ret_ok false for an infinity or NaN. */
struct value float_to_int(struct run *r, double f, bool *ret_ok);

#endif
