/* SPDX-License-Identifier: Apache-2.0 */
/* Truth, equality, order, membership, length; undefined values. */
#include <math.h>
#include <stdio.h>

#include "model/template/internal.h"

static bool contains(struct run *r, struct value item, struct value in);

const char *type_name(struct value v)
{
    static const char *const names[] = {[T_MISSING] = "MissingType",
                                        [T_UNDEFINED] = "Undefined",
                                        [T_NONE] = "NoneType",
                                        [T_BOOL] = "bool",
                                        [T_INT] = "int",
                                        [T_FLOAT] = "float",
                                        [T_STR] = "str",
                                        [T_LIST] = "list",
                                        [T_TUPLE] = "tuple",
                                        [T_DICT] = "dict",
                                        [T_NAMESPACE] = "Namespace",
                                        [T_RANGE] = "range",
                                        [T_ITER] = "generator",
                                        [T_MACRO] = "Macro",
                                        [T_FUNCTION] = "function",
                                        [T_METHOD] = "method",
                                        [T_LOOP] = "LoopContext",
                                        [T_CYCLER] = "Cycler",
                                        [T_JOINER] = "Joiner"};
    if (v.type == T_VIEW)
        return v.view->kind == VIEW_KEYS     ? "dict_keys"
               : v.view->kind == VIEW_VALUES ? "dict_values"
                                             : "dict_items";
    return v.type == T_STR && v.safe ? "Markup" : names[v.type];
}

bool has_length(struct value v)
{
    return v.type == T_UNDEFINED || v.type == T_STR || is_seq(v) || v.type == T_DICT ||
           v.type == T_VIEW || v.type == T_RANGE || v.type == T_LOOP;
}

static size_t loop_length(struct run *r, struct value v)
{
    return (size_t)as_int(loop_attr(r, v, str_lit(r, "length")));
}

size_t length(struct run *r, struct value v)
{
    switch (v.type) {
    case T_UNDEFINED:
        return 0;
    case T_STR:
        return str_chars(v.s);
    case T_LIST:
    case T_TUPLE:
        return v.seq->n;
    case T_DICT:
        return v.dict->n;
    case T_VIEW:
        return v.view->dict->n;
    case T_RANGE:
        return v.range->n;
    case T_LOOP:
        return loop_length(r, v);
    default:
        run_fail(r, "TypeError: object of type '%s' has no len()", type_name(v));
    }
}

bool truthy(struct run *r, struct value v)
{
    switch (v.type) {
    case T_MISSING:
    case T_UNDEFINED:
    case T_NONE:
        return false;
    case T_BOOL:
        return v.b;
    case T_INT:
        return v.i != 0;
    case T_FLOAT:
        return v.f != 0;
    case T_STR:
        return v.s->len > 0;
    default:
        return has_length(v) ? length(r, v) > 0 : true;
    }
}

/* --- Equality and order --- */

static bool dict_equal(struct run *r, const struct dict *a, const struct dict *b)
{
    if (a->n != b->n)
        return false;
    for (size_t i = 0; i < a->n; i++) {
        const struct value *other = dict_get(r, b, a->v[i].key);
        if (!other || !equal(r, a->v[i].value, *other))
            return false;
    }
    return true;
}

static bool seq_equal(struct run *r, const struct seq *a, const struct seq *b)
{
    if (a->n != b->n)
        return false;
    for (size_t i = 0; i < a->n; i++)
        if (!equal(r, a->v[i], b->v[i]))
            return false;
    return true;
}

static bool range_equal(const struct range *a, const struct range *b)
{
    return a->n == b->n &&
           (a->n == 0 || (a->start == b->start && (a->n == 1 || a->step == b->step)));
}

static bool view_equal(struct run *r, struct value a, struct value b)
{
    if (a.p == b.p)
        return true;
    if (a.view->kind != b.view->kind || a.view->kind == VIEW_VALUES ||
        a.view->dict->n != b.view->dict->n)
        return false;
    if (a.view->kind == VIEW_ITEMS)
        return dict_equal(r, a.view->dict, b.view->dict);
    for (size_t i = 0; i < a.view->dict->n; i++)
        if (!dict_get(r, b.view->dict, a.view->dict->v[i].key))
            return false;
    return true;
}

static bool number_equal(struct value a, struct value b)
{
    if (is_int(a) && is_int(b))
        return as_int(a) == as_int(b);
    if (a.type == T_FLOAT && b.type == T_FLOAT)
        return a.f == b.f;
    double f = a.type == T_FLOAT ? a.f : b.f;
    int64_t i = a.type == T_FLOAT ? as_int(b) : as_int(a);
    return f >= -9223372036854775808.0 && f < 9223372036854775808.0 && floor(f) == f &&
           (int64_t)f == i;
}

bool equal(struct run *r, struct value a, struct value b)
{
    bool same;
    run_charge(r, 0);
    if (is_number(a) && is_number(b))
        return number_equal(a, b);
    if (a.type != b.type)
        return false;
    run_enter(r);
    switch (a.type) {
    case T_MISSING:
    case T_UNDEFINED:
    case T_NONE:
        same = true;
        break;
    case T_STR:
        same = str_same(a.s, b.s);
        break;
    case T_LIST:
    case T_TUPLE:
        same = a.seq == b.seq || seq_equal(r, a.seq, b.seq);
        break;
    case T_DICT:
        same = a.dict == b.dict || dict_equal(r, a.dict, b.dict);
        break;
    case T_RANGE:
        same = range_equal(a.range, b.range);
        break;
    case T_VIEW:
        same = view_equal(r, a, b);
        break;
    case T_METHOD:
        same = a.method->call == b.method->call && a.method->self.p == b.method->self.p;
        break;
    default:
        same = a.p == b.p;
    }
    run_leave(r);
    return same;
}

