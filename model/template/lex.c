/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text to tokens. Whitespace control as Jinja2's lexer has it with trim_blocks and lstrip_blocks:
 * one newline after a block's or comment's end is dropped ("+%}" keeps it), blanks between the
 * start of a line and a block or comment are dropped ("{%+" keeps them), "-" strips all white space
 * on its side. Newlines become \n and one at the very end is dropped.
 */
#include "model/template/parse_internal.h"

struct lexer {
    struct run *r;
    const char *text;
    size_t len, at;
    uint32_t line;
    bool line_starting;
    struct tokens *out;
    char stack[256]; /* closing brackets that are due */
    size_t depth;
};

static struct token *add(struct lexer *x, enum token_type type)
{
    struct tokens *o = x->out;
    if (o->n == o->cap) {
        size_t cap = MAX((size_t)256, o->cap * 2);
        struct token *grown = arena(x->r, cap, sizeof *grown);
        if (o->n)
            memcpy(grown, o->v, o->n * sizeof *grown);
        o->v = grown;
        o->cap = cap;
    }
    struct token *t = &o->v[o->n++];
    t->type = (uint8_t)type;
    t->line = x->line;
    return t;
}

/* Moves on to `to`, counting lines. */
static void move(struct lexer *x, size_t to)
{
    if (to > x->at)
        x->line_starting = x->text[to - 1] == '\n';
    for (; x->at < to; x->at++)
        x->line += x->text[x->at] == '\n';
    x->r->line = x->line;
}

static bool here(const struct lexer *x, size_t at, const char *s)
{
    size_t n = strlen(s);
    return x->len - at >= n && !memcmp(x->text + at, s, n);
}

static size_t skip_space(const struct lexer *x, size_t at)
{
    while (at < x->len) {
        size_t next = at;
        if (!uc_space(utf8_next(x->text, x->len, &next)))
            break;
        at = next;
    }
    return at;
}

static bool all_space(const char *s, size_t len)
{
    for (size_t i = 0; i < len;)
        if (!uc_space(utf8_next(s, len, &i)))
            return false;
    return true;
}

/* The end of a tag ("%}", "#}") at `at`: where the text goes on, or 0. */
static size_t tag_end(const struct lexer *x, size_t at, const char *end)
{
    if ((x->text[at] == '+' || x->text[at] == '-') && at + 1 < x->len && here(x, at + 1, end))
        return x->text[at] == '-' ? skip_space(x, at + 3) : at + 3;
    if (here(x, at, end))
        return at + 2 < x->len && x->text[at + 2] == '\n' ? at + 3 : at + 2;
    return 0;
}

/* The text from x->at to `end`, before a tag whose sign is `sign`. */
static void emit_data(struct lexer *x, size_t end, char sign, bool variable)
{
    size_t from = x->at, to = end;
    if (sign == '-') {
        while (to > from) {
            size_t prev = utf8_prev(x->text, to), p = prev;
            if (!uc_space(utf8_next(x->text, x->len, &p)))
                break;
            to = prev;
        }
    } else if (sign != '+' && !variable) {
        size_t start = to;
        while (start > from && x->text[start - 1] != '\n')
            start--;
        if ((start > from || x->line_starting) && all_space(x->text + start, to - start))
            to = start;
    }
    if (to > from)
        add(x, TOK_DATA)->value = v_str(str_wrap(x->r, x->text + from, to - from));
    move(x, end);
}

static char sign_at(const struct lexer *x, size_t at)
{
    return at < x->len && (x->text[at] == '-' || x->text[at] == '+') ? x->text[at] : 0;
}

/* --- Raw blocks and comments --- */

/* `{% raw %}` at `at`: where its text begins, or 0. */
static size_t raw_begin(const struct lexer *x, size_t at)
{
    size_t i = skip_space(x, at + 2 + (sign_at(x, at + 2) != 0));
    if (!here(x, i, "raw"))
        return 0;
    i = skip_space(x, i + 3);
    if (here(x, i, "-%}"))
        return skip_space(x, i + 3);
    return here(x, i, "%}") ? i + 2 : 0;
}

