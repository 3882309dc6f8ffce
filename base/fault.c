/* SPDX-License-Identifier: Apache-2.0 */
#include "base/fault.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const names[FAULT_COUNT] = {
#define X(id, name) name,
    FAULT_POINTS(X)
#undef X
};

/* All of it atomic: tests arm points anew while threads of an engine pass them. */
static struct {
    atomic_bool set, kill;
    atomic_ulong nth, passed;
} points[FAULT_COUNT];

atomic_bool fault_armed;

static void arm(const char *item, size_t len)
{
    const char *colon = memchr(item, ':', len);
    size_t name_len = colon ? (size_t)(colon - item) : len;

    for (int i = 0; i < FAULT_COUNT; i++) {
        if (strlen(names[i]) != name_len || memcmp(names[i], item, name_len))
            continue;
        points[i].nth = colon ? strtoul(colon + 1, NULL, 10) : 0;
        points[i].kill = memmem(item, len, "=kill", 5) != NULL;
        points[i].set = true; /* last, so that who sees it sees which passage is meant */
        fault_armed = true;
    }
}

__attribute__((constructor)) void fault_init(void)
{
    const char *spec = getenv("EMBER_FAULT");

    fault_armed = false;
    for (int i = 0; i < FAULT_COUNT; i++) {
        points[i].set = false;
        points[i].passed = 0;
    }
    while (spec && *spec) {
        size_t len = strcspn(spec, ",");
        arm(spec, len);
        spec += len + (spec[len] == ',');
    }
}

bool fault_hit_slow(enum fault_point point)
{
    if (!points[point].set)
        return false;
    unsigned long passage = ++points[point].passed, nth = points[point].nth;
    if (nth && passage != nth)
        return false;
    if (points[point].kill)
        kill(getpid(), SIGKILL);
    return true;
}
