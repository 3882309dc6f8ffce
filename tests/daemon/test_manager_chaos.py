# SPDX-License-Identifier: Apache-2.0
"""Everything at random, from seeds, with fake children."""
import random
import time
import unittest

import harness
from harness import grpc

CODE = grpc.StatusCode


class Chaos(harness.Case):
    """Random demands, deaths and memory pressure: every call ends once, nothing is left over."""

    def run_for(self, seed, seconds):
        r = random.Random(seed)
        d = self.daemon("--memory-limit=1000MiB", "--kv-bytes=60MiB", "--standby=1",
                        "--max-burst=4", "--lease-grace=50ms", "--spawn-timeout=500ms",
                        "--load-timeout-no-progress=1s", "--log-level=warn")
        models = ["w100", "w200", "w300", "w450"]
        for name in models:
            d.load(f"/fake/{name}")
        calls, streams, held = [], [], []
        peak = 0

        def spawn():
            calls.append(d.client.future("SpawnInstance", model=r.choice(models),
                                         lease_ttl_ms=r.choice([50, 5000]),
                                         timeout=r.choice([0.02, 0.2, 60])))

        def cancel():
            if calls:
                r.choice(calls).cancel()

        def stop():
            for call in calls:
                if call.done() and call.code() == CODE.OK:
                    held.append(call.result().instance.id)
            if held:
                d.client.future("StopInstance", id=held.pop(r.randrange(len(held))),
                                keep_warm=r.random() < 0.5)

        def kill():
            d.kill_one(r.choice)

        def load():
            streams.append(d.client.LoadModel(path=f"/fake/{r.choice(models)}", timeout=60))

        def unload():
            name = r.choice(models)  # at once again: unloaded twice, it would be forgotten
            d.client.future("UnloadModel", name=name, force=r.random() < 0.3)
            streams.append(d.client.LoadModel(path=f"/fake/{name}", timeout=60))

        def behave():
            d.behave("instance", r.choice(["", "", "slow 20", "die", "once\ndie", "die-after 30"]))
            d.behave("loader", r.choice(["", "", "slow 50", "once\nfail 5 chance", "once\ndie"]))
        acts = [spawn] * 8 + [cancel, stop, stop, stop, kill, load, unload, behave]
        end, late = time.monotonic() + seconds, time.monotonic() + 60

        def goes_on():
            served = sum(c.done() and c.code() == CODE.OK for c in calls)
            return time.monotonic() < (end if served > 10 else late)
        while goes_on():
            r.choice(acts)()
            time.sleep(r.random() * 0.01)
            if r.random() < 0.1:
                s = d.client.GetStatus()
                peak = max(peak, s.memory_weights + s.memory_instances + s.memory_reserved)
        d.behave("instance")
        d.behave("loader")
        for stream in streams:  # grpcio sees a stream's end only behind its messages
            try:
                list(stream)
            except grpc.RpcError as error:
                self.assertNotEqual(error.code(), CODE.DEADLINE_EXCEEDED)
        d.wait_until(lambda: all(c.done() for c in calls), "every call ends")
        codes = [c.code() for c in calls]
        self.assertTrue(set(codes) <= {CODE.OK, CODE.CANCELLED, CODE.DEADLINE_EXCEEDED,
                                       CODE.UNAVAILABLE, CODE.RESOURCE_EXHAUSTED, CODE.NOT_FOUND},
                        set(codes))
        self.assertGreater(codes.count(CODE.OK), 10)
        self.assertLessEqual(peak, 1000 << 20)
        for i in d.client.ListInstances().instances:
            try:
                d.client.StopInstance(id=i.id)
            except grpc.RpcError:
                pass
        for m in d.client.ListModels().models:
            d.client.UnloadModel(name=m.name, force=True)
        d.wait_until(lambda: not d.children(), "all children are gone")
        s = d.client.GetStatus()
        self.assertEqual((s.memory_weights, s.memory_instances, s.memory_reserved, s.leased,
                          s.starting, s.standby), (0, 0, 0, 0, 0, 0))
        self.assertEqual(d.sockets(), [])
        self.assertEqual(d.stop(), 0)
        return len(calls), codes.count(CODE.OK)

    def test_random(self):
        for seed in range(1, 4):
            print(*self.run_for(seed, 2), end=" ")


if __name__ == "__main__":
    unittest.main(verbosity=2)
