# SPDX-License-Identifier: Apache-2.0
"""What attacks on the real programs share: after each one the daemon still serves, with the right
tokens, and nothing is left over."""
import atexit
import os
import shutil
import tempfile
import time

import harness
from driver import CASES, Driver, made
from harness import grpc

CODE = grpc.StatusCode
GOLDEN = os.path.join(harness.SOURCE, "tests", "goldens", "llama")
Q = "model.layers.0.self_attn.q_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
SANITIZED = "ASAN_OPTIONS" in os.environ  # shadow and quarantine are no memory of emberd's


class Attack(harness.Case):
    warm = None  # a cache with what ember-tiny needs, for what is not about the cache

    @classmethod
    def warm_cache(cls):
        if not Attack.warm:
            Attack.warm = tempfile.mkdtemp(prefix="ember-attack-")
            atexit.register(shutil.rmtree, Attack.warm, True)
            write_text('#!/bin/sh\nexec cc "$@" -O0\n')(cls.hurry())
            os.chmod(cls.hurry(), 0o755)
            d = harness.Daemon("--standby=0", f"--cache-dir={Attack.warm}", f"--cc={cls.hurry()}",
                               real=True)
            d.client.SpawnInstance()
            d.stop()
        return Attack.warm

    @classmethod
    def hurry(cls):
        """A compiler that is in a hurry: the tokens are the same. One for all, since the compiler's
        name is part of a kernel's key."""
        return f"{Attack.warm or cls.warm_cache()}/cc"

    def folder(self):
        path = tempfile.mkdtemp(prefix="ember-attack-")
        self.addCleanup(shutil.rmtree, path, True)
        return path

    def daemon(self, *options, cold=False, **more):
        options = (f"--cc={self.hurry()}", *options)
        if not cold:
            options = (f"--cache-dir={self.warm_cache()}", *options)
        d = super().daemon(*options, real=True, **more)
        self.addCleanup(self.end_drivers)
        return d

    def setUp(self):
        self.begun = time.monotonic()
        self.addCleanup(lambda: print(f"{time.monotonic() - self.begun:.1f} s", end=" "))

    def end_drivers(self):
        while made:
            made.pop().close()

    def serves(self, d, **fields):
        """A fresh instance gives the right tokens."""
        spawned = d.client.SpawnInstance(**fields)
        self.assertEqual(Driver(spawned).case(CASES[0]), CASES[0]["greedy_ids"])
        d.client.StopInstance(id=spawned.instance.id)
        return spawned

    def nothing_left(self, d, fds=None):
        """Nothing is charged, nothing runs, no descriptor is held when nothing is resident."""
        for m in d.client.ListModels().models:
            d.client.UnloadModel(name=m.name, force=True)
        d.wait_until(lambda: not d.children(), "the children are gone")
        s = d.client.GetStatus()
        self.assertEqual((s.memory_weights, s.memory_instances, s.memory_reserved, s.standby,
                          s.leased, s.starting), (0,) * 6)
        self.assertEqual(d.sockets(), [])
        if fds is not None:
            d.wait_until(lambda: len(d.fds()) <= fds, "descriptors are back")


# ---- checkpoints ----


def write_text(text):
    def make(path):
        with open(path, "w") as f:
            f.write(text)
    return make
