# SPDX-License-Identifier: Apache-2.0
"""Spawns and leases, with fake children."""
import os
import signal
import threading
import time
import unittest

import harness
from harness import alive, grpc, pb

CODE = grpc.StatusCode


class Spawning(harness.Case):
    def test_from_cold_parked_and_warm(self):
        d = self.daemon("--standby=1")
        r = d.client.SpawnInstance(holder="me")
        self.assertEqual(getattr(r, "from"), pb.COLD)
        self.assertEqual([p.name for p in r.phases], ["load", "exec", "grant"])
        self.assertEqual(r.instance.warmth, pb.HOT)
        self.assertEqual(r.instance.lease_holder, "me")
        self.assertRegex(r.lease.token, "^[0-9a-f]{32}$")
        self.assertEqual(r.lease.ttl_ms, 30000)
        d.settled(standby=1)
        r2 = d.client.SpawnInstance()
        self.assertEqual(getattr(r2, "from"), pb.WARM)
        self.assertEqual([p.name for p in r2.phases], ["grant"])
        self.assertNotEqual(r.lease.token, r2.lease.token)
        self.assertNotEqual(r.instance.id, r2.instance.id)
        s = d.client.GetStatus()
        self.assertEqual((s.spawns, s.spawns_from_pool, s.leased), (2, 1, 2))

    def test_stop_and_keep_warm(self):
        d = self.daemon("--standby=1")
        r = d.client.SpawnInstance()
        d.settled(standby=1)
        d.client.StopInstance(id=r.instance.id, keep_warm=True)
        self.assertEqual(d.model().standby, 2)
        again = d.client.SpawnInstance()
        self.assertEqual(again.instance.id, r.instance.id)  # the warmest
        self.assertNotEqual(again.lease.token, r.lease.token)
        d.client.StopInstance(id=again.instance.id)
        d.wait_until(lambda: r.instance.id not in
                     [i.id for i in d.client.ListInstances().instances], "it ends")
        self.fails(CODE.NOT_FOUND, lambda: d.client.StopInstance(id=again.instance.id), "called")

    def test_burst(self):
        d = self.daemon("--standby=1", "--max-burst=8")
        d.load()
        d.settled()
        most = [0]
        done = threading.Event()

        def look():
            while not done.wait(0.002):
                most[0] = max(most[0], d.model().starting)
        watcher = threading.Thread(target=look)
        watcher.start()
        begin = time.monotonic()
        calls = [d.client.future("SpawnInstance") for _ in range(64)]
        got = [c.result() for c in calls]
        took = time.monotonic() - begin
        done.set()
        watcher.join()
        self.assertEqual(len({g.instance.id for g in got}), 64)
        self.assertEqual(len({g.lease.token for g in got}), 64)
        self.assertTrue(all(alive(g.instance.pid) for g in got))
        self.assertLessEqual(most[0], 8)
        d.settled(standby=1)
        self.assertEqual(d.client.GetStatus().leased, 64)
        print(f"64 at once: {took * 1e3:.0f} ms", end=" ")

    def test_cancel_gives_the_turn_up(self):
        d = self.daemon("--standby=0", "--max-burst=1")
        d.load()
        d.behave("instance", "slow 2000")
        first = d.client.future("SpawnInstance")
        second = d.client.future("SpawnInstance")
        third = d.client.future("SpawnInstance", timeout=0.1)
        d.wait_until(lambda: d.model().starting == 1, "a start")
        first.cancel()
        pid = d.client.ListInstances().instances[0].pid
        self.assertEqual(second.result().instance.pid, pid)  # what was started for the first
        self.fails(CODE.DEADLINE_EXCEEDED, third.result)
        s = d.client.GetStatus()
        self.assertEqual((s.spawns, s.leased), (1, 1))

    def test_last_cancel_leaves_a_standby(self):
        d = self.daemon("--standby=0")
        d.load()
        d.behave("instance", "slow 1000")
        call = d.client.future("SpawnInstance")
        d.wait_until(lambda: d.model().starting == 1, "a start")
        call.cancel()
        d.wait_until(lambda: d.model().standby == 1, "it goes to the pool")

    def test_one_failure_is_got_over_and_a_crash_loop_ends(self):
        d = self.daemon("--standby=1", "--spawn-timeout=1s")
        d.behave("instance", "once", "die")
        self.assertEqual(d.client.SpawnInstance().instance.model, "ember-tiny")
        d.wait_until(lambda: d.client.GetStatus().instances_lost == 1, "the death is seen")
        d.settled()
        d.client.UnloadModel(name="ember-tiny", force=True)
        for lines, code, text in ((["die"], CODE.UNAVAILABLE, "signal 9"),
                                  (["hang"], CODE.UNAVAILABLE, "no READY within 1.0 s"),
                                  (["garbage"], CODE.UNAVAILABLE, "may not send"),
                                  (["exit"], CODE.UNAVAILABLE, "something broke"),
                                  (["fail 12 out of pages"], CODE.RESOURCE_EXHAUSTED, "pages")):
            d.behave("instance", *lines)
            self.fails(code, lambda: d.client.SpawnInstance(), text)
            self.assertRegex(d.model().error, text)
        lost = d.client.GetStatus().instances_lost
        time.sleep(1)  # back-off: refills do not spin
        self.assertLessEqual(d.client.GetStatus().instances_lost - lost, 2)
        d.behave("instance")
        d.client.SpawnInstance()  # at once, whatever the back-off
        self.assertEqual(d.model().error, "")

    def test_instances_that_die_after_ready_do_not_spin(self):
        d = self.daemon("--standby=1")
        d.load()
        d.settled()
        d.behave("instance", "die-after 1")
        os.kill(d.client.ListInstances().instances[0].pid, signal.SIGKILL)
        begin = time.monotonic()
        d.wait_until(lambda: d.client.GetStatus().instances_lost >= 4, "it is tried again")
        self.assertGreater(time.monotonic() - begin, 0.7)  # 100 + 200 + 400 ms of pauses
        d.behave("instance")
        d.client.SpawnInstance()

    def test_a_cache_that_crashes_every_start_is_moved_aside(self):
        d = self.daemon("--standby=0")
        d.load()
        os.makedirs(f"{d.folder}/cache", mode=0o700, exist_ok=True)
        with open(f"{d.folder}/cache/store.mdb", "w") as f:
            f.write("poison")
        d.behave("instance", "crash")
        d.client.SpawnInstance()  # the third start
        self.assertEqual(d.client.GetStatus().instances_lost, 2)
        self.assertTrue(os.path.exists(f"{d.folder}/cache/store.mdb.old"))
        self.assertIn("cache moved aside", d.text())

    def test_killed_idle_standby_is_replaced(self):
        d = self.daemon("--standby=2")
        d.load()
        d.settled()
        events = d.client.WatchInstances()
        self.assertEqual({next(events).kind, next(events).kind}, {pb.InstanceEvent.CURRENT})
        pid = d.client.ListInstances().instances[0].pid
        os.kill(pid, signal.SIGKILL)
        kinds = {}
        while pb.InstanceEvent.READY not in kinds:
            e = next(events)
            kinds[e.kind] = e
        self.assertIn("signal 9", kinds[pb.InstanceEvent.GONE].reason)
        d.settled(standby=2)
        self.assertEqual(len(d.sockets()), 2)
        events.cancel()

    def test_killed_leased_instance(self):
        d = self.daemon("--standby=0")
        r = d.client.SpawnInstance()
        self.assertEqual(os.stat(r.instance.socket).st_mode & 0o777, 0o600)
        os.kill(r.instance.pid, signal.SIGKILL)
        d.wait_until(lambda: d.client.GetStatus().instances_lost == 1, "it is noticed")
        self.assertFalse(os.path.exists(r.instance.socket))
        self.assertEqual(len(d.client.ListInstances().instances), 0)

    def test_killed_loader(self):
        d = self.daemon()
        d.behave("loader", "slow 1000")
        call = d.client.future("SpawnInstance")
        d.wait_until(lambda: d.children(), "the loader runs")
        os.kill(d.children()[0], signal.SIGKILL)
        self.fails(CODE.UNAVAILABLE, call.result, "signal 9")
        d.behave("loader")
        d.client.SpawnInstance()

    def test_lease_ends_without_a_driver(self):
        d = self.daemon("--standby=0", "--lease-grace=100ms")
        begin = time.monotonic()
        r = d.client.SpawnInstance(lease_ttl_ms=400)
        self.assertEqual((r.lease.ttl_ms, r.lease.grace_ms), (400, 100))
        d.wait_until(lambda: d.model().leased == 0, "the lease ends")
        self.assertGreater(time.monotonic() - begin, 0.4)
        self.assertEqual(d.model().standby, 1)
        self.fake_driver(r, "x")  # an old token is nobody's
        self.assertTrue(alive(r.instance.pid))

    def test_driver_holds_the_lease_and_grace_follows(self):
        d = self.daemon("--standby=0", "--lease-grace=1500ms")
        r = d.client.SpawnInstance(lease_ttl_ms=1500)
        s = self.fake_driver(r)
        time.sleep(2)
        self.assertTrue(d.client.ListInstances().instances[0].driver_connected)
        s.close()
        s = self.fake_driver(r)  # taken up again within the grace
        time.sleep(2)
        self.assertEqual(d.model().leased, 1)
        s.close()
        d.wait_until(lambda: d.model().leased == 0, "the grace ends")

    def test_end_of_lease_drops_the_driver(self):
        d = self.daemon("--standby=0")
        r = d.client.SpawnInstance()
        s = self.fake_driver(r)
        d.client.StopInstance(id=r.instance.id, keep_warm=True)
        self.assertEqual(s.recv(1), b"")
        self.assertEqual(d.model().standby, 1)

    def test_surplus_standbys_and_common_limit(self):
        d = self.daemon("--standby=3", "--standby-max=4")
        d.load()
        d.settled(standby=3)
        d.load("/fake/w1")
        d.settled("w1", standby=1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
