/* SPDX-License-Identifier: Apache-2.0 */
/* Stop strings, JSON text, requests' fields, beats; and what penalties do to logits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "base/clock.h"
#include "daemon/gateway/beat.h"
#include "daemon/gateway/json.h"
#include "daemon/gateway/openai.h"
#include "daemon/gateway/stop.h"
#include "daemon/gateway/tools.h"
#include "engine/sample.h"

/* ---- stop strings ---- */

/* The definition: the first place, byte by byte, where a stop string ends. */
static bool by_definition(const struct stop_set *set, const char *text, size_t len, size_t *ret_len)
{
    for (size_t end = 1; end <= len; end++) {
        size_t at = SIZE_MAX;
        for (size_t i = 0; i < set->n; i++)
            if (set->lens[i] <= end &&
                !memcmp(text + end - set->lens[i], set->strings[i], set->lens[i]))
                at = MIN(at, end - set->lens[i]);
        if (at == SIZE_MAX)
            continue;
        *ret_len = at;
        return true;
    }
    *ret_len = len;
    return false;
}

static unsigned next(unsigned *seed)
{
    *seed = *seed * 1103515245u + 12345u;
    return *seed >> 16;
}

static void stop_is_its_definition(void **state)
{
    static const char *const strings[] = {"ab", "abc", "bca", "aab", "cc", "b", "ccab"};
    unsigned seed = 1;

    for (int round = 0; round < 20000; round++) {
        const char *chosen[3];
        size_t lens[3], want, which, len = next(&seed) % 20, at = 0;
        struct stop_set set = {chosen, lens, 1 + next(&seed) % 3};
        struct stop stop = {0};
        struct buffer out = {0};
        char text[24];
        bool stopped = false;
        for (size_t i = 0; i < set.n; i++) {
            chosen[i] = strings[next(&seed) % ARRAY_LEN(strings)];
            lens[i] = strlen(chosen[i]);
        }
        for (size_t i = 0; i < len; i++)
            text[i] = (char)('a' + next(&seed) % 3);
        bool expected = by_definition(&set, text, len, &want);
        while (at < len && !stopped) {
            size_t piece = 1 + next(&seed) % 4, n = MIN(piece, len - at);
            stopped = stop_push(&stop, &set, text + at, n, false, &out, &which);
            at += n;
            assert_true(out.len <= want); /* nothing of the stop string has left */
        }
        if (!stopped)
            stop_finish(&stop, &out);
        assert_int_equal(stopped, expected);
        assert_int_equal(out.len, want);
        assert_memory_equal(out.data ? out.data : "", text, want);
        stop_free(&stop);
        buffer_free(&out);
    }
}

/* ---- JSON ---- */

static void string_is(const char *text, size_t len, const char *want)
{
    struct buffer out = {0};

    js_string(&out, text, len);
    assert_string_equal(out.data, want);
    buffer_free(&out);
}

