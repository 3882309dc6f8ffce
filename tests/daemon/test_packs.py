# SPDX-License-Identifier: Apache-2.0
"""Packs that emberd writes in the background: when, by whom, and what happens when that is disturbed."""
import os
import shutil
import signal
import tempfile
import unittest

import harness
from driver import CASES, Real
from harness import TINY, alive, name_of

AWQ = os.path.join(harness.SOURCE, "tests", "goldens", "qwen3-awq")


class Packs(Real):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="ember-packs-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.packs = os.path.join(self.folder, "cache", "packs")

    def daemon(self, *options, **more):
        return super().daemon("--standby=0", *options, folder=self.folder, **more)

    def names(self):
        return sorted(os.listdir(self.packs)) if os.path.isdir(self.packs) else []

    def written(self, d, n=1):
        d.wait_until(lambda: d.client.GetStatus().packs == n, f"{n} packs written")
        d.wait_until(lambda: not d.children(), "nothing runs any more")

    def serves(self, d):
        r = d.client.SpawnInstance()
        self.assertEqual(self.driver(r).case(CASES[0]), CASES[0]["greedy_ids"])
        d.client.StopInstance(id=r.instance.id)

    def test_a_load_that_converts_is_spared_the_next_time(self):
        d = self.daemon("--default-model=")
        first = d.load(AWQ)[-1].model
        self.assertFalse(first.from_pack)
        self.written(d)
        self.assertEqual(len(self.names()), 1)
        self.assertRegex(self.names()[0], r"^qwen3-awq-[0-9a-f]{16}\.pack$")
        d.stop()
        d = self.daemon("--default-model=")
        second = d.load(AWQ)[-1].model
        self.assertTrue(second.from_pack)
        self.assertEqual(second.digest, first.digest)
        self.assertEqual(d.client.GetStatus().packs, 0)

    def test_a_quantised_load_is_kept_under_its_own_name(self):
        d = self.daemon("--default-model=")
        first = list(d.client.LoadModel(path=TINY, quant="q8"))[-1].model
        self.written(d)
        d.client.UnloadModel(name="ember-tiny")
        second = list(d.client.LoadModel(path=TINY, quant="q8"))[-1].model
        self.assertTrue(second.from_pack)
        self.assertEqual(second.digest, first.digest)
        d.client.UnloadModel(name="ember-tiny")
        third = list(d.client.LoadModel(path=TINY, quant="none"))[-1].model
        self.assertFalse(third.from_pack)

    def test_plain_copies_have_packs_only_when_asked_for(self):
        d = self.daemon()
        d.load()
        self.serves(d)
        self.assertEqual(d.client.GetStatus().packs, 0)
        d.stop()
        self.assertEqual(self.names(), [])
        d = self.daemon("--packs=always")
        d.load()
        self.written(d)
        self.assertEqual(len(self.names()), 1)
        d.stop()
        d = self.daemon()
        self.assertTrue(d.load()[-1].model.from_pack)
        self.serves(d)

    def test_never(self):
        d = self.daemon("--packs=never", "--default-model=")
        d.load(AWQ)
        d.wait_until(lambda: not d.children(), "the loader has gone")
        self.assertEqual(self.names(), [])

    def test_killed_while_it_is_written(self):
        d = self.daemon("--packs=always", env={"EMBER_FAULT": "pack-write:9=kill"})
        d.load()
        d.wait_until(lambda: "pack not written" in d.text(), "it is told")
        self.assertEqual([n.endswith(".part") for n in self.names()], [True])
        self.serves(d)
        d.stop()
        d = self.daemon("--packs=always")
        d.load()
        self.written(d)
        self.assertEqual([n.endswith(".pack") for n in self.names()], [True])
        d.client.UnloadModel(name="ember-tiny")
        self.assertTrue(d.load()[-1].model.from_pack)
        self.serves(d)

    def test_a_full_disk(self):
        d = self.daemon("--packs=always", env={"EMBER_FAULT": "pack-write:9"})
        d.load()
        d.wait_until(lambda: "No space left" in d.text(), "it is told")
        self.assertEqual(self.names(), [])
        self.serves(d)

    def test_unloaded_while_it_is_written(self):
        d = self.daemon("--packs=always", "--packs-rate=1MiB")
        d.load()
        d.wait_until(lambda: any(n.endswith(".part") for n in self.names()), "it is being written")
        packer = [p for p in d.children() if name_of(p) == "ember-loader"]
        d.client.UnloadModel(name="ember-tiny")
        self.assertFalse(any(alive(p) for p in packer))
        self.assertEqual(d.client.GetStatus().memory_weights, 0)
        self.assertTrue(d.load()[-1].model.weights_bytes > 0)
        self.serves(d)

    def test_stop_does_not_wait_for_it(self):
        d = self.daemon("--packs=always", "--packs-rate=1MiB")
        d.load()
        d.wait_until(lambda: any(n.endswith(".part") for n in self.names()), "it is being written")
        self.assertEqual(d.stop(signal.SIGTERM), 0)

    def test_a_damaged_pack_is_made_good_and_written_again(self):
        d = self.daemon("--packs=always")
        d.load()
        self.written(d)
        d.stop()
        path = os.path.join(self.packs, self.names()[0])
        with open(path, "r+b") as f:
            f.seek(6 << 20)
            f.write(b"damage")
        d = self.daemon()
        d.load()
        self.assertIn("made again from", d.text())
        self.written(d)
        self.serves(d)
        d.client.UnloadModel(name="ember-tiny", force=True)
        d.load()
        self.assertEqual(d.text().count("made again from"), 1)

    def test_the_limit(self):
        d = self.daemon("--packs=always", "--packs-limit=4MiB")
        d.load()
        d.wait_until(lambda: "packs_limit" in d.text(), "it is told")
        self.serves(d)
        self.assertEqual(self.names(), [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
