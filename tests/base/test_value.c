/* SPDX-License-Identifier: Apache-2.0 */
/* Values as people write them: what is read, what is refused and in which words, and back again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/value.h"

static void assert_reads(enum value_type type, const char *limits, const char *text, uint64_t want)
{
    union value v = {0};
    struct error err = {0};

    if (value_parse(type, limits, text, &v, &err) < 0)
        fail_msg("\"%s\": %s", text, err.text);
    if (type == VALUE_BOOL)
        assert_int_equal(v.b, want);
    else if (type == VALUE_ENUM)
        assert_int_equal(v.choice, want);
    else
        assert_true(v.u == want);
}

static void assert_refuses(enum value_type type, const char *limits, const char *text,
                           const char *saying)
{
    union value v = {.u = 77};
    struct error err = {0};

    assert_int_equal(value_parse(type, limits, text, &v, &err), -EINVAL);
    assert_true(v.u == 77);
    if (!strstr(err.text, saying))
        fail_msg("\"%s\" lacks \"%s\"", err.text, saying);
}

static void test_numbers(void **state)
{
    assert_reads(VALUE_INT, NULL, "-9223372036854775807", (uint64_t)-INT64_MAX);
    assert_refuses(VALUE_INT, NULL, "9223372036854775808", "decimal");
    assert_refuses(VALUE_INT, NULL, "", "decimal");
    assert_refuses(VALUE_INT, NULL, "-", "decimal");
    assert_refuses(VALUE_INT, NULL, "4 ", "decimal");
    assert_refuses(VALUE_INT, "1..9", "10", "at most 9");
    assert_refuses(VALUE_INT, "1..9", "0", "at least 1");
    assert_reads(VALUE_INT, "..9", "-5", (uint64_t)-5);
}

static void test_reals(void **state)
{
    static const struct {
        const char *text;
        double want;
    } good[] = {{"0", 0}, {"0.7", 0.7}, {"-2", -2}, {"1e-3", 1e-3}, {".5", .5}, {"+1.", 1}};
    static const char *const wrong[] = {"",    "warm",  "1,5",   "0.7 ", " 1", "nan",
                                        "inf", "0x1p3", "1e999", "--1",  "1e", "."};

    for (size_t i = 0; i < ARRAY_LEN(good); i++) {
        union value v = {0};
        assert_int_equal(value_parse(VALUE_REAL, NULL, good[i].text, &v, NULL), 0);
        assert_true(v.r == good[i].want);
    }
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++)
        assert_refuses(VALUE_REAL, NULL, wrong[i], "0.7");
    assert_refuses(VALUE_REAL, "0..1", "1.01", "at most 1");
    assert_refuses(VALUE_REAL, "0..", "-0.1", "at least 0");
}

static void test_sizes(void **state)
{
    assert_reads(VALUE_BYTES, NULL, "1048576", MIB);
    assert_reads(VALUE_BYTES, NULL, "3KiB", 3 * KIB);
    assert_reads(VALUE_BYTES, NULL, "2G", 2 * GIB);
    assert_reads(VALUE_BYTES, NULL, "16777215TiB", UINT64_C(16777215) << 40);
    assert_refuses(VALUE_BYTES, NULL, "16777216TiB", "is not a size");
    assert_refuses(VALUE_BYTES, NULL, "1GB", "2GiB");
    assert_refuses(VALUE_BYTES, NULL, "-1", "is not a size");
    assert_refuses(VALUE_BYTES, "1MiB..", "1023KiB", "at least 1MiB");
}

static void test_times(void **state)
{
    assert_reads(VALUE_DURATION, NULL, "250ms", 250000000);
    assert_reads(VALUE_DURATION, NULL, "5m", UINT64_C(300000000000));
    assert_reads(VALUE_DURATION, NULL, "0", 0);
    assert_refuses(VALUE_DURATION, NULL, "30", "30s");
    assert_refuses(VALUE_DURATION, NULL, "30 s", "30s");
    assert_refuses(VALUE_DURATION, NULL, "9999999999h", "is not a time");
    assert_refuses(VALUE_DURATION, "1s..1h", "61m", "at most 1h");
}

static void test_words(void **state)
{
    assert_reads(VALUE_BOOL, NULL, "yes", 1);
    assert_reads(VALUE_BOOL, NULL, "OFF", 0);
    assert_refuses(VALUE_BOOL, NULL, "perhaps", "yes or no");
    assert_reads(VALUE_ENUM, "auto|never", "never", 1);
    assert_refuses(VALUE_ENUM, "auto|never", "aut", "one of auto|never");
    assert_refuses(VALUE_ENUM, "auto|never", "", "one of auto|never");
}

static void test_print_reads_back(void **state)
{
    static const struct {
        enum value_type type;
        const char *limits, *text;
    } cases[] = {
        {VALUE_BOOL, NULL, "yes"},        {VALUE_BOOL, NULL, "no"},
        {VALUE_INT, NULL, "-42"},         {VALUE_BYTES, NULL, "1536MiB"},
        {VALUE_REAL, NULL, "0.7"},        {VALUE_REAL, NULL, "1e-09"},
        {VALUE_REAL, NULL, "123456789"},  {VALUE_REAL, NULL, "-0.1"},
        {VALUE_BYTES, NULL, "0"},         {VALUE_BYTES, NULL, "1025"},
        {VALUE_DURATION, NULL, "90s"},    {VALUE_DURATION, NULL, "0"},
        {VALUE_DURATION, NULL, "2h"},     {VALUE_ENUM, "a|bb|c", "bb"},
        {VALUE_ENUM, "a|bb|c", "c"},      {VALUE_PATHS, NULL, "/a:/b c:/d"},
        {VALUE_PATHS, NULL, ""},          {VALUE_STRING, NULL, "100%"},
        {VALUE_PATH, NULL, "/a/100%%/b"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        _cleanup_(buffer_free) struct buffer out = {0};
        union value v;
        assert_int_equal(value_parse(cases[i].type, cases[i].limits, cases[i].text, &v, NULL), 0);
        value_print(cases[i].type, cases[i].limits, &v, &out);
        assert_string_equal(out.data ? out.data : "", cases[i].text);
        value_free(cases[i].type, &v);
        value_free(cases[i].type, &v);
    }
}

static void assert_expands(const char *text, const char *want)
{
    _cleanup_free_ char *path = NULL;
    assert_int_equal(value_expand(text, &path, NULL), 0);
    assert_string_equal(path, want);
}

static void test_expand(void **state)
{
    struct error err;
    char *path;

    unsetenv("RUNTIME_DIRECTORY");
    unsetenv("CACHE_DIRECTORY");
    setenv("XDG_RUNTIME_DIR", "/run/user/5", 1);
    setenv("XDG_CACHE_HOME", "/h/cache", 1);
    setenv("EMBER_DATADIR", "/data", 1);
    setenv("HOME", "/h", 1);
    assert_expands("%t/x", geteuid() ? "/run/user/5/x" : "/run/x");
    assert_expands("%C/x", "/h/cache/x");
    assert_expands("%D/m", "/data/m");
    assert_expands("~/m%%", "/h/m%");
    assert_expands("/a~/m", "/a~/m");
    setenv("RUNTIME_DIRECTORY", "/srv/run/emberd:/srv/other", 1);
    setenv("CACHE_DIRECTORY", "/emberd", 1);
    assert_expands("%t/emberd/s", "/srv/run/emberd/s");
    assert_expands("%C", "/");
    assert_int_equal(value_expand("/a%x", &path, &err), -EINVAL);
    assert_non_null(strstr(err.text, "after % comes"));
    assert_int_equal(value_expand("/a%", &path, &err), -EINVAL);
    unsetenv("RUNTIME_DIRECTORY");
    unsetenv("CACHE_DIRECTORY");
    unsetenv("EMBER_DATADIR");
    assert_int_equal(value_expand("%D/models/ember-tiny/config.json", &path, &err), 0);
    assert_int_equal(access(path, R_OK), 0); /* installed, or else the source tree */
    free(path);
}

