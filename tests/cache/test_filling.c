/* SPDX-License-Identifier: Apache-2.0 */
/* The page that says how far memory has been filled: order, ends, deaths, what is no such page. */
#include "util.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/filling.h"

static void test_life(void **state)
{
    struct filling *writer = NULL, *reader = NULL;
    struct error err = {0};
    struct digest digest = {{1, 2, 3}}, found;

    assert_int_equal(filling_create(&writer, &err), 0);
    assert_int_equal(filling_attach(filling_fd(writer), &reader, &err), 0);
    assert_int_equal(filling_state(reader), FILLING_GOES_ON);
    assert_int_equal(filling_wait(reader, 0, NULL, NULL, &err), 0);
    filling_advance(writer, 100);
    filling_advance(writer, 50); /* never less than before */
    assert_int_equal(filling_bytes(reader), 100);
    assert_int_equal(filling_wait(reader, 100, NULL, NULL, &err), 0);
    filling_done(writer, &digest);
    filling_fail(writer); /* too late */
    assert_int_equal(filling_state(reader), FILLING_DONE);
    assert_int_equal(filling_wait(reader, UINT64_MAX, NULL, NULL, &err), 0);
    found = filling_digest(reader);
    assert_true(digest_equal(&found, &digest));
    filling_free(writer);
    assert_int_equal(filling_state(reader), FILLING_DONE);
    filling_free(reader);
    filling_free(NULL);
}

static bool at_once(void *ctx)
{
    return true;
}

static void test_ends(void **state)
{
    struct filling *filling = NULL;
    struct error err = {0};

    assert_int_equal(filling_create(&filling, &err), 0);
    filling_advance(filling, 10);
    assert_int_equal(filling_wait(filling, 11, at_once, NULL, &err), -ECANCELED);
    filling_fail(filling);
    assert_int_equal(filling_wait(filling, 11, NULL, NULL, &err), -EPIPE);
    assert_int_equal(filling_wait(filling, 10, NULL, NULL, &err), -EPIPE); /* of no use any more */
    filling_free(filling);
}

static void test_refusals(void **state)
{
    struct filling *filling = NULL;
    struct error err = {0};
    int fd = memfd_create("t", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    assert_int_equal(filling_attach(-1, &filling, &err), -EBADMSG);
    assert_int_equal(ftruncate(fd, 4096), 0);
    assert_int_equal(filling_attach(fd, &filling, &err), -EBADMSG); /* could shrink under us */
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
    assert_int_equal(filling_attach(fd, &filling, &err), -EBADMSG); /* zeros */
    close(fd);
    assert_null(filling);
}

#define STEPS 20000

/* One byte a step, written before it is published: a reader that has waited for it sees it. */
static void test_order(void **state)
{
    uint8_t *data = mmap(NULL, STEPS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct filling *filling = NULL;
    struct error err = {0};
    int status;

    assert_true(data != MAP_FAILED);
    assert_int_equal(filling_create(&filling, &err), 0);
    pid_t pid = fork();
    if (pid == 0) {
        for (uint32_t i = 0; i < STEPS; i++) {
            data[i] = (uint8_t)(i * 7 + 1);
            filling_advance(filling, i + 1);
        }
        _exit(0);
    }
    for (uint32_t i = 0; i < STEPS; i++) {
        assert_int_equal(filling_wait(filling, i + 1, NULL, NULL, &err), 0);
        assert_int_equal(data[i], (uint8_t)(i * 7 + 1));
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    filling_free(filling);
    munmap(data, STEPS);
}

static void *wait_for_all(void *arg)
{
    struct error err = {0};
    return (void *)(intptr_t)filling_wait(arg, UINT64_MAX, NULL, NULL, &err);
}

/* Whoever reaps a loader that was killed wakes those who wait for it. */
static void test_waiters_wake(void **state)
{
    struct filling *filling = NULL;
    struct error err = {0};
    pthread_t threads[4];
    void *result;

    assert_int_equal(filling_create(&filling, &err), 0);
    for (size_t i = 0; i < ARRAY_LEN(threads); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, wait_for_all, filling), 0);
    filling_advance(filling, 5);
    filling_fail(filling);
    for (size_t i = 0; i < ARRAY_LEN(threads); i++) {
        pthread_join(threads[i], &result);
        assert_int_equal((intptr_t)result, -EPIPE);
    }
    filling_free(filling);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_life),         cmocka_unit_test(test_ends),
        cmocka_unit_test(test_order),        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_waiters_wake),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
