# SPDX-License-Identifier: Apache-2.0
"""Admission and eviction, with fake children."""
import unittest

import harness
from harness import alive, grpc, pb

CODE = grpc.StatusCode


class Memory(harness.Case):
    LIMIT = "--memory-limit=1000MiB"

    def daemon(self, *options, **more):
        return super().daemon(self.LIMIT, "--kv-bytes=100MiB", *options, **more)

    def charged(self, d):
        s = d.client.GetStatus()
        return s.memory_weights + s.memory_instances + s.memory_reserved

    def test_too_large_is_refused_with_the_numbers(self):
        d = self.daemon("--standby=0")
        self.fails(CODE.OUT_OF_RANGE, lambda: d.client.LoadModel(path="/fake/w1200"),
                   r"model w1200: loading it needs 1200.0 MiB; the budget is 1000.0 MiB")
        d.load("/fake/w950")
        self.fails(CODE.OUT_OF_RANGE, lambda: d.client.SpawnInstance(model="w950"),
                   r"model w950: another instance needs 116.0 MiB.*weights take 950.0 MiB.*memory_limit")
        d.load("/fake/w100")  # evicts the other
        self.assertEqual(d.model("w950").warmth, pb.COLD)
        self.assertEqual(d.client.GetStatus().evictions, 1)

    def test_standbys_go_first_then_idle_models_never_leased_ones(self):
        d = self.daemon("--standby=2")
        d.load("/fake/w200")
        d.settled("w200", standby=2)  # 200 + 2 * 101
        d.load("/fake/w300")
        d.settled("w300", standby=2)  # 904
        d.load("/fake/w150")          # 150: one or two spares go
        self.assertEqual(d.client.GetStatus().evictions, 0)
        self.assertEqual(d.model("w200").standby + d.model("w300").standby, 3)
        held = d.client.SpawnInstance(model="w300")
        d.load("/fake/w500")
        self.assertEqual(d.model("w300").leased, 1)
        self.assertEqual(d.model("w200").warmth, pb.COLD)
        self.assertEqual(d.model("w150").warmth, pb.COLD)
        self.assertEqual(d.client.GetStatus().evictions, 2)
        self.fails(CODE.RESOURCE_EXHAUSTED, lambda: d.client.LoadModel(path="/fake/w700"), "leased")
        self.assertTrue(alive(held.instance.pid))
        self.assertLessEqual(self.charged(d), 1000 << 20)

    def test_loading_is_not_evicted(self):
        d = self.daemon("--standby=0")
        d.behave("loader", "slow 1500")
        first = d.client.LoadModel(path="/fake/w600")
        d.wait_until(lambda: d.client.GetStatus().memory_reserved == 600 << 20, "it is admitted")
        self.fails(CODE.RESOURCE_EXHAUSTED, lambda: d.client.LoadModel(path="/fake/w700"),
                   "loading")
        self.assertEqual(list(first)[-1].phase, "ready")

    def test_two_models_take_turns(self):
        d = self.daemon("--standby=0")
        for name in ("w600", "w700"):
            d.load(f"/fake/{name}")
        for _ in range(5):
            for name in ("w600", "w700"):
                r = d.client.SpawnInstance(model=name)
                d.client.StopInstance(id=r.instance.id)
                self.assertLessEqual(self.charged(d), 1000 << 20)
        self.assertEqual(d.client.GetStatus().spawn_failures, 0)

    def test_burst_beyond_memory(self):
        d = self.daemon("--standby=0")
        d.load("/fake/w500")
        calls = [d.client.future("SpawnInstance", model="w500") for _ in range(10)]
        codes = [c.code() for c in calls]
        self.assertEqual(codes.count(CODE.OK), 4)
        self.assertEqual(codes.count(CODE.RESOURCE_EXHAUSTED), 6)

    def test_idle_unload(self):
        d = self.daemon("--idle-unload=1s")
        d.load("/fake/w100")
        self.assertEqual(d.model("w100").warmth in (pb.PARKED, pb.WARM), True)
        d.wait_until(lambda: d.model("w100").warmth == pb.COLD, "it is unloaded")


if __name__ == "__main__":
    unittest.main(verbosity=2)
