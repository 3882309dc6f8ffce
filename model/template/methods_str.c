/* SPDX-License-Identifier: Apache-2.0 */
/* Methods of strings. Positions count code points. */
#include "model/template/internal.h"

static struct value text(struct run *r, struct str *s, size_t from, size_t to)
{
    return v_str(str_sub(r, s, from, to));
}

static struct value one_case(struct run *r, const struct value *self, struct args *a,
                             enum str_case how)
{
    bind(r, a, "", 0, NULL);
    return v_str(str_case(r, self->s, how));
}

static struct value s_upper(struct run *r, const struct value *self, struct args *a)
{
    return one_case(r, self, a, CASE_UPPER);
}

static struct value s_lower(struct run *r, const struct value *self, struct args *a)
{
    return one_case(r, self, a, CASE_LOWER);
}

static struct value s_title(struct run *r, const struct value *self, struct args *a)
{
    return one_case(r, self, a, CASE_TITLE);
}

static struct value s_capitalize(struct run *r, const struct value *self, struct args *a)
{
    return one_case(r, self, a, CASE_CAPITAL);
}

static struct value s_swapcase(struct run *r, const struct value *self, struct args *a)
{
    return one_case(r, self, a, CASE_SWAP);
}

/* --- Stripping --- */

static bool strips(const struct str *set, uint32_t c)
{
    if (!set)
        return uc_space(c);
    for (size_t i = 0; i < set->len;)
        if (utf8_next(set->data, set->len, &i) == c)
            return true;
    return false;
}

static struct value strip(struct run *r, const struct value *self, struct args *a, bool left,
                          bool right)
{
    struct value v;
    struct str *s = self->s;
    size_t from = 0, to = s->len;
    bind(r, a, "chars", 0, &v);
    struct str *set = v.type == T_MISSING || v.type == T_NONE ? NULL : need_str(r, v);
    run_charge(r, s->len);
    while (left && from < to) {
        size_t next = from;
        if (!strips(set, utf8_next(s->data, s->len, &next)))
            break;
        run_charge(r, set ? set->len : 0);
        from = next;
    }
    while (right && to > from) {
        size_t prev = utf8_prev(s->data, to), p = prev;
        if (!strips(set, utf8_next(s->data, s->len, &p)))
            break;
        run_charge(r, set ? set->len : 0);
        to = prev;
    }
    return text(r, s, from, to);
}

static struct value s_strip(struct run *r, const struct value *self, struct args *a)
{
    return strip(r, self, a, true, true);
}

static struct value s_lstrip(struct run *r, const struct value *self, struct args *a)
{
    return strip(r, self, a, true, false);
}

static struct value s_rstrip(struct run *r, const struct value *self, struct args *a)
{
    return strip(r, self, a, false, true);
}

/* --- Splitting --- */

static struct value split_space(struct run *r, struct str *s, int64_t max)
{
    struct value out = seq_new(r, T_LIST, 0);
    size_t i = 0, next;
    for (;;) {
        for (next = i; i < s->len && uc_space(utf8_next(s->data, s->len, &next)); i = next)
            ;
        if (i >= s->len)
            return out;
        size_t from = i;
        if (max >= 0 && (int64_t)out.seq->n >= max) {
            seq_add(r, out.seq, text(r, s, from, s->len));
            return out;
        }
        for (next = i; i < s->len && !uc_space(utf8_next(s->data, s->len, &next)); i = next)
            ;
        seq_add(r, out.seq, text(r, s, from, i));
    }
}

static struct value rsplit_space(struct run *r, struct str *s, int64_t max)
{
    struct value out = seq_new(r, T_LIST, 0);
    size_t to = s->len, p, prev;
    for (;;) {
        while (to > 0 &&
               (p = prev = utf8_prev(s->data, to), uc_space(utf8_next(s->data, s->len, &p))))
            to = prev;
        if (to == 0)
            break;
        size_t from = to;
        bool last = max >= 0 && (int64_t)out.seq->n >= max;
        while (from > 0 && (p = prev = utf8_prev(s->data, from),
                            last || !uc_space(utf8_next(s->data, s->len, &p))))
            from = prev;
        seq_add(r, out.seq, text(r, s, from, to));
        if (last)
            break;
        to = from;
    }
    return get_slice(r, out, v_none(), v_none(), v_int(-1));
}

static struct value split(struct run *r, struct str *s, struct str *sep, int64_t max)
{
    struct value out = seq_new(r, T_LIST, 0);
    size_t from = 0, at;
    while ((max < 0 || (int64_t)out.seq->n < max) &&
           (at = str_find(r, s, sep, from, s->len)) != SIZE_MAX) {
        seq_add(r, out.seq, text(r, s, from, at));
        from = at + sep->len;
    }
    seq_add(r, out.seq, text(r, s, from, s->len));
    return out;
}

