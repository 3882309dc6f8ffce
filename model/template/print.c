/* SPDX-License-Identifier: Apache-2.0 */
/* Values as text: Python's str() and repr(), json.dumps, HTML escapes. */
#include <math.h>
#include <stdio.h>

#include "model/template/internal.h"

/* --- Numbers --- */

/*
 * The shortest digits that read back as f, as repr(float) has them: plain between 1e-4 and 1e16,
 * with an exponent beyond.
 */
void print_float(struct run *r, struct sb *b, double f)
{
    char text[40], digits[20];
    size_t n = 0;
    if (isnan(f) || isinf(f)) {
        sb_printf(r, b, "%s", isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
        return;
    }
    for (int p = 0; p < 17; p++) {
        snprintf(text, sizeof text, "%.*e", p, f);
        if (strtod(text, NULL) == f)
            break;
    }
    if (signbit(f))
        sb_add(r, b, "-", 1);
    for (const char *s = text; *s && *s != 'e'; s++)
        if (*s >= '0' && *s <= '9')
            digits[n++] = *s;
    int exp = atoi(strchr(text, 'e') + 1);
    if (exp >= -4 && exp < 0) {
        sb_add(r, b, "0.", 2);
        sb_fill(r, b, '0', (size_t)(-exp - 1));
        sb_add(r, b, digits, n);
    } else if (exp >= 0 && exp < 16) {
        size_t whole = (size_t)exp + 1;
        sb_add(r, b, digits, MIN(n, whole));
        sb_fill(r, b, '0', whole > n ? whole - n : 0);
        sb_add(r, b, ".", 1);
        sb_add(r, b, n > whole ? digits + whole : "0", n > whole ? n - whole : 1);
    } else {
        sb_add(r, b, digits, 1);
        if (n > 1) {
            sb_add(r, b, ".", 1);
            sb_add(r, b, digits + 1, n - 1);
        }
        sb_printf(r, b, "e%c%02d", exp < 0 ? '-' : '+', abs(exp));
    }
}

/* --- repr --- */

static void repr_char(struct run *r, struct sb *b, uint32_t c)
{
    if (c == '\n' || c == '\r' || c == '\t')
        sb_add(r, b, c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t", 2);
    else if (uc_printable(c))
        sb_char(r, b, c);
    else
        sb_printf(r, b, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", (unsigned)c);
}

static void repr_str(struct run *r, struct sb *b, const struct str *s)
{
    bool single = memchr(s->data, '\'', s->len), twice = memchr(s->data, '"', s->len);
    char quote = single && !twice ? '"' : '\'';
    sb_add(r, b, &quote, 1);
    for (size_t i = 0; i < s->len;) {
        uint32_t c = utf8_next(s->data, s->len, &i);
        if (c == (unsigned char)quote || c == '\\')
            sb_add(r, b, "\\", 1);
        repr_char(r, b, c);
    }
    sb_add(r, b, &quote, 1);
}

static void repr_seq(struct run *r, struct sb *b, const struct seq *s, const char *open,
                     const char *close)
{
    sb_add(r, b, open, strlen(open));
    for (size_t i = 0; i < s->n; i++) {
        if (i)
            sb_add(r, b, ", ", 2);
        print_repr(r, b, s->v[i]);
    }
    if (*close == ')' && s->n == 1)
        sb_add(r, b, ",", 1);
    sb_add(r, b, close, 1);
}

static void repr_dict(struct run *r, struct sb *b, const struct dict *d)
{
    sb_add(r, b, "{", 1);
    for (size_t i = 0; i < d->n; i++) {
        if (i)
            sb_add(r, b, ", ", 2);
        print_repr(r, b, d->v[i].key);
        sb_add(r, b, ": ", 2);
        print_repr(r, b, d->v[i].value);
    }
    sb_add(r, b, "}", 1);
}

static void repr_view(struct run *r, struct sb *b, struct value v)
{
    sb_printf(r, b, "%s([", type_name(v));
    for (size_t i = 0; i < v.view->dict->n; i++) {
        if (i)
            sb_add(r, b, ", ", 2);
        print_repr(r, b, view_item(r, v.view, i));
    }
    sb_add(r, b, "])", 2);
}

static void repr_range(struct run *r, struct sb *b, const struct range *x)
{
    long long start = x->start, stop = x->stop, step = x->step;
    sb_printf(r, b, "range(%lld, %lld", start, stop);
    sb_printf(r, b, step == 1 ? ")" : ", %lld)", step);
}

static void repr_macro(struct run *r, struct sb *b, const struct macro *m)
{
    sb_printf(r, b, "<Macro ");
    if (m->node->name)
        repr_str(r, b, m->node->name);
    else
        sb_printf(r, b, "anonymous");
    sb_printf(r, b, ">");
}

static void repr_loop(struct run *r, struct sb *b, struct value v)
{
    sb_printf(r, b, "<LoopContext %lld/%zu>", (long long)v.loop->index0 + 1, length(r, v));
}

void print_repr(struct run *r, struct sb *b, struct value v)
{
    run_enter(r);
    switch (v.type) {
    case T_MISSING:
        sb_printf(r, b, "missing");
        break;
    case T_UNDEFINED:
        sb_printf(r, b, "Undefined");
        break;
    case T_NONE:
        sb_printf(r, b, "None");
        break;
    case T_BOOL:
        sb_printf(r, b, v.b ? "True" : "False");
        break;
    case T_INT:
        sb_printf(r, b, "%lld", (long long)v.i);
        break;
    case T_FLOAT:
        print_float(r, b, v.f);
        break;
    case T_STR:
        if (v.safe)
            sb_printf(r, b, "Markup(");
        repr_str(r, b, v.s);
        if (v.safe)
            sb_printf(r, b, ")");
        break;
    case T_LIST:
        repr_seq(r, b, v.seq, "[", "]");
        break;
    case T_TUPLE:
        repr_seq(r, b, v.seq, "(", ")");
        break;
    case T_DICT:
        repr_dict(r, b, v.dict);
        break;
    case T_NAMESPACE:
        sb_printf(r, b, "<Namespace ");
        repr_dict(r, b, v.dict);
        sb_printf(r, b, ">");
        break;
    case T_VIEW:
        repr_view(r, b, v);
        break;
    case T_RANGE:
        repr_range(r, b, v.range);
        break;
    case T_MACRO:
        repr_macro(r, b, v.macro);
        break;
    case T_LOOP:
        repr_loop(r, b, v);
        break;
    case T_FUNCTION:
    case T_METHOD:
        sb_printf(r, b, "<%s %s>", type_name(v), v.method->name);
        break;
    case T_ITER:
        sb_printf(r, b, "<%s object>", v.iter->repr ? v.iter->repr : "generator");
        break;
    default:
        sb_printf(r, b, "<%s object>", type_name(v));
    }
    run_leave(r);
}

void print_str(struct run *r, struct sb *b, struct value v)
{
    if (is_str(v))
        sb_str(r, b, v.s);
    else if (v.type != T_UNDEFINED)
        print_repr(r, b, v);
}

struct str *to_str(struct run *r, struct value v)
{
    struct sb b = {0};
    if (is_str(v))
        return v.s;
    print_str(r, &b, v);
    return sb_take(r, &b);
}

struct str *escape_html(struct run *r, struct str *s)
{
    struct sb b = {0};
    for (size_t i = 0; i < s->len; i++) {
        const char *e = NULL;
        switch (s->data[i]) {
        case '&':
            e = "&amp;";
            break;
        case '<':
            e = "&lt;";
            break;
        case '>':
            e = "&gt;";
            break;
        case '"':
            e = "&#34;";
            break;
        case '\'':
            e = "&#39;";
            break;
        }
        sb_add(r, &b, e ? e : &s->data[i], e ? strlen(e) : 1);
    }
    return sb_take(r, &b);
}

/* --- JSON --- */

struct dump {
    struct run *r;
    struct sb *b;
    bool ascii, sort, pretty;
    struct str *indent, *comma, *colon;
};

static void json_str(struct dump *d, const struct str *s)
{
    struct run *r = d->r;
    struct sb *b = d->b;
    sb_add(r, b, "\"", 1);
    for (size_t i = 0, from = 0; i < s->len; from = i) {
        static const char plain[] = "\"\\\n\r\t\f\b", letters[] = "\"\\nrtfb";
        uint32_t c = utf8_next(s->data, s->len, &i);
        const char *p = c && c < 0x80 ? strchr(plain, (int)c) : NULL;
        if (p) {
            sb_add(r, b, "\\", 1);
            sb_add(r, b, &letters[p - plain], 1);
        } else if (c < 0x20 || (d->ascii && c >= 0x7F && c < 0x10000)) {
            sb_printf(r, b, "\\u%04x", (unsigned)c);
        } else if (d->ascii && c >= 0x10000) {
            sb_printf(r, b, "\\u%04x\\u%04x", (unsigned)(0xD800 + ((c - 0x10000) >> 10)),
                      (unsigned)(0xDC00 + ((c - 0x10000) & 0x3FF)));
        } else {
            sb_add(r, b, s->data + from, i - from);
        }
    }
    sb_add(r, b, "\"", 1);
}

static void json_float(struct dump *d, double f)
{
    if (isnan(f) || isinf(f))
        sb_printf(d->r, d->b, "%s", isnan(f) ? "NaN" : f < 0 ? "-Infinity" : "Infinity");
    else
        print_float(d->r, d->b, f);
}

static void json_dump(struct dump *d, struct value v, size_t level);

static void json_line(struct dump *d, size_t level)
{
    if (!d->pretty)
        return;
    sb_add(d->r, d->b, "\n", 1);
    for (size_t i = 0; i < level; i++)
        sb_str(d->r, d->b, d->indent);
}

static void json_seq(struct dump *d, const struct seq *s, size_t level)
{
    sb_add(d->r, d->b, "[", 1);
    for (size_t i = 0; i < s->n; i++) {
        if (i)
            sb_str(d->r, d->b, d->comma);
        json_line(d, level + 1);
        json_dump(d, s->v[i], level + 1);
    }
    if (s->n)
        json_line(d, level);
    sb_add(d->r, d->b, "]", 1);
}

static void json_key(struct dump *d, struct value key)
{
    struct sb b = {0}, *out = d->b;
    if (!is_str(key)) {
        if (key.type != T_NONE && !is_number(key))
            run_fail(d->r, "TypeError: keys must be str, int, float, bool or None, not %s",
                     type_name(key));
        d->b = &b;
        json_dump(d, key, 0);
        d->b = out;
        key = v_str(sb_take(d->r, &b));
    }
    json_str(d, key.s);
}

static struct dict *sorted(struct run *r, const struct dict *d)
{
    struct dict *copy = dict_new(r);
    struct value *keys = arena(r, d->n, sizeof *keys);
    for (size_t i = 0; i < d->n; i++) {
        size_t at = i;
        for (; at > 0 && order(r, d->v[i].key, keys[at - 1], OP_LT) < 0; at--)
            keys[at] = keys[at - 1];
        keys[at] = d->v[i].key;
    }
    for (size_t i = 0; i < d->n; i++)
        dict_set(r, copy, keys[i], *dict_get(r, d, keys[i]));
    return copy;
}

static void json_dict(struct dump *d, const struct dict *x, size_t level)
{
    if (d->sort)
        x = sorted(d->r, x);
    sb_add(d->r, d->b, "{", 1);
    for (size_t i = 0; i < x->n; i++) {
        if (i)
            sb_str(d->r, d->b, d->comma);
        json_line(d, level + 1);
        json_key(d, x->v[i].key);
        sb_str(d->r, d->b, d->colon);
        json_dump(d, x->v[i].value, level + 1);
    }
    if (x->n)
        json_line(d, level);
    sb_add(d->r, d->b, "}", 1);
}

static void json_dump(struct dump *d, struct value v, size_t level)
{
    struct run *r = d->r;
    run_enter(r);
    switch (v.type) {
    case T_NONE:
        sb_printf(r, d->b, "null");
        break;
    case T_BOOL:
        sb_printf(r, d->b, v.b ? "true" : "false");
        break;
    case T_INT:
        sb_printf(r, d->b, "%lld", (long long)v.i);
        break;
    case T_FLOAT:
        json_float(d, v.f);
        break;
    case T_STR:
        json_str(d, v.s);
        break;
    case T_LIST:
    case T_TUPLE:
        json_seq(d, v.seq, level);
        break;
    case T_DICT:
        json_dict(d, v.dict, level);
        break;
    default:
        run_fail(r, "TypeError: Object of type %s is not JSON serializable", type_name(v));
    }
    run_leave(r);
}

static void set_separators(struct dump *d, struct value v)
{
    if (v.type == T_MISSING || v.type == T_NONE)
        return;
    struct seq *s = to_list(d->r, v);
    if (s->n != 2)
        run_fail(d->r, "ValueError: separators must be a pair");
    d->comma = need_str(d->r, s->v[0]);
    d->colon = need_str(d->r, s->v[1]);
}

/* As transformers replaces the filter: json.dumps, without Jinja2's escapes for HTML. */
struct value filter_tojson(struct run *r, const struct value *self, struct args *a)
{
    struct value v[4];
    struct sb b = {0};
    struct dump d = {.r = r, .b = &b};
    bind(r, a, "ensure_ascii indent separators sort_keys", 0, v);
    d.ascii = flag(r, v[0], false);
    d.sort = flag(r, v[3], false);
    d.pretty = v[1].type != T_MISSING && v[1].type != T_NONE;
    d.comma = str_lit(r, d.pretty ? "," : ", ");
    d.colon = str_lit(r, ": ");
    if (d.pretty && is_str(v[1])) {
        d.indent = v[1].s;
    } else if (d.pretty) {
        struct sb blanks = {0};
        sb_fill(r, &blanks, ' ', (size_t)MAX(need_int(r, v[1]), (int64_t)0));
        d.indent = sb_take(r, &blanks);
    }
    set_separators(&d, v[2]);
    json_dump(&d, *self, 0);
    return v_str(sb_take(r, &b));
}
