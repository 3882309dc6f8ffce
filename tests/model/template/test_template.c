/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The template language: every case of cases.json (small templates, with what Jinja2 says to them),
 * the limits, errors and their lines, a checkpoint's templates, the comparison with a reference.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "model/template/template.h"

struct result {
    int r;
    enum template_outcome outcome;
    struct buffer out;
    struct error err;
};

static void result_free(struct result *x)
{
    buffer_free(&x->out);
}

static struct result render(const char *text, const char *context,
                            const struct template_options *options)
{
    struct result x = {.outcome = TEMPLATE_ERROR};
    _cleanup_(template_freep) struct template *t = NULL;
    x.r = template_compile(text, strlen(text), &t, &x.err);
    json_auto_t *j = json_loads(context, JSON_ALLOW_NUL, NULL);
    assert_non_null(j);
    if (x.r >= 0)
        x.r = template_render(t, j, options, &x.out, &x.outcome, &x.err);
    return x;
}

static const char *text_of(const struct result *x)
{
    return x->out.data ? x->out.data : "";
}

/* --- The language --- */

static bool run_case(const json_t *item, const json_t *context, const struct tm *now)
{
    const struct template_options options = {.now = now};
    const json_t *source = json_object_get(item, "template");
    const json_t *text = json_object_get(item, "text"), *refused = json_object_get(item, "refused");
    _cleanup_(result_free) struct result x = {.outcome = TEMPLATE_ERROR};
    _cleanup_(template_freep) struct template *t = NULL;
    if (template_compile(json_string_value(source), json_string_length(source), &t, &x.err) >= 0)
        template_render(t, context, &options, &x.out, &x.outcome, &x.err);
    bool ok = text ? x.outcome == TEMPLATE_OK && !strcmp(text_of(&x), json_string_value(text))
              : refused
                  ? x.outcome == TEMPLATE_REFUSED && !strcmp(x.err.text, json_string_value(refused))
                  : x.outcome == TEMPLATE_ERROR && !strncmp(x.err.text, "line ", 5);
    if (!ok)
        print_error("%s\n  expected: %s\n  got     : %s\n", json_string_value(source),
                    text      ? json_string_value(text)
                    : refused ? json_string_value(refused)
                              : json_string_value(json_object_get(item, "error")),
                    x.outcome == TEMPLATE_OK ? text_of(&x) : x.err.text);
    return ok;
}

static void test_language(void **state)
{
    json_error_t e;
    size_t i, bad = 0;
    json_t *item;
    struct tm now = {.tm_year = 126, .tm_mon = 2, .tm_mday = 15, .tm_hour = 9, .tm_min = 30};
    timegm(&now);
    json_auto_t *root = json_load_file(SOURCE_ROOT "/tests/model/template/cases.json", 0, &e);
    assert_non_null(root);
    json_array_foreach(json_object_get(root, "cases"), i, item)
    {
        bad += !run_case(item, json_object_get(root, "context"), &now);
    }
    assert_true(i > 1000);
    assert_int_equal(bad, 0);
}

/* --- Outcomes and lines --- */

static void expect(const char *text, const char *context, enum template_outcome outcome,
                   const char *said)
{
    _cleanup_(result_free) struct result x = render(text, context, NULL);
    assert_int_equal(x.outcome, outcome);
    if (!strstr(outcome == TEMPLATE_OK ? text_of(&x) : x.err.text, said))
        fail_msg("%s: expected \"%s\", got \"%s\"", text, said, x.err.text);
    if (outcome != TEMPLATE_OK) {
        assert_true(x.r < 0);
        assert_int_equal(x.out.len, 0);
    }
}

static void test_errors(void **state)
{
    expect("a\n{% if %}", "{}", TEMPLATE_ERROR, "line 2: expected an expression");
    expect("a\n\n{{ x.y }}", "{}", TEMPLATE_ERROR, "line 3: UndefinedError: 'x' is undefined");
    expect("{{ d.x.y }}", "{\"d\":{}}", TEMPLATE_ERROR, "'dict object' has no attribute 'x'");
    expect("{{ l.append(1) }}", "{\"l\":[]}", TEMPLATE_ERROR,
           "access to attribute 'append' of 'list' object is unsafe");
    expect("{{ 'a' + l }}", "{\"l\":[]}", TEMPLATE_ERROR,
           "can only concatenate str (not \"list\") to str");
    expect("x\n{% include 'a' %}", "{}", TEMPLATE_ERROR, "line 2: 'include' is not allowed");
    expect("{% import 'a' as b %}", "{}", TEMPLATE_ERROR, "'import' is not allowed");
    expect("{% for x in y %}\n", "{}", TEMPLATE_ERROR, "'endfor' is missing");
    expect("{{ x | nope }}", "{}", TEMPLATE_ERROR, "No filter named 'nope'");
    expect("{{ 'a' * 'b", "{}", TEMPLATE_ERROR, "line 1: a string has no end");
    expect("{{ raise_exception('No ' ~ n) }}", "{\"n\":3}", TEMPLATE_REFUSED, "No 3");
    expect("{{ n + 1 }}", "{\"n\":9223372036854775807}", TEMPLATE_ERROR, "does not fit 64 bits");
    expect("\xff", "{}", TEMPLATE_ERROR, "not UTF-8");
    expect("x", "[]", TEMPLATE_ERROR, "no JSON object");
}

