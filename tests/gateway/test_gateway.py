# SPDX-License-Identifier: Apache-2.0
"""ember-gateway over a real emberd with ember-tiny: the API, exactness, failures, ends."""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest

import gateway
from gateway import CASES, DRAWN, Stack, drip, holds, together, wait_until

STORY = "Once upon a time there was a king who had"
PROMPTS = [STORY, "The river", "In the morning", "He said that", "A small house", "When she came",
           "It is said", "The old man", "Far away", "The children"]


def plain(i, length=40):
    """Prompt and length of the i-th of many mixed requests."""
    return f"{PROMPTS[i % len(PROMPTS)]} {'and ' * (i % 7)}{i}", 8 + (i * 7) % length


class Case(unittest.TestCase):
    options, emberd_options, emberd_env = (), (), None

    @classmethod
    def setUpClass(cls):
        cls.stack = Stack(*cls.options, emberd=cls.emberd_options, emberd_env=cls.emberd_env)

    @classmethod
    def tearDownClass(cls):
        cls.stack.stop()

    @property
    def g(self):
        return self.stack.gateway

    def fails(self, status, path, body, text, code=None, param=None):
        got, headers, reply = self.g.request("POST", path, body)
        self.assertEqual(got, status, reply)
        error = reply["error"]
        self.assertRegex(error["message"], text)
        self.assertIsInstance(error["type"], str)
        if code:
            self.assertEqual(error["code"], code)
        if param:
            self.assertEqual(error["param"], param)
        return headers


