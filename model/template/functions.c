/* SPDX-License-Identifier: Apache-2.0 */
/* Global functions, and methods of everything but strings. */
#include <math.h>
#include <stdio.h>

#include "model/template/internal.h"

#define RANGE_MAX 100000 /* of Jinja2's sandbox */

static struct value g_range(struct run *r, const struct value *self, struct args *a)
{
    struct value v[3];
    bind(r, a, "start stop step", 1, v);
    int64_t start = 0, stop = need_int(r, v[0]), step = 1;
    if (v[1].type != T_MISSING) {
        start = stop;
        stop = need_int(r, v[1]);
    }
    if (v[2].type != T_MISSING)
        step = need_int(r, v[2]);
    if (step == 0)
        run_fail(r, "ValueError: range() arg 3 must not be zero");
    uint64_t n = 0, by = step > 0 ? (uint64_t)step : -(uint64_t)step;
    if (step > 0 ? start < stop : start > stop)
        n = ((step > 0 ? (uint64_t)stop - (uint64_t)start : (uint64_t)start - (uint64_t)stop) - 1) /
                by +
            1;
    if (n > RANGE_MAX)
        run_fail(r,
                 "OverflowError: Range too big. The sandbox blocks ranges larger than "
                 "MAX_RANGE (%d).",
                 RANGE_MAX);
    struct range *x = arena(r, 1, sizeof *x);
    *x = (struct range){start, stop, step, (size_t)n};
    return (struct value){.type = T_RANGE, .range = x};
}

/* dict(mapping or pairs, name=value, ...) */
static struct dict *make_dict(struct run *r, struct args *a)
{
    struct dict *d = dict_new(r);
    struct value v;
    if (a->n > 1)
        run_fail(r, "TypeError: %s expected at most 1 argument, got %zu", a->what, a->n);
    if (a->n && a->pos[0].type == T_DICT) {
        const struct dict *from = a->pos[0].dict;
        for (size_t i = 0; i < from->n; i++)
            dict_set(r, d, from->v[i].key, from->v[i].value);
    } else if (a->n) {
        struct iter *it = iter_begin(r, a->pos[0]);
        while (iter_next(r, it, &v)) {
            struct seq *pair = to_list(r, v);
            if (pair->n != 2)
                run_fail(r,
                         "ValueError: dictionary update sequence element has length %zu; 2 is "
                         "required",
                         pair->n);
            dict_set(r, d, pair->v[0], pair->v[1]);
        }
    }
    for (size_t i = 0; i < a->n_kw; i++)
        dict_set(r, d, v_str(a->kw[i].name), a->kw[i].value);
    return d;
}

static struct value g_dict(struct run *r, const struct value *self, struct args *a)
{
    return v_dict(make_dict(r, a));
}

static struct value g_namespace(struct run *r, const struct value *self, struct args *a)
{
    return (struct value){.type = T_NAMESPACE, .dict = make_dict(r, a)};
}

static struct value g_cycler(struct run *r, const struct value *self, struct args *a)
{
    struct cycler *c = arena(r, 1, sizeof *c);
    if (!a->n)
        run_fail(r, "RuntimeError: at least one item has to be provided");
    c->items = seq_new(r, T_LIST, a->n).seq;
    for (size_t i = 0; i < a->n; i++)
        seq_add(r, c->items, a->pos[i]);
    return (struct value){.type = T_CYCLER, .cycler = c};
}

static struct value g_joiner(struct run *r, const struct value *self, struct args *a)
{
    struct value sep;
    struct cycler *c = arena(r, 1, sizeof *c);
    bind(r, a, "sep", 0, &sep);
    c->sep = sep.type == T_MISSING ? str_lit(r, ", ") : to_str(r, sep);
    return (struct value){.type = T_JOINER, .cycler = c};
}

static struct value g_raise(struct run *r, const struct value *self, struct args *a)
{
    struct value message;
    bind(r, a, "message", 1, &message);
    run_refuse(r, to_str(r, message));
}

