# SPDX-License-Identifier: Apache-2.0
"""Structured output through the whole way: HTTP, gateway, scheduler, instance, and back.

ember-tiny at a temperature of 2 makes no sense at all, so that only the grammar can make it valid.
"""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import unittest

from gateway import TINY, Stack, together, wait_until

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "model", "grammar"))
from schemas import INTEGER, NUMBER, SCHEMAS, STRING, judge, jsonschema, obj  # noqa: E402

PERSON = obj(name={"type": "string", "maxLength": 20}, age={"type": "integer", "minimum": 0, "maximum": 150},
             tags={"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4})
STORY = "Once upon a time there was a king who had"
WILD = {"temperature": 2, "max_tokens": 300, "min_tokens": 0}
SQL = 'root ::= "SELECT " [a-z]{1,8} (", " [a-z]{1,8}){0,3} " FROM " [a-z]{1,8} ";"'
LARK = 'start: "call" NAME "(" [NAME ("," NAME)*] ")"\nNAME: /[a-z]{1,6}/\n%ignore " "'


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


class Structured(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stack = Stack("--per-model=ember-tiny tool-parser=hermes reasoning-parser=none")
        cls.g = cls.stack.gateway

    @classmethod
    def tearDownClass(cls):
        cls.stack.stop()

    def texts(self, n=1, **body):
        """Texts that have ended by themselves."""
        reply = self.g.complete(STORY, **{**WILD, "n": n, **body})
        self.assertEqual(len(reply["choices"]), n)
        return [c["text"] for c in reply["choices"] if c["finish_reason"] == "stop"]

    @unittest.skipUnless(jsonschema, "no python3-jsonschema")
    def test_schemas(self):
        n = int(os.environ.get("STRUCTURED_SAMPLES", "4"))
        ended = {}

        def one(item):
            name, schema = item
            ended[name] = self.texts(n, seed=len(name), response_format=schema_format(schema))
        names = [(k, v) for k, v in SCHEMAS.items() if v is not True]
        for i in range(0, len(names), 16):
            together([lambda item=item: one(item) for item in names[i:i + 16]])
        for name, schema in names:
            for text in ended[name]:
                with self.subTest(name):
                    judge(schema, text)
        total = sum(len(t) for t in ended.values())
        print(f"{total} of {len(names) * n} texts have ended, all valid")
        self.assertGreater(total, len(names) * n // 2)

    @unittest.skipUnless(jsonschema, "no python3-jsonschema")
    def test_streams(self):
        text, reason = self.g.stream_text(STORY, **WILD, seed=5, response_format=schema_format(PERSON))
        self.assertEqual(reason, "stop")
        judge(PERSON, text)
        self.assertEqual([text], self.texts(seed=5, response_format=schema_format(PERSON)))

    @unittest.skipUnless(jsonschema, "no python3-jsonschema")
    def test_chats(self):
        for seed in range(4):
            reply = self.g.chat("Who?", temperature=2, seed=seed, response_format=schema_format(PERSON))
            self.assertEqual(reply["choices"][0]["finish_reason"], "stop")
            judge(PERSON, reply["choices"][0]["message"]["content"])

    def test_tools_that_may_be_called_stay_possible(self):
        """The schema is for the answer: a call is the model's other choice, and nothing else is."""
        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        call = self.g.ask("/tokenize", prompt="<", add_special_tokens=False)["tokens"]
        self.assertEqual(len(call), 1)

        def content(bias, **body):
            reply = self.g.chat("Who?", temperature=1.5, seed=5, max_tokens=200, logit_bias={str(call[0]): bias},
                                response_format=schema_format(PERSON), **body)
            return reply["choices"][0]["message"]["content"]
        judge(PERSON, content(-100, tools=tools))
        self.assertTrue(content(100, tools=tools).startswith("<tool_call>"))  # and then what it likes
        for body in ({"tools": tools, "tool_choice": "none"}, {"tools": []}, {}):
            self.assertFalse(content(100, **body).startswith("<"))
        whole = self.g.chat("Who?", tools=tools, structured_outputs={"regex": "[ab]{3}"})  # as vLLM has it
        self.assertRegex(whole["choices"][0]["message"]["content"], r"\A[ab]{3}\Z")

    def test_json_object(self):
        for body in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
            texts = self.texts(4, seed=3, **body)
            self.assertTrue(texts)
            for text in texts:
                self.assertIsInstance(json.loads(text), dict)

    def test_kinds(self):
        cases = [
            ({"structured_outputs": {"regex": "[a-c]{3}(x|yz)\\d{1,3}"}}, r"[a-c]{3}(x|yz)\d{1,3}"),
            ({"guided_regex": "a+b"}, r"a+b"),
            ({"structured_outputs": {"choice": ["positive", "negative"]}}, r"positive|negative"),
            ({"guided_choice": ["yes", "no", "yes!"]}, r"yes!?|no"),
            ({"structured_outputs": {"grammar": SQL}}, r"SELECT [a-z]{1,8}(, [a-z]{1,8}){0,3} FROM [a-z]{1,8};"),
            ({"guided_grammar": LARK}, r" ?call ?[a-z]{1,6} ?\( ?([a-z]{1,6} ?(, ?[a-z]{1,6} ?)*)?\) ?"),
            ({"guided_json": json.dumps(obj(a={"type": "boolean"}))}, r'\{\s*"a":\s*(true|false)\s*\}'),
            ({"structured_outputs": {"json": obj(a=INTEGER, b=INTEGER), "disable_any_whitespace": True}},
             r'\{"a": -?\d+, "b": -?\d+\}'),
            ({"structured_outputs": {"json": obj(a=INTEGER), "whitespace_pattern": "\\n?"}}, r'\{\n?"a":\n?-?\d+\n?\}'),
        ]
        for body, pattern in cases:
            with self.subTest(str(body)):
                texts = self.texts(6, seed=1, **body)
                self.assertTrue(texts)
                for text in texts:
                    self.assertRegex(text, r"\A(" + pattern + r")\Z")

    def test_everything_else_goes_with_it(self):
        """Other things that change what is sampled: it stays valid, and ends where it must."""
        form = {"structured_outputs": {"regex": "(ab|cd){4}"}}
        want = r"\A(ab|cd){4}\Z"
        for more in ({"temperature": 0}, {"ignore_eos": True}, {"min_tokens": 50}, {"top_k": 1}, {"top_p": 0.1},
                     {"repetition_penalty": 1.5}, {"presence_penalty": 2, "frequency_penalty": -1},
                     {"logit_bias": {str(i): -100 for i in range(300)}}, {"logprobs": 3}, {"n": 3}, {"min_p": 0.2},
                     {"stop_token_ids": [5]}, {"logit_bias": {"2": 100}}):
            with self.subTest(str(more)[:40]):
                texts = self.texts(**{"seed": 2, "n": 1, **form, **more})
                self.assertEqual(len(texts), more.get("n", 1))
                for text in texts:
                    self.assertRegex(text, want)
        reply = self.g.complete(STORY, **{**WILD, "max_tokens": 2}, **form)
        self.assertEqual(reply["choices"][0]["finish_reason"], "length")
        reply = self.g.complete(STORY, **WILD, **form, stop=["b"], include_stop_str_in_output=True)
        self.assertRegex(reply["choices"][0]["text"], r"\A(cd)*(ab)?\Z")
        reply = self.g.complete(STORY, **WILD, structured_outputs={"regex": "[a-z]*"}, logprobs=2, seed=9)
        self.assertRegex(reply["choices"][0]["text"], r"\A[a-z]*\Z")
        self.assertEqual(len(reply["choices"][0]["logprobs"]["tokens"]),
                         len(reply["choices"][0]["logprobs"]["token_logprobs"]))

    def test_alone_or_together(self):
        forms = [{"response_format": schema_format(PERSON)}, {"guided_regex": "[a-z ]{20,40}"},
                 {"response_format": {"type": "json_object"}}, {}]
        work = [dict(WILD, seed=i, max_tokens=60, **forms[i % 4]) for i in range(16)]
        alone = [self.g.stream_text(STORY, **w) for w in work]
        self.assertEqual(together([lambda w=w: self.g.stream_text(STORY, **w) for w in work]), alone)

    def test_refused(self):
        def refused(param, text, **body):
            status, _, reply = self.g.request("POST", "/v1/completions", {"model": "ember-tiny", "prompt": "x", **body})
            self.assertEqual(status, 400, reply)
            self.assertEqual(reply["error"]["param"], param)
            self.assertRegex(reply["error"]["message"], text)
        refused("response_format", r"not at #/properties/a/not: ",
                response_format=schema_format(obj(a={"not": STRING})))
        refused("response_format", "oneOf at #/oneOf", response_format=schema_format({"oneOf": [INTEGER, NUMBER]}))
        refused("response_format", "expected", response_format={"type": "json_schema"})
        refused("response_format", "types", response_format={"type": "structural_tag"})
        refused("structured_outputs", "one of", structured_outputs={})
        refused("structured_outputs", "only one of", structured_outputs={"regex": "a", "choice": ["b"]})
        refused("guided_regex", "only one of", structured_outputs={"regex": "a"}, guided_regex="b")
        refused("structured_outputs", "structural_tag", structured_outputs={"structural_tag": "{}"})
        refused("guided_regex", "look-around", guided_regex="(?=a)b")
        refused("guided_grammar", "line 2", guided_grammar='root ::= "a"\nroot ::= ')
        refused("guided_choice", "empty text", guided_choice=["a", ""])
        refused("guided_regex", "too large|no text", guided_regex="[^\\W\\w]")
        refused("guided_json", "left recursion|no text", guided_json={"$ref": "#", "allOf": [{"type": "null"}], "enum": [1]})

    def test_many_grammars(self):
        """More than an instance is told of at once: older ones go and come again."""
        def one(i):
            return self.texts(seed=i, structured_outputs={"regex": f"{i % 300}[a-z]{{2}}"}, max_tokens=40)
        for start in range(0, 320, 16):
            for i, texts in enumerate(together([lambda i=i: one(i) for i in range(start, start + 16)])):
                self.assertRegex(texts[0], rf"\A{(start + i) % 300}[a-z]{{2}}\Z")


class RandomWeights(unittest.TestCase):
    """A model that has learned nothing: each token is a draw out of the whole vocabulary, nearly."""

    @classmethod
    def setUpClass(cls):
        cls.stack = Stack()
        cls.g = cls.stack.gateway
        for i in range(2):
            folder = f"{cls.stack.folder}/random-{i}"
            for command in (["synth", f"{TINY}/config.json", folder, f"--seed={i + 1}"],
                            ["--socket", cls.stack.emberd.socket, "load", folder]):
                subprocess.run([os.environ["EMBERCTL"], *command], stdout=subprocess.DEVNULL, check=True, timeout=60)
                if command[0] == "synth":
                    for name in ("tokenizer.json", "tokenizer_config.json"):
                        shutil.copy(f"{TINY}/{name}", folder)

    @classmethod
    def tearDownClass(cls):
        cls.stack.stop()

    @unittest.skipUnless(jsonschema, "no python3-jsonschema")
    def test_schemas(self):
        names = [(k, v) for k, v in SCHEMAS.items() if v is not True]
        each, ended = int(os.environ.get("RANDOM_SAMPLES", "4")), []

        def one(i):
            name, schema = names[i % len(names)]
            temperature = (0.5, 1, 2)[i % 3]
            reply = self.g.complete(STORY, model=f"random-{i % 2}", temperature=temperature, seed=i, n=each,
                                    max_tokens=300, response_format=schema_format(schema))
            for choice in reply["choices"]:
                if choice["finish_reason"] == "stop":
                    ended.append(name)
                    judge(schema, choice["text"])
        for start in range(0, 4 * len(names), 24):
            together([lambda i=i: one(i) for i in range(start, min(start + 24, 4 * len(names)))])
        total = 4 * len(names) * each
        print(f"{len(ended)} of {total} texts of random weights have ended, all valid")
        self.assertGreater(len(ended), total // 2)


class Crowds(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stack = Stack("--admin")
        cls.g = cls.stack.gateway

    @classmethod
    def tearDownClass(cls):
        cls.stack.stop()

    def test_a_step_of_more_grammars_than_fit(self):
        """What waits is begun in one step, all of whose grammars have to be there."""
        pattern = "[acegikmoqsuwyACEGIKMOQSUWY0]"  # many edges a state: programs of some 3.5 MB

        def one(i):
            return self.g.complete("a", max_tokens=4, structured_outputs={"regex": f"{pattern * 14000}{i}"})
        work = [lambda i=i: one(i) for i in range(22)]
        together(work)  # compiled
        self.g.request("POST", "/sleep")
        threads = threading.Thread(target=lambda: results.extend(together(work)))
        results = []
        threads.start()
        wait_until(lambda: self.g.metric("vllm:num_requests_waiting") == len(work), "all wait")
        self.g.request("POST", "/wake_up")
        threads.join()
        for reply in results:
            self.assertRegex(reply["choices"][0]["text"], rf"\A{pattern}+\Z")
        self.assertEqual(len(results), len(work))
        self.assertNotIn("step refused", self.g.text())

    def test_slow_schemas_delay_no_others(self):
        slow = {f"p{i}": INTEGER for i in range(3000)}
        ended = []

        def one(i):
            ended.append(self.g.request("POST", "/v1/completions", {
                "model": "ember-tiny", "prompt": "a", "guided_json": obj(**{**slow, f"q{i}": INTEGER}, required=[])})[0])
        threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        wait_until(lambda: self.g.get("/load")[2]["server_load"] == 4, "all have come")
        self.g.ask("/tokenize", prompt="a")
        self.g.complete("a", max_tokens=2)
        self.assertEqual(ended, [])
        for t in threads:
            t.join()
        self.assertEqual(ended, [400] * 4)

    def test_nothing_is_compiled_for_those_who_have_left(self):
        def slow(i):
            return {"model": "ember-tiny", "prompt": "a",
                    "guided_json": obj(**{f"p{k}": INTEGER for k in range(3000 + i)}, required=[])}
        def cpu():  # of all its threads
            with open(f"/proc/{self.g.pid}/stat") as f:
                return sum(map(int, f.read().rsplit(")", 1)[1].split()[11:13]))
        begin = cpu()
        self.assertEqual(self.g.request("POST", "/v1/completions", slow(0))[0], 400)
        one = cpu() - begin
        for i in range(40):
            c = self.g.connect()
            c.request("POST", "/v1/completions", json.dumps(slow(i + 1)))
            c.close()
        begin = cpu()
        self.g.complete("a", guided_regex="[b-d]{3}")
        self.assertLess(cpu() - begin, 20 * one)  # of 40


class Failover(unittest.TestCase):
    def test_killed_in_the_middle(self):
        """The instance that takes over knows where each text stands."""
        stack = Stack()
        self.addCleanup(stack.stop)
        g = stack.gateway
        forms = [{"guided_regex": "([a-f]{3} ){40}"}, {"response_format": schema_format(
            {"type": "array", "items": PERSON, "minItems": 3})}]
        work = [dict(WILD, seed=i, max_tokens=150, **forms[i % 2]) for i in range(8)]
        want = [g.stream_text(STORY, **w) for w in work]
        results, begun = [None] * len(work), threading.Barrier(len(work) + 1)

        def one(i):
            text, reason, chunks = "", None, 0
            for chunk in g.stream("/v1/completions", prompt=STORY, **work[i]):
                if isinstance(chunk, dict):
                    text += chunk["choices"][0]["text"]
                    reason = chunk["choices"][0]["finish_reason"] or reason
                chunks += 1
                if chunks == 3:
                    begun.wait(60)
            results[i] = (text, reason)
        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(work))]
        for t in threads:
            t.start()
        leased = stack.leases().split()[1]
        begun.wait(60)
        os.kill(stack.emberd.pid_of(leased), signal.SIGKILL)
        for t in threads:
            t.join(60)
        self.assertEqual(results, want)
        self.assertEqual(g.metric("ember_failovers_total"), 1)
        for text, _ in results[::2]:
            self.assertTrue(re.fullmatch(r"([a-f]{3} ){0,40}[a-f]{0,3}", text), text)


if __name__ == "__main__":
    unittest.main(verbosity=2)
