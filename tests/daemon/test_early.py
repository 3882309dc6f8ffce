# SPDX-License-Identifier: Apache-2.0
"""Instances that start while their weights are still being read: the same tokens, and every way that it can go wrong."""
import os
import shutil
import signal
import threading
import time
import unittest

from driver import CASES, Real
from harness import TINY, alive, grpc, name_of, step

CODE = grpc.StatusCode
SLOWLY = "--load-rate=4MiB"  # the embedded model takes about four seconds


class Early(Real):
    def loaders(self, d):
        return [p for p in d.children() if name_of(p) == "ember-loader"]

    def test_the_first_token_waits_for_the_load_and_no_longer(self):
        d = self.daemon(SLOWLY, "--standby=0")
        r = d.client.SpawnInstance()
        self.assertEqual(len(self.loaders(d)), 1)  # the instance is here, the weights are not
        self.assertEqual(d.model().leased, 1)
        self.assertEqual([p.name for p in r.phases][0], "load")
        driver = self.driver(r)
        self.assertEqual(driver.case(CASES[0]), CASES[0]["greedy_ids"])
        d.wait_until(lambda: not self.loaders(d), "the loader exits")
        self.assertEqual(d.model().load_ms > 1000, True)
        self.assertEqual(d.client.GetStatus().loads, 1)
        d.client.StopInstance(id=r.instance.id, keep_warm=True)
        again = d.client.SpawnInstance()
        self.assertEqual(again.instance.id, r.instance.id)
        self.assertEqual(self.driver(again).case(CASES[1]), CASES[1]["greedy_ids"])

    def test_a_driver_that_never_pauses_gets_the_large_steps(self):
        """Graphs of larger steps are adopted although another step always waits."""
        d = self.daemon(SLOWLY, "--standby=0")
        driver = self.driver(d.client.SpawnInstance())
        most = driver.welcome.max_tokens
        pages = range(-(-most // driver.welcome.page_size))

        def send(number):
            prompt = step.SequenceStep(id=number, tokens=range(1, most + 1), pages=pages, prompt_len=most,
                                       sample=True)
            driver.send(step.DriverFrame(step=step.Step(id=number, sequences=[prompt])))

        for number in range(1, 9):
            send(number)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            number += 1
            send(number)
            result = driver.receive().result
            self.assertEqual(result.error, 0, result.error_text)
            if result.max_tokens > most:
                return
        self.fail(f"after {number} steps in a row they still have at most {most} tokens")

    def test_several_wait_for_one_load(self):
        d = self.daemon(SLOWLY, "--standby=0")
        got = []

        def one(case):
            got.append(self.driver(d.client.SpawnInstance()).case(case) == case["greedy_ids"])
        threads = [threading.Thread(target=one, args=(CASES[i],)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        self.assertEqual(got, [True] * 4)
        self.assertEqual(d.client.GetStatus().loads, 1)

    def test_never(self):
        d = self.daemon(SLOWLY, "--standby=0", "--early-start=never")
        started = time.monotonic()
        r = d.client.SpawnInstance()
        self.assertGreater(time.monotonic() - started, 1)
        self.assertEqual(self.driver(r).case(CASES[0]), CASES[0]["greedy_ids"])

    def test_term_during_a_load_is_no_failure_of_it(self):
        d = self.daemon(SLOWLY, "--standby=0")
        call = d.client.LoadModel(path=TINY)
        next(call)
        d.wait_until(lambda: self.loaders(d), "it loads")
        folder, d.own_folder = d.folder, False
        self.assertEqual(d.stop(signal.SIGTERM), 0)
        self.assertIn("load broken off", d.text())
        self.assertNotIn("load failed", d.text())
        call.cancel()
        shutil.rmtree(folder)

    def test_loader_killed_in_mid_prefill(self):
        d = self.daemon(SLOWLY, "--standby=0")
        r = d.client.SpawnInstance()
        driver = self.driver(r)
        killer = threading.Timer(0.3, lambda: os.kill(self.loaders(d)[0], signal.SIGKILL))
        killer.start()
        with self.assertRaises((ConnectionError, OSError)):
            driver.case(CASES[0])
        killer.join()
        d.wait_until(lambda: not alive(r.instance.pid), "the instance ends with its load")
        d.wait_until(lambda: d.model().error, "the load has failed")
        self.assertIn("signal 9", d.model().error)
        self.assertEqual(d.client.GetStatus().memory_weights, 0)
        r = d.client.SpawnInstance()  # asked again, it is tried again
        self.assertEqual(self.driver(r).case(CASES[0]), CASES[0]["greedy_ids"])

    def test_unloaded_while_an_instance_waits(self):
        d = self.daemon(SLOWLY, "--standby=0")
        r = d.client.SpawnInstance()
        driver = self.driver(r)
        with self.assertRaises(grpc.RpcError) as caught:
            d.client.UnloadModel(name="ember-tiny")
        self.assertEqual(caught.exception.code(), CODE.FAILED_PRECONDITION)
        answer = d.client.UnloadModel(name="ember-tiny", force=True)
        self.assertGreater(answer.bytes_freed, 10 << 20)
        self.assertFalse(alive(r.instance.pid))
        self.assertEqual(d.children(), [])
        self.assertEqual(d.client.GetStatus().memory_weights, 0)
        with self.assertRaises((ConnectionError, OSError)):
            driver.case(CASES[0])
        r = d.client.SpawnInstance()
        self.assertEqual(self.driver(r).case(CASES[0]), CASES[0]["greedy_ids"])

    def test_instance_killed_while_it_waits(self):
        d = self.daemon(SLOWLY, "--standby=0")
        r = d.client.SpawnInstance()
        os.kill(r.instance.pid, signal.SIGKILL)
        d.wait_until(lambda: not d.client.ListInstances().instances, "it is gone")
        again = d.client.SpawnInstance()
        self.assertEqual(self.driver(again).case(CASES[0]), CASES[0]["greedy_ids"])
        self.assertEqual(d.client.GetStatus().loads, 1)

    def test_daemon_killed_in_mid_load(self):
        d = self.daemon(SLOWLY, "--standby=0")
        r = d.client.SpawnInstance()
        pids = d.children()
        d.process.kill()
        d.process.wait()
        d.wait_until(lambda: not any(alive(p) for p in pids), "nothing is left")
        self.assertFalse(alive(r.instance.pid))

    def test_checkpoint_damaged_in_mid_load_lets_no_token_out(self):
        d = self.daemon(SLOWLY, "--standby=0", env={"EMBER_FAULT": "read:20"})
        with self.assertRaises((grpc.RpcError, ConnectionError, OSError)):
            self.driver(d.client.SpawnInstance()).case(CASES[0])
        d.wait_until(lambda: not d.client.ListInstances().instances, "its instance ends")


if __name__ == "__main__":
    unittest.main(verbosity=2)
