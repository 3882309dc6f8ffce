/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/beat.h"

#include <stdlib.h>

#include "base/mem.h"

struct beat {
    struct event *event;
    uint64_t every_ns, last_ns;
};

struct beat *beat_new(struct event_base *base, uint64_t every_ns, event_callback_fn turn, void *arg)
{
    struct beat *beat = x_alloc(sizeof *beat);

    beat->every_ns = every_ns;
    /* Behind a long turn, whose beginning timers are counted from, it may run out too early for
     * anything to be due, and is not put off: so it goes on by itself. */
    beat->event = event_new(base, -1, EV_PERSIST, turn, arg);
    if (beat->event)
        return beat;
    free(beat);
    return NULL;
}

void beat_free(struct beat *beat)
{
    if (!beat)
        return;
    event_free(beat->event);
    free(beat);
}

bool beat_due(struct beat *beat, uint64_t now)
{
    struct timeval every = {(time_t)(beat->every_ns / 1000000000u),
                            (suseconds_t)(beat->every_ns % 1000000000u / 1000)};

    if (now - beat->last_ns < beat->every_ns / 2)
        return false;
    beat->last_ns = now;
    event_add(beat->event, &every);
    return true;
}
