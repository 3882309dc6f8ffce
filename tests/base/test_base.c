/* SPDX-License-Identifier: Apache-2.0 */
/* errors, sizes and buffers, descriptors and their passing, digests, fault points, log lines. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/digest.h"
#include "base/error.h"
#include "base/fault.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/utf8.h"

static void test_error(void **state)
{
    struct error err = {0};

    assert_int_equal(error_set(&err, EBADMSG, "shard %d", 7), -EBADMSG);
    assert_int_equal(err.code, -EBADMSG);
    assert_int_equal(error_prefix(&err, "model %s", "m"), -EBADMSG);
    assert_string_equal(err.text, "model m: shard 7");
    assert_int_equal(error_sys(&err, ENOENT, "/x"), -ENOENT);
    assert_string_equal(err.text, "/x: No such file or directory");
    assert_int_equal(error_set(NULL, EIO, "x"), -EIO);
    assert_int_equal(error_sys(NULL, EIO, "x"), -EIO);
    assert_non_null(error_text(NULL));
    err = (struct error){.code = -EPIPE};
    assert_string_equal(error_text(&err), strerror(EPIPE));

    char wide[2 * ERROR_TEXT_MAX];
    memset(wide, 'w', sizeof wide - 1);
    wide[sizeof wide - 1] = 0;
    error_set(&err, EIO, "%s", wide);
    assert_int_equal(strlen(err.text), ERROR_TEXT_MAX - 1);
    error_prefix(&err, "%s", wide);
    assert_int_equal(strlen(err.text), ERROR_TEXT_MAX - 1);
    error_sys(&err, EIO, "%s", wide);
    assert_int_equal(strlen(err.text), ERROR_TEXT_MAX - 1);
}

static void test_sizes(void **state)
{
    uint64_t n = 5;

    assert_true(size_add(UINT64_MAX - 1, 1, &n));
    assert_true(n == UINT64_MAX);
    assert_false(size_add(UINT64_MAX, 1, &n));
    assert_false(size_mul(UINT64_C(1) << 32, UINT64_C(1) << 32, &n));
    assert_true(n == UINT64_MAX);
    assert_true(size_mul(UINT64_C(1) << 31, UINT64_C(1) << 32, &n));
    assert_true(n == UINT64_C(1) << 63);
    assert_true(size_align(4097, 4096) == 8192);
    assert_true(size_align(0, 64) == 0);
    assert_true(size_align(UINT64_MAX - 3, 64) == UINT64_MAX);
}

static void test_mem_alloc(void **state)
{
    assert_null(mem_alloc(SIZE_MAX / 2, 3));
    assert_null(mem_alloc(SIZE_MAX, 1));
    _cleanup_free_ char *p = mem_alloc(10, 10);
    for (size_t i = 0; i < 100; i++)
        assert_int_equal(p[i], 0);
    _cleanup_free_ char *none = mem_alloc(0, 8);
    assert_non_null(none);
}

static void test_buffer(void **state)
{
    struct buffer b = {0};

    assert_int_equal(buffer_append(&b, NULL, 0), 0);
    assert_string_equal(b.data, "");
    for (int i = 0; i < 1000; i++)
        assert_int_equal(buffer_printf(&b, "%03d", i), 0);
    assert_int_equal(b.len, 3000);
    assert_memory_equal(b.data + 2997, "999", 4);
    assert_int_equal(buffer_reserve(&b, SIZE_MAX - 2000), -ENOMEM);
    assert_int_equal(b.len, 3000);
    buffer_free(&b);
    buffer_free(&b);
    assert_null(b.data);
}

static void test_take_and_cleanup(void **state)
{
    int fds[2];
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    {
        _cleanup_fd_ int closed = fds[0], kept = fds[1];
        assert_int_equal(TAKE_FD(kept), fds[1]);
        assert_int_equal(kept, -1);
        assert_true(closed >= 0);
    }
    assert_int_equal(fcntl(fds[0], F_GETFD), -1);
    assert_true(fcntl(fds[1], F_GETFD) >= 0);
    errno = EXDEV;
    assert_int_equal(fd_close(fds[1]), -1);
    assert_int_equal(fd_close(-1), -1);
    assert_int_equal(errno, EXDEV);
}

static void test_files(void **state)
{
    char path[] = "/tmp/ember-base-XXXXXX", bytes[8] = "";
    _cleanup_fd_ int fd = mkstemp(path);
    _cleanup_free_ char *text = NULL;
    struct error err;
    size_t len;

    assert_int_equal(fd_write_all(fd, "hello\0you", 9, path, &err), 0);
    assert_int_equal(fd_pread_all(fd, bytes, 3, 6, path, &err), 0);
    assert_string_equal(bytes, "you");
    assert_int_equal(fd_pread_all(fd, bytes, 4, 6, "the shard", &err), -EBADMSG);
    assert_non_null(strstr(err.text, "the shard: ends at byte 9, 1 bytes too early"));
    assert_int_equal(fd_read_file(path, 9, &text, &len, &err), 0);
    assert_int_equal(len, 9);
    assert_memory_equal(text, "hello\0you", 10);
    assert_int_equal(fd_read_file(path, 8, &text, &len, &err), -EFBIG);
    assert_int_equal(fd_read_file("/tmp", 8, &text, &len, &err), -EINVAL);
    assert_int_equal(fd_read_file("/nonexistent", 8, &text, &len, &err), -ENOENT);
    unlink(path);
}

/* How many descriptors this process has. */
static int open_fds(void)
{
    int n = 0;
    for (int fd = 0; fd < 256; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

static void test_fd_passing(void **state)
{
    int s[2], p[2], got[FD_PASS_MAX], before = open_fds();
    size_t n = FD_PASS_MAX;
    char bytes[8];

    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, s), 0);
    assert_int_equal(pipe2(p, O_CLOEXEC), 0);
    assert_int_equal(fd_send(s[0], "abc", 3, p, 2), 0);
    assert_int_equal(fd_recv(s[1], bytes, sizeof bytes, got, &n), 3);
    assert_int_equal(n, 2);
    assert_true(fcntl(got[0], F_GETFD) & FD_CLOEXEC);
    assert_int_equal(write(got[1], "x", 1), 1);
    assert_int_equal(read(p[0], bytes, 1), 1); /* it is the same pipe */
    fd_close(got[0]);
    fd_close(got[1]);

    /* Too long a message, or too many descriptors: refused whole, and nothing leaks. */
    int with_pipe = open_fds();
    assert_int_equal(fd_send(s[0], "123456789", 9, p, 2), 0);
    n = FD_PASS_MAX;
    assert_int_equal(fd_recv(s[1], bytes, sizeof bytes, got, &n), -EMSGSIZE);
    assert_int_equal(n, 0);
    assert_int_equal(fd_send(s[0], "1", 1, p, 2), 0);
    n = 1;
    assert_int_equal(fd_recv(s[1], bytes, sizeof bytes, got, &n), -EMSGSIZE);
    assert_int_equal(n, 0);
    assert_int_equal(open_fds(), with_pipe);
    assert_int_equal(fd_send(s[0], "1", 1, p, FD_PASS_MAX + 1), -EINVAL);

    fd_close(s[0]);
    n = 1;
    assert_int_equal(fd_recv(s[1], bytes, sizeof bytes, got, &n), 0);
    assert_int_equal(fd_send(s[1], "1", 1, NULL, 0), -EPIPE);
    fd_close(s[1]);
    fd_close(p[0]);
    fd_close(p[1]);
    assert_int_equal(open_fds(), before);
}

