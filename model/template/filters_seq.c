/* SPDX-License-Identifier: Apache-2.0 */
/* Filters of sequences and mappings. Those that Jinja2 makes generators are lazy here too. */
#include "model/template/internal.h"

/* --- Attributes: "a.b.0" --- */

static struct value dotted(struct run *r, struct value item, struct value path,
                           struct value fallback)
{
    if (path.type == T_NONE || path.type == T_MISSING)
        return item;
    if (!is_str(path)) {
        item = get_item(r, item, path);
        return item.type == T_UNDEFINED && fallback.type != T_MISSING && fallback.type != T_NONE
                   ? fallback
                   : item;
    }
    for (size_t from = 0; from <= path.s->len;) {
        const char *dot = memchr(path.s->data + from, '.', path.s->len - from);
        size_t to = dot ? (size_t)(dot - path.s->data) : path.s->len;
        struct str *name = str_sub(r, path.s, from, to);
        bool number = name->len > 0;
        int64_t index;
        for (size_t i = 0; i < name->len; i++)
            number &= name->data[i] >= '0' && name->data[i] <= '9';
        item = number && parse_int(r, name, 10, &index) ? get_item(r, item, v_int(index))
                                                        : get_item(r, item, v_str(name));
        if (item.type == T_UNDEFINED && fallback.type != T_MISSING && fallback.type != T_NONE)
            item = fallback;
        from = to + 1;
    }
    return item;
}

static struct value fold(struct run *r, struct value v, bool case_sensitive)
{
    return is_str(v) && !case_sensitive ? v_str(str_case(r, v.s, CASE_LOWER)) : v;
}

static struct value attr_key(struct run *r, struct value item, struct value path,
                             bool case_sensitive)
{
    return fold(r, dotted(r, item, path, v_missing()), case_sensitive);
}

/* --- Sorting --- */

struct keyed {
    struct value key, item;
};

static bool before(struct run *r, const struct keyed *a, const struct keyed *b, bool reverse)
{
    int d = reverse ? order(r, b->key, a->key, OP_LT) : order(r, a->key, b->key, OP_LT);
    return d == -1;
}

/* Stable merge sort. */
static void sort_keyed(struct run *r, struct keyed *v, size_t n, bool reverse)
{
    struct keyed *from = v, *to = arena(r, n, sizeof *to);
    for (size_t width = 1; width < n; width *= 2) {
        for (size_t i = 0; i < n; i += 2 * width) {
            size_t a = i, mid = MIN(i + width, n), b = mid, end = MIN(i + 2 * width, n);
            for (size_t k = i; k < end; k++) {
                bool right = a == mid || (b < end && before(r, &from[b], &from[a], reverse));
                to[k] = right ? from[b++] : from[a++];
            }
        }
        struct keyed *swap = from;
        from = to;
        to = swap;
    }
    if (from != v && n)
        memcpy(v, from, n * sizeof *v);
}

static struct value keyed_list(struct run *r, const struct keyed *v, size_t n)
{
    struct value out = seq_new(r, T_LIST, n);
    for (size_t i = 0; i < n; i++)
        seq_add(r, out.seq, v[i].item);
    return out;
}

/* The key of sort: a list, one value for each path of "a.b,c". */
static struct value sort_key(struct run *r, struct value item, struct value paths,
                             bool case_sensitive)
{
    struct value key = seq_new(r, T_LIST, 1);
    if (!is_str(paths)) {
        seq_add(r, key.seq, attr_key(r, item, paths, case_sensitive));
        return key;
    }
    for (size_t from = 0; from <= paths.s->len;) {
        const char *comma = memchr(paths.s->data + from, ',', paths.s->len - from);
        size_t to = comma ? (size_t)(comma - paths.s->data) : paths.s->len;
        struct value path = v_str(str_sub(r, paths.s, from, to));
        seq_add(r, key.seq, attr_key(r, item, path, case_sensitive));
        from = to + 1;
    }
    return key;
}