static struct value rsplit(struct run *r, struct str *s, struct str *sep, int64_t max)
{
    struct value out = seq_new(r, T_LIST, 0);
    size_t to = s->len, at;
    while ((max < 0 || (int64_t)out.seq->n < max) &&
           (at = str_rfind(r, s, sep, 0, to)) != SIZE_MAX) {
        seq_add(r, out.seq, text(r, s, at + sep->len, to));
        to = at;
    }
    seq_add(r, out.seq, text(r, s, 0, to));
    return get_slice(r, out, v_none(), v_none(), v_int(-1));
}

static struct value any_split(struct run *r, const struct value *self, struct args *a, bool right)
{
    struct value v[2];
    bind(r, a, "sep maxsplit", 0, v);
    int64_t max = v[1].type == T_MISSING ? -1 : need_int(r, v[1]);
    run_charge(r, self->s->len);
    if (v[0].type == T_MISSING || v[0].type == T_NONE)
        return right ? rsplit_space(r, self->s, max) : split_space(r, self->s, max);
    struct str *sep = need_str(r, v[0]);
    if (!sep->len)
        run_fail(r, "ValueError: empty separator");
    return right ? rsplit(r, self->s, sep, max) : split(r, self->s, sep, max);
}

static struct value s_split(struct run *r, const struct value *self, struct args *a)
{
    return any_split(r, self, a, false);
}

static struct value s_rsplit(struct run *r, const struct value *self, struct args *a)
{
    return any_split(r, self, a, true);
}

static bool line_end(uint32_t c)
{
    return (c >= 10 && c <= 13) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 ||
           c == 0x2029;
}

static struct value s_splitlines(struct run *r, const struct value *self, struct args *a)
{
    struct value keep, out = seq_new(r, T_LIST, 0);
    struct str *s = self->s;
    size_t from = 0;
    bind(r, a, "keepends", 0, &keep);
    for (size_t i = 0; i < s->len;) {
        size_t at = i;
        uint32_t c = utf8_next(s->data, s->len, &i);
        if (!line_end(c))
            continue;
        if (c == '\r' && i < s->len && s->data[i] == '\n')
            i++;
        seq_add(r, out.seq, text(r, s, from, flag(r, keep, false) ? i : at));
        from = i;
    }
    if (from < s->len)
        seq_add(r, out.seq, text(r, s, from, s->len));
    return out;
}

static struct value parts(struct run *r, const struct value *self, struct args *a, bool right)
{
    struct value v, out = seq_new(r, T_TUPLE, 3), none = v_str(str_lit(r, ""));
    struct str *s = self->s;
    bind(r, a, "sep", 1, &v);
    struct str *sep = need_str(r, v);
    if (!sep->len)
        run_fail(r, "ValueError: empty separator");
    size_t at = right ? str_rfind(r, s, sep, 0, s->len) : str_find(r, s, sep, 0, s->len);
    bool found = at != SIZE_MAX;
    seq_add(r, out.seq, found ? text(r, s, 0, at) : right ? none : *self);
    seq_add(r, out.seq, found ? v : none);
    seq_add(r, out.seq, found ? text(r, s, at + sep->len, s->len) : right ? *self : none);
    return out;
}

static struct value s_partition(struct run *r, const struct value *self, struct args *a)
{
    return parts(r, self, a, false);
}

static struct value s_rpartition(struct run *r, const struct value *self, struct args *a)
{
    return parts(r, self, a, true);
}

/* --- Finding --- */

/* Byte offsets of [start, end) as slices count; false when start lies behind the end. */
static bool window(struct run *r, struct str *s, struct value start, struct value end,
                   size_t *ret_from, size_t *ret_to)
{
    int64_t n = (int64_t)str_chars(s), from = 0, to = n;
    if (start.type != T_MISSING && start.type != T_NONE)
        from = need_int(r, start);
    if (end.type != T_MISSING && end.type != T_NONE)
        to = need_int(r, end);
    from = from < 0 ? MAX(from + n, (int64_t)0) : from;
    to = MIN(to < 0 ? MAX(to + n, (int64_t)0) : to, n);
    if (from > to)
        return false;
    *ret_from = str_offset(s, (size_t)from);
    *ret_to = str_offset(s, (size_t)to);
    return true;
}

