# SPDX-License-Identifier: Apache-2.0
"""emberctl as a person uses it, against real programs: numbers, texts, failover, the cache, the demo."""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
EMBERCTL = os.environ["EMBERCTL"]
EMBERD = os.environ["EMBERD"]
FENCE = os.environ.get("FENCE", "")
SHARED = os.environ.get("EMBER_SHARED", os.path.join(SOURCE, "..", "shared"))
TINY = os.path.join(SOURCE, "models", "ember-tiny")
GOLDENS = os.path.join(SOURCE, "tests", "goldens")
QUESTION = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "I am ember-tiny, a very small language model that ships with emberd as its embedded default."


def ctl(*args, env=None, check=True, text_in=None):
    run = subprocess.run([EMBERCTL, *args], capture_output=True, text=True, env=env, input=text_in,
                         timeout=300)
    if check and run.returncode != 0:
        raise AssertionError(f"emberctl {' '.join(args)}: {run.returncode}\n{run.stdout}{run.stderr}")
    return run


def folders(path):
    return sorted(os.path.join(path, name) for name in os.listdir(path)
                  if os.path.exists(os.path.join(path, name, "case.json")))


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid):
    out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(p) for p in out.stdout.split()]


def wait_until(condition, what):
    """An event is waited for, however long the machine takes; only what never comes fails."""
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within a minute: {what}")
        time.sleep(0.01)


