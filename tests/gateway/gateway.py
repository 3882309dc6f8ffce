# SPDX-License-Identifier: Apache-2.0
"""Runs emberd and ember-gateway for black-box tests, and a small HTTP client for them."""
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import threading
import time

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TINY = os.path.join(SOURCE, "models", "ember-tiny")
EMBERD = os.environ.get("EMBERD", os.path.join(SOURCE, "build", "daemon", "emberd"))
GATEWAY = os.environ.get("GATEWAY", os.path.join(os.path.dirname(EMBERD), "ember-gateway"))
CACHE = os.environ.get("EMBER_TEST_CACHE")  # kernels and graphs kept between tests

with open(f"{TINY}/expected_text.json") as f:
    CASES = json.load(f)["cases"]


# Two answers that are drawn, by everything that has a say in it, with every figure.
DRAWN = {"temperature": 0.9, "n": 2, "max_tokens": 24, "top_k": 40, "top_p": 0.95, "min_p": 0.01,
         "repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2,
         "logit_bias": {"300": 2}, "logprobs": 2, "prompt_logprobs": 2, "return_token_ids": True,
         "ignore_eos": True}


def wait_until(condition, what, seconds=60):
    """An event is waited for, however long the machine takes; only what never comes fails."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds} s: {what}")


class Process:
    """A program with its log in a file."""

    def __init__(self, command, log_path, env=None):
        self.log_path = log_path
        environment = dict(os.environ, **(env or {}))
        for unwanted in ("NOTIFY_SOCKET", "EMBER_SOCKET"):
            environment.pop(unwanted, None)
        with open(log_path, "ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL,
                                            env=environment)
        self.pid = self.process.pid

    def text(self):
        with open(self.log_path, errors="replace") as f:
            return f.read()

    def children(self):
        with open(f"/proc/{self.pid}/task/{self.pid}/children") as f:
            return [int(p) for p in f.read().split()]

    def rss(self):
        with open(f"/proc/{self.pid}/statm") as f:
            return int(f.read().split()[1]) * 4096

    def fds(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def stop(self, sig=signal.SIGTERM, seconds=60):
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"did not end within {seconds} s:\n{self.text()[-3000:]}")
        if "Sanitizer" in self.text():
            raise AssertionError(self.text()[-5000:])
        return code


class Emberd(Process):
    def __init__(self, folder, *options, env=None, gateway="--no-gateway"):
        self.socket = f"{folder}/emberd.sock"
        super().__init__([EMBERD, f"--socket={self.socket}", f"--runtime-dir={folder}/run",
                          f"--cache-dir={CACHE or folder + '/cache'}", f"--default-model={TINY}",
                          "--spawn-timeout=5m", gateway, *options], f"{folder}/emberd.log", env)

    def instances(self):
        """Their pids: children of emberd that are instances."""
        found = []
        for pid in self.children():
            try:
                with open(f"/proc/{pid}/comm") as f:
                    if f.read().startswith("ember-instance"):
                        found.append(pid)
            except FileNotFoundError:
                pass
        return found

    def pid_of(self, instance):
        return next(int(line.split("pid=")[1].split()[0]) for line in self.text().splitlines()
                    if f"instance ready id={instance} " in line)


class Http:
    """A client of the gateway at self.port; over TLS when self.tls is a context."""

    tls = None

    def connect(self, timeout=120):
        if self.tls:
            return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout,
                                               context=self.tls)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def request(self, method, path, body=None, headers=None, timeout=120):
        """(status, headers, body parsed when it is JSON)"""
        c = self.connect(timeout)
        if body is not None and not isinstance(body, (str, bytes)):
            body = json.dumps(body)
        c.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
        r = c.getresponse()
        data = r.read()
        c.close()
        if "json" in (r.getheader("Content-Type") or ""):
            data = json.loads(data)
        return r.status, r.headers, data

    def get(self, path, **more):
        return self.request("GET", path, **more)

    def ask(self, path, **body):
        """The object of a request that succeeds."""
        status, _, reply = self.request("POST", path, {"model": "ember-tiny", **body})
        assert status == 200, (status, reply)
        return reply

    def complete(self, prompt, **body):
        return self.ask("/v1/completions", prompt=prompt, **{"temperature": 0, **body})

    def chat(self, text, **body):
        return self.ask("/v1/chat/completions", messages=[{"role": "user", "content": text}],
                        **{"temperature": 0, **body})

    def stream(self, path, **body):
        """Yields the parsed chunks of a stream, then "[DONE]"; comments as strings with ':'."""
        c = self.connect()
        try:
            c.request("POST", path, json.dumps({"model": "ember-tiny", "stream": True, **body}),
                      {"Content-Type": "application/json"})
            with c.getresponse() as r:
                if r.status != 200:
                    raise AssertionError((r.status, r.read()))
                assert r.getheader("Content-Type").startswith("text/event-stream")
                for line in r:
                    line = line.decode().rstrip("\r\n")
                    if line.startswith("data: "):
                        data = line[6:]
                        yield data if data == "[DONE]" else json.loads(data)
                    elif line:
                        yield line
        finally:
            c.close()

    def stream_text(self, prompt, index=0, **body):
        """Text and finish_reason of a streamed completion."""
        text, reason, done = "", None, False
        for chunk in self.stream("/v1/completions", prompt=prompt, **{"temperature": 0, **body}):
            if chunk == "[DONE]":
                done = True
            elif isinstance(chunk, dict):
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    if choice["index"] == index:
                        text += choice["text"]
                        reason = choice["finish_reason"] or reason
        assert done, "the stream ended without [DONE]"
        return text, reason

    def metric(self, name, labels=""):
        """The value of a metric's first line that has the labels."""
        _, _, data = self.get("/metrics")
        for line in data.decode().splitlines():
            if line.startswith(name + "{") and labels in line:
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name} {labels}")


