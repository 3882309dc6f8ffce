/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chat parsers: each family's forms, what is broken, and what only looks like a call. Every case
 * runs whole, byte by byte and in random pieces, held back and live, and must give one message.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "model/chat/scan.h"
#include "tests/model/chat/collect.h"

/* Single quotes stand for double ones. */
static const char tools_json[] =
    "[{'type':'function','function':{'name':'get','parameters':{'type':'object','properties':{"
    "'city':{'type':'string'},'n':{'type':'integer'},'x':{'type':['number','null']},"
    "'on':{'type':'boolean'},'list':{'type':'array'},'any':{},'either':{'anyOf':["
    "{'type':'integer'},{'type':'string'}]}}}}},"
    "{'type':'function','function':{'name':'now','parameters':{}}}]";

struct chat_case {
    const char *what, *tools, *reasoning, *prompt, *text, *message;
    unsigned ids; /* 1: compare them as well */
};

#define GET "{'name':'get','arguments':'{\\'city\\': \\'Paris\\'}'}"
#define CALLS(x) "{'calls':[" x "]}"

static const struct chat_case cases[] = {
    {"no call", "hermes", "none", "", "Hello <tool> world.\n",
     "{'content':'Hello <tool> world.\n'}"},
    {"blanks", "hermes", "none", "", " \n ", "{'content':' \n '}"},
    {"nothing", "hermes", "qwen3", "", "", "{}"},
    /* Hermes */
    {"hermes", "hermes", "none", "",
     "<tool_call>\n{'name': 'get', 'arguments': {'city': 'Paris'}}\n</tool_call>", CALLS(GET)},
    {"text before, two calls", "hermes", "none", "",
     "Let me see.\n\n<tool_call>\n{'name': 'get', 'arguments': {'city': 'Paris'}}\n</tool_call>\n"
     "<tool_call>\n{'arguments': {'a': [1, -2.5e3, true, null, 'x\\n']}, 'name': "
     "'now'}\n</tool_call>\n",
     "{'content':'Let me see.','calls':[" GET ",{'name':'now','arguments':'{\\'a\\': [1, -2.5e3, "
     "true, null, \\'x\\\\n\\']}'}]}"},
    {"text behind", "hermes", "none", "", "<tool_call>{'name': 'now'}</tool_call>\nDone.",
     "{'content':'Done.','calls':[{'name':'now','arguments':'{}'}]}"},
    {"no end marker", "hermes", "none", "",
     "<tool_call>\n{'name': 'get', 'arguments': {'city': 'Paris'}}", CALLS(GET)},
    {"cut in the end marker", "hermes", "none", "",
     "<tool_call>\n{'name': 'get', 'arguments': {'city': 'Paris'}}\n</tool_", CALLS(GET)},
    {"arguments as text", "hermes", "none", "",
     "<tool_call>{'name': 'get', 'arguments': '{\\'city\\': \\'Paris\\'}'}</tool_call>",
     CALLS(GET)},
    {"a list of calls", "hermes", "none", "",
     "<tool_call>[{'name': 'get', 'arguments': {'city': 'Paris'}}, {'name': 'now', 'parameters': "
     "null}]</tool_call>",
     CALLS(GET ",{'name':'now','arguments':'{}'}")},
    {"cut short", "hermes", "none", "", "A <tool_call>\n{'name': 'get', 'arguments': {'city': 'Par",
     "{'content':'A <tool_call>\n{\\'name\\': \\'get\\', \\'arguments\\': {\\'city\\': \\'Par'}"},
    {"no JSON", "hermes", "none", "", "<tool_call>get(city)</tool_call> then",
     "{'content':'<tool_call>get(city)</tool_call> then'}"},
    {"a broken one and a good one", "hermes", "none", "",
     "<tool_call>{'name': 'get', 'arguments': {city: 1}}</tool_call>\n<tool_call>{'name': 'now', "
     "'arguments': {}}</tool_call>",
     "{'content':'<tool_call>{\\'name\\': \\'get\\', \\'arguments\\': {city: "
     "1}}</tool_call>','calls':[{'name':'now','arguments':'{}'}]}"},
    {"no name", "hermes", "none", "", "<tool_call>{'arguments': {}}</tool_call>",
     "{'content':'<tool_call>{\\'arguments\\': {}}</tool_call>'}"},
    {"arguments that are none", "hermes", "none", "",
     "<tool_call>{'name': 'get', 'arguments': [1]}</tool_call>",
     "{'content':'<tool_call>{\\'name\\': \\'get\\', \\'arguments\\': [1]}</tool_call>'}"},
    {"end marker within a string", "hermes", "none", "",
     "<tool_call>{'name': 'get', 'arguments': {'city': '</tool_call>{'}}</tool_call>",
     CALLS("{'name':'get','arguments':'{\\'city\\': \\'</tool_call>{\\'}'}")},
    /* Qwen3-Coder */
    {"qwen3_coder", "qwen3_coder", "none", "",
     "<tool_call>\n<function=get>\n<parameter=city>\nParis\n</parameter>\n</function>\n</"
     "tool_call>",
     CALLS(GET)},
    {"types of the schema", "qwen3_coder", "none", "",
     "<tool_call>\n<function=get>\n<parameter=city>\n12\n</parameter>\n<parameter=n>\n12\n"
     "</parameter>\n<parameter=x>\nnull\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n"
     "<parameter=list>\n[1, 'a']\n</parameter>\n<parameter=any>\n{'k': 1}\n</parameter>\n"
     "<parameter=either>\nfive\n</parameter>\n</function>\n</tool_call>",
     CALLS(
         "{'name':'get','arguments':'{\\'city\\': \\'12\\', \\'n\\': 12, \\'x\\': null, \\'on\\': "
         "true, \\'list\\': [1, \\'a\\'], \\'any\\': {\\'k\\': 1}, \\'either\\': \\'five\\'}'}")},
    {"a value of another type", "qwen3_coder", "none", "",
     "<tool_call><function=get><parameter=n>many</parameter></function></tool_call>",
     CALLS("{'name':'get','arguments':'{\\'n\\': \\'many\\'}'}")},
    {"lines and tags in a value", "qwen3_coder", "none", "",
     "<tool_call>\n<function=get>\n<parameter=city>\na\n</parameter> "
     "b\n\n</parameter>\n</function>\n"
     "</tool_call>",
     CALLS("{'name':'get','arguments':'{\\'city\\': \\'a\\\\n</parameter> b\\\\n\\'}'}")},
    {"without tool_call, of a known name", "qwen3_coder", "none", "",
     "Yes.\n<function=now>\n</function>\n</tool_call> ok <function=other></function>",
     "{'content':'Yes. ok <function=other></function>','calls':[{'name':'now','arguments':'{}'}]}"},
    {"the function's end forgotten", "qwen3_coder", "none", "",
     "<tool_call>\n<function=get>\n<parameter=city>\nParis\n</parameter>\n</tool_call>",
     CALLS(GET)},
    {"cut in a value", "qwen3_coder", "none", "",
     "<tool_call>\n<function=get>\n<parameter=city>\nPar",
     "{'content':'<tool_call>\n<function=get>\n<parameter=city>\nPar'}"},
    {"an empty section", "qwen3_coder", "none", "", "a <tool_call></tool_call> b",
     "{'content':'a <tool_call></tool_call> b'}"},
    /* Llama 3 */
    {"llama3_json", "llama3_json", "none", "", "{'name': 'get', 'parameters': {'city': 'Paris'}}",
     CALLS(GET)},
    {"python_tag, two", "llama3_json", "none", "",
     "<|python_tag|>{'name': 'get', 'parameters': {'city': 'Paris'}}; {'name': 'now', "
     "'parameters': "
     "{}}",
     CALLS(GET ",{'name':'now','arguments':'{}'}")},
    {"JSON that is an answer", "llama3_json", "none", "", "{'name': 'Paris', 'size': 2}",
     "{'content':'{\\'name\\': \\'Paris\\', \\'size\\': 2}'}"},
    {"not at the beginning", "llama3_json", "none", "", "So {'name': 'now', 'parameters': {}}",
     "{'content':'So {\\'name\\': \\'now\\', \\'parameters\\': {}}'}"},
    {"python", "llama3_json", "none", "", "<|python_tag|>get.call(1)",
     "{'content':'<|python_tag|>get.call(1)'}"},
    /* Mistral */
    {"mistral, old", "mistral", "none", "",
     "[TOOL_CALLS] [{'name': 'get', 'arguments': {'city': 'Paris'}}, {'name': 'now', 'arguments': "
     "{}, 'id': 'abcdefghi'}]",
     CALLS(GET ",{'name':'now','arguments':'{}'}")},
    {"mistral, new", "mistral", "none", "",
     "Ok.[TOOL_CALLS]get[ARGS]{'city': 'Paris'}[TOOL_CALLS]now[ARGS]{}",
     "{'content':'Ok.','calls':[" GET ",{'name':'now','arguments':'{}'}]}"},
    {"mistral, without ARGS", "mistral", "none", "", "[TOOL_CALLS]get{'city': 'Paris'}",
     CALLS(GET)},
    {"mistral, with an id", "mistral", "none", "",
     "[TOOL_CALLS]get[CALL_ID]abcdefghi[ARGS]{'city': 'Paris'}",
     CALLS("{'id':'abcdefghi','name':'get','arguments':'{\\'city\\': \\'Paris\\'}'}"), 1},
    {"mistral thinks", "mistral", "mistral", "", "[THINK]Hm.[/THINK][TOOL_CALLS]now[ARGS]{}",
     "{'reasoning':'Hm.','calls':[{'name':'now','arguments':'{}'}]}"},
    {"mistral, no name", "mistral", "none", "", "[TOOL_CALLS]{'city': 1}",
     "{'content':'[TOOL_CALLS]{\\'city\\': 1}'}"},
    /* DeepSeek */
    {"deepseek_v3", "deepseek_v3", "deepseek_r1", "<think>\n",
     "Hm.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n"
     "```json\n{'city': "
     "'Paris'}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now"
     "\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     "{'reasoning':'Hm.','calls':[" GET ",{'name':'now','arguments':'{}'}]}"},
    {"deepseek_v31", "deepseek_v31", "deepseek_v3", "<think></think>",
     "Ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{'city': "
     "'Paris'}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
     "<｜tool▁calls▁end｜>",
     "{'content':'Ok','calls':[" GET ",{'name':'now','arguments':'{}'}]}"},
    {"deepseek, the second is broken", "deepseek_v31", "none", "",
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
     "<｜tool▁call▁begin｜>get<｜tool▁sep｜>{'city",
     "{'content':'<｜tool▁call▁begin｜>get<｜tool▁sep｜>{\\'city','calls':[{'name':'now','"
     "arguments':"
     "'{}'}]}"},
    {"deepseek_v32", "deepseek_v32", "deepseek_v3", "<think>",
     "Hm.</think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name='get'>\n<｜DSML｜parameter "
     "name='city' "
     "string='true'>5</｜DSML｜parameter>\n<｜DSML｜parameter name='n' "
     "string='false'>5</｜DSML｜parameter>"
     "\n</｜DSML｜invoke>\n<｜DSML｜invoke "
     "name='now'>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
     "{'reasoning':'Hm.','calls':[{'name':'get','arguments':'{\\'city\\': \\'5\\', \\'n\\': "
     "5}'},{'name':'now','arguments':'{}'}]}"},
    /* GLM */
    {"glm45", "glm45", "glm45", "",
     "<think>Hm.</think>\nI look.\n<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>Paris"
     "</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
     "{'reasoning':'Hm.','content':'I look.','calls':[" GET ",{'name':'now','arguments':'{}'}]}"},
    {"glm47", "glm47", "glm45", "<think>",
     "Hm.</think><tool_call>get<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>",
     "{'reasoning':'Hm.','calls':[{'name':'get','arguments':'{\\'n\\': 3}'}]}"},
    /* Kimi */
    {"kimi_k2", "kimi_k2", "kimi_k2", "",
     "<think>Hm<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0"
     "<|tool_call_argument_begin|>{'city': "
     "'Paris'}<|tool_call_end|><|tool_call_begin|>functions.now:"
     "1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
     "{'reasoning':'Hm','calls':[{'id':'functions.get:0','name':'get','arguments':'{\\'city\\': "
     "\\'Paris\\'}'},{'id':'functions.now:1','name':'now','arguments':'{}'}]}",
     1},
    /* MiniMax, Seed, others */
    {"minimax_m2", "minimax_m2", "minimax_m2", "<think>\n",
     "Hm.\n</think>\n\n<minimax:tool_call>\n<invoke name='get'>\n<parameter name='city'>Paris"
     "</parameter>\n</invoke>\n<invoke name='now'>\n</invoke>\n</minimax:tool_call>",
     "{'reasoning':'Hm.','calls':[" GET ",{'name':'now','arguments':'{}'}]}"},
    {"seed_oss", "seed_oss", "seed_oss", "",
     "<seed:think>Hm.</seed:think><seed:tool_call>\n<function=get>\n<parameter=city>Paris"
     "</parameter>\n<parameter=list>[^it\\^s^, None]</parameter>\n</function>\n</seed:tool_call>",
     "{'reasoning':'Hm.','calls':[{'name':'get','arguments':'{\\'city\\': \\'Paris\\', \\'list\\': "
     "[\\'it^s\\', null]}'}]}"},
    {"nemotron", "nemotron", "none", "",
     "<TOOLCALL>[{'name': 'get', 'arguments': {'city': 'Paris'}}]</TOOLCALL>", CALLS(GET)},
    {"cohere", "cohere", "cohere", "",
     "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {'tool_call_id': '0', "
     "'tool_name': "
     "'get', 'parameters': {'city': 'Paris'}}\n]<|END_ACTION|>",
     "{'reasoning':'Hm.','calls':[" GET "]}"},
    {"functionary", "functionary", "none", "", "<function=get>{'city': 'Paris'}</function>",
     CALLS(GET)},
    {"jamba", "jamba", "none", "",
     "<tool_calls>[{'name': 'get', 'arguments': {'city': 'Paris'}}]</tool_calls>", CALLS(GET)},
    /* Harmony */
    {"harmony", "openai", "openai", "<|start|>assistant",
     "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I "
     "look.<|end|><|start|>assistant<|channel|>commentary to=functions.get "
     "<|constrain|>json<|message|>{'city': 'Paris'}<|call|>",
     "{'reasoning':'Hm.','content':'I look.','calls':[" GET "]}"},
    {"harmony, recipient before the channel", "openai", "openai", "<|start|>assistant",
     " to=functions.get<|channel|>commentary json<|message|>{'city': 'Paris'}", CALLS(GET)},
    {"harmony, an answer", "openai", "openai", "<|start|>assistant",
     "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two."
     "<|end|><|start|>assistant<|channel|>final<|message|>A < b.<|return|>",
     "{'reasoning':'One.\nTwo.','content':'A < b.'}"},
    {"harmony, begun by us", "openai", "openai", "<|start|>assistant<|channel|>final<|message|>So",
     " it is", "{'content':' it is'}"},
    {"harmony, cut short", "openai", "openai", "<|start|>assistant",
     "<|channel|>commentary to=functions.get<|message|>{'city",
     "{'content':'<|channel|>commentary to=functions.get<|message|>{\\'city'}"},
    {"harmony, another's tool", "openai", "openai", "<|start|>assistant",
     "<|channel|>analysis to=python<|message|>1+1<|call|>",
     "{'content':'<|channel|>analysis to=python<|message|>1+1'}"},
    {"harmony, no form at all", "openai", "openai", "<|start|>assistant", "Hello.",
     "{'content':'Hello.'}"},
    /* Reasoning */
    {"think", "none", "qwen3", "", "\n<think>\nHm.\n\nSo.\n</think>\n\nYes.\n",
     "{'reasoning':'Hm.\n\nSo.','content':'Yes.\n'}"},
    {"opened by the prompt", "none", "qwen3", "<|im_start|>assistant\n<think>\n", "Hm.</think>Yes.",
     "{'reasoning':'Hm.','content':'Yes.'}"},
    {"closed by the prompt", "none", "deepseek_r1", "<think>\n\n</think>\n\n", "Yes </think>.",
     "{'content':'Yes </think>.'}"},
    {"never closed", "none", "qwen3", "", "<think>Hm. </thin", "{'reasoning':'Hm. </thin'}"},
    {"does not think", "none", "qwen3", "", " Yes, <think> is a tag.",
     "{'content':' Yes, <think> is a tag.'}"},
    {"only a prefix", "none", "qwen3", "", "<thi", "{'content':'<thi'}"},
    {"opened by habit", "none", "deepseek_r1", "", "Hm.</think>Yes.",
     "{'reasoning':'Hm.','content':'Yes.'}"},
    {"a call in a thought is a thought", "hermes", "qwen3", "",
     "<think>I use <tool_call>{}</think>Ok", "{'reasoning':'I use <tool_call>{}','content':'Ok'}"},
};

/* Single quotes to double ones, ^ to a single one; \\' becomes an escaped double one. */
static char *quoted(const char *text, bool json)
{
    struct buffer out = {0};
    buffer_append(&out, "", 0);
    for (const char *s = text; *s; s++) {
        char c = *s;
        if (json && c == '\n') {
            buffer_append(&out, "\\n", 2);
            continue;
        }
        if (c == '\'' || c == '^')
            c = c == '^' ? '\'' : '"';
        buffer_append(&out, &c, 1);
    }
    return out.data;
}

static json_t *parsed(const char *text)
{
    char *s = quoted(text, true);
    json_error_t e;
    json_t *j = json_loads(s, 0, &e);
    if (!j)
        fail_msg("%s: %s", s, e.text);
    free(s);
    return j;
}

static void drop_ids(json_t *message)
{
    size_t i;
    json_t *call;
    json_array_foreach(json_object_get(message, "calls"), i, call) json_object_del(call, "id");
}

static void check(const struct chat_case *c, const struct chat_options *o, const char *text,
                  const json_t *want, size_t step, unsigned seed)
{
    struct collect got;
    collect_run(o, text, strlen(text), step, seed, &got);
    json_t *message = collect_message(&got);
    if (!c->ids)
        drop_ids(message);
    if (!json_equal(message, want)) {
        char *a = json_dumps(message, JSON_SORT_KEYS), *b = json_dumps(want, JSON_SORT_KEYS);
        fail_msg("%s (pieces of %zu, %s):\n  %s\nnot %s", c->what, step,
                 o->live ? "live" : "held back", a, b);
    }
    json_decref(message);
    collect_free(&got);
}

static void families(void **state)
{
    json_t *tools = parsed(tools_json);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const struct chat_case *c = &cases[i];
        char *text = quoted(c->text, false);
        json_t *want = parsed(c->message);
        struct chat_options o = {
            .tools = tools, .prompt = c->prompt, .prompt_len = strlen(c->prompt)};
        assert_true(chat_tools_named(c->tools, &o.form.tools));
        assert_true(chat_reasoning_named(c->reasoning, &o.form.reasoning));
        for (int live = 0; live < 2; live++) {
            o.live = live;
            for (size_t step = 1; step < 8; step++)
                check(c, &o, text, want, step, 0);
            check(c, &o, text, want, strlen(text) + 1, 0);
            for (unsigned seed = 0; seed < 20; seed++)
                check(c, &o, text, want, 0, seed);
        }
        json_decref(want);
        free(text);
    }
    json_decref(tools);
}

