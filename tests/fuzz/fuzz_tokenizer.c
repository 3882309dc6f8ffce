/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tokenizer.json from anywhere, optionally a NUL byte and a text behind it: loading must succeed
 * or fail cleanly, and what loads must encode, decode and survive its own image, damaged too.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void use(const struct tokenizer *t, const char *text, size_t len)
{
    _cleanup_(buffer_free) struct buffer whole = {0}, pieces = {0};
    _cleanup_(detok_freep) struct detok *d = NULL;
    _cleanup_free_ uint32_t *ids = NULL;
    size_t n;
    if (tokenizer_encode(t, text, len, true, &ids, &n, NULL) < 0)
        return;
    if (detok_new(t, false, &d) < 0)
        return;
    for (size_t i = 0; i < n; i++)
        if (detok_push(d, ids[i], &pieces, NULL) < 0)
            return;
    if (detok_finish(d, &pieces, NULL) < 0 || tokenizer_decode(t, ids, n, false, &whole, NULL) < 0)
        return;
    if (whole.len != pieces.len || (whole.len && memcmp(whole.data, pieces.data, whole.len)))
        abort();
}

/* An image with one byte changed is refused, whatever byte it is. */
static void damage(const struct tokenizer *t, size_t at)
{
    const void *image;
    size_t len;
    struct tokenizer *other;
    tokenizer_image(t, &image, &len);
    char *copy = mem_alloc(len, 1);
    if (!copy)
        return;
    memcpy(copy, image, len);
    copy[at % len] ^= 0x40;
    if (tokenizer_map(copy, len, &other, NULL) >= 0)
        abort();
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char sample[] = " Hello, w\xC3\xB6rld!\n<s> 12  \xE2\x96\x81 x\xF0\x9F\x98\x80";
    const uint8_t *end = size ? memchr(data, 0, size) : NULL;
    size_t len = end ? (size_t)(end - data) : size;
    _cleanup_(tokenizer_freep) struct tokenizer *t = NULL;
    if (tokenizer_load_text((const char *)data, len, NULL, 0, &t, NULL) < 0)
        return 0;
    use(t, sample, sizeof sample - 1);
    if (end)
        use(t, (const char *)end + 1, size - len - 1);
    damage(t, size * 131);
    return 0;
}
