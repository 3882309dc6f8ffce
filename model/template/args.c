/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments of what is built in. */
#include "model/template/internal.h"

static size_t count_names(const char *names)
{
    size_t n = *names != '\0';
    for (; *names; names++)
        n += *names == ' ';
    return n;
}

/* The place of `name` in the list, or SIZE_MAX. */
static size_t place(const char *names, const struct str *name)
{
    for (size_t i = 0;; i++) {
        size_t len = strcspn(names, " ");
        if (len == name->len && !memcmp(names, name->data, len))
            return i;
        if (!names[len])
            return SIZE_MAX;
        names += len + 1;
    }
}

void bind(struct run *r, struct args *a, const char *names, size_t required, struct value *out)
{
    size_t n = count_names(names);
    for (size_t i = 0; i < n; i++)
        out[i] = v_missing();
    if (a->n > n)
        run_fail(r, "TypeError: %s takes at most %zu arguments (%zu given)", a->what, n, a->n);
    for (size_t i = 0; i < a->n; i++)
        out[i] = a->pos[i];
    for (size_t i = 0; i < a->n_kw; i++) {
        size_t at = n ? place(names, a->kw[i].name) : SIZE_MAX;
        if (at == SIZE_MAX || out[at].type != T_MISSING)
            run_fail(r, "TypeError: %s: unexpected keyword argument '%.*s'", a->what,
                     (int)MIN(a->kw[i].name->len, (size_t)100), a->kw[i].name->data);
        out[at] = a->kw[i].value;
    }
    for (size_t i = 0; i < required; i++)
        if (out[i].type == T_MISSING)
            run_fail(r, "TypeError: %s needs at least %zu arguments", a->what, required);
}

int64_t need_int(struct run *r, struct value v)
{
    if (v.type == T_UNDEFINED)
        fail_undefined(r, v);
    if (!is_int(v))
        run_fail(r, "TypeError: '%s' object cannot be interpreted as an integer", type_name(v));
    return as_int(v);
}

struct str *need_str(struct run *r, struct value v)
{
    if (!is_str(v))
        run_fail(r, "TypeError: expected str, got %s", type_name(v));
    return v.s;
}

bool flag(struct run *r, struct value v, bool fallback)
{
    return v.type == T_MISSING ? fallback : truthy(r, v);
}

const struct builtin *find_in(const struct builtin *table, const struct str *name)
{
    for (; table->name; table++)
        if (str_is(name, table->name))
            return table;
    return NULL;
}

const struct builtin *find_filter(const struct str *name)
{
    const struct builtin *b = find_in(filters_text, name);
    return b ? b : find_in(filters_seq, name);
}

const struct builtin *find_test(const struct str *name)
{
    return find_in(tests_table, name);
}
