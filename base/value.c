/* SPDX-License-Identifier: Apache-2.0 */
#include "base/value.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/fd.h"

#ifndef EMBER_DATADIR
#define EMBER_DATADIR "/usr/share/emberd"
#endif

/* A number's suffix and what it multiplies by; the first that divides a value prints it. */
struct unit {
    const char *suffix;
    uint64_t factor;
};

static const struct unit byte_units[] = {
    {"TiB", UINT64_C(1) << 40}, {"GiB", GIB}, {"MiB", MIB}, {"KiB", KIB}, {"", 1},
    {"T", UINT64_C(1) << 40},   {"G", GIB},   {"M", MIB},   {"K", KIB},   {"B", 1},
};
static const struct unit time_units[] = {
    {"h", UINT64_C(3600000000000)}, {"m", UINT64_C(60000000000)}, {"s", UINT64_C(1000000000)},
    {"ms", UINT64_C(1000000)},      {"us", UINT64_C(1000)},       {"ns", 1},
};

static int bad(struct error *err, const char *text, const char *what, const char *advice)
{
    return error_set(err, EINVAL, "\"%.100s\" is not %s: %s", text, what, advice);
}

/* A decimal without sign, at least one digit; *ret_end is behind it. */
static bool read_digits(const char *text, uint64_t *ret, const char **ret_end)
{
    uint64_t n = 0;

    if (!isdigit((unsigned char)*text))
        return false;
    for (; isdigit((unsigned char)*text); text++)
        if (!size_mul(n, 10, &n) || !size_add(n, (uint64_t)(*text - '0'), &n))
            return false;
    *ret = n;
    *ret_end = text;
    return true;
}

static bool read_scaled(const char *text, const struct unit *units, size_t n_units, uint64_t *ret)
{
    const char *suffix;
    uint64_t n;

    if (!read_digits(text, &n, &suffix))
        return false;
    for (size_t i = 0; i < n_units; i++)
        if (!strcmp(suffix, units[i].suffix))
            return size_mul(n, units[i].factor, ret);
    return units == time_units && n == 0 && !*suffix && (*ret = 0, true);
}

static bool read_int(const char *text, int64_t *ret)
{
    const char *end;
    uint64_t n;
    bool negative = *text == '-';

    if (!read_digits(text + negative, &n, &end) || *end || n > INT64_MAX)
        return false;
    *ret = negative ? -(int64_t)n : (int64_t)n;
    return true;
}

/* strtod reads more than people should write: blanks, hexadecimals, "inf", "nan". */
static bool read_real(const char *text, double *ret)
{
    char *end;

    if (text[strspn(text, "+-.eE0123456789")])
        return false;
    double value = strtod(text, &end);
    if (end == text || *end || !isfinite(value))
        return false;
    *ret = value;
    return true;
}

static int parse_bool(const char *text, bool *ret, struct error *err)
{
    static const char *const yes[] = {"yes", "true", "on", "1"}, *const no[] = {"no", "false",
                                                                                "off", "0"};

    for (size_t i = 0; i < ARRAY_LEN(yes); i++) {
        bool is_yes = !strcasecmp(text, yes[i]);
        if (is_yes || !strcasecmp(text, no[i])) {
            *ret = is_yes;
            return 0;
        }
    }
    return bad(err, text, "a yes or no", "write yes or no");
}

static int parse_enum(const char *choices, const char *text, int *ret, struct error *err)
{
    size_t len = strlen(text);
    int i = 0;

    for (const char *c = choices;; i++) {
        size_t n = strcspn(c, "|");
        if (n == len && !strncmp(c, text, n)) {
            *ret = i;
            return 0;
        }
        if (!c[n])
            break;
        c += n + 1;
    }
    return error_set(err, EINVAL, "\"%.100s\" is not one of %s", text, choices);
}