static struct value f_sort(struct run *r, const struct value *self, struct args *a)
{
    struct value v[3];
    bind(r, a, "reverse case_sensitive attribute", 0, v);
    struct seq *items = to_list(r, *self);
    struct keyed *keyed = arena(r, items->n, sizeof *keyed);
    for (size_t i = 0; i < items->n; i++)
        keyed[i] =
            (struct keyed){sort_key(r, items->v[i], v[2], flag(r, v[1], false)), items->v[i]};
    sort_keyed(r, keyed, items->n, flag(r, v[0], false));
    return keyed_list(r, keyed, items->n);
}

static struct dict *need_mapping(struct run *r, struct value v, const char *attribute)
{
    if (v.type == T_UNDEFINED)
        fail_undefined(r, v);
    if (v.type != T_DICT)
        run_fail(r, "AttributeError: '%s' object has no attribute '%s'", type_name(v), attribute);
    return v.dict;
}

static struct value f_dictsort(struct run *r, const struct value *self, struct args *a)
{
    struct value v[3];
    bind(r, a, "case_sensitive by reverse", 0, v);
    struct str *by = v[1].type == T_MISSING ? str_lit(r, "key") : need_str(r, v[1]);
    if (!str_is(by, "key") && !str_is(by, "value"))
        run_fail(r, "FilterArgumentError: You can only sort by either \"key\" or \"value\"");
    const struct dict *d = need_mapping(r, *self, "items");
    struct keyed *keyed = arena(r, d->n, sizeof *keyed);
    for (size_t i = 0; i < d->n; i++) {
        struct value key = str_is(by, "key") ? d->v[i].key : d->v[i].value;
        keyed[i] = (struct keyed){fold(r, key, flag(r, v[0], false)),
                                  v_tuple2(r, d->v[i].key, d->v[i].value)};
    }
    sort_keyed(r, keyed, d->n, flag(r, v[2], false));
    return keyed_list(r, keyed, d->n);
}

static struct value f_groupby(struct run *r, const struct value *self, struct args *a)
{
    struct value v[3], out = seq_new(r, T_LIST, 0);
    bind(r, a, "attribute default case_sensitive", 1, v);
    struct seq *items = to_list(r, *self), *group = NULL;
    struct keyed *keyed = arena(r, items->n, sizeof *keyed);
    for (size_t i = 0; i < items->n; i++) {
        struct value key = dotted(r, items->v[i], v[0], v[1]);
        keyed[i] = (struct keyed){fold(r, key, flag(r, v[2], false)), items->v[i]};
    }
    sort_keyed(r, keyed, items->n, false);
    for (size_t i = 0; i < items->n; i++) {
        if (!i || !equal(r, keyed[i - 1].key, keyed[i].key)) {
            struct value list = seq_new(r, T_LIST, 0);
            group = list.seq;
            seq_add(r, out.seq, v_tuple2(r, dotted(r, keyed[i].item, v[0], v[1]), list));
        }
        seq_add(r, group, keyed[i].item);
    }
    return out;
}

static struct value extreme(struct run *r, const struct value *self, struct args *a, bool largest)
{
    struct value v[2], item, best, best_key;
    bind(r, a, "case_sensitive attribute", 0, v);
    struct iter *it = iter_begin(r, *self);
    if (!iter_next(r, it, &best))
        return undefined_text(r, "No aggregated item, sequence was empty.");
    best_key = attr_key(r, best, v[1], flag(r, v[0], false));
    while (iter_next(r, it, &item)) {
        struct value key = attr_key(r, item, v[1], flag(r, v[0], false));
        if (order(r, key, best_key, largest ? OP_GT : OP_LT) == (largest ? 1 : -1)) {
            best = item;
            best_key = key;
        }
    }
    return best;
}

static struct value f_min(struct run *r, const struct value *self, struct args *a)
{
    return extreme(r, self, a, false);
}

static struct value f_max(struct run *r, const struct value *self, struct args *a)
{
    return extreme(r, self, a, true);
}

/* --- Whole sequences --- */

static struct value f_length(struct run *r, const struct value *self, struct args *a)
{
    bind(r, a, "", 0, NULL);
    return v_int((int64_t)length(r, *self));
}

static struct value f_list(struct run *r, const struct value *self, struct args *a)
{
    bind(r, a, "", 0, NULL);
    return (struct value){.type = T_LIST, .seq = to_list(r, *self)};
}

