/* SPDX-License-Identifier: Apache-2.0 */
/* The model's merges, decoding in pieces, images, and the reference's cases. */
#include "tok_helper.h"

#include <errno.h>

#include "../shared_dir.h"
#include "base/clock.h"

#define MAX_PIECES 600

static uint64_t seed = 88172645463325252u;

static uint32_t random_below(uint32_t n)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 32) % n;
}

static struct tokenizer *load_json(json_t *root)
{
    char *json = json_dumps(root, JSON_COMPACT);
    struct tokenizer *t = NULL;
    struct error err = {0};
    if (tokenizer_load_text(json, strlen(json), NULL, 0, &t, &err) < 0)
        fail_msg("%s", err.text);
    free(json);
    json_decref(root);
    return t;
}

/* --- Merging against the definition --- */

#define MERGES 40
struct merge_rule {
    char left[8], right[8];
};

/* Random rules over a and b, each on tokens that exist by then. */
static json_t *random_rules(struct merge_rule rules[MERGES])
{
    json_t *vocab = json_pack("{s:i, s:i, s:i}", "a", 0, "b", 1, "c", 2), *merges = json_array();
    char words[MERGES + 2][8] = {"a", "b"};
    unsigned n = 2, n_rules = 0;
    for (int tries = 0; n_rules < MERGES && tries < 10000; tries++) {
        const char *x = words[random_below(n)], *y = words[random_below(n)];
        char both[16];
        snprintf(both, sizeof both, "%s%s", x, y);
        if (strlen(both) > 7 || json_object_get(vocab, both))
            continue;
        json_object_set_new(vocab, both, json_integer((json_int_t)json_object_size(vocab)));
        json_array_append_new(merges, json_pack("[s, s]", x, y));
        strcpy(rules[n_rules].left, x);
        strcpy(rules[n_rules++].right, y);
        strcpy(words[n++], both);
    }
    assert_int_equal(n_rules, MERGES);
    return json_pack("{s:{s:s, s:o, s:o}}", "model", "type", "BPE", "vocab", vocab, "merges",
                     merges);
}

/* The lowest rule that applies, at its leftmost place, again and again. */
static size_t merge_by_definition(const struct merge_rule *rules, char pieces[][8], size_t n)
{
    for (;;) {
        size_t rule = MERGES, at = 0;
        for (size_t r = 0; r < MERGES && rule == MERGES; r++)
            for (size_t i = 0; i + 1 < n; i++)
                if (!strcmp(pieces[i], rules[r].left) && !strcmp(pieces[i + 1], rules[r].right)) {
                    rule = r;
                    at = i;
                    break;
                }
        if (rule == MERGES)
            return n;
        char right[8];
        memcpy(right, pieces[at + 1], sizeof right);
        strcat(pieces[at], right);
        memmove(pieces + at + 1, pieces + at + 2, (n - at - 2) * sizeof pieces[0]);
        n--;
    }
}

static void merges_follow_the_definition(void **state)
{
    static char pieces[MAX_PIECES][8];
    for (int round = 0; round < 60; round++) {
        struct merge_rule rules[MERGES];
        struct tokenizer *t = load_json(random_rules(rules));
        for (int word = 0; word < 10; word++) {
            /* Short words are scanned, long ones queued: both sides of the border. */
            size_t len = 1 + random_below(word % 2 ? 45 : 500), n_ids;
            char text[MAX_PIECES];
            uint32_t *ids;
            for (size_t i = 0; i < len; i++) {
                text[i] = random_below(30) ? "ab"[random_below(2)] : 'c';
                pieces[i][0] = text[i];
                pieces[i][1] = 0;
            }
            size_t n = merge_by_definition(rules, pieces, len);
            assert_int_equal(tokenizer_encode(t, text, len, true, &ids, &n_ids, NULL), 0);
            assert_int_equal(n_ids, n);
            for (size_t i = 0; i < n; i++)
                assert_int_equal(ids[i], tokenizer_token_id(t, pieces[i], strlen(pieces[i])));
            free(ids);
        }
        tokenizer_free(t);
    }
}

/* --- Unknown characters and byte fallback --- */