/* Every end of every case: nothing is lost, nothing depends on the pieces. */
static void cut_anywhere(void **state)
{
    json_t *tools = parsed(tools_json);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const struct chat_case *c = &cases[i];
        char *text = quoted(c->text, false);
        struct chat_options o = {
            .tools = tools, .prompt = c->prompt, .prompt_len = strlen(c->prompt)};
        chat_tools_named(c->tools, &o.form.tools);
        chat_reasoning_named(c->reasoning, &o.form.reasoning);
        for (size_t n = strlen(text); n-- > 0;) {
            if (((unsigned char)text[n] & 0xC0) == 0x80)
                continue;
            text[n] = 0;
            struct collect whole;
            collect_run(&o, text, n, n + 1, 0, &whole);
            json_t *want = collect_message(&whole);
            struct chat_case any = *c;
            any.ids = 1;
            for (int live = 0; live < 2; live++) {
                struct chat_options other = o;
                other.live = live;
                any.ids = !live; /* a call that broke off live has taken its index */
                if (live)
                    drop_ids(want);
                check(&any, &other, text, want, 1, 0);
                check(&any, &other, text, want, 0, (unsigned)n);
            }
            json_decref(want);
            collect_free(&whole);
        }
        free(text);
    }
    json_decref(tools);
}