static void strings_are_json(void **state)
{
    string_is("a\"b\\c\n\x01", 7, "\"a\\\"b\\\\c\\n\\u0001\"");
    string_is("\xc3\xa9\xf0\x9f\x98\x80", 6, "\"\xc3\xa9\xf0\x9f\x98\x80\"");
    string_is("\xc3", 1, "\"\xef\xbf\xbd\"");
    string_is("\xed\xa0\x80", 3, "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"");
    string_is("\xc0\x80x", 3, "\"\xef\xbf\xbd\xef\xbf\xbdx\"");
    string_is(NULL, 0, "null");
}

static void floats_read_back(void **state)
{
    unsigned seed = 3;

    for (int i = 0; i < 100000; i++) {
        uint32_t bits = next(&seed) << 16 ^ next(&seed);
        struct buffer out = {0};
        float value;
        memcpy(&value, &bits, sizeof value);
        js_float(&out, value);
        if (isfinite(value))
            assert_true(strtof(out.data, NULL) == value);
        else
            assert_string_equal(out.data, "null");
        buffer_free(&out);
    }
}

/* ---- requests ---- */

static void a_request_is_read(void **state)
{
    static const char body[] =
        "{\"model\":\"m\",\"prompt\":[[1,2],[3]],\"max_tokens\":7,\"n\":2,\"top_k\":-1,"
        "\"stop\":[\"x\",\"yz\"],\"logit_bias\":{\"5\":-1.5},\"seed\":-3,\"logprobs\":0,"
        "\"temperature\":null,\"new_one\":1,\"stream\":true,"
        "\"stream_options\":{\"include_usage\":true}}";
    struct api_request r;
    struct api_error fail;

    assert_int_equal(api_parse(API_COMPLETION, body, strlen(body), &r, &fail), 0);
    assert_int_equal(r.n_prompts, 2);
    assert_int_equal(r.prompts[0].n_ids, 2);
    assert_int_equal(r.prompts[1].ids[0], 3);
    assert_int_equal(r.max_tokens, 7);
    assert_int_equal(r.n_stops, 2);
    assert_int_equal(r.stop_lens[1], 2);
    assert_int_equal(r.sampling.bias_tokens[0], 5);
    assert_true(r.sampling.bias_values[0] == -1.5f);
    assert_true(r.seeded && r.include_usage && r.logprobs == 0 && !(r.set & API_TEMPERATURE));
    assert_int_equal(r.n_unknown, 1);
    assert_string_equal(r.unknown[0], "new_one");
    api_request_free(&r);
    api_request_free(&r);
}

/* Every prefix and every changed byte of a body is refused or read, and freed. */
static void damaged_requests_are_no_harm(void **state)
{
    static const char body[] =
        "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"n\":2,"
        "\"stop\":[\"x\"],\"logit_bias\":{\"5\":1},\"stop_token_ids\":[1,2]}";
    size_t len = sizeof body - 1;
    struct api_request r;
    struct api_error fail;

    for (size_t i = 0; i < len; i++) {
        assert_true(api_parse(API_CHAT, body, i, &r, &fail) < 0);
        assert_int_equal(fail.status, 400);
    }
    for (size_t i = 0; i < len; i++) {
        for (int c = 0; c < 256; c++) {
            char copy[sizeof body];
            memcpy(copy, body, sizeof body);
            copy[i] = (char)c;
            if (api_parse(API_CHAT, copy, len, &r, &fail) == 0)
                api_request_free(&r);
        }
    }
}

/* ---- logits ---- */

static void logits_change_in_order(void **state)
{
    uint32_t history[] = {1, 1, 3, 3, 4}, bias[] = {0, 4}, suppress[] = {5, 900}, counts[6] = {0};
    float values[] = {2, -1}, logits[] = {1, 2, 3, -4, 5, 6};
    struct logits_change c = {.bias_tokens = bias,
                              .bias_values = values,
                              .n_bias = 2,
                              .suppress = suppress,
                              .n_suppress = 2,
                              .repetition = 2,
                              .frequency = 0.5f,
                              .presence = 0.25f,
                              .history = history,
                              .n_history = 5,
                              .n_prompt = 2};

    assert_true(logits_change_any(&c) && logits_change_history(&c));
    assert_int_equal(logits_change_check(&c, 6, NULL), 0);
    logits_change_apply(&c, logits, 6, counts);
    assert_true(logits[0] == 3);                      /* biased */
    assert_true(logits[1] == 1);                      /* in the prompt: repetition alone */
    assert_true(logits[2] == 3);                      /* untouched */
    assert_true(logits[3] == -8 - 2 * 0.5f - 0.25f);  /* generated twice */
    assert_true(logits[4] == (5 - 1) / 2.0f - 0.75f); /* biased, then generated once */
    assert_true(isinf(logits[5]) && logits[5] < 0);   /* suppressed */
    for (int i = 0; i < 6; i++)
        assert_int_equal(counts[i], 0);
    assert_int_equal(logits_change_check(&c, 4, NULL), -EINVAL);
    c.repetition = NAN;
    assert_int_equal(logits_change_check(&c, 6, NULL), -EINVAL);
    assert_false(logits_change_any(&(struct logits_change){.repetition = 1, .n_history = 5}));
}

static void only_what_is_allowed_and_no_bad_runs(void **state)
{
    /* runs: 3; 1 2; 4 1 5; 0 4 1 0, of which the first token is only in the prompt */
    uint32_t history[] = {0, 4, 1}, allowed[] = {2, 5, 0, 2}, counts[6] = {0};
    uint32_t bad[] = {3, 1, 2, 4, 1, 5, 0, 4, 1, 0}, lens[] = {1, 2, 3, 4};
    float logits[] = {1, 2, 3, 4, 5, 6}, again[] = {1, 2, 3, 4, 5, 6};
    struct logits_change c = {.history = history,
                              .n_history = 3,
                              .n_prompt = 1,
                              .bad_tokens = bad,
                              .n_bad_tokens = 10,
                              .bad_lens = lens,
                              .n_bad = 4};

    assert_true(logits_change_any(&c) && logits_change_history(&c));
    assert_int_equal(logits_change_check(&c, 6, NULL), 0);
    logits_change_apply(&c, logits, 6, counts);
    for (int i = 0; i < 6; i++)
        assert_int_equal(isinf(logits[i]) != 0, i == 2 || i == 3 || i == 5);
    c.allowed = allowed;
    c.n_allowed = 4;
    logits_change_apply(&c, again, 6, counts);
    for (int i = 0; i < 6; i++) { /* 2 and 5 would each complete a run */
        assert_int_equal(isinf(again[i]) != 0, i != 0);
        assert_int_equal(counts[i], 0);
    }
    c.n_allowed = 2;
    logits_change_apply(&c, again, 6, counts);
    assert_true(again[2] == 0 && isinf(again[0])); /* none is left: the first */
    assert_int_equal(logits_change_check(&c, 5, NULL), -EINVAL);
    c.n_allowed = 0;
    assert_int_equal(logits_change_check(&c, 5, NULL), -EINVAL);
    c.n_bad_tokens = 9;
    assert_int_equal(logits_change_check(&c, 6, NULL), -EINVAL);
    lens[0] = 0;
    assert_int_equal(logits_change_check(&c, 6, NULL), -EINVAL);
}

/* ---- forced calls ---- */

static void schema_is(const char *tools, const char *name, bool one, const char *want)
{
    json_t *list = json_loads(tools, 0, NULL), *expected = json_loads(want, 0, NULL);

    assert_non_null(list);
    assert_non_null(expected);
    json_t *schema = tools_schema(list, name, one);
    if (!json_equal(schema, expected))
        fail_msg("%s", json_dumps(schema, 0));
    json_decref(schema);
    json_decref(expected);
    json_decref(list);
}

static void calls_as_a_schema(void **state)
{
    static const char tools[] =
        "[{\"function\": {\"name\": \"a\", \"parameters\": {\"properties\": {\"x\": {\"$ref\": "
        "\"#/$defs/d\"}, \"const\": {\"$ref\": \"#\"}, \"$ref\": {\"const\": {\"$ref\": \"#\"}}},"
        " \"$defs\": {\"d\": {\"type\": \"integer\"}}}}}, {\"function\": {\"name\": \"b\"}}]";

    schema_is(tools, "b", false, "{\"type\": \"object\"}");
    schema_is("[{\"function\": {\"name\": \"a\", \"parameters\": {\"$ref\": \"#/$defs/d\", "
              "\"$defs\": {\"d\": {}}}}}]",
              "a", false,
              "{\"type\": \"object\", \"$ref\": \"#/$defs/d\", \"$defs\": {\"d\": {}}}");
    schema_is(
        tools, NULL, true,
        "{\"$defs\": {\"tool0\": {\"type\": \"object\", \"properties\": {\"x\": {\"$ref\": "
        "\"#/$defs/tool0/$defs/d\"}, \"const\": {\"$ref\": \"#/$defs/tool0\"}, \"$ref\": "
        "{\"const\": {\"$ref\": \"#\"}}}, \"$defs\": {\"d\": {\"type\": \"integer\"}}}, "
        "\"tool1\": {\"type\": \"object\"}}, \"type\": \"array\", \"minItems\": 1, "
        "\"maxItems\": 1, \"items\": {\"anyOf\": [{\"type\": \"object\", \"properties\": "
        "{\"name\": {\"const\": \"a\"}, \"parameters\": {\"$ref\": \"#/$defs/tool0\"}}, "
        "\"required\": [\"name\", \"parameters\"], \"additionalProperties\": false}, {\"type\": "
        "\"object\", \"properties\": {\"name\": {\"const\": \"b\"}, \"parameters\": {\"$ref\": "
        "\"#/$defs/tool1\"}}, \"required\": [\"name\", \"parameters\"], "
        "\"additionalProperties\": false}]}}");
}

/* ---- the timer that rides on steps ---- */

#define BEAT_NS UINT64_C(400000000)

struct heart {
    struct event_base *base;
    struct beat *beat;
    int turns, beats;
};

static void on_beat(int fd, short what, void *arg)
{
    struct heart *h = arg;

    h->turns++;
    h->beats += beat_due(h->beat, clock_ns());
    if (h->beats == 3)
        event_base_loopbreak(h->base);
}

static void on_nothing(int fd, short what, void *arg)
{
}

/* A turn that works for longer than half the time before it comes to what is due; and a short one
 * behind it, since only then does libevent look at the clock again. */
static void on_long_turn(int fd, short what, void *arg)
{
    struct timespec pause = {0, BEAT_NS * 3 / 4};
    struct timeval soon = {0, 1000};
    struct heart *h = arg;

    nanosleep(&pause, NULL);
    on_beat(fd, what, arg);
    event_base_once(h->base, -1, EV_TIMEOUT, on_nothing, NULL, &soon);
}

static void on_never(int fd, short what, void *arg)
{
    event_base_loopbreak(arg);
}

static void test_beats_go_on_behind_a_long_turn(void **state)
{
    struct heart h = {.base = event_base_new()};
    struct timeval minute = {60, 0};

    h.beat = beat_new(h.base, BEAT_NS, on_beat, &h);
    struct event *never = event_new(h.base, -1, 0, on_never, h.base);
    event_add(never, &minute);
    event_base_once(h.base, -1, EV_TIMEOUT, on_long_turn, &h, NULL);
    event_base_dispatch(h.base);
    assert_int_equal(h.beats, 3); /* and not the minute's end */
    event_free(never);
    beat_free(h.beat);
    event_base_free(h.base);
}

/* Turns that come all the time do the work in time, and no turn is made beside them. */
static void test_beats_ride_on_turns(void **state)
{
    struct heart h = {.base = event_base_new()};

    h.beat = beat_new(h.base, UINT64_C(3600000000000), on_beat, &h);
    assert_true(beat_due(h.beat, UINT64_C(7200000000000)));
    assert_false(beat_due(h.beat, UINT64_C(7200000000001)));
    assert_false(beat_due(h.beat, UINT64_C(8999999999999)));
    assert_true(beat_due(h.beat, UINT64_C(9000000000000)));
    event_base_loop(h.base, EVLOOP_NONBLOCK);
    assert_int_equal(h.turns, 0);
    beat_free(h.beat);
    event_base_free(h.base);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_beats_go_on_behind_a_long_turn),
        cmocka_unit_test(test_beats_ride_on_turns),
        cmocka_unit_test(stop_is_its_definition),
        cmocka_unit_test(strings_are_json),
        cmocka_unit_test(floats_read_back),
        cmocka_unit_test(a_request_is_read),
        cmocka_unit_test(damaged_requests_are_no_harm),
        cmocka_unit_test(logits_change_in_order),
        cmocka_unit_test(only_what_is_allowed_and_no_bad_runs),
        cmocka_unit_test(calls_as_a_schema),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
