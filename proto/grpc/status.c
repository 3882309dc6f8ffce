/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/grpc/status.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"

static const struct {
    const char *name;
    int errnum;
} statuses[] = {
#define X(id, number, name, errnum) [number] = {name, errnum},
    GRPC_STATUSES(X)
#undef X
};

/* Error codes whose status is not simply the reverse of the table above. */
static const struct {
    int errnum;
    enum grpc_status status;
} errors[] = {
    {ENOSPC, GRPC_RESOURCE_EXHAUSTED},
    {EMFILE, GRPC_RESOURCE_EXHAUSTED},
    {ENFILE, GRPC_RESOURCE_EXHAUSTED},
    {ENOBUFS, GRPC_RESOURCE_EXHAUSTED},
    {EDQUOT, GRPC_RESOURCE_EXHAUSTED},
    {EFBIG, GRPC_RESOURCE_EXHAUSTED},
    {EMSGSIZE, GRPC_RESOURCE_EXHAUSTED},
    {EPERM, GRPC_PERMISSION_DENIED},
    {EBUSY, GRPC_UNAVAILABLE},
    {EPIPE, GRPC_UNAVAILABLE},
    {ECONNREFUSED, GRPC_UNAVAILABLE},
    {ECONNRESET, GRPC_UNAVAILABLE},
    {ESHUTDOWN, GRPC_UNAVAILABLE},
    {ESRCH, GRPC_NOT_FOUND},
    {ENODEV, GRPC_NOT_FOUND},
    {ENAMETOOLONG, GRPC_INVALID_ARGUMENT},
    {ENOTDIR, GRPC_INVALID_ARGUMENT},
    {EISDIR, GRPC_INVALID_ARGUMENT},
    {EDOM, GRPC_INVALID_ARGUMENT},
    {EOVERFLOW, GRPC_OUT_OF_RANGE},
    {EILSEQ, GRPC_DATA_LOSS},
    {ENOSYS, GRPC_UNIMPLEMENTED},
    {EIO, GRPC_INTERNAL},
};

const char *grpc_status_name(int status)
{
    return status >= 0 && (size_t)status < ARRAY_LEN(statuses) ? statuses[status].name : "UNKNOWN";
}

enum grpc_status grpc_status_of_error(int code)
{
    if (!code)
        return GRPC_OK;
    for (size_t i = 0; i < ARRAY_LEN(errors); i++)
        if (errors[i].errnum == -code)
            return errors[i].status;
    for (size_t i = 0; i < ARRAY_LEN(statuses); i++)
        if (statuses[i].errnum == -code)
            return (enum grpc_status)i;
    return GRPC_INTERNAL;
}

int grpc_status_to_error(int status)
{
    return status >= 0 && (size_t)status < ARRAY_LEN(statuses) ? -statuses[status].errnum : -EIO;
}

enum grpc_status grpc_status_of_http(int http_status)
{
    switch (http_status) {
    case 400:
        return GRPC_INTERNAL;
    case 401:
        return GRPC_UNAUTHENTICATED;
    case 403:
        return GRPC_PERMISSION_DENIED;
    case 404:
        return GRPC_UNIMPLEMENTED;
    case 429:
    case 502:
    case 503:
    case 504:
        return GRPC_UNAVAILABLE;
    default:
        return GRPC_UNKNOWN;
    }
}

size_t grpc_message_encode(const char *text, char *ret, size_t room)
{
    size_t n = 0;

    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        bool plain = *p >= 0x20 && *p <= 0x7e && *p != '%';
        size_t need = plain ? 1 : 3;
        if (n + need >= room)
            break;
        if (plain)
            ret[n] = (char)*p;
        else
            snprintf(ret + n, 4, "%%%02X", *p);
        n += need;
    }
    ret[n] = 0;
    return n;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

size_t grpc_message_decode(const char *text, size_t len, char *ret, size_t room)
{
    size_t n = 0;

    for (size_t i = 0; i < len && n + 1 < room; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c == '%' && len - i > 2 && hex_digit(text[i + 1]) >= 0 && hex_digit(text[i + 2]) >= 0) {
            c = (unsigned char)(hex_digit(text[i + 1]) << 4 | hex_digit(text[i + 2]));
            i += 2;
        }
        ret[n++] = (char)(c ? c : '?');
    }
    ret[n] = 0;
    return n;
}

int grpc_timeout_parse(const char *text, size_t len, uint64_t *ret_ns)
{
    static const struct {
        char unit;
        uint64_t ns;
    } units[] = {{'n', 1},          {'u', 1000},         {'m', 1000000},
                 {'S', 1000000000}, {'M', 60000000000u}, {'H', 3600000000000u}};
    uint64_t value = 0;

    if (len < 2 || len > 9)
        return -EINVAL;
    for (size_t i = 0; i < len - 1; i++) {
        if (text[i] < '0' || text[i] > '9')
            return -EINVAL;
        value = value * 10 + (uint64_t)(text[i] - '0');
    }
    for (size_t i = 0; i < ARRAY_LEN(units); i++)
        if (units[i].unit == text[len - 1]) {
            if (!size_mul(value, units[i].ns, &value))
                value = UINT64_MAX;
            *ret_ns = value;
            return 0;
        }
    return -EINVAL;
}

void grpc_timeout_format(uint64_t ms, char ret[GRPC_TIMEOUT_TEXT_MAX])
{
    const uint64_t most = 99999999; /* eight digits */
    uint64_t seconds = ms / 1000 + !!(ms % 1000);
    uint64_t hours = seconds / 3600 + !!(seconds % 3600);

    if (ms <= most)
        snprintf(ret, GRPC_TIMEOUT_TEXT_MAX, "%" PRIu64 "m", ms);
    else if (seconds <= most)
        snprintf(ret, GRPC_TIMEOUT_TEXT_MAX, "%" PRIu64 "S", seconds);
    else
        snprintf(ret, GRPC_TIMEOUT_TEXT_MAX, "%" PRIu64 "H", MIN(hours, most));
}
