/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/metrics.h"

#include <string.h>

/* The list of a bounds' row is expanded three times: counted, as numbers, as texts. */
#define B(value, text) +1
enum {
#define X(name, list) N_##name = 0 list,
    METRIC_BOUNDS(X, B)
#undef X
};
#undef B
#define B(value, text) value,
static const double values[][HISTOGRAM_MAX - 1] = {
#define X(name, list) {list},
    METRIC_BOUNDS(X, B)
#undef X
};
#undef B
#define B(value, text) text,
static const char *const texts[][HISTOGRAM_MAX - 1] = {
#define X(name, list) {list},
    METRIC_BOUNDS(X, B)
#undef X
};
#undef B

const struct bounds metrics_bounds[] = {
#define B(value, text)
#define X(name, list) [BOUNDS_##name] = {N_##name, values[BOUNDS_##name], texts[BOUNDS_##name]},
    METRIC_BOUNDS(X, B)
#undef X
#undef B
};

void metrics_observe(struct histogram *h, enum metrics_bounds which, double value)
{
    const struct bounds *b = &metrics_bounds[which];
    unsigned i = 0;

    while (i < b->n && value > b->at[i])
        i++;
    h->counts[i]++;
    h->sum += value;
}

void metrics_spawned(struct model_metrics *m, int warmth, double ms)
{
    int i = MAX(warmth - 1, 0); /* the API's COLD is 1 */

    METRICS_OBSERVE(&m->spawn[MIN(i, 3)], spawn, ms / 1e3);
}

void metrics_phase(struct model_metrics *m, const char *name, double ms)
{
    static const char *const names[] = {
#define X(name) #name,
        SPAWN_PHASES(X)
#undef X
    };

    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        if (!strcmp(names[i], name))
            METRICS_OBSERVE(&m->phase[i], spawn, ms / 1e3);
}
