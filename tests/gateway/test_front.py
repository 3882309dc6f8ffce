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

try:
    from prometheus_client.parser import text_string_to_metric_families as prometheus
except ImportError:
    prometheus = None

import gateway
from gateway import Emberd, Http, Stack, drip, together, wait_until

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
        self.addCleanup(shutil.rmtree, whole.folder, True)
        self.addCleanup(lambda: whole.emberd.process.poll() is None and whole.stop())
        return whole

    def test_emberd_answers_openai_clients(self):
        w = self.whole()
        gateway_pid = w.serving()["pid"]
        model, = w.get("/v1/models")[2]["data"]  # before anybody has asked it
        self.assertEqual((model["id"], model["max_model_len"]), ("ember-tiny", 2048))
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
        w.complete(STORY, max_tokens=1, no_such_field=1)  # a warning, and not why it ends
        wait_until(lambda: "no_such_field" in w.emberd.text(), "it warns")
        os.kill(before["pid"], signal.SIGKILL)
        # Asked at once: the connection waits in the socket that emberd holds.
        self.assertEqual(w.complete(STORY, max_tokens=8)["choices"], text)
        after = w.serving()
        self.assertIn('error="killed by signal 9 (Killed)"', w.emberd.text())
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

    def test_options_of_several_words(self):
        w = self.whole('--gateway-options=--max-queue=7  "--per-model=ember-tiny min=1 max=2" '
                       '--log-level=debug')
        w.serving()
        wait_until(lambda: w.metric("ember_instances", 'warmth="hot"') == 1, "min is obeyed")

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
        self.assertEqual(w.emberd.process.wait(60), 0)
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

    def test_no_list_of_models_before_emberd_has_answered(self):
        folder = tempfile.mkdtemp(prefix="ember-gw-")
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        alone = gateway.Gateway(folder, "/nowhere/emberd.sock")
        try:
            for path in ("/v1/models", "/v1/models/ember-tiny"):
                status, headers, body = alone.get(path)
                self.assertEqual((status, body["error"]["code"]), (503, "emberd_unavailable"))
                self.assertIn("Retry-After", dict(headers))
        finally:
            alone.stop()

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

    # libevent tells of an encrypted write later in the loop. Where that was taken for the write of
    # a reply's end, the end was never sent; handshakes meanwhile make turns of the loop long.

    def among_handshakes(self, calls):
        done = threading.Event()

        def shake_hands():
            while not done.is_set():
                self.g.get("/ping")
        threads = [threading.Thread(target=shake_hands) for _ in range(6)]
        for t in threads:
            t.start()
        try:
            together(calls)
        finally:
            done.set()
            for t in threads:
                t.join()

    def streams_end(self, n, headers):
        c = self.g.connect()
        for _ in range(n):
            c.request("POST", "/v1/completions", json.dumps(
                {"prompt": STORY, "max_tokens": 3, "stream": True}), headers)
            self.assertEqual(c.getresponse().read()[-14:], b"data: [DONE]\n\n")
        c.close()

    def test_streams_of_kept_connections_end(self):
        self.among_handshakes([lambda: self.streams_end(80, {})] * 6)

    def test_streams_that_close_their_connection_end(self):
        self.among_handshakes([lambda: self.streams_end(40, {"Connection": "close"})] * 6)

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
            s.settimeout(60)
            try:
                self.assertNotIn(b"HTTP/", s.recv(4096))
            except ConnectionError:
                pass

    def test_limits(self):
        c = self.g.connect()
        c.request("GET", "/ping")
        c.getresponse().read()
        for _ in range(2):  # kept alive, then on a new connection
            c.request("POST", "/v1/completions", b"x" * 100000)
            r = c.getresponse()
            self.assertEqual((r.status, json.loads(r.read())["error"]["code"]),
                             (413, "request_too_large"))
        c.close()

    def test_a_client_that_drips_is_dropped(self):
        with self.g.tls.wrap_socket(socket.create_connection(("127.0.0.1", self.g.port))) as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
            drip(s, b"A: b\r\n")
        self.assertEqual(self.g.get("/ping")[0], 200)

    def test_a_slow_reader_is_cut(self):
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", self.g.port))
        with self.g.tls.wrap_socket(s) as t:
            body = json.dumps({"prompt": STORY, "max_tokens": 1900, "ignore_eos": True,
                               "stream": True, "logprobs": 20, "n": 4})
            t.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
                      f"{len(body)}\r\n\r\n{body}".encode())
            wait_until(lambda: "its reader is too slow" in self.g.text(), "it is cut")
        wait_until(lambda: self.g.metric("vllm:num_requests_running") == 0, "nothing runs")

    def test_a_client_that_leaves(self):
        c = self.g.connect()
        c.request("POST", "/v1/completions", json.dumps(
            {"prompt": STORY, "max_tokens": 1900, "ignore_eos": True, "stream": True}))
        c.getresponse().readline()
        c.sock.shutdown(socket.SHUT_RDWR)
        c.close()
        wait_until(lambda: self.g.metric("vllm:num_requests_running") == 0, "it is given up")

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

    def test_a_stream_stays_encrypted_when_a_reload_ends_tls(self):
        config = f"{self.folder}/gateway.conf"
        with open(config, "w") as f:
            f.write(f"[http]\ntls_certificate = {self.cert}\ntls_key = {self.key}\n")
        stack = Stack()
        self.addCleanup(stack.stop)
        stack.gateway.stop()
        g = stack.gateway = gateway.Gateway(stack.folder, stack.emberd.socket, f"--config={config}")
        g.tls = self.g.tls
        chunks = g.stream("/v1/completions", prompt=STORY, temperature=0, max_tokens=300,
                          ignore_eos=True)
        next(chunks)
        with open(config, "w") as f:
            f.write("")
        g.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "configuration reloaded" in g.text(), "it is read")
        self.assertEqual(list(chunks)[-1], "[DONE]")
        g.tls = None
        self.assertEqual(g.get("/ping")[0], 200)

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
                                  text=True, timeout=60)
            self.assertEqual(done.returncode, 1)
            self.assertIn(text, done.stderr)