static struct value f_first(struct run *r, const struct value *self, struct args *a)
{
    struct value v;
    bind(r, a, "", 0, NULL);
    return iter_next(r, iter_begin(r, *self), &v)
               ? v
               : undefined_text(r, "No first item, sequence was empty.");
}

static void need_reversible(struct run *r, struct value v)
{
    if (!has_length(v) || v.type == T_LOOP)
        run_fail(r, "TypeError: '%s' object is not reversible", type_name(v));
}

static struct value f_last(struct run *r, const struct value *self, struct args *a)
{
    bind(r, a, "", 0, NULL);
    need_reversible(r, *self);
    struct seq *s = is_seq(*self) ? self->seq : to_list(r, *self);
    return s->n ? s->v[s->n - 1] : undefined_text(r, "No last item, sequence was empty.");
}

static struct value f_reverse(struct run *r, const struct value *self, struct args *a)
{
    bind(r, a, "", 0, NULL);
    if (is_str(*self))
        return get_slice(r, *self, v_none(), v_none(), v_int(-1));
    struct value list = {.type = T_LIST, .seq = to_list(r, *self)};
    struct value back = get_slice(r, list, v_none(), v_none(), v_int(-1));
    return self->type == T_ITER ? back : v_iter(r, back, NULL, NULL, "reversed");
}

static struct value f_join(struct run *r, const struct value *self, struct args *a)
{
    struct value v[2], item;
    struct sb b = {0};
    bool first = true;
    bind(r, a, "d attribute", 0, v);
    struct str *d = v[0].type == T_MISSING ? str_lit(r, "") : to_str(r, v[0]);
    struct iter *it = iter_begin(r, *self);
    while (iter_next(r, it, &item)) {
        if (!first)
            sb_str(r, &b, d);
        print_str(r, &b, dotted(r, item, v[1], v_missing()));
        first = false;
    }
    return v_str(sb_take(r, &b));
}

static struct value f_sum(struct run *r, const struct value *self, struct args *a)
{
    struct value v[2], item;
    bind(r, a, "attribute start", 0, v);
    struct value total = v[1].type == T_MISSING ? v_int(0) : v[1];
    struct iter *it = iter_begin(r, *self);
    if (is_str(total))
        run_fail(r, "TypeError: sum() can't sum strings [use ''.join(seq) instead]");
    while (iter_next(r, it, &item))
        total = binary(r, OP_ADD, total, dotted(r, item, v[0], v_missing()));
    return total;
}

static struct value f_attr(struct run *r, const struct value *self, struct args *a)
{
    struct value name, v;
    bool unsafe = false;
    bind(r, a, "name", 1, &name);
    struct str *s = to_str(r, name);
    if (self->type != T_DICT)
        return get_attr(r, *self, s);
    if (!find_method(r, *self, s, &v, &unsafe))
        return undefined_attr(r, *self, s, false);
    return unsafe ? undefined_attr(r, *self, s, true) : v;
}

/* --- Lazy ones --- */

struct lazy {
    struct args args;
    struct value self;
    struct iter *source;
    const struct builtin *fn; /* the filter or test; NULL: the item itself */
    struct value path, fallback;
    bool by_attr, negate, started;
    struct dict *seen;
    size_t count;
    struct seq *items;
    struct value fill;
};

static struct value lazy(struct run *r, const struct value *self, struct args *a,
                         bool (*next)(struct run *, struct iter *, struct value *),
                         struct lazy **ret)
{
    struct lazy *x = arena(r, 1, sizeof *x);
    x->args = *a;
    x->self = *self;
    *ret = x;
    return v_iter(r, *self, next, x, NULL);
}

static struct args copy_args(struct run *r, const struct args *a, size_t skip)
{
    struct args copy = *a;
    copy.pos = a->pos + skip;
    copy.n = a->n - skip;
    copy.kw = arena(r, a->n_kw, sizeof *copy.kw);
    if (a->n_kw)
        memcpy(copy.kw, a->kw, a->n_kw * sizeof *copy.kw);
    return copy;
}

