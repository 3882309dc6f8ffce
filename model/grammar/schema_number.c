/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Numbers. Without limits: up to 16 digits, 16 decimals and an exponent of two digits, which every
 * reader's double can hold. With limits: plain decimals, compared digit by digit; so few of them
 * that two different texts are two different doubles, or a reader's comparison might differ.
 */
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/grammar/schema.h"

#define DIGITS_MAX 15 /* that a double tells apart */
#define MULTIPLE_MAX 2000

typedef unsigned __int128 wide;

/* A limit: the value, and whether it is a value that is allowed. */
struct limit {
    bool set, excluded;
    double value;
    json_int_t integer;
    bool is_integer;
};

static double limit_value(const struct limit *l)
{
    return l->is_integer ? (double)l->integer : l->value;
}

static bool tighter(const struct limit *new, const struct limit *old, bool low)
{
    double a = limit_value(new), b = limit_value(old);

    if (!old->set)
        return true;
    if (new->is_integer && old->is_integer &&new->integer != old->integer)
        return low ? new->integer > old->integer : new->integer < old->integer;
    return a == b ? new->excluded && !old->excluded : low ? a > b : a < b;
}

static void take_limit(struct schema *x, const struct conj *c, const char *keyword, bool excluded,
                       bool low, struct limit *l)
{
    const json_t *v;

    for (size_t i = 0; (v = conj_next(c, keyword, &i));) {
        const json_t *s = c->parts[i - 1].s;
        if (json_is_boolean(v) && excluded) { /* draft 4: a flag beside minimum and maximum */
            if (json_is_true(v))
                schema_fail(x, ENOTSUP, s, keyword, "expected a number, as since draft 6");
            continue;
        }
        if (!json_is_number(v)) {
            schema_fail(x, EINVAL, s, keyword, "expected a number");
            continue;
        }
        struct limit new = {.set = true,
                            .excluded = excluded,
                            .value = json_real_value(v),
                            .integer = json_integer_value(v),
                            .is_integer = json_is_integer(v)};
        if (!new.is_integer && fabs(new.value) < 9e15 && new.value == floor(new.value)) {
            new.is_integer = true;
            new.integer = (json_int_t) new.value;
        }
        if (tighter(&new, l, low))
            *l = new;
    }
}

static unsigned count_digits(wide v)
{
    unsigned n = 1;

    for (; v >= 10; v /= 10)
        n++;
    return n;
}

static wide power10(unsigned n)
{
    wide v = 1;

    while (n--)
        v *= 10;
    return v;
}

/* ---- decimals within limits ---- */

/*
 * All texts of `whole` digits before the point and at most `decimals` behind it whose value, times
 * 10^decimals, is within lo .. hi. State: how many digits stand, and whether they are lo's and hi's
 * first ones so far.
 */
struct span {
    struct build *b;
    struct graph *g;
    unsigned whole, digits; /* digits: whole and decimals */
    uint8_t lo[40], hi[40];
};

static uint32_t span_state(unsigned at, bool as_lo, bool as_hi, bool behind_point)
{
    return 2 + ((at * 2 + as_lo) * 2 + as_hi) * 2 + behind_point;
}

/* Whether only zeros of lo are left, so that what is not written is not below it. */
static bool rest_zero(const struct span *s, unsigned at)
{
    for (; at < s->digits; at++)
        if (s->lo[at])
            return false;
    return true;
}

static struct node *digits(struct build *b, unsigned lo, unsigned hi)
{
    return lo > hi ? node_none(b) : node_chars(b, &(struct range){'0' + lo, '0' + hi}, 1, false);
}

static void span_edges(struct span *s, unsigned at, bool as_lo, bool as_hi, bool point)
{
    uint32_t from = span_state(at, as_lo, as_hi, point);
    unsigned lo = as_lo ? s->lo[at] : 0, hi = as_hi ? s->hi[at] : 9;

    if (!point && at >= s->whole && (!as_lo || rest_zero(s, at)))
        graph_edge(s->b, s->g, from, 1, NULL);
    if (at == s->digits)
        return;
    if (at == s->whole && !point) {
        graph_edge(s->b, s->g, from, span_state(at, as_lo, as_hi, true), node_text(s->b, "."));
        return;
    }
    for (unsigned d = lo; d <= hi; d++)
        graph_edge(s->b, s->g, from, span_state(at + 1, as_lo && d == lo, as_hi && d == hi, false),
                   digits(s->b, d, d));
}