/* Connecting: whoever listens, nobody, nothing there, a path that no socket can have. */
static void test_fd_connect(void **state)
{
    char dir[] = "/tmp/ember-connect-XXXXXX", path[256], text[16];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct error err = {0};

    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/%0200d", dir, 0);
    assert_int_equal(fd_connect(path, 0, &err), -ENAMETOOLONG);
    snprintf(path, sizeof path, "%s/socket", dir);
    assert_int_equal(fd_connect(path, 0, &err), -ENOENT);
    assert_non_null(strstr(err.text, path));
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    _cleanup_fd_ int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(fd_connect(path, 0, NULL), -ECONNREFUSED);
    assert_int_equal(listen(listener, 1), 0);
    _cleanup_fd_ int fd = fd_connect(path, SOCK_NONBLOCK, &err);
    assert_true(fd >= 0);
    assert_int_equal(read(fd, text, sizeof text), -1);
    assert_int_equal(errno, EAGAIN);
    unlink(path);
    rmdir(dir);
}

static void test_digest(void **state)
{
    char hex[DIGEST_HEX_SIZE];
    struct digest d;

    /* From the specification's reference implementation: xxhsum -H2 and -H3 of nothing. */
    d = digest_of("", 0);
    assert_string_equal(digest_hex(&d, hex), "99aa06d3014798d86001c324468d497f");
    assert_true(checksum_of("", 0) == UINT64_C(0x2d06800538d394c2));

    struct digest whole = digest_of("abcdef", 6);
    struct digest_state *parts = digest_begin();
    digest_update(parts, "abc", 3);
    digest_update(parts, "def", 3);
    d = digest_end(parts);
    assert_true(digest_equal(&d, &whole));

    struct digest two[2];
    for (int i = 0; i < 2; i++) {
        struct digest_state *strings = digest_begin();
        digest_update_string(strings, i ? "a" : "ab");
        digest_update_string(strings, i ? "bc" : "c");
        two[i] = digest_end(strings);
    }
    assert_false(digest_equal(&two[0], &two[1]));
}