static const char *op_name(enum op op)
{
    return op == OP_LT ? "<" : op == OP_LE ? "<=" : op == OP_GT ? ">" : ">=";
}

/* An integer against a float, exactly. */
static int order_mixed(int64_t i, double f)
{
    if (f >= 9223372036854775808.0)
        return -1;
    if (f < -9223372036854775808.0)
        return 1;
    double whole = floor(f);
    int64_t w = (int64_t)whole;
    return i < w ? -1 : i > w ? 1 : f > whole ? -1 : 0;
}

static int order_numbers(struct value a, struct value b)
{
    if ((a.type == T_FLOAT && isnan(a.f)) || (b.type == T_FLOAT && isnan(b.f)))
        return 2;
    if (a.type == T_FLOAT && b.type == T_FLOAT)
        return (a.f > b.f) - (a.f < b.f);
    if (a.type == T_FLOAT)
        return -order_mixed(as_int(b), a.f);
    if (b.type == T_FLOAT)
        return order_mixed(as_int(a), b.f);
    return (as_int(a) > as_int(b)) - (as_int(a) < as_int(b));
}

static int order_seqs(struct run *r, const struct seq *a, const struct seq *b, enum op op)
{
    size_t i = 0;
    while (i < a->n && i < b->n && equal(r, a->v[i], b->v[i]))
        i++;
    if (i == a->n || i == b->n)
        return (a->n > b->n) - (a->n < b->n);
    run_enter(r);
    int d = order(r, a->v[i], b->v[i], op);
    run_leave(r);
    return d;
}

int order(struct run *r, struct value a, struct value b, enum op op)
{
    run_charge(r, 0);
    if (is_number(a) && is_number(b))
        return order_numbers(a, b);
    if (is_str(a) && is_str(b))
        return str_order(a.s, b.s);
    if (is_seq(a) && a.type == b.type)
        return order_seqs(r, a.seq, b.seq, op);
    if (a.type == T_UNDEFINED)
        fail_undefined(r, a);
    if (b.type == T_UNDEFINED)
        fail_undefined(r, b);
    run_fail(r, "TypeError: '%s' not supported between instances of '%s' and '%s'", op_name(op),
             type_name(a), type_name(b));
}

bool compare(struct run *r, enum op op, struct value a, struct value b)
{
    int d;
    switch (op) {
    case OP_EQ:
        return equal(r, a, b);
    case OP_NE:
        return !equal(r, a, b);
    case OP_IN:
        return contains(r, a, b);
    case OP_NOTIN:
        return !contains(r, a, b);
    default:
        d = order(r, a, b, op);
    }
    if (d == 2)
        return false;
    return op == OP_LT ? d < 0 : op == OP_LE ? d <= 0 : op == OP_GT ? d > 0 : d >= 0;
}

static bool contains(struct run *r, struct value item, struct value in)
{
    struct value v;
    if (is_str(in)) {
        if (!is_str(item))
            run_fail(r, "TypeError: 'in <string>' requires string as left operand, not %s",
                     type_name(item));
        return str_find(r, in.s, item.s, 0, in.s->len) != SIZE_MAX;
    }
    if (in.type == T_DICT || (in.type == T_VIEW && in.view->kind == VIEW_KEYS)) {
        if (!hashable(item))
            run_fail(r, "TypeError: unhashable type: '%s'", type_name(item));
        return dict_get(r, in.type == T_DICT ? in.dict : in.view->dict, item);
    }
    if (!iterable(in))
        run_fail(r, "TypeError: argument of type '%s' is not iterable", type_name(in));
    struct iter *it = iter_begin(r, in);
    while (iter_next(r, it, &v))
        if (equal(r, v, item))
            return true;
    return false;
}

/* --- Undefined --- */

struct value undefined_name(struct run *r, struct str *name)
{
    return undefined_attr(r, v_missing(), name, false);
}

struct value undefined_attr(struct run *r, struct value object, struct str *name, bool unsafe)
{
    struct undefined *u = arena(r, 1, sizeof *u);
    *u = (struct undefined){.name = name, .object = object, .unsafe = unsafe};
    return (struct value){.type = T_UNDEFINED, .undef = u};
}

struct value undefined_text(struct run *r, const char *text)
{
    struct value v = undefined_attr(r, v_missing(), NULL, false);
    v.undef->text = text;
    return v;
}

void fail_undefined(struct run *r, struct value v)
{
    const struct undefined *u = v.undef;
    if (u->text)
        run_fail(r, "UndefinedError: %s", u->text);
    int n = (int)MIN(u->name->len, (size_t)200);
    const char *name = u->name->data;
    if (u->unsafe)
        run_fail(r, "SecurityError: access to attribute '%.*s' of '%s' object is unsafe.", n, name,
                 type_name(u->object));
    if (u->object.type == T_MISSING)
        run_fail(r, "UndefinedError: '%.*s' is undefined", n, name);
    if (u->object.type == T_NONE)
        run_fail(r, "UndefinedError: 'None' has no attribute '%.*s'", n, name);
    run_fail(r, "UndefinedError: '%s object' has no attribute '%.*s'", type_name(u->object), n,
             name);
}