static void map_prepare(struct run *r, struct lazy *x)
{
    struct args *a = &x->args;
    if (!a->n && a->n_kw) {
        struct value v[2];
        a->what = "map";
        bind(r, a, "attribute default", 1, v);
        x->by_attr = true;
        x->path = v[0];
        x->fallback = v[1];
        return;
    }
    if (!a->n)
        run_fail(r, "FilterArgumentError: map requires a filter argument");
    struct str *name = to_str(r, a->pos[0]);
    x->fn = find_filter(name);
    if (!x->fn)
        run_fail(r, "TemplateRuntimeError: No filter named '%.*s'.",
                 (int)MIN(name->len, (size_t)100), name->data);
    *a = copy_args(r, a, 1);
    a->what = x->fn->name;
}

static bool map_next(struct run *r, struct iter *it, struct value *ret)
{
    struct lazy *x = it->state;
    struct value item;
    if (!x->started) {
        x->started = true;
        if (!truthy(r, x->self))
            return false;
        map_prepare(r, x);
        x->source = iter_begin(r, x->self);
    }
    if (!x->source || !iter_next(r, x->source, &item))
        return false;
    if (x->by_attr) {
        *ret = dotted(r, item, x->path, x->fallback);
        return true;
    }
    struct args a = copy_args(r, &x->args, 0);
    *ret = x->fn->call(r, &item, &a);
    return true;
}

static struct value f_map(struct run *r, const struct value *self, struct args *a)
{
    struct lazy *x;
    return lazy(r, self, a, map_next, &x);
}

static void select_prepare(struct run *r, struct lazy *x)
{
    struct args *a = &x->args;
    size_t off = x->by_attr;
    if (x->by_attr && !a->n)
        run_fail(r, "FilterArgumentError: Missing parameter for attribute name");
    if (x->by_attr)
        x->path = a->pos[0];
    if (a->n <= off)
        return;
    struct str *name = to_str(r, a->pos[off]);
    x->fn = find_test(name);
    if (!x->fn)
        run_fail(r, "TemplateRuntimeError: No test named '%.*s'.", (int)MIN(name->len, (size_t)100),
                 name->data);
    *a = copy_args(r, a, off + 1);
    a->what = x->fn->name;
}

static bool select_next(struct run *r, struct iter *it, struct value *ret)
{
    struct lazy *x = it->state;
    if (!x->started) {
        x->started = true;
        if (!truthy(r, x->self))
            return false;
        select_prepare(r, x);
        x->source = iter_begin(r, x->self);
    }
    while (x->source && iter_next(r, x->source, ret)) {
        struct value v = x->by_attr ? dotted(r, *ret, x->path, v_missing()) : *ret;
        struct args a = copy_args(r, &x->args, 0);
        bool is = truthy(r, x->fn ? x->fn->call(r, &v, &a) : v);
        if (is != x->negate)
            return true;
    }
    return false;
}

static struct value choose(struct run *r, const struct value *self, struct args *a, bool by_attr,
                           bool negate)
{
    struct lazy *x;
    struct value v = lazy(r, self, a, select_next, &x);
    x->by_attr = by_attr;
    x->negate = negate;
    return v;
}

static struct value f_select(struct run *r, const struct value *self, struct args *a)
{
    return choose(r, self, a, false, false);
}

static struct value f_reject(struct run *r, const struct value *self, struct args *a)
{
    return choose(r, self, a, false, true);
}

static struct value f_selectattr(struct run *r, const struct value *self, struct args *a)
{
    return choose(r, self, a, true, false);
}

static struct value f_rejectattr(struct run *r, const struct value *self, struct args *a)
{
    return choose(r, self, a, true, true);
}

static bool unique_next(struct run *r, struct iter *it, struct value *ret)
{
    struct lazy *x = it->state;
    if (!x->source)
        x->source = iter_begin(r, x->self);
    while (iter_next(r, x->source, ret)) {
        struct value key = attr_key(r, *ret, x->path, x->by_attr);
        if (!hashable(key))
            run_fail(r, "TypeError: unhashable type: '%s'", type_name(key));
        if (dict_get(r, x->seen, key))
            continue;
        dict_set(r, x->seen, key, v_none());
        return true;
    }
    return false;
}

