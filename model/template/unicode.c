/* SPDX-License-Identifier: Apache-2.0 */
/* Characters as Python classifies and cases them (utf8proc has the tables). */
#include <utf8proc.h>

#include "model/template/internal.h"

uint32_t utf8_next(const char *data, size_t len, size_t *pos)
{
    utf8proc_int32_t c;
    if ((unsigned char)data[*pos] < 0x80)
        return (unsigned char)data[(*pos)++];
    utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)data + *pos,
                                          (utf8proc_ssize_t)MIN(len - *pos, (size_t)4), &c);
    if (n <= 0) {
        ++*pos;
        return 0xFFFD;
    }
    *pos += (size_t)n;
    return (uint32_t)c;
}

size_t utf8_prev(const char *data, size_t pos)
{
    do
        pos--;
    while (pos > 0 && ((unsigned char)data[pos] & 0xC0) == 0x80);
    return pos;
}

static utf8proc_category_t category(uint32_t c)
{
    return utf8proc_category((utf8proc_int32_t)c);
}

bool uc_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
           c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
           c == 0x202F || c == 0x205F || c == 0x3000;
}

bool uc_printable(uint32_t c)
{
    if (c < 0x7F)
        return c >= 0x20;
    switch (category(c)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
        return false;
    default:
        return true;
    }
}

bool uc_alpha(uint32_t c)
{
    if (c < 0x80)
        return (c | 0x20) >= 'a' && (c | 0x20) <= 'z';
    utf8proc_category_t k = category(c);
    return k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;
}

bool uc_decimal(uint32_t c)
{
    return c < 0x80 ? c >= '0' && c <= '9' : category(c) == UTF8PROC_CATEGORY_ND;
}

bool uc_digit(uint32_t c)
{
    return uc_decimal(c) || c == 0xB2 || c == 0xB3 || c == 0xB9 || c == 0x2070 ||
           (c >= 0x2074 && c <= 0x2079) || (c >= 0x2080 && c <= 0x2089) ||
           (c >= 0x2460 && c <= 0x2468) || (c >= 0x2474 && c <= 0x247C);
}

bool uc_numeric(uint32_t c)
{
    if (c < 0x80)
        return uc_decimal(c);
    utf8proc_category_t k = category(c);
    return k == UTF8PROC_CATEGORY_ND || k == UTF8PROC_CATEGORY_NL || k == UTF8PROC_CATEGORY_NO;
}

bool uc_upper(uint32_t c)
{
    return c < 0x80 ? c >= 'A' && c <= 'Z' : utf8proc_isupper((utf8proc_int32_t)c);
}

bool uc_lower(uint32_t c)
{
    return c < 0x80 ? c >= 'a' && c <= 'z' : utf8proc_islower((utf8proc_int32_t)c);
}

static bool uc_title(uint32_t c)
{
    return c >= 0x80 && category(c) == UTF8PROC_CATEGORY_LT;
}

static bool uc_cased(uint32_t c)
{
    return uc_upper(c) || uc_lower(c) || uc_title(c);
}

/* Characters whose upper case is several (Unicode's SpecialCasing, the Latin ones). */
static void add_upper(struct run *r, struct sb *b, uint32_t c, bool title)
{
    static const struct {
        uint32_t c;
        const char *upper, *title;
    } special[] = {{0xDF, "SS", "Ss"},
                   {0x149, "\xCA\xBCN", "\xCA\xBCN"},
                   {0x1F0, "J\xCC\x8C", "J\xCC\x8C"},
                   {0xFB00, "FF", "Ff"},
                   {0xFB01, "FI", "Fi"},
                   {0xFB02, "FL", "Fl"},
                   {0xFB03, "FFI", "Ffi"},
                   {0xFB04, "FFL", "Ffl"},
                   {0xFB05, "ST", "St"},
                   {0xFB06, "ST", "St"}};
    for (size_t i = 0; c >= 0x80 && i < ARRAY_LEN(special); i++)
        if (special[i].c == c) {
            const char *s = title ? special[i].title : special[i].upper;
            sb_add(r, b, s, strlen(s));
            return;
        }
    sb_char(r, b,
            (uint32_t)(title ? utf8proc_totitle((utf8proc_int32_t)c)
                             : utf8proc_toupper((utf8proc_int32_t)c)));
}

/* Whether the sigma that ends at `at` is a word's last letter. */
static bool final_sigma(const struct str *s, size_t begin, size_t end)
{
    size_t i = begin, p;
    bool before = false;
    while (i > 0) {
        i = utf8_prev(s->data, i);
        p = i;
        uint32_t c = utf8_next(s->data, s->len, &p);
        if (c == '\'' || category(c) == UTF8PROC_CATEGORY_MN)
            continue;
        before = uc_cased(c);
        break;
    }
    for (i = end; before && i < s->len;) {
        uint32_t c = utf8_next(s->data, s->len, &i);
        if (c == '\'' || category(c) == UTF8PROC_CATEGORY_MN)
            continue;
        return !uc_cased(c);
    }
    return before;
}

static void add_lower(struct run *r, struct sb *b, struct str *s, size_t begin, size_t end,
                      uint32_t c)
{
    if (c == 0x3A3)
        sb_char(r, b, final_sigma(s, begin, end) ? 0x3C2 : 0x3C3);
    else if (c == 0x130)
        sb_add(r, b, "i\xCC\x87", 3);
    else
        sb_char(r, b, (uint32_t)utf8proc_tolower((utf8proc_int32_t)c));
}

struct str *str_case(struct run *r, struct str *s, enum str_case how)
{
    struct sb b = {0};
    bool first = true, cased = false;
    for (size_t i = 0; i < s->len;) {
        size_t begin = i;
        uint32_t c = utf8_next(s->data, s->len, &i);
        bool up = how == CASE_UPPER || (how == CASE_SWAP && uc_lower(c));
        bool title = (how == CASE_TITLE && !cased) || (how == CASE_CAPITAL && first);
        if (up || title)
            add_upper(r, &b, c, !up);
        else if (how == CASE_SWAP && !uc_upper(c))
            sb_char(r, &b, c);
        else
            add_lower(r, &b, s, begin, i, c);
        cased = uc_cased(c);
        first = false;
    }
    return sb_take(r, &b);
}