class Api(Case):
    options = ("--admin",)

    def test_completions_are_the_reference(self):
        for case in CASES:
            n = len(case["greedy_ids"])
            r = self.g.complete(case["prompt"], max_tokens=n, return_token_ids=True)
            choice = r["choices"][0]
            self.assertEqual(choice["token_ids"], case["greedy_ids"])
            self.assertEqual(choice["text"], case["greedy_text"])
            self.assertEqual(choice["prompt_token_ids"], case["prompt_ids"])
            ends = case["greedy_ids"][-1] in (0, 2)
            self.assertEqual(choice["finish_reason"], "stop" if ends else "length")
            self.assertEqual(r["usage"]["prompt_tokens"], len(case["prompt_ids"]))
            self.assertEqual(r["usage"]["completion_tokens"], len(case["greedy_ids"]))

    def test_every_form_of_prompt(self):
        case = CASES[0]
        want = case["greedy_text"]
        ids = case["prompt_ids"]
        for prompt in (case["prompt"], [case["prompt"]], ids, [ids]):
            self.assertEqual(self.g.complete(prompt, max_tokens=200)["choices"][0]["text"], want)
        r = self.g.complete([CASES[0]["prompt"], CASES[1]["prompt"]], max_tokens=200, n=2)
        self.assertEqual([c["index"] for c in r["choices"]], [0, 1, 2, 3])
        self.assertEqual([c["text"] for c in r["choices"]],
                         [CASES[0]["greedy_text"]] * 2 + [CASES[1]["greedy_text"]] * 2)

    def test_chat(self):
        r = self.g.chat("Who are you?")
        message = r["choices"][0]["message"]
        self.assertEqual(message["role"], "assistant")
        self.assertEqual(message["content"], CASES[0]["greedy_text"])
        self.assertEqual(r["object"], "chat.completion")
        for more in ({"max_tokens": 9, "max_completion_tokens": 4}, {"max_completion_tokens": 4, "max_tokens": 9}):
            self.assertEqual(self.g.chat("Who are you?", **more)["usage"]["completion_tokens"], 4)
        for content in (None, ""):  # templates add strings to it
            self.g.ask("/v1/chat/completions", max_tokens=1, messages=[
                {"role": "system", "content": content}, {"role": "user", "content": "Who are you?"}])
        parts = [{"type": "text", "text": "Who are"}, {"type": "text", "text": "you?"}]
        joined = self.g.ask("/v1/chat/completions", temperature=0, max_tokens=5,
                            messages=[{"role": "user", "content": parts}])
        same = self.g.chat("Who are\nyou?", max_tokens=5)
        self.assertEqual(joined["choices"][0]["message"], same["choices"][0]["message"])

    def test_continue_final_message(self):
        whole = self.g.chat("Who are you?")["choices"][0]["message"]["content"]
        begin = whole[:whole.index(",") + 1]
        begun = [{"role": "user", "content": "Who are you?"},
                 {"role": "assistant", "content": begin}]
        r = self.g.ask("/v1/chat/completions", temperature=0, messages=begun,
                       continue_final_message=True, add_generation_prompt=False)
        self.assertEqual(begin + r["choices"][0]["message"]["content"], whole)
        r = self.g.ask("/v1/chat/completions", temperature=0, messages=begun, echo=True,
                       continue_final_message=True, add_generation_prompt=False)
        self.assertEqual(r["choices"][0]["message"]["content"], whole)

    def test_streams_say_the_same(self):
        for extra in ({}, {"n": 2}, {"stop": [" the"]}, {"echo": True}, {"max_tokens": 3}):
            body = {"max_tokens": 30, **extra}
            whole = self.g.complete(STORY, **body)
            for i, choice in enumerate(whole["choices"]):
                text, reason = self.g.stream_text(STORY, index=i, **body)
                self.assertEqual((text, reason), (choice["text"], choice["finish_reason"]), extra)

    def test_every_member_of_the_objects(self):
        def keys(o):
            return set(o) if isinstance(o, dict) else o
        usage = {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}
        whole = {"id", "object", "created", "model", "choices", "usage", "system_fingerprint"}
        ask = {"max_tokens": 3, "logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1}
        r = self.g.complete(STORY, **ask)
        self.assertEqual(set(r), whole)
        self.assertEqual(set(r["usage"]), usage)
        self.assertEqual(set(r["choices"][0]), {
            "index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids",
            "prompt_token_ids", "prompt_logprobs"})
        self.assertEqual(set(r["choices"][0]["logprobs"]), {
            "text_offset", "token_logprobs", "tokens", "top_logprobs"})
        entry = next(iter(r["choices"][0]["prompt_logprobs"][1].values()))
        self.assertEqual((set(entry), entry["rank"]), ({"logprob", "rank", "decoded_token"}, 1))
        ask = {**ask, "logprobs": True, "top_logprobs": 2}
        r = self.g.chat("Who are you?", **ask)
        self.assertEqual(set(r), whole | {"prompt_logprobs", "prompt_token_ids"})
        self.assertEqual(r["prompt_token_ids"], CASES[0]["prompt_ids"])
        self.assertEqual(set(r["choices"][0]), {
            "index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids"})
        self.assertEqual(set(r["choices"][0]["message"]), {"role", "content", "refusal"})
        row = r["choices"][0]["logprobs"]["content"][0]
        self.assertEqual(set(row), {"token", "logprob", "bytes", "top_logprobs"})
        self.assertEqual(set(row["top_logprobs"][0]), {"token", "logprob", "bytes"})
        chunks = list(self.g.stream("/v1/chat/completions", temperature=0, max_tokens=3, n=2,
                                    messages=[{"role": "user", "content": "Who are you?"}],
                                    return_token_ids=True,
                                    stream_options={"include_usage": True, "continuous_usage_stats": True}))
        head = {"id", "object", "created", "model", "choices", "usage"}
        self.assertEqual(chunks[-1], "[DONE]")
        begun, ids = set(), {0: [], 1: []}
        for chunk in chunks[:-2]:
            choice, = chunk["choices"]
            first = choice["index"] not in begun
            begun.add(choice["index"])
            self.assertEqual(set(chunk), head | ({"prompt_token_ids"} if first else set()))
            self.assertEqual(chunk["object"], "chat.completion.chunk")
            self.assertEqual(choice["delta"] == {"role": "assistant", "content": ""}, first)
            self.assertEqual(chunk["usage"]["prompt_tokens"], 12)
            ids[choice["index"]] += choice.get("token_ids", [])
        self.assertEqual(ids, dict.fromkeys((0, 1), CASES[0]["greedy_ids"][:3]))
        self.assertEqual((set(chunks[-2]), chunks[-2]["choices"]), (head, []))
        self.assertEqual({c["id"] for c in chunks[:-1]}, {chunks[0]["id"]})

    def test_cached_tokens_are_those_of_the_first_choice(self):
        """What it has computed and the others take over was in no cache."""
        prompt = "In a house beside the river, " * 9
        for want in (False, True):
            r = self.g.complete(prompt, max_tokens=1, n=3)
            self.assertEqual(r["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, want)
        self.assertGreater(r["usage"]["prompt_tokens"], 40)

    def test_bodies_in_chunks(self):
        """As clients send what they do not know the length of."""
        body = json.dumps({"prompt": STORY, "max_tokens": 3, "temperature": 0}).encode()
        want = self.g.complete(STORY, max_tokens=3)["choices"]
        c = self.g.connect()
        for size in (1, 7, len(body)):
            c.request("POST", "/v1/completions", (body[i:i + size] for i in range(0, len(body), size)),
                      {"Content-Type": "application/json"}, encode_chunked=True)
            r = c.getresponse()
            self.assertEqual((r.status, json.loads(r.read())["choices"]), (200, want))
        c.close()
        with socket.create_connection(("127.0.0.1", self.g.port)) as s:
            s.settimeout(60)
            s.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                      f"Expect: 100-continue\r\n\r\n".encode())
            self.assertTrue(s.recv(4096).startswith(b"HTTP/1.1 100 "))
            s.sendall(body)
            self.assertTrue(s.recv(4096).startswith(b"HTTP/1.1 200 "))

    def test_chat_stream(self):
        chunks = list(self.g.stream("/v1/chat/completions", temperature=0,
                                    messages=[{"role": "user", "content": "Who are you?"}],
                                    stream_options={"include_usage": True}))
        self.assertEqual(chunks[-1], "[DONE]")
        self.assertEqual(chunks[0]["choices"][0]["delta"], {"role": "assistant", "content": ""})
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-2])
        self.assertEqual(text, CASES[0]["greedy_text"])
        self.assertEqual(chunks[-3]["choices"][0]["finish_reason"], "stop")
        self.assertEqual(chunks[-2]["choices"], [])
        self.assertEqual(chunks[-2]["usage"]["completion_tokens"], len(CASES[0]["greedy_ids"]))
        self.assertTrue(all(c["usage"] is None for c in chunks[:-2]))

    def test_logprobs(self):
        r = self.g.complete(STORY, max_tokens=6, logprobs=2)["choices"][0]
        lp = r["logprobs"]
        self.assertEqual("".join(lp["tokens"]), r["text"])
        self.assertEqual(lp["text_offset"][0], 0)
        for token, p, top in zip(lp["tokens"], lp["token_logprobs"], lp["top_logprobs"]):
            self.assertEqual(len(top), 2)
            self.assertEqual(max(top, key=top.get), token)  # greedy
            self.assertAlmostEqual(top[token], p, places=5)
        streamed = [c["choices"][0]["logprobs"] for c in
                    self.g.stream("/v1/completions", prompt=STORY, temperature=0, max_tokens=6,
                                  logprobs=2) if isinstance(c, dict)]
        self.assertEqual(sum((s["tokens"] for s in streamed), []), lp["tokens"])
        self.assertEqual(sum((s["token_logprobs"] for s in streamed), []), lp["token_logprobs"])
        chat = self.g.chat("Who are you?", max_tokens=4, logprobs=True, top_logprobs=3)
        content = chat["choices"][0]["logprobs"]["content"]
        self.assertEqual("".join(e["token"] for e in content),
                         chat["choices"][0]["message"]["content"])
        for entry in content:
            self.assertEqual(len(entry["top_logprobs"]), 3)
            self.assertEqual(bytes(entry["bytes"]).decode(), entry["token"])
            self.assertEqual(entry["logprob"], entry["top_logprobs"][0]["logprob"])
        none = self.g.chat("Who are you?", max_tokens=4, logprobs=True)
        self.assertEqual(none["choices"][0]["logprobs"]["content"][0]["top_logprobs"], [])

    def test_prompt_logprobs_are_those_of_generating(self):
        a = self.g.complete(STORY, max_tokens=20, logprobs=3)["choices"][0]
        whole = STORY + a["text"]
        b = self.g.complete(whole, max_tokens=0, echo=True, logprobs=3)
        self.assertEqual(b["usage"]["completion_tokens"], 0)
        b = b["choices"][0]
        self.assertEqual(b["text"], whole)
        self.assertEqual("".join(b["logprobs"]["tokens"]), whole)
        self.assertIsNone(b["logprobs"]["token_logprobs"][0])
        self.assertEqual(b["logprobs"]["tokens"][-20:], a["logprobs"]["tokens"])
        self.assertEqual(b["logprobs"]["token_logprobs"][-20:], a["logprobs"]["token_logprobs"])
        self.assertEqual(b["logprobs"]["top_logprobs"][-20:], a["logprobs"]["top_logprobs"])
        ids = self.g.complete(whole, max_tokens=1, prompt_logprobs=1, return_token_ids=True)
        ids = ids["choices"][0]
        self.assertEqual(len(ids["prompt_logprobs"]), len(ids["prompt_token_ids"]))
        for token, entry, p in list(zip(ids["prompt_token_ids"], ids["prompt_logprobs"],
                                        b["logprobs"]["token_logprobs"]))[1:]:
            self.assertEqual(entry[str(token)]["logprob"], p)

    def test_log_likelihoods_as_lm_eval_asks_for_them(self):
        """A row for each token, whatever is generated behind: it drops the last one by its place."""
        tails = [(c["prompt_ids"], c["greedy_ids"]) for c in CASES[:6]]
        tails += [(ids, tail[:-1]) for ids, tail in tails if tail[-1] in (0, 2)]  # next: the end
        self.assertGreater(len(tails), 6)
        tails += [(ids, [tail[0], 77, *tail[1:3]]) for ids, tail in tails[:2]]
        for max_tokens in (1, 0):
            r = self.g.complete([ids + tail for ids, tail in tails], max_tokens=max_tokens,
                                logprobs=1, echo=True, seed=1234)
            self.assertEqual([c["index"] for c in r["choices"]], list(range(len(tails))))
            for (ids, tail), choice in zip(tails, r["choices"]):
                lp = choice["logprobs"]
                n = len(ids) + len(tail) + max_tokens
                self.assertEqual({k: len(v) for k, v in lp.items()}, dict.fromkeys(lp, n))
                rows = slice(len(ids), len(ids) + len(tail))
                greedy = all(p == max(top.values()) for p, top in
                             zip(lp["token_logprobs"][rows], lp["top_logprobs"][rows]))
                self.assertEqual(greedy, 77 not in tail)
                alone = self.g.complete(ids, max_tokens=len(tail), logprobs=1)
                if greedy:
                    self.assertEqual(alone["choices"][0]["logprobs"]["token_logprobs"],
                                     lp["token_logprobs"][rows])

    def test_a_row_for_the_end_too(self):
        """As many rows as tokens, the end of the sequence included: in chats and streams as well."""
        case = next(c for c in CASES if c["greedy_ids"][-1] == 2)
        n = len(case["greedy_ids"])
        r = self.g.complete(case["prompt"], max_tokens=n + 4, logprobs=0, return_token_ids=True)
        self.assertEqual(r["usage"]["completion_tokens"], n)
        lp = r["choices"][0]["logprobs"]
        self.assertEqual((len(lp["tokens"]), lp["tokens"][-1]), (n, "<|im_end|>"))
        self.assertEqual(r["choices"][0]["text"], "".join(lp["tokens"][:-1]))
        self.assertEqual(lp["text_offset"][-1], len(r["choices"][0]["text"]))
        rows = []
        for chunk in self.g.stream("/v1/completions", prompt=case["prompt"], temperature=0,
                                   max_tokens=n + 4, logprobs=0):
            if isinstance(chunk, dict):
                rows += chunk["choices"][0]["logprobs"]["token_logprobs"]
        self.assertEqual(rows, lp["token_logprobs"])
        chat = self.g.chat("Who are you?", logprobs=True)
        content = chat["choices"][0]["logprobs"]["content"]
        self.assertEqual(len(content), chat["usage"]["completion_tokens"])
        self.assertEqual(content[-1]["token"], "<|im_end|>")

    def test_stop_strings_never_leak(self):
        text = self.g.complete(STORY, max_tokens=40)["choices"][0]["text"]
        for at in range(3, len(text) - 6, 5):
            stop = text[at:at + 6]
            want = text[:text.index(stop)]
            seen = ""
            for chunk in self.g.stream("/v1/completions", prompt=STORY, temperature=0,
                                       max_tokens=40, stop=stop):
                if isinstance(chunk, dict):
                    seen += chunk["choices"][0]["text"]
                    self.assertTrue(want.startswith(seen), (stop, seen))
                    last = chunk["choices"][0]
            self.assertEqual(seen, want)
            self.assertEqual((last["finish_reason"], last["stop_reason"]), ("stop", stop))
        r = self.g.complete(STORY, max_tokens=40, stop=[stop], include_stop_str_in_output=True)
        self.assertEqual(r["choices"][0]["text"], want + stop)

    def test_stop_ids_and_lengths(self):
        r = self.g.complete(STORY, max_tokens=30, return_token_ids=True)["choices"][0]
        third = r["token_ids"][3]
        first = r["token_ids"].index(third)
        stopped = self.g.complete(STORY, max_tokens=30, stop_token_ids=[third])
        self.assertEqual(stopped["usage"]["completion_tokens"], first + 1)
        self.assertEqual(stopped["choices"][0]["stop_reason"], third)
        later = self.g.complete(STORY, max_tokens=30, stop_token_ids=[third], min_tokens=first + 2)
        self.assertGreater(later["usage"]["completion_tokens"], first + 2)
        case = CASES[1]
        n = len(case["greedy_ids"])
        on = self.g.complete(case["prompt"], max_tokens=n + 8, ignore_eos=True)
        self.assertEqual(on["usage"]["completion_tokens"], n + 8)
        self.assertEqual(on["choices"][0]["finish_reason"], "length")
        more = self.g.complete(case["prompt"], max_tokens=n + 8, min_tokens=n + 4)
        self.assertGreaterEqual(more["usage"]["completion_tokens"], n + 4)
        self.assertLess(self.g.complete(case["prompt"], max_tokens=200)["usage"]
                        ["completion_tokens"], 200)

    def test_stop_tokens_in_the_output(self):
        text = self.g.complete(STORY, max_tokens=6, return_token_ids=True)["choices"][0]
        body = {"max_tokens": 30, "stop_token_ids": text["token_ids"][5:6]}
        without = self.g.complete(STORY, **body)["choices"][0]
        included = self.g.complete(STORY, include_stop_str_in_output=True, **body)["choices"][0]
        self.assertEqual(included["text"], text["text"])
        self.assertTrue(text["text"].startswith(without["text"]) and without["text"] != text["text"])
        self.assertEqual(included["stop_reason"], text["token_ids"][5])
        case = CASES[0]  # the end of the sequence has no text, unless that of special tokens is wanted
        for more, end in (({}, ""), ({"skip_special_tokens": False}, "<|im_end|>")):
            r = self.g.complete(case["prompt"], max_tokens=100, include_stop_str_in_output=True, **more)
            self.assertEqual(r["choices"][0]["text"], case["greedy_text"] + end)

    def test_penalties_and_biases(self):
        base = self.g.complete(STORY, max_tokens=40, return_token_ids=True)["choices"][0]
        for name in ("frequency_penalty", "presence_penalty"):
            r = self.g.complete(STORY, max_tokens=40, return_token_ids=True, **{name: 2})
            ids = r["choices"][0]["token_ids"]
            self.assertLess(len(ids) - len(set(ids)), len(base["token_ids"]) -
                            len(set(base["token_ids"])), name)
        r = self.g.complete(STORY, max_tokens=40, return_token_ids=True, repetition_penalty=8)
        both = [c["token_ids"] + c["prompt_token_ids"] for c in (base, r["choices"][0])]
        repeated = [len(ids) - len(set(ids)) for ids in both]
        self.assertLess(repeated[1], repeated[0] / 2)
        token = base["token_ids"][0]
        r = self.g.complete(STORY, max_tokens=3, return_token_ids=True, logit_bias={token: -100})
        self.assertNotIn(token, r["choices"][0]["token_ids"])
        r = self.g.complete(STORY, max_tokens=3, return_token_ids=True, logit_bias={"77": 100})
        self.assertEqual(r["choices"][0]["token_ids"], [77] * 3)

    def test_only_what_is_allowed(self):
        for drawn in ({}, {"temperature": 2, "seed": 3, "n": 3}):
            r = self.g.complete(STORY, max_tokens=20, allowed_token_ids=[77, 300, 77],
                                return_token_ids=True, **drawn)
            for c in r["choices"]:
                self.assertEqual(len(c["token_ids"]), 20)
                self.assertLessEqual(set(c["token_ids"]), {77, 300})
        r = self.g.complete(STORY, max_tokens=5, allowed_token_ids=[77], bad_words=["x"],
                            logit_bias={"77": -100}, min_tokens=5, return_token_ids=True)
        self.assertEqual(r["choices"][0]["token_ids"], [77] * 5)
        r = self.g.complete(STORY, max_tokens=4, allowed_token_ids=[2, 77], guided_regex="[xyz]{2}")
        self.assertRegex(r["choices"][0]["text"], "^[xyz]{2}$")  # nothing else remains
        for wrong in ([], [4096], 5, [-1], ["x"], [77] * 1025):
            self.fails(400, "/v1/completions", {"prompt": "x", "allowed_token_ids": wrong}, ".",
                       param="allowed_token_ids")

    def test_bad_words(self):
        plain_text = self.g.complete(STORY, max_tokens=40)["choices"][0]["text"]
        seen = plain_text.split()
        words = [w for w in seen if w.isalpha()][:6]
        pair = " ".join(seen[1:3])  # what needs the tokens before it, one of them still in flight
        for bad in (words, [pair], [f" {pair}"], [" ".join(seen[:5])], ["nowhere to be seen"]):
            for more in ({}, {"frequency_penalty": 0.01}):
                chunks = self.g.stream_text(STORY, max_tokens=40, bad_words=bad, **more)[0]
                whole = self.g.complete(STORY, max_tokens=40, bad_words=bad, **more)["choices"][0]
                self.assertEqual(chunks, whole["text"])
                for word in bad:
                    self.assertNotRegex(whole["text"], rf"(^|\s){re.escape(word.strip())}\b")
        free = self.g.complete(STORY, max_tokens=40, **more)["choices"][0]["text"]
        self.assertEqual(whole["text"], free)
        self.g.chat("Who are you?", max_tokens=3, bad_words=[])
        for wrong in ("x", [""], [5], ["x"] * 257, ["a b c d " * 300]):
            self.fails(400, "/v1/completions", {"prompt": "x", "bad_words": wrong}, ".",
                       param="bad_words")

    def test_sampling_is_the_seed_s(self):
        body = {"temperature": 1, "seed": 7, "max_tokens": 16}
        first = self.g.complete(STORY, **body)["choices"][0]["text"]
        self.assertEqual(self.g.complete(STORY, **body)["choices"][0]["text"], first)
        three = [c["text"] for c in self.g.complete(STORY, n=3, **body)["choices"]]
        self.assertEqual(three[0], first)
        self.assertEqual(len(set(three)), 3)
        busy = together([lambda i=i: self.g.complete(plain(i)[0], max_tokens=20, temperature=1)
                         for i in range(8)] +
                        [lambda: self.g.complete(STORY, **body)["choices"][0]["text"]])
        self.assertEqual(busy[-1], first)
        self.assertNotEqual(self.g.complete(STORY, **{**body, "seed": 8})["choices"][0]["text"],
                            first)

    def test_small_bodies_that_take_much_memory(self):
        """Parsed, an empty list is a hundred times its text; numbers are left alone."""
        many = ",".join(["[]"] * 700000)
        before = self.g.rss()
        self.fails(413, "/v1/completions", f'{{"model": "ember-tiny", "prompt": "x", "user": [{many}]}}',
                   "too many values", "request_too_large")
        self.assertLess(self.g.rss() - before, 64 << 20)
        ids = self.g.request("POST", "/v1/completions", {"model": "ember-tiny", "prompt": [5] * 1000000})
        self.assertEqual((ids[0], ids[2]["error"]["code"]), (400, "context_length_exceeded"))

    def test_equal_prompts_are_drawn_for_each(self):
        """Unless the client has given the seed: then each is what it is alone."""
        body = {"temperature": 1, "max_tokens": 12, "n": 2}
        texts = [c["text"] for c in self.g.complete([STORY] * 4, **body)["choices"]]
        self.assertGreater(len(set(texts)), 4)
        texts = [c["text"] for c in self.g.complete([STORY] * 3, seed=5, **body)["choices"]]
        self.assertEqual(texts, 3 * [c["text"] for c in self.g.complete(STORY, seed=5, **body)["choices"]])
        self.fails(400, "/v1/completions", {"model": "ember-tiny", "prompt": ["x"] * 1000, "n": 100},
                   "100000|at most", param="n")

    def test_errors(self):
        c, h = "/v1/completions", "/v1/chat/completions"
        self.fails(400, c, "{", "not JSON")
        self.fails(400, c, '{"prompt": "a\\u0000b"}', r"text with .u0000 in it is not taken$")
        self.fails(400, c, "[1]", "not a JSON object")
        self.fails(404, c, {"model": "nope", "prompt": "x"}, "`nope` does not exist",
                   "model_not_found", "model")
        for field, value in (("temperature", -1), ("top_p", 0), ("n", 0), ("n", 1000), ("n", "x"),
                             ("max_tokens", -1), ("logprobs", 21), ("stop", [""]),
                             ("stop", [1]), ("logit_bias", {"x": 1}), ("logit_bias", {"5": 101}),
                             ("logit_bias", {"99999": 1}), ("stream", "yes"), ("seed", 1.5),
                             ("response_format", {"type": "structural_tag"}), ("suffix", "x"),
                             ("prompt", []), ("prompt", [[]]), ("prompt", [-1]), ("prompt", {}),
                             ("guided_json", 3), ("best_of", 3), ("min_tokens", 17), ("n", 1.5),
                             ("seed", "x"), ("top_k", -2), ("top_k", 1.5), ("min_p", 1.5), ("top_p", 1.5),
                             ("temperature", "hot"), ("temperature", 1e300), ("presence_penalty", 3),
                             ("frequency_penalty", -3), ("repetition_penalty", 0), ("logprobs", -1),
                             ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("stop", ["x"] * 65),
                             ("stop_token_ids", 5), ("stop_token_ids", [-1]), ("echo", 1),
                             ("ignore_eos", "x"), ("priority", "high"), ("cache_salt", ""),
                             ("cache_salt", 5), ("request_id", 5), ("user", 5), ("truncation_side", "up"),
                             ("stream_options", 5), ("stream_options", {"include_usage": True}),
                             ("logit_bias", []), ("guided_regex", ""), ("guided_choice", []),
                             ("truncate_prompt_tokens", -2), ("return_token_ids", "x"),
                             ("skip_special_tokens", 0), ("add_special_tokens", "x"),
                             ("response_format", {"type": "json_schema"}), ("prompt", None),
                             ("structured_outputs", {"regex": "a", "choice": ["a"]})):
            self.fails(400, c, {"model": "ember-tiny", "prompt": "x", field: value}, field,
                       param=field)
        self.fails(400, c, {"model": "ember-tiny", "prompt": [5000]}, "vocabulary", param="prompt")
        self.fails(400, c, {"model": "ember-tiny", "prompt": ""}, "no tokens", param="prompt")
        self.fails(400, c, {"model": "ember-tiny"}, "missing", param="prompt")
        self.fails(400, c, {"model": "ember-tiny", "prompt": "a " * 5000}, ".",
                   "context_length_exceeded")
        self.fails(400, h, {"model": "ember-tiny", "messages": []}, "at least one")
        self.fails(400, h, {"model": "ember-tiny", "messages": [{"content": "x"}]}, "role")
        self.fails(400, h, {"model": "ember-tiny", "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "text parts")
        chat = {"model": "ember-tiny", "messages": [{"role": "user", "content": "x"}]}
        for field, value in (("top_logprobs", 2), ("logprobs", 1), ("max_tokens", 0),
                             ("max_completion_tokens", 0), ("tool_choice", "sometimes"),
                             ("tool_choice", {"type": "function"}), ("tools", {}),
                             ("chat_template_kwargs", 5), ("chat_template", "nope"),
                             ("add_generation_prompt", 1), ("parallel_tool_calls", 1),
                             ("reasoning_effort", 1), ("messages", "x"), ("messages", [5]),
                             ("messages", None), ("stream_options", {"include_usage": 1})):
            self.fails(400, h, {**chat, "stream": True, field: value}, ".", param=field)
        self.fails(400, h, {**chat, "continue_final_message": True, "add_generation_prompt": True},
                   "together", param="continue_final_message")
        self.fails(400, c, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, "stream",
                   param="prompt_logprobs")
        for body in ("", "null", "[", '{"prompt": "x", "prompt": "y"}', b"\xff", '{"prompt": NaN}'):
            self.fails(400, c, body, "JSON")
        self.assertEqual(self.g.get(c)[0], 405)
        self.assertEqual(self.g.get("/nowhere")[0], 404)

    def test_unknown_fields_are_accepted_with_one_warning(self):
        for _ in range(3):
            self.g.complete("x", max_tokens=1, brand_new_field={"a": 1})
        self.assertEqual(self.g.text().count('field="brand_new_field"'), 1)

    def test_truncated_prompts(self):
        ids = CASES[0]["prompt_ids"]
        r = self.g.complete(ids, max_tokens=1, truncate_prompt_tokens=3, return_token_ids=True)
        self.assertEqual(r["choices"][0]["prompt_token_ids"], ids[-3:])
        self.assertEqual(r["usage"]["prompt_tokens"], 3)
        r = self.g.complete(ids, max_tokens=1, truncate_prompt_tokens=3, truncation_side="right",
                            return_token_ids=True)
        self.assertEqual(r["choices"][0]["prompt_token_ids"], ids[:3])
        for n in (1, 5):  # what fits leaves room for the answer
            r = self.g.complete("a " * 5000, max_tokens=n, truncate_prompt_tokens=-1, ignore_eos=True)
            self.assertEqual((r["usage"]["prompt_tokens"], r["usage"]["completion_tokens"]), (2048 - n, n))
        self.fails(400, "/v1/completions", {"prompt": "x", "truncate_prompt_tokens": 0}, "0 tokens")

    def test_tokens_as_ids(self):
        r = self.g.complete(STORY, max_tokens=2, logprobs=1, return_tokens_as_token_ids=True,
                            return_token_ids=True)["choices"][0]
        self.assertEqual(r["logprobs"]["tokens"], [f"token_id:{t}" for t in r["token_ids"]])

    def test_fields_without_a_meaning_here(self):
        """Those that change no answer are taken; those that would are refused by name."""
        self.g.complete("x", max_tokens=1, prompt_cache_key="a", vllm_xargs={},
                        length_penalty=1.0, safety_identifier="me")
        self.g.chat("x", max_tokens=1, modalities=["text"], verbosity="low", functions=[])
        self.assertNotIn("unknown field ignored field=\"verbosity\"", self.g.text())
        self.g.chat("x", max_tokens=1, top_logprobs=0, session_id="s", thinking_token_budget=-1,
                    seed=-2 ** 63, priority=time.time_ns(), stop=None, n=None, logit_bias=None)
        for field, value in (("logprob_token_ids", [1]), ("thinking_token_budget", 5),
                             ("repetition_detection", {}), ("use_beam_search", True)):
            self.fails(400, "/v1/completions", {"prompt": "x", field: value}, field, param=field)
        chat = {"messages": [{"role": "user", "content": "x"}]}
        for field, value in (("modalities", ["audio"]), ("functions", [{"name": "f"}]),
                             ("web_search_options", {})):
            self.fails(400, "/v1/chat/completions", {**chat, field: value}, field, param=field)

    def test_tokenize(self):
        r = self.g.ask("/tokenize", prompt=CASES[0]["prompt"], return_token_strs=True)
        self.assertEqual(r["tokens"], CASES[0]["prompt_ids"])
        self.assertEqual(r["count"], len(r["tokens"]))
        self.assertEqual(r["max_model_len"], 2048)
        self.assertEqual(r["token_strs"][0], "<|im_start|>")
        self.assertEqual(self.g.ask("/tokenize", prompt="")["tokens"], [])
        chat = self.g.ask("/tokenize", messages=[{"role": "user", "content": "Who are you?"}])
        self.assertEqual(chat["tokens"], CASES[0]["prompt_ids"])
        back = self.g.ask("/detokenize", tokens=r["tokens"])
        self.assertEqual(back["prompt"], CASES[0]["prompt"])
        self.assertEqual(self.g.ask("/detokenize", tokens=[])["prompt"], "")
        messages = [{"role": "user", "content": "x"}]
        for path, body, param in (("/tokenize", {"prompt": "x", "messages": messages}, "prompt"),
                                  ("/tokenize", {"prompt": ["x", "y"]}, "prompt"),
                                  ("/detokenize", {"tokens": [[1], [2]]}, "tokens"),
                                  ("/detokenize", {"tokens": [4096]}, "tokens")):
            self.fails(400, path, {"model": "ember-tiny", **body}, "together|one|vocabulary", param=param)

    def test_small_routes(self):
        status, _, models = self.g.get("/v1/models")
        self.assertEqual([m["id"] for m in models["data"]], ["ember-tiny"])
        self.assertEqual(set(models["data"][0]), {"id", "object", "created", "owned_by", "root", "parent",
                                                  "max_model_len", "permission"})
        self.assertEqual(self.g.get("/v1/models/ember-tiny")[2]["id"], "ember-tiny")
        self.assertEqual(self.g.get("/v1/models/%65mber-tiny")[2]["id"], "ember-tiny")
        self.assertEqual(self.g.get("/v1/models/x")[0], 404)
        status, headers, _ = self.g.request("OPTIONS", "/v1/models")
        self.assertEqual((status, headers["Allow"]), (204, "GET, HEAD, POST, OPTIONS"))
        self.assertIn("version", self.g.get("/version")[2])
        self.assertIn("server_load", self.g.get("/load")[2])
        self.assertEqual(self.g.get("/ping")[0], 200)

    def test_request_ids(self):
        _, headers, reply = self.g.request("POST", "/v1/completions", {"prompt": "x"},
                                           {"X-Request-Id": "my-id.1"})
        self.assertEqual(headers["X-Request-Id"], "my-id.1")
        self.assertEqual(reply["id"], "cmpl-my-id.1")
        for given, want in (({}, "in-the-body"), ({"X-Request-Id": "my-id.2"}, "my-id.2")):
            _, headers, reply = self.g.request("POST", "/v1/chat/completions", {
                "messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
                "request_id": "in-the-body"}, given)
            self.assertEqual((headers["X-Request-Id"], reply["id"]), (want, f"chatcmpl-{want}"))
        _, headers, reply = self.g.request("POST", "/v1/completions",
                                           {"prompt": "x", "request_id": "a\nb"})
        self.assertRegex(headers["X-Request-Id"], "^[0-9a-f]{32}$")
        _, headers, _ = self.g.get("/ping", headers={"X-Request-Id": 'a"b' + "x" * 100})
        self.assertRegex(headers["X-Request-Id"], "^[0-9a-f]{32}$")

    def test_metrics(self):
        self.g.complete("x", max_tokens=4)
        _, headers, page = self.g.get("/metrics")
        page = page.decode()
        self.assertIn("version=0.0.4", headers["Content-Type"])
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
                     "cache_config_info", "lora_requests_info", "time_to_first_token_seconds",
                     "inter_token_latency_seconds", "request_queue_time_seconds",
                     "e2e_request_latency_seconds", "prefix_cache_queries_total",
                     "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total",
                     "num_preemptions_total", "request_success_total"):
            self.assertIn(f"\nvllm:{name}" if name[-1] == "s" else f"vllm:{name}", page)
        seen = set()
        for line in page.splitlines():  # each family once, each line name{labels} value
            if line.startswith("# TYPE "):
                self.assertNotIn(line.split()[2], seen)
                seen.add(line.split()[2])
            elif not line.startswith("#"):
                float(line.rsplit(" ", 1)[1])
        self.assertGreaterEqual(self.g.metric("vllm:generation_tokens_total"), 4)
        self.assertEqual(self.g.metric("ember_spawn_seconds_count"), 1)

    def test_a_stream_over_http_1_0(self):
        """No chunks there: the end of the connection is the end of the stream."""
        body = json.dumps({"prompt": STORY, "max_tokens": 8, "temperature": 0, "stream": True})
        with socket.create_connection(("127.0.0.1", self.g.port)) as s:
            s.sendall(f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}"
                      .encode())
            s.settimeout(60)
            data = b""
            while more := s.recv(65536):
                data += more
        head, _, events = data.decode().partition("\r\n\r\n")
        self.assertNotIn("chunked", head)
        events = [e for e in events.strip().split("\n\n") if not e.startswith(":")]
        self.assertEqual(events[-1], "data: [DONE]")
        text = "".join(json.loads(e[6:])["choices"][0]["text"] for e in events[:-1])
        self.assertEqual(text, self.g.complete(STORY, max_tokens=8)["choices"][0]["text"])

    def test_what_a_step_brings_is_one_piece(self):
        """Choices of one request whose tokens come together leave in one chunk."""
        body = json.dumps({"prompt": STORY, "max_tokens": 20, "n": 8, "temperature": 0,
                           "ignore_eos": True, "stream": True})
        with socket.create_connection(("127.0.0.1", self.g.port)) as s:
            s.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                      f"\r\n{body}".encode())
            s.settimeout(60)
            data = b""
            while not data.endswith(b"\r\n0\r\n\r\n"):
                data += s.recv(65536)
        chunks, at = [], data.index(b"\r\n\r\n") + 4
        while size := int(data[at:data.index(b"\r\n", at)], 16):
            start = data.index(b"\r\n", at) + 2
            chunks.append(data[start:start + size])
            at = start + size + 2
        events = b"".join(chunks).count(b"data: {")
        self.assertGreater(events, 8 * 20)
        self.assertLess(len(chunks), events / 2)

    def test_abort_in_mid_stream(self):
        self.g.complete("x", max_tokens=1)
        before = self.g.metric("vllm:request_success_total", 'finished_reason="abort"')
        c = self.g.connect()
        c.request("POST", "/v1/completions", json.dumps(
            {"prompt": STORY, "max_tokens": 1900, "ignore_eos": True, "stream": True}))
        r = c.getresponse()
        r.readline()
        r.close()
        c.sock.shutdown(socket.SHUT_RDWR)
        c.close()
        wait_until(lambda: self.g.metric("vllm:num_requests_running") == 0, "it is given up")
        after = self.g.metric("vllm:request_success_total", 'finished_reason="abort"')
        self.assertEqual(after, before + 1)

    def test_prefixes_are_shared_under_one_salt(self):
        prompt = "Beyond the mountains, " * 12

        def cached(**more):
            r = self.g.complete(prompt, max_tokens=1, **more)
            return r["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.assertEqual([cached(), cached(cache_salt="a"), cached(cache_salt="b")], [0, 0, 0])
        again = [cached(), cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt="c")]
        self.assertTrue(again[0] >= 32 and again == [again[0]] * 3 + [0], again)

    def test_what_leaves_one_candidate_is_greedy(self):
        want = self.g.complete(STORY, max_tokens=12)["choices"][0]["text"]
        for more, same in (({}, False), ({"top_k": 1}, True), ({"top_p": 1e-6}, True),
                           ({"min_p": 1}, True), ({"top_k": -1, "top_p": 1, "min_p": 0}, False)):
            r = self.g.complete(STORY, max_tokens=12, seed=3, **{**more, "temperature": 3})
            self.assertEqual(r["choices"][0]["text"] == want, same, more)

    def test_tokenizing_holds_up_no_stream(self):
        chunks = self.g.stream("/v1/completions", prompt=STORY, n=8, max_tokens=1900, ignore_eos=True)
        next(chunks)
        done = []
        body = {"prompt": "a king who had " * 1000000}  # a second of work for each worker
        askers = [threading.Thread(target=lambda: done.append(
            self.g.request("POST", "/v1/completions", body)[0])) for _ in range(2)]
        for t in askers:
            t.start()
        wait_until(lambda: self.g.get("/load")[2]["server_load"] == 3, "both have come")
        before = self.g.metric("vllm:generation_tokens_total")
        wait_until(lambda: self.g.metric("vllm:generation_tokens_total") > before + 40, "the stream goes on")
        self.assertEqual(done, [])
        for t in askers:
            t.join()
        self.assertEqual(done, [400, 400])
        chunks.close()
        wait_until(lambda: self.g.metric("vllm:num_requests_running") == 0, "it is given up")

    def test_one_is_not_behind_a_crowd(self):
        """A client with hundreds of requests in the queue holds up another's single one by little."""
        crowd = self.g.stream("/v1/completions", prompt=[f"{STORY} {i}" for i in range(500)],
                              user="crowd", max_tokens=200, ignore_eos=True)
        next(crowd)
        wait_until(lambda: self.g.metric("vllm:num_requests_waiting") > 100, "most of them wait")
        for whose in ({"user": "one"}, {"user": "crowd", "priority": -1}):
            self.g.complete("The river", max_tokens=5, **whose)
            self.assertGreater(self.g.metric("vllm:num_requests_waiting"), 100)
        crowd.close()
        wait_until(lambda: self.g.metric("vllm:num_requests_running") == 0 and
                   self.g.metric("vllm:num_requests_waiting") == 0, "all of them are given up")

    def test_sleep_and_wake(self):
        self.g.complete("x", max_tokens=1)
        self.assertEqual(self.g.request("POST", "/sleep")[0], 200)
        wait_until(lambda: self.g.get("/is_sleeping")[2]["is_sleeping"], "it sleeps")
        waiting = threading.Thread(target=lambda: self.g.complete("x", max_tokens=1))
        waiting.start()
        wait_until(lambda: self.g.metric("vllm:num_requests_waiting") == 1, "it waits")
        self.assertEqual(self.g.request("POST", "/wake_up")[0], 200)
        waiting.join(60)
        self.assertFalse(waiting.is_alive())
        self.assertFalse(self.g.get("/is_sleeping")[2]["is_sleeping"])

    def test_reset_prefix_cache(self):
        prompt = STORY + " " + "many years and " * 12
        self.g.complete(prompt, max_tokens=1)
        cached = [self.g.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]
                  ["cached_tokens"]]
        self.assertEqual(self.g.request("POST", "/reset_prefix_cache")[0], 200)
        for _ in range(2):
            cached.append(self.g.complete(prompt, max_tokens=1)["usage"]
                          ["prompt_tokens_details"]["cached_tokens"])
        self.assertGreater(cached[0], 0)
        self.assertEqual(cached[1], 0)
        self.assertEqual(cached[2], cached[0])