static void arguments_come_in_pieces(void **state)
{
    static const char text[] =
        "<tool_call>{\"name\": \"get\", \"arguments\": {\"city\": \"Paris\"}}";
    struct chat_options o = {.form = {CHAT_TOOLS_HERMES, CHAT_REASONING_NONE}, .live = true};
    struct collect c;
    o.tools = parsed(tools_json);
    collect_run(&o, text, strlen(text), 1, 0, &c);
    assert_true(c.pieces > 10);
    collect_free(&c);
    /* Broken off: the beginning has gone out, the text is there as well, the call is not whole. */
    collect_run(&o, text, strlen(text) - 4, 1, 0, &c);
    json_t *call = json_array_get(c.calls, 0);
    assert_string_equal(json_string_value(json_object_get(call, "arguments")), "{\"city\": \"Pari");
    assert_true(json_is_false(json_object_get(call, "whole")));
    assert_int_equal(c.text[CHAT_CONTENT].len, strlen(text) - 4);
    collect_free(&c);
    json_decref((json_t *)o.tools);
}

static void without_tools_text_is_text(void **state)
{
    static const char text[] = "<tool_call>{\"name\": \"get\", \"arguments\": {}}</tool_call>";
    struct chat_options o = {.form = {CHAT_TOOLS_HERMES, CHAT_REASONING_THINK}};
    struct collect c;
    collect_run(&o, text, strlen(text), 3, 0, &c);
    assert_string_equal(c.text[CHAT_CONTENT].data, text);
    collect_free(&c);
}

