# SPDX-License-Identifier: Apache-2.0
"""The gateway as emberd runs it, TLS, the fleet's rules and the figures."""
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import unittest

import gateway
from gateway import Emberd, Http, Stack, together, wait_until

STORY = "Once upon a time there was a king who had"
CTL = os.path.join(os.path.dirname(os.path.dirname(gateway.EMBERD)), "cli", "emberctl")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class Whole(Http):
    """An emberd that runs its gateway."""

    def __init__(self, *options, folder=None, port=0):
        self.folder = folder or tempfile.mkdtemp(prefix="ember-gw-")
        self.emberd = Emberd(self.folder, "--log-level=debug",
                             f"--gateway-listen=127.0.0.1:{port}", *options, gateway="--gateway")
        wait_until(lambda: os.path.exists(self.emberd.socket), "emberd listens")
        self.port = port

    def status(self):
        done = subprocess.run([CTL, "status", "--json"], stdout=subprocess.PIPE, text=True,
                              env=dict(os.environ, EMBER_SOCKET=self.emberd.socket), check=True)
        return json.loads(done.stdout)

    def serving(self):
        def look():
            g = self.status()["gateway"]
            self.port = int(g["listen"].rsplit(":", 1)[1])
            return g if g["state"] == "serving" else None
        found = wait_until(look, "the gateway serves")
        wait_until(lambda: self.get("/health")[0] == 200, "it is healthy")
        return found

    def stop(self):
        code = self.emberd.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        return code


class Managed(unittest.TestCase):
    def whole(self, *options, **more):
        whole = Whole(*options, **more)
        self.addCleanup(lambda: whole.emberd.process.poll() is None and whole.stop())
        return whole

    def test_emberd_answers_openai_clients(self):
        w = self.whole()
        gateway_pid = w.serving()["pid"]
        self.assertEqual(w.complete(STORY, max_tokens=3)["usage"]["completion_tokens"], 3)
        self.assertIn(gateway_pid, w.emberd.children())
        self.assertEqual(w.stop(), 0)
        self.assertFalse(alive(gateway_pid))

    def test_killed_it_comes_back_and_reloads_nothing(self):
        w = self.whole()
        before = w.serving()
        text = w.complete(STORY, max_tokens=8)["choices"]
        status = w.status()
        instances = sorted(w.emberd.instances())
        os.kill(before["pid"], signal.SIGKILL)
        # Asked at once: the connection waits in the socket that emberd holds.
        self.assertEqual(w.complete(STORY, max_tokens=8)["choices"], text)
        after = w.serving()
        self.assertNotEqual(after["pid"], before["pid"])
        self.assertEqual(after["restarts"], 1)
        for same in ("spawns", "loads", "instances_lost"):
            self.assertEqual(w.status()[same], status[same], same)
        self.assertEqual(w.metric("ember_taken_up_total"), 1)
        self.assertLessEqual(set(instances), set(w.emberd.instances()))

    def test_killed_again_and_again(self):
        w = self.whole()
        for turn in range(4):
            pid = w.serving()["pid"]
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: w.status()["gateway"]["pid"] not in (0, pid), "another one")
        self.assertEqual(w.serving()["restarts"], 4)
        self.assertEqual(w.get("/ping")[0], 200)

    def test_a_port_that_is_taken(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            s.listen()
            w = self.whole(port=s.getsockname()[1])
            wait_until(lambda: "is in use by another program" in w.status()["gateway"]["error"],
                       "it is said")
            self.assertEqual(w.status()["gateway"]["state"], "waiting")
            time.sleep(1)
            self.assertEqual(w.emberd.text().count("is in use by another program"), 1)
        w.serving()  # once it is free
        self.assertEqual(w.status()["gateway"]["error"], "")

    def test_options_that_are_wrong(self):
        w = self.whole("--gateway-options=--max-queue=none")
        wait_until(lambda: "max_queue" in w.status()["gateway"]["error"], "its words are kept")
        w.status()

    def test_no_gateway(self):
        w = self.whole("--no-gateway")
        self.assertEqual(w.status()["gateway"]["state"], "off")

    def test_emberd_drains_the_gateway_first(self):
        w = self.whole()
        w.serving()
        w.complete("x", max_tokens=1)
        chunks = w.stream("/v1/completions", prompt=STORY, temperature=0, max_tokens=400,
                          ignore_eos=True, stream_options={"include_usage": True})
        next(chunks)
        w.emberd.process.send_signal(signal.SIGTERM)
        wait_until(lambda: w.get("/health")[0] == 503, "health says so")
        status, headers, reply = w.request("POST", "/v1/completions", {"prompt": "x"})
        self.assertEqual((status, reply["error"]["code"]), (503, "shutting_down"))
        self.assertGreaterEqual(int(headers["Retry-After"]), 1)
        rest = list(chunks)
        self.assertEqual(rest[-1], "[DONE]")
        self.assertEqual(rest[-2]["usage"]["completion_tokens"], 400)
        self.assertEqual(w.emberd.process.wait(10), 0)
        w.stop()

    def test_emberd_killed_takes_the_gateway_along(self):
        w = self.whole()
        pid = w.serving()["pid"]
        w.emberd.process.kill()
        w.emberd.process.wait()
        wait_until(lambda: not alive(pid), "it has gone")

    def test_reload_reaches_the_gateway(self):
        folder = tempfile.mkdtemp(prefix="ember-gw-")
        keys = f"{folder}/keys"
        with open(keys, "w") as f:
            f.write("one\n")
        w = self.whole(f"--gateway-options=--api-keys={keys}", folder=folder)
        w.serving()

        def code(key):
            return w.get("/v1/models", headers={"Authorization": f"Bearer {key}"})[0]
        self.assertEqual([code("one"), code("two")], [200, 401])
        with open(keys, "w") as f:
            f.write("two\n")
        w.emberd.process.send_signal(signal.SIGHUP)
        wait_until(lambda: code("two") == 200, "the new key is known")
        self.assertEqual(code("one"), 401)
        os.unlink(keys)
        w.emberd.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "configuration not reloaded" in w.emberd.text(), "it is said")
        self.assertEqual(code("two"), 200)

    def test_standing_alone_over_tcp(self):
        port = free_port()
        stack = Stack(emberd=(f"--listen=127.0.0.1:{port}",))
        try:
            stack.gateway.stop()
            stack.gateway = gateway.Gateway(stack.folder, f"127.0.0.1:{port}")
            stack.settle()
            self.assertEqual(stack.gateway.complete("x", max_tokens=2)["usage"]
                             ["completion_tokens"], 2)
        finally:
            stack.stop()