static json_t *char_model(bool fallback, bool fuse)
{
    json_t *vocab = json_pack("{s:i, s:i, s:i, s:i}", "<unk>", 0, "a", 1, "b", 2, "ab", 3);
    char name[8];
    for (int i = 0; i < 256 && fallback; i++) {
        snprintf(name, sizeof name, "<0x%02X>", i);
        json_object_set_new(vocab, name, json_integer(4 + i));
    }
    return json_pack("{s:{s:s, s:s, s:b, s:b, s:o, s:[s]}}", "model", "type", "BPE", "unk_token",
                     "<unk>", "fuse_unk", fuse, "byte_fallback", fallback, "vocab", vocab, "merges",
                     "a b");
}

static void expect_ids(json_t *model, const char *text, size_t n, const uint32_t *expected)
{
    struct tokenizer *t = load_json(model);
    uint32_t *ids;
    size_t n_ids;
    assert_int_equal(tokenizer_encode(t, text, strlen(text), true, &ids, &n_ids, NULL), 0);
    assert_int_equal(n_ids, n);
    assert_memory_equal(ids, expected, n * sizeof *ids);
    free(ids);
    tokenizer_free(t);
}

static void unknown_characters(void **state)
{
    expect_ids(char_model(false, true), "abxyab", 3, (uint32_t[]){3, 0, 3});
    expect_ids(char_model(false, false), "abxya", 4, (uint32_t[]){3, 0, 0, 1});
    expect_ids(char_model(true, true), "aé\n", 4, (uint32_t[]){1, 4 + 0xC3, 4 + 0xA9, 4 + 10});
    json_t *none = char_model(false, false);
    json_object_del(json_object_get(none, "model"), "unk_token");
    /* Dropped characters leave their neighbours side by side. */
    expect_ids(none, "axb", 1, (uint32_t[]){3});
}

static void affixes(void **state)
{
    json_t *model = json_pack("{s:{s:s, s:s, s:s, s:{s:i, s:i, s:i, s:i, s:i}, s:[s, s]}}", "model",
                              "type", "BPE", "continuing_subword_prefix", "##",
                              "end_of_word_suffix", "</w>", "vocab", "a", 0, "##b", 1, "##c</w>", 2,
                              "ab", 3, "abc</w>", 4, "merges", "a ##b", "ab ##c</w>");
    expect_ids(model, "abc", 1, (uint32_t[]){4});
}

/* --- Decoding --- */

#define LLAMA_DECODER                                                                              \
    "{'type': 'Sequence', 'decoders': [{'type': 'Replace', 'pattern': {'String': '▁'},"          \
    "'content': ' '}, {'type': 'ByteFallback'}, {'type': 'Fuse'}, {'type': 'Strip',"               \
    "'content': ' ', 'start': 1, 'stop': 0}]}"

static struct tokenizer *decoding(const char *decoder, const char *const *tokens, size_t n)
{
    char *text = x_printf("%s", decoder);
    for (char *p = text; *p; p++)
        if (*p == '\'')
            *p = '"';
    json_t *vocab = json_object();
    for (size_t i = 0; i < n; i++)
        json_object_set_new(vocab, tokens[i], json_integer((json_int_t)i));
    json_t *root = json_pack("{s:o?, s:{s:s, s:o, s:[]}}", "decoder", json_loads(text, 0, NULL),
                             "model", "type", "BPE", "vocab", vocab, "merges");
    free(text);
    return load_json(root);
}

/* Decodes all tokens in order. */
static void expect_decoded(const char *decoder, const char *const *tokens, const char *expected)
{
    size_t n = 0;
    uint32_t ids[16];
    struct buffer out = {0};
    for (; tokens[n]; n++)
        ids[n] = (uint32_t)n;
    struct tokenizer *t = decoding(decoder, tokens, n);
    buffer_append(&out, "", 0);
    assert_int_equal(tokenizer_decode(t, ids, n, false, &out, NULL), 0);
    assert_string_equal(out.data, expected);
    buffer_free(&out);
    tokenizer_free(t);
}

#define T(...) ((const char *const[]){__VA_ARGS__, NULL})
#define FFFD "\xEF\xBF\xBD"

