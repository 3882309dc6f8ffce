# SPDX-License-Identifier: Apache-2.0
"""Attacks from within: a bad cache, processes that die at any moment, a storm of both."""
import os
import random
import shutil
import signal
import subprocess
import threading
import time
import unittest

from attack import CASES, CODE, GOLDEN, SANITIZED, Attack, Driver, write_text
from harness import TINY, alive, grpc


SLOW_CC = """#!/bin/sh
echo $$ >> {marks}
case "$*" in *--version*|*-dumpmachine*) ;; *) sleep {seconds};; esac
exec cc "$@"
"""


class Cache(Attack):
    def daemon(self, *options, **more):
        return super().daemon(*options, cold=True, **more)

    def compiled(self, spawned):
        return spawned.instance.kernels_compiled

    def test_two_daemons_with_one_cold_cache(self):
        """Both start at once: each kernel is built by one of them, both give the right tokens."""
        alone = self.daemon("--standby=0", "--log-level=warn")
        wanted = self.compiled(self.serves(alone))
        alone.stop()
        self.assertGreater(wanted, 0)
        cache = self.folder() + "/cache"
        both = [self.daemon("--standby=0", "--log-level=warn", f"--cache-dir={cache}", wait=False)
                for _ in range(2)]
        calls = [d.client.future("SpawnInstance") for d in both for _ in range(2)]
        got = [c.result() for c in calls]
        self.assertEqual(sum(self.compiled(g) for g in got), wanted)
        for spawned in got:
            self.assertEqual(Driver(spawned).case(CASES[0]), CASES[0]["greedy_ids"])
        self.end_drivers()

    def test_builder_killed_in_mid_compile(self):
        """Who waits for the dead builder takes over; its compiler does not go on without it."""
        folder = self.folder()
        cc, marks = f"{folder}/cc", f"{folder}/marks"
        with open(cc, "w") as f:
            f.write(SLOW_CC.format(marks=marks, seconds=1))
        os.chmod(cc, 0o755)
        d = self.daemon("--standby=0", f"--cc={cc}", "--log-level=warn")
        d.load()
        calls = [d.client.future("SpawnInstance") for _ in range(3)]
        sleepers = []

        def compiling():
            sleepers[:] = [p for p in descendants(d.process.pid) if name_of(p) == "sleep"]
            return sleepers
        d.wait_until(compiling, "a compile is under way")
        builder = next(i.pid for i in d.client.ListInstances().instances
                       if sleepers[0] in descendants(i.pid))
        os.kill(builder, signal.SIGKILL)
        got = [c.result() for c in calls]  # the pool starts another for the one that died
        self.assertEqual(len({g.instance.id for g in got}), 3)
        d.wait_until(lambda: not any(alive(p) for p in sleepers), "its compiler is gone")
        self.assertEqual(d.client.GetStatus().instances_lost, 1)
        for spawned in got:
            self.assertEqual(Driver(spawned).case(CASES[0]), CASES[0]["greedy_ids"])
        self.end_drivers()

    def test_builder_that_dies_before_it_stores(self):
        d = self.daemon("--standby=0", env={"EMBER_FAULT": "compile-mid:1=kill"})
        self.fails(CODE.UNAVAILABLE, d.client.SpawnInstance, "signal 9")
        self.assertTrue(d.client.healthy(""))
        self.assertEqual(d.client.GetStatus().leased, 0)

    def test_compiler_that_fails_or_is_none(self):
        for cc in ("/bin/false", "/nonexistent/cc", "/etc/passwd", ";rm -rf x"):
            d = self.daemon("--standby=0", f"--cc={cc}")
            self.assertEqual(self.compiled(self.serves(d)), 0, cc)
            d.stop()

    def tokens_in(self, folder, *options, **more):
        """A daemon over this folder's cache: what its instance had to compile, the daemon's log."""
        d = self.daemon("--standby=0", *options, folder=folder, **more)
        n = self.compiled(self.serves(d))
        d.stop()
        return n, d.text()

    def test_bits_flipped_and_bytes_cut_in_the_store(self):
        folder = self.folder()
        first, _ = self.tokens_in(folder)
        self.assertGreater(first, 0)
        self.assertEqual(self.tokens_in(folder)[0], 0)
        file, r = f"{folder}/cache/store.mdb", random.Random(1)
        with open(file, "rb") as f:
            sound = f.read()
        for round_ in range(3):
            data = bytearray(sound)
            if round_ == 0:  # every record's payload
                at = data.find(b"\x7fELF")
                while at >= 0:
                    data[at + 64] ^= 1
                    at = data.find(b"\x7fELF", at + 4)
            elif round_ == 1:
                del data[len(data) // 2:]
            else:
                for _ in range(200):
                    data[r.randrange(8192, len(data))] ^= 1 << r.randrange(8)
            with open(file, "wb") as f:
                f.write(data)
            with self.subTest(round_):
                n, _ = self.tokens_in(folder)
                if round_ == 0:
                    self.assertEqual(n, first)  # each is rebuilt once
                    self.assertEqual(self.tokens_in(folder)[0], 0)

    def test_smallest_cache(self):
        folder = self.folder()
        for _ in range(2):
            _, log = self.tokens_in(folder, "--cache-limit=1MiB")
            self.assertNotRegex(log, "<3>")
        self.assertLess(os.stat(f"{folder}/cache/store.mdb").st_size, 2 << 20)

    def test_write_transactions_fail(self):
        for fault in ("cache-put:0", "cache-full:0"):
            self.tokens_in(self.folder(), env={"EMBER_FAULT": fault})

    def test_disk_full(self):
        folder = self.folder()
        os.mkdir(f"{folder}/cache")
        mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k,mode=0700", "none",
                                f"{folder}/cache"], capture_output=True)
        if mount.returncode:
            self.skipTest("mounting a small tmpfs needs root: " + mount.stderr.decode().strip())
        self.addCleanup(subprocess.run, ["umount", "-l", f"{folder}/cache"])
        self.assertGreater(self.tokens_in(folder)[0], 0)
        subprocess.run(["mount", "-o", "remount,size=64m", f"{folder}/cache"], check=True)
        self.tokens_in(folder)
        self.assertEqual(self.tokens_in(folder)[0], 0)  # what found no room has been stored
        subprocess.run(["mount", "-o", "remount,ro", f"{folder}/cache"], check=True)
        self.tokens_in(folder)

    def test_no_usable_cache_folder(self):
        for what, make in (("a file", write_text("x")),
                           ("a dangling link", lambda p: os.symlink("/nonexistent/x", p)),
                           ("others may write", lambda p: (os.mkdir(p), os.chmod(p, 0o777))),
                           ("a lock that is a folder", lambda p: os.makedirs(f"{p}/lock")),
                           ("a store that is a folder", lambda p: os.makedirs(f"{p}/store.mdb")),
                           ("a store that is a FIFO", lambda p: (os.mkdir(p, 0o700),
                                                                os.mkfifo(f"{p}/store.mdb")))):
            folder = self.folder()
            make(f"{folder}/cache")
            with self.subTest(what):
                _, log = self.tokens_in(folder, "--compile=never")
                self.assertIn("going on without the cache", log)