class Doors(Case):
    """Keys, CORS, limits."""

    @classmethod
    def setUpClass(cls):
        keys = f"{gateway.tempfile.gettempdir()}/ember-gw-keys-{os.getpid()}"
        with open(keys, "w") as f:
            f.write("# comment\nsecret-one\n\nsecret-two  second\n")
        cls.keys = keys
        cls.options = (f"--api-keys={keys}", "--cors-origins=https://a.example,https://b.example",
                       "--max-body=64KiB", "--max-headers=8KiB", "--client-timeout=2s",
                       "--request-timeout=3s")
        super().setUpClass()

    @classmethod
    def tearDownClass(cls):
        os.unlink(cls.keys)
        super().tearDownClass()

    def test_keys(self):
        body = {"prompt": "x", "max_tokens": 1}
        for key in (None, "Bearer wrong", "Bearer secret-on", "Bearer secret-one2", "secret-one",
                    "Bearer ", "Bearer # comment"):
            status, headers, reply = self.g.request("POST", "/v1/completions", body,
                                                    {"Authorization": key} if key else None)
            self.assertEqual(status, 401, key)
            self.assertEqual(reply["error"]["code"], "invalid_api_key")
            self.assertIn("WWW-Authenticate", headers)
        for key in ("secret-one", "secret-two"):
            self.assertEqual(self.g.request("POST", "/v1/completions", body,
                                            {"Authorization": f"Bearer {key}"})[0], 200)
        self.assertEqual(self.g.get("/v1/models")[0], 401)
        self.assertEqual(self.g.get("/health")[0], 200)
        self.assertEqual(self.g.get("/metrics")[0], 200)

    def test_cors(self):
        status, headers, _ = self.g.request(
            "OPTIONS", "/v1/completions",
            headers={"Origin": "https://b.example", "Access-Control-Request-Method": "POST",
                     "Access-Control-Request-Headers": "authorization,x-other"})
        self.assertEqual(status, 204)
        self.assertEqual(headers["Access-Control-Allow-Origin"], "https://b.example")
        self.assertEqual(headers["Access-Control-Allow-Headers"], "authorization,x-other")
        _, headers, _ = self.g.get("/ping", headers={"Origin": "https://evil.example"})
        self.assertNotIn("Access-Control-Allow-Origin", headers)

    def test_admin_is_off(self):
        key = {"Authorization": "Bearer secret-one"}
        self.assertEqual(self.g.request("POST", "/sleep", headers=key)[0], 404)

    def test_limits(self):
        """Errors have one form, also where the server's own parser finds them."""
        for size in (100000, 5 << 20):
            status, headers, reply = self.g.request("POST", "/v1/completions", b"x" * size,
                                                    {"Authorization": "Bearer secret-one"})
            self.assertEqual(status, 413)
            self.assertEqual(headers["Content-Type"], "application/json")
            self.assertEqual(reply["error"]["code"], "request_too_large")
        c = self.g.connect()  # and on a connection that has served before
        c.request("GET", "/ping")
        c.getresponse().read()
        c.request("POST", "/v1/completions", b"x" * 100000)
        r = c.getresponse()
        self.assertEqual((r.status, json.loads(r.read())["error"]["code"]),
                         (413, "request_too_large"))
        c.close()
        for headers in ({"X-Long": "y" * 40000}, {f"X-{i}": "y" for i in range(4000)}):
            status, _, reply = self.g.get("/ping", headers=headers)
            self.assertEqual((status, reply["error"]["code"]), (431, "headers_too_large"))
        status, _, reply = self.g.get("/ping", headers={"X-Some": "y" * 4000})
        self.assertEqual(status, 200)

    def test_a_body_too_large_is_refused_before_it_comes(self):
        """413 and the end of the stream, for nothing but the header; then the connection goes."""
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
        for more in (b"\r\n", b"Expect: 100-continue\r\n\r\n", b"\r\n" + b"x" * 1000):
            with socket.create_connection(("127.0.0.1", self.g.port)) as s:
                s.settimeout(60)
                s.sendall(head + more)
                data = b""
                while piece := s.recv(4096):
                    data += piece
                self.assertTrue(data.startswith(b"HTTP/1.1 413 "), data)
                self.assertIn(b"request_too_large", data)
                wait_until(lambda: not holds(self.g, s), "it is let go, though we have not closed")
        with socket.create_connection(("127.0.0.1", self.g.port)) as s:  # nor may one drip for good
            s.sendall(head + b"\r\n")
            self.assertTrue(s.recv(4096).startswith(b"HTTP/1.1 413 "))
            drip(s, b"x")

    def test_a_refusal_can_be_read_behind_the_body(self):
        """A client that sends all of it before it looks is not reset."""
        for size in (300_000, 30 << 20):
            with socket.create_connection(("127.0.0.1", self.g.port)) as s:
                s.settimeout(60)
                s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
                time.sleep(0.2)  # the refusal is there long before the end of the body
                for _ in range(size // 100_000):
                    s.sendall(b"x" * 100_000)
                self.assertTrue(s.recv(4096).startswith(b"HTTP/1.1 413 "), size)

    def test_a_refusal_behind_another_request_can_be_read(self):
        """Its header came in one piece with the request before it."""
        with socket.create_connection(("127.0.0.1", self.g.port)) as s:
            s.settimeout(60)
            s.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
                      b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n")
            time.sleep(0.2)
            for _ in range(3):
                s.sendall(b"x" * 100_000)
                time.sleep(0.1)
            data = b""
            while piece := s.recv(4096):
                data += piece
            self.assertTrue(data.startswith(b"HTTP/1.1 200 "), data)
            self.assertIn(b"HTTP/1.1 413 ", data)

    def test_methods(self):
        c = self.g.connect()
        c.request("HEAD", "/ping")
        r = c.getresponse()
        self.assertEqual((r.status, r.read()), (200, b""))
        c.request("HEAD", "/version")  # on the same connection: nothing was left in it
        r = c.getresponse()
        self.assertEqual((r.status, r.read()), (200, b""))
        self.assertGreater(int(r.getheader("Content-Length")), 10)
        c.close()
        key = {"Authorization": "Bearer secret-one"}
        for method in ("PUT", "DELETE", "PATCH"):
            status, headers, reply = self.g.request(method, "/v1/completions", "x", headers=key)
            self.assertEqual(status, 405, method)
            self.assertEqual(headers["Allow"], "POST, OPTIONS")
            self.assertIn("message", reply["error"])
        status, headers, _ = self.g.request("DELETE", "/ping", headers=key)
        self.assertEqual((status, headers["Allow"]), (405, "GET, HEAD, POST, OPTIONS"))

    def test_a_dripping_client_is_dropped(self):
        """Each byte comes in time, the request does not."""
        with socket.create_connection(("127.0.0.1", self.g.port)) as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
            drip(s, b"x")
        self.assertIn("slow clients dropped", self.g.text())

    def test_a_slow_client_is_dropped(self):
        with socket.create_connection(("127.0.0.1", self.g.port)) as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            s.settimeout(60)
            while s.recv(4096):
                pass

    def test_bodies_whose_end_is_in_doubt_are_refused(self):
        """What stands before us may have seen another end: the rest must be no request."""
        chunks = b"2\r\n{}\r\n0\r\n\r\n"
        for headers, body in ((b"Content-Length: 2\r\nContent-Length: 3", b"{}"),
                              (b"Content-Length : 2", b"{}"), (b"Content-Length\t: 2", b"{}"),
                              (b"Content-Length: +2", b"{}"), (b"Content-Length: 0x2", b"{}"),
                              (b"Content-Length:\x0b2", b"{}"), (b"Content-Length: 2, 2", b"{}"),
                              (b"Transfer-Encoding : chunked", chunks),
                              (b"Transfer-Encoding: xchunked", chunks),
                              (b"Transfer-Encoding: gzip, chunked", chunks),
                              (b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked", chunks),
                              (b"Transfer-Encoding: chunked\r\nContent-Length: 2", chunks),
                              (b"Content-Length: 2\r\nTransfer-Encoding: chunked", chunks)):
            with self.subTest(headers), \
                    socket.create_connection(("127.0.0.1", self.g.port)) as s:
                s.settimeout(60)
                s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n\r\n" +
                          body + b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
                data = b""
                while piece := s.recv(4096):
                    data += piece
                self.assertTrue(data.startswith(b"HTTP/1.1 400 "), data)
                self.assertEqual(data.count(b"HTTP/1.1 "), 1, data)

    def test_nonsense_is_no_harm(self):
        for data in (b"\0" * 100, b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n",
                     b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
                     b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"):
            with socket.create_connection(("127.0.0.1", self.g.port)) as s:
                s.sendall(data)
                s.settimeout(60)
                try:
                    s.recv(4096)
                except (TimeoutError, ConnectionError):
                    pass
        self.assertEqual(self.g.get("/ping")[0], 200)


class Exact(unittest.TestCase):
    """The same tokens, greedy or drawn, and the same log-probabilities, whatever runs beside them
    and however the steps are cut."""

    def run_all(self, stack, at_once):
        calls = [lambda i=i: stack.gateway.stream_text(plain(i)[0], max_tokens=plain(i)[1])
                 for i in range(24)]
        calls += [lambda i=i: stack.gateway.complete(plain(i)[0], **DRAWN, seed=i)["choices"]
                  for i in range(4)]
        return together(calls) if at_once else [c() for c in calls]

    def test_however(self):
        want = None
        for options, at_once in ((("--no-prefix-cache", "--no-token-refs"), False), ((), False),
                                 ((), True), (("--step-tokens=8",), True),
                                 (("--prefill-tokens=5",), True), (("--no-token-refs",), True),
                                 (("--no-prefix-cache",), True), (("--max-instances=2",), True)):
            stack = Stack(*options)
            try:
                got = self.run_all(stack, at_once)
                got += self.run_all(stack, at_once)  # the second time from the prefix cache
            finally:
                stack.stop()
            want = want or got
            self.assertEqual(got, want, options)

    def test_what_is_parsed_is_its_workers_alone(self):
        """Under ThreadSanitizer: the half-second's work comes by while a large body is parsed."""
        stack = Stack()
        try:
            numbers = ",".join(["1"] * 1_000_000)
            for _ in range(4):
                status, _, reply = stack.gateway.request(
                    "POST", "/v1/completions", f'{{"model": "ember-tiny", "stream": true, "prompt": [{numbers}]}}')
                self.assertEqual((status, reply["error"]["code"]), (400, "context_length_exceeded"))
        finally:
            stack.stop()

    def test_preempted(self):
        """Little KV memory: sequences are taken off and replayed."""
        whole = Stack()
        small = Stack(emberd=("--kv-bytes=1200KiB",))
        try:
            prompts = [f"{PROMPTS[i]} {i}" for i in range(10)]

            def texts(stack):
                return together([lambda p=p: stack.gateway.stream_text(p, max_tokens=100)
                                 for p in prompts] +
                                [lambda i=i: stack.gateway.complete(prompts[i], **DRAWN, seed=i)
                                 ["choices"] for i in range(4)])
            self.assertEqual(texts(small), texts(whole))
            self.assertGreater(small.gateway.metric("vllm:num_preemptions_total"), 0)
        finally:
            small.stop()
            whole.stop()


class Failures(unittest.TestCase):
    def stack(self, *options, **more):
        stack = Stack(*options, **more)
        self.addCleanup(stack.stop)
        return stack

    def test_kill_under_32_streams(self):
        stack = self.stack()
        g = stack.gateway
        work = [(plain(i)[0], 60 + i) for i in range(32)]
        want = [g.stream_text(p, max_tokens=n, ignore_eos=True) for p, n in work]
        results = [None] * 32
        begun = threading.Barrier(33)

        def one(i):
            text, reason, first = "", None, True
            for chunk in g.stream("/v1/completions", prompt=work[i][0], temperature=0,
                                  max_tokens=work[i][1], ignore_eos=True):
                if isinstance(chunk, dict) and "error" not in chunk:
                    text += chunk["choices"][0]["text"]
                    reason = chunk["choices"][0]["finish_reason"] or reason
                elif chunk != "[DONE]":
                    text += f"<{chunk}>"
                if first:
                    begun.wait(60)
                    first = False
            results[i] = (text, reason)
        threads = [threading.Thread(target=one, args=(i,)) for i in range(32)]
        for t in threads:
            t.start()
        leased = stack.leases().split()[1]
        begun.wait(60)
        pid = stack.emberd.pid_of(leased)
        os.kill(pid, signal.SIGKILL)
        for t in threads:
            t.join(60)
        self.assertEqual(results, want)
        self.assertEqual(g.metric("ember_failovers_total"), 1)
        self.assertGreater(g.metric("ember_replays_total"), 0)

    def test_a_request_that_kills_twice_fails_alone(self):
        """Every instance dies at its 60th step."""
        stack = self.stack(emberd_env={"EMBER_FAULT": "instance-step:60=kill"})
        g = stack.gateway
        text, reason = g.stream_text(STORY, max_tokens=30)  # in one instance's life
        self.assertEqual(reason, "length")
        long = g.stream_text(STORY, max_tokens=150, ignore_eos=True)  # over several lives
        self.assertTrue(long[0].startswith(text))
        self.assertGreaterEqual(g.metric("ember_failovers_total"), 2)
        stack = self.stack(emberd_env={"EMBER_FAULT": "instance-step:1=kill"})
        status, _, reply = stack.gateway.request("POST", "/v1/completions", {"prompt": "x"})
        self.assertEqual(status, 500)
        self.assertEqual(reply["error"]["type"], "server_error")

    def test_a_stalled_instance_is_replaced(self):
        stack = self.stack("--stall-timeout=3s")
        g = stack.gateway
        want = g.stream_text(STORY, max_tokens=60, ignore_eos=True)
        leased = stack.leases().split()[1]
        pid = stack.emberd.pid_of(leased)
        os.kill(pid, signal.SIGSTOP)
        self.assertEqual(g.stream_text(STORY, max_tokens=60, ignore_eos=True), want)
        os.kill(pid, signal.SIGCONT) if os.path.exists(f"/proc/{pid}") else None
        self.assertEqual(g.metric("ember_failovers_total"), 1)

    def test_restart_takes_instances_up(self):
        stack = self.stack()
        g = stack.gateway
        want = g.complete(STORY, max_tokens=20)["choices"]
        before = stack.leases()
        g.process.kill()
        g.process.wait()
        g = stack.another()
        self.assertEqual(g.complete(STORY, max_tokens=20)["choices"], want)
        self.assertEqual(g.metric("ember_taken_up_total"), 1)
        self.assertEqual(stack.leases(), before)
        self.assertEqual(stack.emberd.text().count("leased id="), 1)

    def test_sigterm_drains(self):
        stack = self.stack()
        g = stack.gateway
        chunks = g.stream("/v1/completions", prompt=STORY, temperature=0, max_tokens=600,
                          ignore_eos=True, stream_options={"include_usage": True})
        next(chunks)
        g.process.send_signal(signal.SIGTERM)
        wait_until(lambda: g.get("/health")[0] == 503, "health is 503")
        status, headers, reply = g.request("POST", "/v1/completions", {"prompt": "x"})
        self.assertEqual(status, 503)
        self.assertGreaterEqual(int(headers["Retry-After"]), 1)
        self.assertEqual(reply["error"]["code"], "shutting_down")
        self.assertEqual(g.get("/ping")[0], 200)  # alive: nobody is to kill it
        rest = list(chunks)
        self.assertEqual(rest[-1], "[DONE]")
        self.assertEqual(rest[-2]["usage"]["completion_tokens"], 600)
        self.assertEqual(g.process.wait(60), 0)
        self.assertEqual(stack.leases(), "")
        wait_until(lambda: "lease ended" in stack.emberd.text(), "the lease is given back")

    def test_a_damaged_cache_is_told_of(self):
        folder = tempfile.mkdtemp(prefix="ember-gw-")
        self.addCleanup(shutil.rmtree, folder)
        os.chmod(folder, 0o700)
        with open(f"{folder}/store.mdb", "wb") as f:
            f.write(b"no store" * 4096)
        stack = self.stack(f"--cache-dir={folder}")
        self.assertEqual(stack.gateway.complete("x", max_tokens=1)["usage"]["completion_tokens"], 1)
        self.assertRegex(stack.gateway.text(), 'artefact cache warning=".*store.mdb.old')

    def test_full_queue(self):
        stack = self.stack("--max-queue=4")
        g = stack.gateway
        g.complete("x", max_tokens=1)
        replies = together([lambda i=i: g.request(
            "POST", "/v1/completions", {"prompt": f"{STORY} {i}", "max_tokens": 30, "n": 16,
                                        "ignore_eos": True}) for i in range(20)])
        statuses = [r[0] for r in replies]
        self.assertEqual(set(statuses), {200, 429}) if 200 in statuses else None
        self.assertIn(429, statuses)
        for status, headers, reply in replies:
            if status == 429:
                self.assertGreaterEqual(int(headers["Retry-After"]), 1)
                self.assertEqual(reply["error"]["code"], "queue_full")

    def test_a_cold_model_is_waited_for(self):
        """The stream shows signs of life meanwhile; many wait for one load."""
        stack = self.stack("--heartbeat=200ms", emberd=("--standby=0",))
        g = stack.gateway
        g.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})
        os.kill(stack.emberd.instances()[0], signal.SIGKILL)
        stack.emberd.process.send_signal(signal.SIGSTOP)
        comments = 0
        for chunk in g.stream("/v1/completions", prompt=STORY, temperature=0, max_tokens=5):
            comments += isinstance(chunk, str) and chunk.startswith(":")
            if comments == 3:
                stack.emberd.process.send_signal(signal.SIGCONT)
        self.assertEqual(chunk, "[DONE]")
        self.assertGreaterEqual(comments, 3)

    def test_prompts_that_no_instance_can_hold(self):
        """It is the client's fault even where it is only known once an instance has come."""
        stack = self.stack(emberd=("--kv-bytes=1200KiB",))
        g = stack.gateway

        def refused(n):
            for more in ({}, {"n": 2, "max_tokens": 0}, {"stream": True}):
                status, _, reply = g.request("POST", "/v1/completions", {"prompt": [5] * n, **more})
                self.assertEqual((status, reply["error"]["code"], reply["error"]["param"]),
                                 (400, "context_length_exceeded", "prompt"))
        refused(2049)
        self.assertNotIn("instance wanted", g.text())  # none is started in vain
        refused(1900)
        self.assertIn("instance wanted", g.text())
        self.assertEqual(g.complete("x", max_tokens=1)["usage"]["completion_tokens"], 1)

    def test_waiting_has_an_end(self):
        stack = self.stack("--queue-timeout=1s")
        g = stack.gateway
        g.complete("x", max_tokens=1)
        for pid in stack.emberd.instances():
            os.kill(pid, signal.SIGKILL)
        stack.emberd.process.send_signal(signal.SIGSTOP)
        try:
            status, headers, reply = g.request("POST", "/v1/completions", {"prompt": "x"})
        finally:
            stack.emberd.process.send_signal(signal.SIGCONT)
        self.assertEqual(status, 503)
        self.assertIn("Retry-After", headers)

    def test_the_end_of_waiting_has_one_form(self):
        """Whenever it comes in relation to what the gateway does by the clock."""
        stack = self.stack("--queue-timeout=1s", "--admin")
        g = stack.gateway
        self.assertEqual(g.request("POST", "/sleep")[0], 200)

        def late(i):
            time.sleep(i * 0.025)
            return g.request("POST", "/v1/completions", {"prompt": "x"})
        for status, headers, reply in together([lambda i=i: late(i) for i in range(40)]):
            self.assertEqual((status, reply["error"]["code"]), (503, "timeout"))
            self.assertGreaterEqual(int(headers["Retry-After"]), 1)

    def test_sleep_while_an_instance_is_on_its_way(self):
        stack = self.stack("--admin", emberd=("--standby=0",))
        g = stack.gateway
        g.complete("x", max_tokens=1)
        stack.emberd.process.send_signal(signal.SIGSTOP)
        os.kill(stack.emberd.instances()[0], signal.SIGKILL)
        asking = threading.Thread(target=lambda: g.complete("x", max_tokens=1))
        asking.start()
        wait_until(lambda: g.text().count("instance wanted") == 2, "another is asked for")
        self.assertEqual(g.request("POST", "/sleep")[0], 200)
        stack.emberd.process.send_signal(signal.SIGCONT)
        wait_until(lambda: g.text().count("instance given back") == 1, "it drains as it comes")
        self.assertTrue(g.get("/is_sleeping")[2]["is_sleeping"])
        self.assertEqual(g.metric("vllm:num_requests_waiting"), 1)
        self.assertEqual(g.request("POST", "/wake_up")[0], 200)
        asking.join(60)
        self.assertFalse(asking.is_alive())

    def test_wake_up_before_it_sleeps(self):
        """An instance that still has streams takes new requests again."""
        stack = self.stack("--admin")
        g = stack.gateway
        chunks = g.stream("/v1/completions", prompt=STORY, max_tokens=1900, ignore_eos=True)
        next(chunks)
        leases = stack.leases()
        self.assertEqual(g.request("POST", "/sleep")[0], 200)
        self.assertEqual(g.request("POST", "/wake_up")[0], 200)
        g.complete("x", max_tokens=1)
        self.assertEqual(g.metric("vllm:num_requests_running"), 1)
        self.assertEqual(stack.leases(), leases)
        chunks.close()

    def test_emberd_restarts(self):
        stack = self.stack()
        g = stack.gateway
        want = g.complete(STORY, max_tokens=10)["choices"]
        stack.emberd.stop()
        wait_until(lambda: g.get("/health")[0] == 503, "its absence is seen")
        stack.emberd = gateway.Emberd(stack.folder)
        stack.settle()
        self.assertEqual(g.complete(STORY, max_tokens=10)["choices"], want)

    def test_a_slow_reader_is_cut_and_others_are_not(self):
        stack = self.stack("--reader-backlog=16KiB")
        g = stack.gateway
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", g.port))
        body = json.dumps({"prompt": STORY, "max_tokens": 1900, "ignore_eos": True, "stream": True,
                           "logprobs": 20, "n": 4})
        s.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                  f"{body}".encode())
        wait_until(lambda: "its reader is too slow" in g.text(), "it is cut")
        s.close()
        self.assertEqual(g.stream_text(STORY, max_tokens=5)[1], "length")
        wait_until(lambda: g.metric("vllm:num_requests_running") == 0, "nothing runs")