static struct value f_unique(struct run *r, const struct value *self, struct args *a)
{
    struct value v[2];
    struct lazy *x;
    bind(r, a, "case_sensitive attribute", 0, v);
    struct value it = lazy(r, self, a, unique_next, &x);
    x->by_attr = flag(r, v[0], false);
    x->path = v[1];
    x->seen = dict_new(r);
    return it;
}

static bool batch_next(struct run *r, struct iter *it, struct value *ret)
{
    struct lazy *x = it->state;
    struct value part = seq_new(r, T_LIST, 0), item;
    if (!x->source)
        x->source = iter_begin(r, x->self);
    while (part.seq->n < x->count && iter_next(r, x->source, &item))
        seq_add(r, part.seq, item);
    if (!part.seq->n)
        return false;
    while (x->fill.type != T_MISSING && x->fill.type != T_NONE && part.seq->n < x->count)
        seq_add(r, part.seq, x->fill);
    *ret = part;
    return true;
}

static struct value f_batch(struct run *r, const struct value *self, struct args *a)
{
    struct value v[2];
    struct lazy *x;
    bind(r, a, "linecount fill_with", 1, v);
    struct value it = lazy(r, self, a, batch_next, &x);
    int64_t count = need_int(r, v[0]);
    x->count = count > 0 ? (size_t)count : SIZE_MAX;
    x->fill = count > 0 ? v[1] : v_missing();
    return it;
}

/* The parts are made when the first is asked for: nothing of the value is touched before. */
static bool slice_next(struct run *r, struct iter *it, struct value *ret)
{
    struct lazy *x = it->state;
    if (!x->started) {
        x->started = true;
        x->items = to_list(r, x->self);
    }
    if (it->pos >= x->count)
        return false;
    size_t per = x->items->n / x->count, extra = x->items->n % x->count, i = it->pos++;
    size_t from = i * per + MIN(i, extra);
    *ret = seq_new(r, T_LIST, per + 1);
    for (size_t k = 0; k < per + (i < extra); k++)
        seq_add(r, ret->seq, x->items->v[from + k]);
    if (i >= extra && x->fill.type != T_MISSING && x->fill.type != T_NONE)
        seq_add(r, ret->seq, x->fill);
    return true;
}

static struct value f_slice(struct run *r, const struct value *self, struct args *a)
{
    struct value v[2];
    struct lazy *x;
    bind(r, a, "slices fill_with", 1, v);
    struct value it = lazy(r, self, a, slice_next, &x);
    int64_t slices = need_int(r, v[0]);
    if (slices <= 0)
        run_fail(r, "ZeroDivisionError: integer division or modulo by zero");
    x->count = (size_t)slices;
    x->fill = v[1];
    return it;
}

static bool items_next(struct run *r, struct iter *it, struct value *ret)
{
    struct lazy *x = it->state;
    if (x->self.type == T_UNDEFINED)
        return false;
    if (x->self.type != T_DICT)
        run_fail(r, "TypeError: Can only get item pairs from a mapping.");
    if (it->pos >= x->self.dict->n)
        return false;
    const struct dict_entry *e = &x->self.dict->v[it->pos++];
    *ret = v_tuple2(r, e->key, e->value);
    return true;
}

static struct value f_items(struct run *r, const struct value *self, struct args *a)
{
    struct lazy *x;
    bind(r, a, "", 0, NULL);
    return lazy(r, self, a, items_next, &x);
}

const struct builtin filters_seq[] = {
    {"attr", f_attr},
    {"batch", f_batch},
    {"count", f_length},
    {"dictsort", f_dictsort},
    {"first", f_first},
    {"groupby", f_groupby},
    {"items", f_items},
    {"join", f_join},
    {"last", f_last},
    {"length", f_length},
    {"list", f_list},
    {"map", f_map},
    {"max", f_max},
    {"min", f_min},
    {"reject", f_reject},
    {"rejectattr", f_rejectattr},
    {"reverse", f_reverse},
    {"select", f_select},
    {"selectattr", f_selectattr},
    {"slice", f_slice},
    {"sort", f_sort},
    {"sum", f_sum},
    {"unique", f_unique},
    {NULL, NULL},
};