# ---- backends and options ----


def name_of(pid):
    try:
        with open(f"/proc/{pid}/comm") as f:
            return f.read().strip()
    except OSError:
        return ""


def descendants(pid):
    found, ask = [], [pid]
    while ask:
        p = ask.pop()
        try:
            with open(f"/proc/{p}/task/{p}/children") as f:
                children = [int(c) for c in f.read().split()]
        except OSError:
            continue
        found += children
        ask += children
    return found


class Deaths(Attack):
    def test_daemon_killed_at_any_moment(self):
        """Cold start, load, compile, spawn, steps: whenever it dies, nothing is left of it."""
        folder, shm, r = self.folder(), set(os.listdir("/dev/shm")), random.Random(7)
        for i in range(14):
            if i % 5 == 0:
                shutil.rmtree(f"{folder}/cache", True)
            d = self.daemon("--standby=2", "--log-level=warn", cold=True, folder=folder, wait=False)
            calls = [d.client.future("SpawnInstance") for _ in range(2)]
            time.sleep(r.random() ** 2 * 0.8)
            family = descendants(d.process.pid)
            d.process.kill()
            d.process.wait()
            d.wait_until(lambda: not any(alive(p) for p in family), "its children are gone")
            for c in calls:  # grpcio would wait for the daemon to come back
                c.cancel()
            d.stop()
        self.assertEqual(set(os.listdir("/dev/shm")), shm)
        d = self.daemon(cold=True, folder=folder)
        self.serves(d)
        self.nothing_left(d)

    def test_instances_killed_idle_and_generating(self):
        d = self.daemon("--standby=2", "--log-level=error", "--max-burst=4")
        d.load()
        d.settled()
        for i in d.client.ListInstances().instances:
            os.kill(i.pid, signal.SIGKILL)
        d.wait_until(lambda: d.client.GetStatus().instances_lost == 2, "both are missed")
        spawned = d.client.SpawnInstance()
        driver = Driver(spawned)
        timer = threading.Timer(0.05, os.kill, (spawned.instance.pid, signal.SIGKILL))
        timer.start()
        with self.assertRaises(OSError):
            while True:
                driver.case(CASES[0])
        timer.join()
        self.serves(d)
        d.wait_until(lambda: d.client.GetStatus().instances_lost == 3, "the losses are counted")
        d.settled()
        self.nothing_left(d)

    def test_loader_killed_in_mid_load(self):
        d = self.daemon("--standby=0", "--log-level=error", env={"EMBER_FAULT": "load-mid:4=kill"})
        d.client.GetStatus()
        fds = len(d.fds())
        for _ in range(3):
            self.fails(CODE.UNAVAILABLE, lambda: d.client.LoadModel(path=TINY), "signal 9")
        self.nothing_left(d, fds)

    def test_faults_of_every_kind_in_the_children(self):
        """Each fault fails its passage in every process that comes by: an error, not an end."""
        for fault, passages in (("read", (1, 2)), ("write", (1, 3)), ("mmap", (1, 2, 4)),
                                ("fd", (1, 2, 3)), ("alloc", (1, 3, 9, 27, 81)), ("canary", (1,)),
                                ("compile", (1,)), ("fork", (1, 2)), ("exec", (1, 2))):
            for n in passages:
                d = self.daemon("--standby=0", "--log-level=error", "--spawn-timeout=20s",
                                cold=fault == "compile", wait=False,
                                env={"EMBER_FAULT": f"{fault}:{n}"})
                with self.subTest(f"{fault}:{n}"):
                    d.wait_until(d.listens, "it listens or ends")
                    for _ in range(2):
                        error = d.client.future("SpawnInstance").exception()
                        if error:
                            self.assertIn(error.code(), (CODE.UNAVAILABLE, CODE.DATA_LOSS,
                                                         CODE.INVALID_ARGUMENT,
                                                         CODE.RESOURCE_EXHAUSTED), error.details())
                            self.assertNotIn("signal", error.details())
                    if d.process.poll() is None:
                        self.assertTrue(d.client.healthy(""))
                    self.assertIn(d.stop(), (0, 1))