static size_t endraw(const struct lexer *x, size_t at)
{
    size_t i = skip_space(x, at + 2 + (sign_at(x, at + 2) != 0));
    if (!here(x, i, "endraw"))
        return 0;
    i = skip_space(x, i + 6);
    return i < x->len ? tag_end(x, i, "%}") : 0;
}

static void lex_raw(struct lexer *x)
{
    if (x->at == x->len)
        return;
    for (size_t i = x->at; i + 1 < x->len; i++) {
        size_t end = here(x, i, "{%") ? endraw(x, i) : 0;
        if (end) {
            emit_data(x, i, sign_at(x, i + 2), false);
            move(x, end);
            return;
        }
    }
    run_fail(x->r, "Missing end of raw directive");
}

static void lex_comment(struct lexer *x)
{
    for (size_t i = x->at; i < x->len; i++) {
        size_t end = tag_end(x, i, "#}");
        if (end) {
            move(x, end);
            return;
        }
    }
    run_fail(x->r, "Missing end of comment tag");
}

/* --- Within tags --- */

static int digit(char c, int base)
{
    int d = c >= '0' && c <= '9'   ? c - '0'
            : c >= 'a' && c <= 'z' ? c - 'a' + 10
            : c >= 'A' && c <= 'Z' ? c - 'A' + 10
                                   : 99;
    return d < base ? d : -1;
}

/* Digits with single underscores between them, from `at`; the end (at itself: none). */
static size_t digits(const struct lexer *x, size_t at, int base)
{
    size_t i = at;
    while (i < x->len) {
        size_t k = i + (i > at && x->text[i] == '_');
        if (k >= x->len || digit(x->text[k], base) < 0)
            break;
        i = k + 1;
    }
    return i;
}

/* The end of a float at x->at, or 0. */
static size_t float_end(const struct lexer *x)
{
    size_t i = digits(x, x->at, 10), k;
    bool is = false;
    if (i == x->at || (x->at > 0 && x->text[x->at - 1] == '.'))
        return 0;
    if (i < x->len && x->text[i] == '.' && (k = digits(x, i + 1, 10)) > i + 1) {
        i = k;
        is = true;
    }
    if (i < x->len && (x->text[i] | 0x20) == 'e') {
        size_t s = i + 1 + (sign_at(x, i + 1) != 0);
        k = digits(x, s, 10);
        if (k > s) {
            i = k;
            is = true;
        }
    }
    return is ? i : 0;
}

static void lex_float(struct lexer *x, size_t end)
{
    char text[64];
    size_t n = 0;
    for (size_t i = x->at; i < end && n < sizeof text - 1; i++)
        if (x->text[i] != '_')
            text[n++] = x->text[i];
    text[n] = '\0';
    add(x, TOK_FLOAT)->value = v_float(strtod(text, NULL));
    move(x, end);
}

static void lex_int(struct lexer *x)
{
    static const struct {
        const char *prefix[2];
        int base;
    } kinds[] = {{{"0x", "0X"}, 16}, {{"0o", "0O"}, 8}, {{"0b", "0B"}, 2}};
    int base = 10;
    size_t from = x->at;
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
        if ((here(x, from, kinds[i].prefix[0]) || here(x, from, kinds[i].prefix[1])) &&
            digits(x, from + 2, kinds[i].base) > from + 2) {
            base = kinds[i].base;
            from += 2;
        }
    size_t end = digits(x, from, base);
    int64_t v = 0;
    for (size_t i = from; i < end; i++)
        if (x->text[i] != '_' && (__builtin_mul_overflow(v, base, &v) ||
                                  __builtin_add_overflow(v, digit(x->text[i], base), &v)))
            run_fail(x->r, "an integer that does not fit 64 bits");
    add(x, TOK_INT)->value = v_int(v);
    move(x, end);
}

