#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every field of the gateway's table with values of every kind, and bodies that are barely JSON:
an answer or an OpenAI error object, never a failure of the server. FIELDS_SECONDS: how long,
FIELDS_SEED: which."""
import json
import os
import random
import re
import time
import unittest

from gateway import SOURCE, Stack, together

SECONDS = float(os.environ.get("FIELDS_SECONDS", "8"))
SEED = int(os.environ.get("FIELDS_SEED", "1"))
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
TURN = {"role": "user", "content": "Who are you?"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


def nested(n, inside=1):
    for _ in range(n):
        inside = [inside]
    return inside


# What any field may be given.
VALUES = [None, True, False, 0, 1, -1, 2, 5, 20, 21, 64, 65, 4095, 4096, 99999, 2**31 - 1, 2**31,
          2**32, 2**63 - 1, -2**63, 0.0, 0.5, 1.0, 1.5, -0.5, 1e-9, 1e9, 1e300, -1e300,
          "", " ", "x", "5", "none", "auto", "left", "\0", "\ud83d\ude00", "e\u0301", "\ufeff",
          "\uffff", "a" * 300, "(", "[a-z]+", "%s%n", "{{", "ember-tiny",
          [], [[]], [5], [5, 6], [-1], [4095], [4096], [99999], [2**31], [2**63 - 1], [1.5], [True],
          [None], ["x"], ["x", 5], [[5, 6], "x"], [[5], [6, 7]], [[5], []], [{}], nested(30),
          {}, {"": ""}, {"5": 1}, {"5": -100}, {"-1": 1}, {"4096": 1}, {"x": "y"},
          {"a": nested(30)}, {"type": "object"}, {"type": "json_object"}, {"type": 5},
          {"type": "function", "function": {"name": "f"}}, {"role": "user"}]
# What some fields take, so that what lies behind the parser is met too.
GOOD = {
    "prompt": ["Once upon a time", "x", ["a", "b c"], [5, 6, 7], [[1, 2], [3]], "a " * 3000,
               [5] * 2047, [5] * 2048, [0], "<s>", "\ud83d\ude00"],
    "tokens": [[], [5, 6], [4095], [0] * 5000],
    "messages": [[TURN], [{"role": "system", "content": None}, TURN], [TURN] * 9,
                 [{"role": "", "content": ""}], [{"role": 5, "content": "x"}],
                 [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
                 [{"role": "user", "content": []}], [{"role": "user", "content": {}}],
                 [{"role": "user", "content": 5}], [TURN, {"role": "assistant", "content": "I am"}],
                 [TURN, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
                 [TURN, {"role": "assistant", "tool_calls": 5}],
                 [TURN, {"role": "tool", "tool_call_id": "c", "content": "x"}],
                 [{"role": "user", "content": "a " * 3000}]],
    "allowed_token_ids": [[5], [2], [77, 300]], "bad_words": [["the"], [" King", "of the"], ["\u00e9"]],
    "stop": ["the", [" a", "e"], "."], "stop_token_ids": [[14], [2, 261]],
    "temperature": [0, 2.5], "logprobs": [3, True], "stream": [True], "echo": [True],
    "stream_options": [{"include_usage": True, "continuous_usage_stats": True}],
    "logit_bias": [{"14": -100, "77": 50}], "truncate_prompt_tokens": [-1, 1, 3000],
    "prompt_logprobs": [0, 3], "min_tokens": [2], "n": [2, 3], "top_logprobs": [2],
    "response_format": [{"type": "json_schema", "json_schema": {"schema": SCHEMA}},
                        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}],
    "structured_outputs": [{"regex": "[a-z]{2}"}, {"choice": ["a", "b"]}, {"json": SCHEMA}],
    "guided_json": [SCHEMA], "guided_choice": [["yes", "no"]],
    "guided_grammar": ["root ::= \"a\" | \"b\"", "root ::= root"], "tools": [[TOOL], [TOOL, TOOL]],
    "tool_choice": ["required", TOOL],
    "chat_template_kwargs": [{"x": 1}, {"messages": 5}, {"add_generation_prompt": []}],
}


def table():
    """The fields' names as the parser has them."""
    with open(f"{SOURCE}/daemon/gateway/openai.c") as f:
        return re.findall(r"^    X\((\w+), ", f.read(), re.M)


