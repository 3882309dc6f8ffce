# SPDX-License-Identifier: Apache-2.0
"""Real checkpoints of many architectures through gateway, scheduler and instance: the reference's
greedy tokens, however the steps are cut: alone or batched, chunked, from the prefix cache,
preempted, failed over. Those of the shared folder are taken when it is there."""
import json
import os
import shutil
import subprocess
import tempfile
import unittest

import gateway
from gateway import Stack, together

HERE = f"{gateway.SOURCE}/tests/goldens"
SHARED = os.path.join(os.environ.get("EMBER_SHARED") or
                      os.path.join(os.path.dirname(gateway.SOURCE), "shared"), "goldens")
NAMES = [  # dense, sliding windows, MoE, sinks, rope scalings, quantised
    "llama", "llama3-rope-scaling", "mistral-sliding", "qwen2-yarn", "qwen3", "qwen3-moe",
    "qwen3-awq", "qwen3-gptq-desc-act", "qwen3-fp8-block", "qwen3-w8a8-compressed-tensors",
    "deepseek-v3", "exaone4", "gemma2", "gemma3", "glm4", "glm4-moe", "ernie45-moe", "gpt-oss", "gpt-oss-mxfp4",
    "granite", "hunyuan-dense", "mimo-v2", "minimax-m2", "olmo2", "phi3", "qwen2-moe", "smollm3",
    "starcoder2"]
KV_BYTES = 4 << 20
OUTPUT = 48  # the reference has 16; the others are those of the model alone


def tokenizer(vocab):
    """A byte-level one with made-up words: requests bring ids, and ids are compared."""
    alphabet, other = {}, 0
    for b in range(256):
        itself = 0x20 < b < 0x7f or b >= 0xa1 and b != 0xad
        alphabet[chr(b) if itself else chr(256 + other)] = b
        other += not itself
    words = {f"\u0120{i:x}": i for i in range(256, vocab)}
    return {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "merges": [], "vocab": {**alphabet, **words}}}


class Model:
    def __init__(self, folder, name):
        source = next(p for p in (f"{HERE}/{name}", f"{SHARED}/{name}") if os.path.isdir(p))
        self.name, self.path = name, f"{folder}/{name}"
        os.mkdir(self.path)
        for file in os.listdir(source):
            os.symlink(f"{source}/{file}", f"{self.path}/{file}")
        with open(f"{source}/case.json") as f:
            case = json.load(f)
        with open(f"{source}/config.json") as f:
            vocab = json.load(f)["vocab_size"]
        with open(f"{self.path}/tokenizer.json", "w") as f:
            json.dump(tokenizer(vocab), f)
        prompt, self.greedy = case["prompt_ids"], case["greedy_ids"]
        # The last begins with the first one's prompt and answer: pages to be shared.
        self.prompts = [prompt, prompt[:9], prompt[:17], prompt[3:], prompt + self.greedy[:8]]

    def ask(self, g, i):
        r = g.ask("/v1/completions", model=self.name, prompt=self.prompts[i], temperature=0,
                  max_tokens=OUTPUT, ignore_eos=True, return_token_ids=True)
        self.cached = r["usage"]["prompt_tokens_details"]["cached_tokens"]
        return r["choices"][0]["token_ids"]

    def ask_all(self, g, at_once):
        calls = [lambda i=i: self.ask(g, i) for i in range(len(self.prompts))]
        return together(calls) if at_once else [c() for c in calls]


class Goldens(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="ember-goldens-")
        there = [n for n in NAMES if os.path.isdir(f"{HERE}/{n}") or os.path.isdir(f"{SHARED}/{n}")]
        cls.models = [Model(cls.folder, n) for n in there]
        if len(there) < len(NAMES):
            print(f"{len(NAMES) - len(there)} architectures are left out: no {SHARED}")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def stack(self, *options, env=None, kv=None):
        """All models behind one gateway; kv: bytes of KV memory by name."""
        stack = Stack(*options, emberd=("--compile=never", f"--kv-bytes={KV_BYTES}", "--standby=0",
                                        "--standby-max=0"), emberd_env=env)
        self.addCleanup(stack.stop)
        for m in self.models:
            subprocess.run([os.environ["EMBERCTL"], "--socket", stack.emberd.socket, "load",
                            m.path, "--name", m.name, "--kv-bytes", str((kv or {}).get(m.name, 0))],
                           stdout=subprocess.DEVNULL, check=True, timeout=60)
        return stack

    def check(self, stack, at_once=True):
        for m in self.models:
            self.assertEqual(m.ask_all(stack.gateway, at_once), self.want[m.name], m.name)

    def total(self, stack, name):
        _, _, page = stack.gateway.get("/metrics")
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.decode().splitlines()
                   if line.startswith(name + "{"))

    def pages(self, stack):
        """KV pages by model, as the gateway was told."""
        found = {}
        for line in stack.gateway.text().splitlines():
            if ": instance ready " in line:
                fields = dict(f.split("=", 1) for f in line.split() if "=" in f)
                found[fields["model"]] = int(fields["pages"])
        return found

    def test_however(self):
        stack = self.stack("--no-prefix-cache", "--no-token-refs")
        type(self).want = {m.name: m.ask_all(stack.gateway, False) for m in self.models}
        pages = self.pages(stack)
        for m in self.models:
            self.assertEqual(self.want[m.name][0][:16], m.greedy, m.name)
            self.assertEqual(self.want[m.name][-1], self.want[m.name][0][8:] +
                             self.want[m.name][-1][-8:], m.name)
        self.check(stack)  # batched
        with self.subTest("two steps in flight, and from the prefix cache"):
            stack = self.stack()
            self.check(stack)
            self.check(stack)
            self.assertGreater(self.total(stack, "vllm:prefix_cache_hits_total"),
                               16 * 3 * len(self.models))
        with self.subTest("chunked"):
            self.check(self.stack("--step-tokens=8"))
        with self.subTest("chunked beside decodes"):
            self.check(self.stack("--prefill-tokens=3"))
        with self.subTest("preempted"):  # eight pages for five sequences of up to five
            stack = self.stack(kv={n: KV_BYTES // p * 8 for n, p in pages.items()})
            self.check(stack)
            self.assertGreater(self.total(stack, "vllm:num_preemptions_total"), len(self.models))
        with self.subTest("failed over"):  # each instance dies at its 30th step
            stack = self.stack(env={"EMBER_FAULT": "instance-step:30=kill"})
            self.check(stack)
            self.assertGreaterEqual(self.total(stack, "ember_failovers_total"), len(self.models))


if __name__ == "__main__":
    unittest.main(verbosity=2)