static void one_call_alone(void **state)
{
    static const char *const texts[] = {
        "<tool_call>{\"name\": \"now\"}</tool_call><tool_call>{\"name\": \"get\"}</tool_call> x",
        "<tool_call>[{\"name\": \"now\"}, {\"name\": \"get\"}]</tool_call> x"};
    struct chat_options o = {.form = {CHAT_TOOLS_HERMES, CHAT_REASONING_NONE}, .one_call = true};
    o.tools = parsed(tools_json);
    for (size_t i = 0; i < ARRAY_LEN(texts); i++)
        for (size_t step = 1; step < 200; step += 66) {
            struct collect c;
            collect_run(&o, texts[i], strlen(texts[i]), step, 0, &c);
            assert_int_equal(json_array_size(c.calls), 1);
            assert_int_equal(c.text[CHAT_CONTENT].len, 0);
            collect_free(&c);
        }
    json_decref((json_t *)o.tools);
}

static void forced_output(void **state)
{
    struct chat_options o = {.forced = CHAT_FORCED_ARGUMENTS,
                             .function = "get",
                             .form = {CHAT_TOOLS_HERMES, CHAT_REASONING_NONE}};
    struct chat_case any = {.what = "forced"};
    json_t *want = parsed(CALLS(GET));
    check(&any, &o, "{\"city\": \"Paris\"}", want, 1, 0);
    check(&any, &o, " {\"city\": \"Paris\"}\n", want, 5, 0);
    o.forced = CHAT_FORCED_CALLS;
    check(&any, &o, "[{\"name\": \"get\", \"parameters\": {\"city\": \"Paris\"}}]", want, 1, 0);
    json_decref(want);
    want = parsed("{'content':'[{\\'name\\': \\'g'}");
    check(&any, &o, "[{\"name\": \"g", want, 1, 0);
    json_decref(want);
}