static struct value find(struct run *r, const struct value *self, struct args *a, bool right,
                         bool must)
{
    struct value v[3];
    struct str *s = self->s;
    size_t from, to, at = SIZE_MAX;
    bind(r, a, "sub start end", 1, v);
    struct str *sub = need_str(r, v[0]);
    if (window(r, s, v[1], v[2], &from, &to))
        at = right ? str_rfind(r, s, sub, from, to) : str_find(r, s, sub, from, to);
    if (at == SIZE_MAX && must)
        run_fail(r, "ValueError: substring not found");
    if (at == SIZE_MAX)
        return v_int(-1);
    struct str before = {.data = s->data, .len = at, .chars = SIZE_MAX};
    return v_int((int64_t)str_chars(&before));
}

static struct value s_find(struct run *r, const struct value *self, struct args *a)
{
    return find(r, self, a, false, false);
}

static struct value s_rfind(struct run *r, const struct value *self, struct args *a)
{
    return find(r, self, a, true, false);
}

static struct value s_index(struct run *r, const struct value *self, struct args *a)
{
    return find(r, self, a, false, true);
}

static struct value s_rindex(struct run *r, const struct value *self, struct args *a)
{
    return find(r, self, a, true, true);
}

static struct value s_count(struct run *r, const struct value *self, struct args *a)
{
    struct value v[3];
    size_t from, to;
    int64_t n = 0;
    bind(r, a, "sub start end", 1, v);
    struct str *sub = need_str(r, v[0]);
    if (!window(r, self->s, v[1], v[2], &from, &to))
        return v_int(0);
    if (!sub->len) {
        struct str part = {.data = self->s->data + from, .len = to - from, .chars = SIZE_MAX};
        return v_int((int64_t)str_chars(&part) + 1);
    }
    while ((from = str_find(r, self->s, sub, from, to)) != SIZE_MAX) {
        n++;
        from += sub->len;
    }
    return v_int(n);
}

static bool edge(const struct str *s, const struct str *part, size_t from, size_t to, bool end)
{
    return part->len <= to - from &&
           !memcmp(s->data + (end ? to - part->len : from), part->data, part->len);
}

static struct value edges(struct run *r, const struct value *self, struct args *a, bool end)
{
    struct value v[3];
    size_t from, to;
    bind(r, a, "prefix start end", 1, v);
    if (!is_str(v[0]) && v[0].type != T_TUPLE)
        run_fail(r, "TypeError: %s first arg must be str or a tuple of str, not %s", a->what,
                 type_name(v[0]));
    if (!window(r, self->s, v[1], v[2], &from, &to))
        return v_bool(false);
    if (is_str(v[0]))
        return v_bool(edge(self->s, v[0].s, from, to, end));
    for (size_t i = 0; i < v[0].seq->n; i++)
        if (edge(self->s, need_str(r, v[0].seq->v[i]), from, to, end))
            return v_bool(true);
    return v_bool(false);
}

static struct value s_startswith(struct run *r, const struct value *self, struct args *a)
{
    return edges(r, self, a, false);
}

static struct value s_endswith(struct run *r, const struct value *self, struct args *a)
{
    return edges(r, self, a, true);
}

/* --- Making new ones --- */

static struct value s_replace(struct run *r, const struct value *self, struct args *a)
{
    struct value v[3];
    struct str *s = self->s;
    struct sb b = {0};
    size_t from = 0, at;
    bind(r, a, "old new count", 2, v);
    struct str *old = need_str(r, v[0]), *new = need_str(r, v[1]);
    int64_t left = v[2].type == T_MISSING ? -1 : need_int(r, v[2]);
    if (!old->len) { /* before each character and at the end */
        for (size_t i = 0; left != 0; left--) {
            sb_str(r, &b, new);
            from = i;
            if (i >= s->len)
                break;
            utf8_next(s->data, s->len, &i);
            sb_add(r, &b, s->data + from, i - from);
            from = i;
        }
    }
    while (old->len && left != 0 && (at = str_find(r, s, old, from, s->len)) != SIZE_MAX) {
        sb_add(r, &b, s->data + from, at - from);
        sb_str(r, &b, new);
        from = at + old->len;
        left--;
    }
    if (from == 0 && !b.len)
        return *self;
    sb_add(r, &b, s->data + from, s->len - from);
    return v_str(sb_take(r, &b));
}

static struct value s_join(struct run *r, const struct value *self, struct args *a)
{
    struct value items, v;
    struct sb b = {0};
    bind(r, a, "iterable", 1, &items);
    struct iter *it = iter_begin(r, items);
    for (size_t i = 0; iter_next(r, it, &v); i++) {
        if (!is_str(v))
            run_fail(r, "TypeError: sequence item %zu: expected str instance, %s found", i,
                     type_name(v));
        if (i)
            sb_str(r, &b, self->s);
        sb_str(r, &b, v.s);
    }
    return v_str(sb_take(r, &b));
}