static void decoders(void **state)
{
    expect_decoded("null", T("a", "b"), "a b");
    expect_decoded("{'type': 'Fuse'}", T("a", "b"), "ab");
    expect_decoded("{'type': 'ByteLevel'}", T("Hel", "Ġw", "Ã", "©", "漢"), "Hel wé漢");
    expect_decoded("{'type': 'ByteLevel'}", T("a", "Ã", "b", "ð"), "a" FFFD "b" FFFD);
    expect_decoded("{'type': 'ByteFallback'}", T("<0xE5>", "<0x8f>", "<0xab>", "a"), "叫a");
    expect_decoded("{'type': 'ByteFallback'}", T("<0xE5>", "<0x8f>", "a"), FFFD FFFD "a");
    expect_decoded("{'type': 'ByteFallback'}", T("<0x61>", "<0xE5>", "<0x62>"), FFFD FFFD FFFD);
    expect_decoded("{'type': 'Strip', 'content': 'H', 'start': 1, 'stop': 0}",
                   T("Hey", " friend!", "HHH"), "ey friend!HH");
    expect_decoded("{'type': 'Strip', 'content': 'y', 'start': 0, 'stop': 1}", T("Hey", "yy"),
                   "Hey");
    expect_decoded("{'type': 'Metaspace', 'replacement': '▁', 'prepend_scheme': 'always'}",
                   T("▁Hey", "▁you"), "Hey you");
    expect_decoded("{'type': 'Metaspace', 'replacement': '▁', 'prepend_scheme': 'never'}",
                   T("▁Hey"), " Hey");
    expect_decoded("{'type': 'Replace', 'pattern': {'Regex': 'l+'}, 'content': 'L'}",
                   T("hello", "l"), "heLoL");
    expect_decoded(LLAMA_DECODER, T("▁Hey", "▁", "▁you", "<0x0A>"), "Hey  you\n");
    /* Behind Fuse a pattern may lie across tokens, and Strip sees the whole text. */
    expect_decoded("{'type': 'Sequence', 'decoders': [{'type': 'Fuse'}, {'type': 'Replace',"
                   "'pattern': {'String': 'ab'}, 'content': 'X'}, {'type': 'Strip', 'content': ' ',"
                   "'start': 0, 'stop': 1}]}",
                   T("a", "ba", "aab", " "), "XaaX");
}

/* What LLAMA_DECODER means, on the list of all strings at once. */
static void decode_by_definition(const struct tokenizer *t, const uint32_t *ids, size_t n,
                                 struct buffer *out)
{
    struct buffer run = {0};
    for (size_t i = 0; i <= n; i++) {
        size_t len = 0;
        const char *s = i < n ? tokenizer_token_text(t, ids[i], &len) : NULL;
        unsigned byte;
        if (s && len == 6 && sscanf(s, "<0x%2x>", &byte) == 1) {
            char b = (char)byte;
            buffer_append(&run, &b, 1);
            continue;
        }
        if (run.len && utf8_valid(run.data, run.len))
            buffer_append(out, run.data, run.len);
        else
            for (size_t k = 0; k < run.len; k++)
                buffer_append(out, FFFD, 3);
        run.len = 0;
        for (size_t k = 0; k < len;) {
            if (len - k >= 3 && !memcmp(s + k, "▁", 3)) {
                buffer_append(out, " ", 1);
                k += 3;
            } else {
                buffer_append(out, s + k++, 1);
            }
        }
    }
    if (out->len && out->data[0] == ' ')
        memmove(out->data, out->data + 1, out->len--);
    buffer_free(&run);
}

/* Pieces are whole characters and make up the whole; returns it. */
static struct buffer stream(const struct tokenizer *t, const uint32_t *ids, size_t n)
{
    struct buffer pieces = {0}, whole = {0};
    struct detok *d;
    buffer_append(&pieces, "", 0);
    assert_int_equal(detok_new(t, false, &d), 0);
    for (size_t i = 0; i <= n; i++) {
        size_t before = pieces.len;
        assert_int_equal(
            i < n ? detok_push(d, ids[i], &pieces, NULL) : detok_finish(d, &pieces, NULL), 0);
        assert_true(utf8_valid(pieces.data + before, pieces.len - before));
    }
    assert_int_equal(tokenizer_decode(t, ids, n, false, &whole, NULL), 0);
    assert_int_equal(whole.len, pieces.len);
    if (whole.len)
        assert_memory_equal(whole.data, pieces.data, whole.len);
    buffer_free(&whole);
    detok_free(d);
    return pieces;
}

static void random_ids_with_fallback(void **state)
{
    const char *tokens[64] = {"▁",      "▁Hey",   "a▁",     "é",      "x",      "<0x20>",
                              "<0x0A>", "<0xE5>", "<0x8F>", "<0xAB>", "<0xF0>", "<0x9F>",
                              "<0x98>", "<0x80>", "<0xC3>", "▁▁"};
    struct tokenizer *t = decoding(LLAMA_DECODER, tokens, 16);
    for (int round = 0; round < 5000; round++) {
        uint32_t ids[24];
        size_t n = random_below(24);
        struct buffer expected = {0};
        for (size_t i = 0; i < n; i++)
            ids[i] = random_below(16);
        struct buffer got = stream(t, ids, n);
        decode_by_definition(t, ids, n, &expected);
        assert_int_equal(got.len, expected.len);
        if (got.len)
            assert_memory_equal(got.data, expected.data, got.len);
        buffer_free(&got);
        buffer_free(&expected);
    }
    tokenizer_free(t);
}

