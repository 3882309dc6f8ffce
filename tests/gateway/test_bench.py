# SPDX-License-Identifier: Apache-2.0
"""emberctl bench serve goes through and says what it should; what it measures is nobody's test."""
import json
import os
import subprocess
import unittest

EMBERCTL = os.environ["EMBERCTL"]


def bench(*options):
    return subprocess.run([EMBERCTL, "bench", "serve", "tiny", "--output=8", "--prompt=16",
                           "--kv-mib=64", "--settle=0", *options], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=250)


class Bench(unittest.TestCase):
    def test_every_figure_is_there(self):
        done = bench("--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = json.loads(done.stdout)
        for word in ("64 sequences", "512 sequences", "16 streams", "one alone", "streamed token",
                     "idle server", "worst", "same first 1,000", "parked", "1,000 of another",
                     "kill -9", "/metrics"):
            self.assertTrue(any(word in r["what"] for r in rows), word)
        for r in rows:
            if "beyond" not in r["what"] and "before its own" not in r["what"]:  # these are differences
                self.assertGreater(r["value"], 0, r)
            self.assertEqual(r["met"] is None, not r["limit"], r)
        same = next(r for r in rows if "text they had" in r["what"])
        self.assertEqual(same["value"], 32)

    def test_no_such_model(self):
        done = subprocess.run([EMBERCTL, "bench", "serve", "/nowhere"], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=60)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("/nowhere: no such folder", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