# ---- everything at once ----

class Storm(Attack):
    def test_storm(self):
        """Loads, spawns, cancels, kills and unloads of real models at random, then peace."""
        seconds = float(os.environ.get("STORM_SECONDS", "4"))
        r = random.Random(3)
        d = self.daemon("--standby=1", "--memory-limit=900MiB", "--kv-bytes=8MiB", "--max-burst=3",
                        "--lease-grace=100ms", "--log-level=error", "--shutdown-timeout=0")
        other = self.folder() + "/other"
        os.symlink(GOLDEN, other)
        paths = {"ember-tiny": TINY, "other": other}
        for path in paths.values():
            d.load(path)

        def calm():
            for i in d.client.ListInstances().instances:
                try:
                    d.client.StopInstance(id=i.id)
                except grpc.RpcError:
                    pass
            self.nothing_left(d)
            for path in paths.values():  # each unloaded twice would be forgotten
                d.load(path)
            self.nothing_left(d)
            return len(d.fds()), d.client.GetStatus().own_rss

        fds, memory = calm()
        calls, streams, held = [], [], []

        def spawn():
            calls.append(d.client.future("SpawnInstance", model=r.choice(list(paths)),
                                         timeout=r.choice([0.01, 0.1, 20]),
                                         lease_ttl_ms=r.choice([100, 5000])))

        def stop():
            for call in calls[-20:]:
                if call.done() and call.code() == CODE.OK:
                    held.append(call.result().instance)
            if held:
                d.client.future("StopInstance", id=held.pop().id, keep_warm=r.random() < 0.5)

        def drive():
            for call in calls[-5:]:
                if call.done() and call.code() == CODE.OK:
                    try:
                        Driver(call.result()).run([1, 2, 3], 0, 3)
                    except OSError:
                        pass

        def kill():
            d.kill_one(r.choice)

        def load():
            streams.append(d.client.LoadModel(path=r.choice(list(paths.values()))))
            if r.random() < 0.5:
                streams.pop().cancel()

        def unload():
            name = r.choice(list(paths))
            d.client.future("UnloadModel", name=name, force=r.random() < 0.5)
            streams.append(d.client.LoadModel(path=paths[name]))
        acts = [spawn] * 8 + [stop] * 4 + [drive, drive, kill, load, unload,
                                           lambda: calls and r.choice(calls).cancel()]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            r.choice(acts)()
            time.sleep(r.random() * 0.02)
        for stream in streams:
            try:
                list(stream)
            except grpc.RpcError as error:
                self.assertNotEqual(error.code(), CODE.DEADLINE_EXCEEDED)
        d.wait_until(lambda: all(c.done() for c in calls), "every call ends")
        codes = {c.code() for c in calls}
        self.assertTrue(codes <= {CODE.OK, CODE.CANCELLED, CODE.DEADLINE_EXCEEDED, CODE.NOT_FOUND,
                                  CODE.UNAVAILABLE, CODE.RESOURCE_EXHAUSTED}, codes)
        self.assertIn(CODE.OK, codes)
        self.end_drivers()
        after = calm()
        self.assertLessEqual(after[0], fds)
        if not SANITIZED:
            self.assertLess(after[1] - memory, 2 << 20)
        self.assertEqual(descendants(d.process.pid), [])  # a zombie would be one
        self.serves(d)


if __name__ == "__main__":
    unittest.main(verbosity=2)
