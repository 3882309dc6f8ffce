# SPDX-License-Identifier: Apache-2.0
"""Notification, fd store, socket activation, watchdog."""
import os
import re
import signal
import socket
import unittest

import harness
from harness import NotifySocket, pb


class Systemd(harness.Case):
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


if __name__ == "__main__":
    unittest.main(verbosity=2)
