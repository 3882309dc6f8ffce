/* SPDX-License-Identifier: Apache-2.0 */
/* Filters of single values: texts and numbers. */
#include <math.h>
#include <stdio.h>

#include "model/template/internal.h"

static struct value marked(struct str *s, bool safe)
{
    return (struct value){.type = T_STR, .safe = safe, .s = s};
}

static bool is_safe(struct value v)
{
    return is_str(v) && v.safe;
}

/* A method of str(value), with the same arguments. */
static struct value text_method(struct run *r, const struct value *self, struct args *a,
                                const char *name)
{
    struct value text = marked(to_str(r, *self), is_safe(*self));
    struct str key = {.data = name, .len = strlen(name)};
    struct value v = find_in(str_methods, &key)->call(r, &text, a);
    v.safe = text.safe;
    return v;
}

static struct value f_upper(struct run *r, const struct value *self, struct args *a)
{
    return text_method(r, self, a, "upper");
}

static struct value f_lower(struct run *r, const struct value *self, struct args *a)
{
    return text_method(r, self, a, "lower");
}

static struct value f_capitalize(struct run *r, const struct value *self, struct args *a)
{
    return text_method(r, self, a, "capitalize");
}

static struct value f_trim(struct run *r, const struct value *self, struct args *a)
{
    struct value chars;
    bind(r, a, "chars", 0, &chars);
    struct args one = {.what = "trim", .pos = &chars, .n = chars.type != T_MISSING};
    return text_method(r, self, &one, "strip");
}

static struct value f_center(struct run *r, const struct value *self, struct args *a)
{
    struct value width;
    bind(r, a, "width", 0, &width);
    if (width.type == T_MISSING)
        width = v_int(80);
    struct args one = {.what = "center", .pos = &width, .n = 1};
    return text_method(r, self, &one, "center");
}

/* Words begin behind white space and -({[<. */
static struct value f_title(struct run *r, const struct value *self, struct args *a)
{
    struct str *s = to_str(r, *self), *word;
    struct sb b = {0};
    bind(r, a, "", 0, NULL);
    for (size_t i = 0, from = 0; i <= s->len;) {
        size_t begin = i;
        uint32_t c = i < s->len ? utf8_next(s->data, s->len, &i) : '-';
        bool border = uc_space(c) || (c && c < 0x80 && strchr("-({[<", (int)c));
        if (!border)
            continue;
        word = str_case(r, str_sub(r, s, from, begin), CASE_CAPITAL);
        sb_str(r, &b, word);
        if (begin == s->len)
            break;
        sb_add(r, &b, s->data + begin, i - begin);
        from = i;
    }
    return marked(sb_take(r, &b), is_safe(*self));
}

static struct value f_string(struct run *r, const struct value *self, struct args *a)
{
    bind(r, a, "", 0, NULL);
    return marked(to_str(r, *self), is_safe(*self));
}

static struct value f_safe(struct run *r, const struct value *self, struct args *a)
{
    bind(r, a, "", 0, NULL);
    return marked(to_str(r, *self), true);
}

static struct value f_escape(struct run *r, const struct value *self, struct args *a)
{
    bind(r, a, "", 0, NULL);
    return marked(is_safe(*self) ? self->s : escape_html(r, to_str(r, *self)), true);
}

static struct value f_forceescape(struct run *r, const struct value *self, struct args *a)
{
    bind(r, a, "", 0, NULL);
    return marked(escape_html(r, to_str(r, *self)), true);
}

static struct value f_replace(struct run *r, const struct value *self, struct args *a)
{
    struct value v[3], text = v_str(to_str(r, *self));
    bind(r, a, "old new count", 2, v);
    v[0] = v_str(to_str(r, v[0]));
    v[1] = v_str(to_str(r, v[1]));
    struct args two = {.what = "replace", .pos = v, .n = 2 + (is_int(v[2]) ? 1 : 0)};
    struct str name = {.data = "replace", .len = 7};
    return find_in(str_methods, &name)->call(r, &text, &two);
}

static struct value f_default(struct run *r, const struct value *self, struct args *a)
{
    struct value v[2];
    bind(r, a, "default_value boolean", 0, v);
    if (self->type == T_UNDEFINED || (flag(r, v[1], false) && !truthy(r, *self)))
        return v[0].type == T_MISSING ? v_str(str_lit(r, "")) : v[0];
    return *self;
}

