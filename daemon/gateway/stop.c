/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/stop.h"

#include <string.h>

static void append(struct buffer *out, const char *bytes, size_t n)
{
    if (buffer_append(out, bytes, n) < 0)
        abort();
}

void stop_free(struct stop *stop)
{
    buffer_free(&stop->held);
}

/* The match that ends first; true and where it begins. */
static bool find(const struct buffer *text, const struct stop_set *set, size_t *ret_at,
                 size_t *ret_which)
{
    size_t best_end = SIZE_MAX, best_at = 0;

    for (size_t i = 0; i < set->n; i++) {
        const char *p = memmem(text->data, text->len, set->strings[i], set->lens[i]);
        size_t at = p ? (size_t)(p - text->data) : 0, end = at + set->lens[i];
        if (!p || end > best_end || (end == best_end && at >= best_at))
            continue;
        best_end = end;
        best_at = at;
        *ret_which = i;
    }
    *ret_at = best_at;
    return best_end != SIZE_MAX;
}

/* Length of the longest end of the text that begins a stop string. */
static size_t beginning(const struct buffer *text, const struct stop_set *set)
{
    size_t longest = 0;

    for (size_t i = 0; i < set->n; i++) {
        size_t most = MIN(text->len, set->lens[i] - 1);
        for (size_t n = most; n > longest; n--) {
            if (!memcmp(text->data + text->len - n, set->strings[i], n)) {
                longest = n;
                break;
            }
        }
    }
    return longest;
}

bool stop_push(struct stop *stop, const struct stop_set *set, const char *text, size_t len,
               bool include, struct buffer *out, size_t *ret_which)
{
    struct buffer *held = &stop->held;
    size_t at;

    if (!set->n) {
        append(out, text, len);
        return false;
    }
    append(held, text, len);
    if (!held->len)
        return false;
    if (find(held, set, &at, ret_which)) {
        append(out, held->data, include ? at + set->lens[*ret_which] : at);
        held->len = 0;
        return true;
    }
    size_t keep = beginning(held, set), go = held->len - keep;
    append(out, held->data, go);
    memmove(held->data, held->data + go, keep);
    held->len = keep;
    return false;
}

void stop_finish(struct stop *stop, struct buffer *out)
{
    append(out, stop->held.data ? stop->held.data : "", stop->held.len);
    stop->held.len = 0;
}
