/* SPDX-License-Identifier: Apache-2.0 */
/* The configuration engine over a small table: files, command lines, errors, reload, texts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/config.h"
#include "base/fd.h"

#define TOY_OPTIONS(X)                                                                             \
    X("oven", heat, INT, "180", "50..300", RELOAD, "temperature")                                  \
    X("oven", fan, BOOL, "yes", "", RELOAD, "whether it blows")                                    \
    X("oven", mode, ENUM, "top", "top|bottom|both", RESTART, "which heaters")                      \
    X("time", bake_time, DURATION, "30m", "1s..", RELOAD, "how long")                              \
    X("shelf", tray_size, BYTES, "4KiB", "", RESTART, "room on a tray")                            \
    X("shelf", recipe, PATH, "/r/default", "", RELOAD, "what to do")                               \
    X("shelf", trays, PATHS, "", "", RELOAD, "what goes in")                                       \
    X("shelf", label, STRING, "", "", RELOAD, "a name with a | in it")

struct toy {
    TOY_OPTIONS(CONFIG_MEMBER)
};

static const struct config_key keys[] = {
#define X(...) CONFIG_ROW(struct toy, __VA_ARGS__)
    TOY_OPTIONS(X)
#undef X
};
static const struct config_program program = {
    .name = "toy",
    .version = "1",
    .summary = "bakes",
    .keys = keys,
    .n_keys = ARRAY_LEN(keys),
};

/* Writes a file that goes with the test; its name. */
static const char *write_file(const char *text)
{
    static char path[] = "/tmp/ember-config-XXXXXX";
    static bool made;
    FILE *f;

    if (!made)
        fd_close(mkstemp(path));
    made = true;
    f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, strlen(text), f), strlen(text));
    fclose(f);
    return path;
}

static int remove_file(void **state)
{
    unlink(write_file(""));
    return 0;
}

#define READ(toy, err, ...)                                                                        \
    ({                                                                                             \
        char *args_[] = {"toy", __VA_ARGS__ __VA_OPT__(, ) NULL};                                  \
        config_read(&program, (int)ARRAY_LEN(args_) - 1, args_, toy, err);                         \
    })

static void assert_says(const struct error *err, const char *text)
{
    if (!strstr(err->text, text))
        fail_msg("\"%s\" lacks \"%s\"", err->text, text);
}

static void test_defaults(void **state)
{
    struct toy toy = {0};

    assert_int_equal(READ(&toy, NULL), CONFIG_RUN);
    assert_int_equal(toy.heat, 180);
    assert_true(toy.fan);
    assert_int_equal(toy.mode, 0);
    assert_true(toy.bake_time == UINT64_C(1800000000000));
    assert_int_equal(toy.tray_size, 4096);
    assert_string_equal(toy.recipe, "/r/default");
    assert_null(toy.trays[0]);
    assert_string_equal(toy.label, "");
    config_free(&program, &toy);
    config_free(&program, &toy);
    assert_null(toy.recipe);
}

static void test_file_then_command_line(void **state)
{
    struct toy toy = {0};
    struct error err = {0};
    const char *path = write_file("# comment\n; another\n[oven]\nheat = 200\nmode=both ; inline\n"
                                  "[shelf]\ntrays = /a\ntrays = /b:/c\nlabel = two words\n");
    _cleanup_free_ char *option = x_printf("--config=%s", path);

    assert_int_equal(READ(&toy, &err, "--heat=210", option, "--no-fan", "--bake-time", "5s"), 0);
    assert_int_equal(toy.heat, 210);
    assert_int_equal(toy.mode, 2);
    assert_false(toy.fan);
    assert_true(toy.bake_time == UINT64_C(5000000000));
    assert_string_equal(toy.trays[0], "/a");
    assert_string_equal(toy.trays[1], "/b");
    assert_string_equal(toy.trays[2], "/c");
    assert_null(toy.trays[3]);
    assert_string_equal(toy.label, "two words");

    /* On the command line a list replaces the file's, and adds up with itself. */
    assert_int_equal(READ(&toy, &err, option, "--trays=/x", "--trays", "/y"), 0);
    assert_string_equal(toy.trays[0], "/x");
    assert_string_equal(toy.trays[1], "/y");
    assert_null(toy.trays[2]);
    config_free(&program, &toy);
}

static void assert_file_fails(const char *text, const char *line, const char *saying)
{
    struct toy toy = {0};
    struct error err = {0};
    const char *path = write_file(text);
    _cleanup_free_ char *option = x_printf("--config=%s", path);
    _cleanup_free_ char *place = x_printf("%s:%s", path, line);

    assert_int_equal(READ(&toy, &err, option), -EINVAL);
    assert_says(&err, place);
    assert_says(&err, saying);
    assert_null(toy.recipe);
}