/* A chain that would make 2^60 bytes of one ends with an error. */
static void growing_decoders_are_stopped(void **state)
{
    struct buffer decoder = {0}, out = {0};
    struct error err = {0};
    buffer_printf(&decoder, "{'type': 'Sequence', 'decoders': [");
    for (int i = 0; i < 30; i++)
        buffer_printf(&decoder,
                      "%s{'type': 'Replace', 'pattern': {'String': 'a'}, 'content': 'aaaa'}",
                      i ? "," : "");
    buffer_printf(&decoder, "]}");
    struct tokenizer *t = decoding(decoder.data, T("a"), 1);
    assert_int_equal(tokenizer_decode(t, (uint32_t[]){0}, 1, false, &out, &err), -E2BIG);
    assert_non_null(strstr(err.text, "too long"));
    tokenizer_free(t);
    buffer_free(&decoder);
    buffer_free(&out);
}

/* Bytes that are certain come at once, not at the end. */
static void pieces_come_early(void **state)
{
    struct buffer out = {0};
    struct detok *d;
    struct tokenizer *t = decoding("{'type': 'ByteLevel'}", T("ab", "Ã", "©", "Ġx"), 4);
    assert_int_equal(detok_new(t, false, &d), 0);
    static const size_t lengths[] = {2, 2, 4, 6};
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(detok_push(d, i, &out, NULL), 0);
        assert_int_equal(out.len, lengths[i]);
    }
    detok_free(d);
    buffer_free(&out);
    tokenizer_free(t);
}

static void bytes_of_tokens(void **state)
{
    struct buffer out = {0};
    struct tokenizer *t = decoding(LLAMA_DECODER, T("▁Hey", "<0xE5>"), 2);
    assert_int_equal(tokenizer_token_bytes(t, 0, &out, NULL), 0);
    assert_int_equal(tokenizer_token_bytes(t, 1, &out, NULL), 0);
    assert_int_equal(tokenizer_token_bytes(t, 99, &out, NULL), 0);
    assert_int_equal(out.len, 5);
    assert_memory_equal(out.data, " Hey\xE5", 5);
    buffer_free(&out);
    tokenizer_free(t);
}

/* --- The embedded model's tokenizer --- */

static struct tokenizer *embedded(void)
{
    struct tokenizer *t = NULL;
    struct error err = {0};
    if (tokenizer_load(SOURCE_ROOT "/models/ember-tiny", &t, &err) < 0)
        fail_msg("%s", err.text);
    return t;
}

static void random_ids_byte_level(void **state)
{
    struct tokenizer *t = embedded();
    for (int round = 0; round < 500; round++) {
        uint32_t ids[64];
        for (size_t i = 0; i < 64; i++)
            ids[i] = random_below(round % 2 ? 400 : tokenizer_vocab_size(t) + 3);
        struct buffer got = stream(t, ids, 64);
        assert_true(got.len > 0);
        buffer_free(&got);
    }
    tokenizer_free(t);
}

static void text_survives(void **state)
{
    struct tokenizer *t = embedded();
    const char *text =
        "It's 12,345 o'clock — «naïve» 漢字かな 😀👩‍👩‍👧\r\n\n\t  def "
        "f(x):\n "
        " "
        " "
        " "
        "return x\n";
    struct buffer out = {0};
    uint32_t *ids;
    size_t n;
    assert_int_equal(tokenizer_encode(t, text, strlen(text), true, &ids, &n, NULL), 0);
    assert_int_equal(tokenizer_decode(t, ids, n, true, &out, NULL), 0);
    assert_string_equal(out.data, text);
    free(ids);
    buffer_free(&out);
    tokenizer_free(t);
}

