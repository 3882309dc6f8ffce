# SPDX-License-Identifier: Apache-2.0
"""Faults of the system and of children that misbehave."""
import os
import re
import resource
import socket
import subprocess
import unittest

import harness
from harness import grpc

CODE = grpc.StatusCode


class Faults(harness.Case):
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


if __name__ == "__main__":
    unittest.main(verbosity=2)
