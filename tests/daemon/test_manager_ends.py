# SPDX-License-Identifier: Apache-2.0
"""Signals, shutdown, and what is left behind."""
import os
import re
import signal
import subprocess
import time
import unittest

import harness
from harness import alive, grpc

CODE = grpc.StatusCode


class Ends(harness.Case):
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
            s = self.fake_driver(r)
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

    def test_health_says_that_it_drains(self):
        """grpc.health.v1, asked and watched, as long as somebody is still being served and not longer."""
        d = self.daemon("--standby=0")
        r = d.client.SpawnInstance()
        driver = self.fake_driver(r)
        services = ("", "ember.v1.Ember", "ready")
        watches = {name: d.client.watch_health(name) for name in services}
        for name, watch in watches.items():
            self.assertEqual(next(watch).status, 1, name)
            self.assertTrue(d.client.healthy(name))
        d.process.send_signal(signal.SIGTERM)
        for name, watch in watches.items():
            self.assertEqual(next(watch).status, 2, name)
            self.assertFalse(d.client.healthy(name))
        self.assertTrue(d.client.healthy("startup"))  # it had started: nobody is to kill it for that
        self.assertTrue(alive(r.instance.pid))
        d.client.StopInstance(id=r.instance.id)
        for watch in watches.values():
            self.fails(CODE.UNAVAILABLE, lambda watch=watch: next(watch), "shutting down")
        self.assertEqual(d.process.wait(60), 0)
        driver.close()

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
                             ("--listen=0.0.0.0:0", "listen: 0.0.0.0 is not a loopback"),
                             ("--gateway-listen=nonsense", 'gateway_listen: "nonsense"'),
                             ("--gateway-listen=127.0.0.1:65536", "write host:port")):
            run = subprocess.run([harness.EMBERD, "--runtime-dir=/tmp/ember-bad-options",
                                  "--socket=/tmp/ember-bad-options/s", option],
                                 capture_output=True, text=True, timeout=60)
            self.assertNotEqual(run.returncode, 0)
            self.assertIn(text, run.stderr)
            self.assertNotIn("[warn]", run.stderr)  # a word of libevent's own
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


if __name__ == "__main__":
    unittest.main(verbosity=2)