static void answers_begin(void **state)
{
    static const struct {
        const char *reasoning, *prompt, *want;
    } rows[] = {{"qwen3", "<|im_start|>assistant\n<think>\n", "</think>"},
                {"qwen3", "<|im_start|>assistant\n", NULL},
                {"qwen3", "<think>\n\n</think>\n\n", NULL},
                {"openai", "<|end|><|start|>assistant", "<|channel|>final<|message|>"},
                {"none", "<think>", NULL},
                {"seed_oss", "", NULL}};
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct chat_form form = {0};
        assert_true(chat_reasoning_named(rows[i].reasoning, &form.reasoning));
        const char *got = chat_answer_begins(form, rows[i].prompt, strlen(rows[i].prompt));
        if (!rows[i].want)
            assert_null(got);
        else
            assert_string_equal(got, rows[i].want);
    }
}

static void names(void **state)
{
    enum chat_tools tools;
    enum chat_reasoning reasoning;
    char buf[CHAT_NAME_SIZE];
    assert_true(chat_tools_named("deepseek_v31", &tools));
    assert_string_equal(chat_tools_name(tools, buf), "deepseek_v3");
    assert_true(chat_tools_named("none", &tools));
    assert_int_equal(tools, CHAT_TOOLS_NONE);
    assert_false(chat_tools_named("deepseek", &tools));
    assert_false(chat_tools_named("", &tools));
    assert_true(chat_reasoning_named("openai_gptoss", &reasoning));
    assert_int_equal(reasoning, CHAT_REASONING_HARMONY);
    assert_string_equal(chat_reasoning_name(CHAT_REASONING_NONE, buf), "none");
}

