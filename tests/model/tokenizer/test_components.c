/* SPDX-License-Identifier: Apache-2.0 */
/* Each normalizer, pre-tokenizer, post-processor and added-token option by itself. */
#include "tok_helper.h"

#include <errno.h>

#define PRE(x) "'pre_tokenizer': {'type': " x "}"
#define NORM(x) "'normalizer': {'type': " x "}"
#define DASH "'Split', 'pattern': {'String': '-'}, 'behavior': "
#define ADDED(content, more) "'added_tokens': [{'id': 0, 'content': '" content "', " more "}]"

static void split_behaviors(void **state)
{
    /* The example of the format's documentation. */
    const char *text = "the-final--countdown";
    expect_tokens(PRE(DASH "'Removed', 'invert': false"), text, "the|final|countdown");
    expect_tokens(PRE(DASH "'Isolated', 'invert': false"), text, "the|-|final|-|-|countdown");
    expect_tokens(PRE(DASH "'MergedWithPrevious'"), text, "the-|final-|-|countdown");
    expect_tokens(PRE(DASH "'MergedWithNext'"), text, "the|-final|-|-countdown");
    expect_tokens(PRE(DASH "'Contiguous'"), text, "the|-|final|--|countdown");
    expect_tokens(PRE(DASH "'Removed', 'invert': true"), text, "-|-|-");
    expect_tokens(PRE(DASH "'MergedWithNext'"), "a--", "a|-|-");
    expect_tokens(PRE(DASH "'MergedWithPrevious'"), "--a", "-|-|a");
}

static void split_regex(void **state)
{
    expect_tokens(PRE("'Split', 'pattern': {'Regex': '\\\\d{1,2}'}, 'behavior': 'Isolated'"),
                  "ab12345c", "ab|12|34|5|c");
    expect_tokens(PRE("'Split', 'pattern': {'Regex': '\\\\w+|[^\\\\w\\\\s]+'},"
                      "'behavior': 'Removed', 'invert': true"),
                  "Hey, you!", "Hey|,|you|!");
    /* Empty matches split between characters. */
    expect_tokens(PRE("'Split', 'pattern': {'Regex': ''}, 'behavior': 'Isolated'"), "aéb", "a|é|b");
}

static void digits_and_punctuation(void **state)
{
    expect_tokens(PRE("'Digits', 'individual_digits': false"), "Call 911 now", "Call |911| now");
    expect_tokens(PRE("'Digits', 'individual_digits': true"), "Call 911", "Call |9|1|1");
    expect_tokens(PRE("'Digits', 'individual_digits': false"), "x½٣y", "x|½٣|y");
    expect_tokens(PRE("'CharDelimiterSplit', 'delimiter': '▁'"), "a▁▁bc▁", "a|bc");
    expect_refused("{'pre_tokenizer': {'type': 'CharDelimiterSplit', 'delimiter': 'ab'}}", -EBADMSG,
                   "one character");
    expect_tokens(PRE("'Punctuation'"), "Hey, you!?", "Hey|,| you|!|?");
    expect_tokens(PRE("'Punctuation', 'behavior': 'Contiguous'"), "a!?$b", "a|!?$|b");
    expect_tokens(PRE("'Punctuation'"), "a。b", "a|。|b");
}

static void whitespace(void **state)
{
    expect_tokens(PRE("'Whitespace'"), "Hello there!  a_1-\xCC\x81x",
                  "Hello|there|!|a_1|-|\xCC\x81x");
    expect_tokens(PRE("'WhitespaceSplit'"),
                  "a b\t c!\xE3\x80\x80"
                  "d",
                  "a|b|c!|d");
    expect_tokens(PRE("'BertPreTokenizer'"), "a, b", "a|,|b");
}

static void metaspace(void **state)
{
#define META "'Metaspace', 'replacement': '▁', "
    expect_tokens(PRE(META "'prepend_scheme': 'always', 'split': true"), "Hey  you", "▁Hey|▁|▁you");
    expect_tokens(PRE(META "'prepend_scheme': 'never', 'split': true"), "Hey you", "Hey|▁you");
    expect_tokens(PRE(META "'prepend_scheme': 'always', 'split': false"), "Hey you", "▁Hey▁you");
    expect_tokens(PRE(META "'add_prefix_space': false"), "Hey you", "Hey|▁you");
    expect_tokens(PRE(META "'prepend_scheme': 'always'"), " Hey", "▁Hey");
    expect_tokens(ADDED("<s>", "'special': true") "," PRE(META "'prepend_scheme': 'first'"),
                  "Hey<s>you", "▁Hey|<s>|you");
    expect_tokens(ADDED("<s>", "'special': true") "," PRE(META "'prepend_scheme': 'always'"),
                  "Hey<s>you", "▁Hey|<s>|▁you");
    expect_refused("{'pre_tokenizer': {'type': 'Metaspace', 'replacement': '_',"
                   "'add_prefix_space': false, 'prepend_scheme': 'always'}}",
                   -EBADMSG, "contradicts");
}