static struct value g_strftime(struct run *r, const struct value *self, struct args *a)
{
    struct value format;
    struct sb fmt = {0};
    char text[1024] = "";
    time_t t = time(NULL);
    struct tm now;
    bind(r, a, "format", 1, &format);
    const struct str *s = need_str(r, format);
    for (size_t i = 0; i < s->len; i++) {
        bool micro = s->data[i] == '%' && i + 1 < s->len && s->data[i + 1] == 'f';
        sb_add(r, &fmt, micro ? "000000" : &s->data[i], micro ? 6 : 1);
        i += micro;
        if (!micro && s->data[i] == '%' && i + 1 < s->len)
            sb_add(r, &fmt, &s->data[++i], 1);
    }
    sb_add(r, &fmt, "", 1);
    if (fmt.len > sizeof text / 4)
        run_fail(r, "strftime_now: the format is longer than %zu bytes", sizeof text / 4);
    if (!r->now)
        localtime_r(&t, &now);
    size_t n = strftime(text, sizeof text, fmt.data, r->now ? r->now : &now);
    return v_str(str_copy(r, text, n));
}

const struct builtin functions_table[] = {
    {"cycler", g_cycler},         {"dict", g_dict},
    {"joiner", g_joiner},         {"namespace", g_namespace},
    {"raise_exception", g_raise}, {"range", g_range},
    {"strftime_now", g_strftime}, {NULL, NULL},
};

/* --- Dicts --- */

static struct value d_get(struct run *r, const struct value *self, struct args *a)
{
    struct value v[2];
    bind(r, a, "key default", 1, v);
    if (!hashable(v[0]))
        run_fail(r, "TypeError: unhashable type: '%s'", type_name(v[0]));
    const struct value *found = dict_get(r, self->dict, v[0]);
    return found ? *found : v[1].type == T_MISSING ? v_none() : v[1];
}

static struct value make_view(struct run *r, const struct value *self, struct args *a,
                              enum view_kind kind)
{
    struct view *view = arena(r, 1, sizeof *view);
    bind(r, a, "", 0, NULL);
    *view = (struct view){kind, self->dict};
    return (struct value){.type = T_VIEW, .view = view};
}

static struct value d_items(struct run *r, const struct value *self, struct args *a)
{
    return make_view(r, self, a, VIEW_ITEMS);
}

static struct value d_keys(struct run *r, const struct value *self, struct args *a)
{
    return make_view(r, self, a, VIEW_KEYS);
}

static struct value d_values(struct run *r, const struct value *self, struct args *a)
{
    return make_view(r, self, a, VIEW_VALUES);
}

static struct value d_copy(struct run *r, const struct value *self, struct args *a)
{
    struct dict *d = dict_new(r);
    bind(r, a, "", 0, NULL);
    for (size_t i = 0; i < self->dict->n; i++)
        dict_set(r, d, self->dict->v[i].key, self->dict->v[i].value);
    return v_dict(d);
}

/* A NULL function: the sandbox keeps it. */
static const struct builtin dict_methods[] = {
    {"clear", NULL},  {"copy", d_copy},     {"get", d_get},    {"items", d_items},
    {"keys", d_keys}, {"pop", NULL},        {"popitem", NULL}, {"setdefault", NULL},
    {"update", NULL}, {"values", d_values}, {NULL, NULL},
};

/* --- Lists and tuples --- */

static struct value l_count(struct run *r, const struct value *self, struct args *a)
{
    struct value v;
    int64_t n = 0;
    bind(r, a, "value", 1, &v);
    for (size_t i = 0; i < self->seq->n; i++)
        n += equal(r, self->seq->v[i], v);
    return v_int(n);
}

static struct value l_index(struct run *r, const struct value *self, struct args *a)
{
    struct value v[3];
    int64_t n = (int64_t)self->seq->n;
    bind(r, a, "value start stop", 1, v);
    int64_t from = v[1].type == T_MISSING ? 0 : need_int(r, v[1]);
    int64_t to = v[2].type == T_MISSING ? n : need_int(r, v[2]);
    from = from < 0 ? MAX(from + n, (int64_t)0) : from;
    to = MIN(to < 0 ? to + n : to, n);
    for (int64_t i = from; i < to; i++)
        if (equal(r, self->seq->v[i], v[0]))
            return v_int(i);
    run_fail(r, "ValueError: the value is not in the %s", type_name(*self));
}