static struct value justify(struct run *r, const struct value *self, struct args *a, int where)
{
    struct value v[2];
    struct sb b = {0};
    size_t at = 0;
    bind(r, a, "width fillchar", 1, v);
    int64_t width = need_int(r, v[0]), n = (int64_t)str_chars(self->s);
    uint32_t fill = ' ';
    if (v[1].type != T_MISSING) {
        if (str_chars(need_str(r, v[1])) != 1)
            run_fail(r, "TypeError: The fill character must be exactly one character long");
        fill = utf8_next(v[1].s->data, v[1].s->len, &at);
    }
    if (width <= n)
        return *self;
    if ((uint64_t)width > r->limits.memory)
        run_fail(r, "a string of %lld characters is too long", (long long)width);
    int64_t pad = width - n, left = where < 0 ? 0 : pad;
    if (where == 0)
        left = pad / 2 + (pad & width & 1);
    sb_fill(r, &b, fill, (size_t)left);
    sb_str(r, &b, self->s);
    sb_fill(r, &b, fill, (size_t)(pad - left));
    return v_str(sb_take(r, &b));
}

static struct value s_ljust(struct run *r, const struct value *self, struct args *a)
{
    return justify(r, self, a, -1);
}

static struct value s_rjust(struct run *r, const struct value *self, struct args *a)
{
    return justify(r, self, a, 1);
}

static struct value s_center(struct run *r, const struct value *self, struct args *a)
{
    return justify(r, self, a, 0);
}

static struct value s_zfill(struct run *r, const struct value *self, struct args *a)
{
    struct value v;
    struct sb b = {0};
    struct str *s = self->s;
    bind(r, a, "width", 1, &v);
    int64_t width = need_int(r, v), n = (int64_t)str_chars(s);
    size_t sign = s->len && (s->data[0] == '+' || s->data[0] == '-');
    if (width > n && (uint64_t)width > r->limits.memory)
        run_fail(r, "a string of %lld characters is too long", (long long)width);
    sb_add(r, &b, s->data, sign);
    sb_fill(r, &b, '0', width > n ? (size_t)(width - n) : 0);
    sb_add(r, &b, s->data + sign, s->len - sign);
    return v_str(sb_take(r, &b));
}

static struct value s_expandtabs(struct run *r, const struct value *self, struct args *a)
{
    struct value v;
    struct sb b = {0};
    struct str *s = self->s;
    int64_t column = 0;
    bind(r, a, "tabsize", 0, &v);
    int64_t size = v.type == T_MISSING ? 8 : need_int(r, v);
    if (size > 4096)
        run_fail(r, "tabs of %lld characters are too wide", (long long)size);
    for (size_t i = 0; i < s->len;) {
        uint32_t c = utf8_next(s->data, s->len, &i);
        if (c == '\t') {
            int64_t n = size > 0 ? size - column % size : 0;
            sb_fill(r, &b, ' ', (size_t)n);
            column += n;
        } else {
            sb_char(r, &b, c);
            column = c == '\n' || c == '\r' ? 0 : column + 1;
        }
    }
    return v_str(sb_take(r, &b));
}

static struct value s_removeprefix(struct run *r, const struct value *self, struct args *a)
{
    struct value v;
    bind(r, a, "prefix", 1, &v);
    bool has = edge(self->s, need_str(r, v), 0, self->s->len, false);
    return text(r, self->s, has ? v.s->len : 0, self->s->len);
}

static struct value s_removesuffix(struct run *r, const struct value *self, struct args *a)
{
    struct value v;
    bind(r, a, "suffix", 1, &v);
    bool has = edge(self->s, need_str(r, v), 0, self->s->len, true);
    return text(r, self->s, 0, self->s->len - (has ? v.s->len : 0));
}

static struct value s_format(struct run *r, const struct value *self, struct args *a)
{
    return format_braces(r, self->s, a);
}

static struct value s_format_map(struct run *r, const struct value *self, struct args *a)
{
    struct value v;
    struct args named = {.what = "format_map"};
    bind(r, a, "mapping", 1, &v);
    if (v.type != T_DICT)
        run_fail(r, "TypeError: format_map() needs a dict, got %s", type_name(v));
    named.kw = arena(r, v.dict->n, sizeof *named.kw);
    for (size_t i = 0; i < v.dict->n; i++)
        if (is_str(v.dict->v[i].key))
            named.kw[named.n_kw++] = (struct keyword){v.dict->v[i].key.s, v.dict->v[i].value};
    return format_braces(r, self->s, &named);
}

