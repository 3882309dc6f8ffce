/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A body from any client: it must parse or be refused with a status, a text and nothing held. The
 * first byte chooses the route.
 */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/gateway/openai.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const struct api_request *r)
{
    if (r->n < 1 || r->n > API_N_MAX || r->n_stops > API_STOPS_MAX || !r->n_prompts ||
        r->n_unknown > API_UNKNOWN_MAX || r->min_tokens > r->max_tokens)
        abort();
    for (size_t i = 0; i < r->n_stops; i++)
        if (!r->stop_lens[i] || r->stop_lens[i] != strnlen(r->stops[i], r->stop_lens[i] + 1))
            if (!memchr(r->stops[i], 0, r->stop_lens[i]))
                abort();
    for (size_t i = 0; i < r->n_prompts && !r->messages; i++)
        if (!r->prompts[i].ids == !r->prompts[i].text)
            abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct api_request request;
    struct api_error fail;

    if (!size)
        return 0;
    int r =
        api_parse((enum api_kind)(data[0] % 4), (const char *)data + 1, size - 1, &request, &fail);
    if (r == 0)
        check(&request);
    else if (r != -EINVAL || fail.status < 400 || !*error_text(&fail.err))
        abort();
    api_request_free(&request);
    api_request_free(&request);
    return 0;
}
