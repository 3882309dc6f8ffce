# SPDX-License-Identifier: Apache-2.0
"""The whole daemon with its real loader and instances, over the embedded model."""
import glob
import json
import os
import platform
import re
import shutil
import signal
import struct
import tempfile
import threading
import time
import unittest

from driver import CASES, Real
from harness import NotifySocket, TINY, alive, grpc, step

CODE = grpc.StatusCode


class EndToEnd(Real):
    def test_every_text(self):
        d = self.daemon(compile="auto")
        r = d.client.SpawnInstance()
        driver = self.driver(r)
        for case in CASES:
            self.assertEqual(driver.case(case), case["greedy_ids"], case["prompt"])
        self.assertEqual(driver.welcome.instance_id, r.instance.id)
        d.wait_until(lambda: any(i.driver_connected and i.id == r.instance.id for i in
                                 d.client.ListInstances(model="ember-tiny").instances),
                     "the driver is seen")

    def test_steps_that_join(self):
        """A step that joins runs with the one before when it has come in time, else behind it: the
        tokens are the same, and the step behind may refer to those of both."""
        d = self.daemon("--standby=0")
        driver = self.driver(d.client.SpawnInstance())
        self.assertTrue(driver.welcome.joins)
        first = {1: 0, 2: 16}  # a sequence's first page
        cases = {1: CASES[0], 2: CASES[1]}

        def sequence(i, generated):
            prompt = cases[i]["prompt_ids"]
            tokens = [0] if generated else prompt  # 0: what was sampled before
            end = len(prompt) + generated
            pages = range(first[i], first[i] + -(-end // driver.welcome.page_size))
            return step.SequenceStep(
                id=i, tokens=tokens, position=end - len(tokens), pages=pages, prompt_len=len(prompt),
                sample=True, sample_index=generated, token_from_previous=generated > 0)

        def frame(number, *sequences, joins=False):
            made = step.DriverFrame(step=step.Step(id=number, sequences=sequences, joins=joins))
            data = made.SerializeToString()
            return struct.pack("<I", len(data)) + data

        for early in (True, False):
            steps = [frame(1, sequence(1, 0)), frame(2, sequence(1, 1)),
                     frame(3, sequence(2, 0), joins=True)]
            driver.socket.sendall(b"".join(steps if early else steps[:2]))
            results = [driver.receive().result for _ in range(3 if early else 2)]
            if not early:
                driver.socket.sendall(steps[2])
                results.append(driver.receive().result)
            driver.socket.sendall(frame(4, sequence(1, 2), sequence(2, 1)))
            results.append(driver.receive().result)
            self.assertEqual([(r.id, r.error) for r in results], [(n, 0) for n in (1, 2, 3, 4)])
            self.assertEqual(results[1].compute_ms == results[2].compute_ms, early)
            got = [[s.token for s in r.sequences] for r in results]
            one, two = (cases[i]["greedy_ids"] for i in (1, 2))
            self.assertEqual(got, [[one[0]], [one[1]], [two[0]], [one[2], two[1]]])

    def test_lease_token_and_reuse(self):
        d = self.daemon("--standby=0")
        r = d.client.SpawnInstance()
        with self.assertRaises(ConnectionError):
            self.driver(r, "0" * 32).run([1], 0, 1)
        driver = self.driver(r)
        self.assertEqual(driver.case(CASES[0]), CASES[0]["greedy_ids"])
        d.client.StopInstance(id=r.instance.id, keep_warm=True)
        with self.assertRaises((ConnectionError, OSError)):
            driver.run([1], 0, 1)
        again = d.client.SpawnInstance()
        self.assertEqual(again.instance.id, r.instance.id)
        with self.assertRaises(ConnectionError):
            self.driver(again, r.lease.token).run([1], 0, 1)  # the old lease has ended
        self.assertEqual(self.driver(again).case(CASES[1]), CASES[1]["greedy_ids"])

    def cpus(self, instance):
        with open(f"/proc/{instance.pid}/status") as status:
            return re.search(r"Cpus_allowed_list:\s*(\S+)", status.read())[1]

    def test_instances_keep_to_cpus_of_their_own(self):
        ours = sorted(os.sched_getaffinity(0))
        d = self.daemon("--standby=0", "--threads=1", "--pin=always", "--compile=never",
                        "--early-start=never")

        def busy():
            spawned = d.client.SpawnInstance()
            self.driver(spawned).case(CASES[0])  # they are bound when they have something to do
            return spawned.instance

        a, b = busy(), busy()
        self.assertIn(int(self.cpus(a)), ours)
        self.assertIn(int(self.cpus(b)), ours)
        if len(ours) > 1:
            self.assertNotEqual(self.cpus(a), self.cpus(b))
        before = self.cpus(a)
        d.client.StopInstance(id=a.id)
        d.wait_until(lambda: not alive(a.pid), "it has ended")
        self.assertEqual(self.cpus(busy()), before)  # its place is free
        free = self.daemon("--standby=0", "--pin=never", "--compile=never")
        spawned = free.client.SpawnInstance()
        unbound = spawned.instance
        self.driver(spawned).case(CASES[0])
        with open("/proc/self/status") as status:
            self.assertIn(f"Cpus_allowed_list:\t{self.cpus(unbound)}\n", status.read())

    def test_killed_while_generating(self):
        d = self.daemon("--standby=1")
        case = CASES[0]
        r = d.client.SpawnInstance()
        driver = self.driver(r)
        half = driver.generate(case["prompt_ids"], 8)
        os.kill(r.instance.pid, signal.SIGKILL)
        with self.assertRaises((ConnectionError, OSError)):
            driver.run([half[-1]], len(case["prompt_ids"]) + 7, len(case["prompt_ids"]))
        other = d.client.SpawnInstance()
        whole = self.driver(other).generate(case["prompt_ids"], len(case["greedy_ids"]), half)
        self.assertEqual(whole, case["greedy_ids"])
        d.wait_until(lambda: d.client.GetStatus().instances_lost == 1, "the loss is counted")

    def test_burst_of_64(self):
        d = self.daemon("--standby=1", "--log-level=warn")
        d.load()
        d.settled()
        begin = time.monotonic()
        calls = [d.client.future("SpawnInstance") for _ in range(64)]
        got = [c.result() for c in calls]
        took = time.monotonic() - begin
        self.assertEqual(len({g.instance.id for g in got}), 64)
        print(f"64 at once: {took * 1e3:.0f} ms", end=" ")
        for spawned in (got[0], got[31], got[63]):
            self.assertEqual(self.driver(spawned).case(CASES[2]), CASES[2]["greedy_ids"])
        if "ASAN_OPTIONS" not in os.environ:  # its shadow and quarantine are no memory of emberd's
            self.assertLess(d.client.GetStatus().own_rss, 20 << 20)

    def test_weights_are_one_copy(self):
        d = self.daemon("--standby=0")
        got = [d.client.SpawnInstance() for _ in range(6)]
        for spawned in got:
            self.driver(spawned).case(CASES[0])
        weights = d.model().weights_bytes
        pss = 0
        for spawned in got:
            with open(f"/proc/{spawned.instance.pid}/smaps") as f:
                ours = False
                for line in f:
                    if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                        ours = "/memfd:ember-weights" in line
                        if ours:
                            self.assertEqual(line.split()[1], "r--s", line)
                    elif ours and line.startswith("Pss:"):
                        pss += int(line.split()[1]) * 1024
        self.assertGreater(pss, weights // 2)
        self.assertLess(pss, weights * 1.05 + (1 << 20))

    def test_restart_with_weights_in_descriptors(self):
        folder = tempfile.mkdtemp(prefix="ember-test-")
        self.addCleanup(shutil.rmtree, folder, True)
        n = NotifySocket(f"{folder}/notify")
        self.addCleanup(n.close)
        d = self.daemon(notify=n, folder=folder, compile="auto")
        r = d.client.SpawnInstance()
        self.assertGreater(r.instance.kernels_compiled, 0)
        self.assertEqual(self.driver(r).case(CASES[0]), CASES[0]["greedy_ids"])
        d.settled()
        n.settled(3)
        d.stop(signal.SIGKILL)
        d.wait_until(lambda: not alive(r.instance.pid), "its instances are gone")
        again = self.daemon(notify=n, folder=folder, compile="auto", pass_fds=n.stored)
        r = again.client.SpawnInstance()
        driver = self.driver(r)
        first = driver.run(CASES[0]["prompt_ids"], 0, len(CASES[0]["prompt_ids"]))
        took = time.monotonic() - again.started
        self.assertEqual(first, CASES[0]["greedy_ids"][0])
        self.assertEqual(again.client.GetStatus().loads, 0)
        self.assertEqual(r.instance.kernels_compiled, 0)
        self.assertEqual(driver.case(CASES[0]), CASES[0]["greedy_ids"])
        print(f"restart to first token: {took * 1e3:.0f} ms", end=" ")

    def test_says_why_it_made_something_anew(self):
        """What the cache lacked, and that a store was moved aside, stands in emberd's log."""
        folder = tempfile.mkdtemp(prefix="ember-test-")
        self.addCleanup(shutil.rmtree, folder, True)

        def log_of_a_start(**env):
            d = self.daemon("--standby=0", folder=folder, env=env)
            begin = os.path.getsize(d.log_path)
            driver = self.driver(d.client.SpawnInstance())
            driver.case(CASES[0])
            driver.socket.close()
            d.stop()
            with open(d.log_path) as log:
                log.seek(begin)
                return log.read()
        self.assertNotIn("made anew", log_of_a_start(EMBER_ISA="baseline"))  # nothing to compare
        self.assertNotIn("made anew", log_of_a_start(EMBER_ISA="baseline"))
        if platform.machine() == "x86_64":
            self.assertRegex(log_of_a_start(EMBER_ISA="avx2"),
                             "made anew kind=graph n=1 why=.*'device' is .*, stored was ")
        store = glob.glob(f"{folder}/**/store.mdb", recursive=True)[0]
        with open(store, "wb") as f:
            f.write(b"not a store" * 1000)
        self.assertRegex(log_of_a_start(), "notice text=.* was moved to store.mdb.old")

    def test_quantised_while_loading(self):
        """Smaller, told in lists, kept over a restart, and never changed under those who use it."""
        folder = tempfile.mkdtemp(prefix="ember-test-")
        self.addCleanup(shutil.rmtree, folder, True)
        n = NotifySocket(f"{folder}/notify")
        self.addCleanup(n.close)
        d = self.daemon("--default-model=", "--standby=0", notify=n, folder=folder)
        plain = d.load(path=TINY, name="plain")[-1].model
        rules = "q8\nkeep=layers\\.0\\.qkv"
        q8 = d.load(path=TINY, name="q8", quant=rules)[-1].model
        self.assertEqual((plain.quant, q8.quant), ("", rules))
        self.assertLess(q8.weights_bytes, 0.6 * plain.weights_bytes)
        r = d.client.SpawnInstance(model="q8")
        self.assertEqual(self.driver(r).case(CASES[0]), CASES[0]["greedy_ids"])
        # asked for again: the same, or nothing in particular, joins; another is refused
        self.assertEqual(d.load(path=TINY, name="q8", quant=rules)[-1].model.digest, q8.digest)
        self.assertEqual(d.load(path=TINY, name="q8")[-1].model.digest, q8.digest)
        self.fails(CODE.FAILED_PRECONDITION, lambda: d.load(path=TINY, name="q8", quant="q4"), "unload")
        self.fails(CODE.FAILED_PRECONDITION, lambda: d.load(path=TINY, name="q8", quant="none"), "unload")
        self.fails(CODE.FAILED_PRECONDITION,
                   lambda: d.load(path=TINY, name="q8", quant="q4", kv_type="int8"), "unload")
        self.assertEqual(d.model("q8").kv_type, q8.kv_type)  # what is refused changes nothing
        self.fails(CODE.INVALID_ARGUMENT, lambda: d.load(path=TINY, name="x", quant="q5"), "q5")
        self.fails(CODE.INVALID_ARGUMENT, lambda: d.load(path=TINY, name="x", quant="q8\nkeep=("),
                   "pattern")
        self.fails(CODE.INVALID_ARGUMENT, lambda: d.load(path=TINY, name="y", quant="q8" * 9000),
                   "at most")
        n.settled(6)
        d.stop(signal.SIGKILL)
        again = self.daemon("--default-model=", "--standby=0", notify=n, folder=folder,
                            pass_fds=n.stored)
        models = {m.name: m for m in again.client.ListModels().models}
        self.assertEqual((models["q8"].quant, models["q8"].digest), (rules, q8.digest))
        again.client.UnloadModel(name="q8")
        self.assertEqual(again.load(path=TINY, name="q8", quant="q4")[-1].model.quant, "q4")

    def test_killed_daemon_leaves_nothing(self):
        shm = set(os.listdir("/dev/shm"))
        d = self.daemon("--standby=2")
        r = d.client.SpawnInstance()
        d.settled()
        driver = self.driver(r)
        busy = threading.Thread(target=lambda: self.run_until_cut(driver))
        busy.start()
        pids = [i.pid for i in d.client.ListInstances().instances]
        self.assertEqual(len(pids), 3)
        folder, d.own_folder = d.folder, False
        d.stop(signal.SIGKILL)
        d.wait_until(lambda: not any(alive(p) for p in pids), "its instances are gone")
        busy.join()
        self.assertEqual(set(os.listdir("/dev/shm")), shm)
        again = self.daemon(folder=folder)
        again.own_folder = True
        self.assertEqual(self.driver(again.client.SpawnInstance()).case(CASES[0]),
                         CASES[0]["greedy_ids"])

    @staticmethod
    def run_until_cut(driver):
        try:
            while True:
                driver.case(CASES[0])
        except OSError:
            pass

    def test_faults_of_the_children(self):
        d = self.daemon(env={"EMBER_FAULT": "load-mid:1=kill"})
        self.fails(CODE.UNAVAILABLE, d.client.SpawnInstance, "signal 9")
        self.assertTrue(d.client.healthy(""))
        d = self.daemon(env={"EMBER_FAULT": "instance-ready:1=kill"})
        self.fails(CODE.UNAVAILABLE, d.client.SpawnInstance, "signal 9")
        self.assertTrue(d.client.healthy(""))
        d = self.daemon("--standby=0", env={"EMBER_FAULT": "instance-step:3=kill"})
        driver = self.driver(d.client.SpawnInstance())
        with self.assertRaises((ConnectionError, OSError)):
            driver.case(CASES[0])
        d.client.SpawnInstance()

    def test_bad_checkpoints(self):
        d = self.daemon()
        folder = tempfile.mkdtemp(prefix="ember-test-")
        self.addCleanup(shutil.rmtree, folder, True)

        def broken(name, change):
            path = f"{folder}/{name}"
            shutil.copytree(TINY, path)
            change(path)
            return lambda: d.client.LoadModel(path=path)

        def cut(path):
            os.truncate(f"{path}/model.safetensors", 1000000)

        def configure(**values):
            def change(path):
                with open(f"{path}/config.json") as f:
                    config = json.load(f)
                config.update(values)
                with open(f"{path}/config.json", "w") as f:
                    json.dump(config, f)
            return change
        self.fails(CODE.NOT_FOUND, lambda: d.client.LoadModel(path=f"{folder}/none"), "none")
        self.fails(CODE.DATA_LOSS, broken("cut", cut), "model.safetensors")
        self.fails(CODE.NOT_FOUND, broken("empty", lambda p: os.unlink(f"{p}/model.safetensors")),
                   "model.safetensors")
        self.fails(CODE.UNIMPLEMENTED, broken("strange", configure(model_type="strange")), "strange")
        self.fails(CODE.INVALID_ARGUMENT, broken("deep", configure(num_hidden_layers=10 ** 9)),
                   "deep/config.json: .*num_hidden_layers")
        self.fails(CODE.INVALID_ARGUMENT, broken("nan", configure(rms_norm_eps=float("nan"))),
                   "nan/config.json: .*NaN")
        self.assertEqual(self.driver(d.client.SpawnInstance()).case(CASES[0]),
                         CASES[0]["greedy_ids"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
