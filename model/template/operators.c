/* SPDX-License-Identifier: Apache-2.0 */
/* Arithmetic, subscripts, attributes, slices. */
#include <math.h>

#include "model/template/internal.h"

static const char *const op_names[] = {"+", "-", "*", "/", "//", "%", "** or pow()"};

static void fail_operands(struct run *r, enum op op, struct value a, struct value b)
    __attribute__((noreturn));
static void fail_operands(struct run *r, enum op op, struct value a, struct value b)
{
    if (a.type == T_UNDEFINED)
        fail_undefined(r, a);
    if (b.type == T_UNDEFINED)
        fail_undefined(r, b);
    if (op == OP_ADD && (is_str(a) || is_seq(a)))
        run_fail(r, "TypeError: can only concatenate %s (not \"%s\") to %s", type_name(a),
                 type_name(b), type_name(a));
    run_fail(r, "TypeError: unsupported operand type(s) for %s: '%s' and '%s'", op_names[op],
             type_name(a), type_name(b));
}

static void fail_big(struct run *r) __attribute__((noreturn));
static void fail_big(struct run *r)
{
    run_fail(r, "OverflowError: an integer that does not fit 64 bits");
}

/* --- Numbers --- */

static struct value int_pow(struct run *r, int64_t base, int64_t exp)
{
    int64_t result = 1;
    if (exp < 0) {
        if (base == 0)
            run_fail(r, "ZeroDivisionError: 0.0 cannot be raised to a negative power");
        return v_float(pow((double)base, (double)exp));
    }
    if (base == 0 || base == 1)
        return v_int(exp == 0 ? 1 : base);
    if (base == -1)
        return v_int(exp % 2 ? -1 : 1);
    for (; exp > 0; exp--)
        if (__builtin_mul_overflow(result, base, &result))
            fail_big(r);
    return v_int(result);
}

static struct value int_divide(struct run *r, enum op op, int64_t a, int64_t b)
{
    if (b == 0)
        run_fail(r, "ZeroDivisionError: %s",
                 op == OP_DIV ? "division by zero" : "integer division or modulo by zero");
    if (op == OP_DIV)
        return v_float((double)a / (double)b);
    if (b == -1) {
        if (op == OP_FLOORDIV && a == INT64_MIN)
            fail_big(r);
        return v_int(op == OP_MOD ? 0 : -a);
    }
    int64_t q = a / b, m = a % b;
    if (m && (m < 0) != (b < 0)) {
        q--;
        m += b;
    }
    return v_int(op == OP_MOD ? m : q);
}

static struct value int_binary(struct run *r, enum op op, int64_t a, int64_t b)
{
    int64_t v = 0;
    bool over = false;
    switch (op) {
    case OP_ADD:
        over = __builtin_add_overflow(a, b, &v);
        break;
    case OP_SUB:
        over = __builtin_sub_overflow(a, b, &v);
        break;
    case OP_MUL:
        over = __builtin_mul_overflow(a, b, &v);
        break;
    case OP_POW:
        return int_pow(r, a, b);
    default:
        return int_divide(r, op, a, b);
    }
    if (over)
        fail_big(r);
    return v_int(v);
}

static struct value float_divide(struct run *r, enum op op, double a, double b)
{
    if (b == 0)
        run_fail(r, "ZeroDivisionError: %s",
                 op == OP_DIV ? "float division by zero" : "float modulo");
    if (op == OP_DIV)
        return v_float(a / b);
    double m = fmod(a, b), q = (a - m) / b;
    if (m != 0 && (m < 0) != (b < 0)) {
        m += b;
        q -= 1;
    } else if (m == 0) {
        m = copysign(0, b);
    }
    if (op == OP_MOD)
        return v_float(m);
    if (q == 0)
        return v_float(copysign(0, a / b));
    double whole = floor(q);
    return v_float(q - whole > 0.5 ? whole + 1 : whole);
}

static struct value float_binary(struct run *r, enum op op, double a, double b)
{
    switch (op) {
    case OP_ADD:
        return v_float(a + b);
    case OP_SUB:
        return v_float(a - b);
    case OP_MUL:
        return v_float(a * b);
    case OP_POW:
        if (a == 0 && b < 0)
            run_fail(r, "ZeroDivisionError: 0.0 cannot be raised to a negative power");
        if (a < 0 && floor(b) != b)
            run_fail(r, "a negative number to a fractional power is complex");
        return v_float(pow(a, b));
    default:
        return float_divide(r, op, a, b);
    }
}

struct value negate(struct run *r, struct value v, bool minus)
{
    if (v.type == T_UNDEFINED)
        fail_undefined(r, v);
    if (!is_number(v))
        run_fail(r, "TypeError: bad operand type for unary %c: '%s'", minus ? '-' : '+',
                 type_name(v));
    if (v.type == T_FLOAT)
        return v_float(minus ? -v.f : v.f);
    return minus ? int_binary(r, OP_SUB, 0, as_int(v)) : v_int(as_int(v));
}