static int arm(const char *spec)
{
    if (spec)
        setenv("EMBER_FAULT", spec, 1);
    else
        unsetenv("EMBER_FAULT");
    fault_init();
    return 0;
}

static int disarm(void **state)
{
    return arm(NULL);
}

static void test_fault_points(void **state)
{
    char path[] = "/tmp/ember-base-XXXXXX", byte;
    struct error err;

    arm("alloc:2,read:1,write:0");
    free(mem_alloc(1, 1));
    assert_null(mem_alloc(1, 1));
    free(mem_alloc(1, 1));
    _cleanup_fd_ int fd = mkstemp(path);
    unlink(path);
    assert_int_equal(fd_pread_all(fd, &byte, 1, 0, "f", &err), -EIO);
    assert_int_equal(fd_write_all(fd, "x", 1, "f", &err), -ENOSPC);
    assert_int_equal(fd_write_all(fd, "x", 1, "f", &err), -ENOSPC);
    arm(NULL);
    assert_false(fault_armed);
    assert_int_equal(fd_write_all(fd, "x", 1, "f", &err), 0);
    arm("no-such-point:1");
    assert_false(fault_armed);
}

static void *pass_many(void *arg)
{
    size_t *hits = arg;
    for (int i = 0; i < 1000; i++)
        *hits += fault_hit(FAULT_COMPILE);
    return NULL;
}

static void test_fault_once_among_threads(void **state)
{
    pthread_t threads[4];
    size_t hits[4] = {0};

    arm("compile:1500");
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, pass_many, &hits[i]), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(hits[0] + hits[1] + hits[2] + hits[3], 1);
}

static void *pass_until(void *arg)
{
    atomic_size_t *hits = arg; /* [0] is how many there were, [1] ends it */

    while (!hits[1])
        hits[0] += fault_hit(FAULT_COMPILE);
    return NULL;
}

/* Tests of the engine arm points while its threads run: one hit each time, and no data race. */
static void test_fault_armed_under_threads(void **state)
{
    atomic_size_t hits[2] = {0, 0};
    pthread_t threads[4];

    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, pass_until, hits), 0);
    for (size_t i = 1; i <= 200; i++) {
        arm("compile:1");
        while (hits[0] < i)
            sched_yield();
        assert_int_equal(hits[0], i);
    }
    hits[1] = 1;
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(hits[0], 200);
}

