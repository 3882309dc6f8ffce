# SPDX-License-Identifier: Apache-2.0
"""A driver of instances, and the base of tests over the real daemon."""
import json
import socket
import struct

import harness
from harness import TINY, step

with open(f"{TINY}/expected_text.json") as f:
    CASES = json.load(f)["cases"]

made = []  # sockets of drivers, for tearDown


class Driver:
    """The holder of a lease: Hello, then greedy steps of one sequence."""

    def __init__(self, spawned, token=None):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(300)
        self.socket.connect(spawned.instance.socket)
        made.append(self.socket)
        self.buffer = b""
        hello = step.Hello(protocol=1, lease_token=token or spawned.lease.token)
        self.send(step.DriverFrame(hello=hello))
        self.welcome = self.receive().welcome
        self.steps = 0

    def send(self, frame):
        data = frame.SerializeToString()
        self.socket.sendall(struct.pack("<I", len(data)) + data)

    def receive(self):
        def more(n):
            while len(self.buffer) < n:
                data = self.socket.recv(65536)
                if not data:
                    raise ConnectionError("the instance has closed the connection")
                self.buffer += data
        more(4)
        n = struct.unpack("<I", self.buffer[:4])[0]
        more(4 + n)
        frame = step.InstanceFrame.FromString(self.buffer[4:4 + n])
        self.buffer = self.buffer[4 + n:]
        if frame.WhichOneof("kind") == "fatal":
            raise ConnectionError(frame.fatal.error_text)
        return frame

    def run(self, tokens, position, prompt_len):
        """Runs tokens at position and returns the next one."""
        size = self.welcome.page_size
        pages = list(range((position + len(tokens) + size - 1) // size))
        sequence = step.SequenceStep(id=1, tokens=tokens, position=position, pages=pages,
                                     prompt_len=prompt_len, sample=True)
        self.steps += 1
        self.send(step.DriverFrame(step=step.Step(id=self.steps, sequences=[sequence])))
        result = self.receive().result
        if result.error:
            raise RuntimeError(result.error_text)
        return result.sequences[0].token

    def generate(self, prompt, n, done=()):
        """n greedy tokens behind prompt; `done` are those that another instance has generated."""
        out = list(done)
        token = self.run(prompt + out, 0, len(prompt))
        while True:
            out.append(token)
            if len(out) >= n:
                return out
            token = self.run([token], len(prompt) + len(out) - 1, len(prompt))

    def case(self, case):
        return self.generate(case["prompt_ids"], len(case["greedy_ids"]))


class Real(harness.Case):
    """Tests over the real loader and instances, which compile no kernels unless they are about that."""

    def daemon(self, *options, compile="never", **more):
        return super().daemon(f"--compile={compile}", *options, real=True, **more)

    def driver(self, spawned, token=None):
        return Driver(spawned, token)

    def tearDown(self):
        while made:
            made.pop().close()