class Load(unittest.TestCase):
    seconds = float(os.environ.get("LOAD_SECONDS", "4"))

    def test_200_streams(self):
        stack = Stack("--max-instances=2")
        try:
            self.load(stack)
        finally:
            stack.stop()

    def resident(self, stack):
        """MiB of the gateway, of emberd, and of each instance beyond what is shared."""
        def private(pid):
            with open(f"/proc/{pid}/smaps_rollup") as f:
                kb = {line.split(":")[0]: line.split()[1] for line in f if " kB" in line}
            return sum(int(kb[k]) for k in ("Private_Clean", "Private_Dirty")) / 1024
        return [private(p) for p in (stack.gateway.pid, stack.emberd.pid,
                                     *sorted(stack.emberd.instances()))]

    def load(self, stack):
        g = stack.gateway
        g.complete("x", max_tokens=1)
        idle_fds = g.fds(), stack.emberd.fds()
        counts, tokens, served, lock = [0] * 200, [0] * 200, [0] * 200, threading.Lock()
        before = []  # figures when everything has been in use for a while
        begin = 0

        def all_are_there():
            nonlocal begin
            begin = time.monotonic()
        start = threading.Barrier(200, all_are_there)  # who comes late has less

        def client(i):
            turn = 0
            start.wait()
            while time.monotonic() < begin + self.seconds:
                prompt, n = plain(i + turn)
                chunks = list(g.stream("/v1/completions", prompt=prompt, temperature=0, user=str(i),
                                       max_tokens=n, ignore_eos=True,
                                       stream_options={"include_usage": True}))
                usage = chunks[-2]["usage"] if chunks[-1] == "[DONE]" else {}
                if usage.get("completion_tokens") != n:
                    raise AssertionError(chunks[-2:])
                computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
                turn += 1
                with lock:
                    counts[i] += 1
                    tokens[i] += n
                    served[i] += n + computed / 2  # what fairness is about (scheduler/fair.c)
                    if not before and time.monotonic() > begin + self.seconds / 3:
                        before.append(self.resident(stack))
        together([lambda i=i: client(i) for i in range(200)])
        took = time.monotonic() - begin
        wait_until(lambda: g.metric("vllm:num_requests_running") == 0, "nothing runs")
        self.assertEqual(g.metric("vllm:kv_cache_usage_perc"), 0)
        self.assertEqual(g.metric("ember_failovers_total"), 0)
        second = len(stack.emberd.instances()) * 2  # each has a socket here and a link there
        wait_until(lambda: g.fds() <= idle_fds[0] + second, "connections are closed")
        self.assertLessEqual(stack.emberd.fds(), idle_fds[1] + second)
        after = self.resident(stack)
        share = sum(served) ** 2 / (len(served) * sum(s * s for s in served))
        longest = max(plain(i)[1] for i in range(200))
        print(f"{sum(counts)} streams, {sum(tokens) / took:.0f} tokens/s, fairness {share:.3f} "
              f"(Jain's index; 1 is equal), {min(served):.0f} to {max(served):.0f} tokens a client, "
              f"{max(served) - min(served):.0f} apart of {2 * longest}, {max(tokens) - min(tokens)} in texts alone; "
              f"descriptors {idle_fds[0]} before, {g.fds()} after; MiB "
              f"of gateway, emberd, instances after a third "
              f"{' '.join(f'{m:.1f}' for m in (before or [[]])[0])}, at the end "
              f"{' '.join(f'{m:.1f}' for m in after)}")
        self.assertGreater(min(counts), 0)
        self.assertLessEqual(max(served) - min(served), 2 * longest)  # however long, however fast
        if self.seconds >= 30 and "ASAN_OPTIONS" not in os.environ:  # what is freed waits there
            self.assertEqual(len(after), len(before[0]))
            for was, now in zip(before[0], after):
                self.assertLess(now, was + 2)