/* A list's items are expanded one by one; empty items are dropped. */
static int parse_paths(const char *text, char ***ret, struct error *err)
{
    union value v = {.list = x_alloc(sizeof(char *))};
    size_t n = 0;

    while (*text) {
        size_t len = strcspn(text, ":");
        if (len) {
            _cleanup_free_ char *item = x_strndup(text, len);
            char *path;
            int r = value_expand(item, &path, err);
            if (r < 0) {
                value_free(VALUE_PATHS, &v);
                return r;
            }
            v.list = x_realloc(v.list, (n + 2) * sizeof(char *));
            v.list[n++] = path;
            v.list[n] = NULL;
        }
        text += len + (text[len] == ':');
    }
    *ret = v.list;
    return 0;
}

/* -1, 0 or 1 as a is smaller, equal or greater; by the type's signedness. */
static int compare(enum value_type type, const union value *a, const union value *b)
{
    if (type == VALUE_INT)
        return (a->i > b->i) - (a->i < b->i);
    if (type == VALUE_REAL)
        return (a->r > b->r) - (a->r < b->r);
    return (a->u > b->u) - (a->u < b->u);
}

static int parse_number(enum value_type type, const char *text, union value *ret, struct error *err)
{
    switch (type) {
    case VALUE_INT:
        return read_int(text, &ret->i) ? 0 : bad(err, text, "a number", "write a decimal number");
    case VALUE_REAL:
        return read_real(text, &ret->r) ? 0 : bad(err, text, "a number", "write 0.7, 1 or 1e-3");
    case VALUE_BYTES:
        return read_scaled(text, byte_units, ARRAY_LEN(byte_units), &ret->u)
                   ? 0
                   : bad(err, text, "a size", "write 1048576, 512KiB, 64MiB or 2GiB");
    default:
        return read_scaled(text, time_units, ARRAY_LEN(time_units), &ret->u)
                   ? 0
                   : bad(err, text, "a time", "write 250ms, 30s, 5m or 1h");
    }
}

static int check_range(enum value_type type, const char *limits, const char *text,
                       const union value *v, struct error *err)
{
    const char *dots = limits ? strstr(limits, "..") : NULL;
    if (!dots)
        return 0;
    _cleanup_free_ char *low = x_strndup(limits, (size_t)(dots - limits));
    const char *high = dots + 2;
    union value bound;
    if (*low && !parse_number(type, low, &bound, NULL) && compare(type, v, &bound) < 0)
        return error_set(err, EINVAL, "%s is too small: at least %s", text, low);
    if (*high && !parse_number(type, high, &bound, NULL) && compare(type, v, &bound) > 0)
        return error_set(err, EINVAL, "%s is too large: at most %s", text, high);
    return 0;
}

int value_parse(enum value_type type, const char *limits, const char *text, union value *ret,
                struct error *err)
{
    union value v = {0};
    int r = 0;

    switch (type) {
    case VALUE_BOOL:
        r = parse_bool(text, &v.b, err);
        break;
    case VALUE_INT:
    case VALUE_REAL:
    case VALUE_BYTES:
    case VALUE_DURATION:
        r = parse_number(type, text, &v, err);
        if (!r)
            r = check_range(type, limits, text, &v, err);
        break;
    case VALUE_STRING:
        v.s = x_strdup(text);
        break;
    case VALUE_PATH:
        r = value_expand(text, &v.s, err);
        break;
    case VALUE_PATHS:
        r = parse_paths(text, &v.list, err);
        break;
    case VALUE_ENUM:
        r = parse_enum(limits, text, &v.choice, err);
        break;
    }
    if (!r)
        *ret = v;
    return r;
}

void value_free(enum value_type type, union value *v)
{
    if (type == VALUE_STRING || type == VALUE_PATH)
        free(v->s);
    if (type == VALUE_PATHS && v->list) {
        for (char **p = v->list; *p; p++)
            free(*p);
        free(v->list);
    }
    *v = (union value){0};
}