static void special_tokens(void **state)
{
    static const struct {
        const char *tools, *token;
        bool wanted;
    } rows[] = {{"kimi_k2", "<|tool_call_end|>", true},  {"kimi_k2", "<|im_end|>", false},
                {"mistral", "[TOOL_CALLS]", true},       {"mistral", "[INST]", false},
                {"openai", "<|channel|>", true},         {"openai", "<|startoftext|>", false},
                {"llama3_json", "<|python_tag|>", true}, {"llama3_json", "<|eom_id|>", false},
                {"deepseek_v32", "｜DSML｜", true},      {"hermes", "<|im_end|>", false}};
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct chat_form form = {0};
        assert_true(chat_tools_named(rows[i].tools, &form.tools));
        assert_int_equal(chat_wants(form, rows[i].token, strlen(rows[i].token)), rows[i].wanted);
    }
}

/* ---- the scanner, against a parser of whole texts ---- */

static bool scanned(const char *text)
{
    struct scan s = SCAN_START;
    for (; *text; text++)
        if (scan_byte(&s, (unsigned char)*text) == SCAN_BAD)
            return false;
    return scan_done(&s);
}

static void scanner(void **state)
{
    static const char *const texts[] = {"{}",
                                        "[]",
                                        "{\"a\":1}",
                                        "{\"a\":-0.5e+3,\"b\":[1,2,{}]}",
                                        "[1,]",
                                        "{,}",
                                        "{\"a\"}",
                                        "{\"a\":}",
                                        "{\"a\":01}",
                                        "{\"a\":1.}",
                                        "{\"a\":.5}",
                                        "{\"a\":1e}",
                                        "{\"a\":+1}",
                                        "[truE]",
                                        "[true]",
                                        "[nul]",
                                        "[null ]",
                                        "[\"\\u12\"]",
                                        "[\"\\u12aF\"]",
                                        "[\"\\x\"]",
                                        "[\"\t\"]",
                                        "[1 2]",
                                        "[1}",
                                        "{\"a\":1]",
                                        "{\"a\" : 1 , \"b\" : \"c\"}",
                                        "{a:1}",
                                        "[[[[]]]]",
                                        "[-]",
                                        "[- 1]",
                                        "[\"a\" \"b\"]",
                                        "{} {}",
                                        "[1]]",
                                        "",
                                        "{\"a\":1,}",
                                        "[0]",
                                        "[-0]",
                                        "[1E5]",
                                        "[1e-5]",
                                        "[1e5.5]"};
    for (size_t i = 0; i < ARRAY_LEN(texts); i++) {
        json_t *j = json_loads(texts[i], 0, NULL);
        if (scanned(texts[i]) != (j != NULL))
            fail_msg("'%s': the parser says %s", texts[i], j ? "yes" : "no");
        json_decref(j);
    }
    char deep[600] = "";
    memset(deep, '[', 500);
    assert_false(scanned(deep));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(families),
        cmocka_unit_test(cut_anywhere),
        cmocka_unit_test(arguments_come_in_pieces),
        cmocka_unit_test(without_tools_text_is_text),
        cmocka_unit_test(one_call_alone),
        cmocka_unit_test(forced_output),
        cmocka_unit_test(answers_begin),
        cmocka_unit_test(names),
        cmocka_unit_test(special_tokens),
        cmocka_unit_test(scanner),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
