# SPDX-License-Identifier: Apache-2.0
"""The manager's life cycles, with fake children: test_manager.py [unittest arguments]."""
import os
import random
import re
import resource
import signal
import socket
import subprocess
import threading
import time
import unittest

import harness
from harness import Daemon, NotifySocket, alive, grpc, pb

CODE = grpc.StatusCode


class Base(unittest.TestCase):
    def daemon(self, *options, **more):
        d = Daemon(*options, **more)
        self.addCleanup(self.end, d)
        return d

    def end(self, d):
        if d.process.returncode is None:
            d.stop()

    def fails(self, code, call, text=""):
        with self.assertRaises(grpc.RpcError) as caught:
            result = call()
            if not isinstance(result, (list, pb.SpawnInstanceResponse)):
                list(result)
        error = caught.exception
        self.assertEqual(error.code(), code, error.details())
        if text:
            self.assertRegex(error.details(), text)
        return error.details()


class Loading(Base):
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


class Spawning(Base):
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

    def driver(self, r, token=None):
        s = socket.socket(socket.AF_UNIX)
        self.addCleanup(s.close)
        s.settimeout(60)
        s.connect(r.instance.socket)
        s.sendall((token or r.lease.token).encode() + b"\n")
        self.assertEqual(s.recv(3), b"no\n" if token else b"ok\n")
        return s

    def test_lease_ends_without_a_driver(self):
        d = self.daemon("--standby=0", "--lease-grace=100ms")
        begin = time.monotonic()
        r = d.client.SpawnInstance(lease_ttl_ms=400)
        self.assertEqual((r.lease.ttl_ms, r.lease.grace_ms), (400, 100))
        d.wait_until(lambda: d.model().leased == 0, "the lease ends")
        self.assertGreater(time.monotonic() - begin, 0.4)
        self.assertEqual(d.model().standby, 1)
        self.driver(r, "x")  # an old token is nobody's
        self.assertTrue(alive(r.instance.pid))

    def test_driver_holds_the_lease_and_grace_follows(self):
        d = self.daemon("--standby=0", "--lease-grace=1500ms")
        r = d.client.SpawnInstance(lease_ttl_ms=1500)
        s = self.driver(r)
        time.sleep(2)
        self.assertTrue(d.client.ListInstances().instances[0].driver_connected)
        s.close()
        s = self.driver(r)  # taken up again within the grace
        time.sleep(2)
        self.assertEqual(d.model().leased, 1)
        s.close()
        d.wait_until(lambda: d.model().leased == 0, "the grace ends")

    def test_end_of_lease_drops_the_driver(self):
        d = self.daemon("--standby=0")
        r = d.client.SpawnInstance()
        s = self.driver(r)
        d.client.StopInstance(id=r.instance.id, keep_warm=True)
        self.assertEqual(s.recv(1), b"")
        self.assertEqual(d.model().standby, 1)

    def test_surplus_standbys_and_common_limit(self):
        d = self.daemon("--standby=3", "--standby-max=4")
        d.load()
        d.settled(standby=3)
        d.load("/fake/w1")
        d.settled("w1", standby=1)


class Memory(Base):
    LIMIT = "--memory-limit=1000MiB"

    def daemon(self, *options, **more):
        return super().daemon(self.LIMIT, "--kv-bytes=100MiB", *options, **more)

    def charged(self, d):
        s = d.client.GetStatus()
        return s.memory_weights + s.memory_instances + s.memory_reserved

    def test_too_large_is_refused_with_the_numbers(self):
        d = self.daemon("--standby=0")
        self.fails(CODE.RESOURCE_EXHAUSTED, lambda: d.client.LoadModel(path="/fake/w1200"),
                   r"model w1200: loading it needs 1200.0 MiB; the budget is 1000.0 MiB")
        d.load("/fake/w950")
        self.fails(CODE.RESOURCE_EXHAUSTED, lambda: d.client.SpawnInstance(model="w950"),
                   r"model w950: another instance needs 116.0 MiB.*memory_limit")
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