static void test_fault_kill(void **state)
{
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        arm("load-mid:2=kill");
        fault_hit(FAULT_LOAD_MID);
        fault_hit(FAULT_LOAD_MID);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* What one call of log_write puts on stderr. */
#define LOGGED(line, call)                                                                         \
    do {                                                                                           \
        int p_[2], saved_ = dup(STDERR_FILENO);                                                    \
        assert_int_equal(pipe(p_), 0);                                                             \
        dup2(p_[1], STDERR_FILENO);                                                                \
        fd_close(p_[1]);                                                                           \
        call;                                                                                      \
        dup2(saved_, STDERR_FILENO);                                                               \
        fd_close(saved_);                                                                          \
        ssize_t n_ = read(p_[0], line, sizeof line - 1);                                           \
        line[n_ > 0 ? n_ : 0] = 0;                                                                 \
        fd_close(p_[0]);                                                                           \
    } while (0)

static void test_log_lines(void **state)
{
    char line[8192], wide[4000];

    log_init("toyd", LOG_LEVEL_INFO);
    LOGGED(line, log_info("ready", "id=%d", 3));
    assert_string_equal(line, "<6>toyd: ready id=3\n");
    LOGGED(line, log_warn("odd"));
    assert_string_equal(line, "<4>toyd: odd\n");
    LOGGED(line, log_pass("<4>child: said", 14));
    assert_string_equal(line, "<4>child: said\n");
    log_stamp(true);
    LOGGED(line, log_pass("<4>child: said", 14));
    assert_string_equal(line + 24, " warning: child: said\n");
    LOGGED(line, log_info("ready"));
    assert_int_equal(line[10], 'T');
    assert_string_equal(line + 23, "Z toyd: ready\n");
    log_stamp(false);
    LOGGED(line, log_debug("hidden"));
    assert_string_equal(line, "");
    /* A name from outside cannot forge a line of its own. */
    LOGGED(line, log_error("load", "model=%s", "a\n<3>toyd: forged\r\t\x1b[2J"));
    assert_string_equal(line, "<3>toyd: load model=\"a\\n<3>toyd: forged\\r\\t\\u001b[2J\"\n");
    memset(wide, 'w', sizeof wide);
    wide[sizeof wide - 1] = 0;
    LOGGED(line, log_error(wide, "x=%s", wide));
    assert_true(strlen(line) < 2100);
    assert_int_equal(line[strlen(line) - 1], '\n');
}

/* Parsers of logfmt get back what was meant, whatever stands in a value. */
static void test_log_values_are_logfmt(void **state)
{
    char line[8192], wide[4000];

    log_init("toyd", LOG_LEVEL_INFO);
    LOGGED(line, log_warn("no model", "path=%s error=\"%s\" n=%zu", "/m/x", "no \"x\" in C:\\m",
                          (size_t)7));
    assert_string_equal(line,
                        "<4>toyd: no model path=/m/x error=\"no \\\"x\\\" in C:\\\\m\" n=7\n");
    LOGGED(line, log_info("odd", "a=%s b=%s c=%s d=%s e=\"%s\" f=%s.%s", "two words", "x=y", "",
                          "it's", "", "k", "l"));
    assert_string_equal(line, "<6>toyd: odd a=\"two words\" b=\"x=y\" c= d=it's e=\"\" f=k.l\n");
    LOGGED(line,
           log_info("numbers", "a=%d b=%u c=%llu d=%.2f e=%ld f=%x g=%d%% h=\"%.3s\"", -1,
                    4000000000u, 18446744073709551615ull, 2.5, -5000000000l, 255, 50, "abcdef"));
    assert_string_equal(line, "<6>toyd: numbers a=-1 b=4000000000 c=18446744073709551615 d=2.50 "
                              "e=-5000000000 f=ff g=50% h=\"abc\"\n");
    /* What is cut has its quotes closed, wherever the cut falls, and the rest is left out. */
    memset(wide, '"', sizeof wide);
    for (size_t n = 900; n < 1100; n++) {
        wide[n] = 0;
        LOGGED(line, log_info("cut", "why=\"%s\" x=\"%s\" y=%s", wide, wide, "z"));
        wide[n] = '"';
        size_t len = strlen(line), quotes = 0;
        assert_true(len <= 2048);
        assert_int_equal(line[len - 1], '\n');
        for (size_t i = 0; i < len; i++) {
            i += line[i] == '\\';
            quotes += line[i] == '"' && line[i - 1] != '\\';
        }
        assert_int_equal(quotes % 2, 0);
    }
    /* Nothing stands behind a cut, however short it is. */
    memset(wide, 'w', sizeof wide);
    for (size_t n = 1990; n < 2040; n++) {
        wide[n] = 0;
        LOGGED(line, log_info("cut", "a=%s long=\"%s\" b=%s", wide, "\x1b\x1b", ""));
        wide[n] = 'w';
        bool whole = strstr(line, " long=\"\\u001b\\u001b\"");
        assert_true(whole || !strstr(line, " b="));
        assert_true(line[strlen(line) - 2] != ' ');
    }
}

/* Well-formed or not as Unicode 15, table 3-7, has it. */
static void test_utf8(void **state)
{
    static const char *const good[] = {"",
                                       "a",
                                       "\xc2\x80",
                                       "\xdf\xbf",
                                       "\xe0\xa0\x80",
                                       "\xed\x9f\xbf",
                                       "\xee\x80\x80",
                                       "\xf0\x90\x80\x80",
                                       "\xf4\x8f\xbf\xbf",
                                       "a\nb\tc"};
    static const struct {
        const char *bad, *tamed;
    } cases[] = {{"\x80", "?"},
                 {"\xc0\xaf", "??"},
                 {"\xc1\xbf.", "??."},
                 {"\xe0\x9f\xbf", "???"},
                 {"\xed\xa0\x80", "???"},
                 {"\xf0\x8f\xbf\xbf", "????"},
                 {"\xf4\x90\x80\x80", "????"},
                 {"\xf5\x80\x80\x80", "????"},
                 {"a\xff"
                  "b",
                  "a?b"},
                 {"\xe2\x82z", "??z"},
                 {"whole \xe2\x82", "whole "},
                 {"whole \xf0\x9f\x98", "whole "},
                 {"\xc3", ""}};
    char text[64];

    for (size_t i = 0; i < ARRAY_LEN(good); i++) {
        snprintf(text, sizeof text, "%s", good[i]);
        assert_true(utf8_valid(good[i]));
        utf8_tame(text);
        assert_string_equal(text, i == 2 ? "?" : good[i]); /* U+0080 is a control character */
    }
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        snprintf(text, sizeof text, "%s", cases[i].bad);
        assert_false(utf8_valid(cases[i].bad));
        utf8_tame(text);
        assert_string_equal(text, cases[i].tamed);
        assert_true(utf8_valid(text));
    }
    snprintf(text, sizeof text, "%s", "\033[31m\x7f\r\n\t\xc2\x9bm\xc2\xa0");
    utf8_tame(text);
    assert_string_equal(text, "?[31m??\n\t?m\xc2\xa0");
    utf8_tame_line(text);
    assert_string_equal(text, "?[31m?????m\xc2\xa0");
}