static struct node *span(struct build *b, wide lo, wide hi, unsigned whole, unsigned decimals)
{
    struct span s = {.b = b, .whole = whole, .digits = whole + decimals};

    s.g = graph_new(b, span_state(s.digits + 1, false, false, false));
    if (!s.g)
        return node_none(b);
    for (unsigned i = s.digits; i-- > 0; lo /= 10, hi /= 10)
        s.lo[i] = (uint8_t)(lo % 10), s.hi[i] = (uint8_t)(hi % 10);
    graph_edge(b, s.g, 0, span_state(0, true, true, false), NULL);
    for (unsigned at = 0; at <= s.digits; at++)
        for (unsigned i = 0; i < 8; i++)
            span_edges(&s, at, i & 1, i >> 1 & 1, i >> 2);
    return node_graph(b, s.g);
}

/* Values from 0 on, scaled by 10^decimals, of any number of digits. */
static struct node *magnitudes(struct build *b, wide lo, wide hi, unsigned decimals)
{
    wide unit = power10(decimals);
    struct node *all[40];
    size_t n = 0;

    for (unsigned whole = 1; whole <= 20; whole++) {
        wide least = whole == 1 ? 0 : power10(whole - 1) * unit, most = power10(whole) * unit - 1;
        if (MAX(lo, least) <= MIN(hi, most))
            all[n++] = span(b, MAX(lo, least), MIN(hi, most), whole, decimals);
    }
    return node_alt(b, all, n);
}

/* lo .. hi, each with its sign, scaled. */
static struct node *signed_range(struct build *b, __int128 lo, __int128 hi, unsigned decimals)
{
    struct node *above = node_none(b), *below = above;

    if (hi >= 0 && lo <= hi)
        above = magnitudes(b, lo > 0 ? (wide)lo : 0, (wide)hi, decimals);
    if (lo < 0 && lo <= hi)
        below = node_pair(b, node_text(b, "-"),
                          magnitudes(b, hi < 0 ? (wide)-hi : 1, (wide)-lo, decimals));
    return node_either(b, above, below);
}

/* ---- from limits to scaled integers ---- */

/* The decimals that a double is written with, at most `most`. */
static unsigned decimals_of(const struct limit *l, unsigned most)
{
    char text[64];

    if (!l->set || l->is_integer)
        return 0;
    for (unsigned n = 0; n < most; n++) {
        snprintf(text, sizeof text, "%.*f", (int)n, l->value);
        if (strtod(text, NULL) == l->value)
            return n;
    }
    return most;
}

/* The first scaled value that is allowed, going inwards. */
static __int128 scale(const struct limit *l, unsigned decimals, bool low)
{
    char text[128];
    __int128 v = 0;

    if (l->is_integer) {
        v = (__int128)l->integer * (__int128)power10(decimals);
        return l->excluded ? v + (low ? 1 : -1) : v;
    }
    snprintf(text, sizeof text, "%.*f", (int)decimals, l->value);
    for (const char *p = text; *p; p++)
        if (*p >= '0' && *p <= '9')
            v = v * 10 + (*p - '0');
    if (*text == '-')
        v = -v;
    double back = strtod(text, NULL);
    bool outside = low ? back < l->value : back > l->value;
    return outside || (back == l->value && l->excluded) ? v + (low ? 1 : -1) : v;
}

/* Of so many decimals; to the open side as many digits as are left. */
static struct node *with_decimals(struct build *b, const struct limit *min, const struct limit *max,
                                  unsigned whole, unsigned decimals)
{
    __int128 far = (__int128)power10(whole) * (__int128)power10(decimals) - 1;
    __int128 lo = min->set ? scale(min, decimals, true) : -far;
    __int128 hi = max->set ? scale(max, decimals, false) : far;

    return signed_range(b, lo, hi, decimals);
}