class Gateway(Process, Http):
    def __init__(self, folder, socket, *options, env=None):
        before = os.path.getsize(f"{folder}/gateway.log") \
            if os.path.exists(f"{folder}/gateway.log") else 0
        for option in options:
            if option.startswith("--tls-certificate="):
                self.tls = ssl.create_default_context(cafile=option.partition("=")[2])
                self.tls.check_hostname = False
        super().__init__([GATEWAY, f"--emberd={socket}", "--listen=127.0.0.1:0",
                          f"--state-file={folder}/leases",
                          f"--cache-dir={CACHE or folder + '/cache'}", "--log-level=debug", *options],
                         f"{folder}/gateway.log", env)

        def port():
            if self.process.poll() is not None:
                raise AssertionError(f"the gateway has ended:\n{self.text()[-3000:]}")
            for line in self.text()[before:].splitlines():
                if ": ready listen=" in line:
                    return int(line.rsplit("port=", 1)[1])
            return None
        self.port = wait_until(port, "the gateway listens")


class Stack:
    """emberd and a gateway in a folder of their own."""

    def __init__(self, *options, emberd=(), env=None, emberd_env=None):
        self.folder = tempfile.mkdtemp(prefix="ember-gw-")
        self.env = env
        self.emberd = Emberd(self.folder, *emberd, env=emberd_env)
        wait_until(lambda: os.path.exists(self.emberd.socket), "emberd listens")
        self.gateway = Gateway(self.folder, self.emberd.socket, *options, env=env)
        self.settle()

    def settle(self):
        wait_until(lambda: self.gateway.get("/health")[0] == 200, "the gateway is healthy")

    def leases(self):
        with open(f"{self.folder}/leases") as f:
            return f.read()

    def another(self, *options):
        """A gateway in the place of the one that has ended."""
        self.gateway = Gateway(self.folder, self.emberd.socket, *options, env=self.env)
        self.settle()
        return self.gateway

    def stop(self):
        try:
            self.gateway.stop()
        finally:
            self.emberd.stop()
            shutil.rmtree(self.folder, ignore_errors=True)


def drip(s, piece):
    """Sends the piece again and again until the connection is ended."""
    until = time.monotonic() + 60
    try:
        while time.monotonic() < until:
            s.sendall(piece)
            time.sleep(0.1)
    except OSError:
        return
    raise AssertionError("it is still listened to")


def holds(server, client):
    """Whether the gateway has a descriptor of its end of the client's connection."""
    ends = f"{server.port:04X}", f"{client.getsockname()[1]:04X}"
    with open(f"/proc/{server.pid}/net/tcp") as f:
        rows = [line.split() for line in f][1:]
    return any((row[1].split(":")[1], row[2].split(":")[1]) == ends and row[9] != "0" for row in rows)


def together(calls):
    """Runs the functions at once, each in a thread; returns their results, raises their errors."""
    results, errors = [None] * len(calls), []

    def one(i, call):
        try:
            results[i] = call()
        except BaseException as e:  # noqa: B902: told to the caller
            errors.append(e)
    threads = [threading.Thread(target=one, args=(i, c)) for i, c in enumerate(calls)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results