static struct value f_format(struct run *r, const struct value *self, struct args *a)
{
    struct value v = seq_new(r, T_TUPLE, a->n);
    if (a->n && a->n_kw)
        run_fail(r, "can't handle positional and keyword arguments at the same time");
    if (a->n_kw) {
        struct dict *d = dict_new(r);
        for (size_t i = 0; i < a->n_kw; i++)
            dict_set(r, d, v_str(a->kw[i].name), a->kw[i].value);
        return format_percent(r, to_str(r, *self), v_dict(d));
    }
    for (size_t i = 0; i < a->n; i++)
        seq_add(r, v.seq, a->pos[i]);
    return format_percent(r, to_str(r, *self), v);
}

static struct value f_indent(struct run *r, const struct value *self, struct args *a)
{
    struct value v[3], nothing = v_missing();
    struct sb blanks = {0}, b = {0};
    bind(r, a, "width first blank", 0, v);
    bool first = flag(r, v[1], false), blank = flag(r, v[2], false);
    if (v[0].type == T_MISSING || !is_str(v[0]))
        sb_fill(r, &blanks, ' ',
                (size_t)MAX(v[0].type == T_MISSING ? 4 : need_int(r, v[0]), (int64_t)0));
    else
        sb_str(r, &blanks, v[0].s);
    if (self->type == T_UNDEFINED)
        fail_undefined(r, *self);
    struct value text = v_str(str_cat(r, need_str(r, *self), str_lit(r, "\n")));
    struct args none = {.what = "indent", .pos = &nothing};
    struct str name = {.data = "splitlines", .len = 10};
    struct seq *lines = find_in(str_methods, &name)->call(r, &text, &none).seq;
    for (size_t i = 0; i < lines->n; i++) {
        if (i)
            sb_add(r, &b, "\n", 1);
        if (i ? blank || lines->v[i].s->len : first)
            sb_add(r, &b, blanks.data ? blanks.data : "", blanks.len);
        sb_str(r, &b, lines->v[i].s);
    }
    return marked(sb_take(r, &b), is_safe(*self));
}

static struct value f_truncate(struct run *r, const struct value *self, struct args *a)
{
    struct value v[4];
    bind(r, a, "length killwords end leeway", 0, v);
    struct str *end = v[2].type == T_MISSING ? str_lit(r, "...") : need_str(r, v[2]);
    int64_t len = v[0].type == T_MISSING ? 255 : need_int(r, v[0]);
    int64_t leeway = is_int(v[3]) ? as_int(v[3]) : 5, tail = (int64_t)str_chars(end);
    if (len < tail || leeway < 0)
        run_fail(r, "AssertionError: expected length >= %lld, got %lld", (long long)tail,
                 (long long)len);
    if (leeway > INT32_MAX || (int64_t)length(r, *self) - leeway <= len)
        return *self;
    struct str *s = need_str(r, *self);
    size_t to = str_offset(s, (size_t)(len - tail));
    if (!flag(r, v[1], false)) {
        struct str blank = {.data = " ", .len = 1};
        size_t at = str_rfind(r, s, &blank, 0, to);
        to = at == SIZE_MAX ? to : at;
    }
    return v_str(str_cat(r, str_sub(r, s, 0, to), end));
}

static struct value f_wordcount(struct run *r, const struct value *self, struct args *a)
{
    struct str *s = to_str(r, *self);
    int64_t n = 0;
    bool in = false;
    bind(r, a, "", 0, NULL);
    for (size_t i = 0; i < s->len;) {
        uint32_t c = utf8_next(s->data, s->len, &i);
        bool word = uc_alpha(c) || uc_numeric(c) || c == '_';
        n += word && !in;
        in = word;
    }
    return v_int(n);
}

static void quote_url(struct run *r, struct sb *b, const struct str *s, bool query)
{
    for (size_t i = 0; i < s->len; i++) {
        unsigned char c = (unsigned char)s->data[i];
        if (c < 0x80 && c && (uc_alpha(c) || uc_decimal(c) || strchr(query ? "_.-~" : "_.-~/", c)))
            sb_add(r, b, &s->data[i], 1);
        else if (query && c == ' ')
            sb_add(r, b, "+", 1);
        else
            sb_printf(r, b, "%%%02X", c);
    }
}

static void quote_pair(struct run *r, struct sb *b, struct value key, struct value value)
{
    if (b->len)
        sb_add(r, b, "&", 1);
    quote_url(r, b, to_str(r, key), true);
    sb_add(r, b, "=", 1);
    quote_url(r, b, to_str(r, value), true);
}

