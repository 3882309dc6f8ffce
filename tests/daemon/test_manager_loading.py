# SPDX-License-Identifier: Apache-2.0
"""Loads, with fake children: single flight, progress, names, failures, unloading."""
import os
import signal
import unittest

import harness
from harness import alive, grpc, name_of, pb

CODE = grpc.StatusCode


class Loading(harness.Case):
    def test_default_model_is_there_cold(self):
        d = self.daemon()
        m = d.model()
        self.assertEqual((m.name, m.path, m.warmth), ("ember-tiny", harness.TINY, pb.COLD))
        self.assertEqual(len(d.children()), 0)

    def test_load_reports_and_fills_the_pool(self):
        d = self.daemon("--standby=2")
        d.behave("loader", "slow 1000")
        messages = d.load()
        phases = [m.phase for m in messages]
        self.assertEqual(phases[0], "queued")
        self.assertEqual(phases[-1], "ready")
        self.assertEqual(phases[-2], "starting standbys")
        self.assertIn("reading", phases)
        bytes_done = [m.bytes_done for m in messages]
        self.assertEqual(bytes_done, sorted(bytes_done))
        self.assertTrue(0 < bytes_done[-2] <= messages[-1].bytes_total)
        self.assertEqual(messages[-1].model.warmth, pb.PARKED)
        self.assertEqual(messages[-1].model.architecture, "qwen3")
        d.settled(standby=2)
        self.assertEqual(d.client.GetStatus().loads, 1)
        self.assertEqual([m.phase for m in d.load()], ["ready"])  # at once
        self.assertEqual(d.client.GetStatus().loads, 1)

    def test_single_flight(self):
        d = self.daemon("--standby=0")
        d.behave("loader", "slow 200")
        calls = [d.client.LoadModel(path=harness.TINY) for _ in range(10)]
        spawns = [d.client.future("SpawnInstance", model="ember-tiny") for _ in range(5)]
        for c in calls:
            self.assertEqual(list(c)[-1].phase, "ready")
        ids = {s.result().instance.id for s in spawns}
        self.assertEqual(len(ids), 5)
        self.assertEqual(d.client.GetStatus().loads, 1)

    def test_load_outlives_its_caller(self):
        d = self.daemon()
        d.behave("loader", "slow 1000")
        call = d.client.LoadModel(path=harness.TINY)
        next(call)
        call.cancel()
        d.wait_until(lambda: d.model().warmth in (pb.PARKED, pb.WARM), "the load ends")
        call = d.client.LoadModel(path=harness.TINY, name="other", timeout=0.1)
        self.fails(CODE.DEADLINE_EXCEEDED, lambda: call)
        d.wait_until(lambda: d.model("other").warmth in (pb.PARKED, pb.WARM), "the load ends")

    def test_failed_loads_tell_and_are_tried_again(self):
        d = self.daemon("--load-timeout-no-progress=1s")
        for lines, code, text in (
                (["fail 2 no such folder"], CODE.NOT_FOUND, "no such folder"),
                (["fail 74 shard is short"], CODE.DATA_LOSS, "shard is short"),
                (["fail 22 NaN in config"], CODE.INVALID_ARGUMENT, "NaN"),
                (["fail 95 arch"], CODE.UNIMPLEMENTED, "arch"),
                (["fail 7 10000000 layers"], CODE.INVALID_ARGUMENT, "layers"),
                (["fail 75 sizes overflow"], CODE.INVALID_ARGUMENT, "overflow"),
                (["fail 34 beyond the map"], CODE.INVALID_ARGUMENT, "beyond"),
                (["fail 84 not UTF-8"], CODE.DATA_LOSS, "UTF-8"),
                (["die"], CODE.UNAVAILABLE, "signal 9"),
                (["exit"], CODE.UNAVAILABLE, "status 3: fake: something broke"),
                (["garbage"], CODE.UNAVAILABLE, "may not send"),
                (["hang"], CODE.UNAVAILABLE, "no progress within 1.0 s")):
            d.behave("loader", *lines)
            self.fails(code, lambda: d.client.LoadModel(path=harness.TINY), text)
            self.assertEqual(d.model().warmth, pb.FAILED)
            self.assertRegex(d.model().error, text)
            self.fails(code, lambda: d.client.SpawnInstance(), text)
        self.assertEqual(d.client.GetStatus().load_failures, 24)
        d.behave("loader")
        self.assertEqual(d.client.SpawnInstance().instance.model, "ember-tiny")
        self.assertEqual(d.model().error, "")

    def test_a_loader_that_does_not_get_through_the_texts_is_told(self):
        """Its weights are served; that nobody has looked at tokenizer and chat template is said, and forgotten
        with the next load."""
        def loaders():
            return [pid for pid in d.children() if name_of(pid) == "ember-loader"]
        d = self.daemon("--standby=0")
        for sig, why in ((signal.SIGABRT, "killed by signal 6"), (None, r"no exit of the loader within 5\.0 s")):
            d.behave("loader", "stay")
            call = d.client.LoadModel(path=harness.TINY)
            d.wait_until(lambda: d.model().warmth == pb.PARKED, "it is there")
            second = d.client.LoadModel(path=harness.TINY)  # finds it there and waits as well
            self.assertEqual(next(second).phase, "checking")
            self.assertTrue(d.client.SpawnInstance(model="ember-tiny").instance.id)
            if sig:
                os.kill(loaders()[0], sig)
            for c in call, second:
                last = list(c)[-1]
                self.assertEqual(last.phase, "ready")
                self.assertRegex(last.model.notice, "tokenizer and chat template .*" + why)
            self.assertRegex(d.text(), "model is incomplete .*" + why)
            d.client.UnloadModel(name="ember-tiny", force=True)
            d.behave("loader")
            self.assertEqual(d.load()[-1].model.notice, "")
            d.client.UnloadModel(name="ember-tiny", force=True)

    def test_an_unload_meets_a_loader_that_looks_at_the_texts(self):
        """Who waits is told, and the next load does not meet the loader of the one before."""
        d = self.daemon("--standby=0")
        d.behave("loader", "stay", "once")
        call = d.client.LoadModel(path=harness.TINY)
        d.wait_until(lambda: d.model().warmth == pb.PARKED, "it is there")
        d.client.UnloadModel(name="ember-tiny")
        self.assertEqual(d.load()[-1].model.notice, "")
        self.fails(CODE.UNAVAILABLE, lambda: list(call), "being unloaded")

    def test_names_and_paths(self):
        d = self.daemon()
        self.fails(CODE.INVALID_ARGUMENT, lambda: d.client.LoadModel(path="models/x"), "absolute")
        self.fails(CODE.INVALID_ARGUMENT, lambda: d.client.LoadModel(path="/"), "name")
        self.fails(CODE.INVALID_ARGUMENT, lambda: d.client.LoadModel(path="/x", name="a b"), "blank")
        self.fails(CODE.INVALID_ARGUMENT,
                   lambda: d.client.LoadModel(path="/x", name="n" * 129), "129")
        self.fails(CODE.NOT_FOUND, lambda: d.client.LoadModel(name="nobody"), "path")
        self.fails(CODE.NOT_FOUND, lambda: d.client.SpawnInstance(model="nobody"), "load it first")
        self.fails(CODE.NOT_FOUND, lambda: d.client.UnloadModel(name="nobody"), "nobody")
        self.fails(CODE.NOT_FOUND, lambda: d.client.StopInstance(id="nobody"), "nobody")
        self.fails(CODE.INVALID_ARGUMENT,
                   lambda: d.client.LoadModel(path=harness.TINY, standby=1000), "256")
        d.load("/fake/w1/")
        self.assertEqual(d.model("w1").path, "/fake/w1")
        self.fails(CODE.FAILED_PRECONDITION,
                   lambda: d.client.LoadModel(path="/fake/w2", name="w1"), "belongs to /fake/w1")
        d.client.UnloadModel(name="w1")
        d.load("/fake/w2", name="w1")
        self.assertEqual(d.model("w1").path, "/fake/w2")

    def test_unload(self):
        d = self.daemon()
        d.load()
        d.settled()
        spawned = d.client.SpawnInstance()
        self.fails(CODE.FAILED_PRECONDITION, lambda: d.client.UnloadModel(name="ember-tiny"),
                   "1 leased")
        freed = d.client.UnloadModel(name="ember-tiny", force=True).bytes_freed
        self.assertGreater(freed, 1000000)
        self.assertFalse(alive(spawned.instance.pid))
        self.assertEqual(d.children(), [])
        self.assertEqual(d.sockets(), [])
        s = d.client.GetStatus()
        self.assertEqual((s.memory_weights, s.memory_instances, s.memory_reserved), (0, 0, 0))
        self.assertEqual(d.model().warmth, pb.COLD)
        d.behave("loader", "hang")
        call = d.client.LoadModel(path=harness.TINY)
        next(call)
        self.fails(CODE.FAILED_PRECONDITION, lambda: d.client.UnloadModel(name="ember-tiny"),
                   "being loaded")
        d.client.UnloadModel(name="ember-tiny", force=True)
        self.fails(CODE.UNAVAILABLE, lambda: call, "unloaded")
        self.assertEqual(d.model().warmth, pb.COLD)

    def test_forgetting(self):
        d = self.daemon("--standby=0")

        def names():
            return sorted(m.name for m in d.client.ListModels().models)
        d.load("/fake/w1")
        d.client.UnloadModel(name="w1")
        self.assertEqual(names(), ["ember-tiny", "w1"])  # cold: a spawn would load it
        d.client.UnloadModel(name="w1")
        d.client.UnloadModel(name="ember-tiny")  # of the configuration: stays
        d.wait_until(lambda: names() == ["ember-tiny"], "w1 is forgotten")
        d.behave("loader", "fail 2 nothing there")
        self.fails(CODE.NOT_FOUND, lambda: d.client.LoadModel(path="/fake/typo"), "nothing")
        self.assertEqual(names(), ["ember-tiny", "typo"])
        d.client.UnloadModel(name="typo")
        d.wait_until(lambda: names() == ["ember-tiny"], "typo is forgotten")

    def test_preload_and_the_truths_of_health(self):
        d = self.daemon("--standby=1", f"--preload={harness.TINY}:/fake/w5", wait=False,
                        env={"EMBER_FAULT": ""})
        d.wait_until(lambda: os.path.exists(d.socket), "emberd listens")
        d.wait_until(lambda: d.client.healthy("ready"), "ready")
        for service in ("", "ember.v1.Ember", "startup"):
            self.assertTrue(d.client.healthy(service), service)
        self.assertEqual(d.model("w5").warmth, pb.WARM)
        slow = self.daemon()
        slow.behave("loader", "slow 500")
        slow.behave("instance", "slow 3000")
        self.assertTrue(slow.client.healthy("startup"))
        slow.client.LoadModel(path="/fake/w5")
        list(slow.client.LoadModel(path="/fake/w5"))
        self.assertFalse(slow.client.healthy("ready"))
        slow.wait_until(lambda: slow.client.healthy("ready"), "ready")


if __name__ == "__main__":
    unittest.main(verbosity=2)