/* What is set wins, for root as well, but for the folder of a login session. */
static void test_folders_of_xdg(void **state)
{
    bool root = geteuid() == 0;

    unsetenv("RUNTIME_DIRECTORY");
    unsetenv("CACHE_DIRECTORY");
    setenv("HOME", "/h", 1);
    setenv("XDG_RUNTIME_DIR", "/srv/t", 1);
    setenv("XDG_CACHE_HOME", "/srv/c", 1);
    assert_expands("%t", "/srv/t");
    assert_expands("%C", "/srv/c");
    setenv("XDG_RUNTIME_DIR", "/run/user/0", 1);
    assert_expands("%t", root ? "/run" : "/run/user/0");
    setenv("XDG_RUNTIME_DIR", "relative", 1); /* not valid: the specification says to ignore it */
    setenv("XDG_CACHE_HOME", "relative", 1);
    _cleanup_free_ char *own = x_printf("/tmp/emberd-%u", (unsigned)geteuid());
    assert_expands("%t", root ? "/run" : own);
    assert_expands("%C", root ? "/var/cache" : "/h/.cache");
    setenv("RUNTIME_DIRECTORY", "/run/emberd", 1); /* systemd's own are more special */
    setenv("CACHE_DIRECTORY", "/var/cache/emberd", 1);
    setenv("XDG_RUNTIME_DIR", "/srv/t", 1);
    setenv("XDG_CACHE_HOME", "/srv/c", 1);
    assert_expands("%t", "/run");
    assert_expands("%C", "/var/cache");
    unsetenv("RUNTIME_DIRECTORY");
    unsetenv("CACHE_DIRECTORY");
}

static const char *next(const void *context, size_t i)
{
    const char *const *words = context;
    return words[i];
}

static void test_nearest(void **state)
{
    static const char *const words[] = {"load", "unload", "models", "spawn", "ps", NULL};

    assert_string_equal(value_nearest("lod", next, words), "load");
    assert_string_equal(value_nearest("laod", next, words), "load");
    assert_string_equal(value_nearest("modles", next, words), "models");
    assert_string_equal(value_nearest("unlaod", next, words), "unload");
    assert_null(value_nearest("verify", next, words));
    assert_null(value_nearest("", next, words));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),        cmocka_unit_test(test_reals),
        cmocka_unit_test(test_sizes),          cmocka_unit_test(test_times),
        cmocka_unit_test(test_words),          cmocka_unit_test(test_expand),
        cmocka_unit_test(test_folders_of_xdg), cmocka_unit_test(test_print_reads_back),
        cmocka_unit_test(test_nearest),
    };
    return cmocka_run_group_tests_name("value", tests, NULL, NULL);
}