class Daemon:
    """emberd with what the machine's compiler does left out, unless it is about that."""

    def __init__(self, *options, fault=None, cache=None, compile="never", config=None):
        self.dir = tempfile.mkdtemp(prefix="ember-cli-")
        self.socket = os.path.join(self.dir, "s")
        self.cache = cache or os.path.join(self.dir, "cache")
        env = dict(os.environ, EMBER_FAULT=fault or "")
        self.env = dict(os.environ, EMBER_SOCKET=self.socket)
        self.log = open(os.path.join(self.dir, "log"), "w+")
        self.config = os.path.join(self.dir, "conf")
        if config is not None:
            with open(self.config, "w") as f:
                f.write(config)
            options += (f"--config={self.config}",)
        self.process = subprocess.Popen(
            [EMBERD, f"--socket={self.socket}", f"--runtime-dir={self.dir}/run",
             f"--cache-dir={self.cache}", "--no-gateway", "--spawn-timeout=5m",
             f"--compile={compile}", *options], env=env, stderr=self.log)
        wait_until(lambda: subprocess.run([EMBERCTL, "status"], env=self.env,
                                          capture_output=True).returncode == 0, "emberd answers")

    def text_of_log(self):
        self.log.seek(0)
        return self.log.read()

    def ctl(self, *args, **more):
        return ctl(*args, env=self.env, **more)

    def json(self, *args):
        return json.loads(self.ctl(*args, "--json").stdout)

    def text(self, *args):
        return self.ctl("generate", *args).stdout.rstrip("\n")

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        self.process.wait(60)
        self.log.close()
        shutil.rmtree(self.dir, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.end()


class Verify(unittest.TestCase):
    def test_perplexity(self):
        """Before and after a change, and the same as JSON; a pack tells its errors."""
        with tempfile.TemporaryDirectory() as folder:
            text = os.path.join(folder, "text")
            with open(text, "w") as f:
                f.write(f"{QUESTION}{ANSWER}<|im_end|>\n\fA river flows into the sea.")
            of_text = ("--text", text, "--json")
            plain = json.loads(ctl("perplexity", TINY, *of_text).stdout)
            self.assertNotIn("changed", plain)
            self.assertGreater(plain["tokens"], 30)
            both = json.loads(ctl("perplexity", TINY, "--quant=q8", "--keep=qkv", "--kv-type=bf16",
                                  *of_text).stdout)
            self.assertEqual((both["perplexity"], both["changed"]), (plain["perplexity"], "q8, KV bf16"))
            self.assertAlmostEqual(both["changed_perplexity"] / both["perplexity"] - 1, both["change"])
            self.assertLess(abs(both["change"]), 0.03)
            self.assertLess(both["changed_weights_bytes"], 0.7 * both["weights_bytes"])
            pack = os.path.join(folder, "tiny.pack")
            told = json.loads(ctl("pack", TINY, "--quant=q4", "--quant-for=layers.[0-3]=q4", "-o", pack,
                                  *of_text).stdout)
            self.assertEqual(told["numbers"], "q4 q4=layers.[0-3]")
            errors = [layer["error"] for layer in told["layers"]]
            self.assertEqual(len(errors), 8)
            self.assertTrue(all(e > 0.05 for e in errors[:4]) and all(e < 0.01 for e in errors[4:]))
            self.assertEqual(told["tensors"][0]["quant"], "q4")
            self.assertIn("change", told)
            run = ctl("perplexity", TINY, "--keep=qkv", check=False)
            self.assertEqual(run.returncode, 1)
            self.assertIn("need --quant", run.stderr)
            run = ctl("pack", TINY, "--quant=q4", "--keep=nothing", "-o", pack, check=False)
            self.assertIn("matches no tensor", run.stderr)

    def check(self, dirs, *options):
        for result in json.loads(ctl("verify", *dirs, *options, "--json").stdout):
            self.assertEqual(result["result"], "pass", result)
            self.assertEqual(result["greedy_equal"], result["greedy_expected"])

    def test_reference_numbers(self):
        self.assertGreaterEqual(len(folders(GOLDENS)), 7)
        self.check(folders(GOLDENS))

    def test_reference_numbers_with_compiled_kernels(self):
        self.check(folders(GOLDENS), "--compile")

    def test_every_instruction_set_of_this_processor(self):
        with open("/proc/cpuinfo") as f:
            flags = f.read()
        for isa, flag in (("baseline", "sse2"), ("avx2", "avx2"), ("avx512", "avx512vl")):
            if flag in flags:
                self.check(folders(GOLDENS) + [TINY], f"--isa={isa}")

    def test_fenced_device_memory(self):
        self.check(folders(GOLDENS) + [TINY], f"--backend={FENCE}")

    def test_embedded_model(self):
        self.check([TINY])

    def test_wrong_weights_are_named_by_layer(self):
        with tempfile.TemporaryDirectory() as d:
            case = os.path.join(d, "llama")
            shutil.copytree(os.path.join(GOLDENS, "llama"), case)
            path = os.path.join(case, "model.safetensors")
            with open(path, "rb") as f:
                data = bytearray(f.read())
            header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
            at = 8 + int.from_bytes(data[:8], "little") + header[
                "model.layers.1.mlp.down_proj.weight"]["data_offsets"][0]
            data[at:at + 512] = bytes(512)
            with open(path, "wb") as f:
                f.write(data)
            run = ctl("verify", case, check=False)
            self.assertEqual(run.returncode, 1)
            self.assertIn("layer 1 is the first", run.stdout)

    @unittest.skipUnless(os.path.isdir(os.path.join(SHARED, "goldens")), "../shared is not there")
    def test_shared_cases(self):
        wanted = ["llama", "llama3-rope-scaling", "mistral-sliding", "qwen2", "qwen2-yarn", "qwen3",
                  "qwen3-moe"]
        self.check([os.path.join(SHARED, "goldens", w) for w in wanted])
        self.check([os.path.join(SHARED, "ember-tiny")])
        self.check(sorted(os.path.join(SHARED, "public-models", m)
                          for m in os.listdir(os.path.join(SHARED, "public-models"))))

    def test_tokenizer(self):
        with open(os.path.join(TINY, "expected_text.json")) as f:
            cases = [{"text": c["prompt"], "ids": c["prompt_ids"]} for c in json.load(f)["cases"]]
        with tempfile.TemporaryDirectory() as d:
            path = os.path.join(d, "expected.json")
            for wrong in (False, True):
                if wrong:
                    cases[1]["ids"][3] += 1
                with open(path, "w") as f:
                    json.dump({"cases": cases}, f)
                run = ctl("verify", "tokenizer", "--tokenizer", TINY, path, "--json", check=False)
                self.assertEqual(run.returncode, 1 if wrong else 0)
                self.assertEqual(json.loads(run.stdout)[0]["mismatches"] > 0, wrong)

    def test_a_folder_without_numbers(self):
        run = ctl("verify", "/", check=False)
        self.assertEqual(run.returncode, 4)
        self.assertIn("case.json", run.stdout)

    def test_what_is_not_there_is_4_for_every_verb(self):
        """But for a mismatch or damage beside it, which is 1; and nothing is made by looking."""
        with tempfile.TemporaryDirectory() as d:
            no = os.path.join(d, "none")
            template = os.path.join(d, "template")
            with open(template, "w") as f:
                f.write("x")
            for words in (("verify", no), ("verify", os.path.join(GOLDENS, "llama"), no),
                          ("verify", "tokenizer", f"--tokenizer={TINY}", no),
                          ("verify", "tokenizer", f"--tokenizer={no}", no),
                          ("verify", "template", f"--template={template}", no),
                          ("verify", "template", f"--template={no}", no),
                          ("pack", no), ("pack", TINY, "-o", f"{no}/x.pack"), ("pack", "verify", no),
                          ("perplexity", no), ("perplexity", TINY, f"--text={no}"),
                          ("cache", "ls", f"--cache-dir={no}"),
                          ("cache", "show", f"--cache-dir={no}", "00"),
                          ("cache", "verify", f"--cache-dir={no}"), ("cache", "gc", f"--cache-dir={no}"),
                          ("cache", "export", f"--cache-dir={no}", f"{d}/out"),
                          ("cache", "import", f"--cache-dir={no}", f"{d}/in"),
                          ("bench", "load", no), ("bench", "decode", no), ("bench", "prefill", no),
                          ("bench", "spawn", no), ("bench", "grammar", no), ("synth", no, f"{d}/out"),
                          ("synth", "qwen3-0.6b", f"{no}/out")):
                run = ctl(*words, check=False)
                self.assertEqual(run.returncode, 4, (words, run.stdout, run.stderr))
                self.assertEqual(os.listdir(d), ["template"], words)
            with open(os.path.join(d, "bad.pack"), "w") as f:
                f.write("no pack")
            for verb in (("verify",), ("pack", "verify")):
                for order in ((no, f"{d}/bad.pack"), (f"{d}/bad.pack", no)):
                    self.assertEqual(ctl(*verb, *order, check=False).returncode, 1, (verb, order))


class Generate(unittest.TestCase):
    def test_embedded_default_without_configuration(self):
        with Daemon() as d:
            self.assertEqual(d.text(QUESTION), ANSWER)
            self.assertEqual(d.text("--chat", "Who are you?"), ANSWER)
            self.assertEqual(d.ctl("generate", "-", text_in=QUESTION).stdout.rstrip("\n"), ANSWER)
            self.assertEqual([m["name"] for m in d.json("models")], ["ember-tiny"])

    def test_chat_is_in_the_words_of_the_models_own_template(self):
        with tempfile.TemporaryDirectory() as folder, Daemon() as d:
            model = os.path.join(folder, "other")
            shutil.copytree(TINY, model)
            template = os.path.join(model, "chat_template.jinja")

            def chat(text):
                with open(template, "w") as f:
                    f.write(text)
                return d.ctl("generate", "--model=other", "--json", "-n1", "--chat", "Who <are> you?", check=False)

            d.ctl("load", model)
            said = chat("{{ raise_exception('no ' ~ messages[0].role) }}")
            self.assertEqual(said.returncode, 1)
            self.assertIn("no user", said.stderr)
            short = json.loads(chat("{{ messages[0].content }}").stdout)
            self.assertEqual(short["ids"], json.loads(d.ctl("generate", "--model=other", "--json", "-n1",
                                                            "Who <are> you?").stdout)["ids"])
            twice = json.loads(chat("{{ messages[0].content * 2 }}").stdout)
            self.assertGreater(twice["prompt_tokens"], short["prompt_tokens"])
            os.unlink(template)
            with open(os.path.join(model, "tokenizer_config.json"), "w") as f:
                f.write("{}")
            none = d.ctl("generate", "--model=other", "--chat", "x", check=False)
            self.assertEqual(none.returncode, 4)
            self.assertIn("has no chat template", none.stderr)

    def test_a_terminal_is_told_what_is_waited_for(self):
        with Daemon() as d:
            for verb in (("generate", QUESTION), ("spawn",)):
                seen, terminal = os.openpty()
                self.addCleanup(os.close, seen)
                run = subprocess.run([EMBERCTL, *verb], stdout=subprocess.PIPE, stderr=terminal, text=True,
                                     env=d.env, timeout=120)
                os.close(terminal)
                told = os.read(seen, 4096).decode()
                self.assertEqual(run.returncode, 0)
                self.assertRegex(told, r"waiting for an instance.*\r\x1b\[K")
                self.assertNotIn("waiting", run.stdout)

    def test_every_committed_text(self):
        with open(os.path.join(TINY, "expected_text.json")) as f:
            cases = json.load(f)["cases"]
        with Daemon() as d:
            for case in cases:
                got = d.text("-n", str(len(case["greedy_ids"])), case["prompt"])
                self.assertEqual(got, case["greedy_text"].rstrip("\n"))

    def test_instance_dies_in_mid_stream_again_and_again(self):
        with Daemon("--standby=3", fault="instance-step:6=kill") as d:
            got = d.json("generate", QUESTION)
            self.assertEqual(got["text"], ANSWER)
            self.assertGreaterEqual(got["replays"], 3)

    def test_an_instance_that_never_gets_further_fails_the_request_alone(self):
        with Daemon("--standby=0", fault="instance-step:1=kill") as d:
            run = d.ctl("generate", QUESTION, check=False)
            self.assertEqual(run.returncode, 1)
            self.assertEqual(d.ctl("status").returncode, 0)

    def test_a_broken_tokenizer_or_template_is_told_at_the_load(self):
        """Weights are served all the same; on stderr, in --json and in the log: file, reason, what it costs."""
        with Daemon("--standby=0") as d:
            def load(name, file, content):
                folder = os.path.join(d.dir, name)
                shutil.copytree(TINY, folder)
                if content is not None:
                    with open(os.path.join(folder, file), "w") as f:
                        f.write(content)
                else:
                    os.unlink(os.path.join(folder, file))
                run = d.ctl("load", folder, "--json")
                return folder, run.stderr, json.loads(run.stdout)["notice"]
            for name, file, content, lost in (
                    ("cut", "tokenizer.json", '{"model": ', "token ids do"),
                    ("odd", "tokenizer.json", '{"model": {"type": "Nonsense"}}', "token ids do"),
                    ("chat", "chat_template.jinja", "{% if %}", "/v1/chat/completions")):
                folder, said, notice = load(name, file, content)
                d.log.seek(0)
                line = next(x for x in d.log if f"model is incomplete model={name} " in x)
                for text in (said, notice, line):
                    for part in (folder, file, lost):
                        self.assertIn(part, text)
                self.assertEqual(d.json("spawn", name)["instance"]["model"], name)
                self.assertIn(notice, d.ctl("load", folder).stderr)  # resident already
            self.assertIn("tokenizer.json", d.ctl("generate", "-m", "cut", "x", check=False).stderr)
            self.assertEqual(load("bare", "tokenizer.json", None)[1:], ("", ""))  # not there is not broken

    def test_same_seed_same_text(self):
        with Daemon() as d:
            args = ("--temperature=0.9", "--seed=7", "-n", "30", QUESTION)
            first = d.text(*args)
            self.assertEqual(first, d.text(*args))
            others = {d.text("--temperature=0.9", f"--seed={s}", "-n", "30", QUESTION) for s in range(8)}
            self.assertGreater(len(others), 1)

    def test_errors_say_what_to_do(self):
        run = ctl("models", "--socket=/nonexistent/s", check=False)
        self.assertEqual(run.returncode, 3)
        self.assertIn("start it with", run.stderr)
        with Daemon() as d:
            run = d.ctl("generate", "--model=nobody", "x", check=False)
            self.assertEqual(run.returncode, 4, run.stderr)
            self.assertIn("nobody", run.stderr)
            run = d.ctl("load", "/nonexistent", check=False)
            self.assertEqual(run.returncode, 4, run.stderr)
            self.assertIn("/nonexistent", run.stderr)
            run = d.ctl("generate", "x " * 5000, check=False)
            self.assertIn("leave room", run.stderr)


class Caches(unittest.TestCase):
    def test_a_second_daemon_compiles_and_captures_nothing(self):
        with tempfile.TemporaryDirectory() as cache:
            with Daemon("--standby=0", cache=cache, compile="auto") as d:
                first = d.json("spawn")["instance"]
                self.assertEqual(d.text(QUESTION), ANSWER)
            with Daemon("--standby=0", cache=cache, compile="auto") as d:
                second = d.json("spawn")["instance"]
                self.assertEqual(d.text(QUESTION), ANSWER)
            self.assertGreaterEqual(first["graphs_captured"], 1)
            self.assertEqual(second["graphs_captured"], 0)
            self.assertEqual(second["kernels_compiled"], 0)
            if shutil.which("cc"):
                self.assertGreaterEqual(first["kernels_compiled"], 1)

    def test_ls_show_verify_export_import_gc(self):
        with tempfile.TemporaryDirectory() as d:
            cache, other = os.path.join(d, "a"), os.path.join(d, "b")
            with Daemon("--standby=0", "--early-start=never", cache=cache, compile="auto") as daemon:
                daemon.json("spawn")  # not early: those are READY before their canary, and so its record
            entries = json.loads(ctl("cache", "ls", f"--cache-dir={cache}", "--json").stdout)
            kinds = {e["kind"] for e in entries}
            self.assertLessEqual({"graph", "canary"}, kinds)
            shown = ctl("cache", "show", entries[0]["key"][:12], f"--cache-dir={cache}").stdout
            self.assertIn("depends on", shown)
            self.assertEqual(ctl("cache", "verify", f"--cache-dir={cache}").returncode, 0)
            bundle = os.path.join(d, "bundle")
            ctl("cache", "export", bundle, f"--cache-dir={cache}")
            ctl("cache", "import", bundle, f"--cache-dir={other}")
            wrong = ctl("cache", "import", EMBERCTL, f"--cache-dir={other}", check=False)
            self.assertIn(f"{EMBERCTL}: bundle: not a bundle", wrong.stderr)
            again = json.loads(ctl("cache", "ls", f"--cache-dir={other}", "--json").stdout)
            self.assertEqual({e["key"] for e in entries}, {e["key"] for e in again})
            with Daemon("--standby=0", cache=other, compile="auto") as daemon:
                moved = daemon.json("spawn")["instance"]
            self.assertEqual((moved["graphs_captured"], moved["kernels_compiled"]), (0, 0))
            ctl("cache", "gc", "--max-bytes=0", f"--cache-dir={other}")
            self.assertEqual(json.loads(ctl("cache", "ls", f"--cache-dir={other}", "--json").stdout), [])

    def test_a_damaged_cache_is_rebuilt_and_the_text_is_the_same(self):
        with tempfile.TemporaryDirectory() as cache:
            with Daemon("--standby=0", cache=cache, compile="auto") as d:
                self.assertEqual(d.text(QUESTION), ANSWER)
            path = os.path.join(cache, "store.mdb")
            with open(path, "rb") as f:
                data = bytearray(f.read())
            for at in range(3 * 4096 + 2000, len(data), 4096):  # a byte of every page behind the metas
                data[at] ^= 0x55
            with open(path, "wb") as f:
                f.write(data)
            with Daemon("--standby=0", cache=cache, compile="auto") as d:
                self.assertEqual(d.text(QUESTION), ANSWER)

    def test_a_store_that_was_set_aside_is_said(self):
        with tempfile.TemporaryDirectory() as cache:
            with open(os.path.join(cache, "store.mdb"), "wb") as f:
                f.write(b"no store at all" * 1000)
            said = ctl("cache", "gc", f"--cache-dir={cache}").stderr
            self.assertIn("store.mdb was moved to store.mdb.old", said)
            self.assertEqual(ctl("cache", "gc", f"--cache-dir={cache}").stderr, "")

    def test_bench_keeps_to_tmpdir(self):
        with tempfile.TemporaryDirectory() as d:
            env = dict(os.environ, TMPDIR=os.path.join(d, "none"))
            run = ctl("bench", "load", "--json", env=env, check=False)
            self.assertEqual(run.returncode, 4)
            self.assertIn(env["TMPDIR"], run.stderr)

    def test_no_compiler(self):
        with Daemon("--standby=0", "--cc=/nonexistent/cc", compile="auto") as d:
            self.assertEqual(d.text(QUESTION), ANSWER)
            self.assertEqual(d.json("ps")[0]["kernels_compiled"], 0)
            d.log.flush()
            with open(d.log.name) as f:
                self.assertIn("ahead-of-time", f.read())

    def test_a_cache_that_cannot_be_written(self):
        with Daemon("--standby=0", "--cache-dir=/proc/nowhere") as d:
            self.assertEqual(d.text(QUESTION), ANSWER)


class Ends(unittest.TestCase):
    def test_nothing_is_left_of_a_killed_daemon(self):
        d = Daemon("--standby=4")
        d.json("spawn")
        wait_until(lambda: d.json("status")["standby"] >= 4, "its standbys are there")
        pids = children(d.process.pid)
        self.assertGreaterEqual(len(pids), 5)
        before = set(os.listdir("/dev/shm"))
        d.process.kill()
        d.process.wait()
        wait_until(lambda: not any(alive(p) for p in pids), "its children are gone")
        self.assertEqual(set(os.listdir("/dev/shm")) - before, set())
        shutil.rmtree(d.dir)

    def test_demo_leaves_nothing(self):
        with tempfile.TemporaryDirectory(prefix="ed-", dir="/tmp") as folder:  # short: for sockets
            shared = set(os.listdir("/dev/shm"))
            rows = json.loads(ctl("demo", "--json", env=dict(os.environ, TMPDIR=folder)).stdout)
            self.assertEqual(len(rows), 5)
            self.assertEqual({r["text"] for r in rows}, {ANSWER})
            self.assertEqual(os.listdir(folder), [])
            left = set(os.listdir("/dev/shm")) - shared
            self.assertEqual([name for name in left if "ember" in name], [])

    def test_a_reader_that_goes_ends_the_generation(self):
        with Daemon() as d:
            run = subprocess.Popen([EMBERCTL, "generate", "--ignore-eos", "-n", "1900", QUESTION],
                                   env=d.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            run.stdout.read(20)
            run.stdout.close()
            self.assertEqual(run.wait(60), 1)
            self.assertIn("standard output", run.stderr.read())
            run.stderr.close()
            wait_until(lambda: d.json("status")["leased"] == 0, "the instance is given back")

    def test_output_that_cannot_be_written_is_no_success(self):
        with open("/dev/full", "w") as full:
            run = subprocess.run([EMBERCTL, "verify", "--json", os.path.join(GOLDENS, "llama")],
                                 stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
        self.assertEqual(run.returncode, 1)
        self.assertIn("standard output", run.stderr)

    def test_a_synth_that_fails_leaves_what_was_there_and_nothing_else(self):
        with tempfile.TemporaryDirectory() as d:
            kept = {"out.config.json": "mine", "old/notes": "mine", "old/model-00002-of-00002.safetensors": "mine"}
            os.mkdir(f"{d}/old")
            for name, text in kept.items():
                with open(f"{d}/{name}", "w") as f:
                    f.write(text)

            def check(run_code, code, said, word):
                self.assertEqual(run_code, code, said)
                self.assertIn(word, said)
                found = sorted(os.path.relpath(os.path.join(at, f), d) for at, _, files in os.walk(d) for f in files)
                self.assertEqual(found, sorted(kept))
                self.assertEqual(os.listdir(d).count("out"), 0)
                for name, text in kept.items():
                    with open(f"{d}/{name}") as f:
                        self.assertEqual(f.read(), text)

            for to in ("out", "old"):
                for fault in ("write:1", "write:2", "write:20"):  # header, values, far into them
                    run = ctl("synth", "qwen3-0.6b", "--layers=1", f"{d}/{to}", check=False,
                              env=dict(os.environ, EMBER_FAULT=fault))
                    check(run.returncode, 5, run.stderr, "No space left")
                for sig in (signal.SIGINT, signal.SIGTERM):
                    run = subprocess.Popen([EMBERCTL, "synth", "qwen3-0.6b", f"{d}/{to}"], text=True,
                                           stderr=subprocess.PIPE)
                    wait_until(lambda: os.path.exists(f"{d}/{to}/model.safetensors"), "it has begun to write")
                    run.send_signal(sig)
                    said = run.communicate(timeout=60)[1]
                    check(run.returncode, 130, said, "interrupted")
            with open(f"{d}/config.json", "w") as f:  # refused before anything is written
                f.write('{"model_type": "llama", "hidden_size": 65536, "intermediate_size": 262144, '
                        '"num_attention_heads": 64, "num_hidden_layers": 300, "vocab_size": 300, '
                        '"max_position_embeddings": 64}')
            run = ctl("synth", f"{d}/config.json", f"{d}/out", check=False)
            os.unlink(f"{d}/config.json")
            check(run.returncode, 5, run.stderr, "MiB free")

    def test_stop_as_json(self):
        with Daemon() as d:
            ids = [d.json("spawn")["instance"]["id"] for _ in range(2)]
            self.assertEqual(d.json("stop", *ids), {"stopped": ids})

    def test_one_interrupt_ends_waiting_for_a_start(self):
        with tempfile.TemporaryDirectory() as made:
            slow, fds = os.path.join(made, "cc"), os.path.join(made, "fds")
            with open(slow, "w") as f:
                f.write(f"#!/bin/sh\nls -l /proc/self/fd > {fds}\nsleep 300\nexec cc \"$@\"\n")
            os.chmod(slow, 0o755)
            with Daemon("--standby=0", f"--cc={slow}", compile="auto") as d:
                run = subprocess.Popen([EMBERCTL, "generate", QUESTION], env=d.env,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                wait_until(lambda: os.path.exists(fds) and os.path.getsize(fds), "it compiles")
                run.send_signal(signal.SIGINT)
                _, said = run.communicate(timeout=60)
                self.assertEqual(run.returncode, 130, said)
                wait_until(lambda: d.json("status")["leased"] == 0, "the instance is given back")
                d.end(signal.SIGKILL)
            with open(fds) as f:  # a compiler gets nothing of ours but its three
                self.assertNotIn("socket:", f.read())

    def test_an_interrupted_bench_says_so(self):
        run = subprocess.Popen([EMBERCTL, "bench", "kernels"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
        run.stdout.readline()  # it measures
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
        self.assertEqual((run.returncode, said), (130, "emberctl: interrupted\n"))

    def test_every_verb_has_the_same_word_for_an_interrupt(self):
        def catches(pid):
            with open(f"/proc/{pid}/status") as f:
                mask = next(line.split()[1] for line in f if line.startswith("SigCgt:"))
            return int(mask, 16) >> (signal.SIGINT - 1) & 1

        for verb in (["perplexity", TINY], ["bench", "decode", "tiny"]):
            run = subprocess.Popen([EMBERCTL, *verb], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True)
            wait_until(lambda: catches(run.pid), "it would answer")
            run.send_signal(signal.SIGINT)
            _, said = run.communicate(timeout=60)
            self.assertEqual((run.returncode, said.splitlines()[-1]), (130, "emberctl: interrupted"))

    def test_interrupt_gives_the_instance_back(self):
        with Daemon() as d:
            run = subprocess.Popen([EMBERCTL, "generate", "--ignore-eos", "-n", "1900", QUESTION],
                                   env=d.env, stdout=subprocess.PIPE, text=True)
            run.stdout.read(20)
            run.send_signal(signal.SIGINT)
            run.stdout.read()
            self.assertEqual(run.wait(60), 130)
            wait_until(lambda: d.json("status")["leased"] == 0, "the instance is given back")


class Help(unittest.TestCase):
    def test_what_is_no_number_is_said(self):
        for wrong in ("--temperature=warm", "--top-p=1,5", "--min-p=2", "--temperature=nan"):
            run = ctl("generate", wrong, "x", check=False)
            self.assertEqual(run.returncode, 2, wrong)
            self.assertIn(wrong.split("=")[1], run.stderr)
        self.assertEqual(ctl("verify", "--tolerance=loose", "x", check=False).returncode, 2)

    def test_every_verb_teaches(self):
        page = ctl("--help").stdout
        for verb in ("load", "unload", "models", "spawn", "stop", "ps", "generate", "verify", "cache ls",
                     "cache show", "cache verify", "cache gc", "cache export", "cache import",
                     "bench spawn", "bench decode", "bench prefill", "bench load", "status", "synth"):
            self.assertIn("\n  " + verb, page)
        for verb in ("load", "generate", "verify", "cache ls", "bench spawn", "synth"):
            text = ctl(*verb.split(), "--help").stdout
            self.assertIn("emberctl " + verb, text)
        self.assertIn("complete", ctl("--bash-completion").stdout)
        self.assertIn(".TH", ctl("--man").stdout)

    def test_steps_are_measured_beside_the_machine(self):
        for verb, want in (("decode", ("decode, 1 stream", "decode, 3 streams", "graph replay overhead",
                                       "attention at context 100")),
                           ("prefill", ("prefill, 40 tokens",))):
            more = ("--streams=3", "--context=100") if verb == "decode" else ("--tokens=40",)
            rows = json.loads(ctl("bench", verb, "tiny", "--seconds=0", "--json", *more).stdout)
            rows = {row["what"]: row for row in rows}
            self.assertGreater(rows["machine"]["read_bytes_per_s"], 0)
            for what in want:
                self.assertGreater(rows[what]["value"], 0, what)
                self.assertGreater(rows[what]["share"], 0, what)
            self.assertTrue(any(k.startswith("attention") for k in rows["kernels, ms a step"]["kernels"]))
        run = ctl("bench", "load", "/nowhere", check=False)
        self.assertEqual(run.returncode, 4)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
            text.write("The quick brown fox jumps over the lazy dog. " * 100)
            text.flush()
            row = json.loads(ctl("bench", "load", "--json", f"--text={text.name}", TINY).stdout)[0]
        self.assertEqual(row["tokenizer"]["vocabulary"], 4096)
        self.assertGreater(row["tokenizer"]["image_bytes"], 0)
        self.assertEqual([t["text"] for t in row["tokenizer"]["hard"]],
                         ["one letter", "spaces", "newlines", "emoji"])
        for key in ("parse_ms", "map_ms", "map_worst_ms", "english_mb_per_s"):
            self.assertGreater(row["tokenizer"][key], 0)
        run = ctl("bench", "decode", "/nowhere", check=False)
        self.assertEqual(run.returncode, 4)
        self.assertIn("qwen3-30b-a3b", run.stderr)

    def test_completion_in_bash(self):
        with Daemon("--standby=0") as d:
            d.ctl("load", TINY, "--name=mine")
            script = os.path.join(d.dir, "completion")
            with open(script, "w") as f:
                f.write(ctl("--bash-completion").stdout)
            for line, want in (("emberctl unl", "unload"), ("emberctl unload ", "mine"),
                               ("emberctl generate -m mi", "mine"), ("emberctl --socket /x sp", "spawn"),
                               ("emberctl cache export --kind gr", "graph"),
                               ("emberctl verify --isa av", "avx2 avx512")):
                words = line.split(" ")
                run = subprocess.run(
                    ["bash", "-c", f'. "{script}"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _emberctl; '
                     'echo "${COMPREPLY[*]}"', "bash", *words], text=True, capture_output=True,
                    env=dict(d.env, PATH=os.path.dirname(EMBERCTL) + ":" + os.environ["PATH"]))
                got = run.stdout.strip()
                self.assertIn(want, got, line + run.stderr)

    def test_every_verb_has_examples(self):
        for section in ctl("--man").stdout.split("\n.SS ")[1:]:
            verb = section.split("\n")[0].split(" ")
            words = verb[:2] if verb[0] in ("cache", "bench") or verb[:2] == ["verify", "tokenizer"] else verb[:1]
            self.assertIn("\nExamples:\n", ctl(*words, "--help").stdout, words)

    def test_kv_of_less_than_a_page_is_refused_at_the_load(self):
        with Daemon("--standby=0") as d:
            run = d.ctl("load", TINY, "--kv-bytes=10", check=False)
            self.assertEqual(run.returncode, 1)
            self.assertIn("one page", run.stderr)
            d.ctl("load", TINY)
            self.assertEqual(d.ctl("load", TINY, "--kv-bytes=10", check=False).returncode, 1)
            self.assertEqual(d.json("spawn")["instance"]["model"], os.path.basename(TINY))

    def test_more_memory_than_there_can_be_is_refused_at_once(self):
        """At the load and at the start of the daemon, with the limit named; what was there goes on."""
        with Daemon("--standby=0", "--memory-limit=200MiB") as d:
            run = d.ctl("load", TINY, "--kv-bytes=99999GiB", check=False)
            self.assertEqual((run.returncode, "200.0 MiB" in run.stderr), (5, True), run.stderr)
            d.ctl("load", TINY)
            run = d.ctl("load", TINY, "--kv-bytes=190MiB", check=False)  # not beside the weights
            self.assertEqual((run.returncode, "200.0 MiB" in run.stderr), (5, True), run.stderr)
            self.assertEqual(d.json("spawn")["instance"]["model"], os.path.basename(TINY))
            config = os.path.join(d.dir, "conf")
            with open(config, "w") as f:
                f.write("[memory]\nmemory_limit = 99999GiB\n")
            for option, name in (("--kv-bytes=99999GiB", "kv_bytes"), (f"--config={config}", "memory_limit"),
                                 ("--memory-reserve=99999GiB", "memory_reserve"),
                                 ("--memory-limit=99999GiB", "memory_limit")):
                run = subprocess.run([EMBERD, f"--socket={d.dir}/t", f"--runtime-dir={d.dir}/r", option],
                                     capture_output=True, text=True, timeout=60)
                self.assertEqual(run.returncode, 2, run.stderr)
                self.assertIn(name, run.stderr)
                self.assertRegex(run.stderr, r"this host has [0-9.]+ MiB")
            run = subprocess.run([EMBERD, f"--socket={d.dir}/t", f"--runtime-dir={d.dir}/r",
                                  "--memory-limit=100MiB", "--kv-bytes=101MiB"],
                                 capture_output=True, text=True, timeout=60)
            self.assertEqual((run.returncode, "memory_limit is 100.0 MiB" in run.stderr), (2, True), run.stderr)
        with Daemon("--standby=0", "--kv-bytes=16MiB", config="[memory]\nmemory_limit = 200MiB\n") as d:
            with open(d.config, "w") as f:
                f.write("[memory]\nmemory_limit = 99999GiB\n")
            d.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "configuration not reloaded" in d.text_of_log(), "the reload is refused")
            self.assertEqual(d.json("status")["memory_budget"], 200 << 20)

    def test_kv_is_not_held_against_a_form_that_is_gone(self):
        """What an earlier load took, weights and pages of KV, says nothing of the same model quantised."""
        with Daemon("--standby=0", "--memory-limit=40MiB") as d:
            model = d.json("load", TINY)
            page, weights = 8 * 16 * 2 * (2 * 64 + 2 * 64) * 2, model["weights_bytes"]
            kv = (40 << 20) - weights + (1 << 20)
            for asked in (kv, page // 2):
                self.assertNotEqual(d.ctl("load", TINY, f"--kv-bytes={asked}", check=False).returncode, 0)
                d.ctl("unload", os.path.basename(TINY))
                self.assertLess(d.json("load", TINY, "--quant=q8", f"--kv-bytes={asked}")["weights_bytes"],
                                weights - (2 << 20))
                d.ctl("unload", os.path.basename(TINY))
                d.ctl("load", TINY, "--quant=none", "--kv-bytes=8MiB")

    def test_usage_errors(self):
        self.assertEqual(ctl("lod", check=False).returncode, 2)
        self.assertIn("load", ctl("lod", check=False).stderr)
        self.assertEqual(ctl("generate", "--max-tokens=none", "x", check=False).returncode, 2)
        run = ctl("lod", "--json", check=False)
        self.assertEqual(run.returncode, 2)
        self.assertIn("load", json.loads(run.stderr)["error"]["text"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
