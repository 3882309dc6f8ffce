# SPDX-License-Identifier: Apache-2.0
"""Tool calls and reasoning through the whole way, from an instance's tokens to a client's objects.

ember-tiny cannot call tools. Its tokenizer's decoder can be told to write other texts for the tokens
of an answer that it gives for certain: such copies of it "write" a call, token by token.
"""
import json
import os
import shutil
import subprocess
import sys
import unittest

from gateway import TINY, Stack, wait_until

HERE = os.path.dirname(os.path.abspath(__file__))
EMBERCTL = os.environ["EMBERCTL"]
ANSWER = json.load(open(f"{TINY}/expected_text.json"))["cases"][0]["greedy_ids"]
ASK = [{"role": "user", "content": "Who are you?"}]
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}}}}}]
ARGUMENTS = {"city": "Paris \u2603", "days": 3}

# What each copy says in place of the answer, and the chat template's words that show its family.
SAYS = {
    "hermes": ("<think>\nI should look.\n</think>\n\nOne moment.\n<tool_call>\n{\"name\": "
               "\"get_weather\", \"arguments\": {\"city\": \"Paris \u2603\", \"days\": 3}}\n</tool_call>",
               "<think> <tool_call>"),
    "xml": ("<think>\nI should look.\n</think>\n\nOne moment.\n<tool_call>\n<function=get_weather>\n"
            "<parameter=city>\nParis \u2603\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "</function>\n</tool_call>", "<think> <tool_call> <function= <parameter="),
    "half": ("One moment.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Par",
             "<tool_call>"),
    "two": ("<tool_call>{\"name\": \"get_weather\", \"arguments\": {\"days\": 1}}</tool_call>\n"
            "<tool_call>{\"name\": \"get_weather\", \"arguments\": {\"days\": 2}}</tool_call>",
            "<tool_call>"),
}


# Templates that show what they were given.
TEMPLATES = {
    "walks": "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
             "{% for k, v in c.function.arguments.items() %}[{{ k }}={{ v }}]{% endfor %}{% endfor %}"
             "{{ m.reasoning_content }};{% endfor %}{{ tools | length if tools else 'no' }}"
             " {{ reasoning_effort }} {{ enable_thinking }}",
    "thinks": "{% for m in messages %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endfor %}"
              "<|im_start|>assistant\n<think>",
    "joins": "{% for m in messages %}{% if m['content'] is none %}{{ m.tool_calls[0].function.name "
             "+ m.tool_calls[0].function.arguments }}{% endif %}{% endfor %}",
}


def byte_characters():
    """GPT-2's printable characters for bytes, which tokens are spelled in."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def cut(data, n):
    """n pieces of about the same length, cut anywhere, within characters too."""
    edges = [len(data) * i // n for i in range(n + 1)]
    return [data[a:b] for a, b in zip(edges, edges[1:])]


def make_model(folder, text, words, template=None):
    """A copy of ember-tiny that writes `text` in place of the answer, or has another template."""
    os.makedirs(folder)
    for name in os.listdir(TINY):
        if name not in ("tokenizer.json", "tokenizer_config.json"):
            os.symlink(f"{TINY}/{name}", f"{folder}/{name}")
    with open(f"{TINY}/tokenizer.json") as f:
        tokenizer = json.load(f)
    with open(f"{TINY}/tokenizer_config.json") as f:
        config = json.load(f)
    spelled = {i: s for s, i in tokenizer["model"]["vocab"].items()}
    ids = [i for i in dict.fromkeys(ANSWER) if i in spelled and i != ANSWER[-1]]
    once = [i for i in ids if ANSWER.count(i) == 1]
    alphabet = byte_characters()
    texts = dict(zip(once, cut(text.encode(), len(once))))
    rules = []
    for i in ids:
        content = "".join(alphabet[b] for b in texts.get(i, b""))
        escaped = "".join(c if c.isalnum() else "\\" + c for c in spelled[i])
        # What replaces one token must not look like another: a mark that no other rule matches.
        rules.append({"type": "Replace", "pattern": {"Regex": f"\\A{escaped}\\z"},
                      "content": "\u4e00" + content})
    rules.append({"type": "Replace", "pattern": {"String": "\u4e00"}, "content": ""})
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [*rules, tokenizer["decoder"]]}
    config["chat_template"] = template or "{# " + words + " #}" + config["chat_template"]
    with open(f"{folder}/tokenizer.json", "w") as f:
        json.dump(tokenizer, f)
    with open(f"{folder}/tokenizer_config.json", "w") as f:
        json.dump(config, f)


class Tools(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stack = Stack("--per-model=half tool-parser=hermes reasoning-parser=none",
                          "--max-instances=1", emberd=("--standby=0",))
        for name in (*SAYS, *TEMPLATES):
            make_model(f"{cls.stack.folder}/models/{name}", *SAYS.get(name, ("", "")),
                       TEMPLATES.get(name))
            subprocess.run([EMBERCTL, "load", "--socket", cls.stack.emberd.socket,
                            f"{cls.stack.folder}/models/{name}"], check=True,
                           stdout=subprocess.DEVNULL, timeout=60)
        wait_until(lambda: {m["id"] for m in cls.stack.gateway.get("/v1/models")[2]["data"]} >= {*SAYS, *TEMPLATES},
                   "the gateway knows the models")

    @classmethod
    def tearDownClass(cls):
        cls.stack.stop()

    def ask(self, model, **more):
        status, _, r = self.stack.gateway.request("POST", "/v1/chat/completions", {
            "model": model, "messages": ASK, "temperature": 0, **more})
        self.assertEqual(status, 200, r)
        return r["choices"][0]

    def stream(self, model, **more):
        """(message put together from deltas, finish_reason, number of deltas with arguments)"""
        status, _, data = self.stack.gateway.request("POST", "/v1/chat/completions", {
            "model": model, "messages": ASK, "temperature": 0, "stream": True, **more})
        self.assertEqual(status, 200)
        message, reason, pieces = {}, None, 0
        for line in data.decode().split("\n\n"):
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                delta = choice["delta"]
                reason = choice["finish_reason"] or reason
                for key in ("content", "reasoning", "reasoning_content"):
                    if delta.get(key):
                        message[key] = message.get(key, "") + delta[key]
                for call in delta.get("tool_calls", ()):
                    calls = message.setdefault("tool_calls", [])
                    if call["index"] == len(calls):
                        self.assertEqual(call["type"], "function")
                        calls.append({"id": call["id"], "type": "function", "function": {
                            "name": call["function"]["name"], "arguments": ""}})
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
                    pieces += bool(call["function"]["arguments"])
        return message, reason, pieces

    def without_ids(self, message):
        return {k: [{**c, "id": None} for c in v] if k == "tool_calls" else v
                for k, v in message.items() if v and k not in ("role", "refusal")}

    def test_calls_and_reasoning(self):
        for model in ("hermes", "xml"):
            choice = self.ask(model, tools=TOOLS)
            message = choice["message"]
            self.assertEqual(choice["finish_reason"], "tool_calls")
            self.assertEqual(message["reasoning_content"], "I should look.")
            self.assertEqual(message["reasoning"], "I should look.")
            self.assertEqual(message["content"], "One moment.")
            call, = message["tool_calls"]
            self.assertEqual(call["type"], "function")
            self.assertRegex(call["id"], "^call_[0-9a-f]{24}$")
            self.assertEqual(call["function"]["name"], "get_weather")
            self.assertEqual(json.loads(call["function"]["arguments"]), ARGUMENTS)

    def test_a_stream_is_the_whole(self):
        for model in ("hermes", "xml", "two"):
            choice = self.ask(model, tools=TOOLS)
            message, reason, pieces = self.stream(model, tools=TOOLS)
            self.assertEqual(self.without_ids(message), self.without_ids(choice["message"]))
            self.assertEqual(reason, "tool_calls")
            self.assertGreater(pieces, 1)

    def test_a_half_call_is_text(self):
        choice = self.ask("half", tools=TOOLS)
        self.assertEqual(choice["message"]["content"], SAYS["half"][0])
        self.assertNotIn("tool_calls", choice["message"])
        self.assertEqual(choice["finish_reason"], "stop")
        message, reason, _ = self.stream("half", tools=TOOLS)
        self.assertEqual(message["content"], SAYS["half"][0])
        self.assertEqual(reason, "stop")

    def test_without_tools_there_are_no_calls(self):
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            choice = self.ask("hermes", **more)
            self.assertNotIn("tool_calls", choice["message"])
            self.assertEqual(choice["message"]["reasoning_content"], "I should look.")
            self.assertTrue(choice["message"]["content"].startswith("One moment.\n<tool_call>"))
            self.assertEqual(choice["finish_reason"], "stop")

    def test_one_call_when_asked_for(self):
        self.assertEqual(len(self.ask("two", tools=TOOLS)["message"]["tool_calls"]), 2)
        for message in (self.ask("two", tools=TOOLS, parallel_tool_calls=False)["message"],
                        self.stream("two", tools=TOOLS, parallel_tool_calls=False)[0]):
            call, = message["tool_calls"]
            self.assertEqual(json.loads(call["function"]["arguments"]), {"days": 1})

    def test_reasoning_can_be_left_out(self):
        message = self.ask("hermes", tools=TOOLS, include_reasoning=False)["message"]
        self.assertNotIn("reasoning_content", message)
        self.assertEqual(message["content"], "One moment.")

    def test_stop_strings_see_what_was_written(self):
        choice = self.ask("hermes", tools=TOOLS, stop=["look"])
        self.assertEqual(choice["message"]["reasoning_content"], "I should")
        self.assertIsNone(choice["message"]["content"])
        self.assertEqual(choice["stop_reason"], "look")

    def test_completions_are_untouched(self):
        prompt = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
        status, _, r = self.stack.gateway.request("POST", "/v1/completions", {
            "model": "hermes", "prompt": prompt, "temperature": 0, "max_tokens": 40})
        self.assertEqual((status, r["choices"][0]["text"]), (200, SAYS["hermes"][0]))

    def test_calls_can_be_forced(self):
        # The real ember-tiny: it cannot want to call, so the schema alone makes it.
        tools = [*TOOLS, {"type": "function", "function": {"name": "now"}}]
        made = 0
        for seed in range(6):
            more = {"tools": tools, "temperature": 1.5, "seed": seed, "max_tokens": 300}
            named = {"type": "function", "function": {"name": "get_weather"}}
            for choice in ("required", named):
                one = self.ask("ember-tiny", **more, tool_choice=choice, parallel_tool_calls=False)
                if one["finish_reason"] == "length":  # half a call is no call
                    self.assertNotIn("tool_calls", one["message"])
                    continue
                self.assertEqual(one["finish_reason"], "tool_calls")
                self.assertIsNone(one["message"]["content"])
                made += 1
                call, = one["message"]["tool_calls"]
                self.assertIn(call["function"]["name"],
                              ("get_weather", "now") if choice == "required" else ("get_weather",))
                arguments = json.loads(call["function"]["arguments"])
                if call["function"]["name"] == "get_weather":
                    self.assertLessEqual(set(arguments), {"city", "days"})
                    self.assertIsInstance(arguments.get("days", 0), int)
                    self.assertIsInstance(arguments.get("city", ""), str)
                message, reason, _ = self.stream("ember-tiny", **more, tool_choice=choice,
                                                 parallel_tool_calls=False)
                self.assertEqual(self.without_ids(message), self.without_ids(one["message"]))
                self.assertEqual(reason, "tool_calls")
        self.assertGreater(made, 3)

    def test_a_grammar_closes_the_thought(self):
        prompt = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n<think></think>"
        ids = self.stack.gateway.request("POST", "/tokenize", {"model": "ember-tiny", "prompt": prompt})[2]
        for more in ({"response_format": {"type": "json_object"}},
                     {"tools": TOOLS, "tool_choice": "required"}):
            status, _, r = self.stack.gateway.request("POST", "/v1/chat/completions", {
                "model": "thinks", "messages": ASK, "max_tokens": 5, "return_token_ids": True, **more})
            self.assertEqual((status, r["prompt_token_ids"]), (200, ids["tokens"]))
            self.assertTrue(r["choices"][0]["message"]["content"].lstrip().startswith(("{", "[")))
            self.assertNotIn("reasoning_content", r["choices"][0]["message"])
        self.assertTrue(self.ask("thinks", max_tokens=5)["message"]["reasoning_content"])

    def rendered(self, model, messages, **more):
        """What the template made of a chat."""
        status, _, r = self.stack.gateway.request("POST", "/tokenize", {
            "model": model, "messages": messages, **more})
        self.assertEqual(status, 200, r)
        _, _, r = self.stack.gateway.request("POST", "/detokenize", {
            "model": "ember-tiny", "tokens": r["tokens"]})
        return r["prompt"]

    def test_messages_come_back_as_templates_want_them(self):
        call = {"id": "call_1", "type": "function", "function": {
            "name": "get_weather", "arguments": '{"city": "Paris", "days": 3}'}}
        messages = [*ASK, {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "21"}]},
                    {"role": "assistant", "content": "Yes.", "tool_calls": []}]
        self.assertEqual(
            self.rendered("walks", messages, tools=TOOLS, chat_template_kwargs={"enable_thinking": False}),
            "user:Who are you?;assistant:[city=Paris][days=3]Hm.;tool:21;assistant:Yes.;1  False")
        self.assertEqual(self.rendered("walks", ASK, tools=[]), "user:Who are you?;no  ")
        self.assertEqual(self.rendered("joins", messages), 'get_weather{"city": "Paris", "days": 3}')

    def test_wrong_fields(self):
        for field, more in (("tools", {"tools": [{"type": "function"}]}),
                            ("tools", {"tools": "get_weather"}),
                            ("tool_choice", {"tools": TOOLS, "tool_choice": "sometimes"}),
                            ("tool_choice", {"tool_choice": "required"}),
                            ("tools", {"tools": [{"type": "function", "function": {"name": ""}}]}),
                            ("tool_choice", {"tool_choice": "required", "tools": [*TOOLS, {
                                "type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}),
                            ("tool_choice", {"tools": TOOLS, "tool_choice": {
                                "type": "function", "function": {"name": "nope"}}}),
                            ("tool_choice", {"tools": TOOLS, "tool_choice": "required",
                                             "response_format": {"type": "json_object"}})):
            status, _, r = self.stack.gateway.request("POST", "/v1/chat/completions", {
                "model": "hermes", "messages": ASK, **more})
            self.assertEqual((status, r["error"]["param"]), (400, field))

    def test_tokens_that_the_model_has_no_row_for(self):
        """A tokenizer may know more than its model: a step with such a token would fail for all in it."""
        folder = f"{self.stack.folder}/models/beyond"
        make_model(folder, "", "")
        with open(f"{folder}/tokenizer.json") as f:
            tokenizer = json.load(f)
        tokenizer["added_tokens"].append({"id": 4096, "content": "<beyond>", "special": True, "lstrip": False,
                                          "rstrip": False, "single_word": False, "normalized": False})
        with open(f"{folder}/tokenizer.json", "w") as f:
            json.dump(tokenizer, f)
        subprocess.run([EMBERCTL, "load", "--socket", self.stack.emberd.socket, folder], check=True,
                       stdout=subprocess.DEVNULL, timeout=60)
        wait_until(lambda: "beyond" in {m["id"] for m in self.stack.gateway.get("/v1/models")[2]["data"]}, "listed")
        for field, body in (("prompt", {"prompt": "a <beyond> b"}), ("prompt", {"prompt": [4096]}),
                            ("logit_bias", {"prompt": "a", "logit_bias": {"4096": 1}})):
            status, _, r = self.stack.gateway.request("POST", "/v1/completions", {"model": "beyond", **body})
            self.assertEqual((status, r["error"]["param"]), (400, field))
            self.assertIn("4096", r["error"]["message"])
        self.assertNotIn("step refused", self.stack.gateway.text())

    def test_a_wrong_parser_is_named(self):
        for option, word in (("--tool-parser=hermse", "hermse"), ("--reasoning-parser=x1", "x1"),
                             ("--per-model=half tool-parser=nope", "nope")):
            run = subprocess.run([os.environ["GATEWAY"], option, "--listen=127.0.0.1:0"],
                                 capture_output=True, text=True, timeout=20)
            self.assertNotEqual(run.returncode, 0)
            self.assertIn(word, run.stderr)


    def test_the_openai_client(self):
        folder = f"{os.environ.get('EMBER_TEST_BUILD', '')}/openai-client"
        if not shutil.which("node") or not os.path.exists(f"{folder}/node_modules/openai"):
            self.skipTest("node or its openai package is not there (the test openai client installs it)")
        subprocess.run(["node", f"{HERE}/openai_tools.mjs", folder,
                        f"http://127.0.0.1:{self.stack.gateway.port}/v1"], check=True, timeout=60)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:], verbosity=2)