static struct value l_copy(struct run *r, const struct value *self, struct args *a)
{
    bind(r, a, "", 0, NULL);
    return (struct value){.type = T_LIST, .seq = to_list(r, *self)};
}

/* pop and clear: Jinja2's sandbox let them pass up to 3.1.4, and templates rely on it. */
static struct value l_pop(struct run *r, const struct value *self, struct args *a)
{
    struct value v;
    struct seq *s = self->seq;
    bind(r, a, "index", 0, &v);
    int64_t i = v.type == T_MISSING ? -1 : need_int(r, v);
    i += i < 0 ? (int64_t)s->n : 0;
    if (i < 0 || i >= (int64_t)s->n)
        run_fail(r, "IndexError: pop %s", s->n ? "index out of range" : "from empty list");
    v = s->v[i];
    run_charge(r, (s->n - (size_t)i) * sizeof v);
    memmove(&s->v[i], &s->v[i + 1], (--s->n - (size_t)i) * sizeof v);
    return v;
}

static struct value l_clear(struct run *r, const struct value *self, struct args *a)
{
    bind(r, a, "", 0, NULL);
    self->seq->n = 0;
    return v_none();
}

static const struct builtin list_methods[] = {
    {"append", NULL}, {"clear", l_clear}, {"copy", l_copy}, {"count", l_count},
    {"extend", NULL}, {"index", l_index}, {"insert", NULL}, {"pop", l_pop},
    {"remove", NULL}, {"reverse", NULL},  {"sort", NULL},   {NULL, NULL},
};

static const struct builtin tuple_methods[] = {
    {"count", l_count}, {"index", l_index}, {NULL, NULL}};

/* --- Numbers, cyclers --- */

static struct value n_is_integer(struct run *r, const struct value *self, struct args *a)
{
    bind(r, a, "", 0, NULL);
    return v_bool(isfinite(self->f) && floor(self->f) == self->f);
}

static struct value n_bit_length(struct run *r, const struct value *self, struct args *a)
{
    int64_t i = as_int(*self), n = 0;
    bind(r, a, "", 0, NULL);
    for (uint64_t u = i < 0 ? -(uint64_t)i : (uint64_t)i; u; u >>= 1)
        n++;
    return v_int(n);
}

static const struct builtin float_methods[] = {{"is_integer", n_is_integer}, {NULL, NULL}};
static const struct builtin int_methods[] = {{"bit_length", n_bit_length}, {NULL, NULL}};

static struct value c_next(struct run *r, const struct value *self, struct args *a)
{
    struct cycler *c = self->cycler;
    bind(r, a, "", 0, NULL);
    struct value v = c->items->v[c->pos];
    c->pos = (c->pos + 1) % c->items->n;
    return v;
}

static struct value c_reset(struct run *r, const struct value *self, struct args *a)
{
    bind(r, a, "", 0, NULL);
    self->cycler->pos = 0;
    return v_none();
}

static const struct builtin cycler_methods[] = {{"next", c_next}, {"reset", c_reset}, {NULL, NULL}};

static const struct builtin *methods_of(struct value v)
{
    switch (v.type) {
    case T_STR:
        return str_methods;
    case T_DICT:
        return dict_methods;
    case T_LIST:
        return list_methods;
    case T_TUPLE:
        return tuple_methods;
    case T_FLOAT:
        return float_methods;
    case T_INT:
    case T_BOOL:
        return int_methods;
    case T_CYCLER:
        return cycler_methods;
    default:
        return NULL;
    }
}

bool find_method(struct run *r, struct value object, const struct str *name, struct value *ret,
                 bool *ret_unsafe)
{
    const struct builtin *table = methods_of(object), *b = table ? find_in(table, name) : NULL;
    if (!b)
        return false;
    struct method *m = arena(r, 1, sizeof *m);
    *m = (struct method){b->name, b->call, object};
    *ret = (struct value){.type = T_METHOD, .method = m};
    *ret_unsafe = !b->call;
    return true;
}