class Fleet(unittest.TestCase):
    """How many instances there are: the rules of scheduler/scale.h in the running gateway."""

    def stack(self, *options, **more):
        stack = Stack(*options, **more)
        self.addCleanup(stack.stop)
        return stack

    def test_another_model_under_the_name_is_asked_with_its_own_tokenizer(self):
        """Its folder, or files in it, differ; the weights need not."""
        stack = self.stack(emberd=("--standby=0",))
        g = stack.gateway
        folders = [os.path.join(stack.folder, name) for name in ("one", "two")]

        def ctl(*words):
            subprocess.run([CTL, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           env=dict(os.environ, EMBER_SOCKET=stack.emberd.socket))

        def write_template(folder, text):
            path = os.path.join(folder, "tokenizer_config.json")
            with open(path) as f:
                config = json.load(f)
            config["chat_template"] = "{{ '" + text + "' }}"
            with open(path + ".new", "w") as f:
                json.dump(config, f)
            os.rename(path + ".new", path)

        def swap(folder):
            ctl("unload", "--force", "swapped")
            ctl("load", folder, "--name=swapped")

        def chat():
            """What the model makes of it; 503 is a request that met the swap, to be sent again."""
            for _ in range(5):
                status, _, reply = g.request("POST", "/v1/chat/completions", {
                    "model": "swapped", "temperature": 0, "max_tokens": 12,
                    "messages": [{"role": "user", "content": "Who are you?"}]})
                if status != 503:
                    self.assertEqual(status, 200, reply)
                    return reply["choices"][0]["message"]["content"]
            self.fail(reply)

        def plain(prompt):
            return g.complete(prompt, temperature=0, max_tokens=12)["choices"][0]["text"]

        prompts = ["The king said", "Once upon a time", "She went into the wood"]
        want = [plain(p) for p in prompts]
        self.assertEqual(len(set(want)), 3)
        for folder, prompt in zip(folders, prompts):
            shutil.copytree(gateway.TINY, folder)
            write_template(folder, prompt)
        ctl("load", folders[0], "--name=swapped")
        self.assertEqual(chat(), want[0])
        swap(folders[1])
        self.assertEqual(chat(), want[1])
        swap(folders[0])
        self.assertEqual(chat(), want[0])
        write_template(folders[0], prompts[2])
        swap(folders[0])
        self.assertEqual(chat(), want[2])
        wait_until(lambda: g.text().count("model forgotten") == 3, "those before are forgotten")
        # The same files again: nothing has changed, and nobody is sent away.
        swap(folders[0])
        self.assertEqual(chat(), want[2])
        self.assertEqual(g.text().count("model replaced"), 3)

    def test_a_pack_is_served_with_the_tokenizer_of_its_checkpoint(self):
        """Of the folder that it was made from; when that has gone, of the folder it lies in."""
        stack = self.stack(emberd=("--standby=0",))
        g = stack.gateway
        want = g.complete(STORY, max_tokens=8, temperature=0)["choices"]
        made_from, moved_to = (os.path.join(stack.folder, name) for name in ("made_from", "moved_to"))
        shutil.copytree(gateway.TINY, made_from)
        pack = os.path.join(stack.folder, "tiny.pack")

        def ctl(*words):
            subprocess.run([CTL, *words], check=True, stdout=subprocess.DEVNULL,
                           env=dict(os.environ, EMBER_SOCKET=stack.emberd.socket))

        def length(name):
            return {m["id"]: m["max_model_len"] for m in g.get("/v1/models")[2]["data"]}[name]

        ctl("pack", made_from, "-o", pack)
        ctl("load", pack, "--name=packed")
        self.assertEqual(g.complete(STORY, model="packed", max_tokens=8, temperature=0)["choices"], want)
        os.mkdir(moved_to)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.move(os.path.join(made_from, name), moved_to)
        shutil.rmtree(made_from)
        shutil.move(pack, moved_to)
        ctl("load", os.path.join(moved_to, "tiny.pack"), "--name=moved")
        self.assertEqual(g.complete(STORY, model="moved", max_tokens=8, temperature=0)["choices"], want)
        self.assertEqual(length("moved"), length("ember-tiny"))

    def test_what_will_never_fit_is_refused_at_once(self):
        """Instead of waiting for room until queue_timeout."""
        def ask(g, name):
            status, _, reply = g.request("POST", "/v1/completions", {"model": name, "prompt": "x"})
            self.assertEqual((status, reply["error"]["code"]), (503, "model_unavailable"))
            self.assertRegex(reply["error"]["message"], "needs .* MiB; the budget is .*memory_limit")

        ask(self.stack("--queue-timeout=10m", emberd=("--memory-limit=1MiB",)).gateway, "ember-tiny")
        stack = self.stack("--queue-timeout=10m", emberd=("--standby=0", "--memory-limit=100MiB"))
        # It fits beside the weights (13 MiB), but not with what else an instance has.
        subprocess.run([CTL, "load", gateway.TINY, "--name=wide", "--kv-bytes=85MiB"], check=True,
                       stdout=subprocess.DEVNULL, env=dict(os.environ, EMBER_SOCKET=stack.emberd.socket))
        ask(stack.gateway, "wide")
        # The name is free for one that fits.
        stack.gateway.complete(STORY, max_tokens=4)

    def test_models_that_come_and_go_leave_nothing(self):
        stack = self.stack(emberd=("--standby=0",))
        g = stack.gateway

        def ctl(*words):
            subprocess.run([CTL, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           env=dict(os.environ, EMBER_SOCKET=stack.emberd.socket))

        def labels():
            return {line.split('model_name="')[1].split('"')[0]
                    for line in g.get("/metrics")[2].decode().splitlines() if 'model_name="' in line}

        def come_and_go(names):
            for name in names:
                ctl("load", gateway.TINY, f"--name={name}")
                self.assertEqual(g.complete(STORY, model=name, max_tokens=4)["usage"]["completion_tokens"], 4)
            self.assertLessEqual(set(names), labels())
            for name in names:
                ctl("unload", "--force", name)  # its memory, then its name
                ctl("unload", name)
            wait_until(lambda: not labels() & set(names), "they are forgotten")
            status, _, reply = g.request("POST", "/v1/completions", {"model": names[0], "prompt": "x"})
            self.assertEqual((status, reply["error"]["code"]), (404, "model_not_found"))

        want = g.complete(STORY, max_tokens=4)["choices"]
        names = [f"m{i}" for i in range(4)]
        come_and_go(names)
        fds, before = g.fds(), (len(g.get("/v1/models")[2]["data"]), labels())
        rss = g.rss()
        for _ in range(3):
            come_and_go(names)
        self.assertEqual((len(g.get("/v1/models")[2]["data"]), labels()), before)
        wait_until(lambda: g.fds() <= fds, "descriptors are as before")
        print(f"memory {rss >> 10}, then {g.rss() >> 10} KiB", flush=True)
        if "ASAN_OPTIONS" not in os.environ:  # what is freed waits there
            self.assertLess(g.rss() - rss, 8 << 20)
        self.assertEqual(g.text().count("model forgotten"), 16)
        self.assertEqual(g.complete(STORY, max_tokens=4)["choices"], want)

    @staticmethod
    def leased(stack):
        try:
            return len(stack.leases().splitlines())
        except FileNotFoundError:
            return 0  # none has been noted yet

    def crowd(self, stack, n, tokens):
        """n long requests at once; the most instances that were leased meanwhile."""
        most, done = [0], threading.Event()

        def watch():
            while not done.is_set():
                most[0] = max(most[0], self.leased(stack))
                time.sleep(0.01)
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            texts = together([lambda i=i: stack.gateway.stream_text(
                f"{STORY} {i}", max_tokens=tokens, ignore_eos=True) for i in range(n)])
        finally:
            done.set()
            watcher.join()
        self.assertEqual({reason for _, reason in texts}, {"length"})
        return most[0]

    def test_out_by_waiting_and_in_by_idling(self):
        stack = self.stack("--max-instances=3", "--wait-target=50ms", "--idle-release=500ms",
                           emberd=("--kv-bytes=1200KiB",))
        most = self.crowd(stack, 48, 60)
        self.assertGreaterEqual(most, 2)
        self.assertLessEqual(most, 3)
        self.assertIn("why=wait", stack.gateway.text())
        wait_until(lambda: self.leased(stack) == 0, "all are given back")
        self.assertNotIn("instance lost", stack.gateway.text())
        # Zero is a normal number.
        self.assertEqual(stack.gateway.complete("x", max_tokens=2)["usage"]
                         ["completion_tokens"], 2)

    def test_out_by_the_backlog_over_the_speed(self):
        stack = self.stack("--max-instances=3", "--wait-target=1h", "--backlog-target=20ms",
                           emberd=("--kv-bytes=1200KiB",))
        stack.gateway.complete(STORY, max_tokens=40, ignore_eos=True)  # the speed is measured
        self.assertEqual(self.leased(stack), 1)
        self.assertGreaterEqual(self.crowd(stack, 48, 40), 2)
        self.assertIn("why=load", stack.gateway.text())

    def test_never_more_than_max(self):
        stack = self.stack("--per-model=ember-tiny max=2, other max=9", "--max-instances=5",
                           "--wait-target=10ms", emberd=("--kv-bytes=1200KiB",))
        self.assertLessEqual(self.crowd(stack, 48, 40), 2)

    def test_min_and_standby_of_a_model(self):
        stack = self.stack("--per-model=ember-tiny min=2 standby=3 idle=200ms",
                           emberd=("--standby=0",))
        wait_until(lambda: self.leased(stack) == 2, "two are leased though nobody asks")
        wait_until(lambda: stack.gateway.metric("ember_instances", 'warmth="warm"') == 3,
                   "and emberd keeps three more")
        stack.gateway.complete("x", max_tokens=2)
        time.sleep(1)
        self.assertEqual(self.leased(stack), 2)

    def test_one_load_for_all_who_wait(self):
        stack = self.stack("--heartbeat=100ms", emberd=("--standby=0",))
        texts = together([lambda i=i: stack.gateway.complete(STORY, max_tokens=4)["choices"][0]
                          ["text"] for i in range(20)])
        self.assertEqual(len(set(texts)), 1)
        self.assertEqual(stack.emberd.text().count("loading model="), 1)
        self.assertEqual(stack.emberd.text().count("leased id="), 1)

    def test_waiting_for_a_cold_model_is_bounded(self):
        """Its stream shows life, and ends by its own deadline with an error that says so."""
        stack = self.stack("--heartbeat=100ms", "--queue-timeout=3s",
                           emberd=("--standby=0", "--memory-limit=150MiB", "--kv-bytes=60MiB"))
        env = dict(os.environ, EMBER_SOCKET=stack.emberd.socket)
        subprocess.run([CTL, "load", gateway.TINY, "--name=held", "--kv-bytes=70MiB"], check=True,
                       stdout=subprocess.DEVNULL, env=env)
        subprocess.run([CTL, "spawn", "held", "--ttl=10m"], check=True, stdout=subprocess.DEVNULL,
                       env=env)  # would fit without it
        chunks = list(stack.gateway.stream("/v1/completions", model="ember-tiny", prompt="x"))
        self.assertGreaterEqual(sum(isinstance(c, str) and c.startswith(":") for c in chunks), 2)
        self.assertEqual(chunks[-1], "[DONE]")
        self.assertIn("error", chunks[-2])
        status, headers, reply = stack.gateway.request("POST", "/v1/completions",
                                                       {"model": "ember-tiny", "prompt": "x"})
        self.assertEqual(status, 503, reply)
        self.assertIn("Retry-After", headers)

    def test_words_that_are_wrong(self):
        for words, text in (("ember-tiny max=0", "max"), ("ember-tiny most=3", "none of min="),
                            ("max=3", "name comes first"), ("a idle=soon", "idle")):
            done = subprocess.run([gateway.GATEWAY, "--listen=127.0.0.1:0", "--state-file=",
                                   "--emberd=/nowhere", f"--per-model={words}"],
                                  stderr=subprocess.PIPE, text=True, timeout=60)
            self.assertEqual(done.returncode, 1)
            self.assertIn(text, done.stderr)


SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*",?)*)\})? '
                    r'(-?[0-9.]+(?:e[+-]?\d+)?|[+-]Inf|NaN)')
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def families(page):
    """{family: (type, {(name, labels): value})} of a page; complains as promtool would."""
    found, last = {}, None
    assert page.endswith("\n")
    for text in page.splitlines():
        if text.startswith("# HELP "):
            name, _, about = text[7:].partition(" ")
            assert about and name not in found, text
            found[name], last = [None, {}], name
        elif text.startswith("# TYPE "):
            name, kind = text[7:].split(" ")
            assert name == last and found[name][0] is None and not found[name][1], text
            assert kind in ("counter", "gauge", "histogram"), text
            found[name][0] = kind
        else:
            match = SAMPLE.fullmatch(text)
            assert match, text
            name = match[1]
            base = re.sub("_(bucket|sum|count)$", "", name) \
                if found[last][0] == "histogram" else name
            assert base == last, text
            assert found[last][0] != "counter" or name.endswith("_total"), text
            key = (name, tuple(sorted(LABEL.findall(match[2] or ""))))
            assert key not in found[last][1], text
            found[last][1][key] = float(match[3])
    for name, (kind, samples) in found.items():
        assert kind, name
        if kind == "histogram":
            check_histogram(name, samples)
    return found


def check_histogram(name, samples):
    series = {}
    for (line, labels), value in samples.items():
        rest = tuple(label for label in labels if label[0] != "le")
        series.setdefault(rest, []).append((line, dict(labels).get("le"), value))
    for rest, lines in series.items():
        buckets = [(float(le), v) for line, le, v in lines if line == name + "_bucket"]
        assert buckets == sorted(buckets), (name, "buckets grow")
        assert [v for _, v in buckets] == sorted(v for _, v in buckets), (name, "and add up")
        assert buckets[-1][0] == float("inf")
        assert [v for line, _, v in lines if line == name + "_count"] == [buckets[-1][1]]
        assert len([1 for line, _, _ in lines if line == name + "_sum"]) == 1


class Metrics(unittest.TestCase):
    MODELS = 10

    def page(self, g):
        _, headers, page = g.get("/metrics")
        self.assertIn("version=0.0.4", headers["Content-Type"])
        found = families(page.decode())
        if prometheus:  # the parser of those who scrape: it names counters without their ending
            read = {f.name: f.type for f in prometheus(page.decode())}
            self.assertEqual(read, {re.sub("_total$", "", name) if kind == "counter" else name: kind
                                    for name, (kind, _) in found.items()})
        return found

    def one(self, found, family, **labels):
        """The value of the only sample with these labels."""
        hits = [v for (name, given), v in found[family][1].items()
                if labels.items() <= dict(given).items() and name in (family, family + "_count")]
        self.assertEqual(len(hits), 1, (family, labels, hits))
        return hits[0]

    def test_families_of_vllm(self):
        stack = Stack()
        self.addCleanup(stack.stop)
        g = stack.gateway
        found = self.page(g)  # zeros before anybody has asked: a scaler needs something to look at
        self.assertEqual(self.one(found, "vllm:num_requests_waiting", model_name="ember-tiny"), 0)
        g.complete(STORY, max_tokens=5)
        g.complete(STORY, max_tokens=5, n=2)
        self.assertEqual(g.request("POST", "/v1/completions", {"prompt": 1})[0], 400)
        found = self.page(g)
        for name, kind in (
                ("num_requests_running", "gauge"), ("num_requests_waiting", "gauge"),
                ("kv_cache_usage_perc", "gauge"), ("cache_config_info", "gauge"),
                ("lora_requests_info", "gauge"), ("num_preemptions_total", "counter"),
                ("prefix_cache_queries_total", "counter"), ("prefix_cache_hits_total", "counter"),
                ("prompt_tokens_total", "counter"), ("generation_tokens_total", "counter"),
                ("gpu_cache_usage_perc", "gauge"),
                ("gpu_prefix_cache_queries_total", "counter"),
                ("gpu_prefix_cache_hits_total", "counter"),
                ("prompt_tokens_cached_total", "counter"),
                ("prompt_tokens_by_source_total", "counter"),
                ("request_max_num_generation_tokens", "histogram"),
                ("request_prefill_kv_computed_tokens", "histogram"),
                ("request_time_per_output_token_seconds", "histogram"),
                ("request_success_total", "counter"), ("engine_sleep_state", "gauge"),
                ("time_to_first_token_seconds", "histogram"),
                ("inter_token_latency_seconds", "histogram"),
                ("time_per_output_token_seconds", "histogram"),
                ("request_queue_time_seconds", "histogram"),
                ("request_inference_time_seconds", "histogram"),
                ("request_prefill_time_seconds", "histogram"),
                ("request_decode_time_seconds", "histogram"),
                ("e2e_request_latency_seconds", "histogram"),
                ("request_prompt_tokens", "histogram"), ("request_generation_tokens", "histogram"),
                ("request_params_n", "histogram"), ("request_params_max_tokens", "histogram"),
                ("iteration_tokens_total", "histogram")):
            self.assertEqual(found["vllm:" + name][0], kind, name)
        model = {"model_name": "ember-tiny", "engine": "0"}
        self.assertEqual(self.one(found, "vllm:generation_tokens_total", **model), 15)
        self.assertEqual(self.one(found, "vllm:request_success_total", finished_reason="length",
                                  **model), 3)
        self.assertEqual(self.one(found, "vllm:time_to_first_token_seconds", **model), 2)
        self.assertEqual(self.one(found, "vllm:inter_token_latency_seconds", **model), 12)
        self.assertEqual(self.one(found, "vllm:request_params_n", **model), 2)
        self.assertEqual(self.one(found, "vllm:cache_config_info", block_size="16", **model), 1)
        self.assertGreater(self.one(found, "vllm:prefix_cache_queries_total", **model), 0)
        prompts = 2 * g.ask("/tokenize", prompt=STORY)["count"]
        self.assertEqual(self.one(found, "vllm:prompt_tokens_total", **model), prompts)
        self.assertEqual(prompts, sum(
            self.one(found, "vllm:prompt_tokens_by_source_total", source=source, **model)
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")))
        self.assertEqual(found["process_cpu_seconds_total"][0], "counter")
        for _ in range(2):  # of the second one all but the last block is cached
            g.complete("and so on " * 40, max_tokens=1)
        self.assertGreaterEqual(self.one(self.page(g), "vllm:prompt_tokens_cached_total", **model), 64)

        def bounds(family):
            return [dict(labels)["le"] for (name, labels) in found[family][1]
                    if name == family + "_bucket"]
        self.assertEqual(bounds("vllm:time_to_first_token_seconds"), (
            "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 "
            "40.0 80.0 160.0 640.0 2560.0 +Inf").split())
        self.assertEqual(bounds("vllm:time_per_output_token_seconds"), (
            "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 "
            "80.0 +Inf").split())
        self.assertEqual(bounds("vllm:e2e_request_latency_seconds"), (
            "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 "
            "960.0 1920.0 7680.0 +Inf").split())
        self.assertEqual(bounds("vllm:request_prompt_tokens"), (
            "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 500.0 1000.0 2000.0 +Inf").split())

    def test_families_of_ember(self):
        folder = tempfile.mkdtemp(prefix="ember-cache-")
        self.addCleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        hurry = f"{folder}/cc"  # kernels are compiled here: soon, not well
        with open(hurry, "w") as f:
            f.write('#!/bin/sh\nexec cc "$@" -O0\n')
        os.chmod(hurry, 0o755)
        stack = Stack(emberd=(f"--cache-dir={folder}/cache", f"--cc={hurry}",
                              "--spawn-timeout=2m"))
        self.addCleanup(stack.stop)
        g = stack.gateway
        g.complete(STORY, max_tokens=5)
        wait_until(lambda: g.metric("ember_instances", 'warmth="warm"') == 1, "a standby")
        os.kill(stack.emberd.pid_of(stack.leases().split()[1]), signal.SIGKILL)
        g.complete(STORY, max_tokens=5)

        def settled():
            found = self.page(g)
            hits = found.get("ember_cache_hits_total", [0, {}])[1]
            return found if len(hits) == 2 and "ember_loads_total" in found else None
        found = wait_until(settled, "emberd's figures have come")
        self.assertGreater(self.one(found, "ember_cache_misses_total", kind="kernel",
                                    cause="absent"), 0)
        self.assertGreater(self.one(found, "ember_cache_misses_total", kind="graph",
                                    cause="absent"), 0)
        self.assertGreater(self.one(found, "ember_cache_hits_total", kind="graph"), 0)
        self.assertEqual(self.one(found, "ember_loads_total"), 1)
        self.assertEqual(self.one(found, "ember_failovers_total"), 1)
        self.assertGreater(self.one(found, "ember_resident_bytes", tier="weights"), 10 << 20)
        self.assertGreater(self.one(found, "ember_resident_bytes", tier="instances"), 1 << 20)
        self.assertEqual(self.one(found, "ember_spawn_seconds", **{"from": "cold"}), 1)
        self.assertEqual(self.one(found, "ember_spawn_seconds", **{"from": "warm"}), 1)
        for phase in ("load", "exec", "attach", "kernels", "graphs", "canary", "grant"):
            self.assertGreaterEqual(self.one(found, "ember_spawn_phase_seconds", phase=phase), 1)
        self.assertEqual(self.one(found, "ember_instances", warmth="hot"), 1)

    def test_cost_of_a_scrape(self):
        """Printed, not asserted: CPU time of the gateway for each page, HTTP included."""
        stack = Stack(emberd=("--standby=0",))
        self.addCleanup(stack.stop)
        g = stack.gateway
        names = ["ember-tiny"] + [f"m{i}" for i in range(1, self.MODELS)]
        for name in names[1:]:
            subprocess.run([CTL, "load", gateway.TINY, f"--name={name}"], check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           env=dict(os.environ, EMBER_SOCKET=stack.emberd.socket))
        for name in names:
            g.ask("/tokenize", model=name, prompt="x")
        for name in names[:2]:
            g.complete(STORY, model=name, max_tokens=20)
        found = self.page(g)
        self.assertEqual(len(found["vllm:num_requests_running"][1]), self.MODELS)

        def cpu_ns():
            with open(f"/proc/{g.pid}/schedstat") as f:
                return int(f.read().split()[0])
        c = g.connect()
        sizes, spent = [], []
        for _ in range(100):
            before = cpu_ns()
            c.request("GET", "/metrics")
            sizes.append(len(c.getresponse().read()))
            spent.append(cpu_ns() - before)
        c.close()
        spent.sort()
        print(f"a scrape of {self.MODELS} models: {sizes[-1]} bytes, {spent[50] / 1e3:.0f} us of "
              f"CPU (median of 100; the least {spent[0] / 1e3:.0f} us)")


if __name__ == "__main__":
    unittest.main(verbosity=2)
