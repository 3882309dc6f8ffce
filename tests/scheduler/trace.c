/* SPDX-License-Identifier: Apache-2.0 */
/* Arrival traces, made or read. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "sim.h"

static uint32_t between(uint64_t *random, uint32_t low, uint32_t high)
{
    return low + (high > low ? (uint32_t)(sim_random(random) % (high - low + 1)) : 0);
}

struct sim_request *sim_trace(const struct sim_shape *shape)
{
    struct sim_request *requests = x_alloc((shape->n + 1) * sizeof *requests);
    uint64_t random = shape->seed;
    double at = 0;

    for (uint32_t i = 0; i < shape->n; i++) {
        struct sim_request *r = &requests[i];
        if (shape->rate > 0)
            at += -log(1 - sim_uniform(&random)) / shape->rate * 1e9;
        r->at = (uint64_t)at;
        r->client = between(&random, 1, MAX(shape->clients, 1));
        r->n_prompt = between(&random, MAX(shape->prompt_min, 1), shape->prompt_max);
        r->max_tokens = between(&random, shape->output_min, shape->output_max);
        if (shape->groups) {
            r->group = between(&random, 1, shape->groups);
            r->shared = MIN(shape->shared, r->n_prompt);
        }
    }
    return requests;
}

static int by_time(const void *a, const void *b)
{
    const struct sim_request *x = a, *y = b;
    return (x->at > y->at) - (x->at < y->at);
}

static int parse_line(const char *line, struct sim_request *ret)
{
    double at_ms;
    unsigned long long client;
    struct sim_request r = {0};
    int n = sscanf(line, "%lf %llu %u %u %u %u", &at_ms, &client, &r.n_prompt, &r.max_tokens,
                   &r.group, &r.shared);

    if ((n != 4 && n != 6) || !(at_ms >= 0 && at_ms < 1e12) || !r.n_prompt ||
        r.n_prompt > 1u << 24 || r.max_tokens > 1u << 24)
        return -EBADMSG;
    r.at = (uint64_t)(at_ms * 1e6);
    r.client = client;
    r.shared = MIN(r.shared, r.n_prompt);
    *ret = r;
    return 0;
}

int sim_trace_read(const char *path, struct sim_request **ret, size_t *ret_n, struct error *err)
{
    FILE *file = fopen(path, "re");
    struct sim_request *requests = NULL;
    size_t n = 0, cap = 0;
    char line[256];
    int rc = 0;

    if (!file)
        return error_sys(err, errno, "%s", path);
    for (int number = 1; !rc && fgets(line, sizeof line, file); number++) {
        if (line[strspn(line, " \t\r\n")] == '\0' || line[0] == '#')
            continue;
        if (n == cap) {
            cap = cap * 2 + 64;
            requests = x_realloc(requests, cap * sizeof *requests);
        }
        if (parse_line(line, &requests[n++]) < 0)
            rc = error_set(err, EBADMSG,
                           "%s:%d: wanted: at_ms client n_prompt max_tokens [group shared]", path,
                           number);
    }
    fclose(file);
    if (rc < 0) {
        free(requests);
        return rc;
    }
    if (n)
        qsort(requests, n, sizeof *requests, by_time);
    *ret = requests;
    *ret_n = n;
    return 0;
}