static void test_bad_files(void **state)
{
    assert_file_fails("[oven]\nheat = 999\n", "2", "heat: 999 is too large: at most 300");
    assert_file_fails("[oven]\n\nhaet = 9\n", "3", "did you mean \"heat\"?");
    assert_file_fails("[oven]\nbake_time = 9s\n", "2", "bake_time belongs in [time]");
    assert_file_fails("[even]\nheat = 9\n", "2",
                      "unknown section [even]: there are [oven], [time]");
    assert_file_fails("heat = 9\n", "1", "before the first section");
    assert_file_fails("[oven]\nmode = left\n", "2", "not one of top|bottom|both");
    assert_file_fails("[oven]\nheat = 60\nheat = 70\n", "3", "heat is set for the second time");
    assert_file_fails("[oven]\nheat = 60\n fan = no\n", "3", "an indented line goes on");
    assert_file_fails("[oven]\nheat 60\nfan = maybe\n", "2", "neither [section] nor key");
    assert_file_fails("[oven]\nfan = maybe\nheat 60\n", "2", "yes or no");
    assert_file_fails("[shelf]\nrecipe = /%z\n", "2", "after % comes");

    char text[4096] = "[shelf]\nlabel = ";
    memset(text + strlen(text), 'x', 3000);
    assert_file_fails(text, "2", "too long");

    struct toy toy = {0};
    struct error err;
    assert_int_equal(READ(&toy, &err, "--config=/nonexistent/toy.conf"), -ENOENT);
    assert_says(&err, "/nonexistent/toy.conf");
    assert_int_equal(READ(&toy, &err, "--config"), -EINVAL);
    assert_says(&err, "--config needs a value");
}

static void test_bad_command_lines(void **state)
{
    struct toy toy = {0};
    struct error err;

    assert_int_equal(READ(&toy, &err, "--bake-tiem=3s"), -EINVAL);
    assert_says(&err, "did you mean --bake-time?");
    assert_int_equal(READ(&toy, &err, "--zzz"), -EINVAL);
    assert_says(&err, "--help lists them");
    assert_int_equal(READ(&toy, &err, "--heat"), -EINVAL);
    assert_says(&err, "--heat needs a value: N");
    assert_int_equal(READ(&toy, &err, "--no-heat"), -EINVAL);
    assert_int_equal(READ(&toy, &err, "cake"), -EINVAL);
    assert_says(&err, "unexpected \"cake\"");
    assert_int_equal(READ(&toy, &err, "--mode=both", "--heat=x"), -EINVAL);
    assert_says(&err, "command line: heat: \"x\" is not a number");
}

static void count(const struct config_key *key, void *context)
{
    unsigned *changed = context;
    changed[key->change]++;
}

static void test_reload(void **state)
{
    struct toy toy = {0}, fresh = {0};
    unsigned changed[2] = {0};

    assert_int_equal(READ(&toy, NULL), 0);
    assert_int_equal(
        READ(&fresh, NULL, "--heat=100", "--mode=both", "--recipe=/r/new", "--trays=/t"), 0);
    config_reload(&program, &toy, &fresh, count, changed);
    assert_int_equal(changed[CONFIG_RELOAD], 3);
    assert_int_equal(changed[CONFIG_RESTART], 1);
    config_free(&program, &fresh);
    assert_int_equal(toy.heat, 100);
    assert_int_equal(toy.mode, 0); /* only a restart changes it */
    assert_string_equal(toy.recipe, "/r/new");
    assert_string_equal(toy.trays[0], "/t");
    config_free(&program, &toy);
}

static struct buffer print(enum config_action action, const struct toy *toy)
{
    struct buffer out = {0};
    config_print(&program, action, toy, &out);
    assert_non_null(out.data);
    return out;
}

static void test_shown_configuration_reads_back(void **state)
{
    struct toy toy = {0}, again = {0};

    assert_int_equal(READ(&toy, NULL, "--show-config", "--heat=99", "--no-fan", "--trays=/a:/b",
                          "--bake-time=1500ms", "--recipe=/100%%"),
                     CONFIG_SHOW);
    _cleanup_(buffer_free) struct buffer out = print(CONFIG_SHOW, &toy);
    _cleanup_free_ char *option = x_printf("--config=%s", write_file(out.data));
    assert_int_equal(READ(&again, NULL, option), 0);
    unsigned changed[2] = {0};
    config_reload(&program, &toy, &again, count, changed);
    assert_int_equal(changed[0] + changed[1], 0);
    config_free(&program, &toy);
    config_free(&program, &again);
}

