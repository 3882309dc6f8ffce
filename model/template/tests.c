/* SPDX-License-Identifier: Apache-2.0 */
/* What may follow "is". */
#include "model/template/internal.h"

#define TEST(name, condition)                                                                      \
    static struct value t_##name(struct run *r, const struct value *self, struct args *a)          \
    {                                                                                              \
        const struct value v = *self;                                                              \
        bind(r, a, "", 0, NULL);                                                                   \
        return v_bool(condition);                                                                  \
    }

TEST(defined, v.type != T_UNDEFINED)
TEST(undefined, v.type == T_UNDEFINED)
TEST(none, v.type == T_NONE)
TEST(boolean, v.type == T_BOOL)
TEST(true, v.type == T_BOOL && v.b)
TEST(false, v.type == T_BOOL && !v.b)
TEST(integer, v.type == T_INT)
TEST(float, v.type == T_FLOAT)
TEST(number, is_number(v))
TEST(string, is_str(v))
TEST(mapping, v.type == T_DICT)
TEST(sequence, has_length(v) && v.type != T_VIEW && v.type != T_LOOP)
TEST(iterable, iterable(v))
TEST(escaped, is_str(v) && v.safe)
TEST(callable, v.type == T_UNDEFINED || v.type == T_MACRO || v.type == T_FUNCTION ||
                   v.type == T_METHOD || v.type == T_LOOP || v.type == T_JOINER)
TEST(odd, equal(r, binary(r, OP_MOD, v, v_int(2)), v_int(1)))
TEST(even, equal(r, binary(r, OP_MOD, v, v_int(2)), v_int(0)))
TEST(filter, is_str(v) && find_filter(v.s))
TEST(test, is_str(v) && find_test(v.s))

static struct value cased(struct run *r, const struct value *self, const char *method)
{
    struct args none = {.what = method};
    struct str name = {.data = method, .len = strlen(method)};
    struct value text = v_str(to_str(r, *self));
    return find_in(str_methods, &name)->call(r, &text, &none);
}

static struct value t_lower(struct run *r, const struct value *self, struct args *a)
{
    return cased(r, self, "islower");
}

static struct value t_upper(struct run *r, const struct value *self, struct args *a)
{
    return cased(r, self, "isupper");
}

static struct value t_divisibleby(struct run *r, const struct value *self, struct args *a)
{
    struct value num;
    bind(r, a, "num", 1, &num);
    return v_bool(equal(r, binary(r, OP_MOD, *self, num), v_int(0)));
}

/* Identity; equal scalars count as the same object. */
static struct value t_sameas(struct run *r, const struct value *self, struct args *a)
{
    struct value other;
    bind(r, a, "other", 1, &other);
    if (self->type != other.type)
        return v_bool(false);
    if (self->type <= T_STR)
        return v_bool(equal(r, *self, other));
    return v_bool(self->p == other.p);
}

static struct value compared(struct run *r, const struct value *self, struct args *a, enum op op)
{
    struct value other;
    bind(r, a, "other", 1, &other);
    return v_bool(compare(r, op, *self, other));
}

#define COMPARISON(name, op)                                                                       \
    static struct value t_##name(struct run *r, const struct value *self, struct args *a)          \
    {                                                                                              \
        return compared(r, self, a, op);                                                           \
    }

COMPARISON(eq, OP_EQ)
COMPARISON(ne, OP_NE)
COMPARISON(lt, OP_LT)
COMPARISON(le, OP_LE)
COMPARISON(gt, OP_GT)
COMPARISON(ge, OP_GE)
COMPARISON(in, OP_IN)

const struct builtin tests_table[] = {
    {"!=", t_ne},
    {"<", t_lt},
    {"<=", t_le},
    {"==", t_eq},
    {">", t_gt},
    {">=", t_ge},
    {"boolean", t_boolean},
    {"callable", t_callable},
    {"defined", t_defined},
    {"divisibleby", t_divisibleby},
    {"eq", t_eq},
    {"equalto", t_eq},
    {"escaped", t_escaped},
    {"even", t_even},
    {"false", t_false},
    {"filter", t_filter},
    {"float", t_float},
    {"ge", t_ge},
    {"greaterthan", t_gt},
    {"gt", t_gt},
    {"in", t_in},
    {"integer", t_integer},
    {"iterable", t_iterable},
    {"le", t_le},
    {"lessthan", t_lt},
    {"lower", t_lower},
    {"lt", t_lt},
    {"mapping", t_mapping},
    {"ne", t_ne},
    {"none", t_none},
    {"number", t_number},
    {"odd", t_odd},
    {"sameas", t_sameas},
    {"sequence", t_sequence},
    {"string", t_string},
    {"test", t_test},
    {"true", t_true},
    {"undefined", t_undefined},
    {"upper", t_upper},
    {NULL, NULL},
};