static void print_scaled(const struct unit *units, size_t n, uint64_t value, struct buffer *out)
{
    size_t i = 0;

    while (i + 1 < n && (!value || value % units[i].factor))
        i++;
    buffer_printf(out, "%" PRIu64 "%s", value / units[i].factor, value ? units[i].suffix : "");
}

/* The fewest digits that read back as the same number. */
static void print_real(double value, struct buffer *out)
{
    char text[32];

    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value)
            break;
    }
    buffer_printf(out, "%s", text);
}

/* Percent signs are doubled, so that what is printed reads back as itself. */
static void print_path(const char *path, struct buffer *out)
{
    for (; *path; path++)
        buffer_printf(out, *path == '%' ? "%%%%" : "%c", *path);
}

void value_print(enum value_type type, const char *limits, const union value *v, struct buffer *out)
{
    switch (type) {
    case VALUE_BOOL:
        buffer_printf(out, "%s", v->b ? "yes" : "no");
        break;
    case VALUE_INT:
        buffer_printf(out, "%" PRId64, v->i);
        break;
    case VALUE_REAL:
        print_real(v->r, out);
        break;
    case VALUE_BYTES:
        print_scaled(byte_units, 5, v->u, out); /* the canonical spellings come first */
        break;
    case VALUE_DURATION:
        print_scaled(time_units, ARRAY_LEN(time_units), v->u, out);
        break;
    case VALUE_STRING:
        buffer_printf(out, "%s", v->s ? v->s : "");
        break;
    case VALUE_PATH:
        print_path(v->s ? v->s : "", out);
        break;
    case VALUE_PATHS:
        for (char **p = v->list; p && *p; p++) {
            buffer_printf(out, "%s", p == v->list ? "" : ":");
            print_path(*p, out);
        }
        break;
    case VALUE_ENUM: {
        const char *c = limits;
        for (int i = 0; i < v->choice; i++)
            c += strcspn(c, "|") + 1;
        buffer_append(out, c, strcspn(c, "|"));
        break;
    }
    }
}

size_t value_size(enum value_type type)
{
    static const size_t sizes[] = {
#define X(t, ctype, word) [VALUE_##t] = sizeof(ctype),
        VALUE_TYPES(X)
#undef X
    };
    return sizes[type];
}

const char *value_word(enum value_type type, const char *limits)
{
    static const char *const words[] = {
#define X(t, ctype, word) [VALUE_##t] = word,
        VALUE_TYPES(X)
#undef X
    };
    return type == VALUE_ENUM && limits ? limits : words[type];
}

/* The parent of the first folder in systemd's variable (RUNTIME_DIRECTORY=/run/emberd → /run). */
static bool append_parent(const char *variable, struct buffer *out)
{
    const char *list = getenv(variable);
    if (!list || *list != '/')
        return false;
    size_t len = strcspn(list, ":");
    while (len > 1 && list[len - 1] != '/')
        len--;
    buffer_append(out, list, len > 1 ? len - 1 : len);
    return true;
}

/*
 * /run/user/UID is a login session's: logind sets the variable for each login, root's too, su
 * leaves it to another user, and the folder goes with the session. So for root it is nobody's
 * choice.
 */
static bool chosen_runtime(const char *xdg)
{
    return xdg && *xdg == '/' && (geteuid() != 0 || strncmp(xdg, "/run/user/", 10));
}

static void append_runtime(struct buffer *out)
{
    const char *xdg = getenv("XDG_RUNTIME_DIR");

    if (append_parent("RUNTIME_DIRECTORY", out))
        return;
    if (chosen_runtime(xdg))
        buffer_printf(out, "%s", xdg);
    else if (geteuid() == 0)
        buffer_printf(out, "/run");
    else
        buffer_printf(out, "/tmp/emberd-%u", (unsigned)geteuid());
}