static void test_texts_name_every_key(void **state)
{
    static const enum config_action all[] = {CONFIG_HELP, CONFIG_MARKDOWN, CONFIG_SAMPLE};

    for (size_t i = 0; i < ARRAY_LEN(all); i++) {
        _cleanup_(buffer_free) struct buffer out = print(all[i], NULL);
        for (size_t k = 0; k < ARRAY_LEN(keys); k++) {
            _cleanup_free_ char *name = x_strdup(keys[k].name);
            for (char *p = name; all[i] == CONFIG_HELP && *p; p++)
                *p = *p == '_' ? '-' : *p;
            if (!strstr(out.data, name))
                fail_msg("text %d lacks %s", all[i], name);
        }
    }
    _cleanup_(buffer_free) struct buffer markdown = print(CONFIG_MARKDOWN, NULL);
    assert_non_null(strstr(markdown.data, "a \\| in it"));
    assert_non_null(strstr(markdown.data, "top\\|bottom\\|both"));
    _cleanup_(buffer_free) struct buffer man = print(CONFIG_MAN, NULL);
    assert_non_null(strstr(man.data, ".TP\n\\fB\\-\\-bake\\-time=TIME\\fR\n"));
}

static void test_help_survives_a_broken_file(void **state)
{
    struct config_program broken = program;
    struct toy toy = {0};
    char *args[] = {"toy", "--help", NULL}, *show[] = {"toy", "--show-config", NULL};

    broken.default_file = write_file("[oven]\nheat = hot\n");
    assert_int_equal(config_read(&broken, 2, args, &toy, NULL), CONFIG_HELP);
    assert_int_equal(config_read(&broken, 2, show, &toy, NULL), -EINVAL);
    broken.default_file = "/nonexistent";
    assert_int_equal(config_read(&broken, 2, show, &toy, NULL), CONFIG_SHOW);
    config_free(&broken, &toy);
}

/* A file of the user's own goes before the system's, and --config before both. */
static void test_own_file(void **state)
{
    char home[] = "/tmp/ember-config-XXXXXX", *none[] = {"toy", NULL};
    struct config_program both = program;
    struct toy toy = {0};

    assert_non_null(mkdtemp(home));
    _cleanup_free_ char *own = x_printf("%s/toy.conf", home);
    both.default_file = write_file("[oven]\nheat = 100\n");
    both.own_file = "toy.conf";
    setenv("XDG_CONFIG_HOME", home, 1);
    assert_int_equal(config_read(&both, 1, none, &toy, NULL), CONFIG_RUN);
    assert_int_equal(toy.heat, 100); /* there is none */
    FILE *f = fopen(own, "w");
    fputs("[oven]\nheat = 200\n", f);
    fclose(f);
    assert_int_equal(config_read(&both, 1, none, &toy, NULL), CONFIG_RUN);
    assert_int_equal(toy.heat, 200);
    char *given[] = {"toy", "--config", (char *)both.default_file, NULL};
    assert_int_equal(config_read(&both, 3, given, &toy, NULL), CONFIG_RUN);
    assert_int_equal(toy.heat, 100);
    setenv("XDG_CONFIG_HOME", "/dev/null", 1); /* as a home: users of services have it */
    assert_int_equal(config_read(&both, 1, none, &toy, NULL), CONFIG_RUN);
    assert_int_equal(toy.heat, 100);
    setenv("XDG_CONFIG_HOME", "relative", 1); /* ignored, as the specification wants it */
    setenv("HOME", home, 1);
    assert_int_equal(config_read(&both, 1, none, &toy, NULL), CONFIG_RUN);
    assert_int_equal(toy.heat, 100);
    unsetenv("XDG_CONFIG_HOME");
    _cleanup_free_ char *dot = x_printf("%s/.config", home),
                        *dot_own = x_printf("%s/toy.conf", dot);
    assert_int_equal(mkdir(dot, 0755), 0);
    assert_int_equal(rename(own, dot_own), 0);
    assert_int_equal(config_read(&both, 1, none, &toy, NULL), CONFIG_RUN);
    assert_int_equal(toy.heat, geteuid() ? 200 : 100);
    config_free(&both, &toy);
    unlink(dot_own);
    rmdir(dot);
    rmdir(home);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_file_then_command_line),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_bad_command_lines),
        cmocka_unit_test(test_own_file),
        cmocka_unit_test(test_reload),
        cmocka_unit_test(test_shown_configuration_reads_back),
        cmocka_unit_test(test_texts_name_every_key),
        cmocka_unit_test(test_help_survives_a_broken_file),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, remove_file);
}