static struct node *bounded(struct schema *x, struct limit min, struct limit max, bool integer)
{
    if ((min.set && limit_value(&min) > 1e15) || (max.set && limit_value(&max) < -1e15)) {
        build_fail(x->b, ENOTSUP, "a minimum above 1e15 or a maximum below -1e15 is not supported");
        return node_none(x->b);
    }
    min.set &= limit_value(&min) >= -1e15; /* beyond all that is made */
    max.set &= limit_value(&max) <= 1e15;
    double a = min.set ? fabs(limit_value(&min)) : 0, b = max.set ? fabs(limit_value(&max)) : 0;
    unsigned whole = count_digits((wide)MAX(a, b));
    if (integer)
        return with_decimals(x->b, &min, &max, MAX(whole, 16), 0);
    unsigned room = whole < DIGITS_MAX ? DIGITS_MAX - whole : 0;
    unsigned wanted = MAX(decimals_of(&min, 12), decimals_of(&max, 12));
    unsigned decimals = MAX(MIN(wanted, room), MIN(room, 9));
    struct node *node =
        with_decimals(x->b, &min, &max, MAX(whole, DIGITS_MAX - decimals), decimals);
    for (unsigned d = 3; !(min.set && max.set) && d < decimals; d -= 3) { /* larger, coarser ones */
        node =
            node_either(x->b, node, with_decimals(x->b, &min, &max, MAX(whole, DIGITS_MAX - d), d));
        if (!d)
            break;
    }
    return node;
}

static struct node *unbounded(struct build *b, bool integer)
{
    static const char whole[] = "0|-?[1-9][0-9]{0,15}",
                      all[] = "-?(0|[1-9][0-9]{0,15})(\\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?";
    const char *pattern = integer ? whole : all;

    return regex_node(b, pattern, strlen(pattern), REGEX_WHOLE, false);
}

/* Integers by their remainder: multiples of m. */
static struct node *multiples(struct build *b, uint32_t m)
{
    struct graph *g = graph_new(b, m + 4);

    if (!g)
        return node_none(b);
    graph_edge(b, g, 0, 2, node_text(b, "-"));
    graph_edge(b, g, 0, 2, NULL);
    graph_edge(b, g, 2, 1, node_text(b, "0"));
    for (unsigned d = 1; d <= 9; d++)
        graph_edge(b, g, 2, 4 + d % m, digits(b, d, d));
    for (uint32_t r = 0; r < m; r++)
        for (unsigned d = 0; d <= 9; d++)
            graph_edge(b, g, 4 + r, 4 + (r * 10 + d) % m, digits(b, d, d));
    graph_edge(b, g, 4, 1, NULL);
    return node_graph(b, g);
}

struct node *number_node(struct schema *x, const struct conj *c, bool integer)
{
    struct limit min = {0}, max = {0};
    const json_t *v;
    size_t i = 0;

    take_limit(x, c, "minimum", false, true, &min);
    take_limit(x, c, "exclusiveMinimum", true, true, &min);
    take_limit(x, c, "maximum", false, false, &max);
    take_limit(x, c, "exclusiveMaximum", true, false, &max);
    if (conj_next(c, "multipleOf", &i)) /* of integers only, see below */
        integer = true;
    struct node *node =
        min.set || max.set ? bounded(x, min, max, integer) : unbounded(x->b, integer);
    for (i = 0; (v = conj_next(c, "multipleOf", &i)) && !x->b->failed;) {
        double m = json_number_value(v);
        if (!json_is_number(v) || !(m > 0))
            return schema_fail(x, EINVAL, c->parts[i - 1].s, "multipleOf",
                               "expected a number above 0");
        if (m != floor(m) || m > MULTIPLE_MAX)
            return schema_fail(x, ENOTSUP, c->parts[i - 1].s, "multipleOf",
                               "only integers up to %d are supported", MULTIPLE_MAX);
        if (m > 1)
            node = node_machine(x->b, machine_narrow(x->b, machine_of(x->b, node, NULL, false),
                                                     multiples(x->b, (uint32_t)m), false));
    }
    return node;
}