static void append_cache(struct buffer *out)
{
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");

    if (append_parent("CACHE_DIRECTORY", out))
        return;
    if (xdg && *xdg == '/')
        buffer_printf(out, "%s", xdg);
    else if (geteuid() == 0)
        buffer_printf(out, "/var/cache");
    else if (home && *home == '/')
        buffer_printf(out, "%s/.cache", home);
    else
        buffer_printf(out, "/tmp/emberd-%u", (unsigned)geteuid());
}

/* The folder `up` from this program's own, when the program's data is in it. */
static bool append_beside(const char *up, struct buffer *out)
{
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);

    if (n <= 0)
        return false;
    self[n] = 0;
    self[strrchr(self, '/') - self] = 0;
    _cleanup_free_ char *dir = x_printf("%s/%s", self, up);
    _cleanup_free_ char *whole = realpath(dir, NULL);
    _cleanup_free_ char *model = x_printf("%s/models/ember-tiny", whole ? whole : "");
    if (!whole || access(model, F_OK) < 0)
        return false;
    buffer_printf(out, "%s", whole);
    return true;
}

/* Where the program lies decides: a tree that was installed elsewhere, or moved, has its own. */
static void append_data(struct buffer *out)
{
    const char *dir = getenv("EMBER_DATADIR");

    if (dir && *dir == '/') {
        buffer_printf(out, "%s", dir);
        return;
    }
    if (append_beside("../share/emberd", out) || append_beside("../../..", out))
        return;
#ifdef SOURCE_ROOT
    if (access(EMBER_DATADIR, F_OK) < 0) {
        buffer_printf(out, "%s", SOURCE_ROOT);
        return;
    }
#endif
    buffer_printf(out, "%s", EMBER_DATADIR);
}

int value_expand(const char *text, char **ret, struct error *err)
{
    struct buffer out = {0};
    const char *home = getenv("HOME"), *p = text;

    if (p[0] == '~' && p[1] == '/' && home) {
        buffer_printf(&out, "%s", home);
        p++;
    }
    for (; *p; p++) {
        if (*p != '%') {
            buffer_append(&out, p, 1);
            continue;
        }
        switch (*++p) {
        case 't':
            append_runtime(&out);
            break;
        case 'C':
            append_cache(&out);
            break;
        case 'D':
            append_data(&out);
            break;
        case '%':
            buffer_append(&out, "%", 1);
            break;
        default:
            buffer_free(&out);
            return bad(err, text, "a path", "after % comes t, C, D or another %");
        }
    }
    *ret = out.data ? out.data : x_strdup("");
    return 0;
}

/* Edit distance with swaps of neighbours, of words shorter than WORD_MAX; three rolling rows. */
#define WORD_MAX 64
static unsigned edits(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b);
    unsigned rows[3][WORD_MAX + 1];
    unsigned *two = rows[0], *one = rows[1], *now = rows[2];

    if (n > WORD_MAX || m > WORD_MAX)
        return UINT_MAX;
    for (size_t j = 0; j <= m; j++)
        one[j] = (unsigned)j;
    for (size_t i = 1; i <= n; i++) {
        now[0] = (unsigned)i;
        for (size_t j = 1; j <= m; j++) {
            unsigned best = one[j - 1] + (a[i - 1] != b[j - 1]);
            best = MIN(best, MIN(one[j], now[j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                best = MIN(best, two[j - 2] + 1);
            now[j] = best;
        }
        unsigned *spare = two;
        two = one;
        one = now;
        now = spare;
    }
    return one[m];
}

const char *value_nearest(const char *word, const char *(*next)(const void *context, size_t i),
                          const void *context)
{
    const char *best = NULL, *candidate;
    unsigned limit = MAX(1u, (unsigned)strlen(word) / 3);

    for (size_t i = 0; (candidate = next(context, i)); i++) {
        unsigned d = edits(word, candidate);
        if (d < limit || (d == limit && !best)) {
            limit = d;
            best = candidate;
        }
    }
    return best;
}
