/* SPDX-License-Identifier: Apache-2.0 */
/* Going through things. */
#include "model/template/internal.h"

bool iterable(struct value v)
{
    switch (v.type) {
    case T_UNDEFINED:
    case T_STR:
    case T_LIST:
    case T_TUPLE:
    case T_DICT:
    case T_VIEW:
    case T_RANGE:
    case T_ITER:
    case T_LOOP:
        return true;
    default:
        return false;
    }
}

struct value range_item(const struct range *x, size_t i)
{
    return v_int(x->start + (int64_t)i * x->step);
}

struct value view_item(struct run *r, const struct view *v, size_t i)
{
    const struct dict_entry *e = &v->dict->v[i];
    return v->kind == VIEW_KEYS     ? e->key
           : v->kind == VIEW_VALUES ? e->value
                                    : v_tuple2(r, e->key, e->value);
}

struct value v_iter(struct run *r, struct value source,
                    bool (*next)(struct run *, struct iter *, struct value *), void *state,
                    const char *repr)
{
    struct iter *it = arena(r, 1, sizeof *it);
    *it = (struct iter){.source = source, .next = next, .state = state, .repr = repr};
    return (struct value){.type = T_ITER, .iter = it};
}

struct iter *iter_begin(struct run *r, struct value v)
{
    if (v.type == T_ITER)
        return v.iter;
    if (v.type == T_LOOP)
        return v.loop->source;
    if (!iterable(v))
        run_fail(r, "TypeError: '%s' object is not iterable", type_name(v));
    return v_iter(r, v, NULL, NULL, NULL).iter;
}

static bool next_char(struct run *r, struct iter *it, struct value *ret)
{
    struct str *s = it->source.s;
    size_t from = it->pos;
    if (from >= s->len)
        return false;
    utf8_next(s->data, s->len, &it->pos);
    *ret = v_str(str_sub(r, s, from, it->pos));
    return true;
}

bool iter_next(struct run *r, struct iter *it, struct value *ret)
{
    const struct value v = it->source;
    run_charge(r, 0);
    if (it->next) {
        run_enter(r);
        bool more = it->next(r, it, ret);
        run_leave(r);
        return more;
    }
    switch (v.type) {
    case T_STR:
        return next_char(r, it, ret);
    case T_LIST:
    case T_TUPLE:
        if (it->pos >= v.seq->n)
            return false;
        *ret = v.seq->v[it->pos++];
        return true;
    case T_DICT:
        if (it->pos >= v.dict->n)
            return false;
        *ret = v.dict->v[it->pos++].key;
        return true;
    case T_VIEW:
        if (it->pos >= v.view->dict->n)
            return false;
        *ret = view_item(r, v.view, it->pos++);
        return true;
    case T_RANGE:
        if (it->pos >= v.range->n)
            return false;
        *ret = range_item(v.range, it->pos++);
        return true;
    default:
        return false;
    }
}

struct seq *to_list(struct run *r, struct value v)
{
    struct seq *s = seq_new(r, T_LIST, has_length(v) ? length(r, v) : 0).seq;
    struct iter *it = iter_begin(r, v);
    struct value item;
    while (iter_next(r, it, &item))
        seq_add(r, s, item);
    return s;
}
