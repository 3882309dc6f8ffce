/* SPDX-License-Identifier: Apache-2.0 */
/* Verb tables: dispatch, options in every spelling, errors that say what was meant, texts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <string.h>

#include "base/verbs.h"

static int run_load(const struct verb_call *call)
{
    return 40 + call->argc;
}

static int run_other(const struct verb_call *call)
{
    return 7;
}

static const struct verb_option globals[] = {
    {"json", VALUE_BOOL, .help = "machine-readable"},
    {"socket", VALUE_PATH, .fallback = "/run/s", .help = "where it listens", .letter = 's'},
    {0},
};
static const struct verb_option load_options[] = {
    {"name", VALUE_STRING, .help = "its name", .letter = 'n'},
    {"wait", VALUE_BOOL, .fallback = "yes", .help = "wait"},
    {"force", VALUE_BOOL, .help = "even so", .letter = 'f'},
    {"timeout", VALUE_DURATION, .fallback = "60s", .limits = "1s..1h", .help = "how long"},
    {"kind", VALUE_ENUM, .fallback = "fast", .limits = "slow|fast", .help = "which"},
    {"count", VALUE_INT, .limits = "1..", .help = "how many"},
    {"tag", VALUE_STRING, .help = "a label", .repeat = true},
    {0},
};
static const struct verb verbs[] = {
    {"load", "DIR [NAME]", "make a model resident", .about = "Reads it.\n\nThen keeps it.",
     .options = load_options, .examples = "load ./m\tunder its own name\nload ./m x --force\n",
     .run = run_load},
    {"stop", "[ID...]", "stop instances", .run = run_other},
    {"cache ls", "", "list the cache", .run = run_other},
    {"cache export", "FILE", "write a bundle", .run = run_other},
    {0},
};
static const struct verb_exit exits[] = {{0, "done"}, {2, "bad usage"}, {0}};
static const struct verb_program program = {
    .name = "toy",
    .version = "3",
    .summary = "drives a toy",
    .globals = globals,
    .verbs = verbs,
    .exits = exits,
    .see_also = "toyd(8)",
    .named = "TAG tags\nID ps\n",
};

#define PARSE(call, text, err, ...)                                                                \
    ({                                                                                             \
        static char *args_[] = {"toy", __VA_ARGS__ __VA_OPT__(, ) NULL};                           \
        verb_parse(&program, (int)ARRAY_LEN(args_) - 1, args_, call, text, err);                   \
    })

static void test_fallbacks(void **state)
{
    _cleanup_(verb_call_freep) struct verb_call *call = NULL;
    struct error err = {0};

    assert_int_equal(PARSE(&call, NULL, &err, "load", "./m"), 0);
    assert_int_equal(call->verb->run(call), 41);
    assert_string_equal(call->argv[0], "./m");
    assert_null(call->argv[1]);
    assert_false(verb_flag(call, "json"));
    assert_true(verb_flag(call, "wait"));
    assert_false(verb_given(call, "wait"));
    assert_true(verb_duration(call, "timeout") == UINT64_C(60000000000));
    assert_int_equal(verb_choice(call, "kind"), 1);
    assert_int_equal(verb_int(call, "count"), 0);
    assert_false(verb_given(call, "count"));
    assert_null(verb_string(call, "name"));
    assert_string_equal(verb_string(call, "socket"), "/run/s");
    size_t n = 9;
    assert_null(verb_strings(call, "tag", &n));
    assert_int_equal(n, 0);
}

static void test_spellings(void **state)
{
    _cleanup_(verb_call_freep) struct verb_call *call = NULL;
    struct error err = {0};
    size_t n;

    assert_int_equal(PARSE(&call, NULL, &err, "--json", "-s/run/t", "load", "-fn", "bob",
                           "--no-wait", "a", "--kind", "slow", "--count=12", "--tag=x", "--tag",
                           "y", "--", "--b"),
                     0);
    assert_int_equal(call->argc, 2);
    assert_string_equal(call->argv[1], "--b");
    assert_true(verb_flag(call, "json"));
    assert_true(verb_flag(call, "force"));
    assert_false(verb_flag(call, "wait"));
    assert_true(verb_given(call, "wait"));
    assert_string_equal(verb_string(call, "socket"), "/run/t");
    assert_string_equal(verb_string(call, "name"), "bob");
    assert_int_equal(verb_choice(call, "kind"), 0);
    assert_int_equal(verb_int(call, "count"), 12);
    const char *const *tags = verb_strings(call, "tag", &n);
    assert_int_equal(n, 2);
    assert_string_equal(tags[0], "x");
    assert_string_equal(tags[1], "y");
}

static void test_groups(void **state)
{
    _cleanup_(verb_call_freep) struct verb_call *call = NULL;

    assert_int_equal(PARSE(&call, NULL, NULL, "cache", "--json", "export", "-"), 0);
    assert_string_equal(call->verb->name, "cache export");
    assert_string_equal(call->argv[0], "-");
}

#define ASSERT_REFUSED(saying, ...)                                                                \
    do {                                                                                           \
        struct verb_call *call_ = NULL;                                                            \
        struct error err_ = {0};                                                                   \
        assert_int_equal(PARSE(&call_, NULL, &err_, __VA_ARGS__), -EINVAL);                        \
        assert_null(call_);                                                                        \
        if (!strstr(err_.text, saying))                                                            \
            fail_msg("\"%s\" lacks \"%s\"", err_.text, saying);                                    \
    } while (0)

static void test_errors(void **state)
{
    ASSERT_REFUSED("unknown verb \"lod\", did you mean \"load\"?", "lod");
    ASSERT_REFUSED("unknown verb \"zebra\" (\"toy --help\" lists them)", "zebra");
    ASSERT_REFUSED("did you mean \"cache ls\"?", "cache", "sl");
    ASSERT_REFUSED("cache what?", "cache");
    ASSERT_REFUSED("unknown option --timeot, did you mean --timeout? (\"toy load --help\"", "load",
                   "d", "--timeot=3s");
    ASSERT_REFUSED("did you mean --json", "--jsn", "load", "d");
    ASSERT_REFUSED("--timeout: 2h is too large: at most 1h", "load", "d", "--timeout=2h");
    ASSERT_REFUSED("--kind: \"x\" is not one of slow|fast", "load", "d", "--kind=x");
    ASSERT_REFUSED("--name needs a value: --name=TEXT", "load", "d", "--name");
    ASSERT_REFUSED("--name is given twice", "load", "d", "-na", "-nb");
    ASSERT_REFUSED("unknown option -x", "load", "d", "-x");
    ASSERT_REFUSED("load needs DIR: toy load DIR [NAME]", "load");
    ASSERT_REFUSED("\"c\" is one argument too many", "load", "a", "b", "c");
    ASSERT_REFUSED("unknown option --force", "--force", "load", "d");
    ASSERT_REFUSED("unknown option --no-name", "load", "d", "--no-name");
}

#define ASSERT_TEXT(text, ...)                                                                     \
    do {                                                                                           \
        struct verb_call *call_ = NULL;                                                            \
        buffer_free(text);                                                                         \
        assert_int_equal(PARSE(&call_, text, NULL, __VA_ARGS__), VERB_TEXT);                       \
        assert_null(call_);                                                                        \
        assert_non_null((text)->data);                                                             \
    } while (0)

static void assert_has(const struct buffer *text, const char *part)
{
    if (!strstr(text->data, part))
        fail_msg("lacks \"%s\":\n%s", part, text->data);
}

static void test_help(void **state)
{
    _cleanup_(buffer_free) struct buffer text = {0}, other = {0};

    ASSERT_TEXT(&text, "load", "--help");
    assert_has(&text, "Usage: toy load [OPTION...] DIR [NAME]\n");
    assert_has(&text, "Reads it.\n\nThen keeps it.\n");
    assert_has(&text, "--no-wait             do not wait\n");
    assert_has(&text, "-n, --name=TEXT");
    assert_has(&text, "how long (1s..1h; default 60s)");
    assert_has(&text, "--kind=slow|fast");
    assert_has(&text, "  toy load ./m\n      under its own name\n  toy load ./m x --force\n");
    assert_has(&text, "  2   bad usage\n");
    for (const char *p = text.data; *p; p += strcspn(p, "\n") + 1)
        assert_true(strcspn(p, "\n") <= 80);
    ASSERT_TEXT(&other, "help", "load");
    assert_string_equal(text.data, other.data);
    ASSERT_TEXT(&other, "load", "d", "--force", "-h"); /* whatever else is there */
    assert_string_equal(text.data, other.data);

    ASSERT_TEXT(&text, "--help");
    for (const struct verb *v = verbs; v->name; v++)
        assert_has(&text, v->name);
    ASSERT_TEXT(&text, "cache", "--help");
    assert_has(&text, "cache export FILE");
    assert_null(strstr(text.data, "stop"));
    ASSERT_TEXT(&text, "--version");
    assert_string_equal(text.data, "toy 3\n");
}

static void test_generated(void **state)
{
    _cleanup_(buffer_free) struct buffer text = {0};

    ASSERT_TEXT(&text, "--man");
    assert_has(&text, ".TH TOY 1 ");
    assert_has(&text, ".SS cache export FILE\n");
    assert_has(&text, ".TP\n\\fB\\-n\\fR, \\fB\\-\\-name=TEXT\\fR\nits name\n");
    ASSERT_TEXT(&text, "--bash-completion");
    assert_has(&text, "'') words='load stop cache';;\n");
    assert_has(&text, "words=\"$(toy ps 2>/dev/null");                       /* ID is named by ps */
    assert_has(&text, "'load --tag') COMPREPLY=($(compgen -W \"$(toy tags"); /* so is an option */
    assert_has(&text, "in =|--socket) continue;; esac\n"); /* its value is no verb */
    assert_has(&text, "complete -F _toy toy\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fallbacks), cmocka_unit_test(test_spellings),
        cmocka_unit_test(test_groups),    cmocka_unit_test(test_errors),
        cmocka_unit_test(test_help),      cmocka_unit_test(test_generated),
    };
    return cmocka_run_group_tests_name("verbs", tests, NULL, NULL);
}