/* --- Sequences --- */

static struct value repeat(struct run *r, struct value v, int64_t times)
{
    size_t n = times > 0 ? (size_t)times : 0;
    if (is_str(v)) {
        struct sb b = {0};
        uint64_t bytes;
        if (!size_mul(v.s->len, n, &bytes) || bytes > r->limits.memory)
            run_fail(r, "a string of %zu times %zu bytes is too long", n, v.s->len);
        for (size_t i = 0; v.s->len && i < n; i++)
            sb_str(r, &b, v.s);
        struct value out = v_str(sb_take(r, &b));
        out.safe = v.safe;
        return out;
    }
    struct value out = seq_new(r, (enum value_type)v.type, 0);
    for (size_t i = 0; v.seq->n && i < n; i++)
        for (size_t k = 0; k < v.seq->n; k++)
            seq_add(r, out.seq, v.seq->v[k]);
    return out;
}

static struct value add_strs(struct run *r, struct value a, struct value b)
{
    bool safe = a.safe || b.safe;
    struct str *x = safe && !a.safe ? escape_html(r, a.s) : a.s;
    struct str *y = safe && !b.safe ? escape_html(r, b.s) : b.s;
    struct value v = v_str(str_cat(r, x, y));
    v.safe = safe;
    return v;
}

static struct value add_seqs(struct run *r, struct value a, struct value b)
{
    struct value v = seq_new(r, (enum value_type)a.type, a.seq->n + b.seq->n);
    for (size_t i = 0; i < a.seq->n; i++)
        seq_add(r, v.seq, a.seq->v[i]);
    for (size_t i = 0; i < b.seq->n; i++)
        seq_add(r, v.seq, b.seq->v[i]);
    return v;
}

struct value binary(struct run *r, enum op op, struct value a, struct value b)
{
    if (is_int(a) && is_int(b))
        return int_binary(r, op, as_int(a), as_int(b));
    if (is_number(a) && is_number(b))
        return float_binary(r, op, as_float(a), as_float(b));
    if (op == OP_ADD && is_str(a) && is_str(b))
        return add_strs(r, a, b);
    if (op == OP_ADD && is_seq(a) && a.type == b.type)
        return add_seqs(r, a, b);
    if (op == OP_MUL && (is_str(a) || is_seq(a)) && is_int(b))
        return repeat(r, a, as_int(b));
    if (op == OP_MUL && (is_str(b) || is_seq(b)) && is_int(a))
        return repeat(r, b, as_int(a));
    if (op == OP_MOD && is_str(a))
        return format_percent(r, a.s, b);
    fail_operands(r, op, a, b);
}

/* --- Subscripts and attributes --- */

/* The n-th item, counted from the end when negative. */
static bool item_at(struct run *r, struct value v, int64_t i, struct value *ret)
{
    int64_t n = (int64_t)length(r, v);
    if (i < 0)
        i += n;
    if (i < 0 || i >= n)
        return false;
    if (is_seq(v)) {
        *ret = v.seq->v[i];
    } else if (v.type == T_RANGE) {
        *ret = range_item(v.range, (size_t)i);
    } else {
        size_t from = str_offset(v.s, (size_t)i), to = from;
        utf8_next(v.s->data, v.s->len, &to);
        *ret = v_str(str_sub(r, v.s, from, to));
        ret->safe = v.safe;
    }
    return true;
}

/* object[key] of Python, false for a LookupError or TypeError. */
static bool subscript(struct run *r, struct value object, struct value key, struct value *ret)
{
    const struct value *v;
    switch (object.type) {
    case T_DICT:
        v = dict_get(r, object.dict, key);
        if (v)
            *ret = *v;
        return v != NULL;
    case T_STR:
    case T_LIST:
    case T_TUPLE:
    case T_RANGE:
        return is_int(key) && item_at(r, object, as_int(key), ret);
    case T_UNDEFINED:
        fail_undefined(r, object);
    default:
        return false;
    }
}

static bool cycler_attr(struct run *r, struct value object, const struct str *name,
                        struct value *ret)
{
    if (!str_is(name, "current"))
        return false;
    return item_at(r, (struct value){.type = T_LIST, .seq = object.cycler->items},
                   (int64_t)object.cycler->pos, ret);
}

