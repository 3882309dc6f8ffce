/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/keys.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <strings.h>

#include "base/fd.h"
#include "base/mem.h"

#define FILE_MAX (1u << 20)

struct keys {
    size_t n;
    char **list;
};

int keys_read(const char *path, struct keys **ret, struct error *err)
{
    _cleanup_free_ char *text = NULL;
    char *save = NULL;
    size_t len, room = 1;

    int r = fd_read_file(path, FILE_MAX, &text, &len, err);
    if (r < 0)
        return error_prefix(err, "api_keys");
    for (size_t i = 0; i < len; i++)
        room += text[i] == '\n';
    struct keys *keys = x_alloc(sizeof *keys);
    keys->list = x_alloc(room * sizeof *keys->list);
    for (char *line = strtok_r(text, "\r\n", &save); line; line = strtok_r(NULL, "\r\n", &save)) {
        line += strspn(line, " \t");
        line[strcspn(line, " \t")] = 0;
        if (*line && *line != '#')
            keys->list[keys->n++] = x_strdup(line);
    }
    explicit_bzero(text, len);
    if (!keys->n) {
        keys_free(keys);
        return error_set(err, EINVAL, "%s: no API key in it: nobody could ask anything", path);
    }
    *ret = keys;
    return 0;
}

void keys_free(struct keys *keys)
{
    if (!keys)
        return;
    for (size_t i = 0; i < keys->n; i++) {
        explicit_bzero(keys->list[i], strlen(keys->list[i]));
        free(keys->list[i]);
    }
    free(keys->list);
    free(keys);
}

static bool same(const char *key, const char *given, size_t n)
{
    size_t len = strlen(key);
    unsigned difference = len != n;

    for (size_t i = 0; i < len; i++)
        difference |= (unsigned char)key[i] ^ (unsigned char)(n ? given[i % n] : 0);
    return !difference;
}

size_t keys_find(const struct keys *keys, const char *header)
{
    size_t found = 0;

    if (!header || strncasecmp(header, "Bearer ", 7))
        return 0;
    header += 7 + strspn(header + 7, " ");
    size_t n = strlen(header);
    for (size_t i = 0; i < keys->n; i++) /* every one, whichever it is */
        found = same(keys->list[i], header, n) ? i + 1 : found;
    return found;
}
