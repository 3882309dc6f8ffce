/* SPDX-License-Identifier: Apache-2.0 */
#include "model/quant/rules.h"

#include <errno.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#define RULES_MAX 64
#define MATCH_LIMIT 100000 /* names are short: more steps are a pattern gone wild */

struct rule {
    enum quantize_kind kind;
    char *text;
    pcre2_code *code;
};

struct quantize_rules {
    enum quantize_kind kind;
    struct rule rules[RULES_MAX];
    uint32_t n;
    pcre2_match_data *data;
    pcre2_match_context *context;
};

static const char *const words[QUANTIZE_KIND_COUNT] = {
#define X(id, word) [id] = word,
    QUANTIZE_KINDS(X)
#undef X
};

void quantize_rules_free(struct quantize_rules *rules)
{
    if (!rules)
        return;
    for (uint32_t i = 0; i < rules->n; i++) {
        pcre2_code_free(rules->rules[i].code);
        free(rules->rules[i].text);
    }
    pcre2_match_data_free(rules->data);
    pcre2_match_context_free(rules->context);
    free(rules);
}

/* The kind that `len` bytes name; QUANTIZE_KIND_COUNT when none. */
static enum quantize_kind kind_of(const char *text, size_t len)
{
    enum quantize_kind kind = 0;
    while (kind < QUANTIZE_KIND_COUNT &&
           (strlen(words[kind]) != len || memcmp(words[kind], text, len)))
        kind++;
    return kind;
}

static int add_rule(struct quantize_rules *rules, const char *line, size_t len, struct error *err)
{
    const char *pattern = memchr(line, '=', len);
    size_t word = pattern ? (size_t)(pattern - line) : 0;
    struct rule *rule = &rules->rules[rules->n];
    PCRE2_SIZE at = 0;
    int code = 0;
    if (!pattern || (rule->kind = kind_of(line, word)) == QUANTIZE_KIND_COUNT)
        return error_set(err, EINVAL,
                         "quantisation: \"%.*s\" is none of keep=PATTERN, q8=PATTERN, q4=PATTERN",
                         (int)MIN(len, 80), line);
    if (rules->n == RULES_MAX - 1)
        return error_set(err, EINVAL, "quantisation: more than %d patterns", RULES_MAX - 1);
    rule->text = strndup(line, len);
    if (!rule->text)
        return error_set(err, ENOMEM, "quantisation: no memory for a pattern");
    rules->n++;
    rule->code = pcre2_compile((PCRE2_SPTR)(rule->text + word + 1), len - word - 1, PCRE2_UTF,
                               &code, &at, NULL);
    if (!rule->code) {
        PCRE2_UCHAR message[160] = "";
        pcre2_get_error_message(code, message, sizeof message);
        return error_set(err, EINVAL, "quantisation: pattern \"%.80s\": %s at character %zu",
                         rule->text + word + 1, (char *)message, (size_t)at);
    }
    return 0;
}

int quantize_rules_parse(const char *text, struct quantize_rules **ret, struct error *err)
{
    _cleanup_(quantize_rules_freep) struct quantize_rules *rules = mem_alloc(1, sizeof *rules);
    size_t len = strcspn(text, "\n");
    if (strlen(text) > QUANTIZE_TEXT_MAX)
        return error_set(err, EINVAL, "quantisation: %zu bytes of rules; at most %d are read",
                         strlen(text), QUANTIZE_TEXT_MAX);
    if (!rules || !(rules->data = pcre2_match_data_create(1, NULL)) ||
        !(rules->context = pcre2_match_context_create(NULL)))
        return error_set(err, ENOMEM, "quantisation: no memory for rules");
    pcre2_set_match_limit(rules->context, MATCH_LIMIT);
    rules->kind = kind_of(text, len);
    if (rules->kind != QUANTIZE_Q8 && rules->kind != QUANTIZE_Q4)
        return error_set(err, EINVAL, "quantisation: \"%.*s\" is neither q8 nor q4",
                         (int)MIN(len, 80), text);
    while (text[len]) {
        int r;
        text += len + 1;
        len = strcspn(text, "\n");
        if (len && (r = add_rule(rules, text, len, err)) < 0)
            return r;
    }
    *ret = TAKE(rules);
    return 0;
}

enum quantize_kind quantize_rules_default(const struct quantize_rules *rules)
{
    return rules->kind;
}

static bool matches(const struct quantize_rules *rules, const struct rule *rule, const char *name)
{
    return pcre2_match(rule->code, (PCRE2_SPTR)name, strlen(name), 0, 0, rules->data,
                       rules->context) >= 0;
}

enum quantize_kind quantize_rules_choose(const struct quantize_rules *rules, const char *name,
                                         enum quantize_kind otherwise, uint32_t *ret_asked)
{
    for (uint32_t i = 0; i < rules->n; i++)
        if (matches(rules, &rules->rules[i], name)) {
            *ret_asked = i + 1;
            return rules->rules[i].kind;
        }
    *ret_asked = 0;
    return otherwise;
}

uint32_t quantize_rules_count(const struct quantize_rules *rules)
{
    return rules->n;
}

const char *quantize_rules_text(const struct quantize_rules *rules, uint32_t i)
{
    return rules->rules[i - 1].text;
}