/* getattr(object, name) of Python, false for an AttributeError. */
static bool attribute(struct run *r, struct value object, struct str *name, struct value *ret)
{
    bool unsafe = false;
    const struct value *v;
    switch (object.type) {
    case T_UNDEFINED:
        fail_undefined(r, object);
    case T_NAMESPACE:
        v = dict_get(r, object.dict, v_str(name));
        if (v)
            *ret = *v;
        return v != NULL;
    case T_LOOP:
        *ret = loop_attr(r, object, name);
        return ret->type != T_MISSING;
    case T_MACRO:
        *ret = macro_attr(r, object, name);
        return ret->type != T_MISSING;
    case T_CYCLER:
        if (cycler_attr(r, object, name, ret))
            return true;
        break;
    }
    if (name->len > 4 && !memcmp(name->data, "__", 2) &&
        !memcmp(name->data + name->len - 2, "__", 2)) {
        *ret = undefined_attr(r, object, name, true);
        return true;
    }
    if (!find_method(r, object, name, ret, &unsafe))
        return false;
    if (unsafe)
        *ret = undefined_attr(r, object, name, true);
    return true;
}

static struct value no_element(struct run *r, struct value object, struct value key)
{
    struct sb b = {0};
    if (is_str(key))
        return undefined_attr(r, object, key.s, false);
    sb_printf(r, &b, "%s%s has no element ", object.type == T_NONE ? "None" : type_name(object),
              object.type == T_NONE ? "" : " object");
    print_repr(r, &b, key);
    sb_add(r, &b, "", 1);
    return undefined_text(r, b.data);
}

struct value get_item(struct run *r, struct value object, struct value key)
{
    struct value v;
    if (subscript(r, object, key, &v))
        return v;
    if (is_str(key) && attribute(r, object, key.s, &v))
        return v;
    return no_element(r, object, key);
}

struct value get_attr(struct run *r, struct value object, struct str *name)
{
    struct value v;
    if (attribute(r, object, name, &v) || subscript(r, object, v_str(name), &v))
        return v;
    return undefined_attr(r, object, name, false);
}

/* --- Slices --- */

static int64_t slice_bound(struct run *r, struct value v, int64_t n, int64_t low, int64_t high,
                           int64_t fallback)
{
    if (v.type == T_NONE || v.type == T_MISSING)
        return fallback;
    if (!is_int(v))
        run_fail(r, "TypeError: slice indices must be integers or None or have an __index__ "
                    "method");
    int64_t i = as_int(v);
    if (i < 0)
        i = i < -n ? low : i + n;
    return MIN(MAX(i, low), high);
}

static struct value slice_str(struct run *r, struct value v, int64_t from, int64_t step, size_t n)
{
    struct sb b = {0};
    struct value item;
    if (n == 0)
        return (struct value){.type = T_STR, .safe = v.safe, .s = str_lit(r, "")};
    if (step == 1) {
        size_t a = str_offset(v.s, (size_t)from);
        struct str rest = {.data = v.s->data + a, .len = v.s->len - a, .chars = SIZE_MAX};
        size_t len = str_offset(&rest, n);
        return (struct value){.type = T_STR, .safe = v.safe, .s = str_sub(r, v.s, a, a + len)};
    }
    struct seq *chars = to_list(r, v);
    for (size_t i = 0; i < n; i++) {
        item = chars->v[from + (int64_t)i * step];
        sb_str(r, &b, item.s);
    }
    return (struct value){.type = T_STR, .safe = v.safe, .s = sb_take(r, &b)};
}

static struct value slice_range(struct run *r, const struct range *x, int64_t from, int64_t to,
                                int64_t step, size_t n)
{
    struct range *part = arena(r, 1, sizeof *part);
    *part = (struct range){x->start + from * x->step, x->start + to * x->step, x->step * step, n};
    return (struct value){.type = T_RANGE, .range = part};
}

struct value get_slice(struct run *r, struct value object, struct value from, struct value to,
                       struct value step)
{
    if (object.type == T_UNDEFINED)
        fail_undefined(r, object);
    if (object.type == T_DICT)
        run_fail(r, "TypeError: unhashable type: 'slice'");
    if (!is_str(object) && !is_seq(object) && object.type != T_RANGE)
        run_fail(r, "TypeError: '%s' object is not subscriptable", type_name(object));
    int64_t n = (int64_t)length(r, object);
    int64_t by = slice_bound(r, step, 0, 0, 0, 1);
    if (is_int(step))
        by = MIN(MAX(as_int(step), (int64_t)INT32_MIN), (int64_t)INT32_MAX);
    if (by == 0)
        run_fail(r, "ValueError: slice step cannot be zero");
    bool back = by < 0;
    int64_t low = back ? -1 : 0, high = back ? n - 1 : n;
    int64_t a = slice_bound(r, from, n, low, high, back ? high : low);
    int64_t b = slice_bound(r, to, n, low, high, back ? low : high);
    int64_t span = back ? a - b : b - a;
    size_t count = span > 0 ? (size_t)((span - 1) / (back ? -by : by) + 1) : 0;
    if (is_str(object))
        return slice_str(r, object, a, by, count);
    if (object.type == T_RANGE)
        return slice_range(r, object.range, a, b, by, count);
    struct value v = seq_new(r, (enum value_type)object.type, count);
    for (size_t i = 0; i < count; i++)
        seq_add(r, v.seq, object.seq->v[a + (int64_t)i * by]);
    return v;
}