static void byte_level(void **state)
{
    expect_tokens(PRE("'ByteLevel', 'add_prefix_space': false"), "Hello my 12 é\n",
                  "Hello|Ġmy|Ġ12|ĠÃ©|Ċ");
    expect_tokens(PRE("'ByteLevel', 'add_prefix_space': true"), "Hi", "ĠHi");
    expect_tokens(PRE("'ByteLevel', 'add_prefix_space': false, 'use_regex': false"), "a b", "aĠb");
    /* In front of another component, the spelled characters are what that one sees. */
    expect_tokens(PRE("'Sequence', 'pretokenizers': [{'type': 'ByteLevel', 'use_regex': false,"
                      "'add_prefix_space': false}, {'type': 'Split', 'behavior': 'Isolated',"
                      "'pattern': {'String': 'Ġ'}}]"),
                  "a b", "a|Ġ|b");
}

static void sequences(void **state)
{
    expect_tokens(PRE("'Sequence', 'pretokenizers': [{'type': 'WhitespaceSplit'},"
                      "{'type': 'Digits', 'individual_digits': true}, {'type': 'Punctuation'}]"),
                  "ab12, c", "ab|1|2|,|c");
}

static void normal_forms(void **state)
{
    expect_tokens(NORM("'NFC'"), "e\xCC\x81", "é");
    expect_tokens(NORM("'NFD'"), "é", "e\xCC\x81");
    expect_tokens(NORM("'NFC'"), "ﬁ", "ﬁ");
    expect_tokens(NORM("'NFKC'"), "ﬁ①", "fi1");
    expect_tokens(NORM("'NFKD'"), "ﬁé", "fie\xCC\x81");
    /* Canonical ordering: dot below (220) before acute (230); Hangul composes. */
    expect_tokens(NORM("'NFD'"), "e\xCC\x81\xCC\xA3", "e\xCC\xA3\xCC\x81");
    expect_tokens(NORM("'NFC'"), "\xE1\x84\x92\xE1\x85\xA1\xE1\x86\xAB", "한");
    expect_tokens(NORM("'NFC'"), "xe\xCC\x81y", "xéy");
}

/* Both ways of ordering marks give the same: a long run, sorted by hand. */
static void long_marks(void **state)
{
    struct tokenizer *t = make_tokenizer(NORM("'NFD'"), "a", "\xCC\xA3\xCC\x81");
    char text[401] = "a";
    size_t n = 1, n_ids;
    uint32_t *ids;
    for (int i = 0; i < 60; i++, n += 2)
        memcpy(text + n, i % 2 ? "\xCC\xA3" : "\xCC\x81", 2);
    assert_int_equal(tokenizer_encode(t, text, n, false, &ids, &n_ids, NULL), 0);
    assert_int_equal(n_ids, 61);
    int64_t below = tokenizer_token_id(t, "\xCC\xA3", 2),
            acute = tokenizer_token_id(t, "\xCC\x81", 2);
    for (size_t i = 1; i < 61; i++)
        assert_int_equal(ids[i], i <= 30 ? below : acute);
    free(ids);
    tokenizer_free(t);
}

static void other_normalizers(void **state)
{
    expect_tokens(NORM("'Lowercase'"), "ÀBΣ\xC4\xB0", "àbσi\xCC\x87");
    expect_tokens(NORM("'Strip', 'strip_left': true, 'strip_right': true"), "  a b\t", "a b");
    expect_tokens(NORM("'Strip', 'strip_left': false, 'strip_right': true"), "  a ", "  a");
    expect_tokens(NORM("'StripAccents'"), "e\xCC\x81x", "ex");
    expect_tokens(NORM("'Prepend', 'prepend': '▁'"), "ab", "▁ab");
    expect_tokens(NORM("'Replace', 'pattern': {'String': ' '}, 'content': '▁'"), "a b", "a▁b");
    expect_tokens(NORM("'Replace', 'pattern': {'Regex': ' {2,}'}, 'content': ' '"), "a    b c",
                  "a b c");
    expect_tokens(NORM("'ByteLevel'"), "é b", "Ã©Ġb");
    expect_tokens(NORM("'Sequence', 'normalizers': [{'type': 'NFKC'}, {'type': 'Lowercase'},"
                       "{'type': 'Prepend', 'prepend': '>'}]"),
                  "ＡＢ", ">ab");
}

static void added_tokens(void **state)
{
    const char *plain = ADDED("<x>", "'special': true");
    expect_tokens(plain, "a<x>b<x", "a|<x>|b<x");
    expect_tokens(ADDED("<x>", "'lstrip': true, 'rstrip': true"), "a <x>\t b", "a|<x>|b");
    expect_tokens(ADDED("my", "'single_word': true"), "my enemy my_ my", "my| enemy my_ |my");
    /* A normalized one is looked for in the normalized text, in its own normalized form. */
    expect_tokens(ADDED("My", "'normalized': true") "," NORM("'Lowercase'"), "see MY x",
                  "see |My| x");
    expect_tokens(ADDED("My", "'normalized': false") "," NORM("'Lowercase'"), "see MY My",
                  "see my |My");
    /* The longest one wins. */
    expect_tokens("'added_tokens': [{'content': '<a'}, {'content': '<a>'}, {'content': 'a>b'}]",
                  "x<a>b<ab", "x|<a>|b|<a|b");
}

