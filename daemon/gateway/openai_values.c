/* SPDX-License-Identifier: Apache-2.0 */
/* Values of fields, and what is wrong with them. */
#include "daemon/gateway/openai_private.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void parse_bad(struct parse *p, const char *format, ...)
{
    char text[256];
    va_list ap;

    if (p->fail->status)
        return;
    va_start(ap, format);
    vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    p->fail->status = 400;
    snprintf(p->fail->param, sizeof p->fail->param, "%s", p->name);
    error_set(&p->fail->err, EINVAL, "%s: %s", p->name, text);
}

double parse_number(struct parse *p, double min, double max)
{
    double v = json_number_value(p->value);

    if (!json_is_number(p->value))
        parse_bad(p, "expected a number");
    else if (!(v >= min && v <= max))
        parse_bad(p, "%g is not within %g to %g", v, min, max);
    return v;
}

int64_t parse_integer(struct parse *p, int64_t min, int64_t max)
{
    json_int_t v = json_integer_value(p->value);

    if (json_is_real(p->value) && json_real_value(p->value) == floor(json_real_value(p->value)) &&
        fabs(json_real_value(p->value)) < 9e15)
        v = (json_int_t)json_real_value(p->value);
    else if (!json_is_integer(p->value)) {
        parse_bad(p, "expected an integer");
        return min;
    }
    if (v < min || v > max) {
        parse_bad(p, "%lld is not within %lld to %lld", (long long)v, (long long)min,
                  (long long)max);
        return min;
    }
    return v;
}

bool parse_boolean(struct parse *p)
{
    if (!json_is_boolean(p->value))
        parse_bad(p, "expected true or false");
    return json_is_true(p->value);
}

const char *parse_string(struct parse *p)
{
    if (!json_is_string(p->value))
        parse_bad(p, "expected a string");
    return json_string_value(p->value);
}

void parse_ids(struct parse *p, json_t *array, uint32_t **ret, size_t *ret_n)
{
    size_t n = json_array_size(array);

    free(*ret);
    *ret = mem_alloc(n + 1, sizeof **ret);
    *ret_n = *ret ? n : 0;
    if (!*ret)
        parse_bad(p, "no memory for %zu token ids", n);
    for (size_t i = 0; i < *ret_n; i++) {
        json_t *v = json_array_get(array, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > INT32_MAX) {
            parse_bad(p, "element %zu is not a token id", i);
            return;
        }
        (*ret)[i] = (uint32_t)json_integer_value(v);
    }
}