def transcripts(text):
    """(command, expected output) of each "$ curl" in the console blocks of a page."""
    for block in re.findall(r"```console\n(.*?)```", text, re.S):
        for entry in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = entry.partition("\n")
            yield command, output


def steady(text):
    """What differs from run to run made equal."""
    text = re.sub(r"cmpl-[0-9a-f]{32}", "cmpl-ID", text.replace("\r", ""))
    text = re.sub(r"-\d+\.\d+", lambda m: f"{float(m[0]):.2f}", text)
    return re.sub(r'"created":\d+', '"created":0', text).strip()


@unittest.skipUnless(shutil.which("curl"), "curl is not installed")
class Docs(Case):
    def test_transcripts(self):
        with open(f"{gateway.SOURCE}/docs/gateway.md") as f:
            pairs = list(transcripts(f.read()))
        self.assertGreater(len(pairs), 8)
        for command, output in pairs:
            done = subprocess.run(["bash", "-c", command.replace("127.0.0.1:8000",
                                                                 f"127.0.0.1:{self.g.port}")],
                                  stdout=subprocess.PIPE, text=True, timeout=60)
            self.assertEqual(steady(done.stdout), steady(output), command)

    def test_commands_without_their_output(self):
        for page in ("README.md", "docs/operations.md"):
            with open(f"{gateway.SOURCE}/{page}") as f:
                commands = re.findall("^curl .*", f.read(), re.M)
            self.assertTrue(commands, page)
            for command in commands:
                done = subprocess.run(["bash", "-c", command.replace("127.0.0.1:8000",
                                                                     f"127.0.0.1:{self.g.port}")],
                                      stdout=subprocess.PIPE, text=True, timeout=60)
                reply = json.loads(done.stdout)
                self.assertTrue(reply.get("choices") or reply.get("data"), (command, reply))


if __name__ == "__main__":
    unittest.main(verbosity=2)