/* What a report quotes of a text: around the place, whole characters, nothing that controls. */
static void test_utf8_excerpt(void **state)
{
    static const char text[] = "123456789 123456789 \xc3\xa9\xc3\xa9|\n\033 89 123456789 123456789";
    _cleanup_(buffer_free) struct buffer out = {0};

    utf8_excerpt(&out, "short", 5, 5);
    assert_int_equal(buffer_append(&out, "", 1), 0);
    assert_string_equal(out.data, "\"short\"");
    out.len = 0;
    utf8_excerpt(&out, text, sizeof text - 1,
                 45); /* 24 bytes before it is within the first of two */
    assert_int_equal(buffer_append(&out, "", 1), 0);
    assert_string_equal(out.data, "\"...\xc3\xa9\xc3\xa9|\\n\\x1b 89 123456789 123456789\"");
}

/* A text that is cut is cut between characters; what a file holds commands no terminal. */
static void test_error_text_is_tame(void **state)
{
    struct error err = {0};
    char name[ERROR_TEXT_MAX * 2] = "x";

    for (size_t i = 1; i + 2 < sizeof name; i += 2)
        memcpy(name + i, "\xc3\xa9", 2);
    name[sizeof name - 1] = 0;
    error_set(&err, EINVAL, "%s", name);
    assert_true(utf8_valid(err.text));
    assert_true(strlen(err.text) >= ERROR_TEXT_MAX - 2);
    error_prefix(&err, "%s", name);
    assert_true(utf8_valid(err.text));
    error_sys(&err, ENOENT, "%s", name + 2);
    assert_true(utf8_valid(err.text));
    error_set(&err, EINVAL, "type \033[31m\xff");
    assert_string_equal(err.text, "type ?[31m?");
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_error),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_mem_alloc),
        cmocka_unit_test(test_buffer),
        cmocka_unit_test(test_take_and_cleanup),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_fd_passing),
        cmocka_unit_test(test_fd_connect),
        cmocka_unit_test(test_digest),
        cmocka_unit_test_teardown(test_fault_points, disarm),
        cmocka_unit_test(test_utf8),
        cmocka_unit_test(test_utf8_excerpt),
        cmocka_unit_test(test_error_text_is_tame),
        cmocka_unit_test_teardown(test_fault_once_among_threads, disarm),
        cmocka_unit_test_teardown(test_fault_armed_under_threads, disarm),
        cmocka_unit_test(test_fault_kill),
        cmocka_unit_test(test_log_lines),
        cmocka_unit_test(test_log_values_are_logfmt),
    };
    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
