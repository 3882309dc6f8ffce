/* SPDX-License-Identifier: Apache-2.0 */
/* "%s" % x, "{}".format(x), and numbers read and rounded, as Python does it. */
#include <errno.h>
#include <math.h>
#include <stdio.h>

#include "model/template/internal.h"

/* The largest width or precision that a format may ask for. */
#define WIDTH_MAX 100000
#define PRECISION_MAX 300

/* --- Reading numbers --- */

static struct str *stripped(struct run *r, const struct str *s)
{
    struct value v = v_str((struct str *)s);
    struct args none = {.what = "strip"};
    struct str name = {.data = "strip", .len = 5};
    return find_in(str_methods, &name)->call(r, &v, &none).s;
}

/* The text without its underscores, which may only stand between digits. */
static bool plain_number(const struct str *s, char *out, size_t room)
{
    size_t n = 0;
    for (size_t i = 0; i < s->len; i++) {
        char c = s->data[i];
        if (c == '_') {
            if (!i || i + 1 == s->len || !uc_alpha((unsigned char)s->data[i - 1] & 0x7F))
                if (!i || i + 1 == s->len || s->data[i - 1] < '0' || s->data[i - 1] > '9')
                    return false;
            if (s->data[i + 1] == '_')
                return false;
            continue;
        }
        if (n + 1 >= room || (unsigned char)c >= 0x80 || !c)
            return false;
        out[n++] = c;
    }
    out[n] = '\0';
    return n > 0;
}

bool parse_float(struct run *r, const struct str *s, double *ret)
{
    static const char *const words[] = {"inf", "infinity", "nan"};
    char text[400], *end;
    if (!plain_number(stripped(r, s), text, sizeof text))
        return false;
    const char *p = text + (*text == '+' || *text == '-');
    bool word = false;
    for (size_t i = 0; i < ARRAY_LEN(words); i++)
        word |= !strcasecmp(p, words[i]);
    if (!word && p[strspn(p, "0123456789.eE+-")])
        return false;
    *ret = strtod(text, &end);
    return !*end && end != text;
}

bool parse_int(struct run *r, const struct str *s, int base, int64_t *ret)
{
    char text[100], *end;
    if (!plain_number(stripped(r, s), text, sizeof text) || base < 0 || base == 1 || base > 36)
        return false;
    const char *p = text + (*text == '+' || *text == '-');
    char kind = p[0] == '0' ? (char)(p[1] | 0x20) : 0;
    int prefix = kind == 'x' ? 16 : kind == 'o' ? 8 : kind == 'b' ? 2 : 0;
    if (prefix && (base == prefix || base == 0)) {
        base = prefix;
        p += 2;
    }
    if (base == 0)
        base = 10;
    if (!*p || *p == '+' || *p == '-' || *p == ' ' ||
        (base == 16 && p[0] == '0' && (p[1] | 0x20) == 'x'))
        return false;
    errno = 0;
    unsigned long long u = strtoull(p, &end, base);
    if (*end)
        return false;
    bool minus = *text == '-';
    if (errno || u > (uint64_t)INT64_MAX + minus)
        run_fail(r, "OverflowError: an integer that does not fit 64 bits");
    *ret = minus ? (int64_t)-u : (int64_t)u;
    return true;
}

struct value float_to_int(struct run *r, double f, bool *ret_ok)
{
    *ret_ok = isfinite(f);
    if (!*ret_ok)
        return v_none();
    f = trunc(f);
    if (f < -9223372036854775808.0 || f >= 9223372036854775808.0)
        run_fail(r, "OverflowError: an integer that does not fit 64 bits");
    return v_int((int64_t)f);
}

struct value round_value(struct run *r, struct value v, struct value digits)
{
    int64_t n = digits.type == T_NONE ? 0 : need_int(r, digits);
    char text[700];
    if (v.type == T_UNDEFINED)
        fail_undefined(r, v);
    if (!is_number(v))
        run_fail(r, "TypeError: type %s doesn't define __round__ method", type_name(v));
    if (is_int(v)) {
        int64_t i = as_int(v), scale = 1;
        if (n >= 0)
            return v_int(i);
        for (; n < 0; n++)
            if (__builtin_mul_overflow(scale, 10, &scale))
                return v_int(0);
        int64_t rest = i % scale, half = scale / 2, down = i - rest;
        if (rest < 0) {
            rest += scale;
            down -= scale;
        }
        bool up = rest > half || (rest == half && (down / scale) % 2);
        return binary(r, OP_ADD, v_int(down), v_int(up ? scale : 0));
    }
    if (!isfinite(v.f) || n > PRECISION_MAX)
        return v;
    if (n < 0) {
        double scale = pow(10, (double)-n);
        return v_float(isinf(scale) ? copysign(0, v.f) : nearbyint(v.f / scale) * scale);
    }
    snprintf(text, sizeof text, "%.*f", (int)n, v.f);
    return v_float(strtod(text, NULL));
}