static void test_context(void **state)
{
    expect("[{{ tools is none }}{{ documents is none }}]", "{}", TEMPLATE_OK, "[TrueTrue]");
    expect("[{{ _x is defined }}{{ x }}]", "{\"_x\":1,\"x\":2}", TEMPLATE_OK, "[False2]");
    expect("[{{ range }}]", "{\"range\":5}", TEMPLATE_OK, "[5]");
    expect("[{{ s|length }}{{ s|tojson }}]", "{\"s\":\"a\\u0000b\"}", TEMPLATE_OK,
           "[3\"a\\u0000b\"]");
}

/* --- Limits --- */

static void limited(const char *text, struct template_limits limits, int code, const char *said)
{
    const struct template_options options = {.limits = limits};
    _cleanup_(result_free) struct result x = render(text, "{}", &options);
    assert_int_equal(x.outcome, TEMPLATE_ERROR);
    assert_int_equal(x.r, code);
    if (!strstr(x.err.text, said))
        fail_msg("%s: expected \"%s\", got \"%s\"", text, said, x.err.text);
}

static void test_limits(void **state)
{
    const struct template_limits none = {0}, steps = {.steps = 10000},
                                 memory = {.memory = 1 << 20, .steps = 1u << 30},
                                 output = {.output = 1000};
    limited("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", steps,
            -ETIME, "more than 10000 steps");
    limited("{% set ns = namespace(x='ab') %}{% for a in range(40) %}{% set ns.x = ns.x + ns.x %}"
            "{% endfor %}",
            memory, -ENOMEM, "more than 1048576 bytes");
    limited("{% for a in range(99999) %}abc{% endfor %}", output, -EFBIG, "longer than 1000 bytes");
    limited("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", none, -EINVAL, "nested deeper");
    limited("{% set n = namespace() %}{% set n.x = n %}{{ n }}", none, -EINVAL, "nested deeper");
    limited("{{ 'a' * 10000000000 }}", none, -EINVAL, "too long");
    limited("{{ '%1000000d' % 1 }}", none, -EINVAL, "width");
    limited("{{ range(10000000) }}", none, -EINVAL, "Range too big");
}

static void test_deep_source(void **state)
{
    struct template *t = NULL;
    struct error err;
    _cleanup_(buffer_free) struct buffer b = {0};
    buffer_printf(&b, "{{ ");
    for (int i = 0; i < 100000; i++)
        buffer_printf(&b, "not ");
    buffer_printf(&b, "1 }}");
    assert_true(template_compile(b.data, b.len, &t, &err) < 0);
    buffer_free(&b);
    for (int i = 0; i < 10000; i++)
        buffer_printf(&b, "{%% if 1 %%}");
    assert_true(template_compile(b.data, b.len, &t, &err) < 0);
}

/* Growing a text piece by piece stays linear in memory. */
static void test_append(void **state)
{
    const struct template_options options = {.limits = {.memory = 64 << 20}};
    _cleanup_(result_free) struct result x =
        render("{% set ns = namespace(x='') %}{% for a in range(50000) %}"
               "{% set ns.x = ns.x + 'some text ' ~ a %}{% endfor %}{{ ns.x|length }}",
               "{}", &options);
    assert_int_equal(x.outcome, TEMPLATE_OK);
    assert_string_equal(text_of(&x), "738890");
}

/* --- Checkpoints --- */