@unittest.skipUnless(shutil.which("openssl"), "openssl is not installed")
class Tls(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="ember-tls-")
        cls.cert, cls.key = f"{cls.folder}/cert.pem", f"{cls.folder}/key.pem"
        cls.make("first")
        cls.stack = Stack(f"--tls-certificate={cls.cert}", f"--tls-key={cls.key}",
                          "--request-timeout=2s", "--max-body=64KiB", "--reader-backlog=16KiB")

    @classmethod
    def tearDownClass(cls):
        cls.stack.stop()
        shutil.rmtree(cls.folder)

    @classmethod
    def make(cls, name):
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                        "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", cls.key, "-out",
                        cls.cert, "-days", "2", "-subj", f"/CN={name}",
                        "-addext", "subjectAltName=IP:127.0.0.1"],
                       check=True, stderr=subprocess.DEVNULL)

    @property
    def g(self):
        return self.stack.gateway

    def name(self):
        """The CN that the server shows."""
        pem = ssl.get_server_certificate(("127.0.0.1", self.g.port))
        done = subprocess.run(["openssl", "x509", "-noout", "-subject"], input=pem, text=True,
                              stdout=subprocess.PIPE, check=True)
        return done.stdout.rsplit("=", 1)[1].strip()

    def test_requests_and_streams(self):
        whole = self.g.complete(STORY, max_tokens=12)["choices"][0]["text"]
        self.assertEqual(self.g.stream_text(STORY, max_tokens=12)[0], whole)

    def test_many_at_once(self):
        texts = together([lambda: self.g.stream_text(STORY, max_tokens=20)] * 24)
        self.assertEqual(len(set(texts)), 1)

    def test_old_versions_and_plain_http_are_refused(self):
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        with socket.create_connection(("127.0.0.1", self.g.port)) as s:
            self.assertRaises((ssl.SSLError, ConnectionError), old.wrap_socket, s)
        with socket.create_connection(("127.0.0.1", self.g.port)) as s:
            s.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
            s.settimeout(5)
            try:
                self.assertNotIn(b"HTTP/", s.recv(4096))
            except ConnectionError:
                pass

    def test_limits(self):
        status, _, reply = self.g.request("POST", "/v1/completions", b"x" * 100000)
        self.assertEqual((status, reply["error"]["code"]), (413, "request_too_large"))

    def test_a_client_that_drips_is_dropped(self):
        with self.g.tls.wrap_socket(socket.create_connection(("127.0.0.1", self.g.port))) as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
            began = time.monotonic()
            try:
                while time.monotonic() - began < 20:
                    s.sendall(b"A: b\r\n")
                    time.sleep(0.1)
                self.fail("it is still listened to")
            except OSError:
                pass
        self.assertEqual(self.g.get("/ping")[0], 200)

    def test_a_client_that_leaves(self):
        c = self.g.connect()
        c.request("POST", "/v1/completions", json.dumps(
            {"prompt": STORY, "max_tokens": 1900, "ignore_eos": True, "stream": True}))
        c.getresponse().readline()
        c.sock.shutdown(socket.SHUT_RDWR)
        c.close()
        wait_until(lambda: self.g.metric("vllm:num_requests_running") == 0, "it is given up", 5)

    def test_zz_new_certificates_by_a_reload(self):
        self.assertEqual(self.name(), "first")
        c = self.g.connect()
        c.request("GET", "/ping")
        c.getresponse().read()
        self.make("second")
        self.g.process.send_signal(signal.SIGHUP)
        wait_until(lambda: self.name() == "second", "the new one is shown")
        c.request("GET", "/ping")  # connections live on
        self.assertEqual(c.getresponse().status, 200)
        c.close()
        with open(self.cert, "w") as f:
            f.write("nonsense")
        self.g.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "tls_certificate" in self.g.text(), "it is said")
        self.assertEqual(self.name(), "second")

    def test_pairs_that_do_not_fit(self):
        other = f"{self.folder}/other.pem"
        subprocess.run(["openssl", "genpkey", "-algorithm", "ec", "-pkeyopt",
                        "ec_paramgen_curve:prime256v1", "-out", other], check=True,
                       stderr=subprocess.DEVNULL)
        for options, text in ((("--tls-key=" + other,), "tls_certificate is missing"),
                              (("--tls-key=" + other, "--tls-certificate=" + self.cert), "tls_"),
                              (("--tls-key=/nowhere", "--tls-certificate=" + self.cert),
                               "tls_")):
            done = subprocess.run([gateway.GATEWAY, "--listen=127.0.0.1:0", "--state-file=",
                                   "--emberd=/nowhere", *options], stderr=subprocess.PIPE,
                                  text=True, timeout=20)
            self.assertEqual(done.returncode, 1)
            self.assertIn(text, done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