/* Tokens that the model lacks count on behind its vocabulary, whatever the file's ids say. */
static void added_ids(void **state)
{
    struct tokenizer *t = make_tokenizer(
        "'added_tokens': [{'id': 77, 'content': 'XX', 'special': true}, {'content': 'a'},"
        "{'id': 5, 'content': 'YY'}]",
        "a", "b");
    assert_int_equal(tokenizer_token_id(t, "a", 1), 0);
    assert_int_equal(tokenizer_token_id(t, "XX", 2), 2);
    assert_int_equal(tokenizer_token_id(t, "YY", 2), 3);
    assert_int_equal(tokenizer_token_id(t, "ZZ", 2), -1);
    assert_int_equal(tokenizer_vocab_size(t), 4);
    assert_true(tokenizer_is_special(t, 2));
    assert_false(tokenizer_is_special(t, 3));
    tokenizer_free(t);
}

#define TEMPLATE                                                                                   \
    "{'type': 'TemplateProcessing', 'single': [{'SpecialToken': {'id': '<s>', 'type_id': 0}},"     \
    "{'Sequence': {'id': 'A', 'type_id': 0}}], 'special_tokens': {'<s>': {'id': '<s>',"            \
    "'ids': [0], 'tokens': ['<s>']}}}"

static void post_processors(void **state)
{
    expect_tokens("'post_processor': " TEMPLATE, "ab", "a|ab");
    expect_tokens("'post_processor': {'type': 'Sequence', 'processors': [{'type': 'ByteLevel',"
                  "'trim_offsets': true}, " TEMPLATE "]}",
                  "ab", "a|ab");
    expect_tokens("'post_processor': {'type': 'RobertaProcessing', 'cls': ['a', 0],"
                  "'sep': ['b', 2]}",
                  "ab", "a|ab|b");
}

static void refusals(void **state)
{
    expect_refused("{'normalizer': {'type': 'Precompiled'}}", -ENOTSUP, "'Precompiled'");
    expect_refused("{'pre_tokenizer': {'type': 'UnicodeScripts'}}", -ENOTSUP, "'UnicodeScripts'");
    expect_refused("{'decoder': {'type': 'CTC'}}", -ENOTSUP, "'CTC'");
    expect_refused("{'post_processor': {'type': 'Nope'}}", -ENOTSUP, "'Nope'");
    expect_refused("{'model': {'type': 'Unigram'}}", -ENOTSUP, "'Unigram'");
    expect_refused("{'model': {'type': 'BPE', 'vocab': {'a': 0}, 'merges': ['a b']}}", -EBADMSG,
                   "merge 0");
    expect_refused("{'model': {'type': 'BPE', 'vocab': {'a': -1}, 'merges': []}}", -EBADMSG, "'a'");
    expect_refused("{'model': {'type': 'BPE', 'vocab': {'a': 0}, 'merges': [], 'dropout': 0.1}}",
                   -ENOTSUP, "dropout");
    expect_refused("{'pre_tokenizer': {'type': 'Split', 'pattern': {'Regex': '(a'},"
                   "'behavior': 'Isolated'}}",
                   -EBADMSG, "( without )");
    expect_refused("[1]", -EBADMSG, "object");
    expect_refused("{", -EBADMSG, "line 1");
}

static void bad_utf8(void **state)
{
    struct tokenizer *t = make_tokenizer("'normalizer': null", "a", "b");
    uint32_t *ids;
    size_t n;
    assert_int_equal(tokenizer_encode(t, "a\xFF", 2, true, &ids, &n, NULL), -EILSEQ);
    assert_int_equal(tokenizer_encode(t, "\xED\xA0\x80", 3, true, &ids, &n, NULL), -EILSEQ);
    assert_int_equal(tokenizer_encode(t, "", 0, true, &ids, &n, NULL), 0);
    assert_int_equal(n, 0);
    free(ids);
    tokenizer_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(split_behaviors),
        cmocka_unit_test(split_regex),
        cmocka_unit_test(digits_and_punctuation),
        cmocka_unit_test(whitespace),
        cmocka_unit_test(metaspace),
        cmocka_unit_test(byte_level),
        cmocka_unit_test(sequences),
        cmocka_unit_test(normal_forms),
        cmocka_unit_test(long_marks),
        cmocka_unit_test(other_normalizers),
        cmocka_unit_test(added_tokens),
        cmocka_unit_test(added_ids),
        cmocka_unit_test(post_processors),
        cmocka_unit_test(refusals),
        cmocka_unit_test(bad_utf8),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