static uint32_t hex_escape(struct lexer *x, size_t *i, size_t end, size_t n)
{
    uint32_t c = 0;
    for (size_t k = 0; k < n; k++, ++*i) {
        if (*i >= end || digit(x->text[*i], 16) < 0)
            run_fail(x->r, "truncated \\x or \\u escape in a string");
        c = c << 4 | (uint32_t)digit(x->text[*i], 16);
    }
    if (c > 0x10FFFF || (c >= 0xD800 && c < 0xE000))
        run_fail(x->r, "an escape in a string that is no character");
    return c;
}

/* The escape behind a backslash at *i. */
static void unescape(struct lexer *x, struct sb *b, size_t *i, size_t end)
{
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    char c = x->text[(*i)++];
    const char *p = c ? strchr(from, c) : NULL;
    uint32_t v = 0;
    if (p) {
        sb_add(x->r, b, &to[p - from], 1);
    } else if (c == 'x' || c == 'u' || c == 'U') {
        sb_char(x->r, b, hex_escape(x, i, end, c == 'x' ? 2 : c == 'u' ? 4 : 8));
    } else if (digit(c, 8) >= 0) {
        v = (uint32_t)digit(c, 8);
        for (int k = 0; k < 2 && *i < end && digit(x->text[*i], 8) >= 0; k++)
            v = v * 8 + (uint32_t)digit(x->text[(*i)++], 8);
        sb_char(x->r, b, v);
    } else if (c == 'N') {
        run_fail(x->r, "\\N{...} in a string is not supported");
    } else if (c != '\n') {
        sb_add(x->r, b, "\\", 1);
        sb_add(x->r, b, &c, 1);
    }
}

static void lex_string(struct lexer *x)
{
    char quote = x->text[x->at];
    size_t end = x->at + 1;
    struct sb b = {0};
    while (end < x->len && x->text[end] != quote)
        end += x->text[end] == '\\' ? 2 : 1;
    if (end >= x->len)
        run_fail(x->r, "a string has no end");
    for (size_t i = x->at + 1; i < end;) {
        if (x->text[i] == '\\') {
            i++;
            unescape(x, &b, &i, end);
        } else {
            sb_add(x->r, &b, &x->text[i++], 1);
        }
    }
    add(x, TOK_STRING)->value = v_str(sb_take(x->r, &b));
    move(x, end + 1);
}

static bool lex_name(struct lexer *x)
{
    size_t i = x->at;
    while (i < x->len) {
        size_t next = i;
        uint32_t c = utf8_next(x->text, x->len, &next);
        if (c != '_' && !uc_alpha(c) && !uc_numeric(c))
            break;
        i = next;
    }
    if (i == x->at)
        return false;
    add(x, TOK_NAME)->value = v_str(str_wrap(x->r, x->text + x->at, i - x->at));
    move(x, i);
    return true;
}

static void balance(struct lexer *x, char c)
{
    static const char open[] = "([{", close[] = ")]}";
    const char *p = strchr(open, c);
    if (p) {
        if (x->depth == sizeof x->stack)
            run_fail(x->r, "brackets nested deeper than %zu", sizeof x->stack);
        x->stack[x->depth++] = close[p - open];
    } else if (strchr(close, c)) {
        if (!x->depth)
            run_fail(x->r, "unexpected '%c'", c);
        if (x->stack[--x->depth] != c)
            run_fail(x->r, "unexpected '%c', expected '%c'", c, x->stack[x->depth]);
    }
}

