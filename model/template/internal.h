/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the template interpreter.
 *
 * Everything that one compilation or one rendering makes lives in its arena and goes with it:
 * values are never freed one by one, so cycles (a macro and the frame that holds it) need no care.
 * A failure anywhere unwinds to the entry point by longjmp (run_fail); nothing below it owns
 * anything else.
 *
 * Values are Python's: strings count code points, integers are 64 bits wide (what does not fit
 * fails), dicts keep their order. Names resolve as Jinja2 compiles them: each scope (the template,
 * a macro's, loop's or captured block's body) has slots that are filled when it is entered, from
 * the context, from an outer slot, or with nothing; scope.c decides which.
 */
#ifndef EMBER_MODEL_TEMPLATE_INTERNAL_H
#define EMBER_MODEL_TEMPLATE_INTERNAL_H

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

/* --- The tree --- */

enum node_kind {
    /* expressions */
    N_CONST,
    N_NAME,
    N_NSREF,
    N_TUPLE,
    N_LIST,
    N_DICT, /* kids: key, value, key, value, ... */
    N_NEG,
    N_POS,
    N_NOT,
    N_AND,
    N_OR,
    N_BINARY,
    N_CONCAT,
    N_COMPARE, /* a, then kids: N_OPERAND */
    N_OPERAND,
    N_COND, /* b if a else c */
    N_GETATTR,
    N_GETITEM,
    N_SLICE,
    N_CALL,   /* a(kids, extra, *b, **c) */
    N_FILTER, /* the same; a is NULL for the captured text */
    N_TEST,
    N_KEYWORD,
    /* statements */
    N_DATA,
    N_PRINT,
    N_IF,         /* a; body; kids: N_IF for elif; els */
    N_FOR,        /* a in b if c; d: the target again, for the filter's scope */
    N_SET,        /* a = b */
    N_SETBLOCK,   /* a, filter b */
    N_MACRO,      /* a: the name; kids: parameters, extra: their defaults */
    N_CALLBLOCK,  /* b: the call */
    N_GENERATION, /* its body is a scope of its own */
    N_FILTERBLOCK,
    N_WITH, /* kids = extra */
    N_BLOCK,
    N_BREAK,
    N_CONTINUE
};

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

enum name_ctx { CTX_LOAD, CTX_STORE, CTX_PARAM };

struct nodes {
    struct node **v;
    size_t n, cap;
};

struct node {
    uint8_t kind, op, ctx;
    bool flag; /* FOR: recursive; MACRO, CALLBLOCK: uses caller */
    bool varargs, kwargs;
    bool toplevel; /* SET and friends: also written to the context */
    uint32_t line;
    struct str *name;
    struct node *a, *b, *c, *d;
    struct nodes kids, extra, body, els;
    struct value value;   /* N_CONST, N_DATA */
    uint32_t depth, slot; /* N_NAME, N_NSREF */
    uint32_t caller_slot, varargs_slot, kwargs_slot;
    struct scope *scope, *test_scope, *else_scope;
    const struct builtin *builtin; /* N_FILTER, N_TEST; NULL: no such */
};

enum slot_load { LOAD_PARAM, LOAD_RESOLVE, LOAD_ALIAS, LOAD_UNDEFINED };
struct slot {
    struct str *name;
    enum slot_load load;
    uint32_t depth, slot; /* LOAD_ALIAS: where from */
    bool stored;
};
struct scope {
    struct scope *parent;
    struct slot *v;
    size_t n, cap;
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

/* Formats the message behind "line N: " and unwinds. run_fail is -EINVAL. */
void run_fail(struct run *r, const char *format, ...)
    __attribute__((format(printf, 2, 3), noreturn));
void run_fail_code(struct run *r, int errnum, const char *format, ...)
    __attribute__((format(printf, 3, 4), noreturn));
void run_refuse(struct run *r, struct str *message) __attribute__((noreturn));

void run_init(struct run *r, const struct template_limits *limits, struct error *err);
void run_clear(struct run *r);

/* Zeroed, aligned for anything. */
void *arena(struct run *r, size_t n, size_t size);
/* Counts work; fails when there was too much. */
static inline void run_charge(struct run *r, uint64_t bytes)
{
    r->steps += 1 + bytes / 64;
    if (__builtin_expect(r->steps > r->limits.steps, 0))
        run_fail_code(r, ETIME, "it takes more than %llu steps",
                      (unsigned long long)r->limits.steps);
}
static inline void run_enter(struct run *r)
{
    if (__builtin_expect(++r->depth > r->limits.depth, 0))
        run_fail_code(r, EINVAL, "nested deeper than %u", (unsigned)r->limits.depth);
}
static inline void run_leave(struct run *r)
{
    r->depth--;
}

/* --- value.c --- */

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

struct str *str_wrap(struct run *r, const char *data, size_t len); /* not copied */
struct str *str_copy(struct run *r, const char *data, size_t len);
struct str *str_lit(struct run *r, const char *s);
struct str *str_cat(struct run *r, struct str *a, struct str *b);
size_t str_chars(struct str *s);
/* For strings of a template, which several renderings share: nothing is written to it any more. */
void str_freeze(struct str *s);
size_t str_offset(struct str *s, size_t chars); /* byte offset of a code point */
struct str *str_sub(struct run *r, struct str *s, size_t from, size_t to); /* bytes, shared */
bool str_is(const struct str *s, const char *lit);
bool str_same(const struct str *a, const struct str *b);
int str_order(const struct str *a, const struct str *b);
/* Byte offset of the first (last) `needle` within [from, to), or SIZE_MAX. */
size_t str_find(struct run *r, const struct str *s, const struct str *needle, size_t from,
                size_t to);
size_t str_rfind(struct run *r, const struct str *s, const struct str *needle, size_t from,
                 size_t to);

void sb_add(struct run *r, struct sb *b, const char *data, size_t len);
void sb_str(struct run *r, struct sb *b, const struct str *s);
void sb_char(struct run *r, struct sb *b, uint32_t c); /* a code point */
void sb_fill(struct run *r, struct sb *b, uint32_t c, size_t n);
void sb_printf(struct run *r, struct sb *b, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
struct str *sb_take(struct run *r, struct sb *b);

struct value seq_new(struct run *r, enum value_type type, size_t cap);
void seq_add(struct run *r, struct seq *s, struct value v);
struct value v_tuple2(struct run *r, struct value a, struct value b);

struct dict *dict_new(struct run *r);
void dict_set(struct run *r, struct dict *d, struct value key, struct value value);
struct value *dict_get(struct run *r, const struct dict *d, struct value key);
bool hashable(struct value v);
static inline struct value v_dict(struct dict *d)
{
    return (struct value){.type = T_DICT, .dict = d};
}

const char *type_name(struct value v); /* as Python's messages call it */
bool truthy(struct run *r, struct value v);
bool equal(struct run *r, struct value a, struct value b);
int order(struct run *r, struct value a, struct value b, enum op op); /* -1, 0, 1; 2: unordered */
bool compare(struct run *r, enum op op, struct value a, struct value b);
size_t length(struct run *r, struct value v);
bool has_length(struct value v);

struct value undefined_name(struct run *r, struct str *name);
struct value undefined_attr(struct run *r, struct value object, struct str *name, bool unsafe);
struct value undefined_text(struct run *r, const char *text);
void fail_undefined(struct run *r, struct value v) __attribute__((noreturn));

struct value json_value(struct run *r, const json_t *j);

/* --- iter.c --- */

bool iterable(struct value v);
struct iter *iter_begin(struct run *r, struct value v);
bool iter_next(struct run *r, struct iter *it, struct value *ret);
struct seq *to_list(struct run *r, struct value v); /* a new one */
struct value v_iter(struct run *r, struct value source,
                    bool (*next)(struct run *, struct iter *, struct value *), void *state,
                    const char *repr);
struct value range_item(const struct range *x, size_t i);
struct value view_item(struct run *r, const struct view *v, size_t i);

/* --- print.c --- */

void print_str(struct run *r, struct sb *b, struct value v);  /* as str() */
void print_repr(struct run *r, struct sb *b, struct value v); /* as repr() */
struct str *to_str(struct run *r, struct value v);
void print_float(struct run *r, struct sb *b, double f);
struct str *escape_html(struct run *r, struct str *s);
struct value filter_tojson(struct run *r, const struct value *self, struct args *a);

/* --- unicode.c --- */

uint32_t utf8_next(const char *data, size_t len, size_t *pos);
size_t utf8_prev(const char *data, size_t pos); /* where the character before begins */
bool uc_space(uint32_t c);
bool uc_printable(uint32_t c);
bool uc_alpha(uint32_t c);
bool uc_digit(uint32_t c); /* str.isdigit */
bool uc_decimal(uint32_t c);
bool uc_numeric(uint32_t c);
bool uc_upper(uint32_t c);
bool uc_lower(uint32_t c);
enum str_case { CASE_UPPER, CASE_LOWER, CASE_TITLE, CASE_CAPITAL, CASE_SWAP };
struct str *str_case(struct run *r, struct str *s, enum str_case how);

/* --- operators.c --- */

struct value binary(struct run *r, enum op op, struct value a, struct value b);
struct value negate(struct run *r, struct value v, bool minus);
struct value get_item(struct run *r, struct value object, struct value key);
struct value get_attr(struct run *r, struct value object, struct str *name);
struct value get_slice(struct run *r, struct value object, struct value from, struct value to,
                       struct value step);

/* --- eval.c, exec.c --- */

struct value eval(struct run *r, struct frame *f, const struct node *n);
struct value call_macro(struct run *r, const struct macro *m, struct args *a);
struct value call_loop(struct run *r, struct loop *l, struct value items);
struct value apply_filter(struct run *r, struct frame *f, const struct node *n, struct value v);
enum flow { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE };
void exec_root(struct run *r, const struct node *root);
struct value loop_attr(struct run *r, struct value loop, struct str *name);
struct value macro_attr(struct run *r, struct value v, struct str *name);

/* --- builtins: filters*.c, tests.c, functions.c, methods*.c, format.c --- */

struct builtin {
    const char *name;
    function_fn call; /* self: the value; a test returns a BOOL */
};
extern const struct builtin filters_text[], filters_seq[], tests_table[], functions_table[];
const struct builtin *find_filter(const struct str *name);
const struct builtin *find_test(const struct str *name);
const struct builtin *find_in(const struct builtin *table, const struct str *name);

/*
 * Puts the arguments where `names` (separated by spaces) says: out[i], MISSING when not given.
 * Fewer than `required`, too many or unknown ones fail.
 */
#define bind args_bind /* not the name of a system call: a program would call ours instead */
void bind(struct run *r, struct args *a, const char *names, size_t required, struct value *out);
int64_t need_int(struct run *r, struct value v);
struct str *need_str(struct run *r, struct value v);
bool flag(struct run *r, struct value v, bool fallback);

/* A method of the object, or false. *ret_unsafe when the sandbox keeps it. */
bool find_method(struct run *r, struct value object, const struct str *name, struct value *ret,
                 bool *ret_unsafe);
extern const struct builtin str_methods[];

struct value format_percent(struct run *r, struct str *format, struct value args);
struct value format_braces(struct run *r, struct str *format, struct args *a);
struct value round_value(struct run *r, struct value v, struct value digits);
bool parse_float(struct run *r, const struct str *s, double *ret);
bool parse_int(struct run *r, const struct str *s, int base, int64_t *ret);
struct value float_to_int(struct run *r, double f, bool *ret_ok);

/* --- lex.c, parse*.c, scope.c --- */

enum token_type {
    TOK_DATA,
    TOK_VAR_BEGIN,
    TOK_VAR_END,
    TOK_BLOCK_BEGIN,
    TOK_BLOCK_END,
    TOK_NAME,
    TOK_STRING,
    TOK_INT,
    TOK_FLOAT,
    TOK_OP,
    TOK_EOF
};
enum token_op {
    O_ADD,
    O_SUB,
    O_MUL,
    O_DIV,
    O_FLOORDIV,
    O_MOD,
    O_POW,
    O_TILDE,
    O_EQ,
    O_NE,
    O_LT,
    O_LE,
    O_GT,
    O_GE,
    O_ASSIGN,
    O_DOT,
    O_COLON,
    O_COMMA,
    O_PIPE,
    O_SEMI,
    O_LPAREN,
    O_RPAREN,
    O_LBRACKET,
    O_RBRACKET,
    O_LBRACE,
    O_RBRACE
};
struct token {
    uint8_t type, op;
    uint32_t line;
    struct value value; /* DATA, NAME, STRING, INT, FLOAT */
};
struct tokens {
    struct token *v;
    size_t n, cap;
};
void lex(struct run *r, const char *text, size_t len, struct tokens *ret);

struct parser {
    struct run *r;
    struct token *at;
    bool soft;           /* within an if: unknown filters fail when they are reached */
    uint32_t loops;      /* for statements around */
    struct nodes blocks; /* so far: their names differ */
};
struct node *node_new(struct parser *p, enum node_kind kind, uint32_t line);
void nodes_add(struct parser *p, struct nodes *list, struct node *n);
bool at_op(const struct parser *p, enum token_op op);
bool at_name(const struct parser *p, const char *name);
bool skip_op(struct parser *p, enum token_op op);
bool skip_name(struct parser *p, const char *name);
void expect_op(struct parser *p, enum token_op op);
void expect_name(struct parser *p, const char *name);
struct str *take_name(struct parser *p);
void fail_token(struct parser *p, const char *wanted) __attribute__((noreturn));
struct node *parse_expression(struct parser *p);
/* `end`: a name that ends the tuple, may be NULL. */
struct node *parse_tuple(struct parser *p, bool condexpr, const char *end, bool parentheses);
struct node *parse_target(struct parser *p, const char *end, bool with_namespace);
struct node *parse_filters(struct parser *p, struct node *n, bool start);
struct node *parse_template(struct run *r, struct token *tokens);
void resolve_names(struct run *r, struct node *root);

#endif
