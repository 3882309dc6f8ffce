/* SPDX-License-Identifier: Apache-2.0 */
/* Patterns mean what Oniguruma's Ruby syntax says. */
#include "tok_helper.h"

#include <errno.h>

#include "model/tokenizer/regex.h"

/* The matches of a pattern in a text, with bars between. */
static void expect(const char *pattern, const char *text, const char *expected)
{
    struct regex_scratch *s = regex_scratch_new();
    struct regex *re = NULL;
    struct error err = {0};
    struct buffer out = {0};
    size_t at = 0, start, end, len = strlen(text);
    if (regex_compile(pattern, strlen(pattern), &re, &err) < 0)
        fail_msg("%s: %s", pattern, err.text);
    buffer_append(&out, "", 0);
    while (at <= len && regex_find(re, s, text, len, at, &start, &end, &err) > 0) {
        buffer_printf(&out, "%s%.*s", out.len ? "|" : "", (int)(end - start), text + start);
        at = end > at ? end : at + 1;
    }
    if (strcmp(out.data, expected))
        fail_msg("/%s/ in '%s': '%s', expected '%s'", pattern, text, out.data, expected);
    buffer_free(&out);
    regex_free(re);
    regex_scratch_free(s);
}

static void classes(void **state)
{
    expect("\\s+",
           "a \xC2\x85\xE2\x80\x8A"
           "b\xE1\xA0\x8E"
           "c",
           " \xC2\x85\xE2\x80\x8A");
    expect("[^\\s\\p{L}]+", "a12 b-", "12|-");
    expect("\\w+", "aé_1\xCC\x81 -", "aé_1\xCC\x81");
    expect("[\\W]+", "a -b", " -");
    expect("[^\\W]+", "a -b", "a|b");
    expect("[x\\S]+", "ab c", "ab|c");
    expect("\\h+", "xyzAf09", "Af09");
    expect("[a-c[x-z]]+", "abxzd", "abxz");
    expect("[a-z&&[^aeiou]]+", "hello", "h|ll");
    expect("[^a[bc]]+", "abcd", "d");
    expect(" ?[^(\\s|[.,!?…])]+", "Hi, you (x)", "Hi| you|x");
    expect("[[:alpha:]]+", "ab1é", "ab|é");
    expect("[\\]\\-a-]+", "]-b", "]-");
    expect("[\\d-x]+", "1-x", "1-x");
    expect("\\p{Han}+", "a漢字", "漢字");
    expect("\\p{^L}+", "a12", "12");
    expect("[\\u4e00-\\u9fa5]+", "a漢", "漢");
    expect("[\\x{4e00}-\\x{9fa5}]+", "a漢", "漢");
}

static void options(void **state)
{
    expect("(?i:'s|'t)", "'S't'x", "'S|'t");
    expect("(?i)a|b", "AB", "A|B");
    expect("x(?i)a|b", "xA xB B", "xA|xB");
    expect("(?m:a.b)", "a\nb", "a\nb");
    expect("a.b", "a\nb", "");
    expect("^b$", "a\nb\nc", "b");
}

static void quantifiers(void **state)
{
    expect("a++", "aaab", "aaa");
    expect("\"[^\"]*+\"", "x\"ab\"", "\"ab\"");
    expect("a{2}+", "aaaaa", "aaaa");
    expect("a{,2}b", "aaab", "aab");
    expect("a{1,3}?", "aa", "a|a");
    expect("a{x}", "a{x}", "a{x}");
    expect("\\s+(?!\\S)|\\s+", "a   b", "  | ");
    expect("(?<=a)b", "ab b", "b");
    expect("(?<n>a)\\k<n>", "aab", "aa");
    expect("(?:ab)+?c", "ababc", "ababc");
}

static void escapes(void **state)
{
    expect("\\v",
           "a\x0b"
           "b\x0c",
           "\x0b");
    expect("\\bé", "é aé", "é");
    expect("\\{\\}\\/\\-", "{}/-", "{}/-");
    expect("\\x41\\t", "A\t", "A\t");
    expect("\\A.", "ab", "a");
}

static void refused(const char *pattern, int code)
{
    struct buffer out = {0};
    struct error err = {0};
    assert_int_equal(regex_translate(pattern, strlen(pattern), &out, &err), code);
    assert_true(err.text[0]);
    buffer_free(&out);
}

static void refusals(void **state)
{
    refused("(?~a)", -ENOTSUP);
    refused("\\p{Nothing}", -ENOTSUP);
    refused("[a", -EBADMSG);
    refused("a)", -EBADMSG);
    refused("\\", -EBADMSG);
    refused("[b-a]", -EBADMSG);
    refused("\xFF", -EBADMSG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(classes), cmocka_unit_test(options),  cmocka_unit_test(quantifiers),
        cmocka_unit_test(escapes), cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