class Fields(unittest.TestCase):
    def setUp(self):
        self.stack = Stack()
        self.addCleanup(self.stack.stop)
        self.g = self.stack.gateway

    def error(self, error, body):
        self.assertEqual(set(error), {"message", "type", "param", "code"}, body)
        self.assertTrue(error["message"] and error["type"], body)
        self.assertNotEqual(error["code"], 500, (body, error))

    def ask(self, path, body):
        """An answer in the form that was asked for, or an error as clients expect it."""
        status, headers, reply = self.g.request("POST", path, body)
        shown = (path, status, str(body)[:2000], str(reply)[:500])
        if status != 200:
            self.assertIn(status, (400, 404, 413), shown)
            self.error(reply["error"], shown)
        elif headers["Content-Type"].startswith("text/event-stream"):
            data = [line[6:] for line in reply.decode().split("\n\n") if line.startswith("data: ")]
            self.assertEqual(data.pop(), "[DONE]", shown)
            for chunk in map(json.loads, data):
                if "error" in chunk:
                    self.error(chunk["error"], shown)
        else:
            self.assertTrue("choices" in reply or "tokens" in reply or "prompt" in reply, shown)
        return status

    def body_at_random(self, rng, fields):
        path = rng.choice(PATHS[:2] * 4 + PATHS)
        key = {PATHS[1]: "messages", PATHS[3]: "tokens"}.get(path, "prompt")
        body = {"max_tokens": 2, key: rng.choice(GOOD[key])}
        for field in rng.sample(fields, rng.choice((1, 1, 2, 4, 8))):
            good = GOOD.get(field, VALUES)
            body[field] = rng.choice(good if rng.random() < 0.6 else VALUES)
        for length in ("max_tokens", "max_completion_tokens"):  # only what takes long is left out
            if isinstance(body.get(length), (int, float)) and 20 < body[length] < 2**31:
                body[length] = 20
        if body["max_tokens"] is None:
            body["max_tokens"] = 3
        return path, body

    def test_every_field_with_every_value(self):
        fields = table()
        self.assertGreater(len(fields), 60)
        self.assertIn("truncate_prompt_tokens", fields)
        end, k, seen = time.monotonic() + SECONDS, 0, set()
        while time.monotonic() < end or not {200, 400} <= seen:
            asked = [self.body_at_random(random.Random(f"{SEED} {k + i}"), fields) for i in range(8)]
            k += 8
            seen |= set(together([lambda a=a: self.ask(*a) for a in asked]))
        print(k, "requests, statuses", sorted(seen))
        self.assertIsNone(self.g.process.poll())
        self.assertEqual(self.g.metric("ember_failovers_total"), 0)
        self.assertEqual(self.g.metric("vllm:num_requests_running"), 0)

    def test_bodies_that_are_barely_json(self):
        deep = 5000
        for body in (b"", b"\xff", b"\"x\"", b"5", b"{\"prompt\": \"\xff\xfe\"}",
                     b"{\"prompt\": \"\xc3\"}", b"{\"prompt\": \"\xed\xa0\x80\"}",
                     b"{\"prompt\": \"\\ud800\"}", b"{\"prompt\": \"\\udc00\\ud800\"}",
                     b"{\"prompt\": \"x\\u0000y\"}",
                     b"{\"prompt\": \"\\uZZZZ\"}", b"{\"prompt\": \"x\ny\"}", b"{\"prompt\": \"x\"} x",
                     b"{\"prompt\": [1,]}", b"{\"prompt\": 'x'}", b"\xef\xbb\xbf{\"prompt\": \"x\"}",
                     b"{\"prompt\": \"x\", \"seed\": 1e999}", b"{\"prompt\": \"x\", \"n\": NaN}",
                     b"{\"prompt\": \"x\", \"seed\": " + b"9" * 400 + b"}",
                     b"{\"prompt\": \"x\", \"temperature\": 0." + b"0" * 400 + b"1e}",
                     b"{\"prompt\": " + b"[" * deep + b"]" * deep + b"}",
                     b"{\"a\":" * deep + b"1" + b"}" * deep, b"[" * deep,
                     b"{\"prompt\": \"x\", \"\\u0000\": 1}", b"{\"\": 1}",
                     b"{\"prompt\": \"x\", \"prompt\": \"y\"}"):
            for path in PATHS:
                status, _, reply = self.g.request("POST", path, body)
                self.assertIn(status, (400, 413), (path, body[:100], reply))
                self.error(reply["error"], body[:100])
        for body in (b"{\"prompt\": \"\\ud83d\\ude00\", \"max_tokens\": 1}",
                     b"{\"prompt\": \"x\", \"max_tokens\": 1, \"seed\": -0}",
                     b" \n{\"prompt\": \"x\", \"max_tokens\": 1.0}\n"):
            self.assertEqual(self.ask(PATHS[0], body), 200)


if __name__ == "__main__":
    unittest.main(verbosity=2)