/* --- Fields --- */

struct spec {
    uint32_t fill;
    char align, sign, group, type;
    bool alt, zero;
    int64_t width, precision; /* precision -1: none */
};

/* Body with the sign in front, padded; zeros go behind the sign. */
static void pad(struct run *r, struct sb *b, const struct spec *s, const char *sign,
                struct str *body)
{
    size_t signs = strlen(sign), n = str_chars(body) + signs;
    size_t fill = s->width > (int64_t)n ? (size_t)s->width - n : 0;
    size_t left = s->align == '>' ? fill : s->align == '^' ? fill / 2 : 0;
    if (s->align == '=') {
        sb_add(r, b, sign, signs);
        sb_fill(r, b, s->fill, fill);
        sb_str(r, b, body);
        return;
    }
    sb_fill(r, b, s->fill, left);
    sb_add(r, b, sign, signs);
    sb_str(r, b, body);
    sb_fill(r, b, s->fill, fill - left);
}

static bool digit_like(char c, bool hex)
{
    return (c >= '0' && c <= '9') || (hex && ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F')));
}

/*
 * Separators between each three digits of the whole part (each four of binary and the like). Zeros
 * that pad a number to its width, less `signs`, are separated too.
 */
static struct str *grouped(struct run *r, struct str *s, const struct spec *spec, size_t signs)
{
    struct sb b = {0};
    size_t whole = 0, each = spec->type && strchr("bxXo", spec->type) ? 4 : 3;
    char sep = spec->group;
    while (whole < s->len && digit_like(s->data[whole], each == 4))
        whole++;
    if (spec->align == '=' && spec->fill == '0') {
        size_t rest = s->len - whole + signs, n = whole;
        while (n + (n - 1) / each + rest < (size_t)spec->width)
            n++;
        sb_fill(r, &b, '0', n - whole);
        sb_str(r, &b, s);
        s = sb_take(r, &b);
        whole = n;
    }
    for (size_t i = 0; i < whole; i++) {
        if (i && (whole - i) % each == 0)
            sb_add(r, &b, &sep, 1);
        sb_add(r, &b, &s->data[i], 1);
    }
    sb_add(r, &b, s->data + whole, s->len - whole);
    return sb_take(r, &b);
}

static const char *sign_text(const struct spec *s, bool minus)
{
    return minus ? "-" : s->sign == '+' ? "+" : s->sign == ' ' ? " " : "";
}

static void field_int(struct run *r, struct sb *b, struct spec *s, int64_t i)
{
    char digits[80], sign[8];
    size_t n = sizeof digits;
    uint64_t u = i < 0 ? -(uint64_t)i : (uint64_t)i;
    unsigned base = s->type == 'b' ? 2 : s->type == 'o' ? 8 : (s->type | 0x20) == 'x' ? 16 : 10;
    const char *set = s->type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef";
    do
        digits[--n] = set[u % base];
    while (u /= base);
    struct str *body = str_copy(r, digits + n, sizeof digits - n);
    if (s->precision > (int64_t)body->len) {
        struct sb zeros = {0};
        sb_fill(r, &zeros, '0', (size_t)s->precision - body->len);
        sb_str(r, &zeros, body);
        body = sb_take(r, &zeros);
    }
    snprintf(sign, sizeof sign, "%s%s", sign_text(s, i < 0),
             !s->alt || base == 10 ? ""
             : base == 2           ? "0b"
             : base == 8           ? "0o"
             : s->type == 'X'      ? "0X"
                                   : "0x");
    if (!s->align)
        s->align = '>';
    pad(r, b, s, sign, s->group ? grouped(r, body, s, strlen(sign)) : body);
}

static void field_float(struct run *r, struct sb *b, struct spec *s, double f)
{
    char text[700], format[16];
    struct sb body = {0};
    bool percent = s->type == '%', minus = signbit(f) && !isnan(f);
    char type = percent ? 'f' : s->type ? s->type : 'g';
    int precision = s->precision < 0 ? 6 : (int)MIN(s->precision, (int64_t)PRECISION_MAX);
    double size = fabs(percent ? f * 100 : f);
    if (!isfinite(f)) {
        bool upper = type == 'F' || type == 'E' || type == 'G';
        sb_printf(r, &body, "%s", isnan(f) ? upper ? "NAN" : "nan" : upper ? "INF" : "inf");
    } else if (!s->type && s->precision < 0) {
        print_float(r, &body, size);
    } else {
        snprintf(format, sizeof format, s->alt ? "%%#.*%c" : "%%.*%c", type);
        snprintf(text, sizeof text, format, type == 'g' && !precision ? 1 : precision, size);
        sb_printf(r, &body, "%s", "");
        sb_add(r, &body, text, strlen(text));
        if (!s->type && !strpbrk(text, ".en"))
            sb_add(r, &body, ".0", 2);
    }
    if (percent)
        sb_add(r, &body, "%", 1);
    if (!s->align)
        s->align = '>';
    struct str *out = sb_take(r, &body);
    const char *sign = sign_text(s, minus);
    pad(r, b, s, sign, s->group ? grouped(r, out, s, strlen(sign)) : out);
}

static void field_str(struct run *r, struct sb *b, struct spec *s, struct str *text)
{
    if (s->precision >= 0 && (int64_t)str_chars(text) > s->precision)
        text = str_sub(r, text, 0, str_offset(text, (size_t)s->precision));
    if (!s->align)
        s->align = '<';
    pad(r, b, s, "", text);
}

/* --- "..." % args --- */

struct percent {
    struct run *r;
    const struct str *f;
    size_t at;
    struct value args;
    size_t used;
    bool mapped;
};

static struct value next_arg(struct percent *p)
{
    bool tuple = p->args.type == T_TUPLE;
    if (p->used >= (tuple ? p->args.seq->n : 1))
        run_fail(p->r, "TypeError: not enough arguments for format string");
    return tuple ? p->args.seq->v[p->used++] : (p->used++, p->args);
}

static char peek(const struct percent *p)
{
    if (p->at >= p->f->len)
        run_fail(p->r, "ValueError: incomplete format");
    return p->f->data[p->at];
}

static int64_t percent_number(struct percent *p, int64_t max)
{
    int64_t n = 0;
    if (peek(p) == '*') {
        p->at++;
        n = need_int(p->r, next_arg(p));
    } else {
        for (; peek(p) >= '0' && peek(p) <= '9'; p->at++)
            n = MIN(n * 10 + (p->f->data[p->at] - '0'), max + 1);
    }
    if (n > max || n < -max)
        run_fail(p->r, "ValueError: a width or precision beyond %lld", (long long)max);
    return n;
}

static bool percent_key(struct percent *p, struct value *ret)
{
    size_t from = p->at + 1, depth = 1;
    if (peek(p) != '(')
        return false;
    for (p->at++; depth; p->at++)
        depth += peek(p) == '(' ? 1 : peek(p) == ')' ? (size_t)-1 : 0;
    if (p->args.type != T_DICT)
        run_fail(p->r, "TypeError: format requires a mapping");
    struct value key = v_str(str_wrap(p->r, p->f->data + from, p->at - 1 - from));
    const struct value *v = dict_get(p->r, p->args.dict, key);
    if (!v)
        run_fail(p->r, "KeyError: '%.*s'", (int)MIN(key.s->len, (size_t)100), key.s->data);
    *ret = *v;
    p->mapped = true;
    return true;
}

static void percent_char(struct percent *p, struct sb *b, struct spec *s, struct value v)
{
    struct sb one = {0};
    if (is_str(v) && str_chars(v.s) == 1)
        sb_str(p->r, &one, v.s);
    else if (is_int(v) && as_int(v) >= 0 && as_int(v) < 0x110000 &&
             (as_int(v) < 0xD800 || as_int(v) > 0xDFFF))
        sb_char(p->r, &one, (uint32_t)as_int(v));
    else
        run_fail(p->r, "TypeError: %%c requires int or char");
    s->align = s->align ? s->align : '>';
    field_str(p->r, b, s, sb_take(p->r, &one));
}

static void percent_int(struct percent *p, struct sb *b, struct spec *s, struct value v)
{
    bool ok, decimal = strchr("diu", s->type);
    if (v.type == T_UNDEFINED)
        fail_undefined(p->r, v);
    if (v.type == T_FLOAT && decimal) {
        v = float_to_int(p->r, v.f, &ok);
        if (!ok)
            run_fail(p->r, "ValueError: cannot convert float to integer");
    }
    if (!is_int(v))
        run_fail(p->r, "TypeError: %%%c format: %s is required, not %s", s->type,
                 decimal ? "a real number" : "an integer", type_name(v));
    if (decimal)
        s->type = 'd';
    field_int(p->r, b, s, as_int(v));
}

static void convert(struct percent *p, struct sb *b, struct spec *s, struct value v)
{
    struct sb text = {0};
    s->align = s->align ? s->align : s->zero && !strchr("srac", s->type) ? '=' : '>';
    s->fill = s->align == '=' ? '0' : ' ';
    switch (s->type) {
    case 's':
        print_str(p->r, &text, v);
        field_str(p->r, b, s, sb_take(p->r, &text));
        break;
    case 'r':
    case 'a':
        print_repr(p->r, &text, v);
        field_str(p->r, b, s, sb_take(p->r, &text));
        break;
    case 'c':
        percent_char(p, b, s, v);
        break;
    case 'd':
    case 'i':
    case 'u':
    case 'x':
    case 'X':
    case 'o':
        percent_int(p, b, s, v);
        break;
    case 'e':
    case 'E':
    case 'f':
    case 'F':
    case 'g':
    case 'G':
        if (v.type == T_UNDEFINED)
            fail_undefined(p->r, v);
        if (!is_number(v))
            run_fail(p->r, "TypeError: must be real number, not %s", type_name(v));
        field_float(p->r, b, s, as_float(v));
        break;
    default:
        run_fail(p->r, "ValueError: unsupported format character '%c'", s->type);
    }
}

static void percent_field(struct percent *p, struct sb *b)
{
    struct spec s = {.precision = -1};
    struct value v = v_missing();
    bool keyed = percent_key(p, &v);
    for (; strchr("-+ #0", peek(p)) && peek(p); p->at++) {
        char c = peek(p);
        s.align = c == '-' ? '<' : s.align;
        s.sign = c == '+' ? '+' : c == ' ' && !s.sign ? ' ' : s.sign;
        s.alt |= c == '#';
        s.zero |= c == '0';
    }
    s.width = percent_number(p, WIDTH_MAX);
    if (s.width < 0) {
        s.align = '<';
        s.width = -s.width;
    }
    if (peek(p) == '.') {
        p->at++;
        s.precision = percent_number(p, PRECISION_MAX);
        s.precision = MAX(s.precision, (int64_t)0);
    }
    while (peek(p) == 'l' || peek(p) == 'h' || peek(p) == 'L')
        p->at++;
    s.type = peek(p);
    p->at++;
    if (s.type == '%')
        sb_add(p->r, b, "%", 1);
    else
        convert(p, b, &s, keyed ? v : next_arg(p));
}

struct value format_percent(struct run *r, struct str *format, struct value args)
{
    struct percent p = {.r = r, .f = format, .args = args};
    struct sb b = {0};
    while (p.at < format->len) {
        const char *at = memchr(format->data + p.at, '%', format->len - p.at);
        size_t to = at ? (size_t)(at - format->data) : format->len;
        sb_add(r, &b, format->data + p.at, to - p.at);
        p.at = to + 1;
        if (at)
            percent_field(&p, &b);
    }
    /* What can be subscripted by a key may be left over. */
    bool mapping = args.type == T_DICT || args.type == T_LIST || args.type == T_RANGE ||
                   args.type == T_UNDEFINED;
    size_t n = args.type == T_TUPLE ? args.seq->n : mapping || p.mapped ? 0 : 1;
    if (p.used < n)
        run_fail(r, "TypeError: not all arguments converted during string formatting");
    return v_str(sb_take(r, &b));
}

/* --- "{}".format() --- */

static int64_t spec_number(struct run *r, const struct str *s, size_t *at, int64_t max)
{
    int64_t n = 0;
    for (; *at < s->len && s->data[*at] >= '0' && s->data[*at] <= '9'; ++*at)
        n = MIN(n * 10 + (s->data[*at] - '0'), max + 1);
    if (n > max)
        run_fail(r, "ValueError: a width or precision beyond %lld", (long long)max);
    return n;
}

static struct spec parse_spec(struct run *r, const struct str *s)
{
    struct spec out = {.fill = ' ', .precision = -1};
    size_t at = 0, next = 0;
    uint32_t first = s->len ? utf8_next(s->data, s->len, &next) : 0;
    if (next < s->len && next && strchr("<>=^", s->data[next])) {
        out.fill = first;
        out.align = s->data[next];
        at = next + 1;
    } else if (first && first < 0x80 && strchr("<>=^", (int)first)) {
        out.align = (char)first;
        at = 1;
    }
#define AT(set) (at < s->len && s->data[at] && strchr(set, s->data[at]))
    if (AT("+- "))
        out.sign = s->data[at++];
    if (AT("#")) {
        out.alt = true;
        at++;
    }
    if (AT("0")) {
        out.fill = out.align ? out.fill : '0';
        out.zero = true;
        at++;
    }
    out.width = spec_number(r, s, &at, WIDTH_MAX);
    if (AT(",_"))
        out.group = s->data[at++];
    if (AT(".")) {
        size_t from = ++at;
        out.precision = spec_number(r, s, &at, PRECISION_MAX);
        if (at == from)
            run_fail(r, "ValueError: Format specifier missing precision");
    }
    if (at < s->len)
        out.type = s->data[at++];
#undef AT
    if (at < s->len)
        run_fail(r, "ValueError: Invalid format specifier '%.*s'", (int)MIN(s->len, (size_t)100),
                 s->data);
    return out;
}

static void fail_code(struct run *r, char code, struct value v) __attribute__((noreturn));
static void fail_code(struct run *r, char code, struct value v)
{
    run_fail(r, "ValueError: Unknown format code '%c' for object of type '%s'", code, type_name(v));
}

static struct str *format_value(struct run *r, struct value v, struct str *spec)
{
    struct sb b = {0};
    if (!spec->len)
        return to_str(r, v);
    struct spec s = parse_spec(r, spec);
    if (is_str(v)) {
        if (s.type && s.type != 's')
            fail_code(r, s.type, v);
        if (s.sign || s.align == '=')
            run_fail(r, "ValueError: Sign or '=' alignment not allowed in string format specifier");
        field_str(r, &b, &s, v.s);
        return sb_take(r, &b);
    }
    if (!is_number(v))
        run_fail(r, "TypeError: unsupported format string passed to %s.__format__", type_name(v));
    if (s.zero && !s.align)
        s.align = '=';
    bool real = v.type == T_FLOAT || (s.type && strchr("eEfFgG%", s.type));
    if (v.type == T_FLOAT && s.type && !strchr("eEfFgG%n", s.type))
        fail_code(r, s.type, v);
    if (real) {
        field_float(r, &b, &s, as_float(v));
    } else if (s.type == 'c') {
        struct percent p = {.r = r};
        percent_char(&p, &b, &s, v);
    } else {
        if (s.type && !strchr("bdoxXn", s.type))
            fail_code(r, s.type, v);
        if (s.precision >= 0)
            run_fail(r, "ValueError: Precision not allowed in integer format specifier");
        if (v.type == T_BOOL && !s.type)
            s.type = 'd';
        field_int(r, &b, &s, as_int(v));
    }
    return sb_take(r, &b);
}

struct braces {
    struct run *r;
    struct args *args;
    int64_t automatic; /* the next number; -1 when numbers are given */
};

static struct value numbered(struct braces *x, int64_t i)
{
    if (i < 0 || (uint64_t)i >= x->args->n)
        run_fail(x->r, "IndexError: Replacement index %lld out of range for positional args tuple",
                 (long long)i);
    return x->args->pos[i];
}

static bool all_digits(const struct str *s)
{
    for (size_t i = 0; i < s->len; i++)
        if (s->data[i] < '0' || s->data[i] > '9')
            return false;
    return s->len > 0;
}

static struct value first_part(struct braces *x, struct str *name)
{
    int64_t i = 0;
    bool digits = all_digits(name);
    if (!name->len || digits) {
        if (digits ? x->automatic > 0 : x->automatic < 0)
            run_fail(x->r,
                     "ValueError: cannot switch between manual and automatic field numbering");
        if (digits && !parse_int(x->r, name, 10, &i))
            run_fail(x->r, "ValueError: bad field number");
        if (!digits)
            return numbered(x, x->automatic++);
        x->automatic = -1;
        return numbered(x, i);
    }
    for (size_t k = 0; k < x->args->n_kw; k++)
        if (str_same(x->args->kw[k].name, name))
            return x->args->kw[k].value;
    run_fail(x->r, "KeyError: '%.*s'", (int)MIN(name->len, (size_t)100), name->data);
}

/* name, name.attribute, name[key], in any number. */
static struct value field_of(struct braces *x, struct str *path)
{
    size_t at = strcspn(str_copy(x->r, path->data, path->len)->data, ".[");
    int64_t index;
    struct value v = first_part(x, str_sub(x->r, path, 0, MIN(at, path->len)));
    while (at < path->len) {
        bool bracket = path->data[at] == '[';
        size_t from = ++at;
        while (at < path->len &&
               (bracket ? path->data[at] != ']' : path->data[at] != '.' && path->data[at] != '['))
            at++;
        struct str *part = str_sub(x->r, path, from, at);
        if (bracket && at++ >= path->len)
            run_fail(x->r, "ValueError: expected '}' before end of string");
        if (!part->len)
            run_fail(x->r, "ValueError: Empty attribute in format string");
        if (!bracket)
            v = get_attr(x->r, v, part);
        else if (all_digits(part) && parse_int(x->r, part, 10, &index))
            v = get_item(x->r, v, v_int(index));
        else
            v = get_item(x->r, v, v_str(part));
    }
    return v;
}

static void braces(struct braces *x, struct sb *b, const struct str *f, int depth);

/* "path!conversion:spec" between braces. */
static void brace_field(struct braces *x, struct sb *b, const char *data, size_t len, int depth)
{
    struct run *r = x->r;
    size_t end = 0;
    struct sb spec = {0}, shown = {0};
    for (bool in = false; end < len && (in || (data[end] != '!' && data[end] != ':')); end++)
        in = data[end] == '[' ? true : data[end] == ']' ? false : in;
    struct value v = field_of(x, str_wrap(r, data, end));
    if (end < len && data[end] == '!') {
        char c = end + 1 < len ? data[end + 1] : 0;
        if (c != 's' && c != 'r' && c != 'a')
            run_fail(r, "ValueError: Unknown conversion specifier");
        if (c == 's')
            print_str(r, &shown, v);
        else
            print_repr(r, &shown, v);
        v = v_str(sb_take(r, &shown));
        end += 2;
    }
    if (end < len) {
        struct str *nested = str_wrap(r, data + end + 1, len - end - 1);
        if (data[end] != ':')
            run_fail(r, "ValueError: expected ':' after conversion specifier");
        braces(x, &spec, nested, depth + 1);
    }
    sb_str(r, b, format_value(r, v, sb_take(r, &spec)));
}

static void braces(struct braces *x, struct sb *b, const struct str *f, int depth)
{
    struct run *r = x->r;
    if (depth > 2)
        run_fail(r, "ValueError: Max string recursion exceeded");
    for (size_t i = 0; i < f->len; i++) {
        char c = f->data[i];
        if (c != '{' && c != '}') {
            sb_add(r, b, &c, 1);
            continue;
        }
        if (i + 1 < f->len && f->data[i + 1] == c && depth == 0) {
            sb_add(r, b, &f->data[i++], 1);
            continue;
        }
        if (c == '}')
            run_fail(r, "ValueError: Single '}' encountered in format string");
        size_t from = ++i, open = 1;
        for (; i < f->len && open; i++)
            open += f->data[i] == '{' ? 1 : f->data[i] == '}' ? (size_t)-1 : 0;
        if (open)
            run_fail(r, "ValueError: expected '}' before end of string");
        i--;
        brace_field(x, b, f->data + from, i - from, depth);
    }
}

struct value format_braces(struct run *r, struct str *format, struct args *a)
{
    struct braces x = {.r = r, .args = a};
    struct sb b = {0};
    braces(&x, &b, format, 0);
    return v_str(sb_take(r, &b));
}