static void lex_operator(struct lexer *x)
{
    static const struct {
        const char *text;
        enum token_op op;
    } table[] = {{"//", O_FLOORDIV}, {"**", O_POW},   {"==", O_EQ},      {"!=", O_NE},
                 {">=", O_GE},       {"<=", O_LE},    {"+", O_ADD},      {"-", O_SUB},
                 {"*", O_MUL},       {"/", O_DIV},    {"%", O_MOD},      {"~", O_TILDE},
                 {"<", O_LT},        {">", O_GT},     {"=", O_ASSIGN},   {".", O_DOT},
                 {":", O_COLON},     {",", O_COMMA},  {"|", O_PIPE},     {";", O_SEMI},
                 {"(", O_LPAREN},    {")", O_RPAREN}, {"[", O_LBRACKET}, {"]", O_RBRACKET},
                 {"{", O_LBRACE},    {"}", O_RBRACE}};
    for (size_t i = 0; i < ARRAY_LEN(table); i++) {
        if (!here(x, x->at, table[i].text))
            continue;
        balance(x, x->text[x->at]);
        add(x, TOK_OP)->op = (uint8_t)table[i].op;
        move(x, x->at + strlen(table[i].text));
        return;
    }
    run_fail(x->r, "unexpected character '%c'", x->text[x->at]);
}

/* From behind "{%" or "{{" to behind its end. */
static void lex_tag(struct lexer *x, bool variable)
{
    uint32_t line = x->line;
    x->depth = 0;
    while (x->at < x->len) {
        size_t end = 0;
        if (!x->depth && variable)
            end = here(x, x->at, "-}}")  ? skip_space(x, x->at + 3)
                  : here(x, x->at, "}}") ? x->at + 2
                                         : 0;
        else if (!x->depth)
            end = tag_end(x, x->at, "%}");
        if (end) {
            add(x, variable ? TOK_VAR_END : TOK_BLOCK_END);
            move(x, end);
            return;
        }
        size_t space = skip_space(x, x->at), f;
        char c = x->text[x->at];
        if (space > x->at)
            move(x, space);
        else if ((f = float_end(x)))
            lex_float(x, f);
        else if (c >= '0' && c <= '9')
            lex_int(x);
        else if (c == '"' || c == '\'')
            lex_string(x);
        else if (!lex_name(x))
            lex_operator(x);
    }
    x->r->line = line;
    run_fail(x->r, "a tag has no end");
}

static size_t next_tag(const struct lexer *x)
{
    for (size_t i = x->at; i + 1 < x->len; i++)
        if (x->text[i] == '{' &&
            (x->text[i + 1] == '{' || x->text[i + 1] == '%' || x->text[i + 1] == '#'))
            return i;
    return SIZE_MAX;
}

static const char *normalize(struct run *r, const char *text, size_t len, size_t *ret_len)
{
    char *copy = arena(r, len + 1, 1);
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        if (text[i] == '\r') {
            copy[n++] = '\n';
            i += i + 1 < len && text[i + 1] == '\n';
        } else {
            copy[n++] = text[i];
        }
    }
    *ret_len = n - (n > 0 && copy[n - 1] == '\n');
    return copy;
}

void lex(struct run *r, const char *text, size_t len, struct tokens *ret)
{
    struct lexer x = {.r = r, .line = 1, .line_starting = true, .out = ret};
    x.text = normalize(r, text, len, &x.len);
    r->line = 1;
    while (x.at < x.len) {
        size_t tag = next_tag(&x);
        if (tag == SIZE_MAX) {
            add(&x, TOK_DATA)->value = v_str(str_wrap(r, x.text + x.at, x.len - x.at));
            move(&x, x.len);
            break;
        }
        char kind = x.text[tag + 1], sign = sign_at(&x, tag + 2);
        size_t raw = kind == '%' ? raw_begin(&x, tag) : 0;
        emit_data(&x, tag, sign, kind == '{');
        if (!raw && kind != '#')
            add(&x, kind == '%' ? TOK_BLOCK_BEGIN : TOK_VAR_BEGIN);
        move(&x, raw ? raw : tag + 2 + (sign != 0));
        if (raw)
            lex_raw(&x);
        else if (kind == '#')
            lex_comment(&x);
        else
            lex_tag(&x, kind == '{');
    }
    add(&x, TOK_EOF);
    for (size_t i = 0; i < ret->n; i++)
        if (is_str(ret->v[i].value))
            str_freeze(ret->v[i].value.s);
}