static void prompts_of(const struct tokenizer *t, const char *path)
{
    json_t *root = json_load_file(path, 0, NULL), *c, *id;
    size_t i, k, n;
    assert_non_null(root);
    json_array_foreach(json_object_get(root, "cases"), i, c)
    {
        const char *prompt = json_string_value(json_object_get(c, "prompt"));
        const json_t *expected = json_object_get(c, "prompt_ids");
        uint32_t *ids;
        assert_int_equal(tokenizer_encode(t, prompt, strlen(prompt), true, &ids, &n, NULL), 0);
        assert_int_equal(n, json_array_size(expected));
        json_array_foreach(expected, k, id)
        {
            assert_int_equal(ids[k], json_integer_value(id));
        }
        free(ids);
    }
    json_decref(root);
}

static void embedded_prompts(void **state)
{
    struct tokenizer *t = embedded();
    prompts_of(t, SOURCE_ROOT "/models/ember-tiny/expected_text.json");
    tokenizer_free(t);
}

/* Four times the text may take no more than some eight times as long: not sixteen. */
static void adversarial_texts_are_linear(void **state)
{
    static const char *const units[] = {"a", " ", "\n", "😀", "\xCC\x81\xCC\xA3", "<|im_", "漢"};
    struct tokenizer *t = embedded();
    for (size_t u = 0; u < ARRAY_LEN(units); u++) {
        double ms[2];
        for (int big = 0; big < 2; big++) {
            size_t m = strlen(units[u]), n = (big ? 400000 : 100000) / m * m, n_ids;
            char *text = mem_alloc(n, 1);
            uint32_t *ids;
            for (size_t i = 0; i < n; i++)
                text[i] = units[u][i % m];
            uint64_t start = clock_ns();
            assert_int_equal(tokenizer_encode(t, text, n, true, &ids, &n_ids, NULL), 0);
            ms[big] = clock_ms_since(start);
            free(ids);
            free(text);
        }
        /* The floor keeps a busy machine from failing this. */
        if (ms[1] > 12 * MAX(ms[0], 20.0))
            fail_msg("'%s': %.1f ms, then %.1f ms for four times as much", units[u], ms[0], ms[1]);
    }
    tokenizer_free(t);
}

/* --- Images --- */

static void image_round_trip(void **state)
{
    struct tokenizer *t = embedded(), *mapped = NULL;
    const void *image, *again;
    size_t len, len_again;
    tokenizer_image(t, &image, &len);
    char *copy = mem_alloc(len, 1);
    memcpy(copy, image, len);
    tokenizer_free(t);
    assert_int_equal(tokenizer_map(copy, len, &mapped, NULL), 0);
    tokenizer_image(mapped, &again, &len_again);
    assert_ptr_equal(again, copy);
    assert_int_equal(len_again, len);
    prompts_of(mapped, SOURCE_ROOT "/models/ember-tiny/expected_text.json");
    tokenizer_free(mapped);
    free(copy);
}

static void damaged_images(void **state)
{
    struct tokenizer *t = embedded(), *mapped = NULL;
    const void *image;
    size_t len;
    tokenizer_image(t, &image, &len);
    char *copy = mem_alloc(len, 1);
    for (int i = 0; i < 300; i++) {
        memcpy(copy, image, len);
        size_t at = i < 64 ? (size_t)i : random_below((uint32_t)len);
        copy[at] ^= (char)(1 << random_below(8));
        int r = tokenizer_map(copy, len, &mapped, NULL);
        assert_true(r == -EBADMSG || r == -ESTALE);
    }
    memcpy(copy, image, len);
    for (size_t n = 0; n < len; n += len / 50)
        assert_int_equal(tokenizer_map(copy, n, &mapped, NULL), -EBADMSG);
    free(copy);
    tokenizer_free(t);
}

/* --- tokenizer_config.json --- */

static void config_adds_bos(void **state)
{
    const char *json = "{\"added_tokens\":[{\"content\":\"<s>\",\"special\":true}],\"model\":{"
                       "\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]}}";
    const struct {
        const char *config;
        size_t n;
    } cases[] = {
        {"{\"tokenizer_class\":\"LlamaTokenizerFast\",\"bos_token\":{\"content\":\"<s>\"}}", 2},
        {"{\"tokenizer_class\":\"LlamaTokenizer\",\"bos_token\":\"<s>\",\"eos_token\":\"a\","
         "\"add_eos_token\":true}",
         3},
        {"{\"tokenizer_class\":\"LlamaTokenizer\",\"bos_token\":\"<s>\",\"add_bos_token\":false}",
         1},
        {"{\"tokenizer_class\":\"PreTrainedTokenizerFast\",\"bos_token\":\"<s>\"}", 1},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct tokenizer *t;
        uint32_t *ids;
        size_t n;
        assert_int_equal(tokenizer_load_text(json, strlen(json), cases[i].config,
                                             strlen(cases[i].config), &t, NULL),
                         0);
        assert_int_equal(tokenizer_encode(t, "a", 1, true, &ids, &n, NULL), 0);
        assert_int_equal(n, cases[i].n);
        free(ids);
        tokenizer_free(t);
    }
}

