/* SPDX-License-Identifier: Apache-2.0 */
#include "model/tokenizer/regex.h"

#include <errno.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

struct regex {
    pcre2_code *code;
    bool jit;
};

struct regex_scratch {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

/* Vendors' patterns need a few steps a character; these bounds stop only a pathological one. */
#define MATCH_LIMIT 100000000u
#define JIT_STACK_MAX (16u << 20)

int regex_compile(const char *pattern, size_t len, struct regex **ret_regex, struct error *err)
{
    _cleanup_(buffer_free) struct buffer text = {0};
    int code = 0, r = regex_translate(pattern, len, &text, err);
    PCRE2_SIZE offset = 0;
    if (r < 0)
        return r;
    _cleanup_(regex_freep) struct regex *re = mem_alloc(1, sizeof *re);
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!re || !context) {
        pcre2_compile_context_free(context);
        return error_set(err, ENOMEM, "no memory for a pattern");
    }
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    re->code = pcre2_compile((PCRE2_SPTR)(text.data ? text.data : ""), text.len,
                             PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NO_UTF_CHECK, &code,
                             &offset, context);
    pcre2_compile_context_free(context);
    if (!re->code) {
        PCRE2_UCHAR message[160] = "";
        pcre2_get_error_message(code, message, sizeof message);
        return error_set(err, EBADMSG, "pattern '%.120s': %s", pattern, (char *)message);
    }
    re->jit = pcre2_jit_compile(re->code, PCRE2_JIT_COMPLETE) == 0;
    *ret_regex = TAKE(re);
    return 0;
}

void regex_free(struct regex *re)
{
    if (!re)
        return;
    pcre2_code_free(re->code);
    free(re);
}

struct regex_scratch *regex_scratch_new(void)
{
    struct regex_scratch *s = mem_alloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->data = pcre2_match_data_create(1, NULL);
    s->context = pcre2_match_context_create(NULL);
    s->stack = pcre2_jit_stack_create(32 * 1024, JIT_STACK_MAX, NULL);
    if (!s->data || !s->context) {
        regex_scratch_free(s);
        return NULL;
    }
    pcre2_set_match_limit(s->context, MATCH_LIMIT);
    if (s->stack)
        pcre2_jit_stack_assign(s->context, NULL, s->stack);
    return s;
}

void regex_scratch_free(struct regex_scratch *s)
{
    if (!s)
        return;
    pcre2_match_data_free(s->data);
    pcre2_match_context_free(s->context);
    pcre2_jit_stack_free(s->stack);
    free(s);
}

int regex_find(const struct regex *re, struct regex_scratch *s, const char *text, size_t len,
               size_t from, size_t *ret_start, size_t *ret_end, struct error *err)
{
    PCRE2_SPTR subject = (PCRE2_SPTR)text;
    int n = re->jit ? pcre2_jit_match(re->code, subject, len, from, 0, s->data, s->context)
                    : pcre2_match(re->code, subject, len, from, PCRE2_NO_UTF_CHECK, s->data,
                                  s->context);
    if (n == PCRE2_ERROR_NOMATCH)
        return 0;
    if (n < 0) {
        PCRE2_UCHAR message[160] = "";
        pcre2_get_error_message(n, message, sizeof message);
        return error_set(err, E2BIG, "a tokenizer pattern gave up on this text: %s",
                         (char *)message);
    }
    const PCRE2_SIZE *ovector = pcre2_get_ovector_pointer(s->data);
    if (ovector[0] < from || ovector[1] < ovector[0] || ovector[1] > len)
        return error_set(err, ENOTSUP, "a tokenizer pattern matched before its start (\\K)");
    *ret_start = ovector[0];
    *ret_end = ovector[1];
    return 1;
}