/* --- Asking --- */

static struct value all(struct run *r, const struct value *self, struct args *a,
                        bool (*is)(uint32_t c), bool empty)
{
    const struct str *s = self->s;
    bind(r, a, "", 0, NULL);
    run_charge(r, s->len);
    for (size_t i = 0; i < s->len;)
        if (!is(utf8_next(s->data, s->len, &i)))
            return v_bool(false);
    return v_bool(s->len > 0 || empty);
}

static bool alnum(uint32_t c)
{
    return uc_alpha(c) || uc_numeric(c);
}

static bool ascii(uint32_t c)
{
    return c < 0x80;
}

#define ASK(name, is, empty)                                                                       \
    static struct value s_##name(struct run *r, const struct value *self, struct args *a)          \
    {                                                                                              \
        return all(r, self, a, is, empty);                                                         \
    }

ASK(isalnum, alnum, false)
ASK(isalpha, uc_alpha, false)
ASK(isascii, ascii, true)
ASK(isdecimal, uc_decimal, false)
ASK(isdigit, uc_digit, false)
ASK(isnumeric, uc_numeric, false)
ASK(isprintable, uc_printable, true)
ASK(isspace, uc_space, false)

/* Every cased character is of that case, and there is one. */
static struct value cased(struct run *r, const struct value *self, struct args *a, bool upper)
{
    const struct str *s = self->s;
    bool some = false;
    bind(r, a, "", 0, NULL);
    run_charge(r, s->len);
    for (size_t i = 0; i < s->len;) {
        uint32_t c = utf8_next(s->data, s->len, &i);
        if (upper ? uc_lower(c) : uc_upper(c))
            return v_bool(false);
        some |= upper ? uc_upper(c) : uc_lower(c);
    }
    return v_bool(some);
}

static struct value s_isupper(struct run *r, const struct value *self, struct args *a)
{
    return cased(r, self, a, true);
}

static struct value s_islower(struct run *r, const struct value *self, struct args *a)
{
    return cased(r, self, a, false);
}

static struct value s_istitle(struct run *r, const struct value *self, struct args *a)
{
    const struct str *s = self->s;
    bool some = false, inside = false;
    bind(r, a, "", 0, NULL);
    for (size_t i = 0; i < s->len;) {
        uint32_t c = utf8_next(s->data, s->len, &i);
        bool up = uc_upper(c), low = uc_lower(c);
        if ((up && inside) || (low && !inside))
            return v_bool(false);
        inside = up || low;
        some |= inside;
    }
    return v_bool(some);
}

static struct value s_isidentifier(struct run *r, const struct value *self, struct args *a)
{
    const struct str *s = self->s;
    bind(r, a, "", 0, NULL);
    for (size_t i = 0; i < s->len;) {
        bool first = i == 0;
        uint32_t c = utf8_next(s->data, s->len, &i);
        if (c != '_' && !uc_alpha(c) && (first || !uc_decimal(c)))
            return v_bool(false);
    }
    return v_bool(s->len > 0);
}

const struct builtin str_methods[] = {
    {"capitalize", s_capitalize},
    {"casefold", s_lower},
    {"center", s_center},
    {"count", s_count},
    {"endswith", s_endswith},
    {"expandtabs", s_expandtabs},
    {"find", s_find},
    {"format", s_format},
    {"format_map", s_format_map},
    {"index", s_index},
    {"isalnum", s_isalnum},
    {"isalpha", s_isalpha},
    {"isascii", s_isascii},
    {"isdecimal", s_isdecimal},
    {"isdigit", s_isdigit},
    {"isidentifier", s_isidentifier},
    {"islower", s_islower},
    {"isnumeric", s_isnumeric},
    {"isprintable", s_isprintable},
    {"isspace", s_isspace},
    {"istitle", s_istitle},
    {"isupper", s_isupper},
    {"join", s_join},
    {"ljust", s_ljust},
    {"lower", s_lower},
    {"lstrip", s_lstrip},
    {"partition", s_partition},
    {"removeprefix", s_removeprefix},
    {"removesuffix", s_removesuffix},
    {"replace", s_replace},
    {"rfind", s_rfind},
    {"rindex", s_rindex},
    {"rjust", s_rjust},
    {"rpartition", s_rpartition},
    {"rsplit", s_rsplit},
    {"rstrip", s_rstrip},
    {"split", s_split},
    {"splitlines", s_splitlines},
    {"startswith", s_startswith},
    {"strip", s_strip},
    {"swapcase", s_swapcase},
    {"title", s_title},
    {"upper", s_upper},
    {"zfill", s_zfill},
    {NULL, NULL},
};
