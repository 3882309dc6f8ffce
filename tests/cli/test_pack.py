# SPDX-License-Identifier: Apache-2.0
"""Packs as a person uses them: written, looked through, loaded, damaged, killed in the middle, without room."""
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from test_cli import ANSWER, QUESTION, TINY, Daemon, ctl  # noqa: E402

EMBERCTL = os.environ["EMBERCTL"]
HEAD = 4096 * 256  # ember-tiny's weights by its config.json
ALL_MATRICES = HEAD + 8 * 256 * ((4 + 2 + 2) * 64 + 4 * 64 + 3 * 704)


class Packs(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="ember-pack-")
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)
        self.model = os.path.join(self.dir, "tiny")
        shutil.copytree(TINY, self.model)
        self.pack = self.model + ".pack"

    def damage(self, at):
        with open(self.pack, "r+b") as f:
            f.seek(at)
            f.write(b"damage")

    def test_the_same_text_from_a_pack(self):
        ctl("pack", self.model)
        d = Daemon("--default-model=")
        try:
            loaded = d.json("load", self.pack)
            self.assertEqual(loaded["name"], "tiny")
            self.assertEqual(d.text("-m", "tiny", QUESTION), ANSWER)
            digest = loaded["digest"]
            d.ctl("unload", "tiny")
            d.ctl("unload", "tiny", check=False)
            self.assertEqual(d.json("load", self.model)["digest"], digest)
        finally:
            d.end()

    def test_a_pack_that_was_moved_has_its_tokenizer_beside_it(self):
        ctl("pack", self.model)
        other = os.path.join(self.dir, "other")
        os.rename(self.model, other)
        moved = os.path.join(other, "moved.pack")
        os.rename(self.pack, moved)
        d = Daemon("--default-model=")
        try:
            d.ctl("load", moved)
            self.assertEqual(d.text("-m", "moved", QUESTION), ANSWER)
        finally:
            d.end()

    def test_a_pack_says_how_it_was_quantised(self):
        ctl("pack", self.model, "--quant=q8", "--no-perplexity")
        d = Daemon("--default-model=")
        try:
            self.assertEqual(d.json("load", self.pack)["quant"], "q8")
            self.assertEqual([m["quant"] for m in d.json("models")], ["q8"])
        finally:
            d.end()

    def test_a_pack_says_how_many_weights_have_how_many_bits(self):
        # All of ember-tiny's matrices are small, but for the head.
        report = json.loads(ctl("pack", self.model, "--quant=q4", "--no-perplexity", "--json").stdout)
        self.assertEqual((report["q8_weights"], report["q4_weights"]), (ALL_MATRICES, 0))
        report = json.loads(ctl("pack", self.model, "--quant=q4", "--quant-for=^layers=q4", "--no-perplexity",
                                "--json").stdout)
        self.assertEqual((report["q8_weights"], report["q4_weights"]), (HEAD, ALL_MATRICES - HEAD))

    def test_damage_is_named_and_made_good_from_the_checkpoint(self):
        ctl("pack", self.model, "-o", self.pack)
        row = json.loads(ctl("pack", "verify", self.pack, "--json").stdout)[0]
        self.assertEqual(row["result"], "whole")
        self.damage(5 << 20)
        run = ctl("pack", "verify", self.pack, "--json", check=False)
        self.assertEqual(run.returncode, 1)
        row = json.loads(run.stdout)[0]
        self.assertEqual(row["result"], "damaged")
        self.assertRegex(row["damage"][0], r"segment 1 of 7 \(.*layers")
        run = ctl("pack", "verify", self.pack + ".nowhere", "--json", check=False)
        self.assertEqual((run.returncode, json.loads(run.stdout)[0]["result"]), (4, "unread"))
        run = ctl("perplexity", "/nowhere", check=False)
        self.assertEqual(run.stderr, "emberctl: /nowhere: No such file or directory\n")
        d = Daemon("--default-model=")
        try:
            d.ctl("load", self.pack)
            self.assertEqual(d.text("-m", "tiny", QUESTION), ANSWER)
            d.log.seek(0)
            self.assertIn("made again from", d.log.read())
        finally:
            d.end()

    def test_damage_without_the_checkpoint_fails_naming_it(self):
        ctl("pack", self.model)
        self.damage(5 << 20)
        os.unlink(os.path.join(self.model, "model.safetensors"))
        d = Daemon("--default-model=")
        try:
            run = d.ctl("load", self.pack, check=False)
            self.assertEqual(run.returncode, 1)
            self.assertIn("segment 1 of 7", run.stderr)
            self.assertIn("cannot be made again", run.stderr)
        finally:
            d.end()

    def test_killed_and_asked_again(self):
        for n in (3, 5, 8):
            env = dict(os.environ, EMBER_FAULT=f"pack-write:{n}=kill")
            run = ctl("pack", self.model, env=env, check=False)
            self.assertEqual(run.returncode, -signal.SIGKILL)
            self.assertFalse(os.path.exists(self.pack))
        ctl("pack", self.model)
        ctl("pack", "verify", self.pack)
        self.assertEqual(os.listdir(self.dir).count("tiny.pack.part"), 0)

    def test_no_room(self):
        run = subprocess.run(
            [EMBERCTL, "pack", self.model], capture_output=True, text=True, timeout=60,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (15 << 20, 15 << 20)))
        self.assertEqual(run.returncode, 5, run.stderr)
        self.assertIn("No space left", run.stderr)
        self.assertEqual(sorted(os.listdir(self.dir)), ["tiny"])

    def test_not_a_pack(self):
        run = ctl("pack", "verify", os.path.join(self.model, "config.json"), check=False)
        self.assertEqual(run.returncode, 1)
        self.assertIn("config.json", run.stderr)
        empty = os.path.join(self.dir, "empty.pack")
        open(empty, "w").close()
        run = ctl("pack", empty, check=False)
        self.assertEqual(run.returncode, 1, run.stderr)
        self.assertIn("empty.pack: neither a checkpoint's folder nor a pack", run.stderr)


if __name__ == "__main__":
    unittest.main()