static void write_file(const char *dir, const char *name, const char *text)
{
    _cleanup_free_ char *path = x_printf("%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void use_chat(const char *dir, const char *name, const char *request, const char *expected)
{
    _cleanup_(chat_template_freep) struct chat_template *c = NULL;
    json_auto_t *j = json_loads(request, 0, NULL);
    _cleanup_(buffer_free) struct buffer out = {0};
    struct error err = {0};
    enum template_outcome outcome;
    assert_int_equal(template_from_checkpoint(dir, &c, &err), 0);
    int r = chat_template_render(c, name, j, NULL, &out, &outcome, &err);
    if (!expected) {
        assert_true(r < 0);
        return;
    }
    assert_int_equal(r, 0);
    assert_string_equal(out.data, expected);
}

static void test_checkpoint(void **state)
{
    char dir[] = "/tmp/test-template-XXXXXX";
    struct chat_template *c;
    struct error err = {0};
    assert_non_null(mkdtemp(dir));
    assert_int_equal(template_from_checkpoint(dir, &c, &err), -ENOENT);
    write_file(dir, "tokenizer_config.json", "{\"chat_template\": 5}");
    assert_int_equal(template_from_checkpoint(dir, &c, &err), -EBADMSG);
    write_file(dir, "tokenizer_config.json", "{\"chat_template\": \"{{\"}");
    assert_int_equal(template_from_checkpoint(dir, &c, &err), -EINVAL);
    write_file(
        dir, "tokenizer_config.json",
        "{\"bos_token\": {\"content\": \"<s>\"}, \"eos_token\": \"</s>\", \"pad_token\": null,"
        "\"chat_template\": [{\"name\": \"default\", \"template\": \"D{{ bos_token }}\"},"
        "{\"name\": \"tool_use\", \"template\": \"T{{ eos_token }}{{ pad_token }}\"}]}");
    use_chat(dir, NULL, "{}", "D<s>");
    use_chat(dir, NULL, "{\"tools\": []}", "D<s>");
    use_chat(dir, NULL, "{\"tools\": [{}]}", "T</s>");
    use_chat(dir, "tool_use", "{\"eos_token\": \"E\"}", "TE");
    use_chat(dir, "rag", "{}", NULL);
    write_file(dir, "chat_template.jinja", "J{{ bos_token }}\n");
    use_chat(dir, NULL, "{\"tools\": [{}]}", "J<s>");
    _cleanup_free_ char *command = x_printf("rm -r %s", dir);
    assert_int_equal(system(command), 0);
}

static void test_ember_tiny(void **state)
{
    use_chat(
        SOURCE_ROOT "/models/ember-tiny", NULL,
        "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"add_generation_prompt\": "
        "true}",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
}

/* --- Comparing --- */

static void test_verify(void **state)
{
    char dir[] = "/tmp/test-template-XXXXXX";
    struct error err = {0};
    size_t cases = 0, bad = 0;
    _cleanup_(buffer_free) struct buffer report = {0};
    assert_non_null(mkdtemp(dir));
    _cleanup_free_ char *t = x_printf("%s/t", dir), *e = x_printf("%s/e", dir);
    write_file(dir, "t",
               "{{ bos_token }}{{ strftime_now('%d %b %Y %a') }}"
               "{{ raise_exception('no') if x == 1 }}{{ y.z if x == 2 }}");
    write_file(dir, "e",
               "{\"now\": \"2026-03-15T09:30:00\", \"tokens\": {\"bos\": \"<s>\"}, \"cases\": ["
               "{\"input\": {\"x\": 0}, \"text\": \"<s>15 Mar 2026 Sun\"},"
               "{\"input\": {\"x\": 0}, \"text\": \"<s>15 Mar 2025 Sun\"},"
               "{\"input\": {\"x\": 1}, \"refused\": \"no\"},"
               "{\"input\": {\"x\": 1}, \"refused\": \"nope\"},"
               "{\"input\": {\"x\": 1}, \"error\": \"TypeError\"},"
               "{\"input\": {\"x\": 2}, \"error\": \"UndefinedError\"},"
               "{\"scenario\": \"s\", \"input\": {\"x\": 2}, \"text\": \"a\"}]}");
    assert_int_equal(template_verify_file(t, e, &report, &cases, &bad, &err), 0);
    assert_int_equal(cases, 7);
    assert_int_equal(bad, 4);
    assert_non_null(strstr(report.data, "case 1: differs, first at character 13"));
    assert_non_null(strstr(report.data, "case 4: expected an error, got a refusal: no"));
    assert_non_null(strstr(report.data, "case 6 (s): expected a text, got an error: line 1"));
    write_file(dir, "e", "{\"cases\": [{}]}");
    assert_true(template_verify_file(t, e, &report, &cases, &bad, &err) < 0);
    _cleanup_free_ char *command = x_printf("rm -r %s", dir);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_language),    cmocka_unit_test(test_errors),
        cmocka_unit_test(test_context),     cmocka_unit_test(test_limits),
        cmocka_unit_test(test_deep_source), cmocka_unit_test(test_append),
        cmocka_unit_test(test_checkpoint),  cmocka_unit_test(test_ember_tiny),
        cmocka_unit_test(test_verify),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