class Faults(Base):
    def test_fork_and_exec_fail(self):
        for fault in ("fork", "exec"):
            d = self.daemon(env={"EMBER_FAULT": f"{fault}:1"})
            self.fails(CODE.UNAVAILABLE, lambda: d.client.LoadModel(path=harness.TINY), "cannot")
            d.client.SpawnInstance()  # the next works
            d.stop()
            d = self.daemon("--standby=0", env={"EMBER_FAULT": f"{fault}:2"})
            d.client.SpawnInstance()  # the instance's first start fails, its second does not
            d.stop()

    def test_every_early_allocation_fails_once(self):
        for n in range(1, 25):
            d = self.daemon("--standby=1", env={"EMBER_FAULT": f"alloc:{n}"}, wait=False)
            d.wait_until(d.listens, "it listens or ends")
            if d.process.poll() is None:
                for _ in range(2):
                    d.client.future("SpawnInstance").exception()
                self.assertTrue(d.client.GetStatus().pid)
            self.assertIn(d.stop(), (0, 1), d.log_path)

    def test_missing_programs(self):
        d = self.daemon(env={"EMBER_LIBEXEC": "/nonexistent"})
        self.assertIn("not beside emberd", d.text())
        self.fails(CODE.UNAVAILABLE, lambda: d.client.SpawnInstance(), "EMBER_LIBEXEC")

    def test_out_of_descriptors(self):
        d = self.daemon("--standby=0")
        d.load()
        hard = resource.prlimit(d.process.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(d.process.pid, resource.RLIMIT_NOFILE, (len(d.fds()) + 14, hard))
        calls = [d.client.future("SpawnInstance") for _ in range(20)]
        codes = {c.code() for c in calls}
        self.assertIn(CODE.RESOURCE_EXHAUSTED, codes)
        self.assertTrue(codes <= {CODE.OK, CODE.RESOURCE_EXHAUSTED}, codes)
        resource.prlimit(d.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
        d.client.SpawnInstance()

    def test_garbage_and_vanishing_clients(self):
        d = self.daemon("--standby=1")
        d.load()
        d.settled()
        fds = len(d.fds())
        for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"PRI * HTTP/2.0\r\n",
                     b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(100), b""):
            s = socket.socket(socket.AF_UNIX)
            s.connect(d.socket)
            s.sendall(data)
            s.close()
        d.behave("instance", "slow 100")
        vanish = ("import os, sys, harness\n"
                  "c = harness.Client('unix:' + sys.argv[1])\n"
                  "calls = [c.future('SpawnInstance') for _ in range(5)]\n"
                  "calls += [c.WatchInstances(), c.LoadModel(path=harness.TINY)]\n"
                  "c.GetStatus()\n"
                  "os.kill(os.getpid(), 9)\n")
        for _ in range(3):
            subprocess.run([harness.sys.executable, "-c", vanish, d.socket],
                           cwd=os.path.dirname(os.path.abspath(__file__)))
        d.wait_until(lambda: not d.model().starting, "starts end")
        d.behave("instance")
        self.assertTrue(d.client.healthy(""))
        for i in d.client.ListInstances().instances:
            d.client.StopInstance(id=i.id)
        d.settled(standby=1)
        d.wait_until(lambda: len(d.fds()) <= fds, "descriptors are back")

    def test_no_descriptor_or_memory_leaks(self):
        d = self.daemon("--standby=1", "--log-level=warn")
        d.load()
        d.settled()

        def round_trip(n):
            for i in range(n):
                r = d.client.SpawnInstance()
                d.client.StopInstance(id=r.instance.id, keep_warm=i % 2 == 0)
            d.wait_until(
                lambda: d.model().starting == 0 and len(d.children()) == d.model().standby, "calm")
        round_trip(50)
        for i in d.client.ListInstances().instances[1:]:
            d.client.StopInstance(id=i.id)
        d.settled(standby=1)
        fds, rss = len(d.fds()), d.client.GetStatus().own_rss
        round_trip(200)
        for i in d.client.ListInstances().instances[1:]:
            d.client.StopInstance(id=i.id)
        d.settled(standby=1)
        self.assertEqual(len(d.fds()), fds)
        status = d.client.GetStatus()
        with open(harness.EMBERD, "rb") as f:
            sanitized = b"__asan_init" in f.read()
        if not sanitized:  # which keeps what has been freed for a while
            self.assertLess(status.own_rss - rss, 1 << 20)
            self.assertLess(status.own_rss, 20 << 20)
        self.assertEqual(len(d.sockets()), 1)
        print(f"own memory {status.own_rss / 1048576:.1f} MiB", end=" ")

    def test_children_inherit_nothing(self):
        d = self.daemon("--standby=1")
        d.load()
        d.settled()
        pid = d.client.ListInstances().instances[0].pid
        fds = {int(f): os.readlink(f"/proc/{pid}/fd/{f}") for f in os.listdir(f"/proc/{pid}/fd")}
        self.assertEqual(sorted(fds), [0, 1, 2, 3, 4, 5, 6])  # 4 to 6: weights, manifest, listener
        self.assertTrue(fds[1].startswith("pipe:") and fds[3].startswith("socket:"))
        with open(f"/proc/{pid}/status") as f:
            status = f.read()
        for mask in ("SigBlk", "SigIgn", "SigCgt"):
            value = int(re.search(rf"{mask}:\s+(\w+)", status).group(1), 16)
            self.assertEqual(value & 0xffffffff, 0, mask)


def answer_to_a_stranger(path, groups):
    """What a peer with a user and group of nobody's and these further groups reads: bytes; "" when
    it is turned away, None when the file's mode keeps it out. In a process of its own."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(groups)
            os.setgid(65534)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as s:
                s.settimeout(60)
                s.connect(path)
                s.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
                os.write(write, b"+" + s.recv(9))
        except (BrokenPipeError, ConnectionResetError):
            os.write(write, b"+")
        except PermissionError:
            os.write(write, b"-")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as f:
        said = f.read()
    os.waitpid(pid, 0)
    return said[1:] if said.startswith(b"+") else None


@unittest.skipUnless(os.geteuid() == 0, "only root can be somebody else")
class Strangers(Base):
    def test_who_is_served(self):
        """By the peer's groups as the kernel knows them, not by its primary group alone."""
        d = self.daemon("--standby=0")
        os.chmod(d.folder, 0o755)
        ours = os.getegid()
        self.assertIsNone(answer_to_a_stranger(d.socket, []))  # the mode
        self.assertEqual(len(answer_to_a_stranger(d.socket, [ours])), 9)
        self.assertEqual(len(answer_to_a_stranger(d.socket, [12345, 23456, ours])), 9)
        os.chmod(d.socket, 0o666)  # as if somebody had opened it: the daemon looks by itself
        self.assertEqual(answer_to_a_stranger(d.socket, []), b"")
        self.assertEqual(answer_to_a_stranger(d.socket, [12345]), b"")
        self.assertEqual(len(answer_to_a_stranger(d.socket, [12345, ours])), 9)
        d.client.ListModels()


class Ends(Base):
    def test_term_leaves_nothing(self):
        d = self.daemon("--standby=3")
        r = d.client.SpawnInstance()
        d.settled()
        events = d.client.WatchInstances()
        d.wait_until(lambda: len(d.children()) == 4, "four children")
        pids = d.children()
        self.assertTrue(r.instance.id)
        folder, d.own_folder = d.folder, False
        self.assertEqual(d.stop(), 0)
        self.assertFalse(any(alive(p) for p in pids))
        self.assertEqual(d.sockets(), [])
        self.assertFalse(os.path.exists(d.socket))
        harness.shutil.rmtree(folder)

    def test_drain_lets_drivers_finish_and_second_signal_does_not(self):
        for second in (False, True):
            d = self.daemon("--standby=0")
            r = d.client.SpawnInstance()
            s = Spawning.driver(self, r)
            d.process.send_signal(signal.SIGTERM)
            d.wait_until(lambda: not d.client.healthy(""), "NOT_SERVING")
            self.fails(CODE.UNAVAILABLE, lambda: d.client.SpawnInstance(), "shutting down")
            time.sleep(0.2)
            self.assertTrue(alive(r.instance.pid))
            if second:
                d.process.send_signal(signal.SIGTERM)
            else:
                d.client.StopInstance(id=r.instance.id)
            self.assertEqual(d.process.wait(60), 0)
            d.stop()

    def test_kill_leaves_no_process_and_the_next_start_works(self):
        d = self.daemon("--standby=2")
        d.load()
        d.settled()
        d.behave("loader", "hang")
        d.client.LoadModel(path="/fake/w1")
        d.wait_until(lambda: len(d.children()) == 3, "a loader runs too")
        pids = d.children()
        d.own_folder = False
        d.stop(signal.SIGKILL)
        d.wait_until(lambda: not any(alive(p) for p in pids), "the children die too")
        self.assertEqual(len(d.sockets()), 2)
        with open(f"{d.control}/loader", "w"):
            pass
        again = self.daemon("--standby=1", folder=d.folder)
        self.assertEqual(again.sockets(), [])
        again.client.SpawnInstance()
        again.own_folder = True

    def test_second_daemon_is_refused(self):
        d = self.daemon()
        second = subprocess.run(
            [harness.EMBERD, f"--runtime-dir={d.run_dir}", f"--socket={d.folder}/other.sock"],
            capture_output=True, text=True, timeout=60)
        self.assertEqual(second.returncode, 1)
        self.assertIn(f"another emberd (pid {d.process.pid}) runs in {d.run_dir}", second.stderr)
        self.assertTrue(d.client.healthy(""))

    def test_bad_options(self):
        for option, text in (("--runtime-dir=" + "/x" * 60, "at most 70 bytes"),
                             ("--no-such-option=1", "no-such-option"),
                             ("--listen=nonsense", "host:port"),
                             ("--listen=0.0.0.0:0", "loopback")):
            run = subprocess.run([harness.EMBERD, "--runtime-dir=/tmp/ember-bad-options",
                                  "--socket=/tmp/ember-bad-options/s", option],
                                 capture_output=True, text=True, timeout=60)
            self.assertNotEqual(run.returncode, 0)
            self.assertIn(text, run.stderr)
        harness.shutil.rmtree("/tmp/ember-bad-options", ignore_errors=True)

    def test_loopback_tcp(self):
        d = self.daemon("--listen=127.0.0.1:0")
        listening = re.compile(r"listening address=127.0.0.1:(\d+)\D")
        d.wait_until(lambda: listening.search(d.text()), "it listens there, too")
        port = listening.search(d.text()).group(1)
        c = harness.Client(f"127.0.0.1:{port}")
        self.assertEqual(c.GetStatus().pid, d.process.pid)
        c.close()

    def test_reload(self):
        d = self.daemon(wait=False)
        d.stop()
        folder = harness.tempfile.mkdtemp(prefix="ember-test-")
        conf = f"{folder}/emberd.conf"
        with open(conf, "w") as f:
            f.write("[pool]\nstandby = 1\n")
        d = self.daemon(f"--config={conf}", folder=folder)
        d.load()
        d.settled(standby=1)
        with open(conf, "w") as f:
            f.write("[pool]\nstandby = 3\n")
        d.process.send_signal(signal.SIGHUP)
        d.settled(standby=3)
        with open(conf, "w") as f:
            f.write("[pool]\nstandby = many\n")
        d.process.send_signal(signal.SIGHUP)
        d.wait_until(lambda: "not reloaded" in d.text(), "the error is logged")
        self.assertEqual(d.model().standby_target, 3)
        d.own_folder = True


class Systemd(Base):
    def notify(self, read=True):
        folder = harness.tempfile.mkdtemp(prefix="ember-test-")
        self.addCleanup(harness.shutil.rmtree, folder, True)
        n = NotifySocket(f"{folder}/notify", read)
        self.addCleanup(n.close)
        return n

    def test_notifications(self):
        n = self.notify()
        d = self.daemon(notify=n, env={"WATCHDOG_USEC": "300000"})
        d.load()
        d.settled()
        d.wait_until(lambda: {"READY", "STATUS", "WATCHDOG", "FDSTORE"} <= n.seen, "all is told")
        n.settled(3)
        names = sorted(name.rsplit("-", 1)[1] for name, _ in n.stored)
        self.assertEqual(names, ["manifest", "record", "weights"])
        d.client.UnloadModel(name="ember-tiny")
        n.settled(0)
        d.stop()
        d.wait_until(lambda: "STOPPING" in n.seen, "STOPPING")

    def test_a_systemd_that_does_not_read_is_not_waited_for(self):
        n = self.notify(read=False)
        d = self.daemon("--standby=1", notify=n)
        for name in ("a", "b", "c", "d", "e", "f"):
            d.load(name=name)
            d.client.SpawnInstance(model=name)
        d.client.UnloadModel(name="f", force=True)
        d.settled("a")
        n.thread.start()
        d.wait_until(lambda: len(n.stored) == 15, "everything arrives, in order")

    def test_restart_takes_weights_up_again(self):
        n = self.notify()
        d = self.daemon("--standby=1", notify=n)
        d.load(name="mine", standby=2, kv_bytes=50 << 20, kv_type="int8")
        d.settled("mine", standby=2)
        d.load()
        before = {m.name: m for m in d.client.ListModels().models}
        n.settled(6)
        d.stop(signal.SIGKILL)

        again = self.daemon("--standby=1", notify=n, pass_fds=n.stored)
        again.settled("mine", standby=2)
        after = {m.name: m for m in again.client.ListModels().models}
        for name in ("mine", "ember-tiny"):
            for field in ("path", "architecture", "weights_bytes", "parameters", "vocab_size",
                          "max_positions", "standby_target", "load_ms", "kv_type"):
                self.assertEqual(getattr(before[name], field), getattr(after[name], field), field)
        self.assertEqual(again.client.GetStatus().loads, 0)
        self.assertEqual((after["mine"].kv_type, after["ember-tiny"].kv_type), ("int8", "auto"))
        r = again.client.SpawnInstance(model="mine")
        self.assertEqual(r.instance.bytes, (50 << 20) + (1 << 20))
        again.client.UnloadModel(name="mine", force=True)
        n.settled(3)

    def test_pair_without_record_and_damage(self):
        n = self.notify()
        d = self.daemon(notify=n, default_model="")
        d.load(name="ember-tiny")
        d.load(name="b")
        n.settled(6)
        d.stop(signal.SIGKILL)
        pair = [s for s in n.stored if not s[0].endswith("record")]
        one, two = pair[:2], pair[2:]
        swapped = [(two[0][0], two[1][1]), (two[1][0], two[0][1])]  # weights are no manifest
        strange = os.memfd_create("strange")
        again = self.daemon(notify=n, pass_fds=one + swapped + [("ember-x", strange)],
                            default_model="")
        self.assertEqual([(m.name, m.warmth >= pb.PARKED) for m in again.client.ListModels().models],
                         [("ember-tiny", True)])
        self.assertIn("stored weights dropped", again.text())
        self.assertIn("not known", again.text())
        os.close(strange)

    def test_socket_activation(self):
        folder = harness.tempfile.mkdtemp(prefix="ember-test-")
        self.addCleanup(harness.shutil.rmtree, folder, True)
        s = socket.socket(socket.AF_UNIX)
        self.addCleanup(s.close)
        s.bind(f"{folder}/emberd.sock")
        s.listen(10)
        d = self.daemon(pass_fds=[("emberd.socket", s.fileno())], folder=folder)
        self.assertEqual(d.client.GetStatus().pid, d.process.pid)

    def test_start_is_quick(self):
        d = self.daemon()
        d.client.GetStatus()
        ready = re.compile(r"emberd: ready .* ms=([0-9.]+)\n")
        d.wait_until(lambda: ready.search(d.text()), "it says so")
        ms = float(ready.search(d.text()).group(1))
        with open(f"/proc/{d.process.pid}/schedstat") as f:
            cpu = int(f.read().split()[0]) / 1e6
        self.assertLess(cpu, 100)  # whatever else the machine does
        print(f"start {ms} ms, {cpu:.1f} ms of CPU", end=" ")


class Chaos(Base):
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