/* A text, or a query of a mapping's or a list's pairs. */
static struct value f_urlencode(struct run *r, const struct value *self, struct args *a)
{
    struct sb b = {0};
    struct value item;
    bind(r, a, "", 0, NULL);
    if (is_str(*self) || !iterable(*self)) {
        quote_url(r, &b, to_str(r, *self), false);
    } else if (self->type == T_DICT) {
        for (size_t i = 0; i < self->dict->n; i++)
            quote_pair(r, &b, self->dict->v[i].key, self->dict->v[i].value);
    } else {
        struct iter *it = iter_begin(r, *self);
        while (iter_next(r, it, &item)) {
            struct seq *pair = to_list(r, item);
            if (pair->n != 2)
                run_fail(r, "ValueError: urlencode needs pairs, not %zu values", pair->n);
            quote_pair(r, &b, pair->v[0], pair->v[1]);
        }
    }
    return v_str(sb_take(r, &b));
}

/* --- Numbers --- */

static struct value f_int(struct run *r, const struct value *self, struct args *a)
{
    struct value v[2], out;
    int64_t i;
    double f;
    bool ok;
    bind(r, a, "default base", 0, v);
    if (v[0].type == T_MISSING)
        v[0] = v_int(0);
    if (self->type == T_UNDEFINED)
        fail_undefined(r, *self);
    if (is_int(*self))
        return v_int(as_int(*self));
    if (self->type == T_FLOAT) {
        if (isinf(self->f))
            run_fail(r, "OverflowError: cannot convert float infinity to integer");
        out = float_to_int(r, self->f, &ok);
        return ok ? out : v[0];
    }
    if (!is_str(*self))
        return v[0];
    if (parse_int(r, self->s, v[1].type == T_MISSING ? 10 : (int)need_int(r, v[1]), &i))
        return v_int(i);
    if (!parse_float(r, self->s, &f))
        return v[0];
    out = float_to_int(r, f, &ok);
    return ok ? out : v[0];
}

static struct value f_float(struct run *r, const struct value *self, struct args *a)
{
    struct value v;
    double f;
    bind(r, a, "default", 0, &v);
    if (self->type == T_UNDEFINED)
        fail_undefined(r, *self);
    if (is_number(*self))
        return v_float(as_float(*self));
    if (is_str(*self) && parse_float(r, self->s, &f))
        return v_float(f);
    return v.type == T_MISSING ? v_float(0) : v;
}

static struct value f_abs(struct run *r, const struct value *self, struct args *a)
{
    bind(r, a, "", 0, NULL);
    if (self->type == T_FLOAT)
        return v_float(fabs(self->f));
    if (is_int(*self) && as_int(*self) >= 0)
        return v_int(as_int(*self));
    return negate(r, *self, true);
}

static struct value f_round(struct run *r, const struct value *self, struct args *a)
{
    struct value v[2];
    bind(r, a, "precision method", 0, v);
    if (v[0].type == T_MISSING)
        v[0] = v_int(0);
    struct str *method = v[1].type == T_MISSING ? str_lit(r, "common") : need_str(r, v[1]);
    if (str_is(method, "common"))
        return round_value(r, *self, v[0]);
    bool up = str_is(method, "ceil");
    if (!up && !str_is(method, "floor"))
        run_fail(r, "FilterArgumentError: method must be common, ceil or floor");
    struct value scale = binary(r, OP_POW, v_int(10), v_int(need_int(r, v[0])));
    double scaled = as_float(binary(r, OP_MUL, *self, scale));
    return binary(r, OP_DIV, v_float(up ? ceil(scaled) : floor(scaled)), scale);
}

const struct builtin filters_text[] = {
    {"abs", f_abs},
    {"capitalize", f_capitalize},
    {"center", f_center},
    {"d", f_default},
    {"default", f_default},
    {"e", f_escape},
    {"escape", f_escape},
    {"float", f_float},
    {"forceescape", f_forceescape},
    {"format", f_format},
    {"indent", f_indent},
    {"int", f_int},
    {"lower", f_lower},
    {"replace", f_replace},
    {"round", f_round},
    {"safe", f_safe},
    {"string", f_string},
    {"title", f_title},
    {"tojson", filter_tojson},
    {"trim", f_trim},
    {"truncate", f_truncate},
    {"upper", f_upper},
    {"urlencode", f_urlencode},
    {"wordcount", f_wordcount},
    {NULL, NULL},
};