/* --- The reference's cases, where the data is there --- */

static void verify_one(const char *tokenizer, const char *expected)
{
    struct tokenizer *t = NULL;
    struct buffer report = {0};
    struct error err = {0};
    size_t cases = 0, mismatches = 0;
    if (tokenizer_load(tokenizer, &t, &err) < 0 ||
        tokenizer_verify(t, expected, &report, &cases, &mismatches, &err) < 0)
        fail_msg("%s", err.text);
    if (mismatches)
        fail_msg("%zu of %zu: %.2000s", mismatches, cases, report.data);
    assert_true(cases > 100);
    buffer_free(&report);
    tokenizer_free(t);
}

static void shared_cases(void **state)
{
    static const char *const names[] = {"deepseek_v3", "gpt2",         "gptoss", "llama2",
                                        "llama3_1",    "mistral_nemo", "qwen3"};
    char *tiny = shared_path("tokenizers/ember_tiny/expected.json");
    if (!tiny) {
        print_message("no shared reference data; set EMBER_SHARED\n");
        skip();
    }
    verify_one(SOURCE_ROOT "/models/ember-tiny/tokenizer.json", tiny);
    free(tiny);
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        char *name = x_printf("tokenizers/%s/tokenizer.json.xz", names[i]);
        char *cases = x_printf("tokenizers/%s/expected.json", names[i]);
        char *tokenizer = shared_path(name), *expected = shared_path(cases);
        assert_true(tokenizer && expected);
        verify_one(tokenizer, expected);
        free(name);
        free(cases);
        free(tokenizer);
        free(expected);
    }
}

static void shared_prompts(void **state)
{
    static const char *const names[] = {"BabyLlama-tok105-hf", "stories260K-hf"};
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        char *name = x_printf("public-models/%s", names[i]), *dir = shared_path(name);
        if (!dir) {
            print_message("no shared reference data; set EMBER_SHARED\n");
            free(name);
            skip();
        }
        struct tokenizer *t = NULL;
        assert_int_equal(tokenizer_load(dir, &t, NULL), 0);
        char *file = x_printf("%s/expected_text.json", dir);
        prompts_of(t, file);
        tokenizer_free(t);
        free(file);
        free(dir);
        free(name);
    }
}

/* A wrong expectation is found and shown with its place. */
static void verify_reports(void **state)
{
    char path[] = "/tmp/ember-verify-XXXXXX";
    int fd = mkstemp(path);
    static const char text[] =
        "{\"cases\":[{\"text\":\"Hello\",\"ids\":[1,2],\"decoded\":\"Hellx\"}]}";
    assert_int_equal(write(fd, text, sizeof text - 1), sizeof text - 1);
    close(fd);
    struct tokenizer *t = embedded();
    struct buffer report = {0};
    size_t cases, mismatches;
    assert_int_equal(tokenizer_verify(t, path, &report, &cases, &mismatches, NULL), 0);
    assert_int_equal(cases, 1);
    assert_int_equal(mismatches, 3);
    assert_non_null(strstr(report.data, "case 0: ids differs"));
    assert_non_null(strstr(report.data, "first at id 0"));
    assert_non_null(strstr(report.data, "first at character"));
    buffer_free(&report);
    tokenizer_free(t);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merges_follow_the_definition),
        cmocka_unit_test(unknown_characters),
        cmocka_unit_test(affixes),
        cmocka_unit_test(decoders),
        cmocka_unit_test(random_ids_with_fallback),
        cmocka_unit_test(pieces_come_early),
        cmocka_unit_test(growing_decoders_are_stopped),
        cmocka_unit_test(bytes_of_tokens),
        cmocka_unit_test(random_ids_byte_level),
        cmocka_unit_test(text_survives),
        cmocka_unit_test(embedded_prompts),
        cmocka_unit_test(adversarial_texts_are_linear),
        cmocka_unit_test(image_round_trip),
        cmocka_unit_test(damaged_images),
        cmocka_unit_test(config_adds_bos),
        cmocka_unit_test(shared_cases),
        cmocka_unit_test(shared_prompts),
        cmocka_unit_test(verify_reports),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
