/* SPDX-License-Identifier: Apache-2.0 */
/* The gateway's workers, as it uses them: bodies parsed, chats rendered and tokenized by many
 * threads over one model's text, while the loop goes on. For ThreadSanitizer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <event2/event.h>
#include <string.h>

#include "base/mem.h"
#include "daemon/gateway/openai.h"
#include "daemon/gateway/text.h"
#include "daemon/gateway/work.h"

#define JOBS 64
#define TURNS 6
#define THREADS 6

static const char *const bodies[] = {
    "{\"prompt\":\"Once upon a time there was a king\",\"max_tokens\":4,\"stop\":[\"x\"]}",
    "{\"messages\":[{\"role\":\"user\",\"content\":\"Who are you?\"}],\"logit_bias\":{\"5\":1}}",
    "{\"prompt\":[\"a\",\"b c d\"],\"n\":2,\"temperature\":0.5}",
    "{\"prompt\":[1,2,3],\"seed\":3}",
    "{\"messages\":[]}",
    "{",
};

struct job {
    struct work work;
    const struct text *text;
    struct fixture *fixture;
    unsigned number, turns;
    size_t n_ids;
    int result;
};

/* What the gateway does on a worker once a model's text is in use. */
struct settling {
    struct work work;
    struct text *text;
    bool over;
};

struct fixture {
    struct settling settling;
    struct text *text;
    struct event_base *base;
    struct work_pool *pool;
    struct job jobs[JOBS];
    unsigned open;
};

static void run(struct work *work)
{
    struct job *job = (struct job *)work;
    const char *body = bodies[job->number % ARRAY_LEN(bodies)];
    enum api_kind kind = strstr(body, "messages") ? API_CHAT : API_COMPLETION;
    struct api_request request;
    struct api_error fail;

    job->n_ids = 0;
    job->result = api_parse(kind, body, strlen(body), &request, &fail);
    if (job->result < 0)
        return;
    job->result = text_prepare(job->text, &request, &fail);
    for (size_t i = 0; i < request.n_prompts; i++)
        job->n_ids += request.prompts[i].n_ids;
    api_request_free(&request);
}

/* On the loop: the same body gives the same tokens, whoever worked on it. */
static void done(struct work *work)
{
    static const size_t want[] = {0, 12, 0, 3, 0, 0}; /* 0: not counted here */
    struct job *job = (struct job *)work;
    unsigned which = job->number % ARRAY_LEN(bodies);

    assert_int_equal(job->result < 0, which >= 4);
    if (want[which])
        assert_int_equal(job->n_ids, want[which]);
    if (++job->turns < TURNS)
        work_submit(job->fixture->pool, &job->work);
    else if (!--job->fixture->open)
        event_base_loopbreak(job->fixture->base);
}

static void run_settle(struct work *work)
{
    text_settle(((struct settling *)work)->text);
}

static void settled(struct work *work)
{
    ((struct settling *)work)->over = true;
}

static struct fixture *begin(void)
{
    struct fixture *f = x_alloc(sizeof *f);
    struct error err = {0};

    *f = (struct fixture){.base = event_base_new(), .open = JOBS};
    assert_int_equal(text_load(EMBER_TINY, NULL, &f->text, &err), 0);
    assert_int_equal(work_pool_new(f->base, THREADS, &f->pool, &err), 0);
    return f;
}

static void submit(struct fixture *f, unsigned number, unsigned turns)
{
    f->jobs[number] = (struct job){.work = {.run = run, .done = done},
                                   .text = f->text,
                                   .fixture = f,
                                   .number = number,
                                   .turns = turns};
    work_submit(f->pool, &f->jobs[number].work);
}

static void end(struct fixture *f)
{
    work_pool_free(f->pool);
    text_free(f->text);
    event_base_free(f->base);
    free(f);
}

static void many_at_once(void **state)
{
    struct fixture *f = begin();

    f->settling = (struct settling){.work = {.run = run_settle, .done = settled}, .text = f->text};
    for (unsigned i = 0; i < JOBS; i++) {
        submit(f, i, 0);
        if (i == JOBS / 2)
            work_submit(f->pool, &f->settling.work);
    }
    event_base_dispatch(f->base);
    assert_int_equal(f->open, 0);
    assert_true(f->settling.over);
    end(f);
}

/* The pool ends while there is work: what was begun is done, its `done` is called once. */
static void ends_while_working(void **state)
{
    for (int turn = 0; turn < 20; turn++) {
        struct fixture *f = begin();

        for (unsigned i = 0; i < JOBS; i++)
            submit(f, i, TURNS);
        end(f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_at_once),
        cmocka_unit_test(ends_while_working),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
