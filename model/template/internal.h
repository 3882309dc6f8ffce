/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the template interpreter: value_internal.h has values, tree_internal.h what a template is
 * compiled to, this one what runs it. What is only for compiling is in parse_internal.h.
 */
#ifndef EMBER_MODEL_TEMPLATE_INTERNAL_H
#define EMBER_MODEL_TEMPLATE_INTERNAL_H

#include "model/template/tree_internal.h"

/* --- eval.c --- */

struct value eval(struct run *r, struct frame *f, const struct node *n);
/* Calls what an N_CALL calls with one more argument: the call block's body as `caller`. */
struct value eval_call_with(struct run *r, struct frame *f, const struct node *n,
                            struct value caller);
/* The filters of n, an N_FILTER, innermost first; v is what the first is given when n has no
 * operand (a captured text). */
struct value apply_filter(struct run *r, struct frame *f, const struct node *n, struct value v);

/* --- exec.c --- */

/* Whether a body goes on, or a loop around it breaks or continues. */
enum flow { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE };
/* Runs a template; its text goes to r->out. */
void exec_root(struct run *r, const struct node *root);
/* A macro's text. */
struct value call_macro(struct run *r, const struct macro *m, struct args *a);
/* The text of a recursive loop over other items. */
struct value call_loop(struct run *r, struct loop *l, struct value items);
/* loop.name and macro.name; MISSING when there is no such attribute. */
struct value loop_attr(struct run *r, struct value loop, struct str *name);
struct value macro_attr(struct run *r, struct value v, struct str *name);

/* --- Builtins: filters*.c, tests.c, functions.c, methods*.c, print.c --- */

struct builtin {
    const char *name;
    function_fn call; /* self: the value; a test returns a BOOL */
};
/* Each ends with a name of NULL. A method without a function is one that the sandbox keeps. */
extern const struct builtin filters_text[], filters_seq[], tests_table[], functions_table[];
extern const struct builtin str_methods[];
/* NULL: no such. */
const struct builtin *find_filter(const struct str *name);
const struct builtin *find_test(const struct str *name);
const struct builtin *find_in(const struct builtin *table, const struct str *name);
/* A method of the object, or false. *ret_unsafe when the sandbox keeps it. */
bool find_method(struct run *r, struct value object, const struct str *name, struct value *ret,
                 bool *ret_unsafe);
/* json.dumps, as transformers has the filter; in print.c, beside the other ways to print. */
struct value filter_tojson(struct run *r, const struct value *self, struct args *a);

/* --- args.c --- */

/*
 * Puts the arguments where `names` (separated by spaces) says: out[i], MISSING when not given.
 * Fewer than `required`, too many or unknown ones fail.
 */
#define bind args_bind /* not the name of a system call: a program would call ours instead */
void bind(struct run *r, struct args *a, const char *names, size_t required, struct value *out);
/* v as an integer or a string; fails when it is none. */
int64_t need_int(struct run *r, struct value v);
struct str *need_str(struct run *r, struct value v);
/* The truth of an argument; fallback when it was not given. */
bool flag(struct run *r, struct value v, bool fallback);

#endif
